"""Ready metrics for `Task.from_*(…, metrics={name: metric})`.

>>> task = Task.from_arrays(model, clients, test, metrics={"perplexity": perplexity(), "top5": top_k(5)})  # doctest: +SKIP
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbraid.core.check import integer
from fedbraid.errors import ConfigError


@dataclass(frozen=True)
class perplexity:
    """exp of the mean cross-entropy over all tokens, for outputs `[B, V, ...]` and targets `[B, ...]`.

    Targets below zero, such as the -100 of padding, do not count. A history has it under the task's name for it;
    a name with the word `perplexity` in it says that less is better.

    >>> round(perplexity()(torch.zeros(2, 8, 5), torch.zeros(2, 5, dtype=torch.int64)), 4)
    8.0
    """

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        _fitting("perplexity", outputs, targets)
        total, count = 0.0, 0
        for out, y in _chunks(outputs, targets):
            each = torch.nn.functional.cross_entropy(out, y.clamp(min=0), reduction="none")
            total += float(each[y >= 0].double().sum())
            count += int((y >= 0).sum())
        return round(math.exp(min(total / count, 700.0)), 9) if count else math.nan


@dataclass(frozen=True)
class top_k:
    """The fraction of targets among the k classes with the largest outputs; targets below zero do not count.

    >>> top_k(2)(torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), torch.tensor([1, 2]))
    0.5
    """

    k: int = 5

    def __post_init__(self) -> None:
        integer("k", self.k)

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        _fitting(f"top_k({self.k})", outputs, targets)
        if self.k > outputs.shape[1]:
            raise ConfigError(
                f"k must be at most the {outputs.shape[1]} classes, got {self.k}; use a smaller k"
            )
        hit, count = 0, 0
        for out, y in _chunks(outputs, targets):
            hit += int((out.topk(self.k, 1).indices == y.unsqueeze(1)).any(1)[y >= 0].sum())
            count += int((y >= 0).sum())
        return hit / count if count else math.nan


def _chunks(outputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both in slices, so that a large test set needs no second copy."""
    return ((outputs[lo : lo + 512], targets[lo : lo + 512]) for lo in range(0, len(targets), 512))


def _fitting(what: str, outputs: object, targets: object) -> None:
    fits = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    if not fits or outputs.ndim < 2 or outputs.shape[:1] + outputs.shape[2:] != targets.shape:  # type: ignore[attr-defined]
        shapes = [tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in (outputs, targets)]
        raise ConfigError(
            f"{what} needs outputs (batch, classes, ...) for targets (batch, ...), got {shapes[0]} and {shapes[1]};"
            " change the outputs with forward="
        )


__all__ = ["perplexity", "top_k"]
