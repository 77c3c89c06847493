"""At its neutral setting, is each algorithm its base? One table; a new algorithm is a row in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from oracles import SIZES, VMAP, Problem, Trial

import fedbraid as fb

ALL = fb.rounds(5, clients=8)
FEW = fb.rounds(6, clients=3)
ASYNC = fb.buffered(8, buffer=3, concurrency=5, arrivals="closed")
ONE_STEP = fb.Work(lr=0.3, steps=1, batch=None)
PLAIN = fb.Work(lr=0.3, steps=3, batch=None)
MOMENTUM = fb.Work(lr=0.2, epochs=2, batch=4, momentum=0.7, lr_decay=0.9)
MANY = (PLAIN, MOMENTUM)

identity = fb.codecs.identity()
coarse = fb.codecs.uniform(3)


@dataclass
class Row:
    """`algorithm` must visit the same models as `base`; `other`, off its neutral setting, must not."""

    name: str
    algorithm: fb.Algorithm
    base: fb.Algorithm
    other: fb.Algorithm | None = None
    schedules: tuple[Any, ...] = (FEW,)
    works: tuple[fb.Work, ...] = MANY
    exact: bool = False  # to the bit
    tol: float = 2e-6
    sizes: tuple[int, ...] = SIZES


ROWS = [
    Row("fedprox mu=0", fb.fedprox(mu=0), fb.fedavg(), fb.fedprox(mu=0.5)),
    Row("ditto: the common model", fb.ditto(lam=0.5), fb.fedavg(), fb.ditto(lr=0.5), exact=True),
    Row("pfedme, one inner step", fb.pfedme(lam=10.0, steps=1, rate=0.1), fb.fedavg(), fb.pfedme(lam=10.0, steps=3, rate=0.1)),
    Row("fedavgm momentum=0", fb.fedavgm(momentum=0), fb.fedavg(), fb.fedavgm(momentum=0.5), exact=True),
    Row("fednova, equal K", fb.fednova(), fb.fedavg(), works=(PLAIN, replace(PLAIN, momentum=0.7))),
    Row("fednova with unequal K is not fedavg", fb.fednova(weights="uniform"), fb.fednova(weights="uniform"), fb.fedavg(weights="uniform"), works=(MOMENTUM,), exact=True),
    Row("adabest beta=mu=0", fb.adabest(mu=0, beta=0), fb.fedavg(), fb.adabest(mu=0.2, beta=0), exact=True),
    Row("adabest mu=0 keeps no client state", fb.adabest(mu=0, beta=0.7), fb.Algorithm(server=fb.adabest(beta=0.7).server), fb.adabest(mu=0.2, beta=0.7)),
    Row("feddyn mu=0 is its server alone", fb.feddyn(mu=0), fb.Algorithm(server=fb.feddyn().server), fb.feddyn(mu=0.3)),
    Row("feddyn progressive, clients of one size", fb.feddyn(mu=0.3, weights="progressive"), fb.feddyn(mu=0.3, weights="uniform"), schedules=(FEW, ASYNC), sizes=(6,) * 8),
    Row("feddyn progressive, unequal clients, is not feddyn", fb.feddyn(mu=0.3, weights="progressive"), fb.feddyn(mu=0.3, weights="progressive"), fb.feddyn(mu=0.3, weights="uniform"), exact=True),
    Row("scaffold, everybody, one step", fb.scaffold(weights="uniform"), fb.fedavg(weights="uniform"), schedules=(ALL,), works=(ONE_STEP,)),
    Row("scaffold with more steps is not fedavg", fb.scaffold(), fb.scaffold(), fb.fedavg(), exact=True),
    Row("fedvarp, everybody", fb.fedvarp(), fb.fedavg(), schedules=(ALL,)),
    Row("fedvarp, some", fb.fedvarp(), fb.fedvarp(), fb.fedavg(), exact=True),
    Row("mifa, everybody", fb.mifa(), fb.fedavg(), schedules=(ALL,)),
    Row("mifa, some", fb.mifa(), fb.mifa(), fb.fedvarp(), exact=True),
    Row("fedadavr sgd is fedvarp", fb.fedadavr("sgd", lr=0.8), fb.fedvarp(lr=0.8), fb.fedavg(lr=0.8), works=(PLAIN,)),
    Row("fedadavr, everybody: adam on the mean", fb.fedadavr("adam", lr=0.05), fb.fedadam(lr=0.05, beta2=0.999, eps=1e-8, variant="corrected"), fb.fedadam(lr=0.05), schedules=(ALL,)),
    Row("fedadavr, everybody: yogi on the mean", fb.fedadavr("yogi", lr=0.05), fb.fedyogi(lr=0.05, beta2=0.999, eps=1e-8, variant="corrected"), schedules=(ALL,)),
    Row("fedadavr, everybody: adabelief on the mean", fb.fedadavr("adabelief", lr=0.05), fb.fedadabelief(lr=0.05), schedules=(ALL,)),
    Row("fedadavr, everybody: lamb on the mean", fb.fedadavr("lamb", lr=0.05), fb.fedlamb(lr=0.05), fb.fedadavr("adam", lr=0.05), schedules=(ALL,)),
    Row("fedadavr, everybody: population is cohort", fb.fedadavr(normalise="population"), fb.fedadavr(), schedules=(ALL,), works=(PLAIN,), tol=1e-5),
    Row("fedadavr, uniform population with sgd is mifa once all were seen", fb.fedadavr("sgd", lr=1.0, normalise="population"), fb.mifa(), fb.fedadavr("sgd", lr=1.0), schedules=(fb.rounds(4, clients=[range(8), [0, 3], [5, 1, 2], [7, 0]]),), works=(PLAIN,)),
    Row("fedadavr, everybody: adam without memory", fb.fedadam(lr=0.05, beta1=0, beta2=0, eps=1e-12, variant="corrected"), fb.fedadavr("adam", lr=0.05, beta1=0, beta2=0, eps=1e-12), schedules=(ALL,), works=(PLAIN,)),
    Row("cluster_fedvarp, a cluster each", fb.cluster_fedvarp(list(range(8))), fb.fedvarp(), fb.cluster_fedvarp(2)),
    Row("cluster_fedvarp, more clusters than clients", fb.cluster_fedvarp(11), fb.fedvarp(), fb.cluster_fedvarp(3), works=(PLAIN,)),
    Row("fedgbo sgdm beta=0", fb.fedgbo(beta=0), fb.fedavg(weights="uniform"), fb.fedgbo(beta=0.5)),
    Row("mimelite sgdm beta=0", fb.mimelite(beta=0), fb.fedavg(weights="uniform"), fb.mimelite(beta=0.5)),
    Row("mfl sgdm beta=0", fb.mfl(beta=0), fb.fedavg(weights="uniform"), fb.mfl(beta=0.5)),
    Row("fedgbo is mimelite where K=1", fb.fedgbo("adam"), fb.mimelite("adam"), fb.mfl("adam"), works=(ONE_STEP,)),
    Row("mfl sgdm is fedgbo sgdm where K=1", fb.mfl("sgdm"), fb.fedgbo("sgdm"), works=(ONE_STEP,)),
    Row("fedshift, nobody quantised", fb.fedshift(fb.fedavg()), fb.fedavg(), exact=True),
    Row("fedshift, an empty mix", fb.fedshift(fb.with_codecs(fb.fedavg(), up=fb.codecs.mixed(coarse, clients=()))), fb.fedavg(), fb.fedshift(fb.with_codecs(fb.fedavg(), up=fb.codecs.mixed(coarse, share=0.5))), exact=True),
    Row("a mix of nobody", fb.fedpaq(fb.codecs.mixed(coarse, share=0.0)), fb.fedavg(), fb.fedpaq(coarse), exact=True),
    Row("a mix of everybody", fb.fedpaq(fb.codecs.mixed(coarse, share=1.0)), fb.fedpaq(coarse), fb.fedavg(), exact=True),
    Row("fedpaq identity", fb.fedpaq(identity), fb.fedavg(), fb.fedpaq(coarse), exact=True),
    Row("fedef identity", fb.fedef(identity), fb.fedavg(), fb.fedef(coarse), exact=True),
    Row("fedef is fedpaq with error feedback", fb.error_feedback(fb.fedpaq(coarse)), fb.fedef(coarse), fb.fedpaq(coarse), exact=True),
    Row("with_codecs identity", fb.with_codecs(fb.scaffold(), up=identity, down=identity), fb.scaffold(), fb.with_codecs(fb.scaffold(), down=coarse), exact=True),
    Row("codecs of weights, lossless", fb.with_codecs(fb.fedavg(), up=fb.codecs.of_weights(identity)), fb.fedavg()),
    Row("error_feedback identity", fb.error_feedback(fb.scaffold()), fb.scaffold(), exact=True),
    Row("hidden_state identity", fb.hidden_state(fb.fedadam()), fb.fedadam(), fb.hidden_state(fb.with_codecs(fb.fedadam(), down=coarse)), exact=True),
    Row("qafel identity is fedbuff", fb.qafel(up=identity, down=identity), fb.fedbuff(), fb.qafel(), schedules=(ASYNC, FEW), exact=True),
    Row("qafel identity, momentum", fb.qafel(momentum=0.4, staleness="constant", up=identity, down=identity), fb.fedbuff(momentum=0.4, staleness="constant"), fb.fedbuff(momentum=0.4), schedules=(ASYNC,), exact=True),
    Row("qafel is fedbuff through codecs", fb.hidden_state(fb.with_codecs(fb.fedbuff(), up=coarse, down=coarse)), fb.qafel(up=coarse, down=coarse), fb.with_codecs(fb.fedbuff(), up=coarse, down=coarse), schedules=(ASYNC,), exact=True),
    Row("fedbuff in rounds is fedavg", fb.fedbuff(), fb.fedavg(weights="uniform"), fb.fedbuff(momentum=0.5), exact=True),
    Row("fedasync is fedbuff with a buffer of one", fb.fedasync(lr=0.6), fb.fedbuff(lr=0.6), fb.fedasync(lr=0.6, form="mixing"), schedules=(fb.immediate(12, concurrency=4),), exact=True),
    Row("fedasync's two forms agree where nothing is stale", fb.fedasync(lr=0.6, form="mixing"), fb.fedasync(lr=0.6), schedules=(fb.immediate(6, concurrency=1, arrivals="closed"),)),
    Row("fedasync constant ignores age", fb.fedasync(staleness="constant"), fb.fedavg(weights="uniform"), fb.fedasync(), schedules=(fb.immediate(12, concurrency=4),), exact=True),
    Row("ghbm beta=0", fb.ghbm(beta=0), fb.fedavg(), fb.ghbm(tau=2, beta=0.5), exact=True),
    Row("ghbm, no step is tau old", fb.ghbm(tau=50), fb.fedavg(), fb.ghbm(tau=1), exact=True),
    Row("scallion alpha=1 is scaffold", fb.scallion(lr=0.8, weights="uniform"), fb.scaffold(lr=0.8, weights="uniform"), fb.scallion(alpha=0.5, lr=0.8, weights="uniform")),
    Row("ca2fl in rounds is fedvarp", fb.ca2fl(lr=0.8), fb.fedvarp(lr=0.8, weights="uniform"), fb.fedavg(lr=0.8, weights="uniform"), exact=True),
    Row("ace in rounds is mifa", fb.ace(lr=0.8), fb.mifa(lr=0.8, weights="uniform"), fb.ace(1, lr=0.8), exact=True),
    Row("ace with no entry too old", fb.ace(50), fb.ace(), fb.ace(1), schedules=(fb.immediate(12, concurrency=4), FEW), works=(PLAIN,)),
    Row("fadas while v grows is adam without correction", fb.fadas(lr=0.05, beta2=0, eps=1e-3), fb.fadas(lr=0.05, limit=100, beta2=0, eps=1e-3), fb.fedadam(lr=0.05, beta2=0, v0=0, weights="uniform"), exact=True),
    Row("the neutral algorithm is fedavg", fb.Algorithm(), fb.fedavg(), fb.fedavg(lr=0.5), exact=True),
]  # fmt: skip


def models(algorithm, work, schedule, sizes=SIZES):
    """Every model that a run visits."""
    seen, task = Models(), problem(sizes).task
    fb.simulate(task, algorithm, work, schedule, seed=4, evaluate_every=None, callbacks=[seen], engine=VMAP)
    return np.stack(seen.xs)


base_models, problem = cache(models), cache(lambda sizes: Problem(sizes=sizes))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_at_its_neutral_setting_it_is_its_base(row):
    for schedule in row.schedules:
        for work in row.works:
            mine = models(row.algorithm, work, schedule, row.sizes)
            base = base_models(row.base, work, schedule, row.sizes)
            assert np.abs(base[-1] - Trial().p.x0).max() > 0.02
            np.testing.assert_allclose(mine, base, rtol=0, atol=0 if row.exact else row.tol)
    if row.other is not None:
        other = models(row.other, work, schedule, row.sizes)
        assert np.abs(other - base).max() > 1e-4, "the setting makes no difference here"


class Models:
    """Notes the model after every server step."""

    def __init__(self):
        self.xs = []

    def step(self, record, run):
        self.xs.append(run.state.x.numpy().copy())


def test_every_builder_has_a_row_here_or_is_the_base():
    from fedbraid.algorithms import BUILDERS, WRAPPERS

    used = " ".join(f"{r.algorithm.name} {r.base.name} {r.other.name if r.other else ''}" for r in ROWS)
    # an adaptive server has no neutral setting that is plain averaging; test_pseudocode holds it
    missing = {name for name in {**BUILDERS, **WRAPPERS} if f"{name}(" not in used} - {
        "fedadagrad",
        "scaffold_m",
        "private",  # test_private holds it
        "robust",  # test_robust
        "attack",
        "fedper",  # test_personal
        "fedrep",
        "feddf",  # test_way_out
        "local_only",
        "exact_lora",  # test_lora
        "secure",  # test_secure_sum
    }
    assert not missing


# Buffered schedules at their neutral setting are rounds -------------------------------------------------------

EVERY = {
    "fedavg": fb.fedavg(), "fedbuff": fb.fedbuff(), "qafel": fb.qafel(up=identity, down=identity),
    "scaffold": fb.scaffold(), "adabest": fb.adabest(mu=0.2), "feddyn": fb.feddyn(mu=0.2), "fedadavr": fb.fedadavr("lamb", memory="int8"),
    "mfl": fb.mfl("adam"), "fedef": fb.fedef(fb.codecs.topk(0.3)), "fednova": fb.fednova(),
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("duration", [0.0, 1.0])
def test_a_closed_buffer_of_everybody_in_flight_is_rounds(name, duration):
    trial = Trial(seed=4, decay=0.9)
    schedule = fb.buffered(
        6, buffer=3, concurrency=3, arrivals="closed", durations=fb.clock.constant(duration)
    )
    late = trial.run(EVERY[name], schedule)
    assert all("staleness" not in r or r["staleness_max"] == 0 for r in late.history)
    together = trial.run(
        EVERY[name], fb.rounds(6, clients=trial.cohorts, durations=fb.clock.constant(duration))
    )
    assert [r["time"] for r in late.history] == [r["time"] for r in together.history]
    np.testing.assert_allclose(late.x, together.x, rtol=0, atol=2e-6)
    assert np.abs(late.x.numpy() - trial.p.x0).max() > 0.02


def test_qafel_identity_with_a_buffer_of_all_in_flight_is_fedavg():
    trial = Trial(seed=4)
    schedule = fb.buffered(6, buffer=4, concurrency=4, arrivals="closed", durations=fb.clock.constant(0))
    late = trial.run(fb.qafel(up=identity, down=identity), schedule)
    together = trial.run(fb.fedavg(weights="uniform"), fb.rounds(6, clients=trial.cohorts))
    np.testing.assert_allclose(late.x, together.x, rtol=0, atol=2e-6)
