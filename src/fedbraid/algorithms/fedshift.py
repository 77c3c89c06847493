"""FedShift (Algorithm 2 of its paper): aggregation of mixed-precision clients without bias."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fedbraid.algorithms._build import builder
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.gather import Info, Tree
from fedbraid.core.rule import Vectors
from fedbraid.core.transform import Transform, pipeline


@dataclass(frozen=True)
class Shift(Transform):
    """Per layer, x_ℓ ← x_ℓ − (I/|S|)·mean(x_ℓ), I the number of quantised clients in the cohort."""

    def update(self, u: Vectors, s: Tree, x: Tensor, info: Info) -> tuple[Vectors, Tree]:
        delta = u["delta"].clone()
        for slot in info.layout:
            at = slice(slot.offset, slot.end)
            delta[at] += info.quantised * (x[at] - delta[at]).mean()
        return {**u, "delta": delta}, s


@builder
def fedshift(a: Algorithm) -> Algorithm:
    """Any algorithm, its new model shifted by the share of quantised clients."""
    return replace(a, server=pipeline(a.server, Shift()), name="")
