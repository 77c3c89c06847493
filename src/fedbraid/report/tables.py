"""A report's figures for other programs and for papers: CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from fedbraid.report.collect import Collection
from fedbraid.run.checkpoint import Record
from fedbraid.study import stats


def as_csv(found: Collection) -> str:
    """Every record of every run as a line: cumulative costs and metrics."""
    out = io.StringIO()
    metrics = stats.measured(found.statistics())
    columns = ["name", "seed", "run", *stats.AXES, "bytes_up", "bytes_down", *metrics]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for group, runs in zip(found.groups, found.statistics()):
        for run, spent in zip(group.runs, runs.spent):
            up = down = 0
            for i, record in enumerate(run.records):
                up, down = up + record["bytes_up"], down + record["bytes_down"]
                row = {
                    "name": group.name,
                    "seed": run.config["seed"],
                    "run": run.path,
                    "bytes_up": up,
                    "bytes_down": down,
                }
                row |= {axis: values[i] for axis, values in spent.items()}
                row |= {m: record[m] for m in metrics if m in record}
                writer.writerow([row.get(c, "") for c in columns])
    return out.getvalue()


def as_latex(data: Record) -> str:
    """The final table, for `booktabs`."""
    percent = data["metric"] == "accuracy"
    target = data["target"]
    head = ["", r"Accuracy (\%)" if percent else escape(data["metric"].capitalize()), "Up (MB)", "Down (MB)"]
    head += [] if target is None else [rf"Steps to {100 * target:g}\,\%"]
    finals = [
        r | {"final": r["final"] and stats.Interval(**r["final"])} for r in data["rows"] if not r["failed"]
    ]
    best = stats.best_of(finals)
    lines = [
        r"\begin{tabular}{l" + "r" * (len(head) - 1) + "}",
        r"\toprule",
        " & ".join(head) + r" \\",
        r"\midrule",
        *(" & ".join(_row(r, percent, target, best)) + r" \\" for r in data["rows"]),
        r"\bottomrule",
        *([_TIED.format(columns=len(head))] if len(best) > 1 else []),
        r"\end{tabular}",
    ]
    return "\n".join([f"% {data['task']}", *lines, ""])


# the best is bold only if its 95 % interval overlaps no other
_TIED = r"\multicolumn{{{columns}}}{{l}}{{\footnotesize $^\dagger$ tied for the best: 95\,\% intervals overlap}} \\"


def _row(r: Record, percent: bool, target: float | None, best: Sequence[str]) -> list[str]:
    value, scale, digits = r["final"], 100 if percent else 1, 2 if percent else 4
    if value is None:
        text = "--"
    else:
        mean = f"{scale * value['mean']:.{digits}f}"
        half = "" if value["half"] is None else rf" \pm {scale * value['half']:.{digits}f}"
        mean = rf"\mathbf{{{mean}}}" if best == [r["name"]] else mean
        tied = r"\dagger" if len(best) > 1 and r["name"] in best else ""
        text = f"${mean}{half}{tied and '^' + tied}$"
    cells: list[str] = [escape(r["name"]), text, *(_megabytes(r[w]) for w in ("bytes_up", "bytes_down"))]
    if target is not None:
        steps = r["to_target"].get("step")
        cells.append("--" if steps is None else f"{steps['mean']:.1f}")
    return cells


def _megabytes(count: float | None) -> str:
    return "--" if count is None else f"{count / 1e6:.2f}"


def escape(text: str) -> str:
    """
    >>> escape("100 % of a_b")
    '100 \\\\% of a\\\\_b'
    """
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)
