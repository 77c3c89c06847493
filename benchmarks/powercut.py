"""Cut the power of a run at random moments, and resume what a disk may then hold.

python benchmarks/powercut.py --cuts 200

A run that stops half-way and resumes is watched with strace: every write, rename, truncation and sync of its
folder. A cut at a moment keeps what was synced before it; of what was not, any part may have reached the
disk: whole writes, single sectors of them, lengths without their content, names without their files or the
other way round. Every such folder must come to the same bits, and no step that was told to anybody, by a line
in metrics.jsonl, may be lost.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedbraid as fb
from fedbraid.run import database

ALGORITHM, WORK, PLAN = fb.fedadavr(memory="int4"), fb.Work(lr=0.05, batch=10), fb.rounds(16, clients=3)
SECTOR = 512
CALLS = "open,openat,creat,write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,ftruncate,mkdir,mkdirat"


class Stop(Exception):
    pass


class StopAt:
    def step(self, record: dict[str, Any], run: Any) -> None:
        if record["step"] == PLAN.steps // 2:
            raise Stop


class Began:
    def start(self, run: Any) -> None:
        self.at = run.state.t


def simulate(out: Path | None, *callbacks: Any) -> fb.Result:
    draw = np.random.default_rng(0)
    torch.manual_seed(0)
    shares = [(draw.normal(size=(n, 20)), draw.integers(0, 5, n)) for n in (9, 20, 31, 12, 7, 25)]
    task = fb.Task.from_arrays(nn.Linear(20, 5), shares, shares[1])
    return fb.simulate(
        task, ALGORITHM, WORK, PLAN, seed=5, engine="in_process(backend='vmap')", out=out, callbacks=callbacks
    )  # fmt: skip


def child(out: Path) -> None:
    """What is watched; the log is folded into the file every 30 pages, so that cuts fall into that too."""
    opened = database.Database.__init__

    def often(self: database.Database, *arguments: Any, **named: Any) -> None:
        opened(self, *arguments, **named)
        self._sql.execute("PRAGMA wal_autocheckpoint = 30")

    database.Database.__init__ = often  # type: ignore[method-assign]
    try:
        simulate(out, StopAt())
    except Stop:
        simulate(out)


# What was done ------------------------------------------------------------------------------------------


@dataclass
class Op:
    """One thing done: to a file's content, to a name in a folder, or the sync of either."""

    kind: str  # write, truncate, sync; make, folder, rename, remove
    where: Any  # the file's number, or the folder whose names it changes
    file: int = -1
    name: str = ""
    old: str = ""
    at: int = 0
    data: bytes = b""


@dataclass
class Log:
    """The calls of a process, below a folder."""

    root: str
    ops: list[Op] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)  # by number, the name each was made with
    sizes: list[int] = field(default_factory=list)
    open: dict[int, tuple[Any, bool]] = field(default_factory=dict)  # file or folder, whether it appends
    place: dict[int, int] = field(default_factory=dict)

    def read(self, text: str) -> Log:
        waiting: dict[str, str] = {}
        for line in text.splitlines():
            who, _, call = line.partition(" ")
            call = call.strip()
            if call.endswith("<unfinished ...>"):
                waiting[who] = call.removesuffix("<unfinished ...>")
                continue
            if resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", call):
                call = waiting.pop(who) + resumed[1]
            if found := re.match(r"(\w+)\((.*)\)\s+= (\d+)", call):
                self.take(found[1], found[2], int(found[3]))
        return self

    def take(self, call: str, arguments: str, result: int) -> None:
        texts = [
            bytes.fromhex(t.replace("\\x", "")) for t in re.findall(r'"((?:\\x[0-9a-f]{2})*)"', arguments)
        ]
        paths = [os.path.normpath(os.path.join(self.root, t.decode(errors="replace"))) for t in texts]
        numbers = [int(n) for n in re.findall(r"(?:^|, )(\d+)", re.sub(r'"[^"]*"', "", arguments))]
        if call in ("open", "openat", "creat"):
            self.opened(paths[0], arguments, result)
        elif call in ("write", "pwrite64", "fsync", "fdatasync", "ftruncate") and numbers[0] in self.open:
            what, appends = self.open[numbers[0]]
            if call.endswith("sync"):
                self.ops.append(Op("sync", what))
            elif call == "ftruncate":
                self.ops.append(Op("truncate", what, what, at=numbers[1]))
                self.sizes[what] = numbers[1]
            else:
                at = self.sizes[what] if appends else self.place[numbers[0]]
                at = numbers[-1] if call == "pwrite64" else at
                self.ops.append(Op("write", what, what, at=at, data=texts[0][:result]))
                self.place[numbers[0]] = at + result
                self.sizes[what] = max(self.sizes[what], at + result)
        elif call.startswith("mkdir") and self.inside(paths[0]):
            self.ops.append(Op("folder", os.path.dirname(paths[0]), name=paths[0]))
        elif call.startswith("rename") and self.inside(paths[1]):
            number = self.names[paths[1]] = self.names.pop(paths[0])
            self.ops.append(Op("rename", os.path.dirname(paths[1]), number, paths[1], paths[0]))
        elif call.startswith("unlink") and paths[0] in self.names:
            number = self.names.pop(paths[0])
            self.ops.append(Op("remove", os.path.dirname(paths[0]), number, paths[0]))

    def opened(self, path: str, how: str, handle: int) -> None:
        self.open.pop(handle, None)
        if not self.inside(path) and path != os.path.dirname(self.root):
            return
        if path not in self.names and "O_CREAT" not in how:
            self.open[handle] = (path, False)  # a folder
            return
        if path not in self.names:
            self.names[path] = len(self.sizes)
            self.ops.append(Op("make", os.path.dirname(path), len(self.sizes), path))
            self.sizes.append(0)
            self.files.append(path)
        number = self.names[path]
        if "O_TRUNC" in how and self.sizes[number]:
            self.ops.append(Op("truncate", number, number, at=0))
            self.sizes[number] = 0
        self.open[handle], self.place[handle] = (number, "O_APPEND" in how), 0

    def inside(self, path: str) -> bool:
        return path == self.root or path.startswith(self.root + "/")

    def told(self, moment: int) -> int:
        """How many steps had been told to whoever reads metrics.jsonl."""
        shown = (
            o
            for o in self.ops[:moment]
            if o.kind == "write" and self.files[o.file].endswith("/metrics.jsonl")
        )
        return sum(o.data.count(b"\n") for o in shown)


