"""Do personal parts and models of clients' own do what their papers say, and never travel?"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import TRIALS, VMAP, Problem, Trial, trial_name
from torch import nn
from typer.testing import CliRunner

import fedbraid as fb
from fedbraid.cli import app

every_trial = pytest.mark.parametrize("trial", TRIALS, ids=trial_name)
HEAD, BODY = slice(15, 27), slice(0, 15)  # of the oracle's vector


def task_of(p: Problem, **options) -> fb.Task:
    return fb.Task.from_arrays(p.task.module(), clients=p.data, test=p.test, **options)


def simulate(trial: Trial, algorithm: fb.Algorithm, task: fb.Task, work: fb.Work | None = None, **options):
    options = {"engine": VMAP, "evaluate_every": None, "seed": trial.seed} | options
    return fb.simulate(
        task, algorithm, work or trial.work, fb.rounds(trial.steps, clients=trial.cohort), **options
    )


def vector(module: nn.Module) -> np.ndarray:
    return fb.Layout.of(module).flatten(module).double().numpy()


# Transcriptions ------------------------------------------------------------------------------------------


def fedper(trial: Trial, cohorts, own: slice, head: float | None = None):
    """FedAvg on what is not `own`; every client keeps that. With `head`, FedRep: own first, then the rest."""
    p = trial.p
    x, z = p.x0.copy(), {i: p.x0[own].copy() for i in range(p.N)}
    shared = np.ones(len(x), bool)
    shared[own] = False
    for t, cohort in enumerate(cohorts):
        move = np.zeros_like(x)
        for weight, i in zip(p.p(cohort, trial.weights), cohort):
            y, b, K = x.copy(), np.zeros_like(x), trial.K(i)
            y[own] = z[i]
            first = None if head is None else min(max(1, round(head * K)), K - 1)
            for k in range(K):
                b = trial.rho * b + p.grad(y, i)
                if first is None:
                    y = y - trial.rate(t) * b
                else:
                    at = ~shared if k < first else shared
                    b[~at] = 0
                    y[at] -= trial.rate(t) * b[at]
            z[i] = y[own]
            move += weight * (x - y)
        x[shared] -= move[shared]
    return x[shared], z


@every_trial
@pytest.mark.parametrize(("glob", "own"), [("2.*", HEAD), ("0.*", BODY)], ids=["FedPer", "LG-FedAvg"])
def test_layers_that_stay_with_their_client(trial, glob, own):
    result = simulate(trial, fb.fedavg(weights=trial.weights), task_of(trial.p, personal=(glob,)))
    x, z = fedper(trial, [r["clients"] for r in result.history], own)
    np.testing.assert_allclose(result.x, x, atol=2e-6)
    for i, mine in z.items():
        np.testing.assert_allclose(vector(result.model(i))[own], mine, atol=2e-6)
    assert np.abs(z[0] - trial.p.x0[own]).max() > 0.01 or not any(0 in r["clients"] for r in result.history)


@every_trial
def test_fedrep_trains_the_head_and_then_the_body(trial):
    work = trial.work if not trial.uneven else replace(trial.work, epochs=2)
    twice = replace(trial)
    twice.K = lambda i: (2 if trial.uneven else 1) * trial.K(i)  # type: ignore[method-assign]
    result = simulate(
        trial, fb.fedrep(head=0.6, weights=trial.weights), task_of(trial.p, personal="2.*"), work
    )
    x, z = fedper(twice, [r["clients"] for r in result.history], HEAD, 0.6)
    np.testing.assert_allclose(result.x, x, atol=2e-6)
    for i, mine in z.items():
        np.testing.assert_allclose(vector(result.model(i))[HEAD], mine, atol=2e-6)


@every_trial
def test_ditto(trial):
    result = simulate(trial, fb.ditto(lam=0.7, lr=0.8, weights=trial.weights), trial.p.task)
    p, x = trial.p, trial.p.x0.copy()
    v = {i: x.copy() for i in range(p.N)}
    for t, record in enumerate(result.history):
        cohort, eta = record["clients"], trial.rate(t)
        for i in cohort:
            for _ in range(trial.K(i)):
                v[i] = v[i] - eta * (p.grad(v[i], i) + 0.7 * (v[i] - x))
        x = x - 0.8 * sum(w * (x - trial.local(x, i, t)) for w, i in zip(p.p(cohort, trial.weights), cohort))
    np.testing.assert_allclose(result.x, x, atol=2e-6)
    for i, mine in v.items():
        np.testing.assert_allclose(vector(result.model(i)), mine, atol=2e-6)


@every_trial
def test_pfedme(trial):
    result = simulate(
        trial, fb.pfedme(lam=3.0, steps=4, rate=0.1, lr=0.7, weights=trial.weights), trial.p.task
    )
    p, x = trial.p, trial.p.x0.copy()
    own = {i: x.copy() for i in range(p.N)}
    for t, record in enumerate(result.history):
        cohort, move = record["clients"], np.zeros_like(x)
        for weight, i in zip(p.p(cohort, trial.weights), cohort):
            y, b = x.copy(), np.zeros_like(x)
            for _ in range(trial.K(i)):
                theta = y.copy()
                for _ in range(4):
                    theta = theta - 0.1 * (p.grad(theta, i) + 3.0 * (theta - y))
                b = trial.rho * b + 3.0 * (y - theta)
                y, own[i] = y - trial.rate(t) * b, theta
            move += weight * (x - y)
        x = x - 0.7 * move
    np.testing.assert_allclose(result.x, x, atol=2e-6)
    for i, mine in own.items():
        np.testing.assert_allclose(vector(result.model(i)), mine, atol=2e-6)


# What they share with everything else --------------------------------------------------------------------

WORK = fb.Work(lr=0.2, epochs=2, batch=3, momentum=0.5, weight_decay=0.01, clip=2.0)
ASYNC = fb.buffered(6, buffer=3, concurrency=5, arrivals="closed")
MIXED = {
    "fedavg": fb.fedavg(),
    "fedrep": fb.fedrep(),
    "ditto": fb.ditto(),
    "pfedme": fb.pfedme(lam=2.0, rate=0.1),
    "scaffold": fb.scaffold(),
    "mimelite": fb.mimelite("adam", eps=0.05),
    "fedadavr": fb.fedadavr("sgd", lr=1.0),
    "adabest int8": fb.error_feedback(
        fb.with_codecs(fb.adabest(), up=fb.codecs.int8(), down=fb.codecs.fp16())
    ),
}


def rows(result: fb.Result) -> torch.Tensor:
    every = [result.task.full_layout.flatten(result.model(i)) for i in range(result.task.clients)]
    return torch.stack(every)


@pytest.mark.parametrize("schedule", [fb.rounds(4, clients=5), ASYNC], ids=["rounds", "buffered"])
@pytest.mark.parametrize("name", MIXED)
def test_every_engine_and_block_gives_the_same(name, schedule):
    task = task_of(Problem(), personal=("2.*",))
    engines = [
        fb.engines.in_process(block=1, backend="loop"),
        fb.engines.in_process(block=64, backend="vmap"),
        fb.engines.in_process(backend="native"),
        fb.engines.pool(workers=2, backend="loop"),
    ]
    first, *others = (
        fb.simulate(task, MIXED[name], WORK, schedule, seed=3, engine=engine, evaluate_every=None)
        for engine in engines
    )
    assert float((rows(first)[:, 15:] - task.vector(3)[15:]).abs().max()) > 0.01
    for other in others:
        np.testing.assert_allclose(other.x, first.x, atol=1e-5)
        np.testing.assert_allclose(rows(other), rows(first), atol=1e-5)


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "ditto", "scaffold"])
@pytest.mark.parametrize("store", ["memory", "disk"])
def test_they_are_committed_with_the_run(name, store, tmp_path):
    task, schedule = task_of(Problem(), personal=("2.*",)), fb.rounds(6, clients=3)
    options = {"seed": 2, "engine": VMAP, "client_state_storage": store}
    once = fb.simulate(task, MIXED[name], WORK, schedule, **options)

    class Stop:
        def step(self, record, run):
            if record["step"] == 3 and not (tmp_path / "stopped").exists():
                (tmp_path / "stopped").touch()
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fb.simulate(task, MIXED[name], WORK, schedule, **options, out=tmp_path / "run", callbacks=[Stop()])
    again = fb.resume(tmp_path / "run", task=task)
    assert torch.equal(again.x, once.x)
    assert again.history == once.history
    finished = fb.resume(tmp_path / "run", task=task)
    if store == "memory":
        assert torch.equal(rows(finished), rows(once))
    assert torch.equal(rows(finished), rows(again))


def test_they_never_travel():
    whole, some = task_of(Problem()), task_of(Problem(), personal=("2.*",))
    assert (whole.layout.size, some.layout.size, some.full_layout.size) == (27, 15, 27)
    runs = [fb.simulate(t, fb.scaffold(), WORK, fb.rounds(2, clients=3), engine=VMAP) for t in (whole, some)]
    for key in ("bytes_up", "bytes_down"):
        a, b = (r.history[-1][key] for r in runs)
        assert a - b == 3 * 2 * 4 * 12  # three clients, two vectors, four bytes, twelve numbers
    assert set(runs[1].state.server[0].__dict__["total"].shape) == {15}
    from fedbraid.core.client_table import ClientTable

    assert isinstance(runs[1].state.clients, ClientTable)
    assert len(runs[1].x) == 15


def test_each_client_is_judged_with_its_own_parts():
    p = Problem()
    shares = [(p.data[i][0][:2], p.data[i][1][:2]) if i != 4 else None for i in range(p.N)]
    exact = lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()  # noqa: E731
    task = fb.Task.from_arrays(
        p.task.module(), p.data, client_tests=shares, personal=("2.*",), metrics={"exact": exact}
    )
    result = fb.simulate(task, fb.fedavg(), WORK, fb.rounds(3, clients=4), evaluate_on="clients", engine=VMAP)
    right = []
    for i, share in enumerate(shares):
        if share is not None:
            x, y = (torch.as_tensor(v) for v in share)
            right.append((result.model(i)(x).argmax(1) == y).float().mean().item())
    last = result.history[-1]
    assert last["accuracy"] == pytest.approx(np.mean(right))
    assert last["accuracy_clients"] == last["exact_clients"] == pytest.approx(np.mean(right))
    assert last["exact_worst_tenth"] == pytest.approx(min(right))


def test_a_common_test_set_is_dealt_among_them():
    p = Problem()
    result = fb.simulate(task_of(p, personal="2.*"), fb.fedavg(), WORK, fb.rounds(3, clients=4), engine=VMAP)
    right = [
        int(result.model(row % p.N)(torch.as_tensor(x)).argmax()) == y
        for row, (x, y) in enumerate(zip(*p.test))
    ]
    assert result.last("accuracy") == pytest.approx(np.mean(right))


def test_models_of_their_own_are_judged_beside_the_common_one():
    p = Problem()
    result = fb.simulate(p.task, fb.ditto(lam=0.5), WORK, fb.rounds(3, clients=4), engine=VMAP)
    x, y = (torch.as_tensor(v) for v in p.test)
    common = (result.model()(x).argmax(1) == y).double().mean().item()
    own = [int(result.model(row % p.N)(x[row]).argmax() == y[row]) for row in range(len(y))]
    assert (result.last("accuracy"), result.last("accuracy_personal")) == pytest.approx(
        (common, np.mean(own))
    )
    assert result.last("loss_personal") != result.last("loss")


# FedBN ---------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.bn, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.relu(self.bn(self.body(x))))


def test_fedbn_keeps_norms_and_their_statistics():
    p = Problem()
    task = fb.Task.from_arrays(Normed, p.data, p.test, buffers="personal")
    assert task.layout.names == ("body.weight", "body.bias", "head.weight", "head.bias")
    assert {s.name for s in task.full_layout if s.personal} == {
        "bn.weight",
        "bn.bias",
        "bn.running_mean",
        "bn.running_var",
    }
    result = fb.simulate(task, fb.fedavg(), fb.Work(lr=0.1, batch=3), fb.rounds(1, clients=[[2, 6]]), seed=1)
    means = [result.model(i).bn.running_mean for i in range(p.N)]
    assert not torch.equal(means[2], means[6])
    assert float(means[0].abs().max()) == 0

    alone = task.full_layout.load(task.module(), task.vector(1)).train()  # client 2 by hand
    from fedbraid.data.batches import DrawnBatches

    plan = DrawnBatches(task, fb.Work(lr=0.1, batch=3), np.array([2]), 0, 1)
    for k in range(int(plan.K[0])):
        x, y = plan.batch(k).first_client()
        alone.zero_grad()
        nn.functional.cross_entropy(alone(x), y).backward()
        with torch.no_grad():
            for w in alone.parameters():
                w -= 0.1 * w.grad
    mine = result.model(2)
    for name in ("weight", "bias", "running_mean", "running_var"):
        np.testing.assert_allclose(
            getattr(mine.bn, name).detach(), getattr(alone.bn, name).detach(), atol=1e-6
        )


def test_a_norm_may_be_personal_by_name_and_others_averaged():
    class Two(Normed):
        def __init__(self):
            super().__init__()
            self.last = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.last(super().forward(x))

    p = Problem()
    task = fb.Task.from_arrays(Two, p.data, p.test, buffers="average", personal=("bn.*",))
    assert "last.running_mean" in task.layout.names
    assert "bn.running_mean" not in task.layout.names
    assert task.full_layout.buffers is not None
    spans = [s for s in task.full_layout if s.buffer]
    assert (spans[0].offset, spans[-1].end) == (task.full_layout.buffers.start, task.full_layout.buffers.stop)
    result = fb.simulate(task, fb.fedadam(), fb.Work(lr=0.1, batch=2, last="drop"), fb.rounds(2, clients=3))
    assert float(result.model().last.running_mean.abs().max()) > 0
    same = fb.Task.from_arrays(Normed, p.data, p.test, personal=("bn.*",))
    bn = fb.Task.from_arrays(Normed, p.data, p.test, buffers="personal")
    runs = [
        fb.simulate(t, fb.fedavg(), fb.Work(lr=0.1, batch=2, last="drop"), fb.rounds(2, clients=3))
        for t in (same, bn)
    ]
    assert torch.equal(runs[0].x, runs[1].x)


# Refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"personal": ("heads.*",)}, "matches no trained parameter; the model has 0.weight"),
        ({"personal": ("*",)}, "nothing would travel"),
        ({"personal": (3,)}, "give globs"),
        ({"buffers": "mine"}, "'average' or 'personal'"),
    ],
)
def test_what_names_no_parts_is_refused(options, said):
    with pytest.raises(fb.FedbraidError, match=said):
        task_of(Problem(), **options)


@pytest.mark.parametrize(
    ("options", "work", "said"),
    [
        ({}, WORK, "the task has none"),
        ({"personal": "2.*"}, fb.Work(optimizer="adam", steps=4), "use optimizer='sgd'"),
        ({"personal": "2.*"}, fb.Work(steps=1), "two phases need two"),
    ],
)
def test_fedrep_says_what_it_needs(options, work, said):
    with pytest.raises(fb.FedbraidError, match=said):
        fb.simulate(task_of(Problem(), **options), fb.fedrep(), work, fb.rounds(1))
    with pytest.raises(fb.FedbraidError, match=r"head must be in \(0, 1\)"):
        fb.fedrep(head=1.0)


def test_a_client_that_is_not_there_has_no_model():
    result = fb.simulate(task_of(Problem(), personal="2.*"), fb.fedavg(), WORK, fb.rounds(1, clients=2))
    with pytest.raises(fb.FedbraidError, match="no client 8"):
        result.model(8)


# Training alone ------------------------------------------------------------------------------------------


@every_trial
def test_alone_is_each_clients_own_training(trial):
    result = simulate(trial, fb.local_only(), trial.p.task)
    own = {i: trial.p.x0.copy() for i in range(trial.p.N)}
    for t, record in enumerate(result.history):
        for i in record["clients"]:
            own[i] = trial.local(own[i], i, t)
        assert (record["bytes_up"], record["bytes_down"]) == (0, 0)
    np.testing.assert_allclose(result.x, trial.p.x0, atol=1e-7)
    for i, mine in own.items():
        np.testing.assert_allclose(vector(result.model(i)), mine, atol=2e-6)


def shared_out() -> fb.Task:
    p = Problem()
    shares = [(x[: 1 + i % 3], y[: 1 + i % 3]) for i, (x, y) in enumerate(p.data)]
    return fb.Task.from_arrays(
        p.task.module(),
        p.data,
        client_tests=shares,
        metrics={"mae": lambda o, t: (o.argmax(1) - t).abs().float().mean()},
    )


def test_a_table_by_client():
    task = shared_out()
    for algorithm in (fb.fedavg(), fb.ditto(), fb.local_only()):
        result = fb.simulate(
            task, algorithm, WORK, fb.rounds(3, clients=4), engine=VMAP, evaluate_on="clients"
        )
        rows = result.per_client()
        assert [r["client"] for r in rows] == list(range(8))
        assert [r["samples"] for r in rows] == task.sizes.tolist()
        key = "accuracy_clients_personal" if "ditto" in algorithm.name else "accuracy_clients"
        assert np.mean([r["accuracy"] for r in rows]) == pytest.approx(result.last(key))
        for row in rows:
            x, y = (
                t[task.test_offsets[row["client"]] : task.test_offsets[row["client"] + 1]] for t in task.test
            )
            outputs = result.model(row["client"])(x).detach()
            assert row["loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs, y)), abs=1e-5)
            assert row["mae"] == pytest.approx(float((outputs.argmax(1) - y).abs().float().mean()))
    with pytest.raises(fb.FedbraidError, match="needs local test sets; give test_fraction="):
        fb.simulate(Problem().task, fb.fedavg(), WORK, fb.rounds(1, clients=2)).per_client()


@pytest.mark.parametrize("metric", ["accuracy", "mae"])
def test_what_clients_gain_over_training_alone(tmp_path, metric):
    task, schedule = shared_out(), fb.rounds(4, clients=4)
    found = fb.compare(
        task,
        {"ditto": fb.ditto()},
        WORK,
        schedule,
        seeds=2,
        out=tmp_path / "duel",
        local=True,
        jobs=1,
        metric=metric,
    )
    tables = {
        a.name: [
            [
                r[metric]
                for r in fb.simulate(
                    task, a, WORK, schedule, seed=s, engine="in_process(threads=1)"
                ).per_client()
            ]
            for s in (0, 1)
        ]
        for a in (fb.ditto(), fb.local_only())
    }
    mine, lone = (np.array(tables[name]) for name in ("ditto()", "local_only()"))
    gain = (lone - mine if metric == "mae" else mine - lone).ravel()
    row, base = found.gains
    assert (row["name"], base["name"]) == ("ditto", "local_only")
    assert row["mean"] == pytest.approx(mine.mean())
    assert (row["gain"], row["gain_worst"]) == pytest.approx((gain.mean(), gain.min()))
    assert row["better_off"] == pytest.approx((gain > 0).mean())
    assert base["gain"] == 0
    assert (base["worst_tenth"]) == pytest.approx((lone.max(1) if metric == "mae" else lone.min(1)).mean())
    with pytest.raises(fb.FedbraidError, match="need local test sets"):
        fb.compare(Problem().task, {"a": fb.fedavg()}, WORK, schedule, out=tmp_path / "none", local=True)


def test_gains_and_patience_from_the_shell(tmp_path, monkeypatch):
    import json

    from typer.testing import CliRunner

    from fedbraid.cli import app

    monkeypatch.chdir(tmp_path)
    words = ["--clients", "6", "--partition", "label_chunks(2)", "--rounds", "3", "--per-round", "3"]
    (tmp_path / "mine.py").write_text(
        "import fedbraid as fb\n"
        "import torch\n"
        "digits = fb.tasks.load('digits', clients=6, partition='label_chunks(2)', test_shares=True)\n"
        "f = lambda outputs, targets: 1.0\n"
        "task = fb.Task.from_table(digits.build, digits.inputs, digits.targets, digits.rows, digits.offsets,\n"
        "    test=digits.test, test_offsets=digits.test_offsets, metrics={'steady': f})\n"
    )
    done = CliRunner().invoke(
        app,
        [
            "compare",
            "mine.py:task",
            "fedavg",
            "--local-only",
            "--seeds",
            "1",
            "--jobs",
            "1",
            *words[4:],
            "--json",
        ],
    )
    assert done.exit_code == 0, done.output
    assert [g["name"] for g in json.loads(done.output)["gains"]] == ["fedavg", "local_only"]
    run = ["run", "mine.py:task", "fedavg", "--rounds", "9", "--per-round", "2", "--out", "it", "--json"]
    done = CliRunner().invoke(app, [*run, "--patience", "2", "--metric", "steady"])
    assert done.exit_code == 0, done.output
    assert len((tmp_path / "it" / "metrics.jsonl").read_text().splitlines()) == 3  # it never gets better
    assert json.loads((tmp_path / "it" / "watching.json").read_text())["metric"] == "steady"
    done = CliRunner().invoke(app, ["run", "mine.py:task", "fedavg", "--patience", "2", "--metric", "stedy"])
    assert "did you mean 'steady'" in str(done.exception)


@every_trial
def test_fedper_is_fedavg_over_the_shared_layers(trial):
    cohorts = [[0, 2, 5], [1, 2], [3, 4, 0]]
    task = task_of(trial.p, personal="2.*")
    fedper, fedavg = (
        fb.simulate(task, a, fb.Work(lr=0.1, batch=4), fb.rounds(3, cohorts), evaluate_every=None)
        for a in (fb.fedper(weights=trial.weights), fb.fedavg(weights=trial.weights))
    )
    assert torch.equal(fedper.x, fedavg.x)
    assert torch.equal(rows(fedper), rows(fedavg))


def test_personal_parameters_of_a_named_task_are_written_down_and_read_again():
    from fedbraid.data import tasks

    task = tasks.load("digits", 8, personal="3.*")
    assert task.spec.endswith("personal=('3.*',))")
    assert tasks.reload(task.spec).fingerprint == task.fingerprint
    assert task.layout.size < task.full_layout.size


def test_personal_layers_from_the_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--rounds", "2", "--per-round", "4", "--clients", "8", "-o", "here", "--json"]
    done = CliRunner().invoke(app, ["run", "digits", "fedper", "--personal", "3.*", *words])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["task"].endswith("personal=('3.*',))")
    refused = CliRunner().invoke(app, ["run", "digits", "fedper", *words[:-3]])
    assert refused.exit_code != 0
    assert "--personal 'head.*'" in str(refused.exception)
    listed = CliRunner().invoke(app, ["list", "algorithms"]).output
    assert "fedper" in listed
    assert "local_only" in listed
