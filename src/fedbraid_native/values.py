"""Values and what can be done with them outside of layers: other shapes, arithmetic, masks, functions of each number."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fedbraid_native import ops
from fedbraid_native.errors import Unsupported
from fedbraid_native.ops import Shape
from fedbraid_native.trace import Builder, Constant, Several, Value


@dataclass(frozen=True)
class Call:
    """One node of the trace: who is called, with what, and what it gave for a batch."""

    builder: Builder
    node: fx.Node
    result: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def where(self) -> str:
        return str(self.node.target)[2:] if self.node.op == "call_module" else self.node.name

    @property
    def shape(self) -> Shape:
        return self.builder.shape(self.node)

    @property
    def source(self) -> fx.Node:
        """The first argument's node."""
        return next(a for a in self.node.args if isinstance(a, fx.Node))

    @property
    def nodes(self) -> list[Any]:
        """The arguments as they were traced."""
        return [*self.node.args, *self.node.kwargs.values()]

    def named(self, names: tuple[str, ...], first: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments from the first on by name, and their nodes."""
        given = dict(zip(names, self.args[first:])) | self.kwargs
        return given, dict(zip(names, self.node.args[first:])) | self.node.kwargs

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


Handle = Callable[[Call], Any]


def name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def bits(value: float) -> int:
    """A float32 as a whole number, for a template."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32).item())


def refuse_shared(call: Call) -> None:
    if len(call.source.users) > 1:
        raise Unsupported(f"{call.where!r} changes in place what something else reads")


def dimension(call: Call, dim: int) -> int:
    """A dimension as it is for one sample of the first tensor that is given."""
    node = call.node.all_input_nodes[0]
    batch = call.builder.batch(node)
    dim %= call.builder.runs[0][node].ndim
    if batch is None or dim == batch:
        raise Unsupported(f"{call.node.name!r} mixes the samples of a batch")
    return dim - (dim > batch)


# Functions of each number -----------------------------------------------------------------------------


def curve(call: Call, function: str, x: Value) -> Value:
    """A function whose slope its argument tells."""
    return call.builder.emit(ops.UnarySavingInput, (x,), x.shape, function=function, n=math.prod(x.shape))


def affine(call: Call, x: Value, a: float, b: float = 0.0) -> Value:
    return call.builder.emit(ops.AffineScalar, (x,), x.shape, n=math.prod(x.shape), a=float(a), b=float(b))


def bent(function: str) -> Handle:
    """A function of one tensor."""

    def handle(call: Call) -> Value | None:
        return curve(call, function, call.args[0]) if len(call.args) == 1 and not call.kwargs else None

    return handle


_POWERS = {0.5: "Sqrt", -0.5: "Rsqrt", -1: "Reciprocal"}


def power(call: Call) -> Value | None:
    x, by = call.args if len(call.args) == 2 else (call.args[0], call.kwargs.get("exponent"))
    if not isinstance(x, Value) or not isinstance(by, (int, float)):
        return None
    if by == 1:
        return x
    whole = f"WholePower<{int(by)}>" if by == int(by) and 2 <= by <= 16 else f"Power<{bits(by)}>"
    return curve(call, _POWERS.get(by, whole), x)


def clamp(call: Call) -> Value | None:
    """Between two numbers, or above or below one."""
    only = {"clamp_min": ("min",), "clamp_max": ("max",)}.get(name(call.node.target), ("min", "max"))
    given = dict(zip(only, call.args[1:])) | call.kwargs
    low, high = given.get("min"), given.get("max")
    ends = (-math.inf if low is None else low, math.inf if high is None else high)
    if not all(isinstance(end, (int, float)) for end in ends) or not call.builder.fixed(call.node.args):
        return None
    return between(call, call.args[0], *ends)


def between(call: Call, x: Value, low: float, high: float) -> Value:
    return curve(call, f"Clamp<{bits(low)}, {bits(high)}>", x)


# Shapes -----------------------------------------------------------------------------------------------


def reshape(call: Call, x: Value | None = None) -> Value | None:
    """The same numbers in the same order."""
    x = call.args[0] if x is None else x
    if not isinstance(x, Value) or math.prod(call.shape) != math.prod(x.shape):
        return None
    source, before = call.source, []
    for node in (source, call.node):
        full = tuple(call.builder.runs[0][node].shape)
        before.append([n for n in full[: call.builder.batch(node)] if n > 1])
    kinds = (call.builder.runs[0][source].dtype, call.result.dtype)
    if before[0] != before[1] or (
        kinds[0] != kinds[1]
        and (kinds[0].is_floating_point or kinds[1] not in (torch.float32, torch.int64, torch.int32))
    ):
        return None
    return Value(x.id, call.shape)


def permute(call: Call) -> Value | None:
    """Dimensions in another order, found by permuting the numbers of the places of one sample."""
    x, batch = call.args[0], call.builder.batch(call.source)
    assert batch is not None
    places = torch.arange(math.prod(x.shape)).view(x.shape)
    function = getattr(torch.Tensor, name(call.node.target))
    moved = function(places.unsqueeze(batch), *call.args[1:], **call.kwargs).reshape(call.shape)
    return moved_to(call.builder, x, _order(moved, x.shape))


def moved_to(builder: Builder, x: Value, order: Shape) -> Value:
    """The dimensions of a sample in this order."""
    if x.id in builder.moved and builder.shapes[x.id] == x.shape:
        source, before = builder.moved[x.id]
        return moved_to(builder, source, tuple(before[d] for d in order))
    shape = tuple(x.shape[d] for d in order)
    if [d for d in order if x.shape[d] > 1] == [d for d in range(len(order)) if x.shape[d] > 1]:
        return Value(x.id, shape)
    sizes, joined, rows = *_without_neighbours(x.shape, order), 1
    if joined[0] == 0:
        sizes, joined, rows = sizes[1:], tuple(d - 1 for d in joined[1:]), sizes[0]
    if len(sizes) > 4:
        raise Unsupported(f"a sample of shape {x.shape} is permuted to {shape}, too many dimensions")
    made = builder.emit(ops.Permute, (x,), shape, sizes=sizes, order=joined, rows=rows)
    builder.came_from(made, x, lambda places: places.permute(order))
    builder.moved[made.id] = (x, order)
    return made


def lying(builder: Builder, x: Value) -> tuple[Value, Shape]:
    """The value whose numbers a permuted one has, and how far apart those of each dimension lie in it."""
    if x.id in builder.moved and builder.shapes[x.id] == x.shape:
        source, order = builder.moved[x.id]
        root, steps = lying(builder, source)
        return root, tuple(steps[d] for d in order)
    return x, tuple(math.prod(x.shape[d + 1 :]) for d in range(len(x.shape)))


def _without_neighbours(shape: Shape, order: Shape) -> tuple[Shape, Shape]:
    """Sizes and order with dimensions that stay beside each other taken as one."""
    runs: list[list[int]] = []
    for d in order:
        if runs and runs[-1][-1] + 1 == d:
            runs[-1].append(d)
        else:
            runs.append([d])
    by_place = sorted(runs)
    return (
        tuple(math.prod(shape[d] for d in run) for run in by_place),
        tuple(by_place.index(run) for run in runs),
    )


def _order(moved: Tensor, shape: Shape) -> Shape:
    """Which dimension each dimension of the permuted numbers was."""
    steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    order: list[int] = []
    for d, size in enumerate(moved.shape):
        step = int((moved.select(d, 1) - moved.select(d, 0)).reshape(-1)[0]) if size > 1 else None
        same = [k for k in range(len(shape)) if k not in order and shape[k] == size]
        order.append(next(k for k in same if step is None or steps[k] == step))
    return tuple(order)


def part(
    builder: Builder, x: Value, dim: int, start: int, count: int, step: int = 1, drop: bool = False
) -> Value:
    """Those of a dimension from `start` on."""
    if count == x.shape[dim] and not drop:
        return x
    outer, inner = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    shape = (*x.shape[:dim], *([] if drop else [count]), *x.shape[dim + 1 :])
    made = builder.emit(
        ops.Slice,
        (x,),
        shape,
        outer=outer,
        dim=x.shape[dim],
        inner=inner,
        start=start,
        count=count,
        step=step,
    )
    some = (slice(None),) * dim + (slice(start, start + (count - 1) * step + 1, step),)
    builder.came_from(made, x, lambda places: places[some])
    return made


def getitem(call: Call) -> Any:
    x, index = call.args[0], call.args[1]
    batch, dims = call.builder.batch(call.source), call.builder.runs[0][call.source].ndim
    wanted = list(index) if isinstance(index, tuple) else [index]
    if any(k is Ellipsis for k in wanted):
        at = next(i for i, k in enumerate(wanted) if k is Ellipsis)
        wanted[at : at + 1] = [slice(None)] * (dims - sum(k is not None for k in wanted) + 1)
    dim = source = 0
    for k in wanted:
        if k is None:
            continue
        if source == batch:
            if not isinstance(k, slice) or k != slice(None):
                return None
        elif isinstance(k, slice):
            start, stop, step = k.indices(x.shape[dim])
            if step < 0:
                return None
            x = part(call.builder, x, dim, start, len(range(start, stop, step)), step)
            dim += 1
        elif isinstance(k, int):
            x = part(call.builder, x, dim, k % x.shape[dim], 1, drop=True)
        else:
            return None
        source += 1
    return Value(x.id, call.shape)


def split(call: Call) -> tuple[Value, ...] | None:
    """The parts that chunk and split give."""
    x = call.args[0]
    dim = call.argument(2, "dim", 0)
    at, full = dimension(call, dim), dim % call.builder.runs[0][call.source].ndim
    counts = [some.shape[full] for some in call.result]
    starts = [sum(counts[:k]) for k in range(len(counts))]
    return tuple(part(call.builder, x, at, lo, n) for lo, n in zip(starts, counts))


def unbind(call: Call) -> tuple[Value, ...]:
    x, dim = call.args[0], dimension(call, call.argument(1, "dim", 0))
    return tuple(part(call.builder, x, dim, k, 1, drop=True) for k in range(x.shape[dim]))


def select(call: Call) -> Value | None:
    x, dim, at = call.args[0], dimension(call, call.argument(1, "dim")), call.argument(2, "index")
    return part(call.builder, x, dim, at % x.shape[dim], 1, drop=True) if isinstance(at, int) else None


def narrow(call: Call) -> Value | None:
    x, dim, start, count = call.args[0], dimension(call, call.args[1]), call.args[2], call.args[3]
    return part(call.builder, x, dim, start % x.shape[dim], count)


def concat(builder: Builder, values: list[Value], dim: int) -> Value:
    whole = values[0]
    for other in values[1:]:
        outer, rest = math.prod(whole.shape[:dim]), whole.shape[dim + 1 :]
        a, b = (math.prod(v.shape[dim:]) for v in (whole, other))
        shape = (*whole.shape[:dim], whole.shape[dim] + other.shape[dim], *rest)
        whole = builder.emit(ops.Cat, (whole, other), shape, outer=outer, a=a, b=b)
    return whole


def cat(call: Call) -> Value:
    """Of values and of what is the same for all samples."""
    nodes: Any = call.node.args[0] if call.node.args else call.node.kwargs["tensors"]
    given = call.argument(0, "tensors")
    for node in nodes:
        if call.builder.batch(node) is None:
            raise Unsupported(f"{call.node.name!r} mixes the samples of a batch")
    dim = dimension(call, call.argument(1, "dim", 0))
    values = [v if isinstance(v, Value) else same_for_all(call, v, v.tensor.shape) for v in given]
    return concat(call.builder, values, dim)


def stack(call: Call) -> Value | None:
    given, dim = call.argument(0, "tensors"), call.argument(1, "dim", 0) % call.result.ndim
    batch = call.builder.batch(call.node)
    if batch is None or dim == batch or not all(isinstance(v, Value) for v in given):
        return None
    at = dim - (dim > batch)
    return concat(call.builder, [Value(v.id, (*v.shape[:at], 1, *v.shape[at:])) for v in given], at)


def mean(call: Call, total: bool = False) -> Value | None:
    x, dim = call.args[0], call.argument(1, "dim")
    dims: list[Any] = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    if not isinstance(x, Value) or None in dims or set(call.kwargs) - {"dim", "keepdim"}:
        return None
    for d in sorted((dimension(call, d) for d in dims), reverse=True):
        x = mean_over(call, x, d, total)
    return Value(x.id, call.shape)


def mean_over(call: Call, x: Value, d: int, total: bool = False) -> Value:
    outer, count, inner = math.prod(x.shape[:d]), x.shape[d], math.prod(x.shape[d + 1 :])
    scale, shape = 1.0 if total else 1.0 / count, x.shape[:d] + x.shape[d + 1 :]
    return call.builder.emit(ops.Mean, (x,), shape, outer=outer, dim=count, inner=inner, scale=scale)


def largest(call: Call, shared: bool, smallest: bool = False) -> Value | None:
    x, dim = call.args[0], call.argument(1, "dim")
    dims: list[Any] = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    if not isinstance(x, Value) or not all(isinstance(d, int) for d in dims):
        return None
    x = affine(call, x, -1.0) if smallest else x
    for d in sorted((dimension(call, d) for d in dims), reverse=True):
        outer, dim, inner = math.prod(x.shape[:d]), x.shape[d], math.prod(x.shape[d + 1 :])
        shape = x.shape[:d] + x.shape[d + 1 :]
        x = call.builder.emit(ops.Amax, (x,), shape, outer=outer, dim=dim, inner=inner, shared=shared)
    return affine(call, x, -1.0) if smallest else x


def amax(call: Call, smallest: bool = False) -> Value | None:
    found = largest(call, True, smallest)
    return None if found is None else Value(found.id, call.shape)


def extreme(call: Call, larger: bool) -> Any:
    """max and min: of two values, or (values, places) along a dimension, of which the places cannot be used."""
    second = call.argument(1, "other")
    if isinstance(second, (Value, Constant)):
        a, b = alike(call)
        return call.builder.emit(ops.MinMax, (a, b), call.shape, n=math.prod(call.shape), larger=larger)
    found = largest(call, False, not larger)
    if found is None or not isinstance(call.result, tuple):
        return None
    return Found(
        Value(found.id, call.builder.without_batch([run[call.node][0] for run in call.builder.runs]))
    )


class Found(Several):
    """What max and min along a dimension give: values, and places that nobody may ask for."""

    def __init__(self, values: Value) -> None:
        self.values = values

    def __getitem__(self, index: Any) -> Value:
        if index != 0:
            raise Unsupported("the places of the largest numbers are used")
        return self.values


def attribute(call: Call) -> Value | None:
    """What is asked for by name: `values` of max and min, and a matrix turned."""
    x, asked = call.args
    if isinstance(x, Found) and asked == "values":
        return x.values
    if isinstance(x, Value) and asked == "data":
        return call.builder.still(x)
    if (
        asked not in ("T", "mT")
        or not isinstance(x, Value)
        or call.builder.batch(call.node) != 0
        or len(x.shape) < 2
    ):
        return None
    last = len(x.shape) - 1
    return moved_to(call.builder, x, (*range(last - 1), last, last - 1))


# Arithmetic -------------------------------------------------------------------------------------------


def same_for_all(call: Call, constant: Constant, shape: Any) -> Value:
    """A tensor that no sample changes, as a value."""
    return call.builder.emit(ops.ExpandParam, (), tuple(shape), (constant,), n=math.prod(shape))


def _aligned(call: Call, node: fx.Node, constant: Constant) -> Shape:
    """A constant's shape beside a sample of the result, 1 where it is the same for all."""
    full: Shape = tuple(constant.tensor.shape)
    if (batch := call.builder.batch(node)) is not None:
        full = (*full[:batch], 1, *full[batch:])
    full = (1,) * (call.result.ndim - len(full)) + full
    at = call.builder.batch(call.node)
    if at is None or full[at] != 1:
        raise Unsupported(f"{call.node.name!r} broadcasts samples against something else")
    return full[:at] + full[at + 1 :]


def as_value(call: Call, node: Any, x: Any) -> Value:
    """An operand in the shape of the result."""
    if isinstance(x, Value):
        return expanded(call, node, x)
    if isinstance(x, Constant):
        shape = _aligned(call, node, x)
        return repeated(call.builder, same_for_all(call, x, shape), call.shape)
    if not isinstance(x, (int, float)):
        raise Unsupported(f"{call.node.name!r} takes something other than tensors and numbers")
    return repeated(
        call.builder, same_for_all(call, Constant(torch.tensor([float(x)]), False), (1,)), call.shape
    )


def alike(call: Call) -> tuple[Value, Value]:
    """The two operands, each as often as the other wants it."""
    first, second = call.nodes[:2]
    return as_value(call, first, call.args[0]), as_value(call, second, call.argument(1, "other"))


def expanded(call: Call, node: fx.Node, x: Value) -> Value:
    """A value in the shape of the result, which repeats it along dimensions where it has one place or none."""
    before, after = call.builder.batch(node), call.builder.batch(call.node)
    if before is None or after is None:
        raise Unsupported(f"{call.node.name!r} mixes the samples of a batch")
    if call.builder.runs[0][node].ndim - before != call.result.ndim - after:
        raise Unsupported(f"{call.node.name!r} broadcasts samples against something else")
    return repeated(call.builder, x, call.shape)


def repeated(builder: Builder, x: Value, wanted: Shape) -> Value:
    shape = (1,) * (len(wanted) - len(x.shape)) + x.shape
    for d, count in enumerate(wanted):
        if shape[d] == count:
            continue
        outer, inner = math.prod(shape[:d]), math.prod(shape[d + 1 :])
        shape = (*shape[:d], count, *shape[d + 1 :])
        x = builder.emit(ops.Expand, (x,), shape, outer=outer, dim=count, inner=inner)
    return Value(x.id, wanted)


def expand(call: Call) -> Value | None:
    x = call.args[0]
    return expanded(call, call.source, x) if isinstance(x, Value) else None


def _shared(call: Call, node: fx.Node, constant: Constant) -> Constant | None:
    """A constant as numbers that all rows of a sample of the result share, None where it must be a value."""
    shape = _aligned(call, node, constant)
    while shape and shape[0] == 1:
        shape = shape[1:]
    if shape and call.shape[len(call.shape) - len(shape) :] == shape:
        return Constant(constant.tensor.reshape(shape), constant.trained)
    if constant.trained:
        return None
    full = constant.tensor.reshape(_aligned(call, node, constant)).expand(call.shape)
    return Constant(full.contiguous(), False)


def _with_rows(call: Call, kind: type[ops.Op], x: Value, node: fx.Node, constant: Constant) -> Value | None:
    """A value and numbers that its rows share, as one operation; None where the numbers must be a value."""
    numbers = _shared(call, node, constant)
    if numbers is None or x.shape != call.shape:
        return None
    n = numbers.tensor.numel()
    return call.builder.emit(kind, (x,), call.shape, (numbers,), n=n, rows=math.prod(call.shape) // n)


def _number(x: Any) -> float | None:
    """An operand that is one number for any batch."""
    if isinstance(x, Constant) and not x.trained and x.tensor.numel() == 1:
        return float(x.tensor)
    return float(x) if isinstance(x, (int, float)) else None


def _operands(call: Call) -> tuple[Any, Any] | None:
    """Both operands of a sum or product, None where there is more to it."""
    given = [*call.args, *call.kwargs.values()]
    return (given[0], given[1]) if len(given) == 2 and call.builder.fixed(call.nodes) else None


def add(call: Call, sign: float = 1.0) -> Value | None:
    """Of two values, of a value and a number, or of a value and a tensor that no sample changes."""
    if (pair := _operands(call)) is None:
        return None
    if call.node.target in (operator.iadd, operator.isub, "add_", "sub_"):
        refuse_shared(call)
    (x, other), nodes = pair, call.nodes
    swapped = not isinstance(x, Value)
    mine, theirs = (sign, 1.0) if swapped else (1.0, sign)
    value, rest, node = (other, x, nodes[0]) if swapped else (x, other, nodes[1])
    if (number := _number(rest)) is not None and value.shape == call.shape:
        return affine(call, value, mine, theirs * number)
    if isinstance(rest, Constant) and (theirs > 0 or not rest.trained):
        value = value if mine > 0 else affine(call, value, -1.0)
        moved = Constant(rest.tensor if theirs > 0 else -rest.tensor, rest.trained)
        if (done := _with_rows(call, ops.AddParam, value, node, moved)) is not None:
            return done
    a, b = (as_value(call, n, v) for n, v in zip(nodes, (x, other)))
    return total(call, a, b if sign > 0 else affine(call, b, -1.0))


def total(call: Call, a: Value, b: Value) -> Value:
    return call.builder.emit(ops.Add, (a, b), a.shape, n=math.prod(a.shape))


def subtract(call: Call) -> Value | None:
    return add(call, -1.0)


def multiply(call: Call, divide: bool = False) -> Value | None:
    if (pair := _operands(call)) is None:
        return None
    if call.node.target in (operator.imul, operator.itruediv, "mul_", "div_"):
        refuse_shared(call)
    (x, other), (first, second) = pair, call.nodes
    if not isinstance(x, Value) and not divide:
        x, other, second = other, x, first
    if isinstance(x, Value):
        if (number := _number(other)) is not None and x.shape == call.shape:
            return affine(call, x, 1 / number if divide else number)
        if isinstance(other, Constant) and not (divide and other.trained):
            by = Constant(1 / other.tensor, False) if divide else other
            if (done := _with_rows(call, ops.MulParam, x, second, by)) is not None:
                return done
    kind = ops.Div if divide else ops.Mul
    return call.builder.emit(kind, alike(call), call.shape, n=math.prod(call.shape))


def divided(call: Call) -> Value | None:
    return multiply(call, divide=True)


# Masks ------------------------------------------------------------------------------------------------

_COMPARISONS = {"eq": "=", "ne": "!", "lt": "<", "gt": ">", "le": "l", "ge": "g", "bool": "!"}
_COMPARISONS |= {"invert": "=", "logical_not": "=", "not_": "="}


def compare(call: Call) -> Value | None:
    """A mask: where numbers compare so with a number; `bool` and `not` are masks too."""
    x, value = call.args if len(call.args) == 2 else (call.args[0], 0)
    if not isinstance(x, Value) or not isinstance(value, (int, float)) or call.result.dtype != torch.bool:
        return None
    how = _COMPARISONS[name(call.node.target)]
    mask = call.builder.emit(
        ops.CompareScalar, (x,), x.shape, n=math.prod(x.shape), value=float(value), how=how
    )
    call.builder.masks.add(mask.id)
    return mask


def masked_fill(call: Call) -> Value | None:
    x, mask, value = call.args[0], call.argument(1, "mask"), call.argument(2, "value")
    node = call.nodes[1]
    return _filled(call, expanded(call, call.source, x), node, mask, value) if isinstance(x, Value) else None


def _filled(call: Call, x: Value, node: fx.Node, mask: Any, value: Any) -> Value | None:
    if (number := _number(value)) is None:
        return None
    if isinstance(mask, Constant):
        hidden = _shared(call, node, Constant(mask.tensor.float(), False))
        assert hidden is not None
        n = hidden.tensor.numel()
        rows = math.prod(call.shape) // n
        return call.builder.emit(ops.MaskedFill, (x,), call.shape, (hidden,), n=n, rows=rows, value=number)
    full = expanded(call, node, mask)
    return call.builder.emit(
        ops.MaskedFill, (x, full), call.shape, n=math.prod(call.shape), rows=1, value=number
    )


def where(call: Call) -> Value | None:
    """One or the other, as a mask says."""
    if len(call.args) != 3:
        return None
    mask, a, b = call.args
    at, first, second = call.nodes
    if isinstance(a, Value) and _number(b) is not None and isinstance(mask, Constant):
        return _filled(call, expanded(call, first, a), at, Constant(~mask.tensor.bool(), False), b)
    if isinstance(b, Value) and _number(a) is not None:
        return _filled(call, expanded(call, second, b), at, mask, a)
    if isinstance(mask, Constant):
        mask = Constant(mask.tensor.float(), False)
    given = tuple(as_value(call, n, v) for n, v in zip((at, first, second), (mask, a, b)))
    return call.builder.emit(ops.Where, given, call.shape, n=math.prod(call.shape))
