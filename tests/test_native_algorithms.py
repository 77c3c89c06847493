"""Do algorithms end where their definitions in NumPy end, with native gradients of a recurrent net and of attention?

The interpreter of `pairs.py` runs each part; the gradients that it is given are autograd's in double precision.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pairs
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedbraid as fb
from fedbraid_native import build

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler is installed")


class Reads(nn.Module):
    """A recurrent net over four words, its last state into two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.net, self.head = nn.Embedding(5, 3), nn.GRU(3, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, text):
        return self.head(self.net(self.words(text))[0][:, -1])


class Attends(nn.Module):
    """A transformer's layer over four words, their mean into two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4), nn.Linear(4, 2)
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, 0.0, batch_first=True)

    def forward(self, text):
        return self.head(self.layer(self.words(text)).mean(1))


class Speaks(nn.Module):
    """A block of a language model as people write them: causal attention by a function, norms first, learned places."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(5, 4), nn.Parameter(0.1 * torch.randn(4, 4))
        self.norm, self.qkv, self.out = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 4)
        self.think = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, text):
        x = self.words(text) + self.places
        b, t, c = x.shape
        q, k, v = (z.view(b, t, 2, c // 2).transpose(1, 2) for z in self.qkv(self.norm(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return self.head((x + self.think(x)).mean(1))


@pytest.fixture(params=[Reads, Attends, Speaks], scope="module")
def problem(request, tmp_path_factory):
    """The problem of `pairs.py`, with this model and words in the place of its own."""
    draw = np.random.default_rng(7)
    data = [
        (draw.integers(0, 5, (n, 4)), (draw.normal(size=(n, 2)) + 0.3 * i).astype(np.float32))
        for i, n in enumerate(pairs.SIZES)
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = request.param()
    task = fb.Task.from_arrays(model, data, loss="mse")
    exact = task.module().double()

    def gradient(x, rows):
        task.layout.load(exact, torch.from_numpy(x))
        exact.zero_grad()
        out = exact(task.inputs[rows])
        task.per_example(out, task.targets[rows].double()).mean().backward()
        return torch.cat([p.grad.flatten() for p in exact.parameters()]).numpy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(pairs, "MAKE", lambda: fb.Task.from_arrays(model, data, loss="mse"))
        patch.setattr(pairs, "X0", task.start.double().numpy())
        patch.setattr(pairs, "SLOTS", [(s.offset, s.end, len(s.shape)) for s in task.layout])
        patch.setattr(pairs, "gradient", gradient)
        yield


PARTS = [(axis, part) for axis in ("rule", "gather", "optimizer", "adjuster") for part in pairs.AXES[axis]]


@pytest.mark.parametrize(("axis", "part"), PARTS, ids=lambda p: p)
def test_a_part_is_as_it_is_defined(problem, axis, part):
    case = pairs.make(pairs.NEUTRAL | {axis: part}, seed=2)
    came = pairs.check(replace(case, backend="native"))
    assert came.kind == "agrees", f"{case}: {came.text}"
    assert came.moved > 1e-3
