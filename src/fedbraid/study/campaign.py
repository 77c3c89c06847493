"""Many runs: cells, each in a run folder, resumed, in worker processes; `compare`, `sweep` and `choose` use it.

A JSON file in a campaign's folder describes it, so that another campaign is not mixed in. Given the same
folder again, cells that are done are skipped and cells that were stopped continue from their last checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, TypeVar

from fedbraid.algorithms.registry import parts
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.work import Work
from fedbraid.data.task import Task
from fedbraid.engines.in_process import InProcess
from fedbraid.errors import EngineError, RunError
from fedbraid.run.checkpoint import Folder, Record
from fedbraid.run.result import Result
from fedbraid.run.run import Run
from fedbraid.run.simulate import simulate
from fedbraid.schedule import Schedule
from fedbraid.study import flops, stats
from fedbraid.study.energy import DeviceProfile, EnergyMeter
from fedbraid.workers import Ask, Failure, WorkerPool, prepare

FAILED = "failed.json"
REPORT_EVERY_S = 0.2  # between two messages of a cell

C = TypeVar("C")


@dataclass(frozen=True)
class Entry:
    """An algorithm with its local training settings and schedule."""

    name: str
    algorithm: Algorithm
    work: Work
    schedule: Schedule

    def __post_init__(self) -> None:
        self.algorithm.fits(self.work)
        object.__setattr__(self, "work", self.work.tabled(self.schedule.steps))

    @property
    def folder(self) -> str:
        """A folder name that differs between different entries."""
        what = repr((parts(self.algorithm), self.work, self.schedule)).encode()
        slug = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40]
        return f"{slug}-{hashlib.blake2b(what, digest_size=4).hexdigest()}"


def train(
    task: Task, e: Entry, seed: int, out: Path, runs: int, callbacks: Sequence[Any], energy: DeviceProfile | None = None,
    **options: Any,
) -> Result:  # fmt: skip
    """Run an entry, in a worker of a campaign of so many runs; with a device, records say what its clients spent.

    Workers have one thread each and share compiled models.
    """
    if energy is not None:
        client_flops = flops.of_clients(task, e.algorithm, e.work)
        callbacks = [*callbacks, EnergyMeter(energy, client_flops, getattr(e.schedule, "bandwidth", None))]
    return simulate(
        task, e.algorithm, e.work, e.schedule, seed=seed, engine=InProcess(threads=1, runs=runs), out=out,
        callbacks=callbacks, **options,
    )  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One entry with one seed, in its run folder."""

    entry: Entry
    seed: int
    folder: Path

    def __str__(self) -> str:
        return f"{self.entry.name} with seed {self.seed}"

    @property
    def is_done(self) -> bool:
        return (self.folder / "model.safetensors").exists()

    @property
    def failure(self) -> str | None:
        """The error that ended the cell, if it diverged."""
        path = self.folder / FAILED
        return Folder(self.folder).read_json(FAILED)["error"] if path.exists() else None

    def fail(self, failure: Failure) -> None:
        Folder(self.folder).write_json(FAILED, {"error": failure.message})


@dataclass(frozen=True)
class Event(Generic[C]):
    """What a campaign reports: "begin" with its cells, a cell's "step" and "done", and "tick" several times a second."""

    kind: str
    cell: C | None = None
    cells: Sequence[C] = ()
    step: int = 0
    value: float | None = None
    result: Any = None  # of a cell that is done; a Failure where it diverged


OnEvent = Callable[[Event[Any]], Any]  # its answer to "step" is returned to the cell's run as a callback's


def ignore(event: Event[Any]) -> None:
    """Report nothing."""


