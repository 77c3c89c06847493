"""Are robust averages what NumPy and byzfl make of the same matrix, and what their papers promise of them?"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from fedbraid.core import accelerators as passes
from fedbraid.core import robust_rules
from fedbraid.core.robust_rules import Judged, RobustRule
from fedbraid.engines.accelerators import robust as compiled
from fedbraid.errors import ConfigError

M, F = 11, 2
RULES: dict[str, dict[str, Any]] = {
    "median": {},
    "trimmed_mean": {"f": F},
    "krum": {"f": F},
    "multi_krum": {"f": F, "q": 5},
    "geometric_median": {},
    "centred_clip": {"tau": 2.0},
    "norm_bound": {"norm": 3.0},
}
BEFORE: list[dict[str, Any]] = [{}, {"before": "mixing", "f": F}, {"before": "bucketing", "s": 2}]


def rule(name: str, **options: Any) -> RobustRule:
    return RobustRule(name, **{**RULES[name], **options})


def matrix(m: int = M, d: int = 37, seed: int = 0) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    v = draw.normal(size=(m, d)) * draw.uniform(0.2, 2, (m, 1)) + 0.3
    return torch.from_numpy(v.astype(np.float32))


def average(
    how: RobustRule, v: torch.Tensor, order: Any = None, base: torch.Tensor | None = None
) -> np.ndarray:
    order = torch.arange(len(v)) if order is None else torch.as_tensor(order)
    decision = how.decide([Judged(v, base=base)], order)
    out = decision.apply(v).double()
    if base is not None and decision.rest is not None:
        out += float(decision.rest.sum()) * base.double()
    return out.numpy()


# NumPy's definitions --------------------------------------------------------------------------------


def distances(v: np.ndarray) -> np.ndarray:
    return np.square(v[:, None] - v[None]).sum(2)


def grouped(v: np.ndarray, how: RobustRule, order: np.ndarray) -> np.ndarray:
    if how.before == "mixing":
        near = distances(v).argsort(1)[:, : len(v) - how.f]
        return np.stack([v[row].mean(0) for row in near])
    if how.before == "bucketing":
        return np.stack([v[order[lo : lo + how.s]].mean(0) for lo in range(0, len(v), how.s)])
    return v


def defined(how: RobustRule, v: torch.Tensor, order: Any = None, base: Any = None) -> np.ndarray:
    """The rule as ALGORITHMS.md's table has it."""
    order = np.arange(len(v)) if order is None else order
    v = grouped(v.double().numpy(), how, order)
    z = np.zeros(v.shape[1]) if base is None else np.asarray(base, np.float64)
    m, f = len(v), how.f or 0
    if how.name == "median":
        return np.median(v, 0)
    if how.name == "trimmed_mean":
        return np.sort(v, 0)[f : m - f].mean(0)
    if how.name in ("krum", "multi_krum"):
        scores = np.sort(distances(v), 1)[:, 1 : m - f - 1].sum(1)  # without the zero to itself
        q = 1 if how.name == "krum" else how.q or m - f
        return v[scores.argsort()[:q]].mean(0)
    if how.name == "geometric_median":
        z = v.mean(0)
        for _ in range(8):
            w = 1 / np.maximum(1e-6, np.linalg.norm(v - z, axis=1))
            z = w @ v / w.sum()
        return z
    if how.name == "centred_clip":
        factor = np.minimum(1, how.tau / np.linalg.norm(v - z, axis=1))
        return z + (factor[:, None] * (v - z)).mean(0)
    norms = np.linalg.norm(v, axis=1)
    most = how.norm if how.quantile is None else np.quantile(norms, how.quantile)
    return (np.minimum(1, most / norms)[:, None] * v).mean(0)


CASES = [
    *product(RULES, BEFORE),
    ("norm_bound", {"norm": None, "quantile": 0.4}),
    ("multi_krum", {"q": None}),
]


