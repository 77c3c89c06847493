"""Does "auto" plan by declared facts only: the same command, the same plan and the same bits, whatever ran before?"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedbraid as fb
from fedbraid.core.device import available_cores
from fedbraid.engines import planning, select
from fedbraid.engines.choice import COST, EnginePlan, Facts, Machine, choose
from fedbraid.engines.cost_model import CostModel, Model
from fedbraid.engines.engine import Setup
from fedbraid.engines.native_backend import Native
from fedbraid.errors import NativeUnavailable
from fedbraid_native import build
from fedbraid_native.build import compiler

WORK = fb.Work(lr=0.1, batch=5)
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

# Facts -> plan ------------------------------------------------------------------------------------------------

LENET = Model(12, 423_038, 15_002, 0, 61_706)
WIDE = Model(10, 5_120_010, 92_074, 0, 1_204_682)
GRU = Model(3, 12_226_640, 11_216, 160, 163_024)
RESNET18 = Model(65, 556_651_530, 1_975_306, 0, 11_173_962)
RESNET20 = Model(53, 41_214_602, 491_658, 0, 272_474)
LOGISTIC = Model(1, 226, 2, 0, 226)
TWO = Machine(cores=2)


def job(model, batch, steps, cohort, rounds, machine=TWO, **more) -> Facts:
    return Facts(model, batch, steps, cohort, cohort * rounds, machine, **more)


PLANS = {
    "W1, 1 round": (job(LENET, 20, 6, 5, 1), "in_process", "loop"),
    "W1, 16 rounds": (job(LENET, 20, 6, 5, 16), "pool", "loop"),
    "W1, 64 rounds": (job(LENET, 20, 6, 5, 64), "pool", "loop"),
    "W1, 256 rounds": (job(LENET, 20, 6, 5, 256), "in_process", "native"),
    "W1, 64 rounds, eight runs": (job(LENET, 20, 6, 5, 64, runs=8), "in_process", "native"),
    "W1, 256 rounds, no compiler": (job(LENET, 20, 6, 5, 256, replace(TWO, compiler=False)), "pool", "loop"),
    "W1, 256 rounds, no code": (job(LENET, 20, 6, 5, 256, no_native="an odd layer"), "pool", "loop"),
    "W1, 256 rounds, no fork, no code": (
        job(LENET, 20, 6, 5, 256, replace(TWO, forks=False), no_native="an odd layer"), "in_process", "loop"
    ),
    "W1, one core, no code": (job(LENET, 20, 6, 5, 256, Machine(1), no_native="no"), "in_process", "loop"),
    "W1 in a pool, 256 rounds": (job(LENET, 20, 6, 5, 256, engine="pool"), "pool", "native"),
    "W1 in a pool, 4 rounds": (job(LENET, 20, 6, 5, 4, engine="pool"), "pool", "loop"),
    "W1 on Ray, 256 rounds": (job(LENET, 20, 6, 5, 256, engine="ray"), "ray", "native"),
    "W3, 4 rounds": (job(WIDE, 50, 10, 10, 4), "pool", "loop"),
    "W3, 16 rounds": (job(WIDE, 50, 10, 10, 16), "in_process", "native"),
    "W4, 1 round": (job(LOGISTIC, 10, 1, 1000, 1, vmap=True), "in_process", "loop"),
    "W4, 64 rounds": (job(LOGISTIC, 10, 1, 1000, 64, vmap=True), "in_process", "native"),
    "W4, 256 rounds, no compiler": (
        job(LOGISTIC, 10, 1, 1000, 256, replace(TWO, compiler=False), vmap=True), "in_process", "vmap"
    ),
    "W5, 4 rounds": (job(GRU, 32, 4, 4, 4), "pool", "loop"),
    "W5, 64 rounds": (job(GRU, 32, 4, 4, 64), "in_process", "native"),
    "W8, 1 round": (job(RESNET18, 32, 1, 2, 1), "in_process", "loop"),
    "W8, 16 rounds": (job(RESNET18, 32, 1, 2, 16), "in_process", "loop"),
    "W8, 256 rounds": (job(RESNET18, 32, 1, 2, 256), "in_process", "native"),
    "ResNet-20, batch 4": (job(RESNET20, 4, 8, 4, 1024), "pool", "loop"),
    "ResNet-20, batch 32": (job(RESNET20, 32, 2, 4, 1024), "in_process", "native"),
    "ResNet-20, batch 4, narrow vectors": (
        job(RESNET20, 4, 8, 4, 1024, Machine(2, 8, "AVX2")), "in_process", "native"
    ),
    "a wide LSTM": (job(GRU, 10, 4, 2, 1024, wide_recurrent=True), "pool", "loop"),
    "a frozen body": (job(RESNET20, 32, 2, 4, 1024, frozen=True), "pool", "loop"),
    "a few long texts": (job(GRU, 32, 4, 4, 1024, mean_length=0.2), "pool", "loop"),
    "a custom loop": (job(WIDE, 50, 10, 10, 999, plain="the local loop is custom"), "in_process", "loop"),
    "a GPU": (job(WIDE, 50, 10, 10, 999, device="cuda", vmap=True), "in_process", "vmap"),
    "a GPU that vmap does not follow": (job(WIDE, 50, 10, 10, 999, device="cuda"), "in_process", "loop"),
    "single examples": (job(LENET, 20, 6, 5, 4, per_example=True, vmap=True), "in_process", "vmap"),
    "single examples, long": (job(LENET, 20, 6, 5, 256, per_example=True, vmap=True), "in_process", "native"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_for_these_facts(name):
    facts, engine, backend = PLANS[name]
    plan = choose(facts)
    assert (plan.engine, plan.backend) == (engine, backend)
    assert plan.reason
    assert "\n" not in plan.reason


@pytest.mark.parametrize("name", PLANS)
def test_a_longer_run_never_leaves_compiled_code(name):
    facts = PLANS[name][0]
    found = [choose(replace(facts, participations=facts.cohort * 4**k)).backend for k in range(12)]
    assert "native" not in found or set(found[found.index("native") :]) == {"native"}


@pytest.mark.parametrize(
    "changed",
    [{"layer": 10.0}, {"flops": 1e6}, {"activation": 1.0}, {"parameter": 1.0}, {"cell": 1.0}, {"avx2": 1e-6}],
)
def test_what_costs_more_is_compiled_sooner(changed):
    machine = Machine(2, 16, "AVX2" if "avx2" in changed else "AVX512")
    facts = job(GRU, 32, 4, 4, 4, machine)
    assert choose(facts).backend == "loop"
    assert choose(facts, replace(COST, **changed)).backend == "native"


def test_a_reason_says_how_long_and_what_lacks():
    assert choose(job(RESNET18, 32, 1, 2, 256)).reason == (
        "compiled gradients: about 3 min of autograd are worth a compiler"
    )
    assert "no C++ compiler was found" in choose(PLANS["W1, 256 rounds, no compiler"][0]).reason
    assert "an odd layer" in choose(PLANS["W1, 256 rounds, no code"][0]).reason
    assert "batches of 4 fill too little" in choose(PLANS["ResNet-20, batch 4"][0]).reason


# Facts of a job ------------------------------------------------------------------------------------------------


def convolutional(clients=4, stateful=None):
    def build():
        body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))
        return body if stateful is None else stateful(body)

    draw = np.random.default_rng(0)
    each = [
        (draw.normal(size=(10, 1, 8, 8)).astype(np.float32), draw.integers(0, 3, 10)) for _ in range(clients)
    ]
    return fb.Task.from_arrays(build, each)


def setup(task, algorithm=None, rounds=1, cohort=2, work=WORK) -> Setup:
    return Setup(algorithm or fb.fedavg(), task, work, 0, cohort, cohort * rounds)


def test_facts_are_counted_from_the_job():
    facts = planning.facts_of(setup(convolutional(), rounds=7))
    assert (facts.batch, facts.steps, facts.cohort, facts.participations) == (5, 2, 2, 14)
    assert facts.model == Model(4, (2 * 9 + 2) * 36 + 72 * 3 + 3, 3 * 72 + 3, 0, 239)
    assert facts.machine == planning.machine()
    assert not facts.vmap
    assert facts.plain is None


@pytest.mark.parametrize(
    ("layer", "shape", "multiply_adds", "cells"),
    [
        (nn.Conv1d(2, 3, 3), (2, 10), (18 + 3) * 8, 0),
        (nn.Conv3d(1, 2, 2), (1, 4, 4, 4), (16 + 2) * 27, 0),
        (nn.GRU(4, 5, 2, batch_first=True), (7, 4), 7 * (15 * 9 + 30 + 15 * 10 + 30), 14),
        (nn.LSTM(4, 5, batch_first=True), (7, 4), 7 * (20 * 9 + 40), 0),
    ],
)
def test_multiply_adds_follow_the_places_a_weight_is_used_at(layer, shape, multiply_adds, cells):
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            out = self.layer(x)
            return (out[0] if isinstance(out, tuple) else out).flatten(1)

    task = fb.Task.from_arrays(One(), [(torch.randn(6, *shape), torch.zeros(6, dtype=torch.long))] * 2)
    assert (task.summary.multiply_adds, task.summary.cells) == (multiply_adds, cells)


def test_a_frozen_body_a_wide_recurrence_and_a_custom_loop_are_facts():
    x, y = torch.randn(8, 6), torch.randint(3, (8,))

    def head():
        return nn.Sequential(nn.Sequential(nn.Linear(6, 5), nn.Tanh()).requires_grad_(False), nn.Linear(5, 3))

    assert planning.facts_of(setup(fb.Task.from_arrays(head, [(x, y), (x, y)]))).frozen

    class Reads(nn.Module):
        def __init__(self, states):
            super().__init__()
            self.net, self.head = nn.LSTM(8, states, batch_first=True), nn.Linear(states, 3)

        def forward(self, x):
            return self.head(self.net(x)[0][:, -1])

    text = [(torch.randn(10, 4, 8), torch.zeros(10, dtype=torch.long))] * 2
    for states, wide in ((128, False), (256, True)):
        made = fb.Task.from_arrays(lambda states=states: Reads(states), text)
        assert planning.facts_of(setup(made)).wide_recurrent == wide


class Bag(nn.Module):
    """The mean of the words that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 5), nn.Linear(5, 2)

    def forward(self, words, mask):
        seen = mask.unsqueeze(-1).float()
        return self.head((self.words(words) * seen).sum(1) / seen.sum(1))


