"""Attention, and the encoder and decoder layers that are made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn import functional as F

from fedbraid_native.errors import Unsupported
from fedbraid_native.layers import LAYERS, _dropout, _linear, layer
from fedbraid_native.products import attend, operand
from fedbraid_native.trace import Value
from fedbraid_native.values import (
    Call,
    total,
)


def _attention(call: Call, layer: nn.MultiheadAttention, x: Value) -> Any:
    """Gives (outputs, None)."""
    names = (
        "query",
        "key",
        "value",
        "key_padding_mask",
        "need_weights",
        "attn_mask",
        "average_attn_weights",
        "is_causal",
    )
    given, nodes = call.named(names)
    query, key, value = (operand(call, nodes[n], given[n]) for n in names[:3])
    if given["value"] is given["key"]:
        value = key
    return (
        attend(call, layer, query, key, value, given.get("attn_mask"), given.get("key_padding_mask")),
        None,
    )


def _encoder_layer(call: Call, layer: nn.TransformerEncoderLayer, x: Value) -> Value:
    mask, absent = _masks(call, ("src_mask", "src_key_padding_mask", "is_causal"), "src_mask")
    return _encode(call, layer, x, mask, absent)


def _encoder(call: Call, layer: nn.TransformerEncoder, x: Value) -> Value:
    mask, absent = _masks(call, ("mask", "src_key_padding_mask", "is_causal"), "mask")
    for each in layer.layers:
        if type(each) is not nn.TransformerEncoderLayer:
            raise Unsupported(f"the layer {call.where!r} has layers of the user's own")
        x = _encode(call, each, x, mask, absent)
    return x if layer.norm is None else _norm(call, layer.norm, x)


def _masks(call: Call, names: tuple[str, ...], mask: str) -> tuple[Any, Any]:
    given = dict(zip(names, call.args[1:])) | call.kwargs
    return given.get(mask), given.get("src_key_padding_mask")


def _norm(call: Call, module: nn.Module, x: Value) -> Value:
    out = layer(call, module, x)
    assert isinstance(out, Value)
    return out


def _think(call: Call, each: Any, last: nn.Dropout) -> Callable[[Value], Value]:
    activation: Any = _ACTIVATIONS.get(each.activation) or each.activation

    def think(x: Value) -> Value:
        inner = layer(call, activation, _linear(call, each.linear1, x))
        return _dropout(call, last, _linear(call, each.linear2, _dropout(call, each.dropout, inner)))

    return think


def _blocks(
    call: Call, first: bool, x: Value, parts: Iterable[tuple[Callable[[Value], Value], nn.Module]]
) -> Value:
    """Each part with a way around it, and its norm before it or after."""
    for part_of, norm in parts:
        if first:
            x = total(call, x, part_of(_norm(call, norm, x)))
        else:
            x = _norm(call, norm, total(call, x, part_of(x)))
    return x


def _encode(call: Call, each: nn.TransformerEncoderLayer, x: Value, mask: Any, absent: Any) -> Value:
    def look(x: Value) -> Value:
        return _dropout(call, each.dropout1, attend(call, each.self_attn, x, x, x, mask, absent))

    return _blocks(
        call, each.norm_first, x, ((look, each.norm1), (_think(call, each, each.dropout2), each.norm2))
    )


_DECODER = ("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask")


def _decoder_layer(call: Call, layer: nn.TransformerDecoderLayer, x: Value) -> Value:
    return _decode(call, layer, x, *_decoded(call))


def _decoder(call: Call, layer: nn.TransformerDecoder, x: Value) -> Value:
    memory, masks = _decoded(call)
    for each in layer.layers:
        if type(each) is not nn.TransformerDecoderLayer:
            raise Unsupported(f"the layer {call.where!r} has layers of the user's own")
        x = _decode(call, each, x, memory, masks)
    return x if layer.norm is None else _norm(call, layer.norm, x)


def _decoded(call: Call) -> tuple[Value, dict[str, Any]]:
    """What a decoder looks at, and its masks."""
    given, nodes = call.named(("memory", *_DECODER), 1)
    return operand(call, nodes["memory"], given["memory"]), {name: given.get(name) for name in _DECODER}


def _decode(
    call: Call, each: nn.TransformerDecoderLayer, x: Value, memory: Value, masks: dict[str, Any]
) -> Value:
    mine, theirs, my_padding, their_padding = (masks[name] for name in _DECODER)

    def look(x: Value) -> Value:
        return _dropout(call, each.dropout1, attend(call, each.self_attn, x, x, x, mine, my_padding))

    def ask(x: Value) -> Value:
        seen = attend(call, each.multihead_attn, x, memory, memory, theirs, their_padding)
        return _dropout(call, each.dropout2, seen)

    think = _think(call, each, each.dropout3)
    return _blocks(call, each.norm_first, x, ((look, each.norm1), (ask, each.norm2), (think, each.norm3)))


_ACTIVATIONS: dict[Any, nn.Module] = {F.relu: nn.ReLU(), F.gelu: nn.GELU(), F.silu: nn.SiLU()}


LAYERS.update(
    {
        nn.MultiheadAttention: _attention,
        nn.TransformerEncoderLayer: _encoder_layer,
        nn.TransformerEncoder: _encoder,
        nn.TransformerDecoderLayer: _decoder_layer,
        nn.TransformerDecoder: _decoder,
    }
)
