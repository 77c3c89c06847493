"""A run's settings as the sections of a file, as TOML, and as the command that repeats the run."""

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
    """The sections that `fedbraid run` takes for a run.json; None if only Python can express it."""
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
    """`load('digits', clients=100)` as `digits(clients=100)`; other names unchanged."""
    if files.names_file(spec) or not spec.startswith("load("):
        return spec
    _, (name,), keywords = written(spec)
    return f"{literal(name)}({', '.join(f'{k}={v}' for k, v in keywords.items())})"


def _work(work: Work) -> dict[str, Any]:
    """The settings that differ from the defaults of Work or of the command line."""
    section: dict[str, Any] = {
        "lr": work.lr if isinstance(work.lr, int | float) else repr(work.lr),
        "momentum": work.momentum,
        "batch": "full" if work.batch is None else work.batch,
    }
    if work.optimizer != "sgd":
        del section["momentum"]
    section |= {"steps": work.steps} if work.steps is not None else {"epochs": work.epochs}
    for f in fields(Work):
        value = getattr(work, f.name)
        if f.name not in ("lr", "momentum", "batch", "steps", "epochs") and value != f.default:
            section[f.name] = value
    return section


def _schedule(schedule: Schedule, clients: int) -> dict[str, Any] | None:
    section: dict[str, Any] = {"rounds": schedule.steps}
    match schedule:
        case Rounds(clients=tuple()):
            return None
        case Rounds():
            is_everyone = isinstance(schedule.clients, float) and schedule.clients == 1
            section["per_round"] = clients if is_everyone else schedule.clients
            section |= {"over_select": schedule.over_select} if schedule.over_select != 1 else {}
            section |= {"timeout": schedule.timeout} if schedule.timeout is not None else {}
            section |= {"sampling": schedule.sampling} if schedule.sampling != "fixed" else {}
            if isinstance(schedule.select, CustomSelection):
                return None
            section |= {"select": repr(schedule.select)} if schedule.select is not None else {}
            plain: Any = constant()
        case Buffered():
            if not isinstance(schedule.arrivals, str):
                return None
            section |= {
                "buffer": schedule.buffer,
                "concurrency": schedule.concurrency,
                "arrivals": schedule.arrivals,
            }
            plain = halfnormal()
        case _:
            return None
    if schedule.durations != plain:
        section["durations"] = repr(schedule.durations)
    if schedule.bandwidth is not None:
        section["bandwidth"] = repr(schedule.bandwidth)
    if schedule.availability is not None:
        section["availability"] = repr(schedule.availability)
    return section


def command(config: Mapping[str, Mapping[str, Any]], seeds: Sequence[int] = ()) -> str:
    """The command line for these sections; with several seeds, a loop over them."""
    words = ["fedbraid", "run", config["task"]["name"], config["algorithm"]["name"]]
    for key, value in config["task"].items():
        words += [] if key == "name" else [f"--{key.replace('_', '-')}", str(value)]
    for key, value in config["algorithm"].items():
        words += [] if key == "name" else ["-a", f"{key}={value}"]
    for section in ("work", "schedule", "run"):
        for key, value in config.get(section, {}).items():
            if not (key == "seed" and len(seeds) > 1):
                words += [f"--{key.replace('_', '-')}", str(value)]
    line = " ".join(map(quoted, words))
    if len(seeds) < 2:
        return line
    return f"for seed in {' '.join(map(str, seeds))}; do {line} --seed $seed; done"


def quoted(word: str) -> str:
    """A word quoted for a shell; in double quotes if it has single ones, which is easier to read."""
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)


def toml(config: Mapping[str, Mapping[str, Any]]) -> str:
    """The sections as a file for `fedbraid run`."""
    return tomli_w.dumps({section: values for section, values in config.items() if values})
