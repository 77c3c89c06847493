"""One gradient step: compiled code beside a bare PyTorch step, on one core and on all.

    python benchmarks/native_step.py [--repeats 100]

A PyTorch step is what a hand-written loop does for one client on one thread: take the batch from the
table, forward, backward, with the gradients freed before. Times are the least of several, taken in turns.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

from fedbraid import models
from fedbraid.data.batches import Batch
from fedbraid.data.task import Task
from fedbraid.engines.native import Native

# name: (model, shape of a sample, classes, clients in a call, batch)
STEPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int, int]] = {
    "W1/W2 LeNet-5, batch 20": (lambda: models.build("lenet5"), (1, 28, 28), 10, 2, 20),
    "W3 CNN, batch 50": (lambda: models.build("w3_cnn"), (3, 32, 32), 10, 2, 50),
    "W4 logistic, batch 10": (lambda: models.build("logistic", features=112), (112,), 2, 1000, 10),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--repeats", type=int, default=100)
    repeats = arguments.parse_args().repeats
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    print(f"{'per client':26} {'autograd':>10} {'native':>10} {'ratio':>6} {f'{cores} cores':>10} {'ratio':>6}"
          f" {'compile':>8} {'load':>7} {'error':>8}")  # fmt: skip
    for name, step in STEPS.items():
        measure(name, *step, repeats, cores)


def measure(name: str, model: Callable[[], nn.Module], shape: tuple[int, ...], classes: int, m: int, size: int,
            repeats: int, cores: int) -> None:  # fmt: skip
    torch.manual_seed(0)
    n = m * size * 3
    x, y = torch.randn(n, *shape), torch.randint(classes, (n,))
    task = Task.from_table(model, x, y, torch.arange(n), [0, n])
    batch = Batch(x, y, torch.randperm(n)[: m * size].view(m, size))
    at = task.initial(0).repeat(m, 1)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        compiled, _ = clock(lambda: Native(task, 1))
        loaded, native = clock(lambda: Native(task, 1))
    module = task.layout.load(task.module(), at[0])
    bare, one, all_ = [], [], []
    for _ in range(repeats):
        bare.append(clock(lambda: autograd(module, batch))[0])
        for threads, times in ((1, one), (cores, all_)):
            native.threads = threads
            times.append(clock(lambda: native(at, batch))[0] / m)
    error = (native(at, batch)[0][0] - torch.cat([p.grad.flatten() for p in module.parameters()])).abs().max()
    a, b, c = min(bare), min(one), min(all_)
    print(f"{name:26} {a * 1e3:7.3f} ms {b * 1e3:7.4f} ms {a / b:6.1f} {c * 1e3:7.4f} ms {a / c:6.1f}"
          f" {compiled:6.1f} s {loaded:5.2f} s {error:8.1e}")  # fmt: skip


def autograd(module: nn.Module, batch: Batch) -> None:
    for p in module.parameters():
        p.grad = None
    rows = batch.rows[0]
    nn.functional.cross_entropy(module(batch.inputs[rows]), batch.targets[rows]).backward()


def clock(f: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = f()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main()
