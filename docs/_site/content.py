"""Tables and pictures that stand in the pages and are made by the repo itself: `make tables` writes them, a test compares.

A page holds them between two comments, the first of which says what is made:

    <!-- cost: scaffold(), fedadavr(memory='int4') -->    what `fedbraid cost` says of them
    <!-- costs -->                                        the same of every algorithm
    <!-- table: fedadavr, mnist headline, FedAvg|FedYogi -->   of an experiment's page; the third keeps some rows
    <!-- picture: fedgbo/curves.png, what it shows -->     of an experiment, once it has been drawn
    <!-- hooks -->                                        the signatures of a rule's, a gather's and a transform's hooks
    <!-- traits -->                                       the traits that a rule, a gather and a transform may have
    <!-- cli -->                                          every command and its options
    …
    <!-- end -->
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

import commands
import maths

ROOT = Path(__file__).parent.parent.parent
MARK = re.compile(
    r"^(?P<indent> *)(?P<mark><!-- (?P<kind>cost|costs|table|picture|hooks|traits|cli)(?:: (?P<rest>.*?))? -->)\n"
    r".*?^ *<!-- end -->$",
    re.M | re.S,
)
COMMENT = re.compile(
    r"^ *<!-- (?:cost|costs|table|picture|hooks|traits|cli)(?:: .*?)? -->\n|^ *<!-- end -->\n?", re.M
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

PICTURES = sorted(ROOT.glob("experiments/*/*.png"))  # once: an experiment may draw while the site is built

MODEL, CLIENTS, PER_ROUND, SAMPLES = "lenet5", 500, 5, 120
COMMAND = f"fedbraid cost {MODEL} ALGORITHM --clients {CLIENTS} --per-round {PER_ROUND} --samples {SAMPLES}"


def fill(markdown: str, uri: str) -> str:
    """A page with everything between its comments made anew."""

    def made(match: re.Match[str]) -> str:
        body = _made(match["kind"], match["rest"] or "", uri)
        return textwrap.indent(f"{match['mark']}\n\n{body}\n\n<!-- end -->", match["indent"])

    return MARK.sub(made, markdown)


def where(page: Path) -> str:
    """A page's place as seen from docs/."""
    return Path(os.path.relpath(page, ROOT / "docs")).as_posix()


def write() -> None:
    """Every page as it should be."""
    for path in PAGES:
        text = path.read_text()
        filled = fill(text, where(path))
        if filled != text:
            path.write_text(filled)
            print(f"{path.relative_to(ROOT)} written")


def _made(kind: str, rest: str, uri: str) -> str:
    match kind:
        case "cost":
            return cost(_calls(rest))
        case "costs":
            return cost(_every())
        case "table":
            return table(*(part.strip() for part in rest.split(",", 2)))
        case "picture":
            path, _, alt = rest.partition(",")
            return picture(path.strip(), alt.strip(), uri)
        case "hooks":
            return hooks()
        case "traits":
            return traits()
    return commands.reference()


# Experiments --------------------------------------------------------------------------------------


def table(experiment: str, name: str, keep: str = "") -> str:
    """A table of an experiment's page: its measured rows, or that nothing was measured yet."""
    text = (ROOT / "experiments" / experiment / "README.md").read_text()
    found = re.search(rf"<!-- table {re.escape(name)} -->\n+(.*?)\n*<!-- end -->", text, re.S)
    if found is None:
        raise KeyError(f"experiments/{experiment}/README.md has no table {name!r}")
    lines = found[1].strip().splitlines()
    head, rule, rows = lines[0], lines[1], lines[2:]
    ours = [i for i, title in enumerate(_cells(head)) if i and not title.startswith("paper")]
    kept = [
        row
        for row in rows
        if re.search(keep, _cells(row)[0], re.I) and any(_measured(_cells(row)[i]) for i in ours)
    ]
    if not kept:
        what = f"{name}, {keep}" if keep else name
        return f"*Not measured yet: {what.replace('|', ', ')}. `fedbraid reproduce {experiment}` does it.*"
    return maths.subscripts("\n".join([head, rule, *kept]))


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def _measured(cell: str) -> bool:
    return not cell.startswith("–") and cell not in ("", "0")


def picture(path: str, alt: str, uri: str) -> str:
    """A picture of an experiment, nothing where it has not been drawn."""
    file = ROOT / "experiments" / path
    if file not in PICTURES:
        return ""
    return f"![{alt}]({os.path.relpath(file, (ROOT / 'docs' / uri).parent)})"


