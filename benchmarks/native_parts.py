"""Where one client's gradient step goes, by kind of kernel: needs Linux's perf.

    python benchmarks/native_parts.py [W3 W5 W6 W7 W8] [--steps 50]

Each workload of speed.py takes so many steps on one thread in a process of its own, under `perf record`; shares are of the
samples that fell into the compiled library.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile

KINDS = {
    "products": r"columns|BatchMatmul<|products|DirectConv|weight_block|SmallConv|::dot|weight_rows",
    "first convolution and its pooling": r"ConvMaxPool",
    "tiles there and back": r"Winograd",
    "norms": r"Norm",
    "recurrent cells": r"RNN",
    "attention besides its products": r"Attention|Softmax",
    "samples turned into rows and back": r"scatter|gather",
    "dropout": r"Dropout",
    "pooling": r"Pool",
    "biases": r"bias",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", default=["W3", "W5", "W6", "W7", "W8"], metavar="W")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--one", action="store_true", help="only take the steps, in this process")
    asked = parser.parse_args()
    for name in asked.workloads:
        if asked.one:
            take(name, asked.steps)
        else:
            print(f"{name}: {parts(name, asked.steps)}", flush=True)


def parts(name: str, steps: int) -> str:
    command = [sys.executable, __file__, name, "--one", "--steps"]
    subprocess.run([*command, "1"], check=True)  # compiles
    with tempfile.NamedTemporaryFile() as file:
        record = ["perf", "record", "-q", "-F", "1000", "-o", file.name, "--", *command, str(steps)]
        subprocess.run(record, check=True, stderr=subprocess.DEVNULL)
        report = ["perf", "report", "-i", file.name, "--sort", "dso,symbol", "--stdio"]
        said = subprocess.run(report, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"^\s+([\d.]+)%\s+[0-9a-f]{32}\.so\s+\[\.\]\s+(.*)$", said, re.M)
    sums: dict[str, float] = {}
    for share, symbol in found:
        kind = next((k for k, pattern in KINDS.items() if re.search(pattern, symbol)), "the rest")
        sums[kind] = sums.get(kind, 0.0) + float(share)
    all_ = sum(sums.values())
    largest = sorted(sums.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{kind} {value / all_:.0%}" for kind, value in largest if value / all_ >= 0.01)


def take(name: str, steps: int) -> None:
    import numpy as np
    import torch
    from speed import WORKLOADS

    from fedbraid.data.batches import Batch
    from fedbraid.data.task import Task
    from fedbraid.engines.native_backend import Native

    torch.set_num_threads(1)
    work = WORKLOADS[name]
    x, y = (t[: work.batch] for t in work.table())
    task = Task.from_table(work.build, x, y, torch.arange(len(x)), [0, len(x)])
    noise = np.zeros(1, np.uint64) if task.stochastic else None
    native, at = Native(task, 1), task.initial(0)[None]
    for _ in range(steps):
        native(at, Batch(x, y, torch.arange(len(x))[None], noise=noise))


if __name__ == "__main__":
    main()
