"""Who trained when: every job of a run on a clock, for the page and for figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedbraid.errors import MissingExtra, RunError
from fedbraid.run.checkpoint import Record

KEYS = {"client": "clients", "version": "versions", "start_times": "start_times", "end_times": "end_times"}
NAMED = 40  # clients whose names fit beside a figure


def jobs(records: Sequence[Record]) -> dict[str, list[Any]] | None:
    """Columns of jobs: client, version, start, end and the step that took each; None without a clock."""
    clocked = [r for r in records if "start_times" in r]
    if not clocked:
        return None
    found = {name: [v for r in clocked for v in r[key]] for name, key in KEYS.items()}
    return found | {"step": [r["step"] - 1 for r in clocked for _ in r["start_times"]]}


def figure(records: Sequence[Record], names: Sequence[str] = ()) -> Any:
    """A matplotlib figure: a lane a client, a bar a job, colored by staleness; upright lines are server steps."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("drawing a timeline", "plot") from error
    found = jobs(records)
    if found is None:
        raise RunError(
            "the run has no clock, so its records do not say who trained when; give durations= to the schedule"
        )
    clients = sorted(set(found["client"]))
    lanes = {client: lane for lane, client in enumerate(clients)}
    staleness = [s - v for s, v in zip(found["step"], found["version"])]
    most = max(1, *staleness)
    drawn: Any = Figure(figsize=(6.4, max(2.4, min(8.0, 1.2 + 0.16 * len(clients)))), layout="constrained")
    pane = drawn.subplots()
    colors = colormaps["viridis"]
    spans = [end - start for start, end in zip(found["start_times"], found["end_times"])]
    pane.barh(
        [lanes[c] for c in found["client"]], spans, left=found["start_times"], height=0.8,
        color=[colors(0.9 * s / most) for s in staleness], linewidth=0,
    )  # fmt: skip
    for time in (r["time"] for r in records):
        pane.axvline(time, color="0.6", linewidth=0.4, zorder=0)
    pane.set(xlabel="simulated time", ylabel="client")
    if len(clients) <= NAMED:
        pane.set_yticks(range(len(clients)), [names[c] if c < len(names) else str(c) for c in clients])
    for value in sorted({0, most // 2, most}):
        pane.barh([0], [0], color=colors(0.9 * value / most), label=str(value))
    pane.legend(title="staleness", frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    pane.spines[["top", "right"]].set_visible(False)
    return drawn
