"""Client selection by past losses: the one module in which a schedule reads numbers.

A selection is committed with its step, so that a resumed run reads it instead of selecting again.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

import fedbraid.user_files as files
from fedbraid.core import rng
from fedbraid.core.check import integer, number, plain_numbers
from fedbraid.errors import ConfigError, RunError
from fedbraid.parse import evaluate

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
ClientSelection = Callable[..., Sequence[int] | Ints]  # (step, available, losses, …) -> client ids


@runtime_checkable
class Function(Protocol):
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class power_of_choice:
    """Power-of-choice (Cho et al. 2022) on last losses: of `d` candidates drawn by their samples, those of the largest loss.

    Clients that never participated come first.
    """

    d: int

    def __post_init__(self) -> None:
        plain_numbers(self)
        integer("d", self.d)

    def __call__(
        self,
        step: int,
        available: Ints,
        losses: Floats,
        count: int,
        sizes: Ints,
        random: np.random.Generator,
    ) -> Ints:
        p = sizes[available] / sizes[available].sum()
        some = random.choice(available, min(len(available), max(self.d, count)), replace=False, p=p)
        return some[np.argsort(-_or(losses[some], math.inf), kind="stable")[:count]]


@dataclass(frozen=True)
class oort:
    """After Oort (Lai et al. 2021), without its clients' speeds: a fraction of each cohort explores clients that never
    participated, the others are drawn by n_i·loss_i among the most useful.

    The fraction starts at `explore` and shrinks by `decay` a step to `least`; clients whose utility is at least `cutoff`
    times that of the last of the most useful ones may be drawn as well.
    """

    explore: float = 0.9
    decay: float = 0.98
    least: float = 0.2
    cutoff: float = 0.95

    def __post_init__(self) -> None:
        plain_numbers(self)
        for name in ("explore", "decay", "least", "cutoff"):
            number(name, getattr(self, name), "[0, 1]")

    def __call__(
        self,
        step: int,
        available: Ints,
        losses: Floats,
        count: int,
        sizes: Ints,
        last_participation: Ints,
        random: np.random.Generator,
    ) -> Ints:
        tried = available[~np.isnan(losses[available])]
        fresh = available[np.isnan(losses[available])]
        count = min(count, len(available))
        new = round(count * max(self.least, self.explore * self.decay**step))
        new = min(len(fresh), max(new, count - len(tried)))
        utility = sizes[tried] * losses[tried] + np.sqrt(0.1 * math.log(step + 1) / last_participation[tried])
        revisited = count - new
        if revisited and len(tried) > revisited:
            bar = self.cutoff * np.partition(utility, -revisited)[-revisited]
            near = utility >= bar
            tried, utility = tried[near], utility[near]
        weight = np.maximum(utility, 1e-12) if revisited else np.ones(len(tried))
        old = (
            random.choice(tried, revisited, replace=False, p=weight / weight.sum())
            if revisited
            else tried[:0]
        )
        return np.concatenate([old, random.choice(fresh, new, replace=False) if new else fresh[:0]])


@dataclass(frozen=True)
class CustomSelection:
    """A user's function, which prints by its name; one in a file is imported when it is first needed."""

    name: str
    fn: ClientSelection | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"own({self.name!r})"

    @property
    def function(self) -> ClientSelection:
        if self.fn is not None:
            return self.fn
        if files.names_file(self.name):
            function: ClientSelection = files.load(self.name, Function, "choice", CHOOSERS)
            return function
        raise ConfigError(
            f"the schedule selects clients by your function {self.name}; pass it again: fb.resume(…, schedule=schedule)"
        )


CHOOSERS: dict[str, Callable[..., Any]] = {"power_of_choice": power_of_choice, "oort": oort}
SELECTIONS = {**CHOOSERS, "own": CustomSelection}


