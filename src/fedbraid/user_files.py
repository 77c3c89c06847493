"""Things that live in a user's own Python file, by name: `my.py:task`, `study/my.py:algorithm(lr=0.1)`.

The file is imported, which runs it; so only what the user typed, or a run of theirs that is resumed, comes here.
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
    found = _FORM.fullmatch(text)
    if found is None:
        return text
    return f"{Path(found['path']).resolve()}:{found['name']}{found['call'] or ''}"


class Named(NamedTuple):
    """What a text FILE.py:NAME(...) is made of."""

    path: Path
    name: str
    call: str | None


def parts_of(text: str) -> Named:
    """The file, the name in it, and the call's brackets where there are some."""
    found = _FORM.fullmatch(text)
    assert found is not None
    return Named(Path(found["path"]).resolve(), found["name"], found["call"])


def word(text: str) -> str:
    """A short word for what a text names, for folders.

    >>> word("study/my.py:task(clients=5)"), word("fedavg(lr=1.0)")
    ('task', 'fedavg')
    """
    found = _FORM.fullmatch(text)
    return found["name"] if found else str(re.match(r"\w*", text.strip())[0])  # type: ignore[index]


def load(text: str, kind: type, what: str, names: Names | None = None) -> Any:
    """The task or algorithm that a text names; a function is called for it."""
    found = _FORM.fullmatch(text)
    assert found is not None
    module, name = _module(Path(found["path"])), found["name"]
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise unknown(f"name in {found['path']}", name, public)
    made = getattr(module, name)
    if found["call"] is not None or (callable(made) and not isinstance(made, kind)):
        try:
            made = evaluate(f"{name}{found['call'] or '()'}", {**(names or {}), name: made}, what)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{text} cannot be made: {_where(error, module)}") from error
    if not isinstance(made, kind):
        raise ConfigError(
            f"{text} is a {type(made).__name__}; it must be a fedbraid {kind.__name__}, or a function that returns one"
        )
    return made


def _module(path: Path) -> ModuleType:
    """The file as a module, imported once for all that is asked of it."""
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
        sys.path.append(str(path.parent))  # so that it finds the files beside it, as it does when it is run
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{path} cannot be imported: {_where(error, module)}") from error
    return module


def _where(error: Exception, module: ModuleType) -> str:
    """What went wrong, and on which line of the user's file."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == module.__file__]
    at = f"line {lines[-1]}: " if lines else ""
    return f"{at}{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
