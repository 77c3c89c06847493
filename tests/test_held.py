"""Memory that clients hold: is it what a server would hold, and with a codec what was received?"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import fedbraid as fb

WORK = fb.Work(lr=0.05, epochs=1, batch=8, lr_decay=0.97)
SCHEDULES = {
    "rounds": fb.rounds(8, clients=2),
    "buffered": fb.buffered(8, buffer=3, concurrency=4),
}
OPTIMISERS = ("adagrad", "adam", "adabelief", "yogi", "lamb")
BUILDS = {
    "fedvarp": partial(fb.fedvarp, lr=0.7),
    "mifa": partial(fb.mifa, lr=0.7),
    "population": partial(fb.fedadavr, "sgd", lr=1.0, normalise="population"),
    "sgd": partial(fb.fedadavr, "sgd", lr=1.0),
    **{name: partial(fb.fedadavr, name, lr=0.02, eps=1e-3) for name in OPTIMISERS},
}


class Leaver:
    """Lets a client leave after a step."""

    def __init__(self, client, after, reachable=True):
        self.client, self.after, self.reachable = client, after, reachable

    def step(self, record, run):
        if record["step"] == self.after:
            run.leave(self.client, self.reachable)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("build", BUILDS)
def test_clients_hold_what_the_server_would(blobs, build, weights, schedule):
    """With a client that leaves in mid-run, too."""
    x = {}
    for held in ("server", "client"):
        algorithm = BUILDS[build](weights=weights, held=held)
        run = fb.simulate(blobs, algorithm, WORK, SCHEDULES[schedule], seed=1, callbacks=[Leaver(3, 5)])
        x[held] = run.x
    assert (x["server"] - blobs.initial(1)).abs().max() > 1e-2
    torch.testing.assert_close(x["client"], x["server"], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("build", ["fedvarp", "mifa", "adam"])
def test_the_sum_is_of_what_was_received(blobs, build, weights):
    """With a coarse codec, error feedback and a client that has left."""
    a = fb.error_feedback(fb.with_codecs(BUILDS[build](weights=weights, held="client"), up=fb.codecs.qsgd(3)))
    run = fb.simulate(blobs, a, WORK, SCHEDULES["buffered"], seed=2, callbacks=[Leaver(0, 6)])
    stays = [c for c in range(blobs.clients) if c != 0]
    rows = run.state.clients.get(stays)
    total, seen = (rows["w_i"] * rows["y_i"]).double().sum(0), float(rows["w_i"].sum())
    torch.testing.assert_close(run.state.server[0].total, total, rtol=1e-4, atol=1e-4)
    assert total.norm() > 0.1
    if build == "mifa":
        assert run.state.server[0].seen == pytest.approx(seen)


def test_a_client_that_cannot_be_asked_leaves_its_share(blobs):
    held = fb.fedvarp(held="client")
    run = fb.simulate(blobs, held, WORK, fb.rounds(4, clients=6), callbacks=[Leaver(2, 2, reachable=False)])
    assert run.history[2]["unreturned"] == [2]


def test_what_fades_stays_and_the_record_says_so(blobs):
    held = fb.fedvarp(held="client", fade=0.1)
    run = fb.simulate(blobs, held, WORK, fb.rounds(4, clients=6), callbacks=[Leaver(2, 2)])
    assert run.history[2]["left"] == [2]
    assert run.history[2]["unreturned"] == [2]
    exact = fb.fedvarp(held="client")
    run = fb.simulate(blobs, exact, WORK, fb.rounds(4, clients=6), callbacks=[Leaver(2, 2)])
    assert "unreturned" not in run.history[2]


def test_a_server_keeps_one_sum(blobs):
    run = fb.simulate(blobs, fb.fedadavr(held="client"), WORK, fb.rounds(2, clients=6))
    assert run.state.gather == {}
    assert run.state.server[0].total.shape == run.x.shape


def test_running_statistics_are_those_of_the_memory(blobs):
    """They are averaged whatever the optimiser, wherever the memory is."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    clients = [(blobs.inputs[rows], blobs.targets[rows]) for rows in torch.arange(60).split(20)]
    task = fb.Task.from_arrays(model, clients, buffers="average")
    x = [
        fb.simulate(task, fb.fedadavr(lr=0.01, eps=1e-3, held=held), WORK, fb.rounds(5, clients=2)).x
        for held in ("server", "client")
    ]
    torch.testing.assert_close(x[1], x[0], rtol=1e-3, atol=1e-4)


