"""What the drivers of this folder share: a small problem, fedbraid's model after every round, and the verdict."""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fedbraid as fb

EQUAL, UNEQUAL = (12,) * 8, (4, 24, 8, 12, 20, 6, 16, 10)
ROUNDS, COHORT = 14, 3
MOVED = 0.1  # of the largest weight: agreement of runs that stand still would mean nothing


def clone(about: str) -> Path:
    """The clone named on the command line, from which modules are now imported."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("clone", type=Path, help="a work tree of the authors' repository")
    where = parser.parse_args().clone.resolve()
    if not where.is_dir():
        parser.error(f"clone must be a folder, got {where}; git clone the repository first")
    sys.path.insert(0, str(where))
    torch.set_num_threads(1)
    return where


def absent(name: str, **contents: object) -> None:
    """Stand in for a package that the authors import and these comparisons do not need, where it is not installed."""
    try:
        missing = find_spec(name) is None
    except ModuleNotFoundError:  # a part of what is absent
        missing = True
    if missing:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
        vars(sys.modules[name]).update(contents)


def network() -> nn.Sequential:
    """39 weights, always the same first ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def weights_only() -> nn.Sequential:
    """32 weights without biases."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False))


def clients(sizes: tuple[int, ...], alike: bool = False) -> list[tuple[np.ndarray, np.ndarray]]:
    """Every client's samples; `alike` makes them copies of one, so that it does not matter how batches are drawn."""
    draw, data = np.random.default_rng(7), []
    for i, n in enumerate(sizes):
        x, y = draw.normal(size=(n, 5)) + 0.3 * i, (draw.integers(0, 3, n) + i) % 3
        if alike:
            x, y = np.repeat(x[:1], n, 0), np.repeat(y[:1], n, 0)
        data.append((x.astype(np.float32), y))
    return data


def cohorts() -> list[list[int]]:
    """Who takes part in each round: what NumPy's own generator draws after `np.random.seed(0)`."""
    draw = np.random.RandomState(0)
    return [draw.choice(len(EQUAL), COHORT, replace=False).tolist() for _ in range(ROUNDS)]


def flat(arrays: object) -> np.ndarray:
    """Arrays or tensors of one model as one vector."""
    return np.concatenate(
        [np.array(a.detach() if isinstance(a, torch.Tensor) else a).ravel() for a in arrays]
    )


class _Models:
    """Notes the server's model after every round."""

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []

    def step(self, record: dict, run: object) -> None:
        self.seen.append(run.state.x.numpy().copy())


def ours(
    algorithm: fb.Algorithm,
    data: list,
    work: fb.Work,
    rounds: list[list[int]],
    model: Callable[[], nn.Module] = network,
) -> list[np.ndarray]:
    """fedbraid's models after each of these rounds."""
    models = _Models()
    fb.simulate(
        fb.Task.from_arrays(model(), clients=data),
        algorithm,
        work,
        fb.rounds(len(rounds), clients=rounds),
        engine=fb.engines.in_process(),
        evaluate_every=None,
        progress=False,
        callbacks=[models],
    )
    return models.seen


class Verdict:
    """One line a comparison; the worst of them is the driver's exit code."""

    def __init__(self, bound: float) -> None:
        self.bound, self.failed = bound, False
        print(f"largest difference over {ROUNDS} rounds and all weights, relative to the largest weight")

    def compare(
        self,
        name: str,
        mine: list[np.ndarray],
        theirs: list[np.ndarray],
        control: bool = False,
        start: Callable[[], nn.Module] = network,
    ) -> None:
        """Equal within the bound; a `control` is another algorithm and must be far outside of it."""
        if len(mine) != ROUNDS or len(theirs) != ROUNDS:
            raise SystemExit(f"{name}: {len(mine)} and {len(theirs)} models were seen, not {ROUNDS}")
        error = max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(mine, theirs, strict=True))
        first = flat(start().parameters())
        moved = np.abs(theirs[-1] - first).max() / np.abs(first).max()
        good = moved >= MOVED and (error > 100 * self.bound if control else error <= self.bound)
        self.failed |= not good
        said = ("differs, as it should" if control else "ok") if good else "WRONG"
        print(f"{name:46} {error:9.1e}   moved {moved:4.1f}   {said}", flush=True)

    def close(self) -> None:
        print(f"bound {self.bound:g}: {'not as expected' if self.failed else 'all as expected'}")
        sys.exit(int(self.failed))
