"""uniform(bits): evenly spaced values from the smallest to the largest of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedbraid.core.codec import F32
from fedbraid.errors import WireError
from fedbraid.links._bitpacking import Codes, code_type
from fedbraid.links._layerwise import LayerCodec, check_bits


@dataclass(frozen=True, repr=False)
class Uniform(LayerCodec):
    """(w − min)/(max − min)·(2ⁿ − 1), rounded, and back by the inverse.

    >>> Uniform(4)
    uniform(bits=4)
    """

    bits: int

    kind: ClassVar[int] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits("uniform", self.bits)

    @property
    def width(self) -> int:
        return self.bits

    @property
    def _top(self) -> np.float32:
        return np.float32((1 << self.bits) - 1)

    def _sides(self, n: int) -> int:
        return 2

    def _measure(self, w: F32, seeds: Sequence[int]) -> F32:
        side = np.stack([w.min(1), w.max(1)], axis=1)
        if not _spans(side):
            raise WireError(
                f"a layer from {side[:, 0].min():g} to {side[:, 1].max():g} spans more than float32 holds"
            )
        return side

    def _to_codes(self, w: F32, side: F32, noise: Codes | None) -> Codes:
        low, span = _low_and_span(side)
        q = w - low
        q /= np.where(span == 0, np.float32(1), span)
        q *= self._top
        np.rint(q, out=q)
        return q.astype(code_type(self.bits))

    def _to_values(self, codes: Codes, side: F32) -> F32:
        low, span = _low_and_span(side)
        q = codes.astype(np.float32)
        q /= self._top
        q *= span
        q += low
        return q

    def _check(self, side: F32, codes: Codes) -> None:
        if (side[:, 0] > side[:, 1]).any() or not _spans(side):
            raise WireError(
                f"message has a layer from {side[0, 0]:g} to {side[0, 1]:g}; that is no range of float32"
            )


def _low_and_span(side: F32) -> tuple[F32, F32]:
    return side[:, :1], side[:, 1:] - side[:, :1]


def _spans(side: F32) -> bool:
    """Whether the range, and the way back to its top, stay within float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        low, span = _low_and_span(side)
        return bool(np.isfinite(low + span).all())
