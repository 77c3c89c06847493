"""FedAdaVR and FedAdaVR-Quant (Algorithm 2 of its paper): SAGA over clients, any adaptive step, memory in few bits.

Algorithm 2, line 9, drops the second sum of eq. 6, which holds. Sums over S are normalised over S unless asked
otherwise: read literally, eq. 6 would be MIFA.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbraid.algorithms._build import ADAPTIVE_RATE, builder, searched
from fedbraid.algorithms.memory import with_memory
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import one_of
from fedbraid.core.optim import SERVER, Optimize, Optimizer, TrustRatio, named
from fedbraid.core.search_space import Categorical
from fedbraid.core.traits import MemoryFormula, MemoryStep
from fedbraid.core.transform import Scale
from fedbraid.errors import ConfigError, unknown
from fedbraid.links import codecs


@dataclass(frozen=True)
class VarianceReduced(MemoryFormula):
    """r = Σ_S p_i (g_i − y_i) + Σ_N p_j y_j with g_i = Δ_i/η, then y_i ← g_i for i ∈ S; G = η r.

    `normalise` is "cohort" (the first sum's weights over S) or "population" (both over N).
    """

    normalise: str = "cohort"
    per_rate = True  # eq. 4: g_i = (x − y_{i,K})/η

    def __post_init__(self) -> None:
        one_of("normalise", self.normalise, ("cohort", "population"))

    def update(self, m: MemoryStep, lr: float) -> Tensor:
        share = 1.0 if self.normalise == "cohort" else m.weight / m.population
        stored = (m.before / m.population).to(m.change)
        r = share * m.change + stored  # eq. 6 (line 9); eq. 5 and 7 (lines 13 and 14) are the memory's
        return lr * r  # eq. 8 (line 10)


MEMORIES = {None: None, "fp16": codecs.fp16(), "int8": codecs.int8(), "int4": codecs.int4()}


@builder
@searched(optimizer=Categorical(("adam", "adabelief", "yogi", "lamb")), lr=ADAPTIVE_RATE)
def fedadavr(
    optimizer: str = "adam", lr: float = 0.01, memory: str | None = None, normalise: str = "cohort",
    beta1: float | None = None, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0,
    layerwise: bool = True, weights: str = "samples", held: str = "server", fade: float = 0.0,
) -> Algorithm:  # fmt: skip
    """FedAdaVR: remember every client's last update y_i, correct with it, step adaptively.

    r = Σ_S p_i (g_i − y_i) + Σ_N p_j y_j, g_i = Δ_i/η;  y_i ← Q(g_i);  x ← Optimizer(x, η r)

    memory="fp16", "int8" or "int4" is Q, by which the server stores y_i. With held="client" each client keeps its own, and
    uploads what changed; it may `fade`, by that share a step.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.fedadavr("adam", lr=0.01, memory="int4")
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.65
    True
    """
    if memory not in MEMORIES:
        raise unknown("memory", str(memory), [m for m in MEMORIES if m])
    if memory is not None and held == "client":
        raise ConfigError(
            f"memory={memory!r} is what a server stores, and held='client' leaves it none; give the upload a codec, such as"
            f" fb.with_codecs(fb.fedadavr(held='client'), up=fb.codecs.{memory}())"
        )
    kind = named(optimizer, SERVER)
    if kind is Optimizer:
        steps_of = Optimizer()
    else:
        first = (0.0 if optimizer == "adagrad" else 0.9) if beta1 is None else beta1
        steps_of = kind(first, beta2, eps)  # type: ignore[call-arg]
    trust = [TrustRatio(layerwise)] if optimizer == "lamb" else []
    steps = (Optimize(steps_of, weight_decay), *trust, Scale(lr))
    return with_memory(held, weights, fade, VarianceReduced(normalise), *steps, codec=MEMORIES[memory])
