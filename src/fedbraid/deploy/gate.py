"""Who may ask a SuperLink for what: one table, and the ASGI gate in front of Flower that holds to it.

Flower serves nodes, operator and its own apps on one port and asks the operator for nothing. Here nodes have a
port on which there is nothing but the node API, and the operator another, on loopback, which asks for a token.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import json
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from fedbraid.deploy.keys import fingerprint

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SIGNED_APP, ABOUT = "/v1/control/signed-app", "/v1/control/about"
UNKNOWN = "this node is not registered"
TURNS = 8  # nodes' requests that Flower has at a time; the server's own, two at most, come between them
TRUST = 5.0  # seconds for which a registered key is not looked up again; it was a sixth of a busy SuperLink's work
LARGEST_ORDER = 16 << 20  # bytes of a request by the operator; Flower's bundles are smaller
HOST = re.compile(rb"[A-Za-z0-9.:_\-\[\]]{0,255}")  # Flower's own checks go by a URL that begins with this

NODE = frozenset(
    f"/v1/fleet/{name}"
    for name in (
        "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages", "get-run",
        "get-fab", "push-object", "pull-object", "confirm-message-received",
    )
)  # fmt: skip
OPERATOR = frozenset(
    {SIGNED_APP, ABOUT}
    | {
        f"/v1/control/{name}"
        for name in (
            "start-run", "list-runs", "stop-run", "stream-logs", "register-node", "unregister-node", "list-nodes",
        )
    }
)  # fmt: skip
RUNTIME = "/v1/runtime/"

# what, where, and who: `deploy check` shows it, the gate enforces it, and Flower itself what the gate leaves to it
TABLE = (
    ("take part (node API)", "nodes", "a registered node's key"),
    ("look, register nodes, stop runs (control API)", "operator", "the operator's token"),
    ("start a run (control API)", "operator", "the operator's token, and an app that a trusted key signed"),
    ("run a server app's tasks (runtime API)", "operator", "the SuperLink's own processes, by a secret"),
    ("everything else", "nobody", "nobody"),
)


@dataclass
class Known:
    """Whether a node's public key is registered. The answer yes holds for some seconds: Flower asks again anyway."""

    look: Callable[[bytes], bool]
    until: dict[bytes, float] = field(default_factory=dict)

    def __call__(self, key: bytes) -> bool:
        now = time.monotonic()
        if self.until.get(key, now) > now:
            return True
        found = self.look(key)
        if found:
            self.until[key] = now + TRUST
        return found


@dataclass
class Gate:
    """In front of Flower's app: lets through what the table allows on the socket that a request came by."""

    app: App
    operator: tuple[
        str, int
    ]  # the address whose requests are the operator's and the apps'; all others are nodes'
    token: str  # the SHA-256 of the operator's token
    registered: Callable[[bytes], bool]  # whether a node's public key is
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(TURNS))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        nodes = tuple(scope["server"] or ()) != self.operator
        status, why = self._nodes(scope, headers) if nodes else self._operators(scope, headers)
        if status:
            return await _refuse(send, status, why)
        if nodes:
            return await self._in_turn(scope, receive, send)
        if scope["path"] == "/v1/control/start-run":
            return await self._start(scope, receive, send)
        return await self.app(scope, receive, send)

    async def _in_turn(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Some nodes at a time, lest hundreds that look for orders keep the server from giving them.

        A turn begins when all of a request is here and ends before its answer is sent: a slow line keeps nobody waiting.
        """
        body = await read(receive, None)
        if body is None:
            return
        told: list[MutableMapping[str, Any]] = []

        async def keep(message: MutableMapping[str, Any]) -> None:
            told.append(message)

        async with self.turns:
            await self.app(scope, _again(body, receive), keep)
        for message in told:
            await send(message)

    def _nodes(self, scope: Scope, headers: list[tuple[bytes, bytes]]) -> tuple[int, str]:
        """Flower checks the signature; who is not even registered gets no byte of a body read."""
        if scope["method"] != "POST" or scope["path"] not in NODE or not _sound(headers):
            return 404, "nothing here but the node API"
        try:
            key = base64.b64decode(_one(headers, b"flwr-public-key"), validate=True)
        except binascii.Error:
            key = b""
        return (0, "") if key and self.registered(key) else (401, UNKNOWN)

    def _operators(self, scope: Scope, headers: list[tuple[bytes, bytes]]) -> tuple[int, str]:
        path = scope["path"]
        if path == "/health":
            return 0, ""
        if scope["method"] != "POST" or not _sound(headers):
            return 404, "no such thing"
        if path.startswith(RUNTIME):
            return 0, ""  # each of its tasks has a token, and who takes tasks a secret
        if path not in OPERATOR:
            return 404, "no such thing"
        given = _one(headers, b"authorization").removeprefix(b"Bearer ")
        if not hmac.compare_digest(fingerprint(given), self.token):
            return 401, "this needs the operator's token"
        return 0, ""

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs start from apps that are here and signed, never from code that comes along."""
        from flwr.proto.control_pb2 import StartRunRequest
        from google.protobuf.message import DecodeError

        body = await read(receive, LARGEST_ORDER)
        try:
            asked = StartRunRequest.FromString(body or b"")
        except DecodeError:
            return await _refuse(send, 400, "no request to start a run")
        if asked.fab.content or not asked.fab.hash_str:
            return await _refuse(send, 403, "only signed apps run here; start them with: fedbraid deploy run")
        assert body is not None
        await self.app(scope, _again(body, receive), send)


def _again(body: bytes, receive: Receive) -> Receive:
    """What a request brings when its body was read already."""
    rest: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> MutableMapping[str, Any]:
        return rest.pop() if rest else await receive()

    return again


async def read(receive: Receive, most: int | None) -> bytes | None:
    """A request's body, None where it is larger than that, or whoever sent it went away."""
    body, more = bytearray(), True
    while more:
        part = await receive()
        body += part.get("body", b"")
        more = part.get("more_body", False)
        if (most is not None and len(body) > most) or part["type"] == "http.disconnect":
            return None
    return bytes(body)


def _sound(headers: list[tuple[bytes, bytes]]) -> bool:
    hosts = [value for name, value in headers if name == b"host"]
    return len(hosts) == 1 and HOST.fullmatch(hosts[0]) is not None


def _one(headers: list[tuple[bytes, bytes]], wanted: bytes) -> bytes:
    """The header of this name, nothing where there is not exactly one."""
    found = [value for name, value in headers if name == wanted]
    return found[0] if len(found) == 1 else b""


async def _refuse(send: Send, status: int, why: str) -> None:
    body = json.dumps({"detail": why}).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
