"""FedDF: ensemble distillation on data of the server's (Lin et al. 2020, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, softmax

from fedbraid.algorithms._build import builder
from fedbraid.core import rng
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import integer
from fedbraid.core.context import ServerContext, Tree, Uploads, Vectors
from fedbraid.core.gather import Gather, Mean, Metrics
from fedbraid.core.lr_schedules import downhill
from fedbraid.core.traits import GatherTraits, TransformTraits
from fedbraid.core.transform import Scale, Transform, pipeline


@dataclass(frozen=True)
class Ensemble(Gather):
    """The mean of updates, and the cohort's models themselves, `[m, d]`, for the server to ask."""

    weights: str = "samples"

    def traits(self) -> GatherTraits:
        return GatherTraits(weights=self.weights, requires_updates=True)

    @property
    def _mean(self) -> Mean:
        return Mean(self.weights)

    def zero(self, x: Tensor) -> Tree:
        return self._mean.zero(x), ()

    def add(self, acc: Tree, up: Uploads, s: Tree, x: Tensor) -> Tree:
        mean, models = acc
        return self._mean.add(mean, up, s, x), (*models, up.sent["x"] - up.vectors["delta"])

    def close(self, acc: Tree, s: Tree, ctx: ServerContext) -> tuple[Vectors, Tree, Metrics]:
        mean, models = acc
        u, s, metrics = self._mean.close(mean, s, ctx)
        return {**u, "models": torch.cat(models)}, s, metrics


@dataclass(frozen=True)
class Distil(Transform):
    """From the averaged model, `steps` Adam steps on KL(mean of the cohort's logits ‖ its own) over the public share."""

    steps: int
    rate: float
    batch: int

    def __post_init__(self) -> None:
        integer("steps", self.steps)
        integer("batch", self.batch)
        downhill("rate", self.rate)

    def traits(self) -> TransformTraits:
        return TransformTraits(needs_server_data=True)

    def update(self, u: Vectors, s: Tree, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Tree]:
        if ctx.server_data is None:  # a dry run
            return u, s
        student = ctx.server_data.module(x - u["delta"]).train()
        teachers = [ctx.server_data.module(m).eval() for m in u["models"]]
        optimizer = torch.optim.Adam(student.parameters(), self.rate)
        draw = rng.generator(ctx.server_data.seed, "distil", ctx.t)
        count = len(next(iter(_leaves(ctx.server_data.public[0]))))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.key(ctx.server_data.seed, "distil", ctx.t))
            for _ in range(self.steps):
                rows = torch.from_numpy(draw.choice(count, min(self.batch, count), replace=False))
                with torch.no_grad():
                    said = torch.stack([ctx.server_data.outputs(t, rows) for t in teachers]).mean(0)
                optimizer.zero_grad()
                own = log_softmax(ctx.server_data.outputs(student, rows), 1)
                kl_div(own, softmax(said, 1), reduction="batchmean").backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return {**u, "delta": x - ctx.layout.flatten(student)}, s


def _leaves(tree: Tree) -> list[Tensor]:
    return (
        list(tree.values()) if isinstance(tree, dict) else list(tree) if isinstance(tree, tuple) else [tree]
    )


@builder
def feddf(
    steps: int = 50, rate: float = 1e-3, batch: int = 64, lr: float = 1.0, weights: str = "samples"
) -> Algorithm:
    """FedDF (Lin et al. 2020): the cohort's models are distilled into their mean on the task's public share.

    x̄ = x − lr · Σ_S p_i Δ_i;  `steps` times  x̄ ← Adam(x̄, ∇ KL(softmax(mean_S f(y_i)) ‖ softmax(f(x̄))))

    >>> from dataclasses import replace
    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> task = replace(task, public=task.test)  # what the server distils on; labels are not used
    >>> result = fb.simulate(task, fb.feddf(steps=20), fb.Work(lr=0.1, batch=10), fb.rounds(5, clients=5))
    >>> result.last("accuracy") > 0.4
    True
    """
    return Algorithm(gather=Ensemble(weights), server=pipeline(Scale(lr), Distil(steps, rate, batch)))
