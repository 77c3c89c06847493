"""Does everything that cannot run say so in one sentence, with the value and the remedy, and leave runs alone?"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sqlite3
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import fedbraid as fb
from fedbraid.algorithms import BUILDERS
from fedbraid.algorithms.registry import algorithm_from
from fedbraid.errors import ConfigError, DataError, Diverged, EngineError, FedbraidError, RunError, reading
from fedbraid.parse import evaluate

WORK = fb.Work(lr=0.1, batch=8)
NAN, INF = float("nan"), float("inf")

LOOP = "in_process(backend='loop')"


def pair(n=4, width=5, dtype=np.float32):
    draw = np.random.default_rng(n)
    return draw.normal(size=(n, width)).astype(dtype), draw.integers(0, 3, n)


def spoiled(value):
    x, y = pair()
    x[2, 1] = value
    return x, y


def task(model=None, clients=None, **options):
    return fb.Task.from_arrays(
        model or nn.Linear(5, 3), [pair(), pair(6)] if clients is None else clients, **options
    )


class Fails(nn.Module):
    """A model that fails when it trains on a batch that is not the trial's."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(5, 3)

    def forward(self, x):
        if self.training and len(x) > 2:
            raise ValueError("boom")
        return self.line(x)


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


DATA = {
    "no clients": (lambda: task(clients=[]), "no clients were given; pass at least one"),
    "empty client": (lambda: task(clients=[pair(), pair(0)]), "client 1 has no samples; leave it out"),
    "empty test": (lambda: task(test=pair(0)), "the test set has no samples"),
    "label too large": (lambda: task(nn.Linear(5, 2)), "client 0 has the label 2, .* 2 outputs run from 0 to 1; renumber"),
    "label below zero": (
        lambda: task(clients=[(pair()[0], np.array([0, 1, -1, 2]))]),
        "client 0 has the label -1, .* run from 0 to 2",
    ),
    "test label": (lambda: task(test=(pair()[0], np.array([0, 1, 7, 2]))), "the test set has the label 7"),
    "float labels": (lambda: task(clients=[(pair()[0], pair()[0][:, 0])]), "cross_entropy needs integer class numbers"),
    "nan": (lambda: task(clients=[pair(), spoiled(NAN)]), "client 1 has NaN or infinity in its inputs; clean"),
    "infinity": (lambda: task(clients=[spoiled(INF)]), "client 0 has NaN or infinity"),
    "nan in test": (lambda: task(test=spoiled(NAN)), "the test set has NaN"),
    "nan in targets": (
        lambda: task(nn.Linear(5, 1), [(pair()[0], np.array([1, NAN, 0, 0]))], loss="mse"),
        "client 0 has NaN or infinity in its targets",
    ),
    "shapes": (lambda: task(clients=[pair(), pair(4, 6)]), r"client 1 holds samples of shape \(6,\).*client 0 of shape \(5,\)"),
    "lengths": (lambda: task(clients=[(pair(4)[0], pair(6)[1])]), r"client 0 has inputs of shape \(4, 5\) but targets .*\(6,\)"),
    "no pair": (lambda: task(clients=[pair()[0]]), r"client 0 must be an \(inputs, targets\) pair"),
    "ragged": (lambda: task(clients=[([[1.0], [1.0, 2.0]], [0, 1])]), "client 0 does not turn into tensors"),
    "words": (lambda: task(clients=[(["a", "b"], [0, 1])]), "client 0 does not turn into tensors"),
    "forward": (lambda: task(nn.Linear(7, 3)), r"forward pass fails on two samples of shape \(5,\).*make model and data fit"),
    "keyword": (lambda: task(clients=[({"x": pair()[0]}, pair()[1])]), r"shape \{'x': \(5,\).*called by keywords.*forward="),
    "bytes": (lambda: task(clients=[pair(dtype=np.uint8)]), r"forward pass fails .*\(torch.uint8\).*give images as float32"),
    "inputs in a list": (
        lambda: task(clients=[([torch.zeros(3, 5), torch.zeros(3, 2)], [0, 1, 1])]), "give a tuple or a dict for several inputs",
    ),
    "forward gives a pair": (lambda: task(Pair(5, 3)), "the model gives a tuple; its forward must return one tensor or have .logits"),
    "mean loss": (
        lambda: task(loss=lambda out, y: nn.functional.cross_entropy(out, y)),
        r"gave shape \(\) for two samples; it must give one number per example",
    ),
    "mean loss in a vector": (
        lambda: task(loss=lambda out, y: nn.functional.cross_entropy(out, y).reshape(1)),
        r"gave shape \(1,\) for two samples",
    ),
    "loss as a float": (lambda: task(loss=lambda out, y: 1.0), "gave a float for two samples"),
    "failing loss": (lambda: task(loss=lambda out, y: out @ y), "the loss fails on outputs"),
    "unknown loss": (lambda: task(loss="cross_entrpy"), "unknown loss 'cross_entrpy'; did you mean 'cross_entropy'"),
    "no loss": (lambda: task(loss=None), "unknown loss 'None'"),
    "no model": (lambda: task(lambda: 3), "the model is a int; pass a torch.nn.Module"),
    "no model at all": (lambda: task("lenet"), "the model is a str; pass a torch.nn.Module"),
    "no rows": (lambda: fb.Task.from_table(nn.Linear(5, 3), *pair(), []), "no clients were given"),
    "rows outside": (
        lambda: fb.Task.from_table(nn.Linear(5, 3), *pair(), [np.array([0]), np.array([4])]),
        "row 4 of a table of 4; use rows 0 to 3",
    ),
    "rows below zero": (lambda: fb.Task.from_table(nn.Linear(5, 3), *pair(), [np.array([-1])]), "row -1 of a table"),
    "offsets": (lambda: fb.Task.from_table(nn.Linear(5, 3), *pair(), torch.arange(4)), "offsets must run from 0 to the 4"),
    "empty data set": (lambda: fb.Task.from_datasets(nn.Linear(5, 3), [[]]), "client 0 has no samples"),
}  # fmt: skip


