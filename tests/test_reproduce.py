"""Are a paper's cells run once each, resumed when killed, and its tables made from results alone?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments._lib import reproduce as r
from fedbraid.cli import main
from fedbraid.errors import ConfigError, RunError

GRID = """
import fedbraid as fb
from experiments._lib.reproduce import Cell, Claim, markdown, spread, tail

ROUNDS = {rounds}

def cells():
    return [
        Cell(f"tiny/{{name}}/seed {{seed}}", f"load('digits', clients=20, partition=label_chunks(1), seed={{seed}})", text,
             fb.Work(lr=0.05, batch=10), fb.rounds(ROUNDS, clients=4), seed=seed, every=4, last=2)
        for seed in (0, 1) for name, text in (("FedAvg", "fedavg()"), ("FedAdaVR", "fedadavr('adam', lr=0.01)"))
    ]

def full():
    from dataclasses import replace
    return [replace(c, name=c.name.replace("tiny/", "full-tiny/"), schedule=fb.rounds(10 * ROUNDS, clients=4)) for c in cells()[:2]]

def claims(done):
    return [Claim("Table 1", "FedAdaVR | wins", "open", f"{{len(done)}} cells", "fedbraid reproduce tiny")]

def sentences(done):
    return [f"{{len(done)}} cells."]

def report(done):
    names = ("FedAvg", "FedAdaVR")
    rows = [[n, spread([tail(v, 2) for k, v in done.items() if f"/{{n}}/" in k], 3)] for n in names]
    return {{"accuracy": markdown(["method", "ours"], rows)}}
