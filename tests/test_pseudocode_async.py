"""Does each asynchronous algorithm equal its paper's pseudocode, followed event by event?

Who hands in when, and which version each upload was trained from, comes from replaying the schedule; the models
of all versions, the hidden state, the buffer and the staleness are kept here.
"""

from __future__ import annotations

import numpy as np
import pytest
from oracles import MEMORY, Recorded, Trial, agree, topk, trial_name

import fedbraid as fb

pytestmark = pytest.mark.usefixtures("backend")

CLOSED = fb.buffered(9, buffer=3, concurrency=5, arrivals="closed")
OPEN = fb.buffered(9, buffer=2, concurrency=4)
QUICK = fb.buffered(12, buffer=4, concurrency=3, arrivals="closed", durations=fb.clock.lognormal(0, 2.0))
schedules = pytest.mark.parametrize("schedule", [CLOSED, OPEN, QUICK], ids=["closed", "open", "quick"])


def ages(tau, kind):
    return {"sqrt": 1 / np.sqrt(1 + tau), "constant": 1.0}[kind]


def replay(trial, schedule):
    """Per server step, the uploads in order of arrival as (client, version)."""
    ticks = schedule.ticks(trial.p.N, trial.seed)
    return [list(zip(tick.clients.tolist(), tick.versions.tolist())) for tick in ticks]


def check_history(result, events):
    for t, (record, buffer) in enumerate(zip(result.history, events, strict=True)):
        assert record["clients"] == [i for i, _ in buffer]
        tau = [t - version for _, version in buffer]
        if "staleness" in record:
            assert record["staleness"] == pytest.approx(np.mean(tau))
            assert record["staleness_max"] == max(tau)
        else:
            assert max(tau) == 0


def test_the_schedules_have_stale_uploads_and_clients_that_return_within_a_step():
    trial = Trial()
    events = {s: replay(trial, s) for s in (CLOSED, OPEN, QUICK)}
    for steps in events.values():
        assert any(t - v > 1 for t, buffer in enumerate(steps) for _, v in buffer)
    twice = [len({i for i, _ in buffer}) < len(buffer) for buffer in events[QUICK]]
    assert any(twice)


@pytest.mark.parametrize("trial", [Trial(), Trial(rho=0.5, decay=0.9), Trial(uneven=True)], ids=trial_name)
@pytest.mark.parametrize(("staleness", "momentum"), [("sqrt", 0.0), ("constant", 0.6)])
@schedules
def test_fedbuff(trial, staleness, momentum, schedule):
    result = trial.run(fb.fedbuff(lr=0.7, momentum=momentum, staleness=staleness), schedule)
    events = replay(trial, schedule)
    check_history(result, events)
    x, b, versions = trial.p.x0, 0.0, [trial.p.x0]
    for t, buffer in enumerate(events):
        G = np.zeros_like(x)
        for i, version in buffer:
            start = versions[version]
            delta = start - trial.local(start, i, version)
            G += ages(t - version, staleness) * delta / len(buffer)
        b = momentum * b + G
        x = x - 0.7 * b
        versions.append(x)
    agree(result.x, x, trial)


def test_fedbuff_weighted_by_samples():
    trial = Trial()
    result = trial.run(fb.fedbuff(weights="samples"), CLOSED)
    x, versions = trial.p.x0, [trial.p.x0]
    for t, buffer in enumerate(replay(trial, CLOSED)):
        ps = trial.p.p([i for i, _ in buffer], "samples")
        for p, (i, v) in zip(ps, buffer):
            x = x - p * ages(t - v, "sqrt") * (versions[v] - trial.local(versions[v], i, v))
        versions.append(x)
    agree(result.x, x, trial)


@pytest.mark.parametrize("form", ["delta", "mixing"])
@pytest.mark.parametrize("staleness", ["sqrt", "constant"])
def test_fedasync(form, staleness):
    trial, schedule = Trial(rho=0.5), fb.immediate(15, concurrency=4)
    result = trial.run(fb.fedasync(lr=0.6, staleness=staleness, form=form), schedule)
    events = replay(trial, schedule)
    check_history(result, events)
    x, versions = trial.p.x0, [trial.p.x0]
    for t, [(i, version)] in enumerate(events):
        y, alpha = trial.local(versions[version], i, version), 0.6 * ages(t - version, staleness)
        x = x - alpha * (versions[version] - y) if form == "delta" else (1 - alpha) * x + alpha * y
        versions.append(x)
    agree(result.x, x, trial)


@pytest.mark.parametrize("momentum", [0.0, 0.3])
@schedules
def test_qafel(momentum, schedule):
    trial = Trial(lr=0.2)
    up, down = Recorded(fb.codecs.qsgd(4)), Recorded(fb.codecs.qsgd(4))
    result = trial.run(fb.qafel(lr=0.8, momentum=momentum, up=up, down=down), schedule)
    events = replay(trial, schedule)
    check_history(result, events)
    x = hidden = trial.p.x0
    b, versions = 0.0, [hidden]
    for t, buffer in enumerate(events):
        G = np.zeros_like(x)
        for i, version in buffer:
            start = versions[version]
            G += ages(t - version, "sqrt") * up.of(start - trial.local(start, i, version)) / len(buffer)
        b = momentum * b + G
        x = x - 0.8 * b
        hidden = hidden + down.of(x - hidden)
        versions.append(hidden)
    agree(result.x, x, trial)
    agree(result.state.sent[schedule.steps].vectors["x"], hidden, trial)


