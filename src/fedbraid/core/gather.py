"""The server half of a round, first stroke: gathers fold uploads into one update.

A gather is a fold: `zero`, `add` for each block of uploads, `close`. The server must not be the only one that can fold:
with 1,000 clients on two workers it would take in 1,000 uploads where two accumulators say the same.

*The policy.* A gather that is a sum says so (`needs_every_upload=False`) and has `merge(a, b)`. Worker processes, Ray nodes
and edge aggregators then `add` their own clients' uploads, with what server parts make of each (`Transform.account`), and
hand over one accumulator; the server merges. Nothing else may be folded far away: medians, Krum, server-held memory and
colluding attackers read single uploads, and get them at the server.

*Invariants.*

1. `merge` is associative and commutative, and `zero` is neutral, in every bit of what `close` returns: an update does not
   depend on blocks, processes, the order of arrival or the tree. `core/exact_sum.py` says how, and why floats alone fail.
2. `add` of such a gather reads the uploads alone: not its state, which only the server has, and not the server's model, which
   a client that trained from an older or encoded version was never sent.
3. No client is in two accumulators. Who folds decides that, and who merges may not look inside.
4. Numbers of single clients (bytes, losses, norms) are no part of an accumulator: they are few, and travel beside it.
5. An accumulator crosses a wire as `links/accumulators.py` writes it: float64 vectors by name and level, and its counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedbraid.core.check import one_of
from fedbraid.core.context import ServerContext, Staleness, Tree, Uploads, Vectors
from fedbraid.core.exact_sum import ExactSum
from fedbraid.core.layout import Layout
from fedbraid.core.traits import GatherTraits

Metrics = dict[str, Any]  # what a part adds to the record of a step


@dataclass(frozen=True)
class Gather:
    """Fold uploads into one update; the schedule says when it closes."""

    def init(self, x: Tensor, layout: Layout) -> Tree:
        """State that lives from step to step."""
        return {}

    def zero(self, x: Tensor) -> Tree:
        """An empty accumulator."""
        raise NotImplementedError

    def add(self, acc: Tree, up: Uploads, s: Tree, x: Tensor) -> Tree:
        """Fold a block of uploads in; no client is in it twice."""
        raise NotImplementedError

    def merge(self, a: Tree, b: Tree) -> Tree:
        """The accumulator of the clients of both, whose storage may be used, where no upload is needed by itself."""
        raise NotImplementedError

    def close(self, acc: Tree, s: Tree, ctx: ServerContext) -> tuple[Vectors, Tree, Metrics]:
        """(the update, the new state, numbers for the record of the step).

        Numbers named `up:…` and `down:…` are bytes that it cost besides the uploads and the broadcast.
        """
        raise NotImplementedError

    def remove_client(self, s: Tree, client: int) -> Tree:
        """The state without a client that leaves for good."""
        return s

    def traits(self) -> GatherTraits:
        """What it is, as data."""
        return GatherTraits()


@dataclass(frozen=True)
class Sums:
    """Weighted sums so far, by name, and what they are divided by in the end."""

    vectors: dict[str, Any]  # an `ExactSum` of each name
    weight: float  # of whole samples, or clients, so exact in any order
    count: int
    uniform: frozenset[str] = frozenset()  # the names that count once for each client


@dataclass(frozen=True)
class Mean(Gather):
    """Σ p_i s(τ_i) v_i for every name that came up, the weights normalised over the cohort.

    What is declared uniform counts once for each client; what is not declared to age is taken as it is.
    """

    weights: str = "samples"
    staleness: Staleness = field(default_factory=Staleness)

    def __post_init__(self) -> None:
        check_weights(self.weights)

    def traits(self) -> GatherTraits:
        return GatherTraits(
            weights=self.weights,
            is_weighted_mean=True,
            needs_every_upload=type(self).add is not Mean.add,
            defined_for_async=True,
        )

    def zero(self, x: Tensor) -> Sums:
        return Sums({}, 0.0, 0)

    def add(self, acc: Sums, up: Uploads, s: Tree, x: Tensor) -> Sums:
        p, age, sums = up.p(self.weights), self.staleness(up.staleness), dict(acc.vectors)
        for name, v in up.vectors.items():
            what = up.declared[name]
            weight = torch.ones_like(p) if what.uniform else p
            if name not in sums:
                sums[name] = ExactSum(v.shape[1], v.device)
            sums[name].add(weight * age if what.discounts_staleness else weight, v)
        uniform = frozenset(name for name in sums if up.declared[name].uniform)
        return Sums(sums, acc.weight + float(p.double().sum()), acc.count + len(p), uniform)

    def merge(self, a: Sums, b: Sums) -> Sums:
        vectors = dict(a.vectors)
        for name, total in b.vectors.items():
            vectors[name] = vectors[name].merge(total) if name in vectors else total
        return Sums(vectors, a.weight + b.weight, a.count + b.count, a.uniform | b.uniform)

    def totals(self, acc: Sums, ctx: ServerContext) -> tuple[Vectors, Metrics]:
        """The weighted sums, and numbers for the record of the step."""
        return {name: total.value().float() for name, total in acc.vectors.items()}, {}

    def close(self, acc: Sums, s: Tree, ctx: ServerContext) -> tuple[Vectors, Tree, Metrics]:
        mean = {
            name: total.value().div_(acc.count if name in acc.uniform else acc.weight).float()
            for name, total in acc.vectors.items()
        }
        return mean, s, {}


@dataclass(frozen=True)
class DeltaGather(Gather):
    """A gather that treats `delta` in its own way and hands the rest to a mean. A subclass says how."""

    weights: str = "samples"
    staleness: Staleness = field(default_factory=Staleness)

    def __post_init__(self) -> None:
        check_weights(self.weights)

    def traits(self) -> GatherTraits:
        return GatherTraits(weights=self.weights)

    def zero_delta(self, s: Tree, x: Tensor) -> Tree:
        """An empty accumulator of deltas."""
        raise NotImplementedError

    def add_delta(self, acc: Tree, up: Uploads, s: Tree, x: Tensor) -> Tree:
        """Fold a block's deltas in."""
        raise NotImplementedError

    def close_delta(self, acc: Tree, s: Tree, ctx: ServerContext) -> tuple[Tensor, Tree, Metrics]:
        """(delta, the new state, numbers for the record of the step)."""
        raise NotImplementedError

    @property
    def _mean(self) -> Mean:
        return Mean(self.weights, self.staleness)

    def zero(self, x: Tensor) -> Tree:
        return None, self._mean.zero(x)

    def add(self, acc: Tree, up: Uploads, s: Tree, x: Tensor) -> Tree:
        mine, rest = acc
        if mine is None:  # the first block; the others may still be training
            mine = self.zero_delta(s, x)
        mine = self.add_delta(mine, up.having({"delta": up.vectors["delta"]}), s, x)
        others = {name: v for name, v in up.vectors.items() if name != "delta"}
        return mine, self._mean.add(rest, up.having(others), {}, x)

    def close(self, acc: Tree, s: Tree, ctx: ServerContext) -> tuple[Vectors, Tree, Metrics]:
        mine, rest = acc
        others, _, _ = self._mean.close(rest, {}, ctx)
        delta, s, metrics = self.close_delta(mine, s, ctx)
        return {**others, "delta": delta}, s, metrics


WIDE_ROW = 2**14  # numbers from which a row is worth an operation of its own


def add_weighted_(total: Tensor, *terms: tuple[Tensor, Tensor]) -> Tensor:
    """total + Σ_i Σ p_i rows_i over terms of (p, rows), in total's precision and place.

    Wide rows are added client by client, so that no bit depends on how a cohort was cut into blocks.
    """
    if len(total) < WIDE_ROW:
        for p, rows in terms:
            rows = rows.expand(len(p), -1)
            total.addmv_(rows.to(total.dtype).T, p.to(total.dtype).squeeze(1))
        return total
    weighted = [(p.squeeze(1).tolist(), rows.expand(len(p), -1)) for p, rows in terms]
    for i in range(len(weighted[0][0])):
        for weights, rows in weighted:
            if weights[i]:
                total.add_(rows[i], alpha=weights[i])
    return total


def check_weights(kind: str) -> None:
    """Refuse a kind of averaging that nobody knows."""
    one_of("weights", kind, ("samples", "uniform"))
