"""From a traced graph to operations: each node is a constant, a fact about shapes, or lowered by the registry."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedbraid_native.errors import Unsupported
from fedbraid_native.frontend.registry import Call, lower
from fedbraid_native.frontend.values import (
    BatchIndex,
    Constant,
    InputView,
    TupleValue,
    Value,
    leaves,
    map_leaves,
)
from fedbraid_native.ir import Graph, ParamLayout
from fedbraid_native.ops import Detach, LoadParam, Op, Shape, WeightRef
from fedbraid_native.passes import eliminate_dead_ops, fuse_ops

BATCHES = (3, 5)  # what differs between the two runs is the batch
_MADE_LIKE = {torch.zeros_like, torch.ones_like, torch.full_like, "new_zeros", "new_ones", "new_full", "new_tensor"}  # fmt: skip
_SHAPES = {
    "getattr", "size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex", "is_contiguous",
    "type", "get_device", "element_size", "is_tensor",
}  # fmt: skip
_LIKE = {"to", "type_as", "expand_as"}
_IN_PLACE = {f"{name}_" for name in ("add", "sub", "mul", "div", "clamp", "pow", "neg", "exp", "sqrt", "relu", "tanh")}  # fmt: skip
_IN_PLACE |= {"iadd", "isub", "imul", "itruediv", "ipow"}


class Builder:
    """Goes through the traced nodes and lowers each, knowing what it gave for two batches of different sizes."""

    def __init__(self, module: nn.Module, layout: ParamLayout, runs: list[dict[fx.Node, Any]]) -> None:
        self.modules = {f"0.{name}".rstrip("."): m for name, m in module.named_modules()}
        self.layout, self.runs = layout, runs
        self.env: dict[fx.Node, Any] = {}
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.index_bounds: list[Tensor | None] = []
        self.leaves_per_input: list[int] = []
        self.ignore_indices: dict[int, set[int | None]] = {}  # what an input's numbers may be besides
        self._unbatched: dict[fx.Node, Value] = {}  # what parameters alone have been made into
        self._producer_by_storage: dict[int, fx.Node] = {}  # who made a tensor of parameters alone
        self._constants: list[Tensor] = []
        self._count = 0
        offsets = {s.name: s.offset for s in layout}
        named: dict[str, Tensor] = {**dict(module.named_buffers()), **dict(module.named_parameters())}
        self._param_by_storage = {_storage(named[n]): (at, named[n]) for n, at in offsets.items()}

    def build(self, graph: fx.Graph) -> Graph:
        output: Any = None
        for node in graph.nodes:
            if node.op == "placeholder":
                self.env[node] = self._inputs(node)
            elif node.op == "output":
                output = self._of(node.args[0])
            else:
                self.env[node] = self._located(self._node(node), self.runs[0][node], self.runs[1][node])
        if not isinstance(output, Value) or not self.ops:
            raise Unsupported("the model's output is not one tensor that a layer made")
        count = self.leaves_per_input[0]
        ops = fuse_ops(eliminate_dead_ops(self.ops, output.id), output.id, count)
        constants = torch.cat([c.reshape(-1) for c in self._constants]) if self._constants else torch.zeros(1)
        ignored = self.ignore_indices.get(count, set())
        return Graph(
            [v.shape for v in self.values], ops, output.id, self.layout, constants, count, self.index_bounds, output.shape,
            frozenset(v.id for v in self.values if not v.is_batched), targets=len(self.leaves_per_input) > 1,
            ignore_index=next(iter(ignored)) if len(ignored) == 1 else None,
        )  # fmt: skip

    def _inputs(self, node: fx.Node) -> Any:
        """The first values: one, or several by name or place."""
        given = self.runs[0][node]
        self.leaves_per_input.append(len(leaves(given)))
        self.index_bounds += [None] * self.leaves_per_input[-1]

        def made(leaf: Tensor) -> Value:
            value = self._value(tuple(leaf.shape[1:]))
            places = torch.arange(math.prod(value.shape)).view(value.shape)
            return replace(value, origin=InputView(value.id, places))

        return map_leaves(made, given)

    # What lowerings ask for -----------------------------------------------------------------------

    def _value(self, shape: Shape, is_batched: bool = True) -> Value:
        self.values.append(Value(len(self.values), tuple(shape), is_batched=is_batched))
        return self.values[-1]

    def emit(
        self,
        kind: type[Op],
        inputs: tuple[Value, ...],
        shape: Shape,
        weights: tuple[Tensor | Constant | None, ...] = (),
        **constants: Any,
    ) -> Value:
        """A new operation and what it gives."""
        is_batched = kind is not LoadParam and (not inputs or any(v.is_batched for v in inputs))
        if not is_batched and not kind.allows_unbatched:
            raise Unsupported(f"{kind.__name__} on parameters alone is not supported")
        out = self._value(shape, is_batched)
        refs = tuple(self.weight_ref(w) for w in weights)
        self.ops.append(kind(inputs=tuple(v.id for v in inputs), output=out.id, weights=refs, **constants))
        return out

    def weight_ref(self, tensor: Tensor | Constant | None) -> WeightRef | None:
        """Where a parameter, a view of one, or any constant lies."""
        if tensor is None:
            return None
        constant = tensor if isinstance(tensor, Constant) else Constant(tensor, tensor.requires_grad)
        numbers = constant.tensor.detach()
        found = self._param_by_storage.get(_storage(numbers))
        if found is not None and numbers.is_contiguous():
            return WeightRef(found[0] + int(numbers.storage_offset() - found[1].storage_offset()))
        if constant.trained:
            node = self._producer_by_storage.get(_storage(numbers))
            if node is None or not numbers.is_contiguous():
                raise Unsupported("the model computes with a trained tensor outside a layer")
            return WeightRef(int(numbers.storage_offset()), value=self._computed(node).id)
        at = self._count
        self._constants.append(numbers.to(torch.float32).contiguous())
        self._count += numbers.numel()
        return WeightRef(at, trained=False)

    def _computed(self, node: fx.Node) -> Value:
        """What a node that no sample reaches gives, lowered once, when an operation first needs it."""
        if node not in self._unbatched:
            result = self.runs[0][node]
            call = Call(self, node, result)
            try:
                args: Any = fx.node.map_aggregate(node.args, self._loaded)
                kwargs: Any = fx.node.map_aggregate(node.kwargs, self._loaded)
                made = lower(call, *args, **kwargs)
                if not isinstance(made, Value) or made.is_batched or math.prod(made.shape) != result.numel():
                    raise call.unsupported()
            except Unsupported as why:
                name = call.where if node.op == "call_module" else call.name
                what = "layer" if node.op == "call_module" else "operation"
                if str(why).endswith("on parameters alone is not supported") and "the operation" in str(why):
                    raise
                raise Unsupported(f"the {what} {name!r} on parameters alone is not supported") from why
            self._unbatched[node] = made.view(tuple(result.shape))
        return self._unbatched[node]

    def _loaded(self, argument: Any) -> Any:
        """An argument of what is computed from parameters alone, tensors as values."""
        known = self.env[argument] if isinstance(argument, fx.Node) else argument
        return self.load(known) if isinstance(known, Constant) else known

    def load(self, constant: Constant) -> Value:
        """A tensor as a value that is not batched."""
        shape = tuple(constant.tensor.shape)
        ref = self.weight_ref(constant) if constant.trained else None
        if (
            ref is not None
            and ref.value is not None
            and math.prod(self.values[ref.value].shape) == math.prod(shape)
        ):
            return replace(self.values[ref.value], shape=shape, batch_dim=None)
        return replace(self.emit(LoadParam, (), shape, (constant,), n=math.prod(shape)), batch_dim=None)

    def propagate_origin(self, made: Value, x: Value, moved: Callable[[Tensor], Tensor]) -> Value:
        """Remember which numbers of an input a value is, if the one that it was made from is some."""
        if x.origin is None:
            return made
        places = moved(x.origin.places.view(x.shape)).reshape(made.shape)
        return replace(made, origin=InputView(x.origin.input, places))

    def bound_indices(self, x: Value, count: int, skip: int | None = None) -> bool:
        """That a value's numbers must be below `count`, or `skip`; whether they are an input's."""
        if x.origin is None:
            return False
        given, places = x.origin.input, x.origin.places.reshape(-1)
        self.ignore_indices.setdefault(given, set()).add(skip)
        known = self.index_bounds[given]
        if known is None:
            known = self.index_bounds[given] = torch.full(self.values[given].shape, 2**24)
        known.view(-1)[places] = known.view(-1)[places].clamp(max=count)
        return True

    def detach(self, x: Value) -> Value:
        """A value that is taken for given in the backward pass; an input is anyway."""
        if x.origin is not None or x.is_mask:
            return x
        return replace(self.emit(Detach, (x,), x.shape, n=math.prod(x.shape)), batch_dim=x.batch_dim)

    # Nodes ----------------------------------------------------------------------------------------

    def _of(self, argument: Any) -> Any:
        """An argument with what is known in place of nodes."""
        return fx.node.map_arg(argument, lambda n: self.env[n])

    def batch_dim(self, node: fx.Node) -> int | None:
        """Which dimension of a result is the batch."""
        return find_batch_dim([run[node] for run in self.runs], node.name)

    def shape(self, node: fx.Node) -> Shape:
        """A result's shape without the batch."""
        batch, full = self.batch_dim(node), tuple(self.runs[0][node].shape)
        if batch is None and not isinstance(self.env.get(node), Constant):  # made of parameters alone
            raise Unsupported(f"{node.name!r} mixes the samples of a batch")
        return full if batch is None else full[:batch] + full[batch + 1 :]

    def _located(self, made: Any, first: Any, second: Any) -> Any:
        """What a node gave, its values with the dimension in which the model has the batch."""
        if isinstance(made, (tuple, list)) and isinstance(first, (tuple, list)):
            return type(made)(map(self._located, made, first, second))
        if isinstance(made, Value) and isinstance(first, Tensor):
            return replace(made, batch_dim=find_batch_dim([first, second], "a result"))
        return made

    def _node(self, node: fx.Node) -> Any:
        result = self.runs[0][node]
        given = [self.env[n] for n in node.all_input_nodes]
        if not any(_holds_value(g) for g in given) or self._only_shaped(node):
            return self._constant(node, given)
        if not isinstance(result, (Tensor, tuple, list)) or isinstance(result, torch.Size):
            if any(isinstance(g, Value) for g in given) and _name(node.target) not in _SHAPES:
                raise Unsupported(f"{node.name!r} makes a number of what samples hold")
            return result  # arithmetic on shapes
        args, kwargs = self._of(node.args), self._of(node.kwargs)
        if node.target is operator.getitem and isinstance(args[0], (tuple, list, dict)):
            return args[0][args[1]]
        if node.target is operator.getitem and isinstance(args[0], TupleValue) and isinstance(args[1], int):
            return args[0][args[1]]
        if node.target is not getattr:
            args, kwargs = (_whole(given) for given in (args, kwargs))
        made = lower(Call(self, node, result), *args, **kwargs)
        return self._detach_all(made) if "still" in node.meta else made

    def _detach_all(self, made: Any) -> Any:
        """What was computed without gradients."""
        if isinstance(made, (tuple, list)):
            return tuple(map(self._detach_all, made))
        if isinstance(made, TupleValue):
            return _DetachedTuple(self, made)
        return self.detach(made) if isinstance(made, Value) else made

    def _only_shaped(self, node: fx.Node) -> bool:
        """Whether a value only tells the shape or type of something that does not depend on it."""
        if node.target in _MADE_LIKE:
            return True
        return node.target in _LIKE and isinstance(self.env[node.all_input_nodes[0]], Constant)

    def _constant(self, node: fx.Node, given: list[Any]) -> Any:
        first = self.runs[0][node]
        if _stops(node) and (node.op == "call_module" or any(map(_holds_trained, given))):
            raise Unsupported(f"{node.name!r} computes with what is trained, and without its gradient")
        if isinstance(first, tuple) and any(map(_holds_trained, given)):
            return tuple(Constant(each, True) if isinstance(each, Tensor) else each for each in first)
        if not isinstance(first, Tensor):
            return first
        if node.target is F.embedding and len(given) == 2:
            return Constant(_rows(given[1].tensor, given[0].tensor), given[1].trained)
        layer = self.module_of(node) if node.op == "call_module" else nn.Identity()
        trained = any(map(_holds_trained, given))
        trained |= any(p.requires_grad for p in (first, *layer.parameters()))
        batch = self.batch_dim(node)
        if batch is not None:  # one for each sample: the same for all of them?
            if all(torch.equal(run[node], torch.arange(len(run[node]))) for run in self.runs):
                return BatchIndex()
            one = first.narrow(batch, 0, 1)
            if not torch.equal(one.expand_as(first), first):
                raise Unsupported(f"{node.name!r} differs from sample to sample")
            first = one.squeeze(batch)
        elif trained:
            self._record_producer(node, first)
        again = self.runs[1][node] if batch is None else self.runs[1][node].select(batch, 0)
        if not torch.equal(first, again):
            raise Unsupported(f"{node.name!r} is another each time")
        return Constant(first, trained, batch)

    def _record_producer(self, node: fx.Node, made: Tensor) -> None:
        """Who made a tensor of parameters alone; views of it are found by its storage."""
        storage = _storage(made)
        if storage in self._param_by_storage:
            return
        if storage in self._producer_by_storage and _name(node.target) in _IN_PLACE:
            raise Unsupported(f"{node.name!r} changes in place what is computed from parameters")
        if made.is_contiguous() and made.storage_offset() == 0:
            self._producer_by_storage.setdefault(storage, node)

    def module_of(self, node: fx.Node) -> nn.Module:
        found: nn.Module = self.modules[str(node.target)]
        return found

    def is_static(self, argument: Any) -> bool:
        """Whether an argument is the same for any batch."""
        nodes: list[fx.Node] = []
        fx.node.map_arg(argument, nodes.append)
        return all(isinstance(self.runs[0][n], Tensor) or self.runs[0][n] == self.runs[1][n] for n in nodes)


class _DetachedTuple(TupleValue):
    """The same, computed without gradients."""

    def __init__(self, builder: Builder, given: TupleValue) -> None:
        self.builder, self.given = builder, given

    def __getitem__(self, index: int) -> Value:
        return self.builder.detach(self.given[index])

    def whole(self) -> Value:
        return self.builder.detach(self.given.whole())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def find_batch_dim(results: list[Tensor], what: str) -> int | None:
    """The dimension in which the two runs differ."""
    first, second = (tuple(result.shape) for result in results)
    differ = [d for d, (a, b) in enumerate(zip(first, second)) if a != b]
    if len(differ) > 1 or (differ and first[differ[0]] != BATCHES[0]):
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
    return given.whole() if isinstance(given, TupleValue) else given


def _holds_value(known: Any) -> bool:
    known = tuple(known.values()) if isinstance(known, dict) else known
    several = isinstance(known, (tuple, list)) and any(map(_holds_value, known))
    return several or isinstance(known, (Value, TupleValue))


def _holds_trained(known: Any) -> bool:
    several = isinstance(known, (tuple, list)) and any(map(_holds_trained, known))
    return several or (isinstance(known, Constant) and known.trained)
