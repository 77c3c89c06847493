"""topk(fraction): only the largest numbers travel, with their positions."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.check import number, one_of
from fedbraid.core.codec import F32
from fedbraid.core.layout import Layout
from fedbraid.errors import ConfigError, WireError
from fedbraid.links import _elias_fano as positions
from fedbraid.links.framed import Framed, checked
from fedbraid.links.wire import U8, finite


@dataclass(frozen=True, repr=False)
class Topk(Framed):
    """The ⌈fraction·d⌉ numbers of the full vector that are largest in magnitude; the others decode to 0.

    values: "float32" or "float16". rounding: "up", or "down" to ⌊fraction·d⌋ and at least one, as QAFeL's authors
    count. Of equal magnitudes, the first in the vector travel.

    >>> Topk(0.01, values="float16")
    topk(fraction=0.01, values='float16')
    """

    fraction: float
    values: str = "float32"
    rounding: str = "up"

    kind: ClassVar[int] = 7

    def __post_init__(self) -> None:
        number("fraction", self.fraction, "(0, 1]", "keeps nothing or more than all")
        one_of("topk(values=)", self.values, ("float32", "float16"))
        if self.rounding not in ("up", "down"):
            raise ConfigError(f"topk(rounding=) must be 'up' or 'down', got {self.rounding!r}")

    def count(self, layout: Layout) -> int:
        """⌈fraction·d⌉ or ⌊fraction·d⌋, as a person would count it: 0.07 of 100 is 7 whichever is rounded."""
        if self.rounding == "down":
            return min(max(1, math.floor(self.fraction * layout.size * (1 + 1e-12))), layout.size)
        return min(math.ceil(self.fraction * layout.size * (1 - 1e-12)), layout.size)

    @property
    def _type(self) -> str:
        return "<f4" if self.values == "float32" else "<f2"

    def _params(self) -> int:
        return 32 if self.values == "float32" else 16

    def _preamble(self, layout: Layout) -> bytes:
        return struct.pack("<I", self.count(layout))

    def _body_size(self, layout: Layout) -> int:
        k = self.count(layout)
        return k * np.dtype(self._type).itemsize + positions.size(k, layout.size)

    def _to_body(self, v: F32, layout: Layout, seed: int) -> U8:
        at = largest(v, self.count(layout))
        return np.concatenate([self._cast(v[at]).view(np.uint8), positions.pack(at, layout.size)])

    def _from_body(self, body: U8, layout: Layout) -> F32:
        k = self.count(layout)
        values, where = np.split(body, [k * np.dtype(self._type).itemsize])
        numbers = values.view(self._type).astype(np.float32)
        finite(numbers, "weight")
        v = np.zeros(layout.size, np.float32)
        v[positions.unpack(where, k, layout.size)] = numbers
        return v

    def roundtrip(self, v: Tensor, layout: Layout, seeds: Sequence[int]) -> tuple[Tensor, list[int]]:
        block = checked(v, layout)
        out = np.zeros_like(block)
        for row, decoded in zip(block, out):
            at = largest(row, self.count(layout))
            decoded[at] = self._cast(row[at])
        return torch.from_numpy(out), [self.size(layout)] * len(block)

    def _cast(self, numbers: F32) -> NDArray[Any]:
        if self.values == "float16" and len(numbers) and np.abs(numbers).max() >= 65520:
            raise WireError(f"{np.abs(numbers).max():g} is beyond float16's 65504; use values='float32'")
        return numbers.astype(self._type)


def largest(v: F32, k: int) -> NDArray[np.int64]:
    """Where the k numbers of largest magnitude are, in order; of equals, the first."""
    magnitude = np.abs(v)
    if k == len(v):
        return np.arange(k)
    least = np.partition(magnitude, len(v) - k)[len(v) - k]
    at = np.flatnonzero(magnitude >= least)
    if len(at) > k:
        ties = np.flatnonzero(magnitude[at] == least)
        at = np.delete(at, ties[len(ties) - (len(at) - k) :])
    return at
