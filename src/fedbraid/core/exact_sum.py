"""Sums whose bits do not depend on the order, on blocks, on processes or on the tree in which they are added.

*The obvious way fails.* Floats are rounded after every addition, so (a + b) + c is not a + (b + c), and a sum that workers
or edges added in parts differs from one that the server added alone. Sorting needs all terms at once; more precision makes
a difference rarer and not impossible; one grid for the cohort needs its largest number before the first is added.

*The policy.* Each term w·v of a row v is rounded once, to a multiple of a grid that the row alone decides: 2^(44 j − 26) for
the largest whole j that leaves it 50 bits or more below the row's largest term. After that every sum is exact. A number of
the total is held in digits, one float64 for each j that occurred ("levels", mostly two), each a whole multiple of its
2^(44 j − 26) that stays below 2^52 of them; what grows larger is carried into the next level.

*Invariants.*

1. The value is Σ_i round_i(w_i v_i), where round_i depends on nothing but term i; digits may differ, the value may not.
2. w and v are float32, so that their product is exact in float64; (t + M) − M with M = 1.5·2^52·q then rounds t to a multiple
   of q, whatever a compiler makes of it, as long as it does not reorder additions.
3. A level holds at most 2^52 of its quanta, which `load` bounds from above before anything is added.
4. `value` carries every digit into [0, next quantum) first. These digits are unique, and it adds them from the top.
   Two digits need no carrying: their sum is rounded once, whatever they are.

Compared with a running sum in float32: a number that is at least 2⁻²⁶ of its row's largest is rounded later than a float32
would round it, and no addition rounds again.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbraid.core import accelerators as passes
from fedbraid.core.accelerators import Floats, Ints

WIDTH, ORIGIN = 44, -26  # level j consists of multiples of 2^(WIDTH·j + ORIGIN)
PRECISION = 50  # bits below a row's largest term that are kept at the least
TOP = 45  # bits of a term in the level in which it begins, at the most
FULL = 2.0**52  # quanta that a level may hold
CHUNK = 2**17  # numbers that torch takes at a time, so that they stay in the cache
SMALL = (
    2**13
)  # numbers of a block below which a call of torch takes longer than its arithmetic, and NumPy's does not


class ExactSum:
    """Σ_i w_i v_i of rows `[d]` of float32, exact but for one rounding of each term.

    >>> v = torch.tensor([[1e8, 1.0], [1.0, 1.0], [-1e8, 1.0]])
    >>> w = torch.ones(3)
    >>> a, b = ExactSum(2).add(w[:1], v[:1]), ExactSum(2).add(w[1:], v[1:])
    >>> a.merge(b).value()
    tensor([1., 3.], dtype=torch.float64)
    """

    def __init__(self, width: int, device: torch.device | None = None) -> None:
        self.width, self.device = width, device
        self.levels: dict[int, Tensor] = {}
        self.load: dict[int, float] = {}  # a bound on the largest number of quanta in each level
        self.is_finite = True
        self.is_borrowed = False  # its levels lie in memory that is not its own, and may only be read

    def __getstate__(self) -> dict[str, Any]:
        """As arrays, which processes pass to one another faster than tensors."""
        return {**self.__dict__, "levels": {j: level.cpu().numpy() for j, level in self.levels.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # arrays may be read-only, and nobody writes to them
            levels = {j: torch.from_numpy(level) for j, level in state["levels"].items()}
        self.__dict__.update(state, levels=levels, device=None, is_borrowed=True)

    def add(self, w: Tensor, v: Tensor) -> ExactSum:
        """Add w_i v_i of a block, w `[m]` or `[m, 1]`, v `[m, d]`."""
        self._own()
        v = v.expand(w.numel(), -1).float()
        weights = w.reshape(-1).float().double().cpu().numpy()
        with np.errstate(invalid="ignore"):  # 0·∞
            largest = np.abs(weights) * _reach(v)
        for rows, most in self._alike(largest):
            top, bottom = _levels(most)
            quanta = [quantum(j) for j in range(top, bottom - 1, -1)]
            # a row adds at the most so many quanta to a level; what rounding leaves to the next is half a quantum of this one
            each = max(most / quanta[0], 2.0 ** (WIDTH - 1)) + 1
            together = int(FULL / 2 / each)
            for lo in range(0, len(rows), together):
                some = rows[lo : lo + together]
                into = self._prepare(top, bottom, len(some), float(largest[some].sum()))
                _fold(v, some, weights[some], into, quanta)
        return self

    def _alike(self, largest: Floats) -> list[tuple[Ints, float]]:
        """Rows by the levels that they go into, with the largest term of each group; the levels grow with a row's largest."""
        low, high = float(largest.min(initial=math.inf)), float(largest.max(initial=0.0))
        if 0 < low <= high < math.inf and _levels(low) == _levels(high):
            return [(np.arange(len(largest)), high)]
        finite = np.isfinite(largest)
        self.is_finite &= bool(finite.all())
        groups: dict[tuple[int, int], list[int]] = {}
        for i in np.flatnonzero(finite & (largest > 0)).tolist():
            groups.setdefault(_levels(largest[i]), []).append(i)
        return [(np.array(rows), float(largest[rows].max())) for rows in groups.values()]

    def merge(self, other: ExactSum) -> ExactSum:
        """Add another sum, whose storage may be used unless it is borrowed."""
        self._own()
        lowest, highest = min(other.levels, default=0), max(other.levels, default=0)
        for j in range(lowest, highest + 3):  # carrying may make two more
            if j in other.levels and j in self.levels and self.load[j] + other.load[j] > FULL:
                other._carry(j)
                self._carry(j)
        for j, level in other.levels.items():
            if j in self.levels:
                self.levels[j] += level.to(self.device)
                self.load[j] += other.load[j]
            else:
                self.levels[j] = level.to(self.device, copy=True) if other.is_borrowed else level
                self.load[j] = other.load[j]
        self.is_finite &= other.is_finite
        return self

    def value(self) -> Tensor:
        """The sum in float64, not a number anywhere where a row was not finite."""
        if not self.is_finite:
            return torch.full((self.width,), math.nan, dtype=torch.float64, device=self.device)
        if len(self.levels) > 2:  # two digits make one rounding, whatever they are
            self.settle()
        digits = [self.levels[j] for j in sorted(self.levels, reverse=True)]
        if len(digits) < 2:
            zero = torch.zeros(self.width, dtype=torch.float64, device=self.device)
            return zero.add_(digits[0]) if digits else zero
        total = torch.add(*digits[:2])
        for digit in digits[2:]:
            total += digit
        return total

    def settle(self) -> ExactSum:
        """Make the digits those that the value alone decides, but for levels of zeros at the ends."""
        if self.levels:
            for j in range(min(self.levels), max(self.levels)):
                if j in self.levels:
                    self._carry(j)
        return self

    def _own(self) -> None:
        if self.is_borrowed:
            self.levels = {j: level.clone() for j, level in self.levels.items()}
            self.is_borrowed = False

    def set_level(self, j: int, numbers: Tensor) -> None:
        """Put in a level that another sum had; refuses what is no whole number of quanta or too many."""
        quanta = numbers * (1 / quantum(j))
        most = float(quanta.abs().max()) if numbers.numel() else 0.0
        if not most <= FULL or bool((quanta != quanta.round()).any()):
            raise ValueError(f"level {j} consists of whole multiples of {quantum(j)}, at most 2^52")
        self.levels[j], self.load[j] = numbers, most

    def _prepare(self, first: int, last: int, count: int, largest: float) -> list[Tensor]:
        """The levels from `first` down to `last`, able to take so many rows whose largest terms add up to `largest`."""
        for j in range(first, last - 1, -1):
            more = largest / quantum(j) + count if j == first else count * 2.0 ** (WIDTH - 1)
            if self.load.get(j, 0.0) + more > FULL:
                self._carry(j)
            self._level(j)
            self.load[j] += more
        return [self.levels[j] for j in range(first, last - 1, -1)]

    def _level(self, j: int) -> Tensor:
        if j not in self.levels:
            self.levels[j] = torch.zeros(self.width, dtype=torch.float64, device=self.device)
            self.load[j] = 0.0
        return self.levels[j]

    def _carry(self, j: int) -> None:
        """Leave digits in [0, quantum above) at level j, and the rest in the level above."""
        self._own()
        above, up = self._level(j + 1), quantum(j + 1)
        more = self.load[j] * 2.0**-WIDTH + 1
        if self.load[j + 1] + more > FULL:
            self._carry(j + 1)
        whole = torch.floor(self.levels[j] * (1 / up)).mul_(up)
        above += whole
        self.levels[j] -= whole
        self.load[j + 1] += more
        self.load[j] = 2.0**WIDTH


