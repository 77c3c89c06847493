"""One self-contained HTML file: the page, its style and script, and the runs as JSON."""

from __future__ import annotations

import html
import json
import re
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from itertools import islice
from typing import Any

import numpy as np

from fedbraid.core.metric_names import falls
from fedbraid.errors import FedbraidError, RunError
from fedbraid.parse import evaluate
from fedbraid.report import fleet, timeline
from fedbraid.report.collect import Collection, Group
from fedbraid.run.checkpoint import Folder, Record
from fedbraid.run.config import SCHEDULES
from fedbraid.run.noise_outlook import promise
from fedbraid.run.run import CLIENTS
from fedbraid.study import recipe, stats

FILES = {
    "/*chart licence*/": "uplot/LICENSE", "/*chart style*/": "uplot/uPlot.min.css", "/*style*/": "page.css", "/*chart library*/": "uplot/uPlot.min.js",
    "/*charts*/": "charts.js", "/*script*/": "page.js",
}  # fmt: skip
JOBS = 40_000  # drawn in all timelines of a page together
MAX_ROWS = 400  # clients in a table
SUSPECTS, POINTS = 60, 80  # clients that a robust rule scored, and steps drawn of each
EVERY = 1500  # milliseconds between two refreshes of an unfinished run
QUIET = 30  # seconds without a step after which a run may have stopped


