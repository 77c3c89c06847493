"""A secure sum over a transport: four stages, each an order to every node that is left and an answer from it.

Policy. A stage closes when every node has answered or is away, or when time is up; nodes that did not answer are gone for
the rest of the sum. Answers are acknowledged when they are read: a sum lives in the server's memory, so a server that is
started again begins another one, with new keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fedbraid.deploy.transport import NodeTransport, OrderSigner, Transport, new_job
from fedbraid.errors import WireError
from fedbraid.privacy.secure_sum import STAGES, SecureClient, SecureServer, Session, Words, stage_of

PATIENCE_S = 0.5  # the longest wait between two looks at who is connected


@dataclass
class SecureRound:
    """The server's end of one sum; `refused` is what nodes sent that could not be read."""

    transport: Transport
    signer: OrderSigner
    run: str
    nodes: tuple[str, ...]  # party i is node i − 1
    stage_s: float = 60.0
    refused: dict[str, str] = field(default_factory=dict)

    def sum(self, session: Session) -> tuple[Words, list[str]]:
        """(Σ of the numbers modulo 2^bits, whose numbers they are); EngineError where too few nodes stay."""
        server = SecureServer(session)
        orders = {i: session.invitation(i) for i in range(1, session.parties + 1)}
        for _ in STAGES:
            self._stage(server, orders)
            orders = server.close()
        return server.total(), [self.nodes[i - 1] for i in sorted(server.masked)]

    def _stage(self, server: SecureServer, orders: Mapping[int, bytes]) -> None:
        until = time.time() + self.stage_s
        jobs = {new_job(): party for party in orders}
        waiting = {job: self.nodes[party - 1] for job, party in jobs.items()}
        signed = [
            self.signer.sign(
                self.nodes[p - 1], "TRAIN", run=self.run, job=job, deadline=until, body=orders[p]
            )
            for job, p in jobs.items()
        ]
        away = set(self.transport.send(signed))
        while waiting := {job: node for job, node in waiting.items() if node not in away}:
            left = until - time.time()
            if left <= 0:
                return
            for answer in self.transport.receive(len(waiting), min(left, PATIENCE_S)):
                if waiting.get(answer.job) == answer.node.name:
                    self._read(server, jobs[answer.job], answer.node.name, answer.read)
                    del waiting[answer.job]
                self.transport.acknowledge([answer])
            away = set(self.nodes) - set(self.transport.connected())

    def _read(self, server: SecureServer, party: int, node: str, read: Callable[[], bytes]) -> None:
        try:
            server.receive(party, read())
        except WireError as error:
            self.refused[node] = str(error)


@dataclass
class SecureNode:
    """A node's end: one sum at a time. Its numbers are asked for once, when they are to be masked."""

    transport: NodeTransport
    numbers: Callable[[Session], Words]
    client: SecureClient | None = None

    def serve(self) -> None:
        """Answer orders until the transport is closed; what does not fit is not answered."""
        for order in self.transport.orders():
            try:
                answer = self.answer(order.body)
            except WireError:
                continue
            self.transport.answer(order, answer)

    def answer(self, body: bytes) -> bytes:
        """What is sent back; WireError where the order is not the next one of its sum."""
        stage = stage_of(body)
        if stage == "invitation":
            self.client = SecureClient.invited(body)
            return self.client.keys()
        if self.client is None:
            raise WireError("the server goes on with a sum that this node was not invited to")
        if stage == "masked":
            return self.client.masked(body, self.numbers(self.client.session))
        return self.client.shares(body) if stage == "shares" else self.client.unmask(body)
