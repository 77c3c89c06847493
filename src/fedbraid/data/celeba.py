"""CelebA of LEAF: is this face smiling? Each celebrity is a client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fedbraid.data.dataset import Bytes, DataSet, class_numbers, group_numbers
from fedbraid.data.formats import leaf, thumbnail
from fedbraid.data.sources import Home, Root, cached
from fedbraid.errors import DataError

HOME = Home(
    "celeba",
    ("celeba", "celeba/data"),
    "LEAF's train/*.json and test/*.json, and the images in img_align_celeba/",
    "https://github.com/TalwalkarLab/leaf and https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
)


def read(root: Root = None, size: int = 32) -> DataSet:
    """Faces cut to squares of `size` pixels, black being −1 and white 1, as QAFeL has them."""
    (x, y, who), (xt, yt, who_test) = (_split(root, split, size) for split in ("train", "test"))
    groups, test_groups = group_numbers(who, who_test)
    test = (_centred(xt), class_numbers(yt))
    return DataSet(_centred(x), class_numbers(y), test, classes=2, groups=groups, test_groups=test_groups)


def _split(root: Root, split: str, size: int) -> tuple[Bytes, list[int], list[str]]:
    files = HOME.find(root, f"{split}/*.json")
    if not files:
        raise HOME.missing(root)
    users = leaf(files)
    names = [str(name) for x, _ in users.values() for name in x]
    pixels = cached(files, lambda: _faces(root, names, size), how=f"faces of {size}")
    labels = [int(label) for _, y in users.values() for label in y]
    return pixels, labels, [user for user, (_, y) in users.items() for _ in y]


def _faces(root: Root, names: Sequence[str], size: int) -> Bytes:
    return np.stack([thumbnail(_image(root, name), size) for name in names])


def _image(root: Root, name: str) -> Path:
    if Path(name).name != name:
        raise DataError(f"image name {name!r} points out of its folder; get LEAF's json files again")
    paths = HOME.find(root, f"raw/img_align_celeba/{name}", f"img_align_celeba/{name}")
    if not paths:
        raise DataError(
            f"image {name} of celeba was not found; put it into img_align_celeba/ (from {HOME.origin})"
        )
    return paths[0]


def _centred(x: Bytes) -> torch.Tensor:
    return torch.from_numpy(x).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0).contiguous()
