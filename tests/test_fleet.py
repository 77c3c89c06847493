"""Can a fleet be trusted: who may do what, who comes back, and what one bad node can do to the others?

Real Flower processes on loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import fedbraid as fb

pytest.importorskip("flwr", reason="flwr is not installed: make test-engines brings it")
import httpx
from fleets import LONG, Fleet, driven, in_process, make_app, make_user, simulated
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.fleet_pb2 import ActivateNodeResponse, PullMessagesRequest
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.supernode.runtime import run_clientapp

from fedbraid.core.wire import MAGIC, frame, pack_message, unpack_message
from fedbraid.deploy import check, doctor, gate, keys, leaving, link, mailbox, server, worker
from fedbraid.deploy.bound import Bound
from fedbraid.deploy.mailbox import Mailbox
from fedbraid.deploy.node import Memory
from fedbraid.deploy.notes import Troubles
from fedbraid.deploy.operator import Operator, build
from fedbraid.deploy.project import init
from fedbraid.deploy.server import FORGOT
from fedbraid.deploy.service import Service
from fedbraid.deploy.sign import is_signed, read_trusted, sign
from fedbraid.deploy.trial import Flower, free_port
from fedbraid.errors import ConfigError, EngineError, RunError, WireError

pytestmark = pytest.mark.engines

app = pytest.fixture(scope="module")(make_app)
user = pytest.fixture(scope="module")(make_user)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("secrets") / "keys"
    keys.make(folder, ["127.0.0.1"], 5)  # a key that was removed never comes back
    return folder


@pytest.fixture(scope="module")
def flower(secrets, tmp_path_factory):
    """The documented fleet: a SuperLink behind the gate, and two registered nodes that trust the operator alone."""
    with Flower(tmp_path_factory.mktemp("flower"), secrets) as made:
        made.link()
        with made.operator as operator:
            for i in range(2):
                operator.register(secrets / f"node-{i}.pub")
                start(made, i, secrets)
        yield made


def start(flower, i, secrets, **about):
    state = str(flower.scratch / "nodes")
    about = {"name": f"node-{i}", "client": i, "share": i, "state": state} | about
    flower.node(f"node-{i}", about, secrets / f"node-{i}.key")


@pytest.fixture
def fleet(flower, app, tmp_path):
    return Fleet(flower, app, tmp_path)


# Who may do what --------------------------------------------------------------------------------------

POST = {"content-type": "application/protobuf"}


def asked(client, port, path, message, **headers):
    """The status that a request is answered with."""
    url = f"https://127.0.0.1:{port}{path}"
    return client.post(url, content=message.SerializeToString(), headers=POST | headers).status_code


@pytest.mark.quick
def test_a_stranger_with_the_ca_certificate_gets_nowhere(flower, fleet, app, secrets, tmp_path):
    """Next to the documented fleet, which works; the stranger is on the same machine, even."""
    with flower.operator as operator:
        registered = operator.nodes()
        runs = operator.runs()
    stranger = tmp_path / "stranger"
    keys.make(stranger, ["127.0.0.1"], 1)
    shutil.copy(secrets / "ca.crt", stranger / "ca.crt")  # all that the stranger has of ours

    # with Flower's own command line, at the nodes' port and at the operator's
    for port in (flower.port, flower.control):
        home = tmp_path / f"home-{port}"
        home.mkdir()
        lines = [
            "[superlink.it]",
            f'address = "127.0.0.1:{port}"',
            f'root-certificates = "{stranger}/ca.crt"',
        ]
        (home / "config.toml").write_text("\n".join(lines))
        for words in (
            ["ls", "it"],
            ["run", str(app), "it"],
            ["supernode", "register", f"{stranger}/node-0.pub", "it"],
        ):
            done = flwr(home, *words)
            assert done.returncode != 0, (port, words, done.stdout)

    # by hand, with and without a token of its own
    node = Node(node_id=registered[0].id)
    whole = [
        ("/v1/control/list-runs", ListRunsRequest()),
        ("/v1/control/register-node", RegisterNodeRequest(public_key=b"mine")),
        ("/v1/control/start-run", StartRunRequest(fab=Fab(hash_str="a", content=build(app)))),
        ("/v1/runtime/acquire-task", AcquireTaskRequest(supported_task_types=["serverapp"])),
        ("/v1/fleet/pull-messages", PullMessagesRequest(node=node)),
        ("/v1/fleet/register-node", RegisterNodeRequest(public_key=b"mine")),
        ("/openapi.json", ListRunsRequest()),
    ]
    forged, _ = keys.signed(None)
    with httpx.Client(verify=check._context(stranger)) as client:
        for port in (flower.port, flower.control):
            for path, message in whole:
                for headers in (
                    {},
                    {"authorization": "Bearer guessed"},
                    forged,
                    {"host": "x/v1/control/list-runs?"},
                ):
                    assert asked(client, port, path, message, **headers) in (401, 403, 404), (
                        port,
                        path,
                        headers,
                    )
    with (
        pytest.raises(EngineError, match="401"),
        Operator(stranger, f"127.0.0.1:{flower.control}") as operator,
    ):
        operator.nodes()

    # as a node with a key of its own
    flower.node("stranger", {"name": "node-0", "share": 2}, stranger / "node-0.key")
    fleet.run(schedule="rounds(2, clients=2)", nodes=2, minimum=2)
    assert [r["nodes"] for r in fleet.records] == [2, 2]
    assert not any("trouble" in r for r in fleet.records)
    assert "SuperNode ID" not in flower.log("stranger").read_text(errors="replace")
    with flower.operator as operator:
        assert [n.id for n in operator.nodes()] == [n.id for n in registered]
        assert len(operator.runs()) == len(runs) + 1


def flwr(home, *words):
    tool = os.path.join(os.path.dirname(sys.executable), "flwr")
    env = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    return subprocess.run([tool, *words], env=env, capture_output=True, text=True, timeout=LONG)


def test_check_finds_the_gate_shut_and_a_bare_superlink_open(flower, secrets, tmp_path):
    shut = check.look(secrets, f"127.0.0.1:{flower.port}", f"127.0.0.1:{flower.control}")
    assert all(trial.good for trial in shut), shut
    bare = Flower(tmp_path / "bare", secrets)
    with bare:
        bare.port = bare.control = free_port()
        words = ["--host", "127.0.0.1", "--port", str(bare.port), "--disable-runtime-dependency-installation"]
        words += ["--ssl-ca-certfile", str(secrets / "ca.crt"), "--ssl-certfile", str(secrets / "server.crt")]
        words += ["--ssl-keyfile", str(secrets / "server.key"), "--enable-supernode-auth"]
        bare.start("superlink", "flower-superlink", words)
        bare.wait_for_port()
        found = check.look(secrets, f"127.0.0.1:{bare.port}", f"127.0.0.1:{bare.port}")
    bad = {(trial.api, trial.tried) for trial in found if not trial.good}
    assert ("control", "as anybody with ca.crt") in bad
    assert ("runtime", "take a task") in bad
    assert not any(trial.api == "node" for trial in found if not trial.good)


def test_only_what_the_operator_signed_runs(flower, fleet, app, secrets, tmp_path):
    """Not even the operator's token runs code without the signing key."""
    thief = tmp_path / "thief"
    keys.make(thief, ["127.0.0.1"], 0)
    for name in ("ca.crt", "operator.token"):
        shutil.copy(secrets / name, thief / name)
    with Operator(thief, f"127.0.0.1:{flower.control}") as operator:
        before = operator.runs()  # may look
        with pytest.raises(EngineError, match="signed this app"):
            operator.start(app, {})
        with pytest.raises(EngineError, match="only signed apps"), operator._calling("start") as client:
            client.StartRun(StartRunRequest(fab=Fab(hash_str="a", content=build(app))))
        assert operator.runs() == before


