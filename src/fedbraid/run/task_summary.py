"""Facts about a task for reports: its partition, and the FLOPs of a sample.

A task that can be loaded by name is reloaded. One that was made in Python is described in `task.json` in the run's
folder when the run begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import fedbraid.user_files as files
from fedbraid.data.counts import label_counts
from fedbraid.data.task import Task
from fedbraid.engines import flops
from fedbraid.errors import FedbraidError, RunError
from fedbraid.run.checkpoint import Folder, Record

FILE = "task.json"
CLIENTS = 400  # columns of the partition picture
SIZES = 100_000  # clients whose sizes are stored in a folder


@dataclass(frozen=True)
class TaskSummary:
    """Facts of a task."""

    partition: Record
    sizes: NDArray[np.int64] | None
    forward: float | None  # FLOPs per sample, None if they could not be counted
    parameters: int


def of_task(task: Task) -> TaskSummary:
    try:
        forward = flops.of_task(task)
    except Exception:  # torch's counter may fail on a user's model
        forward = None
    return TaskSummary(_partition(task), task.sizes, forward, task.layout.size)


def _partition(task: Task) -> Record:
    try:
        counts = label_counts(task)
    except FedbraidError as error:
        return {"counts": None, "note": f"{error}."}
    picked = np.linspace(0, len(counts) - 1, min(len(counts), CLIENTS)).round().astype(int)
    some = "" if len(picked) == len(counts) else f"{len(picked)} of {len(counts)} clients are drawn. "
    sizes = counts.sum(1)
    note = f"{some}Clients hold {sizes.min()} to {sizes.max()} samples, {sizes.mean():.1f} on average."
    return {"counts": counts[picked].tolist(), "clients": len(counts), "note": note}


def note(folder: Folder, task: Task) -> None:
    """Describe a task made in Python in the run's folder."""
    if task.spec is not None and not files.names_file(task.spec):
        return
    summary = of_task(task.to("cpu"))
    sizes = None if summary.sizes is None or len(summary.sizes) > SIZES else summary.sizes.tolist()
    folder.write_json(FILE, vars(summary) | {"sizes": sizes})


def noted(folder: Folder) -> TaskSummary | None:
    """What the run's folder says of its task, None where it says nothing."""
    if not (folder.path / FILE).exists():
        return None
    facts = folder.read_json(FILE)
    try:
        sizes = None if facts["sizes"] is None else np.array(facts["sizes"], np.int64)
        return TaskSummary(dict(facts["partition"]), sizes, facts["forward"], int(facts["parameters"]))
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{folder.path / FILE} is corrupt ({error}); remove it to report without the partition"
        ) from error
