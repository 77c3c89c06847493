"""What a model is worth: loss, accuracy and the task's own metrics, on the whole test set and by client."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.names import falls
from fedbraid.data import tree
from fedbraid.data.call import by_signature
from fedbraid.data.task import Task
from fedbraid.data.tree import Padded, Tree
from fedbraid.engines.gradients import Torch
from fedbraid.errors import DataError, RunError
from fedbraid.run.checkpoint import Record

_JUDGES: weakref.WeakKeyDictionary[Task, Torch] = weakref.WeakKeyDictionary()


class Evaluates(Protocol):
    """Whoever can evaluate a model: an engine, or a gradient."""

    def evaluate(self, x: Tensor, inputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]: ...


def judge(engine: Evaluates, task: Task, x: Tensor, on: str = "test", step: int | None = None) -> Record:
    """Loss, accuracy and metrics of a model on the pooled test set, or also by client."""
    if task.test is None:
        raise DataError("the task has no test set to evaluate on; give test= or evaluate_every=None")
    outputs: list[Any] = []
    if task.metrics:
        losses, classes, outputs = _outputs(task, x)
    else:
        losses, classes = engine.evaluate(x, *task.test)
    record = {"loss": float(losses.double().mean())}
    if on == "clients":
        record["loss_clients"] = float(_by_client(losses, task).mean())
    if classes is not None:
        right = (classes == task.test[1]).double().cpu()
        record["accuracy"] = float(right.mean())
        if on == "clients":
            record |= _spread("accuracy", _by_client(right, task))
    for name in task.metrics:
        record |= _measure(task, name, outputs, on, step)
    return record


def _by_client(each: Tensor, task: Task) -> NDArray[np.float64]:
    """The mean of a measurement over every client's test share, where it has one."""
    assert task.test_offsets is not None
    cuts, upto = task.test_offsets, np.concatenate([[0.0], np.cumsum(each.double().cpu().numpy())])
    held = np.diff(cuts) > 0
    means: NDArray[np.float64] = np.diff(upto[cuts])[held] / np.diff(cuts)[held]
    return means


def _spread(name: str, shares: NDArray[np.float64]) -> Record:
    """A measurement's mean over the clients, and over the tenth of them that it is worst for."""
    ordered = np.sort(-shares if falls(name) else shares)[: max(1, len(shares) // 10)]
    worst = float(ordered.mean())
    return {f"{name}_clients": float(shares.mean()), f"{name}_worst_tenth": -worst if falls(name) else worst}


# The task's own metrics ---------------------------------------------------------------------------


@torch.no_grad()
def _outputs(task: Task, x: Tensor) -> tuple[Tensor, Tensor | None, list[Any]]:
    """(a loss per example, the classes or None, the outputs in chunks) of the test set."""
    if task not in _JUDGES:
        _JUDGES[task] = Torch(task)
    assert task.test is not None
    found, losses, classes = _JUDGES[task], [], []
    outputs = []
    for at, inputs, out in found.outputs(x, task.test[0]):
        losses.append(found.loss(out, tree.take(task.test[1], at), inputs))
        outputs.append(out)
        if (guessed := task.guess(out)) is not None:
            classes.append(guessed)
    return torch.cat(losses), torch.cat(classes) if classes else None, outputs


def _measure(task: Task, name: str, chunks: list[Any], on: str, step: int | None) -> Record:
    metric = task.metrics[name]
    when = "" if step is None else f" at step {step}"
    try:
        outputs = chunks[0] if len(chunks) == 1 else tree.cat(chunks)
    except (RuntimeError, TypeError) as error:
        raise RunError(
            f"metric {name!r} cannot see all outputs{when}: they differ in shape ({error}); give forward= that makes them alike"
        ) from error
    assert task.test is not None
    inputs, targets = (tree.map(_whole, t) for t in task.test)
    value = _value(metric, name, outputs, targets, inputs, f"on the test set{when}")
    if not np.isfinite(value):
        raise RunError(
            f"metric {name!r} is {value} on the test set{when}; mend it, and resume: what ran before is kept"
        )
    record = {name: value}
    if on == "clients":
        assert task.test_offsets is not None
        each = []
        for i, (lo, hi) in enumerate(pairwise(task.test_offsets)):
            if hi > lo:
                own = [tree.take(t, slice(lo, hi)) for t in (outputs, targets, inputs)]
                each.append(_value(metric, name, own[0], own[1], own[2], f"for client {i}{when}"))
        shares = np.array(each)
        shares = shares[np.isfinite(shares)]  # a share of one class has no AUC, say
        record |= _spread(name, shares) if len(shares) else {}
    return record


def _whole(leaf: Any) -> Tensor:
    found: Tensor = leaf.values if isinstance(leaf, Padded) else leaf
    return found


def _value(metric: Any, name: str, outputs: Any, targets: Tree, inputs: Tree, where: str) -> float:
    """One number of a function, or of an object with reset, update and compute."""
    try:
        if all(hasattr(metric, part) for part in ("reset", "update", "compute")):
            metric.reset()
            metric.update(outputs, targets)
            return float(metric.compute())
        return float(by_signature(metric)(outputs, targets, inputs))
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RunError(
            f"metric {name!r} fails {where} ({why}); it must give one number: mend it, and resume, what ran before is kept"
        ) from error