def test_a_node_runs_only_what_a_key_signed_that_it_trusts(flower, fleet, secrets, tmp_path):
    """Whoever has the SuperLink does not have the nodes."""
    other = tmp_path / "other"
    keys.make(other, ["127.0.0.1"], 0)
    with flower.operator as operator:
        operator.register(secrets / "node-2.pub")
    words = [
        "--root-certificates",
        str(secrets / "ca.crt"),
        "--trusted-entities",
        str(other / "trusted.yaml"),
    ]
    about = {"name": "node-2", "client": 2, "share": 2, "state": str(tmp_path)}
    flower.node("node-2", about, secrets / "node-2.key", words)
    try:
        fleet.submit(schedule="rounds(1, clients=3)", nodes=3)
        status = fleet.wait(lambda status: status["trouble"] and status["nodes"] == 2)
        assert "verif" in status["trouble"][0]["why"].lower(), status
    finally:
        flower.end("node-2")
        with flower.operator as operator:
            operator.stop(operator.runs()[0]["run"])
            operator.unregister(secrets / "node-2.pub")
            assert len(operator.nodes()) == 2


def test_a_signature_is_of_one_bundle_by_one_key(tmp_path):
    keys.make(tmp_path / "a", ["h"], 0)
    keys.make(tmp_path / "b", ["h"], 0)
    trusted = read_trusted(tmp_path / "a" / "trusted.yaml")
    signed = sign(b"bundle", tmp_path / "a" / "signing.key")
    assert is_signed(b"bundle", signed, trusted)
    assert not is_signed(b"bundlf", signed, trusted)
    assert not is_signed(b"bundle", sign(b"bundle", tmp_path / "b" / "signing.key"), trusted)
    assert not is_signed(b"bundle", dict.fromkeys(trusted, "{}"), trusted)
    assert not is_signed(b"bundle", dict.fromkeys(trusted, "["), trusted)
    late = {name: about.replace('"signed_at": ', '"signed_at": 1') for name, about in signed.items()}
    assert not is_signed(b"bundle", late, trusted)


@pytest.mark.parametrize(
    ("nodes", "operator", "word"),
    [
        ("0.0.0.0:8000", "0.0.0.0:8001", "reached from elsewhere"),
        ("127.0.0.1:8000", "127.0.0.1:8000", "cannot share port"),
        ("0.0.0.0:8000", "127.0.0.2:8001", "not valid for 127.0.0.2"),
    ],
)
def test_a_link_that_would_be_unsafe_does_not_start(nodes, operator, word, secrets, tmp_path):
    from fedbraid.deploy.link import parse_address, serve

    with pytest.raises(ConfigError, match=word):
        serve(secrets, parse_address(nodes), parse_address(operator), tmp_path / "db")


# What one node can do to the others ---------------------------------------------------------------------


def huge(size):
    """The second node uploads this in every entry of its update, finite as it is."""

    def mischief(node, order, reply):
        if order.metadata.message_type == "train" and node == 101:
            answer, layout = reply.content["fedbraid"], fb.Layout.of(torch.nn.Linear(5, 3))
            forged = frame(0, 0, layout.fingerprint, np.full(layout.size, size, "<f4").tobytes())
            several = not answer["blob"].startswith(MAGIC)
            answer["blob"] = (
                pack_message({**unpack_message(answer["blob"], 10**6), "delta": forged})
                if several
                else forged
            )
        return reply

    return mischief


@pytest.mark.parametrize("factor", [100.0, 0.0])
@pytest.mark.parametrize(
    "algorithm",
    ["fednova()", "fedadavr(lr=0.1, memory='fp16')", "with_codecs(fedavg(), down=fp16())", "fedavg()"],
)
def test_an_upload_that_no_step_can_be_taken_with_is_refused(algorithm, factor, user, tmp_path):
    grid = in_process(user, tmp_path, 3, huge(1e18))
    result = driven(
        user, grid, tmp_path / "run", algorithm=algorithm, schedule="rounds(3, clients=3)", norm_factor=factor
    )
    records = result.history
    assert [r["step"] for r in records] == [1, 2, 3]
    assert not any(1 in r["clients"] for r in records)
    troubles = [t for r in records for t in r.get("trouble", [])]
    assert {(t["client"], t["node"]) for t in troubles} == {(1, "101")}
    assert all(("beyond" if factor else "no step can be taken") in t["why"] for t in troubles), troubles


def lies(kind, **values):
    """The second node answers orders of this kind with these values."""

    def mischief(node, order, reply):
        if order.metadata.message_type == kind and node == 101:
            reply.content["fedbraid"].update(values)
        return reply

    return mischief


@pytest.mark.quick
@pytest.mark.parametrize("loss", [1e39, -1e308, float("inf")])
def test_a_loss_that_no_mean_holds_is_refused(loss, user, tmp_path):
    """It would stand in the records as Infinity, which no reader of JSON takes."""
    grid = in_process(user, tmp_path, 3, lies("train", loss=loss))
    result = driven(user, grid, tmp_path / "run", schedule="rounds(2, clients=3)", minimum=2)
    assert [sorted(r["clients"]) for r in result.history] == [[0, 2]] * 2
    assert [(t["client"], "its training loss is" in t["why"]) for t in result.history[0]["trouble"]] == [
        (1, True)
    ]
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "Infinity" not in text
    assert "NaN" not in text


