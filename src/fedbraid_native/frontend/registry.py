"""Lowerings: for each function, method or layer of PyTorch, the Python function that emits its operations.

    @lowers("erf")                      # torch.erf, and the method
    def erf(call: Call, input: Value) -> Value:
        return unary(call, "Erf", input)

A lowering takes the call and then the arguments by PyTorch's names: what it does not name is not supported. It returns a value
(or a tuple of them), or raises `Unsupported`. On parameters alone it gets values that are not batched.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import fx, nn

from fedbraid_native.errors import Unsupported
from fedbraid_native.frontend.values import Constant, Value
from fedbraid_native.ops import Shape

if TYPE_CHECKING:
    from fedbraid_native.frontend.builder import Builder

Lowering = Callable[..., Any]
L = TypeVar("L", bound=Lowering)
LOWERINGS: dict[Any, Lowering] = {}


def lowers(*targets: Any) -> Callable[[L], L]:
    """Register a lowering for functions and classes of layers; a name is a method, and a function of torch if there is one."""

    def register(lowering: L) -> L:
        for target in targets:
            LOWERINGS[target] = lowering
            if isinstance(target, str) and inspect.isroutine(found := getattr(torch, target, None)):
                LOWERINGS[found] = lowering
        return lowering

    return register


@dataclass(frozen=True)
class Call:
    """One node of the trace: what is called, and what it gave for a batch."""

    builder: Builder
    node: fx.Node
    result: Any

    @property
    def name(self) -> str:
        target = self.node.target
        return target if isinstance(target, str) else getattr(target, "__name__", str(target))

    @property
    def where(self) -> str:
        """The path of PyTorch's own layer that the call is in, else the node's name."""
        stack = list((self.node.meta.get("nn_module_stack") or {}).values())
        path, kind = stack[-1] if stack else ("", None)
        if self.node.op == "call_module":
            return str(self.node.target)[2:]
        is_torchs = isinstance(kind, type) and kind.__module__.startswith("torch.nn")
        return str(path)[2:] if is_torchs and kind not in _CONTAINERS else self.node.name

    @property
    def module(self) -> Any:
        """The layer that is called."""
        return self.builder.module_of(self.node)

    @property
    def shape(self) -> Shape:
        """The result's, without the batch."""
        return self.builder.shape(self.node)

    @property
    def batch_dim(self) -> int | None:
        return self.builder.batch_dim(self.node)

    @property
    def is_batched(self) -> bool:
        """Whether samples reach the call; else it is of parameters alone."""
        return not isinstance(self.builder.env.get(self.node), Constant)

    @property
    def batch_first(self) -> bool:
        return self.batch_dim == 0

    def argument_result(self, place: int, name: str) -> Any:
        """What the node of an argument gave for a batch."""
        args: Any = self.node.args
        return self.builder.runs[0][args[place] if len(args) > place else self.node.kwargs[name]]  # type: ignore[index]

    def unsupported(self) -> Unsupported:
        stack = list((self.node.meta.get("nn_module_stack") or {}).values())
        kind = stack[-1][1] if stack else None
        if self.node.op == "call_module":
            return Unsupported(f"the layer {type(self.module).__name__} at {self.where!r} is not supported")
        if isinstance(kind, type) and self.where != self.node.name:
            return Unsupported(f"the layer {kind.__name__} at {self.where!r} is not supported")
        return Unsupported(f"the operation {self.name!r} at {self.node.name!r} is not supported")

    def mixes(self) -> Unsupported:
        return Unsupported(f"{self.node.name!r} mixes the samples of a batch")

    def emit(
        self, kind: Any, inputs: tuple[Value, ...], shape: Shape, weights: tuple[Any, ...] = (), **sizes: Any
    ) -> Value:
        return self.builder.emit(kind, inputs, shape, weights, **sizes)


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def lower(call: Call, *args: Any, **kwargs: Any) -> Any:
    """What a node gives, with operations emitted for it."""
    target = type(call.module) if call.node.op == "call_module" else call.node.target
    return lower_as(call, target, *args, **kwargs)


def lower_as(call: Call, target: Any, *args: Any, **kwargs: Any) -> Any:
    """What a function, method or layer would give in the place of this call."""
    lowering = LOWERINGS.get(target)
    if lowering is None:
        raise call.unsupported()
    try:
        bound = inspect.signature(lowering).bind(call, *args, **kwargs)
    except TypeError as error:
        raise call.unsupported() from error
    return lowering(*bound.args, **bound.kwargs)


def follow(call: Call, module: nn.Module | Callable[..., Any], x: Value) -> Any:
    """What a layer within a layer makes of a value, by its forward's one function; or what a function makes of it."""
    if not isinstance(module, nn.Module):
        return lower_as(call, module, x)
    known: dict[fx.Node, Any] = {}
    for node in fx.Tracer().trace(module).nodes:
        given = [fx.node.map_arg(a, lambda n: known[n]) for a in (node.args, node.kwargs)]
        if node.op == "placeholder":
            known[node] = x
        elif node.op == "get_attr":
            tensor = operator.attrgetter(str(node.target))(module)
            known[node] = Constant(tensor, tensor.requires_grad)
        elif node.op == "output":
            return given[0][0]
        else:
            known[node] = lower_as(call, node.target, *given[0], **given[1])
    raise AssertionError
