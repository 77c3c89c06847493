"""identity(): float32 as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbraid.core.codec import F32, Codec
from fedbraid.core.layout import Layout
from fedbraid.links.framed import Framed, checked
from fedbraid.links.wire import U8, finite


@dataclass(frozen=True, repr=False)
class Identity(Framed):
    """Every number as float32; nothing is lost.

    >>> Identity()
    identity()
    """

    kind: ClassVar[int] = 0

    @property
    def lossless(self) -> bool:
        return True

    @property
    def unbiased(self) -> bool:
        return True

    def instead_of_float32(self, codec: Codec) -> Codec:
        return codec

    def _body_size(self, layout: Layout) -> int:
        return 4 * layout.size

    def _to_body(self, v: F32, layout: Layout, seed: int) -> U8:
        return v.astype("<f4", copy=False).view(np.uint8)

    def _from_body(self, body: U8, layout: Layout) -> F32:
        v = body.view("<f4").astype(np.float32)
        finite(v, "weight")
        return v

    def roundtrip(self, v: Tensor, layout: Layout, seeds: Sequence[int]) -> tuple[Tensor, list[int]]:
        block = checked(v, layout)
        return torch.from_numpy(block.copy()), [self.size(layout)] * len(block)

    def row_size(self, layout: Layout) -> int:
        return 4 * layout.size

    def to_rows(self, v: Tensor, layout: Layout) -> Tensor:
        return torch.from_numpy(checked(v, layout).copy()).view(torch.uint8)

    def from_rows(self, rows: Tensor, layout: Layout) -> Tensor:
        return rows.contiguous().view(torch.float32).clone()
