"""Edges: the same bits as without them, checks where single uploads are seen, and edges that die or lie."""

from __future__ import annotations

import os
import shutil
import threading

import pytest
import torch
from fleets import PROJECT, TORCH, LocalFleet, whole

import fedbraid as fb
from fedbraid.deploy.edge import EdgeRuntime
from fedbraid.deploy.settings import Settings
from fedbraid.deploy.transport_memory import MemoryNode
from fedbraid.errors import ConfigError

pytestmark = [pytest.mark.engines, pytest.mark.quick]

NODES = tuple(f"node-{i}" for i in range(5))
EDGES = "edge-0: node-0 node-1; edge-1: node-2 node-[39]"  # node-4 is the server's own


class ThreadedEdge(EdgeRuntime):
    """An edge among others of this process; it may die at its first order, or add to what it hands over."""

    dies = lies = False

    def _answer(self, order, place):
        with TORCH:
            if self.dies:
                self.transport.close()
                raise fb.errors.EngineError("gone")
            answer = super()._answer(order, place)
            if self.lies:
                from fedbraid.deploy.transport import pack_answer, unpack_answer

                head, upload = unpack_answer(answer)
                answer = pack_answer(head, upload.replace(b'"sizes"', b'"sizez"'))
        return answer


def run(place, edges=EDGES, rewrite=None, dies=(), lies=(), **config):
    """(the run, the fleet, what its server read itself)."""
    fleet = LocalFleet(place, rewrite=rewrite or {})
    fleet.start(*NODES)
    runtimes = []
    for name in Settings(edges=edges).edge_names:
        node = fleet.nodes[name] = MemoryNode(fleet.broker, name)
        runtime = ThreadedEdge(PROJECT, node, place / "edges")
        runtime.dies, runtime.lies = name in dies, name in lies
        runtimes.append(runtime)
        threading.Thread(target=runtime.run, daemon=True).start()
    end, read = fleet.transport(), []
    received = end._received

    def recorded(identity):
        answer = received(identity)
        body = answer.read

        def reading():
            read.append(identity[0])
            return body()

        object.__setattr__(answer, "read", reading)
        return answer

    end._received = recorded
    config = {"schedule": "rounds(3, clients=5)", "deadline": 20.0, "minimum": 4} | config
    try:
        return fleet.serve(transport=end, edges=edges, nodes=5, **config), fleet, read
    finally:
        fleet.stop()


@pytest.mark.parametrize(
    "algorithm",
    [
        "fedavg()",
        "fedadam(lr=0.1)",
        "scaffold()",
        "fednova()",
        "hidden_state(error_feedback(with_codecs(scaffold(), up=qsgd(4), down=qsgd(8))))",
    ],
)
def test_edges_make_no_difference_to_the_bits(algorithm, tmp_path):
    with_edges, _, read = run(tmp_path / "edges", algorithm=algorithm)
    without, _, read_all = run(tmp_path / "none", edges="", algorithm=algorithm)
    assert torch.equal(with_edges.x, without.x)
    for key in ("clients", "losses", "node_up", "node_down"):
        for ours, its in zip(with_edges.history, without.history):
            assert sorted(ours.get(key, [])) == sorted(its.get(key, []))
    for key in ("bytes_up", "bytes_down", "norm", "up", "down"):
        assert [r[key] for r in with_edges.history] == [r[key] for r in without.history]
    for key in ("train_loss", "update_norm"):
        assert [r[key] for r in with_edges.history] == pytest.approx([r[key] for r in without.history])
    assert not any("trouble" in r for r in with_edges.history)
    assert read_all.count("node-0") == 4  # its hello, and three uploads
    assert read.count("node-0") == 1
    assert read.count("node-4") == 4
    assert read.count("edge-1") == 3


