"""Numbers as text: bytes, durations, rounds to a target. This module does not import torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from fedbraid.errors import ConfigError

Record = dict[str, Any]


def format_bytes(count: float) -> str:
    """
    >>> format_bytes(999), format_bytes(61706 * 4), format_bytes(3.1e9)
    ('999 B', '247 kB', '3.10 GB')
    """
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def parse_bytes(text: str) -> int:
    """
    >>> parse_bytes("1500"), parse_bytes("2 kB"), parse_bytes("1.5MB")
    (1500, 2000, 1500000)
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kMGT]?)B?\s*", text)
    try:
        count = float(found[1]) * 1000 ** " kMGT".index(found[2] or " ") if found else 0
    except ValueError:
        count = 0
    if count < 1:
        raise ConfigError(f"a number of bytes must be such as 500000, 2kB or 1.5MB, got {text!r}")
    return round(count)


def format_count(count: float) -> str:
    """
    >>> format_count(61706), format_count(4.98e9)
    ('61.7 k', '4.98 G')
    """
    return _scaled(count, ("", "k", "M", "G", "T", "P")).rstrip()


def _scaled(count: float, units: tuple[str, ...]) -> str:
    for unit in units:
        if abs(count) < 999.5 or unit == units[-1]:
            break
        count /= 1000
    if unit == units[0] and float(count).is_integer():
        return f"{count:.0f} {unit}"
    digits = 2 if abs(count) < 9.995 else 1 if abs(count) < 99.95 else 0
    return f"{count:.{digits}f} {unit}"


def format_seconds(seconds: float) -> str:
    """
    >>> format_seconds(0.25), format_seconds(75), format_seconds(7300)
    ('0.2 s', '1:15', '2:01:40')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_percent(fraction: float | None) -> str:
    """
    >>> format_percent(0.9712), format_percent(None)
    ('97.1 %', '–')
    """
    return "–" if fraction is None else f"{100 * fraction:.1f} %"


def hint(history: Sequence[Record], classes: int | None) -> str | None:
    """What to try if a classifier is no better than guessing.

    >>> hint([{"accuracy": 0.11, "loss": 41.0}], 10)
    'no better than guessing among 10 classes: try a smaller learning rate, or clip gradients'
    """
    last = next((r for r in reversed(history) if "accuracy" in r and "loss" in r), None)
    if last is None or not classes or last["accuracy"] > 2 / classes or last["loss"] < math.log(classes):
        return None
    return f"no better than guessing among {classes} classes: try a smaller learning rate, or clip gradients"


def bits_up(history: Sequence[Record], parameters: int) -> float | None:
    """The bits per number of an uploaded update, all headers included."""
    sent = sum(r["up"].get("delta", 0) for r in history)
    numbers = parameters * sum(r["uploads"] for r in history)
    return 8 * sent / numbers if sent and numbers else None


def rounds_to(history: Iterable[Record], target: float, key: str = "accuracy") -> int | None:
    """The first step at which a metric reaches the target; None if it never does.

    >>> rounds_to([{"step": 1, "accuracy": 0.4}, {"step": 2}, {"step": 3, "accuracy": 0.9}], 0.8)
    3
    """
    return next((r["step"] for r in history if r.get(key, float("-inf")) >= target), None)


def until(history: Iterable[Record], step: int | None, key: str) -> int | None:
    """The sum of a count, such as `bytes_up`, up to a step."""
    return None if step is None else sum(r[key] for r in history if r["step"] <= step)


def best(history: Iterable[Record], key: str = "accuracy") -> float | None:
    """The largest value of a metric."""
    return max((r[key] for r in history if key in r), default=None)
