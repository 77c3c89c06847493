"""Is any state that parts may hold given back as it was committed?"""

from __future__ import annotations

import json
import shutil
import sqlite3
import stat
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch

import fedbraid as fb
from fedbraid.core.client_table import ClientTable
from fedbraid.core.gather import Gather, Mean
from fedbraid.errors import RunError
from fedbraid.run import fingerprint as bits
from fedbraid.run import serialize as tree
from fedbraid.run.checkpoint import Checkpoint, Folder, rows_of
from fedbraid.run.database import Database
from fedbraid.run.state import State
from fedbraid_native.build import compiler

WORK = fb.Work(lr=0.05, epochs=1, batch=8)


@dataclass(frozen=True)
class Pair:
    rows: ClientTable
    both: tuple[Any, ...]


@dataclass(frozen=True)
class Slotted:
    __slots__ = ("name", "value")
    name: str
    value: Any


@dataclass(frozen=True)
class WrappedUplink(Gather):
    """A gather around another, whose state lies deep inside a record of its own."""

    inner: Gather = field(default_factory=Mean)

    def init(self, x, layout):
        return {
            "deep": [
                Pair(ClientTable({"n": torch.zeros(1, dtype=torch.int64)}), (self.inner.init(x, layout),))
            ]
        }

    def zero(self, x):
        return self.inner.zero(x)

    def add(self, acc, up, s, x):
        pair = s["deep"][0]
        seen = pair.rows.get(up.clients)["n"]
        pair.rows.put(up.clients, {"n": seen + 1})
        return self.inner.add(acc, up, pair.both[0], x)

    def close(self, acc, s, ctx):
        u, inner, metrics = self.inner.close(acc, s["deep"][0].both[0], ctx)
        return u, {"deep": [replace(s["deep"][0], both=(inner,))], 7: (ctx.t, 0.5, None, "x")}, metrics


class Stop(Exception):
    pass


class StopAt:
    def step(self, record, run):
        if record["step"] == 6:
            raise Stop


def test_a_gather_around_a_memory_resumes(blobs, tmp_path):
    base = fb.fedadavr(memory="int8")
    algorithm = replace(base, gather=WrappedUplink(base.gather), name="")
    run = {
        "task": blobs,
        "algorithm": algorithm,
        "work": WORK,
        "schedule": fb.rounds(10, clients=3),
        "seed": 3,
    }
    whole = fb.simulate(**run, out=tmp_path / "whole")
    with pytest.raises(Stop):
        fb.simulate(**run, out=tmp_path / "cut", callbacks=[StopAt()])
    resumed = fb.resume(tmp_path / "cut", task=blobs, algorithm=algorithm)
    assert torch.equal(resumed.x, whole.x)
    assert resumed.history == whole.history
    counts = [r.state.gather["deep"][0].rows.get(range(blobs.clients))["n"] for r in (whole, resumed)]
    assert torch.equal(*counts)
    assert counts[0].dtype == torch.int64
    assert int(counts[0].sum()) == 30
    names = {name for name, _ in rows_of(resumed.state)}
    assert names == {"clients", "gather.deep.0.rows", "gather.deep.0.both.0.rows"}
    assert resumed.state.gather[7] == (9, 0.5, None, "x")


def test_every_field_of_a_state_is_saved(blobs, tmp_path):
    first = State.first(fb.fedavg(), blobs.layout, blobs.initial(0), 0)
    changed = {
        f.name: torch.randn_like(v)
        if isinstance(v, torch.Tensor)
        else v + 1
        if isinstance(v, int)
        else {"n": 5}
        for f in fields(State)
        if f.name not in ("sent", "clients")
        for v in [getattr(first, f.name)]
    }
    Folder(tmp_path / "run").create({})
    checkpoint = Checkpoint(Folder(tmp_path / "run"), first)
    checkpoint.commit(replace(first, **changed), [], {})
    checkpoint.close()
    checkpoint = Checkpoint(Folder(tmp_path / "run"), first)
    restored, _ = checkpoint.restore(first)
    checkpoint.close()
    for name, value in changed.items():
        got = getattr(restored, name)
        assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value


def back(value, known=()):
    kinds = tree.records(list(known))
    return tree.unpack(tree.pack(value, "state", {}, kinds), {}, kinds, "cpu")


