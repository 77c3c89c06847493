"""What the nodes of a traced model are while it is lowered: values of samples, constants, and tuples of both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fedbraid_native.errors import Unsupported
from fedbraid_native.ops import Shape

Inputs = Any  # a tensor, or a tuple or dict of tensors, samples first


@dataclass(frozen=True)
class InputView:
    """Which numbers of an input a value is: the input's number, and their places in a sample of it."""

    input: int
    places: Tensor


@dataclass(frozen=True)
class Permutation:
    """What a value of this shape was before its dimensions were permuted, and the order."""

    source: Value
    order: Shape
    shape: Shape


@dataclass(frozen=True)
class Value:
    """What an operation gave: its number, and what is known of it. The facts stay where a value takes another shape."""

    id: int
    shape: Shape  # in which the model sees a sample of it
    batch_dim: int | None = field(default=0, compare=False)  # where the model has the batch
    is_batched: bool = field(default=True, compare=False)  # not where it is made of parameters alone
    is_mask: bool = field(default=False, compare=False)  # a comparison: 0 or 1, without a gradient
    origin: InputView | None = field(default=None, compare=False)
    permutation: Permutation | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        """How many numbers a kernel finds in a pack: one in each of a vector's places, where there are no samples."""
        return math.prod(self.shape) if self.is_batched else 1

    def view(self, shape: Shape) -> Value:
        return replace(self, shape=tuple(shape))


@dataclass(frozen=True)
class Constant:
    """A tensor that no sample changes."""

    tensor: Tensor  # as it is for one sample
    trained: bool  # whether it is, or was computed from, what is trained
    batch_dim: int | None = None  # where the model has as many of it as samples


class BatchIndex:
    """The places of all samples in their batch, with which each is told to look at its own."""


class TupleValue:
    """What is not one tensor, but gives some when asked for an item."""

    def __getitem__(self, index: int) -> Value:
        raise NotImplementedError

    def whole(self) -> Value:
        """All of it as one tensor."""
        raise Unsupported("what a layer gives besides its output is used as a tensor")


def leaves(inputs: Inputs) -> list[Tensor]:
    if isinstance(inputs, Tensor):
        return [inputs]
    return list(inputs.values() if isinstance(inputs, dict) else inputs)


def map_leaves(fn: Callable[[Tensor], Any], inputs: Inputs) -> Any:
    if isinstance(inputs, Tensor):
        return fn(inputs)
    if isinstance(inputs, dict):
        return {key: fn(leaf) for key, leaf in inputs.items()}
    return tuple(map(fn, inputs))
