"""Examples in docstrings (`>>> …`) as code, for the API reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.S | re.M)


class Fences(griffe.Extension):
    """Fences every example, from its first `>>>` to the next empty line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = EXAMPLE.sub(lambda m: f"```pycon\n{m[0]}\n```", text)
