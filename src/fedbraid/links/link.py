"""The two links: what a client's upload and a server's broadcast look like when they come out at the other end.

`up` is a codec or `ErrorFeedback(codec)`, `down` a codec (direct quantisation) or `HiddenState(codec)`.
Names as wide as the model go through the codec; numbers go as they are. Bytes are the message's length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core import rng
from fedbraid.core.gather import Tree
from fedbraid.core.layout import Layout
from fedbraid.core.rule import Vectors
from fedbraid.errors import Diverged, WireError
from fedbraid.links.codec import (
    FRAME_BYTES,
    Codec,
    decode_scalars,
    encode_scalars,
    pack_message,
    unpack_message,
)
from fedbraid.links.identity import Identity

Sizes = dict[str, NDArray[np.int64]]

PATIENCE = 10  # steps that a hidden state may stretch its error before the run is stopped


@dataclass(frozen=True)
class ErrorFeedback:
    """Fed-EF: send Q(u + e), keep e ← u + e − Q(u + e) for the next time."""

    codec: Codec


@dataclass(frozen=True)
class HiddenState:
    """QAFeL: server and clients share x̂; broadcast q = Q(x − x̂), and both do x̂ ← x̂ + q."""

    codec: Codec


Up = Codec | ErrorFeedback
Down = Codec | HiddenState


def codec_of(link: Up | Down) -> Codec:
    """The codec of a link, whatever wraps it."""
    return link if isinstance(link, Codec) else link.codec


def residuals(up: Up, names: dict[str, int], layout: Layout) -> Vectors:
    """What the up link makes a client remember: one residual for each name that is encoded."""
    if not isinstance(up, ErrorFeedback):
        return {}
    return {f"residual:{name}": torch.zeros(width) for name, width in names.items() if width == layout.size}


@dataclass(frozen=True)
class Sender:
    """Who uploads: the block's clients and the version that they trained from.

    Where a lone client's frames really travel, they are put into `frames`.
    """

    clients: NDArray[np.int64]
    version: int
    seed: int
    frames: dict[str, bytes] | None = None


def upload(
    up: Up, vectors: Vectors, x: Tensor, memory: Vectors, who: Sender, layout: Layout
) -> tuple[Vectors, Vectors, Sizes]:
    """(what the server decodes, the new residuals, bytes by name) for a block of clients."""
    received: Vectors = {}
    kept: Vectors = {}
    sizes: Sizes = {}
    for name, v in vectors.items():
        if v.shape[1] != layout.size:
            received[name], sizes[name] = v, np.full(len(v), FRAME_BYTES + 4 * v.shape[1])
            if who.frames is not None:
                who.frames[name] = encode_scalars(v)
            continue
        codec = codec_of(up)
        shifted = codec.weights and name == "delta"
        sent = x - v if shifted else v
        if isinstance(up, ErrorFeedback):
            sent = sent + memory[f"residual:{name}"]
        got, sizes[name] = _cross(codec, sent, name, who, layout)
        if isinstance(up, ErrorFeedback):
            kept[f"residual:{name}"] = sent - got
        received[name] = x - got if shifted else got
    _add_overhead(sizes)
    return received, kept, sizes


def _cross(
    codec: Codec, v: Tensor, name: str, who: Sender, layout: Layout
) -> tuple[Tensor, NDArray[np.int64]]:
    """A block through each client's own codec."""
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


def _add_overhead(sizes: Sizes) -> None:
    """Charge what it takes to put several names into one message to the first."""
    if extra := message_overhead(tuple(sizes)):
        first = next(iter(sizes))
        sizes[first] = sizes[first] + extra


def receive(
    up: Up, message: bytes, client: int, x: Tensor, widths: dict[str, int], layout: Layout
) -> tuple[Vectors, Sizes]:
    """(vectors `[1, ·]`, bytes by name) of one client's message; WireError says why one is refused."""
    codec = codec_of(up)
    frames = unbundle(message, widths, layout)
    received: Vectors = {}
    for name, width in widths.items():
        if width != layout.size:
            received[name] = decode_scalars(frames[name], width)[None]
            continue
        got = codec.for_client(client).decode(frames[name], layout)[None].to(x.device)
        received[name] = x - got if codec.weights and name == "delta" else got
    sizes = {name: np.array([len(frame)]) for name, frame in frames.items()}
    _add_overhead(sizes)
    return received, sizes