def quantum(j: int) -> float:
    """What a 1 in level j stands for."""
    return math.ldexp(1.0, WIDTH * j + ORIGIN)


def _levels(most: float) -> tuple[int, int]:
    """(the first, the last level) of a row whose largest term is this."""
    exponent = math.frexp(most)[1]
    return -((TOP + ORIGIN - exponent) // WIDTH), (exponent - PRECISION - ORIGIN) // WIDTH


def _reach(v: Tensor) -> Floats:
    """The largest |v| of every row."""
    found = passes.reach(v)
    if found is None:
        found = torch.maximum(v.amax(1), -v.amin(1)).cpu().numpy() if v.numel() else np.zeros(len(v))
    return found.astype(np.float64)


def _fold(v: Tensor, rows: Ints, w: Floats, into: list[Tensor], quanta: list[float]) -> None:
    """Add w_i v_i of these rows to the levels, from the top down."""
    if passes.fold(v, rows, w, into, quanta):
        return
    if v.device.type == "cpu" and len(rows) * v.shape[1] <= SMALL:
        terms = v.numpy()[rows] * w[:, None]
        for level, q in zip(into, quanta, strict=True):
            M = 1.5 * FULL * q
            whole = (terms + M) - M
            terms -= whole
            level.numpy()[:] += whole.sum(0)
        return
    weights = torch.from_numpy(w).to(v.device)[:, None]
    together, wide = max(1, CHUNK // max(v.shape[1], 1)), min(v.shape[1], CHUNK)
    scratch = torch.empty(2, min(together, len(rows)), wide, dtype=torch.float64, device=v.device)
    for i in range(0, len(rows), together):
        some = (
            v[int(rows[i])][None]
            if together == 1
            else v[torch.from_numpy(rows[i : i + together]).to(v.device)]
        )
        for lo in range(0, v.shape[1], CHUNK):
            part = some[:, lo : lo + CHUNK]
            t, whole = scratch[:, : len(part), : part.shape[1]]
            t.copy_(part).mul_(weights[i : i + together])
            for level, q in zip(into, quanta, strict=True):
                M = 1.5 * FULL * q
                torch.add(t, M, out=whole).sub_(M)
                t.sub_(whole)
                level[lo : lo + CHUNK].add_(whole.sum(0))
