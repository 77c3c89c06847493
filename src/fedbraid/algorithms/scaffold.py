"""SCAFFOLD, option II (Karimireddy et al. 2020), and SCAFFOLD/m, which uploads nothing extra (AdaBest, Algorithm 1).

What the server keeps is the sum over clients, divided by today's N when it is sent, so that newcomers leave it
right. Where the papers divide by K η, this divides by a η, a being the effective number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbraid.algorithms._build import PLAIN, SERVER_RATE, builder, searched
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.context import ClientContext, ServerContext, Uploads, Vectors
from fedbraid.core.gather import Mean
from fedbraid.core.layout import Layout
from fedbraid.core.rule import Rule
from fedbraid.core.traits import RuleTraits, TransformTraits
from fedbraid.core.transform import Scale, Transform, pipeline
from fedbraid.core.vector_spec import DELTA, Download, Upload


@dataclass(frozen=True)
class ControlVariates(Rule):
    """g − c_i + c; Δc = (x − y_K)/(a η) − c goes up, and c_i ← c_i + Δc as it was received."""

    def uploads(self) -> tuple[Upload, ...]:
        return DELTA, Upload("dc", uniform=True, accumulates=True)

    def init(self, x: Tensor) -> Vectors:
        return {"c_i": torch.zeros_like(x)}

    def start(self, ctx: ClientContext) -> Vectors:
        return {"correction": ctx.download["c"] - ctx.client_state["c_i"]}

    def step(self, g: Tensor, y: Tensor, s: Vectors, ctx: ClientContext) -> tuple[Tensor, Vectors]:
        return g + s["correction"], s  # eq. 3

    def finish(self, y: Tensor, s: Vectors, ctx: ClientContext) -> Vectors:
        return {"dc": (ctx.x - y) / (ctx.a * ctx.lr) - ctx.download["c"]}  # eq. 4, option II, less c_i

    def remember(self, received: Vectors, s: Vectors, ctx: ClientContext) -> Vectors:
        return {"c_i": ctx.client_state["c_i"] + received["dc"]}

    def traits(self) -> RuleTraits:
        return RuleTraits(requires_sgd=True)

    def withdraw(self, client_state: Vectors) -> Vectors:
        return {"dc": -client_state["c_i"]}


@dataclass(frozen=True)
class Total:
    """A sum over clients."""

    total: Tensor


@dataclass(frozen=True)
class ControlVariate(Transform):
    """Σ c_i ← Σ c_i + Σ_S Δc; c = Σ c_i / N."""

    def init(self, x: Tensor, layout: Layout) -> Total:
        return Total(torch.zeros_like(x))

    def sends(self) -> tuple[Download, ...]:
        return (Download("c"),)

    def send(self, s: Total, x: Tensor, N: int) -> Vectors:
        return {"c": s.total / N}

    def update(self, u: Vectors, s: Total, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Total]:
        return u, Total(s.total + ctx.cohort * u["dc"])  # eq. 5

    def absorb(self, s: Total, contribution: Vectors) -> Total:
        return Total(s.total + contribution.get("dc", 0))


@builder
@searched(lr=SERVER_RATE)
def scaffold(lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """SCAFFOLD (Karimireddy et al. 2020, option II): control variates on clients and server.

    y ← y − η (g − c_i + c);  c_i ← c_i + Δc_i, Δc_i = (x − y_K)/(a η) − c;  c ← c + (|S|/N) mean_S Δc_i

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.scaffold(), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.75
    True
    """
    return Algorithm(ControlVariates(), Mean(weights), pipeline(ControlVariate(), Scale(lr)), work=PLAIN)


@dataclass(frozen=True)
class LocalEstimate(Rule):
    """g − h_i + h; afterwards h_i ← h_i − h + Δ_i/(a η), of Δ_i as it was received."""

    def init(self, x: Tensor) -> Vectors:
        return {"h_i": torch.zeros_like(x)}

    def start(self, ctx: ClientContext) -> Vectors:
        return {"correction": ctx.download["h"] - ctx.client_state["h_i"]}

    def step(self, g: Tensor, y: Tensor, s: Vectors, ctx: ClientContext) -> tuple[Tensor, Vectors]:
        return g + s["correction"], s  # Algorithm 1, gradients (SCAFFOLD/m)

    def remember(self, received: Vectors, s: Vectors, ctx: ClientContext) -> Vectors:
        return {
            "h_i": received["delta"] / (ctx.a * ctx.lr) - s["correction"]
        }  # Algorithm 1, h_i (SCAFFOLD/m)

    def traits(self) -> RuleTraits:
        return RuleTraits(requires_sgd=True)

    def withdraw(self, client_state: Vectors) -> Vectors:
        return {"h": -client_state["h_i"]}


@dataclass(frozen=True)
class GlobalEstimate(Transform):
    """Σ h_i ← Σ h_i − Σ_S h + (|S|/a)·Σ p_i Δ_i/η, h and η as each client was sent them; h = Σ h_i / N.

    Where clients take different numbers of steps, a is their weighted mean.
    """

    def init(self, x: Tensor, layout: Layout) -> Total:
        return Total(torch.zeros_like(x))

    def sends(self) -> tuple[Download, ...]:
        return (Download("h"),)

    def send(self, s: Total, x: Tensor, N: int) -> Vectors:
        return {"h": s.total / N}

    def accounts(self) -> tuple[Upload, ...]:
        return Upload("h_sent", uniform=True, accumulates=True), Upload("h_moved", accumulates=True)

    def account(self, up: Uploads) -> Vectors:
        return {"h_sent": up.sent["h"], "h_moved": up.vectors["delta"] / up.lr.to(up.vectors["delta"])}

    def update(self, u: Vectors, s: Total, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Total]:
        fresh = u["h_moved"] / ctx.a - u["h_sent"]  # Algorithm 1, h, with (N − |S|)/N for its (N − 1)/N
        return u, Total(s.total + ctx.cohort * fresh)

    def traits(self) -> TransformTraits:
        return TransformTraits(requires_sgd=True)

    def absorb(self, s: Total, contribution: Vectors) -> Total:
        return Total(s.total + contribution.get("h", 0))


@builder
@searched(lr=SERVER_RATE)
def scaffold_m(lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """SCAFFOLD/m (Varno et al. 2022): SCAFFOLD whose server takes c from the averaged update, so nothing extra goes up.

    y ← y − η (g − h_i + h);  h_i ← h_i − h + Δ_i/(a η);  h ← ((N−|S|)/N) h + (|S|/(a η N)) Σ_S p_i Δ_i

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.scaffold_m(), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.75
    True
    """
    return Algorithm(LocalEstimate(), Mean(weights), pipeline(GlobalEstimate(), Scale(lr)), work=PLAIN)
