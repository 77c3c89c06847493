"""Several algorithms times several seeds on one task, each cell in a run folder.

>>> print(fb.compare(task, {"FedAvg": fb.fedavg(), "FedAdaVR": fb.fedadavr("adam", lr=0.01)},  # doctest: +SKIP
...                  fb.Work(lr=0.05, batch=10), fb.rounds(100, clients=5), seeds=5, out="runs/duel"))

Given the same folder again, finished cells are skipped and interrupted cells are resumed.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from fedbraid.algorithms.personal import local_only
from fedbraid.algorithms.registry import algorithm_of
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import integer, number
from fedbraid.core.metric_names import falls
from fedbraid.core.work import WORK, Work
from fedbraid.data.task import Task
from fedbraid.errors import ConfigError, RunError, unknown
from fedbraid.parse import evaluate
from fedbraid.run.checkpoint import Folder, Record
from fedbraid.run.config import SCHEDULES
from fedbraid.run.formatting import format_bytes, format_count
from fedbraid.run.progress import CellsBar, is_watched
from fedbraid.run.run import CLIENTS
from fedbraid.schedule import Schedule
from fedbraid.study import flops, stats
from fedbraid.study.campaign import Campaign, Cell, Entry, Event, OnEvent, Progress, claim, ignore, train
from fedbraid.study.energy import DeviceProfile, profile_of
from fedbraid.workers import Ask, Failure

FILE = "compare.json"
LOCAL_ONLY = "local_only"  # the entry that does not federate


@dataclass
class Comparison:
    """The result of a comparison."""

    task: str
    groups: list[stats.Runs] = field(repr=False)
    target: float | None = None
    failures: dict[str, list[str]] = field(default_factory=dict)  # by entry
    out: Path | None = None
    gains: list[Record] = field(default_factory=list)  # a row an entry, with local-only training
    metric: str = ""  # that they are compared by; by default the accuracy, or the loss

    def __post_init__(self) -> None:
        key = stats.compared_by(self.groups, self.metric or None)
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
    def _metered(self) -> bool:
        return any(r["energy"] is not None for r in self.rows)

    @property
    def _private(self) -> bool:
        return any(r["epsilon"] is not None for r in self.rows)

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows of the table, as text."""
        head = ["", self.metric, "rank", "seeds", "up", "down", "FLOPs", "time"]
        head += ["energy"] if self._metered else []
        head += ["ε"] if self._private else []
        if self.target is not None:
            head += [f"{what} to {self.target:.0%}" for what in ("steps", "bytes", "FLOPs", "time")] + [
                "reached"
            ]
        return head, [self._line(r) for r in self.rows]

    def _line(self, r: Record) -> list[str]:
        rank = "–" if r["rank"] is None else f"{r['rank']:.1f}"
        line = [
            r["name"], format_value(r["final"], self.metric), rank, _seeds(r), _bytes(r["bytes_up"]),
            _bytes(r["bytes_down"]), _count(r["flops"]), "–" if r["time"] is None else f"{r['time']:.4g}",
        ]  # fmt: skip
        line += [_joules(r["energy"])] if self._metered else []
        line += ["–" if r["epsilon"] is None else f"{r['epsilon']:.3g}"] if self._private else []
        if self.target is not None:
            found = {axis: value.mean for axis, value in r["to_target"].items()}
            line += [
                _number(found.get("step")), _bytes(found.get("bytes")), _count(found.get("flops")),
                _number(found.get("time")), f"{r['reached']}/{len(r['seeds'])}",
            ]  # fmt: skip
        return line

    def plot(self, metric: str | None = None, axis: str = "step") -> Any:
        """A matplotlib figure of the curves and their intervals over "step", "bytes", "time", "flops" or "energy" (extra `plot`)."""
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
            return format_value(stats.Interval(v, None, 1), self.metric)

        head = ["", "mean client", "worst tenth", "gain over local-only", "least gain", "better off"]
        return head, [
            [g["name"], say(g["mean"]), say(g["worst_tenth"]), say(g["gain"]), say(g["gain_worst"]), f"{g['better_off']:.0%}"]
            for g in self.gains
        ]  # fmt: skip

    def gains_text(self) -> list[str]:
        """The table of gains, and for how many clients the metric is undefined."""
        if not self.gains:
            return []
        left_out = max(g.get("undefined", 0) for g in self.gains)
        note = f"{self.metric} is undefined for {left_out} of the clients, which are left out of the gains."
        return ["", *aligned(*self.gained()), *([note] if left_out else [])]

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


def format_value(value: stats.Interval | None, metric: str) -> str:
    """A mean with its interval, as text.

    >>> format_value(stats.Interval(0.9712, 0.0031, 5), "accuracy"), format_value(stats.Interval(0.25, None, 1), "loss")
    ('97.12 ± 0.31 %', '0.2500')
    """
    if value is None:
        return "–"
    scale, digits, unit = (100, 2, " %") if metric == "accuracy" else (1, 4, "")
    half = "" if value.half is None else f" ± {scale * value.half:.{digits}f}"
    return f"{scale * value.mean:.{digits}f}{half}{unit}"


