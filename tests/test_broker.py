"""What can an attacker with a registered key do at a real broker, and what is lost when processes are killed?"""

import hashlib
import os
import signal
import socket
import threading
import time

import pytest
from brokers import LIMIT, echo, site, until
from raw_nats import RawClient

from fedbraid.deploy import credentials
from fedbraid.deploy.broker import PAYLOAD_LIMIT, Broker
from fedbraid.deploy.nats_connection import CHUNK_BYTES
from fedbraid.deploy.node_nats import NatsNode
from fedbraid.deploy.transport import ModelReference, new_job
from fedbraid.errors import EngineError, FedbraidError, WireError

pytestmark = pytest.mark.engines
NODES = 8
FETCH = "$JS.API.DIRECT.GET.MODEL"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with site(tmp_path_factory.mktemp("site"), NODES, answer_bytes=4 * CHUNK_BYTES) as made:
        yield made


@pytest.fixture
def fleet(shared):
    yield shared
    shared.drain()


def chunk(job, body, part="0/1", size=None, **more):
    """The headers of a chunk, honest but for what is given."""
    about = {"Fb-Job": job, "Fb-Part": part, "Fb-Size": str(len(body) if size is None else size)}
    about |= {"Fb-Digest": hashlib.sha256(body).hexdigest(), "Nats-Msg-Id": f"{job}.{part}"}
    return {**about, **more}


def works(fleet, name):
    """A node that is honest gets an order and is heard, whatever else goes on."""
    node = fleet.node(name)
    echo(node)
    order = fleet.order(name, body=os.urandom(20))
    until(lambda: fleet.server.send([order]) == [], "sending")
    (answer,) = fleet.answers(1)
    assert (answer.node.name, answer.job, answer.read()) == (name, order.job, order.body)
    fleet.server.acknowledge([answer])
    return node


# As it should be --------------------------------------------------------------------------------------


@pytest.mark.quick
def test_orders_models_and_answers_of_several_chunks_cross(fleet):
    message = os.urandom(2 * CHUNK_BYTES + 17)
    model = fleet.server.publish_model("v1", message)
    assert fleet.server.publish_model("v1", message) == model
    for name in ("node-0", "node-1"):
        echo(fleet.node(name))
    orders = [fleet.order(f"node-{i}", body=b"%d" % i, model=model) for i in range(3)]
    assert fleet.server.send(orders) == ["node-2"]
    answers = sorted(fleet.answers(2), key=lambda a: a.node.name)
    assert [(a.node, a.job) for a in answers] == [
        (fleet.server.connected()[o.node], o.job) for o in orders[:2]
    ]
    assert [a.read() for a in answers] == [message + b"0", message + b"1"]
    assert answers[0].size == len(message) + 1
    assert fleet.stored() == {"fb.r.node-0": 3, "fb.r.node-1": 3}
    fleet.server.acknowledge(answers)
    until(lambda: fleet.stored() == {}, "removal")
    fleet.server.retain_models([])
    assert fleet.stored("MODEL") == {}


def test_a_server_that_starts_again_receives_what_it_did_not_acknowledge(fleet):
    node = fleet.node("node-0")
    jobs = [fleet.order("node-0") for _ in range(3)]
    for order in jobs:
        node.answer(order, order.job.encode())
    first = fleet.answers(3)
    fleet.server.acknowledge(first[:1])
    until(lambda: fleet.stored() == {"fb.r.node-0": 2}, "removal")
    fleet.server.close()
    fleet.server = fleet.new_server()
    assert "node-0" in fleet.server.connected()
    assert {a.job for a in fleet.answers(2)} == {a.job for a in first[1:]}


def test_a_session_is_another_after_a_reconnection(fleet):
    fleet.node("node-0")
    session = fleet.server.connected()["node-0"].session
    fleet.nodes.pop().close()
    until(lambda: not fleet.server.connected(), "disconnecting")
    fleet.node("node-0")
    assert fleet.server.connected()["node-0"].session != session


def test_an_empty_answer_is_an_answer(fleet):
    fleet.node("node-0").answer(fleet.order("node-0"), b"")
    assert fleet.answers(1)[0].read() == b""


def test_a_model_that_is_gone_or_another_one_is_said_to_be(fleet):
    node = fleet.node("node-0")
    deadline = time.time() + 0.3
    with pytest.raises(WireError, match="not stored"):
        node.model(fleet.order("node-0", model=ModelReference.of("never", b"x"), deadline=deadline))
    wrong = fleet.server.publish_model("v1", b"model")
    altered = ModelReference(wrong.name, wrong.digest[:16] + "0" * 48, wrong.size)
    with pytest.raises(WireError, match="not the one that the operator signed"):
        node.model(fleet.order("node-0", model=altered))


