"""Counted randomness: every draw is a function of (seed, purpose, counters…), never of a stream's position.

So results do not depend on block size, number of processes, engine, or on being stopped and resumed.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_64, _INT_GOLDEN, _INT_MIX1, _INT_MIX2 = 2**64 - 1, int(_GOLDEN), int(_MIX1), int(_MIX2)


@lru_cache(maxsize=256)
def _tag(seed: int, purpose: str) -> np.uint64:
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
    return np.frombuffer(digest, np.uint64)[0]  # type: ignore[no-any-return]


def _mix(z: U64) -> U64:
    """The finaliser of SplitMix64: a bijection of 64 bits that scatters neighbours."""
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    return z ^ (z >> np.uint64(31))


def bits(seed: int, purpose: str, *counters: Any) -> U64:
    """64 random bits for every element of the counters, which broadcast against each other.

    >>> bits(0, "demo", 3, np.arange(4)).shape
    (4,)
    """
    with np.errstate(over="ignore"):
        h = np.atleast_1d(_tag(seed, purpose))
        for c in counters:
            h = _mix(h + (np.asarray(c).astype(np.uint64) + np.uint64(1)) * _GOLDEN)
        return h


def uniform(seed: int, purpose: str, *counters: Any) -> NDArray[np.float64]:
    """A number in [0, 1) for every element of the counters."""
    return (bits(seed, purpose, *counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def key(seed: int, purpose: str, *counters: int) -> int:
    """One 63-bit integer, to seed somebody else's generator with: half of `bits`, in plain numbers.

    >>> key(0, "demo", 3, 1) == int(bits(0, "demo", 3, 1)[0]) >> 1
    True
    """
    h = int(_tag(seed, purpose))
    for c in counters:
        h = h + (int(c) + 1) * _INT_GOLDEN & _64
        h = (h ^ h >> 30) * _INT_MIX1 & _64
        h = (h ^ h >> 27) * _INT_MIX2 & _64
        h ^= h >> 31
    return h >> 1


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """A NumPy generator of its own for this purpose and these counters, for long draws."""
    return np.random.Generator(np.random.SFC64(key(seed, purpose, *counters)))


def normal(seed: int, purpose: str, count: int, *counters: int) -> NDArray[np.float32]:
    """So many standard normal numbers of this purpose and these counters."""
    return generator(seed, purpose, *counters).standard_normal(count, dtype=np.float32)


def _mix32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Wellons' mix of 32 bits."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def gaussian(keys: U64, count: int) -> NDArray[np.float32]:
    """So many standard normal numbers for every key, `[m, count]`, as compiled code makes them to rounding."""
    half = (count + 1) // 2
    low, high = (keys.astype(np.uint32)[:, None], (keys >> np.uint64(32)).astype(np.uint32)[:, None])
    with np.errstate(over="ignore"):
        at = np.arange(half, dtype=np.uint32) ^ low
        u, w = (_mix32(_mix32(at ^ np.uint32(c)) ^ high) for c in (0, 0x9E3779B9))
    share = ((u >> np.uint32(1)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31)
    radius = np.sqrt(np.float32(-2) * np.log(share))
    angle = w.view(np.int32).astype(np.float32) * np.float32(2 * np.pi * 2.0**-32)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], 1)[:, :count]


def unpredicted(count: int) -> NDArray[np.float64]:
    """So many numbers in [0, 1) from the operating system's generator."""
    words = np.frombuffer(os.urandom(8 * count), np.uint64)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def unpredictable(count: int) -> NDArray[np.float64]:
    """So many standard normal numbers from the operating system's generator, which no seed repeats (Box and Muller)."""
    half = (count + 1) // 2
    words = np.frombuffer(os.urandom(16 * half), np.uint64).reshape(2, half)
    u = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(u[0])), 2 * np.pi * u[1]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
