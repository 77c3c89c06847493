"""Data that stays on disk: a client's samples are read when it trains, by processes that prefetch them."""

from __future__ import annotations

import copy
import hashlib
import mmap
import multiprocessing as mp
import os
import pickle
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core import rng
from fedbraid.data import arrays, columns, tree
from fedbraid.data.arrays import Collate
from fedbraid.data.tree import Padded, Tree
from fedbraid.errors import DataError, FedbraidError
from fedbraid.workers import Ask, WorkerPool

if TYPE_CHECKING:
    from fedbraid.data.task import Task

READERS = 2  # processes that prefetch
WINDOW = 4  # clients that each of them may prefetch
CHUNKS = 2  # chunks of a test set that each may prefetch; they are larger
PROBES = 64  # samples whose contents are hashed
PIECE = 4096  # bytes of a file's beginning and end that are hashed
SHARED_BYTES = (
    2**25
)  # bytes of memory that reader and trainer share for one of them; what is larger goes through a pipe

Key = (
    tuple[int, int, int] | tuple[int, int, int, int, int]
)  # client, version, seed, and which rows if not all


class LazyDataset:
    """One dataset per client, none of which is held in memory."""

    def __init__(
        self,
        datasets: Sequence[Any],
        loss: Any,
        inputs: Sequence[str] | None = None,
        targets: str | None = None,
        collate: Collate | None = None,
        what: str = "",
    ) -> None:
        self.datasets, self.loss, self.inputs, self.targets = datasets, loss, inputs, targets
        self.collate, self.what = collate, what
        self.only: int | None = None  # the only client whose samples are read, whatever number is passed
        if not len(datasets):
            raise DataError("no clients were given; pass at least one dataset")
        self.classes: int | None = None  # labels are below this, where they are classes
        lengths = (arrays.size(datasets[i], self._name(i)) for i in range(len(datasets)))
        self.sizes = np.fromiter(lengths, np.int64, len(datasets))
        if not self.sizes.all():
            raise DataError(
                f"{self._name(int(self.sizes.argmin()))} has no samples; leave it out or give it one"
            )
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)])
        self._readers: _Readers | None = None
        self._next: deque[Key] = deque()
        self._last: tuple[tuple[int, int], tuple[Tree, Tree]] = (0, 0), (None, None)
        self._lock = threading.Lock()
        self._labels: dict[int, Tree] = {}  # targets of chunks that were read, by where they begin

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in vars(self).items() if k != "_lock"}
        return {
            **state,
            "_readers": None,
            "_next": deque(),
            "_labels": {},
            "_last": ((0, 0), (None, None)),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def _name(self, client: int) -> str:
        return self.what or f"client {client}"

    def of(self, client: int) -> LazyDataset:
        """The dataset of this client only, whatever number is passed to read it."""
        one = copy.copy(self)
        one.__setstate__({**self.__getstate__(), "only": client})
        one.sizes = self.sizes[[client]]
        one.offsets = np.array([0, one.sizes[0]])
        return one

    def some(self, clients: NDArray[np.int64]) -> LazyDataset:
        """These clients only, renumbered from 0."""
        few = copy.copy(self)
        few.__setstate__({**self.__getstate__(), "datasets": _Some(self.datasets, clients)})
        few.sizes = self.sizes[clients]
        few.offsets = np.concatenate([[0], np.cumsum(few.sizes)])
        return few

    def together(self, clients: NDArray[np.int64], what: str) -> LazyDataset:
        """These clients' samples as one test set."""
        pooled: Any = torch.utils.data.ConcatDataset([self.datasets[int(c)] for c in clients])
        store = LazyDataset([pooled], self.loss, self.inputs, self.targets, self.collate, what)
        store.classes = self.classes
        return store

    def content_stamp(self) -> bytes:
        """A hash that changes with the contents, from data sets that offer one."""
        h, shared = hashlib.blake2b(digest_size=16), dict[int, tuple[Any, bytes]]()
        for i in range(len(self.datasets)):
            h.update(content_stamp(self.datasets[i], shared))
        return h.digest()

    # One client -----------------------------------------------------------------------------------

    def read(
        self, client: int, version: int, seed: int, lo: int = 0, hi: int | None = None
    ) -> tuple[Tree, Tree]:
        """A client's samples as tables; its transforms' draws are seeded by version, client and row."""
        at = client if self.only is None else self.only
        n = int(self.sizes[client if self.only is None else 0])
        tables = self._tables(
            self._items(client, version, seed, range(lo, n if hi is None else hi)), self._name(at)
        )
        for kind, leaf, first in zip(("input", "target"), tables, self.like):
            arrays.alike(leaf, first, self._name(at), "the first client", kind, self.collate is not None)
        if self.classes is not None:
            arrays.in_range(tables[1], self.classes, self._name(at))
        return tables

    @cached_property
    def like(self) -> tuple[Tree, Tree]:
        """One sample, whose kind all others must have."""
        with _isolated_randomness():
            return self._tables(self._items(0, 0, 0, [0]), self._name(0))

    def _items(self, client: int, version: int, seed: int, rows: Sequence[int]) -> list[Any]:
        at = client if self.only is None else self.only
        dataset, n, what = (
            columns.by_item(self.datasets[at]),
            int(self.sizes[client if self.only is None else 0]),
            self._name(at),
        )
        if len(dataset) != n:
            raise DataError(
                f"{what} has {len(dataset)} samples now and had {n} when the task was made; restore them and"
                " resume, or make the task again"
            )
        items = []
        keys = rng.bits(seed, "transform", version, client, np.asarray(rows, np.int64)) >> np.uint64(1)
        for row, key in zip(rows, keys.tolist()):
            _seed(key)
            try:
                items.append(dataset[row])
            except FedbraidError:
                raise
            except Exception as error:
                why = f"{type(error).__name__}: {error}".splitlines()[0]
                raise DataError(
                    f"{what}'s item {row} cannot be read ({why}); fix or restore what it reads, and resume"
                ) from error
        return items

    def _tables(self, items: list[Any], what: str) -> tuple[Tree, Tree]:
        if self.collate is None:
            return arrays.pair(arrays.tables(items, what, self.inputs, self.targets), what, self.loss)
        chosen = arrays.chosen(items, what, self.inputs, self.targets)
        return arrays.pair(arrays.collated(chosen, self.collate, what), what, self.loss)

    def table(self, clients: NDArray[np.int64], version: int, seed: int) -> tuple[Tree, Tree]:
        """The samples of these clients, concatenated."""
        tables = [self._get((int(c), version, seed)) for c in clients]
        if len(tables) == 1:
            return tables[0]
        return arrays.stack(tables) if self.collate is None else arrays.chunked(tables)

    def pick(self, rows: Any) -> tuple[Tree, Tree]:
        """Samples by their row among all clients' samples, as they are at version 0."""
        samples = np.atleast_1d(np.asarray(rows)).ravel()
        owners, items = np.searchsorted(self.offsets, samples, "right") - 1, list[Any]()
        with _isolated_randomness():
            for some in np.split(np.arange(len(samples)), np.flatnonzero(np.diff(owners)) + 1):
                client = int(owners[some[0]])
                items += self._items(client, 0, 0, (samples[some] - self.offsets[client]).tolist())
        return self._tables(items, self._name(int(owners[0])) if len(set(owners)) == 1 else "the table")

    def chunk(self, lo: int, hi: int) -> tuple[Tree, Tree]:
        """Rows lo to hi of a test set; the next chunks are prefetched, and the targets are stored."""
        if self._last[0] != (lo, hi):
            key = (0, 0, 0, lo, hi)
            if hi < len(self) and (readers := self._start()) and key not in readers.pending:
                size, end = hi - lo, len(self)
                self._next = deque((0, 0, 0, at, min(at + size, end)) for at in range(hi, end, size))
                readers.ask(key)
                self._top_up(readers, CHUNKS)
            self._last = (lo, hi), self._get(key, CHUNKS)
            self._labels[lo] = self._last[1][1]
        return self._last[1]

    def __len__(self) -> int:
        return int(self.offsets[-1])

    # Reading ahead --------------------------------------------------------------------------------

    def prefetch(
        self, clients: NDArray[np.int64], version: int, seed: int, after: NDArray[np.int64] | None = None
    ) -> None:
        """Begin to read these clients' samples in this order, then those that train at the next version."""
        if readers := self._start():
            now = [(c, version, seed) for c in clients.tolist()]
            for key in readers.pending.keys() - set(now):  # of clients that were expected and then left
                with suppress(FedbraidError):
                    readers.take(key)
            later = [] if after is None else [(c, version + 1, seed) for c in after.tolist()]
            self._next = deque(key for key in now + later if key not in readers.pending)
            self._top_up(readers, WINDOW)

    def _start(self) -> _Readers | None:
        """The reader processes; None where this process may not fork."""
        if "fork" not in mp.get_all_start_methods() or mp.current_process().daemon:
            return None
        self._readers = self._readers or _Readers(self)
        return self._readers

    def _top_up(self, readers: _Readers, window: int) -> None:
        while self._next and len(readers.pending) < READERS * window:
            readers.ask(self._next.popleft())

    def _get(self, key: Key, window: int = WINDOW) -> tuple[Tree, Tree]:
        with self._lock:  # threads may train at the same time
            if (readers := self._readers) is None or key not in readers.pending:
                with _isolated_randomness():
                    return self.read(*key)
            arrays = readers.take(key)
            self._top_up(readers, window)
        inputs, targets = (tree.map(_tensor, t) for t in arrays)
        return inputs, targets

    def stop(self) -> None:
        if self._readers is not None:
            self._readers.pool.close()
        self._readers, self._next = None, deque()
        self._last = (0, 0), (None, None)


class _Readers:
    """Processes that read a store; arrays return through shared memory."""

    def __init__(self, store: LazyDataset) -> None:
        self.store, self.pool = store, WorkerPool(self._read, READERS)
        slots = READERS * max(WINDOW, CHUNKS) + 1
        self.shared_memory = memoryview(
            mmap.mmap(-1, slots * SHARED_BYTES)
        )  # pages are allocated when they are written
        self.free = [k * SHARED_BYTES for k in range(slots)]
        self.pending: dict[
            Key, tuple[Connection, int]
        ] = {}  # the reader's pipe, and the offset of the slot it writes
        self.ready: dict[Key, tuple[Tree, Tree]] = {}

    def ask(self, key: Key) -> None:
        slot = self.free.pop() if self.free else -1
        self.pending[key] = self.pool.post((key, slot)), slot

    def take(self, key: Key) -> tuple[Tree, Tree]:
        """The tables that were read; a reader answers in the order of its requests."""
        while key not in self.ready:
            pipe, _ = self.pending[key]
            first = next(k for k, (who, _) in self.pending.items() if who is pipe and k not in self.ready)
            slot = self.pending[first][1]
            try:
                head, ends = self.pool.answer(pipe)
            except FedbraidError:
                del self.pending[first]
                raise
            buffers = [bytearray(self.shared_memory[slot + lo : slot + hi]) for lo, hi in pairwise(ends)]
            self.ready[first] = pickle.loads(head, buffers=buffers)
            self.free += [slot] if slot >= 0 else []
        del self.pending[key]
        return self.ready.pop(key)

    def _read(self, request: tuple[Key, int], ask: Ask) -> tuple[bytes, list[int]]:
        """A client's samples, pickled, with their arrays in the slot if they fit, and the end of each array in it."""
        key, slot = request
        tables = tuple(tree.map(_array, t) for t in self.store.read(*key))
        numbers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(tables, protocol=5, buffer_callback=numbers.append)
        ends = np.cumsum([0, *(n.raw().nbytes for n in numbers)]).tolist()
        if slot < 0 or ends[-1] > SHARED_BYTES:
            return pickle.dumps(tables, protocol=5), []
        for (lo, hi), one in zip(pairwise(ends), numbers):
            self.shared_memory[slot + lo : slot + hi] = one.raw()
        return head, ends


class _Some(Sequence[Any]):
    """A selection of a sequence of datasets, each of which is made on access."""

    def __init__(self, datasets: Sequence[Any], which: NDArray[np.int64]) -> None:
        self.datasets, self.which = datasets, which

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, i: Any) -> Any:
        return self.datasets[int(self.which[i])]


