"""The same interface over Flower's public API, for fleets that already run Flower: `serverapp.Grid` and `ClientApp`.

What the public API costs, beside a NATS broker:

- Flower starts a process for each order, which reads the node's data anew.
- A model travels inside each order, and an upload in one message, both within Flower's limits.
- An answer is gone from the SuperLink once it was pulled. A server that dies before its commit has lost it, and asks
  again; so has one whose SuperLink lost an order. `acknowledge` therefore has nothing to do.
- The operator's port of the SuperLink is Flower's to protect: who reaches it may start runs. So do its limits on requests.
- `Grid` retries by itself while the SuperLink is away: how long a call may take is Flower's decision.

Orders are signed here as everywhere. A node's name is its node id.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedbraid.algorithms.secure import summing
from fedbraid.deploy import Project
from fedbraid.deploy.credentials import operator_key, operator_public_key
from fedbraid.deploy.node import NodeRuntime
from fedbraid.deploy.project import Deployment
from fedbraid.deploy.serve import serve
from fedbraid.deploy.transport import (
    ModelReference,
    NodeIdentity,
    NodeTransport,
    OrderSigner,
    OrderVerifier,
    ReceivedAnswer,
    Refusal,
    SignedOrder,
    digest,
)
from fedbraid.errors import ConfigError, EngineError, WireError

RECORD, MODEL, STATE = "fedbraid.order", "fedbraid.model", "fedbraid.accepted"
POLL_S = 1.0


class FlowerTransport:
    """The server's end, inside a `ServerApp`: `FlowerTransport(grid)`."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.models: dict[str, bytes] = {}
        self.asked: dict[str, tuple[str, str, float]] = {}  # message id -> (node, job, deadline)
        self.ready: deque[ReceivedAnswer] = deque()
        self.told: deque[Refusal] = deque(maxlen=1000)
        self.nodes: dict[str, NodeIdentity] = {}

    def connected(self) -> Mapping[str, NodeIdentity]:
        with contextlib.suppress(Exception):  # the SuperLink is away: those of the last look
            self.nodes = {str(about.node_id): _identity(about) for about in self.grid.get_nodes()}
        return self.nodes

    def publish_model(self, name: str, message: bytes) -> ModelReference:
        self.models[name] = message
        return ModelReference.of(name, message)

    def retain_models(self, names: Collection[str]) -> None:
        self.models = {name: message for name, message in self.models.items() if name in set(names)}

    def send(self, orders: Sequence[SignedOrder]) -> Sequence[str]:
        try:
            ids = list(self.grid.push_messages([self._message(order) for order in orders]))
        except Exception as error:
            self.told.append(Refusal("SuperLink", f"orders could not be sent: {error}"))
            return [order.node for order in orders]
        given = dict(zip(ids, orders))
        self.asked |= {i: (order.node, order.job, order.deadline) for i, order in given.items() if i}
        return [order.node for order, i in zip(orders, ids) if not i]

    def receive(self, limit: int, wait: float) -> Sequence[ReceivedAnswer]:
        end = time.monotonic() + wait
        while True:
            self._pull()
            if self.ready or time.monotonic() >= end:
                return [self.ready.popleft() for _ in range(min(limit, len(self.ready)))]
            time.sleep(min(POLL_S, max(end - time.monotonic(), 0.0)))

    def acknowledge(self, answers: Sequence[ReceivedAnswer]) -> None:
        """Nothing to do: the SuperLink has forgotten them when they were pulled."""

    def where(self, answer: ReceivedAnswer) -> Any:
        raise EngineError("Flower has no place from which an edge could read")

    def refusals(self) -> Sequence[Refusal]:
        return [self.told.popleft() for _ in range(len(self.told))]

    def close(self) -> None:
        """The grid belongs to Flower."""

    def _message(self, order: SignedOrder) -> Message:
        content = RecordDict({RECORD: ConfigRecord({"order": order.to_bytes()})})
        if order.model is not None:
            content[MODEL] = ConfigRecord({"message": self.models[order.model.name]})
        kind = MessageType.TRAIN if order.kind == "TRAIN" else MessageType.QUERY
        left = max(order.deadline - time.time(), 1.0)
        return Message(content, dst_node_id=int(order.node), message_type=kind, ttl=left)

    def _pull(self) -> None:
        self.asked = {i: about for i, about in self.asked.items() if about[2] > time.time()}
        try:
            found = list(self.grid.pull_messages(list(self.asked))) if self.asked else []
        except Exception as error:
            self.told.append(Refusal("SuperLink", f"answers could not be pulled: {error}"))
            return
        for message in found:
            about = self.asked.pop(message.metadata.reply_to_message_id, None)
            if about is None or about[0] != str(message.metadata.src_node_id):
                continue
            try:
                if message.has_error():
                    raise WireError(f"it failed: {message.error.reason}")
                body = message.content[RECORD]["answer"]
                if not isinstance(body, bytes):
                    raise WireError("its answer is not bytes")
            except (WireError, KeyError, TypeError) as error:
                self.told.append(Refusal(about[0], str(error)))
                continue
            who = self.nodes.get(about[0]) or NodeIdentity(about[0], "")
            self.ready.append(ReceivedAnswer(who, about[1], len(body), lambda body=body: body))  # type: ignore[misc]


