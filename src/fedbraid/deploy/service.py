"""`fedbraid deploy up`: a broker and a server, supervised until the run has ended."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedbraid.deploy import credentials
from fedbraid.deploy.broker import Broker
from fedbraid.deploy.project import Deployment
from fedbraid.deploy.supervisor import EXIT_DONE, Supervisor
from fedbraid.errors import ConfigError, RunError
from fedbraid.run.atomic_files import make_folder, write_atomic

UP = "up.json"
LOOK_S = 0.3


class Up(NamedTuple):
    """What `up` was told, for the commands that ask about it."""

    host: str
    port: int
    out: str


def up(folder: Path, host: str, port: int, settings: Sequence[str], given: dict[str, Any]) -> None:
    """Run the broker and the server of a deployment until its run has ended."""
    deployment = Deployment.read(folder, given)  # what is wrong is said before anything starts
    broker = broker_of(folder, host, port)
    write_atomic(_state(folder) / UP, json.dumps(Up(host, port, deployment.settings.out)._asdict()).encode())
    overrides = [word for pair in settings for word in ("-c", pair)]
    with Supervisor() as supervisor, broker:
        supervisor.start(
            "the server", "deploy", "serve", str(folder.resolve()), url_of(host, port), *overrides
        )
        while (ended := supervisor.look()) is None:
            time.sleep(LOOK_S)
    if ended.process.returncode != EXIT_DONE:
        raise RunError(
            "the server ended with the error above; correct it, and start it again: the run goes on"
        )


def broker_of(folder: Path, host: str = "", port: int = 0) -> Broker:
    """The broker of a deployment's folder, where `up` has it listen if not told otherwise."""
    if not (folder / "keys" / "nodes.json").is_file():
        raise ConfigError(f"{folder} has no keys; make them with: fedbraid deploy keys {folder} --nodes 3")
    if not port:
        host, port, _ = read(folder)
    return Broker(folder / "keys", _state(folder), host, port)


def read(folder: Path) -> Up:
    """Where the broker listens and the run is."""
    try:
        told = json.loads((folder / "broker" / UP).read_bytes())
        return Up(str(told["host"]), int(told["port"]), str(told["out"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"nothing was started in {folder} yet; use: fedbraid deploy up {folder}") from error


def url_of(host: str, port: int) -> str:
    """Where a process of this machine reaches the broker."""
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"tls://{local}:{port}"


def revoke(folder: Path, name: str) -> bool:
    """Take a node's key away; returned is whether a broker runs, which has then cut it off."""
    credentials.revoke(folder / "keys", name)
    broker = broker_of(folder) if (folder / "broker" / UP).exists() else None
    if broker is None or not broker.is_running:
        return False
    broker.reload()
    return True


def _state(folder: Path) -> Path:
    make_folder(folder / "broker")
    os.chmod(folder / "broker", 0o700)
    return folder / "broker"
