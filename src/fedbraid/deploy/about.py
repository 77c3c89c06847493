"""What runs here, for whoever is to compare it with what runs there."""

from __future__ import annotations

import importlib.metadata
import platform
import time


def versions() -> dict[str, str | float]:
    """Versions, and the time by this clock."""
    found: dict[str, str | float] = {
        name: importlib.metadata.version(name) for name in ("fedbraid", "flwr", "torch")
    }
    return {**found, "python": platform.python_version(), "time": time.time()}
