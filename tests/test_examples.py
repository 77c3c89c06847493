"""Are single examples hidden inside a client: clipped one by one, noised, accounted, and the same on every backend?"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fedbraid as fb
from fedbraid.core import rng
from fedbraid.core.traits import ExamplePrivacy
from fedbraid.data.batches import DrawnBatches
from fedbraid.engines.autograd import LoopGradient, VmapGradient
from fedbraid.engines.native_backend import Native
from fedbraid.engines.per_example import LoopedPerExample, VectorizedPerExample
from fedbraid_native.build import compiler

dp = pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
from dp_accounting import pld  # noqa: E402

DELTA = 1e-3
CLIP, Z = 0.7, 1.3
WORK = fb.Work(lr=0.05, epochs=1, batch=8)
SURE = fb.Work(lr=0.05, steps=2, batch=None)  # every sample in every step, which is accounted in no time
native = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


def hidden(a=None, **options):
    options = {"clip": CLIP, "noise": Z, "delta": DELTA, **options}
    return fb.private(a or fb.fedavg(), unit="example", **options)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 8, 5, padding=2), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 9, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(9, 6, 3, stride=2, groups=3), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip


MODELS = {
    "convolutions": (convolutions, (2, 8, 8)),
    "pooled at once": (
        lambda: nn.Sequential(nn.Conv2d(2, 7, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(112, 4)), (2, 8, 8)
    ),
    "one row of the table": (lambda: nn.Linear(64, 4), (64,)),
    "rows": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Flatten(), nn.Linear(21, 4, bias=False)), (3, 5)),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(5), nn.Flatten(), nn.Linear(15, 4)), (3, 5)),
}  # fmt: skip


def some(name, sizes=(20, 7, 33)):
    make, shape = MODELS[name]
    draw = torch.Generator().manual_seed(0)
    clients = [
        (3 * torch.randn(n, *shape, generator=draw), torch.randint(4, (n,), generator=draw)) for n in sizes
    ]
    return fb.Task.from_arrays(make, clients)


def drawn(task, k=0, hide="simulated", batch=8):
    """(all clients at the start, their k-th batch)."""
    clients = np.arange(task.clients)
    plan = DrawnBatches(task, fb.Work(batch=batch, steps=5), clients, 0, 0, hide)
    return task.vector(0).repeat(task.clients, 1), plan.batch(k)


# One by one -----------------------------------------------------------------------------------------------


@native
@pytest.mark.parametrize("z", [0.0, Z])
@pytest.mark.parametrize("name", MODELS)
def test_every_backend_takes_the_same_gradients(name, z):
    task, own = some(name), ExamplePrivacy(CLIP, z)
    y, batch = drawn(task)
    want, losses = LoopedPerExample(own, LoopGradient(task))(y, batch)
    for grad in (VectorizedPerExample(own, VmapGradient(task), task), Native(task, examples=own)):
        got, mean = grad(y, batch)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(mean, losses, rtol=1e-4, atol=1e-6)


def test_gradients_are_clipped_one_by_one_as_autograd_takes_them():
    task = some("convolutions")
    y, batch = drawn(task)
    module = task.module()
    for i in range(task.clients):
        total = torch.zeros(task.layout.size)
        rows = batch.client(i).rows[0]
        for row in rows:
            task.layout.load(module, y[i]).zero_grad()
            out = module(task.inputs[row][None])
            nn.functional.cross_entropy(out, task.targets[row][None]).backward()
            g = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
            total += g * min(1, CLIP / g.norm())
        got, _ = LoopedPerExample(ExamplePrivacy(CLIP, 0.0), LoopGradient(task))(y, batch)
        torch.testing.assert_close(got[i], total / min(8, task.sizes[i]), rtol=1e-4, atol=1e-6)


@native
@pytest.mark.parametrize("model", ["a layer twice", "an embedding", "computed weights"])
def test_what_is_not_compiled_goes_another_way(model):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 4)

        def forward(self, x):
            return self.b(self.a(torch.tanh(self.a(x))))

    class Cosine(nn.Linear):
        def __init__(self):
            super().__init__(5, 4)

        def forward(self, x):
            return nn.functional.linear(x, nn.functional.normalize(self.weight), self.bias)

    words = nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(15, 4))
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(9, (12, 5)) if model == "an embedding" else torch.randn(12, 5, generator=draw)
    made = {"a layer twice": Twice, "an embedding": words, "computed weights": Cosine}[model]
    task = fb.Task.from_arrays(made, [(x, torch.arange(12) % 4)])
    assert Native.supports(task) is None
    assert Native.supports(task, examples=True) is not None
    with pytest.raises(fb.FedbraidError, match="cannot run this task"):
        fb.simulate(task, hidden(), WORK, fb.rounds(1, clients=1), engine="in_process(backend='native')")
    both = [
        fb.simulate(task, hidden(), WORK, fb.rounds(2, clients=1), engine=f"in_process(backend='{b}')")
        for b in ("vmap", "loop")
    ]
    torch.testing.assert_close(both[0].x, both[1].x, rtol=1e-4, atol=1e-6)


def test_one_example_moves_the_noiseless_sum_by_no_more_than_the_clip():
    task = some("convolutions", sizes=(16,))
    y, batch = drawn(task, batch=None)
    grad = LoopedPerExample(ExamplePrivacy(CLIP, 0.0), LoopGradient(task))
    whole = grad.sums(y, batch)[0]
    moved = []
    for k in range(16):
        batch.weight = torch.ones(1, 16)
        batch.rows = torch.cat([torch.arange(k), torch.arange(k + 1, 16), torch.tensor([0])])[None]
        batch.weight[0, -1] = 0
        moved.append(float((whole - grad.sums(y, batch)[0]).norm()))
    assert max(moved) == pytest.approx(CLIP, rel=1e-4)


# Opacus ---------------------------------------------------------------------------------------------------


@native
@pytest.mark.parametrize("name", ["convolutions", "rows", "layer norm"])
def test_opacus_clips_to_the_same_sums(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opacus = pytest.importorskip("opacus", reason="Opacus is not installed")
        task = some(name, sizes=(20,))
        y, batch = drawn(task, batch=None)
        module = task.layout.load(task.module(), y[0]).train()
        wrapped = opacus.GradSampleModule(module, loss_reduction="sum")
        optimizer = opacus.optimizers.DPOptimizer(
            torch.optim.SGD(wrapped.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=CLIP, expected_batch_size=20,
            loss_reduction="sum",
        )  # fmt: skip
        nn.functional.cross_entropy(wrapped(task.inputs), task.targets, reduction="sum").backward()
        optimizer.clip_and_accumulate()
    want = torch.cat([p.summed_grad.reshape(-1) for p in module.parameters()])
    got, _ = Native(task, examples=ExamplePrivacy(CLIP, 0.0))(y, batch)
    torch.testing.assert_close(20 * got[0], want, rtol=1e-4, atol=1e-5)


def test_epsilon_is_opacus_s_too(blobs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accountants = pytest.importorskip("opacus.accountants", reason="Opacus is not installed")
        result = fb.simulate(blobs, hidden(), fb.Work(steps=4, batch=4), fb.rounds(3, clients=6))
        prv, moments = accountants.PRVAccountant(), accountants.RDPAccountant()
        for accountant in (prv, moments):  # the smallest client, of 7 samples, spends most
            accountant.history = [(Z, 4 / 7, 12)]
        epsilon = result.history[-1]["epsilon"]
        assert epsilon == pytest.approx(prv.get_epsilon(DELTA), rel=0.01)
        assert epsilon <= moments.get_epsilon(DELTA)


# A whole run ----------------------------------------------------------------------------------------------


def softmax(v):
    e = np.exp(v - v.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def client_update(x, inputs, targets, client, version, momentum=0.9, seed=3, lr=0.05, batch=8):
    """DP-SGD of one client with momentum, written by hand: a linear model of 5 inputs and 3 classes."""
    n, y, b = len(targets), x.copy(), np.zeros_like(x)
    for k in range(-(-n // batch)):
        draw = rng.uniform(seed, "examples", version, client, k, np.arange(n))
        total = np.zeros(18)
        for i in np.flatnonzero(draw < min(batch, n) / n):
            w, bias = y[:15].reshape(3, 5), y[15:]
            error = softmax((inputs[i] @ w.T + bias)[None])[0] - np.eye(3)[targets[i]]
            g = np.concatenate([np.outer(error, inputs[i]).ravel(), error])
            total += g * min(1, CLIP / np.linalg.norm(g))
        noise = rng.gaussian(rng.bits(seed, "hidden", version, client, k), 18)[0]
        b = momentum * b + (total + Z * CLIP * noise) / min(batch, n)
        y = y - lr * b
    return y


def rows_of(task, client):
    at = task.rows[task.offsets[client] : task.offsets[client + 1]]
    return task.inputs[at].double().numpy(), task.targets[at].numpy()


@pytest.mark.parametrize("backend", ["loop", "vmap", pytest.param("native", marks=native)])
def test_a_whole_run_is_what_a_loop_by_hand_makes(blobs, backend):
    work = fb.Work(lr=0.05, epochs=1, batch=8, momentum=0.9)
    run = fb.simulate(
        blobs,
        hidden(noise=Z),
        work,
        fb.rounds(2, clients=3),
        seed=3,
        engine=f"in_process(backend='{backend}')",
    )
    x = blobs.initial(3).double().numpy()
    for t, record in enumerate(run.history):
        n = blobs.sizes[record["clients"]]
        ends = [client_update(x, *rows_of(blobs, c), c, t) for c in record["clients"]]
        x = x - sum(w * (x - y) for w, y in zip(n / n.sum(), ends))
    np.testing.assert_allclose(run.x.numpy(), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "a", [fb.scaffold(), fb.fedgbo(), fb.feddyn(0.1), fb.fedadavr("adam", 0.01), fb.fednova(), fb.mfl("adam")]
)
def test_what_is_made_of_noised_gradients_needs_nothing_more(blobs, a):
    plain = fb.simulate(blobs, a, SURE, fb.rounds(2, clients=3))
    wide = fb.simulate(blobs, hidden(a, clip=1e6, noise=0.0), SURE, fb.rounds(2, clients=3))
    torch.testing.assert_close(wide.x, plain.x, rtol=1e-3, atol=1e-5)
    assert "epsilon" not in wide.history[-1]
    noised = fb.simulate(blobs, hidden(a), SURE, fb.rounds(2, clients=3))
    assert noised.history[-1]["epsilon"] > 0


@pytest.mark.parametrize("backend", ["loop", "vmap", pytest.param("native", marks=native)])
def test_blocks_give_the_same_numbers_and_a_resume_the_same_bits(blobs, tmp_path, backend):
    from test_private import Stop, Stopped

    def go(block, **more):
        engine = f"in_process(backend='{backend}', block={block})"
        return fb.simulate(blobs, hidden(noise=4.0), WORK, fb.rounds(3, clients=4), engine=engine, **more)

    one = go(1)
    torch.testing.assert_close(one.x, go(3).x, rtol=1e-5, atol=1e-6)
    with pytest.raises(Stopped):
        go(1, out=tmp_path / "run", callbacks=[Stop(2)])
    resumed = fb.resume(tmp_path / "run")
    assert torch.equal(resumed.x, one.x)
    assert [r["epsilon"] for r in resumed.history] == [r["epsilon"] for r in one.history]


# Noise ----------------------------------------------------------------------------------------------------


@native
def test_noise_has_the_deviation_that_it_claims_and_is_never_the_same():
    task = fb.Task.from_arrays(nn.Linear(5000, 4), [(torch.zeros(8, 5000), torch.arange(8) % 4)] * 2)
    grad, seen = Native(task, examples=ExamplePrivacy(CLIP, Z)), []
    for k in range(3):
        y, batch = drawn(task, k)
        batch.weight = torch.zeros(batch.rows.shape)  # a batch that nobody was drawn for is noised too
        seen += [*grad(y, batch)[0].clone()]
    all_of_it = torch.stack(seen).double() * 8 / (Z * CLIP)
    assert all_of_it.numel() > 1e5
    assert all_of_it.mean() == pytest.approx(0, abs=4 / math.sqrt(all_of_it.numel()))
    assert all_of_it.std() == pytest.approx(1, abs=4 / math.sqrt(2 * all_of_it.numel()))
    assert all_of_it.corrcoef().fill_diagonal_(0).abs().max() < 4 / math.sqrt(20004)


@native
@pytest.mark.parametrize("kind", ["native", "loop"])
def test_real_clients_noise_and_draw_from_the_operating_system(kind):
    task = some("rows")
    own = ExamplePrivacy(CLIP, Z)
    grad = Native(task, examples=own) if kind == "native" else LoopedPerExample(own, LoopGradient(task))
    found = [grad(*drawn(task, hide="real"))[0].clone() for _ in range(2)]
    assert not torch.allclose(*found, atol=1e-3)
    assert any(drawn(task, hide="real")[1].rows.shape != drawn(task)[1].rows.shape for _ in range(30))
    y, batch = drawn(task, hide="real", batch=None)
    apart = (
        grad(y, batch)[0] - LoopedPerExample(ExamplePrivacy(CLIP, 0.0), LoopGradient(task))(y, batch)[0]
    ) * batch.secret().planned
    assert apart.std() == pytest.approx(Z * CLIP, rel=0.3)


# Accounts -------------------------------------------------------------------------------------------------


def direct(rate, steps, z=Z):
    event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), steps)
    return pld.PLDAccountant().compose(event).get_epsilon(DELTA)


def test_epsilon_is_the_worst_clients_as_dp_accounting_says():
    """Of 7 samples all are in every batch of 8; of 40 a fifth is, five times a visit."""
    clients = [(torch.randn(n, 5), torch.arange(n) % 3) for n in (7, 40)]
    task = fb.Task.from_arrays(nn.Linear(5, 3), clients)
    turns = fb.rounds(3, clients=[[1], [1], [0]])
    run = fb.simulate(task, hidden(noise=4.0), WORK, turns)
    small = dp.get_epsilon_gaussian(4.0, DELTA)
    assert small == pytest.approx(direct(1.0, 1, 4.0), rel=1e-3)
    once, twice = direct(0.2, 5, 4.0), direct(0.2, 10, 4.0)
    assert [r["epsilon"] for r in run.history] == [once, twice, max(twice, small)]
    assert small > twice


def test_noise_is_solved_for_the_worst_client(blobs):
    run = fb.simulate(
        blobs, hidden(noise=None, epsilon=3.0), fb.Work(steps=2, batch=None), fb.rounds(3, clients=3)
    )
    assert 2.99 < run.history[-1]["epsilon"] <= 3.0


def test_a_run_ends_before_a_visit_that_a_client_cannot_afford(blobs):
    two = dp.get_epsilon_gaussian(Z / math.sqrt(2), DELTA) + 0.01
    run = fb.simulate(blobs, hidden(epsilon=two), fb.Work(steps=1, batch=None), fb.rounds(9, clients=6))
    assert len(run.history) == 2
    assert run.history[-1]["epsilon"] <= two


# Refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: hidden(fb.mimelite()), "mimelite takes gradients besides those of its local steps"),
        (lambda: hidden(fb.ditto()), "ditto takes gradients besides"),
        (lambda: hidden(fb.pfedme()), "pfedme takes gradients besides"),
        (lambda: hidden(fb.Algorithm(rule=fb.custom_local_loop(print))), "whose gradients are not clipped"),
        (lambda: hidden(hidden()), "private already"),
        (lambda: fb.private(hidden(), noise=1.0), "private already"),
        (lambda: hidden(where="client"), "leave out where= and scales="),
        (lambda: hidden(scales={"delta": 1.0}), "leave out where= and scales="),
        (lambda: hidden(clip="adaptive"), "give clip a number with unit='example'"),
        (lambda: fb.private(fb.fedavg(), noise=1.0, unit="sample"), "unknown unit 'sample'"),
        (lambda: hidden(noise=0.0, epsilon=1.0), "noise=0 keeps no budget"),
    ],
)
def test_what_would_tell_of_examples_says_why(build, said):
    with pytest.raises(fb.FedbraidError, match=said):
        build()


@pytest.mark.parametrize(
    ("a", "work", "said"),
    [
        (hidden(noise=0.1, epsilon=0.1), WORK, "in one participation of a client with 7 samples, more than the budget of 0.1"),
        (hidden(), fb.Work(replace=True), "in no order; leave out replace="),
        (hidden(), fb.Work(last="drop"), "in no order"),
        (hidden(), fb.Work(shuffle=False), "in no order"),
    ],
)  # fmt: skip
def test_what_cannot_be_accounted_for_is_refused_before_anything_is_written(blobs, tmp_path, a, work, said):
    with pytest.raises(fb.FedbraidError, match=said):
        fb.simulate(blobs, a, work, fb.rounds(2, clients=2), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("running", [True, False])
def test_batch_norm_is_refused_by_name(tmp_path, running):
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=running))
    task = fb.Task.from_arrays(model, [(torch.randn(9, 5), torch.arange(9) % 4)], buffers="average")
    with pytest.raises(fb.FedbraidError, match=r"BatchNorm1d at '1', which mixes the examples.*GroupNorm"):
        fb.simulate(task, hidden(), WORK, fb.rounds(1, clients=1), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_second_gradient_of_a_step_is_refused_where_no_rehearsal_showed_it(blobs):
    class Sly(fb.Rule):
        def step(self, g, y, s, ctx):
            return (ctx.grad(y) if ctx.lr == 0.05 else g), s

    with pytest.raises(fb.FedbraidError, match="a second gradient of a step's batch"):
        fb.simulate(blobs, hidden(fb.Algorithm(rule=Sly())), WORK, fb.rounds(1, clients=1))


def test_a_large_delta_is_warned_of(blobs, caplog):
    fb.simulate(blobs, hidden(delta=0.03), SURE, fb.rounds(1, clients=1))
    assert "delta=0.03 is no less than 1/40" in caplog.text


def test_its_name_builds_it_again():
    from fedbraid.algorithms.registry import algorithm_from

    a = hidden(fb.fedprox(0.1))
    assert algorithm_from(a.name) == a
    assert "unit='example'" in a.name
