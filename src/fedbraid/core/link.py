"""Links: what a client's upload and a server's broadcast look like when they come out at the other end.

An up link and a down link are objects; nobody asks which one it is. Here are their interfaces and the plain ones,
a codec each way. Names as wide as the model go through the codec, numbers go as they are, and bytes are the
message's length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core import rng
from fedbraid.core.codec import Codec
from fedbraid.core.context import Vectors
from fedbraid.core.identity import Identity
from fedbraid.core.layout import Layout
from fedbraid.core.vector_spec import Download, Upload, VectorSpec
from fedbraid.core.wire import FRAME_BYTES, decode_scalars, encode_scalars, pack_message, unpack_message
from fedbraid.errors import ConfigError, WireError

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

    codec: Codec = field(default_factory=Identity)
    only: tuple[str, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_codec(type(self).__name__, self.codec)

    def over(self, codec: Codec, only: tuple[str, ...] | None = None) -> Uplink:
        """The same link over another codec, of these names."""
        return replace(self, codec=codec, only=only or self.only)

    def codec_of(self, name: str) -> Codec:
        """The codec of an upload."""
        return self.codec if self.only is None or name in self.only else Identity()

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
        lengths = 0
        for name, what in declared.items():
            codec = self.codec_of(name)
            if what.width is not None:
                lengths += FRAME_BYTES + 4 * what.width
            else:
                lengths += codec.size(layout) or len(codec.encode(torch.zeros(layout.size), layout))
        return lengths + message_overhead(tuple(declared))


@dataclass(frozen=True)
class PlainUplink(Uplink):
    """Each upload through the codec, on its own."""

    def send(self, vectors: Vectors, memory: Vectors, who: UploadContext) -> UploadResult:
        done = UploadResult({}, {}, {})
        for name, v in vectors.items():
            what = who.declared[name]
            if what.width is not None:
                done.received[name], done.sizes[name] = v, np.full(len(v), FRAME_BYTES + 4 * v.shape[1])
                if who.frames is not None:
                    who.frames[name] = encode_scalars(v)
                continue
            codec = self.codec_of(name)
            given = self.prepare(name, to_wire(v, what, codec, who.x), memory)
            got, done.sizes[name] = _encode_up(codec, given, name, who)
            done.memory |= self.keep(name, given, got)
            done.received[name] = from_wire(got, what, codec, who.x)
        add_overhead(done.sizes)
        return done

    def prepare(self, name: str, v: Tensor, memory: Vectors) -> Tensor:
        """What is encoded."""
        return v

    def keep(self, name: str, given: Tensor, got: Tensor) -> Vectors:
        """What a client remembers of this crossing."""
        return {}

    def receive(self, frames: Mapping[str, bytes], who: UploadContext) -> Vectors:
        received: Vectors = {}
        for name, what in who.declared.items():
            if what.width is not None:
                received[name] = decode_scalars(frames[name], what.width)[None].to(who.x.device)
            else:
                codec = self.codec_of(name)
                sent = codec.for_client(int(who.clients[0])).decode(frames[name], who.layout)
                received[name] = from_wire(sent[None].to(who.x.device), what, codec, who.x)
        return received


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


def _encode_up(codec: Codec, v: Tensor, name: str, who: UploadContext) -> tuple[Tensor, NDArray[np.int64]]:
    """A block through each client's own codec."""
    layout = who.layout
    if codec.lossless and who.frames is None:
        return v, np.full(len(v), codec.size(layout))
    seeds = (rng.bits(who.seed, f"up:{name}", who.version, who.clients) >> np.uint64(1)).tolist()
    own = [codec.for_client(int(c)) for c in who.clients]
    if who.frames is not None:
        who.frames[name] = frame = own[0].encode(v[0], layout, seeds[0])
        return own[0].decode(frame, layout)[None].to(v.device), np.array([len(frame)])
    if len(set(own)) == 1:
        out, lengths = own[0].roundtrip(v, layout, seeds)
        return out.to(v.device), np.array(lengths, np.int64)
    out, sizes = torch.empty_like(v), np.zeros(len(v), np.int64)
    for one in dict.fromkeys(own):
        mine = [i for i, c in enumerate(own) if c == one]
        got, lengths = one.roundtrip(v[mine], layout, [seeds[i] for i in mine])
        out[mine], sizes[mine] = got.to(v.device), lengths
    return out, sizes


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

    codec: Codec = field(default_factory=Identity)

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


