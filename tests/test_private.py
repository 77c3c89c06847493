"""Is a private run as private as it says: clipped, noised, accounted, and refused where it could not be?"""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedbraid as fb
from fedbraid.core.context import ServerContext, Uploads
from fedbraid.privacy.clipping import clipped as cut
from fedbraid.privacy.parts import Noised

dp = pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
from dp_accounting import pld, rdp  # noqa: E402

WORK = fb.Work(lr=0.05, epochs=1, batch=8)
DELTA = 1e-5


def poisson(steps):
    return fb.rounds(steps, clients=2, sampling="poisson")


def spent(accountant, event, steps, delta=DELTA):
    return accountant.compose(dp.SelfComposedDpEvent(event, steps)).get_epsilon(delta)


class Stop:
    """Ends a run at a step that is not yet committed, as a crash would."""

    def __init__(self, at):
        self.at = at

    def step(self, record, run):
        if record["step"] == self.at:
            raise Stopped


class Stopped(Exception):
    pass


# Accounting -----------------------------------------------------------------------------------------------


def test_epsilon_is_what_dp_accounting_says(blobs):
    """At the last step of every kind of schedule: 6 clients, z = 2."""
    direct = {
        poisson(3): spent(pld.PLDAccountant(), dp.PoissonSampledDpEvent(2 / 6, dp.GaussianDpEvent(2.0)), 3),
        fb.rounds(3, clients=2): spent(
            rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE),
            dp.SampledWithoutReplacementDpEvent(6, 2, dp.GaussianDpEvent(1.0)),
            3,
        ),
        fb.buffered(3, buffer=2, concurrency=3): dp.get_epsilon_gaussian(2 / math.sqrt(3), DELTA),
    }
    for schedule, epsilon in direct.items():
        run = fb.simulate(blobs, fb.private(fb.fedavg(), noise=2.0), WORK, schedule)
        assert run.history[-1]["epsilon"] == epsilon
        each = [r["epsilon"] for r in run.history]
        assert each == sorted(each)
        assert each[0] < each[-1]


def test_plain_gaussians_compose_as_the_pld_accountant_composes_them():
    relation = dp.NeighboringRelation.REPLACE_SPECIAL
    composed = spent(pld.PLDAccountant(relation), dp.GaussianDpEvent(4.0), 5)
    assert dp.get_epsilon_gaussian(4 / math.sqrt(5), DELTA) == pytest.approx(composed, rel=1e-3)


def test_between_exact_steps_epsilon_is_rounded_up(blobs):
    run = fb.simulate(
        blobs, fb.private(fb.fedavg(), noise=2.0), WORK, fb.buffered(30, buffer=2), evaluate_every=None
    )
    said = np.array([r["epsilon"] for r in run.history])
    exact = np.array([dp.get_epsilon_gaussian(2 / math.sqrt(t), DELTA) for t in range(1, 31)])
    assert (said >= exact).all()
    assert (said <= 1.3 * exact).all()
    assert said[-1] == exact[-1]


def test_noise_is_solved_for_the_whole_schedule(blobs):
    run = fb.simulate(blobs, fb.private(fb.fedavg(), epsilon=3.0), WORK, fb.buffered(6, buffer=2))
    assert 2.98 < run.history[-1]["epsilon"] <= 3.0
    assert len(run.history) == 6


@pytest.mark.parametrize("schedule", [poisson(100), fb.rounds(100, clients=2), fb.buffered(100, buffer=2)])
def test_a_huge_budget_is_kept_with_a_little_noise(schedule):
    from fedbraid.privacy.mechanisms import HOLLOW, Mechanism, solved

    how, _ = Mechanism.of(schedule, 6)
    assert 0.99 * HOLLOW < how.epsilon(solved(how, 1e9, DELTA, 100), DELTA, 100) <= HOLLOW


def test_a_run_ends_before_the_step_that_would_exceed_its_budget(blobs, tmp_path):
    a = fb.private(fb.fedavg(), noise=2.0, epsilon=6.0)
    within = [t for t in range(1, 13) if dp.get_epsilon_gaussian(2 / math.sqrt(t), DELTA) <= 6]
    run = fb.simulate(blobs, a, WORK, fb.buffered(12, buffer=2), out=tmp_path / "run")
    assert 1 < len(run.history) == within[-1] < 12
    assert run.history[-1]["epsilon"] <= 6
    assert len(fb.resume(tmp_path / "run").history) == within[-1]


# Clipping and noise ---------------------------------------------------------------------------------------


def uploads(vectors, declared):
    m = len(next(iter(vectors.values())))
    one = torch.ones(m, 1)
    return Uploads(np.arange(m), vectors, one, one, one, 0 * one, one.double(), {}, declared)


def gather(a, z=0.0, planned=4.0, seed=0):
    from dataclasses import replace

    return replace(a.gather, z=z, planned=planned, seed=seed)


