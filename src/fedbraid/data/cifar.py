"""CIFAR-10 and CIFAR-100, from parquet or the binary version.

The "python version" is a pickle, which can run whatever code somebody put into it: it is never opened.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedbraid.data.augment import FlipCrop
from fedbraid.data.dataset import Bytes, DataSet, class_numbers, normalized
from fedbraid.data.formats import cifar_binary, images, parquet
from fedbraid.data.sources import Home, Root, cached, hub
from fedbraid.errors import DataError

_ORIGIN = "https://www.cs.toronto.edu/~kriz/cifar.html"
_NOT = "; the python version is a pickle and not read"
CIFAR10 = Home(
    "cifar10",
    ("cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-bin", "cifar10/plain_text", "plain_text"),
    "the binary version's data_batch_1.bin to data_batch_5.bin and test_batch.bin",
    _ORIGIN + _NOT,
)
CIFAR100 = Home(
    "cifar100",
    ("cifar-100-binary", "cifar100", "cifar100/cifar-100-binary", "cifar100/cifar100", "cifar100-subset"),
    "the binary version's train.bin and test.bin",
    _ORIGIN + _NOT,
)

Split = tuple[Bytes, Bytes]  # images, and one or two columns of labels, the fine one last


def cifar10(root: Root = None, augment: bool | str = False, statistics: str = "own") -> DataSet:
    """50,000 and 10,000 photographs of ten classes; `augment=True` flips and shifts those trained on.

    `augment="batch"` draws once for each batch.
    Images are normalized by `statistics`: "own" (of the training images), those of "cifar10", or "none".
    """
    train = _binary(CIFAR10, root, "data_batch_?.bin", 1) or _parquet(CIFAR10, root, "train*", ("label",))
    test = _binary(CIFAR10, root, "test_batch.bin", 1) or _parquet(CIFAR10, root, "test*", ("label",))
    if train is None or test is None:
        train, test = _fetched(CIFAR10, root, "uoft-cs/cifar10", ("label",))
    return _dataset(train, test, 10, augment, statistics)


def cifar100(root: Root = None, augment: bool | str = False, statistics: str = "own") -> DataSet:
    """Photographs of 100 fine classes in 20 coarse ones; `augment=True` flips and shifts those trained on.

    FedGBO's authors normalize them by the `statistics` of "cifar10"; "own" and "none" mean the same as in `cifar10`.
    """
    labels = ("coarse_label", "fine_label")
    train = _binary(CIFAR100, root, "train.bin", 2) or _parquet(CIFAR100, root, "train*", labels)
    test = _binary(CIFAR100, root, "test.bin", 2) or _parquet(CIFAR100, root, "test*", labels)
    if train is None or test is None:
        train, test = _fetched(CIFAR100, root, "uoft-cs/cifar100", labels)
    return _dataset(train, test, 100, augment, statistics)


def _binary(home: Home, root: Root, pattern: str, labels: int) -> Split | None:
    files = home.find(root, pattern)
    return cifar_binary(files, labels) if files else None


def _parquet(home: Home, root: Root, pattern: str, labels: tuple[str, ...]) -> Split | None:
    """From parquet files with an `img` column; decoding all takes about 10 s, so it is done once."""
    files = home.find(root, f"{pattern}.parquet")
    if not files:
        return None
    pixels = cached(files, lambda: np.concatenate([_pixels(f) for f in files]))
    named = parquet(files, labels)
    return pixels, np.stack([np.asarray(column) for column in named], 1)


def _pixels(file: Path) -> Bytes:
    (blobs,) = parquet([file], ("img",))
    return images(blobs, file)


def _fetched(home: Home, root: Root, repository: str, labels: tuple[str, ...]) -> tuple[Split, Split]:
    splits = hub(repository, ("img", *labels))
    if splits is None:
        raise home.missing(root)
    train, test = ((split[0], np.stack(split[1:], 1)) for split in (splits["train"], splits["test"]))
    return train, test


def _dataset(train: Split, test: Split, classes: int, augment: bool | str, statistics: str) -> DataSet:
    for pixels, labels in (train, test):
        if pixels.shape != (len(labels), 32, 32, 3):
            raise DataError(f"CIFAR images must be 32×32 in color, one per label; found {pixels.shape}")
    inputs, test_inputs = normalized(train[0], test[0], statistics)
    y, yt = class_numbers(train[1]), class_numbers(test[1])
    coarse = y[:, 0].numpy() if y.shape[1] == 2 else None
    return DataSet(
        inputs,
        y[:, -1].contiguous(),
        (test_inputs, yt[:, -1].contiguous()),
        classes,
        coarse=coarse,
        augment=FlipCrop(per="batch" if augment == "batch" else "sample") if augment else None,
    )