def watch(out: Path) -> Log:
    """The log of the child's calls."""
    with tempfile.NamedTemporaryFile("r", suffix=".strace") as log:
        command = [
            "strace",
            "-f",
            "--seccomp-bpf",
            "-xx",
            "-s",
            "100000000",
            "-e",
            f"trace={CALLS}",
            "-o",
            log.name,
        ]
        subprocess.run([*command, sys.executable, __file__, "--child", str(out)], check=True)
        return Log(str(out)).read(log.read())


# What a disk may hold -----------------------------------------------------------------------------------


def cut(log: Log, moment: int, draw: random.Random) -> tuple[dict[str, bytes], set[str]]:
    """Files and folders after a cut: all that was synced, and any part of the rest."""
    past = log.ops[: moment + 1]  # the last is under way
    synced: dict[Any, int] = {o.where: i for i, o in enumerate(past[:-1]) if o.kind == "sync"}
    luck = draw.choice((0.0, 0.5, 0.9, 1.0))
    torn = draw.random() < 0.5
    content: dict[int, bytearray] = {i: bytearray() for i in range(len(log.sizes))}
    names: dict[str, int] = {}
    folders = {os.path.dirname(log.root)}
    for i, op in enumerate(past):
        sure = i < synced.get(op.where, -1)
        if not sure and draw.random() >= luck:
            if op.kind == "write" and torn:
                _tear(content[op.file], op, draw)
            continue
        if op.kind == "write":
            _put(content[op.file], op.at, op.data)
        elif op.kind == "truncate":
            _put(content[op.file], op.at, b"")
            del content[op.file][op.at :]
        elif op.kind == "folder":
            folders.add(op.name)
        elif op.kind == "make":
            names[op.name] = op.file
        elif op.kind in ("rename", "remove"):
            gone = op.old or op.name
            if names.get(gone) == op.file:
                del names[gone]
            if op.kind == "rename":
                names[op.name] = op.file
    return {n: bytes(content[f]) for n, f in names.items() if os.path.dirname(n) in folders}, folders


def _put(content: bytearray, at: int, data: bytes) -> None:
    content.extend(bytes(max(0, at - len(content))))
    content[at : at + len(data)] = data


def _tear(content: bytearray, op: Op, draw: random.Random) -> None:
    """Some sectors of a write, or its length alone."""
    for lo in range(0, len(op.data), SECTOR):
        piece = op.data[lo : lo + SECTOR]
        if draw.random() < 0.5:
            _put(content, op.at + lo, piece)
        elif draw.random() < 0.3 and op.at + lo >= len(content):
            _put(content, op.at + lo, bytes(len(piece)))


def campaign(cuts: int, seed: int = 0) -> Counter[str]:
    """Cut so many times; raises where a folder does not come to the same bits."""
    draw, seen = random.Random(seed), Counter[str]()
    whole = simulate(None)
    with tempfile.TemporaryDirectory(prefix="powercut-") as scratch:
        out = Path(scratch, "run")
        log = watch(out)
        syncs = sum(o.kind == "sync" for o in log.ops)
        print(f"{len(log.ops)} operations, {syncs} syncs, {log.told(len(log.ops))} steps")
        turns = [
            i for i in range(len(log.ops)) if any(o.kind != "write" for o in log.ops[max(i - 1, 0) : i + 2])
        ]
        for k in range(cuts):
            moment = draw.choice(turns) if k % 2 else draw.randrange(len(log.ops))
            files, folders = cut(log, moment, draw)
            shutil.rmtree(out, ignore_errors=True)
            for folder in sorted(folders):
                os.makedirs(folder, exist_ok=True)
            for name, data in files.items():
                Path(name).write_bytes(data)
            began = Began()
            result = simulate(out, began)
            told = log.told(moment)
            if began.at < told:
                raise AssertionError(
                    f"cut {k} at operation {moment}: step {told} was told, {began.at} is left"
                )
            if not torch.equal(result.x, whole.x) or result.history != whole.history:
                raise AssertionError(f"cut {k} at operation {moment} came to other bits")
            seen[
                "began anew" if began.at == 0 else "at the end" if began.at == PLAN.steps else "resumed"
            ] += 1
    return seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child)
    else:
        found = campaign(given.cuts, given.seed)
        print(f"{given.cuts} cuts, none lost beyond the step in flight: {dict(found)}")
