"""Is a model one vector and back: names, offsets, views, ties, frozen parts, running statistics?"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedbraid as fb
from fedbraid.errors import ConfigError, DataError

LOOP = "in_process(backend='loop')"


class Net(nn.Module):
    """A frozen layer, a tied pair, a batch norm or none."""

    def __init__(self, norm: bool = False, freeze: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.again = nn.Linear(4, 4, bias=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.again.weight
        self.last = nn.Linear(4, 3)
        if freeze:
            self.first.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.tied(self.again(self.norm(self.first(x))))))


def clients(sizes=(7, 12, 20), seed=0):
    draw = np.random.default_rng(seed)
    return [(draw.normal(size=(n, 5)).astype(np.float32), draw.integers(0, 3, n)) for n in sizes]


def test_names_shapes_and_offsets():
    layout = fb.Layout.of(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1, bias=False)))
    assert layout.names == ("0.weight", "0.bias", "2.weight")
    assert [s.shape for s in layout] == [(2, 3), (2,), (1, 2)]
    assert [(s.offset, s.end) for s in layout] == [(0, 6), (6, 8), (8, 10)]
    assert (layout.size, len(layout)) == (10, 3)
    assert layout == fb.Layout.from_shapes([("0.weight", (2, 3)), ("0.bias", (2,)), ("2.weight", (1, 2))])
    assert hash(layout) == hash(fb.Layout.from_shapes([(s.name, s.shape) for s in layout]))


def test_flatten_and_load_are_inverse():
    module, other = Net(), Net()
    layout = fb.Layout.of(module)
    x = layout.flatten(module)
    assert x.dtype == torch.float32
    assert not torch.equal(layout.flatten(other), x)
    assert layout.load(other, x) is other
    for mine, theirs in zip(module.parameters(), other.parameters()):
        assert torch.equal(mine, theirs)
    x.zero_()
    assert layout.flatten(module).any()  # a copy, not a view


def test_views_share_memory_and_keep_leading_axes():
    layout = fb.Layout.of(nn.Linear(3, 2))
    block = torch.arange(32.0).view(4, 8)
    views = layout.views(block)
    assert views["weight"].shape == (4, 2, 3)
    assert views["bias"].shape == (4, 2)
    views["bias"][2] = -1
    assert block[2, 6:].tolist() == [-1, -1]
    assert layout.views(block[0])["weight"].shape == (2, 3)
    with pytest.raises(ConfigError, match="7 numbers does not fit a layout of 8"):
        layout.views(torch.zeros(7))


def test_a_module_of_another_shape_is_named():
    layout = fb.Layout.of(nn.Linear(3, 2))
    with pytest.raises(ConfigError, match="'weight' is missing or has another shape"):
        layout.load(nn.Linear(2, 2), torch.zeros(8))


def test_tied_parameters_appear_once_and_stay_tied():
    layout = fb.Layout.of(Net())
    assert layout.names == ("first.weight", "first.bias", "again.weight", "last.weight", "last.bias")
    task = fb.Task.from_arrays(Net, clients())
    result = fb.simulate(task, fb.fedavg(), fb.Work(lr=0.1), fb.rounds(2), engine=LOOP)
    model = result.model()
    assert model.tied.weight is model.again.weight
    by_vmap = fb.simulate(
        task, fb.fedavg(), fb.Work(lr=0.1), fb.rounds(2), engine="in_process(backend='vmap')"
    )
    assert torch.allclose(result.x, by_vmap.x, atol=1e-6)


@pytest.mark.parametrize("backend", ["loop", "vmap", "auto"])
def test_frozen_parameters_are_left_out_and_left_alone(backend):
    module = Net(freeze=True)
    before = module.first.weight.clone()
    task = fb.Task.from_arrays(module, clients())
    assert task.layout.names == ("again.weight", "last.weight", "last.bias")
    work = fb.Work(lr=0.1, weight_decay=0.1, momentum=0.9)
    result = fb.simulate(task, fb.fedadam(), work, fb.rounds(2), engine=f"in_process(backend={backend!r})")
    assert torch.equal(result.model().first.weight, before)
    assert not torch.equal(result.model().last.weight, module.last.weight)
    assert not result.model().first.weight.requires_grad


def test_batch_norm_is_refused_by_name():
    with pytest.raises(DataError, match=r"BatchNorm1d at 'norm'.*use GroupNorm or buffers=\"average\""):
        fb.Layout.of(Net(norm=True))
    with pytest.raises(DataError, match="BatchNorm1d at 'norm'"):
        fb.Task.from_arrays(lambda: Net(norm=True), clients())
    with pytest.raises(ConfigError, match="got 'averge'"):
        fb.Layout.of(Net(), buffers="averge")
    with pytest.raises(DataError, match="momentum=None"):
        fb.Layout.of(nn.BatchNorm1d(4, momentum=None), buffers="average")
    assert fb.Layout.of(nn.BatchNorm1d(4, track_running_stats=False)).size == 8


def test_running_statistics_come_last_and_are_averaged():
    module = Net(norm=True)
    layout = fb.Layout.of(module, buffers="average")
    assert layout.names[-2:] == ("norm.running_mean", "norm.running_var")
    assert layout.buffers == slice(layout.size - 8, layout.size)
    pairs = clients()
    task = fb.Task.from_arrays(module, pairs, buffers="average")
    work = fb.Work(lr=0.1, batch=None, momentum=0.9, weight_decay=0.5, clip=0.1)
    cohort = fb.rounds(1, clients=[[0, 1, 2]])
    one = fb.simulate(task, fb.fedavg(), work, cohort, engine=LOOP).model()
    assert torch.equal(module.norm.running_mean, torch.zeros(4))
    hidden = [module.first(torch.from_numpy(x)) for x, _ in pairs]
    shares = np.array([7, 12, 20]) / 39
    mean = sum(p * 0.1 * h.mean(0) for p, h in zip(shares, hidden))
    var = sum(p * (0.9 + 0.1 * h.var(0)) for p, h in zip(shares, hidden))
    assert torch.allclose(one.norm.running_mean, mean.detach().float(), atol=1e-6)
    assert torch.allclose(one.norm.running_var, var.detach().float(), atol=1e-6)


def test_server_optimisers_leave_running_statistics_alone():
    task = fb.Task.from_arrays(lambda: Net(norm=True), clients(), buffers="average")
    work, cohort = fb.Work(lr=0.1, batch=None), fb.rounds(1, clients=[[0, 1, 2]])
    at = task.layout.buffers
    plain = fb.simulate(task, fb.fedavg(), work, cohort, engine=LOOP).x[at]
    for algorithm in (fb.fedavg(lr=0.1), fb.fedadam(lr=0.5), fb.fedlamb(), fb.fedavgm(momentum=0.5, lr=2)):
        assert torch.allclose(fb.simulate(task, algorithm, work, cohort, engine=LOOP).x[at], plain, atol=1e-6)


def test_batch_norm_does_not_depend_on_the_block_nor_the_process():
    task = fb.Task.from_arrays(lambda: Net(norm=True), clients((8, 12, 20)), buffers="average")
    work = fb.Work(lr=0.1, batch=4)
    runs = [
        fb.simulate(task, fb.fedavg(), work, fb.rounds(2, clients=3), engine=engine).x
        for engine in (LOOP, "in_process(block=3)", "pool(workers=2)")
    ]
    assert torch.allclose(runs[0], runs[1], atol=1e-6)
    assert torch.allclose(runs[0], runs[2], atol=1e-6)
    with pytest.raises(ConfigError, match=r"vmap cannot follow running statistics.*backend='loop'"):
        fb.simulate(task, fb.fedavg(), work, fb.rounds(1), engine="in_process(backend='vmap')")


def test_a_model_in_double_is_trained_in_float32():
    module = nn.Linear(5, 3).double()
    assert fb.Layout.of(module).flatten(module).dtype == torch.float32
    result = fb.simulate(
        fb.Task.from_arrays(module, clients()), fb.fedavg(), fb.Work(lr=0.1), fb.rounds(2), engine=LOOP
    )
    assert result.x.dtype == torch.float32
    assert module.weight.dtype == torch.float64
    assert result.model().weight.dtype == torch.float32


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(DataError, match=r"no trainable parameter; set requires_grad=True"):
        fb.Layout.of(nn.Flatten())
    with pytest.raises(DataError, match="no trainable parameter"):
        fb.Task.from_arrays(nn.Linear(5, 3).requires_grad_(False), clients())


def test_fingerprints_tell_models_apart():
    rows = [("a", (2, 3)), ("b", (4,))]
    others = [
        [("a", (3, 2)), ("b", (4,))],
        [("b", (4,)), ("a", (2, 3))],
        [("a", (2, 3)), ("c", (4,))],
        rows[:1],
    ]
    prints = {fb.Layout.from_shapes(r).fingerprint for r in [rows, *others]}
    assert len(prints) == 5
    assert all(len(p) == 8 for p in prints)
    assert fb.Layout.from_shapes(rows).fingerprint in prints
