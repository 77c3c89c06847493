"""GHBM (Zaccone et al. 2025): heavy-ball momentum over the server's last τ steps, applied by the clients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbraid.algorithms._build import PLAIN, builder, searched
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import integer, number
from fedbraid.core.context import ClientContext, ServerContext, Vectors
from fedbraid.core.gather import Mean
from fedbraid.core.layout import Layout
from fedbraid.core.rule import Rule
from fedbraid.core.search_space import IntRange, uniform
from fedbraid.core.traits import RuleTraits
from fedbraid.core.transform import Scale, Transform, pipeline
from fedbraid.core.vector_spec import Download


@dataclass(frozen=True)
class HeavyBall(Rule):
    """g + (β/(a η))·M, so that a local training of a steps adds β M."""

    beta: float

    def __post_init__(self) -> None:
        number("beta", self.beta, "[0, 1)", "never forgets")

    def traits(self) -> RuleTraits:
        return RuleTraits(requires_sgd=True)

    def start(self, ctx: ClientContext) -> Vectors:
        return {"push": self.beta / (ctx.a * ctx.lr) * ctx.download["M"]}  # β M over a steps of length η

    def step(self, g: Tensor, y: Tensor, s: Vectors, ctx: ClientContext) -> tuple[Tensor, Vectors]:
        return g + s["push"], s


@dataclass(frozen=True)
class Past:
    """The last τ models, each written over the oldest, and how many there were."""

    models: Tensor  # [τ, d]
    count: int


@dataclass(frozen=True)
class Trail(Transform):
    """Sends M = (x_{t−τ} − x_t)/τ, whatever moved the model, and nothing while t < τ."""

    tau: int

    def __post_init__(self) -> None:
        integer("tau", self.tau)

    def init(self, x: Tensor, layout: Layout) -> Past:
        return Past(torch.zeros(self.tau, len(x), device=x.device), 0)

    def sends(self) -> tuple[Download, ...]:
        return (Download("M"),)

    def send(self, s: Past, x: Tensor, N: int) -> Vectors:
        oldest = s.models[s.count % self.tau]
        return {"M": (oldest - x) / self.tau if s.count >= self.tau else torch.zeros_like(x)}

    def update(self, u: Vectors, s: Past, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Past]:
        return u, self.skip(s, x)

    def skip(self, s: Past, x: Tensor) -> Past:
        here = torch.arange(self.tau, device=x.device)[:, None] == s.count % self.tau
        return Past(torch.where(here, x, s.models), s.count + 1)


@builder
@searched(tau=IntRange(2, 20), beta=uniform(0.5, 0.95))
def ghbm(tau: int = 10, beta: float = 0.9, lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """GHBM (Zaccone et al. 2025): momentum over the last tau rounds, as many as it takes to hear of all clients.

    M = (x_{t−τ} − x_t)/τ, zero while t < τ;  y ← y − η (g + (β/(a η)) M)

    tau = N over a cohort is the paper's; beta=0 is FedAvg.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.ghbm(tau=4, beta=0.9), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.6
    True
    """
    return Algorithm(HeavyBall(beta), Mean(weights), pipeline(Scale(lr), Trail(tau)), work=PLAIN)