def closed(g, up, x, t=0):
    layout = fb.Layout.from_shapes([("w", (len(x),))])
    ctx = ServerContext(t, 4, 9, 9.0, 0.1, 1.0, 1.0, 0.0, layout, np.ones(9, np.int64))
    acc = g.zero(x)
    if up is not None:
        acc = g.add(acc, up, {}, x)
    return g.close(acc, {}, ctx)[0]["delta"]


def test_one_client_moves_the_noiseless_sum_by_no_more_than_the_clip():
    a, x = fb.private(fb.fedavg(), clip=0.7, noise=1.0), torch.zeros(50)
    torch.manual_seed(0)
    for scale in (1e-3, 0.1, 1.0, 1e6):
        raw = {"delta": scale * torch.randn(5, 50)}
        clipped = cut(raw, 0.7, a.uploads)
        assert clipped["delta"].norm(dim=1).max() <= 0.7 * (1 + 1e-6)
        g = gather(a)
        whole = closed(g, uploads(clipped, a.uploads), x)
        without = closed(g, uploads({"delta": clipped["delta"][1:]}, a.uploads), x)
        assert 4 * (whole - without).norm() <= 0.7 * (1 + 1e-4)
    small = {"delta": torch.full((1, 50), 1e-3)}
    assert cut(small, 0.7, a.uploads)["delta"].equal(small["delta"])


def test_several_uploads_are_clipped_together_by_their_scales():
    declared = {"a": fb.Upload("a", clip_scale=1.0), "b": fb.Upload("b", clip_scale=10.0)}
    got = cut({"a": torch.tensor([[3.0]]), "b": torch.tensor([[40.0]])}, 1.0, declared)
    torch.testing.assert_close(got["a"], torch.tensor([[0.6]]))
    torch.testing.assert_close(got["b"], torch.tensor([[8.0]]))


def test_noise_has_the_deviation_that_it_claims():
    a, x = fb.private(fb.fedavg(), clip=0.5, noise=3.0), torch.zeros(100_000)
    g = gather(a, z=3.0, planned=4.0)
    first, second = closed(g, None, x, t=0), closed(g, None, x, t=1)  # nobody came, and it moves all the same
    for noise in (first, second):
        assert float(noise.std()) == pytest.approx(3.0 * 0.5 / 4, rel=0.01)
        assert abs(float(noise.mean())) < 5 * 0.375 / math.sqrt(1e5)
    assert abs(float((first * second).mean())) < 5 * 0.375**2 / math.sqrt(1e5)
    assert closed(g, None, x, t=0).equal(first)


def test_a_client_counts_once_in_a_step():
    a, x = fb.private(fb.fedavg(), noise=1.0), torch.zeros(3)
    g, up = gather(a, planned=1.0), uploads({"delta": torch.ones(2, 3)}, a.uploads)
    acc = g.add(g.add(g.zero(x), up, {}, x), up, {}, x)
    assert acc.sums.vectors["delta"].value().tolist() == [2.0, 2.0, 2.0]


def test_no_step_goes_without_a_run_that_knows_its_noise():
    a = fb.private(fb.fedavg(), noise=1.0)
    assert closed(a.gather, None, torch.zeros(3)).isnan().all()


EVEN = fb.Work(lr=0.05, steps=3, batch=8)
ONE_NAME = {
    "fedavg": fb.fedavg(weights="uniform"),
    "fedavgm": fb.fedavgm(weights="uniform"),
    "fedprox": fb.fedprox(mu=0.1, weights="uniform"),
    "fedadam": fb.fedadam(weights="uniform"),
    "fedyogi": fb.fedyogi(weights="uniform"),
    "fedadagrad": fb.fedadagrad(weights="uniform"),
    "fedlamb": fb.fedlamb(weights="uniform"),
    "feddyn": fb.feddyn(weights="uniform"),
    "adabest": fb.adabest(weights="uniform"),
    "fedgbo": fb.fedgbo(),
    "fedgbo-adam": fb.fedgbo("adam"),
    "ghbm": fb.ghbm(tau=2, weights="uniform"),
    "scallion": fb.scallion(alpha=0.7, weights="uniform"),
    "scaffold_m": fb.scaffold_m(weights="uniform"),
    "fedvarp": fb.fedvarp(held="client", weights="uniform"),
    "mifa": fb.mifa(held="client", weights="uniform"),
    "fedadavr": fb.fedadavr("adam", lr=0.02, eps=1e-3, held="client", weights="uniform"),
    "qafel": fb.qafel(up=fb.codecs.qsgd(8)),
    "fedpaq": fb.fedpaq(fb.codecs.int8(), weights="uniform"),
    "of_weights": fb.fedpaq(fb.codecs.of_weights(fb.codecs.int8()), weights="uniform"),
    "fedef": fb.fedef(fb.codecs.topk(0.3), weights="uniform"),
}
SCALED = {
    "scaffold": (fb.scaffold(weights="uniform"), {"dc": 10.0}),
    "mimelite": (fb.mimelite(), {"grad": 10.0}),
    "fednova": (fb.fednova(weights="uniform"), {"a": 5.0, "delta": 10.0}),
}
EVERY = {name: (a, None) for name, a in ONE_NAME.items()} | SCALED


