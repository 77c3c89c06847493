"""The small convolutional networks of the papers."""

from __future__ import annotations

from torch import Tensor, nn


def two_conv(classes: int, channels: int, size: int, kernel: int, padding: int) -> nn.Module:
    """Two convolutions of 32 and 64 channels, each pooled by 2, then 512 units."""
    shrink = kernel - 1 - 2 * padding
    side = ((size - shrink) // 2 - shrink) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 32, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * side * side, 512), nn.ReLU(),
        nn.Linear(512, classes),
    )  # fmt: skip


def fedgbo_cnn(classes: int = 100, channels: int = 3, size: int = 32) -> nn.Module:
    """FedGBO's CNN: Table 5 (CIFAR-100), and Table 6 for FEMNIST: `classes=62, channels=1, size=28`."""
    return two_conv(classes, channels, size, kernel=3, padding=0)


def fedshift_cnn(
    classes: int = 10,
    channels: int = 3,
    size: int = 32,
    width: int = 32,
    units: int = 512,
    bias: bool = False,
) -> nn.Module:
    """FedShift's CNN as its authors have it: no biases, 2,155,872 weights on CIFAR-10, normal Kaiming initialisation.

    `width` and `units` make a smaller one, `width=16, units=128` a tenth of it; `bias=True` is not theirs.
    """
    side = (
        size // 2 // 2
    )  # padded by 1, a 5×5 convolution takes 2 away and the pooling puts 2 back before it halves
    model = nn.Sequential(
        nn.Conv2d(channels, width, 5, padding=1, bias=bias), nn.ReLU(), nn.MaxPool2d(2, padding=1),
        nn.Conv2d(width, 2 * width, 5, padding=1, bias=bias), nn.ReLU(), nn.MaxPool2d(2, padding=1),
        nn.Flatten(),
        nn.Linear(2 * width * side * side, units, bias=bias), nn.ReLU(),
        nn.Linear(units, classes, bias=bias),
    )  # fmt: skip
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return model


def w3_cnn(classes: int = 10, channels: int = 3, size: int = 32) -> nn.Module:
    """The network of benchmark W3: FedGBO's CNN with ten classes."""
    return two_conv(classes, channels, size, kernel=3, padding=0)


def small_cnn(classes: int = 10, channels: int = 3, size: int = 32) -> nn.Module:
    """Three GroupNorm convolutions of 16, 32 and 32 channels: CIFAR-10 on two cores."""
    side = size // 8
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * side * side, classes),
    )  # fmt: skip


class FourConv(nn.Module):
    """LEAF's CelebA network as FedBuff and QAFeL train it: one GroupNorm, shared by all four convolutions."""

    def __init__(self, classes: int, channels: int, size: int, dropout: float) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, 32, 3, padding=2) for c in (channels, 32, 32, 32))
        self.norm = nn.GroupNorm(32, 32)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.flatten = nn.Flatten()
        self.dropout = nn.Dropout(dropout)
        for _ in self.convs:
            size = (size + 2) // 2
        self.head = nn.Linear(32 * size * size, classes)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = self.pool(self.relu(self.norm(conv(x))))
        scores: Tensor = self.head(self.dropout(self.flatten(x)))
        return scores


def qafel_cnn(classes: int = 2, channels: int = 3, size: int = 32, dropout: float = 0.0) -> nn.Module:
    """QAFeL's four-layer CNN: 29,282 parameters with two classes. The paper's runs have `dropout=0.1`."""
    return FourConv(classes, channels, size, dropout)
