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
        """Have so many processes, all by default, which then know what this one knows now."""
        ctx = mp.get_context("fork")
        while len(self.workers) < (self.count or 0 if count is None else count):
            ours, theirs = ctx.Pipe()
            _PARENT_ENDS.add(ours)
            process = ctx.Process(target=_worker_main, args=(self.job, theirs), daemon=True)
            with started_ignoring_sigint():
                process.start()
            theirs.close()
            self.workers[ours] = process

    def run(
        self,
        next_task: Callable[[], Any],
        done: Callable[[Any, Any], None],
        on_message: Callable[[Any, Any], Any] = lambda task, said: None,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        """Until nothing is left to do.

        `following` gives the next thing or None, `heard` answers what a job says while it runs, and `done`
        takes its result, or its Failure where it raised an error of ours.
        """
        for task, said in self.results(next_task, on_message, idle):
            done(task, said)

    def results(
        self,
        next_task: Callable[[], Any],
        on_message: Callable[[Any, Any], Any] = lambda task, said: None,
        idle: Callable[[], None] = lambda: None,
        ahead: int = 1,
    ) -> Iterator[tuple[Any, Any]]:
        """(thing, what came of it) as they are done, until nothing is left; a process has up to `ahead` of them at a time."""
        given: dict[Connection, deque[Any]] = {pipe: deque() for pipe in self.workers}
        while True:
            while self._free(given, ahead) and (task := next_task()) is not None:
                pipe = self._least(given)
                self._send(pipe, task)
                given[pipe].append(task)
            busy = [pipe for pipe, things in given.items() if things]
            if not busy:
                return
            for ready in wait(busy, timeout=0.2):
                pipe = ready  # type: ignore[assignment]
                kind, said = self._receive(pipe)
                if kind == "ask":
                    self._send(pipe, on_message(given[pipe][0], said))
                    continue
                yield given[pipe].popleft(), said
            idle()

    def _free(self, given: dict[Connection, deque[Any]], ahead: int) -> bool:
        hires = len(self.workers) < (self.count or 0)
        return hires or any(len(things) < ahead for things in given.values())

    def _least(self, given: dict[Connection, deque[Any]]) -> Connection:
        """Who has the least to do, a new one where all have some."""
        if len(self.workers) < (self.count or 0) and all(given.values()):
            self.start_workers(len(self.workers) + 1)
            given[list(self.workers)[-1]] = deque()
        return min(given, key=lambda pipe: len(given[pipe]))

    def post(self, task: Any) -> Connection:
        """Give a thing to whoever has least to do, for `answer` to tell what came of it, in the order given."""
        self.start_workers()
        pipe = min(self.workers, key=lambda p: self.pending[p])
        self._send(pipe, task)
        self.pending[pipe] += 1
        return pipe

    def ask_all(self, task: Callable[[int], Any]) -> list[Any]:
        """What comes of a thing for each process, which none of them has anything to do before."""
        pipes = list(self.workers)
        for i, pipe in enumerate(pipes):
            self._send(pipe, task(i))
            self.pending[pipe] += 1
        return [self.answer(pipe) for pipe in pipes]

    def answer(self, pipe: Connection) -> Any:
        """What came of the next thing that this one was given; an error of ours is raised here."""
        _, said = self._receive(pipe)
        self.pending[pipe] -= 1
        if isinstance(said, Failure):
            raise said.error()
        return said

    def _send(self, pipe: Connection, message: Any) -> None:
        try:
            pipe.send(message)
        except OSError as error:
            raise self._death(pipe) from error

    def _receive(self, pipe: Connection) -> tuple[str, Any]:
        try:
            kind, said = pipe.recv()
        except (EOFError, OSError) as error:
            raise self._death(pipe) from error
        if kind == "crash":
            raise EngineError(said)
        return kind, said

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
        deadline = time.monotonic() + 2  # for all of them: what they had not sent is done again
        for process in self.workers.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self.workers, self.pending = {}, Counter()


def prepare() -> None:
    """Import what vmap imports at its first use: once here, not in every worker."""
    importlib.import_module("torch._dynamo")


def _worker_main(job: Job, pipe: Connection) -> None:
    """A worker: take a thing, do the job, say what came of it; it ends when its pipe closes."""
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
            os._exit(0)  # the parent has gone; the last committed step is kept

    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            said: tuple[str, Any] = ("done", job(task, ask))
        except FedbraidError as error:
            said = ("done", Failure(type(error).__name__, str(error)))
        except BaseException:
            said = ("crash", f"a worker process failed:\n{traceback.format_exc()}")
        try:
            pipe.send(said)
        except OSError:
            os._exit(0)


# Ctrl-C at a terminal goes to all processes, and is the parent's affair ------------------------------


@contextmanager
def started_ignoring_sigint() -> Iterator[None]:
    """Inside, processes are born that hear no Ctrl-C before they have said `deaf`."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def ignore_sigint() -> None:
    """Let this process, started by another one, hear no Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