@pytest.mark.parametrize("where", ["server", "client"])
@pytest.mark.parametrize("name", EVERY)
def test_without_noise_and_with_a_wide_clip_it_is_the_algorithm(blobs, name, where):
    a, scales = EVERY[name]
    if (name, where) == ("fednova", "client"):
        pytest.skip("refused: noise on what the server divides by")
    plain = fb.simulate(blobs, a, EVEN, fb.rounds(5, clients=3), seed=1)
    quiet = fb.private(a, clip=1e6, noise=0.0, where=where, scales=scales)
    run = fb.simulate(blobs, quiet, EVEN, fb.rounds(5, clients=3), seed=1)
    torch.testing.assert_close(run.x, plain.x, rtol=1e-4, atol=1e-5)
    assert "epsilon" not in run.history[-1]


@pytest.mark.parametrize("name", EVERY)
def test_every_one_runs_with_noise_and_empty_rounds(blobs, name):
    a, scales = EVERY[name]
    quiet = fb.private(a, clip=0.5, noise=3.0, scales=scales)
    run = fb.simulate(blobs, quiet, EVEN, fb.rounds(5, clients=1, sampling="poisson"), seed=3)
    assert any(not r["clients"] for r in run.history)
    assert run.x.isfinite().all()
    assert run.history[-1]["epsilon"] > 0


def test_server_held_memory_is_private_where_clients_noise(blobs):
    for a in (fb.fedvarp(), fb.fedadavr("sgd", lr=1.0, memory="int8"), fb.mifa(), fb.cluster_fedvarp(2)):
        run = fb.simulate(
            blobs, fb.private(a, noise=2.0, where="client"), WORK, fb.rounds(3, clients=3), seed=1
        )
        assert run.history[-1]["epsilon"] > 0


