"""What travels: the codec interface."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.layout import Layout
from fedbraid.errors import ConfigError

F32 = NDArray[np.float32]


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
