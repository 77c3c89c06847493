"""User data as trees of tensors: arrays, lists, frames, Hugging Face columns, torch datasets."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.data import tree
from fedbraid.data.tree import Chunks, Padded, Tree
from fedbraid.errors import DataError

Collate = Callable[[list[Any]], Any]  # a list of samples -> one batch, as in a DataLoader


def pair(given: Any, what: str, loss: Any) -> tuple[Tree, Tree]:
    """(inputs, targets) as tensors of the right kind; DataError says what is wrong with others."""
    try:
        x, y = given
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} must be an (inputs, targets) pair, not {type(given).__name__}") from error
    x, y = tensors(x, what, "input"), tensors(y, what, "target")
    count = tree.length(x)
    if x is None or any(leaf.ndim == 0 for leaf in tree.leaves((x, y)) if isinstance(leaf, Tensor)):
        raise DataError(f"{what} has no inputs; give arrays with one entry per sample")
    for kind, some in (("input", x), ("target", y)):
        for key, leaf in tree.named(some):
            if leaf.ndim == 0 or len(leaf) != count:
                raise DataError(_ragged(what, kind, key, leaf, x, count))
    if count == 0:
        raise DataError(f"{what} has no samples; leave it out or give it at least one")
    return _with_keys(x, lambda key, v: _input(v, what, key)), _targets(y, what, loss)


def _ragged(what: str, kind: str, key: Any, leaf: Any, x: Tree, count: int) -> str:
    if kind == "target":
        return (
            f"{what} has inputs of shape {tuple(tree.first(x).shape)} but targets of shape {tuple(leaf.shape)};"
            " give one target per input"
        )
    head = next(tree.named(x))[0]
    got = "no axis of samples" if leaf.ndim == 0 else str(len(leaf))
    return f"{what} has {count} of input {head!r} but {got} of {key!r}; give one of each per sample"


def _with_keys(some: Tree, fn: Callable[[Any, Any], Any]) -> Tree:
    """The tree with fn(key, leaf) for every leaf."""
    if isinstance(some, dict):
        return {key: fn(key, leaf) for key, leaf in some.items()}
    if isinstance(some, tuple):
        return tuple(fn(i, leaf) for i, leaf in enumerate(some))
    return None if some is None else fn(None, some)


def _input(x: Any, what: str, key: Any) -> Any:
    if not x.is_floating_point():
        return x
    if isinstance(x, Padded):
        return Padded(_input(x.values, what, key), x.lengths)
    if isinstance(x, Chunks):
        return x  # each was checked before
    x = x.to(torch.float32)
    if not _finite(x):
        where = "its inputs" if key is None else f"its input {key!r}"
        raise DataError(f"{what} has NaN or infinity in {where}; clean or fill those values first")
    return x


def _targets(y: Tree, what: str, loss: Any) -> Tree:
    if isinstance(loss, str) and not isinstance(y, Tensor | Chunks):
        kind = "no targets" if y is None else f"a {type(y).__name__} of targets"
        raise DataError(f"{what} has {kind}, which {loss!r} cannot use; give a loss of your own for them")
    if loss in ("cross_entropy", "logistic"):
        if y.is_floating_point():
            raise DataError(
                f"{what} has {y.dtype} targets; {loss} needs integer class numbers (or use loss='mse')"
            )
        return y if isinstance(y, Chunks) else y.long()
    return _with_keys(y, lambda key, v: _target(v, what, loss))


def _target(y: Any, what: str, loss: Any) -> Any:
    if isinstance(y, Chunks):
        return y
    if isinstance(y, Padded):
        return Padded(_target(y.values, what, loss), y.lengths)
    if y.is_floating_point() or loss == "mse":
        y = y.to(torch.float32)
        if not _finite(y):
            raise DataError(f"{what} has NaN or infinity in its targets; clean or fill those values first")
    return y


def _finite(x: Tensor) -> bool:
    """Whether every number is finite, checked in slices so that large tables need no copy."""
    return all(bool(torch.isfinite(x[lo : lo + 4096]).all()) for lo in range(0, len(x), 4096))


# One leaf at a time -------------------------------------------------------------------------------


def tensors(given: Any, what: str, kind: str) -> Tree:
    """The same tree with every leaf as a tensor."""
    if isinstance(given, Mapping):
        given = dict(given)
    return _with_keys(
        given, lambda key, leaf: tensor(leaf, what if key is None else f"{what}'s {kind} {key!r}")
    )


def tensor(value: Any, what: str) -> Any:
    """An array, a list, a column of a frame or of a Hugging Face dataset as a tensor, without a copy where possible."""
    if isinstance(value, Tensor | Padded | Chunks):
        return value.detach() if isinstance(value, Tensor) else value
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    elif isinstance(value, Sequence) and not isinstance(value, list | str):
        value = value[:]
    if isinstance(value, np.ndarray) and any(step < 0 for step in value.strides):
        value = np.ascontiguousarray(value)  # torch has no negative strides
    try:
        if isinstance(value, np.ndarray) and value.dtype == object:
            value = np.stack([np.asarray(v) for v in value])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a read-only map of a file, which is never written
            return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} does not turn into tensors: {_why(value, error)}") from error


def _why(value: Any, error: Exception) -> str:
    try:
        some = value[0]
        if isinstance(some, str | bytes):
            return (
                f"it holds text such as {some[:20]!r}; turn it into numbers (tokens) first, or leave it out"
            )
        if len({len(v) for v in value}) > 1:
            return "its samples differ in length; give collate=fb.pad() to pad them with a mask"
        if isinstance(value, list) and hasattr(some, "shape"):
            return "a list is one input with a sample an entry; give a tuple or a dict for several inputs"
    except (TypeError, KeyError, IndexError):
        pass
    return f"{error}; give arrays of numbers"


def stack(pairs: list[tuple[Tree, Tree]], in_chunks: bool = False) -> tuple[Tree, Tree]:
    """All clients' samples as one table; with `in_chunks` none of them is copied."""
    return tuple(_stack([p[k] for p in pairs], kind, in_chunks) for k, kind in enumerate(("input", "target")))


