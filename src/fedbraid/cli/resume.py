"""`fedbraid resume`: continue a run."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbraid.cli import config as cfg
from fedbraid.cli import options as o
from fedbraid.cli.run import Asked, keep
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
        if (run / file).exists() and not (run / "run.json").exists():
            command = file.partition(".")[0]
            raise RunError(
                f"{run} is a {kind}; use fedbraid {command} {shlex.quote(str(run))}, which resumes it"
            )
    Folder(run).config()  # a folder that holds no run is refused first
    before = Asked.of(run)
    asked = _changed(before, target, track, patience, keep_best)
    if max_bytes_up is not None:
        asked = replace(asked, max_bytes_up=None if max_bytes_up == "none" else parse_bytes(max_bytes_up))
    if metric is not None:
        asked = replace(asked, metric=_measured(Folder(run), metric))
    over = asked == before and (run / "model.safetensors").exists()
    watching = [] if over else asked.callbacks()  # trackers need not hear of a run that is only read back

    def go(callbacks: list[Any]) -> Result:
        return resume_run(
            run,
            callbacks=[*callbacks, *watching],
            progress=False,
            **sections["run"],
            **sections["call"],
        )

    keep(run, json, quiet, asked, go)


def _measured(folder: Folder, name: str) -> str:
    """A metric that the run's records have, if it has any."""
    found = [k for r in folder.records() if "loss" in r for k, v in r.items() if isinstance(v, float)]
    if found and name not in found:
        raise unknown("metric of this run", name, sorted({*found} - {"time", "norm", "lr"}))
    return name


def _changed(
    asked: Asked, target: float | None, track: str | None, patience: int | None, keep_best: bool | None
) -> Asked:
    """What was asked with what is asked now on top."""
    if target is not None:
        number("target", target, "(0, 1]", "is not a fraction such as 0.95")
        asked = replace(asked, target=target)
    if track is not None:
        asked = replace(asked, track=None if track == "none" else track)
    if patience is not None:
        asked = replace(asked, patience=None if patience == 0 else patience)
    return asked if keep_best is None else replace(asked, keep_best=keep_best)