@pytest.mark.parametrize("m", [11, 12])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_rule_is_numpys(name: str, options: dict[str, Any], m: int) -> None:
    v, how, order = (
        matrix(m),
        rule(name, **{"f": RULES[name].get("f"), **options}),
        np.random.default_rng(1).permutation(m),
    )
    if options.get("before") == "bucketing" and how.selects:
        how = rule(name, **options, f=1, **({"q": 2} if name == "multi_krum" else {}))
    np.testing.assert_allclose(average(how, v, order), defined(how, v, order), rtol=1e-6, atol=1e-6)


def test_a_centred_clip_moves_its_base() -> None:
    v, base, how = matrix(), matrix(1, seed=3)[0], rule("centred_clip")
    np.testing.assert_allclose(average(how, v, base=base), defined(how, v, base=base), rtol=1e-6, atol=1e-6)


def test_a_rule_is_byzfls() -> None:
    byzfl = pytest.importorskip("byzfl")
    v = matrix()
    x = v.double().numpy()
    mean = x.mean(0)
    for how, theirs in (
        (rule("median"), byzfl.Median()(x)),
        (rule("trimmed_mean"), byzfl.TrMean(F)(x)),
        (rule("krum"), byzfl.Krum(F + 1)(x)),  # which sums over one neighbor more
        (rule("centred_clip"), byzfl.CenteredClipping(tau=2.0)(x)),
        (rule("geometric_median"), byzfl.GeometricMedian(1e-6, 8)(x - mean) + mean),  # which starts from 0
        (rule("norm_bound"), byzfl.Clipping(3.0)(x.copy()).mean(0)),
        (rule("trimmed_mean", before="mixing"), byzfl.TrMean(F)(byzfl.NNM(F)(x))),
        (rule("median", before="mixing", f=F), byzfl.Median()(byzfl.NNM(F)(x))),
        (rule("multi_krum", q=M - F - 1), byzfl.MultiKrum(F + 1)(x)),
    ):
        np.testing.assert_allclose(average(how, v), theirs, rtol=1e-6, atol=1e-6, err_msg=repr(how))


# What rules promise ---------------------------------------------------------------------------------

BREAKING = {
    "median": {}, "trimmed_mean": {"f": 3}, "krum": {"f": 3}, "multi_krum": {"f": 3, "q": 4}, "geometric_median": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "far"),  # eight iterations from the mean come back from some thousands, and not from a million
    [(name, far) for name in BREAKING for far in (1e3, 1e6) if (name, far) != ("geometric_median", 1e6)],
)
def test_f_hostile_clients_stay_within_the_honest(name: str, far: float) -> None:
    honest = matrix(8, seed=5)
    how = RobustRule(name, **BREAKING[name])
    reach = (honest - honest.mean(0)).norm(dim=1).max()
    hostile = torch.full((3, honest.shape[1]), far) + matrix(3, seed=6)
    got = torch.from_numpy(average(how, torch.cat([hostile, honest]))).float()
    assert (got - honest.mean(0)).norm() <= 3 * reach
    low, high = honest.min(0).values, honest.max(0).values
    if name in ("median", "trimmed_mean"):
        assert ((got >= low - 1e-6) & (got <= high + 1e-6)).all()
    if name in ("krum", "multi_krum"):
        weights = how.decide([Judged(torch.cat([hostile, honest]))], torch.arange(11)).weights
        assert weights is not None
        assert not weights[:3].any()


@pytest.mark.parametrize("name", ["trimmed_mean", "krum", "multi_krum"])
def test_one_hostile_client_more_breaks_a_rule(name: str) -> None:
    honest = matrix(4, seed=5)
    hostile = torch.full((5, honest.shape[1]), 1e6) + matrix(5, seed=6) / 100
    how = RobustRule(name, f=4 if name == "trimmed_mean" else 3, **({"q": 2} if name == "multi_krum" else {}))
    assert np.abs(average(how, torch.cat([hostile, honest]))).max() > 1e3


def test_a_median_breaks_at_half() -> None:
    honest = matrix(4, seed=5)
    assert np.abs(average(RobustRule("median"), torch.cat([honest, torch.full((3, 37), 1e6)]))).max() < 10
    assert np.abs(average(RobustRule("median"), torch.cat([honest, torch.full((5, 37), 1e6)]))).max() > 1e3