def chunked(pairs: list[tuple[Tree, Tree]]) -> tuple[Tree, Tree]:
    """Clients' tables concatenated without a copy, even if their sample lengths differ."""
    return tuple(_chunks([p[k] for p in pairs]) for k in (0, 1))


def _chunks(trees: list[Tree]) -> Tree:
    return _with_keys(trees[0], lambda key, _: Chunks.of([t if key is None else t[key] for t in trees]))


def _stack(trees: list[Tree], kind: str, in_chunks: bool) -> Tree:
    for i, some in enumerate(trees):
        alike(some, trees[0], f"client {i}", "client 0", kind)
    return _chunks(trees) if in_chunks else tree.cat(trees)


def alike(some: Tree, head: Tree, who: str, other: str, kind: str, lengths: bool = False) -> None:
    """Refuse samples whose keys, shapes or types differ from another client's; `lengths` may differ."""
    these, others = dict(tree.named(some)), dict(tree.named(head))
    if type(some) is not type(head) or these.keys() != others.keys():
        odd = next(iter(these.keys() ^ others.keys()), None)
        has = (
            f"{'has' if odd in these else 'lacks'} the {kind} {odd!r}"
            if odd is not None
            else f"has {kind}s of another kind"
        )
        raise DataError(f"{who} {has}, unlike {other}; give all clients the same {kind}s")
    for key, leaf in these.items():
        first = others[key]
        skip = 2 if lengths else 1
        if leaf.shape[skip:] != first.shape[skip:] or leaf.dtype != first.dtype:
            raise DataError(
                f"{who} holds samples of shape {tuple(leaf.shape[1:])} ({leaf.dtype}), {other} of shape "
                f"{tuple(first.shape[1:])} ({first.dtype}){'' if key is None else f' as {key!r}'}; all clients need the same"
            )


def mapped(pairs: Sequence[Any]) -> bool:
    """Whether any array of the pairs is memory-mapped."""
    leaves = [leaf for some in pairs for side in some for _, leaf in tree.named(side)]
    return any(isinstance(leaf, np.memmap) for leaf in leaves)


def table(
    given: Sequence[Any], names: list[str], loss: Any, collate: Collate | None
) -> tuple[tuple[Tree, Tree], NDArray[np.int64]]:
    """Pairs of (inputs, targets) as one table, and the row at which each pair begins."""
    if collate is None:
        tables = [pair(g, name, loss) for g, name in zip(given, names)]
        return stack(tables, in_chunks=mapped(given)), np.cumsum([0] + [tree.length(x) for x, _ in tables])
    clients_samples = [samples(g, name) for g, name in zip(given, names)]
    for some, name in zip(clients_samples, names):
        _one_kind(some[0], clients_samples[0][0], name, names[0])
    collated_table = collated([s for some in clients_samples for s in some], collate, "the table")
    return collated_table, np.cumsum([0] + [len(some) for some in clients_samples])


def _one_kind(sample: Any, other: Any, who: str, whose: str) -> None:
    """Refuse samples whose keys differ from another client's, before they are collated."""
    one, two = (s[0] if isinstance(s, tuple) else s for s in (sample, other))
    if isinstance(one, Mapping) and isinstance(two, Mapping) and (odd := set(one) ^ set(two)):
        has = "has" if min(odd) in one else "lacks"
        raise DataError(
            f"{who} {has} the input {min(odd)!r}, unlike {whose}; give all clients the same inputs"
        )


