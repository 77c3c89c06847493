"""`fedbraid deploy check`: what a SuperLink lets whom do, found out by trying."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbraid.deploy.keys import signed
from fedbraid.deploy.operator import read_token
from fedbraid.errors import ConfigError, MissingExtra

PROTOBUF = {"content-type": "application/protobuf", "accept": "application/protobuf"}
NO_HEADERS: Mapping[str, str] = {}
NOTHING = "nobody"
TOLD = {401: "asked who is there", 403: "refused", 404: "not there", 0: "no connection", 200: "done"}


@dataclass(frozen=True)
class Trial:
    """One attempt: what was tried where and as whom, what came of it, and whether it should have."""

    api: str
    where: str
    who: str
    tried: str
    found: str
    good: bool

    def row(self) -> list[str]:
        return [self.api, self.where, self.who, self.tried, self.found, "yes" if self.good else "NO"]


def look(folder: Path, nodes: str, control: str) -> list[Trial]:
    """Every row of the table of who may do what, tried out from here."""
    try:
        import httpx
    except ImportError as error:
        raise MissingExtra("deployment", "flower") from error
    try:
        token = read_token(folder)
        context = _context(folder)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder} cannot be read: {error.strerror}; check needs ca.crt and operator.token"
        ) from error
    with httpx.Client(verify=context, timeout=10.0) as client:
        return list(_trials(client, nodes, control, token))


def _trials(client: Any, nodes: str, control: str, token: str) -> Iterator[Trial]:
    forged = signed(None)[0]
    bearer = {"authorization": f"Bearer {token}"}

    def ask(address: str, path: str, headers: Mapping[str, str] = NO_HEADERS, body: bytes = b"") -> int:
        return _status(client, f"https://{address}{path}", body, headers)

    def trial(api: str, where: str, who: str, tried: str, status: int, *good: int) -> Trial:
        return Trial(api, where, who, tried, TOLD.get(status, f"answered {status}"), status in good)

    stranger, operator, node = "anybody with ca.crt", "the operator's token", "a node's key"
    plain = _status(client, f"http://{nodes}/v1/fleet/pull-messages", b"", forged)
    yield trial("all", nodes, NOTHING, "in plain text", plain, 0, 400)
    yield trial("node", nodes, node, f"as {stranger}", ask(nodes, "/v1/fleet/pull-messages", forged), 401)
    yield trial(
        "node",
        nodes,
        NOTHING,
        "register oneself",
        ask(nodes, "/v1/fleet/register-node", forged),
        401,
        404,
    )
    yield trial("control", nodes, NOTHING, f"as {stranger}", ask(nodes, "/v1/control/list-runs"), 401, 404)
    yield trial(
        "control", nodes, NOTHING, f"with {operator}", ask(nodes, "/v1/control/list-runs", bearer), 404
    )
    yield trial("runtime", nodes, NOTHING, "take a task", ask(nodes, "/v1/runtime/acquire-task"), 401, 404)
    yield trial("control", control, operator, f"as {stranger}", ask(control, "/v1/control/list-runs"), 401)
    yield trial(
        "control", control, operator, f"with {operator}", ask(control, "/v1/control/list-runs", bearer), 200
    )
    code = ask(control, "/v1/control/start-run", bearer, _unsigned())
    yield trial("control", control, "a signed app", "run unsigned code", code, 403)
    yield trial(
        "runtime", control, "its own processes", "take a task", ask(control, "/v1/runtime/acquire-task"), 401
    )
    yield trial("control", _elsewhere(control), NOTHING, "from the network", _outside(control), 0)


def _status(client: Any, url: str, body: bytes, headers: Mapping[str, str]) -> int:
    """What a request is answered with, 0 where there is no connection."""
    import httpx

    try:
        return int(client.post(url, content=body, headers={**PROTOBUF, **headers}).status_code)
    except httpx.HTTPError:
        return 0


def _unsigned() -> bytes:
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.fab_pb2 import Fab

    asked: bytes = StartRunRequest(fab=Fab(hash_str="", content=b"code of a stranger")).SerializeToString()
    return asked


def _outside(control: str) -> int:
    """200 where the operator's port answers on this machine's own address too, else 0."""
    address = _elsewhere(control)
    try:
        with socket.create_connection((address.rpartition(":")[0], int(address.rpartition(":")[2])), 3):
            return 200
    except OSError:
        return 0


def _elsewhere(control: str) -> str:
    """The operator's port on the address that this machine has in the network, if it has one."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            host = probe.getsockname()[0]
    except OSError:
        host = "192.0.2.1"
    return f"{host}:{control.rpartition(':')[2]}"


def _context(folder: Path) -> Any:
    import ssl

    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.load_verify_locations(cafile=str(folder / "ca.crt"))
    return made
