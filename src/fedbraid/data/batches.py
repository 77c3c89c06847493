"""The samples of a client's next step: batches of a block of clients, as rows of one shared table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core import rng
from fedbraid.core.device import placed
from fedbraid.core.traits import ExamplePrivacy
from fedbraid.core.work import Work, batch_sizes, batches_per_epoch, step_counts
from fedbraid.data import tree
from fedbraid.data.augment import Augment
from fedbraid.data.task import Task
from fedbraid.data.tree import Tree
from fedbraid.errors import ConfigError


@dataclass
class PrivateDraws:
    """The noise of example-level DP on a step: the planned batch size, and the keys of the noise on the sum."""

    planned: Tensor  # float32 [m, 1]
    keys: rng.U64 | None  # [m]; None: the operating system's generator

    def noise(self, privacy: ExamplePrivacy, like: Tensor) -> Tensor:
        """The noise that is added to a mean, `[m, d]`."""
        m, d = like.shape
        normals = rng.unpredictable(m * d).reshape(m, d) if self.keys is None else rng.gaussian(self.keys, d)
        return placed(normals, like.device).to(like) * (privacy.deviation / self.planned)


@dataclass
class Batch:
    """One step's samples for m clients: rows `[m, B]` of the shared table, and the weight of each in its mean.

    `weight` is None where every row counts; a padded row weighs 0.
    """

    inputs: Tree  # the table, [T, ...] each
    targets: Tree  # [T, ...] each
    rows: Tensor  # int64 [m, B]
    weight: Tensor | None = None  # float32 [m, B]
    augment: Augment | None = None
    draws: Tensor | None = None  # [m, B, ·], for the augmentation
    noise: NDArray[np.uint64] | None = None  # [m], seeds for a stochastic model
    hidden: PrivateDraws | None = None  # set with example-level DP

    def secret(self) -> PrivateDraws:
        """The noise on its examples."""
        if self.hidden is None:
            raise ConfigError(
                "a gradient besides the noised ones of local steps would reveal single examples; use"
                " a rule that takes one gradient a step"
            )
        return self.hidden

    @property
    def size(self) -> int:
        return self.rows.shape[0]

    def client(self, i: int) -> Batch:
        """Client i's batch, with the padding cut away."""
        rows, draws = self.rows[i : i + 1], self.draws
        if self.weight is not None:
            used = int((self.weight[i] > 0).sum())
            rows, draws = rows[:, :used], draws if draws is None else draws[:, :used]
        picked = draws if draws is None else draws[i : i + 1]
        noise = self.noise if self.noise is None else self.noise[i : i + 1]
        return Batch(self.inputs, self.targets, rows, None, self.augment, picked, noise)

    def x(self) -> Tree:
        """The inputs, `[m, B, ...]` each; token ids are int64."""
        x = tree.take(self.inputs, self.rows)
        if self.augment is not None and self.draws is not None:
            augmented = self.augment(x.flatten(0, 1), self.draws.flatten(0, 1))
            x = augmented.view(*self.rows.shape, *augmented.shape[1:])
        return tree.numbers(x)

    def y(self) -> Tree:
        """The targets, `[m, B, ...]` each."""
        return tree.take(self.targets, self.rows)

    def first_client(self) -> tuple[Tree, Tree]:
        """The first client's (inputs, targets), `[B, ...]` each, cut to their longest where lengths differ."""
        x = tree.take(self.inputs, self.rows[0])
        if self.augment is not None and self.draws is not None:
            x = self.augment(x, self.draws[0])
        return tree.numbers(x), tree.take(self.targets, self.rows[0])


