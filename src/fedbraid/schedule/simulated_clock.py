"""The simulated clock: events of clients that do not exist, given to the policies that real fleets run by.

A client has at most one job in flight; whatever ends at one instant is handed in before anything new starts. Rounds jump
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

ATTEMPTS = 1000  # at one round, in which nobody is in time
Message = tuple[float, float]  # bytes down and up
NOBODY = np.array([], np.int64)


def rounds(
    schedule: Rounds, N: int, seed: int, message: Message = (0.0, 0.0), seen: ClientHistory | None = None
) -> Iterator[Tick]:
    """Synchronous rounds."""
    now = 0.0
    seen = seen or ClientHistory(np.ones(N, np.int64), seed)
    for step in range(schedule.steps):
        clients, took, dropped, intervals = _round(schedule, N, seed, step, message, now, seen)
        versions = np.full(len(clients), step, np.int64)
        intervals = None if intervals is None else intervals + now
        now += took
        yield Tick(
            step, now, clients, versions, clients, frozenset(), dropped, True, intervals, seen.asked.get(step)
        )


def _round(
    schedule: Rounds, N: int, seed: int, step: int, message: Message, now: float, seen: ClientHistory
) -> tuple[Ints, float, int, Floats | None]:
    """Who hands in, how long the round takes, how many come too late, and each one's interval."""
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
    choose = None if schedule.select is None else partial(seen.choose, schedule.select)
    policy = RoundPolicy(schedule.cohort(N), seed, schedule.over_select, limit, choose=choose)
    waited = 0.0
    for attempt in range(ATTEMPTS):
        here, pause = _here(schedule, N, now + waited)
        waited += pause
        selection = policy.next(View(step, N if here is None else here, attempts=attempt))
        assert isinstance(selection, Select)
        asked = selection.clients
        if _steady(schedule) and schedule.over_select == 1 and schedule.durations.mean <= limit:
            return asked, schedule.durations.mean, 0, None  # all at once, and in time
        took, arrives = _took(schedule, asked, seed, step, attempt, message, now + waited)
        kept, end = _play(policy, selection, View(step, NOBODY, attempts=attempt + 1), took, arrives)
        if len(kept):
            intervals = waited + np.stack([np.zeros(len(kept)), took[kept]], 1)
            return asked[kept], waited + end, len(asked) - len(kept), intervals
        waited += end
    raise ConfigError(
        f"no client finished round {step + 1} in {ATTEMPTS} tries (timeout={schedule.timeout}); raise the timeout, shorten"
        " the work, or let clients be there for longer"
    )


def _play(
    policy: RoundPolicy, selection: Select, view: View, took: Floats, arrives: NDArray[np.bool_]
) -> tuple[Ints, float]:
    """(which of those asked count, when the round or its attempt ends)."""
    order = np.argsort(np.where(arrives, took, np.inf), kind="stable")[: selection.wanted]
    order = order[arrives[order]]
    kept, at = order[:0], 0.0
    while True:
        decision = policy.next(
            View(
                view.step, NOBODY, at, len(kept), int((took > at).sum()), view.attempts, selection.wanted
            )
        )  # fmt: skip
        if not isinstance(decision, Wait) or (at > 0 and not len(kept)):
            assert isinstance(decision, Close | Wait)
            return np.sort(kept), at
        enough = float(took[order[decision.uploads - 1]]) if len(order) >= decision.uploads else math.inf
        at = min(enough, float(took.max()), decision.until)
        kept = order[took[order] <= at]


def _steady(schedule: Rounds) -> bool:
    """Whether every job takes the same time."""
    return (
        isinstance(schedule.durations, constant)
        and schedule.bandwidth is None
        and schedule.availability is None
    )


def _here(schedule: Rounds, N: int, now: float) -> tuple[Ints | None, float]:
    """(who can be asked, None for all; how long the server waits for somebody)."""
    if schedule.availability is None:
        return None, 0.0
    at = now
    while not len(here := schedule.availability.here(N, at)):
        at = schedule.availability.coming(N, at)
        if at == math.inf:
            raise _nobody(now)
    return here, at - now


def _drawn(
    schedule: Rounds, N: int, seed: int, step: int, message: Message, now: float
) -> tuple[Ints, float, int, Floats | None]:
    """A Poisson round: an empty one takes as long as one of average clients."""
    draw = rng.uniform(seed, "poisson", step, np.arange(N))
    drawn = np.flatnonzero(draw < schedule.rate(N)).astype(np.int64)
    when, steady = schedule.availability, _steady(schedule)
    here = drawn if when is None else np.intersect1d(drawn, when.here(N, now))
    if steady or not len(here):
        return here, schedule.durations.mean, len(drawn) - len(here), None if steady else np.zeros((0, 2))
    took, arrives = _took(schedule, here, seed, step, 0, message, now)
    intervals = np.stack([np.zeros(len(here)), took], 1)[arrives]
    return here[arrives], float(took.max()), len(drawn) - len(intervals), intervals


def _took(
    schedule: Rounds, asked: Ints, seed: int, step: int, attempt: int, message: Message, now: float
) -> tuple[Floats, NDArray[np.bool_]]:
    """(how long each of them takes, or until it is lost; whether it hands in)."""
    drawn = schedule.durations.draw(rng.uniform(seed, "duration", step, attempt, np.arange(len(asked))))
    took = np.array([schedule.durations.of(int(c), v) for c, v in zip(asked, drawn.tolist())])
    if schedule.bandwidth is not None:
        took = took + [schedule.bandwidth.seconds(int(c), *message) for c in asked]
    if schedule.availability is None:
        return took, np.ones(len(asked), bool)
    ends = [schedule.availability.ends(int(c), now, float(v)) for c, v in zip(asked, took)]
    return np.array([end for end, _ in ends]) - now, np.array([arrives for _, arrives in ends])


class EventQueue:
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
        own = (kind.factor, kind.of) != (Durations.factor, Durations.of)
        self.plain = not own and schedule.bandwidth is None
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
        if closed and len(self.running) < self.policy.concurrency:
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
