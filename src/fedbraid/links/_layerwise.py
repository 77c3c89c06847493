"""The base of codecs that quantize layer by layer: splitting, side information, packing, blocks and rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbraid.core.check import one_of
from fedbraid.core.codec import F32
from fedbraid.core.layout import Layout, Slot
from fedbraid.errors import ConfigError, WireError
from fedbraid.links._bitpacking import Codes, code_type, pack, packed_size, spare_bits, unpack
from fedbraid.links.framed import Framed, checked, row_blocks
from fedbraid.links.wire import U8, finite

QUANTIZED_BIASES = 1 << 15
CHUNK = 1 << 16  # numbers quantized at a time


def check_bits(name: str, bits: Any, least: int = 1) -> None:
    """Refuse a bit width that is not an integer from `least` to 16."""
    if name == "qsgd" and bits == 1:
        raise ConfigError("qsgd(bits=1) has no level besides zero; use bits >= 2")
    if isinstance(bits, bool) or not isinstance(bits, int) or not least <= bits <= 16:
        raise ConfigError(f"{name}(bits={bits!r}) must be an integer number of bits; use {least} to 16")


class Parsed(NamedTuple):
    """The fields of bodies: float32 layers, side numbers, codes, and the codes as they were packed."""

    raw: F32
    sides: F32
    codes: Codes
    packed: U8


@dataclass(frozen=True, repr=False)
class LayerCodec(Framed):
    """A codec that turns each number into a code of `width` bits, and each layer into some side numbers.

    The body is: the layers that are not quantized, as float32; the side numbers; the codes, packed.
    """

    biases: str = field(default="float32", kw_only=True)

    stochastic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        one_of("biases", self.biases, ("float32", "quantise"))

    @property
    def width(self) -> int:
        """Bits of one code."""
        raise NotImplementedError

    def _sides(self, n: int) -> int:
        """How many side numbers a segment of n numbers has."""
        raise NotImplementedError

    def _measure(self, w: F32, seeds: Sequence[int]) -> F32:
        """The side numbers `[m, sides]` of a segment `[m, n]`; what is drawn for it comes from the seeds."""
        raise NotImplementedError

    def _to_codes(self, w: F32, side: F32, noise: Codes | None) -> Codes:
        """The codes `[m, n]` of a segment; `noise` is 16 random bits for each, if the codec is stochastic."""
        raise NotImplementedError

    def _to_values(self, codes: Codes, side: F32) -> F32:
        """The numbers `[m, n]` that codes stand for."""
        raise NotImplementedError

    def _check(self, side: F32, codes: Codes) -> None:
        """Refuse side numbers and codes of a segment that no fedbraid sender would make."""

    def _received(self, side: F32, n: int) -> F32:
        """The side numbers as the receiver of a segment of n numbers uses them."""
        return side

    def _quantized(self, slot: Slot) -> bool:
        return len(slot.shape) > 1 or self.biases == "quantise"

    def _segments(self, coded: list[Slot]) -> list[int]:
        """The lengths of the stretches of quantized numbers, each of which has its side numbers."""
        return [s.size for s in coded]

    def _stretches(self, block: F32, coded: list[Slot]) -> list[F32]:
        """The segments `[m, n]` of a block, to read or to write."""
        return [block[:, s.offset : s.end] for s in coded]

    def _put_back(self, stretches: list[F32], coded: list[Slot], out: F32) -> None:
        """Write segments that are not the block's own memory to it."""

    def _noise(self, seeds: Sequence[int], n: int) -> Codes | None:
        return None

    def _params(self) -> int:
        return self.width | (QUANTIZED_BIASES if self.biases == "quantise" else 0)

    def _body_size(self, layout: Layout) -> int:
        raw, coded = self._split(layout)
        sides = sum(self._sides(n) for n in self._segments(coded))
        return 4 * (_numbers(raw) + sides) + packed_size(_numbers(coded), self.width)

    def _to_body(self, v: F32, layout: Layout, seed: int) -> U8:
        body: U8 = self._bodies(v[None], layout, [seed])[0]
        return body

    def _from_body(self, body: U8, layout: Layout) -> F32:
        bodies = self._parse(body[None], layout)
        finite(bodies.raw, "weight")
        finite(bodies.sides, "scale")
        if spare_bits(bodies.packed, self.width, bodies.codes.shape[1]):
            raise WireError("message sets bits after its last code; it is corrupt or from a hostile sender")
        for a, b, side in self._walk(self._split(layout)[1], bodies.sides):
            self._check(side, bodies.codes[:, a:b])
        v: F32 = self._values(bodies, layout)[0]
        return v

    def roundtrip(self, v: Tensor, layout: Layout, seeds: Sequence[int]) -> tuple[Tensor, list[int]]:
        block, (_, coded) = checked(v, layout), self._split(layout)
        out = block.copy()
        for rows in row_blocks(*block.shape):
            sides, codes = self._quantize(block[rows], coded, seeds[rows])
            self._dequantize(sides, codes, coded, out[rows])
        return torch.from_numpy(out), [self.size(layout)] * len(block)

    def row_size(self, layout: Layout) -> int:
        return self._stored()._body_size(layout)

    def to_rows(self, v: Tensor, layout: Layout) -> Tensor:
        return torch.from_numpy(self._stored()._bodies(checked(v, layout), layout, [0] * len(v)))

    def from_rows(self, rows: Tensor, layout: Layout) -> Tensor:
        stored = self._stored()
        return torch.from_numpy(stored._values(stored._parse(rows.numpy(), layout), layout))

    def _stored(self) -> LayerCodec:
        """This codec as it stores vectors in memory: biases are quantized as well."""
        if self.stochastic:
            raise self._no_rows()
        return replace(self, biases="quantise")

    def _split(self, layout: Layout) -> tuple[list[Slot], list[Slot]]:
        """The layers that travel as float32, and those that are quantized."""
        slots = [s for s in layout if s.size]
        return [s for s in slots if not self._quantized(s)], [s for s in slots if self._quantized(s)]

    def _walk(self, coded: list[Slot], sides: F32) -> Iterator[tuple[int, int, F32]]:
        """Where each segment starts and ends, and its side numbers."""
        a = at = 0
        for n in self._segments(coded):
            count = self._sides(n)
            yield a, a + n, sides[:, at : at + count]
            a, at = a + n, at + count

    def _chunks(self, n: int, side: F32) -> Iterator[tuple[int, int, F32]]:
        """A segment of n numbers in chunks that fit the cache, each with the side numbers it needs."""
        return ((i, min(i + CHUNK, n), side) for i in range(0, n, CHUNK))

    def _quantize(self, block: F32, coded: list[Slot], seeds: Sequence[int]) -> tuple[F32, Codes]:
        """The side numbers and the codes of a block's quantized layers."""
        m, q = len(block), _numbers(coded)
        noise = self._noise(seeds, q)
        sides = np.empty((m, sum(self._sides(n) for n in self._segments(coded))), np.float32)
        codes = np.empty((m, q), code_type(self.width))
        for w, (a, b, side) in zip(self._stretches(block, coded), self._walk(coded, sides)):
            side[:] = self._measure(w, seeds)
            for i, j, chunk_side in self._chunks(b - a, side):
                bits = None if noise is None else noise[:, a + i : a + j]
                codes[:, a + i : a + j] = self._to_codes(w[:, i:j], chunk_side, bits)
        return sides, codes

    def _dequantize(self, sides: F32, codes: Codes, coded: list[Slot], out: F32) -> None:
        """Write the numbers that codes stand for to their layers of a block."""
        stretches = self._stretches(out, coded)
        for w, (a, b, side) in zip(stretches, self._walk(coded, sides)):
            for i, j, chunk_side in self._chunks(b - a, self._received(side, b - a)):
                w[:, i:j] = self._to_values(codes[:, a + i : a + j], chunk_side)
        self._put_back(stretches, coded, out)

    def _bodies(self, block: F32, layout: Layout, seeds: Sequence[int]) -> U8:
        """The bodies `[m, size]` of a block."""
        raw, coded = self._split(layout)
        sides, codes = self._quantize(block, coded, seeds)
        return np.concatenate(
            [_as_bytes(gather(block, raw)), _as_bytes(sides), pack(codes, self.width)], axis=1
        )

    def _parse(self, bodies: U8, layout: Layout) -> Parsed:
        raw, coded = self._split(layout)
        a = 4 * _numbers(raw)
        b = a + 4 * sum(self._sides(n) for n in self._segments(coded))
        packed = bodies[:, b:]
        codes = unpack(packed, self.width, _numbers(coded))
        return Parsed(_as_floats(bodies[:, :a]), _as_floats(bodies[:, a:b]), codes, packed)

    def _values(self, bodies: Parsed, layout: Layout) -> F32:
        raw, coded = self._split(layout)
        out = np.empty((len(bodies.codes), layout.size), np.float32)
        scatter(bodies.raw, raw, out)
        self._dequantize(bodies.sides, bodies.codes, coded, out)
        return out


def _numbers(slots: list[Slot]) -> int:
    return sum(s.size for s in slots)


def gather(block: F32, slots: list[Slot]) -> F32:
    """These layers of a block, side by side."""
    if not slots:
        return np.empty((len(block), 0), np.float32)
    return np.concatenate([block[:, s.offset : s.end] for s in slots], axis=1)


def scatter(w: F32, slots: list[Slot], out: F32) -> None:
    """The inverse of `gather`, into a block."""
    a = 0
    for s in slots:
        out[:, s.offset : s.end] = w[:, a : a + s.size]
        a += s.size


def _as_bytes(numbers: F32) -> U8:
    m, n = numbers.shape
    return numbers.astype("<f4", copy=False).view(np.uint8).reshape(m, 4 * n)


def _as_floats(data: U8) -> F32:
    m, n = data.shape
    return np.ascontiguousarray(data).view("<f4").reshape(m, n // 4).astype(np.float32, copy=False)