class DrawnBatches:
    """All batches of a block of clients in one participation, drawn by (seed, version, client).

    To `hide` single examples, each batch is drawn by Poisson sampling, for "simulated" or "real" clients.
    Client i of n_i samples takes `steps(i)` steps; a short last batch is used as it is (`keep`), left
    out (`drop`), or filled with more samples of the client (`fill`). Clients smaller than a batch train
    on all their samples.
    """

    def __init__(
        self,
        task: Task,
        work: Work,
        clients: NDArray[np.int64],
        version: int,
        seed: int,
        hide: str | None = None,
    ) -> None:
        self.task, self.work, self.clients, self.version, self.seed = task, work, clients, version, seed
        self.hide = hide
        self.n = task.sizes[clients]
        self.K = step_counts(self.n, work)
        self._epoch = -1
        self._order = np.empty((0, 0), np.int64)
        self._even = bool((self.n == self.n[0]).all())
        self.sizes, self.per_epoch = batch_sizes(self.n, work), batches_per_epoch(self.n, work)
        self._rows: tuple[int, Tensor] | None = None  # of an epoch, in its order

    def batch(self, k: int) -> Batch:
        """The block's k-th batch."""
        if self.hide is not None:
            return self._hidden(k)
        size, per_epoch = self.sizes, self.per_epoch
        if self.work.replace:
            return self._drawn(k, size)
        if self._even:
            epoch, at = divmod(k, int(per_epoch[0]))
            lo, count = at * int(size[0]), int(size[0])
            if lo + count <= self.n[0] or self.work.last == "keep":
                return self._of(self._epoch_rows(epoch)[:, lo : lo + count], None, k)
        epochs, ats = np.divmod(k, per_epoch)
        column = np.arange(size.max())
        pos = (ats * size)[:, None] + column
        inside = (column < size[:, None]) & (pos < self.n[:, None])
        picked = np.zeros(pos.shape, np.int64)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            order = self._epoch_order(int(epoch))
            picked[in_epoch] = np.take_along_axis(
                order[in_epoch], np.minimum(pos[in_epoch], self.n[in_epoch, None] - 1), 1
            )
        if self.work.last == "fill":
            short = (column < size[:, None]) & ~inside
            draw = rng.uniform(self.seed, "fill", self.version, self.clients[:, None], k, column)
            picked = np.where(short, (draw * self.n[:, None]).astype(np.int64), picked)
            inside |= short
        inside &= (k < self.K)[:, None]
        return self._make(picked, inside, k)

    def _hidden(self, k: int) -> Batch:
        """Every sample with probability batch/n, by the seed or, for "real" clients, by the operating system's generator."""
        m, most, real = len(self.n), int(self.n.max()), self.hide == "real"
        planned, column = batch_sizes(self.n, self.work), np.arange(most)
        draw = (
            rng.unpredicted(m * most).reshape(m, most) if real
            else rng.uniform(self.seed, "examples", self.version, self.clients[:, None], k, column)
        )  # fmt: skip
        sampled = (
            (draw * self.n[:, None] < planned[:, None]) & (column < self.n[:, None]) & (k < self.K)[:, None]
        )
        count = sampled.sum(1)
        width = max(1, int(count.max()))
        picked = np.argsort(~sampled, axis=1, kind="stable")[:, :width]
        batch = self._make(np.minimum(picked, self.n[:, None] - 1), np.arange(width) < count[:, None], k)
        keys = None if real else rng.bits(self.seed, "hidden", self.version, self.clients, k)
        batch.hidden = PrivateDraws(placed(planned.astype(np.float32), self.task.device)[:, None], keys)
        return batch

    def _drawn(self, k: int, size: NDArray[np.int64]) -> Batch:
        """A full batch of each client's samples, drawn with replacement."""
        column = np.arange(size.max())
        draw = rng.uniform(self.seed, "replace", self.version, self.clients[:, None], k, column)
        inside = (column < size[:, None]) & (k < self.K)[:, None]
        return self._make((draw * self.n[:, None]).astype(np.int64), inside, k)

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """A fresh order of each client's samples, `[m, max n]`; full batches and unshuffled data keep the data's order."""
        if epoch != self._epoch:
            self._epoch = epoch
            column = np.arange(self.n.max())
            if not self.work.shuffle or self.work.batch is None or self.work.batch >= self.n.max():
                self._order = column[None].repeat(len(self.n), 0)
            else:
                keys = rng.bits(self.seed, "batch", self.version, self.clients[:, None], epoch, column)
                n = self.n[:, None]
                keys = np.where(n > self.work.batch, keys >> np.uint64(1), column.astype(np.uint64))
                keys = np.where(column < n, keys, np.uint64(2**64 - 1))
                self._order = np.argsort(keys, axis=1, kind="stable")
        return self._order

    def _epoch_rows(self, epoch: int) -> Tensor:
        """The table's rows in that order, looked up once for all batches."""
        if self._rows is None or self._rows[0] != epoch:
            self._rows = epoch, self.task.row_ids(self.clients, self._epoch_order(epoch))
        return self._rows[1]

    def _make(self, picked: NDArray[np.int64], inside: NDArray[np.bool_] | None, k: int) -> Batch:
        return self._of(self.task.row_ids(self.clients, picked), inside, k)

    def _of(self, rows: Tensor, inside: NDArray[np.bool_] | None, k: int) -> Batch:
        """The batch of these rows of the table."""
        task, weight = self.task, None
        if inside is not None and not inside.all():
            weight = placed(inside.astype(np.float32), task.device)
        draws = augmenting(task, self.seed, "augment", self.version, self.clients, k, rows.shape[1])
        noise = (
            rng.bits(self.seed, "noise", self.version, self.clients, k) >> np.uint64(1)
            if task.stochastic
            else None
        )
        return Batch(task.inputs, task.targets, rows, weight, task.augment, draws, noise)


def augmenting(
    task: Task, seed: int, purpose: str, version: int, clients: NDArray[np.int64], k: int, count: int
) -> Tensor | None:
    """The numbers that augment a block's k-th batch, `[m, count, ·]`."""
    if (augment := task.augment) is None:
        return None
    column = np.arange(count) if augment.per == "sample" else np.zeros(count, np.int64)
    axes = (clients[:, None, None], k, column[:, None], np.arange(augment.draws))
    return placed(rng.uniform(seed, purpose, version, *axes), task.device)
