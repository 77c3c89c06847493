"""FedAdaVR: Tables 7 and 8 (MNIST with one local epoch, Fashion-MNIST with three), baselines and ablations.

500 clients, 5 a round, LeNet-5, batch 20, local momentum 0.9; rounds and averaging windows of Table 2.
CIFAR-10 and Shakespeare (natural ids) with small networks and few rounds; what a round costs; why Fashion-MNIST is above the paper's.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median, pstdev, stdev

import numpy as np
from torch import nn

import fedbraid as fb
from experiments._lib.page import by_test
from experiments._lib.reproduce import (
    Cell,
    Claim,
    Drawn,
    Line,
    Panel,
    markdown,
    over_seeds,
    picture,
    pictured,
    spread,
    tail,
    verdict,
)
from experiments.fedadavr import convex
from fedbraid.run.run import Run

HERE = Path(__file__).parent
SEEDS = (42, 43, 44)
PARTITIONS = {
    "IID": "iid()", "IID-mix": "iid_mix(0.5)", "Dirichlet": "dirichlet(0.5)",
    "LQ-1": "label_chunks(1)", "LQ-2": "label_chunks(2)", "LQ-3": "label_chunks(3)",
}  # fmt: skip
EPOCHS = {"mnist": 1, "fmnist": 3}
ROUNDS = {"mnist": (60, 60, 60, 100, 60, 60), "fmnist": (100, 100, 150, 350, 150, 150)}  # Table 2
WINDOW = {"mnist": (10, 10, 10, 10, 10, 10), "fmnist": (10, 10, 15, 35, 25, 15)}
TITLES = {"mnist": "MNIST", "fmnist": "Fashion-MNIST"}

OPTIMISERS = ("adabelief", "adam", "adagrad", "lamb", "yogi")
RATES = (0.001, 0.005, 0.01)
CLIENT_RATES = (0.1, 0.01, 0.001)
CLIENT_LR = 0.01  # of FedAdaVR and FedVARP, as in the reading that this project follows

# Flower's own defaults where the paper says it took them; FedProx's mu is not said.
BASELINES = {
    "FedAvg": "fedavg()",
    "FedProx": "fedprox(mu=0.01)",
    "SCAFFOLD": "scaffold()",
    "FedNova": "fednova()",
    "FedAdam": "fedadam(lr=0.1, eps=1e-9, variant='corrected')",
    "FedAdagrad": "fedadagrad(lr=0.1, eps=1e-9)",
    "FedYogi": "fedyogi(lr=0.01, eps=1e-3)",
    "MIFA": "mifa()",
}
SERVER_RATES = (1.0, 0.1, 0.01)  # FedVARP's
# Server rules that are run with η_c 0.1 as well
AT_BOTH_RATES = (("adam", 0.005), ("adam", 0.01), ("yogi", 0.005), ("yogi", 0.01), ("adabelief", 0.005))


def window(dataset: str, partition: str) -> int:
    if dataset in SHORT:
        return SHORT[dataset].window
    return WINDOW["fmnist" if dataset == "gap" else dataset][list(PARTITIONS).index(partition)]


def cell(dataset: str, partition: str, method: str, algorithm: str, client_lr: float, seed: int) -> Cell:
    rounds = ROUNDS[dataset][list(PARTITIONS).index(partition)]
    return Cell(
        f"{dataset}/{partition}/{method}/client {client_lr:g}/seed {seed}",
        f"load({dataset!r}, clients=500, partition={PARTITIONS[partition]}, seed={seed})",
        algorithm,
        fb.Work(lr=client_lr, epochs=EPOCHS[dataset], batch=20, momentum=0.9),
        fb.rounds(rounds, clients=5),
        seed=seed,
        every=5 if dataset == "mnist" else 10,
        last=window(dataset, partition),
    )


@cache
def printed() -> dict[tuple[str, str, str, str, float], float]:
    """The paper's Tables 6 to 9 by (dataset, partition, method, optimiser, server rate)."""
    with open(HERE / "paper.csv") as file:
        return {
            (r["dataset"], r["partition"], r["method"], r["optimizer"], float(r["server_lr"])): float(
                r["accuracy"]
            )
            for r in csv.DictReader(file)
        }


def best_printed(dataset: str, partition: str, methods: tuple[str, ...]) -> tuple[float, str, float]:
    """(accuracy, optimiser, server rate) of the paper's best cell."""
    return max(
        (v, k[3], k[4]) for k, v in printed().items() if k[:2] == (dataset, partition) and k[2] in methods
    )


@dataclass(frozen=True)
class Method:
    name: str
    algorithm: str
    client_lrs: tuple[float, ...] = (CLIENT_LR,)


def ours(
    optimiser: str, rate: float, memory: str | None = None, rates: tuple[float, ...] = (CLIENT_LR,)
) -> Method:
    kept = "" if memory is None else f", memory={memory!r}"
    name = "FedAdaVR" if memory is None else f"FedAdaVR-{memory}"
    return Method(
        f"{name} {optimiser} {rate:g}", f"fedadavr(optimizer={optimiser!r}, lr={rate}{kept})", rates
    )


def fedvarp(rate: float, rates: tuple[float, ...] = (CLIENT_LR,)) -> Method:
    return Method(f"FedVARP {rate:g}", f"fedvarp(lr={rate})", rates)


def ablation(optimiser: str, rate: float) -> list[Method]:
    """NoVR: the optimiser on the mean; NoOPT: the memory with plain SGD at the same rate and at 1."""
    novr = {"adabelief": "fedadabelief", "lamb": "fedlamb"}.get(optimiser, f"fed{optimiser}")
    kind = "" if optimiser in ("adabelief", "lamb") else ", eps=1e-8, variant='corrected'"
    beta = ", beta2=0.999" if optimiser in ("adam", "yogi") else ""
    return [
        Method(f"NoVR {optimiser} {rate:g}", f"{novr}(lr={rate}{beta}{kind})"),
        Method(f"NoOPT {rate:g}", f"fedadavr(optimizer='sgd', lr={rate})"),
        Method("NoOPT 1", "fedadavr(optimizer='sgd', lr=1.0)"),
    ]


def methods_of_tier(tier: str, dataset: str, partition: str) -> list[Method]:
    _, optimiser, rate = best_printed(dataset, partition, ("fedadavr",))
    match tier:
        case "first":
            at_one_rate = [Method(name, text) for name, text in BASELINES.items()]
            return [ours(optimiser, rate), fedvarp(1.0), *at_one_rate]
        case "core":
            return [ours(optimiser, rate), fedvarp(1.0), Method("FedYogi", BASELINES["FedYogi"])]
        case "grid":
            return [ours(o, r) for r in reversed(RATES) for o in OPTIMISERS]
        case "tuned":
            rates = tuple(r for r in CLIENT_RATES if r != CLIENT_LR)
            return [Method(n, text, rates) for n, text in BASELINES.items()] + [
                fedvarp(r) for r in SERVER_RATES
            ]
        case "faster":  # no baseline is at its best with 0.001
            return [Method(n, text, (0.1,)) for n, text in BASELINES.items()]
        case "client":
            return [ours(o, r, rates=(0.1, CLIENT_LR)) for o, r in AT_BOTH_RATES]
        case "others":
            twins = [ours(o, r, "fp16") for o, r in AT_BOTH_RATES]
            return [*twins, ours("adagrad", RATES[-1]), ours("lamb", RATES[-1])]
        case "ablation":
            return ablation(optimiser, rate)
        case "quant":
            return [ours(o, r, "fp16") for r in reversed(RATES) for o in OPTIMISERS]
        case "bits":
            return [ours(optimiser, rate, m) for m in ("fp16", "int8", "int4")]
    raise ValueError(tier)


ORDER = [
    ("mnist", "first", SEEDS[:1]), ("mnist", "core", SEEDS[1:]), ("fmnist", "core", SEEDS[:1]), ("mnist", "grid", SEEDS[:1]),
    ("mnist", "ablation", SEEDS[:1]), ("mnist", "bits", SEEDS[:1]), ("mnist", "tuned", SEEDS[:1]), ("mnist", "client", SEEDS),
    ("fmnist", "first", SEEDS[:1]), ("fmnist", "client", SEEDS),
    ("fmnist", "core", SEEDS[1:]), ("mnist", "first", SEEDS[1:]), ("fmnist", "grid", SEEDS[:1]), ("fmnist", "ablation", SEEDS[:1]),
    ("fmnist", "first", SEEDS[1:]), ("fmnist", "tuned", SEEDS[:1]), ("mnist", "quant", SEEDS[:1]), ("fmnist", "bits", SEEDS[:1]),
    ("fmnist", "ablation", SEEDS[1:]), ("mnist", "ablation", SEEDS[1:]), ("mnist", "bits", SEEDS[1:]), ("mnist", "faster", SEEDS[1:]),
    ("fmnist", "quant", SEEDS[:1]), ("fmnist", "bits", SEEDS[1:]), ("fmnist", "faster", SEEDS[1:]),
    ("fmnist", "others", SEEDS[1:]), ("mnist", "others", SEEDS[1:]),
]  # fmt: skip