@pytest.mark.parametrize("longest", [12, 200])
def test_what_cutting_leaves_of_batches_is_their_mean(longest):
    draw = np.random.default_rng(0)
    texts = [[1] * int(n) for n in draw.integers(4, 12, 199)] + [[1] * longest]
    task = fb.Task.from_arrays(Bag, [(texts, [0] * 200)], collate=fb.pad())
    lengths = np.array([len(t) for t in texts])
    drawn = [draw.choice(lengths, 8).max() / longest for _ in range(4000)]
    assert planning.facts_of(setup(task, work=fb.Work(batch=8))).mean_length == pytest.approx(
        np.mean(drawn), abs=0.02
    )


# One command, one answer ---------------------------------------------------------------------------------------


def perceptron(inputs=6):
    draw = np.random.default_rng(1)
    each = [(draw.normal(size=(10, inputs)).astype(np.float32), draw.integers(0, 3, 10)) for _ in range(6)]
    return fb.Task.from_arrays(lambda: nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 3)), each)


CHEAP = replace(COST, compile_base=0.0, compile_layer=0.0, load_base=0.01, load_layer=0.0, processes=0.008)
JOBS = {
    f"{name}/{length}/{engine}": (make, algorithm, length, engine)
    for name, make, algorithm in (
        ("convolution", convolutional, fb.fedavg()), ("perceptron", perceptron, fb.scaffold())
    )
    for length in (1, 6, 40)
    for engine in ("auto", "in_process")
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", JOBS)
def test_a_fresh_and_a_warm_cache_give_the_same_plan_and_bits(name, tmp_path, monkeypatch):
    """Plain, in processes and compiled: compiling is made cheap, so that short runs plan for it."""
    make, algorithm, length, engine = JOBS[name]
    monkeypatch.setattr(planning, "choose", lambda facts: choose(facts, CHEAP))

    def ran() -> tuple[str, str | None, torch.Tensor]:
        result = fb.simulate(make(), algorithm, WORK, fb.rounds(length, clients=4), seed=3, engine=engine)
        return result.engine, result.plan, result.x

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "fresh"))
    first = ran()
    warm = tmp_path / "warm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(warm))
    for rounds in (1, 50):  # what other runs leave behind
        fb.simulate(make(), algorithm, WORK, fb.rounds(rounds, clients=4), seed=1, engine="auto")
    Native(make())
    again = ran()
    assert again[:2] == first[:2]
    assert torch.equal(again[2], first[2])


