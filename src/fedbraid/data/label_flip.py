"""A task as it is where hostile clients flip the labels that they train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbraid.data.task import Task
from fedbraid.errors import ConfigError


def flipped(task: Task, hostile: Callable[[Any], Any] | None) -> Task:
    """The task with label C − 1 − y for y in all samples of these clients; test sets stay as they are."""
    chosen = [] if hostile is None else np.flatnonzero(hostile(np.arange(task.clients))).tolist()
    spans = [slice(int(task.offsets[i]), int(task.offsets[i + 1])) for i in chosen]
    is_flipped = torch.zeros(len(task.rows), dtype=torch.bool)
    for span in spans:
        is_flipped[span] = True
    if not is_flipped.any():
        return task
    targets = task.targets
    if not isinstance(targets, Tensor) or not task.classifies:
        raise ConfigError(
            "label_flip changes class numbers in memory, and this task has other targets (or lazy=True); use another attack,"
            " such as 'sign_flip'"
        )
    rows, others = task.rows[is_flipped.to(task.rows.device)], task.rows[~is_flipped.to(task.rows.device)]
    if bool(torch.isin(rows, others).any()):
        raise ConfigError(
            "label_flip changes samples that honest clients hold as well, because clients share samples in this partition; use"
            " a partition that deals each sample once"
        )
    new = targets.clone()
    new[rows] = torch.where(targets[rows] >= 0, task.classes - 1 - targets[rows], targets[rows])
    result = replace(task, targets=new)
    result.__dict__["fingerprint"] = (
        task.fingerprint
    )  # the data are the task's; who flips them is the algorithm's
    return result
