"""Does each algorithm equal a naive loop-by-loop transcription of its paper? Synchronous rounds.

Every function below is the definition in plain NumPy, client by client, in float64; the cohorts are those
that the library's run reports.
"""

from __future__ import annotations

import numpy as np
import pytest
from oracles import (
    LAYERS,
    MATRICES,
    MEMORY,
    TRIALS,
    VMAP,
    Recorded,
    Trial,
    agree,
    symmetric,
    topk,
    trial_name,
    uniform,
)

import fedbraid as fb

pytestmark = pytest.mark.usefixtures("backend")

every_trial = pytest.mark.parametrize("trial", TRIALS, ids=trial_name)


def test_the_gradient_worked_out_by_hand_is_the_slope_of_the_loss():
    p = TRIALS[0].p
    for i in range(p.N):
        slope = [
            (p.loss(p.x0 + e, p.data[i]) - p.loss(p.x0 - e, p.data[i])) / 2e-5
            for e in 1e-5 * np.eye(len(p.x0))
        ]
        np.testing.assert_allclose(p.grad(p.x0, i), slope, atol=1e-8)


def test_the_trials_have_clients_that_skip_rounds_and_come_back():
    trial = TRIALS[0]
    trial.run(fb.fedavg())
    rounds_of = {i: [t for t, cohort in enumerate(trial.cohorts) if i in cohort] for i in range(trial.p.N)}
    assert any(np.diff(ts).max(initial=0) > 1 for ts in rounds_of.values())
    assert len({len(c) for c in trial.cohorts}) == 1
    assert trial.cohorts[0] != trial.cohorts[1]


# The averaging family ----------------------------------------------------------------------------------


def mean_update(trial, x, t, cohort, bend=None):
    """Σ_S p_i Δ_i."""
    return sum(p * (x - trial.local(x, i, t, bend)) for p, i in zip(trial.p.p(cohort, trial.weights), cohort))


@every_trial
def test_fedavg(trial):
    result = trial.run(fb.fedavg(lr=0.7, weights=trial.weights))
    x = trial.p.x0
    for t, cohort in enumerate(trial.cohorts):
        x = x - 0.7 * mean_update(trial, x, t, cohort)
    agree(result.x, x, trial)


@every_trial
def test_fedavgm(trial):
    result = trial.run(fb.fedavgm(lr=0.6, momentum=0.8, weights=trial.weights))
    x, b = trial.p.x0, 0.0
    for t, cohort in enumerate(trial.cohorts):
        b = 0.8 * b + mean_update(trial, x, t, cohort)
        x = x - 0.6 * b
    agree(result.x, x, trial)


@every_trial
def test_fedprox(trial):
    result = trial.run(fb.fedprox(mu=0.7, weights=trial.weights))
    x = trial.p.x0
    for t, cohort in enumerate(trial.cohorts):
        start = x
        x = x - mean_update(trial, x, t, cohort, lambda g, y: g + 0.7 * (y - start))  # noqa: B023
    agree(result.x, x, trial)


@every_trial
def test_fednova(trial):
    result = trial.run(fb.fednova(lr=0.9, weights=trial.weights))
    x = trial.p.x0
    for t, cohort in enumerate(trial.cohorts):
        eta, ps = trial.rate(t), trial.p.p(cohort, trial.weights)
        d, steps = np.zeros_like(x), 0.0
        for p, i in zip(ps, cohort):
            d += p * (x - trial.local(x, i, t)) / (eta * trial.a(i))
            steps += p * trial.a(i)
        x = x - 0.9 * eta * steps * d
    agree(result.x, x, trial)


def test_weight_decay_and_clipping_of_local_work():
    trial = Trial()
    work = fb.Work(lr=0.3, steps=3, batch=None, weight_decay=0.2, clip=0.3)
    result = fb.simulate(trial.p.task, fb.fedavg(), work, fb.rounds(4, clients=3), seed=1, engine=VMAP)
    x, clipped = trial.p.x0, 0
    for record in result.history:
        total = np.zeros_like(x)
        for p, i in zip(trial.p.p(record["clients"], "samples"), record["clients"]):
            y = x
            for _ in range(3):
                g = trial.p.grad(y, i)
                clipped += np.linalg.norm(g) > 0.3
                g = g * min(1, 0.3 / np.linalg.norm(g)) + 0.2 * y
                y = y - 0.3 * g
            total += p * (x - y)
        x = x - total
    assert clipped > 5
    agree(result.x, x, trial)


