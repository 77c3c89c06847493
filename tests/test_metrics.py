"""Does a task's own metric reach history, callbacks, comparisons, searches and reports, as it is computed?"""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from torch import nn

import fedbraid as fb
from fedbraid.errors import ConfigError, DataError, RunError
from fedbraid.report.collect import collect
from fedbraid.report.page import describe
from fedbraid.report.tables import as_csv
from fedbraid.run.progress import Bar

WORK, ROUNDS = fb.Work(lr=0.1, batch=4), fb.rounds(4, clients=2)


def f1(outputs, targets):
    """Of class 0."""
    said, is_ = outputs.argmax(1) == 0, targets == 0
    return 2 * (said & is_).sum() / (said.sum() + is_.sum()).clamp_min(1)


def mae(outputs, targets):
    return (outputs.softmax(1)[:, 0] - (targets == 0).float()).abs().mean()


class Right:
    """A metric as torchmetrics has them."""

    def reset(self):
        self.seen = self.right = 0

    def update(self, outputs, targets):
        self.seen, self.right = (
            self.seen + len(targets),
            self.right + int((outputs.argmax(1) == targets).sum()),
        )

    def compute(self):
        return torch.tensor(self.right / self.seen)


def make(metrics, seed=0, **options):
    draw = np.random.default_rng(seed)

    def some(n):
        y = draw.integers(0, 3, n)
        return (draw.normal(size=(n, 5)) + y[:, None]).astype(np.float32), y

    torch.manual_seed(0)
    shares = [some(n) for n in (6, 9, 1, 12)]
    return fb.Task.from_arrays(
        nn.Linear(5, 3), [some(n) for n in (20, 30, 25, 8)], client_tests=shares, metrics=metrics, **options
    )


@pytest.fixture(scope="module")
def task():
    return make({"f1": f1, "mae": mae, "right": Right()})


@pytest.mark.parametrize(
    "engine", ["in_process(backend='loop')", "in_process(backend='vmap')", "pool(workers=2)"]
)
def test_in_history_and_by_client(task, engine):
    result = fb.simulate(task, fb.fedavg(), WORK, ROUNDS, evaluate_on="clients", engine=engine)
    outputs, targets = result.model()(task.test[0]).detach(), task.test[1]
    last = result.history[-1]
    assert last["f1"] == pytest.approx(float(f1(outputs, targets)), abs=1e-6)
    assert last["mae"] == pytest.approx(float(mae(outputs, targets)), abs=1e-6)
    assert last["right"] == pytest.approx(last["accuracy"])
    shares = [slice(a, b) for a, b in zip(task.test_offsets, task.test_offsets[1:])]
    each = [float(mae(outputs[s], targets[s])) for s in shares]
    assert last["mae_clients"] == pytest.approx(np.mean(each), abs=1e-6)
    assert last["mae_worst_tenth"] == pytest.approx(max(each), abs=1e-6)
    each = [float(f1(outputs[s], targets[s])) for s in shares]
    assert last["f1_worst_tenth"] == pytest.approx(min(each), abs=1e-6)
    assert last["right_clients"] == pytest.approx(last["accuracy_clients"])
    assert f"f1  {result.last('f1'):.4f}" in str(result)


def test_metrics_change_no_other_number(task):
    with_, without = (fb.simulate(t, fb.fedavg(), WORK, ROUNDS) for t in (task, make({})))
    assert torch.equal(with_.x, without.x)
    assert with_.last("accuracy") == without.last("accuracy")


def test_a_share_without_a_value_is_left_out():
    def auc(outputs, targets):
        return float("nan") if len(targets) == 1 else 0.5

    result = fb.simulate(make({"auc": auc}), fb.fedavg(), WORK, ROUNDS, evaluate_on="clients")
    assert result.last("auc_clients") == 0.5


def test_a_metric_may_see_the_inputs():
    task = make({"spread": lambda outputs, targets, inputs: inputs.std()})
    assert fb.simulate(task, fb.fedavg(), WORK, ROUNDS).last("spread") == pytest.approx(
        float(task.test[0].std())
    )