def test_the_jobs_above_take_all_kinds_of_plans(monkeypatch):
    kinds = {
        (plan.engine, plan.backend)
        for make, algorithm, length, engine in JOBS.values()
        for plan in [choose(planning.facts_of(setup(make(), algorithm, length, 4), engine), CHEAP)]
    }
    expected = {("in_process", "loop"), ("in_process", "native")} | (
        {("pool", "loop")} if available_cores() > 1 else set()
    )
    assert kinds >= expected - ({("in_process", "native")} if compiler() is None else set())


@needs_compiler
def test_a_resumed_run_keeps_the_plan_that_it_began_with(tmp_path, monkeypatch):
    out, runs = tmp_path / "run", fb.rounds(4, clients=2)

    class Stop:
        def step(self, record, run):
            return record["step"] == 2

    for engine in ("auto", "in_process"):
        fb.simulate(
            convolutional(), fb.fedavg(), WORK, runs, engine=engine, out=out / engine, callbacks=[Stop()]
        )
        began = json.loads((out / engine / "run.json").read_text())
        assert "backend='loop'" in began["engine"]
        assert began["plan"].startswith("plain autograd: the run takes about")
        with monkeypatch.context() as patch:  # now everything would be compiled
            patch.setattr(planning, "choose", lambda facts: EnginePlan("in_process", "native", "because"))
            ended = fb.simulate(convolutional(), fb.fedavg(), WORK, runs, engine=engine, out=out / engine)
        assert ended.engine == began["engine"]
        assert ended.plan == began["plan"]


