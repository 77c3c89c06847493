"""What remembering every client costs: time per round, growth with N, bytes on disk, resident memory; and the peaks
of native and plain gradients and of bare loops.

python benchmarks/memory.py [overhead] [growth] [disk] [resident] [peak]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import torch
from speed import LR, WORKLOADS, Bare, Stamps, TwoProcesses, Workload, bare_rounds
from torch import Tensor

import fedbraid as fb
from fedbraid.core.context import ServerContext, Uploads
from fedbraid.engines.accelerators.swap import install
from fedbraid.run.checkpoint import Checkpoint, Folder
from fedbraid.run.state import State

LAYOUT = fb.Layout.of(fb.models.lenet5())
MEMORIES = {None: 1.0, "fp16": 0.505, "int8": 0.255, "int4": 0.13}


def overhead(repeats: int = 7) -> None:
    """fedadavr's round over fedavg's on W1, and a stateful rule's on W1 and W2, taking turns."""
    for name, others in {
        "W1": [
            fb.fedadavr("adam", lr=1e-4),
            fb.fedadavr("adam", lr=1e-4, memory="int4"),
            fb.scaffold(),
            fb.adabest(),
        ],
        "W2": [fb.scaffold(), fb.feddyn()],
    }.items():
        work = WORKLOADS[name]
        x, y = work.table()
        offsets = np.arange(0, len(x) + 1, work.samples)
        task = fb.Task.from_table(work.build, x, y, torch.arange(len(x)), offsets)
        local = fb.Work(lr=LR / 10, epochs=work.epochs, batch=work.batch, momentum=work.momentum)
        contestants = [fb.fedavg(), *others]
        times: dict[str, list[float]] = {a.name: [] for a in contestants}
        for _ in range(repeats):
            for algorithm in contestants:
                stamps = Stamps()
                fb.simulate(
                    task,
                    algorithm,
                    local,
                    fb.rounds(600 // work.cohort, clients=work.cohort),
                    evaluate_every=None,
                    callbacks=[stamps],
                )
                times[algorithm.name].append(stamps.per_round())
        base = min(times["fedavg()"])
        for algorithm, seen in times.items():
            print(
                f"{name} {algorithm:32} {1000 * min(seen):8.2f} ms a round, {min(seen) / base - 1:+.1%} over fedavg"
            )


def server_step(known: int, steps: int = 200) -> float:
    """Seconds of one server step of fedadavr(adam) with this many known clients and rows written lazily."""
    algorithm, x = fb.fedadavr("adam"), torch.randn(LAYOUT.size)
    gather, server = algorithm.gather.init(x, LAYOUT), algorithm.server.init(x, LAYOUT)
    sizes = np.full(known, 120)
    draw = np.random.default_rng(0)
    one = torch.ones(5, 1)
    delta = torch.randn(5, LAYOUT.size)
    times = []
    for t in range(steps):
        who = draw.choice(known, 5, replace=False)
        start = time.perf_counter()
        up = Uploads(
            who, {"delta": delta}, one * 120, one * 6, one * 6, one * 0, one * 0.01, {"x": x[None]}, algorithm.gathered
        )  # fmt: skip
        acc = algorithm.gather.add(algorithm.gather.zero(x), up, gather, x)
        ctx = ServerContext(t, 5, known, 120.0 * known, 0.01, 6.0, 6.0, 0.0, LAYOUT, sizes)
        u, gather, _ = algorithm.gather.close(acc, gather, ctx)
        u, server = algorithm.server.update(u, server, x, ctx)
        x = x - u["delta"]
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def growth(repeats: int = 5) -> None:
    """The server step's time from a thousand to a million known clients."""
    torch.set_num_threads(1)
    install()  # as every engine does
    few, many = (min(server_step(n) for _ in range(repeats)) for n in (1_000, 1_000_000))
    print(
        f"server step: {1000 * few:.2f} ms at N = 1,000, {1000 * many:.2f} ms at N = 1,000,000: {many / few:.2f} times"
    )


def fill(folder: str, memory: str | None, clients: int, store: str) -> Checkpoint:
    """A run folder with a row for each of so many LeNet-5 clients."""
    algorithm, x = fb.fedadavr("adam", memory=memory), torch.zeros(LAYOUT.size)
    state = State.first(algorithm, LAYOUT, x, 0)
    Folder(folder).create({})
    checkpoint = Checkpoint(Folder(folder), state, store, clients)
    draw = torch.Generator().manual_seed(0)
    block = torch.randn(100, LAYOUT.size, generator=draw)
    for lo in range(0, clients, 100):
        who = np.arange(lo, min(lo + 100, clients))
        state.gather.rows.put(
            who.tolist(), {"weight": torch.full((len(who), 1), 120.0), "y": block[: len(who)]}
        )
        checkpoint.commit(state, [], {})
    return checkpoint


def disk(clients: int = 10_000) -> None:
    """Stored bytes per client over 10,000 clients, as a share of float32."""
    for memory, limit in MEMORIES.items():
        with tempfile.TemporaryDirectory() as folder:
            fill(folder, memory, clients, "disk").close()
            size = sum(f.stat().st_size for f in Path(folder).iterdir())
            share = size / clients / (4 * LAYOUT.size)
            print(
                f"on disk, {memory or 'float32':8} {size / clients:10,.0f} bytes a client, {share:.2%} of float32 (limit {limit:.1%})"
            )


def resident(clients: int = 100_000) -> None:
    """Resident memory of the whole process with 100,000 int4 rows on disk."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = fill(folder, "int4", clients, "disk")
        size = sum(f.stat().st_size for f in Path(folder).iterdir())
        held = rss()
        checkpoint.close()
        print(f"resident with {clients:,} int4 rows ({size / 1e9:.2f} GB on disk): {held / 1e9:.2f} GB")


def rss() -> int:
    return psutil.Process(os.getpid()).memory_info().rss


def most() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cohort(name: str) -> tuple[Workload, Tensor, Tensor]:
    """A workload whose clients are one cohort, and its samples."""
    work = WORKLOADS[name]
    n = work.cohort * work.samples
    x = torch.zeros(n, *work.shape, dtype=torch.long if work.tokens else torch.float32)
    return replace(work, clients=work.cohort, epochs=1), x, torch.zeros(n, dtype=torch.long)


def grown(name: str, backend: str) -> float:
    """By how many MB three rounds raise the peak of a process that holds the cohort's samples."""
    work, x, y = cohort(name)
    task = fb.Task.from_table(work.build, x, y, torch.arange(len(x)), np.arange(0, len(x) + 1, work.samples))
    local = fb.Work(lr=LR, epochs=1, batch=work.batch, momentum=work.momentum)
    before = rss()
    engine = f"in_process(backend={backend!r})"
    fb.simulate(
        task,
        fb.fedavg(),
        local,
        fb.rounds(3, clients=work.cohort),
        evaluate_every=None,
        progress=False,
        engine=engine,
    )
    return (most() - before) / 1e6


class Weighed(TwoProcesses):
    """Two processes that say by how much each has grown."""

    def start(self) -> None:
        self.grown = torch.zeros(2).share_memory_()
        super().start()

    def serve(self, pipe, k: int) -> None:
        before = rss()
        super().serve(pipe, k)
        self.grown[k] = most() - before


def bare_grown(name: str, processes: int) -> float:
    """The same for a bare loop, and its processes where it has two."""
    work, x, y = cohort(name)
    before = rss()
    loop = Weighed(work, x, y) if processes > 1 else Bare(work, x, y)
    bare_rounds(loop, 3)
    here = (most() - before) / 1e6
    return here + float(loop.grown.sum()) / 1e6 if isinstance(loop, Weighed) else here


def peak() -> None:
    """What a run adds to the memory of its process, each in one of its own."""
    ways = {
        "bare loop, one process": (bare_grown, 1), "bare loop, two processes": (bare_grown, 2),
        "backend='loop'": (grown, "loop"), "backend='native'": (grown, "native"),
    }  # fmt: skip
    print("| MB that three rounds add |" + " | ".join(ways) + " |\n| --- |" + " ---: |" * len(ways))
    for name in ("W1", "W3", "W4", "W5", "W6", "W7", "W8"):
        seen = []
        for weigh, how in ways.values():
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
                seen.append(fresh.submit(weigh, name, how).result())
        print(f"| {name} | " + " | ".join(f"{mb:.0f}" for mb in seen) + " |", flush=True)


PARTS = {f.__name__: f for f in (overhead, growth, disk, resident, peak)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART")
    for name in parser.parse_args().parts:
        PARTS[name]()


if __name__ == "__main__":
    main()
