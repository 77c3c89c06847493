"""Does `choose` find the planted winner, call equals equal, respect its limits and its time, and survive being killed?"""

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
from fedbraid.parse import quantity
from fedbraid.study import race, stats
from fedbraid.study.candidates import Situation, candidates, examine
from fedbraid.study.energy import PROFILES

PLANTED = {
    "stuck": fb.fedavg(lr=1e-4), "slow": fb.fedavg(lr=0.02), "planted": fb.fedavg(), "fedavg": fb.fedavg(lr=1e-3)
}  # fmt: skip


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    """Plans that do not hang on how fast this machine is."""
    monkeypatch.setattr(race, "TRIES", (1, 2))
    monkeypatch.setattr(race, "SEEDS", (4,))


@pytest.fixture
def small(blobs, tmp_path):
    def choose(**options):
        given = {"per_round": 3, "rounds": 9, "minutes": 600, "jobs": 1, "out": tmp_path / "chosen"}
        return fb.choose(blobs, **given | options)

    return choose


@pytest.fixture(scope="module")
def digits():
    return fb.tasks.load("digits", clients=40, partition=fb.partition.label_chunks(1))


# The answer -------------------------------------------------------------------------------------------


def test_the_planted_winner_is_found(small, blobs):
    found = small(candidates=PLANTED)
    assert [r["tied"] for r in found.ranking] == [r["name"] == "planted" for r in found.ranking]
    assert found.ranking[0]["name"] == "planted"
    assert any("planted beats FedAvg, tuned alike" in sentence for sentence in found.facts["verdict"])
    assert {loser["algorithm"] for loser in found.facts["losers"]} == {"stuck", "slow", "fedavg"}
    again = fb.simulate(blobs, found.algorithm, found.work, found.schedule, seed=1)
    (folder,) = (found.out / "confirm").glob("planted-*/seed-1")
    first = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["bytes_up"] for r in again.history] == [r["bytes_up"] for r in first]
    assert again.last("accuracy") == pytest.approx(first[-1]["accuracy"])


def test_judged_without_the_test_set_and_with_seeds_of_its_own(small, blobs):
    found = small(candidates=PLANTED)
    raced = [json.loads(p.read_text()) for p in (found.out / "race").rglob("run.json")]
    confirmed = [json.loads(p.read_text()) for p in (found.out / "confirm").rglob("run.json")]
    assert {r["data"] for r in confirmed} == {blobs.fingerprint}
    assert blobs.fingerprint not in {r["data"] for r in raced}
    assert {r["seed"] for r in confirmed}.isdisjoint(r["seed"] for r in raced)
    assert {r["clients"] for r in raced} == {4}  # of six, two judge


def test_one_algorithm_under_several_names_is_a_tie(small):
    found = small(candidates={name: fb.fedavg() for name in ("a", "b", "c")})
    assert all(r["tied"] for r in found.ranking)
    assert len(found.ranking) == 4  # FedAvg is always there
    assert found.facts["losers"] == []


def test_a_finished_folder_answers_without_running(small, monkeypatch):
    found = small(candidates=PLANTED)
    monkeypatch.setattr(race.Race, "run", None)
    again = small(candidates=PLANTED)
    assert again.as_json() == json.loads(json.dumps(found.as_json()))
    assert (again.algorithm, again.work, again.schedule) == (found.algorithm, found.work, found.schedule)
    with pytest.raises(fb.errors.RunError, match="holds a choose with another situation"):
        small(candidates=PLANTED, rounds=10)


def test_killed_and_resumed(small, tmp_path):
    script = tmp_path / "choose.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import test_choose, fedbraid as fb\n"
        "from fedbraid.study import race\n"
        "race.TRIES, race.SEEDS = (1, 2), (4,)\n"
        "task = fb.tasks.load('digits', clients=40, partition='label_chunks(1)')\n"
        "fb.choose(task, per_round=5, rounds=18, minutes=600, jobs=2, out=sys.argv[2], candidates=test_choose.PLANTED)\n"
    )
    command = [sys.executable, str(script), os.path.dirname(__file__)]
    out, journal = tmp_path / "killed", tmp_path / "killed" / "choose.jsonl"
    running = subprocess.Popen([*command, str(out)], env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
    deadline = time.monotonic() + 600
    while not (journal.exists() and journal.read_text().count("\n") > 6):
        assert time.monotonic() < deadline
        assert running.poll() is None
        time.sleep(0.01)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    assert not (out / "result.json").exists()
    while True:  # its workers end by themselves
        again = subprocess.run([*command, str(out)], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})  # fmt: skip
        if not again.returncode:
            break
        assert "in use" in again.stderr
        assert time.monotonic() < deadline
    subprocess.run([*command, str(tmp_path / "whole")], check=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})  # fmt: skip
    one, other = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("killed", "whole"))
    for key in ("ranking", "verdict", "losers", "excluded"):
        assert one[key] == other[key]


