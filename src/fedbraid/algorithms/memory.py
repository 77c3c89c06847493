"""Memory of every client's last update: FedVARP and ClusterFedVARP (Jhunjhunwala et al. 2022), MIFA (Gu et al. 2021).

Each algorithm is one formula over what a step did to the memory (`MemoryStep`). The memory has one of two holders: the
server, in a table, or each client its own y_i (`held="client"`): then differences go up, and the server keeps one sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedbraid.algorithms._build import SERVER_RATE, builder, searched
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import integer, number, one_of
from fedbraid.core.codec import Codec
from fedbraid.core.context import ClientContext, ServerContext, Uploads, Vectors
from fedbraid.core.gather import DeltaGather, Mean, Metrics, add_weighted_, check_weights
from fedbraid.core.layout import Layout
from fedbraid.core.rule import Rule
from fedbraid.core.traits import (
    GatherTraits,
    MemoryFormula,
    MemoryStep,
    RuleTraits,
    TransformTraits,
    UpdateMemory,
)  # fmt: skip
from fedbraid.core.transform import Scale, Transform, pipeline
from fedbraid.core.update_table import UpdateTable, UpdateTableStep
from fedbraid.core.vector_spec import Upload
from fedbraid.errors import ConfigError
from fedbraid.schedule import Ints

# The formulas ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Varp(MemoryFormula):
    """FedVARP (Algorithm 1), which is SAGA: G = Σ_S p_i (Δ_i − y_i) + Σ_N p_j y_j."""

    defined_for_async = True  # CA²FL

    def update(self, m: MemoryStep, lr: float) -> Tensor:
        return m.change + (m.before / m.population).to(m.change)


@dataclass(frozen=True)
class Mifa(MemoryFormula):
    """MIFA (Algorithm 1): G = Σ p_j y_j over every client seen so far, y_i ← Δ_i first."""

    averages_stored = True
    defined_for_async = True  # ACE

    def update(self, m: MemoryStep, lr: float) -> Tensor:
        return (m.after / max(m.seen, 1.0)).to(m.change)  # with noise, Σ w_j may be less than one client's


# Held by the server ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerMemory(DeltaGather):
    """The server keeps a table: y_i ← v_i through the codec for i ∈ S, v_i being Δ_i or, where the formula says, Δ_i/η."""

    formula: MemoryFormula = field(default_factory=Varp)
    codec: Codec | None = None

    def traits(self) -> GatherTraits:
        memory = None if self.formula.averages_stored else UpdateMemory(self.formula, self.codec)
        fits_async = self.formula.defined_for_async and self.weights == "uniform"
        return GatherTraits(weights=self.weights, memory=memory, defined_for_async=fits_async)

    def init(self, x: Tensor, layout: Layout) -> UpdateTable:
        return UpdateTable.open(x, self.codec, layout)  # every y_i is 0 at first

    def zero_delta(self, s: UpdateTable, x: Tensor) -> UpdateTableStep:
        return s.begin_step()

    def add_delta(self, mine: UpdateTableStep, up: Uploads, s: UpdateTable, x: Tensor) -> UpdateTableStep:
        rate = up.lr if self.formula.per_rate else None
        mine.put(up.clients, up.vectors["delta"], up.p(self.weights), self.staleness(up.staleness), rate)
        return mine

    def close_delta(
        self, mine: UpdateTableStep, s: UpdateTable, ctx: ServerContext
    ) -> tuple[Tensor, UpdateTable, Metrics]:
        after, change, P_N = (
            mine.close(),
            mine.received_change / mine.weight,
            population_weight(self.weights, ctx),
        )
        m = MemoryStep(change, mine.weight, mine.sum_before, after.total, after.seen, P_N)
        return self.formula.update(m, ctx.lr), after, {}

    def remove_client(self, s: UpdateTable, client: int) -> UpdateTable:
        return s.without(client)


def population_weight(weights: str, ctx: ServerContext) -> float:
    """Σ_N p_j before it is normalised."""
    return ctx.samples if weights == "samples" else float(ctx.N)


# Held by clients ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientHeldMemory(Rule):
    """The client keeps y_i: δ_i = Δ_i − y_i goes up, and y_i ← y_i + δ_i as it was received.

    `rated` remembers Δ_i/η instead; `counted` uploads the weight of a first participation too. With `fade` ρ every memory shrinks
    by 1 − ρ a step, wherever its client is: y_i ← (1 − ρ)^(t − t_i) y_i when it participates again.
    """

    weights: str = "samples"
    rated: bool = False
    counted: bool = False
    fade: float = 0.0

    def __post_init__(self) -> None:
        check_weights(self.weights)
        number("fade", self.fade, "[0, 1)", "forgets everything")

    def uploads(self) -> tuple[Upload, ...]:
        first = (
            (Upload("first", width=1, uniform=True, signed=False, accumulates=True, clip_scale=1.0),)
            if self.counted
            else ()
        )
        return (Upload("change", accumulates=True, clip_scale=1.0), *first)

    def init(self, x: Tensor) -> Vectors:
        zero = torch.zeros(1, device=x.device)
        return {"y_i": torch.zeros_like(x), "w_i": zero} | ({"t_i": zero} if self.fade else {})

    def traits(self) -> RuleTraits:
        return RuleTraits(decays_client_state=self.fade > 0)

    def _held(self, ctx: ClientContext) -> Tensor:
        """y_i as it is today."""
        y_i = ctx.client_state["y_i"]
        return y_i * (1 - self.fade) ** (ctx.t - ctx.client_state["t_i"]) if self.fade else y_i

    def finish(self, y: Tensor, s: Vectors, ctx: ClientContext) -> Vectors:
        moved = (ctx.x - y) / ctx.lr if self.rated else ctx.x - y
        change = {"change": moved - self._held(ctx)}
        return change | ({"first": self._p(ctx) - ctx.client_state["w_i"]} if self.counted else {})

    def remember(self, received: Vectors, s: Vectors, ctx: ClientContext) -> Vectors:
        w = ctx.client_state["w_i"] + received["first"] if self.counted else self._p(ctx)
        new = {"y_i": self._held(ctx) + received["change"], "w_i": w}
        return new | ({"t_i": torch.full_like(w, ctx.t)} if self.fade else {})

    def withdraw(self, client_state: Vectors) -> Vectors:
        w = client_state["w_i"]
        if self.fade:  # how far it has faded since t_i depends on today's step: it stays, and goes on fading
            return {}
        y_i = client_state["y_i"]
        change = -w * y_i if self.weights == "samples" else -y_i
        return {"change": change} | ({"first": -w} if self.counted else {})

    def _p(self, ctx: ClientContext) -> Tensor:
        return ctx.n if self.weights == "samples" else torch.ones_like(ctx.n)


@dataclass(frozen=True)
class MemorySum:
    """Σ w_j y_j in float64 over what clients hold, and Σ w_j where it is counted."""

    total: Tensor
    seen: float = 0.0


@dataclass(frozen=True)
class ClientMemory(Transform):
    """The server keeps one sum of what clients hold, from the mean of their changes.

    Where the mean is noised, the noise of t steps gathers in the sum as N(0, t (zC)²); with `fade` ρ it does not grow
    beyond N(0, (zC)²/(1 − (1 − ρ)²)) before each step.
    """

    formula: MemoryFormula = field(default_factory=Varp)
    weights: str = "samples"
    fade: float = 0.0

    def __post_init__(self) -> None:
        check_weights(self.weights)

    def traits(self) -> TransformTraits:
        return TransformTraits(averages_client_memory=self.formula.averages_stored)

    def init(self, x: Tensor, layout: Layout) -> MemorySum:
        return MemorySum(torch.zeros_like(x, dtype=torch.float64))

    def accounts(self) -> tuple[Upload, ...]:
        return (Upload("weight", width=1, uniform=True),)

    def account(self, up: Uploads) -> Vectors:
        return {"weight": up.p(self.weights)}

    def update(self, u: Vectors, s: MemorySum, x: Tensor, ctx: ServerContext) -> tuple[Vectors, MemorySum]:
        change, P_S, P_N = u["change"], ctx.cohort * float(u["weight"]), population_weight(self.weights, ctx)
        first = ctx.cohort * float(u["first"]) if "first" in u else 0.0
        new = MemorySum(torch.add(s.total, change.double(), alpha=P_S), s.seen + first)
        delta = self.formula.update(MemoryStep(change, P_S, s.total, new.total, new.seen, P_N), ctx.lr)
        return {**u, "delta": delta, "gathered": delta}, self.skip(new, x)

    def skip(self, s: MemorySum, x: Tensor) -> MemorySum:
        return replace(s, total=(1 - self.fade) * s.total) if self.fade else s

    def absorb(self, s: MemorySum, contribution: Vectors) -> MemorySum:
        first = float(contribution["first"]) if "first" in contribution else 0.0
        return MemorySum(s.total + contribution.get("change", 0), s.seen + first)


def with_memory(
    held: str, weights: str, fade: float, formula: MemoryFormula, *steps: Transform, codec: Codec | None = None
) -> Algorithm:  # fmt: skip
    """A server that remembers, or clients that do and a sum of what they hold; then the server's steps."""
    one_of("held", held, ("server", "client"))
    if held == "server":
        if fade:
            raise ConfigError(
                f"fade={fade} is of memory that clients hold; give held='client' or leave it out"
            )
        return Algorithm(gather=ServerMemory(weights, formula=formula, codec=codec), server=pipeline(*steps))
    rule = ClientHeldMemory(weights, formula.per_rate, formula.averages_stored, fade)
    return Algorithm(rule, Mean(weights), pipeline(ClientMemory(formula, weights, fade), *steps))


