"""What is computed from parameters alone, once for all samples: normalised weights, weight norm, learned scales."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fedbraid_native import ops
from fedbraid_native.errors import Unsupported
from fedbraid_native.ops import Shape
from fedbraid_native.trace import Builder, Constant, Value
from fedbraid_native.values import bits, name


def value(builder: Builder, node: fx.Node) -> Value:
    """What a node that no sample reaches gives, with operations made for it."""
    if node not in builder.computed:
        handle = _HANDLES.get(name(node.target)) if node.op in ("call_function", "call_method") else None
        done = None if handle is None else handle(_Made(builder, node))
        if done is None or math.prod(done.shape) != builder.runs[0][node].numel():
            what = "layer" if node.op == "call_module" else "operation"
            where = str(node.target)[2:] if node.op == "call_module" else name(node.target)
            raise Unsupported(f"the {what} {where!r} on parameters alone is not supported")
        builder.computed[node] = Value(done.id, tuple(builder.runs[0][node].shape))
    return builder.computed[node]


class _Made:
    """One node, and what can be made of its arguments."""

    def __init__(self, builder: Builder, node: fx.Node) -> None:
        self.builder, self.node = builder, node
        self.shape: Shape = tuple(builder.runs[0][node].shape)

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        given = self.node.args[place] if len(self.node.args) > place else self.node.kwargs.get(name, default)
        return fx.node.map_arg(given, lambda n: self.builder.known[n])

    def operand(self, place: int = 0, name: str = "input") -> Value:
        """A tensor as a value; a number is one of no dimensions."""
        x = self.argument(place, name)
        x = Constant(torch.tensor(float(x)), False) if isinstance(x, (int, float)) else x
        if not isinstance(x, Constant):
            raise Unsupported(f"{self.node.name!r} computes with something other than parameters and numbers")
        shape = tuple(x.tensor.shape)
        at = self.builder.place(x) if x.trained else None
        made = None if at is None else at.value
        if made is not None and math.prod(self.builder.shapes[made]) == math.prod(shape):
            return Value(made, shape)
        return self.emit(ops.LoadParam, (), shape, (x,), n=math.prod(shape))

    def emit(
        self, kind: type[ops.Op], inputs: tuple[Value, ...], shape: Shape, weights: Any = (), **more: Any
    ) -> Value:
        out = self.builder.emit(kind, inputs, shape, weights, **more)
        self.builder.shared.add(out.id)
        return out

    def curve(self, function: str, x: Value) -> Value:
        return self.emit(ops.UnarySavingInput, (x,), x.shape, function=function, n=1)

    def affine(self, x: Value, a: float, b: float = 0.0) -> Value:
        return self.emit(ops.AffineScalar, (x,), x.shape, n=1, a=a, b=b)

    def pair(self, kind: type[ops.Op], x: Value, y: Value, **more: Any) -> Value:
        return self.emit(
            kind, (self.spread(x, self.shape), self.spread(y, self.shape)), self.shape, n=1, **more
        )

    def spread(self, x: Value, wanted: Shape) -> Value:
        """As often as the wanted shape has it."""
        shape = (1,) * (len(wanted) - len(x.shape)) + x.shape
        for d, count in enumerate(wanted):
            if shape[d] != count:
                outer, inner = math.prod(shape[:d]), math.prod(shape[d + 1 :])
                shape = (*shape[:d], count, *shape[d + 1 :])
                x = self.emit(ops.Sum, (x,), shape, outer=outer, dim=count, inner=inner, spread=True)
        return Value(x.id, wanted)

    def sum(self, x: Value, dims: Any, mean: bool = False) -> Value:
        """Over dimensions, which stay with one place each."""
        every = range(len(x.shape)) if dims is None else dims if isinstance(dims, (tuple, list)) else (dims,)
        left = sorted(d % max(1, len(x.shape)) for d in every)
        scale = 1 / max(1, math.prod(x.shape[d] for d in left)) if mean else 1.0
        while left:  # neighbours at once
            last = left.pop()
            first = last
            while left and left[-1] == first - 1:
                first = left.pop()
            outer, inner = math.prod(x.shape[:first]), math.prod(x.shape[last + 1 :])
            dim = math.prod(x.shape[first : last + 1])
            shape = (*x.shape[:first], *[1] * (last + 1 - first), *x.shape[last + 1 :])
            x = self.emit(ops.Sum, (x,), shape, outer=outer, dim=dim, inner=inner, scale=scale)
            scale = 1.0
        return x

    def length(self, x: Value, dims: Any) -> Value:
        return self.curve("Length", self.sum(self.curve("WholePower<2>", x), dims))

    def over(self, x: Value, by: Value) -> Value:
        """Each number over its row's."""
        return self.emit(ops.Div, (x, self.spread(by, x.shape)), x.shape, n=1)


_Handle = Callable[[_Made], Value | None]


def _bent(function: str) -> _Handle:
    return lambda made: made.curve(function, made.operand()) if len(made.node.args) == 1 else None


def _mapped(function: str) -> _Handle:
    def handle(made: _Made) -> Value | None:
        x = made.operand()
        return (
            made.emit(ops.Unary, (x,), x.shape, function=function, n=1) if len(made.node.args) == 1 else None
        )

    return handle


