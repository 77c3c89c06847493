"""Passes over a cohort's vectors for robust rules: inner products, weighted sums, trimmed means; the bits are torch's."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from fedbraid.core import accelerators as passes
from fedbraid.engines.accelerators.swap import ROUNDED, function
from fedbraid_native.build import FLAGS, library
from fedbraid_native.errors import CompileError

SOURCE = r"""
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

static const int64_t CHUNK = 1024, LANES = 8, WIDE = 16;
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef double doubles __attribute__((vector_size(8 * LANES)));
typedef float column_floats __attribute__((vector_size(4 * WIDE)));
typedef double column_doubles __attribute__((vector_size(8 * WIDE)));

static doubles widened(const float* v) {
    floats x;
    std::memcpy(&x, v, sizeof x);
    return __builtin_convertvector(x, doubles);
}

static double folded(const doubles& lanes) {
    double s[LANES];
    std::memcpy(s, &lanes, sizeof s);
    for (int64_t half = LANES / 2; half; half /= 2)
        for (int64_t l = 0; l < half; l++) s[l] += s[l + half];
    return s[0];
}

// ROWS x COLS inner products of one chunk: products of floats are exact in double, so the order of sums is all there is.
template <int ROWS, int COLS>
static void tile(const float* a, const float* b, int64_t d, double* out, int64_t k) {
    doubles sum[ROWS][COLS] = {};
    for (int64_t j = 0; j < CHUNK; j += LANES) {
        doubles x[ROWS];
        for (int r = 0; r < ROWS; r++) x[r] = widened(a + r * d + j);
        for (int c = 0; c < COLS; c++) {
            const doubles y = widened(b + c * d + j);
            for (int r = 0; r < ROWS; r++) sum[r][c] += x[r] * y;
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLS; c++) out[r * k + c] += folded(sum[r][c]);
}

typedef void (*Tile)(const float*, const float*, int64_t, double*, int64_t);
#define ROW(R) {tile<R, 1>, tile<R, 2>, tile<R, 3>, tile<R, 4>}
static const Tile TILES[4][4] = {ROW(1), ROW(2), ROW(3), ROW(4)};

// out[m, k] += <a_i, b_j>; with `same` only j >= i; with `own` <a_i, a_i> alone, k being 1.
extern "C" void fedbraid_products(const float* a, const float* b, double* out, int64_t m, int64_t k, int64_t d, int64_t same,
                                  int64_t own) {
    std::vector<float> left, right;
    for (int64_t lo = 0; lo < d; lo += CHUNK) {
        const float *x = a + lo, *y = b + lo;
        int64_t wide = d;
        if (d - lo < CHUNK) {  // zeros at the end
            left.assign(m * CHUNK, 0);
            right.assign(k * CHUNK, 0);
            for (int64_t i = 0; i < m; i++) std::copy_n(a + i * d + lo, d - lo, left.data() + i * CHUNK);
            if (!own) for (int64_t i = 0; i < k; i++) std::copy_n(b + i * d + lo, d - lo, right.data() + i * CHUNK);
            x = left.data(), y = right.data(), wide = CHUNK;
        }
        if (own) {
            for (int64_t i = 0; i < m; i++) tile<1, 1>(x + i * wide, x + i * wide, wide, out + i, 1);
            continue;
        }
        for (int64_t i = 0; i < m; i += 4)
            for (int64_t j = same ? i : 0; j < k; j += 4)
                TILES[std::min<int64_t>(m - i, 4) - 1][std::min<int64_t>(k - j, 4) - 1](
                    x + i * wide, y + j * wide, wide, out + i * k + j, k);
    }
}

// out[k, d] = sum of w_ki v_i, client by client in double.
extern "C" void fedbraid_combined(const double* w, const float* v, float* out, int64_t k, int64_t m, int64_t d) {
    const int64_t some = 512;
    for (int64_t lo = 0; lo < d; lo += some) {
        const int64_t n = std::min(some, d - lo);
        for (int64_t r = 0; r < k; r++) {
            double sum[some] = {};
            for (int64_t i = 0; i < m; i++) {
                const double by = w[r * m + i];
                const float* row = v + i * d + lo;
                if (by != 0)
                    for (int64_t j = 0; j < n; j++) sum[j] += by * double(row[j]);
            }
            for (int64_t j = 0; j < n; j++) out[r * d + lo + j] = float(sum[j]);
        }
    }
}

// Batcher's odd-even merge sort: which rows are compared, whatever is in them.
static std::vector<std::pair<int32_t, int32_t>> network(int64_t m) {
    std::vector<std::pair<int32_t, int32_t>> pairs;
    for (int64_t p = 1; p < m; p *= 2)
        for (int64_t k = p; k >= 1; k /= 2)
            for (int64_t j = k % p; j + k < m; j += 2 * k)
                for (int64_t i = 0; i < std::min(k, m - j - k); i++)
                    if ((i + j) / (2 * p) == (i + j + k) / (2 * p)) pairs.emplace_back(i + j, i + j + k);
    return pairs;
}

// Every column's mean without its f smallest and largest values, added in double from the smallest on.
extern "C" void fedbraid_trimmed(const float* v, float* out, int64_t f, int64_t m, int64_t d) {
    const auto pairs = network(m);
    std::vector<column_floats> column(m);
    for (int64_t lo = 0; lo < d; lo += WIDE) {
        const int64_t n = std::min(WIDE, d - lo);
        for (int64_t i = 0; i < m; i++) {
            column_floats x = {};
            if (n == WIDE) std::memcpy(&x, v + i * d + lo, sizeof x);
            else std::memcpy(&x, v + i * d + lo, 4 * n);
            column[i] = x;
        }
        for (const auto& [low, high] : pairs) {
            const column_floats x = column[low], y = column[high];
            column[low] = x < y ? x : y;
            column[high] = x < y ? y : x;
        }
        column_doubles sum = {};
        for (int64_t i = f; i < m - f; i++) sum += __builtin_convertvector(column[i], column_doubles);
        sum /= double(m - 2 * f);
        const column_floats mean = __builtin_convertvector(sum, column_floats);
        std::memcpy(out + lo, &mean, 4 * n);
    }
}
"""


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    try:
        return library(SOURCE, (*FLAGS, ROUNDED))
    except CompileError:
        return None


LARGE = 2**16  # numbers of a cohort from which compiling is worth it


def _fits(v: Tensor) -> bool:
    """Whether these are rows that a pass can read."""
    return v.device.type == "cpu" and v.dtype == torch.float32 and v.is_contiguous() and v.numel() >= LARGE


def products(a: Tensor, b: Tensor | None) -> Tensor | None:
    """⟨a_i, b_k⟩, or ⟨a_i, a_i⟩, in float64."""
    lib = _library() if _fits(a) and (b is None or (b.is_contiguous() and b.dtype == a.dtype)) else None
    if lib is None:
        return None
    other, same = a if b is None else b, b is a
    out = torch.zeros(len(a), 1 if b is None else len(b), dtype=torch.float64)
    call = function(lib.fedbraid_products, "ppp nnn nn")
    call(a.data_ptr(), other.data_ptr(), out.data_ptr(), len(a), out.shape[1], a.shape[1], same, b is None)
    if same:
        out = out.triu() + out.triu(1).T
    return out.squeeze(1) if b is None else out


def combined(weights: Tensor, v: Tensor) -> Tensor | None:
    """Σ_i w_ki v_i."""
    lib = _library() if _fits(v) else None
    if lib is None:
        return None
    weights, out = weights.double().contiguous(), torch.empty(len(weights), v.shape[1])
    function(lib.fedbraid_combined, "ppp nnn")(
        weights.data_ptr(), v.data_ptr(), out.data_ptr(), len(weights), *v.shape
    )
    return out


def trimmed(v: Tensor, f: int) -> Tensor | None:
    """Every column's mean without its f smallest and largest values."""
    lib = _library() if _fits(v) else None
    if lib is None:
        return None
    out = torch.empty(v.shape[1])
    function(lib.fedbraid_trimmed, "pp nnn")(v.data_ptr(), out.data_ptr(), f, *v.shape)
    return out


def hang_in() -> None:
    """Let the core's robust rules use compiled passes."""
    passes.products, passes.combined, passes.trimmed = products, combined, trimmed
