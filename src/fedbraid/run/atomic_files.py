"""Files that outlive a power cut, and that nobody but their owner reads."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path


def make_folder(path: Path) -> None:
    """Make a folder and those above it, on the disk itself before this returns."""
    new = [p for p in (path, *path.parents) if not os.path.lexists(p)]
    path.mkdir(0o700, parents=True, exist_ok=True)
    for made in new:
        sync(made.parent)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file whole, or leave no trace; it is on the disk itself before this returns."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with open(temporary, "wb", opener=private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Have what was written to a file, or the names in a folder, on the disk itself."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have no folders to sync
            raise
    finally:
        os.close(handle)


def private(path: str, flags: int) -> int:
    """An opener of files for their owner alone."""
    return os.open(path, flags, 0o600)


def checksum(data: bytes | memoryview, before: int = 0) -> int:
    """CRC-32, going on from what came before."""
    return zlib.crc32(data, before)
