"""Images in a folder a client against the same images in memory: seconds of the same rounds, side by side, and memory.

Files are cached, as they are from the second round on. The two ways take turns, and the ratio is of their medians.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

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


def tasks(root: Path, eager: bool, name: str = "fedgbo_cnn") -> dict[str, fb.Task]:
    model = fb.models.build(name, channels=3, size=SIDE, classes=CLASSES)
    found = {"lazy": fb.Task.from_datasets(model, fb.folders(root, load), lazy=True)}
    if eager:
        found["memory"] = fb.Task.from_datasets(model, fb.folders(root, load))
    return found


def seconds(task: fb.Task, rounds: int, per_round: int, engine: str, epochs: int = 5) -> float:
    start = time.perf_counter()
    work = fb.Work(lr=0.05, epochs=epochs, batch=10)
    fb.simulate(
        task, fb.fedavg(), work, fb.rounds(rounds, clients=per_round), engine=engine, evaluate_every=None
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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--model", default="fedgbo_cnn", help="the lighter, the more reading counts: try lenet5"
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--engine", default="auto")
    parser.add_argument(
        "--memory-only", action="store_true", help="lazy alone: what it takes for so many clients"
    )
    asked = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="fedbraid-lazy-"))
    try:
        write(root, asked.clients, asked.samples)
        before, made = megabytes(), tasks(root, not asked.memory_only, asked.model)
        said: dict[str, Any] = {
            "model": asked.model,
            "epochs": asked.epochs,
            "clients": asked.clients,
            "samples": asked.samples,
            "torch_threads": torch.get_num_threads(),
        }
        took: dict[str, list[float]] = {name: [] for name in made}
        for repeat in range(asked.repeats + 1):  # the first one warms caches up, and compiles
            for name, task in made.items():
                spent = seconds(task, asked.rounds, asked.per_round, asked.engine, asked.epochs)
                took[name] += [spent] if repeat else []
        said |= {f"{name}_seconds": round(statistics.median(t), 3) for name, t in took.items()}
        if "memory" in took:
            said["speed_ratio"] = round(
                statistics.median(took["memory"]) / statistics.median(took["lazy"]), 3
            )
        said["megabytes_more"] = round(megabytes() - before, 1)
        print(json.dumps(said))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
