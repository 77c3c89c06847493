"""Do compiled gradients equal autograd's, whatever the architecture, batch, mask and number of threads?"""

from __future__ import annotations

import os
import platform
import random
import stat
import subprocess
import threading
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import fedbraid as fb
from fedbraid.core import accelerators as passes
from fedbraid.core import rng
from fedbraid.core.client_table import RowArena
from fedbraid.core.context import ServerContext, Uploads
from fedbraid.core.gather import WIDE_ROW
from fedbraid.core.vector_spec import DELTA
from fedbraid.data.augment import CropJitter, Flip
from fedbraid.data.batches import Batch
from fedbraid.data.task import Task
from fedbraid.engines import native_backend as native
from fedbraid.engines.accelerators.normals import normals
from fedbraid.engines.accelerators.swap import swapper
from fedbraid.engines.autograd import LoopGradient
from fedbraid.engines.native_backend import Native
from fedbraid.errors import DataError, EngineError, NativeUnavailable, WireError
from fedbraid.run.database import Database
from fedbraid_native import build, emit, ops
from fedbraid_native.emit import generate

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler is installed")

# what is computed, not how fast; the other tests, as users, compile with FLAGS
QUICK = tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS)
ROWS = 90


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def make_task(model, shape, loss="cross_entropy", outputs=3, tokens=0, places=None, **options) -> Task:
    torch.manual_seed(1)
    x = torch.randint(tokens, (ROWS, *shape)) if tokens else torch.randn(ROWS, *shape)
    classes = {"cross_entropy": outputs, "logistic": 2}.get(loss)
    places = places or (() if classes else (outputs,))
    y = torch.randint(classes, (ROWS, *places)) if classes else torch.randn(ROWS, *places)
    return Task.from_table(model, x, y, torch.arange(ROWS), [0, 30, ROWS], loss=loss, **options)


def make_batch(task, m, size, weight=None, seed=0) -> Batch:
    rows = torch.randint(ROWS, (m, size), generator=torch.Generator().manual_seed(seed))
    return Batch(task.inputs, task.targets, rows, weight)


def points(task, m) -> torch.Tensor:
    torch.manual_seed(2)
    return task.initial(0) + 0.05 * torch.randn(m, task.layout.size)


def autograd(task, y, batch):
    """Gradients and losses by PyTorch in double precision."""
    gradients, losses = [], []
    for i in range(batch.size):
        module = _doubled(task.layout.load(task.module(), y[i]))
        targets = batch.y()[i]
        x = batch.x()[i]
        out = module(x.double() if x.is_floating_point() else x)
        each = task.per_example(out, targets if task.classifies else targets.double())
        w = torch.ones(len(each)) if batch.weight is None else batch.weight[i]
        loss = (w * each).sum() / w.sum() if w.sum() else (0 * each).sum()
        loss.backward()
        gradients.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if p.grad is None else p.grad).detach().flatten()
                    for p in module.parameters()
                    if p.requires_grad
                ]
            )
        )
        losses.append(loss.detach())
    return torch.stack(gradients).float(), torch.stack(losses).float()


def _doubled(module: nn.Module) -> nn.Module:
    """The same function in double precision: RMSNorm's own eps is that of the numbers it gets."""
    for layer in module.modules():
        if isinstance(layer, nn.RMSNorm) and layer.eps is None:
            layer.eps = torch.finfo(torch.float32).eps
    return module.double()


def assert_equals_autograd(task, grad, m, size, weight=None) -> None:
    y, batch = points(task, m), make_batch(task, m, size, weight)
    got, losses = grad(y, batch)
    want, want_losses = autograd(task, y, batch)
    torch.testing.assert_close(losses, want_losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-6 * max(1.0, float(want.abs().max())))


# Against autograd -----------------------------------------------------------------------------------


def random_model(seed: int) -> tuple[nn.Module, tuple[int, ...]]:
    """A chain of supported layers with sizes, kernels, strides and borders drawn from a seed."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape = (draw.randint(1, 3), draw.randint(7, 12), draw.randint(7, 12))
    layers: list[nn.Module] = []
    now = torch.zeros(1, *shape)

    def append(layer: nn.Module) -> None:
        nonlocal now
        layers.append(layer)
        now = layer(now)

    activations = [
        nn.ReLU, nn.Tanh, nn.Sigmoid, lambda: nn.LeakyReLU(draw.choice([0.01, 0.3])), nn.Identity, nn.ELU, nn.Mish, nn.Softplus,
    ]  # fmt: skip
    for _ in range(draw.randint(1, 3)):
        kernel = tuple(min(draw.randint(1, 5), n) for n in now.shape[2:])
        border = tuple(draw.randint(0, min(2, k)) for k in kernel)
        stride = (draw.choice([1, 1, 2]), draw.choice([1, 1, 2]))
        apart = tuple(
            draw.choice([1, 2]) if s == 1 and 2 * (k - 1) < n + 2 * p else 1
            for s, k, n, p in zip(stride, kernel, now.shape[2:], border)
        )
        width, biased = draw.choice([2, 4, 6, 8]), draw.random() < 0.7
        if draw.random() < 0.2:
            append(nn.ConvTranspose2d(now.shape[1], width, kernel, stride, bias=biased))
        else:
            append(nn.Conv2d(now.shape[1], width, kernel, stride, border, apart, bias=biased))
        if draw.random() < 0.4:
            append(nn.GroupNorm(2, now.shape[1]))
        first, second = draw.choice(activations)(), draw.choice(activations)()
        append(first)
        if min(now.shape[2:]) >= 4:
            k = draw.choice([2, 3])
            pool = draw.choice(
                [nn.MaxPool2d, lambda *a, **o: nn.MaxPool2d(*a, **o, ceil_mode=True), nn.AvgPool2d]
            )
            append(pool(k, stride=draw.choice([None, 1, 2]), padding=draw.choice([0, 0, 1])))
            append(second)
    append(nn.Flatten())
    if draw.random() < 0.6:
        append(nn.Linear(now.shape[1], draw.randint(3, 20)))
        append(nn.ReLU())
    append(nn.Linear(now.shape[1], 3, bias=draw.random() < 0.7))
    return nn.Sequential(*layers), shape


@pytest.mark.parametrize("seed", range(10))
def test_random_architectures(seed, monkeypatch):
    """Odd batches, one client and several, weighted and masked; both widths of vectors."""
    monkeypatch.setattr(native, "lanes", lambda: 16 if seed % 4 == 0 else 8)
    model, shape = random_model(seed)
    task = make_task(model, shape, loss="mse" if seed % 3 == 0 else "cross_entropy")
    assert Native.supports(task) is None
    grad = Native(task, threads=2, flags=QUICK)
    assert_equals_autograd(task, grad, 1, 1)
    assert_equals_autograd(task, grad, 3, 13)
    assert_equals_autograd(task, grad, 2, 70)
    torch.manual_seed(seed)
    weight = torch.rand(3, 19) * (torch.rand(3, 19) < 0.6)
    weight[1] = 0
    assert_equals_autograd(task, grad, 3, 19, weight)


@settings(max_examples=5, deadline=None)
@given(
    channels=st.tuples(*[st.integers(8, 20)] * 3), size=st.tuples(st.integers(6, 9), st.integers(6, 9)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)  # fmt: skip
def test_random_convolutions_by_tiles(channels, size, padding):
    """Odd and even images and borders, channels that fill no vector; one convolution after the other."""
    a, b, c = channels

    def model() -> nn.Module:
        return Chain(lambda: nn.Conv2d(a, b, 3, padding=padding), nn.Tanh, lambda: nn.Conv2d(b, c, 3, padding=1),
                     lambda: nn.AdaptiveAvgPool2d(1), *to_three(c))  # fmt: skip

    task = make_task(model, (a, *size))
    assert all(op.tile for op in native._graph(task).ops if isinstance(op, ops.Conv2d))
    grad = Native(task, threads=2, flags=QUICK)
    assert_equals_autograd(task, grad, 2, 13)
    assert_same_bits(task, grad)


@pytest.mark.parametrize("features", [16, 112, 21])
def test_one_logit(features):
    """Both classes, scores far on either side of zero, whole and odd widths."""
    task = make_task(nn.Linear(features, 1), (features,), loss="logistic")
    grad = Native(task, threads=2, flags=QUICK)
    for scale in (0.1, 1, 40):
        y, batch = scale * points(task, 3), make_batch(task, 3, 13)
        for got, want in zip(grad(y, batch), autograd(task, y, batch)):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    x = points(task, 1)[0]
    losses, classes = grad.evaluate(x, task.inputs, task.targets)
    want, said = LoopGradient(task).evaluate(x, task.inputs, task.targets)
    torch.testing.assert_close(losses, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(classes, said)
    assert 0 < classes.sum() < ROWS


class Residual(nn.Module):
    """Additions, functions, methods, a value used three times, a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, 4)
        self.inner = nn.Conv2d(4, 4, 3, padding="same")
        self.short = nn.Conv2d(4, 4, 1)
        self.narrow = nn.Conv2d(4, 4, 3)
        self.pool = nn.AdaptiveAvgPool2d((2, 2))
        self.drop = nn.Dropout(0.0)
        self.spare = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = nn.functional.relu(self.norm(self.stem(x)))
        x = torch.tanh(self.inner(x)) + self.short(x) + x
        x = nn.functional.max_pool2d(x.relu(), 2)
        x = self.drop(self.pool(self.narrow(x)))
        return self.head(x.view(x.size(0), -1))


