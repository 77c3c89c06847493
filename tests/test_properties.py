"""Do the papers' own properties hold (ALGORITHMS.md, part 5)?"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from oracles import LAYERS, MATRICES, VMAP, Problem, Trial
from torch import nn

import fedbraid as fb
from fedbraid.core.vector_spec import DELTA

ALL = fb.rounds(6, clients=8)


class DivergenceGuard:
    """Notes the model that is sent, the one that is judged, and the cohort, after every step."""

    def __init__(self):
        self.x, self.judged, self.clients = [], [], []

    def step(self, record, run):
        self.x.append(run.state.x.double().numpy())
        self.judged.append(run.state.average.double().numpy())
        self.clients.append(record["clients"])


def simulate(*args, **options):
    return fb.simulate(*args, engine=VMAP, **options)


def watch(trial, algorithm, schedule=None, **options):
    seen = DivergenceGuard()
    trial.run(algorithm, schedule, callbacks=[seen], **options)
    return seen


# AdaBest and FedDyn ------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.3, 0.8, 1.0])
def test_adabests_h_is_a_power_series_of_the_averaged_updates(beta):
    """h^t = Σ_τ β^{t−τ+1} ḡ^τ, ḡ^τ = x^{τ−1} − x̄^τ (Remark 3)."""
    trial = Trial(steps=9)
    seen = watch(trial, fb.adabest(mu=0.2, beta=beta))
    before = [trial.p.x0, *seen.x[:-1]]
    g = [x - average for x, average in zip(before, seen.judged)]
    for t in range(9):
        h = sum(beta ** (t - tau + 1) * g[tau] for tau in range(t + 1))
        np.testing.assert_allclose(seen.judged[t] - seen.x[t], h, atol=3e-6)
    assert np.abs(h).max() > 0.02


def test_feddyns_server_is_adabests_at_beta_one_with_everybody():
    dyn, best = fb.feddyn(mu=0.3), fb.adabest(beta=1.0)
    mixed = fb.Algorithm(dyn.rule, dyn.gather, best.server)
    trial = Trial(lr=0.1)
    one, two = watch(trial, dyn, ALL), watch(trial, mixed, ALL)
    np.testing.assert_allclose(one.x, two.x, atol=5e-6)
    np.testing.assert_allclose(one.judged, two.judged, atol=5e-6)
    few = fb.rounds(6, clients=4)
    assert np.abs(watch(trial, dyn, few).x[-1] - watch(trial, mixed, few).x[-1]).max() > 0.01


def test_adabest_needs_no_number_of_clients():
    """Clients who never take part change nothing."""
    small, large = Problem(sizes=(3, 5, 8, 4)), Problem(sizes=(3, 5, 8, 4, 50, 50))
    schedule = fb.rounds(5, clients=[[0, 1], [2, 3], [0, 3], [1], [2, 0]])
    work = fb.Work(lr=0.3, steps=3, batch=None)
    runs = {a: [simulate(p.task, a, work, schedule, evaluate_every=None).x for p in (small, large)]
            for a in (fb.adabest(mu=0.2), fb.adabest(mu=0.2, weights="progressive"), fb.mifa(), fb.feddyn(mu=0.2))}  # fmt: skip
    assert [torch.equal(*pair) for pair in runs.values()] == [True, True, True, False]


# The same optimiser on clients and in one place ----------------------------------------------------------


def centralised(p, name, steps, eta, track_first, weights="samples", beta=0.9, beta2=0.99, eps=1e-3):
    """The models that an ordinary optimiser visits on everybody's data together."""
    x, m, v, seen = p.x0, np.zeros(27), np.ones(27), []
    for _ in range(steps):
        g = p.pooled(x) if weights == "samples" else np.mean([p.grad(x, i) for i in range(p.N)], axis=0)
        m_new = beta * m + (1 - beta) * g
        v_new = (0.99 if name == "rmsprop" else beta2) * v + 0.01 * g**2
        root = np.sqrt(v_new if track_first else v) + eps
        x = x - eta * {"sgdm": m_new, "rmsprop": g / root, "adam": m_new / root}[name]
        m, v = m_new, v_new
        seen.append(x)
    return np.array(seen)


