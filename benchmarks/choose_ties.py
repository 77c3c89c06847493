"""Does `fb.choose` call equals equal?

nice -n 19 python benchmarks/choose_ties.py --repeats 40

First, whole choices among one algorithm under four names (their runs are the same bits, so anything but a tie is an
error of the machinery). Then the harder case, in which no run resembles another: finalists whose every seed is a
run of its own, drawn from a pool of runs of the same algorithm; here the tests may err in one of twenty.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch

import fedbraid as fb
from fedbraid.study import race, stats

NAMES = ("alder", "beech", "cedar", "fedavg")
DRAWS = 2000  # of finals from the pool


def task() -> fb.Task:
    return fb.tasks.load("digits", clients=20, partition=fb.partition.label_chunks(1))


def choices(repeats: int) -> int:
    """How many of so many choices, each with seeds of its own, end in a tie of all."""
    race.TRIES, race.SEEDS = (1,), (5,)  # one setting and five seeds each, whatever the machine's speed
    same, tied = {name: fb.fedavg() for name in NAMES}, 0
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            found = fb.choose(
                task(),
                per_round=5,
                rounds=18,
                minutes=600,
                candidates=same,
                seed=1000 * repeat,
                out=f"{folder}/c",
            )
        tied += all(row["tied"] for row in found.ranking)
    return tied


def finals(pool: list[float], finalists: int = 6, seeds: int = 5) -> float:
    """The share of finals of equals with runs of their own that end in a tie of all."""
    draw, tied = np.random.default_rng(0), 0
    for _ in range(DRAWS):
        values = draw.choice(pool, (finalists, seeds), replace=False)
        best = int(values.mean(1).argmax())
        p = stats.pair_tests({str(i): row.tolist() for i, row in enumerate(values)})
        tied += all(p[frozenset((str(best), str(i)))] >= 0.05 for i in range(finalists) if i != best)
    return tied / DRAWS


def pool(runs: int) -> list[float]:
    shared = task()
    schedule, work = fb.rounds(9, clients=5), fb.Work(lr=0.05, batch=5)
    made = (
        fb.simulate(shared, fb.fedavg(), work, schedule, seed=s, engine="in_process") for s in range(runs)
    )
    return [stats.final(result.history, "accuracy") or 0.0 for result in made]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--runs", type=int, default=200, help="in the pool of runs with seeds of their own")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        "repeats": given.repeats,
        "tied": choices(given.repeats),
        "finals tied": finals(pool(given.runs)),
    }
    print(f"{found['tied']} of {found['repeats']} choices among one algorithm under four names end in a tie")
    print(
        f"{found['finals tied']:.1%} of {DRAWS:,} finals of six equals, each run with a seed of its own, end in a tie"
    )
    if given.out is not None:
        given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
