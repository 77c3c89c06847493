"""Is what is released one thing: one version everywhere, metadata that are true, files that a stranger needs?"""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import fedbraid as fb

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_there_is_one_version():
    """Written in one file, from which the build reads it; the other places agree."""
    source = PROJECT["tool"]["hatch"]["version"]["path"]
    written = re.findall(r'^__version__ = "([^"]+)"$', (ROOT / source).read_text(), re.M) if (ROOT / source).exists() else [fb.__version__]  # fmt: skip
    assert written == [fb.__version__]
    assert "version" in PROJECT["project"]["dynamic"]
    assert "version" not in PROJECT["project"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", fb.__version__)
    assert f"\nversion: {fb.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_installed_version_is_this_one():
    try:
        installed = metadata.version("fedbraid")
    except metadata.PackageNotFoundError:
        pytest.skip("fedbraid is not installed here, only on the path")
    assert installed == fb.__version__


def test_the_changelog_has_short_entries_under_known_headings_that_stand_once():
    text = (ROOT / "CHANGELOG.md").read_text()
    kinds = {
        "Breaking",
        "Added",
        "Changed",
        "Fixed",
        "Deprecated",
        "Removed",
        "Results change",
        "Folder format",
    }
    versions = re.split(r"^## ", text, flags=re.M)[1:]
    assert versions[0].startswith("[Unreleased]")
    for version in versions:
        named, *parts = re.split(r"^### ", version, flags=re.M)
        headings = [part.partition("\n")[0] for part in parts]
        assert set(headings) <= kinds, named
        assert len(set(headings)) == len(headings), named
        for part in parts:
            entries = re.split(r"^- ", part.partition("\n")[2], flags=re.M)
            assert entries[0].strip() == "", part
            assert [e for e in entries if len(e) > 450] == []


def test_python_versions_and_systems_are_those_that_ci_runs():
    classifiers = PROJECT["project"]["classifiers"]
    declared = [c.rpartition(" :: ")[2] for c in classifiers if re.search(r"Python :: 3\.\d+$", c)]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert [f'"{v}"' in workflow for v in declared] == [True] * len(declared)
    assert PROJECT["project"]["requires-python"] == f">={declared[0]}"
    for system, runner in (("MacOS", "macos-latest"), ("POSIX :: Linux", "ubuntu-latest")):
        assert (f"Operating System :: {system}" in classifiers) == (runner in workflow)


def test_ci_of_a_public_host_runs_the_targets_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for called in re.findall(r"run: make ([a-z-]+)(?![-$a-z])", path.read_text()):
            assert called in targets, f"{path.name} runs make {called}"


def test_the_package_carries_what_it_reads():
    from importlib.resources import files

    for folder, names in {
        "": ["py.typed"],
        "report": ["page.html", "page.js", "page.css", "charts.js"],
    }.items():
        home = files("fedbraid") / folder if folder else files("fedbraid")
        assert [n for n in names if not (home / n).is_file()] == []


def test_actions_are_pinned_by_commit():
    """A tag may be moved; a commit may not. The comment says which version it is."""
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        used = re.findall(r"uses: (.*)", path.read_text())
        assert used
        assert [u for u in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", u)] == []
