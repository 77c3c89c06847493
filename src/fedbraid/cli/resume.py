"""`fedbraid resume`: continue a run."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from fedbraid.cli.run import Target, keep
from fedbraid.cli.show import Json, Quiet
from fedbraid.errors import RunError


def resume(
    run: Annotated[Path, typer.Argument(help="The run's folder, such as runs/mnist-fedavg-1.")],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a run that was stopped or killed, to the very bits of one that was not.

    \b
    Examples:
      fedbraid resume runs/mnist-fedavg-1
      fedbraid resume runs/mnist-fedavg-1 --json
    """
    from fedbraid.checkpoint import Folder
    from fedbraid.runs import resume as resume_run

    Folder(run).config()  # a folder that holds no run is refused first
    keep(run, json, quiet, _target(run), lambda callbacks: resume_run(run, callbacks=callbacks))


def _target(run: Path) -> float | None:
    """The accuracy at which the run was to end, where one was given."""
    path = run / Target.FILE
    try:
        return float(jsonlib.loads(path.read_text())["accuracy"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} cannot be read ({error}); remove it to run to the last step") from error
