"""Links that carry nothing, for local-only training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedbraid.core.context import Vectors
from fedbraid.core.layout import Layout
from fedbraid.core.link import Broadcast, BroadcastContext, UploadContext, UploadResult
from fedbraid.core.vector_spec import Upload
from fedbraid.links.plain import PlainDownlink, PlainUplink


@dataclass(frozen=True)
class NullUplink(PlainUplink):
    """Nothing is sent up."""

    def send(self, vectors: Vectors, memory: Vectors, who: UploadContext) -> UploadResult:
        sent = super().send(vectors, memory, who)
        return replace(sent, sizes={name: 0 * size for name, size in sent.sizes.items()})

    def size(self, declared: Mapping[str, Upload], layout: Layout) -> int:
        return 0


@dataclass(frozen=True)
class NullDownlink(PlainDownlink):
    """Nothing is sent down."""

    def send(self, vectors: Vectors, s: Any, who: BroadcastContext) -> Broadcast:
        cast = super().send(vectors, s, who)
        return replace(cast, version=replace(cast.version, sizes=dict.fromkeys(cast.version.sizes, 0)))
