"""Do the examples in README and docs run as they stand, and does the site hold what it promises?"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import test_exports  # what the contract lists

from fedbraid.cli import app
from fedbraid.errors import ConfigError

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "experiments").glob("*/README.md")),
]
NOTEBOOKS = sorted((ROOT / "notebooks").rglob("*.ipynb"))

sys.path.insert(0, str(ROOT / "docs/_site"))
import books  # noqa: E402
import commands  # noqa: E402
import content  # noqa: E402
import parameters  # noqa: E402


def blocks(page):
    """Blocks fenced as `python`; those fenced as `py` are parts of files or need an extra."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


def name_of(page):
    return f"{page.parent.name}/{page.name}"


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=name_of)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    for i, block in enumerate(blocks(page)):
        exec(compile(block, f"{page.name}, example {i + 1}", "exec", dont_inherit=True), names)


def told(text):
    """Every command of ours in a page's blocks, and in its lines where nothing is left out of it."""
    shown = "".join(re.findall(r"```(?:console|bash)\n(.*?)```", text, re.S)).replace("\\\n", " ")
    lines = re.findall(r"^(?:\$ )?((?:\S+ .*&& )?fedbraid [^\n]+)", shown, re.M)
    examples = "".join(re.findall(r"Examples:\n+```text\n(.*?)```", text, re.S))
    lines += [re.split(" {3,}", line)[0] for line in examples.splitlines()]
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    lines += [c for c in re.findall(r"`(fedbraid [a-z][^`]*)`", prose) if "…" not in c]
    for line in lines:
        yield from (words[1:] for words in apart(line) if words[:1] == ["fedbraid"])


def apart(line):
    """The words of each command in a line of shell."""
    words = shlex.shlex(line, posix=True, punctuation_chars="&|;>")
    words.whitespace_split, words.commenters = True, "#"
    found = [[]]
    for word in words:
        if word.strip("&|;>"):
            found[-1].append(word)
        else:
            found.append([])
    return found


def test_a_line_of_shell_comes_apart():
    assert apart("fedbraid deploy init a && fedbraid run 'x | y' | tee b  # all") == [
        ["fedbraid", "deploy", "init", "a"], ["fedbraid", "run", "x | y"], ["tee", "b"],
    ]  # fmt: skip
    page = "```console\n$ fedbraid a &\n$ FEW=1 fedbraid b\n```\nExamples:\n\n```text\nfedbraid c   said\n```\n`fedbraid d`"
    assert list(told(page)) == [["a"], ["c"], ["d"]]


@pytest.mark.parametrize("page", [p for p in PAGES if any(told(p.read_text()))], ids=name_of)
def test_commands_have_the_options_that_they_are_shown_with(page):
    import typer

    for words in told(page.read_text()):
        command, given = typer.main.get_command(app), list(words)
        while hasattr(command, "commands") and given and given[0] in command.commands:
            command = command.commands[given.pop(0)]
        if hasattr(command, "commands"):
            assert {*given} <= {o for p in command.params for o in p.opts}, words
        elif given not in ([], ["--help"]):  # more than the command's name
            understood(command.make_context("fedbraid", given).params)


SCHEDULE = (
    "rounds",
    "per_round",
    "buffer",
    "concurrency",
    "durations",
    "bandwidth",
    "availability",
    "select",
)


