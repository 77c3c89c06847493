"""One paper or family a file. Whatever a file here builds with `@builder` is known everywhere by its name."""

from __future__ import annotations

import importlib
import pkgutil

from fedbraid.algorithms._build import BUILDERS, SPACES, WRAPPERS

for _module in sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")):
    importlib.import_module(f"{__name__}.{_module}")

ALL = {**BUILDERS, **WRAPPERS}

__all__ = ["ALL", "BUILDERS", "SPACES", "WRAPPERS"]
