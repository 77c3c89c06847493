"""A task in two places: what a node has of it, and what the server has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedbraid.core.layout import Layout
from fedbraid.data import tree
from fedbraid.data.arrays import pair
from fedbraid.data.lazy import LazyColumn
from fedbraid.data.task import Task
from fedbraid.errors import ConfigError, DataError

Whole = Task | Callable[..., Task]
NOTHING = np.zeros(1, np.int64)


@dataclass(frozen=True)
class Halves:
    """The model, the loss and two functions that give data; `options` are those of `fb.Task.from_arrays`."""

    model: Any
    loss: Any
    load: Callable[[dict[str, Any]], tuple[Any, Any]]
    test: Callable[[], tuple[Any, Any]] | None
    options: Mapping[str, Any]

    def own(self, node_config: Mapping[str, Any]) -> Task:
        """The task of a node, which is its only client."""
        return Task.from_arrays(self.model, [self.load(dict(node_config))], loss=self.loss, **self.options)

    def served(self) -> Task:
        """The model and the server's test set; clients' data stays with the clients."""
        test = None if self.test is None else pair(self.test(), "the test set", self.loss)
        x, y = (torch.zeros(0, 1), torch.zeros(0)) if test is None else (tree.take(t, slice(0)) for t in test)
        options = {k: v for k, v in self.options.items() if k != "collate"}
        return Task(
            self.model, x, y, torch.zeros(0, dtype=torch.int64), NOTHING, test=test, loss=self.loss, **options
        )

    @property
    def layout(self) -> Layout:
        """What travels."""
        options = self.options
        return Layout.of(self.model(), options.get("buffers", "refuse"), options.get("personal", ())).shared


@dataclass(frozen=True)
class Same:
    """The simulator's own task. A function with an argument `node` is told a node's configuration there, and makes its
    task alone; of any other, a node is the client that its configuration names as `share`."""

    given: Whole

    def own(self, node_config: Mapping[str, Any]) -> Task:
        if not isinstance(self.given, Task) and "node" in inspect.signature(self.given).parameters:
            made = _made(self.given, node=dict(node_config))
            if made.clients != 1:
                raise DataError(
                    f"on a node the task has {made.clients} clients; give it this node's data alone"
                )
            return replace(made, test=None, test_offsets=None)
        whole = self.whole()
        client = node_config.get("share", node_config.get("client"))
        if not isinstance(client, int) or not 0 <= client < whole.clients:
            raise ConfigError(
                f"share={client!r} is no client of this task; start the node with -c share=0 to {whole.clients - 1}, or let"
                " the task's function take node=, which is the node's configuration"
            )
        return alone(whole, client)

    def served(self) -> Task:
        whole = self.whole()
        x, y = (
            tree.take(t.example if isinstance(t, LazyColumn) else t, slice(0))
            for t in (whole.inputs, whole.targets)
        )
        none = torch.zeros(0, dtype=torch.int64)
        return replace(whole, inputs=x, targets=y, rows=none, offsets=NOTHING, test_offsets=None, spec=None)

    @property
    def layout(self) -> Layout:
        return self.whole().layout

    def whole(self) -> Task:
        """The task as the simulator has it."""
        return self.given if isinstance(self.given, Task) else _made(self.given)


def alone(task: Task, client: int) -> Task:
    """The task of one of its clients."""
    lo, hi = int(task.offsets[client]), int(task.offsets[client + 1])
    rows, offsets = task.rows[lo:hi], np.array([0, hi - lo])
    x, y = task.inputs, task.targets
    if isinstance(x, LazyColumn):
        store = x.store.of(client)
        x, y = LazyColumn(store, 0), LazyColumn(store, 1)
    else:
        x, y = tree.take(x, rows), tree.take(y, rows)
    return replace(
        task,
        inputs=x,
        targets=y,
        rows=torch.arange(hi - lo),
        offsets=offsets,
        test=None,
        test_offsets=None,
        spec=None,
    )


def _made(function: Callable[..., Any], **told: Any) -> Task:
    made = function(**told)
    if not isinstance(made, Task):
        raise ConfigError(
            f"{function.__name__}() gives a {type(made).__name__}; it must return a fedbraid Task"
        )
    return made
