"""A link around another one, which does as that one does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fedbraid.core.codec import Codec
from fedbraid.core.context import Vectors
from fedbraid.core.layout import Layout
from fedbraid.core.link import Uplink, UploadContext, UploadResult
from fedbraid.core.vector_spec import Upload
from fedbraid.links.identity import Identity
from fedbraid.links.plain import PlainUplink


@dataclass(frozen=True)
class WrappedUplink(Uplink):
    """A link around another one."""

    codec: Codec = field(default_factory=Identity)
    link: Uplink = field(default_factory=PlainUplink)

    def over(self, codec: Codec, only: tuple[str, ...] | None = None) -> Uplink:
        return replace(self, codec=codec, only=only or self.only, link=self.link.over(codec, only))

    def fits(self, declared: Mapping[str, Upload]) -> None:
        self.link.fits(declared)

    def init_client_state(self, declared: Mapping[str, Upload], layout: Layout) -> Vectors:
        return self.link.init_client_state(declared, layout)

    def quantized(self, clients: NDArray[np.int64]) -> int:
        return self.link.quantized(clients)

    def size(self, declared: Mapping[str, Upload], layout: Layout) -> int:
        return self.link.size(declared, layout)

    def send(self, vectors: Vectors, memory: Vectors, who: UploadContext) -> UploadResult:
        return self.link.send(vectors, memory, who)

    def receive(self, frames: Mapping[str, bytes], who: UploadContext) -> Vectors:
        return self.link.receive(frames, who)
