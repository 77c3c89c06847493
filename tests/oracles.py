"""A tiny problem whose gradient is worked out by hand in NumPy, and the few sums that every transcription needs.

Nothing here is taken from the library's code: the model is 4 → 3 tanh → 3 softmax, flattened layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import fedbraid as fb

SIZES = (3, 5, 8, 4, 7, 6, 9, 2)
LAYERS = (slice(0, 12), slice(12, 15), slice(15, 24), slice(24, 27))  # two matrices, each with its bias
MATRICES = (LAYERS[0], LAYERS[2])
VMAP = ENGINE = fb.engines.in_process(backend="vmap")


class Problem:
    """Clients of unequal size; `alike` makes a client's samples copies of one, so that any batch gives its gradient."""

    def __init__(self, alike: bool = False, sizes: tuple[int, ...] = SIZES, seed: int = 5) -> None:
        rng = np.random.default_rng(seed)
        self.data = []
        for i, n in enumerate(sizes):
            a, t = rng.normal(size=(n, 4)) + 0.3 * i, (rng.integers(0, 3, n) + i) % 3
            if alike:
                a, t = np.repeat(a[:1], n, 0), np.repeat(t[:1], n, 0)
            self.data.append((a.astype(np.float32), t))
        self.test = (rng.normal(size=(20, 4)).astype(np.float32), rng.integers(0, 3, 20))
        self.n = np.array(sizes, np.float64)
        self.N = len(sizes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
        self.task = fb.Task.from_arrays(model, clients=self.data, test=self.test)
        self.layout = fb.Layout.of(model)
        self.x0 = np.concatenate([p.detach().double().numpy().ravel() for p in model.parameters()])

    def loss(self, x: np.ndarray, data: tuple[np.ndarray, np.ndarray] | None = None) -> float:
        return self._pass(x, *(data or self.test))[0]

    def grad(self, x: np.ndarray, i: int) -> np.ndarray:
        """The gradient of client i's mean loss over its whole local set."""
        return self._pass(x, *self.data[i])[1]

    def pooled(self, x: np.ndarray) -> np.ndarray:
        """The gradient over everybody's samples together."""
        return self._pass(
            x, np.concatenate([a for a, _ in self.data]), np.concatenate([t for _, t in self.data])
        )[1]

    @staticmethod
    def _pass(x: np.ndarray, a: np.ndarray, t: np.ndarray) -> tuple[float, np.ndarray]:
        a = a.astype(np.float64)
        W, b, V, c = (x[at] for at in LAYERS)
        W, V = W.reshape(3, 4), V.reshape(3, 3)
        hidden = np.tanh(a @ W.T + b)
        out = hidden @ V.T + c
        out = out - out.max(1, keepdims=True)
        prob = np.exp(out) / np.exp(out).sum(1, keepdims=True)
        loss = -np.log(prob[np.arange(len(t)), t]).mean()
        d_out = prob.copy()
        d_out[np.arange(len(t)), t] -= 1
        d_out /= len(t)
        d_in = (d_out @ V) * (1 - hidden**2)
        return loss, np.concatenate(
            [(d_in.T @ a).ravel(), d_in.sum(0), (d_out.T @ hidden).ravel(), d_out.sum(0)]
        )

    def p(self, clients: Any, kind: str) -> np.ndarray:
        """Weights normalised over these clients."""
        w = self.n[list(clients)] if kind == "samples" else np.ones(len(clients))
        return w / w.sum()

    def local(
        self, x: np.ndarray, i: int, K: int, lr: float, rho: float = 0.0, bend: Any = None, wd: float = 0.0
    ) -> np.ndarray:
        """y_K after K local steps from x: y ← y − lr·b, b ← ρb + v, v the bent gradient."""
        y, b = x.copy(), np.zeros_like(x)
        for _ in range(K):
            g = self.grad(y, i) + wd * y
            v = g if bend is None else bend(g, y)
            b = rho * b + v
            y = y - lr * b
        return y


@dataclass
class Trial:
    """One run of the library beside a transcription: the settings that matter, and who took part when."""

    weights: str = "samples"
    rho: float = 0.0
    decay: float = 1.0
    lr: float = 0.3
    uneven: bool = False  # clients take different numbers of steps
    steps: int = 7
    cohort: int = 3
    seed: int = 3
    p: Problem = field(init=False)

    def __post_init__(self) -> None:
        self.p = _problem(self.uneven)

    @property
    def work(self) -> fb.Work:
        rest = {"lr": self.lr, "momentum": self.rho, "lr_decay": self.decay}
        return fb.Work(epochs=1, batch=2, **rest) if self.uneven else fb.Work(steps=3, batch=None, **rest)

    def K(self, i: int) -> int:
        return -(-int(self.p.n[i]) // 2) if self.uneven else 3

    def a(self, i: int) -> float:
        """The effective number of steps: K unless there is momentum."""
        K, rho = self.K(i), self.rho
        return (K - rho * (1 - rho**K) / (1 - rho)) / (1 - rho)

    def rate(self, t: int) -> float:
        return self.lr * self.decay**t

    def run(self, algorithm: fb.Algorithm, schedule: Any = None, **options: Any) -> Any:
        """The library's result; rounds in which clients skip and come back, unless told otherwise."""
        schedule = schedule or fb.rounds(self.steps, clients=self.cohort)
        options = {"engine": ENGINE, "evaluate_every": None} | options
        result = fb.simulate(self.p.task, algorithm, self.work, schedule, seed=self.seed, **options)
        self.cohorts = [record["clients"] for record in result.history]
        return result

    def local(self, x: np.ndarray, i: int, t: int, bend: Any = None) -> np.ndarray:
        return self.p.local(x, i, self.K(i), self.rate(t), self.rho, bend)


_MADE: dict[bool, Problem] = {}


def _problem(alike: bool) -> Problem:
    if alike not in _MADE:
        _MADE[alike] = Problem(alike)
    return _MADE[alike]


TRIALS = [
    Trial(),
    Trial(weights="uniform", rho=0.5, decay=0.8),
    Trial(uneven=True, rho=0.5, decay=0.9),
    Trial(weights="uniform", uneven=True),
]


def trial_name(trial: Trial) -> str:
    return f"{trial.weights}-rho{trial.rho}-{'uneven' if trial.uneven else 'even'}"


def agree(x: Any, expected: np.ndarray, trial: Trial, tol: float = 1e-5) -> None:
    """The same model, and one that training has moved."""
    got = np.asarray(x, np.float64)
    assert np.abs(expected - trial.p.x0).max() > 0.02, "the run hardly moved, so that agreeing means little"
    np.testing.assert_allclose(got, expected, rtol=0, atol=tol)


# Quantisers, per layer ---------------------------------------------------------------------------------


def symmetric(v: np.ndarray, top: int, layers: Any) -> np.ndarray:
    """int8 (top 127) and int4 (top 7): α = max|w|/top, q = clip(round(w/α), ±top)."""
    out = v.copy()
    for at in layers:
        alpha = np.abs(v[at]).max() / top or 1.0
        out[at] = np.clip(np.round(v[at] / alpha), -top, top) * alpha
    return out


def uniform(v: np.ndarray, bits: int, layers: Any = MATRICES) -> np.ndarray:
    """(w − min)/(max − min)·(2ⁿ − 1), rounded, and back."""
    out = v.copy()
    for at in layers:
        lo, hi = v[at].min(), v[at].max()
        out[at] = lo + np.round((v[at] - lo) / (hi - lo) * (2**bits - 1)) / (2**bits - 1) * (hi - lo)
    return out


def topk(v: np.ndarray, fraction: float) -> np.ndarray:
    kept = np.argsort(-np.abs(v))[: int(np.ceil(fraction * len(v)))]
    out = np.zeros_like(v)
    out[kept] = v[kept]
    return out


MEMORY = {
    None: lambda v: v,
    "fp16": lambda v: v.astype(np.float16).astype(np.float64),
    "int8": lambda v: symmetric(v, 127, LAYERS),
    "int4": lambda v: symmetric(v, 7, LAYERS),
}


@dataclass(frozen=True, repr=False)
class Recorded(fb.Codec):
    """A codec that notes what it was given and what came out, so that a test can follow a stochastic one."""

    codec: fb.Codec
    seen: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list, compare=False)

    def encode(self, v: torch.Tensor, layout: fb.Layout, seed: int = 0) -> bytes:
        data = self.codec.encode(v, layout, seed)
        self.seen.append((v.double().numpy().copy(), self.codec.decode(data, layout).double().numpy()))
        return data

    def decode(self, data: bytes, layout: fb.Layout) -> torch.Tensor:
        return self.codec.decode(data, layout)

    def of(self, v: np.ndarray) -> np.ndarray:
        """What came out for v, which must have been encoded."""
        away = [np.abs(v - given).max() for given, _ in self.seen]
        nearest = int(np.argmin(away))
        assert away[nearest] < 2e-5, f"nothing like it was encoded; the nearest is {away[nearest]:.2g} away"
        return self.seen[nearest][1]
