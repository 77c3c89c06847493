"""New rows in, old ones out, and the sum of all follows, in one pass where torch makes eight, or NumPy thirty."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from fedbraid.core import accelerators as passes
from fedbraid.core.accelerators import Numbers, Swap
from fedbraid.core.client_table import ClientTable, Ids
from fedbraid.core.codec import Codec
from fedbraid.core.layout import Layout
from fedbraid.links.fp16 import Fp16
from fedbraid.links.symmetric import Symmetric
from fedbraid_native.build import FLAGS, library
from fedbraid_native.errors import CompileError

SOURCE = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

static const int64_t some = 1024;  // of the sum and a row fit into the first cache

// For every client: moved += p*g - w*y, then (w, y) <- (p, g) in its row, with g = fresh/rate. Products of two floats are
// exact in double, and clients are added in order, so the bits are those of torch and of any cut into blocks.
extern "C" void fedbraid_swap(double* moved, float* const* rows, const float* fresh, const float* rate, const float* p,
                              const float* w, int64_t m, int64_t d) {
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

// max|g| of every layer of every client; a float without its sign sorts like a whole number.
extern "C" void fedbraid_reach(const float* fresh, const float* rate, int64_t m, int64_t d, const int64_t* ends,
                               int64_t layers, float* most) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t l = 0, lo = 0; l < layers; lo = ends[l++]) {
            int32_t top = 0;
            for (int64_t j = lo; j < ends[l]; j++) {
                int32_t bits;
                std::memcpy(&bits, fresh + i * d + j, 4);
                top = std::max(top, bits & 0x7fffffff);
            }
            std::memcpy(most + i * layers + l, &top, 4);
            most[i * layers + l] /= rate[i];
        }
}

#ifdef __FLT16_MANT_DIG__
extern "C" int fedbraid_halves() { return 1; }
typedef _Float16 half;
#else
extern "C" int fedbraid_halves() { return 0; }
typedef float half;
#endif

// Whole codes, or halves, as they lie in a row: the most significant bit first.
static void unpack(const uint8_t* from, int bits, int64_t n, float* __restrict q) {
    if (bits == 16)
        for (int64_t j = 0; j < n; j++) {
            const uint16_t b = uint16_t(from[2 * j] << 8 | from[2 * j + 1]);
            half h;
            std::memcpy(&h, &b, 2);
            q[j] = h;
        }
    else if (bits == 8)
        for (int64_t j = 0; j < n; j++) q[j] = float(int(from[j]) - 128);
    else {
        for (int64_t k = 0; k < n / 2; k++) {
            q[2 * k] = float((from[k] >> 4) - 8);
            q[2 * k + 1] = float((from[k] & 15) - 8);
        }
        if (n % 2) q[n - 1] = float((from[n / 2] >> 4) - 8);
    }
}

static void pack(const float* __restrict q, int bits, int64_t n, uint8_t* to) {
    if (bits == 16)
        for (int64_t j = 0; j < n; j++) {
            const half h = half(q[j]);
            uint16_t b;
            std::memcpy(&b, &h, 2);
            b = uint16_t(b << 8 | b >> 8);
            std::memcpy(to + 2 * j, &b, 2);
        }
    else if (bits == 8)
        for (int64_t j = 0; j < n; j++) to[j] = uint8_t(int(q[j]) + 128);
    else {
        for (int64_t k = 0; k < n / 2; k++) to[k] = uint8_t((int(q[2 * k]) + 8) << 4 | (int(q[2 * k + 1]) + 8));
        if (n % 2) to[n / 2] = uint8_t((int(q[n - 1]) + 8) << 4);
    }
}

// The same for rows of weight, scales (none for halves) and codes: y is what is stored, and apart += p*(g - y) what is not.
extern "C" void fedbraid_swap_coded(double* moved, double* apart, uint8_t* const* rows, const float* fresh, const float* rate,
                                    const float* p, const float* w, int64_t m, int64_t d, const int64_t* ends,
                                    int64_t layers, float* scales, int64_t bits) {
    const float top = float((1 << (bits - 1)) - 1);
    const int64_t sides = bits == 16 ? 0 : layers;
    for (int64_t i = 0; i < m; i++) {
        float* head = reinterpret_cast<float*>(rows[i]);
        head[0] = p[i];
        for (int64_t l = 0; l < sides; l++) std::swap(head[1 + l], scales[i * layers + l]);
    }
    int64_t first = 0;
    for (int64_t lo = 0; lo < d; lo += some) {
        const int64_t n = std::min(some, d - lo);
        while (ends[first] <= lo) first++;
        for (int64_t i = 0; i < m; i++) {
            const float *now = reinterpret_cast<float*>(rows[i]) + 1, *before = scales + i * layers;
            uint8_t* codes = rows[i] + 4 + 4 * sides + lo * bits / 8;
            const float* __restrict v = fresh + i * d + lo;
            double *__restrict sum = moved + lo, *__restrict rest = apart + lo;
            const float by = rate[i];
            const double in = p[i], out = w[i];
            float g[some], q[some], y[some];
            if (out != 0) unpack(codes, bits, n, y);
            for (int64_t j = 0; j < n; j++) g[j] = v[j] / by;
            if (bits == 16)
                for (int64_t j = 0; j < n; j++) q[j] = float(half(g[j]));
            else
                for (int64_t l = first, a = 0; a < n; l++) {
                    const int64_t b = std::min(n, ends[l] - lo);
                    for (int64_t j = a; j < b; j++)
                        q[j] = std::min(std::max(std::nearbyint(g[j] / now[l]), -top), top);
                    a = b;
                }
            pack(q, bits, n, codes);
            if (bits != 16)
                for (int64_t l = first, a = 0; a < n; l++) {
                    const int64_t b = std::min(n, ends[l] - lo);
                    for (int64_t j = a; j < b; j++) q[j] *= now[l];
                    if (out != 0)
                        for (int64_t j = a; j < b; j++) y[j] *= before[l];
                    a = b;
                }
            if (out != 0)
                for (int64_t j = 0; j < n; j++) sum[j] = sum[j] + in * q[j] - out * y[j];
            else
                for (int64_t j = 0; j < n; j++) sum[j] += in * q[j];
            for (int64_t j = 0; j < n; j++) rest[j] += in * (g[j] - q[j]);
        }
    }
}
"""

