"""Uplinks of private algorithms: uploads are clipped once decoded, or clipped, and noised, before they leave."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedbraid.core import rng
from fedbraid.core.context import Vectors
from fedbraid.core.link import UploadContext, UploadResult
from fedbraid.core.vector_spec import Upload
from fedbraid.errors import ConfigError
from fedbraid.links.secure import Scales, SecureUplink
from fedbraid.links.wrapped import WrappedUplink


@dataclass(frozen=True)
class PrivateUplink(WrappedUplink):
    """A link whose uploads are clipped: all names of a client together, each divided by its scale."""

    clip: float = 1.0
    scales: Scales = ()


@dataclass(frozen=True)
class Clipped(PrivateUplink):
    """Every upload is clipped once it is decoded, so that client and server account for the same.

    Where the clip is `adaptive`, it is the one that the client was sent; `later` leaves it to the gather, after the
    server has rescaled what came.
    """

    adaptive: bool = False
    later: bool = False

    def send(self, vectors: Vectors, memory: Vectors, who: UploadContext) -> UploadResult:
        sent = self.link.send(vectors, memory, who)
        return replace(sent, received=self._clipped(sent.received, who))

    def receive(self, frames: Mapping[str, bytes], who: UploadContext) -> Vectors:
        return self._clipped(self.link.receive(frames, who), who)

    def _clipped(self, vectors: Vectors, who: UploadContext) -> Vectors:
        if self.later:
            return vectors
        bound = who.down["clip"] if self.adaptive else self.clip
        return clipped(vectors, bound, scaled(who.declared, self.scales))


@dataclass(frozen=True)
class ClippedBefore(Clipped):
    """Every upload is clipped before it is rounded, by so much more that what is sent is no longer than the clip."""

    link: SecureUplink = field(default_factory=SecureUplink)

    def send(self, vectors: Vectors, memory: Vectors, who: UploadContext) -> UploadResult:
        declared = scaled(who.declared, self.scales)
        moved = self.link.rounding(declared, who.layout)
        if moved >= self.clip:
            raise ConfigError(
                f"clip={self.clip} is no longer than rounding moves an upload of {who.layout.size} numbers, {moved:.3g}; use"
                " more bits or a smaller range under secure"
            )
        return self.link.send(clipped(vectors, self.clip - moved, declared), memory, who)

    def receive(self, frames: Mapping[str, bytes], who: UploadContext) -> Vectors:
        return self.link.receive(frames, who)


@dataclass(frozen=True)
class SkellamNoise(ClippedBefore):
    """Each client adds a share of the noise, in whole steps of the grid: the sum's has deviation zC (Agarwal et al. 2021).

    Unbound, z is not a number, so that nothing leaves without noise.
    """

    z: float = field(default=math.nan, repr=False, compare=False)
    planned: float = field(default=1.0, repr=False, compare=False)

    @property
    def grain(self) -> float:
        """The clip in steps of the grid."""
        (grid,), ((_, scale),) = self.link.codec.grids(), self.link.scales
        return float(self.clip / (grid.step * scale))

    def send(self, vectors: Vectors, memory: Vectors, who: UploadContext) -> UploadResult:
        sent = super().send(vectors, memory, who)
        (grid,), ((name, scale),) = self.link.codec.grids(), self.link.scales
        half = (
            (self.z * self.grain) ** 2 / self.planned / 2
        )  # Sk = Poisson − Poisson, of half the variance each
        q = grid.recover((sent.received[name] / scale).cpu().numpy())
        for row, client in zip(q, who.clients.tolist()):
            draw = rng.generator(who.seed, "skellam", who.version, client)
            row += draw.poisson(half, len(row)) - draw.poisson(half, len(row))
        noised = torch.from_numpy(grid.from_grid(q)).to(who.x) * scale
        return replace(sent, received={name: noised})


@dataclass(frozen=True)
class LocalNoise(PrivateUplink):
    """Every client clips what it uploads and adds N(0, (zC)²), before anything is encoded.

    The noise repeats with the seed in simulation; on real clients it is the operating system's. Unbound, z is not a
    number, so that nothing leaves without noise.
    """

    noise: float | None = None  # z, where it was given
    epsilon: float | None = None
    delta: float = 1e-5
    z: float = field(default=math.nan, repr=False, compare=False)

    def send(self, vectors: Vectors, memory: Vectors, who: UploadContext) -> UploadResult:
        declared = scaled(who.declared, self.scales)
        safe = clipped(vectors, self.clip, declared)
        noised = {
            name: v + self.z * self.clip * scale_of(declared[name]) * self._draw(name, v, who)
            for name, v in safe.items()
        }
        return self.link.send(noised, memory, who)

    def _draw(self, name: str, like: Tensor, who: UploadContext) -> Tensor:
        if who.frames is not None:
            return torch.from_numpy(rng.unpredictable(like.numel())).view(like.shape).to(like)
        drawn = rng.normal(who.seed, f"own:{name}", like.shape[1], who.version, who.clients)
        return torch.from_numpy(drawn).to(like)


def scaled(declared: Mapping[str, Upload], scales: Scales) -> dict[str, Upload]:
    """Declarations with these scales in place of theirs."""
    own = dict(scales)
    return {name: replace(what, clip_scale=own.get(name, what.clip_scale)) for name, what in declared.items()}


def scale_of(what: Upload) -> float:
    assert what.clip_scale is not None  # `private` refuses uploads that nobody scaled
    return what.clip_scale


def length(vectors: Vectors, declared: Mapping[str, Upload]) -> Tensor:
    """The norm of all that each client sent, laid end to end and each divided by its scale: float64 `[m, 1]`."""
    parts = [
        torch.linalg.vector_norm(v, dim=1, dtype=torch.float64) / scale_of(declared[name])
        for name, v in vectors.items()
    ]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(parts, 1), dim=1, keepdim=True)
    return norm


def clipped(vectors: Vectors, bound: float | Tensor, declared: Mapping[str, Upload]) -> Vectors:
    """What each client sent, scaled down to at most this length."""
    norm = length(vectors, declared)
    bound = torch.as_tensor(bound, dtype=norm.dtype, device=norm.device)
    shrink = bound / torch.maximum(norm, bound)
    if bool((shrink == 1).all()):
        return vectors
    return {name: v * shrink.to(v) for name, v in vectors.items()}
