"""Search for good settings: by grid, at random or with Optuna's Bayesian sampler, evaluated on held-out clients.

A fraction of the clients never trains; a setting's value is its accuracy on their data, so that the test set
is not used. Trials that are worse than others at the same step are pruned. The start and the end of each trial
are a line each in `trials.jsonl`, and trials are in run folders, so that an interrupted sweep is resumed. Only the
Bayesian sampler needs Optuna.
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
from typing import Any

import numpy as np
import torch

from fedbraid.core import check, rng
from fedbraid.core.check import number
from fedbraid.core.metric_names import falls
from fedbraid.core.search_space import Categorical, FloatRange, IntRange, Space, integer, log, uniform
from fedbraid.data import tree
from fedbraid.data.lazy import LazyColumn
from fedbraid.data.task import Task
from fedbraid.errors import ConfigError, DataError, MissingExtra, RunError, unknown
from fedbraid.run.checkpoint import Record
from fedbraid.study import stats
from fedbraid.study.campaign import Campaign, Entry, Event, Journal, OnEvent, Progress, claim, ignore, train
from fedbraid.workers import Ask, Failure

__all__ = [
    "Categorical", "FloatRange", "IntRange", "Space", "Sweep", "SweepConfig", "Trial", "hold_out", "integer", "log",
    "sweep", "uniform",
]  # fmt: skip

FILE = "sweep.json"
TRIALS = "trials.jsonl"
METHODS = ("bayes", "random", "grid")
PRUNERS = ("median", "asha", "none")
LOOKS = 20  # intermediate values of a trial

Settings = dict[str, Any]
Build = Callable[[Settings], Entry]


# Held-out clients ---------------------------------------------------------------------------------


def hold_out(task: Task, fraction: float, seed: int = 0, by_client: bool = False) -> Task:
    """The task of the other clients, tested on the data of this fraction of them instead of the test set.

    With `by_client` the test set has the offsets of clients, so that the worst tenth of them can be evaluated.
    """
    number("hold_out", fraction, "(0, 1)")
    count = max(1, round(fraction * task.clients))
    if count >= task.clients:
        raise DataError(
            f"{task.clients} clients cannot spare {count} of them; use more clients or a smaller fraction"
        )
    held_out = np.sort(rng.generator(seed, "hold-out").permutation(task.clients)[:count])
    training = np.setdiff1d(np.arange(task.clients), held_out)
    cuts = np.cumsum(
        [0, *task.sizes[held_out], *[0] * (len(training) - len(held_out))]
    )  # the other clients have no test samples
    of_clients = cuts if by_client else None
    if isinstance(task.inputs, LazyColumn):  # which is selected by client, not by row
        few, test_store = (
            task.inputs.store.some(training),
            task.inputs.store.together(held_out, "the held-out clients"),
        )
        inputs, targets = LazyColumn.both(few)
        return dataclasses.replace(
            task, inputs=inputs, targets=targets, rows=torch.arange(len(few)), offsets=few.offsets,
            test=LazyColumn.both(test_store), test_offsets=of_clients, spec=None,
        )  # fmt: skip
    rows, offsets = _rows(task, training)
    tested, _ = _rows(task, held_out)
    return dataclasses.replace(
        task, rows=rows, offsets=offsets, test=(tree.take(task.inputs, tested), tree.take(task.targets, tested)), test_offsets=of_clients, spec=None
    )  # fmt: skip


def _rows(task: Task, clients: Iterable[int]) -> tuple[torch.Tensor, Any]:
    rows = [task.rows[task.offsets[c] : task.offsets[c + 1]] for c in clients]
    return torch.cat(rows), np.cumsum([0] + [len(p) for p in rows])


# Searching ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepConfig:
    """Settings of a sweep."""

    method: str = "bayes"
    trials: int = 20
    seeds: int = 1
    fraction: float = 0.2  # of clients, held out
    prune: str = "median"
    seed: int = 0
    metric: str | None = None  # that is optimized; by default the accuracy or the loss

    def __post_init__(self) -> None:
        for value, valid, kind in ((self.method, METHODS, "method"), (self.prune, PRUNERS, "pruner")):
            if value not in valid:
                raise unknown(kind, value, valid)
        check.integer("trials", self.trials)
        check.integer("seeds", self.seeds)


@dataclass
class Trial:
    """The result of one setting."""

    number: int
    settings: Settings
    state: str  # "done", "pruned" or "diverged"
    value: float | None
    steps: int
    looks: dict[int, float] = field(default_factory=dict, repr=False)  # intermediate values, by step


@dataclass
class Sweep:
    """The result of a sweep."""

    metric: str
    trials: list[Trial] = field(repr=False)
    out: Path
    samples: int = 0  # of the held-out clients, on which each seed of a trial was tested
    seeds: int = 1

    @property
    def best(self) -> Trial:
        done = [t for t in self.trials if t.state == "done" and t.value is not None]
        if not done:
            raise RunError(f"no trial of {self.out} finished; widen the space or lower the rates")
        return min(done, key=lambda t: (t.value or 0.0) * (1 if falls(self.metric) else -1))

    @property
    def noise(self) -> float | None:
        """The difference of two accuracies that testing n samples explains, 1.96 √(2 p (1 − p) / n); None for other metrics."""
        p, n = self.best.value or 0.0, self.samples * self.seeds
        return (
            1.96 * math.sqrt(2 * p * (1 - p) / n) if self.metric == "accuracy" and n and 0 <= p <= 1 else None
        )

    @property
    def tied(self) -> list[Trial]:
        """Other trials within the noise of the best, best first."""
        best, noise = self.best, self.noise
        if noise is None or best.value is None:
            return []
        near = [
            t
            for t in self.trials
            if t is not best and t.state == "done" and best.value - (t.value or 0.0) <= noise
        ]
        return sorted(near, key=lambda t: -(t.value or 0.0))


@dataclass(frozen=True)
class Job:
    """A setting that is being evaluated."""

    number: int
    settings: Settings

    def __str__(self) -> str:
        return f"trial {self.number} with {', '.join(f'{k}={v}' for k, v in self.settings.items())}"


def sweep(
    task: Task,
    build: Build,
    space: Space,
    *,
    out: str | os.PathLike[str],
    plan: SweepConfig | None = None,
    jobs: int | None = None,
    on_event: OnEvent = ignore,
    options: Mapping[str, Any] | None = None,
    note: Record | None = None,
) -> Sweep:
    """Try settings from a space, `jobs` at a time; `build` makes an entry of one.

    Given the same folder again, it resumes. `options` are those of `simulate`; `note` is stored in `sweep.json`.
    """
    if not space:
        raise ConfigError("nothing to search; give at least one setting, such as lr=log(0.001, 1)")
    search = _Search(task, build, dict(space), plan or SweepConfig(), Path(out), dict(options or {}))
    search.open(note or {})
    search.run(jobs, on_event)
    return search.result()


def trial_count(plan: SweepConfig, space: Space) -> int:
    """The number of settings that a sweep tries."""
    return math.prod(len(s.grid()) for s in space.values()) if plan.method == "grid" else plan.trials


class _Search:
    def __init__(
        self, task: Task, build: Build, space: dict[str, Any], plan: SweepConfig, out: Path, options: Settings
    ) -> None:
        self.task, self.build, self.plan, self.out, self.options = task, build, plan, out, options
        self.space = {k: Categorical(v.grid()) for k, v in space.items()} if plan.method == "grid" else space
        self.grid = [dict(zip(self.space, v)) for v in product(*(s.grid() for s in self.space.values()))]
        self.count = len(self.grid) if plan.method == "grid" else plan.trials
        self.tuning = hold_out(task, plan.fraction, plan.seed)
        self.metric = plan.metric or task.measures[0]
        if self.metric not in task.measures:
            raise unknown("metric", self.metric, task.measures)
        self.steps = self.build(self.grid[0]).schedule.steps  # also refuses an unsupported setting
        self.journal = Journal(out / TRIALS)
        self.running: dict[int, Job] = {}
        self.looks: dict[int, dict[int, float]] = {}
        self.ended: list[Trial] = []
        self.again: list[Job] = []  # interrupted trials
        self.begun = 0

    # The log of trials ----------------------------------------------------------------------------

    def open(self, note: Record) -> None:
        self.sampler = _Bayes(self) if self.plan.method == "bayes" else None
        facts = {
            "data": self.task.fingerprint,
            "space": {k: repr(v) for k, v in self.space.items()},
            "plan": dataclasses.asdict(self.plan),
            **note,
        }
        claim(self.out, FILE, facts, {"data": "task", "space": "space"})
        jobs: dict[int, Job] = {}
        for line in self.journal.lines():
            if "state" in line:
                looks = {int(step): value for step, value in line["looks"]}
                self.ended.append(Trial(**{**line, "looks": looks}))
                jobs.pop(line["number"], None)
            else:
                jobs[line["number"]] = Job(line["number"], line["settings"])
                self.begun = max(self.begun, line["number"] + 1)
        self.again = list(jobs.values())

    # Trials ---------------------------------------------------------------------------------------

    def run(self, jobs: int | None, on_event: OnEvent) -> None:
        def noting(event: Event[Job]) -> Any:
            if event.cell is None:
                return on_event(event)
            job, looks = event.cell, self.looks.setdefault(event.cell.number, {})
            if event.kind == "step" and event.value is not None:
                on_event(event)
                looks[event.step] = event.value
                return self._should_prune(looks, event.step)
            diverged = {"state": "diverged", "value": None, "steps": 0}
            result = diverged if isinstance(event.result, Failure) else event.result
            del self.running[job.number]
            trial = Trial(job.number, job.settings, **result, looks=self.looks.pop(job.number))
            self.journal.add(vars(trial) | {"looks": list(trial.looks.items())})
            self.ended.append(trial)
            return on_event(dataclasses.replace(event, result=trial))

        Campaign(self._following, self._train, self.out).run(jobs, noting)

    def _following(self) -> Job | None:
        """The next setting to try: first interrupted ones, then one that was not tried yet."""
        if self.again:
            job = self.again.pop(0)
            self.running[job.number] = job
            return job
        tried = [t.settings for t in self.ended] + [j.settings for j in self.running.values()]
        while len(self.ended) + len(self.running) < self.count and self.begun < 100 * self.count:
            number, self.begun = self.begun, self.begun + 1
            settings = self._settings(number)
            if settings not in tried:
                self.journal.add({"number": number, "settings": settings})
                self.running[number] = Job(number, settings)
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

    def _should_prune(self, looks: dict[int, float], step: int) -> bool:
        """Whether a trial is worse at this step than half of those that ended (median), or two thirds of all (asha)."""
        sign = -1 if falls(self.metric) else 1
        if self.plan.prune == "median":
            others = sorted(sign * t.looks[step] for t in self.ended if t.state == "done" and step in t.looks)
            late = len(others) >= 3 and step >= self.steps // 5
            return late and max(sign * v for v in looks.values()) < float(np.median(others))
        if self.plan.prune == "asha":
            rung = max((r for r in self._rungs() if r <= step), default=None)
            if rung is None or sum(s >= rung for s in looks) > 1:  # it was evaluated at this rung before
                return False
            trials = [*(t.looks for t in self.ended), *self.looks.values()]
            values = [
                sign * next(v for s, v in sorted(each.items()) if s >= rung)
                for each in trials
                if max(each, default=0) >= rung
            ]
            return sum(v > sign * looks[step] for v in values) >= max(1, len(values) // 3)
        return False

    def _rungs(self) -> list[int]:
        first = max(1, self.steps // 9)
        return [first * 3**k for k in range(8) if first * 3**k < self.steps]

    def _train(self, job: Job, ask: Ask) -> Record:
        """Run every seed of a trial in a worker; the first seed may be pruned."""
        entry, finals, steps = self.build(job.settings), [], 0
        folder = self.out / "trials" / _key(job.settings)
        for seed in range(self.plan.seeds):
            callbacks = [Progress(ask, self.metric, LOOKS)] if seed == 0 else []
            runs, out = self.plan.trials * self.plan.seeds, folder / f"seed-{seed}"
            result = train(self.tuning, entry, self.plan.seed + seed, out, runs, callbacks, **self.options)
            steps += result.state.t
            final = stats.final(result.history, self.metric)
            if result.state.t < entry.schedule.steps:
                return {"state": "pruned", "value": final, "steps": steps}
            if final is None or not math.isfinite(final):
                return {"state": "diverged", "value": None, "steps": steps}
            finals.append(final)
        return {"state": "done", "value": math.fsum(finals) / len(finals), "steps": steps}

    def result(self) -> Sweep:
        samples = 0 if self.tuning.test is None else tree.length(self.tuning.test[0])
        return Sweep(self.metric, self.ended, self.out, samples, self.plan.seeds)


class _Bayes:
    """Optuna's TPE sampler, given all ended trials before each suggestion."""

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


def _key(settings: Settings) -> str:
    text = json.dumps(settings, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
