"""Configurations as text: `fedshift(fedpaq(uniform(4)), …)` means the same on the command line, in a file, in run.json.

Only calls of registered names with literal arguments are understood; nothing is executed.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from fedbraid.errors import ConfigError, unknown

Names = Mapping[str, Callable[..., Any]]


def evaluate(text: str, names: Names, kind: str) -> Any:
    """The object that a text of configuration describes.

    >>> evaluate("dict(a=[1, 2])", {"dict": dict}, "setting")
    {'a': [1, 2]}
    """
    try:
        return _value(_tree(text, kind), names, kind)
    except RecursionError as error:
        raise _unreadable(text, kind) from error


def call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Name, arguments and keywords of a call, calls inside it as text; a bare name has none.

    >>> call("rounds(10, clients=5, duration=exponential(3))")
    ('rounds', [10], {'clients': 5, 'duration': 'exponential(3)'})
    """
    name, args, keywords = written(text)
    return name, [literal(a) for a in args], {key: literal(v) for key, v in keywords.items()}


def written(text: str) -> tuple[str, list[str], dict[str, str]]:
    """The same with every argument as it is written."""
    node = _call(text, "setting")
    keywords = {k.arg or "": ast.unparse(k.value) for k in node.keywords}
    return ast.unparse(node.func), [ast.unparse(a) for a in node.args], keywords


def literal(text: str) -> Any:
    """The number, list or quoted text that a text stands for, else the text itself.

    >>> literal("0.1"), literal("[1, 2]"), literal("adam")
    (0.1, [1, 2], 'adam')
    """
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def listed(text: str) -> list[Any]:
    """The items of a list, whose words need no quotes.

    >>> listed("[0.1, adam, 'lamb']")
    [0.1, 'adam', 'lamb']
    """
    node = _tree(text, "list")
    if not isinstance(node, ast.List):
        raise ConfigError(f"{text!r} is not a list; write one such as [0.01, 0.1]")
    return [literal(ast.unparse(item)) for item in node.elts]


_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
_BYTES = {f"{p}{unit}": f * size for p, f in _PREFIXES.items() for unit, size in (("B", 1.0), ("bit", 0.125))}
UNITS = {
    "size": _BYTES,
    "rate": {f"{unit}/s": size for unit, size in _BYTES.items()},
    "duration": {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0},
}


def quantity(name: str, value: str | float, kind: str) -> float:
    """A number with a unit, in bytes, bytes a second or seconds; without one it is in these already.

    >>> quantity("uplink", "200kB/s", "rate"), quantity("deadline", "2h", "duration"), quantity("uplink", 50, "rate")
    (200000.0, 7200.0, 50.0)
    """
    if not isinstance(value, str):
        return float(value)
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*", value)
    try:
        amount = float(match[1]) if match else math.nan
    except ValueError:
        amount = math.nan
    if match is None or math.isnan(amount):
        example = {"size": "4GB", "rate": "200kB/s", "duration": "2h"}[kind]
        raise ConfigError(f"{name}={value!r} is not a {kind}; write a number with a unit, such as {example}")
    if match[2] and match[2] not in UNITS[kind]:
        raise unknown(f"unit of {name}", match[2], UNITS[kind])
    return amount * UNITS[kind].get(match[2], 1.0)


def with_keywords(text: str, extra: Mapping[str, Any], names: Names, kind: str) -> str:
    """A call of a registered name with these keywords set, as text."""
    node = _call(text, kind)
    name = ast.unparse(node.func)
    if name not in names:
        raise unknown(kind, name, names)
    parameters = inspect.signature(names[name]).parameters
    for key in extra:
        if key not in parameters:
            raise unknown(f"keyword of {name}", key, parameters)
    unchanged = [k for k in node.keywords if k.arg not in extra]
    new = [ast.keyword(k, _argument(v, str(parameters[k].annotation), k)) for k, v in extra.items()]
    return ast.unparse(ast.Call(node.func, node.args, unchanged + new))


def _argument(value: Any, annotation: str, key: str) -> ast.expr:
    """A value as it stands in a call: text is a codec or an algorithm where the parameter wants one."""
    if not isinstance(value, str) or ("str" in annotation and literal(value) is value):
        value = repr(value)
    word = value.isidentifier() and literal(value) is value
    if word and "Codec" not in annotation and "Algorithm" not in annotation:
        raise ConfigError(f"{key}={value} is not a number; write one, such as {key}=0.01")
    try:
        return ast.parse(str(value), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{key}={value} cannot be read; write a number, a word or a call such as int8()"
        ) from error


def _call(text: str, kind: str) -> ast.Call:
    """The outermost call of a text, a bare name being one without arguments."""
    node = _tree(text, kind)
    if isinstance(node, ast.Name):
        return ast.Call(node, [], [])
    if not isinstance(node, ast.Call) or _called(node.func) is None:
        raise _unreadable(text, kind)
    return node


def _tree(text: str, kind: str) -> ast.expr:
    if not isinstance(text, str):
        raise ConfigError(f"{text!r} is not text that describes a {kind}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _unreadable(text, kind) from error


def _unreadable(text: str, kind: str) -> ConfigError:
    excerpt = text if len(text) <= 80 else f"{text[:77]}..."
    return ConfigError(f"{kind} {excerpt!r} cannot be read; write it as name(key=value, ...)")


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
        case ast.Dict(keys=keys, values=items) if all(isinstance(k, ast.Constant) for k in keys):
            words = [k.value for k in keys if isinstance(k, ast.Constant)]
            return {k: _value(i, names, kind) for k, i in zip(words, items)}
        case ast.Name(id=name):
            return _build(name, [], {}, names, kind)
        case ast.Call(func=func, args=args, keywords=keywords) if word := _called(func):
            arguments = {k.arg or "": _inner(k.value, names, f"{k.arg} of {word}") for k in keywords}
            return _build(
                word, [_inner(a, names, f"argument of {word}") for a in args], arguments, names, kind
            )
    raise ConfigError(
        f"{ast.unparse(node)!r} is not a value, a list, a dict or a call; write names as 'text' in quotes"
    )


def _inner(node: ast.expr, names: Names, kind: str) -> Any:
    """An argument; a bare word that names nothing is refused, with the nearest name if there is one."""
    if isinstance(node, ast.Name) and node.id not in names:
        if difflib.get_close_matches(node.id, names, n=1):
            raise unknown(kind, node.id, names)
        raise ConfigError(f"{kind} is {node.id}, which names nothing; write a number, or text in 'quotes'")
    return _value(node, names, kind)


def _called(func: ast.expr) -> str | None:
    """The last word of a dotted name, such as `fb.codecs.uniform`."""
    words = ast.unparse(func).split(".")
    return words[-1] if all(w.isidentifier() for w in words) else None


def _takes(signature: inspect.Signature) -> str:
    """The parameters of a call, without their types."""
    parameters = signature.parameters.values()
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)


def _build(name: str, args: list[Any], kwargs: dict[str, Any], names: Names, kind: str) -> Any:
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
        raise ConfigError(f"{name}: {error}; it is called as {name}({_takes(signature)})") from error
    return make(*args, **kwargs)