def test_fednova_is_clipped_after_it_is_rescaled(blobs):
    """d_i = Δ_i/(η a_i) and a_i together, by their scales, against NumPy."""
    a = fb.private(fb.fednova(), clip=0.8, noise=0.0, scales={"a": 4.0, "delta": 2.0})
    run = fb.simulate(blobs, a, WORK, fb.rounds(1, clients=6), seed=1)
    seen: dict[int, tuple] = {}
    for client in range(6):
        alone = fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(1, clients=[[client]]), seed=1)
        steps = math.ceil(blobs.sizes[client] / 8)
        d = (blobs.initial(1) - alone.x).double() / (0.05 * steps)
        shrink = min(1.0, 0.8 / math.hypot(float(d.norm()) / 2.0, steps / 4.0))
        seen[client] = (d * shrink, steps * shrink)
    mean_d = sum(d for d, _ in seen.values()) / 6
    mean_a = sum(k for _, k in seen.values()) / 6
    torch.testing.assert_close(
        run.x.double(), blobs.initial(1).double() - 0.05 * mean_a * mean_d, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(("share", "sampling"), [(1.0, "poisson"), (0.5, "fixed")])
def test_fedshift_counts_quantised_clients_among_all_not_among_those_who_came(blobs, share, sampling):
    """A step would tell who came: of one without anybody, or of clients of one kind alone."""
    a = fb.fedshift(fb.fedpaq(fb.codecs.mixed(fb.codecs.int8(), share=share), lr=1e-20))
    schedule = fb.rounds(1, clients=1, sampling=sampling)
    seed = next(
        s for s in range(9) if not len(next(iter(schedule.ticks(6, s))).clients) or sampling == "fixed"
    )
    run = fb.simulate(blobs, fb.private(a, noise=0.0), WORK, schedule, seed=seed)
    expected = blobs.initial(seed).clone()
    for slot in blobs.layout:
        if len(slot.shape) > 1:
            expected[slot.offset : slot.end] -= share * expected[slot.offset : slot.end].mean()
    torch.testing.assert_close(run.x, expected)


# A clip that follows the median ---------------------------------------------------------------------------


def test_an_adaptive_clip_finds_the_median_norm():
    """20 clients with norms 1 to 20, little noise."""
    from dataclasses import replace

    a = fb.private(fb.fedavg(), clip="adaptive", noise=0.3)
    g, x = replace(a.gather, z=0.3, planned=20.0, seed=5), torch.zeros(4)
    rows = torch.nn.functional.normalize(
        torch.randn(20, 4, generator=torch.Generator().manual_seed(1)), dim=1
    )
    raw, s, clips = torch.arange(1.0, 21.0)[:, None] * rows, g.init(x, None), []
    layout = fb.Layout.from_shapes([("w", (4,))])
    for t in range(120):
        up = uploads({"delta": cut({"delta": raw}, s["clip"], a.uploads)["delta"]}, a.uploads)
        up.sent = {"clip": s["clip"][None]}
        ctx = ServerContext(t, 20, 20, 20.0, 0.1, 1.0, 1.0, 0.0, layout, np.ones(20, np.int64))
        u, s, _ = g.close(g.add(g.zero(x), up, s, x), s, ctx)
        clips.append(float(u["clip"]))
    assert clips[0] > 0.1
    assert np.mean(clips[60:]) == pytest.approx(10.5, rel=0.15)


def test_an_adaptive_clip_is_sent_recorded_and_resumed(blobs, tmp_path):
    a, schedule = fb.private(fb.feddyn(), clip="adaptive", noise=0.4), fb.rounds(6, clients=6)
    work = fb.Work(lr=1.0, epochs=2, batch=8)
    run = fb.simulate(blobs, a, work, schedule, seed=2)
    clips = [r["clip"] for r in run.history]
    assert clips[-1] > 0.13  # from 0.1 up: norms are near 1
    assert float(run.state.sent[6].vectors["clip"]) == pytest.approx(clips[-1])
    held = (
        run.state.clients.get(range(6))["h_i"].norm(dim=1) / 0.02
    )  # Σ Δ_i as they were clipped, over six visits
    assert held.max() <= sum([0.1, *clips[:-1]]) * 1.0001
    assert held.max() > 0.3
    with pytest.raises(Stopped):
        fb.simulate(blobs, a, work, schedule, seed=2, out=tmp_path / "run", callbacks=[Stop(3)])
    assert [r["clip"] for r in fb.resume(tmp_path / "run").history] == clips


def test_a_late_client_is_clipped_to_the_clip_of_today(blobs):
    a = fb.private(fb.fedbuff(), clip="adaptive", noise=0.3)
    run = fb.simulate(blobs, a, fb.Work(lr=1.0, batch=8), fb.buffered(6, buffer=4, concurrency=5), seed=1)
    assert run.history[-1]["clip"] > 0.1
    quiet = gather(a, planned=1.0)
    up = uploads({"delta": torch.full((1, 4), 3.0)}, a.uploads)
    up.sent = {"clip": torch.tensor([[6.0]])}
    acc = quiet.add(quiet.zero(torch.zeros(4)), up, {"clip": torch.tensor([2.0])}, torch.zeros(4))
    assert float(acc.sums.vectors["delta"].value().norm()) == pytest.approx(2.0)
    assert acc.below == -0.5  # it was cut by the clip that it was sent


def test_the_count_takes_its_part_of_the_noise():
    from dataclasses import replace

    a = fb.private(fb.fedavg(), clip="adaptive", noise=2.0)
    g = replace(a.gather, z=2.0, planned=50.0)
    assert g.z_below == 2.5
    assert g.z_sum**-2 + (2 * g.z_below) ** -2 == pytest.approx(2.0**-2)


# Noise of clients' own ------------------------------------------------------------------------------------


def test_a_clients_epsilon_is_of_its_own_visits(blobs, tmp_path):
    a, schedule = fb.private(fb.fedavg(), noise=5.0, where="client"), fb.rounds(8, clients=2)
    run = fb.simulate(blobs, a, WORK, schedule, seed=1)
    visits = np.zeros(6, int)
    for r in run.history:
        np.add.at(visits, r["clients"], 1)
        assert r["epsilon"] == dp.get_epsilon_gaussian(5 / 2 / math.sqrt(visits.max()), DELTA)
    with pytest.raises(Stopped):
        fb.simulate(blobs, a, WORK, schedule, seed=1, out=tmp_path / "run", callbacks=[Stop(3)])
    resumed = fb.resume(tmp_path / "run")
    assert [r["epsilon"] for r in resumed.history] == [r["epsilon"] for r in run.history]
    assert resumed.x.equal(run.x)


def test_own_noise_is_solved_for_the_visits_and_ends_with_the_budget(blobs):
    a = fb.private(fb.fedavg(), epsilon=3.0, where="client")
    run = fb.simulate(blobs, a, WORK, fb.rounds(8, clients=2), seed=1)
    assert len(run.history) == 8
    assert 2.98 < run.history[-1]["epsilon"] <= 3.0
    a = fb.private(fb.fedavg(), noise=5.0, epsilon=3.0, where="client")
    ended = fb.simulate(blobs, a, WORK, fb.rounds(30, clients=2), seed=1)
    assert 1 < len(ended.history) < 30
    assert ended.history[-1]["epsilon"] <= 3.0
    visits = np.bincount([c for r in ended.history for c in r["clients"]], minlength=6)
    following = list(fb.rounds(30, clients=2).ticks(6, 1))[len(ended.history)].clients
    np.add.at(visits, following, 1)
    assert dp.get_epsilon_gaussian(5 / 2 / math.sqrt(visits.max()), DELTA) > 3.0


def sender(a, clients, layout, version=0, frames=None):
    from fedbraid.core.link import UploadContext

    return UploadContext(
        np.array(clients), version, 0, torch.zeros(1, layout.size), a.uploads, layout, frames
    )


def test_own_noise_has_its_deviation_and_is_never_the_same_twice():
    from dataclasses import replace

    a = fb.private(fb.fedavg(), clip=0.5, noise=2.0, where="client")
    layout, link = fb.Layout.from_shapes([("w", (50_000, 2))]), replace(a.up, z=2.0)
    zero = {"delta": torch.zeros(2, 100_000)}
    got = [link.send(zero, {}, sender(a, [0, 1], layout, version)).received["delta"] for version in (0, 1, 0)]
    for noise in got[:2]:
        assert noise.std(dim=1).tolist() == pytest.approx([1.0, 1.0], rel=0.01)
    several = torch.cat(got[:2])
    apart = (several @ several.T / 1e5).fill_diagonal_(0)
    assert apart.abs().max() < 5 / math.sqrt(1e5)
    assert got[0].equal(got[2])  # in simulation it repeats with the seed
    real = [
        link.send({"delta": zero["delta"][:1]}, {}, sender(a, [0], layout, 0, {})).received["delta"]
        for _ in range(2)
    ]
    assert not real[0].equal(real[1])  # and on a real client it must not
    assert float(real[0].std()) == pytest.approx(1.0, rel=0.01)
    assert abs(float((real[0] * real[1]).mean())) < 5 / math.sqrt(1e5)


def test_own_noise_goes_on_before_anything_is_encoded():
    from dataclasses import replace

    a = fb.private(fb.fedpaq(fb.codecs.int4()), clip=0.5, noise=1.0, where="client")
    layout = fb.Layout.from_shapes([("w", (64, 64))])
    sent = replace(a.up, z=1.0).send({"delta": torch.ones(1, 4096)}, {}, sender(a, [0], layout))
    per_layer = sent.received["delta"].unique()
    assert len(per_layer) <= 15  # what arrives is int4's levels, not levels plus noise


def test_client_held_memory_stays_the_sum_of_what_was_clipped(blobs):
    a = fb.private(fb.fedadavr("sgd", lr=1.0, held="client"), clip=2.0, noise=0.0)
    run = fb.simulate(blobs, a, WORK, fb.rounds(6, clients=3), seed=1)
    held = run.state.clients.get(range(6))["y_i"]
    torch.testing.assert_close(run.state.server[0].total, held.double().sum(0), rtol=1e-4, atol=1e-4)
    assert held.norm(dim=1).max() > 1
    uncut = fb.simulate(
        blobs, fb.fedadavr("sgd", lr=1.0, held="client", weights="uniform"), WORK, fb.rounds(6, clients=3), seed=1
    )  # fmt: skip
    assert not torch.allclose(uncut.x, run.x, atol=1e-3)  # the clip was felt


def test_an_empty_round_makes_a_noised_update_and_resumes_to_the_bit(blobs, tmp_path):
    a, schedule = fb.private(fb.feddyn(), noise=3.0), fb.rounds(5, clients=1, sampling="poisson")
    straight = fb.simulate(blobs, a, WORK, schedule, seed=3)
    empty = [r["step"] for r in straight.history if not r["clients"]]
    norms = {r["step"]: r["norm"] for r in straight.history}
    assert empty
    assert all(norms[t] != norms[t - 1] for t in empty if t > 1)
    with pytest.raises(Stopped):
        fb.simulate(blobs, a, WORK, schedule, seed=3, out=tmp_path / "run", callbacks=[Stop(3)])
    resumed = fb.resume(tmp_path / "run")
    assert resumed.x.equal(straight.x)
    assert [r["epsilon"] for r in resumed.history] == [r["epsilon"] for r in straight.history]
    assert not fb.simulate(blobs, a, WORK, schedule, seed=4).x.equal(straight.x)


def test_weights_by_samples_are_given_up_and_it_is_said(blobs, caplog):
    from fedbraid.algorithms.private import _say_once

    _say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "fedbraid"):
        a = fb.private(fb.fedvarp(held="client"), noise=1.0)
        fb.private(fb.fedavg(), noise=1.0)
    assert caplog.text.count("all clients count alike") == 1
    assert isinstance(a.gather, Noised)
    assert a.rule.weights == "uniform"
    assert a.server.transforms[0].weights == "uniform"


# Refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: fb.private(fb.scaffold(), noise=1.0), "scaffold uploads 'dc', whose scale is not declared"),
        (lambda: fb.private(fb.mfl("adam"), noise=1.0), "mfl uploads 'v', which is never negative"),
        (lambda: fb.private(fb.fedvarp(), noise=1.0), r"reads single clients' updates.*held='client'"),
        (
            lambda: fb.private(fb.adabest(weights="progressive"), noise=1.0),
            "accounts for every single client's samples",
        ),
        (
            lambda: fb.private(fb.feddyn(weights="progressive"), noise=1.0),
            "tells clients the mean number of samples of all",
        ),
        (lambda: fb.private(fb.mimelite(), noise=1.0), "mimelite uploads 'grad', whose scale"),
        (lambda: fb.private(fb.fednova(), noise=1.0), "fednova uploads 'a', whose scale"),
        (lambda: fb.private(fb.fedasync(form="mixing"), noise=1.0), "gathers by Mixing"),
        (
            lambda: fb.private(fb.scaffold(), noise=1.0, scales={"dd": 1.0}),
            "unknown upload 'dd'; valid: dc, delta",
        ),
        (
            lambda: fb.private(fb.scaffold(), noise=1.0, scales={"dc": 0.0}),
            r"scales\['dc'\]=0.0 divides by nothing",
        ),
        (
            lambda: fb.private(fb.fednova(), noise=1.0, scales={"a": 10.0}, where="client"),
            "their own noise may bring to zero",
        ),
        (
            lambda: fb.private(fb.fedavg(), noise=1.0, clip="adaptive", where="client"),
            "only a trusted server sees",
        ),
        (lambda: fb.private(fb.private(fb.fedavg(), noise=1.0), noise=1.0), "private already"),
        (lambda: fb.private(fb.fedavg()), "needs noise= .* or epsilon="),
        (lambda: fb.private(fb.fedavg(), noise=-1.0), "noise must be >= 0, got -1.0"),
        (lambda: fb.private(fb.fedavg(), noise=math.nan), "private got noise=nan; give it a finite number"),
        (lambda: fb.private(fb.fedavg(), noise=math.inf), "noise=inf; give it a finite number"),
        (lambda: fb.private(fb.fedavg(), epsilon=math.inf), "epsilon=inf; give it a finite number"),
        (lambda: fb.private(fb.fedavg(), noise=0.0, epsilon=1.0), "noise=0 keeps no budget"),
        (lambda: fb.private(fb.fedavg(), epsilon=0.0), "a budget that no noise can keep"),
        (lambda: fb.private(fb.fedavg(), noise=1.0, clip=0.0), "clip=0.0 bounds nothing or lets nothing"),
        (lambda: fb.private(fb.fedavg(), noise=1.0, clip="median"), "use a number > 0 or 'adaptive'"),
        (lambda: fb.private(fb.fedavg(), noise=1.0, delta=0.0), r"delta must be in \(0, 1\), got 0.0"),
        (lambda: fb.private(fb.fedavg(), noise=1.0, where="clients"), "did you mean 'client'"),
    ],
)
def test_what_cannot_be_private_says_why(build, said):
    with pytest.raises(fb.FedbraidError, match=said):
        build()