def count(given: Any) -> int:
    """The number of samples in a user's inputs."""
    if isinstance(given, Mapping):
        given = next(iter(given.values()), ())
    return len(given[0]) if isinstance(given, tuple) and given else len(given)


def samples(given: Any, what: str) -> list[Any]:
    """(inputs, targets) as one (input, target) pair per sample, for a collate function."""
    if isinstance(given, list):
        return given
    x, y = given
    n = count(x)
    if n == 0:
        raise DataError(f"{what} has no samples; leave it out or give it at least one")
    try:
        return [(_one(x, i), _one(y, i)) for i in range(n)]
    except (IndexError, KeyError) as error:
        raise DataError(
            f"{what} has {n} samples in one input and fewer in another; give one of each per sample"
        ) from error


def items(inputs: Any, targets: Any, what: str) -> list[Any]:
    """The rows of a table as items of a dataset: dicts with their labels where the inputs have names."""
    rows = samples((inputs, targets), what)
    if not isinstance(inputs, Mapping):
        return rows
    return [x if y is None else {**x, LABELS[0]: y} for x, y in rows]


def _one(given: Any, i: int) -> Any:
    if isinstance(given, Mapping):
        return {key: leaf[i] for key, leaf in given.items()}
    if isinstance(given, tuple):
        return tuple(leaf[i] for leaf in given)
    return None if given is None else given[i]


def read(
    dataset: Any, what: str, inputs: Sequence[str] | None, targets: str | None, collate: Collate | None
) -> Any:
    """A map-style dataset: (inputs, targets) as tables, or its items if they are yet to be collated."""
    if not size(dataset, what):
        raise DataError(f"{what} has no samples; leave it out or give it at least one")
    items = _unrandom(dataset, what)
    if collate is not None:
        return chosen(items, what, inputs, targets)
    return tables(items, what, inputs, targets)


def size(dataset: Any, what: str) -> int:
    """The number of samples of a map-style dataset."""
    try:
        return len(dataset)
    except TypeError as error:
        raise DataError(
            f"{what} is a {type(dataset).__name__}, which has no length; give a dataset with __len__ and __getitem__"
        ) from error


def joined(datasets: Sequence[Any]) -> tuple[Any, NDArray[np.int64]]:
    """Clients' datasets concatenated, empty ones left out, and the row at which each begins."""
    sizes = [0 if d is None else size(d, f"client {i}'s test share") for i, d in enumerate(datasets)]
    nonempty = [d for d, n in zip(datasets, sizes) if n]
    pooled: Any = torch.utils.data.ConcatDataset(nonempty) if nonempty else None
    return pooled, np.cumsum([0, *sizes])


def in_range(labels: Tensor, classes: int, what: str) -> None:
    """Refuse a label that names no class."""
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        bad = int(labels.min()) if int(labels.min()) < 0 else int(labels.max())
        raise DataError(f"{what} has the label {bad}, which is out of range; use 0 to {classes - 1}")


def tables(
    items: list[Any], what: str, inputs: Sequence[str] | None = None, targets: str | None = None
) -> tuple[Tree, Tree]:
    """Samples stacked into (inputs, targets)."""
    pairs = [_chosen(split(item, what, targets), inputs, what) for item in items]
    return _column([x for x, _ in pairs], what), _column([y for _, y in pairs], what)


def _unrandom(dataset: Any, what: str) -> list[Any]:
    """All items of a dataset; one whose items differ between reads is refused."""
    before = _states()
    items = [dataset[i] for i in range(len(dataset))]
    if _states() != before or repr(items[0]) != repr(dataset[0]):
        raise DataError(
            f"{what} draws random numbers when an item is read, which would then be the same in all rounds; use"
            " from_datasets(..., lazy=True), which draws anew in each epoch, or a transform without chance"
        )
    return items


def _states() -> tuple[Any, ...]:
    """The states of the generators that transforms draw from."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), kind, np.asarray(keys).tobytes(), *rest


def chosen(items: list[Any], what: str, inputs: Sequence[str] | None, targets: str | None) -> list[Any]:
    """Items that are yet to be collated, all with the same keys."""
    renamed = [_renamed(item, what, inputs, targets) for item in items]
    if isinstance(renamed[0], Mapping):
        _same_keys(renamed, what)
    return renamed


def _renamed(item: Any, what: str, inputs: Sequence[str] | None, targets: str | None) -> Any:
    """A dict of the chosen inputs, with its targets where collate functions look for them."""
    if not isinstance(item, Mapping):
        return item
    x, y = _chosen(split(item, what, targets), inputs, what)
    return x if y is None else {**x, LABELS[0]: y}


def _chosen(sample: tuple[Any, Any], inputs: Sequence[str] | None, what: str) -> tuple[Any, Any]:
    """The sample with the selected inputs only."""
    if inputs is None:
        return sample
    if missing := [key for key in inputs if key not in sample[0]]:
        raise DataError(f"{what} has no {missing[0]!r}, only {', '.join(map(repr, sample[0]))}; see inputs=")
    return {key: sample[0][key] for key in inputs}, sample[1]


def _column(values: list[Any], what: str) -> Tree:
    """Samples' values stacked."""
    head = values[0]
    if head is None:
        return None
    if isinstance(head, Mapping):
        _same_keys(values, what)
        return {key: _column([v[key] for v in values], f"{what}'s {key!r}") for key in head}
    if isinstance(head, tuple):
        return tuple(_column(list(v), what) for v in zip(*values))
    try:
        return torch.stack([torch.as_tensor(v) for v in values])
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} does not turn into tensors: {_why(values, error)}") from error


