"""The crew of worker processes: who hears a Ctrl-C, and how a worker ends."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from fedbraid.errors import EngineError
from fedbraid.workers import Ask, WorkerPool


def everything(job: Any, things: list[Any], count: int = 2) -> list[Any]:
    left, got = iter(things), []
    with WorkerPool(job, count) as pool:
        pool.run(lambda: next(left, None), lambda thing, said: got.append(said))
    return got


def test_a_terminals_interrupt_is_the_parents_affair() -> None:
    """Wherever it strikes a worker, in its job or while it answers, the work goes on and no traceback is printed."""

    def job(thing: int, ask: Ask) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return thing + 1

    assert sorted(everything(job, list(range(20)))) == list(range(1, 21))


def test_interrupts_that_rain_on_a_worker_at_any_moment_change_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    left, got = iter(range(200)), []
    with WorkerPool(lambda thing, ask: ask(thing), 2) as pool:
        pool.start_workers()

        def next_task() -> int | None:
            for process in pool.processes:
                os.kill(process.pid, signal.SIGINT)
            return next(left, None)

        pool.run(next_task, lambda thing, said: got.append(said), on_message=lambda thing, said: said)
    assert sorted(got) == list(range(200))
    assert capfd.readouterr().err == ""


def test_a_parent_that_goes_takes_its_workers_along() -> None:
    pool = WorkerPool(lambda thing, ask: time.sleep(60), 2)
    pool.start_workers()
    pids = [p.pid for p in pool.processes]
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_worker_that_dies_is_named() -> None:
    with pytest.raises(EngineError, match="died"):
        everything(lambda thing, ask: os.kill(os.getpid(), signal.SIGKILL), [1])