ROUNDED = "-ffp-contract=off"  # products are rounded before they are added, as NumPy does it


@lru_cache(maxsize=8)
def swapper(codec: Codec | None, layout: Layout) -> Swap | None:
    """`swap(rows, clients, moved, apart, fresh, rates, p, w)`, or None where there is no compiler or no such code.

    It says whether it did: what a codec refuses is left to the codec, and untouched.
    """
    try:
        lib = library(SOURCE, (*FLAGS, ROUNDED))
    except CompileError:
        return None
    if codec is None:
        return _plain(lib)
    if isinstance(codec, Symmetric) or (isinstance(codec, Fp16) and lib.fedbraid_halves()):
        return _coded(lib, codec.width, layout)
    return None


def _plain(lib: ctypes.CDLL) -> Swap:
    call = function(lib.fedbraid_swap, "pppppp nn")

    def swap(
        rows: ClientTable, clients: Ids, moved: Tensor, apart: Tensor | None, fresh: Tensor,
        rate: Numbers, p: Numbers, w: Numbers,
    ) -> bool:  # fmt: skip
        fresh, numbers = fresh.contiguous(), ctypes.c_float * len(p)
        places = (ctypes.c_void_p * len(p))(*rows.lend(clients))
        call(
            moved.data_ptr(), places, fresh.data_ptr(), numbers(*rate), numbers(*p), numbers(*w), *fresh.shape
        )
        return True

    return swap


def _coded(lib: ctypes.CDLL, bits: int, layout: Layout) -> Swap:
    reach, call = (
        function(lib.fedbraid_reach, "pp nn pn p"),
        function(lib.fedbraid_swap_coded, "ppppppp nn pn p n"),
    )
    halves = bits == 16
    ends = np.array([layout.size] if halves else [s.end for s in layout if s.size], np.int64)
    top, most = np.float32(2 ** (bits - 1) - 1), 65520.0 if halves else np.inf  # what no code can stand for

    def swap(
        rows: ClientTable, clients: Ids, moved: Tensor, apart: Tensor | None, fresh: Tensor,
        rate: Numbers, p: Numbers, w: Numbers,
    ) -> bool:  # fmt: skip
        assert apart is not None
        fresh, numbers = fresh.contiguous(), ctypes.c_float * len(p)
        rates, scales = numbers(*rate), np.empty((len(p), len(ends)), np.float32)
        reach(fresh.data_ptr(), rates, *fresh.shape, ends.ctypes.data, len(ends), scales.ctypes.data)
        if not (scales < most).all():
            return False
        scales /= top
        scales[scales == 0] = 1
        places = (ctypes.c_void_p * len(p))(*rows.lend(clients))
        call(
            moved.data_ptr(), apart.data_ptr(), places, fresh.data_ptr(), rates, numbers(*p), numbers(*w), *fresh.shape,
            ends.ctypes.data, len(ends), scales.ctypes.data, bits,
        )  # fmt: skip
        return True

    return swap


def install() -> None:
    """Let the core swap rows in one compiled pass."""
    passes.table_swapper = swapper


def function(call: Any, kinds: str) -> Any:
    """A C function that takes pointers (p) and whole numbers (n), and returns nothing."""
    types: dict[str, Any] = {"p": ctypes.c_void_p, "n": ctypes.c_int64}
    call.argtypes, call.restype = [types[k] for k in kinds.replace(" ", "")], None
    return call