@pytest.mark.parametrize(
    ("algorithm", "schedule", "said"),
    [
        (fb.error_feedback(fb.private(fb.fedavg(), noise=1.0)), fb.rounds(2, clients=2), "does not clip"),
        (fb.private(fb.fedavg(), noise=1.0), fb.rounds(2, clients=[[0], [1]]), "cohorts that are drawn"),
        (
            fb.private(fb.fedavg(), noise=1.0),
            fb.rounds(2, clients=2, over_select=1.5),
            "leave out over and timeout",
        ),
        (fb.private(fb.fedavg(), noise=0.1, epsilon=0.1), fb.buffered(2), "more than the budget of 0.1"),
        (
            fb.private(fb.fedavg(), noise=0.1, epsilon=0.1, where="client"),
            fb.rounds(2, clients=2),
            "more than the budget of 0.1",
        ),
        (
            fb.private(fb.fedavg(), noise=0.7, clip="adaptive"),
            fb.rounds(2, clients=6),
            "cohorts of at least 8 clients",
        ),
        (fb.private(fb.fedgbo(), noise=1.0), fb.buffered(2, buffer=2), "sent different versions"),
        (fb.private(fb.fedgbo(), noise=1.0), fb.rounds(2, clients=2), r"use Work\(steps=…\)"),
    ],
)
def test_what_a_run_cannot_account_for_is_refused_before_anything_is_written(
    blobs, tmp_path, algorithm, schedule, said
):
    with pytest.raises(fb.FedbraidError, match=said):
        fb.simulate(blobs, algorithm, WORK, schedule, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_large_delta_is_warned_of(blobs, caplog):
    with caplog.at_level(logging.WARNING, "fedbraid"):
        fb.simulate(blobs, fb.private(fb.fedavg(), noise=2.0, delta=0.5), WORK, fb.buffered(1, buffer=2))
    assert "no less than 1/6" in caplog.text


def test_clients_that_remember_are_not_private_where_they_may_come_twice(blobs):
    for a in (fb.feddyn(mu=0.1), fb.fedvarp(held="client"), fb.fedef(fb.codecs.topk(0.5))):
        with pytest.raises(fb.errors.ConfigError, match="may upload twice in one step"):
            fb.simulate(blobs, fb.private(a, noise=1.0), fb.Work(), fb.buffered(2, buffer=2, concurrency=3))


def test_its_name_builds_it_again():
    from fedbraid.algorithms.registry import algorithm_of, parts

    a = fb.private(fb.scaffold(lr=0.5), clip="adaptive", epsilon=8.0, scales={"dc": 10.0})
    assert a.name == "private(scaffold(lr=0.5), clip='adaptive', epsilon=8.0, scales={'dc': 10.0})"
    assert parts(algorithm_of(a.name)) == parts(a)
    own = fb.private(fb.fedadavr(), clip=2, noise=1.0, where="client")
    assert parts(algorithm_of(own.name)) == parts(own)


# Before and while it runs ---------------------------------------------------------------------------------


def test_cost_says_noise_epsilon_and_the_rounds_that_a_budget_buys(capsys):
    import json

    from fedbraid.cli import main

    def cost(*more):
        words = [
            "cost",
            "softmax_regression",
            "fedavg",
            "--clients",
            "100",
            "--per-round",
            "10",
            "--sampling",
            "poisson",
            "--json",
            *more,
        ]
        assert main(words) == 0
        return json.loads(capsys.readouterr().out)["privacy"]

    event = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(2.0))
    spent_20 = spent(pld.PLDAccountant(), event, 20)
    assert cost("--rounds", "20", "--noise", "2")["epsilon"] == spent_20
    found = cost("--rounds", "20", "--epsilon", str(spent_20 + 0.003))
    assert found["noise"] == pytest.approx(2.0, rel=0.01)
    bought = cost("--rounds", "60", "--noise", "2", "--epsilon", str(spent_20 + 1e-6))
    assert bought["rounds"] == 20
    assert bought["epsilons"]["20"] == spent_20