@pytest.mark.parametrize("name", ["sgdm", "rmsprop", "adam"])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("build", [fb.fedgbo, fb.mimelite])
def test_one_full_step_of_everybody_is_the_centralised_optimiser(build, weights, name):
    trial = Trial(lr=0.5)
    seen = DivergenceGuard()
    work = fb.Work(lr=0.5, steps=1, batch=None)
    simulate(trial.p.task, build(name, weights=weights), work, fb.rounds(10, clients=8), callbacks=[seen])
    expected = centralised(trial.p, name, 10, 0.5, False, weights)
    np.testing.assert_allclose(seen.x, expected, atol=5e-6)
    assert np.abs(expected[-1] - trial.p.x0).max() > 0.05


@pytest.mark.parametrize("name", ["sgdm", "rmsprop", "adam"])
def test_one_full_step_of_everybody_is_the_centralised_optimiser_for_mfl(name):
    """Its average of g² is the square of the average only where clients agree, so they do, except for sgdm."""
    p = Problem(sizes=(5, 5, 5, 5))
    if name != "sgdm":
        p.data = [p.data[0]] * 4
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    p.task = fb.Task.from_arrays(p.layout.load(model, torch.from_numpy(p.x0).float()), clients=p.data)
    seen, work = DivergenceGuard(), fb.Work(lr=0.5, steps=1, batch=None)
    simulate(p.task, fb.mfl(name), work, fb.rounds(10, clients=4), callbacks=[seen])
    np.testing.assert_allclose(seen.x, centralised(p, name, 10, 0.5, True), atol=5e-6)


@pytest.mark.parametrize("name", ["sgdm", "rmsprop", "adam"])
def test_the_inverse_recovers_the_mean_gradient_where_k_is_one(name):
    """T(I(…)) tracks what T(mean gradient) would, whoever took part and however many rounds went before."""
    trial = Trial()
    work, schedule = fb.Work(lr=0.4, steps=1, batch=None), fb.rounds(6, clients=3)
    states = []

    class Keep:
        def step(self, record, run):
            states.append(
                (record["clients"], run.state.x.double().numpy(), copy.deepcopy(run.state.server[0]))
            )

    simulate(
        trial.p.task,
        fb.fedgbo(name, **({"beta2": 0.9} if name == "adam" else {"beta": 0.9})),
        work,
        schedule,
        callbacks=[Keep()],
    )
    x, m, v = trial.p.x0, np.zeros(27), np.ones(27)
    for cohort, x_next, s in states:
        g = np.mean([trial.p.grad(x, i) for i in cohort], axis=0)
        m, v = 0.9 * m + 0.1 * g, 0.9 * v + 0.1 * g**2
        if "m" in s:
            np.testing.assert_allclose(s["m"], m, atol=1e-5)
        if "v" in s:
            np.testing.assert_allclose(s["v"], v, atol=1e-5)
        x = x_next
    assert set(s) == {"sgdm": {"m"}, "rmsprop": {"v"}, "adam": {"m", "v"}}[name]


def test_scaffolds_c_is_the_plain_mean_of_all_c_i():
    trial = Trial(decay=0.9)
    result = trial.run(fb.scaffold())
    c_i = result.state.clients.get(range(8))["c_i"].double().mean(0)
    np.testing.assert_allclose(result.state.server[0].total / 8, c_i, atol=1e-6)
    assert c_i.abs().max() > 0.05


