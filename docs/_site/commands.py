"""The command line's reference, read off the commands themselves."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any


def reference() -> str:
    """Every command: what it does, its arguments and options, its examples."""
    import typer

    from fedbraid.cli import app

    top = typer.main.get_command(app)
    return "\n\n".join(_command(c, f"fedbraid {name}") for name, c in commands(top))


def commands(group: Any, before: str = "") -> list[tuple[str, Any]]:
    """Every command that is not a group, by its full name."""
    found = []
    for name, command in group.commands.items():
        full = f"{before}{name}"
        found += commands(command, f"{full} ") if hasattr(command, "commands") else [(full, command)]
    return found


def _command(command: Any, path: str) -> str:
    parameters = [p for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
    arguments = [p for p in parameters if p.param_type_name == "argument"]
    options = [p for p in parameters if p.param_type_name == "option"]
    usage = " ".join([path, *(_argument(a) for a in arguments), *(["[OPTIONS]"] if options else [])])
    parts = [f"## {path}", f"```text\n{usage}\n```", _prose(command.help or "")]
    rows = [(f"`{_argument(a)}`", _cell(getattr(a, "help", "") or "")) for a in arguments]
    rows += [(", ".join(f"`{name}`" for name in _names(o)), _cell(_help(o))) for o in options]
    if rows:
        parts.append("\n".join(["| | |", "| :-- | :-- |", *(f"| {a} | {b} |" for a, b in rows)]))
    return "\n\n".join(parts)


def _argument(a: Any) -> str:
    name = a.metavar or a.name.upper()
    return name if a.required or name.startswith("[") else f"[{name}]"


def _names(o: Any) -> list[str]:
    words = [*o.opts, *o.secondary_opts]
    if o.is_flag or o.secondary_opts:
        return sorted(words, key=len)
    *short, long = sorted(words, key=len)
    return [*short, f"{long} {o.metavar or _kind(o)}"]


def _kind(o: Any) -> str:
    """What an option takes; typer has kept it in two places over time."""
    described = getattr(getattr(o, "type_descriptor", None), "annotation", None)
    name = getattr(getattr(o, "type", None), "name", None) or getattr(described, "__name__", "")
    return {"integer": "N", "int": "N", "float": "X", "path": "PATH"}.get(name.lower().split(" ")[0], "TEXT")


def _help(o: Any) -> str:
    default = o.default
    said = (o.help or "").strip()
    if isinstance(default, str | int | float) and not isinstance(default, bool) and "(" not in said:
        said = f"{said.rstrip('.')} ({default})."
    return said


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def _prose(text: str) -> str:
    """A docstring as Markdown: indented lines after `\\b` are kept line by line, as code."""
    blocks = []
    for block in inspect.cleandoc(text).split("\n\n"):
        first, *rest = block.strip("\b\n").splitlines()
        if block.startswith("\b") and rest and all(line.startswith(" ") for line in rest):
            code = textwrap.dedent("\n".join(rest))
            blocks += [first, f"```text\n{code}\n```"]
        else:
            blocks.append(" ".join(block.strip("\b").split()).replace("<", "&lt;"))
    return "\n\n".join(blocks)
