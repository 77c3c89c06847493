"""Run folders as data for reports: runs grouped by everything but their seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

import fedbraid.user_files as files
from fedbraid.errors import FedbraidError, RunError
from fedbraid.parse import call
from fedbraid.run.checkpoint import Folder, Record
from fedbraid.run.task_summary import TaskSummary
from fedbraid.study import stats
from fedbraid.study.campaign import FAILED
from fedbraid.study.compare import FILE as COMPARE
from fedbraid.study.race import FILE as CHOOSE
from fedbraid.study.recipe import is_built_by_name

NEEDED = ("step", "time", "clients", "bytes_up", "bytes_down", "up", "down")


@dataclass(frozen=True)
class Stored:
    """A run as its folder stores it."""

    path: Path
    config: Record
    records: list[Record] = field(repr=False)
    finished: bool
    name: str | None = None  # in a comparison, what the entry is called

    @property
    def steps(self) -> int:
        """The number of server steps of the finished run."""
        _, args, settings = call(self.config["schedule"])
        return int(settings.get("steps", args[0] if args else 0))

    @property
    def kind(self) -> tuple[str, ...]:
        """The settings that runs share if they differ only in their seed."""
        return tuple(str(self.config.get(k)) for k in ("parts", "work", "schedule"))


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    name: str
    runs: list[Stored]

    @property
    def config(self) -> Record:
        return self.runs[0].config


@dataclass
class Collection:
    """Runs of one task."""

    groups: list[Group]
    target: float | None
    failed: dict[str, int] = field(default_factory=dict)
    task_summary: TaskSummary | None = None
    why: str = ""  # why there is no summary of the task
    metric: str | None = None  # the metric that a comparison sets

    @property
    def config(self) -> Record:
        return self.groups[0].config

    @property
    def finished(self) -> bool:
        return all(run.finished for g in self.groups for run in g.runs)

    def statistics(self) -> list[stats.Runs]:
        return [
            stats.Runs(
                g.name, [r.config["seed"] for r in g.runs], [r.records for r in g.runs], self._flops(g)
            )
            for g in self.groups
        ]

    def _flops(self, group: Group) -> list[list[float] | None]:
        """FLOPs by step; None unless there is a summary of the task and the algorithm can be rebuilt."""
        from fedbraid.algorithms.registry import algorithm_from
        from fedbraid.core.work import WORK
        from fedbraid.parse import evaluate
        from fedbraid.study import flops

        client_flops = None
        name = group.config["algorithm"]
        if (
            self.task_summary is not None
            and not files.names_file(name or "")
            and is_built_by_name(group.config)
        ):
            algorithm = algorithm_from(name)
            client_flops = flops.of_summary(
                self.task_summary, algorithm, evaluate(group.config["work"], WORK, "work")
            )
        return [
            None if client_flops is None else flops.by_step(client_flops, run.records) for run in group.runs
        ]


def collect(
    paths: Sequence[Path],
    target: float | None = None,
    unfinished: bool = False,
    task_summary: TaskSummary | None = None,
) -> Collection:
    """The runs in these folders, which may be comparisons; refuses to mix tasks, and refuses unfinished runs by default."""
    runs: list[Stored] = []
    failed: dict[str, int] = {}
    goal, metric = target, None
    for path in map(_of_choice, paths):
        if (path / COMPARE).exists():
            planned = Folder(path).read_json(COMPARE)
            goal = planned.get("target") if goal is None else goal
            metric = planned.get("metric") or metric
            runs += _cells(path, planned, unfinished, failed)
        else:
            runs.append(read(path, unfinished))
    if not runs:
        raise RunError(f"{paths[0] if paths else 'nothing'} holds no run yet; wait for its first step")
    first = runs[0]
    for run in runs[1:]:
        if run.config.get("data") != first.config.get("data"):
            raise RunError(
                f"{first.path} is of task {_task_name(first)} and {run.path} of {_task_name(run)}; report one task at a time"
            )
    collection = Collection(_grouped(runs), goal, failed, task_summary, metric=metric)
    if task_summary is None:
        collection.task_summary, collection.why = _summarize(first)
    return collection


def _of_choice(path: Path) -> Path:
    """The final of a choice, or its race until there is one; other folders unchanged."""
    folders = (path / "confirm", path / "race") if (path / CHOOSE).exists() else ()
    return next((folder for folder in folders if (folder / COMPARE).exists()), path)


def read(path: Path, unfinished: bool = False, name: str | None = None) -> Stored:
    """One complete run folder; others are refused."""
    folder = Folder(path)
    config = folder.config()
    for key in (
        "task",
        "data",
        "algorithm",
        "parts",
        "work",
        "schedule",
        "seed",
        "options",
        "clients",
        "device",
    ):
        if key not in config:
            raise RunError(f"{path / 'run.json'} lacks {key!r}; restore it or start a new run")
    records = list(folder.records())
    for record in records:
        if not isinstance(record, dict) or any(key not in record for key in NEEDED):
            raise RunError(
                f"{path / 'metrics.jsonl'} holds a record that is not a step's; resume the run to repair it"
            )
    run = Stored(path, config, records, (path / "model.safetensors").exists(), name)
    if not run.finished and not unfinished:
        at = f"step {records[-1]['step'] if records else 0} of {run.steps}"
        raise RunError(
            f"{path} is not finished ({at}); see it with `fedbraid watch {quote(str(path))}`, end it with `fedbraid resume {quote(str(path))}`,"
            " or report what there is with --unfinished"
        )
    return run


def _cells(path: Path, planned: Record, unfinished: bool, failed: dict[str, int]) -> list[Stored]:
    runs = []
    try:
        for entry in planned["entries"]:
            for seed in planned["seeds"]:
                folder = path / entry["folder"] / f"seed-{seed}"
                if (folder / FAILED).exists():
                    failed[entry["name"]] = failed.get(entry["name"], 0) + 1
                elif (folder / "run.json").exists():
                    runs.append(read(folder, True, entry["name"]))
                if not unfinished and not any((folder / f).exists() for f in (FAILED, "model.safetensors")):
                    raise RunError(
                        f"{path} is not finished; see it with `fedbraid watch {quote(str(path))}`, end it with"
                        f" `fedbraid compare {quote(str(path))}`, or report what there is with --unfinished"
                    )
    except (KeyError, TypeError) as error:
        raise RunError(f"{path / COMPARE} is corrupt ({error}); restore a backup or compare again") from error
    return runs


def _grouped(runs: Sequence[Stored]) -> list[Group]:
    kinds: dict[Any, list[Stored]] = {}
    for run in runs:
        same = kinds.setdefault((run.name, run.kind), [])
        if any(run.config["seed"] == other.config["seed"] for other in same):
            other = next(o for o in same if o.config["seed"] == run.config["seed"])
            raise RunError(f"{run.path} is the same run as {other.path}, seed and all; give each once")
        same.append(run)
    names = _names([same[0] for same in kinds.values()])
    return [Group(name, same) for name, same in zip(names, kinds.values())]


def _names(firsts: Sequence[Stored]) -> list[str]:
    """A short name for each group: the entry's or algorithm's and, to tell twins apart, the settings that differ."""
    plain = [run.name or run.config["algorithm"] or run.path.name for run in firsts]
    names = []
    for run, name in zip(firsts, plain):
        twins = [o for o, n in zip(firsts, plain) if n == name]
        names.append(name if len(twins) == 1 else f"{name}, {_differing(run, twins)}")
    repeated = {n for n in names if names.count(n) > 1}
    return [f"{n} ({run.path.name})" if n in repeated else n for run, n in zip(firsts, names)]


def _differing(run: Stored, twins: Sequence[Stored]) -> str:
    every = [{**call(t.config["work"])[2], **call(t.config["schedule"])[2]} for t in twins]
    settings = {**call(run.config["work"])[2], **call(run.config["schedule"])[2]}
    return (
        ", ".join(f"{k}={v}" for k, v in settings.items() if any(e.get(k) != v for e in every))
        or run.path.name
    )


def _task_name(run: Stored) -> str:
    return str(run.config["task"] or run.config.get("task_name"))


def _summarize(run: Stored) -> tuple[TaskSummary | None, str]:
    """The summary of a run's task; None and the reason where it cannot be made."""
    from fedbraid.data import tasks
    from fedbraid.run import task_summary

    if run.config["task"] is None or files.names_file(run.config["task"]):  # a report executes no user's file
        summary = task_summary.noted(Folder(run.path))
        why = "The task was made in Python and the run's folder does not describe it, so its partition is not shown."
        return summary, "" if summary else why
    try:
        return task_summary.of_task(tasks.reload(run.config["task"])), ""
    except FedbraidError as error:
        return None, f"The task's data is not available here, so its partition is not shown: {error}."
