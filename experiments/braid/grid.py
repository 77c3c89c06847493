"""The braid: memory, adaptive server, 4-bit links with a hidden state and asynchrony together, beside each alone.

Question, written down before any run: with equal devices and equal tuning, does the braid need less simulated time
and fewer uploaded bytes to the target than every strand alone, at no lower final accuracy? And does every braid
without one strand lose on at least one of the three? Paired over seeds; a verdict only where the 95 % interval of
the paired ratio excludes 1.

Scenario A: CIFAR-10 over 250 clients of one class each. Scenario B: Fashion-MNIST on 1,500 phones. Nine settings a
row (three client rates by three of the server), on a seed of their own, judged on clients that do not train; then
five other seeds. A row's seeds appear among the cells once all of its nine settings are done.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fedbraid as fb
from experiments._lib.reproduce import Cell, Claim, Line, tail
from fedbraid.core import rng
from fedbraid.core.algorithm import Algorithm

HERE = Path(__file__).parent
TUNING, SEEDS = 100, (101, 102, 103, 104, 105)
KEEP = (
    "accuracy", "accuracy_worst_tenth", "loss", "time", "bytes_up", "bytes_down", "bytes_broadcast", "flops",
)  # fmt: skip


# Rows -------------------------------------------------------------------------------------------------

LINKS = "hidden_state(with_codecs({}, up=qsgd(4), down=qsgd(4)))"
MEMORY = "fedadavr(optimizer='{}', lr={{}}, memory='int4', weights='uniform')"
BRAID = LINKS.format(MEMORY.format("adabelief"))
PLAIN_RATES, ADAPTIVE_RATES, FORGETTING = (0.3, 1.0, 3.0), (0.0003, 0.001, 0.003), (0.6, 0.8, 0.9)


def with_bias(mu: float) -> Callable[[float], Algorithm]:
    """The braid whose clients follow AdaBest's rule; its server's estimate is left out, a second momentum."""

    def make(rate: float) -> Algorithm:
        braid = fb.fedadavr(optimizer="adabelief", lr=rate, memory="int4", weights="uniform")
        four = fb.codecs.qsgd(4)
        made = replace(braid, rule=fb.adabest(mu=mu).rule, name="")
        return fb.hidden_state(fb.with_codecs(made, up=four, down=four))

    return make


@dataclass(frozen=True)
class Row:
    """A contestant: its algorithm with a place for the server's setting, the three it may have, and its schedule."""

    name: str
    algorithm: str | Callable[[float], Algorithm]
    rates: tuple[float, ...]
    asynchronous: bool = False
    kind: str = "single"  # or "braid", "without", "neutral"


MAIN = (
    Row("braid", BRAID, ADAPTIVE_RATES, True, "braid"),
    Row("FedAdaVR", "fedadavr(optimizer='adabelief', lr={}, weights='uniform')", ADAPTIVE_RATES),
    Row("FedAdaBelief", "fedadabelief(lr={}, weights='uniform')", ADAPTIVE_RATES),
    Row("QAFeL", "qafel(lr={}, up=qsgd(4), down=qsgd(4))", PLAIN_RATES, True),
    Row("FedVARP", "fedvarp(lr={}, weights='uniform')", PLAIN_RATES),
    Row("FedAvg", "fedavg(lr={}, weights='uniform')", PLAIN_RATES),
)
WITHOUT = (
    Row("braid without memory", LINKS.format("fedadabelief(lr={}, weights='uniform')"), ADAPTIVE_RATES, True, "without"),
    Row("braid without asynchrony", BRAID, ADAPTIVE_RATES, False, "without"),
    Row("braid without links", MEMORY.format("adabelief"), ADAPTIVE_RATES, True, "without"),
    Row("braid without adaptive step", LINKS.format(MEMORY.format("sgd")), PLAIN_RATES, True, "without"),
)  # fmt: skip
OTHERS = (
    Row("FedBuff", "fedbuff(lr={})", PLAIN_RATES, True),
    Row("CA²FL", "ca2fl(lr={})", PLAIN_RATES, True),
    Row("FedAvg, 4-bit links", LINKS.format("fedavg(lr={}, weights='uniform')"), PLAIN_RATES),
    Row("AdaBest", "adabest(mu=0.02, beta={}, weights='uniform')", FORGETTING),
)
NEUTRAL = (
    Row("braid, FedShift", f"fedshift({BRAID})", ADAPTIVE_RATES, True, "neutral"),
    Row("braid, AdaBest's clients, μ 0.02", with_bias(0.02), ADAPTIVE_RATES, True, "neutral"),
    Row("braid, AdaBest's clients, μ 0.1", with_bias(0.1), ADAPTIVE_RATES, True, "neutral"),
)
ROWS = (*MAIN, *WITHOUT, *OTHERS, *NEUTRAL)


# Scenarios --------------------------------------------------------------------------------------------


