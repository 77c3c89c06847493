"""Secure aggregation of runs: the same models as over the same grid in the open, exact sums, true bytes, and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fedbraid as fb
from fedbraid.algorithms.secure import SecureMean
from fedbraid.core.context import Uploads
from fedbraid.core.layout import Layout
from fedbraid.privacy.secure_sum import SecureClient, SecureServer

RANGE = 4.0
WORK = fb.Work(lr=0.05, batch=2, epochs=1)


def task(clients=9):
    draw = np.random.default_rng(5)
    data = [
        (
            draw.normal(0.1 * i, 1, (2 + i % 4, 3)).astype("f"),
            draw.normal(0.2 * i, 1, (2 + i % 4, 1)).astype("f"),
        )
        for i in range(clients)
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    return fb.Task.from_arrays(model, clients=data, loss="mse")


def run(algorithm, schedule=None, work=WORK, **options):
    schedule = schedule or fb.rounds(4, clients=5)
    options = {"seed": 3, "engine": "in_process(backend='loop')"} | options
    return fb.simulate(task(), algorithm, work, schedule, evaluate_every=None, **options)


def in_the_open(a, bits=16, reach=RANGE):
    """The same grid, on which the server reads every upload."""
    return fb.with_codecs(a, up=fb.codecs.shared(bits, reach))


SUMS = {
    "fedavg": fb.fedavg,
    "fedavg, uniform": lambda: fb.fedavg(weights="uniform"),
    "fedavgm": fb.fedavgm,
    "fedadam": fb.fedadam,
    "fedyogi": fb.fedyogi,
    "fedadagrad": fb.fedadagrad,
    "fedlamb": fb.fedlamb,
    "fedprox": lambda: fb.fedprox(mu=0.1),
    "feddyn": lambda: fb.feddyn(mu=0.1),
    "feddyn, progressive": lambda: fb.feddyn(mu=0.1, weights="progressive"),
    "adabest": fb.adabest,
    "adabest, progressive": lambda: fb.adabest(weights="progressive"),
    "fedgbo": fb.fedgbo,
    "ghbm": lambda: fb.ghbm(tau=1),
    "scallion": fb.scallion,
    "scaffold_m": fb.scaffold_m,
    "fedvarp": lambda: fb.fedvarp(held="client"),
    "fedadavr": lambda: fb.fedadavr(held="client"),
    "mifa": lambda: fb.mifa(held="client"),
    "fedshift": lambda: fb.fedshift(fb.fedavg()),
    "error feedback": lambda: fb.error_feedback(fb.fedavg()),
    "hidden state": lambda: fb.hidden_state(fb.fedavg()),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_server_of_sums_visits_the_models_of_one_that_reads_uploads(name):
    """What a client remembers is its own decoded upload either way, so states agree as well."""
    a, work = SUMS[name](), fb.Work(lr=0.05, batch=2, steps=3)
    secure, open_ = run(fb.secure(a, range=RANGE), work=work), run(in_the_open(a), work=work)
    assert float((secure.x - open_.x).abs().max()) < 2e-5 * max(1.0, float(open_.x.abs().max()))
    assert [r["clients"] for r in secure.history] == [r["clients"] for r in open_.history]


@pytest.mark.parametrize("staleness", ["constant", "sqrt"])
def test_buffers_weigh_by_staleness_in_steps_of_a_256th(staleness):
    a, schedule = fb.fedbuff(staleness=staleness), fb.buffered(5, buffer=4, concurrency=7)
    secure, open_ = run(fb.secure(a, range=RANGE), schedule), run(in_the_open(a), schedule)
    away = float((secure.x - open_.x).abs().max())
    assert away < (2e-6 if staleness == "constant" else 2e-3)
    assert any(r["staleness_max"] for r in secure.history)


def test_names_with_ranges_of_their_own():
    a = fb.scaffold()
    secure = run(fb.secure(a, range={"delta": 1.0, "dc": 40.0}))
    assert float((secure.x - run(a).x).abs().max()) < 1e-2
    assert secure.history[-1]["saturated"] == 0


def test_saturation_is_counted():
    record = run(fb.secure(fb.fedavg(), range=1e-4)).history[0]
    assert 0.5 < record["saturated"] <= 1


def test_rotation_is_undone():
    a = fb.fedavg()
    away = float((run(fb.secure(a, range=RANGE, rotate=True)).x - run(a).x).abs().max())
    assert 0 < away < 1e-3


def test_one_group_for_each_bit_width():
    mixed = fb.codecs.mixed(fb.codecs.shared(5, RANGE), share=0.5)
    a = fb.with_codecs(fb.fedavg(), up=mixed)
    both = fb.codecs.mixed(fb.codecs.shared(5, RANGE), share=0.5, other=fb.codecs.shared(16, RANGE))
    schedule = fb.rounds(3, clients=8)
    secure, open_ = (
        run(fb.secure(a, range=RANGE), schedule), run(fb.with_codecs(fb.fedavg(), up=both), schedule)
    )  # fmt: skip
    assert float((secure.x - open_.x).abs().max()) < 1e-6
    with pytest.raises(fb.FedbraidError, match="fewer than 3 hides none"):
        run(fb.secure(a, range=RANGE), fb.rounds(1, clients=[(0, 1, 2, 3)]))


# Masks


LAYOUT = Layout.from_shapes([("w", (5, 4)), ("b", (5,))])


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("dropped", [0, 2])
def test_sums_without_masks_are_the_sums_of_the_whole_protocol(weights, dropped):
    """A simulation leaves masks out: here they are put back, with all cryptography, and the modular sums are the same."""
    made = fb.secure(fb.fedavg(weights=weights), bits=12)
    gather, codec = made.gather, made.up.codec
    assert isinstance(gather, SecureMean)
    m = 6
    draw = torch.Generator().manual_seed(1)
    vectors, _ = codec.roundtrip(torch.randn(m, LAYOUT.size, generator=draw), LAYOUT, range(m))
    n, one = torch.arange(1.0, m + 1)[:, None], torch.ones(m, 1)
    x = torch.zeros(LAYOUT.size)
    ctx = rehearsed(made, n, x, dropped)
    up = Uploads(
        np.arange(m), {"delta": vectors}, n, one, one, 0 * one, one.double(), {"x": x[None]}, made.uploads
    )
    acc = gather.add(gather.zero(x), up, {}, x)
    session = gather.session(m + dropped, 12, ctx)
    server = SecureServer(session)
    clients = {i: SecureClient(session, i) for i in range(1, m + dropped + 1)}
    lengths = {"keys": 0, "shares": 0, "masked": 0, "unmask": 0}

    def send(stage, party, message):
        lengths[stage] += len(message)
        server.receive(party, message)

    for i, c in clients.items():
        send("keys", i, c.keys())
    roster = server.close()
    for i, c in clients.items():
        send("shares", i, c.shares(roster[i]))
    routed = server.close()
    numbers = np.zeros((m, session.length), np.int64)
    numbers[:, : LAYOUT.size] = codec.recover(vectors.numpy()) * (n.numpy() if weights == "samples" else 1)
    for i in range(1, m + 1):
        send("masked", i, clients[i].masked(routed[i], numbers[i - 1].astype(session.word)))
    asked = server.close()
    for i in range(1, m + 1):
        send("unmask", i, clients[i].unmask(asked[i]))
    server.close()
    total = session.signed(server.total())[: LAYOUT.size]
    assert np.array_equal(total, next(iter(acc.vectors.values())).numpy())
    update, _, metrics = gather.close(acc, {}, ctx)
    p = n.double() if weights == "samples" else one.double()
    expected = (p * vectors.double()).sum(0) / p.sum()
    assert float((update["delta"].double() - expected).abs().max()) < 1e-6
    assert {f"up:{stage}": size for stage, size in lengths.items()} == {
        k: v for k, v in metrics.items() if k.startswith("up:")
    }
    assert metrics["secure_dropped"] == dropped


def rehearsed(made, n, x, dropped):
    from fedbraid.core.context import ServerContext

    sizes = np.concatenate([n[:, 0].numpy().astype(np.int64), np.full(3, 6)])
    return ServerContext(
        4, len(n), len(sizes), float(sizes.sum()), 0.1, 1.0, 1.0, 0.0, LAYOUT, sizes, sent={"x": x[None]}, dropped=dropped
    )  # fmt: skip


# Bytes and drop-outs


def test_bytes_of_all_stages_are_in_the_records():
    record = run(fb.secure(fb.fedavg(), range=RANGE)).history[-1]
    assert record["bytes_up"] == sum(record["up"].values())
    assert record["bytes_down"] == sum(record["down"].values())
    assert set(record["up"]) == {"keys", "shares", "masked", "unmask"}
    assert set(record["down"]) == {"x", "keys", "shares", "masked"}
    d = task().layout.size
    bits = 16 + math.ceil(math.log2(5 * 5))  # five clients of at most five samples
    numbers = 3 * math.ceil(48 / 15)
    assert abs(record["up"]["masked"] / 5 - 24 - (d + numbers) * bits / 8) < 2
    assert record["up"]["keys"] == 5 * (24 + 64)
    assert record["up"]["shares"] == 5 * (24 + 4 * (4 + 88))


def test_those_who_come_too_late_have_shared_their_keys():
    schedule = fb.rounds(3, clients=6, over_select=1.4, durations=fb.clock.halfnormal())
    record = run(fb.secure(fb.fedavg(), range=RANGE), schedule).history[0]
    assert record["secure_dropped"] == record["dropped"] == 3
    assert record["up"]["keys"] == 9 * (24 + 64)
    assert record["up"]["shares"] == 9 * (24 + 8 * (4 + 88))
    assert record["up"]["unmask"] == 6 * (24 + 8 * 36)


def test_too_few_neighbours_end_the_step_and_keep_the_one_before(tmp_path):
    schedule = fb.rounds(3, clients=5, over_select=1.8, durations=fb.clock.halfnormal())
    with pytest.raises(
        fb.FedbraidError, match="4 neighbours of party 1 are left of 8, fewer than threshold=5"
    ):
        run(fb.secure(fb.fedavg(), range=RANGE), schedule, out=tmp_path / "run")
    assert len(run(fb.secure(fb.fedavg(), range=RANGE, threshold=4), schedule).history) == 3


def test_a_clock_counts_the_masked_numbers_too():
    """What a message is planned to be, for transfer times: within a tenth of what it is."""
    a = fb.secure(fb.fedavg(), range=RANGE)
    layout = Layout.from_shapes([("w", (100, 100))])
    planned = a.up.size(a.uploads, layout)
    assert planned == pytest.approx(10_000 * 26 / 8, rel=0.01)


def test_neighbourhoods_cost_less_than_everybody():
    few = run(fb.secure(fb.fedavg(), neighbours=2), fb.rounds(1, clients=9)).history[0]
    all_ = run(fb.secure(fb.fedavg()), fb.rounds(1, clients=9)).history[0]
    assert few["up"]["shares"] < all_["up"]["shares"] / 3
    assert few["up"]["masked"] == all_["up"]["masked"]


# The same bits


@pytest.mark.parametrize("name", ["fedavg", "fedadavr", "scallion"])
def test_blocks_and_engines_make_no_difference(name):
    a = fb.secure(SUMS[name](), range=RANGE)
    work = fb.Work(lr=0.05, batch=2, steps=3)
    one = run(a, work=work, engine="in_process(backend='loop', block=1)")
    for engine in ("in_process(backend='loop', block=64)", "pool(workers=2, backend='loop')"):
        assert torch.equal(one.x, run(a, work=work, engine=engine).x), engine


@pytest.mark.parametrize("name", ["fedavg", "fedadavr", "error feedback"])
def test_resumed_runs_have_the_same_bits(name, tmp_path):
    a = fb.secure(SUMS[name](), range=RANGE)
    whole = run(a, fb.rounds(6, clients=5))

    class Killed(Exception):
        pass

    class Kill:
        def step(self, record, run):
            if record["step"] == 3:
                raise Killed

    with pytest.raises(Killed):
        run(a, fb.rounds(6, clients=5), out=tmp_path / "run", callbacks=[Kill()])
    assert torch.equal(fb.resume(tmp_path / "run", task=task()).x, whole.x)


# With privacy


def private(a, **options):
    return fb.private(a, clip=0.5, noise=options.pop("noise", 0.5), **options)


@pytest.mark.parametrize("name", ["fedavg", "fedadavr", "feddyn", "scallion", "mifa"])
def test_private_sums_are_those_of_a_server_that_reads_uploads(name):
    """ε is the same, and the models are as far apart as clipping before rounding moves them."""
    a, work = SUMS[name](), fb.Work(lr=0.05, batch=2, steps=3)
    pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
    secure = run(private(fb.secure(a, range=40.0)), work=work)
    open_ = run(private(in_the_open(a, reach=40.0)), work=work)
    assert secure.history[-1]["epsilon"] == open_.history[-1]["epsilon"]
    assert float((secure.x - open_.x).abs().max()) < 0.01 * max(1.0, float(open_.x.abs().max()))
    assert secure.history[-1]["up"].keys() == {"keys", "shares", "masked", "unmask"}


@pytest.mark.parametrize("bits", [8, 16])
def test_nothing_that_is_sent_is_longer_than_the_clip(bits):
    from fedbraid.core.link import UploadContext

    layout = Layout.from_shapes([("w", (40, 40))])
    made = fb.private(fb.secure(fb.fedavg(), bits=bits, range=0.5), clip=1.0, noise=1.0)
    x = torch.zeros(1, layout.size)
    who = UploadContext(np.arange(20), 0, 0, x, made.uploads, layout, None, {})
    v = (
        torch.randn(20, layout.size, generator=torch.Generator().manual_seed(0))
        * torch.linspace(0.001, 1, 20)[:, None]
    )
    sent = made.up.send({"delta": v}, {}, who).received["delta"]
    norms = sent.double().norm(dim=1)
    assert float(norms.max()) <= 1.0
    assert float(norms[5:].min()) > 0.5


def test_a_private_step_that_nobody_came_to_is_noise_alone():
    pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
    made = private(fb.secure(fb.fedavg(), range=RANGE), noise=1e-6)
    gather, x = made.gather, torch.zeros(LAYOUT.size)
    bound = type(gather)(**{**gather.__dict__, "z": 1e-6, "planned": 4.0, "seed": 0})
    update, _, _ = bound.close(bound.zero(x), {}, rehearsed(made, torch.ones(0, 1), x, 0))
    assert 0 < float(update["delta"].abs().max()) < 1e-5


def test_private_and_secure_refuse_what_they_cannot_do_together():
    with pytest.raises(fb.FedbraidError, match="adaptive"):
        fb.private(fb.secure(fb.fedavg()), clip="adaptive", noise=1.0)
    with pytest.raises(fb.FedbraidError, match="secure before private"):
        fb.secure(fb.private(fb.fedavg(), noise=1.0))
    coarse = fb.private(fb.secure(fb.fedavg(), bits=4, range=10.0), clip=0.01, noise=1.0)
    with pytest.raises(fb.FedbraidError, match="more bits or a smaller range"):
        run(coarse, work=fb.Work(lr=0.05, batch=2, steps=3))


# Noise in shares


def shared_noise(a, **options):
    return private(fb.secure(a, range=1.0), where="distributed", **options)


def test_shares_of_noise_are_whole_numbers_of_the_deviation_that_is_claimed():
    from dataclasses import replace

    from fedbraid.core.link import UploadContext

    layout = Layout.from_shapes([("w", (300, 100))])
    made = fb.private(fb.secure(fb.fedavg(), bits=14, range=0.5), clip=0.4, noise=2.0, where="distributed")
    up = replace(made.up, z=2.0, planned=20.0)
    who = UploadContext(np.arange(20), 0, 0, torch.zeros(1, layout.size), made.uploads, layout, None, {})
    sent = up.send({"delta": torch.zeros(20, layout.size)}, {}, who).received["delta"].double()
    (grid,) = up.codec.grids()
    assert float((sent / grid.step - (sent / grid.step).round()).abs().max()) < 1e-2
    deviation = float(sent.sum(0).std())
    assert deviation == pytest.approx(2.0 * 0.4, rel=5 / math.sqrt(2 * layout.size))
    assert abs(float(sent.sum(0).mean())) < 5 * 0.8 / math.sqrt(layout.size)
    unbound = made.up
    with pytest.raises(ValueError, match="lam"):  # nothing leaves without noise
        unbound.send({"delta": torch.zeros(20, layout.size)}, {}, who)


@pytest.mark.parametrize("order", [2, 8, 64])
@pytest.mark.parametrize("z", [0.7, 3.0])
def test_the_divergence_of_a_share_is_bounded_as_the_paper_says(order, z):
    """Skellam against itself moved by the whole clip, summed over its probabilities: below the corollary, and near it."""
    from scipy.special import ive

    from fedbraid.privacy.mechanisms import Mechanism

    grain = 30
    variance = (z * grain) ** 2
    most = 2 * order * grain + int(20 * z * grain)
    ratios = np.zeros(most + 200)  # I_{k+1}/I_k, by Bessel's recurrence from far out
    for k in range(len(ratios) - 1, 0, -1):
        ratios[k - 1] = 1 / (2 * k / variance + ratios[k])
    log_p = np.log(ive(0, variance)) + np.concatenate([[0], np.cumsum(np.log(ratios[:most]))])
    k = np.arange(-most + grain, most - grain + 1)
    p, q = log_p[np.abs(k)], log_p[np.abs(k - grain)]
    assert np.exp(p).sum() == pytest.approx(1)
    exact = np.logaddexp.reduce(order * p - (order - 1) * q) / (order - 1)
    bound = Mechanism("skellam", grain=grain).skellam(z, order)
    assert exact <= bound
    assert (
        exact > 0.8 * bound or order * grain > variance
    )  # where Skellam's tails are heavier than a Gaussian's


def test_epsilon_of_shares_is_near_that_of_composed_gaussians():
    dp = pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
    result = run(shared_noise(fb.fedavg(), noise=1.0), work=fb.Work(lr=0.05, batch=2, steps=3))
    gaussian = dp.get_epsilon_gaussian(1.0 / math.sqrt(4), 1e-5)
    assert gaussian < result.history[-1]["epsilon"] < 1.1 * gaussian


def test_shares_of_noise_keep_the_same_bits_in_blocks():
    pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
    work = fb.Work(lr=0.05, batch=2, steps=3)
    a = shared_noise(fb.fedadavr(held="client"), noise=0.1)
    one, many = (run(a, work=work, engine=f"in_process(backend='loop', block={b})") for b in (1, 64))
    assert torch.equal(one.x, many.x)


@pytest.mark.parametrize(
    ("make", "schedule", "why"),
    [
        (lambda: fb.private(fb.fedavg(), noise=1.0, where="distributed"), None, r"private\(secure"),
        (lambda: shared_noise(fb.mifa(held="client")), None, "one vector on one grid"),
        (
            lambda: shared_noise(fb.fedavg()),
            lambda: fb.rounds(2, clients=8, sampling="poisson"),
            "fixed cohort",
        ),
        (lambda: shared_noise(fb.fedbuff()), lambda: fb.buffered(2, buffer=4, concurrency=6), "fixed cohort"),
        (lambda: shared_noise(fb.fedavg(), noise=1e4), None, "fewer bits or a larger range"),
        (lambda: fb.private(fb.fedavg(), noise=1.0, where="distribute"), None, "did you mean 'distributed'"),
    ],
)
def test_shares_of_noise_are_refused_where_they_would_not_be_what_they_claim(make, schedule, why):
    with pytest.raises(fb.FedbraidError, match=why):
        run(make(), schedule() if schedule else None, work=fb.Work(lr=0.05, batch=2, steps=3))


# Refusals


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: fb.secure(fb.fedvarp()), r"fedvarp gathers by ServerMemory.*held='client'"),
        (lambda: fb.secure(fb.mifa()), r"mifa gathers by ServerMemory"),
        (lambda: fb.secure(fb.fedadavr()), r"fedadavr gathers by ServerMemory"),
        (lambda: fb.secure(fb.cluster_fedvarp(2)), r"ClusterVarp"),
        (lambda: fb.secure(fb.ca2fl()), r"gathers by ServerMemory"),
        (lambda: fb.secure(fb.fednova()), r"the number 'a'"),
        (lambda: fb.secure(fb.mfl(optimizer="adam")), r"'v', which is never negative and crosses links as its root"),
        (lambda: fb.secure(fb.scaffold()), r"'dc', whose range is not declared; .*range=\{'delta': 1.0, 'dc': 1.0\}"),
        (lambda: fb.secure(fb.fedavg(), range={"dleta": 1.0}), r"did you mean 'delta'"),
        *(
            (lambda codec=codec: fb.secure(fb.fedpaq(codec)), r"scale or positions of its own")
            for codec in (
                fb.codecs.int4(), fb.codecs.int8(), fb.codecs.fp16(), fb.codecs.uniform(4), fb.codecs.qsgd(4),
                fb.codecs.kmeans(3), fb.codecs.topk(0.1), fb.codecs.of_weights(fb.codecs.shared(8)),
            )
        ),
        (lambda: fb.secure(fb.secure(fb.fedavg())), r"secure gathers by SecureMean"),
        (lambda: fb.secure(fb.local_only()), r"no global model"),
        (lambda: fb.secure(fb.fedavg(), threshold=1), r"threshold"),
        (lambda: fb.secure(fb.fedavg(), neighbours=2, threshold=5), r"threshold=5"),
        (lambda: fb.secure(fb.fedavg(), bits=1), r"no level besides zero"),
        (lambda: fb.secure(fb.fedavg(), range=0.0), r"range"),
        (lambda: fb.with_codecs(fb.secure(fb.fedavg()), up=fb.codecs.int8()), r"call secure last"),
    ],
)  # fmt: skip
def test_what_does_not_add_up_is_refused_by_name(make, why):
    with pytest.raises(fb.FedbraidError, match=why):
        make()


@pytest.mark.parametrize(
    ("algorithm", "schedule", "why"),
    [
        (fb.fedavg, lambda: fb.rounds(2, clients=2), "steps of 2 of 9 clients"),
        (
            fb.fedavg,
            lambda: fb.rounds(50, clients=4, sampling="poisson"),
            "one of 50 Poisson rounds .* a chance of 1",
        ),
        (fb.fedasync, lambda: fb.immediate(2), "steps of 1 of 9 clients .* a buffer"),
        (fb.fedbuff, lambda: fb.buffered(2, buffer=2), "steps of 2"),
        (
            fb.fedavg,
            lambda: fb.rounds(2, clients=4, select=fb.power_of_choice(6)),
            "losses, which a secure sum hides",
        ),
        (fb.fedgbo, lambda: fb.buffered(2, buffer=4, concurrency=6), "version or age"),
        (fb.scallion, lambda: fb.rounds(2, clients=5), r"Work\(steps=…\)"),
    ],
)
def test_runs_without_a_sum_that_hides_anybody_are_refused_before_they_begin(
    algorithm, schedule, why, tmp_path
):
    with pytest.raises(fb.FedbraidError, match=why):
        run(fb.secure(algorithm()), schedule(), out=tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_real_nodes_need_the_package_that_encrypts_before_they_begin(monkeypatch):
    import sys

    from fedbraid.algorithms.secure import check_run

    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    check_run(fb.secure(fb.fedavg()), fb.rounds(2, clients=5), 9, True, False)  # a simulation does not
    with pytest.raises(fb.errors.MissingExtra, match="'secure'"):
        check_run(fb.secure(fb.fedavg()), fb.rounds(2, clients=5), 9, True, True)
    monkeypatch.undo()
    check_run(fb.secure(fb.fedavg()), fb.rounds(2, clients=5), 9, True, True)


def test_hostile_clients_upload_on_the_grid_and_robust_rules_are_refused():
    for a in (
        fb.secure(fb.attack(fb.fedavg(), "sign_flip", share=0.3), range=RANGE),
        fb.attack(fb.secure(fb.fedavg(), range=RANGE), "sign_flip", share=0.3),
    ):
        open_ = run(in_the_open(fb.attack(fb.fedavg(), "sign_flip", share=0.3)))
        assert float((run(a).x - open_.x).abs().max()) < 1e-6
    for refused in (
        lambda: fb.robust(fb.secure(fb.fedavg()), "median"),
        lambda: fb.secure(fb.robust(fb.fedavg(), "median")),
    ):
        with pytest.raises(fb.FedbraidError, match="gathers by"):
            refused()
    with pytest.raises(fb.FedbraidError, match="single uploads"):
        fb.attack(fb.secure(fb.fedavg()), "alie", share=0.3)


def test_a_wrapper_that_changes_what_is_summed_is_refused():
    with pytest.raises(fb.FedbraidError, match="outermost"):
        run(fb.error_feedback(fb.secure(fb.fedavg())))
