"""FedDyn (Acar et al. 2021), in the form of AdaBest's Algorithm 1."""

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
class DynamicRegulariser(Rule):
    """g − h_i − μ(x − y); afterwards h_i ← h_i + μ(x − y_K)."""

    mu: float

    def __post_init__(self) -> None:
        if not self.mu >= 0:
            raise ConfigError(f"mu={self.mu} pushes clients away from the model; use mu >= 0")

    def init(self, x: Tensor) -> Vectors:
        return {"h_i": torch.zeros_like(x)}

    def start(self, loc: Local) -> Vectors:
        return {"pull": torch.add(loc.memory["h_i"], loc.x, alpha=self.mu)}

    def step(self, g: Tensor, y: Tensor, s: Vectors, loc: Local) -> tuple[Tensor, Vectors]:
        return g.sub_(s["pull"]).add_(y, alpha=self.mu), s

    def finish(self, y: Tensor, s: Vectors, loc: Local) -> tuple[Vectors, Vectors]:
        return {}, {"h_i": torch.sub(s["pull"], y, alpha=self.mu)}


@dataclass(frozen=True)
class DynamicServer(Transform):
    """h ← h + (|S|/N)(x − x̄); x ← x̄ − h. The averaged model x̄ is the one to evaluate."""

    def init(self, x: Tensor, layout: Layout) -> Tree:
        return {"h": torch.zeros_like(x)}

    def update(self, u: Vectors, s: Tree, x: Tensor, info: Info) -> tuple[Vectors, Tree]:
        h = s["h"] + (info.cohort / info.N) * u["delta"]
        return {**u, "delta": u["delta"] + h}, {"h": h}

    def judged(self, x: Tensor, s: Tree) -> Tensor:
        h: Tensor = s["h"]
        return x + h


@builder
def feddyn(mu: float = 0.02, weights: str = "samples") -> Algorithm:
    """FedDyn: a dynamic regulariser of strength mu; needs to know the number of clients."""
    return Algorithm(DynamicRegulariser(mu), Mean(weights), pipeline(DynamicServer()))