def understood(given):
    """What the words name is there too: a task or model, an algorithm, a partition; nothing is loaded or run."""
    from fedbraid import models
    from fedbraid.cli import config as cfg
    from fedbraid.data import partition

    def names_one(text):  # rather than a file, a folder, or a word in capitals that stands for one
        return isinstance(text, str) and not re.search(r"\.toml$|\.py:|/", text) and not text.isupper()

    what = given.get("task") or given.get("what")
    if names_one(what) and what.partition("(")[0] not in models.names():
        cfg.task_call({"name": what})
    if given.get("partition"):
        partition.parse(given["partition"])
    if names_one(given.get("algorithm")):
        cfg.algorithm_of({"name": given["algorithm"]} | cfg.keywords(given.get("set_") or []))
    if "rounds" in given and "durations" in given:
        cfg.schedule_of(cfg.given(**{k: given.get(k) for k in SCHEDULE}))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_targets_of_make_are_there(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert targets >= set(re.findall(r"(?:`|^\$ |&& )make ([a-z-]+)", page.read_text(), re.M))


def test_words_that_name_nothing_are_found():
    for given in ({"task": "mnits"}, {"algorithm": "fedavgg"}, {"partition": "dirichlt(1)"}):
        with pytest.raises(ConfigError, match="did you mean"):
            understood(given)
    understood({"what": "lenet5", "algorithm": "ALGORITHM", "partition": "dirichlet(1)"})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


# Notebooks ----------------------------------------------------------------------------------------


def cells(path, kind="code"):
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_notebooks_are_kept_as_they_ran(path):
    assert path.stat().st_size < 300_000
    assert [c["execution_count"] for c in cells(path)] == list(range(1, len(cells(path)) + 1))
    for cell in cells(path):
        assert all(o["output_type"] != "error" for o in cell["outputs"])
    for cell in cells(path, "markdown"):
        for target in re.findall(r"\]\(([^)#]+)\)", "".join(cell["source"])):
            assert (path.parent / target).exists(), target
    assert books.page(path).startswith("# ")


# The site -----------------------------------------------------------------------------------------


def test_every_algorithm_of_the_contract_has_a_section_with_its_equation_and_costs():
    known = {*test_exports.BUILDERS, *test_exports.WRAPPERS, "ghbm", "ca2fl", "ace", "fadas", "scallion"}
    assert {name.replace("_", "") for name in known} <= content.sections()
    for page in (ROOT / "docs/algorithms").glob("*.md"):
        for section in re.split(r"^## ", page.read_text(), flags=re.M)[1:] if page.name != "index.md" else []:
            name = section.splitlines()[0]
            if (
                page.stem == "robust"
            ):  # wrappers, which cost what their algorithm costs and what the page measures
                continue
            assert "<!-- cost: " in section, name
            assert "$$" in section or name in ("ClusterFedVARP", "with_codecs", "error_feedback"), name


@pytest.mark.parametrize("page", [p for p in PAGES if content.MARK.search(p.read_text())], ids=name_of)
def test_tables_are_as_the_repo_makes_them(page):
    text = page.read_text()
    assert content.fill(text, content.where(page)) == text, "run `make tables`"


def test_no_page_has_a_hole():
    for page in content.PAGES:
        text = page.read_text()
        assert len(content.COMMENT.findall(text)) == 2 * len(content.MARK.findall(text)), page
    assert (
        "step(g: Tensor, y: Tensor, s: Vectors, ctx: ClientContext)"
        in (ROOT / "docs/add-an-algorithm.md").read_text()
    )


def test_an_experiments_table():
    whole = content.table("fedadavr", "mnist baselines")
    some = content.table("fedadavr", "mnist baselines", "FedAvg|FedYogi")
    assert "FedNova" in whole
    assert {line.split(",")[0] for line in some.splitlines()[2:]} == {"| FedAvg", "| FedYogi"}
    assert "Not measured yet" in content.table("fedadavr", "mnist baselines", "no such row")
    with pytest.raises(KeyError):
        content.table("fedadavr", "no such table")


def test_the_reference_has_every_command_and_option():
    import typer

    text = commands.reference()
    found = commands.commands(typer.main.get_command(app))
    assert {"run", "compare", "deploy trial"} <= {name for name, _ in found}
    for name, command in found:
        section = text[text.index(f"## fedbraid {name}\n") :].partition("\n## ")[0]
        for parameter in command.params:
            words = [*parameter.opts, *parameter.secondary_opts] if parameter.name != "help" else []
            assert all(f"`{w}" in section for w in words if w.startswith("-")), (name, words)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built without a warning."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    pytest.importorskip("latex2mathml", reason="the extra docs is not installed")
    out = tmp_path_factory.mktemp("docs") / "site"
    made = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert (made.returncode, made.stderr.strip()) == (0, "")
    return out


@pytest.mark.slow
@pytest.mark.browser
def test_the_site_needs_nothing_from_elsewhere(site):
    pages = [p.read_text() for p in site.rglob("*.html")]
    assert not any("arithmatex" in p or "<!-- table:" in p or "<!-- cost:" in p or "η_c" in p for p in pages)
    outside = [u for p in pages for u in re.findall(r'(?:src|<link[^>]*href)="(https?://[^"]+)', p)]
    assert not outside


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
def test_the_site_in_a_browser(site, chromium, width):
    wrong: list[object] = []
    typed = 0
    with serving(site) as home:
        page = chromium.new_page(viewport={"width": width, "height": 844})
        page.set_default_timeout(600_000)  # a busy machine is slow, not wrong
        page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda r: wrong.append(r.url) if not r.url.startswith((home, "data:")) else None)
        page.on("response", lambda r: wrong.append((r.status, r.url)) if r.status >= 400 else None)
        for path in sorted(site.rglob("*.html")):
            page.goto(home + path.relative_to(site).as_posix(), wait_until="load")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
            typed += page.locator(TYPED).count()
            assert page.evaluate(OVERRUN, TYPED) == [], path
            assert page.evaluate(STACKED) == [], path
        assert typed > 50  # or the check above sees nothing
        page.goto(home + "algorithms/drift.html")
        assert page.locator("math").count() > 10
        assert page.locator("td", has_text="494\xa0kB").count() > 1
        page.goto(home + "choose.html")
        table = "document.querySelector('.md-typeset__scrollwrap')"
        assert page.evaluate(
            f"{table}.scrollWidth <= {table}.clientWidth"
        )  # all three columns are on the screen
        page.close()
    assert not wrong


# Code that is wider than its column; what a program printed keeps its lines and scrolls.
TYPED = ", ".join(
    f".md-content .language-{lang} pre > code" for lang in ("console", "python", "py", "sh", "bash")
)
OVERRUN = """(typed) => [...document.querySelectorAll(typed)]
  .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent.slice(0, 60))"""
