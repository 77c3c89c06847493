"""Clients in worker processes, one torch thread each; vectors pass through shared memory, never through pickle."""

from __future__ import annotations

import multiprocessing as mp
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.rule import Gradient, Vectors
from fedbraid.engines.blocks import check_counts, gradient
from fedbraid.engines.client import Reply, Setup, first_memory, visit
from fedbraid.errors import ConfigError, EngineError, FedbraidError

if TYPE_CHECKING:
    from fedbraid.engines.client import Order

SLOT_BYTES = 2**30  # about how much the shared rows may take, however large the cohort


@dataclass
class Pool:
    """`workers` forked processes (as many as there are cores by default), each taking blocks of clients."""

    workers: int | None = None
    backend: str = "auto"
    block: int | None = None

    def __post_init__(self) -> None:
        check_counts(workers=self.workers, block=self.block)

    def open(self, setup: Setup) -> None:
        if "fork" not in mp.get_all_start_methods():
            raise ConfigError("the pool engine needs fork, which this system lacks; use engine='in_process'")
        if setup.task.device.type != "cpu":
            raise ConfigError(
                f"the pool engine runs on the CPU, not on {setup.task.device}; use engine='in_process'"
            )
        count = self.workers or len(os.sched_getaffinity(0))
        self.setup, self.count = setup, count
        self.grad: Gradient = gradient(setup, self.backend, 1)
        self.shared = _Shared(setup, count)
        ctx = mp.get_context("fork")
        self.pipes: list[Connection] = []
        self.processes = []
        for _ in range(count):
            ours, theirs = ctx.Pipe()
            process = ctx.Process(
                target=_work, args=(setup, self.grad, self.shared, theirs, [*self.pipes, ours]), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def train(self, order: Order) -> Iterator[Reply]:
        self.shared.send(order.down)
        for lo in range(0, len(order.clients), self.shared.slots):
            at = slice(lo, lo + self.shared.slots)
            self.shared.write(0, {name: v[at] for name, v in order.memory.items()}, "memory")
            yield self._wave(order.clients[at], order.version)

    def _wave(self, clients: NDArray[np.int64], version: int) -> Reply:
        """As many clients as there are slots, handed out block by block to whoever is free."""
        each = self.block or (-(-len(clients) // self.count) if self.grad.vectorised else 1)
        todo = [(lo, min(lo + each, len(clients))) for lo in range(0, len(clients), each)]
        done: dict[int, Any] = {}
        busy: dict[Connection, int] = {}
        free = list(self.pipes)
        while todo or busy:
            while todo and free:
                pipe, (lo, hi) = free.pop(0), todo.pop(0)
                self._tell(pipe, (version, clients[lo:hi].tolist(), lo))
                busy[pipe] = lo
            for ready in wait(list(busy)):
                pipe = ready  # type: ignore[assignment]
                done[busy.pop(pipe)] = self._hear(pipe)
                free.append(pipe)
        facts = [done[lo] for lo in sorted(done)]
        m = len(clients)
        return Reply(
            clients,
            self.shared.read(0, m, "uploads"),
            self.shared.read(0, m, "memory"),
            {
                name: np.concatenate([np.array(f["sizes"][name], np.int64) for f in facts])
                for name in facts[0]["sizes"]
            },
            torch.tensor([v for f in facts for v in f["loss"]]),
            torch.tensor([[v] for f in facts for v in f["K"]]),
            torch.full((m, 1), facts[-1]["lr"], dtype=torch.float64),
        )

    def _tell(self, pipe: Connection, message: Any) -> None:
        try:
            pipe.send(message)
        except OSError as error:
            raise self._death(pipe) from error

    def _hear(self, pipe: Connection) -> Any:
        try:
            answer = pipe.recv()
        except (EOFError, OSError) as error:
            raise self._death(pipe) from error
        if isinstance(answer, FedbraidError):
            raise answer
        if isinstance(answer, str):
            raise EngineError(answer)
        return answer

    def _death(self, pipe: Connection) -> EngineError:
        process = self.processes[self.pipes.index(pipe)]
        process.join(1)
        code = process.exitcode
        why = "killed, perhaps for lack of memory" if code is not None and code < 0 else f"exit code {code}"
        return EngineError(
            f"worker process {process.pid} died ({why}); the last committed step is intact, resume the run"
        )

    def evaluate(self, x: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.grad.evaluate(x, inputs, targets)

    def describe(self) -> str:
        return f"pool(workers={self.count}, backend={self.grad.name!r}, block={self.block!r})"

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()


class _Shared:
    """Vectors in memory that all processes see: what is sent down, and one row a client for what comes back."""

    def __init__(self, setup: Setup, workers: int) -> None:
        layout, algorithm = setup.task.layout, setup.algorithm
        uploads = {name: torch.zeros(width) for name, width in algorithm.widths(layout).items()}
        names = {"uploads": uploads, "memory": first_memory(setup)}
        row = sum(v.nbytes for vectors in names.values() for v in vectors.values())
        self.slots = max(workers, min(setup.cohort, SLOT_BYTES // max(row, 1)))
        self.down = {name: _shared(d.size(layout)) for name, d in algorithm.downloads.items()}
        self.rows = {
            kind: {name: _shared(self.slots, v.numel(), dtype=v.dtype) for name, v in vectors.items()}
            for kind, vectors in names.items()
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

    def view(self, lo: int, hi: int, kind: str) -> Vectors:
        return {name: rows[lo:hi] for name, rows in self.rows[kind].items()}


def _shared(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    shared: Tensor = torch.zeros(shape, dtype=dtype).share_memory_()  # type: ignore[no-untyped-call]
    return shared


def _work(setup: Setup, grad: Gradient, shared: _Shared, pipe: Connection, others: list[Connection]) -> None:
    """A worker's life: take a block, train it, write its rows, say so."""
    from fedbraid.engines.client import Order

    torch.set_num_threads(1)
    for other in others:
        other.close()  # so that the parent's end alone keeps a pipe open
    while True:
        try:
            version, clients, lo = pipe.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            os._exit(0)
        try:
            memory = {k: v.clone() for k, v in shared.view(lo, lo + len(clients), "memory").items()}
            reply = visit(setup, grad, Order(version, np.array(clients, np.int64), shared.down, memory))
            shared.write(lo, reply.uploads, "uploads")
            shared.write(lo, reply.memory, "memory")
            sizes = {name: v.tolist() for name, v in reply.sizes.items()}
            pipe.send(
                {
                    "sizes": sizes,
                    "loss": reply.loss.tolist(),
                    "K": reply.K.squeeze(1).tolist(),
                    "lr": float(reply.lr[0]),
                }
            )
        except KeyboardInterrupt:
            os._exit(0)
        except FedbraidError as error:
            pipe.send(error)
        except BaseException as error:
            what = f"{type(error).__name__}: {error}"
            pipe.send(
                f"training clients {clients} failed in a worker process ({what}); mend the model or the loss."
                f" What the worker saw:\n{traceback.format_exc()}"
            )