class Loops(nn.Module):
    """Goes through the parts of a value, or through its samples, in a generator: it does not say how many there are."""

    def __init__(self, samples: bool) -> None:
        super().__init__()
        self.there, self.head, self.samples = nn.Linear(6, 12), nn.Linear(4, 3), samples

    def forward(self, x):
        x = self.there(x)
        if self.samples:
            return self.head(torch.stack([torch.tanh(one[:4]) for one in x]))
        first, *rest = (torch.tanh(part) for part in x.split(x.shape[1] // 3, 1))
        for k, part in enumerate(rest):
            first = first + (k + 2) * part
        return self.head(first)


def test_loops_over_parts_are_followed():
    task = make_task(lambda: Loops(samples=False), (6,))
    assert Native.supports(task) is None
    assert_equals_autograd(task, Native(task, flags=QUICK), 2, 13)
    assert "goes through 'linear' number by number" in (
        Native.supports(make_task(lambda: Loops(samples=True), (6,))) or ""
    )


class Makes(nn.Module):
    """First states and a mask made in the model, by the batch's size and length; or noise."""

    def __init__(self, noise: bool) -> None:
        super().__init__()
        self.net, self.out, self.noise = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3), noise

    def forward(self, x):
        zero = torch.zeros(1, x.size(0), self.net.hidden_size, dtype=x.dtype, device=x.device)
        y, _ = self.net(x, (zero, zero))
        late = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        y = (y @ y.mT).masked_fill(late, float("-inf")).softmax(-1) @ y + torch.full(
            (x.shape[1], 1), 0.5, dtype=x.dtype
        )
        return self.out(y.mean(1) + (torch.rand(x.size(0), 1) if self.noise else 0))


def test_tensors_made_in_the_model_are_constants():
    task = make_task(lambda: Makes(noise=False), (4, 5))
    assert Native.supports(task) is None
    assert_equals_autograd(task, Native(task, flags=QUICK), 2, 13)
    assert Native.supports(make_task(lambda: Makes(noise=True), (4, 5))) is not None


class Stops(nn.Module):
    """A head of weights that are computed, and gradients that end somewhere on the way."""

    def __init__(self, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.w, self.head = nn.Linear(6, 6), nn.Parameter(torch.randn(3, 6)), head

    def forward(self, x):
        return F.linear(self.body(x), self.head(self.w))


@torch.no_grad()
def looked_at(w):
    return F.normalize(w)


STOPS = [
    looked_at,
    lambda w: F.normalize(w.detach()),
    lambda w: torch.detach(w),
    lambda w: w.data,
    lambda w: w + w.detach(),
]


@pytest.mark.parametrize("head", STOPS)
def test_parameters_without_gradients_are_not_taken_for_trained(head):
    """Not even where the same code was right for another model."""
    task = make_task(lambda: Stops(F.normalize), (6,))
    assert_equals_autograd(task, Native(task, flags=QUICK), 2, 13)
    why = Native.supports(make_task(lambda: Stops(head), (6,)))
    assert why is not None
    assert why.endswith("computes with what is trained, and without its gradient")


class VectorizedPerExample(nn.Module):
    """An LSTM's state and cell, in a loop, into a cosine classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.classes = nn.LSTM(5, 4, batch_first=True), nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        zero = torch.zeros(1, x.size(0), 4, dtype=x.dtype)
        ends = self.net(x, (zero, zero))[1]
        seen = torch.cat([*(F.normalize(end[-1]) for end in ends)], 1)
        return 10 * seen @ F.normalize(self.classes).T


def smoothed(out, y):
    return F.cross_entropy(out, y, reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize("loss", ["cross_entropy", smoothed])
def test_cells_computed_weights_and_losses_together(loss):
    task = make_task(VectorizedPerExample, (4, 5))
    task = Task.from_table(
        VectorizedPerExample, task.inputs, task.targets, torch.arange(ROWS), [0, 30, ROWS], loss=loss
    )
    assert Native.supports(task) is None
    grad = Native(task, threads=2, flags=QUICK)
    assert_equals_autograd(task, grad, 2, 13)
    assert_same_bits(task, grad)


def test_residual_network():
    task = make_task(Residual, (2, 12, 12))
    grad = Native(task, threads=2, flags=QUICK)
    assert_equals_autograd(task, grad, 3, 11)
    spare = next(s for s in task.layout if s.name == "spare")
    got, _ = grad(points(task, 2), make_batch(task, 2, 70))
    assert not got[:, spare.offset : spare.end].any()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instruction sets of x86")
@pytest.mark.parametrize("instructions", ["x86-64", "x86-64-v3"])
def test_lesser_instruction_sets(instructions):
    flags = tuple(f"-march={instructions}" if f == "-march=native" else f for f in QUICK)
    task = make_task(Residual, (2, 12, 12))
    assert_equals_autograd(task, Native(task, threads=2, flags=flags), 2, 11)


class Shared(nn.Module):
    """Two layers with one weight, and one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm, self.head = (
            nn.Linear(9, 9), nn.Linear(9, 9), nn.GroupNorm(3, 9), nn.Linear(9, 3),
        )  # fmt: skip
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.norm(self.second(torch.tanh(self.norm(self.first(x))))))


def test_shared_parameters():
    task = make_task(Shared, (9,))
    grad = Native(task, threads=2, flags=QUICK)
    assert_equals_autograd(task, grad, 3, 11)
    y, batch = points(task, 1), make_batch(task, 1, 200)
    alone = grad(y, batch)[0].clone()
    grad.threads = 1
    assert torch.equal(grad(y, batch)[0], alone)


# One row for each operation ---------------------------------------------------------------------------


class Chain(nn.Module):
    """Layers one after the other, and whatever is to be done with their result at the end."""

    def __init__(self, *layers, end=lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(layer() for layer in layers)
        self.end = end

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.end(x)


class Recurrent(nn.Module):
    """A recurrent net over the embedded text, read in one of the usual ways."""

    def __init__(self, kind, read, hidden=6, **options) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.net, self.read = nn.Embedding(7, 5), kind(5, hidden, **options), read
        sides = 2 if options.get("bidirectional") else 1
        self.head = nn.Linear(hidden * sides, 3)

    def forward(self, x):
        x = self.embed(x)
        if not self.net.batch_first:
            x = x.transpose(0, 1)
        outputs, last = self.net(x)
        return self.head(self.read(outputs, last))


class GoesOn(nn.Module):
    """A recurrent net that starts from where another has ended."""

    def __init__(self, kind, hidden=6, **options) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed, sides = nn.Embedding(7, 5), 2 if options.get("bidirectional") else 1
        self.first, self.second = (kind(5, hidden, batch_first=True, **options) for _ in range(2))
        self.head = nn.Linear(hidden * sides, 3)

    def forward(self, x):
        x = self.embed(x)
        _, states = self.first(x[:, :3])
        return self.head(self.second(x[:, 2:], states)[0].mean(1))


class Starts(nn.Module):
    """A recurrent net whose first states are trained, at zero to begin with, and its cells given."""

    def __init__(self, kind, **options) -> None:
        super().__init__()
        torch.manual_seed(4)
        count = 2 if options else 1
        self.embed, self.net, self.head = nn.Embedding(7, 5), kind(5, 6, **options), nn.Linear(6 * count, 3)
        self.states = nn.Parameter(torch.zeros(count, 1, 6))
        self.register_buffer("cells", torch.randn(count, 1, 6))

    def forward(self, x):
        first = self.states.expand(-1, x.shape[0], -1)
        cells = self.cells.expand(-1, x.shape[0], -1)
        _, last = self.net(
            self.embed(x).transpose(0, 1), (first, cells) if isinstance(self.net, nn.LSTM) else first
        )
        last = last[0] if isinstance(self.net, nn.LSTM) else last
        return self.head(last.transpose(0, 1).flatten(1))


class Cosine(nn.Module):
    """How much samples look like rows of weights, in the ways in which that is written."""

    def __init__(self, how) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.how, self.first = how, nn.Linear(6, 9)
        self.w, self.warmth = nn.Parameter(torch.randn(3, 9)), nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        x = self.first(x).relu()
        if self.how == "function":
            return self.warmth.exp() * F.linear(F.normalize(x), F.normalize(self.w))
        if self.how == "columns":
            return torch.mm(
                x / x.norm(dim=1, keepdim=True), (self.w / (self.w.norm(dim=1, keepdim=True) + 0.1)).t()
            )
        w = 1 / self.w.square().sum((0, 1)).sqrt() * self.w - self.w.mean(0, keepdim=True).tanh()
        w = 0.5 * w[1:] + F.softplus(self.warmth) * torch.linalg.vector_norm(self.w, dim=0).clamp(
            min=0.2
        ).pow(3)
        return torch.cat([x @ w.t(), x[:, :1] - self.warmth.sigmoid()], 1) / torch.linalg.norm(
            x, dim=-1, keepdim=True
        )


class Adapted(nn.Module):
    """Frozen weights and a product of low rank, of a map and of a convolution; a weight that is computed and read twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.conv, self.head = nn.Conv1d(2, 4, 3, bias=False), nn.Linear(32, 3)
        self.conv.weight.requires_grad_(False)
        self.head.weight.requires_grad_(False)
        self.scale, self.down = nn.Parameter(torch.rand(4, 1, 1)), nn.Parameter(torch.randn(2, 32))
        self.up = nn.Parameter(0.1 * torch.randn(3, 2))

    def forward(self, x):
        kernel = self.scale * self.conv.weight
        x = F.conv1d(F.conv1d(x, kernel).tanh().view(x.shape[0], 2, 16), kernel, padding=1, stride=2)
        return F.linear(x.flatten(1), self.head.weight + 0.3 * (self.up @ self.down), self.head.bias)


def of_computed_weights() -> nn.Module:
    """Weight norm of maps of rows, of convolutions and of tables, of one dimension or of all."""
    norm = nn.utils.parametrizations.weight_norm
    return Chain(
        lambda: norm(nn.Embedding(7, 4)), lambda: norm(nn.Linear(4, 9)), nn.Tanh,
        lambda: norm(nn.Conv1d(5, 6, 3, padding=1, bias=False), dim=None), nn.Flatten, lambda: norm(nn.Linear(54, 3), dim=1),
    )  # fmt: skip


def of_computed_images() -> nn.Module:
    norm = nn.utils.parametrizations.weight_norm
    return Chain(
        lambda: norm(nn.Conv2d(2, 8, 3, padding=1)), nn.ReLU, lambda: nn.MaxPool2d(2), lambda: norm(nn.Conv2d(8, 9, 3, padding=1)),
        nn.Tanh, lambda: norm(nn.Conv2d(9, 6, 3, groups=3)), *to_three(24),
    )  # fmt: skip


def frozen_part() -> nn.Module:
    model = Chain(lambda: nn.Linear(6, 9), nn.Tanh, lambda: nn.Linear(9, 6), nn.Tanh, lambda: nn.Linear(6, 3))
    model.layers[0].requires_grad_(False)
    model.layers[2].bias.requires_grad_(False)
    model.layers[4].weight.requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = Chain(
        lambda: nn.Embedding(7, 4), lambda: nn.Linear(4, 7, bias=False), end=lambda x: x.mean(1)[:, :3]
    )
    model.layers[1].weight = model.layers[0].weight
    return model


class Scale(nn.Module):
    """Times a number, so that curves are seen where they bend."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x):
        return self.by * x


class Wide(nn.Module):
    """Linear maps of rows, wide enough for samples to be taken as rows, with a way around."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.inner, self.last = nn.Linear(6, 64), nn.Linear(64, 80, bias=False), nn.Linear(80, 64)
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        x = self.first(x)
        return self.head((x + self.last(self.inner(x).tanh())).mean(1))


class Positions(nn.Module):
    """Places in the text, as a parameter, as rows of a table and as waves that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.words, self.places = nn.Embedding(7, 4), nn.Embedding(9, 4)
        self.shift = nn.Parameter(torch.randn(1, 8, 4))
        self.register_buffer("waves", torch.randn(9, 4).sin())
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        at = torch.arange(x.shape[1]).expand(x.shape[0], x.shape[1])
        x = self.words(x) + self.places(at) + self.shift[:, : x.shape[1]] + self.waves[1 : x.size(1) + 1]
        return self.head(x.tanh()[:, 2])


class Attends(nn.Module):
    """Multi-head attention, told what not to look at."""

    def __init__(self, causal=False, of_bools=False, padding=False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.causal, self.of_bools, self.padding = causal, of_bools, padding
        self.embed, self.head = nn.Embedding(7, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, text):
        x, mask = self.embed(text), None
        if self.causal:
            mask = (
                torch.ones(6, 6).triu(1).bool() if self.of_bools else torch.full((6, 6), -torch.inf).triu(1)
            )
            mask = mask if self.of_bools else mask.to(x.dtype)
        absent = (text == 3) if self.padding else None
        seen, _ = self.attention(x, x, x, attn_mask=mask, key_padding_mask=absent, need_weights=False)
        return self.head((x + seen)[:, -1])


class Encodes(nn.Module):
    """A small transformer over text; later words, or those that are 0, may be hidden."""

    def __init__(self, layers=2, causal=False, padding=False, **options) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.padding = padding
        later = nn.Transformer.generate_square_subsequent_mask(5) if causal else None
        self.register_buffer("later", later, persistent=False)
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 3)
        one = nn.TransformerEncoderLayer(6, 2, 11, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(one, layers, nn.LayerNorm(6), enable_nested_tensor=False)

    def forward(self, x):
        empty = x == 0 if self.padding else None
        return self.head(self.encoder(self.embed(x), mask=self.later, src_key_padding_mask=empty).mean(1))


class MaskedMean(nn.Module):
    """The mean of the words that are there."""

    def __init__(self, there) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.there, self.embed, self.head = there, nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, x):
        seen = self.there(x).unsqueeze(-1).float()
        return self.head((self.embed(x) * seen).sum(1) / seen.sum(1).clamp(min=1e-9))


def to_three(width: int):
    return nn.Flatten, lambda: nn.Linear(width, 3)


def halves(x):
    a, b = x.chunk(2, -1)
    return a[:, 0] * b[:, 1]


class GPT(nn.Module):
    """Causal attention as it is written by hand, or by PyTorch's function; weights are functions' arguments."""

    def __init__(self, how, last=True, p=0.0) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.how, self.last, self.p = how, last, p
        self.words, self.places, self.qkv = nn.Embedding(7, 8), nn.Embedding(6, 8), nn.Linear(8, 24)
        self.proj, self.head = nn.Parameter(0.5 * torch.randn(8, 8)), nn.Linear(8, 3)
        self.register_buffer("seen", torch.tril(torch.ones(6, 6)).view(1, 1, 6, 6), persistent=False)

    def forward(self, text):
        b, t = text.size()
        x = self.words(text) + self.places(torch.arange(t))
        q, k, v = self.qkv(x).split(8, dim=2)
        q, k, v = (a.view(b, t, 2, 4).transpose(1, 2) for a in (q, k, v))
        if self.how == "by hand":
            scores = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
            y = F.softmax(scores.masked_fill(self.seen[:, :, :t, :t] == 0, float("-inf")), dim=-1) @ v
        elif self.how == "causal":
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True
            )
        elif self.how == "masked":
            y = F.scaled_dot_product_attention(q, k, v, self.seen[0, 0, :t, :t] > 0, scale=0.3)
        elif self.how == "padded":
            y = F.scaled_dot_product_attention(q, k, v, (text != 2)[:, None, None, :])
        else:
            scores = torch.einsum("bhtd,bhsd->bhts", q, k) + self.seen.sin()
            y = torch.einsum("bhts,bhsd->bhtd", scores.softmax(-1), v)
        x = x + y.transpose(1, 2).contiguous().view(b, t, 8) @ self.proj
        out = self.head(x)
        return out[:, -1] if self.last else out.transpose(1, 2)


class Tokens(nn.Module):
    """A class token and learned queries: parameters that become values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.patch, self.token = nn.Conv2d(2, 6, 2, 2), nn.Parameter(torch.randn(1, 1, 6))
        self.scale, self.queries = nn.Parameter(torch.rand(6)), nn.Parameter(torch.randn(1, 2, 6))
        self.ask, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(12, 3)
        self.warmth = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.scale * x.tanh()
        seen, _ = self.ask(self.queries.expand(x.size(0), -1, -1), x, x, need_weights=False)
        return self.head(seen.flatten(1)) * self.warmth - 1 / (2 + self.warmth * seen[:, 0, :3].tanh())


class Decodes(nn.Module):
    """A transformer that looks at another text."""

    def __init__(self, **options) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 3)
        one = nn.TransformerDecoderLayer(6, 2, 7, 0.0, batch_first=True, **options)
        self.decoder = nn.TransformerDecoder(one, 2)

    def forward(self, text):
        x = self.embed(text)
        later = torch.ones(3, 3).triu(1).bool()
        return self.head(
            self.decoder(x[:, :3], x[:, 3:], tgt_mask=later, memory_key_padding_mask=text[:, 3:] == 2).mean(1)
        )


class Own(nn.Module):
    """Layers whose weights are the model's own parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.words, self.kernel = nn.Parameter(torch.randn(7, 4)), nn.Parameter(torch.randn(6, 4, 2))
        self.gain, self.bias, self.slope = (nn.Parameter(torch.rand(6)) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x):
        x = F.conv1d(F.embedding(x, self.words).transpose(1, 2), self.kernel, self.bias, padding=1)
        x = F.prelu(F.group_norm(x, 2, self.gain, self.bias), self.slope).mean(2)
        x = F.rms_norm(F.layer_norm(x, (6,), self.gain, self.bias), (6,), self.bias)
        return F.linear(x, self.weight) - x.tanh() @ self.weight.t()


class Columns(nn.Module):
    """Tables for columns of the input, of which each may be larger than another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.tables = nn.ModuleList(nn.Embedding(n, 3) for n in (7, 9, 8))
        self.bag = nn.EmbeddingBag(7, 3, mode="sum")

    def forward(self, x):
        return torch.stack([t(x[:, i]) for i, t in enumerate(self.tables)], 1).amax(1) + self.bag(x[:, 1:])


class Pairs(nn.Module):
    """A map of pairs of numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first, self.pairs = nn.Linear(6, 4), nn.Bilinear(4, 6, 3)

    def forward(self, x):
        return self.pairs(self.first(x).tanh(), x)


def normalized(x):
    """What people write by hand."""
    x = F.normalize(x, dim=-1) + x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (
        (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)
        + x.var(1, False, True)
    ).sum(1)


def chosen(x):
    """Masks of computed values."""
    y = torch.where(x > 0.1, x * x, -x) + torch.maximum(x, 2 * x.sin()) + torch.min(x, x.cos())
    far = torch.where(torch.tensor([[True, False, True]]), y, 0.5)
    return far + y.masked_fill(x <= -0.2, 0.3) + torch.where(y >= 1, 2.0, y) * (x != 0).float()


class Bends(nn.Module):
    """The sum of layers, each times a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([
            nn.ELU(0.7), nn.SELU(), nn.CELU(1.3), nn.Softplus(1.5), nn.LogSigmoid(), nn.Mish(), nn.Softsign(),
            nn.Tanhshrink(), nn.Hardsigmoid(), nn.Hardtanh(-0.5, 2.0), nn.Hardshrink(0.4), nn.Softshrink(0.3),
            nn.Threshold(0.2, -0.1),
        ])  # fmt: skip

    def forward(self, x):
        return of_each(self.layers)(x)


FUNCTIONS = (
    torch.exp, torch.expm1, lambda x: torch.log(1 + x * x), lambda x: x.abs().log1p(), lambda x: (x.square() + 0.1).sqrt(),
    lambda x: torch.rsqrt(x**2 + 0.5), lambda x: torch.reciprocal(2 + x.sin()), torch.erf, lambda x: x.cos() ** 3,
    lambda x: (1.1 + x.tanh()).pow(1.7), lambda x: -x.abs(),
)  # fmt: skip


def of_each(functions):
    return lambda x: sum((k % 3 - 1.4) * f(x) for k, f in enumerate(functions))


class Looks(nn.Module):
    """A body whose gradient nobody takes, with trained layers in it, and a way around it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.words, self.net = nn.Embedding(7, 5), nn.GRU(5, 4, batch_first=True)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(8, 3)

    def forward(self, x):
        with torch.no_grad():
            _, last = self.net(self.words(x))
            seen = self.body(last[0])
        return self.head(torch.cat([seen.tanh(), self.words(x)[:, 0, :4].detach() + self.body(seen)], 1))


OPERATIONS = {
    "linear of rows": (lambda: Chain(lambda: nn.Linear(6, 5), nn.Tanh, *to_three(20)), (4, 6), 0),
    "linear of wide rows": (Wide, (3, 6), 0),
    "embedding": (lambda: Chain(lambda: nn.Embedding(7, 9, padding_idx=2), *to_three(45)), (5,), 7),
    "gru": (lambda: Recurrent(nn.GRU, lambda out, h: out[:, -1], batch_first=True, num_layers=2), (9,), 7),
    "gru, both ways": (
        lambda: Recurrent(nn.GRU, lambda out, h: torch.cat([h[-2], h[-1]], 1), bidirectional=True, bias=False), (4,), 7,
    ),
    "lstm": (lambda: Recurrent(nn.LSTM, lambda out, hc: hc[0][-1], num_layers=2), (9,), 7),
    "lstm, both ways": (
        lambda: Recurrent(nn.LSTM, lambda out, hc: out.mean(1), bidirectional=True, batch_first=True, num_layers=2),
        (4,), 7,
    ),
    "rnn": (lambda: Recurrent(nn.RNN, lambda out, h: out.sum(0)), (5,), 7),
    "gru, wide": (lambda: Recurrent(nn.GRU, lambda out, h: out.mean(1), 64, batch_first=True, num_layers=2), (3,), 7),
    "lstm, wide, both ways": (lambda: Recurrent(nn.LSTM, lambda out, h: out[-1] * out[0], 64, bidirectional=True), (3,), 7),
    "rnn, wide, no bias": (lambda: Recurrent(nn.RNN, lambda out, h: out[1], 80, bias=False, num_layers=2), (2,), 7),
    "one step": (lambda: Recurrent(nn.GRU, lambda out, h: out[0], num_layers=2), (1,), 7),
    "slice": (lambda: Chain(lambda: nn.Linear(6, 5), end=lambda x: x[:, 1:, ::2].flatten(1)[:, :3]), (4, 6), 0),
    "permute": (
        lambda: Chain(lambda: nn.Linear(6, 5), end=lambda x: x.permute(0, 3, 1, 2).mean(dim=(2, 3))[:, :3]), (4, 2, 6), 0,
    ),
    "transpose": (lambda: Chain(lambda: nn.Linear(6, 3), end=lambda x: x.transpose(1, 2)[:, :, 1]), (4, 6), 0),
    "convolution of a row": (
        lambda: Chain(lambda: nn.Conv1d(2, 4, 3, padding=1, stride=2), nn.Tanh, lambda: nn.MaxPool1d(2), *to_three(12)),
        (2, 11), 0,
    ),
    "mean pool of a row": (
        lambda: Chain(lambda: nn.Conv1d(2, 4, 3), lambda: nn.AvgPool1d(2), lambda: nn.AdaptiveAvgPool1d(1), *to_three(4)),
        (2, 10), 0,
    ),
    "groups": (
        lambda: Chain(lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.Tanh, lambda: nn.Conv2d(6, 6, 2, groups=6),
                      *to_three(96)),
        (4, 5, 5), 0,
    ),
    "tiles": (
        lambda: Chain(lambda: nn.Conv2d(8, 9, 3, padding=1), nn.Tanh, lambda: nn.Conv2d(9, 17, 3, bias=False), nn.Tanh,
                      lambda: nn.Conv2d(17, 8, 3, padding=2), *to_three(336)),
        (8, 7, 6), 0,
    ),
    "pooled input": (
        lambda: Chain(lambda: nn.Conv2d(2, 13, 3, padding=1), nn.ReLU, lambda: nn.MaxPool2d(2), *to_three(13 * 6)), (2, 5, 7), 0,
    ),
    "pooled input with gaps": (
        lambda: Chain(lambda: nn.Conv2d(3, 5, (2, 3), stride=(2, 1), bias=False), lambda: nn.MaxPool2d((2, 3)), *to_three(20)),
        (3, 9, 8), 0,
    ),
    "wide tiles": (
        lambda: Chain(lambda: nn.Conv2d(8, 9, 3, padding=1), nn.Tanh, lambda: nn.Conv2d(9, 8, 3, padding=1), *to_three(8 * 64)),
        (8, 8, 8), 0,
    ),
    "tiles in groups": (
        lambda: Chain(lambda: nn.Conv2d(2, 16, 1), lambda: nn.Conv2d(16, 18, 3, padding=1, groups=2), *to_three(450)),
        (2, 5, 5), 0,
    ),
    "instance norm": (
        lambda: Chain(lambda: nn.Conv2d(2, 4, 2), lambda: nn.InstanceNorm2d(4, affine=True), nn.Tanh, *to_three(36)),
        (2, 4, 4), 0,
    ),
    "layer norm": (lambda: Chain(lambda: nn.Linear(6, 5), lambda: nn.LayerNorm(5), *to_three(20)), (4, 6), 0),
    "layer norm of all": (
        lambda: Chain(lambda: nn.Linear(6, 5), lambda: nn.LayerNorm((4, 5), bias=False), *to_three(20)), (4, 6), 0,
    ),
    "rms norm": (lambda: Chain(lambda: nn.Linear(6, 5), lambda: nn.RMSNorm(5), *to_three(20)), (4, 6), 0),
    "gelu": (lambda: Chain(lambda: Scale(9), lambda: nn.Linear(6, 5), nn.GELU, *to_three(20)), (4, 6), 0),
    "gelu by tanh": (lambda: Chain(lambda: Scale(9), lambda: nn.Linear(6, 5), lambda: nn.GELU("tanh"), *to_three(20)), (4, 6), 0),
    "silu": (lambda: Chain(lambda: Scale(9), lambda: nn.Linear(6, 5), nn.SiLU, *to_three(20)), (4, 6), 0),
    "relu6": (lambda: Chain(lambda: Scale(9), lambda: nn.Linear(6, 5), nn.ReLU6, *to_three(20)), (4, 6), 0),
    "hard swish": (lambda: Chain(lambda: Scale(9), lambda: nn.Linear(6, 5), nn.Hardswish, *to_three(20)), (4, 6), 0),
    "softmax as a function": (lambda: Chain(lambda: nn.Linear(6, 3), end=lambda x: F.softmax(x, dim=-1)), (6,), 0),
    "chunks": (lambda: Chain(lambda: nn.Linear(6, 6), end=halves), (4, 6), 0),
    "uneven parts": (
        lambda: Chain(lambda: nn.Linear(6, 3), end=lambda x: torch.split(x, 3, dim=1)[1].mean(1)), (5, 6), 0,
    ),
    "softmax": (lambda: Chain(lambda: nn.Linear(6, 5), lambda: nn.Softmax(-1), *to_three(20)), (4, 6), 0),
    "log softmax": (lambda: Chain(lambda: nn.Linear(6, 5), lambda: nn.LogSoftmax(2), *to_three(20)), (4, 6), 0),
    "arithmetic": (lambda: Chain(lambda: nn.Linear(6, 3), end=lambda x: (2 * x - 1) * (x / 3) - (1 - x) * x), (6,), 0),
    "division": (lambda: Chain(lambda: nn.Linear(6, 3), end=lambda x: (x / (3 + x.tanh())).div(2 + x * x)), (6,), 0),
    "broadcasts": (
        lambda: Chain(lambda: nn.Linear(6, 3), end=lambda x: (x * x[:, :1] + x[:, :, 1:2] / (4 + x[:, 2:3].tanh())).sum(1)),
        (4, 6), 0,
    ),
    "expansion": (
        lambda: Chain(lambda: nn.Linear(6, 3), end=lambda x: (x[:, :1].expand(-1, 4, 3) * x).mean(1)), (4, 6), 0,
    ),
    "clamp": (
        lambda: Chain(lambda: nn.Linear(6, 3), end=lambda x: x.clamp(-0.3, max=0.2) * torch.clamp(x, min=0.1).clamp_min(0.2)),
        (6,), 0,
    ),
    "masked mean": (lambda: MaskedMean(lambda x: x != 0), (5,), 7),
    "masked mean, as bools": (lambda: MaskedMean(lambda x: ~x.eq(2)), (5,), 7),
    "positions": (Positions, (5,), 7),
    "attention": (lambda: Attends(causal=True), (6,), 7),
    "attention with a bool mask": (lambda: Attends(causal=True, of_bools=True), (6,), 7),
    "attention with padding": (lambda: Attends(padding=True), (6,), 7),
    "encoder layer": (
        lambda: Chain(lambda: nn.TransformerEncoderLayer(6, 3, 7, 0.0, batch_first=True), *to_three(24)), (4, 6), 0,
    ),
    "encoder": (lambda: Encodes(norm_first=True, activation="gelu", dropout=0.0), (5,), 7),
    "encoder with a mask": (lambda: Encodes(causal=True, dropout=0.0), (5,), 7),
    "encoder with padding": (lambda: Encodes(padding=True, dropout=0.0), (5,), 7),
    "curves": (lambda: Chain(lambda: Scale(3), lambda: nn.Linear(6, 3), Bends), (6,), 0),
    "functions": (lambda: Chain(lambda: nn.Linear(6, 3), end=of_each(FUNCTIONS)), (6,), 0),
    "prelu and glu": (
        lambda: Chain(lambda: nn.Conv1d(2, 4, 2), lambda: nn.PReLU(4), nn.PReLU, lambda: nn.GLU(1), *to_three(6)), (2, 4), 0,
    ),
    "softmax along another dimension": (
        lambda: Chain(lambda: nn.Linear(6, 3), end=lambda x: (x.softmax(1) * x + F.log_softmax(x, 1)).sum(1)), (4, 6), 0,
    ),
    "largest": (
        lambda: Chain(lambda: nn.Linear(6, 3), end=lambda x: x.max(dim=1)[0] + torch.min(x, 1).values * x.amax((1, 2)).unsqueeze(1)),
        (4, 6), 0,
    ),
    "largest of a window": (
        lambda: Chain(lambda: nn.Conv2d(2, 3, 3, padding=1), lambda: nn.AdaptiveMaxPool2d((2, 1)), *to_three(6)), (2, 4, 4), 0,
    ),
    "stacked, taken apart": (
        lambda: Chain(lambda: nn.Linear(6, 3), end=lambda x: torch.stack(x.unbind(1), -1).mT[:, 1] * x.select(1, 2)
                      + x.narrow(1, 1, 2)[:, None].sum(2)[:, -1]),
        (4, 6), 0,
    ),
    "normalised by hand": (lambda: Chain(lambda: nn.Linear(6, 3), end=normalized), (4, 6), 0),
    "masks of what was computed": (lambda: Chain(lambda: nn.Linear(6, 3), end=chosen), (6,), 0),
    "constants": (
        lambda: Chain(lambda: nn.Linear(6, 3), end=lambda x: ((torch.arange(3) - x) / torch.tensor([2.0, 3.0, 5.0])
                      - torch.ones(4, 1) * x + 2.0 / (3 + torch.ones(4, 3) * x.tanh())).sum(1)),
        (4, 6), 0,
    ),
    "products": (
        lambda: Chain(lambda: nn.Linear(6, 3), end=lambda x: (torch.ones(2, 4, 4).tril().to(x) @ (x @ x.transpose(1, 2) @ x)[:, None])
                      .sum((1, 2)) + torch.bmm(x.mT, torch.matmul(x.new_ones(4, 4).tril(), x)).sum(1)),
        (4, 6), 0,
    ),
    "attention by hand": (lambda: GPT("by hand"), (6,), 7),
    "attention by einsum": (lambda: GPT("einsum"), (6,), 7),
    "causal attention": (lambda: GPT("causal"), (6,), 7),
    "masked attention": (lambda: GPT("masked"), (6,), 7),
    "attention to what is there": (lambda: GPT("padded"), (6,), 7),
    "tokens of its own": (Tokens, (2, 4, 6), 0),
    "decoder": (Decodes, (5,), 7),
    "decoder with norms first": (lambda: Decodes(norm_first=True, activation="gelu"), (5,), 7),
    "weights of its own": (Own, (5,), 7),
    "tables for columns": (Columns, (3,), 7),
    "upsampling": (
        lambda: Chain(lambda: nn.Conv2d(2, 3, 2), lambda: nn.Upsample(scale_factor=(2, 3)), nn.Tanh, *to_three(3 * 36)), (2, 3, 4), 0,
    ),
    "dilation": (
        lambda: Chain(lambda: nn.Conv2d(2, 4, 3, padding=(2, 3), dilation=(2, 3)), nn.Tanh,
                      lambda: nn.Conv2d(4, 4, (2, 3), dilation=(3, 1), groups=2), *to_three(48)),
        (2, 6, 6), 0,
    ),
    "dilation of a row": (
        lambda: Chain(lambda: nn.Conv1d(2, 4, 3, padding="same", dilation=3), lambda: nn.MaxPool1d(2, ceil_mode=True), *to_three(20)),
        (2, 9), 0,
    ),
    "transposed convolution": (
        lambda: Chain(lambda: nn.Conv2d(2, 5, 2), lambda: nn.ConvTranspose2d(5, 3, 3, 2, 1, output_padding=1), nn.Tanh,
                      lambda: nn.ConvTranspose2d(3, 2, (2, 3), bias=False), *to_three(2 * 9 * 8)),
        (2, 5, 4), 0,
    ),
    "transposed convolution by tiles": (
        lambda: Chain(lambda: nn.ConvTranspose2d(8, 9, 3), nn.Tanh, lambda: nn.ConvTranspose2d(9, 8, 3, padding=1), *to_three(512)),
        (8, 6, 6), 0,
    ),
    "transposed convolution of a row": (
        lambda: Chain(lambda: nn.ConvTranspose1d(2, 3, 4, 2, padding=1), *to_three(30)), (2, 5), 0,
    ),
    "windows that reach out": (
        lambda: Chain(lambda: nn.Conv2d(2, 3, 2), lambda: nn.MaxPool2d(3, 2, ceil_mode=True), nn.Tanh,
                      lambda: nn.MaxPool2d(2, padding=1, ceil_mode=True), *to_three(12)),
        (2, 7, 8), 0,
    ),
    "uneven windows": (
        lambda: Chain(lambda: nn.Conv2d(2, 3, 2), lambda: nn.AdaptiveAvgPool2d((3, 7)), *to_three(63)), (2, 6, 5), 0,
    ),
    "borders": (
        lambda: Chain(lambda: nn.ZeroPad2d((1, 0, 2, 1)), lambda: nn.Conv2d(2, 8, 2), lambda: nn.PixelShuffle(2), nn.Tanh,
                      end=lambda x: F.pad(x, (-1, 2, 1, -2)).mean(3)[:, 1, :3]),
        (2, 4, 3), 0,
    ),
    "bilinear": (Pairs, (6,), 0),
    "all last states": (
        lambda: Recurrent(nn.LSTM, lambda out, hc: hc[0].permute(1, 0, 2).flatten(1), bidirectional=True), (4,), 7,
    ),
    "last cell": (lambda: Recurrent(nn.LSTM, lambda out, hc: hc[1][-1], num_layers=2), (5,), 7),
    "last cell beside the rest": (
        lambda: Recurrent(nn.LSTM, lambda out, hc: torch.cat([hc[0][-1] * hc[1][0], hc[1][-1] + out[0, :, 6:]], 1), bidirectional=True,
                          num_layers=2),
        (4,), 7,
    ),
    "all last cells": (
        lambda: Recurrent(nn.LSTM, lambda out, hc: (hc[1] * hc[0]).permute(1, 0, 2).flatten(1), bidirectional=True, batch_first=True),
        (1,), 7,
    ),
    "last cell, wide": (
        lambda: Recurrent(nn.LSTM, lambda out, hc: torch.cat([hc[1][-1] * hc[0][0], hc[1][-2]], 1), 64, bidirectional=True), (3,), 7,
    ),
    "a net that goes on": (lambda: GoesOn(nn.LSTM), (5,), 7),
    "a net that goes on, both ways": (lambda: GoesOn(nn.LSTM, bidirectional=True, num_layers=2), (5,), 7),
    "a net that goes on, without cells": (lambda: GoesOn(nn.GRU, 64), (5,), 7),
    "states of its own": (lambda: Starts(nn.LSTM, bidirectional=True), (4,), 7),
    "states of its own, without cells": (lambda: Starts(nn.RNN, num_layers=2), (1,), 7),
    "cosine": (lambda: Cosine("function"), (6,), 0),
    "cosine of columns": (lambda: Cosine("columns"), (6,), 0),
    "cosine by hand": (lambda: Cosine("hand"), (6,), 0),
    "adapted weights": (Adapted, (2, 10), 0),
    "weight norm": (of_computed_weights, (5,), 7),
    "weight norm of images": (of_computed_images, (2, 8, 8), 0),
    "volumes": (
        lambda: Chain(lambda: nn.Conv3d(2, 8, 3, padding=1), nn.ReLU, lambda: nn.MaxPool3d(2), lambda: nn.Conv3d(8, 9, 3, padding="same"),
                      nn.Tanh, lambda: nn.AdaptiveAvgPool3d(1), *to_three(9)),
        (2, 4, 5, 6), 0,
    ),
    "volumes with strides": (
        lambda: Chain(lambda: nn.Conv3d(2, 4, (2, 3, 1), (2, 1, 2), (1, 2, 0), bias=False), nn.Tanh,
                      lambda: nn.Conv3d(4, 6, (2, 1, 2), dilation=(2, 1, 1), groups=2), lambda: nn.InstanceNorm3d(6), *to_three(6 * 14)),
        (2, 5, 5, 5), 0,
    ),
    "windows of volumes": (
        lambda: Chain(lambda: nn.Conv3d(2, 3, (3, 1, 1)), lambda: nn.MaxPool3d((1, 2, 3), 2, (0, 1, 1), ceil_mode=True), nn.Tanh,
                      lambda: nn.AvgPool3d(2, 1, 1, count_include_pad=False), lambda: nn.AvgPool3d((1, 2, 2), padding=(0, 1, 0)),
                      lambda: nn.AdaptiveMaxPool3d((3, 1, 2)), *to_three(18)),
        (2, 5, 5, 5), 0,
    ),
    "roll": (
        lambda: Chain(lambda: nn.Linear(4, 3), end=lambda x: (x.roll(2, -1).tanh() + torch.roll(x, (-1, 4), (1, 2)))[:, 3]),
        (5, 4), 0,
    ),
    "response norm": (
        lambda: Chain(lambda: nn.Conv2d(2, 5, 3), lambda: nn.LocalResponseNorm(3, 0.5, 0.6, 2.0), lambda: nn.LocalResponseNorm(2),
                      *to_three(45)),
        (2, 5, 5), 0,
    ),
    "frozen": (frozen_part, (6,), 0),
    "without gradients": (Looks, (5,), 7),
    "tied": (tied, (5,), 7),
}  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation(operation):
    """Against autograd, for odd batches and masks; the same bits on one thread and two, alone and in a block."""
    model, shape, tokens = OPERATIONS[operation]
    task = make_task(model, shape, tokens=tokens)
    assert Native.supports(task) is None
    grad = Native(task, threads=2, flags=QUICK)
    assert_equals_autograd(task, grad, 1, 1)
    assert_equals_autograd(task, grad, 2, 70)
    torch.manual_seed(5)
    weight = torch.rand(3, 19) * (torch.rand(3, 19) < 0.6)
    weight[1] = 0
    assert_equals_autograd(task, grad, 3, 19, weight)
    assert_same_bits(task, grad)


def assert_same_bits(task, grad) -> None:
    y, batch = points(task, 3), make_batch(task, 3, 70)
    both = grad(y, batch)[0].clone()
    one = grad.alone()
    assert torch.equal(one(y, batch)[0], both)
    assert torch.equal(one(y[2:], batch.client(2))[0], both[2:])


@pytest.mark.parametrize(
    ("model", "loss", "shape", "places", "tokens"),
    [
        (lambda: GPT("causal", last=False), "cross_entropy", (6,), (6,), 7),
        (lambda: nn.Conv2d(2, 3, 3, padding=1), "cross_entropy", (2, 4, 5), (4, 5), 0),
        (lambda: nn.Linear(6, 5), "logistic", (6,), (5,), 0),
        (lambda: Chain(lambda: nn.Linear(6, 1), end=lambda x: x.squeeze(-1)), "mse", (4, 6), (4,), 0),
    ],
    ids=["words", "pixels", "labels", "numbers"],
)
def test_targets_of_more_than_one_number(model, loss, shape, places, tokens):
    """A class for each word or pixel, several labels or numbers."""
    task = make_task(model, shape, loss, tokens=tokens, places=places)
    assert Native.supports(task) is None
    grad = Native(task, threads=2, flags=QUICK)
    assert_equals_autograd(task, grad, 2, 13)
    assert_same_bits(task, grad)
    losses, classes = grad.evaluate(task.initial(0), task.inputs, task.targets)
    want, said = LoopGradient(task).evaluate(task.initial(0), task.inputs, task.targets)
    torch.testing.assert_close(losses, want)
    assert classes is said is None


def test_a_column_beyond_its_table_is_refused():
    task = make_task(Columns, (3,), tokens=7)
    grad, x = Native(task, flags=QUICK), torch.full((2, 3), 6)
    x[1, 2] = 7
    with pytest.raises(DataError, match="an input is 7, but the model looks up 0 to 6 only"):
        grad.evaluate(task.initial(0), x, task.targets[:2])
    x[1, 2] = 6
    grad.evaluate(task.initial(0), x, task.targets[:2])


def test_values_that_nobody_reads_again_leave_their_room():
    def workspace(layers: int) -> int:
        task = make_task(lambda: Chain(*[lambda: Scale(2)] * layers, *to_three(24)), (4, 6))
        source = generate(native._graph(task), "cross_entropy", 8, 64)
        return int(source.partition("workspace = ")[2].partition(";")[0])

    assert workspace(30) < 2 * workspace(3)


def test_pieces_make_the_same_library(monkeypatch):
    """A source of several pieces is compiled at the same time, to the bits that it has in one."""
    task = make_task(fb.models.lenet5, (1, 28, 28))
    batch, y = make_batch(task, 2, 5), task.vector(0).repeat(2, 1)
    found = []
    for pieces in (4, 1):
        monkeypatch.setattr(emit, "_PIECES", pieces)
        grad = Native(task)
        assert f"#define PARTS {pieces}\n" in grad.source
        found.append(torch.cat([part.flatten() for part in grad(y, batch)]))
    assert torch.equal(*found)


def with_statistics() -> nn.Module:
    return Chain(
        lambda: nn.Conv2d(2, 4, 3), lambda: nn.BatchNorm2d(4, momentum=0.3), nn.Tanh, nn.Flatten,
        lambda: nn.Linear(36, 6), lambda: nn.BatchNorm1d(6, affine=False), lambda: nn.Linear(6, 3),
    )  # fmt: skip


@pytest.mark.parametrize("size", [2, 13, 70])
def test_batch_norm_follows_the_data(size):
    """Gradients and running statistics are the loop's, also of a client that sits a step out."""
    task = make_task(with_statistics, (2, 5, 5), buffers="average")
    assert Native.supports(task) is None
    grad, y = Native(task, threads=2, flags=QUICK), points(task, 3).abs()
    weight = torch.ones(3, size)
    weight[1, size // 2 + 1 :] = 0
    weight[2] = 0
    batch = make_batch(task, 3, size, weight)
    ours, theirs, alone = y.clone(), y.clone(), y.clone()
    got, losses = grad(ours, batch)
    want, want_losses = LoopGradient(task)(theirs, batch)
    torch.testing.assert_close(losses, want_losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert not torch.equal(ours[:2], y[:2])
    assert torch.equal(ours[2], y[2])
    assert torch.equal(grad.alone()(alone, batch)[0], got)
    assert torch.equal(alone, ours)
    for mine, other in zip(
        *(g.evaluate(ours[0], task.inputs, task.targets) for g in (grad, LoopGradient(task)))
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


class Named(nn.Module):
    """Words, a mask of them that is given, and numbers, by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.words, self.fc, self.head = nn.Embedding(7, 4), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, numbers, text, weights):
        seen = (self.words(text) * weights).mean(1)
        return {"logits": self.head(seen + self.fc(numbers).tanh())}


@pytest.mark.parametrize("by_name", [True, False])
def test_inputs_of_several_tensors(by_name):
    torch.manual_seed(1)
    parts = {
        "text": torch.randint(7, (ROWS, 6)),
        "weights": torch.rand(ROWS, 6, 4),
        "numbers": torch.randn(ROWS, 5),
    }
    inputs = parts if by_name else tuple(parts[k] for k in ("numbers", "text", "weights"))
    task = Task.from_table(Named, inputs, torch.randint(3, (ROWS,)), torch.arange(ROWS), [0, 30, ROWS])
    assert Native.supports(task) is None
    grad, y, batch = Native(task, threads=2, flags=QUICK), points(task, 3), make_batch(task, 3, 19)
    got, want = grad(y, batch), LoopGradient(task)(y, batch)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[0], want[0], rtol=1e-3, atol=2e-6)
    assert_same_bits(task, grad)
    for mine, other in zip(
        *(g.evaluate(y[0], task.inputs, task.targets) for g in (grad, LoopGradient(task)))
    ):
        torch.testing.assert_close(mine, other)
    parts["text"][3, 2] = 7
    with pytest.raises(DataError, match="an input is 7"):
        grad.evaluate(y[0], {**parts} if by_name else (*inputs,), task.targets)


class Heads(nn.Module):
    """Attention of several heads by hand or by PyTorch's function."""

    def __init__(self, width: int, heads: int, by_hand: bool) -> None:
        super().__init__()
        self.heads, self.by_hand, self.qkv = heads, by_hand, nn.Linear(width, 3 * width, bias=by_hand)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.by_hand:
            y = (q @ k.mT * 0.3).softmax(dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(b, t, c)


class Gate(nn.Module):
    """Each place by how much it is wanted, along time or along the features, and a scale."""

    def __init__(self, width: int, time: bool) -> None:
        super().__init__()
        self.score, self.scale, self.dim = (
            nn.Linear(width, width),
            nn.Parameter(torch.rand(width)),
            1 if time else 2,
        )

    def forward(self, x):
        return x * self.score(x).softmax(self.dim) * self.scale - x.amax(self.dim, keepdim=True) / 3


class Blocks(nn.Module):
    """Layers of sequences in an order drawn from a seed, some with a way around them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        width = draw.choice([4, 8, 12])
        self.embed = nn.Embedding(7, width)
        self.around = []
        made = []
        for _ in range(draw.randint(1, 3)):
            kind = draw.choice(["gru", "lstm", "encoder", "think", "conv", "norm", "heads", "gate"])
            both = draw.random() < 0.5
            options = {"batch_first": True, "bidirectional": both, "num_layers": draw.randint(1, 2)}
            inner = width // 2 if both else width
            if kind in ("gru", "lstm"):
                made.append(
                    {"gru": nn.GRU, "lstm": nn.LSTM}[kind](width, inner, bias=draw.random() < 0.7, **options)
                )
            elif kind == "encoder":
                act = draw.choice(["relu", "gelu", F.silu])
                made.append(
                    nn.TransformerEncoderLayer(
                        width,
                        draw.choice([1, 2, 4]),
                        draw.randint(3, 9),
                        0.0,
                        act,
                        batch_first=True,
                        norm_first=both,
                    )
                )
            elif kind == "think":
                made.append(
                    nn.Sequential(
                        nn.Linear(width, 5), draw.choice([nn.GELU, nn.SiLU, nn.Tanh])(), nn.Linear(5, width)
                    )
                )
            elif kind in ("heads", "gate"):
                made.append(
                    Heads(width, draw.choice([1, 2, 4]), both) if kind == "heads" else Gate(width, both)
                )
            elif kind == "conv":
                made.append(nn.Conv1d(width, width, 3, padding=1, groups=draw.choice([1, 2, width])))
            else:
                made.append(draw.choice([nn.LayerNorm, nn.RMSNorm])(width))
            self.around.append(draw.random() < 0.5)
        self.made, self.last, self.head = nn.ModuleList(made), draw.choice([0, 1, 2]), nn.Linear(width, 3)

    def forward(self, text):
        x = self.embed(text)
        for layer, around in zip(self.made, self.around):
            if isinstance(layer, nn.RNNBase):
                y, _ = layer(x)
            elif isinstance(layer, nn.Conv1d):
                y = layer(x.transpose(1, 2)).transpose(1, 2)
            else:
                y = layer(x)
            x = x + y if around else y
        return self.head([x[:, -1], x.mean(1), x[:, 0] * x[:, 1]][self.last])


@settings(max_examples=8, deadline=None)
@example(seed=1258, length=2)  # an RMSNorm of rows so short that its eps counts
@given(seed=st.integers(0, 10**6), length=st.integers(2, 6))
def test_random_architectures_of_sequences(seed, length):
    task = make_task(lambda: Blocks(seed), (length,), tokens=7)
    assert Native.supports(task) is None
    grad = Native(task, threads=2, flags=QUICK)
    assert_equals_autograd(task, grad, 2, 13)
    assert_same_bits(task, grad)


# Random numbers ---------------------------------------------------------------------------------------


def mixed(z):
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def kept(noise: int, samples: int, layer: int, places: int, p: float) -> torch.Tensor:
    """What dropout multiplies by, [samples, places], written from its definition."""
    with np.errstate(over="ignore"):
        key = mixed(np.uint64(noise) + mixed(np.arange(samples, dtype=np.uint64)))[:, None]
        low, high = (
            key.astype(np.uint32) ^ np.uint32(layer) * np.uint32(0x9E3779B9),
            (key >> np.uint64(32)).astype(np.uint32),
        )
        x = low + np.arange(places, dtype=np.uint32) * np.uint32(0x9E3779B9)
        x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> 15) ^ high) * np.uint32(0x846CA68B)
        x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
        bits = (x ^ (x >> 15)) >> 8
    return torch.from_numpy((bits >= p * 2**24) / (1 - p))


DROPPING = {
    "numbers": (lambda: Chain(lambda: nn.Linear(6, 20), lambda: nn.Dropout(0.4), *to_three(80)), (4, 6), 0),
    "channels": (lambda: Chain(lambda: nn.Conv2d(2, 5, 3), lambda: nn.Dropout2d(0.3), *to_three(45)), (2, 5, 5), 0),
    "between recurrent layers": (
        lambda: Recurrent(nn.GRU, lambda out, h: out[:, -1], batch_first=True, num_layers=2, dropout=0.5), (4,), 7,
    ),
    "encoder": (lambda: Encodes(dropout=0.3), (5,), 7),
    "attention by PyTorch's function": (lambda: GPT("causal", p=0.3), (6,), 7),
}  # fmt: skip


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_is_counted(name, monkeypatch):
    """Equal to autograd with the same zeros, which a client, a step and a place alone decide; none in evaluation."""
    model, shape, tokens = DROPPING[name]
    task = make_task(model, shape, tokens=tokens)
    grad = Native(task, threads=2, flags=QUICK)
    y, batch = points(task, 3), make_batch(task, 3, 70)
    batch.noise = np.array([5, 2**63 + 1, 17], np.uint64)
    got = grad(y, batch)[0].clone()
    assert_same_zeros(task, grad, y, batch, got)
    if name != "between recurrent layers":  # there torch draws inside
        for i, noise in enumerate(batch.noise):
            want = autograd_with_zeros(task, y, batch, i, int(noise), monkeypatch)
            torch.testing.assert_close(got[i], want, rtol=1e-3, atol=2e-6 * max(1.0, float(want.abs().max())))
    module = task.layout.load(task.module(), y[0]).eval()
    with torch.no_grad():
        want = task.per_example(module(task.inputs), task.targets)
    torch.testing.assert_close(grad.evaluate(y[0], task.inputs, task.targets)[0], want, rtol=1e-4, atol=1e-5)


def assert_same_zeros(task, grad, y, batch, got) -> None:
    one = grad.alone()
    assert torch.equal(one(y, batch)[0], got)
    assert torch.equal(one(y[1:2], batch.client(1))[0], got[1:2])
    other = Batch(batch.inputs, batch.targets, batch.rows, noise=batch.noise + np.uint64(1))
    assert not torch.equal(one(y, other)[0], got)


def autograd_with_zeros(task, y, batch, i, noise, monkeypatch):
    layers = iter(
        [op for op in native._graph(task).ops if isinstance(op, (ops.Dropout, ops.ScaledDotProductAttention))]
    )

    def dropout(x, p=0.5, training=True, inplace=False):
        return x * kept(noise, len(x), next(layers).output, x[0].numel(), p).view_as(x)

    def dropout2d(x, p=0.5, training=True, inplace=False):
        return x * kept(noise, len(x), next(layers).output, x.shape[1], p)[:, :, None, None]

    def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):
        later = torch.full((q.shape[-2], k.shape[-2]), -torch.inf if is_causal else 0.0).triu(1)
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + later).softmax(-1)
        return dropout(weights, dropout_p) @ v

    with monkeypatch.context() as patch:
        patch.setattr(F, "dropout", dropout)
        patch.setattr(F, "dropout2d", dropout2d)
        patch.setattr(F, "scaled_dot_product_attention", attend)
        return autograd(task, y[i : i + 1], batch.client(i))[0][0]


def test_a_tenth_is_dropped():
    share = [float((kept(9, 40, layer, 500, 0.1) == 0).float().mean()) for layer in range(5)]
    assert all(abs(s - 0.1) < 0.01 for s in share)
    assert len(set(share)) == 5


def test_numbers_that_name_no_row_are_refused():
    model, shape, tokens = OPERATIONS["embedding"]
    task = make_task(model, shape, tokens=tokens)
    grad = Native(task, flags=QUICK)
    for bad in (-1, tokens):
        with pytest.raises(DataError, match=f"an input is {bad}"):
            grad.evaluate(task.initial(0), torch.full((2, *shape), bad), task.targets[:2])


@pytest.fixture(scope="module")
def small():
    """A little convolutional network, and a native gradient of it with all optimisations."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 17), nn.Tanh(),
        nn.Linear(17, 3),
    )  # fmt: skip
    task = make_task(model, (1, 8, 8))
    return task, Native(task, threads=2)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(m=st.integers(1, 6), size=st.integers(1, 80), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_any_batch_and_mask(small, m, size, share, seed):
    task, grad = small
    draw = torch.Generator().manual_seed(seed)
    mask = (torch.rand(m, size, generator=draw) < share).float()
    assert_equals_autograd(task, grad, m, size, mask)


@pytest.mark.parametrize(("features", "outputs"), [(112, 2), (7, 3), (40, 20)])
def test_lone_linear_layer(features, outputs):
    task = make_task(nn.Linear(features, outputs), (features,), outputs=outputs)
    grad = Native(task, threads=2, flags=QUICK)
    assert_equals_autograd(task, grad, 100, 10)
    assert_equals_autograd(task, grad, 2, 67)


def test_evaluation(small):
    task, grad = small
    x = points(task, 1)[0]
    with torch.no_grad():
        outputs = task.layout.load(task.module(), x)(task.inputs)
    losses, classes = grad.evaluate(x, task.inputs, task.targets)
    torch.testing.assert_close(losses, task.per_example(outputs, task.targets))
    assert torch.equal(classes, outputs.argmax(1))
    assert len(grad.evaluate(x, task.inputs[:0], task.targets[:0])[0]) == 0


def test_augmented_and_strided_inputs(small):
    task, grad = small
    y, batch = points(task, 2), make_batch(task, 2, 9)
    batch.augment, batch.draws = Flip(), torch.rand(2, 9, 3)
    torch.testing.assert_close(grad(y, batch)[0], autograd(task, y, batch)[0], rtol=1e-3, atol=2e-6)
    strided = Batch(task.inputs.transpose(2, 3).contiguous().transpose(2, 3), task.targets, batch.rows)
    plain = grad(y, Batch(task.inputs, task.targets, batch.rows))[0].clone()
    assert torch.equal(grad(y, strided)[0], plain)


def test_an_augmentation_that_changes_shapes_is_left_to_torch():
    model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 2))
    clients = [(np.random.default_rng(0).random((6, 3, 8, 8), np.float32), np.array([0, 1] * 3))]
    task = fb.Task.from_arrays(model, clients, augment=CropJitter(6))
    assert "shape (3, 8, 8) into (3, 6, 6)" in str(Native.supports(task))
    work, once = fb.Work(lr=0.1, steps=3), fb.rounds(1, clients=1)
    runs = [
        fb.simulate(task, fb.fedavg(), work, once, engine=e).x
        for e in ("in_process", "in_process(backend='loop')")
    ]
    assert torch.allclose(*runs, atol=1e-6)


# The same bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "size"), [(1, 20), (1, 200), (2, 150), (7, 20)])
def test_bits_do_not_depend_on_threads_or_neighbours(small, m, size):
    task, grad = small
    y, batch = points(task, m), make_batch(task, m, size)
    results = []
    for threads in (1, 2, 3, 8, 1):
        grad.threads = threads
        gradients, losses = grad(y, batch)
        results.append((gradients.clone(), losses))
    grad.threads = 2
    alone = [grad(y[i : i + 1], batch.client(i)) for i in range(m) if i == 0]
    assert all(torch.equal(g, results[0][0]) and torch.equal(l, results[0][1]) for g, l in results)
    assert torch.equal(alone[0][0][0], results[0][0][0])
    assert torch.equal(alone[0][1][0], results[0][1][0])


@pytest.mark.parametrize(
    "algorithm", [fb.fedavg(), fb.fedadavr("adam"), fb.fedadavr(memory="int4"), fb.scaffold()]
)
def test_a_run_of_a_wide_model_does_not_depend_on_threads(algorithm):
    """Blocks go to threads of their own there, and are cut by how many there are."""
    torch.manual_seed(0)
    x, y = torch.randn(210, 40), torch.randint(3, (210,))
    model = nn.Sequential(nn.Linear(40, 400), nn.Tanh(), nn.Linear(400, 3))
    task = Task.from_table(model, x, y, torch.arange(210), range(0, 211, 30), test=(x, y))
    results = [
        fb.simulate(
            task, algorithm, fb.Work(lr=0.05, batch=8, momentum=0.9), fb.rounds(4, clients=5),
            engine=f"in_process(backend='native', threads={threads})",
        )
        for threads in (1, 2, 3)
    ]  # fmt: skip
    for other in results[1:]:
        assert torch.equal(other.x, results[0].x)
        assert other.history == results[0].history


@pytest.mark.parametrize(
    "model", [lambda: Recurrent(nn.GRU, lambda out, h: h[-1]), lambda: Encodes(dropout=0.0)]
)
def test_algorithms_end_where_the_loop_ends(model):
    task = make_task(model, (5,), tokens=7)
    # No Adam: the true gradient of the keys' bias is zero, and rounding is all that there is to normalise.
    for algorithm in (
        fb.fedavg(),
        fb.scaffold(),
        fb.fedadavr("sgd"),
        fb.adabest(),
        fb.fedgbo("sgdm", beta=0.9),
    ):
        native, loop = (
            fb.simulate(
                task, algorithm, fb.Work(lr=0.1, batch=8, momentum=0.5), fb.rounds(3, clients=2),
                engine=f"in_process(backend={backend!r})",
            )
            for backend in ("native", "loop")
        )  # fmt: skip
        torch.testing.assert_close(native.x, loop.x, rtol=1e-3, atol=1e-5)


def test_padding_leaves_no_trace(small):
    task, grad = small
    y, batch = points(task, 1), make_batch(task, 1, 21)
    weight = torch.zeros(1, 21)
    weight[0, :13] = 1
    padded = grad(y, Batch(task.inputs, task.targets, batch.rows, weight))[0].clone()
    assert torch.equal(padded, grad(y, Batch(task.inputs, task.targets, batch.rows[:, :13]))[0])


# The process around it ------------------------------------------------------------------------------


def test_lock_is_released(small):
    task, grad = small
    many = 400_000 // ROWS
    inputs, targets = task.inputs.repeat(many, 1, 1, 1), task.targets.repeat(many)
    x = points(task, 1)[0]
    work = threading.Thread(target=lambda: grad.evaluate(x, inputs, targets))
    ticks = 0
    work.start()
    while work.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 5  # with the lock held, this loop would turn once or twice


def test_works_in_a_forked_child(small):
    task, grad = small
    y, batch = points(task, 4), make_batch(task, 4, 10)
    want = grad(y, batch)[0].clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(grad(y, batch)[0], want) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_bad_rows_and_labels(small):
    task, grad = small
    batch = make_batch(task, 1, 5)
    with pytest.raises(EngineError, match="row outside"):
        grad(points(task, 1), Batch(task.inputs, task.targets, batch.rows + ROWS))
    with pytest.raises(DataError, match="label is out of range"):
        grad(points(task, 1), Batch(task.inputs, task.targets + 3, batch.rows))
    with pytest.raises(EngineError, match="2 clients"):
        grad(points(task, 1), make_batch(task, 2, 5))


MAIN = """
#include <cstdio>
int main() {
    const int64_t m = 3, batch = 77, rows = 90;
    float *y = new float[m * Model::parameters], *g = new float[m * Model::parameters], *losses = new float[rows];
    float q[1 << 12] = {};
    const uint64_t noise[3] = {1, 2, 3};
    float *x = new float[rows * Model::inputs], *weight = new float[m * batch];
    int64_t *at = new int64_t[m * batch], *t = new int64_t[rows], *best = new int64_t[rows];
    uint32_t seed = 1;
    auto draw = [&] { return (seed = seed * 1664525u + 1013904223u) >> 16; };
    for (int64_t k = 0; k < m * Model::parameters; k++) y[k] = draw() / 65536.f - 0.5f;
    for (int64_t k = 0; k < rows * Model::inputs; k++) x[k] = draw() / 65536.f * Model::tokens;
    for (int64_t k = 0; k < rows; k++) t[k] = draw() % Model::outputs;
    for (int64_t k = 0; k < m * batch; k++) at[k] = draw() % rows, weight[k] = draw() % 3;
    int bad = 0;
    GradientJob job{y, q, noise, g, losses, m, batch, at, at, weight, x, rows, t, rows, 2, 0, 0, nullptr, nullptr};
    for (int64_t b : {1, 13, 77})
        for (int threads : {1, 2, 5})
            for (float* w : {weight, (float*)nullptr}) {
                job.batch = b, job.threads = threads, job.weight = w;
                bad |= fedbraid_gradient(&job);
            }
    job.clients = 1, job.batch = batch, job.threads = 2, job.weight = weight;
    bad |= fedbraid_gradient(&job);
    EvaluateJob all{y, q, x, rows, t, losses, best, 2};
    bad |= fedbraid_evaluate(&all);
    std::printf("%d\\n", bad);
    delete[] y; delete[] g; delete[] losses; delete[] x; delete[] weight; delete[] at; delete[] t; delete[] best;
    return bad;
}
"""


class Everything(nn.Module):
    """Every kind of layer of sequences in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 8, padding_idx=1), nn.RMSNorm(8)
        self.gru = nn.GRU(8, 4, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 9, 0.2, batch_first=True)
        self.conv, self.head = nn.Conv1d(8, 8, 3, padding=1, groups=4), nn.Linear(8, 3)

    def forward(self, text):
        x, _ = self.gru(self.embed(text))
        y, last = self.lstm(x)
        z, (_, cells) = self.lstm(x, last)
        x = self.encoder(self.norm(x + y + z * cells.transpose(0, 1)), src_key_padding_mask=text == 1)
        return self.head(self.conv(x.transpose(1, 2)).softmax(-1).mean(2))


def tiles_and_statistics() -> nn.Module:
    return Chain(
        lambda: nn.Conv2d(9, 10, 3, padding=1), lambda: nn.BatchNorm2d(10), nn.Tanh,
        lambda: nn.Conv2d(10, 17, 3, padding=(2, 0)), *to_three(5 * 9 * 17),
    )  # fmt: skip


def pooled_and_tiles() -> nn.Module:
    return Chain(
        lambda: nn.Conv2d(2, 13, 3, padding=1), nn.ReLU, lambda: nn.MaxPool2d(2), lambda: nn.Conv2d(13, 9, 3, padding=1),
        *to_three(9 * 35),
    )  # fmt: skip


class Products(nn.Module):
    """Products, masks and parameters as values, in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.gate, self.asked = (
            GPT("by hand", last=False),
            Gate(3, True),
            nn.Parameter(torch.rand(1, 2, 3)),
        )
        self.own, self.attention = (
            nn.Parameter(torch.rand(3, 5)),
            nn.MultiheadAttention(3, 1, batch_first=True),
        )

    def forward(self, text):
        x = self.gate(self.heads(text).mT)
        x, _ = self.attention(self.asked.expand(text.size(0), -1, -1), x, x)
        x = torch.einsum("btc,bsc->bts", x, x) @ x + chosen(x.mean(1, keepdim=True)[:, 0]).unsqueeze(1)
        return torch.max(x, 1)[0] + (x @ self.own).sum(1)[:, :3]


def odd_images() -> nn.Module:
    return Chain(
        lambda: nn.ZeroPad2d((1, 2, 0, 1)), lambda: nn.Conv2d(2, 4, 3, padding=2, dilation=2), nn.Mish,
        lambda: nn.MaxPool2d(3, 2, ceil_mode=True), lambda: nn.ConvTranspose2d(4, 8, 3, 2, 1, output_padding=1),
        lambda: nn.PixelShuffle(2), lambda: nn.AdaptiveAvgPool2d((3, 5)), lambda: nn.Upsample(scale_factor=2), *to_three(2 * 60),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "shape", "tokens"),
    [
        (Residual, (2, 12, 12), 0),
        (Products, (6,), 7),
        (Wide, (17, 6), 0),
        (
            lambda: Recurrent(nn.GRU, lambda out, h: out[0] + out[-1], 64, num_layers=2, bidirectional=True),
            (3,),
            7,
        ),
        (odd_images, (2, 7, 6), 0),
        (Everything, (5,), 7),
        (tiles_and_statistics, (9, 7, 7), 0),
        (pooled_and_tiles, (2, 11, 15), 0),
        (Adapted, (2, 10), 0),
        (lambda: Cosine("hand"), (6,), 0),
        (of_computed_images, (2, 8, 8), 0),
        (OPERATIONS["volumes"][0], (2, 4, 5, 6), 0),
        (OPERATIONS["volumes with strides"][0], (2, 5, 5, 5), 0),
    ],
)
def test_sanitizers_find_nothing(tmp_path, model, shape, tokens):
    """Generated code, compiled into a program with address and undefined-behaviour sanitizers."""
    sanitized(tmp_path, Native(make_task(model, shape, tokens=tokens, buffers="average"), flags=QUICK).source)


def sanitized(tmp_path, source, main=MAIN) -> None:
    cpp, program = tmp_path / "main.cpp", tmp_path / "main"
    cpp.write_text(source + main)
    flags = [f for f in QUICK if f not in ("-shared", "-fPIC")]
    checks = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = [*build.compiler(), *flags, *checks, str(cpp), "-o", str(program)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode and "asan" in made.stderr:
        pytest.skip("the sanitizers' runtime libraries are not installed")
    assert made.returncode == 0, made.stderr
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    ran = subprocess.run([str(program)], capture_output=True, text=True, env=environment, timeout=300)
    assert (ran.returncode, ran.stdout) == (0, "0\n"), ran.stderr[-2000:]


# The server's memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [fb.fedadavr(), fb.fedvarp(), fb.mifa(weights="uniform")]
    + [fb.fedadavr(memory=memory) for memory in ("fp16", "int8", "int4")],
    ids=["fedadavr", "fedvarp", "mifa", "fp16", "int8", "int4"],
)
@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_are_swapped_as_torch_would(algorithm, on_disk, monkeypatch, tmp_path):
    """Bit for bit: new clients and known ones, changed weights, late updates, rows that were sent to the file."""
    monkeypatch.setattr(RowArena, "CHUNK", 72_000)  # words: four float32 rows
    layout = fb.Layout.from_shapes([("w", (WIDE_ROW + 5, 1)), ("one", (1,)), ("still", (6,)), ("b", (1501,))])
    x = torch.zeros(layout.size)
    states = [algorithm.gather.init(x, layout) for _ in range(2)]
    databases = []
    if on_disk:
        for i, state in enumerate(states):
            databases.append(Database(tmp_path / f"{i}.db"))
            state.rows.attach(databases[-1], "rows", 3, autocommit=True)
    swaps = [swapper, passes.no_swap]
    assert passes.table_swapper is swapper
    assert swapper(states[0].rows.codec, layout) is not None
    draw = torch.Generator().manual_seed(0)
    for t in range(12):
        delta = torch.randn(5, layout.size, generator=draw)
        delta[:, WIDE_ROW + 6 : WIDE_ROW + 12] = 0  # a layer that stands still
        clients = torch.randperm(11, generator=draw)[:5].numpy()
        n = torch.full((5, 1), 20.0) + (torch.arange(5)[:, None] if t == 7 else 0)
        late = torch.full((5, 1), float(t == 9))
        lr = torch.full((5, 1), 0.03, dtype=torch.float64)
        ctx = ServerContext(t, 5, 11, 220.0, 0.03, 6.0, 6.0, 0.0, layout, np.full(11, 20))
        updates = []
        for i, swap in enumerate(swaps):
            monkeypatch.setattr(passes, "table_swapper", swap)
            acc = algorithm.gather.zero(x)
            for some in (slice(0, 2), slice(2, 5)) if i == 0 else (slice(0, 5),):
                up = Uploads(
                    clients[some],
                    {"delta": delta[some].clone()},
                    n[some],
                    n[some],
                    n[some],
                    late[some],
                    lr[some],
                    {"x": x[None]},
                    {"delta": DELTA},
                )
                acc = algorithm.gather.add(acc, up, states[i], x)
            update, states[i], _ = algorithm.gather.close(acc, states[i], ctx)
            updates.append(update["delta"])
        assert torch.equal(*updates)
    assert torch.equal(states[0].total, states[1].total)
    rows = [s.rows.get(range(11)) for s in states]
    assert all(torch.equal(rows[0][name], rows[1][name]) for name in ("weight", "y"))
    total = sum(w * y for w, y in zip(rows[0]["weight"].double(), rows[0]["y"].double()))
    assert torch.allclose(total, states[0].total, rtol=1e-12, atol=1e-9)
    for database in databases:
        database.close()


# What it needs --------------------------------------------------------------------------------------


def test_cache_is_private_and_used_again(small, monkeypatch):
    task, grad = small
    folder = build.cache_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(f.stat().st_mode) == 0o700 for f in folder.glob("*.so"))
    assert not list(folder.glob("build-*"))
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    y, batch = points(task, 2), make_batch(task, 2, 9)
    assert torch.equal(Native(task)(y, batch)[0], grad(y, batch)[0])


def test_library_that_others_can_write_is_not_loaded(small, monkeypatch):
    task, _ = small
    for library in build.cache_folder().glob("*.so"):
        library.chmod(0o777)
    compiled = []
    real = build._compile
    monkeypatch.setattr(build, "_compile", lambda *args: (compiled.append(args), real(*args)))
    Native(task, flags=QUICK)
    assert compiled


def test_cache_that_others_can_write_is_refused(small, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = build.cache_folder()
    folder.chmod(0o777)
    with pytest.raises(NativeUnavailable, match="chmod 700"):
        Native(small[0])
    folder.chmod(0o700)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(NativeUnavailable, match="another user"):
        Native(small[0])


def test_no_compiler(small, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler" in Native.supports(small[0])
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler"):
        Native(small[0])


@pytest.mark.parametrize("script", ["#!/bin/sh\necho 'error: on strike' >&2\nexit 1\n", "not a program"])
def test_broken_compiler(small, script, tmp_path, monkeypatch):
    broken = tmp_path / "cxx"
    broken.write_text(script)
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(NativeUnavailable, match=r"on strike|does not run"):
        Native(small[0])


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else self.fc(-x)


class Scaled(Branching):
    def forward(self, x):
        return self.fc(x).cumsum(1)


class Weighed(Branching):
    """A map whose weights are made by some function."""

    def __init__(self, made) -> None:
        super().__init__()
        self.made = made

    def forward(self, x):
        return F.linear(x, self.made(self.fc.weight))


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.RReLU()), {}, "RReLU at '1'"),
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, track_running_stats=False)), {}, "running statistics"),
        (Branching, {}, "cannot be traced"),
        (Scaled, {}, "cumsum"),
        (lambda: Weighed(lambda w: w.softmax(1)), {}, "the operation 'softmax' on parameters alone"),
        (lambda: Weighed(lambda w: w.max(dim=1, keepdim=True)[0] * w), {}, "the operation 'getitem' on parameters alone"),
        (lambda: Weighed(lambda w: w.norm(p=1) * w), {}, "the operation 'norm' on parameters alone"),
        (lambda: Weighed(lambda w: (2 * w).mul_(w)), {}, "changes in place"),
        (lambda: Weighed(lambda w: w.t().tanh().t()), {}, "on parameters alone"),
        (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 3)), {}, "outside a layer"),
        (lambda: nn.Linear(6, 3), {"loss": lambda out, y: out.cumsum(1).mean(1)}, "cumsum"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_said(model, options, why):
    task = make_task(model, (6,), **options)
    assert why in Native.supports(task)
    with pytest.raises(NativeUnavailable, match="cannot run natively"):
        Native(task)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (nn.Conv2d(2, 4, 3, stride=2, dilation=2), "dilation and a stride"),
        (nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), "a padding other than zeros"),
        (nn.AvgPool2d(2, ceil_mode=True), "ceil_mode"),
        (nn.AdaptiveMaxPool2d(4), "uneven"),
        (nn.Upsample(scale_factor=1.5), "a whole number of times"),
        (nn.Conv3d(2, 4, 3, stride=2, dilation=2), "dilation and a stride"),
        (nn.Conv3d(2, 4, 3, padding=1, padding_mode="circular"), "a padding other than zeros"),
        (nn.AvgPool3d(2, ceil_mode=True), "ceil_mode"),
        (nn.MaxPool3d(2, dilation=2), "dilation"),
        (nn.AdaptiveAvgPool3d(2), "uneven"),
    ],
)
def test_what_a_layer_cannot_do_is_said(layer, why):
    shape = (2, 7, 7, 7) if type(layer).__name__.endswith("3d") else (2, 7, 7)
    width = layer(torch.zeros(1, *shape)).numel()
    task = make_task(nn.Sequential(layer, nn.Flatten(), nn.Linear(width, 3)), shape)
    assert why in Native.supports(task)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weight_norm_by_a_hook():
    """The older of the two, which computes weights before each pass."""
    norm = nn.utils.weight_norm
    task = make_task(
        lambda: Chain(lambda: norm(nn.Linear(6, 5)), nn.Tanh, lambda: norm(nn.Linear(5, 3))), (6,)
    )
    grad = Native(task, threads=2, flags=QUICK)
    assert_equals_autograd(task, grad, 2, 13)
    assert_same_bits(task, grad)


