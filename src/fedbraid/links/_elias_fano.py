"""k of d positions in order, in about log2(d/k) + 2 bits each: Elias and Fano's code, or a bitmap.

Each position is cut into a high part and `low` low bits. The low bits are packed as they are; the high parts,
which never fall, are a line of bits with a one for each position and a zero for each step up. For one in a
hundred that is 8.6 bits a position, where ⌈log2 d⌉ would be 22 for two million, and the entropy is 8.1. The
length depends on k and d alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedbraid.errors import WireError
from fedbraid.links import _bitpacking as bits
from fedbraid.links.wire import U8

I64 = NDArray[np.int64]


def size(k: int, d: int) -> int:
    """The bytes that k of d positions take."""
    low = _low(k, d)
    return -(-d // 8) if low is None else _low_size(k, low) + _high_size(k, d, low)


def pack(at: I64, d: int) -> U8:
    """Positions, strictly rising and below d, as bytes."""
    low = _low(len(at), d)
    if low is None:
        return _line(at, d)
    lines = [_line((at >> low) + np.arange(len(at)), len(at) + (d >> low) + 1)]
    if low:
        lines.insert(0, _pack_low(at & ((1 << low) - 1), low))
    return np.concatenate(lines)


def unpack(data: U8, k: int, d: int) -> I64:
    """The k positions in `size(k, d)` bytes, refused unless they rise and stay below d."""
    low = _low(k, d)
    if low is None:
        return _ones(data, d, k)
    cut = _low_size(k, low)
    at = _ones(data[cut:], k + (d >> low) + 1, k) - np.arange(k)
    if low:
        at = at << low | _unpack_low(data[:cut], low, k)
    if k and (at[-1] >= d or (np.diff(at) <= 0).any()):
        raise WireError(
            f"message has positions out of order or beyond {d}; it is corrupt or from a hostile sender"
        )
    return at


def _low(k: int, d: int) -> int | None:
    """How many low bits make the code shortest; None where a bitmap of d bits is no longer."""
    low = max((d // k).bit_length() - 1, 0) if k else 0
    return None if k * (low + 1) + (d >> low) >= d else low


def _low_size(k: int, low: int) -> int:
    return sum(bits.packed_size(k, width) for width in _widths(low))


def _high_size(k: int, d: int, low: int) -> int:
    return -(-(k + (d >> low) + 1) // 8)


def _widths(low: int) -> list[int]:
    """The widths in which low bits are packed: above 16 bits, 16 and the rest."""
    return [w for w in (min(low, 16), low - 16) if w > 0]


def _pack_low(low_bits: I64, low: int) -> U8:
    shifts = zip(_widths(low), (0, 16))
    codes = [((low_bits >> shift) & ((1 << w) - 1)).astype(bits.code_type(w)) for w, shift in shifts]
    return np.concatenate([bits.pack(c[None], w)[0] for c, w in zip(codes, _widths(low))])


def _unpack_low(data: U8, low: int, k: int) -> I64:
    low_bits = np.zeros(k, np.int64)
    for w, shift in zip(_widths(low), (0, 16)):
        packed, data = np.split(data, [bits.packed_size(k, w)])
        if bits.spare_bits(packed[None], w, k):
            raise WireError(
                "message sets bits after its last position; it is corrupt or from a hostile sender"
            )
        low_bits |= bits.unpack(packed[None], w, k)[0].astype(np.int64) << shift
    return low_bits


def _line(ones: I64, length: int) -> U8:
    """A line of bits with ones at these offsets."""
    line = np.zeros(length, np.uint8)
    line[ones] = 1
    return np.packbits(line)


def _ones(data: U8, length: int, count: int) -> I64:
    """Where the ones are in a line of bits, refused unless there are `count`."""
    ones = np.flatnonzero(np.unpackbits(data))
    if len(ones) != count or (count and ones[-1] >= length):
        raise WireError(
            f"message marks {len(ones)} positions, not {count}; it is corrupt or from a hostile sender"
        )
    return ones
