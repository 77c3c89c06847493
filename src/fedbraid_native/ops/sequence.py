"""Operations on rows and their neighbors: norms, softmax, dropout and attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fedbraid_native.ops.base import CallContext, Op, Shape, number


@dataclass(frozen=True, kw_only=True)
class RMSNorm(Op):
    """RMSNorm of each of `rows` rows of n numbers."""

    n: int
    rows: int
    eps: float

    @property
    def saved(self) -> Shape:
        return (self.rows,)

    def workspace(self, lanes: int, packs: int) -> Shape:
        return (self.n,)

    def forward(self, L: str, at: CallContext) -> str:
        rest = f"{at.out}, {at.saved()}, {number(self.eps)}, nb * {self.rows}"
        return f"{L}::forward({at.input()}, {at.weight(0)}, {rest});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        rest = f"{at.saved()}, {at.grad_out}, {at.grad_input()}, {at.grad_weight(0)}, {at.workspace()}, nb * {self.rows}, add"
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

    def cpp_type(self, lanes: int) -> str:
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

    def cpp_type(self, lanes: int) -> str:
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
    def saved(self) -> Shape:
        return (self.heads * self.t * self.s,)

    def workspace(self, lanes: int, packs: int) -> Shape:
        return self.t * self.s, self.t * self.s

    def cpp_type(self, lanes: int) -> str:
        sizes = (self.t, self.s, self.d, self.e, self.heads, *self.where, self.output)
        return f"ScaledDotProductAttention<{', '.join(map(str, sizes))}>"

    def _given(self, at: CallContext) -> str:
        return ", ".join(f"{at.input(i)} + {self.where[i].start}" for i in range(3))

    def forward(self, L: str, at: CallContext) -> str:
        absent = at.input(3) if len(self.inputs) > 3 else "nullptr"
        mask = f"{at.weight(0)}, {self.t * self.s if self.each else 0}"
        rest = f"{at.out}, {at.saved()}, {at.workspace(0)}, key, {number(self.scale)}, {_drop(self.p)}, nb"
        return f"{L}::forward({self._given(at)}, {mask}, {absent}, {rest});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        to = [
            at.grad_input(i)
            if at.grad_input(i) == "nullptr"
            else f"{at.grad_input(i)} + {self.where[i].start}"
            for i in range(3)
        ]
        add = ", ".join(self._add(at, i) for i in range(3))
        rest = f"{at.saved()}, {at.workspace()}, key, {number(self.scale)}, {_drop(self.p)}, nb"
        yield f"{L}::backward<{add}>({self._given(at)}, {at.grad_out}, {', '.join(to)}, {rest});"

    def _add(self, at: CallContext, i: int) -> str:
        """Chunks of one value that lie beside each other are one writer."""
        beside = [
            j
            for j in range(i)
            if self.inputs[j] == self.inputs[i] and self.where[j].start != self.where[i].start
        ]
        return at.accumulate(beside[0] if beside else i)


@dataclass(frozen=True, kw_only=True)
class BatchMatmul(Op):
    """`count` matrix products a sample, [m][k] by [k][n]; where count, row and column of both inputs lie."""

    count: int
    m: int
    n: int
    k: int
    a: tuple[int, int, int]  # steps of count, m and k
    b: tuple[int, int, int]  # of count, n and k

    def cpp_type(self, lanes: int) -> str:
        return f"Products<{', '.join(map(str, (self.count, self.m, self.n, self.k, *self.a, *self.b)))}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input(0)}, {at.input(1)}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        for i, name in enumerate("ab"):
            if at.grad_input(i) != "nullptr":
                yield f"{L}::backward_{name}<{at.accumulate(i)}>({at.input(1 - i)}, {at.grad_out}, {at.grad_input(i)}, nb);"
