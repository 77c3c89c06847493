"""Which networks are compiled: those of networks.py, the workloads of speed.py and the tests' models.

    python benchmarks/native_support.py [--operations] > before; ...; python benchmarks/native_support.py > after; diff before after

A line for each: its name, and "compiled" or why not. `--operations` adds a digest of the graph (operations, shapes, constants), by which
two versions of the compiler can be told to make the same of a model without compiling it.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from networks import NETWORKS
from speed import WORKLOADS

from fedbraid.data.task import Task
from fedbraid.engines import native_backend

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


def tasks() -> Iterator[tuple[str, Task]]:
    import test_native
    import test_native_losses

    for name, work in (WORKLOADS | NETWORKS).items():
        yield name, work.task(*work.table())
    for name, (model, shape, tokens) in test_native.OPERATIONS.items():
        yield f"operation {name}", test_native.make_task(model, shape, tokens=tokens)
    for name, (loss, kind, options) in test_native_losses.LOSSES.items():
        yield f"loss {name}", test_native_losses.own(loss, kind, **options)


def digest(task: Task) -> str:
    graph = native_backend._graph(task)
    said = f"{graph.ops} {graph.shapes} {graph.output} {graph.index_bounds} {graph.constants.tolist()}"
    return hashlib.blake2b(said.encode(), digest_size=6).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(0)
    for name, task in tasks():
        why = native_backend.Native.supports(task)
        more = f" {digest(task)}" if asked.operations and why is None else ""
        print(f"{name}: {why or 'compiled'}{more}", flush=True)


if __name__ == "__main__":
    main()
