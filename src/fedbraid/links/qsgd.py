"""qsgd(bits): stochastic rounding to multiples of a norm (Alistarh et al. 2017)."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedbraid.core import rng
from fedbraid.core.check import one_of
from fedbraid.core.codec import F32
from fedbraid.core.layout import Layout, Slot
from fedbraid.errors import ConfigError, WireError
from fedbraid.links._bitpacking import Codes, code_type
from fedbraid.links._layerwise import CHUNK, LayerCodec, check_bits, gather, scatter


@dataclass(frozen=True, repr=False)
class Qsgd(LayerCodec):
    """v ↦ ‖v‖·sgn(v)·ξ with ξ stochastic on s = 2^(bits−1) − 1 levels, so that the expectation is v.

    levels: s itself, in place of bits, where a paper counts levels; as many bits as that takes are sent. norm: "max" or "l2". scope: one norm a "layer", or one for the whole "vector"; with `bucket=B`, one for
    every B numbers of it. contractive: divide by 1 + ω, for links that need E‖v − Q(v)‖² < ‖v‖² rather than
    no bias.

    >>> Qsgd(4, norm="l2")
    qsgd(bits=4, norm='l2')
    """

    bits: int | None = None
    norm: str = "max"
    scope: str = "layer"
    bucket: int | None = None
    contractive: bool = False
    levels: int | None = None

    kind: ClassVar[int] = 6
    stochastic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.bits is None) == (self.levels is None):
            raise ConfigError(
                f"qsgd(bits={self.bits}, levels={self.levels}) needs one of the two; give bits or levels"
            )
        if self.levels is None:
            check_bits("qsgd", self.bits, least=2)
        elif type(self.levels) is not int or not 0 < self.levels < 1 << 15:
            raise ConfigError(
                f"qsgd(levels={self.levels!r}) is not a number of levels; use 1 to {(1 << 15) - 1}"
            )
        one_of("qsgd(norm=)", self.norm, ("max", "l2"))
        one_of("qsgd(scope=)", self.scope, ("layer", "vector"))
        if self.bucket is not None and not (type(self.bucket) is int and 0 < self.bucket < 1 << 32):
            raise ConfigError(f"qsgd(bucket={self.bucket!r}) is not a number of weights; use an integer >= 1")

    @property
    def width(self) -> int:
        return self.bits or (2 * self.s + 1).bit_length()  # code 0 is not used

    @property
    def unbiased(self) -> bool:
        return not self.contractive

    @property
    def s(self) -> int:
        """The levels besides zero."""
        return self.levels or (1 << (self.bits or 0) - 1) - 1

    def omega(self, n: int) -> float:
        """ω with E‖v − Q(v)‖² ≤ ω‖v‖² for n numbers under one norm, before any division by 1 + ω."""
        n = min(n, self.bucket or n)
        fine = n / self.s**2
        if self.norm == "max":
            fine /= 4  # the variance p(1 − p) is at most 1/4, and ‖v‖ is at least the largest number
        return min(fine, math.sqrt(n) / self.s)

    def _params(self) -> int:
        flags = (
            self.norm == "l2", self.scope == "vector", self.contractive, self.bucket is not None, self.levels is not None,
        )  # fmt: skip
        return super()._params() | sum(1 << 5 + i for i, flag in enumerate(flags) if flag)

    def _preamble(self, layout: Layout) -> bytes:
        return b"".join(struct.pack("<I", n) for n in (self.bucket, self.levels) if n is not None)

    def _segments(self, coded: list[Slot]) -> list[int]:
        sizes = super()._segments(coded)
        return sizes if self.scope == "layer" else [sum(sizes)] if sizes else []

    def _sides(self, n: int) -> int:
        return -(-n // (self.bucket or n))

    def _noise(self, seeds: Sequence[int], n: int) -> Codes:
        draws = np.empty((len(seeds), -(-n // 4)), "<u8")
        for row, seed in zip(draws, seeds):
            row[:] = rng.generator(seed, "qsgd").integers(0, 1 << 64, len(row), np.uint64)
        return draws.view("<u2")[:, :n]

    def _measure(self, w: F32, seeds: Sequence[int]) -> F32:
        cells = self._cells(w)
        if self.norm == "max":
            return np.asarray(np.maximum(cells.max(2), -cells.min(2)))
        root = np.sqrt(np.square(cells, dtype=np.float64).sum(2))
        if (root > np.finfo(np.float32).max).any():
            raise WireError(f"a layer of l2 norm {root.max():g} is beyond float32; the model diverged")
        return np.asarray(root, np.float32)

    def _to_codes(self, w: F32, side: F32, noise: Codes | None) -> Codes:
        """Fixed point with 16 bits after the point, plus 16 random bits, without what is after the point."""
        assert noise is not None
        cells = self._cells(w) / np.where(side == 0, np.float32(1), side)[:, :, None]
        t = cells.reshape(len(w), -1)[:, : w.shape[1]]
        t *= np.float32(self.s << 16)
        np.rint(t, out=t)
        q = t.astype(np.int32)
        q += noise.astype(np.int32)
        q >>= 16
        codes = q.astype(code_type(self.width))
        codes += self.s + 1  # negative ones wrap around to where they belong
        return codes

    def _to_values(self, codes: Codes, side: F32) -> F32:
        m, n = codes.shape
        q = codes.astype(np.float32)
        q -= self.s + 1
        q /= np.float32(self.s)
        cells = self._cells(q)
        cells *= side[:, :, None]
        return cells.reshape(m, -1)[:, :n]

    def _check(self, side: F32, codes: Codes) -> None:
        if (side < 0).any():
            raise WireError(f"message has a norm of {side.min():g}; it is corrupt or from a hostile sender")
        for code in (int(codes.min()), int(codes.max())):
            if not 0 < code <= 2 * self.s + 1:
                raise WireError(
                    f"message holds code {code}, which {self!r} does not use; it is corrupt or from a hostile sender"
                )

    def _received(self, side: F32, n: int) -> F32:
        return side / np.float32(1 + self.omega(n)) if self.contractive else side

    def _stretches(self, block: F32, coded: list[Slot]) -> list[F32]:
        return super()._stretches(block, coded) if self.scope == "layer" else [gather(block, coded)]

    def _put_back(self, stretches: list[F32], coded: list[Slot], out: F32) -> None:
        if self.scope == "vector":
            scatter(stretches[0], coded, out)

    def _chunks(self, n: int, side: F32) -> Iterator[tuple[int, int, F32]]:
        if self.bucket is None:
            yield from super()._chunks(n, side)
            return
        norms = max(1, CHUNK // self.bucket)
        for at in range(0, side.shape[1], norms):
            yield at * self.bucket, min((at + norms) * self.bucket, n), side[:, at : at + norms]

    def _cells(self, w: F32) -> F32:
        """A segment `[m, n]` as `[m, norms, numbers under one norm]`, the last filled up with zeros."""
        m, n = w.shape
        size = min(n, self.bucket or n)
        if n % size:
            w = np.concatenate([w, np.zeros((m, size - n % size), np.float32)], axis=1)
        return w.reshape(m, -1, size)
