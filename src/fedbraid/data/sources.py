"""Sources of data files: the folder FEDBRAID_DATA, the Hugging Face hub, and a cache of decoded images."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbraid.errors import DataError

Root = str | Path | None
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Home:
    """The folders where a data set's files may be, and their origin."""

    name: str
    folders: tuple[str, ...]  # under the data folder, the first being where to put them
    files: str  # the files to put there
    origin: str

    def find(self, root: Root, *patterns: str) -> list[Path]:
        """The files of the first folder and pattern that match, sorted; none if there are none."""
        base = folder(root)
        if base is None:
            return []
        for inside in self.folders:
            for pattern in patterns:
                if found := sorted(p for p in (base / inside).glob(pattern) if p.is_file()):
                    return found
        return []

    def missing(self, root: Root) -> DataError:
        """The error that names the missing files, the folder to put them into, and their origin."""
        base = folder(root)
        if base is None:
            remedy = (
                f"set FEDBRAID_DATA (or root=) to a folder and put {self.files} into its {self.folders[0]}/"
            )
        else:
            remedy = f"put {self.files} into {base / self.folders[0]}{os.sep}"
        return DataError(f"no files of {self.name} were found; {remedy} (from {self.origin})")


def folder(root: Root) -> Path | None:
    """The folder that holds the data sets: `root`, or FEDBRAID_DATA."""
    root_folder = root or os.environ.get("FEDBRAID_DATA")
    return Path(root_folder).expanduser() if root_folder else None


def hub(repository: str, columns: Sequence[str]) -> dict[str, list[NDArray[Any]]] | None:
    """The train and test columns of a Hugging Face data set; None where `datasets` is not installed."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        return None
    try:
        splits = datasets.load_dataset(repository)
        return {
            s: [np.stack([np.asarray(v) for v in splits[s][c]]) for c in columns] for s in ("train", "test")
        }
    except Exception as error:  # whatever the hub, the network or the disk may raise
        raise DataError(f"{repository} could not be fetched from the Hugging Face hub: {error}") from error


def cached(files: Sequence[Path], make: Callable[[], Bytes], how: str = "") -> Bytes:
    """The array that `make` decodes from these files, cached for the user until the files change.

    `how` distinguishes two decodings of the same files.
    """
    stamp: list[object] = [how]
    stamp += [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    key = hashlib.blake2b(repr(stamp).encode(), digest_size=12).hexdigest()
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedbraid" / f"{key}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):
        return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]
    array = make()
    with contextlib.suppress(OSError):  # the disk is full or read-only: decode again next time
        _keep(path, array)
    return array


def _keep(path: Path, array: Bytes) -> None:
    """Write an array atomically, readable by its owner only."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as f:
            np.save(f, array, allow_pickle=False)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