@pytest.mark.quick
@pytest.mark.parametrize("held", [10**15, 1, -7])
def test_a_newcomer_that_claims_to_hold_what_it_does_not_gets_everything(held, user, tmp_path):
    grid = in_process(user, tmp_path, 3, lies("query", held=held))
    algorithm = "hidden_state(with_codecs(fedavg(), up=qsgd(4), down=qsgd(8)))"
    result = driven(user, grid, tmp_path / "run", algorithm=algorithm, schedule="rounds(2, clients=3)")
    assert [r["step"] for r in result.history] == [1, 2]


ESCAPE = "\x1b[2J\nfedbraid: all is well"  # clears a terminal, and forges a line of the log


@pytest.mark.quick
def test_what_a_node_says_is_one_line_without_control_characters(user, tmp_path, caplog):
    def mischief(node, order, reply):
        if node == 101 and order.metadata.message_type == "train":
            return Message(Error(1, ESCAPE), reply_to=order)
        return lies("query", name=f"clinic{ESCAPE}")(node - 1, order, reply)

    grid = in_process(user, tmp_path, 3, mischief)
    driven(user, grid, tmp_path / "run", schedule="rounds(1, clients=2)", nodes=2, minimum=1)
    told = json.loads((tmp_path / "run" / "status.json").read_text())
    assert [one["name"] for one in told["fleet"]] == ["n0", "n1"]
    assert "under the name 'clinic\\x1b[2J\\nfedbraid: all is well'" in caplog.text
    assert "it failed: \\x1b[2J\\nfedbraid: all is well" in caplog.text
    assert all(line.isprintable() for line in caplog.messages)


def test_honest_uploads_of_any_size_are_taken_and_learned_from(tmp_path):
    """Early and late, of one step and of a thousand; only what is out of all proportion is refused."""
    x, bound = torch.ones(100), Bound(100.0)
    for norm, steps in ((50.0, 1), (3.0, 10), (0.5, 1), (900.0, 1000), (2.0, 1), (0.01, 1), (150.0, 200)):
        bound.took(bound.check({"delta": torch.full((1, 100), norm / 10)}, steps, x))
    with pytest.raises(WireError, match="norm-factor=100 times the median"):
        bound.check({"delta": torch.full((1, 100), 1e4)}, 1, x)
    again = Bound.restore(100.0, json.loads(json.dumps(bound.note())))
    assert again == bound
    assert Bound(0.0).check({"delta": torch.full((1, 100), 1e30)}, 1, x)
    with pytest.raises(WireError, match="a million times"):
        Bound(100.0).check({"delta": torch.full((1, 100), 1e9)}, 1, x)


def test_failing_nodes_are_asked_ever_more_rarely(user, tmp_path):
    """However fast they fail; what is told of it stays small."""

    def fail(node, order, reply):
        return Message(Error(1, f"attempt {len(grid.orders)}"), reply_to=order)

    grid = in_process(user, tmp_path, 3, lambda node, order, reply: reply)
    grid.mischief = lambda *about: fail(*about) if about[1].metadata.message_type == "train" else about[2]
    with pytest.raises(RunError, match="can be continued"):
        driven(user, grid, tmp_path / "run", schedule="rounds(1, clients=3)", deadline=6.0, too_few="stop")
    orders = [node for _, node, kind in grid.orders if kind == "train"]
    assert 3 <= len(orders) <= 3 * 6  # 1/2 + 1 + 2 + 4 s at least between one node's first five
    assert (tmp_path / "run" / "status.json").stat().st_size < 50_000


def test_orders_go_out_together_and_records_make_a_clock(user, tmp_path):
    grid, pushed = in_process(user, tmp_path, 3), []
    push = grid.push_messages

    def seen(messages):
        pushed.append([m.content["model"].object_id for m in messages if "model" in m.content])
        return push(messages)

    grid.push_messages = seen
    result = driven(user, grid, tmp_path / "run", schedule="rounds(2, clients=3)", minimum=3)
    orders = [models for models in pushed if models]
    assert [len(models) for models in orders] == [3, 3]  # one push a cohort
    assert [len(set(models)) for models in orders] == [1, 1]  # of one model, which Flower keeps once
    assert sorted(c for c, _ in result.history[0]["came"]) == [0, 1, 2]
    for record in result.history:
        assert all(
            b <= e <= record["time"] for b, e in zip(record["start_times"], record["end_times"], strict=True)
        )
        assert sum(record["node_up"]) == record["bytes_up"]
        assert sum(record["node_down"]) == record["bytes_down"]
    assert set(fb.clock.from_run(tmp_path / "run")) == {"durations"}


def test_a_superlink_that_is_overwhelmed_is_tried_again(user, tmp_path):
    """It loses orders, answers and the list of nodes, each once."""
    grid, failed = in_process(user, tmp_path, 2), []

    def failing(name):
        honest = getattr(grid, name)

        def once(*words):
            if name not in failed and len(grid.orders) == 2:  # after the introductions
                failed.append(name)
                raise ObjectPushError("x", 1, "y") if name == "push_messages" else httpx.ReadTimeout("busy")
            return honest(*words)

        return once

    for name in ("push_messages", "pull_messages", "get_nodes"):
        setattr(grid, name, failing(name))
    result = driven(user, grid, tmp_path / "run", schedule="rounds(2, clients=2)", minimum=2)
    assert sorted(failed) == ["get_nodes", "pull_messages", "push_messages"]
    assert [sorted(r["clients"]) for r in result.history] == [[0, 1]] * 2
    why = [t["why"] for t in result.history[0]["trouble"]]
    assert sum("did not take orders: ObjectPushError" in w for w in why) == 1
    assert sum("did not take its order" in w for w in why) == 2


@pytest.mark.quick
def test_a_superlink_that_is_silent_is_waited_for_by_name_and_until_the_deadline(
    user, tmp_path, monkeypatch, caplog
):
    """Flower's own client would try for ever."""
    monkeypatch.setattr(mailbox, "PATIENCE", 0.1)
    grid = HttpGrid(f"127.0.0.1:{free_port()}", insecure=True, token="t")
    grid.nodes = {1: {}}
    with caplog.at_level("INFO", "flwr"), pytest.raises(httpx.ConnectError):
        driven(user, grid, tmp_path / "run", deadline=1.0)
    assert "waiting for the SuperLink, which does not answer" in caplog.text
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["wait"]["for"]) == ("failed", "the SuperLink, which does not answer")


