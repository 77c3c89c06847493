"""AdaBest, Algorithm 1 (Varno et al. 2022): bias estimates that forget, so that they stay stable."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbraid.algorithms._build import builder
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.gather import Info, Mean, Tree
from fedbraid.core.layout import Layout
from fedbraid.core.rule import Local, Rule, Vectors
from fedbraid.core.transform import Transform, pipeline
from fedbraid.errors import ConfigError


@dataclass(frozen=True)
class AdaptiveBias(Rule):
    """g − h_i; afterwards h_i ← h_i/(t − t_i') + μ(x − y_K), t_i' being the client's last round."""

    mu: float

    def __post_init__(self) -> None:
        if not self.mu >= 0:
            raise ConfigError(f"mu={self.mu} pushes clients away from the model; use mu >= 0")

    def init(self, x: Tensor) -> Vectors:
        return {"h_i": torch.zeros_like(x), "last": torch.full((1,), -1.0)}

    def step(self, g: Tensor, y: Tensor, s: Vectors, loc: Local) -> tuple[Tensor, Vectors]:
        return g.sub_(loc.memory["h_i"]), s

    def finish(self, y: Tensor, s: Vectors, loc: Local) -> tuple[Vectors, Vectors]:
        last = loc.memory["last"]
        since = (loc.t - last).clamp_min(1)  # a fast asynchronous client may return within one version
        h_i = (loc.memory["h_i"] / since).add_(loc.x - y, alpha=self.mu)
        return {}, {"h_i": h_i, "last": torch.full_like(last, loc.t)}


@dataclass(frozen=True)
class AdaptiveServer(Transform):
    """h ← β(x̄_prev − x̄); x ← x̄ − h. Needs no N. The averaged model x̄ is the one to evaluate."""

    beta: float

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"beta={self.beta} makes the estimate grow without bound; use 0 <= beta <= 1")

    def init(self, x: Tensor, layout: Layout) -> Tree:
        return {"average": x.clone(), "h": torch.zeros_like(x)}

    def update(self, u: Vectors, s: Tree, x: Tensor, info: Info) -> tuple[Vectors, Tree]:
        average = x - u["delta"]
        h = self.beta * (s["average"] - average)
        return {**u, "delta": u["delta"] + h}, {"average": average, "h": h}

    def judged(self, x: Tensor, s: Tree) -> Tensor:
        average: Tensor = s["average"]
        return average


@dataclass(frozen=True)
class ProgressiveMean(Mean):
    """Σ_S n_i v_i / (|S|·n̄), n̄ being the mean number of samples over every visit so far (supplement, B).

    An estimate of the population's mean that needs no N and is not normalised by who happens to be there.
    """

    def init(self, x: Tensor, layout: Layout) -> Tree:
        return {"samples": 0.0, "visits": 0}

    def close(self, acc: Tree, s: Tree, info: Info) -> tuple[Vectors, Tree]:
        seen = {"samples": s["samples"] + acc["weight"], "visits": s["visits"] + acc["count"]}
        average = seen["samples"] / seen["visits"]
        u, _ = super().close({**acc, "weight": acc["count"] * average}, {}, info)
        return u, seen


@builder
def adabest(mu: float = 0.02, beta: float = 0.9, weights: str = "samples") -> Algorithm:
    """AdaBest: adaptive bias estimates on clients (mu) and server (beta); weights may be "progressive"."""
    gather = ProgressiveMean() if weights == "progressive" else Mean(weights)
    return Algorithm(AdaptiveBias(mu), gather, pipeline(AdaptiveServer(beta)))
