"""Where clients run. `engine=` takes one of these by name, as text such as "pool(workers=2)", or the object."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fedbraid.engines.engine import Engine, Setup
from fedbraid.engines.in_process import InProcess
from fedbraid.engines.planning import facts_of, settle
from fedbraid.engines.pool import Pool
from fedbraid.engines.ray import Ray
from fedbraid.errors import ConfigError, unknown
from fedbraid.parse import call

# The builders below take the names of the modules that are imported above: `fedbraid.engines.pool` is the builder.


def in_process(
    block: int | None = None,
    backend: str = "auto",
    threads: int | None = None,
    precision: str = "float32",
) -> InProcess:
    """Clients in this process, vectorized in blocks; backend "auto", "native", "vmap" or "loop".

    With `precision="bfloat16"` or `"float16"`, PyTorch's autocast computes gradients; weights stay float32.
    """
    return InProcess(block, backend, threads, precision)


def pool(workers: int | None = None, backend: str = "auto", block: int | None = None) -> Pool:
    """Clients in worker processes of one thread each, by default as many as there are cores."""
    return Pool(workers, backend, block)


def ray(
    address: str | None = None,
    workers: int | None = None,
    backend: str = "auto",
    block: int | None = None,
    data: str = "store",
) -> Ray:
    """Clients on the nodes of a Ray cluster; without an address, Ray is started on this machine."""
    return Ray(address, workers, backend, block, data)


ENGINES: dict[str, Callable[..., Engine]] = {"in_process": in_process, "pool": pool, "ray": ray}


def from_text(text: str) -> Engine:
    """The engine that a text such as "pool(workers=2)" names."""
    name, args, kwargs = call(text)
    if name not in ENGINES:
        raise unknown("engine", name, [*ENGINES, "auto"])
    try:
        return ENGINES[name](*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"engine {text!r}: {error}") from error


def select(engine: str | Engine, setup: Setup, recorded: str | None = None) -> Engine:
    """The engine for `engine=`: "auto" takes what the plan for the job says, and a run that goes on what it began with."""
    if engine == "auto" and recorded is not None:
        engine = recorded
    if engine == "auto":
        plan, compiled = settle(setup, facts_of(setup))
        if plan.engine == "pool":
            return Pool(backend=plan.backend, plan=plan)
        return InProcess(backend=plan.backend, plan=plan, compiled=compiled)
    found = from_text(engine) if isinstance(engine, str) else engine
    if not hasattr(found, "train"):
        raise ConfigError(f"engine={engine!r} runs no clients; use 'auto', 'in_process' or 'pool'")
    if recorded is not None and getattr(found, "backend", "") == "auto":
        before = from_text(recorded)
        if type(before) is type(found):
            return dataclasses.replace(found, backend=before.backend)  # type: ignore[type-var, attr-defined]
    return found
