"""FEMNIST of LEAF: handwritten digits and letters of 62 classes, each writer a client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedbraid.data.dataset import Bytes, DataSet, class_numbers, group_numbers, normalized
from fedbraid.data.formats import broken, leaf, parquet
from fedbraid.data.sources import Home, Root

HOME = Home(
    "femnist",
    ("femnist", "femnist/data", "femnist-leaf-subset"),
    "LEAF's train/*.json and test/*.json",
    "https://github.com/TalwalkarLab/leaf",
)


def read(root: Root = None, statistics: str = "own") -> DataSet:
    """Handwritten letters and digits by writer, 62 classes; white on black, as FedGBO turns LEAF's black on white.

    With the `statistics` "leaf" images are as LEAF's own models see them: black on white, levels from 0 to 1.
    """
    (x, y, who), (xt, yt, who_test) = (_split(root, split) for split in ("train", "test"))
    as_leaf = statistics == "leaf"
    inputs, test_inputs = normalized(x, xt, "none") if as_leaf else normalized(255 - x, 255 - xt, statistics)
    groups, test_groups = group_numbers(who, who_test)
    test = (test_inputs, class_numbers(yt))
    return DataSet(inputs, class_numbers(y), test, classes=62, groups=groups, test_groups=test_groups)


def _split(root: Root, split: str) -> tuple[Bytes, list[int], list[str]]:
    files = HOME.find(root, f"{split}/*.json", f"{split}.parquet")
    if not files:
        raise HOME.missing(root)
    if files[0].suffix == ".parquet":
        pixels, labels, who = parquet(files, ("pixels", "label", "client_id"))
        flat = np.frombuffer(b"".join(pixels), np.uint8)
    else:
        users = leaf(files)
        flat = np.concatenate([_gray(x, files[0]) for x, _ in users.values()])
        labels = [label for _, y in users.values() for label in y]
        who = [user for user, (_, y) in users.items() for _ in y]
    if flat.size != len(labels) * 784:
        raise broken(files[0], f"it has {flat.size} pixels for {len(labels)} images of 28×28")
    return flat.reshape(-1, 28, 28), labels, who


def _gray(x: list[Any], path: Path) -> Bytes:
    """LEAF's shares of white as bytes."""
    try:
        return np.rint(np.asarray(x, np.float64).ravel() * 255).clip(0, 255).astype(np.uint8)
    except (ValueError, TypeError) as error:
        raise broken(path, f"its images are not numbers of one size ({error})") from error
