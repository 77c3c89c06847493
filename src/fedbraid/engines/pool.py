"""Clients in worker processes, one torch thread each; vectors pass through shared memory, never through pickle."""

from __future__ import annotations

import math
import mmap
import pickle
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbraid.core.context import Participation, Tree, Vectors
from fedbraid.core.exact_sum import ExactSum
from fedbraid.engines.backends import planned
from fedbraid.engines.choice import EnginePlan
from fedbraid.engines.client_update import client_update, first_client_state
from fedbraid.engines.engine import Orders, Reply, Setup, TrainRequest, participate
from fedbraid.engines.folding import Folder, merged, should_fold
from fedbraid.engines.in_process import block_limit, check_counts
from fedbraid.errors import ConfigError, EngineError, FedbraidError
from fedbraid.workers import Ask, Failure, WorkerPool

MESSAGES = 16  # to each worker in a wave at the least, where there are so many blocks: small clients cost less than a message
AHEAD = 2  # messages that a worker has at a time, so that it waits for nobody
LEVELS = 2  # of a worker's sums that lie in shared memory; more are rare, and go by word
Fold = tuple[int, int]  # a call of `train`, and the server step that it folds for
SLOT_BYTES = 2**30  # about how much the shared rows may take, however large the cohort


@dataclass
class Pool:
    """`workers` forked processes (as many as there are cores by default), each taking blocks of clients."""

    workers: int | None = None
    backend: str = "auto"
    block: int | None = None
    plan: EnginePlan | None = field(
        default=None, compare=False, repr=False
    )  # why this engine, where it was selected

    def __post_init__(self) -> None:
        check_counts(workers=self.workers, block=self.block)
        self.calls = 0  # of `train`: workers begin a new accumulator with each
        self.fold: Fold | None = None  # what a worker's folder is for

    def open(self, setup: Setup) -> None:
        if setup.task.device.type != "cpu":
            raise ConfigError(
                f"the pool engine runs on the CPU, not on {setup.task.device}; use engine='in_process'"
            )
        self.setup, self.workers_pool = setup, WorkerPool(self._train, self.workers)
        self.count = self.workers_pool.count or 0
        self.grad, plan = planned(setup, "pool", self.backend, self.count, 1)
        self.plan = plan or self.plan
        self.shared = _Shared(setup, self.count)
        self.workers_pool.start_workers()
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)  # idle threads would spin on a worker's core

    def train(self, orders: Orders) -> Iterator[Reply]:
        self.shared.send(orders.download)
        self.calls += 1
        fold: Fold | None = None
        if orders.folds_at is not None and should_fold(
            len(orders.clients), self.count, len(orders.download["x"])
        ):
            fold = (self.calls, orders.folds_at)
        slots, last = self.shared.slots if fold is None else self.shared.state_slots, None
        for lo in range(0, len(orders.clients), slots):
            some = orders.subset(slice(lo, lo + slots))
            self.shared.write(0, some.client_state, "memory")
            for reply in self._wave(some.participation, fold):
                if last is not None:
                    yield last
                last = reply
        if last is not None:
            yield last if fold is None else replace(last, folded=self._merged(fold, orders.download["x"]))

    def _merged(self, fold: Fold, x: Tensor) -> Tree:
        """The accumulators of all workers, merged."""
        found = self.workers_pool.ask_all(lambda worker: (fold, worker))
        accumulators = [
            self.shared.take(worker, *answer) for worker, answer in enumerate(found) if answer is not None
        ]
        return merged(self.setup.algorithm, accumulators, x)

    def _wave(self, participation: Participation, fold: Fold | None) -> Iterator[Reply]:
        """Train as many clients as there are slots, block by block in free workers.

        Replies are in the clients' order, and are gathered while others train.
        """
        clients, version = participation.clients, int(participation.version[0])
        each = self.block or (-(-len(clients) // self.count) if self.grad.vectorized else 1)
        if fold is not None:  # folded blocks may have the fastest size
            each = self.block or min(each, block_limit(self.setup, self.grad))
        some = each * max(1, len(clients) // (each * self.count * MESSAGES))
        todo = iter([(lo, min(lo + some, len(clients))) for lo in range(0, len(clients), some)])
        early: dict[int, Any] = {}
        at = 0

        def next_task() -> Any:
            lo, hi = next(todo, (0, 0))
            return (version, clients[lo:hi].tolist(), lo, each, fold) if hi else None

        for block, facts_of_blocks in self.workers_pool.results(next_task, ahead=AHEAD):
            if isinstance(facts_of_blocks, Failure):
                raise facts_of_blocks.error()
            early[block[2]] = facts_of_blocks
            while at in early:
                facts = early.pop(at)
                who = participation[at : at + sum(len(f["loss"]) for f in facts)]
                yield self._reply(who, at, facts)
                at += len(who)

    def _reply(self, who: Participation, lo: int, facts: list[Any]) -> Reply:
        hi = lo + len(who)
        is_folded = "norms" in facts[0]
        return Reply(
            who,
            {} if is_folded else self.shared.read(lo, hi, "uploads"),
            self.shared.read(lo, hi, "memory"),
            {
                name: np.concatenate([np.array(f["sizes"][name], np.int64) for f in facts])
                for name in facts[0]["sizes"]
            },
            torch.tensor([v for f in facts for v in f["loss"]]),
            norms=torch.tensor([v for f in facts for v in f["norms"]]) if is_folded else None,
        )

    def _train(self, order: Any, ask: Ask) -> Any:
        """A worker's job: train clients block by block and write their rows; the other facts are returned."""
        if len(order) == 2:
            return self._hand_over(*order)
        version, clients, lo, each, fold = order
        if fold is not None and fold != self.fold:
            self.fold, self.folder = fold, Folder(self.setup.algorithm, self.shared.down, fold[1])
        return [
            self._block(version, clients[k : k + each], lo + k, fold is not None)
            for k in range(0, len(clients), each)
        ]

    def _block(self, version: int, clients: list[int], lo: int, folds: bool) -> Any:
        memory = {k: v.clone() for k, v in self.shared.view(lo, lo + len(clients), "memory").items()}
        try:
            who = participate(self.setup, np.array(clients, np.int64), version)
            reply = client_update(self.setup, self.grad, TrainRequest(who, self.shared.down, memory))
            if folds:
                reply = self.folder.add(reply)
        except FedbraidError:
            raise
        except Exception as error:
            raise EngineError(
                f"training clients {clients} failed in a worker process ({type(error).__name__}: {error}); fix the model or"
                f" the loss. The worker's traceback:\n{traceback.format_exc()}"
            ) from error
        self.shared.write(lo, reply.uploads, "uploads")
        self.shared.write(lo, reply.client_state, "memory")
        return {
            "sizes": {name: v.tolist() for name, v in reply.sizes.items()},
            "loss": reply.loss.tolist(),
            **({} if reply.norms is None else {"norms": reply.norms.tolist()}),
        }

    def _hand_over(self, fold: Fold, worker: int) -> Any:
        """A worker's accumulator, its vectors in shared memory; None if it has trained no client."""
        return self.shared.lay(worker, self.folder.acc) if fold == self.fold else None

    def evaluate(self, x: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        torch.set_num_threads(self.threads)
        try:
            return self.grad.evaluate(x, inputs, targets)
        finally:
            torch.set_num_threads(1)

    def describe(self) -> str:
        return f"pool(workers={self.count}, backend={self.grad.name!r}, block={self.block!r})"

    def close(self) -> None:
        self.workers_pool.close()
        torch.set_num_threads(self.threads)


class _Shared:
    """Vectors in shared memory: the broadcast, and one row a client for its upload and state."""

    def __init__(self, setup: Setup, workers: int) -> None:
        layout, algorithm = setup.task.layout, setup.algorithm
        uploads = {name: torch.zeros(width) for name, width in algorithm.widths(layout).items()}
        names = {"uploads": uploads, "memory": first_client_state(setup)}
        rows = {kind: sum(v.nbytes for v in vectors.values()) for kind, vectors in names.items()}
        self.slots, self.state_slots = (
            max(workers, min(setup.cohort, SLOT_BYTES // max(row, 1)))
            for row in (sum(rows.values()), rows["memory"])
        )
        self.down = {name: _shared(d.size(layout)) for name, d in algorithm.downloads.items()}
        self.rows = {
            kind: {name: _shared(slots, v.numel(), dtype=v.dtype) for name, v in vectors.items()}
            for (kind, vectors), slots in zip(names.items(), (self.slots, self.state_slots), strict=True)
        }
        folds = not algorithm.gather.traits().needs_every_upload
        self.sums = {
            name: _shared(workers, LEVELS, d.size(layout), dtype=torch.float64)
            for name, d in (algorithm.gathered.items() if folds else ())
        }
        self._last: Vectors = {}

    def send(self, down: Vectors) -> None:
        if self._last is not down:
            for name, v in down.items():
                self.down[name].copy_(v)
            self._last = down

    def write(self, lo: int, vectors: Vectors, kind: str) -> None:
        for name, v in vectors.items():
            self.rows[kind][name][lo : lo + len(v)] = v

    def read(self, lo: int, hi: int, kind: str) -> Vectors:
        return {name: rows[lo:hi].clone() for name, rows in self.rows[kind].items()}

    def lay(self, worker: int, acc: Tree) -> tuple[bytes, list[tuple[str, int]]]:
        """(an accumulator without the levels of sums that it leaves in shared memory, these by name)."""
        laid = []
        for name, total in acc.vectors.items():
            if isinstance(total, ExactSum):
                for row, j in zip(self.sums[name][worker], sorted(total.levels, reverse=True), strict=False):
                    row.copy_(total.levels.pop(j))
                    laid.append((name, j))
        return pickle.dumps(acc), laid

    def take(self, worker: int, rest: bytes, laid: list[tuple[str, int]]) -> Tree:
        """The accumulator that a worker left, borrowed."""
        acc, rows = pickle.loads(rest), {name: iter(each[worker]) for name, each in self.sums.items()}
        for name, j in laid:
            acc.vectors[name].levels[j] = next(rows[name])
        return acc

    def view(self, lo: int, hi: int, kind: str) -> Vectors:
        return {name: rows[lo:hi] for name, rows in self.rows[kind].items()}


def _shared(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros that forked processes see too; no file stands behind them, so neither a full disk nor a small /dev/shm matters."""
    count = math.prod(shape)
    if not count:
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, count * dtype.itemsize)
    except OSError as error:
        raise EngineError(
            f"the pool cannot share {count * dtype.itemsize / 2**20:,.0f} MB between its processes ({error.strerror}); use"
            " engine='in_process'"
        ) from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)