def test_computed_weights_are_there_once():
    """And not once for each sample, nor for each vector's place."""
    wide = nn.utils.parametrizations.weight_norm

    def workspace(norm) -> int:
        task = make_task(lambda: Chain(lambda: norm(nn.Linear(300, 200)), nn.Tanh, *to_three(200)), (300,))
        source = generate(native._graph(task), "cross_entropy", 8, 64)
        assert "blocks = 8;" in source
        return 8 * int(source.partition("workspace = ")[2].partition(";")[0])

    assert workspace(wide) - workspace(lambda layer: layer) < 8 * 300 * 200


def test_rows_of_no_length():
    """Their lengths have no gradient, as in autograd."""

    def model() -> nn.Module:
        return Chain(
            lambda: nn.Linear(6, 5), nn.ReLU, end=lambda x: F.normalize(x)[:, :3] + x.norm(dim=1)[:, None]
        )

    task = make_task(model, (6,))
    grad, y = Native(task, flags=QUICK), points(task, 2)
    y[:, 30:] = -10.0
    got, _ = grad(y, make_batch(task, 2, 13))
    assert not got.any()
    assert got.isfinite().all()


def test_hooks_are_followed():
    """On layers that are traced through; what a hook does to one that is lowered as a layer is noticed."""

    def hooked() -> nn.Module:
        model = nn.Linear(7, 3)
        model.register_forward_hook(lambda module, inputs, output: 2 * output + 1.5 * inputs[0][:, :1])
        return nn.Sequential(model)

    task = make_task(hooked, (7,))
    assert_equals_autograd(task, Native(task, flags=QUICK), 2, 13)

    def unseen() -> nn.Module:
        model = nn.InstanceNorm1d(7)
        model.register_forward_hook(lambda module, inputs, output: 2 * output + 1.5 * inputs[0])
        return nn.Sequential(model, nn.Flatten(), nn.Linear(28, 3))

    with pytest.raises(NativeUnavailable, match="gives losses"):
        Native(make_task(unseen, (7, 4)), flags=QUICK)


