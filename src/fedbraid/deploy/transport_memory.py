"""A broker within one process, for tests: the guarantees of the real one, and its disconnections.

Answers stay stored until they are acknowledged, and a new server receives all of them again; orders to a node that
disconnects are lost; orders are verified as they are everywhere.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedbraid.deploy.transport import (
    EDGE,
    ModelReference,
    NodeIdentity,
    OrderVerifier,
    ReceivedAnswer,
    Refusal,
    SignedOrder,
    check_name,
    digest,
)
from fedbraid.errors import EngineError, WireError


@dataclass
class MemoryBroker:
    """What outlives a server and its nodes. `quota` is how many answers of a node may wait."""

    operator: Ed25519PublicKey
    quota: int = 4
    models: dict[str, bytes] = field(default_factory=dict)
    answers: dict[tuple[str, str, str], bytes] = field(default_factory=dict)  # node, job, digest
    stored_before: set[tuple[str, str, str]] = field(default_factory=set)
    nodes: dict[str, MemoryNode] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    sessions: Iterator[int] = field(default_factory=itertools.count)
    changed: threading.Condition = field(default_factory=threading.Condition)


class MemoryTransport:
    """The server's end. A second one on the same broker is a server that was started again."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker
        self.handed_out: set[tuple[str, str, str]] = set()

    def connected(self) -> Mapping[str, NodeIdentity]:
        with self.broker.changed:
            return {name: node.identity for name, node in self.broker.nodes.items()}

    def publish_model(self, name: str, message: bytes) -> ModelReference:
        self.broker.models[check_name(name)] = message
        return ModelReference.of(name, message)

    def retain_models(self, names: Collection[str]) -> None:
        self.broker.models = {name: m for name, m in self.broker.models.items() if name in set(names)}

    def send(self, orders: Sequence[SignedOrder]) -> Sequence[str]:
        with self.broker.changed:
            lost = [order.node for order in orders if order.node not in self.broker.nodes]
            for order in orders:
                if order.node not in lost:
                    self.broker.nodes[order.node].deliver(order.to_bytes())
        return lost

    def receive(self, limit: int, wait: float) -> Sequence[ReceivedAnswer]:
        with self.broker.changed:
            self.broker.changed.wait_for(self._waiting, wait)
            found = self._waiting()[:limit]
            self.handed_out |= set(found)
            return [self._received(identity) for identity in found]

    def acknowledge(self, answers: Sequence[ReceivedAnswer]) -> None:
        with self.broker.changed:
            for answer in answers:
                self.broker.answers.pop(answer.handle, None)
            self.broker.changed.notify_all()

    def where(self, answer: ReceivedAnswer) -> Any:
        return list(answer.handle)

    def refusals(self) -> Sequence[Refusal]:
        with self.broker.changed:
            found, self.broker.refusals = self.broker.refusals, []
        return found

    def close(self) -> None:
        """Nothing is lost by it: the broker holds all that was not acknowledged."""

    def _waiting(self) -> list[tuple[str, str, str]]:
        return [identity for identity in self.broker.answers if identity not in self.handed_out]

    def _received(self, identity: tuple[str, str, str]) -> ReceivedAnswer:
        name, job, _ = identity
        message = self.broker.answers[identity]
        node = self.broker.nodes.get(name)
        who = NodeIdentity(name, name) if node is None else node.identity
        return ReceivedAnswer(who, job, len(message), lambda: message, identity)


class MemoryNode:
    """A node's end; another one of the same name takes its place."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        self.broker, self._name = broker, check_name(name)
        self.verifier = OrderVerifier(broker.operator, name)
        self.inbox: queue.Queue[SignedOrder | None] = queue.Queue()
        self.dropped: list[str] = []
        with broker.changed:
            self.identity = NodeIdentity(name, name, str(next(broker.sessions)))
            broker.nodes[name] = self

    @property
    def name(self) -> str:
        return self._name

    def deliver(self, message: bytes) -> None:
        """What arrives on the node's subject, whoever wrote it."""
        try:
            self.inbox.put(self.verifier.read(message))
        except WireError as error:
            self.dropped.append(str(error))

    def orders(self) -> Iterator[SignedOrder]:
        while (order := self.inbox.get()) is not None:
            yield order

    def model(self, order: SignedOrder) -> bytes:
        if order.model is None:
            return b""
        message = self.broker.models.get(order.model.name)
        if message is None:
            raise EngineError("cannot fetch the model in time: it is not stored any more")
        if digest(message) != order.model.digest:
            raise WireError(f"the model {order.model.name} is not the one that the operator signed")
        return message

    def fetch(self, where: Any, order: SignedOrder) -> bytes:
        with self.broker.changed:
            found = self.broker.answers.get(tuple(where))
        if found is None or not self.name.startswith(EDGE):
            raise WireError("its answer is not stored any more")
        return found

    def answer(self, order: SignedOrder, message: bytes) -> None:
        identity = self.name, order.job, digest(message)
        with self.broker.changed:
            if identity in self.broker.stored_before:
                return
            waiting = Counter(node for node, _, _ in self.broker.answers)
            if self.broker.nodes.get(self.name) is not self or waiting[self.name] >= self.broker.quota:
                reason = (
                    "it is not connected" if waiting[self.name] < self.broker.quota else "its quota is full"
                )
                self.broker.refusals.append(Refusal(self.name, reason))
                raise EngineError(f"cannot store the answer in time: {reason}")
            self.broker.answers[identity] = message
            self.broker.stored_before.add(identity)
            self.broker.changed.notify_all()

    def close(self) -> None:
        with self.broker.changed:
            if self.broker.nodes.get(self.name) is self:
                del self.broker.nodes[self.name]
        self.inbox.put(None)
