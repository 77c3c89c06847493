"""Clients with models of their own: FedRep (Collins et al. 2021), Ditto (Li et al. 2021), pFedMe (Dinh et al. 2020).

FedPer (Arivazhagan et al. 2019) and LG-FedAvg are FedAvg over a task with `personal=` layers, FedBN over one with
`buffers="personal"`.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from fedbraid.algorithms._build import builder
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import integer, number
from fedbraid.core.context import ClientContext, ServerContext, Tree, Vectors
from fedbraid.core.gather import Mean
from fedbraid.core.rule import Rule
from fedbraid.core.traits import PersonalTraining, RuleTraits
from fedbraid.core.transform import Scale, Transform, pipeline
from fedbraid.errors import ConfigError
from fedbraid.links.null import NullDownlink, NullUplink


@dataclass(frozen=True)
class PersonalLayers(Rule):
    """Local steps on all layers, of which the task's personal ones stay with their client (Algorithm 1)."""

    def traits(self) -> RuleTraits:
        return RuleTraits(personal=PersonalTraining(requires_personal_parameters=True))


@builder
def fedper(lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """FedPer (Arivazhagan et al. 2019): FedAvg over the shared layers; the task's personal ones stay with their client.

    (y, z_i) ← (y, z_i) − η ∇f_i(y, z_i);  x ← x − lr · Σ_S p_i Δ_i over the shared y alone

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)", personal=("3.*",), test_shares=True)
    >>> result = fb.simulate(task, fb.fedper(), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> sum(client["accuracy"] for client in result.per_client()) / 20 > 0.6
    True
    """
    return Algorithm(PersonalLayers(), Mean(weights), pipeline(Scale(lr)))


@dataclass(frozen=True)
class HeadFirst(Rule):
    """The first fraction of the local steps moves the personal parts only, the rest the shared ones only (Algorithm 1)."""

    head: float

    def __post_init__(self) -> None:
        number("head", self.head, "(0, 1)", "leaves one of the two phases out")

    def traits(self) -> RuleTraits:
        return RuleTraits(
            personal=PersonalTraining(head_steps=self.head_steps, requires_personal_parameters=True)
        )

    def head_steps(self, K: Tensor) -> Tensor:
        """How many of its K steps each client gives to its personal parameters."""
        if float(K.min()) < 2:
            raise ConfigError(
                "a client takes one local step, and two phases need two; use more steps or epochs"
            )
        return (self.head * K).round().clamp_min(1).minimum(K - 1)


@builder
def fedrep(head: float = 0.5, lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """FedRep (Collins et al. 2021): the task's personal parameters are trained first, then the shared ones.

    z_i ← z_i − η ∇_z f_i(y, z_i) for a share `head` of the steps, then  y ← y − η ∇_y f_i(y, z_i);  x ← x − lr · Σ_S p_i Δ_i

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)", personal=("3.*",), test_shares=True)
    >>> result = fb.simulate(task, fb.fedrep(head=0.5), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> sum(client["accuracy"] for client in result.per_client()) / 20 > 0.6
    True
    """
    return Algorithm(HeadFirst(head), Mean(weights), pipeline(Scale(lr)))


@dataclass(frozen=True)
class DittoModel(Rule):
    """Ditto: beside y, v_i ← v_i − η(∇f_i(v_i) + λ(v_i − x)) on the same batches, for the client's own use."""

    lam: float

    def __post_init__(self) -> None:
        number("lam", self.lam, "[0, inf)", "pushes the personalized model away from the global one")

    def init(self, x: Tensor) -> Vectors:
        return {"v_i": x.clone()}

    def start(self, ctx: ClientContext) -> Vectors:
        return {"v": ctx.client_state["v_i"]}

    def step(self, g: Tensor, y: Tensor, s: Vectors, ctx: ClientContext) -> tuple[Tensor, Vectors]:
        v = s["v"]
        return g, {**s, "v": v - ctx.lr * (ctx.grad(v) + self.lam * (v - ctx.x))}  # Algorithm 1, line 6

    def remember(self, received: Vectors, s: Vectors, ctx: ClientContext) -> Vectors:
        return {"v_i": s["v"]}

    def traits(self) -> RuleTraits:
        return RuleTraits(personal=PersonalTraining(personal_model=itemgetter("v_i")))


@builder
def ditto(lam: float = 0.1, lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """Ditto (Li et al. 2021): FedAvg, and beside it a model v_i of each client's that is held near the common one.

    v_i ← v_i − η (∇f_i(v_i) + λ (v_i − x));  x ← x − lr · Σ_S p_i Δ_i

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.ditto(lam=0.1), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.5
    True
    """
    return Algorithm(DittoModel(lam), Mean(weights), pipeline(Scale(lr)))


@dataclass(frozen=True)
class MoreauEnvelope(Rule):
    """pFedMe: y follows λ(y − θ), where θ ← θ − rate·(∇f_i(θ) + λ(θ − y)), `steps` times from y, is the client's own."""

    lam: float
    steps: int
    rate: float

    def __post_init__(self) -> None:
        number("lam", self.lam, "[0, inf)", "pushes the personalized model away from the global one")
        number("rate", self.rate, "[0, inf)", "steps uphill")
        integer("steps", self.steps)

    def init(self, x: Tensor) -> Vectors:
        return {"theta_i": x.clone()}

    def start(self, ctx: ClientContext) -> Vectors:
        return {"theta": ctx.client_state["theta_i"]}

    def step(self, g: Tensor, y: Tensor, s: Vectors, ctx: ClientContext) -> tuple[Tensor, Vectors]:
        theta = y - self.rate * g
        for _ in range(self.steps - 1):
            theta = theta - self.rate * (ctx.grad(theta) + self.lam * (theta - y))  # line 7
        return self.lam * (y - theta), {**s, "theta": theta}  # line 8

    def remember(self, received: Vectors, s: Vectors, ctx: ClientContext) -> Vectors:
        return {"theta_i": s["theta"]}

    def traits(self) -> RuleTraits:
        return RuleTraits(personal=PersonalTraining(personal_model=itemgetter("theta_i")))


@builder
def pfedme(
    lam: float = 15.0, steps: int = 5, rate: float = 0.01, lr: float = 1.0, weights: str = "samples"
) -> Algorithm:
    """pFedMe (Dinh et al. 2020): each client's model θ_i is near the common one, which follows it.

    `steps` times  θ_i ← θ_i − rate · (∇f_i(θ_i) + λ (θ_i − y));  y ← y − η λ (y − θ_i);  x ← x − lr · Σ_S p_i Δ_i

    `lr` is the paper's β.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.pfedme(lam=15.0, steps=5, rate=0.01)
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("loss") < 2.4
    True
    """
    return Algorithm(MoreauEnvelope(lam, steps, rate), Mean(weights), pipeline(Scale(lr)))


@dataclass(frozen=True)
class LocalOnly(Rule):
    """Every client continues from where its last local training ended."""

    def init(self, x: Tensor) -> Vectors:
        return {"y_i": x.clone()}

    def remember(self, received: Vectors, s: Vectors, ctx: ClientContext) -> Vectors:
        return {"y_i": ctx.x - received["delta"]}

    def traits(self) -> RuleTraits:
        return RuleTraits(
            personal=PersonalTraining(
                initial_model=lambda ctx: ctx.client_state["y_i"],
                personal_model=itemgetter("y_i"),
                has_no_global_model=True,
            )
        )


@dataclass(frozen=True)
class FixedModel(Transform):
    """The server's model stays what it was."""

    def update(self, u: Vectors, s: Tree, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Tree]:
        return {**u, "delta": torch.zeros_like(x)}, s


@builder
def local_only() -> Algorithm:
    """No federation: each client trains by itself, and nothing travels; what others gain, they gain over this.

    y_i ← y_i − η ∇f_i(y_i);  x stays

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.local_only(), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> sum(record["bytes_up"] for record in result.history)
    0
    """
    return Algorithm(LocalOnly(), server=pipeline(FixedModel()), up=NullUplink(), down=NullDownlink())
