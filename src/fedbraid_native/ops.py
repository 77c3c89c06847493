"""The operations that native code is made of: one class each, which says its C++ type and emits its two calls.

A block is `lanes` samples side by side; sizes are in vectors, of a block where they grow with the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol

Shape = tuple[int, ...]
PIECE = 64  # blocks of a sequence whose weights' gradient is taken at a time, as in kernels.hpp
WIDE_ROWS = 64  # numbers of a row from which samples may be taken as rows, as in rows.hpp
WIDE_TILES = 256 * 256  # inputs by outputs up to which tiles of 4 x 4 pay, as in images.hpp


@dataclass(frozen=True)
class WeightRef:
    """Where a tensor's numbers lie: in the vector that is trained, among the constants beside it, or in a value.

    Such a value is computed from parameters alone, and the same for all samples.
    """

    offset: int
    trained: bool = True
    value: int | None = None


class CallContext(Protocol):
    """What an operation's surroundings are called in the source, at the moment of one of its calls."""

    packs: int
    simd_width: int

    @property
    def out(self) -> str: ...
    @property
    def grad_out(self) -> str: ...
    @property
    def saved(self) -> str: ...
    @property
    def workspace(self) -> str: ...
    def input(self, i: int = 0) -> str: ...
    def grad_input(self, i: int = 0) -> str: ...  # "nullptr" where nobody asks for it
    def accumulate(self, i: int = 0) -> str: ...  # whether dx holds another operation's share already
    def weight(self, i: int) -> str: ...
    def grad_weight(self, i: int) -> str: ...  # "nullptr" where the weight is not trained
    def reads_model_input(self) -> bool: ...  # whether the input is the model's
    def reads_input_rows(self) -> bool: ...  # and is read as it lies in the table


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation: the values it reads, the one it writes, its weights' places."""

    inputs: tuple[int, ...]
    output: int
    weights: tuple[WeightRef | None, ...] = ()
    backward_needs_input: ClassVar[bool] = (
        True  # on the way back; where nobody does, a value's room is used again
    )
    backward_needs_output: ClassVar[bool] = False
    is_batch_dependent: ClassVar[bool] = False  # samples of a batch, all of which must then be in one chunk
    is_differentiable: ClassVar[bool] = True  # with its inputs, so that there is a gradient

    @property
    def weight_values(self) -> tuple[int, ...]:
        """The values that its weights are."""
        return tuple(w.value for w in self.weights if w is not None and w.value is not None)

    @property
    def operands(self) -> tuple[int, ...]:
        return self.inputs + self.weight_values

    @property
    def has_trainable_weights(self) -> bool:
        """Whether a weight of its own is trained."""
        return any(w is not None and w.trained for w in self.weights)

    @property
    def writes_grad_once(self) -> bool:
        """Whether each number of a weight's gradient is written once for all samples of a chunk."""
        return True

    @property
    def saved_size(self) -> int:
        """What the way there leaves for the way back, in vectors per block."""
        return 0

    def workspace_size(self, lanes: int, blocks: int) -> int:
        """Room that a call needs for itself, in vectors."""
        return 0

    def cpp_type(self) -> str:
        raise NotImplementedError

    def forward(self, L: str, at: CallContext) -> str:
        """The call on the way there."""
        return f"{L}::forward({at.input()}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        """The calls on the way back."""
        yield f"{L}::backward<{at.accumulate()}>({at.out if self.backward_needs_output else at.input()}, {at.grad_out}, {at.grad_input()}, nb);"

    def emit_grad_norms(self, L: str, at: CallContext) -> Iterator[str] | None:
        """Calls that add each sample's squared gradient of the weights to `squares`, after the way back to the inputs.

        None where there are none, though there are weights.
        """
        return None if self.has_trainable_weights else iter(())

    def size_checks(self, L: str, at: CallContext) -> Iterator[str]:
        """That the room made here is what the kernels take."""
        return iter(())

    def _trained(self) -> str:
        """Whether the weight is trained, and the bias, as two arguments."""
        return ", ".join(flag(w is not None and w.trained) for w in self.weights)


def flag(value: object) -> str:
    return "true" if value else "false"


def number(value: float) -> str:
    if math.isinf(value):
        return "-INFINITY" if value < 0 else "INFINITY"
    return f"{float(value)!r}f"


# Maps of rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Linear(Op):
    """The same linear map of each of `rows` rows."""

    i: int
    o: int
    rows: int = 1

    @property
    def writes_grad_once(self) -> bool:
        return self.rows == 1

    def workspace_size(self, lanes: int, blocks: int) -> int:
        i, o = (-(-n // lanes) * lanes for n in (self.i, self.o))
        if self.rows > 1 and (i, o) == (self.i, self.o) and min(i, o) >= WIDE_ROWS:
            return i * o // lanes + PIECE * (i + o) + max(i, o) + max(i, o) // lanes
        return (i + o) * (blocks if self.rows == 1 else min(PIECE, blocks * self.rows))

    def cpp_type(self) -> str:
        return f"Linear<{self.i}, {self.o}>"

    def forward(self, L: str, at: CallContext) -> str:
        if at.reads_input_rows():
            return f"{L}::forward_rows(rows, {at.weight(0)}, {at.weight(1)}, {at.out}, nb);"
        if self.rows > 1:
            to = f"{at.out}, {at.workspace}, nb, {self.rows}, samples"
            return f"{self._sequence}::forward({at.input()}, {at.weight(0)}, {at.weight(1)}, {to});"
        return f"{L}::forward({at.input()}, {at.weight(0)}, {at.weight(1)}, {at.out}, nb);"

    @property
    def _sequence(self) -> str:
        return f"Sequence<{self.i}, {self.o}>"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        if at.grad_weight(0) != "nullptr":
            if self.rows > 1:
                to = f"{at.grad_weight(0)}, {at.workspace}, nb, {self.rows}, samples"
                yield f"{L}::weight_sequence({at.input()}, {at.grad_out}, {to});"
            elif (
                at.reads_model_input() and self.i % at.simd_width == 0
            ):  # the rows are what the turned inputs would be
                to = f"{at.grad_weight(0)}, (float*)({at.workspace})"
                yield f"{L}::weight_rows(rows, {at.grad_out}, {to}, nb, samples, add);"
            else:
                yield f"{L}::weight({at.input()}, {at.grad_out}, {at.grad_weight(0)}, {at.workspace}, nb, samples, add);"
        if at.grad_weight(1) != "nullptr":
            yield f"{L}::bias({at.grad_out}, {at.grad_weight(1)}, nb * {self.rows}, {self.o}, add);"
        if at.grad_input() != "nullptr" and self.rows > 1:
            to = f"{at.grad_input()}, {at.workspace}, nb, {self.rows}, samples"
            yield f"{self._sequence}::backward_input<{at.accumulate()}>({at.grad_out}, {at.weight(0)}, {to});"
        elif at.grad_input() != "nullptr":
            yield f"{L}::backward_input<{at.accumulate()}>({at.grad_out}, {at.weight(0)}, {at.grad_input()}, nb);"

    def emit_grad_norms(self, L: str, at: CallContext) -> Iterator[str]:
        if self.rows > 1:
            yield f"Squares<{L}>::of_sequence({at.input()}, {at.grad_out}, squares, nb, {self.rows}, {self._trained()});"
        elif at.reads_input_rows():
            yield f"Squares<{L}>::of_rows(rows, {at.grad_out}, squares, nb, {self._trained()});"
        else:
            yield f"Squares<{L}>::of({at.input()}, {at.grad_out}, squares, nb, {self._trained()});"

    def size_checks(self, L: str, at: CallContext) -> Iterator[str]:
        n = at.packs if self.rows == 1 else min(PIECE, at.packs * self.rows)
        room = f"{L}::turned * {n}" if self.rows == 1 else f"{self._sequence}::scratch({L}::turned * {n})"
        yield f"{room} == {self.workspace_size(at.simd_width, at.packs)}"


@dataclass(frozen=True, kw_only=True)
class LinearTransposed(Op):
    """Each of `rows` rows of i numbers times a matrix [i][o]: a linear map from o to i, the other way round."""

    i: int
    o: int
    rows: int = 1

    @property
    def writes_grad_once(self) -> bool:
        return self.rows == 1

    def workspace_size(self, lanes: int, blocks: int) -> int:
        i, o = (-(-n // lanes) * lanes for n in (self.i, self.o))
        return (i + o) * (blocks if self.rows == 1 else min(PIECE, blocks * self.rows))

    def cpp_type(self) -> str:
        return f"Linear<{self.o}, {self.i}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::backward_input<false>({at.input()}, {at.weight(0)}, {at.out}, nb * {self.rows});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        if at.grad_weight(0) != "nullptr" and self.rows > 1:
            to = f"{at.grad_weight(0)}, {at.workspace}, nb, {self.rows}, samples"
            yield f"{L}::weight_sequence({at.grad_out}, {at.input()}, {to});"
        elif at.grad_weight(0) != "nullptr":
            yield f"{L}::weight({at.grad_out}, {at.input()}, {at.grad_weight(0)}, {at.workspace}, nb, samples, add);"
        if at.grad_input() != "nullptr":
            flags = f"{self.o}, {self.i}, 1, {self.o}, {at.accumulate()}"
            yield f"{L}::run<{flags}>({at.grad_out}, {at.weight(0)}, nullptr, {at.grad_input()}, nb * {self.rows});"


@dataclass(frozen=True, kw_only=True)
class Embedding(Op):
    """Rows of a table by number, `t` of them a sample; the row `skip` is not trained."""

    count: int
    f: int
    t: int
    skip: int = -1

    @property
    def writes_grad_once(self) -> bool:
        return False

    def workspace_size(self, lanes: int, blocks: int) -> int:
        return -(-self.f // lanes) * lanes

    def cpp_type(self) -> str:
        return f"Embedding<{self.count}, {self.f}, {self.t}, {self.skip}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.weight(0)}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::backward({at.input()}, {at.grad_out}, {at.grad_weight(0)}, {at.workspace}, nb, samples);"

    def size_checks(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::scratch == {self.workspace_size(at.simd_width, at.packs)}"


_CELLS = {"GruCell": (3, 4, 2), "LstmCell": (4, 5, 4), "TanhCell": (1, 1, 1)}  # GATES, KEPT, JOINT


@dataclass(frozen=True, kw_only=True)
class RNN(Op):
    """One layer of a recurrent net in one direction: [t][i] to [t][h]; weights wi, wh, bi, bh.

    With `cells` the last cell is one more row. More inputs are the state before the first step, and the cell.
    """

    cell: str
    i: int
    h: int
    t: int
    reversed: bool = False
    cells: bool = False
    backward_needs_output: ClassVar[bool] = True

    @property
    def writes_grad_once(self) -> bool:
        return False

    @property
    def saved_size(self) -> int:
        return self.t * self.h * _CELLS[self.cell][1]

    def workspace_size(self, lanes: int, blocks: int) -> int:
        gates, _, joint = _CELLS[self.cell]
        i, h, g, j = (-(-n // lanes) * lanes for n in (self.i, self.h, gates * self.h, joint * self.h))
        more = blocks * max(gates * self.h, 2 * self.h)
        if self.h % lanes or self.h < WIDE_ROWS or len(self.inputs) > 1:
            return max(more, PIECE * max(i + g, h + j))
        packed = gates * h * max(i, h) // lanes + 1
        return packed + (self.t * blocks + 1) * (i + 2 * h) + more + i // lanes + 1

    def cpp_type(self) -> str:
        options = [self.reversed, self.cells, len(self.inputs) > 1]
        while not options[-1] and len(options) > 1:
            options.pop()
        return f"RNN<{self.cell}, {self.i}, {self.h}, {self.t}, {', '.join(map(flag, options))}>"

    def _first(self, of: Callable[[int], str]) -> str:
        return ", ".join(of(i) if len(self.inputs) > i else "nullptr" for i in (1, 2))

    def forward(self, L: str, at: CallContext) -> str:
        weights = ", ".join(at.weight(k) for k in range(4))
        given = f"{at.input()}, {self._first(at.input)}, {weights}"
        return f"{L}::forward({given}, {at.out}, {at.saved}, {at.workspace}, nb, samples);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        grads = ", ".join(at.grad_weight(k) for k in range(4))
        add = at.accumulate() if at.grad_input() != "nullptr" else "false"
        states = [
            self._first(at.input),
            self._first(at.grad_input),
            self._first(at.accumulate).replace("nullptr", "false"),
        ]
        first = f", {{{', '.join(states)}}}" if len(self.inputs) > 1 else ""
        yield (
            f"{L}::backward<{add}>({at.input()}, {at.out}, {at.weight(0)}, {at.weight(1)}, {at.grad_out}, {at.grad_input()}, {grads},"
            f" {at.saved}, {at.workspace}, nb, samples{first});"
        )

    def size_checks(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::kept == {self.saved_size}"
        yield f"{L}::scratch({at.packs}) == {self.workspace_size(at.simd_width, at.packs)}"


# Images -----------------------------------------------------------------------------------------------


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
    def _tile(self) -> int:
        """How wide the tiles are by which it goes, 0 if by none, as in images.hpp."""
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

    @property
    def _kept(self) -> int:
        (py, px) = self.padding
        bordered = (py or px) and not self._tile
        return self.i * (self.h + 2 * py) * (self.w + 2 * px) if bordered else 0

    @property
    def saved_size(self) -> int:
        return self._kept * self.groups * self.rows

    def workspace_size(self, lanes: int, blocks: int) -> int:
        if tile := self._tile:
            places, inputs, both = (tile + 2) ** 2, -(-self.i // lanes) * lanes, self.i + self.o
            panel = max(8 if tile == 2 else 4, min(64, 147456 // lanes // places // both // 4 * 4))
            return places * (self.o * inputs + 16) // lanes + places * ((inputs + self.o) * panel + 4)
        weights = self.o * self.i * math.prod(self.kernel)
        far = [n + d * (k - 1) for n, d, k in zip((self.h, self.w), self.dilation, self.kernel)]
        return weights // lanes + 1 + self.o * math.prod(far)

    def cpp_type(self) -> str:
        numbers = (self.i, self.h, self.w, self.o, *self.kernel, *self.stride, *self.padding)
        more = () if self.dilation == (1, 1) else self.dilation
        return f"Conv2d<{', '.join(map(str, (*numbers, *more)))}>"

    def forward(self, L: str, at: CallContext) -> str:
        x, w, b, y, kept, loop, nb = self._where(L, at.input(), at.weight(0), at.weight(1), at.out, at.saved)
        return f"{loop}{L}::forward({x}, {w}, {b}, {y}, {kept}, {at.workspace}, {nb});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        x, dw, db, dy, kept, loop, nb = self._where(
            L, at.input(), at.grad_weight(0), at.grad_weight(1), at.grad_out, at.saved
        )
        if (dw, db) != ("nullptr", "nullptr"):
            yield f"{loop}{L}::backward_weight({x}, {dy}, {dw}, {db}, {kept}, {at.workspace}, {nb}, add);"
        if at.grad_input() != "nullptr":
            dx, w, _, dy, _, loop, nb = self._where(
                L, at.grad_input(), at.weight(0), "nullptr", at.grad_out, at.saved
            )
            yield f"{loop}{L}::backward_input<{at.accumulate()}>({dy}, {w}, {dx}, {at.workspace}, {nb});"

    def emit_grad_norms(self, L: str, at: CallContext) -> Iterator[str] | None:
        if self.rows > 1:
            return None
        loop = (
            f"for (int n = 0; n < nb; n++) for (int k = n * {self.groups}; k < (n + 1) * {self.groups}; k++) "
        )
        each = (
            f"{at.input()} + k * {L}::in_size, {at.grad_out} + k * {L}::out_size, {at.saved} + k * {L}::kept"
        )
        return iter([f"{loop}Squares<{L}>::of({each}, squares + n, {self._trained()});"])

    def _where(self, L: str, x: str, w: str, b: str, y: str, kept: str) -> tuple[str, ...]:
        """The places of one call, group by group and block by block where there are groups."""
        nb = "nb" if self.rows == 1 else f"nb * {self.rows}"
        if self.groups == 1:
            return x, w, b, y, kept, "", nb
        loop = f"for (int n = 0; n < {nb}; n++) for (int s = 0, k = n * {self.groups}; s < {self.groups}; s++, k++) "
        each = [f"{x} + k * {L}::in_size", f"{w} + s * {L}::weights", f"{b} + s * {self.o}"]
        each = ["nullptr" if at.startswith("nullptr") else at for at in each]
        return each[0], each[1], each[2], f"{y} + k * {L}::out_size", f"{kept} + k * {L}::kept", loop, "1"

    def size_checks(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::scratch == {self.workspace_size(at.simd_width, at.packs)}"
        yield f"{L}::kept == {self._kept}"


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

    def cpp_type(self) -> str:
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
        return conv.groups == conv.rows == 1 and not conv._tile and whole

    @classmethod
    def of(cls, conv: Conv2d, pool: MaxPool2d) -> ConvMaxPool2d:
        given = {f.name: getattr(conv, f.name) for f in fields(conv)}
        return cls(**given | {"output": pool.output}, pool=pool)

    @property
    def saved_size(self) -> int:
        pooled = [(n - k) // k + 1 for n, k in zip((self.pool.h, self.pool.w), self.pool.kernel)]
        return self._kept + (self.o * math.prod(pooled) + 3) // 4

    def workspace_size(self, lanes: int, blocks: int) -> int:
        taps = self.i * math.prod(self.kernel)
        return self.o * taps // lanes + 1 + min(12, self.o) * (self.pool.h * self.pool.w + taps)

    def cpp_type(self) -> str:
        taps, rectify = math.prod(self.kernel), flag(self.pool.rectify)
        return f"ConvMaxPool2d<{super().cpp_type()}, {self.pool.cpp_type()}, {self.i}, {taps}, {rectify}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.weight(0)}, {at.weight(1)}, {at.out}, {at.saved}, {at.workspace}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::backward({at.input()}, {at.grad_out}, {at.grad_weight(0)}, {at.grad_weight(1)}, {at.saved}, {at.workspace}, nb, add);"

    def emit_grad_norms(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::squares({at.input()}, {at.grad_out}, {at.saved}, {at.workspace}, squares, nb, {self._trained()});"

    def size_checks(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::scratch == {self.workspace_size(at.simd_width, at.packs)}"
        yield f"{L}::kept == {self.saved_size}"


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
    """The way back through a convolution, taken forward."""

    conv: Conv2d  # from the output to the input

    @property
    def saved_size(self) -> int:
        return self.conv.saved_size

    def workspace_size(self, lanes: int, blocks: int) -> int:
        return self.conv.workspace_size(lanes, blocks)

    def cpp_type(self) -> str:
        return f"ConvTranspose2d<{self.conv.cpp_type()}, {self.conv.i}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.weight(0)}, {at.weight(1)}, {at.out}, {at.workspace}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        add = at.accumulate() if at.grad_input() != "nullptr" else "false"
        to = f"{at.grad_input()}, {at.grad_weight(0)}, {at.grad_weight(1)}, {at.saved}, {at.workspace}, nb, add"
        yield f"{L}::backward<{add}>({at.input()}, {at.weight(0)}, {at.grad_out}, {to});"

    def size_checks(self, L: str, at: CallContext) -> Iterator[str]:
        yield from self.conv.size_checks(f"{self.conv.cpp_type()}", at)


@dataclass(frozen=True, kw_only=True)
class AdaptiveAvgPool2d(Op):
    """The mean of windows that cut [c][h][w] as evenly as can be."""

    c: int
    h: int
    w: int
    out: tuple[int, int]
    backward_needs_input: ClassVar[bool] = False

    def cpp_type(self) -> str:
        return f"AdaptiveAvgPool2d<{self.c}, {self.h}, {self.w}, {self.out[0]}, {self.out[1]}>"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::backward<{at.accumulate()}>({at.grad_out}, {at.grad_input()}, nb);"


@dataclass(frozen=True, kw_only=True)
class ConstantPad2d(Op):
    """Zeros around [c][h][w], from so many above and to the left on."""

    c: int
    h: int
    w: int
    first: tuple[int, int]
    out: tuple[int, int]
    backward_needs_input: ClassVar[bool] = False

    def cpp_type(self) -> str:
        return f"ConstantPad2d<{', '.join(map(str, (self.c, self.h, self.w, *self.first, *self.out)))}>"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::backward<{at.accumulate()}>({at.grad_out}, {at.grad_input()}, nb);"


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

    def cpp_type(self) -> str:
        numbers = (
            self.c,
            self.d,
            self.inner,
            self.out,
            self.kernel,
            self.stride,
            self.padding,
            self.dilation,
        )
        return f"Im2colDepth<{', '.join(map(str, numbers))}>"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::backward<{at.accumulate()}>({at.grad_out}, {at.grad_input()}, nb);"


@dataclass(frozen=True, kw_only=True)
class GroupNorm(Op):
    """GroupNorm of [c][each] in each of `rows` rows; LayerNorm is one group of channels of one number."""

    c: int
    each: int
    groups: int
    eps: float
    rows: int = 1

    @property
    def saved_size(self) -> int:
        return 2 * self.groups * self.rows

    def workspace_size(self, lanes: int, blocks: int) -> int:
        return 2 * self.c

    def cpp_type(self) -> str:
        return f"GroupNorm<{self.c}, {self.each}, {self.groups}>"

    def forward(self, L: str, at: CallContext) -> str:
        rest = f"{at.saved}, {number(self.eps)}, nb * {self.rows}"
        return f"{L}::forward({at.input()}, {at.weight(0)}, {at.weight(1)}, {at.out}, {rest});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        wanted = at.grad_input() != "nullptr"
        flags = f"{at.accumulate() if wanted else 'false'}, {flag(wanted)}"
        rest = f"{at.grad_out}, {at.grad_input()}, {at.grad_weight(0)}, {at.grad_weight(1)}, {at.workspace}, nb * {self.rows}, add"
        yield f"{L}::backward<{flags}>({at.input()}, {at.weight(0)}, {at.saved}, {rest});"

    def emit_grad_norms(self, L: str, at: CallContext) -> Iterator[str] | None:
        if not all(w is not None and w.trained for w in self.weights):
            return super().emit_grad_norms(L, at)
        return self._squares(L, at)

    def _squares(self, L: str, at: CallContext) -> Iterator[str]:
        step = self.rows * self.c * self.each
        given = f"{at.input()} + n * {step}, {at.weight(0)}, {at.saved} + n * {self.saved_size}, {at.grad_out} + n * {step}"
        yield (
            f"for (int n = 0; n < nb; n++) {L}::backward<false, false>({given}, nullptr, nullptr, nullptr, {at.workspace},"
            f" {self.rows}, false), squares[n] += square_sum({at.workspace}, {L}::sums);"
        )

    def size_checks(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::sums == {self.workspace_size(at.simd_width, at.packs)}"
        yield f"{L}::kept * {self.rows} == {self.saved_size}"


@dataclass(frozen=True, kw_only=True)
class BatchNorm(Op):
    """BatchNorm of [c][each] over the batch; weights: scale, shift, and the running mean and variance."""

    c: int
    each: int
    eps: float
    momentum: float
    is_batch_dependent: ClassVar[bool] = True

    @property
    def saved_size(self) -> int:
        return 3 * self.c

    def cpp_type(self) -> str:
        return f"BatchNorm<{self.c}, {self.each}>"

    def forward(self, L: str, at: CallContext) -> str:
        weights = ", ".join(at.weight(k) for k in range(4))
        return f"{L}::forward({at.input()}, {weights}, {at.out}, {at.saved}, {number(self.eps)}, key, samples, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        wanted = at.grad_input() != "nullptr"
        flags = f"{at.accumulate() if wanted else 'false'}, {flag(wanted)}"
        grads = ", ".join(at.grad_weight(k) for k in range(4))
        given = f"{at.input()}, {at.weight(0)}, {at.weight(2)}, {at.weight(3)}, {at.saved}, {at.grad_out}, {at.grad_input()}"
        yield f"{L}::backward<{flags}>({given}, {grads}, {number(self.momentum)}, samples, nb, add);"

    def size_checks(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::kept == {self.saved_size}"


# Numbers one by one -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Unary(Op):
    """A function of each number whose slope its value tells: Relu, Tanh, Sigmoid, or Leaky with its slope."""

    function: str
    n: int
    backward_needs_input: ClassVar[bool] = False
    backward_needs_output: ClassVar[bool] = True

    def cpp_type(self) -> str:
        return f"Unary<{self.function}, {self.n}>"


@dataclass(frozen=True, kw_only=True)
class Add(Op):
    """The sum of two values of one shape."""

    n: int
    backward_needs_input: ClassVar[bool] = False

    def cpp_type(self) -> str:
        return f"Add<{self.n}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input(0)}, {at.input(1)}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        for i in range(2):
            if at.grad_input(i) != "nullptr":
                yield f"{L}::backward<{at.accumulate(i)}>({at.grad_out}, {at.grad_input(i)}, nb);"


# Where numbers lie ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Slice(Op):
    """[outer][dim][inner] to [outer][count][inner]: those from `start` on, `step` apart."""

    outer: int
    dim: int
    inner: int
    start: int
    count: int
    step: int = 1
    backward_needs_input: ClassVar[bool] = False

    def cpp_type(self) -> str:
        numbers = (self.outer, self.dim, self.inner, self.start, self.count, self.step)
        return f"Slice<{', '.join(map(str, numbers))}>"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::backward<{at.accumulate()}>({at.grad_out}, {at.grad_input()}, nb);"


@dataclass(frozen=True, kw_only=True)
class Cat(Op):
    """[outer][a] and [outer][b] to [outer][a + b]."""

    outer: int
    a: int
    b: int
    backward_needs_input: ClassVar[bool] = False

    def cpp_type(self) -> str:
        return f"Cat<{self.outer}, {self.a}, {self.b}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input(0)}, {at.input(1)}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        for i in range(2):
            if at.grad_input(i) != "nullptr":
                yield f"{L}::backward<{i}, {at.accumulate(i)}>({at.grad_out}, {at.grad_input(i)}, nb);"


@dataclass(frozen=True, kw_only=True)
class Permute(Op):
    """Dimensions in another order, in each of `rows` rows."""

    sizes: Shape
    order: Shape
    rows: int = 1
    backward_needs_input: ClassVar[bool] = False

    def cpp_type(self) -> str:
        steps = [math.prod(self.sizes[d + 1 :]) for d in self.order]
        sizes = [self.sizes[d] for d in self.order]
        pad = 4 - len(sizes)
        return f"Permute<{', '.join(map(str, [1] * pad + sizes + [0] * pad + steps))}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.out}, nb * {self.rows});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::backward<{at.accumulate()}>({at.grad_out}, {at.grad_input()}, nb * {self.rows});"


@dataclass(frozen=True, kw_only=True)
class Mean(Op):
    """[outer][dim][inner] to [outer][inner]: the mean, or the sum, over dim."""

    outer: int
    dim: int
    inner: int
    scale: float
    backward_needs_input: ClassVar[bool] = False

    def cpp_type(self) -> str:
        return f"Mean<{self.outer}, {self.dim}, {self.inner}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward<false>({at.input()}, {at.out}, {number(self.scale)}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::backward<{at.accumulate()}>({at.grad_out}, {at.grad_input()}, {number(self.scale)}, nb);"


@dataclass(frozen=True, kw_only=True)
class Expand(Op):
    """[outer][inner] to [outer][dim][inner]: the same for all of dim. A sum over dim, the other way round."""

    outer: int
    dim: int
    inner: int
    backward_needs_input: ClassVar[bool] = False

    def cpp_type(self) -> str:
        return f"Mean<{self.outer}, {self.dim}, {self.inner}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::backward<false>({at.input()}, {at.out}, 1.f, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::forward<{at.accumulate()}>({at.grad_out}, {at.grad_input()}, 1.f, nb);"


# Rows and their neighbours ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UnarySavingInput(Unary):
    """A function of each number whose slope its argument tells: Gelu, GeluTanh, Silu, Clamp with its ends."""

    backward_needs_input: ClassVar[bool] = True
    backward_needs_output: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class RMSNorm(Op):
    """RMSNorm of each of `rows` rows of n numbers."""

    n: int
    rows: int
    eps: float

    @property
    def saved_size(self) -> int:
        return self.rows

    def workspace_size(self, lanes: int, blocks: int) -> int:
        return self.n

    def cpp_type(self) -> str:
        return f"RMSNorm<{self.n}>"

    def forward(self, L: str, at: CallContext) -> str:
        rest = f"{at.out}, {at.saved}, {number(self.eps)}, nb * {self.rows}"
        return f"{L}::forward({at.input()}, {at.weight(0)}, {rest});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        rest = f"{at.saved}, {at.grad_out}, {at.grad_input()}, {at.grad_weight(0)}, {at.workspace}, nb * {self.rows}, add"
        add = at.accumulate() if at.grad_input() != "nullptr" else "false"
        yield f"{L}::backward<{add}>({at.input()}, {at.weight(0)}, {rest});"


@dataclass(frozen=True, kw_only=True)
class Softmax(Op):
    """Softmax, or its logarithm, along n of [rows][n][inner]."""

    n: int
    rows: int
    inner: int = 1
    log: bool = False
    backward_needs_input: ClassVar[bool] = False
    backward_needs_output: ClassVar[bool] = True

    def cpp_type(self) -> str:
        return f"{'LogSoftmax' if self.log else 'Softmax'}<{self.n}, {self.inner}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.out}, nb * {self.rows});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::backward<{at.accumulate()}>({at.out}, {at.grad_out}, {at.grad_input()}, nb * {self.rows});"


@dataclass(frozen=True, kw_only=True)
class Dropout(Op):
    """Some of n numbers made 0, `each` that follow each other together; not in evaluation."""

    n: int
    each: int
    p: float
    backward_needs_input: ClassVar[bool] = False

    def cpp_type(self) -> str:
        return f"Dropout<{self.n}, {self.each}, {self.output}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.out}, key, {_drop(self.p)}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::backward<{at.accumulate()}>({at.grad_out}, {at.grad_input()}, key, {_drop(self.p)}, nb);"


def _drop(p: float) -> str:
    """The probability, and what the numbers that are left are multiplied by."""
    return f"{number(p)}, {number(1 / (1 - p) if p < 1 else 0)}"


@dataclass(frozen=True)
class HeadStrides:
    """Where the rows of all heads lie in a block of a value: its size, steps of head and row, and the first's place."""

    block: int
    head: int
    row: int
    start: int = 0

    def __str__(self) -> str:
        return f"HeadStrides<{self.block}, {self.head}, {self.row}>"


