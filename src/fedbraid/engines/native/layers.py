"""What each layer, function and method of PyTorch comes to in operations."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedbraid.engines.native import ops
from fedbraid.engines.native.ops import Shape
from fedbraid.engines.native.trace import Builder, Constant, Several, Unsupported, Value


@dataclass(frozen=True)
class Call:
    """One node of the trace: who is called, with what, and what it gave for a batch."""

    builder: Builder
    node: fx.Node
    result: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def where(self) -> str:
        return str(self.node.target)[2:] if self.node.op == "call_module" else self.node.name

    @property
    def shape(self) -> Shape:
        return self.builder.shape(self.node)


def apply(call: Call) -> Any:
    """The value (or the values) that a node gives, with operations made for it."""
    node, target = call.node, call.node.target
    if node.op == "call_module":
        done = layer(call, call.builder.layer(node))
    else:
        handle = METHODS.get(str(target)) if node.op == "call_method" else FUNCTIONS.get(target)
        done = None if handle is None else handle(call)
    if done is None:
        raise Unsupported(f"the operation {_name(target)!r} at {node.name!r} is not supported")
    return done


def layer(call: Call, module: nn.Module, x: Value | None = None) -> Any:
    """What a layer makes of its input."""
    make = LAYERS.get(type(module))
    if make is None:
        raise Unsupported(f"the layer {type(module).__name__} at {call.where!r} is not supported")
    if getattr(module, "inplace", False):
        _refuse_shared(call)
    x = call.args[0] if x is None and call.args else x
    if not isinstance(x, Value):
        raise Unsupported(f"the layer {call.where!r} gets something other than one tensor of the samples")
    return make(call, module, x)


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _refuse_shared(call: Call) -> None:
    if len(_source(call).users) > 1:
        raise Unsupported(f"{call.where!r} changes in place what something else reads")


def _pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _one(value: Any) -> int:
    return int(value) if isinstance(value, int) else int(value[0])


# Layers -----------------------------------------------------------------------------------------------


def _linear(call: Call, layer: nn.Linear, x: Value) -> Value:
    rows = math.prod(x.shape[:-1])
    return call.builder.emit(
        ops.Linear, (x,), (*x.shape[:-1], layer.out_features), (layer.weight, layer.bias),
        i=layer.in_features, o=layer.out_features, rows=rows,
    )  # fmt: skip


def _image(call: Call, x: Value) -> tuple[int, int, int]:
    """Channels, rows and columns; a sequence is an image of one row."""
    if len(x.shape) not in (2, 3):
        raise Unsupported(
            f"the layer {call.where!r} gets samples of shape {x.shape}, not channels by rows by columns"
        )
    return (x.shape[0], 1, x.shape[1]) if len(x.shape) == 2 else (x.shape[0], x.shape[1], x.shape[2])


def _both(value: Any, flat: bool, alone: int = 1) -> tuple[int, int]:
    return (alone, _one(value)) if flat else _pair(value)


def _conv(call: Call, layer: nn.Conv2d | nn.Conv1d, x: Value) -> Value:
    flat = isinstance(layer, nn.Conv1d)
    channels, height, width = _image(call, x)
    if any(d != 1 for d in layer.dilation) or layer.padding_mode != "zeros":
        raise Unsupported(f"the convolution {call.where!r} has dilation or a padding other than zeros")
    padding: Any = layer.padding
    if isinstance(padding, str):
        if padding == "same" and any(k % 2 == 0 for k in layer.kernel_size):
            raise Unsupported(f"the convolution {call.where!r} pads unevenly")
        padding = tuple(k // 2 if padding == "same" else 0 for k in layer.kernel_size)
    kernel, stride, border = (
        _both(layer.kernel_size, flat),
        _both(layer.stride, flat),
        _both(padding, flat, 0),
    )
    out = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip((height, width), kernel, stride, border)]
    return call.builder.emit(
        ops.Conv, (x,), (layer.out_channels, *out[1:]) if flat else (layer.out_channels, *out),
        (layer.weight, layer.bias), i=channels // layer.groups, h=height, w=width, o=layer.out_channels // layer.groups,
        kernel=kernel, stride=stride, padding=border, groups=layer.groups,
    )  # fmt: skip


def _max_pool(call: Call, layer: nn.MaxPool2d | nn.MaxPool1d, x: Value) -> Value:
    flat = isinstance(layer, nn.MaxPool1d)
    if any(d != 1 for d in _pair(layer.dilation)) or layer.ceil_mode or layer.return_indices:
        raise Unsupported(f"the pooling {call.where!r} has dilation, ceil_mode or return_indices")
    return _pool(call, ops.MaxPool, x, flat, layer)


def _avg_pool(call: Call, layer: nn.AvgPool2d | nn.AvgPool1d, x: Value) -> Value:
    if layer.ceil_mode:
        raise Unsupported(f"the pooling {call.where!r} has ceil_mode")
    flat = isinstance(layer, nn.AvgPool1d)
    area = math.prod(_both(layer.kernel_size, flat))
    divisor = getattr(layer, "divisor_override", None) or (area if layer.count_include_pad else 0)
    return _pool(call, ops.MeanPool, x, flat, layer, divisor=divisor)


def _pool(call: Call, kind: type[ops.Pool], x: Value, flat: bool, layer: Any, **more: Any) -> Value:
    channels, height, width = _image(call, x)
    kernel, stride = _both(layer.kernel_size, flat), _both(layer.stride or layer.kernel_size, flat)
    border = _both(layer.padding, flat, 0)
    out = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip((height, width), kernel, stride, border)]
    return call.builder.emit(
        kind, (x,), (channels, *out[1:]) if flat else (channels, *out), c=channels, h=height, w=width,
        kernel=kernel, stride=stride, padding=border, **more,
    )  # fmt: skip


def _adaptive_pool(call: Call, layer: nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool1d, x: Value) -> Value:
    flat = isinstance(layer, nn.AdaptiveAvgPool1d)
    channels, height, width = _image(call, x)
    size: Any = layer.output_size
    wanted = (1, _one(size)) if flat else size if isinstance(size, tuple) else (size, size)
    rows, columns = wanted[0] or height, wanted[1] or width
    if height % rows or width % columns:
        raise Unsupported(f"the pooling {call.where!r} cuts {height}x{width} into uneven windows")
    kernel = (height // rows, width // columns)
    return call.builder.emit(
        ops.MeanPool, (x,), (channels, columns) if flat else (channels, rows, columns), c=channels, h=height,
        w=width, kernel=kernel, stride=kernel, divisor=math.prod(kernel),
    )  # fmt: skip


def _group_norm(call: Call, layer: nn.GroupNorm, x: Value) -> Value:
    return call.builder.emit(
        ops.Norm, (x,), x.shape, (layer.weight, layer.bias),
        c=x.shape[0], each=math.prod(x.shape[1:]), groups=layer.num_groups, eps=layer.eps,
    )  # fmt: skip


def _batch_norm(call: Call, layer: nn.BatchNorm1d | nn.BatchNorm2d, x: Value) -> Value:
    if not (layer.training and layer.track_running_stats) or layer.momentum is None:
        raise Unsupported(f"the layer {call.where!r} keeps no running statistics")
    running = (layer.running_mean, layer.running_var)
    if any(op.mixes and call.builder.place(layer.running_mean) in op.weights for op in call.builder.ops):
        raise Unsupported(f"the layer {call.where!r} is used twice")
    return call.builder.emit(
        ops.BatchNorm, (x,), x.shape, (layer.weight, layer.bias, *running),
        c=x.shape[0], each=math.prod(x.shape[1:]), eps=layer.eps, momentum=layer.momentum,
    )  # fmt: skip


def _instance_norm(call: Call, layer: nn.InstanceNorm1d | nn.InstanceNorm2d, x: Value) -> Value:
    if layer.track_running_stats:
        raise Unsupported(f"the layer {call.where!r} keeps running statistics")
    return call.builder.emit(
        ops.Norm, (x,), x.shape, (layer.weight, layer.bias),
        c=x.shape[0], each=math.prod(x.shape[1:]), groups=x.shape[0], eps=layer.eps,
    )  # fmt: skip


def _map(function: str) -> Callable[[Call, nn.Module, Value], Value]:
    def make(call: Call, layer: nn.Module, x: Value) -> Value:
        return call.builder.emit(ops.Map, (x,), x.shape, function=function, n=math.prod(x.shape))

    return make


def _leaky(call: Call, layer: nn.LeakyReLU, x: Value) -> Value:
    if layer.negative_slope < 0:
        raise Unsupported(f"the layer {call.where!r} has a negative slope below zero")
    return _map(f"LeakyRelu<{_bits(layer.negative_slope)}>")(call, layer, x)


def _bits(value: float) -> int:
    """A float32 as a whole number, for a template."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32).item())


