"""FedShift (Algorithm 2 of its paper): averages of mixed-precision clients, re-centred by the share of quantised ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fedbraid.algorithms._build import builder
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.context import ServerContext, Tree
from fedbraid.core.transform import Transform, pipeline


@dataclass(frozen=True)
class Shift(Transform):
    """Per layer, x̄_ℓ ← x̄_ℓ − (I/|S|)·mean(x̄_ℓ), I the number of quantised clients in the cohort.

    Only matrices and kernels, which codecs quantise; biases and norms' gains stay.
    """

    def adjust(self, average: Tensor, s: Tree, ctx: ServerContext) -> Tensor:
        shifted = average.clone()
        for slot in ctx.layout:
            if len(slot.shape) > 1 and not slot.buffer:
                at = slice(slot.offset, slot.end)
                shifted[at] = (
                    average[at] - ctx.quantized_fraction * average[at].mean()
                )  # Algorithm 2, lines 18, 19
        return shifted


@builder
def fedshift(a: Algorithm) -> Algorithm:
    """Any algorithm, its averaged model x̄ shifted by the share of quantized clients in the cohort.

    x̄_ℓ ← x̄_ℓ − (I/|S|) · mean(x̄_ℓ) per matrix or kernel ℓ, I of the cohort's |S| clients being quantized

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.fedshift(fb.fedpaq(fb.codecs.mixed(fb.codecs.kmeans(4), share=0.5)))
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.45
    True
    """
    return replace(a, server=pipeline(a.server, Shift()), name="")
