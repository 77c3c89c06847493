"""Small charts for notebooks as inline SVG: no script, no extra, readable on light and dark pages."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import numpy as np

from fedbraid.data.counts import Counts
from fedbraid.report.figure import COLOURS

WIDE_ROW, HIGH, LEFT, BELOW = 360, 120, 44, 18
POINTS, CLIENTS, LABELS = 120, 180, 20  # that are drawn at most

Curve = tuple[Sequence[float], Sequence[float]]  # x and y


def lines(curves: Mapping[str, Curve], across: str, percent: bool = False) -> str:
    """Named curves over one axis, with the ends of both axes; nothing where there are fewer than two points."""
    points = {
        name: np.array([(x, y) for x, y in zip(*c) if np.isfinite(y)], float) for name, c in curves.items()
    }
    points = {
        name: p[np.linspace(0, len(p) - 1, min(len(p), POINTS)).round().astype(int)]
        for name, p in points.items()
        if len(p) > 1
    }
    if not points:
        return ""
    both = np.concatenate(list(points.values()))
    low, high = both.min(0), both.max(0)
    span = np.where(high > low, high - low, 1.0)

    def path(p: np.ndarray) -> str:
        at = (p - low) / span * (WIDE_ROW - LEFT - 6, -(HIGH - BELOW - 8)) + (LEFT, HIGH - BELOW)
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in at)

    def say(v: float) -> str:
        return f"{100 * v:.1f} %" if percent else f"{v:.3g}"

    drawn = [
        f'<polyline fill="none" stroke="{COLOURS[i % 6]}" stroke-width="1.5" points="{path(p)}"/>'
        for i, p in enumerate(points.values())
    ]
    drawn += [
        _text(LEFT - 4, 12, say(high[1]), "end"), _text(LEFT - 4, HIGH - BELOW, say(low[1]), "end"),
        _text(LEFT, HIGH - 4, f"{low[0]:g}", "start"), _text(WIDE_ROW - 6, HIGH - 4, f"{high[0]:g} {across}", "end"),
    ]  # fmt: skip
    key = "".join(
        f'<span style="margin-right:1em"><span style="color:{COLOURS[i % 6]}">━</span> {html.escape(name)}</span>'
        for i, name in enumerate(points)
    )
    return f"<div>{_svg(WIDE_ROW, HIGH, drawn)}<div style='font-size:85%'>{key}</div></div>"


def partition(counts: Counts) -> str:
    """A client a column and a label a row, darker where the client has more samples of the label."""
    some = counts[np.linspace(0, len(counts) - 1, min(len(counts), CLIENTS)).round().astype(int)]
    some = some[:, np.linspace(0, some.shape[1] - 1, min(some.shape[1], LABELS)).round().astype(int)]
    wide, high = max(2.0, WIDE_ROW / len(some)), 9
    most = max(1, int(some.max()))
    cells = [
        f'<rect x="{i * wide:.1f}" y="{j * high}" width="{wide:.1f}" height="{high}" fill="{COLOURS[0]}"'
        f' fill-opacity="{0.1 + 0.9 * int(some[i, j]) / most:.2f}"/>'
        for i, j in zip(*np.nonzero(some))
    ]
    picture = _svg(round(wide * len(some)), high * some.shape[1], cells)
    return f"<div>{picture}<div style='font-size:85%'>clients across, labels down; darkest: {most} samples</div></div>"


def _svg(wide: int, high: int, elements: Sequence[str]) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}">{"".join(elements)}</svg>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="10" fill="currentColor">{html.escape(text)}</text>'
