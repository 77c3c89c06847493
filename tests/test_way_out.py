"""Can a user leave the library's loop, its loss or its server and keep everything else?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from oracles import TRIALS, VMAP, Problem, trial_name
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div, log_softmax, softmax

import fedbraid as fb
from fedbraid.core import rng
from fedbraid.data.batches import DrawnBatches

every_trial = pytest.mark.parametrize("trial", TRIALS, ids=trial_name)
LOOP, POOL = fb.engines.in_process(backend="loop"), fb.engines.pool(workers=2, backend="loop")


# ctx.grad ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sharpness(fb.Rule):
    """SAM: the gradient where the loss is worst, ρ away."""

    rho: float

    def step(self, g, y, s, ctx):
        return ctx.grad(y + self.rho * g / g.norm(dim=1, keepdim=True)), s


@every_trial
@pytest.mark.parametrize("backend", ["vmap", "loop", "native"])
def test_a_rule_may_ask_for_the_gradient_elsewhere(trial, backend):
    sam = fb.Algorithm(rule=Sharpness(0.3), gather=fb.Mean(trial.weights))
    result = trial.run(sam, engine=fb.engines.in_process(backend=backend))
    x = trial.p.x0
    for t, cohort in enumerate(trial.cohorts):
        move = np.zeros_like(x)
        for w, i in zip(trial.p.p(cohort, trial.weights), cohort):
            bend = lambda g, y, i=i: trial.p.grad(y + 0.3 * g / np.linalg.norm(g), i)  # noqa: E731
            move += w * (x - trial.local(x, i, t, bend))
        x = x - move
    np.testing.assert_allclose(result.x, x, atol=2e-6)


def test_the_gradient_that_a_step_began_with_stays():
    seen = []

    @dataclass(frozen=True)
    class Twice(fb.Rule):
        def step(self, g, y, s, ctx):
            before = g.clone()
            assert torch.equal(ctx.grad(y), before)
            ctx.grad(y + 1)
            seen.append(torch.equal(g, before))
            return g, s

    work = fb.Work(lr=0.1, steps=2, batch=3, clip=0.4, weight_decay=0.1)
    for backend in ("vmap", "loop", "native"):
        engine = fb.engines.in_process(backend=backend)
        fb.simulate(Problem().task, fb.Algorithm(rule=Twice()), work, fb.rounds(1, clients=3), engine=engine)
    assert seen
    assert all(seen)


def test_outside_of_a_step_there_is_no_batch():
    @dataclass(frozen=True)
    class Late(fb.Rule):
        def finish(self, y, s, ctx):
            if len(y) > 2:  # not in the rehearsal
                ctx.grad(y)
            return {}

    with pytest.raises(fb.FedbraidError, match="there is no batch"):
        fb.simulate(
            Problem().task, fb.Algorithm(rule=Late()), fb.Work(steps=1), fb.rounds(1, clients=3), engine=VMAP
        )


# A loop of one's own -------------------------------------------------------------------------------------


def plain(module, batches, ctx):
    """What the library does itself, but for bits."""
    optimizer = torch.optim.SGD(module.parameters(), ctx.lr, momentum=0.5)
    total = 0.0
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(batches)


WORK = fb.Work(lr=0.2, epochs=2, batch=3, momentum=0.5)
LOOPS = {
    "fedavg": (fb.Algorithm(rule=fb.custom_local_loop(plain)), fb.fedavg()),
    "fedadam": (replace(fb.fedadam(lr=0.05), rule=fb.custom_local_loop(plain), name=""), fb.fedadam(lr=0.05)),
    "int8": (
        fb.with_codecs(fb.Algorithm(rule=fb.custom_local_loop(plain)), up=fb.codecs.int8()),
        fb.fedpaq(fb.codecs.int8()),
    ),
}


@pytest.mark.parametrize(
    "schedule", [fb.rounds(3, clients=4), fb.buffered(4, buffer=2, concurrency=4)], ids=str
)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_ones_own_keeps_everything_else(name, schedule):
    own, base = LOOPS[name]
    task = Problem().task
    for options in ({"personal": ()}, {"personal": ("2.*",)}):
        task = fb.Task.from_arrays(Problem().task.module(), Problem().data, Problem().test, **options)
        want = fb.simulate(task, base, WORK, schedule, seed=1, engine=LOOP)
        for engine in ("auto", LOOP, POOL):
            got = fb.simulate(task, own, WORK, schedule, seed=1, engine=engine)
            np.testing.assert_allclose(got.x, want.x, atol=2e-3 if name == "int8" else 1e-5)
            for a, b in zip(got.history, want.history, strict=True):
                assert (a["clients"], a["bytes_up"]) == (b["clients"], b["bytes_up"])
                assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-4)


def test_it_is_resumed_to_the_bit(tmp_path):
    def noisy(module, batches, ctx):
        with torch.no_grad():
            for p in module.parameters():
                p += 0.01 * torch.randn_like(p)  # counted
        return plain(module, batches, ctx)

    algorithm, task, schedule = (
        fb.Algorithm(rule=fb.custom_local_loop(noisy)),
        Problem().task,
        fb.rounds(5, clients=3),
    )
    once = fb.simulate(task, algorithm, WORK, schedule)

    class Stop:
        def step(self, record, run):
            if record["step"] == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fb.simulate(task, algorithm, WORK, schedule, out=tmp_path, callbacks=[Stop()])
    again = fb.resume(tmp_path, task=task, algorithm=algorithm)
    assert torch.equal(again.x, once.x)
    assert torch.equal(fb.simulate(task, algorithm, WORK, schedule, engine=POOL).x, once.x)


def test_loops_that_do_not_go_are_sentences():
    task = Problem().task

    def run(fn, engine="auto"):
        fb.simulate(
            task, fb.Algorithm(rule=fb.custom_local_loop(fn)), WORK, fb.rounds(1, clients=2), engine=engine
        )

    with pytest.raises(fb.FedbraidError, match=r"fails for client \d+ \(TypeError"):
        run(lambda module, batches, ctx: None)
    with pytest.raises(fb.FedbraidError, match=r"ZeroDivisionError.*finished steps are stored"):
        run(lambda module, batches, ctx: 1 / 0)
    with pytest.raises(fb.FedbraidError, match="use backend='loop'"):
        run(plain, VMAP)
    with pytest.raises(fb.FedbraidError, match="would never bend a gradient"):
        fb.Algorithm(rule=fb.chain(fb.custom_local_loop(plain), fb.fedprox(0.1).rule))
    with pytest.raises(fb.FedbraidError, match="give it a function"):
        fb.custom_local_loop(3)


# Losses that look at other models ------------------------------------------------------------------------


class Featured(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        z = torch.tanh(self.body(x))
        return {"features": z, "scores": self.head(z)}


def moon(outputs, targets, reference, previous):
    """MOON's loss, μ = 1, τ = 0.5."""
    supervised = cross_entropy(outputs["scores"], targets, reduction="none")
    if reference is None:  # a test, where no other model is at hand
        return supervised
    z = outputs["features"]
    near = torch.stack([cosine_similarity(z, other["features"]) / 0.5 for other in (reference, previous)], 1)
    return supervised + cross_entropy(near, torch.zeros(len(z), dtype=torch.int64), reduction="none")


