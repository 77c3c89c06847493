"""What the operator says of a node while a run goes on: a file in the run's folder, until a committed step holds it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fedbraid.errors import RunError
from fedbraid.run.checkpoint import Folder


@dataclass(frozen=True)
class OperatorWord:
    """One kind of word, and its file."""

    file: str
    command: str

    def named(self, folder: Folder) -> list[str]:
        """Of whom it was said."""
        if not (folder.path / self.file).exists():
            return []
        names = folder.read_json(self.file).get("names", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise RunError(
                f"{folder.path / self.file} is corrupt; remove it, and run `fedbraid deploy {self.command}` again"
            )
        return names

    def name(self, folder: Folder, who: str) -> None:
        """Say it of this node; the server reads it before the next step that it takes."""
        folder.config()  # says what is wrong where this is no run's folder
        folder.write_json(self.file, {"names": [*dict.fromkeys([*self.named(folder), who])]})

    def forget(self, folder: Folder, held: Iterable[str]) -> None:
        """A committed step holds it of these."""
        before = self.named(folder)
        left = [who for who in before if who not in set(held)]
        if left != before:
            folder.write_json(self.file, {"names": left})
