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
from fedbraid.core.check import number, plain_numbers, whole
from fedbraid.errors import ConfigError, unknown
from fedbraid.schedule import clock

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
    live: frozenset[int]  # versions that jobs still in flight train from
    dropped: int = 0  # clients that were asked but came too late
    together: bool = False  # all of them started from this version, and nobody twice
    spans: Floats | None = None  # [senders, 2]: when each began and ended, where a clock says so

    def without(self, gone: Collection[int]) -> Tick:
        """The tick without clients that have left."""
        if not gone:
            return self
        here = ~np.isin(self.clients, list(gone))
        started = self.started[~np.isin(self.started, list(gone))]
        spans = None if self.spans is None else self.spans[here]
        return replace(
            self, clients=self.clients[here], versions=self.versions[here], started=started, spans=spans
        )

    def clocked(self) -> dict[str, list[Any]]:
        """What a record says of the clock: by sender, the version trained from, and when that began and ended."""
        if self.spans is None:
            return {}
        began, ended = ([float(f"{v:.7g}") for v in ends] for ends in self.spans.T.tolist())
        return {"versions": self.versions.tolist(), "began": began, "ended": ended}


@dataclass(frozen=True)
class Schedule:
    """When clients train and when the server steps."""

    steps: int

    def __post_init__(self) -> None:
        plain_numbers(self)
        whole("steps", self.steps)
        link, durations = getattr(self, "bandwidth", None), getattr(self, "durations", None)
        if durations is not None and not isinstance(durations, clock.Durations):
            raise ConfigError(f"durations={durations!r} says no times; use one such as fb.clock.constant(1)")
        if link is not None and not isinstance(link, clock.bandwidth):
            raise ConfigError(f"bandwidth={link!r} says no rates; use fb.clock.bandwidth(down, up)")

    def ticks(self, N: int, seed: int, message: tuple[float, float] = (0.0, 0.0)) -> Iterator[Tick]:
        """One tick per server step; `message` is the bytes down and up, for transfer times."""
        raise NotImplementedError

    @property
    def asynchronous(self) -> bool:
        return False

    def caution(self, N: int) -> str | None:
        """What was asked for and N clients cannot give, in a sentence."""
        return None