class Office:
    """A SuperLink's side of the mail: replies by the order that they answer, with the parts that are here so far."""

    def __init__(self, replies):
        self.replies, self.confirmed = dict(replies), []
        self.objects, self.here = {}, set()
        for reply in self.replies.values():
            self.objects |= {i: part.deflate() for i, part in get_all_nested_objects(reply).items()}

    def PullMessages(self, request):
        found = [self.replies.pop(i) for i in request.message_ids if i in self.replies]
        for reply in found:
            reply.metadata.__dict__["_message_id"] = reply.object_id
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(remove_content_from_message(m)) for m in found],
            message_object_trees=[get_object_tree(m) for m in found],
        )

    def PullObject(self, request):
        i = request.object_id
        content = self.objects.get(i, b"") if i in self.here else b""
        return PullObjectResponse(
            object_found=i in self.objects, object_available=bool(content), object_content=content
        )

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)


@pytest.fixture
def mail():
    """A mailbox, its office, and two nodes' answers there, of which no part has come."""
    TaskIdentity._run_id = TaskIdentity._task_id = TaskIdentity._node_id = 1
    replies = {}
    for i in range(2):
        order = Message(RecordDict(), dst_node_id=i + 1, message_type="train")
        order.metadata.__dict__["_message_id"] = f"order {i}"
        replies[f"order {i}"] = Message(RecordDict({"fedbraid": ConfigRecord({"a": i})}), reply_to=order)
    office, grid = Office(replies), HttpGrid(token="t")
    grid._client, grid._run = office, Run.create_empty(1)
    return Mailbox(grid), office, replies


@pytest.mark.quick
def test_an_answer_on_its_way_keeps_no_other_waiting(mail):
    """Flower's own `pull_messages` would wait for its parts, for up to two hours."""
    mailbox, office, replies = mail
    ids = ["order 0", "order 1", "order 2"]
    assert mailbox.pull(ids) == []
    office.here |= get_all_nested_objects(replies["order 1"]).keys()
    office.here.add(replies["order 0"].object_id)
    ((to, message),) = mailbox.pull(ids)
    assert (to, message.content["fedbraid"]["a"]) == ("order 1", 1)
    office.here |= office.objects.keys()
    ((to, message),) = mailbox.pull(ids)
    assert (to, message.content["fedbraid"]["a"]) == ("order 0", 0)
    assert mailbox.pull(ids) == []
    assert len(office.confirmed) == 2


@pytest.mark.quick
def test_an_answer_that_cannot_be_read_is_its_senders_trouble(mail):
    """A node may send any bytes as a part; its server must outlive that."""
    mailbox, office, replies = mail
    record = replies["order 0"].content["fedbraid"].object_id
    head, _, _ = office.objects[record].partition(b"\0")
    office.objects[record] = head + b"\0" + b"\xff" * 40
    office.here |= office.objects.keys()
    found = dict(mailbox.pull(["order 0", "order 1"]))
    assert isinstance(found["order 0"], WireError)
    assert "cannot be read" in str(found["order 0"])
    assert found["order 1"].content["fedbraid"]["a"] == 1


@pytest.mark.quick
def test_an_answer_that_never_came_whole_is_said_to_be_lost(mail):
    mailbox, office, replies = mail
    del office.objects[replies["order 0"].content.object_id]
    office.here |= office.objects.keys()
    found = dict(mailbox.pull(["order 0", "order 1"]))
    assert "never came" in str(found["order 0"])
    assert found["order 1"].content["fedbraid"]["a"] == 1


@pytest.mark.quick
def test_what_has_come_stays_when_the_superlink_fails(mail):
    mailbox, office, replies = mail
    office.here |= office.objects.keys()
    pull, bad = office.PullObject, replies["order 0"].content.object_id

    def failing(request):
        if request.object_id == bad:
            raise httpx.ReadTimeout("busy")
        return pull(request)

    office.PullObject = failing
    assert [to for to, _ in mailbox.pull(["order 0", "order 1"])] == ["order 1"]
    with pytest.raises(httpx.ReadTimeout):
        mailbox.pull(["order 0"])
    office.PullObject = pull
    assert [to for to, _ in mailbox.pull(["order 0"])] == ["order 0"]


def test_what_is_told_of_trouble_is_bounded():
    troubles = Troubles()
    for i in range(100_000):
        troubles.add(i % 7, i % 7, f"reason {i % 1000}" * 100)
    found = troubles.take()
    assert len(found["trouble"]) == 100
    assert sum(t["times"] for t in found["trouble"]) + found["more_trouble"] == 100_000
    assert len(json.dumps(found)) < 100_000
    assert len(troubles.told) <= 2000
    assert troubles.take() == {}


@pytest.mark.parametrize(
    "schedule",
    [
        "rounds(2, clients=3)",
        "rounds(2, clients=[[0, 1], [0, 1]])",
        "buffered(steps=2, buffer=1, concurrency=2)",
    ],
)
def test_a_run_never_starts_with_fewer_nodes_than_it_says(schedule, user, tmp_path):
    """Many deadlines pass before the third node comes."""
    grid = in_process(user, tmp_path, 3)
    third, honest, seen = grid.nodes.pop(102), grid.get_nodes, []

    def nodes():
        seen.append(len(grid.orders))
        if len(seen) == 60:
            grid.nodes[102] = third
        return honest()

    grid.get_nodes = nodes
    result = driven(user, grid, tmp_path / "run", schedule=schedule, nodes=3, deadline=0.05)
    assert seen[59] == 2  # two introductions and no order
    assert len(result.history) == 2


def test_who_does_not_say_its_name_is_shown_and_a_server_leaves_its_traceback(user, tmp_path, caplog):
    def silent(node, order, reply):
        if order.metadata.message_type == "query" and node == 101:
            return None
        return reply

    def nodes():
        if len(looks) > 20:
            raise ValueError("the grid is gone")
        looks.append(json.loads(status.read_text()) if status.exists() else {})
        return honest()

    grid, looks, status = in_process(user, tmp_path, 2, silent), [], tmp_path / "run" / "status.json"
    honest, grid.get_nodes = grid.get_nodes, nodes
    with caplog.at_level("INFO", "flwr"), pytest.raises(ValueError, match="grid is gone"):
        driven(user, grid, tmp_path / "run", schedule="rounds(1, clients=2)", nodes=2)
    named, nameless = looks[-1]["fleet"]
    assert (named["name"], nameless["client"], nameless["here"]) == ("n0", -1, True)
    assert nameless["asked"] >= 0
    assert (
        "waiting for 2 nodes before the first step (1 are here), as long as it takes: node 101" in caplog.text
    )
    left = json.loads(status.read_text())
    assert left["state"] == "failed"
    assert "Traceback (most recent call last)" in left["traceback"]
    assert "the grid is gone" in left["traceback"]


