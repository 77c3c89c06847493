"""Codecs with a frame kind of their own, and what they check before encoding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbraid.core.codec import F32, Codec
from fedbraid.core.layout import Layout
from fedbraid.errors import ConfigError, WireError
from fedbraid.links.wire import FRAME_BYTES, U8, frame, open_frame

_BLOCK = 1 << 18  # numbers worked on at a time: a few megabytes of temporaries, however large the block


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
