"""The arithmetic of a run's clients, step by step, from who took part (see `cost` for how it is counted)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedbraid.cost import client_flops, forward_flops
from fedbraid.data.task import Task
from fedbraid.loop import Algorithm, Work
from fedbraid.metrics import Record

_FORWARD: weakref.WeakKeyDictionary[Task, float] = weakref.WeakKeyDictionary()


def of_clients(task: Task, algorithm: Algorithm, work: Work) -> NDArray[np.float64]:
    """FLOPs of one visit of each client."""
    if task not in _FORWARD:
        _FORWARD[task] = forward_flops(task.module(), task.inputs[task.rows[:1]])
    sizes, which = np.unique(task.sizes, return_inverse=True)
    each = [client_flops(algorithm, work, _FORWARD[task], task.layout.size, float(n)) for n in sizes]
    return np.array(each)[which]


def by_step(visit: NDArray[np.float64], history: Sequence[Record]) -> list[float]:
    """FLOPs of each server step: those of all who handed in."""
    return [float(visit[r["clients"]].sum()) for r in history]
