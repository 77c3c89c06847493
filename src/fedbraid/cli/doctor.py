"""`fedbraid doctor`: what is here, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbraid.cli.show import Json, Quiet, entry, give
from fedbraid.errors import FedbraidError, RunError, install
from fedbraid.run.formatting import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from fedbraid.data.sources import Home

EXTRAS = {
    "data": ("pyarrow", "PIL"), "hub": ("datasets",), "hf": ("transformers", "peft"), "plot": ("matplotlib",), "sweep": ("optuna",),
    "tensorboard": ("tensorboard",), "mlflow": ("mlflow",), "wandb": ("wandb",), "onnx": ("onnx",),
    "frames": ("pandas", "polars"), "privacy": ("dp_accounting",), "ray": ("ray",), "flower": ("flwr",),
    "nats": ("nats", "nkeys", "cryptography"), "secure": ("cryptography",), "browser": ("playwright",),
}  # fmt: skip
MARKS = {"ok": "✓", "missing": "–", "wrong": "✗"}


@dataclass(frozen=True)
class Finding:
    """The result of one check; "missing" is optional, "wrong" stops fedbraid from working."""

    what: str
    state: str
    detail: str
    do: str = ""


Why = Annotated[Path | None, typer.Option(metavar="RUN", help="Show which engine a run took, and why")]


def doctor(why: Why = None, json: Json = False, quiet: Quiet = False) -> None:
    """Check the machine, the compiler, the extras and the data, and say what to do.

    Exit code 0 where fedbraid works, whatever optional things are missing, and 2 where it does not.

    \b
    Examples:
      fedbraid doctor
      fedbraid doctor --json
      fedbraid doctor --why runs/first
    """
    if why is not None:
        return explain(why, json)
    found = [*machine(), *native(), *extras(), *data()]
    if json:
        give([asdict(f) for f in found])
    elif not quiet:
        wide = max(len(f.what) for f in found)
        for f in found:
            entry(f"{MARKS[f.state]} {f.what:<{wide}}  ", f"{f.detail}{f'; {f.do}' if f.do else ''}")
    if wrong := [f for f in found if f.state == "wrong"]:
        raise RunError(f"{wrong[0].what}: {wrong[0].detail}; {wrong[0].do}")


def explain(run: Path, json: bool) -> None:
    """Print which engine a run used, and why."""
    from fedbraid.run.checkpoint import Folder

    config = Folder(run).config()
    engine, plan = config["engine"], config.get("plan")
    if json:
        give({"engine": engine, "plan": plan})
    else:
        entry(f"{engine}: ", plan or "asked for")


def versions() -> str:
    """The versions for a bug report: fedbraid, Python, torch, the compiler and the extras."""
    import numpy
    import torch

    from fedbraid import __version__
    from fedbraid_native import build

    installed = [extra for extra, names in EXTRAS.items() if all(importlib.util.find_spec(m) for m in names)]
    command = build.compiler()
    lines = [
        f"fedbraid {__version__}",
        f"python {platform.python_version()}, {platform.system()} {platform.machine()}",
        f"torch {torch.__version__}, numpy {numpy.__version__}",
        f"compiler {'none' if command is None else build.version(tuple(command))}",
        f"extras {', '.join(installed) or 'none'}",
    ]
    return "\n".join(lines)


def machine() -> Iterator[Finding]:
    import torch

    from fedbraid import __version__
    from fedbraid.core.device import available_cores

    yield Finding(
        "fedbraid",
        "ok",
        f"{__version__}, Python {platform.python_version()} on {platform.system()} {platform.machine()}",
    )
    yield Finding("torch", "ok", f"{torch.__version__}{', CUDA' if torch.cuda.is_available() else ''}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("machine", "ok", f"{available_cores()} cores, {format_bytes(memory)} of memory")
    free = shutil.disk_usage(Path.cwd()).free
    if free < 1e9:
        yield Finding("disk", "missing", f"{format_bytes(free)} free here", "free some, for run folders grow")
    else:
        yield Finding("disk", "ok", f"{format_bytes(free)} free here")
    try:
        with tempfile.TemporaryFile(dir=Path.cwd()):
            yield Finding("folder", "ok", "run folders can be made here")
    except OSError as error:
        yield Finding(
            "folder",
            "missing",
            f"nothing can be written here ({error.strerror})",
            "go to another folder, or give --out",
        )


def native() -> Iterator[Finding]:
    """Check that C++ gradients compile and agree with autograd, on the digits."""
    from fedbraid.algorithms.averaging import fedavg
    from fedbraid.core.work import Work
    from fedbraid.data import tasks
    from fedbraid.run.simulate import simulate
    from fedbraid.schedule import rounds
    from fedbraid_native.build import compiler

    command = compiler()
    if command is None:
        yield Finding(
            "compiler", "missing", "no C++ compiler, so gradients are slower", "install g++ or set CXX"
        )
    else:
        yield Finding("compiler", "ok", command[0])
    task = tasks.load("digits", clients=10)

    def x(backend: str) -> Tensor:
        engine = f"in_process(backend={backend!r})"
        return simulate(
            task, fedavg(), Work(lr=0.1), rounds(1, clients=2), engine=engine, evaluate_every=None
        ).x

    try:
        plain = x("loop")
    except FedbraidError as error:
        yield Finding("training", "wrong", str(error), "reinstall fedbraid")
        return
    yield Finding("training", "ok", "a round on digits runs")
    if command is None:
        return
    try:
        difference = float((x("native") - plain).abs().max())
    except FedbraidError as error:
        yield Finding("native gradients", "missing", str(error), "autograd is used instead")
        return
    if difference > 1e-4:
        yield Finding(
            "native gradients",
            "wrong",
            f"they differ from autograd by {difference:.1e}",
            "give --engine 'in_process(backend=\"vmap\")' and tell us",
        )
    else:
        yield Finding("native gradients", "ok", f"built, and equal to autograd within {difference:.0e}")


def extras() -> Iterator[Finding]:
    for extra, modules in EXTRAS.items():
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        if missing:
            yield Finding(f"extra {extra}", "missing", f"no {' and no '.join(missing)}", install(extra))
        else:
            yield Finding(f"extra {extra}", "ok", ", ".join(modules))


def data() -> Iterator[Finding]:
    from fedbraid.data import tasks
    from fedbraid.data.sources import folder

    path = folder(None)
    if path is None:
        yield Finding(
            "data",
            "missing",
            "FEDBRAID_DATA is not set",
            "set it to a folder of data sets; digits and synthetic need none",
        )
        return
    if not path.is_dir():
        yield Finding(
            "data", "missing", f"FEDBRAID_DATA is {path}, which is not a folder", "make it, or set another"
        )
        return
    for name in tasks.names():
        yield _data_set(name)


def _data_set(name: str) -> Finding:
    home = _homes().get(name)
    if home is None:
        return Finding(f"data {name}", "ok", "needs no files")
    if home.find(None, "*", "*/*"):
        return Finding(f"data {name}", "ok", "files found")
    detail, _, do = str(home.missing(None)).partition("; ")
    return Finding(f"data {name}", "missing", detail, do)


def _homes() -> dict[str, Home]:
    from fedbraid.data import celeba, cifar, femnist, mnist, mushrooms, sent140, shakespeare

    return {
        "celeba": celeba.HOME, "cifar10": cifar.CIFAR10, "cifar100": cifar.CIFAR100, "emnist": mnist.EMNIST,
        "femnist": femnist.HOME, "fmnist": mnist.FMNIST, "mnist": mnist.MNIST, "mushrooms": mushrooms.HOME,
        "sent140": sent140.HOME, "shakespeare": shakespeare.HOME, "tinyshakespeare": shakespeare.TINY,
    }  # fmt: skip