def _add(made: _Made, sign: float = 1.0) -> Value | None:
    if len(made.node.args) + len(made.node.kwargs) != 2:
        return None
    first, second = made.argument(0, "input"), made.argument(1, "other")
    if isinstance(second, (int, float)):
        return made.affine(made.operand(), 1.0, sign * second)
    other = made.operand(1, "other")
    if isinstance(first, (int, float)):
        return made.affine(other, sign, float(first))
    return made.pair(ops.Add, made.operand(), other if sign > 0 else made.affine(other, sign))


def _multiply(made: _Made, kind: type[ops.Op] = ops.Mul) -> Value | None:
    if len(made.node.args) + len(made.node.kwargs) != 2:
        return None
    for at, other in ((0, 1), (1, 0)):
        number = made.argument(at, "other")
        if isinstance(number, (int, float)) and not (at == 0 and kind is ops.Div):
            return made.affine(made.operand(other), 1 / number if kind is ops.Div else float(number))
    return made.pair(kind, made.operand(), made.operand(1, "other"))


def _power(made: _Made) -> Value | None:
    by = made.argument(1, "exponent")
    if not isinstance(by, (int, float)) or isinstance(made.argument(0, "input"), (int, float)):
        return None
    whole = f"WholePower<{int(by)}>" if by == int(by) and 1 <= by <= 16 else f"Power<{bits(by)}>"
    return made.curve({0.5: "Sqrt", -0.5: "Rsqrt", -1: "Reciprocal"}.get(by, whole), made.operand())


def _clamp(made: _Made) -> Value | None:
    which = name(made.node.target)
    low = made.argument(1, "min") if which != "clamp_max" else None
    high = made.argument(1, "max") if which == "clamp_max" else made.argument(2, "max")
    ends = (-math.inf if low is None else low, math.inf if high is None else high)
    if not all(isinstance(end, (int, float)) for end in ends):
        return None
    return made.curve(f"Clamp<{bits(ends[0])}, {bits(ends[1])}>", made.operand())


def _sum(mean: bool) -> _Handle:
    def handle(made: _Made) -> Value | None:
        if "dtype" in made.node.kwargs:
            return None
        return made.sum(made.operand(), made.argument(1, "dim"), mean)

    return handle


def _norm(made: _Made) -> Value | None:
    """The length of rows, or of all; by any of the names that it goes by."""
    order = next((made.node.kwargs[k] for k in ("p", "ord") if k in made.node.kwargs), made.argument(1, "p"))
    x, dims = made.operand(), made.argument(2, "dim")
    matrix = (
        name(made.node.target) == "linalg_norm" and order == 2 and (dims is None or not isinstance(dims, int))
    )
    if order not in (None, "fro", 2) or matrix or made.node.kwargs.get("dtype") is not None:
        return None
    return made.length(x, dims)


def _normalize(made: _Made) -> Value | None:
    """F.normalize: each row over its length."""
    x, dim, eps = made.operand(), made.argument(2, "dim", 1), made.argument(3, "eps", 1e-12)
    if made.argument(1, "p", 2.0) != 2 or not isinstance(dim, int):
        return None
    return made.over(x, made.curve(f"Clamp<{bits(eps)}, {bits(math.inf)}>", made.length(x, dim)))


def _weight_norm(made: _Made) -> Value:
    """torch._weight_norm(v, g, dim): v over its length in all dimensions but one, times g."""
    v, g, dim = made.operand(), made.operand(1, "g"), made.argument(2, "dim", 0)
    rest = None if dim == -1 else [d for d in range(len(v.shape)) if d != dim]
    by = made.emit(ops.Div, (g, made.length(v, rest)), g.shape, n=1)
    return made.emit(ops.Mul, (v, made.spread(by, v.shape)), v.shape, n=1)


def _matmul(made: _Made) -> Value | None:
    a, b = made.operand(), made.operand(1, "other")
    if len(a.shape) != 2 or len(b.shape) != 2:
        return None
    return made.emit(ops.Matmul, (a, b), made.shape, m=a.shape[0], k=a.shape[1], n=b.shape[1])


_HANDLES: dict[str, _Handle] = {
    **{of: _bent(of.capitalize()) for of in ("exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "abs", "sin", "cos")},
    **{of: _mapped(of.capitalize()) for of in ("relu", "tanh", "sigmoid")},
    "softplus": _bent(f"Softplus<{bits(1.0)}>"),
    "square": _bent("WholePower<2>"),
    "neg": lambda made: made.affine(made.operand(), -1.0),
    "add": _add,
    "sub": lambda made: _add(made, -1.0),
    "mul": _multiply,
    **dict.fromkeys(("div", "truediv"), lambda made: _multiply(made, ops.Div)),
    "pow": _power,
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamp),
    "sum": _sum(False),
    "mean": _sum(True),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm"), _norm),
    "normalize": _normalize,
    "_weight_norm": _weight_norm,
    **dict.fromkeys(("matmul", "mm"), _matmul),
    **dict.fromkeys(("clone", "contiguous", "reshape", "flatten"), lambda made: made.operand()),
}  # fmt: skip
