"""From a module to a short list of operations on named values, or a sentence that says why not."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.weight_norm import WeightNorm

from fedbraid_native.errors import Unsupported
from fedbraid_native.ops import Conv2d, ConvMaxPool2d, Detach, MaxPool2d, Op, Shape, Unary, WeightRef

Inputs = Any  # a tensor, or a tuple or dict of tensors, samples first


@dataclass(frozen=True)
class Graph:
    """Operations in the order they run; the first values are the inputs, the last operation's output the model's."""

    shapes: list[Shape]  # of each value, without the batch
    ops: list[Op]
    output: int
    layout: ParamLayout
    constants: Tensor  # numbers that are not trained
    num_inputs: int  # how many of the values are given
    index_bounds: list[
        Tensor | None
    ]  # what an input's numbers must be below, where they are numbers of things
    output_shape: Shape  # of the output, as the model gives it
    unbatched: frozenset[int] = frozenset()  # values made of parameters alone, the same for all samples
    targets: bool = False  # whether they are given too, behind the inputs, and the output is the loss
    ignore_index: int | None = None  # what a target may be besides

    @property
    def vocab_sizes(self) -> list[int | None]:
        """How many different numbers each input may be, where it is of numbers of things."""
        return [None if limit is None else int(limit.min()) for limit in self.index_bounds[: self.num_inputs]]

    @property
    def num_sample_inputs(self) -> int:
        """How many of the values are a sample's own."""
        return self.num_inputs + self.targets

    @cached_property
    def is_batch_dependent(self) -> bool:
        """Whether a sample's output depends on the other samples of its batch."""
        return any(op.is_batch_dependent for op in self.ops)

    @property
    def writes_every_grad_once(self) -> bool:
        """Whether every parameter's gradient is written exactly once: none is spare, tied or used again."""
        if self.unbatched:
            return False
        writers = [op for op in self.ops if op.has_trainable_weights and op.output in self.needs_grad]
        used = [w.offset for op in writers for w in op.weights if w is not None and w.trained]
        return sorted(used) == [s.offset for s in self.layout] and all(op.writes_grad_once for op in writers)

    @cached_property
    def needs_grad(self) -> set[int]:
        """The values that depend on a trained parameter and move the output, and so need a gradient."""
        needed: set[int] = set()
        for op in self.ops:
            if op.is_differentiable and (op.has_trainable_weights or needed.intersection(op.operands)):
                needed.add(op.output)
        seen = {self.output}
        for op in reversed(self.ops):
            if op.is_differentiable and op.output in seen:
                seen.update(op.operands)
        return needed & seen


@dataclass(frozen=True)
class Value:
    """What an operation gave: its number, and the shape in which the model sees a sample of it."""

    id: int
    shape: Shape


@dataclass(frozen=True)
class Constant:
    """A tensor that no sample changes."""

    tensor: Tensor  # as it is for one sample
    trained: bool  # whether it is, or was computed from, what is trained


class Numbering:
    """The places of all samples in their batch, with which each is told to look at its own."""


class Several:
    """What is not one tensor, but gives some when asked for an item."""

    def __getitem__(self, index: int) -> Value:
        raise NotImplementedError

    def whole(self) -> Value:
        """All of it as one tensor."""
        raise Unsupported("what a layer gives besides its output is used as a tensor")


class _StillSeveral(Several):
    """The same, computed without gradients."""

    def __init__(self, builder: Builder, given: Several) -> None:
        self.builder, self.given = builder, given

    def __getitem__(self, index: int) -> Value:
        return self.builder.still(self.given[index])

    def whole(self) -> Value:
        return self.builder.still(self.given.whole())


class ParamSlot(Protocol):
    """One trained tensor's offset in the flat vector of parameters."""

    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...


class ParamLayout(Protocol):
    """The flat vector of parameters: its slots in order, its length, and the slice of running statistics."""

    @property
    def size(self) -> int: ...
    @property
    def buffers(self) -> slice | None: ...
    def __iter__(self) -> Iterator[Any]: ...


