"""`fedbraid deploy status` and `deploy doctor`: what a fleet is doing, and what keeps it from doing it."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from fedbraid.deploy.about import versions
from fedbraid.deploy.check import PROTOBUF, _context, look
from fedbraid.deploy.gate import UNKNOWN
from fedbraid.deploy.keys import certificate, signed
from fedbraid.deploy.notes import plain
from fedbraid.deploy.operator import Operator
from fedbraid.errors import EngineError, FedbraidError

CLOCKS = 5.0  # seconds by which Flower lets a node's clock be ahead
SOON = 30  # days before a certificate ends at which it is time for another


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    good: bool
    todo: str = ""

    def row(self) -> list[str]:
        return [self.what, self.found, "yes" if self.good else "NO", self.todo]


def examine(folder: Path, nodes: str, control: str) -> list[Finding]:
    """Everything that can be looked at with the keys that this folder holds, the operator's or a node's."""
    found = list(_files(folder))
    if not (folder / "ca.crt").is_file():
        return found
    found += _door(folder, nodes)
    for key in sorted(folder.glob("node-*.key")):
        found += _known(folder, key, nodes)
    if (folder / "operator.token").is_file():
        found += _operators(folder, nodes, control)
    return found


def _files(folder: Path) -> Iterator[Finding]:
    keys = sorted([*folder.glob("*.key"), *folder.glob("operator.token")])
    loose = [p.name for p in keys if p.stat().st_mode & 0o077]
    yield Finding(
        "keys", ", ".join(p.name for p in keys) or "none", bool(keys) and not loose,
        f"chmod 600 {' '.join(loose)}" if loose else "" if keys else "fedbraid deploy keys",
    )  # fmt: skip
    for name in ("ca.crt", "server.crt"):
        if not (folder / name).is_file():
            if name == "ca.crt":
                yield Finding(name, "missing", False, "copy it from where the keys were made")
            continue
        try:
            about = certificate(folder / name)
        except ValueError as error:
            yield Finding(name, f"unreadable: {error}", False, "copy it again from where the keys were made")
            continue
        days = (about.until - datetime.datetime.now(datetime.UTC)).days
        valid = f"{days} days left" + (f", for {', '.join(about.hosts)}" if about.hosts else "")
        yield Finding(
            name, valid, days > SOON, "" if days > SOON else f"remove {name} and run: fedbraid deploy keys"
        )


def _door(folder: Path, nodes: str) -> Iterator[Finding]:
    """Whether the nodes' side answers, with a certificate that this CA signed, and what time it is there."""
    import httpx

    try:
        with httpx.Client(verify=_context(folder), timeout=10.0) as client:
            answer = client.post(f"https://{nodes}/")
    except httpx.HTTPError as error:
        yield Finding("SuperLink, for nodes", f"{nodes}: {error}", False, _why_not(str(error)))
        return
    yield Finding("SuperLink, for nodes", f"{nodes} answers", True)
    try:
        there = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return
    apart = time.time() - there
    good = -300 < apart < CLOCKS + 1  # the header has whole seconds
    yield Finding(
        "clocks",
        f"this one is {apart:+.0f} s from the SuperLink's",
        good,
        "" if good else "synchronise them (NTP)",
    )


def _why_not(error: str) -> str:
    if "CERTIFICATE" in error.upper():
        return "this ca.crt is not the one that signed its certificate, or the name is not in it"
    return "start it with: fedbraid deploy link; let the port through the firewall"


def _known(folder: Path, key: Path, nodes: str) -> Iterator[Finding]:
    """Whether the SuperLink would let a node with this key in; asks for a run that there is not."""
    import httpx
    from flwr.proto.run_pb2 import GetRunRequest

    try:
        headers, _ = signed(key)
        with httpx.Client(verify=_context(folder), timeout=10.0) as client:
            body = GetRunRequest(run_id=1).SerializeToString()
            status = client.post(
                f"https://{nodes}/v1/fleet/get-run", content=body, headers=PROTOBUF | headers
            )
    except (httpx.HTTPError, FedbraidError):
        return
    good = UNKNOWN not in status.text
    todo = f"fedbraid deploy register KEYS {key.stem}.pub"
    yield Finding(key.name, "registered" if good else "not registered", good, "" if good else todo)


def _operators(folder: Path, nodes: str, control: str) -> Iterator[Finding]:
    try:
        with Operator(folder, control) as operator:
            there = operator.about()
            yield Finding("SuperLink, for the operator", f"{control} answers", True)
            here = versions()
            differ = [k for k in ("fedbraid", "flwr") if here[k] != there.get(k)]
            told = ", ".join(f"{k} {there.get(k)}" for k in ("fedbraid", "flwr", "torch", "python"))
            todo = f"here: {', '.join(f'{k} {here[k]}' for k in differ)}; install the same" if differ else ""
            yield Finding("versions there", told, not differ, todo)
            fleet = operator.nodes()
            online = sum(n.online for n in fleet)
            yield Finding(
                "nodes",
                f"{online} of {len(fleet)} connected",
                online > 0,
                "" if online else "fedbraid deploy node, on each of them",
            )
            yield from _newest(operator)
    except EngineError as error:
        todo = "fedbraid deploy link, or the tunnel: ssh -L 8001:127.0.0.1:8001 SERVER"
        yield Finding("SuperLink, for the operator", str(error), False, todo)
        return
    open_ = [t for t in look(folder, nodes, control) if not t.good]
    yield Finding(
        "who may do what",
        f"{len(open_)} things are open" if open_ else "as it should be",
        not open_,
        "fedbraid deploy check" if open_ else "",
    )


def _newest(operator: Operator) -> Iterator[Finding]:
    runs = operator.runs()
    if not runs:
        yield Finding("newest run", "none yet", True, "fedbraid deploy run")
        return
    run = runs[0]
    how = " ".join(str(run[k]) for k in ("status", "how", "details") if run[k])
    broken = traceback(operator.log(run["run"]))
    yield Finding(
        f"run {run['run']}",
        broken.splitlines()[-1] if broken else how,
        run["how"] in ("", "completed") and not broken,
        broken,
    )


def traceback(log: str) -> str:
    """The last traceback in a log, nothing where there is none."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    found = re.findall(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*\S.*", plain)
    return found[-1] if found else ""


def status(folder: Path, control: str, run: int | None = None) -> dict[str, Any]:
    """What the SuperLink knows, and what the run's own folder tells where it can be read from here."""
    with Operator(folder, control) as operator:
        fleet, runs = operator.nodes(), operator.runs()
        wanted = next((r for r in runs if run is None or r["run"] == run), None)
        log = operator.log(wanted["run"]) if wanted else ""
    told: dict[str, Any] = {
        "nodes": [{"node": str(n.id), "status": n.status, "key": n.fingerprint[:16]} for n in fleet],
        "run": wanted and {**wanted, "run": str(wanted["run"])},
        "log": [plain(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in log.strip().splitlines()[-10:]],
        "traceback": traceback(log),
        "folder": None,
    }
    out = Path(str((wanted or {}).get("config", {}).get("out", "")))
    if wanted and out.is_absolute():
        with contextlib.suppress(OSError, ValueError):
            told["folder"] = json.loads((out / "status.json").read_text())
    return told