class Fails:
    def __init__(self, at, value=None):
        self.left, self.value = at, value

    def __call__(self, outputs, targets):
        self.left -= 1
        if self.left > 0:
            return 1.0
        if self.value is None:
            raise ValueError("no such class")
        return self.value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, r"metric 'mine' fails on the test set at step 3 \(ValueError: no such class\)"),
        (float("nan"), "metric 'mine' is nan on the test set at step 3"),
        (torch.zeros(2), "metric 'mine' fails on the test set at step 3 .* must return one number"),
    ],
)
def test_what_fails_is_named_and_what_ran_is_kept(tmp_path, value, said):
    with pytest.raises(RunError, match=said):
        fb.simulate(make({"mine": Fails(3, value)}), fb.fedavg(), WORK, ROUNDS, out=tmp_path / "run")
    resumed = fb.resume(tmp_path / "run", task=make({"mine": lambda o, t: 2.0}))
    assert [r["mine"] for r in resumed.history] == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("metrics", [[f1], {"loss": f1}, {"my f1": f1}, {"f1": 0.5}])
def test_names_and_kinds_are_checked(metrics):
    with pytest.raises(DataError, match="metric"):
        make(metrics)


def test_callbacks_go_by_it(task):
    stop = fb.callbacks.EarlyStopping(1, "right", by=2.0)
    assert len(fb.simulate(task, fb.fedavg(), WORK, ROUNDS, callbacks=[stop]).history) == 2
    best = fb.callbacks.KeepBest("mae")
    result = fb.simulate(task, fb.fedavg(), WORK, ROUNDS, callbacks=[best])
    assert best.value == min(r["mae"] for r in result.history)

    class Look:
        def step(self, record, run):
            self.said = float(mae(run.model()(task.test[0]).detach(), task.test[1]))
            assert self.said == pytest.approx(record["mae"], abs=1e-6)

    look = Look()
    fb.simulate(task, fb.feddyn(mu=0.1), WORK, ROUNDS, callbacks=[look])
    assert look.said > 0


@pytest.mark.parametrize("watch", [fb.callbacks.EarlyStopping(metric="f2"), fb.callbacks.KeepBest("f2")])
def test_callbacks_do_not_wait_for_what_never_comes(task, watch):
    with pytest.raises(ConfigError, match=r"unknown metric 'f2'; valid: accuracy,.* f1, loss"):
        fb.simulate(task, fb.fedavg(), WORK, ROUNDS, callbacks=[watch])
    with pytest.raises(ConfigError, match="'f2' is not measured, since nothing is evaluated"):
        fb.simulate(task, fb.fedavg(), WORK, ROUNDS, callbacks=[watch], evaluate_every=None)


def test_callbacks_wait_for_the_next_evaluation_and_for_shares_with_a_value():
    def never(outputs, targets):
        return 0.5 if len(targets) > 12 else float("nan")  # no share has one

    task, watch = make({"odd": never}), fb.callbacks.EarlyStopping(metric="odd_clients")
    every = {"evaluate_every": 3, "evaluate_on": "clients"}
    assert len(fb.simulate(task, fb.fedavg(), WORK, ROUNDS, callbacks=[watch], **every).history) == 4


FILE = """
import fedbraid as fb, torch
torch.manual_seed(0)
x = torch.randn(6, 10, 1, 4, 4)
clients = [(a, (a[:, 0] > 0).long()) for a in x]  # a class a pixel: a loss, and no accuracy
pixels = fb.Task.from_arrays(torch.nn.Conv2d(1, 2, 1), clients, clients[0])
"""


def test_without_an_accuracy_the_loss_is_what_counts(tmp_path, monkeypatch, capsys):
    from fedbraid.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    run = ["run", "mine.py:pixels", "fedavg", "--rounds", "2", "--quiet"]
    assert main([*run, "--patience", "1", "--out", "a"]) == 0
    assert '"metric": "loss"' in (tmp_path / "a/watching.json").read_text()
    assert main([*run, "--target", "0.9"]) == 2
    assert "target=0.9 is a test accuracy, which this task lacks" in capsys.readouterr().err
    assert main([*run, "--patience", "1", "--metric", "accuracy"]) == 2
    assert "unknown metric 'accuracy'; valid: loss, train_loss" in capsys.readouterr().err
    search = ["sweep", "mine.py:pixels", "fedavg", "lr=[0.1, 0.2]", "--method", "grid", "--rounds", "1"]
    assert main([*search, "--jobs", "1", "--prune", "none", "--json"]) == 0