def trace(make_root: Callable[[], nn.Sequential], layout: ParamLayout, given: tuple[Inputs, ...]) -> Graph:
    """The graph of a model on inputs shaped like the first sample of `given`.

    `make_root()` makes a module that holds the model as its only child and whose forward takes `given`: the inputs, and
    the targets where the model ends in a loss. Raises Unsupported.
    """
    model = make_root()[0]
    model.train()
    try:
        traced = _followed(make_root, tuple(take(g, [0]) for g in given))
        traced.graph.eliminate_dead_code()
        runs = [_Record(traced).record(*(take(g, [0] * n) for g in given), seed=n) for n in _BATCHES]
    except Unsupported:
        raise
    except Exception as error:
        raise Unsupported(f"the model cannot be traced ({first_line(error)})") from error
    try:
        return Builder(model, layout, runs).build(traced.graph)
    except Unsupported:
        raise
    except Exception as error:  # a call that no lowering expected
        raise Unsupported(f"the model cannot be translated ({first_line(error)})") from error


def _followed(made: Callable[[], nn.Module], given: tuple[Inputs, ...]) -> fx.GraphModule:
    """A module as it was traced twice in a row: the first time may make what later ones find, but no more than that."""
    seen: list[tuple[str, list[Tensor]]] = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        before = torch.get_rng_state()
        for _ in range(3):
            root = made()
            graph = _traced(root, given)
            kept = [t.detach().clone() for n, t in vars(root).items() if n.startswith("_tensor_constant")]
            seen.append((str(graph), kept))
            if not torch.equal(before, torch.get_rng_state()):
                break
            if len(seen) > 1 and _same(*seen[-2:]):
                return _runs(root, graph)
    raise Unsupported("the model or its loss is another each time: it draws numbers, counts or remembers")


def _same(one: tuple[str, list[Tensor]], other: tuple[str, list[Tensor]]) -> bool:
    return one[0] == other[0] and len(one[1]) == len(other[1]) and all(map(torch.equal, one[1], other[1]))


_MADE_LIKE = {
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    "new_zeros",
    "new_ones",
    "new_full",
    "new_tensor",
}
_MADE = (
    torch.zeros,
    torch.ones,
    torch.full,
    torch.eye,
)  # of sizes that are followed; random ones are none of ours
_SHAPES = {
    "getattr", "size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex", "is_contiguous",
    "type", "get_device", "element_size", "is_tensor",
}  # fmt: skip
_LIKE = {"to", "type_as", "expand_as"}
_IN_PLACE = {
    f"{name}_" for name in ("add", "sub", "mul", "div", "clamp", "pow", "neg", "exp", "sqrt", "relu", "tanh")
}
_IN_PLACE |= {"iadd", "isub", "imul", "itruediv", "ipow"}
_BATCHES = (3, 5)  # what differs between the two runs is the batch


def leaves(inputs: Inputs) -> list[Tensor]:
    if isinstance(inputs, Tensor):
        return [inputs]
    return list(inputs.values() if isinstance(inputs, dict) else inputs)


def map_leaves(fn: Callable[[Tensor], Any], inputs: Inputs) -> Any:
    if isinstance(inputs, Tensor):
        return fn(inputs)
    if isinstance(inputs, dict):
        return {key: fn(leaf) for key, leaf in inputs.items()}
    return tuple(map(fn, inputs))


def take(inputs: Inputs, rows: list[int]) -> Inputs:
    """These samples of every leaf."""
    return map_leaves(lambda leaf: leaf[rows], inputs)


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__


class _Tracer(fx.Tracer):
    """Follows loops over the parts that a function gives, where it knows how many they are."""

    proxy_buffer_attributes = True

    def __init__(self, counts: list[int]) -> None:
        super().__init__(autowrap_functions=_MADE)
        self._autowrap_search.append(torch)
        self.counts = iter(counts)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Not where weights are computed: what computes them is followed."""
        if isinstance(m, (parametrize.ParametrizationList, parametrizations._WeightNorm)):
            return False
        computes = parametrize.is_parametrized(m) or any(
            isinstance(hook, WeightNorm) for hook in m._forward_pre_hooks.values()
        )
        if computes and isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)):
            return False
        return super().is_leaf_module(m, module_qualified_name)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        try:
            return super().iter(obj)
        except fx.proxy.TraceError as error:
            count = next(self.counts, None)
            if count is None:
                raise _HowMany(obj.node) from error
            return iter([operator.getitem(obj, k) for k in range(count)])

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Modules that are no part of the model, such as a loss, are what they do."""
        mine = any(m is each for each in self.root.modules())
        return super().call_module(m, forward, args, kwargs) if mine else forward(*args, **kwargs)

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        made: fx.Proxy = super().create_proxy(*args, **kwargs)
        if not torch.is_grad_enabled():
            made.node.meta["still"] = True
        return made


