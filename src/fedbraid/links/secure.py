"""The uplink of secure sums: every upload lies on one grid, so that a server can add what it cannot read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedbraid.core.codec import Codec
from fedbraid.core.context import Vectors
from fedbraid.core.layout import Layout
from fedbraid.core.link import Uplink, UploadContext, UploadResult
from fedbraid.core.vector_spec import Upload
from fedbraid.errors import ConfigError
from fedbraid.links.wrapped import WrappedUplink

Scales = tuple[tuple[str, float], ...]  # by name, of what is divided before it is put on the grid

FRACTION = 2.0**16  # numbers that are no vectors are whole multiples of 2⁻¹⁶
NUMBER_BITS = 48  # and lie within ±2³¹
USUAL_GROWTH = (
    10  # bits that a sum of 1,000 clients needs beyond their codes, where the cohort is not known yet
)


@dataclass(frozen=True)
class SecureUplink(WrappedUplink):
    """Another link over a shared grid, name by name in the declared `scales`.

    A simulation gets what each client sent, as the client knows it; the gather keeps sums of its codes alone. Bytes are
    counted by the gather, because a message is as long as the cohort is large.
    """

    scales: Scales = ()

    def over(self, codec: Codec, only: tuple[str, ...] | None = None) -> Uplink:
        raise ConfigError(
            f"{codec!r} cannot replace the grid of a secure sum; call secure last: secure(with_codecs(…, up=…))"
        )

    def size(self, declared: Mapping[str, Upload], layout: Layout) -> int:
        plain = super().size(declared, layout)
        return plain + USUAL_GROWTH * sum(d.size(layout) for d in declared.values()) // 8

    def send(self, vectors: Vectors, memory: Vectors, who: UploadContext) -> UploadResult:
        sent = self.link.send(self._scaled(vectors, who, -1), memory, who)
        return replace(sent, received=self._scaled(sent.received, who, 1), sizes={})

    def receive(self, frames: Mapping[str, bytes], who: UploadContext) -> Vectors:
        return self._scaled(self.link.receive(frames, who), who, 1)

    def rounding(self, declared: Mapping[str, Upload], layout: Layout) -> float:
        """The farthest that rounding moves what a client uploads, each name divided by its clip scale."""
        by, steps = dict(self.scales), [grid.step for grid in self.codec.grids()]
        moved = [
            max(steps) * by[name] * math.sqrt(layout.size)
            if what.width is None
            else math.sqrt(what.width) / FRACTION
            for name, what in declared.items()
        ]
        return math.hypot(*(move / (what.clip_scale or 1.0) for move, what in zip(moved, declared.values())))

    def _scaled(self, vectors: Vectors, who: UploadContext, power: int) -> Vectors:
        by = dict(self.scales)
        return {
            name: fixed(v) / FRACTION
            if who.declared[name].width is not None
            else _times(v, by[name] ** power)
            for name, v in vectors.items()
        }


def fixed(v: Tensor) -> Tensor:
    """Numbers in steps of 2⁻¹⁶, as whole float64 numbers."""
    most = 2.0 ** (NUMBER_BITS - 1)
    whole: Tensor = torch.round(v.double() * FRACTION).clamp(-most, most - 1)
    return whole


def _times(v: Tensor, factor: float) -> Tensor:
    return v if factor == 1 else v * factor
