"""Operations that move numbers: slices, concatenation, permutation, reductions and their expansion."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fedbraid_native.ops.base import CallContext, Op, Shape, number


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


@dataclass(frozen=True, kw_only=True)
class Cat(Op):
    """[outer][a] and [outer][b] to [outer][a + b]."""

    outer: int
    a: int
    b: int
    backward_needs_input: ClassVar[bool] = False

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

    def cpp_type(self, lanes: int) -> str:
        steps = [math.prod(self.sizes[d + 1 :]) for d in self.order]
        sizes = [self.sizes[d] for d in self.order]
        pad = 4 - len(sizes)
        return f"Permute<{', '.join(map(str, [1] * pad + sizes + [0] * pad + steps))}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::forward({at.input()}, {at.out}, nb * {self.rows});"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::backward<{at.accumulate()}>({at.grad_out}, {at.grad_input()}, nb * {self.rows});"


@dataclass(frozen=True, kw_only=True)
class Reduce(Op):
    """[outer][dim][inner] to [outer][inner]: the mean, or the sum, over dim."""

    outer: int
    dim: int
    inner: int
    scale: float
    backward_needs_input: ClassVar[bool] = False

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

    def cpp_type(self, lanes: int) -> str:
        return f"Reduce<{self.outer}, {self.dim}, {self.inner}>"

    def forward(self, L: str, at: CallContext) -> str:
        return f"{L}::backward<false>({at.input()}, {at.out}, 1.f, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        yield f"{L}::forward<{at.accumulate()}>({at.grad_out}, {at.grad_input()}, 1.f, nb);"


@dataclass(frozen=True, kw_only=True)
class Roll(Op):
    """[outer][dim][inner], moved `shift` places along dim; what leaves at its end comes in at its beginning."""

    outer: int
    dim: int
    inner: int
    shift: int
    backward_needs_input: ClassVar[bool] = False
