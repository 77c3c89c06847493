"""Lowerings of losses, and of what others are written with."""

from __future__ import annotations

import math
from typing import Any

from torch.nn import functional as F

from fedbraid_native import ops
from fedbraid_native.errors import Unsupported
from fedbraid_native.frontend.lower_nn import softmax_of
from fedbraid_native.frontend.lower_reductions import reduce_dim
from fedbraid_native.frontend.lower_shapes import slice_, strides_of
from fedbraid_native.frontend.lower_tensor import (
    add_values,
    affine,
    as_value,
    clip,
    dim_of,
    float_bits,
    unary,
    value_of,
)
from fedbraid_native.frontend.registry import Call, lowers
from fedbraid_native.frontend.values import Constant, Value
from fedbraid_native.ops import Shape


def _check_reduction(call: Call, size_average: Any, reduce: Any, reduction: str) -> None:
    if size_average is not None or reduce is not None or reduction != "none":
        raise Unsupported(f"{call.where!r} takes samples together; give it reduction='none'")


def _product(call: Call, a: Value, b: Value) -> Value:
    return call.emit(ops.Binary, (a, b), a.shape, function="Mul", n=a.size)


def _minus(call: Call, a: Value, b: Value) -> Value:
    return add_values(call, a, affine(call, b, -1.0))


# Of distances -----------------------------------------------------------------------------------------


def _of_distance(call: Call, function: str, input: Any, target: Any, weight: Any = None) -> Value:
    if weight is not None:
        raise call.unsupported()
    return unary(call, function, _minus(call, as_value(call, input), as_value(call, target)))


@lowers(F.mse_loss)
def mse_loss(
    call: Call, input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", weight: Any = None
) -> Value:  # fmt: skip
    _check_reduction(call, size_average, reduce, reduction)
    return _of_distance(call, "WholePower<2>", input, target, weight)


@lowers(F.l1_loss)
def l1_loss(
    call: Call, input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", weight: Any = None
) -> Value:  # fmt: skip
    _check_reduction(call, size_average, reduce, reduction)
    return _of_distance(call, "Abs", input, target, weight)


@lowers(F.smooth_l1_loss)
def smooth_l1_loss(
    call: Call, input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", beta: float = 1.0
) -> Value:  # fmt: skip
    _check_reduction(call, size_average, reduce, reduction)
    return _of_distance(call, f"SmoothL1<{float_bits(beta)}>" if beta else "Abs", input, target)


@lowers(F.huber_loss)
def huber_loss(
    call: Call, input: Any, target: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None
) -> Value:
    _check_reduction(call, None, None, reduction)
    return _of_distance(call, f"Huber<{float_bits(delta)}>", input, target, weight)


# Of labels --------------------------------------------------------------------------------------------


def _weighed(call: Call, weight: Any, each: Value) -> Value:
    return each if weight is None else _product(call, each, as_value(call, weight))