# One for several clients ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Clusters:
    """One y a cluster."""

    y: Tensor


@dataclass(frozen=True)
class ClusterVarp(DeltaGather):
    """As FedVARP with one y per cluster: y_c ← mean of the cohort's Δ_i in c, unchanged where none took part.

    Client i belongs to cluster `i mod clusters`, or to `clusters[i]`.
    """

    clusters: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.clusters, int):
            integer("clusters", self.clusters)
        elif min(self.clusters, default=-1) < 0:
            raise ConfigError("clusters must name a cluster number >= 0 for every client")

    @property
    def count(self) -> int:
        return self.clusters if isinstance(self.clusters, int) else max(self.clusters) + 1

    def of(self, clients: Ints) -> Ints:
        """The clients' clusters."""
        if isinstance(self.clusters, int):
            return clients % np.int64(self.clusters)
        if len(clients) and clients.max() >= len(self.clusters):
            raise ConfigError(f"client {clients.max()} has no cluster; {len(self.clusters)} were given")
        return np.array(self.clusters, np.int64)[clients]

    def init(self, x: Tensor, layout: Layout) -> Clusters:
        return Clusters(torch.zeros(self.count, len(x), device=x.device))

    def zero_delta(self, s: Clusters, x: Tensor) -> tuple[Tensor, float, Tensor, Tensor]:
        """Σ s(τ) p (Δ − y), Σ p, and by cluster Σ Δ and how many."""
        return torch.zeros_like(x), 0.0, torch.zeros_like(s.y), torch.zeros(self.count, 1, device=x.device)

    def add_delta(
        self, mine: tuple[Tensor, float, Tensor, Tensor], up: Uploads, s: Clusters, x: Tensor
    ) -> tuple[Tensor, float, Tensor, Tensor]:
        fresh, weight, new, count = mine
        p, delta, at = (
            up.p(self.weights),
            up.vectors["delta"],
            torch.from_numpy(self.of(up.clients)).to(x.device),
        )
        fresh = add_weighted_(fresh, (p * self.staleness(up.staleness), delta - s.y[at]))
        new, count = new.index_add(0, at, delta), count.index_add(0, at, torch.ones_like(p))
        return fresh, weight + float(p.sum()), new, count

    def close_delta(
        self, mine: tuple[Tensor, float, Tensor, Tensor], s: Clusters, ctx: ServerContext
    ) -> tuple[Tensor, Clusters, Metrics]:
        fresh, weight, new, count = mine
        delta = fresh / weight + self.shares(ctx).to(fresh) @ s.y
        return delta, Clusters(torch.where(count > 0, new / count.clamp_min(1), s.y)), {}

    def shares(self, ctx: ServerContext) -> Tensor:
        """Each cluster's share of all clients' weight."""
        n = ctx.sizes if self.weights == "samples" else ctx.sizes > 0
        totals = np.bincount(self.of(np.arange(len(n))), weights=n, minlength=self.count)
        return torch.from_numpy(totals / totals.sum())


