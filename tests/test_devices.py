"""Does a visit stay on its device, without waiting for it? PyTorch's meta device, which holds no numbers, stands in for a GPU.

An operation with a tensor of the CPU fails there, and so does whatever asks for a number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import fedbraid as fb
from fedbraid.core import device
from fedbraid.data.batches import Batch
from fedbraid.engines import planning
from fedbraid.engines.autograd import LoopGradient, VmapGradient
from fedbraid.engines.choice import choose
from fedbraid.engines.client_update import client_update
from fedbraid.engines.engine import Setup, TrainRequest, participate
from fedbraid.engines.in_process import InProcess
from fedbraid.errors import ConfigError

WORK = fb.Work(lr=0.1, batch=5, momentum=0.9)
ALGORITHMS = [
    fb.fedavg(), fb.fedprox(mu=0.1), fb.scaffold(), fb.scaffold_m(), fb.feddyn(mu=0.1), fb.adabest(),
    fb.fedgbo("adam", beta1=0.9, beta2=0.99), fb.mimelite(), fb.fednova(), fb.fedadavr("adam"), fb.ghbm(tau=3, beta=0.9),
]  # fmt: skip


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


def make(sizes=(10, 10, 10), model=convolutional) -> fb.Task:
    draw = np.random.default_rng(0)
    each = [(draw.normal(size=(n, 1, 8, 8)).astype(np.float32), draw.integers(0, 3, n)) for n in sizes]
    task = fb.Task.from_arrays(model, each)
    assert not task.stochastic  # what is found out once, when a run begins, and kept
    assert task._in_order
    return task


def order(a: fb.Algorithm, task: fb.Task, work: fb.Work) -> TrainRequest:
    x = torch.zeros(task.layout.size, device=task.device)
    down = a.send(x, a.server.init(x, task.layout), task.clients)
    memory = {k: v.to(x.device).reshape(1, -1).repeat(task.clients, 1) for k, v in a.rule.init(x).items()}
    who = participate(Setup(a, task, work, 0), np.arange(task.clients), 0)
    return TrainRequest(who, down, memory)


@pytest.mark.parametrize("a", ALGORITHMS, ids=lambda a: a.name)
@pytest.mark.parametrize("sizes", [(10, 10, 10), (4, 7, 12)])
def test_a_visit_stays_on_its_device(a, sizes):
    task = make(sizes).to("meta")
    reply = client_update(Setup(a, task, WORK, 0), VmapGradient(task), order(a, task, WORK))
    assert {v.device.type for v in (*reply.uploads.values(), *reply.client_state.values(), reply.loss)} == {
        "meta"
    }


@pytest.mark.parametrize(
    "work", [fb.Work(lr=0.1, batch=4, optimizer="adam"), fb.Work(lr=0.1, batch=5, clip=1.0, weight_decay=0.1)]
)
def test_local_work_stays_on_its_device(work):
    task = make().to("meta")
    assert client_update(
        Setup(fb.fedavg(), task, work, 0), VmapGradient(task), order(fb.fedavg(), task, work)
    ).loss.is_meta


def test_a_loop_over_clients_stays_on_its_device():
    task = make().to("meta")
    reply = client_update(
        Setup(fb.scaffold(), task, WORK, 0), LoopGradient(task), order(fb.scaffold(), task, WORK)
    )
    assert {v.device.type for v in reply.uploads.values()} == {"meta"}


@dataclass(frozen=True)
class Stray(fb.Rule):
    """Adds a tensor that stays on the processor."""

    def step(self, g, y, s, ctx):
        return g + torch.ones(len(g), 1), s


def test_a_stray_tensor_is_noticed():
    task, a = make().to("meta"), fb.Algorithm(rule=Stray())
    with pytest.raises((RuntimeError, NotImplementedError), match=r"device|meta"):
        client_update(Setup(a, task, WORK, 0), VmapGradient(task), order(a, task, WORK))


def test_a_number_that_is_waited_for_is_noticed():
    task = make().to("meta")
    with pytest.raises(RuntimeError, match="item"):
        device.placed(np.ones(3), task.device).sum().item()


def test_on_a_gpu_vmap_takes_what_it_can_follow():
    for where, takes in (("cpu", False), ("meta", True)):
        task = make().to(where)
        facts = planning.facts_of(Setup(fb.fedavg(), task, WORK, 0, 2, 2))
        assert facts.vmap == takes
        assert (choose(facts).backend == "vmap") == takes
    batch = Batch(task.inputs, task.targets, task.rows[:2].view(2, 1))
    assert VmapGradient(task)(task.vector(0).repeat(2, 1), batch)[0].shape == (2, task.layout.size)


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_less_precise_products_end_nearby(backend):
    task = make()
    exact, rough = (
        fb.simulate(
            task, fb.fedavg(), WORK, fb.rounds(3, clients=2), engine=f"in_process(backend={backend!r}{more})"
        )
        for more in ("", ", precision='bfloat16'")
    )
    assert rough.x.dtype == torch.float32
    assert not torch.equal(exact.x, rough.x)
    torch.testing.assert_close(exact.x, rough.x, rtol=0.1, atol=0.02)
    assert "precision='bfloat16'" in rough.engine
    assert "precision" not in exact.engine


def test_precisions_that_there_are_not():
    with pytest.raises(ConfigError, match="precision 'int3'"):
        InProcess(precision="int3")
    with pytest.raises(ConfigError, match="native gradients are float32"):
        fb.simulate(
            make(),
            fb.fedavg(),
            WORK,
            fb.rounds(1, clients=2),
            engine="in_process(backend='native', precision='float16')",
        )
