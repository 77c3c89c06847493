"""Asynchronous training: FedBuff (Nguyen et al. 2022), FedAsync (Xie et al. 2019), QAFeL (Algorithm 1 of its paper)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbraid.algorithms._build import builder
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.gather import Mean, Staleness, Tree, Uploads
from fedbraid.core.optim import Momentum, Precondition
from fedbraid.core.transform import Pipeline, Scale, pipeline
from fedbraid.errors import ConfigError
from fedbraid.links import codecs
from fedbraid.links.codec import Codec
from fedbraid.links.link import HiddenState


@dataclass(frozen=True)
class Mixing(Mean):
    """FedAsync's own form: x ← (1 − α s(τ)) x + α s(τ) y_i, the model y_i being the client's."""

    def add(self, acc: Tree, up: Uploads, s: Tree, x: Tensor) -> Tree:
        apart = x - up.start + up.vectors["delta"]  # x − y_i
        return super().add(acc, Uploads(**{**vars(up), "vectors": {**up.vectors, "delta": apart}}), s, x)


def _steps(lr: float, momentum: float) -> Pipeline:
    return pipeline(Precondition(Momentum(momentum)), Scale(lr))


@builder
def fedbuff(
    lr: float = 1.0, momentum: float = 0.0, staleness: str = "sqrt", weights: str = "uniform"
) -> Algorithm:
    """FedBuff: x ← x − lr · (1/K) Σ s(τ) Δ over a buffer of K uploads."""
    return Algorithm(gather=Mean(weights, Staleness(staleness)), server=_steps(lr, momentum))


@builder
def fedasync(
    lr: float = 1.0,
    momentum: float = 0.0,
    staleness: str = "sqrt",
    form: str = "delta",
    weights: str = "uniform",
) -> Algorithm:
    """FedAsync: a step after every upload; form="delta" adds the update, "mixing" averages the models."""
    if form not in ("delta", "mixing"):
        raise ConfigError(f"form={form!r} is not known; use 'delta' or 'mixing'")
    gather = (Mean if form == "delta" else Mixing)(weights, Staleness(staleness))
    return Algorithm(gather=gather, server=_steps(lr, momentum))


@builder
def qafel(
    lr: float = 1.0, momentum: float = 0.0, staleness: str = "sqrt", up: Codec | None = None, down: Codec | None = None,
    weights: str = "uniform",
) -> Algorithm:  # fmt: skip
    """QAFeL: FedBuff quantised both ways, the broadcast through a hidden state (4-bit qsgd by default)."""
    up, down = up or codecs.qsgd(4), down or codecs.qsgd(4)
    return Algorithm(
        gather=Mean(weights, Staleness(staleness)), server=_steps(lr, momentum), up=up, down=HiddenState(down)
    )