def test_the_bar_shows_it(task):
    from rich.console import Console

    screen = io.StringIO()
    bar = Bar(console=Console(file=screen, force_terminal=True, width=120))
    fb.simulate(task, fb.fedavg(), WORK, ROUNDS, callbacks=[bar])
    assert "f1 0." in screen.getvalue()


def test_compared_searched_and_reported(task, tmp_path):
    entries = {
        "slow": (fb.fedavg(), fb.Work(lr=1e-6, batch=4)),
        "fast": (fb.fedavg(), fb.Work(lr=0.3, batch=4)),
    }
    who = [fb.Entry(name, a, w, ROUNDS) for name, (a, w) in entries.items()]
    found = fb.compare(task, who, seeds=2, out=tmp_path / "c", jobs=1, metric="mae")
    assert found.metric == "mae"
    assert [r["rank"] for r in found.rows] == [2.0, 1.0]
    runs = collect([tmp_path / "c"])
    page = describe(runs)
    assert page["metric"] == "mae"
    assert page["groups"][0]["curves"]["f1"] is not None
    assert "right" in as_csv(runs).splitlines()[0].split(",")
    with pytest.raises(fb.FedbraidError, match="unknown metric 'f2'"):
        fb.compare(task, who, seeds=2, out=tmp_path / "d", metric="f2")


def test_a_search_goes_by_it(task, tmp_path):
    pytest.importorskip("optuna", reason="the extra sweep is not installed")

    def build(settings):
        return fb.Entry("x", fb.fedavg(), fb.Work(lr=settings["lr"], batch=4), ROUNDS)

    plan = fb.sweep.SweepConfig("grid", metric="mae", prune="none", fraction=0.3)
    space = {"lr": fb.sweep.Categorical([1e-6, 0.3])}
    assert fb.sweep.sweep(task, build, space, out=tmp_path / "s", plan=plan, jobs=1).best.settings == {
        "lr": 0.3
    }


def test_torchmetrics_objects():
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    task = make({"f1": torchmetrics.F1Score("multiclass", num_classes=3)})
    assert 0 < fb.simulate(task, fb.fedavg(), WORK, ROUNDS, evaluate_on="clients").last("f1") <= 1


# What is kept of them ---------------------------------------------------------------------------------------


def test_by_client_in_the_folder_the_page_and_the_csv(tmp_path):
    from fedbraid.report import page
    from fedbraid.report.collect import collect
    from fedbraid.report.tables import as_csv
    from fedbraid.run.callbacks import scalars

    task = make({"f1": f1})
    result = fb.simulate(task, fb.fedavg(), WORK, ROUNDS, evaluate_on="clients", out=tmp_path / "run")
    found = collect([tmp_path / "run"])
    (table,) = page.describe(found)["clients"]
    assert [r["accuracy"] for r in table["rows"]] == sorted(r["accuracy"] for r in result.per_client())
    assert (table["by"], table["worst"], table["count"]) == ("accuracy", 1, len(result.per_client()))
    assert table["worst_mean"] == pytest.approx(result.last("accuracy_worst_tenth"))
    assert "Client by client" in page.render(page.describe(found))
    head = as_csv(found).splitlines()[0].split(",")
    names = {"f1", "f1_clients", "f1_worst_tenth", "accuracy_clients", "accuracy_worst_tenth", "loss_clients"}
    assert names <= set(head)
    assert names <= scalars(result.history[-1]).keys()  # which is what trackers are told


def test_a_resumed_run_may_go_by_another_metric(tmp_path, monkeypatch, capsys):
    import json

    from fedbraid.cli import main

    monkeypatch.chdir(tmp_path)
    words = [
        "run",
        "digits(clients=4)",
        "fedavg",
        "--rounds",
        "2",
        "--patience",
        "9",
        "--out",
        "a",
        "--quiet",
    ]
    assert main(words) == 0
    assert main(["resume", "a", "--metric", "loss", "--quiet"]) == 0
    assert json.loads((tmp_path / "a/watching.json").read_text())["metric"] == "loss"
    assert main(["resume", "a", "--metric", "f1", "--quiet"]) == 2
    assert "unknown metric of this run 'f1'" in capsys.readouterr().err