@pytest.mark.parametrize("case", DATA)
def test_data_that_cannot_be_trained_on(case):
    make, said = DATA[case]
    with pytest.raises(FedbraidError, match=f"(?s){said}") as refusal:
        make()
    assert isinstance(refusal.value, DataError | ConfigError)


SETTINGS = {
    **{f"Work({k}={v})": (fb.Work, {k: v}) for k in ("lr", "lr_decay", "clip") for v in (0, -1, NAN, INF, "0.1")},
    **{f"Work({k}={v})": (fb.Work, {k: v}) for k in ("epochs", "steps", "batch") for v in (0, -1, 1.5, True, "2")},
    **{f"Work(momentum={v})": (fb.Work, {"momentum": v}) for v in (-0.1, 1.0, NAN, None)},
    **{f"Work(weight_decay={v})": (fb.Work, {"weight_decay": v}) for v in (-0.1, NAN, INF)},
    "Work(epochs, steps)": (fb.Work, {"epochs": 1, "steps": 2}),
    "Work(last)": (fb.Work, {"last": "kep"}),
    **{f"rounds({v})": (fb.rounds, {"steps": v}) for v in (0, -3, 2.5, None)},
    **{f"rounds(clients={v})": (fb.rounds, {"steps": 2, "clients": v}) for v in (0, -1, 0.0, 1.5, NAN, "all", None, [1, 2], [[0], []])},
    "rounds(over)": (fb.rounds, {"steps": 2, "over_select": 0.5}),
    "rounds(timeout)": (fb.rounds, {"steps": 2, "timeout": 0}),
    "rounds(durations)": (fb.rounds, {"steps": 2, "durations": 3.0}),
    **{f"buffered({k}={v})": (fb.buffered, {"steps": 2, k: v}) for k in ("buffer", "concurrency") for v in (0, -1, 2.5)},
    "buffered(steps)": (fb.buffered, {"steps": 0}),
    "buffered(arrivals)": (fb.buffered, {"steps": 2, "arrivals": "poison"}),
    "buffered(bandwidth)": (fb.buffered, {"steps": 2, "bandwidth": 10}),
    "immediate(concurrency)": (fb.immediate, {"steps": 2, "concurrency": 0}),
    **{f"{e.__name__}({k})": (e, {k: v}) for e, k, v in (
        (fb.engines.in_process, "block", 0), (fb.engines.in_process, "threads", -1), (fb.engines.pool, "workers", 0),
        (fb.engines.pool, "block", -2),
    )},
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_run(case):
    make, given = SETTINGS[case]
    with pytest.raises(ConfigError) as refusal:
        make(**given)
    assert _sentence(refusal.value)


def _sentence(error):
    """One short piece of text that says what to do: 'use', 'give' or the like."""
    text = str(error)
    return (
        "\n" not in text
        and len(text) < 400
        and any(w in text for w in ("use ", "give ", "did you mean", "known:", "needs", " must be "))
    )


NUMBERS = {
    "lr": (0, -1, NAN, INF, "0.1", None),
    "mu": (-1, NAN, INF, "x"),
    "eps": (0, -1, NAN),
    "weight_decay": (-1, NAN),
}
NUMBERS |= dict.fromkeys(("beta", "beta1", "beta2", "momentum"), (-0.1, 1.1, NAN, "x"))


def hostile_numbers():
    import inspect

    for name, build in BUILDERS.items():
        for key in inspect.signature(build).parameters:
            for value in NUMBERS.get(key, ()):
                yield pytest.param(name, key, value, id=f"{name}({key}={value!r})")


@pytest.mark.parametrize(("name", "key", "value"), list(hostile_numbers()))
def test_builders_refuse_numbers_that_cannot_work(name, key, value):
    needs = {
        "cluster_fedvarp": {"clusters": 2},
        "fedpaq": {"codec": fb.codecs.int8()},
        "fedef": {"codec": fb.codecs.int8()},
    }
    given = {**needs.get(name, {}), key: value}
    if name in ("fedgbo", "mimelite", "mfl"):
        given["optimizer"] = "rmsprop" if key in ("beta", "eps") else "adam"
    if name == "adabest" and key == "beta" and value == 1.1:
        value = 2.0
    with pytest.raises(ConfigError) as refusal:
        BUILDERS[name](**given)
    assert key in str(refusal.value)
    assert _sentence(refusal.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fb.fedavg(weights="sample"), "weights must be 'samples' or 'uniform', got 'sample'"),
        (lambda: fb.fedvarp(weights="sample"), "weights must be 'samples' or 'uniform'"),
        (lambda: fb.fedadavr("adm"), "unknown optimizer 'adm'; did you mean 'adam'"),
        (lambda: fb.fedgbo("sgd"), "unknown optimizer 'sgd'; did you mean 'sgdm'"),
        (lambda: fb.fedadavr(optimizer=None), "fedadavr got optimizer=None; give it a name"),
        (lambda: fb.fedadavr(memory="int3"), "unknown memory 'int3'; did you mean"),
        (lambda: fb.fedadavr(normalise="cohrt"), "normalise must be 'cohort' or 'population', got 'cohrt'"),
        (lambda: fb.fedbuff(staleness="sqr"), "unknown staleness 'sqr'; did you mean 'sqrt'"),
        (lambda: fb.fedadam(variant="redi"), "got 'redi'"),
        (lambda: fb.fedpaq("int8"), "fedpaq got codec='int8'; give it a codec"),
        (lambda: fb.with_codecs(fb.fedavg(), up="int8"), "with_codecs got up='int8'"),
        (lambda: fb.with_codecs(fb.fedavg(), down=fb.codecs.of_weights(fb.codecs.int8())), "is for uploads"),
        (lambda: fb.qafel(down=fb.codecs.of_weights(fb.codecs.int8())), "is for uploads"),
        (lambda: fb.fedshift(fb.fedavg), "fedshift got a=.*give it an algorithm, such as fb.fedavg"),
        (lambda: fb.cluster_fedvarp(0), "clusters must be an integer >= 1, got 0"),
        (lambda: fb.mfl("adam", beta=0.9), "adam has no beta=0.9; give beta1 and beta2"),
    ],
)  # fmt: skip
def test_names_that_nobody_knows(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"engine": "in_proces"}, "unknown engine 'in_proces'; did you mean 'in_process'"),
        ({"engine": "in_process(backend='vmp')"}, "unknown backend 'vmp'; did you mean 'vmap'"),
        ({"engine": "pool(wrkers=2)"}, "engine 'pool.*wrkers"),
        ({"engine": "in_process(block=0)"}, "block must be an integer >= 1, got 0"),
        ({"engine": "import os"}, "cannot be read"),
        ({"engine": 7}, "engine=7 runs no clients; use 'auto'"),
        ({"device": "cuda" if not torch.cuda.is_available() else "cuda:99"}, "device='cuda.* cannot compute here .*use device='cpu'"),
        ({"device": "meta"}, "device='meta' cannot compute here"),
        ({"device": "abacus"}, "device='abacus' cannot compute here"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"seed": None}, "seed must be an integer, got None"),
        ({"evaluate_every": 0}, "evaluate_every must be an integer >= 1, got 0"),
        ({"evaluate_on": "client"}, "evaluate_on must be 'test' or 'clients', got 'client'"),
        ({"evaluate_on": "clients"}, "needs local test sets; give client_tests="),
        ({"client_state_storage": "dsk"}, "got 'dsk'"),
        ({"checkpoint_every": -1}, "checkpoint_every must be an integer >= 1, got -1"),
    ],
)  # fmt: skip
def test_options_that_cannot_run(blobs, tmp_path, given, said):
    with pytest.raises(ConfigError, match=said):
        fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(2), out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("swap", [(1, 0, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)])
