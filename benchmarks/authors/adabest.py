"""AdaBest, FedDyn, FedProx and FedAvg beside the simulator of AdaBest's authors, after every round.

git clone https://github.com/varnio/fedsim && python benchmarks/authors/adabest.py fedsim

Of release 0.9.1, whose mean number of samples is a mean batch size: fedbraid's mu is E·B/n̄ times theirs (E epochs of batches
of B, n̄ samples a client). A client's samples are copies of one, since the simulator draws its batches at random.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from beside import EQUAL, ROUNDS, UNEQUAL, Verdict, absent, clients, clone, cohorts, network, ours
from torch.utils.data import TensorDataset

import fedbraid as fb

where = clone(__doc__.splitlines()[0])
absent("tqdm", trange=range)
sys.modules["fedsim.scores"] = types.ModuleType("fedsim.scores")
for name in (
    "fedsim",
    "fedsim.distributed",
    "fedsim.distributed.centralized",
    "fedsim.distributed.centralized.training",
):
    # the folder without what it imports at once: data sets, models, scores
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(where.joinpath(*name.split(".")))]
sys.modules["fedsim"].scores = sys.modules["fedsim.scores"]
utils = importlib.import_module("fedsim.utils")

LR, EPOCHS, BATCH = 0.1, 2, 2


class CrossEntropy(torch.nn.CrossEntropyLoss):
    log_freq = 10**9  # nothing is reported

    def get_name(self) -> str:
        return "loss"

    def get_score(self) -> float:
        return 0.0


def class_of(name: str) -> Any:
    return getattr(importlib.import_module(f"fedsim.distributed.centralized.training.{name.lower()}"), name)


def with_constant(function: Callable, was: float, now: float) -> Callable:
    """The same function with a constant of it or of one within it changed, and an error if there is no such constant."""

    def change(code: types.CodeType) -> types.CodeType:
        within = tuple(
            change(c) if isinstance(c, types.CodeType) else now if c == was else c for c in code.co_consts
        )
        return code.replace(co_consts=within)

    def count(code: types.CodeType) -> int:
        return sum(count(c) if isinstance(c, types.CodeType) else c == was for c in code.co_consts)

    if not count(function.__code__):
        raise SystemExit(f"{function.__qualname__} holds no {was}: is this release 0.9.1?")
    return types.FunctionType(
        change(function.__code__),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def theirs(
    name: str, data: list, rounds: list, lr: float = LR, momentum: float = 0, whole: bool = False, **settings
) -> list[np.ndarray]:
    """Their models after each round; `whole` makes their half of the proximal pull a whole one."""
    algorithm = class_of(name)
    train = with_constant(algorithm.send_to_server, 0.5, 1.0) if whole else algorithm.send_to_server
    server, kept, seen = utils.Storage(), [utils.Storage() for _ in data], []
    sets = [TensorDataset(torch.tensor(x), torch.tensor(y)) for x, y in data]
    for key, value in {
        "device": "cpu",
        "model_def": network,
        "optimizer_def": partial(torch.optim.SGD, lr=1.0),
        "num_clients": len(data),
        "oracle_dataset": {"train": torch.utils.data.ConcatDataset(sets)},
    }.items():
        server.write(key, value)
    with contextlib.redirect_stdout(io.StringIO()):
        algorithm.init(server, **settings)
    descent = partial(torch.optim.SGD, lr=lr, momentum=momentum)
    for t, cohort in enumerate(rounds):
        total, more = utils.SerialAggregator(), utils.AppendixAggregator()
        for i in cohort:
            message = train(
                i, t, kept[i], {"train": sets[i]}, "train", {}, EPOCHS, CrossEntropy(), BATCH, BATCH, descent,
                device="cpu", ctx=algorithm.send_to_client(server, i),
            )  # fmt: skip
            algorithm.receive_from_client(server, i, message, "train", total, more)
        algorithm.optimize(server, total, more)
        seen.append(server.read("cloud_params").detach().numpy().copy())
    return seen


verdict, some, everyone = Verdict(5e-6), cohorts(), [list(range(len(EQUAL)))] * ROUNDS
equal, unequal = clients(EQUAL, alike=True), clients(UNEQUAL, alike=True)
MU, BETA = 0.3, 0.8


def compare(
    name: str, algorithm: fb.Algorithm, data: list, rounds: list, their: list, control=False, **rates
) -> None:
    work = fb.Work(**({"lr": LR} | rates), epochs=EPOCHS, batch=BATCH)
    verdict.compare(name, ours(algorithm, data, work, rounds), their, control)


def mu(sizes: tuple[int, ...]) -> float:
    """fedbraid's for theirs."""
    return MU * EPOCHS * BATCH / float(np.mean(sizes))


compare("fedavg, unequal sizes", fb.fedavg(), unequal, some, theirs("FedAvg", unequal, some))
compare(
    "fedprox(mu/2), unequal sizes",
    fb.fedprox(mu=MU / 2),
    unequal,
    some,
    theirs("FedProx", unequal, some, mu=MU),
)
for lr, momentum in (LR, 0.0), (LR / 10, 0.9):
    their = theirs("AdaBest", equal, some, lr, momentum, mu=MU, beta=BETA)
    adabest = fb.adabest(mu=mu(EQUAL), beta=BETA, weights="uniform")
    compare(
        f"adabest, equal sizes, momentum {momentum}", adabest, equal, some, their, lr=lr, momentum=momentum
    )
their = theirs("AdaBest", unequal, everyone, mu=MU, beta=BETA)
for weights in "progressive", "uniform", "samples":
    adabest, control = fb.adabest(mu=mu(UNEQUAL), beta=BETA, weights=weights), weights != "progressive"
    name = f"{'control: ' * control}adabest, unequal sizes, {weights}"
    compare(name, adabest, unequal, everyone, their, control)
feddyn = fb.feddyn(mu=MU, weights="uniform")
compare(
    "feddyn, equal, their half made whole",
    feddyn,
    equal,
    some,
    theirs("FedDyn", equal, some, whole=True, alpha=MU),
)
compare(
    "control: feddyn, their half as it is", feddyn, equal, some, theirs("FedDyn", equal, some, alpha=MU), True
)
verdict.close()
