"""Does a Ray cluster give the numbers of one process, whatever its nodes do? Real clusters on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

import fedbraid as fb

pytest.importorskip("ray", reason="ray is not installed: make test-engines brings it")
import ray
from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]  # Ray's own warnings are not ours

WORK = fb.Work(lr=0.1, steps=3, batch=4)


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one CPU each; the driver's own node has none.

    Each has its own loopback address. 127.0.0.1 is none of them: Ray takes it for the machine's outer address.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    node = {"object_store_memory": 2**27}
    head = {"node_ip_address": "127.0.0.2", "num_cpus": 0, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head | node)
    made.workers = [
        made.add_node(node_ip_address=address, num_cpus=1, **node) for address in ("127.0.0.3", "127.0.0.4")
    ]
    ray.init(made.address, logging_level="warning", log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def slow_model(pause):
    """A model whose forward pass takes time, built by a closure, so that a kill finds it busy."""

    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.map = torch.nn.Linear(5, 3)

        def forward(self, x):
            time.sleep(pause)
            return self.map(x)

    return Slow


def table(clients=8):
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(3, 5))
    pairs = []
    for n in 5 + draw.integers(0, 20, clients):
        y = draw.integers(0, 3, n)
        pairs.append(((centres[y] + draw.normal(size=(n, 5))).astype(np.float32), y))
    return pairs


def close(a, b):
    assert torch.allclose(a, b, atol=1e-5, rtol=1e-5), float((a - b).abs().max())


ALGORITHMS = {
    "fedavg": fb.fedavg(),
    "scaffold": fb.scaffold(),
    "fedadavr-int8": fb.fedadavr(lr=0.1, memory="int8"),
    "error feedback": fb.fedef(fb.codecs.qsgd(4)),
    "hidden state": fb.hidden_state(fb.with_codecs(fb.fedavg(), down=fb.codecs.qsgd(8))),
}


@pytest.mark.quick
def test_nobody_answers_at_the_address():
    task = fb.Task.from_arrays(slow_model(0), table())
    with pytest.raises(fb.errors.EngineError, match="ray start --head"):
        fb.simulate(task, fb.fedavg(), WORK, fb.rounds(1, clients=2), engine="ray(address='127.0.0.1:1')")


ALONE = """
import fedbraid as fb, ray

class Where:
    def step(self, record, run):
        print(*(n["NodeManagerAddress"] for n in ray.nodes()))

