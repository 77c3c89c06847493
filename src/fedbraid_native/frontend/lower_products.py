"""Lowerings of matrix products."""

from __future__ import annotations

import math
import operator
from itertools import pairwise
from typing import Any

from fedbraid_native import ops
from fedbraid_native.errors import Unsupported
from fedbraid_native.frontend.builder import Builder
from fedbraid_native.frontend.lower_shapes import permuted, strides_of
from fedbraid_native.frontend.lower_tensor import broadcast, expand_param
from fedbraid_native.frontend.registry import Call, lowers
from fedbraid_native.frontend.values import Constant, Value
from fedbraid_native.ops import Shape


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
