"""`fedbraid deploy trial`: a whole fleet on this machine, a real broker and nodes with keys, started, watched and ended."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedbraid.deploy import credentials, status_file
from fedbraid.deploy.broker import Broker
from fedbraid.deploy.project import Deployment
from fedbraid.deploy.service import url_of
from fedbraid.deploy.supervisor import EXIT_DONE, Supervisor
from fedbraid.errors import EngineError
from fedbraid.run.checkpoint import Folder, Record

LOOK_S = 0.2
HOST = "127.0.0.1"


def trial(
    folder: Path, nodes: int, given: dict[str, Any], tell: Callable[[Record, list[Record]], None]
) -> Folder:
    """Run a deployment to its end with this many nodes on loopback: the folder of the run.

    `tell(status, new records)` is called whenever there is something new to show. Each node gets `share` (0 to nodes − 1)
    and `shares` in its configuration.
    """
    out = f"runs/trial-{time.strftime('%Y%m%d-%H%M%S')}"
    given = {"nodes": nodes, "minimum": nodes, "out": out, **given}
    settings = Deployment.read(folder, given).settings
    run = Folder(settings.out)
    (run.path / status_file.FILE).unlink(missing_ok=True)  # that of the run which this one continues
    scratch = Path(tempfile.mkdtemp(prefix="fedbraid-trial-"))
    try:
        place = scratch / "fleet"
        place.mkdir()
        for path in folder.resolve().iterdir():
            if path.name not in ("keys", "broker"):  # the trial has its own
                (place / path.name).symlink_to(path)
        credentials.make(place / "keys", [HOST], nodes)
        credentials.add_nodes(place / "keys", settings.edge_names)
        port = free_port()
        broker, url = Broker(place / "keys", place / "broker", HOST, port), url_of(HOST, port)
        given["out"] = str(run.path)
        with Supervisor(scratch) as supervisor, broker:
            words = [word for key, value in given.items() for word in ("-c", f"{key}={_text(value)}")]
            server = supervisor.start("server", "deploy", "serve", str(place), url, *words)
            for i in range(nodes):
                about = [f"share={i}", f"shares={nodes}"]
                supervisor.start(
                    f"node-{i}", "deploy", "node", "--key", str(place / "keys" / f"node-{i}.nk"),
                    "--task", f"{place / 'fleet.py'}:fleet", "--state", f"{run.path}-nodes",
                    *(word for pair in about for word in ("-c", pair)), url,
                )  # fmt: skip
            for edge in settings.edge_names:
                key, task = str(place / "keys" / f"{edge}.nk"), f"{place / 'fleet.py'}:fleet"
                supervisor.start(edge, "deploy", "edge", "--key", key, "--task", task, url)
            seen = 0
            while True:
                ended = supervisor.look()
                records = list(run.records())
                tell(status_file.read(run.path), records[seen:])
                seen = len(records)
                if ended is not None:
                    break
                time.sleep(LOOK_S)
        if ended is not server or ended.process.returncode != EXIT_DONE:
            raise EngineError(f"{ended.name} ended; its log ends:\n{ended.tail()}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return run


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
