"""Are losses of the user's own compiled with the model, and equal to autograd's, or refused in a sentence?"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from test_native import (
    MAIN,
    QUICK,
    ROWS,
    Chain,
    Recurrent,
    assert_equals_autograd,
    assert_same_bits,
    assert_same_zeros,
    autograd_with_zeros,
    make_batch,
    points,
    sanitized,
    to_three,
)  # fmt: skip
from torch import nn
from torch.nn import functional as F

import fedbraid as fb
from fedbraid.core.traits import ExamplePrivacy
from fedbraid.data.augment import Flip
from fedbraid.data.batches import Batch, DrawnBatches
from fedbraid.data.task import Task
from fedbraid.engines import planning
from fedbraid.engines.autograd import LoopGradient
from fedbraid.engines.engine import Setup
from fedbraid.engines.native_backend import Native
from fedbraid.engines.per_example import LoopedPerExample
from fedbraid.errors import DataError, NativeUnavailable
from fedbraid_native import build

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler is installed")

BY_CLASS = torch.tensor([0.5, 1.0, 2.5])


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def targets(kind, seed=6) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    classes = {"class": (), "words": (6,), "pixels": (4, 5)}
    if kind in classes:
        return torch.randint(3, (ROWS, *classes[kind]), generator=draw)
    if kind == "labels":
        return torch.randint(2, (ROWS, 3), generator=draw).float()
    numbers = torch.randn(ROWS, 3, generator=draw)
    return numbers.softmax(1) if kind == "likely" else numbers


def plain() -> nn.Module:
    return Chain(lambda: nn.Linear(6, 8), nn.Tanh, lambda: nn.Linear(8, 3))


def own(loss, kind="class", model=plain, shape=(6,), tokens=0, **options) -> Task:
    torch.manual_seed(1)
    x = torch.randint(tokens, (ROWS, *shape)) if tokens else torch.randn(ROWS, *shape)
    y = kind if isinstance(kind, torch.Tensor) else targets(kind)
    return Task.from_table(model, x, y, torch.arange(ROWS), [0, 30, ROWS], loss=loss, **options)


def smoothed(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)


def focal(outputs, targets):
    likely = outputs.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    return -((1 - likely.exp()) ** 2) * likely


def focal_with_weights(outputs, targets):
    """As the books have it: weights by number, and none of the factor's gradient."""
    cost = F.cross_entropy(outputs, targets, reduction="none")
    return BY_CLASS[targets] * (1 - torch.exp(-cost)).detach().pow(1.5) * cost


def without_gradient(outputs, targets):
    with torch.no_grad():
        weight = torch.sigmoid(outputs).sum(1)
    return weight * F.cross_entropy(outputs, targets, reduction="none")


def masked(outputs, targets):
    """The mean over words that are not padding."""
    each = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none", ignore_index=0)
    return each.sum(1) / (targets != 0).sum(1).clamp(min=1)


def margin(outputs, targets):
    hot = F.one_hot(targets, 3)
    right = (outputs * hot).sum(1, keepdim=True)
    return (torch.relu(1 + outputs - right) * (1 - hot)).sum(1)


def by_hand(outputs, targets):
    return outputs.logsumexp(1) - outputs.gather(1, targets.view(-1, 1))[:, 0]


def dice(outputs, targets):
    """Of each class's pixels."""
    likely, hot = outputs.softmax(1), F.one_hot(targets, 3).permute(0, 3, 1, 2).float()
    both = (likely * hot).sum((2, 3))
    return 1 - (2 * both / (likely.sum((2, 3)) + hot.sum((2, 3)) + 1e-6)).mean(1)


def in_between(outputs, targets):
    seen = (targets > -0.5) & (targets < 0.5)
    return torch.where(seen, (outputs - targets).abs(), 0.1 * (outputs - targets).square()).mean(1)


def of_words():
    return Chain(lambda: nn.Embedding(7, 5), lambda: nn.Linear(5, 3))


def of_pixels():
    return nn.Conv2d(2, 3, 3, padding=1)


WORDS = {"model": of_words, "shape": (6,), "tokens": 7}
PIXELS = {"model": of_pixels, "shape": (2, 4, 5)}


