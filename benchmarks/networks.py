"""Networks as people bring them: whole rounds through `fb.simulate(engine="auto")` against bare loops, as in speed.py.

    python benchmarks/networks.py [NAME ...] [--repeats 3] [--seconds 1] [--engine auto]
    python benchmarks/networks.py [NAME ...] --rounds 1 4 16 64 256

A bare loop runs for about so many seconds, fedbraid for three times as many rounds. `--rounds` times whole runs of these lengths
from an empty cache, and again, as in speed.py.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import pairwise

import torch
from speed import HEAD, Bare, Workload, line, measure, print_short_runs, trained
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import fedbraid as fb
from fedbraid.engines.native_backend import Native


class Text(nn.Module):
    """Characters into a recurrent net, its last output into a head; or every output, for each place."""

    def __init__(self, net: nn.RNNBase, tokens: int, width: int, everywhere: bool = False) -> None:
        super().__init__()
        self.table, self.net, self.everywhere = nn.Embedding(tokens, width), net, everywhere
        self.head = nn.Linear(net.hidden_size, tokens)

    def forward(self, text: Tensor) -> Tensor:
        out = self.net(self.table(text))[0]
        return self.head(out).transpose(1, 2) if self.everywhere else self.head(out[:, -1])


class Signals(nn.Module):
    """An LSTM over signals of a phone, whose last state and last cell go into a head."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.LSTM(9, 64, batch_first=True), nn.Linear(128, 6)

    def forward(self, x: Tensor) -> Tensor:
        _, (h, c) = self.net(x)
        return self.head(torch.cat([h[-1], c[-1]], 1))


def femnist() -> nn.Module:
    """LEAF's: two convolutions of 5 x 5, 6.6 million parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3136, 2048), nn.ReLU(), nn.Linear(2048, 62),
    )  # fmt: skip


def dropout_cnn() -> nn.Module:
    """That of Adaptive Federated Optimization: convolutions, one pooling, dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 62),
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int, norm) -> None:
        super().__init__()
        conv = {"padding": 1, "bias": False}
        self.first, self.norm1 = nn.Conv2d(before, after, 3, stride, **conv), norm(after)
        self.second, self.norm2 = nn.Conv2d(after, after, 3, 1, **conv), norm(after)
        short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after))
        self.short = short if stride != 1 or before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.short(x))


def resnet20(norm=lambda width: nn.GroupNorm(8, width)) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), norm(16), nn.ReLU()]
    before = 16
    for width in (16, 32, 64):
        for k in range(3):
            layers.append(Residual(before, width, 2 if k == 0 and width > 16 else 1, norm))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Inverted(nn.Module):
    """MobileNet's block, its depthwise convolution between two of one pixel."""

    def __init__(self, before: int, after: int, stride: int, wide: int) -> None:
        super().__init__()
        inner, self.around = before * wide, stride == 1 and before == after
        self.inside = nn.Sequential(
            nn.Conv2d(before, inner, 1, bias=False), nn.GroupNorm(8, inner), nn.ReLU6(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.GroupNorm(8, inner), nn.ReLU6(),
            nn.Conv2d(inner, after, 1, bias=False), nn.GroupNorm(8, after),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x) if self.around else self.inside(x)


def mobilenet() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(8, 16), nn.ReLU6()]
    before = 16
    for after, stride, wide in (
        (16, 1, 2),
        (24, 2, 4),
        (24, 1, 4),
        (32, 2, 4),
        (32, 1, 4),
        (64, 2, 4),
        (64, 1, 4),
    ):
        layers.append(Inverted(before, after, stride, wide))
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Vision(nn.Module):
    """A vision transformer: patches of 4 x 4, a class token, norms first."""

    def __init__(self, width: int = 96, layers: int = 4) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 65, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.encoder(x))[:, 0])


class Sentences(nn.Module):
    """Convolutions of three widths over words, the largest of each."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.drop, self.head = nn.Embedding(2000, 64), nn.Dropout(0.5), nn.Linear(192, 4)
        self.convs = nn.ModuleList(nn.Conv1d(64, 64, k) for k in (3, 4, 5))

    def forward(self, text: Tensor) -> Tensor:
        x = self.table(text).transpose(1, 2)
        return self.head(self.drop(torch.cat([F.relu(conv(x)).max(2).values for conv in self.convs], 1)))


class Causal(nn.Module):
    """A block of nanoGPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.qkv(self.norm1(x)).split(c, 2)
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.think(self.norm2(x))


class Language(nn.Module):
    """nanoGPT: the next character at every place, the head tied to the table."""

    def __init__(self, width: int = 64, length: int = 64, tokens: int = 80) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Causal(width, 4) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        self.head.weight = self.table.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.table(text) + self.places(torch.arange(text.shape[1]))
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


