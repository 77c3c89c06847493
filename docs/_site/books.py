"""An executed notebook as a page: its words, its code, and what came out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def page(path: Path) -> str:
    """The notebook as Markdown, pictures inside it."""
    cells = json.loads(path.read_text())["cells"]
    parts = [part for cell in cells for part in _cell(cell)]
    note = f"*This page is the notebook `{path.relative_to(ROOT).as_posix()}` as `make notebooks` ran it.*"
    return "\n\n".join([parts[0], note, *parts[1:]]) + "\n"


def _cell(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    shown = [text for out in _joined(cell["outputs"]) if (text := _output(out))]
    return [f"```py\n{source}\n```", *shown]


def _joined(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was printed in pieces as one."""
    found: list[dict[str, Any]] = []
    for out in outputs:
        if found and out["output_type"] == found[-1]["output_type"] == "stream":
            found[-1] = {**out, "text": [*found[-1]["text"], *out["text"]]}
        else:
            found.append(out)
    return found


def _output(out: dict[str, Any]) -> str:
    if out["output_type"] == "stream":
        return f"```text\n{''.join(out['text']).rstrip()}\n```"
    data = out.get("data", {})
    if "image/png" in data:
        return f'<img alt="what the cell above draws" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    if "text/html" in data:
        html = re.sub(r"<style.*?</style>", "", "".join(data["text/html"]), flags=re.S)
        html = re.sub(r"<table[^>]*>", "<table>", html)  # so that it scrolls by itself on a phone
        return "\n".join(line.strip() for line in html.splitlines() if line.strip())
    return f"```text\n{''.join(data.get('text/plain', '')).rstrip()}\n```" if data else ""
