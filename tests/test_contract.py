"""Do parts that were never written for each other fit, or say why they do not?"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from oracles import LAYERS, MATRICES, VMAP, Trial
from torch import nn

import fedbraid as fb
from fedbraid.errors import ConfigError, Diverged

c = fb.codecs
LOSSY = {
    "qsgd": c.qsgd(4), "int4": c.int4(), "topk": c.topk(0.3), "weights": c.of_weights(c.uniform(4)),
    "mixed": c.mixed(c.qsgd(3), share=0.5),
}  # fmt: skip


def simulate(task, algorithm, work, schedule, **options):
    return fb.simulate(task, algorithm, work, schedule, engine=VMAP, **options)


# What was received is what is remembered -----------------------------------------------------------------


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize(
    "schedule", [fb.rounds(12, clients=3), fb.buffered(12, 3, 5)], ids=["rounds", "buffered"]
)
def test_c_is_the_mean_of_all_c_i_under_any_link(codec, feedback, schedule):
    trial = Trial(lr=0.1, rho=0.5)
    a = fb.with_codecs(fb.scaffold(), up=LOSSY[codec])
    result = trial.run(fb.error_feedback(a) if feedback else a, schedule)
    c_i = result.state.clients.get(range(8))["c_i"].double().mean(0)
    np.testing.assert_allclose(result.state.server[0].total.double() / 8, c_i, atol=2e-5)
    assert c_i.abs().max() > 0.01


@pytest.mark.parametrize("codec", LOSSY)
def test_feddyns_h_is_the_sum_of_h_i_over_mu_n_under_any_link(codec):
    trial, mu = Trial(lr=0.1), 0.2
    result = trial.run(fb.with_codecs(fb.feddyn(mu=mu, weights="uniform"), up=LOSSY[codec]))
    h_i = result.state.clients.get(range(8))["h_i"].double().sum(0) / (mu * 8)
    np.testing.assert_allclose(result.x - result.state.x, h_i, atol=2e-5)


@pytest.mark.parametrize("codec", LOSSY)
def test_scaffold_m_mirrors_its_clients_under_any_link(codec):
    trial = Trial(lr=0.1)
    result = trial.run(fb.with_codecs(fb.scaffold_m(weights="uniform"), up=LOSSY[codec]))
    h_i = result.state.clients.get(range(8))["h_i"].double().sum(0)
    np.testing.assert_allclose(result.state.server[0].total, h_i, atol=2e-5)


# Effective steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.0, 0.7])
@pytest.mark.parametrize("cohort", [1, 3, 8])
def test_scaffold_m_visits_scaffolds_models(cohort, rho):
    trial = Trial(rho=rho, cohort=cohort, lr=0.1, steps=12)
    one, two = (trial.run(build(weights="uniform")).x for build in (fb.scaffold, fb.scaffold_m))
    np.testing.assert_allclose(one, two, atol=1e-5)


def test_scaffold_m_visits_scaffolds_models_when_stale_visits_had_a_larger_rate():
    work = fb.Work(lr=0.2, steps=3, batch=None, lr_decay=0.8)
    late = fb.buffered(12, buffer=3, concurrency=5)
    one, two = (
        simulate(Trial().p.task, build(weights="uniform"), work, late, evaluate_every=None)
        for build in (fb.scaffold, fb.scaffold_m)
    )
    assert max(r["staleness_max"] for r in one.history) > 0
    np.testing.assert_allclose(one.x, two.x, atol=1e-5)


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_fedgbo_with_one_step_is_the_centralised_optimiser_at_any_local_momentum(rho):
    trial, x, m = Trial(), Trial().p.x0, np.zeros(27)
    work = fb.Work(lr=0.4, steps=1, batch=None, momentum=rho)
    result = simulate(trial.p.task, fb.fedgbo("sgdm"), work, fb.rounds(8, clients=8), evaluate_every=None)
    for _ in range(8):
        m = 0.9 * m + 0.1 * np.mean([trial.p.grad(x, i) for i in range(8)], axis=0)
        x = x - 0.4 * m
    np.testing.assert_allclose(result.x, x, atol=1e-5)


def test_local_momentum_does_not_inflate_scaffolds_estimates():
    trial = Trial(lr=0.02, rho=0.9, steps=1, cohort=8)
    result = trial.run(fb.scaffold())
    c_i = result.state.clients.get(range(8))["c_i"]
    g = np.stack([trial.p.grad(trial.p.x0, i) for i in range(8)])
    ratio = np.linalg.norm(c_i) / np.linalg.norm(g)
    assert 0.8 < ratio < 1.2


# Links ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [c.of_weights(c.uniform(5)), c.int8(), c.of_weights(c.kmeans(3))])
def test_fednova_with_equal_steps_is_fedavg_under_every_codec(codec):
    trial = Trial(rho=0.6)
    one, two = (trial.run(fb.with_codecs(build(), up=codec)).x for build in (fb.fednova, fb.fedavg))
    np.testing.assert_allclose(one, two, atol=1e-5)


def test_a_broadcast_of_mixed_precision_is_refused():
    for down in (c.mixed(c.int8(), share=0.5), c.mixed(c.int4(), clients=[1])):
        with pytest.raises(ConfigError, match="a broadcast is one message"):
            fb.with_codecs(fb.fedavg(), down=down)
        with pytest.raises(ConfigError, match="a broadcast is one message"):
            fb.hidden_state(fb.Algorithm(down=down))


def test_qafel_says_that_its_clients_codec_is_biased(caplog):
    with caplog.at_level(logging.WARNING, "fedbraid"):
        fb.qafel(up=c.qsgd(4), down=c.int8())
        assert not caplog.records
        fb.qafel(up=c.int8())
    assert len(caplog.records) == 1
    assert "unbiased" in caplog.text


@pytest.mark.parametrize("build", [fb.fedgbo, fb.mimelite, fb.mfl])
@pytest.mark.parametrize("name", ["rmsprop", "adam"])
@pytest.mark.parametrize("hidden", [False, True])
def test_second_moments_never_leave_a_link_negative(build, name, hidden):
    trial = Trial(lr=0.05, steps=40)
    a = fb.with_codecs(build(name), up=c.qsgd(3), down=c.qsgd(4))
    a = fb.hidden_state(fb.error_feedback(a)) if hidden else a
    seen = []

    class Keep:
        def step(self, record, run):
            seen.append(float(run.state.sent[run.state.t].vectors["v"].min()))

    result = trial.run(a, callbacks=[Keep()])
    assert min(seen) >= 0
    assert torch.isfinite(result.x).all()
    assert result.state.server[0]["v"].min() >= 0


# The server's two strokes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "base", [fb.fedavg(), fb.adabest(mu=0.2), fb.feddyn(mu=0.2), fb.fedadam()], ids=lambda a: a.name
)
def test_fedshift_shrinks_the_averaged_models_means_and_no_state_sees_it(base):
    trial = Trial(steps=1, lr=0.1)
    up = c.mixed(c.of_weights(c.uniform(6)), clients=(0, 3))
    cohort = fb.rounds(1, clients=[[0, 1, 3, 5]])
    plain, shifted = (
        trial.run(a, cohort) for a in (fb.with_codecs(base, up=up), fb.fedshift(fb.with_codecs(base, up=up)))
    )
    for at in LAYERS:
        share = 0.5 if at in MATRICES else 1.0
        assert float(shifted.x[at].mean()) == pytest.approx(share * float(plain.x[at].mean()), abs=1e-6)
    h = [r.x - r.state.x for r in (plain, shifted)]
    np.testing.assert_allclose(*h, atol=1e-6)


def test_fedshift_leaves_gains_and_biases_alone():
    model = nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.ReLU(), nn.Linear(6, 3))
    task = fb.Task.from_arrays(model, clients=Trial().p.data)
    a = fb.fedshift(fb.fedpaq(c.int8()))
    result = simulate(task, a, fb.Work(lr=1e-6, steps=1), fb.rounds(30, clients=4), evaluate_every=None)
    gains = task.layout.views(result.x)["1.weight"]
    np.testing.assert_allclose(gains, 1.0, atol=1e-3)
    assert abs(float(task.layout.views(result.x)["0.weight"].mean())) < 1e-6


@pytest.mark.parametrize("base", [fb.adabest(mu=0.1), fb.feddyn(mu=0.1)], ids=lambda a: a.name)
def test_what_is_evaluated_is_the_averaged_model(base, tmp_path):
    trial = Trial(lr=0.1)
    result = trial.run(base, evaluate_every=1, out=tmp_path / "run")
    assert result.history[-1]["loss"] == pytest.approx(trial.p.loss(result.x.double().numpy()), abs=1e-5)
    assert result.history[-1]["offset_norm"] == pytest.approx(
        float((result.x - result.state.x).norm()), rel=1e-5
    )
    assert torch.equal(trial.p.layout.flatten(result.model()), result.x)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(saved[k], v) for k, v in trial.p.layout.views(result.x).items())


# Declared weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gather", [fb.fedvarp().gather, fb.fedadavr().gather, fb.mifa().gather, fb.cluster_fedvarp(3).gather]
)
def test_memory_averages_control_variates_uniformly(gather):
    trial = Trial(lr=0.1)
    result = trial.run(replace(fb.scaffold(), gather=gather, name=""))
    c_i = result.state.clients.get(range(8))["c_i"].double().mean(0)
    np.testing.assert_allclose(result.state.server[0].total / 8, c_i, atol=1e-6)


# Weight decay belongs to the objective --------------------------------------------------------------------


def test_mimelites_full_gradient_has_the_decay_of_the_local_objective():
    trial, x, m, decay = Trial(), Trial().p.x0, np.zeros(27), 0.1
    work = fb.Work(lr=0.3, steps=1, batch=None, weight_decay=decay)
    result = simulate(trial.p.task, fb.mimelite("sgdm"), work, fb.rounds(8, clients=8), evaluate_every=None)
    for _ in range(8):
        m = 0.9 * m + 0.1 * (np.mean([trial.p.grad(x, i) for i in range(8)], axis=0) + decay * x)
        x = x - 0.3 * m
    np.testing.assert_allclose(result.x, x, atol=1e-5)


# Growth --------------------------------------------------------------------------------------------------


def explosive(task, **options):
    return simulate(task, fb.fedavg(lr=40.0), fb.Work(lr=0.5, steps=5), fb.rounds(8, clients=4), **options)


@pytest.fixture
def steep():
    """A quadratic that plain steps of this size climb without end."""
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(10, 4, generator=g), torch.randn(10, 1, generator=g)) for _ in range(6)]
    return fb.Task.from_arrays(nn.Linear(4, 1), clients=data, test=data[0], loss="mse")


@pytest.mark.parametrize("every", [1, 4])
def test_growth_beyond_reason_ends_a_run_and_keeps_the_last_good_step(steep, tmp_path, every):
    with pytest.raises(
        Diverged, match=r"training diverged at step.*the last checkpoint is intact"
    ) as stopped:
        explosive(steep, out=tmp_path / "run", checkpoint_every=every)
    from fedbraid.run.checkpoint import Folder

    kept = list(Folder(tmp_path / "run").records())
    assert all(r["norm"] < 1e5 for r in kept)
    good = int(re.search(r"Step (\d+) was the last below the limit", str(stopped.value))[1])
    assert len(kept) == good // every * every
    result = explosive(steep, ignore_divergence=True)
    assert len(result.history) == 8
    assert result.history[-1]["norm"] > 1e8


def test_a_run_from_zero_weights_may_grow():
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    task = fb.Task.from_arrays(model, clients=Trial().p.data)
    result = simulate(task, fb.fedavg(), fb.Work(lr=0.5), fb.rounds(10, clients=4), evaluate_every=None)
    assert result.history[-1]["norm"] > 0.1


# Per-layer rules -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FirstLayerOnly(fb.Rule):
    """A rule per layer: everything but the first slot stands still."""

    def step(self, g, y, s, ctx):
        keep = torch.zeros_like(g)
        slot = ctx.layout.slots[0]
        keep[:, slot.offset : slot.end] = 1
        return g * keep, s


def test_a_client_rule_may_ask_the_layout():
    trial = Trial()
    result = trial.run(fb.Algorithm(FirstLayerOnly()))
    moved = np.abs(result.x.numpy() - trial.p.x0)
    assert moved[LAYERS[0]].max() > 1e-3
    assert moved[12:].max() < 1e-7


# Rehearsal -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Undeclared(fb.Rule):
    def finish(self, y, s, ctx):
        return {"extra": ctx.K}


@dataclass(frozen=True)
class TooWide(fb.Rule):
    def uploads(self):
        return (*super().uploads(), fb.Upload("extra", width=1))

    def finish(self, y, s, ctx):
        return {"extra": y}


@dataclass(frozen=True)
class NoState(fb.Rule):
    def step(self, g, y, s, ctx):
        return g


@dataclass(frozen=True)
class Misshapen(fb.Rule):
    def step(self, g, y, s, ctx):
        return g.sum(1), s


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Undeclared(), "does not declare it"),
        (TooWide(), "declared are 1 numbers a client"),
        (NoState(), r"return \(direction, state\)"),
        (Misshapen(), "return one of the same shape"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_a_rule_makes_is_held_against_what_it_declares(rule, said):
    with pytest.raises(ConfigError, match=said):
        fb.Algorithm(rule)


# Clients that come and go --------------------------------------------------------------------------------


class Leaves:
    """Lets clients leave after a step."""

    def __init__(self, after, clients, reachable=True):
        self.after, self.clients, self.reachable = after, clients, reachable

    def step(self, record, run):
        if record["step"] == self.after:
            for client in self.clients:
                run.leave(client, self.reachable)


def mirrors(result, name, here):
    rows = result.state.clients.get(here)[name].double().sum(0)
    np.testing.assert_allclose(result.state.server[0].total, rows, atol=1e-5)


@pytest.mark.parametrize("build", [fb.scaffold, fb.scaffold_m])
def test_a_client_that_leaves_takes_its_share_with_it(build):
    trial = Trial(lr=0.1, steps=10)
    result = trial.run(build(weights="uniform"), callbacks=[Leaves(5, [1, 4])])
    assert result.history[5]["left"] == [1, 4]
    assert not {1, 4} & {c for r in result.history[5:] for c in r["clients"]}
    mirrors(result, "c_i" if build is fb.scaffold else "h_i", [0, 2, 3, 5, 6, 7])
    silent = trial.run(build(weights="uniform"), callbacks=[Leaves(5, [1, 4], reachable=False)])
    assert silent.history[5]["unreturned"] == [1, 4]
    assert not torch.equal(silent.x, result.x)


@pytest.mark.parametrize(
    "gather", [fb.fedvarp(), fb.mifa(), fb.fedadavr("sgd", lr=1.0, memory="int8")], ids=lambda a: a.name
)
def test_a_servers_row_goes_with_its_client(gather):
    trial = Trial(lr=0.1, steps=10)
    result = trial.run(gather, callbacks=[Leaves(5, [1, 4], reachable=False)])
    assert "unreturned" not in result.history[5]
    ledger = result.state.gather
    rows = ledger.rows.get(range(8))
    assert rows["weight"][[1, 4]].abs().sum() == 0
    np.testing.assert_allclose(ledger.total, (rows["weight"].double() * rows["y"].double()).sum(0), atol=1e-6)


def test_who_has_left_stays_away_after_a_resume(tmp_path):
    trial = Trial(lr=0.1, steps=10)

    class Stop:
        def step(self, record, run):
            if record["step"] == 7:
                raise KeyboardInterrupt

    whole = trial.run(fb.scaffold(), callbacks=[Leaves(5, [1, 4])])
    with pytest.raises(KeyboardInterrupt):
        trial.run(fb.scaffold(), callbacks=[Leaves(5, [1, 4]), Stop()], out=tmp_path / "run")
    again = fb.resume(tmp_path / "run", task=trial.p.task)
    assert torch.equal(again.x, whole.x)
    with pytest.raises(ConfigError, match="it is not registered"):
        trial.run(fb.scaffold(), callbacks=[Leaves(5, [11])])


def newcomers(build, name):
    """A server that has met four clients meets four more: N follows."""
    trial = Trial(lr=0.1)
    from fedbraid.engines.engine import Setup
    from fedbraid.engines.in_process import InProcess
    from fedbraid.run.simulated_source import SimulatedSource
    from fedbraid.run.source import ServerStep
    from fedbraid.run.state import State
    from fedbraid.run.step import Population, advance
    from fedbraid.schedule import Tick

    task, work, a = trial.p.task, fb.Work(lr=0.1, steps=2, batch=None), build(weights="uniform")
    state = State.first(a, task.layout, task.initial(0), 0)
    for t, (N, cohort) in enumerate([(4, [0, 1]), (4, [2, 3]), (8, [4, 0]), (8, [7, 5]), (8, [1, 2])]):
        known = replace(task, offsets=task.offsets[: N + 1])
        setup, engine = Setup(a, known, work, 0), InProcess(backend="vmap")
        engine.open(setup)
        who = np.array(cohort)
        tick = Tick(t, float(t), who, np.full(2, t), who, frozenset())
        source = SimulatedSource(setup, engine)
        step = ServerStep(tick, source.replies(state, tick))
        state, _ = advance(setup, state, step, Population.of(source, state))
        engine.close()
        mean = state.clients.get(range(N))[name].double().mean(0)
        sent = next(v for k, v in state.sent[t + 1].vectors.items() if k != "x")
        np.testing.assert_allclose(sent, mean, atol=1e-5)


def test_estimates_are_the_mean_over_todays_clients_after_newcomers():
    newcomers(fb.scaffold, "c_i")
    newcomers(fb.scaffold_m, "h_i")


def test_clients_are_counted_anew_when_one_joins_or_leaves_and_only_then():
    from types import SimpleNamespace

    from fedbraid.run.step import Population

    sizes = np.array([3, 4, 5])
    source, stay = SimpleNamespace(sizes=sizes, is_live=False), SimpleNamespace(gone=())
    first = Population.of(source, stay)
    assert (first.N, first.samples) == (3, 12.0)
    assert Population.of(source, stay, first) is first
    left = Population.of(source, SimpleNamespace(gone=(1,)), first)
    assert (left.N, left.samples, left.sizes.tolist()) == (2, 8.0, [3, 0, 5])
    source.sizes = np.array([3, 4, 5, 6])
    joined = Population.of(source, SimpleNamespace(gone=(1,)), left)
    assert (joined.N, joined.samples) == (3, 14.0)
    assert sizes.tolist() == [3, 4, 5]


def test_clusters_shares_follow_the_number_of_clients():
    from fedbraid.algorithms.memory import ClusterVarp
    from fedbraid.core.context import ServerContext

    def shares(sizes, weights="samples"):
        sizes = np.array(sizes)
        ctx = ServerContext(0, 2, len(sizes), float(sizes.sum()), 0.1, 1.0, 1.0, 0.0, Trial().p.layout, sizes)
        return ClusterVarp(weights, clusters=2).shares(ctx).tolist()

    assert shares([1, 3]) == [0.25, 0.75]
    assert shares([1, 3, 4, 0]) == [5 / 8, 3 / 8]  # one joins, another has left
    assert shares([1, 3, 4, 0], "uniform") == pytest.approx([2 / 3, 1 / 3])


def test_run_starts_from_the_work_of_the_algorithms_paper_and_compare_does_when_told(
    tmp_path, monkeypatch, capsys
):
    from fedbraid.cli import config as cfg
    from fedbraid.cli import main
    from fedbraid.cli.compare import entry_of

    monkeypatch.chdir(tmp_path)
    base = {"task": {"name": "digits"}, "work": {}, "schedule": {}, "run": {}}
    momentum = {
        name: cfg.prepare({**base, "algorithm": {"name": name}}).work.momentum
        for name in ("fedavg", "fedgbo", "scaffold")
    }
    assert momentum == {"fedavg": 0.9, "fedgbo": 0.0, "scaffold": 0.0}
    assert (
        cfg.prepare({**base, "algorithm": {"name": "fedgbo"}, "work": {"momentum": 0.5}}).work.momentum == 0.5
    )
    assert [entry_of(base, "fedgbo", own).work.momentum for own in (False, True)] == [0.9, 0.0]
    assert main(["run", "digits", "fedgbo", "--rounds", "2", "--clients", "10", "--per-round", "2"]) == 0
    assert "clients work as in fedgbo's paper: momentum 0 (--momentum changes it)" in capsys.readouterr().out