def test_qafels_default_is_four_bit_qsgd_both_ways():
    qsgd = fb.codecs.qsgd(4)
    assert fb.qafel() == fb.qafel(
        lr=1.0, momentum=0.0, staleness="sqrt", up=qsgd, down=qsgd, weights="uniform"
    )


# Stateful clients: a client's state at arrival is its state when it started ---------------------------------


@schedules
def test_feddyn_without_rounds(schedule):
    trial, mu = Trial(), 0.3
    result = trial.run(fb.feddyn(mu=mu), schedule)
    N, x = trial.p.N, trial.p.x0
    h, h_i, versions = np.zeros_like(x), [np.zeros_like(x)] * N, [x]
    for buffer in replay(trial, schedule):
        G = np.zeros_like(x)
        for p, (i, v) in zip(trial.p.p([i for i, _ in buffer], "samples"), buffer):
            start = versions[v]
            y = trial.local(start, i, v, lambda g, y: g - h_i[i] - mu * (start - y))  # noqa: B023
            h_i[i] = h_i[i] + mu * (start - y)
            G += p * (start - y)
        h = h + len(buffer) / N * G
        x = x - G - h
        versions.append(x)
    agree(result.state.x, x, trial)
    agree(result.x, x + h, trial)


@schedules
def test_scaffold_without_rounds(schedule):
    trial = Trial()
    result = trial.run(fb.scaffold(), schedule)
    N, x = trial.p.N, trial.p.x0
    c, c_i = np.zeros_like(x), [np.zeros_like(x)] * N
    versions = [(x, c)]
    for buffer in replay(trial, schedule):
        G, dc = np.zeros_like(x), np.zeros_like(x)
        for p, (i, v) in zip(trial.p.p([i for i, _ in buffer], "samples"), buffer):
            start, its_c = versions[v]
            y = trial.local(start, i, v, lambda g, y: g - c_i[i] + its_c)  # noqa: B023
            change = -its_c + (start - y) / (3 * trial.rate(v))
            c_i[i] = c_i[i] + change
            G, dc = G + p * (start - y), dc + change / len(buffer)
        x, c = x - G, c + len(buffer) / N * dc
        versions.append((x, c))
    agree(result.x, x, trial)


@schedules
def test_error_feedback_without_rounds(schedule):
    trial = Trial()
    result = trial.run(fb.error_feedback(fb.with_codecs(fb.fedbuff(), up=fb.codecs.topk(0.3))), schedule)
    x, e, versions = trial.p.x0, [np.zeros(27)] * trial.p.N, [trial.p.x0]
    for t, buffer in enumerate(replay(trial, schedule)):
        G = np.zeros_like(x)
        for i, v in buffer:
            u = versions[v] - trial.local(versions[v], i, v) + e[i]
            e[i] = u - topk(u, 0.3)
            G += ages(t - v, "sqrt") * topk(u, 0.3) / len(buffer)
        x = x - G
        versions.append(x)
    agree(result.x, x, trial)


# Server memory under staleness and a decaying rate ----------------------------------------------------------


@pytest.mark.parametrize("memory", [None, "int8"])
def test_fedadavr_without_rounds(memory):
    trial, events = Trial(), replay(Trial(), CLOSED)
    assert all(len({i for i, _ in buffer}) == len(buffer) for buffer in events)
    result = trial.run(fb.fedadavr("sgd", lr=0.7, memory=memory), CLOSED)
    N, x, versions = trial.p.N, trial.p.x0, [trial.p.x0]
    y, population_weight = [np.zeros(27)] * N, trial.p.p(range(N), "samples")
    for buffer in events:
        clients = [i for i, _ in buffer]
        g = {i: (versions[v] - trial.local(versions[v], i, v)) / trial.lr for i, v in buffer}
        r = sum(p * (g[i] - y[i]) for p, i in zip(trial.p.p(clients, "samples"), clients))
        r = r + sum(p * y[j] for j, p in enumerate(population_weight))
        for i in clients:
            y[i] = MEMORY[memory](g[i])
        x = x - 0.7 * trial.lr * r
        versions.append(x)
    agree(result.x, x, trial)


@pytest.mark.parametrize("build", [fb.fedbuff, fb.scaffold, fb.fedadavr, fb.mifa, fb.adabest, fb.fedgbo])
@schedules
def test_training_ahead_of_arrivals_changes_nothing(build, schedule, monkeypatch):
    trial = Trial(decay=0.8)
    ahead = trial.run(build(), schedule)
    monkeypatch.setattr(
        "fedbraid.run.simulated_source.SimulatedSource.BUDGET", 0
    )  # now every client trains when it arrives
    agree(ahead.x, trial.run(build(), schedule).x.double().numpy(), trial)
