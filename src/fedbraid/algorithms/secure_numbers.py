"""What one client masks, and what its server reads off a sum: a gather's codes and numbers in one row.

The row is the codes of every vector, then the numbers: what is uploaded beside vectors, the weight, how many codes are
saturated, and the training loss, in steps of 2⁻¹⁶. A number is cut into pieces as small as codes, so that sums of pieces
fit where sums of codes do.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from fedbraid.algorithms.secure import CodeSums, SecureMean, code_key, pieces
from fedbraid.core.context import Uploads
from fedbraid.links.secure import FRACTION, fixed

Row = NDArray[np.int64]


def numbers_of(sums: SecureMean, up: Uploads, loss: float) -> Row:
    """The row of a lone client, as it weighs in the step that `up.staleness` tells of."""
    acc = sums.add(sums.zero(up.sent["x"][0]), up, {}, up.sent["x"][0])
    ((bits, _),) = acc.clients
    codes = [acc.vectors[key].cpu().numpy() for key in _vectors(sums, bits)]
    beside = [acc.vectors[key].cpu().numpy() for key, _ in _numbers(sums, bits)]
    facts = fixed(torch.tensor([acc.weight, float(acc.saturated), loss], dtype=torch.float64))
    return np.concatenate([*codes, _cut(np.concatenate([*beside, facts.long().numpy()]), bits)])


def sums_of(sums: SecureMean, row: Row, bits: int, clients: int, samples: float) -> tuple[CodeSums, float]:
    """(what the gather would have folded of these clients, their mean loss)."""
    count = pieces(bits)
    numbers = _joined(row[len(row) - count * _count(sums) :], bits)
    vectors, keys = {}, list(_vectors(sums, bits))
    size = (len(row) - count * _count(sums)) // len(keys)
    for i, key in enumerate(keys):
        vectors[key] = torch.from_numpy(row[i * size : (i + 1) * size].copy())
    at = 0
    for key, width in _numbers(sums, bits):
        vectors[key], at = torch.tensor(numbers[at : at + width]), at + width
    weight, saturated, loss = (n / FRACTION for n in numbers[at:])
    names = sum(what.width is None for what in sums.uploads.values())
    acc = CodeSums(
        vectors, weight, clients, frozenset(), samples, round(saturated), clients * names * size, ((bits, clients),)
    )  # fmt: skip
    return acc, loss / clients


def _vectors(sums: SecureMean, bits: int) -> Iterator[str]:
    for name, what in sums.uploads.items():
        if what.width is None:
            yield from (code_key(name, uniform, bits) for uniform in sums.weighings(what))


def _numbers(sums: SecureMean, bits: int) -> Iterator[tuple[str, int]]:
    for name, what in sums.uploads.items():
        if what.width is not None:
            yield code_key(name, what.uniform, bits), what.width


def _count(sums: SecureMean) -> int:
    return 3 + sum(width for _, width in _numbers(sums, 2))


def _cut(numbers: Row, bits: int) -> Row:
    """Each number as its lowest bits − 1 bits, the next ones, and so on; the last piece has the sign."""
    shifts = (bits - 1) * np.arange(pieces(bits))
    cut = numbers[:, None] >> shifts
    cut[:, :-1] &= (1 << bits - 1) - 1
    flat: Row = cut.ravel()
    return flat


def _joined(row: Row, bits: int) -> list[int]:
    """The numbers that sums of pieces stand for, of any size."""
    rows = row.reshape(-1, pieces(bits)).tolist()
    return [sum(piece << (bits - 1) * j for j, piece in enumerate(each)) for each in rows]