# Drift -------------------------------------------------------------------------------------------------


@every_trial
def test_scaffold(trial):
    result = trial.run(fb.scaffold(lr=0.8, weights=trial.weights))
    N, x = trial.p.N, trial.p.x0
    c, c_i = np.zeros_like(x), {i: np.zeros_like(x) for i in range(N)}
    for t, cohort in enumerate(trial.cohorts):
        ps, eta = trial.p.p(cohort, trial.weights), trial.rate(t)
        G, dc = np.zeros_like(x), np.zeros_like(x)
        for p, i in zip(ps, cohort):
            y = trial.local(x, i, t, lambda g, y: g - c_i[i] + c)  # noqa: B023
            new = c_i[i] - c + (x - y) / (trial.a(i) * eta)
            G += p * (x - y)
            dc += (new - c_i[i]) / len(cohort)
            c_i[i] = new
        x = x - 0.8 * G
        c = c + len(cohort) / N * dc
    agree(result.x, x, trial)


@pytest.mark.parametrize("trial", [t for t in TRIALS if not t.uneven], ids=trial_name)
def test_scaffold_m(trial):
    result = trial.run(fb.scaffold_m(weights=trial.weights))
    N, x = trial.p.N, trial.p.x0
    h, h_i = np.zeros_like(x), {i: np.zeros_like(x) for i in range(N)}
    for t, cohort in enumerate(trial.cohorts):
        eta, average = trial.rate(t), np.zeros_like(x)
        for p, i in zip(trial.p.p(cohort, trial.weights), cohort):
            y = trial.local(x, i, t, lambda g, y: g - h_i[i] + h)  # noqa: B023
            h_i[i] = h_i[i] - h + (x - y) / (trial.a(i) * eta)
            average += p * y
        h = (N - len(cohort)) / N * h + len(cohort) / (trial.a(0) * eta * N) * (x - average)
        x = average
    agree(result.x, x, trial)


@every_trial
def test_feddyn(trial):
    mu = 0.3
    result = trial.run(fb.feddyn(mu=mu, weights=trial.weights), evaluate_every=1)
    N, x = trial.p.N, trial.p.x0
    h, h_i = np.zeros_like(x), {i: np.zeros_like(x) for i in range(N)}
    for t, cohort in enumerate(trial.cohorts):
        average = np.zeros_like(x)
        for p, i in zip(trial.p.p(cohort, trial.weights), cohort):
            y = trial.local(x, i, t, lambda g, y: g - h_i[i] - mu * (x - y))  # noqa: B023
            h_i[i] = h_i[i] + mu * (x - y)
            average += p * y
        h = h + len(cohort) / N * (x - average)
        x = average - h
        assert result.history[t]["loss"] == pytest.approx(trial.p.loss(average), abs=1e-5)
    agree(result.state.x, x, trial)
    agree(result.x, average, trial)
    agree(trial.p.layout.flatten(result.model()), average, trial)


@every_trial
def test_feddyn_whose_pull_follows_the_mean_number_of_samples(trial):
    mu = 0.3
    result = trial.run(fb.feddyn(mu=mu, weights="progressive"))
    N, x = trial.p.N, trial.p.x0
    h, moved = np.zeros_like(x), {i: np.zeros_like(x) for i in range(N)}
    for t, cohort in enumerate(trial.cohorts):
        average = np.zeros_like(x)
        for i in cohort:
            mu_i = mu * (sum(trial.p.n) / N) / trial.p.n[i]
            y = trial.local(x, i, t, lambda g, y: g - mu_i * moved[i] - mu_i * (x - y))  # noqa: B023
            moved[i] = moved[i] + (x - y)
            average += y / len(cohort)
        h = h + len(cohort) / N * (x - average)
        x = average - h
    agree(result.x, average, trial)
    agree(result.state.x, x, trial)


@every_trial
def test_adabest(trial):
    mu, beta = 0.3, 0.8
    result = trial.run(fb.adabest(mu=mu, beta=beta, weights=trial.weights), evaluate_every=1)
    x = average = trial.p.x0
    h_i, last = {}, {}
    for t, cohort in enumerate(trial.cohorts):
        previous, average = average, np.zeros_like(x)
        for p, i in zip(trial.p.p(cohort, trial.weights), cohort):
            mine = h_i.get(i, np.zeros_like(x))
            y = trial.local(x, i, t, lambda g, y: g - mine)  # noqa: B023
            h_i[i] = (mine / (t - last[i]) if i in last else 0) + mu * (x - y)
            last[i] = t
            average += p * y
        h = beta * (previous - average)
        x = average - h
        assert result.history[t]["loss"] == pytest.approx(trial.p.loss(average), abs=1e-5)
    agree(result.state.x, x, trial)
    agree(result.x, average, trial)
    agree(trial.p.layout.flatten(result.model()), average, trial)


