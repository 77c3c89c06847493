"""When clients can be reached: intervals of time by client, from a table, a file, or the bundled trace of phones."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import chain, count, pairwise, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbraid.core.check import number, one_of
from fedbraid.errors import ConfigError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Row = list[tuple[float, float]]

DAY = 86400.0
SAMPLES = {"phones": ("phones.json.gz", DAY)}  # name -> file, and the period that suits it
MOST = 10**7  # clients that a table may name


@dataclass(frozen=True, init=False)
class availability:
    """When each client can be reached: `{client: [[start, end], …]}`, a JSON file of it (or .json.gz), or "phones".

    An end of None means forever; a client that is not listed is never available. `deal=True` assigns client i the
    i-th row instead, and starts again with the first if there are more clients than rows. A job whose client
    disconnects is "lost" at that moment, or with `away="delayed"` pauses until the client is back. With a `period` all
    intervals repeat: they are folded modulo it. "phones" is the trace of 1,500 real phones, dealt, in seconds with a
    period of a day.
    """

    source: str | tuple[tuple[int, tuple[tuple[float, float | None], ...]], ...]
    away: str = "lost"
    period: float | None = None
    deal: bool = False
    digest: str = ""  # of a file's bytes: resuming a run is refused if they changed
    _rows: dict[int, Row] = field(init=False, repr=False, compare=False)
    _owners: Ints = field(init=False, repr=False, compare=False)
    _spans: Floats = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        source: str | os.PathLike[str] | Mapping[Any, Any] | Sequence[Any],
        away: str = "lost",
        period: float | None = None,
        deal: bool = False,
        digest: str = "",
    ) -> None:
        one_of("away", away, ("lost", "delayed"))
        if period is not None:
            number("period", period, "(0, inf)")
        stored: Any = source
        if isinstance(source, str | os.PathLike):
            stored = os.fspath(source)
            if stored in SAMPLES:
                name, usual = SAMPLES[stored]
                data, deal = resources.files("fedbraid.schedule").joinpath("files", name).read_bytes(), True
                period = usual if period is None else period
            else:
                stored = os.path.abspath(stored)
                data = _bytes(stored)
            actual = hashlib.sha256(data).hexdigest()[:16]
            if digest and digest != actual:
                raise ConfigError(
                    f"{stored} is not what it was when the run began; restore it, or start a new run"
                )
            table, digest = _table(_json(data, stored), stored), actual
        else:
            table = _table(source, "availability")
            stored = tuple(
                (client, tuple((s, None if e == math.inf else e) for s, e in row))
                for client, row in table.items()
            )
        values = {"source": stored, "away": away, "period": period, "deal": deal, "digest": digest}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._index(table)

    def _index(self, table: dict[int, Row]) -> None:
        """Index the rows: folded into the period, and all spans in one array."""
        rows = {c: _joined(_folded(row, self.period)) for c, row in sorted(table.items())}
        if self.deal:
            rows = dict(enumerate(rows.values()))
        spans = [(c, s, e) for c, row in rows.items() for s, e in row]
        object.__setattr__(self, "_rows", rows)
        object.__setattr__(self, "_owners", np.array([c for c, _, _ in spans], np.int64))
        object.__setattr__(self, "_spans", np.array([(s, e) for _, s, e in spans]).reshape(-1, 2))

    # Queries ------------------------------------------------------------------------------------------

    def available(self, N: int, now: float) -> Ints:
        """Which of N clients can be reached now, in order."""
        at = now if self.period is None else now % self.period
        rows: Ints = self._owners[(self._spans[:, 0] <= at) & (at < self._spans[:, 1])]
        if not self.deal or len(self._rows) >= N:
            return rows[rows < N]
        on = np.zeros(len(self._rows), bool)
        on[rows] = True
        return np.flatnonzero(on[np.arange(N) % len(on)])

    def next_start(self, N: int, now: float) -> float:
        """The time after now at which the next client connects; infinity if none does."""
        starts = self._spans[self._owners < N, 0]
        if not len(starts):
            return math.inf
        base = 0.0 if self.period is None else now // self.period * self.period
        later = starts[starts + base > now]
        if len(later):
            return float(later.min() + base)
        return math.inf if self.period is None else float(starts.min() + base + self.period)

    def ends(self, client: int, start: float, duration: float) -> tuple[float, bool]:
        """(when a job that an available client starts ends, whether its upload arrives)."""
        left, last = duration, start
        for s, e in self._from(client, start):
            begin, last = max(s, start), e
            if begin + left <= e:
                return begin + left, True
            if self.away == "lost":
                break
            left -= e - begin
        return last, False

    def changes(self, N: int) -> Iterator[tuple[float, bool, int]]:
        """(time, whether the client connects rather than disconnects, client) in order of time, from 0 on."""
        listed = self._owners < N
        owners, spans = self._owners[listed].tolist(), self._spans[listed].tolist()
        edge = {c for c, row in self._rows.items() if row and (row[0][0], row[-1][1]) == (0, self.period)}
        once = sorted(
            (t, is_start, c)
            for c, (s, e) in zip(owners, spans)
            for t, is_start in ((s, True), (e, False))
            if t < math.inf and (is_start or t != self.period or c not in edge)
        )
        again = [change for change in once if change[0] or change[2] not in edge]
        laps = count(1) if self.period is not None and again else ()
        for lap, edges in chain([(0, once)], ((lap, again) for lap in laps)):
            for t, is_start, row in edges:
                for client in range(row, N if self.deal else row + 1, len(self._rows)):
                    yield t + lap * (self.period or 0.0), is_start, client

    def spans(self, N: int, until: float) -> Iterator[tuple[int, float, float]]:
        """(client, start, end) of every interval in which a client is available before `until`."""
        for client in range(N):
            for s, e in takewhile(lambda span: span[0] < until, self._from(client, 0.0)):
                yield client, s, min(e, until)

    def caution(self, N: int) -> str | None:
        """A sentence on clients that are never available, or None."""
        if self.deal or not (missing := N - sum(c < N and bool(row) for c, row in self._rows.items())):
            return None
        return f"{missing} of {N} clients are never available; deal=True assigns the rows to clients in order"

    def _from(self, client: int, now: float) -> Iterator[tuple[float, float]]:
        """A client's spans that end after now, joined across the ends of periods."""
        row = self._rows.get(client % len(self._rows) if self.deal else client, [])
        if self.period is None or not row:
            yield from ((s, e) for s, e in row if e > now)
            return
        if row == [(0.0, self.period)]:
            yield 0.0, math.inf
            return
        first = int(now // self.period)
        laps = (
            (s + lap * self.period, e + lap * self.period) for lap in count(max(first - 1, 0)) for s, e in row
        )
        span = next(laps)
        for s, e in laps:
            if s - span[1] < 1e-9 * self.period:
                span = span[0], e
                continue
            if span[1] > now:
                yield span
            span = s, e


# Reading ----------------------------------------------------------------------------------------------


def _bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"the availability {path!r} cannot be read: {why}; give a file of it, or one of {', '.join(SAMPLES)}"
        ) from error