def _array(leaf: Any) -> Any:
    """A leaf as NumPy arrays, for another process."""
    if isinstance(leaf, Padded):
        arrays: list[Any] = [leaf.values.numpy(), leaf.lengths.numpy()]
        return Padded(*arrays)
    return leaf.numpy()


def _tensor(leaf: Any) -> Any:
    if isinstance(leaf, Padded):
        return Padded(torch.from_numpy(leaf.values), torch.from_numpy(leaf.lengths))
    return torch.from_numpy(leaf)


def _seed(key: int) -> None:
    """Seed every generator that a transform may draw from."""
    torch.default_generator.manual_seed(
        key
    )  # torch.manual_seed asks every kind of device, which takes longer than reading
    random.seed(key)
    np.random.seed(key % 2**32)  # noqa: NPY002 (it is what transforms use)


@contextmanager
def _isolated_randomness() -> Iterator[None]:
    """Restore the global generators afterwards."""
    plain, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(numbers)  # noqa: NPY002


# Columns and views of a task ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LazyColumn:
    """The inputs (index 0) or targets (1) of all samples, read on access."""

    store: LazyDataset
    index: int

    @classmethod
    def both(cls, store: LazyDataset) -> tuple[LazyColumn, LazyColumn]:
        return cls(store, 0), cls(store, 1)

    @cached_property
    def example(self) -> Tree:
        """The first and the last sample."""
        return self[[0, len(self) - 1]]

    def probes(self) -> Iterator[Tree]:
        """Samples from all over the data, whose contents are part of a task's fingerprint.

        One that cannot be read, or is of another kind, is refused with its client's number when it is trained on.
        """
        for row in np.unique(np.linspace(0, len(self) - 1, PROBES).round().astype(np.int64)).tolist():
            with suppress(DataError):
                yield self[[row]]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *tree.first(self.example).shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = tree.first(self.example).dtype
        return dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return len(self.store)

    def read_all(self) -> Tree:
        """All targets, which are stored during an evaluation; to get all inputs, all samples are read."""
        store, each = self.store, 512
        if self.index == 0:
            return tree.cat([self[lo : lo + each] for lo in range(0, len(self), each)])
        if sum(tree.length(t) for t in store._labels.values()) != len(self):
            store._labels = {}
            for lo in range(0, len(self), each):
                store.chunk(lo, min(lo + each, len(self)))
        return tree.cat([store._labels[lo] for lo in sorted(store._labels)])

    def __getitem__(self, rows: Any) -> Tree:
        if isinstance(rows, slice):
            lo, hi, _ = rows.indices(len(self))
            if hi <= lo:
                return tree.take(self.example, slice(0))
            if self.store.what:
                return tree.take(self.store.chunk(lo, hi)[self.index], slice(None))
            rows = range(lo, hi)
        rows_read = tree.take(self.store.pick(rows)[self.index], slice(None))
        block = tuple(rows.shape) if isinstance(rows, Tensor) and rows.ndim > 1 else None
        return (
            rows_read
            if block is None
            else tree.map(lambda leaf: leaf.view(*block, *leaf.shape[1:]), rows_read)
        )

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def to(self, device: Any) -> LazyColumn:
        if torch.device(device).type != "cpu":
            raise DataError(f"lazy data is read by the CPU, not on {device}; use device='cpu'")
        return self


