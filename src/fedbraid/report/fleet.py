"""The status of a deployment's nodes, read from its folder, for reports and the live page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fedbraid.deploy import status_file
from fedbraid.run.checkpoint import Record

MOST = 200  # nodes, and troubles, that are displayed
STATES = {
    "dead": "DEAD: the server's process has ended", "silent": "SILENT: the server has not been heard of",
}  # fmt: skip


def describe(folder: Path) -> Record | None:
    """Connected nodes, their requests, the reason of waiting and the troubles; None unless the folder is a deployment's."""
    try:
        status = status_file.read(folder)
        return _read(status) if status else None
    except (ValueError, KeyError, TypeError, AttributeError):  # corrupt
        return None


def names(folder: Path) -> dict[int, str]:
    """Nodes' names by client number."""
    try:
        return {
            int(one["client"]): str(one["name"])[:40] for one in status_file.read(folder).get("fleet", [])
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _read(status: dict[str, Any]) -> Record:
    age, lives = status["age"], status["life"] == "running"
    running, wait = status["state"] == "running", status["wait"]
    fleet = [
        {
            "name": str(one["name"]), "client": int(one["client"]), "here": bool(one["here"]) and lives,
            "seen": None if one.get("seen") is None else round(float(one["seen"]) + age),
            "asked": None if one["asked"] is None else round(float(one["asked"]) + (age if running else 0.0)),
        }
        for one in status["fleet"]
    ]  # fmt: skip
    until = wait["until"]
    return {
        "state": STATES.get(status["life"], str(status["state"])),
        "nodes": int(status["nodes"]),
        "wait": str(wait["for"]) if lives else "",
        "since": round(max(0.0, time.time() - float(wait["since"]))),
        "left": None if until is None else round(float(until) - time.time()),
        "silent": round(age) if running and not lives else None,
        "fleet": fleet[:MOST],
        "more": max(0, len(fleet) - MOST),
        "trouble": [{k: str(one[k]) for k in ("node", "why", "times")} for one in status["trouble"][:MOST]],
        "error": str(status.get("traceback") or status["error"]),
    }
