"""Operations on each number, with another value, a parameter or a scalar."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fedbraid_native.ops.base import CallContext, Op, flag, number


@dataclass(frozen=True, kw_only=True)
class Unary(Op):
    """A function of each number, by its name in unary.hpp; backward reads its "input" or its "output"."""

    function: str
    n: int
    saves: str = "input"
    allows_unbatched: ClassVar[bool] = True

    @property
    def backward_needs_input(self) -> bool:  # type: ignore[override]
        return self.saves == "input"

    @property
    def backward_needs_output(self) -> bool:  # type: ignore[override]
        return self.saves == "output"

    def cpp_type(self, lanes: int) -> str:
        return f"Unary<{self.function}, {self.n}>"


# Functions of two numbers, by their names in binary.hpp: whether backward reads the inputs, and the output.
BINARY = {"Add": (False, False), "Mul": (True, False), "Div": (True, True), "Max": (True, False), "Min": (True, False)}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _OfTwo(Op):
    function: str
    n: int

    @property
    def backward_needs_input(self) -> bool:  # type: ignore[override]
        return BINARY[self.function][0]

    @property
    def backward_needs_output(self) -> bool:  # type: ignore[override]
        return BINARY[self.function][1]


@dataclass(frozen=True, kw_only=True)
class Binary(_OfTwo):
    """A function of the numbers of two values of one shape."""

    allows_unbatched: ClassVar[bool] = True

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input(0)}, {at.input(1)}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        given = f"{at.input(0)}, {at.input(1)}, {at.out}, {at.grad_out}"
        for i in range(2):
            if at.grad_input(i) != "nullptr":
                yield f"{L}::backward<{i}, {at.accumulate(i)}>({given}, {at.grad_input(i)}, nb);"


@dataclass(frozen=True, kw_only=True)
class BinaryParam(_OfTwo):
    """A function of each of `rows` rows and the same n numbers, trained or not: Add or Mul."""

    rows: int

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.weight(0)}, {at.out}, nb * {self.rows});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        add = at.accumulate() if at.grad_input() != "nullptr" else "false"
        rest = f"{at.grad_out}, {at.grad_input()}, {at.grad_weight(0)}, nb * {self.rows}, add"
        yield f"{L}::backward<{add}>({at.input()}, {at.weight(0)}, {rest});"


@dataclass(frozen=True, kw_only=True)
class AffineScalar(Op):
    """a x + b for two numbers a and b."""

    n: int
    a: float = 1.0
    b: float = 0.0
    backward_needs_input: ClassVar[bool] = False
    allows_unbatched: ClassVar[bool] = True

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.out}, {number(self.a)}, {number(self.b)}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::backward<{at.accumulate()}>({at.grad_out}, {at.grad_input()}, {number(self.a)}, nb);"


@dataclass(frozen=True, kw_only=True)
class ExpandParam(Op):
    """The same n numbers, trained or not, for every sample."""

    n: int

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

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input(0)}, {at.input(1)}, {at.input(2)}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        for i in (1, 2):
            if at.grad_input(i) != "nullptr":
                yield f"{L}::backward<{flag(i == 1)}, {at.accumulate(i)}>({at.input(0)}, {at.grad_out}, {at.grad_input(i)}, nb);"


@dataclass(frozen=True, kw_only=True)
class Amax(Op):
    """[outer][dim][inner] to [outer][inner]: the largest over dim; equals share the gradient, or the first takes it."""

    outer: int
    dim: int
    inner: int
    shared: bool
    backward_needs_output: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class CompareScalar(Op):
    """1 where a comparison with a number holds, else 0: a mask, which has no gradient."""

    n: int
    value: float
    how: str  # = ! < > l g, the last two for at most and at least
    is_differentiable: ClassVar[bool] = False

    def cpp_type(self, lanes: int) -> str:
        return f"CompareScalar<{self.n}, '{self.how}'>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.out}, {number(self.value)}, nb);"
