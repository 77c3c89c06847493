"""Lowerings of attention, and of the encoder and decoder layers that are made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbraid_native import ops
from fedbraid_native.errors import Unsupported
from fedbraid_native.frontend.lower_nn import dropout, linear
from fedbraid_native.frontend.lower_products import as_matrices
from fedbraid_native.frontend.lower_shapes import permuted
from fedbraid_native.frontend.lower_tensor import add_values, expand_param
from fedbraid_native.frontend.registry import Call, follow, lowers
from fedbraid_native.frontend.values import Constant, Value
from fedbraid_native.ops import HeadStrides, Shape


@lowers(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    call: Call, query: Value, key: Value, value: Value, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Value:  # fmt: skip
    q, k, v = query, key, value
    if not all(isinstance(x, Value) and len(x.shape) >= 2 for x in (q, k, v)) or enable_gqa:
        raise call.unsupported()
    if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        raise Unsupported(f"the attention {call.where!r} has keys or values for other heads than its queries")
    t, s = q.shape[-2], k.shape[-2]
    mask, absent = _mask(call, attn_mask, (*q.shape[:-1], s))
    if is_causal:
        mask = torch.full((t, s), -torch.inf).triu(1)
    scale, p = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale), float(dropout_p or 0.0)
    where = [_rows(x) for x in (q, k, v)]
    heads, e = math.prod(q.shape[:-2]), v.shape[-1]
    to = HeadStrides(t * heads * e, e, heads * e)
    out = call.emit(
        ops.ScaledDotProductAttention, (*(x for x, _ in where), *([] if absent is None else [absent])), (t, heads, e), (mask,),
        t=t, s=s, d=q.shape[-1], e=e, heads=heads, where=(*(at for _, at in where), to), scale=scale, p=p,
        each=mask is not None and mask.numel() > t * s,
    )  # fmt: skip
    turned = permuted(call.builder, out, (1, 0, 2))
    return turned if turned.shape == call.shape else turned.view(call.shape)


def _rows(x: Value) -> tuple[Value, HeadStrides]:
    """Where the rows of all heads of a value lie."""
    root, (head, row, column) = as_matrices(x)
    if column != 1:
        root, head, row = x, x.shape[-2] * x.shape[-1], x.shape[-1]
    return root, HeadStrides(math.prod(x.shape), head, row)


def _mask(call: Call, mask: Any, scores: Shape) -> tuple[Tensor | None, Value | None]:
    """What is added to the scores, and which keys are absent."""
    if mask is None:
        return None, None
    t, s = scores[-2:]
    if isinstance(mask, Value):
        if not mask.is_mask or math.prod(mask.shape) != s or mask.shape[-1] != s:
            raise Unsupported(
                f"the attention {call.where!r} has a mask of each sample other than a comparison for its keys"
            )
        return None, call.emit(ops.CompareScalar, (mask,), mask.shape, n=s, value=0.0, how="=")
    if mask.trained:
        raise Unsupported(f"the attention {call.where!r} has a mask that is trained")
    numbers = mask.tensor
    if numbers.dtype == torch.bool:
        numbers = torch.zeros(numbers.shape).masked_fill(~numbers, -torch.inf)
    numbers = numbers.reshape([1] * (len(scores) - numbers.ndim) + list(numbers.shape)[-len(scores) :])
    each = any(n > 1 for n in numbers.shape[:-2])
    return numbers.expand(*(scores[:-2] if each else numbers.shape[:-2]), t, s).contiguous(), None


def _operand(call: Call, x: Any) -> Value:
    """What attention is given: a value, or something that is the same for all samples."""
    if isinstance(x, Constant) and x.batch_dim is not None:
        return expand_param(call, x, x.tensor.shape)
    if not isinstance(x, Value):
        raise Unsupported(f"the layer {call.where!r} gets something other than tensors of the samples")
    return x


@lowers(nn.MultiheadAttention)
def multihead_attention(
    call: Call, query: Any, key: Any, value: Any, key_padding_mask: Any = None, need_weights: bool = True, attn_mask: Any = None,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Value, None]:  # fmt: skip
    """(outputs, None)."""
    q, k = _operand(call, query), _operand(call, key)
    v = k if value is key else _operand(call, value)
    return attend(call, call.module, q, k, v, attn_mask, key_padding_mask), None


def attend(
    call: Call, layer: nn.MultiheadAttention, query: Value, key: Value, value: Value, mask: Any, absent: Any
) -> Value:
    """What a layer of multi-head attention makes of its three inputs."""
    if layer.bias_k is not None or layer.add_zero_attn:
        raise Unsupported(f"the attention {call.where!r} has bias_kv or add_zero_attn")
    if call.builder.batch_dim(call.node.all_input_nodes[0]) != (0 if layer.batch_first else 1):
        raise Unsupported(f"the attention {call.where!r} takes samples for places: look at batch_first")
    e, heads = layer.embed_dim, layer.num_heads
    t, s, d = query.shape[0], key.shape[0], e // heads
    parts = _projected(call, layer, query, key, value)
    where = [HeadStrides(x.shape[0] * x.shape[1], d, x.shape[1], start) for x, start in parts]
    inputs = [x for x, _ in parts]
    if absent is not None:
        if not isinstance(absent, Value) or not absent.is_mask:
            raise Unsupported(
                f"the attention {call.where!r} has a padding mask other than a comparison of inputs"
            )
        inputs.append(absent)
    seen = call.emit(
        ops.ScaledDotProductAttention, tuple(inputs), (t, e), (_added(call, mask, t, s),), t=t, s=s, d=d, e=d, heads=heads,
        where=(*where, HeadStrides(t * e, d, e)), scale=1 / math.sqrt(d), p=layer.dropout,
    )  # fmt: skip
    return linear(call, seen, layer.out_proj.weight, layer.out_proj.bias)


def _projected(
    call: Call, layer: nn.MultiheadAttention, query: Value, key: Value, value: Value
) -> list[tuple[Value, int]]:
    """Queries, keys and values, and where in a row they start: those of one input are made together."""
    e, bias, weight = layer.embed_dim, layer.in_proj_bias, layer.in_proj_weight

    def project(x: Value, matrix: Tensor, first: int, count: int) -> Value:
        return linear(call, x, matrix, None if bias is None else bias[first * e : (first + count) * e])

    if weight is None:
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        return [(project(x, w, i, 1), 0) for i, (x, w) in enumerate(zip((query, key, value), weights))]
    if query == key == value:
        joint = project(query, weight, 0, 3)
        return [(joint, i * e) for i in range(3)]
    asked = project(query, weight[:e], 0, 1)
    if key == value:
        joint = project(key, weight[e:], 1, 2)
        return [(asked, 0), (joint, 0), (joint, e)]
    return [
        (asked, 0),
        (project(key, weight[e : 2 * e], 1, 1), 0),
        (project(value, weight[2 * e :], 2, 1), 0),
    ]


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


# Encoders and decoders --------------------------------------------------------------------------------


def _feed_forward(call: Call, layer: Any, last: nn.Dropout) -> Callable[[Value], Value]:
    def feed(x: Value) -> Value:
        inner = follow(call, layer.activation, linear(call, x, layer.linear1.weight, layer.linear1.bias))
        inner = dropout(call, inner, layer.dropout.p)
        return dropout(call, linear(call, inner, layer.linear2.weight, layer.linear2.bias), last.p)

    return feed


def _residual(
    call: Call, norm_first: bool, x: Value, parts: Iterable[tuple[Callable[[Value], Value], nn.Module]]
) -> Value:
    """Each part with a way around it, and its norm before it or after."""
    for part_of, norm in parts:
        if norm_first:
            x = add_values(call, x, part_of(follow(call, norm, x)))
        else:
            x = follow(call, norm, add_values(call, x, part_of(x)))
    return x


def _encode(call: Call, layer: nn.TransformerEncoderLayer, x: Value, mask: Any, absent: Any) -> Value:
    def look(x: Value) -> Value:
        return dropout(call, attend(call, layer.self_attn, x, x, x, mask, absent), layer.dropout1.p)

    feed = _feed_forward(call, layer, layer.dropout2)
    return _residual(call, layer.norm_first, x, ((look, layer.norm1), (feed, layer.norm2)))


@lowers(nn.TransformerEncoderLayer)
def encoder_layer(
    call: Call, src: Any, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = False
) -> Value:
    return _encode(call, call.module, _operand(call, src), src_mask, src_key_padding_mask)


@lowers(nn.TransformerEncoder)
def encoder(
    call: Call, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None
) -> Value:
    layer, x = call.module, _operand(call, src)
    for each in _layers(call, layer, nn.TransformerEncoderLayer):
        x = _encode(call, each, x, mask, src_key_padding_mask)
    return x if layer.norm is None else follow(call, layer.norm, x)


def _layers(call: Call, layer: Any, kind: type[nn.Module]) -> list[Any]:
    if any(type(each) is not kind for each in layer.layers):
        raise Unsupported(f"the layer {call.where!r} has layers of the user's own")
    return list(layer.layers)


def _decode(
    call: Call, layer: nn.TransformerDecoderLayer, x: Value, memory: Value, masks: tuple[Any, Any, Any, Any]
) -> Value:
    mine, theirs, my_padding, their_padding = masks

    def look(x: Value) -> Value:
        return dropout(call, attend(call, layer.self_attn, x, x, x, mine, my_padding), layer.dropout1.p)

    def ask(x: Value) -> Value:
        seen = attend(call, layer.multihead_attn, x, memory, memory, theirs, their_padding)
        return dropout(call, seen, layer.dropout2.p)

    parts = (
        (look, layer.norm1),
        (ask, layer.norm2),
        (_feed_forward(call, layer, layer.dropout3), layer.norm3),
    )
    return _residual(call, layer.norm_first, x, parts)


@lowers(nn.TransformerDecoderLayer, nn.TransformerDecoder)
def decoder(
    call: Call, tgt: Any, memory: Any, tgt_mask: Any = None, memory_mask: Any = None, tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None, tgt_is_causal: Any = None, memory_is_causal: Any = False,
) -> Value:  # fmt: skip
    layer, x, memory = call.module, _operand(call, tgt), _operand(call, memory)
    masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
    if isinstance(layer, nn.TransformerDecoderLayer):
        return _decode(call, layer, x, memory, masks)
    for each in _layers(call, layer, nn.TransformerDecoderLayer):
        x = _decode(call, each, x, memory, masks)
    return x if layer.norm is None else follow(call, layer.norm, x)