# Who may connect --------------------------------------------------------------------------------------


@pytest.mark.quick
def test_no_key_an_unknown_key_a_token_and_a_replayed_login_are_refused(fleet, tmp_path):
    port, ca = fleet.broker.port, fleet.keys / "ca.crt"
    credentials.make(tmp_path / "others", ["127.0.0.1"], 1)
    stranger = credentials.read_key(tmp_path / "others" / "node-0.nk").seed
    honest = fleet.attacker("node-0")
    attempts = [
        RawClient(port, ca),
        RawClient(port, ca, stranger),
        RawClient(port, ca, auth_token="fedbraid"),
        RawClient(port, ca, user="server", **{"pass": ""}),
        RawClient(port, ca, **honest.login),  # the signature of another connection's nonce
        RawClient(port, ca, **honest.login | {"sig": ""}),  # a public key, which is no secret
    ]
    for client in attempts:
        assert client.closed
        assert "Authorization Violation" in "".join(client.errors)
    assert not honest.closed
    until(lambda: len(list(fleet.server.refusals())) > 0, "being named")
    works(fleet, "node-1")


def test_a_broker_with_another_certificate_gets_no_key(fleet, tmp_path):
    credentials.make(tmp_path / "others", ["127.0.0.1"], 0)
    folder = tmp_path / "others"
    (folder / "node-0.nk").write_bytes((fleet.keys / "node-0.nk").read_bytes())
    (folder / "node-0.nk").chmod(0o600)
    with pytest.raises(EngineError, match="check that it"):
        NatsNode(fleet.url, folder / "node-0.nk")


@pytest.mark.quick
def test_a_revoked_node_is_cut_off_at_once_with_what_it_sent(fleet):
    credentials.add_nodes(fleet.keys, ["short-lived"])
    fleet.broker.reload()
    node, other = fleet.node("short-lived"), fleet.node("node-0")
    node.answer(fleet.order("short-lived"), b"before")
    until(lambda: fleet.stored() == {"fb.r.short-lived": 1}, "storing")
    credentials.revoke(fleet.keys, "short-lived")
    fleet.broker.reload()
    until(lambda: list(fleet.server.connected()) == ["node-0"], "cutting off")
    assert other.link.connected
    assert fleet.server.receive(10, 0.2) == []
    until(lambda: fleet.stored() == {}, "removal")
    with pytest.raises(EngineError):
        node.answer(fleet.order("short-lived", deadline=time.time() + 0.5), b"after")


# What a key permits -----------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_node_cannot_listen_to_others(fleet):
    client, victim = fleet.attacker("node-0"), fleet.node("node-1")
    forbidden = ["fb.o.node-1", "fb.o.*", "fb.>", ">", "_INBOX.>", "_INBOX.node-1.>", "_INBOX.server.>", "$SYS.>", "fb.r.node-0", "fb.m.>", "$JS.>"]  # fmt: skip
    for i, subject in enumerate(forbidden):
        client.subscribe(subject, i + 1)
    client.flush()
    assert len([e for e in client.errors if "Permissions Violation for Subscription" in e]) == len(forbidden)
    order = fleet.order("node-1", body=b"secret")
    assert fleet.server.send([order]) == []
    assert next(victim.orders()).body == b"secret"
    victim.answer(order, b"answer")
    fleet.answers(1)
    client.flush()
    assert client.messages == []
    named = {r.sender for r in fleet.server.refusals() if "Subscription Violation" in r.reason}
    assert named == {"node-0"}


@pytest.mark.quick
def test_a_node_cannot_write_as_another_or_as_the_server(fleet):
    client, victim = fleet.attacker("node-0"), fleet.node("node-1")
    model = fleet.server.publish_model("v1", b"model")
    victim.answer(fleet.order("node-1"), b"waits for the commit")
    (answer,) = fleet.answers(1)
    acknowledgement = next(iter(answer.handle.chunks.values())).reply
    forbidden = [
        "fb.r.node-1",
        "fb.o.node-1",
        f"fb.m.v1.{model.digest[:16]}.0",
        "_INBOX.node-1.x",
        acknowledgement,
    ]
    forbidden += [
        "$JS.API.STREAM.PURGE.UP",
        "$JS.API.STREAM.DELETE.UP",
        "$JS.API.STREAM.INFO.UP",
        "$JS.API.DIRECT.GET.UP",
    ]
    forbidden += [
        "$JS.API.CONSUMER.MSG.NEXT.UP.server",
        "$JS.API.CONSUMER.DELETE.UP.server",
        "$SYS.REQ.SERVER.PING.CONNZ",
    ]
    for subject in forbidden:
        client.publish(subject, b"+ACK")
    client.flush()
    assert len([e for e in client.errors if "Permissions Violation for Publish" in e]) == len(forbidden)
    assert fleet.stored() == {"fb.r.node-1": 1}
    assert victim.model(fleet.order("node-1", model=model)) == b"model"
    assert list(victim.dropped) == []
    assert {r.sender for r in fleet.server.refusals() if "Publish Violation" in r.reason} == {"node-0"}