@dataclass
class Campaign(Generic[C]):
    """Cells, given as a list or by a function that returns the next one, and the function that runs one in a worker.

    Cells of a list may be any objects, because forked workers have them; cells of a function are pickled.
    """

    cells: Sequence[C] | Callable[[], C | None]
    run_cell: Callable[[C, Ask], Any]
    folder: Path
    may_start: Callable[[C], bool] = lambda cell: True  # the first cell that may not start ends the list
    goes_on: bool = False  # errors other than divergence are results, too

    def run(self, jobs: int | None = None, on_event: OnEvent = ignore) -> None:
        """Run the cells, `jobs` at a time; an error other than divergence ends the campaign, unless `goes_on`."""
        ask_for = self.cells if callable(self.cells) else None
        listed: Sequence[C] = [] if callable(self.cells) else self.cells
        waiting = takewhile(lambda n: self.may_start(listed[n]), range(len(listed)))
        cell_of: Callable[[Any], C] = listed.__getitem__ if ask_for is None else lambda cell: cell

        def on_message(task: Any, message: tuple[int, float | None]) -> Any:
            return on_event(Event("step", cell_of(task), step=message[0], value=message[1]))

        def done(task: Any, result: Any) -> None:
            if isinstance(result, Failure) and result.kind != "Diverged" and not self.goes_on:
                raise EngineError(
                    f"{cell_of(task)} failed: {result.message}; finished cells are stored in {self.folder}"
                )
            on_event(Event("done", cell_of(task), result=result))

        prepare()
        with WorkerPool(lambda task, ask: self.run_cell(cell_of(task), ask), jobs) as pool:
            next_task: Callable[[], Any] = ask_for or (lambda: next(waiting, None))
            pool.run(next_task, done, on_message, lambda: on_event(Event("tick")))


def claim(out: Path, file: str, facts: Record, fixed: Mapping[str, str]) -> Record | None:
    """Write the description of a campaign's folder, and return the earlier one; refuses other folders' files.

    `fixed` maps the facts that must not change to their names in errors.
    """
    folder, recorded = Folder(out), None
    if (out / file).exists():
        recorded = folder.read_json(file)
        for key, name in fixed.items():
            if recorded.get(key) != facts[key]:
                raise RunError(f"{out} holds a {Path(file).stem} with another {name}; choose another out=")
    elif out.exists() and any(out.iterdir()):
        raise RunError(f"{out} holds other files and no {file}; give out= a new or empty folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder.write_json(file, facts)
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror}; choose another out=") from error
    return recorded


def new_folder(task: str, what: str) -> Path:
    """A new folder name for this task and kind of campaign."""
    number = 1
    while (folder := Path("runs") / f"{task}-{what}-{number}").exists():
        number += 1
    return folder


@dataclass(frozen=True)
class Journal:
    """An append-only file of JSON lines; an incomplete last line is dropped."""

    path: Path

    def lines(self) -> list[Record]:
        text = self.path.read_text("utf-8") if self.path.exists() else ""
        complete = text[: text.rfind("\n") + 1]
        if complete != text:
            self.path.write_text(complete, "utf-8")
        try:
            return [json.loads(line) for line in complete.splitlines()]
        except ValueError as error:
            raise RunError(
                f"{self.path} is corrupt ({error}); remove its broken line, or start in a new folder"
            ) from error

    def add(self, line: Record) -> None:
        with self.path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")


class Progress:
    """A callback that reports a run's step and metric to the parent process, whose answer may stop the run.

    It reports `looks` times in a run, by default several times a second.
    """

    def __init__(self, ask: Ask, metric: str, looks: int | None = None) -> None:
        self.ask, self.metric, self.looks, self.last = ask, metric, looks, 0.0
        self.values: list[Record] = []

    def start(self, run: Run) -> None:
        earlier = [] if run.folder is None or not run.state.t else run.folder.records()
        self.values = [{self.metric: r[self.metric]} for r in earlier if self.metric in r]

    def step(self, record: Record, run: Run) -> Any:
        self.values += [{self.metric: record[self.metric]}] if self.metric in record else []
        if not self._is_due(record["step"], run.schedule.steps):
            return False
        return self.ask((record["step"], stats.final(self.values, self.metric)))

    def _is_due(self, step: int, steps: int) -> bool:
        if self.looks is not None:
            return bool(self.values) and step % max(1, steps // self.looks) == 0 and step < steps
        now = time.monotonic()
        if now - self.last < REPORT_EVERY_S and step < steps:
            return False
        self.last = now
        return True
