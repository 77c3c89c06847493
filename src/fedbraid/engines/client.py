"""The only client code: one visit of a block of clients, in whatever process or machine it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core import rng
from fedbraid.core.device import placed
from fedbraid.core.link import Sender, Sizes
from fedbraid.core.rule import Gradient, Local, Vectors, finished, train
from fedbraid.data.batches import Batch, Plan, augmenting

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
    visits: int = 0  # and in the whole run, to choose what is worth preparing


@dataclass
class Order:
    """What a block of clients is told: the version they train from and what they remember."""

    version: int
    clients: NDArray[np.int64]
    down: Vectors  # x and what else was sent, [d] each
    memory: Vectors  # [m, ·]


@dataclass
class Reply:
    """What came of an order: uploads as the server decodes them, and what the clients now remember."""

    clients: NDArray[np.int64]
    uploads: Vectors  # [m, ·]
    memory: Vectors  # [m, ·]
    sizes: Sizes  # bytes by name, [m] each
    loss: Tensor  # [m]
    K: Tensor  # [m, 1]
    lr: Tensor  # [m, 1], the rates they trained with, float64
    down: Sizes | None = None  # bytes that really went down, where clients are really apart

    def row(self, i: int) -> Reply:
        """One client's part."""
        at = slice(i, i + 1)
        return Reply(
            self.clients[at], {k: v[at] for k, v in self.uploads.items()}, {k: v[at] for k, v in self.memory.items()},
            {k: v[at] for k, v in self.sizes.items()}, self.loss[at], self.K[at], self.lr[at],
            None if self.down is None else {k: v[at] for k, v in self.down.items()},
        )  # fmt: skip

    @staticmethod
    def join(parts: list[Reply]) -> Reply:
        """Several replies as one, in order."""
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


class Engine(Protocol):
    """Runs clients. Opened once per run; the same order always gives the same reply."""

    def open(self, setup: Setup) -> None: ...

    def train(self, order: Order) -> Iterator[Reply]: ...

    def evaluate(self, x: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]: ...

    def describe(self) -> str: ...

    def close(self) -> None: ...


def visit(setup: Setup, grad: Gradient, order: Order, frames: dict[str, bytes] | None = None) -> Reply:
    """Train a block of clients from one version: finish, cross, remember.

    A real client, alone in its block, gives `frames` and gets there what it is to send.
    """
    task = setup.task.visited(order.clients, order.version, setup.seed)
    if task is not setup.task:
        setup = replace(setup, task=task)
    a, work = setup.algorithm, setup.work
    plan = Plan(task, work, order.clients, order.version, setup.seed)
    x = order.down["x"][None]
    K = placed(plan.K, x.device).to(x.dtype)[:, None]
    loc = Local(
        x=x,
        down={name: v[None] for name, v in order.down.items() if name != "x"},
        memory=order.memory,
        lr=work.rate(order.version),
        K=K,
        a=work.effective(K),
        n=placed(plan.n, x.device).to(x.dtype)[:, None],
        t=order.version,
        layout=task.layout,
        full_grad=full_gradient(setup, grad, order.clients, order.version),
    )
    with torch.random.fork_rng(devices=[], enabled=task.stochastic):
        y, s, loss = train(a.rule, grad, loc, plan, work)
        vectors = finished(a.rule, y, s, loc)
    who = Sender(order.clients, order.version, setup.seed, x, a.uploads, task.layout, frames, loc.down)
    sent = a.up.send(vectors, order.memory, who)
    memory = {**order.memory, **a.rule.remember(sent.received, s, loc), **sent.memory}
    rates = torch.full_like(K, loc.lr, dtype=torch.float64)
    return Reply(order.clients, sent.received, memory, sent.sizes, loss, K, rates)


def full_gradient(
    setup: Setup, grad: Gradient, clients: NDArray[np.int64], version: int
) -> Callable[[Tensor], Tensor]:
    """y -> the gradient of each client's whole local objective, decay included, in chunks that fit in memory.

    Samples are augmented as they are in training, in batches of 128 as FedGBO's authors have it.
    """
    task, seed, decay = setup.task, setup.seed, setup.work.penalty
    n, chunk = task.sizes[clients], 256 if task.augment is None else 128

    def at(y: Tensor) -> Tensor:
        y = y.expand(len(clients), -1).contiguous()
        total = torch.zeros_like(y)
        for lo in range(0, int(n.max()), chunk):
            column = np.arange(lo, min(lo + chunk, int(n.max())))
            inside = column < n[:, None]
            rows = task.row_ids(clients, np.minimum(column, n[:, None] - 1))
            weight = placed(inside.astype(np.float32), y.device)
            noise = rng.bits(seed, "full", version, clients, lo) >> np.uint64(1) if task.stochastic else None
            draws = augmenting(task, seed, "augment the whole", version, clients, lo, len(column))
            some = Batch(
                task.inputs, task.targets, rows, None if inside.all() else weight, task.augment, draws, noise
            )
            g, _ = grad(y, some)
            total += g * placed(inside.sum(1) / n, y.device).to(y.dtype)[:, None]
        return total + decay * y if decay else total

    return at
