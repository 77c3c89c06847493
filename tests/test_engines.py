"""The same numbers in process and in a pool, the true bytes, and nothing left behind: memory, files, processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch
from torch import nn

import fedbraid as fb
from fedbraid.errors import EngineError
from fedbraid.links.plain import PlainUplink
from fedbraid.links.wire import encode_scalars, pack_message
from fedbraid.workers import WorkerPool

c = fb.codecs
ENGINES = ("in_process(backend='loop')", "in_process(backend='vmap')", "pool(workers=2)")
WORK = fb.Work(lr=0.1, batch=8, epochs=2, momentum=0.5)
ALGORITHMS = [
    fb.fedavg(),
    fb.scaffold(),
    fb.adabest(),
    fb.feddyn(mu=0.2, weights="progressive"),
    fb.mimelite("adam"),
    fb.fedadavr("lamb", memory="int4"),
    fb.fedef(c.int8()),
    fb.hidden_state(fb.with_codecs(fb.feddyn(), up=c.mixed(c.fp16(), share=0.5), down=c.qsgd(6))),
]


@pytest.mark.parametrize(
    "schedule", [fb.rounds(4, clients=4), fb.buffered(5, 2, 4)], ids=["rounds", "buffered"]
)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_the_same_numbers_in_every_engine(blobs, algorithm, schedule):
    runs = [fb.simulate(blobs, algorithm, WORK, schedule, seed=4, engine=e) for e in ENGINES]
    for other in runs[1:]:
        assert torch.allclose(runs[0].x, other.x, atol=1e-5)
        for mine, theirs in zip(runs[0].history, other.history):
            assert mine["clients"] == theirs["clients"]
            assert (mine["bytes_up"], mine["bytes_down"]) == (theirs["bytes_up"], theirs["bytes_down"])
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            assert mine["train_loss"] == pytest.approx(theirs["train_loss"], abs=1e-5)


FOLDED = [
    *ALGORITHMS,
    fb.fednova(),
    fb.fedgbo("adam"),
    fb.fedadavr(held="client"),
    fb.with_codecs(fb.scaffold(), up=c.topk(0.3)),
    fb.secure(fb.fedavg()),
    fb.private(fb.fedavg(), clip=1.0, noise=0.5),
    fb.attack(fb.fedavg(), "alie", share=0.4),
    fb.robust(fb.fedavg(), "median"),
]


@pytest.mark.parametrize(
    ("algorithm", "schedule"),
    [*((a, fb.rounds(3, clients=5)) for a in FOLDED), (fb.scaffold(), fb.rounds(4, clients=5, timeout=2.0))],
    ids=lambda given: getattr(given, "name", ""),
)
def test_no_number_of_workers_changes_a_bit(blobs, algorithm, schedule, monkeypatch):
    """Workers fold their own clients where the gather is a sum; the record says the same too."""
    monkeypatch.setattr("fedbraid.engines.folding.LEAST", -(10**9))  # whatever it saves
    one, *others = (
        fb.simulate(blobs, algorithm, WORK, schedule, seed=4, engine=engine)
        for engine in (
            "in_process(backend='loop')",
            *(f"pool(workers={n}, backend='loop')" for n in (1, 2, 3)),
        )
    )
    for other in others:
        assert torch.equal(one.x, other.x)
        assert one.history == other.history


@pytest.mark.parametrize("folds", [True, False])
def test_a_worker_hands_over_one_accumulator(blobs, folds, monkeypatch):
    """Of a mean there is one from each of two workers, and no upload; memory on the server is given every upload."""
    monkeypatch.setattr("fedbraid.engines.folding.UPLOADS", 2)
    monkeypatch.setattr("fedbraid.engines.folding.LEAST", 0)
    pool, replies, handed = fb.engines.pool(workers=2, backend="loop"), [], []
    train, ask_all = type(pool).train, WorkerPool.ask_all

    def seen(self, orders):
        for reply in train(self, orders):
            replies.append((len(reply.uploads), reply.norms is not None, reply.folded is not None))
            yield reply

    def counted(self, task):
        handed.append(ask_all(self, task))
        return handed[-1]

    monkeypatch.setattr(type(pool), "train", seen)
    monkeypatch.setattr(WorkerPool, "ask_all", counted)
    fb.simulate(blobs, fb.fedavg() if folds else fb.fedvarp(), WORK, fb.rounds(1, clients=6), engine=pool)
    if folds:  # six clients are more than 2 · 2
        assert replies == [(0, True, False)] * (len(replies) - 1) + [(0, True, True)]
        (accumulators,) = handed
        assert len(accumulators) == 2
    else:
        assert replies == [(1, False, False)] * len(replies)
        assert handed == []


def test_sums_of_more_levels_than_lie_in_shared_memory(monkeypatch):
    """Clients whose updates differ by 27 orders of magnitude: the third level goes by word."""
    monkeypatch.setattr("fedbraid.engines.folding.LEAST", -(10**9))  # whatever it saves
    scales = (1e-18, 1e-9, 1.0, 1e9)
    data = [(torch.ones(4, 3) * scale, torch.ones(4, 1)) for scale in scales]
    task = fb.Task.from_arrays(nn.Linear(3, 1, bias=False), data, loss=lambda out, y: out[:, 0])
    runs = [
        fb.simulate(task, fb.fedavg(), fb.Work(lr=1.0, steps=1), fb.rounds(2, clients=4), engine=engine)
        for engine in ("in_process(backend='loop')", "pool(workers=2, backend='loop')")
    ]
    assert torch.equal(runs[0].x, runs[1].x)


@pytest.mark.parametrize("engine", [*ENGINES, "auto", "pool(workers=1)", "pool(workers=3, block=2)"])
def test_repeats_are_identical(blobs, engine):
    runs = [
        fb.simulate(blobs, fb.scaffold(), WORK, fb.rounds(3, clients=4), seed=4, engine=engine)
        for _ in range(2)
    ]
    assert torch.equal(runs[0].x, runs[1].x)
    assert runs[0].history == runs[1].history
    assert runs[0].engine == runs[1].engine
    again = fb.simulate(blobs, fb.scaffold(), WORK, fb.rounds(3, clients=4), seed=4, engine=runs[0].engine)
    assert torch.equal(again.x, runs[0].x)


def test_an_engine_object_can_be_used_again(blobs):
    for engine in (fb.engines.in_process(), fb.engines.pool(2)):
        first = fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(2), engine=engine)
        assert torch.equal(fb.simulate(blobs, fb.fedavg(), WORK, fb.rounds(2), engine=engine).x, first.x)


def test_vmap_is_not_chosen_where_it_cannot_follow():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(5, 3)

        def forward(self, x):
            return self.line(x) if x.sum() > 0 else self.line(-x)

    draw = np.random.default_rng(0)
    data = [(draw.normal(size=(9, 5)), draw.integers(0, 3, 9)) for _ in range(3)]
    result = fb.simulate(fb.Task.from_arrays(Branches, data), fb.fedavg(), WORK, fb.rounds(2))
    assert "loop" in result.engine


# Bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [
        fb.fedavg(),
        fb.fednova(),
        fb.scaffold(),
        fb.fedpaq(c.uniform(4)),
        fb.fedef(c.topk(0.3)),
        fb.with_codecs(fb.scaffold(), up=c.kmeans(3), down=c.int4()),
        fb.fedpaq(c.mixed(c.of_weights(c.qsgd(3)), share=0.5)),
    ],
    ids=lambda a: a.name,
)
def test_bytes_are_the_length_of_the_messages(blobs, monkeypatch, algorithm):
    sent = []

    def watched(up, vectors, memory, who):
        for i, sender in enumerate(who.clients):
            codec, layout = up.codec.for_client(int(sender)), who.layout
            frames = {}
            for name, v in vectors.items():
                value = who.x[0] - v[i] if codec.encodes_weights and name == "delta" else v[i]
                frames[name] = (
                    codec.encode(value, layout, 5) if len(value) == layout.size else encode_scalars(value)
                )
            sent.append(len(pack_message(frames)))
        return true(up, vectors, memory, who)

    true = PlainUplink.send
    monkeypatch.setattr(PlainUplink, "send", watched)
    result = fb.simulate(blobs, algorithm, WORK, fb.rounds(3, clients=4), engine="in_process")
    assert [r["bytes_up"] for r in result.history] == [sum(sent[i : i + 4]) for i in (0, 4, 8)]
    down, names = algorithm.down.codec, list(algorithm.downloads)
    one = {name: down.encode(torch.ones(blobs.layout.size), blobs.layout, 5) for name in names}
    length = len(one["x"]) if names == ["x"] else len(pack_message(one))
    assert [r["bytes_down"] for r in result.history] == [4 * length] * 3


# Workers that die ------------------------------------------------------------------------------------------


class Kill:
    """Kills one worker of a pool as a step begins."""

    def __init__(self, at):
        self.at = at

    def step(self, record, run):
        if record["step"] == self.at:
            os.kill(run.engine.workers_pool.processes[-1].pid, signal.SIGKILL)


def test_a_killed_worker_ends_the_run_and_leaves_it_resumable(blobs, tmp_path):
    algorithm, plan, out = fb.scaffold(), fb.rounds(8, clients=4), tmp_path / "run"
    whole = fb.simulate(blobs, algorithm, WORK, plan, seed=2, engine="pool(workers=2)")
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(
        EngineError, match=r"worker process \d+ died \(killed, perhaps for lack of memory\).*resume the run"
    ):
        fb.simulate(
            blobs, algorithm, WORK, plan, seed=2, engine="pool(workers=2)", out=out, callbacks=[Kill(4)]
        )
    assert not multiprocessing.active_children()
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [p for p in left if p.status() == psutil.STATUS_ZOMBIE or "fork" in p.name()]
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 4
    resumed = fb.resume(out, task=blobs)
    assert torch.equal(resumed.x, whole.x)
    assert resumed.history == whole.history


# Nothing is left behind ---------------------------------------------------------------------------------------


def test_memory_is_flat_over_rounds(blobs, tmp_path):
    process, seen = psutil.Process(), []

    class DivergenceGuard:
        def step(self, record, run):
            if record["step"] in (150, 600):
                gc.collect()
                seen.append(process.memory_info().rss)

    fb.simulate(
        blobs, fb.fedadavr("adam", memory="int8"), fb.Work(lr=0.01, steps=1, batch=4), fb.rounds(600, clients=2),
        engine="in_process", out=tmp_path / "run", callbacks=[DivergenceGuard()], evaluate_every=50,
    )  # fmt: skip
    assert seen[1] - seen[0] < 2 * 2**20


def test_files_threads_and_processes_are_given_back(blobs, tmp_path):
    process = psutil.Process()

    def held():
        gc.collect()
        return process.num_fds(), process.num_threads(), len(process.children(recursive=True))

    def some(where):
        for i, engine in enumerate(("in_process", "pool(workers=2)")):
            out = tmp_path / f"{where}-{i}"
            fb.simulate(blobs, fb.scaffold(), WORK, fb.rounds(2, clients=3), engine=engine, out=out)
            fb.simulate(
                blobs,
                fb.scaffold(),
                WORK,
                fb.rounds(2, clients=3),
                engine=engine,
                client_state_storage="disk",
            )

    some("first")
    before = held()
    for k in range(6):
        some(k)
    assert held() == before


def test_the_pool_needs_no_room_for_files():
    """Its memory is no file: a full disk, or a container's small /dev/shm, does not stop it."""
    probe = """
import resource, torch, fedbraid as fb
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
data = [(torch.ones(4, 300) * k, torch.zeros(4, dtype=torch.long)) for k in range(5)]
task = fb.Task.from_arrays(torch.nn.Linear(300, 2), data, test=data[0])
run = lambda engine: fb.simulate(task, fb.scaffold(), fb.Work(lr=0.1, steps=2), fb.rounds(3, clients=4), engine=engine)
assert torch.equal(run("pool(workers=2, backend='loop')").x, run("in_process(backend='loop')").x)
"""
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=600)


def test_the_pool_shares_no_more_rows_than_a_cohort_needs(blobs):
    engine = fb.engines.pool(workers=2, backend="loop")
    fb.simulate(blobs, fb.fedavg(), fb.Work(lr=0.1), fb.rounds(2, clients=3), engine=engine)
    assert engine.shared.slots == 3