# CIFAR-10 and Shakespeare, shortened ------------------------------------------------------------------


def strided_net() -> nn.Module:
    """Two strided GroupNorm convolutions of 16 and 32 channels, 11,082 weights, in place of ResNet-18."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def images(partition: str, seed: int) -> Callable[[], fb.Task]:
    def make() -> fb.Task:
        return fb.tasks.load(
            "cifar10", clients=250, partition=PARTITIONS[partition], seed=seed, model=strided_net
        )

    make.__name__ = f"cifar10_{partition.replace('-', '_')}_seed_{seed}"
    return make


def text() -> fb.Task:
    """Natural ids; a GRU of one layer that sees the last 20 characters; tested on 2,000 windows of 225 held-out roles."""
    return fb.tasks.load(
        "shakespeare", test_clients=225, max_samples_per_client=256, context=20, max_test_samples=2000,
        model=partial(fb.models.gru_char, layers=1),
    )  # fmt: skip


@dataclass(frozen=True)
class Short:
    title: str
    partition: str
    epochs: int
    batch: int
    rounds: int
    window: int
    every: int
    methods: tuple[Method, ...]
    tried: tuple[Method, ...]  # with the first seed only


BOTH = (0.001, 0.01)  # client rates that the first seed tries; the others take the first of them
TEXT = (0.1, 0.01)
GHBM = Method("GHBM 50", "ghbm(tau=50, beta=0.9)", BOTH)  # 250 clients, 5 a round
SHORT = {
    "cifar10": Short("CIFAR-10", "LQ-1", 1, 20, 300, 60, 10,
        (ours("adabelief", 0.001), fedvarp(1.0, BOTH), *(Method(n, text, BOTH) for n, text in BASELINES.items()), GHBM),
        (ours("adam", 0.001, rates=(0.01, 0.001)), ours("lamb", 0.001), ours("lamb", 0.005), ours("yogi", 0.001), ours("adagrad", 0.005)),
    ),
    "shakespeare": Short("Shakespeare", "natural", 1, 64, 80, 10, 10,
        (ours("adagrad", 0.1, rates=TEXT), ours("yogi", 0.01, rates=TEXT), fedvarp(1.0, TEXT),
         *(Method(n, BASELINES[n], TEXT) for n in ("FedAvg", "FedAdagrad", "FedYogi", "SCAFFOLD"))),
        (ours("adagrad", 0.01, rates=TEXT), ours("adam", 0.01, rates=TEXT), ours("adam", 0.005)),
    ),
}  # fmt: skip
TASKS = {("cifar10", p, s): images(p, s) for p in PARTITIONS for s in SEEDS}
TASKS |= {("shakespeare", "natural", s): text for s in SEEDS}


def short_cell(
    dataset: str, method: Method, client_lr: float, seed: int, partition: str | None = None
) -> Cell:
    s = SHORT[dataset]
    p = partition or s.partition
    return Cell(
        f"{dataset}/{p}/{method.name}/client {client_lr:g}/seed {seed}", TASKS[dataset, p, seed], method.algorithm,
        fb.Work(lr=client_lr, epochs=s.epochs, batch=s.batch, momentum=0.9), fb.rounds(s.rounds, clients=5), seed=seed, every=s.every,
        last=0,
    )  # fmt: skip


FIGURE = (ours("adagrad", 0.01), *ablation("adagrad", 0.01)[:2])  # Figures 2 and 5: Adagrad, both rates 0.01


def figure_cells(seed: int) -> list[Cell]:
    return [short_cell("cifar10", m, CLIENT_LR, seed) for m in FIGURE]


def short_cells(dataset: str, seed: int) -> list[Cell]:
    """With the first seed all that is tried, with the others the best client rate."""
    s = SHORT[dataset]
    if seed == SEEDS[0]:
        return [short_cell(dataset, m, lr, seed) for m in s.methods + s.tried for lr in m.client_lrs]
    return [short_cell(dataset, m, m.client_lrs[0], seed) for m in s.methods]


RIVALS = ("FedAvg", "FedYogi", "SCAFFOLD", "MIFA")
SIX = (  # Table 9 on its other partitions
    ours("adabelief", 0.001), ours("adabelief", 0.001, "fp16"), ours("lamb", 0.005), fedvarp(1.0, BOTH),
    *(Method(n, BASELINES[n], BOTH) for n in RIVALS), GHBM,
)  # fmt: skip


def six_cells() -> list[Cell]:
    """With the paper's one seed; LQ-1 has all methods already, but for the memory in fp16."""
    found = [short_cell("cifar10", SIX[1], CLIENT_LR, SEEDS[0])]
    for p in PARTITIONS:
        if p != SHORT["cifar10"].partition:
            found += [short_cell("cifar10", m, lr, SEEDS[0], p) for m in SIX for lr in m.client_lrs]
    return found


def table6_cells() -> list[Cell]:
    """All of Table 6's cells, with its one seed, at the better of the client rates."""
    rows = [ours(o, r, memory) for memory in (None, "fp16") for o in OPTIMISERS for r in RATES]
    return [
        short_cell("shakespeare", m, TEXT[0], SEEDS[0]) for m in (*(fedvarp(r) for r in SERVER_RATES), *rows)
    ]


# Why Fashion-MNIST is above the paper's ---------------------------------------------------------------

GAP = {  # statistics of the images, whether batches are shuffled
    "their evaluation": ("own", True),
    "images as they are": ("none", True),
    "images as they are, not shuffled": ("none", False),
}


def sampled(run: Run) -> Line:
    """Accuracy over the test shares of 250 clients, drawn anew at every test, as the paper has it."""
    task = run.setup.task
    assert task.test is not None
    assert task.test_offsets is not None
    _, classes = run.engine.evaluate(run.state.average, *task.test)
    right = np.concatenate([[0], np.cumsum((classes == task.test[1]).numpy())])
    some = np.random.default_rng(run.state.t).choice(task.clients, 250, replace=False)
    lo, hi = task.test_offsets[some], task.test_offsets[some + 1]
    return {"sampled": float((right[hi] - right[lo]).sum() / (hi - lo).sum())}


def gap_methods(partition: str) -> list[Method]:
    _, optimiser, rate = best_printed("fmnist", partition, ("fedadavr",))
    return [ours(optimiser, rate), fedvarp(1.0)]


def gap_cell(kind: str, partition: str, method: Method) -> Cell:
    statistics, shuffle = GAP[kind]
    made = cell("fmnist", partition, method.name, method.algorithm, CLIENT_LR, SEEDS[0])
    options = f"seed={SEEDS[0]}, test_shares=True" + f", statistics={statistics!r}" * (statistics != "own")
    return replace(
        made, name=f"gap/{partition}/{method.name}, {kind}/client {CLIENT_LR:g}/seed {SEEDS[0]}",
        task=f"load('fmnist', clients=500, partition={PARTITIONS[partition]}, {options})",
        work=replace(made.work, shuffle=shuffle), probe=sampled, keep=("accuracy", "loss", "sampled"),
    )  # fmt: skip


def gap_cells() -> list[Cell]:
    return [gap_cell(kind, p, m) for kind in GAP for p in PARTITIONS for m in gap_methods(p)]


# Theorem 5.4 on a convex problem ------------------------------------------------------------------------

CONVEX = {
    "FedAvg": "fedavg()",
    "memory": "fedadavr(optimizer='sgd', lr=1.0)",
    "Adagrad": "fedadagrad(lr=0.1, eps=1e-8, variant='corrected')",
    "memory, Adagrad": "fedadavr(optimizer='adagrad', lr=0.1)",
}
CONVEX_SEEDS, CONVEX_STEPS, CONVEX_ROUNDS = (0, 1, 2), (1, 5), 3000
EVERYBODY = "FedAvg, all clients"  # what local steps cost where nobody is missing


def convex_cell(name: str, algorithm: str, K: int, seed: int, rounds: int = CONVEX_ROUNDS) -> Cell:
    clients = convex.CLIENTS if name == EVERYBODY else convex.PER_ROUND
    return Cell(
        f"convex/mushrooms/{name}, K = {K}/client 0.2/seed {seed}", convex.mushrooms_one_label, algorithm,
        fb.Work(lr=0.2, steps=K, batch=None, weight_decay=convex.L2), fb.rounds(rounds, clients=clients), seed=seed,
        every=rounds // 60, keep=("above",), probe=convex.cost,
    )  # fmt: skip


def convex_cells() -> list[Cell]:
    found = [
        convex_cell(n, text, K, s) for s in CONVEX_SEEDS for K in CONVEX_STEPS for n, text in CONVEX.items()
    ]
    return [*found, convex_cell(EVERYBODY, "fedavg()", max(CONVEX_STEPS), 0, 600)]


# What the memory is worth where it is worth most: the control of the headline cell, and the memory in few bits ---

