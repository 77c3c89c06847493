"""`fedbraid reproduce`: a paper's experiments, cell by cell, and its tables beside ours.

The harness is `experiments/_lib` of the repository, which the installed package does not have.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from fedbraid.cli.show import Json, Quiet, complain, give, table
from fedbraid.errors import ConfigError, DataError
from fedbraid.run.formatting import format_seconds


def reproduce(
    paper: Annotated[
        str | None,
        typer.Argument(
            metavar="PAPER", help="A folder of experiments/, such as fedadavr; all are listed if left out."
        ),
    ] = None,
    part: Annotated[str | None, typer.Option(help="Only this part of the grid, such as mnist.")] = None,
    cells: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Only cells whose names match, such as 'mnist/LQ-1/*'.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes of one thread each.")] = 2,
    list_: Annotated[
        bool, typer.Option("--list", help="Show the cells and which are done; run nothing.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="The paper's own networks, rounds and seeds, for large machines.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Count cells whose definition has changed since as not done.")
    ] = False,
    trial: Annotated[
        bool,
        typer.Option(
            "--try", help="Train a little of one cell of each part, and say how many hours all would take."
        ),
    ] = False,
    page: Annotated[
        bool,
        typer.Option(
            "--page", help="Write the page of every paper's tables, figures and claims; run nothing."
        ),
    ] = False,
    tables_only: Annotated[
        bool, typer.Option("--tables-only", help="Make tables and pictures from the results; run nothing.")
    ] = False,
    experiments: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the grids are (./experiments).")
    ] = None,
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Where cells in progress are kept.")] = Path(
        "runs/reproduce"
    ),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the experiments of a paper and put the tables that come out beside the paper's.

    Cells that are done are skipped and one that was stopped continues, so the hours can be spread: Ctrl-C,
    and later the same command. Tables go to experiments/PAPER/README.md, results to experiments/PAPER/results.

    \b
    Examples:
      fedbraid reproduce
      fedbraid reproduce qafel --part mushrooms
      fedbraid reproduce fedadavr --cells 'mnist/LQ-1/*' --workers 2
      fedbraid reproduce --list
      fedbraid reproduce fedadavr --list
      fedbraid reproduce fedshift --full --try
      fedbraid reproduce fedadavr --again --cells '*/SCAFFOLD/*'
      fedbraid reproduce --page
      fedbraid reproduce fedadavr --tables-only
    """
    r: Any = of_clone("reproduce", experiments)

    home = r.find_home(experiments)
    if page:
        return _page(home, json, quiet)
    if paper is None:
        return _papers(home, json)
    if sum((list_, tables_only, trial)) > 1:
        raise ConfigError("two of --list, --tables-only and --try were given; give one of them")
    grid, book = r.load(home, paper), r.Book(home / paper / "results", again)
    chosen = r.choose(grid.full() if full else grid.cells(), part, cells)
    if list_:
        return _list(paper, chosen, book, json)
    if trial:
        return _try(paper, chosen, book, json)
    if not tables_only:
        show = _Progress(paper, silent=json or quiet)

        def known() -> list[Any]:
            grid = r.load(home, paper)
            return r.choose(grid.full() if full else grid.cells(), part, cells)  # type: ignore[no-any-return]

        chosen = _run(chosen, known, lambda cells: r.go(home, paper, cells, runs, workers, show, again), book)
    tables = r.report(home, paper)
    _close(home / paper, paper, chosen, book, tables, json, quiet)


def _run(
    chosen: list[Any], known: Callable[[], list[Any]], go: Callable[[list[Any]], None], book: Any
) -> list[Any]:
    """Run the cells, and those that are known once others are done: settings, then seeds; all of them."""
    try:
        while True:
            go(chosen)
            before, chosen = len(chosen), known()
            if len(chosen) == before:
                return chosen
    except KeyboardInterrupt:
        done = len(book.done(chosen))
        complain(f"stopped with {done} of {len(chosen)} cells done; the same command continues")
        raise typer.Exit(130) from None


def of_clone(name: str, home: Path | None = None) -> ModuleType:
    """A module of `experiments/_lib`: of a clone around this folder, around the working directory, or of this package."""
    import fedbraid

    near = [
        *(home.resolve().parents if home else ()),
        Path.cwd(),
        *Path.cwd().parents,
        Path(fedbraid.__file__).parents[2],
    ]
    for root in near:
        if (root / "experiments" / "_lib" / f"{name}.py").is_file():
            if str(root) not in sys.path:
                sys.path.append(str(root))
            return importlib.import_module(f"experiments._lib.{name}")
    raise ConfigError(
        "the papers' experiments are in the repository, not in the package; clone it and run this inside the clone"
    )


class _Progress:
    """A line on stderr whenever a cell is done."""

    def __init__(self, paper: str, silent: bool) -> None:
        self.paper, self.silent = paper, silent

    def __call__(self, done: int, total: int, left: float | None) -> None:
        if not self.silent:
            when = "" if left is None or done == total else f", about {format_seconds(left)} left"
            print(f"{self.paper}: {done} of {total} cells done{when}", file=sys.stderr)


def _page(home: Path, json: bool, quiet: bool) -> None:
    page = of_clone("page")

    where = page.write(home)
    if json:
        return give({"page": str(where)})
    if not quiet:
        print(f"every paper's claims and what came of them: {where}")


def _papers(home: Path, json: bool) -> None:
    page = of_clone("page")

    found = page.parts(home)
    names = ["paper", "part", "cells", "done", "hours left"]
    if json:
        return give([dict(zip((n.replace(" ", "_") for n in names), row)) for row in found])
    table(f"grids in {home}; hours of one core", names, [list(map(str, row)) for row in found], left=2)


def _try(paper: str, cells: list[Any], book: Any, json: bool) -> None:
    hours = of_clone("hours")

    first = {c.part: c for c in reversed(cells)}
    for part, cell in reversed(first.items()):
        try:
            hours.write(book.folder, part, hours.attempt(cell))
        except DataError as error:
            complain(f"{part} cannot be tried here: {error}")
    _list(paper, cells, book, json)


def _list(paper: str, cells: list[Any], book: Any, json: bool) -> None:
    hours = of_clone("hours")

    done = book.done(cells)
    left = hours.hours(cells, done, hours.read(book.folder))
    if json:
        return give(
            [
                {"cell": c.name, **c.settings(), "done": c.name in done, "hours_left": left.get(c.name, 0.0)}
                for c in cells
            ]
        )
    rows = [
        [
            c.name,
            str(c.settings()["algorithm"]),
            _came(done.get(c.name)),
            hours.total([left[c.name]]) if c.name in left else "",
        ]
        for c in cells
    ]
    table(
        f"{paper}: {len(done)} of {len(cells)} cells done, {hours.total(left.values())} hours of one core left",
        ["cell", "algorithm", "last accuracy", "hours"],
        rows,
        left=2,
    )


def _came(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    if line["diverged"]:
        return "diverged"
    values = line["curve"].get("accuracy") or line["curve"].get("loss") or [None]
    return "done" if values[-1] is None else f"{values[-1]:.4g}"


def _close(
    folder: Path, paper: str, cells: list[Any], book: Any, tables: list[str], json: bool, quiet: bool
) -> None:
    done = book.done(cells)
    facts = {
        "paper": paper,
        "cells": len(cells),
        "done": len(done),
        "tables": tables,
        "page": str(folder / "README.md"),
    }
    if json:
        return give(facts)
    if not quiet:
        print(f"{len(done)} of {len(cells)} cells done; tables in {folder / 'README.md'}")
