"""Adam and its kin: both moments and the direction in one pass, where torch makes seven."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from fedbraid.engines.native.build import NativeUnavailable, library

SOURCE = r"""
#include <cmath>
#include <cstdint>

static float adam(float v, float g, float m, float b) { return b * v + (1 - b) * g * g; }
static float belief(float v, float g, float m, float b) { return b * v + (1 - b) * (g - m) * (g - m); }
static float yogi(float v, float g, float m, float b) {
    const float gap = v - g * g;
    return v - (1 - b) * g * g * float((gap > 0) - (gap < 0));
}
static float adagrad(float v, float g, float m, float b) { return v + g * g; }

template <float second(float, float, float, float)>
static void step(const float* __restrict g, const float* __restrict m, const float* __restrict v, float* __restrict m1,
                 float* __restrict v1, float* __restrict out, int64_t d, float b1, float b2, float eps, float scale) {
    for (int64_t j = 0; j < d; j++) {
        const float first = g[j] + b1 * (m[j] - g[j]), next = second(v[j], g[j], first, b2);
        m1[j] = first;
        v1[j] = next;
        out[j] = first / (std::sqrt(next) + eps) * scale;
    }
}

extern "C" void fedbraid_moments(int64_t kind, const float* g, const float* m, const float* v, float* m1, float* v1,
                                 float* out, int64_t d, float b1, float b2, float eps, float scale) {
    auto* run = kind == 0 ? step<adam> : kind == 1 ? step<belief> : kind == 2 ? step<yogi> : step<adagrad>;
    run(g, m, v, m1, v1, out, d, b1, b2, eps, scale);
}
"""

Moments = Callable[[int, Tensor, Tensor, Tensor, float, float, float, float], tuple[Tensor, Tensor, Tensor]]


@lru_cache(maxsize=1)
def moments() -> Moments | None:
    """`moments(kind, g, m, v, β₁, β₂, ε, scale)`: m, v and scale·m/(√v + ε); None where there is no compiler.

    The kinds are Adam, AdaBelief, Yogi and Adagrad.
    """
    try:
        call = library(SOURCE).fedbraid_moments
    except NativeUnavailable:
        return None
    call.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 6, ctypes.c_int64, *[ctypes.c_float] * 4]
    call.restype = None

    def follow(
        kind: int, g: Tensor, m: Tensor, v: Tensor, beta1: float, beta2: float, eps: float, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        g, m, v = g.contiguous(), m.contiguous(), v.contiguous()
        new = torch.empty_like(m), torch.empty_like(v), torch.empty_like(g)
        call(kind, *(t.data_ptr() for t in (g, m, v, *new)), len(g), beta1, beta2, eps, scale)
        return new

    return follow
