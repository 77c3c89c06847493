"""The operator's side: register nodes, start runs of signed apps, and ask the SuperLink what it knows."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbraid.deploy.gate import ABOUT, SIGNED_APP
from fedbraid.deploy.keys import fingerprint
from fedbraid.deploy.sign import sign
from fedbraid.errors import ConfigError, EngineError, MissingExtra


@dataclass(frozen=True)
class Node:
    """A registered node, as the SuperLink knows it."""

    id: int
    key: bytes  # public
    status: str  # registered, online, offline
    online_until: float  # by the SuperLink's clock

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.key)

    @property
    def online(self) -> bool:
        return self.status == "online"


class Operator:
    """A connection to a SuperLink's control API. `folder` holds ca.crt and operator.token."""

    def __init__(self, folder: Path, address: str = "127.0.0.1:8001", token: str | None = None) -> None:
        self.folder, self.address = folder, address
        try:
            self.token = read_token(folder) if token is None else token
            self.ca = (folder / "ca.crt").read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{error.filename} cannot be read: {error.strerror}; the operator needs ca.crt and operator.token"
            ) from error
        self._client: Any = None

    def register(self, public: Path) -> int:
        """Let the node with this public key in: its id."""
        from flwr.proto.control_pb2 import RegisterNodeRequest
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        key = public_key_to_bytes(_public(public))
        for node in self.nodes():
            if node.key == key:
                return node.id
        with self._calling("register a node") as client:
            return int(client.RegisterNode(RegisterNodeRequest(public_key=key)).node_id)

    def unregister(self, public: Path) -> None:
        """Never let the node with this public key in again: Flower takes no key twice."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        key = public_key_to_bytes(_public(public))
        found = [n for n in self.nodes() if n.key == key]
        if not found:
            raise ConfigError(f"{public} is not registered; there is nothing to remove")
        with self._calling("remove a node") as client:
            client.UnregisterNode(UnregisterNodeRequest(node_id=found[0].id))

    def nodes(self) -> list[Node]:
        """All nodes that are registered."""
        from flwr.proto.control_pb2 import ListNodesRequest

        with self._calling("list nodes") as client:
            found = client.ListNodes(ListNodesRequest()).nodes_info
        kept = [n for n in found if n.status != "unregistered"]
        return [Node(n.node_id, n.public_key, n.status, n.online_until) for n in kept]

    def start(self, app: Path, config: Mapping[str, Any]) -> int:
        """Build an app, sign it, leave it with the SuperLink and run it: the run's id."""
        from flwr.common.serde import user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.proto.fab_pb2 import Fab

        bundle = build(app)
        signatures = sign(bundle, self.folder / "signing.key")
        with self._calling("take a signed app") as client:
            headers = {"fedbraid-signature": json.dumps(signatures)}
            stored = self._post(client, SIGNED_APP, bundle, headers).json()
            if not isinstance(stored, dict) or not {"hash", "app"} <= stored.keys():
                raise ValueError(f"it says {str(stored)[:100]}")
        asked = StartRunRequest(
            fab=Fab(hash_str=stored["hash"]),
            app_spec=stored["app"],
            override_config=user_config_to_proto(dict(config)),
        )
        with self._calling("start the run") as client:
            answer = client.StartRun(asked)
        if not answer.HasField("run_id"):
            raise EngineError("Flower did not take the app; see the SuperLink's log")
        return int(answer.run_id)

    def about(self) -> dict[str, Any]:
        """Versions and time where the SuperLink runs."""
        with self._calling("say what it is") as client:
            found = self._post(client, ABOUT, b"", {}).json()
            if not isinstance(found, dict):
                raise ValueError(f"it says {str(found)[:100]}")
        return found

    def _post(self, client: Any, path: str, body: bytes, headers: Mapping[str, str]) -> Any:
        """What Flower's client has no method for."""
        headers = {"authorization": f"Bearer {self.token}", **headers}
        answer = client._client.post(f"https://{self.address}{path}", content=body, headers=headers)
        answer.raise_for_status()
        return answer

    def stop(self, run: int) -> None:
        from flwr.proto.control_pb2 import StopRunRequest

        with self._calling("stop the run") as client:
            client.StopRun(StopRunRequest(run_id=run))

    def runs(self) -> list[dict[str, Any]]:
        """All runs, the newest first."""
        from flwr.proto.control_pb2 import ListRunsRequest

        with self._calling("list runs") as client:
            answer = client.ListRuns(ListRunsRequest())
        found = [
            {
                "run": int(run.run_id), "status": run.status.status, "how": run.status.sub_status,
                "details": run.status.details, "since": run.pending_at, "config": _plain(run.override_config),
            }
            for run in answer.run_dict.values()
        ]  # fmt: skip
        return sorted(found, key=lambda r: str(r["since"]), reverse=True)

    def log(self, run: int, patience: float = 5.0) -> str:
        """What the server's app has logged so far."""
        from flwr.proto.control_pb2 import StreamLogsRequest

        text, end = "", time.monotonic() + patience
        with self._calling("give the log") as client:
            for part in client.StreamLogs(StreamLogsRequest(run_id=run, after_timestamp=0.0)):
                text += part.log_output
                if not part.log_output or time.monotonic() > end:
                    break
        return text

    @contextmanager
    def _calling(self, what: str) -> Iterator[Any]:
        import httpx

        try:
            yield self._connected()
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            raise EngineError(
                f"the SuperLink at {self.address} would not {what} ({code}): {_said(error.response)}"
            ) from error
        except httpx.HTTPError as error:
            raise EngineError(
                f"the SuperLink at {self.address} did not {what}: {error}; is it running, and is the tunnel to it open?"
            ) from error
        except ValueError as error:  # of bytes that are no message of Flower's
            raise EngineError(
                f"what listens at {self.address} is no SuperLink, or of another version: asked to {what}, {error}"
            ) from error

    def _connected(self) -> Any:
        if self._client is None:
            try:
                from flwr.supercore.control import ControlHttpClient
                from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
            except ImportError as error:
                raise MissingExtra("deployment", "flower") from error
            kinds: list[Any] = [RuntimeVersionHttpInterceptor(component_name="fedbraid"), _Bearer(self.token)]
            self._client = ControlHttpClient.from_server_address(self.address, False, self.ca, kinds)
        return self._client

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close()


