"""`fedbraid deploy doctor`: what keeps a fleet, or a node, from working, and what to do about it."""

from __future__ import annotations

import contextlib
import datetime
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbraid.deploy import credentials, service, status_file
from fedbraid.deploy.broker import answers, find_program
from fedbraid.deploy.nats_connection import Connection
from fedbraid.deploy.project import Deployment
from fedbraid.errors import ConfigError, FedbraidError

SOON = 30  # days before a certificate ends at which it is time for another
SPARE_FILES = 256  # that a broker opens beside its connections
FREE_BYTES = 1024**3


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    good: bool
    todo: str = ""

    def row(self) -> list[str]:
        return [self.what, self.found, "yes" if self.good else "NO", self.todo]


def examine(folder: Path) -> list[Finding]:
    """A deployment's folder, where its server runs."""
    found = [*_task(folder), *_keys(folder / "keys")]
    if (folder / "keys" / "nodes.json").is_file():
        found += _broker(folder)
    return found


def examine_node(key: Path, url: str) -> list[Finding]:
    """A node's key, and whether the broker lets it in."""
    found = []
    try:
        name, _ = credentials.read_key(key)
        found.append(Finding("key", f"{key.name} is that of {name}", True))
    except FedbraidError as error:
        return [Finding("key", str(error), False, "copy it again, with mode 600")]
    for name in ("ca.crt", "operator.pub"):
        there = (key.parent / name).is_file()
        found.append(
            Finding(
                name, "present" if there else "missing", there, "" if there else "copy it from the server"
            )
        )
    if not all(one.good for one in found):
        return found
    try:
        Connection(url, key, key.parent / "ca.crt").close()
        found.append(Finding("broker", f"{url} accepts this key", True))
    except FedbraidError as error:
        found.append(
            Finding("broker", str(error), False, "start it with: fedbraid deploy up; check the firewall")
        )
    return found


def _task(folder: Path) -> Iterator[Finding]:
    try:
        made = Deployment.read(folder)
        algorithm, _ = made.settings.what()
        yield Finding(
            "fleet.py, fleet.toml",
            f"{algorithm.name or 'an algorithm of yours'}, {made.settings.schedule}",
            True,
        )
        free = shutil.disk_usage(_existing(Path(made.settings.out))).free
        yield Finding(
            "disk", f"{free / 1e9:.1f} GB free", free > FREE_BYTES, "" if free > FREE_BYTES else "free some"
        )
    except FedbraidError as error:
        yield Finding("fleet.py, fleet.toml", str(error), False, "correct it")


def _keys(folder: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        yield Finding("keys", "none", False, f"fedbraid deploy keys {folder.parent} --host NAME --nodes 3")
        return
    loose = credentials.loose_files(folder)
    todo = f"chmod 600 {' '.join(map(str, loose))}" if loose else ""
    yield Finding("keys", f"{len(loose)} can be read by others" if loose else "private", not loose, todo)
    with contextlib.suppress(FedbraidError):
        yield Finding("registered nodes", str(len(credentials.read_nodes(folder))), True)
    for name in ("ca.crt", "server.crt"):
        try:
            about = credentials.certificate(folder / name)
        except (OSError, ValueError) as error:
            yield Finding(name, f"cannot be read: {error}", False, "fedbraid deploy keys")
            continue
        days = (about.until - datetime.datetime.now(datetime.UTC)).days
        valid = f"{days} days left" + (f", for {', '.join(about.hosts)}" if about.hosts else "")
        todo = "" if days > SOON else f"remove {folder / name} and run: fedbraid deploy keys"
        yield Finding(name, valid, days > SOON, todo)


def _broker(folder: Path) -> Iterator[Finding]:
    try:
        program, _ = find_program()
    except FedbraidError as error:
        yield Finding("nats-server", str(error), False, "apt-get install nats-server")
        return
    nodes = len(credentials.read_nodes(folder / "keys"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard > 2 * nodes + SPARE_FILES
    todo = "" if enough else "raise it: ulimit -n, or LimitNOFILE in the unit"
    yield Finding("open files", f"at most {hard}, for {nodes} nodes", enough, todo)
    try:
        told = service.read(folder)
    except ConfigError:
        yield Finding("broker", f"{program}, never started here", False, f"fedbraid deploy up {folder}")
        return
    broker = service.broker_of(folder, told.host, told.port)
    yield Finding("durability", broker.durability(), True)
    local = service.url_of(told.host, told.port).removeprefix("tls://").rpartition(":")[0].strip("[]")
    lives = answers(local, told.port)
    todo = "" if lives else f"fedbraid deploy up {folder}"
    yield Finding("broker", f"port {told.port} " + ("answers" if lives else "is silent"), lives, todo)
    run = status_file.read(Path(told.out))
    if run:
        good = run["life"] in ("running", "done")
        told_error = run["error"] or f"last heard of {run['age']:.0f} s ago"
        yield Finding(
            "server", f"{run['life']}; {told_error}", good, "" if good else f"fedbraid deploy up {folder}"
        )
        yield Finding("nodes", f"{run['nodes']} connected", run["nodes"] > 0 or run["life"] == "done", "")


def status(folder: Path) -> dict[str, Any]:
    """What a fleet is doing; asks nobody but the files and the broker's port, and answers at once."""
    told = service.read(folder)
    host = service.url_of(told.host, told.port).removeprefix("tls://").rpartition(":")[0].strip("[]")
    run = status_file.read(Path(told.out))
    return {"broker": answers(host, told.port), "port": told.port, "out": told.out, "run": run or None}


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.exists())
