"""The server half of a round, first stroke: gathers fold uploads into one update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.layout import Layout
from fedbraid.core.rule import Vectors
from fedbraid.core.vector_spec import Upload
from fedbraid.errors import ConfigError, unknown

Tree = Any  # state: records, dicts and tuples of tensors, numbers and Rows


@dataclass
class Uploads:
    """What a block of clients sent, as it was received, and what the server knows of the senders."""

    clients: NDArray[np.int64]
    vectors: Vectors  # [m, ·]
    n: Tensor  # [m, 1] samples
    K: Tensor  # [m, 1] local steps
    a: Tensor  # [m, 1] effective steps
    staleness: Tensor  # [m, 1] server steps since the version they trained from
    lr: Tensor  # [m, 1] the rates they trained with, float64
    sent: Mapping[str, Tensor]  # [m, ·] or [1, ·]: the model each trained from and what else it was sent
    declared: dict[str, Upload]  # what each name is

    def p(self, kind: str) -> Tensor:
        """What each sender counts for, `[m, 1]`."""
        return self.n if kind == "samples" else torch.ones_like(self.n)

    def having(self, vectors: Vectors, declared: dict[str, Upload] | None = None) -> Uploads:
        """The same senders with other vectors."""
        return replace(self, vectors=vectors, declared=declared or self.declared)


class ServerData(Protocol):
    """What the server itself holds: its data, and the model to try on them."""

    @property
    def seed(self) -> int:
        """Of the run."""

    @property
    def public(self) -> Any:
        """(inputs, targets) of the task's public share."""

    @property
    def test(self) -> Any:
        """(inputs, targets) of its test set."""

    def module(self, x: Tensor) -> Any:
        """A module with these weights; the next call may give the same one."""

    def outputs(self, module: Any, rows: Any) -> Any:
        """What a module gives for these rows of the public share."""


@dataclass(frozen=True)
class ServerContext:
    """The facts of a server step."""

    t: int
    cohort: float  # |S|: how many uploads, or as many as were planned where that is what counts
    N: int  # how many clients are known
    samples: float  # Σ n_j over all of them
    lr: float  # weighted mean of the senders' rates
    K: float  # weighted mean of the senders' steps
    a: float  # weighted mean of the senders' effective steps
    quantized_fraction: float  # the share of quantised senders
    layout: Layout
    sizes: NDArray[np.int64]  # n_j by client number, 0 for numbers that nobody has
    max_staleness: int = 0  # the age of the oldest upload
    sent: Vectors = field(
        default_factory=dict
    )  # [1, ·] each: this version's model and what else is sent with it
    data: ServerData | None = None  # what the server itself holds, in a run


# Staleness ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Staleness:
    """s(τ), by what an update that is τ versions late is scaled."""

    kind: str = "constant"
    a: float = 0.5
    b: float = 4.0

    def __post_init__(self) -> None:
        if self.kind not in _STALENESS:
            raise unknown("staleness", self.kind, _STALENESS)

    def __call__(self, tau: Tensor) -> Tensor:
        scale: Tensor = _STALENESS[self.kind](self, tau)
        return scale


_STALENESS: dict[str, Any] = {
    "constant": lambda s, tau: torch.ones_like(tau),
    "sqrt": lambda s, tau: (1 + tau).rsqrt(),
    "polynomial": lambda s, tau: (1 + tau) ** -s.a,
    "hinge": lambda s, tau: 1 / (1 + s.a * (tau - s.b).clamp_min(0)),
}


