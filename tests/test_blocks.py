"""The same numbers for block 1 and block 64, for every backend and in a pool, with equal and unequal steps?"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from oracles import Problem

import fedbraid as fb
from fedbraid.algorithms import BUILDERS, WRAPPERS

q = fb.codecs

ALGORITHMS = {
    "fedavg": fb.fedavg(),
    "fedavgm": fb.fedavgm(),
    "fedprox": fb.fedprox(mu=0.3),
    "fednova": fb.fednova(),
    "fedadagrad": fb.fedadagrad(lr=0.05),
    "fedadam": fb.fedadam(lr=0.05),
    "fedyogi": fb.fedyogi(lr=0.05),
    "fedadabelief": fb.fedadabelief(lr=0.05),
    "fedlamb": fb.fedlamb(lr=0.05),
    "fedvarp": fb.fedvarp(),
    "mifa": fb.mifa(),
    "cluster_fedvarp": fb.cluster_fedvarp(3),
    "fedadavr": fb.fedadavr("lamb", lr=0.05),
    "fedadavr fp16": fb.fedadavr("sgd", lr=1.0, memory="fp16"),
    "scaffold": fb.scaffold(),
    "scaffold_m": fb.scaffold_m(),
    "feddyn": fb.feddyn(mu=0.2),
    "feddyn, progressive": fb.feddyn(mu=0.2, weights="progressive"),
    "adabest": fb.adabest(mu=0.2),
    "fedgbo": fb.fedgbo("adam", eps=0.05),
    "mimelite": fb.mimelite("rmsprop", eps=0.05),
    "mfl": fb.mfl("adam", eps=0.05),
    "ghbm": fb.ghbm(tau=2),
    "ca2fl": fb.ca2fl(),
    "ace": fb.ace(limit=2),
    "fadas": fb.fadas(lr=0.05, limit=1),
    "scallion": fb.scallion(alpha=0.5),
    "ditto": fb.ditto(lam=0.5),
    "pfedme": fb.pfedme(lam=3.0, rate=0.1, steps=2),
    "fedpaq": fb.fedpaq(q.uniform(8)),
    "fedef": fb.fedef(q.topk(0.3)),
    "fedbuff": fb.fedbuff(momentum=0.3),
    "fedasync": fb.fedasync(form="mixing", lr=0.7),
    "qafel": fb.qafel(up=q.qsgd(8), down=q.qsgd(8)),
    "fedshift": fb.fedshift(fb.fedpaq(q.mixed(q.of_weights(q.uniform(8)), share=0.5))),
    "with_codecs": fb.with_codecs(fb.scaffold(), up=q.fp16(), down=q.int8()),
    "error_feedback": fb.error_feedback(fb.with_codecs(fb.scaffold(), up=q.topk(0.3))),
    "attack": fb.attack(fb.fedavg(), "ipm", clients=[1], eps=2.0),
    "robust": fb.robust(fb.fedvarp(), "median"),
    "secure": fb.secure(fb.fedavg(), range=4.0),
    "hidden_state": fb.hidden_state(fb.with_codecs(fb.feddyn(), down=q.int8())),
}
ELSEWHERE = {
    "fedper",
    "fedrep",
    "feddf",
    "local_only",
    "private",
    "exact_lora",
}  # which have tests of their own
ALGORITHMS |= {
    name: build() for name, build in BUILDERS.items() if name not in ALGORITHMS and name not in ELSEWHERE
}

WORKS = {
    "equal": fb.Work(lr=0.2, steps=3, batch=None),
    "equal in small batches": fb.Work(lr=0.2, steps=4, batch=3, momentum=0.5),
    "unequal": fb.Work(lr=0.2, epochs=2, batch=3, momentum=0.5, lr_decay=0.9),
    "fill": fb.Work(lr=0.2, epochs=1, batch=3, last="fill"),
    "drop": fb.Work(lr=0.2, epochs=1, batch=3, last="drop", clip=0.5, weight_decay=0.1),
}

ONE, MANY = fb.engines.in_process(block=1, backend="vmap"), fb.engines.in_process(block=64, backend="vmap")
LOOP, LOOPS = fb.engines.in_process(block=1, backend="loop"), fb.engines.in_process(block=5, backend="loop")
POOL = fb.engines.pool(workers=2, backend="vmap", block=2)
SYNC = fb.rounds(3, clients=5)
ASYNC = fb.buffered(5, buffer=3, concurrency=5, arrivals="closed")

problem = cache(Problem)


def run(name, work, engine, schedule=SYNC):
    task = problem().task
    return fb.simulate(
        task, ALGORITHMS[name], WORKS[work], schedule, seed=7, engine=engine, evaluate_every=None
    )


@cache
def base(name, work, schedule=SYNC):
    """One client after the other."""
    return run(name, work, ONE, schedule)


def same(a, b):
    """Models within rounding; everything that is counted, exactly."""
    assert np.abs(b.x.numpy() - problem().x0).max() > 0.02
    np.testing.assert_allclose(a.x, b.x, rtol=0, atol=1e-5)
    for one, two in zip(a.history, b.history, strict=True):
        for key in ("clients", "bytes_up", "bytes_down", "time", "up", "down"):
            assert one[key] == two[key]
        assert one["lr"] == pytest.approx(two["lr"], rel=1e-12)
        assert one["train_loss"] == pytest.approx(two["train_loss"], abs=1e-5)


def test_every_wrapper_is_here():
    assert WRAPPERS.keys() - ELSEWHERE <= ALGORITHMS.keys()


@pytest.mark.parametrize("work", ["equal", "unequal"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_blocks_agree_and_repeat_themselves_to_the_bit(name, work):
    many = run(name, work, MANY)
    same(many, base(name, work))
    assert torch.equal(many.x, run(name, work, MANY).x)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_plain_autograd_agrees(name):
    same(run(name, "unequal", LOOP), base(name, "unequal"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_pool_agrees(name):
    same(run(name, "unequal", POOL), base(name, "unequal"))


@pytest.mark.parametrize("work", ["equal in small batches", "fill", "drop"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "mfl", "mimelite"])
def test_batches_do_not_depend_on_the_block(name, work):
    same(run(name, work, MANY), base(name, work))
    same(run(name, work, LOOPS), base(name, work))


@pytest.mark.parametrize("name", ["fedbuff", "qafel", "scaffold", "adabest", "fedadavr", "fedef", "fedgbo"])
@pytest.mark.parametrize("engine", [MANY, LOOP, POOL], ids=["many", "loop", "pool"])
def test_blocks_agree_without_rounds(name, engine):
    same(run(name, "unequal", engine, ASYNC), base(name, "unequal", ASYNC))


@pytest.mark.parametrize("engine", [LOOP, POOL, fb.engines.in_process()], ids=["loop", "pool", "auto"])
def test_other_engines_repeat_themselves_to_the_bit(engine):
    assert torch.equal(run("scaffold", "unequal", engine).x, run("scaffold", "unequal", engine).x)


def test_another_seed_is_another_run():
    work = WORKS["unequal"]
    runs = [fb.simulate(problem().task, fb.fedavg(), work, SYNC, seed=seed, engine=MANY) for seed in (0, 1)]
    assert not torch.equal(runs[0].x, runs[1].x)
    assert runs[0].history[0]["clients"] != runs[1].history[0]["clients"]


def test_an_epoch_uses_every_sample_once_and_a_small_client_trains_too():
    """With a linear loss the local move is the sum over batches of their mean gradients, in any order."""
    a = np.arange(1, 8, dtype=np.float32)[:, None]
    task = fb.Task.from_arrays(
        torch.nn.Linear(1, 1, bias=False),
        [(a, a[:, 0]), (a[:2], a[:2, 0])],
        loss=lambda out, t: out.squeeze(-1),
    )
    for engine in (ONE, MANY, LOOP):
        work = fb.Work(lr=1.0, epochs=1, batch=1)
        result = fb.simulate(
            task, fb.fedavg(), work, fb.rounds(1, clients=[[0]]), engine=engine, evaluate_every=None
        )
        assert float(task.initial(0)[0] - result.x[0]) == pytest.approx(28.0, rel=1e-5)
        work = fb.Work(lr=1.0, epochs=2, batch=5)  # the other client has fewer samples than a batch
        result = fb.simulate(
            task, fb.fedavg(), work, fb.rounds(1, clients=[[1]]), engine=engine, evaluate_every=None
        )
        assert float(task.initial(0)[0] - result.x[0]) == pytest.approx(3.0, rel=1e-5)
