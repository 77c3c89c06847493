"""Clients in this process: vectorised blocks where the gradient can, one after the other where not."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedbraid.engines.auto import WORTH, expected_seconds, guess
from fedbraid.engines.client import Reply, Setup, visit
from fedbraid.engines.gradients import Loop, Vmap
from fedbraid.errors import ConfigError, EngineError, unknown
from fedbraid.rule import Gradient
from fedbraid.schedule import whole

if TYPE_CHECKING:
    from fedbraid.data.task import Task
    from fedbraid.loop import Order

log = logging.getLogger("fedbraid")

BLOCK_BYTES = 2**26  # about how much a block's vectors may take


@dataclass
class InProcess:
    """Runs blocks of `block` clients here; `backend` is "auto", "native", "vmap" or "loop"."""

    block: int | None = None
    backend: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        check_counts(block=self.block, threads=self.threads)

    def open(self, setup: Setup) -> None:
        self.setup = setup
        self.torch_threads = torch.get_num_threads()
        self.grad = gradient(setup, self.backend, self.threads or 0)
        if self.grad.name == "native":  # which has threads of its own; torch is left with small things
            torch.set_num_threads(1)
        width = 4 * setup.task.layout.size * 6
        self.size = self.block or (max(1, min(1024, BLOCK_BYTES // width)) if self.grad.vectorised else 1)

    def train(self, order: Order) -> Iterator[Reply]:
        for lo in range(0, len(order.clients), self.size):
            at = slice(lo, lo + self.size)
            memory = {name: v[at] for name, v in order.memory.items()}
            yield visit(
                self.setup, self.grad, dataclasses.replace(order, clients=order.clients[at], memory=memory)
            )

    def evaluate(self, x: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.grad.evaluate(x, inputs, targets)

    def describe(self) -> str:
        return f"in_process(block={self.block!r}, backend={self.grad.name!r}, threads={self.threads!r})"

    def close(self) -> None:
        torch.set_num_threads(self.torch_threads)


def check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None:
            whole(name, value)


def gradient(setup: Setup, backend: str, threads: int = 0) -> Gradient:
    """The gradient function of this name; "auto" compiles a native one where there is enough to do."""
    task = setup.task
    if backend not in ("auto", "native", "vmap", "loop"):
        raise unknown("backend", backend, ["auto", "native", "vmap", "loop"])
    if backend == "auto" and expected_seconds(task, setup.work, setup.visits) < WORTH:
        backend = guess(task)
    if backend in ("auto", "native"):
        native = _native(task, threads, required=backend == "native")
        if native is not None:
            return native
    if backend == "vmap" and task.stochastic:
        raise ConfigError(
            "the model draws random numbers (dropout), which vmap cannot count; use backend='loop'"
        )
    if backend == "vmap" and task.layout.buffers is not None:
        raise ConfigError("vmap cannot follow running statistics (BatchNorm); use backend='loop'")
    return Vmap(task) if backend == "vmap" or (backend == "auto" and Vmap.suits(task)) else Loop(task)


def _native(task: Task, threads: int, required: bool) -> Gradient | None:
    from fedbraid.engines.native import Native

    why = "the task is not on the CPU" if task.inputs.device != torch.device("cpu") else Native.supports(task)
    if why is None:
        try:
            return Native(task, threads)
        except EngineError as error:
            why = str(error)
    if required:
        raise EngineError(f"the native backend cannot run this task: {why}")
    log.info("native gradients are off: %s", why)
    return None
