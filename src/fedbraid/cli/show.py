"""The output of commands: tables for people, JSON for programs, errors on stderr."""

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
    """Make streams that cannot encode a character, such as "─" on a terminal that is not UTF-8, print its ASCII spelling."""
    codecs.register_error("fedbraid", _spelled)
    for stream in streams:
        encoding = (getattr(stream, "encoding", None) or "").replace("-", "").lower()
        if encoding != "utf8" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="fedbraid")


def complain(message: str) -> None:
    """Print one sentence on stderr; keywords that it advises become options."""
    text = re.sub(r"\b([a-z]+(?:_[a-z]+)+)=True", lambda found: f"--{found[1].replace('_', '-')}", message)
    print(f"fedbraid: {' '.join(text.split())}", file=sys.stderr)


def quoted(path: object) -> str:
    """A path, quoted for a shell."""
    return shlex.quote(str(path))


@contextmanager
def waiting(what: str, hidden: bool = False) -> Iterator[None]:
    """Print on a terminal what a command is preparing; the line is erased afterwards."""
    visible = not hidden and sys.stderr.isatty()
    if visible:
        print(f"{what} …", end="\r", file=sys.stderr, flush=True)  # a warning is written over it
    try:
        yield
    finally:
        if visible:
            print("\x1b[K", end="", file=sys.stderr, flush=True)


def give(result: Any) -> None:
    """Print a result as JSON on stdout; NaN and infinities become null, because JSON lacks them."""
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

    On a narrow terminal, columns are dropped from the end of `order`, which lists them by importance.
    """
    columns = width()
    selected, wide = fit([list(head), *(list(r) for r in rows)], columns, left, order)
    entry("", title)
    for n, row in enumerate([head, *rows]):
        cells = [_cell(row[i], w, i < left) for i, w in zip(selected, wide)]
        print((" " * GAP).join(cells).rstrip())
        if n == 0:
            print("─" * (sum(wide) + GAP * (len(wide) - 1)))
    if lost := [name for i, name in enumerate(head) if i not in selected and name]:
        entry("", f"left out at {columns} columns: {', '.join(lost)}; --json has them")


def fit(
    lines: Sequence[Sequence[str]], columns: int, left: int, order: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """The columns that fit, and the width of each."""
    from rich.cells import cell_len

    full = [max(map(cell_len, column)) for column in zip(*lines)]
    least = [min(w, SHORT) if i < left else w for i, w in enumerate(full)]
    candidates = list(order or range(len(full)))
    while len(candidates) > 2 and sum(least[i] for i in candidates) + GAP * (len(candidates) - 1) > columns:
        candidates.pop()
    selected = sorted(candidates)
    wide = [full[i] for i in selected]
    over = sum(wide) + GAP * (len(wide) - 1) - columns
    for at in sorted((k for k, i in enumerate(selected) if i < left), key=lambda k: -wide[k]):
        cut = min(max(0, over), wide[at] - least[selected[at]])
        wide[at], over = wide[at] - cut, over - cut
    return selected, wide


def _cell(text: str, wide: int, left: bool) -> str:
    from rich.cells import cell_len, set_cell_size

    text = set_cell_size(text, wide - 1) + "…" if cell_len(text) > wide else text
    padding = " " * (wide - cell_len(text))
    return text + padding if left else padding + text


def width() -> int:
    """The width of lines: COLUMNS, or the terminal's; unlimited if there is neither."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns):
        return int(columns)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000


def entry(name: str, text: str) -> None:
    """Print a name and its text, wrapped to the terminal's width and indented behind the name."""
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
    """Print a command to run next."""
    print(folded(f"{why}: {command}", width()))


def facts(pairs: dict[str, Any]) -> None:
    """Print names and values, one pair a line."""
    wide = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        if value is not None:
            entry(f"{name:>{wide}}  ", str(value))


def console() -> Any:
    """The console for pictures; without colors if it is piped."""
    from rich.console import Console

    to = Console(highlight=False)
    return to if to.is_terminal else Console(highlight=False, width=min(width(), 200), color_system=None)
