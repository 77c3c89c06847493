"""The content of run.json, and what is rebuilt from it."""

from __future__ import annotations

import platform
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from fedbraid import __version__
from fedbraid.algorithms.lora import how as lora
from fedbraid.algorithms.registry import algorithm_of, parts
from fedbraid.core.algorithm import Algorithm
from fedbraid.data import tasks
from fedbraid.data.task import Task
from fedbraid.engines.engine import Setup
from fedbraid.errors import ConfigError, RunError
from fedbraid.run import fingerprint as bits
from fedbraid.run.checkpoint import Folder, Record
from fedbraid.run.noise_outlook import privacy_of
from fedbraid.run.run import Options
from fedbraid.schedule import Buffered, Rounds, Schedule, clock
from fedbraid.schedule.selection import SELECTIONS

_TASKS: weakref.WeakValueDictionary[int, Task] = weakref.WeakValueDictionary()

_DURATIONS = {
    f.__name__: f
    for f in (
        clock.constant,
        clock.halfnormal,
        clock.lognormal,
        clock.exponential,
        clock.trace,
        clock.classes,
        clock.measured,
    )
}

SCHEDULES: dict[str, Any] = {
    "Rounds": Rounds,
    "Buffered": Buffered,
    "bandwidth": clock.bandwidth,
    "devices": clock.devices,
    "availability": clock.availability,
    **SELECTIONS,
    **_DURATIONS,
}


def describe(
    setup: Setup, schedule: Schedule, engine: bits.Described, options: Options, device: str
) -> Record:
    """Everything that is needed to repeat a run."""
    algorithm, task = setup.algorithm, setup.task
    return {
        "task": task.spec,
        "task_name": task.name,
        "data": task.fingerprint,
        "clients": task.clients,
        "parameters": task.layout.size,
        "algorithm": algorithm.name or None,
        "parts": parts(algorithm),
        **({} if (adapters := lora(task.layout, algorithm)) is None else {"lora": adapters}),
        **({} if (private := privacy_of(algorithm)) is None else {"privacy": private}),
        **({"personal": list(task.personal)} if task.personal else {}),
        "work": repr(setup.work),
        "schedule": repr(schedule),
        "seed": setup.seed,
        "engine": engine.describe(),
        **({} if (plan := getattr(engine, "plan", None)) is None else {"plan": plan.reason}),
        "device": device,
        "options": {
            "evaluate_every": options.evaluate_every, "evaluate_on": options.evaluate_on, "client_state_storage": options.client_state_storage,
            "checkpoint_every": options.checkpoint_every, "log_layer_norms": options.log_layer_norms, "ignore_divergence": options.ignore_divergence,
        },
        "bits": bits.describe(engine),
        "versions": {
            "fedbraid": __version__, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version(),
        },
    }  # fmt: skip


def same(folder: Folder, recorded: Record, config: Record) -> None:
    """Refuse to mix two runs in one folder."""
    for key in ("data", "parts", "work", "schedule", "seed", "engine", "device"):
        if recorded.get(key) != config[key]:
            raise RunError(
                f"{folder.path} already contains a run with {key}={recorded.get(key)!r} (now: {config[key]!r});"
                " choose another out= or delete the folder"
            )


def remember_task(task: Task) -> None:
    """Let `resume` find a task that was made in Python, as long as it lives."""
    _TASKS[id(task)] = task


def task_of(folder: Folder, config: Record) -> Task:
    """The task of a folder: rebuilt, or found among those of this process."""
    if config["task"] is not None:
        reloaded: Task = tasks.reload(config["task"])
        return reloaded
    for task in list(_TASKS.values()):
        if task.fingerprint == config["data"]:
            return task
    raise RunError(
        f"the task of {folder.path} was made in Python; pass it again: fb.resume({str(folder.path)!r}, task=task)"
    )


def resumed_algorithm(folder: Folder, config: Record) -> Algorithm:
    """The algorithm of a folder, if its call builds the same parts."""
    with suppress(ConfigError):  # a part in it may be a user's
        if config["algorithm"] is not None:
            algorithm = algorithm_of(config["algorithm"])
            if parts(algorithm) == config["parts"]:
                return algorithm
    raise RunError(
        f"the algorithm of {folder.path} was made in Python; pass it again: fb.resume({str(folder.path)!r}, algorithm=algorithm)"
    )
