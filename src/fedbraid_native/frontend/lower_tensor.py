"""Lowerings of functions and methods of tensors: arithmetic, functions of each number, shapes, reductions, masks, products."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbraid_native import ops
from fedbraid_native.errors import Unsupported
from fedbraid_native.frontend.builder import Builder, find_batch_dim
from fedbraid_native.frontend.registry import Call, lowers
from fedbraid_native.frontend.values import BatchIndex, Constant, Permutation, TupleValue, Value
from fedbraid_native.ops import Shape

NO_CLASS = -1  # what no number of a class is


def float_bits(value: float) -> int:
    """A float32 as a whole number, for a template."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32).item())


def refuse_shared(call: Call) -> None:
    source = call.node.all_input_nodes[0]
    if len(source.users) > 1:
        raise Unsupported(f"{call.where!r} changes in place what something else reads")


def dim_of(call: Call, x: Value | Constant, dim: int) -> int:
    """A dimension of the model's tensor as it is for one sample."""
    shape = x.shape if isinstance(x, Value) else x.tensor.shape
    if isinstance(x, Value) and not x.is_batched:
        return dim % max(1, len(shape))
    dim %= len(shape) + 1
    if x.batch_dim is None or dim == x.batch_dim:
        raise call.mixes()
    return dim - (dim > x.batch_dim)


def _dims(dim: Any) -> list[Any]:
    return list(dim) if isinstance(dim, (tuple, list)) else [dim]


def value_of(call: Call, x: Any) -> Value:
    if not isinstance(x, Value):
        raise call.unsupported()
    return x


# Functions of each number -----------------------------------------------------------------------------


def unary(call: Call, function: str, x: Value, saves: str = "input") -> Value:
    """A function of each number, by its name among the kernels; backward reads what it `saves`, its input or its output."""
    return call.emit(ops.Unary, (value_of(call, x),), x.shape, function=function, n=x.size, saves=saves)


def affine(call: Call, x: Value, a: float, b: float = 0.0) -> Value:
    return call.emit(ops.AffineScalar, (x,), x.shape, n=x.size, a=float(a), b=float(b))


def clip(call: Call, x: Value, low: float = -math.inf, high: float = math.inf) -> Value:
    return unary(call, f"Clamp<{float_bits(low)}, {float_bits(high)}>", x)


def register_unary(function: str, *targets: Any, saves: str = "input") -> None:
    """A function of one tensor and nothing more."""

    def lowering(call: Call, input: Value) -> Value:
        return unary(call, function, input, saves)

    lowers(*targets)(lowering)


