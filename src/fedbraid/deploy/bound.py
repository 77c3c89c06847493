"""How large an upload may be: learned from those that were taken, wide enough for honest clients.

A vector is refused when its norm is more than `factor` times the median of those taken, per visit and per
local step. Until there are some, it may be a million times the model's own norm.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedbraid.errors import WireError

ENOUGH = 5  # uploads that a median is taken of
WINDOW = 101  # the newest that count
FIRST = 1e6  # times the model's norm, before there is a median
ODD = 100.0  # an entry beyond this, or no median yet: the upload is tried out before it is taken

Norms = dict[str, tuple[float, float]]  # by vector: of the whole, and for each local step


@dataclass
class Bound:
    """The norms of uploads that were taken, by vector."""

    factor: float
    taken: dict[str, deque[tuple[float, float]]] = field(default_factory=dict)

    def check(self, vectors: dict[str, Tensor], steps: float, x: Tensor) -> Norms:
        """The norms of an upload; one that is beyond the bound is refused."""
        norms = {name: _norms(v, steps) for name, v in vectors.items()}
        for name, (norm, each) in norms.items():
            if not math.isfinite(norm):
                raise WireError(f"its {name} has norm {norm}")
            if self.factor <= 0:
                continue
            seen = self.taken.get(name, ())
            if len(seen) < ENOUGH:
                most, of = FIRST * (1 + float(x.norm())), "a million times the model's norm"
                far = norm > most
            else:
                most, per = (self.factor * statistics.median(column) for column in zip(*seen, strict=True))
                far = norm > most > 0 and each > per
                of = f"norm-factor={self.factor:g} times the median of those taken"
            if far:
                raise WireError(f"its {name} has norm {norm:.6g}, beyond {most:.6g}, {of}")
        return norms

    def is_odd(self, vectors: dict[str, Tensor]) -> bool:
        """Whether an upload is worth a rehearsal of the step that it would be part of."""
        known = all(len(self.taken.get(name, ())) >= ENOUGH for name in vectors)
        return not known or any(float(v.abs().max()) > ODD for v in vectors.values() if v.numel())

    def took(self, norms: Norms) -> None:
        for name, pair in norms.items():
            self.taken.setdefault(name, deque(maxlen=WINDOW)).append(pair)

    def note(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {name: [list(pair) for pair in seen] for name, seen in self.taken.items()}

    @classmethod
    def restore(cls, factor: float, note: dict[str, Any]) -> Bound:
        kept = {k: deque(((float(a), float(b)) for a, b in v), maxlen=WINDOW) for k, v in note.items()}
        return cls(factor, kept)


def _norms(v: Tensor, steps: float) -> tuple[float, float]:
    norm = float(v.double().norm())
    return norm, norm / max(steps, 1.0)
