"""Error feedback (Fed-EF, Li and Li 2023): what a codec lost is added to the next upload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbraid.core.context import Vectors
from fedbraid.core.layout import Layout
from fedbraid.core.vector_spec import Upload
from fedbraid.links.plain import PlainUplink


@dataclass(frozen=True)
class ErrorFeedback(PlainUplink):
    """Send Q(u + e), keep e ← u + e − Q(u + e) for the next time."""

    def init_client_state(self, declared: Mapping[str, Upload], layout: Layout) -> Vectors:
        return {f"residual:{d.name}": torch.zeros(layout.size) for d in declared.values() if d.width is None}

    def prepare(self, name: str, v: Tensor, memory: Vectors) -> Tensor:
        return v + memory[f"residual:{name}"]

    def keep(self, name: str, corrected: Tensor, got: Tensor) -> Vectors:
        return {f"residual:{name}": corrected - got}
