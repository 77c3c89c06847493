"""Whole runs in worker processes: jobs are handed to forked processes of one torch thread each."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from fedbraid.errors import ConfigError, EngineError, FedbraidError

Ask = Callable[[Any], Any]  # a job sends a message to the parent and gets its answer
Job = Callable[[Any, Ask], Any]


@dataclass(frozen=True)
class Failure:
    """An error of ours that ended a job: its class and what it says."""

    kind: str
    message: str


@dataclass
class Crew:
    """`count` processes, by default one for each core, which all do the same job on different things.

    `following` gives the next thing or None, `heard` answers what a job says while it runs, and `done`
    takes its result, or its Failure where it raised an error of ours.
    """

    job: Job
    count: int | None = None

    def run(
        self,
        following: Callable[[], Any],
        heard: Callable[[Any, Any], Any],
        done: Callable[[Any, Any], None],
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        count = len(os.sched_getaffinity(0)) if self.count is None else self.count
        if count < 1:
            raise ConfigError(f"jobs={count} runs nothing; use at least 1")
        if "fork" not in mp.get_all_start_methods():
            raise ConfigError(
                "running cells side by side needs fork, which this system lacks; use Linux or macOS"
            )
        importlib.import_module(
            "torch._dynamo"
        )  # vmap imports it on first use: once here, not in every worker
        busy: dict[Connection, tuple[Any, Any]] = {}
        free: list[tuple[Connection, Any]] = []
        try:
            while True:
                while (free or len(busy) < count) and (thing := following()) is not None:
                    pipe, process = free.pop() if free else self._hire([*busy])
                    busy[pipe] = (thing, process)
                    pipe.send(thing)
                if not busy:
                    return
                for ready in wait(list(busy), timeout=0.2):
                    self._hear(ready, busy, free, heard, done)  # type: ignore[arg-type]
                idle()
        finally:
            for pipe, process in [*free, *((p, v[1]) for p, v in busy.items())]:
                pipe.close()
                process.join(2)
                if process.is_alive():
                    process.kill()
                    process.join()

    def _hire(self, others: list[Connection]) -> tuple[Connection, Any]:
        ctx = mp.get_context("fork")
        ours, theirs = ctx.Pipe()
        process = ctx.Process(target=_life, args=(self.job, theirs, [*others, ours]), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def _hear(
        self,
        pipe: Connection,
        busy: dict[Connection, tuple[Any, Any]],
        free: list[tuple[Connection, Any]],
        heard: Callable[[Any, Any], Any],
        done: Callable[[Any, Any], None],
    ) -> None:
        thing, process = busy[pipe]
        try:
            kind, said = pipe.recv()
        except (EOFError, OSError) as error:
            process.join(2)
            raise EngineError(
                f"worker process {process.pid} died (exit code {process.exitcode}); what was committed is kept,"
                " give the same command again to continue"
            ) from error
        if kind == "ask":
            return pipe.send(heard(thing, said))
        if kind == "crash":
            raise EngineError(f"a worker process failed:\n{said}")
        del busy[pipe]
        free.append((pipe, process))
        done(thing, said)


def _life(job: Job, pipe: Connection, others: list[Connection]) -> None:
    """A worker: take a thing, do the job, say what came of it. It ends with its parent."""
    import torch

    torch.set_num_threads(1)
    for other in others:
        other.close()  # so that the parent's end alone keeps a pipe open

    def ask(message: Any) -> Any:
        try:
            pipe.send(("ask", message))
            return pipe.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            os._exit(0)  # the parent has gone; the last committed step is kept

    while True:
        try:
            thing = pipe.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            os._exit(0)
        try:
            said: tuple[str, Any] = ("done", job(thing, ask))
        except FedbraidError as error:
            said = ("done", Failure(type(error).__name__, str(error)))
        except KeyboardInterrupt:
            os._exit(0)
        except BaseException:
            said = ("crash", traceback.format_exc())
        pipe.send(said)