"""
PAGE = "# tiny\n\n<!-- table sentences -->\n<!-- end -->\n\n<!-- table claims -->\n<!-- end -->\n\n<!-- table accuracy -->\n<!-- end -->\n\nafter\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make(tmp_path, rounds=8)


def make(tmp_path: Path, rounds: int) -> Path:
    folder = tmp_path / "experiments" / "tiny"
    folder.mkdir(parents=True)
    (folder / "grid.py").write_text(GRID.format(rounds=rounds))
    (folder / "README.md").write_text(PAGE)
    return tmp_path / "experiments"


def go(home: Path, *arguments: str) -> int:
    where = ("--experiments", str(home), "--runs", str(home.parent / "runs"))
    return main(["reproduce", "tiny", *where, "--workers", "1", *arguments])


def results(home: Path) -> Path:
    return home / "tiny" / "results" / "tiny.jsonl"


def curves(home: Path) -> dict[str, object]:
    return {name: line["curve"] for name, line in r.Book(home / "tiny" / "results").lines().items()}


def test_cells_run_once_and_tables_come_from_results(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert go(home, "--quiet") == 0
    first, page = results(home).read_bytes(), (home / "tiny" / "README.md").read_text()
    assert first.count(b"\n") == 4
    assert "| FedAdaVR | 0." in page
    assert page.endswith("<!-- end -->\n\nafter\n")
    assert not [p for p in (home.parent / "runs").rglob("*") if p.is_dir() and p.name != "tiny"]
    assert go(home, "--quiet") == 0
    assert results(home).read_bytes() == first
    (home / "tiny" / "README.md").write_text(PAGE)
    assert go(home, "--tables-only", "--json") == 0
    assert (home / "tiny" / "README.md").read_text() == page
    assert json.loads(capsys.readouterr().out)["done"] == 4


def test_lines_hold_what_was_run_and_the_last_window(home: Path) -> None:
    go(home, "--quiet", "--cells", "*/FedAvg/seed 0")
    line = json.loads(results(home).read_text())
    assert line["cell"] == "tiny/FedAvg/seed 0"
    assert line["curve"]["step"] == [4, 7, 8]
    assert line["algorithm"] == "fedavg()"
    assert line["bytes_up"] > 0
    assert line["diverged"] is None


def test_a_cell_with_a_target_stops_there_and_totals_add_up(home: Path) -> None:
    text = (home / "tiny" / "grid.py").read_text()
    text = text.replace(
        "last=2)", "last=2, target=0.01, keep=('accuracy', 'loss', 'bytes_up', 'bytes_broadcast', 'flops'))"
    )
    (home / "tiny" / "grid.py").write_text(text)
    go(home, "--quiet", "--cells", "*/FedAvg/seed 0")
    line = json.loads(results(home).read_text())
    assert (line["steps"], line["target"], line["curve"]["step"]) == (4, 0.01, [4])
    assert line["curve"]["bytes_up"] == [line["bytes_up"]]
    assert line["curve"]["bytes_broadcast"] == [line["bytes_broadcast"]]
    each = line["curve"]["flops"][0] / 4  # of four clients of equal size
    (home / "tiny" / "grid.py").write_text(text.replace("target=0.01", "target=2.0"))
    go(home, "--quiet", "--cells", "*/FedAvg/seed 0")
    line = r.Book(home / "tiny" / "results").lines()["tiny/FedAvg/seed 0"]
    assert line["curve"]["step"] == [4, 7, 8]
    assert line["curve"]["flops"] == pytest.approx([4 * each, 7 * each, 8 * each], rel=0.05)


def test_a_changed_cell_is_run_again(home: Path) -> None:
    go(home, "--quiet", "--cells", "*/FedAvg/seed 0")
    (home / "tiny" / "grid.py").write_text(GRID.format(rounds=6))
    go(home, "--quiet", "--cells", "*/FedAvg/seed 0")
    assert [json.loads(t)["steps"] for t in results(home).read_text().splitlines()] == [8, 6]
    assert r.Book(home / "tiny" / "results").lines()["tiny/FedAvg/seed 0"]["steps"] == 6


def test_killed_midway_two_workers_continue_to_the_same_numbers(tmp_path: Path) -> None:
    whole, cut = make(tmp_path / "whole", 60), make(tmp_path / "cut", 60)
    assert go(whole, "--quiet") == 0
    command = [
        sys.executable,
        "-m",
        "fedbraid",
        "reproduce",
        "tiny",
        "--experiments",
        str(cut),
        "--runs",
        str(cut.parent / "runs"),
    ]
    process = subprocess.Popen([*command, "--quiet"], env=os.environ | {"OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 600
    while not list((cut.parent / "runs").rglob("metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert go(cut, "--quiet") == 0
    assert curves(cut) == curves(whole)


def test_half_a_line_is_cut_off(home: Path) -> None:
    go(home, "--quiet", "--cells", "*/FedAvg/seed 0")
    good = results(home).read_bytes()
    results(home).write_bytes(good + b'{"cell": "tiny/FedA')
    assert len(r.Book(home / "tiny" / "results").lines()) == 1
    go(home, "--quiet", "--cells", "*/FedAvg/seed 1")
    assert results(home).read_bytes().startswith(good)
    assert len(r.Book(home / "tiny" / "results").lines()) == 2
    results(home).write_bytes(b"nonsense\n" + good)
    with pytest.raises(RunError, match=r"line 1 is corrupt"):
        r.Book(home / "tiny" / "results").lines()


def test_a_run_that_diverges_is_a_result(home: Path) -> None:
    text = (home / "tiny" / "grid.py").read_text().replace("lr=0.05", "lr=1e30")
    (home / "tiny" / "grid.py").write_text(text)
    assert go(home, "--quiet", "--cells", "*/FedAvg/seed 0") == 0
    assert "finite" in json.loads(results(home).read_text())["diverged"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["reproduce", "tinny"], "did you mean 'tiny'"),
        (["reproduce", "tiny", "--part", "tin"], "did you mean 'tiny'"),
        (["reproduce", "tiny", "--cells", "x*"], "no cell matches"),
        (["reproduce", "tiny", "--list", "--tables-only"], "give one of them"),
        (["reproduce", "tiny", "--workers", "0"], "--workers"),
    ],
)
def test_mistakes_are_one_sentence(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main([*arguments, "--experiments", str(home)]) == 2
    complaint = capsys.readouterr().err
    assert sentence in complaint
    assert complaint.count("\n") == 1


def test_lists(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert go(home, "--list", "--json") == 0
    assert [c["done"] for c in json.loads(capsys.readouterr().out)] == [False] * 4
    assert main(["reproduce", "--json", "--experiments", str(home)]) == 0
    none = {"paper": "tiny", "part": "tiny", "cells": 4, "done": 0, "hours_left": "?"}
    assert json.loads(capsys.readouterr().out) == [none, none | {"part": "full-tiny", "cells": 2}]


def test_a_trial_says_how_long_full_size_would_take(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert go(home, "--full", "--try", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [c["done"] for c in listed] == [False] * 2
    assert all(c["hours_left"] > 0 for c in listed)
    tried = json.loads((home / "tiny" / "results" / "tried.json").read_text())
    assert set(tried) == {"full-tiny"}
    assert tried["full-tiny"]["code"] == r.version()
    assert not results(home).exists()


def test_the_page_of_all_papers(home: Path) -> None:
    assert go(home, "--quiet") == 0
    assert main(["reproduce", "--page", "--experiments", str(home)]) == 0
    page = (home / "README.md").read_text()
    assert r"| Table 1 | FedAdaVR \| wins | open | 4 cells | `fedbraid reproduce tiny` |" in page
    assert "| tiny | 4 | 1 | 4 | none |" in page
    assert "- 4 cells.\n" in page
    assert "| tiny | full-tiny | 2 | 0 | ? |" in page


def test_results_outlive_new_keywords(home: Path) -> None:
    assert go(home, "--quiet") == 0
    book, cells = r.Book(home / "tiny" / "results"), r.load(home, "tiny").cells()
    line = book.lines()[cells[0].name]
    for old in ("Work(lr=0.05, epochs=1, steps=None, batch=10, momentum=0.0)", repr(cells[0].work)):
        assert r.same(line | {"work": old}, cells[0])
    assert not r.same(line | {"work": "Work(lr=0.05, epochs=2, batch=10)"}, cells[0])


def test_a_page_without_a_mark_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("nothing")
    with pytest.raises(ConfigError, match="no place for table 'a'"):
        r.fill(page, {"a": "| |"})


def test_every_grid_of_the_repository_loads() -> None:
    home = Path(__file__).parents[1] / "experiments"
    for paper in r.papers(home):
        cells = r.load(home, paper).cells()
        assert cells
        r.Book(home / paper / "results").done(cells)


def test_what_changed_since_is_run_again_when_asked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = {
        "code": "commit 0123456 or before",
        "work": "Work(lr=0.1, momentum=0.9)",
        "algorithm": "scaffold()",
        "schedule": "Rounds(steps=9, clients=5)",
    }
    lines = {
        "scaffold with momentum": ({"algorithm": "scaffold()"}, True), "plain": ({"algorithm": "fedavg()"}, False),
        "without momentum": ({"algorithm": "scaffold()", "work": "Work(lr=0.1, momentum=0.0)"}, False),
        "shifted": ({"algorithm": "fedshift(fedavg())"}, True), "one optimiser": ({"algorithm": "fedgbo()"}, True),
        "new": ({"algorithm": "scaffold()", "code": "0.1.0+abc"}, False),
    }  # fmt: skip
    for name, (line, again) in lines.items():
        assert (r.outdated({**old, **line}) is not None) == again, name
    assert go(home, "--quiet") == 0
    text = results(home).read_text().replace("fedavg()", "fedshift(fedavg())")
    results(home).write_text(text.replace(r.version(), "commit 0123456 or before"))
    grid = home / "tiny" / "grid.py"
    grid.write_text(grid.read_text().replace('"fedavg()"', '"fedshift(fedavg())"'))
    assert len(r.Book(results(home).parent).done(r.load(home, "tiny").cells())) == 4
    assert go(home, "--quiet", "--again") == 0
    assert results(home).read_text().count("\n") == 6
    assert results(home).read_text().count(r.version()) == 2
