"""The server's data, for transforms that train or distil on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedbraid.data import tree
from fedbraid.data.task import Task
from fedbraid.data.tree import Tree
from fedbraid.errors import DataError


@dataclass(frozen=True)
class TaskServerData:
    """A task's public set and test set, and the model that is evaluated on them."""

    task: Task
    seed: int

    @property
    def public(self) -> tuple[Tree, Tree]:
        if self.task.public is None:
            raise DataError(
                "the algorithm needs public data on the server, and the task has none; give public=(inputs, targets)"
            )
        return self.task.public

    @property
    def test(self) -> tuple[Tree, Tree]:
        if self.task.test is None:
            raise DataError(
                "the algorithm needs the test set on the server, and the task has none; give test=(inputs, targets)"
            )
        return self.task.test

    def module(self, x: Tensor) -> nn.Module:
        return self.task.layout.load(self.task.module().to(x.device), x)

    def outputs(self, module: nn.Module, rows: Any) -> Any:
        return self.task.run(module, tree.numbers(tree.take(self.public[0], rows)))
