"""Maps of rows, embeddings and recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from fedbraid_native.ops.base import PIECE, WIDE_ROWS, CallContext, Op, flag


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
