"""The numerics fingerprint: what a run's bits depend on besides its configuration, such as versions and processor."""

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
    """An engine, which describes how it computes a run's numbers."""

    def describe(self) -> str: ...


def describe(engine: Described) -> Record:
    """The numerics fingerprint of this engine, once it is open."""
    from fedbraid import __version__

    facts: Record = {
        "fedbraid": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "processor": cpu_model()[0],
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    if "native" in engine.describe():
        facts |= _native(engine)
    return facts


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
def as_before(recorded: Record | None) -> Iterator[None]:
    """Use as many threads as the run in a folder did, if its numbers depend on them."""
    now, bits = torch.get_num_threads(), (recorded or {}).get("bits", {})
    try:
        if "threads" in bits and "kernels" not in bits:  # compiled gradients are the same with any number
            integer("threads", bits["threads"])
            torch.set_num_threads(bits["threads"])
        yield
    finally:
        torch.set_num_threads(now)


def agree(folder: Folder, current: Record, step: int, accept: bool) -> None:
    """Refuse to resume with changed numerics unless accepted; then run.json records from which step on."""
    recorded = folder.config()
    before = recorded.get("bits", {})
    changed = [
        f"{key} was {before.get(key)} and is {current.get(key)}"
        for key in {**before, **current}
        if before.get(key) != current.get(key)
    ]
    if not changed:
        return
    if step and not accept:
        raise RunError(
            f"{folder.path} would resume with changed numerics: {', '.join(changed)}; resume it where it began,"
            " or accept the change with allow_numeric_changes=True"
        )
    history = [*recorded.get("bits_before", []), {**before, "until": step}] if step else []
    folder.write_config({**recorded, "bits": current, "bits_before": history})
