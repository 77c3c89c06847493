"""Durations on the simulated clock: of local training, of transfers, and between arrivals.

A model turns counted uniform draws into times, many at once; it keeps no state.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedbraid.core import rng
from fedbraid.core.check import number
from fedbraid.errors import ConfigError, unknown
from fedbraid.schedule.availability import availability as availability

Floats = NDArray[np.float64]


def _positive(name: str, value: float, zero: bool = False) -> None:
    number(name, value, "[0, inf)" if zero else "(0, inf)")


def _normal(u: Floats) -> Floats:
    """Standard normal draws from uniform ones."""
    out: Floats = torch.special.ndtri(torch.from_numpy(np.clip(u, 1e-16, 1 - 1e-16))).numpy()
    return out


@dataclass(frozen=True)
class Durations:
    """The duration of a client's local training, drawn anew for each job."""

    @property
    def mean(self) -> float:
        raise NotImplementedError

    def draw(self, u: Floats) -> Floats:
        """Durations from uniform draws."""
        raise NotImplementedError

    def factor(self, client: int) -> float:
        """The factor by which this client is slower than the others."""
        return 1.0

    def of(self, client: int, drawn: float) -> float:
        """The duration of this client for a draw."""
        return drawn * self.factor(client)


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
    """Exponential (memoryless) durations of mean `scale`."""

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
    """Speed classes over another model: client i is `factors[class]` times slower, and classes are drawn by `fractions`."""

    base: Durations
    factors: tuple[float, ...] = (1.0, 4.0)
    fractions: tuple[float, ...] = (0.5, 0.5)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))
        object.__setattr__(self, "fractions", tuple(self.fractions))
        if len(self.factors) != len(self.fractions) or abs(sum(self.fractions) - 1) > 1e-9:
            raise ConfigError(
                f"speed classes need one fraction per factor, adding up to 1; got {self.fractions} for {self.factors}"
            )
        for f in self.factors:
            _positive("factor", f)

    @property
    def mean(self) -> float:
        return self.base.mean * float(np.dot(self.factors, self.fractions))

    def draw(self, u: Floats) -> Floats:
        return self.base.draw(u)

    def factor(self, client: int) -> float:
        u = float(rng.uniform(0, "speed class", client)[0])
        return self.factors[int(np.searchsorted(np.cumsum(self.fractions)[:-1], u, side="right"))]


@dataclass(frozen=True)
class measured(Durations):
    """Each client's measured durations, `{client: [seconds, …]}`, drawn at random with repetition.

    A client that was never measured draws from all.
    """

    values: tuple[tuple[int, tuple[float, ...]], ...]

    def __init__(self, values: Mapping[int, Sequence[float]] | Sequence[Any]) -> None:
        rows = {int(c): tuple(float(v) for v in row) for c, row in dict(values).items()}
        object.__setattr__(self, "values", tuple(sorted(rows.items())))
        object.__setattr__(self, "_rows", rows)
        object.__setattr__(self, "_pooled", tuple(v for _, row in self.values for v in row))
        if not all(rows.values()) or not rows:
            raise ConfigError("measured durations need at least one client, and one value for each")
        for v in self._pooled:
            _positive("measured value", v, zero=True)

    _rows: dict[int, tuple[float, ...]] = field(init=False, repr=False, compare=False)
    _pooled: tuple[float, ...] = field(init=False, repr=False, compare=False)

    @property
    def mean(self) -> float:
        """The mean of the clients' means, so that clients selected often count no more than others."""
        return float(np.mean([np.mean(row) for row in self._rows.values()]))

    def draw(self, u: Floats) -> Floats:
        return u

    def of(self, client: int, drawn: float) -> float:
        row = self._rows.get(client, self._pooled)
        return row[int(drawn * len(row))]


@dataclass(frozen=True)
class Network:
    """Transfer times of messages."""

    def seconds(self, client: int, bytes_down: float, bytes_up: float) -> float:
        raise NotImplementedError

    def mean(self, bytes_down: float, bytes_up: float) -> float:
        """The transfer time of an average client."""
        raise NotImplementedError


@dataclass(frozen=True)
class bandwidth(Network):
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

    def mean(self, bytes_down: float, bytes_up: float) -> float:
        return bytes_down / self.down + bytes_up / self.up


@dataclass(frozen=True)
class devices(Network):
    """Measured links, `[[down, up], …]` in bytes per unit of time: each client draws one of them.

    `devices("phones")` are 19 phones, in bytes a second.
    """

    rates: tuple[tuple[float, float], ...] | str

    def __init__(self, rates: Sequence[Sequence[float]] | str) -> None:
        if isinstance(rates, str):
            if rates != "phones":
                raise unknown("devices", rates, ["phones"])
            stored: Any = rates
            table = json.loads(resources.files("fedbraid.schedule").joinpath("files/speeds.json").read_text())
        else:
            stored = table = tuple((float(down), float(up)) for down, up in rates)
        if not table:
            raise ConfigError("devices need at least one pair of rates, [[down, up], …]")
        for down, up in table:
            _positive("down", down)
            _positive("up", up)
        object.__setattr__(self, "rates", stored)
        object.__setattr__(self, "_table", np.asarray(table, np.float64))

    _table: Floats = field(init=False, repr=False, compare=False)

    def seconds(self, client: int, bytes_down: float, bytes_up: float) -> float:
        down, up = self._table[int(rng.uniform(0, "device", client)[0] * len(self._table))]
        return float(bytes_down / down + bytes_up / up)

    def mean(self, bytes_down: float, bytes_up: float) -> float:
        return float((bytes_down / self._table[:, 0] + bytes_up / self._table[:, 1]).mean())


def from_run(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The timing of an earlier run as keywords of a schedule: `durations`, and `availability` if clients were offline.

    >>> fb.rounds(50, clients=3, **fb.clock.from_run("runs/fleet"))  # doctest: +SKIP
    """
    durations: dict[int, list[float]] = {}
    online: dict[int, list[list[float]]] = {}
    for record in _records(folder):
        for client, began, ended in zip(
            record["clients"], record.get("start_times", ()), record.get("end_times", ())
        ):
            durations.setdefault(client, []).append(ended - began)
        for client, at in record.get("came", ()):
            spans = online.setdefault(client, [])
            if (
                not spans or spans[-1][1] < math.inf
            ):  # otherwise the server was restarted and registered the client again
                spans.append([at, math.inf])
        for client, at in record.get("went", ()):
            online[client][-1][1] = at
    if not durations:
        raise ConfigError(
            f"{folder} records no durations; give the folder of a deployment or of a run with durations="
        )
    options: dict[str, Any] = {"durations": measured(durations)}
    if any(len(spans) > 1 or spans[0][1] < math.inf for spans in online.values()):
        first = min(spans[0][0] for spans in online.values())
        options["availability"] = availability(
            {c: [[s - first, e - first] for s, e in spans if s < e] for c, spans in online.items()},
            away="delayed",
        )
    return options


def _records(folder: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    path = os.path.join(folder, "metrics.jsonl")
    try:
        with open(path) as file:
            for line in file:
                yield json.loads(line)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give the folder of a run") from error
