"""kmeans(bits): per layer the 2ⁿ values of least squared error, found by one-dimensional k-means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedbraid.core import rng
from fedbraid.core.check import integer, number
from fedbraid.core.codec import F32
from fedbraid.core.layout import Slot
from fedbraid.errors import ConfigError, WireError
from fedbraid.links._bitpacking import Codes, code_type
from fedbraid.links._kmeans1d import centroids
from fedbraid.links._layerwise import LayerCodec, check_bits

_MOST = 100  # iterations of Lloyd's algorithm
_FEW = 32  # up to so many centroids, comparing with each border is faster than a binary search


@dataclass(frozen=True, repr=False)
class Kmeans(LayerCodec):
    """The index of the nearest of 2ⁿ centroids, which travel with each layer.

    A layer too small for its table to pay travels as float32, so a message is never longer for being coded.

    Left as it is, the table is as good as one-dimensional k-means gets. Two cheaper ones begin at weights drawn at
    random, with repetition, and run Lloyd's algorithm:

    iterations: so many times, then each weight gets the nearest of the moved centroids.
    tolerance: until the squared moves of all centroids add up to at most this; the codes are those from before the
    last move, whose means are sent, so that every layer's mean is kept. A centroid that nobody is nearest to is 0.
    FedShift's authors run this, with 1e-4.

    >>> Kmeans(4)
    kmeans(bits=4)
    """

    bits: int
    iterations: int | None = None
    tolerance: float | None = None

    kind: ClassVar[int] = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits("kmeans", self.bits)
        if self.iterations is not None:
            integer("iterations", self.iterations)
        if self.tolerance is not None:
            number("tolerance", self.tolerance, "(0, inf)", "is never reached")
            if self.iterations is not None:
                raise ConfigError(
                    f"kmeans(iterations={self.iterations}, tolerance={self.tolerance}) has two ends; give one"
                )

    @property
    def width(self) -> int:
        return self.bits

    def _quantized(self, slot: Slot) -> bool:
        return (
            super()._quantized(slot) and 32 * self._sides(slot.size) + self.bits * slot.size < 32 * slot.size
        )

    def _sides(self, n: int) -> int:
        return 1 << self.bits

    def _measure(self, w: F32, seeds: Sequence[int]) -> F32:
        if self.iterations is None:
            return np.stack([centroids(row, 1 << self.bits) for row in w])
        return np.stack(
            [self._few(row, rng.generator(seed, "kmeans", len(row))) for row, seed in zip(w, seeds)]
        )

    def _few(self, w: F32, gen: np.random.Generator) -> F32:
        """A few of Lloyd's iterations, begun at random weights."""
        table = np.sort(gen.choice(w, 1 << self.bits))
        for _ in range(self.iterations or 0):
            nearest = _nearest(w, table, code_type(self.bits))
            count = np.bincount(nearest, minlength=len(table))
            total = np.bincount(nearest, weights=w, minlength=len(table))
            table = np.where(count > 0, total / np.maximum(count, 1), table).astype(np.float32)
        return np.sort(table)

    def _quantize(self, block: F32, coded: list[Slot], seeds: Sequence[int]) -> tuple[F32, Codes]:
        if self.tolerance is None:
            return super()._quantize(block, coded, seeds)
        sides = np.empty((len(block), sum(self._sides(s.size) for s in coded)), np.float32)
        codes = np.empty((len(block), sum(s.size for s in coded)), code_type(self.bits))
        for w, (a, b, side) in zip(self._stretches(block, coded), self._walk(coded, sides)):
            for i, seed in enumerate(seeds):
                side[i], codes[i, a:b] = self._until_still(w[i], rng.generator(seed, "kmeans", b - a))
        return sides, codes

    def _until_still(self, w: F32, gen: np.random.Generator) -> tuple[F32, Codes]:
        """(centroids in order, the code of each weight): the means of the last assignment, and that assignment."""
        assert self.tolerance is not None
        table = np.sort(gen.choice(w, 1 << self.bits)).astype(np.float64)
        for _ in range(_MOST):
            values, first = np.unique(
                table, return_index=True
            )  # of equal centroids, the first gets the weights
            nearest = first[_nearest(w, values, code_type(self.bits))]
            count = np.bincount(nearest, minlength=len(table))
            total = np.bincount(nearest, weights=w, minlength=len(table))
            means = np.where(count > 0, total / np.maximum(count, 1), 0.0)
            moved = float(np.square(means - table).sum())
            order = np.argsort(means, kind="stable")
            table = means[order]
            if moved <= self.tolerance:
                break
        rank = np.empty(len(order), code_type(self.bits))
        rank[order] = np.arange(len(order))
        return table.astype(np.float32), rank[nearest]

    def _to_codes(self, w: F32, side: F32, noise: Codes | None) -> Codes:
        codes: Codes = np.empty(w.shape, code_type(self.bits))
        for out, row, table in zip(codes, w, side):
            out[:] = _nearest(row, table, code_type(self.bits))
        return codes

    def _to_values(self, codes: Codes, side: F32) -> F32:
        return np.stack([table.take(row) for row, table in zip(codes, side)])

    def _check(self, side: F32, codes: Codes) -> None:
        if (side[:, 1:] < side[:, :-1]).any():
            raise WireError(
                "message has a table of centroids that is not in order; it is corrupt or from a hostile sender"
            )


def _nearest(w: F32, table: NDArray[Any], dtype: np.dtype[Any]) -> Codes:
    """The index of the nearest centroid of a sorted table; the lower one where two are as near."""
    wide = table.astype(np.float64)
    borders = ((wide[1:] + wide[:-1]) / 2).astype(np.float32)
    if len(table) > _FEW:
        return np.searchsorted(borders, w).astype(dtype)
    codes = np.zeros(len(w), dtype)
    for border in borders:
        codes += w > border
    return codes
