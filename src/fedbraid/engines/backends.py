"""The gradient function of a backend's name, and what refuses it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fedbraid.core.local_training import Gradient
from fedbraid.core.traits import ExamplePrivacy
from fedbraid.engines.auto import WORTH, expected_seconds, faster, guess, hands, note_compiled
from fedbraid.engines.autograd import LoopGradient, VmapGradient
from fedbraid.engines.engine import Setup
from fedbraid.engines.native_backend import Native
from fedbraid.engines.per_example import per_example_gradient
from fedbraid.errors import ConfigError, EngineError, unknown

if TYPE_CHECKING:
    from fedbraid.data.task import Task

log = logging.getLogger("fedbraid")

PRECISIONS: dict[str, torch.dtype | None] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def gradient(setup: Setup, backend: str, threads: int = 0, precision: torch.dtype | None = None) -> Gradient:
    """The gradient function of this name; "auto" compiles a native one where there is enough to do."""
    task, traits = setup.task, setup.algorithm.rule.traits()
    if precision is not None and backend == "native":
        raise ConfigError("native gradients are float32; use backend='loop' or 'vmap' for another precision")
    if backend not in ("auto", "native", "vmap", "loop"):
        raise unknown("backend", backend, ["auto", "native", "vmap", "loop"])
    if traits.example_privacy is not None and task.compares:
        raise ConfigError(
            "the loss looks at other models, whose outputs tell of other examples; use a loss of the outputs alone with"
            " unit='example'"
        )
    if traits.local_loop is not None or task.compares:
        if backend in ("native", "vmap"):
            what = "the loss looks at other models" if task.compares else "the local loop is the user's own"
            raise ConfigError(f"{what}, which needs plain autograd; use backend='loop'")
        return LoopGradient(task, precision)
    own = traits.example_privacy
    if own is not None:
        return _private(setup, own, backend, threads, precision)
    if backend == "auto":
        seconds = expected_seconds(task, setup.work, setup.participations)
        large = seconds >= WORTH and precision is None
        found = faster(task, setup.work, seconds / hands(setup.cohort)) if large else None
        native = _native(task, threads, required=False) if found == "native" else None
        if native is not None:
            return native
        backend = "vmap" if found == "vmap" else guess(task, seconds)
    if backend == "native":
        return _native(task, threads)
    if backend == "vmap":
        _check_vmap(task)
        return VmapGradient(task, precision)
    return LoopGradient(task, precision)


def _check_vmap(task: Task) -> None:
    if task.stochastic:
        raise ConfigError(
            "the model draws random numbers (dropout), which vmap cannot count; use backend='loop'"
        )
    if task.ragged:
        raise ConfigError("vmap needs clients' samples to be of one length; use backend='loop'")
    if task.full_layout.buffers is not None:
        raise ConfigError("vmap cannot follow running statistics (BatchNorm); use backend='loop'")


def _private(
    setup: Setup, own: ExamplePrivacy, backend: str, threads: int, precision: torch.dtype | None
) -> Gradient:
    """The gradient function of this name that hides single examples."""
    task = setup.task
    for name, module in task.module().named_modules():
        if isinstance(module, _BatchNorm):
            raise ConfigError(
                f"model has {type(module).__name__} at {name!r}, which mixes the examples of a batch, so that no clip bounds"
                " what one of them does; use GroupNorm with unit='example'"
            )
    few = backend == "auto" and expected_seconds(task, setup.work, setup.participations) < WORTH
    if backend == "native" or (backend == "auto" and precision is None and not few):
        native = _native(task, threads, required=backend == "native", own=own)
        if native is not None:
            return native
    if backend == "vmap":
        _check_vmap(task)
    return per_example_gradient(own, task, backend, precision)


@overload
def _native(
    task: Task, threads: int, required: Literal[True] = True, own: ExamplePrivacy | None = None
) -> Native: ...
@overload
def _native(task: Task, threads: int, required: bool, own: ExamplePrivacy | None = None) -> Native | None: ...
def _native(
    task: Task, threads: int, required: bool = True, own: ExamplePrivacy | None = None
) -> Native | None:
    on_cpu = task.device == torch.device("cpu")
    why = Native.supports(task, own is not None) if on_cpu else "the task is not on the CPU"
    if why is None:
        try:
            native = Native(task, threads, examples=own)
            if own is None:
                note_compiled(task)
            return native
        except EngineError as error:
            why = str(error)
    if required:
        raise EngineError(f"the native backend cannot run this task: {why}")
    log.info("native gradients are off: %s", why)
    return None
