"""One optimizer for all: FedGBO (Algorithm 1 of its paper), Mimelite (Karimireddy et al. 2021), MFL (Liu et al. 2020).

Clients step with the server's statistics. FedGBO keeps them fixed all round and recovers the mean gradient from the
model's move by an inverse step; Mimelite keeps them fixed and uploads a full gradient; MFL tracks them on clients and
averages them. Where clients take different numbers of steps, FedGBO's inverse uses their weighted mean of a.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbraid.algorithms._build import PLAIN, builder, searched
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.context import ClientContext, ServerContext, Uploads, Vectors
from fedbraid.core.gather import Mean
from fedbraid.core.layout import Layout
from fedbraid.core.optim import Adam, Optimizer, RMSProp, SGDm
from fedbraid.core.rule import Rule
from fedbraid.core.search_space import Categorical
from fedbraid.core.traits import TransformTraits
from fedbraid.core.transform import Scale, Transform, pipeline
from fedbraid.core.vector_spec import DELTA, Download, Upload
from fedbraid.errors import ConfigError, unknown


@dataclass(frozen=True)
class Fixed(Rule):
    """y ← y + U(g, s), the statistics s as they were downloaded (Algorithm 1)."""

    optimizer: Optimizer

    def step(self, g: Tensor, y: Tensor, s: Vectors, ctx: ClientContext) -> tuple[Tensor, Vectors]:
        return self.optimizer.apply(g, ctx.download), s  # Table 1, U


@dataclass(frozen=True)
class FixedAndGradient(Fixed):
    """Mimelite's client: as Fixed, and uploads ∇f_i(x) over the whole local set."""

    def uploads(self) -> tuple[Upload, ...]:
        return DELTA, Upload("grad")

    def finish(self, y: Tensor, s: Vectors, ctx: ClientContext) -> Vectors:
        return {"grad": ctx.full_grad(ctx.x)}


@dataclass(frozen=True)
class Tracked(Rule):
    """MFL's client: s ← T(g, s), then a step with the new statistics; uploads s."""

    optimizer: Optimizer

    def uploads(self) -> tuple[Upload, ...]:
        return DELTA, *(Upload(name, signed=name != "v") for name in self.optimizer.statistics)

    def start(self, ctx: ClientContext) -> Vectors:
        return {name: ctx.download[name].expand(len(ctx.K), -1) for name in self.optimizer.statistics}

    def step(self, g: Tensor, y: Tensor, s: Vectors, ctx: ClientContext) -> tuple[Tensor, Vectors]:
        stats = self.optimizer.track(g, s)
        return self.optimizer.step(g, stats, 1), {**s, **stats}

    def finish(self, y: Tensor, s: Vectors, ctx: ClientContext) -> Vectors:
        return {name: s[name] for name in self.optimizer.statistics}


@dataclass(frozen=True)
class Statistics(Transform):
    """The server's statistics, sent down with the model."""

    optimizer: Optimizer

    def init(self, x: Tensor, layout: Layout) -> Vectors:
        return self.optimizer.init(x)

    def sends(self) -> tuple[Download, ...]:
        return tuple(Download(name, signed=name != "v") for name in self.optimizer.statistics)

    def send(self, s: Vectors, x: Tensor, N: int) -> Vectors:
        return s


@dataclass(frozen=True)
class Inverted(Statistics):
    """FedGBO (Algorithm 1): g̃ = I(x_t, x_{t+1}, s) with ηa, then s ← T(g̃, s), each client's s as it was sent.

    a is the cohort's mean, known when the step closes, and I is affine in the move, so that
    I with ηa is I(x_t, x_t, s) + (I with η − I(x_t, x_t, s))/a.
    """

    def traits(self) -> TransformTraits:
        return TransformTraits(requires_sgd=True)

    def accounts(self) -> tuple[Upload, ...]:
        return Upload("inverse"), Upload("inverse_of_0")

    def account(self, up: Uploads) -> Vectors:
        move, lr = up.vectors["delta"], up.lr.to(up.vectors["delta"])  # x_t − x_{t+1}, η
        s = {name: up.sent[name] for name in self.optimizer.statistics}
        return {
            "inverse": self.optimizer.inverse(move, s, lr),  # Table 1, I(x_t, x_{t+1}, s)
            "inverse_of_0": self.optimizer.inverse(torch.zeros_like(up.sent["x"]), s, 1.0),  # I(x_t, x_t, s)
        }

    def update(self, u: Vectors, s: Vectors, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Vectors]:
        g = u["inverse_of_0"] + (u["inverse"] - u["inverse_of_0"]) / ctx.a  # g̃_t ← I(x_t, x_{t+1}, s_t, K, η)
        return u, self.optimizer.track(g, s)  # s_{t+1} ← T(g̃_t, s_t)


