"""Who trains when: schedules are iterators of ticks, one per server step.

A schedule never looks at the numbers, so resuming is replaying it. A client has at most one job in
flight; whatever ends at one instant is handed in before anything new starts.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbraid.core import rng
from fedbraid.core.check import integer, number, plain_numbers
from fedbraid.errors import ConfigError, unknown
from fedbraid.schedule import clock
from fedbraid.schedule.availability import Idle, Reachable
from fedbraid.schedule.selection import ClientHistory, ClientSelection, checked

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tick:
    """One server step: who hands in, from which version each trained, and what started meanwhile."""

    step: int
    time: float  # when the step happens
    clients: Ints  # senders in order of arrival
    versions: Ints  # the version each trained from
    started: Ints  # clients that started from version `step` before this step closed
    pending_versions: frozenset[int]  # versions that jobs still in flight train from
    dropped: int = 0  # clients that were asked but came too late
    is_synchronous: bool = False  # all of them started from this version, and nobody twice
    intervals: Floats | None = None  # [senders, 2]: when each began and ended, where a clock says so
    selected: list[list[int]] | None = None  # who was asked, attempt by attempt, where that was chosen

    def without(self, gone: Collection[int]) -> Tick:
        """The tick without clients that have left."""
        if not gone:
            return self
        here = ~np.isin(self.clients, list(gone))
        started = self.started[~np.isin(self.started, list(gone))]
        intervals = None if self.intervals is None else self.intervals[here]
        return replace(
            self,
            clients=self.clients[here],
            versions=self.versions[here],
            started=started,
            intervals=intervals,
        )

    def clocked(self) -> dict[str, list[Any]]:
        """What a record says of the clock: by sender, the version trained from, and when that began and ended."""
        if self.intervals is None:
            return {}
        began, ended = ([float(f"{v:.7g}") for v in ends] for ends in self.intervals.T.tolist())
        return {"versions": self.versions.tolist(), "start_times": began, "end_times": ended}


@dataclass(frozen=True)
class Schedule:
    """When clients train and when the server steps."""

    steps: int

    def __post_init__(self) -> None:
        plain_numbers(self)
        integer("steps", self.steps)
        link, durations = getattr(self, "bandwidth", None), getattr(self, "durations", None)
        if durations is not None and not isinstance(durations, clock.Durations):
            raise ConfigError(f"durations={durations!r} says no times; use one such as fb.clock.constant(1)")
        if link is not None and not isinstance(link, clock.Network):
            raise ConfigError(f"bandwidth={link!r} says no rates; use fb.clock.bandwidth(down, up)")
        when = getattr(self, "availability", None)
        if when is not None and not isinstance(when, clock.availability):
            raise ConfigError(
                f"availability={when!r} says no times; use fb.clock.availability(file or table)"
            )

    def ticks(
        self, N: int, seed: int, message: tuple[float, float] = (0.0, 0.0), seen: ClientHistory | None = None
    ) -> Iterator[Tick]:
        """One tick per server step; `message` is the bytes down and up, for transfer times, `seen` for choices."""
        raise NotImplementedError

    @property
    def asynchronous(self) -> bool:
        return False

    def caution(self, N: int) -> str | None:
        """What was asked for and N clients cannot give, in a sentence."""
        when: clock.availability | None = getattr(self, "availability", None)
        return None if when is None else when.caution(N)


@dataclass(frozen=True)
class Rounds(Schedule):
    """Sample a cohort uniformly without replacement, wait for it, step.

    With `over` > 1 more are asked than needed and the first `clients` count; with a `timeout` those
    that take longer are dropped. A round in which nobody is in time is asked anew. With `sampling="poisson"` each
    client takes part with probability clients/N, by itself: cohorts have any size, and some are empty. With an
    `availability` those are asked who can be reached, fewer where there are fewer; who goes away is not waited for.
    With `choose` a function says who is asked of these.
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
                "select= says who is asked, and so do given cohorts or Poisson rounds; leave out one of the two"
            )
        if self.sampling not in ("fixed", "poisson"):
            raise unknown("sampling", str(self.sampling), ["fixed", "poisson"])
        if self.sampling == "poisson" and (
            isinstance(self.clients, tuple) or (self.over_select, self.timeout) != (1, None)
        ):
            raise ConfigError(
                "Poisson rounds take whoever is drawn; leave out given cohorts, over and timeout, or use sampling='fixed'"
            )
        if isinstance(self.clients, float):
            if not 0 < self.clients <= 1:
                raise ConfigError(
                    f"clients={self.clients} is no share; use a share in (0, 1] or a whole number >= 1"
                )
        elif isinstance(self.clients, int):
            integer("clients", self.clients)
        elif not isinstance(self.clients, tuple):
            raise ConfigError(
                f"clients={self.clients!r} names no cohort; use a whole number, a share in (0, 1] or a list of cohorts"
            )
        elif len(self.clients) < self.steps or not all(self.clients):
            raise ConfigError(
                f"{len(self.clients)} cohorts for {self.steps} rounds; give one non-empty cohort for each"
            )
        times = (self.over_select, self.timeout, self.bandwidth, self.availability)
        if isinstance(self.clients, tuple) and times != (1, None, None, None):
            raise ConfigError(
                "given cohorts are waited for as they are; leave out over, timeout, bandwidth and availability"
            )
        number("over_select", self.over_select, "[1, inf)", "asks fewer clients than are needed")
        if self.timeout is not None:
            number("timeout", self.timeout, "(0, inf)", "lets nobody finish")

    def cohort(self, N: int) -> int:
        """How many clients a round waits for."""
        assert isinstance(self.clients, int | float)
        wanted = round(self.clients * N) if isinstance(self.clients, float) else self.clients
        return max(1, min(wanted, N))

    def caution(self, N: int) -> str | None:
        if self.sampling == "poisson":
            self.rate(N)
            return super().caution(N)
        if not isinstance(self.clients, int) or self.clients <= N:
            return super().caution(N)
        return f"{self.clients} clients a round were asked for and there are {N}; all of them take part in every round"

    def ticks(
        self, N: int, seed: int, message: tuple[float, float] = (0.0, 0.0), seen: ClientHistory | None = None
    ) -> Iterator[Tick]:
        now = 0.0
        seen = seen or ClientHistory(np.ones(N, np.int64), seed)
        for step in range(self.steps):
            clients, took, dropped, intervals = self._round(N, seed, step, message, now, seen)
            versions = np.full(len(clients), step, np.int64)
            intervals = None if intervals is None else intervals + now
            now += took
            yield Tick(
                step,
                now,
                clients,
                versions,
                clients,
                frozenset(),
                dropped,
                True,
                intervals,
                seen.asked.get(step),
            )

    def _round(
        self, N: int, seed: int, step: int, message: tuple[float, float], now: float, seen: ClientHistory
    ) -> tuple[Ints, float, int, Floats | None]:
        """Who hands in, how long the round takes, how many come too late, and each one's span."""
        if isinstance(self.clients, tuple):
            fixed = np.asarray(self.clients[step], np.int64)
            if fixed.min() < 0 or fixed.max() >= N or len(np.unique(fixed)) < len(fixed):
                raise ConfigError(
                    f"the cohort of round {step} is not a set of clients 0 to {N - 1}: {fixed.tolist()}"
                )
            return fixed, self.durations.mean, 0, None
        if self.sampling == "poisson":
            return self._drawn(N, seed, step, message, now)
        cohort, waited = self.cohort(N), 0.0
        limit = math.inf if self.timeout is None else self.timeout
        for attempt in range(1000):
            here, pause = self._here(N, now + waited)
            waited += pause
            there = N if here is None else len(here)
            wanted, count = cohort, min(there, math.ceil(cohort * self.over_select))
            if self.select is None:
                asked = rng.generator(seed, "cohort", step, attempt).choice(there, count, replace=False)
                asked = asked if here is None else here[asked]
            else:
                some = np.arange(N) if here is None else here
                asked = seen.choose(self.select, step, attempt, some, count)
                wanted = min(wanted, len(asked)) if self.over_select > 1 else len(asked)
            if (
                self._steady and self.over_select == 1 and self.durations.mean <= limit
            ):  # all at once, and in time
                return asked, self.durations.mean, 0, None
            took, arrives = self._took(asked, seed, step, attempt, message, now + waited)
            order = np.argsort(np.where(arrives, took, np.inf), kind="stable")[:wanted]
            kept = np.sort(order[arrives[order] & (took[order] <= limit)])
            end = float(took[kept].max()) if len(kept) == wanted else min(limit, float(took.max()))
            if len(kept):
                intervals = waited + np.stack([np.zeros(len(kept)), took[kept]], 1)
                return asked[kept], waited + end, len(asked) - len(kept), intervals
            waited += end
        raise ConfigError(
            f"no client finished round {step + 1} in 1000 tries (timeout={self.timeout}); raise the timeout, shorten"
            " the work, or let clients be there for longer"
        )

    @property
    def _steady(self) -> bool:
        """Whether every job takes the same time."""
        return (
            isinstance(self.durations, clock.constant)
            and self.bandwidth is None
            and self.availability is None
        )

    def _here(self, N: int, now: float) -> tuple[Ints | None, float]:
        """(who can be asked, None for all; how long the server waits for somebody)."""
        if self.availability is None:
            return None, 0.0
        at = now
        while not len(here := self.availability.here(N, at)):
            at = self.availability.coming(N, at)
            if at == math.inf:
                raise _nobody(now)
        return here, at - now

    def rate(self, N: int) -> float:
        """With which probability a client takes part in a round."""
        assert isinstance(self.clients, int | float)
        rate = self.clients if isinstance(self.clients, float) else self.clients / N
        if rate > 1:
            raise ConfigError(
                f"{self.clients} of {N} clients is a Poisson rate of {rate:.3g}, above 1; ask for at most {N} clients a round"
            )
        return rate

    def _drawn(
        self, N: int, seed: int, step: int, message: tuple[float, float], now: float
    ) -> tuple[Ints, float, int, Floats | None]:
        """A Poisson round: an empty one takes as long as one of average clients."""
        drawn = np.flatnonzero(rng.uniform(seed, "poisson", step, np.arange(N)) < self.rate(N)).astype(
            np.int64
        )
        here = drawn if self.availability is None else np.intersect1d(drawn, self.availability.here(N, now))
        if self._steady or not len(here):
            return (
                here,
                self.durations.mean,
                len(drawn) - len(here),
                None if self._steady else np.zeros((0, 2)),
            )
        took, arrives = self._took(here, seed, step, 0, message, now)
        intervals = np.stack([np.zeros(len(here)), took], 1)[arrives]
        return here[arrives], float(took.max()), len(drawn) - len(intervals), intervals

    def _took(
        self, asked: Ints, seed: int, step: int, attempt: int, message: tuple[float, float], now: float
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """(how long each of them takes, or until it is lost; whether it hands in)."""
        drawn = self.durations.draw(rng.uniform(seed, "duration", step, attempt, np.arange(len(asked))))
        took = np.array([self.durations.of(int(c), v) for c, v in zip(asked, drawn.tolist())])
        if self.bandwidth is not None:
            took = took + [self.bandwidth.seconds(int(c), *message) for c in asked]
        if self.availability is None:
            return took, np.ones(len(asked), bool)
        ends = [self.availability.ends(int(c), now, float(v)) for c, v in zip(asked, took)]
        return np.array([end for end, _ in ends]) - now, np.array([arrives for _, arrives in ends])


@dataclass(frozen=True)
class Buffered(Schedule):
    """Clients arrive, train for a random time and hand in; every `buffer` uploads the server steps.

    `arrivals` is "constant" or "poisson", at the rate that keeps `concurrency` clients busy on
    average (concurrency / mean duration); "closed", which keeps exactly that many busy; or a
    sequence of arrival times. With an `availability` only those start who can be reached.
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
            if self.arrivals not in ("constant", "poisson", "closed"):
                raise ConfigError(
                    f"arrivals={self.arrivals!r} is not known; use 'constant', 'poisson', 'closed' or a list of times"
                )
        elif list(self.arrivals) != sorted(self.arrivals) or not self.arrivals:
            raise ConfigError("a trace of arrivals needs at least one time, in order")
        if self.arrivals == "closed" and self.concurrency < self.buffer and self.durations.mean == 0:
            raise ConfigError("with no duration and a closed loop, concurrency must be at least the buffer")
        if self.availability is not None and self.durations.mean == 0:
            raise ConfigError(
                "with no duration time stands still, whoever is there; give durations to an availability"
            )

    @property
    def asynchronous(self) -> bool:
        return True

    def ticks(
        self, N: int, seed: int, message: tuple[float, float] = (0.0, 0.0), seen: ClientHistory | None = None
    ) -> Iterator[Tick]:
        queue = _Queue(self, N, seed, message)
        for step in range(self.steps):
            yield queue.tick(step)


class _Queue:
    """The event queue behind a buffered schedule: ends of jobs in a heap, arrivals from their own clock."""

    CHUNK = 4096

    def __init__(self, schedule: Buffered, N: int, seed: int, message: tuple[float, float]) -> None:
        self.schedule, self.seed, self.message = schedule, seed, message
        self.idle = Idle(N) if schedule.availability is None else Reachable(N, schedule.availability)
        # (end, job, client, version, start, whether it hands in)
        self.running: list[tuple[float, int, int, int, float, bool]] = []
        self.lost = 0  # jobs in a row
        self.job = 0
        self.arrived = 0
        self.now = 0.0
        self.busy_versions: Counter[int] = Counter()
        self.transfer: dict[int, float] = {}
        kind = type(schedule.durations)
        own = (kind.factor, kind.of) != (clock.Durations.factor, clock.Durations.of)
        self.plain = not own and schedule.bandwidth is None
        self.draws: deque[tuple[float, float]] = deque()
        self.gaps: deque[float] = deque()
        self.cap = min(schedule.concurrency, N)
        transfer = 0.0 if schedule.bandwidth is None else schedule.bandwidth.mean(*message)
        self.gap = (schedule.durations.mean + transfer) / schedule.concurrency
        self.next_arrival = math.inf if schedule.arrivals == "closed" else self._arrival()

    def tick(self, step: int) -> Tick:
        clients: list[int] = []
        versions: list[int] = []
        started: list[int] = []
        intervals: list[tuple[float, float]] = []
        running, goal, busy, dropped = self.running, self.schedule.buffer, self.busy_versions, 0
        closed, moves = self.schedule.arrivals == "closed", self.schedule.availability is not None
        while len(clients) < goal:
            if moves:
                self.idle.move(self.now)
            if closed:
                self._refill(step, started)
            wake = self._wake(closed) if closed or not running else math.inf
            if running and running[0][0] <= self.next_arrival and running[0][0] <= wake:
                end, _, client, version, start, arrives = heapq.heappop(running)
                self.now = end
                self.idle.give(client)
                if not arrives:
                    dropped += 1
                    self._lose(step)
                    continue
                self.lost = 0
                busy[version] -= 1
                if not busy[version]:
                    del busy[version]
                clients.append(client)
                versions.append(version)
                intervals.append((start, end))
            elif wake < self.next_arrival:
                self.now = wake
            elif self.next_arrival < math.inf:
                self.now = self.next_arrival
                self.next_arrival = self._arrival()
                if moves:
                    self.idle.move(self.now)
                if self.idle.free:  # with every client busy, an arrival passes by
                    self._start(step, started)
            else:
                raise ConfigError(
                    f"the trace of arrivals ends before step {step + 1} of {self.schedule.steps}; give more arrivals or fewer steps"
                )
        return Tick(
            step, self.now, np.array(clients, np.int64), np.array(versions, np.int64),
            np.array(started, np.int64), frozenset(busy), dropped, intervals=np.array(intervals),
        )  # fmt: skip

    def _wake(self, closed: bool) -> float:
        """When to look again for clients, where it is for them that work waits."""
        if closed and len(self.running) < self.cap:
            if not self.running and self.idle.change == math.inf:
                raise _nobody(self.now)
            return self.idle.change
        if not closed and not self.running and not self.idle.free:
            if self.idle.change == math.inf:
                raise _nobody(self.now)
            self._skip(self.idle.change)
        return math.inf

    def _skip(self, until: float) -> None:
        """Let arrivals pass by while nobody is there."""
        if self.schedule.arrivals == "constant":
            self.arrived = max(self.arrived, math.ceil(until / self.gap))
        elif self.schedule.arrivals == "poisson":
            self.now = max(self.now, until)
        while self.next_arrival < until:
            self.next_arrival = self._arrival()

    def _lose(self, step: int) -> None:
        self.lost += 1
        if self.lost > 10_000:
            raise ConfigError(
                f"before step {step + 1}, {self.lost:,} jobs in a row were lost because their clients went away; shorten the"
                " work, let clients be there for longer, or use away='delayed'"
            )

    def _refill(self, step: int, started: list[int]) -> None:
        """Keep exactly `concurrency` jobs in flight, but let all that end now hand in first."""
        if self.running and self.running[0][0] <= self.now:
            return
        while len(self.running) < self.cap and self.idle.free:
            self._start(step, started)

    def _start(self, step: int, started: list[int]) -> None:
        if not self.draws:
            self._draw()
        duration, pick = self.draws.popleft()
        client = self.idle.take(pick)
        if not self.plain:
            duration = self._slowed(client, duration)
        end, arrives = self.now + duration, True
        if self.schedule.availability is not None:
            end, arrives = self.schedule.availability.ends(client, self.now, duration)
        heapq.heappush(self.running, (end, self.job, client, step, self.now, arrives))
        self.job += 1
        if arrives:  # who is lost never ran
            self.busy_versions[step] += 1
            started.append(client)

    def _draw(self) -> None:
        jobs = np.arange(self.job, self.job + self.CHUNK)
        durations = self.schedule.durations.draw(rng.uniform(self.seed, "duration", jobs))
        picks = rng.uniform(self.seed, "arrival", jobs)
        self.draws.extend(zip(durations.tolist(), picks.tolist()))

    def _slowed(self, client: int, duration: float) -> float:
        if client not in self.transfer:
            link = self.schedule.bandwidth
            self.transfer[client] = 0.0 if link is None else link.seconds(client, *self.message)
        return self.schedule.durations.of(client, duration) + self.transfer[client]

    def _arrival(self) -> float:
        """The time of the next arrival."""
        k, self.arrived = self.arrived, self.arrived + 1
        kind = self.schedule.arrivals
        if not isinstance(kind, str):
            return kind[k] if k < len(kind) else math.inf
        if kind == "constant":
            return k * self.gap
        if not self.gaps:
            u = rng.uniform(self.seed, "gap", np.arange(k, k + self.CHUNK))
            self.gaps.extend((-self.gap * np.log1p(-u)).tolist())
        return (self.now if k else 0.0) + self.gaps.popleft()


def _nobody(now: float) -> ConfigError:
    return ConfigError(
        f"nobody can be reached after time {now:g} by this availability; give it a period= after which it begins again,"
        " or ask for fewer steps"
    )


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
    """Synchronous rounds of `clients` each: a number, a share of all, or a given cohort for each round.

    With sampling="poisson" that many take part on average, each by its own draw. `choose(step, available, losses)`
    gives the clients to ask, of those `available`, by each one's last loss, NaN before its first visit; arguments called
    `wanted` (how many), `sizes`, `last_participation` (the step of each one's last) and `random` (a counted generator) are given, too.
    """
    if isinstance(clients, Sequence) and not isinstance(clients, str):
        try:
            clients = tuple(tuple(int(c) for c in cohort) for cohort in clients)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"clients={clients!r} is no list of cohorts; give a list of client ids for each round"
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