task = fb.tasks.load("digits", clients=4)
fb.simulate(task, fb.fedavg(), fb.Work(steps=2), fb.rounds(1, clients=2), engine="ray(workers=2)", callbacks=[Where()])
"""


def test_a_ray_of_ones_own_stays_on_loopback():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1].startswith("127.")


@pytest.mark.quick
def test_two_nodes_give_the_numbers_of_one_process(cluster, blobs):
    for name, algorithm in ALGORITHMS.items():
        plan = (blobs, algorithm, WORK, fb.rounds(4, clients=4))
        here = fb.simulate(*plan, seed=3, engine="in_process")
        there = fb.simulate(*plan, seed=3, engine="ray")
        again = fb.simulate(*plan, seed=3, engine="ray")
        close(here.x, there.x)
        assert torch.equal(there.x, again.x), name
        assert [r["bytes_up"] for r in here.history] == [r["bytes_up"] for r in there.history]
        assert [r["clients"] for r in here.history] == [r["clients"] for r in there.history]
    lone = fb.simulate(*plan, seed=3, engine="ray(workers=1)")
    close(here.x, lone.x)


@pytest.mark.quick
@pytest.mark.parametrize("engine", ["ray(backend='loop')", "ray(backend='loop', workers=1, block=2)"])
def test_tasks_fold_their_clients_to_the_bits_of_one_process(cluster, blobs, engine, monkeypatch):
    monkeypatch.setattr("fedbraid.engines.folding.LEAST", -(10**9))  # whatever it saves
    for algorithm in (fb.fedavg(), fb.scaffold(), fb.fednova(), fb.secure(fb.fedavg()), fb.fedvarp()):
        plan = (blobs, algorithm, fb.Work(lr=0.1, batch=4, steps=3), fb.rounds(3, clients=5))
        here = fb.simulate(*plan, seed=3, engine="in_process(backend='loop')")
        there = fb.simulate(*plan, seed=3, engine=engine)
        assert torch.equal(here.x, there.x), algorithm.name
        assert here.history == there.history, algorithm.name


def test_asynchronous_schedules_run_too(cluster, blobs):
    plan = (blobs, fb.qafel(), WORK, fb.buffered(steps=5, buffer=2, concurrency=4))
    here = fb.simulate(*plan, engine="in_process")
    there = fb.simulate(*plan, engine="ray")
    close(here.x, there.x)


def test_the_command_line_takes_an_address(cluster, tmp_path):
    words = ["run", "digits", "fedavg", "--clients", "4", "--rounds", "2", "--per-round", "2", "--json"]
    words += ["--engine", f"ray(address={cluster.address!r})", "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-m", "fedbraid", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2


def test_closures_travel_and_nodes_load_their_own_data(cluster):
    pairs = table()
    task = fb.Task.from_arrays(
        slow_model(0), pairs, loss=lambda out, y: torch.nn.functional.cross_entropy(out, y, reduction="none")
    )
    plan = (task, fb.fedavg(), WORK, fb.rounds(2, clients=4))
    close(fb.simulate(*plan).x, fb.simulate(*plan, engine="ray").x)
    with pytest.raises(fb.errors.ConfigError, match="loaded by name"):
        fb.simulate(*plan, engine="ray(data='load')")
    task = fb.tasks.load("digits", clients=10)
    plan = (task, fb.fedavg(), fb.Work(steps=2), fb.rounds(2, clients=4))
    here = fb.simulate(*plan)
    for data in ("store", "load"):
        there = fb.simulate(*plan, engine=f"ray(data={data!r})")
        close(here.x, there.x)


@pytest.mark.quick
def test_a_worker_that_is_killed_is_replaced(cluster, tmp_path):
    driver, mark = os.getpid(), tmp_path / "killed"

    def loss(out, y):
        if os.getpid() != driver and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.cross_entropy(out, y, reduction="none")

    task = fb.Task.from_arrays(slow_model(0), table(), loss=loss)
    plan = (task, fb.scaffold(), WORK, fb.rounds(2, clients=8))
    here = fb.simulate(*plan, seed=1, engine="in_process")
    there = fb.simulate(*plan, seed=1, engine="ray")
    assert mark.exists()
    close(here.x, there.x)


def test_what_a_client_raises_comes_back(cluster):
    def loss(out, y):
        if len(y) > 2:
            raise ValueError("no loss today")
        return out.sum(1)

    task = fb.Task.from_arrays(slow_model(0), table(), loss=loss)
    with pytest.raises(fb.errors.EngineError, match="no loss today"):
        fb.simulate(task, fb.fedavg(), WORK, fb.rounds(1, clients=2), engine="ray")


def test_a_node_that_dies_in_a_round_is_replaced(cluster, tmp_path):
    """The second node is killed while it has a block of the second round in its hands."""
    driver, doomed = os.getpid(), cluster.workers[1].node_id
    second, struck = tmp_path / "second", tmp_path / "struck"

    def loss(out, y):
        if os.getpid() != driver and second.exists() and ray.get_runtime_context().get_node_id() == doomed:
            struck.touch()
            time.sleep(600)
        return torch.nn.functional.cross_entropy(out, y, reduction="none")

    def kill():
        while not struck.exists():
            time.sleep(0.05)
        cluster.remove_node(cluster.workers[1], allow_graceful=False)

    class Second:
        def step(self, record, run):
            second.touch()

    task = fb.Task.from_arrays(slow_model(0.1), table(), loss=loss)
    plan = (task, fb.scaffold(), WORK, fb.rounds(3, clients=8))
    here = fb.simulate(*plan, seed=1, engine="in_process")
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    there = fb.simulate(*plan, seed=1, engine="ray", callbacks=[Second()])
    assert struck.exists()
    killer.join()
    close(here.x, there.x)
    assert [r["clients"] for r in there.history] == [r["clients"] for r in here.history]


def two():
    """A model whose inputs come by name; made here, so that workers without this file have its class."""

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = torch.nn.Linear(2, 3), torch.nn.Linear(3, 3)

        def forward(self, left, right):
            return {"logits": self.left(left) + self.right(right)}

    return Two


@pytest.mark.quick
def test_inputs_by_name(cluster):
    parts = [({"left": x[:, :2], "right": x[:, 2:]}, y) for x, y in table(5)]
    task = fb.Task.from_arrays(two(), parts[1:], parts[0], personal=("left.*",))
    runs = [
        fb.simulate(task, fb.scaffold(), WORK, fb.rounds(3, clients=2), engine=engine)
        for engine in (fb.engines.ray(address=cluster.address), "in_process")
    ]
    close(runs[0].x, runs[1].x)
    assert [r["bytes_up"] for r in runs[0].history] == [r["bytes_up"] for r in runs[1].history]