def test_gradient_that_a_hook_bends_is_noticed():
    """At every start, whatever other model of the same code was right."""

    def bent(by: float = 1.0) -> nn.Module:
        model = nn.Linear(7, 4)
        model.weight.register_hook(lambda g: by * g)
        return nn.Sequential(model, nn.Tanh(), nn.Linear(4, 3))

    for _ in range(2):
        with pytest.raises(NativeUnavailable, match="gradient is not autograd's"):
            Native(make_task(lambda: bent(0.5), (7,)), flags=QUICK)
        Native(make_task(bent, (7,)), flags=QUICK)


@pytest.mark.parametrize(("memory", "much"), [("fp16", 2000.0), ("int8", 1e38), ("int4", 1e38)])
def test_what_a_code_cannot_hold_changes_no_row(memory, much):
    gather = fb.fedadavr(memory=memory).gather
    layout = fb.Layout.from_shapes([("w", (WIDE_ROW + 5, 1))])
    x = torch.zeros(layout.size)
    state = gather.init(x, layout)
    one = torch.ones(2, 1)
    delta = torch.ones(2, layout.size)
    delta[1, 7] = much  # over a rate of 0.03 it is beyond the codes
    sent, declared = {"x": x[None]}, {"delta": DELTA}
    up = Uploads(np.arange(2), {"delta": delta}, one, one, one, 0 * one, 0.03 * one.double(), sent, declared)
    with pytest.raises(WireError):
        gather.add(gather.zero(x), up, state, x)
    assert len(state.rows) == 0


