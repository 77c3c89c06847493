"""Synthetic(alpha, beta) of FedProx (Li et al. 2020) and LEAF: every client has its own logistic model."""

from __future__ import annotations

import numpy as np
import torch

from fedbraid.core import rng
from fedbraid.core.check import integer
from fedbraid.data.dataset import DataSet
from fedbraid.errors import ConfigError

_FEATURES, _CLASSES = 60, 10


def read(clients: int = 30, seed: int = 0, alpha: float = 1.0, beta: float = 1.0) -> DataSet:
    """Drawn, not read: `alpha` is how much clients' models differ, `beta` how much their inputs do; sizes follow a power law.

    A tenth of each client's samples is its local test set. FedProx's code draws one number u_k for all classes,
    which adds the same to every score and so changes no label; here u_k has a number per class.
    """
    integer("clients", clients)
    if alpha < 0 or beta < 0:
        raise ConfigError(f"synthetic needs alpha and beta of 0 or more, not {alpha} and {beta}")
    generators = [rng.generator(seed, "synthetic", k) for k in range(clients)]
    sizes = np.array([int(gen.lognormal(4, 2)) + 50 for gen in generators])
    tests = np.maximum(1, sizes // 10)
    train, test = _Table(sizes - tests), _Table(tests)
    for k, gen in enumerate(generators):
        x, y = _client(gen, int(sizes[k]), alpha, beta)
        test.put(k, x[: tests[k]], y[: tests[k]])
        train.put(k, x[tests[k] :], y[tests[k] :])
    return DataSet(train.x, train.y, (test.x, test.y), _CLASSES, groups=train.groups, test_groups=test.groups)


def _client(gen: np.random.Generator, n: int, alpha: float, beta: float) -> tuple[np.ndarray, np.ndarray]:
    u, v = gen.normal(0, alpha, _CLASSES), gen.normal(0, beta)
    w, b = gen.normal(u, 1, (_FEATURES, _CLASSES)), gen.normal(u, 1, _CLASSES)
    x = gen.normal(v, 1, _FEATURES) + _draws(gen, n)  # about the client's centre
    return x, np.argmax(x @ w + b, 1)


def _draws(gen: np.random.Generator, n: int) -> np.ndarray:
    """Normal with Σ_jj = j^-1.2; scaled here, for NumPy draws one by one where each has a scale of its own."""
    x = gen.standard_normal((n, _FEATURES))
    x *= np.arange(1, _FEATURES + 1) ** -0.6
    return x


class _Table:
    """The samples of all clients one after the other, written where they stay: drawn, they are twice as large."""

    def __init__(self, sizes: np.ndarray) -> None:
        self.x = torch.empty((int(sizes.sum()), _FEATURES), dtype=torch.float32)
        self.y = torch.empty(len(self.x), dtype=torch.int64)
        self.groups = np.repeat(np.arange(len(sizes)), sizes)
        self.ends = np.cumsum(sizes)

    def put(self, k: int, x: np.ndarray, y: np.ndarray) -> None:
        rows = slice(int(self.ends[k]) - len(x), int(self.ends[k]))
        self.x.numpy()[rows], self.y.numpy()[rows] = x, y
