"""Flower's FedAvg, FedAvgM, FedAdagrad, FedAdam and FedYogi beside fedbraid's, after every round.

git clone https://github.com/adap/flower && python benchmarks/authors/flower.py flower

Their `Strategy.start` runs as it is: it asks the grid who is there, sends messages, and folds the replies. Ours is the grid,
which says that the cohort of the round is there and trains each of its messages by plain SGD.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import random
import sys
from collections.abc import Iterable

import torch
from beside import COHORT, ROUNDS, UNEQUAL, Verdict, clients, clone, cohorts, flat, network, ours

import fedbraid as fb

sys.path.insert(0, str(clone(__doc__.splitlines()[0]) / "framework" / "py"))
app = importlib.import_module("flwr.app")
strategies = importlib.import_module("flwr.serverapp.strategy")
logging.getLogger("flwr").setLevel(logging.ERROR)
with contextlib.suppress(ImportError):  # releases after 1.28 ask which run a message belongs to
    task = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    task.task_id = task.run_id = task.node_id = 1

LR, STEPS, ETA, BETAS, TAU = 0.1, 3, 0.05, (0.9, 0.99), 1e-3
DATA, ROUNDS_OF = clients(UNEQUAL), cohorts()
EVERY = {"fraction_evaluate": 0.0, "min_train_nodes": COHORT, "min_available_nodes": COHORT}


def trained(message, sizes: bool):
    """A node's reply: three full-batch steps of SGD from the model that it was sent."""
    x, y = (torch.tensor(v) for v in DATA[message.metadata.dst_node_id])
    net = network()
    net.load_state_dict({k: torch.tensor(v.numpy()) for k, v in message.content["arrays"].items()})
    for _ in range(STEPS):
        net.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for weight in net.parameters():
                weight -= LR * weight.grad
    metrics = app.MetricRecord({"num-examples": len(y) if sizes else 1})
    content = app.RecordDict({"arrays": app.ArrayRecord(net.state_dict()), "metrics": metrics})
    return app.Message(content=content, reply_to=message)


class Cohorts:
    """A grid on which the cohort of the round is connected, and nobody else."""

    def __init__(self, sizes: bool) -> None:
        self.round, self.sizes = 0, sizes

    def get_node_ids(self) -> list[int]:
        return ROUNDS_OF[self.round]

    def send_and_receive(self, messages: Iterable, timeout: float) -> list:
        replies = [trained(message, self.sizes) for message in messages]
        self.round += bool(replies) and self.round < ROUNDS - 1
        return replies


def theirs(name: str, sizes: bool = True, **settings: object) -> list:
    """The server's model after every round; evaluation is where it is seen."""
    seen = []
    random.seed(0)  # it decides in what order the cohort's updates are added
    getattr(strategies, name)(**EVERY, **settings).start(
        Cohorts(sizes), app.ArrayRecord(network().state_dict()), ROUNDS,
        evaluate_fn=lambda t, arrays: seen.append(flat(a.numpy() for a in arrays.values())) if t else None,
    )  # fmt: skip
    return seen


verdict, work = Verdict(1e-5), fb.Work(lr=LR, steps=STEPS, batch=None)
mine, moments = {"lr": ETA, "eps": TAU, "v0": 0.0}, dict(zip(("beta1", "beta2"), BETAS))
their = {"eta": ETA, "tau": TAU}
their_moments = their | dict(zip(("beta_1", "beta_2"), BETAS))


def compare(name: str, algorithm: fb.Algorithm, models: list, control: bool = False) -> None:
    verdict.compare(name, ours(algorithm, DATA, work, ROUNDS_OF), models, control)


compare("fedavg", fb.fedavg(), theirs("FedAvg"))
compare("fedavg, uniform", fb.fedavg(weights="uniform"), theirs("FedAvg", sizes=False))
momentum = theirs("FedAvgM", server_learning_rate=0.5, server_momentum=0.9)
compare("fedavgm", fb.fedavgm(lr=0.5, momentum=0.9), momentum)
compare("fedadagrad", fb.fedadagrad(**mine), theirs("FedAdagrad", **their))
yogi, adam = theirs("FedYogi", **their_moments), theirs("FedAdam", **their_moments)
compare("fedyogi", fb.fedyogi(**mine, **moments), yogi)
compare("fedadam, variant flower", fb.fedadam(**mine, **moments, variant="flower"), adam)
compare("control: fedyogi from v0 = 0.01", fb.fedyogi(**mine | {"v0": 0.01}, **moments), yogi, control=True)
compare("control: fedadam, Reddi's", fb.fedadam(**mine, **moments), adam, control=True)
verdict.close()
