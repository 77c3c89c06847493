"""The server half of a round, first stroke: gathers fold uploads into one update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedbraid.core.check import one_of
from fedbraid.core.context import ServerContext, Staleness, Tree, Uploads, Vectors
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

    vectors: Vectors
    weight: float
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
        return GatherTraits(weights=self.weights, is_weighted_mean=True, defined_for_async=True)

    def zero(self, x: Tensor) -> Sums:
        return Sums({}, 0.0, 0)

    def add(self, acc: Sums, up: Uploads, s: Tree, x: Tensor) -> Sums:
        p, age, sums = up.p(self.weights), self.staleness(up.staleness), dict(acc.vectors)
        for name, v in up.vectors.items():
            what = up.declared[name]
            weight = torch.ones_like(p) if what.uniform else p
            total = sums[name] if name in sums else torch.zeros_like(v[0])
            sums[name] = add_weighted_(total, (weight * age if what.discounts_staleness else weight, v))
        uniform = frozenset(name for name in sums if up.declared[name].uniform)
        return Sums(sums, acc.weight + float(p.sum()), acc.count + len(p), uniform)

    def totals(self, acc: Sums, ctx: ServerContext) -> tuple[Vectors, Metrics]:
        """The weighted sums, and numbers for the record of the step."""
        return acc.vectors, {}

    def close(self, acc: Sums, s: Tree, ctx: ServerContext) -> tuple[Vectors, Tree, Metrics]:
        totals, metrics = self.totals(acc, ctx)
        mean = {name: v / (acc.count if name in acc.uniform else acc.weight) for name, v in totals.items()}
        return mean, s, metrics


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
