"""Clients in this process: vectorized blocks where the gradient can, one after the other where not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedbraid.core.check import integer
from fedbraid.core.gather import WIDE_ROW
from fedbraid.core.local_training import Gradient
from fedbraid.data import tree
from fedbraid.data.tree import Tree
from fedbraid.engines.backends import PRECISIONS, planned
from fedbraid.engines.choice import EnginePlan
from fedbraid.engines.client_update import client_update
from fedbraid.engines.engine import Orders, Reply, Setup, TrainRequest
from fedbraid.engines.gradient_threads import GradientThreads
from fedbraid.engines.native_backend import Native
from fedbraid.errors import unknown

BLOCK_BYTES = 9 * 2**20  # about how much a block's vectors may take


@dataclass
class InProcess:
    """Runs blocks of `block` clients here; `backend` is "auto", "native", "vmap" or "loop"."""

    block: int | None = None
    backend: str = "auto"
    threads: int | None = None
    precision: str = "float32"  # or "bfloat16" or "float16", of products in the forward and backward pass
    runs: int = field(default=1, compare=False, repr=False)  # that one command makes of this model
    plan: EnginePlan | None = field(
        default=None, compare=False, repr=False
    )  # why this engine, where it was selected
    compiled: Gradient | None = field(
        default=None, compare=False, repr=False
    )  # its gradient, where there is one already

    def __post_init__(self) -> None:
        check_counts(block=self.block, threads=self.threads)
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)

    def open(self, setup: Setup) -> None:
        self.setup = setup = replace(setup, runs=self.runs)
        self.torch_threads = torch.get_num_threads()
        threads, precision = self.threads or 0, PRECISIONS[self.precision]
        if self.compiled is not None:
            self.grad = self.compiled
        else:
            self.grad, plan = planned(setup, "in_process", self.backend, threads, threads, precision)
            self.plan = plan or self.plan
        if self.grad.name == "native":  # its threads do the work; torch's would only compete
            torch.set_num_threads(1)
        wide = setup.task.full_layout.size >= WIDE_ROW and setup.cohort > 1
        self.gradient_threads = GradientThreads(self.grad) if wide and isinstance(self.grad, Native) else None
        threads = self.gradient_threads.count if self.gradient_threads else 1
        self.size = self.block or block_limit(setup, self.grad, threads)

    def train(self, orders: Orders) -> Iterator[Reply]:
        self.setup.task.prefetch(orders.clients, orders.version, self.setup.seed, orders.after)
        workers = self.gradient_threads.count if self.gradient_threads else 1
        ends = np.cumsum([0, *block_sizes(len(orders.clients), workers, self.size)])
        requests = (orders.subset(slice(lo, hi)) for lo, hi in pairwise(ends))
        if self.gradient_threads:
            return self.gradient_threads.map(
                lambda grad, request: client_update(self.setup, grad, request), requests
            )
        if self.setup.task.device.type == "cuda":
            return on_streams(
                lambda request: client_update(self.setup, self.grad, request),
                requests,
                self.setup.task.device,
            )
        return (client_update(self.setup, self.grad, request) for request in requests)

    def evaluate(self, x: Tensor, inputs: Tree, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.gradient_threads is None:
            return self.grad.evaluate(x, inputs, targets)
        rows = torch.arange(len(targets)).tensor_split(self.gradient_threads.count)
        chunks = ((tree.take(inputs, at), targets[at]) for at in map(_slice, rows))
        found = list(self.gradient_threads.map(lambda grad, chunk: grad.evaluate(x, *chunk), chunks))
        classes = [c for _, c in found if c is not None]
        return torch.cat([losses for losses, _ in found]), torch.cat(classes) if classes else None

    def describe(self) -> str:
        precision = "" if self.precision == "float32" else f", precision={self.precision!r}"
        return f"in_process(block={self.block!r}, backend={self.grad.name!r}, threads={self.threads!r}{precision})"

    def close(self) -> None:
        if self.gradient_threads:
            self.gradient_threads.close()
        torch.set_num_threads(self.torch_threads)


def block_limit(setup: Setup, grad: Gradient, threads: int = 1) -> int:
    """The largest number of clients in one call whose vectors stay within `BLOCK_BYTES`."""
    width = 4 * setup.task.full_layout.size * 6 * threads
    return max(1, min(1024, BLOCK_BYTES // width)) if grad.vectorized else 1


def block_sizes(clients: int, workers: int, most: int) -> list[int]:
    """The sizes of blocks, at most `most`; small ones first, to be gathered while the others train.

    >>> block_sizes(5, workers=2, most=1024), block_sizes(10, workers=2, most=3), block_sizes(7, workers=1, most=4)
    ([2, 3], [2, 2, 3, 3], [3, 4])
    """
    blocks = min(clients, workers * -(-clients // (workers * most)))
    return [(clients + i) // blocks for i in range(blocks)]


def on_streams(
    work: Callable[[TrainRequest], Reply], requests: Iterable[TrainRequest], device: torch.device
) -> Iterator[Reply]:
    """Blocks on two streams of a GPU in turn: one is queued while the other computes, without waiting for either."""
    streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
    waiting: deque[tuple[Reply, torch.cuda.Stream]] = deque()
    for k, request in enumerate(requests):
        stream = streams[k % 2]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            waiting.append((work(request), stream))
        if len(waiting) == len(streams):
            yield _joined(*waiting.popleft(), device)
    while waiting:
        yield _joined(*waiting.popleft(), device)


def _joined(reply: Reply, stream: torch.cuda.Stream, device: torch.device) -> Reply:
    """A reply that the current stream may read, after the other stream has computed it."""
    now = torch.cuda.current_stream(device)
    now.wait_stream(stream)
    for tensor in (*reply.uploads.values(), *reply.client_state.values(), reply.loss):
        if tensor.is_cuda:
            tensor.record_stream(now)
    return reply


def _slice(rows: Tensor) -> slice:
    return slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0)


def check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None:
            integer(name, value)
