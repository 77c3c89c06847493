"""New rows in, old ones out, and the sum of all follows, in one pass where torch makes eight."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.engines.native.build import NativeUnavailable, library

SOURCE = r"""
#include <algorithm>
#include <cstdint>

// For every client: moved += p*g - w*y, then (w, y) <- (p, g) in its row, with g = fresh/rate. Products of two floats are
// exact in double, and clients are added in order, so the bits are those of torch and of any cut into blocks.
extern "C" void fedbraid_swap(double* moved, float* const* rows, const float* fresh, const float* rate, const float* p,
                              const float* w, int64_t m, int64_t d) {
    const int64_t some = 2048;  // of the sum and a row fit into the first cache
    for (int64_t i = 0; i < m; i++) rows[i][0] = p[i];
    for (int64_t lo = 0; lo < d; lo += some) {
        const int64_t n = std::min(some, d - lo);
        double* __restrict sum = moved + lo;
        for (int64_t i = 0; i < m; i++) {
            float* __restrict y = rows[i] + 1 + lo;
            const float* __restrict v = fresh + i * d + lo;
            const float by = rate[i];
            const double in = p[i], out = w[i];
            if (out != 0)
                for (int64_t j = 0; j < n; j++) {
                    const float g = v[j] / by;
                    sum[j] = sum[j] + in * g - out * y[j];
                    y[j] = g;
                }
            else
                for (int64_t j = 0; j < n; j++) {
                    y[j] = v[j] / by;
                    sum[j] += in * y[j];
                }
        }
    }
}
"""

Array = NDArray[np.float32]


@lru_cache(maxsize=1)
def swapper() -> Callable[[Tensor, NDArray[np.int64], Tensor, Array, Array, Array], None] | None:
    """`swap(moved, addresses of rows, fresh, rates, p, w)`, or None where there is no compiler."""
    try:
        call = library(SOURCE).fedbraid_swap
    except NativeUnavailable:
        return None
    call.argtypes, call.restype = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 2, None

    def swap(moved: Tensor, rows: NDArray[np.int64], fresh: Tensor, rate: Array, p: Array, w: Array) -> None:
        fresh, rate, p, w = fresh.contiguous(), *(np.ascontiguousarray(a, np.float32) for a in (rate, p, w))
        call(
            moved.data_ptr(), rows.ctypes.data, fresh.data_ptr(), rate.ctypes.data, p.ctypes.data, w.ctypes.data, *fresh.shape
        )  # fmt: skip

    return swap