def _seeds(r: Record) -> str:
    return f"{len(r['seeds'])}" + (f" ({r['failed']} diverged)" if r["failed"] else "")


def _bytes(count: float | None) -> str:
    return "–" if count is None else format_bytes(round(count))


def _count(count: float | None) -> str:
    return "–" if count is None else format_count(count)


def _joules(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} J"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


# Running ------------------------------------------------------------------------------------------

Given = Algorithm | tuple[Algorithm, Work] | tuple[Algorithm, Work, Schedule]


def as_entries(
    given: Mapping[str, Given], work: Work | None = None, schedule: Schedule | None = None
) -> list[Entry]:
    """Entries from algorithms by name, each with or without its local training settings and schedule."""
    built = []
    for name, entry in given.items():
        fields: tuple[Any, ...] = entry if isinstance(entry, tuple) else (entry,)
        algorithm, entry_work, entry_schedule = fields + (None, work, schedule)[len(fields) :]
        if entry_work is None or entry_schedule is None:
            raise ConfigError(
                f"{name} has no {'work' if entry_work is None else 'schedule'}; give one for it or for all"
            )
        built.append(Entry(name, algorithm, entry_work, entry_schedule))
    return built


def compare(
    task: Task,
    entries: Mapping[str, Given] | Sequence[Entry],
    work: Work | None = None,
    schedule: Schedule | None = None,
    *,
    seeds: int | Sequence[int] = 5,
    out: str | os.PathLike[str] | None = None,
    target: float | None = None,
    jobs: int | None = None,
    on_event: OnEvent | None = None,
    options: Mapping[str, Any] | None = None,
    metric: str | None = None,
    local: bool = False,
    energy: str | DeviceProfile | None = None,
) -> Comparison:
    """Run every entry with every seed, `jobs` at a time, and compare the results.

    With `local`, every client also trains without federation, with the first entry's local training settings and as
    often, and `gains` has what each entry gains over that on the local test sets.

    Without `out`, the runs are stored in a new temporary folder, which `found.out` names. Unless `on_event` is given,
    terminals and notebooks show a bar.

    `options` are those of `simulate`, such as `evaluate_every`. `metric` is what they are compared by, one of
    the task's metrics or "loss"; by default the accuracy. With the profile of a device as `energy`, records have the
    joules that their clients spent.
    """
    who = as_entries(entries, work, schedule) if isinstance(entries, Mapping) else list(entries)
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    given = dict(options or {})
    if local and who:
        if task.test_offsets is None:
            raise ConfigError(
                "gains over local-only training need local test sets; give client_tests=, test_fraction=, natural ids"
                " or load(…, test_shares=True)"
            )
        who.append(Entry(LOCAL_ONLY, local_only(), who[0].work, who[0].schedule))
        given["evaluate_on"] = "clients"
    _check(who, numbers, target)
    profile = None if energy is None else profile_of(energy)
    folder = Path(tempfile.mkdtemp(prefix="fedbraid-compare-") if out is None else out)
    grid = Grid(folder, task, who, numbers, target, given, _metric(task, metric), profile)
    grid.save()
    bar = CellsBar() if on_event is None and is_watched() else None
    try:
        grid.run(jobs, on_event or bar or ignore)
    finally:
        if bar is not None:
            bar.close()
    return grid.result()


def resume(out: str | os.PathLike[str], *, jobs: int | None = None, on_event: OnEvent = ignore) -> Comparison:
    """Resume a comparison whose task and algorithms fedbraid can rebuild."""
    grid = Grid.load(Path(out))
    grid.run(jobs, on_event)
    return grid.result()


