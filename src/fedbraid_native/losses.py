"""What the losses of PyTorch, and what others are written with, come to in operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fedbraid_native import ops, values
from fedbraid_native.errors import Unsupported
from fedbraid_native.ops import Shape
from fedbraid_native.trace import Constant, Numbering, Value
from fedbraid_native.values import (
    Call,
    Handle,
    affine,
    as_value,
    between,
    bits,
    curve,
    dimension,
    lying,
    mean_over,
    part,
    repeated,
    total,
)

NOBODY = -1  # what no number of a class is

Given = dict[str, Any]


def loss(names: str, make: Callable[[Call, Given, Given], Value | None]) -> Handle:
    """A loss of one number for each place, given its arguments by name, and their nodes."""

    def handle(call: Call) -> Value | None:
        given, nodes = call.named(tuple(names.split()))
        old = given.get("size_average") is not None or given.get("reduce") is not None
        if old or given.get("reduction", "mean") != "none":
            raise Unsupported(f"{call.where!r} takes samples together; give it reduction='none'")
        return make(call, given, nodes)

    return handle


def _both(call: Call, given: Given, nodes: Given) -> tuple[Value, Value]:
    x, t = (as_value(call, nodes[name], given[name]) for name in ("input", "target"))
    return x, t


def _product(call: Call, a: Value, b: Value) -> Value:
    return call.builder.emit(ops.Mul, (a, b), a.shape, n=math.prod(a.shape))


def _minus(call: Call, a: Value, b: Value) -> Value:
    return total(call, a, affine(call, b, -1.0))


# Of distances -----------------------------------------------------------------------------------------


def _of_distance(bend: Callable[[Given], str]) -> Callable[[Call, Given, Given], Value | None]:
    def make(call: Call, given: Given, nodes: Given) -> Value | None:
        if given.get("weight") is not None:
            return None
        return curve(call, bend(given), _minus(call, *_both(call, given, nodes)))

    return make


def _smooth_l1(given: Given) -> str:
    beta = given.get("beta", 1.0)
    return f"SmoothL1<{bits(beta)}>" if beta else "Abs"


# Of labels --------------------------------------------------------------------------------------------


def _weighed(call: Call, given: Given, nodes: Given, each: Value) -> Value:
    if given.get("weight") is None:
        return each
    return _product(call, each, as_value(call, nodes["weight"], given["weight"]))


def _with_logits(call: Call, given: Given, nodes: Given) -> Value:
    """(1 - t) x - (1 + (p - 1) t) log sigmoid(x), p the weight of ones."""
    x, t = _both(call, given, nodes)
    right = curve(call, "LogSigmoid", x)
    if given.get("pos_weight") is not None:
        more = affine(call, as_value(call, nodes["pos_weight"], given["pos_weight"]), 1.0, -1.0)
        right = _product(call, right, affine(call, _product(call, t, more), 1.0, 1.0))
    return _weighed(call, given, nodes, _minus(call, _product(call, affine(call, t, -1.0, 1.0), x), right))


def _binary(call: Call, given: Given, nodes: Given) -> Value:
    """Logarithms are -100 at the least, as PyTorch's."""
    x, t = _both(call, given, nodes)
    one, other = (
        between(call, curve(call, "Log", p), -100.0, math.inf) for p in (x, affine(call, x, -1.0, 1.0))
    )
    each = total(call, _product(call, t, one), _product(call, affine(call, t, -1.0, 1.0), other))
    return _weighed(call, given, nodes, affine(call, each, -1.0))


# Of classes -------------------------------------------------------------------------------------------


def _classes(call: Call, given: Given, nodes: Given) -> tuple[Value, Value, int]:
    """Outputs [C, ...], the numbers [...] of their classes, and which of them costs nothing."""
    x, t, skip = given["input"], given["target"], given.get("ignore_index", -100)
    for node in (nodes["input"], nodes["target"]):
        if call.builder.batch(node) != 0:
            raise Unsupported(f"{call.where!r} mixes the samples of a batch")
    if not isinstance(x, Value) or not isinstance(t, Value) or x.shape[1:] != t.shape:
        raise Unsupported(f"{call.where!r} gets outputs and classes that do not fit each other")
    if not call.builder.limit(t, x.shape[0], skip):
        raise Unsupported(f"{call.where!r} gets classes that are not the targets as they are")
    return x, t, skip


