"""The simulated clock: events of simulated clients, decided by the same policies that real fleets use.

A client has at most one job in flight; all jobs that end at one instant upload before a new one starts. Rounds jump
from one decision of the policy to the next. The event queue of buffered schedules applies its policy's two rules itself,
without a view for each event: a step closes at `buffer` uploads, and `openings` says how many clients start.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedbraid.core import rng
from fedbraid.errors import ConfigError
from fedbraid.schedule.availability import Idle, Reachable
from fedbraid.schedule.clock import Durations, constant
from fedbraid.schedule.policies import (
    BufferPolicy,
    Close,
    Floats,
    Ints,
    RoundPolicy,
    Select,
    Tick,
    View,
    Wait,
)
from fedbraid.schedule.selection import ClientHistory

if TYPE_CHECKING:
    from fedbraid.schedule.schedules import Buffered, Rounds

ATTEMPTS = 1000  # at one round without an upload in time
Message = tuple[float, float]  # bytes down and up
NO_CLIENTS = np.array([], np.int64)


def rounds(
    schedule: Rounds, N: int, seed: int, message: Message = (0.0, 0.0), history: ClientHistory | None = None
) -> Iterator[Tick]:
    """Synchronous rounds."""
    now = 0.0
    history = history or ClientHistory(np.ones(N, np.int64), seed)
    for step in range(schedule.steps):
        clients, elapsed, dropped, intervals = _round(schedule, N, seed, step, message, now, history)
        versions = np.full(len(clients), step, np.int64)
        intervals = None if intervals is None else intervals + now
        now += elapsed
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
            history.selected.get(step),
        )


def _round(
    schedule: Rounds, N: int, seed: int, step: int, message: Message, now: float, history: ClientHistory
) -> tuple[Ints, float, int, Floats | None]:
    """(clients that upload, duration of the round, number of dropped clients, the interval of each upload)."""
    if isinstance(schedule.clients, tuple):
        fixed = np.asarray(schedule.clients[step], np.int64)
        if fixed.min() < 0 or fixed.max() >= N or len(np.unique(fixed)) < len(fixed):
            raise ConfigError(
                f"the cohort of round {step} is not a set of clients 0 to {N - 1}: {fixed.tolist()}"
            )
        return fixed, schedule.durations.mean, 0, None
    if schedule.sampling == "poisson":
        return _drawn(schedule, N, seed, step, message, now)
    limit = math.inf if schedule.timeout is None else schedule.timeout
    choose = None if schedule.select is None else partial(history.choose, schedule.select)
    policy = RoundPolicy(schedule.cohort(N), seed, schedule.over_select, limit, choose=choose)
    waited = 0.0
    for attempt in range(ATTEMPTS):
        available, pause = _available(schedule, N, now + waited)
        waited += pause
        selection = policy.next(View(step, N if available is None else available, attempts=attempt))
        assert isinstance(selection, Select)
        selected = selection.clients
        if _steady(schedule) and schedule.over_select == 1 and schedule.durations.mean <= limit:
            return selected, schedule.durations.mean, 0, None  # all at once, and in time
        durations, arrives = _durations(schedule, selected, seed, step, attempt, message, now + waited)
        counted, end = _play(
            policy, selection, View(step, NO_CLIENTS, attempts=attempt + 1), durations, arrives
        )
        if len(counted):
            intervals = waited + np.stack([np.zeros(len(counted)), durations[counted]], 1)
            return selected[counted], waited + end, len(selected) - len(counted), intervals
        waited += end
    raise ConfigError(
        f"no client finished round {step + 1} in {ATTEMPTS} attempts (timeout={schedule.timeout}); raise the timeout, shorten"
        " local training, or make clients available for longer"
    )


def _play(
    policy: RoundPolicy, selection: Select, view: View, durations: Floats, arrives: NDArray[np.bool_]
) -> tuple[Ints, float]:
    """(indices of the selected clients that count, when the round or its attempt ends)."""
    order = np.argsort(np.where(arrives, durations, np.inf), kind="stable")[: selection.required]
    order = order[arrives[order]]
    counted, at = order[:0], 0.0
    while True:
        decision = policy.next(
            View(
                view.step, NO_CLIENTS, at, len(counted), int((durations > at).sum()), view.attempts, selection.required
            )
        )  # fmt: skip
        if not isinstance(decision, Wait) or (at > 0 and not len(counted)):
            assert isinstance(decision, Close | Wait)
            return np.sort(counted), at
        enough = float(durations[order[decision.uploads - 1]]) if len(order) >= decision.uploads else math.inf
        at = min(enough, float(durations.max()), decision.until)
        counted = order[durations[order] <= at]


def _steady(schedule: Rounds) -> bool:
    """Whether every job takes the same time."""
    return (
        isinstance(schedule.durations, constant)
        and schedule.bandwidth is None
        and schedule.availability is None
    )


def _available(schedule: Rounds, N: int, now: float) -> tuple[Ints | None, float]:
    """(clients that can be selected, None for all; how long the server waits for the first of them)."""
    if schedule.availability is None:
        return None, 0.0
    at = now
    while not len(available := schedule.availability.available(N, at)):
        at = schedule.availability.next_start(N, at)
        if at == math.inf:
            raise _no_client(now)
    return available, at - now


def _drawn(
    schedule: Rounds, N: int, seed: int, step: int, message: Message, now: float
) -> tuple[Ints, float, int, Floats | None]:
    """A Poisson round: an empty one takes as long as an average client."""
    draw = rng.uniform(seed, "poisson", step, np.arange(N))
    drawn = np.flatnonzero(draw < schedule.rate(N)).astype(np.int64)
    when, steady = schedule.availability, _steady(schedule)
    available = drawn if when is None else np.intersect1d(drawn, when.available(N, now))
    if steady or not len(available):
        return (
            available,
            schedule.durations.mean,
            len(drawn) - len(available),
            None if steady else np.zeros((0, 2)),
        )
    durations, arrives = _durations(schedule, available, seed, step, 0, message, now)
    intervals = np.stack([np.zeros(len(available)), durations], 1)[arrives]
    return available[arrives], float(durations.max()), len(drawn) - len(intervals), intervals


def _durations(
    schedule: Rounds, clients: Ints, seed: int, step: int, attempt: int, message: Message, now: float
) -> tuple[Floats, NDArray[np.bool_]]:
    """(the duration of each client's job, or the time until it is lost; whether its upload arrives)."""
    drawn = schedule.durations.draw(rng.uniform(seed, "duration", step, attempt, np.arange(len(clients))))
    durations = np.array([schedule.durations.of(int(c), v) for c, v in zip(clients, drawn.tolist())])
    if schedule.bandwidth is not None:
        durations = durations + [schedule.bandwidth.seconds(int(c), *message) for c in clients]
    if schedule.availability is None:
        return durations, np.ones(len(clients), bool)
    ends = [schedule.availability.ends(int(c), now, float(v)) for c, v in zip(clients, durations)]
    return np.array([end for end, _ in ends]) - now, np.array([arrives for _, arrives in ends])


class EventQueue:
    """The event queue behind a buffered schedule: ends of jobs in a heap, arrivals from their own clock."""

    CHUNK = 4096

    def __init__(self, schedule: Buffered, N: int, seed: int, message: tuple[float, float]) -> None:
        self.schedule, self.seed, self.message = schedule, seed, message
        self.idle = Idle(N) if schedule.availability is None else Reachable(N, schedule.availability)
        # (end, job, client, version, start, whether its upload arrives)
        self.running: list[tuple[float, int, int, int, float, bool]] = []
        self.lost = 0  # jobs in a row
        self.job = 0
        self.arrived = 0
        self.now = 0.0
        self.busy_versions: Counter[int] = Counter()
        self.transfer: dict[int, float] = {}
        kind = type(schedule.durations)
        is_custom = (kind.factor, kind.of) != (Durations.factor, Durations.of)
        self.plain = not is_custom and schedule.bandwidth is None
        self.draws: deque[tuple[float, float]] = deque()
        self.gaps: deque[float] = deque()
        self.policy = BufferPolicy(schedule.buffer, min(schedule.concurrency, N))
        transfer = 0.0 if schedule.bandwidth is None else schedule.bandwidth.mean(*message)
        self.gap = (schedule.durations.mean + transfer) / schedule.concurrency
        self.next_arrival = math.inf if schedule.arrivals == "closed" else self._arrival()

    def tick(self, step: int) -> Tick:
        clients: list[int] = []
        versions: list[int] = []
        started: list[int] = []
        intervals: list[tuple[float, float]] = []
        running, goal, busy, dropped = self.running, self.policy.buffer, self.busy_versions, 0
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
                if self.idle.free:  # an arrival is skipped if every client is busy
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
        """The time at which a client becomes available, if the queue waits for one."""
        if closed and len(self.running) < self.policy.concurrency:
            if not self.running and self.idle.change == math.inf:
                raise _no_client(self.now)
            return self.idle.change
        if not closed and not self.running and not self.idle.free:
            if self.idle.change == math.inf:
                raise _no_client(self.now)
            self._skip(self.idle.change)
        return math.inf

    def _skip(self, until: float) -> None:
        """Skip arrivals until then, while no client is available."""
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
                f"before step {step + 1}, {self.lost:,} jobs in a row were lost because their clients disconnected;"
                " shorten local training, make clients available for longer, or use away='delayed'"
            )

    def _refill(self, step: int, started: list[int]) -> None:
        """Keep exactly `concurrency` jobs in flight, after all jobs that end now have uploaded."""
        if self.running and self.running[0][0] <= self.now:
            return
        for _ in range(self.policy.openings(len(self.running), len(self.idle.free))):
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
        if arrives:  # a lost job never ran
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


def _no_client(now: float) -> ConfigError:
    return ConfigError(
        f"no client is available after time {now:g}; give the availability a period= after which it repeats, or use fewer"
        " steps"
    )
