"""How long things take on the simulated clock: durations of local work, arrivals, and links.

A model turns counted uniform draws into times, many at once; it keeps no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedbraid.core import rng
from fedbraid.core.check import number
from fedbraid.errors import ConfigError

Floats = NDArray[np.float64]


def _positive(name: str, value: float, zero: bool = False) -> None:
    number(name, value, "[0, inf)" if zero else "(0, inf)", "is no duration")


def _normal(u: Floats) -> Floats:
    """Standard normal draws from uniform ones."""
    out: Floats = torch.special.ndtri(torch.from_numpy(np.clip(u, 1e-16, 1 - 1e-16))).numpy()
    return out


@dataclass(frozen=True)
class Durations:
    """How long a client's local work takes, drawn anew for each job."""

    @property
    def mean(self) -> float:
        raise NotImplementedError

    def draw(self, u: Floats) -> Floats:
        """Durations from uniform draws."""
        raise NotImplementedError

    def factor(self, client: int) -> float:
        """By what this client is slower than the rest."""
        return 1.0


@dataclass(frozen=True)
class constant(Durations):
    """Every job takes the same time."""

    value: float = 1.0

    def __post_init__(self) -> None:
        _positive("value", self.value, zero=True)

    @property
    def mean(self) -> float:
        return self.value

    def draw(self, u: Floats) -> Floats:
        return np.full(len(u), self.value)


@dataclass(frozen=True)
class halfnormal(Durations):
    """|N(0, scale²)|, the delays of FedBuff and QAFeL."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        _positive("scale", self.scale)

    @property
    def mean(self) -> float:
        return self.scale * math.sqrt(2 / math.pi)

    def draw(self, u: Floats) -> Floats:
        return self.scale * _normal((1 + u) / 2)


@dataclass(frozen=True)
class lognormal(Durations):
    """exp(N(mu, sigma²)): most are quick, a few are very slow."""

    mu: float = 0.0
    sigma: float = 1.0

    def __post_init__(self) -> None:
        _positive("sigma", self.sigma)

    @property
    def mean(self) -> float:
        return math.exp(self.mu + self.sigma**2 / 2)

    def draw(self, u: Floats) -> Floats:
        return np.exp(self.mu + self.sigma * _normal(u))


@dataclass(frozen=True)
class exponential(Durations):
    """Memoryless work of a given mean."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        _positive("scale", self.scale)

    @property
    def mean(self) -> float:
        return self.scale

    def draw(self, u: Floats) -> Floats:
        return -self.scale * np.log1p(-u)


@dataclass(frozen=True)
class trace(Durations):
    """Measured durations, drawn at random with repetition."""

    values: tuple[float, ...]

    def __init__(self, values: Sequence[float]) -> None:
        object.__setattr__(self, "values", tuple(float(v) for v in values))
        if not self.values:
            raise ConfigError("a trace of durations needs at least one value")
        for v in self.values:
            _positive("trace value", v, zero=True)

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    def draw(self, u: Floats) -> Floats:
        return np.asarray(self.values)[(u * len(self.values)).astype(np.int64)]


@dataclass(frozen=True)
class classes(Durations):
    """Speed classes over another model: client i is `factors[class]` times slower, classes drawn by share."""

    base: Durations
    factors: tuple[float, ...] = (1.0, 4.0)
    shares: tuple[float, ...] = (0.5, 0.5)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))
        object.__setattr__(self, "shares", tuple(self.shares))
        if len(self.factors) != len(self.shares) or abs(sum(self.shares) - 1) > 1e-9:
            raise ConfigError(
                f"speed classes need one share per factor, adding up to 1; got {self.shares} for {self.factors}"
            )
        for f in self.factors:
            _positive("factor", f)

    @property
    def mean(self) -> float:
        return self.base.mean * float(np.dot(self.factors, self.shares))

    def draw(self, u: Floats) -> Floats:
        return self.base.draw(u)

    def factor(self, client: int) -> float:
        u = float(rng.uniform(0, "speed class", client)[0])
        return self.factors[int(np.searchsorted(np.cumsum(self.shares)[:-1], u, side="right"))]


@dataclass(frozen=True)
class bandwidth:
    """Bytes per unit of time on a client's link: transfer adds message size / rate to each job.

    `spread` is the sigma of a log-normal factor that each client draws once.
    """

    up: float
    down: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        _positive("up", self.up)
        _positive("down", self.down)
        _positive("spread", self.spread, zero=True)

    def seconds(self, client: int, bytes_down: float, bytes_up: float) -> float:
        slow = math.exp(self.spread * float(_normal(rng.uniform(0, "bandwidth", client))[0]))
        return slow * (bytes_down / self.down + bytes_up / self.up)