@dataclass(frozen=True)
class PlainDownlink(Downlink):
    """Each broadcast through the codec, on its own."""

    def open(self, vectors: Vectors, who: BroadcastContext) -> Broadcast:
        return self.send(vectors, None, who)

    def send(self, vectors: Vectors, s: Any, who: BroadcastContext) -> Broadcast:
        cast = {name: encode_down(self.codec, v, name, who) for name, v in vectors.items()}
        sizes = {name: c.size for name, c in cast.items()}
        add_overhead(sizes)
        frames = {name: c.frame for name, c in cast.items() if c.frame is not None}
        message = as_tensor(bundle(frames)) if who.real else None
        return Broadcast(ModelVersion({name: c.means for name, c in cast.items()}, sizes, message=message), s)

    def message_bytes(
        self, versions: Mapping[int, ModelVersion], fetched: NDArray[np.int64], memory: Vectors
    ) -> tuple[Sizes, Vectors]:
        if (fetched == fetched[0]).all():  # as in rounds
            one = versions[int(fetched[0])].sizes
            return {name: np.full(len(fetched), size, np.int64) for name, size in one.items()}, {}
        each = [versions[v].sizes for v in fetched.tolist()]
        return {name: np.array([sizes[name] for sizes in each], np.int64) for name in each[0]}, {}

    def build_message(
        self, newest: ModelVersion, s: Any, held: int, who: BroadcastContext
    ) -> tuple[int, bytes]:
        assert newest.message is not None
        return -1, newest.message.numpy().tobytes()

    def receive(self, message: bytes, base: int, held: Vectors, who: BroadcastContext) -> Vectors:
        return open_frames(message, self.codec, who)


@dataclass(frozen=True)
class EncodedVector:
    """One vector of a broadcast."""

    given: Tensor  # what the codec was given
    decoded: Tensor  # what it made of it
    held: Tensor  # what clients hold then
    means: Tensor  # what that stands for
    size: int
    frame: bytes | None


def encode_down(
    codec: Codec, v: Tensor, name: str, who: BroadcastContext, base: Tensor | None = None
) -> EncodedVector:
    """A vector through a broadcast's codec; with a `base`, which clients hold already, only the change is sent."""
    what, layout = who.declared[name], who.layout
    if what.width is not None:
        return EncodedVector(
            v, v, v, v, FRAME_BYTES + 4 * what.width, encode_scalars(v) if who.real else None
        )
    if codec.lossless:
        frame = codec.encode(v, layout, 0) if who.real else None
        return EncodedVector(v, v, v, v, codec.size(layout) or 0, frame)
    given = to_wire(v, what, codec)
    given = given if base is None else given - base
    seed = rng.key(who.seed, f"down:{name}", who.version)
    if who.real:
        frame = codec.encode(given, layout, seed)
        decoded, size = codec.decode(frame, layout).to(v.device), len(frame)
    else:
        block, lengths = codec.roundtrip(given[None], layout, [seed])
        frame, decoded, size = None, block[0].to(v.device), lengths[0]
    held = decoded if base is None else base + decoded
    return EncodedVector(given, decoded, held, from_wire(held, what, codec), size, frame)


def open_frames(message: bytes, codec: Codec, who: BroadcastContext) -> Vectors:
    """What is in the frames of a broadcast, as the codec decodes it."""
    got: Vectors = {}
    for name, frame in unbundle(message, who.declared, who.layout).items():
        width = who.declared[name].width
        got[name] = codec.decode(frame, who.layout) if width is None else decode_scalars(frame, width)
    return got


# Messages -------------------------------------------------------------------------------------------


def bundle(frames: Mapping[str, bytes]) -> bytes:
    """Named frames as one message; a lone one is the message, its name being known to both sides."""
    return next(iter(frames.values())) if len(frames) == 1 else pack_message(frames)


def unbundle(message: bytes, names: Iterable[str], layout: Layout) -> dict[str, bytes]:
    """The frames of a message that must carry just these names."""
    names = list(names)
    limit = len(names) * (FRAME_BYTES + 8 * layout.size + 128)  # no codec doubles a vector
    if len(names) == 1:
        if len(message) > limit:
            raise WireError(f"message of {len(message)} bytes is longer than the {limit} this receiver takes")
        return {names[0]: message}
    frames = unpack_message(message, limit)
    if list(frames) != names:
        raise WireError(f"message carries {list(frames)}, not {names}; run the same algorithm on both sides")
    return frames


def as_message(vectors: Vectors, layout: Layout) -> bytes:
    """Vectors as wide as the model, or of a few numbers, as one message that loses nothing."""
    plain = {name: v.reshape(-1) for name, v in vectors.items()}
    return bundle(
        {
            name: Identity().encode(v, layout, 0) if len(v) == layout.size else encode_scalars(v)
            for name, v in plain.items()
        }
    )


def from_message(message: bytes, widths: Mapping[str, int], layout: Layout) -> Vectors:
    """The vectors of such a message, which must be of these names and widths."""
    frames = unbundle(message, widths, layout)
    return {
        name: Identity().decode(frames[name], layout) if w == layout.size else decode_scalars(frames[name], w)
        for name, w in widths.items()
    }


def add_overhead(sizes: dict[str, Any]) -> None:
    """Charge what it takes to put several names into one message to the first."""
    if extra := message_overhead(tuple(sizes)):
        first = next(iter(sizes))
        sizes[first] = sizes[first] + extra


@lru_cache
def message_overhead(names: tuple[str, ...]) -> int:
    """What it takes to put named frames into one message; a lone frame is the message."""
    return 0 if len(names) == 1 else len(pack_message(dict.fromkeys(names, b"")))


def as_tensor(message: bytes) -> Tensor:
    """A message as it is kept in a state."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def check_codec(link: str, codec: Any) -> None:
    """Refuse a link over something that is no codec."""
    if not isinstance(codec, Codec):
        raise ConfigError(f"{link}({codec!r}) needs a codec; give one such as fb.codecs.int8()")
