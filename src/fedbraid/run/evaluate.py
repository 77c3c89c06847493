"""Evaluation of models: loss, accuracy and the task's metrics, on the pooled test set and by client."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.metric_names import falls
from fedbraid.data import tree
from fedbraid.data.call import by_signature
from fedbraid.data.lazy import LazyColumn
from fedbraid.data.task import Task
from fedbraid.data.tree import Padded, Tree
from fedbraid.engines.autograd import CHUNK, TorchGradient
from fedbraid.errors import DataError, RunError
from fedbraid.run.checkpoint import Record

log = logging.getLogger("fedbraid")
_WARNED: weakref.WeakKeyDictionary[Task, set[str]] = weakref.WeakKeyDictionary()
_JUDGES: weakref.WeakKeyDictionary[Task, TorchGradient] = weakref.WeakKeyDictionary()


class Evaluates(Protocol):
    """An engine or a gradient, which can evaluate a model."""

    def evaluate(self, x: Tensor, inputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]: ...


Models = (
    Tensor | Callable[[NDArray[np.int64]], Tensor]
)  # one model `[D]`, or a function of clients to theirs `[m, D]`
Scores = tuple[Tensor, Tensor | None, list[Any]]  # a loss per example, classes or None, outputs in chunks
TOGETHER = 64  # clients whose personalized models are in memory at a time


def evaluate_model(
    engine: Evaluates, task: Task, x: Models, on: str = "test", step: int | None = None
) -> Record:
    """Loss, accuracy and metrics of a model on the pooled test set, or also by client.

    A metric that is NaN or infinite for a client is undefined there: it is left out of the means over clients and
    counted in `undefined`. One that is undefined on the pooled test set ends the run. Personalized models are each
    evaluated on their client's local test set, or on an equal slice of a common test set.
    """
    if task.test is None:
        raise DataError("the task has no test set to evaluate on; give test= or evaluate_every=None")
    losses, classes, outputs = (
        _scores(engine, task, x, *task.test) if isinstance(x, Tensor) else _personal_scores(engine, task, x)
    )
    record: Record = {"loss": float(losses.double().mean())}
    if on == "clients":
        record["loss_clients"] = float(_by_client(losses, task).mean())
    if classes is not None:
        right = (classes == _read_all(task.test[1])).double().cpu()
        record["accuracy"] = float(right.mean())
        if on == "clients":
            record |= _spread("accuracy", _by_client(right, task))
    undefined: Record = {}
    for name in task.metrics:
        record |= _measure(task, name, outputs, on, step)
        undefined |= dict(record.pop("undefined", {}))
    return record | ({"undefined": undefined} if undefined else {})


def _by_client(each: Tensor, task: Task) -> NDArray[np.float64]:
    """The mean of a metric over each local test set that is not empty."""
    assert task.test_offsets is not None
    cuts, upto = task.test_offsets, np.concatenate([[0.0], np.cumsum(each.double().cpu().numpy())])
    has_tests = np.diff(cuts) > 0
    means: NDArray[np.float64] = np.diff(upto[cuts])[has_tests] / np.diff(cuts)[has_tests]
    return means


def _spread(name: str, values: NDArray[np.float64]) -> Record:
    """A metric's mean over the clients, and over the worst tenth of them."""
    ordered = np.sort(-values if falls(name) else values)[: max(1, len(values) // 10)]
    worst = float(ordered.mean())
    return {f"{name}_clients": float(values.mean()), f"{name}_worst_tenth": -worst if falls(name) else worst}


# The task's metrics -------------------------------------------------------------------------------


def _personal_scores(engine: Evaluates, task: Task, models: Callable[[NDArray[np.int64]], Tensor]) -> Scores:
    """The scores of every client's personalized model on its local test set, in the order of the test set."""
    assert task.test is not None
    order, found = list(_local_test_rows(task)), []
    for lo in range(0, len(order), TOGETHER):
        some = order[lo : lo + TOGETHER]
        for x, (_, rows) in zip(models(np.array([client for client, _ in some])), some):
            found.append(_scores(engine, task, x, *(tree.take(t, rows) for t in task.test)))
    back = torch.cat([rows for _, rows in order]).argsort()
    losses, classes = torch.cat([f[0] for f in found])[back], [f[1] for f in found if f[1] is not None]
    outputs = [out for f in found for out in f[2]]
    if outputs:
        outputs = [tree.take(outputs[0] if len(outputs) == 1 else tree.cat(outputs), back)]
    return losses, torch.cat(classes)[back] if classes else None, outputs


@torch.no_grad()
def per_client(task: Task, x: Models) -> list[Record]:
    """A row for each client with a local test set: its number of samples, and its model's metrics there."""
    if task.test is None or task.test_offsets is None:
        raise DataError(
            "a table by client needs local test sets; give test_fraction= or client_tests= when the task is made, natural"
            " ids, or load(…, test_shares=True)"
        )
    table = []
    for client, rows in _local_test_rows(task):
        vector = x if isinstance(x, Tensor) else x(np.array([client]))[0]
        inputs, targets = (tree.take(t, rows) for t in task.test)
        losses, classes, outputs = _outputs(task, vector, inputs, targets)
        row: Record = {"client": client, "samples": int(task.sizes[client]), "test": len(rows)}
        if task.client_names is not None:
            row["name"] = task.client_names[client]
        row["loss"] = float(losses.double().mean())
        if classes is not None:
            row["accuracy"] = float((classes == targets).double().mean())
        all_outputs = outputs[0] if len(outputs) == 1 else tree.cat(outputs)
        for name, metric in task.metrics.items():
            value = _value(metric, name, all_outputs, targets, inputs, f"for client {client}")
            row[name] = value if np.isfinite(value) else None
        table.append(row)
    return table


def _local_test_rows(task: Task) -> Iterator[tuple[int, Tensor]]:
    """Each client's rows of the test set; a common one is dealt to the clients row by row."""
    assert task.test is not None
    count, N = tree.length(task.test[0]), task.clients
    for client in range(N if task.test_offsets is not None else min(N, count)):
        if task.test_offsets is None:
            yield client, torch.arange(client, count, N)
        elif (lo := int(task.test_offsets[client])) < (hi := int(task.test_offsets[client + 1])):
            yield client, torch.arange(lo, hi)


def _scores(engine: Evaluates, task: Task, x: Tensor, inputs: Tree, targets: Tree) -> Scores:
    if task.metrics:
        return _outputs(task, x, inputs, targets)
    if not isinstance(inputs, LazyColumn):
        return *engine.evaluate(x, inputs, targets), []
    found = [engine.evaluate(x, inputs[at], targets[at]) for at in _chunks(inputs)]
    classes = [c for _, c in found if c is not None]
    return torch.cat([losses for losses, _ in found]), torch.cat(classes) if classes else None, []


def _chunks(inputs: LazyColumn) -> Iterator[slice]:
    return (slice(lo, lo + CHUNK) for lo in range(0, len(inputs), CHUNK))


@torch.no_grad()
def _outputs(task: Task, x: Tensor, inputs: Tree, targets: Tree) -> Scores:
    if task not in _JUDGES:
        _JUDGES[task] = TorchGradient(task)
    found, losses, classes = _JUDGES[task], [], []
    outputs = []
    for at, some, out in found.outputs(x, inputs):
        losses.append(found.loss(out, tree.take(targets, at), some))
        outputs.append(out)
        if (guessed := task.predict(out)) is not None:
            classes.append(guessed)
    return torch.cat(losses), torch.cat(classes) if classes else None, outputs


def _measure(task: Task, name: str, chunks: list[Any], on: str, step: int | None) -> Record:
    metric = task.metrics[name]
    when = "" if step is None else f" at step {step}"
    try:
        outputs = chunks[0] if len(chunks) == 1 else tree.cat(chunks)
    except (RuntimeError, TypeError) as error:
        raise RunError(
            f"metric {name!r} cannot get all outputs{when}: they differ in shape ({error}); give forward= that makes their shapes equal"
        ) from error
    assert task.test is not None
    asks = "inputs" in by_signature(metric).order if callable(metric) else False
    inputs, targets = (tree.map(_read_all, t) for t in (task.test[0] if asks else None, task.test[1]))
    value = _value(metric, name, outputs, targets, inputs, f"on the test set{when}")
    if not np.isfinite(value):
        raise RunError(
            f"metric {name!r} is {value} on the test set{when}; fix it and resume (finished steps are stored)"
        )
    record: Record = {name: value}
    if on == "clients":
        assert task.test_offsets is not None
        each = []
        for i, (lo, hi) in enumerate(pairwise(task.test_offsets)):
            if hi > lo:
                local = [tree.take(t, slice(int(lo), int(hi))) for t in (outputs, targets, inputs)]
                each.append(_value(metric, name, local[0], local[1], local[2], f"for client {i}{when}"))
        values = np.array(each)
        defined = values[np.isfinite(values)]  # a local test set of one class has no AUC, say
        record |= _spread(name, defined) if len(defined) else {}
        if missing := len(values) - len(defined):
            record["undefined"] = {name: missing}
            _warn(task, name, missing, len(values))
    return record


def _warn(task: Task, name: str, missing: int, count: int) -> None:
    """Say once for each task that a metric is undefined for some clients."""
    warned = _WARNED.setdefault(task, set())
    if name not in warned:
        warned.add(name)
        log.warning(
            f"metric {name!r} is undefined on the local test sets of {missing} of {count} clients, which are left out of"
            f" its mean; `undefined` in the history counts them"
        )


def _read_all(leaf: Any) -> Any:
    """All rows of a leaf, however it is kept."""
    if isinstance(leaf, LazyColumn):
        return leaf.read_all()
    return leaf.values if isinstance(leaf, Padded) else leaf


def _value(metric: Any, name: str, outputs: Any, targets: Tree, inputs: Tree, where: str) -> float:
    """One number of a function, or of an object with reset, update and compute."""
    try:
        if all(hasattr(metric, method) for method in ("reset", "update", "compute")):
            metric.reset()
            metric.update(outputs, targets)
            return float(metric.compute())
        return float(by_signature(metric)(outputs, targets, inputs))
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RunError(
            f"metric {name!r} fails {where} ({why}); it must return one number; fix it and resume (finished steps are stored)"
        ) from error
