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
class Place:
    """Where a tensor's numbers lie: in the vector that is trained, among the constants beside it, or in a value.

    Such a value is computed from parameters alone, and the same for all samples.
    """

    offset: int
    trained: bool = True
    value: int | None = None


class At(Protocol):
    """What an operation's surroundings are called in the source, at the moment of one of its calls."""

    blocks: int
    lanes: int

    @property
    def y(self) -> str: ...
    @property
    def dy(self) -> str: ...
    @property
    def kept(self) -> str: ...
    @property
    def scratch(self) -> str: ...
    def x(self, i: int = 0) -> str: ...
    def dx(self, i: int = 0) -> str: ...  # "nullptr" where nobody asks for it
    def add(self, i: int = 0) -> str: ...  # whether dx holds another operation's share already
    def w(self, i: int) -> str: ...
    def dw(self, i: int) -> str: ...  # "nullptr" where the weight is not trained
    def from_table(self) -> bool: ...  # whether the input is the model's
    def from_rows(self) -> bool: ...  # and is read as it lies in the table


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation: the values it reads, the one it writes, its weights' places."""

    inputs: tuple[int, ...]
    output: int
    weights: tuple[Place | None, ...] = ()
    reads_inputs: ClassVar[bool] = True  # on the way back; where nobody does, a value's room is used again
    reads_output: ClassVar[bool] = False
    mixes: ClassVar[bool] = False  # samples of a batch, all of which must then be in one chunk
    moves: ClassVar[bool] = True  # with its inputs, so that there is a gradient

    @property
    def computed(self) -> tuple[int, ...]:
        """The values that its weights are."""
        return tuple(w.value for w in self.weights if w is not None and w.value is not None)

    @property
    def reads(self) -> tuple[int, ...]:
        return self.inputs + self.computed

    @property
    def trains(self) -> bool:
        """Whether a weight of its own is trained."""
        return any(w is not None and w.trained for w in self.weights)

    @property
    def once(self) -> bool:
        """Whether each number of a weight's gradient is written once for all samples of a chunk."""
        return True

    @property
    def kept(self) -> int:
        """What the way there leaves for the way back, in vectors per block."""
        return 0

    def scratch(self, lanes: int, blocks: int) -> int:
        """Room that a call needs for itself, in vectors."""
        return 0

    def type(self) -> str:
        raise NotImplementedError

    def forward(self, L: str, at: At) -> str:
        """The call on the way there."""
        return f"{L}::forward({at.x()}, {at.y}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        """The calls on the way back."""
        yield f"{L}::backward<{at.add()}>({at.y if self.reads_output else at.x()}, {at.dy}, {at.dx()}, nb);"

    def squares(self, L: str, at: At) -> Iterator[str] | None:
        """Calls that add each sample's squared gradient of the weights to `squares`, after the way back to the inputs.

        None where there are none, though there are weights.
        """
        return None if self.trains else iter(())

    def agreements(self, L: str, at: At) -> Iterator[str]:
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
    def once(self) -> bool:
        return self.rows == 1

    def scratch(self, lanes: int, blocks: int) -> int:
        i, o = (-(-n // lanes) * lanes for n in (self.i, self.o))
        if self.rows > 1 and (i, o) == (self.i, self.o) and min(i, o) >= WIDE_ROWS:
            return i * o // lanes + PIECE * (i + o) + max(i, o) + max(i, o) // lanes
        return (i + o) * (blocks if self.rows == 1 else min(PIECE, blocks * self.rows))

    def type(self) -> str:
        return f"Linear<{self.i}, {self.o}>"

    def forward(self, L: str, at: At) -> str:
        if at.from_rows():
            return f"{L}::forward_rows(rows, {at.w(0)}, {at.w(1)}, {at.y}, nb);"
        if self.rows > 1:
            to = f"{at.y}, {at.scratch}, nb, {self.rows}, samples"
            return f"{self._sequence}::forward({at.x()}, {at.w(0)}, {at.w(1)}, {to});"
        return f"{L}::forward({at.x()}, {at.w(0)}, {at.w(1)}, {at.y}, nb);"

    @property
    def _sequence(self) -> str:
        return f"Sequence<{self.i}, {self.o}>"

    def backward(self, L: str, at: At) -> Iterator[str]:
        if at.dw(0) != "nullptr":
            if self.rows > 1:
                to = f"{at.dw(0)}, {at.scratch}, nb, {self.rows}, samples"
                yield f"{L}::weight_sequence({at.x()}, {at.dy}, {to});"
            elif at.from_table() and self.i % at.lanes == 0:  # the rows are what the turned inputs would be
                to = f"{at.dw(0)}, (float*)({at.scratch})"
                yield f"{L}::weight_rows(rows, {at.dy}, {to}, nb, samples, add);"
            else:
                yield f"{L}::weight({at.x()}, {at.dy}, {at.dw(0)}, {at.scratch}, nb, samples, add);"
        if at.dw(1) != "nullptr":
            yield f"{L}::bias({at.dy}, {at.dw(1)}, nb * {self.rows}, {self.o}, add);"
        if at.dx() != "nullptr" and self.rows > 1:
            to = f"{at.dx()}, {at.scratch}, nb, {self.rows}, samples"
            yield f"{self._sequence}::backward_input<{at.add()}>({at.dy}, {at.w(0)}, {to});"
        elif at.dx() != "nullptr":
            yield f"{L}::backward_input<{at.add()}>({at.dy}, {at.w(0)}, {at.dx()}, nb);"

    def squares(self, L: str, at: At) -> Iterator[str]:
        if self.rows > 1:
            yield f"Squares<{L}>::of_sequence({at.x()}, {at.dy}, squares, nb, {self.rows}, {self._trained()});"
        elif at.from_rows():
            yield f"Squares<{L}>::of_rows(rows, {at.dy}, squares, nb, {self._trained()});"
        else:
            yield f"Squares<{L}>::of({at.x()}, {at.dy}, squares, nb, {self._trained()});"

    def agreements(self, L: str, at: At) -> Iterator[str]:
        n = at.blocks if self.rows == 1 else min(PIECE, at.blocks * self.rows)
        room = f"{L}::turned * {n}" if self.rows == 1 else f"{self._sequence}::scratch({L}::turned * {n})"
        yield f"{room} == {self.scratch(at.lanes, at.blocks)}"


@dataclass(frozen=True, kw_only=True)
class Turned(Op):
    """Each of `rows` rows of i numbers times a matrix [i][o]: a linear map from o to i, the other way round."""

    i: int
    o: int
    rows: int = 1

    @property
    def once(self) -> bool:
        return self.rows == 1

    def scratch(self, lanes: int, blocks: int) -> int:
        i, o = (-(-n // lanes) * lanes for n in (self.i, self.o))
        return (i + o) * (blocks if self.rows == 1 else min(PIECE, blocks * self.rows))

    def type(self) -> str:
        return f"Linear<{self.o}, {self.i}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::backward_input<false>({at.x()}, {at.w(0)}, {at.y}, nb * {self.rows});"

    def backward(self, L: str, at: At) -> Iterator[str]:
        if at.dw(0) != "nullptr" and self.rows > 1:
            to = f"{at.dw(0)}, {at.scratch}, nb, {self.rows}, samples"
            yield f"{L}::weight_sequence({at.dy}, {at.x()}, {to});"
        elif at.dw(0) != "nullptr":
            yield f"{L}::weight({at.dy}, {at.x()}, {at.dw(0)}, {at.scratch}, nb, samples, add);"
        if at.dx() != "nullptr":
            flags = f"{self.o}, {self.i}, 1, {self.o}, {at.add()}"
            yield f"{L}::run<{flags}>({at.dy}, {at.w(0)}, nullptr, {at.dx()}, nb * {self.rows});"


@dataclass(frozen=True, kw_only=True)
class Embedding(Op):
    """Rows of a table by number, `t` of them a sample; the row `skip` is not trained."""

    count: int
    f: int
    t: int
    skip: int = -1

    @property
    def once(self) -> bool:
        return False

    def scratch(self, lanes: int, blocks: int) -> int:
        return -(-self.f // lanes) * lanes

    def type(self) -> str:
        return f"Embedding<{self.count}, {self.f}, {self.t}, {self.skip}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x()}, {at.w(0)}, {at.y}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::backward({at.x()}, {at.dy}, {at.dw(0)}, {at.scratch}, nb, samples);"

    def agreements(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::scratch == {self.scratch(at.lanes, at.blocks)}"


_CELLS = {"GruCell": (3, 4, 2), "LstmCell": (4, 5, 4), "TanhCell": (1, 1, 1)}  # GATES, KEPT, JOINT


@dataclass(frozen=True, kw_only=True)
class Recurrent(Op):
    """One layer of a recurrent net in one direction: [t][i] to [t][h]; weights wi, wh, bi, bh.

    With `cells` the last cell is one more row. More inputs are the state before the first step, and the cell.
    """

    cell: str
    i: int
    h: int
    t: int
    reversed: bool = False
    cells: bool = False
    reads_output: ClassVar[bool] = True

    @property
    def once(self) -> bool:
        return False

    @property
    def kept(self) -> int:
        return self.t * self.h * _CELLS[self.cell][1]

    def scratch(self, lanes: int, blocks: int) -> int:
        gates, _, joint = _CELLS[self.cell]
        i, h, g, j = (-(-n // lanes) * lanes for n in (self.i, self.h, gates * self.h, joint * self.h))
        more = blocks * max(gates * self.h, 2 * self.h)
        if self.h % lanes or self.h < WIDE_ROWS or len(self.inputs) > 1:
            return max(more, PIECE * max(i + g, h + j))
        packed = gates * h * max(i, h) // lanes + 1
        return packed + (self.t * blocks + 1) * (i + 2 * h) + more + i // lanes + 1

    def type(self) -> str:
        options = [self.reversed, self.cells, len(self.inputs) > 1]
        while not options[-1] and len(options) > 1:
            options.pop()
        return f"Recurrent<{self.cell}, {self.i}, {self.h}, {self.t}, {', '.join(map(flag, options))}>"

    def _first(self, of: Callable[[int], str]) -> str:
        return ", ".join(of(i) if len(self.inputs) > i else "nullptr" for i in (1, 2))

    def forward(self, L: str, at: At) -> str:
        weights = ", ".join(at.w(k) for k in range(4))
        given = f"{at.x()}, {self._first(at.x)}, {weights}"
        return f"{L}::forward({given}, {at.y}, {at.kept}, {at.scratch}, nb, samples);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        grads = ", ".join(at.dw(k) for k in range(4))
        add = at.add() if at.dx() != "nullptr" else "false"
        states = [self._first(at.x), self._first(at.dx), self._first(at.add).replace("nullptr", "false")]
        first = f", {{{', '.join(states)}}}" if len(self.inputs) > 1 else ""
        yield (
            f"{L}::backward<{add}>({at.x()}, {at.y}, {at.w(0)}, {at.w(1)}, {at.dy}, {at.dx()}, {grads},"
            f" {at.kept}, {at.scratch}, nb, samples{first});"
        )

    def agreements(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::kept == {self.kept}"
        yield f"{L}::scratch({at.blocks}) == {self.scratch(at.lanes, at.blocks)}"


# Images -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Conv(Op):
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
    def once(self) -> bool:
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
    def kept(self) -> int:
        return self._kept * self.groups * self.rows

    def scratch(self, lanes: int, blocks: int) -> int:
        if tile := self._tile:
            places, inputs, both = (tile + 2) ** 2, -(-self.i // lanes) * lanes, self.i + self.o
            panel = max(8 if tile == 2 else 4, min(64, 147456 // lanes // places // both // 4 * 4))
            return places * (self.o * inputs + 16) // lanes + places * ((inputs + self.o) * panel + 4)
        weights = self.o * self.i * math.prod(self.kernel)
        far = [n + d * (k - 1) for n, d, k in zip((self.h, self.w), self.dilation, self.kernel)]
        return weights // lanes + 1 + self.o * math.prod(far)

    def type(self) -> str:
        numbers = (self.i, self.h, self.w, self.o, *self.kernel, *self.stride, *self.padding)
        more = () if self.dilation == (1, 1) else self.dilation
        return f"Conv<{', '.join(map(str, (*numbers, *more)))}>"

    def forward(self, L: str, at: At) -> str:
        x, w, b, y, kept, loop, nb = self._where(L, at.x(), at.w(0), at.w(1), at.y, at.kept)
        return f"{loop}{L}::forward({x}, {w}, {b}, {y}, {kept}, {at.scratch}, {nb});"

    def backward(self, L: str, at: At) -> Iterator[str]:
        x, dw, db, dy, kept, loop, nb = self._where(L, at.x(), at.dw(0), at.dw(1), at.dy, at.kept)
        if (dw, db) != ("nullptr", "nullptr"):
            yield f"{loop}{L}::backward_weight({x}, {dy}, {dw}, {db}, {kept}, {at.scratch}, {nb}, add);"
        if at.dx() != "nullptr":
            dx, w, _, dy, _, loop, nb = self._where(L, at.dx(), at.w(0), "nullptr", at.dy, at.kept)
            yield f"{loop}{L}::backward_input<{at.add()}>({dy}, {w}, {dx}, {at.scratch}, {nb});"

    def squares(self, L: str, at: At) -> Iterator[str] | None:
        if self.rows > 1:
            return None
        loop = (
            f"for (int n = 0; n < nb; n++) for (int k = n * {self.groups}; k < (n + 1) * {self.groups}; k++) "
        )
        each = f"{at.x()} + k * {L}::in_size, {at.dy} + k * {L}::out_size, {at.kept} + k * {L}::kept"
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

    def agreements(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::scratch == {self.scratch(at.lanes, at.blocks)}"
        yield f"{L}::kept == {self._kept}"


@dataclass(frozen=True, kw_only=True)
class Pool(Op):
    """What both poolings are: windows of each channel."""

    c: int
    h: int
    w: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    beyond: tuple[int, int] = (0, 0)  # how far the last windows reach out

    def type(self) -> str:
        numbers = (self.c, self.h, self.w, *self.kernel, *self.stride, *self.padding, *self.beyond)
        return f"Pool<{', '.join(map(str, numbers))}>"


@dataclass(frozen=True, kw_only=True)
class MaxPool(Pool):
    """The largest of a window, and of 0 where a ReLU is part of it."""

    rectify: bool = False
    reads_output: ClassVar[bool] = True

    def forward(self, L: str, at: At) -> str:
        return f"{L}::max_forward<{flag(self.rectify)}>({at.x()}, {at.y}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        flags = f"{flag(self.rectify)}, {at.add()}"
        yield f"{L}::max_backward<{flags}>({at.x()}, {at.y}, {at.dy}, {at.dx()}, nb);"


@dataclass(frozen=True, kw_only=True)
class Pooled(Conv):
    """A convolution of the model's input, and the largest of each window of it: windows neither overlap nor leave it."""

    pool: MaxPool

    @classmethod
    def suits(cls, conv: Conv, pool: MaxPool) -> bool:
        """Whether a convolution of an input and a pooling of what it gives are one."""
        whole = pool.kernel == pool.stride and pool.padding == pool.beyond == (0, 0)
        return conv.groups == conv.rows == 1 and not conv._tile and whole

    @classmethod
    def of(cls, conv: Conv, pool: MaxPool) -> Pooled:
        given = {f.name: getattr(conv, f.name) for f in fields(conv)}
        return cls(**given | {"output": pool.output}, pool=pool)

    @property
    def kept(self) -> int:
        pooled = [(n - k) // k + 1 for n, k in zip((self.pool.h, self.pool.w), self.pool.kernel)]
        return self._kept + (self.o * math.prod(pooled) + 3) // 4

    def scratch(self, lanes: int, blocks: int) -> int:
        taps = self.i * math.prod(self.kernel)
        return self.o * taps // lanes + 1 + min(12, self.o) * (self.pool.h * self.pool.w + taps)

    def type(self) -> str:
        taps, rectify = math.prod(self.kernel), flag(self.pool.rectify)
        return f"Pooled<{super().type()}, {self.pool.type()}, {self.i}, {taps}, {rectify}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x()}, {at.w(0)}, {at.w(1)}, {at.y}, {at.kept}, {at.scratch}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::backward({at.x()}, {at.dy}, {at.dw(0)}, {at.dw(1)}, {at.kept}, {at.scratch}, nb, add);"

    def squares(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::squares({at.x()}, {at.dy}, {at.kept}, {at.scratch}, squares, nb, {self._trained()});"

    def agreements(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::scratch == {self.scratch(at.lanes, at.blocks)}"
        yield f"{L}::kept == {self.kept}"


@dataclass(frozen=True, kw_only=True)
class MeanPool(Pool):
    """The mean of a window; `divisor` 0 counts the places inside the image."""

    divisor: int = 0
    reads_inputs: ClassVar[bool] = False

    def forward(self, L: str, at: At) -> str:
        return f"{L}::mean_forward<{self.divisor}>({at.x()}, {at.y}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::mean_backward<{self.divisor}, {at.add()}>({at.dy}, {at.dx()}, nb);"


@dataclass(frozen=True, kw_only=True)
class Transposed(Op):
    """The way back through a convolution, taken forward."""

    conv: Conv  # from the output to the input

    @property
    def kept(self) -> int:
        return self.conv.kept

    def scratch(self, lanes: int, blocks: int) -> int:
        return self.conv.scratch(lanes, blocks)

    def type(self) -> str:
        return f"Transposed<{self.conv.type()}, {self.conv.i}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x()}, {at.w(0)}, {at.w(1)}, {at.y}, {at.scratch}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        add = at.add() if at.dx() != "nullptr" else "false"
        to = f"{at.dx()}, {at.dw(0)}, {at.dw(1)}, {at.kept}, {at.scratch}, nb, add"
        yield f"{L}::backward<{add}>({at.x()}, {at.w(0)}, {at.dy}, {to});"

    def agreements(self, L: str, at: At) -> Iterator[str]:
        yield from self.conv.agreements(f"{self.conv.type()}", at)


@dataclass(frozen=True, kw_only=True)
class Adaptive(Op):
    """The mean of windows that cut [c][h][w] as evenly as can be."""

    c: int
    h: int
    w: int
    out: tuple[int, int]
    reads_inputs: ClassVar[bool] = False

    def type(self) -> str:
        return f"Adaptive<{self.c}, {self.h}, {self.w}, {self.out[0]}, {self.out[1]}>"

    def backward(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::backward<{at.add()}>({at.dy}, {at.dx()}, nb);"


@dataclass(frozen=True, kw_only=True)
class Border(Op):
    """Zeros around [c][h][w], from so many above and to the left on."""

    c: int
    h: int
    w: int
    first: tuple[int, int]
    out: tuple[int, int]
    reads_inputs: ClassVar[bool] = False

    def type(self) -> str:
        return f"Border<{', '.join(map(str, (self.c, self.h, self.w, *self.first, *self.out)))}>"

    def backward(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::backward<{at.add()}>({at.dy}, {at.dx()}, nb);"


@dataclass(frozen=True, kw_only=True)
class Depths(Op):
    """[c][d][inner] to [out][c][kernel][inner]: what each place along the depth sees, zeros where that is outside."""

    c: int
    d: int
    inner: int
    out: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    reads_inputs: ClassVar[bool] = False

    def type(self) -> str:
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
        return f"Depths<{', '.join(map(str, numbers))}>"

    def backward(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::backward<{at.add()}>({at.dy}, {at.dx()}, nb);"


@dataclass(frozen=True, kw_only=True)
class Norm(Op):
    """GroupNorm of [c][each] in each of `rows` rows; LayerNorm is one group of channels of one number."""

    c: int
    each: int
    groups: int
    eps: float
    rows: int = 1

    @property
    def kept(self) -> int:
        return 2 * self.groups * self.rows

    def scratch(self, lanes: int, blocks: int) -> int:
        return 2 * self.c

    def type(self) -> str:
        return f"GroupNorm<{self.c}, {self.each}, {self.groups}>"

    def forward(self, L: str, at: At) -> str:
        rest = f"{at.kept}, {number(self.eps)}, nb * {self.rows}"
        return f"{L}::forward({at.x()}, {at.w(0)}, {at.w(1)}, {at.y}, {rest});"

    def backward(self, L: str, at: At) -> Iterator[str]:
        wanted = at.dx() != "nullptr"
        flags = f"{at.add() if wanted else 'false'}, {flag(wanted)}"
        rest = f"{at.dy}, {at.dx()}, {at.dw(0)}, {at.dw(1)}, {at.scratch}, nb * {self.rows}, add"
        yield f"{L}::backward<{flags}>({at.x()}, {at.w(0)}, {at.kept}, {rest});"

    def squares(self, L: str, at: At) -> Iterator[str] | None:
        if not all(w is not None and w.trained for w in self.weights):
            return super().squares(L, at)
        return self._squares(L, at)

    def _squares(self, L: str, at: At) -> Iterator[str]:
        step = self.rows * self.c * self.each
        given = f"{at.x()} + n * {step}, {at.w(0)}, {at.kept} + n * {self.kept}, {at.dy} + n * {step}"
        yield (
            f"for (int n = 0; n < nb; n++) {L}::backward<false, false>({given}, nullptr, nullptr, nullptr, {at.scratch},"
            f" {self.rows}, false), squares[n] += square_sum({at.scratch}, {L}::sums);"
        )

    def agreements(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::sums == {self.scratch(at.lanes, at.blocks)}"
        yield f"{L}::kept * {self.rows} == {self.kept}"


@dataclass(frozen=True, kw_only=True)
class BatchNorm(Op):
    """BatchNorm of [c][each] over the batch; weights: scale, shift, and the running mean and variance."""

    c: int
    each: int
    eps: float
    momentum: float
    mixes: ClassVar[bool] = True

    @property
    def kept(self) -> int:
        return 3 * self.c

    def type(self) -> str:
        return f"BatchNorm<{self.c}, {self.each}>"

    def forward(self, L: str, at: At) -> str:
        weights = ", ".join(at.w(k) for k in range(4))
        return f"{L}::forward({at.x()}, {weights}, {at.y}, {at.kept}, {number(self.eps)}, key, samples, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        wanted = at.dx() != "nullptr"
        flags = f"{at.add() if wanted else 'false'}, {flag(wanted)}"
        grads = ", ".join(at.dw(k) for k in range(4))
        given = f"{at.x()}, {at.w(0)}, {at.w(2)}, {at.w(3)}, {at.kept}, {at.dy}, {at.dx()}"
        yield f"{L}::backward<{flags}>({given}, {grads}, {number(self.momentum)}, samples, nb, add);"

    def agreements(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::kept == {self.kept}"


# Numbers one by one -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Map(Op):
    """A function of each number whose slope its value tells: Relu, Tanh, Sigmoid, or Leaky with its slope."""

    function: str
    n: int
    reads_inputs: ClassVar[bool] = False
    reads_output: ClassVar[bool] = True

    def type(self) -> str:
        return f"Map<{self.function}, {self.n}>"


@dataclass(frozen=True, kw_only=True)
class Add(Op):
    """The sum of two values of one shape."""

    n: int
    reads_inputs: ClassVar[bool] = False

    def type(self) -> str:
        return f"Add<{self.n}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x(0)}, {at.x(1)}, {at.y}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        for i in range(2):
            if at.dx(i) != "nullptr":
                yield f"{L}::backward<{at.add(i)}>({at.dy}, {at.dx(i)}, nb);"


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
    reads_inputs: ClassVar[bool] = False

    def type(self) -> str:
        numbers = (self.outer, self.dim, self.inner, self.start, self.count, self.step)
        return f"Slice<{', '.join(map(str, numbers))}>"

    def backward(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::backward<{at.add()}>({at.dy}, {at.dx()}, nb);"


@dataclass(frozen=True, kw_only=True)
class Concat(Op):
    """[outer][a] and [outer][b] to [outer][a + b]."""

    outer: int
    a: int
    b: int
    reads_inputs: ClassVar[bool] = False

    def type(self) -> str:
        return f"Concat<{self.outer}, {self.a}, {self.b}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x(0)}, {at.x(1)}, {at.y}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        for i in range(2):
            if at.dx(i) != "nullptr":
                yield f"{L}::backward<{i}, {at.add(i)}>({at.dy}, {at.dx(i)}, nb);"


@dataclass(frozen=True, kw_only=True)
class Permute(Op):
    """Dimensions in another order, in each of `rows` rows."""

    sizes: Shape
    order: Shape
    rows: int = 1
    reads_inputs: ClassVar[bool] = False

    def type(self) -> str:
        steps = [math.prod(self.sizes[d + 1 :]) for d in self.order]
        sizes = [self.sizes[d] for d in self.order]
        pad = 4 - len(sizes)
        return f"Permute<{', '.join(map(str, [1] * pad + sizes + [0] * pad + steps))}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x()}, {at.y}, nb * {self.rows});"

    def backward(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::backward<{at.add()}>({at.dy}, {at.dx()}, nb * {self.rows});"


@dataclass(frozen=True, kw_only=True)
class Mean(Op):
    """[outer][dim][inner] to [outer][inner]: the mean, or the sum, over dim."""

    outer: int
    dim: int
    inner: int
    scale: float
    reads_inputs: ClassVar[bool] = False

    def type(self) -> str:
        return f"Mean<{self.outer}, {self.dim}, {self.inner}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward<false>({at.x()}, {at.y}, {number(self.scale)}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::backward<{at.add()}>({at.dy}, {at.dx()}, {number(self.scale)}, nb);"


@dataclass(frozen=True, kw_only=True)
class Expand(Op):
    """[outer][inner] to [outer][dim][inner]: the same for all of dim. A sum over dim, the other way round."""

    outer: int
    dim: int
    inner: int
    reads_inputs: ClassVar[bool] = False

    def type(self) -> str:
        return f"Mean<{self.outer}, {self.dim}, {self.inner}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::backward<false>({at.x()}, {at.y}, 1.f, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::forward<{at.add()}>({at.dy}, {at.dx()}, 1.f, nb);"


# Rows and their neighbours ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Curve(Map):
    """A function of each number whose slope its argument tells: Gelu, GeluTanh, Silu, Clamp with its ends."""

    reads_inputs: ClassVar[bool] = True
    reads_output: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Rms(Op):
    """RMSNorm of each of `rows` rows of n numbers."""

    n: int
    rows: int
    eps: float

    @property
    def kept(self) -> int:
        return self.rows

    def scratch(self, lanes: int, blocks: int) -> int:
        return self.n

    def type(self) -> str:
        return f"RmsNorm<{self.n}>"

    def forward(self, L: str, at: At) -> str:
        rest = f"{at.y}, {at.kept}, {number(self.eps)}, nb * {self.rows}"
        return f"{L}::forward({at.x()}, {at.w(0)}, {rest});"

    def backward(self, L: str, at: At) -> Iterator[str]:
        rest = f"{at.kept}, {at.dy}, {at.dx()}, {at.dw(0)}, {at.scratch}, nb * {self.rows}, add"
        add = at.add() if at.dx() != "nullptr" else "false"
        yield f"{L}::backward<{add}>({at.x()}, {at.w(0)}, {rest});"


@dataclass(frozen=True, kw_only=True)
class Softmax(Op):
    """Softmax, or its logarithm, along n of [rows][n][inner]."""

    n: int
    rows: int
    inner: int = 1
    log: bool = False
    reads_inputs: ClassVar[bool] = False
    reads_output: ClassVar[bool] = True

    def type(self) -> str:
        return f"{'LogSoftmax' if self.log else 'Softmax'}<{self.n}, {self.inner}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x()}, {at.y}, nb * {self.rows});"

    def backward(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::backward<{at.add()}>({at.y}, {at.dy}, {at.dx()}, nb * {self.rows});"


@dataclass(frozen=True, kw_only=True)
class Dropout(Op):
    """Some of n numbers made 0, `each` that follow each other together; not in evaluation."""

    n: int
    each: int
    p: float
    reads_inputs: ClassVar[bool] = False

    def type(self) -> str:
        return f"Dropout<{self.n}, {self.each}, {self.output}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x()}, {at.y}, key, {_drop(self.p)}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::backward<{at.add()}>({at.dy}, {at.dx()}, key, {_drop(self.p)}, nb);"


def _drop(p: float) -> str:
    """The probability, and what the numbers that are left are multiplied by."""
    return f"{number(p)}, {number(1 / (1 - p) if p < 1 else 0)}"


@dataclass(frozen=True)
class Rows:
    """Where the rows of all heads lie in a block of a value: its size, steps of head and row, and the first's place."""

    block: int
    head: int
    row: int
    start: int = 0

    def __str__(self) -> str:
        return f"Rows<{self.block}, {self.head}, {self.row}>"


@dataclass(frozen=True, kw_only=True)
class Attention(Op):
    """From t queries, s keys (of d numbers) and values (of e) of each head to [t][heads * e].

    A fourth input says which keys are absent; the weight at 0 is added to the scores, one for all heads or `each`.
    """

    t: int
    s: int
    d: int
    e: int
    heads: int
    where: tuple[Rows, Rows, Rows, Rows]  # queries, keys, values, outputs
    scale: float
    p: float  # of dropping a weight
    each: bool = False

    @property
    def kept(self) -> int:
        return self.heads * self.t * self.s

    def scratch(self, lanes: int, blocks: int) -> int:
        return 2 * self.t * self.s

    def type(self) -> str:
        sizes = (self.t, self.s, self.d, self.e, self.heads, *self.where, self.output)
        return f"Attention<{', '.join(map(str, sizes))}>"

    def _given(self, at: At) -> str:
        return ", ".join(f"{at.x(i)} + {self.where[i].start}" for i in range(3))

    def forward(self, L: str, at: At) -> str:
        absent = at.x(3) if len(self.inputs) > 3 else "nullptr"
        mask = f"{at.w(0)}, {self.t * self.s if self.each else 0}"
        rest = f"{at.y}, {at.kept}, {at.scratch}, key, {number(self.scale)}, {_drop(self.p)}, nb"
        return f"{L}::forward({self._given(at)}, {mask}, {absent}, {rest});"

    def backward(self, L: str, at: At) -> Iterator[str]:
        to = [at.dx(i) if at.dx(i) == "nullptr" else f"{at.dx(i)} + {self.where[i].start}" for i in range(3)]
        add = ", ".join(self._add(at, i) for i in range(3))
        rest = f"{at.kept}, {at.scratch}, key, {number(self.scale)}, {_drop(self.p)}, nb"
        yield f"{L}::backward<{add}>({self._given(at)}, {at.dy}, {', '.join(to)}, {rest});"

    def _add(self, at: At, i: int) -> str:
        """Chunks of one value that lie beside each other are one writer."""
        beside = [
            j
            for j in range(i)
            if self.inputs[j] == self.inputs[i] and self.where[j].start != self.where[i].start
        ]
        return at.add(beside[0] if beside else i)

    def agreements(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::kept == {self.kept} && {L}::scratch == {self.scratch(at.lanes, at.blocks)}"


@dataclass(frozen=True, kw_only=True)
class Product(Op):
    """`count` matrix products a sample, [m][k] by [k][n]; where count, row and column of both inputs lie."""

    count: int
    m: int
    n: int
    k: int
    a: tuple[int, int, int]  # steps of count, m and k
    b: tuple[int, int, int]  # of count, n and k

    def type(self) -> str:
        return f"Products<{', '.join(map(str, (self.count, self.m, self.n, self.k, *self.a, *self.b)))}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x(0)}, {at.x(1)}, {at.y}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        for i, name in enumerate("ab"):
            if at.dx(i) != "nullptr":
                yield f"{L}::backward_{name}<{at.add(i)}>({at.x(1 - i)}, {at.dy}, {at.dx(i)}, nb);"


# Arithmetic -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Affine(Op):
    """a x + b for two numbers a and b."""

    n: int
    a: float = 1.0
    b: float = 0.0
    reads_inputs: ClassVar[bool] = False

    def type(self) -> str:
        return f"Affine<{self.n}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x()}, {at.y}, {number(self.a)}, {number(self.b)}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::backward<{at.add()}>({at.dy}, {at.dx()}, {number(self.a)}, nb);"


@dataclass(frozen=True, kw_only=True)
class Multiply(Op):
    """The product of two values of one shape."""

    n: int

    def type(self) -> str:
        return f"Multiply<{self.n}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x(0)}, {at.x(1)}, {at.y}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        for i in range(2):
            if at.dx(i) != "nullptr":
                yield f"{L}::backward<{at.add(i)}>({at.x(1 - i)}, {at.dy}, {at.dx(i)}, nb);"


@dataclass(frozen=True, kw_only=True)
class Divide(Op):
    """The quotient of two values of one shape."""

    n: int
    reads_output: ClassVar[bool] = True

    def type(self) -> str:
        return f"Divide<{self.n}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x(0)}, {at.x(1)}, {at.y}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        for i, name in enumerate(("above", "below")):
            if at.dx(i) != "nullptr":
                yield f"{L}::{name}<{at.add(i)}>({at.x(1)}, {at.y}, {at.dy}, {at.dx(i)}, nb);"


@dataclass(frozen=True, kw_only=True)
class Shift(Op):
    """The same n numbers, trained or not, added to each of `rows` rows."""

    n: int
    rows: int
    reads_inputs: ClassVar[bool] = False

    def type(self) -> str:
        return f"Shift<{self.n}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x()}, {at.w(0)}, {at.y}, nb * {self.rows});"

    def backward(self, L: str, at: At) -> Iterator[str]:
        add = at.add() if at.dx() != "nullptr" else "false"
        yield f"{L}::backward<{add}>({at.dy}, {at.dx()}, {at.dw(0)}, nb * {self.rows}, add);"


@dataclass(frozen=True, kw_only=True)
class Scale(Op):
    """Each of `rows` rows times the same n numbers, trained or not."""

    n: int
    rows: int

    def type(self) -> str:
        return f"Scale<{self.n}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x()}, {at.w(0)}, {at.y}, nb * {self.rows});"

    def backward(self, L: str, at: At) -> Iterator[str]:
        add = at.add() if at.dx() != "nullptr" else "false"
        rest = f"{at.dy}, {at.dx()}, {at.dw(0)}, nb * {self.rows}, add"
        yield f"{L}::backward<{add}>({at.x()}, {at.w(0)}, {rest});"


@dataclass(frozen=True, kw_only=True)
class Given(Op):
    """The same n numbers, trained or not, for every sample."""

    n: int

    def type(self) -> str:
        return f"Given<{self.n}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.w(0)}, {at.y}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        if at.dw(0) != "nullptr":
            yield f"{L}::backward({at.dy}, {at.dw(0)}, nb, add);"


@dataclass(frozen=True, kw_only=True)
class Fill(Op):
    """A number where a mask says so: the second input, or the weight at 0, which all rows of n numbers share."""

    n: int
    rows: int
    value: float

    def type(self) -> str:
        return f"Fill<{self.n}>"

    def _mask(self, at: At) -> str:
        return at.x(1) if len(self.inputs) > 1 else at.w(0)

    @property
    def _rows(self) -> str:
        return f"nb * {self.rows}, {self.n if len(self.inputs) > 1 else 0}"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x()}, {self._mask(at)}, {number(self.value)}, {at.y}, {self._rows});"

    def backward(self, L: str, at: At) -> Iterator[str]:
        if at.dx() != "nullptr":
            yield f"{L}::backward<{at.add()}>({self._mask(at)}, {at.dy}, {at.dx()}, {self._rows});"


@dataclass(frozen=True, kw_only=True)
class Choose(Op):
    """The second value where the first, a mask, says so, else the third."""

    n: int

    def type(self) -> str:
        return f"Choose<{self.n}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x(0)}, {at.x(1)}, {at.x(2)}, {at.y}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        for i in (1, 2):
            if at.dx(i) != "nullptr":
                yield f"{L}::backward<{flag(i == 1)}, {at.add(i)}>({at.x(0)}, {at.dy}, {at.dx(i)}, nb);"


@dataclass(frozen=True, kw_only=True)
class Extreme(Op):
    """The larger, or the smaller, of two values of one shape."""

    n: int
    larger: bool

    def type(self) -> str:
        return f"Extreme<{self.n}, {flag(self.larger)}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x(0)}, {at.x(1)}, {at.y}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        for i in range(2):
            if at.dx(i) != "nullptr":
                yield f"{L}::backward<{at.add(i)}>({at.x(i)}, {at.x(1 - i)}, {at.dy}, {at.dx(i)}, nb);"


@dataclass(frozen=True, kw_only=True)
class Largest(Op):
    """[outer][dim][inner] to [outer][inner]: the largest over dim; equals share the gradient, or the first takes it."""

    outer: int
    dim: int
    inner: int
    shared: bool
    reads_output: ClassVar[bool] = True

    def type(self) -> str:
        return f"Largest<{self.outer}, {self.dim}, {self.inner}, {flag(self.shared)}>"

    def backward(self, L: str, at: At) -> Iterator[str]:
        yield f"{L}::backward<{at.add()}>({at.x()}, {at.y}, {at.dy}, {at.dx()}, nb);"


@dataclass(frozen=True, kw_only=True)
class Compare(Op):
    """1 where a comparison with a number holds, else 0: a mask, which has no gradient."""

    n: int
    value: float
    how: str  # = ! < > l g, the last two for at most and at least
    moves: ClassVar[bool] = False

    def type(self) -> str:
        return f"Compare<{self.n}, '{self.how}'>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x()}, {at.y}, {number(self.value)}, nb);"


# Parameters alone -------------------------------------------------------------------------------------


def _floats(place: str) -> str:
    return f"(float*)({place})"


@dataclass(frozen=True, kw_only=True)
class Taken(Op):
    """A tensor's n numbers, trained or not, to compute with."""

    n: int

    def type(self) -> str:
        return f"Taken<{self.n}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.w(0)}, {_floats(at.y)});"

    def backward(self, L: str, at: At) -> Iterator[str]:
        if at.dw(0) != "nullptr":
            yield f"{L}::backward({_floats(at.dy)}, {at.dw(0)});"


@dataclass(frozen=True, kw_only=True)
class Sum(Op):
    """[outer][dim][inner] to [outer][inner], or with `spread` the other way round, times a number."""

    outer: int
    dim: int
    inner: int
    scale: float = 1.0
    spread: bool = False
    reads_inputs: ClassVar[bool] = False

    def type(self) -> str:
        return f"Sums<{self.outer}, {self.dim}, {self.inner}>"

    def forward(self, L: str, at: At) -> str:
        way = "spread" if self.spread else "sum"
        return f"{L}::{way}<false>({_floats(at.x())}, {_floats(at.y)}, {number(self.scale)});"

    def backward(self, L: str, at: At) -> Iterator[str]:
        way = "sum" if self.spread else "spread"
        yield f"{L}::{way}<{at.add()}>({_floats(at.dy)}, {_floats(at.dx())}, {number(self.scale)});"


@dataclass(frozen=True, kw_only=True)
class Matrices(Op):
    """The product of two matrices, [m][k] by [k][n]."""

    m: int
    k: int
    n: int

    def type(self) -> str:
        return f"Matrices<{self.m}, {self.k}, {self.n}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({_floats(at.x(0))}, {_floats(at.x(1))}, {_floats(at.y)});"

    def backward(self, L: str, at: At) -> Iterator[str]:
        for i, way in enumerate(("first", "second")):
            if at.dx(i) != "nullptr":
                to = f"{_floats(at.dy)}, {_floats(at.dx(i))}"
                yield f"{L}::{way}<{at.add(i)}>({_floats(at.x(1 - i))}, {to});"


@dataclass(frozen=True, kw_only=True)
class Still(Op):
    """The same n numbers, taken for given on the way back."""

    n: int
    moves: ClassVar[bool] = False

    def type(self) -> str:
        return f"Affine<{self.n}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x()}, {at.y}, 1.f, 0.f, nb);"


# Losses -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Entropy(Op):
    """Cross-entropy of c classes at t places; the weight at 0 weighs classes, and the class `skip` costs nothing."""

    c: int
    t: int
    steps: tuple[int, int]  # of classes and places
    smooth: float
    skip: int

    @property
    def kept(self) -> int:
        return self.t

    def type(self) -> str:
        return f"Entropy<{self.c}, {self.t}, {self.steps[0]}, {self.steps[1]}, {self.skip}>"

    def forward(self, L: str, at: At) -> str:
        given = f"{at.x(0)}, {at.x(1)}, {at.w(0)}"
        return f"{L}::forward({given}, {at.y}, {at.kept}, {number(self.smooth)}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        if at.dx() != "nullptr":
            given = f"{at.x(0)}, {at.x(1)}, {at.w(0)}, {at.kept}, {at.dy}"
            yield f"{L}::backward<{at.add()}>({given}, {at.dx()}, {number(self.smooth)}, nb);"


@dataclass(frozen=True, kw_only=True)
class Pick(Op):
    """From [outer][n][inner] by the numbers [outer][k][inner] of the second input; `skip` gives 0."""

    outer: int
    n: int
    k: int
    inner: int
    skip: int

    def type(self) -> str:
        return f"Pick<{self.outer}, {self.n}, {self.k}, {self.inner}, {self.skip}>"

    def forward(self, L: str, at: At) -> str:
        return f"{L}::forward({at.x(0)}, {at.x(1)}, {at.y}, nb);"

    def backward(self, L: str, at: At) -> Iterator[str]:
        if at.dx() != "nullptr":
            yield f"{L}::backward<{at.add()}>({at.x(1)}, {at.dy}, {at.dx()}, nb);"


@dataclass(frozen=True, kw_only=True)
class OneHot(Op):
    """Each of n numbers of classes as c numbers, 1 in its place."""

    n: int
    c: int
    moves: ClassVar[bool] = False

    def type(self) -> str:
        return f"OneHot<{self.n}, {self.c}>"
