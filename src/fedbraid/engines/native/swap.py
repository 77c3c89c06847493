"""New rows in, old ones out, and the sum of all follows, in one pass where torch makes eight."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

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

Swap = Callable[[Tensor, list[int], Tensor, list[float], list[float], list[float]], None]


@lru_cache(maxsize=1)
def swapper() -> Swap | None:
    """`swap(moved, addresses of rows, fresh, rates, p, w)`, or None where there is no compiler."""
    try:
        call = library(SOURCE).fedbraid_swap
    except NativeUnavailable:
        return None
    call.argtypes, call.restype = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 2, None

    def swap(
        moved: Tensor, rows: list[int], fresh: Tensor, rate: list[float], p: list[float], w: list[float]
    ) -> None:
        fresh, numbers = fresh.contiguous(), ctypes.c_float * len(p)
        places = (ctypes.c_void_p * len(rows))(*rows)
        call(
            moved.data_ptr(), places, fresh.data_ptr(), numbers(*rate), numbers(*p), numbers(*w), *fresh.shape
        )

    return swap
