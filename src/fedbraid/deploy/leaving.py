"""Clients that leave a run for good, by the operator's word, which waits in the run's folder until a step holds it."""

from __future__ import annotations

from collections.abc import Iterable

from fedbraid.errors import RunError
from fedbraid.run.checkpoint import Folder

FILE = "leaving.json"


def named(folder: Folder) -> list[str]:
    """Whom the operator wants gone."""
    if not (folder.path / FILE).exists():
        return []
    names = folder.read_json(FILE).get("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RunError(f"{folder.path / FILE} names nobody; remove it, and say `fedbraid deploy leave` again")
    return names


def name(folder: Folder, who: str) -> None:
    """Say that this client is to leave, before the next step that the server takes."""
    folder.config()  # says what is wrong where this is no run's folder
    folder.write_json(FILE, {"names": [*dict.fromkeys([*named(folder), who])]})


def forget(folder: Folder, gone: Iterable[str]) -> None:
    """These have left, and a committed step says so."""
    before = named(folder)
    left = [who for who in before if who not in set(gone)]
    if left != before:
        folder.write_json(FILE, {"names": left})
