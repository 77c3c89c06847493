"""`fedbraid resume`: continue a run."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbraid.cli import config as cfg
from fedbraid.cli import options as o
from fedbraid.cli.run import WatchSettings, keep
from fedbraid.cli.show import Json, Quiet, waiting
from fedbraid.core.check import number
from fedbraid.errors import RunError, unknown
from fedbraid.run.formatting import parse_bytes

if TYPE_CHECKING:
    from fedbraid.run.checkpoint import Folder
    from fedbraid.run.result import Result

Track = Annotated[str | None, typer.Option(help="Log to other trackers, or to 'none'; see `fedbraid run`")]
Patience = Annotated[
    int | None, typer.Option(help="Stop after another number of evaluations without improvement; 0: never")
]
Target = Annotated[float | None, typer.Option(help="Stop at another test accuracy, e.g. 0.99.")]
MaxBytesUp = Annotated[
    str | None, typer.Option(help="Stop at another number of uploaded bytes, e.g. 50MB, or 'none'.")
]
Metric = Annotated[str | None, typer.Option(help="Another metric for --patience and --keep-best")]
KeepBest = Annotated[
    bool | None, typer.Option("--keep-best/--no-keep-best", help="Store the best model, or not")
]


@o.with_options(o.some("ignore_divergence", "allow_numeric_changes"))
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, such as runs/mnist-fedavg-1.")],
    target: Target = None,
    max_bytes_up: MaxBytesUp = None,
    track: Track = None,
    patience: Patience = None,
    keep_best: KeepBest = None,
    metric: Metric = None,
    sections: cfg.Config = {},  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Resume an interrupted run. The result is bit-identical to an uninterrupted one.

    The run's --target, --max-bytes-up, --track, --patience, --keep-best and --metric are stored; give them to change them. A
    run that ended early continues when one of these changes. Where torch, the CPU or the compiler changed, resume says
    which and asks for --allow-numeric-changes.

    \b
    Examples:
      fedbraid resume runs/mnist-fedavg-1
      fedbraid resume runs/mnist-fedavg-1 --track none --json
      fedbraid resume runs/mnist-fedavg-1 --target 0.99
    """
    with waiting(f"loading {run}", json or quiet):
        from fedbraid.run.checkpoint import Folder
        from fedbraid.run.simulate import resume as resume_run

    for file, kind in (("compare.json", "comparison"), ("sweep.json", "sweep"), ("choose.json", "choice")):
        if os.path.exists(run / file) and not os.path.exists(run / "run.json"):  # False for names too long
            command = file.partition(".")[0]
            raise RunError(
                f"{run} is a {kind}; use fedbraid {command} {shlex.quote(str(run))}, which resumes it"
            )
    Folder(run).config()  # refuses a folder without a run first
    before = WatchSettings.of(run)
    watch = _changed(before, target, track, patience, keep_best)
    if max_bytes_up is not None:
        watch = replace(watch, max_bytes_up=None if max_bytes_up == "none" else parse_bytes(max_bytes_up))
    if metric is not None:
        watch = replace(watch, metric=_measured(Folder(run), metric))
    over = watch == before and (run / "model.safetensors").exists()
    watching = [] if over else watch.callbacks()  # trackers are not started for a run that is only reported

    def go(callbacks: list[Any]) -> Result:
        return resume_run(
            run,
            callbacks=[*callbacks, *watching],
            progress=False,
            **sections["run"],
            **sections["call"],
        )

    keep(run, json, quiet, watch, go)


def _measured(folder: Folder, name: str) -> str:
    """A metric that the run's records have, if it has any."""
    found = [k for r in folder.records() if "loss" in r for k, v in r.items() if isinstance(v, float)]
    if found and name not in found:
        raise unknown("metric of this run", name, sorted({*found} - {"time", "norm", "lr"}))
    return name


def _changed(
    watch: WatchSettings,
    target: float | None,
    track: str | None,
    patience: int | None,
    keep_best: bool | None,
) -> WatchSettings:
    """The folder's settings, overridden by the present options."""
    if target is not None:
        number("target", target, "(0, 1]", "is not a fraction such as 0.95")
        watch = replace(watch, target=target)
    if track is not None:
        watch = replace(watch, track=None if track == "none" else track)
    if patience is not None:
        watch = replace(watch, patience=None if patience == 0 else patience)
    return watch if keep_best is None else replace(watch, keep_best=keep_best)
