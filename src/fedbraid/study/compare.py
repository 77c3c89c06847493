"""Several algorithms times several seeds on one task, each cell a run folder of its own.

>>> print(fb.compare(task, {"FedAvg": fb.fedavg(), "FedAdaVR": fb.fedadavr("adam", lr=0.01)},  # doctest: +SKIP
...                  fb.Work(lr=0.05, batch=10), fb.rounds(100, clients=5), seeds=5, out="runs/duel"))

Given the same folder again, cells that are done are skipped and cells that were stopped go on.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from fedbraid.algorithms.personal import local_only
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import integer, number
from fedbraid.core.metric_names import falls
from fedbraid.core.work import WORK, Work
from fedbraid.data.task import Task
from fedbraid.errors import ConfigError, EngineError, RunError, unknown
from fedbraid.parse import evaluate
from fedbraid.run.checkpoint import Folder, Record
from fedbraid.run.formatting import format_bytes, format_count
from fedbraid.run.simulate import CLIENTS, SCHEDULES, Run, algorithm_of, parts, simulate
from fedbraid.schedule import Schedule
from fedbraid.study import callable_module, flops, stats
from fedbraid.workers import Ask, Failure, WorkerPool, prepare

FILE = "compare.json"
FAILED = "failed.json"
LOCAL_ONLY = "local_only"  # the contestant that does not federate
ENGINE = "in_process(threads=1)"


@dataclass(frozen=True)
class Contestant:
    """What is compared: an algorithm with the work and schedule that go with it."""

    name: str
    algorithm: Algorithm
    work: Work
    schedule: Schedule

    def __post_init__(self) -> None:
        self.algorithm.fits(self.work)
        object.__setattr__(self, "work", self.work.tabled(self.schedule.steps))

    @property
    def folder(self) -> str:
        """A folder name that two contestants share only if they are the same."""
        what = repr((parts(self.algorithm), self.work, self.schedule)).encode()
        slug = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40]
        return f"{slug}-{hashlib.blake2b(what, digest_size=4).hexdigest()}"


@dataclass(frozen=True)
class Cell:
    """One contestant with one seed."""

    contestant: Contestant
    seed: int
    place: Path

    @property
    def done(self) -> bool:
        return (self.place / "model.safetensors").exists()

    @property
    def failure(self) -> str | None:
        """Why it has no result, where it diverged."""
        path = self.place / FAILED
        return Folder(self.place).read_json(FAILED)["error"] if path.exists() else None


class Watcher(Protocol):
    """Sees a comparison go on."""

    def begin(self, cells: Sequence[Cell]) -> None: ...

    def step(self, cell: Cell, step: int, value: float | None) -> None: ...

    def done(self, cell: Cell) -> None: ...

    def tick(self) -> None: ...


@dataclass
class Comparison:
    """What a comparison came to."""

    task: str
    groups: list[stats.Runs] = field(repr=False)
    target: float | None = None
    failures: dict[str, list[str]] = field(default_factory=dict)  # by contestant
    out: Path | None = None
    gains: list[Record] = field(default_factory=list)  # a row a contestant, where clients also trained alone
    metric: str = ""  # what they are compared by; the accuracy or the loss unless told

    def __post_init__(self) -> None:
        key = stats.judged_by(self.groups, self.metric or None)
        if key is None:
            what = f"has the metric {self.metric!r}" if self.metric else "of the comparison was evaluated"
            raise RunError(f"no run {what}; give evaluate_every, and a task with a test set and its metrics")
        self.metric = key
        ranks = stats.ranks(self.groups, key)
        self.rows = [
            stats.summary(g, key, self.target)
            | {"rank": ranks[g.name], "failed": len(self.failures.get(g.name, []))}
            for g in self.groups
        ]
        self.verdict = stats.verdict([r for r in self.rows if not r["failed"]])
        for name, errors in self.failures.items():
            self.verdict += f" {name} diverged with {len(errors)} of its seeds."

    def as_json(self) -> Record:
        return {
            "task": self.task,
            "metric": self.metric,
            "target": self.target,
            "verdict": self.verdict,
            "failures": self.failures,
            "out": None if self.out is None else str(self.out),
            "rows": stats.plain(self.rows),
            **({"gains": self.gains} if self.gains else {}),
        }

    @property
    def _private(self) -> bool:
        return any(r["epsilon"] is not None for r in self.rows)

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows of the table, as text."""
        head = ["", self.metric, "rank", "seeds", "up", "down", "FLOPs", "time"]
        head += ["ε"] if self._private else []
        if self.target is not None:
            head += [f"{what} to {self.target:.0%}" for what in ("steps", "bytes", "FLOPs", "time")] + [
                "reached"
            ]
        return head, [self._line(r) for r in self.rows]

    def _line(self, r: Record) -> list[str]:
        rank = "–" if r["rank"] is None else f"{r['rank']:.1f}"
        line = [
            r["name"], shown(r["final"], self.metric), rank, str(len(r["seeds"])), _bytes(r["bytes_up"]),
            _bytes(r["bytes_down"]), _count(r["flops"]), "–" if r["time"] is None else f"{r['time']:.4g}",
        ]  # fmt: skip
        line += ["–" if r["epsilon"] is None else f"{r['epsilon']:.3g}"] if self._private else []
        if self.target is not None:
            found = {axis: value.mean for axis, value in r["to_target"].items()}
            line += [
                _number(found.get("step")), _bytes(found.get("bytes")), _count(found.get("flops")),
                _number(found.get("time")), f"{r['reached']}/{len(r['seeds'])}",
            ]  # fmt: skip
        return line

    def plot(self, metric: str | None = None, axis: str = "step") -> Any:
        """A matplotlib figure of the curves and their intervals over "step", "bytes", "time" or "flops" (extra `plot`)."""
        from fedbraid.report.figure import figure

        key = metric or self.metric
        curves = {g.name: c for g in self.groups if (c := stats.curve(g, key)) and axis in c["x"]}
        if not curves:
            raise RunError(f"the runs have no {key} over {axis} to plot; give another metric, such as 'loss'")
        return figure(curves, key, axis, self.target)

    def _repr_html_(self) -> str:
        from fedbraid.report import notebook

        return notebook.comparison_as_html(self)

    def gained(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows of the table of gains, as text."""

        def say(v: float) -> str:
            return shown(stats.Interval(v, None, 1), self.metric)

        head = ["", "mean client", "worst tenth", "gain over alone", "least gain", "better off"]
        return head, [
            [g["name"], say(g["mean"]), say(g["worst_tenth"]), say(g["gain"]), say(g["gain_worst"]), f"{g['better_off']:.0%}"]
            for g in self.gains
        ]  # fmt: skip

    def gains_text(self) -> list[str]:
        """The table of gains, and for how many clients the metric is undefined."""
        if not self.gains:
            return []
        left_out = max(g.get("undefined", 0) for g in self.gains)
        said = f"{self.metric} is undefined for {left_out} of the clients, which are left out of the gains."
        return ["", *aligned(*self.gained()), *([said] if left_out else [])]

    def __str__(self) -> str:
        lines = aligned(*self.cells())
        return "\n".join([*lines, self.verdict, *self.gains_text()])


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines of text."""
    wide = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, wide)))
        for row in [head, *rows]
    ]