# FedShift ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inferior", [(0,), (0, 3, 5), tuple(range(8))])
def test_fedshifts_mean_and_divergence(inferior):
    """mean(x̂_ℓ) = (S/K)·mean(x_ℓ), and D²_FA − D²_FS = (IP/K)((m⁺)²(2 − I/K) − 2 m⁺ m) (eq. 30)."""
    trial = Trial(steps=1)
    schedule = fb.rounds(1, clients=[[0, 3, 1, 5, 6]])
    codec = fb.codecs.mixed(fb.codecs.of_weights(fb.codecs.uniform(4)), clients=inferior)
    plain = fb.with_codecs(fb.fedavg(), up=codec)
    FA = trial.run(plain, schedule).x.double().numpy()
    FS = trial.run(fb.fedshift(plain), schedule).x.double().numpy()
    K, I = 5, len({0, 3, 1, 5, 6} & set(inferior))
    for at in MATRICES:
        before, P = trial.p.x0[at], len(FA[at])
        m, plus = before.mean(), FA[at].mean()
        assert FS[at].mean() == pytest.approx((K - I) / K * plus, abs=1e-6)
        gap = np.sum((FA[at] - before) ** 2) - np.sum((FS[at] - before) ** 2)
        assert gap == pytest.approx(I * P / K * (plus**2 * (2 - I / K) - 2 * plus * m), abs=1e-5)
        np.testing.assert_allclose(FA[at] - FA[at].mean(), FS[at] - FS[at].mean(), atol=1e-6)
    assert np.abs(FA - FS).max() > 1e-3
    for at in (LAYERS[1], LAYERS[3]):
        np.testing.assert_array_equal(FA[at], FS[at])


# Hidden states -------------------------------------------------------------------------------------------


def test_server_and_clients_hold_the_same_hidden_state_to_the_bit():
    """Clients who add the packets they receive, one by one, hold what the server trains them from."""
    trial, packets = Trial(lr=0.2), []
    starts = []

    @dataclass(frozen=True, repr=False)
    class Tap(fb.Codec):
        def encode(self, v, layout, seed=0):
            packets.append(fb.codecs.qsgd(4).encode(v, layout, seed))
            return packets[-1]

        def decode(self, data, layout):
            return fb.codecs.qsgd(4).decode(data, layout)

    class Keep:
        def step(self, record, run):
            starts.append(run.state.sent[run.state.t].vectors["x"].clone())

    trial.run(fb.hidden_state(fb.with_codecs(fb.fedavg(), down=Tap())), callbacks=[Keep()])
    held = torch.from_numpy(trial.p.x0).float()
    for packet, start in zip(packets, starts, strict=True):
        held = held + fb.codecs.qsgd(4).decode(packet, trial.p.layout)
        assert torch.equal(held, start)


def test_a_hidden_state_that_stretches_its_error_is_stopped_with_the_remedy():
    trial = Trial(steps=60, cohort=4)

    @dataclass(frozen=True, repr=False)
    class Doubled(fb.Codec):
        def encode(self, v, layout, seed=0):
            return fb.codecs.identity().encode(2.5 * v, layout, seed)

        def decode(self, data, layout):
            return fb.codecs.identity().decode(data, layout)

    with pytest.raises(fb.errors.Diverged, match="contractive"):
        trial.run(fb.hidden_state(fb.with_codecs(fb.fedavg(lr=0.01), down=Doubled())))


def test_qsgd_is_unbiased_and_contracts_when_divided():
    layout = fb.Layout.of(nn.Linear(12, 10, bias=False))
    v = torch.from_numpy(np.random.default_rng(0).normal(size=120)).float()
    plain, divided = fb.codecs.qsgd(3, norm="l2"), fb.codecs.qsgd(3, norm="l2", contractive=True)
    d, s = 120, 3
    omega = min(d / s**2, np.sqrt(d) / s)

    def draws(codec):
        return torch.stack([codec.decode(codec.encode(v, layout, seed), layout) for seed in range(1500)])

    free, held = draws(plain), draws(divided)
    spread = free.std(0) / np.sqrt(1500)
    assert ((free.mean(0) - v).abs() < 5 * spread + 1e-3).all()
    error = (v - held).square().sum(1).mean() / v.square().sum()
    assert error <= 1 - 1 / (1 + omega) + 0.01
    assert (v - free).square().sum(1).mean() / v.square().sum() > 1


