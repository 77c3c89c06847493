"""The records of a run, one a step: long histories are in an unnamed file, so that no run grows in memory."""

from __future__ import annotations

import pickle
import threading
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from tempfile import SpooledTemporaryFile
from typing import Any, overload

Record = dict[str, Any]

MEMORY_BYTES = 2**22  # bytes of records that are held in memory


class History(Sequence[Record]):
    """A sequence of dicts, each of which is unpickled on access. It costs eight bytes of memory a record."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._file = SpooledTemporaryFile(max_size=MEMORY_BYTES)  # noqa: SIM115
        self._ends = array("Q", [0])
        self._at_end = True
        self._lock = threading.Lock()
        weakref.finalize(self, self._file.close)
        self.extend(records)

    def extend(self, records: Iterable[Record]) -> None:
        for record in records:
            self.append(record)

    def append(self, record: Record) -> None:
        packed = pickle.dumps(record, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            if not self._at_end:
                self._file.seek(self._ends[-1])
            self._at_end = False  # should the disk be full
            self._file.write(packed)
            self._ends.append(self._ends[-1] + len(packed))
            self._at_end = True

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, at: int) -> Record: ...
    @overload
    def __getitem__(self, at: slice) -> list[Record]: ...
    def __getitem__(self, at: int | slice) -> Record | list[Record]:
        if isinstance(at, slice):
            return [self._read(i) for i in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(f"record {at} of {len(self)}")
        return self._read(at % len(self))

    def _read(self, i: int) -> Record:
        with self._lock:
            self._at_end = False
            self._file.seek(self._ends[i])
            packed = self._file.read(self._ends[i + 1] - self._ends[i])
        found: Record = pickle.loads(packed)  # written by this process; no other process can open the file
        return found

    def __iter__(self) -> Iterator[Record]:
        return map(self._read, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other))

    def __repr__(self) -> str:
        return f"History({len(self)} records)"

    def __reduce__(self) -> tuple[Callable[..., History], tuple[list[Record]]]:
        return History, (list(self),)
