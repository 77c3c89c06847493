"""A result in a notebook: as a table, a plot, and a data frame."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from fedbraid.data import summary
from fedbraid.data.counts import label_counts
from fedbraid.data.task import Task
from fedbraid.errors import FedbraidError, MissingExtra, RunError
from fedbraid.report import sketch
from fedbraid.report import timeline as clocked
from fedbraid.report.figure import figure
from fedbraid.run.formatting import Record, format_bytes, format_percent
from fedbraid.run.result import Result
from fedbraid.study import stats
from fedbraid.study.compare import Comparison


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

    key = metric or stats.compared_by([stats.Runs("", [0], [result.history], [None])]) or "train_loss"
    spent = None
    if axis == "flops":
        if result.work is None:
            raise RunError(
                "the result does not know its work, so its FLOPs cannot be counted; plot over 'bytes'"
            )
        spent = flops.by_step(flops.of_clients(result.task, result.algorithm, result.work), result.history)
    name = result.algorithm.label
    curve = stats.curve(stats.Runs(name, [0], [result.history], [spent]), key)
    if curve is None or axis not in curve["x"]:
        raise RunError(f"the run has no {key} over {axis} to plot; give another metric, such as 'train_loss'")
    return figure({name: curve}, key, axis)


def timeline(result: Result) -> Any:
    """A matplotlib figure of who trained when."""
    return clocked.figure(result.history, result.task.client_names or ())


def as_html(result: Result) -> str:
    """The table that a notebook displays."""
    accuracy, loss = result.last("accuracy"), result.last("loss")
    rows = {
        "algorithm": result.algorithm.label,
        "task": result.task.spec or result.task.name,
        "steps": result.state.t,
        "accuracy": None if accuracy is None else format_percent(accuracy),
        "loss": None if loss is None else f"{loss:.4f}",
        "bytes up": format_bytes(result.bytes_up),
        "bytes down": format_bytes(result.bytes_down),
        "privacy": result.privacy,
        "engine": result.engine,
        "LoRA": result.lora,
        "folder": result.out,
    }
    key = stats.compared_by([stats.Runs("", [0], [result.history], [None])]) or "train_loss"
    evaluated = [r for r in result.history if key in r]
    chart = sketch.lines(
        {key: ([r["step"] for r in evaluated], [r[key] for r in evaluated])}, "steps", key == "accuracy"
    )
    return as_table(rows) + chart


def as_table(rows: Mapping[str, Any]) -> str:
    """Facts by name, escaped."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(k)}</th><td style='text-align:left'>{html.escape(str(v))}</td></tr>"
        for k, v in rows.items()
        if v is not None
    )
    return f"<table>{cells}</table>"


def task_as_html(task: Task) -> str:
    """The lines of `print(task)`, and the labels that each client holds."""
    try:
        picture = sketch.partition(label_counts(task))
    except FedbraidError:  # there are no labels to count, or they are on disk
        picture = ""
    return as_table(summary.facts(task)) + picture


def comparison_as_html(found: Comparison) -> str:
    """The table, the verdict, the gains and the curves of a comparison."""

    def table(head: list[str], rows: list[list[str]]) -> str:
        def line(tag: str, cells: list[str]) -> str:
            return (
                "<tr>"
                + "".join(f"<{tag} style='text-align:left'>{html.escape(c)}</{tag}>" for c in cells)
                + "</tr>"
            )

        return "<table>" + line("th", head) + "".join(line("td", row) for row in rows) + "</table>"

    curves = {
        g.name: (c["x"]["step"], c["mean"]) for g in found.groups if (c := stats.curve(g, found.metric))
    }
    gains = table(*found.gained()) if found.gains else ""
    chart = sketch.lines(curves, "steps", found.metric == "accuracy")
    return f"{table(*found.cells())}<p>{html.escape(found.verdict)}</p>{gains}{chart}"
