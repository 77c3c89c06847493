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

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import fedbraid as fb
from fedbraid.core import passes
from fedbraid.core.declare import DELTA
from fedbraid.core.gather import WIDE, Info, Uploads
from fedbraid.core.rows import Slab
from fedbraid.data.batches import Batch, Flip
from fedbraid.data.task import Task
from fedbraid.engines import native
from fedbraid.engines.gradients import Loop
from fedbraid.engines.native import Native, NativeUnavailable, build
from fedbraid.engines.native.swap import swapper
from fedbraid.errors import DataError, EngineError, WireError
from fedbraid.run.database import Database

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler is installed")

QUICK = tuple("-O1" if flag == "-O3" else flag for flag in build.FLAGS)
ROWS = 90


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def make_task(model, shape, loss="cross_entropy", outputs=3, **options) -> Task:
    torch.manual_seed(1)
    x = torch.randn(ROWS, *shape)
    classes = {"cross_entropy": outputs, "logistic": 2}.get(loss)
    y = torch.randint(classes, (ROWS,)) if classes else torch.randn(ROWS, outputs)
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
        module = task.layout.load(task.module(), y[i]).double()
        targets = batch.y()[i]
        each = task.per_example(
            module(batch.x()[i].double()), targets if task.classifies else targets.double()
        )
        w = torch.ones(len(each)) if batch.weight is None else batch.weight[i]
        loss = (w * each).sum() / w.sum() if w.sum() else (0 * each).sum()
        loss.backward()
        gradients.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if p.grad is None else p.grad).detach().flatten()
                    for p in module.parameters()
                ]
            )
        )
        losses.append(loss.detach())
    return torch.stack(gradients).float(), torch.stack(losses).float()


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

    activations = [nn.ReLU, nn.Tanh, nn.Sigmoid, lambda: nn.LeakyReLU(draw.choice([0.01, 0.3])), nn.Identity]
    for _ in range(draw.randint(1, 3)):
        kernel = tuple(min(draw.randint(1, 5), n) for n in now.shape[2:])
        border = tuple(draw.randint(0, min(2, k)) for k in kernel)
        stride = (draw.choice([1, 1, 2]), draw.choice([1, 1, 2]))
        append(
            nn.Conv2d(
                now.shape[1], draw.choice([2, 4, 6, 8]), kernel, stride, border, bias=draw.random() < 0.7
            )
        )
        if draw.random() < 0.4:
            append(nn.GroupNorm(2, now.shape[1]))
        first, second = draw.choice(activations)(), draw.choice(activations)()
        append(first)
        if min(now.shape[2:]) >= 4:
            k = draw.choice([2, 3])
            pool = draw.choice([nn.MaxPool2d, nn.AvgPool2d])
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
    want, said = Loop(task).evaluate(x, task.inputs, task.targets)
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
    ticks, start = 0, time.perf_counter()
    work.start()
    while work.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 5, f"{ticks} ticks in {time.perf_counter() - start:.3f} s"


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
    float *x = new float[rows * Model::inputs], *weight = new float[m * batch];
    int64_t *at = new int64_t[m * batch], *t = new int64_t[rows], *best = new int64_t[rows];
    uint32_t seed = 1;
    auto draw = [&] { return (seed = seed * 1664525u + 1013904223u) >> 16; };
    for (int64_t k = 0; k < m * Model::parameters; k++) y[k] = draw() / 65536.f - 0.5f;
    for (int64_t k = 0; k < rows * Model::inputs; k++) x[k] = draw() / 65536.f;
    for (int64_t k = 0; k < rows; k++) t[k] = draw() % Model::outputs;
    for (int64_t k = 0; k < m * batch; k++) at[k] = draw() % rows, weight[k] = draw() % 3;
    int bad = 0;
    for (int64_t b : {1, 13, 77})
        for (int threads : {1, 2, 5})
            for (float* w : {weight, (float*)nullptr})
                bad |= fedbraid_gradient(y, g, losses, m, b, at, at, w, x, rows, t, rows, threads);
    bad |= fedbraid_gradient(y, g, losses, 1, batch, at, at, weight, x, rows, t, rows, 2);
    bad |= fedbraid_evaluate(y, x, rows, t, losses, best, 2);
    std::printf("%d\\n", bad);
    delete[] y; delete[] g; delete[] losses; delete[] x; delete[] weight; delete[] at; delete[] t; delete[] best;
    return bad;
}
"""


def test_sanitizers_find_nothing(tmp_path):
    """Generated code, compiled into a program with address and undefined-behaviour sanitizers."""
    source = Native(make_task(Residual, (2, 12, 12)), flags=QUICK).source
    cpp, program = tmp_path / "main.cpp", tmp_path / "main"
    cpp.write_text(source + MAIN)
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
    monkeypatch.setattr(Slab, "CHUNK", 72_000)  # words: four float32 rows
    layout = fb.Layout.from_shapes([("w", (WIDE + 5, 1)), ("one", (1,)), ("still", (6,)), ("b", (1501,))])
    x = torch.zeros(layout.size)
    states = [algorithm.gather.init(x, layout) for _ in range(2)]
    databases = []
    if on_disk:
        for i, state in enumerate(states):
            databases.append(Database(tmp_path / f"{i}.db"))
            state.rows.attach(databases[-1], "rows", 3, alone=True)
    swaps = [swapper, passes.no_swap]
    assert passes.swapper is swapper
    assert swapper(states[0].rows.codec, layout) is not None
    draw = torch.Generator().manual_seed(0)
    for t in range(12):
        delta = torch.randn(5, layout.size, generator=draw)
        delta[:, WIDE + 6 : WIDE + 12] = 0  # a layer that stands still
        clients = torch.randperm(11, generator=draw)[:5].numpy()
        n = torch.full((5, 1), 20.0) + (torch.arange(5)[:, None] if t == 7 else 0)
        late = torch.full((5, 1), float(t == 9))
        lr = torch.full((5, 1), 0.03, dtype=torch.float64)
        info = Info(t, 5, 11, 220.0, 0.03, 6.0, 6.0, 0.0, layout, np.full(11, 20))
        updates = []
        for i, swap in enumerate(swaps):
            monkeypatch.setattr(passes, "swapper", swap)
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
            update, states[i] = algorithm.gather.close(acc, states[i], info)
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


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    model[0].bias.requires_grad_(False)
    return model


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else self.fc(-x)


class Scaled(Branching):
    def forward(self, x):
        return self.fc(2 * x)


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.Softplus()), {}, "Softplus at '1'"),
        (lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)), {}, "p=0.5"),
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), {"buffers": "average"}, "running statistics"),
        (frozen, {}, "'0.bias' is frozen"),
        (Branching, {}, "cannot be traced"),
        (Scaled, {}, "mul"),
        (lambda: nn.Linear(6, 3), {"loss": lambda out, y: out.square().mean(1)}, "custom function"),
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
        (nn.Conv2d(2, 4, 3, groups=2), "groups"),
        (nn.MaxPool2d(2, ceil_mode=True), "ceil_mode"),
        (nn.AdaptiveAvgPool2d(4), "uneven"),
        (nn.Linear(7, 3), "flatten them first"),
    ],
)
def test_what_a_layer_cannot_do_is_said(layer, why):
    width = layer(torch.zeros(1, 2, 7, 7)).numel()
    task = make_task(nn.Sequential(layer, nn.Flatten(), nn.Linear(width, 3)), (2, 7, 7))
    assert why in Native.supports(task)


def test_hook_that_tracing_cannot_see_is_noticed():
    def hooked() -> nn.Module:
        model = nn.Linear(7, 3)
        model.register_forward_hook(lambda module, inputs, output: 2 * output + 1.5 * inputs[0][:, :1])
        return nn.Sequential(model)

    with pytest.raises(NativeUnavailable, match="gives losses"):
        Native(make_task(hooked, (7,)), flags=QUICK)


@pytest.mark.parametrize(("memory", "much"), [("fp16", 2000.0), ("int8", 1e38), ("int4", 1e38)])
def test_what_a_code_cannot_hold_changes_no_row(memory, much):
    gather = fb.fedadavr(memory=memory).gather
    layout = fb.Layout.from_shapes([("w", (WIDE + 5, 1))])
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