@dataclass(frozen=True, kw_only=True)
class ScaledDotProductAttention(Op):
    """From t queries, s keys (of d numbers) and values (of e) of each head to [t][heads * e].

    A fourth input says which keys are absent; the weight at 0 is added to the scores, one for all heads or `each`.
    """

    t: int
    s: int
    d: int
    e: int
    heads: int
    where: tuple[HeadStrides, HeadStrides, HeadStrides, HeadStrides]  # queries, keys, values, outputs
    scale: float
    p: float  # of dropping a weight
    each: bool = False

    @property
    def saved_size(self) -> int:
        return self.heads * self.t * self.s

    def workspace_size(self, lanes: int, blocks: int) -> int:
        return 2 * self.t * self.s

    def cpp_type(self) -> str:
        sizes = (self.t, self.s, self.d, self.e, self.heads, *self.where, self.output)
        return f"ScaledDotProductAttention<{', '.join(map(str, sizes))}>"

    def _given(self, at: CallContext) -> str:
        return ", ".join(f"{at.input(i)} + {self.where[i].start}" for i in range(3))

    def forward(self, L: str, at: CallContext) -> str:
        absent = at.input(3) if len(self.inputs) > 3 else "nullptr"
        mask = f"{at.weight(0)}, {self.t * self.s if self.each else 0}"
        rest = f"{at.out}, {at.saved}, {at.workspace}, key, {number(self.scale)}, {_drop(self.p)}, nb"
        return f"{L}::forward({self._given(at)}, {mask}, {absent}, {rest});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        to = [
            at.grad_input(i)
            if at.grad_input(i) == "nullptr"
            else f"{at.grad_input(i)} + {self.where[i].start}"
            for i in range(3)
        ]
        add = ", ".join(self._add(at, i) for i in range(3))
        rest = f"{at.saved}, {at.workspace}, key, {number(self.scale)}, {_drop(self.p)}, nb"
        yield f"{L}::backward<{add}>({self._given(at)}, {at.grad_out}, {', '.join(to)}, {rest});"

    def _add(self, at: CallContext, i: int) -> str:
        """Chunks of one value that lie beside each other are one writer."""
        beside = [
            j
            for j in range(i)
            if self.inputs[j] == self.inputs[i] and self.where[j].start != self.where[i].start
        ]
        return at.accumulate(beside[0] if beside else i)

    def size_checks(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::kept == {self.saved_size} && {L}::scratch == {self.workspace_size(at.simd_width, at.packs)}"


@dataclass(frozen=True, kw_only=True)
class BatchMatmul(Op):
    """`count` matrix products a sample, [m][k] by [k][n]; where count, row and column of both inputs lie."""

    count: int
    m: int
    n: int
    k: int
    a: tuple[int, int, int]  # steps of count, m and k
    b: tuple[int, int, int]  # of count, n and k

    def cpp_type(self) -> str:
        return f"Products<{', '.join(map(str, (self.count, self.m, self.n, self.k, *self.a, *self.b)))}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input(0)}, {at.input(1)}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        for i, name in enumerate("ab"):
            if at.grad_input(i) != "nullptr":
                yield f"{L}::backward_{name}<{at.accumulate(i)}>({at.input(1 - i)}, {at.grad_out}, {at.grad_input(i)}, nb);"


# Arithmetic -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AffineScalar(Op):
    """a x + b for two numbers a and b."""

    n: int
    a: float = 1.0
    b: float = 0.0
    backward_needs_input: ClassVar[bool] = False

    def cpp_type(self) -> str:
        return f"AffineScalar<{self.n}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.out}, {number(self.a)}, {number(self.b)}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::backward<{at.accumulate()}>({at.grad_out}, {at.grad_input()}, {number(self.a)}, nb);"


@dataclass(frozen=True, kw_only=True)
class Mul(Op):
    """The product of two values of one shape."""

    n: int

    def cpp_type(self) -> str:
        return f"Mul<{self.n}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input(0)}, {at.input(1)}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        for i in range(2):
            if at.grad_input(i) != "nullptr":
                yield f"{L}::backward<{at.accumulate(i)}>({at.input(1 - i)}, {at.grad_out}, {at.grad_input(i)}, nb);"


@dataclass(frozen=True, kw_only=True)
class Div(Op):
    """The quotient of two values of one shape."""

    n: int
    backward_needs_output: ClassVar[bool] = True

    def cpp_type(self) -> str:
        return f"Div<{self.n}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input(0)}, {at.input(1)}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        for i, name in enumerate(("above", "below")):
            if at.grad_input(i) != "nullptr":
                yield f"{L}::{name}<{at.accumulate(i)}>({at.input(1)}, {at.out}, {at.grad_out}, {at.grad_input(i)}, nb);"


@dataclass(frozen=True, kw_only=True)
class AddParam(Op):
    """The same n numbers, trained or not, added to each of `rows` rows."""

    n: int
    rows: int
    backward_needs_input: ClassVar[bool] = False

    def cpp_type(self) -> str:
        return f"AddParam<{self.n}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.weight(0)}, {at.out}, nb * {self.rows});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        add = at.accumulate() if at.grad_input() != "nullptr" else "false"
        yield f"{L}::backward<{add}>({at.grad_out}, {at.grad_input()}, {at.grad_weight(0)}, nb * {self.rows}, add);"


@dataclass(frozen=True, kw_only=True)
class MulParam(Op):
    """Each of `rows` rows times the same n numbers, trained or not."""

    n: int
    rows: int

    def cpp_type(self) -> str:
        return f"MulParam<{self.n}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.weight(0)}, {at.out}, nb * {self.rows});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        add = at.accumulate() if at.grad_input() != "nullptr" else "false"
        rest = f"{at.grad_out}, {at.grad_input()}, {at.grad_weight(0)}, nb * {self.rows}, add"
        yield f"{L}::backward<{add}>({at.input()}, {at.weight(0)}, {rest});"


@dataclass(frozen=True, kw_only=True)
class ExpandParam(Op):
    """The same n numbers, trained or not, for every sample."""

    n: int

    def cpp_type(self) -> str:
        return f"ExpandParam<{self.n}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.weight(0)}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        if at.grad_weight(0) != "nullptr":
            yield f"{L}::backward({at.grad_out}, {at.grad_weight(0)}, nb, add);"


@dataclass(frozen=True, kw_only=True)
class MaskedFill(Op):
    """A number where a mask says so: the second input, or the weight at 0, which all rows of n numbers share."""

    n: int
    rows: int
    value: float

    def cpp_type(self) -> str:
        return f"MaskedFill<{self.n}>"

    def _mask(self, at: CallContext) -> str:
        return at.input(1) if len(self.inputs) > 1 else at.weight(0)

    @property
    def _rows(self) -> str:
        return f"nb * {self.rows}, {self.n if len(self.inputs) > 1 else 0}"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {self._mask(at)}, {number(self.value)}, {at.out}, {self._rows});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        if at.grad_input() != "nullptr":
            yield f"{L}::backward<{at.accumulate()}>({self._mask(at)}, {at.grad_out}, {at.grad_input()}, {self._rows});"