def shown(value: stats.Interval | None, metric: str) -> str:
    """A mean with its interval, as people write it.

    >>> shown(stats.Interval(0.9712, 0.0031, 5), "accuracy"), shown(stats.Interval(0.25, None, 1), "loss")
    ('97.12 ± 0.31 %', '0.2500')
    """
    if value is None:
        return "–"
    scale, digits, unit = (100, 2, " %") if metric == "accuracy" else (1, 4, "")
    half = "" if value.half is None else f" ± {scale * value.half:.{digits}f}"
    return f"{scale * value.mean:.{digits}f}{half}{unit}"


def _bytes(count: float | None) -> str:
    return "–" if count is None else format_bytes(round(count))


def _count(count: float | None) -> str:
    return "–" if count is None else format_count(count)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


# Running ------------------------------------------------------------------------------------------

Entry = Algorithm | tuple[Algorithm, Work] | tuple[Algorithm, Work, Schedule]


def contestants(
    entries: Mapping[str, Entry], work: Work | None = None, schedule: Schedule | None = None
) -> list[Contestant]:
    """Contestants from algorithms by name, alone or with a work and schedule of their own."""
    made = []
    for name, entry in entries.items():
        given: tuple[Any, ...] = entry if isinstance(entry, tuple) else (entry,)
        own = [*given, *(None, work, schedule)[len(given) :]]
        algorithm, own_work, own_schedule = own
        if own_work is None or own_schedule is None:
            raise ConfigError(
                f"{name} has no {'work' if own_work is None else 'schedule'}; give one for it or for all"
            )
        made.append(Contestant(name, algorithm, own_work, own_schedule))
    return made


