"""`fedbraid deploy link`: Flower's SuperLink behind the gate, nodes on one port and the operator on another."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbraid.deploy import keys
from fedbraid.deploy.about import versions
from fedbraid.deploy.backoff import Backoff
from fedbraid.deploy.gate import (
    ABOUT,
    LARGEST_ORDER,
    SIGNED_APP,
    App,
    Gate,
    Known,
    Receive,
    Scope,
    Send,
    read,
)
from fedbraid.deploy.notes import say
from fedbraid.deploy.sign import is_signed, read_trusted
from fedbraid.errors import ConfigError, EngineError

Address = tuple[str, int]
ONLY: dict[
    str, str | tuple[str, ...]
] = {  # what Flower's layers look at; each costs a request some 2 ms, idle or not
    "ControlSensitiveResponseMiddleware": "/v1/control/",
    "ControlAuthenticationMiddleware": "/v1/control/",
    "ControlLicenseMiddleware": "/v1/control/",
    "ControlEventLogMiddleware": "/v1/control/",
    "NodeAuthMiddleware": "/v1/fleet/",
    "FleetEventLogMiddleware": (),  # there is no log of events
}
PATIENCE = "60000"  # milliseconds that one request waits for another's write; with Flower's 5,000, runs of busy fleets break


def serve(folder: Path, nodes: Address, operator: Address, database: Path) -> None:
    """Run a SuperLink until it is told to stop."""
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import console_handler

    _checked(folder, nodes, operator)
    os.umask(0o077)  # the database holds apps' tokens
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    trusted = read_trusted(folder / "trusted.yaml")
    sockets = [_socket(operator), _socket(nodes)]  # the operator's first: should it fail, nothing was open
    app = _superlink(folder, operator, database)
    app.add_api_route(SIGNED_APP, _taking_signed_apps(trusted), methods=["POST"])
    app.add_api_route(ABOUT, versions, methods=["POST"])
    state = app.state.linkstate_factory.state

    def registered(key: bytes) -> bool:
        return state().get_node_id_by_public_key(key) is not None

    token = (folder / "operator.sha256").read_text().strip()
    config = uvicorn.Config(
        Gate(app, operator, token, Known(registered)), ssl_keyfile=str(folder / "server.key"), ssl_certfile=str(folder / "server.crt"),
        lifespan="on", proxy_headers=False, log_config=get_uvicorn_log_config(console_handler.level),
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=sockets)


def parse_address(text: str) -> Address:
    """HOST:PORT, the host a literal address."""
    host, _, port = text.rpartition(":")
    try:
        at = int(port)
        ipaddress.ip_address(host.strip("[]"))
        if not 0 < at < 65536:
            raise ValueError
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is no address to listen on; write it like 0.0.0.0:8000 or 127.0.0.1:8001"
        ) from error
    return host.strip("[]"), at


def _checked(folder: Path, nodes: Address, operator: Address) -> None:
    """Say before anything is open what would be unsafe, or would not work."""
    for name in ("ca.crt", "server.crt", "server.key", "operator.sha256", "trusted.yaml"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder / name} is missing; make it with: fedbraid deploy keys {folder}")
    if not ipaddress.ip_address(operator[0]).is_loopback:
        raise ConfigError(
            f"{operator[0]} can be reached from elsewhere; let the operator's side listen on 127.0.0.1 and come to it"
            " through a tunnel: ssh -L 8001:127.0.0.1:8001 SERVER"
        )
    if nodes[1] == operator[1]:
        raise ConfigError(f"nodes and operator cannot share port {nodes[1]}; choose two")
    if operator[0] not in keys.certificate(folder / "server.crt").hosts:
        raise ConfigError(
            f"{folder / 'server.crt'} is not valid for {operator[0]}; move it and server.key away and make another:"
            f" fedbraid deploy keys {folder} --host NAME"
        )


def _socket(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as error:
        raise EngineError(
            f"cannot listen on {address[0]}:{address[1]}: {error.strerror}; is another SuperLink running?"
        ) from error
    made.set_inheritable(True)
    return made


def _superlink(folder: Path, operator: Address, database: Path) -> Any:
    """Flower's app, which takes apps' processes by a secret that is made anew with each start."""
    from flwr.supercore import sql_mixin
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin  # the gate asks for the token
    from flwr.superlink.config_loader import SuperLinkLifespanConfig
    from flwr.superlink.main import create_app

    pragmas = dict(sql_mixin.SQLITE_PRAGMAS) | {"busy_timeout": PATIENCE}
    sql_mixin.SQLITE_PRAGMAS = tuple(pragmas.items())
    paths = [folder / name for name in ("ca.crt", "server.crt", "server.key")]
    secret = secrets.token_bytes(32)
    config = SuperLinkLifespanConfig(
        control_address="", health_server_address=None, host=operator[0], port=operator[1], insecure=False,
        certificates=None, superexec_auth_secret=secret,
        authn_plugin=NoOpControlAuthnPlugin(), event_log_plugin=None, fleet_event_log_plugin=None,
        enable_event_log=False, artifact_provider=None, enable_supernode_auth=True, fleet_api_type="grpc-rere",
        fleet_api_address=None, simulation=False, ssl_ca_certfile=str(paths[0]), ssl_certfile=str(paths[1]),
        ssl_keyfile=str(paths[2]), database=str(database), isolation="process", runtime_dependency_install=False,
    )  # fmt: skip
    made: Any = lambda *_: Executor(operator, paths[0], secret)  # noqa: E731
    app = create_app(config, made)
    app.user_middleware = _lighter(app.user_middleware)
    return app


def _lighter(layers: Sequence[Any]) -> list[Any]:
    """Flower's layers around each request, without those that let it through untouched."""
    from starlette.middleware import Middleware

    tracing = os.getenv("FLWR_TRACING_ENABLED") == "1"
    kept = [layer for layer in layers if tracing or layer.cls.__name__ != "RuntimeTracingMiddleware"]
    return [
        Middleware(Only, made=layer.cls, under=ONLY[layer.cls.__name__])
        if layer.cls.__name__ in ONLY
        else layer
        for layer in kept
    ]


