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

from fedbraid.core import accelerators as passes

U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_64, _INT_GOLDEN, _INT_MIX1, _INT_MIX2 = 2**64 - 1, int(_GOLDEN), int(_MIX1), int(_MIX2)

# Polynomials, highest power first: log(1 + f) (Cephes), sin and cos of 2πf.
LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
    -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
SINE = (42.0586939, -76.7058598, 81.6052493, -41.3417022, 6.28318531)
COSINE = (60.2446414, -85.4568172, 64.9393940, -19.7392088, 1.0)


@lru_cache(maxsize=256)
def _tag(seed: int, purpose: str) -> np.uint64:
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
    return np.frombuffer(digest, np.uint64)[0]  # type: ignore[no-any-return]


def _mix(z: U64) -> U64:
    """The finalizer of SplitMix64: a bijection of 64 bits that scatters neighbours."""
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
    """One 63-bit integer, that seeds another library's generator: half of `bits`, in Python's integers.

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
    """A separate NumPy generator for this purpose and these counters, for long draws."""
    return np.random.Generator(np.random.SFC64(key(seed, purpose, *counters)))


def normal(seed: int, purpose: str, count: int, *counters: Any) -> NDArray[np.float32]:
    """So many standard normal numbers for every element of the counters, `[m, count]`."""
    return gaussian(bits(seed, purpose, *counters), count)


def _mix32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Wellons' mix of 32 bits."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def gaussian(keys: U64, count: int) -> NDArray[np.float32]:
    """So many standard normal numbers for every key, `[m, count]` (Box and Muller)."""
    numbers = passes.normals(keys, count)
    if numbers is not None:
        return numbers
    half = (count + 1) // 2
    low, high = (keys.astype(np.uint32)[:, None], (keys >> np.uint64(32)).astype(np.uint32)[:, None])
    with np.errstate(over="ignore"):
        at = np.arange(half, dtype=np.uint32) ^ low
        u, w = (_mix32(_mix32(at ^ np.uint32(c)) ^ high) for c in (0, 0x9E3779B9))
    fraction = ((u >> np.uint32(1)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31)
    radius = np.sqrt(np.maximum(np.float32(-2) * _log(fraction), np.float32(0)))
    cosine, sine = _circle(w.view(np.int32).astype(np.float32) * np.float32(2.0**-32))
    return np.concatenate([radius * cosine, radius * sine], 1)[:, :count]


def _log(x: F32) -> F32:
    """log of positive numbers, computed from sums and products only, which round alike on every machine."""
    octets = x.view(np.int32) - np.int32(0x3F3504F3)  # so that the fraction lies in [sqrt(1/2), sqrt(2))
    e = (octets >> 23).astype(np.float32)
    f = ((octets & 0x7FFFFF) + np.int32(0x3F3504F3)).view(np.float32) - np.float32(1)
    z, p = f * f, _horner(f, LOG)
    value: F32 = (f + (p * f * z + e * np.float32(-2.12194440e-4) - z * np.float32(0.5))) + e * np.float32(
        0.693359375
    )
    return value


def _circle(turns: F32) -> tuple[F32, F32]:
    """(cosine, sine) of so many turns, computed likewise."""
    quarters = (turns * np.float32(4) + np.float32(12582912)) - np.float32(12582912)
    f = turns - quarters * np.float32(0.25)
    s, c = _horner(f * f, SINE) * f, _horner(f * f, COSINE)
    k = quarters.astype(np.int32).view(np.uint32)
    odd = (k & np.uint32(1)).astype(bool)
    return _signed(np.where(odd, s, c), k + np.uint32(1)), _signed(np.where(odd, c, s), k)


def _signed(x: F32, k: NDArray[np.uint32]) -> F32:
    """x, negated where the second bit of k is set."""
    return (x.view(np.uint32) ^ ((k & np.uint32(2)) << np.uint32(30))).view(np.float32)


def _horner(x: F32, factors: tuple[float, ...]) -> F32:
    value = np.full_like(x, factors[0])
    for factor in factors[1:]:
        value = value * x + np.float32(factor)
    return value


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
