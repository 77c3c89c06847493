"""Where compiled passes are hung in by the engines, one function each; without them NumPy and torch give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from fedbraid.core.client_table import ClientTable, Ids
    from fedbraid.core.codec import Codec
    from fedbraid.core.layout import Layout

Numbers = list[float]
Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Swap = Callable[["ClientTable", "Ids", "Tensor", "Tensor | None", "Tensor", Numbers, Numbers, Numbers], bool]


def no_swap(codec: Codec | None, layout: Layout) -> Swap | None:
    """Nothing compiled."""
    return None


table_swapper: Callable[[Codec | None, Layout], Swap | None] = no_swap


def no_normals(keys: NDArray[np.uint64], count: int) -> NDArray[np.float32] | None:
    """Nothing compiled."""
    return None


normals: Callable[[NDArray[np.uint64], int], NDArray[np.float32] | None] = no_normals


def no_products(a: Tensor, b: Tensor | None) -> Tensor | None:
    """Nothing compiled."""
    return None


def no_combined(weights: Tensor, v: Tensor) -> Tensor | None:
    """Nothing compiled."""
    return None


def no_trimmed(v: Tensor, f: int) -> Tensor | None:
    """Nothing compiled."""
    return None


products: Callable[[Tensor, Tensor | None], Tensor | None] = no_products
combined: Callable[[Tensor, Tensor], Tensor | None] = no_combined
trimmed: Callable[[Tensor, int], Tensor | None] = no_trimmed


def no_reach(v: Tensor) -> Floats | None:
    """Nothing compiled."""
    return None


def no_fold(v: Tensor, rows: Ints, w: Floats, into: list[Tensor], quanta: Numbers) -> bool:
    """Nothing compiled."""
    return False


reach: Callable[[Tensor], Floats | None] = no_reach
fold: Callable[[Tensor, Ints, Floats, list[Tensor], Numbers], bool] = no_fold
