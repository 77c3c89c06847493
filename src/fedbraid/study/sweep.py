"""Search for good settings: by grid, at random or with Optuna's Bayesian sampler, judged on held-out clients.

A share of the clients never trains; what a setting is worth is its accuracy on their data, so the test set
stays unseen until the end. Trials that do worse than the others did at the same step are stopped early. The
study lives in a database and every trial in run folders, so a sweep that is killed goes on where it stood.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fedbraid.core import rng
from fedbraid.core.check import whole
from fedbraid.data.task import Task
from fedbraid.engines.workers import Ask, Crew, Failure
from fedbraid.errors import ConfigError, DataError, EngineError, MissingExtra, RunError, unknown
from fedbraid.run.checkpoint import Folder, Record
from fedbraid.run.simulate import Run, simulate
from fedbraid.study import callable_module, stats
from fedbraid.study.compare import ENGINE, Contestant

FILE = "sweep.json"
METHODS = ("bayes", "random", "grid")
PRUNERS = ("median", "asha", "none")
RUNGS = 20  # looks at a trial while it trains

Settings = dict[str, Any]
Build = Callable[[Settings], Contestant]


# What is searched ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """One of these values."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigError("a choice needs at least one value, such as [0.01, 0.1]")

    def grid(self) -> tuple[Any, ...]:
        return self.values

    def suggest(self, trial: Any, name: str) -> Any:
        return trial.suggest_categorical(name, self.values)


