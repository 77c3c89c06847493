"""Tasks by name: a public data set, partitioned across clients, with the model that papers train on it."""

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
    """A data set that can be loaded by name, and its default model, clients and partition."""

    read: Callable[..., DataSet]
    model: str
    clients: int
    partition: Partition


class ReaderOptions(TypedDict, total=False):
    """Options of the readers of data sets besides `root`; each reader takes some of them."""

    augment: bool | str  # CIFAR: flips and crops
    statistics: str  # image sets: by which mean and deviation pixels are scaled
    size: int  # CelebA: pixels a side
    vocab: int  # Sent140: words
    fraction: float  # Shakespeare: of a role's lines that are training data
    min_samples: int
    max_samples_per_client: int | None
    max_test_samples: int | None
    test_clients: int
    context: int  # characters that a model reads
    alpha: float  # synthetic: how models differ
    beta: float  # synthetic: how data differ


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
    """The data sets that `load` supports."""
    return sorted(_SOURCES)


def load(
    name: str,
    clients: int | None = None,
    partition: Partition | str | None = None,
    *,
    model: str | nn.Module | Build | None = None,
    seed: int = 0,
    test_shares: bool = False,
    test_fraction: float | None = None,
    personal: str | Sequence[str] = (),
    buffers: str = "refuse",
    metrics: Mapping[str, Any] | None = None,
    root: str | os.PathLike[str] | None = None,
    **options: Unpack[ReaderOptions],
) -> Task:
    """A task by name, its training samples partitioned across clients.

    Files are searched in the folder that FEDBRAID_DATA (or the option `root`) names; `digits` needs none.
    `seed` draws the partition. `model` is a name in `fedbraid.models`, a module or a function that builds
    one; by default it is the data set's usual one: LeNet-5 for the MNISTs, `small_cnn` for CIFAR-10 and so on.
    With natural ids `clients=None` takes all of them, and every client has a local test set; with other
    partitions `test_shares=True` partitions the test set by the labels that each client holds, and
    `test_fraction` holds local test sets out of the clients' samples, as in `Task.from_arrays`: together they
    then take the place of the data set's test set. `personal` are globs on the names of parameters that stay
    with each client, `buffers` and `metrics` as in `Task.from_arrays`.
    `options` are those of the data set's reader, such as `augment` of CIFAR or `vocab` of Sent140.

    >>> task = load("digits", clients=100, partition="label_chunks(1)")
    >>> task.clients, task.spec
    (100, "load('digits', clients=100, partition=label_chunks(1), seed=0)")
    """
    if name not in _SOURCES:
        raise unknown("task", name, _SOURCES)
    source = _SOURCES[name]
    if clients is not None:
        integer("clients", clients)
    recipe = (
        source.partition
        if partition is None
        else parse(partition)
        if isinstance(partition, str)
        else partition
    )
    settings = {**options, **({} if root is None else {"root": root})}
    data = source.read(**_options(name, source, clients, seed, settings))
    count = clients or _count(source, data, recipe)
    rows_of = recipe(data.table, count, seed)
    test: tuple[torch.Tensor, torch.Tensor] | None = data.test
    test_offsets = None
    if test_fraction is not None:
        if test_shares:
            raise ConfigError("both test_shares= and test_fraction= were given; give one of them")
        test = None
    elif isinstance(recipe, natural) and data.test_groups is not None:
        test, test_offsets = _local_tests(data, rows_of)
    elif test_shares:
        test, test_offsets = _split_by_label(data, rows_of, seed)
    rows = rows_of if data.rows is None else [data.rows[p] for p in rows_of]
    return Task.from_table(
        _model(model or source.model, data), data.inputs, data.targets, rows,
        test=test, test_offsets=test_offsets, test_fraction=test_fraction, seed=seed, augment=data.augment, name=name, personal=personal, buffers=buffers,
        metrics=metrics, spec=None if metrics else _spec(name, count, recipe, seed, model, settings | _more(test_shares, test_fraction, personal, buffers)),
    )  # fmt: skip


def from_file(text: str) -> Task:
    """The task that `FILE.py:NAME` names; its `spec` is that text, so that a run of it can be resumed."""
    task: Task = files.load(text, Task, "task", KINDS)
    return dataclasses.replace(task, name=files.word(text), spec=files.absolute(text))


