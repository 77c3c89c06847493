"""What may be searched: one of some values, or a number of a range. Builders declare theirs beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbraid.core import check
from fedbraid.errors import ConfigError


@dataclass(frozen=True)
class Categorical:
    """One of these values.

    >>> Categorical(("adam", "lamb")).draw(0.7)
    'lamb'
    """

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigError("a choice needs at least one value, such as [0.01, 0.1]")

    def grid(self) -> tuple[Any, ...]:
        return self.values

    def suggest(self, trial: Any, name: str) -> Any:
        return trial.suggest_categorical(name, self.values)

    def draw(self, u: float) -> Any:
        """The value that a number in [0, 1) picks."""
        return self.values[int(u * len(self.values))]

    def distribution(self, optuna: Any) -> Any:
        return optuna.distributions.CategoricalDistribution(self.values)


@dataclass(frozen=True)
class FloatRange:
    """A number between two others, or where `log`, one whose logarithm is; a grid takes `points` of them.

    >>> FloatRange(0.01, 1.0, log=True).draw(0.5)
    0.1
    """

    low: float
    high: float
    points: int = 4
    log: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ConfigError(f"({self.low}, {self.high}) is no range; use low < high, and low > 0 with log")
        check.integer("points", self.points)

    def grid(self) -> tuple[Any, ...]:
        low, high = (math.log(v) if self.log else v for v in (self.low, self.high))
        spread = np.linspace(low, high, self.points)
        return tuple(float(f"{v:.6g}") for v in (np.exp(spread) if self.log else spread))

    def suggest(self, trial: Any, name: str) -> Any:
        return self._short(trial.suggest_float(name, self.low, self.high, log=self.log))

    def draw(self, u: float) -> Any:
        """The value that a number in [0, 1) picks."""
        low, high = self.low, self.high
        value = math.exp(math.log(low) + u * math.log(high / low)) if self.log else low + u * (high - low)
        return self._short(value)

    def _short(self, value: float) -> float:
        """Four digits, which can be typed."""
        return min(max(float(f"{value:.4g}"), self.low), self.high)

    def distribution(self, optuna: Any) -> Any:
        return optuna.distributions.FloatDistribution(self.low, self.high, log=self.log)


@dataclass(frozen=True)
class IntRange(FloatRange):
    """An integer from one to another.

    >>> IntRange(1, 4).draw(0.99)
    4
    """

    def grid(self) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(round(v) for v in super().grid()))

    def suggest(self, trial: Any, name: str) -> Any:
        return trial.suggest_int(name, int(self.low), int(self.high), log=self.log)

    def draw(self, u: float) -> Any:
        low, high = self.low, self.high + 1
        value = math.exp(math.log(low) + u * math.log(high / low)) if self.log else low + u * (high - low)
        return min(int(value), int(self.high))

    def distribution(self, optuna: Any) -> Any:
        return optuna.distributions.IntDistribution(int(self.low), int(self.high), log=self.log)


Range = Categorical | FloatRange
Space = Mapping[str, Range]


def uniform(low: float, high: float, points: int = 4) -> FloatRange:
    """A number between two others."""
    return FloatRange(low, high, points)


def log(low: float, high: float, points: int = 4) -> FloatRange:
    """A number whose logarithm is between those of two others."""
    return FloatRange(low, high, points, log=True)


def integer(low: int, high: int, points: int = 4) -> IntRange:
    """An integer from one to another."""
    return IntRange(low, high, points)


CLIENT_RATE = log(0.01, 0.5)  # of local SGD, with which every algorithm is tuned
