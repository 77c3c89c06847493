"""What a fleet tells its operator: what went wrong, in bounded space, and what it is waiting for."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("fedbraid")

MOST = 100  # different troubles that are kept between two steps
LINES = 10  # lines of the log about one node's troubles of one kind, before only powers of two are told


@dataclass
class Troubles:
    """Refused, failed or silent: by node and reason, with how often."""

    kept: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    more: int = 0  # those beyond MOST
    told: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, node: str, client: int, why: str) -> None:
        key = plain(node[:200])[:200], plain(why[:500])[:500]
        self._tell(key)
        if key in self.kept:
            self.kept[key]["times"] += 1
        elif len(self.kept) < MOST:
            self.kept[key] = {"node": key[0], "client": client, "why": key[1], "times": 1}
        else:
            self.more += 1

    def take(self) -> dict[str, Any]:
        """What a step's record holds of it; then it starts anew."""
        found: dict[str, Any] = {"trouble": self.shown()} if self.kept else {}
        if self.more:
            found["more_trouble"] = self.more
        self.kept, self.more = {}, 0
        return found

    def shown(self) -> list[dict[str, Any]]:
        return list(self.kept.values())

    def _tell(self, key: tuple[str, str]) -> None:
        if len(self.told) > 10 * MOST:
            self.told.clear()
        times = self.told[key] = self.told.get(key, 0) + 1
        if times <= LINES or times & (times - 1) == 0:
            again = f" ({times} times)" if times > 1 else ""
            log.warning("%s: %s%s", key[0], key[1], again)


@dataclass
class Wait:
    """What a run waits for: its name, its deadline, and a line in the log, again and again but ever more rarely."""

    name: str = ""
    since: float = field(default_factory=time.time)
    until: float | None = None  # None: for as long as it takes
    told: float = 0.0
    pause: float = 30.0

    def now(self, name: str, seconds: float | None, detail: str = "") -> None:
        """Say what is waited for, and for how many seconds more."""
        at = time.time()
        self.until = None if seconds is None else at + seconds
        if name != self.name:
            self.name, self.since, self.told, self.pause = name, at, at, 30.0
        elif at - self.told < self.pause:
            return
        else:
            self.told, self.pause = at, min(2 * self.pause, 600.0)
        left = "as long as it takes" if seconds is None else f"{max(seconds, 0):.0f} s more"
        log.info("waiting for %s, %s%s", name, left, f": {detail}" if detail else "")

    def note(self) -> dict[str, Any]:
        return {"for": self.name, "since": self.since, "until": self.until}


def plain(text: str) -> str:
    r"""One line that can be shown on any terminal, whoever wrote it.

    >>> plain("ü\n\x1b[2J")
    'ü\\n\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(what: str) -> None:
    """A line for whoever reads a service's log."""
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} fedbraid: {what}", file=sys.stderr, flush=True)