def reload(spec: str) -> Task:
    """The task that a `Task.spec` describes; only `load`, or the file that it names, is executed."""
    if files.names_file(spec):
        return from_file(spec)
    task = evaluate(spec, {"load": load, **KINDS}, "task")
    if not isinstance(task, Task):
        raise ConfigError(f"task {spec!r} is not valid; write it as load('mnist', clients=100)")
    return task


def _more(
    test_shares: bool, test_fraction: float | None, personal: str | Sequence[str], buffers: str
) -> dict[str, Any]:
    """The settings of `load` that differ from the default."""
    globs = (personal,) if isinstance(personal, str) else tuple(personal)
    given = {
        "test_shares": test_shares,
        "test_fraction": test_fraction,
        "personal": globs,
        "buffers": buffers,
    }
    return {k: v for k, v in given.items() if v not in (False, None, (), "refuse")}


def _options(
    name: str, source: DataSource, clients: int | None, seed: int, options: dict[str, Any]
) -> dict[str, Any]:
    """The reader's keywords; a synthetic data set gets the clients and the seed."""
    accepted = inspect.signature(source.read).parameters
    for option in options:
        if option not in accepted:
            raise unknown(f"option of {name}", option, [t for t in accepted if t not in ("clients", "seed")])
    drawing = {"clients": clients or source.clients, "seed": seed}
    return options | {k: v for k, v in drawing.items() if k in accepted}


def _count(source: DataSource, data: DataSet, recipe: Partition) -> int:
    """The default number of clients."""
    if isinstance(recipe, natural) and data.groups is not None:
        return len(np.unique(data.groups))
    return min(source.clients, len(data.table))


def _local_tests(data: DataSet, rows_of: list[Ints]) -> tuple[tuple[torch.Tensor, torch.Tensor], Ints]:
    """The test samples of these clients, client by client, and the row at which each client's begin."""
    assert data.groups is not None
    assert data.test_groups is not None
    whose = data.groups[[rows[0] for rows in rows_of]]
    client = np.searchsorted(whose, data.test_groups).clip(max=len(whose) - 1)
    matching = np.flatnonzero(whose[client] == data.test_groups)
    if not len(matching):
        raise DataError("none of the chosen clients has test samples; take more clients or another seed")
    order = torch.from_numpy(matching[np.argsort(client[matching], kind="stable")])
    sizes = np.bincount(client[matching], minlength=len(whose))
    return (data.test[0][order], data.test[1][order]), np.concatenate([[0], np.cumsum(sizes)])


def _split_by_label(
    data: DataSet, rows_of: list[Ints], seed: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], Ints]:
    """The test samples client by client: each goes to a client that holds its label, in proportion to how many it holds."""
    labels, test_labels = data.table.labels, data.test[1].numpy()
    if test_labels.ndim != 1:
        raise ConfigError(
            "test_shares=True partitions a test set by its labels, and this one has several a sample"
        )
    client = np.full(len(test_labels), -1)
    owner = np.repeat(np.arange(len(rows_of)), [len(p) for p in rows_of])
    train_labels, gen = labels[np.concatenate(rows_of)], rng.generator(seed, "test shares")
    for label in np.unique(test_labels):
        owners, candidates = owner[train_labels == label], np.flatnonzero(test_labels == label)
        if len(owners):
            client[candidates] = owners[gen.integers(len(owners), size=len(candidates))]
    assigned = np.flatnonzero(client >= 0)
    order = torch.from_numpy(assigned[np.argsort(client[assigned], kind="stable")])
    sizes = np.bincount(client[assigned], minlength=len(rows_of))
    return (data.test[0][order], data.test[1][order]), np.concatenate([[0], np.cumsum(sizes)])


def _model(model: str | nn.Module | Build, data: DataSet) -> nn.Module | Build:
    """The function that builds the model; a named model is fitted to the data."""
    if not isinstance(model, str):
        return model
    accepted = models.settings(model)
    return partial(models.build, model, **{k: v for k, v in data.facts.items() if k in accepted})


def _spec(name: str, clients: int, recipe: Any, seed: int, model: Any, options: dict[str, Any]) -> str | None:
    """The call that loads the same task again; None if a setting has no literal."""
    given = {} if model is None else {"model": model}
    given |= {k: str(v) if k == "root" else v for k, v in options.items() if v is not None}
    plain = all(isinstance(v, str | int | float | tuple) for v in given.values())
    if type(recipe) not in KINDS.values() or not plain:
        return None
    rest = "".join(f", {k}={v!r}" for k, v in given.items())
    return f"load({name!r}, clients={clients}, partition={recipe!r}, seed={seed}{rest})"
