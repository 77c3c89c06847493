"""Optimisers as formulas: update U, track T, inverse I.

On the server an optimizer tracks the pseudo-gradient and then steps with what it tracked. On clients
(FedGBO, Mimelite) U applies statistics that stay fixed all round; MFL tracks on the client. Directions
point downhill against x, without the learning rate: the caller does x ← x − lr · direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from fedbraid.core.check import number
from fedbraid.core.context import ServerContext, Tree, Vectors
from fedbraid.core.layout import Layout
from fedbraid.core.traits import TransformTraits
from fedbraid.core.transform import Transform
from fedbraid.errors import unknown


@dataclass(frozen=True)
class Optimizer:
    """Plain SGD, and the base of the others."""

    defined_for_async: ClassVar[bool] = False  # a paper steps with it on stale updates

    def __post_init__(self) -> None:
        for name in ("beta", "beta1", "beta2"):
            value = getattr(self, name, 0.0)
            number(name, value, "[0, 1)")
        number("eps", getattr(self, "eps", 1.0), "(0, inf)", "may divide by zero")

    def init(self, x: Tensor) -> Vectors:
        """The statistics before the first step."""
        return {}

    @property
    def statistics(self) -> tuple[str, ...]:
        """Their names; `v` is a second moment, which is never negative."""
        return tuple(self.init(torch.zeros(1)))

    def apply(self, g: Tensor, s: Vectors) -> Tensor:
        """−U(g, s)/η: the direction with statistics that do not follow g."""
        return g

    def track(self, g: Tensor, s: Vectors) -> Vectors:
        """T(g, s)."""
        return s

    def step(self, g: Tensor, s: Vectors, T: int) -> Tensor:
        """The direction with statistics that already follow g; T counts steps from 1."""
        return g

    def follow(self, g: Tensor, s: Vectors, T: int) -> tuple[Tensor, Vectors]:
        """Track g, then step with what was tracked."""
        s = self.track(g, s)
        return self.step(g, s, T), s

    def inverse(self, move: Tensor, s: Vectors, rate: Tensor | float) -> Tensor:
        """I(x_t, x_{t+1}, s) with `move` = x_t − x_{t+1} and `rate` = ηa: the gradient that U makes this move of; affine."""
        return move / rate


@dataclass(frozen=True)
class Momentum(Optimizer):
    """b ← βb + G; the direction is b."""

    defined_for_async: ClassVar[bool] = True  # FedBuff

    beta: float = 0.9

    def __post_init__(self) -> None:
        number("momentum", self.beta, "[0, 1)", "never forgets")

    def init(self, x: Tensor) -> Vectors:
        return {"b": torch.zeros_like(x)}

    def track(self, g: Tensor, s: Vectors) -> Vectors:
        return {"b": self.beta * s["b"] + g}

    def step(self, g: Tensor, s: Vectors, T: int) -> Tensor:
        return s["b"]


@dataclass(frozen=True)
class SGDm(Optimizer):
    """m ← βm + (1−β)g; the direction is m."""

    beta: float = 0.9

    def init(self, x: Tensor) -> Vectors:
        return {"m": torch.zeros_like(x)}

    def apply(self, g: Tensor, s: Vectors) -> Tensor:
        return self.beta * s["m"] + (1 - self.beta) * g

    def track(self, g: Tensor, s: Vectors) -> Vectors:
        return {"m": self.beta * s["m"] + (1 - self.beta) * g}

    def step(self, g: Tensor, s: Vectors, T: int) -> Tensor:
        return s["m"]

    def inverse(self, move: Tensor, s: Vectors, rate: Tensor | float) -> Tensor:
        return (move / rate - self.beta * s["m"]) / (1 - self.beta)


@dataclass(frozen=True)
class RMSProp(Optimizer):
    """v ← βv + (1−β)g²; the direction is g/(√v + ε)."""

    beta: float = 0.99
    eps: float = 1e-3
    v0: float = 1.0

    def init(self, x: Tensor) -> Vectors:
        return {"v": torch.full_like(x, self.v0)}

    def apply(self, g: Tensor, s: Vectors) -> Tensor:
        return g / (s["v"].sqrt() + self.eps)

    def track(self, g: Tensor, s: Vectors) -> Vectors:
        return {"v": self.beta * s["v"] + (1 - self.beta) * g * g}

    def step(self, g: Tensor, s: Vectors, T: int) -> Tensor:
        return self.apply(g, s)

    def inverse(self, move: Tensor, s: Vectors, rate: Tensor | float) -> Tensor:
        return move / rate * (s["v"].sqrt() + self.eps)


@dataclass(frozen=True)
class Adam(Optimizer):
    """m ← β₁m + (1−β₁)g; v ← β₂v + (1−β₂)g²; the direction is m̂/(√v̂ + ε)."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    v0: float = 0.0
    corrected: bool = True  # divide the moments by 1 − βᵀ

    def init(self, x: Tensor) -> Vectors:
        return {"m": torch.zeros_like(x), "v": torch.full_like(x, self.v0)}

    def apply(self, g: Tensor, s: Vectors) -> Tensor:
        return (self.beta1 * s["m"] + (1 - self.beta1) * g) / (s["v"].sqrt() + self.eps)

    def track(self, g: Tensor, s: Vectors) -> Vectors:
        m = g.lerp(s["m"], self.beta1)
        return {"m": m, "v": self.second(s["v"], g, m)}

    def second(self, v: Tensor, g: Tensor, m: Tensor) -> Tensor:
        return (self.beta2 * v).addcmul_(g, g, value=1 - self.beta2)

    def step(self, g: Tensor, s: Vectors, T: int) -> Tensor:
        root, scale = self._corrections(T)
        return torch.div(s["m"], s["v"].sqrt().add_(self.eps * root)).mul_(scale)

    def _corrections(self, T: int) -> tuple[float, float]:
        """(r, c) for m̂/(√v̂ + ε) = c·m/(√v + rε)."""
        if not self.corrected:
            return 1.0, 1.0
        root = math.sqrt(1 - self.beta2**T)
        return root, root / (1 - self.beta1**T)

    def inverse(self, move: Tensor, s: Vectors, rate: Tensor | float) -> Tensor:
        return (move / rate * (s["v"].sqrt() + self.eps) - self.beta1 * s["m"]) / (1 - self.beta1)