@dataclass(frozen=True)
class Rounds(Schedule):
    """Sample a cohort uniformly without replacement, wait for it, step.

    With `over` > 1 more are asked than needed and the first `clients` count; with a `timeout` those
    that take longer are dropped. A round in which nobody is in time is asked anew. With `sampling="poisson"` each
    client takes part with probability clients/N, by itself: cohorts have any size, and some are empty.
    """

    clients: int | float | tuple[tuple[int, ...], ...] = 10
    over: float = 1.0
    timeout: float | None = None
    durations: clock.Durations = field(default_factory=clock.constant)
    bandwidth: clock.bandwidth | None = None
    sampling: str = "fixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling not in ("fixed", "poisson"):
            raise unknown("sampling", str(self.sampling), ["fixed", "poisson"])
        if self.sampling == "poisson" and (
            isinstance(self.clients, tuple) or (self.over, self.timeout) != (1, None)
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
            whole("clients", self.clients)
        elif not isinstance(self.clients, tuple):
            raise ConfigError(
                f"clients={self.clients!r} names no cohort; use a whole number, a share in (0, 1] or a list of cohorts"
            )
        elif len(self.clients) < self.steps or not all(self.clients):
            raise ConfigError(
                f"{len(self.clients)} cohorts for {self.steps} rounds; give one non-empty cohort for each"
            )
        if isinstance(self.clients, tuple) and (self.over, self.timeout, self.bandwidth) != (1, None, None):
            raise ConfigError(
                "given cohorts are waited for as they are; leave out over, timeout and bandwidth"
            )
        number("over", self.over, "[1, inf)", "asks fewer clients than are needed")
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
            return None
        if not isinstance(self.clients, int) or self.clients <= N:
            return None
        return f"{self.clients} clients a round were asked for and there are {N}; all of them take part in every round"

    def ticks(self, N: int, seed: int, message: tuple[float, float] = (0.0, 0.0)) -> Iterator[Tick]:
        now = 0.0
        for step in range(self.steps):
            clients, took, dropped, spans = self._round(N, seed, step, message)
            versions = np.full(len(clients), step, np.int64)
            spans = None if spans is None else spans + now
            now += took
            yield Tick(step, now, clients, versions, clients, frozenset(), dropped, True, spans)

    def _round(
        self, N: int, seed: int, step: int, message: tuple[float, float]
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
            return self._drawn(N, seed, step, message)
        wanted, waited = self.cohort(N), 0.0
        for attempt in range(1000):
            asked = rng.generator(seed, "cohort", step, attempt).choice(
                N, min(N, math.ceil(wanted * self.over)), replace=False
            )
            limit = math.inf if self.timeout is None else self.timeout
            steady = isinstance(self.durations, clock.constant) and self.bandwidth is None and self.over == 1
            if steady and self.durations.mean <= limit:  # all at once, and in time
                return asked, self.durations.mean, 0, None
            took = self._took(asked, seed, step, attempt, message)
            order = np.argsort(took, kind="stable")[:wanted]
            kept = np.sort(order[took[order] <= limit])
            if len(kept):
                end = float(took[kept].max()) if len(kept) == wanted else limit
                spans = waited + np.stack([np.zeros(len(kept)), took[kept]], 1)
                return asked[kept], waited + end, len(asked) - len(kept), spans
            waited += limit
        raise ConfigError(
            f"no client finished within timeout={self.timeout} in 1000 tries; raise the timeout or shorten the work"
        )

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
        self, N: int, seed: int, step: int, message: tuple[float, float]
    ) -> tuple[Ints, float, int, Floats | None]:
        """A Poisson round: an empty one takes as long as one of average clients."""
        drawn = np.flatnonzero(rng.uniform(seed, "poisson", step, np.arange(N)) < self.rate(N)).astype(
            np.int64
        )
        steady = isinstance(self.durations, clock.constant) and self.bandwidth is None
        if steady or not len(drawn):
            return drawn, self.durations.mean, 0, None if steady else np.zeros((0, 2))
        took = self._took(drawn, seed, step, 0, message)
        return drawn, float(took.max()), 0, np.stack([np.zeros(len(drawn)), took], 1)

    def _took(self, asked: Ints, seed: int, step: int, attempt: int, message: tuple[float, float]) -> Floats:
        """How long each of them takes."""
        took = self.durations.draw(rng.uniform(seed, "duration", step, attempt, np.arange(len(asked))))
        took = took * [self.durations.factor(int(c)) for c in asked]
        if self.bandwidth is not None:
            took = took + [self.bandwidth.seconds(int(c), *message) for c in asked]
        return took


@dataclass(frozen=True)
class Buffered(Schedule):
    """Clients arrive, train for a random time and hand in; every `buffer` uploads the server steps.

    `arrivals` is "constant" or "poisson", at the rate that keeps `concurrency` clients busy on
    average (concurrency / mean duration); "closed", which keeps exactly that many busy; or a
    sequence of arrival times.
    """

    buffer: int = 10
    concurrency: int = 100
    arrivals: str | tuple[float, ...] = "constant"
    durations: clock.Durations = field(default_factory=clock.halfnormal)
    bandwidth: clock.bandwidth | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("buffer", self.buffer)
        whole("concurrency", self.concurrency)
        if isinstance(self.arrivals, str):
            if self.arrivals not in ("constant", "poisson", "closed"):
                raise ConfigError(
                    f"arrivals={self.arrivals!r} is not known; use 'constant', 'poisson', 'closed' or a list of times"
                )
        elif list(self.arrivals) != sorted(self.arrivals) or not self.arrivals:
            raise ConfigError("a trace of arrivals needs at least one time, in order")
        if self.arrivals == "closed" and self.concurrency < self.buffer and self.durations.mean == 0:
            raise ConfigError("with no duration and a closed loop, concurrency must be at least the buffer")

    @property
    def asynchronous(self) -> bool:
        return True

    def ticks(self, N: int, seed: int, message: tuple[float, float] = (0.0, 0.0)) -> Iterator[Tick]:
        queue = _Queue(self, N, seed, message)
        for step in range(self.steps):
            yield queue.tick(step)


class _Queue:
    """The event queue behind a buffered schedule: ends of jobs in a heap, arrivals from their own clock."""

    CHUNK = 4096

    def __init__(self, plan: Buffered, N: int, seed: int, message: tuple[float, float]) -> None:
        self.plan, self.seed, self.message = plan, seed, message
        self.idle = list(range(N))
        self.running: list[tuple[float, int, int, int, float]] = []  # (end, job, client, version, start)
        self.job = 0
        self.arrived = 0
        self.now = 0.0
        self.busy_versions: Counter[int] = Counter()
        self.slow: dict[int, tuple[float, float]] = {}
        self.plain = type(plan.durations).factor is clock.Durations.factor and plan.bandwidth is None
        self.draws: deque[tuple[float, float]] = deque()
        self.gaps: deque[float] = deque()
        self.cap = min(plan.concurrency, N)
        self.next_arrival = math.inf if plan.arrivals == "closed" else self._arrival()

    def tick(self, step: int) -> Tick:
        clients: list[int] = []
        versions: list[int] = []
        started: list[int] = []
        spans: list[tuple[float, float]] = []
        running, goal, closed = self.running, self.plan.buffer, self.plan.arrivals == "closed"
        while len(clients) < goal:
            if closed:
                self._refill(step, started)
            if running and running[0][0] <= self.next_arrival:
                end, _, client, version, start = heapq.heappop(running)
                self.now = end
                self.busy_versions[version] -= 1
                self.idle.append(client)
                clients.append(client)
                versions.append(version)
                spans.append((start, end))
            elif self.next_arrival < math.inf:
                self.now = self.next_arrival
                self.next_arrival = self._arrival()
                if self.idle:  # with every client busy, an arrival passes by
                    self._start(step, started)
            else:
                raise ConfigError(
                    f"the trace of arrivals ends before step {step + 1} of {self.plan.steps}; give more arrivals or fewer steps"
                )
        self.busy_versions += Counter()  # drop the zeros
        return Tick(
            step, self.now, np.array(clients, np.int64), np.array(versions, np.int64),
            np.array(started, np.int64), frozenset(self.busy_versions), spans=np.array(spans),
        )  # fmt: skip

    def _refill(self, step: int, started: list[int]) -> None:
        """Keep exactly `concurrency` jobs in flight, but let all that end now hand in first."""
        if self.running and self.running[0][0] <= self.now:
            return
        while len(self.running) < self.cap:
            self._start(step, started)

    def _start(self, step: int, started: list[int]) -> None:
        if not self.draws:
            self._draw()
        duration, pick = self.draws.popleft()
        at, idle = int(pick * len(self.idle)), self.idle
        client = idle[at]
        idle[at] = idle[-1]
        idle.pop()
        if not self.plain:
            duration = self._slowed(client, duration)
        heapq.heappush(self.running, (self.now + duration, self.job, client, step, self.now))
        self.job += 1
        self.busy_versions[step] += 1
        started.append(client)

    def _draw(self) -> None:
        jobs = np.arange(self.job, self.job + self.CHUNK)
        durations = self.plan.durations.draw(rng.uniform(self.seed, "duration", jobs))
        picks = rng.uniform(self.seed, "arrival", jobs)
        self.draws.extend(zip(durations.tolist(), picks.tolist()))

    def _slowed(self, client: int, duration: float) -> float:
        if client not in self.slow:
            link = self.plan.bandwidth
            transfer = 0.0 if link is None else link.seconds(client, *self.message)
            self.slow[client] = (self.plan.durations.factor(client), transfer)
        factor, transfer = self.slow[client]
        return duration * factor + transfer

    def _arrival(self) -> float:
        """The time of the next arrival."""
        k, self.arrived = self.arrived, self.arrived + 1
        kind = self.plan.arrivals
        if not isinstance(kind, str):
            return kind[k] if k < len(kind) else math.inf
        mean = self.plan.durations.mean
        if self.plan.bandwidth is not None:
            mean += sum(
                m / r for m, r in zip(self.message, (self.plan.bandwidth.down, self.plan.bandwidth.up))
            )
        gap = mean / self.plan.concurrency
        if kind == "constant":
            return k * gap
        if not self.gaps:
            u = rng.uniform(self.seed, "gap", np.arange(k, k + self.CHUNK))
            self.gaps.extend((-gap * np.log1p(-u)).tolist())
        return (self.now if k else 0.0) + self.gaps.popleft()


def rounds(
    steps: int,
    clients: int | float | Sequence[Sequence[int]] = 10,
    *,
    over: float = 1.0,
    timeout: float | None = None,
    durations: clock.Durations | None = None,
    bandwidth: clock.bandwidth | None = None,
    sampling: str = "fixed",
) -> Rounds:
    """Synchronous rounds of `clients` each: a number, a share of all, or a given cohort for each round.

    With sampling="poisson" that many take part on average, each by its own draw.
    """
    if isinstance(clients, Sequence) and not isinstance(clients, str):
        try:
            clients = tuple(tuple(int(c) for c in cohort) for cohort in clients)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"clients={clients!r} is no list of cohorts; give a list of client ids for each round"
            ) from error
    return Rounds(steps, clients, over, timeout, durations or clock.constant(), bandwidth, sampling)


def buffered(
    steps: int,
    buffer: int = 10,
    concurrency: int = 100,
    *,
    arrivals: str | Sequence[float] = "constant",
    durations: clock.Durations | None = None,
    bandwidth: clock.bandwidth | None = None,
) -> Buffered:
    """Asynchronous training: a server step after every `buffer` uploads (FedBuff, QAFeL)."""
    kind = arrivals if isinstance(arrivals, str) else tuple(float(a) for a in arrivals)
    return Buffered(steps, buffer, concurrency, kind, durations or clock.halfnormal(), bandwidth)


def immediate(steps: int, concurrency: int = 100, **options: object) -> Buffered:
    """Asynchronous training with a server step after every upload (FedAsync)."""
    return buffered(steps, 1, concurrency, **options)  # type: ignore[arg-type]
