"""Schedules: when clients train and when the server steps.

A schedule never reads the numbers, so that resuming replays it. `policies.py` decides by it; in a simulation
`simulated_clock.py` turns it into ticks, one for each server step, and a fleet does so by the real clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedbraid.core.check import integer, number, one_of, plain_numbers
from fedbraid.errors import ConfigError, unknown
from fedbraid.schedule import clock, simulated_clock
from fedbraid.schedule.policies import Tick
from fedbraid.schedule.selection import ClientHistory, ClientSelection, checked


@dataclass(frozen=True)
class Schedule:
    """When clients train and when the server steps."""

    steps: int

    def __post_init__(self) -> None:
        plain_numbers(self)
        integer("steps", self.steps)
        link, durations = getattr(self, "bandwidth", None), getattr(self, "durations", None)
        if durations is not None and not isinstance(durations, clock.Durations):
            raise ConfigError(
                f"durations={durations!r} is not a model of durations; use one such as fb.clock.constant(1)"
            )
        if link is not None and not isinstance(link, clock.Network):
            raise ConfigError(f"bandwidth={link!r} is not a model of links; use fb.clock.bandwidth(down, up)")
        when = getattr(self, "availability", None)
        if when is not None and not isinstance(when, clock.availability):
            raise ConfigError(
                f"availability={when!r} is not an availability; use fb.clock.availability(file or table)"
            )

    def ticks(
        self,
        N: int,
        seed: int,
        message: tuple[float, float] = (0.0, 0.0),
        history: ClientHistory | None = None,
    ) -> Iterator[Tick]:
        """One tick per server step; `message` is the bytes down and up, for transfer times, `history` for client selection."""
        raise NotImplementedError

    @property
    def asynchronous(self) -> bool:
        return False

    def caution(self, N: int) -> str | None:
        """A sentence on what the schedule requests and N clients cannot provide, or None."""
        when: clock.availability | None = getattr(self, "availability", None)
        return None if when is None else when.caution(N)


@dataclass(frozen=True)
class Rounds(Schedule):
    """Sample a cohort uniformly without replacement, wait for it, step.

    With `over_select` > 1 more clients are selected than needed and the first `clients` count; with a `timeout` those
    that take longer are dropped. A round without an upload in time is repeated. With `sampling="poisson"` each
    client participates independently with probability clients/N: cohorts have any size, and some are empty. With an
    `availability` only available clients are selected, possibly fewer; clients that disconnect are not waited for.
    With `select` a function selects among them.
    """

    clients: int | float | tuple[tuple[int, ...], ...] = 10
    over_select: float = 1.0
    timeout: float | None = None
    durations: clock.Durations = field(default_factory=clock.constant)
    bandwidth: clock.Network | None = None
    sampling: str = "fixed"
    availability: clock.availability | None = None
    select: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "select", checked(self.select))
        if self.select is not None and (isinstance(self.clients, tuple) or self.sampling != "fixed"):
            raise ConfigError(
                "select= selects clients, and so do given cohorts or Poisson rounds; leave out one of the two"
            )
        if self.sampling not in ("fixed", "poisson"):
            raise unknown("sampling", str(self.sampling), ["fixed", "poisson"])
        if self.sampling == "poisson" and (
            isinstance(self.clients, tuple) or (self.over_select, self.timeout) != (1, None)
        ):
            raise ConfigError(
                "Poisson rounds take every client that is drawn; leave out given cohorts, over_select and timeout, or use sampling='fixed'"
            )
        if isinstance(self.clients, float):
            if not 0 < self.clients <= 1:
                raise ConfigError(
                    f"clients={self.clients} is not valid; use a fraction in (0, 1] or an integer >= 1"
                )
        elif isinstance(self.clients, int):
            integer("clients", self.clients)
        elif not isinstance(self.clients, tuple):
            raise ConfigError(
                f"clients={self.clients!r} is not a cohort; use an integer, a fraction in (0, 1] or a list of cohorts"
            )
        elif len(self.clients) < self.steps or not all(self.clients):
            raise ConfigError(
                f"{len(self.clients)} cohorts for {self.steps} rounds; give one non-empty cohort for each"
            )
        times = (self.over_select, self.timeout, self.bandwidth, self.availability)
        if isinstance(self.clients, tuple) and times != (1, None, None, None):
            raise ConfigError(
                "given cohorts do not combine with over_select, timeout, bandwidth and availability; leave these out"
            )
        number("over_select", self.over_select, "[1, inf)", "selects fewer clients than are needed")
        if self.timeout is not None:
            number("timeout", self.timeout, "(0, inf)", "leaves no time to finish")

    def cohort(self, N: int) -> int:
        """The number of clients that a round waits for."""
        assert isinstance(self.clients, int | float)
        count = round(self.clients * N) if isinstance(self.clients, float) else self.clients
        return max(1, min(count, N))

    def caution(self, N: int) -> str | None:
        if self.sampling == "poisson":
            self.rate(N)
            return super().caution(N)
        if not isinstance(self.clients, int) or self.clients <= N:
            return super().caution(N)
        return f"{self.clients} clients per round were requested and there are {N}; all of them participate in every round"

    def ticks(
        self,
        N: int,
        seed: int,
        message: tuple[float, float] = (0.0, 0.0),
        history: ClientHistory | None = None,
    ) -> Iterator[Tick]:
        return simulated_clock.rounds(self, N, seed, message, history)

    def rate(self, N: int) -> float:
        """The probability that a client participates in a round."""
        assert isinstance(self.clients, int | float)
        rate = self.clients if isinstance(self.clients, float) else self.clients / N
        if rate > 1:
            raise ConfigError(
                f"{self.clients} of {N} clients is a Poisson rate of {rate:.3g}, above 1; use at most {N} clients per round"
            )
        return rate


@dataclass(frozen=True)
class Buffered(Schedule):
    """Clients arrive, train for a random time and upload; every `buffer` uploads the server steps.

    `arrivals` is "constant" or "poisson", at the rate that keeps `concurrency` clients busy on
    average (concurrency / mean duration); "closed", which keeps exactly that many busy; or a
    sequence of arrival times. With an `availability` only available clients start.
    """

    buffer: int = 10
    concurrency: int = 100
    arrivals: str | tuple[float, ...] = "constant"
    durations: clock.Durations = field(default_factory=clock.halfnormal)
    bandwidth: clock.Network | None = None
    availability: clock.availability | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("buffer", self.buffer)
        integer("concurrency", self.concurrency)
        if isinstance(self.arrivals, str):
            one_of("arrivals", self.arrivals, ("constant", "poisson", "closed"), "a list of times")
        elif list(self.arrivals) != sorted(self.arrivals) or not self.arrivals:
            raise ConfigError("a trace of arrivals needs at least one time, in order")
        if self.arrivals == "closed" and self.concurrency < self.buffer and self.durations.mean == 0:
            raise ConfigError("with no duration and a closed loop, concurrency must be at least the buffer")
        if self.availability is not None and self.durations.mean == 0:
            raise ConfigError(
                "availability= requires durations=, because simulated time does not advance without them"
            )

    @property
    def asynchronous(self) -> bool:
        return True

    def ticks(
        self,
        N: int,
        seed: int,
        message: tuple[float, float] = (0.0, 0.0),
        history: ClientHistory | None = None,
    ) -> Iterator[Tick]:
        queue = simulated_clock.EventQueue(self, N, seed, message)
        for step in range(self.steps):
            yield queue.tick(step)


def rounds(
    steps: int,
    clients: int | float | Sequence[Sequence[int]] = 10,
    *,
    over_select: float = 1.0,
    timeout: float | None = None,
    durations: clock.Durations | None = None,
    bandwidth: clock.Network | None = None,
    sampling: str = "fixed",
    select: ClientSelection | None = None,
    availability: clock.availability | None = None,
) -> Rounds:
    """Synchronous rounds of `clients` each: a number, a fraction of all, or a given cohort for each round.

    With sampling="poisson" that many participate on average, by independent draws. `select(step, available, losses)`
    returns the clients to select among those `available`, by each one's last loss (NaN before its first participation);
    parameters named `count` (how many), `sizes`, `last_participation` (the step of each one's last) and `random` (a
    counted generator) are passed, too.
    """
    if isinstance(clients, Sequence) and not isinstance(clients, str):
        try:
            clients = tuple(tuple(int(c) for c in cohort) for cohort in clients)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"clients={clients!r} is not a list of cohorts; give a list of client ids for each round"
            ) from error
    return Rounds(
        steps,
        clients,
        over_select,
        timeout,
        durations or clock.constant(),
        bandwidth,
        sampling,
        availability,
        select,
    )


def buffered(
    steps: int,
    buffer: int = 10,
    concurrency: int = 100,
    *,
    arrivals: str | Sequence[float] = "constant",
    durations: clock.Durations | None = None,
    bandwidth: clock.Network | None = None,
    availability: clock.availability | None = None,
) -> Buffered:
    """Asynchronous training: a server step after every `buffer` uploads (FedBuff, QAFeL)."""
    kind = arrivals if isinstance(arrivals, str) else tuple(float(a) for a in arrivals)
    return Buffered(
        steps, buffer, concurrency, kind, durations or clock.halfnormal(), bandwidth, availability
    )


def immediate(
    steps: int,
    concurrency: int = 100,
    *,
    arrivals: str | Sequence[float] = "constant",
    durations: clock.Durations | None = None,
    bandwidth: clock.Network | None = None,
    availability: clock.availability | None = None,
) -> Buffered:
    """Asynchronous training with a server step after every upload (FedAsync)."""
    return buffered(
        steps,
        1,
        concurrency,
        arrivals=arrivals,
        durations=durations,
        bandwidth=bandwidth,
        availability=availability,
    )
