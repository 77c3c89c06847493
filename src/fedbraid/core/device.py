"""Processor cores, and copies of numbers to a device that do not wait for it."""

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
    """An array as a tensor on a device: the copy to a GPU is asynchronous, from pinned memory."""
    tensor = torch.from_numpy(numbers)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def finish(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seed(number: int, device: torch.device) -> None:
    """Seed the generator of a device; `torch.manual_seed` seeds every kind of device, which takes a third of a millisecond."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