NOVR_RATES, NOVR_CLIENT_RATES = (0.0003, 0.001, 0.003), (0.01, 0.00316, 0.001)
HEADLINE = ("adabelief", 0.001)  # best on CIFAR-10, LQ-1
BITS = ("fp16", "int8", "int4")


def novr(rate: float) -> Method:
    return replace(ablation(HEADLINE[0], rate)[0], client_lrs=NOVR_CLIENT_RATES)


def novr_tried() -> list[tuple[Method, float]]:
    """As many settings as FedAdaVR's optimisers have, with the first seed."""
    return [(novr(rate), client_lr) for client_lr in NOVR_CLIENT_RATES for rate in NOVR_RATES]


def worth_cells() -> list[Cell]:
    """NoVR at FedAdaVR's setting and at the best of its own nine, and FedAdaVR with its memory in few bits."""
    first = [short_cell("cifar10", m, c, SEEDS[0]) for m, c in novr_tried()]
    lines = [json.loads(t) for t in (HERE / "results" / "cifar10.jsonl").read_text().splitlines()]
    reached = {
        line["cell"]: 0.0 if line["diverged"] else tail(line, window("cifar10", "LQ-1")) for line in lines
    }
    same = [short_cell("cifar10", novr(HEADLINE[1]), CLIENT_LR, s) for s in SEEDS[1:]]
    found = first + same
    found += [short_cell("cifar10", ours(*HEADLINE, m), CLIENT_LR, s) for s in SEEDS for m in reversed(BITS)]
    if all(c.name in reached for c in first):
        method, client_lr = max(zip(novr_tried(), first), key=lambda x: reached[x[1].name])[0]
        found += [short_cell("cifar10", method, client_lr, s) for s in SEEDS[1:]]
    return found


def cells() -> list[Cell]:
    found: dict[str, Cell] = {c.name: c for c in convex_cells()}
    for dataset, tier, seeds in ORDER:
        for partition in PARTITIONS:
            for seed in seeds:
                for m in methods_of_tier(tier, dataset, partition):
                    for client_lr in m.client_lrs:
                        made = cell(dataset, partition, m.name, m.algorithm, client_lr, seed)
                        found.setdefault(made.name, made)
    for seed in SEEDS:
        found |= {c.name: c for c in figure_cells(seed)}
    for seed in SEEDS:
        for dataset in SHORT:
            found |= {c.name: c for c in short_cells(dataset, seed)}
    for c in gap_cells() + table6_cells() + six_cells() + worth_cells():
        found.setdefault(c.name, c)
    return list(found.values())


# The paper's own size --------------------------------------------------------------------------------

FULL_ROUNDS = dict(
    zip(PARTITIONS, ((200, 20), (300, 30), (400, 40), (1500, 150), (500, 50), (500, 50)))
)  # Table 2


def full_methods() -> list[Method]:
    found = [ours(o, r, memory) for memory in (None, "fp16") for o in OPTIMISERS for r in RATES]
    found += [fedvarp(r) for r in SERVER_RATES]
    return found + [Method(n, text, CLIENT_RATES) for n, text in BASELINES.items()]


def full_cell(dataset: str, partition: str, method: Method, client_lr: float) -> Cell:
    """Seed 42, as the paper's."""
    rounds, last = FULL_ROUNDS.get(partition, (200, 20))
    natural = dataset == "shakespeare"
    task = (
        f"load('shakespeare', partition=natural(), seed={SEEDS[0]}, test_clients=225, model='gru_char')"
        if natural
        else f"load('cifar10', clients=250, partition={PARTITIONS[partition]}, seed={SEEDS[0]}, model='resnet18_gn')"
    )
    return Cell(
        f"full-{dataset}/{partition}/{method.name}/client {client_lr:g}/seed {SEEDS[0]}", task, method.algorithm,
        fb.Work(lr=client_lr, epochs=5, batch=64 if natural else 20, momentum=0.9), fb.rounds(rounds, clients=5),
        seed=SEEDS[0], every=10, last=last,
    )  # fmt: skip


def full() -> list[Cell]:
    """Tables 4, 6 and 9, Figures 1 to 5: ResNet-18 and the GRU, the paper's rounds, its one seed."""
    kinds = [("cifar10", p) for p in PARTITIONS] + [("shakespeare", "natural")]
    return [full_cell(d, p, m, lr) for d, p in kinds for m in full_methods() for lr in m.client_lrs]


# Tables and pictures --------------------------------------------------------------------------------

Done = Mapping[str, Line]
Scores = dict[
    tuple[str, str, str, float], list[float]
]  # (dataset, partition, method, client rate) -> by seed, not a number where it diverged


def scores(done: Done) -> Scores:
    found: Scores = {}
    for name, line in done.items():
        dataset, partition, method, client, _ = name.split("/")
        if dataset == "convex":
            continue
        key = (dataset, partition, method, float(client.removeprefix("client ")))
        reached = math.nan if line["diverged"] else 100 * tail(line, window(dataset, partition))
        found.setdefault(key, []).append(reached)
    return found


def shown(values: list[float] | None) -> str:
    """Accuracies over seeds; runs that did not stay finite are counted, not averaged."""
    if not values:
        return "–"
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return "diverges"
    lost = len(values) - len(finite)
    return spread(finite) + (f" ({lost} of {len(values)} diverge)" if lost else "")


def best_of(found: Scores, dataset: str, partition: str, start: str) -> tuple[str, float, list[float]] | None:
    """(method, client rate, accuracies) of the best mean among cells whose method starts so, of those with the most seeds."""
    mine = [
        (m, c, v)
        for (d, p, m, c), v in found.items()
        if (d, p) == (dataset, partition) and m.startswith(start) and all(map(math.isfinite, v))
    ]
    if not mine:
        return None
    seeds = max(len(v) for _, _, v in mine)
    return max((x for x in mine if len(x[2]) == seeds), key=lambda x: fmean(x[2]))


def headline(found: Scores, dataset: str) -> str:
    rows = []
    for partition in PARTITIONS:
        paper, po, pr = best_printed(dataset, partition, ("fedadavr", "fedadavr-quant"))
        varp = best_printed(dataset, partition, ("fedvarp",))[0]
        mine = best_of(found, dataset, partition, "FedAdaVR ")
        same = found.get((dataset, partition, f"FedAdaVR {po} {pr:g}", CLIENT_LR), [])
        v = best_of(found, dataset, partition, "FedVARP")
        base = max(
            (b for n in BASELINES if (b := best_of(found, dataset, partition, n))),
            key=lambda b: fmean(b[2]),
            default=None,
        )
        rows.append([
            partition, f"{paper:.1f} ({po} {pr:g})", shown(same), f"{spread(mine[2])} ({mine[0][8:].strip()}, η_c {mine[1]:g})" if mine else "–",
            f"{varp:.1f}", spread(v[2]) if v else "–", f"{spread(base[2])} ({base[0]}, η_c {base[1]:g})" if base else "–",
        ])  # fmt: skip
    head = [
        "partition", "paper's best", "ours, that cell", "ours, best cell", "paper's FedVARP", "our FedVARP",
        "our best other baseline",
    ]  # fmt: skip
    return markdown(head, rows)


def full_grid(found: Scores, dataset: str) -> str:
    rows = []
    for kind, memory in (("fedadavr", "FedAdaVR"), ("fedadavr-quant", "FedAdaVR-fp16")):
        for optimiser in OPTIMISERS:
            for rate in RATES:
                row = [f"{memory} {optimiser} {rate:g}"]
                for partition in PARTITIONS:
                    paper = printed()[dataset, partition, kind, optimiser, rate]
                    mine = found.get((dataset, partition, f"{memory} {optimiser} {rate:g}", CLIENT_LR), [])
                    row.append(f"{shown(mine)} / {paper:.1f}")
                rows.append(row)
    for optimiser, rate in AT_BOTH_RATES:
        mine = [found.get((dataset, p, f"FedAdaVR {optimiser} {rate:g}", 0.1)) for p in PARTITIONS]
        if any(mine):
            rows.append([f"FedAdaVR {optimiser} {rate:g}, η_c 0.1", *map(shown, mine)])
    for rate in SERVER_RATES:
        row = [f"FedVARP {rate:g}"]
        for partition in PARTITIONS:
            mine = found.get((dataset, partition, f"FedVARP {rate:g}", CLIENT_LR), [])
            row.append(f"{shown(mine)} / {printed()[dataset, partition, 'fedvarp', '', rate]:.1f}")
        rows.append(row)
    return markdown(["ours / paper's", *PARTITIONS], rows)


def baselines(found: Scores, dataset: str) -> str:
    rows = []
    for name in BASELINES:
        for client_lr in CLIENT_RATES:
            mine = [found.get((dataset, p, name, client_lr)) for p in PARTITIONS]
            if any(v is not None for v in mine):
                rows.append([f"{name}, η_c {client_lr:g}", *map(shown, mine)])
    return markdown(["baseline", *PARTITIONS], rows)


