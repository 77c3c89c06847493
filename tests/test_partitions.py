"""Does every partition hand out each row once, as its recipe says, and again the same way?"""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbraid.data import partition as fp
from fedbraid.data.partition import Table
from fedbraid.errors import ConfigError

ALL = [
    fp.iid(), fp.iid_mix(0.5), fp.dirichlet(0.1), fp.dirichlet(0.5, balanced=True), fp.label_chunks(1),
    fp.label_chunks(2), fp.label_chunks(3), fp.natural(), fp.pachinko(0.1, 10.0), fp.parity_shards(),
    fp.power_law(0.3), fp.quantity_skew(0.5),
]  # fmt: skip
COMPLETE = [p for p in ALL if not isinstance(p, fp.pachinko) and p != fp.dirichlet(0.5, balanced=True)]


def table(rows: int = 2000, labels: int = 10, clients: int = 20, seed: int = 0) -> Table:
    """Uneven labels, and `clients` ids."""
    gen = np.random.default_rng(seed)
    fine = np.minimum(gen.integers(labels, size=rows), gen.integers(2 * labels, size=rows))
    fine[: 4 * labels] = np.arange(4 * labels) % labels
    return Table(fine, groups=gen.permutation(np.arange(rows) % clients), coarse=fine // 2)


def labels_of(t: Table, parts: list[np.ndarray]) -> list[set[int]]:
    return [set(t.labels[p].tolist()) for p in parts]


@pytest.mark.parametrize("partition", ALL, ids=repr)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(200, 900), clients=st.integers(10, 40), seed=st.integers(0, 2**31))
def test_rows_are_used_once_and_nobody_is_empty(partition, rows, clients, seed):
    t = table(rows, clients=clients)
    parts = partition(t, clients, seed)
    used = np.concatenate(parts)
    assert len(parts) == clients
    assert min(map(len, parts)) > 0
    assert used.dtype == np.int64
    assert len(np.unique(used)) == len(used)
    assert used.min() >= 0
    assert used.max() < rows
    assert all((np.diff(p) > 0).all() for p in parts)
    if partition in COMPLETE:
        assert len(used) == rows
    else:
        assert len(used) == rows // clients * clients


@pytest.mark.parametrize("partition", ALL, ids=repr)
def test_seed_decides_everything(partition):
    t = table()
    first, again, other = partition(t, 19, 7), partition(t, 19, 7), partition(t, 19, 8)
    assert all(np.array_equal(a, b) for a, b in zip(first, again))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other))


@pytest.mark.parametrize("partition", ALL, ids=repr)
def test_repr_is_the_call_that_makes_it(partition):
    assert fp.parse(repr(partition)) == partition
    assert hash(fp.parse(repr(partition))) == hash(partition)


def test_reprs_as_written_in_specs():
    assert repr(fp.label_chunks(1)) == "label_chunks(1)"
    assert repr(fp.iid()) == "iid()"
    assert repr(fp.dirichlet(0.5)) == "dirichlet(0.5)"
    assert repr(fp.dirichlet(0.5, balanced=True)) == "dirichlet(0.5, balanced=True)"
    assert fp.parse("iid") == fp.iid()


def test_draws_stay_what_they_were():
    """Partitions are part of a run's identity: a change here breaks resuming and comparing old runs."""
    t = Table(np.arange(12) % 3)
    assert [p.tolist() for p in fp.iid()(t, 4, 0)] == [[3, 4, 11], [1, 7, 8], [2, 9, 10], [0, 5, 6]]
    assert [p.tolist() for p in fp.label_chunks(1)(t, 4, 0)] == [[1, 4, 7, 10], [0, 3], [6, 9], [2, 5, 8, 11]]


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 10])
def test_label_chunks_gives_each_client_that_many_labels(chunks):
    t = Table(np.arange(6000) % 10)
    parts = fp.label_chunks(chunks)(t, 100, 3)
    assert all(len(held) == chunks for held in labels_of(t, parts))
    assert {len(p) for p in parts} == {60}


