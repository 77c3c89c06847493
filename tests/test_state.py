"""Is any state that parts may hold given back as it was committed?"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch

import fedbraid as fb
from fedbraid.core.gather import Gather, Mean
from fedbraid.core.rows import Rows
from fedbraid.errors import RunError
from fedbraid.run import tree
from fedbraid.run.checkpoint import Checkpoint, Folder, rows_of
from fedbraid.run.state import State

WORK = fb.Work(lr=0.05, epochs=1, batch=8)


@dataclass(frozen=True)
class Pair:
    rows: Rows
    both: tuple[Any, ...]


@dataclass(frozen=True)
class Slotted:
    __slots__ = ("name", "value")
    name: str
    value: Any


@dataclass(frozen=True)
class Around(Gather):
    """A gather around another, whose state lies deep inside a record of its own."""

    inner: Gather = field(default_factory=Mean)

    def init(self, x, layout):
        return {"deep": [Pair(Rows({"n": torch.zeros(1, dtype=torch.int64)}), (self.inner.init(x, layout),))]}

    def zero(self, x):
        return self.inner.zero(x)

    def add(self, acc, up, s, x):
        pair = s["deep"][0]
        seen = pair.rows.get(up.clients)["n"]
        pair.rows.put(up.clients, {"n": seen + 1})
        return self.inner.add(acc, up, pair.both[0], x)

    def close(self, acc, s, info):
        u, inner = self.inner.close(acc, s["deep"][0].both[0], info)
        return u, {"deep": [replace(s["deep"][0], both=(inner,))], 7: (info.t, 0.5, None, "x")}


class Stop(Exception):
    pass


class StopAt:
    def step(self, record, run):
        if record["step"] == 6:
            raise Stop


def test_a_gather_around_a_memory_resumes(blobs, tmp_path):
    base = fb.fedadavr(memory="int8")
    algorithm = replace(base, gather=Around(base.gather), name="")
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


@pytest.mark.parametrize("value", [object(), {1, 2}, {1.5: 2}, b"", Rows({}), Slotted("a", 1)])
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
