"""SCAFFOLD, option II (Karimireddy et al. 2020), and SCAFFOLD/m, which uploads nothing extra (AdaBest, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbraid.algorithms._build import builder
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.gather import Info, Mean, Tree
from fedbraid.core.layout import Layout
from fedbraid.core.rule import Local, Rule, Vectors
from fedbraid.core.transform import Scale, Transform, pipeline


@dataclass(frozen=True)
class ControlVariates(Rule):
    """g − c_i + c; afterwards c_i⁺ = c_i − c + (x − y_K)/(K η)."""

    def init(self, x: Tensor) -> Vectors:
        return {"c_i": torch.zeros_like(x)}

    def start(self, loc: Local) -> Vectors:
        return {"shift": loc.down["c"] - loc.memory["c_i"]}

    def step(self, g: Tensor, y: Tensor, s: Vectors, loc: Local) -> tuple[Tensor, Vectors]:
        return g.add_(s["shift"]), s

    def finish(self, y: Tensor, s: Vectors, loc: Local) -> tuple[Vectors, Vectors]:
        c_i = loc.memory["c_i"]
        c_new = (loc.x - y).div_(loc.K * loc.lr).sub_(s["shift"])
        return {"dc": c_new - c_i}, {"c_i": c_new}


@dataclass(frozen=True)
class ControlVariate(Transform):
    """c ← c + (|S|/N) · mean Δc."""

    def init(self, x: Tensor, layout: Layout) -> Tree:
        return {"c": torch.zeros_like(x)}

    def send(self, s: Tree) -> Vectors:
        return {"c": s["c"]}

    def update(self, u: Vectors, s: Tree, x: Tensor, info: Info) -> tuple[Vectors, Tree]:
        return u, {"c": s["c"] + (info.cohort / info.N) * u["dc"]}


@builder
def scaffold(lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """SCAFFOLD: control variates on clients and server; c stays the plain mean of all c_i."""
    return Algorithm(ControlVariates(), Mean(weights, plain=("dc",)), pipeline(ControlVariate(), Scale(lr)))


@dataclass(frozen=True)
class LocalEstimate(Rule):
    """g − h_i + h; afterwards h_i ← h_i − h + (x − y_K)/(K η)."""

    def init(self, x: Tensor) -> Vectors:
        return {"h_i": torch.zeros_like(x)}

    def start(self, loc: Local) -> Vectors:
        return {"shift": loc.down["h"] - loc.memory["h_i"]}

    def step(self, g: Tensor, y: Tensor, s: Vectors, loc: Local) -> tuple[Tensor, Vectors]:
        return g.add_(s["shift"]), s

    def finish(self, y: Tensor, s: Vectors, loc: Local) -> tuple[Vectors, Vectors]:
        return {}, {"h_i": (loc.x - y).div_(loc.K * loc.lr).sub_(s["shift"])}


@dataclass(frozen=True)
class GlobalEstimate(Transform):
    """h ← ((N−1)/N)·h + |S|/(K η N)·(x − x̄)."""

    def init(self, x: Tensor, layout: Layout) -> Tree:
        return {"h": torch.zeros_like(x)}

    def send(self, s: Tree) -> Vectors:
        return {"h": s["h"]}

    def update(self, u: Vectors, s: Tree, x: Tensor, info: Info) -> tuple[Vectors, Tree]:
        N = info.N
        return u, {"h": (N - 1) / N * s["h"] + info.cohort / (info.K * info.lr * N) * u["delta"]}


@builder
def scaffold_m(lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """SCAFFOLD/m: as SCAFFOLD, with the server's estimate taken from the averaged update."""
    return Algorithm(LocalEstimate(), Mean(weights), pipeline(GlobalEstimate(), Scale(lr)))