def _weights(call: Call, given: Given) -> Constant | None:
    weight = given.get("weight")
    if weight is not None and not isinstance(weight, Constant):
        raise Unsupported(f"{call.where!r} has weights that samples change")
    return weight


def _cross_entropy(call: Call, given: Given, nodes: Given) -> Value | None:
    smooth, weight = float(given.get("label_smoothing", 0.0)), _weights(call, given)
    if call.builder.runs[0][nodes["target"]].is_floating_point():
        return _soft(call, given, nodes, smooth, weight)
    x, t, skip = _classes(call, given, nodes)
    root, steps = lying(call.builder, x)
    places = math.prod(t.shape)
    if not _even(t.shape, steps[1:]):
        root, steps = x, (places,) + (1,) * len(t.shape)
    return call.builder.emit(
        ops.CrossEntropyLoss, (root, t), t.shape, (weight,),
        c=x.shape[0], t=places, steps=(steps[0], steps[-1] if t.shape else 1), smooth=smooth, skip=skip,
    )  # fmt: skip


def _even(shape: Shape, steps: Shape) -> bool:
    """Whether all places are equally far apart."""
    return all(steps[d] == steps[d + 1] * shape[d + 1] for d in range(len(shape) - 1))


def _soft(call: Call, given: Given, nodes: Given, smooth: float, weight: Constant | None) -> Value | None:
    """Targets that say how likely each class is."""
    x, t = given["input"], given["target"]
    if not isinstance(x, Value) or not isinstance(t, Value) or x.shape != t.shape:
        return None
    if any(call.builder.batch(nodes[n]) != 0 for n in ("input", "target")):
        return None
    c, rest = x.shape[0], math.prod(x.shape[1:])
    likely = call.builder.emit(ops.Softmax, (x,), x.shape, n=c, rows=1, inner=rest, log=True)
    t = affine(call, t, 1 - smooth, smooth / c) if smooth else t
    return affine(
        call, mean_over(call, _scaled(call, _product(call, likely, t), weight), 0, total=True), -1.0
    )


def _scaled(call: Call, x: Value, weight: Constant | None) -> Value:
    """Each class times its weight."""
    if weight is None:
        return x
    full = weight.tensor.view(-1, *[1] * len(x.shape[1:])).expand(x.shape).contiguous()
    n = math.prod(x.shape)
    return call.builder.emit(ops.MulParam, (x,), x.shape, (Constant(full, weight.trained),), n=n, rows=1)


def _nll(call: Call, given: Given, nodes: Given) -> Value:
    x, t, skip = _classes(call, given, nodes)
    each = _scaled(call, x, _weights(call, given))
    inner = math.prod(t.shape)
    picked = call.builder.emit(
        ops.Gather, (each, t), t.shape, outer=1, n=x.shape[0], k=1, inner=inner, skip=skip
    )
    return affine(call, picked, -1.0)


# By number --------------------------------------------------------------------------------------------


def gather(call: Call) -> Value | None:
    """Values along a dimension by the numbers that targets or inputs are."""
    x, dim, index = call.args[0], call.argument(1, "dim"), call.argument(2, "index")
    if isinstance(x, Constant):
        return _looked_up(call, x, index) if dim in (0, -1) and x.tensor.ndim == 1 else None
    if not isinstance(x, Value) or not isinstance(index, Value) or call.builder.batch(call.node) != 0:
        return None
    d = dimension(call, dim)
    before, after = x.shape[:d], x.shape[d + 1 :]
    if (index.shape[:d], index.shape[d + 1 :]) != (before, after) or len(index.shape) != len(x.shape):
        return None
    if not call.builder.limit(index, x.shape[d]):
        raise Unsupported(f"{call.where!r} picks by numbers that the model computed")
    return call.builder.emit(
        ops.Gather, (x, index), index.shape,
        outer=math.prod(before), n=x.shape[d], k=index.shape[d], inner=math.prod(after), skip=NOBODY,
    )  # fmt: skip


