"""Run folders: `run.json` has the configuration, `metrics.jsonl` the records of steps, `state.db` the checkpoint.

Each step is one transaction of model, optimizer, client states and the step's record, which is synced to the disk
before the step is reported. A run that is killed, or loses power, resumes from there; `metrics.jsonl` is written
afterwards, and rebuilt from `state.db` if it is incomplete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedbraid.core.client_table import ClientTable
from fedbraid.errors import RunError
from fedbraid.run import serialize as tree
from fedbraid.run.atomic_files import checksum, make_folder, private, sync, write_atomic
from fedbraid.run.database import Database
from fedbraid.run.state import State

Record = dict[str, Any]
TREES = tuple(f.name for f in fields(State) if f.name not in ("sent", "clients"))  # which have tables


FORMAT = 3  # of a run's folder


class Folder:
    """A run's folder on disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if "\0" in str(path):
            raise RunError(f"{str(path)!r} cannot name a folder; leave out the zero byte")

    @property
    def exists(self) -> bool:
        return os.path.lexists(self.path / "run.json")

    def create(self, config: Record) -> None:
        """Write run.json; the folder must be new or empty."""
        try:
            make_folder(self.path)
            if any(f.name != ".run.json.part" for f in self.path.iterdir()):
                raise RunError(
                    f"{self.path} holds other files and no run.json; give out= a new or empty folder"
                )
            self.write_config(config)
        except OSError as error:
            raise RunError(
                f"the run folder {self.path} cannot be written: {error.strerror}; choose another out="
            ) from error

    def write_config(self, config: Record) -> None:
        content = {"format": FORMAT, **config}
        self.write_json("run.json", content | {"checksum": fingerprint(content)})

    def config(self) -> Record:
        """The content of run.json, with its checksum verified."""
        config = self.read_json("run.json")
        if config.get("format") != FORMAT:
            raise RunError(
                f"{self.path} is a run folder of format {config.get('format', 1)!r}, and this fedbraid reads format {FORMAT};"
                " read it with the version that wrote it, or start a new run"
            )
        recorded = config.pop("checksum", None)
        if recorded != fingerprint(config):
            raise RunError(
                f"{self.path / 'run.json'} is not as the run wrote it (its checksum does not fit); restore it or start a"
                " new run in another folder"
            )
        return config

    def read_json(self, name: str) -> Record:
        try:
            config = json.loads((self.path / name).read_bytes())
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RunError(f"{self.path} is not a run folder (it has no {name}); check the path") from error
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(
                f"{self.path / name} cannot be read ({error}); restore it or start a new run"
            ) from error
        if not isinstance(config, dict):
            raise RunError(f"{self.path / name} does not hold a configuration; restore it or start a new run")
        return config

    def write_json(self, name: str, value: Any) -> None:
        """Write a file atomically."""
        write_atomic(self.path / name, (json.dumps(value, indent=2) + "\n").encode())

    def records(self) -> Iterator[Record]:
        """The records of metrics.jsonl; a last line still being written is left out."""
        try:
            with open(self.path / "metrics.jsonl", "rb") as lines:
                for line in lines:
                    if line.endswith(b"\n"):
                        yield json.loads(line)
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(
                f"{self.path / 'metrics.jsonl'} is corrupt ({error}); resume the run to repair it"
            ) from error


def fingerprint(config: Record) -> str:
    """A text that differs between configurations, whatever the order of their keys."""
    plain = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(plain, digest_size=16).hexdigest()