@every_trial
def test_adabest_whose_pull_follows_the_mean_number_of_samples(trial):
    mu, beta = 0.3, 0.8
    result = trial.run(fb.adabest(mu=mu, beta=beta, weights="progressive"))
    x = average = trial.p.x0
    h_i, last, visits = {}, {}, []
    for t, cohort in enumerate(trial.cohorts):
        mean, (previous, average) = np.mean(visits) if visits else None, (average, np.zeros_like(x))
        for i in cohort:
            mine = h_i.get(i, np.zeros_like(x))
            mu_i = mu * mean / trial.p.n[i] if visits else mu
            y = trial.local(x, i, t, lambda g, y: g - mu_i * mine)  # noqa: B023
            h_i[i] = (mine / (t - last[i]) if i in last else 0) + (x - y)
            last[i] = t
            average += y / len(cohort)
        visits += [trial.p.n[i] for i in cohort]
        x = average - beta * (previous - average)
    agree(result.x, average, trial)
    agree(result.state.x, x, trial)


# One optimiser on clients and server -----------------------------------------------------------------------


class Stats:
    """Table 1 of the FedGBO paper, as ALGORITHMS.md corrects it."""

    def __init__(self, name, x, beta=0.9, beta1=0.9, beta2=0.99, eps=1e-3, v0=1.0):
        self.name, self.beta, self.beta1, self.beta2, self.eps = name, beta, beta1, beta2, eps
        self.m, self.v = np.zeros_like(x), np.full_like(x, v0)

    def U(self, g, eta):
        if self.name == "sgdm":
            return -eta * (self.beta * self.m + (1 - self.beta) * g)
        if self.name == "rmsprop":
            return -eta * g / (np.sqrt(self.v) + self.eps)
        return -eta * (self.beta1 * self.m + (1 - self.beta1) * g) / (np.sqrt(self.v) + self.eps)

    def T(self, g):
        if self.name == "sgdm":
            self.m = self.beta * self.m + (1 - self.beta) * g
        elif self.name == "rmsprop":
            self.v = self.beta * self.v + (1 - self.beta) * g**2
        else:
            self.m = self.beta1 * self.m + (1 - self.beta1) * g
            self.v = self.beta2 * self.v + (1 - self.beta2) * g**2

    def inverse(self, x, x_new, K, eta):
        if self.name == "sgdm":
            return ((x - x_new) / (eta * K) - self.beta * self.m) / (1 - self.beta)
        if self.name == "rmsprop":
            return (x - x_new) * (np.sqrt(self.v) + self.eps) / (eta * K)
        return ((x - x_new) * (np.sqrt(self.v) + self.eps) / (eta * K) - self.beta1 * self.m) / (
            1 - self.beta1
        )

    def step(self, g, eta):
        """What MFL moves by after tracking."""
        if self.name == "sgdm":
            return -eta * self.m
        top = g if self.name == "rmsprop" else self.m
        return -eta * top / (np.sqrt(self.v) + self.eps)


def betas(name):
    return {"beta1": 0.8, "beta2": 0.7, "eps": 0.02} if name == "adam" else {"beta": 0.8, "eps": 0.02}


client_optimisers = pytest.mark.parametrize("name", ["sgdm", "rmsprop", "adam"])
statistics_trials = pytest.mark.parametrize(
    "trial",
    [Trial(weights="uniform"), Trial(decay=0.8), Trial(weights="uniform", uneven=True), Trial(uneven=True)],
    ids=trial_name,
)


@client_optimisers
@statistics_trials
def test_fedgbo(name, trial):
    result = trial.run(fb.fedgbo(name, weights=trial.weights, **betas(name)))
    x = trial.p.x0
    s = Stats(name, x, **betas(name))
    for t, cohort in enumerate(trial.cohorts):
        ps, eta, x_new = trial.p.p(cohort, trial.weights), trial.rate(t), np.zeros_like(x)
        for p, i in zip(ps, cohort):
            y = x
            for _ in range(trial.K(i)):
                y = y + s.U(trial.p.grad(y, i), eta)
            x_new += p * y
        a = sum(p * trial.a(i) for p, i in zip(ps, cohort))
        s.T(s.inverse(x, x_new, a, eta))
        x = x_new
    agree(result.x, x, trial)


