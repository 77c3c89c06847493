"""One-dimensional k-means: deterministic, and close to the optimum rather than to a lucky start.

Clusters of numbers on a line are intervals, so a solution is k − 1 borders among the sorted numbers, and the
error of any interval comes from two prefix sums. The borders start where the density's cube root has equal
sums (Panter and Dite's rule, optimal for many clusters), then two moves alternate until neither helps:
Lloyd's, and a dynamic programme in which every border may go anywhere between its neighbours. The second can
carry a centroid from one end of the line to the other, which Lloyd's never does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedbraid.core.codec import F32

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_BINS = 1 << 16
_MANY = 1 << 17  # from so many numbers on, a histogram is tried before sorting
_CANDIDATES = 16  # candidates on either side of a border
_DYNAMIC = 1024  # up to so many clusters, the dynamic programme pays off
_REACH = 16
_CAPS = 20
_ROUNDS, _LLOYD, _GAIN = 50, 20, 1e-3


def centroids(w: F32, k: int) -> F32:
    """k values, in order, that stand for the numbers w with the least squared error.

    >>> centroids(np.array([1, 1, 2, 5], np.float32), 4)
    array([1., 2., 5., 5.], dtype=float32)
    """
    if len(w) >= _MANY and (table := _from_histogram(w, k)) is not None:
        return table
    x = np.sort(w)
    distinct = x[np.concatenate([[True], x[1:] != x[:-1]])]
    if len(distinct) <= k:
        return np.concatenate([distinct, np.full(k - len(distinct), distinct[-1], np.float32)])
    return _fit(_Line.of(x.astype(np.float64), np.ones(len(x))), k)[0]


def _from_histogram(w: F32, k: int) -> F32 | None:
    """The centroids of a fine histogram, or None where it is too coarse for these numbers."""
    low, high = float(w.min()), float(w.max())
    step = (high - low) / (_BINS - 1)
    if not step > np.finfo(np.float32).tiny:
        return None
    bins = w - np.float32(low)
    bins *= np.float32(1 / step)
    counts = np.bincount(bins.astype(np.uint16), minlength=_BINS)
    full = np.flatnonzero(counts)
    if len(full) < 16 * k:
        return None
    table, error = _fit(_Line.of(low + (full + 0.5) * np.float64(step), counts[full].astype(np.float64)), k)
    noise = len(w) * step**2 / 12  # the error of the bins themselves
    return table if noise < 5e-4 * error else None


@dataclass(frozen=True)
class _Line:
    """Sorted numbers with their prefix sums of count and value, about their mean."""

    x: F64
    count: F64
    total: F64
    mean: float
    square: float  # Σ (x − mean)²

    @classmethod
    def of(cls, x: F64, weight: F64) -> _Line:
        mean = float(np.average(x, weights=weight))
        x = x - mean
        prefix = [np.concatenate([[0.0], np.cumsum(p)]) for p in (weight, weight * x)]
        return cls(x, prefix[0], prefix[1], mean, float(np.sum(weight * x * x)))

    def start(self, k: int) -> I64:
        """Borders between which the cube root of the density has equal sums."""
        gap = np.diff(self.x)
        mass = np.cbrt(gap * gap * np.diff(self.count)[1:])
        for _ in range(_CAPS):  # even the widest gap gets one border
            np.minimum(mass, mass.sum() / k, out=mass)
        cumulative = np.cumsum(mass)
        at = np.searchsorted(cumulative, cumulative[-1] * np.arange(1, k) / k) + 1
        order = np.arange(1, k)
        at = np.maximum.accumulate(at - order) + order  # no interval is empty
        return np.concatenate([[0], np.minimum(at, len(self.x) - k + order), [len(self.x)]])

    def centers(self, borders: I64) -> F64:
        """The mean of each interval; an empty one stays where it is."""
        n, s = np.diff(self.count[borders]), np.diff(self.total[borders])
        previous = self.x[np.minimum(borders[:-1], len(self.x) - 1)]
        return np.where(n > 0, s / np.maximum(n, 1), previous)

    def gain(self, borders: I64) -> float:
        """How much of the square the intervals' means explain."""
        n, s = np.diff(self.count[borders]), np.diff(self.total[borders])
        return float(np.sum(_explained(n, s)))

    def lloyd(self, borders: I64) -> I64:
        """Borders half-way between the means, until they stay."""
        for _ in range(_LLOYD):
            c = self.centers(borders)
            inner = np.searchsorted(self.x, (c[1:] + c[:-1]) / 2)
            if np.array_equal(inner, borders[1:-1]):
                break
            borders = np.concatenate([borders[:1], inner, borders[-1:]])
        return borders

    def dynamic(self, borders: I64, reach: int) -> I64:
        """The best borders among candidates between each border's neighbours, `reach` away on either side."""
        at = np.arange(1, len(borders) - 1)
        left = np.linspace(borders[np.maximum(at - reach, 0)], borders[at], _CANDIDATES + 1, axis=1)
        right = np.linspace(
            borders[at], borders[np.minimum(at + reach, len(borders) - 1)], _CANDIDATES + 1, axis=1
        )
        candidates = np.concatenate([left, right[:, 1:]], axis=1).astype(np.int64)
        n, s = self.count[candidates], self.total[candidates]
        best = _explained(n[0], s[0])
        choices = []
        for i in range(1, len(candidates)):
            every = best[:, None] + _explained(n[i] - n[i - 1][:, None], s[i] - s[i - 1][:, None])
            choices.append(every.argmax(0))
            best = every[choices[-1], np.arange(every.shape[1])]
        last = int(np.argmax(best + _explained(self.count[-1] - n[-1], self.total[-1] - s[-1])))
        out = borders.copy()
        for i in range(len(candidates) - 1, -1, -1):
            out[i + 1] = candidates[i, last]
            last = int(choices[i - 1][last]) if i else 0
        return out


def _explained(n: F64, s: F64) -> F64:
    """s²/n, nothing where n = 0, and forbidden where an interval would end before it starts."""
    out = s * s / np.maximum(n, 1)
    out[n < 0] = -np.inf
    return out


def _fit(line: _Line, k: int) -> tuple[F32, float]:
    """The centroids and the squared error of k clusters."""
    borders, reach = line.lloyd(line.start(k)), 1
    for _ in range(_ROUNDS if k <= _DYNAMIC else 0):
        error = line.square - line.gain(borders)
        moved = line.lloyd(line.dynamic(borders, reach))
        better = error - (line.square - line.gain(moved))
        borders = moved if better > 0 else borders
        reach = reach if better > _GAIN * error else _REACH * reach
        if reach > _REACH:
            break
    return (line.centers(borders) + line.mean).astype(np.float32), line.square - line.gain(borders)
