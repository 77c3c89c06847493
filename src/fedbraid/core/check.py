"""Checks of settings, each of which raises the same sentence everywhere."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from numbers import Integral, Real

from fedbraid.errors import ConfigError

_INTERVAL = re.compile(r"([\[(])(\S+), (\S+)([\])])")


def plain_numbers(settings: object) -> None:
    """Turn NumPy's numbers in a frozen dataclass into Python's, so that it prints as it can be read again."""
    for name, value in vars(settings).items():
        if isinstance(value, Real) and hasattr(value, "item"):
            object.__setattr__(settings, name, value.item())


def integer(name: str, value: object, least: int = 1, why: str = "") -> None:
    """Refuse what is not an integer of at least so many; `why` says what is wrong with the value.

    >>> integer("rounds", 0)
    Traceback (most recent call last):
    fedbraid.errors.ConfigError: rounds must be an integer >= 1, got 0
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer >= {least}, got {value!r}{why and f', which {why}'}")


def number(name: str, value: object, interval: str, why: str = "") -> None:
    """Refuse what is not a number of an interval such as "(0, 1]"; none is infinite or NaN.

    >>> number("beta", 1.5, "[0, 1)", "never forgets")
    Traceback (most recent call last):
    fedbraid.errors.ConfigError: beta must be in [0, 1), got 1.5, which never forgets
    >>> number("lr", 0, "(0, inf)")
    Traceback (most recent call last):
    fedbraid.errors.ConfigError: lr must be > 0, got 0
    """
    match = _INTERVAL.fullmatch(interval)
    assert match is not None
    low, high, above, below = float(match[2]), float(match[3]), match[1] == "(", match[4] == ")"
    if not isinstance(value, Real) or isinstance(value, bool):
        why = "is not a number"
    elif (
        low < float(value) < high or (value == low and not above) or (value == high and not below)
    ) and math.isfinite(value):
        return
    bound = f"{'>' if above else '>='} {match[2]}" if math.isinf(high) else f"in {interval}"
    raise ConfigError(f"{name} must be {bound}, got {value!r}{why and f', which {why}'}")


def one_of(name: str, value: object, allowed: Iterable[object], more: str = "") -> None:
    """Refuse what is not among a few values; `more` names values of another kind.

    >>> one_of("evaluate_on", "client", ("test", "clients"))
    Traceback (most recent call last):
    fedbraid.errors.ConfigError: evaluate_on must be 'test' or 'clients', got 'client'
    """
    allowed = list(allowed)
    if value not in allowed:
        words = [*map(repr, allowed), *([more] if more else [])]
        listed = f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
        raise ConfigError(f"{name} must be {listed}, got {value!r}")
