"""What travels: the codec interface, and the one wire format every message is framed in.

The format is on one page, docs/wire-format.md. Reading is strict: everything in a message is checked against
what the receiver already knows (codec, layout, lengths) before a byte of it is believed.
"""

from __future__ import annotations

import dataclasses
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.layout import Layout
from fedbraid.errors import ConfigError, WireError

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

MAGIC, VERSION = b"fB", 1
CONTAINER = b"fM"
SCALARS = 0x20  # the frame kind of bare numbers, which belong to no layout

_HEADER = struct.Struct("<2sBBH6sI")  # magic, version, kind, parameters, layout, body length
_CRC = struct.Struct("<I")
_ENTRY = struct.Struct("<BI")  # name length, frame length
_NAME = re.compile(rb"[A-Za-z0-9_.\-]{1,64}")
_BLOCK = 1 << 18  # numbers worked on at a time: a few megabytes of temporaries, however large the block

FRAME_BYTES = _HEADER.size + _CRC.size


class Codec:
    """A way to turn a flat float32 vector into bytes and back.

    Concrete codecs are frozen dataclasses: they print, compare, hash and pickle.
    """

    @property
    def weights(self) -> bool:
        """Whether the caller hands in model weights instead of an update."""
        return False

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back the very same numbers."""
        return False

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of what is decoded is what was encoded."""
        return False

    def encode(self, v: Tensor, layout: Layout, seed: int = 0) -> bytes:
        """The message for one vector `[d]`; a stochastic codec draws from `seed` alone."""
        raise NotImplementedError

    def decode(self, data: bytes, layout: Layout) -> Tensor:
        """The vector `[d]` in a message; WireError says why a message is refused."""
        raise NotImplementedError

    def roundtrip(self, v: Tensor, layout: Layout, seeds: Sequence[int]) -> tuple[Tensor, list[int]]:
        """What the receivers of a block `[m, d]` decode, and the bytes of each message."""
        messages = [self.encode(row, layout, seed) for row, seed in zip(v, seeds, strict=True)]
        return torch.stack([self.decode(data, layout) for data in messages]), [len(data) for data in messages]

    def for_client(self, client: int) -> Codec:
        """The codec this client uses."""
        return self

    def quantises(self, client: int) -> bool:
        """Whether this client's messages lose precision."""
        return not self.lossless

    def size(self, layout: Layout) -> int | None:
        """The length of a message in bytes, where it does not depend on the values."""
        return None

    def row_size(self, layout: Layout) -> int:
        """The bytes of one vector kept in memory, without a frame."""
        raise self._no_rows()

    def to_rows(self, v: Tensor, layout: Layout) -> Tensor:
        """A block `[m, d]` as uint8 rows `[m, row_size]`, every layer quantised."""
        raise self._no_rows()

    def from_rows(self, rows: Tensor, layout: Layout) -> Tensor:
        """The block `[m, d]` in rows of bytes."""
        raise self._no_rows()

    def _no_rows(self) -> ConfigError:
        return ConfigError(
            f"{self!r} cannot keep vectors in memory; use identity(), fp16(), int8() or int4()"
        )

    def __repr__(self) -> str:
        """The public call: fields at their default are left out."""
        fields = sorted(dataclasses.fields(self), key=lambda f: bool(f.kw_only))  # type: ignore[arg-type]
        shown = [(f.name, getattr(self, f.name)) for f in fields if getattr(self, f.name) != f.default]
        return f"{self._name}({', '.join(f'{name}={value!r}' for name, value in shown)})"

    @property
    def _name(self) -> str:
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()


class Framed(Codec):
    """A codec with a frame kind of its own; a subclass says what goes into the body."""

    kind: ClassVar[int]

    def _params(self) -> int:
        """Sixteen bits that sender and receiver must agree on."""
        return 0

    def _preamble(self, layout: Layout) -> bytes:
        """What does not fit those sixteen bits; it opens the body."""
        return b""

    def _body_size(self, layout: Layout) -> int:
        raise NotImplementedError

    def _to_body(self, v: F32, layout: Layout, seed: int) -> U8:
        """The body of one vector, already checked to fit the layout and to be finite."""
        raise NotImplementedError

    def _from_body(self, body: U8, layout: Layout) -> F32:
        """The vector in a body of the right length whose checksum holds; the rest is still to be checked."""
        raise NotImplementedError

    def size(self, layout: Layout) -> int:
        return FRAME_BYTES + len(self._preamble(layout)) + self._body_size(layout)

    def encode(self, v: Tensor, layout: Layout, seed: int = 0) -> bytes:
        body = self._to_body(checked(v.reshape(1, -1), layout)[0], layout, seed)
        return frame(self.kind, self._params(), layout.fingerprint, self._preamble(layout), body)

    def decode(self, data: bytes, layout: Layout) -> Tensor:
        preamble = self._preamble(layout)
        expected = self.size(layout) - FRAME_BYTES
        body = open_frame(data, self.kind, self._params(), layout.fingerprint, expected)
        if bytes(body[: len(preamble)]) != preamble:
            raise WireError(
                f"message was encoded with other parameters than {self!r}; use the sender's codec"
            )
        return torch.from_numpy(self._from_body(np.frombuffer(body[len(preamble) :], np.uint8), layout))


def checked(v: Tensor, layout: Layout) -> F32:
    """A block `[m, d]` as a NumPy array, once it fits the layout and every number is finite."""
    if v.ndim != 2 or v.shape[1] != layout.size:
        raise ConfigError(
            f"a vector of shape {tuple(v.shape[1:])} does not fit a layout of {layout.size} numbers"
        )
    block: F32 = v.detach().to("cpu", torch.float32).contiguous().numpy()
    if block.size and not np.isfinite([block.min(), block.max()]).all():
        row, at = np.argwhere(~np.isfinite(block))[0]
        layer = next(s.name for s in layout if s.offset <= at < s.end)
        raise WireError(
            f"layer {layer!r} holds {block[row, at]}, which is not sent; the model diverged: lower the rate"
        )
    return block


def row_blocks(m: int, d: int) -> Iterator[slice]:
    """Slices of the m rows, each of about as many numbers as fit the cache."""
    step = max(1, _BLOCK // max(d, 1))
    return (slice(i, min(i + step, m)) for i in range(0, m, step))


def finite(numbers: NDArray[Any], what: str) -> None:
    """Refuse a message whose side information is not made of finite numbers."""
    if not np.isfinite(numbers).all():
        raise WireError(
            f"message holds a {what} that is not finite; it was damaged or made by a hostile sender"
        )


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
        raise WireError("message does not match its checksum; it was damaged on the way: send it again")
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
            raise WireError(f"message names a vector {name!r}; it was damaged or made by a hostile sender")
        entries.append((name.decode(), length))
        at += _ENTRY.size + size
    if len(view) < at + _CRC.size or zlib.crc32(view[:at]) != _CRC.unpack_from(view, at)[0]:
        raise WireError("message's list of names does not match its checksum; it was damaged: send it again")
    return entries, at + _CRC.size


def _bytes(data: bytes) -> memoryview:
    try:
        return memoryview(data).cast("B")
    except TypeError:
        raise WireError(f"a message is bytes, not {type(data).__name__}") from None
