"""FedAdaVR and FedAdaVR-Quant (Algorithm 2 of its paper): SAGA over clients, any adaptive step, memory in few bits.

Algorithm 2, line 9, drops the second sum of eq. 6, which holds. Sums over S are normalised over S unless asked
otherwise: read literally, eq. 6 would be MIFA.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbraid.algorithms._build import ADAPTIVE_RATE, builder, searched
from fedbraid.algorithms.memory import ClientMemorySum, MemorySum, population_weight, with_memory
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import one_of
from fedbraid.core.codec import Codec
from fedbraid.core.context import ServerContext, Uploads
from fedbraid.core.gather import DeltaGather, Metrics
from fedbraid.core.layout import Layout
from fedbraid.core.optim import SERVER, Optimize, Optimizer, TrustRatio, named
from fedbraid.core.search_space import Categorical
from fedbraid.core.traits import GatherTraits, UpdateMemory
from fedbraid.core.transform import Scale
from fedbraid.core.update_table import UpdateTable, UpdateTableStep
from fedbraid.errors import ConfigError, unknown
from fedbraid.links import codecs


@dataclass(frozen=True)
class VarianceReduced(DeltaGather):
    """r = Σ_S p_i (g_i − y_i) + Σ_N p_j y_j, g_i = Δ_i/η, then y_i ← g_i through the codec for i ∈ S; G = η r.

    `normalise` is "cohort" (the first sum's weights over S) or "population" (both over N).
    """

    codec: Codec | None = None
    normalise: str = "cohort"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_normalise(self.normalise)

    def traits(self) -> GatherTraits:
        return GatherTraits(weights=self.weights, memory=UpdateMemory(self.codec, True, self.normalise))

    def init(self, x: Tensor, layout: Layout) -> UpdateTable:
        return UpdateTable.open(x, self.codec, layout)  # every y_i is 0 at first

    def zero_delta(self, s: UpdateTable, x: Tensor) -> UpdateTableStep:
        return s.begin_step()

    def add_delta(self, mine: UpdateTableStep, up: Uploads, s: UpdateTable, x: Tensor) -> UpdateTableStep:
        p, age = up.p(self.weights), self.staleness(up.staleness)
        mine.put(up.clients, up.vectors["delta"], p, age, rate=up.lr)  # eq. 4, 5 and 7
        return mine

    def close_delta(
        self, mine: UpdateTableStep, s: UpdateTable, ctx: ServerContext
    ) -> tuple[Tensor, UpdateTable, Metrics]:
        P_N = population_weight(self.weights, ctx)
        P_S = mine.weight if self.normalise == "cohort" else P_N
        r = mine.received_change / P_S + mine.sum_before / P_N  # eq. 6
        return ctx.lr * r, mine.close(), {}  # eq. 8

    def remove_client(self, s: UpdateTable, client: int) -> UpdateTable:
        return s.without(client)


@dataclass(frozen=True)
class ClientHeldVarianceReduced(ClientMemorySum):
    """The same with every y_j held by its client, whose δ_i = g_i − y_i came up: r = Σ_S p_i δ_i + Σ_N p_j y_j; G = η r."""

    normalise: str = "cohort"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_normalise(self.normalise)

    def made(self, change: Tensor, P_S: float, old: MemorySum, new: MemorySum, ctx: ServerContext) -> Tensor:
        P_N = population_weight(self.weights, ctx)
        part = 1.0 if self.normalise == "cohort" else P_S / P_N
        return ctx.lr * (part * change + (old.total / P_N).float())  # eq. 6 and 8


def _check_normalise(normalise: str) -> None:
    one_of("normalise", normalise, ("cohort", "population"))


MEMORIES = {None: None, "fp16": codecs.fp16(), "int8": codecs.int8(), "int4": codecs.int4()}


@builder
@searched(optimizer=Categorical(("adam", "adabelief", "yogi", "lamb")), lr=ADAPTIVE_RATE)
def fedadavr(
    optimizer: str = "adam", lr: float = 0.01, memory: str | None = None, normalise: str = "cohort",
    beta1: float | None = None, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0,
    layerwise: bool = True, weights: str = "samples", held: str = "server", fade: float = 0.0,
) -> Algorithm:  # fmt: skip
    """FedAdaVR: remember every client's last update, correct with it, step adaptively; memory="int4" quantises it.

    With held="client" each client keeps its own, and uploads what changed; it may `fade`, by that share a step.
    """
    if memory not in MEMORIES:
        raise unknown("memory", str(memory), [m for m in MEMORIES if m])
    if memory is not None and held == "client":
        raise ConfigError(
            f"memory={memory!r} is what a server stores, and held='client' leaves it none; give the upload a codec, such as"
            f" fb.with_codecs(fb.fedadavr(held='client'), up=fb.codecs.{memory}())"
        )
    gather = VarianceReduced(weights, codec=MEMORIES[memory], normalise=normalise)
    kind = named(optimizer, SERVER)
    if kind is Optimizer:
        steps_of = Optimizer()
    else:
        first = (0.0 if optimizer == "adagrad" else 0.9) if beta1 is None else beta1
        steps_of = kind(first, beta2, eps)  # type: ignore[call-arg]
    trust = [TrustRatio(layerwise)] if optimizer == "lamb" else []
    own = ClientHeldVarianceReduced(weights, normalise=normalise)
    steps = (Optimize(steps_of, weight_decay), *trust, Scale(lr))
    return with_memory(held, weights, fade, gather, own, *steps, rated=True)
