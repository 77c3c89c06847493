"""FedDyn (Acar et al. 2021), in the form of AdaBest's Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbraid.algorithms._build import PLAIN, builder, searched
from fedbraid.algorithms.scaffold import Total
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import number
from fedbraid.core.context import ClientContext, ServerContext, Uploads, Vectors
from fedbraid.core.gather import Mean
from fedbraid.core.layout import Layout
from fedbraid.core.rule import Rule
from fedbraid.core.search_space import log
from fedbraid.core.transform import Transform, pipeline
from fedbraid.core.vector_spec import Download, Upload


@dataclass(frozen=True)
class DynamicRegulariser(Rule):
    """g − h_i − μ(x − y); afterwards h_i ← h_i + μ Δ_i, of Δ_i as it was received.

    With `progressive`, as the authors run it on clients of unequal size: g − μ_i (h_i + x − y) with μ_i = μ·n̄/n_i, n̄
    today's mean number of samples of all clients; afterwards h_i ← h_i + Δ_i.
    """

    mu: float
    progressive: bool = False

    def __post_init__(self) -> None:
        number("mu", self.mu, "[0, inf)", "pushes clients away from the model")

    def init(self, x: Tensor) -> Vectors:
        return {"h_i": torch.zeros_like(x)}

    def step(self, g: Tensor, y: Tensor, s: Vectors, ctx: ClientContext) -> tuple[Tensor, Vectors]:
        if self.progressive:
            mu_i = self.mu * ctx.download["n_mean"] / ctx.n
            return g - mu_i * (ctx.client_state["h_i"] + ctx.x - y), s
        return g - ctx.client_state["h_i"] - self.mu * (ctx.x - y), s  # Algorithm 1, gradients (FedDyn)

    def remember(self, received: Vectors, s: Vectors, ctx: ClientContext) -> Vectors:
        mu = 1.0 if self.progressive else self.mu
        return {"h_i": ctx.client_state["h_i"] + mu * received["delta"]}  # Algorithm 1, h_i (FedDyn)

    def withdraw(self, client_state: Vectors) -> Vectors:
        mu = 1.0 if self.progressive else self.mu
        return {"moved": -client_state["h_i"] / mu if mu else torch.zeros_like(client_state["h_i"])}


@dataclass(frozen=True)
class DynamicServer(Transform):
    """N·h ← N·h + |S|·Σ p_i Δ_i; x ← x̄ − h. The averaged model x̄ is the one to evaluate."""

    def init(self, x: Tensor, layout: Layout) -> Total:
        return Total(torch.zeros_like(x))

    def accounts(self) -> tuple[Upload, ...]:
        return (Upload("moved", accumulates=True),)

    def account(self, up: Uploads) -> Vectors:
        return {"moved": up.vectors["delta"]}

    def update(self, u: Vectors, s: Total, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Total]:
        return u, Total(s.total + ctx.cohort * u["moved"])  # Algorithm 1, h (FedDyn)

    def compute_offset(self, move: Tensor, s: Total, ctx: ServerContext) -> tuple[Tensor, Total]:
        return s.total / ctx.N, s

    def absorb(self, s: Total, contribution: Vectors) -> Total:
        return Total(s.total + contribution.get("moved", 0))


@dataclass(frozen=True)
class MeanSamplesOfAll(Transform):
    """n̄, the mean number of samples of all known clients, sent to clients."""

    def sends(self) -> tuple[Download, ...]:
        return (Download("n_mean", width=1, signed=False, is_mean_samples=True),)


@builder
@searched(mu=log(0.001, 0.2))
def feddyn(mu: float = 0.02, weights: str = "samples") -> Algorithm:
    """FedDyn (Acar et al. 2021): a dynamic regulariser of strength mu.

    y ← y − η (g − h_i − μ (x − y));  h_i ← h_i + μ Δ_i;  h ← h + (|S|/N) Σ_S p_i Δ_i;  x ← x̄ − h

    weights="progressive" is what its authors run on clients of unequal size: a uniform average, and μ·n̄/n_i instead
    of μ on each client.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.feddyn(mu=0.02), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.6
    True
    """
    if weights == "progressive":
        server = pipeline(MeanSamplesOfAll(), DynamicServer())
        return Algorithm(DynamicRegulariser(mu, progressive=True), Mean("uniform"), server, work=PLAIN)
    return Algorithm(DynamicRegulariser(mu), Mean(weights), pipeline(DynamicServer()), work=PLAIN)
