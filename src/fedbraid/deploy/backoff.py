"""Waiting longer after every failure, never in step with others."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field


@dataclass
class Backoff:
    """`first` seconds after the first failure, twice as long after each further one, up to `most`; less up to half."""

    first: float = 1.0
    most: float = 60.0
    failures: int = 0
    draw: random.Random = field(default_factory=random.Random)

    def failed(self) -> float:
        """Count a failure: how long to wait before the next attempt."""
        longest = min(self.most, self.first * 2.0 ** min(self.failures, 60))
        self.failures += 1
        return float(longest) * self.draw.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        self.failures = 0


@dataclass
class Resting:
    """Whoever failed is left alone for a while, longer each time."""

    first: float = 1.0
    most: float = 60.0
    now: Callable[[], float] = time.monotonic
    of: dict[Hashable, Backoff] = field(default_factory=dict)
    until: dict[Hashable, float] = field(default_factory=dict)

    def failed(self, who: Hashable) -> None:
        self.until[who] = self.now() + self.of.setdefault(who, Backoff(self.first, self.most)).failed()

    def succeeded(self, who: Hashable) -> None:
        self.of.pop(who, None)
        self.until.pop(who, None)

    def __contains__(self, who: Hashable) -> bool:
        return self.until.get(who, 0.0) > self.now()
