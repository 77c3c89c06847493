"""Plain autograd, client by client: the gradients of any module, and whole steps that are those gradients' steps?"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedbraid as fb
from fedbraid.data.batches import Batch
from fedbraid.engines.autograd import LoopGradient
from fedbraid.engines.client_update import client_update
from fedbraid.engines.engine import Setup, TrainRequest, participate


class Spare(nn.Module):
    """A table whose gradient is sparse, a tied weight, and a layer that nobody asks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)
        self.unasked = nn.Linear(3, 3)
        self.there, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def forward(self, text: Tensor) -> Tensor:
        x = self.table(text).mean(1)
        return self.head(self.there(torch.tanh(self.there(x))))


def some(rows: int = 40) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(9, (rows, 5), generator=draw), torch.randint(3, (rows,), generator=draw)


@pytest.fixture
def task() -> fb.Task:
    x, y = some()
    return fb.Task.from_table(Spare, x, y, torch.arange(40), [0, 13, 40])


def batch(task: fb.Task, empty: bool = False) -> Batch:
    rows = torch.arange(14).view(2, 7)
    weight = torch.ones(2, 7)
    weight[1, 4:] = 0
    if empty:
        weight[1] = 0
    return Batch(task.inputs, task.targets, rows, weight)


def by_hand(task: fb.Task, y: Tensor, rows: Tensor) -> Tensor:
    """One client's gradient in double precision."""
    module = task.layout.load(task.module(), y).double()
    nn.functional.cross_entropy(module(task.inputs[rows]), task.targets[rows]).backward()
    given = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in module.parameters()]
    return torch.cat([g.flatten() for g in given]).float()


def test_gradients_of_sparse_tied_and_spare_parameters(task: fb.Task) -> None:
    y, grad, given = task.vector(0) + torch.zeros(2, 1), LoopGradient(task), batch(task)
    for _ in range(2):  # the second time nothing of the first is left
        G, _ = grad(y, given)
        for i, count in enumerate((7, 4)):
            want = by_hand(task, y[i], given.rows[i, :count])
            torch.testing.assert_close(G[i], want, rtol=1e-4, atol=1e-6)


def test_a_client_without_samples_stays_where_it_is(task: fb.Task) -> None:
    y, grad = task.vector(0).repeat(2, 1), LoopGradient(task)
    grad(y, batch(task))
    G, losses = grad(y, batch(task, empty=True))
    assert not G[1].any()
    assert losses[1] == 0
    before = y.clone()
    grad.descend(y, batch(task, empty=True), 0.1)
    assert torch.equal(y[1], before[1])
    assert not torch.equal(y[0], before[0])


def test_a_whole_step_is_the_step_of_the_gradient(task: fb.Task) -> None:
    y = task.vector(0).repeat(2, 1)
    G, want = LoopGradient(task)(y.clone(), batch(task))
    expected = y - 0.1 * G
    losses = LoopGradient(task).descend(y, batch(task), 0.1)
    assert torch.equal(losses, want)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-7)


class Bent(fb.Rule):
    """The gradient, but touched: no whole step may be taken."""

    def step(self, g, y, s, ctx):
        return 1.0 * g, s


WORKS = [
    fb.Work(lr=0.1, epochs=2, batch=4),
    fb.Work(lr=0.1, epochs=2, batch=4, momentum=0.5),
    fb.Work(lr=0.1, epochs=2, batch=4, weight_decay=0.1),
    fb.Work(lr=0.1, epochs=2, batch=4, clip=0.01),
    fb.Work(lr=0.1, epochs=2, batch=4, optimizer="adam"),
]


@pytest.mark.parametrize("work", WORKS, ids=["plain", "momentum", "decay", "clip", "adam"])
def test_whole_steps_are_taken_only_where_nothing_bends_them(
    task: fb.Task, work: fb.Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    whole = LoopGradient.descend
    monkeypatch.setattr(LoopGradient, "descend", lambda self, *given: taken.append(1) or whole(self, *given))
    who = participate(Setup(fb.fedavg(), task, work, 0), np.array([1]), 0)
    order = TrainRequest(who, {"x": task.vector(0)}, {})
    bent = client_update(Setup(fb.Algorithm(rule=Bent()), task, work, 0), LoopGradient(task), order)
    assert not taken
    plain = client_update(Setup(fb.fedavg(), task, work, 0), LoopGradient(task), order)
    assert bool(taken) == (work == WORKS[0])
    torch.testing.assert_close(plain.uploads["delta"], bent.uploads["delta"], rtol=1e-4, atol=3e-6)
    torch.testing.assert_close(plain.loss, bent.loss)