@client_optimisers
@statistics_trials
def test_mimelite(name, trial):
    result = trial.run(fb.mimelite(name, weights=trial.weights, **betas(name)))
    x = trial.p.x0
    s = Stats(name, x, **betas(name))
    for t, cohort in enumerate(trial.cohorts):
        eta, x_new, full = trial.rate(t), np.zeros_like(x), np.zeros_like(x)
        for p, i in zip(trial.p.p(cohort, trial.weights), cohort):
            y = x
            for _ in range(trial.K(i)):
                y = y + s.U(trial.p.grad(y, i), eta)
            x_new += p * y
            full += p * trial.p.grad(x, i)
        s.T(full)
        x = x_new
    agree(result.x, x, trial)


@client_optimisers
@statistics_trials
def test_mfl(name, trial):
    result = trial.run(fb.mfl(name, weights=trial.weights, **betas(name)))
    x = trial.p.x0
    s = Stats(name, x, **betas(name))
    for t, cohort in enumerate(trial.cohorts):
        x_new, m, v = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
        for p, i in zip(trial.p.p(cohort, trial.weights), cohort):
            mine, y = Stats(name, x, **betas(name)), x
            mine.m, mine.v = s.m, s.v
            for _ in range(trial.K(i)):
                g = trial.p.grad(y, i)
                mine.T(g)
                y = y + mine.step(g, trial.rate(t))
            x_new, m, v = x_new + p * y, m + p * mine.m, v + p * mine.v
        s.m, s.v, x = m, v, x_new
    agree(result.x, x, trial)


@pytest.mark.parametrize("build", [fb.fedgbo, fb.mimelite, fb.mfl])
def test_the_papers_defaults_of_client_side_optimisers(build):
    assert build() == build("sgdm", beta=0.9, weights="uniform")
    assert build("adam") == build("adam", beta1=0.9, beta2=0.99, eps=1e-3, v0=1.0)
    assert build("rmsprop") == build("rmsprop", beta=0.99, eps=1e-3, v0=1.0)
    trial = Trial()
    assert not np.allclose(trial.run(build("rmsprop", v0=0.3)).x, trial.run(build("rmsprop")).x, atol=1e-3)


# Server optimisers ---------------------------------------------------------------------------------------


class Server:
    """Part 2 of ALGORITHMS.md, "Optimise"; `reddi` is the FedOpt form of the same."""

    def __init__(self, name, x, lr, beta1=0.9, beta2=0.999, eps=1e-8, wd=0.0, reddi=False, layerwise=True):
        self.name, self.lr, self.b1, self.b2, self.eps, self.wd = name, lr, beta1, beta2, eps, wd
        self.reddi, self.layers = reddi, LAYERS if layerwise else [slice(None)]
        self.m, self.v, self.T = np.zeros_like(x), np.full_like(x, eps**2 if reddi else 0.0), 0

    def __call__(self, x, G):
        self.T += 1
        if self.wd != 0:
            G = G + self.wd * x
        if self.name == "sgd":
            return x - self.lr * G
        self.m = self.b1 * self.m + (1 - self.b1) * G
        if self.name == "adagrad":
            self.v = self.v + G**2
            top = self.m if self.reddi else G
            return x - self.lr * top / (np.sqrt(self.v) + self.eps)
        if self.name == "adabelief":
            self.v = self.b2 * self.v + (1 - self.b2) * (G - self.m) ** 2
        elif self.name == "yogi":
            self.v = self.v - (1 - self.b2) * G**2 * np.sign(self.v - G**2)
        else:
            self.v = self.b2 * self.v + (1 - self.b2) * G**2
        m, v = self.m, self.v
        if not self.reddi:
            m, v = m / (1 - self.b1**self.T), v / (1 - self.b2**self.T)
        r = m / (np.sqrt(v) + self.eps)
        if self.name != "lamb":
            return x - self.lr * r
        x = x.copy()
        for at in self.layers:
            big, small = np.linalg.norm(x[at]), np.linalg.norm(r[at])
            x[at] = x[at] - self.lr * (big / small if big and small else 1.0) * r[at]
        return x


