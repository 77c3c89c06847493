"""Low-rank adapters in a federation: what is trained of them, and what the server moves."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from fedbraid.algorithms.lora import SCALE
from fedbraid.core.layout import SERVER_MOVES
from fedbraid.errors import DataError

M = TypeVar("M", bound=nn.Module)


def freeze_a(module: M) -> M:
    """FFA-LoRA (Sun et al. 2024): A stays as it is on every client, so that averaging B averages the products BA.

    Averaging A and B apart, as a plain adapter does, gives another update than the mean of the clients' own.
    Frozen factors do not travel, which halves the bytes.
    """
    found = [p for name, p in module.named_parameters() if ".lora_A." in name]
    if not found:
        raise _none()
    for p in found:
        p.requires_grad_(False)
    return module


def move_base(module: M) -> M:
    """For `fb.exact_lora`: the frozen weights below adapters become what the server moves and no client does."""
    found: list[Any] = [m for m in module.modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")]
    if not found:
        raise _none()
    for layer in found:
        names = list(layer.lora_A)
        if len(names) != 1 or not isinstance(layer.base_layer, nn.Linear) or layer.use_dora[names[0]]:
            raise DataError(
                f"move_base needs one plain adapter over a Linear, not {names} over {type(layer.base_layer).__name__}; use"
                " freeze_a, or adapters on Linear layers alone"
            )
        _as_buffers(layer.base_layer, float(layer.scaling[names[0]]))
    return module


def _as_buffers(base: Any, scale: float) -> None:
    if SCALE in base._buffers:
        return
    weight = base.weight.detach().clone()
    del base.weight
    base.register_buffer("weight", weight)
    base.register_buffer(SCALE, torch.tensor([scale]))
    setattr(base, SERVER_MOVES, ("weight", SCALE))


def _none() -> DataError:
    return DataError(
        "the model has no LoRA adapter; make one first: peft.get_peft_model(model, LoraConfig(...))"
    )
