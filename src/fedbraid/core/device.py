"""Processor cores, and numbers on their way to a device, which does not wait for them."""

from __future__ import annotations

import os
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def available_cores() -> int:
    """The cores that this process may use; where the system does not say (macOS), all that there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def placed(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """An array as a tensor on a device: to a GPU from pinned memory, in its own time."""
    tensor = torch.from_numpy(numbers)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def finish(device: torch.device) -> None:
    """Wait until a GPU has done all it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seed(number: int, device: torch.device) -> None:
    """Seed what draws on a device; `torch.manual_seed` asks for every kind there may be, at a third of a millisecond."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
