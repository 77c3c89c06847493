"""The averaging family: FedAvg (McMahan et al. 2017), FedAvgM, FedProx (Li et al. 2020), FedNova (Wang et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbraid.algorithms._build import builder
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.gather import Info, Mean, Tree
from fedbraid.core.optim import Momentum, Precondition
from fedbraid.core.rule import Local, Rule, Vectors
from fedbraid.core.transform import Scale, Transform, pipeline
from fedbraid.errors import ConfigError


@builder
def fedavg(lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """FedAvg: x ← x − lr · Σ p_i Δ_i."""
    return Algorithm(gather=Mean(weights), server=pipeline(Scale(lr)))


@builder
def fedavgm(lr: float = 1.0, momentum: float = 0.9, weights: str = "samples") -> Algorithm:
    """FedAvg with server momentum: b ← momentum·b + G, x ← x − lr·b."""
    return Algorithm(gather=Mean(weights), server=pipeline(Precondition(Momentum(momentum)), Scale(lr)))


@dataclass(frozen=True)
class Proximal(Rule):
    """FedProx's term μ(y − x), which pulls a client back to where it started."""

    mu: float

    def __post_init__(self) -> None:
        if not self.mu >= 0:
            raise ConfigError(f"mu={self.mu} pushes clients away from the model; use mu >= 0")

    def step(self, g: Tensor, y: Tensor, s: Vectors, loc: Local) -> tuple[Tensor, Vectors]:
        return g.add_(y - loc.x, alpha=self.mu), s


@builder
def fedprox(mu: float = 0.01, lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """FedProx: local steps along g + μ(y − x)."""
    return Algorithm(rule=Proximal(mu), gather=Mean(weights), server=pipeline(Scale(lr)))


@dataclass(frozen=True)
class NormalisedSteps(Rule):
    """FedNova's client half: upload Δ_i/a_i and a_i, the effective number of steps."""

    def finish(self, y: Tensor, s: Vectors, loc: Local) -> tuple[Vectors, Vectors]:
        rho, K = loc.momentum, loc.K
        a = (K - rho * (1 - rho**K) / (1 - rho)) / (1 - rho)  # K for plain SGD
        return {"delta": (loc.x - y) / a, "a": a}, {}


@dataclass(frozen=True)
class EffectiveSteps(Transform):
    """FedNova's server half: (Σ p_i a_i) · Σ p_i Δ_i/a_i."""

    def update(self, u: Vectors, s: Tree, x: Tensor, info: Info) -> tuple[Vectors, Tree]:
        return {**u, "delta": u["a"] * u["delta"]}, s


@builder
def fednova(lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """FedNova: clients that take more steps do not pull harder; local momentum is accounted for."""
    return Algorithm(NormalisedSteps(), Mean(weights), pipeline(EffectiveSteps(), Scale(lr)))
