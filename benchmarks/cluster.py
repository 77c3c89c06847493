"""What a Ray cluster costs beside a pool: W3 on two nodes of one CPU each, and the price of a block and of a byte.

    python benchmarks/cluster.py [--repeats 3] [--rounds 3]

Contestants take turns, so that a noisy machine is noisy for both; the smallest time of each counts. The first
round of every run is not counted: there, workers are started and the data is shipped.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from torch import nn

import fedbraid as fb


class Clock:
    """When each step was done."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def step(self, record: dict[str, Any], run: Any) -> None:
        self.at.append(time.perf_counter())


def seconds(task: fb.Task, work: fb.Work, engine: str, cohort: int, rounds: int) -> float:
    """Of one round, the first left out."""
    clock = Clock()
    plan = (task, fb.fedavg(), work, fb.rounds(rounds + 1, clients=cohort))
    fb.simulate(*plan, engine=engine, evaluate_every=None, callbacks=[clock])
    return (clock.at[-1] - clock.at[0]) / rounds


def w3(clients: int = 20) -> fb.Task:
    """W3 with a smaller table; a round is the same."""
    draw = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(500, 3, 32, 32, generator=draw), torch.randint(10, (500,), generator=draw))
        for _ in range(clients)
    ]
    return fb.Task.from_arrays(fb.models.w3_cnn, pairs)


def wide(d: int) -> fb.Task:
    """Next to no work, and vectors of d numbers."""
    return fb.Task.from_arrays(
        lambda: nn.Linear(d, 1, bias=False), [(torch.ones(1, d), torch.ones(1, 1))] * 64, loss="mse"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    ray.init(cluster.address, log_to_driver=False, logging_level="warning")
    engines, best = ("pool(workers=2)", "ray(workers=2)"), {}
    task, work = w3(), fb.Work(lr=0.01, epochs=1, batch=50)
    for _ in range(given.repeats):
        for engine in engines:
            took = seconds(task, work, engine, 10, given.rounds)
            best[engine] = min(took, best.get(engine, took))
    report: dict[str, Any] = {f"W3 s a round, {engine}": round(took, 3) for engine, took in best.items()}
    report["W3 ray / pool throughput"] = round(best[engines[0]] / best[engines[1]], 3)
    one = fb.Work(lr=1e-3, steps=1, batch=None)
    small, large = 10, 1_000_000
    cost = {
        d: min(seconds(wide(d), one, "ray(workers=2, block=1)", 16, 5) for _ in range(given.repeats))
        for d in (small, large)
    }
    report["ms a block of one small client"] = round(1000 * cost[small] / 16, 2)
    report["ns a byte, up and down, two nodes"] = round(
        1e9 * (cost[large] - cost[small]) / (16 * 4 * large), 3
    )
    print(json.dumps(report, indent=2))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
