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
IDENTIFIERS = {  # words that had many meanings in names, and what to write instead
    "own": "custom (a user's), personal or local (a client's), or nothing",
    "known": "registered, recorded, supported or valid",
    "whole": "integer, full, complete or atomic",
    "kept": "stored, saved (for backward) or the name of what is stored",
    "held": "stored, local, or the version downloaded",
    "seen": "history, processed or view",
    "taken": "accepted, committed or reserved",
    "took": "elapsed or duration",
    "alone": "single_threaded, local_only, autocommit or is_single_client",
    "apart": "separate, stride or difference",
    "place": "path, folder, offset, index or slot",
    "places": "offsets, indices or candidates",
    "room": "workspace, buffer, width or budget",
    "rooms": "buffers or slots",
    "came": "uploads or participants",
    "come": "upload or participate",
    "comes": "arrival or is_start",
    "coming": "pending or next",
    "here": "available, connected or installed",
    "there": "available, connected or installed",
    "way": "engine, backend, direction or method",
    "part": "slice, split, fraction, contribution, chunk or module",
    "parts": "slices, chunks, fields or columns; parts of an algorithm only",
    "share": "fraction, contribution or partition",
    "shares": "fractions, local sets or partitions",
    "mend": "fix",
    "mended": "fixed",
    "garbles": "corrupts",
    "damaged": "corrupt",
    "knob": "option",
    "thing": "name it",
    "things": "name them",
    "something": "name it",
    "nobody": "empty or no_clients",
    "somebody": "name it",
    "whoever": "name it",
    "foretell": "forecast",
    "hands": "workers, threads or hand-outs",
    "heard": "received or last_seen",
    "hang": "install",
    "judge": "evaluate or evaluation",
    "judged": "evaluated",
    "look": "evaluate, report or intermediate value",
    "looked": "evaluated or checked",
    "told": "sent, passed or status",
    "said": "text, message, fields or settings",
    "says": "describes",
    "asked": "selected or requested",
    "wanted": "count, expected or requested",
    "shown": "printed, text or displayed",
    "worth": "value or score",
    "visit": "participation, local training or client update",
    "visits": "participations",
    "mine": "name whose",
    "theirs": "name whose",
    "beside": "paired or alongside what",
    "aside": "excluded or pending",
}
CONTRACT = {  # names outside checks use, and terms of the field that hold such a word
    "held",  # held="server" or "client"
    "share",  # share= of mixed, iid_mix and attack
    "test_shares",  # of tasks.load: stored in the specs of published runs
}
CLEAN = (  # files and folders whose names keep to these words; the others are to follow
    "cli/board.py",
    "cli/catalogue.py",
    "cli/choose.py",
    "cli/compare.py",
    "cli/config.py",
    "cli/cost.py",
    "cli/data.py",
    "cli/demo.py",
    "cli/doctor.py",
    "cli/export.py",
    "cli/help.py",
    "cli/options.py",
    "cli/report.py",
    "cli/resume.py",
    "cli/run.py",
    "cli/shared.py",
    "cli/show.py",
    "cli/sweep.py",
    "cli/watch.py",
    "core/check.py",
    "core/codec.py",
    "core/custom_loop.py",
    "core/device.py",
    "core/layout.py",
    "core/lr_schedules.py",
    "core/metric_names.py",
    "core/rng.py",
    "core/vector_spec.py",
    "core/work.py",
    "data",
    "engines/autograd.py",
    "engines/backends.py",
    "engines/choice.py",
    "engines/client_update.py",
    "engines/cost_model.py",
    "engines/engine.py",
    "engines/flops.py",
    "engines/folding.py",
    "engines/frozen_features.py",
    "engines/gradient_threads.py",
    "engines/in_process.py",
    "engines/per_example.py",
    "engines/planning.py",
    "engines/pool.py",
    "engines/ray.py",
    "errors.py",
    "links/_bitpacking.py",
    "links/_elias_fano.py",
    "links/_kmeans1d.py",
    "links/_layerwise.py",
    "links/codecs.py",
    "links/error_feedback.py",
    "links/fp16.py",
    "links/kmeans.py",
    "links/null.py",
    "links/qsgd.py",
    "links/symmetric.py",
    "links/topk.py",
    "links/uniform.py",
    "links/wrapped.py",
    "links/wrappers.py",
    "models",
    "parse.py",
    "report",
    "run",
    "schedule",
    "study",
    "user_files.py",
    "workers.py",
)
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


def words(identifier: str) -> list[str]:
    """The words of a name; held-out data is a term of the field."""
    identifier = re.sub("held_out", "", identifier, flags=re.I)
    return [w.lower() for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)]


def defined(tree: ast.AST):
    """(line, name) of all that a module names: functions, classes, parameters, variables, fields and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def retired_names(tree: ast.AST) -> dict[str, str]:
    """Names that hold a retired word, each with its line and what to write."""
    return {
        name: f"line {line}: {word} -> {IDENTIFIERS[word]}"
        for line, name in defined(tree)
        if name.strip("_") not in CONTRACT
        for word in words(name)
        if word in IDENTIFIERS
    }


@pytest.mark.parametrize("clean", CLEAN)
def test_names_use_the_fields_words(clean):
    files = sorted((SOURCE / clean).rglob("*.py")) or [SOURCE / clean]
    bad = {name(path): found for path in files if (found := retired_names(ast.parse(path.read_text())))}
    bad |= {name(path): path.stem for path in files if set(words(path.stem)) & IDENTIFIERS.keys()}
    assert bad == {}


def test_names_are_found():
    tree = ast.parse("def parts_of(x, own=1):\n    self.kept, takenNow = x\n    held_out = share = x")
    assert set(retired_names(tree)) == {"parts_of", "own", "kept", "takenNow"}


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