def test_label_chunks_mixes_the_pairs_of_labels():
    t = Table(np.arange(6000) % 10)
    pairs = {frozenset(held) for held in labels_of(t, fp.label_chunks(2)(t, 300, 0))}
    assert len(pairs) == 45


def test_label_chunks_of_uneven_labels_stay_pure_and_near_even():
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # MNIST
    t = Table(np.repeat(np.arange(10), counts))
    parts = fp.label_chunks(1)(t, 500, 0)
    assert all(len(held) == 1 for held in labels_of(t, parts))
    assert all(117 <= len(p) <= 123 for p in parts)


def test_iid_is_even_and_iid_mix_keeps_its_share():
    t = Table(np.arange(10_000) % 10)
    assert {len(p) for p in fp.iid()(t, 100, 0)} == {100}
    top = [np.bincount(t.labels[p], minlength=10).max() / len(p) for p in fp.iid_mix(0.5)(t, 100, 0)]
    assert 0.5 < np.mean(top) < 0.6
    assert all(len(held) == 1 for held in labels_of(t, fp.iid_mix(0.0)(t, 100, 0)))


@pytest.mark.parametrize("balanced", [False, True])
def test_dirichlet_alpha_sets_the_skew(balanced):
    t = Table(np.arange(10_000) % 10)

    def spread(alpha):
        parts = fp.dirichlet(alpha, balanced=balanced)(t, 50, 0)
        return np.mean([np.bincount(t.labels[p], minlength=10).max() / len(p) for p in parts])

    assert spread(0.01) > 0.8
    assert spread(1000.0) < 0.2
    sizes = {len(p) for p in fp.dirichlet(0.1, balanced=balanced)(t, 50, 0)}
    assert (sizes == {200}) is balanced


def test_dirichlet_serves_as_many_clients_as_rows():
    t = Table(np.arange(500) % 10)
    assert {len(p) for p in fp.dirichlet(0.01)(t, 500, 0)} == {1}


def test_quantity_skew_alpha_sets_the_sizes():
    t = Table(np.arange(10_000) % 10)
    even = [len(p) for p in fp.quantity_skew(1000.0)(t, 50, 0)]
    uneven = [len(p) for p in fp.quantity_skew(0.1)(t, 50, 0)]
    assert np.std(even) < 20 < 200 < np.std(uneven)


def test_natural_keeps_ids_together_and_can_take_some():
    t = table(clients=20)
    parts = fp.natural()(t, 20, 0)
    assert [np.unique(t.groups[p]).tolist() for p in parts] == [[i] for i in range(20)]
    some = [int(t.groups[p[0]]) for p in fp.natural()(t, 5, 0)]
    assert some == sorted(set(some))
    assert len(some) == 5


def test_power_law_has_a_few_large_clients_and_labels_of_every_kind():
    t = Table(np.arange(5000) % 10)
    sizes = np.array([len(p) for p in fp.power_law(0.1)(t, 100, 0)])
    assert sizes.sum() == 5000
    assert sizes.min() >= 1
    assert np.sort(sizes)[-20:].sum() > 0.8 * 5000
    largest = fp.power_law(0.1)(t, 100, 0)[int(sizes.argmax())]
    assert len(np.unique(t.labels[largest])) == 10
    even = [len(p) for p in fp.power_law(1.0)(t, 100, 0)]
    assert max(even) < sizes.max()


def test_a_shard_may_serve_two_clients():
    t = Table(np.arange(2000) % 10)
    parts = fp.parity_shards(copies=2)(t, 20, 0)
    assert [len(p) for p in parts] == [200] * 20
    for client in range(20):
        assert len({*(t.labels[parts[client]] % 2).tolist()}) == 1
        assert sum(np.array_equal(parts[client], p) for p in parts) == 2
    assert (t.labels[parts[0]] % 2 == 0).all()
    assert (t.labels[parts[10]] % 2 == 1).all()
    with pytest.raises(ConfigError, match="22 is not a multiple of 4"):
        fp.parity_shards(copies=2)(t, 22, 0)


