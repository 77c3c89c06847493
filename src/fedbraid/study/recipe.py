"""A run's settings written down: as the sections of a file, as TOML, and as the command that runs it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import tomli_w

import fedbraid.user_files as files
from fedbraid.algorithms.registry import algorithm_from, parts
from fedbraid.core.work import WORK, Work
from fedbraid.errors import FedbraidError
from fedbraid.parse import evaluate, literal, written
from fedbraid.run.config import SCHEDULES
from fedbraid.run.formatting import Record
from fedbraid.schedule import Buffered, Rounds, Schedule
from fedbraid.schedule.clock import constant, halfnormal
from fedbraid.schedule.selection import CustomSelection

Sections = dict[str, dict[str, Any]]


def sections(config: Record, target: float | None = None, max_bytes_up: int | None = None) -> Sections | None:
    """The sections that `fedbraid run` takes for what a run.json says; None where only Python can."""
    task, algorithm = config["task"], config["algorithm"] if is_built_by_name(config) else None
    schedule = _schedule(evaluate(config["schedule"], SCHEDULES, "schedule"), config["clients"])
    if task is None or algorithm is None or schedule is None:
        return None
    options = config["options"]
    run = {"seed": config["seed"], "device": config["device"], "target": target, "max_bytes_up": max_bytes_up}
    return {
        "task": {"name": task_name(task)},
        "algorithm": {"name": algorithm},
        "work": _work(evaluate(config["work"], WORK, "work")),
        "schedule": schedule,
        "run": {k: v for k, v in run.items() if v not in (None, "cpu")}
        | {k: v for k, v in options.items() if k in ("evaluate_every",) and v not in (None, 1)},
    }


def is_built_by_name(config: Record) -> bool:
    """Whether the algorithm's name builds the parts that ran: a custom algorithm may have any name."""
    name = config["algorithm"]
    if name is None or files.names_file(name):
        return name is not None
    try:
        return bool(parts(algorithm_from(name)) == config["parts"])
    except FedbraidError:
        return False


def task_name(spec: str) -> str:
    """`load('digits', clients=100)` as `digits(clients=100)`; other names as they are."""
    if files.names_file(spec) or not spec.startswith("load("):
        return spec
    _, (name,), given = written(spec)
    return f"{literal(name)}({', '.join(f'{k}={v}' for k, v in given.items())})"


def _work(work: Work) -> dict[str, Any]:
    """What differs from the defaults of Work, and what those of the command line would change."""
    said: dict[str, Any] = {
        "lr": work.lr if isinstance(work.lr, int | float) else repr(work.lr),
        "momentum": work.momentum,
        "batch": "full" if work.batch is None else work.batch,
    }
    if work.optimizer != "sgd":
        del said["momentum"]
    said |= {"steps": work.steps} if work.steps is not None else {"epochs": work.epochs}
    for f in fields(Work):
        value = getattr(work, f.name)
        if f.name not in ("lr", "momentum", "batch", "steps", "epochs") and value != f.default:
            said[f.name] = value
    return said


def _schedule(schedule: Schedule, clients: int) -> dict[str, Any] | None:
    said: dict[str, Any] = {"rounds": schedule.steps}
    match schedule:
        case Rounds(clients=tuple()):
            return None
        case Rounds():
            whole = isinstance(schedule.clients, float) and schedule.clients == 1
            said["per_round"] = clients if whole else schedule.clients
            said |= {"over_select": schedule.over_select} if schedule.over_select != 1 else {}
            said |= {"timeout": schedule.timeout} if schedule.timeout is not None else {}
            said |= {"sampling": schedule.sampling} if schedule.sampling != "fixed" else {}
            if isinstance(schedule.select, CustomSelection):
                return None
            said |= {"select": repr(schedule.select)} if schedule.select is not None else {}
            plain: Any = constant()
        case Buffered():
            if not isinstance(schedule.arrivals, str):
                return None
            said |= {
                "buffer": schedule.buffer,
                "concurrency": schedule.concurrency,
                "arrivals": schedule.arrivals,
            }
            plain = halfnormal()
        case _:
            return None
    if schedule.durations != plain:
        said["durations"] = repr(schedule.durations)
    if schedule.bandwidth is not None:
        said["bandwidth"] = repr(schedule.bandwidth)
    if schedule.availability is not None:
        said["availability"] = repr(schedule.availability)
    return said


def command(said: Mapping[str, Mapping[str, Any]], seeds: Sequence[int] = ()) -> str:
    """The command line for these sections; with several seeds, a loop over them."""
    words = ["fedbraid", "run", said["task"]["name"], said["algorithm"]["name"]]
    for key, value in said["task"].items():
        words += [] if key == "name" else [f"--{key.replace('_', '-')}", str(value)]
    for key, value in said["algorithm"].items():
        words += [] if key == "name" else ["-a", f"{key}={value}"]
    for section in ("work", "schedule", "run"):
        for key, value in said.get(section, {}).items():
            if not (key == "seed" and len(seeds) > 1):
                words += [f"--{key.replace('_', '-')}", str(value)]
    line = " ".join(map(quoted, words))
    if len(seeds) < 2:
        return line
    return f"for seed in {' '.join(map(str, seeds))}; do {line} --seed $seed; done"


def quoted(word: str) -> str:
    """A word as a shell reads it; in double quotes where it has single ones, which are easier on the eye."""
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)


def toml(said: Mapping[str, Mapping[str, Any]]) -> str:
    """The sections as a file for `fedbraid run`."""
    return tomli_w.dumps({section: values for section, values in said.items() if values})