for _name in ("exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "abs", "sin", "cos", "erf"):
    register_unary(_name.capitalize(), _name)
register_unary("WholePower<2>", "square")
register_unary("Tanh", "tanh", F.tanh, saves="output")
register_unary("Sigmoid", "sigmoid", F.sigmoid, saves="output")


@lowers("neg", operator.neg)
def neg(call: Call, input: Value) -> Value:
    return affine(call, value_of(call, input), -1.0)


@lowers("pow", operator.pow)
def power(call: Call, input: Value, exponent: float) -> Value:
    if not isinstance(input, Value) or not isinstance(exponent, (int, float)):
        raise call.unsupported()
    if exponent == 1 and input.is_batched:
        return input
    if (known := {0.5: "Sqrt", -0.5: "Rsqrt", -1: "Reciprocal"}.get(exponent)) is not None:
        return unary(call, known, input)
    whole = exponent == int(exponent) and 1 <= exponent <= 16
    return unary(call, f"WholePower<{int(exponent)}>" if whole else f"Power<{float_bits(exponent)}>", input)


@lowers("clamp")
def clamp(call: Call, input: Value, min: Any = None, max: Any = None) -> Value:
    """Between two numbers, or above or below one."""
    low, high = -math.inf if min is None else min, math.inf if max is None else max
    if not all(isinstance(end, (int, float)) for end in (low, high)) or not call.builder.is_static(
        call.node.args
    ):
        raise call.unsupported()
    return clip(call, input, low, high)


@lowers("clamp_min")
def clamp_min(call: Call, input: Value, min: Any) -> Value:
    return clamp(call, input, min)


@lowers("clamp_max")
def clamp_max(call: Call, input: Value, max: Any) -> Value:
    return clamp(call, input, None, max)


# Shapes -----------------------------------------------------------------------------------------------


@lowers("flatten", "unflatten", "reshape", "squeeze", "unsqueeze", "contiguous", "clone", "view", "view_as", "reshape_as",
        "float", "long", "int", "to", "type_as")  # fmt: skip
def reshape(call: Call, input: Value, *_: Any, **__: Any) -> Value:
    """The same numbers in the same order."""
    x = value_of(call, input)
    if not x.is_batched and call.result.dtype == torch.float32:
        return x.view(call.shape)
    if math.prod(call.shape) != math.prod(x.shape):
        raise call.unsupported()
    before = []
    for node in (call.node.all_input_nodes[0], call.node):
        full = tuple(call.builder.runs[0][node].shape)
        before.append([n for n in full[: call.builder.batch_dim(node)] if n > 1])
    kinds = (call.builder.runs[0][call.node.all_input_nodes[0]].dtype, call.result.dtype)
    whole = kinds[0].is_floating_point or kinds[1] not in (torch.float32, torch.int64, torch.int32)
    if before[0] != before[1] or (kinds[0] != kinds[1] and whole):
        raise call.unsupported()
    return x.view(call.shape)


@lowers("transpose", "permute", "swapaxes", "movedim")
def permute(call: Call, input: Value, *args: Any, **kwargs: Any) -> Value:
    """Dimensions in another order, found by permuting the numbers of the places of one sample."""
    if input.batch_dim is None:
        raise call.unsupported()
    places = torch.arange(math.prod(input.shape)).view(input.shape).unsqueeze(input.batch_dim)
    moved = getattr(torch.Tensor, call.name)(places, *args, **kwargs).reshape(call.shape)
    return permuted(call.builder, input, _order(moved, input.shape))


def permuted(builder: Builder, x: Value, order: Shape) -> Value:
    """The dimensions of a sample in this order."""
    if x.permutation is not None and x.permutation.shape == x.shape:
        return permuted(builder, x.permutation.source, tuple(x.permutation.order[d] for d in order))
    shape = tuple(x.shape[d] for d in order)
    if [d for d in order if x.shape[d] > 1] == [d for d in range(len(order)) if x.shape[d] > 1]:
        return x.view(shape)
    sizes, joined, rows = *_without_neighbours(x.shape, order), 1
    if joined[0] == 0:
        sizes, joined, rows = sizes[1:], tuple(d - 1 for d in joined[1:]), sizes[0]
    if len(sizes) > 4:
        raise Unsupported(f"a sample of shape {x.shape} is permuted to {shape}, too many dimensions")
    made = builder.emit(ops.Permute, (x,), shape, sizes=sizes, order=joined, rows=rows)
    made = builder.propagate_origin(made, x, lambda places: places.permute(order))
    return replace(made, permutation=Permutation(x, order, shape))


def strides_of(x: Value) -> tuple[Value, Shape]:
    """The value whose numbers a permuted one has, and how far apart those of each dimension lie in it."""
    if x.permutation is not None and x.permutation.shape == x.shape:
        root, steps = strides_of(x.permutation.source)
        return root, tuple(steps[d] for d in x.permutation.order)
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


def slice_(
    builder: Builder, x: Value, dim: int, start: int, count: int, step: int = 1, drop: bool = False
) -> Value:
    """Those of a dimension from `start` on."""
    if count == x.shape[dim] and not drop:
        return x
    outer, inner = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    shape = (*x.shape[:dim], *([] if drop else [count]), *x.shape[dim + 1 :])
    sizes: dict[str, Any] = {
        "outer": outer,
        "dim": x.shape[dim],
        "inner": inner,
        "start": start,
        "count": count,
    }
    made = builder.emit(ops.Slice, (x,), shape, step=step, **sizes)
    some = (slice(None),) * dim + (slice(start, start + (count - 1) * step + 1, step),)
    return builder.propagate_origin(made, x, lambda places: places[some])


@lowers(operator.getitem, "__getitem__")
def getitem(call: Call, input: Any, index: Any) -> Any:
    """Slices; rows of a constant by number, `weights[targets]`; and `outputs[arange(samples), targets]`."""
    if not isinstance(input, Value):
        return look_up(call, input, index)
    match index:
        case (BatchIndex(), Value(shape=()) as t) if input.batch_dim == 0 and input.shape:
            if not call.builder.bound_indices(t, input.shape[0]):
                raise Unsupported(f"{call.where!r} picks by numbers that the model computed")
            inner = math.prod(input.shape[1:])
            t = broadcast(call.builder, t.view((1,)), (inner,))
            sizes: dict[str, Any] = {
                "outer": 1,
                "n": input.shape[0],
                "k": 1,
                "inner": inner,
                "skip": NO_CLASS,
            }
            return call.emit(ops.Gather, (input, t), input.shape[1:], **sizes)
    return _sliced(call, input, index)


def _sliced(call: Call, x: Value, index: Any) -> Value:
    wanted = list(index) if isinstance(index, tuple) else [index]
    if any(k is Ellipsis for k in wanted):
        at = next(i for i, k in enumerate(wanted) if k is Ellipsis)
        missing = len(x.shape) + x.is_batched - sum(k is not None for k in wanted) + 1
        wanted[at : at + 1] = [slice(None)] * missing
    dim, source, batch = 0, 0, x.batch_dim
    for k in wanted:
        if k is None:
            continue
        if source == batch:
            if not isinstance(k, slice) or k != slice(None):
                raise call.unsupported()
        elif isinstance(k, slice):
            start, stop, step = k.indices(x.shape[dim])
            if step < 0:
                raise call.unsupported()
            x = slice_(call.builder, x, dim, start, len(range(start, stop, step)), step)
            dim += 1
        elif isinstance(k, int):
            x = slice_(call.builder, x, dim, k % x.shape[dim], 1, drop=True)
        else:
            raise call.unsupported()
        source += 1
    return x.view(call.shape)


def look_up(call: Call, table: Any, index: Any) -> Value:
    """Rows of a table that is not trained, by numbers that inputs or targets are."""
    if not isinstance(table, Constant) or table.trained or not isinstance(index, Value):
        raise call.unsupported()
    count, *rest = table.tensor.shape
    numbers = call.builder.runs[0][call.node.all_input_nodes[-1]]
    if index.is_mask or numbers.is_floating_point() or not call.builder.bound_indices(index, count):
        raise Unsupported(f"{call.where!r} looks up what the model computed")
    f, t = math.prod(rest), math.prod(index.shape)
    return call.emit(ops.Embedding, (index,), (*index.shape, *rest), (table,), count=count, f=f, t=t)


@lowers("gather")
def gather(call: Call, input: Any, dim: int, index: Any) -> Value:
    """Values along a dimension by the numbers that targets or inputs are."""
    if isinstance(input, Constant) and dim in (0, -1) and input.tensor.ndim == 1:
        return look_up(call, input, index)
    if not isinstance(input, Value) or not isinstance(index, Value) or not call.batch_first:
        raise call.unsupported()
    d = dim_of(call, input, dim)
    before, after = input.shape[:d], input.shape[d + 1 :]
    if (index.shape[:d], index.shape[d + 1 :]) != (before, after) or len(index.shape) != len(input.shape):
        raise call.unsupported()
    if not call.builder.bound_indices(index, input.shape[d]):
        raise Unsupported(f"{call.where!r} picks by numbers that the model computed")
    return call.emit(
        ops.Gather, (input, index), index.shape,
        outer=math.prod(before), n=input.shape[d], k=index.shape[d], inner=math.prod(after), skip=NO_CLASS,
    )  # fmt: skip


@lowers("chunk", "split")
def split(call: Call, input: Value, size: Any = None, dim: int = 0, **_: Any) -> tuple[Value, ...]:
    d = dim_of(call, input, dim)
    counts = [some.shape[dim] for some in call.result]
    starts = [sum(counts[:k]) for k in range(len(counts))]
    return tuple(slice_(call.builder, input, d, lo, n) for lo, n in zip(starts, counts))


@lowers("unbind")
def unbind(call: Call, input: Value, dim: int = 0) -> tuple[Value, ...]:
    d = dim_of(call, input, dim)
    return tuple(slice_(call.builder, input, d, k, 1, drop=True) for k in range(input.shape[d]))


@lowers("select")
def select(call: Call, input: Value, dim: int, index: int) -> Value:
    if not isinstance(index, int):
        raise call.unsupported()
    d = dim_of(call, input, dim)
    return slice_(call.builder, input, d, index % input.shape[d], 1, drop=True)


@lowers("narrow")
def narrow(call: Call, input: Value, dim: int, start: int, length: int) -> Value:
    d = dim_of(call, input, dim)
    return slice_(call.builder, input, d, start % input.shape[d], length)


def concat(builder: Builder, values: list[Value], dim: int) -> Value:
    whole = values[0]
    for other in values[1:]:
        outer, rest = math.prod(whole.shape[:dim]), whole.shape[dim + 1 :]
        a, b = (math.prod(v.shape[dim:]) for v in (whole, other))
        shape = (*whole.shape[:dim], whole.shape[dim] + other.shape[dim], *rest)
        whole = builder.emit(ops.Cat, (whole, other), shape, outer=outer, a=a, b=b)
    return whole


@lowers("roll")
def roll(call: Call, input: Value, shifts: Any, dims: Any = None) -> Value:
    """Along each of some dimensions other than the batch."""
    x, by = value_of(call, input), _dims(shifts)
    if dims is None or not all(isinstance(n, int) for n in by):
        raise call.unsupported()
    for d, shift in zip([dim_of(call, x, d) for d in _dims(dims)], by):
        outer, dim, inner = math.prod(x.shape[:d]), x.shape[d], math.prod(x.shape[d + 1 :])
        x = call.emit(ops.Roll, (x,), x.shape, outer=outer, dim=dim, inner=inner, shift=shift % dim)
    return x


@lowers("cat", "concat")
def cat(call: Call, tensors: Any, dim: int = 0) -> Value:
    """Of values and of what is the same for all samples."""
    if any(x.batch_dim is None for x in tensors):
        raise call.mixes()
    d = dim_of(call, tensors[0], dim)
    values = [v if isinstance(v, Value) else expand_param(call, v, v.tensor.shape) for v in tensors]
    return concat(call.builder, values, d)


@lowers("stack")
def stack(call: Call, tensors: Any, dim: int = 0) -> Value:
    dim, batch = dim % call.result.ndim, call.batch_dim
    if batch is None or dim == batch or not all(isinstance(v, Value) for v in tensors):
        raise call.unsupported()
    at = dim - (dim > batch)
    return concat(call.builder, [v.view((*v.shape[:at], 1, *v.shape[at:])) for v in tensors], at)


@lowers(getattr)
def attribute(call: Call, input: Any, name: str) -> Value:
    """What is asked for by name: `values` of max and min, and a matrix turned."""
    if isinstance(input, LargestValues) and name == "values":
        return input.values
    if isinstance(input, Value) and name == "data":
        return call.builder.detach(input)
    if (
        name not in ("T", "mT")
        or not isinstance(input, Value)
        or not call.batch_first
        or len(input.shape) < 2
    ):
        raise call.unsupported()
    last = len(input.shape) - 1
    return permuted(call.builder, input, (*range(last - 1), last, last - 1))


@lowers("detach")
def detach(call: Call, input: Value) -> Value:
    return call.builder.detach(value_of(call, input))


# Reductions -------------------------------------------------------------------------------------------


@lowers("mean")
def mean(call: Call, input: Value, dim: Any = None, keepdim: bool = False, total: bool = False) -> Value:
    x = value_of(call, input)
    if not x.is_batched:
        return reduce_params(call, x, dim, not total).view(call.shape)
    if None in _dims(dim):
        raise call.unsupported()
    for d in sorted((dim_of(call, x, d) for d in _dims(dim)), reverse=True):
        x = reduce_dim(call, x, d, total)
    return x.view(call.shape)


@lowers("sum")
def sum_(call: Call, input: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return mean(call, input, dim, keepdim, total=True)


def reduce_dim(call: Call, x: Value, d: int, total: bool = False) -> Value:
    """The mean, or the sum, over one dimension of a sample."""
    outer, count, inner = math.prod(x.shape[:d]), x.shape[d], math.prod(x.shape[d + 1 :])
    scale, shape = 1.0 if total else 1.0 / count, x.shape[:d] + x.shape[d + 1 :]
    return call.emit(ops.Reduce, (x,), shape, outer=outer, dim=count, inner=inner, scale=scale)


def reduce_params(call: Call, x: Value, dim: Any, mean: bool = False) -> Value:
    """What is not batched over dimensions, which stay with one place each; neighbours at once."""
    every = range(len(x.shape)) if dim is None else _dims(dim)
    left = sorted(d % max(1, len(x.shape)) for d in every)
    scale = 1 / max(1, math.prod(x.shape[d] for d in left)) if mean else 1.0
    while left:
        last = first = left.pop()
        while left and left[-1] == first - 1:
            first = left.pop()
        outer, inner = math.prod(x.shape[:first]), math.prod(x.shape[last + 1 :])
        shape = (*x.shape[:first], *[1] * (last + 1 - first), *x.shape[last + 1 :])
        sizes: dict[str, Any] = {"outer": outer, "dim": math.prod(x.shape[first : last + 1]), "inner": inner}
        x, scale = call.emit(ops.Sum, (x,), shape, scale=scale, **sizes), 1.0
    return x


def lengths(call: Call, x: Value, dim: Any) -> Value:
    """How long rows are: those dimensions stay, with one place each."""
    square = unary(call, "WholePower<2>", x)
    if not x.is_batched:
        return unary(call, "Length", reduce_params(call, square, dim))
    shape = list(x.shape)
    for d in sorted((dim_of(call, x, d) for d in _dims(dim)), reverse=True):
        square, shape[d] = reduce_dim(call, square, d, total=True), 1
    return unary(call, "Length", square).view(tuple(shape))


def _norm(call: Call, input: Value, order: Any, dim: Any, dtype: Any, matrix: bool) -> Value:
    x, dims = value_of(call, input), _dims(dim)
    is_whole = x.is_batched and not all(isinstance(d, int) for d in dims)
    if order not in (2, "fro", None) or dtype is not None or is_whole or (matrix and order == 2):
        raise call.unsupported()
    return lengths(call, x, dim).view(call.shape)


@lowers("norm")
def norm(
    call: Call, input: Value, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Value:
    return _norm(call, input, p, dim, dtype, False)


@lowers(torch.linalg.norm)
def linalg_norm(call: Call, A: Value, ord: Any = None, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:  # fmt: skip
    return _norm(call, A, ord, dim, dtype, not isinstance(dim, int) and (A.is_batched is False or len(_dims(dim)) > 1))  # fmt: skip


@lowers(torch.linalg.vector_norm)
def vector_norm(
    call: Call, x: Value, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Value:
    return _norm(call, x, ord, dim, dtype, False)


@lowers(F.normalize)
def normalize(call: Call, input: Value, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Value:  # fmt: skip
    """Each row over its length."""
    x = value_of(call, input)
    if p != 2 or not isinstance(dim, int):
        raise call.unsupported()
    by = broadcast(call.builder, clip(call, lengths(call, x, dim), eps), x.shape)
    return call.emit(ops.Binary, (x, by), x.shape, function="Div", n=x.size)


@lowers(torch._weight_norm)
def weight_norm(call: Call, v: Value, g: Value, dim: int = 0) -> Value:
    """v over its length in all dimensions but one, times g."""
    rest = None if dim == -1 else [d for d in range(len(v.shape)) if d != dim]
    by = call.emit(ops.Binary, (g, lengths(call, v, rest)), g.shape, function="Div", n=g.size)
    return call.emit(ops.Binary, (v, broadcast(call.builder, by, v.shape)), v.shape, function="Mul", n=v.size)


@lowers("var")
def var(call: Call, input: Value, dim: Any = None, unbiased: Any = True, keepdim: bool = False, correction: Any = None) -> Value:  # fmt: skip
    """The mean square about the mean, along one dimension."""
    x, dims = value_of(call, input), _dims(dim)
    if len(dims) != 1 or not isinstance(dims[0], int):
        raise call.unsupported()
    d = dim_of(call, x, dims[0])
    correction = int(unbiased) if correction is None else correction
    middle = reduce_dim(call, x, d).view((*x.shape[:d], 1, *x.shape[d + 1 :]))
    off = add_values(call, x, affine(call, broadcast(call.builder, middle, x.shape), -1.0))
    total = reduce_dim(call, unary(call, "WholePower<2>", off), d, total=True)
    return affine(call, total, 1 / max(x.shape[d] - correction, 1e-9)).view(call.shape)


@lowers("std")
def std(call: Call, input: Value, dim: Any = None, unbiased: Any = True, keepdim: bool = False, correction: Any = None) -> Value:  # fmt: skip
    return unary(call, "Sqrt", var(call, input, dim, unbiased, keepdim, correction))


def largest(call: Call, input: Value, dim: Any, split_ties: bool, smallest: bool = False) -> Value:
    x, dims = value_of(call, input), _dims(dim)
    if not all(isinstance(d, int) for d in dims):
        raise call.unsupported()
    at = sorted((dim_of(call, x, d) for d in dims), reverse=True)
    x = affine(call, x, -1.0) if smallest else x
    for d in at:
        outer, dim, inner = math.prod(x.shape[:d]), x.shape[d], math.prod(x.shape[d + 1 :])
        shape = x.shape[:d] + x.shape[d + 1 :]
        x = call.emit(ops.Amax, (x,), shape, outer=outer, dim=dim, inner=inner, shared=split_ties)
    return affine(call, x, -1.0) if smallest else x


@lowers("amax")
def amax(call: Call, input: Value, dim: Any, keepdim: bool = False) -> Value:
    return largest(call, input, dim, True).view(call.shape)


@lowers("amin")
def amin(call: Call, input: Value, dim: Any, keepdim: bool = False) -> Value:
    return largest(call, input, dim, True, smallest=True).view(call.shape)


class LargestValues(TupleValue):
    """What max and min along a dimension give: values, and places that nobody may ask for."""

    def __init__(self, values: Value) -> None:
        self.values = values

    def __getitem__(self, index: Any) -> Value:
        if index != 0:
            raise Unsupported("the places of the largest numbers are used")
        return self.values


def _extreme(call: Call, input: Any, other: Any, keepdim: bool, larger: bool) -> Any:
    """Of two values, or (values, places) along a dimension, of which the places cannot be used."""
    if isinstance(other, (Value, Constant)):
        return _binary(call, "Max" if larger else "Min", input, other)
    if not isinstance(call.result, tuple):
        raise call.unsupported()
    x = largest(call, input, other, False, not larger)
    first, second = (run[call.node][0] for run in call.builder.runs)
    batch = find_batch_dim([first, second], call.node.name)
    if batch is None:
        raise call.mixes()
    return LargestValues(replace(x.view((*first.shape[:batch], *first.shape[batch + 1 :])), batch_dim=batch))


@lowers("max", "maximum")
def max_(call: Call, input: Any, dim: Any = None, keepdim: bool = False, other: Any = None) -> Any:
    return _extreme(call, input, dim if other is None else other, keepdim, True)


@lowers("min", "minimum")
def min_(call: Call, input: Any, dim: Any = None, keepdim: bool = False, other: Any = None) -> Any:
    return _extreme(call, input, dim if other is None else other, keepdim, False)


# Arithmetic -------------------------------------------------------------------------------------------


def expand_param(call: Call, constant: Constant, shape: Any) -> Value:
    """A tensor that no sample changes, as a value."""
    return call.emit(ops.ExpandParam, (), tuple(shape), (constant,), n=math.prod(shape))


def _aligned(call: Call, constant: Constant) -> Shape:
    """A constant's shape beside a sample of the result, 1 where it is the same for all."""
    full: Shape = tuple(constant.tensor.shape)
    if (batch := constant.batch_dim) is not None:
        full = (*full[:batch], 1, *full[batch:])
    full = (1,) * (call.result.ndim - len(full)) + full
    at = call.batch_dim
    if at is None or full[at] != 1:
        raise Unsupported(f"{call.node.name!r} broadcasts samples against something else")
    return full[:at] + full[at + 1 :]


def as_value(call: Call, x: Any) -> Value:
    """An operand in the shape of the result."""
    if isinstance(x, Value):
        return expanded(call, x)
    if isinstance(x, Constant):
        return broadcast(call.builder, expand_param(call, x, _aligned(call, x)), call.shape)
    if not isinstance(x, (int, float)):
        raise Unsupported(f"{call.node.name!r} takes something other than tensors and numbers")
    number = Constant(torch.tensor(float(x)), False)
    made = expand_param(call, number, (1,)) if call.is_batched else call.builder.load(number)
    return broadcast(call.builder, made, call.shape)


def expanded(call: Call, x: Value) -> Value:
    """A value in the shape of the result, which repeats it along dimensions where it has one place or none."""
    after = call.batch_dim
    if x.is_batched:
        if x.batch_dim is None or after is None:
            raise call.mixes()
        if len(x.shape) + 1 - x.batch_dim != call.result.ndim - after:
            raise Unsupported(f"{call.node.name!r} broadcasts samples against something else")
    return broadcast(call.builder, x, call.shape)


def broadcast(builder: Builder, x: Value, wanted: Shape) -> Value:
    shape = (1,) * (len(wanted) - len(x.shape)) + x.shape
    for d, count in enumerate(wanted):
        if shape[d] == count:
            continue
        outer, inner = math.prod(shape[:d]), math.prod(shape[d + 1 :])
        shape = (*shape[:d], count, *shape[d + 1 :])
        sizes: dict[str, Any] = {"outer": outer, "dim": count, "inner": inner}
        if x.is_batched:
            x = builder.emit(ops.Expand, (x,), shape, **sizes)
        else:
            x = builder.emit(ops.Sum, (x,), shape, spread=True, **sizes)
    return x.view(wanted)


@lowers("expand", "expand_as")
def expand(call: Call, input: Value, *_: Any, **__: Any) -> Value:
    return expanded(call, value_of(call, input))


def _shared_by_rows(call: Call, constant: Constant) -> Constant | None:
    """A constant as numbers that all rows of a sample of the result share, None where it must be a value."""
    shape = _aligned(call, constant)
    while shape and shape[0] == 1:
        shape = shape[1:]
    if shape and call.shape[len(call.shape) - len(shape) :] == shape:
        return Constant(constant.tensor.reshape(shape), constant.trained)
    if constant.trained:
        return None
    full = constant.tensor.reshape(_aligned(call, constant)).expand(call.shape)
    return Constant(full.contiguous(), False)


def _with_rows(call: Call, function: str, x: Value, constant: Constant) -> Value | None:
    """A value and numbers that its rows share, as one operation; None where the numbers must be a value."""
    numbers = _shared_by_rows(call, constant)
    if numbers is None or x.shape != call.shape:
        return None
    n = numbers.tensor.numel()
    rows = math.prod(call.shape) // n
    return call.emit(ops.BinaryParam, (x,), call.shape, (numbers,), function=function, n=n, rows=rows)


def number_of(x: Any) -> float | None:
    """An operand that is one number for any batch."""
    if isinstance(x, Constant) and not x.trained and x.tensor.numel() == 1:
        return float(x.tensor)
    return float(x) if isinstance(x, (int, float)) else None


def _check_operands(call: Call) -> None:
    if not call.builder.is_static([*call.node.args, *call.node.kwargs.values()]):
        raise call.unsupported()
    if call.name in ("iadd", "isub", "imul", "itruediv") or call.name.endswith("_"):
        refuse_shared(call)


@lowers("add", "add_", operator.add, operator.iadd)
def add(call: Call, input: Any, other: Any, sign: float = 1.0) -> Value:
    """Of two values, of a value and a number, or of a value and a tensor that no sample changes."""
    _check_operands(call)
    swapped = not isinstance(input, Value)
    mine, theirs = (sign, 1.0) if swapped else (1.0, sign)
    value, rest = (other, input) if swapped else (input, other)
    if (number := number_of(rest)) is not None and value.shape == call.shape:
        return affine(call, value, mine, theirs * number)
    if isinstance(rest, Constant) and (theirs > 0 or not rest.trained):
        value = value if mine > 0 else affine(call, value, -1.0)
        moved = Constant(rest.tensor if theirs > 0 else -rest.tensor, rest.trained, rest.batch_dim)
        if (done := _with_rows(call, "Add", value, moved)) is not None:
            return done
    a, b = as_value(call, input), as_value(call, other)
    return add_values(call, a, b if sign > 0 else affine(call, b, -1.0))


def add_values(call: Call, a: Value, b: Value) -> Value:
    return call.emit(ops.Binary, (a, b), a.shape, function="Add", n=a.size)


@lowers("sub", "sub_", operator.sub, operator.isub)
def sub(call: Call, input: Any, other: Any) -> Value:
    return add(call, input, other, -1.0)


@lowers("mul", "mul_", operator.mul, operator.imul)
def mul(call: Call, input: Any, other: Any) -> Value:
    _check_operands(call)
    x, by = (input, other) if isinstance(input, Value) else (other, input)
    return _scaled(call, x, by, False) or _binary(call, "Mul", input, other)


@lowers("div", "div_", operator.truediv, operator.itruediv)
def div(call: Call, input: Any, other: Any) -> Value:
    _check_operands(call)
    return _scaled(call, input, other, True) or _binary(call, "Div", input, other)


def _scaled(call: Call, x: Any, by: Any, divide: bool) -> Value | None:
    """A value times a number or what its rows share, or over it, as one operation."""
    if not isinstance(x, Value):
        return None
    if (number := number_of(by)) is not None and x.shape == call.shape:
        return affine(call, x, 1 / number if divide else number)
    if isinstance(by, Constant) and not (divide and by.trained):
        by = Constant(1 / by.tensor, False, by.batch_dim) if divide else by
        return _with_rows(call, "Mul", x, by)
    return None


def _binary(call: Call, function: str, a: Any, b: Any) -> Value:
    a, b = as_value(call, a), as_value(call, b)
    return call.emit(ops.Binary, (a, b), call.shape, function=function, n=a.size)


# Masks ------------------------------------------------------------------------------------------------


def _register_comparison(how: str, *targets: Any) -> None:
    @lowers(*targets)
    def compare(call: Call, input: Any, other: Any = 0) -> Value:
        """A mask: where numbers compare so with a number; `bool` and `not` are masks too."""
        if not isinstance(input, Value) or not isinstance(other, (int, float)):
            raise call.unsupported()
        if call.result.dtype != torch.bool:
            raise call.unsupported()
        return compare_scalar(call, input, how, float(other))


def compare_scalar(call: Call, x: Value, how: str, value: float) -> Value:
    made = call.emit(ops.CompareScalar, (x,), x.shape, n=math.prod(x.shape), value=value, how=how)
    return replace(made, is_mask=True)


for _how, _names in {"=": "eq", "!": "ne", "<": "lt", ">": "gt", "l": "le", "g": "ge"}.items():
    _register_comparison(_how, _names, getattr(operator, _names))
_register_comparison("!", "bool")
_register_comparison("=", "logical_not", operator.invert)


@lowers("masked_fill")
def masked_fill(call: Call, input: Value, mask: Any, value: Any) -> Value:
    if (number := number_of(value)) is None or not isinstance(input, Value):
        raise call.unsupported()
    return _filled(call, expanded(call, input), mask, number)


def _filled(call: Call, x: Value, mask: Any, number: float) -> Value:
    n = math.prod(call.shape)
    if not isinstance(mask, Constant):
        full = expanded(call, mask)
        return call.emit(ops.MaskedFill, (x, full), call.shape, n=n, rows=1, value=number)
    hidden = _shared_by_rows(call, Constant(mask.tensor.float(), False, mask.batch_dim))
    assert hidden is not None
    each = hidden.tensor.numel()
    return call.emit(ops.MaskedFill, (x,), call.shape, (hidden,), n=each, rows=n // each, value=number)


@lowers(torch.where)
def where(call: Call, condition: Any, input: Any, other: Any) -> Value:
    """One or the other, as a mask says."""
    mask, a, b = condition, input, other
    if isinstance(a, Value) and (number := number_of(b)) is not None and isinstance(mask, Constant):
        return _filled(call, expanded(call, a), Constant(~mask.tensor.bool(), False, mask.batch_dim), number)
    if isinstance(b, Value) and (number := number_of(a)) is not None:
        return _filled(call, expanded(call, b), mask, number)
    if isinstance(mask, Constant):
        mask = Constant(mask.tensor.float(), False, mask.batch_dim)
    given = tuple(as_value(call, v) for v in (mask, a, b))
    return call.emit(ops.Where, given, call.shape, n=math.prod(call.shape))


@lowers("logical_and", operator.and_)
def logical_and(call: Call, input: Any, other: Any) -> Value:
    """Where two masks hold."""
    if call.result.dtype != torch.bool:
        raise call.unsupported()
    masks = [
        Constant(m.tensor.float(), False, m.batch_dim) if isinstance(m, Constant) else m
        for m in (input, other)
    ]
    return replace(_binary(call, "Mul", *masks), is_mask=True)


# Products ---------------------------------------------------------------------------------------------


@lowers("matmul", "bmm", "mm", operator.matmul)
def matmul(call: Call, input: Any, other: Any) -> Value:
    """Of a value and a matrix that no sample changes, or of two values, matrix by matrix."""
    if isinstance(input, Value) and not input.is_batched:
        if len(input.shape) != 2 or len(other.shape) != 2:
            raise call.unsupported()
        sizes: dict[str, Any] = {"m": input.shape[0], "k": input.shape[1], "n": other.shape[1]}
        return call.emit(ops.Matmul, (input, other), call.shape, **sizes)
    if isinstance(input, Value) and isinstance(other, Constant) and other.tensor.ndim == 2:
        return _by_matrix(call, input, other)
    return batch_matmul(call.builder, _matrices(call, input), _matrices(call, other))


def _by_matrix(call: Call, x: Value, matrix: Constant) -> Value:
    i, o = matrix.tensor.shape
    shape, rows = (*x.shape[:-1], o), math.prod(x.shape[:-1])
    if not matrix.tensor.is_contiguous() and matrix.tensor.t().is_contiguous():
        turned = Constant(matrix.tensor.t(), matrix.trained)
        return call.emit(ops.Linear, (x,), shape, (turned, None), i=i, o=o, rows=rows)
    return call.emit(ops.LinearTransposed, (x,), shape, (matrix,), i=i, o=o, rows=rows)


def _matrices(call: Call, x: Any) -> Value:
    """An operand as matrices of each sample, as many as the result has."""
    after = call.batch_dim
    if isinstance(x, Constant):
        shape, batch = tuple(x.tensor.shape), x.batch_dim
        while batch is None and len(shape) > len(call.shape) and shape[0] == 1:
            shape = shape[1:]
        if len(x.tensor.shape) + (batch is not None) < 2:
            raise call.unsupported()
        x, batch, ndim = expand_param(call, x, shape), after, call.result.ndim
    else:
        batch, ndim = x.batch_dim, len(x.shape) + 1
        if ndim < 2:
            raise call.unsupported()
    if after is None or batch is None or ndim - batch != call.result.ndim - after or batch >= ndim - 2:
        raise Unsupported(f"the product at {call.node.name!r} mixes the samples of a batch")
    return broadcast(call.builder, x, (*call.shape[:-2], *x.shape[-2:]))


def batch_matmul(builder: Builder, a: Value, b: Value) -> Value:
    """[..., m, k] by [..., k, n]."""
    count, m, k, n = math.prod(a.shape[:-2]), a.shape[-2], a.shape[-1], b.shape[-1]
    shape = (*a.shape[:-1], n)
    last = len(b.shape) - 1
    b = permuted(builder, b, (*range(last - 1), last, last - 1))
    (a, by_a), (b, by_b) = (as_matrices(x) for x in (a, b))
    return builder.emit(ops.BatchMatmul, (a, b), shape, count=count, m=m, n=n, k=k, a=by_a, b=by_b)


def as_matrices(x: Value) -> tuple[Value, tuple[int, int, int]]:
    """Where matrices lie: how far apart they, their rows and their columns are."""
    root, steps = strides_of(x)
    if (each := _one_step(x.shape[:-2], steps[:-2])) is None:
        return x, (x.shape[-2] * x.shape[-1], x.shape[-1], 1)
    return root, (each, steps[-2], steps[-1])


def _one_step(sizes: Shape, steps: Shape) -> int | None:
    """How far apart things lie that several dimensions number, None where that differs."""
    known = [(size, step) for size, step in zip(sizes, steps) if size > 1]
    for (_, step), (size, inner) in pairwise(known):
        if step != size * inner:
            return None
    return known[-1][1] if known else 0


@lowers("einsum")
def einsum(call: Call, equation: str, *operands: Any) -> Value:
    """Of two operands, as one product of matrices."""
    if len(operands) != 2 or "." in equation or "->" not in equation:
        raise call.unsupported()
    given, _, wanted = equation.replace(" ", "").partition("->")
    made = []
    for letters, x in zip(given.split(","), operands):
        if len(set(letters)) < len(letters):
            raise call.unsupported()
        batch = x.batch_dim
        x = x if isinstance(x, Value) else expand_param(call, x, x.tensor.shape)
        made.append((letters if batch is None else letters[:batch] + letters[batch + 1 :], x))
    if (at := call.batch_dim) is None:
        raise call.mixes()
    return _contracted(call, made[0], made[1], wanted[:at] + wanted[at + 1 :])


def _contracted(call: Call, a: tuple[str, Value], b: tuple[str, Value], wanted: str) -> Value:
    both = [c for c in a[0] if c in b[0]]
    shared, summed = [c for c in both if c in wanted], [c for c in both if c not in wanted]
    rows, columns = ([c for c in x[0] if c not in both] for x in (a, b))
    if set(rows + columns) - set(wanted):
        raise call.unsupported()
    sizes: dict[str, Any] = {c: size for letters, x in (a, b) for c, size in zip(letters, x.shape)}

    def matrices(x: tuple[str, Value], order: list[str], inner: list[str], outer: list[str]) -> Value:
        moved = permuted(call.builder, x[1], tuple(x[0].index(c) for c in shared + order))
        shape = (*(sizes[c] for c in shared), *(math.prod(sizes[c] for c in some) for some in (inner, outer)))
        return moved if moved.shape == shape else moved.view(shape)

    product = batch_matmul(
        call.builder,
        matrices(a, rows + summed, rows, summed),
        matrices(b, summed + columns, summed, columns),
    )
    found = shared + rows + columns
    order = tuple(found.index(c) for c in wanted)
    return permuted(call.builder, product.view(tuple(sizes[c] for c in found)), order)
