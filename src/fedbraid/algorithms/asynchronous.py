"""Asynchronous training: FedBuff and FedAsync (Nguyen et al. 2022 and Xie et al. 2019, Algorithm 1 each), and what followed them.

CA²FL (Wang et al. 2024), ACE and ACED (arXiv 2511.19066), FADAS (Wang et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbraid.algorithms._build import ADAPTIVE_RATE, BUFFER, PLAIN, SERVER_RATE, builder, searched
from fedbraid.algorithms.memory import Mifa, ServerMemory
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import integer, one_of
from fedbraid.core.context import ServerContext, Staleness, Tree, Uploads, Vectors
from fedbraid.core.gather import DeltaGather, Mean, Metrics, Sums
from fedbraid.core.layout import Layout
from fedbraid.core.optim import Adam, Momentum, Optimize
from fedbraid.core.search_space import FloatRange
from fedbraid.core.traits import GatherTraits
from fedbraid.core.transform import Pipeline, Scale, Transform, pipeline
from fedbraid.core.update_table import UpdateTable, UpdateTableStep

# FedBuff and FedAsync --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixing(Mean):
    """FedAsync's own form: x ← (1 − α s(τ)) x + α s(τ) y_i, the model y_i being the client's."""

    def traits(self) -> GatherTraits:
        return replace(
            super().traits(), is_weighted_mean=False, needs_every_upload=True, requires_updates=True
        )

    def add(self, acc: Sums, up: Uploads, s: Tree, x: Tensor) -> Sums:
        gap = x - up.sent["x"] + up.vectors["delta"]  # x − y_i
        return super().add(acc, up.having({**up.vectors, "delta": gap}), s, x)


def buffered_steps(lr: float, momentum: float) -> Pipeline:
    """The server's step after a full buffer: b ← momentum·b + G, x ← x − lr·b."""
    return pipeline(Optimize(Momentum(momentum)), Scale(lr))


@builder
@searched(lr=SERVER_RATE, schedule={"buffer": BUFFER})
def fedbuff(
    lr: float = 1.0, momentum: float = 0.0, staleness: str = "sqrt", weights: str = "uniform"
) -> Algorithm:
    """FedBuff (Nguyen et al. 2022): a step after every full buffer of K uploads.

    x ← x − lr · (1/K) Σ s(τ_i) Δ_i, s(τ) = 1/√(1+τ) or, with staleness="constant", 1

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.fedbuff(lr=0.5)
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.buffered(20, buffer=4, concurrency=8))
    >>> result.last("accuracy") > 0.5
    True
    """
    return Algorithm(
        gather=Mean(weights, Staleness(staleness)), server=buffered_steps(lr, momentum), work=PLAIN
    )


@builder
@searched(lr=FloatRange(0.1, 1.0, log=True))
def fedasync(
    lr: float = 1.0,
    momentum: float = 0.0,
    staleness: str = "sqrt",
    form: str = "delta",
    weights: str = "uniform",
) -> Algorithm:
    """FedAsync (Xie et al. 2019): a step after every upload.

    x ← x − lr · s(τ) Δ_i;  with form="mixing"  x ← (1 − lr · s(τ)) x + lr · s(τ) y_i

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.fedasync(lr=0.3, form="mixing")
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.immediate(40, concurrency=8))
    >>> result.history[-1]["step"]
    40
    """
    one_of("form", form, ("delta", "mixing"))
    gather = (Mean if form == "delta" else Mixing)(weights, Staleness(staleness))
    return Algorithm(gather=gather, server=buffered_steps(lr, momentum), work=PLAIN)


# CA²FL ----------------------------------------------------------------------------------------------


@builder
@searched(lr=SERVER_RATE, schedule={"buffer": BUFFER})
def ca2fl(lr: float = 1.0) -> Algorithm:
    """CA²FL (Wang et al. 2024): FedVARP's memory under a buffer B.

    x ← x − lr · (mean_j h_j + mean_B (Δ_i − h_i));  h_i ← Δ_i

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.ca2fl(lr=0.5)
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.buffered(20, buffer=4, concurrency=8))
    >>> result.last("accuracy") > 0.65
    True
    """
    return Algorithm(gather=ServerMemory("uniform"), server=pipeline(Scale(lr)), work=PLAIN)


# ACE and ACED ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DatedUpdates:
    """A table of last updates, and the version of each."""

    table: UpdateTable
    clients: Tensor  # int64
    versions: Tensor  # int64


