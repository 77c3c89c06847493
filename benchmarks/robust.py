"""Robust rules beside byzfl on the same matrices, and what they add to a round of W1 with 50 clients.

    python benchmarks/robust.py [rules] [rounds] [--repeats 5] [--rounds 10] [--json]

`rules` needs byzfl (`pip install byzfl`): 20 × 10⁶ float32 numbers, one thread each side, processor time, contestants in turn and
each one's least. byzfl is timed on NumPy arrays and on tensors, and the faster counts. `rounds` compares processor seconds of
whole rounds, FedAvg's and those with a rule in its place, in turn.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from speed import LR, WORKLOADS, Stamps

import fedbraid as fb
from fedbraid.core.robust_rules import Judged, RobustRule

M, D, F = 20, 10**6, 4
RULES = {
    "median": {}, "trimmed_mean": {"f": F}, "krum": {"f": F}, "multi_krum": {"f": F}, "geometric_median": {},
    "centred_clip": {"tau": 100.0}, "mixing, trimmed_mean": {"f": F, "before": "mixing"},
}  # fmt: skip
ROUNDS = {
    "mean": None, "median": {}, "trimmed_mean": {"f": 10}, "multi_krum": {"f": 10}, "geometric_median": {},
}  # fmt: skip


def ours(name: str) -> Callable[[torch.Tensor], Any]:
    how, order = RobustRule(name.rpartition(" ")[2], **RULES[name]), torch.arange(M)
    return lambda v: how.decide([Judged(v)], order).apply(v)


def theirs(name: str) -> Callable[[Any], Any]:
    import byzfl

    return {
        "median": byzfl.Median(),
        "trimmed_mean": byzfl.TrMean(F),
        "krum": byzfl.Krum(F),
        "multi_krum": byzfl.MultiKrum(F),
        "geometric_median": byzfl.GeometricMedian(1e-6, 8),
        "centred_clip": lambda v: byzfl.CenteredClipping(tau=100.0)(v),
        "mixing, trimmed_mean": lambda v: byzfl.TrMean(F)(byzfl.NNM(F)(v)),
    }[name]


def least(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Each one's least processor seconds, in turn."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            begun = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - begun)
    return best


def rules(repeats: int) -> list[dict[str, Any]]:
    v = torch.from_numpy(np.random.default_rng(0).standard_normal((M, D), np.float32))
    rows = []
    for name in RULES:
        own, other = ours(name), theirs(name)
        own(v)  # compiled
        found = least(
            {"fedbraid": lambda f=own: f(v), "numpy": lambda f=other: f(v.numpy()), "torch": lambda f=other: f(v)}, repeats
        )  # fmt: skip
        ratio = min(found["numpy"], found["torch"]) / found["fedbraid"]
        rows.append({"rule": name, **found, "times": ratio})
        print(
            f"{name:22} {1e3 * found['fedbraid']:8.1f} ms   byzfl {1e3 * found['numpy']:8.1f} (NumPy)"
            f" {1e3 * found['torch']:8.1f} (torch)   {ratio:6.1f} times"
        )
    return rows


class Seconds(Stamps):
    """The same by processor time."""

    def step(self, record: Any, run: Any) -> None:
        self.at.append(time.process_time())


def rounds(repeats: int, count: int) -> list[dict[str, Any]]:
    work = WORKLOADS["W1"]
    x, y = work.table()
    task = fb.Task.from_table(work.build, x, y, torch.arange(len(x)), np.arange(0, len(x) + 1, work.samples))
    local = fb.Work(lr=LR / 10, epochs=work.epochs, batch=work.batch, momentum=work.momentum)

    def seconds(options: dict[str, Any] | None, name: str) -> float:
        stamps = Seconds()
        base = fb.fedavg(weights="uniform")
        a = base if options is None else fb.robust(base, name, **options)
        fb.simulate(
            task, a, local, fb.rounds(count, clients=50), evaluate_every=None, callbacks=[stamps],
            engine="in_process(backend='native', threads=1)",
        )  # fmt: skip
        return min(np.diff(stamps.at))

    best = dict.fromkeys(ROUNDS, float("inf"))
    for _ in range(repeats):
        for name, options in ROUNDS.items():
            best[name] = min(best[name], seconds(options, name))
    rows = []
    for name, value in best.items():
        more = value / best["mean"] - 1
        rows.append({"rule": name, "seconds": value, "more": more})
        print(f"W1, 50 clients, {name:20} {1e3 * value:8.1f} ms a round   {more:+7.1%}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", choices=["rules", "rounds", []], default=[])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    made: dict[str, Any] = {}
    if not asked.what or "rules" in asked.what:
        made["rules"] = rules(asked.repeats)
    if not asked.what or "rounds" in asked.what:
        made["rounds"] = rounds(asked.repeats, asked.rounds)
    if asked.json:
        json.dump(made, sys.stdout)


if __name__ == "__main__":
    main()
