"""A small transformer over padded text and its mask: clients' steps a second, beside the better of two bare loops.

Bare loops take the same batches, cut to their longest: a client after the other on all cores, or on one core in each of
as many processes as there are cores. They take turns with fedbraid; the smallest time of each counts, as whole rounds:
fedbraid's are those between the ends of two rounds, a bare loop's all of it over the number of rounds. A ratio above 1
means that fedbraid is faster.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import time

import numpy as np
import torch
from speed import Stamps
from torch import Tensor, nn

import fedbraid as fb

BATCH, LR = 10, 0.05


class Reader(nn.Module):
    """Two layers of attention over words, the mean of what they say, two classes."""

    def __init__(self, words: int = 1000, width: int = 64, longest: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        hidden = self.body(x, src_key_padding_mask=attention_mask == 0)
        seen = attention_mask.unsqueeze(-1).float()
        return self.out((hidden * seen).sum(1) / seen.sum(1))


def texts(clients: int, each: int) -> list[tuple[dict[str, list[list[int]]], list[int]]]:
    draw = np.random.default_rng(0)
    found = []
    for _ in range(clients):
        said = [draw.integers(1, 1000, draw.integers(8, 48)).tolist() for _ in range(each)]
        found.append(({"input_ids": said}, [int(s[0] < 500) for s in said]))
    return found


def train(task: fb.Task, clients: list[int]) -> None:
    """A bare loop over these clients, as one writes it in PyTorch."""
    module = task.module().train()
    start = {k: v.clone() for k, v in module.state_dict().items()}
    step = torch.optim.SGD(module.parameters(), LR)
    for client in clients:
        module.load_state_dict(start)
        rows = task.rows[task.offsets[client] : task.offsets[client + 1]]
        for some in rows[torch.randperm(len(rows))].split(BATCH):
            inputs = {key: leaf[some] for key, leaf in task.inputs.items()}
            step.zero_grad()
            nn.functional.cross_entropy(module(**inputs), task.targets[some]).backward()
            step.step()


def _share(task: fb.Task, clients: list[int]) -> None:
    torch.set_num_threads(1)
    train(task, clients)


def bare(task: fb.Task, clients: list[int], processes: int) -> float:
    start = time.perf_counter()
    if processes == 1:
        train(task, clients)
    else:
        shares = [clients[i::processes] for i in range(processes)]
        hands = [mp.get_context("fork").Process(target=_share, args=(task, share)) for share in shares]
        for hand in hands:
            hand.start()
        for hand in hands:
            hand.join()
    return time.perf_counter() - start


def ours(task: fb.Task, rounds: int, per_round: int, engine: str) -> tuple[float, list[int], str]:
    stamps, schedule = Stamps(), fb.rounds(rounds, clients=per_round)
    result = fb.simulate(
        task,
        fb.fedavg(),
        fb.Work(lr=LR, batch=BATCH),
        schedule,
        engine=engine,
        evaluate_every=None,
        callbacks=[stamps],
    )
    return stamps.per_round(), [c for r in result.history for c in r["clients"]], result.engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--per-round", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", default="auto")
    asked = parser.parse_args()
    task = fb.Task.from_arrays(Reader, texts(asked.clients, asked.samples), collate=fb.pad())
    cores = len(os.sched_getaffinity(0))
    took: dict[str, list[float]] = {"fedbraid": [], "one process": [], f"{cores} processes": []}
    engine = asked.engine
    for repeat in range(asked.repeats + 1):  # the first one warms up
        spent, visits, engine = ours(task, asked.rounds, asked.per_round, engine)
        times = [spent, *(bare(task, visits, processes) / asked.rounds for processes in (1, cores))]
        for name, seconds in zip(took, times, strict=True):
            took[name] += [seconds] if repeat else []
    least = {name: round(min(t), 4) for name, t in took.items()}
    best = min(seconds for name, seconds in least.items() if name != "fedbraid")
    said = {
        "engine": engine,
        "seconds_a_round": least,
        "ratio": round(best / least["fedbraid"], 3),
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
