"""How fast a fleet goes, how much memory its server takes, and how well the simulator foretells its time.

python benchmarks/fleet.py load --nodes 200 --rounds 3      uploads a second, beside Flower's own FedAvg app
python benchmarks/fleet.py memory --nodes 3 --rounds 1000   the server's and the SuperLink's memory, round by round
python benchmarks/fleet.py own --nodes 200 --rounds 5       the server's own CPU time and memory, without a SuperLink
python benchmarks/fleet.py predict --rounds 12              run A's clock in the simulator, beside the time that run B takes

Light nodes have no torch: one process of many threads that speaks Flower's node protocol and answers every order with a
ready upload of LeNet-5's size, 61,706 numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SHAPES = [(6, 1, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 400), (120,), (84, 120), (84,), (10, 84), (10,)]
FLEET = """
import fedbraid as fb
from fedbraid.models import lenet5

apps = fb.deploy.apps(lenet5, "cross_entropy", lambda config: None)
server = apps.server
client = apps.client
"""
FLOWER = """
import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    shapes, nodes = {shapes}, int(config["nodes"])
    strategy = FedAvg(
        fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes
    )
    kept = strategy.aggregate_train

    def aggregate(step, replies):
        made = kept(step, replies)
        with open(str(config["out"]), "a") as file:
            file.write(f"{{__import__('time').time()}}\\n")
        return made

    strategy.aggregate_train = aggregate
    strategy.start(grid, ArrayRecord([np.zeros(s, np.float32) for s in shapes]), num_rounds=int(config["rounds"]))
"""

SLOW = """
import random, time

import fedbraid as fb
import numpy as np
from flwr.clientapp import ClientApp
from torch import nn


def load(config):
    draw = np.random.default_rng(int(config["share"]))
    return draw.normal(size=(20, 5)).astype(np.float32), draw.integers(0, 3, 20)


def train(message, context):
    time.sleep(float(context.node_config["slow"]) * random.uniform(0.8, 1.2))
    return apps.client(message, context)