@dataclass(frozen=True, kw_only=True)
class Where(Op):
    """The second value where the first, a mask, says so, else the third."""

    n: int

    def cpp_type(self) -> str:
        return f"Where<{self.n}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input(0)}, {at.input(1)}, {at.input(2)}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        for i in (1, 2):
            if at.grad_input(i) != "nullptr":
                yield f"{L}::backward<{flag(i == 1)}, {at.accumulate(i)}>({at.input(0)}, {at.grad_out}, {at.grad_input(i)}, nb);"


@dataclass(frozen=True, kw_only=True)
class MinMax(Op):
    """The larger, or the smaller, of two values of one shape."""

    n: int
    larger: bool

    def cpp_type(self) -> str:
        return f"MinMax<{self.n}, {flag(self.larger)}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input(0)}, {at.input(1)}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        for i in range(2):
            if at.grad_input(i) != "nullptr":
                yield f"{L}::backward<{at.accumulate(i)}>({at.input(i)}, {at.input(1 - i)}, {at.grad_out}, {at.grad_input(i)}, nb);"


@dataclass(frozen=True, kw_only=True)
class Amax(Op):
    """[outer][dim][inner] to [outer][inner]: the largest over dim; equals share the gradient, or the first takes it."""

    outer: int
    dim: int
    inner: int
    shared: bool
    backward_needs_output: ClassVar[bool] = True

    def cpp_type(self) -> str:
        return f"Amax<{self.outer}, {self.dim}, {self.inner}, {flag(self.shared)}>"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::backward<{at.accumulate()}>({at.input()}, {at.out}, {at.grad_out}, {at.grad_input()}, nb);"


