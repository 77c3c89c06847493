"""From a module to a short list of operations on named values, or a sentence that says why not."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedbraid.core.layout import Layout

Shape = tuple[int, ...]


class Unsupported(Exception):
    """Why a model cannot be compiled, as one sentence."""


@dataclass(frozen=True)
class Op:
    """One layer: the values it reads and writes, its constants, its places in the flat vector."""

    kind: str
    inputs: tuple[int, ...]
    output: int
    constants: tuple[int | float, ...] = ()
    weight: int | None = None
    bias: int | None = None


@dataclass(frozen=True)
class Graph:
    """Operations in the order they run; value 0 is the input, the last operation's output the model's."""

    shapes: list[Shape]  # of each value, without the batch
    ops: list[Op]
    output: int
    layout: Layout

    @property
    def once(self) -> bool:
        """Whether every parameter is read by exactly one operation: none is spare, tied or used again."""
        used = [at for op in self.ops for at in (op.weight, op.bias) if at is not None]
        return sorted(used) == [s.offset for s in self.layout]


def trace(module: nn.Module, layout: Layout, sample: Tensor) -> Graph:
    """The graph of a module on inputs shaped like `sample[0]`; raises Unsupported."""
    _check_parameters(module, layout)
    module.train()
    try:
        traced = fx.symbolic_trace(nn.Sequential(module))  # so that a lone layer is a layer too
        traced.graph.eliminate_dead_code()
        results = _Record(traced).record(torch.stack([sample[0]] * _BATCH))
    except Exception as error:
        raise Unsupported(f"the model cannot be traced ({_first_line(error)})") from error
    return _Builder(module, layout, results).build(traced.graph)


_BATCH = 3


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__


def _check_parameters(module: nn.Module, layout: Layout) -> None:
    if layout.buffers is not None:
        raise Unsupported("the model has running statistics that are averaged")
    for name, _ in module.named_parameters():
        if name not in layout.names:
            raise Unsupported(f"parameter {name!r} is frozen")


def _offsets(module: nn.Module, layout: Layout) -> dict[str, int]:
    """Where each parameter lives, tied ones under each of their names."""
    places = {s.name: s.offset for s in layout}
    owners = {id(p): places[name] for name, p in module.named_parameters()}
    return {name: owners[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}


class _Record(fx.Interpreter):
    """Runs the graph once and keeps what every node gave."""

    def record(self, x: Tensor) -> dict[fx.Node, Any]:
        self.results: dict[fx.Node, Any] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():  # the user's random state stays as it is
            self.run(x)
        return self.results

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.results[n] = result
        return result


# Functions and methods stand for the module that does the same.
_FUNCTIONS: dict[Any, Callable[..., nn.Module]] = {
    F.relu: lambda inplace=False: nn.ReLU(inplace),
    torch.relu: nn.ReLU,
    torch.relu_: lambda: nn.ReLU(inplace=True),
    F.tanh: nn.Tanh,
    torch.tanh: nn.Tanh,
    F.sigmoid: nn.Sigmoid,
    torch.sigmoid: nn.Sigmoid,
    F.leaky_relu: nn.LeakyReLU,
    F.max_pool2d: nn.MaxPool2d,
    torch.max_pool2d: nn.MaxPool2d,
    F.avg_pool2d: nn.AvgPool2d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.dropout: lambda p=0.5, training=True, inplace=False: nn.Dropout(p if training else 0.0),
    torch.flatten: nn.Flatten,
}
_METHODS: dict[str, Callable[..., nn.Module]] = {
    "relu": nn.ReLU,
    "relu_": lambda: nn.ReLU(inplace=True),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}
_RESHAPES: set[Any] = {
    "view",
    "reshape",
    "flatten",
    "squeeze",
    "unsqueeze",
    "contiguous",
    "float",
    "to",
    "type_as",
}
_RESHAPES |= {torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze}
_ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_NEEDLESS = {
    "size",
    "dim",
    getattr,
    operator.getitem,
    operator.mul,
    operator.floordiv,
}  # arithmetic on shapes


class _Builder:
    def __init__(self, module: nn.Module, layout: Layout, results: dict[fx.Node, Any]) -> None:
        self.modules = {f"0.{name}".rstrip("."): m for name, m in module.named_modules()}
        self.offsets = _offsets(module, layout)
        self.layout = layout
        self.results = results
        self.values: dict[fx.Node, int] = {}
        self.shapes: list[Shape] = []
        self.ops: list[Op] = []

    def build(self, graph: fx.Graph) -> Graph:
        output = 0
        for node in graph.nodes:
            if node.op == "placeholder":
                if self.values:
                    raise Unsupported(f"the model takes a second input {node.target!r}")
                self.values[node] = self._value(node)
            elif node.op == "output":
                output = self._output(node.args[0])
            elif node.op == "get_attr":
                raise Unsupported(f"the model uses the tensor {node.target!r} outside a layer")
            else:
                self._node(node)
        if not self.ops or self.ops[-1].output != output:
            raise Unsupported("the model's output is not its last layer's")
        ops = _rectify_pools(self.ops, output)
        return Graph(self.shapes, ops, output, self.layout)

    def _value(self, node: fx.Node) -> int:
        shape = tuple(self.results[node].shape)
        if shape[:1] != (_BATCH,):
            raise Unsupported(f"{node.name!r} mixes the samples of a batch")
        self.shapes.append(shape[1:])
        return len(self.shapes) - 1

    def _output(self, node: Any) -> int:
        if not isinstance(node, fx.Node) or node not in self.values:
            raise Unsupported("the model's output is not one tensor")
        if self.results[node].ndim != 2:
            raise Unsupported(
                f"the model's output has shape {tuple(self.results[node].shape[1:])} per sample, not one row"
            )
        return self.values[node]

    def _node(self, node: fx.Node) -> None:
        target = node.target
        tensors = [a for a in node.args if isinstance(a, fx.Node) and a in self.values]
        if not isinstance(self.results[node], Tensor):
            if target in _NEEDLESS:
                return
        elif target in _ADDITIONS and len(tensors) == 2 and len(node.args) == 2 and not node.kwargs:
            return self._add(node, tensors)
        elif tensors and target in _RESHAPES and self._same_numbers(node, tensors[0]):
            self.values[node] = self.values[tensors[0]]
            return None
        elif tensors and (layer := self._layer(node)) is not None:
            return self._apply(node, tensors[0], layer)
        raise Unsupported(f"the operation {_name(target)!r} at {node.name!r} is not supported")

    def _same_numbers(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether a reshape left each sample its numbers; it cannot change their order."""
        a, b = self.results[node], self.results[source]
        return bool(a.shape[:1] == (_BATCH,) and a.numel() == b.numel() and a.dtype == torch.float32)

    def _layer(self, node: fx.Node) -> nn.Module | None:
        if node.op == "call_module":
            layer: nn.Module = self.modules[str(node.target)]
            return layer
        make = _METHODS.get(str(node.target)) if node.op == "call_method" else _FUNCTIONS.get(node.target)
        if make is None:
            return None
        try:
            return make(
                *node.args[1:],
                **{k: v for k, v in node.kwargs.items() if k not in ("return_indices", "input")},
            )
        except TypeError:
            return None

    def _add(self, node: fx.Node, tensors: list[fx.Node]) -> None:
        if self.results[tensors[0]].shape != self.results[tensors[1]].shape:
            raise Unsupported(f"the addition at {node.name!r} broadcasts")
        if node.target in (operator.iadd, "add_") and len(tensors[0].users) > 1:
            raise Unsupported(f"{node.name!r} changes in place what something else reads")
        inputs = tuple(self.values[t] for t in tensors)
        self.values[node] = self._value(node)
        self.ops.append(Op("add", inputs, self.values[node], (math.prod(self.shapes[-1]),)))

    def _apply(self, node: fx.Node, source: fx.Node, layer: nn.Module) -> None:
        where = str(node.target)[2:] if node.op == "call_module" else node.name
        describe = _LAYERS.get(type(layer))
        if describe is None:
            raise Unsupported(f"the layer {type(layer).__name__} at {where!r} is not supported")
        if getattr(layer, "inplace", False) and len(source.users) > 1:
            raise Unsupported(f"{where!r} changes in place what something else reads")
        shape = tuple(self.results[source].shape[1:])
        described = describe(layer, shape, where)
        if described is None:
            self.values[node] = self.values[source]
            return
        kind, constants = described
        weight, bias = (self.offsets.get(f"{where}.{n}".lstrip(".")) for n in ("weight", "bias"))
        inputs = (self.values[source],)
        self.values[node] = self._value(node)
        self.ops.append(Op(kind, inputs, self.values[node], constants, weight, bias))


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


