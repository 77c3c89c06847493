"""Are rows by client id a plain dict, whatever is cached, committed, dropped or opened again?"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedbraid as fb
from fedbraid.core.client_table import ClientTable, RowArena
from fedbraid.errors import RunError
from fedbraid.run.database import Database

LAYOUT = fb.Layout.from_shapes([("w", (3, 2)), ("b", (3,))])
CODECS = {"None": None, "fp16": fb.codecs.fp16(), "int8": fb.codecs.int8(), "int4": fb.codecs.int4()}
DEFAULT = {"count": torch.full((1,), -1.0), "h": torch.linspace(-1, 1, 9)}


class Model:
    """What Rows should be: a dict, and the dict as it was at the last commit."""

    def __init__(self, codec):
        self.codec, self.now, self.kept = codec, {}, {}

    def stored(self, v):
        return (
            v if self.codec is None else self.codec.from_rows(self.codec.to_rows(v[None], LAYOUT), LAYOUT)[0]
        )


def fresh(codec):
    return ClientTable(DEFAULT, codec, LAYOUT)


clients = st.lists(st.integers(0, 11), min_size=1, max_size=5, unique=True)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("put"), clients, st.integers(0, 2**16)),
        st.tuples(st.just("get"), clients),
        st.tuples(st.just("drop"), st.integers(0, 11)),
        st.tuples(st.just("commit")),
        st.tuples(st.just("fail")),
        st.tuples(st.just("reopen")),
    ),
    max_size=25,
)


def agree(rows, model, ids):
    got, counts = rows.get(ids), torch.tensor(rows.peek(ids, "count"))[:, None]
    for i, client in enumerate(ids):
        want = model.now.get(client, DEFAULT)
        assert torch.equal(got["count"][i], want["count"])
        assert torch.equal(counts[i], want["count"])
        assert torch.equal(got["h"][i], want["h"])


def put(rows, model, ids, seed):
    draw = np.random.default_rng(seed)
    h = torch.from_numpy(draw.normal(size=(len(ids), 9)).astype(np.float32))
    count = torch.from_numpy(draw.integers(0, 99, (len(ids), 1)).astype(np.float32))
    rows.expect()  # touches nobody's row
    rows.put(ids, {"count": count, "h": h})
    for i, client in enumerate(ids):
        model.now[client] = {"count": count[i], "h": model.stored(h[i])}


@pytest.fixture(params=["one chunk", "chunks of 3 rows", "long rows"])
def chunks(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "one chunk":
            patch.setattr(RowArena, "CHUNK", 30)
        if request.param == "long rows":
            patch.setattr(RowArena, "LONG", 1)
        yield


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=actions)
def test_in_memory_rows_are_a_dict(codec, actions):
    rows, model = fresh(CODECS[codec]), Model(CODECS[codec])
    for action, *given_ in actions:
        if action == "put":
            put(rows, model, *given_)
        elif action == "drop":
            rows.drop(*given_)
            model.now.pop(*given_, None)
        elif action == "get":
            agree(rows, model, *given_)
        assert len(rows) == len(model.now)
    agree(rows, model, list(range(12)))
    assert rows.ids() == sorted(model.now)


def failing(db, rows):
    with db.transaction():
        rows.flush()
        raise ZeroDivisionError


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=actions, limit=st.sampled_from([1, 3, None]))
def test_rows_on_disk_are_a_dict(codec, alone, actions, limit):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.db"
        db = Database(path)
        rows, model = fresh(CODECS[codec]), Model(CODECS[codec])
        rows.attach(db, "rows", limit, alone)
        for action, *given_ in actions:
            if action == "put":
                put(rows, model, *given_)
            elif action == "drop":
                rows.drop(*given_)
                model.now.pop(*given_, None)
            elif action == "get":
                agree(rows, model, *given_)
            elif action == "commit":
                with db.transaction():
                    rows.flush()
                rows.committed()
                model.kept = dict(model.now)
            elif (
                action == "fail"
            ):  # a step that is rolled back changes neither the file nor what is in memory
                with pytest.raises(ZeroDivisionError):
                    failing(db, rows)
            elif not alone:  # reopened: what was not committed is gone
                db.close()
                db, rows, model.now = Database(path), fresh(CODECS[codec]), dict(model.kept)
                rows.attach(db, "rows", limit, alone)
            assert len(rows) == len(model.now)
        agree(rows, model, list(range(12)))
        assert rows.ids() == sorted(model.now)
        assert all((client in rows) == (client in model.now) for client in range(12))
        db.close()


def test_the_cache_stays_small(tmp_path):
    db = Database(tmp_path / "rows.db")
    rows = fresh(None)
    rows.attach(db, "rows", 8)
    for k in range(50):
        ids = list(range(4 * k, 4 * k + 4))
        rows.put(ids, {"count": torch.full((4, 1), float(k)), "h": torch.full((4, 9), float(k))})
        with db.transaction():
            rows.flush()
        rows.committed()
        assert len(rows._slot) <= 8
    assert len(rows._slot) + len(rows._free) <= 32
    assert len(rows) == 200
    assert rows.get([0, 5, 199])["count"].squeeze(1).tolist() == [0, 1, 49]
    db.close()


def test_a_row_of_another_length_is_refused(tmp_path):
    db = Database(tmp_path / "rows.db")
    rows = fresh(None)
    rows.attach(db, "rows", None)
    with db.transaction():
        db.write("rows", [3], np.zeros((1, 7), np.uint8))
    with pytest.raises(RunError, match="a stored row of 7 bytes should have 40; the run folder is corrupt"):
        rows.get([3])
    db.close()


@pytest.mark.parametrize(
    ("name", "share"), [("None", 1.01), ("fp16", 0.505), ("int8", 0.255), ("int4", 0.13)]
)
def test_bytes_on_disk_of_lenet_rows(tmp_path, name, share):
    sizes = [("c1.w", (6, 1, 5, 5)), ("c1.b", (6,)), ("c2.w", (16, 6, 5, 5)), ("c2.b", (16,)), ("f1.w", (120, 400)),
             ("f1.b", (120,)), ("f2.w", (84, 120)), ("f2.b", (84,)), ("f3.w", (10, 84)), ("f3.b", (10,))]  # fmt: skip
    layout = fb.Layout.from_shapes(sizes)
    assert layout.size == 61706
    rows = ClientTable({"weight": torch.zeros(1), "y": torch.zeros(layout.size)}, CODECS[name], layout)
    db = Database(tmp_path / "rows.db", rows.row_bytes)
    rows.attach(db, "rows", 64)
    y = torch.randn(50, layout.size, generator=torch.Generator().manual_seed(0))
    count = 400
    for lo in range(0, count, 50):
        rows.put(range(lo, lo + 50), {"weight": torch.ones(50, 1), "y": y})
        with db.transaction():
            rows.flush()
        rows.committed()
    db.close()
    used = sum(f.stat().st_size for f in tmp_path.iterdir())
    assert used <= share * count * layout.size * 4


KINDS = {
    "count": torch.tensor([2**60 + 1]),
    "seen": torch.tensor([True, False, True]),
    "half": torch.tensor([0.5, 1.5, -2.0], dtype=torch.float16),
    "sum": torch.tensor([1 / 3, 2 / 3], dtype=torch.float64),
    "h": torch.linspace(-1, 1, 9),
    "y": torch.arange(9.0),
    "turns": torch.arange(9),
}


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("codec", CODECS)
def test_a_row_holds_numbers_of_any_kind(tmp_path, codec):
    def same(rows, ids, want):
        got = rows.get(ids)
        for name in KINDS.keys() - ({"h", "y"} if CODECS[codec] else set()):
            assert got[name].dtype == KINDS[name].dtype
            assert torch.equal(got[name], torch.stack([w[name] for w in want]))
        assert torch.allclose(got["y"], torch.stack([w["y"] for w in want]), atol=3)
        assert rows.peek(ids, "count") == [int(w["count"]) for w in want]

    other = {name: v.flip(0) for name, v in KINDS.items()} | {"count": torch.tensor([-(2**61) - 3])}
    db = Database(tmp_path / "rows.db")
    rows = ClientTable(KINDS, CODECS[codec], LAYOUT)
    rows.attach(db, "rows", None)
    for client in range(7):
        rows.put([client], {name: v[None] for name, v in other.items()})
    same(rows, [3], [other])
    same(rows, [9, 6, 0], [KINDS, other, other])
    with db.transaction():
        rows.flush()
    again = ClientTable(KINDS, CODECS[codec], LAYOUT)
    again.attach(db, "rows", None)
    same(again, [5, 8, 2], [other, KINDS, other])
    db.close()