@dataclass(frozen=True)
class Range:
    """A number between two others, by its logarithm or as it is; a grid takes `points` of them."""

    low: float
    high: float
    points: int = 4
    log: bool = False
    integer: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ConfigError(f"({self.low}, {self.high}) is no range; use low < high, and low > 0 with log")
        whole("points", self.points)

    def grid(self) -> tuple[Any, ...]:
        low, high = (math.log(v) if self.log else v for v in (self.low, self.high))
        spread = np.linspace(low, high, self.points)
        values = [float(f"{v:.6g}") for v in (np.exp(spread) if self.log else spread)]
        return tuple(dict.fromkeys(round(v) for v in values)) if self.integer else tuple(values)

    def suggest(self, trial: Any, name: str) -> Any:
        if self.integer:
            return trial.suggest_int(name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(name, self.low, self.high, log=self.log)


Space = Mapping[str, Choice | Range]


def uniform(low: float, high: float, points: int = 4) -> Range:
    """A number between two others."""
    return Range(low, high, points)


def log(low: float, high: float, points: int = 4) -> Range:
    """A number whose logarithm is between those of two others."""
    return Range(low, high, points, log=True)


def integer(low: int, high: int, points: int = 4) -> Range:
    """A whole number from one to another."""
    return Range(low, high, points, integer=True)


def hold_out(task: Task, share: float, seed: int = 0) -> Task:
    """The task of the other clients, judged on the data of this share of them instead of the test set."""
    if not 0 < share < 1:
        raise ConfigError(
            f"hold_out={share} is no share of the clients; use one between 0 and 1, such as 0.2"
        )
    count = max(1, round(share * task.clients))
    if count >= task.clients:
        raise DataError(
            f"{task.clients} clients cannot spare {count} of them; use more clients or a smaller share"
        )
    held = np.sort(rng.generator(seed, "hold-out").permutation(task.clients)[:count])
    kept = np.setdiff1d(np.arange(task.clients), held)
    rows, offsets = _rows(task, kept)
    judged, _ = _rows(task, held)
    return dataclasses.replace(
        task, rows=rows, offsets=offsets, test=(task.inputs[judged], task.targets[judged]), test_offsets=None, spec=None
    )  # fmt: skip


def _rows(task: Task, clients: Iterable[int]) -> tuple[torch.Tensor, Any]:
    parts = [task.rows[task.offsets[c] : task.offsets[c + 1]] for c in clients]
    return torch.cat(parts), np.cumsum([0] + [len(p) for p in parts])


# Searching ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How a sweep searches."""

    method: str = "bayes"
    trials: int = 20
    seeds: int = 1
    share: float = 0.2  # of clients, held out
    prune: str = "median"
    seed: int = 0

    def __post_init__(self) -> None:
        for value, known, kind in ((self.method, METHODS, "method"), (self.prune, PRUNERS, "pruner")):
            if value not in known:
                raise unknown(kind, value, known)
        whole("trials", self.trials)
        whole("seeds", self.seeds)


@dataclass
class Trial:
    """A setting that was tried."""

    number: int
    settings: Settings
    state: str  # "done", "pruned" or "diverged"
    value: float | None
    steps: int


@dataclass
class Sweep:
    """What a sweep came to."""

    metric: str
    trials: list[Trial] = field(repr=False)
    out: Path

    @property
    def best(self) -> Trial:
        done = [t for t in self.trials if t.state == "done" and t.value is not None]
        if not done:
            raise RunError(f"no trial of {self.out} came to its end; widen the space or lower the rates")
        return min(done, key=lambda t: (t.value or 0.0) * (1 if self.metric in stats.FALLING else -1))


class Watcher(Protocol):
    """Sees a sweep go on."""

    def trial(self, number: int, settings: Settings, step: int, value: float | None) -> None: ...

    def done(self, trial: Trial) -> None: ...

    def tick(self) -> None: ...


@dataclass(frozen=True)
class _Job:
    number: int
    settings: Settings


def sweep(
    task: Task,
    build: Build,
    space: Space,
    *,
    out: str | os.PathLike[str],
    plan: Plan | None = None,
    jobs: int | None = None,
    watcher: Watcher | None = None,
    options: Mapping[str, Any] | None = None,
    note: Record | None = None,
) -> Sweep:
    """Try settings from a space, `jobs` at a time; `build` makes a contestant of one.

    Given the same folder again, it goes on. `options` are those of `simulate`; `note` is kept in `sweep.json`.
    """
    if not space:
        raise ConfigError("nothing to search; give at least one setting, such as lr=log(0.001, 1)")
    search = _Search(task, build, dict(space), plan or Plan(), Path(out), dict(options or {}))
    search.open(note or {})
    search.run(jobs, watcher)
    return search.result()


class _Search:
    def __init__(
        self, task: Task, build: Build, space: dict[str, Any], plan: Plan, out: Path, options: Settings
    ) -> None:
        self.task, self.build, self.plan, self.out, self.options = task, build, plan, out, options
        self.space = {k: Choice(v.grid()) for k, v in space.items()} if plan.method == "grid" else space
        self.grid = [dict(zip(self.space, v)) for v in product(*(s.grid() for s in self.space.values()))]
        self.count = len(self.grid) if plan.method == "grid" else plan.trials
        self.tuning = hold_out(task, plan.share, plan.seed)
        self.metric = "accuracy" if task.classifies else "loss"
        self.steps = self.build(self.grid[0]).schedule.steps  # also finds a setting that nobody knows
        self.running: dict[int, tuple[Any, _Job]] = {}

    # The study ------------------------------------------------------------------------------------

    def open(self, note: Record) -> None:
        try:
            import optuna
        except ImportError as error:
            raise MissingExtra("a sweep", "sweep") from error
        said = {
            "data": self.task.fingerprint,
            "space": {k: repr(v) for k, v in self.space.items()},
            "plan": dataclasses.asdict(self.plan),
            **note,
        }
        self._claim(said)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.optuna = optuna
        self.study = optuna.create_study(
            storage=optuna.storages.RDBStorage("sqlite://", engine_kwargs={"creator": self._connect}),
            study_name="sweep",
            direction="minimize" if self.metric in stats.FALLING else "maximize",
            load_if_exists=True,
        )
        before = len(self.study.trials)
        self.study.sampler = self._sampler(self.plan.seed + before)
        self.study.pruner = self._pruner()
        if self.plan.method == "grid" and not before:
            for settings in self.grid:
                self.study.enqueue_trial(settings)
        for trial in self.study.get_trials(states=[optuna.trial.TrialState.RUNNING]):  # a kill left them so
            self.study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            if len(trial.params) == len(self.space):
                self.study.enqueue_trial(trial.params)

    def _connect(self) -> sqlite3.Connection:
        """A kill loses nothing that was committed; only a power cut may lose the last trials' ends."""
        study = sqlite3.connect(self.out / "study.db", timeout=20, check_same_thread=False)
        study.execute("PRAGMA journal_mode = WAL")
        study.execute("PRAGMA synchronous = NORMAL")
        return study

    def _claim(self, said: Record) -> None:
        folder = Folder(self.out)
        if (self.out / FILE).exists():
            known = folder.read_json(FILE)
            for key in ("data", "space"):
                if known.get(key) != said[key]:
                    raise RunError(f"{self.out} holds a sweep with another {key}; choose another out=")
        elif self.out.exists() and any(self.out.iterdir()):
            raise RunError(f"{self.out} holds other files and no {FILE}; give out= a new or empty folder")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            folder.write_json(FILE, said)
        except OSError as error:
            raise RunError(f"{self.out} cannot be written: {error.strerror}; choose another out=") from error

    def _sampler(self, seed: int) -> Any:
        samplers = self.optuna.samplers
        if self.plan.method == "bayes":
            return samplers.TPESampler(seed=seed, n_startup_trials=min(10, max(3, self.count // 3)))
        return samplers.RandomSampler(seed=seed)

    def _pruner(self) -> Any:
        pruners = self.optuna.pruners
        if self.plan.prune == "median":
            return pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=self.steps // 5)
        if self.plan.prune == "asha":
            return pruners.SuccessiveHalvingPruner(min_resource=max(1, self.steps // 9), reduction_factor=3)
        return pruners.NopPruner()

    # Trials ---------------------------------------------------------------------------------------

    def run(self, jobs: int | None, watcher: Watcher | None) -> None:
        def heard(job: _Job, said: tuple[int, float]) -> bool:
            trial = self.running[job.number][0]
            if watcher is not None:
                watcher.trial(job.number, job.settings, *said)
            trial.report(said[1], said[0])
            return bool(trial.should_prune())

        def done(job: _Job, result: Failure | Record) -> None:
            trial, _ = self.running.pop(job.number)
            if isinstance(result, Failure):
                if result.kind != "Diverged":
                    raise EngineError(
                        f"trial {job.number} with {_said(job.settings)} failed: {result.message}"
                    )
                result = {"state": "diverged", "value": None, "steps": 0}
            self._tell(trial, result)
            if watcher is not None:
                watcher.done(
                    Trial(job.number, job.settings, result["state"], result["value"], result["steps"])
                )

        Crew(self._train, jobs).run(
            self._following, heard, done, (lambda: None) if watcher is None else watcher.tick
        )

    def _tell(self, trial: Any, result: Record) -> None:
        trial.set_user_attr("result", result)
        if result["state"] == "done":
            self.study.tell(trial, result["value"])
        else:
            self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)

    def _following(self) -> _Job | None:
        """The next setting to try; one that was tried already is not tried again."""
        for _ in range(100):
            ended = {json.dumps(t.settings, sort_keys=True): t for t in self._ended()}
            if self._finished() + len(self.running) >= self.count:
                return None
            trial = self.study.ask()
            settings = {name: what.suggest(trial, name) for name, what in self.space.items()}
            if (known := ended.get(json.dumps(settings, sort_keys=True))) is not None:
                self._tell(trial, {"state": known.state, "value": known.value, "steps": known.steps})
            elif any(job.settings == settings for _, job in self.running.values()):
                self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
            else:
                job = _Job(trial.number, settings)
                self.running[trial.number] = (trial, job)
                return job
        return None

    def _finished(self) -> int:
        states = self.optuna.trial.TrialState
        return len(self.study.get_trials(deepcopy=False, states=[states.COMPLETE, states.PRUNED]))

    def _ended(self) -> list[Trial]:
        states = self.optuna.trial.TrialState
        return [
            Trial(t.number, t.params, **t.user_attrs["result"])
            for t in self.study.get_trials(deepcopy=False, states=[states.COMPLETE, states.PRUNED])
        ]

    def _train(self, job: _Job, ask: Ask) -> Record:
        """In a worker: every seed of a trial, the first of them under the pruner's eyes."""
        contestant, finals, steps = self.build(job.settings), [], 0
        place = self.out / "trials" / _key(job.settings)
        for seed in range(self.plan.seeds):
            look = [_Look(ask, self.metric)] if seed == 0 else []
            result = simulate(
                self.tuning, contestant.algorithm, contestant.work, contestant.schedule,
                seed=self.plan.seed + seed, engine=ENGINE, out=place / f"seed-{seed}", callbacks=look, **self.options,
            )  # fmt: skip
            steps += result.state.t
            final = stats.final(result.history, self.metric)
            if result.state.t < contestant.schedule.steps:
                return {"state": "pruned", "value": final, "steps": steps}
            if final is None or not math.isfinite(final):
                return {"state": "diverged", "value": None, "steps": steps}
            finals.append(final)
        return {"state": "done", "value": math.fsum(finals) / len(finals), "steps": steps}

    def result(self) -> Sweep:
        return Sweep(self.metric, self._ended(), self.out)


class _Look:
    """Asks the pruner, some times in a run, whether to go on."""

    def __init__(self, ask: Ask, metric: str) -> None:
        self.ask, self.metric = ask, metric
        self.seen: list[Record] = []

    def start(self, run: Run) -> None:
        self.seen = [] if run.folder is None or not run.state.t else list(run.folder.records())
        self.every = max(1, run.schedule.steps // RUNGS)

    def step(self, record: Record, run: Run) -> bool:
        self.seen.append(record)
        value = stats.final(self.seen, self.metric)
        if value is None or record["step"] % self.every or record["step"] == run.schedule.steps:
            return False
        return bool(self.ask((record["step"], value)))


def _key(settings: Settings) -> str:
    text = json.dumps(settings, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _said(settings: Settings) -> str:
    return ", ".join(f"{k}={v}" for k, v in settings.items())


callable_module(__name__)
