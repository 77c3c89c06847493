"""What a data set is before clients share it: one table of samples and a test set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core import rng
from fedbraid.data.augment import Augment
from fedbraid.data.partition import Table
from fedbraid.errors import DataError, unknown

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class DataSet:
    """Samples, targets and a test set, and whose they are where the data says so."""

    inputs: Tensor
    targets: Tensor  # int64 class numbers
    test: tuple[Tensor, Tensor]
    classes: int
    rows: Ints | None = None  # the rows that are training samples, where not all are
    groups: Ints | None = None  # whose each training sample is
    test_groups: Ints | None = None  # and each test sample
    coarse: Ints | None = None
    vocab: int | None = None  # how many kinds of token, where inputs are tokens
    augment: Augment | None = None

    @property
    def table(self) -> Table:
        """What a partition of the training samples may look at."""
        labels = self.targets if self.rows is None else self.targets[torch.from_numpy(self.rows)]
        return Table(labels.numpy(), self.groups, self.coarse)

    @property
    def facts(self) -> dict[str, int]:
        """What a model can be told about its inputs and outputs."""
        shape = self.inputs.shape[1:]
        facts = {"classes": self.classes, "features": math.prod(shape)}
        if len(shape) == 3:
            facts |= {"channels": shape[0], "size": shape[-1]}
        if self.vocab is not None:
            facts["vocab"] = self.vocab
        return facts


# Mean and deviation by channel, of levels from 0 to 255.
STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((125.3, 122.95, 113.87), (62.99, 62.09, 66.7)),
    "none": ((0.0,), (255.0,)),
}


def normalized(train: Bytes, test: Bytes, statistics: str = "own") -> tuple[Tensor, Tensor]:
    """Bytes `[n, h, w]` or `[n, h, w, c]` as float32 `[n, c, h, w]`, of training mean 0 and deviation 1.

    `statistics` names whose mean and deviation are used: "own" is the training images'; with "none" images are levels from 0 to 1.
    """
    train, test = (x[..., None] if x.ndim == 3 else x for x in (train, test))
    shapes = train.shape[1:], test.shape[1:]
    if shapes[0] != shapes[1]:
        raise DataError(
            f"train images are {shapes[0]} but test images {shapes[1]}; get the files of one data set"
        )
    if not len(train) or not len(test):
        raise DataError(f"there are {len(train)} train and {len(test)} test images; get the files again")
    if statistics != "own":
        if statistics not in STATISTICS:
            raise unknown("statistics", statistics, ["own", *STATISTICS])
        mean, std = (np.array(v) for v in STATISTICS[statistics])
        return _scaled(train, mean, std), _scaled(test, mean, std)
    counts = np.stack([_histogram(train[..., c]) for c in range(train.shape[-1])])
    fraction, level = counts / counts.sum(1, keepdims=True), np.arange(256)
    mean = fraction @ level
    std = np.sqrt(fraction @ level**2 - mean**2)
    return _scaled(train, mean, std), _scaled(test, mean, std)


def _histogram(x: Bytes) -> Ints:
    """How often each of 256 levels occurs; in slices, because bincount copies each number to eight bytes."""
    counts = np.zeros(256, np.int64)
    for piece in np.array_split(x, len(x) // 1024 + 1):
        counts += np.bincount(piece.ravel(), minlength=256)
    return counts


def _scaled(x: Bytes, mean: NDArray[Any], std: NDArray[Any]) -> Tensor:
    out = torch.empty((len(x), x.shape[3], x.shape[1], x.shape[2]), dtype=torch.float32)
    np.copyto(out.numpy(), x.transpose(0, 3, 1, 2))
    shape = (1, -1, 1, 1)
    out -= torch.from_numpy(mean).float().view(shape)
    out /= torch.from_numpy(np.maximum(std, 1e-12)).float().view(shape)
    return out


def class_numbers(labels: Any) -> Tensor:
    """Labels as int64."""
    try:
        return torch.from_numpy(np.asarray(labels).astype(np.int64))
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"the labels are not integers ({error}); get the files again") from error


def held_out(n: int, fraction: float, name: str) -> tuple[Ints, Ints]:
    """A fixed random split into training and test rows, the same whatever the run's seed."""
    order = rng.generator(0, f"held out of {name}").permutation(n)
    cut = n - round(fraction * n)
    return np.sort(order[:cut]), np.sort(order[cut:])


def group_numbers(train: Any, test: Any) -> tuple[Ints, Ints]:
    """Client numbers for the ids of training and test samples; −1 for a test id that never trains."""
    ids, groups = np.unique(np.asarray(train), return_inverse=True)
    test = np.asarray(test)
    at = np.searchsorted(ids, test).clip(max=len(ids) - 1)
    return groups.astype(np.int64), np.where(ids[at] == test, at, -1)
