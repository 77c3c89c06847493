"""kmeans(bits): per layer the 2ⁿ values of least squared error, found by one-dimensional k-means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedbraid.core import rng
from fedbraid.core.check import integer
from fedbraid.core.codec import F32
from fedbraid.core.layout import Slot
from fedbraid.errors import WireError
from fedbraid.links._bitpacking import Codes, code_type
from fedbraid.links._kmeans1d import centroids
from fedbraid.links._layerwise import LayerCodec, check_bits

_FEW = 32  # up to so many centroids, comparing with each border is faster than a binary search


@dataclass(frozen=True, repr=False)
class Kmeans(LayerCodec):
    """The index of the nearest of 2ⁿ centroids, which travel with each layer.

    A layer too small for its table to pay travels as float32, so a message is never longer for being coded.

    iterations: stop Lloyd's algorithm after so many, begun at weights drawn at random, as FedShift's authors do
    (theirs comes to 1 to 4); left out, the table is as good as one-dimensional k-means gets.

    >>> Kmeans(4)
    kmeans(bits=4)
    """

    bits: int
    iterations: int | None = None

    kind: ClassVar[int] = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits("kmeans", self.bits)
        if self.iterations is not None:
            integer("iterations", self.iterations)

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
                "message has a table of centroids that is not in order; it was damaged or is hostile"
            )


def _nearest(w: F32, table: F32, dtype: np.dtype[Any]) -> Codes:
    """The index of the nearest centroid of a sorted table; the lower one where two are as near."""
    wide = table.astype(np.float64)
    borders = ((wide[1:] + wide[:-1]) / 2).astype(np.float32)
    if len(table) > _FEW:
        return np.searchsorted(borders, w).astype(dtype)
    codes = np.zeros(len(w), dtype)
    for border in borders:
        codes += w > border
    return codes
