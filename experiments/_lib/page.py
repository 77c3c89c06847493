"""One page for all papers: every table, figure, theorem and claim, what came of it, how close, and the command."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from experiments._lib import hours
from experiments._lib.reproduce import (
    COUNTED,
    STATUS,
    Book,
    Claim,
    every,
    load,
    markdown,
    outdated,
    papers,
    sentences,
)

HEAD = """# The papers' tables, figures, theorems and claims, and what came of them

Made by `fedbraid reproduce --page` from the results and the papers' printed numbers; edit the grids, not this page. What each status
means:

"""


def write(home: Path) -> Path:
    """Make the page anew."""
    text = [
        HEAD + markdown(["status", "means"], [[k, v] for k, v in STATUS.items()], text=(0, 1)),
        "",
        "## In short",
        "",
        _short(home),
    ]
    for paper in papers(home):
        grid = load(home, paper)
        done = Book(home / paper / "results").done(every(grid))
        made = grid.claims(done)
        text += ["", f"## {paper}", "", *(f"- {sentence}" for sentence in sentences(grid, done)), ""]
        text += [f"[The experiment's own page]({paper}/README.md).", ""]
        for statuses in (COUNTED, ("also here",)):
            rows = [
                [_cell(v) for v in (c.item, c.says, c.status, c.close, f"`{c.command}`")]
                for c in made
                if c.status in statuses
            ]
            if rows:
                text += ["Also here:", ""] if statuses != COUNTED else []
                text += [markdown(["", "the paper", "status", "here", "command"], rows, text=range(5)), ""]
        text.pop()
    text += ["", "## Cells and hours", "", _hours(home), "", "## Which code made them", "", _codes(home)]
    text += [
        "",
        "Each line of a results file names the code that made it; `outdated.json` says which definitions changed since.",
    ]
    page = home / "README.md"
    page.write_text("\n".join(text) + "\n")
    return page


def _cell(text: str) -> str:
    """Text that may hold the bars of a norm, in a table."""
    return text.replace("|", r"\|").replace("`–`", "–")


def claims(home: Path, paper: str) -> list[Claim]:
    grid = load(home, paper)
    return grid.claims(Book(home / paper / "results").done(every(grid)))


def _short(home: Path) -> str:
    rows = []
    for paper in papers(home):
        count = Counter(c.status for c in claims(home, paper))
        rows.append([paper, *(str(count[status] or "") for status in COUNTED)])
    return markdown(["paper", *COUNTED], rows)


def _hours(home: Path) -> str:
    rows = [[*row[:2], *map(str, row[2:4]), row[4]] for row in parts(home)]
    return markdown(["paper", "part", "cells", "done", "hours of one core left"], rows, text=(0, 1))


def parts(home: Path) -> list[tuple[str, str, int, int, str]]:
    """(paper, part, cells, done, hours left) of every grid, both sizes."""
    found = []
    for paper in papers(home):
        grid, folder = load(home, paper), home / paper / "results"
        cells = every(grid)
        done = Book(folder).done(cells)
        left = hours.hours(cells, done, hours.read(folder))
        for part in dict.fromkeys(c.part for c in cells):
            mine = [c.name for c in cells if c.part == part]
            ready = sum(name in done for name in mine)
            found.append((paper, part, len(mine), ready, hours.total(left[n] for n in mine if n in left)))
    return found


def _codes(home: Path) -> str:
    """One line a paper: how many results there are, of how many versions of the code, and which are to be run again."""
    rows = []
    for paper in papers(home):
        lines = Book(home / paper / "results").done(every(load(home, paper)))
        why = Counter(text for line in lines.values() if (text := outdated(line)))
        again = ", ".join(f"{n} ({text})" for text, n in why.items())
        codes = len({line["code"] for line in lines.values()})
        rows.append(
            [
                paper, str(len(lines)), str(codes), str(len(lines) - sum(why.values())), again or "none",
                f"`fedbraid reproduce {paper} --again`" if why else "",
            ]
        )  # fmt: skip
    head = [
        "paper",
        "results",
        "versions of the code",
        "of today's definitions",
        "to be run again",
        "command",
    ]
    return markdown(head, rows, text=(0, 4, 5))


def by_test(test: str, why: str, item: str, says: str) -> Claim:
    """A claim that a test of the repository holds."""
    return Claim(item, says, "tested", why, f"pytest {test}")