def test_arguments_in_another_order(blobs, swap):
    given = [blobs, fb.fedavg(), WORK, fb.rounds(2)]
    with pytest.raises(
        ConfigError, match=r"simulate takes \(task, algorithm, work, schedule\); got a .* as "
    ):
        fb.simulate(*[given[i] for i in swap])
    with pytest.raises(ConfigError, match="got a function as Algorithm"):
        fb.simulate(blobs, fb.fedavg, WORK, fb.rounds(2))


def test_cohorts_outside_the_clients(blobs):
    for cohort in ([0, 6], [-1], [1, 1]):
        with pytest.raises(ConfigError, match="is not a set of clients 0 to 5"):
            fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(1, clients=[cohort]))
    assert len(fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(1, clients=999)).history[0]["clients"]) == 6


# Text ------------------------------------------------------------------------------------------------

HOSTILE = [
    "__import__('os').system('touch {0}')", "open('{0}', 'w')", "fedavg(lr=open('{0}', 'w'))", "exec('open(\"{0}\", \"w\")')",
    "(lambda: open('{0}', 'w'))()", "fedavg(lr=(lambda: 1)())", "fedavg().__class__", "fedavg.__globals__['os']",
    "__import__('os').fedavg()", "fedavg().fedavg()", "'x'.fedavg()", "[x for x in (1,)]", "fedavg(**{{'lr': 1}})",
    "fedavg(*[1])", "f'{{open(\"{0}\", \"w\")}}'", "9**9**9**9", "fedavg(lr=1e999)", "fedavg(lr='x')", "fedavg(lr=1j)", "fedavg(lr=True)",
    "fedavg(1, 2, 3, 4)", "fedavg(nonsense=1)", "fedavg(lr:=3)", "fedavg if True else fedprox", "fedavg\x00", "", "   ", "1", "int8()",
    "a" + ".b" * 20000, "1" + "+1" * 20000, "(" * 5000 + ")" * 5000, "-" * 9000 + "1", "[" * 190 + "]" * 190, "fedshift(" * 500 + ")" * 500,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda t: t[:30])
