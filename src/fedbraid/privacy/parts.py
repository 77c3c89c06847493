"""The parts of private algorithms: a gather that noises a sum, a clip that is sent, a rule that hides single examples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core import rng
from fedbraid.core.context import ServerContext, Staleness, Tree, Uploads, Vectors
from fedbraid.core.gather import Gather, Mean, Metrics, Sums
from fedbraid.core.layout import Layout
from fedbraid.core.rule import Chain, Rule, chain
from fedbraid.core.traits import ExamplePrivacy, GatherTraits, RuleTraits
from fedbraid.core.transform import Transform
from fedbraid.core.vector_spec import Download, Upload
from fedbraid.privacy.clipping import clipped, length, scale_of

T = TypeVar("T")

START = 0.1  # an adaptive clip before the first step

MEDIAN, PACE = 0.5, 0.2  # γ, the share of norms below it, and how fast it moves there

JUST = 1 - 1e-5  # what is shorter than this share of the clip was not cut


@dataclass(frozen=True)
class Cohort:
    """Who came to a step, the sums of what they sent, and Σ(b_i − ½), b_i being 1 where nothing was cut off."""

    sums: Sums
    zeros: Vectors  # of every name, for a step that nobody came to
    seen: frozenset[int] = frozenset()
    below: float = 0.0


@dataclass(frozen=True)
class Noised(Gather):
    """(Σ_S s(τ_i) v_i + N(0, (zC)²)) over the planned cohort, whoever came; a client counts once in a step.

    An `adaptive` clip follows the median norm: C ← C·exp(−0.2(b̃ − ½)), b̃ the noised share of norms below it. What
    server parts make of uploads is made of the noised mean; where they rescale each (`later`), the clip comes after.
    The run binds what only it knows; unbound, the noise is not a number, so that no step can go without it.
    """

    clip: float = 1.0
    noise: float | None = None  # z, where it was given
    epsilon: float | None = None
    delta: float = 1e-5
    staleness: Staleness = field(default_factory=Staleness)
    adaptive: bool = False
    later: bool = False
    z: float = field(default=math.nan, repr=False, compare=False)
    planned: float = field(default=1.0, repr=False, compare=False)
    share: float = field(default=0.0, repr=False, compare=False)  # of all clients: who quantises uploads
    seed: int | None = field(default=None, repr=False, compare=False)  # None: the operating system's noise
    uploads: Mapping[str, Upload] = field(default_factory=dict, repr=False, compare=False)
    server: Transform = field(default_factory=Transform, repr=False, compare=False)
    sums: Mean = field(default_factory=lambda: Mean("uniform"), repr=False, kw_only=True)
    by_clients: bool = field(default=False, repr=False, kw_only=True)  # the sum holds its noise already

    def traits(self) -> GatherTraits:
        return GatherTraits(
            sums_only=self.sums.traits().sums_only,
            steps_when_empty=True,
            planned_cohort=self.planned,
            quantized_fraction=self.share,
            defined_for_async=True,
        )

    def init(self, x: Tensor, layout: Layout) -> Tree:
        return {"clip": torch.full((1,), self.clip, device=x.device)} if self.adaptive else {}

    def zero(self, x: Tensor) -> Cohort:
        zeros = {
            name: torch.zeros_like(x[:1].expand(what.width or len(x))) for name, what in self.uploads.items()
        }
        return Cohort(self.sums.zero(x), zeros)

    def holding(self, sums: Sums, clients: NDArray[np.int64], x: Tensor) -> Cohort:
        """The accumulator of clients whose sums others made."""
        return replace(self.zero(x), sums=sums, seen=frozenset(clients.tolist()))

    def add(self, acc: Cohort, up: Uploads, s: Tree, x: Tensor) -> Cohort:
        own, below = {name: up.vectors[name] for name in self.uploads}, acc.below
        first = [int(c) not in acc.seen for c in up.clients]
        if self.adaptive:
            cut = length(own, self.uploads) > JUST * up.sent["clip"]
            below += sum(0.5 - c for c, counts in zip(cut.squeeze(1).tolist(), first) if counts)
        if self.adaptive or self.later:  # a late client was sent another clip
            own = clipped(own, s["clip"] if self.adaptive else self.clip, self.uploads)
        if not all(first):
            counts = torch.tensor(first, device=x.device)[:, None]
            own = {name: torch.where(counts, v, 0.0) for name, v in own.items()}
        sums = self.sums.add(acc.sums, up.having(own), s, x)
        return Cohort(sums, acc.zeros, acc.seen | {int(c) for c in up.clients}, below)

    def close(self, acc: Cohort, s: Tree, ctx: ServerContext) -> tuple[Vectors, Tree, Metrics]:
        clip = s["clip"] if self.adaptive else self.clip
        totals, metrics = self.sums.totals(acc.sums, ctx)
        mean = {
            name: (total + self.z_sum * clip * scale_of(self.uploads[name]) * self._draw(name, total, ctx.t))
            / self.planned
            for name, total in {**acc.zeros, **totals}.items()
        }
        u = mean if self.later else {**mean, **accounted(self.server, mean, self.uploads, ctx)}
        if not self.adaptive:
            return u, s, metrics
        below = self.z_below * float(self._draw("below", torch.zeros(1), ctx.t))
        share = 0.5 + (acc.below + below) / self.planned
        new = s["clip"] * math.exp(-PACE * (share - MEDIAN))
        return {**u, "clip": new}, {"clip": new}, {**metrics, "clip": float(new)}

    @property
    def z_below(self) -> float:
        """σ_b: the deviation of the noise on the count of norms below the clip."""
        return self.planned / 20

    @property
    def z_sum(self) -> float:
        """z_Δ: what z leaves for the sum once the count has had its part."""
        if self.by_clients:
            return 0 * self.z
        if not self.adaptive or not self.z > 0:
            return self.z
        return 1 / math.sqrt(self.z**-2 - (2 * self.z_below) ** -2)

    def _draw(self, name: str, like: Tensor, t: int) -> Tensor:
        if self.seed is None:
            return torch.from_numpy(rng.unpredictable(len(like))).to(like)
        return torch.from_numpy(rng.normal(self.seed, f"noise:{name}", len(like), t)[0]).to(like)


@dataclass(frozen=True)
class SentClip(Transform):
    """The clip that the next clients are to use, sent with the model."""

    start: float = START

    def init(self, x: Tensor, layout: Layout) -> Vectors:
        return {"clip": torch.full((1,), self.start, device=x.device)}

    def sends(self) -> tuple[Download, ...]:
        return (Download("clip", width=1, signed=False),)

    def send(self, s: Vectors, x: Tensor, N: int) -> Vectors:
        return s

    def update(self, u: Vectors, s: Vectors, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Vectors]:
        return u, {"clip": u["clip"]}


def accounted(
    server: Transform, mean: Vectors, uploads: Mapping[str, Upload], ctx: ServerContext, n: float = math.nan
) -> Vectors:
    """What server parts make of a mean, as if one client had sent it; of nan samples where nobody knows how many."""
    if not server.accounts():
        return {}
    one = torch.ones(1, 1, device=next(iter(mean.values())).device)
    declared = {**uploads, **{d.name: d for d in server.accounts()}}
    vectors = {name: v[None] for name, v in mean.items()}
    as_one = Uploads(
        np.zeros(1, np.int64), vectors, n * one, ctx.K * one, ctx.a * one, 0 * one, ctx.lr * one.double(), ctx.sent,
        declared,
    )  # fmt: skip
    return {name: v[0] for name, v in server.account(as_one).items()}


def of_mean(server: Transform, uploads: Mapping[str, Upload], with_sent: bool) -> bool:
    """Whether what server parts make of uploads can be made of their mean, and of what one version was sent."""
    if not server.accounts():
        return True
    layout = Layout.from_shapes([("w", (2, 1)), ("b", (2,))])
    x = torch.zeros(4)
    sent = {"x": x[None], **{k: v[None] for k, v in server.send(server.init(x, layout), x, 2).items()}}
    ctx = ServerContext(
        0, 1, 1, 1.0, 0.1, 1.0, 1.0, 0.0, layout, np.ones(1, np.int64), sent=sent if with_sent else {}
    )
    mean = {name: torch.ones(what.size(layout)) for name, what in uploads.items()}
    try:
        return all(bool(v.isfinite().all()) for v in accounted(server, mean, uploads, ctx).values())
    except KeyError:
        return False


def uniform(part: T) -> T:
    """A part, and those inside it, that counts every client alike."""
    new: Any = part
    names = {f.name for f in fields(new)}
    for several in names & {"rules", "transforms"}:
        new = replace(new, **{several: tuple(uniform(one) for one in getattr(new, several))})
    made: T = replace(new, weights="uniform") if getattr(new, "weights", None) == "samples" else new
    return made


@dataclass(frozen=True)
class HiddenExamples(Rule):
    """Every local gradient is (Σ_i min(1, C/‖g_i‖) g_i + N(0, (zC)²)) over the planned batch, its examples drawn by chance.

    The run binds z; unbound it is not a number, so that no step can go without noise.
    """

    clip: float = 1.0
    noise: float | None = None  # z, where it was given
    epsilon: float | None = None
    delta: float = 1e-5
    z: float = field(default=math.nan, repr=False, compare=False)

    def traits(self) -> RuleTraits:
        return RuleTraits(example_privacy=ExamplePrivacy(self.clip, self.z), defined_for_async=True)


def hiding(rule: Rule) -> HiddenExamples | None:
    """The rule that hides single examples, where there is one."""
    rules = rule.rules if isinstance(rule, Chain) else (rule,)
    return next((r for r in rules if isinstance(r, HiddenExamples)), None)


def with_noise(rule: Rule, z: float) -> Rule:
    """A rule that hides single examples with this noise."""
    rules = rule.rules if isinstance(rule, Chain) else (rule,)
    return chain(*(replace(r, z=z) if isinstance(r, HiddenExamples) else r for r in rules))
