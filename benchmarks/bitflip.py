"""Flip single bits in a run's folder, and resume: it is refused, or it comes to the same bits.

python benchmarks/bitflip.py --flips 1000
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedbraid as fb
from fedbraid.errors import FedbraidError
from fedbraid.run.export import export

PLAN = fb.rounds(8, clients=3)
FILES = ("state.db", "state.db-wal", "run.json", "metrics.jsonl", "model.safetensors")


class Stop(Exception):
    pass


class StopAt:
    """Fails a run half-way, once its folder was copied as a kill would leave it."""

    def __init__(self, copy: Path) -> None:
        self.copy = copy

    def step(self, record: dict[str, Any], run: Any) -> None:
        if record["step"] == 5:
            shutil.copytree(run.folder.path, self.copy)
            raise Stop


def the_task() -> fb.Task:
    draw = np.random.default_rng(0)
    torch.manual_seed(0)
    shares = [(draw.normal(size=(n, 20)), draw.integers(0, 5, n)) for n in (9, 20, 31, 12, 7, 25)]
    return fb.Task.from_arrays(nn.Linear(20, 5), shares, shares[1])


def campaign(flips: int, seed: int = 0) -> dict[str, Counter[str]]:
    """Flip so many bits; raises where a run ends elsewhere without a word."""
    draw, seen = random.Random(seed), {name: Counter[str]() for name in FILES}
    task, algorithm, work = the_task(), fb.fedadavr(memory="int4"), fb.Work(lr=0.05, batch=10)
    with tempfile.TemporaryDirectory(prefix="bitflip-") as scratch:
        ended, closed, killed, place = (Path(scratch, n) for n in ("ended", "closed", "killed", "place"))
        whole = fb.simulate(task, algorithm, work, PLAN, out=ended)
        with contextlib.suppress(Stop):
            fb.simulate(task, algorithm, work, PLAN, out=closed, callbacks=[StopAt(killed)])
        for k in range(flips):
            name = FILES[k % len(FILES)]
            start = ended if name == "model.safetensors" else killed if k % 2 or "wal" in name else closed
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(start, place)
            content = bytearray((place / name).read_bytes())
            bit = draw.randrange(8 * len(content))
            content[bit // 8] ^= 1 << bit % 8
            (place / name).write_bytes(content)
            seen[name][_outcome(place, name, task, whole)] += 1
            if seen[name]["elsewhere"]:
                raise AssertionError(f"flip {k}: bit {bit} of {name} was not noticed")
    return seen


def _outcome(place: Path, name: str, task: fb.Task, whole: fb.Result) -> str:
    try:
        if name == "model.safetensors":
            made = export(place, place / "out.safetensors")
            return "the same bits" if _same_model(made, whole) else "elsewhere"
        result = fb.resume(place, task=task)
    except FedbraidError:
        return "refused"
    same = torch.equal(result.x, whole.x) and result.history == whole.history
    return "the same bits" if same else "elsewhere"


def _same_model(path: Path, whole: fb.Result) -> bool:
    from safetensors.torch import load_file

    views = whole.task.layout.views(whole.x)
    found = load_file(path)
    return found.keys() == views.keys() and all(torch.equal(found[n], v) for n, v in views.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name, outcomes in campaign(given.flips, given.seed).items():
        print(f"{name:18} {dict(outcomes)}")
    print(f"{given.flips} flips: every run was refused or came to the same bits")
