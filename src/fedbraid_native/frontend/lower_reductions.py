"""Lowerings of means, sums, lengths of rows, variances and the largest over dimensions other than the batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from fedbraid_native import ops
from fedbraid_native.errors import Unsupported
from fedbraid_native.frontend.builder import find_batch_dim
from fedbraid_native.frontend.lower_tensor import (
    _binary,
    add_values,
    affine,
    broadcast,
    clip,
    dim_of,
    dims_of,
    unary,
    value_of,
)
from fedbraid_native.frontend.registry import Call, lowers
from fedbraid_native.frontend.values import Constant, TupleValue, Value


@lowers("mean")
def mean(call: Call, input: Value, dim: Any = None, keepdim: bool = False, total: bool = False) -> Value:
    x = value_of(call, input)
    if not x.is_batched:
        return reduce_params(call, x, dim, not total).view(call.shape)
    if None in dims_of(dim):
        raise call.unsupported()
    for d in sorted((dim_of(call, x, d) for d in dims_of(dim)), reverse=True):
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
    every = range(len(x.shape)) if dim is None else dims_of(dim)
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
    for d in sorted((dim_of(call, x, d) for d in dims_of(dim)), reverse=True):
        square, shape[d] = reduce_dim(call, square, d, total=True), 1
    return unary(call, "Length", square).view(tuple(shape))


def _norm(call: Call, input: Value, order: Any, dim: Any, dtype: Any, matrix: bool) -> Value:
    x, dims = value_of(call, input), dims_of(dim)
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
    return _norm(call, A, ord, dim, dtype, not isinstance(dim, int) and (A.is_batched is False or len(dims_of(dim)) > 1))  # fmt: skip


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
    x, dims = value_of(call, input), dims_of(dim)
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
    x, dims = value_of(call, input), dims_of(dim)
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
