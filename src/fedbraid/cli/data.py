"""`fedbraid data`: how data is split across clients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbraid.cli import config as cfg
from fedbraid.cli import options as o
from fedbraid.cli.show import Json, Quiet, console, facts, give
from fedbraid.errors import DataError

if TYPE_CHECKING:
    from fedbraid.data.counts import Counts
    from fedbraid.data.task import Task


@o.with_options(o.some("clients", "partition"))
def data(
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="A task such as mnist or 'mnist(clients=500)'.")
    ],
    seed: Annotated[int | None, typer.Option(help="Seed of the partition [default: 0]")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Also draw it into this .pdf, .svg or .png file (extra plot).")
    ] = None,
    sections: cfg.Config = {},  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Plot the number of samples per label and client, with sizes and the partition's hash.

    \b
    Examples:
      fedbraid data digits --partition 'label_chunks(1)'
      fedbraid data mnist --clients 500 --partition 'dirichlet(0.5)' --figure partition.svg
      fedbraid data cifar10 --partition 'iid_mix(0.5)' --json
    """
    from fedbraid.data.counts import label_counts
    from fedbraid.report import picture
    from fedbraid.study.recipe import task_name

    loaded = cfg.task_of({"name": task} | sections["task"] | cfg.given(seed=seed))
    try:
        counts = label_counts(loaded)
    except DataError as error:  # then sizes are all there is to say
        if figure is not None:
            raise
        if json:
            return give(_summary(loaded) | {"counts": None})
        return None if quiet else facts(_summary(loaded) | {"not drawn": error})
    if figure is not None:
        picture.save(counts, loaded.spec or loaded.name, figure)
    if json:
        return give(_summary(loaded, counts) | {"counts": counts.tolist()})
    if not quiet:
        screen = console()
        screen.print(picture.as_text(counts, screen.width))
        task_line = {"task": task_name(loaded.spec or loaded.name)}
        facts(_summary(loaded, counts) | task_line | ({} if figure is None else {"figure": figure}))
    return None


def _summary(task: Task, counts: Counts | None = None) -> dict[str, Any]:
    from fedbraid.data import tree

    sizes = task.sizes
    return {
        "task": task.spec or task.name,
        "clients": task.clients,
        "samples": int(sizes.sum()),
        "labels": None if counts is None else int(counts.shape[1]),
        "smallest": int(sizes.min()),
        "mean": round(float(sizes.mean()), 2),
        "largest": int(sizes.max()),
        "labels_each": None if counts is None else round(float((counts > 0).sum(1).mean()), 2),
        "test": 0 if task.test is None else tree.length(task.test[0]),
        "parameters": task.layout.size,
        "partition_hash": _hash(task),
        "data_hash": task.fingerprint,
    }


def _hash(task: Task) -> str:
    from fedbraid.report.picture import partition_hash

    return partition_hash(task)
