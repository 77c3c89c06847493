"""How rows are split across clients: a partition is a frozen recipe, called as `partition(table, clients, seed)`.

It gives one sorted int64 array of row numbers per client, none empty. Every row goes to exactly one
client, with `parity_shards(copies=2)` to two; only `natural` asked for fewer clients than there are ids, and `pachinko` and balanced
`dirichlet` whose equal sizes leave a remainder, leave rows out. `repr` is the call that makes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbraid.core import rng
from fedbraid.core.check import integer, number, one_of
from fedbraid.errors import ConfigError
from fedbraid.parse import evaluate

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Table:
    """The columns that a partition may use: a label per row and, if the data has them, ids and coarse labels."""

    labels: NDArray[Any]
    groups: NDArray[Any] | None = None
    coarse: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, repr=False)
class Partition:
    """A recipe that assigns rows to clients."""

    def __call__(self, table: Table | Any, clients: int, seed: int = 0) -> list[Ints]:
        """One sorted array of row numbers per client, of a table or of plain labels, one for each row.

        >>> [len(rows) for rows in iid()([0, 1, 1, 0, 2, 2], clients=3)]
        [2, 2, 2]
        """
        if not isinstance(table, Table):
            table = Table(np.asarray(table))
        integer("clients", clients)
        if clients > len(table):
            raise ConfigError(
                f"{clients} clients cannot share {len(table)} samples; use at most that many clients"
            )
        return self.deal(table, int(clients), rng.generator(seed, "partition"))

    def deal(self, table: Table, clients: int, gen: np.random.Generator) -> list[Ints]:
        raise NotImplementedError

    def __repr__(self) -> str:
        arguments = [repr(getattr(self, f.name)) for f in fields(self) if not f.kw_only]
        for f in fields(self):
            if f.kw_only and getattr(self, f.name) != f.default:
                arguments.append(f"{f.name}={getattr(self, f.name)!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"


@dataclass(frozen=True, repr=False)
class iid(Partition):
    """Rows in random order, cut into equally large local sets."""

    def deal(self, table: Table, clients: int, gen: np.random.Generator) -> list[Ints]:
        return _shuffled(np.arange(len(table)), np.arange(len(table)) % clients, clients, gen)


@dataclass(frozen=True, repr=False)
class iid_mix(Partition):
    """FedAdaVR's IID-NonIID: this fraction of the rows is spread at random, the rest as `label_chunks(1)`."""

    share: float = 0.5

    def __post_init__(self) -> None:
        number("share", self.share, "[0, 1)", "is not a mixture; use iid() for all")

    def deal(self, table: Table, clients: int, gen: np.random.Generator) -> list[Ints]:
        order = gen.permutation(len(table))
        spread, sorted_ = np.split(order, [round(self.share * len(table))])
        owner = np.empty(len(table), np.int64)
        owner[sorted_] = _chunk_owners(table.labels[sorted_], clients, 1, gen)
        load = np.bincount(owner[sorted_], minlength=clients)
        owner[spread] = np.argsort(load, kind="stable")[np.arange(len(spread)) % clients]
        return _by_owner(owner, clients)


@dataclass(frozen=True, repr=False)
class dirichlet(Partition):
    """Label skew: the smaller alpha, the fewer labels a client holds.

    Each label is split over the clients by a Dirichlet draw, so sizes differ too; a client left without
    rows gets one of the largest client's. `balanced=True` instead draws label fractions per client and gives
    all the same number of rows (Hsu et al. 2019, FedDyn, AdaBest).
    """

    alpha: float
    balanced: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        number("alpha", self.alpha, "(0, inf)", "is not a concentration (smaller is more skewed)")

    def deal(self, table: Table, clients: int, gen: np.random.Generator) -> list[Ints]:
        labels, fine = np.unique(table.labels, return_inverse=True)
        if self.balanced:
            fractions = _dirichlet(gen, self.alpha, len(labels), clients)
            return _equal_sizes(fine, fractions, np.zeros(len(labels), np.int64), clients, gen)
        owner = np.empty(len(table), np.int64)
        for label in range(len(labels)):
            rows = gen.permutation(np.flatnonzero(fine == label))
            counts = gen.multinomial(len(rows), _dirichlet(gen, self.alpha, clients, 1)[0])
            owner[rows] = np.repeat(np.arange(clients), counts)
        return _by_owner(_fill_empty(owner, clients), clients)