@pytest.mark.parametrize(
    ("build", "name", "settings", "oracle"),
    [
        (fb.fedadagrad, "adagrad", {}, {"beta1": 0.0, "eps": 1e-3, "reddi": True}),
        (fb.fedadagrad, "adagrad", {"beta1": 0.6, "eps": 0.01}, {"beta1": 0.6, "eps": 0.01, "reddi": True}),
        (fb.fedadam, "adam", {}, {"beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "reddi": True}),
        (fb.fedadam, "adam", {"beta1": 0.5, "beta2": 0.8, "eps": 0.1}, {"beta1": 0.5, "beta2": 0.8, "eps": 0.1, "reddi": True}),
        (fb.fedadam, "adam", {"variant": "corrected"}, {"beta1": 0.9, "beta2": 0.99, "eps": 1e-3}),
        (fb.fedyogi, "yogi", {}, {"beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "reddi": True}),
        (fb.fedyogi, "yogi", {"beta2": 0.6, "variant": "corrected"}, {"beta2": 0.6, "eps": 1e-3}),
        (fb.fedadabelief, "adabelief", {}, {}),
        (fb.fedadabelief, "adabelief", {"beta2": 0.7, "eps": 0.05, "variant": "reddi"}, {"beta2": 0.7, "eps": 0.05, "reddi": True}),
        (fb.fedlamb, "lamb", {}, {}),
        (fb.fedlamb, "lamb", {"layerwise": False, "beta1": 0.7}, {"layerwise": False, "beta1": 0.7}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("trial", [TRIALS[0], TRIALS[1]], ids=trial_name)
def test_adaptive_servers_on_the_mean(build, name, settings, oracle, trial):
    result = trial.run(build(lr=0.05, weights=trial.weights, **settings))
    x = trial.p.x0
    server = Server(name, x, 0.05, **oracle)
    for t, cohort in enumerate(trial.cohorts):
        x = server(x, mean_update(trial, x, t, cohort))
    agree(result.x, x, trial)


@pytest.mark.parametrize("trial", [TRIALS[0], TRIALS[1]], ids=trial_name)
def test_fedadam_with_flowers_correction(trial):
    lr, b1, b2, tau = 0.05, 0.8, 0.95, 0.01
    result = trial.run(fb.fedadam(lr, b1, b2, tau, variant="flower", weights=trial.weights))
    x, m, v = trial.p.x0, 0.0, 0.0
    for t, cohort in enumerate(trial.cohorts):
        G = mean_update(trial, x, t, cohort)
        m, v = b1 * m + (1 - b1) * G, b2 * v + (1 - b2) * G**2
        rate = (
            lr * np.sqrt(1 - b2 ** (t + 2)) / (1 - b1 ** (t + 2))
        )  # rounds count from 1, the exponent is one more
        x = x - rate * m / (np.sqrt(v) + tau)
    agree(result.x, x, trial)


# Memory --------------------------------------------------------------------------------------------------


def memory_update(trial, x, t, cohort, y, weights, normalise="cohort", eta=1.0, store=lambda v: v):
    """One FedVARP combination on Δ/η; y is changed in place. The result is η·r."""
    population_weight = trial.p.p(range(trial.p.N), weights)
    over = trial.p.p(cohort, weights) if normalise == "cohort" else population_weight[list(cohort)]
    g = {i: (x - trial.local(x, i, t)) / eta for i in cohort}
    r = sum(p * (g[i] - y[i]) for p, i in zip(over, cohort)) + sum(
        p * y[j] for j, p in enumerate(population_weight)
    )
    for i in cohort:
        y[i] = store(g[i])
    return eta * r


@every_trial
def test_fedvarp(trial):
    result = trial.run(fb.fedvarp(lr=0.8, weights=trial.weights))
    x, y = trial.p.x0, [np.zeros(27) for _ in range(trial.p.N)]
    for t, cohort in enumerate(trial.cohorts):
        x = x - 0.8 * memory_update(trial, x, t, cohort, y, trial.weights)
    agree(result.x, x, trial)


@every_trial
def test_mifa(trial):
    result = trial.run(fb.mifa(lr=0.8, weights=trial.weights))
    x, y = trial.p.x0, {}
    for t, cohort in enumerate(trial.cohorts):
        y.update({i: x - trial.local(x, i, t) for i in cohort})
        x = x - 0.8 * sum(p * y[j] for p, j in zip(trial.p.p(list(y), trial.weights), y))
    agree(result.x, x, trial)


@pytest.mark.parametrize("clusters", [3, (0, 1, 1, 0, 2, 2, 2, 1)])
@every_trial
def test_cluster_fedvarp(clusters, trial):
    result = trial.run(fb.cluster_fedvarp(clusters, lr=0.8, weights=trial.weights))
    of = [i % 3 for i in range(trial.p.N)] if clusters == 3 else clusters
    x, y = trial.p.x0, [np.zeros(27) for _ in range(3)]
    population_weight = trial.p.p(range(trial.p.N), trial.weights)
    for t, cohort in enumerate(trial.cohorts):
        delta = {i: x - trial.local(x, i, t) for i in cohort}
        r = sum(p * (delta[i] - y[of[i]]) for p, i in zip(trial.p.p(cohort, trial.weights), cohort))
        r = r + sum(p * y[of[j]] for j, p in enumerate(population_weight))
        for c in {of[i] for i in cohort}:
            y[c] = np.mean([delta[i] for i in cohort if of[i] == c], axis=0)
        x = x - 0.8 * r
    agree(result.x, x, trial)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", ["adagrad", "adam", "adabelief", "yogi", "lamb", "sgd"])
def test_fedadavr(name, memory):
    trial = Trial(
        weights="uniform" if memory == "int8" else "samples", decay=0.9, rho=0.5 if memory == "fp16" else 0.0
    )
    lr = 0.8 if name == "sgd" else 0.05
    result = trial.run(fb.fedadavr(name, lr=lr, memory=memory, weights=trial.weights))
    x, y = trial.p.x0, [np.zeros(27) for _ in range(trial.p.N)]
    server = Server(name, x, lr)
    for t, cohort in enumerate(trial.cohorts):
        G = memory_update(trial, x, t, cohort, y, trial.weights, eta=trial.rate(t), store=MEMORY[memory])
        x = server(x, G)
    agree(result.x, x, trial)


@pytest.mark.parametrize(
    ("name", "settings", "oracle"),
    [
        ("adam", {"beta1": 0.5, "beta2": 0.7, "eps": 0.01, "weight_decay": 0.1}, {"beta1": 0.5, "beta2": 0.7, "eps": 0.01, "wd": 0.1}),
        ("lamb", {"layerwise": False, "weight_decay": 0.3}, {"layerwise": False, "wd": 0.3}),
        ("adagrad", {"eps": 0.02}, {"eps": 0.02}),
        ("yogi", {"beta2": 0.5}, {"beta2": 0.5}),
        ("sgd", {"weight_decay": 0.5}, {"wd": 0.5}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("normalise", ["cohort", "population"])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_fedadavr_options(name, settings, oracle, normalise, weights):
    trial = Trial(weights=weights, uneven=True)
    result = trial.run(fb.fedadavr(name, lr=0.05, normalise=normalise, weights=weights, **settings))
    x, y = trial.p.x0, [np.zeros(27) for _ in range(trial.p.N)]
    server = Server(name, x, 0.05, **oracle)
    for t, cohort in enumerate(trial.cohorts):
        x = server(x, memory_update(trial, x, t, cohort, y, weights, normalise, eta=trial.rate(t)))
    agree(result.x, x, trial)


# Thin links ------------------------------------------------------------------------------------------------

QUANTISERS = {
    "int8": (fb.codecs.int8(), lambda v: symmetric(v, 127, MATRICES)),
    "int4": (fb.codecs.int4(), lambda v: symmetric(v, 7, MATRICES)),
    "uniform5": (fb.codecs.uniform(5), lambda v: uniform(v, 5)),
    "fp16": (fb.codecs.fp16(), lambda v: np.concatenate([
        v[at].astype(np.float16) if at in MATRICES else v[at] for at in LAYERS
    ])),
    "topk": (fb.codecs.topk(0.3), lambda v: topk(v, 0.3)),
}  # fmt: skip


@pytest.mark.parametrize("codec", QUANTISERS)
@pytest.mark.parametrize("trial", TRIALS[:2], ids=trial_name)
def test_fedpaq(codec, trial):
    lib, Q = QUANTISERS[codec]
    result = trial.run(fb.fedpaq(lib, lr=0.9, weights=trial.weights))
    x = trial.p.x0
    for t, cohort in enumerate(trial.cohorts):
        x = x - 0.9 * sum(
            p * Q(x - trial.local(x, i, t)) for p, i in zip(trial.p.p(cohort, trial.weights), cohort)
        )
    agree(result.x, x, trial)


@pytest.mark.parametrize("codec", QUANTISERS)
@pytest.mark.parametrize("trial", TRIALS[:2], ids=trial_name)
def test_fedef(codec, trial):
    lib, Q = QUANTISERS[codec]
    result = trial.run(fb.fedef(lib, lr=0.9, weights=trial.weights))
    x, e = trial.p.x0, [np.zeros(27) for _ in range(trial.p.N)]
    for t, cohort in enumerate(trial.cohorts):
        G = np.zeros_like(x)
        for p, i in zip(trial.p.p(cohort, trial.weights), cohort):
            u = x - trial.local(x, i, t) + e[i]
            e[i] = u - Q(u)
            G += p * Q(u)
        x = x - 0.9 * G
    agree(result.x, x, trial)


def test_error_feedback_keeps_a_residual_for_every_vector_that_is_encoded():
    trial, Q = Trial(), QUANTISERS["topk"][1]
    result = trial.run(fb.error_feedback(fb.with_codecs(fb.scaffold(), up=fb.codecs.topk(0.3))))
    N, x = trial.p.N, trial.p.x0
    zero = np.zeros_like(x)
    c, c_i, e, ec = zero, [zero] * N, [zero] * N, [zero] * N
    for t, cohort in enumerate(trial.cohorts):
        G, dc = np.zeros_like(x), np.zeros_like(x)
        for p, i in zip(trial.p.p(cohort, "samples"), cohort):
            y = trial.local(x, i, t, lambda g, y: g - c_i[i] + c)  # noqa: B023
            u, uc = x - y + e[i], -c + (x - y) / (3 * trial.rate(t)) + ec[i]
            e[i], ec[i], c_i[i] = u - Q(u), uc - Q(uc), c_i[i] + Q(uc)
            G, dc = G + p * Q(u), dc + Q(uc) / len(cohort)
        x, c = x - G, c + len(cohort) / N * dc
    agree(result.x, x, trial)


def test_a_codec_of_some_names_leaves_the_others_exact():
    trial, Q = Trial(), QUANTISERS["topk"][1]
    coded = fb.with_codecs(fb.scaffold(), up=fb.codecs.topk(0.3), only=("delta",))
    result, both = (trial.run(a) for a in (coded, fb.with_codecs(fb.scaffold(), up=fb.codecs.topk(0.3))))
    N, x = trial.p.N, trial.p.x0
    c, c_i = np.zeros_like(x), [np.zeros_like(x)] * N
    for t, cohort in enumerate(trial.cohorts):
        G, dc = np.zeros_like(x), np.zeros_like(x)
        for p, i in zip(trial.p.p(cohort, "samples"), cohort):
            y = trial.local(x, i, t, lambda g, y: g - c_i[i] + c)  # noqa: B023
            up = (x - y) / (3 * trial.rate(t)) - c
            c_i[i], G, dc = c_i[i] + up, G + p * Q(x - y), dc + up / len(cohort)
        x, c = x - G, c + len(cohort) / N * dc
    agree(result.x, x, trial)
    assert sum(r["bytes_up"] for r in result.history) > sum(r["bytes_up"] for r in both.history)
    with pytest.raises(fb.FedbraidError, match="only="):
        fb.with_codecs(fb.fedavg(), up=fb.codecs.int4(), only=("control",))
    with pytest.raises(fb.FedbraidError, match="give up="):
        fb.with_codecs(fb.fedavg(), only=("delta",))


def test_a_codec_of_weights_quantises_what_the_client_ended_with():
    trial = Trial(rho=0.5)
    result = trial.run(fb.with_codecs(fb.fedavg(), up=fb.codecs.of_weights(fb.codecs.uniform(5))))
    x = trial.p.x0
    for t, cohort in enumerate(trial.cohorts):
        x = sum(p * uniform(trial.local(x, i, t), 5) for p, i in zip(trial.p.p(cohort, "samples"), cohort))
    agree(result.x, x, trial)


@pytest.mark.parametrize("codec", ["int8", "uniform5", "topk"])
def test_direct_quantisation_of_the_model_sent_down(codec):
    trial, (lib, Q) = Trial(), QUANTISERS[codec]
    result = trial.run(fb.with_codecs(fb.fedavg(), down=lib))
    x = trial.p.x0
    for t, cohort in enumerate(trial.cohorts):
        start = Q(x)
        x = x - sum(
            p * (start - trial.local(start, i, t)) for p, i in zip(trial.p.p(cohort, "samples"), cohort)
        )
    agree(result.x, x, trial)


@pytest.mark.parametrize("codec", ["int4", "uniform5", "topk"])
def test_hidden_state(codec):
    trial, (lib, Q) = Trial(), QUANTISERS[codec]
    result = trial.run(fb.hidden_state(fb.with_codecs(fb.fedavgm(momentum=0.5), down=lib)))
    x = hidden = trial.p.x0
    b = 0.0
    for t, cohort in enumerate(trial.cohorts):
        b = 0.5 * b + sum(
            p * (hidden - trial.local(hidden, i, t)) for p, i in zip(trial.p.p(cohort, "samples"), cohort)
        )
        x = x - b
        q = Q(x - hidden)
        error = np.sum((x - hidden - q) ** 2) / np.sum((x - hidden) ** 2)
        assert result.history[t]["contraction"] == pytest.approx(error, rel=1e-3, abs=1e-6)
        hidden = hidden + q
    agree(result.x, x, trial)
    agree(result.state.sent[trial.steps].vectors["x"], hidden, trial)


def test_a_hidden_state_also_carries_what_else_is_sent_down():
    trial, Q = Trial(), QUANTISERS["int4"][1]
    result = trial.run(fb.hidden_state(fb.with_codecs(fb.scaffold(), down=fb.codecs.int4())))
    N, x = trial.p.N, trial.p.x0
    zero = np.zeros_like(x)
    c, c_i, x_hat, c_hat = zero, [zero] * N, x, zero
    for t, cohort in enumerate(trial.cohorts):
        G, dc = np.zeros_like(x), np.zeros_like(x)
        for p, i in zip(trial.p.p(cohort, "samples"), cohort):
            y = trial.local(x_hat, i, t, lambda g, y: g - c_i[i] + c_hat)  # noqa: B023
            new = c_i[i] - c_hat + (x_hat - y) / (3 * trial.rate(t))
            G, dc, c_i[i] = G + p * (x_hat - y), dc + (new - c_i[i]) / len(cohort), new
        x, c = x - G, c + len(cohort) / N * dc
        x_hat, c_hat = x_hat + Q(x - x_hat), c_hat + Q(c - c_hat)
    agree(result.x, x, trial)


# Mixed precision -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["fedavg", "fedadam", "scaffold"])
def test_fedshift(base):
    trial, inferior = Trial(), (0, 2, 3, 6)
    up = fb.codecs.mixed(fb.codecs.of_weights(fb.codecs.uniform(4)), clients=inferior)
    algorithm = {"fedavg": fb.fedavg(), "fedadam": fb.fedadam(lr=0.05), "scaffold": fb.scaffold()}[base]
    result = trial.run(fb.fedshift(fb.with_codecs(algorithm, up=up)))
    N, x = trial.p.N, trial.p.x0
    c, c_i = np.zeros_like(x), [np.zeros_like(x)] * N
    server = Server("adam", x, 0.05, beta2=0.99, eps=1e-3, reddi=True)
    for t, cohort in enumerate(trial.cohorts):
        average, dc = np.zeros_like(x), np.zeros_like(x)
        for p, i in zip(trial.p.p(cohort, "samples"), cohort):
            y = trial.local(x, i, t, (lambda g, y: g - c_i[i] + c) if base == "scaffold" else None)  # noqa: B023
            change = -c + (x - y) / (3 * trial.rate(t))
            change = (
                uniform(change, 4) if i in inferior else change
            )  # what was received is what is remembered
            c_i[i] = c_i[i] + change
            average += p * (uniform(y, 4) if i in inferior else y)
            dc += change / len(cohort)
        c = c + len(cohort) / N * dc
        x = server(x, x - average) if base == "fedadam" else average
        share = sum(i in inferior for i in cohort) / len(cohort)
        for at in MATRICES:
            x[at] = x[at] - share * x[at].mean()
    assert any(0 < sum(i in inferior for i in cohort) < len(cohort) for cohort in trial.cohorts)
    agree(result.x, x, trial)


def test_stochastic_codecs_are_given_the_update_and_the_servers_sum_is_of_what_came_out():
    trial, up = Trial(), Recorded(fb.codecs.qsgd(4))
    result = trial.run(fb.fedpaq(up))
    x = trial.p.x0
    for t, cohort in enumerate(trial.cohorts):
        x = x - sum(p * up.of(x - trial.local(x, i, t)) for p, i in zip(trial.p.p(cohort, "samples"), cohort))
    assert sum(given.any() for given, _ in up.seen) == sum(map(len, trial.cohorts))
    agree(result.x, x, trial)
