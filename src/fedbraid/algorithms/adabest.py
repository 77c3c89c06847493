"""AdaBest, Algorithm 1 (Varno et al. 2022): bias estimates that forget, so that they stay stable."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbraid.algorithms._build import PLAIN, builder, searched
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import number
from fedbraid.core.context import ClientContext, ServerContext, Uploads, Vectors
from fedbraid.core.gather import Mean
from fedbraid.core.layout import Layout
from fedbraid.core.rule import Rule
from fedbraid.core.search_space import log, uniform
from fedbraid.core.transform import Transform, pipeline
from fedbraid.core.vector_spec import Download, Upload


@dataclass(frozen=True)
class AdaptiveBias(Rule):
    """g − h_i; afterwards h_i ← h_i/(t − t_i') + μ Δ_i, t_i' being the client's last round.

    With `progressive`, as the authors run it on clients of unequal size: g − μ_i h_i with μ_i = μ·n̄/n_i, n̄ today's
    mean number of samples over participations so far; afterwards h_i ← h_i/(t − t_i') + Δ_i.
    """

    mu: float
    progressive: bool = False

    def __post_init__(self) -> None:
        number("mu", self.mu, "[0, inf)", "pushes clients away from the model")

    def init(self, x: Tensor) -> Vectors:
        return {"h_i": torch.zeros_like(x), "last": torch.full((1,), -1)}

    def step(self, g: Tensor, y: Tensor, s: Vectors, ctx: ClientContext) -> tuple[Tensor, Vectors]:
        h_i = ctx.client_state["h_i"]
        if self.progressive:
            h_i = (self.mu * ctx.download["n_mean"] / ctx.n) * h_i  # μ_i h_i
        return g - h_i, s  # Algorithm 1, gradients (AdaBest)

    def remember(self, received: Vectors, s: Vectors, ctx: ClientContext) -> Vectors:
        last = ctx.client_state["last"]
        since = (ctx.t - last).clamp_min(1)  # a fast asynchronous client may return within one version
        mu = 1.0 if self.progressive else self.mu
        h_i = ctx.client_state["h_i"] / since + mu * received["delta"]  # Algorithm 1, h_i (AdaBest)
        return {"h_i": h_i, "last": torch.full_like(last, ctx.t)}


@dataclass(frozen=True)
class Estimate:
    """h, what the averaged model is sent out without."""

    h: Tensor


@dataclass(frozen=True)
class AdaptiveServer(Transform):
    """h ← β(h + (x − x̄)); x ← x̄ − h. Needs no N. The averaged model x̄ is the one to evaluate."""

    beta: float

    def __post_init__(self) -> None:
        number("beta", self.beta, "[0, 1]", "makes the estimate grow without bound")

    def init(self, x: Tensor, layout: Layout) -> Estimate:
        return Estimate(torch.zeros_like(x))

    def compute_offset(self, move: Tensor, s: Estimate, ctx: ServerContext) -> tuple[Tensor, Estimate]:
        h = self.beta * (s.h + move)  # Algorithm 1, h (AdaBest), by Remark 2 β(x̄_prev − x̄)
        return h, Estimate(h)


@dataclass(frozen=True)
class SampleCount:
    """Samples over all participations so far, and how many participations there were."""

    samples: float = 0.0
    count: float = 0


@dataclass(frozen=True)
class MeanSamples(Transform):
    """n̄, the mean number of samples over every participation so far, sent to clients; 0 before the first, when no h_i is."""

    def init(self, x: Tensor, layout: Layout) -> SampleCount:
        return SampleCount()

    def sends(self) -> tuple[Download, ...]:
        return (Download("n_mean", width=1, signed=False),)

    def send(self, s: SampleCount, x: Tensor, N: int) -> Vectors:
        return {"n_mean": torch.full((1,), s.samples / max(s.count, 1))}

    def accounts(self) -> tuple[Upload, ...]:
        return (Upload("n", width=1, uniform=True),)

    def account(self, up: Uploads) -> Vectors:
        return {"n": up.n}

    def update(
        self, u: Vectors, s: SampleCount, x: Tensor, ctx: ServerContext
    ) -> tuple[Vectors, SampleCount]:
        return u, SampleCount(s.samples + ctx.cohort * float(u["n"]), s.count + ctx.cohort)


@builder
@searched(mu=log(0.001, 0.2), beta=uniform(0.5, 0.98))
def adabest(mu: float = 0.02, beta: float = 0.9, weights: str = "samples") -> Algorithm:
    """AdaBest (Varno et al. 2022): bias estimates on clients (mu) and server (beta) that forget.

    y ← y − η (g − h_i);  h_i ← h_i/(t − t_i') + μ Δ_i;  h ← β (h + x − x̄);  x ← x̄ − h

    t_i' is the last round of client i. weights="progressive" is what its authors run on clients of unequal size: a uniform
    average, and a pull of μ·n̄/n_i instead of μ on each client.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.adabest(mu=0.02, beta=0.9)
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.65
    True
    """
    if weights == "progressive":
        server = pipeline(MeanSamples(), AdaptiveServer(beta))
        return Algorithm(AdaptiveBias(mu, progressive=True), Mean("uniform"), server, work=PLAIN)
    return Algorithm(AdaptiveBias(mu), Mean(weights), pipeline(AdaptiveServer(beta)), work=PLAIN)
