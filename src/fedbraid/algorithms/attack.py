"""Hostile clients, to try what an algorithm bears.

What a hostile client does by itself (sign flip, scale, Gaussian noise, flipped labels) it does on its own side, before its
upload is encoded. Colluding ones (ALIE, Baruch et al. 2019; inner-product manipulation, Xie et al. 2019; mimic, Karimireddy
et al. 2022) see the honest uploads of their step, so their uploads are made where the cohort's come together, and cross the
codec there. What a hostile client remembers is of what it would have sent itself: it is its own affair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbraid.algorithms._build import builder
from fedbraid.core import rng
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import number
from fedbraid.core.context import ServerContext, Tree, Uploads, Vectors
from fedbraid.core.gather import Gather, Metrics
from fedbraid.core.layout import Layout
from fedbraid.core.link import Uplink, UploadContext, UploadResult
from fedbraid.core.rule import Rule, chain
from fedbraid.core.traits import GatherTraits, RuleTraits
from fedbraid.core.transform import Transform
from fedbraid.core.vector_spec import Upload
from fedbraid.errors import ConfigError, unknown
from fedbraid.links.plain import PlainUplink
from fedbraid.links.wrapped import WrappedUplink
from fedbraid.privacy.clipping import PrivateUplink


@dataclass(frozen=True)
class Hostile:
    """Which clients are hostile: these very ids, or a share of all, evenly spaced by id."""

    clients: tuple[int, ...] | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.clients is None) == (self.share is None):
            raise ConfigError(
                "attack needs clients= (ids) or share= (a fraction of all), one of the two; give one"
            )
        if self.share is not None:
            number("share", self.share, "[0, 1]", "is no fraction of the clients")
        if self.clients is not None and not all(isinstance(c, int) and c >= 0 for c in self.clients):
            raise ConfigError(f"attack got clients={list(self.clients)!r}; give client ids, such as [0, 3]")

    def __call__(self, clients: Any) -> Any:
        """Which of these are hostile, `[m]` of truth values."""
        if self.clients is not None:
            return np.isin(clients, self.clients)
        part = Fraction(self.share or 0).limit_denominator(1_000_000)
        return np.array([math.floor((int(c) + 1) * part) > math.floor(int(c) * part) for c in clients], bool)


def _aimed(declared: Mapping[str, Upload], vectors: Vectors) -> list[str]:
    """What hostile clients change: vectors as wide as the model that may be negative."""
    return [name for name in vectors if declared[name].width is None and declared[name].signed]


# Each by itself ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostileUplink(WrappedUplink):
    """Hostile clients upload −v, factor·v, or draws from N(0, σ²), in the place of v."""

    kind: str = "sign_flip"
    amount: float = 1.0
    hostile: Hostile = field(default_factory=lambda: Hostile(()))

    def send(self, vectors: Vectors, memory: Vectors, who: UploadContext) -> UploadResult:
        chosen = torch.from_numpy(self.hostile(who.clients)).to(who.x.device)[:, None]
        if bool(chosen.any()):
            made = {name: self._made(name, vectors[name], who) for name in _aimed(who.declared, vectors)}
            vectors = {**vectors, **{name: torch.where(chosen, v, vectors[name]) for name, v in made.items()}}
        return self.link.send(vectors, memory, who)

    def _made(self, name: str, v: Tensor, who: UploadContext) -> Tensor:
        if self.kind == "gaussian":
            drawn = rng.normal(who.seed, f"attack:{name}", v.shape[1], who.version, who.clients)
            return self.amount * torch.from_numpy(drawn).to(v)
        return self.amount * v


@dataclass(frozen=True)
class LabelFlip(Rule):
    """Hostile clients train on label C − 1 − y for y."""

    hostile: Hostile

    def traits(self) -> RuleTraits:
        return RuleTraits(flips_labels=self.hostile, defined_for_async=True)


# Together ---------------------------------------------------------------------------------------------


def _alie(honest: Tensor, z: float) -> Tensor:
    """mean − z·standard deviation, population form."""
    return honest.mean(0) - z * honest.std(0, correction=0)


def _ipm(honest: Tensor, eps: float) -> Tensor:
    """−ε·mean."""
    return -eps * honest.mean(0)


def _mimic(honest: Tensor, _: float) -> Tensor:
    """The upload of the honest client with the smallest number."""
    return honest[0]


COLLUDING: dict[str, Callable[[Tensor, float], Tensor]] = {"alie": _alie, "ipm": _ipm, "mimic": _mimic}


@dataclass(frozen=True)
class Colluding(Gather):
    """Hostile clients' uploads are made of the step's honest ones, as the server received those, before `inner` gathers them.

    They cross the clients' codec (without error feedback: the hostile client does not correct itself). A cohort without honest
    clients is left as it is. It holds the step's uploads until the step closes.
    """

    inner: Gather
    kind: str
    amount: float
    hostile: Hostile
    up: Uplink = field(default_factory=PlainUplink, repr=False, compare=False)
    uploads: Mapping[str, Upload] = field(default_factory=dict, repr=False, compare=False)
    server: Transform = field(default_factory=Transform, repr=False, compare=False)

    def traits(self) -> GatherTraits:
        return replace(self.inner.traits(), is_weighted_mean=False, needs_every_upload=True, memory=None)

    def init(self, x: Tensor, layout: Layout) -> Tree:
        return self.inner.init(x, layout)

    def zero(self, x: Tensor) -> Tree:
        return x, []

    def add(self, acc: Tree, up: Uploads, s: Tree, x: Tensor) -> Tree:
        acc[1].append(up)
        return acc

    def close(self, acc: Tree, s: Tree, ctx: ServerContext) -> tuple[Vectors, Tree, Metrics]:
        x, blocks = acc
        ids = np.concatenate([block.clients for block in blocks])
        chosen, order = self.hostile(ids), np.argsort(ids, kind="stable")
        honest = [int(at) for at in order if not chosen[at]]
        made: Vectors = {}
        if honest and chosen.any():
            for name in _aimed(self.uploads, {n: blocks[0].vectors[n] for n in self.uploads}):
                rows = [row for block in blocks for row in block.vectors[name]]
                made[name] = COLLUDING[self.kind](torch.stack([rows[at] for at in honest]), self.amount)
        gathered = self.inner.zero(x)
        for block in blocks:
            gathered = self.inner.add(gathered, self._with(block, made, ctx) if made else block, s, x)
        return self.inner.close(gathered, s, ctx)

    def _with(self, block: Uploads, made: Vectors, ctx: ServerContext) -> Uploads:
        """A block of which the hostile clients sent what was made."""
        vectors = dict(block.vectors)
        for i in np.flatnonzero(self.hostile(block.clients)).tolist():
            x, version = block.sent["x"], ctx.t - int(block.staleness[i])
            who = UploadContext(
                block.clients[i : i + 1],
                version,
                ctx.seed,
                x[min(i, len(x) - 1)][None],
                self.uploads,
                ctx.layout,
            )
            sent = PlainUplink(self.up.codec, only=self.up.only).send(
                {name: v[None] for name, v in made.items()}, {}, who
            )
            for name, v in sent.received.items():
                vectors[name] = torch.cat([vectors[name][:i], v, vectors[name][i + 1 :]])
        own = block.having({name: vectors[name] for name in self.uploads})
        return block.having({**vectors, **self.server.account(own)})

    def remove_client(self, s: Tree, client: int) -> Tree:
        return self.inner.remove_client(s, client)


# The builder ------------------------------------------------------------------------------------------

# By name: the option that it takes, its default, the interval that it lies in, what is wrong outside.
KINDS: dict[str, tuple[str, float, str, str]] = {
    "sign_flip": ("", -1.0, "", ""),
    "scale": ("factor", 10.0, "(-inf, inf)", "is no factor"),
    "gaussian": ("sigma", 1.0, "(0, inf)", "is no deviation"),
    "label_flip": ("", 0.0, "", ""),
    "alie": ("z", 1.5, "(-inf, inf)", "is no number of deviations"),
    "ipm": ("eps", 0.5, "(0, inf)", "manipulates nothing"),
    "mimic": ("", 0.0, "", ""),
}


@builder
def attack(
    a: Algorithm, kind: str, clients: Sequence[int] | None = None, share: float | None = None, factor: float | None = None,
    sigma: float | None = None, z: float | None = None, eps: float | None = None,
) -> Algorithm:  # fmt: skip
    """Any algorithm some of whose clients are hostile: those of these ids, or a share of all.

    of hostile i:  Δ_i ← −Δ_i, factor·Δ_i or N(0, σ²);  mean − z·deviation (ALIE), −ε·mean (IPM) or a copy of the honest ones

    `kind` is "sign_flip", "scale" (factor), "gaussian" (sigma), "label_flip", "alie" (z: the mean of the honest uploads less
    z standard deviations), "ipm" (eps: −ε times that mean) or "mimic" (a copy of one honest upload).

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20)
    >>> attacked = fb.attack(fb.fedavg(), "sign_flip", share=0.4)
    >>> work, schedule = fb.Work(lr=0.1, batch=10), fb.rounds(5, clients=20)
    >>> found = [fb.simulate(task, a, work, schedule).last("accuracy") for a in (fb.fedavg(), attacked)]
    >>> found[0] > found[1] + 0.1
    True
    """
    if kind not in KINDS:
        raise unknown("attack", kind, KINDS)
    option, amount, interval, why = KINDS[kind]
    for name, value in {"factor": factor, "sigma": sigma, "z": z, "eps": eps}.items():
        if value is not None and name != option:
            raise ConfigError(f"{kind} takes no {name}={value!r}; leave it out")
        if value is not None:
            number(name, value, interval, why)
            amount = float(value)
    hostile = Hostile(None if clients is None else tuple(clients), share)
    if kind == "label_flip":
        return replace(a, rule=chain(LabelFlip(hostile), a.rule), name="")
    if kind not in COLLUDING:
        if isinstance(a.up, PrivateUplink):
            raise ConfigError(
                f"{kind} changes uploads before they are clipped; use fb.private(fb.attack(…), …)"
            )
        return replace(a, up=HostileUplink(a.up.codec, a.up, kind, amount, hostile, only=a.up.only), name="")
    who = a.name.split("(")[0] or "this algorithm"
    if a.gather.traits().planned_cohort is not None or a.gather.traits().sums_only:
        raise ConfigError(
            f"{kind} sees single uploads where the cohort's come together, and {who} noises or sees their sum alone; use"
            " 'sign_flip', 'scale', 'gaussian' or 'label_flip'"
        )
    if {d.name for d in a.server.accounts()} & a.uploads.keys():
        raise ConfigError(
            f"{kind} sees uploads as they were received, and {who}'s server rescales them before they are gathered; use"
            " 'sign_flip', 'scale', 'gaussian' or 'label_flip'"
        )
    return replace(
        a, gather=Colluding(a.gather, kind, amount, hostile, a.up, dict(a.uploads), a.server), name=""
    )
