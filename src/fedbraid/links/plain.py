"""The plain links: each upload and each broadcast through the codec, remembering nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core import rng
from fedbraid.core.codec import Codec
from fedbraid.core.context import Vectors
from fedbraid.core.layout import Layout
from fedbraid.core.link import (
    Broadcast,
    BroadcastContext,
    Downlink,
    ModelVersion,
    Sizes,
    Uplink,
    UploadContext,
    UploadResult,
    from_wire,
    to_wire,
)
from fedbraid.core.vector_spec import Upload
from fedbraid.links.identity import Identity
from fedbraid.links.message import add_overhead, as_tensor, bundle, message_overhead, unbundle
from fedbraid.links.wire import FRAME_BYTES, decode_scalars, encode_scalars


@dataclass(frozen=True)
class PlainUplink(Uplink):
    """Each upload through the codec, on its own; without one, as float32."""

    codec: Codec = field(default_factory=Identity)

    def codec_of(self, name: str) -> Codec:
        """The codec of an upload."""
        return self.codec if self.only is None or name in self.only else Identity()

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

    def size(self, declared: Mapping[str, Upload], layout: Layout) -> int:
        lengths = 0
        for name, what in declared.items():
            codec = self.codec_of(name)
            if what.width is not None:
                lengths += FRAME_BYTES + 4 * what.width
            else:
                lengths += codec.size(layout) or len(codec.encode(torch.zeros(layout.size), layout))
        return lengths + message_overhead(tuple(declared))


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


@dataclass(frozen=True)
class PlainDownlink(Downlink):
    """Each broadcast through the codec, on its own; without one, as float32."""

    codec: Codec = field(default_factory=Identity)

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
