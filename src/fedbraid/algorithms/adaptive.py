"""Adaptive server optimisers on the mean update: FedAdagrad, FedAdam, FedYogi (Reddi et al. 2021), FedAdaBelief, FedLamb.

Two variants of the same formulas: `variant="reddi"` steps with m/(√v + ε), v_0 = ε² and no bias
correction, as the FedOpt paper does; `"corrected"` is the bias-corrected form with v_0 = 0 that FedAdaVR
uses. Reddi's three default to the first, the other two to the second. `v0` starts the second moment elsewhere,
such as at 1, where FedGBO's authors start their baselines. FedAdam alone has a third: `"flower"` steps with Flower's
own correction of the rate, from v_0 = 0.
"""

from __future__ import annotations

from fedbraid.algorithms._build import ADAPTIVE_RATE, PLAIN, builder, searched
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import number, one_of
from fedbraid.core.gather import Mean
from fedbraid.core.optim import AdaBelief, Adagrad, Adam, FlowerAdam, Optimize, TrustRatio, Yogi
from fedbraid.core.transform import Scale, Transform, pipeline


def _moments(variant: str, eps: float, v0: float | None) -> tuple[float, bool]:
    """(v_0, whether moments are bias-corrected)."""
    one_of("variant", variant, ("reddi", "corrected"))
    reddi = variant == "reddi"
    start = (eps * eps if reddi else 0.0) if v0 is None else v0
    number("v0", start, "[0, inf)")
    return start, not reddi


def _stepped(optimizer: Adam, lr: float, weights: str, *more: Transform) -> Algorithm:
    return Algorithm(gather=Mean(weights), server=pipeline(Optimize(optimizer), *more, Scale(lr)), work=PLAIN)


@builder
@searched(lr=ADAPTIVE_RATE)
def fedadagrad(
    lr: float = 0.01,
    beta1: float = 0.0,
    beta2: float = 0.0,
    eps: float = 1e-3,
    variant: str = "reddi",
    v0: float | None = None,
    weights: str = "samples",
) -> Algorithm:
    """FedAdagrad: v ← v + G². It never forgets, so beta2, there for the family's sake, changes nothing."""
    return _stepped(Adagrad(beta1, beta2, eps, _moments(variant, eps, v0)[0]), lr, weights)


@builder
@searched(lr=ADAPTIVE_RATE)
def fedadam(
    lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-3,
    variant: str = "reddi",
    v0: float | None = None,
    weights: str = "samples",
) -> Algorithm:
    """FedAdam: v ← β₂v + (1−β₂)G². variant="flower" multiplies lr by √(1−β₂ᵀ⁺¹)/(1−β₁ᵀ⁺¹), as Flower does."""
    if variant == "flower":
        number("v0", v0 or 0.0, "[0, inf)")
        return _stepped(FlowerAdam(beta1, beta2, eps, v0 or 0.0), lr, weights)
    return _stepped(Adam(beta1, beta2, eps, *_moments(variant, eps, v0)), lr, weights)


@builder
@searched(lr=ADAPTIVE_RATE)
def fedyogi(
    lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-3,
    variant: str = "reddi",
    v0: float | None = None,
    weights: str = "samples",
) -> Algorithm:
    """FedYogi: v ← v − (1−β₂)G²·sgn(v − G²)."""
    return _stepped(Yogi(beta1, beta2, eps, *_moments(variant, eps, v0)), lr, weights)


@builder
@searched(lr=ADAPTIVE_RATE)
def fedadabelief(
    lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    variant: str = "corrected",
    v0: float | None = None,
    weights: str = "samples",
) -> Algorithm:
    """FedAdaBelief: the second moment of G − m."""
    return _stepped(AdaBelief(beta1, beta2, eps, *_moments(variant, eps, v0)), lr, weights)


@builder
@searched(lr=ADAPTIVE_RATE)
def fedlamb(
    lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, variant: str = "corrected",
    v0: float | None = None, layerwise: bool = True, weights: str = "samples",
) -> Algorithm:  # fmt: skip
    """FedLamb: Adam's direction scaled per layer by ‖x‖/‖r‖ (or over the whole vector)."""
    return _stepped(Adam(beta1, beta2, eps, *_moments(variant, eps, v0)), lr, weights, TrustRatio(layerwise))