def test_the_race_ends_when_its_time_is_up(small, monkeypatch):
    clock = property(lambda self: 0.0 if len(self.looks) < 9 else 0.6 * self.total)
    monkeypatch.setattr(race.Race, "spent", clock)
    found = small(candidates=PLANTED)
    lines = [json.loads(line) for line in (found.out / "choose.jsonl").read_text().splitlines()]
    assert [line for line in lines if line.get("rung 1") == "out of time"]
    assert not [line for line in lines if line.get("rung") == 2]
    assert found.ranking[0]["name"] == "planted"


def test_no_seed_begins_when_the_time_is_up(small, monkeypatch):
    monkeypatch.setattr(race, "SEEDS", (5,))
    done = []
    clock = property(lambda self: 0.0 if len(done) < 3 * 4 else 0.95 * self.total)
    monkeypatch.setattr(race.Race, "spent", clock)

    def count(event):
        if event.kind == "done" and hasattr(event.cell, "seed"):
            done.append(event.cell)

    found = small(candidates=PLANTED, on_event=count)
    assert found.budget["seeds"] == [1, 2, 3]


def test_one_that_fails_loses_and_the_others_go_on(small):
    class Broken(fb.Transform):
        def update(self, u, s, x, ctx):
            if len(x) > 4:  # not in the dry run
                raise fb.errors.EngineError("this one cannot run")
            return u, s

    found = small(
        candidates={
            "broken": fb.Algorithm(server=Broken()),
            "fedavg": fb.fedavg(),
            "slow": fb.fedavg(lr=0.02),
        }
    )
    assert found.ranking[0]["name"] == "fedavg"
    assert {"algorithm": "broken", "reason": "this one cannot run with every setting"} in found.facts[
        "losers"
    ]
    with pytest.raises(fb.errors.EngineError, match="cannot run"):
        small(candidates={"fedavg": fb.Algorithm(server=Broken())}, out=found.out / "other")


# Objectives and limits --------------------------------------------------------------------------------


def test_what_counts_is_what_the_target_takes(small):
    thin = fb.with_codecs(fb.fedavg(), up=fb.codecs.int8(), down=fb.codecs.int8())
    found = small(candidates={"fedavg": fb.fedavg(), "thin": thin}, accuracy=0.4, objective="bytes")
    assert [r["name"] for r in found.ranking] == ["thin", "fedavg"]
    assert [next(iter(r["metrics"])) for r in found.ranking] == ["bytes to 40%"] * 2
    assert not found.ranking[1]["tied"]


def test_worst_tenth_and_deadline(tmp_path):
    task = fb.tasks.load("digits", clients=20, partition=fb.partition.dirichlet(0.5), test_shares=True)
    found = fb.choose(
        task, per_round=5, rounds=9, minutes=600, objective="worst-tenth", out=tmp_path / "w", uplink="20kB/s",
        deadline=6.0, candidates={"avg": fb.fedavg(), "thin": fb.fedpaq(fb.codecs.int8())},
    )  # fmt: skip
    assert list(found.ranking[0]["metrics"])[:2] == ["worst tenth", "accuracy"]
    assert all(r["metrics"]["time"]["mean"] <= 6 for r in found.ranking)


def test_limits_exclude_with_a_reason_and_what_would_admit(digits):
    def excluded(**limits):
        s = Situation(per_round=5, device=PROFILES["phone-wifi"], **limits)
        found = {c.name: examine(c, s, digits) for c in candidates(s)}
        return {name: obstacles for name, (_, obstacles) in found.items() if obstacles}

    assert not excluded()
    by_memory = excluded(server_memory=1e5)
    assert {"fedvarp", "mifa", "fedadavr"} <= set(by_memory)
    assert "fedavg" not in by_memory
    admits = by_memory["fedvarp"][0].admits.removeprefix("--server-memory ")
    assert "fedvarp" not in excluded(server_memory=quantity("server_memory", admits, "size"))
    without = excluded(no_client_state=True)
    assert {"scaffold", "feddyn", "adabest", "fedvarp(held='client')"} <= set(without)
    assert "fedadavr" not in without
    late = excluded(uplink=1000.0, deadline=100.0)
    assert "fedavg" in late
    assert "fedavg, 4-bit links" not in late
    relaxed = quantity("deadline", late["fedavg"][0].admits.removeprefix("--deadline "), "duration")
    assert "fedavg" not in excluded(uplink=1000.0, deadline=relaxed)


