"""Secure sums over a transport: nodes that disconnect at each stage, hostile answers, and what the server receives."""

from __future__ import annotations

import math
import os
import threading
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra `secure` is not installed")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedbraid.deploy.secure_round import SecureNode, SecureRound
from fedbraid.deploy.transport import OrderSigner
from fedbraid.deploy.transport_memory import MemoryBroker, MemoryNode, MemoryTransport
from fedbraid.errors import EngineError, WireError
from fedbraid.privacy.secure_sum import Session

NODES = tuple(f"node-{i}" for i in range(1, 8))
STAGES = ("invitation", "shares", "masked", "unmask")


class Recorded(MemoryTransport):
    """A transport that keeps all that its server is given."""

    def __init__(self, broker):
        super().__init__(broker)
        self.received = []

    def receive(self, limit, wait):
        answers = super().receive(limit, wait)
        self.received += [answer.read() for answer in answers]
        return answers


def numbers(name: str, session: Session) -> np.ndarray:
    """Small ones, of which nothing is to be seen."""
    draw = np.random.default_rng(NODES.index(name))
    return draw.integers(0, 2, session.length).astype(session.word)


class Mortal(SecureNode):
    """A node that disconnects, or answers with other bytes, when a stage begins."""

    dies_at: str | None = None
    lies_at: str | None = None

    def answer(self, body):
        from fedbraid.privacy.secure_sum import stage_of

        if stage_of(body) == self.dies_at:
            self.transport.close()
            raise WireError("gone")
        message = super().answer(body)
        return message[:-1] if stage_of(body) == self.lies_at else message


@contextmanager
def fleet(dies=None, lies=None):
    key = Ed25519PrivateKey.generate()
    broker = MemoryBroker(key.public_key())
    threads = []
    for name in NODES:
        node = Mortal(MemoryNode(broker, name), lambda session, name=name: numbers(name, session))
        node.dies_at, node.lies_at = (dies or {}).get(name), (lies or {}).get(name)
        threads.append(threading.Thread(target=node.serve, daemon=True))
    for thread in threads:
        thread.start()
    transport = Recorded(broker)
    yield SecureRound(transport, OrderSigner(key), "run", NODES), transport
    for node in list(broker.nodes.values()):
        node.close()
    for thread in threads:
        thread.join(10)


def session(**options):
    given = {"parties": 7, "neighbours": 6, "threshold": 4, "bits": 20, "length": 3000} | options
    return Session(os.urandom(16), **given)


def expected(s, names):
    return s.modulo(sum((numbers(n, s) for n in names), np.zeros(s.length, s.word)))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_nodes_that_disconnect_at_a_stage_leave_the_sum_of_the_others(stage, lost):
    s, dies = session(), dict.fromkeys(NODES[:lost], stage)
    with fleet(dies) as (round_, _):
        total, names = round_.sum(s)
    stayed = [n for n in NODES if n not in dies or stage == "unmask"]
    assert sorted(names) == sorted(stayed)
    assert np.array_equal(total, expected(s, stayed))


@pytest.mark.parametrize("stage", STAGES)
def test_too_many_of_them_end_the_sum_with_the_numbers(stage):
    with (
        fleet(dict.fromkeys(NODES[:4], stage)) as (round_, _),
        pytest.raises(EngineError, match="threshold=4"),
    ):
        round_.sum(session())


@pytest.mark.parametrize("stage", STAGES)
def test_a_node_whose_answers_do_not_parse_is_gone_and_named(stage):
    s = session()
    with fleet(lies={NODES[2]: stage}) as (round_, _):
        total, names = round_.sum(s)
    assert list(round_.refused) == [NODES[2]]
    stayed = [n for n in NODES if n != NODES[2] or stage == "unmask"]
    assert sorted(names) == sorted(stayed)
    assert np.array_equal(total, expected(s, stayed))


def test_what_the_server_receives_is_uniform():
    """Chi-square of the bytes of each masked upload; the numbers themselves are zeros and ones."""
    s = session(bits=16, length=6000)
    with fleet() as (round_, transport):
        total, _ = round_.sum(s)
    assert total.max() <= len(NODES)
    masked = [m[24:] for m in transport.received if m[3] == 3]
    assert len(masked) == len(NODES)
    for body in masked:
        counts = np.bincount(np.frombuffer(body, np.uint8), minlength=256)
        even = len(body) / 256
        assert float(((counts - even) ** 2 / even).sum()) < 255 + 6 * math.sqrt(2 * 255)
    plain = {s.pack(numbers(n, s)) for n in NODES}
    assert not any(p in m for p in plain for m in transport.received)


def test_a_node_answers_each_stage_of_a_sum_once_and_none_it_was_not_invited_to():
    s = session()
    node = SecureNode(None, lambda session: numbers(NODES[0], session))
    with pytest.raises(WireError, match="not invited"):
        node.answer(b"fS\1\2" + bytes(20))
    with pytest.raises(WireError, match="no message of a secure sum"):
        node.answer(b"xx")
    with pytest.raises(WireError, match="hides nothing"):
        node.answer(bytes(s.invitation(1)).replace((4).to_bytes(4, "little"), (1).to_bytes(4, "little")))
    node.answer(s.invitation(1))
    with pytest.raises(WireError):
        node.answer(s.invitation(1)[:-1])