def _curve(function: str) -> Callable[[Call, nn.Module, Value], Value]:
    def make(call: Call, layer: nn.Module, x: Value) -> Value:
        return call.builder.emit(ops.Curve, (x,), x.shape, function=function, n=math.prod(x.shape))

    return make


def _gelu(call: Call, layer: nn.GELU, x: Value) -> Value:
    return _curve("GeluTanh" if layer.approximate == "tanh" else "Gelu")(call, layer, x)


def _softmax(call: Call, layer: nn.Softmax | nn.LogSoftmax, x: Value) -> Value:
    dim = -1 if layer.dim is None else layer.dim
    if dim not in (-1, call.result.ndim - 1):
        raise Unsupported(f"the layer {call.where!r} is along another dimension than the last")
    log = isinstance(layer, nn.LogSoftmax)
    return call.builder.emit(ops.Softmax, (x,), x.shape, n=x.shape[-1], rows=math.prod(x.shape[:-1]), log=log)


def _layer_norm(call: Call, layer: nn.LayerNorm, x: Value) -> Value:
    n = math.prod(layer.normalized_shape)
    return call.builder.emit(
        ops.Norm, (x,), x.shape, (layer.weight, layer.bias),
        c=n, each=1, groups=1, eps=layer.eps, rows=math.prod(x.shape) // n,
    )  # fmt: skip