def test_moon_sees_the_servers_model_and_the_clients_last():
    p = Problem()
    task = fb.Task.from_arrays(Featured, p.data, p.test, moon)
    work = fb.Work(lr=0.3, epochs=1, batch=3)
    runs = [
        fb.simulate(task, fb.fedavg(weights="uniform"), work, fb.rounds(4, clients=3), seed=2, engine=engine)
        for engine in ("auto", LOOP, POOL, fb.engines.in_process(backend="loop", block=3))
    ]
    for other in runs[1:]:
        np.testing.assert_allclose(other.x, runs[0].x, atol=1e-6)
    layout, x = task.layout, task.initial(2)
    last = {i: x.clone() for i in range(p.N)}
    module, common, before = (task.module() for _ in range(3))
    for t, record in enumerate(runs[0].history):  # by hand
        moved = torch.zeros_like(x)
        for i in record["clients"]:
            layout.load(module, x), layout.load(common, x), layout.load(before, last[i])
            plan = DrawnBatches(task, work, np.array([i]), t, 2)
            for k in range(int(plan.K[0])):
                a, y = plan.batch(k).client(0).first_client()
                module.zero_grad()
                with torch.no_grad():
                    others = common(a), before(a)
                moon(module(a), y, *others).mean().backward()
                with torch.no_grad():
                    for w in module.parameters():
                        w -= 0.3 * w.grad
            last[i] = layout.flatten(module)
            moved += (x - last[i]) / 3
        x = x - moved
    np.testing.assert_allclose(runs[0].x, x, atol=1e-6)
    assert not torch.allclose(runs[0].x, fb.simulate(
        fb.Task.from_arrays(Featured, p.data, p.test, lambda o, t: cross_entropy(o["scores"], t, reduction="none")),
        fb.fedavg(weights="uniform"), work, fb.rounds(4, clients=3), seed=2,
    ).x)  # fmt: skip
    with pytest.raises(fb.FedbraidError, match="the loss looks at other models"):
        fb.simulate(task, fb.fedavg(), work, fb.rounds(1), engine=VMAP)


