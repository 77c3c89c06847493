"""Does `fedbraid cost` say what papers print, and what runs then really send?"""

from __future__ import annotations

import json

import pytest
import torch

import fedbraid as fb
from experiments._lib import printed as papers
from fedbraid.cli import main
from fedbraid.engines.flops import forward_flops
from fedbraid.study.cost import Federation, estimate, operations


def test_fedgbo_tables_4_and_10_within_one_percent() -> None:
    cells = papers.fedgbo_flops()
    assert len(cells) == 2 * 4 * 10
    off = {
        (c["steps"], c["task"], c["algorithm"], c["optimizer"]): c["off"] for c in cells if not c["misprint"]
    }
    assert len(off) == len(cells) - 2
    assert max(map(abs, off.values())) < 0.01
    assert max(map(abs, off.values())) < 0.005, max(off, key=lambda k: abs(off[k]))


def test_the_two_misprinted_cells_follow_from_equation_22() -> None:
    slips = [c for c in papers.fedgbo_flops() if c["misprint"]]
    assert [c["paper"] for c in slips] == [0.035, 0.035]
    for cell in slips:  # K(B · 3 · 10,000 + 5 · 10,000) + 15 · 3 · 10,000
        assert cell["ours"] == pytest.approx(0.0335, rel=2e-3)


def test_fedgbo_table_2() -> None:
    rows = {(r["algorithm"], r["optimizer"]): (r["down"], r["up"]) for r in papers.fedgbo_traffic()}
    assert rows["fedavg", ""] == rows["fedadam", ""] == (1, 1)
    assert rows["fedgbo", "sgdm"] == rows["fedgbo", "rmsprop"] == (2, 1)
    assert rows["fedgbo", "adam"] == (3, 1)
    assert rows["mimelite", "sgdm"] == (2, 2)
    assert rows["mimelite", "adam"] == (3, 2)
    assert rows["mfl", "rmsprop"] == (2, 2)
    assert rows["mfl", "adam"] == (3, 3)


def test_fedadavr_table_3() -> None:
    rows = papers.fedadavr_memory()
    assert len(rows) == 11 * 4
    for row in rows:  # printed to two or three figures
        assert abs(row["off"]) < 0.015, row


@pytest.mark.parametrize(
    ("module", "sample", "operations"),
    [
        (torch.nn.Linear(5, 3), torch.zeros(2, 5), 5 * 3 + 3),
        (torch.nn.Linear(5, 3, bias=False), torch.zeros(2, 5), 5 * 3),
        (torch.nn.Conv2d(2, 4, 3), torch.zeros(1, 2, 6, 6), 16 * 4 * (2 * 9 + 1)),
        (torch.nn.GRU(3, 4, batch_first=True), torch.zeros(1, 7, 3), 7 * (3 * 4 * (3 + 4) + 13 * 4)),
        (torch.nn.LSTM(3, 4, batch_first=True), torch.zeros(1, 7, 3), 7 * (4 * 4 * (3 + 4) + 16 * 4)),
    ],
    ids=["linear", "no-bias", "conv", "gru", "lstm"],
)
def test_forward_flops_by_hand(module: torch.nn.Module, sample: torch.Tensor, operations: int) -> None:
    assert forward_flops(module, sample) == operations


def test_operations_of_other_rules_are_counted() -> None:
    plain = fb.Work(momentum=0.0)
    assert operations(fb.fedavg(), plain).per_step == 2
    assert operations(fb.fedavg(), fb.Work(momentum=0.9)).per_step == 4
    assert operations(fb.fedprox(0.1), plain).per_step == 5  # y − x, times μ, plus g
    assert operations(fb.scaffold(), plain).per_step == 3  # + (c − c_i), which is made once a visit
    assert operations(fb.mimelite("sgdm"), plain).full_gradients == 1


ALGORITHMS = {
    "fedavg": fb.fedavg(),
    "scaffold": fb.scaffold(),
    "fednova": fb.fednova(),
    "mfl": fb.mfl("adam"),
    "paq": fb.fedpaq(fb.codecs.uniform(4)),
    "kmeans": fb.fedpaq(fb.codecs.kmeans(3)),
    "topk": fb.fedef(fb.codecs.topk(0.1)),
    "down": fb.with_codecs(fb.fedavg(), up=fb.codecs.int8(), down=fb.codecs.fp16()),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_bytes_are_those_of_a_real_round(name: str) -> None:
    task = fb.tasks.load("digits", clients=20)
    work, algorithm = fb.Work(lr=0.05), ALGORITHMS[name]
    said = estimate(task.module(), task.inputs[:1], algorithm, work, Federation(20, 6, 71.9))
    record = fb.simulate(task, algorithm, work, fb.rounds(2, clients=6), evaluate_every=None).history[-1]
    assert said.bytes_down == record["bytes_down"]
    assert said.bytes_up == pytest.approx(record["bytes_up"], rel=0.01 if name == "topk" else 0)


def test_stored_bytes_are_those_of_a_real_memory() -> None:
    task = fb.tasks.load("digits", clients=20)
    algorithm, work = fb.fedadavr("adam", memory="int4"), fb.Work(lr=0.05)
    said = estimate(task.module(), task.inputs[:1], algorithm, work, Federation(20, 20, 71.9))
    state = fb.simulate(task, algorithm, work, fb.rounds(1, clients=20), evaluate_every=None).state
    rows = state.gather.rows
    assert len(rows) == 20
    assert said.server_memory["int4"] < 20 * rows.row_bytes < said.server_state < said.server_memory["fp16"]


def test_cost_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["cost", "lenet5", "fedadavr(memory='int4')", "-n", "1000", "--per-round", "5", "--json"]) == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert said["parameters"] == 61_706
    assert said["server_memory"]["fp32"] == 4 * 61_706 * 1000
    assert said["bytes_up"] == said["up"]["delta"] == 5 * (4 * 61_706 + 20)
    assert main(["cost", "digits(clients=20, partition=label_chunks(1))", "scaffold"]) == 0
    assert "4,810" in capsys.readouterr().out
    assert main(["cost", "gru_char(vocab=79)", "mimelite", "--samples", "50", "--steps", "5", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("paper", ["fedgbo", "fedadavr"])
def test_paper_tables_print(paper: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "--paper", paper]) == 0
    assert {"fedgbo": "Table 10", "fedadavr": "ResNet-50"}[paper] in capsys.readouterr().out
    assert main(["cost", "--paper", paper, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cost", "lenet", "fedavg"], "did you mean 'lenet5'"),
        (["cost", "lenet5"], "Name a task or model and an algorithm"),
        (["cost", "lenet5(class=3)", "fedavg"], "cannot be read"),
        (["cost", "lenet5(clases=3)", "fedavg"], "did you mean 'classes'"),
        (["cost", "lenet5(3)", "fedavg"], "without names"),
        (["cost", "lenet5", "fedavg", "--partition", "iid"], "goes with a task"),
        (["cost", "digits", "fedavg", "--samples", "3"], "is given by the task"),
        (["cost", "lenet5", "fedavg", "-n", "0"], "clients must be an integer >= 1, got 0"),
        (["cost", "lenet5", "fedavg", "--per-round", "-3"], "use a fraction"),
        (["cost", "--paper", "fedgob"], "did you mean 'fedgbo'"),
    ],
)
def test_bad_input(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert said in out.err
    assert out.err.count("\n") == 1
