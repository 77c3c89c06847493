"""What happens to images before they are trained on, by numbers that are drawn for each or once for the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedbraid.core.check import number, one_of


class Augment(Protocol):
    """Turns images `[n, c, h, w]` into others, by `draws` numbers of [0, 1) an image."""

    @property
    def draws(self) -> int: ...

    @property
    def per(self) -> str:
        """Whether each "sample" has numbers of its own, or all of a client's "batch" the same."""

    def __call__(self, x: Tensor, draws: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Flip:
    """Mirror an image left to right, half of the time."""

    per: str = "sample"

    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_per(self.per)

    def __call__(self, x: Tensor, draws: Tensor) -> Tensor:
        return torch.where((draws[:, 0] < 0.5).view(-1, 1, 1, 1), x.flip(-1), x)


@dataclass(frozen=True)
class FlipCrop:
    """Mirror half of the time, then shift by up to `pad` pixels each way over a zero border.

    FedShift's authors draw for each image, FedGBO's once `per="batch"`.
    """

    pad: int = 4
    per: str = "sample"

    draws: ClassVar[int] = 3

    def __post_init__(self) -> None:
        _check_per(self.per)

    def __call__(self, x: Tensor, draws: Tensor) -> Tensor:
        x = torch.nn.functional.pad(Flip()(x, draws), (self.pad,) * 4)
        return crop(x, draws[:, 1:3], x.shape[2] - 2 * self.pad, x.shape[3] - 2 * self.pad)


@dataclass(frozen=True)
class CropJitter:
    """AdaBest's: a random crop of `size` pixels, mirrored half of the time, its colours stretched by up to ±`strength`.

    For images in [0, 1]. The test set is not cropped, so the model must begin with a center crop.
    """

    size: int = 24
    strength: float = 0.2
    per: str = "sample"

    draws: ClassVar[int] = 6

    def __post_init__(self) -> None:
        _check_per(self.per)
        number("strength", self.strength, "[0, 1)", "inverts colors")

    def __call__(self, x: Tensor, draws: Tensor) -> Tensor:
        x = crop(Flip()(x, draws), draws[:, 1:3], self.size, self.size)
        bright, contrast, colour = (
            (1 + self.strength * (2 * draws[:, 3:6, None, None, None] - 1)).to(x).unbind(1)
        )
        x = x * bright
        x = _blend(x, _gray(x).mean((2, 3), keepdim=True), contrast)
        return _blend(x, _gray(x), colour)


def crop(x: Tensor, draws: Tensor, height: int, width: int) -> Tensor:
    """A crop of this size of each image, at the offset that two numbers of [0, 1) give."""
    n, channels = x.shape[:2]
    offsets = torch.tensor([x.shape[2] - height + 1, x.shape[3] - width + 1], device=x.device)
    at = (draws * offsets).long()
    rows = (at[:, :1] + torch.arange(height, device=x.device)).view(n, 1, height, 1)
    columns = (at[:, 1:] + torch.arange(width, device=x.device)).view(n, 1, 1, width)
    take = torch.arange(n, device=x.device).view(n, 1, 1, 1)
    return x[take, torch.arange(channels, device=x.device).view(1, -1, 1, 1), rows, columns]


def _gray(x: Tensor) -> Tensor:
    return (x * x.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)


def _blend(x: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    return (weight * x + (1 - weight) * other).clamp(0, 1)


def _check_per(per: str) -> None:
    one_of("per", per, ("sample", "batch"))