class FlowerNode:
    """A node's end, for the one order that Flower's process was started for."""

    def __init__(self, message: Message, context: Context, operator: Path) -> None:
        self.message, self.context = message, context
        self.reply: Message | None = None
        key = operator_public_key(operator)
        self.verifier = OrderVerifier(key, self.name, accepted=_accepted(context))

    @property
    def name(self) -> str:
        return str(self.context.node_id)

    def orders(self) -> Iterator[SignedOrder]:
        body = self.message.content[RECORD]["order"]
        if not isinstance(body, bytes):
            raise WireError("dropped a message that is not an order")
        order = self.verifier.read(body)
        accepted = self.verifier.accepted
        self.context.state[STATE] = ConfigRecord(
            {"serials": list(accepted), "until": list(accepted.values())}
        )
        yield order

    def model(self, order: SignedOrder) -> bytes:
        if order.model is None:
            return b""
        message = self.message.content[MODEL]["message"]
        if not isinstance(message, bytes) or digest(message) != order.model.digest:
            raise WireError(f"the model {order.model.name} is not the one that the operator signed")
        return message

    def fetch(self, where: Any, order: SignedOrder) -> bytes:
        raise EngineError("Flower has no place from which an edge could read")

    def answer(self, order: SignedOrder, message: bytes) -> None:
        """Stored when Flower has sent it, after this process's work."""
        self.reply = Message(RecordDict({RECORD: ConfigRecord({"answer": message})}), reply_to=self.message)

    def close(self) -> None:
        """The process ends with its order."""


def client_app(serve: Callable[[NodeTransport, Context], None], operator: Path) -> ClientApp:
    """A `ClientApp` that hands each order to `serve`, after its signature was checked with the key in `operator`."""

    def handle(message: Message, context: Context) -> Message:
        node = FlowerNode(message, context, operator)
        serve(node, context)
        if node.reply is None:
            raise EngineError("the order was not answered")
        return node.reply

    app = ClientApp()
    app.train()(handle)
    app.query()(handle)
    return app


class Apps(NamedTuple):
    """The two halves of a Flower app."""

    server: ServerApp
    client: ClientApp


def apps(project: Project, folder: str | Path) -> Apps:
    """A project's server and nodes over Flower.

    `folder` is a deployment's: the server reads fleet.toml and keys/operator.key there, nodes read keys/operator.pub. A
    node's configuration may name another folder as `fleet`, and another one for its state as `state`.
    """
    server, place = ServerApp(), Path(folder)

    def main(grid: Grid, context: Context) -> None:
        deployment = Deployment.read(place, project=project)
        if summing(deployment.settings.what()[0]) is not None:
            raise ConfigError(
                "a secure sum needs nodes that live from one order to the next, and Flower starts a process for each; use"
                " `fedbraid deploy up`"
            )
        if deployment.settings.edges:
            raise ConfigError("edges read uploads from a broker, which Flower is not; leave out edges")
        signer = OrderSigner(operator_key(place / "keys"))
        serve(project, deployment.settings, FlowerTransport(grid), signer)

    def obey(node: NodeTransport, context: Context) -> None:
        config = dict(context.node_config)
        NodeRuntime(project, node, Path(str(config.get("state", "~/.fedbraid/nodes"))), config).run()

    server.main()(main)
    return Apps(server, client_app(obey, place / "keys" / "operator.pub"))


def _accepted(context: Context) -> dict[int, float]:
    """The serial numbers that this node has accepted, which Flower keeps for it during a run."""
    if STATE not in context.state:
        return {}
    found = context.state[STATE]
    return dict(zip(found["serials"], found["until"]))


def _identity(about: object) -> NodeIdentity:
    key = hashlib.sha256(getattr(about, "public_key", b"")).hexdigest()
    return NodeIdentity(str(about.node_id), key, str(getattr(about, "last_activated_at", "")))  # type: ignore[attr-defined]
