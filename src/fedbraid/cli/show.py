"""How commands speak: tables for people, JSON for programs, complaints on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no table.")]


def complain(message: str) -> None:
    """One sentence on stderr."""
    print(f"fedbraid: {' '.join(message.split())}", file=sys.stderr)


def give(result: Any) -> None:
    """A result as JSON on stdout; not-a-number becomes null, which JSON can hold."""
    json.dump(_plain(result), sys.stdout, indent=2, allow_nan=False)
    print()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and value - value != 0 else value


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """A small table on stdout; the first `left` columns are text, the rest numbers."""
    from rich import box
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, name in enumerate(head):
        grid.add_column(name, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    print(title)
    console().print(grid)


def facts(pairs: dict[str, Any]) -> None:
    """Names and values, one a line."""
    wide = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        if value is not None:
            print(f"{name:>{wide}}  {value}")


def console() -> Any:
    """Where tables go; piped, it neither colours nor cuts lines."""
    from rich.console import Console

    to = Console(highlight=False)
    return to if to.is_terminal else Console(highlight=False, width=200, color_system=None)