def test_hostile_text_is_refused_and_never_executed(text, tmp_path):
    trap = tmp_path / "executed"
    with pytest.raises(ConfigError) as refusal:
        algorithm_from(text.format(trap) if "{0}" in text else text)
    assert not trap.exists()
    assert len(str(refusal.value)) < 1000


def test_dotted_names_lists_and_tuples_are_read():
    assert algorithm_from("fb.fedpaq(fb.codecs.uniform(4))") == fb.fedpaq(fb.codecs.uniform(4))
    assert evaluate("f((1, [2, -3]), a=None)", {"f": lambda x, a: (x, a)}, "thing") == ((1, [2, -3]), None)


# Folders ----------------------------------------------------------------------------------------------


def test_out_that_cannot_be_a_run_folder(blobs, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    for out, said in (
        (tmp_path / "file", "cannot be written: File exists"),
        (tmp_path / "file" / "below", "cannot be written: Not a directory"),
        ("/proc/nowhere/run", "cannot be written"),
        (tmp_path / "full", "holds other files and no run.json; give out= a new or empty folder"),
    ):
        with pytest.raises(RunError, match=said):
            fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(1), out=out)
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "thesis.tex").read_text() == "mine"
    assert [f.name for f in (tmp_path / "full").iterdir()] == ["thesis.tex"]
    with pytest.raises(RunError, match="is not a run folder"):
        fb.resume(tmp_path / "full")


