"""Does what users read (help, errors, pages) keep to the words of the field?

Each word of the table had several meanings here, or has a usual one elsewhere; the second column is what to write.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import typer

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src/fedbraid"
RETIRED = {
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bgarbl(e|es|ed)\b|\bdamaged\b": "corrupt",
    r"\bbeyond reason\b": "diverged",
    r"\b(some|no)body\b|\bwhoever\b|\bknobs?\b": "name it",
    r"\bhand(s|ed|ing)? in\b": "upload",
    r"\bvisits?\b": "participation, or local training",
    r"\bcrowd\b|\bwhoever comes\b": "cohort, or population",
    r"\bunlike (data|clients)\b": "non-IID data",
    r"\bthin (up|down)?links?\b": "low bandwidth",
    r"\bwho holds what\b": "partition",
    r"\b(is|are) no (run|task|algorithm|folder|number|list|text|file|codec|model|metric|way|share|count|name|figure|comparison|sweep)\b": "is not a",
    r"\bis none\b|\bis not known\b|\bare not known\b": "must be",
    r"\bothers than before\b": "changed",
    r"\ba whole number\b|\bwhole numbers\b": "an integer",
    r"\bthrash(es)?\b": "oscillates",
    r"\bcontestants?\b": "entries",
    r"\bby hand\b": "custom",
    r"\bway (there|back)\b": "forward, backward",
    r"\bgradients? the other way\b": "backward",
    r"\b(optimis|quantis|vectoris|initialis|organis|personalis|generalis|summaris|serialis|recognis|minimis|maximis)\w*": "American spelling",
    r"\b(normalis(?!e=)\w*|favour\w*|colour\w*|behaviour\w*|centred(?!_)\w*|labelled|modelled|artefact\w*)": "American spelling",
    r"\bclients alone\b|\btrain(s|ed|ing)? alone\b|\bover alone\b": "local-only",
}
FOUND = re.compile("|".join(f"(?:{word})" for word in RETIRED), re.I)
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "notebooks").rglob("*.ipynb")),
]
EXCEPTIONS: dict[str, set[str]] = {}


def prose(path: Path) -> str:
    """A page without its code: names in the code keep the spelling of the interface."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    text = re.sub(r"^([ \t]*)```.*?^\1```", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)|<[^>]*>|\$[^$]*\$", "`…`", text)
    return text


def retired(text: str) -> list[str]:
    return sorted({found[0].lower() for found in FOUND.finditer(" ".join(text.split()))})


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_pages_use_the_fields_words(path):
    assert [w for w in retired(prose(path)) if w not in EXCEPTIONS.get(name(path), ())] == []


def commands(command, path=("fedbraid",)):
    yield path, command
    for key, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, key))


def test_help_uses_the_fields_words():
    from fedbraid.cli import app

    bad = {}
    for path, command in commands(typer.main.get_command(app)):
        texts = [
            command.help or "",
            command.epilog or "",
            *(getattr(p, "help", None) or "" for p in command.params),
        ]
        if found := [w for text in texts for w in retired(text)]:
            bad[" ".join(path)] = found
    assert bad == {}


def sentences(path: Path):
    """(line, text) of what a file raises: the strings in its raise statements, holes as …."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and node.exc is not None:
            text = " ".join(
                part.value
                for part in ast.walk(node.exc)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )
            yield node.lineno, text


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=name)
def test_errors_use_the_fields_words(path):
    allowed = EXCEPTIONS.get(name(path), ())
    bad = {
        line: found
        for line, text in sentences(path)
        if (found := [w for w in retired(text) if w not in allowed])
    }
    assert bad == {}


def test_the_words_are_found():
    for text in (
        "2 for what you can mend",
        "it is no run folder",
        "x='y' is not known",
        "local optimisers",
        "Whoever came",
    ):
        assert retired(text), text
    assert retired("normalise='cohort' and centred_clip stay, for they are keywords") == []
    assert retired("weights are normalised") == ["normalised"]
