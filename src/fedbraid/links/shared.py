"""shared(bits, range): one grid for all clients, so that their codes add up."""

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

from fedbraid.core import rng
from fedbraid.core.check import number
from fedbraid.core.codec import F32
from fedbraid.core.layout import Layout
from fedbraid.errors import ConfigError, WireError
from fedbraid.links._bitpacking import code_type, pack, packed_size, spare_bits, unpack
from fedbraid.links._layerwise import check_bits
from fedbraid.links.framed import Framed, checked, row_blocks
from fedbraid.links.wire import U8

Grid = NDArray[np.int64]  # whole numbers of steps

ROTATED = 1 << 8
BLOCK = 1 << 12  # numbers that a rotation mixes; what is left over is cut into smaller powers of two


@dataclass(frozen=True, repr=False)
class Shared(Framed):
    """q = ⌊v/s + u⌋ with u uniform in [0, 1) on 16 bits, s = range/(2^(bits−1) − 1), for every number of every layer.

    Unbiased within [−range, range]; what is beyond is taken to the end, which `saturated` counts. With `rotate` the
    vector is first turned by a random orthogonal matrix that all clients know (signs and Hadamard's matrix, in blocks), so
    that no number is much larger than others.

    >>> Shared(8, 0.5)
    shared(bits=8, range=0.5)
    """

    bits: int = 16
    range: float = 1.0
    rotate: bool = False

    kind: ClassVar[int] = 8

    def __post_init__(self) -> None:
        check_bits("shared", self.bits)
        if self.bits == 1:
            raise ConfigError("shared(bits=1) has no level besides zero; use bits >= 2")
        number("range", self.range, "(0, inf)", "spans no grid")
        if not 1e-30 < self.range < 1e30:
            raise ConfigError(f"range must be within float32, got {self.range}; use a range such as 1.0")
        object.__setattr__(self, "range", float(np.float32(self.range)))

    @property
    def unbiased(self) -> bool:
        return True

    def grids(self) -> tuple[Shared, ...]:
        return (self,)

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits - 1) - 1

    @property
    def step(self) -> float:
        """What a code of 1 stands for."""
        return self.range / self.top

    def to_grid(self, v: F32, seeds: Sequence[int]) -> Grid:
        """The codes of a block `[m, d]`, rounded at random."""
        t = self._rotated(v) / np.float32(self.step)
        np.clip(t, -self.top, self.top, out=t)
        draws = np.empty((len(t), -(-t.shape[1] // 4)), "<u8")
        for row, seed in zip(draws, seeds, strict=True):
            row[:] = rng.generator(seed, "shared").integers(0, 1 << 64, len(row), np.uint64)
        u = draws.view("<u2")[:, : t.shape[1]] * 2.0**-16
        return np.floor(t + u).astype(np.int64)

    def from_grid(self, q: NDArray[Any]) -> F32:
        """The numbers `[m, d]` that codes, or sums or means of codes, stand for."""
        v = (np.asarray(q, np.float64) * self.step).astype(np.float32)
        return _hadamard(v) * _signs(v.shape[1]) if self.rotate else v

    def recover(self, v: F32) -> Grid:
        """The codes behind numbers that this codec decoded."""
        q: Grid = np.rint(self._rotated(v).astype(np.float64) / self.step).astype(np.int64)
        return q

    def saturated(self, q: Grid) -> int:
        """How many codes lie at an end of the range."""
        return int(np.count_nonzero(np.abs(q) == self.top))

    def roundtrip(self, v: Tensor, layout: Layout, seeds: Sequence[int]) -> tuple[Tensor, list[int]]:
        block = checked(v, layout)
        out = np.empty_like(block)
        for rows in row_blocks(*block.shape):
            out[rows] = self.from_grid(self.to_grid(block[rows], seeds[rows]))
        return torch.from_numpy(out), [self.size(layout)] * len(block)

    def _params(self) -> int:
        return self.bits | (ROTATED if self.rotate else 0)

    def _preamble(self, layout: Layout) -> bytes:
        return struct.pack("<f", self.range)

    def _body_size(self, layout: Layout) -> int:
        return packed_size(layout.size, self.bits)

    def _to_body(self, v: F32, layout: Layout, seed: int) -> U8:
        codes = (self.to_grid(v[None], [seed]) + self.top).astype(code_type(self.bits))
        body: U8 = pack(codes, self.bits)[0]
        return body

    def _from_body(self, body: U8, layout: Layout) -> F32:
        n = layout.size
        codes = unpack(body[None], self.bits, n)
        if spare_bits(body[None], self.bits, n):
            raise WireError("message sets bits after its last code; it is corrupt or from a hostile sender")
        if n and int(codes.max()) > 2 * self.top:
            raise WireError(
                f"message holds code {codes.max()}, which {self!r} does not use; it is corrupt or from a hostile sender"
            )
        v: F32 = self.from_grid(codes.astype(np.int64) - self.top)[0]
        return v

    def _rotated(self, v: F32) -> F32:
        """H·diag(±1)·v; a copy."""
        return _hadamard(v * _signs(v.shape[1])) if self.rotate else v.copy()


def _signs(n: int) -> F32:
    """±1, the same for all clients."""
    drawn = rng.bits(0, "shared rotation", np.arange(n, dtype=np.uint64))
    return np.where(drawn >> np.uint64(63), np.float32(-1), np.float32(1))


def _hadamard(v: F32) -> F32:
    """Each block of a row times Hadamard's matrix over the root of its size, which is its own inverse."""
    out, at, d = np.empty_like(v), 0, v.shape[1]
    while at < d:
        size = min(BLOCK, 1 << (d - at).bit_length() - 1)
        end = at + (d - at) // size * size if size == BLOCK else at + size
        x, width = v[:, at:end].copy(), 1
        while width < size:
            pairs = x.reshape(-1, 2, width)
            pairs[:, 0], pairs[:, 1] = pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]
            width *= 2
        out[:, at:end] = x * np.float32(1 / math.sqrt(size))
        at = end
    return out