@dataclass(frozen=True, repr=False)
class label_chunks(Partition):
    """Sorted by label and cut into chunks of one label, `chunks` for each client: FedAdaVR's LQ-n.

    A client's chunks have different labels wherever the labels allow; chunks of a label are equally
    large, and all chunks as nearly so as an integer number of chunks per label allows.
    """

    chunks: int

    def __post_init__(self) -> None:
        integer("chunks", self.chunks, why="leaves clients without data")

    def deal(self, table: Table, clients: int, gen: np.random.Generator) -> list[Ints]:
        return _by_owner(_chunk_owners(table.labels, clients, self.chunks, gen), clients)


@dataclass(frozen=True, repr=False)
class natural(Partition):
    """One client per id in the data; fewer clients are a random choice of them."""

    def deal(self, table: Table, clients: int, gen: np.random.Generator) -> list[Ints]:
        if table.groups is None:
            raise ConfigError(
                "natural() needs an id for every sample, and this data has none; use another partition"
            )
        ids, owner = np.unique(table.groups, return_inverse=True)
        if clients > len(ids):
            raise ConfigError(
                f"natural() finds {len(ids)} ids in this data, not {clients}; use clients <= {len(ids)}"
            )
        by_id = _by_owner(owner, len(ids))
        return [by_id[i] for i in np.sort(gen.choice(len(ids), clients, replace=False))]


@dataclass(frozen=True, repr=False)
class pachinko(Partition):
    """Pachinko allocation (Reddi et al. 2021): Dirichlet(alpha) over coarse, (beta) over fine labels.

    All clients get the same number of rows; the remainder is not used.
    """

    alpha: float = 0.1
    beta: float = 10.0

    def __post_init__(self) -> None:
        number("alpha", self.alpha, "(0, inf)", "is not a concentration (smaller is more skewed)")
        number("beta", self.beta, "(0, inf)", "is not a concentration (smaller is more skewed)")

    def deal(self, table: Table, clients: int, gen: np.random.Generator) -> list[Ints]:
        if table.coarse is None:
            raise ConfigError("pachinko() needs coarse labels, and this data has none; use dirichlet(alpha)")
        (_, fine), (_, coarse) = _numbered(table.labels), _numbered(table.coarse)
        parent = np.zeros(fine.max() + 1, np.int64)
        parent[fine] = coarse
        if (parent[fine] != coarse).any():
            raise ConfigError(
                "pachinko() needs each fine label under one coarse label; some label here has two"
            )
        fractions = _dirichlet(gen, self.alpha, coarse.max() + 1, clients)[:, parent]
        for family in range(coarse.max() + 1):
            children = np.flatnonzero(parent == family)
            fractions[:, children] *= _dirichlet(gen, self.beta, len(children), clients)
        return _equal_sizes(fine, fractions, parent, clients, gen)


