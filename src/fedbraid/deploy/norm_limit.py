"""How large an upload and a claimed loss may be: learned from those that were accepted, wide enough for honest clients.

A vector is refused when its norm is more than `factor` times the median of those accepted, for the upload and for each
local step. Until there are some, it may be a million times the model's own norm. A claimed loss beyond the same factor
is not believed: the upload counts, and no record, selection or tracker sees the number.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedbraid.errors import WireError

ENOUGH = 5  # accepted uploads that a median is taken of
WINDOW = 101  # the newest that count
FIRST = 1e6  # times the model's norm, before there is a median
ABNORMAL = (
    100.0  # an entry beyond this, or no median yet: a step is tried with the upload before it is accepted
)

Norms = dict[str, tuple[float, float]]  # by vector: of the upload, and for each local step


@dataclass
class NormLimit:
    """The norms of uploads that were accepted, by vector."""

    factor: float
    seen: dict[str, deque[tuple[float, float]]] = field(default_factory=dict)

    def check(self, vectors: dict[str, Tensor], steps: float, x: Tensor) -> Norms:
        """The norms of an upload; one that is beyond the limit is refused."""
        norms = {name: _norms(v, steps) for name, v in vectors.items()}
        for name, (norm, each) in norms.items():
            if not math.isfinite(norm):
                raise WireError(f"its {name} has norm {norm}")
            if self.factor <= 0:
                continue
            seen = self.seen.get(name, ())
            if len(seen) < ENOUGH:
                most, of = FIRST * (1 + float(x.norm())), "a million times the model's norm"
                far = norm > most
            else:
                most, per = (self.factor * statistics.median(column) for column in zip(*seen, strict=True))
                far = norm > most > 0 and each > per
                of = f"norm_factor={self.factor:g} times the median of those accepted"
            if far:
                raise WireError(f"its {name} has norm {norm:.6g}, beyond {most:.6g}, {of}")
        return norms

    def looks_abnormal(self, vectors: dict[str, Tensor]) -> bool:
        """Whether a dry run of the step with this upload is worth its time."""
        known = all(len(self.seen.get(name, ())) >= ENOUGH for name in vectors)
        return not known or any(float(v.abs().max()) > ABNORMAL for v in vectors.values() if v.numel())

    def accepted(self, norms: Norms) -> None:
        for name, pair in norms.items():
            self.seen.setdefault(name, deque(maxlen=WINDOW)).append(pair)

    def note(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {name: [list(pair) for pair in seen] for name, seen in self.seen.items()}

    @classmethod
    def restore(cls, factor: float, note: dict[str, Any]) -> NormLimit:
        kept = {k: deque(((float(a), float(b)) for a, b in v), maxlen=WINDOW) for k, v in note.items()}
        return cls(factor, kept)


@dataclass
class LossLimit:
    """Losses that were believed: the first ones, which are the largest of most runs, and the newest."""

    factor: float
    is_signed: bool = False  # a loss of the user's own may be negative
    first: list[float] = field(default_factory=list)
    newest: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def doubt(self, loss: float) -> str | None:
        """Why a claim is not believed."""
        if not math.isfinite(loss):
            return f"its training loss is {loss}"
        if loss < 0 and not self.is_signed:
            return f"its training loss is {loss:.6g}, which this task's loss cannot be"
        if self.factor <= 0:
            return None
        if len(self.newest) < ENOUGH:
            most, of = FIRST, "a million, before there is a median"
        else:
            most = self.factor * max(statistics.median(self.newest), statistics.median(self.first), 1e-3)
            of = f"norm_factor={self.factor:g} times the median of those believed"
        if abs(loss) > most:
            return f"its training loss is {loss:.6g}, beyond {most:.6g}, {of}"
        return None

    def believed(self, losses: Iterable[float]) -> None:
        for loss in losses:
            if len(self.first) < ENOUGH:
                self.first.append(abs(loss))
            self.newest.append(abs(loss))

    def note(self) -> list[list[float]]:
        return [self.first, list(self.newest)]

    @classmethod
    def restore(cls, factor: float, is_signed: bool, note: list[list[float]]) -> LossLimit:
        first, newest = note or ([], [])
        return cls(factor, is_signed, [float(v) for v in first], deque(map(float, newest), maxlen=WINDOW))


def _norms(v: Tensor, steps: float) -> tuple[float, float]:
    norm = float(v.double().norm())
    return norm, norm / max(steps, 1.0)
