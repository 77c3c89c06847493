"""The server half of a round: gathers fold uploads into one update, transforms turn it into a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.layout import Layout
from fedbraid.core.rule import Vectors
from fedbraid.errors import ConfigError, unknown

Tree = dict[str, Any]  # named tensors, numbers, Rows, and trees of them


@dataclass
class Uploads:
    """What a block of clients sent: named vectors `[m, ·]`, and what the server knows of the senders."""

    clients: NDArray[np.int64]
    vectors: Vectors
    n: Tensor  # [m, 1] samples
    K: Tensor  # [m, 1] local steps
    staleness: Tensor  # [m, 1] server steps since the version they trained from
    lr: Tensor  # [m, 1] the rates they trained with, float64
    start: Tensor  # [m, d] or [1, d], the models they trained from

    def weights(self, kind: str) -> Tensor:
        """What each sender counts for, `[m, 1]`."""
        return self.n if kind == "samples" else torch.ones_like(self.n)


@dataclass(frozen=True)
class Info:
    """The facts of a server step."""

    t: int
    cohort: int  # |S|
    N: int  # how many clients are known
    samples: float  # Σ n_j over all of them
    lr: float  # weighted mean of the senders' rates
    K: float  # weighted mean of the senders' steps
    quantised: float  # the share of quantised senders
    layout: Layout
    sizes: NDArray[np.int64]  # n_j of every known client


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

    def init(self, x: Tensor, layout: Layout) -> Tree:
        """State that lives from step to step."""
        return {}

    def zero(self, x: Tensor) -> Tree:
        """An empty accumulator."""
        raise NotImplementedError

    def add(self, acc: Tree, up: Uploads, s: Tree, x: Tensor) -> Tree:
        """Fold a block of uploads in."""
        raise NotImplementedError

    def close(self, acc: Tree, s: Tree, info: Info) -> tuple[Vectors, Tree]:
        """(the update, the new state)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Mean(Gather):
    """Σ p_i s(τ_i) v_i for every name that came up, the weights normalised over the cohort.

    Names in `plain` are averaged uniformly and whatever their age, such as control variates that the
    paper sums over clients.
    """

    weights: str = "samples"
    staleness: Staleness = field(default_factory=Staleness)
    plain: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_weights(self.weights)

    def zero(self, x: Tensor) -> Tree:
        return {"sum": {}, "weight": 0.0, "count": 0}

    def add(self, acc: Tree, up: Uploads, s: Tree, x: Tensor) -> Tree:
        p = up.weights(self.weights)
        aged = p * self.staleness(up.staleness)
        sums = dict(acc["sum"])
        for name, v in up.vectors.items():
            weight = torch.ones_like(p) if name in self.plain else aged if name == "delta" else p
            sums[name] = fold(sums.get(name, torch.zeros_like(v[0])), (weight, v))
        return {"sum": sums, "weight": acc["weight"] + float(p.sum()), "count": acc["count"] + len(p)}

    def close(self, acc: Tree, s: Tree, info: Info) -> tuple[Vectors, Tree]:
        over = {name: acc["count"] if name in self.plain else acc["weight"] for name in acc["sum"]}
        return {name: v / over[name] for name, v in acc["sum"].items()}, s


WIDE = 2**14  # numbers from which a row is worth an operation of its own


def native(x: Tensor) -> bool:
    """Whether vectors like x are worth compiled code, and of a kind that it knows."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and len(x) >= WIDE


def fold(total: Tensor, *terms: tuple[Tensor, Tensor]) -> Tensor:
    """total + Σ_i Σ p_i rows_i over terms of (p, rows), in total's precision and place.

    Wide rows are added client by client, so that no bit depends on how a cohort was cut into blocks.
    """
    if len(total) < WIDE:
        for p, rows in terms:
            total.addmv_(rows.to(total.dtype).T, p.to(total.dtype).squeeze(1))
        return total
    weighted = [(p.squeeze(1).tolist(), rows) for p, rows in terms]
    for i in range(len(terms[0][0])):
        for weights, rows in weighted:
            if weights[i]:
                total.add_(rows[i], alpha=weights[i])
    return total


def check_weights(kind: str) -> None:
    if kind not in ("samples", "uniform"):
        raise ConfigError(f"weights={kind!r} is not known; use 'samples' or 'uniform'")
