"""Lowerings of layers' functions: maps, convolutions, poolings, norms, activations, dropout, embeddings, recurrent nets.

PyTorch's layers are traced through, so that they arrive as the functions that their forwards call; layers that branch on what
they get are lowered as layers.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from fedbraid_native import ops
from fedbraid_native.errors import Unsupported
from fedbraid_native.frontend.builder import Builder
from fedbraid_native.frontend.lower_products import batch_matmul
from fedbraid_native.frontend.lower_reductions import reduce_dim
from fedbraid_native.frontend.lower_shapes import concat, permuted, slice_
from fedbraid_native.frontend.lower_tensor import (
    add_values,
    affine,
    broadcast,
    clip,
    dim_of,
    expand_param,
    float_bits,
    refuse_shared,
    register_unary,
    unary,
    value_of,
)
from fedbraid_native.frontend.registry import Call, lowers
from fedbraid_native.frontend.values import Constant, TupleValue, Value
from fedbraid_native.ops import Shape

# Maps -------------------------------------------------------------------------------------------------


def _weights(call: Call, *weights: Any) -> None:
    if not all(isinstance(w, (Constant, torch.Tensor)) for w in weights if w is not None):
        raise call.unsupported()


def shape_of(weight: Any) -> Shape:
    return tuple(weight.tensor.shape if isinstance(weight, Constant) else weight.shape)


@lowers(F.linear)
def linear(call: Call, input: Value, weight: Any, bias: Any = None) -> Value:
    x = value_of(call, input)
    _weights(call, weight, bias)
    o, i = shape_of(weight)
    rows = math.prod(x.shape[:-1])
    return call.emit(ops.Linear, (x,), (*x.shape[:-1], o), (weight, bias), i=i, o=o, rows=rows)


@lowers(F.bilinear)
def bilinear(call: Call, input1: Value, input2: Value, weight: Any, bias: Any = None) -> Value:
    """Each output: a map of the second input, and its product with the first."""
    _weights(call, weight, bias)
    if not all(isinstance(x, Value) and len(x.shape) == 1 for x in (input1, input2)):
        raise call.unsupported()
    o, i, j = shape_of(weight)
    flat = Constant(weight.tensor.view(o * i, j), weight.trained)
    seen = call.emit(ops.Linear, (input2,), (o, i), (flat, None), i=j, o=o * i)
    out = batch_matmul(call.builder, seen, input1.view((i, 1))).view((o,))
    return (
        out
        if bias is None
        else call.emit(ops.BinaryParam, (out,), (o,), (bias,), function="Add", n=o, rows=1)
    )


@lowers(F.embedding)
def embedding(
    call: Call, input: Value, weight: Any, padding_idx: int | None = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Value:  # fmt: skip
    x = value_of(call, input)
    _weights(call, weight)
    if max_norm is not None or scale_grad_by_freq:
        raise Unsupported(f"the layer {call.where!r} has max_norm or scale_grad_by_freq")
    count, f = shape_of(weight)
    if not call.builder.bound_indices(x, count):
        raise Unsupported(f"the layer {call.where!r} looks up what the model computed")
    skip = -1 if padding_idx is None else padding_idx % count
    return call.emit(
        ops.Embedding, (x,), (*x.shape, f), (weight,), count=count, f=f, t=math.prod(x.shape), skip=skip
    )


@lowers(F.embedding_bag)
def embedding_bag(
    call: Call, input: Value, weight: Any, offsets: Any = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Any = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Value:  # fmt: skip
    """Rows of a table by number, and their mean or sum."""
    if mode == "max" or offsets is not None or per_sample_weights is not None or len(input.shape) != 1:
        raise Unsupported(f"the layer {call.where!r} takes the largest, or has offsets or weights")
    found = embedding(call, input, weight, None, max_norm, norm_type, scale_grad_by_freq)
    return reduce_dim(call, found, 0, total=mode == "sum")


# Convolutions -----------------------------------------------------------------------------------------


def _tuple(value: Any, count: int) -> tuple[int, ...]:
    return (
        (int(value),) * count
        if isinstance(value, int)
        else tuple(int(value[k % len(value)]) for k in range(count))
    )


def _sizes(value: Any, flat: bool, alone: int = 1) -> tuple[int, int]:
    """Of rows and columns; a sequence is an image of one row."""
    one, two = (alone, _tuple(value, 1)[0]) if flat else _tuple(value, 2)
    return one, two


def _image(call: Call, x: Value) -> tuple[int, int, int]:
    """Channels, rows and columns; a sequence is an image of one row."""
    if len(x.shape) not in (2, 3):
        raise Unsupported(
            f"the layer {call.where!r} gets samples of shape {x.shape}, not channels by rows by columns"
        )
    return (x.shape[0], 1, x.shape[1]) if len(x.shape) == 2 else (x.shape[0], x.shape[1], x.shape[2])


def _padding(call: Call, padding: Any, kernel: Shape, dilation: Shape) -> Any:
    if not isinstance(padding, str):
        return padding
    if padding == "same" and any(k % 2 == 0 for k in kernel):
        raise Unsupported(f"the convolution {call.where!r} pads unevenly")
    return tuple(d * (k // 2) if padding == "same" else 0 for k, d in zip(kernel, dilation))


@lowers(F.conv1d, F.conv2d)
def conv2d(
    call: Call, input: Value, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Value:  # fmt: skip
    x = value_of(call, input)
    _weights(call, weight, bias)
    o, _, *size = shape_of(weight)
    flat, (channels, height, width) = len(size) == 1, _image(call, x)
    apart = _sizes(dilation, flat)
    padding = _padding(call, padding, tuple(size), apart[-1:] if flat else apart)
    kernel, steps, border = _sizes(size, flat), _sizes(stride, flat), _sizes(padding, flat, 0)
    if any(d > 1 and s > 1 for d, s in zip(apart, steps)):
        raise Unsupported(f"the convolution {call.where!r} has dilation and a stride")
    return call.emit(
        ops.Conv2d, (x,), (o, *call.shape[1:]), (weight, bias), i=channels // groups, h=height, w=width, o=o // groups,
        kernel=kernel, stride=steps, padding=border, groups=groups, dilation=apart,
    )  # fmt: skip


@lowers(F.conv3d)
def conv3d(
    call: Call, input: Value, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Value:  # fmt: skip
    """A convolution of images, one for each place along the depth, of what the kernel sees there."""
    x = value_of(call, input)
    _weights(call, weight, bias)
    if len(x.shape) != 4:
        raise Unsupported(f"the convolution {call.where!r} gets no volumes")
    kernel, steps, apart = shape_of(weight)[2:], _tuple(stride, 3), _tuple(dilation, 3)
    border = _tuple(_padding(call, padding, kernel, apart), 3)
    if any(d > 1 and s > 1 for d, s in zip(apart[1:], steps[1:])):
        raise Unsupported(f"the convolution {call.where!r} has dilation and a stride")
    (c, d, h, w), (o, depth, *sides) = x.shape, call.shape
    seen = call.emit(
        ops.Im2colDepth, (x,), (depth, c * kernel[0], h, w), c=c, d=d, inner=h * w, out=depth, kernel=kernel[0],
        stride=steps[0], padding=border[0], dilation=apart[0],
    )  # fmt: skip
    made = call.emit(
        ops.Conv2d, (seen,), (depth, o, *sides), (weight, bias), i=c * kernel[0] // groups, h=h, w=w, o=o // groups,
        kernel=kernel[1:], stride=steps[1:], padding=border[1:], groups=groups, dilation=apart[1:], rows=depth,
    )  # fmt: skip
    return permuted(call.builder, made, (1, 0, 2, 3))


@lowers(nn.ConvTranspose1d, nn.ConvTranspose2d)
def conv_transpose2d(call: Call, input: Value) -> Value:
    layer, x = call.module, value_of(call, input)
    flat, channels = isinstance(layer, nn.ConvTranspose1d), _image(call, x)[0]
    if layer.groups > 1 or any(d != 1 for d in layer.dilation):
        raise Unsupported(f"the convolution {call.where!r} has groups or dilation")
    rows, columns = (1, call.shape[1]) if flat else call.shape[1:]
    back = ops.Conv2d(
        inputs=(), output=-1, i=layer.out_channels, h=rows, w=columns, o=channels, kernel=_sizes(layer.kernel_size, flat),
        stride=_sizes(layer.stride, flat), padding=_sizes(layer.padding, flat, 0),
    )  # fmt: skip
    return call.emit(ops.ConvTranspose2d, (x,), call.shape, (layer.weight, layer.bias), conv=back)


@lowers(F.pad)
def pad(call: Call, input: Value, pad: Any, mode: str = "constant", value: Any = None) -> Value:
    """Zeros before and after the last dimensions, the last one first."""
    x, whole = value_of(call, input), [*pad, *[0] * 4][: max(4, len(pad))]
    if mode != "constant" or value:
        raise Unsupported(f"the layer {call.where!r} has a padding other than zeros")
    if not call.batch_first or len(whole) > 4 or len(x.shape) < (2 if any(whole[2:]) else 1):
        raise Unsupported(f"the padding {call.where!r} is of more than rows and columns")
    columns, rows = call.shape[-1], call.shape[-2] if len(x.shape) > 1 else 1
    height = x.shape[-2] if len(x.shape) > 1 else 1
    return call.emit(
        ops.ConstantPad2d, (x,), call.shape, c=math.prod(x.shape[:-2]), h=height, w=x.shape[-1], first=(whole[2], whole[0]),
        out=(rows, columns),
    )  # fmt: skip


@lowers("pixel_shuffle")
def pixel_shuffle(call: Call, input: Value, upscale_factor: int) -> Value:
    r, (channels, height, width) = upscale_factor, input.shape
    parts = input.view((channels // r**2, r, r, height, width))
    return permuted(call.builder, parts, (0, 3, 1, 4, 2)).view(call.shape)


@lowers(F.interpolate)
def interpolate(
    call: Call, input: Value, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: Any = None,
    recompute_scale_factor: Any = None, antialias: bool = False,
) -> Value:  # fmt: skip
    """The nearest neighbour, whole times as often."""
    x, before, after = value_of(call, input), input.shape[1:], call.shape[1:]
    if mode != "nearest" or any(b % a for a, b in zip(before, after)):
        raise Unsupported(f"the layer {call.where!r} is not of nearest neighbours, a whole number of times")
    for d, (now, wanted) in enumerate(zip(before, after), 1):
        outer, inner = math.prod(x.shape[: d + 1]), math.prod(x.shape[d + 1 :])
        shape = (*x.shape[:d], wanted, *x.shape[d + 1 :])
        if now < wanted:
            x = call.emit(ops.Expand, (x,), shape, outer=outer, dim=wanted // now, inner=inner)
    return x


# Poolings ---------------------------------------------------------------------------------------------


def _windows(n: int, k: int, step: int, border: int, up: bool) -> tuple[int, int]:
    """How many windows there are, and how far the last reaches beyond the border."""
    free = n + 2 * border - k
    last = -(-free // step) if up else free // step
    if up and last * step >= n + border:  # it would start beyond the image
        last -= 1
    return last + 1, max(0, last * step - free)


def _pool(
    call: Call, kind: type[ops.Pool2d], x: Value, flat: bool, kernel_size: Any, stride: Any, padding: Any, up: bool, **more: Any
) -> Value:  # fmt: skip
    channels, height, width = _image(call, x)
    kernel, steps = _sizes(kernel_size, flat), _sizes(stride or kernel_size, flat)
    border = _sizes(padding, flat, 0)
    sizes = zip((height, width), kernel, steps, border)
    (rows, below), (columns, right) = (_windows(*size, up) for size in sizes)
    return call.emit(
        kind, (x,), (channels, columns) if flat else (channels, rows, columns), c=channels, h=height, w=width,
        kernel=kernel, stride=steps, padding=border, beyond=(below, right), **more,
    )  # fmt: skip


@lowers(F.max_pool1d, torch.max_pool1d, F.max_pool2d, torch.max_pool2d, F.max_pool3d, torch.max_pool3d)
def max_pool(
    call: Call, input: Value, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Value:  # fmt: skip
    x, dims = value_of(call, input), int(call.name[-2])
    if any(d != 1 for d in _tuple(dilation, 3)) or return_indices:
        raise Unsupported(f"the pooling {call.where!r} has dilation or return_indices")
    if dims == 3:
        kernel, steps, border = (_tuple(n, 3) for n in (kernel_size, stride or kernel_size, padding))
        return _pool_volume(call, x, kernel, steps, border, ceil_mode, None)
    return _pool(call, ops.MaxPool2d, x, dims == 1, kernel_size, stride, padding, ceil_mode)


@lowers(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
def avg_pool(
    call: Call, input: Value, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Value:  # fmt: skip
    x, dims = value_of(call, input), int(call.name[-2])
    if ceil_mode:
        raise Unsupported(f"the pooling {call.where!r} has ceil_mode")
    area = math.prod(_tuple(kernel_size, dims))
    divisor = divisor_override or (area if count_include_pad else 0)
    if dims == 3:
        kernel, steps, border = (_tuple(n, 3) for n in (kernel_size, stride or kernel_size, padding))
        return _pool_volume(call, x, kernel, steps, border, False, divisor)
    return _pool(call, ops.AvgPool2d, x, dims == 1, kernel_size, stride, padding, False, divisor=divisor)


@lowers(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
def adaptive_avg_pool(call: Call, input: Value, output_size: Any) -> Value:
    return _adaptive_pool(call, value_of(call, input), output_size, False)


@lowers(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d, torch.adaptive_max_pool1d)
def adaptive_max_pool(call: Call, input: Value, output_size: Any, return_indices: bool = False) -> Value:
    if return_indices:
        raise Unsupported(f"the pooling {call.where!r} has return_indices")
    return _adaptive_pool(call, value_of(call, input), output_size, True)


def _adaptive_pool(call: Call, x: Value, size: Any, largest: bool) -> Value:
    before, after = x.shape[1:], call.shape[1:]
    even = not any(n % m for n, m in zip(before, after))
    if not even and (largest or len(before) == 3):
        cut = "x".join(map(str, before))
        raise Unsupported(f"the pooling {call.where!r} cuts {cut} into uneven windows")
    kernel = tuple(n // m for n, m in zip(before, after))
    if len(before) == 3:
        return _pool_volume(call, x, kernel, kernel, (0, 0, 0), False, None if largest else math.prod(kernel))
    channels, height, width = _image(call, x)
    if not even:
        out = after if len(after) == 2 else (1, *after)
        return call.emit(ops.AdaptiveAvgPool2d, (x,), call.shape, c=channels, h=height, w=width, out=out)
    windows = kernel if len(kernel) == 2 else (1, *kernel)
    kind: type[ops.Pool2d] = ops.MaxPool2d if largest else ops.AvgPool2d
    more: dict[str, Any] = {} if largest else {"divisor": math.prod(kernel)}
    sizes: dict[str, Any] = {"c": channels, "h": height, "w": width, "kernel": windows, "stride": windows}
    return call.emit(kind, (x,), call.shape, **sizes, **more)


def _pool_volume(
    call: Call, x: Value, kernel: Shape, stride: Shape, border: Shape, up: bool, divisor: int | None
) -> Value:
    """A pooling of images, and then along the depth; without a divisor, of the largest."""
    if len(x.shape) != 4:
        raise Unsupported(f"the pooling {call.where!r} gets no volumes")
    (c, d, h, w), (rows, columns) = x.shape, call.shape[2:]
    beyond = [_windows(*size, up)[1] for size in zip((d, h, w), kernel, stride, border)]
    kind: type[ops.Pool2d] = ops.MaxPool2d if divisor is None else ops.AvgPool2d
    more: list[dict[str, Any]] = (
        [{}, {}] if divisor is None else [{"divisor": divisor}, {"divisor": 1 if divisor else 0}]
    )
    flat = call.emit(
        kind, (x,), (c, d, rows, columns), c=c * d, h=h, w=w, kernel=kernel[1:], stride=stride[1:],
        padding=border[1:], beyond=tuple(beyond[1:]), **more[0],
    )  # fmt: skip
    return call.emit(
        kind, (flat,), call.shape, c=c, h=d, w=rows * columns, kernel=(kernel[0], 1), stride=(stride[0], 1),
        padding=(border[0], 0), beyond=(beyond[0], 0), **more[1],
    )  # fmt: skip


# Norms ------------------------------------------------------------------------------------------------


@lowers(F.group_norm)
def group_norm(
    call: Call, input: Value, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Value:
    x = value_of(call, input)
    _weights(call, weight, bias)
    each = math.prod(x.shape[1:])
    return call.emit(
        ops.GroupNorm, (x,), x.shape, (weight, bias), c=x.shape[0], each=each, groups=num_groups, eps=eps
    )


@lowers(F.layer_norm)
def layer_norm(
    call: Call, input: Value, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Value:
    x, n = value_of(call, input), math.prod(normalized_shape)
    _weights(call, weight, bias)
    rows = math.prod(x.shape) // n
    return call.emit(ops.GroupNorm, (x,), x.shape, (weight, bias), c=n, each=1, groups=1, eps=eps, rows=rows)


@lowers(F.rms_norm)
def rms_norm(call: Call, input: Value, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Value:
    x, n = value_of(call, input), math.prod(normalized_shape)
    _weights(call, weight)
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return call.emit(ops.RMSNorm, (x,), x.shape, (weight,), n=n, rows=math.prod(x.shape) // n, eps=eps)


@lowers(F.local_response_norm)
def local_response_norm(
    call: Call, input: Value, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Value:
    """x / (k + alpha * the mean square of `size` channels around each) ** beta."""
    x = value_of(call, input)
    c, rest, wide = x.shape[0], math.prod(x.shape[1:]), x.shape[0] + size - 1
    square = unary(call, "WholePower<2>", x)
    edges: dict[str, Any] = {"first": (size // 2, 0), "out": (wide, rest)}
    square = call.emit(ops.ConstantPad2d, (square,), (wide, rest), c=1, h=c, w=rest, **edges)
    window: dict[str, Any] = {"kernel": (size, 1), "stride": (1, 1), "divisor": size}
    mean = call.emit(ops.AvgPool2d, (square,), x.shape, c=1, h=wide, w=rest, **window)
    by = unary(call, f"Power<{float_bits(-beta)}>", affine(call, mean, alpha, k))
    return call.emit(ops.Binary, (x, by), x.shape, function="Mul", n=x.size)


@lowers(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm(call: Call, input: Value) -> Value:
    layer, x = call.module, value_of(call, input)
    if not (layer.training and layer.track_running_stats) or layer.momentum is None:
        raise Unsupported(f"the layer {call.where!r} keeps no running statistics")
    running = (layer.running_mean, layer.running_var)
    ref = call.builder.weight_ref(layer.running_mean)
    if any(op.is_batch_dependent and ref in op.weights for op in call.builder.ops):
        raise Unsupported(f"the layer {call.where!r} is used twice")
    return call.emit(
        ops.BatchNorm, (x,), x.shape, (layer.weight, layer.bias, *running),
        c=x.shape[0], each=math.prod(x.shape[1:]), eps=layer.eps, momentum=layer.momentum,
    )  # fmt: skip


@lowers(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(call: Call, input: Value) -> Value:
    layer = call.module
    if layer.track_running_stats:
        raise Unsupported(f"the layer {call.where!r} keeps running statistics")
    return group_norm(call, input, input.shape[0], layer.weight, layer.bias, layer.eps)


# Activations ------------------------------------------------------------------------------------------


def activation(call: Call, function: str, x: Value, inplace: bool, saves: str = "input") -> Value:
    if inplace:
        refuse_shared(call)
    return unary(call, function, x, saves)


def _register_activation(function: str, *targets: Any, saves: str = "input") -> None:
    def lowering(call: Call, input: Value, inplace: bool = False) -> Value:
        return activation(call, function, input, inplace, saves)

    lowers(*targets)(lowering)


def elu_name(low: float, bend: float, high: float = 1.0) -> str:
    return f"Elu<{float_bits(low)}, {float_bits(bend)}, {float_bits(high)}>"


_SCALE = 1.0507009873554805  # of SELU
_register_activation("Relu", "relu", F.relu, saves="output")
_register_activation("Relu6", F.relu6, saves="output")
_register_activation("Silu", F.silu)
_register_activation("HardSwish", F.hardswish)
_register_activation("Mish", F.mish)
_register_activation("Hardsigmoid", F.hardsigmoid)
_register_activation(elu_name(_SCALE * 1.6732632423543772, 1.0, _SCALE), F.selu)
register_unary("LogSigmoid", F.logsigmoid)
register_unary("Softsign", F.softsign)
register_unary("Tanhshrink", F.tanhshrink)


@lowers("relu_")
def relu_(call: Call, input: Value) -> Value:
    return activation(call, "Relu", input, True, "output")


@lowers(F.leaky_relu)
def leaky_relu(call: Call, input: Value, negative_slope: float = 0.01, inplace: bool = False) -> Value:
    if negative_slope < 0:
        raise Unsupported(f"the layer {call.where!r} has a negative slope below zero")
    return activation(call, f"LeakyRelu<{float_bits(negative_slope)}>", input, inplace, "output")


@lowers(F.elu)
def elu(call: Call, input: Value, alpha: float = 1.0, inplace: bool = False) -> Value:
    return activation(call, elu_name(alpha, 1.0), input, inplace)


@lowers(F.celu)
def celu(call: Call, input: Value, alpha: float = 1.0, inplace: bool = False) -> Value:
    return activation(call, elu_name(alpha, 1 / alpha), input, inplace)


@lowers(F.gelu)
def gelu(call: Call, input: Value, approximate: str = "none") -> Value:
    return unary(call, "GeluTanh" if approximate == "tanh" else "Gelu", input)


@lowers(F.softplus)
def softplus(call: Call, input: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    if threshold < 15:  # beyond it is a line, which is the same to rounding
        raise Unsupported(f"the layer {call.where!r} becomes a line early")
    return unary(call, f"Softplus<{float_bits(beta)}>", input)


@lowers(F.hardtanh)
def hardtanh(
    call: Call, input: Value, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Value:
    if (min_val, max_val) == (0.0, 6.0):
        return activation(call, "Relu6", input, inplace, "output")
    return activation(call, f"Hardtanh<{float_bits(min_val)}, {float_bits(max_val)}>", input, inplace)


@lowers(F.hardshrink)
def hardshrink(call: Call, input: Value, lambd: float = 0.5) -> Value:
    return unary(call, f"Hardshrink<{float_bits(lambd)}>", input)


@lowers(F.softshrink)
def softshrink(call: Call, input: Value, lambd: float = 0.5) -> Value:
    return unary(call, f"Softshrink<{float_bits(lambd)}>", input)


@lowers(F.threshold, F._threshold)  # type: ignore[attr-defined]
def threshold(call: Call, input: Value, threshold: float, value: float, inplace: bool = False) -> Value:
    return activation(call, f"Threshold<{float_bits(threshold)}, {float_bits(value)}>", input, inplace)


@lowers(F.glu)
def glu(call: Call, input: Value, dim: int = -1) -> Value:
    d = dim_of(call, input, dim)
    half = input.shape[d] // 2
    a, b = (slice_(call.builder, input, d, start, half) for start in (0, half))
    return call.emit(ops.Binary, (a, unary(call, "Sigmoid", b, "output")), a.shape, function="Mul", n=a.size)


@lowers(F.prelu)
def prelu(call: Call, input: Value, weight: Any) -> Value:
    """max(x, 0) + w min(x, 0), w the same for all channels or one for each."""
    x = value_of(call, input)
    _weights(call, weight)
    count, inner = math.prod(shape_of(weight)), math.prod(x.shape[1:])
    above, below = clip(call, x, 0.0), clip(call, x, high=0.0)
    shape = (count, *[1] * len(x.shape[1:])) if count > 1 else (1,) * len(x.shape)
    if inner == 1 and count > 1:
        below = call.emit(ops.BinaryParam, (below,), x.shape, (weight,), function="Mul", n=count, rows=1)
    else:
        by = broadcast(call.builder, expand_param(call, weight, shape), x.shape)
        below = call.emit(ops.Binary, (below, by), x.shape, function="Mul", n=x.size)
    return add_values(call, above, below)


def softmax_of(call: Call, x: Value, d: int, log: bool) -> Value:
    rows, inner = math.prod(x.shape[:d]), math.prod(x.shape[d + 1 :])
    return call.emit(ops.Softmax, (x,), x.shape, n=x.shape[d], rows=rows, inner=inner, log=log)


def _softmax(call: Call, input: Value, dim: int | None, dtype: Any, log: bool) -> Value:
    if dtype not in (None, torch.float32):
        raise call.unsupported()
    implied = 0 if call.result.ndim == 3 else 1
    return softmax_of(call, input, dim_of(call, value_of(call, input), implied if dim is None else dim), log)


@lowers("softmax", F.softmax)
def softmax(
    call: Call, input: Value, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Value:
    return _softmax(call, input, dim, dtype, False)


@lowers("log_softmax", F.log_softmax)
def log_softmax(
    call: Call, input: Value, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Value:
    return _softmax(call, input, dim, dtype, True)


# Random zeros -----------------------------------------------------------------------------------------


@lowers(F.dropout)
def dropout(call: Call, input: Value, p: float = 0.5, training: bool = True, inplace: bool = False) -> Value:
    if inplace:
        refuse_shared(call)
    x = value_of(call, input)
    return x if not p or not training else call.emit(ops.Dropout, (x,), x.shape, n=x.size, each=1, p=p)


@lowers(F.dropout1d, F.dropout2d, F.dropout3d)
def dropout_channels(
    call: Call, input: Value, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Value:
    if inplace:
        refuse_shared(call)
    x = value_of(call, input)
    if not p or not training:
        return x
    return call.emit(ops.Dropout, (x,), x.shape, n=x.size, each=x.size // x.shape[0], p=p)


# Recurrent nets ---------------------------------------------------------------------------------------

_CELLS = {"GRU": "GruCell", "LSTM": "LstmCell", "RNN_TANH": "TanhCell"}


@lowers(nn.RNN, nn.GRU, nn.LSTM)
def rnn(call: Call, input: Value, hx: Any = None) -> Any:
    """(outputs, last states), as the layer gives them; one operation a layer and direction."""
    layer, x = call.module, value_of(call, input)
    if layer.mode not in _CELLS or layer.proj_size:
        raise Unsupported(f"the layer {call.where!r} has {layer.mode} cells or a projection")
    if x.batch_dim != (0 if layer.batch_first else 1):
        raise Unsupported(f"the layer {call.where!r} takes samples for steps: look at batch_first")
    steps, first = x.shape[0], _first_states(call, hx)
    last: list[tuple[Value, int]] = []
    cells = layer.mode == "LSTM" and _asks_for_cells(call.node)
    for k in range(layer.num_layers):
        if k:
            x = dropout(call, x, layer.dropout)
        sides = []
        for back in range(2 if layer.bidirectional else 1):
            end = f"_l{k}" + ("_reverse" if back else "")
            names = [f"{n}{end}" for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            mine = [slice_(call.builder, state, 0, len(last), 1, drop=True) for state in first]
            made = call.emit(
                ops.RNN, (x, *mine), (steps + cells, layer.hidden_size),
                tuple(getattr(layer, n, None) for n in names), cell=_CELLS[layer.mode], i=x.shape[1],
                h=layer.hidden_size, t=steps, reversed=bool(back), cells=cells,
            )  # fmt: skip
            sides.append(slice_(call.builder, made, 0, 0, steps))
            last.append((made, 0 if back else steps - 1))
        x = sides[0] if len(sides) == 1 else concat(call.builder, sides, 1)
    states = _States(call.builder, last)
    if layer.mode != "LSTM":
        return x, states
    return x, (states, _States(call.builder, [(made, steps) for made, _ in last]))


def _first_states(call: Call, hx: Any) -> list[Value]:
    """What a recurrent net starts from, all layers' together: states, and an LSTM's cells; none where it is zero."""
    flat = [s for s in (hx if isinstance(hx, (tuple, list)) else (hx,)) if s is not None]
    if all(isinstance(s, Constant) and not s.trained and not s.tensor.any() for s in flat):
        return []
    return [s if isinstance(s, Value) else expand_param(call, s, s.tensor.shape) for s in flat]


def _asks_for_cells(node: fx.Node) -> bool:
    """Whether anybody reads the second half of an LSTM's last states."""
    for user in node.users:
        if user.target is not operator.getitem:
            return True
        if user.args[1] != 0 and any(u.target is not operator.getitem or u.args[1] != 0 for u in user.users):
            return True
    return False


class _States(TupleValue):
    """The last states (or cells) of a recurrent net, taken out of what it gives when somebody asks for them."""

    def __init__(self, builder: Builder, last: list[tuple[Value, int]]) -> None:
        self.builder, self.last = builder, last

    def __getitem__(self, index: int) -> Value:
        value, step = self.last[index]
        return slice_(self.builder, value, 0, step, 1, drop=True)

    def whole(self) -> Value:
        values = [slice_(self.builder, value, 0, step, 1) for value, step in self.last]
        return replace(concat(self.builder, values, 0), batch_dim=1)
