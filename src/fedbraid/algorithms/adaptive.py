"""Adaptive server optimizers on the mean update.

FedAdagrad, FedAdam and FedYogi (Reddi et al. 2021, Algorithm 2), FedAdaBelief, FedLamb. Their formulas are in `core/optim.py`.

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
    """FedAdagrad (Reddi et al. 2021).

    m ← β₁m + (1−β₁)G;  v ← v + G²;  x ← x − lr · m/(√v + ε), G = Σ_S p_i Δ_i

    It never forgets, so beta2, there for the family's sake, changes nothing.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.fedadagrad(lr=0.03), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.5
    True
    """
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
    """FedAdam (Reddi et al. 2021).

    m ← β₁m + (1−β₁)G;  v ← β₂v + (1−β₂)G²;  x ← x − lr · m/(√v + ε), G = Σ_S p_i Δ_i

    variant="flower" multiplies lr by √(1−β₂ᵀ⁺¹)/(1−β₁ᵀ⁺¹), as Flower does.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.fedadam(lr=0.03), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.7
    True
    """
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
    """FedYogi (Reddi et al. 2021).

    m ← β₁m + (1−β₁)G;  v ← v − (1−β₂)G²·sgn(v − G²);  x ← x − lr · m/(√v + ε), G = Σ_S p_i Δ_i

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.fedyogi(lr=0.03), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.7
    True
    """
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
    """FedAdaBelief: AdaBelief (Zhuang et al. 2020) on the mean update.

    m ← β₁m + (1−β₁)G;  z ← β₂z + (1−β₂)(G − m)²;  x ← x − lr · m̂/(√ẑ + ε), G = Σ_S p_i Δ_i

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.fedadabelief(lr=0.01), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.7
    True
    """
    return _stepped(AdaBelief(beta1, beta2, eps, *_moments(variant, eps, v0)), lr, weights)


@builder
@searched(lr=ADAPTIVE_RATE)
def fedlamb(
    lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, variant: str = "corrected",
    v0: float | None = None, layerwise: bool = True, weights: str = "samples",
) -> Algorithm:  # fmt: skip
    """FedLamb: Lamb (You et al. 2020) on the mean update.

    r = m̂/(√v̂ + ε) as Adam has it;  x_ℓ ← x_ℓ − lr · (‖x_ℓ‖/‖r_ℓ‖) r_ℓ per layer ℓ

    layerwise=False takes one ratio over the whole vector.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> result = fb.simulate(task, fb.fedlamb(lr=0.03), fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.4
    True
    """
    return _stepped(Adam(beta1, beta2, eps, *_moments(variant, eps, v0)), lr, weights, TrustRatio(layerwise))