def test_trees_come_back_as_they_were():
    value = {
        "a/b": [1, 2.5, None, True, "text", float("inf")],
        "a": {"b": torch.arange(3), 5: (torch.tensor(2.0), ()), "$tensor": {"tensor": "0"}},
        "slotted": Slotted("x", {1: torch.ones(2, dtype=torch.bool)}),
        "slot": next(iter(fb.Layout.from_shapes([("w", (3, 2))]))),
    }
    got = back(value, [value["slotted"]])
    assert got["a/b"] == value["a/b"]
    assert got["a"]["$tensor"] == {"tensor": "0"}
    assert torch.equal(got["a"]["b"], torch.arange(3))
    assert list(got["a"]) == ["b", 5, "$tensor"]
    assert got["a"][5] == (torch.tensor(2.0), ())
    assert type(got["slotted"]) is Slotted
    assert torch.equal(got["slotted"].value[1], torch.ones(2, dtype=torch.bool))
    assert got["slot"] == value["slot"]


@pytest.mark.parametrize("value", [object(), {1, 2}, {1.5: 2}, b"", ClientTable({}), Slotted("a", 1)])
def test_what_cannot_be_given_back_is_refused_when_it_is_saved(value):
    with pytest.raises(RunError, match=r"state 'state.deep.0' holds a .*, which cannot be saved"):
        back({"deep": [value]})


def test_a_file_names_no_class_of_anybody_else():
    blob = tree.pack(Slotted("a", 1), "state", {}, tree.records([Slotted("", 0)]))
    for name in (b"subprocess:Popen", b"fedbraid.errors:RunError", b"fedbraid.nowhere:Thing", b"os:system"):
        old = f"{Slotted.__module__}:Slotted".encode()
        head = blob[4:].replace(old, name)
        size = int.from_bytes(blob[:4], "little") + len(name) - len(old)
        with pytest.raises(KeyError):
            tree.unpack(size.to_bytes(4, "little") + head, {}, {}, "cpu")


# Damage ------------------------------------------------------------------------------------------------


@pytest.fixture
def cut(blobs, tmp_path):
    """A run that stopped after five of ten steps, and the one that did not."""
    run = {
        "task": blobs,
        "algorithm": fb.fedadavr(memory="int8"),
        "work": WORK,
        "schedule": fb.rounds(10, clients=3),
    }
    whole = fb.simulate(**run, out=tmp_path / "whole")
    with pytest.raises(Stop):
        fb.simulate(**run, out=tmp_path / "cut", callbacks=[StopAt()])
    return tmp_path / "cut", whole, run