def each(function, **options):
    """A loss of PyTorch's, the mean over what it gives for a sample."""

    def loss(outputs, targets):
        more = {k: v.to(outputs) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        cost = function(outputs, targets, reduction="none", **more)
        return cost.flatten(1).mean(1)

    return loss


def of_class(function, **options):
    def loss(outputs, targets):
        more = {k: v.to(outputs) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        return function(outputs, targets, reduction="none", **more)

    return loss


def nll(**options):
    return lambda outputs, targets: of_class(F.nll_loss, **options)(outputs.log_softmax(1), targets)


LOSSES = {
    "cross-entropy": (of_class(F.cross_entropy), "class", {}),
    "smoothed": (smoothed, "class", {}),
    "weighed": (of_class(F.cross_entropy, weight=BY_CLASS), "class", {}),
    "smoothed, weighed, one left out": (
        of_class(F.cross_entropy, weight=BY_CLASS, label_smoothing=0.2, ignore_index=1), "class", {},
    ),
    "of likely classes": (of_class(F.cross_entropy), "likely", {}),
    "of likely classes, smoothed": (of_class(F.cross_entropy, weight=BY_CLASS, label_smoothing=0.2), "likely", {}),
    "a module": (nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1), "class", {}),
    "words": (lambda o, t: smoothed(o.transpose(1, 2), t).mean(1), "words", WORDS),
    "words without padding": (masked, "words", WORDS),
    "pixels": (each(F.cross_entropy, label_smoothing=0.1, weight=BY_CLASS), "pixels", PIXELS),
    "dice": (dice, "pixels", PIXELS),
    "nll": (nll(), "class", {}),
    "nll, weighed, one left out": (nll(weight=BY_CLASS, ignore_index=2), "class", {}),
    "with logits": (each(F.binary_cross_entropy_with_logits), "labels", {}),
    "with logits, weighed": (
        each(F.binary_cross_entropy_with_logits, pos_weight=BY_CLASS, weight=BY_CLASS.flip(0)), "labels", {},
    ),
    "binary": (lambda o, t: F.binary_cross_entropy(o.sigmoid(), t, reduction="none").mean(1), "labels", {}),
    "squares": (each(F.mse_loss), "numbers", {}),
    "sizes": (each(F.l1_loss), "numbers", {}),
    "smooth sizes": (each(F.smooth_l1_loss, beta=0.7), "numbers", {}),
    "huber": (each(F.huber_loss, delta=0.4), "numbers", {}),
    "quantile": (lambda o, t: torch.maximum(0.9 * (t - o), -0.1 * (t - o)).mean(1), "numbers", {}),
    "masks": (in_between, "numbers", {}),
    "margin": (margin, "class", {}),
    "focal": (focal, "class", {}),
    "focal with weights": (focal_with_weights, "class", {}),
    "without gradient": (without_gradient, "class", {}),
    "by hand": (by_hand, "class", {}),
    "of the sample's own class": (
        lambda o, t: -o.log_softmax(1)[torch.arange(o.shape[0]), t] + o[torch.arange(t.size(0)), t] ** 2, "class", {},
    ),
    "rows of a matrix": (lambda o, t: -(o.log_softmax(1) * torch.eye(3)[t]).sum(1), "class", {}),
    "data": (lambda o, t: (o - t).square().mean(1) * (o.data ** 2).mean(1), "numbers", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_loss(name):
    """Against autograd in double precision, for odd batches and masks; the same bits on threads and in blocks."""
    loss, kind, options = LOSSES[name]
    task = own(loss, kind, **options)
    assert Native.supports(task) is None
    grad = Native(task, threads=2, flags=QUICK)
    assert_equals_autograd(task, grad, 1, 1)
    assert_equals_autograd(task, grad, 2, 70)
    torch.manual_seed(5)
    weight = torch.rand(3, 19) * (torch.rand(3, 19) < 0.6)
    weight[1] = 0
    assert_equals_autograd(task, grad, 3, 19, weight)
    assert_same_bits(task, grad)
    said = grad.evaluate(task.initial(0), task.inputs, task.targets)
    want = LoopGradient(task).evaluate(task.initial(0), task.inputs, task.targets)
    assert torch.equal(said[0], want[0])
    assert said[1] is want[1] is None or torch.equal(said[1], want[1])


def lenet() -> nn.Module:
    return Chain(
        lambda: nn.Conv2d(1, 4, 5), nn.ReLU, lambda: nn.MaxPool2d(2), lambda: nn.Conv2d(4, 6, 3), nn.ReLU,
        lambda: nn.MaxPool2d(2), nn.Flatten, lambda: nn.Linear(24, 10), nn.ReLU, lambda: nn.Linear(10, 3),
    )  # fmt: skip


def gru() -> nn.Module:
    return Recurrent(nn.GRU, lambda out, h: out[:, -1], batch_first=True)


def dropping() -> nn.Module:
    return Chain(lambda: nn.Linear(6, 12), nn.ReLU, lambda: nn.Dropout(0.4), *to_three(12))


MODELS = {
    "lenet": (lenet, (1, 18, 18), 0),
    "gru": (gru, (5,), 7),
    "wide": (lambda: nn.Linear(112, 3), (112,), 0),
}


@pytest.mark.parametrize("loss", [smoothed, focal_with_weights])
@pytest.mark.parametrize("model", MODELS)
def test_models(model, loss):
    """Inputs are read where they lie, augmented or not."""
    build, shape, tokens = MODELS[model]
    task = own(loss, model=build, shape=shape, tokens=tokens)
    grad = Native(task, threads=2)
    assert_equals_autograd(task, grad, 3, 13)
    assert_same_bits(task, grad)
    if model == "lenet":
        batch = Batch(
            task.inputs, task.targets, torch.arange(18).view(2, 9), None, Flip(), torch.rand(2, 9, 3)
        )
        y = points(task, 2)
        for got, want in zip(grad(y, batch), LoopGradient(task)(y.clone(), batch)):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def test_dropout(monkeypatch):
    """The same zeros anywhere; without seeds there are none."""
    task = own(smoothed, model=dropping)
    grad = Native(task, threads=2, flags=QUICK)
    y, batch = points(task, 3), make_batch(task, 3, 70)
    module = task.layout.load(task.module(), y[0]).eval()
    smoothed(module(batch.x()[0]), batch.y()[0]).mean().backward()
    want = torch.cat([p.grad.flatten() for p in module.parameters()])
    torch.testing.assert_close(grad(y, batch)[0][0], want, rtol=1e-3, atol=2e-6)
    batch.noise = np.array([5, 2**63 + 1, 17], np.uint64)
    got = grad(y, batch)[0].clone()
    assert_same_zeros(task, grad, y, batch, got)
    for i, noise in enumerate(batch.noise):
        want = autograd_with_zeros(task, y, batch, i, int(noise), monkeypatch)
        torch.testing.assert_close(got[i], want, rtol=1e-3, atol=2e-6)


def test_statistics():
    """Of batches that are there in full, running ones included."""

    def model():
        return Chain(lambda: nn.Linear(6, 8), lambda: nn.BatchNorm1d(8), nn.ReLU, *to_three(8))

    task = own(smoothed, model=model, buffers="average")
    grad, y = Native(task, threads=2, flags=QUICK), points(task, 2).abs()
    batch, theirs = Batch(task.inputs, task.targets, torch.arange(60).view(2, 30)), y.clone()
    for got, want in zip((*grad(y, batch), y), (*LoopGradient(task)(theirs, batch), theirs)):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return -g


class Counts:
    """Another loss each time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs, targets):
        self.calls += 1
        return smoothed(outputs, targets) * self.calls


class CountsTensors(Counts):
    """In a tensor that stays where it is."""

    def __init__(self) -> None:
        self.calls = torch.zeros(())


class Makes:
    """Weights when they are first needed."""

    def __init__(self) -> None:
        self.weights = None

    def __call__(self, outputs, targets):
        if self.weights is None:
            self.weights = torch.tensor([0.5, 1.0, 2.5])
        return self.weights[targets] * smoothed(outputs, targets)


REFUSED = {
    "looks at inputs": lambda outputs, targets, inputs: smoothed(outputs, targets) + inputs.mean(1),
    "looks at reference": lambda outputs, targets, reference: smoothed(outputs, targets),
    "the loss cannot be traced": lambda o, t: smoothed(o, t) if (o > 0).any() else o.mean(1),
    "'equal' makes a number of what samples hold": lambda o, t: smoothed(o, t) * torch.equal(o, o),
    "'getitem' at 'getitem' is not supported": lambda o, t: smoothed(o, t) * o[0, 0].item(),
    "'argmax' at 'argmax' is not supported": lambda o, t: smoothed(o, o.argmax(1)),
    "takes samples together": lambda o, t: F.cross_entropy(o, t) + 0 * o.mean(1),
    "counts classes itself": lambda o, t: (F.one_hot(t) - o).square().mean(1),
    "another each time": lambda o, t: smoothed(o, t) * random.random(),
    "mixes the samples": lambda o, t: smoothed(o, t) - o.mean(0).sum(),
    "draws numbers": lambda o, t: smoothed(o + torch.randn(3), t),
    "something other than tensors": lambda o, t: smoothed(o, t) * torch.arange(o.shape[0]),
    "'randn_like' ": lambda o, t: smoothed(o + torch.randn_like(o), t),
    "classes that are not the targets": lambda o, t: smoothed(o, (t * 2).clamp(max=2)),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_followed_is_said(why):
    said = Native.supports(own(REFUSED[why]))
    assert said is not None
    assert why in said
    assert "\n" not in said


def test_other_refusals():
    assert "another each time" in Native.supports(own(Counts()))
    assert "another each time" in Native.supports(own(CountsTensors()))
    assert Native.supports(own(Makes())) is None
    assert "torch.uint8" in Native.supports(
        own(lambda o, t: (o.sum(1) - t).abs(), targets("class").to(torch.uint8))
    )
    assert "2^24" in Native.supports(own(lambda o, t: (o.sum(1) - t).abs(), targets("class") + 2**24))


@pytest.mark.parametrize("model", [plain, dropping])
def test_a_gradient_that_is_not_the_loss_s_is_noticed(model):
    """Whether the model drops something or not."""
    task = own(lambda o, t: smoothed(Reversed.apply(o), t), model=model)
    assert Native.supports(task) is None
    with pytest.raises(NativeUnavailable, match="not autograd's"):
        Native(task, flags=QUICK)


@pytest.mark.parametrize("bad", [-1, 3])
def test_labels_beyond_the_outputs_are_refused(bad):
    task = own(smoothed)
    grad, batch = Native(task, flags=QUICK), Batch(task.inputs, task.targets.clone(), torch.arange(8)[None])
    batch.targets[5] = bad
    with pytest.raises(DataError, match=f"a label is {bad}, but the loss knows 0 to 2 only"):
        grad(points(task, 1), batch)
    with pytest.raises(DataError, match="a label is"):
        grad.evaluate(points(task, 1)[0], batch.inputs, batch.targets)
    batch.targets[5] = -100  # costs nothing
    got, losses = grad(points(task, 1), batch)
    want, theirs = LoopGradient(task)(points(task, 1), batch)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(losses, theirs)


def mixture(outputs, targets):
    """What reads and writes by number."""
    likely = outputs.log_softmax(1)
    more = F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1, weight=BY_CLASS)
    picked = F.nll_loss(likely, targets, reduction="none") + likely.gather(1, targets[:, None]).square()[:, 0]
    return more + BY_CLASS[targets] * picked + (F.one_hot(targets, 3) * outputs.detach()).sum(1)


def test_sanitizers_find_nothing(tmp_path):
    grad = Native(own(mixture, model=dropping), flags=QUICK)
    main = MAIN.replace("*t = new int64_t[rows],", "*unused = nullptr,").replace(
        "uint32_t seed = 1;", "uint32_t seed = 1; float* t = new float[rows]; (void)unused;"
    )
    sanitized(tmp_path, grad.source, main.replace("draw() % Model::outputs", "float(draw() % 3)"))


def test_a_column_of_targets_is_a_class():
    """The other is any number."""
    both = torch.stack([targets("class"), torch.arange(ROWS) - 40], 1)
    task = own(lambda o, t: smoothed(o, t[:, 0]) + 0.01 * (o[:, 0] - t[:, 1]).abs(), both)
    grad = Native(task, threads=2, flags=QUICK)
    assert_equals_autograd(task, grad, 2, 13)
    both[3, 0] = 3
    with pytest.raises(DataError, match="a label is 3, but the loss knows 0 to 2 only"):
        grad(points(task, 1), Batch(task.inputs, both, torch.arange(8)[None]))


def uneven(loss) -> Task:
    torch.manual_seed(3)
    clients = [(torch.randn(n, 6), torch.randint(3, (n,))) for n in (5, 23, 40, 9)]
    return fb.Task.from_arrays(plain, clients, (torch.randn(20, 6), torch.randint(3, (20,))), loss=loss)


@pytest.mark.parametrize("loss", [smoothed, focal])
def test_a_run_ends_where_the_loop_ends(loss):
    task, work = uneven(loss), fb.Work(lr=0.1, batch=8, momentum=0.9, epochs=2)
    ours, loop = (
        fb.simulate(
            task, fb.fedavg(), work, fb.rounds(4, clients=3), seed=2, engine=f"in_process(backend={b!r})"
        )
        for b in ("native", "loop")
    )
    torch.testing.assert_close(ours.x, loop.x, rtol=1e-3, atol=1e-5)
    for measure in ("loss", "accuracy"):
        assert ours.last(measure) == pytest.approx(loop.last(measure), rel=1e-4)


def test_auto_takes_it_for_a_long_job():
    task = own(smoothed, model=lenet, shape=(1, 18, 18))
    job = Setup(fb.fedavg(), task, fb.Work(lr=0.1, batch=8), 0, 2, 2 * 10**6)
    plan, compiled = planning.settle(job, planning.facts_of(job))
    assert plan.backend == "native"
    assert isinstance(compiled, Native)


@pytest.mark.parametrize("loss", [smoothed, focal_with_weights])
@pytest.mark.parametrize("z", [0.0, 1.3])
def test_single_examples(loss, z):
    """Clipped one by one, and noised."""
    task, hide = uneven(loss), ExamplePrivacy(0.7, z)
    drawn = DrawnBatches(task, fb.Work(batch=8, steps=5), np.arange(task.clients), 0, 0, "simulated")
    y, batch = task.vector(0).repeat(task.clients, 1), drawn.batch(0)
    for got, want in zip(
        Native(task, examples=hide)(y, batch), LoopedPerExample(hide, LoopGradient(task))(y, batch)
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
