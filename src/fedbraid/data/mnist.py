"""MNIST, Fashion-MNIST and EMNIST Letters: grey images of 28×28 in idx files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedbraid.data.dataset import Bytes, DataSet, class_numbers, normalized
from fedbraid.data.formats import idx, images, parquet
from fedbraid.data.sources import Home, Root, hub
from fedbraid.errors import DataError

_FOUR = "{train,t10k}-images-idx3-ubyte.gz and {train,t10k}-labels-idx1-ubyte.gz"
MNIST = Home("mnist", ("mnist", "MNIST/raw", "mnist/mnist"), _FOUR, "https://yann.lecun.com/exdb/mnist")
FMNIST = Home(
    "fmnist",
    ("fashion-mnist", "FashionMNIST/raw", "fmnist", "fashion_mnist/fashion_mnist"),
    _FOUR,
    "https://github.com/zalandoresearch/fashion-mnist",
)
EMNIST = Home(
    "emnist",
    ("emnist", "EMNIST/raw", "emnist-letters-subset"),
    "the four emnist-letters-*-ubyte.gz files",
    "https://www.nist.gov/itl/products-and-services/emnist-dataset",
)

Pair = tuple[Bytes, Bytes]


def mnist(root: Root = None, statistics: str = "own") -> DataSet:
    """60,000 and 10,000 handwritten digits, normalized by their "own" `statistics` or by "none"."""
    return _ten_classes(MNIST, "ylecun/mnist", root, statistics)


def fmnist(root: Root = None, statistics: str = "own") -> DataSet:
    """60,000 and 10,000 pieces of clothing, normalized by their "own" `statistics` or by "none"."""
    return _ten_classes(FMNIST, "zalando-datasets/fashion_mnist", root, statistics)


def emnist(root: Root = None) -> DataSet:
    """EMNIST Letters: 26 classes, A and a being 0. Official files, which lie on their side, are turned."""
    official = [_idx_pair(EMNIST, root, f"emnist-letters-{split}") for split in ("train", "test")]
    if official[0] and official[1]:
        (x, y), (xt, yt) = official[0], official[1]
        return _dataset((x.swapaxes(1, 2), y - 1), (xt.swapaxes(1, 2), yt - 1), 26)
    train, test = _idx_pair(EMNIST, root, "train"), _idx_pair(EMNIST, root, "test")
    if not train or not test:
        raise EMNIST.missing(root)
    return _dataset((train[0], train[1] - 1), (test[0], test[1] - 1), 26)


def _ten_classes(home: Home, repository: str, root: Root, statistics: str) -> DataSet:
    train = _idx_pair(home, root, "train") or _parquet_pair(home, root, "train")
    test = _idx_pair(home, root, "t10k") or _parquet_pair(home, root, "test")
    if train and test:
        return _dataset(train, test, 10, statistics)
    if fetched := hub(repository, ("image", "label")):
        return _dataset(
            (fetched["train"][0], fetched["train"][1]),
            (fetched["test"][0], fetched["test"][1]),
            10,
            statistics,
        )
    raise home.missing(root)


def _idx_pair(home: Home, root: Root, split: str) -> Pair | None:
    """Images and labels of a split, packed or not, with a dash or a dot before `idx`."""
    x = home.find(root, f"{split}-images[-.]idx3-ubyte.gz", f"{split}-images[-.]idx3-ubyte")
    y = home.find(root, f"{split}-labels[-.]idx1-ubyte.gz", f"{split}-labels[-.]idx1-ubyte")
    if not x or not y:
        return None
    pixels, labels = idx(x[0]), idx(y[0])
    if pixels.ndim != 3 or labels.shape != pixels.shape[:1]:
        shapes = f"{pixels.shape} and {labels.shape}"
        raise DataError(
            f"{x[0]} and {y[0]} hold arrays of {shapes}, not images and as many labels; get them again"
        )
    return pixels, labels


def _parquet_pair(home: Home, root: Root, split: str) -> Pair | None:
    files: list[Path] = home.find(root, f"{split}*.parquet")
    if not files:
        return None
    blobs, labels = parquet(files, ("image", "label"))
    return images(blobs, files[0]), np.asarray(labels)


def _dataset(train: Pair, test: Pair, classes: int, statistics: str = "own") -> DataSet:
    inputs, test_inputs = normalized(train[0], test[0], statistics)
    return DataSet(inputs, class_numbers(train[1]), (test_inputs, class_numbers(test[1])), classes)
