"""What every builder shares: an algorithm remembers the call that made it."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ParamSpec

import numpy as np

from fedbraid.core.algorithm import Algorithm
from fedbraid.core.codec import Codec
from fedbraid.core.search_space import CLIENT_RATE, IntRange, Range, Space, log
from fedbraid.errors import ConfigError

P = ParamSpec("P")

PLAIN = {"momentum": 0.0}  # work of papers whose clients take plain steps

BUILDERS: dict[str, Callable[..., Algorithm]] = {}  # by name, as the command line knows them
WRAPPERS: dict[str, Callable[..., Algorithm]] = {}  # those that take an algorithm


SPACES: dict[str, Space] = {}  # by name, what to search, under the keys of `sweep`

SERVER_RATE = log(0.3, 3.0)  # of steps along the average
ADAPTIVE_RATE = log(0.003, 0.1)  # of Adam and its like
BUFFER = IntRange(2, 32, log=True)  # uploads for an asynchronous step


def searched(
    schedule: Space | None = None, **keywords: Range
) -> Callable[[Callable[P, Algorithm]], Callable[P, Algorithm]]:
    """Declare the few settings that matter to a builder, with their ranges; the clients' rate is one of all."""

    def declare(make: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
        SPACES[make.__name__] = {
            "lr": CLIENT_RATE,
            **{f"algorithm.{name}": what for name, what in keywords.items()},
            **{f"schedule.{name}": what for name, what in (schedule or {}).items()},
        }
        return make

    return declare


def builder(make: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
    """Name the algorithm after the call, such as `fedadavr(optimizer='lamb', lr=0.01)`."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def build(*args: P.args, **kwargs: P.kwargs) -> Algorithm:
        bound = signature.bind(*args, **kwargs)
        words = []
        for key, value in bound.arguments.items():
            parameter = signature.parameters[key]
            value = bound.arguments[key] = _checked(make.__name__, parameter, value)
            if parameter.default is parameter.empty:
                words.append(_spell(value))
            elif value != parameter.default:
                words.append(f"{key}={_spell(value)}")
        algorithm = make(*bound.args, **bound.kwargs)
        known = "" not in words  # an algorithm of the user's own has no call to print
        object.__setattr__(algorithm, "name", f"{make.__name__}({', '.join(words)})" if known else "")
        return algorithm

    wraps = any(p.annotation == "Algorithm" for p in signature.parameters.values())
    (WRAPPERS if wraps else BUILDERS)[make.__name__] = build
    return build


def _spell(value: Any) -> str:
    return value.name if isinstance(value, Algorithm) else repr(value)


_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "float": ((int, float), "a finite number"),
    "str": (str, "a name in quotes"),
    "bool": (bool, "True or False"),
    "Codec": (Codec, "a codec, such as fb.codecs.int8()"),
    "Algorithm": (Algorithm, "an algorithm, such as fb.fedavg()"),
}


def _checked(call: str, parameter: inspect.Parameter, value: Any) -> Any:
    """The value if it is of the kind that the parameter's annotation names; numbers as plain floats."""
    kind, _, optional = str(parameter.annotation).partition(" | ")
    value = value.item() if isinstance(value, np.generic) else value
    if kind not in _KINDS or (value is None and optional):
        return value
    wanted, said = _KINDS[kind]
    fits = isinstance(value, wanted) and (kind == "bool" or not isinstance(value, bool))
    if fits and kind == "float":
        value = math.inf if abs(value) >= 1e300 else float(value)  # an int may be too long
        fits = math.isfinite(value)
    if not fits:
        raise ConfigError(f"{call} got {parameter.name}={value!r}; give it {said}")
    return value
