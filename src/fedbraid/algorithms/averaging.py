"""The averaging family, one client half and one server half each.

FedAvg (McMahan et al. 2017, Algorithm 1), FedAvgM, FedProx (Li et al. 2020, Algorithm 2), FedNova (Wang et al. 2020).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fedbraid.algorithms._build import PLAIN, SERVER_RATE, builder, searched
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import number
from fedbraid.core.context import ClientContext, ServerContext, Tree, Uploads, Vectors
from fedbraid.core.gather import Mean
from fedbraid.core.optim import Momentum, Optimize
from fedbraid.core.rule import Rule
from fedbraid.core.search_space import log, uniform
from fedbraid.core.traits import RuleTraits, TransformTraits
from fedbraid.core.transform import Scale, Transform, pipeline
from fedbraid.core.vector_spec import DELTA, Upload


@builder
@searched(lr=SERVER_RATE)
def fedavg(lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """FedAvg (McMahan et al. 2017): the mean of what clients trained.

    x ← x − lr · Σ_S p_i Δ_i, Δ_i = x − y_{i,K}

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.fedavg(), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.5
    True
    """
    return Algorithm(gather=Mean(weights), server=pipeline(Scale(lr)))


@builder
@searched(lr=SERVER_RATE, momentum=uniform(0.5, 0.95))
def fedavgm(lr: float = 1.0, momentum: float = 0.9, weights: str = "samples") -> Algorithm:
    """FedAvg with server momentum.

    G = Σ_S p_i Δ_i;  b ← momentum · b + G;  x ← x − lr · b

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.fedavgm(momentum=0.5), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.6
    True
    """
    return Algorithm(
        gather=Mean(weights), server=pipeline(Optimize(Momentum(momentum)), Scale(lr)), work=PLAIN
    )


@dataclass(frozen=True)
class Proximal(Rule):
    """FedProx's term μ(y − x), which pulls a client back to where it started."""

    mu: float

    def __post_init__(self) -> None:
        number("mu", self.mu, "[0, inf)", "pushes clients away from the model")

    def step(self, g: Tensor, y: Tensor, s: Vectors, ctx: ClientContext) -> tuple[Tensor, Vectors]:
        return g + self.mu * (y - ctx.x), s  # ∇h_i(y; x), h_i(y; x) = f_i(y) + μ/2 ‖y − x‖² (eq. 2)


@builder
@searched(mu=log(0.001, 1.0))
def fedprox(mu: float = 0.01, lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """FedProx (Li et al. 2020): a term that pulls each client back to where it started.

    y ← y − η (g + μ (y − x));  x ← x − lr · Σ_S p_i Δ_i

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.fedprox(mu=0.1), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.45
    True
    """
    return Algorithm(rule=Proximal(mu), gather=Mean(weights), server=pipeline(Scale(lr)))


@dataclass(frozen=True)
class EffectiveSteps(Rule):
    """FedNova's client half: Δ_i as every client sends it, and a_i, the effective number of steps."""

    def uploads(self) -> tuple[Upload, ...]:
        return DELTA, Upload("a", width=1, signed=False)

    def traits(self) -> RuleTraits:
        return RuleTraits(requires_sgd=True)

    def finish(self, y: Tensor, s: Vectors, ctx: ClientContext) -> Vectors:
        return {"a": ctx.a}


@dataclass(frozen=True)
class Normalised(Transform):
    """FedNova's server half: d_i = Δ_i/(η a_i) is gathered in Δ_i's place, x ← x − η (Σ p_i a_i) Σ p_i d_i."""

    def traits(self) -> TransformTraits:
        return TransformTraits(requires_sgd=True)

    def accounts(self) -> tuple[Upload, ...]:
        return (replace(DELTA, is_model_update=False),)

    def account(self, up: Uploads) -> Vectors:
        return {"delta": up.vectors["delta"] / (up.lr * up.vectors["a"]).to(up.vectors["delta"])}  # d_i

    def update(self, u: Vectors, s: Tree, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Tree]:
        return {**u, "delta": ctx.lr * u["a"] * u["delta"]}, s  # τ_eff η Σ p_i d_i, τ_eff = Σ p_i a_i


@builder
@searched(lr=SERVER_RATE)
def fednova(lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """FedNova (Wang et al. 2020): clients that take more steps do not pull harder.

    d_i = Δ_i/(η a_i);  x ← x − lr · η (Σ_S p_i a_i) Σ_S p_i d_i

    a_i is the number of plain steps that reach as far as client i's, so that local momentum is accounted for.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.fednova(), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.5
    True
    """
    return Algorithm(EffectiveSteps(), Mean(weights), pipeline(Normalised(), Scale(lr)))
