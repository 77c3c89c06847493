"""Do frames, dicts and plain arrays become tasks by a partition or by a column of client ids?"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedbraid as fb
from fedbraid.errors import ConfigError, DataError

WORK = fb.Work(lr=0.1, batch=4)
USERS = ["ann", "bob", "cy"]


def table(n=40, seed=0):
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 3, n)
    return {
        "height": draw.normal(size=n) + y,
        "width": draw.normal(size=n).astype(np.float32),
        "kind": y,
        "user": np.array([USERS[i % 3] for i in range(n)]),
    }


def frame(library, **options):
    return pytest.importorskip(library, reason="the extra frames is not installed").DataFrame(
        table(**options)
    )


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_frame_by_column(library):
    data, test = frame(library), frame(library, n=15, seed=1)
    torch.manual_seed(0)
    line = nn.Linear(2, 3)
    task = fb.Task.from_table(line, data, "kind", by="user", test=test)
    plain = table()
    x = np.stack([plain["height"], plain["width"]], 1).astype(np.float32)
    rows = [np.flatnonzero(plain["user"] == u) for u in USERS]
    tested = table(15, 1)
    xt = np.stack([tested["height"], tested["width"]], 1).astype(np.float32)
    want = fb.Task.from_table(line, x, plain["kind"], rows, test=(xt, tested["kind"]))
    assert task.fingerprint == want.fingerprint
    cut = fb.Task.from_table(line, data[["height", "width"]], data["kind"], by=data["user"])
    assert torch.equal(cut.inputs, want.inputs)
    assert cut.sizes.tolist() == want.sizes.tolist()
    assert fb.simulate(task, fb.fedavg(), WORK, fb.rounds(3)).last("accuracy") >= 0


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_test_frame_has_the_training_tables_columns_in_its_order(library):
    data, test = frame(library), frame(library, n=15, seed=1)
    turned = test[["user", "kind", "width", "height"]]
    one, two = (fb.Task.from_table(nn.Linear(2, 3), data, "kind", by="user", test=t) for t in (test, turned))
    assert torch.equal(one.test[0], two.test[0])
    with pytest.raises(DataError, match="the test set has no column 'width'; it has 'height'"):
        fb.Task.from_table(nn.Linear(2, 3), data, "kind", by="user", test=test[["height", "kind"]])
    ids = fb.Task.from_table(
        nn.Linear(2, 3), data[["height", "width", "kind"]], "kind", by=np.arange(40) % 4, test=turned
    )
    assert ids.clients == 4
    assert torch.equal(ids.test[0], one.test[0])


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2, 3)

    def forward(self, height, width):
        return self.out(torch.stack([height, width], -1))


def test_a_dict_of_arrays_calls_by_keyword():
    task = fb.Task.from_table(Sum, table(), "kind", by="user", clients=2, test=table(15, 1), seed=3)
    assert task.clients == 2
    assert set(task.inputs) == set(task.test[0]) == {"height", "width"}
    assert len(fb.simulate(task, fb.fedavg(), WORK, fb.rounds(2)).history) == 2


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, np.ndarray.tolist])
def test_partitions_of_plain_arrays(kind):
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(200, 5)).astype(np.float32), draw.integers(0, 4, 200)
    share = fb.partition.dirichlet(0.3)
    task = fb.Task.from_table(lambda: nn.Linear(5, 4), kind(x), kind(y), partition=share, clients=20, seed=7)
    want = share(y, 20, seed=7)
    assert task.clients == 20
    assert torch.equal(task.rows, torch.from_numpy(np.concatenate(want)))
    said = fb.Task.from_table(
        lambda: nn.Linear(5, 4), kind(x), kind(y), partition="dirichlet(0.3)", clients=20, seed=7
    )
    assert said.fingerprint == task.fingerprint


def test_regression_is_dealt_at_random():
    x, y = np.zeros((30, 5), np.float32), np.zeros(30, np.float32)
    task = fb.Task.from_table(
        lambda: nn.Linear(5, 1), x, y, partition=fb.partition.quantity_skew(1.0), clients=4, loss="mse"
    )
    assert task.clients == 4
    assert len(fb.partition.label_chunks(2)([0, 0, 1, 1, 2, 2, 3, 3], 2)) == 2


def test_a_mapped_file_stays_mapped(tmp_path):
    big = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (300, 50))
    big[:] = np.random.default_rng(0).normal(size=big.shape)
    big.flush()
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    task = fb.Task.from_table(
        lambda: nn.Linear(50, 3), mapped, np.arange(300) % 3, partition=fb.partition.iid(), clients=5
    )
    assert task.inputs.data_ptr() == mapped.ctypes.data
    assert len(fb.simulate(task, fb.fedavg(), WORK, fb.rounds(2)).history) == 2


def line():
    return nn.Linear(2, 3)


X, Y = np.zeros((6, 2), np.float32), np.arange(6) % 3
BAD = {
    "nobody": (lambda: fb.Task.from_table(line, X, Y), "needs a partition"),
    "among how many": (lambda: fb.Task.from_table(line, X, Y, partition="iid"), "give clients="),
    "no such column": (
        lambda: fb.Task.from_table(line, table(), "kind", by="person"),
        "no column 'person'; it has 'height'",
    ),
    "no such target": (lambda: fb.Task.from_table(line, table(), "sort", by="user"), "no column 'sort'"),
    "an id is missing": (
        lambda: fb.Task.from_table(line, X, Y, by=["a", "b", None, "a", "b", "a"]),
        "row 2 has no client id",
    ),
    "too few ids": (lambda: fb.Task.from_table(line, X, Y, by=["a", "b"]), "one id for each"),
    "classes that are none": (
        lambda: fb.Task.from_table(line, X, Y / 2, partition="dirichlet(1.0)", clients=2, loss="mse"),
        "partitions rows by class",
    ),
    "an option": (lambda: fb.Task.from_table(line, X, Y, [[0]], test=table()), "test set"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(case):
    make, said = BAD[case]
    with pytest.raises((DataError, ConfigError), match=said):
        make()


def test_text_in_a_frame():
    pandas = pytest.importorskip("pandas", reason="the extra frames is not installed")
    with pytest.raises(DataError, match="column 'user' does not hold numbers"):
        fb.Task.from_table(line, pandas.DataFrame(table()), "kind", partition="iid", clients=2)
