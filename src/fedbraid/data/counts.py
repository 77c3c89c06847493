"""The number of samples of each label that each client holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.data.task import Task
from fedbraid.errors import DataError

Counts = NDArray[np.int64]


def label_counts(task: Task) -> Counts:
    """The number of samples of each label that each client holds, `[clients, labels]`."""
    if not task.classifies:
        raise DataError(f"task {task.name} has no class labels to count; only classification can be drawn")
    if not isinstance(task.targets, Tensor):
        raise DataError(f"task {task.name} leaves its labels on disk; only those in memory are counted")
    labels = task.targets[task.rows].numpy()
    if labels.ndim != 1:
        raise DataError(
            f"task {task.name} has labels of shape {labels.shape[1:]} a sample; only one label can be drawn"
        )
    owner = np.repeat(np.arange(task.clients), task.sizes)
    flat = np.bincount(owner * task.classes + labels, minlength=task.clients * task.classes)
    return flat.reshape(task.clients, task.classes)