# Calls in a table that stand letter below letter: many lines, and none of them wide.
STACKED = """() => [...document.querySelectorAll('.md-content td code')]
  .filter((e) => e.getClientRects().length > 4 && [...e.getClientRects()].every((r) => r.width < 40))
  .map((e) => e.textContent)"""


@pytest.mark.slow
@pytest.mark.browser
def test_the_search_works_from_a_file(site, chromium):
    page = chromium.new_page(viewport={"width": 1280, "height": 844})
    page.set_default_timeout(600_000)
    asked: list[str] = []
    page.on("request", lambda r: asked.append(r.url))
    page.goto((site / "index.html").as_uri())
    page.click(".md-search__input")
    page.keyboard.type("staleness", delay=20)
    page.wait_for_selector(".md-search-result__item")
    assert "asynchron" in page.inner_text(".md-search-result__list").lower()
    assert not [url for url in asked if url.startswith("http")]
    page.close()


@contextmanager
def serving(folder):
    """A folder on localhost."""

    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def test_where_to_change_names_what_there_is():
    """Every file and symbol of the page's table, and every path of its walks."""
    page = (ROOT / "docs/design.md").read_text()
    table = page[page.index("## I want to change") : page.index("## Memory by client id")]
    assert len(re.findall(r"^\| [^-…]", table, re.MULTILINE)) >= 25
    found = re.findall(r"`([\w/.-]+?\.py)(?:: (\w+))?`", page[page.index("## Walk 1") :])
    assert len(found) > 50
    for file, symbol in found:
        places = [ROOT / "src/fedbraid" / file, ROOT / "src/fedbraid_native" / file, ROOT / file]
        there = [place for place in places if place.is_file()]
        assert there, f"docs/design.md names {file}, which does not exist"
        defined = rf"^(class|def) {symbol}\b|^{symbol}\b.*="
        assert not symbol or re.search(defined, there[0].read_text(), re.MULTILINE), f"{file} has no {symbol}"


# What a newcomer meets first ----------------------------------------------------------------------


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/index.md"], ids=name_of)
def test_landing_pages_are_short_and_show_the_braid_first(page):
    text = page.read_text()
    assert len(text.splitlines()) < 120
    screen = "\n".join(text.splitlines()[:30])
    assert "<!-- table: braid, first screen -->" in screen
    assert "experiments/braid/scenario_A.png)" in screen
    assert "`fedbraid reproduce braid`" in screen
    assert len(re.findall(r"```(?:python|console)\n", text)) >= 3
    assert re.search(r"\$ (make|fedbraid) demo", text)


GUIDES = [p for p in PAGES if p.is_relative_to(ROOT / "docs")]


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_a_page_says_first_what_it_is_for(page):
    """Between the title and all else stands a sentence."""
    title, first = [part for part in page.read_text().split("\n\n") if part.strip()][:2]
    assert title.startswith("# ")
    assert re.match(r"[A-Z\"`*]", first), first[:80]
    assert not first.startswith(("```", "**"))
    assert re.search(r"[.:](\s|$)", first)


@pytest.mark.parametrize(
    "word",
    ["straggler", "cross-device", "cross-silo", "macOS", "non-IID", "heterogeneous", "secure aggregation", "differential privacy",
     "compression", "personalization", "byzantine", "dropout", "label skew", "partial participation", "learning rate schedule"],
)  # fmt: skip
def test_the_search_finds_the_fields_words(word):
    texts = [p.read_text().lower() for p in GUIDES]
    assert any(word.lower() in text for text in texts), f"no page has the word {word!r}"


# The API pages ------------------------------------------------------------------------------------


def on_the_api_pages():
    """(name, parameters) of every function and class that users call."""
    import importlib
    import inspect

    import fedbraid as fb

    for stem in ("algorithms", "data", "index", "links", "watching"):
        text = (ROOT / f"docs/api/{stem}.md").read_text()
        for path, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", text, re.M):
            members = re.search(r"members: \[(.*?)\]", options)
            try:
                home = importlib.import_module(path)
                names = members[1].split(", ") if members else [n for n in dir(home) if not n.startswith("_")]
            except ImportError:
                home, names = importlib.import_module(path.rpartition(".")[0]), [path.rpartition(".")[2]]
            for name in names:
                value = getattr(home, name)
                is_here = getattr(value, "__module__", "") == home.__name__ or members or path.endswith(name)
                if callable(value) and is_here and stem != "errors" and "errors" not in path:
                    yield name, [p for p in inspect.signature(value).parameters if p != "self"]
    for name in ("from_arrays", "from_datasets", "from_table"):
        yield name, list(inspect.signature(getattr(fb.Task, name)).parameters)


def test_every_parameter_on_the_api_pages_is_described():
    found = dict(on_the_api_pages())
    assert len(found) > 90
    bare = [
        f"{name}({p})" for name, given in found.items() for p in given if not parameters.described(name, p)
    ]
    assert bare == []
    stale = [
        f"{name}({p})" for name, own in parameters.FOR.items() for p in own if p not in found.get(name, ())
    ]
    assert stale == []
