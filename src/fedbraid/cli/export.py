"""`fedbraid export`: a run's final model for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbraid.cli.show import Json, Quiet, give
from fedbraid.run.formatting import format_bytes


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, such as runs/mnist-fedavg-1.")],
    out: Annotated[
        Path, typer.Argument(metavar="FILE", help="Ends in .safetensors, .pt (TorchScript) or .onnx.")
    ],
    format: Annotated[
        str | None, typer.Option(help="'safetensors', 'torchscript' or 'onnx', where the name does not say.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the final model of a run as safetensors, TorchScript or ONNX.

    \b
    Examples:
      fedbraid export runs/mnist-fedavg-1 model.onnx
      fedbraid export runs/mnist-fedavg-1 model.pt
    """
    from fedbraid.run.export import export as write

    path = write(run, out, format)
    if json:
        give({"file": str(path), "bytes": path.stat().st_size})
    elif not quiet:
        print(f"{path}  {format_bytes(path.stat().st_size)}")
