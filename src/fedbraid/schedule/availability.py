"""When clients can be reached: spans of time by client, from a table, a file, or the phones that come with the package."""

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

    An end of None is for good; a client that is not named is never there. `deal=True` gives client i the i-th row
    instead, and begins with the first again when there are more clients than rows. A job whose client goes away is
    "lost" at that moment, or with `away="delayed"` rests until the client is back. After a `period` all begins again:
    spans are taken modulo it. "phones" are 1,500 real ones, dealt, in seconds with a period of a day.
    """

    source: str | tuple[tuple[int, tuple[tuple[float, float | None], ...]], ...]
    away: str = "lost"
    period: float | None = None
    deal: bool = False
    digest: str = ""  # of a file's bytes: a run that goes on is told when they are others
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
        kept: Any = source
        if isinstance(source, str | os.PathLike):
            kept = os.fspath(source)
            if kept in SAMPLES:
                name, usual = SAMPLES[kept]
                data, deal = resources.files("fedbraid.schedule").joinpath("files", name).read_bytes(), True
                period = usual if period is None else period
            else:
                kept = os.path.abspath(kept)
                data = _bytes(kept)
            found = hashlib.sha256(data).hexdigest()[:16]
            if digest and digest != found:
                raise ConfigError(
                    f"{kept} is not what it was when the run began; restore it, or start a new run"
                )
            table, digest = _table(_json(data, kept), kept), found
        else:
            table = _table(source, "availability")
            kept = tuple(
                (client, tuple((s, None if e == math.inf else e) for s, e in row))
                for client, row in table.items()
            )
        values = {"source": kept, "away": away, "period": period, "deal": deal, "digest": digest}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._index(table)

    def _index(self, table: dict[int, Row]) -> None:
        """Rows as they are asked for: folded into the period, and all spans side by side."""
        rows = {c: _joined(_folded(row, self.period)) for c, row in sorted(table.items())}
        if self.deal:
            rows = dict(enumerate(rows.values()))
        spans = [(c, s, e) for c, row in rows.items() for s, e in row]
        object.__setattr__(self, "_rows", rows)
        object.__setattr__(self, "_owners", np.array([c for c, _, _ in spans], np.int64))
        object.__setattr__(self, "_spans", np.array([(s, e) for _, s, e in spans]).reshape(-1, 2))

    # Who, and until when ------------------------------------------------------------------------------

    def here(self, N: int, now: float) -> Ints:
        """Which of N clients can be reached now, in order."""
        at = now if self.period is None else now % self.period
        rows: Ints = self._owners[(self._spans[:, 0] <= at) & (at < self._spans[:, 1])]
        if not self.deal or len(self._rows) >= N:
            return rows[rows < N]
        on = np.zeros(len(self._rows), bool)
        on[rows] = True
        return np.flatnonzero(on[np.arange(N) % len(on)])

    def coming(self, N: int, now: float) -> float:
        """When the next client comes after now; never is infinity."""
        starts = self._spans[self._owners < N, 0]
        if not len(starts):
            return math.inf
        base = 0.0 if self.period is None else now // self.period * self.period
        later = starts[starts + base > now]
        if len(later):
            return float(later.min() + base)
        return math.inf if self.period is None else float(starts.min() + base + self.period)

    def ends(self, client: int, start: float, took: float) -> tuple[float, bool]:
        """(when a job that a reachable client starts is over, whether it is handed in)."""
        left, last = took, start
        for s, e in self._from(client, start):
            begin, last = max(s, start), e
            if begin + left <= e:
                return begin + left, True
            if self.away == "lost":
                break
            left -= e - begin
        return last, False

    def changes(self, N: int) -> Iterator[tuple[float, bool, int]]:
        """(when, whether it comes or goes, client) in order of time, from the first moment on."""
        mine = self._owners < N
        owners, spans = self._owners[mine].tolist(), self._spans[mine].tolist()
        edge = {c for c, row in self._rows.items() if row and (row[0][0], row[-1][1]) == (0, self.period)}
        once = sorted(
            (t, comes, c)
            for c, (s, e) in zip(owners, spans)
            for t, comes in ((s, True), (e, False))
            if t < math.inf and (comes or t != self.period or c not in edge)
        )
        again = [change for change in once if change[0] or change[2] not in edge]
        laps = count(1) if self.period is not None and again else ()
        for lap, found in chain([(0, once)], ((lap, again) for lap in laps)):
            for t, comes, row in found:
                for client in range(row, N if self.deal else row + 1, len(self._rows)):
                    yield t + lap * (self.period or 0.0), comes, client

    def spans(self, N: int, until: float) -> Iterator[tuple[int, float, float]]:
        """(client, from, to) of all times that a client can be reached before then."""
        for client in range(N):
            for s, e in takewhile(lambda span: span[0] < until, self._from(client, 0.0)):
                yield client, s, min(e, until)

    def caution(self, N: int) -> str | None:
        """Who is never there, in a sentence."""
        if self.deal or not (missing := N - sum(c < N and bool(row) for c, row in self._rows.items())):
            return None
        return f"{missing} of {N} clients are never there by this availability; deal=True gives out its rows in order"

    def _from(self, client: int, now: float) -> Iterator[tuple[float, float]]:
        """A client's spans that end after now, joined where the period begins again."""
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
        held = next(laps)
        for s, e in laps:
            if s - held[1] < 1e-9 * self.period:
                held = held[0], e
                continue
            if held[1] > now:
                yield held
            held = s, e


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
        raise ConfigError(f"{name} is no JSON ({error}); write {{client: [[start, end], …]}}") from error


