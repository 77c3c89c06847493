"""Convolutions, poolings and the norms of images."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

from fedbraid_native.ops.base import WIDE_TILES, CallContext, Op, Shape, flag, number, round_up


@dataclass(frozen=True, kw_only=True)
class Conv2d(Op):
    """A convolution of [i][h][w], for each of `groups` groups of i inputs and o outputs, of each of `rows` images."""

    i: int
    h: int
    w: int
    o: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    groups: int = 1
    dilation: tuple[int, int] = (1, 1)
    rows: int = 1

    @property
    def writes_grad_once(self) -> bool:
        return self.groups == 1

    @property
    def tile(self) -> int:
        """How wide the tiles are by which it goes (Winograd's algorithm), 0 if by none.

        Not for few channels, nor where many of a tile's outputs fall outside the image.
        """
        if self.kernel != (3, 3) or self.stride != (1, 1) or max(self.padding) > 2 or min(self.i, self.o) < 8:
            return 0
        if self.dilation != (1, 1):
            return 0
        there, back = [n + 2 * p - 2 for n, p in zip((self.h, self.w), self.padding)], (self.h, self.w)

        def places(t: int) -> int:
            tiles = [math.prod(-(-n // t) for n in side) for side in (there, back)]
            return (t + 2) ** 2 * (2 * tiles[0] + tiles[1])

        tile = 4 if self.i * self.o <= WIDE_TILES and 10 * places(4) < 9 * places(2) else 2
        return tile if 18 * (2 * math.prod(there) + math.prod(back)) >= 3 * places(tile) else 0

    def _panel(self, lanes: int) -> int:
        """Tiles of a panel, whose places of all channels fit into 576 kB."""
        if not (tile := self.tile):
            return 0
        most = 147456 // lanes // (tile + 2) ** 2 // (self.i + self.o) // 4 * 4
        return max(8 if tile == 2 else 4, min(64, most))

    @property
    def bordered(self) -> int:
        """The size of an input with its border, where there is one and it is saved."""
        (py, px) = self.padding
        return self.i * (self.h + 2 * py) * (self.w + 2 * px) if (py or px) and not self.tile else 0

    @property
    def saved(self) -> Shape:
        return (self.bordered * self.groups * self.rows,)

    def workspace(self, lanes: int, packs: int) -> Shape:
        if tile := self.tile:
            places, inputs, panel = (tile + 2) ** 2, round_up(self.i, lanes), self._panel(lanes)
            weights = places * (self.o * inputs + 16) // lanes  # with a gap between the places'
            return weights, places * (inputs * panel + 2), places * (self.o * panel + 2)
        far = [n + d * (k - 1) for n, d, k in zip((self.h, self.w), self.dilation, self.kernel)]
        return self.o * self.i * math.prod(self.kernel) // lanes + 1, self.o * math.prod(far), 0

    def cpp_type(self, lanes: int) -> str:
        numbers = (self.i, self.h, self.w, self.o, *self.kernel, *self.stride, *self.padding)
        more = (*self.dilation, self.tile, self._panel(lanes))
        return f"Conv2d<{', '.join(map(str, (*numbers, *more)))}>"

    def forward(self, L: str, at: CallContext) -> str:
        x, w, b, y, kept, loop, nb = self._where(
            L, at.input(), at.weight(0), at.weight(1), at.out, at.saved()
        )
        return f"{loop}{L}::forward({x}, {w}, {b}, {y}, {kept}, {at.workspace()}, {nb});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        x, dw, db, dy, kept, loop, nb = self._where(
            L, at.input(), at.grad_weight(0), at.grad_weight(1), at.grad_out, at.saved()
        )
        if (dw, db) != ("nullptr", "nullptr"):
            yield f"{loop}{L}::backward_weight({x}, {dy}, {dw}, {db}, {kept}, {at.workspace()}, {nb}, add);"
        if at.grad_input() != "nullptr":
            dx, w, _, dy, _, loop, nb = self._where(
                L, at.grad_input(), at.weight(0), "nullptr", at.grad_out, at.saved()
            )
            yield f"{loop}{L}::backward_input<{at.accumulate()}>({dy}, {w}, {dx}, {at.workspace()}, {nb});"

    def emit_grad_norms(self, L: str, at: CallContext) -> Iterator[str] | None:
        if self.rows > 1:
            return None
        loop = (
            f"for (int n = 0; n < nb; n++) for (int k = n * {self.groups}; k < (n + 1) * {self.groups}; k++) "
        )
        each = f"{at.input()} + k * {L}::in_size, {at.grad_out} + k * {L}::out_size, {at.saved()} + k * {self.bordered}"
        return iter([f"{loop}Squares<{L}>::of({each}, squares + n, {self._trained()});"])

    def _where(self, L: str, x: str, w: str, b: str, y: str, kept: str) -> tuple[str, ...]:
        """The places of one call, group by group and block by block where there are groups."""
        nb = "nb" if self.rows == 1 else f"nb * {self.rows}"
        if self.groups == 1:
            return x, w, b, y, kept, "", nb
        loop = f"for (int n = 0; n < {nb}; n++) for (int s = 0, k = n * {self.groups}; s < {self.groups}; s++, k++) "
        each = [f"{x} + k * {L}::in_size", f"{w} + s * {L}::weights", f"{b} + s * {self.o}"]
        each = ["nullptr" if at.startswith("nullptr") else at for at in each]
        return (
            each[0],
            each[1],
            each[2],
            f"{y} + k * {L}::out_size",
            f"{kept} + k * {self.bordered}",
            loop,
            "1",
        )


@dataclass(frozen=True, kw_only=True)
class Pool2d(Op):
    """What both poolings are: windows of each channel."""

    c: int
    h: int
    w: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    beyond: tuple[int, int] = (0, 0)  # how far the last windows reach out

    def cpp_type(self, lanes: int) -> str:
        numbers = (self.c, self.h, self.w, *self.kernel, *self.stride, *self.padding, *self.beyond)
        return f"Pool2d<{', '.join(map(str, numbers))}>"


@dataclass(frozen=True, kw_only=True)
class MaxPool2d(Pool2d):
    """The largest of a window, and of 0 where a ReLU is part of it."""

    rectify: bool = False
    backward_needs_output: ClassVar[bool] = True

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::max_forward<{flag(self.rectify)}>({at.input()}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        flags = f"{flag(self.rectify)}, {at.accumulate()}"
        yield f"{L}::max_backward<{flags}>({at.input()}, {at.out}, {at.grad_out}, {at.grad_input()}, nb);"


@dataclass(frozen=True, kw_only=True)
class ConvMaxPool2d(Conv2d):
    """A convolution of the model's input, and the largest of each window of it: windows neither overlap nor leave it."""

    pool: MaxPool2d

    @classmethod
    def suits(cls, conv: Conv2d, pool: MaxPool2d) -> bool:
        """Whether a convolution of an input and a pooling of what it gives are one."""
        whole = pool.kernel == pool.stride and pool.padding == pool.beyond == (0, 0)
        return conv.groups == conv.rows == 1 and not conv.tile and whole

    @classmethod
    def of(cls, conv: Conv2d, pool: MaxPool2d) -> ConvMaxPool2d:
        given = {f.name: getattr(conv, f.name) for f in fields(conv)}
        return cls(**given | {"output": pool.output}, pool=pool)

    @property
    def saved(self) -> Shape:
        """Inputs with their borders, and which place of each window was the largest, a byte each."""
        pooled = [(n - k) // k + 1 for n, k in zip((self.pool.h, self.pool.w), self.pool.kernel)]
        return self.bordered, (self.o * math.prod(pooled) + 3) // 4

    def workspace(self, lanes: int, packs: int) -> Shape:
        taps, some = (
            self.i * math.prod(self.kernel),
            min(12, self.o),
        )  # channels at a time, as a tile may have
        return self.o * taps // lanes + 1, some * self.pool.h * self.pool.w, some * taps

    def cpp_type(self, lanes: int) -> str:
        taps, rectify = math.prod(self.kernel), flag(self.pool.rectify)
        return f"ConvMaxPool2d<{super().cpp_type(lanes)}, {self.pool.cpp_type(lanes)}, {self.i}, {taps}, {rectify}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.weight(0)}, {at.weight(1)}, {at.out}, {at.saved(0)}, {at.saved(1)}, {at.workspace()}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::backward({at.input()}, {at.grad_out}, {at.grad_weight(0)}, {at.grad_weight(1)}, {at.saved(0)}, {at.saved(1)}, {at.workspace()}, nb, add);"

    def emit_grad_norms(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::squares({at.input()}, {at.grad_out}, {at.saved(0)}, {at.saved(1)}, {at.workspace()}, squares, nb, {self._trained()});"


@dataclass(frozen=True, kw_only=True)
class AvgPool2d(Pool2d):
    """The mean of a window; `divisor` 0 counts the places inside the image."""

    divisor: int = 0
    backward_needs_input: ClassVar[bool] = False

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::mean_forward<{self.divisor}>({at.input()}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::mean_backward<{self.divisor}, {at.accumulate()}>({at.grad_out}, {at.grad_input()}, nb);"


@dataclass(frozen=True, kw_only=True)
class ConvTranspose2d(Op):
    """The backward pass of a convolution, taken forward."""

    conv: Conv2d  # from the output to the input

    @property
    def saved(self) -> Shape:
        return self.conv.saved

    def workspace(self, lanes: int, packs: int) -> Shape:
        return self.conv.workspace(lanes, packs)

    def cpp_type(self, lanes: int) -> str:
        return f"ConvTranspose2d<{self.conv.cpp_type(lanes)}, {self.conv.i}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.weight(0)}, {at.weight(1)}, {at.out}, {at.workspace()}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        add = at.accumulate() if at.grad_input() != "nullptr" else "false"
        to = f"{at.grad_input()}, {at.grad_weight(0)}, {at.grad_weight(1)}, {at.saved()}, {at.workspace()}, nb, add"
        yield f"{L}::backward<{add}>({at.input()}, {at.weight(0)}, {at.grad_out}, {to});"


@dataclass(frozen=True, kw_only=True)
class AdaptiveAvgPool2d(Op):
    """The mean of windows that cut [c][h][w] as evenly as can be."""

    c: int
    h: int
    w: int
    out: tuple[int, int]
    backward_needs_input: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class ConstantPad2d(Op):
    """Zeros around [c][h][w], from so many above and to the left on."""

    c: int
    h: int
    w: int
    first: tuple[int, int]
    out: tuple[int, int]
    backward_needs_input: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Im2colDepth(Op):
    """[c][d][inner] to [out][c][kernel][inner]: what each place along the depth sees, zeros where that is outside."""

    c: int
    d: int
    inner: int
    out: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    backward_needs_input: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class GroupNorm(Op):
    """GroupNorm of [c][each] in each of `rows` rows; LayerNorm is one group of channels of one number."""

    c: int
    each: int
    groups: int
    eps: float
    rows: int = 1

    @property
    def saved(self) -> Shape:
        return (2 * self.groups * self.rows,)

    def workspace(self, lanes: int, packs: int) -> Shape:
        return (2 * self.c,)

    def forward(self, L: str, at: CallContext) -> str:
        rest = f"{at.saved()}, {number(self.eps)}, nb * {self.rows}"
        return f"{L}::forward({at.input()}, {at.weight(0)}, {at.weight(1)}, {at.out}, {rest});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        wanted = at.grad_input() != "nullptr"
        flags = f"{at.accumulate() if wanted else 'false'}, {flag(wanted)}"
        rest = f"{at.grad_out}, {at.grad_input()}, {at.grad_weight(0)}, {at.grad_weight(1)}, {at.workspace()}, nb * {self.rows}, add"
        yield f"{L}::backward<{flags}>({at.input()}, {at.weight(0)}, {at.saved()}, {rest});"

    def emit_grad_norms(self, L: str, at: CallContext) -> Iterator[str] | None:
        if not all(w is not None and w.trained for w in self.weights):
            return super().emit_grad_norms(L, at)
        return self._squares(L, at)

    def _squares(self, L: str, at: CallContext) -> Iterator[str]:
        step = self.rows * self.c * self.each
        given = f"{at.input()} + n * {step}, {at.weight(0)}, {at.saved()} + n * {self.saved[0]}, {at.grad_out} + n * {step}"
        yield (
            f"for (int n = 0; n < nb; n++) {L}::backward<false, false>({given}, nullptr, nullptr, nullptr, {at.workspace()},"
            f" {self.rows}, false), squares[n] += square_sum({at.workspace()}, {2 * self.c});"
        )


@dataclass(frozen=True, kw_only=True)
class BatchNorm(Op):
    """BatchNorm of [c][each] over the batch; weights: scale, shift, and the running mean and variance."""

    c: int
    each: int
    eps: float
    momentum: float
    is_batch_dependent: ClassVar[bool] = True

    @property
    def saved(self) -> Shape:
        return (3 * self.c,)

    def forward(self, L: str, at: CallContext) -> str:
        weights = ", ".join(at.weight(k) for k in range(4))
        return f"{L}::forward({at.input()}, {weights}, {at.out}, {at.saved()}, {number(self.eps)}, key, samples, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        wanted = at.grad_input() != "nullptr"
        flags = f"{at.accumulate() if wanted else 'false'}, {flag(wanted)}"
        grads = ", ".join(at.grad_weight(k) for k in range(4))
        given = f"{at.input()}, {at.weight(0)}, {at.weight(2)}, {at.weight(3)}, {at.saved()}, {at.grad_out}, {at.grad_input()}"
        yield f"{L}::backward<{flags}>({given}, {grads}, {number(self.momentum)}, samples, nb, add);"
