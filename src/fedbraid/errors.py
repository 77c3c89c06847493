"""All errors that fedbraid raises, as one tree.

FedbraidError                 everything fedbraid raises on purpose
├── ConfigError               a setting, name or combination that cannot run
├── DataError                 data or a model that cannot be trained on
├── MissingExtra              an optional dependency is not installed
├── RunError                  a run folder that cannot be read, written or continued
├── Diverged                  the numbers turned non-finite, or a hidden state ran away
├── EngineError               a worker process died or a client could not be run
│   └── NativeUnavailable     this model cannot run natively here; another backend can
└── WireError                 a message that is malformed, hostile or of another model

Each message says what happened, the value, and what to do about it.
"""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class FedbraidError(Exception):
    """Everything fedbraid raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the sentence, and the lines of the user's code that led to it."""
        package = os.path.dirname(__file__)
        frames = traceback.extract_tb(self.__traceback__)
        custom = [
            f for f in frames if not f.filename.startswith(package) and "site-packages" not in f.filename
        ]
        lines = [f"  line {f.lineno} in {f.name}: {f.line}" for f in custom if f.line]
        return [f"{type(self).__name__}: {self}", *lines]


class ConfigError(FedbraidError, ValueError):
    """A setting, name or combination that cannot run."""


class DataError(FedbraidError, ValueError):
    """Data or a model that cannot be trained on."""


class MissingExtra(FedbraidError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the extra {extra!r}; install it with: {install(extra)}")


def install(extra: str) -> str:
    """The command that installs an extra's packages, however fedbraid was installed."""
    from importlib import metadata

    try:
        listed = metadata.requires("fedbraid") or []
    except metadata.PackageNotFoundError:
        listed = []
    marked = (line.partition(";") for line in listed)
    needs = [what.strip() for what, _, when in marked if f"extra=={extra!r}" in _tight(when)]
    return f"pip install {' '.join(map(repr, needs)) or repr(f'.[{extra}]')}"


def _tight(marker: str) -> str:
    return marker.replace(" ", "").replace('"', "'")


class RunError(FedbraidError):
    """A run folder that cannot be read, written or continued."""


class InUseError(RunError):
    """Another process works on the run's folder."""


class Diverged(FedbraidError, ArithmeticError):
    """The numbers turned non-finite, or a hidden state ran away."""


class EngineError(FedbraidError, RuntimeError):
    """A worker process died or a client could not be run."""


class NativeUnavailable(EngineError):
    """This model cannot run natively here; another backend can."""


class WireError(FedbraidError, ValueError):
    """A message that is malformed, hostile or of another model."""


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn any error of reading a corrupt file into one sentence."""
    try:
        yield
    except FedbraidError:
        raise
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError
    ) as error:  # fmt: skip
        raise RunError(f"{what} is corrupt ({error!r}); restore a backup or start a new run") from error


def unknown(kind: str, name: object, valid: Iterable[str]) -> ConfigError:
    """The error for a name that is not in a list, with the nearest one that is.

    >>> str(unknown("algorithm", "fedadvr", ["fedavg", "fedadavr"]))
    "unknown algorithm 'fedadvr'; did you mean 'fedadavr'?"
    """
    valid = sorted(valid)
    near = difflib.get_close_matches(name, valid, n=1) if isinstance(name, str) else []
    hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(valid) or 'none'}"
    return ConfigError(f"unknown {kind} {name!r}; {hint}")
