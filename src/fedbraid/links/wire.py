"""The one wire format that every message is framed in; docs/wire-format.md has it on one page.

Reading is strict: everything in a message is checked against what the receiver already knows (codec, layout,
lengths) before a byte of it is believed.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.errors import ConfigError, WireError

U8 = NDArray[np.uint8]

MAGIC, VERSION = b"fB", 1
CONTAINER = b"fM"
SCALARS = 0x20  # the frame kind of bare numbers, which belong to no layout

_HEADER = struct.Struct("<2sBBH6sI")  # magic, version, kind, parameters, layout, body length
_CRC = struct.Struct("<I")
_ENTRY = struct.Struct("<BI")  # name length, frame length
_NAME = re.compile(rb"[A-Za-z0-9_.\-]{1,64}")

FRAME_BYTES = _HEADER.size + _CRC.size


def finite(numbers: NDArray[Any], what: str) -> None:
    """Refuse a message whose side information is not made of finite numbers."""
    if not np.isfinite(numbers).all():
        raise WireError(f"message holds a {what} that is not finite; it is corrupt or from a hostile sender")


def frame(kind: int, params: int, fingerprint: bytes, *parts: bytes | U8) -> bytes:
    """Header, body and checksum as one message."""
    length = sum(len(p) for p in parts)
    if length >= 1 << 32:
        raise WireError(f"a body of {length} bytes does not fit one frame of 4 GiB; split the model")
    pieces = [_HEADER.pack(MAGIC, VERSION, kind, params, fingerprint[:6], length)]
    pieces += [p if isinstance(p, bytes) else p.data for p in parts]  # type: ignore[misc]
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return b"".join([*pieces, _CRC.pack(crc)])


def open_frame(data: bytes, kind: int, params: int, fingerprint: bytes, length: int) -> memoryview:
    """The body of a message, once its header is what the receiver expects and its checksum holds."""
    view = _bytes(data)
    if len(view) < FRAME_BYTES:
        raise WireError(
            f"message of {len(view)} bytes is shorter than an empty frame's {FRAME_BYTES}; it was cut short"
        )
    magic, version, its_kind, its_params, its_layout, its_length = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise WireError(f"message starts with {magic!r}, not {MAGIC!r}; it is not a fedbraid frame")
    if version != VERSION:
        raise WireError(
            f"message has format version {version}; this side reads {VERSION}: run the same fedbraid"
        )
    if its_kind != kind:
        raise WireError(f"message is of codec kind {its_kind}, not {kind}; use the sender's codec")
    if its_params != params:
        raise WireError(
            f"message has codec parameters {its_params:#06x}, not {params:#06x}; use the sender's codec"
        )
    if its_layout != fingerprint[:6]:
        raise WireError(
            f"message is of layout {its_layout.hex()}, not {fingerprint[:6].hex()}; it is another model"
        )
    if its_length != length:
        raise WireError(f"message claims a body of {its_length} bytes; this codec and layout make {length}")
    if len(view) != FRAME_BYTES + length:
        raise WireError(f"message is {len(view)} bytes long; its header says {FRAME_BYTES + length}")
    if zlib.crc32(view[: -_CRC.size]) != _CRC.unpack(view[-_CRC.size :])[0]:
        raise WireError("message does not match its checksum; it is corrupt: send it again")
    return view[_HEADER.size : -_CRC.size]


def kind_of(data: bytes) -> int | None:
    """The codec kind a frame claims, to choose its decoder by; nothing is checked yet."""
    view = _bytes(data)
    return view[3] if len(view) > 3 else None


def encode_scalars(v: Tensor) -> bytes:
    """A few float32 numbers that belong to no layout, such as a step count."""
    numbers = v.detach().to("cpu", torch.float32).reshape(-1).contiguous().numpy()
    if len(numbers) > 0xFFFF:
        raise ConfigError(
            f"{len(numbers)} scalars do not fit one frame of 65535; send a vector with a layout"
        )
    if not np.isfinite(numbers).all():
        raise WireError(f"scalars {numbers.tolist()} are not all finite and are not sent; the model diverged")
    return frame(SCALARS, len(numbers), bytes(6), numbers.astype("<f4").tobytes())


def decode_scalars(data: bytes, count: int) -> Tensor:
    """The `count` numbers in a scalar frame."""
    body = open_frame(data, SCALARS, count, bytes(6), 4 * count)
    numbers = np.frombuffer(body, "<f4").astype(np.float32)
    finite(numbers, "scalar")
    return torch.from_numpy(numbers)


def pack_message(frames: Mapping[str, bytes]) -> bytes:
    """Several named frames as one message; a lone `delta` is its frame, without a byte more."""
    if list(frames) == ["delta"]:
        return frames["delta"]
    if not 0 < len(frames) < 256:
        raise ConfigError(f"a message carries 1 to 255 named vectors, not {len(frames)}")
    names = [name.encode() for name in frames]
    bad = [name for name in names if not _NAME.fullmatch(name)]
    if bad:
        raise ConfigError(f"{bad[0].decode()!r} cannot name a vector; use 1 to 64 of A-Z a-z 0-9 _ . -")
    index = CONTAINER + bytes([VERSION, len(frames)])
    index += b"".join(_ENTRY.pack(len(n), len(f)) + n for n, f in zip(names, frames.values()))
    return b"".join([index, _CRC.pack(zlib.crc32(index)), *frames.values()])


def unpack_message(data: bytes, limit: int) -> dict[str, bytes]:
    """The named frames of a message of at most `limit` bytes; each frame is still to be decoded."""
    view = _bytes(data)
    if len(view) > limit:
        raise WireError(f"message of {len(view)} bytes is longer than the {limit} this receiver takes")
    if view[:2] == MAGIC:
        return {"delta": bytes(view)}
    entries, start = _index(view)
    if start + sum(length for _, length in entries) != len(view):
        raise WireError(f"message of {len(view)} bytes is cut short or over-long for the frames it lists")
    frames: dict[str, bytes] = {}
    for name, length in entries:
        frames[name] = bytes(view[start : start + length])
        start += length
    if len(frames) != len(entries) or list(frames) == ["delta"]:
        raise WireError(
            f"message lists {[n for n, _ in entries]}: a name twice, or a lone delta in a container"
        )
    return frames


def _index(view: memoryview) -> tuple[list[tuple[str, int]], int]:
    """The (name, length) rows of a container, and where its first frame starts."""
    if len(view) < 4 or view[:2] != CONTAINER or view[2] != VERSION or view[3] == 0:
        raise WireError(
            f"message starts with {bytes(view[:4])!r}; it is no fedbraid message of version {VERSION}"
        )
    entries, at = [], 4
    for _ in range(view[3]):
        if len(view) < at + _ENTRY.size:
            raise WireError("message ends inside its list of names; it was cut short")
        size, length = _ENTRY.unpack_from(view, at)
        name = bytes(view[at + _ENTRY.size : at + _ENTRY.size + size])
        if not _NAME.fullmatch(name) or len(name) != size:
            raise WireError(f"message names a vector {name!r}; it is corrupt or from a hostile sender")
        entries.append((name.decode(), length))
        at += _ENTRY.size + size
    if len(view) < at + _CRC.size or zlib.crc32(view[:at]) != _CRC.unpack_from(view, at)[0]:
        raise WireError("message's list of names does not match its checksum; it is corrupt: send it again")
    return entries, at + _CRC.size


def _bytes(data: bytes) -> memoryview:
    try:
        return memoryview(data).cast("B")
    except TypeError:
        raise WireError(f"a message is bytes, not {type(data).__name__}") from None
