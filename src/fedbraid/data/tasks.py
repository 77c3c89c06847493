"""Tasks by name: a public data set, shared among clients, with the model that papers train on it."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import nn

import fedbraid.user_files as files
from fedbraid import models
from fedbraid.core import rng
from fedbraid.core.check import integer
from fedbraid.data import celeba, cifar, digits, femnist, mnist, mushrooms, sent140, shakespeare, synthetic
from fedbraid.data.dataset import DataSet, Ints
from fedbraid.data.partition import KINDS, Partition, iid, natural, pachinko, parse
from fedbraid.data.task import Build, Task
from fedbraid.errors import ConfigError, DataError, unknown
from fedbraid.parse import evaluate


@dataclass(frozen=True)
class DataSource:
    """A data set that can be loaded by name, and what it is used with unless told otherwise."""

    read: Callable[..., DataSet]
    model: str
    clients: int
    partition: Partition


class ReaderOptions(TypedDict, total=False):
    """What readers of data sets take besides `root`; each takes some of them."""

    augment: bool | str  # CIFAR: flips and crops
    statistics: str  # image sets: by which mean and deviation pixels are scaled
    size: int  # CelebA: pixels a side
    vocab: int  # Sent140: words
    fraction: float  # Shakespeare: of a role's lines that are training data
    min_samples: int
    max_samples_per_client: int | None
    max_test_samples: int | None
    test_clients: int
    context: int  # characters a model reads
    alpha: float  # synthetic: how models differ
    beta: float  # and how data does


_SOURCES = {
    "celeba": DataSource(celeba.read, "qafel_cnn", 9343, natural()),
    "cifar10": DataSource(cifar.cifar10, "small_cnn", 100, iid()),
    "cifar100": DataSource(cifar.cifar100, "fedgbo_cnn", 100, pachinko(0.1, 10.0)),
    "digits": DataSource(digits.read, "mlp", 100, iid()),
    "emnist": DataSource(mnist.emnist, "lenet5", 100, iid()),
    "femnist": DataSource(femnist.read, "fedgbo_cnn", 3550, natural()),
    "fmnist": DataSource(mnist.fmnist, "lenet5", 100, iid()),
    "mnist": DataSource(mnist.mnist, "lenet5", 100, iid()),
    "mushrooms": DataSource(mushrooms.read, "logistic", 100, iid()),
    "sent140": DataSource(sent140.read, "bag_of_words", 21876, natural()),
    "shakespeare": DataSource(shakespeare.shakespeare, "gru_char", 660, natural()),
    "synthetic": DataSource(synthetic.read, "softmax_regression", 30, natural()),
    "tinyshakespeare": DataSource(shakespeare.tinyshakespeare, "gru_char", 200, natural()),
}


def names() -> list[str]:
    """The data sets that `load` knows."""
    return sorted(_SOURCES)


def load(
    name: str,
    clients: int | None = None,
    partition: Partition | str | None = None,
    *,
    model: str | nn.Module | Build | None = None,
    seed: int = 0,
    test_shares: bool = False,
    personal: str | Sequence[str] = (),
    buffers: str = "refuse",
    metrics: Mapping[str, Any] | None = None,
    root: str | os.PathLike[str] | None = None,
    **options: Unpack[ReaderOptions],
) -> Task:
    """A task by name, its training samples shared among clients.

    Files are looked for in the folder that FEDBRAID_DATA (or the option `root`) names; `digits` needs none.
    `seed` draws the partition. `model` is a name in `fedbraid.models`, a module or a function that builds
    one; unless given it is the data set's own: LeNet-5 for the MNISTs, `small_cnn` for CIFAR-10 and so on.
    With natural ids `clients=None` takes all there are, and every client has its test share; with other
    partitions `test_shares=True` deals the test set out by the labels that each client holds. `personal` are
    globs on the names of parameters that stay with each client, `buffers` and `metrics` as in `Task.from_arrays`.
    `options` are those of the data set's reader, such as `augment` of CIFAR or `vocab` of Sent140.

    >>> task = load("digits", clients=100, partition="label_chunks(1)")
    >>> task.clients, task.spec
    (100, "load('digits', clients=100, partition=label_chunks(1), seed=0)")
    """
    if name not in _SOURCES:
        raise unknown("task", name, _SOURCES)
    known = _SOURCES[name]
    if clients is not None:
        integer("clients", clients)
    share = (
        known.partition
        if partition is None
        else parse(partition)
        if isinstance(partition, str)
        else partition
    )
    told = {**options, **({} if root is None else {"root": root})}
    data = known.read(**_options(name, known, clients, seed, told))
    count = clients or _count(known, data, share)
    parts = share(data.table, count, seed)
    test, test_offsets = data.test, None
    if isinstance(share, natural) and data.test_groups is not None:
        test, test_offsets = _test_shares(data, parts)
    elif test_shares:
        test, test_offsets = _split_by_label(data, parts, seed)
    rows = parts if data.rows is None else [data.rows[p] for p in parts]
    return Task.from_table(
        _model(model or known.model, data), data.inputs, data.targets, rows,
        test=test, test_offsets=test_offsets, augment=data.augment, name=name, personal=personal, buffers=buffers,
        metrics=metrics, spec=None if metrics else _spec(name, count, share, seed, model, told | _more(test_shares, personal, buffers)),
    )  # fmt: skip


def from_file(text: str) -> Task:
    """The task that `FILE.py:NAME` names; its `spec` says so, so that a run of it can be resumed."""
    made: Task = files.load(text, Task, "task", KINDS)
    return dataclasses.replace(made, name=files.word(text), spec=files.absolute(text))


def reload(spec: str) -> Task:
    """The task that a `Task.spec` describes; nothing is run but `load`, or the file that it names."""
    if files.names_file(spec):
        return from_file(spec)
    made = evaluate(spec, {"load": load, **KINDS}, "task")
    if not isinstance(made, Task):
        raise ConfigError(f"task {spec!r} is not valid; write it as load('mnist', clients=100)")
    return made


def _more(test_shares: bool, personal: str | Sequence[str], buffers: str) -> dict[str, Any]:
    """What of a task's own settings is not the default."""
    globs = (personal,) if isinstance(personal, str) else tuple(personal)
    given = {"test_shares": test_shares, "personal": globs, "buffers": buffers}
    return {k: v for k, v in given.items() if v not in (False, (), "refuse")}


