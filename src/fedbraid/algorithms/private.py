"""Central differential privacy of clients (McMahan et al. 2018): clip what each uploads, noise the sum."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.algorithms._build import builder
from fedbraid.core import rng
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.codec import Codec
from fedbraid.core.declare import Upload
from fedbraid.core.gather import Beside, Gather, Info, Mean, Staleness, Sums, Tree, Uploads
from fedbraid.core.layout import Layout
from fedbraid.core.link import Plain, Sender, Sent, Up
from fedbraid.core.rule import Vectors
from fedbraid.core.transform import Transform
from fedbraid.errors import ConfigError

log = logging.getLogger("fedbraid")

T = TypeVar("T")


@dataclass(frozen=True)
class Clipped(Up):
    """A link whose every upload is clipped once it is decoded, so that client and server account for the same."""

    link: Up = field(default_factory=Plain)
    clip: float = 1.0

    def over(self, codec: Codec) -> Up:
        return replace(self, codec=codec, link=self.link.over(codec))

    def fits(self, declared: Mapping[str, Upload]) -> None:
        self.link.fits(declared)

    def remembers(self, declared: Mapping[str, Upload], layout: Layout) -> Vectors:
        return self.link.remembers(declared, layout)

    def quantised(self, clients: NDArray[np.int64]) -> int:
        return self.link.quantised(clients)

    def size(self, declared: Mapping[str, Upload], layout: Layout) -> int:
        return self.link.size(declared, layout)

    def send(self, vectors: Vectors, memory: Vectors, who: Sender) -> Sent:
        sent = self.link.send(vectors, memory, who)
        return replace(sent, received=self.clipped(sent.received, who.declared))

    def receive(self, frames: Mapping[str, bytes], who: Sender) -> Vectors:
        return self.clipped(self.link.receive(frames, who), who.declared)

    def clipped(self, vectors: Vectors, declared: Mapping[str, Upload]) -> Vectors:
        """All of a client's vectors, laid end to end and each divided by its scale, no longer than `clip`."""
        parts = [(v / _scale(declared[name])).double().norm(dim=1) for name, v in vectors.items()]
        norm = torch.stack(parts, 1).norm(dim=1, keepdim=True)
        shrink = (self.clip / norm.clamp_min(self.clip)).float()
        return {name: v * shrink.to(v) for name, v in vectors.items()}


def _scale(what: Upload) -> float:
    assert what.scale is not None  # private refuses uploads that nobody scaled
    return what.scale


@dataclass(frozen=True)
class Noised(Gather):
    """(Σ_S s(τ_i) v_i + N(0, (zC)²)) over the planned cohort, whoever came; a client counts once in a step.

    What server parts make of uploads is made of the noised mean. The run binds what only it knows; unbound, the noise
    is not a number, so that no step can go without it.
    """

    clip: float = 1.0
    noise: float | None = None  # z, where it was given
    epsilon: float | None = None
    delta: float = 1e-5
    staleness: Staleness = field(default_factory=Staleness)
    z: float = field(default=math.nan, repr=False, compare=False)
    planned: float = field(default=1.0, repr=False, compare=False)
    seed: int = field(default=0, repr=False, compare=False)
    uploads: Mapping[str, Upload] = field(default_factory=dict, repr=False, compare=False)
    server: Transform = field(default_factory=Transform, repr=False, compare=False)

    alone: ClassVar[bool] = True

    def cohort(self, came: int) -> float:
        return self.planned

    def zero(self, x: Tensor) -> tuple[Sums, frozenset[int]]:
        """The sums, and who is in them."""
        shapes = {name: torch.zeros_like(x[:1].expand(w)) for name, w in self._widths(len(x)).items()}
        return Sums(shapes, 0.0, 0), frozenset()

    def _widths(self, d: int) -> dict[str, int]:
        return {name: d if what.width is None else what.width for name, what in self.uploads.items()}

    def add(
        self, acc: tuple[Sums, frozenset[int]], up: Uploads, s: Tree, x: Tensor
    ) -> tuple[Sums, frozenset[int]]:
        sums, seen = acc
        again = torch.tensor([int(c) in seen for c in up.clients], device=x.device)[:, None]
        own = {name: torch.where(again, 0.0, up.vectors[name]) for name in self.uploads}
        sums = Mean("uniform", self.staleness).add(sums, up.having(own), s, x)
        return sums, seen | {int(c) for c in up.clients}

    def close(self, acc: tuple[Sums, frozenset[int]], s: Tree, info: Info) -> tuple[Vectors, Tree]:
        mean = {
            name: (total + self.z * self.clip * _scale(self.uploads[name]) * self._draw(name, total, info.t))
            / self.planned
            for name, total in acc[0].vectors.items()
        }
        return {**mean, **accounted(self.server, mean, self.uploads, info)}, s

    def _draw(self, name: str, like: Tensor, t: int) -> Tensor:
        return torch.from_numpy(rng.generator(self.seed, f"noise:{name}", t).standard_normal(len(like))).to(
            like
        )


