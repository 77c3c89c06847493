"""Do a task and an algorithm of the user's own file work in every command, and in resumed runs?"""

from __future__ import annotations

import json

import pytest

import fedbraid as fb
from fedbraid.cli import main
from fedbraid.errors import ConfigError
from fedbraid.user_files import load

FILE = """
from dataclasses import dataclass

import numpy as np
import torch

import fedbraid as fb
from beside import WIDTH


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(WIDTH, 3)

    def forward(self, left, right):
        return self.line(torch.cat([left, right], -1))


def some(n, seed):
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 3, n)
    x = (draw.normal(size=(n, 5)) + y[:, None]).astype(np.float32)
    return {"left": x[:, :2], "right": x[:, 2:]}, y


def task(clients=6):
    f1 = lambda outputs, targets: float((outputs.argmax(1) == targets).float().mean())
    return fb.Task.from_arrays(Two, [some(12, i) for i in range(clients)], some(40, 99), metrics={"hits": f1})


@dataclass(frozen=True)
class Half(fb.Rule):
    by: float = 0.5

    def step(self, g, y, s, ctx):
        return g * self.by, s


def algorithm(by=0.5):
    return fb.Algorithm(rule=Half(by))


plain = fb.fedavg()
number = 3


def broken():
    raise ValueError("no luck")
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    (tmp_path / "my.py").write_text(FILE)
    (tmp_path / "beside.py").write_text("WIDTH = 5\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "my.py"


def call(capsys, *words):
    """What a command prints as JSON."""
    code = main([*map(str, words), "--json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    return json.loads(said.out)


SHORT = ("--rounds", 4, "--per-round", 2, "--batch", 4)


def test_run_and_resume(file, capsys, tmp_path, monkeypatch):
    said = call(capsys, "run", "my.py:task", "my.py:algorithm", *SHORT)
    assert said["run"].startswith("runs/task-algorithm-")
    config = json.loads((tmp_path / said["run"] / "run.json").read_text())
    assert config["task"] == f"{file}:task"
    assert config["algorithm"] == f"{file}:algorithm"
    assert "hits" in (tmp_path / said["run"] / "metrics.jsonl").read_text()
    whole = fb.resume(tmp_path / said["run"])
    call(capsys, "run", "my.py:task", "my.py:algorithm", *SHORT, "--out", "cut", "--target", "0.01")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    call(capsys, "resume", tmp_path / "cut", "--target", "1.0")
    assert fb.resume(tmp_path / "cut").x.equal(whole.x)


def test_keywords_reach_the_functions(file, capsys):
    call(
        capsys, "run", "my.py:task", "my.py:algorithm", *SHORT, "--clients", 4, "-a", "by=0.25", "--out", "k"
    )
    config = json.loads((file.parent / "k/run.json").read_text())
    assert config["clients"] == 4
    assert "by=0.25" in config["parts"]["rule"]
    assert fb.resume("k").history[-1]["step"] == 4


def test_a_builders_algorithm_keeps_its_name(file, capsys):
    call(capsys, "run", "my.py:task", "my.py:plain", *SHORT, "--out", "p")
    assert json.loads((file.parent / "p/run.json").read_text())["algorithm"] == "fedavg()"


def test_every_other_command(file, capsys):
    rows = call(
        capsys, "compare", "my.py:task", "my.py:algorithm", "slow: my.py:algorithm(by=0.1) lr=0.001", "fedavg", *SHORT,
        "--seeds", 2, "--jobs", 1, "--metric", "hits", "--out", "c",
    )  # fmt: skip
    assert rows["metric"] == "hits"
    assert [r["name"] for r in rows["rows"]] == ["my.py:algorithm", "slow", "fedavg"]
    assert call(capsys, "compare", "c")["metric"] == "hits"
    assert main(["report", "c", "-o", "c.html"]) == 0
    assert "hits" in (file.parent / "c.html").read_text()
    capsys.readouterr()
    assert call(capsys, "cost", "my.py:task", "my.py:algorithm")["parameters"] == 18
    assert call(capsys, "data", "my.py:task")["clients"] == 6


def test_a_search(file, capsys):
    pytest.importorskip("optuna", reason="the extra sweep is not installed")
    said = call(
        capsys, "sweep", "my.py:task", "my.py:algorithm", "algorithm.by=[0.0, 1.0]", *SHORT, "--method", "grid",
        "--jobs", 1, "--metric", "hits", "--prune", "none",
    )  # fmt: skip
    assert said["best"] == {"algorithm.by": 1.0}


def test_a_report_runs_nobodys_file(file, capsys):
    call(capsys, "run", "my.py:task", "my.py:algorithm", *SHORT, "--out", "r")
    file.write_text("raise SystemExit('it ran')")
    import sys

    for name in [n for n in sys.modules if n.startswith("fedbraid_file_")]:
        del sys.modules[name]
    assert main(["report", "r", "-o", "r.html"]) == 0


BAD = {
    "none.py:task": "none.py is not a file",
    "my.py:tusk": "unknown name in my.py 'tusk'; did you mean 'task'",
    "my.py:number": "is a int; it must be a fedbraid Task",
    "my.py:plain": "is a Algorithm; it must be a fedbraid Task",
    "my.py:broken": "line [0-9]+: ValueError: no luck",
    "my.py:task(client=3)": "unknown keyword of task 'client'",
    "my.py:broken(client=3)": "unknown keyword of broken 'client'; valid: none",
    "wrong.py:task": "wrong.py cannot be imported: line 2: NameError: name 'nix' is not defined",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_wrong_is_one_sentence(file, text):
    (file.parent / "wrong.py").write_text("x = 1\nnix\n")
    with pytest.raises(ConfigError, match=BAD[text]) as refusal:
        load(text, fb.Task, "task")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("words", [["my.py", "fedavg"], ["my.py:task", "my.py"], ["my.py:", "fedavg"]])
def test_a_file_without_a_name(file, capsys, words):
    assert main(["run", *words]) == 2
    assert "my.py is a file; say which of its names to take, such as my.py:task" in capsys.readouterr().err


NUMBERS = """
import fedbraid as fb, torch
class Some(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return torch.randn(2), i % 2
x = torch.randn(3, 4, 2)
values = fb.Task.from_arrays(torch.nn.Linear(2, 1), [(a, a.sum(1)) for a in x], loss="mse")
several = fb.Task.from_arrays(torch.nn.Linear(2, 2), [(a, (a > 0).long()) for a in x], loss="logistic")
disk = fb.Task.from_datasets(torch.nn.Linear(2, 2), [Some(), Some(), Some()], lazy=True)
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [("values", "no class labels"), ("several", r"labels of shape (2,) a sample"), ("disk", "on disk")],
)
def test_sizes_are_shown_where_no_label_can_be(file, capsys, name, why):
    (file.parent / "numbers.py").write_text(NUMBERS)
    assert main(["data", f"numbers.py:{name}"]) == 0
    assert why in capsys.readouterr().out
    said = call(capsys, "data", f"numbers.py:{name}")
    assert (said["clients"], said["samples"], said["largest"], said["counts"]) == (3, 12, 4, None)
    assert main(["data", f"numbers.py:{name}", "--figure", "a.png"]) == 2
    assert why in capsys.readouterr().err
