"""Is what comes before the first trained layer computed once for each sample, and is nothing else changed by it?"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedbraid as fb
from fedbraid.data.augment import Flip
from fedbraid.data.batches import Batch
from fedbraid.engines import frozen_features as frozen
from fedbraid.engines.autograd import LoopGradient

WORK = fb.Work(lr=0.1, batch=4, epochs=2)
LOOP = "in_process(backend='loop')"


class Body(nn.Module):
    """A frozen part that counts the samples that go through it, and gives a dict."""

    passes = 0

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(drop), nn.Linear(6, 4))

    def forward(self, x):
        Body.passes += len(x)
        return {"hidden": self.net(x), "norm": x.norm(dim=1)}


class Model(nn.Module):
    def __init__(self, drop: float = 0.0, first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = Body(drop).requires_grad_(False)
        self.first = nn.Linear(5, 5) if first else nn.Identity()
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 3))

    def forward(self, x):
        out = self.body(self.first(x))
        return self.head(out["hidden"] * out["norm"][:, None])


def task(clients=4, each=10, **options):
    draw = np.random.default_rng(0)
    model = options.pop("model", Model)
    data = [
        (draw.normal(size=(each, 5)).astype(np.float32), draw.integers(0, 3, each)) for _ in range(clients)
    ]
    return fb.Task.from_arrays(model, data, test=data[0], **options)


def run(t, rounds=5, **options):
    return fb.simulate(t, fb.fedavg(), WORK, fb.rounds(rounds, clients=3), engine=LOOP, **options)


def test_a_sample_goes_through_the_body_once():
    t = task()
    assert t.stochastic  # found out by a pass of its own
    Body.passes = 0
    run(t, rounds=1)
    before = Body.passes
    run(t, rounds=20)
    probes = before - 30 - 10  # three clients of ten, and the test set
    assert Body.passes - before == 40 + 10 + probes


def test_the_model_is_the_same(monkeypatch):
    want = run(task())
    monkeypatch.setattr(frozen.FrozenFeatureCache, "_of", lambda *_: None)
    plain = run(task())
    torch.testing.assert_close(want.x, plain.x, rtol=1e-5, atol=1e-6)
    assert want.history[-1]["accuracy"] == plain.history[-1]["accuracy"]
    assert want.history[-1]["loss"] == pytest.approx(plain.history[-1]["loss"], rel=1e-5)


def test_bits_do_not_depend_on_when_a_sample_was_seen_first():
    t = task(clients=3, each=70)
    rows = torch.randperm(210)[None]
    y = t.initial(0)[None]
    late, early = LoopGradient(t), LoopGradient(t)
    for k in range(0, 210, 7):
        early(y, Batch(t.inputs, t.targets, rows[:, k : k + 7], noise=np.zeros(1, np.uint64)))
    batch = Batch(t.inputs, t.targets, rows[:, 100:120], noise=np.zeros(1, np.uint64))
    assert torch.equal(late(y, batch)[0], early(y, batch)[0])


def test_a_table_too_large_for_memory_is_a_file(monkeypatch):
    want = run(task())
    monkeypatch.setattr(frozen, "IN_MEMORY", 0)
    assert torch.equal(run(task()).x, want.x)


def mixing():
    return nn.Sequential(Mixes().requires_grad_(False), nn.Linear(4, 3))


class Mixes(nn.Module):
    """Subtracts the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 4)

    def forward(self, x):
        return self.fc(x - x.mean(0))


def with_statistics():
    return nn.Sequential(
        nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).requires_grad_(False), nn.Linear(4, 3)
    )


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        (Model, ["body"]),
        (lambda: Model(drop=0.5), []),
        (lambda: Model(first=True), []),
        (lambda: nn.Linear(5, 3), []),
        (with_statistics, ["0.0"]),
        (mixing, []),
    ],
    ids=["still", "draws", "reads what is trained", "trained", "statistics", "mixes samples"],
)
def test_what_may_change_is_computed_anew(model, kept):
    found = LoopGradient(task(model=model, buffers="average")).frozen
    assert [m.name for m in found.modules] == kept if kept else found is None


def test_augmented_images_are_computed_anew():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4).requires_grad_(False), nn.Linear(4, 3))
    x, y = torch.randn(8, 1, 4, 4), torch.randint(3, (8,))
    assert LoopGradient(fb.Task.from_arrays(model, [(x, y)])).frozen is not None
    assert LoopGradient(fb.Task.from_arrays(model, [(x, y)], augment=Flip())).frozen is None
