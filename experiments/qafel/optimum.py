"""f* of the mushrooms problem by Newton's method in float64: `python experiments/qafel/optimum.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from experiments.qafel.grid import L2, everything  # noqa: E402


def newton(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    signed = x * np.where(y == 1, 1.0, -1.0)[:, None]

    def cost(w: np.ndarray) -> float:
        return float(np.logaddexp(0, -signed @ w).mean() + L2 / 2 * w @ w)

    w = np.zeros(x.shape[1])
    for _ in range(100):
        p = 1 / (1 + np.exp(signed @ w))
        gradient = -signed.T @ p / len(x) + L2 * w
        if np.linalg.norm(gradient) < 1e-14:
            break
        hessian = (signed * (p * (1 - p))[:, None]).T @ signed / len(x) + L2 * np.eye(len(w))
        step, size = np.linalg.solve(hessian, gradient), 1.0
        while cost(w - size * step) > cost(w) and size > 1e-10:
            size /= 2
        w = w - size * step
    return {"f": cost(w), "gradient_norm": float(np.linalg.norm(gradient)), "norm": float(np.linalg.norm(w))}


def main() -> None:
    x, y = (t.numpy().astype(np.float64) for t in everything())
    facts = {"plain": newton(x, y), "intercept": newton(np.hstack([x, np.ones((len(x), 1))]), y)}
    (HERE / "optimum.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(facts)


if __name__ == "__main__":
    main()
