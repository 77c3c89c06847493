"""When a server step selects clients, and when it closes: pure functions, run by a simulated clock or by a real one.

A driver (`simulated_clock.py`, `deploy/fleet.py`) describes the open step in a `View`, and does what `next` says: select
clients, close the step with the uploads received, wait, or give up. No policy reads a clock, a client or
a model, so that over-selection, time limits, the minimum and client selection mean the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbraid.core import rng

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tick:
    """One server step: the clients that upload, the version each trained from, and the clients started meanwhile."""

    step: int
    time: float  # when the step happens
    clients: Ints  # that upload, in order of arrival
    versions: Ints  # the version each trained from
    started: Ints  # clients that started from version `step` before this step closed
    pending_versions: frozenset[int]  # versions that jobs still in flight train from
    dropped: int = 0  # clients that were selected and not in time
    is_synchronous: bool = False  # all started from this version, each once
    intervals: Floats | None = None  # [uploads, 2]: when each began and ended, if there is a clock
    selected: list[list[int]] | None = None  # with select=: the clients selected in each attempt

    def without(self, gone: Collection[int]) -> Tick:
        """The tick without clients that have left."""
        if not gone:
            return self
        stays = ~np.isin(self.clients, list(gone))
        started = self.started[~np.isin(self.started, list(gone))]
        intervals = None if self.intervals is None else self.intervals[stays]
        return replace(
            self,
            clients=self.clients[stays],
            versions=self.versions[stays],
            started=started,
            intervals=intervals,
        )

    def clocked(self) -> dict[str, list[Any]]:
        """The record's entries on timing: for each upload the version it trained from, its start and its end."""
        if self.intervals is None:
            return {}
        began, ended = ([float(f"{v:.7g}") for v in ends] for ends in self.intervals.T.tolist())
        return {"versions": self.versions.tolist(), "start_times": began, "end_times": ended}


@dataclass(frozen=True)
class View:
    """The state of the open step, as its driver describes it."""

    step: int
    available: Ints | int  # clients that can be selected, ascending; a number stands for all from 0 on
    elapsed: float = 0.0  # seconds since the first selection, or since the last time limit
    uploads: int = 0  # received ones that count for this step
    pending: int = 0  # requests that can still yield an upload
    attempts: int = 0  # selections so far
    required: int = 0  # uploads that close the step, as the last selection set

    @property
    def count(self) -> int:
        """The number of clients that can be selected."""
        return self.available if isinstance(self.available, int) else len(self.available)

    @property
    def ids(self) -> Ints:
        return np.arange(self.available) if isinstance(self.available, int) else self.available


@dataclass(frozen=True)
class Select:
    """Select these clients; `required` uploads close the step."""

    clients: Ints
    required: int


@dataclass(frozen=True)
class Close:
    """Close the step with the first `required` of the uploads received."""


@dataclass(frozen=True)
class Wait:
    """Call `next` again after so many uploads, when no request is pending, or at this time of the step."""

    uploads: int
    until: float


@dataclass(frozen=True)
class Fail:
    """The time is over, and the run ends instead of waiting longer."""


Decision = Select | Close | Wait | Fail
Choice = Callable[[int, int, Ints, int], Ints]  # step, attempt, available, how many -> clients


@dataclass(frozen=True)
class RoundPolicy:
    """Select a cohort and wait for it.

    A round closes after `required` uploads. It also closes with `minimum` of them when the time is over or no
    request is pending. Otherwise other clients are selected, in a further attempt.
    """

    cohort: int | tuple[int, ...]  # how many uploads a round requires, or the clients that upload
    seed: int
    over_select: float = 1.0
    limit: float = math.inf
    minimum: int = 1
    retries: bool = True  # False: the run ends if the time is over with fewer than `minimum`
    choose: Choice | None = None

    def next(self, view: View) -> Decision:
        began, over = view.attempts > 0, view.elapsed >= self.limit
        is_exhausted = began and not view.pending
        if 0 < view.required <= view.uploads:
            return Close()
        if began and (over or is_exhausted) and view.uploads >= self.minimum:
            return Close()
        if over and not self.retries:
            return Fail()
        selection = self._select(view, over) if not began or over or is_exhausted else None
        return selection or Wait(view.required, self.limit)

    def _select(self, view: View, over: bool) -> Select | None:
        if isinstance(self.cohort, tuple):
            listed = np.array([c for c in self.cohort if c in set(view.ids.tolist())], np.int64)
            is_complete = len(listed) + view.uploads == len(self.cohort)
            return Select(listed, len(self.cohort)) if len(listed) and (is_complete or over) else None
        if not view.count or view.count + view.uploads < min(self.cohort, self.minimum):
            return None
        count = min(view.count, math.ceil((self.cohort - view.uploads) * self.over_select))
        if self.choose is not None:
            clients = self.choose(view.step, view.attempts, view.ids, count)
        else:
            draw = rng.generator(self.seed, "cohort", view.step, view.attempts)
            clients = draw.choice(view.count, count, replace=False)
            clients = clients if isinstance(view.available, int) else view.available[clients]
        required = view.uploads + len(clients)
        return Select(clients, required if self.over_select == 1 else min(self.cohort, required))


@dataclass(frozen=True)
class BufferPolicy:
    """Keep `concurrency` clients in training; every `buffer` uploads close a step."""

    buffer: int
    concurrency: int
    seed: int = 0
    limit: float = math.inf
    retries: bool = True  # False: the run ends if no upload arrives for so long

    def openings(self, in_flight: int, idle: int) -> int:
        """The number of clients to start now."""
        return max(0, min(self.concurrency - in_flight, idle))

    def next(self, view: View) -> Decision:
        if view.uploads >= self.buffer:
            return Close()
        if view.elapsed >= self.limit and not self.retries:
            return Fail()
        if count := self.openings(view.pending, view.count):
            draw = rng.generator(self.seed, "arrival", view.step, view.attempts)
            return Select(view.ids[draw.choice(view.count, count, replace=False)], self.buffer)
        return Wait(self.buffer, self.limit)
