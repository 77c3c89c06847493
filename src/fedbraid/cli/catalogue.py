"""`fedbraid list`: what is available, a line each."""

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
    """List the available tasks, algorithms, codecs, partitions, models, engines and schedules.

    \b
    Examples:
      fedbraid list
      fedbraid list algorithms
      fedbraid list partitions --json
    """
    if kind is not None and kind not in KINDS:
        raise unknown("kind to list", kind, KINDS)
    catalogue = {k: _described(k) for k in (KINDS if kind is None else (kind,))}
    if json:
        return give(catalogue)
    for name, entries in catalogue.items():
        print(f"{name}:")
        wide = max(map(len, entries))
        for one, text in entries.items():
            entry(f"  {one:<{wide}}  ", text)


def _described(kind: str) -> dict[str, str]:
    return {name: _first_line(builder) for name, builder in _entries(kind).items()}


def _entries(kind: str) -> Mapping[str, Callable[..., Any]]:
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


def _first_line(builder: Callable[..., Any]) -> str:
    return (inspect.getdoc(builder) or "").partition("\n")[0]
