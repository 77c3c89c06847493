"""Many runs: compare, sweep, reproduce, cost."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Named(ModuleType):
    """A module named for its main function: calling the one calls the other."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


def callable_module(name: str) -> None:
    """Let `fb.compare(…)` mean `fb.compare.compare(…)`."""
    sys.modules[name].__class__ = _Named