def ablations(found: Scores, dataset: str) -> str:
    rows = []
    for partition in PARTITIONS:
        _, optimiser, rate = best_printed(dataset, partition, ("fedadavr",))
        names = [f"FedAdaVR {optimiser} {rate:g}", *(m.name for m in ablation(optimiser, rate))]
        names += [f"FedAdaVR-{m} {optimiser} {rate:g}" for m in ("fp16", "int8", "int4")]
        values = [found.get((dataset, partition, n, CLIENT_LR), []) for n in names]
        if any(values[1:]):
            rows.append([f"{partition} ({optimiser} {rate:g})", *map(shown, values)])
    head = [
        "partition (cell)",
        "FedAdaVR",
        "NoVR",
        "NoOPT, same rate",
        "NoOPT, rate 1",
        "fp16",
        "int8",
        "int4",
    ]
    return markdown(head, rows)


def to_target(done: Done, found: Scores, dataset: str, partition: str, targets: tuple[int, ...]) -> str:
    """Rounds until the accuracy is first reached, in the first seed, as in Table 4."""
    _, optimiser, rate = best_printed(dataset, partition, ("fedadavr",))
    names = [f"FedAdaVR {optimiser} {rate:g}", f"FedAdaVR-fp16 {optimiser} {rate:g}", "FedVARP 1", *BASELINES]
    at_this_rate = {key: v for key, v in found.items() if key[3] == CLIENT_LR}
    mine = best_of(at_this_rate, dataset, partition, "FedAdaVR ")
    if mine and mine[0] not in names:
        names.insert(0, mine[0])
    rows = []
    for name in names:
        line = done.get(f"{dataset}/{partition}/{name}/client {CLIENT_LR:g}/seed {SEEDS[0]}")
        if line is None:
            continue
        rows.append([name, *(str(first(line, t / 100) or "x") for t in targets)])
    return markdown([f"{TITLES[dataset]} {partition}", *(f"{t} %" for t in targets)], rows)


NAMED = ("FedAdaVR", "NoVR", "FedYogi", "FedVARP")  # in pictures; the others are grey


def draw(done: Done, dataset: str) -> None:
    """Accuracy at the common tests, the mean and range of the seeds, η_c 0.01."""
    panels = []
    for partition in PARTITIONS:
        _, optimiser, rate = best_printed(dataset, partition, ("fedadavr",))
        same = f"{optimiser} {rate:g}"
        shown = {
            "FedAdaVR": f"FedAdaVR {same}",
            "NoVR": f"NoVR {same}",
            "FedVARP": "FedVARP 1",
            **{n: n for n in BASELINES},
        }
        curves = []
        for name, method in shown.items():
            lines = of_seeds(done, f"{dataset}/{partition}/{method}/client {CLIENT_LR:g}")
            if lines:
                curves.append(
                    thin(over_seeds(name, lines, grey=name not in NAMED), 5 if dataset == "mnist" else 10)
                )
        panels.append(
            Panel(f"{TITLES[dataset]}, {partition}, η_c {CLIENT_LR:g}", curves, level={"chance": 0.1})
        )
    picture(HERE / f"{dataset}_accuracy.png", panels)


def of_seeds(done: Done, name: str) -> list[Line]:
    """The lines of all seeds that stayed finite."""
    return [done[n] for s in SEEDS if (n := f"{name}/seed {s}") in done and not done[n]["diverged"]]


def thin(drawn: Drawn, every: int) -> Drawn:
    """Every so many rounds alone: in the last window all rounds are tested, which would look unsteady."""
    at = [i for i, x in enumerate(drawn.x) if x % every == 0]
    return replace(drawn, **{k: [getattr(drawn, k)[i] for i in at] for k in ("x", "y", "low", "high")})


def short_table(done: Done, found: Scores, dataset: str, targets: tuple[int, ...]) -> str:
    """Accuracy, and rounds to targets in the mean over the seeds that reach them."""
    s = SHORT[dataset]
    rows = []
    for m in s.methods + s.tried:
        for lr in m.client_lrs:
            values = found.get((dataset, s.partition, m.name, lr), [])
            lines = [done[n] for seed in SEEDS if (n := short_cell(dataset, m, lr, seed).name) in done]
            if not values:
                continue
            row = [f"{m.name}, η_c {lr:g}", shown(values), str(len(values))]
            for t in targets:
                when = [first(line, t / 100) for line in lines]
                known = [w for w in when if w is not None]
                row.append(
                    f"{sum(known) / len(known):.0f}{'' if len(known) == len(lines) else f' ({len(known)} of {len(lines)})'}"
                    if known
                    else "x"
                )
            rows.append(row)
    head = [
        f"{s.title}, {s.partition}",
        f"accuracy, last {s.window} rounds",
        "seeds",
        *(f"rounds to {t} %" for t in targets),
    ]
    return markdown(head, rows)