def test_a_kill_before_run_json_was_whole_does_not_block_the_folder(blobs, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.part").write_text('{"half')
    assert len(fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(1), out=tmp_path / "run").history) == 1


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE state SET data = x'00ff' WHERE id = 1",
        "UPDATE state SET data = '{' WHERE id = 0",
        "UPDATE sent SET id = id + 1",
        "UPDATE records SET sum = sum + 1 WHERE id = 1",
        "DELETE FROM records WHERE id = 0",
        "DELETE FROM sent",
        "DELETE FROM state",
        "DELETE FROM state WHERE id = 1",
        "DROP TABLE sent",
    ],
)
def test_a_damaged_checkpoint_is_named(blobs, tmp_path, damage):
    out = tmp_path / "run"
    fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(2), out=out)
    with sqlite3.connect(out / "state.db") as db:
        db.execute(damage)
    db.close()
    with pytest.raises(RunError, match="start a new run") as refusal:
        fb.resume(out, task=blobs)
    assert str(out) in str(refusal.value)
    with sqlite3.connect(out / "state.db") as db:
        assert (
            db.execute("SELECT COUNT(*) FROM records").fetchone()[0] >= 1
        )  # nothing was made good in silence
    db.close()


DISK = """
import resource, signal, sys
sys.path.insert(0, {tests!r})
import fedbraid as fb
from test_bad_input import big, WORK, PLAN
from fedbraid.errors import RunError
class Full:
    def step(self, record, run):
        if record["step"] == 4:
            size = max(f.stat().st_size for f in run.folder.path.iterdir())
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, size + 1000))
try:
    fb.simulate(big(), fb.scaffold(), WORK, PLAN, engine="in_process(backend='loop')", out={out!r}, callbacks=[Full()])
except RunError as error:
    print(error)
    sys.exit(7)
"""
PLAN = fb.rounds(12, clients=4)


def big():
    draw = np.random.default_rng(0)
    torch.manual_seed(0)
    return fb.Task.from_arrays(
        nn.Linear(300, 3), [(draw.normal(size=(4, 300)), draw.integers(0, 3, 4)) for _ in range(40)]
    )


