"""Run notebooks from top to bottom, one a core, and keep what comes out, in place or with --out in another folder."""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def run(path: Path, out: Path | None) -> str:
    """One notebook, in a folder of its own that goes again."""
    begun, book = time.monotonic(), nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as place:
        client = NotebookClient(
            book, timeout=900, record_timing=False, resources={"metadata": {"path": place}}
        )
        client.execute()
    book.metadata.pop("widgets", None)
    book.metadata.language_info = {"name": "python"}
    place = path if out is None else out / path.name
    place.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, place)
    return f"{path.name}: {time.monotonic() - begun:.0f} s"


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("notebooks", nargs="+", type=Path)
    asked.add_argument("--out", type=Path)
    given = asked.parse_args()
    with ProcessPoolExecutor() as cores:
        for told in cores.map(run, given.notebooks, repeat(given.out)):
            print(told, flush=True)
