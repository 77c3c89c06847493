"""Lowerings of what moves numbers: views, permutations, slices, look-ups, concatenations."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedbraid_native import ops
from fedbraid_native.errors import Unsupported
from fedbraid_native.frontend.builder import Builder
from fedbraid_native.frontend.lower_reductions import LargestValues
from fedbraid_native.frontend.lower_tensor import NO_CLASS, broadcast, dim_of, dims_of, expand_param, value_of
from fedbraid_native.frontend.registry import Call, lowers
from fedbraid_native.frontend.values import BatchIndex, Constant, Permutation, Value
from fedbraid_native.ops import Shape


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
    x, by = value_of(call, input), dims_of(shifts)
    if dims is None or not all(isinstance(n, int) for n in by):
        raise call.unsupported()
    for d, shift in zip([dim_of(call, x, d) for d in dims_of(dims)], by):
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