def test_what_an_edge_refuses_is_not_in_the_step_and_is_named(tmp_path):
    huge = {"node-1": lambda order, head, upload: (head, whole(1e12) if upload else upload)}
    config = {"max_refusals": 2, "algorithm": "fedavg()"}
    ran, _, read = run(tmp_path / "edges", rewrite=huge, **config)
    without, _, _ = run(tmp_path / "none", edges="", rewrite=huge, **config)
    for history in (ran.history, without.history):
        assert all(1 not in r["clients"] for r in history)
        assert any("has norm" in t["why"] and t["node"] == "node-1" for t in history[0]["trouble"])
    assert read.count("node-1") == 1
    assert torch.equal(ran.x, without.x)


def test_the_server_reads_what_an_edge_that_died_has_not_folded(tmp_path):
    ran, _, read = run(tmp_path / "edges", dies=("edge-0",), algorithm="scaffold()", deadline=4.0)
    without, _, _ = run(tmp_path / "none", edges="", algorithm="scaffold()")
    assert torch.equal(ran.x, without.x)
    assert [sorted(r["clients"]) for r in ran.history] == [[0, 1, 2, 3, 4]] * 3
    assert any("the server reads its nodes' uploads" in t["why"] for t in ran.history[0]["trouble"])
    assert read.count("node-0") > 3
    assert read.count("node-2") == 1


def test_an_accumulator_that_does_not_fit_its_verdicts_counts_nothing(tmp_path):
    ran, _, read = run(tmp_path / "edges", lies=("edge-1",), algorithm="fedavg()")
    without, _, _ = run(tmp_path / "none", edges="", algorithm="fedavg()")
    assert torch.equal(ran.x, without.x)
    assert any("its accumulator counts 2 uploads" in t["why"] for t in ran.history[0]["trouble"])
    assert read.count("node-2") > 1  # by the server itself


def test_an_edge_trains_for_nobody(tmp_path):
    fleet = LocalFleet(tmp_path)
    order = type("Order", (), {"kind": "TRAIN", "body": b"{}", "job": "j", "run": "r"})()
    edge = EdgeRuntime(PROJECT, MemoryNode(fleet.broker, "edge-0"), tmp_path)
    with pytest.raises(fb.errors.RunError, match="which folds uploads"):
        edge._answer(order, tmp_path)
    with pytest.raises(fb.errors.WireError, match="not stored"):
        MemoryNode(fleet.broker, "node-0").fetch(["node-1", "j", "d"], order)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"algorithm": "robust(fedavg(), 'median')"}, "reads single uploads, so no edge can fold them"),
        ({"algorithm": "fedvarp()"}, "reads single uploads"),
        ({"algorithm": "fedbuff()", "schedule": "buffered(steps=2, buffer=2)"}, "not asynchronous steps"),
        ({"algorithm": "secure(fedavg())"}, "not secure sums"),
        ({"edges": "hospital: *"}, "must begin with 'edge-'"),
    ],
)
def test_edges_are_refused_where_they_cannot_fold(config, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        run(tmp_path, **config)


@pytest.mark.skipif(
    shutil.which("nats-server", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None,
    reason="nats-server is not installed: make nats-server",
)
def test_a_real_edge_that_is_killed_and_started_again(tmp_path):
    pytest.importorskip("nats", reason="the extra `nats` is not installed: make test-engines brings it")
    from deployments import Deployment
    from fleets import simulated

    from fedbraid.deploy import credentials

    config = {"algorithm": "scaffold()", "schedule": "rounds(12, clients=3)", "edges": "edge-0: *"}
    with Deployment(tmp_path / "fleet", **config) as fleet:
        credentials.make(fleet.folder / "keys", ["127.0.0.1"], 3, 1)
        fleet.up().edge(0).node(0).node(1).node(2)
        fleet.until_step(3)
        fleet.kill("edge-0")
        fleet.until_step(5)
        fleet.edge(0)
        fleet.until_done()
        expected = simulated(fb.scaffold(), fb.rounds(12, clients=3))
        views = expected.task.layout.views(expected.x)
        assert all(torch.equal(fleet.model[name], v) for name, v in views.items())
        assert all(sorted(r["clients"]) == [0, 1, 2] for r in fleet.records)
