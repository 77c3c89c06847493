"""What a run's bits depend on besides its configuration: versions, processor, threads, compiled code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fedbraid.core.check import integer
from fedbraid.errors import RunError
from fedbraid.run.checkpoint import Folder, Record
from fedbraid_native.build import FLAGS, compiler, cpu_model, version


class Described(Protocol):
    """Whatever computes a run's numbers, and says how."""

    def describe(self) -> str: ...


def describe(engine: Described) -> Record:
    """What the numbers of this engine, once open, depend on here."""
    from fedbraid import __version__

    said: Record = {
        "fedbraid": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "processor": cpu_model()[0],
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    if "native" in engine.describe():
        said |= _native(engine)
    return said


def _native(engine: Described) -> Record:
    source: Any = getattr(getattr(engine, "grad", None), "source", None)
    if source is None:  # the workers have it
        package = Path(str(files("fedbraid_native")))
        named = sorted((str(f), f) for f in package.rglob("*") if f.suffix in (".py", ".hpp"))
        source = "".join(file.read_text() for _, file in named)
    command = compiler()
    return {
        "kernels": hashlib.blake2b(source.encode(), digest_size=8).hexdigest(),
        "flags": " ".join(FLAGS),
        "compiler": None if command is None else version(tuple(command)),
    }


@contextmanager
def as_before(known: Record | None) -> Iterator[None]:
    """As many threads as the run in a folder had, where its numbers depend on them."""
    now, bits = torch.get_num_threads(), (known or {}).get("bits", {})
    try:
        if "threads" in bits and "kernels" not in bits:  # compiled gradients give the same on any number
            integer("threads", bits["threads"])
            torch.set_num_threads(bits["threads"])
        yield
    finally:
        torch.set_num_threads(now)


def agree(folder: Folder, here: Record, step: int, accept: bool) -> None:
    """Refuse to go on with other bits, unless told; then run.json says from which step on."""
    known = folder.config()
    before = known.get("bits", {})
    apart = [
        f"{key} was {before.get(key)} and is {here.get(key)}"
        for key in {**before, **here}
        if before.get(key) != here.get(key)
    ]
    if not apart:
        return
    if step and not accept:
        raise RunError(
            f"{folder.path} would go on with other bits than it began with: {', '.join(apart)}; resume it where it began,"
            " or take them with --allow-numeric-changes (allow_numeric_changes=True)"
        )
    history = [*known.get("bits_before", []), {**before, "until": step}] if step else []
    folder.write_config({**known, "bits": here, "bits_before": history})
