"""What an engine is: it runs clients, told by requests, and replies with their uploads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.context import Vectors
from fedbraid.core.link import Sizes

if TYPE_CHECKING:
    from fedbraid.core.algorithm import Algorithm
    from fedbraid.core.work import Work
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


@dataclass
class TrainRequest:
    """What a block of clients is told: the version they train from and what they remember."""

    version: int
    clients: NDArray[np.int64]
    down: Vectors  # x and what else was sent, [d] each
    memory: Vectors  # [m, ·]


@dataclass(frozen=True)
class Orders:
    """All clients that train from one version in a step, to be told block by block what they remember."""

    version: int
    clients: NDArray[np.int64]
    down: Vectors
    recall: Callable[[NDArray[np.int64]], Vectors]
    after: NDArray[np.int64] | None = None  # who will train from the version after, where that is known

    def part(self, some: slice) -> TrainRequest:
        """What some of them are told."""
        who = self.clients[some]
        return TrainRequest(self.version, who, self.down, self.recall(who))


@dataclass
class Reply:
    """What came of an request: uploads as the server decodes them, and what the clients now remember."""

    clients: NDArray[np.int64]
    uploads: Vectors  # [m, ·]
    memory: Vectors  # [m, ·]
    sizes: Sizes  # bytes by name, [m] each
    loss: Tensor  # [m]
    K: Tensor  # [m, 1]
    lr: Tensor  # [m, 1], the rates they trained with, float64
    down: Sizes | None = None  # bytes that really went down, where clients are really apart

    def rows(self) -> list[Reply]:
        """Each client's part."""
        m = len(self.clients)
        down = [None] * m if self.down is None else _apart(self.down, m)
        parts = (
            _cut(self.clients), _apart(self.uploads, m), _apart(self.memory, m), _apart(self.sizes, m),
            _cut(self.loss), _cut(self.K), _cut(self.lr), down,
        )  # fmt: skip
        return [Reply(*row) for row in zip(*parts, strict=True)]

    @staticmethod
    def join(parts: list[Reply]) -> Reply:
        """Several replies as one, in request."""
        first = parts[0]
        return Reply(
            np.concatenate([p.clients for p in parts]),
            {k: torch.cat([p.uploads[k] for p in parts]) for k in first.uploads},
            {k: torch.cat([p.memory[k] for p in parts]) for k in first.memory},
            {k: np.concatenate([p.sizes[k] for p in parts]) for k in first.sizes},
            torch.cat([p.loss for p in parts]), torch.cat([p.K for p in parts]),
            torch.cat([p.lr for p in parts]),
            None if first.down is None else {k: np.concatenate([(p.down or {})[k] for p in parts]) for k in first.down},
        )  # fmt: skip


def _cut(v: Any) -> Sequence[Any]:
    """Rows of a tensor, which torch cuts in one call, or of an array."""
    return torch.split(v, 1) if isinstance(v, Tensor) else [v[i : i + 1] for i in range(len(v))]


def _apart(named: dict[str, Any], m: int) -> list[dict[str, Any]]:
    rows = zip(*map(_cut, named.values()), strict=True)
    return [dict(zip(named, row)) for row in rows] if named else [{} for _ in range(m)]


class Engine(Protocol):
    """Runs clients. Opened once per run; the same orders always give the same replies, in the request of the clients."""

    def open(self, setup: Setup) -> None: ...

    def train(self, orders: Orders) -> Iterator[Reply]: ...

    def evaluate(self, x: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]: ...

    def describe(self) -> str: ...

    def close(self) -> None: ...
