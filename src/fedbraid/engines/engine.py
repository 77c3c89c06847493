"""What an engine is: it runs clients, told by requests, and replies with their uploads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.algorithm import Algorithm
from fedbraid.core.context import Participation, Tree, Vectors
from fedbraid.core.link import Sizes
from fedbraid.core.work import Work, step_counts
from fedbraid.data.task import Task


@dataclass(frozen=True)
class Setup:
    """What does not change in a run, and every engine needs."""

    algorithm: Algorithm
    task: Task
    work: Work
    seed: int
    cohort: int = 1  # about how many clients train at a time
    participations: int = 0  # and in the whole run, to choose what is worth preparing
    runs: int = 1  # of this model that one command makes


def participate(setup: Setup, clients: NDArray[np.int64], version: int) -> Participation:
    """The facts of these clients' participation, who train from this version."""
    sizes, m = setup.task.sizes[clients], len(clients)
    n = torch.from_numpy(sizes.astype(np.float32))[:, None]
    K = torch.from_numpy(step_counts(sizes, setup.work).astype(np.float32))[:, None]
    lr = torch.full((m, 1), setup.work.rate(version), dtype=torch.float64)
    return Participation(clients, np.full(m, version), n, K, setup.work.effective(K), lr)


@dataclass(frozen=True)
class TrainRequest:
    """What a block of clients is told; all of them train from one version."""

    participation: Participation
    download: Vectors  # x and what else was sent, [d] each
    client_state: Vectors  # [m, ·]

    @property
    def clients(self) -> NDArray[np.int64]:
        return self.participation.clients

    @property
    def version(self) -> int:
        return int(self.participation.version[0])

    def subset(self, some: slice) -> TrainRequest:
        """What some of them are told."""
        state = {name: v[some] for name, v in self.client_state.items()}
        return TrainRequest(self.participation[some], self.download, state)


@dataclass(frozen=True)
class Orders:
    """All clients that train from one version in a step; their requests are made block by block."""

    participation: Participation
    download: Vectors
    recall: Callable[[NDArray[np.int64]], Vectors]
    folds_at: int | None = None  # the server step that workers fold the uploads for; None: each is needed
    after: NDArray[np.int64] | None = None  # the clients that train from the next version, if known

    @property
    def clients(self) -> NDArray[np.int64]:
        return self.participation.clients

    @property
    def version(self) -> int:
        return int(self.participation.version[0])

    def subset(self, some: slice) -> TrainRequest:
        """What some of them are told."""
        who = self.participation[some]
        return TrainRequest(who, self.download, self.recall(who.clients))


@dataclass
class Reply:
    """A block's uploads as the server decodes them, and its new client state.

    Where a worker folded the uploads there are none, but their `norms`, and `folded` in the last reply to the same orders;
    where they stay masked there is `folded` alone.
    """

    participation: Participation
    uploads: Vectors  # [m, ·]
    client_state: Vectors  # [m, ·]
    sizes: Sizes  # bytes by name, [m] each
    loss: Tensor  # [m]
    down: Sizes | None = None  # bytes sent down, if clients are real
    norms: Tensor | None = None  # [m], of each client's first upload, where a worker saw it
    folded: Tree = None  # the gather's accumulator of these clients and those of earlier replies

    @property
    def clients(self) -> NDArray[np.int64]:
        return self.participation.clients

    def rows(self) -> list[Reply]:
        """Each client's reply."""
        m = len(self.clients)
        down = [None] * m if self.down is None else _rows_of(self.down, m)
        columns = (
            self.participation.rows(), _rows_of(self.uploads, m), _rows_of(self.client_state, m), _rows_of(self.sizes, m),
            _cut(self.loss), down,
        )  # fmt: skip
        return [Reply(*row) for row in zip(*columns, strict=True)]

    @staticmethod
    def join(replies: Sequence[Reply]) -> Reply:
        """Several replies as one, in order."""
        if len(replies) == 1:
            return replies[0]
        first = replies[0]
        return Reply(
            Participation.join([p.participation for p in replies]),
            {k: torch.cat([p.uploads[k] for p in replies]) for k in first.uploads},
            {k: torch.cat([p.client_state[k] for p in replies]) for k in first.client_state},
            {k: np.concatenate([p.sizes[k] for p in replies]) for k in first.sizes},
            torch.cat([p.loss for p in replies]),
            None if first.down is None else {k: np.concatenate([(p.down or {})[k] for p in replies]) for k in first.down},
            None if first.norms is None else torch.cat([p.norms for p in replies if p.norms is not None]),
        )  # fmt: skip


def _cut(v: Any) -> Sequence[Any]:
    """Rows of a tensor, which torch cuts in one call, or of an array."""
    return torch.split(v, 1) if isinstance(v, Tensor) else [v[i : i + 1] for i in range(len(v))]


def _rows_of(named: dict[str, Any], m: int) -> list[dict[str, Any]]:
    rows = zip(*map(_cut, named.values()), strict=True)
    return [dict(zip(named, row)) for row in rows] if named else [{} for _ in range(m)]


class Engine(Protocol):
    """Runs clients. Opened once per run; the same orders always give the same replies, in the request of the clients."""

    def open(self, setup: Setup) -> None: ...

    def train(self, orders: Orders) -> Iterator[Reply]: ...

    def evaluate(self, x: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]: ...

    def describe(self) -> str: ...

    def close(self) -> None: ...