apps = fb.deploy.apps(lambda: nn.Linear(5, 3), "cross_entropy", load)
server = apps.server
client = ClientApp()
client.query()(lambda message, context: apps.client(message, context))
client.train()(train)
"""

# Light nodes --------------------------------------------------------------------------------------------


class Light:
    """One node on a connection of its own, with one of the keys that `deploy keys` made."""

    def __init__(
        self, port: int, number: int, answer: Callable[[Any, int], Any], wait: float, keys: Path
    ) -> None:
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes
        from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
        from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata

        self.number, self.answer, self.wait = number, answer, wait
        self.key: Any = load_ssh_private_key((keys / f"node-{number}.key").read_bytes(), None)
        self.public = public_key_to_bytes(self.key.public_key())
        self.headers = dict(RuntimeVersionMetadata.from_local_component("SuperNode").as_metadata())
        self.headers |= {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
        self.headers["flwr-public-key"] = b64encode(self.public).decode()
        trust = ssl.create_default_context(cafile=keys / "ca.crt")
        self.line = http.client.HTTPSConnection("127.0.0.1", port, timeout=300, context=trust)

    def call(self, path: str, request: Any, kind: type[Any]) -> Any:
        from flwr.supercore.date import now
        from flwr.supercore.primitives.asymmetric import sign_message

        stamp = now().isoformat()
        signature = b64encode(sign_message(self.key, stamp.encode("ascii"))).decode()
        headers = self.headers | {"flwr-timestamp": stamp, "flwr-signature": signature}
        for last in (False, True):
            try:
                self.line.request("POST", f"/v1/fleet/{path}", request.SerializeToString(), headers)
                answer = self.line.getresponse()
                body = answer.read()
                break
            except (http.client.HTTPException, OSError):
                self.line.close()
                if last:
                    raise
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {body[:200]!r}")
        return kind.FromString(body)

    def serve(self) -> None:
        """Until the process is ended."""
        from flwr.proto import fleet_pb2 as fleet
        from flwr.proto import heartbeat_pb2 as heart
        from flwr.proto.node_pb2 import Node

        made = fleet.ActivateNodeRequest(public_key=self.public, heartbeat_interval=300)
        node = Node(node_id=self.call("activate-node", made, fleet.ActivateNodeResponse).node_id)
        beat = time.monotonic()
        time.sleep(self.wait * (self.number % 20) / 20)
        while True:
            try:
                if time.monotonic() - beat > 100:
                    request = heart.SendNodeHeartbeatRequest(node=node, heartbeat_interval=300)
                    self.call("send-node-heartbeat", request, heart.SendNodeHeartbeatResponse)
                    beat = time.monotonic()
                got = self.call(
                    "pull-messages", fleet.PullMessagesRequest(node=node), fleet.PullMessagesResponse
                )
                if got.messages_list:
                    self.obey(node, got.message_object_trees[0], got.messages_list[0].metadata.run_id)
                else:
                    time.sleep(self.wait)
            except (RuntimeError, OSError, http.client.HTTPException) as error:  # as when the run has ended
                print(f"node {self.number}: {error!r}", flush=True)
                time.sleep(self.wait)

    def obey(self, node: Any, tree: Any, run: int) -> None:
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto import fleet_pb2 as fleet
        from flwr.proto import message_pb2 as objects
        from flwr.supercore.constant import PULL_BACKOFF_CAP, PULL_INITIAL_BACKOFF
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            iterate_object_tree,
        )
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        contents = {}
        for part in iterate_object_tree(tree):
            request = objects.PullObjectRequest(node=node, run_id=run, object_id=part.object_id)
            wait = PULL_INITIAL_BACKOFF  # as a SuperNode's; who asks more often keeps the server from pushing the rest
            while not (
                found := self.call("pull-object", request, objects.PullObjectResponse)
            ).object_available:
                time.sleep(wait)
                wait = min(2 * wait, PULL_BACKOFF_CAP)
            contents[part.object_id] = found.object_content
        confirm = objects.ConfirmMessageReceivedRequest(
            node=node, run_id=run, message_object_id=tree.object_id
        )
        self.call("confirm-message-received", confirm, objects.ConfirmMessageReceivedResponse)
        order = inflate_object_from_contents(tree.object_id, contents)
        order.metadata.__dict__["_message_id"] = tree.object_id
        reply = self.answer(order, self.number)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        proto = message_to_proto(remove_content_from_message(reply))
        push = fleet.PushMessagesRequest(
            node=node, messages_list=[proto], message_object_trees=[get_object_tree(reply)], clientapp_runtime_list=[0.0]
        )  # fmt: skip
        told = self.call("push-messages", push, fleet.PushMessagesResponse)
        for name, part in get_all_nested_objects(reply).items():
            if name in told.objects_to_push:
                request = objects.PushObjectRequest(
                    node=node, run_id=run, object_id=name, object_content=part.deflate(), session_id=told.session_id
                )  # fmt: skip
                self.call("push-object", request, objects.PushObjectResponse)


def as_fedbraid(upload: bytes) -> Callable[[Any, int], Any]:
    """Answers with a ready upload, as our node would."""
    from flwr.app import ConfigRecord, Message, RecordDict

    def answer(order: Any, number: int) -> Any:
        asked = order.content["fedbraid"]
        about: dict[str, Any] = {"name": f"light-{number}", "samples": 100, "held": -1, "client": number}
        if order.metadata.message_type == "train":
            about = {"job": asked["job"], "held": -1, "lost": False, "loss": 1.0, "blob": upload}
        return Message(RecordDict({"fedbraid": ConfigRecord(about)}), reply_to=order)

    return answer


def as_flower() -> Callable[[Any, int], Any]:
    """Answers with arrays of the same size, as the client of an app of Flower's own would."""
    import numpy as np
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    def answer(order: Any, number: int) -> Any:
        arrays = [np.full(s, 1e-6, np.float32) for s in SHAPES]
        for a in arrays:  # no two uploads are alike, or the SuperLink would keep one for all
            a.flat[0] = np.random.default_rng().random()
        content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 100, "loss": 1.0})}
        return Message(RecordDict(content), reply_to=order)

    return answer


