"""What a client does in one visit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from fedbraid.core.check import plain_numbers, whole
from fedbraid.errors import ConfigError


@dataclass(frozen=True)
class Work:
    """What a client does in one visit: `epochs` over its data, or a number of `steps`.

    `batch=None` is the full local set. A `last` batch that is short is kept, dropped, or filled with
    the client's own samples drawn again; with `replace=True` all of every batch is drawn with replacement.
    """

    lr: float = 0.01
    epochs: int | None = None
    steps: int | None = None
    batch: int | None = 20
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None  # the largest norm of a gradient
    lr_decay: float = 1.0  # per round
    last: str = "keep"
    replace: bool = False

    def __post_init__(self) -> None:
        plain_numbers(self)
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 1)
        if self.epochs is not None and self.steps is not None:
            raise ConfigError(
                f"both epochs={self.epochs} and steps={self.steps} were given; give one of them"
            )
        whole("epochs" if self.steps is None else "steps", self.epochs if self.steps is None else self.steps)
        if self.batch is not None:
            whole("batch", self.batch)
        for name in ("lr", "lr_decay", "clip", "momentum", "weight_decay"):
            value = getattr(self, name)
            if (value is None and name != "clip") or isinstance(value, str | bool):
                raise ConfigError(f"{name}={value!r} is not a number; give one")
            if name in ("lr", "lr_decay", "clip") and value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value} does not train; use {name} > 0")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum} never forgets; use 0 <= momentum < 1")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"weight_decay={self.weight_decay} makes weights grow; use weight_decay >= 0")
        if self.replace and self.batch is None:
            raise ConfigError("replace=True draws batches, and batch=None is the full local set; give batch=")
        if self.last not in ("keep", "drop", "fill"):
            raise ConfigError(f"last={self.last!r} is not known; use 'keep', 'drop' or 'fill'")

    def rate(self, version: int) -> float:
        """η_c of a client that trains from this version."""
        return self.lr * self.lr_decay**version

    def effective(self, K: Tensor) -> Tensor:
        """a: how many plain steps go as far as K steps with this momentum."""
        rho = self.momentum
        return (K - rho * (1 - rho**K) / (1 - rho)) / (1 - rho)
