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

static const int64_t CHUNK = 1024, LANES = 8, COLUMNS = 128;
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef double doubles __attribute__((vector_size(8 * LANES)));

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
    if (own) {  // row by row, as memory is read fastest
        for (int64_t i = 0; i < m; i++)
            for (int64_t lo = 0; lo < d; lo += CHUNK) {
                const float* x = a + i * d + lo;
                if (d - lo < CHUNK) {
                    left.assign(CHUNK, 0);
                    std::copy_n(x, d - lo, left.data());
                    x = left.data();
                }
                TILES[0][0](x, x, CHUNK, out + i, 1);
            }
        return;
    }
    for (int64_t lo = 0; lo < d; lo += CHUNK) {
        const float *x = a + lo, *y = b + lo;
        int64_t wide = d;
        if (d - lo < CHUNK) {  // zeros at the end
            left.assign(m * CHUNK, 0);
            right.assign(k * CHUNK, 0);
            for (int64_t i = 0; i < m; i++) std::copy_n(a + i * d + lo, d - lo, left.data() + i * CHUNK);
            for (int64_t i = 0; i < k; i++) std::copy_n(b + i * d + lo, d - lo, right.data() + i * CHUNK);
            x = left.data(), y = right.data(), wide = CHUNK;
        }
        for (int64_t i = 0; i < m; i += 4)
            for (int64_t j = same ? i : 0; j < k; j += 4)
                TILES[std::min<int64_t>(m - i, 4) - 1][std::min<int64_t>(k - j, 4) - 1](
                    x + i * wide, y + j * wide, wide, out + i * k + j, k);
    }
}

// out[k, d] = sum of w_ki v_i, client by client in double.
extern "C" void fedbraid_combined(const double* w, const float* v, float* out, int64_t k, int64_t m, int64_t d) {
    const int64_t some = 16384;  // long stretches of a row, as memory is read fastest
    std::vector<double> sum(some);
    for (int64_t lo = 0; lo < d; lo += some) {
        const int64_t n = std::min(some, d - lo);
        for (int64_t r = 0; r < k; r++) {
            std::fill(sum.begin(), sum.end(), 0.0);
            std::vector<int64_t> has;  // a weight
            for (int64_t i = 0; i < m; i++)
                if (w[r * m + i] != 0) has.push_back(i);
            const int64_t count = has.size(), fours = count / 4 * 4;
            for (int64_t c = 0; c < fours; c += 4) {
                const double *by = w + r * m, p = by[has[c]], q = by[has[c + 1]], s = by[has[c + 2]], t = by[has[c + 3]];
                const float *x = v + has[c] * d + lo, *y = v + has[c + 1] * d + lo, *z = v + has[c + 2] * d + lo,
                            *u = v + has[c + 3] * d + lo;
                for (int64_t j = 0; j < n; j++)
                    sum[j] = sum[j] + p * double(x[j]) + q * double(y[j]) + s * double(z[j]) + t * double(u[j]);
            }
            for (int64_t c = fours; c < count; c++) {
                const double by = w[r * m + has[c]];
                const float* row = v + has[c] * d + lo;
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
    std::vector<float> block(m * COLUMNS);
    for (int64_t lo = 0; lo < d; lo += COLUMNS) {
        const int64_t n = std::min(COLUMNS, d - lo);
        for (int64_t i = 0; i < m; i++) std::memcpy(&block[i * COLUMNS], v + i * d + lo, 4 * n);
        for (const auto& [low, high] : pairs) {
            float *__restrict x = &block[low * COLUMNS], *__restrict y = &block[high * COLUMNS];
            for (int64_t j = 0; j < COLUMNS; j++) {
                const float a = x[j], b = y[j];
                x[j] = a < b ? a : b;
                y[j] = a < b ? b : a;
            }
        }
        double sum[COLUMNS] = {};
        for (int64_t i = f; i < m - f; i++)
            for (int64_t j = 0; j < COLUMNS; j++) sum[j] += double(block[i * COLUMNS + j]);
        for (int64_t j = 0; j < n; j++) out[lo + j] = float(sum[j] / double(m - 2 * f));
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


def install() -> None:
    """Let the core's robust rules use compiled passes."""
    passes.products, passes.combined, passes.trimmed = products, combined, trimmed
