"""`fedbraid list`: what there is, a line each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from fedbraid.cli.show import Json, entry, give
from fedbraid.errors import unknown

KINDS = ("tasks", "algorithms", "codecs", "partitions", "models", "engines", "schedules")


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="KIND", help=f"One of {', '.join(KINDS)}; all of them if left out."),
    ] = None,
    json: Json = False,
) -> None:
    """Show what tasks, algorithms, codecs, partitions, models, engines and schedules there are.

    \b
    Examples:
      fedbraid list
      fedbraid list algorithms
      fedbraid list partitions --json
    """
    if kind is not None and kind not in KINDS:
        raise unknown("kind of thing to list", kind, KINDS)
    shown = {k: _described(k) for k in (KINDS if kind is None else (kind,))}
    if json:
        return give(shown)
    for name, entries in shown.items():
        print(f"{name}:")
        wide = max(map(len, entries))
        for one, text in entries.items():
            entry(f"  {one:<{wide}}  ", text)


def _described(kind: str) -> dict[str, str]:
    return {name: _first_line(thing) for name, thing in _things(kind).items()}


def _things(kind: str) -> Mapping[str, Callable[..., Any]]:
    match kind:
        case "tasks":
            from fedbraid.data import tasks

            return {name: tasks._SOURCES[name].read for name in tasks.names()}
        case "algorithms":
            from fedbraid import algorithms

            return {**algorithms.BUILDERS, **algorithms.WRAPPERS}
        case "codecs":
            from fedbraid.links import codecs

            return {name: getattr(codecs, name) for name in codecs.__all__}
        case "partitions":
            from fedbraid.data import partition

            return partition.KINDS
        case "models":
            from fedbraid import models

            return {name: getattr(models, name) for name in models.names()}
        case "engines":
            from fedbraid import engines

            return engines.ENGINES
    from fedbraid import schedule

    return {f.__name__: f for f in (schedule.rounds, schedule.buffered, schedule.immediate)}


def _first_line(thing: Callable[..., Any]) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]
