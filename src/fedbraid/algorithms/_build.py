"""What every builder shares: an algorithm remembers the call that made it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from fedbraid.loop import Algorithm

P = ParamSpec("P")


def builder(make: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
    """Name the algorithm after the call, such as `fedadavr(optimizer='lamb', lr=0.01)`."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def build(*args: P.args, **kwargs: P.kwargs) -> Algorithm:
        algorithm = make(*args, **kwargs)
        bound = signature.bind(*args, **kwargs).arguments
        words = []
        for key, value in bound.items():
            parameter = signature.parameters[key]
            if parameter.default is parameter.empty:
                words.append(_spell(value))
            elif value != parameter.default:
                words.append(f"{key}={_spell(value)}")
        object.__setattr__(algorithm, "name", f"{make.__name__}({', '.join(words)})")
        return algorithm

    return build


def _spell(value: Any) -> str:
    return value.name if isinstance(value, Algorithm) else repr(value)
