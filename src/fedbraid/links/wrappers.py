"""of_weights(codec) and mixed(codec): what is encoded, and by whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.check import number
from fedbraid.core.codec import Codec
from fedbraid.core.layout import Layout
from fedbraid.errors import ConfigError, WireError
from fedbraid.links.identity import Identity
from fedbraid.links.wire import kind_of


@dataclass(frozen=True, repr=False)
class Wrapper(Codec):
    """A codec that delegates to another one."""

    codec: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise ConfigError(f"{self._name}({self.codec!r}) wraps a codec; pass one, such as uniform(4)")

    @property
    def encodes_weights(self) -> bool:
        return self.codec.encodes_weights

    @property
    def shared(self) -> bool:
        return self.codec.shared

    @property
    def lossless(self) -> bool:
        return self.codec.lossless

    @property
    def unbiased(self) -> bool:
        return self.codec.unbiased

    def encode(self, v: Tensor, layout: Layout, seed: int = 0) -> bytes:
        return self.codec.encode(v, layout, seed)

    def decode(self, data: bytes, layout: Layout) -> Tensor:
        return self.codec.decode(data, layout)

    def roundtrip(self, v: Tensor, layout: Layout, seeds: Sequence[int]) -> tuple[Tensor, list[int]]:
        return self.codec.roundtrip(v, layout, seeds)

    def size(self, layout: Layout) -> int | None:
        return self.codec.size(layout)


@dataclass(frozen=True, repr=False)
class OfWeights(Wrapper):
    """The codec on the model's weights rather than on the update: the caller shifts by x on either side."""

    @property
    def encodes_weights(self) -> bool:
        return True

    def for_client(self, client: int) -> Codec:
        inner = self.codec.for_client(client)
        return inner if inner.encodes_weights else OfWeights(inner)

    def quantized(self, clients: NDArray[np.int64]) -> int:
        return self.codec.quantized(clients)


@dataclass(frozen=True, repr=False)
class Mixed(Wrapper):
    """Some clients use the codec, the others send float32, or use `other`.

    share: the fraction of clients, evenly spaced by id. clients: these very ids. One of the two.

    >>> [Mixed(Identity(), share=0.5).chosen(i) for i in range(4)]
    [False, True, False, True]
    """

    share: float | None = None
    clients: tuple[int, ...] | None = None
    other: Codec | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.share is None) == (self.clients is None):
            raise ConfigError(
                f"mixed(share={self.share}, clients={self.clients}) needs exactly one of the two"
            )
        if self.share is not None:
            number("share", self.share, "[0, 1]")
        if self.other is not None and self.other.encodes_weights != self.encodes_weights:
            raise ConfigError(
                f"mixed({self.codec!r}, other={self.other!r}) mixes updates with weights; wrap both or none"
            )
        if isinstance(self.codec.for_client(0), Mixed) or isinstance(self.codec, Mixed):
            raise ConfigError(f"mixed({self.codec!r}) mixes twice; name one codec")
        if self.clients is not None:
            object.__setattr__(self, "clients", tuple(sorted({int(c) for c in self.clients})))

    @property
    def shared(self) -> bool:
        return False

    def chosen(self, client: int) -> bool:
        """Whether this client uses the codec."""
        if self.clients is not None:
            return client in self._ids
        return math.floor((client + 1) * self._fraction) > math.floor(client * self._fraction)

    def for_client(self, client: int) -> Codec:
        return self.codec if self.chosen(client) else self._plain

    def quantized(self, clients: NDArray[np.int64]) -> int:
        return self.codec.quantized(clients[np.array([self.chosen(int(c)) for c in clients], bool)])

    def grids(self) -> tuple[Any, ...]:
        both = self.codec.grids(), self._plain.grids()
        return both[0] + both[1] if all(both) else ()

    def instead_of_float32(self, codec: Codec) -> Codec:
        return self if self.other is not None else replace(self, other=codec)

    def decode(self, data: bytes, layout: Layout) -> Tensor:
        if self.other is None:
            return (self._plain if kind_of(data) == Identity.kind else self.codec).decode(data, layout)
        try:
            return self.codec.decode(data, layout)
        except WireError:
            return self.other.decode(data, layout)

    def size(self, layout: Layout) -> int | None:
        return self.codec.size(layout)

    @property
    def _plain(self) -> Codec:
        return self.other or (OfWeights(Identity()) if self.encodes_weights else Identity())

    @cached_property
    def _fraction(self) -> Fraction:
        return Fraction(self.share or 0).limit_denominator(1_000_000)

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(self.clients or ())
