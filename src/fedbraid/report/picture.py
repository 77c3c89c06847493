"""The partition as a picture: label counts of a task's clients, as text for the terminal and as a file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbraid.data.counts import Counts
from fedbraid.errors import ConfigError, MissingExtra
from fedbraid.report.figure import as_bytes, kind_of

if TYPE_CHECKING:
    from rich.text import Text

    from fedbraid.data.task import Task

SHADES = " ·░▒▓█"
COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan")


def partition_hash(task: Task) -> str:
    """A hash of the partition."""
    h = hashlib.blake2b(digest_size=8)
    h.update(np.ascontiguousarray(task.offsets).tobytes())
    h.update(task.rows.numpy().tobytes())
    return h.hexdigest()


def as_text(counts: Counts, width: int, height: int = 32) -> Text:
    """A label a line and a client a column, darker where more of the client's samples have that label.

    Clients and labels that do not fit are left out evenly.
    """
    from rich.text import Text

    clients = _spread(len(counts), max(1, width - 5))
    labels = _spread(counts.shape[1], height)
    fractions = counts / counts.sum(1, keepdims=True)
    level = np.ceil(fractions * (len(SHADES) - 1)).astype(int)
    text = Text()
    for label in labels:
        text.append(f"{label:>3}  ")
        cells = "".join(SHADES[level[client, label]] for client in clients)
        text.append(cells.rstrip() + "\n", style=COLOURS[label % len(COLOURS)])
    caption = "every client" if len(clients) == len(counts) else f"{len(clients)} of {len(counts)} clients"
    text.append(f"     {caption}, a column each; a line a label", style="dim")
    return text


def _spread(count: int, most: int) -> Counts:
    """At most `most` of `count` indices, evenly spread."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)


def save(counts: Counts, title: str, path: Path) -> None:
    """The same picture as a file, by its suffix: labels below, sizes above."""
    kind = kind_of(path)
    try:
        content = as_bytes(_figure(counts, title), kind)
    except ImportError as error:
        raise MissingExtra("drawing a figure", "plot") from error
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another --figure") from error


def _figure(counts: Counts, title: str) -> Any:
    from matplotlib.figure import Figure

    clients, labels = counts.shape
    figure = Figure(figsize=(10, 2.4 + min(6.0, 0.22 * labels)), layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3])
    top.bar(np.arange(clients), counts.sum(1), width=1.0, color="0.4")
    top.set(ylabel="samples", title=title)
    top.spines[["top", "right"]].set_visible(False)
    image = below.imshow(
        counts.T, aspect="auto", interpolation="nearest", cmap="Blues", origin="lower",
        extent=(-0.5, clients - 0.5, -0.5, labels - 0.5),
    )  # fmt: skip
    below.set(xlabel="client", ylabel="label")
    if labels <= 20:
        below.set_yticks(range(labels))
    figure.colorbar(image, ax=below, label="samples of this label")
    return figure
