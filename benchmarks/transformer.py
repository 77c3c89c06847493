"""A small transformer over padded text and its mask: clients' steps a second, beside the better of two bare loops.

Bare loops are FedAvg by hand as in speed.py, with batches cut to their longest: a client after the other on all cores, or
in two processes of one thread. They take turns with fedbraid; of each the smallest median of whole rounds counts. A ratio
above 1 means that fedbraid is faster.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch
from speed import Bare, Stamps, TwoProcesses, bare, trained
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


class Padded(Bare):
    """FedAvg by hand over dicts of padded texts, whose batches are cut to their longest."""

    def __init__(self, task: fb.Task, per_round: int) -> None:
        self.task, self.x, self.per_round = task, task.targets, per_round
        self.model, self.loss = task.module().train(), nn.CrossEntropyLoss()

    def cohort(self) -> list[int]:
        return torch.randperm(self.task.clients)[: self.per_round].tolist()

    def client(self, weights: list[Tensor], i: int) -> list[Tensor]:
        task, model = self.task, self.model
        with torch.no_grad():
            for p, w in zip(trained(model), weights):
                p.copy_(w)
        step = torch.optim.SGD(trained(model), LR)
        rows = task.rows[task.offsets[i] : task.offsets[i + 1]]
        for some in rows[torch.randperm(len(rows))].split(BATCH):
            inputs = {key: leaf[some] for key, leaf in task.inputs.items()}
            step.zero_grad()
            self.loss(model(**inputs), task.targets[some]).backward()
            step.step()
        return [p.detach().clone() for p in trained(model)]


class TwoPadded(Padded, TwoProcesses):
    """The same in two processes of one thread."""


def ours(task: fb.Task, rounds: int, per_round: int, engine: str) -> tuple[float, str]:
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
    return stamps.per_round(), result.engine


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
    loops = {"one process": Padded(task, asked.per_round), "two processes": TwoPadded(task, asked.per_round)}
    loops["two processes"].start()
    took: dict[str, list[float]] = {"fedbraid": [], **{name: [] for name in loops}}
    engine = asked.engine
    for repeat in range(asked.repeats + 1):  # the first one warms up
        spent, engine = ours(task, asked.rounds, asked.per_round, engine)
        times = [spent, *(bare(loop, asked.rounds) for loop in loops.values())]
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
