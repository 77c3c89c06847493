"""Operations on parameters alone, once for all samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fedbraid_native.ops.base import CallContext, Op, number


def _floats(place: str) -> str:
    return f"(float*)({place})"


@dataclass(frozen=True, kw_only=True)
class LoadParam(Op):
    """A tensor's n numbers, trained or not, to compute with."""

    n: int
    allows_unbatched: ClassVar[bool] = True

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
    allows_unbatched: ClassVar[bool] = True

    def cpp_type(self, lanes: int) -> str:
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
    allows_unbatched: ClassVar[bool] = True

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({_floats(at.input(0))}, {_floats(at.input(1))}, {_floats(at.out)});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        for i, way in enumerate(("first", "second")):
            if at.grad_input(i) != "nullptr":
                to = f"{_floats(at.grad_out)}, {_floats(at.grad_input(i))}"
                yield f"{L}::{way}<{at.accumulate(i)}>({_floats(at.input(1 - i))}, {to});"


@dataclass(frozen=True, kw_only=True)
class Detach(Op):
    """The same n numbers, taken for given in the backward pass."""

    n: int
    is_differentiable: ClassVar[bool] = False

    def cpp_type(self, lanes: int) -> str:
        return f"AffineScalar<{self.n}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.out}, 1.f, 0.f, nb);"
