"""The curves as a figure for papers and notebooks, drawn with matplotlib (extra `plot`)."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbraid.core.metric_names import falls
from fedbraid.errors import ConfigError, MissingExtra
from fedbraid.run.checkpoint import Record
from fedbraid.study.stats import METRICS

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito's
RANGE_BELOW = 5  # seeds: intervals of fewer fill the picture, so their range is drawn, as on the page
KINDS = ("pdf", "svg", "png")
DASHES = ("-", "--", ":", "-.")
AXES = {
    "step": "server steps",
    "bytes": "bytes up and down",
    "time": "simulated time",
    "flops": "FLOPs on clients",
    "energy": "energy of clients",
}
UNITS = {"bytes": "B", "flops": "", "energy": "J"}
TITLES = dict(zip(METRICS, ("test accuracy", "test loss", "training loss", "norm of updates", "staleness")))


def figure(curves: Mapping[str, Record], metric: str, axis: str = "step", target: float | None = None) -> Any:
    """A matplotlib figure of named curves, with their intervals."""
    drawn = _figure(6.4)
    _draw(drawn.subplots(), curves, metric, axis, target)
    return drawn


def fronts(curves: Mapping[str, Record], metric: str, target: float | None = None) -> Any:
    """Curves over time and over bytes; a ring marks the ends that no other beats in both what it took and its worth."""
    drawn, sign = _figure(11.0), -1.0 if falls(metric) else 1.0
    for pane, axis in zip(drawn.subplots(1, 2, sharey=True), ("time", "bytes")):
        _draw(pane, curves, metric, axis, target)
        ends = {name: (c["x"][axis][-1], c["mean"][-1]) for name, c in curves.items()}
        for i, (x, y) in enumerate(ends.values()):
            better = ((a <= x and sign * (b - y) >= 0) and (a, b) != (x, y) for a, b in ends.values())
            if not any(better):
                pane.plot([x], [y], "o", markersize=11, fillstyle="none", color=COLOURS[i % 7])
    return drawn


def _figure(width: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("drawing a figure", "plot") from error
    drawn: Any = Figure(figsize=(width, 4.0), layout="constrained")
    drawn._repr_png_ = lambda: png(drawn)  # a notebook shows it, whether or not pyplot was imported
    return drawn


def _draw(pane: Any, curves: Mapping[str, Record], metric: str, axis: str, target: float | None) -> None:
    from matplotlib.ticker import EngFormatter, PercentFormatter

    for i, (name, curve) in enumerate(curves.items()):
        style: dict[str, Any] = {"color": COLOURS[i % 7], "linestyle": DASHES[i // 7 % 4]}
        pane.plot(curve["x"][axis], curve["mean"], label=name, **style)
        if curve["half"] is not None:
            low, high = curve["low"], curve["high"]
            if curve["seeds"] >= RANGE_BELOW:
                low, high = ([m + s * h for m, h in zip(curve["mean"], curve["half"])] for s in (-1, 1))
            if metric == "accuracy":  # an interval may reach beyond what there is
                low, high = ([min(1.0, max(0.0, v)) for v in ends] for ends in (low, high))
            pane.fill_between(curve["x"][axis], low, high, color=style["color"], alpha=0.16, linewidth=0)
    pane.set(xlabel=AXES[axis], ylabel=TITLES.get(metric, metric))
    if axis in UNITS:
        pane.xaxis.set_major_formatter(EngFormatter(unit=UNITS[axis]))
    if metric == "accuracy":
        pane.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        pane.set_ylim(top=min(1.0, pane.get_ylim()[1]))
        if target is not None:
            pane.axhline(target, color="0.5", linestyle=(0, (6, 4)), linewidth=1)
    pane.grid(color="0.92")
    pane.set_axisbelow(True)
    pane.spines[["top", "right"]].set_visible(False)
    if curves:
        pane.legend(frameon=False, fontsize="small")


def png(drawn: Any) -> bytes:
    """A figure as a small PNG."""
    out = io.BytesIO()
    drawn.savefig(out, format="png", dpi=90)
    return out.getvalue()


def kind_of(path: Path) -> str:
    """What a figure's file is, by its suffix.

    >>> kind_of(Path("five.svg"))
    'svg'
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in KINDS:
        raise ConfigError(f"a figure's name must end in .pdf, .svg or .png, got {str(path)!r}")
    return kind


def as_bytes(drawn: Any, kind: str) -> bytes:
    """A figure as a file's bytes, the same for the same figure."""
    from matplotlib import rc_context

    out = io.BytesIO()
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with rc_context({"svg.hashsalt": "fedbraid"}):
        drawn.savefig(out, format=kind, dpi=160, metadata=undated.get(kind))
    return out.getvalue()


def of_groups(data: Record, axis: str = "step", metric: str | None = None) -> Any:
    """The report's main chart."""
    key = metric or data["metric"]
    curves = {g["name"]: c for g in data["groups"] if (c := g["curves"].get(key)) and axis in c["x"]}
    return figure(curves, key, axis, data["target"])
