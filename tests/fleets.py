"""A fleet for tests: the user's file with mischief in it, Flower's processes, and what the simulator says."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedbraid as fb
from fedbraid.deploy.project import init
from fedbraid.deploy.trial import Flower, read_status
from fedbraid.run.checkpoint import Folder

LONG = 400.0  # seconds that one deployed run may take on a busy machine
WORK = "Work(lr=0.1, steps=3, batch=4)"

FLEET = '''
import json, os, signal, time
from pathlib import Path

import numpy as np
import torch
from flwr.clientapp import ClientApp
from torch import nn

import fedbraid as fb
from fedbraid.core.wire import frame


def model():
    return nn.Linear(5, 3)


def some(seed, n):
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 3, n)
    return (np.random.default_rng(0).normal(size=(3, 5))[y] + draw.normal(size=(n, 5))).astype(np.float32), y


LIFE = os.urandom(4).hex()  # of this process, until it starts afresh


def noted(place):
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("a") as file:
        file.write(f"{os.getpid()} {LIFE}\\n")


def load(node_config):
    share = int(node_config["share"])
    if "state" in node_config:
        noted(Path(node_config["state"]) / f"loads-{share}")
    return some(share + 1, 12 + 9 * share)


def test():
    return some(99, 60)


apps = fb.deploy.apps(model, "cross_entropy", load, test)
server = apps.server


def mischief(message, context):
    """A client that does what the next line of a file beside the run says, and is honest when there is none."""
    place = Path(str(context.run_config["out"])).parent / f"mischief-{context.node_config['share']}"
    lines = place.read_text().splitlines() if place.exists() else []
    noted(place.with_name(f"orders-{context.node_config['share']}"))
    if not lines:
        return apps.client(message, context)
    place.write_text("\\n".join(lines[1:]))
    kind = lines[0]
    if kind == "die":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    while kind == "hold":  # until the test lets go
        if (go := Path(f"{place}-go")).exists():
            go.unlink()
            break
        time.sleep(0.1)
    if kind == "raise":
        raise ValueError("a client's own mistake")
    reply = apps.client(message, context)
    answer = reply.content["fedbraid"]
    layout = fb.Layout.of(model())
    d = layout.size
    if kind == "garbage":
        answer["blob"] = os.urandom(100)
    if kind == "layout":
        answer["blob"] = frame(0, 0, bytes(6), np.zeros(d, "<f4").tobytes())
    if kind == "nan":
        answer["blob"] = frame(0, 0, layout.fingerprint, np.full(d, np.nan, "<f4").tobytes())
    if kind == "norm":
        answer["blob"] = frame(0, 0, layout.fingerprint, np.full(d, 1e6, "<f4").tobytes())
    if kind == "huge":
        answer["blob"] = frame(0, 0, layout.fingerprint, np.full(d, 1e18, "<f4").tobytes())
    if kind == "loss":
        answer["loss"] = "low"
    if kind == "replay":
        answer["job"] = "0123456789abcdef"
    return reply


client = ClientApp()
client.query()(lambda message, context: apps.client(message, context))
client.train()(mischief)
'''


def make_app(tmp_path_factory):
    """A deployment whose user file is ours, mischief included."""
    folder = tmp_path_factory.mktemp("app") / "fleet"
    init(folder)
    (folder / "fleet.py").write_text(FLEET)
    return folder


def make_user():
    """The user's file as a module."""
    made = {}
    exec(compile(FLEET, "fleet.py", "exec"), made)
    return made


