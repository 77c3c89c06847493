"""Search for good settings: by grid, at random or with Optuna's Bayesian sampler, judged on held-out clients.

A share of the clients never trains; what a setting is worth is its accuracy on their data, so the test set
stays unseen until the end. Trials that do worse than the others did at the same step are stopped early. What
was begun and what ended is a line each in `trials.jsonl`, and every trial is in run folders, so a sweep that is
killed goes on where it stood. Only the Bayesian sampler needs Optuna.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fedbraid.core import check, rng
from fedbraid.core.check import number
from fedbraid.core.metric_names import falls
from fedbraid.data import tree
from fedbraid.data.lazy import LazyColumn
from fedbraid.data.task import Task
from fedbraid.errors import ConfigError, DataError, EngineError, MissingExtra, RunError, unknown
from fedbraid.run.checkpoint import Folder, Record
from fedbraid.run.simulate import Run, simulate
from fedbraid.study import callable_module, stats
from fedbraid.study.compare import ENGINE, Contestant
from fedbraid.workers import Ask, Failure, WorkerPool, prepare

FILE = "sweep.json"
TRIALS = "trials.jsonl"
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

    def draw(self, u: float) -> Any:
        """The value that a number in [0, 1) picks."""
        return self.values[int(u * len(self.values))]

    def distribution(self, optuna: Any) -> Any:
        return optuna.distributions.CategoricalDistribution(self.values)


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
        check.integer("points", self.points)

    def grid(self) -> tuple[Any, ...]:
        low, high = (math.log(v) if self.log else v for v in (self.low, self.high))
        spread = np.linspace(low, high, self.points)
        values = [float(f"{v:.6g}") for v in (np.exp(spread) if self.log else spread)]
        return tuple(dict.fromkeys(round(v) for v in values)) if self.integer else tuple(values)

    def suggest(self, trial: Any, name: str) -> Any:
        if self.integer:
            return trial.suggest_int(name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(name, self.low, self.high, log=self.log)

    def draw(self, u: float) -> Any:
        """The value that a number in [0, 1) picks."""
        low, high = (self.low, self.high + 1) if self.integer else (self.low, self.high)
        value = math.exp(math.log(low) + u * math.log(high / low)) if self.log else low + u * (high - low)
        return min(int(value), int(self.high)) if self.integer else value

    def distribution(self, optuna: Any) -> Any:
        kinds = optuna.distributions
        kind = kinds.IntDistribution if self.integer else kinds.FloatDistribution
        return kind(
            int(self.low) if self.integer else self.low,
            int(self.high) if self.integer else self.high,
            log=self.log,
        )


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
    """The task of the other clients, tested on the data of this share of them instead of the test set."""
    number("hold_out", share, "(0, 1)", "is no share of the clients")
    count = max(1, round(share * task.clients))
    if count >= task.clients:
        raise DataError(
            f"{task.clients} clients cannot spare {count} of them; use more clients or a smaller share"
        )
    held = np.sort(rng.generator(seed, "hold-out").permutation(task.clients)[:count])
    kept = np.setdiff1d(np.arange(task.clients), held)
    if isinstance(task.inputs, LazyColumn):  # which is asked by client, not by row
        few, judge = task.inputs.store.some(kept), task.inputs.store.together(held, "the held-out clients")
        inputs, targets = LazyColumn.both(few)
        return dataclasses.replace(
            task, inputs=inputs, targets=targets, rows=torch.arange(len(few)), offsets=few.offsets,
            test=LazyColumn.both(judge), test_offsets=None, spec=None,
        )  # fmt: skip
    rows, offsets = _rows(task, kept)
    tested, _ = _rows(task, held)
    return dataclasses.replace(
        task, rows=rows, offsets=offsets, test=(tree.take(task.inputs, tested), tree.take(task.targets, tested)), test_offsets=None, spec=None
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
    metric: str | None = None  # what is optimised, unless the accuracy or the loss

    def __post_init__(self) -> None:
        for value, known, kind in ((self.method, METHODS, "method"), (self.prune, PRUNERS, "pruner")):
            if value not in known:
                raise unknown(kind, value, known)
        check.integer("trials", self.trials)
        check.integer("seeds", self.seeds)


@dataclass
class Trial:
    """A setting that was tried."""

    number: int
    settings: Settings
    state: str  # "done", "pruned" or "diverged"
    value: float | None
    steps: int
    looks: dict[int, float] = field(default_factory=dict, repr=False)  # what it was worth, by step


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
        return min(done, key=lambda t: (t.value or 0.0) * (1 if falls(self.metric) else -1))


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
        self.metric = plan.metric or task.measures[0]
        if self.metric not in task.measures:
            raise unknown("metric", self.metric, task.measures)
        self.steps = self.build(self.grid[0]).schedule.steps  # also finds a setting that nobody knows
        self.running: dict[int, _Job] = {}
        self.looks: dict[int, dict[int, float]] = {}
        self.ended: list[Trial] = []
        self.again: list[_Job] = []  # begun and not ended when a kill came
        self.begun = 0

    # The log of trials ----------------------------------------------------------------------------

    def open(self, note: Record) -> None:
        self.sampler = _Bayes(self) if self.plan.method == "bayes" else None
        said = {
            "data": self.task.fingerprint,
            "space": {k: repr(v) for k, v in self.space.items()},
            "plan": dataclasses.asdict(self.plan),
            **note,
        }
        self._claim(said)
        jobs: dict[int, _Job] = {}
        for line in self._lines():
            if "state" in line:
                looks = {int(step): value for step, value in line["looks"]}
                self.ended.append(Trial(**{**line, "looks": looks}))
                jobs.pop(line["number"], None)
            else:
                jobs[line["number"]] = _Job(line["number"], line["settings"])
                self.begun = max(self.begun, line["number"] + 1)
        self.again = list(jobs.values())

    def _lines(self) -> list[Record]:
        """What was noted; a line that a kill cut short is as if it had not been begun."""
        path = self.out / TRIALS
        text = path.read_text("utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole, "utf-8")
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise RunError(
                f"{path} is garbled ({error}); remove its broken line, or start a new sweep"
            ) from error

    def _note(self, line: Record) -> None:
        with (self.out / TRIALS).open("a", encoding="utf-8") as log_:
            log_.write(json.dumps(line) + "\n")

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

    # Trials ---------------------------------------------------------------------------------------

    def run(self, jobs: int | None, watcher: Watcher | None) -> None:
        def on_message(job: _Job, said: tuple[int, float]) -> bool:
            if watcher is not None:
                watcher.trial(job.number, job.settings, *said)
            looks = self.looks.setdefault(job.number, {})
            looks[said[0]] = said[1]
            return self._hopeless(looks, said[0])

        def done(job: _Job, result: Failure | Record) -> None:
            if isinstance(result, Failure):
                if result.kind != "Diverged":
                    raise EngineError(
                        f"trial {job.number} with {_said(job.settings)} failed: {result.message}"
                    )
                result = {"state": "diverged", "value": None, "steps": 0}
            del self.running[job.number]
            trial = Trial(job.number, job.settings, **result, looks=self.looks.pop(job.number, {}))
            self._note(vars(trial) | {"looks": list(trial.looks.items())})
            self.ended.append(trial)
            if watcher is not None:
                watcher.done(trial)

        prepare()
        with WorkerPool(self._train, jobs) as pool:
            pool.run(self._following, done, on_message, (lambda: None) if watcher is None else watcher.tick)

    def _following(self) -> _Job | None:
        """The next setting to try: first what a kill left, then another that was not tried yet."""
        if self.again:
            job = self.again.pop(0)
            self.running[job.number] = job
            return job
        tried = [t.settings for t in self.ended] + [j.settings for j in self.running.values()]
        while len(self.ended) + len(self.running) < self.count and self.begun < 100 * self.count:
            number, self.begun = self.begun, self.begun + 1
            settings = self._settings(number)
            if settings not in tried:
                self._note({"number": number, "settings": settings})
                self.running[number] = _Job(number, settings)
                return self.running[number]
        return None

    def _settings(self, number: int) -> Settings:
        if self.plan.method == "grid":
            return self.grid[number % len(self.grid)]
        if self.sampler is not None:
            return self.sampler.settings(number)
        u = rng.generator(self.plan.seed, "sweep", number).random(len(self.space))
        return {name: what.draw(float(v)) for (name, what), v in zip(self.space.items(), u)}

    # Pruning --------------------------------------------------------------------------------------

    def _hopeless(self, looks: dict[int, float], step: int) -> bool:
        """Whether a trial is worse by now than half of those that ended (median), or two thirds of all (asha)."""
        sign = -1 if falls(self.metric) else 1
        if self.plan.prune == "median":
            others = sorted(sign * t.looks[step] for t in self.ended if t.state == "done" and step in t.looks)
            late = len(others) >= 3 and step >= self.steps // 5
            return late and max(sign * v for v in looks.values()) < float(np.median(others))
        if self.plan.prune == "asha":
            rung = max((r for r in self._rungs() if r <= step), default=None)
            if rung is None or sum(s >= rung for s in looks) > 1:  # it was judged at this rung before
                return False
            seen = [*(t.looks for t in self.ended), *self.looks.values()]
            values = [
                sign * next(v for s, v in sorted(each.items()) if s >= rung)
                for each in seen
                if max(each, default=0) >= rung
            ]
            return sum(v > sign * looks[step] for v in values) >= max(1, len(values) // 3)
        return False

    def _rungs(self) -> list[int]:
        first = max(1, self.steps // 9)
        return [first * 3**k for k in range(8) if first * 3**k < self.steps]

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
        return Sweep(self.metric, self.ended, self.out)


class _Bayes:
    """Optuna's TPE sampler, told all that ended before it is asked anew."""

    def __init__(self, search: _Search) -> None:
        try:
            import optuna
        except ImportError as error:
            raise MissingExtra("a Bayesian sweep", "sweep") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.search, self.optuna = search, optuna

    def settings(self, number: int) -> Settings:
        search, states = self.search, self.optuna.trial.TrialState
        first = min(10, max(3, search.count // 3))
        study = self.optuna.create_study(
            direction="minimize" if falls(search.metric) else "maximize",
            sampler=self.optuna.samplers.TPESampler(seed=search.plan.seed + number, n_startup_trials=first),
        )
        kinds = {name: what.distribution(self.optuna) for name, what in search.space.items()}
        for t in search.ended:
            done = t.state == "done"
            study.add_trial(
                self.optuna.trial.create_trial(
                    params=t.settings, distributions=kinds, value=t.value if done else None,
                    intermediate_values=t.looks, state=states.COMPLETE if done else states.PRUNED,
                )
            )  # fmt: skip
        trial = study.ask()
        return {name: what.suggest(trial, name) for name, what in search.space.items()}


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
