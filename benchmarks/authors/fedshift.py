"""FedShift over FedAvg and FedProx, and both without it, beside FedShift's authors' program, after every round.

git clone https://github.com/jw-temp/FedShift && python benchmarks/authors/fedshift.py FedShift

Their `main` runs as it is: 10 of 20 clients a round, half of them of odd number, which quantize. Ours are the data, the network,
the cohorts and the process pool; their evaluation is where a round's model is noted, and where the run is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import sys
import types

import numpy as np
import torch
from beside import ROUNDS, Verdict, absent, clients, clone, flat, ours, weights_only
from torch.utils.data import DataLoader, TensorDataset

import fedbraid as fb

clone(__doc__.splitlines()[0])
absent("tqdm", tqdm=None)
absent("sklearn")
absent("sklearn.cluster", KMeans=None)
absent("fast_pytorch_kmeans", KMeans=None)
absent("torchvision", models=None)
sys.modules["data_loader"] = types.ModuleType("data_loader")  # it reads CIFAR-10
vars(sys.modules["data_loader"]).update(
    load_cifar10_data=None, load_cifar100_data=None, load_FMNIST_data=None
)
program = importlib.import_module("main")
# NumPy 2 makes a tensor of the code book where NumPy 1 made an array
levels = lambda low, high, count: np.linspace(float(low), float(high), count)  # noqa: E731
sys.modules["quantization"].np = types.SimpleNamespace(linspace=levels)

N, HALF, SAMPLES, MU = 20, 5, 12, 0.01  # their mu
LR, MOMENTUM, EPOCHS = 0.005, 0.9, 10  # theirs, too; a batch of 50 holds all of a client's samples
DATA = clients((SAMPLES,) * N)
ODD = tuple(range(1, N, 2))
draw = np.random.default_rng(3)
COHORTS = [[*draw.choice(ODD, HALF, False), *draw.choice(range(0, N, 2), HALF, False)] for _ in range(ROUNDS)]
COHORTS = [[int(i) for i in cohort] for cohort in COHORTS]


class Enough(Exception):
    """All rounds are done: their number of rounds is fixed at 400."""


class Serial:
    """A process pool of none."""

    def __init__(self, processes: int) -> None: ...

    def __enter__(self) -> Serial:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, function, arguments) -> list:
        return [function(one) for one in arguments]


def theirs(bits: int, shift: bool, prox: bool, quantize: bool) -> list[np.ndarray]:
    """Their models after each round."""
    seen: list[np.ndarray] = []

    def note(model, device, loader, step, is_shifting=True) -> None:
        if is_shifting:
            seen.append(flat(model.parameters()).copy())
            if len(seen) == ROUNDS:
                raise Enough

    sets = [TensorDataset(torch.tensor(x), torch.tensor(y)) for x, y in DATA]
    loaders = [DataLoader(one, batch_size=50) for one in sets]
    cohorts = iter(COHORTS)
    vars(program).update(
        load_cifar10_data=lambda *_, **__: (loaders, None),
        CNN2=lambda *_: weights_only(),
        init_weights=lambda *_: None,
        client_selection=lambda *_, **__: next(cohorts),
        Pool=Serial,
        evaluate=note,
    )
    options = {"bits": bits, "use_fedshift": shift, "use_fedprox": prox, "use_quantization": quantize}
    fixed = {"seed": 1, "num_clients": N, "selected_clients": 2 * HALF, "dir_alpha": 0, "data_type": None}
    args = argparse.Namespace(use_uniform_q=True, use_scaffold=False, **options, **fixed)
    with contextlib.suppress(Enough), contextlib.redirect_stdout(io.StringIO()):
        program.main(args)
    return seen


verdict, work = Verdict(5e-6), fb.Work(lr=LR, momentum=MOMENTUM, epochs=EPOCHS, batch=None)
for prox in False, True:
    base = fb.fedprox(mu=MU, weights="uniform") if prox else fb.fedavg(weights="uniform")
    name = "fedprox" if prox else "fedavg"
    mine = ours(base, DATA, work, COHORTS, weights_only)
    verdict.compare(f"{name}, exact", mine, theirs(8, False, prox, False), start=weights_only)
    for bits in 8, 4, 2:
        codec = fb.codecs.of_weights(fb.codecs.uniform(bits))
        quantized = fb.with_codecs(base, up=fb.codecs.mixed(codec, clients=ODD))
        plain = ours(quantized, DATA, work, COHORTS, weights_only)
        shifted = ours(fb.fedshift(quantized), DATA, work, COHORTS, weights_only)
        verdict.compare(
            f"{name}, uniform({bits})", plain, theirs(bits, False, prox, True), start=weights_only
        )
        their = theirs(bits, True, prox, True)
        verdict.compare(f"fedshift({name}), uniform({bits})", shifted, their, start=weights_only)
    verdict.compare("control: without the shift", plain, their, control=True, start=weights_only)
verdict.close()
