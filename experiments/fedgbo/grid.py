"""FedGBO: Figures 1 and 2 shortened, at the paper's rates (Table 8), for K = 10 and K = 50 local steps.

FEMNIST (105 writers of LEAF), CIFAR-100 (10,000 images, 100 clients) and Shakespeare (660 roles, at most 500 windows each).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import fedbraid as fb
from fedbraid.reproduce import Cell, Line, Panel, markdown, picture, spread

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
TASKS = {
    "FEMNIST": ("load('femnist', clients=105, partition=natural(), seed={seed})", 5),
    "CIFAR100": ("load('cifar100', clients=100, partition=pachinko(0.1, 10.0), seed={seed})", 5),
    "Shakespeare": (
        "load('shakespeare', clients=660, partition=natural(), seed={seed}, max_samples_per_client=500)",
        7,
    ),
}
ROUNDS = {"FEMNIST": 100, "CIFAR100": 100, "Shakespeare": 60}
TARGETS = {"FEMNIST": 0.5, "CIFAR100": 0.1, "Shakespeare": 0.3}
ALGORITHMS = ("fedgbo", "mimelite", "mfl", "adaptivefedopt")
OPTIMISERS = ("sgdm", "rmsprop", "adam")


@cache
def rates() -> dict[tuple[str, int, str, str], tuple[float, float, float]]:
    """(rate, beta, client rate) of Table 8."""
    with open(HERE / "paper_table8.csv") as file:
        return {
            (r["task"], int(r["local_steps"]), r["algorithm"], r["optimizer"]): (
                float(r["lr"]), float(r["beta"] or 0), float(r["client_lr"] or 0)
            )
            for r in csv.DictReader(file)
        }  # fmt: skip


def build(task: str, steps: int, name: str, optimiser: str) -> tuple[str, float]:
    """(the algorithm, the clients' rate)."""
    lr, beta, client_lr = rates()[task, steps, name, optimiser]
    if name == "fedavg":
        return "fedavg(weights='uniform')", lr
    if name == "adaptivefedopt":
        match optimiser:
            case "sgdm":
                return f"fedavgm(lr={lr * (1 - beta)}, momentum={beta}, weights='uniform')", client_lr
            case "adam":
                return f"fedadam(lr={lr}, beta1={beta}, beta2=0.99, eps=1e-3, weights='uniform')", client_lr
        return f"fedadam(lr={lr}, beta1=0.0, beta2={beta}, eps=1e-3, weights='uniform')", client_lr
    kind = f"beta1={beta}, beta2=0.99" if optimiser == "adam" else f"beta={beta}"
    return f"{name}(optimizer={optimiser!r}, {kind})", lr


def cell(task: str, steps: int, name: str, optimiser: str, seed: int) -> Cell:
    text, lr = build(task, steps, name, optimiser)
    spec, per_round = TASKS[task]
    return Cell(
        f"{task}/K {steps}/{name} {optimiser}/seed {seed}", spec.format(seed=seed), text,
        fb.Work(lr=lr, steps=steps, batch=32), fb.rounds(ROUNDS[task], clients=per_round), seed=seed, every=10,
        keep=("accuracy", "loss", "norm"),
    )  # fmt: skip


def methods() -> list[tuple[str, str]]:
    return [("fedavg", "sgd"), *((a, o) for o in OPTIMISERS for a in ALGORITHMS)]


def cells() -> list[Cell]:
    return [
        cell(task, steps, name, optimiser, seed)
        for steps in (10, 50) for seed in SEEDS for task in TASKS for name, optimiser in methods()
    ]  # fmt: skip


# Tables and pictures --------------------------------------------------------------------------------

Done = Mapping[str, Line]


def reached(line: Line, target: float) -> float | None:
    """The share of the run after which the target was reached."""
    curve = line["curve"]
    return next(
        (
            s / line["steps"]
            for s, a in zip(curve["step"], curve["accuracy"])
            if a is not None and a >= target
        ),
        None,
    )


def table(done: Done, task: str, steps: int) -> str:
    rows = []
    for name, optimiser in methods():
        lines = [done[n] for s in SEEDS if (n := cell(task, steps, name, optimiser, s).name) in done]
        if not lines:
            continue
        ok = [x for x in lines if not x["diverged"]]
        first = reached(ok[0], TARGETS[task]) if ok else None
        rows.append([
            f"{name} {optimiser}", spread([100 * x["curve"]["accuracy"][-1] for x in ok]) if ok else "diverged", str(len(lines)),
            "x" if first is None else f"{first * ok[0]['steps']:.0f}",
            "x" if first is None else f"{first * ok[0]['bytes_up'] / 1e6:.0f}",
            "x" if first is None else f"{first * ok[0]['bytes_down'] / 1e6:.0f}",
        ])  # fmt: skip
    target = f"{100 * TARGETS[task]:.0f} %"
    head = [
        f"{task}, K = {steps}",
        f"accuracy, round {ROUNDS[task]}",
        "seeds",
        f"rounds to {target}",
        "MB up to it",
        "MB down to it",
    ]
    return markdown(head, rows)


def report(done: Done) -> dict[str, str]:
    every = cells()
    state = [
        [f"{p}, K = {k}", f"{sum(c.name in done for c in some)} of {len(some)}"]
        for p in TASKS for k in (10, 50) if (some := [c for c in every if c.name.startswith(f"{p}/K {k}/")])
    ]  # fmt: skip
    panels = []
    for task in TASKS:
        curves = []
        for name, optimiser in methods():
            line = done.get(cell(task, 10, name, optimiser, 0).name)
            if line is not None:
                curves.append((f"{name} {optimiser}", line["curve"]["step"], line["curve"]["accuracy"]))
        if curves:
            panels.append(Panel(f"{task}, K = 10", curves))
    if panels:
        picture(HERE / "curves.png", panels)
    tables = {f"{task} {k}": table(done, task, k) for task in TASKS for k in (10, 50)}
    return {"state": markdown(["part", "cells done"], state), **tables}
