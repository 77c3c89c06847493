"""Do parts that were never meant for each other do what their definitions say? A draw of them, beside the interpreter.

`python tests/pairs.py --count 2000` draws as many as one likes; docs/combinations.md says what came of it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pairs
import pytest
from interpreter import Setting, Spec, Tick, interpret, part

import fedbraid as fb

CASES = 150
CHUNK = 10
REFUSED = {
    "scallion": ("uploads ['dc'] and no update", "needs 'delta'"),
    "fednova": ("keep delta = x − y",),
}
SECURE = {  # what a secure sum refuses, and of which cases
    "the number 'a'": lambda case: case.spec.rule.name == "fednova",
    "crosses links as its root": lambda case: (
        case.spec.rule.name == "mfl" and case.spec.rule["optimizer"] != "sgdm"
    ),
    "do not add up": lambda case: case.spec.up is not None,
    "mixes updates with weights": lambda case: case.spec.up is not None and case.spec.up["of_weights"],
    "encodes the model that": lambda case: case.spec.rule.name == "scallion" and case.spec.up is not None,
    "needs 'delta'": lambda case: case.spec.rule.name == "scallion",
    "sees single uploads": lambda case: case.spec.attack is not None,
    "server rescales them": lambda case: case.spec.attack is not None,
    "steps of 1 of": lambda case: case.schedule in ("immediate", "poisson"),
    "by its version or age": lambda case: case.schedule == "buffered",
    "by the steps that each": lambda case: case.batch is not None and case.spec.rule.name == "scallion",
}
ALWAYS = (  # whatever the rule
    "cuts differences from memory", "server rescales them before they are gathered", "vectors, got",
    "which is no mean of what the cohort sent",
)  # fmt: skip


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_a_combination_agrees_with_the_interpreter(first):
    for seed in range(first, first + CHUNK):
        case = pairs.draw(seed)
        came = pairs.check(case)
        if came.kind == "refused" and case.spec.gather.name == "secure":
            said = [text for text, holds in SECURE.items() if text in came.text and holds(case)]
            assert said, f"{case}\n{came.text}"
            continue
        if came.kind == "refused":  # such as SCALLION, which uploads no update
            said = (*REFUSED.get(case.spec.rule.name, ()), *ALWAYS)
            assert any(text in came.text for text in said), f"{case}\n{came.text}"
            continue
        assert came.kind == "agrees", f"{case}\n{came.kind}: {came.text}"
        far = came.moved > 1e-2 or case.schedule == "poisson"  # of whose few rounds most may be empty
        assert far, f"{case}\nhardly moved, so that agreeing means little"


def test_secure_sums_agree_with_the_interpreter_or_say_why_not():
    """A draw of their own: of all draws one in eight has them, mostly over a codec that they refuse."""
    kinds = []
    for seed in range(60):
        rng = np.random.default_rng([seed, 99])
        chosen = {axis: names[rng.integers(len(names))] for axis, names in pairs.AXES.items()}
        case = pairs.make(chosen | {"gather": "secure", "up": "plain", "attack": "none"}, seed)
        came = pairs.check(case)
        kinds.append(came.kind)
        if came.kind == "refused":
            assert any(text in came.text and holds(case) for text, holds in SECURE.items()), (
                f"{case}\n{came.text}"
            )
        else:
            assert came.kind == "agrees", f"{case}\n{came.text}"
    assert kinds.count("agrees") > 25


def test_the_page_says_what_parts_declare():
    page = Path(__file__).parent.parent / "docs/combinations.md"
    assert pairs.between(page.read_text(), "declared") == pairs.declarations(), (
        "run tests/pairs.py --page again"
    )


def test_a_refusal_is_the_sentence_itself():
    from fedbraid.algorithms.scaffold import ControlVariate, ControlVariates

    with pytest.raises(fb.FedbraidError, match=r"^two parts of one algorithm both send 'c'; rename it"):
        fb.Algorithm(ControlVariates(), server=fb.pipeline(ControlVariate(), ControlVariate()))


def test_the_gradient_worked_out_by_hand_is_the_slope_of_the_loss():
    def loss(x, rows):
        W, b, V, c = (x[lo:hi] for lo, hi, _ in pairs.SLOTS)
        out = np.tanh(pairs.INPUTS[rows] @ W.reshape(4, 3).T + b) @ V.reshape(2, 4).T + c
        return ((out - pairs.TARGETS[rows]) ** 2).mean()

    rows = np.arange(3, 9)
    slope = [
        (loss(pairs.X0 + e, rows) - loss(pairs.X0 - e, rows)) / 2e-5 for e in 1e-5 * np.eye(len(pairs.X0))
    ]
    np.testing.assert_allclose(pairs.gradient(pairs.X0, rows), slope, atol=1e-8)


# The interpreter itself: at its neutral settings a definition is another one ----------------------------


def given(cohorts, K=3, **options):
    """A setting without the package: full batches, rounds of these cohorts."""
    every = lambda i: np.arange(pairs.OFFSETS[i], pairs.OFFSETS[i + 1])  # noqa: E731
    ticks = [Tick(tuple(c), (t,) * len(c), len(pairs.SIZES)) for t, c in enumerate(cohorts)]
    return Setting(
        pairs.X0, pairs.SLOTS, pairs.SIZES, pairs.gradient, lambda i, version: [every(i)] * K, every,
        lambda use, codec, v: np.round(v, 2), lambda i: False, ticks, **options,
    )  # fmt: skip


SOME = [(0, 3), (2, 3), (8, 1), (0, 1), (5, 3)]
ALL = [tuple(range(9))] * 4
ROUNDING = part("up", codec="rounding")
BETA = {"optimizer": "sgdm", "beta": 0.8}
PLAIN = Spec(weights="uniform")

SAME = {
    "AdaBest, nothing remembered": (Spec(part("adabest", mu=0), adjust=(part("adabest", beta=0),)), Spec(), SOME, {}),
    "AdaBest's server at β = 1": (Spec(adjust=(part("adabest", beta=1),)), Spec(adjust=(part("feddyn"),)), ALL, {}),
    "FedProx, no pull": (Spec(part("fedprox", mu=0)), Spec(), SOME, {}),
    "a trimmed mean of all": (Spec(gather=part("robust", rule="trimmed_mean", f=0)), PLAIN, SOME, {}),
    "a robust memory of all": (
        Spec(gather=part("robust", rule="trimmed_mean", f=0, memory=True)), Spec(gather=part("memory"), weights="uniform"), SOME, {},
    ),
    "no hostile client": (Spec(attack=part("alie", z=2.0)), Spec(), SOME, {}),
    "FedNova, equal K": (Spec(part("fednova")), Spec(), SOME, {"momentum": 0.5}),
    "FedNova, equal K, rounded": (Spec(part("fednova"), up=ROUNDING), Spec(up=ROUNDING), SOME, {}),
    "SCAFFOLD/m": (replace(PLAIN, rule=part("scaffold_m")), replace(PLAIN, rule=part("scaffold")), SOME, {"momentum": 0.5}),
    "SCALLION": (replace(PLAIN, rule=part("scallion", alpha=1)), replace(PLAIN, rule=part("scaffold")), SOME, {}),
    "SCAFFOLD, all, K = 1": (replace(PLAIN, rule=part("scaffold")), PLAIN, ALL, {"K": 1}),
    "FedVARP, all": (Spec(gather=part("memory")), Spec(), ALL, {}),
    "FedAdaVR's memory, all": (Spec(gather=part("memory", per_rate=True)), Spec(), ALL, {}),
    "the literal reading is MIFA, once all were seen": (
        Spec(gather=part("memory", normalise="population")), Spec(gather=part("mifa")), [*ALL[:1], *SOME], {},
    ),
    "FedGBO is Mimelite, all, K = 1": (
        replace(PLAIN, rule=part("fedgbo", **BETA)), replace(PLAIN, rule=part("mimelite", **BETA)), ALL,
        {"K": 1, "decay": 0.1, "momentum": 0.5},
    ),
    "MFL is Mimelite, all, K = 1": (
        replace(PLAIN, rule=part("mfl", **BETA)), replace(PLAIN, rule=part("mimelite", **BETA)), ALL, {"K": 1},
    ),
    "client-held memory": (
        Spec(gather=part("memory", per_rate=True, held="client")), Spec(gather=part("memory", per_rate=True)), SOME,
        {"lr_decay": 0.8},
    ),
    "ACED that forgets nothing": (Spec(gather=part("aced", limit=9)), Spec(gather=part("mifa")), SOME, {}),
    "FADAS, its first step": (
        Spec(optimizer=part("fadas", limit=9, **pairs.ADAPTIVE), lr=0.1),
        Spec(optimizer=part("adam", corrected=False, **pairs.ADAPTIVE), lr=0.1), SOME[:1], {},
    ),
    "GHBM, no momentum": (Spec(part("ghbm", tau=2, beta=0)), Spec(), SOME, {}),
}  # fmt: skip


@pytest.mark.parametrize("which", SAME)
def test_the_interpreter_reduces_as_the_papers_say(which):
    one, other, cohorts, options = SAME[which]
    moved = 0.0
    for (a, _), (b, _) in zip(
        interpret(one, given(cohorts, **options)), interpret(other, given(cohorts, **options))
    ):
        np.testing.assert_allclose(a, b, atol=1e-9)
        moved = max(moved, np.abs(a - pairs.X0).max())
    assert moved > 0.02
