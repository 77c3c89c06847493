"""One way to say that a setting is not what it should be."""

from __future__ import annotations

import math
import re
from numbers import Integral, Real

from fedbraid.errors import ConfigError

_INTERVAL = re.compile(r"([\[(])(\S+), (\S+)([\])])")


def plain_numbers(settings: object) -> None:
    """Turn NumPy's numbers in a frozen dataclass into Python's, so that it prints as it can be read again."""
    for name, value in vars(settings).items():
        if isinstance(value, Real) and hasattr(value, "item"):
            object.__setattr__(settings, name, value.item())


def integer(name: str, value: object, least: int = 1, why: str = "is not a count") -> None:
    """Refuse what is not a whole number of at least so many."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r} {why}; use a whole number >= {least}")


def number(name: str, value: object, interval: str, why: str) -> None:
    """Refuse what is not a number of an interval such as "(0, 1]"; none is infinite or NaN.

    >>> number("beta", 1.5, "[0, 1)", "never forgets")
    Traceback (most recent call last):
    fedbraid.errors.ConfigError: beta=1.5 never forgets; use 0 <= beta < 1
    >>> number("lr", 0, "(0, inf)", "does not train")
    Traceback (most recent call last):
    fedbraid.errors.ConfigError: lr=0 does not train; use lr > 0
    """
    found = _INTERVAL.fullmatch(interval)
    assert found is not None
    low, high, above, below = float(found[2]), float(found[3]), found[1] == "(", found[4] == ")"
    if not isinstance(value, Real) or isinstance(value, bool):
        why = "is not a number"
    elif (
        low < float(value) < high or (value == low and not above) or (value == high and not below)
    ) and math.isfinite(value):
        return
    right = "" if math.isinf(high) else f" {'<' if below else '<='} {found[3]}"
    left = (
        f"{found[2]} {'<' if above else '<='} {name}"
        if right
        else f"{name} {'>' if above else '>='} {found[2]}"
    )
    raise ConfigError(f"{name}={value!r} {why}; use {left}{right}")
