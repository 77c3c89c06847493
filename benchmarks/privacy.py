"""What privacy costs: a private round, hidden examples beside plain ones and beside Opacus, memory that clients hold.

    python benchmarks/privacy.py [rounds] [opacus] [server] [--repeats 5] [--rounds 40] [--cpu] [--json]

Contestants take turns, so that a noisy machine is noisy for all; each one's smallest median of a round counts. `opacus`
needs Opacus (in the extra `dev`). With `--cpu` processor seconds are compared, for a machine that others use too. The
accountant is asked at steps that grow geometrically, and is no part of a median once it has answered.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import psutil
import torch
from speed import LR, WORKLOADS, Bare, Stamps, trained

import fedbraid as fb
from fedbraid.core.context import ServerContext, Uploads

WORK = WORKLOADS["W1"]
SMALL = {"clip": 1e-3, "noise": 1.0}  # so that models live as long as they are timed
CONTESTANTS = {
    "plain": fb.fedavg(),
    "private": fb.private(fb.fedavg(), **SMALL),
    "examples": fb.private(fb.fedavg(), unit="example", delta=1e-4, **SMALL),
    "held by the server": fb.fedadavr("adam", lr=1e-4),
    "held by clients": fb.fedadavr("adam", lr=1e-4, held="client"),
}


def task() -> fb.Task:
    x, y = WORK.table()
    return fb.Task.from_table(WORK.build, x, y, torch.arange(len(x)), np.arange(0, len(x) + 1, WORK.samples))


clock = time.perf_counter


class Ticks(Stamps):
    """The same by the clock that was asked for."""

    def step(self, record, run) -> None:
        self.at.append(clock())


def timed(own: fb.Task, name: str, rounds: int) -> float:
    """Seconds of a round."""
    stamps = Ticks()
    local = fb.Work(lr=LR / 10, epochs=WORK.epochs, batch=WORK.batch, momentum=WORK.momentum)
    schedule = fb.rounds(rounds, clients=WORK.cohort)
    fb.simulate(
        own, CONTESTANTS[name], local, schedule, evaluate_every=None, progress=False, callbacks=[stamps], engine="in_process(backend='native')"
    )  # fmt: skip
    return stamps.per_round()


class Opacus(Bare):
    """DP-SGD as one would write it with Opacus: per-example gradients by its hooks, its optimiser, a loop over clients."""

    def client(self, weights: list[torch.Tensor], i: int) -> list[torch.Tensor]:
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer

        if not isinstance(self.model, GradSampleModule):
            self.model = GradSampleModule(self.model)
        work, model = self.work, self.model
        with torch.no_grad():
            for p, w in zip(trained(model), weights):
                p.copy_(w)
        sgd = torch.optim.SGD(trained(model), lr=LR / 10, momentum=work.momentum)
        optimiser = DPOptimizer(
            sgd, noise_multiplier=SMALL["noise"], max_grad_norm=SMALL["clip"], expected_batch_size=work.batch
        )
        x, y = (t[i * work.samples : (i + 1) * work.samples] for t in (self.x, self.y))
        for _ in range(work.samples // work.batch * work.epochs):
            picked = torch.rand(work.samples) < work.batch / work.samples
            optimiser.zero_grad()
            self.loss(model(x[picked]), y[picked]).backward()
            optimiser.step()
        return [p.detach().clone() for p in trained(model)]


def opacus(repeats: int, rounds: int) -> dict[str, float]:
    """Hidden examples beside a bare loop with Opacus on all cores."""
    own, bare = task(), Opacus(WORK, *WORK.table())
    weights = [p.detach().clone() for p in trained(bare.model)]
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(timed(own, "examples", rounds))
        gaps = []
        for _ in range(max(2, rounds // 8)):
            start = clock()
            bare.round(weights)
            gaps.append(clock() - start)
        theirs.append(statistics.median(gaps))
    a, b = min(ours), min(theirs)
    print(
        f"examples {1e3 * a:.2f} ms a round, Opacus in a bare loop {1e3 * b:.1f} ms: {b / a:.1f} times faster (at least 5)"
    )
    return {"examples": a, "opacus": b, "times": b / a}


def rounds_of(repeats: int, rounds: int) -> dict[str, float]:
    """Rounds of W1 with and without privacy, and with memory on either side."""
    own = task()
    seen: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for _ in range(repeats):
        for name, times in seen.items():
            times.append(timed(own, name, rounds))
    best = {name: min(times) for name, times in seen.items()}
    limits = {
        "private": ("plain", 1.1), "examples": ("plain", 2.0), "held by clients": ("held by the server", 1.0)
    }  # fmt: skip
    for name, seconds in best.items():
        over, most = limits.get(name, (name, 1.0))
        said = "" if over == name else f", {seconds / best[over]:.3f} times {over} (at most {most})"
        print(f"W1 {name:20} {1e3 * seconds:7.2f} ms a round{said}")
    return best


ALGORITHMS = {
    "fedavg": fb.fedavg(),
    "fedvarp, held by clients": fb.fedvarp(held="client"),
    "fedadam": fb.fedadam(),
    "fedadavr, held by clients": fb.fedadavr("adam", held="client"),
}


def resident(name: str, known: int, steps: int = 20, cohort: int = 100) -> int:
    """Bytes of a process that is a server of LeNet-5 with so many known clients, after some steps."""
    torch.set_num_threads(1)
    algorithm, layout = ALGORITHMS[name], fb.Layout.of(fb.models.lenet5())
    x = torch.zeros(layout.size)
    gather, server = algorithm.gather.init(x, layout), algorithm.server.init(x, layout)
    sizes, one, draw = np.full(known, 120), torch.ones(cohort, 1), np.random.default_rng(0)
    for t in range(steps):
        up = {n: torch.ones(cohort, what.size(layout)) for n, what in algorithm.uploads.items()}
        who = Uploads(
            draw.choice(known, cohort, replace=False), up, one * 120, one * 6, one * 6, one * 0, one * 0.01,
            {"x": x[None]}, algorithm.gathered,
        )  # fmt: skip
        made = algorithm.server.account(who)
        acc = algorithm.gather.add(algorithm.gather.zero(x), who.having({**up, **made}), gather, x)
        ctx = ServerContext(
            t, cohort, known, 120.0 * known, 0.01, 6.0, 6.0, 0.0, layout, sizes, sent={"x": x[None]}
        )
        u, gather, _ = algorithm.gather.close(acc, gather, ctx)
        u, server = algorithm.server.update(u, server, x, ctx)
        x = x - u["delta"]
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is not needed
    return psutil.Process(os.getpid()).memory_info().rss


def server(repeats: int, rounds: int, known: int = 1_000_000) -> dict[str, float]:
    """Resident memory of a server that knows a million clients, each algorithm in a process of its own."""
    seen: dict[str, float] = {}
    for name in ALGORITHMS:
        sizes = []
        for _ in range(repeats):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
                sizes.append(fresh.submit(resident, name, known).result())
        seen[name] = min(sizes)
    for name, over in (("fedvarp, held by clients", "fedavg"), ("fedadavr, held by clients", "fedadam")):
        print(
            f"server with {known:,} known clients: {name} {seen[name] / 1e6:.1f} MB, {seen[name] / seen[over] - 1:+.2%} over"
            f" {over} (at most +1 %)"
        )
    return seen


PARTS: dict[str, Any] = {"rounds": rounds_of, "opacus": opacus, "server": server}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    global clock
    clock = time.process_time if given.cpu else time.perf_counter
    found = {name: PARTS[name](given.repeats, given.rounds) for name in given.parts}
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