def describe(found: Collection, live: bool = False) -> Record:
    """All data of the page."""
    groups = found.statistics()
    key = stats.compared_by(groups, found.metric) or stats.compared_by(groups)
    if key is None and not live:
        where = found.groups[0].runs[0].path
        raise RunError(f"{where} has no evaluations to report; run it with --evaluate-every 1 and a test set")
    key = key or "train_loss"
    ranks = stats.ranks(groups, key)
    delta = {g.name: (g.config.get("privacy") or {}).get("delta") for g in found.groups}
    rows = [
        stats.summary(g, key, found.target)
        | {"rank": ranks.get(g.name), "failed": found.failed.get(g.name, 0), "delta": delta.get(g.name)}
        for g in [*groups, *_diverged(found)]
    ]
    config = found.config
    fleets = _fleets(found) if live else []
    silent, again = _silent(found) if live and not fleets else (None, "")
    return {
        "title": _title(found),
        "task": _about(found),
        "metric": key,
        "target": found.target,
        "points": stats.POINTS,
        "verdict": _verdict(found, rows),
        "rows": stats.plain(rows),
        "groups": [
            _group(g, s) | {"timeline": _timeline(g, JOBS // len(groups))}
            for g, s in zip(found.groups, groups)
        ],
        "clients": [one for g in found.groups if (one := _clients(g, key)) is not None],
        "suspects": [one for g in found.groups if (one := _suspects(g)) is not None],
        "partition": {"counts": None, "note": found.why}
        if found.task_summary is None
        else found.task_summary.partition,
        "footer": "Made by " + ", ".join(f"{k} {v}" for k, v in config.get("versions", {}).items()),
        "live": live,
        "real": any(g.config.get("real") for g in found.groups),
        "finished": found.finished,
        "progress": _progress(found),
        "every": EVERY,
        "silent": silent,
        "again": again,
        "fleets": fleets,
    }


def render(data: Record) -> str:
    """The page itself."""
    package = files("fedbraid.report")
    text = (package / "page.html").read_text("utf-8")
    embedded = json.dumps(finite(data), separators=(",", ":")).replace("<", "\\u003c")
    fillings = {
        "/*connect*/'none'": "'self'" if data["live"] else "'none'",
        "/*title*/": html.escape(data["title"]),
        **{mark: (package / file).read_text("utf-8") for mark, file in FILES.items()},
        "/*data*/": embedded,
    }
    marks = "|".join(re.escape(mark) for mark in fillings)
    return re.sub(
        marks, lambda found: fillings[found[0]], text
    )  # in one pass, so that inserted text is not searched again


def finite(value: Any) -> Any:
    """The value without NaN and infinities, which JSON lacks, and with numbers rounded to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list | tuple) else value


def _task(config: Record) -> str:
    return recipe.task_name(config["task"] or str(config.get("task_name")))


def _diverged(found: Collection) -> list[stats.Runs]:
    """Entries without a result for any seed."""
    names = {g.name for g in found.groups}
    return [stats.Runs(name, [], [], []) for name in found.failed if name not in names]


def _about(found: Collection) -> str:
    """The task in a line, its personal parameters, and the privacy spent if there is one algorithm."""
    config = found.config
    facts = [_task(config), f"{config['clients']} clients", f"{config.get('parameters', 0):,} parameters"]
    if personal := config.get("personal"):
        facts.append(f"personal: {', '.join(personal)}")
    if len(found.groups) == 1 and (private := _privacy(found.groups[0])) is not None:
        facts.append(private)
    return " · ".join(facts)


def _privacy(group: Group) -> str | None:
    """(ε, δ) and the unit they protect, over the seeds of a private algorithm."""
    spent = [r.records[-1]["epsilon"] for r in group.runs if r.records and "epsilon" in r.records[-1]]
    if not spent:
        return None
    return promise(max(spent), group.config.get("privacy")) or f"ε = {max(spent):.4g}"


def _title(found: Collection) -> str:
    names = [g.name for g in found.groups] + [g.name for g in _diverged(found)]
    task = found.config.get("task_name") or "a task"
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"{listed if len(listed) < 70 else f'{len(names)} entries'} on {task}"


def _verdict(found: Collection, rows: Sequence[Record]) -> str:
    if len(rows) < 2 or not found.finished:
        return ""
    verdict = stats.verdict([r for r in rows if not r["failed"]])
    return verdict + "".join(f" {name} diverged with {n} of its seeds." for name, n in found.failed.items())


def _progress(found: Collection) -> str:
    runs = [r for g in found.groups for r in g.runs]
    done = sum(r.records[-1]["step"] for r in runs if r.records)
    if len(runs) == 1:
        return f"step {done} of {runs[0].steps}"
    return f"{sum(r.finished for r in runs)} of {len(runs)} runs done, {done} of {sum(r.steps for r in runs)} steps"


def _silent(found: Collection) -> tuple[float | None, str]:
    """Seconds since the last step of any run, if that is long ago, and the command that resumes them."""
    waiting = [r for g in found.groups for r in g.runs if not r.finished]
    with suppress(OSError, ValueError):  # none is unfinished, or one has no step yet
        ago = time.time() - max((r.path / "metrics.jsonl").stat().st_mtime for r in waiting)
        if ago > QUIET:
            first = waiting[0]
            more = ("resume", first.path) if first.name is None else ("compare", first.path.parents[1])
            return ago, shlex.join(["fedbraid", *map(str, more)])
    return None, ""


def _fleets(found: Collection) -> list[Record]:
    """The nodes of each run that is a deployment."""
    runs = [(g.name, r) for g in found.groups for r in g.runs]
    described = ((name, fleet.describe(run.path)) for name, run in runs)
    return [about | {"name": name} for name, about in described if about is not None]


def _group(group: Group, runs: stats.Runs) -> Record:
    config = group.config
    settings = {
        "algorithm": config["algorithm"] or "made in Python",
        "work": config["work"],
        "schedule": config["schedule"],
    }
    settings |= config["parts"] | {"seeds": ", ".join(map(str, runs.seeds)), "engine": config.get("engine")}
    settings |= {"LoRA": config["lora"]} if "lora" in config else {}
    command = _command(group, runs.seeds)
    settings |= {"personal": ", ".join(config["personal"])} if config.get("personal") else {}
    settings |= {} if (private := _privacy(group)) is None else {"privacy": private}
    return {
        "name": group.name,
        "seeds": list(runs.seeds),
        "curves": {m: _plain_curve(stats.curve(runs, m)) for m in stats.measured([runs])},
        "up": _by_name(runs, "up"),
        "down": _by_name(runs, "down"),
        "command": command,
        "why": _no_command(config) if command is None else "",
        "settings": settings,
    }


def _clients(group: Group, key: str) -> Record | None:
    """The metric of each client on its local test set, the worst first; None if the first run did not evaluate it."""
    run = group.runs[0]
    path = run.path / CLIENTS
    if not path.exists():
        return None
    rows = Folder(run.path).read_json(CLIENTS)["clients"]
    by = key if rows and key in rows[0] else "loss"
    defined = [r for r in rows if r[by] is not None and np.isfinite(r[by])]
    defined.sort(key=lambda r: r[by] if falls(by) else -r[by], reverse=True)
    undefined = [r for r in rows if r not in defined]
    worst = max(1, len(defined) // 10)
    tenth = [r[by] for r in defined[:worst]]
    return {
        "name": group.name, "seed": run.config["seed"], "by": by, "worst": worst, "count": len(rows),
        "rows": [*defined, *undefined][:MAX_ROWS], "undefined": len(undefined),
        "mean": float(np.mean([r[by] for r in defined])) if defined else None, "worst_mean": float(np.mean(tenth)) if tenth else None,
    }  # fmt: skip


def _suspects(group: Group) -> Record | None:
    """A robust rule's records of each client of the first run: the steps that suspected it, norms and cosines."""
    run, by_client = group.runs[0], dict[int, Record]()
    for record in run.records:
        evaluated = record.get("judged")
        if evaluated is None:
            continue
        suspected, rejected = set(record["suspected"]), set(record.get("rejected", ()))
        numbers = dict(zip(evaluated["clients"], zip(evaluated["norm"], evaluated["cosine"])))
        for client in dict.fromkeys([*evaluated["clients"], *suspected]):
            one = by_client.setdefault(
                client,
                {"client": client, "steps": [], "norm": [], "cosine": [], "suspected": [], "rejected": 0},
            )
            one["rejected"] += client in rejected
            if client in suspected:
                one["suspected"].append(record["step"])
            if client in numbers:
                one["steps"].append(record["step"])
                for key, value in zip(("norm", "cosine"), numbers[client]):
                    one[key].append(value)
    if not by_client:
        return None
    rows = sorted(by_client.values(), key=lambda one: (-len(one["suspected"]), one["client"]))
    for one in rows[:SUSPECTS]:  # draw at most so many points
        every = -(-len(one["steps"]) // POINTS) or 1
        one |= {key: one[key][::every] for key in ("steps", "norm", "cosine")}
    last = run.records[-1]["step"]
    return {
        "name": group.name,
        "seed": run.config["seed"],
        "last": last,
        "count": len(rows),
        "rows": rows[:SUSPECTS],
    }


def _timeline(group: Group, most: int) -> Record | None:
    """Every job of the first run: its client, version and interval; None without a clock."""
    run = group.runs[0]
    jobs = timeline.jobs(run.records)
    if jobs is None:
        return None
    count = len(jobs["step"])
    every = -(-count // most)
    return {
        "name": group.name,
        "online": _online(run.config, max(jobs["end_times"]), most),
        "seed": run.config["seed"],
        "clients": max(run.config["clients"], *(c + 1 for c in jobs["client"])),
        "names": fleet.names(run.path) if run.config.get("real") else {},
        "steps": [r["time"] for r in run.records],
        "jobs": {name: values[::every] for name, values in jobs.items()},
        "note": "" if every == 1 else f"One job in {every} of {count:,} is drawn.",
    }


def _online(config: Record, until: float, most: int) -> Record | None:
    """The intervals in which clients were available, if the schedule has them and they are few enough to draw."""
    try:
        when = getattr(evaluate(config["schedule"], SCHEDULES, "schedule"), "availability", None)
    except FedbraidError:  # its file is missing or changed
        return None
    spans = [] if when is None else list(islice(when.spans(config["clients"], until), most + 1))
    if not 0 < len(spans) <= most:
        return None
    return dict(zip(("client", "from", "to"), (list(column) for column in zip(*spans)), strict=True))


def _plain_curve(curve: Record | None) -> Record | None:
    """The curve without points that are not finite."""
    if curve is None or all(np.isfinite(curve["mean"])):
        return curve
    keep = np.flatnonzero(np.isfinite(curve["mean"]))
    if not len(keep):
        return None
    return curve | {
        "x": {a: [v[i] for i in keep] for a, v in curve["x"].items()},
        "mean": [curve["mean"][i] for i in keep],
        **{k: None if curve[k] is None else [curve[k][i] for i in keep] for k in ("half", "low", "high")},
    }


def _by_name(runs: stats.Runs, direction: str) -> dict[str, float]:
    """Bytes by name, a mean over seeds."""
    sums: dict[str, float] = {}
    for history in runs.histories:
        for record in history:
            for name, size in record[direction].items():
                sums[name] = sums.get(name, 0) + size / len(runs.histories)
    return sums


def _command(group: Group, seeds: Sequence[int]) -> str | None:
    try:
        sections = recipe.sections(group.config, **_ends(group))
    except (FedbraidError, KeyError) as error:
        raise RunError(
            f"{group.runs[0].path / 'run.json'} is corrupt ({error}); restore a backup or start a new run"
        ) from error
    return None if sections is None else recipe.command(sections, seeds)


def _no_command(config: Record) -> str:
    """Why no command runs this configuration."""
    if config["task"] is None:
        return "The task was made in Python, so no command runs it."
    if not recipe.is_built_by_name(config):
        return "The algorithm was made in Python, so no command runs it."
    return "The schedule was made in Python, so no command runs it."


def _ends(group: Group) -> Record:
    """The accuracy and the number of bytes at which the run stops early."""
    path = group.runs[0].path / "target.json"
    target = Folder(path.parent).read_json("target.json") if path.exists() else {}
    return {"target": target.get("accuracy"), "max_bytes_up": target.get("max_bytes_up")}
