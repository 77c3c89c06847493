"""Clients in this process: vectorised blocks where the gradient can, one after the other where not."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, pairwise
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fedbraid.core.check import integer
from fedbraid.core.gather import WIDE_ROW
from fedbraid.core.rule import ExamplePrivacy, Gradient
from fedbraid.data import tree
from fedbraid.data.tree import Tree
from fedbraid.engines.auto import WORTH, expected_seconds, faster, guess, hands, note_compiled
from fedbraid.engines.autograd import LoopGradient, VmapGradient
from fedbraid.engines.client_update import Reply, Setup, client_update
from fedbraid.engines.native import Native
from fedbraid.engines.per_example import per_example_gradient
from fedbraid.errors import ConfigError, EngineError, unknown

if TYPE_CHECKING:
    from fedbraid.data.task import Task
    from fedbraid.engines.client_update import Orders, TrainRequest

log = logging.getLogger("fedbraid")

P = TypeVar("P")
R = TypeVar("R")

BLOCK_BYTES = 9 * 2**20  # about how much a block's vectors may take


@dataclass
class InProcess:
    """Runs blocks of `block` clients here; `backend` is "auto", "native", "vmap" or "loop"."""

    block: int | None = None
    backend: str = "auto"
    threads: int | None = None
    precision: str = "float32"  # or "bfloat16" or "float16", of products in the forward and backward pass

    def __post_init__(self) -> None:
        check_counts(block=self.block, threads=self.threads)
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)

    def open(self, setup: Setup) -> None:
        self.setup = setup
        self.torch_threads = torch.get_num_threads()
        self.grad = gradient(setup, self.backend, self.threads or 0, PRECISIONS[self.precision])
        if self.grad.name == "native":  # which has threads of its own; torch is left with small things
            torch.set_num_threads(1)
        wide = setup.task.full_layout.size >= WIDE_ROW and setup.cohort > 1
        self.hands = GradientThreads(self.grad) if wide and isinstance(self.grad, Native) else None
        width = 4 * setup.task.full_layout.size * 6 * (self.hands.count if self.hands else 1)
        self.size = self.block or (max(1, min(1024, BLOCK_BYTES // width)) if self.grad.vectorized else 1)

    def train(self, orders: Orders) -> Iterator[Reply]:
        self.setup.task.ahead(orders.clients, orders.version, self.setup.seed, orders.after)
        hands = self.hands.count if self.hands else 1
        ends = np.cumsum([0, *shares(len(orders.clients), hands, self.size)])
        parts = (orders.part(slice(lo, hi)) for lo, hi in pairwise(ends))
        if self.hands:
            return self.hands.map(lambda grad, part: client_update(self.setup, grad, part), parts)
        if self.setup.task.device.type == "cuda":
            return on_streams(
                lambda part: client_update(self.setup, self.grad, part), parts, self.setup.task.device
            )
        return (client_update(self.setup, self.grad, part) for part in parts)

    def evaluate(self, x: Tensor, inputs: Tree, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.hands is None:
            return self.grad.evaluate(x, inputs, targets)
        rows = torch.arange(len(targets)).tensor_split(self.hands.count)
        shares = ((tree.take(inputs, at), targets[at]) for at in map(_slice, rows))
        found = list(self.hands.map(lambda grad, share: grad.evaluate(x, *share), shares))
        classes = [c for _, c in found if c is not None]
        return torch.cat([losses for losses, _ in found]), torch.cat(classes) if classes else None

    def describe(self) -> str:
        precision = "" if self.precision == "float32" else f", precision={self.precision!r}"
        return f"in_process(block={self.block!r}, backend={self.grad.name!r}, threads={self.threads!r}{precision})"

    def close(self) -> None:
        if self.hands:
            self.hands.close()
        torch.set_num_threads(self.torch_threads)


def shares(clients: int, hands: int, most: int) -> list[int]:
    """How many clients each block takes, at most so many; small ones first, to be gathered while the others train.

    >>> shares(5, hands=2, most=1024), shares(10, hands=2, most=3), shares(7, hands=1, most=4)
    ([2, 3], [2, 2, 3, 3], [3, 4])
    """
    blocks = min(clients, hands * -(-clients // (hands * most)))
    return [(clients + i) // blocks for i in range(blocks)]


def on_streams(
    work: Callable[[TrainRequest], Reply], parts: Iterable[TrainRequest], device: torch.device
) -> Iterator[Reply]:
    """Blocks on two streams of a GPU in turn: one is asked for while another computes, and nobody waits for either."""
    streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
    waiting: deque[tuple[Reply, torch.cuda.Stream]] = deque()
    for k, part in enumerate(parts):
        stream = streams[k % 2]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            waiting.append((work(part), stream))
        if len(waiting) == len(streams):
            yield _joined(*waiting.popleft(), device)
    while waiting:
        yield _joined(*waiting.popleft(), device)


def _joined(reply: Reply, stream: torch.cuda.Stream, device: torch.device) -> Reply:
    """A reply that the current stream may read, once the other has made it."""
    now = torch.cuda.current_stream(device)
    now.wait_stream(stream)
    for tensor in (*reply.uploads.values(), *reply.memory.values(), reply.loss, reply.K, reply.lr):
        if tensor.is_cuda:
            tensor.record_stream(now)
    return reply


def _slice(rows: Tensor) -> slice:
    return slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0)


def keep_what_is_freed() -> None:
    """Tell glibc to keep up to 32 MiB of freed bytes, in one place for all threads, for the next block: handed back to the
    system, every vector of a wide model would be made of fresh pages at every visit. What following the model left goes.
    """
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-8, 1)  # M_ARENA_MAX
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, the largest that glibc takes
        libc.mallopt(-1, 2**25)  # M_TRIM_THRESHOLD
        gc.collect()
        libc.malloc_trim(0)


class GradientThreads:
    """Threads that each work with a gradient of their own: native code and torch leave the interpreter to others."""

    def __init__(self, grad: Native) -> None:
        self.count = grad.threads
        self._free: SimpleQueue[Native] = SimpleQueue()
        for _ in range(self.count):
            self._free.put(grad.alone())
        self._pool = ThreadPoolExecutor(self.count, "fedbraid")
        keep_what_is_freed()

    def map(self, work: Callable[[Native, P], R], parts: Iterable[P]) -> Iterator[R]:
        """The results in the order of the parts, at most one part a thread ahead of who takes them."""
        parts = iter(parts)
        first = list(islice(parts, self.count))  # all of them before threads ask for the interpreter
        waiting = deque(self._pool.submit(self._run, work, part) for part in first)
        for part in parts:
            yield waiting.popleft().result()
            waiting.append(self._pool.submit(self._run, work, part))
        while waiting:
            yield waiting.popleft().result()

    def _run(self, work: Callable[[Native, P], R], part: P) -> R:
        grad = self._free.get()
        try:
            return work(grad, part)
        finally:
            self._free.put(grad)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None:
            integer(name, value)


PRECISIONS: dict[str, torch.dtype | None] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def gradient(setup: Setup, backend: str, threads: int = 0, precision: torch.dtype | None = None) -> Gradient:
    """The gradient function of this name; "auto" compiles a native one where there is enough to do."""
    task = setup.task
    if precision is not None and backend == "native":
        raise ConfigError("native gradients are float32; use backend='loop' or 'vmap' for another precision")
    if backend not in ("auto", "native", "vmap", "loop"):
        raise unknown("backend", backend, ["auto", "native", "vmap", "loop"])
    if setup.algorithm.rule.examples() is not None and task.compares:
        raise ConfigError(
            "the loss looks at other models, whose outputs tell of other examples; use a loss of the outputs alone with"
            " unit='example'"
        )
    if setup.algorithm.rule.loop() is not None or task.compares:
        if backend in ("native", "vmap"):
            what = "the loss looks at other models" if task.compares else "the local loop is the user's own"
            raise ConfigError(f"{what}, which needs plain autograd; use backend='loop'")
        return LoopGradient(task, precision)
    own = setup.algorithm.rule.examples()
    if own is not None:
        return _private(setup, own, backend, threads, precision)
    if backend == "auto":
        seconds = expected_seconds(task, setup.work, setup.participations)
        large = seconds >= WORTH and precision is None
        found = faster(task, setup.work, seconds / hands(setup.cohort)) if large else None
        native = _native(task, threads, required=False) if found == "native" else None
        if native is not None:
            return native
        backend = "vmap" if found == "vmap" else guess(task, seconds)
    if backend == "native":
        return _native(task, threads)
    if backend == "vmap":
        _check_vmap(task)
        return VmapGradient(task, precision)
    return LoopGradient(task, precision)


def _check_vmap(task: Task) -> None:
    if task.stochastic:
        raise ConfigError(
            "the model draws random numbers (dropout), which vmap cannot count; use backend='loop'"
        )
    if task.ragged:
        raise ConfigError("vmap needs clients' samples to be of one length; use backend='loop'")
    if task.full_layout.buffers is not None:
        raise ConfigError("vmap cannot follow running statistics (BatchNorm); use backend='loop'")


def _private(
    setup: Setup, own: ExamplePrivacy, backend: str, threads: int, precision: torch.dtype | None
) -> Gradient:
    """The gradient function of this name that hides single examples."""
    task = setup.task
    for name, module in task.module().named_modules():
        if isinstance(module, _BatchNorm):
            raise ConfigError(
                f"model has {type(module).__name__} at {name!r}, which mixes the examples of a batch, so that no clip bounds"
                " what one of them does; use GroupNorm with unit='example'"
            )
    few = backend == "auto" and expected_seconds(task, setup.work, setup.participations) < WORTH
    if backend == "native" or (backend == "auto" and precision is None and not few):
        native = _native(task, threads, required=backend == "native", own=own)
        if native is not None:
            return native
    if backend == "vmap":
        _check_vmap(task)
    return per_example_gradient(own, task, backend, precision)


@overload
def _native(
    task: Task, threads: int, required: Literal[True] = True, own: ExamplePrivacy | None = None
) -> Native: ...
@overload
def _native(task: Task, threads: int, required: bool, own: ExamplePrivacy | None = None) -> Native | None: ...
def _native(
    task: Task, threads: int, required: bool = True, own: ExamplePrivacy | None = None
) -> Native | None:
    on_cpu = task.device == torch.device("cpu")
    why = Native.supports(task, own is not None) if on_cpu else "the task is not on the CPU"
    if why is None:
        try:
            native = Native(task, threads, examples=own)
            if own is None:
                note_compiled(task)
            return native
        except EngineError as error:
            why = str(error)
    if required:
        raise EngineError(f"the native backend cannot run this task: {why}")
    log.info("native gradients are off: %s", why)
    return None