def _rms_norm(call: Call, layer: nn.RMSNorm, x: Value) -> Value:
    n = math.prod(layer.normalized_shape)
    eps = torch.finfo(torch.float32).eps if layer.eps is None else layer.eps
    return call.builder.emit(
        ops.Rms, (x,), x.shape, (layer.weight,), n=n, rows=math.prod(x.shape) // n, eps=eps
    )


def _dropout(call: Call, layer: nn.Dropout, x: Value) -> Value:
    if not layer.p:
        return x
    n = math.prod(x.shape)
    together = isinstance(layer, (nn.Dropout1d, nn.Dropout2d))  # whole channels
    return call.builder.emit(
        ops.Dropout, (x,), x.shape, n=n, each=n // x.shape[0] if together else 1, p=layer.p
    )


def _flatten(call: Call, layer: nn.Flatten, x: Value) -> Value | None:
    return _reshape(call, x)


def _embedding(call: Call, layer: nn.Embedding, x: Value) -> Value:
    if layer.max_norm is not None or layer.scale_grad_by_freq:
        raise Unsupported(f"the layer {call.where!r} has max_norm or scale_grad_by_freq")
    tokens, count = call.builder.tokens, layer.num_embeddings
    if x.id >= len(tokens):
        raise Unsupported(f"the layer {call.where!r} looks up what the model computed")
    tokens[x.id] = min(tokens[x.id] or count, count)
    skip = -1 if layer.padding_idx is None else layer.padding_idx
    return call.builder.emit(
        ops.Embedding, (x,), (*x.shape, layer.embedding_dim), (layer.weight,),
        count=count, f=layer.embedding_dim, t=math.prod(x.shape), skip=skip,
    )  # fmt: skip


_CELLS = {"GRU": "GruCell", "LSTM": "LstmCell", "RNN_TANH": "TanhCell"}


