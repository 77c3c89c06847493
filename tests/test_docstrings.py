"""Does every builder's docstring hold its equation and an example, and do all examples of docstrings run?"""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

from fedbraid.algorithms import BUILDERS, WRAPPERS

SOURCE = Path(__file__).parent.parent / "src"
WITH_EXAMPLES = [p for p in sorted(SOURCE.rglob("*.py")) if re.search(r"^ +>>> ", p.read_text(), re.M)]
ALL = {**BUILDERS, **WRAPPERS}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("name", ALL)
def test_a_builder_says_its_equation_and_shows_a_run(name: str) -> None:
    said = ALL[name].__doc__ or ""
    prose, _, example = said.partition(">>> ")
    assert re.search(r"←|=.*[ΣΔ(]", prose), "no equation"
    assert f"fb.{name}(" in example, "no example"


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=name_of)
def test_examples_of_docstrings_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name_of(path))
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    said: list[str] = []
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        test.globs["fb"] = importlib.import_module("fedbraid")
        runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)
