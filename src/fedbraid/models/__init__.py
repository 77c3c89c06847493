"""The models of the papers, each a function that builds a fresh one; `build` finds them by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fedbraid.errors import ConfigError, unknown
from fedbraid.models.chars import gru_char, lstm_char
from fedbraid.models.cnn import fedgbo_cnn, fedshift_cnn, qafel_cnn, small_cnn, w3_cnn
from fedbraid.models.lenet import lenet5
from fedbraid.models.linear import bag_of_words, logistic, mlp, softmax_regression
from fedbraid.models.resnet import resnet18_gn

__all__ = [
    "bag_of_words",
    "build",
    "fedgbo_cnn",
    "fedshift_cnn",
    "gru_char",
    "lenet5",
    "logistic",
    "lstm_char",
    "mlp",
    "names",
    "qafel_cnn",
    "resnet18_gn",
    "small_cnn",
    "softmax_regression",
    "w3_cnn",
]

_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    f.__name__: f
    for f in (
        bag_of_words, fedgbo_cnn, fedshift_cnn, gru_char, lenet5, logistic, lstm_char, mlp,
        qafel_cnn, resnet18_gn, small_cnn, softmax_regression, w3_cnn,
    )
}  # fmt: skip


def names() -> list[str]:
    """The models that `build` knows."""
    return sorted(_BUILDERS)


def settings(name: str) -> list[str]:
    """The keywords that a model takes."""
    if name not in _BUILDERS:
        raise unknown("model", name, _BUILDERS)
    return list(inspect.signature(_BUILDERS[name]).parameters)


def build(name: str, **options: Any) -> nn.Module:
    """A fresh model by name.

    >>> sum(p.numel() for p in build("lenet5").parameters())
    61706
    """
    valid = settings(name)
    for option in options:
        if option not in valid:
            raise unknown(f"option of model {name}", option, valid)
    try:
        return _BUILDERS[name](**options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model {name} cannot be built with {options}: {error}") from error
