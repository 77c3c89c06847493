"""Theorem 5.4 on a convex problem: mushrooms, λ = 0.01, 100 clients of one label each, 5 a round, full local batches.

With one local step the only error is that of partial participation; with five, clients drift as well. `python
experiments/fedadavr/convex.py` computes f* by Newton's method in float64 and writes it to `optimum.json`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fedbraid as fb
from fedbraid.data import mushrooms as reader
from fedbraid.run.run import Run

HERE = Path(__file__).parent
L2, CLIENTS, PER_ROUND = 0.01, 100, 5


def zeros() -> nn.Module:
    model = nn.Linear(112, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


@cache
def everything() -> tuple[Tensor, Tensor]:
    """All rows, the ones that the library holds out for testing too."""
    data = reader.read()
    return torch.cat([data.inputs, data.test[0]]), torch.cat([data.targets, data.test[1]])


def mushrooms_one_label() -> fb.Task:
    """Clients of one label, 81 or 82 rows each; no bias; judged by the cost over everything."""
    x, y = everything()
    rows = [
        part
        for k, count in ((0, 48), (1, 52))
        for part in np.array_split(np.flatnonzero(y.numpy() == k), count)
    ]
    return fb.Task.from_table(zeros(), x, y, rows, test=(x, y), loss="logistic", name="mushrooms, one label")


@cache
def least() -> float:
    """f*, as this file wrote it."""
    found: float = json.loads((HERE / "optimum.json").read_text())["f"]
    return found


def cost(run: Run) -> dict[str, float]:
    """f − f* of the server's model in float64, f being the loss with its regulariser."""
    x, y = everything()
    w = run.state.average.double()
    signed = x.double() @ w * torch.where(y == 1, 1.0, -1.0).double()
    return {"above": float(nn.functional.softplus(-signed).mean() + L2 / 2 * w @ w) - least()}


def newton(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """The least cost."""
    signed = x * np.where(y == 1, 1.0, -1.0)[:, None]
    w = np.zeros(x.shape[1])
    for _ in range(100):
        p = 1 / (1 + np.exp(signed @ w))
        gradient = -signed.T @ p / len(x) + L2 * w
        if np.linalg.norm(gradient) < 1e-15:
            break
        w = w - np.linalg.solve(
            (signed * (p * (1 - p))[:, None]).T @ signed / len(x) + L2 * np.eye(len(w)), gradient
        )
    f = float(np.logaddexp(0, -signed @ w).mean() + L2 / 2 * w @ w)
    return {"f": f, "gradient_norm": float(np.linalg.norm(gradient))}


if __name__ == "__main__":
    facts = newton(*(t.numpy().astype(np.float64) for t in everything()))
    (HERE / "optimum.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(facts)