class Mixed(nn.Module):
    """One layer of MLP-Mixer."""

    def __init__(self, width: int, patches: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, patches), nn.GELU(), nn.Linear(patches, patches))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 64, 4, 4), nn.Linear(64, 10)
        self.layers = nn.Sequential(*(Mixed(64, 64) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class Segments(nn.Module):
    """A small U-Net: a class for every pixel."""

    def __init__(self) -> None:
        super().__init__()

        def twice(before: int, after: int) -> nn.Module:
            first = (nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU())
            return nn.Sequential(*first, nn.Conv2d(after, after, 3, padding=1), nn.ReLU())

        self.down1, self.down2, self.bottom = twice(1, 16), twice(16, 32), twice(32, 64)
        self.up2, self.back2 = nn.ConvTranspose2d(64, 32, 2, 2), twice(64, 32)
        self.up1, self.back1, self.head = nn.ConvTranspose2d(32, 16, 2, 2), twice(32, 16), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        d = self.back2(torch.cat([self.up2(c), b], 1))
        return self.head(self.back1(torch.cat([self.up1(d), a], 1)))


class Cosine(nn.Module):
    """A head that compares directions: features and classes are normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )  # fmt: skip
        self.classes = nn.Parameter(torch.randn(10, 512))

    def forward(self, x: Tensor) -> Tensor:
        return 10 * F.linear(F.normalize(self.body(x)), F.normalize(self.classes))


def volumes() -> nn.Module:
    """Convolutions in three dimensions."""
    return nn.Sequential(
        nn.Conv3d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip


def perceptron(*widths: int, linear=nn.Linear) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def table_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(40, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2)
    )  # fmt: skip


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    before = 3
    for width in (64, 128, 256):
        for _ in range(2):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4096, 256), nn.ReLU(), nn.Linear(256, 10))


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    """Label smoothing: a loss of the user's own."""
    return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)


def _of(build, shape, classes, samples, cohort, batch, clients=20, momentum=0.0, **more) -> Workload:
    return Workload(build, shape, classes, clients, samples, cohort, 1, batch, momentum, 4, **more)


GREY, COLOUR = (1, 28, 28), (3, 32, 32)
NETWORKS = {
    "LEAF's LSTM, 2 x 256, batch 10": _of(lambda: Text(nn.LSTM(8, 256, 2, batch_first=True), 80, 8), (80,), 80, 40, 2, 10, tokens=80),
    "GRU, 2 x 128, batch 10": _of(lambda: Text(nn.GRU(8, 128, 2, batch_first=True), 80, 8), (80,), 80, 40, 4, 10, tokens=80),
    "next words by LSTM, batch 16": _of(
        lambda: Text(nn.LSTM(96, 128, batch_first=True), 500, 96, everywhere=True), (20,), 500, 64, 4, 16, tokens=500, places=(20,)
    ),
    "signals, LSTM's state and cell": _of(Signals, (128, 9), 6, 64, 4, 32),
    "LEAF's FEMNIST, batch 10": _of(femnist, GREY, 62, 100, 4, 10),
    "dropout CNN, batch 20": _of(dropout_cnn, GREY, 62, 100, 4, 20),
    "ResNet-20, GroupNorm, batch 32": _of(resnet20, COLOUR, 10, 64, 4, 32),
    "the same, batch 4": _of(resnet20, COLOUR, 10, 32, 4, 4),
    "the same, BatchNorm": _of(lambda: resnet20(nn.BatchNorm2d), COLOUR, 10, 64, 4, 32, buffers="average"),
    "MobileNet, GroupNorm, batch 32": _of(mobilenet, COLOUR, 10, 64, 4, 32),
    "VGG, batch 32": _of(vgg, COLOUR, 10, 64, 2, 32, clients=10),
    "U-Net, 64 x 64, batch 8": _of(Segments, (1, 64, 64), 3, 16, 2, 8, places=(64, 64)),
    "the same, batch 2": _of(Segments, (1, 64, 64), 3, 16, 2, 2, places=(64, 64)),
    "vision transformer, batch 32": _of(Vision, COLOUR, 10, 64, 4, 32),
    "the same, batch 8": _of(Vision, COLOUR, 10, 64, 4, 8),
    "MLP-Mixer, batch 16": _of(Mixer, COLOUR, 10, 64, 4, 16),
    "nanoGPT, 3 x 64, batch 8": _of(Language, (64,), 80, 32, 4, 8, tokens=80, places=(64,)),
    "convolutions over words, batch 16": _of(Sentences, (50,), 4, 64, 5, 16, tokens=2000),
    "cosine classifier, batch 20": _of(Cosine, GREY, 10, 100, 5, 20),
    "weight norm, batch 10": _of(
        lambda: perceptron(784, 200, 200, 10, linear=lambda i, o: weight_norm(nn.Linear(i, o))), GREY, 10, 100, 5, 10
    ),
    "LeNet-5, label smoothing": _of(fb.models.lenet5, GREY, 10, 120, 5, 20, momentum=0.9, loss=smoothed),
    "three dimensions, batch 8": _of(volumes, (1, 16, 16, 16), 5, 32, 4, 8),
    "784-200-200-10, batch 10": _of(lambda: perceptron(784, 200, 200, 10), GREY, 10, 100, 10, 10),
    "784-1024-1024-10, batch 50": _of(lambda: perceptron(784, 1024, 1024, 10), GREY, 10, 100, 4, 50),
    "784-256-10, all 500 samples": _of(lambda: perceptron(784, 256, 10), GREY, 10, 500, 4, 500),
    "a table's, BatchNorm, batch 32": _of(table_net, (40,), 2, 200, 10, 32, buffers="average"),
}  # fmt: skip


def lasting(work: Workload, seconds: float) -> Workload:
    """The same of so many rounds as a bare loop does in so many seconds, four at the least."""
    loop = Bare(work, *work.table())
    weights = [p.detach().clone() for p in trained(loop.model)]
    loop.round(weights)
    start = time.perf_counter()
    loop.round(weights)
    return replace(work, rounds=max(4, round(seconds / (time.perf_counter() - start))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, nargs="+", metavar="N")
    args = parser.parse_args()
    if args.rounds:
        return print_short_runs({name: NETWORKS[name] for name in args.names}, args.rounds, args.repeats)
    print(HEAD.replace("\n", " why not native |\n") + " --- |")
    for name in args.names:
        work = lasting(NETWORKS[name], args.seconds)
        row = line(measure(name, work, args.repeats, args.engine, "cpu"))
        print(f"{row} {Native.supports(work.task(*work.table())) or ''} |", flush=True)


if __name__ == "__main__":
    main()
