"""Run folders: `run.json` says what runs, `metrics.jsonl` what came of each step, `state.db` where it stands.

Each step is one transaction of model, optimiser, clients' rows and the length of `metrics.jsonl`. Killed at
any instant, a run resumes from its last committed step.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedbraid.core.rows import Rows
from fedbraid.errors import RunError
from fedbraid.run import tree
from fedbraid.run.database import Database
from fedbraid.run.state import State

Record = dict[str, Any]
TREES = tuple(f.name for f in fields(State) if f.name not in ("sent", "clients"))  # which have tables


class Folder:
    """A run's folder on disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def exists(self) -> bool:
        return (self.path / "run.json").exists()

    def create(self, config: Record) -> None:
        """Write run.json; the folder must be new or empty."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if any(f.name != ".run.json.part" for f in self.path.iterdir()):
                raise RunError(
                    f"{self.path} holds other files and no run.json; give out= a new or empty folder"
                )
            self.write_json("run.json", config)
        except OSError as error:
            raise RunError(
                f"the run folder {self.path} cannot be written: {error.strerror}; choose another out="
            ) from error

    def config(self) -> Record:
        return self.read_json("run.json")

    def read_json(self, name: str) -> Record:
        try:
            config = json.loads((self.path / name).read_text())
        except FileNotFoundError as error:
            raise RunError(f"{self.path} is no run folder (it has no {name}); check the path") from error
        except (OSError, ValueError) as error:
            raise RunError(
                f"{self.path / name} cannot be read ({error}); restore it or start a new run"
            ) from error
        if not isinstance(config, dict):
            raise RunError(f"{self.path / name} does not hold a configuration; restore it or start a new run")
        return config

    def write_json(self, name: str, value: Any) -> None:
        """Write a file whole or not at all."""
        write_whole(self.path / name, (json.dumps(value, indent=2) + "\n").encode())

    def records(self) -> Iterator[Record]:
        """The records of metrics.jsonl; a last line still being written is left out."""
        try:
            with open(self.path / "metrics.jsonl", "rb") as lines:
                for line in lines:
                    if line.endswith(b"\n"):
                        yield json.loads(line)
        except FileNotFoundError:
            return
        except ValueError as error:
            raise RunError(
                f"{self.path / 'metrics.jsonl'} is damaged ({error}); resume the run to repair it"
            ) from error


class Checkpoint:
    """The open state of one run: commits steps, and gives back the last one."""

    def __init__(self, folder: Folder, state: State, memory: str = "auto", clients: int = 0) -> None:
        self.folder = folder
        tables = dict(rows_of(state))
        self.db = Database(folder.path / "state.db", max((r.row_bytes for r in tables.values()), default=0))
        for name, rows in tables.items():
            rows.attach(self.db, name, row_limit(rows, memory, clients))
        self.db.create("sent")
        self._sent: set[int] = set()
        try:
            self.metrics = open(folder.path / "metrics.jsonl", "ab")  # noqa: SIM115
        except OSError as error:
            raise RunError(f"{folder.path / 'metrics.jsonl'} cannot be written: {error.strerror}") from error
        self._tables = tables
        self._records = tree.records([getattr(state, name) for name in (*TREES, "sent")])

    def restore(self, state: State) -> tuple[State, Record]:
        """The last committed state and note (`state` itself where there is none), later records cut off."""
        saved = self.db.get_state()
        if saved is None:
            self.metrics.truncate(0)
            return state, {}
        try:
            head = json.loads(saved[0])
            whole = self._unpack(saved[1], state)
            self._sent = set(head["sent"])
            sent = {v: self._unpack(blob, state) for v, blob in self.db.read("sent", sorted(self._sent))}
            if missing := self._sent - sent.keys():
                raise KeyError(f"version {min(missing)}")
            restored = State(**whole, sent=sent, clients=state.clients)
        except (KeyError, ValueError, TypeError, AttributeError, SafetensorError) as error:
            raise RunError(
                f"the checkpoint in {self.folder.path} is damaged or of another configuration ({error!r}); start a new run"
            ) from error
        self.metrics.truncate(head["metrics"])
        self.metrics.seek(0, os.SEEK_END)
        return restored, head["note"]

    def _unpack(self, blob: bytes, state: State) -> Any:
        return tree.unpack(blob, self._tables, self._records, state.x.device)

    def commit(self, state: State, records: list[Record], note: Record) -> None:
        """One step, or several, for good."""
        for record in records:
            self._append(record)
        whole = {name: getattr(state, name) for name in TREES}
        blob = tree.pack(whole, "state", self._tables, self._records)
        try:
            self.metrics.flush()
            head = {"sent": sorted(state.sent), "metrics": self.metrics.tell(), "note": note}
            with self.db.transaction():
                for rows in self._tables.values():
                    rows.flush()
                self._commit_sent(state)
                self.db.put_state(json.dumps(head), blob)
        except OSError as error:
            raise self._full(error) from error
        for rows in self._tables.values():
            rows.committed()
        self._sent = set(state.sent)

    def _commit_sent(self, state: State) -> None:
        """Versions are written once and deleted when nobody needs them."""
        self.db.delete("sent", self._sent - state.sent.keys())
        new = sorted(state.sent.keys() - self._sent)
        self.db.write("sent", new, [tree.pack(state.sent[v], "sent", {}, self._records) for v in new])

    def _append(self, record: Record) -> None:
        try:
            self.metrics.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            raise self._full(error) from error

    def _full(self, error: OSError) -> RunError:
        return RunError(
            f"{self.folder.path} cannot be written ({error.strerror}); free space, then resume: the last committed step is intact"
        )

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what was not flushed was not committed either
            self.metrics.close()
        self.db.close()


def rows_of(state: State) -> Iterator[tuple[str, Rows]]:
    """Every table of rows in a state, by its place."""
    yield "clients", state.clients
    for name in TREES:
        yield from tree.tables(getattr(state, name), name)


def row_limit(rows: Rows, memory: str, clients: int) -> int | None:
    """How many rows may stay in memory: all of them, unless they would take more than a quarter of it."""
    if memory == "memory":
        return None
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    if memory == "auto" and rows.row_bytes * clients <= room:
        return None
    return max(64, min(room, 2**28) // max(rows.row_bytes, 1))


def save_model(path: Path, tensors: dict[str, Tensor]) -> None:
    """The model's named tensors as a safetensors file, whole or not at all."""
    data = save_tensors({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()})
    try:
        write_whole(path, data)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror}); free space, then resume: the last committed step is intact"
        ) from error


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole, or leave no trace."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
