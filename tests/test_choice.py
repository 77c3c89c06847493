"""Are the clients asked that a choice by their losses says, and the same ones by a run that was stopped?"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedbraid as fb
from fedbraid.parse import evaluate
from fedbraid.run.config import SCHEDULES

WORK = fb.Work(lr=0.05, batch=5)
VMAP = "in_process(backend='vmap')"
TIMED = {"durations": fb.clock.lognormal(0, 0.8), "timeout": 1.2, "over_select": 1.5}


def worst(step, available, losses):
    """Everybody once, then those of the largest last loss."""
    return available[np.argsort(-np.nan_to_num(losses[available], nan=np.inf), kind="stable")[:2]]


CHOICES = {"worst": worst, "power_of_choice": fb.power_of_choice(4), "oort": fb.oort(explore=0.6)}


def run(task, select, steps=8, **options):
    timed = {k: options.pop(k) for k in (*TIMED,) if k in options}
    return fb.simulate(
        task,
        fb.fedavg(),
        WORK,
        fb.rounds(steps, clients=2, select=select, **timed),
        seed=5,
        engine=VMAP,
        **options,
    )


def test_a_choice_sees_step_availability_and_last_losses(blobs):
    seen = []

    def select(step, available, losses, sizes, count, last_participation):
        seen.append((step, available.tolist(), losses, sizes.tolist(), count, last_participation))
        return available[step % 3 : step % 3 + 2]

    result = run(blobs, select)
    last, when = np.full(blobs.clients, np.nan), np.full(blobs.clients, -1)
    for record, (step, available, losses, sizes, count, last_participation) in zip(
        result.history, seen, strict=True
    ):
        assert (step, available, count) == (record["step"] - 1, list(range(6)), 2)
        assert sizes == blobs.sizes.tolist()
        np.testing.assert_array_equal(losses, last)
        np.testing.assert_array_equal(last_participation, when)
        assert record["clients"] == [step % 3, step % 3 + 1] == record["selected"][0]
        assert record["train_loss"] == pytest.approx(np.mean(record["losses"]))
        last[record["clients"]], when[record["clients"]] = record["losses"], record["step"]


def test_the_worst_are_asked_again(blobs):
    history = run(blobs, worst).history
    assert [r["clients"] for r in history[:3]] == [[0, 1], [2, 3], [4, 5]]
    losses = {c: v for r in history[:3] for c, v in zip(r["clients"], r["losses"])}
    assert history[3]["clients"] == sorted(losses, key=losses.get, reverse=True)[:2]


@pytest.mark.parametrize("timed", [{}, TIMED], ids=["steady", "timed"])
@pytest.mark.parametrize("name", CHOICES)
def test_a_resumed_run_asks_the_same(blobs, tmp_path, name, timed):
    whole = run(blobs, CHOICES[name], **timed)

    class Stop:
        def step(self, record, run):
            if record["step"] == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(blobs, CHOICES[name], **timed, out=tmp_path / "run", callbacks=[Stop()])
    schedule = fb.rounds(8, clients=2, select=worst, **timed) if name == "worst" else None
    again = fb.resume(tmp_path / "run", task=blobs, schedule=schedule)
    assert again.history == whole.history
    assert torch.equal(again.x, whole.x)
    assert fb.resume(tmp_path / "run", task=blobs).history == whole.history  # it is done: nothing is asked


def test_a_function_of_ones_own_is_passed_again(blobs, tmp_path):
    class Stop:
        def step(self, record, run):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(blobs, worst, out=tmp_path / "run", callbacks=[Stop()])
    with pytest.raises(fb.FedbraidError, match=r"your function worst; pass it again"):
        fb.resume(tmp_path / "run", task=blobs)


def test_power_of_choice_takes_the_largest_losses_of_its_candidates():
    draw = np.random.default_rng(0)
    losses, sizes = draw.normal(size=50) ** 2, draw.integers(1, 30, 50)
    losses[7] = np.nan
    every = fb.power_of_choice(50)(3, np.arange(50), losses, 5, sizes, np.random.default_rng(1))
    assert every.tolist() == [7, *np.argsort(-np.nan_to_num(losses, nan=-1))[:4]]
    some = [
        fb.power_of_choice(10)(3, np.arange(50), losses, 5, sizes, np.random.default_rng(s))
        for s in range(400)
    ]
    assert all(len(set(c.tolist())) == 5 for c in some)
    counts = np.bincount(np.concatenate(some), minlength=50)
    assert counts[np.argsort(losses)[:10]].sum() < counts[np.argsort(-np.nan_to_num(losses))[:10]].sum() / 5


def test_oort_explores_and_then_takes_the_useful():
    N, sizes = 40, np.full(40, 10)
    losses, last_participation = np.full(N, np.nan), np.full(N, -1)
    losses[:20], last_participation[:20] = np.linspace(0.1, 2, 20), 1

    def ask(**settings):
        return fb.oort(**settings)(
            4, np.arange(N), losses, 10, sizes, last_participation, np.random.default_rng(0)
        )

    first = ask(explore=0.5, decay=1.0)
    assert sum(c >= 20 for c in first) == 5
    assert len(set(first.tolist())) == 10
    assert all(c >= 10 for c in ask(explore=0, least=0, cutoff=0.99))  # the better half of whom it knows
    assert sum(c >= 20 for c in ask(explore=1, least=1)) == 10
    late = fb.oort(explore=0.9, least=0.2)(
        400, np.arange(N), losses, 10, sizes, last_participation, np.random.default_rng(0)
    )
    assert sum(c >= 20 for c in late) == 2


@pytest.mark.parametrize(
    ("select", "said"),
    [
        (lambda step, available, losses: [], "at least one client"),
        (lambda step, available, losses: [0, 0], "a client twice"),
        (lambda step, available, losses: [99], "client 99, which is not available"),
        (lambda step, available, losses: losses[99], "fails at step 0"),
        (lambda step, available, losses: "ab", "at least one client"),
    ],
)
def test_choices_that_cannot_be_asked_are_sentences(blobs, select, said):
    with pytest.raises(fb.FedbraidError, match=said):
        run(blobs, select)


def test_refusals():
    for options in ({"select": 3}, {"select": worst, "sampling": "poisson"}):
        with pytest.raises(fb.FedbraidError, match=r"select="):
            fb.rounds(3, clients=2, **options)
    with pytest.raises(fb.FedbraidError, match="given cohorts"):
        fb.rounds(1, clients=[[0, 1]], select=worst)
    with pytest.raises(fb.FedbraidError, match=r"decay must be in \[0, 1\]"):
        fb.oort(decay=2)


def test_choices_print_as_they_are_read():
    for schedule in (fb.rounds(3, select=fb.power_of_choice(7)), fb.rounds(3, select=fb.oort(least=0.1))):
        assert evaluate(repr(schedule), SCHEDULES, "schedule") == schedule


def test_private_runs_do_not_choose(blobs):
    with pytest.raises(fb.FedbraidError, match="leave it out of private runs"):
        fb.simulate(
            blobs,
            fb.private(fb.fedavg(weights="uniform"), noise=1.0),
            WORK,
            fb.rounds(2, clients=2, select=worst),
        )


def test_from_the_shell(tmp_path, monkeypatch):
    from fedbraid.cli import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def pick(step, available, losses):\n    return available[step : step + 2]\n"
    )
    words = ["run", "digits", "fedavg", "--clients", "8", "--rounds", "3", "--per-round", "2", "--json"]
    for select, wanted in (("mine.py:pick", [[0, 1], [1, 2], [2, 3]]), ("power_of_choice(3)", None)):
        done = CliRunner().invoke(app, [*words, "--select", select, "--out", select[:4]])
        assert done.exit_code == 0, done.output
        clients = [
            json.loads(line)["clients"] for line in Path(select[:4], "metrics.jsonl").read_text().splitlines()
        ]
        assert clients == wanted or wanted is None
        assert CliRunner().invoke(app, ["resume", select[:4]]).exit_code == 0
