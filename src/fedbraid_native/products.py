"""Matrix products of values, and attention."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedbraid_native import ops, values
from fedbraid_native.errors import Unsupported
from fedbraid_native.ops import HeadStrides, Shape
from fedbraid_native.trace import Builder, Constant, Value
from fedbraid_native.values import Call

# Products ---------------------------------------------------------------------------------------------


def matmul(call: Call) -> Value | None:
    """Of a value and a matrix that no sample changes, or of two values, matrix by matrix."""
    if len(call.args) != 2:
        return None
    a, b = call.args
    if isinstance(a, Value) and isinstance(b, Constant) and b.tensor.ndim == 2:
        return _by_matrix(call, a, b)
    first, second = call.nodes
    if not all(call.builder.runs[0][node].ndim >= 2 for node in (first, second)):
        return None
    return times(call.builder, _matrices(call, first, a), _matrices(call, second, b))


def _by_matrix(call: Call, x: Value, matrix: Constant) -> Value:
    i, o = matrix.tensor.shape
    shape, rows = (*x.shape[:-1], o), math.prod(x.shape[:-1])
    if not matrix.tensor.is_contiguous() and matrix.tensor.t().is_contiguous():
        turned = Constant(matrix.tensor.t(), matrix.trained)
        return call.builder.emit(ops.Linear, (x,), shape, (turned, None), i=i, o=o, rows=rows)
    return call.builder.emit(ops.LinearTransposed, (x,), shape, (matrix,), i=i, o=o, rows=rows)


def _matrices(call: Call, node: Any, x: Any) -> Value:
    """An operand as matrices of each sample, as many as the result has."""
    batch, after, ndim = (
        call.builder.batch(node),
        call.builder.batch(call.node),
        call.builder.runs[0][node].ndim,
    )
    if isinstance(x, Constant):
        shape = tuple(x.tensor.shape)
        while batch is None and len(shape) > len(call.shape) and shape[0] == 1:
            shape = shape[1:]
        x, batch, ndim = values.same_for_all(call, x, shape), after, call.result.ndim
    if after is None or batch is None or ndim - batch != call.result.ndim - after or batch >= ndim - 2:
        raise Unsupported(f"the product at {call.node.name!r} mixes the samples of a batch")
    return values.repeated(call.builder, x, (*call.shape[:-2], *x.shape[-2:]))


def times(builder: Builder, a: Value, b: Value) -> Value:
    """[..., m, k] by [..., k, n]."""
    count, m, k, n = math.prod(a.shape[:-2]), a.shape[-2], a.shape[-1], b.shape[-1]
    shape = (*a.shape[:-1], n)
    last = len(b.shape) - 1
    b = values.moved_to(builder, b, (*range(last - 1), last, last - 1))
    (a, by_a), (b, by_b) = (_as_matrices(builder, x) for x in (a, b))
    return builder.emit(ops.BatchMatmul, (a, b), shape, count=count, m=m, n=n, k=k, a=by_a, b=by_b)


def _as_matrices(builder: Builder, x: Value) -> tuple[Value, tuple[int, int, int]]:
    """Where matrices lie: how far apart they, their rows and their columns are."""
    root, steps = values.lying(builder, x)
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


def einsum(call: Call) -> Value | None:
    """Of two operands, as one product of matrices."""
    equation, operands = call.args[0], call.args[1:]
    if len(operands) != 2 or "." in equation or "->" not in equation:
        return None
    given, _, wanted = equation.replace(" ", "").partition("->")
    names, made = given.split(","), []
    for letters, node, x in zip(names, call.nodes[1:], operands):
        batch = call.builder.batch(node)
        if len(set(letters)) < len(letters):
            return None
        x = x if isinstance(x, Value) else values.same_for_all(call, x, x.tensor.shape)
        made.append((letters if batch is None else letters[:batch] + letters[batch + 1 :], x))
    if (at := call.builder.batch(call.node)) is None:
        raise Unsupported(f"{call.node.name!r} mixes the samples of a batch")
    wanted = wanted[:at] + wanted[at + 1 :]
    return _contracted(call.builder, made[0], made[1], wanted)


def _contracted(builder: Builder, a: tuple[str, Value], b: tuple[str, Value], wanted: str) -> Value | None:
    both = [c for c in a[0] if c in b[0]]
    shared, summed = [c for c in both if c in wanted], [c for c in both if c not in wanted]
    rows, columns = ([c for c in x[0] if c not in both] for x in (a, b))
    if set(rows + columns) - set(wanted):
        return None
    sizes = {c: size for letters, x in (a, b) for c, size in zip(letters, x.shape)}

    def matrices(x: tuple[str, Value], order: list[str], inner: list[str], outer: list[str]) -> Value:
        moved = values.moved_to(builder, x[1], tuple(x[0].index(c) for c in shared + order))
        shape = (*(sizes[c] for c in shared), *(math.prod(sizes[c] for c in some) for some in (inner, outer)))
        return moved if moved.shape == shape else Value(moved.id, shape)

    product = times(
        builder, matrices(a, rows + summed, rows, summed), matrices(b, summed + columns, summed, columns)
    )
    found = shared + rows + columns
    return values.moved_to(
        builder, Value(product.id, tuple(sizes[c] for c in found)), tuple(found.index(c) for c in wanted)
    )


# Attention --------------------------------------------------------------------------------------------


def dropout(call: Call, p: float, x: Value, channels: bool = False) -> Value:
    n = math.prod(x.shape)
    if not p:
        return x
    return call.builder.emit(ops.Dropout, (x,), x.shape, n=n, each=n // x.shape[0] if channels else 1, p=p)


def scaled_dot_product(call: Call) -> Value | None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given, nodes = call.named(names)
    q, k, v = (given[name] for name in names[:3])
    if not all(isinstance(x, Value) and len(x.shape) >= 2 for x in (q, k, v)) or given.get("enable_gqa"):
        return None
    if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        raise Unsupported(f"the attention {call.where!r} has keys or values for other heads than its queries")
    t, s = q.shape[-2], k.shape[-2]
    mask, absent = _mask(call, nodes.get("attn_mask"), given.get("attn_mask"), (*q.shape[:-1], s))
    if given.get("is_causal"):
        mask = torch.full((t, s), -torch.inf).triu(1)
    scale, p = given.get("scale"), float(given.get("dropout_p") or 0.0)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    where = [_rows(call.builder, x) for x in (q, k, v)]
    heads, e = math.prod(q.shape[:-2]), v.shape[-1]
    to = HeadStrides(t * heads * e, e, heads * e)
    out = call.builder.emit(
        ops.ScaledDotProductAttention, (*(x for x, _ in where), *([] if absent is None else [absent])), (t, heads, e), (mask,),
        t=t, s=s, d=q.shape[-1], e=e, heads=heads, where=(*(at for _, at in where), to), scale=scale, p=p,
        each=mask is not None and mask.numel() > t * s,
    )  # fmt: skip
    turned = values.moved_to(call.builder, out, (1, 0, 2))
    return turned if turned.shape == call.shape else Value(turned.id, call.shape)


def _rows(builder: Builder, x: Value) -> tuple[Value, HeadStrides]:
    """Where the rows of all heads of a value lie."""
    root, (head, row, column) = _as_matrices(builder, x)
    if column != 1:
        root, head, row = x, x.shape[-2] * x.shape[-1], x.shape[-1]
    return root, HeadStrides(math.prod(x.shape), head, row)


def _mask(call: Call, node: Any, mask: Any, scores: Shape) -> tuple[Tensor | None, Value | None]:
    """What is added to the scores, and which keys are absent."""
    if mask is None:
        return None, None
    t, s = scores[-2:]
    if isinstance(mask, Value):
        if mask.id not in call.builder.masks or math.prod(mask.shape) != s or mask.shape[-1] != s:
            raise Unsupported(
                f"the attention {call.where!r} has a mask of each sample other than a comparison for its keys"
            )
        return None, call.builder.emit(ops.CompareScalar, (mask,), mask.shape, n=s, value=0.0, how="=")
    if mask.trained:
        raise Unsupported(f"the attention {call.where!r} has a mask that is trained")
    numbers = mask.tensor
    if numbers.dtype == torch.bool:
        numbers = torch.zeros(numbers.shape).masked_fill(~numbers, -torch.inf)
    numbers = numbers.reshape([1] * (len(scores) - numbers.ndim) + list(numbers.shape)[-len(scores) :])
    each = any(n > 1 for n in numbers.shape[:-2])
    return numbers.expand(*(scores[:-2] if each else numbers.shape[:-2]), t, s).contiguous(), None


def attend(
    call: Call, layer: nn.MultiheadAttention, query: Value, key: Value, value: Value, mask: Any, absent: Any
) -> Value:
    """What a layer of multi-head attention makes of its three inputs."""
    if layer.bias_k is not None or layer.add_zero_attn:
        raise Unsupported(f"the attention {call.where!r} has bias_kv or add_zero_attn")
    if call.builder.batch(call.source) != (0 if layer.batch_first else 1):
        raise Unsupported(f"the attention {call.where!r} takes samples for places: look at batch_first")
    e, heads = layer.embed_dim, layer.num_heads
    t, s, d = query.shape[0], key.shape[0], e // heads
    parts = _projected(call, layer, query, key, value)
    where = [HeadStrides(x.shape[0] * x.shape[1], d, x.shape[1], start) for x, start in parts]
    inputs = [x for x, _ in parts]
    if absent is not None:
        inputs.append(_mask_of_keys(call, absent))
    seen = call.builder.emit(
        ops.ScaledDotProductAttention, tuple(inputs), (t, e), (_added(call, mask, t, s),), t=t, s=s, d=d, e=d, heads=heads,
        where=(*where, HeadStrides(t * e, d, e)), scale=1 / math.sqrt(d), p=layer.dropout,
    )  # fmt: skip
    out = layer.out_proj
    return call.builder.emit(ops.Linear, (seen,), (t, e), (out.weight, out.bias), i=e, o=e, rows=t)


def _projected(
    call: Call, layer: nn.MultiheadAttention, query: Value, key: Value, value: Value
) -> list[tuple[Value, int]]:
    """Queries, keys and values, and where in a row they start: those of one input are made together."""
    e, bias = layer.embed_dim, layer.in_proj_bias

    def linear(x: Value, weight: Tensor, first: int, count: int) -> Value:
        some = None if bias is None else bias[first * e : (first + count) * e]
        shape = (x.shape[0], count * e)
        return call.builder.emit(
            ops.Linear, (x,), shape, (weight, some), i=x.shape[1], o=count * e, rows=x.shape[0]
        )

    if layer.in_proj_weight is None:
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        return [(linear(x, w, i, 1), 0) for i, (x, w) in enumerate(zip((query, key, value), weights))]
    weight = layer.in_proj_weight
    if query == key == value:
        joint = linear(query, weight, 0, 3)
        return [(joint, i * e) for i in range(3)]
    asked = linear(query, weight[:e], 0, 1)
    if key == value:
        joint = linear(key, weight[e:], 1, 2)
        return [(asked, 0), (joint, 0), (joint, e)]
    return [(asked, 0), (linear(key, weight[e : 2 * e], 1, 1), 0), (linear(value, weight[2 * e :], 2, 1), 0)]


def _added(call: Call, mask: Any, t: int, s: int) -> Tensor | None:
    """What a mask adds to the scores."""
    if mask is None:
        return None
    if not isinstance(mask, Constant) or mask.trained or mask.tensor.shape != (t, s):
        raise Unsupported(
            f"the attention {call.where!r} has a mask that is not one for all samples and heads"
        )
    if mask.tensor.dtype != torch.bool:
        return mask.tensor
    return torch.zeros(t, s).masked_fill(mask.tensor, -torch.inf)


def _mask_of_keys(call: Call, absent: Any) -> Value:
    if not isinstance(absent, Value) or absent.id not in call.builder.masks:
        raise Unsupported(
            f"the attention {call.where!r} has a padding mask other than a comparison of inputs"
        )
    return absent


def operand(call: Call, node: fx.Node, x: Any) -> Value:
    """What attention is given: a value, or something that is the same for all samples."""
    if isinstance(x, Constant) and call.builder.batch(node) is not None:
        return values.same_for_all(call, x, x.tensor.shape)
    if not isinstance(x, Value):
        raise Unsupported(f"the layer {call.where!r} gets something other than tensors of the samples")
    return x