def test_an_order_that_died_with_its_node_is_given_again(user, tmp_path):
    def dies(node, order, reply):
        if order.metadata.message_type == "train" and len(grid.orders) == 4 + 1:
            grid.woke[node] = "again"
            return None
        return reply

    grid = in_process(user, tmp_path, 3, dies)
    result = driven(user, grid, tmp_path / "run", schedule="rounds(2, clients=3)", minimum=3)
    records = result.history
    assert [sorted(r["clients"]) for r in records] == [[0, 1, 2]] * 2
    assert ["started again" in t["why"] for t in records[0]["trouble"]] == [True]


class Lost:
    """Mischief: the first answers of a kind, as many as told, never come."""

    def __init__(self, kind, times, node=101):
        self.kind, self.left, self.node = kind, times, node

    def __call__(self, node, order, reply):
        about = order.content["fedbraid"]
        kind = "leave" if "leave" in about else about.get("ask", "train")
        if (node, kind) == (self.node, self.kind) and self.left:
            self.left -= 1
            return None
        return reply


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(server, "SOON", 0.05)


@pytest.mark.quick
def test_who_does_not_say_its_name_is_asked_again(user, tmp_path, impatient):
    read = []
    user = {**user, "apps": counting(user, read)}
    grid = in_process(user, tmp_path, 1, Lost("hello", 3, node=100))
    result = driven(user, grid, tmp_path / "run", schedule="rounds(2, clients=1)", deadline=LONG)
    assert [r["clients"] for r in result.history] == [[0]] * 2
    assert [kind for *_, kind in grid.orders][:4] == ["query"] * 4
    assert read == [0]  # for all that it was asked
    assert "trouble" not in result.history[0]


def counting(user, read):
    """The user's apps, whose nodes note that they read their data."""

    def load(node_config):
        read.append(node_config["share"])
        return user["load"](node_config)

    return fb.deploy.apps(user["model"], "cross_entropy", load, user["test"])


@pytest.mark.quick
@pytest.mark.parametrize("schedule", ["rounds(3, clients=2)", "buffered(steps=4, buffer=1, concurrency=2)"])
def test_an_answer_that_lies_on_its_node_is_brought_forth(schedule, user, tmp_path, impatient):
    """As on Flower's own SuperNode after an order of a run that ended: each answer waits for the next question."""
    lying = []

    def late(node, order, reply):
        if node != 101:
            return reply
        if lying:
            message, answer = lying.pop()
            grid.replies[message] = answer
        lying.append((order.metadata.message_id, reply))
        return None

    grid = in_process(user, tmp_path, 2, late)
    result = driven(user, grid, tmp_path / "run", schedule=schedule, deadline=LONG, minimum=2)
    assert {c for r in result.history for c in r["clients"]} == {0, 1}
    assert not any("trouble" in r for r in result.history)


@pytest.mark.quick
def test_who_is_to_leave_is_asked_for_its_share_again(user, tmp_path, impatient):
    class Leave:
        def step(self, record, run):
            if record["step"] == 1:
                leaving.name(run.folder, "n1")

    grid = in_process(user, tmp_path, 3, Lost("leave", 1))
    said = {"algorithm": "scaffold()", "schedule": "rounds(60, clients=2)", "deadline": LONG, "minimum": 2}
    records = driven(user, grid, tmp_path / "run", (Leave(),), **said).history
    assert [r["left"] for r in records if "left" in r] == [[1]]
    assert not any("unreturned" in r for r in records)  # it came


# Who is who -----------------------------------------------------------------------------------------------


def test_nobody_takes_the_name_of_a_node_that_is_away(flower, fleet, secrets, tmp_path):
    """Nor its number and memory, whatever else it is registered for; and its own key brings it back."""
    with flower.operator as operator:
        operator.register(secrets / "node-3.pub")
    fleet.misbehave(0, "honest", "hold")
    fleet.submit(schedule="rounds(3, clients=2)", nodes=2, minimum=1, deadline=LONG)
    fleet.wait_for(step=1, busy=1)
    flower.end("node-1")
    fleet.wait_for(nodes=1)
    about = {"name": "node-1", "client": 1, "share": 2, "state": str(tmp_path / "impostor")}
    flower.node("impostor", about, secrets / "node-3.key")
    try:
        status = fleet.wait(lambda status: status["trouble"])
        assert "'node-1', which belongs to the key" in status["trouble"][0]["why"]
        assert status["nodes"] == 1
        flower.end("impostor")
        start(flower, 1, secrets)
        fleet.wait_for(nodes=2)
        fleet.let_go(0)
        fleet.wait_for(state="done")
        assert fleet.records[-1]["nodes"] == 2
    finally:
        with flower.operator as operator:
            operator.unregister(secrets / "node-3.pub")


@pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")  # of Flower's migrations
def test_a_busy_superlinks_requests_wait_for_one_another(secrets, tmp_path):
    app = link._superlink(secrets, ("127.0.0.1", free_port()), tmp_path / "link.db")
    (told,) = app.state.linkstate_factory.state().query("PRAGMA busy_timeout")
    assert [*told.values()] == [60_000]


# Who stays ------------------------------------------------------------------------------------------------