@dataclass
class Fleet:
    """Flower's processes, and one test's run on them."""

    flower: Flower
    app: Path
    place: Path

    def node(self, i):
        state = str(self.flower.scratch / "nodes")
        self.flower.node(f"node-{i}", {"name": f"node-{i}", "client": i, "share": i, "state": state})

    def misbehave(self, i, *lines):
        """What node i is to do at its next orders."""
        (self.place / f"mischief-{i}").write_text("\n".join(lines))

    def lives(self, i):
        """(process, life) of each order that node i got."""
        return [tuple(line.split()) for line in (self.place / f"orders-{i}").read_text().splitlines()]

    def let_go(self, i):
        (self.place / f"mischief-{i}-go").touch()

    @property
    def folder(self):
        return Folder(self.place / "run")

    @property
    def model(self):
        return load_file(self.folder.path / "model.safetensors")

    @property
    def records(self):
        return list(self.folder.records())

    def submit(self, **config):
        config = {"work": WORK, "nodes": 3, "minimum": 3, "deadline": LONG, "poll": 0.2} | config
        config = {"identity": "name" if self.flower.keys is None else "key"} | config
        (self.folder.path / "status.json").unlink(missing_ok=True)
        run = {key.replace("_", "-"): value for key, value in config.items()}
        self.flower.submit(self.app, run | {"out": str(self.folder.path)})

    def run(self, **config):
        """A deployed run from start to end."""
        self.submit(**config)
        self.wait(lambda status: status["state"] == "done")

    def wait(self, until):
        """For this of the run's status, which is returned."""
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            status = read_status(self.folder)
            if status and until(status):
                return status
            assert status.get("state") != "failed", status
            time.sleep(0.1)
        log = self.flower.log("superlink").read_text(errors="replace")[-3000:]
        pytest.fail(f"waited too long: {read_status(self.folder)}\n{log}")

    def wait_for(self, **values):
        return self.wait(lambda status: all(status[k] == v for k, v in values.items()))


def simulated(user, algorithm, schedule, work=WORK, clients=3):
    pairs = [user["load"]({"share": i}) for i in range(clients)]
    task = fb.Task.from_arrays(user["model"], pairs, user["test"]())
    result = fb.simulate(
        task, algorithm, eval(work, {"Work": fb.Work}), schedule, seed=0, engine="in_process"
    )
    return result, dict(result.model().named_parameters())


def same(deployed, simulated_):
    for name, v in simulated_.items():
        assert torch.allclose(deployed[name], v, atol=1e-5, rtol=1e-5), (
            name,
            float((deployed[name] - v).abs().max()),
        )


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


class InProcess:
    """A grid without processes: nodes that answer at once, each with the mischief that a test gives it."""

    def __init__(self, user, nodes, mischief=None):
        self.user, self.mischief = user, mischief or (lambda node, order, reply: reply)
        self.nodes = {i + 100: about for i, about in enumerate(nodes)}  # node id -> its configuration
        self.keys = {i: f"key-{i}".encode() for i in self.nodes}
        self.woke = dict.fromkeys(self.nodes, "once")
        self.replies, self.orders, self.config = {}, [], {}

    def get_nodes(self):
        from flwr.proto.node_pb2 import NodeInfo

        for i in self.nodes:
            yield NodeInfo(node_id=i, public_key=self.keys[i], last_activated_at=self.woke[i])

    def push_messages(self, messages):
        from flwr.app import Context, RecordDict

        for message in messages:
            message.metadata.__dict__["_message_id"] = str(len(self.orders) + 1)
            node = message.metadata.dst_node_id
            self.orders.append((time.monotonic(), node, message.metadata.message_type))
            context = Context(1, node, self.nodes[node], RecordDict(), self.config)
            reply = self.mischief(node, message, self.user["apps"].client(message, context))
            if reply is not None:
                self.replies[message.metadata.message_id] = reply
            yield message.metadata.message_id

    def pull_messages(self, ids):
        return [self.replies.pop(i) for i in ids if i in self.replies]


def driven(user, grid, out, callbacks=(), **config):
    """What a deployment's server on such a grid comes to."""
    from flwr.supercore.task_identity import TaskIdentity

    from fedbraid.deploy import Project
    from fedbraid.deploy.server import serve

    TaskIdentity._run_id = TaskIdentity._task_id = TaskIdentity._node_id = 1
    config = {"work": WORK, "nodes": len(grid.nodes), "out": str(out), "poll": 0.01} | config
    grid.config = {key.replace("_", "-"): value for key, value in config.items()}
    project = Project(user["model"], "cross_entropy", user["load"], user["test"], callbacks=callbacks)
    return serve(project, project.settings(grid.config), grid)


def in_process(user, place, count, mischief=None):
    about = [{"name": f"n{i}", "client": i, "share": i, "state": str(place / "nodes")} for i in range(count)]
    return InProcess(user, about, mischief)