def test_metrics_are_made_again_whatever_is_left_of_them(cut, tmp_path):
    folder, whole, run = cut
    text = (folder / "metrics.jsonl").read_bytes()
    assert text.count(b"\n") == 5
    ends = [
        text[: len(text) // 2],
        b"",
        text + b'{"half',
        text[:-9] + b"\0" * 9,
        None,
        text.replace(b"3", b"4"),
    ]
    for i, left in enumerate(ends):
        copy = tmp_path / f"copy-{i}"
        shutil.copytree(folder, copy)
        if left is None:
            (copy / "metrics.jsonl").unlink()
        else:
            (copy / "metrics.jsonl").write_bytes(left)
        resumed = fb.resume(copy, task=run["task"])
        assert torch.equal(resumed.x, whole.x)
        assert resumed.history == whole.history
        assert (copy / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_any_prefix_of_any_file_resumes_or_is_refused(cut, tmp_path):
    folder, whole, run = cut
    refused = []
    for name in ("run.json", "metrics.jsonl", "state.db", "task.json"):
        content = (folder / name).read_bytes()
        for share in (0, 0.001, 0.3, 0.5, 0.77, 0.999):
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            shutil.copytree(folder, tmp_path / "copy")
            (tmp_path / "copy" / name).write_bytes(content[: int(share * len(content))])
            try:
                assert torch.equal(fb.resume(tmp_path / "copy", task=run["task"]).x, whole.x)
            except RunError as error:
                refused.append(str(error))
    assert len(refused) == 11  # half of them; run.json may do without its last newline
    assert all("start a new run" in text for text in refused)


def test_an_edited_run_json_is_refused(cut):
    folder, _, run = cut
    said = json.loads((folder / "run.json").read_text())
    for key, value in (("seed", 1), ("work", said["work"].replace("0.05", "0.5"))):
        (folder / "run.json").write_text(json.dumps(said | {key: value}))
        with pytest.raises(
            RunError, match=r"run.json is not as the run wrote it .* restore it or start a new run"
        ):
            fb.resume(folder, task=run["task"])
        edited = {k: v for k, v in (said | {key: value}).items() if k not in ("format", "checksum")}
        Folder(folder).write_config(edited)
        with pytest.raises(RunError, match=r"run.json is not that of the run in state.db; restore it"):
            fb.resume(folder, task=run["task"])
    (folder / "run.json").write_text(json.dumps({k: v for k, v in said.items() if k != "format"}))
    with pytest.raises(RunError, match="is a run folder of format 1, and this fedbraid reads format 3"):
        fb.resume(folder, task=run["task"])


def test_a_damaged_row_is_refused_when_it_is_read(tmp_path):
    db = Database(tmp_path / "rows.db")
    rows = ClientTable({"h": torch.zeros(4)})
    rows.attach(db, "rows", 1)
    rows.put([1, 2], {"h": torch.ones(2, 4)})
    with db.transaction():
        rows.flush()
    rows.committed()
    db.close()
    with sqlite3.connect(tmp_path / "rows.db") as sql:
        sql.execute("UPDATE rows SET data = zeroblob(16) WHERE id = 1")
    sql.close()
    db, again = Database(tmp_path / "rows.db"), ClientTable({"h": torch.zeros(4)})
    again.attach(db, "rows", 1)
    assert again.get([2])["h"].tolist() == [[1.0] * 4]
    with pytest.raises(RunError, match="row 1 of rows does not fit its checksum"):
        again.get([1])
    db.close()


def test_a_state_is_its_owners_alone(cut):
    folder, _, _ = cut
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    found = {f.name: stat.S_IMODE(f.stat().st_mode) for f in folder.iterdir()}
    assert found == dict.fromkeys(("run.json", "task.json", "metrics.jsonl", "state.db"), 0o600)


def test_a_damaged_model_is_not_exported(cut, tmp_path):
    folder = tmp_path / "whole"
    content = bytearray((folder / "model.safetensors").read_bytes())
    assert fb.export.export(folder, tmp_path / "good.safetensors").read_bytes() == content
    content[-5] ^= 16
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(RunError, match=r"model.safetensors is corrupt .* resume its run to write it again"):
        fb.export.export(folder, tmp_path / "bad.safetensors")
    assert not (tmp_path / "bad.safetensors").exists()


# The same bits -----------------------------------------------------------------------------------------


def test_run_json_says_what_the_bits_depend_on(cut):
    folder, _, _ = cut
    said = json.loads((folder / "run.json").read_text())["bits"]
    assert said["torch"] == torch.__version__
    assert said["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert said["threads"] == torch.get_num_threads()


@pytest.mark.parametrize("what", ["torch", "numpy", "processor", "instructions"])
def test_other_bits_are_asked_for(cut, monkeypatch, what):
    folder, _, run = cut
    here = bits.describe
    monkeypatch.setattr(bits, "describe", lambda engine: here(engine) | {what: "another"})
    with pytest.raises(
        RunError,
        match=rf"would resume with changed numerics: {what} was .* and is another; .*allow_numeric_changes=True",
    ):
        fb.resume(folder, task=run["task"])
    assert len(fb.resume(folder, task=run["task"], allow_numeric_changes=True).history) == 10
    said = json.loads((folder / "run.json").read_text())
    assert said["bits"][what] == "another"
    assert [(b["until"], b[what] == "another") for b in said["bits_before"]] == [(5, False)]
    monkeypatch.undo()
    assert len(fb.resume(folder, task=run["task"]).history) == 10  # there is nothing left to compute


def test_a_run_resumes_with_as_many_threads_as_it_began_with(cut, monkeypatch):
    folder, whole, run = cut
    seen = []

    class Threads:
        def step(self, record, run):
            seen.append(torch.get_num_threads())

    torch.set_num_threads(2)
    try:
        assert torch.equal(fb.resume(folder, task=run["task"], callbacks=[Threads()]).x, whole.x)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert set(seen) == {1}


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler here")
def test_compiled_code_is_named_by_its_source_flags_and_compiler(blobs, tmp_path):
    fb.simulate(
        blobs, fb.fedavg(), WORK, fb.rounds(1), engine="in_process(backend='native')", out=tmp_path / "run"
    )
    said = json.loads((tmp_path / "run" / "run.json").read_text())["bits"]
    assert len(said["kernels"]) == 16
    assert "-O3" in said["flags"]
    assert said["compiler"]
