"""One way to say that a setting is not what it should be."""

from __future__ import annotations

import numpy as np

from fedbraid.errors import ConfigError


def plain_numbers(settings: object) -> None:
    """Turn NumPy's numbers in a frozen dataclass into Python's, so that it prints as it can be read again."""
    for name, value in vars(settings).items():
        if isinstance(value, np.generic):
            object.__setattr__(settings, name, value.item())


def whole(name: str, value: object) -> None:
    """Refuse what is not a whole number of at least one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} is not a count; use a whole number >= 1")