def compare(
    task: Task,
    entries: Mapping[str, Entry] | Sequence[Contestant],
    work: Work | None = None,
    schedule: Schedule | None = None,
    *,
    seeds: int | Sequence[int] = 5,
    out: str | os.PathLike[str],
    target: float | None = None,
    jobs: int | None = None,
    watcher: Watcher | None = None,
    options: Mapping[str, Any] | None = None,
    metric: str | None = None,
    local: bool = False,
) -> Comparison:
    """Run every contestant with every seed, `jobs` at a time, and compare what came of them.

    With `local`, clients also train alone, with the first one's work and as often, and `gains` says what each
    contestant gives them over that, on their own test shares.

    `options` are those of `simulate`, such as `evaluate_every`. `metric` is what they are compared by, one of
    the task's own or "loss"; unless given, the accuracy.
    """
    who = contestants(entries, work, schedule) if isinstance(entries, Mapping) else list(entries)
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    given = dict(options or {})
    if local and who:
        if task.test_offsets is None:
            raise ConfigError(
                "what clients gain over training alone is seen on their own test shares; give client_tests=, natural ids"
                " or load(…, test_shares=True)"
            )
        who.append(Contestant(LOCAL_ONLY, local_only(), who[0].work, who[0].schedule))
        given["evaluate_on"] = "clients"
    _check(who, numbers, target)
    grid = Grid(Path(out), task, who, numbers, target, given, _metric(task, metric))
    grid.save()
    grid.run(jobs, watcher)
    return grid.result()


def resume(
    out: str | os.PathLike[str], *, jobs: int | None = None, watcher: Watcher | None = None
) -> Comparison:
    """Go on with a comparison whose task and algorithms fedbraid can build again."""
    grid = Grid.load(Path(out))
    grid.run(jobs, watcher)
    return grid.result()


