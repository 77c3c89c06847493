"""`fedbraid report`: runs as one HTML file, and as figures and tables for papers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbraid.cli.show import Json, Quiet, entry, facts, give
from fedbraid.errors import ConfigError, reading, unknown
from fedbraid.run.formatting import Record, format_bytes

if TYPE_CHECKING:
    from fedbraid.report.collect import Collection

Runs = Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders, or folders of comparisons.")]
Goal = Annotated[
    float | None, typer.Option(help="Also report steps, bytes and time to this test accuracy, e.g. 0.95")
]


def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="File of the page [default: report.html, in the run folder if there is one only]",
        ),
    ] = None,
    target: Goal = None,
    axis: Annotated[
        str, typer.Option(help="Horizontal axis of --figure: step, bytes, time or flops.")
    ] = "step",
    figures: Annotated[
        list[Path] | None,
        typer.Option(
            "--figure",
            help="Also draw the curves into this .pdf, .svg or .png file; a name that begins with 'timeline' draws who"
            " trained when. May be given several times.",
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Also write every step of every run to this CSV file")
    ] = None,
    latex: Annotated[Path | None, typer.Option(help="Also write the final table to this file")] = None,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Include unfinished runs")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a self-contained HTML report of one or more runs.

    Runs that differ in nothing but their seed become one curve with its 95 % interval.

    \b
    Examples:
      fedbraid report runs/digits-fedavg-1
      fedbraid report runs/digits-compare-1 --target 0.9 -o report.html
      fedbraid report runs/a runs/b --figure curves.pdf --figure curves.svg --axis bytes --csv steps.csv --latex table.tex
      fedbraid report runs/digits-fedbuff-1 --figure timeline.svg
    """
    from fedbraid.report import figure, page, tables, timeline
    from fedbraid.report.collect import collect
    from fedbraid.study.stats import AXES

    if axis not in AXES:
        raise unknown("axis", axis, AXES)
    with reading(", ".join(map(str, runs))):
        found = collect(runs, target, unfinished)
        data = page.describe(found)
    report_path = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    contents: dict[Path, bytes] = {report_path: page.render(data).encode(errors="replace")}
    for path, kind in [(path, figure.kind_of(path)) for path in figures or []]:
        is_timeline = path.name.startswith("timeline")
        drawn = timeline.figure(_clocked(found)) if is_timeline else figure.of_groups(data, axis)
        contents[path] = figure.as_bytes(drawn, kind)
    if csv is not None:
        contents[csv] = tables.as_csv(found).encode(errors="replace")
    if latex is not None:
        contents[latex] = tables.as_latex(data).encode(errors="replace")
    write(contents)
    if json:
        sizes = {str(p): len(b) for p, b in contents.items()}
        return give({"files": sizes, "verdict": data["verdict"], "rows": data["rows"]})
    if not quiet:
        facts({str(p): format_bytes(len(b)) for p, b in contents.items()})
        if data["verdict"]:
            entry("", data["verdict"])


def _clocked(found: Collection) -> list[Record]:
    """The records of the first run that has a clock, or of the first."""
    runs = [run.records for group in found.groups for run in group.runs]
    return next((r for r in runs if any("start_times" in record for record in r)), runs[0])


def write(contents: dict[Path, bytes]) -> None:
    """Write all files or none, once all contents are complete."""
    temporaries: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            if path.is_dir():
                raise ConfigError(f"{path} is a folder; name a file")
            temporaries[path] = path.with_name(f".{path.name}.part")
            try:
                temporaries[path].write_bytes(content)
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file") from error
        for path, temporary in temporaries.items():
            temporary.replace(path)
    finally:
        for temporary in temporaries.values():
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