class Checkpoint:
    """The open state of one run: commits steps, and gives back the last one."""

    def __init__(self, folder: Folder, state: State, memory: str = "auto", clients: int = 0) -> None:
        self.folder = folder
        config = folder.config()
        self._config = fingerprint({k: v for k, v in config.items() if not k.startswith("bits")})
        self._tables = dict(rows_of(state))
        self._records = tree.records([getattr(state, name) for name in (*TREES, "sent")])
        self._sent: set[int] = set()
        self._end: Record = {"count": 0, "bytes": 0, "sum": 0}  # of metrics.jsonl
        widest = max((r.row_bytes for r in self._tables.values()), default=0)
        self.db = Database(folder.path / "state.db", widest)
        try:
            self._open(memory, clients)
        except BaseException:
            self.db.close()
            raise

    def _open(self, memory: str, clients: int) -> None:
        self._saved = self.db.get_state()
        try:
            self.metrics = open(self.folder.path / "metrics.jsonl", "a+b", opener=private)  # noqa: SIM115
        except OSError as error:
            raise RunError(
                f"{self.folder.path / 'metrics.jsonl'} cannot be written: {error.strerror}"
            ) from error
        if self._saved is None and self.metrics.tell():
            self.metrics.close()
            raise self.db.corrupt("it holds no step, and metrics.jsonl does")
        for name, rows in self._tables.items():
            rows.attach(self.db, name, row_limit(rows, memory, clients))
        for table in ("sent", "records"):
            self.db.create(table)

    def restore(self, state: State) -> tuple[State, Record]:
        """The last committed state and note; `state` itself if there is none."""
        if self._saved is None:
            return state, {}
        (head, blob), self._saved = self._saved, None
        if head["config"] != self._config:
            raise RunError(
                f"{self.folder.path / 'run.json'} is not that of the run in state.db; restore it or start a new run in"
                " another folder"
            )
        try:
            trees = self._unpack(blob, state)
            self._sent = set(head["sent"])
            sent = {v: self._unpack(blob, state) for v, blob in self.db.read("sent", sorted(self._sent))}
            restored = State(**trees, sent=sent, clients=state.clients)
        except (KeyError, ValueError, TypeError, AttributeError, SafetensorError) as error:
            raise RunError(
                f"the checkpoint in {self.folder.path} is of another version or configuration ({error!r}); start a new run"
            ) from error
        self._end = head["metrics"]
        self._repair()
        return restored, head["note"]

    def _unpack(self, blob: bytes, state: State) -> Any:
        return tree.unpack(blob, self._tables, self._records, state.x.device)

    def _repair(self) -> None:
        """Truncate metrics.jsonl to the committed steps, or rebuild it."""
        try:
            left, found = self._end["bytes"], 0
            self.metrics.seek(0)
            while left and (some := self.metrics.read(min(left, 2**20))):
                left, found = left - len(some), checksum(some, found)
            if not left and found == self._end["sum"]:
                self.metrics.truncate(self._end["bytes"])
            else:
                self.metrics.truncate(0)
                for _, line in self.db.every("records"):
                    self.metrics.write(line)
                self.metrics.flush()
            self.metrics.seek(0, os.SEEK_END)
        except OSError as error:
            raise self._full(error) from error

    def commit(self, state: State, records: list[Record], note: Record) -> None:
        """Commit one step or several."""
        lines = [json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records]
        text = b"".join(lines)
        done, size, before = self._end["count"], self._end["bytes"], self._end["sum"]
        end = {"count": done + len(lines), "bytes": size + len(text), "sum": checksum(text, before)}
        head = {"config": self._config, "sent": sorted(state.sent), "metrics": end, "note": note}
        trees = {name: getattr(state, name) for name in TREES}
        blob = tree.pack(trees, "state", self._tables, self._records)
        with self.db.transaction():
            for rows in self._tables.values():
                rows.flush()
            self._commit_sent(state)
            self.db.write("records", range(done, done + len(lines)), lines)
            self.db.put_state(head, blob)
        for rows in self._tables.values():
            rows.committed()
        self._sent, self._end = set(state.sent), end
        try:
            self.metrics.write(text)
            self.metrics.flush()
        except OSError as error:
            raise self._full(error) from error

    def _commit_sent(self, state: State) -> None:
        """Versions are written once and deleted when no client needs them."""
        self.db.delete("sent", self._sent - state.sent.keys())
        new = sorted(state.sent.keys() - self._sent)
        self.db.write("sent", new, [tree.pack(state.sent[v], "sent", {}, self._records) for v in new])

    def _full(self, error: OSError) -> RunError:
        return RunError(
            f"{self.folder.path} cannot be written ({error.strerror}); free space, then resume: the last committed step is intact"
        )

    def close(self) -> None:
        with contextlib.suppress(OSError):  # unwritten records are in state.db
            self.metrics.close()
        self.db.close()


def rows_of(state: State) -> Iterator[tuple[str, ClientTable]]:
    """Every client table in a state, with its path."""
    yield "clients", state.clients
    for name in TREES:
        yield from tree.tables(getattr(state, name), name)


def row_limit(rows: ClientTable, memory: str, clients: int) -> int | None:
    """The number of rows that may stay in memory: all (None), unless they would take more than a quarter of it."""
    if memory == "memory":
        return None
    budget = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    if memory == "auto" and rows.row_bytes * clients <= budget:
        return None
    return max(64, min(budget, 2**28) // max(rows.row_bytes, 1))


def save_model(path: Path, tensors: dict[str, Tensor]) -> None:
    """The model's named tensors as a safetensors file with its checksum, written atomically."""
    plain = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    data = save_tensors(plain, {"checksum": model_checksum(plain)})
    try:
        metrics = path.with_name("metrics.jsonl")
        if metrics.exists():  # a final model implies that the records are complete
            sync(metrics)
        write_atomic(path, data)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror}); free space, then resume: the last committed step is intact"
        ) from error


def load_model(path: Path) -> dict[str, Tensor]:
    """The tensors that `save_model` wrote."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            recorded = (file.metadata() or {}).get("checksum")
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read ({error}); resume its run to write it again") from error
    if recorded != model_checksum(tensors):
        raise RunError(f"{path} is corrupt (its checksum does not fit); resume its run to write it again")
    return tensors


def model_checksum(tensors: dict[str, Tensor]) -> str:
    kinds = [(name, str(v.dtype), list(v.shape)) for name, v in sorted(tensors.items())]
    total = checksum(json.dumps(kinds).encode())
    for _, v in sorted(tensors.items()):
        total = checksum(v.flatten().view(torch.uint8).numpy().data, total)
    return f"{total:08x}"