@pytest.mark.parametrize("sampling", ["fixed", "arrivals"])
def test_cost_accounts_for_other_schedules_as_their_runs_do(sampling, blobs, capsys):
    import json

    from fedbraid.cli import main

    words = "cost softmax_regression fedavg --clients 6 --per-round 3 --rounds 4 --noise 3 --json --sampling"
    assert main([*words.split(), sampling]) == 0
    found = json.loads(capsys.readouterr().out)["privacy"]
    schedule = fb.rounds(4, clients=3) if sampling == "fixed" else fb.buffered(4, buffer=3, concurrency=5)
    run = fb.simulate(blobs, fb.private(fb.fedavg(), noise=3.0), WORK, schedule)
    assert found["epsilon"] == run.history[-1]["epsilon"]
    assert main([*words.split(), "poison"]) == 2
    assert "did you mean 'poisson'" in capsys.readouterr().err


def test_report_and_trackers_carry_what_was_spent(blobs, tmp_path):
    from fedbraid.report.collect import collect
    from fedbraid.report.page import describe, render
    from fedbraid.report.tables import as_csv
    from fedbraid.run.callbacks import scalars

    fb.simulate(
        blobs, fb.private(fb.fedavg(), noise=3.0), WORK, fb.buffered(3, buffer=2), out=tmp_path / "run"
    )
    found = collect([tmp_path / "run"])
    (group,) = (data := describe(found))["groups"]
    last = found.groups[0].runs[0].records[-1]
    assert group["settings"]["privacy"].startswith(f"ε = {last['epsilon']:.4g}, δ = 1e-05")
    assert group["curves"]["epsilon"]["mean"][-1] == pytest.approx(last["epsilon"])
    assert f"{last['epsilon']:.4g}" in render(data)
    assert str(last["epsilon"]) in as_csv(found)
    assert scalars(last)["epsilon"] == last["epsilon"]


@pytest.mark.parametrize("kind", ["PLD", "PRV"])  # the second is other people's code altogether
@pytest.mark.parametrize(
    ("rate", "z", "steps"), [(0.01, 0.8, 1000), (0.1, 1.0, 30), (0.3, 2.0, 10), (1.0, 5.0, 20)]
)
def test_epsilon_is_what_pfl_says(kind, rate, z, steps):
    accountants = pytest.importorskip("pfl.privacy.privacy_accountant", reason="pfl is not installed")
    theirs = getattr(accountants, f"{kind}PrivacyAccountant")(
        num_compositions=steps, sampling_probability=rate, mechanism="gaussian", epsilon=None, delta=DELTA, noise_parameter=z
    )  # fmt: skip
    from fedbraid.privacy.mechanisms import Mechanism

    assert Mechanism("poisson", rate).epsilon(z, DELTA, steps) == pytest.approx(theirs.epsilon, rel=1e-3)