def _recurrent(call: Call, layer: nn.RNNBase, x: Value) -> Any:
    """(outputs, last states), as the layer gives them; one operation a layer and direction."""
    if layer.mode not in _CELLS or layer.proj_size:
        raise Unsupported(f"the layer {call.where!r} has {layer.mode} cells or a projection")
    if len(call.args) + len(call.kwargs) > 1:
        given = [*call.args[1:], *call.kwargs.values()]
        flat = [s for g in given for s in (g if isinstance(g, (tuple, list)) else (g,)) if s is not None]
        if any(not isinstance(s, Constant) or s.tensor.any() for s in flat):
            raise Unsupported(f"the layer {call.where!r} starts from states other than zero")
    steps, last = x.shape[0], []
    for k in range(layer.num_layers):
        if k and layer.dropout:
            x = _dropout(call, nn.Dropout(layer.dropout), x)
        sides = []
        for back in range(2 if layer.bidirectional else 1):
            end = f"_l{k}" + ("_reverse" if back else "")
            names = [f"{n}{end}" for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            sides.append(call.builder.emit(
                ops.Recurrent, (x,), (steps, layer.hidden_size), tuple(getattr(layer, n, None) for n in names),
                cell=_CELLS[layer.mode], i=x.shape[1], h=layer.hidden_size, t=steps, reversed=bool(back),
            ))  # fmt: skip
            last.append((sides[-1], 0 if back else steps - 1))
        x = sides[0] if len(sides) == 1 else _concat(call, sides, 1)
    states = _States(call.builder, last)
    return (x, (states, None)) if layer.mode == "LSTM" else (x, states)


class _States(Several):
    """The last states of a recurrent net, taken out of its outputs when somebody asks for one."""

    def __init__(self, builder: Builder, last: list[tuple[Value, int]]) -> None:
        self.builder, self.last = builder, last

    def __getitem__(self, index: Any) -> Value:
        if not isinstance(index, int):
            raise Unsupported("the last states of a recurrent net are read otherwise than one by one")
        value, step = self.last[index]
        return _slice(self.builder, value, 0, step, 1, 1, drop=True)


# Attention --------------------------------------------------------------------------------------------


def _attention(call: Call, layer: nn.MultiheadAttention, x: Value) -> Any:
    """Attention of a sequence to itself; gives (outputs, None)."""
    query, key, value, *rest = call.args
    names = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
    options = dict(zip(names, rest)) | {k: v for k, v in call.kwargs.items() if k in names}
    if not query == key == value:
        raise Unsupported(f"the attention {call.where!r} is not of a sequence to itself")
    out = _self_attention(call, layer, x, options.get("attn_mask"), options.get("key_padding_mask"))
    return (out, None)


def _self_attention(call: Call, layer: nn.MultiheadAttention, x: Value, mask: Any, absent: Any) -> Value:
    if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
        raise Unsupported(f"the attention {call.where!r} has other widths of keys, bias_kv or add_zero_attn")
    t, e = x.shape
    joint = call.builder.emit(
        ops.Linear, (x,), (t, 3 * e), (layer.in_proj_weight, layer.in_proj_bias), i=e, o=3 * e, rows=t
    )
    inputs = (joint,) if absent is None else (joint, _mask_of_keys(call, absent))
    seen = call.builder.emit(
        ops.Attention,
        inputs,
        (t, e),
        (_added(call, mask, t),),
        t=t,
        e=e,
        heads=layer.num_heads,
        p=layer.dropout,
    )
    return _linear(call, layer.out_proj, seen)


def _added(call: Call, mask: Any, t: int) -> Tensor | None:
    """What a mask adds to the scores."""
    if mask is None:
        return None
    if not isinstance(mask, Constant) or mask.trained or mask.tensor.shape != (t, t):
        raise Unsupported(
            f"the attention {call.where!r} has a mask that is not one for all samples and heads"
        )
    if mask.tensor.dtype != torch.bool:
        return mask.tensor
    return torch.zeros(t, t).masked_fill(mask.tensor, -torch.inf)


def _mask_of_keys(call: Call, absent: Any) -> Value:
    if not isinstance(absent, Value) or absent.id not in call.builder.masks:
        raise Unsupported(
            f"the attention {call.where!r} has a padding mask other than a comparison of inputs"
        )
    return absent


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


def _encode(call: Call, each: nn.TransformerEncoderLayer, x: Value, mask: Any, absent: Any) -> Value:
    activation: Any = _ACTIVATIONS.get(each.activation) or each.activation

    def attend(x: Value) -> Value:
        return _dropout(call, each.dropout1, _self_attention(call, each.self_attn, x, mask, absent))

    def think(x: Value) -> Value:
        inner = layer(call, activation, _linear(call, each.linear1, x))
        return _dropout(call, each.dropout2, _linear(call, each.linear2, _dropout(call, each.dropout, inner)))

    for part, norm in ((attend, each.norm1), (think, each.norm2)):
        if each.norm_first:
            x = _sum(call, x, part(_norm(call, norm, x)))
        else:
            x = _norm(call, norm, _sum(call, x, part(x)))
    return x


_ACTIVATIONS: dict[Any, nn.Module] = {F.relu: nn.ReLU(), F.gelu: nn.GELU(), F.silu: nn.SiLU()}


# Shapes -----------------------------------------------------------------------------------------------


def _source(call: Call) -> fx.Node:
    return next(a for a in call.node.args if isinstance(a, fx.Node))


def _reshape(call: Call, x: Value | None = None) -> Value | None:
    """The same numbers in the same order."""
    x = call.args[0] if x is None else x
    if not isinstance(x, Value) or math.prod(call.shape) != math.prod(x.shape):
        return None
    source, before = _source(call), []
    for node in (source, call.node):
        full = tuple(call.builder.runs[0][node].shape)
        before.append([n for n in full[: call.builder.batch(node)] if n > 1])
    kinds = (call.builder.runs[0][source].dtype, call.result.dtype)
    if before[0] != before[1] or (
        kinds[0] != kinds[1]
        and (kinds[0].is_floating_point or kinds[1] not in (torch.float32, torch.int64, torch.int32))
    ):
        return None
    return Value(x.id, call.shape)


def _permute(call: Call) -> Value | None:
    """Dimensions in another order, found by permuting the numbers of the places of one sample."""
    x, batch = call.args[0], call.builder.batch(_source(call))
    assert batch is not None
    places = torch.arange(math.prod(x.shape)).view(x.shape)
    function = getattr(torch.Tensor, _name(call.node.target))
    moved = function(places.unsqueeze(batch), *call.args[1:], **call.kwargs).reshape(call.shape)
    if torch.equal(moved.reshape(-1), places.reshape(-1)):
        return Value(x.id, call.shape)
    if len(x.shape) > 4:
        return None
    return call.builder.emit(ops.Permute, (x,), call.shape, sizes=x.shape, order=_order(moved, x.shape))


def _order(moved: Tensor, shape: Shape) -> Shape:
    """Which dimension each dimension of the permuted numbers was."""
    steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    order: list[int] = []
    for d, size in enumerate(moved.shape):
        step = int((moved.select(d, 1) - moved.select(d, 0)).reshape(-1)[0]) if size > 1 else None
        same = [k for k in range(len(shape)) if k not in order and shape[k] == size]
        order.append(next(k for k in same if step is None or steps[k] == step))
    return tuple(order)


def _slice(builder: Builder, x: Value, dim: int, start: int, count: int, step: int, drop: bool) -> Value:
    outer, inner = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    shape = (*x.shape[:dim], *([] if drop else [count]), *x.shape[dim + 1 :])
    return builder.emit(
        ops.Slice,
        (x,),
        shape,
        outer=outer,
        dim=x.shape[dim],
        inner=inner,
        start=start,
        count=count,
        step=step,
    )


def _getitem(call: Call) -> Any:
    x, index = call.args[0], call.args[1]
    if isinstance(x, _States):
        return x[index]
    batch, dims = call.builder.batch(_source(call)), call.builder.runs[0][_source(call)].ndim
    wanted = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in wanted:
        at = wanted.index(Ellipsis)
        wanted[at : at + 1] = [slice(None)] * (dims - len(wanted) + 1)
    dim = 0
    for d, k in enumerate(wanted):
        if d == batch:
            if k != slice(None):
                return None
            continue
        if isinstance(k, slice):
            start, stop, step = k.indices(x.shape[dim])
            count = len(range(start, stop, step))
            if count != x.shape[dim]:
                x = _slice(call.builder, x, dim, start, count, step, drop=False)
            dim += 1
        elif isinstance(k, int):
            x = _slice(call.builder, x, dim, k % x.shape[dim], 1, 1, drop=True)
        else:
            return None
    return x


def _split(call: Call) -> tuple[Value, ...] | None:
    """The parts that chunk and split give."""
    x, source = call.args[0], _source(call)
    batch, dims = call.builder.batch(source), call.builder.runs[0][source].ndim
    dim = call.kwargs.get("dim", call.args[2] if len(call.args) > 2 else 0) % dims
    if batch is None or dim == batch:
        return None
    counts = [part.shape[dim] for part in call.result]
    starts, at = [sum(counts[:k]) for k in range(len(counts))], dim - (dim > batch)
    return tuple(_slice(call.builder, x, at, lo, n, 1, drop=False) for lo, n in zip(starts, counts))


def _concat(call: Call, values: list[Value], dim: int) -> Value:
    whole = values[0]
    for other in values[1:]:
        outer, rest = math.prod(whole.shape[:dim]), whole.shape[dim + 1 :]
        a, b = (math.prod(v.shape[dim:]) for v in (whole, other))
        shape = (*whole.shape[:dim], whole.shape[dim] + other.shape[dim], *rest)
        whole = call.builder.emit(ops.Concat, (whole, other), shape, outer=outer, a=a, b=b)
    return whole


def _cat(call: Call) -> Value | None:
    values = call.args[0]
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    if not all(isinstance(v, Value) for v in values):
        return None
    return _concat(call, list(values), _dim(call, dim))


def _dim(call: Call, dim: int) -> int:
    """A dimension as it is for one sample of the first tensor that is given."""
    node = call.node.all_input_nodes[0]
    batch = call.builder.batch(node)
    dim %= call.builder.runs[0][node].ndim
    if batch is None or dim == batch:
        raise Unsupported(f"{call.node.name!r} mixes the samples of a batch")
    return dim - (dim > batch)


def _mean(call: Call, total: bool = False) -> Value | None:
    x = call.args[0]
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim")
    dims: list[Any] = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    if not isinstance(x, Value) or None in dims or set(call.kwargs) - {"dim", "keepdim"}:
        return None
    inner = sorted((_dim(call, d) for d in dims), reverse=True)
    for d in inner:
        outer, count, rest = math.prod(x.shape[:d]), x.shape[d], math.prod(x.shape[d + 1 :])
        scale = 1.0 if total else 1.0 / count
        x = call.builder.emit(
            ops.Mean, (x,), x.shape[:d] + x.shape[d + 1 :], outer=outer, dim=count, inner=rest, scale=scale
        )
    return Value(x.id, call.shape)


# Arithmetic -------------------------------------------------------------------------------------------


def _sum(call: Call, a: Value, b: Value) -> Value:
    return call.builder.emit(ops.Add, (a, b), a.shape, n=math.prod(a.shape))


def _add(call: Call, sign: float = 1.0) -> Value | None:
    """Of two values of one shape, of a value and a number, or of a value and a tensor that all rows share."""
    if len(call.args) != 2 or call.kwargs:
        return None
    if call.node.target in (operator.iadd, "add_"):
        _refuse_shared(call)
    x, other = call.args
    if isinstance(x, Value) and isinstance(other, Value):
        x, other = _alike(call)
        return _sum(call, x, other if sign > 0 else _affine(call, other, -1.0))
    swapped = not isinstance(x, Value)
    x, other = (other, x) if swapped else (x, other)
    if isinstance(other, (int, float)) and call.builder.fixed(call.node.args):
        return _affine(call, x, sign if swapped else 1.0, other if swapped else sign * other)
    if not isinstance(other, Constant) or sign < 0:
        return None
    shape = tuple(other.tensor.shape)
    while shape and shape[0] == 1:
        shape = shape[1:]
    n = math.prod(shape)
    if call.shape != x.shape or not shape or x.shape[len(x.shape) - len(shape) :] != shape:
        raise Unsupported(f"the addition at {call.node.name!r} broadcasts")
    return call.builder.emit(ops.Shift, (x,), x.shape, (other,), n=n, rows=math.prod(x.shape) // n)


def _affine(call: Call, x: Value, a: float, b: float = 0.0) -> Value:
    return call.builder.emit(ops.Affine, (x,), x.shape, n=math.prod(x.shape), a=float(a), b=float(b))


def _multiply(call: Call, divide: bool = False) -> Value | None:
    if len(call.args) != 2 or call.kwargs:
        return None
    x, other = call.args
    if isinstance(x, Value) and isinstance(other, Value):
        kind = ops.Divide if divide else ops.Multiply
        return call.builder.emit(kind, _alike(call), call.shape, n=math.prod(call.shape))
    if not isinstance(x, Value) and not divide:
        x, other = other, x
    if not isinstance(other, (int, float)) or not call.builder.fixed(call.node.args):
        return None
    return _affine(call, x, 1 / other if divide else other)


def _alike(call: Call) -> tuple[Value, Value]:
    """The two values, each as often as the other wants it."""
    nodes = [a for a in call.node.args if isinstance(a, fx.Node)]
    a, b = (_expanded(call, node, value) for node, value in zip(nodes, call.args, strict=True))
    return a, b


def _expanded(call: Call, node: fx.Node, x: Value) -> Value:
    """A value in the shape of the result, which repeats it along dimensions where it has one place or none."""
    before, after = call.builder.batch(node), call.builder.batch(call.node)
    if before is None or after is None:
        raise Unsupported(f"{call.node.name!r} mixes the samples of a batch")
    if call.builder.runs[0][node].ndim - before != call.result.ndim - after:
        raise Unsupported(f"{call.node.name!r} broadcasts samples against something else")
    shape = (1,) * (len(call.shape) - len(x.shape)) + x.shape
    for d, wanted in enumerate(call.shape):
        if shape[d] == wanted:
            continue
        outer, inner = math.prod(shape[:d]), math.prod(shape[d + 1 :])
        shape = (*shape[:d], wanted, *shape[d + 1 :])
        x = call.builder.emit(ops.Expand, (x,), shape, outer=outer, dim=wanted, inner=inner)
    return Value(x.id, call.shape)


def _expand(call: Call) -> Value | None:
    x = call.args[0]
    return _expanded(call, _source(call), x) if isinstance(x, Value) else None


def _clamp(call: Call) -> Value | None:
    """Between two numbers, or above or below one."""
    given = dict(zip(("min", "max"), call.args[1:])) | call.kwargs
    if _name(call.node.target) == "clamp_min":
        given = {"min": given.get("min")}
    low, high = given.get("min"), given.get("max")
    ends = (-math.inf if low is None else low, math.inf if high is None else high)
    if not all(isinstance(end, (int, float)) for end in ends) or not call.builder.fixed(call.node.args):
        return None
    return _curve(f"Clamp<{_bits(ends[0])}, {_bits(ends[1])}>")(call, nn.Identity(), call.args[0])


def _compare(call: Call) -> Value | None:
    """A mask of the inputs: where they are, or are not, a certain number; `bool` and `not` are masks too."""
    x, value = call.args if len(call.args) == 2 else (call.args[0], 0)
    known = isinstance(x, Value) and (x.id < len(call.builder.tokens) or x.id in call.builder.masks)
    if not known or not isinstance(value, (int, float)) or call.result.dtype != torch.bool:
        return None
    equal = _name(call.node.target) not in ("ne", "bool")
    mask = call.builder.emit(
        ops.Compare, (x,), x.shape, n=math.prod(x.shape), value=float(value), equal=equal
    )
    call.builder.masks.add(mask.id)
    return mask


def _as(make: Callable[..., nn.Module]) -> Callable[[Call], Any]:
    """A function that does what a module does."""

    def handle(call: Call) -> Any:
        rest = {k: v for k, v in call.kwargs.items() if k not in ("return_indices", "input")}
        try:
            module = make(*call.args[1:], **rest)
        except TypeError:
            return None
        return layer(call, module, call.args[0] if call.args else call.kwargs["input"])

    return handle


def _of_dim(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A softmax as torch.nn.functional calls it."""

    def made(dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> nn.Module:
        if dtype not in (None, torch.float32):
            raise TypeError(dtype)
        return make(dim)

    return made


LAYERS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Linear: _linear,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.MaxPool1d: _max_pool,
    nn.MaxPool2d: _max_pool,
    nn.AvgPool1d: _avg_pool,
    nn.AvgPool2d: _avg_pool,
    nn.AdaptiveAvgPool1d: _adaptive_pool,
    nn.AdaptiveAvgPool2d: _adaptive_pool,
    nn.GroupNorm: _group_norm,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.InstanceNorm1d: _instance_norm,
    nn.InstanceNorm2d: _instance_norm,
    nn.ReLU: _map("Relu"),
    nn.ReLU6: _map("Relu6"),
    nn.Tanh: _map("Tanh"),
    nn.Sigmoid: _map("Sigmoid"),
    nn.LeakyReLU: _leaky,
    nn.GELU: _gelu,
    nn.SiLU: _curve("Silu"),
    nn.Hardswish: _curve("HardSwish"),
    nn.Softmax: _softmax,
    nn.LogSoftmax: _softmax,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.Dropout: _dropout,
    nn.Dropout1d: _dropout,
    nn.Dropout2d: _dropout,
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _encoder_layer,
    nn.TransformerEncoder: _encoder,
    nn.Identity: lambda call, layer, x: x,
    nn.Flatten: _flatten,
    nn.Embedding: _embedding,
    nn.GRU: _recurrent,
    nn.LSTM: _recurrent,
    nn.RNN: _recurrent,
}

_relu_in_place = _as(lambda: nn.ReLU(inplace=True))
FUNCTIONS: dict[Any, Callable[[Call], Any]] = {
    F.relu: _as(lambda inplace=False: nn.ReLU(inplace)),
    torch.relu: _as(nn.ReLU),
    torch.relu_: _relu_in_place,
    F.tanh: _as(nn.Tanh),
    torch.tanh: _as(nn.Tanh),
    F.sigmoid: _as(nn.Sigmoid),
    torch.sigmoid: _as(nn.Sigmoid),
    F.leaky_relu: _as(nn.LeakyReLU),
    F.max_pool2d: _as(nn.MaxPool2d),
    torch.max_pool2d: _as(nn.MaxPool2d),
    F.avg_pool2d: _as(nn.AvgPool2d),
    F.adaptive_avg_pool2d: _as(nn.AdaptiveAvgPool2d),
    F.dropout: _as(lambda p=0.5, training=True, inplace=False: nn.Dropout(p if training else 0.0)),
    F.gelu: _as(nn.GELU),
    F.silu: _as(lambda inplace=False: nn.SiLU(inplace)),
    F.relu6: _as(lambda inplace=False: nn.ReLU6(inplace)),
    F.hardswish: _as(lambda inplace=False: nn.Hardswish(inplace)),
    F.softmax: _as(_of_dim(nn.Softmax)),
    F.log_softmax: _as(_of_dim(nn.LogSoftmax)),
    torch.softmax: _as(nn.Softmax),
    torch.log_softmax: _as(nn.LogSoftmax),
    operator.add: _add,
    operator.iadd: _add,
    torch.add: _add,
    operator.sub: lambda call: _add(call, -1.0),
    torch.sub: lambda call: _add(call, -1.0),
    operator.mul: _multiply,
    torch.mul: _multiply,
    operator.truediv: lambda call: _multiply(call, divide=True),
    torch.div: lambda call: _multiply(call, divide=True),
    **dict.fromkeys((operator.eq, operator.ne, operator.invert, torch.logical_not), _compare),
    **dict.fromkeys((torch.clamp, torch.clamp_min), _clamp),
    operator.getitem: _getitem,
    torch.cat: _cat,
    **dict.fromkeys((torch.chunk, torch.split), _split),
    torch.mean: _mean,
    torch.sum: lambda call: _mean(call, total=True),
    **dict.fromkeys((torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze), _reshape),
    **dict.fromkeys((torch.transpose, torch.permute, torch.swapaxes, torch.movedim), _permute),
}
METHODS: dict[str, Callable[[Call], Any]] = {
    "relu": _as(nn.ReLU),
    "relu_": _relu_in_place,
    "tanh": _as(nn.Tanh),
    "sigmoid": _as(nn.Sigmoid),
    "softmax": _as(nn.Softmax),
    "log_softmax": _as(nn.LogSoftmax),
    "add": _add,
    "add_": _add,
    "mul": _multiply,
    **dict.fromkeys(("chunk", "split"), _split),
    "div": lambda call: _multiply(call, divide=True),
    **dict.fromkeys(("eq", "ne", "bool", "logical_not"), _compare),
    **dict.fromkeys(("clamp", "clamp_min"), _clamp),
    **dict.fromkeys(("expand", "expand_as"), _expand),
    "mean": _mean,
    "sum": lambda call: _mean(call, total=True),
    **dict.fromkeys(("transpose", "permute", "swapaxes", "movedim"), _permute),
    **dict.fromkeys(("view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous"), _reshape),
    **dict.fromkeys(("float", "long", "to", "type_as"), _reshape),
}