@pytest.mark.quick
def test_replies_that_the_broker_writes_for_a_node_reach_no_stream_and_are_dropped_by_nodes(fleet):
    """Permissions do not stop this: the broker writes, not the sender."""
    client, victim = fleet.attacker("node-0"), fleet.node("node-1")
    model = fleet.server.publish_model("v1", b"m" * 1000)
    subject = f"fb.m.v1.{model.digest[:16]}.0"
    waiting = dict(fleet.server.uploads)
    targets = [
        "fb.o.node-1",
        subject,
        "fb.m.junk.0",
        "fb.r.node-1",
        "_INBOX.server.chunks",
        "_INBOX.server.order.node-1",
    ]
    for target in targets:
        client.publish(f"{FETCH}.{subject}", b"", reply=target)
        client.publish("fb.r.node-0", b"x", reply=target, headers={"Nats-Msg-Id": target})
    client.flush()
    until(lambda: len(victim.dropped) == 2, "the attack")
    assert set(victim.dropped) == {"dropped a message that is not an order"}
    assert list(fleet.stored("MODEL")) == [subject]
    assert victim.model(fleet.order("node-1", model=model)) == b"m" * 1000
    until(lambda: fleet.stored() == {}, "removal of what is not an upload")
    assert fleet.server.uploads == waiting
    assert {r.sender for r in fleet.server.refusals()} == {"node-0"}
    order = fleet.order("node-1", body=b"real")
    assert fleet.server.send([order]) == []
    assert next(victim.orders()).body == b"real"


@pytest.mark.quick
def test_a_hostile_broker_cannot_give_orders(fleet):
    """What has the broker's powers may write to every subject; an order that was given it may only repeat."""
    node = fleet.node("node-0")
    order, foreign = fleet.order("node-0"), fleet.order("node-1")
    altered = order.to_bytes().replace(b"TRAIN", b"LEAVE")
    for message in (order.to_bytes(), order.to_bytes(), foreign.to_bytes(), altered, b"", b"\xff" * 1000):
        fleet.server.link.call(fleet.server.link.client.publish("fb.o.node-0", message), LIMIT)
    until(
        lambda: len(node.dropped) >= 5,
        lambda: f"dropping: {node.dropped}, {node.inbox.qsize()}, {node.link.connected}",
    )
    assert [str(d).split()[-1] for d in node.dropped] == ["before", "node-1", "sign", "order", "order"]
    assert next(node.orders()) == order
    assert node.inbox.empty()


# Uploads of all kinds ---------------------------------------------------------------------------------


@pytest.mark.quick
def test_malformed_chunks_are_refused_named_and_removed(fleet):
    client, job, body = fleet.attacker("node-0"), new_job(), b"x" * 100
    bad = [
        {}, {"Fb-Job": job}, chunk(job, body, part="1/1"), chunk(job, body, part="0/0"), chunk(job, body, part="-1/1"),
        chunk(job, body, part="0/100000000"), chunk(job, body, part="0/2"), chunk(job, body, size=10**15),
        chunk(job, body, size=-1), chunk(job, body, size=99), chunk(job, body, part="a/b"), chunk("fb.o.>", body),
        chunk(job, body, **{"Fb-Digest": "0"}), chunk("j" * 500, body), chunk(job, body, part="0/1/1"),
        chunk(job, body, size="9" * 5000),
    ]  # fmt: skip
    for i, headers in enumerate(bad):
        client.publish("fb.r.node-0", body, headers=headers | {"Nats-Msg-Id": f"{job}.{i}"})
        client.flush()
        until(lambda: fleet.stored() == {}, "removal")
    assert fleet.server.receive(10, 0) == []
    told = fleet.server.refusals()
    assert {r.sender for r in told} == {"node-0"}
    assert len(told) == len(bad)
    assert all(len(r.reason) < 400 for r in told)
    assert fleet.server.uploads == {}
    client.close()
    works(fleet, "node-0")


