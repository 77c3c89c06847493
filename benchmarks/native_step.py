"""One gradient step of a client on one thread: compiled code beside bare PyTorch, and beside a large matrix product.

    python benchmarks/native_step.py [W1 ... W8] [--repeats 20]

Processor time, the least of several taken in turns, so that the table can be made on a busy machine. "share" is the
rate of the step's products and convolutions (forward and backward, as PyTorch counts them) over the rate of a product
of two 2048 x 2048 matrices.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from speed import WORKLOADS, Workload, trained
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedbraid.data.batches import Batch
from fedbraid.data.task import Task
from fedbraid.engines.native_backend import Native


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("workloads", nargs="*", default=[f"W{k}" for k in range(1, 9)], metavar="W")
    arguments.add_argument("--repeats", type=int, default=20)
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    a, b = torch.randn(2, 2048, 2048)
    rate = 2 * 2048**3 / min(clock(lambda: a @ b) for _ in range(5))
    print(f"a large product: {rate / 1e9:.0f} GFLOP/s\n")
    print("| workload | GFLOP | PyTorch | native | ratio | share of a large product | compile | error |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in asked.workloads:
        print(f"| {name} | {measure(WORKLOADS[name], rate, asked.repeats)} |", flush=True)


def measure(work: Workload, rate: float, repeats: int) -> str:
    torch.manual_seed(0)
    m, size = min(work.cohort, 1000 // work.batch + 1), work.batch
    x, y = work.table()
    x, y = x[: m * size], y[: m * size]
    task = Task.from_table(work.build, x, y, torch.arange(len(x)), [0, len(x)])
    noise = np.arange(m, dtype=np.uint64) if task.stochastic else None
    batch = Batch(x, y, torch.arange(m * size).view(m, size), noise=noise)
    at = task.initial(0).repeat(m, 1)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        before = os.times()
        native = Native(task, 1)
        compiled = os.times().children_user - before.children_user
    module = task.layout.load(task.module(), at[0])
    with FlopCounterMode(display=False) as counter:
        autograd(module, batch)
    bare, ours = [], []
    for _ in range(repeats):
        bare.append(clock(lambda: autograd(module, batch)))
        ours.append(clock(lambda: native(at, batch)) / m)
    flop, p, q = counter.get_total_flops(), min(bare), min(ours)
    error = "dropout"
    if noise is None:
        want = torch.cat([p.grad.flatten() for p in trained(module)])
        error = f"{float((native(at, batch)[0][0] - want).abs().max()):.0e}"
    return (
        f"{flop / 1e9:.3f} | {p * 1e3:.3f} ms | {q * 1e3:.4f} ms | {p / q:.2f} | {flop / q / rate:.0%}"
        f" | {compiled:.1f} s | {error}"
    )


def autograd(module: nn.Module, batch: Batch) -> None:
    for p in module.parameters():
        p.grad = None
    rows = batch.rows[0]
    nn.functional.cross_entropy(module(batch.inputs[rows]), batch.targets[rows]).backward()


def clock(f: Callable[[], object]) -> float:
    start = time.process_time()
    f()
    return time.process_time() - start


if __name__ == "__main__":
    main()
