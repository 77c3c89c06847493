"""One SQLite file a run: rows by client, and the state of the last committed step, each with its checksum."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid.errors import InUseError, RunError
from fedbraid.run.atomic_files import checksum, private, sync

STATE = "state"  # the table of the head and the tree; the head has the totals of all other tables


class Database:
    """One SQLite file: tables of rows, and the state of the last committed step.

    A commit is synced to the disk when it returns. A scratch file ends with its process and is not synced.
    """

    def __init__(self, path: Path, row_bytes: int = 4096, scratch: bool = False) -> None:
        self.path = path
        self._totals: dict[str, list[int]] = {}  # of every table: rows, sum of ids, sum of checksums
        try:
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise RunError(
                    f"{path} may not be written by this user; fix its permissions or copy the folder"
                )
            os.close(private(str(path), os.O_RDWR | os.O_CREAT))
            self._sql = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.5)
            with ExitStack() as unless_opened:
                unless_opened.callback(self._sql.close)
                if path.stat().st_size == 0:
                    self._sql.execute(f"PRAGMA page_size = {page_size(row_bytes)}")
                self._sql.execute("PRAGMA locking_mode = EXCLUSIVE")
                self._sql.execute("PRAGMA journal_mode = WAL")
                self._sql.execute(f"PRAGMA synchronous = {'OFF' if scratch else 'FULL'}")
                self._sql.execute("PRAGMA wal_autocheckpoint = 4000")
                self._sql.execute("PRAGMA cell_size_check = ON")
                with self.transaction():  # takes the lock
                    pass
                sync(path.parent)
                unless_opened.pop_all()
        except sqlite3.Error as error:
            raise self._refusal(error) from error
        except OSError as error:
            raise RunError(f"{path} cannot be opened ({error.strerror}); fix that, then resume") from error

    def _refusal(self, error: sqlite3.Error) -> RunError:
        text, folder = str(error), self.path.parent
        if "locked" in text:
            return InUseError(f"{folder} is in use by another process; wait for it to end or stop it first")
        if "readonly" in text or not os.access(folder, os.W_OK):
            return RunError(
                f"{folder} may not be written by this user; fix its permissions or copy the folder"
            )
        if "full" in text or "disk I/O" in text:
            return RunError(
                f"the disk of {folder} is full or failing ({text}); free space, then resume: the last committed step is intact"
            )
        return RunError(
            f"the checkpoint {self.path} cannot be read or written ({text}); restore it from a copy or start a new run"
        )

    def corrupt(self, what: str) -> RunError:
        return RunError(f"{self.path} is corrupt ({what}); restore it from a copy or start a new run")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        before = {table: list(total) for table, total in self._totals.items()}
        try:
            self._sql.execute("BEGIN IMMEDIATE")
            yield
            self._sql.execute("COMMIT")
        except BaseException as error:
            self._totals = before
            if self._sql.in_transaction:
                self._sql.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise self._refusal(error) from error
            raise

    def create(self, table: str) -> None:
        with self.transaction():
            self._sql.execute(
                f"CREATE TABLE IF NOT EXISTS {_quoted(table)} (id INTEGER PRIMARY KEY, sum INTEGER NOT NULL, data BLOB NOT NULL)"
            )
            if table not in self._totals:
                self._totals[table] = self._totals_of(table)

    def write(self, table: str, ids: Sequence[int], rows: Iterable[bytes] | np.ndarray) -> None:
        """Put rows in a table; the caller holds the transaction."""
        pairs = [(i, memoryview(row)) for i, row in zip(ids, rows)]
        marked = [(i, _mark(i, data), data) for i, data in pairs]
        self._count(table, ids, [m for _, m, _ in marked])
        self._sql.executemany(f"INSERT OR REPLACE INTO {_quoted(table)} VALUES (?, ?, ?)", marked)

    def delete(self, table: str, ids: Iterable[int]) -> None:
        gone = list(ids)
        self._count(table, gone, [])
        self._sql.executemany(f"DELETE FROM {_quoted(table)} WHERE id = ?", ((i,) for i in gone))

    def _count(self, table: str, ids: Sequence[int], marks: list[int]) -> None:
        """Update the totals: these rows are replaced by rows with these checksums."""
        total = self._totals[table]
        old = list(self._select("id, sum", table, ids))
        total[0] += len(marks) - len(old)
        total[1] += (sum(ids) if marks else 0) - sum(i for i, _ in old)
        total[2] += sum(marks) - sum(m for _, m in old)

    def read(self, table: str, ids: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """(id, row) of the ids that have a row."""
        for i, mark, data in self._select("id, sum, data", table, ids):
            if not isinstance(data, bytes) or _mark(i, data) != mark:
                raise self.corrupt(f"row {i} of {table} does not fit its checksum")
            yield i, data

    def _select(self, columns: str, table: str, ids: Sequence[int]) -> Iterator[Any]:
        try:
            for lo in range(0, len(ids), 500):
                some = ids[lo : lo + 500]
                marks = ",".join("?" * len(some))
                yield from self._sql.execute(
                    f"SELECT {columns} FROM {_quoted(table)} WHERE id IN ({marks})", some
                )
        except sqlite3.Error as error:
            raise self._refusal(error) from error

    def every(self, table: str) -> Iterator[tuple[int, bytes]]:
        """(id, row) of all rows, in the order of their ids."""
        lo = -1
        while some := list(self._page(table, lo)):
            yield from self.read(table, some)
            lo = some[-1]

    def _page(self, table: str, after: int) -> Iterator[int]:
        found = self._sql.execute(
            f"SELECT id FROM {_quoted(table)} WHERE id > ? ORDER BY id LIMIT 500", (after,)
        )
        return (row[0] for row in found)

    def ids(self, table: str) -> Iterator[int]:
        return (row[0] for row in self._sql.execute(f"SELECT id FROM {_quoted(table)}"))

    def count(self, table: str, excluding: Iterable[int] = ()) -> int:
        return self._totals[table][0] - sum(1 for _ in self._select("id", table, list(excluding)))

    # The committed state ------------------------------------------------------------------------------

    def put_state(self, head: dict[str, Any], tree: bytes) -> None:
        """Store the state of a step, with the totals of every table."""
        content = {**head, "tables": self._totals, "tree": checksum(tree)}
        blobs = [json.dumps(content, separators=(",", ":")).encode(), tree]
        self._sql.executemany(
            f"INSERT OR REPLACE INTO {STATE} VALUES (?, ?, ?)",
            [(i, _mark(i, memoryview(blob)), blob) for i, blob in enumerate(blobs)],
        )

    def get_state(self) -> tuple[dict[str, Any], bytes] | None:
        """The last committed state, None if there is none; refuses a file that differs from what was committed."""
        try:
            verdict = self._sql.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise self.corrupt(verdict)
            with self.transaction():
                self._sql.execute(
                    f"CREATE TABLE IF NOT EXISTS {STATE} (id INTEGER PRIMARY KEY, sum INTEGER NOT NULL, data BLOB NOT NULL)"
                )
            blobs = dict(self.read(STATE, [0, 1]))
            head = json.loads(blobs[0]) if blobs else {"tables": {}}
            if blobs and (len(blobs) < 2 or checksum(blobs[1]) != head["tree"]):
                raise self.corrupt("its two halves are of different steps")
            self._verify(head["tables"])
        except sqlite3.Error as error:
            raise self._refusal(error) from error
        self._totals = head["tables"]
        return (head, blobs[1]) if blobs else None

    def _verify(self, tables: dict[str, list[int]]) -> None:
        """Refuse tables whose rows differ from those at the commit."""
        existing = {row[0] for row in self._sql.execute("SELECT name FROM sqlite_master")} - {STATE}
        for name in existing | tables.keys():
            if (self._totals_of(name) if name in existing else [0, 0, 0]) != tables.get(name, [0, 0, 0]):
                raise self.corrupt(f"its table {name} is not what was committed")

    def _totals_of(self, table: str) -> list[int]:
        """The number of rows of a table, the sum of their ids, and that of their checksums."""
        row = self._sql.execute(f"SELECT COUNT(*), SUM(id), SUM(sum) FROM {_quoted(table)}").fetchone()
        return [n or 0 for n in row]

    def close(self) -> None:
        self._sql.close()


def _mark(id: int, data: bytes | memoryview) -> int:
    return checksum(data, checksum(id.to_bytes(9, "little", signed=True)))


def _quoted(table: str) -> str:
    return '"' + table.replace('"', '""') + '"'


def page_size(row_bytes: int) -> int:
    """The page that wastes little on rows of this size: about a fortieth of a row; small rows share pages."""
    if row_bytes <= 1024:
        return 4096
    page = 512
    while page < 32768 and page * 80 <= row_bytes:
        page *= 2
    return page