def test_nodes_come_in_turns_and_the_server_between_them():
    """However many nodes ask at once; and one on a slow line, going or coming, has no turn meanwhile."""
    inside, most, answered = [], [], []

    async def app(scope, receive, send):
        inside.append(scope["path"])
        most.append(len([path for path in inside if path in gate.NODE]))
        body = (await receive())["body"]
        await asyncio.sleep(0.01)
        inside.remove(scope["path"])
        await send({"type": "http.response.body", "body": body})

    def asked(path, server, slow):
        pieces = [
            {"type": "http.request", "body": b"a", "more_body": True},
            {"type": "http.request", "body": b"b"},
        ]

        async def receive():
            if slow:
                await asyncio.Event().wait()
            return pieces.pop(0)

        async def send(message):
            answered.append((path, message["body"]))

        headers = [(b"host", b"h"), (b"flwr-public-key", b"aa==")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "server": server}
        return asyncio.ensure_future(door(scope, receive, send))

    async def all_of_them():
        slow = [asked("/v1/fleet/push-object", ("0.0.0.0", 1), True) for _ in range(50)]
        await asyncio.sleep(0)
        nodes = [asked("/v1/fleet/pull-messages", ("0.0.0.0", 1), False) for _ in range(50)]
        await asyncio.sleep(0)
        await asked("/v1/runtime/push-object", ("127.0.0.1", 2), False)
        between = len(answered)
        await asyncio.gather(*nodes)
        for one in slow:
            one.cancel()
        return between

    door = gate.Gate(app, ("127.0.0.1", 2), "", lambda key: True)
    assert asyncio.run(all_of_them()) <= 2 * gate.TURNS  # the server's request did not wait for fifty nodes
    assert max(most) == gate.TURNS
    assert answered.count(("/v1/fleet/pull-messages", b"ab")) == 50


def test_a_registered_key_is_looked_up_now_and_then(monkeypatch):
    """And a stranger's every time; one that was removed is a stranger some seconds later."""
    now, looked, registered = [100.0], [], {b"node"}
    monkeypatch.setattr(gate.time, "monotonic", lambda: now[0])
    known = gate.TaskSummary(lambda key: looked.append(key) or key in registered)
    assert [known(b"node"), known(b"node"), known(b"who"), known(b"who")] == [True, True, False, False]
    assert looked == [b"node", b"who", b"who"]
    registered.clear()
    now[0] += gate.TRUST
    assert not known(b"node")
    assert len(known.until) == 1


def test_flowers_layers_are_met_by_the_requests_that_they_look_at():
    """All of them are known; one that another version brings is not left out unseen."""
    from flwr.superlink.main import _get_middleware

    layers = _get_middleware()
    rest = {"BaseHTTPMiddleware", "ProtobufTranslationMiddleware", "RuntimeTracingMiddleware"}
    assert {layer.cls.__name__ for layer in layers} == {*link.ONLY, *rest}
    lighter = link._lighter(layers)
    assert len(lighter) == len(layers) - 1  # nobody traces
    assert sum(layer.cls is link.Only for layer in lighter) == len(link.ONLY)
    met = []

    def layer(app):
        async def around(scope, receive, send):
            met.append(scope.get("path"))
            await app(scope, receive, send)

        return around

    async def app(scope, receive, send):
        pass

    only = link.Only(app, layer, "/v1/fleet/")
    for scope in (
        {"type": "http", "path": "/v1/fleet/pull-messages"},
        {"type": "http", "path": "/v1/runtime/pull-messages"},
        {"type": "lifespan"},
    ):
        asyncio.run(only(scope, None, None))
    assert met == ["/v1/fleet/pull-messages"]


@pytest.mark.quick
def test_a_node_does_all_its_orders_in_one_process_with_its_data_read_once(flower, fleet, user):
    """To the bit what the simulator, which is never interrupted, comes to."""
    read = [loads(flower, i) for i in range(2)]
    fleet.run(algorithm="scaffold()", schedule=f"rounds(5, clients={[[0, 1]] * 5})", nodes=2, minimum=2)
    assert [len(set(fleet.lives(i))) for i in range(2)] == [1, 1]
    assert [len(fleet.lives(i)) for i in range(2)] == [5, 5]
    assert [loads(flower, i) - read[i] for i in range(2)] == [1, 1]
    rounds = fb.rounds(5, clients=[[0, 1]] * 5)
    expected = simulated(user, fb.scaffold(), rounds, clients=2)[1]
    assert all(torch.equal(fleet.model[k], v) for k, v in expected.items())


def test_another_app_and_a_failed_order_get_a_fresh_process(flower, fleet, app, tmp_path):
    def run(name, **config):
        one = Fleet(flower, fleet.app, tmp_path / name)
        one.place.mkdir()
        if config:
            one.misbehave(0, *config["lines"])
        one.run(schedule="rounds(2, clients=[[0, 1], [0, 1]])", nodes=2, minimum=2)
        return one.lives(0)

    (pid, first), (_, second) = run("first")
    fleet.app = tmp_path / "app"
    shutil.copytree(app, fleet.app)
    with (fleet.app / "fleet.py").open("a") as file:
        file.write("# another one\n")
    other = run("other")
    assert first == second
    assert {process for process, _ in other} == {pid}
    assert len({first, *(life for _, life in other)}) == 2
    failed, again, _ = run("failed", lines=["raise"])
    assert failed[1] == other[0][1] != again[1]


def test_a_task_that_its_supernode_gave_up_does_not_block_the_next(monkeypatch):
    """Its content never comes, as when its run ends while it is on the way."""
    over = threading.Event()
    monkeypatch.setattr(run_clientapp, "pull_task_input", lambda link: over.wait(LONG))
    doing = worker.Worker("nowhere", b"")
    monkeypatch.setattr(doing, "_next", lambda main: "newer")
    try:
        assert doing._pulled(None, None) == (None, "newer")
    finally:
        over.set()
    monkeypatch.setattr(run_clientapp, "pull_task_input", lambda link: "input")
    assert doing._pulled(None, None) == ("input", None)


class Connection:
    """A worker's line to its SuperNode, and what it said there."""

    def __init__(self):
        self.said = []

    def close(self):
        pass

    def SendTaskHeartbeat(self, request):
        pass

    def PushTaskOutput(self, request):
        self.said.append((request.sub_status, request.details))


def at_work(monkeypatch, pull, push=None):
    """A worker that gets its order by `pull()` and leaves its answer by `push()`: it, and its line."""
    line, doing = Connection(), worker.Worker("nowhere", b"")
    monkeypatch.setattr(run_clientapp, "pull_task_input", lambda link: pull())
    monkeypatch.setattr(run_clientapp, "push_message", lambda link, reply, context: push())
    monkeypatch.setattr(doing, "_connected", lambda token: contextlib.closing(line))
    monkeypatch.setattr(doing, "_loaded", lambda run, fab: lambda message, context: "reply")
    return doing, line


@pytest.mark.quick
def test_a_worker_outlives_an_answer_that_was_not_taken(monkeypatch, capsys):
    """As when the run has ended, and its SuperNode throws the answer away while it comes."""

    def refused():
        raise ObjectPushError("id", 1, "session")

    doing, line = at_work(monkeypatch, lambda: (None, None, None, None), refused)
    assert doing._do("token", None) is None
    assert "an answer was not taken" in capsys.readouterr().err
    assert [status for status, _ in line.said] == ["failed"]