def nodes(port: int, count: int, upload: Path, wait: float, keys: Path) -> None:
    """A process of light nodes, which take part in whatever runs."""
    assert "torch" not in sys.modules
    ours, theirs = as_fedbraid(upload.read_bytes()), as_flower()

    def answer(order: Any, number: int) -> Any:
        return (ours if "fedbraid" in order.content else theirs)(order, number)

    made = [Light(port, i, answer, wait, keys) for i in range(count)]
    threads = [threading.Thread(target=one.serve, daemon=True) for one in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def upload() -> bytes:
    """A ready upload of LeNet-5's size."""
    import numpy as np

    from fedbraid import Layout
    from fedbraid.core.wire import frame
    from fedbraid.models import lenet5

    layout = Layout.of(lenet5())
    delta = np.random.default_rng(0).normal(0, 1e-4, layout.size).astype("<f4")
    return frame(0, 0, layout.fingerprint, delta.tobytes())


@contextlib.contextmanager
def light(flower: Any, count: int, wait: float) -> Iterator[subprocess.Popen[bytes]]:
    """That process, for as long as it is needed."""
    place = flower.scratch / "upload"
    place.write_bytes(upload())
    words = [
        sys.executable,
        __file__,
        "nodes",
        "--port",
        str(flower.port),
        "--nodes",
        str(count),
    ]
    words += ["--upload", str(place), "--wait", str(wait), "--keys", str(flower.keys)]
    with open(flower.log("light"), "wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, process_group=0)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def documented(count: int) -> Iterator[Any]:
    """The SuperLink that docs/deploy.md describes, with so many registered keys."""
    from fedbraid.deploy import keys
    from fedbraid.deploy.trial import Flower

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "keys"
        keys.make(folder, ["127.0.0.1"], count)
        with Flower(Path(scratch), folder) as flower:
            flower.link()
            with flower.operator as operator:
                for public in folder.glob("node-*.pub"):
                    operator.register(public)
            try:
                yield flower
            finally:
                for place in processes(
                    "flwr-serverapp", scratch
                ):  # which would look for its SuperLink for ever
                    os.kill(int(place.name), signal.SIGKILL)


# Apps ---------------------------------------------------------------------------------------------------


def make_app(place: Path, kind: str, rounds: int, count: int, out: Path) -> Path:
    from fedbraid.deploy.project import init

    app = place / kind
    init(app)
    if kind == "fedbraid":
        (app / "fleet.py").write_text(FLEET)
        return app
    (app / "fleet.py").write_text(FLOWER.format(shapes=SHAPES))
    text = (app / "pyproject.toml").read_text()
    head = text[: text.index("[tool.flwr.app.config]")]
    config = f'[tool.flwr.app.config]\nrounds = {rounds}\nnodes = {count}\nout = "{out}"\n'
    (app / "pyproject.toml").write_text(head + config)
    return app


def run(flower: Any, kind: str, rounds: int, count: int, poll: float = 0.2) -> Path:
    """Start a run: where its steps are noted."""
    out = flower.scratch / f"run-{kind}"
    app = make_app(flower.scratch, kind, rounds, count, out)
    flower.submit(app, config(rounds, count, poll, out) if kind == "fedbraid" else {})
    return Path(out)


def config(rounds: int, count: int, poll: float, out: Path) -> dict[str, Any]:
    return {
        "schedule": f"rounds({rounds}, clients={count})", "nodes": count, "minimum": count, "poll": poll,
        "identity": "name", "out": str(out), "deadline": 3600.0, "work": "Work(lr=0.1, steps=1)",
    }  # fmt: skip


def steps(out: Path, kind: str) -> list[float]:
    """When each step was taken, by the wall clock."""
    if kind == "flower":
        return [float(line) for line in out.read_text().split()] if out.exists() else []
    path = out / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line)["time"] for line in path.read_text().splitlines() if line.endswith("}")]


def wait_for(
    flower: Any, out: Path, kind: str, rounds: int, each: Callable[[int], None] = lambda step: None
) -> list[float]:
    """When each of these steps was taken; complains of a server that ended before."""
    seen, met = 0, False
    while len(found := steps(out, kind)) < rounds:
        for step in range(seen, len(found)):
            each(step)
        seen = len(found)
        time.sleep(0.2)
        here = bool(processes("flwr-serverapp", str(flower.scratch)))
        if met and not here and len(steps(out, kind)) < rounds:
            sys.exit(f"the server ended after {seen} steps:\n{flower.log('superlink').read_text()[-3000:]}")
        met = met or here
    return found


