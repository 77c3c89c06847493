"""Orders: written, signed, given, and given again under the same job until their answer is here."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedbraid.core.link import BroadcastContext
from fedbraid.deploy.backoff import Backoff
from fedbraid.deploy.node_table import Node, NodeTable, PendingRequest
from fedbraid.deploy.transport import Kind, ModelReference, OrderSigner, Transport, new_job
from fedbraid.engines.engine import Setup
from fedbraid.run.state import State

FIRST_REPEAT_S, LAST_REPEAT_S = 10.0, 300.0  # after which an order without an answer is given again
UNDELIVERED_S = 1.0  # the same for one that could not be given


@dataclass
class Orders:
    """What the server says to nodes."""

    setup: Setup
    table: NodeTable
    transport: Transport
    signer: OrderSigner
    run: str
    limit: float  # seconds that an order may take
    common: Mapping[str, Any]  # of every order's body
    models: dict[tuple[int, int], tuple[ModelReference, int, int]] = field(default_factory=dict)

    def hello(self, nodes: Iterable[Node], now: float) -> None:
        self._give([(node, self._request("HELLO", now)) for node in nodes], now)

    def leave(self, node: Node, now: float) -> None:
        self._give([(node, self._request("LEAVE", now, committed=node.committed))], now)

    def sum(self, asked: Iterable[tuple[Node, Mapping[str, Any]]], now: float) -> None:
        """The next stage of a secure sum, with each node's message."""
        self._give([(node, self._request("SUM", now, **about)) for node, about in asked], now)

    def fold(self, asked: Iterable[tuple[Node, Mapping[str, Any]]], state: State, now: float) -> None:
        """Order edges to fold uploads that were trained from the newest version."""
        model, _, _ = self._model(state, -1)
        requests = [(edge, self._request("FOLD", now, **about)) for edge, about in asked]
        for _, request in requests:
            request.model = model
        self._give(requests, now)

    def train(self, nodes: Sequence[Node], state: State, now: float) -> None:
        """Order these to train from the newest version, all with one call."""
        requests = []
        for node in nodes:
            node.sequence += 1
            node.on("asked")
            model, size, base = self._model(state, node.version)
            job = self.table.job(node, node.sequence, state.t)
            request = self._request(
                "TRAIN", now, job, client=node.client, version=state.t, names=list(self.setup.algorithm.downloads),
                base=base, start=node.accepted, committed=node.committed,
            )  # fmt: skip
            request.version, request.sequence, request.model, request.bytes_down = (
                state.t,
                node.sequence,
                model,
                size,
            )
            requests.append((node, request))
        self._give(requests, now)

    def repeat(self, now: float) -> None:
        """Give again what nodes that connected anew have lost, and what has been without an answer for long."""
        again = [
            (n, r) for n in self.table.nodes.values()
            if (r := n.request) is not None and n.is_connected and (r.session != n.session or now > r.again)
        ]  # fmt: skip
        for _, request in again:
            if request.kind != "TRAIN":  # which nothing else ends
                request.deadline = time.time() + 2 * self.limit
        self._give(again, now)

    def forget_models(self) -> None:
        """Remove the messages that no order refers to."""
        needed = {r.model.name for _, r in self.table.pending() if r.model is not None}
        self.models = {key: model for key, model in self.models.items() if model[0].name in needed}
        self.transport.retain_models(needed)

    def _request(self, kind: Kind, now: float, job: str = "", **body: Any) -> PendingRequest:
        backoff = Backoff(min(max(self.limit / 4, FIRST_REPEAT_S), LAST_REPEAT_S), LAST_REPEAT_S)
        about = json.dumps({**self.common, **body}, separators=(",", ":")).encode()
        return PendingRequest(
            job or new_job(), kind, about, time.time() + 2 * self.limit, now, backoff=backoff
        )

    def _give(self, given: Sequence[tuple[Node, PendingRequest]], now: float) -> None:
        if not given:
            return
        orders = [
            self.signer.sign(
                node.name, r.kind, run=self.run, job=r.job, deadline=r.deadline, body=r.body, model=r.model
            )
            for node, r in given
        ]  # fmt: skip
        lost = set(self.transport.send(orders))
        for node, request in given:
            node.request, request.session, request.times = request, node.session, request.times + 1
            pause = UNDELIVERED_S if node.name in lost else request.backoff.failed()
            request.again = now + pause

    # Models -------------------------------------------------------------------------------------------

    def _model(self, state: State, held: int) -> tuple[ModelReference, int, int]:
        """(the newest model's message for a node that holds this version, its bytes, the version it builds on)."""
        if (state.t, held) not in self.models:
            a, t = self.setup.algorithm, state.t
            who = BroadcastContext(a.downloads, t, self.setup.seed, self.setup.task.layout, real=True)
            base, message = a.down.build_message(state.sent[t], state.wire, held, who)
            name = f"v{t}" if base < 0 else f"v{t}-{base}"
            same = next((m for m in self.models.values() if m[0].name == name), None)
            self.models[t, held] = same or (self.transport.publish_model(name, message), len(message), base)
        return self.models[state.t, held]