def test_a_full_disk_leaves_the_last_step(tmp_path):
    from pathlib import Path

    out = tmp_path / "run"
    code = DISK.format(tests=str(Path(__file__).parent), out=str(out))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 7, done.stderr
    assert "free space, then resume: the last committed step is intact" in done.stdout
    assert not done.stderr
    records = [
        json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines() if line.endswith("}")
    ]
    assert 3 <= len(records) < 12
    whole = fb.simulate(big(), fb.scaffold(), WORK, PLAN, engine="in_process(backend='loop')")
    resumed = fb.resume(out, task=big())
    assert torch.equal(resumed.x, whole.x)
    assert len(resumed.history) == 12
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


# Numbers that leave the rails ---------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["in_process(backend='loop')", "pool(workers=2)"])
@pytest.mark.parametrize(
    "algorithm",
    [fb.fedavg(), fb.fedpaq(fb.codecs.int8()), fb.fedef(fb.codecs.topk(0.5)), fb.qafel()],
    ids=lambda a: a.name,
)
def test_divergence_stops_with_the_step_and_keeps_the_one_before(blobs, tmp_path, algorithm, engine):
    work = fb.Work(lr=1e12, steps=3, batch=None, weight_decay=1e-2)
    out = tmp_path / "run"
    with pytest.raises(Diverged, match=r"step \d+.*lower the .*The last checkpoint is intact") as stop:
        fb.simulate(blobs, algorithm, work, fb.rounds(40, clients=3), engine=engine, out=out)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert f"step {len(records) + 1}" in str(stop.value)
    with pytest.raises(Diverged) as again:
        fb.resume(out, task=blobs)
    assert str(again.value) == str(stop.value)
    assert [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] == records


def test_a_model_that_fails_in_a_worker_is_named():
    made = task(Fails, [pair(8), pair(9)])
    with pytest.raises(
        EngineError, match=r"training clients \[\d\] failed in a worker process \(ValueError: boom\); fix"
    ):
        fb.simulate(made, fb.fedavg(), WORK, fb.rounds(2), engine="pool(workers=2)")
    assert not multiprocessing.active_children()
    with pytest.raises(ValueError, match="boom"):
        fb.simulate(made, fb.fedavg(), WORK, fb.rounds(2), engine="in_process")


@pytest.mark.parametrize("kind", [AssertionError, SyntaxError, RecursionError, KeyError, ZeroDivisionError])
def test_whatever_damaged_text_sets_off_is_one_sentence(kind):
    with pytest.raises(RunError, match="is corrupt"), reading("run.json"):
        raise kind("garbled")


# What a first week brings -----------------------------------------------------------------------------------


class TwoParts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 2)

    def forward(self, a, b):
        return self.line(torch.cat([a, b], -1))


def two(n, **other):
    return {"a": np.zeros((n, 2), np.float32), "b": np.zeros((n, 2), np.float32), **other}, np.arange(n) % 2


def without(key, n=3):
    x, y = two(n)
    return {k: v for k, v in x.items() if k != key}, y


def as_items(pair):
    x, y = pair
    return [{**{k: v[i] for k, v in x.items()}, "label": y[i]} for i in range(len(y))]