def _same_keys(values: list[Any], what: str) -> None:
    keys = set(values[0])
    for i, v in enumerate(values):
        if odd := keys ^ set(v):
            raise DataError(
                f"{what} has {min(odd)!r} in some items, but not in all (see item {i}); give every item the same keys"
            )


# Variable lengths ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class pad:
    """Makes samples of different lengths one table: padded with `value`, and a mask that is 1 at real entries.

    A dict gets the mask as a key of this name, unless it has one; a lone sequence x becomes (x, mask), which
    calls the model by position. Targets that are sequences are padded with `target`.

    >>> inputs, targets = pad()([([5, 6, 7], 1), ([8], 0)])
    >>> inputs[0].tolist(), inputs[1].tolist(), targets.tolist()
    ([[5, 6, 7], [8, 0, 0]], [[1, 1, 1], [1, 0, 0]], [1, 0])
    """

    value: float = 0
    mask: str = "attention_mask"
    target: float = -100

    def __call__(self, samples: list[Any]) -> tuple[Tree, Tree]:
        pairs = [split(s, "a sample") for s in samples]
        inputs, targets = [x for x, _ in pairs], [y for _, y in pairs]
        y = None if targets[0] is None else _padded([torch.as_tensor(t) for t in targets], self.target)
        if not isinstance(inputs[0], Mapping):
            sequences = [torch.as_tensor(x) for x in inputs]
            return (_padded(sequences, self.value), _mask(sequences)), y
        columns = {k: [torch.as_tensor(x[k]) for x in inputs] for k in inputs[0]}
        x = {k: _padded(v, 0 if k == self.mask else self.value) for k, v in columns.items()}
        longest = max(
            (v for v in columns.values() if v[0].ndim), key=lambda v: max(map(len, v)), default=None
        )
        return x if longest is None or self.mask in x else {**x, self.mask: _mask(longest)}, y


def _padded(sequences: list[Tensor], value: float) -> Tensor:
    if sequences[0].ndim == 0 or len({p.shape for p in sequences}) == 1:
        return torch.stack(sequences)
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=value)


def _mask(sequences: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        [torch.ones(len(p), dtype=torch.int64) for p in sequences], batch_first=True
    )


def collated(items: list[Any], collate: Collate, what: str) -> tuple[Tree, Tree]:
    """All samples as one table, made once; padded leaves store the length of each row."""
    try:
        batch, each = collate(items), [collate([item]) for item in items]
    except Exception as error:
        raise DataError(
            f"collate fails on the samples: {error}; fix it, or leave out what it cannot join"
        ) from error
    batch, each = split(batch, what), [split(e, what) for e in each]
    return tuple(_lengths(batch[k], [e[k] for e in each], what) for k in (0, 1))


def _lengths(table: Tree, each: list[Tree], what: str) -> Tree:
    table = tensors(table, what, "input")

    def one(key: Any, leaf: Tensor) -> Any:
        singles = [e if key is None else e[key] for e in each]
        lengths = torch.tensor([v.shape[1] if v.ndim > 1 else 0 for v in singles])
        uneven = leaf.ndim > 1 and bool((lengths < leaf.shape[1]).any())
        return Padded(leaf, lengths) if uneven else leaf

    return _with_keys(table, one)


def split(item: Any, what: str, targets: str | None = None) -> tuple[Any, Any]:
    """A sample, or a batch, as (inputs, targets): a pair is one, a dict has its targets under a name."""
    if isinstance(item, Mapping):
        item = dict(item)
        name = targets if targets is not None else next((n for n in LABELS if n in item), None)
        if name is not None and name not in item:
            raise DataError(
                f"{what} has no {name!r}, only {', '.join(map(repr, item))}; name the targets with targets="
            )
        return item, None if name is None else item.pop(name)
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise DataError(f"{what} has items of type {type(item).__name__}; give pairs (input, target) or dicts")


LABELS = ("labels", "label")  # keys under which a dict has its targets by default