def _options(
    name: str, known: DataSource, clients: int | None, seed: int, options: dict[str, Any]
) -> dict[str, Any]:
    """What the reader is called with; a data set that is made up is told the clients and the seed."""
    taken = inspect.signature(known.read).parameters
    for option in options:
        if option not in taken:
            raise unknown(f"option of {name}", option, [t for t in taken if t not in ("clients", "seed")])
    told = {"clients": clients or known.clients, "seed": seed}
    return options | {k: v for k, v in told.items() if k in taken}


def _count(known: DataSource, data: DataSet, share: Partition) -> int:
    """How many clients there are when nobody says."""
    if isinstance(share, natural) and data.groups is not None:
        return len(np.unique(data.groups))
    return min(known.clients, len(data.table))


def _test_shares(data: DataSet, parts: list[Ints]) -> tuple[tuple[torch.Tensor, torch.Tensor], Ints]:
    """The test samples of these clients, client by client, and where each client's begin."""
    assert data.groups is not None
    assert data.test_groups is not None
    whose = data.groups[[part[0] for part in parts]]
    client = np.searchsorted(whose, data.test_groups).clip(max=len(whose) - 1)
    mine = np.flatnonzero(whose[client] == data.test_groups)
    if not len(mine):
        raise DataError("none of the chosen clients has test samples; take more clients or another seed")
    order = torch.from_numpy(mine[np.argsort(client[mine], kind="stable")])
    sizes = np.bincount(client[mine], minlength=len(whose))
    return (data.test[0][order], data.test[1][order]), np.concatenate([[0], np.cumsum(sizes)])


def _split_by_label(
    data: DataSet, parts: list[Ints], seed: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], Ints]:
    """The test samples client by client: each goes to one who holds its label, by how many of those they hold."""
    labels, wanted = data.table.labels, data.test[1].numpy()
    if wanted.ndim != 1:
        raise ConfigError(
            "test_shares=True deals a test set out by its labels, and this one has several a sample"
        )
    client = np.full(len(wanted), -1)
    owner = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
    held, gen = labels[np.concatenate(parts)], rng.generator(seed, "test shares")
    for label in np.unique(wanted):
        owners, mine = owner[held == label], np.flatnonzero(wanted == label)
        if len(owners):
            client[mine] = owners[gen.integers(len(owners), size=len(mine))]
    kept = np.flatnonzero(client >= 0)
    order = torch.from_numpy(kept[np.argsort(client[kept], kind="stable")])
    sizes = np.bincount(client[kept], minlength=len(parts))
    return (data.test[0][order], data.test[1][order]), np.concatenate([[0], np.cumsum(sizes)])


def _model(model: str | nn.Module | Build, data: DataSet) -> nn.Module | Build:
    """What builds the model; one given by name is fitted to the data."""
    if not isinstance(model, str):
        return model
    taken = models.settings(model)
    return partial(models.build, model, **{k: v for k, v in data.facts.items() if k in taken})


def _spec(name: str, clients: int, share: Any, seed: int, model: Any, options: dict[str, Any]) -> str | None:
    """The call that loads the same task again, where it can be written down."""
    given = {} if model is None else {"model": model}
    given |= {k: str(v) if k == "root" else v for k, v in options.items() if v is not None}
    plain = all(isinstance(v, str | int | float | tuple) for v in given.values())
    if type(share) not in KINDS.values() or not plain:
        return None
    rest = "".join(f", {k}={v!r}" for k, v in given.items())
    return f"load({name!r}, clients={clients}, partition={share!r}, seed={seed}{rest})"
