"""Waiting longer after every failure, never in step with others."""

from __future__ import annotations

import random
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