# Gather ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gather:
    """Fold uploads into one update; the schedule says when it closes."""

    weights: ClassVar[str] = "uniform"  # how it weighs clients, "samples" or "uniform"
    alone: ClassVar[bool] = False  # whether a step that nobody came to makes an update all the same

    def fits(self, layout: Layout) -> None:
        """Refuse a model that it cannot gather updates of."""

    def init(self, x: Tensor, layout: Layout) -> Tree:
        """State that lives from step to step."""
        return {}

    def zero(self, x: Tensor) -> Tree:
        """An empty accumulator."""
        raise NotImplementedError

    def add(self, acc: Tree, up: Uploads, s: Tree, x: Tensor) -> Tree:
        """Fold a block of uploads in; no client is in it twice."""
        raise NotImplementedError

    def close(self, acc: Tree, s: Tree, ctx: ServerContext) -> tuple[Vectors, Tree]:
        """(the update, the new state)."""
        raise NotImplementedError

    def cohort(self, came: int) -> float:
        """For how many uploads its update stands."""
        return came

    def coded(self, came: float) -> float:
        """Which share of them is quantised."""
        return came

    def notes(self, s: Tree) -> dict[str, float]:
        """What the record of a step says of its state."""
        return {}

    def leave(self, s: Tree, client: int) -> Tree:
        """The state without this client, who goes for good."""
        return s


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

    weights: str = "samples"  # type: ignore[misc]
    staleness: Staleness = field(default_factory=Staleness)

    def __post_init__(self) -> None:
        check_weights(self.weights)

    def zero(self, x: Tensor) -> Sums:
        return Sums({}, 0.0, 0)

    def add(self, acc: Sums, up: Uploads, s: Tree, x: Tensor) -> Sums:
        p, age, sums = up.p(self.weights), self.staleness(up.staleness), dict(acc.vectors)
        for name, v in up.vectors.items():
            what = up.declared[name]
            weight = torch.ones_like(p) if what.uniform else p
            total = sums[name] if name in sums else torch.zeros_like(v[0])
            sums[name] = fold(total, (weight * age if what.discounts_staleness else weight, v))
        uniform = frozenset(name for name in sums if up.declared[name].uniform)
        return Sums(sums, acc.weight + float(p.sum()), acc.count + len(p), uniform)

    def close(self, acc: Sums, s: Tree, ctx: ServerContext) -> tuple[Vectors, Tree]:
        return {
            name: v / (acc.count if name in acc.uniform else acc.weight) for name, v in acc.vectors.items()
        }, s


@dataclass(frozen=True)
class DeltaGather(Gather):
    """A gather that treats `delta` in its own way and hands the rest to a mean. A subclass says how."""

    weights: str = "samples"  # type: ignore[misc]
    staleness: Staleness = field(default_factory=Staleness)

    def __post_init__(self) -> None:
        check_weights(self.weights)

    def begin(self, s: Tree, x: Tensor) -> Tree:
        """What a step's deltas are folded into."""
        raise NotImplementedError

    def fold(self, mine: Tree, up: Uploads, s: Tree, x: Tensor) -> Tree:
        """Fold a block's deltas in."""
        raise NotImplementedError

    def end(self, mine: Tree, s: Tree, ctx: ServerContext) -> tuple[Tensor, Tree]:
        """(delta, the new state)."""
        raise NotImplementedError

    @property
    def _mean(self) -> Mean:
        return Mean(self.weights, self.staleness)

    def zero(self, x: Tensor) -> Tree:
        return None, self._mean.zero(x)

    def add(self, acc: Tree, up: Uploads, s: Tree, x: Tensor) -> Tree:
        mine, rest = acc
        if mine is None:  # the first block; the others may still be training
            mine = self.begin(s, x)
        mine = self.fold(mine, up.having({"delta": up.vectors["delta"]}), s, x)
        others = {name: v for name, v in up.vectors.items() if name != "delta"}
        return mine, self._mean.add(rest, up.having(others), {}, x)

    def close(self, acc: Tree, s: Tree, ctx: ServerContext) -> tuple[Vectors, Tree]:
        mine, rest = acc
        others, _ = self._mean.close(rest, {}, ctx)
        delta, s = self.end(mine, s, ctx)
        return {**others, "delta": delta}, s


WIDE_ROW = 2**14  # numbers from which a row is worth an operation of its own


def fold(total: Tensor, *terms: tuple[Tensor, Tensor]) -> Tensor:
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
    if kind not in ("samples", "uniform"):
        raise ConfigError(f"weights={kind!r} is not known; use 'samples' or 'uniform'")