def test_cuts_bound_what_one_client_does() -> None:
    honest = matrix()
    hostile = torch.cat([honest, torch.full((1, 37), 1e6)])
    for how, most in ((rule("norm_bound"), 3.0), (rule("centred_clip"), 2.0)):
        others = average(how, honest) * len(honest) / len(hostile)
        assert np.linalg.norm(average(how, hostile) - others) <= most / len(hostile) * (1 + 1e-5)


@pytest.mark.parametrize(("name", "before"), [*product(RULES, [None, "mixing"])])
def test_no_order_of_clients_matters(name: str, before: str | None) -> None:
    v, how = matrix(), rule(name, before=before, **({"f": F} if before else {}))
    mixed = v[torch.from_numpy(np.random.default_rng(2).permutation(M))]
    np.testing.assert_allclose(average(how, mixed), average(how, v), rtol=1e-6, atol=1e-6)


def test_vectors_of_a_client_are_judged_together() -> None:
    v, w = matrix(seed=1), matrix(d=50, seed=2)
    how = rule("multi_krum")
    apart = how.decide([Judged(v), Judged(w)], torch.arange(M))
    joined = how.decide([Judged(torch.cat([v, w], 1))], torch.arange(M))
    assert apart.weights is not None
    assert joined.weights is not None
    assert torch.equal(apart.weights, joined.weights)


def test_compiled_passes_give_torchs_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "LARGE", 1)
    if compiled.products(matrix(), None) is None:
        pytest.skip("no C++ compiler here")
    for m, d in ((20, 70_001), (7, 1024), (3, 5), (1, 3000)):
        v, z, w = matrix(m, d), matrix(2, d, seed=4), torch.rand(3, m, dtype=torch.float64)
        w[0, 0] = 0
        calls = {
            "products": [(v, v), (v, None), (v, z)], "combined": [(w, v)], "trimmed": [(v, (m - 1) // 2), (v, m // 5)]
        }  # fmt: skip
        for name, given in calls.items():
            with monkeypatch.context() as plain:
                plain.setattr(passes, name, getattr(passes, f"no_{name}"))
                expected = [getattr(robust_rules, name)(*args) for args in given]
            for args, one in zip(given, expected):
                assert torch.equal(getattr(compiled, name)(*args), one), name


# Refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "krumm"}, "unknown robust rule 'krumm'; did you mean 'krum'?"),
        ({"name": "median", "before": "mixin"}, "unknown before 'mixin'; did you mean 'mixing'?"),
        ({"name": "median", "f": 2}, "median takes no f=2"),
        ({"name": "krum"}, "krum needs f="),
        ({"name": "median", "before": "mixing"}, "median after 'mixing' needs f="),
        ({"name": "centred_clip"}, "centred_clip needs tau="),
        ({"name": "norm_bound"}, "norm= or quantile="),
        ({"name": "norm_bound", "norm": 1.0, "quantile": 0.5}, "norm= or quantile="),
        ({"name": "krum", "f": 1.5}, "got 1.5"),
        ({"name": "krum", "f": -1}, "got -1"),
        ({"name": "multi_krum", "f": 1, "q": 0}, "got 0"),
        ({"name": "centred_clip", "tau": 0}, "got 0"),
        ({"name": "norm_bound", "quantile": 1.5}, "got 1.5"),
        ({"name": "median", "s": 2}, "median takes no s=2"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        RobustRule(**options)


@pytest.mark.parametrize(
    ("how", "least"),
    [
        (RobustRule("krum", f=2), 7),
        (RobustRule("multi_krum", f=2, q=9), 9),
        (RobustRule("trimmed_mean", f=2), 5),
        (RobustRule("median", f=2, before="mixing"), 5),
        (RobustRule("krum", f=2, before="bucketing", s=2), 13),
        (RobustRule("median"), 1),
    ],
)
def test_a_cohort_that_is_too_small_is_refused(how: RobustRule, least: int) -> None:
    how.check(least)
    if least > 1:
        with pytest.raises(ConfigError, match=f"got .*{least - 1} clients"):
            how.check(least - 1)