def processes(word: str, scratch: str) -> list[Path]:
    """This benchmark's processes with this word in their command line."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            command, around = (place / "cmdline").read_text(), (place / "environ").read_text()
            if word in command.replace("\0", " ") and scratch in command + around:
                found.append(place)
    return found


def cpu(word: str, scratch: str) -> float:
    """CPU seconds so far of these."""
    total = 0.0
    for place in processes(word, scratch):
        with contextlib.suppress(OSError):
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return total


def memory(pid: int) -> float:
    """Resident megabytes."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


# What is measured -----------------------------------------------------------------------------------------


def load(count: int, rounds: int, wait: float, kinds: Sequence[str]) -> None:
    """Uploads a second of both, one after the other on one SuperLink; the first round, with its greetings, apart."""
    parts = {"SuperLink": "deploy link", "server app": "flwr-serverapp", "light nodes": "fleet.py nodes"}
    with documented(count) as flower, light(flower, count, wait):
        scratch = str(flower.scratch)
        print(f"{count} light nodes, {rounds} rounds of all of them, {os.cpu_count()} cores")
        print(
            "| | uploads/s | first round s | CPU ms an upload: "
            + " | ".join(parts)
            + " | SuperLink's share of a core |"
        )
        for kind in kinds:
            begun = time.time()
            out = run(flower, kind, rounds + 1, count)
            wait_for(flower, out, kind, 1)
            first, before = time.time(), {name: cpu(word, scratch) for name, word in parts.items()}
            wait_for(flower, out, kind, rounds + 1)
            took = time.time() - first
            spent = {name: cpu(word, scratch) - before[name] for name, word in parts.items()}
            each = [f"{1000 * s / (rounds * count):.0f}" for s in spent.values()]
            told = [f"{rounds * count / took:.2f}", f"{first - begun:.0f}", *each]
            print(f"| {kind} | " + " | ".join([*told, f"{spent['SuperLink'] / took:.0%}"]) + " |", flush=True)
            while processes("flwr-serverapp", scratch):
                time.sleep(0.2)


