"""What `engines/cost_model.py` estimates beside what it takes: processor times of 35 networks, on one thread.

    python benchmarks/cost_model.py [NAME ...]

For each network of speed.py and networks.py: milliseconds of one client's local step by plain autograd and by compiled gradients,
seconds of the compiler and of loading what it made, and each estimate over what was measured. Then the plan of runs of 1, 4, 16, 64
and 256 rounds on two cores, with the seconds that plain autograd and compiled gradients would take by these measurements;
"slower" marks a plan that loses more than 3 % to plain autograd.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from networks import NETWORKS
from speed import LR, TINY, WORKLOADS, Workload

import fedbraid as fb
from fedbraid.core.local_training import Gradient
from fedbraid.data.batches import DrawnBatches
from fedbraid.engines.autograd import LoopGradient
from fedbraid.engines.choice import COST, Facts, choose
from fedbraid.engines.engine import Setup
from fedbraid.engines.native_backend import Native
from fedbraid.engines.planning import facts_of

LENGTHS = (1, 4, 16, 64, 256)
CORES = 2


def clock(act: Callable[[], object]) -> float:
    start = time.process_time()
    act()
    return time.process_time() - start


def step(grad: Gradient, task: fb.Task, work: fb.Work, clients: int) -> float:
    """Processor seconds of a client's local step."""
    who = np.arange(clients)
    y = task.vector(0).repeat(clients, 1)
    batch = DrawnBatches(task.block_view(who, 0, 0), work, who, 0, 0).batch(0)
    return min(clock(lambda: grad(y, batch)) for _ in range(4)) / clients


def row(name: str, given: Workload) -> str:
    given = replace(given, clients=min(given.clients, max(20, given.cohort)))
    task = given.task(*given.table())
    work = fb.Work(lr=LR, epochs=given.epochs, batch=given.batch, momentum=given.momentum)
    facts = facts_of(Setup(fb.fedavg(), task, work, 0, given.cohort, given.cohort))
    facts = replace(facts, machine=replace(facts.machine, cores=CORES))
    plain = step(LoopGradient(task), task, work, 1)
    guess = COST.calls(facts.model) + COST.arithmetic(facts.model, facts.batch, facts.machine.capability)
    head = f"| {name} | {1e3 * plain:.3f} | {guess / plain:.2f} |"
    if facts.frozen or Native.supports(task) is not None:
        return f"{head} - | - | - | - | {plans(facts, plain, None, 0.0)} |"
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        before = os.times()
        grad = Native(task, 1)
        compiled = sum(os.times()[2:4]) - sum(before[2:4])
        native, loading = step(grad, task, work, given.cohort), clock(lambda: Native(task, 1))
    wall = COST.compile_wall * compiled
    found = f"{1e3 * native:.3f} | {compiled:.2f} | {COST.compiling(facts.model, CORES) / wall:.2f} | {loading:.2f}"
    return f"{head} {found} | {plans(facts, plain, native, wall + loading)} |"


def plans(facts: Facts, plain: float, native: float | None, start: float) -> str:
    """The plan of each length, with what it and the other would take."""
    said = []
    for rounds in LENGTHS:
        plan = choose(replace(facts, participations=facts.cohort * rounds))
        steps = rounds * facts.steps * facts.cohort / min(CORES, facts.cohort)
        times = {"plain": steps * plain} | ({} if native is None else {"native": start + steps * native})
        taken = times["native" if plan.backend == "native" else "plain"]
        slower = " slower" if taken > 1.03 * times["plain"] else ""
        said.append(f"{plan.engine} {plan.backend}: {', '.join(f'{v:.1f}' for v in times.values())}{slower}")
    return " | ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {**WORKLOADS, **TINY, **NETWORKS}
    parser.add_argument("names", nargs="*", default=list(known), metavar="NAME")
    torch.set_num_threads(1)
    lengths = " | ".join(f"{n} rounds: plain, native" for n in LENGTHS)
    print(
        f"| network | plain, ms | estimate | native, ms | compiler, s | estimate | loading, s | {lengths} |"
    )
    print("| --- |" + " ---: |" * 6 + " --- |" * len(LENGTHS))
    for name in parser.parse_args().names:
        print(row(name, known[name]), flush=True)


if __name__ == "__main__":
    main()
