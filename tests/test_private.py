"""Is a private run as private as it says: clipped, noised, accounted, and refused where it could not be?"""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch

import fedbraid as fb
from fedbraid.algorithms.private import Clipped, Noised
from fedbraid.core.gather import Info, Uploads

dp = pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
from dp_accounting import pld, rdp  # noqa: E402

WORK = fb.Work(lr=0.05, epochs=1, batch=8)
DELTA = 1e-5


def poisson(steps):
    return fb.rounds(steps, clients=2, sampling="poisson")


def spent(accountant, event, steps, delta=DELTA):
    return accountant.compose(dp.SelfComposedDpEvent(event, steps)).get_epsilon(delta)


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
    info = Info(t, 4, 9, 9.0, 0.1, 1.0, 1.0, 0.0, layout, np.ones(9, np.int64))
    acc = g.zero(x)
    if up is not None:
        acc = g.add(acc, up, {}, x)
    return g.close(acc, {}, info)[0]["delta"]


def test_one_client_moves_the_noiseless_sum_by_no_more_than_the_clip():
    a, x = fb.private(fb.fedavg(), clip=0.7, noise=1.0), torch.zeros(50)
    torch.manual_seed(0)
    for scale in (1e-3, 0.1, 1.0, 1e6):
        raw = {"delta": scale * torch.randn(5, 50)}
        clipped = a.up.clipped(raw, a.uploads)
        assert clipped["delta"].norm(dim=1).max() <= 0.7 * (1 + 1e-6)
        g = gather(a)
        whole = closed(g, uploads(clipped, a.uploads), x)
        without = closed(g, uploads({"delta": clipped["delta"][1:]}, a.uploads), x)
        assert 4 * (whole - without).norm() <= 0.7 * (1 + 1e-4)
    small = {"delta": torch.full((1, 50), 1e-3)}
    assert a.up.clipped(small, a.uploads)["delta"].equal(small["delta"])


def test_several_uploads_are_clipped_together_by_their_scales():
    declared = {"a": fb.Upload("a", scale=1.0), "b": fb.Upload("b", scale=10.0)}
    got = Clipped(clip=1.0).clipped({"a": torch.tensor([[3.0]]), "b": torch.tensor([[40.0]])}, declared)
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
    assert acc[0].vectors["delta"].tolist() == [2.0, 2.0, 2.0]


def test_no_step_goes_without_a_run_that_knows_its_noise():
    a = fb.private(fb.fedavg(), noise=1.0)
    assert closed(a.gather, None, torch.zeros(3)).isnan().all()


@pytest.mark.parametrize("build", [fb.fedavg, fb.feddyn, fb.adabest, fb.fedadam])
def test_without_noise_and_with_a_wide_clip_it_is_the_algorithm(blobs, build):
    extra = {} if build is fb.fedadam else {"weights": "uniform"}
    plain = fb.simulate(blobs, build(weights="uniform"), WORK, fb.rounds(5, clients=3), seed=1)
    quiet = fb.simulate(
        blobs, fb.private(build(**extra), clip=1e6, noise=0.0), WORK, fb.rounds(5, clients=3), seed=1
    )
    torch.testing.assert_close(quiet.x, plain.x, rtol=1e-4, atol=1e-5)
    assert "epsilon" not in quiet.history[-1]


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
    class Stopped(Exception):
        pass

    class Stop:
        def step(self, record, run):
            if record["step"] == 3:
                raise Stopped

    a, schedule = fb.private(fb.feddyn(), noise=3.0), fb.rounds(5, clients=1, sampling="poisson")
    straight = fb.simulate(blobs, a, WORK, schedule, seed=3)
    empty = [r["step"] for r in straight.history if not r["clients"]]
    norms = {r["step"]: r["norm"] for r in straight.history}
    assert empty
    assert all(norms[t] != norms[t - 1] for t in empty if t > 1)
    with pytest.raises(Stopped):
        fb.simulate(blobs, a, WORK, schedule, seed=3, out=tmp_path / "run", callbacks=[Stop()])
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
    assert a.server.links[0].weights == "uniform"


# Refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: fb.private(fb.scaffold(), noise=1.0), "scaffold uploads 'dc', whose scale nobody declared"),
        (lambda: fb.private(fb.mfl("adam"), noise=1.0), "mfl uploads 'v', which is never negative"),
        (lambda: fb.private(fb.fedvarp(), noise=1.0), r"remembers single clients' updates.*held='client'"),
        (lambda: fb.private(fb.scallion(), noise=1.0), "accounts for every single upload"),
        (lambda: fb.private(fb.private(fb.fedavg(), noise=1.0), noise=1.0), "private already"),
        (lambda: fb.private(fb.fedavg()), "needs noise= .* or epsilon="),
        (lambda: fb.private(fb.fedavg(), noise=-1.0), "noise=-1.0 is no deviation"),
        (lambda: fb.private(fb.fedavg(), noise=0.0, epsilon=1.0), "noise=0 keeps no budget"),
        (lambda: fb.private(fb.fedavg(), epsilon=0.0), "a budget that no noise can keep"),
        (lambda: fb.private(fb.fedavg(), noise=1.0, clip=0.0), "clip=0.0 lets nothing through"),
        (
            lambda: fb.private(fb.fedavg(), noise=1.0, clip="adaptive"),
            "clip='adaptive'; give it a finite number",
        ),
        (lambda: fb.private(fb.fedavg(), noise=1.0, delta=0.0), "delta=0.0 is no small probability"),
        (lambda: fb.private(fb.fedavg(), noise=1.0, where="client"), "use where='server'"),
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
        (fb.private(fb.fedavg(), noise=1.0), fb.rounds(2, clients=2, over=1.5), "leave out over and timeout"),
        (fb.private(fb.fedavg(), noise=0.1, epsilon=0.1), fb.buffered(2), "more than the budget of 0.1"),
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
        with pytest.raises(fb.errors.ConfigError, match="may hand in twice within one step"):
            fb.simulate(blobs, fb.private(a, noise=1.0), fb.Work(), fb.buffered(2, buffer=2, concurrency=3))
