"""Are sums the same bits in every order, block, process and tree, and at least as accurate as before?"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbraid as fb
from fedbraid.core import accelerators as passes
from fedbraid.core.context import Staleness, Uploads
from fedbraid.core.exact_sum import FULL, ExactSum, quantum
from fedbraid.core.gather import Mean, Sums
from fedbraid.core.vector_spec import Upload
from fedbraid.engines.accelerators import sums
from fedbraid.errors import ConfigError, WireError
from fedbraid.links.accumulators import from_message, message_of
from fedbraid_native.build import compiler


@pytest.fixture(params=["torch", "compiled"])
def passing(request, monkeypatch):
    """With and without the compiled pass, whatever the width."""
    monkeypatch.setattr(sums, "LEAST", 1)
    if request.param == "torch":
        monkeypatch.setattr(passes, "reach", passes.no_reach)
        monkeypatch.setattr(passes, "fold", passes.no_fold)
        return
    if compiler() is None:
        pytest.skip("no C++ compiler")
    sums.install()
    if sums._LIBRARY.fold is None:
        sums._LIBRARY._load()
        sums._LIBRARY.is_missing = False


def cohort(seed: int, m: int, d: int, spread: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, rows) over many orders of magnitude, between clients and within each."""
    draw = np.random.default_rng(seed)
    rows = (
        draw.normal(size=(m, d))
        * 2.0 ** draw.uniform(-spread, spread, (m, 1))
        * 2.0 ** draw.uniform(-30, 0, (m, d))
    )
    rows[draw.random((m, d)) < 0.1] = 0
    return torch.from_numpy(draw.integers(1, 500, m).astype(np.float32)), torch.from_numpy(
        rows.astype(np.float32)
    )


def tree(draw: np.random.Generator, w: torch.Tensor, v: torch.Tensor) -> ExactSum:
    """The sum of a cohort in a random order, random blocks and a random tree."""
    order = draw.permutation(len(w))
    parts: list[ExactSum] = []
    at = 0
    while at < len(w):
        some = order[at : at + int(draw.integers(1, 5))]
        if parts and draw.random() < 0.5:
            parts[int(draw.integers(len(parts)))].add(w[some], v[some])
        else:
            parts.append(ExactSum(v.shape[1]).add(w[some], v[some]))
        at += len(some)
    while len(parts) > 1:
        a, b = (parts.pop(int(draw.integers(len(parts)))) for _ in range(2))
        parts.append(a.merge(b))
    return parts[0]


@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 40), st.sampled_from([0, 3, 20, 60]))
@settings(max_examples=60, deadline=None)
def test_no_order_and_no_tree_changes_a_bit(seed, m, d, spread):
    w, v = cohort(seed, m, d, spread)
    draw = np.random.default_rng(seed)
    whole = ExactSum(d).add(w, v).value()
    for _ in range(3):
        assert torch.equal(tree(draw, w, v).value(), whole)


