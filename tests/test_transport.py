"""Are orders accepted only as the operator signed them, and are answers delivered until they are acknowledged?"""

import json
import threading
import time
from pathlib import Path

import fleet_vectors
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedbraid import FedbraidError
from fedbraid.deploy import credentials, transport
from fedbraid.deploy.transport import (
    KINDS,
    MAGIC,
    SIGNATURE_BYTES,
    ModelReference,
    OrderSigner,
    OrderVerifier,
    new_job,
)
from fedbraid.deploy.transport_memory import MemoryBroker, MemoryNode, MemoryTransport
from fedbraid.errors import ConfigError, DataError, EngineError, WireError

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
NOW = 1_800_000_000.0


def signed(node="node-0", kind="TRAIN", body=b"{}", deadline=NOW + 60, model=None, job="j", key=KEY):
    return OrderSigner(key).sign(node, kind, run="r", job=job, deadline=deadline, body=body, model=model)


def verifier(now=NOW, node="node-0"):
    return OrderVerifier(KEY.public_key(), node, now=lambda: now)


@pytest.mark.parametrize("kind", KINDS)
def test_an_order_arrives_as_it_was_given(kind):
    order = signed(kind=kind, body=b"\x00\xffbody", model=ModelReference.of("v1", b"model"))
    assert verifier().read(order.to_bytes()) == order


def broken():
    order = signed()
    message, start = order.to_bytes(), len(MAGIC)
    yield "empty", b"", "not an order"
    yield "another protocol", b'{"stream":"UP","seq":7}', "not an order"
    yield "too large", message + bytes(transport.ORDER_LIMIT), "not an order"
    yield "cut in its head", message[:120], "not an order"
    yield (
        "a head of 4 GB",
        message[: start + 64] + b"\xff\xff\xff\xff" + message[start + 68 :],
        "not an order",
    )
    yield "no signature", message[:start] + bytes(SIGNATURE_BYTES) + message[start + 64 :], "did not sign"
    yield "another's signature", signed(key=Ed25519PrivateKey.generate()).to_bytes(), "did not sign"
    yield "a later deadline", message.replace(b'"deadline":18', b'"deadline":19'), "did not sign"
    yield "another kind", message.replace(b"TRAIN", b"LEAVE"), "did not sign"
    yield "another body", message[:-2] + b"[]", "not the one that was signed"
    yield "a longer body", message + b" ", "not the one that was signed"
    yield "for another node", signed(node="node-1").to_bytes(), "for node-1"
    yield "stale", signed(deadline=NOW - 3600).to_bytes(), "deadline passed"


@pytest.mark.parametrize(("message", "reason"), [pytest.param(m, r, id=i) for i, m, r in broken()])
def test_nothing_else_is_accepted(message, reason):
    with pytest.raises(WireError, match=reason):
        verifier().read(message)


def test_the_signature_is_checked_before_anything_is_parsed(monkeypatch):
    def never(*_):
        raise AssertionError("parsed")

    message = signed(key=Ed25519PrivateKey.generate()).to_bytes()
    monkeypatch.setattr(transport.json, "loads", never)
    with pytest.raises(WireError, match="did not sign"):
        verifier().read(message)


def test_a_replay_is_dropped_and_an_order_given_again_is_not():
    check, signer = verifier(), OrderSigner(KEY)
    first, again = (signer.sign("node-0", "TRAIN", run="r", job="j", deadline=NOW + 60) for _ in range(2))
    assert check.read(first.to_bytes()).job == check.read(again.to_bytes()).job
    for order in (first, again):
        with pytest.raises(WireError, match="delivered before"):
            check.read(order.to_bytes())


def test_serial_numbers_are_forgotten_once_their_deadline_guards():
    now = [NOW]
    check = OrderVerifier(KEY.public_key(), "node-0", now=lambda: now[0])
    signer = OrderSigner(KEY)
    old = signer.sign("node-0", "PING", run="r", job="a", deadline=NOW + 1).to_bytes()
    check.read(old)
    now[0] += 3600
    check.read(signer.sign("node-0", "PING", run="r", job="b", deadline=NOW + 3601).to_bytes())
    assert len(check.accepted) == 1
    with pytest.raises(WireError, match="deadline passed"):
        check.read(old)


def test_a_signed_order_of_another_version_is_refused_in_a_sentence():
    for about in ({"kind": "DANCE"}, [], {"deadline": "soon"}, None):
        head = json.loads(signed().head)
        text = head | about if isinstance(about, dict) else about
        head = json.dumps(text, sort_keys=True, separators=(",", ":")).encode()
        message = MAGIC + KEY.sign(MAGIC + head) + len(head).to_bytes(4, "big") + head + b"{}"
        with pytest.raises(WireError, match="cannot be read"):
            verifier().read(message)


def test_what_is_too_large_for_an_order_is_refused_when_it_is_signed():
    with pytest.raises(ConfigError, match="publish what is larger as a model"):
        signed(body=bytes(transport.ORDER_LIMIT))


def test_jobs_cannot_be_guessed():
    names = {new_job() for _ in range(100)}
    assert len(names) == 100
    assert all(len(name) == 32 for name in names)


# In one process ---------------------------------------------------------------------------------------


def memory():
    broker = MemoryBroker(KEY.public_key())
    return broker, MemoryTransport(broker), MemoryNode(broker, "node-0")


def order_for(node="node-0", model=None):
    return signed(node, deadline=time.time() + 60, job=new_job(), model=model)