def bundle(frames: dict[str, bytes]) -> bytes:
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


@lru_cache
def message_overhead(names: tuple[str, ...]) -> int:
    """What it takes to put named frames into one message; a lone frame is the message."""
    return 0 if len(names) == 1 else len(pack_message(dict.fromkeys(names, b"")))


# Down -------------------------------------------------------------------------------------------------


def open_down(down: Down, first: Vectors) -> Tree:
    """The state of the down link before the first broadcast: everyone holds the initial values."""
    if not isinstance(down, HiddenState):
        return {}
    return {"hidden": {k: v.clone() for k, v in first.items()}, "packets": 0, "stretched": 0}


def broadcast(
    down: Down, vectors: Vectors, s: Tree, seed: int, version: int, layout: Layout
) -> tuple[Vectors, Tree, dict[str, int], dict[str, float]]:
    """(what clients hold after it, the new state, bytes by name, what to record)."""
    codec, hidden = codec_of(down), isinstance(down, HiddenState)
    received: Vectors = {}
    sizes: dict[str, int] = {}
    error = total = 0.0
    for name, v in vectors.items():
        if codec.lossless:
            received[name], sizes[name] = v, codec.size(layout) or 0
            continue
        sent = v - s["hidden"][name] if hidden else v
        block, lengths = codec.roundtrip(sent[None], layout, [rng.key(seed, f"down:{name}", version)])
        got = block[0].to(v.device)
        received[name] = s["hidden"][name] + got if hidden else got
        sizes[name] = lengths[0]
        error += float((sent - got).square().sum())
        total += float(sent.square().sum())
    if extra := message_overhead(tuple(sizes)):
        sizes[next(iter(sizes))] += extra
    if not hidden:
        return received, s, sizes, {}
    ratio = error / total if total else 0.0
    stretched = s["stretched"] + 1 if ratio > 1 else 0
    if stretched >= PATIENCE:
        raise Diverged(
            f"the hidden state runs away: {codec!r} left {ratio:.3g} times the squared norm as error for {stretched} steps"
            " in a row; use a contractive down codec, such as qsgd(bits, contractive=True), norm='max' or more bits"
        )
    state = {"hidden": received, "packets": s["packets"] + sum(sizes.values()), "stretched": stretched}
    return received, state, sizes, {"contraction": ratio}


def packet(down: Down, vectors: Vectors, s: Tree, seed: int, version: int, layout: Layout) -> bytes:
    """The message of a broadcast; `s` is the link's state before it."""
    codec = codec_of(down)
    steps = isinstance(down, HiddenState) and not codec.lossless
    sent = {name: v - s["hidden"][name] if steps else v for name, v in vectors.items()}
    return bundle({k: codec.encode(v, layout, rng.key(seed, f"down:{k}", version)) for k, v in sent.items()})


def whole_state(vectors: Vectors, layout: Layout) -> bytes:
    """The message that brings a client up to date which holds nothing."""
    return bundle({name: Identity().encode(v, layout) for name, v in vectors.items()})


def open_packet(
    down: Down, message: bytes, held: Vectors | None, names: Iterable[str], layout: Layout
) -> Vectors:
    """What a client holds after a broadcast; after the whole state where it held nothing (None)."""
    whole = isinstance(down, HiddenState) and held is None
    codec = Identity() if whole else codec_of(down)
    got = {name: codec.decode(f, layout) for name, f in unbundle(message, names, layout).items()}
    if held is None or not isinstance(down, HiddenState) or codec.lossless:
        return got
    return {name: held[name] + v for name, v in got.items()}


def catch_up(missed: NDArray[np.int64], whole: int) -> NDArray[np.int64]:
    """Bytes to bring clients up to date: the packets they missed, or the whole state where that is less."""
    return np.where(missed < 0, whole, np.minimum(missed, whole))
