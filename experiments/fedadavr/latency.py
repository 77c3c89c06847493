"""Table 5 measured here: `python experiments/fedadavr/latency.py` writes latency.json, which the page shows.

A round of 5 clients × 5 epochs × 10 batches of 20 with ResNet-18, in seconds of one core: what a local step of FedAvg takes, and what
each algorithm takes besides, a local step and a round, timed on as many weights with a gradient that costs next to nothing. Algorithms
take turns; each has the least of two medians over its rounds after the first. Clients that do what FedAvg's do take no longer a step.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fedbraid as fb
from fedbraid.algorithms.registry import algorithm_from

ALGORITHMS = {
    "FedAvg": "fedavg()", "FedAdam": "fedadam(lr=0.1)", "FedAdagrad": "fedadagrad(lr=0.1)", "FedYogi": "fedyogi(lr=0.01)",
    "FedProx": "fedprox(mu=0.01)", "SCAFFOLD": "scaffold()", "FedNova": "fednova()", "MIFA": "mifa()", "FedVARP": "fedvarp(lr=1.0)",
} | {f"FedAdaVR {o}": f"fedadavr({o!r}, lr=0.01)" for o in ("adam", "adagrad", "adabelief", "yogi", "lamb")}  # fmt: skip
CLIENTS, PER_ROUND, BATCH, STEPS = 20, 5, 20, 250  # steps of all clients in a round
FEW, MANY, ROUNDS, TURNS = 1, 3, 3, 2


class PlainUplink(nn.Module):
    """As many weights as ResNet-18 in layers of its kind, of which hardly any is used."""

    def __init__(self, weights: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(weights // 20)) for _ in range(20))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer[:10] for layer in self.layers]).sum(0) * x.flatten(1)[:, :1]


def clients(shape: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(0)
    return [
        (draw.normal(size=(BATCH, *shape)).astype(np.float32), draw.integers(0, 10, BATCH))
        for _ in range(CLIENTS)
    ]


class Clock:
    """Seconds of this processor between two steps."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def step(self, record: dict[str, object], run: object) -> None:
        self.at.append(time.process_time())

    def median(self) -> float:
        return statistics.median(b - a for a, b in zip(self.at, self.at[1:]))


def rounds(task: fb.Task, algorithm: str, steps: int, count: int) -> Clock:
    clock = Clock()
    fb.simulate(
        task, algorithm_from(algorithm), fb.Work(lr=0.01, steps=steps, batch=BATCH, momentum=0.9), fb.rounds(count, clients=PER_ROUND),
        engine="in_process(threads=1)", evaluate_every=None, callbacks=[clock],
    )  # fmt: skip
    return clock


def main() -> None:
    torch.set_num_threads(1)
    network = fb.models.build("resnet18_gn")
    weights = fb.Layout.of(network).size
    images = fb.Task.from_arrays(network, clients((3, 32, 32)))
    step = rounds(images, "fedavg()", 1, 3).median() / PER_ROUND
    bare = fb.Task.from_arrays(PlainUplink(weights), clients((1,)))
    took: dict[tuple[str, int], list[float]] = {}
    for _ in range(TURNS):
        for name, text in ALGORITHMS.items():
            for steps in (FEW, MANY):
                took.setdefault((name, steps), []).append(rounds(bare, text, steps, ROUNDS).median())
    once = {name: min(took[name, FEW]) for name in ALGORITHMS}
    each = {name: (min(took[name, MANY]) - once[name]) / (MANY - FEW) / PER_ROUND for name in ALGORITHMS}
    own = {name: algorithm_from(text).rule != fb.fedavg().rule for name, text in ALGORITHMS.items()}
    more = {name: own[name] * (each[name] - each["FedAvg"]) for name in ALGORITHMS}
    facts = {
        "weights": weights,
        "seconds_a_local_step": step,
        "seconds_besides_a_step": more,
        "seconds_besides_a_round": once,
        "seconds": {name: STEPS * (step + more[name]) + once[name] for name in ALGORITHMS},
    }
    (Path(__file__).parent / "latency.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
