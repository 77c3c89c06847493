"""SCALLION (Huang et al. 2024): SCAFFOLD that uploads one vector, the step of its control variate, fit for any codec."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbraid.algorithms._build import PLAIN, builder, searched
from fedbraid.algorithms.scaffold import ControlVariate
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import number
from fedbraid.core.context import ClientContext, Uploads, Vectors
from fedbraid.core.gather import Mean
from fedbraid.core.rule import Rule
from fedbraid.core.search_space import log
from fedbraid.core.traits import RuleTraits, TransformTraits
from fedbraid.core.transform import Scale, Transform, pipeline
from fedbraid.core.vector_spec import DELTA, Upload


@dataclass(frozen=True)
class ScaledVariates(Rule):
    """g − c_i + c; δ_i = α((x − y_K)/(a η) − c) goes up alone, and c_i ← c_i + δ_i as it was received."""

    alpha: float

    def __post_init__(self) -> None:
        number("alpha", self.alpha, "(0, 1]")

    def uploads(self) -> tuple[Upload, ...]:
        return (Upload("dc", uniform=True, accumulates=True, clip_scale=1.0),)

    def init(self, x: Tensor) -> Vectors:
        return {"c_i": torch.zeros_like(x)}

    def start(self, ctx: ClientContext) -> Vectors:
        return {"correction": ctx.download["c"] - ctx.client_state["c_i"]}

    def step(self, g: Tensor, y: Tensor, s: Vectors, ctx: ClientContext) -> tuple[Tensor, Vectors]:
        return g + s["correction"], s

    def finish(self, y: Tensor, s: Vectors, ctx: ClientContext) -> Vectors:
        return {"dc": self.alpha * ((ctx.x - y) / (ctx.a * ctx.lr) - ctx.download["c"])}

    def remember(self, received: Vectors, s: Vectors, ctx: ClientContext) -> Vectors:
        return {"c_i": ctx.client_state["c_i"] + received["dc"]}

    def traits(self) -> RuleTraits:
        return RuleTraits(requires_sgd=True)

    def withdraw(self, client_state: Vectors) -> Vectors:
        return {"dc": -client_state["c_i"]}


@dataclass(frozen=True)
class AddBack(Transform):
    """The update behind an upload: a η (c + δ_i), c as its sender was sent it."""

    def traits(self) -> TransformTraits:
        return TransformTraits(requires_sgd=True)

    def accounts(self) -> tuple[Upload, ...]:
        return (DELTA,)

    def account(self, up: Uploads) -> Vectors:
        return {"delta": (up.a * up.lr).to(up.sent["c"]) * (up.sent["c"] + up.vectors["dc"])}


@builder
@searched(alpha=log(0.05, 1.0))
def scallion(alpha: float = 1.0, lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """SCALLION (Huang et al. 2024): one vector up where SCAFFOLD sends two.

    δ_i = Q(α ((x − y_K)/(a η) − c));  c_i ← c_i + δ_i;  x ← x − lr · a η (c + mean_S δ_i);  c ← c + (|S|/N) mean_S δ_i

    The coarser the codec Q, the smaller alpha.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.scallion(), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.75
    True
    """
    server = pipeline(AddBack(), ControlVariate(), Scale(lr))
    return Algorithm(ScaledVariates(alpha), Mean(weights), server, work=PLAIN)
