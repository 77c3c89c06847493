"""The arithmetic of a run's clients by server step, from its cohorts (`cost` documents how it is counted)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedbraid.core.algorithm import Algorithm
from fedbraid.core.work import Work
from fedbraid.data.task import Task
from fedbraid.engines.flops import of_task
from fedbraid.run.formatting import Record
from fedbraid.run.task_summary import TaskSummary
from fedbraid.study.cost import client_flops


def of_clients(task: Task, algorithm: Algorithm, work: Work) -> NDArray[np.float64]:
    """FLOPs of one participation of each client."""
    return of_sizes(task.sizes, of_task(task), task.full_layout.size, algorithm, work)


def of_sizes(
    sizes: NDArray[np.int64], forward: float, parameters: int, algorithm: Algorithm, work: Work
) -> NDArray[np.float64]:
    """FLOPs of one participation of clients that hold this many samples."""
    kinds, which = np.unique(sizes, return_inverse=True)
    each = [client_flops(algorithm, work, forward, parameters, float(n)) for n in kinds]
    return np.array(each)[which]


def of_summary(summary: TaskSummary, algorithm: Algorithm, work: Work) -> NDArray[np.float64] | None:
    """FLOPs of one participation of each client of a summarized task."""
    if summary.sizes is None or summary.forward is None:
        return None
    return of_sizes(summary.sizes, summary.forward, summary.parameters, algorithm, work)


def by_step(client_flops: NDArray[np.float64], history: Sequence[Record]) -> list[float]:
    """FLOPs of each server step: those of its cohort."""
    return [float(client_flops[r["clients"]].sum()) for r in history]