@given(st.integers(0, 10**6), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_a_sum_is_that_of_terms_rounded_once(seed, m):
    """Compared with fractions: each term a multiple of its row's grid, 50 bits below the row's largest at the least."""
    w, v = cohort(seed, m, 5, 40)
    exact = [Fraction(0)] * 5
    error = 0.0
    for p, row in zip(w.tolist(), v.tolist(), strict=True):
        error += abs(p) * max(map(abs, row)) * 2.0**-50
        exact = [total + Fraction(p) * Fraction(x) for total, x in zip(exact, row, strict=True)]
    found = ExactSum(5).add(w, v).value().tolist()
    for total, x in zip(exact, found, strict=True):
        assert abs(Fraction(x) - total) <= error + abs(total) * Fraction(2) ** -52


def test_a_number_is_no_less_accurate_than_in_float32(passing):
    """Whatever is at least 2⁻²⁶ of its row's largest; the running sum in float32 is what was there before."""
    draw = np.random.default_rng(3)
    m, d = 100, 4000
    v = draw.normal(size=(m, d)) * 2.0 ** draw.uniform(-20, 0, (1, d))
    w, v = (
        torch.from_numpy(draw.integers(20, 500, m).astype(np.float32)),
        torch.from_numpy(v.astype(np.float32)),
    )
    right = (w.double()[:, None] * v.double()).sum(0)
    before = torch.zeros(d)
    for p, row in zip(w.tolist(), v, strict=True):
        before.add_(row, alpha=p)
    now = ExactSum(d).add(w, v).value()
    assert float((now - right).abs().max() / right.abs().max()) < 1e-15
    assert ((now - right).abs() <= (before.double() - right).abs() + 1e-15 * right.abs()).all()


@pytest.mark.parametrize("m", [1, 7, 130])
@pytest.mark.parametrize("d", [1, 1000, 140_000])
def test_the_compiled_pass_gives_the_bits_of_torch(m, d, monkeypatch):
    if compiler() is None:
        pytest.skip("no C++ compiler")
    if m * d > 10**6:
        m = 7
    w, v = cohort(1, m, d, 25)
    found = []
    for reach, fold in ((passes.no_reach, passes.no_fold), (sums.reach, sums.fold)):
        monkeypatch.setattr(passes, "reach", reach)
        monkeypatch.setattr(passes, "fold", fold)
        monkeypatch.setattr(sums, "LEAST", 1)
        if sums._LIBRARY.fold is None:
            sums._LIBRARY._load()
            sums._LIBRARY.is_missing = False
        some = ExactSum(d).add(w[: m // 2], v[: m // 2]).add(w[m // 2 :], v[m // 2 :])
        found.append((some.value(), ExactSum(d).add(w, v[:1].expand(m, -1)).value()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_level_that_fills_up_is_carried(passing):
    """Ten thousand of the largest terms that a level takes, so that it overflows again and again."""
    top = quantum(0) * 2.0**44.9
    v = torch.full((1000, 3), top)
    v[:, 1] *= -1
    v[:, 2] = torch.rand(1000) * top
    w = torch.ones(1000)
    total, parts = ExactSum(3), [ExactSum(3) for _ in range(2)]
    for i in range(10):
        total.add(w, v)
        parts[i % 2].add(w, v)
    assert all(float(level.abs().max()) / quantum(j) <= FULL for j, level in total.levels.items())
    assert max(total.load.values()) <= FULL
    assert len(total.levels) > 2
    assert torch.equal(total.value(), parts[0].merge(parts[1]).value())
    assert torch.allclose(total.value(), 10 * v.double().sum(0), rtol=1e-14, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(bad, passing):
    v = torch.ones(3, 600)
    v[1, 2] = bad
    total = ExactSum(600).add(torch.ones(3), v)
    assert not total.value().isfinite().any()
    assert not ExactSum(600).add(torch.ones(1), v[:1]).merge(total).value().isfinite().any()


def test_nothing_and_zeros_are_zero(passing):
    assert torch.equal(ExactSum(3).value(), torch.zeros(3).double())
    total = ExactSum(3).add(torch.tensor([0.0, 1.0]), torch.tensor([[3.0, -2.0, 1.0], [0.0, -0.0, 0.0]]))
    assert torch.equal(ExactSum(3).merge(total).value(), torch.zeros(3).double())


# The gather ------------------------------------------------------------------------------------------


def uploads(clients: np.ndarray, w: torch.Tensor, v: torch.Tensor, late: torch.Tensor) -> Uploads:
    ones = torch.ones_like(w)[:, None]
    declared = {**fb.fedavg().gathered, "count": Upload("count", width=2, uniform=True)}
    vectors = {"delta": v, "count": v[:, :2].abs()}
    return Uploads(
        clients, vectors, w[:, None], ones, ones, late[:, None], ones.double(), {"x": v[:1]}, declared
    )


@pytest.mark.parametrize("kind", ["constant", "sqrt", "polynomial", "hinge"])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_means_of_means_are_the_mean(kind, weights):
    w, v = cohort(5, 23, 17, 4)
    late = torch.arange(23).float() % 6
    mean, draw, x = Mean(weights, Staleness(kind, a=0.7)), np.random.default_rng(0), v[0]
    assert not mean.traits().needs_every_upload

    def folded(some: np.ndarray) -> Sums:
        return mean.add(mean.zero(x), uploads(some, w[some], v[some], late[some]), {}, x)

    whole = mean.close(folded(np.arange(23)), {}, None)[0]
    for _ in range(5):
        parts = [folded(some) for some in np.array_split(draw.permutation(23), int(draw.integers(2, 9)))]
        acc = mean.zero(x)
        for part in parts:
            acc = mean.merge(acc, part)
        found = mean.close(acc, {}, None)[0]
        assert all(torch.equal(found[name], v) for name, v in whole.items())


def test_a_gather_that_adds_in_its_own_way_is_given_every_upload():
    class Odd(fb.Mean):
        def add(self, acc, up, s, x):
            return super().add(acc, up, s, x)

    assert Odd().traits().needs_every_upload
    assert all(
        a.gather.traits().needs_every_upload
        for a in (
            fb.fedvarp(), fb.fedadavr(), fb.fedasync(form="mixing"), fb.robust(fb.fedavg(), "median"), fb.ace(limit=2),
            fb.attack(fb.fedavg(), "alie", share=0.2), fb.cluster_fedvarp(2), fb.private(fb.fedavg(), noise=1.0),
        )
    )  # fmt: skip


# On the wire -----------------------------------------------------------------------------------------

LAYOUT = fb.Layout.from_shapes([("w", (5, 3)), ("b", (2,))])


def sent() -> tuple[Sums, bytes, dict[str, Upload]]:
    w, v = cohort(2, 9, LAYOUT.size, 30)
    up = uploads(np.arange(9), w, v, torch.zeros(9))
    acc = Mean().add(Mean().zero(v[0]), up, {}, v[0])
    return acc, message_of(acc, LAYOUT), up.declared


def test_an_accumulator_crosses_a_wire():
    acc, message, declared = sent()
    got = from_message(message, declared, LAYOUT)
    assert (got.weight, got.count, got.uniform) == (acc.weight, acc.count, acc.uniform)
    assert all(torch.equal(got.vectors[name].value(), total.value()) for name, total in acc.vectors.items())
    assert message_of(got, LAYOUT) == message
    merged = Mean().close(Mean().merge(got, from_message(message, declared, LAYOUT)), {}, None)[0]
    assert all(torch.equal(v, merged[name]) for name, v in Mean().close(acc, {}, None)[0].items())


def test_an_accumulator_of_nobody_crosses_too():
    got = from_message(message_of(Mean().zero(torch.zeros(3)), LAYOUT), fb.fedavg().gathered, LAYOUT)
    assert (got.vectors, got.weight, got.count) == ({}, 0.0, 0)


def test_a_message_that_is_no_accumulator_is_refused():
    acc, message, declared = sent()
    with pytest.raises(WireError, match="not \\['delta'\\]"):
        from_message(message, fb.fedavg().gathered, LAYOUT)
    with pytest.raises(WireError):
        from_message(message, declared, fb.Layout.from_shapes([("w", (4, 3)), ("b", (5,))]))
    draw = np.random.default_rng(0)
    for _ in range(200):
        at = int(draw.integers(len(message)))
        damaged = message[:at] + bytes([message[at] ^ int(draw.integers(1, 256))]) + message[at + 1 :]
        with pytest.raises(WireError):
            from_message(damaged, declared, LAYOUT)
    j = max(acc.vectors["delta"].levels)
    for odd in (quantum(j) / 2, quantum(j) * 2.0**53):
        forged = Sums({"delta": ExactSum(LAYOUT.size)}, 1.0, 1)
        forged.vectors["delta"].levels[j] = torch.full((LAYOUT.size,), odd, dtype=torch.float64)
        forged.vectors["delta"].load[j] = 1.0
        with pytest.raises(WireError, match="no sum has"):
            from_message(message_of(forged, LAYOUT), declared, LAYOUT)
    diverged = Sums({"delta": ExactSum(2).add(torch.ones(1), torch.tensor([[float("nan"), 0.0]]))}, 1.0, 1)
    with pytest.raises(WireError, match="diverged"):
        message_of(diverged, LAYOUT)
    with pytest.raises(ConfigError, match="secure sums"):
        message_of(Sums({"delta/uniform/8": torch.zeros(2)}, 1.0, 1), LAYOUT)
