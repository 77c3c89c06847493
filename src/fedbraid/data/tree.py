"""Trees of tensors, which hold samples: a tensor, a tuple or dict of them, or None for no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tree = Any  # a leaf, a tuple of leaves, a dict of leaves by name, or None
Leaf = Any  # a tensor `[T, ...]`, or an object with its interface: `Padded`, or a column read from disk


def map(fn: Callable[[Leaf], Any], tree: Tree) -> Tree:
    """The same tree with `fn` of every leaf.

    >>> map(len, {"a": torch.zeros(3, 2), "b": torch.zeros(3)})
    {'a': 3, 'b': 3}
    """
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, dict):
        return {key: fn(leaf) for key, leaf in tree.items()}
    if isinstance(tree, tuple):
        return tuple([fn(leaf) for leaf in tree])
    return None if tree is None else fn(tree)


def named(tree: Tree) -> Iterator[tuple[Any, Leaf]]:
    """(key, leaf) for every leaf: the dict's key, the index in the tuple, None for a lone leaf."""
    if isinstance(tree, dict):
        yield from tree.items()
    elif isinstance(tree, tuple):
        yield from enumerate(tree)
    elif tree is not None:
        yield None, tree


def leaves(tree: Tree) -> list[Leaf]:
    return [leaf for _, leaf in named(tree)]


def first(tree: Tree) -> Leaf:
    """The first leaf; None if there is none."""
    return next((leaf for _, leaf in named(tree)), None)


def length(tree: Tree) -> int:
    """How many samples a tree holds."""
    return 0 if (leaf := first(tree)) is None else len(leaf)


def take(tree: Tree, rows: Any) -> Tree:
    """Rows of a table, as tensors."""
    return _rows(tree, rows) if isinstance(tree, Tensor) else map(lambda leaf: _rows(leaf, rows), tree)


def _rows(leaf: Leaf, rows: Any) -> Any:
    """Integer indices copy rows with index_select, because indexing copies number by number."""
    by_number = isinstance(leaf, Tensor) and isinstance(rows, Tensor) and rows.dtype == torch.int64
    if not by_number or rows.device != leaf.device:
        return leaf[rows]
    return leaf.index_select(0, rows.reshape(-1)).view(*rows.shape, *leaf.shape[1:])


def cat(trees: list[Tree]) -> Tree:
    """Tables of one kind, concatenated."""
    head = trees[0]
    if isinstance(head, Tensor):
        return torch.cat(trees)
    if isinstance(head, dict):
        return {key: torch.cat([t[key] for t in trees]) for key in head}
    if isinstance(head, tuple):
        return tuple(torch.cat(leaves) for leaves in zip(*trees))
    return None


def to(tree: Tree, device: Any) -> Tree:
    return map(lambda leaf: leaf.to(device), tree)


def numbers(tree: Tree) -> Tree:
    """A model's inputs: integers (token ids) as int64."""
    return _number(tree) if isinstance(tree, Tensor) else map(_number, tree)


def _number(x: Tensor) -> Tensor:
    return x if x.is_floating_point() or x.dtype == torch.bool else x.long()


def shapes(tree: Tree) -> str:
    """The shapes and types of one sample, for sentences.

    >>> shapes({"ids": torch.zeros(4, 7, dtype=torch.int64)})
    "{'ids': (7,) (torch.int64)}"
    """
    texts = {k: f"{tuple(v.shape[1:])} ({v.dtype})" for k, v in named(tree)}
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{k!r}: {text}" for k, text in texts.items()) + "}"
    return ", ".join(texts.values()) or "nothing"


@dataclass(frozen=True, eq=False)
class Padded:
    """A leaf whose rows differ in length: stored padded to the longest, returned cut to the longest of the batch."""

    values: Tensor  # [T, L, ...]
    lengths: Tensor  # int64 [T]

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: Any) -> Tensor:
        """These rows; a block of clients `[m, B]` keeps the full length, so that no client's numbers depend on the others'."""
        found = self.values[rows]
        if isinstance(rows, Tensor) and rows.ndim > 1:
            return found
        lengths = self.lengths[rows]
        return found[:, : int(lengths.max())] if lengths.numel() and lengths.ndim else found

    def is_floating_point(self) -> bool:
        return self.values.is_floating_point()

    def to(self, device: Any) -> Padded:
        return Padded(self.values.to(device), self.lengths.to(device))


@dataclass(frozen=True, eq=False)
class Chunks:
    """A leaf of several concatenated pieces, none of which is copied: maps of files, or clients' tables."""

    pieces: list[Any]
    begins: NDArray[np.int64]  # one more than pieces

    @classmethod
    def of(cls, pieces: list[Any]) -> Chunks:
        return cls(pieces, np.cumsum([0] + [len(p) for p in pieces]))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.pieces[0].shape[1:])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.pieces[0].dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self.pieces[0].device
        return device

    @property
    def nbytes(self) -> int:
        return sum(int(p.nbytes) for p in self.pieces)

    def numel(self) -> int:
        return sum(int(p.numel()) for p in self.pieces)

    def max(self) -> Tensor:
        return torch.stack([p.max() for p in self.pieces]).max()

    def min(self) -> Tensor:
        return torch.stack([p.min() for p in self.pieces]).min()

    def __len__(self) -> int:
        return int(self.begins[-1])

    def __getitem__(self, rows: Any) -> Tensor:
        """These rows; only a block of clients `[m, B]` or a slice may come from several pieces."""
        if isinstance(rows, slice):
            rows = torch.arange(*rows.indices(len(self)))
        rows = torch.as_tensor(rows)
        if rows.ndim > 1:
            return torch.stack([self[row] for row in rows])
        owners = np.searchsorted(self.begins, rows.numpy(), "right") - 1
        ends = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
        found: list[Tensor] = [
            self.pieces[owners[lo]][rows[lo:hi] - int(self.begins[owners[lo]])]
            for lo, hi in pairwise(ends)
            if hi > lo
        ]
        return found[0] if len(found) == 1 else torch.cat(found) if found else self.pieces[0][:0]

    def is_floating_point(self) -> bool:
        return bool(self.pieces[0].is_floating_point())

    def to(self, device: Any) -> Chunks:
        return Chunks([p.to(device) for p in self.pieces], self.begins)
