"""Who is asked, where that depends on how clients did: the one place where a schedule looks at numbers.

What was chosen is committed with its step, so that a resumed run reads it instead of choosing again.
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

    Who was never asked comes first.
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
        wanted: int,
        sizes: Ints,
        random: np.random.Generator,
    ) -> Ints:
        share = sizes[available] / sizes[available].sum()
        some = random.choice(available, min(len(available), max(self.d, wanted)), replace=False, p=share)
        return some[np.argsort(-_or(losses[some], math.inf), kind="stable")[:wanted]]


@dataclass(frozen=True)
class oort:
    """After Oort (Lai et al. 2021), without its clients' speeds: a share of each cohort explores clients that were never
    asked, the others are drawn by n_i·loss_i among the most useful.

    The share starts at `explore` and shrinks by `decay` a step to `least`; `cutoff` is how near to the last of the most
    useful ones others must come to be drawn.
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
        wanted: int,
        sizes: Ints,
        last_participation: Ints,
        random: np.random.Generator,
    ) -> Ints:
        known = available[~np.isnan(losses[available])]
        fresh = available[np.isnan(losses[available])]
        wanted = min(wanted, len(available))
        new = round(wanted * max(self.least, self.explore * self.decay**step))
        new = min(len(fresh), max(new, wanted - len(known)))
        utility = sizes[known] * losses[known] + np.sqrt(0.1 * math.log(step + 1) / last_participation[known])
        count = wanted - new
        if count and len(known) > count:
            bar = self.cutoff * np.partition(utility, -count)[-count]
            near = utility >= bar
            known, utility = known[near], utility[near]
        weight = np.maximum(utility, 1e-12) if count else np.ones(len(known))
        old = random.choice(known, count, replace=False, p=weight / weight.sum()) if count else known[:0]
        return np.concatenate([old, random.choice(fresh, new, replace=False) if new else fresh[:0]])


@dataclass(frozen=True)
class Own:
    """A function of the user's own, which prints by its name; one in a file is imported when it is first needed."""

    name: str
    fn: ClientSelection | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"own({self.name!r})"

    @property
    def found(self) -> ClientSelection:
        if self.fn is not None:
            return self.fn
        if files.names_file(self.name):
            made: ClientSelection = files.load(self.name, Function, "choice", CHOOSERS)
            return made
        raise ConfigError(
            f"the schedule chooses by a function of your own, {self.name}; pass it again: fb.resume(…, schedule=schedule)"
        )


CHOOSERS: dict[str, Callable[..., Any]] = {"power_of_choice": power_of_choice, "oort": oort}
SELECTIONS = {**CHOOSERS, "own": Own}


def named(text: str) -> Any:
    """What `power_of_choice(20)` or `my.py:function` names."""
    if files.names_file(text):
        own = Own(files.absolute(text))
        own.found  # noqa: B018 (says now what is wrong with the file)
        return own
    return evaluate(text, CHOOSERS, "choice")


def checked(choose: Any) -> Any:
    """What chooses, as a schedule keeps it."""
    if choose is None or isinstance(choose, Own | power_of_choice | oort):
        return choose
    if not callable(choose):
        raise ConfigError(
            f"select={choose!r} selects no client; give a function (step, available, losses) -> client ids, or"
            " fb.power_of_choice(d)"
        )
    return Own(getattr(choose, "__qualname__", type(choose).__name__), choose)


def _or(values: Floats, other: float) -> Floats:
    return np.where(np.isnan(values), other, values)


@dataclass
class ClientHistory:
    """What is known of clients while a run goes on, and who was asked at each step."""

    sizes: Ints
    seed: int
    losses: Floats = field(init=False)  # of each one's last visit, NaN before its first
    last_participation: Ints = field(init=False)  # the step of its last visit, −1 before its first
    asked: dict[int, list[list[int]]] = field(default_factory=dict)  # by step, a cohort for each attempt

    def __post_init__(self) -> None:
        self.losses = np.full(len(self.sizes), np.nan)
        self.last_participation = np.full(len(self.sizes), -1, np.int64)

    def grow(self, sizes: Ints) -> None:
        """There are so many clients now, with so many samples."""
        more = len(sizes) - len(self.losses)
        self.sizes = sizes
        if more > 0:
            self.losses = np.concatenate([self.losses, np.full(more, np.nan)])
            self.last_participation = np.concatenate([self.last_participation, np.full(more, -1, np.int64)])

    def take(self, record: dict[str, Any]) -> None:
        """What a step's record says of its clients."""
        last = max(record["clients"], default=-1)
        if last >= len(self.sizes):  # a run of real clients is read before they are here
            self.grow(np.append(self.sizes, np.ones(last + 1 - len(self.sizes), np.int64)))
        self.losses[record["clients"]] = record["losses"]
        self.last_participation[record["clients"]] = record["step"]
        self.asked[record["step"] - 1] = record["selected"]

    def choose(self, choose: Any, step: int, attempt: int, available: Ints, wanted: int) -> Ints:
        """Who is asked at this attempt of a step: as it was committed, or as the function says now."""
        tries = self.asked.setdefault(step, [])
        if attempt < len(tries):
            return np.asarray(tries[attempt], np.int64)
        fn = choose.found if isinstance(choose, Own) else choose
        more = {
            "wanted": wanted,
            "sizes": self.sizes.copy(),
            "last_participation": self.last_participation.copy(),
            "random": rng.generator(self.seed, "choose", step, attempt),
        }
        takes = inspect.signature(fn).parameters
        more = {name: value for name, value in more.items() if name in takes}
        try:
            said = np.asarray(fn(step, available.copy(), self.losses.copy(), **more))
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise RunError(
                f"select= fails at step {step} ({why}); fix it and resume (finished steps are stored)"
            ) from error
        tries.append(_cohort(said, step, available))
        return np.asarray(tries[-1], np.int64)


def _cohort(said: NDArray[Any], step: int, available: Ints) -> list[int]:
    """Clients that can be asked, each once."""
    ids = said.reshape(-1)
    if not len(ids) or ids.dtype.kind not in "iu":
        raise RunError(
            f"select= gave {said.tolist()!r} at step {step}; give at least one client's number. What ran before is kept"
        )
    away = np.setdiff1d(ids, available)
    if len(away) or len(np.unique(ids)) < len(ids):
        what = f"client {away[0]}, who cannot be asked" if len(away) else "a client twice"
        raise RunError(
            f"select= gave {what}, at step {step}; take from `available`, each once. What ran before is kept"
        )
    return [int(c) for c in ids]