@dataclass(frozen=True)
class FromGradient(Statistics):
    """Mimelite: s ← T(mean ∇f_i, s)."""

    def update(self, u: Vectors, s: Vectors, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Vectors]:
        return u, self.optimizer.track(u["grad"], s)


@dataclass(frozen=True)
class Averaged(Statistics):
    """MFL: s ← mean s_i."""

    def update(self, u: Vectors, s: Vectors, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Vectors]:
        return u, {name: u[name] for name in s}


def _optimizer(name: str, beta: float | None, beta1: float, beta2: float, eps: float, v0: float) -> Optimizer:
    match name:
        case "sgdm":
            return SGDm(0.9 if beta is None else beta)
        case "rmsprop":
            return RMSProp(0.99 if beta is None else beta, eps, v0)
        case "adam":
            if beta is not None:
                raise ConfigError(f"adam has no beta={beta}; give beta1 and beta2")
            return Adam(beta1, beta2, eps, v0, corrected=False)
    raise unknown("optimizer", name, ["sgdm", "rmsprop", "adam"])


@builder
@searched(optimizer=Categorical(("sgdm", "rmsprop", "adam")))
def fedgbo(
    optimizer: str = "sgdm", beta: float | None = None, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-3,
    v0: float = 1.0, weights: str = "uniform",
) -> Algorithm:  # fmt: skip
    """FedGBO: one global optimizer, applied on clients, tracked on the server by an inverse step.

    y ← y + U(g, s), s fixed all round;  g̃ = I(x_t, x_{t+1}, s);  s ← T(g̃, s)

    For SGDm(β), U = −η(βm + (1−β)g), T: m ← βm + (1−β)g, I = ((x_t − x_{t+1})/(ηa) − βm)/(1−β).

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.fedgbo("sgdm", beta=0.9)
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.5
    True
    """
    o = _optimizer(optimizer, beta, beta1, beta2, eps, v0)
    return Algorithm(Fixed(o), Mean(weights), pipeline(Inverted(o), Scale()), work=PLAIN)


@builder
@searched(optimizer=Categorical(("sgdm", "rmsprop", "adam")))
def mimelite(
    optimizer: str = "sgdm", beta: float | None = None, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-3,
    v0: float = 1.0, weights: str = "uniform",
) -> Algorithm:  # fmt: skip
    """Mimelite (Karimireddy et al. 2021): statistics fixed on clients, tracked from full local gradients at x.

    y ← y + U(g, s), s fixed all round;  s ← T(mean_S ∇f_i(x), s)

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.mimelite("sgdm", beta=0.9)
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.6
    True
    """
    o = _optimizer(optimizer, beta, beta1, beta2, eps, v0)
    return Algorithm(FixedAndGradient(o), Mean(weights), pipeline(FromGradient(o), Scale()), work=PLAIN)


@builder
@searched(optimizer=Categorical(("sgdm", "rmsprop", "adam")))
def mfl(
    optimizer: str = "sgdm", beta: float | None = None, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-3,
    v0: float = 1.0, weights: str = "uniform",
) -> Algorithm:  # fmt: skip
    """MFL (Liu et al. 2020): clients track the statistics themselves, and the server averages them with the models.

    s_i ← T(g, s_i);  y ← y − η m_i (SGDm), −η m_i/(√v_i + ε) (Adam);  s ← mean_S s_i

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.mfl("sgdm", beta=0.9), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.6
    True
    """
    o = _optimizer(optimizer, beta, beta1, beta2, eps, v0)
    return Algorithm(Tracked(o), Mean(weights), pipeline(Averaged(o), Scale()), work=PLAIN)
