"""The graph that a model is lowered to: operations on numbered values, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from fedbraid_native.ops import Op, Shape


class ParamSlot(Protocol):
    """One trained tensor's offset in the flat vector of parameters."""

    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...


class ParamLayout(Protocol):
    """The flat vector of parameters: its slots in order, its length, and the slice of running statistics."""

    @property
    def size(self) -> int: ...
    @property
    def buffers(self) -> slice | None: ...
    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Graph:
    """Operations in the order they run; the first values are the inputs, the last operation's output the model's."""

    shapes: list[Shape]  # of each value, without the batch
    ops: list[Op]
    output: int
    layout: ParamLayout
    constants: Tensor  # numbers that are not trained
    num_inputs: int  # how many of the values are given
    index_bounds: list[
        Tensor | None
    ]  # what an input's numbers must be below, where they are numbers of things
    output_shape: Shape  # of the output, as the model gives it
    unbatched: frozenset[int] = frozenset()  # values made of parameters alone, the same for all samples
    targets: bool = False  # whether they are given too, behind the inputs, and the output is the loss
    ignore_index: int | None = None  # what a target may be besides

    @property
    def vocab_sizes(self) -> list[int | None]:
        """How many different numbers each input may be, where it is of numbers of things."""
        return [None if limit is None else int(limit.min()) for limit in self.index_bounds[: self.num_inputs]]

    @property
    def num_sample_inputs(self) -> int:
        """How many of the values are a sample's own."""
        return self.num_inputs + self.targets

    @cached_property
    def is_batch_dependent(self) -> bool:
        """Whether a sample's output depends on the other samples of its batch."""
        return any(op.is_batch_dependent for op in self.ops)

    @property
    def writes_every_grad_once(self) -> bool:
        """Whether every parameter's gradient is written exactly once: none is spare, tied or used again."""
        if self.unbatched:
            return False
        writers = [op for op in self.ops if op.has_trainable_weights and op.output in self.needs_grad]
        used = [w.offset for op in writers for w in op.weights if w is not None and w.trained]
        return sorted(used) == [s.offset for s in self.layout] and all(op.writes_grad_once for op in writers)

    @cached_property
    def needs_grad(self) -> set[int]:
        """The values that depend on a trained parameter and move the output, and so need a gradient."""
        needed: set[int] = set()
        for op in self.ops:
            if op.is_differentiable and (op.has_trainable_weights or needed.intersection(op.operands)):
                needed.add(op.output)
        seen = {self.output}
        for op in reversed(self.ops):
            if op.is_differentiable and op.output in seen:
                seen.update(op.operands)
        return needed & seen
