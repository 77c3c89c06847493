"""Objects in a user's Python file, by name: `my.py:task`, `study/my.py:algorithm(lr=0.1)`.

The file is imported, which runs it; so only what the user typed, or the config of a resumed run, is loaded.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fedbraid.errors import ConfigError, unknown
from fedbraid.parse import Names, evaluate

_FORM = re.compile(r"\s*(?P<path>[^:]+\.py):(?P<name>[A-Za-z_]\w*)(?P<call>\(.*\))?\s*", re.S)


def names_file(text: Any) -> bool:
    """Whether a text is of the form FILE.py:NAME; a file without a name is refused.

    >>> names_file("my.py:task"), names_file("digits(clients=5)")
    (True, False)
    """
    if isinstance(text, str) and re.fullmatch(r"[^:()]+\.py:?", text.strip()):
        file = text.strip().rstrip(":")
        raise ConfigError(f"{file} is a file; say which of its names to take, such as {file}:task")
    return isinstance(text, str) and _FORM.fullmatch(text) is not None


def absolute(text: str) -> str:
    """The same name from wherever it is read; what names no file stays as it is."""
    match = _FORM.fullmatch(text)
    if match is None:
        return text
    return f"{Path(match['path']).resolve()}:{match['name']}{match['call'] or ''}"


class Named(NamedTuple):
    """The fields of a text FILE.py:NAME(...)."""

    path: Path
    name: str
    call: str | None


def split_name(text: str) -> Named:
    """The file, the name in it, and the call's brackets if it has them."""
    match = _FORM.fullmatch(text)
    assert match is not None
    return Named(Path(match["path"]).resolve(), match["name"], match["call"])


def word(text: str) -> str:
    """A short word for what a text names, for folders.

    >>> word("study/my.py:task(clients=5)"), word("fedavg(lr=1.0)")
    ('task', 'fedavg')
    """
    match = _FORM.fullmatch(text)
    return match["name"] if match else str(re.match(r"\w*", text.strip())[0])  # type: ignore[index]


def load(text: str, kind: type, what: str, names: Names | None = None) -> Any:
    """The task or algorithm that a text names; a function is called for it."""
    match = _FORM.fullmatch(text)
    assert match is not None
    module, name = _module(Path(match["path"])), match["name"]
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise unknown(f"name in {match['path']}", name, public)
    loaded = getattr(module, name)
    if match["call"] is not None or (callable(loaded) and not isinstance(loaded, kind)):
        try:
            loaded = evaluate(f"{name}{match['call'] or '()'}", {**(names or {}), name: loaded}, what)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{text} cannot be made: {_where(error, module)}") from error
    if not isinstance(loaded, kind):
        raise ConfigError(
            f"{text} is a {type(loaded).__name__}; it must be a fedbraid {kind.__name__}, or a function that returns one"
        )
    return loaded


def _module(path: Path) -> ModuleType:
    """The file as a module, imported once per process."""
    path = path.resolve()
    name = f"fedbraid_file_{re.sub(r'[^0-9a-zA-Z]', '_', str(path))}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; check the path before the colon")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that it can import its neighbors, as it can when it is run
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{path} cannot be imported: {_where(error, module)}") from error
    return module


def _where(error: Exception, module: ModuleType) -> str:
    """The error's type and text, and the line of the user's file that raised it."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == module.__file__]
    at = f"line {lines[-1]}: " if lines else ""
    return f"{at}{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
