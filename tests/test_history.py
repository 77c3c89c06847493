"""The records of a run: a list to look at, a file where they are many."""

from __future__ import annotations

import pickle
import tracemalloc

import pytest

from fedbraid.run import history
from fedbraid.run.history import History


def records(count: int) -> list[history.Record]:
    return [
        {"step": k + 1, "clients": [k, 7, 300 + k], "loss": 0.1 * k, "up": {"delta": k}} for k in range(count)
    ]


@pytest.mark.parametrize("kept", [10, 2**22])
def test_reads_like_a_list(kept, monkeypatch):
    monkeypatch.setattr(history, "MEMORY_BYTES", kept)
    want, got = records(9), History(records(5))
    got.extend(records(9)[5:])
    assert list(got) == want
    assert got == want
    assert want == got
    assert got == History(want)
    assert got != want[:-1]
    assert (len(got), got[0], got[-1], got[2:5], got[::-3]) == (9, want[0], want[-1], want[2:5], want[::-3])
    assert list(reversed(got)) == want[::-1]
    assert pickle.loads(pickle.dumps(got)) == want
    with pytest.raises(IndexError):
        got[9]
    with pytest.raises(IndexError):
        got[-10]


def test_reading_between_writing():
    got = History()
    for record in records(50):
        got.append(record)
        assert got[0]["step"] == 1
        assert got[-1] == record


def test_what_is_long_is_not_in_memory(monkeypatch):
    """A thousand rounds of a thousand clients are ten megabytes and more as dicts."""
    monkeypatch.setattr(history, "MEMORY_BYTES", 2**16)
    got = History()
    tracemalloc.start()
    try:
        for k in range(1000):
            got.append({"step": k, "clients": list(range(1000, 2000)), "loss": float(k)})
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 2**18
    assert sum(r["loss"] for r in got) == sum(range(1000))