@dataclass(frozen=True, kw_only=True)
class CompareScalar(Op):
    """1 where a comparison with a number holds, else 0: a mask, which has no gradient."""

    n: int
    value: float
    how: str  # = ! < > l g, the last two for at most and at least
    is_differentiable: ClassVar[bool] = False

    def cpp_type(self) -> str:
        return f"CompareScalar<{self.n}, '{self.how}'>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.out}, {number(self.value)}, nb);"


# Parameters alone -------------------------------------------------------------------------------------


def _floats(place: str) -> str:
    return f"(float*)({place})"


@dataclass(frozen=True, kw_only=True)
class LoadParam(Op):
    """A tensor's n numbers, trained or not, to compute with."""

    n: int

    def cpp_type(self) -> str:
        return f"LoadParam<{self.n}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.weight(0)}, {_floats(at.out)});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        if at.grad_weight(0) != "nullptr":
            yield f"{L}::backward({_floats(at.grad_out)}, {at.grad_weight(0)});"


@dataclass(frozen=True, kw_only=True)
class Sum(Op):
    """[outer][dim][inner] to [outer][inner], or with `spread` the other way round, times a number."""

    outer: int
    dim: int
    inner: int
    scale: float = 1.0
    spread: bool = False
    backward_needs_input: ClassVar[bool] = False

    def cpp_type(self) -> str:
        return f"Sums<{self.outer}, {self.dim}, {self.inner}>"

    def forward(self, L: str, at: CallContext) -> str:
        way = "spread" if self.spread else "sum"
        return f"{L}::{way}<false>({_floats(at.input())}, {_floats(at.out)}, {number(self.scale)});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        way = "sum" if self.spread else "spread"
        yield f"{L}::{way}<{at.accumulate()}>({_floats(at.grad_out)}, {_floats(at.grad_input())}, {number(self.scale)});"