def grow(count: int, rounds: int) -> None:
    """Memory of server and SuperLink over many rounds."""
    from fedbraid.deploy.trial import read_status
    from fedbraid.run.checkpoint import Folder

    with documented(count) as flower, light(flower, count, 0.05):
        out = run(flower, "fedbraid", rounds, count, poll=0.05)
        link = flower.processes["superlink"].pid
        marks = {max(1, rounds * k // 10) - 1 for k in range(11)}
        print("| round | server MB | SuperLink MB |", flush=True)

        def each(step: int) -> None:
            if step in marks and (status := read_status(Folder(out))):
                with contextlib.suppress(OSError):
                    print(f"| {step + 1} | {memory(status['pid']):.1f} | {memory(link):.1f} |", flush=True)

        wait_for(flower, out, "fedbraid", rounds, each)


class Nowhere:
    """A grid without a SuperLink, whose nodes have answered before they are asked."""

    def __init__(self, count: int, upload: bytes) -> None:
        self.count, self.answer, self.replies, self.sent = count, as_fedbraid(upload), {}, 0

    def get_nodes(self) -> Iterator[Any]:
        from flwr.proto.node_pb2 import NodeInfo

        return (NodeInfo(node_id=i + 1, public_key=b"k", last_activated_at="") for i in range(self.count))

    def push_messages(self, messages: list[Any]) -> Iterator[str]:
        for message in messages:
            self.sent += 1
            message.metadata.__dict__["_message_id"] = str(self.sent)
            self.replies[str(self.sent)] = self.answer(message, message.metadata.dst_node_id - 1)
            yield str(self.sent)

    def pull_messages(self, ids: list[str]) -> list[Any]:
        return [self.replies.pop(i) for i in ids]


def own(count: int, rounds: int) -> None:
    """What is left when Flower is taken away."""
    import logging

    from flwr.supercore.task_identity import TaskIdentity

    from fedbraid.deploy import Project
    from fedbraid.deploy.server import serve
    from fedbraid.models import lenet5

    TaskIdentity._run_id = TaskIdentity._task_id = TaskIdentity._node_id = 1
    logging.getLogger("flwr").setLevel(logging.ERROR)
    marks = {max(1, rounds * k // 10) for k in range(11)}

    class Scale:
        def step(self, record: Any, run: Any) -> None:
            if record["step"] in marks:
                print(f"| {record['step']} | {memory(os.getpid()):.1f} |", flush=True)

    print("| round | server MB |")
    with tempfile.TemporaryDirectory() as scratch:
        project = Project(lenet5, "cross_entropy", lambda config: None, callbacks=(Scale(),))
        settings = project.settings(config(rounds, count, 0.001, Path(scratch) / "run"))
        begun = time.process_time()
        serve(project, settings, Nowhere(count, upload()))
        print(f"{1000 * (time.process_time() - begun) / (rounds * count):.2f} ms of CPU an upload")


SECONDS = (3.0, 6.0, 9.0, 15.0)  # that nodes take for an order, each 20 % more or less


def predict(rounds: int) -> None:
    """A recorded run's clock, and what it says of other runs on the same nodes, which sleep for their slowness."""
    import fedbraid as fb
    from fedbraid.deploy.project import init
    from fedbraid.deploy.trial import Flower, read_status
    from fedbraid.run.checkpoint import Folder

    known = f"rounds({rounds}, clients=2)"
    others = [
        f"rounds({rounds}, clients=3)",
        f"buffered(steps={rounds}, buffer=2, concurrency=3, arrivals='closed')",
    ]
    with tempfile.TemporaryDirectory() as scratch, Flower(Path(scratch)) as flower:
        app = flower.scratch / "app"
        init(app)
        (app / "fleet.py").write_text(SLOW)
        flower.link()
        for i, slow in enumerate(SECONDS):
            about = {"name": f"node-{i}", "client": i, "share": i, "slow": slow, "state": scratch}
            flower.node(f"node-{i}", about)

        def took(schedule: str) -> tuple[Path, float]:
            """A run's folder, and its seconds from the first order to the last step."""
            out = flower.scratch / f"run-{len(list(flower.scratch.glob('run-*')))}"
            config = {
                "schedule": schedule,
                "nodes": len(SECONDS),
                "identity": "name",
                "out": str(out),
                "poll": 0.2,
            }
            flower.submit(app, {**config, "seed": 1, "evaluate-every": 0})
            while read_status(Folder(out)).get("state") not in ("done", "failed"):
                time.sleep(0.5)
            records = list(Folder(out).records())
            return out, records[-1]["time"] - min(b for r in records for b in r["start_times"])

        took(f"rounds(1, clients={len(SECONDS)})")  # so that every worker has the app
        recorded, _ = took(known)
        clock = fb.clock.from_run(recorded)
        print(f"nodes that take {SECONDS} s, recorded: {known}", flush=True)
        print("| run | took s | the simulator says s | off by |", flush=True)
        for schedule in others:
            _, real = took(schedule)
            head, tail = schedule[:-1].split("(")
            made = eval(f"fb.{head}({tail}, **clock)", {"fb": fb, "clock": clock})
            said = statistics.mean(
                [tick.time for tick in made.ticks(len(SECONDS), seed)][-1] for seed in range(50)
            )
            print(f"| {schedule} | {real:.1f} | {said:.1f} | {said / real - 1:+.0%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["load", "memory", "own", "predict", "nodes"])
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--wait", type=float, default=3.0, help="seconds between two looks of an idle node; Flower's has 3"
    )
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=["flower", "fedbraid"], help="only this one's app")
    parser.add_argument("--upload", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--keys", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.what == "nodes":
        nodes(asked.port, asked.nodes, asked.upload, asked.wait, asked.keys)
    elif asked.what == "load":
        load(
            asked.nodes or 200,
            asked.rounds or 3,
            asked.wait,
            [asked.kind] if asked.kind else ["flower", "fedbraid"],
        )
    elif asked.what == "own":
        own(asked.nodes or 200, asked.rounds or 5)
    elif asked.what == "predict":
        predict(asked.rounds or 12)
    else:
        grow(asked.nodes or 3, asked.rounds or 1000)


if __name__ == "__main__":
    main()
