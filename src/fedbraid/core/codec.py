"""The codec interface: vectors to bytes and back; and the base of codecs with a frame kind."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.layout import Layout
from fedbraid.core.wire import FRAME_BYTES, U8, frame, open_frame
from fedbraid.errors import ConfigError, WireError

F32 = NDArray[np.float32]
_BLOCK = 1 << 18  # numbers worked on at a time: a few megabytes of temporaries, however large the block


class Codec:
    """Turns a flat float32 vector into bytes and back.

    Concrete codecs are frozen dataclasses: they print, compare, hash and pickle.
    """

    @property
    def encodes_weights(self) -> bool:
        """Whether the link sends the model a client ends with, instead of its update."""
        return False

    @property
    def shared(self) -> bool:
        """Whether all clients use it in the same configuration."""
        return True

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back the very same numbers."""
        return False

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of what is decoded is what was encoded."""
        return False

    def instead_of_float32(self, codec: Codec) -> Codec:
        """This codec with another one where it sends what it is given."""
        return self

    def grids(self) -> tuple[Any, ...]:
        """The grids of integers on which clients' codes lie, so that a sum of codes is the code of the sum."""
        return ()

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

    def quantized(self, clients: NDArray[np.int64]) -> int:
        """How many of these clients' messages lose precision."""
        return 0 if self.lossless else len(clients)

    def size(self, layout: Layout) -> int | None:
        """The length of a message in bytes, where it does not depend on the values."""
        return None

    def row_size(self, layout: Layout) -> int:
        """The bytes of one vector stored in memory, without a frame."""
        raise self._no_rows()

    def to_rows(self, v: Tensor, layout: Layout) -> Tensor:
        """A block `[m, d]` as uint8 rows `[m, row_size]`, every layer quantized."""
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
        settings = [(f.name, getattr(self, f.name)) for f in fields if getattr(self, f.name) != f.default]
        return f"{self._name}({', '.join(f'{name}={value!r}' for name, value in settings)})"

    @property
    def _name(self) -> str:
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()


class Framed(Codec):
    """A codec with its frame kind; a subclass defines the body."""

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