def _table(source: Any, name: str) -> dict[int, Row]:
    """Rows by client, every number checked."""
    try:
        pairs = dict(source).items()
        table = {_client(c): [_span(span, c) for span in row] for c, row in pairs}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} is no table ({error}); write {{client: [[start, end], …]}}") from error
    if not any(table.values()):
        raise ConfigError(f"{name} makes no client available; write {{client: [[start, end], …]}}")
    for client, row in table.items():
        row.sort()
        for (_, end), (start, _) in pairwise(row):
            if start < end:
                raise ConfigError(f"{name} has client {client} twice there at time {start:g}; join its spans")
    return table


def _client(key: Any) -> int:
    client = int(key)
    if isinstance(key, float | bool) or not 0 <= client < MOST:
        raise ValueError(f"{key!r} is no client's number")
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
        raise ValueError(f"client {client} is there from {start!r} to {end!r}")
    return float(start), float(end)


def _folded(row: Row, period: float | None) -> Row:
    """Spans modulo the period."""
    if period is None:
        return row
    found: Row = []
    for start, end in row:
        if end - start >= period:
            return [(0.0, float(period))]
        start, end = start % period, start % period + (end - start)
        found += [(start, min(end, period))] + ([(0.0, end - period)] if end > period else [])
    return found


def _joined(row: Row) -> Row:
    """Spans that touch or overlap as one."""
    found: Row = []
    for start, end in sorted(row):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


# Idle clients -------------------------------------------------------------------------------------------


class Idle:
    """Clients without a job, of whom one is taken at random."""

    change = math.inf  # when somebody comes or goes next

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
        """Let time go on."""


class Reachable(Idle):
    """Those of them that can be reached."""

    def __init__(self, N: int, when: availability) -> None:
        self.free: list[int] = []
        self.place: dict[int, int] = {}  # client -> where in `free`
        self.there: set[int] = set()
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
        if client in self.there:
            self._add(client)

    def move(self, now: float) -> None:
        while self.next is not None and self.next[0] <= now:
            _, comes, client = self.next
            if comes:
                self.there.add(client)
                if client not in self.busy:
                    self._add(client)
            else:
                self.there.discard(client)
                if client in self.place:
                    self._remove(client)
            self.next = next(self.changes, None)

    def _add(self, client: int) -> None:
        self.place[client] = len(self.free)
        self.free.append(client)

    def _remove(self, client: int) -> None:
        at, last = self.place.pop(client), self.free.pop()
        if last != client:
            self.free[at] = last
            self.place[last] = at