def accounted(server: Transform, mean: Vectors, uploads: Mapping[str, Upload], info: Info) -> Vectors:
    """What server parts make of a mean, as if one client had sent it whose samples nobody knows."""
    one = torch.ones(1, 1, device=next(iter(mean.values())).device)
    declared = {**uploads, **{d.name: d for d in server.accounts()}}
    vectors = {name: v[None] for name, v in mean.items()}
    as_one = Uploads(
        np.zeros(1, np.int64), vectors, math.nan * one, math.nan * one, math.nan * one, 0 * one, info.lr * one.double(), {}, declared
    )  # fmt: skip
    return {name: v[0] for name, v in server.account(as_one).items()}


@builder
def private(
    a: Algorithm,
    clip: float = 1.0,
    noise: float | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
    where: str = "server",
) -> Algorithm:
    """Any algorithm with (ε, δ)-differential privacy of whole clients, against all who see what the server sends out.

    Every client's uploads are clipped to norm `clip`, and Gaussian noise of deviation noise·clip goes on their sum.
    Given `epsilon` alone, the noise is solved for the whole schedule before anything runs; given both, the run ends
    before the step that would spend more.
    """
    _check(clip, noise, epsilon, delta, where)
    who = a.name.split("(")[0] or "this algorithm"
    _check_uploads(who, a.uploads)
    _check_gather(who, a.gather)
    assert isinstance(a.gather, Mean)
    if a.gather.weights != "uniform":
        _say_once(
            "private: all clients count alike, because a weight by samples would tell of a client's data"
        )
    rule, server = _uniform(a.rule), _uniform(a.server)
    _check_accounts(who, server, a.uploads)
    gather = Noised(clip, noise, epsilon, delta, a.gather.staleness, uploads=a.uploads, server=server)
    return replace(a, rule=rule, gather=gather, server=server, up=Clipped(a.up.codec, a.up, clip), name="")


def _check(clip: float, noise: float | None, epsilon: float | None, delta: float, where: str) -> None:
    if where != "server":
        raise ConfigError(
            f"where={where!r} is not to be had: noise is added by the server; use where='server'"
        )
    if not clip > 0:
        raise ConfigError(f"clip={clip} lets nothing through; use clip > 0")
    if noise is None and epsilon is None:
        raise ConfigError("private needs noise= (its deviation in clips) or epsilon= (a budget); give one")
    if noise is not None and not noise >= 0:
        raise ConfigError(f"noise={noise} is no deviation; use noise >= 0")
    if epsilon is not None and not epsilon > 0:
        raise ConfigError(f"epsilon={epsilon} is a budget that no noise can keep; use epsilon > 0")
    if noise == 0 and epsilon is not None:
        raise ConfigError(
            f"noise=0 keeps no budget, and epsilon={epsilon} was given; use noise > 0 or leave it out"
        )
    if not 0 < delta < 1:
        raise ConfigError(f"delta={delta} is no small probability; use one below 1/clients, such as 1e-5")


def _check_uploads(who: str, uploads: Mapping[str, Upload]) -> None:
    for name, what in sorted(uploads.items(), key=lambda item: item[1].signed):
        if not what.signed and what.width is None:
            raise ConfigError(
                f"{who} uploads {name!r}, which is never negative and crosses links as its root, so that a clip does not"
                " bound its sum; use an algorithm that uploads updates alone, such as fedavg or fedadam"
            )
        if what.scale is None:
            raise ConfigError(
                f"{who} uploads {name!r}, whose scale nobody declared, so that no clip bounds it; declare"
                f" Upload({name!r}, scale=…) or use an algorithm that uploads updates alone, such as fedavg or feddyn"
            )


def _check_gather(who: str, gather: Gather) -> None:
    if isinstance(gather, Noised):
        raise ConfigError(f"{who} is private already; call private once")
    if isinstance(gather, Beside):
        raise ConfigError(
            f"{who}'s server remembers single clients' updates, which noise on a sum does not hide; use one whose clients"
            " remember, such as fedadavr(held='client')"
        )
    if type(gather) is not Mean:
        raise ConfigError(
            f"{who} gathers by {type(gather).__name__}, whose sensitivity is not known; use an algorithm that averages"
        )


def _check_accounts(who: str, server: Transform, uploads: Mapping[str, Upload]) -> None:
    """Refuse server parts that need more of each client than its place in a sum."""
    if not server.accounts():
        return
    layout = Layout.from_shapes([("w", (2, 1)), ("b", (2,))])
    info = Info(0, 1, 1, 1.0, 0.1, 1.0, 1.0, 0.0, layout, np.ones(1, np.int64))
    mean = {name: torch.ones(what.size(layout)) for name, what in uploads.items()}
    try:
        known = all(v.isfinite().all() for v in accounted(server, mean, uploads, info).values())
    except KeyError:
        known = False
    if not known:
        raise ConfigError(
            f"{who}'s server accounts for every single upload by what its client was sent or holds, which noise on a sum"
            " does not hide; use one that needs the mean alone, such as fedavg, feddyn or adabest"
        )


def _uniform(part: T) -> T:
    """A part, and those inside it, that counts every client alike."""
    new: Any = part
    names = {f.name for f in fields(new)}
    if "links" in names:
        new = replace(new, links=tuple(_uniform(link) for link in new.links))
    made: T = replace(new, weights="uniform") if getattr(new, "weights", None) == "samples" else new
    return made


@lru_cache
def _say_once(what: str) -> None:
    log.warning(what)