def _json(data: bytes, name: str) -> Any:
    try:
        return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, OSError, EOFError, zlib.error, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON ({error}); write {{client: [[start, end], …]}}") from error


def _table(source: Any, name: str) -> dict[int, Row]:
    """Rows by client, every number checked."""
    try:
        pairs = dict(source).items()
        table = {_client(c): [_span(span, c) for span in row] for c, row in pairs}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} is not a table ({error}); write {{client: [[start, end], …]}}") from error
    if not any(table.values()):
        raise ConfigError(f"{name} makes no client available; write {{client: [[start, end], …]}}")
    for client, row in table.items():
        row.sort()
        for (_, end), (start, _) in pairwise(row):
            if start < end:
                raise ConfigError(
                    f"{name} has overlapping spans of client {client} at time {start:g}; join them"
                )
    return table


def _client(key: Any) -> int:
    client = int(key)
    if isinstance(key, float | bool) or not 0 <= client < MOST:
        raise ValueError(f"{key!r} is not a client's number")
    return client


def _span(span: Any, client: Any) -> tuple[float, float]:
    start, end = span
    end = math.inf if end is None else end
    if (
        isinstance(start, bool | str)
        or isinstance(end, bool | str)
        or not 0 <= start < end
        or start == math.inf
    ):
        raise ValueError(f"client {client} is available from {start!r} to {end!r}")
    return float(start), float(end)


def _folded(row: Row, period: float | None) -> Row:
    """Spans modulo the period."""
    if period is None:
        return row
    spans: Row = []
    for start, end in row:
        if end - start >= period:
            return [(0.0, float(period))]
        start, end = start % period, start % period + (end - start)
        spans += [(start, min(end, period))] + ([(0.0, end - period)] if end > period else [])
    return spans


def _joined(row: Row) -> Row:
    """Spans that touch or overlap as one."""
    spans: Row = []
    for start, end in sorted(row):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((start, end))
    return spans


# Idle clients -------------------------------------------------------------------------------------------


class Idle:
    """Clients without a job, one of which is drawn at random."""

    change = math.inf  # when a client connects or disconnects next

    def __init__(self, N: int) -> None:
        self.free = list(range(N))

    def take(self, pick: float) -> int:
        """The client that a uniform draw picks."""
        at, free = int(pick * len(self.free)), self.free
        client = free[at]
        free[at] = free[-1]
        free.pop()
        return client

    def give(self, client: int) -> None:
        self.free.append(client)

    def move(self, now: float) -> None:
        """Advance the time."""


class Reachable(Idle):
    """Clients without a job that are available."""

    def __init__(self, N: int, when: availability) -> None:
        self.free: list[int] = []
        self.index: dict[int, int] = {}  # client -> its index in `free`
        self.online: set[int] = set()
        self.busy: set[int] = set()
        self.changes = when.changes(N)
        self.next = next(self.changes, None)
        self.move(0.0)

    @property
    def change(self) -> float:  # type: ignore[override]
        return math.inf if self.next is None else self.next[0]

    def take(self, pick: float) -> int:
        client = self.free[int(pick * len(self.free))]
        self._remove(client)
        self.busy.add(client)
        return client

    def give(self, client: int) -> None:
        self.busy.discard(client)
        if client in self.online:
            self._add(client)

    def move(self, now: float) -> None:
        while self.next is not None and self.next[0] <= now:
            _, is_start, client = self.next
            if is_start:
                self.online.add(client)
                if client not in self.busy:
                    self._add(client)
            else:
                self.online.discard(client)
                if client in self.index:
                    self._remove(client)
            self.next = next(self.changes, None)

    def _add(self, client: int) -> None:
        self.index[client] = len(self.free)
        self.free.append(client)

    def _remove(self, client: int) -> None:
        at, last = self.index.pop(client), self.free.pop()
        if last != client:
            self.free[at] = last
            self.index[last] = at
