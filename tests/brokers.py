"""A real broker with keys, a server's end, and nodes' ends, for tests."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from raw_nats import RawClient

from fedbraid.deploy import credentials
from fedbraid.deploy.broker import Broker
from fedbraid.deploy.node_nats import NatsNode
from fedbraid.deploy.transport import OrderSigner, ReceivedAnswer, SignedOrder, new_job
from fedbraid.deploy.transport_nats import NatsTransport, StreamLimits
from fedbraid.errors import EngineError

LIMIT = 60.0  # seconds that a test waits for what must happen


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def until(happened: Callable[[], object], what: object = "it") -> None:
    end = time.monotonic() + LIMIT
    while not happened():
        assert time.monotonic() < end, f"within {LIMIT:g} s there was no {what() if callable(what) else what}"
        time.sleep(0.01)


@dataclass
class Site:
    """One broker on this machine, and all that connects to it."""

    keys: Path
    broker: Broker
    limits: StreamLimits
    server: NatsTransport = field(init=False)
    nodes: list[NatsNode] = field(default_factory=list)
    raw: list[RawClient] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.signer = OrderSigner(credentials.operator_key(self.keys))
        self.server = self.new_server()

    @property
    def url(self) -> str:
        return f"tls://127.0.0.1:{self.broker.port}"

    def new_server(self) -> NatsTransport:
        return NatsTransport(self.url, self.keys, self.limits, self.broker.log)

    def node(self, name: str) -> NatsNode:
        self.nodes.append(NatsNode(self.url, self.keys / f"{name}.nk"))
        until(lambda: name in self.server.connected(), f"{name} connecting")
        return self.nodes[-1]

    def attacker(self, name: str) -> RawClient:
        """A raw client with a registered node's key."""
        key = credentials.read_key(self.keys / f"{name}.nk")
        self.raw.append(RawClient(self.broker.port, self.keys / "ca.crt", key.seed))
        return self.raw[-1]

    def order(self, node: str, kind: str = "TRAIN", body: bytes = b"", **more: object) -> SignedOrder:
        about = {"run": "test", "job": new_job(), "deadline": time.time() + LIMIT, "body": body, **more}
        return self.signer.sign(node, kind, **about)  # type: ignore[arg-type]

    def answers(self, count: int) -> list[ReceivedAnswer]:
        found: list[ReceivedAnswer] = []
        until(
            lambda: found.extend(self.server.receive(count - len(found), 0.5)) or len(found) >= count,
            "answers",
        )
        return found

    def drain(self) -> None:
        """Acknowledge all that waits, and disconnect all but the server."""
        for node in self.nodes:
            node.close()
        for client in self.raw:
            client.close()
        self.nodes, self.raw = [], []
        until(lambda: not self.server.connected(), "disconnecting")
        until(self._acknowledge_all, "removal of what tests left")
        self.server.retain_models([])
        self.server.refusals()

    def _acknowledge_all(self) -> bool:
        self.server.acknowledge(self.server.receive(100, 0))
        for upload in list(self.server.uploads.values()):
            self.server.link.call(self.server._drop(upload), LIMIT)
        return self.stored() == {}

    def stored(self, stream: str = "UP") -> dict[str, int]:
        """Messages in a stream, by subject."""
        request = {"subjects_filter": ">"}
        about = self.server.link.call(
            self.server.link.request(f"$JS.API.STREAM.INFO.{stream}", request), LIMIT
        )
        return dict(about["state"].get("subjects") or {})


def echo(node: NatsNode) -> threading.Thread:
    """A node that answers each order with its model and its body."""

    def serve() -> None:
        for order in node.orders():
            try:
                node.answer(order, node.model(order) + order.body)
            except EngineError:
                if not node.link.closed:
                    raise

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def site(folder: Path, nodes: int, **limits: int) -> Iterator[Site]:
    credentials.make(folder / "keys", ["127.0.0.1"], nodes)
    with Broker(folder / "keys", folder / "broker", port=free_port()) as broker:
        made = Site(folder / "keys", broker, StreamLimits(**limits))
        try:
            yield made
        finally:
            for node in made.nodes:
                node.close()
            for client in made.raw:
                client.close()
            made.server.close()


def random_bytes(count: int) -> bytes:
    return os.urandom(count)
