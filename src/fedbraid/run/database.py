"""One SQLite file a run: rows by client, and the state of the last committed step."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedbraid.errors import InUseError, RunError


class Database:
    """One SQLite file: a table of rows per name, and the state of the last committed step."""

    def __init__(self, path: Path, row_bytes: int = 4096) -> None:
        self.path = path
        try:
            self._sql = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.5)
            if not path.exists() or path.stat().st_size == 0:
                self._sql.execute(f"PRAGMA page_size = {page_size(row_bytes)}")
            self._sql.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._sql.execute("PRAGMA journal_mode = WAL")
            self._sql.execute("PRAGMA synchronous = NORMAL")
            self._sql.execute("PRAGMA wal_autocheckpoint = 4000")
            with self.transaction():
                self._sql.execute(
                    "CREATE TABLE IF NOT EXISTS state (id INTEGER PRIMARY KEY, head TEXT, tree BLOB)"
                )
        except sqlite3.Error as error:
            raise self._refusal(error) from error

    def _refusal(self, error: sqlite3.Error) -> RunError:
        text, folder = str(error), self.path.parent
        if "locked" in text:
            return InUseError(f"{folder} is in use by another process; wait for it to end or stop it first")
        if "full" in text or "disk I/O" in text:
            return RunError(
                f"the disk of {folder} is full or failing ({text}); free space, then resume: the last committed step is intact"
            )
        return RunError(
            f"the checkpoint {self.path} cannot be read or written ({text}); restore it from a copy or start a new run"
        )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        try:
            self._sql.execute("BEGIN IMMEDIATE")
            yield
            self._sql.execute("COMMIT")
        except sqlite3.Error as error:
            if self._sql.in_transaction:
                self._sql.execute("ROLLBACK")
            raise self._refusal(error) from error
        except BaseException:
            if self._sql.in_transaction:
                self._sql.execute("ROLLBACK")
            raise

    def create(self, table: str) -> None:
        with self.transaction():
            self._sql.execute(
                f'CREATE TABLE IF NOT EXISTS "{table}" (id INTEGER PRIMARY KEY, data BLOB NOT NULL)'
            )

    def write(self, table: str, ids: Sequence[int], rows: Iterable[bytes] | np.ndarray) -> None:
        self._sql.executemany(
            f'INSERT OR REPLACE INTO "{table}" VALUES (?, ?)',
            ((i, memoryview(row)) for i, row in zip(ids, rows)),
        )

    def delete(self, table: str, ids: Iterable[int]) -> None:
        self._sql.executemany(f'DELETE FROM "{table}" WHERE id = ?', ((i,) for i in ids))

    def read(self, table: str, ids: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        try:
            for lo in range(0, len(ids), 500):
                some = ids[lo : lo + 500]
                marks = ",".join("?" * len(some))
                yield from self._sql.execute(f'SELECT id, data FROM "{table}" WHERE id IN ({marks})', some)
        except sqlite3.Error as error:
            raise self._refusal(error) from error

    def ids(self, table: str) -> Iterator[int]:
        return (row[0] for row in self._sql.execute(f'SELECT id FROM "{table}"'))

    def count(self, table: str, excluding: Iterable[int] = ()) -> int:
        total: int = self._sql.execute(f'SELECT COUNT(*) FROM "{table}"').fetchone()[0]
        return total - sum(1 for _ in self.read(table, list(excluding)))

    def put_state(self, head: str, tree: bytes) -> None:
        self._sql.execute("INSERT OR REPLACE INTO state VALUES (0, ?, ?)", (head, tree))

    def get_state(self) -> tuple[str, bytes] | None:
        try:
            row = self._sql.execute("SELECT head, tree FROM state WHERE id = 0").fetchone()
        except sqlite3.Error as error:
            raise self._refusal(error) from error
        return row if row is None else (row[0], row[1])

    def close(self) -> None:
        self._sql.close()


def page_size(row_bytes: int) -> int:
    """The page that wastes little on rows of this size: about a fortieth of a row; small rows share pages."""
    if row_bytes <= 1024:
        return 4096
    page = 512
    while page < 32768 and page * 80 <= row_bytes:
        page *= 2
    return page
