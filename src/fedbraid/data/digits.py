"""The 1,797 UCI digits of 8×8 pixels that ship inside the package (attribution in files/DIGITS.txt)."""

from __future__ import annotations

from importlib import resources

import numpy as np

from fedbraid.data.dataset import DataSet, class_numbers, held_out, normalized


def read() -> DataSet:
    """1,438 and 359 handwritten digits of 8 × 8 pixels, inside the package; split at random once and for all."""
    with resources.files("fedbraid.data").joinpath("files/digits.npz").open("rb") as f:
        stored = np.load(f, allow_pickle=False)
        x, y = stored["images"], stored["labels"]
    train, test = held_out(len(x), 0.2, "digits")
    inputs, test_inputs = normalized(x[train], x[test])
    return DataSet(inputs, class_numbers(y[train]), (test_inputs, class_numbers(y[test])), classes=10)