@dataclass
class Grid:
    """A comparison's folder: `compare.json`, and a folder a contestant with a run folder a seed."""

    out: Path
    task: Task
    contestants: list[Contestant]
    seeds: list[int]
    target: float | None
    options: dict[str, Any]
    metric: str | None = None

    @property
    def cells(self) -> list[Cell]:
        """Seed by seed, so that every contestant has something to show early."""
        return [Cell(c, s, self.out / c.folder / f"seed-{s}") for s in self.seeds for c in self.contestants]

    def save(self) -> None:
        folder = Folder(self.out)
        if (self.out / FILE).exists():
            known = folder.read_json(FILE)
            if known.get("data") != self.task.fingerprint:
                raise RunError(
                    f"{self.out} compares on {known.get('task')}, not on {self.task.spec or self.task.name};"
                    " choose another out="
                )
        elif self.out.exists() and any(self.out.iterdir()):
            raise RunError(f"{self.out} holds other files and no {FILE}; give out= a new or empty folder")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            folder.write_json(FILE, self._described())
        except OSError as error:
            raise RunError(f"{self.out} cannot be written: {error.strerror}; choose another out=") from error

    def _described(self) -> Record:
        return {
            "task": self.task.spec,
            "task_name": self.task.name,
            "data": self.task.fingerprint,
            "seeds": self.seeds,
            "target": self.target,
            "metric": self.metric,
            "options": self.options,
            "contestants": [
                {
                    "name": c.name, "folder": c.folder, "algorithm": c.algorithm.name or None,
                    "work": repr(c.work), "schedule": repr(c.schedule),
                }
                for c in self.contestants
            ],
        }  # fmt: skip

    @classmethod
    def load(cls, out: Path) -> Grid:
        from fedbraid.data import tasks

        known = Folder(out).read_json(FILE)
        try:
            if known["task"] is None or any(c["algorithm"] is None for c in known["contestants"]):
                raise RunError(
                    f"the task or an algorithm of {out} was made in Python; call compare() again there"
                )
            who = [
                Contestant(
                    c["name"],
                    algorithm_of(c["algorithm"]),
                    evaluate(c["work"], WORK, "work"),
                    evaluate(c["schedule"], SCHEDULES, "schedule"),
                )
                for c in known["contestants"]
            ]
            task = tasks.reload(known["task"])
            return cls(out, task, who, known["seeds"], known["target"], known["options"], known.get("metric"))
        except (KeyError, TypeError) as error:
            raise RunError(f"{out / FILE} lacks or garbles {error}; restore it or compare anew") from error

    def run(self, jobs: int | None, watcher: Watcher | None) -> None:
        """Every cell that is not done yet."""
        cells = self.cells
        todo = iter([c for c in cells if not self._done(c) and c.failure is None])
        if watcher is not None:
            watcher.begin(cells)

        def on_message(cell: Cell, said: tuple[int, float | None]) -> None:
            if watcher is not None:
                watcher.step(cell, *said)

        def done(cell: Cell, result: Failure | None) -> None:
            if result is not None and result.kind != "Diverged":
                raise EngineError(f"{cell.contestant.name} with seed {cell.seed} failed: {result.message}")
            if result is not None:
                Folder(cell.place).write_json(FAILED, {"error": result.message})
            if watcher is not None:
                watcher.done(cell)

        tick = (lambda: None) if watcher is None else watcher.tick
        prepare()
        with WorkerPool(self._job, jobs) as pool:
            pool.run(lambda: next(todo, None), done, on_message, tick)

    @property
    def local(self) -> bool:
        """Whether clients also train alone."""
        return any(c.name == LOCAL_ONLY for c in self.contestants)

    def _done(self, cell: Cell) -> bool:
        return cell.done and (not self.local or (cell.place / CLIENTS).exists())

    def _gains(self, key: str) -> list[Record]:
        """By contestant, over seeds: the clients' mean, the worst tenth's, and what they gain over training alone."""
        if not self.local:
            return []
        rows, sign = [], -1 if falls(key) else 1
        for c in self.contestants:
            values: list[list[float]] = []
            more: list[list[float]] = []
            left_out = 0  # clients for which the metric is undefined
            for cell in (x for x in self.cells if x.contestant is c and x.failure is None):
                mine = {r["client"]: r[key] for r in Folder(cell.place).read_json(CLIENTS)["clients"]}
                other = next(x for x in self.cells if x.contestant.name == LOCAL_ONLY and x.seed == cell.seed)
                lone = {r["client"]: r[key] for r in Folder(other.place).read_json(CLIENTS)["clients"]}
                defined = [i for i in mine if mine[i] is not None and lone.get(i) is not None]
                left_out = max(left_out, len(mine) - len(defined))
                values.append([mine[i] for i in defined])
                more.append([sign * (mine[i] - lone[i]) for i in defined])
            values = [v for v in values if v]
            if not values:
                continue
            worst = [sorted(v, reverse=sign < 0)[: max(1, len(v) // 10)] for v in values]
            flat = [g for some in more for g in some]
            rows.append({
                "name": c.name, "mean": fmean(map(fmean, values)), "worst_tenth": fmean(map(fmean, worst)),
                "gain": fmean(flat), "gain_worst": min(flat), "better_off": sum(g > 0 for g in flat) / len(flat),
                **({"undefined": left_out} if left_out else {}),
            })  # fmt: skip
        return rows

    def _job(self, cell: Cell, ask: Ask) -> None:
        c = cell.contestant
        logging.disable(logging.NOTSET if cell.seed == self.seeds[0] else logging.WARNING)  # say it once
        result = simulate(
            self.task, c.algorithm, c.work, c.schedule, seed=cell.seed, engine=ENGINE, out=cell.place,
            callbacks=[_Told(ask)], **self.options,
        )  # fmt: skip
        if self.local:
            Folder(cell.place).write_json(CLIENTS, {"clients": result.per_client()})

    def result(self) -> Comparison:
        groups, failures = [], {}
        for c in self.contestants:
            visit = flops.of_clients(self.task, c.algorithm, c.work)
            cells = [cell for cell in self.cells if cell.contestant is c]
            if errors := [why for cell in cells if (why := cell.failure) is not None]:
                failures[c.name] = errors
            cells = [cell for cell in cells if cell.failure is None]
            histories = [list(Folder(cell.place).records()) for cell in cells]
            spent = [flops.by_step(visit, h) for h in histories]
            groups.append(stats.Runs(c.name, [cell.seed for cell in cells], histories, spent))
        made = Comparison(
            self.task.spec or self.task.name,
            groups,
            self.target,
            failures,
            self.out,
            metric=self.metric or "",
        )
        made.gains = self._gains(made.metric)
        return made


class _Told:
    """Tells the parent how a cell is doing, a few times a second."""

    EVERY = 0.2

    def __init__(self, ask: Ask) -> None:
        self.ask, self.last = ask, 0.0
        self.value: float | None = None

    def step(self, record: Record, run: Run) -> None:
        self.value = record.get("accuracy", record.get("loss", self.value))
        now = time.monotonic()
        if now - self.last >= self.EVERY or record["step"] == run.schedule.steps:
            self.last = now
            self.ask((record["step"], self.value))


def _metric(task: Task, name: str | None) -> str | None:
    if name is not None and name not in (known := (*task.measures, "train_loss")):
        raise unknown("metric", name, known)
    return name


def _check(who: Sequence[Contestant], seeds: Sequence[int], target: float | None) -> None:
    if not who:
        raise ConfigError("nothing to compare; name at least one algorithm")
    for what, values in (("contestants", [c.name for c in who]), ("seeds", list(seeds))):
        if len(set(values)) < len(values):
            raise ConfigError(f"two {what} are the same in {values}; give each once, under its own name")
    integer("seeds", len(seeds))
    if target is not None:
        number("target", target, "(0, 1]", "is no accuracy, which is a share such as 0.95")


callable_module(__name__)
