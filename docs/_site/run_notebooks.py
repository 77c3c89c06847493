"""Run the notebooks from top to bottom and keep what comes out: `make notebooks`, or name some as arguments."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"


def run(path: Path) -> None:
    """One notebook, in a folder of its own that goes again."""
    begun, book = time.monotonic(), nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as place:
        client = NotebookClient(
            book, timeout=900, record_timing=False, resources={"metadata": {"path": place}}
        )
        client.execute()
    book.metadata.pop("widgets", None)
    book.metadata.language_info = {"name": "python"}
    nbformat.write(book, path)
    print(f"{path.name}: {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    for each in [Path(a) for a in sys.argv[1:]] or sorted(NOTEBOOKS.glob("*.ipynb")):
        run(each)
