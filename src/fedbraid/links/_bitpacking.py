"""Packing small whole numbers without a bit to spare: one after the other, the most significant bit first.

Eight numbers of n bits fill n bytes. Neighbours are folded together inside 64-bit words, a few operations on
whole arrays and no loop over elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbraid.links.wire import U8

Words = NDArray[np.uint64]
Codes = NDArray[np.uint8] | NDArray[np.uint16]


def code_type(bits: int) -> np.dtype[Any]:
    """The unsigned type that holds one code: a byte up to 8 bits, two up to 16."""
    return np.dtype("<u1" if bits <= 8 else "<u2")


def packed_size(count: int, bits: int) -> int:
    return (count * bits + 7) // 8


def pack(codes: Codes, bits: int) -> U8:
    """Codes `[m, q]` below 2^bits as bytes `[m, packed_size]`; what is left of the last byte is zero."""
    m, q = codes.shape
    if bits == 8:
        return codes.astype(np.uint8, copy=False)
    if bits == 16:
        return codes.astype(">u2").view(np.uint8).reshape(m, 2 * q)
    if q % 8:
        codes = np.concatenate([codes, np.zeros((m, -q % 8), codes.dtype)], axis=1)
    return _squeeze(codes.view("<u8").reshape(-1), bits).reshape(m, -1)[:, : packed_size(q, bits)]


def unpack(data: U8, bits: int, count: int) -> Codes:
    """The `count` codes in each row of bytes."""
    m = len(data)
    if bits == 8:
        return data
    if bits == 16:
        return np.ascontiguousarray(data).view(">u2").astype("<u2")
    groups = -(-count // 8)
    if data.shape[1] < groups * bits:
        data = np.concatenate([data, np.zeros((m, groups * bits - data.shape[1]), np.uint8)], axis=1)
    words = _spread(data.reshape(m * groups, bits), bits)
    return words.view(code_type(bits)).reshape(m, groups * 8)[:, :count]


def spare_bits(data: U8, bits: int, count: int) -> bool:
    """Whether a bit after the last code is set, in any row."""
    spare = data.shape[1] * 8 - count * bits
    return bool(spare) and bool((data[:, -1] & ((1 << spare) - 1)).any())


def _squeeze(words: Words, bits: int) -> U8:
    """Words of eight bytes or four pairs of bytes, one code in each, to `bits` bytes for eight codes."""
    if bits in (1, 2, 4):
        for lane, width in _doublings(bits):
            words = _fold(words, lane, width)
        return words.view(f"<u{8 // bits}").astype(np.uint8)
    if bits < 8:
        word = _fold(_fold(_fold(words, 8, bits), 16, 2 * bits), 32, 4 * bits)
        return _big(word, bits)
    halves = _fold(_fold(words, 16, bits), 32, 2 * bits).reshape(-1, 2)  # two halves of 4·bits each
    over = 8 * bits - 64  # what a group of eight has beyond one word
    first = halves[:, 0] << np.uint64(64 - 4 * bits) | halves[:, 1] >> np.uint64(over)
    return np.concatenate([_big(first, 8), _big(halves[:, 1], bits - 8)], axis=1)


def _spread(rows: U8, bits: int) -> Words:
    """The inverse of `_squeeze`, from rows of `bits` bytes."""
    if bits in (1, 2, 4):
        words = rows.reshape(-1).astype(f"<u{8 // bits}").view("<u8")
        for lane, width in reversed(_doublings(bits)):
            words = _unfold(words, lane, width)
        return words
    if bits < 8:
        return _unfold(_unfold(_unfold(_word(rows), 32, 4 * bits), 16, 2 * bits), 8, bits)
    over = 8 * bits - 64
    first, rest = _word(rows[:, :8]), _word(rows[:, 8:])
    mask = np.uint64((1 << 4 * bits) - 1)
    halves = np.stack([first >> np.uint64(64 - 4 * bits), (first << np.uint64(over) | rest) & mask], axis=1)
    return _unfold(_unfold(halves.reshape(-1), 32, 2 * bits), 16, bits)


def _doublings(bits: int) -> list[tuple[int, int]]:
    """(lane, width) of the folds that make bytes of codes of 1, 2 or 4 bits."""
    return [(8 << i, bits << i) for i in range(3) if bits << i < 8]


def _fold(words: Words, lane: int, width: int) -> Words:
    """In every two lanes, the lower one (earlier in memory) moves up by `width` to take in the higher."""
    low = _mask(lane, 2 * lane)
    out = words & low
    out <<= np.uint64(width)
    higher = words >> np.uint64(lane)
    higher &= low
    out |= higher
    return out


def _unfold(words: Words, lane: int, width: int) -> Words:
    """The inverse of `_fold`."""
    keep = _mask(width, 2 * lane)
    out = words & keep
    out <<= np.uint64(lane)
    upper = words >> np.uint64(width)
    upper &= keep
    out |= upper
    return out


def _mask(ones: int, every: int) -> np.uint64:
    """So many ones at the foot of every so many bits."""
    return np.uint64(sum(((1 << ones) - 1) << at for at in range(0, 64, every)))


def _big(words: Words, size: int) -> U8:
    """The last `size` bytes of each number, the most significant first."""
    wide = words.astype(">u8").view(np.uint8).reshape(-1, 8)
    return _moved(wide, np.empty((len(words), size), np.uint8), 8 - size, 0)


def _moved(rows: U8, out: U8, source: int, target: int) -> U8:
    """Columns from `source` on to columns from `target` on; by columns is thrice as fast as by rows."""
    for j in range(min(rows.shape[1] - source, out.shape[1] - target)):
        out[:, target + j] = rows[:, source + j]
    return out


def _word(rows: U8) -> Words:
    """Rows of up to eight bytes, the first the most significant, as numbers."""
    wide = _moved(rows, np.zeros((len(rows), 8), np.uint8), 0, 8 - rows.shape[1])
    return wide.view(">u8").reshape(-1).astype("<u8")
