"""Help texts that are complete and can be copied, however narrow the terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

import typer
import typer.core

F = TypeVar("F", bound=Callable[..., Any])
_UNBROKEN = re.compile(r"""'[^']*'|"[^"]*"|(?<= )--?[a-z-]+ (?!-)""")  # quoted text; an option with its value


class Command(typer.core.TyperCommand):
    """Folds long examples."""

    def get_help(self, ctx: Any) -> str:
        width = ctx.make_formatter().width
        return "\n".join(folded(line, width) for line in _unescaped(super().get_help(ctx)).split("\n"))


class Commands(typer.core.TyperGroup):
    """Lists every command with its complete first sentence."""

    def get_help(self, ctx: Any) -> str:
        return _unescaped(super().get_help(ctx))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, c.get_short_help_str(10_000)) for name, c in found if c is not None and not c.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class App(typer.Typer):
    """A group of commands."""

    def __init__(self, **more: Any) -> None:
        super().__init__(cls=Commands, rich_markup_mode=None, **more)

    def command(self, name: str | None = None, **more: Any) -> Callable[[F], F]:
        return super().command(name, cls=Command, **more)


def _unescaped(text: str) -> str:
    """The text without the backslashes that typer 0.20 puts before brackets for a markup that is off here."""
    return text.replace("\\[", "[")


def folded(line: str, width: int) -> str:
    """A line of the help; a long command is continued over several lines, which a shell reads as one."""
    if len(line) <= width or not re.match(r"(    |\w+: )fedbraid ", line):
        return line
    bound = _UNBROKEN.sub(lambda match: match[0].replace(" ", "\xa0"), line)
    lines = textwrap.wrap(
        bound, width - 2, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False
    )
    return " \\\n".join(lines).replace("\xa0", " ")