def test_topk_contracts_by_what_it_keeps():
    layout = fb.Layout.of(nn.Linear(12, 10, bias=False))
    codec = fb.codecs.topk(0.25)
    for seed in range(20):
        v = torch.from_numpy(np.random.default_rng(seed).normal(size=120)).float()
        got = codec.decode(codec.encode(v, layout), layout)
        assert (v - got).square().sum() <= (1 - 30 / 120) * v.square().sum()
        assert int((got != 0).sum()) == 30


# The memory ----------------------------------------------------------------------------------------------


def recomputed(s, clients):
    """Σ n_j y_j from the rows themselves, and Σ n_j over those who have one."""
    rows = s.rows.get(clients)
    return (rows["weight"].double() * rows["y"].double()).sum(0), float(rows["weight"].sum())


@pytest.mark.parametrize("memory", [None, "fp16", "int8", "int4"])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_the_running_sum_is_the_sum_recomputed_after_many_steps(memory, weights):
    trial = Trial(steps=150)
    work = fb.Work(lr=0.05, steps=1, batch=2)
    result = simulate(
        trial.p.task,
        fb.fedadavr("sgd", lr=1.0, memory=memory, weights=weights),
        work,
        fb.rounds(150, clients=2),
        evaluate_every=None,
    )
    s = result.state.gather
    total, seen = recomputed(s, range(8))
    np.testing.assert_allclose(s.total, total, rtol=0, atol=1e-6 * float(total.abs().max()))
    assert s.seen == pytest.approx(seen)
    assert total.abs().max() > 0.1


def uploads(clients, delta, n):
    m = len(clients)
    return fb.Uploads(
        np.array(clients), {"delta": delta}, torch.tensor(n, dtype=torch.float32)[:, None], torch.ones(m, 1),
        torch.ones(m, 1), torch.zeros(m, 1), torch.full((m, 1), 0.5), {"x": torch.zeros(1, 27)}, {"delta": DELTA},
    )  # fmt: skip


def facts(N, samples, sizes):
    return fb.ServerContext(0, 2, N, samples, 0.5, 1.0, 1.0, 0.0, Trial().p.layout, np.array(sizes))


def fold(gather, s, clients, delta, n, ctx):
    x = torch.zeros(27)
    return gather.close(gather.add(gather.zero(x), uploads(clients, delta, n), s, x), s, ctx)[:2]


@pytest.mark.parametrize("memory", [None, "int8", "int4"])
def test_clients_that_leave_or_change_their_weight_are_exact(memory):
    gather = fb.fedadavr(memory=memory).gather
    draw = torch.Generator().manual_seed(0)
    s = gather.init(torch.zeros(27), Trial().p.layout)
    for k in range(30):
        clients = [k % 5, (k + 2) % 5]
        n = [float(1 + (k + c) % 7) for c in clients]  # sample counts that change from visit to visit
        _, s = fold(gather, s, clients, torch.randn(2, 27, generator=draw), n, facts(5, 20.0, [4] * 5))
        total, seen = recomputed(s, range(5))
        np.testing.assert_allclose(s.total, total, atol=1e-5)
        assert s.seen == pytest.approx(seen)
    for gone, left in ((3, [0, 1, 2, 4]), (0, [1, 2, 4])):
        s = gather.remove_client(s, gone)
        total, seen = recomputed(s, left)
        np.testing.assert_allclose(s.total, total, atol=1e-5)
        assert s.seen == pytest.approx(seen)
        assert gone not in s.rows
    rows = {i: (float(s.rows.get([i])["weight"]), s.rows.get([i])["y"][0]) for i in (1, 2, 4)}
    delta = torch.randn(2, 27, generator=draw)
    u, s = fold(gather, s, [2, 9], delta, [3.0, 5.0], facts(4, 20.0, [5] * 4))  # 9 joins with a zero row
    r = (3 * (delta[0] / 0.5 - rows[2][1]) + 5 * delta[1] / 0.5) / 8 + sum(
        w * y for w, y in rows.values()
    ) / 20
    np.testing.assert_allclose(u["delta"], 0.5 * r, atol=1e-5)
    np.testing.assert_allclose(s.total, recomputed(s, [1, 2, 4, 9])[0], atol=1e-5)


