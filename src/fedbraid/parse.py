"""Configurations as text: `fedshift(fedpaq(uniform(4)), …)` means the same on the command line, in a file, in run.json.

Only calls of known names with literal arguments are understood; nothing is executed.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fedbraid.errors import ConfigError, unknown

Names = Mapping[str, Callable[..., Any]]


def evaluate(text: str, names: Names, kind: str) -> Any:
    """The object that a piece of configuration names.

    >>> evaluate("dict(a=[1, 2])", {"dict": dict}, "thing")
    {'a': [1, 2]}
    """
    try:
        return _value(_tree(text, kind), names, kind)
    except RecursionError as error:
        raise _unreadable(text, kind) from error


def call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Name, arguments and keywords of a call with literal arguments; a bare name has none."""
    node = _tree(str(text), "setting")
    if isinstance(node, ast.Name):
        return node.id, [], {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ConfigError(f"{text!r} is not of the form name(key=value)")
    args = [_value(a, {}, "value") for a in node.args]
    return node.func.id, args, {k.arg or "": _value(k.value, {}, "value") for k in node.keywords}


def _tree(text: str, kind: str) -> ast.expr:
    if not isinstance(text, str):
        raise ConfigError(f"{text!r} is no text that describes a {kind}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _unreadable(text, kind) from error


def _unreadable(text: str, kind: str) -> ConfigError:
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return ConfigError(f"{kind} {shown!r} cannot be read; write it as name(key=value, ...)")


def _value(node: ast.expr, names: Names, kind: str) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items):
            return [_value(i, names, kind) for i in items]
        case ast.Tuple(elts=items):
            return tuple(_value(i, names, kind) for i in items)
        case ast.Name(id=name):
            return _made(name, [], {}, names, kind)
        case ast.Call(func=func, args=args, keywords=keywords) if word := _called(func):
            given = {k.arg or "": _inner(k.value, names, f"{k.arg} of {word}") for k in keywords}
            return _made(word, [_inner(a, names, f"argument of {word}") for a in args], given, names, kind)
    raise ConfigError(
        f"{ast.unparse(node)!r} is not a value, a list or a call; write names as 'text' in quotes"
    )


def _inner(node: ast.expr, names: Names, kind: str) -> Any:
    """An argument; a bare word that names nothing is told from a slip of the pen."""
    if isinstance(node, ast.Name) and node.id not in names:
        if difflib.get_close_matches(node.id, names, n=1):
            raise unknown(kind, node.id, names)
        raise ConfigError(f"{kind} is {node.id}, which names nothing; write a number, or text in 'quotes'")
    return _value(node, names, kind)


def _called(func: ast.expr) -> str | None:
    """The last word of a dotted name, such as `fb.codecs.uniform`."""
    words = ast.unparse(func).split(".")
    return words[-1] if all(w.isidentifier() for w in words) else None


def _made(name: str, args: list[Any], kwargs: dict[str, Any], names: Names, kind: str) -> Any:
    if name not in names:
        raise unknown(kind, name, names)
    make = names[name]
    try:
        signature = inspect.signature(make)
    except ValueError:
        return make(*args, **kwargs)
    loose = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for key in kwargs:
        if key not in signature.parameters and not loose:
            raise unknown(f"keyword of {name}", key, signature.parameters)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}; it is called as {name}{signature}") from error
    return make(*args, **kwargs)