class Only:
    """A layer that only the requests under some path meet."""

    def __init__(self, app: App, made: Callable[[App], App], under: str | tuple[str, ...]) -> None:
        self.app, self.made, self.under = app, made(app), under

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        met = scope["type"] == "http" and scope["path"].startswith(self.under)
        await (self.made if met else self.app)(scope, receive, send)


@dataclass
class Executor:
    """Flower's process that starts server apps, for as long as the SuperLink lives."""

    address: Address
    ca: Path
    secret: bytes
    scratch: Path | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    keeper: threading.Thread | None = None

    def startup(self) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix="fedbraid-link-"))  # 0700
        (self.scratch / "secret").write_bytes(self.secret)
        self.keeper = threading.Thread(target=self._keep, name="executor")
        self.keeper.start()

    def _keep(self) -> None:
        """Start it, and again whenever it dies; without it no run would ever start, in silence."""
        backoff = Backoff()
        while not self.stopping.is_set():
            process = self._start()
            while process.poll() is None and not self.stopping.wait(0.5):
                pass
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                return
            wait = backoff.failed()
            say(
                f"flower-superexec ended with exit code {process.returncode}; starting it again in {wait:.1f} s"
            )
            self.stopping.wait(wait)

    def _start(self) -> subprocess.Popen[bytes]:
        assert self.scratch is not None
        tool = shutil.which("flower-superexec", path=os.path.dirname(sys.executable)) or "flower-superexec"
        host = f"[{self.address[0]}]" if ":" in self.address[0] else self.address[0]
        words = ["--root-certificates", str(self.ca), "--runtime-api-address", f"{host}:{self.address[1]}"]
        words += [
            "--superexec-auth-secret-file",
            str(self.scratch / "secret"),
            "--parent-pid",
            str(os.getpid()),
        ]
        return subprocess.Popen([tool, *words], start_new_session=True)

    def shutdown(self) -> None:
        self.stopping.set()
        if self.keeper is not None:
            self.keeper.join()
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)


def _taking_signed_apps(trusted: dict[str, str]) -> Any:
    """The route by which the operator leaves an app here: its bundle, checked against the trusted keys."""
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from flwr.common.config import get_fab_config, get_metadata_from_config
    from flwr.common.constant import NOOP_FLWR_AID
    from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
    from flwr.supercore.fab import Fab

    async def signed_app(request: Request) -> JSONResponse:
        body = await read(request.receive, LARGEST_ORDER)
        try:
            signatures = json.loads(request.headers["fedbraid-signature"])
        except (KeyError, ValueError):
            signatures = None
        if body is None or not isinstance(signatures, dict) or not is_signed(body, signatures, trusted):
            return JSONResponse({"detail": "no key in this server's trusted.yaml signed this app"}, 403)
        about = get_fab_config(body)
        app_id = f"@{get_metadata_from_config(about)[0]}"
        stored = Fab(keys.fingerprint(body), body, signatures)
        state = request.app.state.linkstate_factory.state()
        state.store_app(stored, NOOP_FEDERATION_ID, app_id, TaskType.SERVER_APP, NOOP_FLWR_AID)
        return JSONResponse({"app": app_id, "hash": stored.hash_str})

    signed_app.__annotations__ = {"request": Request}  # of types that FastAPI cannot find from here
    return signed_app