@pytest.mark.quick
def test_an_answer_whose_bytes_are_others_than_announced_is_refused_when_it_is_read(fleet):
    client = fleet.attacker("node-0")
    client.publish("fb.r.node-0", b"other", headers=chunk(new_job(), b"given"))
    (answer,) = fleet.answers(1)
    with pytest.raises(WireError, match="announced"):
        answer.read()
    fleet.server.acknowledge([answer])
    until(lambda: fleet.stored() == {}, "removal")


@pytest.mark.quick
def test_an_upload_that_is_repeated_is_one(fleet):
    client, job, body = fleet.attacker("node-0"), new_job(), b"again"
    for i in (0, 0, 1, 2):  # the same id, and then others
        client.publish("fb.r.node-0", body, headers=chunk(job, body, **{"Nats-Msg-Id": f"{job}.{i}"}))
    client.flush()
    (answer,) = fleet.answers(1)
    assert fleet.server.receive(10, 0.3) == []
    assert answer.read() == body
    fleet.server.acknowledge([answer])
    until(lambda: fleet.stored() == {}, "removal")


def test_a_giant_message_ends_its_connection_only(fleet):
    other = fleet.node("node-1")
    for data in (
        f"PUB fb.r.node-0 {PAYLOAD_LIMIT + 1}\r\n".encode() + bytes(PAYLOAD_LIMIT + 1),
        b"PUB fb.r.node-0 99999999999\r\n",
        b"PUB fb.r.node-0 -5\r\n",
        b"PUB " + b"x" * 100_000 + b" 5\r\nhello\r\n",
        b"HPUB fb.r.node-0 99999 10\r\n" + bytes(12),
        b"\x16\x03\x01\x00" * 1000,
    ):
        client = fleet.attacker("node-0")
        client.send(data)
        client.flush()
        assert client.closed, data[:40]
    assert other.link.connected
    assert fleet.stored() == {}
    works(fleet, "node-2")


def test_a_slow_upload_and_one_that_never_ends_hold_nobody_up(fleet):
    client, slow, body = fleet.attacker("node-0"), fleet.attacker("node-1"), bytes(CHUNK_BYTES)
    slow.send(b"PUB fb.r.node-1 500000\r\n")
    for _ in range(12):  # more than its quota of 8 chunks
        client.publish("fb.r.node-0", body, headers=chunk(new_job(), body, part="0/2", size=2 * CHUNK_BYTES))
        client.flush()
        slow.send(b"x")
        until(lambda: fleet.stored().get("fb.r.node-0", 0) <= 2, "removal of what its node gave up")
    assert fleet.server.receive(10, 0) == []
    works(fleet, "node-2")
    node, order = fleet.node("node-0"), fleet.order("node-0")
    node.answer(order, 4 * body)
    assert len(fleet.answers(1)[0].read()) == 4 * CHUNK_BYTES


@pytest.mark.quick
def test_a_flood_fills_the_quota_of_its_node_and_no_other(fleet):
    client = fleet.attacker("node-0")
    job, body = new_job(), bytes(CHUNK_BYTES)
    for i in range(60):
        headers = chunk(job, body, part="1/4", size=4 * CHUNK_BYTES, **{"Nats-Msg-Id": f"{job}.{i}"})
        client.publish("fb.r.node-0", body, headers=headers)
    client.flush(LIMIT)
    works(fleet, "node-1")
    assert fleet.stored().get("fb.r.node-0", 0) <= 8  # twice the chunks of the largest answer
    assert sum(len(u.chunks) for u in fleet.server.uploads.values()) <= 8


def test_orders_that_nobody_reads_do_not_stop_the_others(fleet):
    ignore_sigint = fleet.attacker("node-0")
    ignore_sigint.subscribe("fb.o.node-0")
    ignore_sigint.flush()
    orders = [
        fleet.order("node-0", body=bytes(200_000)) for _ in range(200)
    ]  # 40 MB, of which it reads nothing
    fleet.server.send(orders)  # until the broker's limit for one write, 10 s
    works(fleet, "node-1")
    assert fleet.server.link.connected
    until(
        lambda: (
            ("node-0", "disconnected: Slow") in [(r.sender, r.reason[:18]) for r in fleet.server.refusals()]
        ),
        "being named",
    )


