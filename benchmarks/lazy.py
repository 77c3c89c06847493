"""Images in a folder a client against the same images in memory: seconds of the same rounds, side by side, and memory.

Files are cached, as they are from the second round on. The two ways are processes of their own that take turns,
and the smallest time of each counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import fedbraid as fb

SIDE, CLASSES = 32, 10


def write(root: Path, clients: int, each: int) -> None:
    """One .npy of bytes a sample, its class in the name."""
    draw = np.random.default_rng(0)
    patterns = draw.integers(0, 200, (CLASSES, 3, SIDE, SIDE))
    for client in range(clients):
        (place := root / f"{client:06}").mkdir(parents=True)
        for i in range(each):
            label = (client + i) % CLASSES
            image = np.clip(patterns[label] + draw.integers(0, 56, (3, SIDE, SIDE)), 0, 255).astype(np.uint8)
            np.save(place / f"{i}-{label}.npy", image)


def load(path: Path) -> tuple[np.ndarray, int]:
    image = np.load(path).astype(np.float32) / 255
    return image, int(path.stem[-1])


def task(root: Path, lazy: bool, name: str) -> fb.Task:
    model = fb.models.build(name, channels=3, size=SIDE, classes=CLASSES)
    return fb.Task.from_datasets(model, fb.folders(root, load), lazy=lazy)


_MADE: list[fb.Task] = []  # of this process


def begin(root: Path, lazy: bool, name: str) -> None:
    _MADE[:] = [task(root, lazy, name)]


def seconds(rounds: int, per_round: int, engine: str, epochs: int) -> float:
    start = time.perf_counter()
    work = fb.Work(lr=0.05, epochs=epochs, batch=10)
    fb.simulate(
        _MADE[0],
        fb.fedavg(),
        work,
        fb.rounds(rounds, clients=per_round),
        engine=engine,
        evaluate_every=None,
        progress=False,
    )
    return time.perf_counter() - start


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--per-round", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--model", default="fedgbo_cnn", help="the lighter, the more reading counts: try lenet5"
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--root", type=Path, help="a folder to keep the files in, and to find them again")
    parser.add_argument(
        "--memory-only", action="store_true", help="lazy alone: what it takes for so many clients"
    )
    asked = parser.parse_args()
    root = asked.root or Path(tempfile.mkdtemp(prefix="fedbraid-lazy-"))
    try:
        if not root.exists() or not any(root.iterdir()):
            write(root, asked.clients, asked.samples)
        said: dict[str, Any] = {
            "model": asked.model,
            "epochs": asked.epochs,
            "clients": asked.clients,
            "samples": asked.samples,
        }
        run = asked.rounds, asked.per_round, asked.engine, asked.epochs
        with ExitStack() as stack:
            ways = {
                name: stack.enter_context(
                    ProcessPoolExecutor(
                        1, multiprocessing.get_context("spawn"), begin, (root, name == "lazy", asked.model)
                    )
                )
                for name in (["lazy"] if asked.memory_only else ["lazy", "memory"])
            }
            took: dict[str, list[float]] = {name: [] for name in ways}
            for repeat in range(asked.repeats + 1):  # the first one warms caches up, and compiles
                for name, way in ways.items():
                    spent = way.submit(seconds, *run).result()
                    took[name] += [spent] if repeat else []
            said |= {f"{name}_seconds": round(min(t), 3) for name, t in took.items()}
            if "memory" in took:
                said["speed_ratio"] = round(min(took["memory"]) / min(took["lazy"]), 3)
            said |= {
                f"{name}_megabytes": round(way.submit(megabytes).result(), 1) for name, way in ways.items()
            }
        print(json.dumps(said))
    finally:
        if asked.root is None:
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