@needs_compiler
@pytest.mark.parametrize("asked", ["auto", "in_process", "pool(workers=2)"])
def test_where_compiling_fails_the_run_says_so_and_goes_on(asked, monkeypatch, caplog, tmp_path):
    def fails(*_, **__):
        raise NativeUnavailable("the compiler is out of sorts")

    monkeypatch.setattr(planning, "choose", lambda facts: choose(facts, CHEAP))
    monkeypatch.setattr(
        planning, "Native", type("Failing", (), {"supports": lambda *_: None, "__new__": fails})
    )
    ran = fb.simulate(
        convolutional(), fb.fedavg(), WORK, fb.rounds(40, clients=2), engine=asked, out=tmp_path / "r"
    )
    assert "backend='loop'" in ran.engine
    recorded = json.loads((tmp_path / "r" / "run.json").read_text())
    assert recorded["engine"] == ran.engine
    assert "compiled gradients failed: the compiler is out of sorts" in recorded["plan"]
    assert "plain autograd trains, because compiled gradients failed" in caplog.text


@needs_compiler
@pytest.mark.parametrize("room", [600, 100_000])
def test_a_full_disk_leaves_the_run_without_compiled_code(room, tmp_path):
    """No file may grow beyond `room` bytes: neither the source nor the library fits, and plain autograd trains."""
    probe = f"""
import resource, fedbraid as fb
from dataclasses import replace
from fedbraid.engines import choice, planning
resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))
cheap = replace(choice.COST, compile_base=0.0, compile_layer=0.0, load_base=0.0, load_layer=0.0)
planning.choose = lambda facts: choice.choose(facts, cheap)
task = fb.tasks.load("digits", clients=20)
run = lambda engine: fb.simulate(task, fb.fedavg(), fb.Work(lr=0.1, epochs=20), fb.rounds(4, clients=5), engine=engine)
assert "backend='loop'" in run("auto").engine
try:
    run("in_process(backend='native')")
except fb.FedbraidError as error:
    assert "cannot be written" in str(error), error
else:
    raise AssertionError("compiled all the same")
"""
    empty = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=600, env=empty)