def named(text: str) -> Any:
    """The selection that `power_of_choice(20)` or `my.py:function` names."""
    if files.names_file(text):
        custom = CustomSelection(files.absolute(text))
        custom.function  # noqa: B018 (raises now if the file is wrong)
        return custom
    return evaluate(text, CHOOSERS, "choice")


def checked(choose: Any) -> Any:
    """A selection as a schedule stores it."""
    if choose is None or isinstance(choose, CustomSelection | power_of_choice | oort):
        return choose
    if not callable(choose):
        raise ConfigError(
            f"select={choose!r} selects no client; give a function (step, available, losses) -> client ids, or"
            " fb.power_of_choice(d)"
        )
    return CustomSelection(getattr(choose, "__qualname__", type(choose).__name__), choose)


def _or(values: Floats, other: float) -> Floats:
    return np.where(np.isnan(values), other, values)


@dataclass
class ClientHistory:
    """Clients' last losses during a run, and the clients selected at each step."""

    sizes: Ints
    seed: int
    losses: Floats = field(init=False)  # of each one's last participation, NaN before its first
    last_participation: Ints = field(init=False)  # the step of its last participation, −1 before its first
    selected: dict[int, list[list[int]]] = field(default_factory=dict)  # by step, a cohort for each attempt

    def __post_init__(self) -> None:
        self.losses = np.full(len(self.sizes), np.nan)
        self.last_participation = np.full(len(self.sizes), -1, np.int64)

    def grow(self, sizes: Ints) -> None:
        """Extend to the clients registered since, with their numbers of samples."""
        more = len(sizes) - len(self.losses)
        self.sizes = sizes
        if more > 0:
            self.losses = np.concatenate([self.losses, np.full(more, np.nan)])
            self.last_participation = np.concatenate([self.last_participation, np.full(more, -1, np.int64)])

    def take(self, record: dict[str, Any]) -> None:
        """Update from a step's record."""
        last = max(record["clients"], default=-1)
        if last >= len(self.sizes):  # a deployment's records are read before its clients connect
            self.grow(np.append(self.sizes, np.ones(last + 1 - len(self.sizes), np.int64)))
        self.losses[record["clients"]] = record["losses"]
        self.last_participation[record["clients"]] = record["step"]
        self.selected[record["step"] - 1] = record["selected"]

    def choose(self, choose: Any, step: int, attempt: int, available: Ints, count: int) -> Ints:
        """The clients selected at this attempt of a step: the committed ones, or what the function returns now."""
        tries = self.selected.setdefault(step, [])
        if attempt < len(tries):
            return np.asarray(tries[attempt], np.int64)
        fn = choose.function if isinstance(choose, CustomSelection) else choose
        more = {
            "count": count,
            "sizes": self.sizes.copy(),
            "last_participation": self.last_participation.copy(),
            "random": rng.generator(self.seed, "choose", step, attempt),
        }
        takes = inspect.signature(fn).parameters
        more = {name: value for name, value in more.items() if name in takes}
        try:
            chosen = np.asarray(fn(step, available.copy(), self.losses.copy(), **more))
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise RunError(
                f"select= fails at step {step} ({why}); fix it and resume (finished steps are stored)"
            ) from error
        tries.append(_cohort(chosen, step, available))
        return np.asarray(tries[-1], np.int64)


def _cohort(chosen: NDArray[Any], step: int, available: Ints) -> list[int]:
    """A selection, refused unless it names available clients, each once."""
    ids = chosen.reshape(-1)
    if not len(ids) or ids.dtype.kind not in "iu":
        raise RunError(
            f"select= gave {chosen.tolist()!r} at step {step}; give at least one client's number (finished steps are stored)"
        )
    away = np.setdiff1d(ids, available)
    if len(away) or len(np.unique(ids)) < len(ids):
        what = f"client {away[0]}, which is not available" if len(away) else "a client twice"
        raise RunError(
            f"select= gave {what}, at step {step}; take from `available`, each once (finished steps are stored)"
        )
    return [int(c) for c in ids]
