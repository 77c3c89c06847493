"""`status.json` of a run's folder: what the server last said, and whether it still lives."""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from pathlib import Path
from typing import Any

from fedbraid.deploy.node_table import NodeTable
from fedbraid.deploy.transport import EDGE
from fedbraid.deploy.troubles import Troubles, Wait

FILE = "status.json"
SHOWN = 1000  # nodes
SILENT_S = 8.0  # without a word for so long, a server is said to be silent: it writes about every second


def describe(
    table: NodeTable, now: float, state: str, step: int, steps: int, trouble: Troubles, wait: Wait,
    error: BaseException | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What `status.json` holds."""
    asked = [node for node, _ in table.pending()]
    nodes = sorted(
        table.nodes.values(), key=lambda n: (n.state.value != "barred", n.client < 0, n.client, n.name)
    )[:SHOWN]
    return {
        "state": state, "error": "" if error is None else str(error),
        "traceback": "" if error is None else "".join(traceback.format_exception(error))[-10_000:],
        "step": step, "steps": steps, "busy": len(asked), "nodes": len(table.ready), "trouble": trouble.shown(),
        "pid": os.getpid(), "host": socket.gethostname(), "at": time.time(), "wait": wait.note(),
        "fleet": [
            {
                "client": n.client, "name": n.name, "state": "edge" if n.name.startswith(EDGE) else n.state.value, "here": n.is_connected, "why": n.barred if n.state.value == "barred" else "",
                "seen": round(now - n.last_seen, 1) if n.last_seen else None,
                "asked": None if n.request is None else round(now - n.request.since, 1),
            }
            for n in nodes if n.state.value != "gone"
        ],
    }  # fmt: skip


def read(folder: Path) -> dict[str, Any]:
    """The file, with the age of the last word, and `life`: running, silent, dead, or how it ended; {} where there is none."""
    try:
        told: dict[str, Any] = json.loads((folder / FILE).read_text())
        age = max(0.0, time.time() - float(told["at"]))
        told["age"], told["life"] = round(age, 1), str(told["state"])
        is_local = told.get("host") == socket.gethostname()
        if told["state"] == "running" and is_local and not _lives(int(told["pid"])):
            told["life"] = "dead"
        elif told["state"] == "running" and age > SILENT_S:
            told["life"] = "silent"
        return told
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _lives(pid: int) -> bool:
    """Whether this process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