def test_all_candidates_can_be_built_and_draws_fill_their_spaces(digits):
    s = Situation(per_round=5, device=PROFILES["phone-wifi"])
    every = candidates(s)
    assert len({c.name for c in every}) == len(every) > 30
    assert every[0].name == "fedavg"
    for c in every:
        admitted, _ = examine(c, s, digits)
        entries = {admitted.entry(c.draw(n), 20).folder for n in range(3)}
        assert len(entries) > 1
    rates = np.sort([every[0].draw(n)["lr"] for n in range(16)])
    assert (np.diff(np.log(rates)) < 0.35 * np.log(50)).all()  # no wide gap


def test_private_candidates(digits):
    pytest.importorskip("dp_accounting")
    s = Situation(per_round=5, epsilon=8.0, device=PROFILES["phone-wifi"])
    found = {c.name: (c, *examine(c, s, digits)) for c in candidates(s)}
    candidate, admitted, _ = found["fedavg"]
    settings = candidate.draw(0)
    assert admitted.entry(settings, 10).algorithm.name.startswith("private(fedavg(")
    assert "private.clip" in settings
    assert all(
        obstacles[0].admits == "no --epsilon" for _, there, obstacles in found.values() if there is None
    )


def test_a_candidate_whose_privacy_cannot_be_accounted_for_is_excluded(blobs, tmp_path):
    pytest.importorskip("dp_accounting")
    s = Situation(per_round=3, rounds=4, epsilon=8.0, device=PROFILES["phone-wifi"])
    found = race.Race(blobs, s, None, tmp_path / "c", 1.0, 1, 0, lambda event: None)
    name = "adabest(weights='uniform'), buffered"
    found.candidates = [c for c in found.candidates if c.name == name]
    with pytest.raises(fb.errors.ConfigError, match=r"exclude all 1 candidates .* use no --epsilon"):
        found.run(found.admit())
    assert "may upload twice" in found.excluded[name][0].reason


# Statistics -------------------------------------------------------------------------------------------


def test_t_test_is_scipys():
    scipy = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(0)
    for n in range(2, 14):
        values = draw.normal(0.4, 1, n)
        assert stats.t_test(values.tolist()) == pytest.approx(scipy.ttest_1samp(values, 0).pvalue, abs=1e-12)


def test_pairs_are_paired_and_corrected():
    draw = np.random.default_rng(1)
    common = draw.normal(size=6)
    values = {
        name: (common + 0.01 * draw.normal(size=6) + shift).tolist()
        for name, shift in (("a", 0), ("b", 0.1), ("c", 0))
    }
    p = stats.pair_tests(values)
    assert p[frozenset("ab")] < 0.001  # although the seeds scatter ten times as much
    single = stats.t_test([x - y for x, y in zip(values["a"], values["b"])])
    assert single <= p[frozenset("ab")] <= 3 * single * (1 + 1e-9)
    apart = stats.resolution([x - y for x, y in zip(values["a"], values["c"])], 0.05)
    assert stats.t_test([x - y - np.mean(values["a"]) + np.mean(values["c"]) + apart for x, y in zip(values["a"], values["c"])]) == pytest.approx(0.05)  # fmt: skip


def test_equals_that_share_no_randomness_tie_as_often_as_the_level_says():
    """The statistics alone, on numbers: six equals of five seeds each differ in at most one of twenty finals."""
    draw, wrong = np.random.default_rng(2), 0
    for _ in range(400):
        values = draw.normal(size=(6, 5))
        p = stats.pair_tests({str(i): row.tolist() for i, row in enumerate(values)})
        best = str(values.mean(1).argmax())
        wrong += any(value < 0.05 for pair, value in p.items() if best in pair)
    assert wrong <= 20


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [("200kB/s", "rate", 2e5), ("4GB", "size", 4e9), ("1.5 MiB", "size", 1.5 * 2**20), ("1Mbit/s", "rate", 125e3), ("2h", "duration", 7200), ("30min", "duration", 1800), (7, "size", 7)],
)  # fmt: skip
def test_quantities(text, kind, value):
    assert quantity("x", text, kind) == value