def figure_table(done: Done) -> str:
    """Figures 2 and 5: what is lost without the memory, and without the optimiser."""
    rows, s = [], SHORT["cifar10"]
    for m in FIGURE:
        lines = [done[n] for seed in SEEDS if (n := short_cell("cifar10", m, CLIENT_LR, seed).name) in done]
        fine = [x for x in lines if not x["diverged"]]
        swing = [100 * pstdev(x["curve"]["accuracy"][len(x["curve"]["accuracy"]) // 2 :]) for x in fine]
        rows.append([
            m.name, spread([100 * tail(x, s.window) for x in fine]), spread(swing), spread([tail(x, s.window, "loss") for x in fine], 2),
            f"{len(lines) - len(fine)} of {len(lines)}",
        ])  # fmt: skip
    head = [
        "CIFAR-10, LQ-1",
        f"accuracy, last {s.window} rounds",
        "its deviation over the second half of a run",
        "loss",
        "diverge",
    ]
    return markdown(head, rows)


def gap_row(done: Done, partition: str, method: Method) -> list[float | None]:
    """The paper's accuracy, ours with the first seed, and ours by the paper's way to test under each of GAP."""
    name, words = method.name, method.name.split()
    kind, rate = (("fedadavr", words[1]) if words[0] == "FedAdaVR" else ("fedvarp", "")), words[-1]
    plain = done.get(cell("fmnist", partition, name, method.algorithm, CLIENT_LR, SEEDS[0]).name)
    w = window("fmnist", partition)
    found: list[float | None] = [printed()["fmnist", partition, *kind, float(rate)]]
    found.append(None if plain is None else 100 * tail(plain, w))
    for key in GAP:
        line = done.get(gap_cell(key, partition, method).name)
        found.append(None if line is None else 100 * tail(line, w, "sampled"))
    return found


def gap_table(done: Done) -> str:
    rows = [
        [f"{p}, {m.name}", *("–" if v is None else f"{v:.1f}" for v in gap_row(done, p, m))]
        for p in PARTITIONS for m in gap_methods(p)
    ]  # fmt: skip
    return markdown(["Fashion-MNIST, seed 42", "paper's", "ours", *GAP], rows)


def gap_claim(done: Done) -> Claim:
    """How far from the paper's cells ours are in the mean, under each setting that has all its cells."""
    rows = [gap_row(done, p, m) for p in PARTITIONS for m in gap_methods(p)]
    told = []
    for i, kind in enumerate(("as here", *GAP), 1):
        pairs = [(row[i], row[0]) for row in rows]
        off = [mine - paper for mine, paper in pairs if mine is not None and paper is not None]
        if len(off) == len(rows):
            told.append(
                (fmean(map(abs, off)), f"{kind} {fmean(off):+.1f} ({min(off):+.1f} to {max(off):+.1f})")
            )
    near = min(told, default=(math.inf, ""))
    return Claim(
        "Table 8, the gap", "the same numbers", "open" if len(told) <= len(GAP) else "agrees" if near[0] < 1 else "partly",
        "the paper's best FedAdaVR cells and FedVARP at 1, points above the paper's: " + ("; ".join(t for _, t in told) or "not run"),
        "fedbraid reproduce fedadavr --part gap",
    )  # fmt: skip


def table6(done: Done) -> str:
    rows = []
    kinds = [("FedVARP", "fedvarp", "")]
    kinds += [(f"{n} {o}", k, o) for n, k in (("FedAdaVR", "fedadavr"), ("FedAdaVR-fp16", "fedadavr-quant")) for o in OPTIMISERS]  # fmt: skip
    for name, kind, optimiser in kinds:
        row = [name]
        for rate in (*RATES, 0.1, 1.0):
            line = done.get(f"shakespeare/natural/{name} {rate:g}/client {TEXT[0]:g}/seed {SEEDS[0]}")
            paper = printed().get(("shakespeare", "natural", kind, optimiser, rate))
            mine = "–" if line is None else f"{100 * tail(line, SHORT['shakespeare'].window):.1f}"
            row.append(f"{mine} / {paper:.1f}" if paper is not None else "" if line is None else mine)
        rows.append(row)
    return markdown(["ours / paper's, by server rate", *(f"{r:g}" for r in (*RATES, 0.1, 1.0))], rows)


def six_scores(done: Done, partition: str) -> dict[str, float]:
    """By method, the accuracy of the first seed, at its better client rate."""
    best: dict[str, float] = {}
    for m in SIX:
        lines = [done.get(short_cell("cifar10", m, lr, SEEDS[0], partition).name) for lr in m.client_lrs]
        fine = [100 * tail(x, SHORT["cifar10"].window) for x in lines if x is not None and not x["diverged"]]
        if fine:
            best[m.name] = max(fine)
    return best


def six_table(done: Done) -> str:
    found = {p: six_scores(done, p) for p in PARTITIONS}
    rows = [[m.name, *(f"{found[p][m.name]:.1f}" if m.name in found[p] else "–" for p in PARTITIONS)] for m in SIX]  # fmt: skip
    rows.append(["the paper's best FedAdaVR", *(f"{best_printed('cifar10', p, ('fedadavr', 'fedadavr-quant'))[0]:.1f}" for p in PARTITIONS)])  # fmt: skip
    rows.append(["the paper's best FedVARP", *(f"{best_printed('cifar10', p, ('fedvarp',))[0]:.1f}" for p in PARTITIONS)])  # fmt: skip
    return markdown(["CIFAR-10, shortened, seed 42", *PARTITIONS], rows)


def six_claim(done: Done) -> Claim:
    won, lost = [], []
    for p in PARTITIONS:
        found = six_scores(done, p)
        mine = [v for n, v in found.items() if n.startswith("FedAdaVR")]
        rivals = {n: v for n, v in found.items() if not n.startswith(("FedAdaVR", "GHBM"))}
        if len(found) == len(SIX):
            best = max(rivals, key=rivals.__getitem__)
            text = f"{p} {max(mine):.1f} for {rivals[best]:.1f} ({best})"
            (won if max(mine) > rivals[best] else lost).append(text)
    whole = len(won) + len(lost) == len(PARTITIONS)
    told = f"a small network, 300 rounds, seed 42; ahead: {', '.join(won) or 'none'}; behind: {', '.join(lost) or 'none'}"
    return Claim(
        "Table 9, other partitions", "FedAdaVR above the others on all six partitions with ResNet-18",
        "open" if not whole else "in small" if not lost else "partly" if won else "differs",
        told if won or lost else "not run",
        "fedbraid reproduce fedadavr --part cifar10",
    )  # fmt: skip


PAPER_LATENCY = {  # Table 5, seconds a round
    "FedAvg": 166.43, "FedAdam": 168.32, "FedAdagrad": 167.89, "FedYogi": 168.54, "FedProx": 170.57, "SCAFFOLD": 184.89, "FedNova": 168.65,
    "MIFA": 172.58, "FedVARP": 175.27, "FedAdaVR adam": 180.30, "FedAdaVR adagrad": 178.31, "FedAdaVR adabelief": 181.53, "FedAdaVR yogi": 180.41,
    "FedAdaVR lamb": 183.15,
}  # fmt: skip


def latency() -> dict[str, float]:
    """Seconds of one core that a round takes, from latency.py."""
    path = HERE / "latency.json"
    found: dict[str, float] = json.loads(path.read_text())["seconds"] if path.exists() else {}
    return found


def latency_table() -> str:
    mine = latency()

    def above(value: float, base: float) -> str:
        return f"{value:.1f} ({100 * (value / base - 1):+.1f} %)"

    rows = [
        [name, above(mine[name], mine["FedAvg"]) if name in mine else "–", above(paper, PAPER_LATENCY["FedAvg"])]
        for name, paper in PAPER_LATENCY.items()
    ]  # fmt: skip
    return markdown(["seconds a round, above FedAvg's", "ours, one core", "paper's, a GPU"], rows)


def latency_claim() -> Claim:
    mine = latency()
    more = [v - mine["FedAvg"] for n, v in mine.items() if n.startswith("FedAdaVR")]
    paper = [v - PAPER_LATENCY["FedAvg"] for n, v in PAPER_LATENCY.items() if n.startswith("FedAdaVR")]
    return Claim(
        "Table 5", f"a round takes {min(paper):.1f} to {max(paper):.1f} s longer than FedAvg's", "open" if not more else "differs",
        f"{min(more):.1f} to {max(more):.1f} s longer, on one core: the running sum follows the cohort alone, so the server's part is O(|S| d)" if more else "not measured",
        "python experiments/fedadavr/latency.py",
    )  # fmt: skip


def first(line: Line, target: float) -> int | None:
    """The first round at which the accuracy was seen to be reached."""
    curve = line["curve"]
    return next((s for s, a in zip(curve["step"], curve["accuracy"]) if a is not None and a >= target), None)


def draw_short(done: Done) -> None:
    """CIFAR-10 and Shakespeare, shortened: mean and range over seeds, each at the best of its client rates."""
    panels = []
    for dataset, s in SHORT.items():
        w = window(dataset, s.partition)
        main = {"cifar10": "FedAdaVR adabelief 0.001", "shakespeare": "FedAdaVR adagrad 0.1"}[dataset]
        curves = []
        for m in (
            *s.methods,
            *([replace(novr(HEADLINE[1]), client_lrs=(CLIENT_LR,))] if dataset == "cifar10" else ()),
        ):
            tried = [of_seeds(done, f"{dataset}/{s.partition}/{m.name}/client {c:g}") for c in m.client_lrs]
            lines = max(tried, key=lambda x: (len(x), fmean(tail(y, w) for y in x) if x else 0.0))
            named = m.name == main or m.name.split()[0] in ("NoVR", "FedVARP", "FedAdagrad", "MIFA")
            if lines:
                curves.append(over_seeds(m.name, lines, grey=not named))
        panels.append(
            Panel(f"{s.title}, {s.partition}", curves, level={"chance": 0.1} if dataset == "cifar10" else {})
        )
    picture(HERE / "short.png", panels, columns=2)


def draw_figure(done: Done) -> None:
    """Figures 2 and 5: mean and range over seeds."""
    panels = []
    for key, label in (("accuracy", "test accuracy"), ("loss", "test loss")):
        curves = [
            over_seeds(m.name, lines, key)
            for m in FIGURE
            if (lines := of_seeds(done, f"cifar10/LQ-1/{m.name}/client {CLIENT_LR:g}"))
        ]
        panels.append(Panel("CIFAR-10, LQ-1", curves, y=label, log=key == "loss"))
    picture(HERE / "figure2.png", panels, columns=2)


def convex_lines(done: Done, name: str, K: int) -> list[Line]:
    return [
        done[n]
        for s in CONVEX_SEEDS
        if (n := f"convex/mushrooms/{name}, K = {K}/client 0.2/seed {s}") in done
    ]


def rests(line: Line) -> float:
    """f − f* in the mean over the last fifth of the tests."""
    tests = line["curve"]["above"]
    return fmean(tests[-max(1, len(tests) // 5) :])


def convex_table(done: Done) -> str:
    rows = []
    for name in (*CONVEX, EVERYBODY):
        row = [name]
        for K in CONVEX_STEPS:
            ends = [rests(x) for x in convex_lines(done, name, K)]
            row.append(" / ".join(f"{v:.1e}" for v in ends) or "–")
        rows.append(row)
    head = [
        "f − f* over the last fifth, by seed",
        *(f"{K} local step{'s' if K > 1 else ''}" for K in CONVEX_STEPS),
    ]
    return markdown(head, rows)


def draw_convex(done: Done) -> None:
    panels = []
    for K in CONVEX_STEPS:
        curves = []
        for name in (*CONVEX, EVERYBODY):
            if lines := convex_lines(done, name, K):
                curves.append(over_seeds(name, lines, "above", grey=name == EVERYBODY))
        panels.append(
            Panel(
                f"mushrooms, λ = 0.01, 5 of 100, {K} local step{'s' if K > 1 else ''}",
                curves,
                y="f(x) − f*",
                log=True,
            )
        )
    picture(HERE / "convex.png", panels, columns=2)


def convex_claim(done: Done) -> Claim:
    """What partial participation leaves without memory, and what drift leaves with it."""
    ends = {(n, K): [rests(x) for x in convex_lines(done, n, K)] for n in CONVEX for K in CONVEX_STEPS}
    everybody = [rests(x) for x in convex_lines(done, EVERYBODY, 5)]
    parts: list[bool | None] = [None]
    told = "not run"
    if all(len(v) == len(CONVEX_SEEDS) for v in ends.values()) and everybody:
        parts = [
            max(ends[n, 1]) < 1e-6 < 1e-4 < min(ends[m, 1])
            for n, m in (("memory", "FedAvg"), ("memory, Adagrad", "Adagrad"))
        ]
        parts += [abs(v / everybody[0] - 1) < 0.1 for n in ("memory", "memory, Adagrad") for v in ends[n, 5]]
        told = (
            f"mushrooms, one label a client, 5 of 100 a round, {CONVEX_ROUNDS:,} rounds, f − f* at the end: one local step"
            f" {span(ends['FedAvg', 1])} without and {span(ends['memory', 1])} with memory, Adagrad {span(ends['Adagrad', 1])} and"
            f" {span(ends['memory, Adagrad', 1])}; five steps {span(ends['memory', 5])} and {span(ends['memory, Adagrad', 5])} with memory,"
            f" {everybody[0]:.2e} where all clients take part: what is left is drift"
        )
    return Claim(
        "Theorem 5.4, Corollary 5.5", "the error of partial participation vanishes, that of local steps stays", verdict(parts), told,
        "fedbraid reproduce fedadavr --part convex",
    )  # fmt: skip


def span(values: list[float]) -> str:
    """
    >>> span([0.00111, 0.00109]), span([0.001, 0.01])
    ('1.1e-03', '1.0e-03 to 1.0e-02')
    """
    low, high = f"{min(values):.1e}", f"{max(values):.1e}"
    return low if low == high else f"{low} to {high}"


def state(done: Done) -> str:
    every = cells()
    rows = []
    for dataset in EPOCHS:
        for tier in TIERS:
            for seeds in (SEEDS[:1], SEEDS[1:], SEEDS):
                if (dataset, tier, seeds) not in ORDER:
                    continue
                names = {
                    cell(dataset, p, m.name, m.algorithm, c, s).name
                    for p in PARTITIONS for s in seeds for m in methods_of_tier(tier, dataset, p) for c in m.client_lrs
                }  # fmt: skip
                rows.append(
                    [
                        f"{TITLES[dataset]}: {TIERS[tier]}",
                        ", ".join(map(str, seeds)),
                        f"{len(names & set(done))} of {len(names)}",
                    ]
                )
    for dataset, s in SHORT.items():
        for seeds in (SEEDS[:1], SEEDS[1:]):
            names = {c.name for seed in seeds for c in short_cells(dataset, seed)}
            rows.append(
                [
                    f"{s.title}, shortened",
                    ", ".join(map(str, seeds)),
                    f"{len(names & set(done))} of {len(names)}",
                ]
            )
    names = {c.name for seed in SEEDS for c in figure_cells(seed)}
    rows.append(
        [
            "CIFAR-10, shortened: Figures 2 and 5",
            ", ".join(map(str, SEEDS)),
            f"{len(names & set(done))} of {len(names)}",
        ]
    )
    rows.append(["all", "", f"{len(done)} of {len(every)}"])
    return markdown(["cells", "seeds", "done"], rows)


TIERS = {
    "first": "the paper's best FedAdaVR cell, FedVARP at 1 and every baseline at η_c 0.01",
    "core": "the paper's best FedAdaVR cell, FedVARP at 1, FedYogi at η_c 0.01",
    "grid": "FedAdaVR, 5 optimisers × 3 rates",
    "client": "FedAdaVR with its five best server rules, η_c 0.1 and 0.01",
    "tuned": "baselines at η_c 0.1 and 0.001, FedVARP at three rates",
    "faster": "baselines at η_c 0.1",
    "ablation": "NoVR, NoOPT",
    "bits": "memory in fp16, int8, int4",
    "quant": "FedAdaVR-Quant (fp16), 5 optimisers × 3 rates",
    "others": "FedAdaVR-Quant (fp16) with the same five server rules, FedAdaVR with Adagrad and Lamb at 0.01",
}


def report(done: Done) -> dict[str, str]:
    done = {name: line for name, line in done.items() if not name.startswith("full-")}
    found = scores(done)
    tables = {"state": state(done)}
    for dataset in EPOCHS:
        tables[f"{dataset} headline"] = headline(found, dataset)
        tables[f"{dataset} grid"] = full_grid(found, dataset)
        tables[f"{dataset} baselines"] = baselines(found, dataset)
        tables[f"{dataset} ablation"] = ablations(found, dataset)
        draw(done, dataset)
    tables["mnist rounds"] = to_target(done, found, "mnist", "LQ-1", (30, 40, 50, 60, 70, 75))
    tables["fmnist rounds"] = to_target(done, found, "fmnist", "LQ-1", (30, 40, 50, 60, 65, 70))
    tables["cifar10"] = short_table(done, found, "cifar10", (20, 25, 30, 35))
    tables["shakespeare"] = short_table(done, found, "shakespeare", (20, 30))
    tables |= {
        "gap": gap_table(done),
        "table 6": table6(done),
        "six": six_table(done),
        "latency": latency_table(),
    }
    draw_short(done)
    draw_figure(done)
    draw_convex(done)
    tables["convex"] = convex_table(done) + pictured(
        HERE / "convex.png", "f − f* over rounds, with and without memory"
    )
    tables["worth"] = worth_table(found)
    tables["figure 2"] = figure_table(done) + pictured(HERE / "figure2.png", "accuracy and loss")
    return tables


# The paper's claims -----------------------------------------------------------------------------------


def best_of_ours(found: Scores, dataset: str, partition: str) -> str:
    mine = best_of(found, dataset, partition, "FedAdaVR ")
    return f"{spread(mine[2])}" if mine else "–"


def wins(found: Scores, dataset: str) -> list[str]:
    """The partitions on which FedAdaVR's best cell is above every baseline's."""
    won = []
    for p in PARTITIONS:
        mine = best_of(found, dataset, p, "FedAdaVR ")
        others = [b for n in (*BASELINES, "FedVARP") if (b := best_of(found, dataset, p, n))]
        if mine and all(fmean(mine[2]) > fmean(b[2]) for b in others):
            won.append(p)
    return won


def near(found: Scores, dataset: str, partition: str) -> bool | None:
    """Whether our best cell is within 2.5 points of the paper's."""
    mine = best_of(found, dataset, partition, "FedAdaVR ")
    paper = best_printed(dataset, partition, ("fedadavr", "fedadavr-quant"))[0]
    return abs(fmean(mine[2]) - paper) < 2.5 if mine else None


def ahead_elsewhere(found: Scores, dataset: str, won: list[str]) -> str:
    """Who is level or ahead on the other partitions."""
    told = []
    for p in PARTITIONS:
        rivals = [b for n in (*BASELINES, "FedVARP") if (b := best_of(found, dataset, p, n))]
        if p not in won and rivals:
            best, mine = max(rivals, key=lambda b: fmean(b[2])), best_of(found, dataset, p, "FedAdaVR ")
            told.append(f"{p}: {best[0]} {spread(best[2])} for {spread(mine[2]) if mine else '–'}")
    return f"; ahead of it on {', '.join(told)}" if told else ""


def beside_fedyogi(found: Scores, dataset: str) -> str:
    """The best cells of both, paired by seed."""
    gains: list[float] = []
    for p in PARTITIONS:
        mine, theirs = (best_of(found, dataset, p, start) for start in ("FedAdaVR ", "FedYogi"))
        if mine and theirs and len(mine[2]) == len(theirs[2]) == len(SEEDS):
            gains += [a - b for a, b in zip(mine[2], theirs[2])]
    if len(gains) < 2:
        return "FedYogi not run"
    above = sum(g > 0 for g in gains)
    return f"above FedYogi in {above} of {len(gains)} pairs of partition and seed, by {error(gains)} points (standard error)"


def memory_claim(found: Scores) -> Claim:
    """What a memory in fewer bits loses, in the mean over the partitions and at worst."""
    told, parts = [], []
    for dataset in EPOCHS:
        for memory in ("fp16", "int8", "int4"):
            lost = []
            for p in PARTITIONS:
                _, optimiser, rate = best_printed(dataset, p, ("fedadavr",))
                pair = [
                    found.get((dataset, p, f"{n} {optimiser} {rate:g}", CLIENT_LR))
                    for n in ("FedAdaVR", f"FedAdaVR-{memory}")
                ]
                if pair[0] and pair[1]:
                    lost.append(fmean(pair[0]) - fmean(pair[1]))
            if lost:
                told.append(f"{TITLES[dataset]} {memory} {fmean(lost):+.2f} (at most {max(lost):+.1f})")
            parts.append(fmean(lost) < 0.5 if len(lost) == len(PARTITIONS) else None)
    return Claim("memory in fp16, int8, int4", "no loss of accuracy", verdict(parts, small=False), f"points lost in the mean over partitions: {', '.join(told) or 'not run'}", "fedbraid reproduce fedadavr --cells 'mnist/*/FedAdaVR-*'")  # fmt: skip


def text_claim(found: Scores) -> Claim:
    """Level with FedAdagrad, above the rest."""
    mine, level = (best_of(found, "shakespeare", "natural", n) for n in ("FedAdaVR ", "FedAdagrad"))
    rest = [
        b
        for n in ("FedAvg", "FedYogi", "SCAFFOLD", "FedVARP")
        if (b := best_of(found, "shakespeare", "natural", n))
    ]
    parts: list[bool | None] = [None]
    if mine and level and len(rest) == 4:
        parts = [abs(fmean(mine[2]) - fmean(level[2])) < 1, all(fmean(mine[2]) > fmean(b[2]) for b in rest)]
    told = ", ".join(f"{b[0]} {spread(b[2])}" for b in (mine, level, *rest) if b)
    return Claim("Figure 4", "Shakespeare: level with FedAdagrad, above the others", verdict(parts), f"{told} % (a GRU on 20 characters, 80 rounds of 1 epoch)", "fedbraid reproduce fedadavr --part shakespeare")  # fmt: skip


def table6_claim(done: Done) -> Claim:
    """Adagrad at 0.01 the best of the table, Quant level with it."""
    found = {}
    for c in table6_cells():
        if (line := done.get(c.name)) is not None and not line["diverged"]:
            found[c.name.split("/")[2]] = 100 * tail(line, SHORT["shakespeare"].window)
    whole = len(found) == len(table6_cells())
    order = sorted(found, key=found.__getitem__, reverse=True)
    parts: list[bool | None] = [None]
    if whole:
        twins = [
            found[f"FedAdaVR-fp16 {o} {r:g}"] - found[f"FedAdaVR {o} {r:g}"]
            for o in OPTIMISERS
            for r in RATES
        ]
        parts = [order[0].endswith("adagrad 0.01"), abs(fmean(twins)) < 1]
    told = ", ".join(f"{n} {found[n]:.1f}" for n in order[:3])
    mean = f"; Quant {fmean(twins):+.2f} points in the mean" if whole else ""
    return Claim("Table 6", "Shakespeare: Adagrad at 0.01 is the best of the table, Quant as good", verdict(parts), f"{len(found)} of {len(table6_cells())} cells, shortened: {told or 'not run'}{mean}", "fedbraid reproduce fedadavr --part shakespeare")  # fmt: skip


def after_claim(done: Done) -> Claim:
    lines = [done[n] for s in SEEDS if (n := short_cell("cifar10", GHBM, BOTH[0], s).name) in done]
    mine = [
        done[n]
        for s in SEEDS
        if (n := short_cell("cifar10", ours("adabelief", 0.001), CLIENT_LR, s).name) in done
    ]
    w = SHORT["cifar10"].window
    pair = [[100 * tail(x, w) for x in some if not x["diverged"]] for some in (mine, lines)]
    return Claim(
        "beside GHBM (2025)", "(not in the paper) GHBM at τ 50, untuned", "also here",
        f"CIFAR-10, LQ-1, shortened: FedAdaVR {spread(pair[0])}, GHBM {spread(pair[1])} %", "fedbraid reproduce fedadavr --part cifar10",
    )  # fmt: skip


def swing(line: Line) -> float:
    """The deviation of accuracy over the second half of a run, in points."""
    curve = line["curve"]["accuracy"]
    return 100 * pstdev(curve[len(curve) // 2 :])


def figure_claim(done: Done) -> Claim:
    ends, swings = [], []
    for m in FIGURE:
        lines = of_seeds(done, f"cifar10/LQ-1/{m.name}/client {CLIENT_LR:g}")
        ends.append([100 * tail(x, SHORT["cifar10"].window) for x in lines])
        swings.append([swing(x) for x in lines])
    parts: list[bool | None] = [None]
    if all(len(v) == len(SEEDS) for v in ends):
        parts = [
            fmean(ends[0]) > fmean(ends[1]),
            fmean(swings[1]) - fmean(swings[0]) > 0.5,
            fmean(ends[0]) > fmean(ends[2]),
        ]
    close = ", ".join(
        f"{m.name} {spread(v)} (swings by {spread(w)})" for m, v, w in zip(FIGURE, ends, swings)
    )
    return Claim(
        "Figures 2 and 5", "without the memory accuracy swings and ends lower; without the optimiser it is slower", verdict(parts),
        f"{close} %, 300 rounds of 1,500, a small network", "fedbraid reproduce fedadavr --cells 'cifar10/LQ-1/*/client 0.01/*'",
    )  # fmt: skip


def of_all_cells(found: Scores, dataset: str) -> dict[str, list[float]]:
    """Ours less the paper's, for every cell that it prints and we have, by method."""
    off: dict[str, list[float]] = {}
    kinds = {"fedadavr": "FedAdaVR", "fedadavr-quant": "FedAdaVR-fp16", "fedvarp": "FedVARP"}
    for (data, partition, kind, optimiser, rate), paper in printed().items():
        if data == dataset:
            name = " ".join([kinds[kind], *([optimiser] if optimiser else []), f"{rate:g}"])
            mine = found.get((dataset, partition, name, CLIENT_LR), [])
            if mine and all(map(math.isfinite, mine)):
                off.setdefault(kinds[kind], []).append(fmean(mine) - paper)
    return off


def cells_claim(found: Scores, number: int, dataset: str) -> Claim:
    """How many of a table's cells are within 2.5 points, and how far the others are."""
    off = of_all_cells(found, dataset)
    near = {n: sum(abs(v) <= 2.5 for v in values) for n, values in off.items()}
    total, hit = sum(map(len, off.values())), sum(near.values())
    printed_here = sum(key[0] == dataset for key in printed())
    told = ", ".join(
        f"{n} {near[n]} of {len(v)} (median difference {median(map(abs, v)):.1f}, at most {max(v, key=abs):+.1f})"
        for n, v in off.items()
    )
    return Claim(
        f"Table {number}", f"FedAdaVR, Quant and FedVARP on {TITLES[dataset]}, {printed_here} cells",
        "open" if total < printed_here else "agrees" if hit == total else "partly" if hit else "differs",
        f"{hit} of {total} cells within 2.5 points: {told}", f"fedbraid reproduce fedadavr --part {dataset}",
    )  # fmt: skip


def settings_tried(found: Scores, dataset: str, start: str) -> int:
    """How many settings of a method have all seeds, on the partition with the most: what its best cell is the best of."""
    whole = [
        p
        for (d, p, m, _), v in found.items()
        if d == dataset and m.startswith(start) and len(v) == len(SEEDS)
    ]
    return max((whole.count(p) for p in PARTITIONS), default=0)


def gains_of_memory(found: Scores, dataset: str) -> list[float]:
    """By partition and seed, FedAdaVR less NoVR with the same optimiser and rates."""
    gains: list[float] = []
    for p in PARTITIONS:
        _, optimiser, rate = best_printed(dataset, p, ("fedadavr",))
        pair = [
            found.get((dataset, p, f"{n} {optimiser} {rate:g}", CLIENT_LR), []) for n in ("FedAdaVR", "NoVR")
        ]
        if len(pair[0]) == len(pair[1]) == len(SEEDS):
            gains += [a - b for a, b in zip(*pair) if math.isfinite(a - b)]
    return gains


def error(values: list[float]) -> str:
    """
    >>> error([1.0, 2.0, 3.0])
    '+2.00 ± 0.58'
    """
    return f"{fmean(values):+.2f} ± {stdev(values) / math.sqrt(len(values)):.2f}"


def hard(found: Scores, optimiser: str, rate: float) -> list[float]:
    """The same on CIFAR-10 with one class a client, at the same setting."""
    pair = [
        found.get(("cifar10", "LQ-1", f"{n} {optimiser} {rate:g}", CLIENT_LR), [])
        for n in ("FedAdaVR", "NoVR")
    ]
    return [a - b for a, b in zip(*pair)]


def novr_best(found: Scores) -> tuple[str, float, list[float]] | None:
    """NoVR at the best of its own nine settings, once it has all seeds."""
    tried = {(m.name, c): found.get(("cifar10", "LQ-1", m.name, c), []) for m, c in novr_tried()}
    if not all(tried.values()):
        return None
    (name, rate), values = max(tried.items(), key=lambda item: item[1][0])
    return (name, rate, values) if len(values) == len(SEEDS) else None


def worth_claim(found: Scores) -> Claim:
    easy = {d: gains_of_memory(found, d) for d in EPOCHS}
    told = [f"{TITLES[d]} {error(v)} points (standard error, {len(v)} pairs)" for d, v in easy.items() if v]
    parts: list[bool | None] = []
    for v in easy.values():
        whole = len(v) == len(SEEDS) * len(PARTITIONS)
        parts.append(fmean(v) > 2 * stdev(v) / math.sqrt(len(v)) if whole else None)
    for optimiser, rate in (("adagrad", 0.01), HEADLINE):
        gains = hard(found, optimiser, rate)
        if gains:
            told.append(f"CIFAR-10 LQ-1 {optimiser} {rate:g} {' / '.join(f'{g:+.1f}' for g in gains)}")
        parts.append(min(gains) > 0 if len(gains) == len(SEEDS) else None)
    if (tuned := novr_best(found)) is not None:
        mine = found["cifar10", "LQ-1", f"FedAdaVR {HEADLINE[0]} {HEADLINE[1]:g}", CLIENT_LR]
        told.append(
            f"NoVR at the best of its own nine settings ({tuned[0]}, η_c {tuned[1]:g}) {spread(tuned[2])} for {spread(mine)}"
        )
        parts.append(min(a - b for a, b in zip(mine, tuned[2])) > 0)
    return Claim(
        "the memory itself (abstract; NoVR)", "the same optimiser without the memory is worse",
        "partly" if True in parts and False in parts else verdict(parts),
        f"paired by seed, FedAdaVR less NoVR: {'; '.join(told) or 'not run'}", "fedbraid reproduce fedadavr --cells '*/NoVR*'",
    )  # fmt: skip


def worth_table(found: Scores) -> str:
    """What the memory is worth on CIFAR-10 with one class a client."""
    rows = []
    for optimiser, rate in (("adagrad", 0.01), HEADLINE):
        same = f"{optimiser} {rate:g}"
        for name in ("FedAdaVR", *(f"FedAdaVR-{m}" for m in BITS), "NoVR"):
            values = found.get(("cifar10", "LQ-1", f"{name} {same}", CLIENT_LR), [])
            if values:
                rows.append(
                    [
                        f"{name} {same}, η_c {CLIENT_LR:g}",
                        shown(values),
                        " / ".join(f"{v:.1f}" for v in values),
                    ]
                )
    for m, c in novr_tried():
        values = found.get(("cifar10", "LQ-1", m.name, c), [])
        if values and (m.name, c) != (f"NoVR {HEADLINE[0]} {HEADLINE[1]:g}", CLIENT_LR):
            rows.append([f"{m.name}, η_c {c:g}", shown(values), " / ".join(f"{v:.1f}" for v in values)])
    return markdown(["CIFAR-10, LQ-1, 300 rounds", "accuracy, last 60 rounds", "by seed"], rows)


def hard_memory_claim(found: Scores) -> Claim:
    """Figure 5 as the text has it: the memory in few bits on CIFAR-10."""
    base = found.get(("cifar10", "LQ-1", f"FedAdaVR {HEADLINE[0]} {HEADLINE[1]:g}", CLIENT_LR), [])
    told, parts = [], []
    for m in BITS:
        mine = found.get(("cifar10", "LQ-1", f"FedAdaVR-{m} {HEADLINE[0]} {HEADLINE[1]:g}", CLIENT_LR), [])
        whole = len(mine) == len(base) == len(SEEDS)
        parts.append(fmean(base) - fmean(mine) < 1 if whole else None)
        told.append(f"{m} {shown(mine)}")
    return Claim(
        "Figure 5, Quant", "FP16, Int8 and Int4 memories lose nothing on CIFAR-10 LQ-1", verdict(parts),
        f"{', '.join(told)} for {shown(base)} %, a small network, 300 rounds", "fedbraid reproduce fedadavr --cells 'cifar10/LQ-1/FedAdaVR-*'",
    )  # fmt: skip


def claims(done: Done) -> list[Claim]:
    done = {name: line for name, line in done.items() if not name.startswith("full-")}
    found, run = scores(done), "fedbraid reproduce fedadavr"
    tables = []
    for number, dataset in ((7, "mnist"), (8, "fmnist")):
        won = wins(found, dataset)
        tuned = {n: settings_tried(found, dataset, n) for n in ("FedAdaVR ", "FedYogi")}
        tables += [
            cells_claim(found, number, dataset),
            Claim(
                f"Figures 1 and 3, {TITLES[dataset]}", "FedAdaVR above every baseline on all six partitions", verdict([p in won for p in PARTITIONS], small=False),
                f"means, so on {', '.join(won) or 'none'}{ahead_elsewhere(found, dataset, won)}; {beside_fedyogi(found, dataset)}; the best of up to"
                f" {tuned['FedAdaVR ']} FedAdaVR cells against the best of {tuned['FedYogi']} of FedYogi's, chosen on the test set", f"{run} --part {dataset}",
            ),
        ]  # fmt: skip
    short = best_of(found, "cifar10", "LQ-1", "FedAdaVR ")
    rival = max(
        (b for n in (*BASELINES, "FedVARP") if (b := best_of(found, "cifar10", "LQ-1", n))),
        key=lambda b: fmean(b[2]),
        default=None,
    )
    lamb = best_of(found, "cifar10", "LQ-1", "FedAdaVR lamb")
    first_two: list[bool | None] = [None]
    if short is not None and rival is not None and lamb is not None:
        first_two = [fmean(short[2]) > fmean(rival[2]), short[0] == lamb[0]]
    close = (
        f"{short[0]} {spread(short[2])} %, best other {rival[0]} {spread(rival[2])} %, {lamb[0]} {spread(lamb[2])} %"
        if short and rival and lamb
        else "not run"
    )
    return [
        *tables,
        Claim("Table 4, Table 9, Figures 1 and 3, CIFAR-10", "FedAdaVR first to every accuracy on LQ-1, Lamb its best optimiser", verdict(first_two), f"LQ-1 alone, a small network, 300 rounds of 1,500: {close}", f"{run} --part cifar10"),
        six_claim(done),
        worth_claim(found),
        figure_claim(done),
        hard_memory_claim(found),
        text_claim(found),
        table6_claim(done),
        memory_claim(found),
        after_claim(done),
        gap_claim(done),
        by_test("tests/test_properties.py::test_stored_memory_takes_its_share_of_float32", "50, 25 and 12.5 % and scales", "section 4", "memory at fp16, int8, int4"),
        by_test("tests/test_cost.py::test_fedadavr_table_3", "from the bytes of a stored row", "Table 3", "memory for 1,000 clients"),
        latency_claim(),
        Claim("Tables 1 and 2", "settings and rounds", "also here", "taken as printed", f"{run} --list"),
        by_test("tests/test_pseudocode.py::test_fedadavr", "equal to a transcription, five optimisers, four memories", "Algorithms 1 to 9", "server, optimisers, quantisation"),
        by_test("tests/test_properties.py::test_the_running_sum_is_the_sum_recomputed_after_many_steps", "to rounding", "eq. 6", "the running sum"),
        convex_claim(done),
    ]  # fmt: skip


def sentences(done: Done) -> list[str]:
    """What came of FedAdaVR."""
    found = scores({name: line for name, line in done.items() if not name.startswith("full-")})
    said = []
    easy = {d: gains_of_memory(found, d) for d in EPOCHS}
    gains = hard(found, "adagrad", 0.01)
    if all(easy.values()) and gains:
        more = hard(found, *HEADLINE)
        head = f", with AdaBelief {' / '.join(f'{g:+.1f}' for g in more)}" if len(more) == len(SEEDS) else ""
        said.append(
            f"On CIFAR-10 with one class a client the memory is worth {' / '.join(f'{g:+.1f}' for g in gains)} points with Adagrad{head}, by seed;"
            f" on MNIST ({error(easy['mnist'])}) and Fashion-MNIST ({error(easy['fmnist'])}) it is worth nothing: there the adaptive server is what helps."
        )
    off = {d: of_all_cells(found, d) for d in EPOCHS}
    if all(off.values()):
        hits = {
            d: (sum(abs(v) <= 2.5 for some in x.values() for v in some), sum(map(len, x.values())))
            for d, x in off.items()
        }
        said.append(
            f"Of the printed cells {hits['mnist'][0]} of {hits['mnist'][1]} on MNIST and {hits['fmnist'][0]} of {hits['fmnist'][1]} on Fashion-MNIST are within"
            " 2.5 points of ours, most of the others are higher here; single cells of skewed partitions vary by more than that from seed to seed."
        )
    won = {d: wins(found, d) for d in EPOCHS}
    said.append(
        f"Its best cell is above every baseline's on {len(won['mnist'])} of 6 partitions of MNIST and on {len(won['fmnist'])} of 6 of Fashion-MNIST, as the best"
        f" of up to {settings_tried(found, 'mnist', 'FedAdaVR ')} cells against {settings_tried(found, 'mnist', 'FedYogi')} of FedYogi's; it is"
        f" {beside_fedyogi(found, 'mnist')} on MNIST and {beside_fedyogi(found, 'fmnist')} on Fashion-MNIST."
    )
    convex_ = [[rests(x) for x in convex_lines(done, n, 1)] for n in ("FedAvg", "memory")]
    if all(convex_):
        rest = [rests(x) for x in convex_lines(done, "memory", 5)]
        said.append(
            f"Theorem 5.4 can be seen on a convex problem: with one local step FedAvg stops at {span(convex_[0])} from the optimum and the memory goes to"
            f" {span(convex_[1])}; with five it rests at {span(rest)}, the drift of local steps, which no memory removes."
        )
    mine = latency()
    if mine:
        more = [v - mine["FedAvg"] for n, v in mine.items() if n.startswith("FedAdaVR")]
        said.append(
            f"A memory in 16, 8 or 4 bits costs no accuracy on the MNISTs, and a round takes {min(more):.1f} to {max(more):.1f} s longer than FedAvg's, not the paper's"
            f" {min(v for n, v in PAPER_LATENCY.items() if n.startswith('FedAdaVR')) - PAPER_LATENCY['FedAvg']:.0f} s and more, because only the cohort's part of the sum is updated."
        )
    return said
