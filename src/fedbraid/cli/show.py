"""How commands speak: tables for people, JSON for programs, complaints on stderr."""

from __future__ import annotations

import codecs
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from fedbraid.cli.help import folded

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no table.")]


ASCII = {
    "─": "-", "━": "=", "–": "-", "…": "...", "±": "+/-", "×": "x", "·": "-", "•": "*", "↑": "up", "↓": "down", "→": "->",
    "✓": "yes", "✗": "no", "ε": "epsilon", "δ": "delta", "≥": ">=", "≤": "<=", "‘": "'", "’": "'", "“": '"', "”": '"',
    "░": ".", "▒": ":", "▓": "#", "█": "@", "\xa0": " ",
}  # fmt: skip


def _spelled(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(ASCII.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def spell_out(*streams: Any) -> None:
    """Have streams that cannot show a sign, such as "─" on a terminal that is not UTF-8, show its ASCII spelling."""
    codecs.register_error("fedbraid", _spelled)
    for stream in streams:
        encoding = (getattr(stream, "encoding", None) or "").replace("-", "").lower()
        if encoding != "utf8" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="fedbraid")


def complain(message: str) -> None:
    """One sentence on stderr; keywords that it advises are options here."""
    said = re.sub(r"\b([a-z]+(?:_[a-z]+)+)=True", lambda found: f"--{found[1].replace('_', '-')}", message)
    print(f"fedbraid: {' '.join(said.split())}", file=sys.stderr)


def quoted(path: object) -> str:
    """A path as a shell reads it."""
    return shlex.quote(str(path))


@contextmanager
def waiting(what: str, hidden: bool = False) -> Iterator[None]:
    """Say on a terminal what a command is doing before it can show anything else; the line goes when that is done."""
    shown = not hidden and sys.stderr.isatty()
    if shown:
        print(f"{what} …", end="\r", file=sys.stderr, flush=True)  # a warning is written over it
    try:
        yield
    finally:
        if shown:
            print("\x1b[K", end="", file=sys.stderr, flush=True)


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


GAP = 3  # columns between columns
SHORT = 16  # to which a long name may be cut


def table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int = 1,
    order: Sequence[int] | None = None,
) -> None:
    """A small table on stdout, one line a row; the first `left` columns are text, the rest numbers.

    Where the terminal is narrow, columns are left out from the end of `order`, by importance.
    """
    room = width()
    shown, wide = fit([list(head), *(list(r) for r in rows)], room, left, order)
    entry("", title)
    for n, row in enumerate([head, *rows]):
        cells = [_cell(row[i], w, i < left) for i, w in zip(shown, wide)]
        print((" " * GAP).join(cells).rstrip())
        if n == 0:
            print("─" * (sum(wide) + GAP * (len(wide) - 1)))
    if lost := [name for i, name in enumerate(head) if i not in shown and name]:
        entry("", f"left out at {room} columns: {', '.join(lost)}; --json has them")


def fit(
    lines: Sequence[Sequence[str]], room: int, left: int, order: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Which columns to show, and how wide each."""
    from rich.cells import cell_len

    full = [max(map(cell_len, column)) for column in zip(*lines)]
    least = [min(w, SHORT) if i < left else w for i, w in enumerate(full)]
    kept = list(order or range(len(full)))
    while len(kept) > 2 and sum(least[i] for i in kept) + GAP * (len(kept) - 1) > room:
        kept.pop()
    shown = sorted(kept)
    wide = [full[i] for i in shown]
    over = sum(wide) + GAP * (len(wide) - 1) - room
    for at in sorted((k for k, i in enumerate(shown) if i < left), key=lambda k: -wide[k]):
        cut = min(max(0, over), wide[at] - least[shown[at]])
        wide[at], over = wide[at] - cut, over - cut
    return shown, wide


def _cell(text: str, wide: int, left: bool) -> str:
    from rich.cells import cell_len, set_cell_size

    text = set_cell_size(text, wide - 1) + "…" if cell_len(text) > wide else text
    room = " " * (wide - cell_len(text))
    return text + room if left else room + text


def width() -> int:
    """How wide lines may be: COLUMNS, or what the terminal has; without end where nobody says."""
    said = os.environ.get("COLUMNS", "")
    if said.isdigit() and int(said):
        return int(said)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000


def entry(name: str, text: str) -> None:
    """A name and what is said of it, on as many lines as the terminal needs, all behind the name."""
    for line in textwrap.wrap(
        text,
        max(width(), len(name) + 30),
        initial_indent=name,
        subsequent_indent=" " * len(name),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [name.rstrip()]:
        print(line)


def suggest(why: str, command: str) -> None:
    """A command to type next."""
    print(folded(f"{why}: {command}", width()))


def facts(pairs: dict[str, Any]) -> None:
    """Names and values, one a line."""
    wide = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        if value is not None:
            entry(f"{name:>{wide}}  ", str(value))


def console() -> Any:
    """Where pictures go; piped, it does not colour."""
    from rich.console import Console

    to = Console(highlight=False)
    return to if to.is_terminal else Console(highlight=False, width=min(width(), 200), color_system=None)