def strided_net() -> nn.Module:
    """The network of `experiments/fedadavr`: two strided GroupNorm convolutions, 11,082 weights."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def cifar10(seed: int) -> fb.Task:
    return fb.tasks.load(
        "cifar10", clients=250, partition="label_chunks(1)", seed=seed, model=strided_net, test_shares=True
    )


def phones(seed: int) -> fb.Task:
    return fb.tasks.load("fmnist", clients=1500, partition="label_chunks(2)", seed=seed, test_shares=True)


def held_out(task: fb.Task, each: int) -> fb.Task:
    """The task of the other clients, tested on those held out: so many by the label of their first sample."""
    labels = np.asarray(task.targets)[np.asarray(task.rows)[task.offsets[:-1]]]
    order = rng.generator(TUNING, "braid hold-out").permutation(task.clients)
    held = np.sort(np.concatenate([order[labels[order] == k][:each] for k in np.unique(labels)]))
    kept = np.setdiff1d(np.arange(task.clients), held)
    parts, judges = (
        [task.rows[task.offsets[c] : task.offsets[c + 1]] for c in some] for some in (kept, held)
    )
    rows, counts = torch.cat(judges), [len(p) for p in judges]
    left = [0] * (len(kept) - len(held))  # those held out are given to the first clients as local test sets
    return replace(
        task, rows=torch.cat(parts), offsets=np.cumsum([0, *(len(p) for p in parts)]),
        test=(task.inputs[rows], task.targets[rows]), test_offsets=np.cumsum([0, *counts, *left]), spec=None,
    )  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """A task, how clients train, and the same stretch of simulated time for every row."""

    load: Callable[[int], fb.Task]
    held: int  # clients held out for tuning, by label
    client_rates: tuple[float, ...]
    work: fb.Work
    rounds: fb.schedule.Rounds
    buffered: fb.schedule.Buffered
    tests: int  # over a run
    targets: tuple[float, ...]
    unit: str  # of time

    def schedule(self, row: Row) -> fb.schedule.Schedule:
        return self.buffered if row.asynchronous else self.rounds


def thin() -> fb.clock.bandwidth:
    return fb.clock.bandwidth(up=2e4, down=2e5)


def minute() -> fb.clock.lognormal:
    return fb.clock.lognormal(math.log(60.0), 0.5)


SCENARIOS = {
    # The slowest of five half-normal durations takes 1.6 units in the mean, five uploads of five busy devices 0.8.
    "A": Scenario(
        cifar10, 3, (0.001, 0.00316, 0.01), fb.Work(epochs=1, batch=20, momentum=0.9),
        fb.rounds(300, clients=5, durations=fb.clock.halfnormal()), fb.buffered(600, buffer=5, concurrency=5), 30, (0.4,), "units",
    ),
    "B": Scenario(
        phones, 10, (0.01, 0.0316, 0.1), fb.Work(epochs=2, batch=20),
        fb.rounds(600, clients=10, durations=minute(), bandwidth=thin(), availability=fb.clock.availability("phones")),
        fb.buffered(
            1200, buffer=10, concurrency=10, arrivals="closed", durations=minute(), bandwidth=thin(),
            availability=fb.clock.availability("phones"),
        ), 50, (0.75, 0.82), "hours",
    ),
}  # fmt: skip


@cache
def task_of(which: str, seed: int) -> Callable[[], fb.Task]:
    scenario = SCENARIOS[which]

    def make() -> fb.Task:
        return held_out(scenario.load(seed), scenario.held) if seed == TUNING else scenario.load(seed)

    make.__name__ = f"{scenario.load.__name__}_{'held_out' if seed == TUNING else seed}"
    return make


# Cells ------------------------------------------------------------------------------------------------

Setting = tuple[float, float]  # the client's rate, the server's


def algorithm(row: Row, rate: float) -> str | Callable[[], Algorithm]:
    if isinstance(row.algorithm, str):
        return row.algorithm.format(f"{rate:g}")
    make = row.algorithm

    def made() -> Algorithm:
        return make(rate)

    made.__name__ = f"{row.name}, {rate:g}"
    return made


def cell(which: str, row: Row, setting: Setting, seed: int) -> Cell:
    scenario, (client, server) = SCENARIOS[which], setting
    schedule = scenario.schedule(row)
    name = (
        f"tune-{which}/{row.name}/client {client:g}, server {server:g}"
        if seed == TUNING
        else f"{which}/{row.name}/seed {seed}"
    )
    return Cell(
        name, task_of(which, seed), algorithm(row, server), replace(scenario.work, lr=client), schedule, seed=seed,
        every=schedule.steps // (20 if seed == TUNING else scenario.tests), keep=KEEP, by_client=True,
    )  # fmt: skip


def tuning(which: str, row: Row) -> dict[Setting, Cell]:
    settings = [(c, s) for c in SCENARIOS[which].client_rates for s in row.rates]
    return {setting: cell(which, row, setting, TUNING) for setting in settings}


def lines_of(part: str) -> dict[str, Line]:
    path = HERE / "results" / f"{part}.jsonl"
    lines = [json.loads(t) for t in path.read_text().splitlines()] if path.exists() else []
    return {line["cell"]: line for line in lines}


def final(line: Line) -> float:
    """Mean accuracy over the last fifth, in percent; chance for a run that diverged."""
    return 10.0 if line["diverged"] else 100 * tail(line, line["steps"] // 5)


def best(which: str, row: Row, done: Mapping[str, Line]) -> Setting | None:
    """The setting that is best on the held-out clients, once all nine are there."""
    tried = {setting: done.get(c.name) for setting, c in tuning(which, row).items()}
    found = {setting: final(line) for setting, line in tried.items() if line is not None}
    return max(found, key=lambda setting: found[setting]) if len(found) == len(tried) else None


def seeds(which: str, row: Row, done: Mapping[str, Line]) -> list[Cell]:
    chosen = best(which, row, done)
    return [] if chosen is None else [cell(which, row, chosen, seed) for seed in SEEDS]


def cells() -> list[Cell]:
    found: list[Cell] = []
    for which in SCENARIOS:
        done = lines_of(f"tune-{which}")
        for rows in (MAIN, WITHOUT, OTHERS, NEUTRAL):
            found += [c for row in rows for c in tuning(which, row).values()]
            of_row = [seeds(which, row, done) for row in rows]
            found += [c for same_seed in zip(*[some for some in of_row if some]) for c in same_seed]
    return found


def full() -> list[Cell]:
    return []


def report(done: Mapping[str, Line]) -> dict[str, str]:
    return {}


def claims(done: Mapping[str, Line]) -> list[Claim]:
    return []