@dataclass(frozen=True)
class FlowerAdam(Adam):
    """The direction is m/(√v + ε)·√(1 − β₂ᵀ⁺¹)/(1 − β₁ᵀ⁺¹): Flower's FedAdam, which corrects a step ahead and not ε."""

    def _corrections(self, T: int) -> tuple[float, float]:
        return 1.0, math.sqrt(1 - self.beta2 ** (T + 1)) / (1 - self.beta1 ** (T + 1))


@dataclass(frozen=True)
class AdaBelief(Adam):
    """As Adam, with the second moment of g − m."""

    def second(self, v: Tensor, g: Tensor, m: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * (g - m) ** 2


@dataclass(frozen=True)
class Yogi(Adam):
    """As Adam, with v ← v − (1−β₂)g²·sgn(v − g²)."""

    def second(self, v: Tensor, g: Tensor, m: Tensor) -> Tensor:
        return v - (1 - self.beta2) * g * g * torch.sign(v - g * g)


@dataclass(frozen=True)
class Adagrad(Adam):
    """z ← z + G²; the direction is m/(√z + ε), and m is G while β₁ = 0."""

    beta1: float = 0.0
    beta2: float = 0.0  # not used: the second moment never forgets
    corrected: bool = False

    def second(self, v: Tensor, g: Tensor, m: Tensor) -> Tensor:
        return v + g * g


@dataclass(frozen=True)
class Lion(Optimizer):
    """The direction is sgn(β₁m + (1−β₁)g); then m ← β₂m + (1−β₂)g."""

    beta1: float = 0.9
    beta2: float = 0.99

    def init(self, x: Tensor) -> Vectors:
        return {"m": torch.zeros_like(x)}

    def apply(self, g: Tensor, s: Vectors) -> Tensor:
        return torch.sign(g.lerp(s["m"], self.beta1))

    def track(self, g: Tensor, s: Vectors) -> Vectors:
        return {"m": g.lerp(s["m"], self.beta2)}

    def follow(self, g: Tensor, s: Vectors, T: int) -> tuple[Tensor, Vectors]:
        return self.apply(g, s), self.track(g, s)


@dataclass(frozen=True)
class Tracked:
    """An optimizer's statistics after T steps."""

    T: int
    stats: Vectors


@dataclass(frozen=True)
class Optimize(Transform):
    """The server's optimizer: track the pseudo-gradient, replace it by the direction."""

    optimizer: Optimizer
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        number("weight_decay", self.weight_decay, "[0, inf)", "makes weights grow")

    def traits(self) -> TransformTraits:
        return TransformTraits(defined_for_async=self.optimizer.defined_for_async)

    def init(self, x: Tensor, layout: Layout) -> Tracked:
        return Tracked(0, self.optimizer.init(x))

    def update(self, u: Vectors, s: Tracked, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Tracked]:
        g = u["delta"] if not self.weight_decay else u["delta"] + self.weight_decay * x
        direction, stats = self.optimizer.follow(g, s.stats, s.T + 1)
        return {**u, "delta": direction}, Tracked(s.T + 1, stats)


@dataclass(frozen=True)
class TrustRatio(Transform):
    """Lamb: per layer, scale the direction r by φ = ‖x‖/‖r‖, or 1 where either is 0."""

    per_layer: bool = True

    def update(self, u: Vectors, s: Tree, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Tree]:
        r = u["delta"].clone()
        cuts = [(slot.offset, slot.end) for slot in ctx.layout] if self.per_layer else [(0, len(r))]
        for lo, hi in cuts:
            r[lo:hi] *= self.phi(x[lo:hi], r[lo:hi])
        return {**u, "delta": r}, s

    @staticmethod
    def phi(x: Tensor, r: Tensor) -> float:
        a, b = float(torch.linalg.vector_norm(x)), float(torch.linalg.vector_norm(r))
        return a / b if a > 0 and b > 0 else 1.0


SERVER: dict[str, type[Optimizer]] = {
    "sgd": Optimizer, "adagrad": Adagrad, "adam": Adam, "adabelief": AdaBelief, "yogi": Yogi, "lamb": Adam,
}  # fmt: skip

LOCAL: dict[str, Callable[[], Optimizer]] = {  # on clients, with the defaults of torch.optim
    "sgd": Optimizer, "adam": Adam, "adamw": Adam, "rmsprop": partial(RMSProp, 0.99, 1e-8, 0.0),
    "adagrad": partial(Adagrad, eps=1e-10), "lion": Lion,
}  # fmt: skip

O = TypeVar("O")


def named(name: str, table: dict[str, O]) -> O:
    if name not in table:
        raise unknown("optimizer", name, table)
    return table[name]