@pytest.mark.parametrize("count", [2**14, 61_707])
def test_normal_numbers_are_drawn_as_numpy_would(count, monkeypatch):
    keys = rng.bits(3, "some", np.arange(3))
    compiled = normals(keys, count)
    assert passes.normals is normals
    assert np.array_equal(compiled, rng.gaussian(keys, count))
    monkeypatch.setattr(passes, "normals", passes.no_normals)
    assert np.array_equal(compiled, rng.gaussian(keys, count))
    assert np.array_equal(compiled[1:2], rng.gaussian(keys[1:2], count))
    quarters = np.quantile(compiled, [0.05, 0.25, 0.5, 0.75, 0.95], axis=1).T
    np.testing.assert_allclose(quarters, [[-1.6449, -0.6745, 0, 0.6745, 1.6449]] * 3, atol=0.06)
    assert normals(keys, 100) is None  # too few to be worth it


# Samples of different lengths -----------------------------------------------------------------------


class Padding(nn.Module):
    """A transformer over padded text that does or does not look at what is not there."""

    def __init__(self, looks: str = "") -> None:
        super().__init__()
        torch.manual_seed(9)
        self.looks = looks
        self.words, self.places, self.head = nn.Embedding(7, 6), nn.Embedding(12, 6), nn.Linear(6, 3)
        layer = nn.TransformerEncoderLayer(6, 2, 11, 0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        nn.init.zeros_(self.head.weight)  # so that the first outputs tell nothing

    def forward(self, input_ids, attention_mask):
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        absent = None if self.looks == "attention" else attention_mask == 0
        hidden = self.body(x, src_key_padding_mask=absent)
        if self.looks == "mean":
            return self.head(hidden.mean(1))
        seen = attention_mask.unsqueeze(-1).float()
        return self.head((hidden * seen).sum(1) / seen.sum(1))


def padded_task(model=Padding, longest=9, test=9, value=0) -> Task:
    draw = np.random.default_rng(0)

    def some(count, most):
        said = [draw.integers(0, 7, draw.integers(1, most)).tolist() for _ in range(count - 1)] + [[1] * most]
        return {"input_ids": said}, [len(s) % 3 for s in said]

    held = [some(30, longest), some(60, longest)]
    return Task.from_arrays(model, held, some(20, test), collate=fb.pad(value=value))


@pytest.mark.parametrize("value", [0, 5])
def test_padded_samples_give_what_cut_ones_give(value):
    task = padded_task(value=value)
    assert Native.supports(task) is None
    grad, y, batch = Native(task, threads=2, flags=QUICK), points(task, 3), make_batch(task, 3, 5)
    got, want = grad(y, batch), LoopGradient(task)(y, batch)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[0], want[0], rtol=1e-3, atol=2e-6)
    assert_same_bits(task, grad)


