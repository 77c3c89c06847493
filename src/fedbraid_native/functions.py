"""What functions and methods of PyTorch come to in operations, and which lowering each node of a traced graph gets."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fedbraid_native import attention as _registers_its_layers  # noqa: F401
from fedbraid_native import losses, ops, products, values
from fedbraid_native.errors import Unsupported
from fedbraid_native.layers import (
    _conv,
    _embedding,
    _group_norm,
    _layer_norm,
    _linear,
    _pad,
    _prelu,
    _rms_norm,
    _volume,
    layer,
)
from fedbraid_native.trace import Constant, Value
from fedbraid_native.values import (
    Call,
    Handle,
    affine,
    bent,
    between,
    curve,
    dimension,
    mean_over,
    name,
    repeated,
    reshape,
    total,
)


def apply(call: Call) -> Any:
    """The value (or the values) that a node gives, with operations made for it."""
    node, target = call.node, call.node.target
    if node.op == "call_module":
        done = layer(call, call.builder.layer(node))
    else:
        handle = METHODS.get(str(target)) if node.op == "call_method" else FUNCTIONS.get(target)
        done = None if handle is None else handle(call)
    if done is None:
        raise Unsupported(f"the operation {name(target)!r} at {node.name!r} is not supported")
    return done


def _weighed(make: Callable[[SimpleNamespace], Any], names: str, **defaults: Any) -> Handle:
    """A function that does what a layer does with the weights it is given."""

    def handle(call: Call) -> Any:
        given = SimpleNamespace(**defaults | dict(zip(names.split(), call.args[1:])) | call.kwargs)
        x = call.args[0] if call.args else given.input
        weights = [w for w in (given.weight, given.bias) if w is not None]
        if not isinstance(x, Value) or not all(isinstance(w, Constant) for w in weights):
            return None
        return make(given)(call, given, x)

    return handle


def _as_linear(given: SimpleNamespace) -> Any:
    given.out_features, given.in_features = given.weight.tensor.shape
    return _linear


def _as_conv(given: SimpleNamespace) -> Any:
    given.out_channels, _, *given.kernel_size = given.weight.tensor.shape
    given.padding_mode = "zeros"
    return _conv


def _as_volume(given: SimpleNamespace) -> Any:
    _as_conv(given)
    return _volume


def _as_embedding(given: SimpleNamespace) -> Any:
    given.num_embeddings, given.embedding_dim = given.weight.tensor.shape
    return _embedding


def _embedded(call: Call) -> Any:
    """F.embedding(numbers, weight)."""
    names = "weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    return _weighed(
        _as_embedding, names, bias=None, padding_idx=None, max_norm=None, scale_grad_by_freq=False
    )(call)


def _normalised(call: Call) -> Value | None:
    """F.normalize: each row over its length."""
    x, p, dim = call.args[0], call.argument(1, "p", 2.0), call.argument(2, "dim", 1)
    if not isinstance(x, Value) or p != 2 or not isinstance(dim, int):
        return None
    d = dimension(call, dim)
    square = curve(call, "WholePower<2>", x)
    length = between(
        call,
        curve(call, "Length", mean_over(call, square, d, total=True)),
        call.argument(3, "eps", 1e-12),
        math.inf,
    )
    full = repeated(call.builder, Value(length.id, (*x.shape[:d], 1, *x.shape[d + 1 :])), x.shape)
    return call.builder.emit(ops.Div, (x, full), x.shape, n=math.prod(x.shape))


def _length(call: Call) -> Value | None:
    """norm: how long rows are."""
    order, dim = call.kwargs.get("ord", call.argument(1, "p", 2)), call.argument(2, "dim")
    dims: list[Any] = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    x = call.args[0]
    if not isinstance(x, Value) or order not in (2, "fro", None) or not all(isinstance(d, int) for d in dims):
        return None
    if len(dims) > 1 and name(call.node.target) == "linalg_norm" and order == 2:
        return None
    found = curve(call, "WholePower<2>", x)
    for d in sorted((dimension(call, d) for d in dims), reverse=True):
        found = mean_over(call, found, d, total=True)
    return Value(curve(call, "Length", found).id, call.shape)


def _variance(call: Call, root: bool = False) -> Value | None:
    """The mean square about the mean, along one dimension."""
    x, dim = call.args[0], call.argument(1, "dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(x, Value) or not isinstance(dim, int):
        return None
    d = dimension(call, dim)
    correction = call.kwargs.get("correction", int(call.argument(2, "unbiased", True)))
    mean = mean_over(call, x, d)
    full = repeated(call.builder, Value(mean.id, (*x.shape[:d], 1, *x.shape[d + 1 :])), x.shape)
    off = curve(call, "WholePower<2>", total(call, x, affine(call, full, -1.0)))
    found = affine(call, mean_over(call, off, d, total=True), 1 / max(x.shape[d] - correction, 1e-9))
    return Value((curve(call, "Sqrt", found) if root else found).id, call.shape)


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


_AFFINE = {"weight": None, "bias": None, "eps": 1e-5}
_CONV = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_larger, _smaller = (lambda call, larger=larger: values.extreme(call, larger) for larger in (True, False))


def _sum_over(call: Call) -> Value | None:
    return values.mean(call, total=True)


# by the name that functions of torch and methods of tensors share
BOTH: dict[str, Handle] = {
    "relu": _as(nn.ReLU),
    "relu_": _as(lambda: nn.ReLU(inplace=True)),
    "tanh": _as(nn.Tanh),
    "sigmoid": _as(nn.Sigmoid),
    "softmax": _as(_of_dim(nn.Softmax)),
    "log_softmax": _as(_of_dim(nn.LogSoftmax)),
    **{of: bent(of.capitalize()) for of in ("exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "abs", "sin", "cos", "erf")},
    "square": lambda call: curve(call, "WholePower<2>", call.args[0]),
    "neg": lambda call: affine(call, call.args[0], -1.0),
    "pow": values.power,
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), values.clamp),
    "add": values.add,
    "sub": values.subtract,
    "mul": values.multiply,
    "div": values.divided,
    **dict.fromkeys(("eq", "ne", "lt", "gt", "le", "ge", "logical_not"), values.compare),
    "masked_fill": values.masked_fill,
    "matmul": products.matmul,
    "bmm": products.matmul,
    "mm": products.matmul,
    "norm": _length,
    "detach": lambda call: call.builder.still(call.args[0]) if isinstance(call.args[0], Value) else None,
    "gather": losses.gather,
    "logsumexp": losses.logsumexp,
    "logical_and": losses.both,
    **dict.fromkeys(("max", "maximum"), _larger),
    **dict.fromkeys(("min", "minimum"), _smaller),
    "amax": values.amax,
    "amin": lambda call: values.amax(call, smallest=True),
    "mean": values.mean,
    "sum": _sum_over,
    "var": _variance,
    "std": lambda call: _variance(call, root=True),
    **dict.fromkeys(("chunk", "split"), values.split),
    "unbind": values.unbind,
    "select": values.select,
    "narrow": values.narrow,
    **dict.fromkeys(("flatten", "unflatten", "reshape", "squeeze", "unsqueeze"), reshape),
    **dict.fromkeys(("transpose", "permute", "swapaxes", "movedim"), values.permute),
}  # fmt: skip
FUNCTIONS: dict[Any, Handle] = {
    **{getattr(torch, of): handle for of, handle in BOTH.items() if hasattr(torch, of)},
    F.relu: _as(lambda inplace=False: nn.ReLU(inplace)),
    F.tanh: _as(nn.Tanh),
    F.sigmoid: _as(nn.Sigmoid),
    F.leaky_relu: _as(nn.LeakyReLU),
    F.elu: _as(nn.ELU),
    F.selu: _as(nn.SELU),
    F.celu: _as(nn.CELU),
    F.softplus: _as(nn.Softplus),
    F.logsigmoid: _as(nn.LogSigmoid),
    F.mish: _as(nn.Mish),
    F.softsign: _as(nn.Softsign),
    F.tanhshrink: _as(nn.Tanhshrink),
    F.hardtanh: _as(nn.Hardtanh),
    F.hardsigmoid: _as(nn.Hardsigmoid),
    F.hardshrink: _as(nn.Hardshrink),
    F.softshrink: _as(nn.Softshrink),
    F.threshold: _as(nn.Threshold),
    F.glu: _as(nn.GLU),
    F.gelu: _as(nn.GELU),
    F.silu: _as(lambda inplace=False: nn.SiLU(inplace)),
    F.relu6: _as(lambda inplace=False: nn.ReLU6(inplace)),
    F.hardswish: _as(lambda inplace=False: nn.Hardswish(inplace)),
    F.prelu: _weighed(lambda given: _prelu, "weight", bias=None),
    F.max_pool1d: _as(nn.MaxPool1d),
    F.max_pool2d: _as(nn.MaxPool2d),
    torch.max_pool1d: _as(nn.MaxPool1d),
    torch.max_pool2d: _as(nn.MaxPool2d),
    F.max_pool3d: _as(nn.MaxPool3d),
    torch.max_pool3d: _as(nn.MaxPool3d),
    F.avg_pool3d: _as(nn.AvgPool3d),
    F.adaptive_avg_pool3d: _as(nn.AdaptiveAvgPool3d),
    F.avg_pool1d: _as(nn.AvgPool1d),
    F.avg_pool2d: _as(nn.AvgPool2d),
    F.adaptive_avg_pool1d: _as(nn.AdaptiveAvgPool1d),
    F.adaptive_avg_pool2d: _as(nn.AdaptiveAvgPool2d),
    F.adaptive_max_pool1d: _as(nn.AdaptiveMaxPool1d),
    F.adaptive_max_pool2d: _as(nn.AdaptiveMaxPool2d),
    F.pad: _pad,
    F.interpolate: _as(nn.Upsample),
    F.dropout: _as(lambda p=0.5, training=True, inplace=False: nn.Dropout(p if training else 0.0)),
    F.softmax: _as(_of_dim(nn.Softmax)),
    F.log_softmax: _as(_of_dim(nn.LogSoftmax)),
    F.linear: _weighed(_as_linear, "weight bias", bias=None),
    F.conv1d: _weighed(_as_conv, "weight bias stride padding dilation groups", **_CONV),
    F.conv2d: _weighed(_as_conv, "weight bias stride padding dilation groups", **_CONV),
    F.conv3d: _weighed(_as_volume, "weight bias stride padding dilation groups", **_CONV),
    F.layer_norm: _weighed(lambda given: _layer_norm, "normalized_shape weight bias eps", **_AFFINE),
    F.group_norm: _weighed(lambda given: _group_norm, "num_groups weight bias eps", **_AFFINE),
    F.rms_norm: _weighed(lambda given: _rms_norm, "normalized_shape weight eps", **_AFFINE | {"eps": None}),
    F.embedding: _embedded,
    F.normalize: _normalised,
    **losses.FUNCTIONS,
    F.scaled_dot_product_attention: products.scaled_dot_product,
    torch.einsum: products.einsum,
    operator.matmul: products.matmul,
    **dict.fromkeys((operator.add, operator.iadd), values.add),
    **dict.fromkeys((operator.sub, operator.isub), values.subtract),
    **dict.fromkeys((operator.mul, operator.imul), values.multiply),
    **dict.fromkeys((operator.truediv, operator.itruediv), values.divided),
    operator.pow: values.power,
    operator.neg: BOTH["neg"],
    **dict.fromkeys((operator.eq, operator.ne, operator.lt, operator.gt, operator.le, operator.ge), values.compare),
    operator.invert: values.compare,
    operator.and_: losses.both,
    operator.getitem: losses.getitem,
    getattr: values.attribute,
    torch.where: values.where,
    **dict.fromkeys((torch.cat, torch.concat), values.cat),
    torch.stack: values.stack,
    **dict.fromkeys((torch.linalg.norm, torch.linalg.vector_norm), _length),
}  # fmt: skip
METHODS: dict[str, Handle] = {
    **BOTH,
    "add_": values.add,
    "sub_": values.subtract,
    "mul_": values.multiply,
    "div_": values.divided,
    "bool": values.compare,
    "__getitem__": losses.getitem,
    **dict.fromkeys(("expand", "expand_as"), values.expand),
    **dict.fromkeys(
        ("view", "view_as", "reshape_as", "contiguous", "float", "long", "int", "to", "type_as", "clone"),
        reshape,
    ),
}
