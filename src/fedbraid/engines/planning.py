"""The facts of a job and of this machine, and the plan that holds for them here."""

from __future__ import annotations

import logging
import multiprocessing
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedbraid.core.device import available_cores
from fedbraid.core.local_training import Gradient
from fedbraid.core.work import Work, batch_sizes, step_counts
from fedbraid.data import tree
from fedbraid.data.task import Task
from fedbraid.data.tree import Padded
from fedbraid.engines.autograd import VmapGradient, why_not_vmap
from fedbraid.engines.choice import EnginePlan, Facts, Machine, choose
from fedbraid.engines.cost_model import Model
from fedbraid.engines.engine import Setup
from fedbraid.engines.frozen_features import FrozenFeatureCache
from fedbraid.engines.native_backend import Native
from fedbraid.engines.per_example import vmap_follows_examples
from fedbraid.errors import EngineError
from fedbraid_native.build import compiler, lanes

log = logging.getLogger("fedbraid")

CACHE = 2**20  # bytes of a core's own cache


def settle(setup: Setup, facts: Facts, threads: int = 0) -> tuple[EnginePlan, Gradient | None]:
    """The plan for a job, and its compiled gradient, on so many threads, where it has one.

    What can only be tried is tried when a plan wants it: whether the model can be compiled, and whether vmap follows it. Where
    compiling fails, the plan without compiled code holds, and says so.
    """
    task = setup.task
    private = setup.algorithm.rule.traits().example_privacy
    while True:
        plan = choose(facts)
        if plan.backend == "native":
            if (why := Native.supports(task, private is not None)) is None:
                try:
                    return plan, Native(task, threads, examples=private)
                except EngineError as error:
                    log.warning("plain autograd trains, because compiled gradients failed: %s", error)
                    why = f"compiled gradients failed: {error}"
            facts = replace(facts, no_native=why)
        elif plan.backend == "vmap" and not (
            vmap_follows_examples(task) if private else why_not_vmap(task) is None
        ):
            facts = replace(facts, vmap=False)
        else:
            log.info("%s", plan.reason)
            return plan, None


def facts_of(setup: Setup, engine: str = "auto", cores: int = 0, precise: bool = True) -> Facts:
    """What is known of a job before it begins; `cores` are those that the engine was given, all where it is 0."""
    task, work = setup.task, setup.work
    private = setup.algorithm.rule.traits().example_privacy is not None
    n = _mean_size(task)
    on_cpu = task.device.type == "cpu"
    refused = None if precise else "compiled gradients are float32"
    return Facts(
        model=_model(task),
        batch=int(batch_sizes(n, work)[0]),
        steps=int(step_counts(n, work)[0]),
        cohort=setup.cohort,
        participations=setup.participations,
        machine=machine(cores),
        runs=setup.runs,
        engine=engine,
        device=task.device.type,
        plain=_needs_plain(setup),
        no_native=refused,
        vmap=private or (VmapGradient.can_follow(task) and (not on_cpu or task.summary.is_linear_chain)),
        per_example=private,
        frozen=not private and FrozenFeatureCache.suits(task),
        wide_recurrent=4 * task.summary.recurrent_weights >= CACHE,
        mean_length=mean_batch_length(task, work),
    )


def _needs_plain(setup: Setup) -> str | None:
    """Why nothing but plain autograd in one process computes a job, None where other backends do."""
    if setup.task.compares:
        return "the loss looks at other models"
    return None if setup.algorithm.rule.traits().local_loop is None else "the local loop is custom"


def machine(cores: int = 0) -> Machine:
    """This one."""
    return Machine(
        cores=cores or available_cores(),
        lanes=lanes(),
        capability=torch.backends.cpu.get_cpu_capability(),
        compiler=compiler() is not None,
        forks="fork" in multiprocessing.get_all_start_methods(),
    )


def _model(task: Task) -> Model:
    s = task.summary
    return Model(s.layers, s.multiply_adds, s.activations, s.cells, task.full_layout.size)


def mean_batch_length(task: Task, work: Work) -> float:
    """The mean length of batches that are cut to their longest sample, relative to the longest sample of all."""
    leaf = next((leaf for leaf in tree.leaves(task.inputs) if isinstance(leaf, Padded)), None)
    if leaf is None:
        return 1.0
    lengths = leaf.lengths.sort().values.double()
    size = float(batch_sizes(_mean_size(task), work)[0])
    below = (
        torch.linspace(0, 1, len(lengths) + 1, dtype=torch.float64) ** size
    )  # the probability that all of a batch are
    return float((lengths * below.diff()).sum() / leaf.shape[1])


def _mean_size(task: Task) -> NDArray[np.int64]:
    """The samples of a typical client, at least one."""
    return np.array([max(1, round(task.sizes.mean())) if task.clients else 1], np.int64)