def test_the_bar_says_what_was_spent():
    from fedbraid.run.progress import Bar

    bar = Bar()
    bar._add({"bytes_up": 1, "bytes_down": 1, "epsilon": 1.234})
    assert "ε 1.23" in bar._facts()


# What is said before and after --------------------------------------------------------------------


@pytest.mark.parametrize("where", ["server", "client"])
def test_noise_is_set_beside_updates_before_training(where, caplog):
    from fedbraid.privacy.attach import PrivacySetup, attach_privacy
    from fedbraid.run.noise_outlook import outlook

    task, work = fb.tasks.load("digits", clients=20), fb.Work(lr=0.05, steps=1, batch=5)
    schedule = fb.rounds(4, clients=5)
    a, _ = attach_privacy(
        fb.private(fb.fedavg(), clip=2.0, noise=3.0, where=where),
        PrivacySetup(schedule, 20, work, task.sizes, 0),
    )
    seen = outlook(a, 4, 5, task.layout.size)
    d = task.layout.size
    assert seen.update == pytest.approx(2 / math.sqrt(d))
    assert seen.noise == pytest.approx(6 / 5 if where == "server" else 6 / math.sqrt(5))
    assert seen.of_run == pytest.approx(seen.noise / seen.update / 2)
    with_enough = outlook(a, 4, seen.enough, d) if where == "client" else None
    assert with_enough is None or not with_enough.is_weak
    fb.simulate(task, a, work, schedule, evaluate_every=None)
    assert any("hopeless" in r.message and "× over 4 steps" in r.message for r in caplog.records)


def test_divergence_under_noise_names_the_noise():
    task = fb.tasks.load("digits", clients=20)
    with pytest.raises(
        fb.errors.Diverged, match=r"^the noise that keeps this run private exceeds its updates"
    ):
        fb.simulate(
            task, fb.private(fb.fedavg(), noise=1e5), fb.Work(lr=0.05, steps=1), fb.rounds(9, clients=5)
        )


def test_every_summary_says_epsilon_and_delta(tmp_path):
    from fedbraid.report import collect, page

    task = fb.tasks.load("digits", clients=20)
    a = fb.private(fb.fedavg(), clip=0.5, noise=20.0, delta=1e-4)
    run = fb.simulate(task, a, fb.Work(lr=0.05, steps=1), fb.rounds(3, clients=5), out=tmp_path / "run")
    for text in (str(run), run._repr_html_()):
        assert "δ = 0.0001, for all data of a client" in text
    shown = page.describe(collect.collect([tmp_path / "run"]))
    assert "δ = 0.0001" in shown["groups"][0]["settings"]["privacy"]
    assert shown["rows"][0]["epsilon"] == pytest.approx(run.last("epsilon"))


@pytest.mark.parametrize("command", ["run", "compare"])
def test_cohorts_are_sampled_by_poisson_from_the_shell(command, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from fedbraid.cli import app

    monkeypatch.chdir(tmp_path)
    words = ["--rounds", "2", "--per-round", "5", "--sampling", "poisson", "-o", "here", "--json"]
    done = CliRunner().invoke(
        app, [command, "digits", "fedavg", *words, *(["--seeds", "1"] if command == "compare" else [])]
    )
    assert done.exit_code == 0, done.output
    config = json.loads(next(Path("here").rglob("run.json")).read_text())
    assert "sampling='poisson'" in config["schedule"]
    from fedbraid.study import recipe

    assert "--sampling poisson" in recipe.command(recipe.sections(config))


def test_cost_and_run_speak_of_the_same_sampling():
    import inspect

    from fedbraid.cli.cost import cost

    assert inspect.signature(cost).parameters["sampling"].default == fb.rounds(1).sampling


@pytest.mark.parametrize(
    "kwargs", [{"noise": 1.0}, {"noise": 1.0, "where": "client"}, {"noise": 1.0, "unit": "example"}], ids=repr
)
def test_a_missing_extra_is_said_before_training(blobs, kwargs, monkeypatch):
    trained = []
    for name in [m for m in sys.modules if m.split(".")[0] == "dp_accounting"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    monkeypatch.setattr("fedbraid.run.simulate.drive", lambda *args: trained.append(args))
    with pytest.raises(fb.errors.MissingExtra, match="'privacy'"):
        fb.simulate(blobs, fb.private(fb.fedavg(), **kwargs), fb.Work(lr=0.1), fb.rounds(2, clients=2))
    assert not trained
