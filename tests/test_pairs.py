"""Do parts that were never meant for each other do what their definitions say? A draw of them, beside the interpreter.

`python tests/pairs.py --count 2000` draws as many as one likes; docs/combinations.md says what came of it.
"""

from __future__ import annotations

import numpy as np
import pairs
import pytest

CASES = 150
CHUNK = 10


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_a_combination_agrees_with_the_interpreter_or_says_why_not(first):
    for seed in range(first, first + CHUNK):
        case = pairs.draw(seed)
        came = pairs.check(case)
        assert came.kind != "misses", f"{case}\n{came.text}"
        if came.kind == "agrees":
            assert came.moved > 1e-2, f"{case}\nhardly moved, so that agreeing means little"


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
