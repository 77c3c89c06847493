"""ResNet-18 (He et al. 2016) with GroupNorm in place of BatchNorm (Hsieh et al. 2020)."""

from __future__ import annotations

from torch import Tensor, nn

from fedbraid.errors import ConfigError

_GROUPS = 2


class Block(nn.Module):
    """Two 3×3 convolutions beside a short cut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
            nn.GroupNorm(_GROUPS, outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.GroupNorm(_GROUPS, outside),
        )
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            short = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.skip = nn.Sequential(short, nn.GroupNorm(_GROUPS, outside))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.body(x) + self.skip(x))
        return out


def resnet18_gn(classes: int = 10, channels: int = 3, stem: str = "small") -> nn.Module:
    """ResNet-18 with GroupNorm of two groups.

    `stem="small"` is the 3×3 entry for images of 32×32; `"large"` the 7×7 one with stride 2 and pooling,
    which on small images costs about a sixteenth of the arithmetic.
    """
    if stem == "small":
        entry: list[nn.Module] = [nn.Conv2d(channels, 64, 3, padding=1, bias=False)]
    elif stem == "large":
        entry = [nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)]
    else:
        raise ConfigError(f"stem must be 'small' or 'large', got {stem!r}")
    pool: list[nn.Module] = [nn.MaxPool2d(3, 2, padding=1)] if stem == "large" else []
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    return nn.Sequential(
        *entry, nn.GroupNorm(_GROUPS, 64), nn.ReLU(), *pool,
        *(Block(*w) for w in widths),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes),
    )  # fmt: skip
