"""Operations that losses are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fedbraid_native.ops.base import CallContext, Op, Shape, number


@dataclass(frozen=True, kw_only=True)
class CrossEntropyLoss(Op):
    """Cross-entropy of c classes at t places; the weight at 0 weighs classes, and the class `skip` costs nothing."""

    c: int
    t: int
    steps: tuple[int, int]  # of classes and places
    smooth: float
    skip: int

    @property
    def saved(self) -> Shape:
        return (self.t,)

    def forward(self, L: str, at: CallContext) -> str:
        given = f"{at.input(0)}, {at.input(1)}, {at.weight(0)}"
        return f"{L}::forward({given}, {at.out}, {at.saved()}, {number(self.smooth)}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        if at.grad_input() != "nullptr":
            given = f"{at.input(0)}, {at.input(1)}, {at.weight(0)}, {at.saved()}, {at.grad_out}"
            yield f"{L}::backward<{at.accumulate()}>({given}, {at.grad_input()}, {number(self.smooth)}, nb);"


@dataclass(frozen=True, kw_only=True)
class Gather(Op):
    """From [outer][n][inner] by the numbers [outer][k][inner] of the second input; `skip` gives 0."""

    outer: int
    n: int
    k: int
    inner: int
    skip: int

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
