"""Synthetic(alpha, beta) of FedProx (Li et al. 2020) and LEAF: every client has its own logistic model."""

from __future__ import annotations

import numpy as np
import torch

from fedbraid.core import rng
from fedbraid.core.check import whole
from fedbraid.data.dataset import DataSet, class_numbers
from fedbraid.errors import ConfigError

_FEATURES, _CLASSES = 60, 10


def read(clients: int = 30, seed: int = 0, alpha: float = 1.0, beta: float = 1.0) -> DataSet:
    """Drawn, not read: `alpha` is how much clients' models differ, `beta` how much their inputs do; sizes follow a power law.

    A tenth of each client's samples is its test share. FedProx's code draws one number u_k for all classes,
    which adds the same to every score and so changes no label; here u_k has a number per class.
    """
    whole("clients", clients)
    if alpha < 0 or beta < 0:
        raise ConfigError(f"synthetic needs alpha and beta of 0 or more, not {alpha} and {beta}")
    made = [_client(k, seed, alpha, beta) for k in range(clients)]
    cuts = [max(1, len(x) // 10) for x, _ in made]
    train = [(x[cut:], y[cut:]) for (x, y), cut in zip(made, cuts)]
    test = [(x[:cut], y[:cut]) for (x, y), cut in zip(made, cuts)]
    (x, y, groups), (xt, yt, test_groups) = _stack(train), _stack(test)
    return DataSet(x, y, (xt, yt), _CLASSES, groups=groups, test_groups=test_groups)


def _client(k: int, seed: int, alpha: float, beta: float) -> tuple[np.ndarray, np.ndarray]:
    gen = rng.generator(seed, "synthetic", k)
    n = int(gen.lognormal(4, 2)) + 50
    u, v = gen.normal(0, alpha, _CLASSES), gen.normal(0, beta)
    w, b = gen.normal(u, 1, (_FEATURES, _CLASSES)), gen.normal(u, 1, _CLASSES)
    centre = gen.normal(v, 1, _FEATURES)
    x = gen.normal(centre, np.arange(1, _FEATURES + 1) ** -0.6, (n, _FEATURES))  # Σ_jj = j^-1.2
    return x, np.argmax(x @ w + b, 1)


def _stack(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    x = torch.from_numpy(np.concatenate([x for x, _ in parts])).float()
    y = class_numbers(np.concatenate([y for _, y in parts]))
    return x, y, np.repeat(np.arange(len(parts)), [len(x) for x, _ in parts])