@builder
@searched(lr=SERVER_RATE)
def fedvarp(lr: float = 1.0, weights: str = "samples", held: str = "server", fade: float = 0.0) -> Algorithm:
    """FedVARP (Jhunjhunwala et al. 2022): SAGA over clients, y_i being the last update of client i.

    x ← x − lr · (Σ_S p_i (Δ_i − y_i) + Σ_N p_j y_j);  y_i ← Δ_i for i ∈ S

    held="client" leaves y_i with client i, where it may `fade`, by that share a step.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.fedvarp(), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.65
    True
    """
    return with_memory(held, weights, fade, Varp(), Scale(lr))


@builder
@searched(lr=SERVER_RATE)
def mifa(lr: float = 1.0, weights: str = "samples", held: str = "server", fade: float = 0.0) -> Algorithm:
    """MIFA (Gu et al. 2021): the mean of every client's last update.

    y_i ← Δ_i for i ∈ S;  x ← x − lr · Σ p_j y_j over all clients seen so far

    held="client" leaves y_i with client i, where it may `fade`, by that share a step.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.mifa(), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.6
    True
    """
    return with_memory(held, weights, fade, Mifa(), Scale(lr))


@builder
def cluster_fedvarp(clusters: int | Sequence[int], lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """ClusterFedVARP (Jhunjhunwala et al. 2022): one remembered update per cluster of clients.

    x ← x − lr · (Σ_S p_i (Δ_i − y_c(i)) + Σ_N p_j y_c(j));  y_c ← the mean of Δ_i over the cohort in c

    Client i belongs to cluster i mod `clusters`, or to `clusters[i]`.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.cluster_fedvarp(clusters=4)
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.5
    True
    """
    which = clusters if isinstance(clusters, int) else tuple(int(c) for c in clusters)
    return Algorithm(gather=ClusterVarp(weights, clusters=which), server=pipeline(Scale(lr)))