class BlockView:
    """A task for one block of clients: its table holds their samples only."""

    def __init__(self, task: Task, clients: NDArray[np.int64], table: tuple[Tree, Tree]) -> None:
        self.task, (self.inputs, self.targets) = task, table
        self.begins = np.concatenate([[0], np.cumsum(task.sizes[clients])[:-1]])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def row_ids(self, clients: NDArray[np.int64], picked: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self.begins[:, None] + picked)


# Folders of files ---------------------------------------------------------------------------------


class folders(Sequence[Any]):
    """One client per folder below `root`, one sample per file in it: `load(path)` gives (input, target) or a dict.

    Only the folders' names are stored, which name the clients. A slice, or a list of indices, selects
    clients; `split` holds clients out of training, and `pooled` makes their samples one test set:

    >>> train, held_out = fb.folders("images", load).split(0.1)  # doctest: +SKIP
    >>> fb.Task.from_datasets(model, train, held_out.pooled(), lazy=True)  # doctest: +SKIP
    """

    def __init__(self, root: str | os.PathLike[str], load: Callable[[Path], Any]) -> None:
        self.root, self.load = Path(root), load
        try:
            self.names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        except OSError as error:
            raise DataError(
                f"{root} cannot be listed: {error.strerror}; name a folder of clients' folders"
            ) from error

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return self._of(self.names[client])
        if isinstance(client, Sequence | np.ndarray) and not isinstance(client, str):
            return self._of([self.names[i] for i in np.arange(len(self))[np.asarray(client)]])
        return Files(self.root / self.names[client], self.load)

    def _of(self, names: list[str]) -> folders:
        some = copy.copy(self)
        some.names = names
        return some

    def split(self, fraction: float = 0.1, seed: int = 0) -> tuple[folders, folders]:
        """(clients that train, clients held out): this fraction of the folders, drawn with the seed."""
        count = round(fraction * len(self))
        if not 0 < count < len(self):
            raise DataError(
                f"a fraction of {fraction} of {len(self)} folders is {count}; use one that leaves some on both sides"
            )
        is_held_out = np.zeros(len(self), np.bool_)
        is_held_out[rng.generator(seed, "held-out folders").permutation(len(self))[:count]] = True
        return self[~is_held_out], self[is_held_out]

    def pooled(self) -> Any:
        """All samples of these folders as one dataset, such as a test set of held-out clients."""
        return torch.utils.data.ConcatDataset(list(self))