@pytest.mark.quick
def test_a_task_that_was_overtaken_is_ended(monkeypatch):
    """Or its SuperNode would, a minute later, answer it in place of the order that it has then."""
    over = threading.Event()
    doing, line = at_work(monkeypatch, lambda: over.wait(LONG))
    monkeypatch.setattr(doing, "_next", lambda main: "newer")
    try:
        assert doing._do("token", None) == "newer"
    finally:
        over.set()
    assert [status for status, _ in line.said] == ["failed"]


def loads(flower, i):
    place = flower.scratch / "nodes" / f"loads-{i}"
    return len(place.read_text().splitlines()) if place.exists() else 0


# Who comes back --------------------------------------------------------------------------------------------


def of_node(home, *words):
    """The processes of a node's service that have all these words in their command."""
    mark = f"FEDBRAID_NODE={home}".encode()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found += [process] if all(w in " ".join(process.cmdline()) for w in words) else []
    return found


@contextlib.contextmanager
def service(flower, key, name, state, *more):
    """`fedbraid deploy node`, for as long as this lasts."""
    words = [
        "deploy",
        "node",
        str(key),
        "--superlink",
        f"127.0.0.1:{flower.port}",
        "--name",
        name,
        "--state",
        str(state),
    ]
    words += [w for pair in more for w in ("-c", pair)]
    with open(flower.scratch / f"{name}.log", "ab") as log:
        process = subprocess.Popen([sys.executable, "-m", "fedbraid", *words], stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        assert process.wait(60) in (0, -signal.SIGKILL)


def test_a_node_that_is_killed_comes_back_by_itself(flower, fleet, secrets, tmp_path):
    """Its SuperNode, its worker in mid-task, or the service itself, and all with it."""
    state = tmp_path / "state"
    home = state / ".svc"
    with flower.operator as operator:
        operator.register(secrets / "node-4.pub")
    for name in ("node-0", "node-1"):
        flower.end(name)
    try:
        with service(flower, secrets / "node-4.key", "svc", state, "share=2") as process:
            fleet.misbehave(2, "hold", "hold", "hold")
            fleet.submit(schedule="rounds(4, clients=1)", nodes=1, minimum=1, deadline=LONG)
            for left, victim in ((2, "fedbraid.deploy.supernode"), (1, "fedbraid.deploy.worker")):
                wait_until(
                    lambda left=left: lines_left(fleet) == left
                )  # its app is in the middle of an order
                held = of_node(home, "fedbraid.deploy.worker")
                of_node(home, victim)[0].kill()
                wait_until(lambda held=held: not any(app.is_running() for app in held))  # no orphan
            wait_until(lambda: lines_left(fleet) == 0)  # it has the same order for the third time
            process.kill()  # the service itself
            process.wait()
            wait_until(lambda: of_node(home) == [])
        with service(flower, secrets / "node-4.key", "svc", state, "share=2") as process:
            fleet.wait_for(state="done")
            assert [r["clients"] for r in fleet.records] == [[0]] * 4
        assert of_node(home) == []
    finally:
        with flower.operator as operator:
            operator.unregister(secrets / "node-4.pub")
        for i in range(2):
            start(flower, i, secrets)


def lines_left(fleet):
    return len((fleet.place / "mischief-2").read_text().splitlines())


def wait_until(true):
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.2)


# What is going on --------------------------------------------------------------------------------------------


def findings(folder, nodes, control):
    return {one.what: one for one in doctor.examine(folder, f"127.0.0.1:{nodes}", f"127.0.0.1:{control}")}


def test_status_and_doctor_say_what_is_going_on(flower, fleet, secrets, tmp_path):
    fleet.misbehave(0, "hold")
    fleet.submit(schedule="rounds(1, clients=2)", nodes=2, minimum=2, seed=1)
    fleet.wait_for(busy=1)
    told = doctor.status(secrets, f"127.0.0.1:{flower.control}")
    assert sum(n["status"] == "online" for n in told["nodes"]) == 2
    inside = told["folder"]
    assert inside["wait"]["for"] == "uploads of round 1"
    assert inside["wait"]["until"] > time.time()
    assert [one["name"] for one in inside["fleet"] if one["asked"] is not None] == ["node-0"]
    assert any("waiting for uploads of round 1" in line for line in told["log"])
    fleet.let_go(0)
    fleet.wait_for(state="done")

    found = findings(secrets, flower.port, flower.control)
    assert {what for what, one in found.items() if not one.good} == {
        f"node-{i}.key" for i in (2, 3, 4)
    }  # not registered
    assert "node-2.pub" in found["node-2.key"].todo
    for what in ("keys", "ca.crt", "server.crt", "clocks", "versions there", "nodes", "who may do what"):
        assert found[what].good

    alone = tmp_path / "local_only"  # what a node has
    alone.mkdir()
    for name in ("ca.crt", "node-1.key", "trusted.yaml"):
        shutil.copy(secrets / name, alone / name)
    assert all(one.good for one in findings(alone, flower.port, flower.control).values())
    (alone / "node-1.key").chmod(0o644)
    assert "chmod 600" in findings(alone, flower.port, flower.control)["keys"].todo

    other = tmp_path / "other"
    keys.make(other, ["127.0.0.1"], 0)
    assert (
        "ca.crt is not the one" in findings(other, flower.port, flower.control)["SuperLink, for nodes"].todo
    )
    nobody = findings(secrets, free_port(), free_port())
    assert not nobody["SuperLink, for nodes"].good
    assert not nobody["SuperLink, for the operator"].good


