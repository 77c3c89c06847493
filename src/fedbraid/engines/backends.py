"""The gradient function of a backend's name, and what refuses it."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fedbraid.core.local_training import Gradient
from fedbraid.core.traits import ExamplePrivacy
from fedbraid.data.task import Task
from fedbraid.engines.autograd import LoopGradient, VmapGradient, why_not_vmap
from fedbraid.engines.choice import EnginePlan
from fedbraid.engines.engine import Setup
from fedbraid.engines.native_backend import Native
from fedbraid.engines.per_example import per_example_gradient
from fedbraid.engines.planning import facts_of, settle
from fedbraid.errors import ConfigError, EngineError, unknown

PRECISIONS: dict[str, torch.dtype | None] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def gradient(setup: Setup, backend: str, threads: int = 0, precision: torch.dtype | None = None) -> Gradient:
    """The gradient function of this name; "auto" is what the plan for clients in this process says."""
    return planned(setup, "in_process", backend, threads, threads, precision)[0]


def planned(
    setup: Setup,
    engine: str,
    backend: str,
    cores: int = 0,
    threads: int = 0,
    precision: torch.dtype | None = None,
) -> tuple[Gradient, EnginePlan | None]:
    """The gradient function of this name for an engine with so many cores; for "auto" also the plan that chose it."""
    if backend not in ("auto", "native", "vmap", "loop"):
        raise unknown("backend", backend, ["auto", "native", "vmap", "loop"])
    _check(setup, backend, precision)
    plan = None
    if backend == "auto":
        plan, compiled = settle(setup, facts_of(setup, engine, cores, precision is None), threads)
        if compiled is not None:
            return compiled, plan
        backend = plan.backend
    elif backend == "vmap":
        _check_vmap(setup)
    private = setup.algorithm.rule.traits().example_privacy
    if backend == "native":
        return _native(setup.task, threads, private), plan
    if private is not None:
        return per_example_gradient(private, setup.task, backend, precision), plan
    return (VmapGradient if backend == "vmap" else LoopGradient)(setup.task, precision), plan


def _check(setup: Setup, backend: str, precision: torch.dtype | None) -> None:
    """Refuse a backend that cannot compute what the algorithm and the loss ask for."""
    task, traits = setup.task, setup.algorithm.rule.traits()
    private = traits.example_privacy is not None
    if precision is not None and backend == "native":
        raise ConfigError("native gradients are float32; use backend='loop' or 'vmap' for another precision")
    if private and task.compares:
        raise ConfigError(
            "the loss looks at other models, whose outputs tell of other examples; use a loss of the outputs alone with"
            " unit='example'"
        )
    if (traits.local_loop is not None or task.compares) and backend in ("native", "vmap"):
        what = "the loss looks at other models" if task.compares else "the local loop is custom"
        raise ConfigError(f"{what}, which needs plain autograd; use backend='loop'")
    if private:
        for name, module in task.module().named_modules():
            if isinstance(module, _BatchNorm):
                raise ConfigError(
                    f"model has {type(module).__name__} at {name!r}, which mixes the examples of a batch, so that no clip"
                    " bounds what one of them does; use GroupNorm with unit='example'"
                )


def _check_vmap(setup: Setup) -> None:
    """Refuse vmap where it fails, or would be silently wrong."""
    task = setup.task
    if task.stochastic:
        raise ConfigError(
            "the model draws random numbers (dropout), which vmap cannot count; use backend='loop'"
        )
    if task.ragged:
        raise ConfigError("vmap needs clients' samples to be of one length; use backend='loop'")
    if task.full_layout.buffers is not None:
        raise ConfigError("vmap cannot follow running statistics (BatchNorm); use backend='loop'")
    if (why := why_not_vmap(task)) is not None:
        raise ConfigError(f"{why}; use backend='loop'")


def _native(task: Task, threads: int, private: ExamplePrivacy | None) -> Native:
    """Compiled gradients, or the sentence that says why there are none."""
    on_cpu = task.device == torch.device("cpu")
    why = Native.supports(task, private is not None) if on_cpu else "the task is not on the CPU"
    if why is None:
        try:
            return Native(task, threads, examples=private)
        except EngineError as error:
            why = str(error)
    raise EngineError(f"the native backend cannot run this task: {why}")
