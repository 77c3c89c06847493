"""FedGBO, Mimelite, MFL, AdaptiveFedOpt and FedProx beside the code of FedGBO's authors, after every round.

git clone https://github.com/JedMills/FedGBO && python benchmarks/authors/fedgbo.py FedGBO

Their loops and optimizers run as they are, on a model of ours in their base class, whose test is where a round's
model is noted; the feeder gives out a client's whole set, so that no batch is drawn.
"""

from __future__ import annotations

import numpy as np
import torch
from beside import (
    COHORT,
    EQUAL,
    ROUNDS,
    UNEQUAL,
    Verdict,
    absent,
    clients,
    clone,
    cohorts,
    flat,
    network,
    ours,
)

import fedbraid as fb

clone(__doc__.splitlines()[0])
absent("torchvision")
absent("progressbar", progressbar=lambda steps, **_: steps)
import fl_algs  # noqa: E402
import models  # noqa: E402
import optimizers as opt  # noqa: E402

LR, K, CPU = 0.2, 3, torch.device("cpu")


class Feeder:
    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.all, self.n_samples = (torch.tensor(x), torch.tensor(y)), len(y)

    def activate(self) -> None: ...

    def deactivate(self) -> None: ...

    def next_batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.all


class Model(models.FLModel):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.loss_fn, self.seen = network(), torch.nn.CrossEntropyLoss(), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def calc_acc(self, logits: torch.Tensor, y: torch.Tensor) -> float:
        return 0.0

    def test(self, x: object, y: object, batch: int) -> tuple[float, float]:
        self.seen.append(flat(self.get_params()))
        return 0.0, 0.0


def theirs(loop, data, local, server=None) -> list[np.ndarray]:
    """Their models after each round: `local` makes the clients' optimizer, `server` theirs where there is one."""
    model = Model()
    model.set_optim(local(model.parameters()))
    np.random.seed(0)  # noqa: NPY002 - what their loops draw cohorts from
    second = server(model.get_params_numpy()) if server else model.optim
    loop([Feeder(*d) for d in data], (None, None), model, second, T=ROUNDS, M=COHORT, K=K, B=-1)
    return model.seen


ADAM, RMS = {"beta1": 0.8, "beta2": 0.7}, {"beta": 0.8}
SETTINGS = {
    "sgdm": ("SGDm", RMS, {}),
    "rmsprop": ("RMSProp", RMS, {"eps": 0.02}),
    "adam": ("Adam", ADAM, {"eps": 0.02}),
}
LOOPS = [
    (fl_algs.run_fedgbo, "FixedStats", fb.fedgbo),
    (fl_algs.run_mimelite, "FixedStats", fb.mimelite),
    (fl_algs.run_mfl, "MFL", fb.mfl),
]
SGD = lambda p: torch.optim.SGD(p, LR)  # noqa: E731
SERVERS = [
    ("SGD", lambda x: opt.ServerSGD(1.0), fb.fedavg(weights="uniform")),
    (
        "SGDm",
        lambda x: opt.ServerSGDm(x, 0.9, 0.6),
        fb.fedavgm(lr=0.9 * (1 - 0.6), momentum=0.6, weights="uniform"),
    ),
    (
        "RMSProp",
        lambda x: opt.ServerRMSProp(x, 0.5, 0.7, 0.02),
        fb.fedadam(lr=0.5, beta1=0, beta2=0.7, eps=0.02, v0=1, weights="uniform"),
    ),
    (
        "Adam",
        lambda x: opt.ServerAdam(x, 0.5, 0.8, 0.7, 0.02),
        fb.fedadam(lr=0.5, beta1=0.8, beta2=0.7, eps=0.02, v0=1, weights="uniform"),
    ),
]

verdict, work = Verdict(5e-6), fb.Work(lr=LR, steps=K, batch=None)
for label, sizes in ("equal", EQUAL), ("unequal", UNEQUAL):
    data = clients(sizes)
    for loop, prefix, build in LOOPS:
        for name, (suffix, betas, eps) in SETTINGS.items():
            more = betas | ({"epsilon": eps["eps"]} if eps else {})
            their = theirs(loop, data, lambda p: getattr(opt, prefix + suffix)(p, lr=LR, device=CPU, **more))  # noqa: B023
            mine = ours(build(name, v0=1, **betas, **eps), data, work, cohorts())
            verdict.compare(f"{build.__name__}, {name}, {label} sizes", mine, their)
        mine = ours(build("adam", v0=0.5, **ADAM, eps=0.02), data, work, cohorts())
        verdict.compare(f"control: {build.__name__}, adam, v0=0.5", mine, their, control=True)
    for name, server, algorithm in SERVERS:
        their = theirs(fl_algs.run_adaptive_fed_opt, data, SGD, server)
        verdict.compare(
            f"AdaptiveFedOpt, {name}, {label} sizes", ours(algorithm, data, work, cohorts()), their
        )
    their = theirs(fl_algs.run_fedprox, data, lambda p: opt.FedProxOptim(p, lr=LR, mu=0.3, device=CPU))
    mine = ours(fb.fedprox(mu=0.3, weights="uniform"), data, work, cohorts())
    verdict.compare(f"fedprox, {label} sizes", mine, their)
verdict.close()