@dataclass(frozen=True, repr=False)
class parity_shards(Partition):
    """FedShift's shards: the first half of the clients ("superior") hold two even labels each, the rest odd.

    Of an odd number of clients the middle one is superior. In the authors' code every shard serves two clients:
    with `copies=2`, half of each side shares the rows of the other half.
    """

    copies: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        one_of("parity_shards(copies=)", self.copies, (1, 2))

    def deal(self, table: Table, clients: int, gen: np.random.Generator) -> list[Ints]:
        if self.copies == 2:
            if clients % 4:
                raise ConfigError(
                    f"parity_shards(copies=2) pairs the clients of a side; {clients} is not a multiple of 4"
                )
            half = replace(self, copies=1).deal(table, clients // 2, gen)
            return [rows.copy() for side in (half[: clients // 4], half[clients // 4 :]) for rows in 2 * side]
        superior = -(-clients // 2)
        sides = ((0, superior), (superior, clients - superior))
        owner = np.asarray(table.labels % 2, np.int64)
        rows = [np.flatnonzero(owner == parity) for parity in (0, 1)]
        for kind, (_, some), side_rows in zip(("even", "odd"), sides, rows):
            if some == 0 or len(side_rows) < some:
                counts = f"{some} clients for {len(side_rows)} samples with {kind} labels"
                raise ConfigError(
                    f"parity_shards() has {counts}; both sides need clients, and a sample for each"
                )
        for (first, some), side_rows in zip(sides, rows):
            chunks = min(2, len(np.unique(table.labels[side_rows])))
            owner[side_rows] = first + _chunk_owners(table.labels[side_rows], some, chunks, gen)
        return _by_owner(owner, clients)


@dataclass(frozen=True, repr=False)
class quantity_skew(Partition):
    """Random rows, but sizes from a Dirichlet(alpha) over the clients: the smaller alpha, the more skewed."""

    alpha: float

    def __post_init__(self) -> None:
        number("alpha", self.alpha, "(0, inf)", "is not a concentration (smaller is more skewed)")

    def deal(self, table: Table, clients: int, gen: np.random.Generator) -> list[Ints]:
        sizes = 1 + gen.multinomial(len(table) - clients, _dirichlet(gen, self.alpha, clients, 1)[0])
        return _shuffled(np.arange(len(table)), np.repeat(np.arange(clients), sizes), clients, gen)


@dataclass(frozen=True, repr=False)
class power_law(Partition):
    """Random rows, one for each client and the rest by weights u^(1/alpha), u uniform: QAFeL's "Dirichlet" CIFAR-10.

    Labels do not depend on clients; the smaller alpha in (0, 1], the fewer clients hold most of the rows.
    """

    alpha: float

    def __post_init__(self) -> None:
        number("alpha", self.alpha, "(0, 1]", "is not an exponent (smaller is more skewed)")

    def deal(self, table: Table, clients: int, gen: np.random.Generator) -> list[Ints]:
        weights = gen.random(clients) ** (1 / self.alpha) + 1e-300
        sizes = 1 + gen.multinomial(len(table) - clients, weights / weights.sum())
        return _shuffled(np.arange(len(table)), np.repeat(np.arange(clients), sizes), clients, gen)


KINDS: dict[str, type[Partition]] = {
    kind.__name__: kind
    for kind in (
        iid,
        iid_mix,
        dirichlet,
        label_chunks,
        natural,
        pachinko,
        parity_shards,
        power_law,
        quantity_skew,
    )
}


def parse(text: str) -> Partition:
    """The partition that a text such as `label_chunks(1)` or `iid` names.

    >>> parse("dirichlet(0.5, balanced=True)")
    dirichlet(0.5, balanced=True)
    """
    partition = evaluate(text, KINDS, "partition")
    if not isinstance(partition, Partition):
        raise ConfigError(f"partition {text!r} is not valid; write one such as label_chunks(1) or iid")
    return partition


# Dealing ------------------------------------------------------------------------------------------


def _numbered(labels: NDArray[Any]) -> tuple[NDArray[Any], Ints]:
    return np.unique(labels, return_inverse=True)


def _by_owner(owner: Ints, clients: int) -> list[Ints]:
    """Row numbers grouped by the client that owns them."""
    rows = np.argsort(owner, kind="stable")
    return np.split(rows, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def _shuffled(rows: Ints, owner: Ints, clients: int, gen: np.random.Generator) -> list[Ints]:
    """Rows in random order, assigned to these owners."""
    mixed = np.empty(len(rows), np.int64)
    mixed[gen.permutation(len(rows))] = owner
    return _by_owner(mixed, clients)


def _fill_empty(owner: Ints, clients: int) -> Ints:
    """Give each empty client one row of the clients that hold most."""
    sizes = np.bincount(owner, minlength=clients)
    empty = np.flatnonzero(sizes == 0)
    if len(empty):
        rows = np.argsort(owner, kind="stable")
        rank = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        owner = owner.copy()
        owner[rows[np.argsort(-rank, kind="stable")[: len(empty)]]] = empty
    return owner


def _dirichlet(gen: np.random.Generator, alpha: float, kinds: int, draws: int) -> Floats:
    """Dirichlet fractions `[draws, kinds]`, none exactly zero."""
    fractions: Floats = gen.dirichlet(np.full(kinds, alpha), draws) + 1e-12
    fractions /= fractions.sum(1, keepdims=True)
    return fractions


def _chunk_owners(labels: NDArray[Any], clients: int, chunks: int, gen: np.random.Generator) -> Ints:
    """The owner of each row when one-label chunks are dealt, `chunks` to a client."""
    kinds, fine = _numbered(labels)
    total = clients * chunks
    if len(labels) < total:
        raise ConfigError(
            f"{clients} clients × {chunks} chunks need {total} samples, not {len(labels)}; use fewer"
        )
    if total < len(kinds):
        raise ConfigError(
            f"{total} chunks cannot separate {len(kinds)} labels; use more clients or more chunks"
        )
    sizes = np.bincount(fine)
    per_label = _apportion(sizes, total)
    rows = gen.permutation(len(labels))
    rows = rows[np.argsort(fine[rows], kind="stable")]
    within = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chunk = np.repeat(np.cumsum(per_label) - per_label, sizes) + within % np.repeat(per_label, sizes)
    holder = _deal(np.repeat(np.arange(len(kinds)), per_label), clients, chunks, gen)
    owner = np.empty(len(rows), np.int64)
    owner[rows] = holder[chunk]
    return owner


def _apportion(sizes: Ints, total: int) -> Ints:
    """How many of `total` chunks each label is cut into: at least one, and no chunk empty."""
    exact = sizes * (total / sizes.sum())
    counts: Ints = np.clip(np.floor(exact).astype(np.int64), 1, sizes)
    while counts.sum() != total:
        step = 1 if counts.sum() < total else -1
        free = counts < sizes if step > 0 else counts > 1
        counts[np.argmax(np.where(free, step * (exact - counts), -np.inf))] += step
    return counts


def _deal(kinds: Ints, clients: int, chunks: int, gen: np.random.Generator) -> Ints:
    """The client of each chunk: every client gets `chunks` of different kinds where possible, mixed at random.

    A client takes every `clients`-th of the sorted chunks; then random pairs of clients swap chunks
    wherever neither ends with a kind twice.
    """
    chunks_of = np.arange(clients * chunks).reshape(chunks, clients).T[gen.permutation(clients)]
    if chunks > 1:
        for _ in range(10 * chunks):
            pairs = gen.permutation(clients)[: clients // 2 * 2].reshape(2, -1)
            slots = gen.integers(chunks, size=pairs.shape)
            _swap(chunks_of, kinds, pairs, slots)
    holder = np.empty(clients * chunks, np.int64)
    holder[chunks_of] = np.arange(clients)[:, None]
    return holder


def _swap(chunks_of: Ints, kinds: Ints, pairs: Ints, slots: Ints) -> None:
    """Swap one chunk between the clients of each pair, unless it gives either a kind it has."""
    (a, b), (r, s) = pairs, slots
    offered, others = kinds[chunks_of[pairs, slots]], kinds[chunks_of[pairs]]
    others[0, np.arange(len(a)), r] = others[1, np.arange(len(b)), s] = -1
    clash = (others[0] == offered[1][:, None]).any(1) | (others[1] == offered[0][:, None]).any(1)
    a, b, r, s = a[~clash], b[~clash], r[~clash], s[~clash]
    chunks_of[a, r], chunks_of[b, s] = chunks_of[b, s], chunks_of[a, r]


def _equal_sizes(
    fine: Ints, fractions: Floats, parent: Ints, clients: int, gen: np.random.Generator
) -> list[Ints]:
    """Each client in turn draws equally many rows by its label fractions; a label used up leaves the draw.

    The fraction of a used-up label goes to its siblings under the same parent, and when those are used up, to all.
    """
    left = np.bincount(fine, minlength=fractions.shape[1])
    order = np.argsort(fine[mixed := gen.permutation(len(fine))], kind="stable")
    rows = mixed[order]
    start = np.cumsum(left) - left
    rows_of = []
    for fraction in fractions:
        counts = _draw(fraction, parent, left, len(fine) // clients, gen)
        drawn = [rows[start[k] : start[k] + counts[k]] for k in np.flatnonzero(counts)]
        rows_of.append(np.sort(np.concatenate(drawn)))
        start, left = start + counts, left - counts
    return rows_of


def _draw(fraction: Floats, parent: Ints, left: Ints, size: int, gen: np.random.Generator) -> Ints:
    """How many rows of each label a client draws, none more than are left."""
    family = np.bincount(parent, fraction)
    counts = np.zeros(len(fraction), np.int64)
    while (missing := size - int(counts.sum())) > 0:
        alive = np.where(counts < left, fraction, 0.0)
        siblings = np.bincount(parent, alive, minlength=len(family))
        weight = alive * (family / np.where(siblings > 0, siblings, 1.0))[parent]
        counts = np.minimum(counts + gen.multinomial(missing, weight / weight.sum()), left)
    return counts