def test_answers_are_delivered_until_they_are_acknowledged():
    broker, server, node = memory()
    order = order_for(model=server.publish_model("v1", b"model"))
    assert server.send([order]) == []
    given = next(node.orders())
    node.answer(given, node.model(given) + b" trained")
    node.answer(given, node.model(given) + b" trained")  # a retry
    (answer,) = server.receive(10, 1)
    assert (answer.read(), answer.job, answer.node) == (b"model trained", order.job, node.identity)
    assert server.receive(10, 0) == []
    again = MemoryTransport(broker)  # the server was killed before its commit
    (answer,) = again.receive(10, 1)
    again.acknowledge([answer])
    assert MemoryTransport(broker).receive(10, 0) == []


def test_a_node_that_disconnects_gets_no_orders_and_another_session():
    broker, server, node = memory()
    session = server.connected()["node-0"].session
    node.close()
    assert list(node.orders()) == []
    assert server.send([order_for()]) == ["node-0"]
    MemoryNode(broker, "node-0")
    assert server.connected()["node-0"].session != session
    with pytest.raises(EngineError, match="not connected"):
        node.answer(order_for(), b"")


def test_what_others_write_to_a_node_is_dropped():
    _, server, node = memory()
    node.deliver(b'{"stream":"UP","seq":7}')
    server.send([order := order_for()])
    assert next(node.orders()).job == order.job
    assert node.dropped == ["dropped a message that is not an order"]


def test_a_node_has_a_quota_and_is_named_when_it_is_full():
    _, server, node = memory()
    for _ in range(4):
        node.answer(order_for(), b"x")
    with pytest.raises(EngineError, match="quota"):
        node.answer(order_for(), b"x")
    assert [r.sender for r in server.refusals()] == ["node-0"]
    server.acknowledge(server.receive(10, 0))
    node.answer(order_for(), b"x")


def test_receive_waits_for_the_first_answer_and_gives_no_more_than_asked():
    _, server, node = memory()
    thread = threading.Thread(target=lambda: [node.answer(order_for(), bytes([i])) for i in range(3)])
    thread.start()
    found = server.receive(1, 30)
    thread.join()
    assert len(found) == 1
    assert len(server.receive(10, 0)) == 2


def test_models_that_nobody_needs_are_removed():
    _, server, node = memory()
    first, second = (server.publish_model(name, name.encode()) for name in ("v1", "v2"))
    server.retain_models(["v2"])
    assert node.model(order_for(model=second)) == b"v2"
    with pytest.raises(EngineError, match="not stored"):
        node.model(order_for(model=first))


# Keys -------------------------------------------------------------------------------------------------


def test_keys_are_made_once_with_modes_that_are_checked(tmp_path: Path):
    folder = tmp_path / "keys"
    made = credentials.make(folder, ["127.0.0.1"], 2)
    assert credentials.make(folder, ["127.0.0.1"], 2) == []
    secret = {"ca.key", "server.key", "server.nk", "monitor.nk", "operator.key", "node-0.nk", "node-1.nk"}
    assert {p.name for p in made if p.stat().st_mode & 0o777 == 0o600} == secret
    assert credentials.loose_files(folder) == []
    assert list(credentials.read_nodes(folder)) == ["node-0", "node-1"]
    (folder / "node-0.nk").chmod(0o640)
    assert credentials.loose_files(folder) == [folder / "node-0.nk"]
    with pytest.raises(FedbraidError, match="chmod 600"):
        credentials.read_key(folder / "node-0.nk")
    order = OrderSigner(credentials.operator_key(folder)).sign(
        "node-0", "PING", run="r", job="j", deadline=NOW
    )
    public = credentials.operator_public_key(folder / "operator.pub")
    assert OrderVerifier(public, "node-0", now=lambda: NOW).read(order.to_bytes()) == order


def test_a_revoked_node_has_no_key_and_its_name_can_be_given_again(tmp_path: Path):
    credentials.make(tmp_path, ["127.0.0.1"], 1)
    key = credentials.revoke(tmp_path, "node-0")
    with pytest.raises(ConfigError, match="not a registered node"):
        credentials.revoke(tmp_path, "node-0")
    credentials.add_nodes(tmp_path, ["node-0"])
    assert credentials.read_nodes(tmp_path)["node-0"] != key


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", ">", "x" * 65, "n\n", "ü"])
def test_names_that_would_be_another_subject_are_refused(tmp_path: Path, name):
    with pytest.raises(ConfigError, match="name must be"):
        credentials.add_nodes(tmp_path, [name])


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"a.b": "U"}', b'{"a": 1}', b"\xff"])
def test_a_damaged_list_of_nodes_is_one_sentence(tmp_path: Path, content):
    (tmp_path / "nodes.json").write_bytes(content)
    with pytest.raises((DataError, ConfigError), match=r"nodes.json|name must be"):
        credentials.read_nodes(tmp_path)


# Vectors for other languages --------------------------------------------------------------------------


def test_the_vectors_are_what_this_code_writes_and_reads():
    stored = json.loads(fleet_vectors.FILE.read_text())
    assert stored == fleet_vectors.make()
    key = serialization.load_pem_public_key(stored["operator_public"].encode())
    check = OrderVerifier(key, "node-7", now=lambda: stored["now"])
    for order in stored["orders"]:
        message = bytes.fromhex(order["message"])
        assert check.read(message).serial == order["serial"]
        assert bytes.fromhex(order["signed"]) in message.replace(message[17:85], b"")
    for refused in stored["refused"]:
        with pytest.raises(WireError, match=refused["reason"]):
            check.read(bytes.fromhex(refused["message"]))
