"""Worker processes, for clients of a pool, whole runs and files to read alike: forked, of one torch thread each."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import signal
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from fedbraid import errors
from fedbraid.core.check import integer
from fedbraid.core.device import available_cores
from fedbraid.errors import ConfigError, EngineError, FedbraidError

Ask = Callable[[Any], Any]  # a job sends a message to the parent and gets its answer
Job = Callable[[Any, Ask], Any]

_PARENT_ENDS: set[Connection] = set()  # this process's ends of all pipes, which no worker may keep open


@dataclass(frozen=True)
class Failure:
    """An error of ours that ended a job: its class and what it says."""

    kind: str
    message: str

    def error(self) -> FedbraidError:
        """The error, to be raised here."""
        made: FedbraidError = FedbraidError.__new__(getattr(errors, self.kind, FedbraidError))
        made.args = (self.message,)
        return made


@dataclass
class WorkerPool:
    """`count` processes, by default one for each core, which all do the same job on different things.

    They are hired when there is work for them, or all at once by `hire`, and dismissed by `close`.
    """

    job: Job
    count: int | None = None
    workers: dict[Connection, Any] = field(default_factory=dict, repr=False)  # pipe -> process
    pending: Counter[Connection] = field(default_factory=Counter, repr=False)  # posted and not answered yet

    def __post_init__(self) -> None:
        self.count = available_cores() if self.count is None else self.count
        integer("jobs", self.count, why="runs nothing")
        if "fork" not in mp.get_all_start_methods():
            raise ConfigError(
                "worker processes need fork, which this system lacks; use engine='in_process', or Linux or macOS"
            )

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def processes(self) -> list[Any]:
        return list(self.workers.values())

    def start_workers(self, count: int | None = None) -> None:
        """Start processes until there are so many, by default all; each is a fork of this process."""
        ctx = mp.get_context("fork")
        while len(self.workers) < (self.count or 0 if count is None else count):
            parent_end, worker_end = ctx.Pipe()
            _PARENT_ENDS.add(parent_end)
            process = ctx.Process(target=_worker_main, args=(self.job, worker_end), daemon=True)
            with started_ignoring_sigint():
                process.start()
            worker_end.close()
            self.workers[parent_end] = process

    def run(
        self,
        next_task: Callable[[], Any],
        done: Callable[[Any, Any], None],
        on_message: Callable[[Any, Any], Any] = lambda task, message: None,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        """Run tasks until none is left.

        `next_task` returns the next task or None, `on_message` answers a job's messages while it runs, and `done`
        takes its result, or its Failure if it raised a FedbraidError.
        """
        for task, message in self.results(next_task, on_message, idle):
            done(task, message)

    def results(
        self,
        next_task: Callable[[], Any],
        on_message: Callable[[Any, Any], Any] = lambda task, message: None,
        idle: Callable[[], None] = lambda: None,
        ahead: int = 1,
    ) -> Iterator[tuple[Any, Any]]:
        """(task, result) as they are done, until no task is left; a process has up to `ahead` tasks at a time."""
        given: dict[Connection, deque[Any]] = {pipe: deque() for pipe in self.workers}
        while True:
            while self._free(given, ahead) and (task := next_task()) is not None:
                pipe = self._least(given)
                self._send(pipe, task)
                given[pipe].append(task)
            busy = [pipe for pipe, tasks in given.items() if tasks]
            if not busy:
                return
            for ready in wait(busy, timeout=0.2):
                pipe = ready  # type: ignore[assignment]
                kind, message = self._receive(pipe)
                if kind == "ask":
                    self._send(pipe, on_message(given[pipe][0], message))
                    continue
                yield given[pipe].popleft(), message
            idle()

    def _free(self, given: dict[Connection, deque[Any]], ahead: int) -> bool:
        hires = len(self.workers) < (self.count or 0)
        return hires or any(len(tasks) < ahead for tasks in given.values())

    def _least(self, given: dict[Connection, deque[Any]]) -> Connection:
        """The process with the fewest tasks, a new one if all have some."""
        if len(self.workers) < (self.count or 0) and all(given.values()):
            self.start_workers(len(self.workers) + 1)
            given[list(self.workers)[-1]] = deque()
        return min(given, key=lambda pipe: len(given[pipe]))

    def post(self, task: Any) -> Connection:
        """Send a task to the process with the fewest; `answer` returns its results in the order of its tasks."""
        self.start_workers()
        pipe = min(self.workers, key=lambda p: self.pending[p])
        self._send(pipe, task)
        self.pending[pipe] += 1
        return pipe

    def ask_all(self, task: Callable[[int], Any]) -> list[Any]:
        """The results of one task for each process; no process may have pending tasks."""
        pipes = list(self.workers)
        for i, pipe in enumerate(pipes):
            self._send(pipe, task(i))
            self.pending[pipe] += 1
        return [self.answer(pipe) for pipe in pipes]

    def answer(self, pipe: Connection) -> Any:
        """The result of this process's oldest task; its FedbraidError is raised here."""
        _, result = self._receive(pipe)
        self.pending[pipe] -= 1
        if isinstance(result, Failure):
            raise result.error()
        return result

    def _send(self, pipe: Connection, message: Any) -> None:
        try:
            pipe.send(message)
        except OSError as error:
            raise self._death(pipe) from error

    def _receive(self, pipe: Connection) -> tuple[str, Any]:
        try:
            kind, content = pipe.recv()
        except (EOFError, OSError) as error:
            raise self._death(pipe) from error
        if kind == "crash":
            raise EngineError(content)
        return kind, content

    def _death(self, pipe: Connection) -> EngineError:
        process = self.workers[pipe]
        process.join(1)
        code = process.exitcode
        why = "killed, perhaps for lack of memory" if code is not None and code < 0 else f"exit code {code}"
        return EngineError(
            f"worker process {process.pid} died ({why}); what was committed is intact, resume the run or give the same"
            " command again"
        )

    def close(self) -> None:
        for pipe in self.workers:
            pipe.close()
            _PARENT_ENDS.discard(pipe)
        deadline = time.monotonic() + 2  # for all of them; unfinished tasks are done again
        for process in self.workers.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self.workers, self.pending = {}, Counter()


def prepare() -> None:
    """Import what vmap imports at its first use once here, instead of in every worker."""
    importlib.import_module("torch._dynamo")


def _worker_main(job: Job, pipe: Connection) -> None:
    """A worker: receives tasks, does the job and sends results until its pipe closes."""
    import torch

    ignore_sigint()
    torch.set_num_threads(1)
    for ours in _PARENT_ENDS:
        ours.close()
    _PARENT_ENDS.clear()

    def ask(message: Any) -> Any:
        try:
            pipe.send(("ask", message))
            return pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # the parent has ended; the last committed step is intact

    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer: tuple[str, Any] = ("done", job(task, ask))
        except FedbraidError as error:
            answer = ("done", Failure(type(error).__name__, str(error)))
        except BaseException:
            answer = ("crash", f"a worker process failed:\n{traceback.format_exc()}")
        try:
            pipe.send(answer)
        except OSError:
            os._exit(0)


# Ctrl-C at a terminal goes to all processes, and is the parent's affair ------------------------------


@contextmanager
def started_ignoring_sigint() -> Iterator[None]:
    """Start processes with SIGINT blocked, until they ignore it themselves."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def ignore_sigint() -> None:
    """Let this process, started by another one, hear no Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
