"""Where clients run. `engine=` takes one of these by name, as text such as "pool(workers=2)", or the object."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedbraid.engines.in_process import (
    InProcess,  # these modules are imported before their builders, of the same
)
from fedbraid.engines.pool import Pool  # names, are defined: `fedbraid.engines.pool` is the builder
from fedbraid.engines.ray import Ray
from fedbraid.errors import ConfigError, unknown

if TYPE_CHECKING:
    from fedbraid.core.work import Work
    from fedbraid.data.task import Task
    from fedbraid.engines.engine import Engine


def in_process(
    block: int | None = None,
    backend: str = "auto",
    threads: int | None = None,
    precision: str = "float32",
) -> InProcess:
    """Clients in this process, vectorised in blocks; backend "auto", "native", "vmap" or "loop".

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


def choose(engine: str | Engine, task: Task, work: Work, cohort: int, steps: int, run: str = "") -> Engine:
    """The engine for `engine=`; "auto" takes the one that is fastest for this task, measured where that is worth it.

    `run` says which run it is for: the same one goes the same way again.
    """
    if not isinstance(engine, str):
        if not hasattr(engine, "train"):
            raise ConfigError(f"engine={engine!r} runs no clients; use 'auto', 'in_process' or 'pool'")
        return engine
    if engine != "auto":
        from fedbraid.parse import call

        name, args, kwargs = call(engine)
        if name not in ENGINES:
            raise unknown("engine", name, [*ENGINES, "auto"])
        try:
            return ENGINES[name](*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"engine {engine!r}: {error}") from error
    from fedbraid.engines import auto

    seconds = auto.expected_seconds(task, work, cohort * steps)
    if seconds < auto.WORTH:
        return in_process()
    chosen = auto.best(task, work, cohort, seconds, run)
    fastest: Engine = pool(backend="loop") if chosen.way == "pool" else in_process(backend=chosen.way)
    return auto.Watched(fastest, chosen, task)
