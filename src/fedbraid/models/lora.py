"""Low-rank adapters in a federation: which of their two factors is trained."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from fedbraid.errors import DataError

M = TypeVar("M", bound=nn.Module)


def freeze_a(module: M) -> M:
    """FFA-LoRA (Sun et al. 2024): A stays as it is on every client, so that averaging B averages the products BA.

    Averaging A and B apart, as a plain adapter does, gives another update than the mean of the clients' own.
    Frozen factors do not travel, which halves the bytes.
    """
    found = [p for name, p in module.named_parameters() if ".lora_A." in name]
    if not found:
        raise DataError(
            "the model has no LoRA adapter; make one first: peft.get_peft_model(model, LoraConfig(...))"
        )
    for p in found:
        p.requires_grad_(False)
    return module
