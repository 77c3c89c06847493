"""Messages: named frames as one, read strictly, with the bytes that bundling costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedbraid.core.context import Vectors
from fedbraid.core.layout import Layout
from fedbraid.errors import WireError
from fedbraid.links.identity import Identity
from fedbraid.links.wire import FRAME_BYTES, decode_scalars, encode_scalars, pack_message, unpack_message


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