def test_without_a_compiler_everything_still_runs(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    long = setup(convolutional(), rounds=10**6)
    plan, compiled = planning.settle(long, planning.facts_of(long))
    assert plan.backend == "loop"
    assert "no C++ compiler was found" in plan.reason
    assert compiled is None
    with pytest.raises(fb.errors.EngineError, match="no C\\+\\+ compiler"):
        fb.simulate(
            convolutional(), fb.fedavg(), WORK, fb.rounds(1, clients=2), engine="in_process(backend='native')"
        )


def test_a_system_that_hides_its_cores_forks_and_proc(monkeypatch, blobs):
    """As macOS and Windows do: the engines run, and what needs fork says so."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert available_cores() == (os.cpu_count() or 1)
    with fb.workers.WorkerPool(lambda task, ask: task, None) as pool:
        assert pool.count == available_cores()
    monkeypatch.setattr(
        build.Path, "read_text", lambda path, *a, **k: (_ for _ in ()).throw(FileNotFoundError(str(path)))
    )
    build._processor.cache_clear()
    try:
        assert build.lanes() == 8
        assert build.cpu_model()[1] == ""
    finally:
        build._processor.cache_clear()
    monkeypatch.undo()
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    long = setup(convolutional(), rounds=10**6)
    assert choose(replace(planning.facts_of(long), no_native="no")).engine == "in_process"
    with pytest.raises(fb.errors.ConfigError, match="fork"):
        fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(1, clients=2), engine="pool(workers=2)")
    assert fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(1, clients=2)).history


def test_the_compilers_flag_for_this_processor_is_one_that_it_knows():
    assert build.tuned_for("x86_64") == "-march=native"
    assert build.tuned_for("arm64") == build.tuned_for("aarch64") == "-mcpu=native"
    assert build.tuned_for(platform.machine()) in build.FLAGS


# vmap is compared with the loop --------------------------------------------------------------------------------


class Counts(nn.Module):
    """A module with Python state: its outputs shrink each time that it is called."""

    def __init__(self, body):
        super().__init__()
        self.body, self.calls = body, 0

    def forward(self, x):
        self.calls += 1
        return self.body(x) / self.calls


class Branches(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        out = self.body(x)
        return out if out.sum() > 0 else 2 * out


class Prints(Branches):
    def forward(self, x):
        return self.body(x) * float(x.mean())


@pytest.mark.parametrize("module", [Counts, Branches, Prints])
@pytest.mark.parametrize("engine", ["in_process(backend='vmap')", "pool(workers=2, backend='vmap')"])
def test_vmap_is_refused_where_it_would_be_wrong(module, engine):
    with pytest.raises(fb.errors.ConfigError, match=r"vmap cannot follow|keeps state") as refused:
        fb.simulate(convolutional(stateful=module), fb.fedavg(), WORK, fb.rounds(1, clients=2), engine=engine)
    assert "use backend='loop'" in str(refused.value)


def test_vmap_runs_where_it_agrees():
    ran = fb.simulate(
        convolutional(), fb.fedavg(), WORK, fb.rounds(1, clients=2), engine="in_process(backend='vmap')"
    )
    assert "backend='vmap'" in ran.engine


# Compiled libraries are checked before they are loaded ---------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("damage", ["a flipped bit", "cut short", "empty", "no checksum", "another checksum"])
def test_a_damaged_library_is_compiled_again(damage, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = 'extern "C" int fedbraid_answer() { return 42; }\n'
    assert build.library(source).fedbraid_answer() == 42
    (so,) = (tmp_path / "fedbraid").glob("*.so")
    (checksum,) = (tmp_path / "fedbraid").glob("*.sum")
    good, good_sum = so.read_bytes(), checksum.read_text()
    so.unlink()  # so that what is loaded above stays as it was
    match damage:
        case "a flipped bit":
            so.write_bytes(good[:100] + bytes([good[100] ^ 4]) + good[101:])
        case "cut short":
            so.write_bytes(good[: len(good) // 2])
        case "empty":
            so.write_bytes(b"")
        case "no checksum":
            so.write_bytes(good)
            checksum.unlink()
        case _:
            so.write_bytes(good)
            checksum.write_text(good_sum[::-1])
    so.chmod(0o700)
    built = []
    compiles = build._compile
    monkeypatch.setattr(build, "_compile", lambda *args: built.append(1) or compiles(*args))
    assert build.library(source).fedbraid_answer() == 42
    assert len(built) == 1
    build.library(source)
    assert len(built) == 1
    assert build._is_intact(so)


@needs_compiler
def test_what_is_no_library_for_this_machine_is_compiled_again(tmp_path, monkeypatch):
    """Its bytes are those that were written, and yet it does not load."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = 'extern "C" int fedbraid_other() { return 7; }\n'
    path = build._path(compiler(), build.FLAGS, source)
    path.write_bytes(b"not a library")
    path.chmod(0o700)
    path.with_suffix(".sum").write_text(build._checksum(path))
    assert build.library(source).fedbraid_other() == 7


# What is recorded ----------------------------------------------------------------------------------------------


def test_the_engine_that_ran_and_why_are_in_run_json(blobs, tmp_path):
    ran = fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(2, clients=2), out=tmp_path / "run")
    said = json.loads((tmp_path / "run" / "run.json").read_text())
    assert said["engine"] == ran.engine == "in_process(block=None, backend='loop', threads=None)"
    assert said["plan"] == ran.plan
    fixed = fb.simulate(
        blobs, fb.fedavg(), WORK, fb.rounds(2, clients=2), engine="in_process(backend='loop')"
    )
    assert fixed.plan is None


