"""Rows into the levels of an exact sum, in one pass where torch makes nine."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbraid.core import accelerators as passes
from fedbraid.core.accelerators import Floats, Ints, Numbers
from fedbraid.engines.accelerators.swap import ROUNDED, function
from fedbraid_native.build import FLAGS, is_compiled, library
from fedbraid_native.errors import CompileError

SOURCE = r"""
#include <algorithm>
#include <cstdint>
#include <cstring>

static const int64_t CHUNK = 1024;  // of the levels fit into the first cache

// max|v| of every row; a float without its sign sorts like a whole number, and what is not a number above infinity.
extern "C" void fedbraid_reach(const float* v, int64_t stride, int64_t m, int64_t d, float* most) {
    for (int64_t i = 0; i < m; i++) {
        const float* row = v + i * stride;
        int32_t top = 0;
        for (int64_t j = 0; j < d; j++) {
            int32_t bits;
            std::memcpy(&bits, row + j, 4);
            top = std::max(top, bits & 0x7fffffff);
        }
        std::memcpy(most + i, &top, 4);
    }
}

// (t + M) - M is t as a multiple of q for M = 1.5 * 2^52 * q. What remains goes into the level below.
static void two(const float* __restrict v, double w, int64_t n, double M, double N, double* __restrict high,
                double* __restrict low) {
    for (int64_t j = 0; j < n; j++) {
        const double t = w * double(v[j]), whole = (t + M) - M, rest = ((t - whole) + N) - N;
        high[j] += whole;
        low[j] += rest;
    }
}

static void three(const float* __restrict v, double w, int64_t n, double M, double N, double O, double* __restrict high,
                  double* __restrict middle, double* __restrict low) {
    for (int64_t j = 0; j < n; j++) {
        const double t = w * double(v[j]), whole = (t + M) - M, r = t - whole, some = (r + N) - N, rest = ((r - some) + O) - O;
        high[j] += whole;
        middle[j] += some;
        low[j] += rest;
    }
}

extern "C" void fedbraid_fold(const float* v, int64_t stride, const int64_t* rows, const double* w, int64_t m, int64_t d,
                              double* const* levels, const double* quanta, int64_t count) {
    const double big = 6755399441055744.0;  // 1.5 * 2^52
    double M[3] = {};
    for (int64_t l = 0; l < count; l++) M[l] = big * quanta[l];
    const int64_t some = m == 1 ? d : CHUNK;
    for (int64_t lo = 0; lo < d; lo += some) {
        const int64_t n = std::min(some, d - lo);
        for (int64_t i = 0; i < m; i++) {
            const float* row = v + rows[i] * stride + lo;
            if (count == 2)
                two(row, w[i], n, M[0], M[1], levels[0] + lo, levels[1] + lo);
            else
                three(row, w[i], n, M[0], M[1], M[2], levels[0] + lo, levels[1] + lo, levels[2] + lo);
        }
    }
}
"""

LARGE = 2**14  # numbers of a block from which compiling is worth it
LEAST = 2**9  # and from which a pass that is there is worth its call
SUMS = (SOURCE, (*FLAGS, ROUNDED))


class _Library:
    """Compiled beside the run where the cache lacks it: until it is there torch gives the same bits."""

    def __init__(self) -> None:
        self.reach: Any = None
        self.fold: Any = None
        self.is_missing: bool | None = None  # None: nobody has looked
        self.compiling: threading.Thread | None = None

    def is_there(self, numbers: int) -> bool:
        """Whether it can be called for a block of so many numbers."""
        if numbers < LEAST:
            return False
        if self.is_missing is None and is_compiled(*SUMS):
            self._load()
        self.is_missing = self.fold is None
        if self.is_missing and numbers >= LARGE and self.compiling is None:
            self.compiling = threading.Thread(target=self._load, name="compiles sums")
            self.compiling.start()
        return not self.is_missing

    def _load(self) -> None:
        try:
            lib = library(*SUMS)
        except CompileError:
            return
        self.reach = function(lib.fedbraid_reach, "p nnn p")
        self.fold = function(lib.fedbraid_fold, "p n pp nn pp n")


_LIBRARY = _Library()


def _fits(v: Tensor) -> bool:
    """Whether these are rows that a pass can read, and is there for."""
    return (
        v.device.type == "cpu"
        and v.dtype == torch.float32
        and v.stride(-1) == 1
        and _LIBRARY.is_there(v.numel())
    )


def reach(v: Tensor) -> Floats | None:
    """The largest |v| of every row."""
    if not _fits(v):
        return None
    most = np.empty(len(v), np.float32)
    _LIBRARY.reach(v.data_ptr(), v.stride(0), *v.shape, most.ctypes.data)
    return most


def fold(v: Tensor, rows: Ints, w: Floats, into: list[Tensor], quanta: Numbers) -> bool:
    """Add w_i v_i of these rows to two or three levels; whether it did."""
    if not _fits(v):
        return False
    levels = (ctypes.c_void_p * len(into))(*[level.data_ptr() for level in into])
    _LIBRARY.fold(
        v.data_ptr(), v.stride(0), rows.ctypes.data, w.ctypes.data, len(rows), v.shape[1], levels, (ctypes.c_double * len(into))(*quanta), len(into)
    )  # fmt: skip
    return True


def install() -> None:
    """Let the core's exact sums use compiled passes."""
    passes.reach, passes.fold = reach, fold
