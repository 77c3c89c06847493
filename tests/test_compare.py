"""Does `compare` run every cell once, survive being killed, and claim no more than its intervals say?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from scipy.stats import t as student

import fedbraid as fb
from fedbraid.cli import main
from fedbraid.study import stats
from fedbraid.study.compare import LOCAL_ONLY, Comparison, compare, resume

WORK = fb.Work(lr=0.05, batch=10)
SMALL = [
    "--partition",
    "label_chunks(1)",
    "--per-round",
    "5",
    "--lr",
    "0.05",
    "--batch",
    "10",
    "--momentum",
    "0",
]
THREE = {"avg": fb.fedavg(), "prox": fb.fedprox(mu=0.1), "adam": fb.fedadavr("adam", lr=0.01)}


@pytest.fixture(scope="module")
def task():
    return fb.tasks.load("digits", clients=100, partition=fb.partition.label_chunks(1))


@pytest.fixture(scope="module")
def grid(task, tmp_path_factory):
    out = tmp_path_factory.mktemp("grid") / "grid"
    return compare(task, THREE, WORK, fb.rounds(12, clients=5), seeds=2, out=out, target=0.3)


# Statistics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 30, 31, 50, 1000])
def test_student(freedom):
    assert stats.t975(freedom) == pytest.approx(student.ppf(0.975, freedom), abs=2e-4)


def test_interval_is_students():
    values = [0.91, 0.93, 0.92, 0.95, 0.90]
    found = stats.interval(values)
    low, high = student.interval(0.95, 4, found.mean, torch.tensor(values).double().std() / 5**0.5)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-5)


def row(name, mean, half):
    return {"name": name, "metric": "accuracy", "final": stats.Interval(mean, half, 5)}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [row("a", 0.9, 0.01), row("b", 0.8, 0.01)],
            "a is best: its 95 % interval lies apart from all others.",
        ),
        (
            [row("a", 0.9, 0.01), row("b", 0.89, 0.01)],
            "No verdict between a and b: their 95 % intervals overlap.",
        ),
        (
            [row("a", 0.7, 0.01), row("b", 0.89, 0.01), row("c", 0.9, 0.01)],
            "No verdict between c and b: their 95 % intervals overlap. c lies apart from a.",
        ),
        (
            [row("a", 0.9, None), row("b", 0.8, None)],
            "a came first, but one seed has no interval: no verdict. Run more seeds.",
        ),
        (
            [row("best", 0.9, 0.01), *(row(c, 0.1, 0.01) for c in "abcdefg")],
            "best is best: its 95 % interval lies apart from all others.",
        ),
        (
            [row(c, 0.9, 0.01) for c in "abcdefg"],
            "No verdict between a, b, c, d and 3 others: their 95 % intervals overlap.",
        ),
        ([row("a", 0.9, 0.01)], "Nothing to compare: fewer than two have a result."),
    ],
)
def test_verdict(rows, said):
    assert stats.verdict(rows) == said


def test_less_loss_is_better():
    rows = [{**row("a", 0.9, 0.01), "metric": "loss"}, {**row("b", 0.1, 0.01), "metric": "loss"}]
    assert stats.verdict(rows).startswith("b is best")


def test_ranks_share_ties():
    def runs(name, *finals):
        histories = [[{"step": 1, "accuracy": v}] for v in finals]
        return stats.Runs(name, list(range(len(finals))), histories, [None] * len(finals))

    assert stats.ranks([runs("a", 0.9, 0.5), runs("b", 0.9, 0.6), runs("c", 0.1, 0.1)], "accuracy") == {
        "a": 1.75,
        "b": 1.25,
        "c": 3.0,
    }


def test_a_curve_keeps_the_steps_that_all_seeds_have():
    def record(step, accuracy):
        return {"step": step, "accuracy": accuracy, "bytes_up": 10, "bytes_down": 5, "time": step * 2.0}

    long = [record(s, 0.5) for s in (1, 2, 3)]
    found = stats.curve(stats.Runs("a", [0, 1], [long, long[:2]], [[7, 7, 7], [7, 7]]), "accuracy")
    assert found["x"] == {"step": [1, 2], "bytes": [15, 30], "time": [2, 4], "flops": [7, 14]}
    assert found["half"] == [0, 0]
    assert (
        len(
            stats.curve(
                stats.Runs("a", [0], [[record(s, 0.5) for s in range(1000)]], [None]), "accuracy", 50
            )["mean"]
        )
        == 50
    )


# Cells --------------------------------------------------------------------------------------------


def test_a_cell_is_the_run_it_says(task, grid):
    alone = fb.simulate(task, THREE["adam"], WORK, fb.rounds(12, clients=5), seed=1)
    index = [g.name for g in grid.groups].index("adam")
    assert [r["accuracy"] for r in grid.groups[index].histories[1]] == [r["accuracy"] for r in alone.history]
    assert grid.rows[index]["bytes_up"] == alone.bytes_up


def test_what_is_compared(grid):
    assert [r["name"] for r in grid.rows] == ["avg", "prox", "adam"]
    assert all(r["final"].count == 2 and r["flops"] > 0 for r in grid.rows)
    assert "avg" in str(grid)
    assert {"step", "bytes", "time", "flops"} == set(grid.rows[2]["to_target"])


def test_done_cells_are_skipped_and_new_seeds_added(task, grid):
    before = {p: p.stat().st_mtime_ns for p in grid.out.rglob("metrics.jsonl")}
    more = compare(task, THREE, WORK, fb.rounds(12, clients=5), seeds=3, out=grid.out)
    after = {p: p.stat().st_mtime_ns for p in grid.out.rglob("metrics.jsonl")}
    assert len(before) == 6
    assert len(after) == 9
    assert before.items() <= after.items()
    assert [r["final"].count for r in more.rows] == [3, 3, 3]


def test_killed_and_resumed(grid, tmp_path):
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "fedbraid", "compare", "digits", "avg: fedavg", "prox: fedprox(mu=0.1)"]
    command += [*SMALL, "--rounds", "150", "--seeds", "2", "--out", str(out), "--quiet"]
    running = subprocess.Popen(command)
    deadline = time.monotonic() + 600
    while not any(p.stat().st_size > 20_000 for p in out.rglob("metrics.jsonl")):
        assert time.monotonic() < deadline
        assert running.poll() is None
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    assert not all((p.parent / "model.safetensors").exists() for p in out.rglob("run.json"))
    deadline = time.monotonic() + 600
    while True:  # its workers end by themselves, and let go of their folders
        try:
            found = resume(out)
            break
        except fb.FedbraidError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    task = fb.tasks.load("digits", clients=100, partition=fb.partition.label_chunks(1))
    whole = fb.simulate(task, fb.fedavg(), WORK, fb.rounds(150, clients=5), seed=0, evaluate_every=150)
    assert found.groups[0].histories[0][-1]["accuracy"] == whole.history[-1]["accuracy"]
    assert [len(h) for g in found.groups for h in g.histories] == [150] * 4


def test_ctrl_c_says_how_to_go_on(tmp_path):
    out = tmp_path / "stopped"
    command = [sys.executable, "-m", "fedbraid", "compare", "digits", "fedavg", *SMALL, "--rounds", "100000"]
    running = subprocess.Popen(
        [*command, "--out", str(out)], stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's background has none
    )  # fmt: skip
    deadline = time.monotonic() + 600
    while not list(out.rglob("metrics.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)
    _, said = running.communicate(timeout=600)
    assert running.returncode == 130
    assert said == f"fedbraid: interrupted; finished runs are stored. Resume with: fedbraid compare {out}\n"


def test_divergence_is_a_result(task, tmp_path):
    found = compare(
        task, {"avg": fb.fedavg(), "wild": (fb.fedavg(), fb.Work(lr=1e30))}, WORK, fb.rounds(3, clients=5),
        seeds=2, out=tmp_path / "wild", jobs=1,
    )  # fmt: skip
    assert found.rows[1]["final"] is None
    assert "wild diverged with 2 of its seeds" in found.verdict
    assert resume(tmp_path / "wild").rows[1]["failed"] == 2


def test_own_task(blobs, tmp_path):
    """A task made in Python runs too, but only Python can go on with it."""
    found = compare(blobs, {"a": fb.fedavg()}, WORK, fb.rounds(2, clients=3), seeds=2, out=tmp_path / "own")
    assert found.rows[0]["final"].count == 2
    with pytest.raises(fb.errors.RunError, match="made in Python"):
        resume(tmp_path / "own")


# Command line -------------------------------------------------------------------------------------


def test_command(tmp_path, capsys):
    out = str(tmp_path / "cli")
    assert (
        main(
            [
                "compare",
                "digits",
                "slow: fedavg lr=0.001",
                "fedavg",
                *SMALL,
                "--rounds",
                "4",
                "--seeds",
                "1,7",
                "-o",
                out,
                "--json",
            ]
        )
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert [r["name"] for r in said["rows"]] == ["slow", "fedavg"]
    assert said["rows"][0]["seeds"] == [1, 7]
    assert main(["compare", out]) == 0
    assert "95 % interval" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["digits"], "nothing to compare"),
        (["digits", "fedavgg"], "did you mean 'fedavg'"),
        (["digits", "fedavg xx=1"], "unknown setting 'xx'"),
        (["digits", "fedavg lr"], "not of the form key=value"),
        (["digits", "lr=0.1"], "names no algorithm"),
        (["digits", "fedavg", "fedavg"], "are the same"),
        (["digits", "fedavg", "--seeds", "x"], "must be a number of seeds"),
        (["digits", "fedavg", "--seeds", "0"], "must be an integer >= 1, got 0"),
        (["digits", "fedavg", "--target", "95"], "such as 0.95"),
        (["digits", "fedavg", "--jobs", "0"], "runs nothing"),
    ],
)
def test_bad_input(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *arguments, "--rounds", "1"]) == 2
    complaint = capsys.readouterr().err
    assert said in complaint
    assert complaint.count("\n") == 1


def test_another_task_is_not_mixed_in(grid, capsys):
    assert main(["compare", "synthetic", "fedavg", "--out", str(grid.out)]) == 2
    assert "choose another out=" in capsys.readouterr().err


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["compare", "digits", "fedavg", "--out", str(tmp_path)]) == 2
    assert "holds other files" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_compare_is_a_function_and_its_entries_are_public(blobs, tmp_path):
    entries = [fb.Entry("a", fb.fedavg(), WORK, fb.rounds(2, clients=2))]
    found = fb.compare(blobs, entries, seeds=1, out=tmp_path / "duel")
    assert isinstance(found, Comparison)


# Defects of an earlier version -----------------------------------------------------------------------


def test_gains_leave_out_a_seed_in_which_local_only_diverged(tmp_path):
    shares = fb.tasks.load("digits", clients=10, test_shares=True)
    where = {"out": tmp_path / "gains", "seeds": 2, "jobs": 1, "local": True}
    found = compare(shares, {"avg": fb.fedavg()}, WORK, fb.rounds(2, clients=5), **where)
    assert [g["name"] for g in found.gains] == ["avg", LOCAL_ONLY]
    (alone,) = (tmp_path / "gains").glob("local-only-*/seed-1")
    (alone / "failed.json").write_text('{"error": "training diverged"}')
    again = compare(shares, {"avg": fb.fedavg()}, WORK, fb.rounds(2, clients=5), **where)
    assert again.rows[1]["failed"] == 1
    both, one = found.gains[0], again.gains[0]
    assert one["mean"] != both["mean"]  # of seed 0 only
    first = compare(shares, {"avg": fb.fedavg()}, WORK, fb.rounds(2, clients=5), **where | {"seeds": [0]})
    assert one == first.gains[0]


def test_clients_are_evaluated_once_in_the_end(tmp_path, monkeypatch):
    from fedbraid.run import run

    calls = tmp_path / "calls"
    counted = run.per_client

    def counting(*given):
        calls.open("a").write("x")
        return counted(*given)

    monkeypatch.setattr(run, "per_client", counting)
    shares = fb.tasks.load("digits", clients=10, test_shares=True)
    rounds = fb.rounds(2, clients=5)
    compare(shares, {"avg": fb.fedavg()}, WORK, rounds, out=tmp_path / "once", seeds=1, jobs=1, local=True)
    assert calls.read_text() == "xx"  # one for each of the two entries


def test_events_tell_the_metric_that_was_asked_for(task, tmp_path):
    seen = []
    found = compare(
        task, {"avg": fb.fedavg()}, WORK, fb.rounds(3, clients=5), seeds=1, out=tmp_path / "m", metric="loss",
        on_event=lambda event: seen.append(event) and None,
    )  # fmt: skip
    last = [e for e in seen if e.kind == "step"][-1]
    assert last.value == pytest.approx(found.groups[0].histories[0][-1]["loss"])
    assert next(e.kind for e in seen if e.kind != "tick") == "begin"
    assert sum(e.kind == "done" for e in seen) == 1


def test_an_entry_that_always_diverged_is_in_the_table_and_the_report(task, tmp_path):
    from fedbraid.report import collect, page

    entries = {"avg": fb.fedavg(), "wild": (fb.fedavg(), fb.Work(lr=1e30))}
    found = compare(task, entries, WORK, fb.rounds(3, clients=5), seeds=2, out=tmp_path / "wild", jobs=1)
    line = next(row for row in found.cells()[1] if row[0] == "wild")
    assert "0 (2 diverged)" in line
    shown = page.describe(collect.collect([tmp_path / "wild"]))
    assert [(r["name"], r["failed"]) for r in shown["rows"]] == [("avg", 0), ("wild", 2)]
    assert "wild diverged with 2 of its seeds" in shown["verdict"]


def test_algorithms_that_cannot_be_pickled_are_compared(blobs, tmp_path):
    class Own(fb.Transform):
        pass

    entries = {"own": fb.Algorithm(server=Own())}
    found = compare(blobs, entries, WORK, fb.rounds(2, clients=3), seeds=1, out=tmp_path / "own", jobs=1)
    assert found.rows[0]["final"].count == 1
