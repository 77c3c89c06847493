"""Threads that each hold a gradient of their own, for wide models: clients train side by side in one process."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from queue import SimpleQueue
from typing import TypeVar

from fedbraid.engines.native_backend import Native

P = TypeVar("P")
R = TypeVar("R")


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
