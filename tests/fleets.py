"""A fleet for tests: nodes in this process behind a broker in memory, mischief of theirs, and what the simulator says."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import fedbraid as fb
from fedbraid.deploy import Project
from fedbraid.deploy.node import NodeRuntime
from fedbraid.deploy.serve import serve
from fedbraid.deploy.transport import OrderSigner, pack_answer, unpack_answer
from fedbraid.deploy.transport_memory import MemoryBroker, MemoryNode, MemoryTransport
from fedbraid.links.wire import frame

LONG = 60.0  # seconds that a test waits for what must happen, however busy the machine
WORK = "Work(lr=0.1, steps=3, batch=4)"


def model():
    return torch.nn.Linear(5, 3)


def some(seed, n):
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 3, n)
    return (np.random.default_rng(0).normal(size=(3, 5))[y] + draw.normal(size=(n, 5))).astype(np.float32), y


def load(node_config):
    share = int(node_config["share"])
    return some(share + 1, 12 + 9 * share)


def data_for_tests():
    return some(99, 60)


PROJECT = Project(model, "cross_entropy", load, data_for_tests)
LAYOUT = fb.Layout.of(model())


def whole(size):
    """An upload: an update that is this number in every entry."""
    return frame(0, 0, LAYOUT.fingerprint, np.full(LAYOUT.size, size, "<f4").tobytes())


class Mischief:
    """Rewrites a node's answers: `kinds[name]` is called with (order, head, upload) and gives what is sent, None for nothing."""

    def __init__(self, transport, rewrite):
        self.transport, self.rewrite = transport, rewrite

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def answer(self, order, message):
        head, upload = unpack_answer(message)
        made = self.rewrite(order, head, upload)
        if made is not None:
            self.transport.answer(order, made if isinstance(made, bytes) else pack_answer(*made))


TORCH = threading.RLock()  # its random state is the process's, and real nodes are processes
drawn = fb.Task.initial


def initial(self, seed):
    """A model's first weights, while no node of this process draws any of its own."""
    with TORCH:
        return drawn(self, seed)


fb.Task.initial = initial


class ThreadedNode(NodeRuntime):
    """A node among others of this process."""

    def _answer(self, order, place):
        with TORCH:
            return super()._answer(order, place)


@dataclass
class LocalFleet:
    """A broker in memory, and nodes in threads of this process."""

    place: object
    project: Project = PROJECT
    names: list = field(default_factory=list)
    rewrite: dict = field(default_factory=dict)  # node -> mischief
    orders: list = field(default_factory=list)  # (time, node, kind, job) as nodes got them

    def __post_init__(self):
        self.key = Ed25519PrivateKey.generate()
        self.broker = MemoryBroker(self.key.public_key(), quota=16)
        self.nodes, self.runtimes = {}, {}

    def start(self, *names, **config):
        for name in names:
            share = int(name.rpartition("-")[2])
            node = self.nodes[name] = MemoryNode(self.broker, name)
            end = Mischief(node, self.rewrite[name]) if name in self.rewrite else node
            runtime = ThreadedNode(self.project, end, self.place / "nodes", {"share": share} | config)
            self.runtimes[name] = runtime
            threading.Thread(target=self._serve, args=(runtime,), daemon=True).start()
        return self

    def _serve(self, runtime):
        for order in runtime.transport.orders():
            self.orders.append((time.monotonic(), order.node, order.kind, order.job))
            runtime.obey(order)

    def stop(self, *names):
        for name in names or list(self.nodes):
            self.nodes.pop(name).close()

    def transport(self):
        return MemoryTransport(self.broker)

    def serve(self, out=None, callbacks=(), transport=None, **config):
        """A deployed run, to its end."""
        config = {"work": WORK, "nodes": len(self.nodes), "out": str(out or self.place / "run")} | config
        config = {key: value for key, value in config.items() if value is not None}
        settings = self.project.settings(config)
        return serve(self.project, settings, transport or self.transport(), OrderSigner(self.key), callbacks)

    @property
    def status(self):
        return json.loads((self.place / "run" / "status.json").read_text())

    def trained(self):
        return [name for _, name, kind, _ in self.orders if kind == "TRAIN"]


def driven(place, count=3, rewrite=None, project=PROJECT, callbacks=(), out=None, **config):
    """What a fleet of nodes in this process comes to; `rewrite` is the mischief of node-1."""
    fleet = LocalFleet(place, project, rewrite={"node-1": rewrite} if rewrite else {})
    fleet.start(*(f"node-{i}" for i in range(count)))
    try:
        return fleet.serve(out, callbacks, **config)
    finally:
        fleet.stop()


def until(happened, what="it"):
    end = time.monotonic() + LONG
    while not happened():
        assert time.monotonic() < end, f"within {LONG:g} s there was no {what() if callable(what) else what}"
        time.sleep(0.02)


def simulated(algorithm, schedule, work=WORK, clients=3):
    pairs = [load({"share": i}) for i in range(clients)]
    task = fb.Task.from_arrays(model, pairs, data_for_tests())
    return fb.simulate(task, algorithm, eval(work, {"Work": fb.Work}), schedule, seed=0, engine="in_process")


def same(deployed, expected):
    torch.testing.assert_close(deployed.x, expected.x, atol=1e-5, rtol=1e-5)


@dataclass(frozen=True)
class Replay(fb.Schedule):
    """The ticks that a deployment had."""

    clients: tuple = ()
    versions: tuple = ()

    @classmethod
    def of(cls, records):
        clients, versions = (tuple(tuple(r[key]) for r in records) for key in ("clients", "versions"))
        return cls(len(records), clients, versions)

    def ticks(self, N, seed, message=(0.0, 0.0)):
        for step in range(self.steps):
            live = {v for later in self.versions[step + 1 :] for v in later if v <= step}
            ids, versions = np.array(self.clients[step]), np.array(self.versions[step])
            yield fb.Tick(step, float(step), ids, versions, np.array([], np.int64), frozenset(live))