# Command line -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--uplink", "200kb/s"], "unknown unit of uplink 'kb/s'"),
        (["--deadline", "soon"], "is not a duration; write a number with a unit, such as 2h"),
        (["--server-memory", "-4GB"], "is not a size"),
        (
            ["--objective", "bytes"],
            "objective='bytes' needs a target accuracy; give one, such as accuracy=0.9",
        ),
        (["--objective", "speed"], "unknown objective 'speed'"),
        (["--accuracy", "90"], "accuracy must be in (0, 1], got 90.0; use a fraction such as 0.9"),
        (["--minutes", "0"], "minutes must be > 0, got 0.0"),
        (["--objective", "worst-tenth"], "is seen on local test sets"),
        (["--online", "TRACE"], "none of the 30 clients reachable"),
        (["--device", "toaster"], "unknown device profile 'toaster'"),
        (["--server-memory", "1kB"], "exclude all"),
        (["--minutes", "0.001"], "is too little to tell anything"),
    ],
)
def test_bad_input(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.json").write_text('{"77": [[0, 100]]}')
    words = [str(tmp_path / "trace.json") if w == "TRACE" else w for w in words]
    assert main(["choose", "digits", "--clients", "30", "--per-round", "5", "--out", "c", *words]) == 2
    complaint = capsys.readouterr().err
    assert said in complaint
    assert complaint.count("\n") == 1


def test_what_the_error_advises_admits_something(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["choose", "digits", "--clients", "30", "--per-round", "5", "--out", "c", "--no-client-state"]
    assert main([*words, "--server-memory", "1kB"]) == 2
    said = capsys.readouterr().err
    advised = said.split("use --server-memory ")[1].split(",")[0]
    assert "which would admit fedavg" in said
    s = Situation(
        per_round=5,
        server_memory=quantity("x", advised, "size"),
        no_client_state=True,
        device=PROFILES["phone-wifi"],
    )
    task = fb.tasks.load("digits", clients=30)
    assert not examine(candidates(s)[0], s, task)[1]


def test_a_target_that_nobody_reaches(small):
    with pytest.raises(fb.errors.ConfigError, match="no candidate reached an accuracy of 99"):
        small(candidates={"stuck": fb.fedavg(lr=1e-4)}, accuracy=0.999, rounds=4)


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fedbraid.study.candidates.COMPOSED", ())
    monkeypatch.setattr("fedbraid.study.candidates.SPACES", {k: v for k, v in fb.algorithms.SPACES.items() if k in ("fedavg", "fedbuff", "fedadam")})  # fmt: skip
    out = tmp_path / "c"
    words = [
        "choose",
        "digits",
        "--clients",
        "30",
        "--per-round",
        "5",
        "--rounds",
        "6",
        "--minutes",
        "600",
        "--out",
        str(out),
    ]
    assert main([*words, "--uplink", "100kB/s", "--server-memory", "1GB", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {"ranking", "excluded", "budget", "losers", "command", "deploy", "verdict"} <= said.keys()
    first = said["ranking"][0]
    assert {"algorithm", "work", "schedule", "metrics", "tied"} <= first.keys()
    assert set(first["metrics"]["accuracy"]) == {"mean", "half", "count"}
    assert main(["choose", str(out)]) == 0
    shown = capsys.readouterr().out
    assert first["name"] in shown
    assert "winner: fedbraid run" in shown
    run = shlex.split(said["command"])
    assert main([*run[1:], "--out", str(tmp_path / "r"), "--json"]) == 0
    made = json.loads((tmp_path / "r/run.json").read_text())
    assert (made["algorithm"], made["work"], made["schedule"]) == (
        first["algorithm"],
        first["work"],
        first["schedule"],
    )
    capsys.readouterr()
    assert main(["report", str(out), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists()


def test_frames_and_pictures(small):
    found = small(candidates=PLANTED)
    pandas = pytest.importorskip("pandas")
    frame = found.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["name"]) == [r["name"] for r in found.ranking]
    assert frame["accuracy"][0] == found.ranking[0]["metrics"]["accuracy"]["mean"]
    pytest.importorskip("matplotlib")
    assert len(found.plot().axes) == 2
    assert "planted" in str(found)