# What each layer comes to, given the shape of one sample: (kind, constants), or None where it does nothing.
Described = tuple[str, tuple[int | float, ...]] | None


def _pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _image(shape: Shape, where: str) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise Unsupported(
            f"the layer {where!r} gets samples of shape {shape}, not channels by rows by columns"
        )
    return shape[0], shape[1], shape[2]


def _linear(layer: nn.Linear, shape: Shape, where: str) -> Described:
    if len(shape) != 1:
        raise Unsupported(f"the layer {where!r} gets samples of shape {shape}; flatten them first")
    return "linear", (layer.in_features, layer.out_features)


def _conv(layer: nn.Conv2d, shape: Shape, where: str) -> Described:
    image = _image(shape, where)
    if layer.groups != 1 or _pair(layer.dilation) != (1, 1) or layer.padding_mode != "zeros":
        raise Unsupported(f"the convolution {where!r} has groups, dilation or a padding other than zeros")
    padding = layer.padding
    if isinstance(padding, str):
        if padding == "same" and any(k % 2 == 0 for k in layer.kernel_size):
            raise Unsupported(f"the convolution {where!r} pads unevenly")
        padding = tuple(k // 2 for k in layer.kernel_size) if padding == "same" else (0, 0)
    return "conv", (
        *image,
        layer.out_channels,
        *_pair(layer.kernel_size),
        *_pair(layer.stride),
        *_pair(padding),
    )


def _max_pool(layer: nn.MaxPool2d, shape: Shape, where: str) -> Described:
    if _pair(layer.dilation) != (1, 1) or layer.ceil_mode or layer.return_indices:
        raise Unsupported(f"the pooling {where!r} has dilation, ceil_mode or return_indices")
    stride = layer.stride or layer.kernel_size
    return "max_pool", (
        *_image(shape, where),
        *_pair(layer.kernel_size),
        *_pair(stride),
        *_pair(layer.padding),
        0,
    )


def _avg_pool(layer: nn.AvgPool2d, shape: Shape, where: str) -> Described:
    if layer.ceil_mode:
        raise Unsupported(f"the pooling {where!r} has ceil_mode")
    kernel, stride = _pair(layer.kernel_size), _pair(layer.stride or layer.kernel_size)
    divisor = layer.divisor_override or (math.prod(kernel) if layer.count_include_pad else 0)
    return "avg_pool", (*_image(shape, where), *kernel, *stride, *_pair(layer.padding), divisor)


def _adaptive_pool(layer: nn.AdaptiveAvgPool2d, shape: Shape, where: str) -> Described:
    channels, height, width = _image(shape, where)
    out = layer.output_size if isinstance(layer.output_size, tuple) else (layer.output_size,) * 2
    rows, columns = out[0] or height, out[1] or width
    if height % rows or width % columns:
        raise Unsupported(f"the pooling {where!r} cuts {height}x{width} into uneven windows")
    kernel = (height // rows, width // columns)
    return "avg_pool", (channels, height, width, *kernel, *kernel, 0, 0, math.prod(kernel))


def _group_norm(layer: nn.GroupNorm, shape: Shape, where: str) -> Described:
    return "group_norm", (shape[0], math.prod(shape[1:]), layer.num_groups, layer.eps)


def _leaky(layer: nn.LeakyReLU, shape: Shape, where: str) -> Described:
    if layer.negative_slope < 0:
        raise Unsupported(f"the layer {where!r} has a negative slope below zero")
    return "leaky_relu", (math.prod(shape), layer.negative_slope)


def _map(kind: str) -> Callable[..., Described]:
    return lambda layer, shape, where: (kind, (math.prod(shape),))


def _dropout(layer: nn.Dropout, shape: Shape, where: str) -> Described:
    if layer.p:
        raise Unsupported(f"the layer {where!r} drops out with p={layer.p}")
    return None


def _flatten(layer: nn.Flatten, shape: Shape, where: str) -> Described:
    if layer.start_dim < 1:
        raise Unsupported(f"the layer {where!r} flattens the batch")
    return None


_LAYERS: dict[type[nn.Module], Callable[..., Described]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv,
    nn.MaxPool2d: _max_pool,
    nn.AvgPool2d: _avg_pool,
    nn.AdaptiveAvgPool2d: _adaptive_pool,
    nn.GroupNorm: _group_norm,
    nn.ReLU: _map("relu"),
    nn.Tanh: _map("tanh"),
    nn.Sigmoid: _map("sigmoid"),
    nn.LeakyReLU: _leaky,
    nn.Dropout: _dropout,
    nn.Identity: lambda layer, shape, where: None,
    nn.Flatten: _flatten,
}


def _rectify_pools(ops: list[Op], output: int) -> list[Op]:
    """ReLU before or after a max-pooling is part of it: the larger of the window and 0."""
    users = [sum(v in op.inputs for op in ops) for v in range(1 + max(op.output for op in ops))]
    users[output] += 1
    fused: list[Op] = []
    for op in ops:
        last = fused[-1] if fused else None
        if last is not None and last.output in op.inputs and users[last.output] == 1:
            if (last.kind, op.kind) == ("relu", "max_pool"):
                fused[-1] = replace(op, inputs=last.inputs, constants=(*op.constants[:-1], 1))
                continue
            if (last.kind, op.kind) == ("max_pool", "relu"):
                fused[-1] = replace(last, output=op.output, constants=(*last.constants[:-1], 1))
                continue
        fused.append(op)
    return fused
