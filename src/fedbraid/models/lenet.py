"""LeNet-5 (LeCun et al. 1998) as federated papers train it: ReLU and max pooling."""

from __future__ import annotations

from torch import nn


def lenet5(classes: int = 10, channels: int = 1, size: int = 28) -> nn.Module:
    """LeNet-5: 61,706 parameters on 28×28 grey images of ten classes."""
    side = (size // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side * side, 120), nn.ReLU(),
        nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, classes),
    )  # fmt: skip