class Files:
    """The files of one folder, in the order of their names."""

    def __init__(self, folder: Path, load: Callable[[Path], Any]) -> None:
        self.folder, self.load = folder, load
        try:
            self.names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
        except OSError as error:
            raise DataError(f"{folder} cannot be listed: {error.strerror}; restore it and resume") from error

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> Any:
        return self.load(self.folder / self.names[i])

    def content_stamp(self) -> bytes:
        """A hash that changes with the files without reading them fully: names, sizes, beginnings and ends."""
        return _stamp_of_files(self.folder / name for name in self.names)


def _stamp_of_files(paths: Iterable[Path]) -> bytes:
    """Times are left out, because a file that is restored from a backup has another one."""
    h = hashlib.blake2b(digest_size=16)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            h.update(repr((path.name, size)).encode())
            for at in sorted({0, max(0, size - PIECE)}):
                file.seek(at)
                h.update(file.read(PIECE))
    return h.digest()


def content_stamp(dataset: Any, shared: dict[int, tuple[Any, bytes]]) -> bytes:
    """A hash that changes with a data set's contents, if it offers one; `shared` caches those that subsets share.

    A data set offers it by `content_stamp()`, by Hugging Face's `_fingerprint`, or as torchvision's list of files.
    """
    if callable(stamp := getattr(dataset, "content_stamp", None)):
        return bytes(stamp())
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        return b"".join(content_stamp(one, shared) for one in dataset.datasets)
    if isinstance(dataset, torch.utils.data.Subset):
        inner = dataset.dataset
        if id(inner) not in shared:
            shared[id(inner)] = inner, content_stamp(inner, shared)
        return shared[id(inner)][1] + np.asarray(dataset.indices, np.int64).tobytes()
    if isinstance(fingerprint := getattr(dataset, "_fingerprint", None), str):
        return fingerprint.encode()
    files = getattr(dataset, "samples", None)
    return (
        _stamp_of_files(Path(path) for path, _ in files)
        if isinstance(files, list) and _are_files(files)
        else b""
    )


def _are_files(samples: list[Any]) -> bool:
    first = samples[0] if samples else None
    return (
        isinstance(first, tuple)
        and len(first) == 2
        and isinstance(first[0], str)
        and os.path.isfile(first[0])
    )
