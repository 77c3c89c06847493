"""What each layer of PyTorch comes to in operations; attention and functions have files of their own."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from fedbraid_native import ops
from fedbraid_native.errors import Unsupported
from fedbraid_native.products import dropout, operand, times
from fedbraid_native.trace import Builder, Constant, Several, Value
from fedbraid_native.values import (
    Call,
    between,
    bits,
    concat,
    curve,
    dimension,
    mean_over,
    moved_to,
    part,
    refuse_shared,
    repeated,
    reshape,
    same_for_all,
    total,
)


def layer(call: Call, module: nn.Module, x: Value | None = None) -> Any:
    """What a layer makes of its input."""
    make = LAYERS.get(type(module))
    if make is None:
        raise Unsupported(f"the layer {type(module).__name__} at {call.where!r} is not supported")
    if getattr(module, "inplace", False):
        refuse_shared(call)
    x = call.args[0] if x is None and call.args else x
    if isinstance(x, Constant) and isinstance(module, nn.MultiheadAttention):
        x = operand(call, call.source, x)
    if not isinstance(x, Value):
        raise Unsupported(f"the layer {call.where!r} gets something other than one tensor of the samples")
    return make(call, module, x)


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
    flat = len(layer.kernel_size) == 1
    channels, height, width = _image(call, x)
    if layer.padding_mode != "zeros":
        raise Unsupported(f"the convolution {call.where!r} has a padding other than zeros")
    padding: Any = layer.padding
    apart = _both(layer.dilation, flat)
    if isinstance(padding, str):
        if padding == "same" and any(k % 2 == 0 for k in layer.kernel_size):
            raise Unsupported(f"the convolution {call.where!r} pads unevenly")
        padding = tuple(
            d * (k // 2) if padding == "same" else 0
            for k, d in zip(layer.kernel_size, apart[-1:] if flat else apart)
        )
    kernel, stride, border = (
        _both(layer.kernel_size, flat),
        _both(layer.stride, flat),
        _both(padding, flat, 0),
    )
    if any(d > 1 and s > 1 for d, s in zip(apart, stride)):
        raise Unsupported(f"the convolution {call.where!r} has dilation and a stride")
    out = list(call.shape[1:])
    return call.builder.emit(
        ops.Conv2d, (x,), (layer.out_channels, *out),
        (layer.weight, layer.bias), i=channels // layer.groups, h=height, w=width, o=layer.out_channels // layer.groups,
        kernel=kernel, stride=stride, padding=border, groups=layer.groups, dilation=apart,
    )  # fmt: skip


def _transposed(call: Call, layer: nn.ConvTranspose1d | nn.ConvTranspose2d, x: Value) -> Value:
    flat, channels = isinstance(layer, nn.ConvTranspose1d), _image(call, x)[0]
    if layer.groups > 1 or any(d != 1 for d in layer.dilation):
        raise Unsupported(f"the convolution {call.where!r} has groups or dilation")
    rows, columns = (1, call.shape[1]) if flat else call.shape[1:]
    back = ops.Conv2d(
        inputs=(), output=-1, i=layer.out_channels, h=rows, w=columns, o=channels, kernel=_both(layer.kernel_size, flat),
        stride=_both(layer.stride, flat), padding=_both(layer.padding, flat, 0),
    )  # fmt: skip
    return call.builder.emit(ops.ConvTranspose2d, (x,), call.shape, (layer.weight, layer.bias), conv=back)


def _volume(call: Call, layer: nn.Conv3d, x: Value) -> Value:
    """A convolution of images, one for each place along the depth, of what the kernel sees there."""
    if layer.padding_mode != "zeros" or len(x.shape) != 4:
        raise Unsupported(f"the convolution {call.where!r} has a padding other than zeros, or no volumes")
    stride, apart, kernel = (_triple(n) for n in (layer.stride, layer.dilation, layer.kernel_size))
    padding: Any = layer.padding
    if padding == "same" and any(k % 2 == 0 for k in kernel):
        raise Unsupported(f"the convolution {call.where!r} pads unevenly")
    if isinstance(padding, str):
        padding = tuple(d * (k // 2) if padding == "same" else 0 for d, k in zip(apart, kernel))
    border = _triple(padding)
    if any(d > 1 and s > 1 for d, s in zip(apart[1:], stride[1:])):
        raise Unsupported(f"the convolution {call.where!r} has dilation and a stride")
    (c, d, h, w), (o, depth, *sides) = x.shape, call.shape
    seen = call.builder.emit(
        ops.Im2colDepth, (x,), (depth, c * kernel[0], h, w), c=c, d=d, inner=h * w, out=depth, kernel=kernel[0],
        stride=stride[0], padding=border[0], dilation=apart[0],
    )  # fmt: skip
    made = call.builder.emit(
        ops.Conv2d, (seen,), (depth, o, *sides), (layer.weight, layer.bias), i=c * kernel[0] // layer.groups, h=h, w=w,
        o=o // layer.groups, kernel=kernel[1:], stride=stride[1:], padding=border[1:], groups=layer.groups,
        dilation=apart[1:], rows=depth,
    )  # fmt: skip
    return moved_to(call.builder, made, (1, 0, 2, 3))


def _triple(value: Any) -> tuple[int, ...]:
    return (int(value),) * 3 if isinstance(value, int) else tuple(map(int, value))


def _border(call: Call, sides: Any, x: Value) -> Value:
    """Zeros before and after the last dimensions, the last one first."""
    whole = [*sides, *[0] * 4][: max(4, len(sides))]
    if len(whole) > 4 or len(x.shape) < (2 if any(whole[2:]) else 1):
        raise Unsupported(f"the padding {call.where!r} is of more than rows and columns")
    columns, rows = call.shape[-1], call.shape[-2] if len(x.shape) > 1 else 1
    height = x.shape[-2] if len(x.shape) > 1 else 1
    return call.builder.emit(
        ops.ConstantPad2d, (x,), call.shape, c=math.prod(x.shape[:-2]), h=height, w=x.shape[-1], first=(whole[2], whole[0]),
        out=(rows, columns),
    )  # fmt: skip


def _zeros(call: Call, layer: nn.ZeroPad2d, x: Value) -> Value:
    if layer.value:
        raise Unsupported(f"the padding {call.where!r} is not of zeros")
    return _border(call, layer.padding, x)


def _pad(call: Call) -> Value | None:
    x, sides = call.args[0], call.argument(1, "pad")
    zeros = call.argument(2, "mode", "constant") == "constant" and not call.argument(3, "value")
    return (
        _border(call, sides, x)
        if isinstance(x, Value) and zeros and call.builder.batch(call.node) == 0
        else None
    )


def _shuffle(call: Call, layer: nn.PixelShuffle, x: Value) -> Value:
    r, (channels, height, width) = layer.upscale_factor, x.shape
    parts = Value(x.id, (channels // r**2, r, r, height, width))
    return Value(moved_to(call.builder, parts, (0, 3, 1, 4, 2)).id, call.shape)


def _bilinear(call: Call, layer: nn.Bilinear, x: Value) -> Value | None:
    """Each output: a map of the second input, and its product with the first."""
    other, (o, i, j) = call.argument(1, "input2"), layer.weight.shape
    if not isinstance(other, Value) or len(x.shape) > 1:
        return None
    seen = call.builder.emit(ops.Linear, (other,), (o, i), (layer.weight.view(o * i, j), None), i=j, o=o * i)
    out = Value(times(call.builder, seen, Value(x.id, (i, 1))).id, (o,))
    return (
        out
        if layer.bias is None
        else call.builder.emit(ops.AddParam, (out,), (o,), (layer.bias,), n=o, rows=1)
    )


def _max_pool(call: Call, layer: nn.MaxPool2d | nn.MaxPool1d, x: Value) -> Value:
    flat = isinstance(layer, nn.MaxPool1d)
    if any(d != 1 for d in _pair(layer.dilation)) or layer.return_indices:
        raise Unsupported(f"the pooling {call.where!r} has dilation or return_indices")
    return _pool(call, ops.MaxPool2d, x, flat, layer)


def _avg_pool(call: Call, layer: nn.AvgPool2d | nn.AvgPool1d, x: Value) -> Value:
    if layer.ceil_mode:
        raise Unsupported(f"the pooling {call.where!r} has ceil_mode")
    flat = isinstance(layer, nn.AvgPool1d)
    area = math.prod(_both(layer.kernel_size, flat))
    divisor = getattr(layer, "divisor_override", None) or (area if layer.count_include_pad else 0)
    return _pool(call, ops.AvgPool2d, x, flat, layer, divisor=divisor)


def _pool(call: Call, kind: type[ops.Pool2d], x: Value, flat: bool, layer: Any, **more: Any) -> Value:
    channels, height, width = _image(call, x)
    kernel, stride = _both(layer.kernel_size, flat), _both(layer.stride or layer.kernel_size, flat)
    border = _both(layer.padding, flat, 0)
    sizes = zip((height, width), kernel, stride, border)
    (rows, below), (columns, right) = (_windows(*size, layer.ceil_mode) for size in sizes)
    return call.builder.emit(
        kind, (x,), (channels, columns) if flat else (channels, rows, columns), c=channels, h=height, w=width,
        kernel=kernel, stride=stride, padding=border, beyond=(below, right), **more,
    )  # fmt: skip


def _windows(n: int, k: int, step: int, border: int, up: bool) -> tuple[int, int]:
    """How many windows there are, and how far the last reaches beyond the border."""
    free = n + 2 * border - k
    last = -(-free // step) if up else free // step
    if up and last * step >= n + border:  # it would start beyond the image
        last -= 1
    return last + 1, max(0, last * step - free)


def _adaptive_pool(call: Call, layer: Any, x: Value) -> Value:
    flat = isinstance(layer, (nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d))
    channels, height, width = _image(call, x)
    size: Any = layer.output_size
    wanted = (1, _one(size)) if flat else size if isinstance(size, tuple) else (size, size)
    rows, columns = wanted[0] or height, wanted[1] or width
    largest = isinstance(layer, (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d))
    even, shape = (
        not (height % rows or width % columns),
        (channels, columns) if flat else (channels, rows, columns),
    )
    if (largest and not even) or getattr(layer, "return_indices", False):
        raise Unsupported(f"the pooling {call.where!r} cuts {height}x{width} into uneven windows")
    if not even:
        return call.builder.emit(
            ops.AdaptiveAvgPool2d, (x,), shape, c=channels, h=height, w=width, out=(rows, columns)
        )
    kernel = (height // rows, width // columns)
    kind: type[ops.Pool2d] = ops.MaxPool2d if largest else ops.AvgPool2d
    more: dict[str, Any] = {} if largest else {"divisor": math.prod(kernel)}
    return call.builder.emit(
        kind, (x,), shape, c=channels, h=height, w=width, kernel=kernel, stride=kernel, **more,
    )  # fmt: skip


def _pool_volume(call: Call, layer: Any, x: Value) -> Value:
    """Windows of a volume: of its images, and then of what they give along the depth."""
    if len(x.shape) != 4 or getattr(layer, "return_indices", False):
        raise Unsupported(f"the pooling {call.where!r} has return_indices, or gets no volumes")
    largest = isinstance(layer, (nn.MaxPool3d, nn.AdaptiveMaxPool3d))
    (c, d, h, w), (_, depth, rows, columns) = x.shape, call.shape
    kernel: ops.Shape
    stride: ops.Shape
    border: ops.Shape
    if isinstance(layer, (nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d)):
        if d % depth or h % rows or w % columns:
            raise Unsupported(f"the pooling {call.where!r} cuts {d}x{h}x{w} into uneven windows")
        kernel = stride = (d // depth, h // rows, w // columns)
        border, up, divisor = (0, 0, 0), False, math.prod(kernel)
    else:
        kernel, border, up = _triple(layer.kernel_size), _triple(layer.padding), layer.ceil_mode
        stride = _triple(layer.stride or layer.kernel_size)
        divisor = 0 if largest or not layer.count_include_pad else math.prod(kernel)
        divisor = getattr(layer, "divisor_override", None) or divisor
    if (largest and any(n != 1 for n in _triple(getattr(layer, "dilation", 1)))) or (up and not largest):
        raise Unsupported(f"the pooling {call.where!r} has dilation, or is a mean with ceil_mode")
    beyond = [_windows(*size, up)[1] for size in zip((d, h, w), kernel, stride, border)]
    kind: type[ops.Pool2d] = ops.MaxPool2d if largest else ops.AvgPool2d
    more: list[dict[str, Any]] = (
        [{}, {}] if largest else [{"divisor": divisor}, {"divisor": 1 if divisor else 0}]
    )
    flat = call.builder.emit(
        kind, (x,), (c, d, rows, columns), c=c * d, h=h, w=w, kernel=kernel[1:], stride=stride[1:],
        padding=border[1:], beyond=tuple(beyond[1:]), **more[0],
    )  # fmt: skip
    return call.builder.emit(
        kind, (flat,), call.shape, c=c, h=d, w=rows * columns, kernel=(kernel[0], 1), stride=(stride[0], 1),
        padding=(border[0], 0), beyond=(beyond[0], 0), **more[1],
    )  # fmt: skip


def _group_norm(call: Call, layer: nn.GroupNorm, x: Value) -> Value:
    return call.builder.emit(
        ops.GroupNorm, (x,), x.shape, (layer.weight, layer.bias),
        c=x.shape[0], each=math.prod(x.shape[1:]), groups=layer.num_groups, eps=layer.eps,
    )  # fmt: skip


def _batch_norm(call: Call, layer: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, x: Value) -> Value:
    if not (layer.training and layer.track_running_stats) or layer.momentum is None:
        raise Unsupported(f"the layer {call.where!r} keeps no running statistics")
    running = (layer.running_mean, layer.running_var)
    if any(
        op.is_batch_dependent and call.builder.place(layer.running_mean) in op.weights
        for op in call.builder.ops
    ):
        raise Unsupported(f"the layer {call.where!r} is used twice")
    return call.builder.emit(
        ops.BatchNorm, (x,), x.shape, (layer.weight, layer.bias, *running),
        c=x.shape[0], each=math.prod(x.shape[1:]), eps=layer.eps, momentum=layer.momentum,
    )  # fmt: skip


def _instance_norm(
    call: Call, layer: nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d, x: Value
) -> Value:
    if layer.track_running_stats:
        raise Unsupported(f"the layer {call.where!r} keeps running statistics")
    return call.builder.emit(
        ops.GroupNorm, (x,), x.shape, (layer.weight, layer.bias),
        c=x.shape[0], each=math.prod(x.shape[1:]), groups=x.shape[0], eps=layer.eps,
    )  # fmt: skip


def _map(function: str) -> Callable[[Call, nn.Module, Value], Value]:
    def make(call: Call, layer: nn.Module, x: Value) -> Value:
        return call.builder.emit(ops.Unary, (x,), x.shape, function=function, n=math.prod(x.shape))

    return make


def _curve(function: str | Callable[[Any], str]) -> Callable[[Call, nn.Module, Value], Value]:
    """A function of each number, by its name in curves.hpp, or what the layer says of it."""

    def make(call: Call, layer: nn.Module, x: Value) -> Value:
        return curve(call, function if isinstance(function, str) else function(layer), x)

    return make


def _softplus(call: Call, layer: nn.Softplus, x: Value) -> Value:
    if layer.threshold < 15:  # beyond it is a line, which is the same to rounding
        raise Unsupported(f"the layer {call.where!r} becomes a line early")
    return curve(call, f"Softplus<{bits(layer.beta)}>", x)


def _elu(low: float, bend: float, high: float = 1.0) -> str:
    return f"Elu<{bits(low)}, {bits(bend)}, {bits(high)}>"


def _leaky(call: Call, layer: nn.LeakyReLU, x: Value) -> Value:
    if layer.negative_slope < 0:
        raise Unsupported(f"the layer {call.where!r} has a negative slope below zero")
    return _map(f"LeakyRelu<{bits(layer.negative_slope)}>")(call, layer, x)


def _softmax(call: Call, layer: nn.Softmax | nn.LogSoftmax, x: Value) -> Value:
    implied = 0 if call.result.ndim == 3 else 1
    d = dimension(call, implied if layer.dim is None else layer.dim)
    rows, inner, log = math.prod(x.shape[:d]), math.prod(x.shape[d + 1 :]), isinstance(layer, nn.LogSoftmax)
    return call.builder.emit(ops.Softmax, (x,), x.shape, n=x.shape[d], rows=rows, inner=inner, log=log)


def _layer_norm(call: Call, layer: nn.LayerNorm, x: Value) -> Value:
    n = math.prod(layer.normalized_shape)
    return call.builder.emit(
        ops.GroupNorm, (x,), x.shape, (layer.weight, layer.bias),
        c=n, each=1, groups=1, eps=layer.eps, rows=math.prod(x.shape) // n,
    )  # fmt: skip


def _rms_norm(call: Call, layer: nn.RMSNorm, x: Value) -> Value:
    n = math.prod(layer.normalized_shape)
    eps = torch.finfo(torch.float32).eps if layer.eps is None else layer.eps
    return call.builder.emit(
        ops.RMSNorm, (x,), x.shape, (layer.weight,), n=n, rows=math.prod(x.shape) // n, eps=eps
    )


def _dropout(call: Call, layer: nn.Dropout, x: Value) -> Value:
    return dropout(call, layer.p, x, channels=isinstance(layer, (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)))


def _reshaped(call: Call, layer: nn.Module, x: Value) -> Value | None:
    return reshape(call, x)


def _glu(call: Call, layer: nn.GLU, x: Value) -> Value:
    dim = dimension(call, layer.dim)
    half = x.shape[dim] // 2
    a, b = (part(call.builder, x, dim, start, half) for start in (0, half))
    gate = _map("Sigmoid")(call, layer, b)
    return call.builder.emit(ops.Mul, (a, gate), a.shape, n=math.prod(a.shape))


def _prelu(call: Call, layer: Any, x: Value) -> Value:
    """max(x, 0) + w min(x, 0), w the same for all channels or one for each."""
    weight = (
        layer.weight
        if isinstance(layer.weight, Constant)
        else Constant(layer.weight, layer.weight.requires_grad)
    )
    count, inner = weight.tensor.numel(), math.prod(x.shape[1:])
    above, below = (between(call, x, *ends) for ends in ((0.0, math.inf), (-math.inf, 0.0)))
    shape = (count, *[1] * len(x.shape[1:])) if count > 1 else (1,) * len(x.shape)
    if inner == 1 and count > 1:
        below = call.builder.emit(ops.MulParam, (below,), x.shape, (weight,), n=count, rows=1)
    else:
        by = repeated(call.builder, same_for_all(call, weight, shape), x.shape)
        below = call.builder.emit(ops.Mul, (below, by), x.shape, n=math.prod(x.shape))
    return total(call, above, below)


def _upsample(call: Call, layer: nn.Upsample, x: Value) -> Value:
    """The nearest neighbour, whole times as often."""
    before, after = x.shape[1:], call.shape[1:]
    if layer.mode != "nearest" or any(b % a for a, b in zip(before, after)):
        raise Unsupported(f"the layer {call.where!r} is not of nearest neighbours, a whole number of times")
    for d, (size, wanted) in enumerate(zip(before, after), 1):
        outer, inner = math.prod(x.shape[: d + 1]), math.prod(x.shape[d + 1 :])
        shape = (*x.shape[:d], wanted, *x.shape[d + 1 :])
        if size < wanted:
            x = call.builder.emit(ops.Expand, (x,), shape, outer=outer, dim=wanted // size, inner=inner)
    return x


def _bag(call: Call, layer: nn.EmbeddingBag, x: Value) -> Value:
    """Rows of a table by number, and their mean or sum."""
    if layer.mode == "max" or len(call.args) + len(call.kwargs) > 1 or len(x.shape) != 1:
        raise Unsupported(f"the layer {call.where!r} takes the largest, or has offsets or weights")
    return mean_over(call, _embedding(call, layer, x), 0, total=layer.mode == "sum")


def _embedding(call: Call, layer: nn.Embedding | nn.EmbeddingBag, x: Value) -> Value:
    if layer.max_norm is not None or layer.scale_grad_by_freq:
        raise Unsupported(f"the layer {call.where!r} has max_norm or scale_grad_by_freq")
    count = layer.num_embeddings
    if not call.builder.limit(x, count):
        raise Unsupported(f"the layer {call.where!r} looks up what the model computed")
    skip = -1 if layer.padding_idx is None else layer.padding_idx % count
    return call.builder.emit(
        ops.Embedding, (x,), (*x.shape, layer.embedding_dim), (layer.weight,),
        count=count, f=layer.embedding_dim, t=math.prod(x.shape), skip=skip,
    )  # fmt: skip


_CELLS = {"GRU": "GruCell", "LSTM": "LstmCell", "RNN_TANH": "TanhCell"}


def _recurrent(call: Call, layer: nn.RNNBase, x: Value) -> Any:
    """(outputs, last states), as the layer gives them; one operation a layer and direction."""
    if layer.mode not in _CELLS or layer.proj_size:
        raise Unsupported(f"the layer {call.where!r} has {layer.mode} cells or a projection")
    if call.builder.batch(call.source) != (0 if layer.batch_first else 1):
        raise Unsupported(f"the layer {call.where!r} takes samples for steps: look at batch_first")
    steps, first = x.shape[0], _first_states(call)
    last: list[tuple[Value, int]] = []
    cells = layer.mode == "LSTM" and _asks_for_cells(call.node)
    for k in range(layer.num_layers):
        if k and layer.dropout:
            x = _dropout(call, nn.Dropout(layer.dropout), x)
        sides = []
        for back in range(2 if layer.bidirectional else 1):
            end = f"_l{k}" + ("_reverse" if back else "")
            names = [f"{n}{end}" for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            mine = [part(call.builder, state, 0, len(last), 1, drop=True) for state in first]
            made = call.builder.emit(
                ops.RNN, (x, *mine), (steps + cells, layer.hidden_size),
                tuple(getattr(layer, n, None) for n in names), cell=_CELLS[layer.mode], i=x.shape[1],
                h=layer.hidden_size, t=steps, reversed=bool(back), cells=cells,
            )  # fmt: skip
            sides.append(part(call.builder, made, 0, 0, steps))
            last.append((made, 0 if back else steps - 1))
        x = sides[0] if len(sides) == 1 else concat(call.builder, sides, 1)
    states = _States(call.builder, last)
    if layer.mode != "LSTM":
        return x, states
    return x, (states, _States(call.builder, [(made, steps) for made, _ in last]))


def _first_states(call: Call) -> list[Value]:
    """What a recurrent net starts from, all layers' together: states, and an LSTM's cells; none where it is zero."""
    given = call.argument(1, "hx")
    flat = [s for s in (given if isinstance(given, (tuple, list)) else (given,)) if s is not None]
    if all(isinstance(s, Constant) and not s.trained and not s.tensor.any() for s in flat):
        return []
    return [s if isinstance(s, Value) else same_for_all(call, s, s.tensor.shape) for s in flat]


def _asks_for_cells(node: fx.Node) -> bool:
    """Whether anybody reads the second half of an LSTM's last states."""
    for user in node.users:
        if user.target is not operator.getitem:
            return True
        if user.args[1] != 0 and any(u.target is not operator.getitem or u.args[1] != 0 for u in user.users):
            return True
    return False


