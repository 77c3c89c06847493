"""Lowerings of functions and methods of tensors: arithmetic, functions of each number, shapes, reductions, masks, products."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from fedbraid_native import ops
from fedbraid_native.errors import Unsupported
from fedbraid_native.frontend.builder import Builder
from fedbraid_native.frontend.registry import Call, lowers
from fedbraid_native.frontend.values import Constant, Value
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


def dims_of(dim: Any) -> list[Any]:
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