def test_what_a_server_stores_is_refused(blobs):
    with pytest.raises(fb.FedbraidError, match=r"memory='int4' is what a server stores.*codecs\.int4"):
        fb.fedadavr(memory="int4", held="client")
    with pytest.raises(fb.FedbraidError, match="held must be 'server' or 'client', got 'clients'"):
        fb.fedvarp(held="clients")
    with pytest.raises(fb.FedbraidError, match="uploads \\['change'\\] and no update; use the inner codec"):
        fb.with_codecs(fb.fedvarp(held="client"), up=fb.codecs.of_weights(fb.codecs.int8()))


def test_it_is_resumed_to_the_bit(blobs, tmp_path):
    class Stop(Exception):
        pass

    class StopAt:
        def step(self, record, run):
            if record["step"] == 5:
                raise Stop

    a = fb.mifa(held="client")
    straight = fb.simulate(blobs, a, WORK, SCHEDULES["buffered"], seed=3)
    with pytest.raises(Stop):
        fb.simulate(blobs, a, WORK, SCHEDULES["buffered"], seed=3, out=tmp_path / "r", callbacks=[StopAt()])
    assert torch.equal(fb.resume(tmp_path / "r").x, straight.x)


# Fading ---------------------------------------------------------------------------------------------------


SOME_EMPTY = fb.rounds(6, clients=1, sampling="poisson")


@pytest.mark.parametrize("schedule", [fb.rounds(6, clients=2), SOME_EMPTY], ids=["fixed", "poisson"])
@pytest.mark.parametrize("build", ["fedvarp", "mifa", "adam"])
def test_a_fading_sum_is_of_what_clients_hold_faded(blobs, build, schedule):
    rho, steps = 0.2, 6
    a = BUILDS[build](held="client", fade=rho)
    run = fb.simulate(blobs, a, WORK, schedule, seed=2)
    came = [bool(r["clients"]) for r in run.history]
    assert all(came[came.index(True) :]) == (schedule is not SOME_EMPTY)
    rows = run.state.clients.get(list(range(blobs.clients)))
    held = rows["w_i"] * rows["y_i"] * (1 - rho) ** (steps - rows["t_i"])
    sums = next(s for s in run.state.server if hasattr(s, "total"))
    torch.testing.assert_close(sums.total, held.double().sum(0), rtol=1e-4, atol=1e-4)
    plain = fb.simulate(blobs, BUILDS[build](held="client"), WORK, schedule, seed=2)
    assert not torch.allclose(run.x, plain.x, atol=1e-4)


@pytest.mark.parametrize("rho", [0.0, 0.1])
def test_noise_gathers_in_the_sum_and_fades(rho):
    """Of clients that change nothing, noise is all there is: N(0, t (zC)²), or no more than a geometric series of it."""
    from fedbraid.core.context import ServerContext
    from fedbraid.core.exact_sum import ExactSum
    from fedbraid.core.gather import Sums
    from fedbraid.core.layout import Layout
    from fedbraid.privacy.parts import Noised

    d, z, C, N = 20_000, 1.5, 0.3, 50
    a = fb.private(fb.fedvarp(held="client", fade=rho), clip=C, noise=z)
    layout, x = Layout.from_shapes([("w", (d,))]), torch.zeros(d)
    server = a.server.init(x, layout)
    assert isinstance(a.gather, Noised)
    gather = replace(a.gather, z=z, planned=10.0, seed=0, server=a.server)
    for t in range(30):
        ctx = ServerContext(
            t, 10, N, 10.0 * N, 0.1, 1.0, 1.0, 0.0, layout, np.ones(N, np.int64), sent={"x": x[None]}
        )
        cohort = replace(gather.zero(x), sums=Sums({"change": ExactSum(d)}, 10.0, 10))
        u, _, _ = gather.close(cohort, {}, ctx)
        _, server = a.server.update(u, server, x, ctx)
        sums = next(s for s in server if hasattr(s, "total"))
        steps = t + 1 if not rho else sum((1 - rho) ** (2 * k) for k in range(1, t + 2))
        assert float(sums.total.std()) == pytest.approx(z * C * steps**0.5, rel=0.03)
    if rho:
        assert float(sums.total.std()) < 1.03 * z * C / (1 - (1 - rho) ** 2) ** 0.5


def test_fading_says_where_it_does_not_belong(blobs):
    with pytest.raises(fb.FedbraidError, match=r"fade=0\.1 is of memory that clients hold"):
        fb.fedvarp(fade=0.1)
    with pytest.raises(fb.FedbraidError, match=r"fade must be .* got 1\.0"):
        fb.mifa(held="client", fade=1.0)
    with pytest.raises(fb.FedbraidError, match="leave out fade="):
        fb.simulate(blobs, fb.fedvarp(held="client", fade=0.1), WORK, SCHEDULES["buffered"])
