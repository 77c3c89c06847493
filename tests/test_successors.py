"""Do the algorithms that came after the five papers equal transcriptions of their definitions, event by event?"""

from __future__ import annotations

import numpy as np
import pytest
from oracles import TRIALS, Recorded, Trial, agree, trial_name
from test_pseudocode_async import replay, schedules

import fedbraid as fb

pytestmark = pytest.mark.usefixtures("backend")
every_trial = pytest.mark.parametrize("trial", TRIALS, ids=trial_name)


@pytest.mark.parametrize("tau", [1, 3])
@every_trial
def test_ghbm(trial, tau):
    """M = (x_{t−τ} − x_t)/τ, zero while t < τ; a local step is g + (β/(a η))·M."""
    result = trial.run(fb.ghbm(tau=tau, beta=0.6, lr=0.8, weights=trial.weights))
    xs = [trial.p.x0]
    for t, cohort in enumerate(trial.cohorts):
        x = xs[-1]
        M = (xs[t - tau] - x) / tau if t >= tau else np.zeros_like(x)
        G = np.zeros_like(x)
        for p, i in zip(trial.p.p(cohort, trial.weights), cohort):
            push = 0.6 / (trial.a(i) * trial.rate(t)) * M
            G += p * (x - trial.local(x, i, t, lambda g, y: g + push))  # noqa: B023
        xs.append(x - 0.8 * G)
    agree(result.x, xs[-1], trial)


@pytest.mark.parametrize("alpha", [1.0, 0.3])
@every_trial
def test_scallion(trial, alpha):
    """δ_i = Q(α((x − y_K)/(a η) − c)); c_i ← c_i + δ_i; x ← x − η_s a η (c + mean δ_i); c ← c + (|S|/N) mean δ_i."""
    codec = Recorded(fb.codecs.qsgd(6))
    algorithm = fb.with_codecs(fb.scallion(alpha=alpha, lr=0.8, weights=trial.weights), up=codec)
    result = trial.run(algorithm)
    N, x = trial.p.N, trial.p.x0
    c, c_i = np.zeros_like(x), {i: np.zeros_like(x) for i in range(N)}
    for t, cohort in enumerate(trial.cohorts):
        G, dc = np.zeros_like(x), np.zeros_like(x)
        for p, i in zip(trial.p.p(cohort, trial.weights), cohort):
            y, moved = trial.local(x, i, t, lambda g, y: g - c_i[i] + c), trial.a(i) * trial.rate(t)  # noqa: B023
            delta = codec.of(alpha * ((x - y) / moved - c))
            c_i[i] = c_i[i] + delta
            G += p * moved * (c + delta)
            dc += delta / len(cohort)
        x, c = x - 0.8 * G, c + len(cohort) / N * dc
        np.testing.assert_allclose(c, sum(c_i.values()) / N, atol=1e-12)
    agree(result.x, x, trial, tol=5e-5)


@schedules
def test_scallion_adds_back_the_c_that_was_sent(schedule):
    trial = Trial(weights="uniform", lr=0.1)
    result = trial.run(fb.scallion(alpha=0.5, lr=0.7, weights="uniform"), schedule)
    N, x = trial.p.N, trial.p.x0
    c, c_i = np.zeros_like(x), {i: np.zeros_like(x) for i in range(N)}
    versions = [(x, c)]
    held = dict(c_i)  # what each client started its visit with
    for buffer in replay(trial, schedule):
        G, fresh = np.zeros_like(x), np.zeros_like(x)
        for i, version in buffer:
            start, sent = versions[version]
            y = trial.local(start, i, version, lambda g, y: g - held[i] + sent)  # noqa: B023
            moved = trial.a(i) * trial.rate(version)
            delta = 0.5 * ((start - y) / moved - sent)
            held[i] = held[i] + delta
            G += moved * (sent + delta) / len(buffer)
            fresh += delta
        x, c = x - 0.7 * G, c + fresh / N
        versions.append((x, c))
    agree(result.x, x, trial)


@schedules
def test_ca2fl(schedule):
    """x ← x − η(h̄ + mean_B(Δ_i − h_i)), h_i ← Δ_i; a client that is twice in a buffer counts one after the other."""
    trial = Trial()
    result = trial.run(fb.ca2fl(lr=0.7), schedule)
    x, versions, h = trial.p.x0, [trial.p.x0], {i: np.zeros(27) for i in range(trial.p.N)}
    for buffer in replay(trial, schedule):
        calibrated = sum(h.values()) / trial.p.N
        for i, v in buffer:
            delta = versions[v] - trial.local(versions[v], i, v)
            calibrated = calibrated + (delta - h[i]) / len(buffer)
            h[i] = delta
        x = x - 0.7 * calibrated
        versions.append(x)
    agree(result.x, x, trial)


@pytest.mark.parametrize("limit", [None, 2, 5])
def test_ace(limit):
    """The mean of everybody's last update, but those of versions more than `limit` steps ago."""
    trial, schedule = Trial(rho=0.5), fb.immediate(25, concurrency=4)
    result = trial.run(fb.ace(limit, lr=0.4), schedule)
    x, versions, last, used = trial.p.x0, [trial.p.x0], {}, []
    for t, [(i, v)] in enumerate(replay(trial, schedule)):
        last[i] = (v, versions[v] - trial.local(versions[v], i, v))
        young = [delta for version, delta in last.values() if limit is None or t - version <= limit]
        used.append((len(young), len(last)))
        x = x - 0.4 * sum(young) / len(young) if young else x
        versions.append(x)
    assert limit is None or any(some < most for some, most in used)
    agree(result.x, x, trial)


@pytest.mark.parametrize("limit", [None, 1, 3])
@schedules
def test_fadas(schedule, limit):
    """m, v as Adam, v̂ ← max(v̂, v); η, or min(η, 1/τ_max) where the buffer's oldest is older than the limit."""
    trial = Trial()
    result = trial.run(fb.fadas(lr=0.6, limit=limit, beta1=0.8, beta2=0.9, eps=0.05), schedule)
    x, versions, m, v, top, rates = trial.p.x0, [trial.p.x0], 0.0, 0.0, 0.0, set()
    for t, buffer in enumerate(replay(trial, schedule)):
        G = sum(versions[k] - trial.local(versions[k], i, k) for i, k in buffer) / len(buffer)
        m, v = 0.8 * m + 0.2 * G, 0.9 * v + 0.1 * G * G
        top = np.maximum(top, v)
        oldest = max(t - k for _, k in buffer)
        rate = min(0.6, 1 / oldest) if limit is not None and oldest > limit else 0.6
        rates.add(rate)
        x = x - rate * m / (np.sqrt(top) + 0.05)
        versions.append(x)
    assert limit != 1 or len(rates) > 1
    agree(result.x, x, trial)


def test_no_caution_where_a_paper_defines_stale_updates(caplog):
    trial, schedule = Trial(), fb.buffered(2, buffer=2, concurrency=3)
    for algorithm in (fb.ca2fl(), fb.ace(), fb.ace(2), fb.fadas()):
        trial.run(algorithm, schedule)
    assert "no paper defines" not in caplog.text
    trial.run(fb.ghbm(), schedule)
    assert "no paper defines ghbm()" in caplog.text
