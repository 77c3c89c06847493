"""Rows by client id: what the server remembers of clients, and what simulated clients remember themselves.

Rows live in one slab in memory; behind it, optionally, a SQLite file holds all of them and the slab is
a cache. A step touches only its cohort's rows, and one transaction commits them with everything else.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import lru_cache
from mmap import PAGESIZE
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.codec import Codec
from fedbraid.core.context import Vectors
from fedbraid.core.layout import Layout
from fedbraid.errors import RunError

Ids = Sequence[int] | NDArray[np.int64]
MADV_POPULATE_WRITE = 23  # of Linux; older ones refuse it


class Backing(Protocol):
    """Tables of (client, bytes of its row) behind those in memory, committed with everything else; `run.database` is one."""

    def create(self, table: str) -> None: ...
    def transaction(self) -> AbstractContextManager[None]: ...
    def write(self, table: str, ids: Sequence[int], rows: NDArray[np.uint8]) -> None: ...
    def delete(self, table: str, ids: Iterable[int]) -> None: ...
    def read(self, table: str, ids: Sequence[int]) -> Iterable[tuple[int, bytes]]: ...
    def ids(self, table: str) -> Iterable[int]: ...
    def count(self, table: str, excluding: Iterable[int] = ()) -> int: ...


class ClientTable:
    """Named vectors of fixed width for any number of clients, created on first visit.

    `default` gives the row of a client that was never written, one `[width]` vector per name, which says
    what kind of numbers that name holds. With a codec, fractions as wide as the layout are kept quantised.

    >>> rows = ClientTable({"h": torch.zeros(2)})
    >>> rows.put([7], {"h": torch.ones(1, 2)})
    >>> rows.get([7, 8])["h"].tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(self, default: Vectors, codec: Codec | None = None, layout: Layout | None = None) -> None:
        self.default = {name: v.detach().reshape(-1).cpu() for name, v in default.items()}
        self.codec, self.layout = codec, layout
        self._spans: dict[str, tuple[int, int, bool]] = {}
        at = 0
        for name, v in sorted(self.default.items(), key=lambda item: self._coded(item[1])):
            coded = self._coded(v)
            size = codec.row_size(layout) if coded and codec and layout else -(-v.nbytes // 4) * 4
            self._spans[name] = (at, at + size, coded)
            at += size
        self.row_bytes = at
        self._slab = RowArena(-(-at // 4))
        self._slot: dict[int, int] = {}
        self._free: list[int] = []
        self._dirty: dict[int, None] = {}
        self._dropped: set[int] = set()
        self._db: Backing | None = None
        self._table = ""
        self._limit: int | None = None
        self._autocommit = False

    def _coded(self, v: Tensor) -> bool:
        if self.codec is None or self.layout is None or not v.is_floating_point():
            return False
        return len(v) == self.layout.size

    def __len__(self) -> int:
        """How many clients have a row."""
        if self._db is None:
            return len(self._slot)
        fresh = self._dirty.keys() | self._dropped
        return self._db.count(self._table, excluding=fresh) + len(self._dirty)

    def __contains__(self, client: int) -> bool:
        self._load([client])
        return client in self._slot

    def ids(self) -> list[int]:
        """Every client that has a row."""
        stored = set() if self._db is None else set(self._db.ids(self._table))
        return sorted((stored - self._dropped) | self._slot.keys())

    def get(self, clients: Ids) -> Vectors:
        """The clients' rows, `[m, width]` per name."""
        if not self.default:
            return {}
        slots, missing = self._find(clients)
        if len(missing) == len(slots):
            return {name: v.expand(len(slots), -1).clone() for name, v in self.default.items()}
        picked = torch.from_numpy(self._slab.take(slots))
        out = {}
        for name, (lo, hi, coded) in self._spans.items():
            if coded and self.codec and self.layout:
                part = picked.view(torch.uint8)[:, lo:hi]
                values = self.codec.from_rows(part.contiguous(), self.layout)
            else:
                values = _from_words(picked[:, lo // 4 : hi // 4], self.default[name])
            if missing:
                values[missing] = self.default[name]
            out[name] = values
        return out

    def peek(self, clients: Ids, name: str) -> list[float]:
        """The clients' values of a name of one number, without a look at their rows."""
        ids = [int(c) for c in clients]
        self._load(ids)
        at, default = self._spans[name][0], self.default[name].item()
        kind = self.default[name].numpy().dtype
        slots = map(self._slot.get, ids)
        return [default if slot is None else self._slab.number(slot, at, kind) for slot in slots]

    def _find(self, clients: Ids) -> tuple[list[int], list[int]]:
        """The clients' slots, and where in the list those are that have none."""
        ids = [int(c) for c in clients]
        self._load(ids)
        slots = [self._slot.get(c, -1) for c in ids]
        return slots, [i for i, s in enumerate(slots) if s < 0]

    def put(self, clients: Ids, vectors: Vectors) -> None:
        """Write the clients' rows; they are committed with the next step."""
        if not self.default:
            return
        ids, parts = [int(c) for c in clients], []
        for name, (lo, _, coded) in self._spans.items():
            if coded and self.codec and self.layout:  # which may refuse them: nothing has changed yet
                values = vectors[name].detach().to("cpu", torch.float32)
                parts.append((lo, self.codec.to_rows(values, self.layout).numpy()))
            else:
                values = vectors[name].detach().to("cpu", self.default[name].dtype)
                parts.append((lo, _words(values).numpy()))
        slots = self._slots(ids)
        for lo, words in parts:
            self._slab.write(slots, lo, words)
        self._changed(ids)
        if self._crowded():
            self._spill()

    def lend(self, clients: Ids) -> list[int]:
        """Addresses of the clients' rows, which the caller writes in full before the next call."""
        if self._crowded():
            self._spill()
        ids = [int(c) for c in clients]
        self._load(ids)
        slots = self._slots(ids)
        self._changed(ids)
        return [self._slab.address(s) for s in slots]

    def expect(self) -> None:
        """New clients will come: have memory for some made ready beside what goes on."""
        self._slab.expect(len(self._slot) + len(self._free))

    def _changed(self, ids: list[int]) -> None:
        for c in ids:
            self._dirty[c] = None
            self._dropped.discard(c)

    def _crowded(self) -> bool:
        """Whether so much has changed that it should go to the file, where nobody else commits."""
        return self._autocommit and self._limit is not None and len(self._dirty) > self._limit

    def _spill(self) -> None:
        assert self._db is not None
        with self._db.transaction():
            self.flush()
        self.committed()

    def drop(self, client: int) -> None:
        """Forget a client."""
        slot = self._slot.pop(client, None)
        if slot is not None:
            self._free.append(slot)
        self._dirty.pop(client, None)
        self._dropped.add(client)

    def _slots(self, ids: list[int]) -> list[int]:
        """Where the clients' rows lie, with room made for new ones."""
        slots = []
        for c in ids:
            slot = self._slot.get(c)
            if slot is None:
                slot = self._free.pop() if self._free else len(self._slot)
                self._slot[c] = slot
            slots.append(slot)
        self._slab.reach(max(slots, default=-1))
        return slots

    # The file behind it -------------------------------------------------------------------------------

    def attach(self, db: Backing, table: str, limit: int | None, autocommit: bool = False) -> None:
        """Keep every row in a table of this database, and at most `limit` clean ones in memory.

        `autocommit` says that nobody commits: rows then go to the file whenever too many have changed.
        """
        self._db, self._table, self._limit, self._autocommit = db, table, limit, autocommit
        db.create(table)

    @property
    def stored(self) -> bool:
        """Whether a file holds rows that may not be in memory."""
        return self._db is not None

    def flush(self) -> None:
        """Write what changed since the last commit; the caller holds the transaction."""
        if self._db is None:
            return
        if self._dropped:
            self._db.delete(self._table, self._dropped)
        if self._dirty:
            ids = list(self._dirty)
            block = self._slab.take([self._slot[c] for c in ids])
            self._db.write(self._table, ids, block.view(np.uint8)[:, : self.row_bytes])

    def committed(self) -> None:
        """The transaction went through: nothing is dirty, and the cache may shrink."""
        self._dirty.clear()
        self._dropped.clear()
        if self._limit is not None and len(self._slot) > self._limit:
            for c in list(self._slot)[: len(self._slot) - self._limit]:
                self._free.append(self._slot.pop(c))

    def _load(self, ids: list[int]) -> None:
        if self._db is None:
            return
        wanted = [c for c in ids if c not in self._slot and c not in self._dropped]
        if not wanted:
            return
        found = dict(self._db.read(self._table, wanted))
        if not found:
            return
        slots = self._slots(list(found))
        for slot, data in zip(slots, found.values()):
            if len(data) != self.row_bytes:
                raise RunError(
                    f"a stored row of {len(data)} bytes should have {self.row_bytes}; the run folder is corrupt"
                )
            self._slab.write([slot], 0, np.frombuffer(data, np.uint8)[None])


class RowArena:
    """Rows of so many words in chunks, so that making room copies nothing."""

    CHUNK, LONG = 2**20, 2**10  # words

    def __init__(self, words: int) -> None:
        self.words, self.each = words, max(1, self.CHUNK // max(words, 1))
        self.chunks: list[NDArray[np.int32]] = []  # whole words move faster than bytes
        self.addresses: list[int] = []

    def reach(self, slot: int) -> None:
        """Make room up to this slot."""
        while slot >= len(self.chunks) * self.each:
            self.chunks.append(np.empty((self.each, self.words), np.int32))
            self.addresses.append(self.chunks[-1].ctypes.data)

    def expect(self, slot: int) -> None:
        """Make room ahead of this slot, on a thread of its own: a page costs time when it is first written."""
        made = len(self.chunks)
        self.reach(slot + self.each // 2)
        for chunk in self.chunks[made:] if self.words >= self.LONG else ():
            _aside().submit(_populate, chunk)

    def take(self, slots: list[int]) -> NDArray[np.int32]:
        """These rows; some row for a slot below 0."""
        if len(self.chunks) == 1:
            return self.chunks[0].take(slots, 0, mode="clip")
        out = np.empty((len(slots), self.words), np.int32)
        for chunk, mine, at in self._pieces(slots):
            out[mine] = chunk[at]
        return out

    def number(self, slot: int, lo: int, kind: np.dtype[Any]) -> float:
        """The number of this kind at byte `lo` of a row."""
        chunk, at = divmod(slot, self.each)
        number: float = np.frombuffer(self.chunks[chunk][at].data, kind, 1, lo)[0].item()
        return number

    def write(self, slots: list[int], lo: int, values: NDArray[np.generic]) -> None:
        """Write `values` into the rows from byte `lo` on."""
        start = lo // values.itemsize
        for chunk, mine, at in self._pieces(slots):
            chunk.view(values.dtype)[at, start : start + values.shape[-1]] = values[mine]

    def address(self, slot: int) -> int:
        chunk, at = divmod(slot, self.each)
        return self.addresses[chunk] + at * 4 * self.words

    def _pieces(self, slots: list[int]) -> Iterator[tuple[NDArray[np.int32], Any, Any]]:
        """(chunk, which of the slots lie in it, where in it); long rows one by one, which copies them once."""
        if self.words >= self.LONG:
            for i, slot in enumerate(slots):
                chunk, at = divmod(max(slot, 0), self.each)
                yield self.chunks[chunk], i, at
        elif len(self.chunks) == 1:
            yield self.chunks[0], slice(None), slots
        else:
            which, where = np.divmod(np.maximum(slots, 0), self.each)
            for k in np.unique(which).tolist():
                mine = which == k
                yield self.chunks[k], mine, where[mine]


def _words(values: Tensor) -> Tensor:
    """The bytes of numbers `[m, width]`, as whole words where they are."""
    whole = values.element_size() % 4 == 0
    return values.contiguous().view(torch.int32 if whole else torch.uint8)


def _from_words(words: Tensor, like: Tensor) -> Tensor:
    """Numbers of another tensor's kind and width, from words `[m, ·]`."""
    if like.element_size() == 4:
        return words.view(like.dtype)
    octets = words.contiguous().view(torch.uint8)[:, : like.nbytes]
    return octets.clone(memory_format=torch.contiguous_format).view(like.dtype)


@lru_cache(maxsize=1)
def _aside() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "fedbraid-pages")


def _populate(chunk: NDArray[np.int32]) -> None:
    """Have the system make the pages of a chunk that nobody wrote yet; where it cannot, nothing is lost."""
    if sys.platform.startswith("linux"):
        start, end = chunk.ctypes.data, chunk.ctypes.data + chunk.nbytes
        inner = -(-start // PAGESIZE) * PAGESIZE
        size = end // PAGESIZE * PAGESIZE - inner
        ctypes.CDLL(None).madvise(ctypes.c_void_p(inner), ctypes.c_size_t(max(size, 0)), MADV_POPULATE_WRITE)
