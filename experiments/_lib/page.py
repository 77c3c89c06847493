"""One page for all papers: every table, figure, theorem and claim, what came of it, how close, and the command."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from experiments._lib import hours
from experiments._lib.reproduce import STATUS, Book, Claim, every, load, markdown, outdated, papers

HEAD = """# The papers' tables, figures, theorems and claims, and what came of them

Made by `fedbraid reproduce --page` from the results and the papers' printed numbers; edit the grids, not this page. What each status
means:

"""


def write(home: Path) -> Path:
    """Make the page anew."""
    text = [
        HEAD + markdown(["status", "means"], [[k, v] for k, v in STATUS.items()]),
        "",
        "## In short",
        "",
        _short(home),
    ]
    for paper in papers(home):
        grid = load(home, paper)
        done = Book(home / paper / "results").done(every(grid))
        rows = [
            [_cell(v) for v in (c.item, c.says, c.status, c.close, f"`{c.command}`")]
            for c in grid.claims(done)
        ]
        text += ["", f"## {paper}", "", f"[The experiment's own page]({paper}/README.md).", ""]
        text += [markdown(["", "the paper", "status", "here", "command"], rows)]
    text += ["", "## Cells and hours", "", _hours(home), "", "## Which code made them", "", _codes(home)]
    text += [
        "",
        "Lines from before versions were kept name the commit that brought them. Of these, made before SCAFFOLD's and FedShift's",
        "definitions were settled, and to be run again:",
        "",
        _again(home),
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
        rows.append([paper, *(str(count[status] or "") for status in STATUS)])
    return markdown(["paper", *STATUS], rows)


def _hours(home: Path) -> str:
    rows = [[*row[:2], *map(str, row[2:4]), row[4]] for row in parts(home)]
    return markdown(["paper", "part", "cells", "done", "hours of one core left"], rows)


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


def _again(home: Path) -> str:
    """By part, the cells whose definition has changed since, and what they took."""
    rows = []
    for paper in papers(home):
        cells = every(load(home, paper))
        lines = Book(home / paper / "results").done(cells)
        for part in dict.fromkeys(c.part for c in cells):
            old = [
                lines[c.name] for c in cells if c.part == part and c.name in lines and outdated(lines[c.name])
            ]
            if old:
                took = hours.total([sum(line["seconds"] for line in old) / 3600])
                rows.append(
                    [paper, part, str(len(old)), took, f"`fedbraid reproduce {paper} --part {part} --again`"]
                )
    return markdown(["paper", "part", "cells", "hours of one core", "command"], rows)


def _codes(home: Path) -> str:
    """How many lines each version of the code made; the oldest know the commit that brought them."""
    rows = []
    for paper in papers(home):
        lines = Book(home / paper / "results").done(every(load(home, paper)))
        count = Counter(line["code"] for line in lines.values())
        rows += [[paper, code, str(n)] for code, n in sorted(count.items())]
    return markdown(["paper", "code", "cells"], rows)


def by_test(test: str, why: str, item: str, says: str) -> Claim:
    """A claim that a test of the repository holds."""
    return Claim(item, says, "tested", why, f"pytest {test}")
