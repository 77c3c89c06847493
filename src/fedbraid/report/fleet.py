"""What a deployment's folder tells of its nodes, for the live page."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from fedbraid.run.checkpoint import Record

MOST = 200  # nodes, and troubles, that are shown
SILENT = 30.0  # seconds without a word from the server after which the page says so


def describe(folder: Path) -> Record | None:
    """Who is there, what was asked of whom when, what is waited for and what went wrong; None where there is no fleet."""
    try:
        told = json.loads((folder / "status.json").read_text())
        return _read(told)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or damaged
        return None


def _read(told: dict[str, Any]) -> Record:
    age = max(0.0, time.time() - float(told["at"]))
    running, wait = told["state"] == "running", told["wait"]
    fleet = [
        {
            "name": str(one["name"]), "client": int(one["client"]), "here": bool(one["here"]),
            "asked": None if one["asked"] is None else round(float(one["asked"]) + (age if running else 0.0)),
        }
        for one in told["fleet"]
    ]  # fmt: skip
    until = wait["until"]
    return {
        "state": str(told["state"]),
        "nodes": int(told["nodes"]),
        "wait": str(wait["for"]) if running else "",
        "since": round(max(0.0, time.time() - float(wait["since"]))),
        "left": None if until is None else round(float(until) - time.time()),
        "silent": round(age) if running and age > SILENT else None,
        "fleet": fleet[:MOST],
        "more": max(0, len(fleet) - MOST),
        "trouble": [{k: str(one[k]) for k in ("node", "why", "times")} for one in told["trouble"][:MOST]],
        "error": str(told.get("traceback") or told["error"]),
    }
