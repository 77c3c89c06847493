"""Mushrooms of LIBSVM: 8,124 rows of 112 binary features, edible or poisonous."""

from __future__ import annotations

import numpy as np
import torch

from fedbraid.data.dataset import DataSet, class_numbers, held_out
from fedbraid.data.formats import broken, libsvm
from fedbraid.data.sources import Home, Root

HOME = Home(
    "mushrooms",
    ("mushrooms", "."),
    "mushrooms (or mushrooms.libsvm.gz)",
    "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html",
)


def read(root: Root = None) -> DataSet:
    """Poisonous or edible, by 112 marks: class 0 is the file's smaller label (1, poisonous), class 1 its larger (2, edible).

    There is no official test set: a fifth of the rows is held out, the same ones for every seed.
    """
    files = HOME.find(root, "mushrooms.libsvm.gz", "mushrooms.libsvm", "mushrooms", "mushrooms.txt")
    if not files:
        raise HOME.missing(root)
    x, labels = libsvm(files[0], features=112)
    kinds, y = np.unique(labels, return_inverse=True)
    if len(kinds) != 2:
        raise broken(files[0], f"it has {len(kinds)} different labels where two are expected")
    train, test = held_out(len(x), 0.2, "mushrooms")
    inputs, targets = torch.from_numpy(x), class_numbers(y)
    return DataSet(inputs[train], targets[train], (inputs[test], targets[test]), classes=2)