class _HowMany(BaseException):
    """Asked about the parts of what a node gives; nobody on the way may take it for an error."""


def _traced(module: nn.Module, given: tuple[Inputs, ...]) -> fx.Graph:
    """A module as a graph; where a loop asks how many parts there are, a sample tells, and it is followed again."""
    counts: list[int] = []
    while True:
        try:
            return _Tracer(counts).trace(module)
        except _HowMany as asked:
            counts.append(_count(module, asked.args[0], given))


def _runs(module: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph that can run."""
    for node in graph.nodes:
        node.meta.pop("is_wrapped", None)  # or its code would wrap the function for all who trace later
    return fx.GraphModule(module, graph)


def _count(module: nn.Module, node: fx.Node, given: tuple[Inputs, ...]) -> int:
    """Of how many parts the tuple is that a node gives for the sample, by the graph as far as it."""
    before, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for other in node.graph.nodes:
        copied[other] = before.node_copy(other, lambda n: copied[n])
        if other is node:
            break
    before.output(copied[node])
    parts = _Record(_runs(module, before)).record(*given, seed=0)[copied[node]]
    if not isinstance(parts, (tuple, list)):
        raise Unsupported(f"the model goes through {node.name!r} number by number")
    return len(parts)


class _Record(fx.Interpreter):
    """Runs the graph once and keeps what every node gave."""

    def record(self, *given: Inputs, seed: int) -> dict[fx.Node, Any]:
        self.results: dict[fx.Node, Any] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():  # the user's random state stays as it is
            torch.manual_seed(seed)
            self.run(*given)
        return self.results

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.results[n] = result
        return result


class Builder:
    """Goes through the traced nodes and asks `layers` for the operations of each."""

    def __init__(self, module: nn.Module, layout: ParamLayout, runs: list[dict[fx.Node, Any]]) -> None:
        self.modules = {f"0.{name}".rstrip("."): m for name, m in module.named_modules()}
        self.layout, self.runs = layout, runs
        self.known: dict[fx.Node, Any] = {}
        self.shapes: list[Shape] = []
        self.ops: list[Op] = []
        self.limits: list[Tensor | None] = []
        self.counts: list[int] = []  # how many leaves each argument has
        self.skips: dict[int, set[int | None]] = {}  # what an input's numbers may be besides
        self.places: dict[
            int, tuple[int, Tensor]
        ] = {}  # of values that are parts of an input: its, and where
        self.moved: dict[int, tuple[Value, Shape]] = {}  # permuted values: what they were, and the order
        self.masks: set[int] = set()  # values that are comparisons
        self.computed: dict[fx.Node, Value] = {}  # what parameters alone have been made into
        self.shared: set[int] = set()  # values that are the same for all samples
        self._made: dict[int, fx.Node] = {}  # who made a tensor of parameters alone, by its storage
        self._constants: list[Tensor] = []
        self._count = 0
        places = {s.name: s.offset for s in layout}
        named: dict[str, Tensor] = {**dict(module.named_buffers()), **dict(module.named_parameters())}
        self._trained = {named[n].untyped_storage().data_ptr(): (at, named[n]) for n, at in places.items()}

    def build(self, graph: fx.Graph) -> Graph:
        output: Any = None
        for node in graph.nodes:
            if node.op == "placeholder":
                self.known[node] = self._inputs(node)
            elif node.op == "output":
                output = self._of(node.args[0])
            else:
                self.known[node] = self._node(node)
        if not isinstance(output, Value) or not self.ops:
            raise Unsupported("the model's output is not one tensor that a layer made")
        count = self.counts[0]
        ops = _joined(_used(self.ops, output.id), output.id, count)
        constants = torch.cat([c.reshape(-1) for c in self._constants]) if self._constants else torch.zeros(1)
        skips = self.skips.get(count, set())
        return Graph(
            self.shapes, ops, output.id, self.layout, constants, count, self.limits, output.shape, frozenset(self.shared),
            targets=len(self.counts) > 1, ignore_index=next(iter(skips)) if len(skips) == 1 else None,
        )  # fmt: skip

    def _inputs(self, node: fx.Node) -> Any:
        """The first values: one, or several by name or place."""
        given = self.runs[0][node]
        self.counts.append(len(leaves(given)))
        self.limits += [None] * self.counts[-1]
        made = map_leaves(lambda leaf: self.value(tuple(leaf.shape[1:])), given)
        for v, shape in enumerate(self.shapes):
            self.places[v] = (v, torch.arange(math.prod(shape)).view(shape))
        return made

    # What layers ask for --------------------------------------------------------------------------

    def value(self, shape: Shape) -> Value:
        self.shapes.append(tuple(shape))
        return Value(len(self.shapes) - 1, tuple(shape))

    def emit(
        self,
        kind: type[Op],
        inputs: tuple[Value, ...],
        shape: Shape,
        weights: tuple[Tensor | Constant | None, ...] = (),
        **constants: Any,
    ) -> Value:
        """A new operation and what it gives."""
        out = self.value(shape)
        places = tuple(self.place(w) for w in weights)
        self.ops.append(kind(inputs=tuple(v.id for v in inputs), output=out.id, weights=places, **constants))
        return out

    def place(self, tensor: Tensor | Constant | None) -> WeightRef | None:
        """Where a parameter, a view of one, or any constant lies."""
        if tensor is None:
            return None
        constant = tensor if isinstance(tensor, Constant) else Constant(tensor, tensor.requires_grad)
        numbers = constant.tensor.detach()
        found = self._trained.get(numbers.untyped_storage().data_ptr())
        if found is not None and numbers.is_contiguous():
            return WeightRef(found[0] + int(numbers.storage_offset() - found[1].storage_offset()))
        if constant.trained:
            return self._place_of_computed(numbers)
        at = self._count
        self._constants.append(numbers.to(torch.float32).contiguous())
        self._count += numbers.numel()
        return WeightRef(at, trained=False)

    def _place_of_computed(self, numbers: Tensor) -> WeightRef:
        from fedbraid_native import computed

        node = self._made.get(numbers.untyped_storage().data_ptr())
        if node is None or not numbers.is_contiguous():
            raise Unsupported("the model computes with a trained tensor outside a layer")
        return WeightRef(int(numbers.storage_offset()), value=computed.value(self, node).id)

    def came_from(self, made: Value, x: Value, moved: Callable[[Tensor], Tensor]) -> None:
        """Remember which numbers of an input a value is, if the one that it was made from is some."""
        if x.id in self.places:
            given, places = self.places[x.id]
            self.places[made.id] = (given, moved(places.view(x.shape)).reshape(made.shape))

    def limit(self, x: Value, count: int, skip: int | None = None) -> bool:
        """That a value's numbers must be below `count`, or `skip`; whether they are an input's."""
        if x.id not in self.places:
            return False
        given, places = self.places[x.id]
        self.skips.setdefault(given, set()).add(skip)
        known = self.limits[given]
        if known is None:
            known = self.limits[given] = torch.full(self.shapes[given], 2**24)
        known.view(-1)[places.reshape(-1)] = known.view(-1)[places.reshape(-1)].clamp(max=count)
        return True

    # Nodes ----------------------------------------------------------------------------------------

    def _of(self, argument: Any) -> Any:
        """An argument with what is known in place of nodes."""
        return fx.node.map_arg(argument, lambda n: self.known[n])

    def batch(self, node: fx.Node) -> int | None:
        """Which dimension of a result is the batch."""
        return _batch([run[node] for run in self.runs], node.name)

    def shape(self, node: fx.Node) -> Shape:
        """A result's shape without the batch."""
        return self.without_batch([run[node] for run in self.runs], node.name)

    def without_batch(self, results: list[Tensor], what: str = "a result") -> Shape:
        batch, full = _batch(results, what), tuple(results[0].shape)
        if batch is None:
            raise Unsupported(f"{what!r} mixes the samples of a batch")
        return full[:batch] + full[batch + 1 :]

    def _node(self, node: fx.Node) -> Any:
        from fedbraid_native import functions, values

        result = self.runs[0][node]
        given = [self.known[n] for n in node.all_input_nodes]
        if not any(_holds_value(g) for g in given) or self._only_shaped(node):
            return self._constant(node, given)
        if not isinstance(result, (Tensor, tuple, list)) or isinstance(result, torch.Size):
            if any(isinstance(g, Value) for g in given) and _name(node.target) not in _SHAPES:
                raise Unsupported(f"{node.name!r} makes a number of what samples hold")
            return result  # arithmetic on shapes
        args, kwargs = self._of(node.args), self._of(node.kwargs)
        if node.target is operator.getitem and isinstance(args[0], (tuple, list, dict)):
            return args[0][args[1]]
        if node.target is operator.getitem and isinstance(args[0], Several) and isinstance(args[1], int):
            return args[0][args[1]]
        if node.target is not getattr:
            args, kwargs = (_whole(given) for given in (args, kwargs))
        made = functions.apply(values.Call(self, node, result, tuple(args), dict(kwargs)))
        return self._still(made) if "still" in node.meta else made

    def _still(self, made: Any) -> Any:
        """What was computed without gradients."""
        if isinstance(made, (tuple, list)):
            return tuple(map(self._still, made))
        if isinstance(made, Several):
            return _StillSeveral(self, made)
        return self.still(made) if isinstance(made, Value) else made

    def still(self, x: Value) -> Value:
        """A value that is taken for given in the backward pass; an input is anyway."""
        if x.id in self.places or x.id in self.masks:
            return x
        return self.emit(Detach, (x,), x.shape, n=math.prod(x.shape))

    def _only_shaped(self, node: fx.Node) -> bool:
        """Whether a value only tells the shape or type of something that does not depend on it."""
        if node.target in _MADE_LIKE:
            return True
        return node.target in _LIKE and isinstance(self.known[node.all_input_nodes[0]], Constant)

    def _constant(self, node: fx.Node, given: list[Any]) -> Any:
        first = self.runs[0][node]
        if _stops(node) and (node.op == "call_module" or any(map(_holds_trained, given))):
            raise Unsupported(f"{node.name!r} computes with what is trained, and without its gradient")
        if isinstance(first, tuple) and any(map(_holds_trained, given)):
            return tuple(Constant(each, True) if isinstance(each, Tensor) else each for each in first)
        if not isinstance(first, Tensor):
            return first
        layer = self.layer(node) if node.op == "call_module" else nn.Identity()
        if isinstance(layer, nn.Embedding) and len(given) == 1:
            return Constant(_rows(layer.weight, given[0].tensor), layer.weight.requires_grad)
        trained = any(map(_holds_trained, given))
        trained |= any(p.requires_grad for p in (first, *layer.parameters()))
        batch = self.batch(node)
        if batch is not None:  # one for each sample: the same for all of them?
            if all(torch.equal(run[node], torch.arange(len(run[node]))) for run in self.runs):
                return Numbering()
            one = first.narrow(batch, 0, 1)
            if not torch.equal(one.expand_as(first), first):
                raise Unsupported(f"{node.name!r} differs from sample to sample")
            first = one.squeeze(batch)
        elif trained:
            self._remember(node, first)
        again = self.runs[1][node] if batch is None else self.runs[1][node].select(batch, 0)
        if not torch.equal(first, again):
            raise Unsupported(f"{node.name!r} is another each time")
        return Constant(first, trained)

    def _remember(self, node: fx.Node, made: Tensor) -> None:
        """Who made a tensor of parameters alone; views of it are found by its storage."""
        storage = made.untyped_storage().data_ptr()
        if storage in self._trained:
            return
        if storage in self._made and str(getattr(node.target, "__name__", node.target)) in _IN_PLACE:
            raise Unsupported(f"{node.name!r} changes in place what is computed from parameters")
        if made.is_contiguous() and made.storage_offset() == 0:
            self._made.setdefault(storage, node)

    def layer(self, node: fx.Node) -> nn.Module:
        found: nn.Module = self.modules[str(node.target)]
        return found

    def fixed(self, argument: Any) -> bool:
        """Whether an argument is the same for any batch."""
        nodes: list[fx.Node] = []
        fx.node.map_arg(argument, nodes.append)
        return all(isinstance(self.runs[0][n], Tensor) or self.runs[0][n] == self.runs[1][n] for n in nodes)


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _batch(results: list[Tensor], what: str) -> int | None:
    """The dimension in which the two runs differ."""
    first, second = (tuple(result.shape) for result in results)
    differ = [d for d, (a, b) in enumerate(zip(first, second)) if a != b]
    if len(differ) > 1 or (differ and first[differ[0]] != _BATCHES[0]):
        raise Unsupported(f"{what!r} mixes the samples of a batch")
    return differ[0] if differ else None


def _stops(node: fx.Node) -> bool:
    """Whether gradients end at what a node computes."""
    by_name = getattr(node.target, "__name__", node.target) in ("detach", "detach_")
    by_data = node.target is getattr and node.args[1] == "data"
    return by_name or by_data or (node.op.startswith("call") and "still" in node.meta)


def _rows(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table: a part of it where they follow each other."""
    numbers = ids.reshape(-1)
    first, count = int(numbers[0]), len(numbers)
    if torch.equal(numbers, torch.arange(first, first + count)):
        return table.detach()[first : first + count].view(*ids.shape, -1)
    return table.detach()[ids]


def _whole(given: Any) -> Any:
    """Arguments with one value in place of several that stand for it."""
    if isinstance(given, dict):
        return {k: _whole(v) for k, v in given.items()}
    if isinstance(given, (tuple, list)):
        return tuple(map(_whole, given)) if isinstance(given, tuple) else list(map(_whole, given))
    return given.whole() if isinstance(given, Several) else given


def _holds_value(known: Any) -> bool:
    known = tuple(known.values()) if isinstance(known, dict) else known
    several = isinstance(known, (tuple, list)) and any(map(_holds_value, known))
    return several or isinstance(known, (Value, Several))


def _holds_trained(known: Any) -> bool:
    several = isinstance(known, (tuple, list)) and any(map(_holds_trained, known))
    return several or (isinstance(known, Constant) and known.trained)


def _used(ops: list[Op], output: int) -> list[Op]:
    """The operations that the output depends on."""
    needed, kept = {output}, []
    for op in reversed(ops):
        if op.output in needed:
            needed.update(op.operands)
            kept.append(op)
    return kept[::-1]


def _joined(ops: list[Op], output: int, inputs: int) -> list[Op]:
    """Operations that are cheaper as one.

    ReLU before or after a max-pooling is part of it, the larger of the window and 0; a convolution of an input and the
    pooling of it are one.
    """
    users = [sum(v in op.inputs for op in ops) for v in range(1 + max(op.output for op in ops))]
    users[output] += 1
    fused: list[Op] = []
    for op in ops:
        last = fused[-1] if fused else None
        if last is not None and last.output in op.inputs and users[last.output] == 1:
            if _is_relu(last) and isinstance(op, MaxPool2d):
                fused[-1] = replace(op, inputs=last.inputs, rectify=True)
                continue
            if isinstance(last, MaxPool2d) and _is_relu(op):
                fused[-1] = replace(last, output=op.output, rectify=True)
                continue
        fused.append(op)
    return _pooled(fused, users, inputs)


def _pooled(ops: list[Op], users: list[int], inputs: int) -> list[Op]:
    joined: list[Op] = []
    for op in ops:
        match (joined[-1] if joined else None), op:
            case Conv2d() as conv, MaxPool2d() as pool if (
                pool.inputs == (conv.output,)
                and users[conv.output] == 1
                and conv.inputs[0] < inputs
                and ConvMaxPool2d.suits(conv, pool)
            ):
                joined[-1] = ConvMaxPool2d.of(conv, pool)
            case _:
                joined.append(op)
    return joined


def _is_relu(op: Op) -> bool:
    return isinstance(op, Unary) and op.function == "Relu"
