"""fp16(): each number cast to half precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fedbraid.core.codec import F32
from fedbraid.errors import WireError
from fedbraid.links._bitpacking import Codes
from fedbraid.links._layerwise import LayerCodec

_INFINITE = 0x7C00  # a half whose exponent is all ones is infinite or not a number


@dataclass(frozen=True, repr=False)
class Fp16(LayerCodec):
    """Half precision: two bytes a number, up to 65504."""

    kind: ClassVar[int] = 1

    @property
    def width(self) -> int:
        return 16

    def _sides(self, n: int) -> int:
        return 0

    def _measure(self, w: F32, seeds: Sequence[int]) -> F32:
        return np.empty((len(w), 0), np.float32)

    def _to_codes(self, w: F32, side: F32, noise: Codes | None) -> Codes:
        top = max(w.max(), -w.min())
        if top >= 65520:  # rounds to infinity
            raise WireError(f"{top:g} is beyond fp16's 65504; use int8() or identity()")
        return torch.from_numpy(w).half().numpy().view(np.uint16)  # faster than NumPy's cast

    def _to_values(self, codes: Codes, side: F32) -> F32:
        return torch.from_numpy(np.ascontiguousarray(codes).view(np.float16)).float().numpy()

    def _check(self, side: F32, codes: Codes) -> None:
        if ((codes & _INFINITE) == _INFINITE).any():
            raise WireError("message holds a half that is not finite; it is corrupt or from a hostile sender")
