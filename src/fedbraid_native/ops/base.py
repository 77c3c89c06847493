"""The operations that native code is made of: one class each, which says its C++ type and emits its two calls.

A block is `lanes` samples side by side; sizes are in vectors, of a block where they grow with the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol

Shape = tuple[int, ...]
SEQ_TILE = 64  # packs of a sequence whose weights' gradient is taken at a time, given to the kernels by the same name
WIDE_ROWS = 64  # numbers of a row from which samples may be taken as rows
WIDE_TILES = 256 * 256  # inputs by outputs up to which tiles of 4 x 4 pay: their weights are many


_NO_SIZES = ("inputs", "output", "weights", "rows")


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
    def saved(self, k: int = 0) -> str: ...  # the k-th array that the forward pass saves
    def workspace(self, k: int | None = None) -> str: ...  # the k-th of the workspace, or all, with commas
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
        True  # in the backward pass; where nobody does, a value's room is used again
    )
    backward_needs_output: ClassVar[bool] = False
    is_batch_dependent: ClassVar[bool] = False  # samples of a batch, all of which must then be in one chunk
    allows_unbatched: ClassVar[bool] = False  # values of parameters alone, too
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
    def saved(self) -> Shape:
        """The sizes of the arrays that the forward pass saves for the backward pass, in vectors per pack."""
        return ()

    def workspace(self, lanes: int, packs: int) -> Shape:
        """The sizes of the arrays that a call needs for itself, in vectors."""
        return ()

    def cpp_type(self, lanes: int) -> str:
        """The kernel: of the class's name, its sizes and flags in their order; numbers and `rows` are no part of a type."""
        own = [getattr(self, f.name) for f in fields(self) if f.name not in _NO_SIZES]
        sizes = [
            n for size in own for n in (size if isinstance(size, tuple) else (size,)) if type(n) is not float
        ]
        return (
            f"{type(self).__name__}<{', '.join(flag(n) if isinstance(n, bool) else str(n) for n in sizes)}>"
        )

    def forward(self, L: str, at: CallContext) -> str:
        """The call in the forward pass."""
        return f"{L}::forward({at.input()}, {at.out}, nb);"

    def backward(self, L: str, at: CallContext) -> Iterator[str]:
        """The calls in the backward pass."""
        read = [*[at.input()] * self.backward_needs_input, *[at.out] * self.backward_needs_output]
        given = ", ".join([*read, at.grad_out, at.grad_input()])
        yield f"{L}::backward<{at.accumulate()}>({given}, nb);"

    def emit_grad_norms(self, L: str, at: CallContext) -> Iterator[str] | None:
        """Calls that add each sample's squared gradient of the weights to `squares`, after the backward pass to the inputs.

        None where there are none, though there are weights.
        """
        return None if self.has_trainable_weights else iter(())

    def _trained(self) -> str:
        """Whether the weight is trained, and the bias, as two arguments."""
        return ", ".join(flag(w is not None and w.trained) for w in self.weights)


def round_up(n: int, lanes: int) -> int:
    return -(-n // lanes) * lanes


def flag(value: object) -> str:
    return "true" if value else "false"


def number(value: float) -> str:
    if math.isinf(value):
        return "-INFINITY" if value < 0 else "INFINITY"
    return f"{float(value)!r}f"
