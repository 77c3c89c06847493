"""The clients' learning rate by version, by name: `fb.Work(lr=fb.rates.cosine(0.1, 100, warmup=5))`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedbraid.core.check import integer, number, plain_numbers


@dataclass(frozen=True)
class Rate:
    """A learning rate that follows the version a client trains from, counted from 0."""

    def __call__(self, version: int) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class warmup(Rate):
    """Rises evenly to `lr` over the first `steps` versions, and stays there."""

    lr: float
    steps: int

    def __post_init__(self) -> None:
        plain_numbers(self)
        downhill("lr", self.lr)
        integer("steps", self.steps)

    def __call__(self, version: int) -> float:
        return self.lr * min(1.0, (version + 1) / self.steps)


@dataclass(frozen=True)
class cosine(Rate):
    """Falls from `lr` towards `least` over `steps` versions, the first `warmup` of which rise evenly to `lr`.

    After `steps` it stays at the last rate, which is above 0.
    """

    lr: float
    steps: int
    warmup: int = 0
    least: float = 0.0

    def __post_init__(self) -> None:
        plain_numbers(self)
        downhill("lr", self.lr)
        integer("steps", self.steps)
        integer("warmup", self.warmup, 0)
        number("warmup", self.warmup, f"[0, {self.steps})", f"leaves nothing of {self.steps} steps")
        number("least", self.least, f"[0, {self.lr}]", "is not below lr")

    def __call__(self, version: int) -> float:
        if version < self.warmup:
            return self.lr * (version + 1) / self.warmup
        done = (min(version, self.steps - 1) - self.warmup) / (self.steps - self.warmup)
        return self.least + (self.lr - self.least) * (1 + math.cos(math.pi * done)) / 2


def downhill(name: str, value: object) -> None:
    """Refuse what is not a finite number above 0."""
    number(name, value, "(0, inf)", "does not train")