@dataclass(frozen=True, kw_only=True)
class Matmul(Op):
    """The product of two matrices, [m][k] by [k][n]."""

    m: int
    k: int
    n: int

    def cpp_type(self) -> str:
        return f"Matmul<{self.m}, {self.k}, {self.n}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({_floats(at.input(0))}, {_floats(at.input(1))}, {_floats(at.out)});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        for i, way in enumerate(("first", "second")):
            if at.grad_input(i) != "nullptr":
                to = f"{_floats(at.grad_out)}, {_floats(at.grad_input(i))}"
                yield f"{L}::{way}<{at.accumulate(i)}>({_floats(at.input(1 - i))}, {to});"


@dataclass(frozen=True, kw_only=True)
class Detach(Op):
    """The same n numbers, taken for given on the way back."""

    n: int
    is_differentiable: ClassVar[bool] = False

    def cpp_type(self) -> str:
        return f"AffineScalar<{self.n}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.out}, 1.f, 0.f, nb);"


# Losses -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CrossEntropyLoss(Op):
    """Cross-entropy of c classes at t places; the weight at 0 weighs classes, and the class `skip` costs nothing."""

    c: int
    t: int
    steps: tuple[int, int]  # of classes and places
    smooth: float
    skip: int

    @property
    def saved_size(self) -> int:
        return self.t

    def cpp_type(self) -> str:
        return f"CrossEntropyLoss<{self.c}, {self.t}, {self.steps[0]}, {self.steps[1]}, {self.skip}>"

    def forward(self, L: str, at: CallContext) -> str:
        given = f"{at.input(0)}, {at.input(1)}, {at.weight(0)}"
        return f"{L}::forward({given}, {at.out}, {at.saved}, {number(self.smooth)}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        if at.grad_input() != "nullptr":
            given = f"{at.input(0)}, {at.input(1)}, {at.weight(0)}, {at.saved}, {at.grad_out}"
            yield f"{L}::backward<{at.accumulate()}>({given}, {at.grad_input()}, {number(self.smooth)}, nb);"


@dataclass(frozen=True, kw_only=True)
class Gather(Op):
    """From [outer][n][inner] by the numbers [outer][k][inner] of the second input; `skip` gives 0."""

    outer: int
    n: int
    k: int
    inner: int
    skip: int

    def cpp_type(self) -> str:
        return f"Gather<{self.outer}, {self.n}, {self.k}, {self.inner}, {self.skip}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input(0)}, {at.input(1)}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        if at.grad_input() != "nullptr":
            yield f"{L}::backward<{at.accumulate()}>({at.input(1)}, {at.grad_out}, {at.grad_input()}, nb);"


@dataclass(frozen=True, kw_only=True)
class OneHot(Op):
    """Each of n numbers of classes as c numbers, 1 in its place."""

    n: int
    c: int
    is_differentiable: ClassVar[bool] = False

    def cpp_type(self) -> str:
        return f"OneHot<{self.n}, {self.c}>"