RAGGED = two(3, b=np.zeros((2, 2), np.float32))
GIVEN = {
    "ragged dict": ([two(3), RAGGED], {}, "client 1 has 3 of input 'a' but 2 of 'b'; give one of each"),
    "ragged rows": (
        [two(3), two(2, b=[[1.0], [1.0, 2.0]])],
        {},
        r"client 1's input 'b' .* differ in length; give collate=",
    ),
    "ragged, collated": (
        [two(3), RAGGED],
        {"collate": fb.pad()},
        "client 1 has 3 samples in one input and fewer",
    ),
    "missing key": ([two(3), without("b")], {}, "client 1 lacks the input 'b', unlike client 0; give all"),
    "missing key, collated": (
        [two(3), without("b")],
        {"collate": fb.pad()},
        "client 1 lacks the input 'b', unlike client 0",
    ),
    "one key more": (
        [two(3), two(3, c=np.zeros(3))],
        {},
        "client 1 has the input 'c', unlike client 0; give all",
    ),
    "test without key": (
        [two(3)],
        {"test": without("b")},
        "the test set lacks the input 'b', unlike the clients; give",
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_dicts_that_do_not_fit_name_client_key_and_remedy(name):
    clients, options, said = GIVEN[name]
    with pytest.raises(DataError, match=said):
        fb.Task.from_arrays(TwoParts, clients, **options)


ITEMS = {
    "a key in some": (as_items(two(1)) + as_items(without("b", 1)), {}, r"client 1 has 'b' in some items, .* same keys"),
    "a key in some, collated": (
        as_items(two(1)) + as_items(without("b", 1)), {"collate": torch.utils.data.default_collate}, r"client 1 has 'b' in some items, .* same keys"
    ),
    "no such column": (as_items(without("b")), {"inputs": ["a", "b"]}, "client 1 has no 'b', only 'a'; see inputs="),
    "no targets": ([{k: v for k, v in i.items() if k != "label"} for i in as_items(two(2))], {}, "client 1 has no targets"),
}  # fmt: skip


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", ITEMS)
def test_datasets_that_do_not_fit_name_client_key_and_remedy(name, lazy):
    odd, options, said = ITEMS[name]
    good = as_items(two(3))
    with pytest.raises(DataError, match=said):
        trained([good, odd, good], lazy=lazy, **options)


def trained(datasets, **options):
    task = fb.Task.from_datasets(TwoParts, datasets, **options)
    return fb.simulate(task, fb.fedavg(), fb.Work(lr=0.1), fb.rounds(1, clients=3), engine=LOOP)


def test_a_lazy_client_of_another_kind_is_named_when_it_is_read(tmp_path):
    good = as_items(two(3))
    for odd, said in (
        (as_items(without("b")), "client 2 lacks the input 'b', unlike the first client"),
        (
            as_items(two(3, b=np.zeros((3, 5), np.float32))),
            r"client 2 holds samples of shape \(5,\) .* as 'b'",
        ),
    ):
        task = fb.Task.from_datasets(TwoParts, [good, good, odd, good], lazy=True)
        schedule = fb.rounds(3, clients=[[0, 1], [1, 3], [0, 2]])
        out = tmp_path / str(len(said))
        with pytest.raises(DataError, match=said):
            fb.simulate(task, fb.fedavg(), fb.Work(lr=0.1), schedule, engine=LOOP, out=out)
        assert len((out / "metrics.jsonl").read_text().splitlines()) == 2  # what ran is kept


def test_a_batch_of_one_under_batchnorm():
    draw = np.random.default_rng(0)
    some = lambda n: (draw.normal(size=(n, 4)).astype(np.float32), np.arange(n) % 2)  # noqa: E731
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    task = fb.Task.from_arrays(model, [some(8), some(9)], buffers="average")
    for engine in (LOOP, "pool(workers=2, backend='loop')"):
        with pytest.raises(
            FedbraidError, match=r"client 1 trains on a batch of one sample.*use Work\(last='fill'\)"
        ):
            fb.simulate(task, fb.fedavg(), fb.Work(lr=0.1, batch=4), fb.rounds(1, clients=2), engine=engine)
    for last in ("fill", "drop"):
        fb.simulate(
            task, fb.fedavg(), fb.Work(lr=0.1, batch=4, last=last), fb.rounds(1, clients=2), engine=LOOP
        )


@pytest.mark.parametrize(
    "url", ["h", "tls://h", "tls://h:port", "tls://h:99999", "tls://[::1:8000", "tls://a b:1", "tls://x\n:1", "nats://h:1"]
)  # fmt: skip
def test_a_brokers_address_that_is_none_is_named(url, tmp_path, capsys):
    from fedbraid.cli import main

    for words in (["node", "--key", str(tmp_path / "k.nk"), url], ["doctor", "--key", "k.nk", "--url", url]):
        assert main(["deploy", *words]) == 2
        assert "must be tls://HOST:PORT" in capsys.readouterr().err
