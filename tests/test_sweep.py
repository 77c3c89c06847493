"""Does a sweep find what it should on held-out clients, stop the hopeless, and survive being killed?"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import fedbraid as fb
from fedbraid.cli import main
from fedbraid.study.campaign import Entry
from fedbraid.study.sweep import Categorical, FloatRange, SweepConfig, hold_out, integer, log, sweep, uniform

needs_optuna = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("optuna"), reason="optuna (extra sweep) is not installed"
)
FAST = ["--clients", "30", "--per-round", "5", "--rounds", "10"]


@pytest.fixture(scope="module")
def task():
    return fb.tasks.load("digits", clients=30)


def trial(settings, steps=10):
    return Entry("t", fb.fedavg(), fb.Work(lr=settings["lr"], batch=5), fb.rounds(steps, clients=5))


# Held-out clients ---------------------------------------------------------------------------------


def test_held_out_clients_do_not_train(task):
    tuning = hold_out(task, 0.2)
    assert tuning.clients == 24
    trained, judged = set(tuning.rows.tolist()), len(tuning.test[0])
    assert len(trained) + judged == len(task.rows)
    assert trained < set(task.rows.tolist())
    rest = sorted(set(task.rows.tolist()) - trained)
    assert np.array_equal(np.sort(tuning.test[1].numpy()), np.sort(task.targets[rest].numpy()))
    assert (tuning.test[0][:5, None] != task.test[0]).flatten(2).any(2).all()  # none of them is a test sample


@pytest.mark.parametrize("share", [0, 1, 1.5, 0.99])
def test_somebody_must_train(task, share):
    with pytest.raises(fb.FedbraidError):
        hold_out(task, share)


# Spaces -------------------------------------------------------------------------------------------


def test_grids():
    assert log(0.01, 1, 3).grid() == (0.01, 0.1, 1.0)
    assert uniform(0, 1, 5).grid() == (0, 0.25, 0.5, 0.75, 1)
    assert integer(1, 3, 9).grid() == (1, 2, 3)
    for bad in (
        lambda: FloatRange(1, 0),
        lambda: log(0, 1),
        lambda: Categorical(()),
        lambda: uniform(0, 1, 0),
    ):
        with pytest.raises(fb.errors.ConfigError):
            bad()


# Searching ----------------------------------------------------------------------------------------


def test_grid_tries_everything_once(task, tmp_path):
    space = {"lr": Categorical((1e-5, 0.05, 0.1))}
    found = sweep(task, trial, space, out=tmp_path / "s", plan=SweepConfig("grid", prune="none"))
    assert sorted(t.settings["lr"] for t in found.trials) == [1e-5, 0.05, 0.1]
    assert found.best.settings["lr"] >= 0.05
    runs = len(list(tmp_path.rglob("run.json")))
    again = sweep(task, trial, space, out=tmp_path / "s", plan=SweepConfig("grid", prune="none"))
    assert [vars(t) for t in again.trials] == [vars(t) for t in found.trials]
    assert len(list(tmp_path.rglob("run.json"))) == runs == 3


@pytest.mark.parametrize("prune", ["median", "asha"])
def test_hopeless_trials_are_stopped(task, tmp_path, prune):
    space = {"lr": Categorical((0.1, 0.12, 0.14, 0.16, 1e-6, 2e-6))}
    found = sweep(
        task, lambda s: trial(s, 20), space, out=tmp_path / "s", plan=SweepConfig("grid", prune=prune), jobs=1
    )
    stopped = {t.settings["lr"]: t.steps for t in found.trials if t.state == "pruned"}
    assert {1e-6, 2e-6} <= set(stopped)
    assert all(steps < 20 for steps in stopped.values())
    assert found.best.state == "done"


@pytest.mark.parametrize("method", [pytest.param("bayes", marks=needs_optuna), "random"])
def test_samplers(task, tmp_path, method):
    plan = SweepConfig(method, trials=3, seeds=2, seed=5)
    found = sweep(task, trial, {"lr": log(1e-4, 0.3)}, out=tmp_path / "s", plan=plan)
    assert len(found.trials) == 3
    assert all(1e-4 <= t.settings["lr"] <= 0.3 for t in found.trials)
    assert found.best.steps == 20  # two seeds
    more = sweep(
        task,
        trial,
        {"lr": log(1e-4, 0.3)},
        out=tmp_path / "s",
        plan=SweepConfig(method, trials=4, seeds=2, seed=5),
    )
    assert len(more.trials) == 4


def test_divergence_does_not_end_a_sweep(task, tmp_path):
    found = sweep(task, trial, {"lr": Categorical((1e30, 0.1))}, out=tmp_path / "s", plan=SweepConfig("grid"))
    assert {t.state for t in found.trials} == {"done", "diverged"}
    with pytest.raises(fb.errors.RunError, match="no trial"):
        _ = sweep(
            task, trial, {"lr": Categorical((1e30,))}, out=tmp_path / "t", plan=SweepConfig("grid")
        ).best


def test_killed_and_resumed(tmp_path, capsys):
    out = tmp_path / "killed"
    command = [
        "sweep",
        "digits",
        "fedavg",
        "lr=[0.02, 0.04, 0.06, 0.08]",
        "--method",
        "grid",
        "--prune",
        "none",
    ]
    command += ["--clients", "30", "--per-round", "5", "--rounds", "60", "--seed", "3"]
    running = subprocess.Popen([sys.executable, "-m", "fedbraid", *command, "--out", str(out), "--quiet"])
    deadline = time.monotonic() + 600
    while not any(p.stat().st_size > 10_000 for p in out.rglob("metrics.jsonl")):
        assert time.monotonic() < deadline
        assert running.poll() is None
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    noted = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    ended = {line["number"] for line in noted if "state" in line}
    assert {line["number"] for line in noted} > ended
    time.sleep(1)  # its workers notice that they are alone
    assert main(["sweep", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert main([*command, "--out", str(tmp_path / "whole"), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    values = [{t["settings"]["lr"]: t["value"] for t in s["trials"]} for s in (said, whole)]
    assert len(values[0]) == 4
    assert values[0] == values[1]
    assert said["best"] == whole["best"]


# Command line -------------------------------------------------------------------------------------


def test_the_best_is_a_command_and_a_file(tmp_path, capsys):
    out = tmp_path / "s"
    words = [
        "digits",
        "fedprox",
        "lr=[0.05]",
        "algorithm.mu=[0.1]",
        "batch=[full]",
        "--method",
        "grid",
        *FAST,
    ]
    assert main(["sweep", *words, "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["best"] == {"lr": 0.05, "algorithm.mu": 0.1, "batch": "full"}
    command = shlex.split(said["command"])
    assert main([*command[1:], "--out", str(tmp_path / "a"), "-q"]) == 0
    assert main(["run", said["file"], "--out", str(tmp_path / "b"), "-q"]) == 0
    models = [(tmp_path / run / "model.safetensors").read_bytes() for run in "ab"]
    assert models[0] == models[1]
    config = json.loads((tmp_path / "a/run.json").read_text())
    assert config["algorithm"] == "fedprox(mu=0.1)"
    assert main(["sweep", str(out)]) == 0
    assert "saved: fedbraid run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["digits", "local_only"], "nothing to search"),
        (["digits", "lr=[1]"], "sweep what?"),
        (["digits", "fedavg", "lr"], "not of the form key=space"),
        (["digits", "fedavg", "lr=0.1"], "is one value, not a space"),
        (["digits", "fedavg", "lr=logg(1, 2)"], "did you mean 'log'"),
        (["digits", "fedavg", "lr=log(2, 1)"], "is no range"),
        (["digits", "fedavg", "lr=[0.1"], "cannot be read"),
        (["digits", "fedavg", "speed=[1]"], "unknown setting 'speed'"),
        (["digits", "fedavg", "algorithm.mu=[1]"], "unknown keyword of fedavg"),
        (["digits", "fedavg", "lr=[1]", "--method", "guess"], "unknown method 'guess'"),
        (["digits", "fedavg", "lr=[1]", "--prune", "all"], "unknown pruner 'all'"),
        (["digits", "fedavg", "lr=[1]", "--trials", "0"], "trials must be an integer >= 1, got 0"),
        (["digits", "fedavg", "lr=[1]", "--hold-out", "1"], "hold_out must be in (0, 1)"),
    ],
)
def test_bad_input(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *words, *FAST]) == 2
    complaint = capsys.readouterr().err
    assert said in complaint
    assert complaint.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_without_optuna(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["sweep", "digits", "fedavg", "lr=[0.1]", *FAST, "--out", str(tmp_path / "s")]) == 2
    assert "needs the extra 'sweep'; install it with: pip install" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()
    random = ["--method", "random", "--trials", "2"]
    assert (
        main(["sweep", "digits", "fedavg", "lr=log(0.01, 0.1)", *random, *FAST, "--out", str(tmp_path / "r")])
        == 0
    )
    assert "best: fedbraid run digits" in capsys.readouterr().out


def test_draws_stay_within(task):
    for u in (0.0, 0.25, 0.5, 0.999999):
        assert 0.01 <= log(0.01, 1).draw(u) <= 1
        assert uniform(2, 3).draw(u) == pytest.approx(2 + u, abs=1e-3)  # four digits, which can be typed
        assert integer(1, 4).draw(u) in (1, 2, 3, 4)
        assert Categorical(("a", "b")).draw(u) == "ab"[u >= 0.5]
    assert log(0.01, 1).draw(0.5) == pytest.approx(0.1)
    assert integer(1, 4).draw(0.999999) == 4


def test_another_sweep_is_not_mixed_in(task, tmp_path):
    sweep(task, trial, {"lr": Categorical((0.1,))}, out=tmp_path / "s", plan=SweepConfig("grid"))
    with pytest.raises(fb.errors.RunError, match="another space"):
        sweep(task, trial, {"lr": Categorical((0.2,))}, out=tmp_path / "s", plan=SweepConfig("grid"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with pytest.raises(fb.errors.RunError, match="other files"):
        sweep(task, trial, {"lr": Categorical((0.2,))}, out=tmp_path / "other", plan=SweepConfig("grid"))