class _States(Several):
    """The last states (or cells) of a recurrent net, taken out of what it gives when somebody asks for them."""

    def __init__(self, builder: Builder, last: list[tuple[Value, int]]) -> None:
        self.builder, self.last = builder, last

    def __getitem__(self, index: int) -> Value:
        value, step = self.last[index]
        return part(self.builder, value, 0, step, 1, drop=True)

    def whole(self) -> Value:
        values = [part(self.builder, value, 0, step, 1) for value, step in self.last]
        return concat(self.builder, values, 0)


LAYERS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Linear: _linear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: _linear,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Conv3d: _volume,
    nn.ConvTranspose1d: _transposed,
    nn.ConvTranspose2d: _transposed,
    nn.ZeroPad1d: _zeros,
    nn.ZeroPad2d: _zeros,
    nn.ConstantPad1d: _zeros,
    nn.ConstantPad2d: _zeros,
    nn.PixelShuffle: _shuffle,
    nn.Bilinear: _bilinear,
    nn.MaxPool1d: _max_pool,
    nn.MaxPool2d: _max_pool,
    nn.AvgPool1d: _avg_pool,
    nn.AvgPool2d: _avg_pool,
    nn.AdaptiveAvgPool1d: _adaptive_pool,
    nn.AdaptiveAvgPool2d: _adaptive_pool,
    nn.AdaptiveMaxPool1d: _adaptive_pool,
    nn.AdaptiveMaxPool2d: _adaptive_pool,
    **dict.fromkeys((nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d), _pool_volume),
    nn.GroupNorm: _group_norm,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.BatchNorm3d: _batch_norm,
    nn.InstanceNorm1d: _instance_norm,
    nn.InstanceNorm2d: _instance_norm,
    nn.InstanceNorm3d: _instance_norm,
    nn.ReLU: _map("Relu"),
    nn.ReLU6: _map("Relu6"),
    nn.Tanh: _map("Tanh"),
    nn.Sigmoid: _map("Sigmoid"),
    nn.LeakyReLU: _leaky,
    nn.GELU: _curve(lambda layer: "GeluTanh" if layer.approximate == "tanh" else "Gelu"),
    nn.SiLU: _curve("Silu"),
    nn.Hardswish: _curve("HardSwish"),
    nn.ELU: _curve(lambda layer: _elu(layer.alpha, 1.0)),
    nn.CELU: _curve(lambda layer: _elu(layer.alpha, 1 / layer.alpha)),
    nn.SELU: _curve(_elu(1.0507009873554805 * 1.6732632423543772, 1.0, 1.0507009873554805)),
    nn.Softplus: _softplus,
    nn.LogSigmoid: _curve("LogSigmoid"),
    nn.Mish: _curve("Mish"),
    nn.Softsign: _curve("Softsign"),
    nn.Tanhshrink: _curve("Tanhshrink"),
    nn.Hardsigmoid: _curve("Hardsigmoid"),
    nn.Hardtanh: _curve(lambda layer: f"Hardtanh<{bits(layer.min_val)}, {bits(layer.max_val)}>"),
    nn.Hardshrink: _curve(lambda layer: f"Hardshrink<{bits(layer.lambd)}>"),
    nn.Softshrink: _curve(lambda layer: f"Softshrink<{bits(layer.lambd)}>"),
    nn.Threshold: _curve(lambda layer: f"Threshold<{bits(layer.threshold)}, {bits(layer.value)}>"),
    nn.PReLU: _prelu,
    nn.GLU: _glu,
    nn.Softmax: _softmax,
    nn.LogSoftmax: _softmax,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.Dropout: _dropout,
    nn.Dropout1d: _dropout,
    nn.Dropout2d: _dropout,
    nn.Dropout3d: _dropout,
    nn.Identity: lambda call, layer, x: x,
    nn.Flatten: _reshaped,
    nn.Unflatten: _reshaped,
    nn.Upsample: _upsample,
    nn.UpsamplingNearest2d: _upsample,
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _bag,
    nn.GRU: _recurrent,
    nn.LSTM: _recurrent,
    nn.RNN: _recurrent,
}