@contextlib.contextmanager
def listening(secrets, body):
    """Something that has the server's own certificate, and answers everything with this."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(secrets / "server.crt", secrets / "server.key")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        served.socket = context.wrap_socket(served.socket, server_side=True)
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            yield served.server_port
        finally:
            served.shutdown()
            thread.join()


@pytest.mark.quick
@pytest.mark.parametrize("body", [b"<html></html>", b"[1, 2]", b"{}", b"\xff" * 100])
def test_what_is_no_superlink_is_said_to_be_none(body, secrets):
    with listening(secrets, body) as port, Operator(secrets, f"127.0.0.1:{port}") as operator:
        found = findings(secrets, port, port)
        assert not all(one.good for one in found.values())
        if body != b"{}":
            assert "is no SuperLink" in found["SuperLink, for the operator"].found
        with pytest.raises(EngineError, match="is no SuperLink"):
            operator.nodes()
        with pytest.raises(EngineError, match="is no SuperLink"):
            doctor.status(secrets, f"127.0.0.1:{port}")


@pytest.mark.quick
@pytest.mark.parametrize("token", [b"\xff\xfe", "é".encode(), b"a\nb", b"a\0"])
def test_a_damaged_token_says_what_to_do(token, secrets, tmp_path):
    shutil.copytree(secrets, tmp_path / "keys")
    (tmp_path / "keys" / "operator.token").write_bytes(token)
    for look in (doctor.status, partial(check.look, nodes="127.0.0.1:1")):
        with pytest.raises(ConfigError, match=r"operator.token is damaged .* copy it again"):
            look(tmp_path / "keys", control="127.0.0.1:1")


def test_doctor_shows_the_server_apps_own_error(flower, fleet, secrets):
    for process in psutil.Process(flower.processes["superlink"].pid).children():
        if "flower-superexec" in " ".join(process.cmdline()):
            process.kill()  # it is started again, or no run would ever start
    with flower.operator as operator:
        run = operator.start(fleet.app, {"algorithm": "fedavgg()", "out": str(fleet.folder.path)})
        wait_until(lambda: next(r for r in operator.runs() if r["run"] == run)["status"] == "finished")
    found = findings(secrets, flower.port, flower.control)[f"run {run}"]
    assert not found.good
    assert "unknown algorithm 'fedavgg'" in found.found
    assert "Traceback" in found.todo
    assert "fedavgg" in doctor.status(secrets, f"127.0.0.1:{flower.control}")["traceback"]


def test_units_are_what_systemd_takes(secrets, tmp_path):
    key, config = str(secrets / "node-0.key"), "path=/data/100% of 'it' $HOME"
    for words in (["link", str(secrets)], ["node", key, "--superlink", "fl.example.org:8000", "-c", config]):
        unit = tmp_path / f"fedbraid-{words[0]}.service"
        done = subprocess.run(
            [sys.executable, "-m", "fedbraid", "deploy", *words, "--unit", str(unit)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert f"-m fedbraid deploy {words[0]}" in unit.read_text()
        if (tool := shutil.which("systemd-analyze")) is not None:
            said = subprocess.run([tool, "verify", str(unit)], capture_output=True, text=True)
            assert (said.returncode, said.stderr) == (0, ""), said
    assert "\"path=/data/100%% of 'it' $$HOME\"" in unit.read_text()


def test_recipes_pass_their_linters():
    recipes = Path(__file__).parent.parent / "docs" / "recipes"
    shellcheck = Path(sys.executable).with_name("shellcheck")
    for words in (
        [shellcheck, *recipes.glob("*.sbatch")],
        [Path(sys.executable).with_name("kubernetes-validate"), "--strict", recipes / "kubernetes.yaml"],
    ):
        said = subprocess.run(words, capture_output=True, text=True)
        assert said.returncode == 0, said


def test_a_damaged_memory_says_what_to_do(tmp_path):
    memory = Memory(3, {}, {"job": {"h": torch.ones(1, 4)}})
    memory.write(tmp_path, keep_down=False)
    file = tmp_path / "memory.safetensors"
    whole = file.read_bytes()
    for cut in range(0, len(whole), 7):
        file.write_bytes(whole[:cut])
        with pytest.raises(RunError, match="is damaged"):
            Memory.read(tmp_path)
    for at in range(0, 8 * len(whole), 11):
        flipped = bytearray(whole)
        flipped[at // 8] ^= 1 << at % 8
        file.write_bytes(flipped)
        with pytest.raises(RunError, match="is damaged"):
            Memory.read(tmp_path)
    file.write_bytes(whole)
    assert Memory.read(tmp_path).after["job"]["h"].tolist() == [[1.0] * 4]


@pytest.mark.quick
def test_a_memory_outlives_a_power_cut(tmp_path, monkeypatch):
    """The server may count on it as soon as the upload is made: file and folder are on the disk before."""
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    Memory(3, {}, {"job": {"h": torch.ones(1, 4)}}).write(tmp_path / "a" / "b", keep_down=False)
    assert Path(synced[-1]) == tmp_path / "a" / "b"
    assert {str(tmp_path), str(tmp_path / "a")} < set(synced)
    assert any("memory.safetensors" in name for name in synced)
    assert (tmp_path / "a" / "b" / "memory.safetensors").stat().st_mode & 0o077 == 0


@pytest.mark.quick
def test_a_node_that_lost_its_memory_says_so(user, tmp_path):
    def mischief(node, order, reply):
        if node == 101 and [to for _, to, kind in grid.orders if kind == "train"].count(101) == 1:
            shutil.rmtree(tmp_path / "nodes" / "n1")
        return reply

    grid = in_process(user, tmp_path, 3, mischief)
    population_weight = f"rounds(3, clients={[[0, 1, 2]] * 3})"
    result = driven(user, grid, tmp_path / "run", algorithm="scaffold()", schedule=population_weight)
    told = [[(t["client"], t["why"]) for t in r.get("trouble", [])] for r in result.history]
    assert told == [[], [(1, FORGOT)], []]


@pytest.mark.parametrize("left", ["", "-1", "x", "9" * 30, "\0\0\0"])
def test_a_node_whose_note_was_cut_comes_back(left, secrets, tmp_path, monkeypatch):
    """Its last number is written down to sign off by; a power cut may leave anything there."""
    asked = []

    def answer(request):
        asked.append(request.url.path)
        return httpx.Response(200, content=ActivateNodeResponse(node_id=7).SerializeToString())

    client = httpx.Client
    monkeypatch.setattr(
        httpx, "Client", lambda **_: client(transport=httpx.MockTransport(answer), base_url="https://h")
    )
    service = Service(secrets / "node-0.key", "h:1", {"name": "a", "state": str(tmp_path)})
    service.home.mkdir()
    (service.home / "node-id").write_text(left)
    assert service._knock() is None
    assert asked == ["/v1/fleet/activate-node", "/v1/fleet/deactivate-node"]
    assert service._knock() is None
    assert asked[2] == "/v1/fleet/deactivate-node"


@pytest.mark.parametrize("name", [".", "", "a\nb", "\x1b[2J", "x" * 201])
def test_a_name_is_what_can_be_shown(name, secrets, tmp_path):
    with pytest.raises(ConfigError, match="is no name for a node"):
        Service(secrets / "node-0.key", "h:1", {"name": name, "state": str(tmp_path)})


def test_a_deployment_goes_into_a_folder(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match="cannot hold a deployment"):
            init(place)
