"""MkDocs calls this while it builds the site: pages from elsewhere in the repo, equations."""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))

import books  # noqa: E402
import content  # noqa: E402
import maths  # noqa: E402

ELSEWHERE = (
    ROOT / "experiments" / "README.md",
    *sorted(ROOT.glob("experiments/*/README.md")),
    *content.PICTURES,
    *sorted(ROOT.glob("notebooks/**/*.ipynb")),
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
)


def place(path: Path) -> str | None:
    """Where a file of the repo stands in the site, None where it does not."""
    inside = path.relative_to(ROOT).as_posix()
    if inside.startswith("docs/"):
        return inside.removeprefix("docs/")
    if inside == "README.md":
        return "index.md"
    if path in ELSEWHERE:
        return inside.replace(".ipynb", ".md")
    return None


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path in ELSEWHERE:
        uri = place(path)
        assert uri is not None
        if path.suffix == ".png":
            files.append(File.generated(config, uri, content=path.read_bytes()))
        else:
            text = books.page(path) if path.suffix == ".ipynb" else path.read_text()
            files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return _links(content.COMMENT.sub("", markdown), page.file.src_uri)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    return maths.measures(maths.subscripts(maths.render(html)))


LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def _links(markdown: str, uri: str) -> str:
    """Links as they are in the repo, turned to where their targets stand in the site."""
    home = _origin(uri).parent

    def turned(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(home / match[2]))
        inside = place(target) if target.is_relative_to(ROOT) and target.exists() else None
        if inside is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(inside, posixpath.dirname(uri) or '.')}{match[3]}"

    return LINK.sub(turned, markdown)


def _origin(uri: str) -> Path:
    """The file of the repo that a page of the site was made from."""
    if (ROOT / "docs" / uri).exists():
        return ROOT / "docs" / uri
    path = ROOT / uri
    return path if path.exists() else path.with_suffix(".ipynb")