def read_token(folder: Path) -> str:
    """The operator's own."""
    path = folder / "operator.token"
    try:
        token = path.read_text("ascii").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is damaged ({error}); copy it again from where the keys were made"
        ) from error
    if not token.isprintable():
        raise ConfigError(f"{path} is damaged ({token[:20]!r}…); copy it again from where the keys were made")
    return token


@dataclass(frozen=True)
class _Bearer:
    token: str

    def intercept(self, context: Any, call_next: Any) -> Any:
        context.request.headers["authorization"] = f"Bearer {self.token}"
        return call_next(context)


def build(app: Path) -> bytes:
    """An app's bundle."""
    try:
        from flwr.cli.build import build_fab_from_disk
    except ImportError as error:
        raise MissingExtra("deployment", "flower") from error
    if not (app / "pyproject.toml").exists():
        raise ConfigError(f"{app} holds no app; make one with: fedbraid deploy init {app}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Flower's own
            bundle: bytes = build_fab_from_disk(app.resolve())
    except Exception as error:  # whatever Flower has to say about a bad project
        raise ConfigError(f"{app} cannot be built: {error}") from error
    return bundle


def _public(path: Path) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no public key of a node ({error}); give a node-N.pub") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path} is no key of a node; give a node-N.pub")
    return key


def _plain(config: Any) -> dict[str, Any]:
    from flwr.common.serde import user_config_from_proto

    return dict(user_config_from_proto(config))


def _said(response: Any) -> str:
    try:
        return str(response.json().get("detail", response.text))[:500]
    except ValueError:
        return str(response.text)[:500]
