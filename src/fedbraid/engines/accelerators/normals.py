"""Normal numbers in one pass where NumPy makes seventy, to the same bits."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbraid.core import accelerators as passes
from fedbraid.engines.accelerators.swap import ROUNDED, function
from fedbraid_native.build import FLAGS, library
from fedbraid_native.errors import CompileError

SOURCE = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

static const int64_t some = 1024;  // numbers that stay in the first cache

static inline uint32_t mixed(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

template <class To, class From>
static inline To as(From from) {
    To to;
    std::memcpy(&to, &from, 4);
    return to;
}

static inline float log(float x) {
    const int32_t bits = as<int32_t>(x) - 0x3f3504f3;
    const float e = float(bits >> 23), f = as<float>((bits & 0x7fffff) + 0x3f3504f3) - 1.f, z = f * f;
    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    return (f + (p * f * z + e * -2.12194440e-4f - z * 0.5f)) + e * 0.693359375f;
}

// As rng.gaussian has it, line by line.
extern "C" void fedbraid_normals(float* to, const uint64_t* keys, int64_t m, int64_t count) {
    const int64_t half = (count + 1) / 2;
    for (int64_t i = 0; i < m; i++)
        for (int64_t lo = 0; lo < half; lo += some) {
            const uint32_t low = uint32_t(keys[i]), high = uint32_t(keys[i] >> 32), first = uint32_t(lo);
            float cosines[some], sines[some];
            for (uint32_t j = 0; j < some; j++) {
                const uint32_t at = (first + j) ^ low;
                const uint32_t u = mixed(mixed(at) ^ high), w = mixed(mixed(at ^ 0x9e3779b9u) ^ high);
                const float share = (float(int32_t(u >> 1)) + 0.5f) * 0x1p-31f, square = -2.f * log(share);
                const float radius = std::sqrt(square > 0 ? square : 0.f);
                const float turns = float(int32_t(w)) * 0x1p-32f;
                const float quarters = (turns * 4.f + 12582912.f) - 12582912.f, f = turns - quarters * 0.25f, z = f * f;
                float s = 42.0586939f, c = 60.2446414f;
                s = s * z - 76.7058598f, c = c * z - 85.4568172f;
                s = s * z + 81.6052493f, c = c * z + 64.9393940f;
                s = s * z - 41.3417022f, c = c * z - 19.7392088f;
                s = s * z + 6.28318531f, c = c * z + 1.f;
                s *= f;
                const uint32_t k = uint32_t(int32_t(quarters));
                const float x = k & 1 ? s : c, y = k & 1 ? c : s;
                cosines[j] = as<float>(as<uint32_t>(radius * x) ^ ((k + 1) & 2) << 30);
                sines[j] = as<float>(as<uint32_t>(radius * y) ^ (k & 2) << 30);
            }
            float* row = to + i * count;
            std::memcpy(row + lo, cosines, 4 * std::min(some, half - lo));
            std::memcpy(row + half + lo, sines, 4 * std::max<int64_t>(0, std::min(some, count - half - lo)));
        }
}
"""

ENOUGH = 2**14  # numbers from which a call is worth it


@lru_cache(maxsize=1)
def _compiled() -> Any:
    try:
        return function(library(SOURCE, (*FLAGS, ROUNDED)).fedbraid_normals, "pp nn")
    except CompileError:
        return None


def normals(keys: NDArray[np.uint64], count: int) -> NDArray[np.float32] | None:
    """So many for every key, None where they are few or there is no compiler."""
    call = _compiled() if len(keys) * count >= ENOUGH else None
    if call is None:
        return None
    keys, made = np.ascontiguousarray(keys), np.empty((len(keys), count), np.float32)
    call(made.ctypes.data_as(ctypes.c_void_p), keys.ctypes.data_as(ctypes.c_void_p), *made.shape)
    return made


def install() -> None:
    """Let the core draw normal numbers in one compiled pass."""
    passes.normals = normals
