"""Rounds over inputs that are one tensor, against the same tensor alone in a tuple and in a dict, side by side.

    python benchmarks/tree.py [W1 W4] [--repeats 5]

They take turns in one process of one thread; the smallest time of each counts, in seconds of the processor. A ratio of 1
means that a tree costs nothing.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch
from speed import WORKLOADS, Workload
from torch import Tensor, nn

import fedbraid as fb


class Named(nn.Module):
    """A model whose input has a name, so that a dict can call it."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.model = work.build()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


def tasks(work: Workload) -> dict[str, fb.Task]:
    x, y = work.table()
    rows, offsets = torch.arange(len(x)), np.arange(0, len(x) + 1, work.samples)
    kinds = {"tensor": x, "tuple": (x,), "dict": {"x": x}}
    return {
        kind: fb.Task.from_table(lambda: Named(work), inputs, y, rows, offsets)
        for kind, inputs in kinds.items()
    }


def spent(task: fb.Task, work: Workload, engine: str, rounds: int) -> float:
    """Seconds of the processor in these rounds, all of a run's own work with them."""
    visit = fb.Work(lr=0.01, epochs=work.epochs, batch=work.batch, momentum=work.momentum)
    start = time.process_time()
    fb.simulate(
        task,
        fb.fedavg(),
        visit,
        fb.rounds(rounds, clients=work.cohort),
        engine=engine,
        evaluate_every=None,
        progress=False,
    )
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=["W1", "W4"], metavar="W")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for each other take the processor's time too
    for name in asked.workloads:
        work = WORKLOADS[name]
        made = tasks(work)
        for backend in ("native", "vmap", "loop"):
            engine, least = f"in_process(backend='{backend}')", dict.fromkeys(made, float("inf"))
            for repeat in range(asked.repeats + 1):  # the first one warms up
                for kind, task in made.items():
                    took = spent(task, work, engine, asked.rounds if backend != "loop" else asked.rounds // 4)
                    least[kind] = min(least[kind], took) if repeat else least[kind]
            ratios = {f"{kind}_ratio": round(t / least["tensor"], 3) for kind, t in least.items()}
            print(json.dumps({"workload": name, "backend": backend, **ratios}), flush=True)


if __name__ == "__main__":
    main()
