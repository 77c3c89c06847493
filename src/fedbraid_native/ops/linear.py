"""Maps of rows, embeddings and recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from fedbraid_native.ops.base import SEQ_TILE, WIDE_ROWS, CallContext, Op, Shape, flag, round_up


@dataclass(frozen=True, kw_only=True)
class Linear(Op):
    """The same linear map of each of `rows` rows."""

    i: int
    o: int
    rows: int = 1

    @property
    def writes_grad_once(self) -> bool:
        return self.rows == 1

    def _is_wide(self, lanes: int) -> bool:
        """Whether samples may be taken as rows where a batch does not fill its packs."""
        return self.rows > 1 and not (self.i % lanes or self.o % lanes) and min(self.i, self.o) >= WIDE_ROWS

    def workspace(self, lanes: int, packs: int) -> Shape:
        if not self._is_wide(lanes):
            return _rows_of_tile(self.i, self.o, self.rows, lanes, packs)
        wider = max(self.i, self.o)
        return SEQ_TILE * self.i, SEQ_TILE * self.o, self.i * self.o // lanes, wider, wider // lanes

    def forward(self, L: str, at: CallContext) -> str:
        if at.reads_input_rows():
            return f"{L}::forward_rows(rows, {at.weight(0)}, {at.weight(1)}, {at.out}, nb);"
        given = f"{at.input()}, {at.weight(0)}, {at.weight(1)}, {at.out}"
        if self._is_wide(at.simd_width):
            return f"{self._sequence}::forward({given}, {at.workspace()}, nb, {self.rows}, samples);"
        return f"{L}::forward({given}, nb * {self.rows});"

    @property
    def _sequence(self) -> str:
        return f"Sequence<{self.i}, {self.o}>"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        dw, rows = at.grad_weight(0), f"{at.workspace(0)}, {at.workspace(1)}"
        if dw != "nullptr" and self.rows > 1:
            to = f"{dw}, {rows}, nb, {self.rows}, samples"
            yield f"{L}::weight_sequence({at.input()}, {at.grad_out}, {to});"
        elif dw != "nullptr" and at.reads_model_input() and self.i % at.simd_width == 0:
            # the rows are what the turned inputs would be
            yield f"{L}::weight_rows(rows, {at.grad_out}, {dw}, (float*)({at.workspace(1)}), nb, samples, add);"
        elif dw != "nullptr":
            yield f"{L}::weight({at.input()}, {at.grad_out}, {dw}, {rows}, nb, samples, add);"
        if at.grad_weight(1) != "nullptr":
            yield f"{L}::bias({at.grad_out}, {at.grad_weight(1)}, nb * {self.rows}, {self.o}, add);"
        given = f"{at.grad_out}, {at.weight(0)}, {at.grad_input()}"
        if at.grad_input() != "nullptr" and self._is_wide(at.simd_width):
            to = f"{at.workspace()}, nb, {self.rows}, samples"
            yield f"{self._sequence}::backward_input<{at.accumulate()}>({given}, {to});"
        elif at.grad_input() != "nullptr":
            yield f"{L}::backward_input<{at.accumulate()}>({given}, nb * {self.rows});"

    def emit_grad_norms(self, L: str, at: CallContext) -> Iterator[str]:
        if self.rows > 1:
            yield f"Squares<{L}>::of_sequence({at.input()}, {at.grad_out}, squares, nb, {self.rows}, {self._trained()});"
        elif at.reads_input_rows():
            yield f"Squares<{L}>::of_rows(rows, {at.grad_out}, squares, nb, {self._trained()});"
        else:
            yield f"Squares<{L}>::of({at.input()}, {at.grad_out}, squares, nb, {self._trained()});"


@dataclass(frozen=True, kw_only=True)
class LinearTransposed(Op):
    """Each of `rows` rows of i numbers times a matrix [i][o]: a linear map from o to i, the other way round."""

    i: int
    o: int
    rows: int = 1

    @property
    def writes_grad_once(self) -> bool:
        return self.rows == 1

    def workspace(self, lanes: int, packs: int) -> Shape:
        return _rows_of_tile(self.o, self.i, self.rows, lanes, packs)

    def cpp_type(self, lanes: int) -> str:
        return f"Linear<{self.o}, {self.i}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::backward_input<false>({at.input()}, {at.weight(0)}, {at.out}, nb * {self.rows});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        if at.grad_weight(0) != "nullptr" and self.rows > 1:
            to = f"{at.grad_weight(0)}, {at.workspace()}, nb, {self.rows}, samples"
            yield f"{L}::weight_sequence({at.grad_out}, {at.input()}, {to});"
        elif at.grad_weight(0) != "nullptr":
            yield f"{L}::weight({at.grad_out}, {at.input()}, {at.grad_weight(0)}, {at.workspace()}, nb, samples, add);"
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

    def workspace(self, lanes: int, packs: int) -> Shape:
        return (round_up(self.f, lanes),)

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.weight(0)}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::backward({at.input()}, {at.grad_out}, {at.grad_weight(0)}, {at.workspace()}, nb, samples);"


_CELLS = {"GruCell": (3, 4, 2), "LstmCell": (4, 5, 4), "TanhCell": (1, 1, 1)}  # GATES, SAVED, JOINT


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
    def saved(self) -> Shape:
        return (self.t * self.h * _CELLS[self.cell][1],)

    def _by_rows(self, lanes: int) -> bool:
        """Whether samples are taken as rows."""
        return self.h % lanes == 0 and self.h >= WIDE_ROWS and len(self.inputs) == 1

    def workspace(self, lanes: int, packs: int) -> Shape:
        gates = _CELLS[self.cell][0] * self.h
        i, h, g = (round_up(n, lanes) for n in (self.i, self.h, gates))
        state = packs * max(gates, 2 * self.h)
        if not self._by_rows(lanes):
            return state, SEQ_TILE * max(i, h), SEQ_TILE * g
        rows = self.t * packs + 1
        return gates * max(i, h) // lanes + 1, rows * i, rows * h, rows * h, state, i // lanes + 1

    def cpp_type(self, lanes: int) -> str:
        sizes = f"{self.cell}, {self.i}, {self.h}, {self.t}, {flag(self.reversed)}, {flag(self.cells)}"
        if self._by_rows(lanes):
            return f"RNNRows<{sizes}>"
        return f"RNN<{sizes}, {flag(len(self.inputs) > 1)}>"

    def _first(self, of: Callable[[int], str]) -> str:
        return ", ".join(of(i) if len(self.inputs) > i else "nullptr" for i in (1, 2))

    def forward(self, L: str, at: CallContext) -> str:
        weights = ", ".join(at.weight(k) for k in range(4))
        if self._by_rows(at.simd_width):
            to = f"{at.out}, {at.saved()}, {at.workspace()}, nb, samples"
            return f"{L}::forward({at.input()}, {weights}, {to});"
        given = f"{at.input()}, {self._first(at.input)}, {weights}"
        return f"{L}::forward({given}, {at.out}, {at.saved()}, {at.workspace(0)}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        grads = ", ".join(at.grad_weight(k) for k in range(4))
        add = at.accumulate() if at.grad_input() != "nullptr" else "false"
        states = [
            self._first(at.input),
            self._first(at.grad_input),
            self._first(at.accumulate).replace("nullptr", "false"),
        ]
        first = f", {{{', '.join(states)}}}" if len(self.inputs) > 1 else ""
        rest = "nb, samples" if self._by_rows(at.simd_width) else f"nb{first}"
        yield (
            f"{L}::backward<{add}>({at.input()}, {at.out}, {at.weight(0)}, {at.weight(1)}, {at.grad_out}, {at.grad_input()}, {grads},"
            f" {at.saved()}, {at.workspace()}, {rest});"
        )


def _rows_of_tile(i: int, o: int, rows: int, lanes: int, packs: int) -> Shape:
    """Inputs and outputs with samples as rows: of all packs, or of a tile of a sequence's."""
    count = packs if rows == 1 else min(SEQ_TILE, packs * rows)
    return round_up(i, lanes) * count, round_up(o, lanes) * count