@pytest.mark.parametrize("test", [4, 9, 12])
def test_a_padded_test_set_may_be_shorter_or_longer(test):
    task = padded_task(test=test)
    grad, y = Native(task, threads=2, flags=QUICK), points(task, 1)[0]
    for mine, other in zip(*(g.evaluate(y, *task.test) for g in (grad, grad.alone()))):
        torch.testing.assert_close(mine, other)
    for mine, other in zip(*(g.evaluate(y, *task.test) for g in (grad, LoopGradient(task)))):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("looks", ["attention", "mean"])
def test_a_model_that_sees_padding_is_not_compiled(looks):
    task = padded_task(lambda: Padding(looks))
    assert "depend on padding" in Native.supports(task)
    with pytest.raises(EngineError, match="depend on padding"):
        fb.simulate(
            task,
            fb.fedavg(),
            fb.Work(batch=5),
            fb.rounds(1, clients=2),
            engine="in_process(backend='native')",
        )
    assert "native" not in fb.simulate(task, fb.fedavg(), fb.Work(batch=5), fb.rounds(1, clients=2)).engine


def test_a_run_over_padded_text_ends_where_the_loop_ends():
    task, ends = padded_task(), {}
    for backend in ("native", "loop"):
        engine = f"in_process(backend={backend!r})"
        ends[backend] = fb.simulate(
            task, fb.scaffold(), fb.Work(lr=0.1, batch=5), fb.rounds(3, clients=2), engine=engine
        )
    torch.testing.assert_close(ends["native"].x, ends["loop"].x, rtol=1e-4, atol=1e-5)
    for mine, other in zip(ends["native"].history, ends["loop"].history):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
