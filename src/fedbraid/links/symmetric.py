"""int8() and int4(): one scale a layer, codes on both sides of zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedbraid.core.codec import F32
from fedbraid.errors import WireError
from fedbraid.links._bitpacking import Codes, code_type
from fedbraid.links._layerwise import LayerCodec


@dataclass(frozen=True, repr=False)
class Symmetric(LayerCodec):
    """α = max|w| / top (1 if that is 0); q = clip(round(w / α), ±top), sent as q + top + 1."""

    @property
    def _top(self) -> int:
        return (1 << self.width - 1) - 1

    def _sides(self, n: int) -> int:
        return 1

    def _measure(self, w: F32, seeds: Sequence[int]) -> F32:
        alpha: F32 = np.maximum(w.max(1, keepdims=True), -w.min(1, keepdims=True)) / np.float32(self._top)
        alpha[alpha == 0] = 1
        return alpha

    def _to_codes(self, w: F32, side: F32, noise: Codes | None) -> Codes:
        q = w / side
        np.rint(q, out=q)
        np.clip(q, -self._top, self._top, out=q)
        q += self._top + 1
        return q.astype(code_type(self.width))

    def _to_values(self, codes: Codes, side: F32) -> F32:
        q = codes.astype(np.float32)
        q -= self._top + 1
        q *= side
        return q

    def _check(self, side: F32, codes: Codes) -> None:
        with np.errstate(over="ignore"):
            reach = side * np.float32(self._top)
        if not (side > 0).all() or not np.isfinite(reach).all():
            raise WireError(f"message has a scale of {side[0, 0]:g}; scales are positive and within float32")
        if codes.min() == 0:
            raise WireError(
                f"message holds code 0, which {self!r} does not use; it is corrupt or from a hostile sender"
            )


@dataclass(frozen=True, repr=False)
class Int8(Symmetric):
    """255 values from −max|w| to max|w| of each layer, a byte each."""

    kind: ClassVar[int] = 2

    @property
    def width(self) -> int:
        return 8


@dataclass(frozen=True, repr=False)
class Int4(Symmetric):
    """15 values from −max|w| to max|w| of each layer, two to a byte, the first in the high half."""

    kind: ClassVar[int] = 3

    @property
    def width(self) -> int:
        return 4
