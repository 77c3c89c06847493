"""A result in a notebook: as a table, a plot, and a data frame."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedbraid.errors import MissingExtra, RunError
from fedbraid.report.figure import figure
from fedbraid.run.formatting import Record, format_bytes, format_share
from fedbraid.study import stats

if TYPE_CHECKING:
    from fedbraid.run.simulate import Result


def flat(history: Sequence[Record]) -> list[Record]:
    """Records without nesting: `up.delta` instead of `up: {delta: …}`."""
    rows = []
    for record in history:
        row: Record = {}
        for key, value in record.items():
            row |= (
                {f"{key}.{name}": v for name, v in value.items()} if isinstance(value, dict) else {key: value}
            )
        rows.append(row)
    return rows


def to_pandas(history: Sequence[Record]) -> Any:
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra("a pandas frame", "frames") from error
    return pandas.DataFrame(flat(history)).set_index("step", drop=False)


def to_polars(history: Sequence[Record]) -> Any:
    try:
        import polars
    except ImportError as error:
        raise MissingExtra("a polars frame", "frames") from error
    return polars.DataFrame(flat(history), infer_schema_length=None)


def plot(result: Result, metric: str | None = None, axis: str = "step") -> Any:
    """A matplotlib figure of one measurement over what was spent."""
    from fedbraid.study import flops

    key = metric or stats.judged_by([stats.Runs("", [0], [result.history], [None])]) or "train_loss"
    spent = None
    if axis == "flops":
        if result.work is None:
            raise RunError(
                "the result does not know its work, so its FLOPs cannot be counted; plot over 'bytes'"
            )
        spent = flops.by_step(flops.of_clients(result.task, result.algorithm, result.work), result.history)
    name = result.algorithm.name or "run"
    curve = stats.curve(stats.Runs(name, [0], [result.history], [spent]), key)
    if curve is None or axis not in curve["x"]:
        raise RunError(f"the run has no {key} over {axis} to plot; give another metric, such as 'train_loss'")
    return figure({name: curve}, key, axis)


def as_html(result: Result) -> str:
    """The table that a notebook shows."""
    accuracy, loss = result.last("accuracy"), result.last("loss")
    rows = {
        "algorithm": result.algorithm.name or "made in Python",
        "task": result.task.spec or result.task.name,
        "steps": result.state.t,
        "accuracy": None if accuracy is None else format_share(accuracy),
        "loss": None if loss is None else f"{loss:.4f}",
        "bytes up": format_bytes(result.bytes_up),
        "bytes down": format_bytes(result.bytes_down),
        "engine": result.engine,
        "LoRA": result.lora,
        "folder": result.out,
    }
    cells = "".join(
        f"<tr><th style='text-align:left'>{k}</th><td style='text-align:left'>{html.escape(str(v))}</td></tr>"
        for k, v in rows.items()
        if v is not None
    )
    return f"<table>{cells}</table>"
