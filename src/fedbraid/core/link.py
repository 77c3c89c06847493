"""Links: what a client's upload and a server's broadcast look like when they come out at the other end.

An uplink and a downlink are objects; nobody asks which one it is. Here are their interfaces and records; the links
themselves are in `links/`, the plain ones in `links/plain.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.codec import Codec
from fedbraid.core.context import Vectors
from fedbraid.core.layout import Layout
from fedbraid.core.vector_spec import Download, Upload, VectorSpec
from fedbraid.errors import ConfigError

Sizes = dict[str, NDArray[np.int64]]  # bytes by name, one number a client


# Up -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UploadContext:
    """Who uploads what: the block's clients, the version and model they trained from, the declared names.

    Where a lone client's frames really travel, they are put into `frames`.
    """

    clients: NDArray[np.int64]
    version: int
    seed: int
    x: Tensor  # [1, d]
    declared: Mapping[str, Upload]
    layout: Layout
    frames: dict[str, bytes] | None = None
    down: Vectors = field(default_factory=dict)  # [1, ·] each, what else they were sent


@dataclass
class UploadResult:
    """What came of an upload: what the server decodes, what the link makes the clients remember, bytes by name."""

    received: Vectors
    memory: Vectors
    sizes: Sizes


@dataclass(frozen=True)
class Uplink:
    """What carries uploads; `codec` does the encoding, of the names in `only` where it is given."""

    codec: Codec
    only: tuple[str, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_codec(type(self).__name__, self.codec)

    def over(self, codec: Codec, only: tuple[str, ...] | None = None) -> Uplink:
        """The same link over another codec, of these names."""
        return replace(self, codec=codec, only=only or self.only)

    def fits(self, declared: Mapping[str, Upload]) -> None:
        """Refuse uploads that this link cannot carry."""
        if unused := sorted(set(self.only or ()) - {name for name, d in declared.items() if d.width is None}):
            vectors = sorted(name for name, d in declared.items() if d.width is None)
            raise ConfigError(
                f"only={self.only} names {unused}, which clients do not upload; use some of {vectors}"
            )
        if self.codec.encodes_weights and not any(d.is_model_update for d in declared.values()):
            raise ConfigError(
                f"{self.codec!r} encodes the model that a client ends with, but this algorithm uploads"
                f" {sorted(declared)} and no update; use the inner codec"
            )

    def init_client_state(self, declared: Mapping[str, Upload], layout: Layout) -> Vectors:
        """What it makes a client remember before its first upload."""
        return {}

    def quantized(self, clients: NDArray[np.int64]) -> int:
        """How many of these clients' uploads lose precision."""
        return self.codec.quantized(clients)

    def send(self, vectors: Vectors, memory: Vectors, who: UploadContext) -> UploadResult:
        """A block's uploads, as the server will decode them."""
        raise NotImplementedError

    def receive(self, frames: Mapping[str, bytes], who: UploadContext) -> Vectors:
        """The vectors `[1, ·]` of one client's frames; WireError says why they are refused."""
        raise NotImplementedError

    def size(self, declared: Mapping[str, Upload], layout: Layout) -> int:
        """The length of a message, exactly where it does not depend on the values."""
        raise NotImplementedError


# Down -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BroadcastContext:
    """What is broadcast when: the declared names, the version that it makes, whether real messages are wanted."""

    declared: Mapping[str, Download]
    version: int
    seed: int
    layout: Layout
    real: bool = False


@dataclass(frozen=True)
class ModelVersion:
    """What clients hold of one version, and what it costs them to get it."""

    vectors: Vectors
    sizes: dict[str, int]  # bytes of its message by name
    upto: int = 0  # bytes of all broadcasts up to it
    whole: int = 0  # bytes for a client that holds nothing
    message: Tensor | None = None  # its bytes, where real clients are sent it


@dataclass
class Broadcast:
    """What came of a broadcast."""

    version: ModelVersion
    state: Any
    notes: dict[str, float] = field(default_factory=dict)  # for the record


@dataclass(frozen=True)
class Downlink:
    """What carries broadcasts; `codec` does the encoding."""

    codec: Codec

    def __post_init__(self) -> None:
        check_codec(type(self).__name__, self.codec)
        if self.codec.encodes_weights:
            raise ConfigError(
                f"down={self.codec!r} is for uploads; the model itself is sent down, so use its inner codec"
            )
        if not self.codec.shared:
            raise ConfigError(
                f"down={self.codec!r} has clients of several kinds, but a broadcast is one message; use its inner codec"
            )

    def over(self, codec: Codec) -> Downlink:
        """The same link over another codec."""
        return replace(self, codec=codec)

    def init_client_state(self) -> Vectors:
        """What it makes a client remember, besides what it holds."""
        return {}

    def open(self, vectors: Vectors, who: BroadcastContext) -> Broadcast:
        """The first version, which everybody starts from."""
        raise NotImplementedError

    def send(self, vectors: Vectors, s: Any, who: BroadcastContext) -> Broadcast:
        """The next version."""
        raise NotImplementedError

    def message_bytes(
        self, versions: Mapping[int, ModelVersion], fetched: NDArray[np.int64], memory: Vectors
    ) -> tuple[Sizes, Vectors]:
        """(bytes by name, what the clients then remember) of clients that fetched these of the versions."""
        raise NotImplementedError

    def build_message(
        self, newest: ModelVersion, s: Any, held: int, who: BroadcastContext
    ) -> tuple[int, bytes]:
        """(the version that it builds on or −1, the message) for a real client that holds version `held` or −1."""
        raise NotImplementedError

    def receive(self, message: bytes, base: int, held: Vectors, who: BroadcastContext) -> Vectors:
        """What a real client holds after an order that builds on version `base`, as the codec left it."""
        raise NotImplementedError

    def decode_held(self, held: Vectors, who: BroadcastContext) -> Vectors:
        """What a client trains with that holds this."""
        return {name: from_wire(v, who.declared[name], self.codec) for name, v in held.items()}

    @property
    def needs_previous(self) -> bool:
        """Whether a client must keep what it holds, because the next message builds on it."""
        return False


# Between vectors and codecs ---------------------------------------------------------------------------


def to_wire(v: Tensor, what: VectorSpec, codec: Codec, x: Tensor | None = None) -> Tensor:
    """What a codec is given: the weights in place of the update where it asks for them, roots of what is unsigned."""
    if codec.encodes_weights and isinstance(what, Upload) and what.is_model_update and x is not None:
        return x - v
    return v if what.signed or codec.lossless else v.clamp_min(0).sqrt()


def from_wire(got: Tensor, what: VectorSpec, codec: Codec, x: Tensor | None = None) -> Tensor:
    """What was meant by what a codec decoded."""
    if codec.encodes_weights and isinstance(what, Upload) and what.is_model_update and x is not None:
        return x - got
    return got if what.signed or codec.lossless else got.square()


def check_codec(link: str, codec: Any) -> None:
    """Refuse a link over something that is no codec."""
    if not isinstance(codec, Codec):
        raise ConfigError(f"{link}({codec!r}) needs a codec; give one such as fb.codecs.int8()")
