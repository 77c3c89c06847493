"""What asynchrony costs: fedbuff with concurrency 1,000 and buffer 10 beside synchronous rounds of 10, and bare events.

python benchmarks/asynchrony.py
"""

from __future__ import annotations

import time

import numpy as np
import torch
from speed import LR, WORKLOADS, Stamps

import fedbraid as fb


def per_update(task: fb.Task, schedule: fb.Schedule, repeats: int = 5) -> float:
    """Seconds per client update, the smallest of some medians."""
    best = float("inf")
    for _ in range(repeats):
        stamps = Stamps()
        fb.simulate(
            task,
            fb.fedbuff(),
            fb.Work(lr=LR, batch=10),
            schedule,
            evaluate_every=None,
            progress=False,
            callbacks=[stamps],
        )
        best = min(best, stamps.per_round() / 10)
    return best


def main() -> None:
    work = WORKLOADS["W4"]
    x, y = work.table()
    task = fb.Task.from_table(work.build, x, y, torch.arange(len(x)), np.arange(0, len(x) + 1, work.samples))
    together = per_update(task, fb.rounds(400, clients=10))
    apart = per_update(task, fb.buffered(600, buffer=10, concurrency=1000))
    print(
        f"synchronous {1e6 * together:.1f} µs, asynchronous {1e6 * apart:.1f} µs per client update: {apart / together:.2f} times"
    )
    start, uploads = time.perf_counter(), 0
    for tick in fb.buffered(20_000, buffer=10, concurrency=1000).ticks(10_000, 0):
        uploads += len(tick.clients)
    took = time.perf_counter() - start
    print(f"the queue alone: {2 * uploads / took:,.0f} events (starts and ends) a second")


if __name__ == "__main__":
    main()