def test_a_client_that_leaves_without_ever_coming_takes_nothing():
    gather = fb.fedvarp().gather
    s = gather.init(torch.zeros(27), Trial().p.layout)
    _, s = fold(gather, s, [0, 1], torch.ones(2, 27), [2.0, 3.0], facts(3, 9.0, [3] * 3))
    before = s.total.clone()
    s = gather.remove_client(s, 2)
    assert torch.equal(s.total, before)
    assert s.seen == 5.0


@pytest.mark.parametrize(("memory", "share"), [(None, 1.0), ("fp16", 0.5), ("int8", 0.25), ("int4", 0.125)])
def test_stored_memory_takes_its_share_of_float32(memory, share):
    layout = fb.Layout.of(nn.Sequential(nn.Linear(100, 60), nn.Linear(60, 11)))
    rows = fb.fedadavr(memory=memory).gather.init(torch.zeros(layout.size), layout).rows
    rows.put(range(3), {"weight": torch.ones(3, 1), "y": torch.randn(3, layout.size)})
    scales = 4 * len(list(layout)) if memory in ("int8", "int4") else 0
    stored = rows.row_bytes - 4  # without the client's weight
    assert 0 <= stored - share * 4 * layout.size - scales < len(list(layout)) + 1


def test_a_step_touches_only_the_cohorts_rows():
    trial = Trial()
    result = trial.run(fb.fedadavr(), fb.rounds(3, clients=[[0, 1], [1, 2], [0, 2]]))
    assert result.state.gather.rows.ids() == [0, 1, 2]
    result = trial.run(fb.scaffold(), fb.rounds(3, clients=[[0, 1], [1, 2], [0, 2]]))
    assert result.state.clients.ids() == [0, 1, 2]


# Lamb --------------------------------------------------------------------------------------------------------


def test_lambs_step_is_a_share_of_each_layers_norm_whatever_the_gradients_size():
    trial = Trial(steps=1)
    x = trial.run(fb.fedlamb(lr=0.1)).x.double().numpy()
    for at in LAYERS:
        assert np.linalg.norm(x[at] - trial.p.x0[at]) == pytest.approx(
            0.1 * np.linalg.norm(trial.p.x0[at]), rel=1e-4
        )
    whole = trial.run(fb.fedlamb(lr=0.1, layerwise=False)).x.double().numpy()
    assert np.linalg.norm(whole - trial.p.x0) == pytest.approx(0.1 * np.linalg.norm(trial.p.x0), rel=1e-4)


def test_lamb_leaves_the_step_alone_where_a_layer_is_zero():
    p = Trial().p
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    start = p.x0.copy()
    start[LAYERS[3]] = 0
    task = fb.Task.from_arrays(p.layout.load(model, torch.from_numpy(start).float()), clients=p.data)
    work, one = fb.Work(lr=0.3, steps=1, batch=None), fb.rounds(1, clients=8)
    lamb = simulate(task, fb.fedlamb(lr=0.1), work, one).x
    adam = simulate(task, fb.fedadam(lr=0.1, beta2=0.999, eps=1e-8, variant="corrected"), work, one).x
    assert torch.equal(lamb[LAYERS[3]], adam[LAYERS[3]])
    assert not torch.equal(lamb[LAYERS[0]], adam[LAYERS[0]])