def test_more_idle_connections_than_there_are_places_leave_the_connected_ones_alone(fleet):
    node = fleet.node("node-0")
    echo(node)
    session = fleet.server.connected()["node-0"].session
    idle = []
    for _ in range(1100):
        link = socket.socket()
        link.settimeout(5)
        idle.append(link)
        link.connect(("127.0.0.1", fleet.broker.port))
    try:
        for _ in range(20):
            order = fleet.order("node-0", body=b"during")
            assert fleet.server.send([order]) == []
            fleet.server.acknowledge(fleet.answers(1))
        assert fleet.server.connected()["node-0"].session == session
        until(
            lambda: _can_connect(fleet), "a login beside 1,100 silent connections"
        )  # after their handshake's limit
    finally:
        for link in idle:
            link.close()
    works(fleet, "node-1")


def _can_connect(fleet):
    try:
        NatsNode(fleet.url, fleet.keys / "node-2.nk").close()
    except EngineError:
        return False
    return True


# Killed -----------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_broker_that_is_killed_in_mid_stream_loses_nothing_and_doubles_nothing(tmp_path):
    kills = 3
    with site(tmp_path, 4, answer_bytes=4 * CHUNK_BYTES) as fleet:
        stored, got, stop = [], [], threading.Event()

        def upload(node):
            while not stop.is_set():
                order = fleet.order(node.name, deadline=time.time() + LIMIT)
                node.answer(order, order.job.encode() * (17_000 if len(stored) % 3 == 0 else 1))
                stored.append(order.job)

        threads = [threading.Thread(target=upload, args=(fleet.node(f"node-{i}"),)) for i in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(kills):
            before = len(stored)
            until(lambda before=before: collect(fleet, got) or len(stored) > before + 20, "uploads")
            pid = fleet.broker._running()
            print("kill", time.time(), len(stored))
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: fleet.broker._running() not in (None, pid), "the broker's return")
        until(lambda: len(fleet.server.connected()) == 4, "the nodes' return")
        stop.set()
        until(lambda: collect(fleet, got) or not any(t.is_alive() for t in threads), "the end")
        until(lambda: collect(fleet, got) or fleet.stored() == {}, "all uploads")
        assert sorted(set(got)) == sorted(stored)
        assert len(got) == len(set(got))


def collect(fleet, got):
    """Receive, check and acknowledge what is there. A repeat after an acknowledgement that was lost is not a second upload."""
    for answer in fleet.server.receive(50, 0.05):
        body = answer.read()
        assert body in (answer.job.encode(), answer.job.encode() * 17_000)
        if answer.job not in got:
            got.append(answer.job)
        fleet.server.acknowledge([answer])


def test_while_the_broker_is_away_nothing_raises_and_nothing_waits_for_ever(tmp_path):
    with site(tmp_path, 2) as fleet:
        node = fleet.node("node-0")
        fleet.broker.stop()
        until(lambda: not fleet.server.link.connected and not node.link.connected, "noticing")
        order = fleet.order("node-0", deadline=time.time() + 0.5)
        assert fleet.server.connected() == {}
        assert fleet.server.send([order]) == ["node-0"]
        assert fleet.server.receive(1, 0.1) == []
        fleet.server.retain_models([])
        with pytest.raises(EngineError, match="in time"):
            node.answer(order, b"x")
        fleet.broker.start()
        until(lambda: "node-0" in fleet.server.connected(), "the node's return")
        works(fleet, "node-1")


def test_a_broker_outlives_its_supervisor_and_is_adopted(tmp_path):
    with site(tmp_path, 1) as fleet:
        pid = fleet.broker._running()
        fleet.broker.stopping.set()  # as if its process had ended
        second = Broker(fleet.keys, fleet.broker.state, port=fleet.broker.port)
        second.start()
        assert second._running() == pid
        works(fleet, "node-0")
        second.stop()
        until(lambda: fleet.broker._running() is None, "an end of the process, which its parent sees last")


def test_a_broker_that_cannot_start_says_why(tmp_path, monkeypatch):
    with site(tmp_path, 1) as fleet:
        taken = Broker(fleet.keys, tmp_path / "second", port=fleet.broker.port)
        with pytest.raises(FedbraidError, match="cannot listen on"):
            taken.start()
        (fleet.keys / "server.key").chmod(0o644)
        with pytest.raises(FedbraidError, match="chmod 600"):
            fleet.broker.reload()
    monkeypatch.setattr("fedbraid.deploy.broker.shutil.which", lambda *_, **__: None)
    with pytest.raises(EngineError, match="apt-get install nats-server"):
        Broker(fleet.keys, tmp_path / "third")