# Costs --------------------------------------------------------------------------------------------


def _calls(text: str) -> list[str]:
    """Calls separated by commas."""
    listed = ast.parse(f"[{text}]", mode="eval").body
    assert isinstance(listed, ast.List)
    return [ast.unparse(call) for call in listed.elts]


def _every() -> list[str]:
    from fedbraid import algorithms

    needs = {"fedpaq": "int8()", "fedef": "int8()", "cluster_fedvarp": "10"}
    told = sections()
    return [f"{name}({needs.get(name, '')})" for name in algorithms.BUILDERS if name.replace("_", "") in told]


def sections() -> set[str]:
    """The headings of the algorithms' pages, letters and digits alone."""
    pages = (p.read_text() for p in (ROOT / "docs/algorithms").glob("*.md"))
    found = (heading for page in pages for heading in re.findall(r"^## (.*)$", page, re.M))
    return {re.sub(r"\W|_", "", heading).lower() for heading in found}


def cost(calls: list[str]) -> str:
    """What a visit of one client costs, and what is kept where."""
    from fedbraid.run.formatting import format_bytes, format_count

    lines = [
        "| | up, a client | down, a client | server keeps | a client keeps | FLOPs, a client |",
        "| :-- | --: | --: | --: | --: | --: |",
    ]
    for call in calls:
        c = estimated(call)
        each = (format_bytes(way / PER_ROUND) for way in (c.bytes_up, c.bytes_down))
        kept = (format_bytes(c.server_state), format_bytes(c.client_state) if c.client_state else "–")
        lines.append(f"| `{call}` | {' | '.join((*each, *kept))} | {format_count(c.flops)} |")
    return "\n".join(lines)


@functools.cache
def estimated(call: str) -> Any:
    """The cost of an algorithm on LeNet-5, 5 of 500 clients a round, 120 samples each."""
    from fedbraid.cli import config as cfg
    from fedbraid.cli.cost import _subject
    from fedbraid.study.cost import estimate

    module, sample, crowd, _, _ = _subject(MODEL, {"clients": CLIENTS}, SAMPLES, PER_ROUND)
    return estimate(module, sample, cfg.algorithm_of({"name": call}), cfg.work_of({}), crowd)


# Hooks --------------------------------------------------------------------------------------------


PLAIN = {
    "init": "State that lives from step to step.",
    "update": "From update to update: what goes on, the new state.",
}


def hooks() -> str:
    """The parts' hooks as they are defined: signature, and what each is for."""
    import fedbraid as fb

    lines = ["| part | hook | what it is for |", "| :-- | :-- | :-- |"]
    for part in (fb.Rule, fb.Gather, fb.Transform):
        own = [
            (name, f) for name, f in vars(part).items() if inspect.isfunction(f) and not name.startswith("_")
        ]
        for i, (name, f) in enumerate(own):
            said = " ".join((inspect.getdoc(f) or PLAIN[name]).split()).replace("|", "\\|")
            lines.append(f"| {f'`{part.__name__}`' if i == 0 else ''} | `{name}{_signature(f)}` | {said} |")
    return "\n".join(lines)


def traits() -> str:
    """The traits of parts as they are defined: name, default, and what each says."""
    import fedbraid as fb
    from fedbraid.core import traits as module

    field = re.compile(r"^    (\w+): (?:(?!\n    \w+: )[^#])*?  # (.*)$", re.M)
    said = dict(field.findall(Path(str(module.__file__)).read_text()))
    lines = ["| record | trait | default | what it says |", "| :-- | :-- | :-- | :-- |"]
    for kind in (fb.RuleTraits, fb.PersonalTraining, fb.GatherTraits, fb.TransformTraits):
        for i, f in enumerate(fields(kind)):
            what = said[f.name].replace("|", "\\|")
            default = "" if callable(f.default) else f"`{f.default!r}`"
            lines.append(f"| {f'`{kind.__name__}`' if i == 0 else ''} | `{f.name}` | {default} | {what} |")
    return "\n".join(lines)


def _signature(f: Any) -> str:
    """Without `self`, and with names instead of dotted paths."""
    found = inspect.signature(f)
    given = [p for p in found.parameters.values() if p.name != "self"]
    return str(found.replace(parameters=given)).replace("'", "").replace("|", "\\|")


if __name__ == "__main__":
    write()
