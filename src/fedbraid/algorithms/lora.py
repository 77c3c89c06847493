"""FedEx-LoRA (Singhal, Ponkshe and Vepakomma 2025): the clients' adapter products BA are averaged, not their factors.

Factors are averaged as ever; what the product of the means lacks of the mean of the products goes into the weights
below, which only the server moves, and which are sent out with the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.algorithms._build import builder
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.codec import Codec
from fedbraid.core.context import ServerContext, Tree, Uploads, Vectors
from fedbraid.core.gather import Gather, Mean, Metrics, Sums
from fedbraid.core.layout import Layout
from fedbraid.core.traits import GatherTraits
from fedbraid.core.transform import Pipeline, Scale, Transform
from fedbraid.errors import ConfigError
from fedbraid.links.wrappers import Wrapper

SCALE = "lora_scale"  # the buffer beside a weight that the server moves: by what its product is multiplied
FACTORS = (".lora_A.", ".lora_B.")


class Adapter(NamedTuple):
    """Where a weight `[out, in]`, its scale and the two factors of its adapter begin in the vector."""

    weight: int
    scale: int
    a: int
    b: int
    rows: int
    rank: int
    columns: int

    def product(self, y: Tensor) -> Tensor:
        """s·BA of a block of models `[m, d]`, as flat as the weight."""
        m, r = len(y), self.rank
        a = y[:, self.a : self.a + r * self.columns].view(m, r, self.columns)
        b = y[:, self.b : self.b + self.rows * r].view(m, self.rows, r)
        return (torch.bmm(b, a) * y[:, self.scale : self.scale + 1, None]).flatten(1)

    @property
    def below(self) -> slice:
        """Where the weight is."""
        return slice(self.weight, self.weight + self.rows * self.columns)


def adapters(layout: Layout) -> tuple[Adapter, ...]:
    """Those whose weight the server moves and whose factors are both trained."""
    found = []
    for scale in (s for s in layout if s.name.endswith(f".{SCALE}")):
        above = scale.name.removesuffix(f".base_layer.{SCALE}")
        weight = next(s for s in layout if s.name == f"{above}.base_layer.weight")
        a, b = (next((s for s in layout if s.name.startswith(f"{above}{f}")), None) for f in FACTORS)
        if a is not None and b is not None:
            found.append(
                Adapter(weight.offset, scale.offset, a.offset, b.offset, b.shape[0], b.shape[1], a.shape[1])
            )
    return tuple(found)


def how(layout: Layout, algorithm: Algorithm) -> str | None:
    """How adapters of low rank are averaged, as one sentence; None where there are none."""
    if isinstance(algorithm.gather, Products):
        return "the products BA are averaged exactly (FedEx-LoRA)"
    a, b = (any(factor in name for name in layout.names) for factor in FACTORS)
    if a and b:
        return "A and B are averaged apart, which is not the mean of their products (fb.exact_lora and fb.lora.freeze_a are)"
    return "A is frozen, so that the mean of B is that of the products (FFA-LoRA)" if b else None


@dataclass(frozen=True)
class Products(Gather):
    """The mean of adapters' factors, and below them W ← W + s(Σ p_i (B_i A_i − BA) − (B̄Ā − BA)).

    So W + sBA, which is what the model computes with, moves by the mean of what the clients moved it by.
    """

    mean: Mean = field(default_factory=Mean)

    def traits(self) -> GatherTraits:
        return GatherTraits(weights=self.mean.weights, requires_updates=True, check_layout=self.check_layout)

    @staticmethod
    def check_layout(layout: Layout) -> None:
        """Refuse a model whose base weights do not move."""
        if not adapters(layout):
            raise ConfigError(
                "exact_lora moves the weights below adapters, and the model has none that may move; prepare it with"
                " fb.lora.move_base(model), A and B both being trained"
            )

    def init(self, x: Tensor, layout: Layout) -> Tree:
        return tuple(tuple(one) for one in adapters(layout))

    def zero(self, x: Tensor) -> tuple[Sums, Tensor]:
        return self.mean.zero(x), x

    def add(self, acc: tuple[Sums, Tensor], up: Uploads, s: Tree, x: Tensor) -> tuple[Sums, Tensor]:
        delta = up.vectors["delta"].clone()
        before = up.sent["x"].expand(len(delta), -1)
        for one in (Adapter(*each) for each in s):
            delta[:, one.below] = one.product(before) - one.product(before - delta)  # −s (B_i A_i − BA)
        return self.mean.add(acc[0], up.having({**up.vectors, "delta": delta}), {}, x), x

    def close(self, acc: tuple[Sums, Tensor], s: Tree, ctx: ServerContext) -> tuple[Vectors, Tree, Metrics]:
        sums, x = acc
        u, _, metrics = self.mean.close(sums, {}, ctx)
        delta = u["delta"].clone()
        for one in (Adapter(*each) for each in s):
            apart = one.product((x - delta)[None]) - one.product(x[None])  # s (B̄Ā − BA)
            delta[one.below] += apart[0]
        return {**u, "delta": delta}, s, metrics


@dataclass(frozen=True, repr=False)
class Adapters(Wrapper):
    """What is trained alone: the weights that only the server moves are not sent up."""

    def encode(self, v: Tensor, layout: Layout, seed: int = 0) -> bytes:
        inner, at = _trained(layout)
        return self.codec.encode(v[at], inner, seed)

    def decode(self, data: bytes, layout: Layout) -> Tensor:
        inner, at = _trained(layout)
        whole = torch.zeros(layout.size)
        whole[at] = self.codec.decode(data, inner)
        return whole

    def roundtrip(self, v: Tensor, layout: Layout, seeds: Sequence[int]) -> tuple[Tensor, list[int]]:
        inner, at = _trained(layout)
        got, sizes = self.codec.roundtrip(v[:, at], inner, seeds)
        whole = torch.zeros_like(v)
        whole[:, at] = got.to(v.device)
        return whole, sizes

    def for_client(self, client: int) -> Codec:
        return Adapters(self.codec.for_client(client))

    def quantized(self, clients: NDArray[np.int64]) -> int:
        return self.codec.quantized(clients)

    def size(self, layout: Layout) -> int | None:
        return self.codec.size(_trained(layout)[0])


@lru_cache(maxsize=8)
def _trained(layout: Layout) -> tuple[Layout, Tensor]:
    """The layout without what only the server moves, and where its numbers are."""
    moved = {
        s.name.replace(SCALE, name)
        for s in layout
        if s.name.endswith(f".{SCALE}")
        for name in (SCALE, "weight")
    }
    kept = [s for s in layout if s.name not in moved]
    at = torch.cat([torch.arange(s.offset, s.end) for s in kept])
    return Layout.from_shapes([(s.name, s.shape, s.buffer, s.personal) for s in kept]), at


@builder
def exact_lora(a: Algorithm) -> Algorithm:
    """Any algorithm that averages, its adapters' products averaged exactly (FedEx-LoRA, Singhal et al. 2025).

    A ← Ā, B ← B̄;  W ← W + s (Σ_S p_i (B_i A_i − BA) − (B̄Ā − BA)), so that W + sBA moves by the mean

    The model is prepared with `fb.lora.move_base`. Uploads are as large as ever; what is sent down is larger by the
    weights below the adapters, which a client that was away could not rebuild from any one change.

    >>> import fedbraid as fb
    >>> fb.exact_lora(fb.fedprox(mu=0.1)).gather
    Products(mean=Mean(weights='samples', staleness=Staleness(kind='constant', a=0.5, b=4.0)))
    """
    who = a.name.split("(")[0] or "this algorithm"
    if not isinstance(a.gather, Mean) or not a.gather.traits().is_weighted_mean:
        raise ConfigError(
            f"{who} gathers by {type(a.gather).__name__}; exact_lora needs one that averages, such as fedavg"
        )
    if not _neutral(a.server) or a.uploads.keys() != {"delta"}:
        raise ConfigError(
            f"{who}'s server makes more of the mean than the next model, so that products would not be averaged; use"
            " exact_lora over fedavg() or fedprox(...)"
        )
    if a.up.codec.encodes_weights:
        raise ConfigError(f"{a.up.codec!r} encodes the whole model; use its inner codec with exact_lora")
    return replace(a, gather=Products(a.gather), up=a.up.over(Adapters(a.up.codec)), name="")


def _neutral(server: Transform) -> bool:
    """Whether the server's next model is the mean."""
    parts = server.transforms if isinstance(server, Pipeline) else (server,)
    return all(type(part) is Transform or part == Scale(1.0) for part in parts)
