"""Local test sets held out of the clients' samples, stratified by label, by counted randomness."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core import rng
from fedbraid.core.check import number
from fedbraid.data import tree
from fedbraid.data.tree import Padded, Tree
from fedbraid.errors import DataError

Ints = NDArray[np.int64]


def hold_out(
    rows: Tensor, offsets: Ints, targets: Tree, fraction: float, seed: int
) -> tuple[Tensor, Ints, Tensor, Ints]:
    """(training rows, their offsets, test rows, their offsets): each client loses this fraction of its samples.

    A client's draw is a function of (seed, client). Every client keeps at least one training sample, so that a
    client of one sample has no local test set.
    """
    number("test_fraction", fraction, "(0, 1)", "leaves no training or no test samples")
    kinds = _labels(targets)
    train, test = [], []
    for client, (lo, hi) in enumerate(pairwise(offsets)):
        local = rows[lo:hi].numpy()
        tested = _drawn(None if kinds is None else kinds[local], len(local), fraction, seed, client)
        train.append(local[~tested])
        test.append(local[tested])
    if not any(map(len, test)):
        raise DataError(
            f"test_fraction={fraction} of clients with at most {int(np.diff(offsets).max())} samples holds out"
            " none; use a larger fraction"
        )
    return *_joined(train), *_joined(test)


def _labels(targets: Tree) -> NDArray[Any] | None:
    """Class numbers to stratify by, where targets are those."""
    plain = isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point()
    return targets.numpy() if plain else None


def _drawn(labels: NDArray[Any] | None, n: int, fraction: float, seed: int, client: int) -> NDArray[np.bool_]:
    """Which of a client's samples are test samples: of each label the integer count nearest to the fraction."""
    gen = rng.generator(seed, "test fraction", client)
    order = gen.permutation(n)
    kinds = np.zeros(n, np.int64) if labels is None else np.unique(labels, return_inverse=True)[1].reshape(-1)
    expected = np.bincount(kinds) * fraction
    count = np.floor(expected + 1e-9).astype(np.int64)
    more = min(round(fraction * n), n - 1) - int(count.sum())
    if more > 0:  # the largest remainders, ties in a drawn order
        tie = gen.permutation(len(expected))
        count[tie[np.argsort((count - expected)[tie], kind="stable")][:more]] += 1
    is_test = np.zeros(n, np.bool_)
    for kind, k in enumerate(count):
        is_test[order[kinds[order] == kind][:k]] = True
    return is_test


def _joined(rows: list[Ints]) -> tuple[Tensor, Ints]:
    return torch.from_numpy(np.concatenate(rows)), np.cumsum([0, *map(len, rows)])


def take_rows(table: Tree, rows: Tensor) -> Tree:
    """Rows of a table, padded leaves with their lengths."""
    return tree.map(
        lambda leaf: (
            Padded(leaf.values[rows], leaf.lengths[rows]) if isinstance(leaf, Padded) else leaf[rows]
        ),
        table,
    )