@dataclass(frozen=True)
class RecentMifa(DeltaGather):
    """The mean of every client's last update, without those of versions more than `limit` steps ago."""

    limit: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("limit", self.limit)

    def traits(self) -> GatherTraits:
        return GatherTraits(weights=self.weights, defined_for_async=True)

    def init(self, x: Tensor, layout: Layout) -> DatedUpdates:
        none = torch.zeros(0, dtype=torch.int64)
        return DatedUpdates(UpdateTable.open(x, None, layout), none, none)

    def zero_delta(self, s: DatedUpdates, x: Tensor) -> tuple[UpdateTableStep, dict[int, int]]:
        """The step's swaps, and the age of what each client handed in."""
        return s.table.begin_step(), {}

    def add_delta(
        self, mine: tuple[UpdateTableStep, dict[int, int]], up: Uploads, s: DatedUpdates, x: Tensor
    ) -> tuple[UpdateTableStep, dict[int, int]]:
        step, ages = mine
        step.put(up.clients, up.vectors["delta"], up.p(self.weights), self.staleness(up.staleness))
        return step, ages | {int(c): int(a) for c, a in zip(up.clients, up.staleness[:, 0])}

    def close_delta(
        self, mine: tuple[UpdateTableStep, dict[int, int]], s: DatedUpdates, ctx: ServerContext
    ) -> tuple[Tensor, DatedUpdates, Metrics]:
        step, ages = mine
        dates = dict(zip(s.clients.tolist(), s.versions.tolist())) | {
            c: ctx.t - age for c, age in ages.items()
        }
        after = step.close()
        for client in [c for c, version in dates.items() if ctx.t - version > self.limit]:
            after = after.without(client)
            del dates[client]
        delta = after.total / after.seen if dates else torch.zeros_like(after.total)
        return delta.float(), _with_dates(after, dates), {}

    def remove_client(self, s: DatedUpdates, client: int) -> DatedUpdates:
        dates = dict(zip(s.clients.tolist(), s.versions.tolist()))
        return _with_dates(s.table.without(client), {c: v for c, v in dates.items() if c != client})


def _with_dates(table: UpdateTable, dates: dict[int, int]) -> DatedUpdates:
    clients, versions = (
        torch.tensor(list(some), dtype=torch.int64) for some in (dates.keys(), dates.values())
    )
    return DatedUpdates(table, clients, versions)


@builder
@searched(lr=SERVER_RATE)
def ace(limit: int | None = None, lr: float = 1.0) -> Algorithm:
    """ACE (arXiv 2511.19066): the mean of every client's last update, a step at every arrival.

    u_i ← Δ_i;  x ← x − lr · mean_j u_j

    With `limit` it is ACED, which leaves out updates that are more than so many steps old.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.ace(limit=20), fb.Work(lr=0.1, batch=10), fb.immediate(40, concurrency=8))
    >>> result.history[-1]["step"]
    40
    """
    gather = ServerMemory("uniform", formula=Mifa()) if limit is None else RecentMifa("uniform", limit=limit)
    return Algorithm(gather=gather, server=pipeline(Scale(lr)), work=PLAIN)


# FADAS ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AMSGrad(Adam):
    """As Adam without bias correction, with v̂ ← max(v̂, v) under the root."""

    corrected: bool = False

    defined_for_async: ClassVar[bool] = True

    def init(self, x: Tensor) -> Vectors:
        return {**super().init(x), "top": torch.full_like(x, self.v0)}

    def track(self, g: Tensor, s: Vectors) -> Vectors:
        new = super().track(g, s)
        return {**new, "top": torch.maximum(s["top"], new["v"])}

    def step(self, g: Tensor, s: Vectors, T: int) -> Tensor:
        return s["m"] / (s["top"].sqrt() + self.eps)


@dataclass(frozen=True)
class CautiousScale(Scale):
    """η, or min(η, 1/τ_max) where the oldest upload is more than `limit` steps old."""

    limit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit is not None:
            integer("limit", self.limit)

    def update(self, u: Vectors, s: Any, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Any]:
        late = self.limit is not None and ctx.max_staleness > self.limit
        rate = min(self.lr, 1 / ctx.max_staleness) if late else self.lr
        return {**u, "delta": rate * u["delta"]}, s


@builder
@searched(lr=ADAPTIVE_RATE, schedule={"buffer": BUFFER})
def fadas(
    lr: float = 0.01, limit: int | None = None, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-8
) -> Algorithm:
    """FADAS (Wang et al. 2024): AMSGrad on a buffer's mean, with smaller steps where an upload is old.

    v̂ ← max(v̂, v);  x ← x − lr_t · m/(√v̂ + ε), lr_t = min(lr, 1/τ_max) where τ_max > `limit`, else lr

    m and v are Adam's, not bias-corrected.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.fadas(lr=0.01, limit=3)
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.buffered(20, buffer=4, concurrency=8))
    >>> result.last("accuracy") > 0.4
    True
    """
    server: Transform = pipeline(Optimize(AMSGrad(beta1, beta2, eps)), CautiousScale(lr, limit))
    return Algorithm(gather=Mean("uniform"), server=server, work=PLAIN)