def test_parity_shards_split_even_from_odd():
    t = Table(np.arange(5000) % 10)
    parts = labels_of(t, fp.parity_shards()(t, 100, 0))
    assert all(len(held) == 2 for held in parts)
    assert all(label % 2 == 0 for held in parts[:50] for label in held)
    assert all(label % 2 == 1 for held in parts[50:] for label in held)


def test_pachinko_keeps_to_few_coarse_labels_and_spreads_inside_them():
    fine = np.arange(10_000) % 100
    t = Table(fine, coarse=fine // 5)
    parts = fp.pachinko(0.1, 10.0)(t, 20, 0)
    coarse = [np.bincount(t.coarse[p], minlength=20) for p in parts]
    assert np.mean([np.sort(c)[-3:].sum() / 500 for c in coarse]) > 0.5
    top = [np.bincount(fine[p][t.coarse[p] == c.argmax()] % 5, minlength=5) for p, c in zip(parts, coarse)]
    assert np.mean([(counts > 0).sum() for counts in top[:10]]) > 4
    wide = fp.pachinko(1000.0, 10.0)(t, 20, 0)
    assert np.mean([np.bincount(t.coarse[p], minlength=20).max() for p in wide]) < 60


@pytest.mark.parametrize("partition", ALL, ids=repr)
def test_ten_thousand_clients_take_less_than_a_second(partition):
    t = table(60_000, clients=10_000)
    start = time.process_time()
    partition(t, 10_000, 0)
    assert time.process_time() - start < 1.0


BAD = [
    (lambda t: fp.iid()(t, 0, 0), "clients must be an integer >= 1, got 0"),
    (lambda t: fp.iid()(t, 101, 0), "101 clients cannot share 100 samples"),
    (lambda t: fp.dirichlet(0.0), "alpha must be > 0, got 0.0, .*smaller is more skewed"),
    (lambda t: fp.dirichlet(float("nan")), "alpha must be > 0, got nan"),
    (lambda t: fp.quantity_skew(-1), "alpha must be > 0, got -1"),
    (lambda t: fp.pachinko(0.1, 0), "beta must be > 0, got 0"),
    (lambda t: fp.iid_mix(1.5), r"share must be in \[0, 1\), got 1.5"),
    (lambda t: fp.label_chunks(0), "leaves clients without data"),
    (lambda t: fp.label_chunks(3)(t, 50, 0), "50 clients × 3 chunks need 150 samples, not 100"),
    (lambda t: fp.label_chunks(1)(t, 5, 0), "5 chunks cannot separate 10 labels"),
    (lambda t: fp.natural()(t, 5, 0), "natural.. needs an id for every sample"),
    (lambda t: fp.natural()(Table(t.labels, groups=t.labels), 11, 0), "finds 10 ids in this data, not 11"),
    (lambda t: fp.pachinko()(t, 5, 0), "pachinko.. needs coarse labels"),
    (lambda t: fp.pachinko()(Table(t.labels, coarse=np.arange(100) % 7), 5, 0), "under one coarse label"),
    (lambda t: fp.parity_shards()(t, 1, 0), "parity_shards.. has 0 clients for 50 samples with odd labels"),
    (lambda t: fp.parity_shards()(Table(t.labels * 2), 4, 0), "2 clients for 0 samples with odd labels"),
    (lambda t: fp.parse("label_chunk(1)"), "unknown partition 'label_chunk'; did you mean 'label_chunks'"),
    (lambda t: fp.parse("label_chunks("), "cannot be read; write it as"),
    (lambda t: fp.parse("label_chunks()"), r"it is called as label_chunks\(chunks\)"),
    (lambda t: fp.parse("dirichlet(open('x'))"), "unknown argument of dirichlet 'open'"),
    (lambda t: fp.parse("a.b(1)"), "unknown partition 'b'"),
    (lambda t: fp.parse("iid_mix('half')"), "got 'half', which is not a number"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_what_cannot_be_is_said_in_a_sentence(call, message):
    with pytest.raises(ConfigError, match=message):
        call(Table(np.arange(100) % 10))