@lowers(F.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(
    call: Call, input: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
    pos_weight: Any = None,
) -> Value:  # fmt: skip
    """(1 - t) x - (1 + (p - 1) t) log sigmoid(x), p the weight of ones."""
    _check_reduction(call, size_average, reduce, reduction)
    x, t = as_value(call, input), as_value(call, target)
    right = unary(call, "LogSigmoid", x)
    if pos_weight is not None:
        more = affine(call, as_value(call, pos_weight), 1.0, -1.0)
        right = _product(call, right, affine(call, _product(call, t, more), 1.0, 1.0))
    return _weighed(call, weight, _minus(call, _product(call, affine(call, t, -1.0, 1.0), x), right))


@lowers(F.binary_cross_entropy)
def binary_cross_entropy(
    call: Call, input: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> Value:  # fmt: skip
    """Logarithms are -100 at the least, as PyTorch's."""
    _check_reduction(call, size_average, reduce, reduction)
    x, t = as_value(call, input), as_value(call, target)
    one, other = (clip(call, unary(call, "Log", p), -100.0) for p in (x, affine(call, x, -1.0, 1.0)))
    each = add_values(call, _product(call, t, one), _product(call, affine(call, t, -1.0, 1.0), other))
    return _weighed(call, weight, affine(call, each, -1.0))


# Of classes -------------------------------------------------------------------------------------------


def _classes(call: Call, input: Any, target: Any, ignore_index: int) -> tuple[Value, Value]:
    """Outputs [C, ...], and the numbers [...] of their classes."""
    if any(x.batch_dim != 0 for x in (input, target)):
        raise Unsupported(f"{call.where!r} mixes the samples of a batch")
    if not isinstance(input, Value) or not isinstance(target, Value) or input.shape[1:] != target.shape:
        raise Unsupported(f"{call.where!r} gets outputs and classes that do not fit each other")
    if not call.builder.bound_indices(target, input.shape[0], ignore_index):
        raise Unsupported(f"{call.where!r} gets classes that are not the targets as they are")
    return input, target


def _check_weight(call: Call, weight: Any) -> None:
    if weight is not None and not isinstance(weight, Constant):
        raise Unsupported(f"{call.where!r} has weights that samples change")


@lowers(F.cross_entropy)
def cross_entropy(
    call: Call, input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Value:  # fmt: skip
    _check_reduction(call, size_average, reduce, reduction)
    _check_weight(call, weight)
    smooth = float(label_smoothing)
    if call.argument_result(1, "target").is_floating_point():
        return _soft(call, input, target, smooth, weight)
    x, t = _classes(call, input, target, ignore_index)
    root, steps = strides_of(x)
    places = math.prod(t.shape)
    if not _even(t.shape, steps[1:]):
        root, steps = x, (places,) + (1,) * len(t.shape)
    return call.emit(
        ops.CrossEntropyLoss, (root, t), t.shape, (weight,), c=x.shape[0], t=places,
        steps=(steps[0], steps[-1] if t.shape else 1), smooth=smooth, skip=ignore_index,
    )  # fmt: skip


def _even(shape: Shape, steps: Shape) -> bool:
    """Whether all places are equally far apart."""
    return all(steps[d] == steps[d + 1] * shape[d + 1] for d in range(len(shape) - 1))


def _soft(call: Call, x: Any, t: Any, smooth: float, weight: Constant | None) -> Value:
    """Targets that say how likely each class is."""
    if (
        not isinstance(x, Value)
        or not isinstance(t, Value)
        or x.shape != t.shape
        or x.batch_dim
        or t.batch_dim
    ):
        raise call.unsupported()
    likely = softmax_of(call, x, 0, True)
    t = affine(call, t, 1 - smooth, smooth / x.shape[0]) if smooth else t
    each = _scaled(call, _product(call, likely, t), weight)
    return affine(call, reduce_dim(call, each, 0, total=True), -1.0)


def _scaled(call: Call, x: Value, weight: Constant | None) -> Value:
    """Each class times its weight."""
    if weight is None:
        return x
    full = weight.tensor.view(-1, *[1] * len(x.shape[1:])).expand(x.shape).contiguous()
    return call.emit(
        ops.BinaryParam, (x,), x.shape, (Constant(full, weight.trained),), function="Mul", n=x.size, rows=1
    )


@lowers(F.nll_loss)
def nll_loss(
    call: Call, input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean",
) -> Value:  # fmt: skip
    _check_reduction(call, size_average, reduce, reduction)
    x, t = _classes(call, input, target, ignore_index)
    _check_weight(call, weight)
    sizes: dict[str, Any] = {
        "outer": 1,
        "n": x.shape[0],
        "k": 1,
        "inner": math.prod(t.shape),
        "skip": ignore_index,
    }
    return affine(call, call.emit(ops.Gather, (_scaled(call, x, weight), t), t.shape, **sizes), -1.0)


@lowers(F.one_hot)
def one_hot(call: Call, input: Any, num_classes: Any = -1) -> Value:
    t = value_of(call, input)
    if not isinstance(num_classes, int):
        raise call.unsupported()
    if num_classes < 1 or not call.builder.bound_indices(t, num_classes):
        raise Unsupported(f"{call.where!r} counts classes itself, or gets numbers that the model computed")
    return call.emit(ops.OneHot, (t,), (*t.shape, num_classes), n=math.prod(t.shape), c=num_classes)


@lowers("logsumexp")
def logsumexp(call: Call, input: Value, dim: Any, keepdim: bool = False) -> Value:
    """What a number is more than its log-softmax."""
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(input, Value) or not isinstance(dim, int):
        raise call.unsupported()
    d = dim_of(call, input, dim)
    likely = softmax_of(call, input, d, True)
    a, b = (slice_(call.builder, v, d, 0, 1) for v in (input, likely))
    return _minus(call, a, b).view(call.shape)
