"""Docstrings for the API reference: examples (`>>> …`) as code, and a list of the parameters (parameters.py)."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
import parameters

EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.S | re.M)


class Fences(griffe.Extension):
    """Fences every example, from its first `>>>` to the next empty line, and lists the parameters."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = EXAMPLE.sub(lambda m: f"```pycon\n{m[0]}\n```", text)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """When all is read."""
        for obj in _public(pkg):
            if obj.docstring is not None and "\nArgs:" not in obj.docstring.value:
                named = [p.name.lstrip("*") for p in obj.parameters if p.name not in ("self", "cls")]
                if obj.is_class and not named:  # a dataclass
                    named = [
                        m.name for m in obj.members.values() if m.is_attribute and m.annotation is not None
                    ]
                obj.docstring.value += parameters.section(obj.name, named)


def _public(obj: Any) -> Any:
    """Every function and class below an object."""
    for member in obj.members.values():
        if member.is_alias or member.name.startswith("_"):
            continue
        if member.is_function or member.is_class:
            yield member
        if member.is_class or member.is_module:
            yield from _public(member)