# Data of the server's ------------------------------------------------------------------------------------


def test_feddf_distils_the_cohort_on_the_public_share():
    p = Problem()
    public = (np.random.default_rng(3).normal(size=(9, 4)).astype(np.float32), None)
    task = fb.Task.from_arrays(p.task.module(), p.data, p.test, public=public)
    work = fb.Work(lr=0.3, steps=3, batch=None)
    settings = {"steps": 4, "rate": 0.05, "batch": 5}
    result = fb.simulate(task, fb.feddf(**settings), work, fb.rounds(3, clients=3), seed=4, engine=VMAP)
    x = torch.as_tensor(p.x0)
    net = lambda v: p.task.layout.load(p.task.module(), v.float())  # noqa: E731
    inputs = torch.as_tensor(public[0])
    for t, record in enumerate(result.history):
        cohort = record["clients"]
        models = [torch.as_tensor(p.local(x.double().numpy(), i, 3, 0.3)) for i in cohort]
        student = net(sum(w * m for w, m in zip(p.p(cohort, "samples"), models)))
        adam, draw = torch.optim.Adam(student.parameters(), 0.05), rng.generator(4, "distil", t)
        for _ in range(4):
            a = inputs[draw.choice(9, 5, replace=False)]
            with torch.no_grad():
                teacher = softmax(sum(net(m)(a) for m in models) / len(models), 1)
            adam.zero_grad()
            kl_div(log_softmax(student(a), 1), teacher, reduction="batchmean").backward()
            adam.step()
        x = p.task.layout.flatten(student).double()
    np.testing.assert_allclose(result.x, x, atol=2e-4)
    with pytest.raises(fb.FedbraidError, match=r"give public=\(inputs, targets\)"):
        fb.simulate(p.task, fb.feddf(), work, fb.rounds(1, clients=2))


def test_a_transform_of_ones_own_sees_the_test_set():
    seen = []

    @dataclass(frozen=True)
    class Judge(fb.Transform):
        def traits(self):
            return fb.TransformTraits(needs_server_data=True)

        def update(self, u, s, x, ctx):
            if ctx.server_data is not None:
                inputs, targets = ctx.server_data.test
                seen.append(
                    (ctx.server_data.module(x - u["delta"])(inputs).argmax(1) == targets)
                    .double()
                    .mean()
                    .item()
                )
            return u, s

    result = fb.simulate(
        Problem().task, fb.Algorithm(server=Judge()), WORK, fb.rounds(3, clients=3), engine=VMAP
    )
    assert seen == pytest.approx([r["accuracy"] for r in result.history])
