"""Serialized state: trees of tensors, numbers, client tables and records, as JSON followed by the tensors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedbraid.core.client_table import ClientTable
from fedbraid.errors import RunError

Records = Mapping[str, type]  # qualified name -> class


def tables(tree: Any, path: str) -> Iterator[tuple[str, ClientTable]]:
    """Every client table in a tree, once, named by its path."""
    listed: set[int] = set()
    for name, value in _walk(tree, path):
        if isinstance(value, ClientTable) and id(value) not in listed:
            listed.add(id(value))
            yield name, value


def records(tree: Any) -> dict[str, type]:
    """The classes of the records in a tree."""
    return {_name(type(v)): type(v) for _, v in _walk(tree, "") if _is_record(v)}


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, value
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, tuple | list):
        inner = list(enumerate(value))
    elif _is_record(value):
        inner = list(_fields(value).items())
    else:
        return
    for key, each in inner:
        yield from _walk(each, f"{path}.{key}")


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type | ClientTable)


def _fields(record: Any) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record)}


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def pack(tree: Any, path: str, named: Mapping[str, ClientTable], record_types: Records) -> bytes:
    """A tree as bytes; client tables are stored by name, without their rows."""
    table_names = {id(rows): name for name, rows in named.items()}
    tensors: dict[str, Tensor] = {}
    keys: dict[int, str] = {}  # a tensor that occurs several times is written once

    def lay(value: Any, path: str) -> Any:
        match value:
            case Tensor():
                if id(value) not in keys:
                    keys[id(value)] = str(len(tensors))
                    tensors[keys[id(value)]] = value.detach().cpu().contiguous().clone()
                return {"tensor": keys[id(value)]}
            case ClientTable() if id(value) in table_names:
                return {"rows": table_names[id(value)]}
            case dict() if all(type(k) in (str, int) for k in value):
                return {"dict": [[k, lay(v, f"{path}.{k}")] for k, v in value.items()]}
            case None | bool() | int() | float() | str():
                return value
        if type(value) in (tuple, list):
            return {type(value).__name__: [lay(v, f"{path}.{i}") for i, v in enumerate(value)]}
        if _is_record(value) and _record_type(_name(type(value)), record_types) is type(value):
            inner = {k: lay(v, f"{path}.{k}") for k, v in _fields(value).items()}
            return {"record": _name(type(value)), "fields": inner}
        raise RunError(
            f"state {path!r} holds a {type(value).__name__}, which cannot be saved; use tensors, numbers, and what"
            " the first state has of rows and records"
        )

    head = json.dumps(lay(tree, path), separators=(",", ":")).encode()
    return len(head).to_bytes(4, "little") + head + save_tensors(tensors)


def unpack(blob: bytes, named: Mapping[str, ClientTable], record_types: Records, device: Any) -> Any:
    """The tree that `pack` wrote; ValueError, KeyError, TypeError or SafetensorError for other bytes."""
    size = int.from_bytes(blob[:4], "little")
    head, tensors = json.loads(blob[4 : 4 + size]), load_tensors(bytes(blob[4 + size :]))
    build: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda key: tensors[key].to(device),
        "rows": lambda name: named[name],
        "dict": lambda pairs: {k: raise_up(v) for k, v in pairs},
        "tuple": lambda values: tuple(raise_up(v) for v in values),
        "list": lambda values: [raise_up(v) for v in values],
    }

    def raise_up(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "record" in value:
            kind = _record_type(value["record"], record_types)
            if kind is None:
                raise KeyError(value["record"])
            return _made(kind, {k: raise_up(v) for k, v in value["fields"].items()})
        ((kind_of, inner),) = value.items()
        return build[kind_of](inner)

    return raise_up(head)


def _record_type(name: str, record_types: Records) -> type | None:
    """A record's class: a registered one, or one in a loaded module of fedbraid; nothing is imported."""
    if name in record_types:
        return record_types[name]
    module, _, inner = name.partition(":")
    if module != "fedbraid" and not module.startswith("fedbraid."):
        return None
    kind = getattr(sys.modules.get(module), inner, None)
    return kind if isinstance(kind, type) and is_dataclass(kind) else None


def _made(kind: Any, values: dict[str, Any]) -> Any:
    if values.keys() != {f.name for f in fields(kind)}:
        raise ValueError(f"the fields of {kind.__name__} are {[f.name for f in fields(kind)]}")
    made = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