def test_an_engine_is_selected_by_text_or_object(blobs):
    for asked in ("pool(workers=1)", fb.engines.pool(1), "in_process", "ray(workers=1)"):
        engine = select(asked, setup(blobs))
        assert hasattr(engine, "train")
    with pytest.raises(fb.errors.ConfigError, match="engine 'pol'"):
        select("pol", setup(blobs))
    with pytest.raises(fb.errors.ConfigError, match="runs no clients"):
        select(object(), setup(blobs))


class Named(nn.Module):
    """A part that gives a dict, another that gives nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.silent = Chunks(), Silent()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        self.silent(x)
        return self.head(self.body(x)["hidden"])


class Chunks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.fc = nn.Parameter(torch.ones(4)), nn.Linear(5, 4)

    def forward(self, x):
        return {"hidden": self.fc(x) * self.scale, "size": 4}


class Silent(nn.Module):
    def forward(self, x):
        return None


def test_a_part_of_the_model_may_give_anything():
    x, y = torch.randn(8, 5), torch.randint(3, (8,))
    task = fb.Task.from_arrays(Named, [(x, y), (x, y)])
    assert task.summary.multiply_adds == 4 + (20 + 4) + (12 + 3)
    assert len(fb.simulate(task, fb.fedavg(), fb.Work(batch=4), fb.rounds(1, clients=2)).history) == 1


def test_the_cost_model_names_a_unit_for_each_constant():
    source = Path(sys.modules[CostModel.__module__].__file__).read_text()
    body = source.split("class CostModel")[1].split("def arithmetic")[0]
    lines = [line for line in body.splitlines() if ": float" in line or ": int" in line]
    assert len(lines) == len(CostModel.__dataclass_fields__)
    assert all("#" in line for line in lines)
