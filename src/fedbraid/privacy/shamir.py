"""Shamir's secret sharing (1979), for byte strings, over the prime field of 2³¹ − 1 elements.

A secret is cut into pieces of 30 bits; piece a₀ becomes the value at 0 of a random polynomial of degree threshold − 1,
and the share of point x its value at x. Any `threshold` shares determine the polynomial, fewer tell nothing of a₀.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from fedbraid.errors import WireError

Ints = NDArray[np.int64]

P = (1 << 31) - 1  # products of two elements fit 62 bits
PIECE = 30


def pieces(size: int) -> int:
    """How many field elements a secret of so many bytes is."""
    return -(-8 * size // PIECE)


def split(secret: bytes, threshold: int, points: Ints) -> Ints:
    """The shares `[points, pieces]` of a secret, drawn with the operating system's generator.

    >>> points = np.array([1, 2, 3])
    >>> shares = split(b"secret", 2, points)
    >>> combine(points[1:], shares[1:], 6)
    b'secret'
    """
    whole, count = int.from_bytes(secret, "little"), pieces(len(secret))
    first = [whole >> PIECE * i & (1 << PIECE) - 1 for i in range(count)]
    shares = np.zeros((len(points), count), np.int64)
    for row in _elements((threshold - 1, count)):  # Horner, from the highest power
        shares = (shares + row) * points[:, None] % P
    return (shares + np.array(first, np.int64)) % P


def combine(points: Ints, shares: Ints, size: int) -> bytes:
    """The secret of so many bytes behind exactly as many shares as its threshold, `[points, pieces]`."""
    values = (lagrange_weights(points)[:, None] * shares % P).sum(0) % P
    whole = sum(int(v) << PIECE * i for i, v in enumerate(values))
    if whole >> 8 * size or (values >> PIECE).any():
        raise WireError(
            "shares do not belong to one secret; a client computed with other shares than it was sent"
        )
    return whole.to_bytes(size, "little")


def lagrange_weights(points: Ints) -> Ints:
    """w_j = Π_{m≠j} x_m/(x_m − x_j): what the value at x_j counts for in the value at 0."""
    top, bottom = np.ones_like(points), np.ones_like(points)
    for m in points:
        other = points != m
        top = top * np.where(other, m, 1) % P
        bottom = bottom * np.where(other, (m - points) % P, 1) % P
    return top * _inverse(bottom) % P


def _inverse(a: Ints) -> Ints:
    """a^(P − 2), by Fermat."""
    out = np.ones_like(a)
    for bit in bin(P - 2)[2:]:
        out = out * out % P
        if bit == "1":
            out = out * a % P
    return out


def _elements(shape: tuple[int, int]) -> Ints:
    """Uniform field elements: 31 random bits each, drawn again where they are P itself."""
    count = shape[0] * shape[1]
    drawn = np.frombuffer(os.urandom(4 * count), "<u4").astype(np.int64) & P
    while (bad := drawn == P).any():
        drawn[bad] = np.frombuffer(os.urandom(4 * int(bad.sum())), "<u4").astype(np.int64) & P
    return drawn.reshape(shape)