@dataclass
class Grid:
    """A comparison's folder: `compare.json`, and a folder an entry with a run folder a seed."""

    out: Path
    task: Task
    entries: list[Entry]
    seeds: list[int]
    target: float | None
    options: dict[str, Any]
    metric: str | None = None
    energy: DeviceProfile | None = None

    @property
    def cells(self) -> list[Cell]:
        """Cells seed by seed, so that every entry has early results."""
        return [Cell(e, s, self.out / e.folder / f"seed-{s}") for s in self.seeds for e in self.entries]

    def save(self) -> None:
        facts = {
            "task": self.task.spec,
            "task_name": self.task.name,
            "data": self.task.fingerprint,
            "seeds": self.seeds,
            "target": self.target,
            "metric": self.metric,
            "energy": self.energy and repr(self.energy),
            "options": self.options,
            "entries": [
                {
                    "name": e.name, "folder": e.folder, "algorithm": e.algorithm.name or None,
                    "work": repr(e.work), "schedule": repr(e.schedule),
                }
                for e in self.entries
            ],
        }  # fmt: skip
        claim(self.out, FILE, facts, {"data": "task"})

    @classmethod
    def load(cls, out: Path) -> Grid:
        from fedbraid.data import tasks

        recorded = Folder(out).read_json(FILE)
        try:
            if recorded["task"] is None or any(e["algorithm"] is None for e in recorded["entries"]):
                raise RunError(
                    f"the task or an algorithm of {out} was made in Python; call compare() again there"
                )
            who = [
                Entry(
                    e["name"],
                    algorithm_of(e["algorithm"]),
                    evaluate(e["work"], WORK, "work"),
                    evaluate(e["schedule"], SCHEDULES, "schedule"),
                )
                for e in recorded["entries"]
            ]
            task = tasks.reload(recorded["task"])
            energy = profile_of(recorded["energy"]) if recorded.get("energy") else None
            return cls(
                out,
                task,
                who,
                recorded["seeds"],
                recorded["target"],
                recorded["options"],
                recorded.get("metric"),
                energy,
            )
        except (KeyError, TypeError) as error:
            raise RunError(f"{out / FILE} is corrupt ({error}); restore a backup or compare again") from error

    def run(
        self,
        jobs: int | None = None,
        on_event: OnEvent = ignore,
        may_start: Callable[[Cell], bool] = lambda cell: True,
    ) -> None:
        """Run every unfinished cell, until one may not start."""

        def noting(event: Event[Cell]) -> Any:
            if isinstance(event.result, Failure) and event.cell is not None:
                event.cell.fail(event.result)
            return on_event(event)

        cells = self.cells
        on_event(Event("begin", cells=cells))
        todo = [cell for cell in cells if not self.is_over(cell)]
        Campaign(todo, self._run_cell, self.out, may_start).run(jobs, noting)

    def is_over(self, cell: Cell) -> bool:
        by_client = self.options.get("evaluate_on") == "clients"
        is_done = cell.is_done and (not by_client or (cell.folder / CLIENTS).exists())
        return is_done or cell.failure is not None

    def _run_cell(self, cell: Cell, ask: Ask) -> None:
        logging.disable(logging.NOTSET if cell.seed == self.seeds[0] else logging.WARNING)  # log once
        progress, runs = Progress(ask, self.metric or self.task.measures[0]), len(self.cells)
        train(self.task, cell.entry, cell.seed, cell.folder, runs, [progress], self.energy, **self.options)

    def _gains(self, key: str) -> list[Record]:
        """By entry, over seeds: the clients' mean, the worst tenth's, and their gain over local-only training."""
        if all(e.name != LOCAL_ONLY for e in self.entries):
            return []
        by_cell = {
            (cell.entry.name, cell.seed): {r["client"]: r[key] for r in Folder(cell.folder).read_json(CLIENTS)["clients"]}
            for cell in self.cells
            if cell.failure is None
        }  # fmt: skip
        rows, sign = [], -1 if falls(key) else 1
        for e in self.entries:
            values: list[list[float]] = []
            more: list[float] = []
            left_out = 0  # clients for which the metric is undefined
            for seed in self.seeds:  # seeds of which neither run diverged
                local, other = by_cell.get((e.name, seed), {}), by_cell.get((LOCAL_ONLY, seed), {})
                defined = [i for i in local if local[i] is not None and other.get(i) is not None]
                if not defined:
                    continue
                left_out = max(left_out, len(local) - len(defined))
                values.append([local[i] for i in defined])
                more += [sign * (local[i] - other[i]) for i in defined]
            if not values:
                continue
            worst = [sorted(v, reverse=sign < 0)[: max(1, len(v) // 10)] for v in values]
            rows.append({
                "name": e.name, "mean": fmean(map(fmean, values)), "worst_tenth": fmean(map(fmean, worst)),
                "gain": fmean(more), "gain_worst": min(more), "better_off": sum(g > 0 for g in more) / len(more),
                **({"undefined": left_out} if left_out else {}),
            })  # fmt: skip
        return rows

    def result(self) -> Comparison:
        groups, failures = [], {}
        for e in self.entries:
            client_flops = flops.of_clients(self.task, e.algorithm, e.work)
            cells = [cell for cell in self.cells if cell.entry is e]
            if errors := [why for cell in cells if (why := cell.failure) is not None]:
                failures[e.name] = errors
            cells = [cell for cell in cells if cell.failure is None]
            histories = [list(Folder(cell.folder).records()) for cell in cells]
            spent = [flops.by_step(client_flops, h) for h in histories]
            groups.append(stats.Runs(e.name, [cell.seed for cell in cells], histories, spent))
        name = self.task.spec or self.task.name
        comparison = Comparison(name, groups, self.target, failures, self.out, metric=self.metric or "")
        comparison.gains = self._gains(comparison.metric)
        return comparison


def _metric(task: Task, name: str | None) -> str | None:
    if name is not None and name not in (metrics := (*task.measures, "train_loss")):
        raise unknown("metric", name, metrics)
    return name


def _check(who: Sequence[Entry], seeds: Sequence[int], target: float | None) -> None:
    if not who:
        raise ConfigError("nothing to compare; name at least one algorithm")
    for what, values in (("entries", [e.name for e in who]), ("seeds", list(seeds))):
        if len(set(values)) < len(values):
            raise ConfigError(f"two {what} are the same in {values}; give each once, under a distinct name")
    integer("seeds", len(seeds))
    if target is not None:
        number("target", target, "(0, 1]", "is not a fraction such as 0.95")