def getitem(call: Call) -> Any:
    """Also rows of a tensor that no sample changes, `weights[targets]`, and `outputs[arange(samples), targets]`."""
    x, index = call.args
    if not isinstance(x, Value):
        return _looked_up(call, x, index)
    match index:
        case (Numbering(), Value(shape=()) as t) if call.builder.batch(call.source) == 0 and x.shape:
            if not call.builder.limit(t, x.shape[0]):
                raise Unsupported(f"{call.where!r} picks by numbers that the model computed")
            inner = math.prod(x.shape[1:])
            t = repeated(call.builder, Value(t.id, (1,)), (inner,))
            return call.builder.emit(
                ops.Gather, (x, t), x.shape[1:], outer=1, n=x.shape[0], k=1, inner=inner, skip=NOBODY
            )
    return values.getitem(call)


def _looked_up(call: Call, table: Any, index: Any) -> Value | None:
    if not isinstance(table, Constant) or table.trained or not isinstance(index, Value):
        return None
    count, *rest = table.tensor.shape
    whole = not call.builder.runs[0][call.node.all_input_nodes[-1]].is_floating_point()
    if index.id in call.builder.masks or not whole or not call.builder.limit(index, count):
        raise Unsupported(f"{call.where!r} looks up what the model computed")
    f, t = math.prod(rest), math.prod(index.shape)
    return call.builder.emit(ops.Embedding, (index,), (*index.shape, *rest), (table,), count=count, f=f, t=t)


def one_hot(call: Call) -> Value | None:
    t, count = call.args[0] if call.args else call.kwargs["input"], call.argument(1, "num_classes", -1)
    if not isinstance(t, Value) or not isinstance(count, int):
        return None
    if count < 1 or not call.builder.limit(t, count):
        raise Unsupported(f"{call.where!r} counts classes itself, or gets numbers that the model computed")
    return call.builder.emit(ops.OneHot, (t,), (*t.shape, count), n=math.prod(t.shape), c=count)


def logsumexp(call: Call) -> Value | None:
    """What a number is more than its log-softmax."""
    x, dim = call.args[0], call.argument(1, "dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(x, Value) or not isinstance(dim, int):
        return None
    d = dimension(call, dim)
    rows, inner = math.prod(x.shape[:d]), math.prod(x.shape[d + 1 :])
    likely = call.builder.emit(ops.Softmax, (x,), x.shape, n=x.shape[d], rows=rows, inner=inner, log=True)
    a, b = (part(call.builder, v, d, 0, 1) for v in (x, likely))
    return Value(_minus(call, a, b).id, call.shape)


def both(call: Call) -> Value | None:
    """Where two masks hold."""
    a, b = call.args if len(call.args) == 2 else (None, None)
    if call.result.dtype != torch.bool or not any(isinstance(m, Value) for m in (a, b)):
        return None
    masks = [Constant(m.tensor.float(), False) if isinstance(m, Constant) else m for m in (a, b)]
    first, second = (as_value(call, node, mask) for node, mask in zip(call.nodes, masks))
    mask = _product(call, first, second)
    call.builder.masks.add(mask.id)
    return mask


_NAMES = "input target size_average reduce reduction"
FUNCTIONS: dict[Any, Handle] = {
    torch.nn.functional.mse_loss: loss(f"{_NAMES} weight", _of_distance(lambda given: "WholePower<2>")),
    torch.nn.functional.l1_loss: loss(f"{_NAMES} weight", _of_distance(lambda given: "Abs")),
    torch.nn.functional.smooth_l1_loss: loss(f"{_NAMES} beta", _of_distance(_smooth_l1)),
    torch.nn.functional.huber_loss: loss(
        "input target reduction delta weight",
        _of_distance(lambda given: f"Huber<{bits(given.get('delta', 1.0))}>"),
    ),
    torch.nn.functional.binary_cross_entropy_with_logits: loss(
        "input target weight size_average reduce reduction pos_weight", _with_logits
    ),
    torch.nn.functional.binary_cross_entropy: loss(
        "input target weight size_average reduce reduction", _binary
    ),
    torch.nn.functional.cross_entropy: loss(
        "input target weight size_average ignore_index reduce reduction label_smoothing", _cross_entropy
    ),
    torch.nn.functional.nll_loss: loss(
        "input target weight size_average ignore_index reduce reduction", _nll
    ),
    torch.nn.functional.one_hot: one_hot,
}
