"""Settings of local training: what one participation of a client computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.check import integer, number, one_of, plain_numbers
from fedbraid.core.lr_schedules import Rate, cosine, downhill, warmup
from fedbraid.core.optim import LOCAL, Optimizer, named
from fedbraid.errors import ConfigError


@dataclass(frozen=True)
class Work:
    """The local training of one participation: `epochs` over a client's data, or a number of `steps`.

    `batch=None` is the full local set. A short `last` batch is used as it is ("keep"), dropped, or
    filled with samples of the client drawn again; with `replace=True` every batch is drawn with replacement, and
    with `shuffle=False` every epoch goes through the samples in the order of the data.
    `lr` is a number, a list by version whose last entry holds from there on, or a function of the version, such
    as those of `fb.rates`. The `optimizer` starts anew at each participation and steps with
    the gradient that the rule returns.
    """

    lr: float | Sequence[float] | Callable[[int], float] = 0.01
    epochs: int | None = None
    steps: int | None = None
    batch: int | None = 20
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None  # the largest norm of a gradient
    lr_decay: float = 1.0  # per round
    last: str = "keep"
    replace: bool = False
    shuffle: bool = True
    optimizer: str = "sgd"

    def __post_init__(self) -> None:
        plain_numbers(self)
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 1)
        if self.epochs is not None and self.steps is not None:
            raise ConfigError(
                f"both epochs={self.epochs} and steps={self.steps} were given; give one of them"
            )
        integer(
            "epochs" if self.steps is None else "steps", self.epochs if self.steps is None else self.steps
        )
        if self.batch is not None:
            integer("batch", self.batch)
        object.__setattr__(self, "lr", _checked(self.lr))
        for name in ("lr_decay", "clip"):
            if name == "lr_decay" or self.clip is not None:
                downhill(name, getattr(self, name))
        number("momentum", self.momentum, "[0, 1)", "never forgets")
        number("weight_decay", self.weight_decay, "[0, inf)", "makes weights grow")
        if self.replace and self.batch is None:
            raise ConfigError("replace=True draws batches, and batch=None is the full local set; give batch=")
        if self.replace and not self.shuffle:
            raise ConfigError(
                "replace=True draws samples, and shuffle=False takes them as they lie; give one"
            )
        one_of("last", self.last, ("keep", "drop", "fill"))
        if self.local is not None and self.momentum:
            raise ConfigError(
                f"momentum={self.momentum} is for optimizer='sgd', and {self.optimizer!r} has other settings; leave it out"
            )

    @property
    def local(self) -> Optimizer | None:
        """The local optimizer, None for plain steps with or without momentum."""
        return None if self.optimizer == "sgd" else named(self.optimizer, LOCAL)()

    @property
    def plain(self) -> bool:
        """Whether a step is the rate times the gradient, and nothing else."""
        return not (self.momentum or self.weight_decay or self.clip is not None or self.local is not None)

    @property
    def decoupled(self) -> float:
        """The weight decay that is applied outside the optimizer."""
        return self.weight_decay if self.optimizer == "adamw" else 0.0

    @property
    def penalty(self) -> float:
        """The weight decay that is added to the gradient."""
        return self.weight_decay - self.decoupled

    def rate(self, version: int) -> float:
        """η_c of a client that trains from this version."""
        return self._base(version) * self.lr_decay**version

    def _base(self, version: int) -> float:
        if isinstance(self.lr, int | float):
            return self.lr
        return self.lr(version) if callable(self.lr) else self.lr[min(version, len(self.lr) - 1)]

    def tabled(self, steps: int) -> Work:
        """The same with a user's function replaced by the list of its values, which prints and can be read again."""
        if not callable(self.lr) or isinstance(self.lr, Rate):
            return self
        values = [_number(self.lr(version)) for version in range(max(steps, 1))]
        for version, value in enumerate(values):
            downhill(f"lr({version})", value)
        return replace(self, lr=tuple(values))

    def effective(self, K: Tensor) -> Tensor:
        """a: how many plain steps go as far as K steps with this momentum; K itself where steps are not plain."""
        rho = self.momentum
        if not rho:
            return K
        steps = K.double()  # in float32, two steps at ρ = 0.99 are off by 1 in 10⁴
        return ((steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)).to(K)


def batch_sizes(n: NDArray[np.int64], work: Work) -> NDArray[np.int64]:
    """How many samples a full step of each client takes."""
    return n if work.batch is None else np.minimum(n, work.batch)


def batches_per_epoch(n: NDArray[np.int64], work: Work) -> NDArray[np.int64]:
    """How many steps go once through each client's data."""
    size = batch_sizes(n, work)
    return n // size if work.last == "drop" else -(-n // size)


def step_counts(n: NDArray[np.int64], work: Work) -> NDArray[np.int64]:
    """K: how many local steps each client takes."""
    if work.steps is not None:
        return np.full(len(n), work.steps, np.int64)
    assert work.epochs is not None
    return batches_per_epoch(n, work) * work.epochs


RATES: dict[str, Callable[..., Any]] = {"cosine": cosine, "warmup": warmup}
WORK: dict[str, Callable[..., Any]] = {"Work": Work, **RATES}  # what a work's text may name


def _number(value: Any) -> Any:
    """NumPy's and torch's single numbers as Python's."""
    return value.item() if isinstance(value, np.generic | Tensor) else value


def _checked(lr: Any) -> Any:
    """A rate as it is stored: lists become tuples of numbers."""
    if callable(lr):
        return lr
    if not isinstance(lr, list | tuple | np.ndarray):
        downhill("lr", lr)
        return lr
    values = tuple(_number(value) for value in lr)
    if not values:
        raise ConfigError("lr=[] has no rate; list one for each version, the last of which stays")
    for version, value in enumerate(values):
        downhill(f"lr[{version}]", value)
    return values
