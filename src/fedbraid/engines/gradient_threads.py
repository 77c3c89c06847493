"""Threads with a gradient each, for wide models: clients train in parallel in one process."""

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
    """Make glibc retain up to 32 MiB of freed memory in one arena for all threads, because otherwise every vector of a
    wide model needs new pages at every participation. Memory that is free now is returned to the system.
    """
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-8, 1)  # M_ARENA_MAX
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, the largest that glibc takes
        libc.mallopt(-1, 2**25)  # M_TRIM_THRESHOLD
        gc.collect()
        libc.malloc_trim(0)


class GradientThreads:
    """Threads with a gradient each, which run in parallel because native code and torch release the interpreter."""

    def __init__(self, grad: Native) -> None:
        self.count = grad.threads
        self._free: SimpleQueue[Native] = SimpleQueue()
        for _ in range(self.count):
            self._free.put(grad.alone())
        self._pool = ThreadPoolExecutor(self.count, "fedbraid")
        keep_what_is_freed()

    def map(self, work: Callable[[Native, P], R], jobs: Iterable[P]) -> Iterator[R]:
        """The results in the order of the jobs, at most one job a thread ahead of the consumer."""
        jobs = iter(jobs)
        first = list(islice(jobs, self.count))  # all of them before the threads contend for the interpreter
        waiting = deque(self._pool.submit(self._run, work, job) for job in first)
        for job in jobs:
            yield waiting.popleft().result()
            waiting.append(self._pool.submit(self._run, work, job))
        while waiting:
            yield waiting.popleft().result()

    def _run(self, work: Callable[[Native, P], R], job: P) -> R:
        grad = self._free.get()
        try:
            return work(grad, job)
        finally:
            self._free.put(grad)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
