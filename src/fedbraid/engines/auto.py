"""Which way is fastest for this model on this machine: guessed for small jobs, measured once for large ones.

A small job takes the same way every time, so that it repeats to the bit; what was measured for a large one is
remembered for the model, the batch, the cohort and the machine, in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbraid.core.rule import Gradient
from fedbraid.data import tree
from fedbraid.data.batches import Plan, batch_sizes, step_counts
from fedbraid.engines.gradients import Loop, Vmap
from fedbraid.engines.native import Native
from fedbraid.engines.native.build import cache_folder, cpu_model
from fedbraid.errors import EngineError

if TYPE_CHECKING:
    from fedbraid.core.work import Work
    from fedbraid.data.task import Task

log = logging.getLogger("fedbraid")

WORTH = 0.5  # seconds of plain autograd from which compiling and measuring pay
OVERHEAD, RATE = (
    4e-4,
    2e10,
)  # seconds of any autograd step, and operations a second beyond it: rough on purpose


def expected_seconds(task: Task, work: Work, visits: int) -> float:
    """About how long plain autograd on one core would take for so many visits of clients."""
    n = np.array([task.sizes.mean().round()], np.int64)
    step = OVERHEAD + 6 * multiply_adds(task) * int(batch_sizes(n, work)[0]) / RATE
    return float(visits * int(step_counts(n, work)[0]) * step)


def multiply_adds(task: Task) -> int:
    """About how many a forward pass of one sample takes: each weight once for every place it is used at."""
    total = 0

    def count(module: nn.Module, _: Any, out: Any) -> None:
        nonlocal total
        out = next((o for o in _values(out) if isinstance(o, Tensor) and o.ndim), None)
        if out is None:
            return
        channels = out.shape[1] if out.ndim == 4 else out.shape[-1]
        total += sum(p.numel() for p in module.parameters(recurse=False)) * out[0].numel() // channels

    module = task.module().to(task.device).eval()
    hooks = [m.register_forward_hook(count) for m in module.modules()]
    with torch.no_grad():
        task._forward(module, task.device)
    for hook in hooks:
        hook.remove()
    return total


def _values(out: Any) -> Iterable[Any]:
    """What a module gave, one by one."""
    if isinstance(out, Mapping):
        return out.values()
    return out if isinstance(out, tuple | list) else (out,)


def guess(task: Task) -> str:
    """The backend of a small job."""
    return "vmap" if Vmap.suits(task) else "loop"


def best(task: Task, work: Work, cohort: int) -> str:
    """The engine of a large job: "native" or "vmap" in this process, "loop" in it, or "pool"."""
    memory, key = _Memory(), _key(task, work, cohort)
    known = memory.get(key)
    if known is not None and (known != "native" or Native.supports(task) is None):
        return known
    times = {name: timed() for name, timed in _candidates(task, work, cohort).items()}
    chosen = min(times, key=lambda name: times[name])
    log.info("measured per client step: %s", ", ".join(f"{k} {1e3 * v:.3f} ms" for k, v in times.items()))
    memory.put(key, chosen)
    return chosen


def _candidates(task: Task, work: Work, cohort: int) -> dict[str, Callable[[], float]]:
    cores = len(os.sched_getaffinity(0))
    forks = min(cores, cohort) if "fork" in multiprocessing.get_all_start_methods() else 1
    on_cpu = task.device.type == "cpu"
    ways: dict[str, Callable[[], float]] = {}
    if on_cpu and Native.supports(task) is None:
        ways["native"] = lambda: _native_time(task, work, cohort) / min(cores, cohort)
    if Vmap.suits(task):
        ways["vmap"] = lambda: _time(Vmap(task), task, work, cohort)
    if on_cpu and forks > 1:
        ways["pool"] = lambda: _time(Loop(task), task, work, 1) / forks
    else:
        ways["loop"] = lambda: _time(Loop(task), task, work, 1)
    return ways


def _native_time(task: Task, work: Work, cohort: int) -> float:
    try:
        return _time(Native(task, threads=1), task, work, cohort)
    except EngineError as error:
        log.info("native gradients are off: %s", error)
        return float("inf")


def _time(grad: Gradient, task: Task, work: Work, m: int) -> float:
    """Processor seconds per client of one gradient step of a block on one thread, whatever else the machine does."""
    m = min(m, task.clients, 1024)
    plan = Plan(task, work, np.arange(m), 0, 0)
    y, batch = task.initial(0).repeat(m, 1), plan.batch(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        taken = []
        with torch.random.fork_rng(devices=[]):
            for _ in range(4):
                start = time.process_time()
                grad(y, batch)
                taken.append(time.process_time() - start)
        return min(taken[1:]) / m
    finally:
        torch.set_num_threads(before)


def _key(task: Task, work: Work, cohort: int) -> str:
    facts = (
        task.layout.fingerprint.hex(), repr(task.module()), str(task.loss), tree.shapes(task.inputs),
        str(task.augment), work.batch, cohort, *cpu_model(), len(os.sched_getaffinity(0)), torch.__version__,
        torch.get_num_threads(),
    )  # fmt: skip
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


class _Memory:
    """What was measured before, as a small JSON file; whatever is wrong with it, it is only forgotten."""

    def __init__(self) -> None:
        try:
            self.path = cache_folder() / "fastest.json"
            known = json.loads(self.path.read_text())
        except (EngineError, OSError, ValueError):
            known = {}
        self.known: dict[str, str] = known if isinstance(known, dict) else {}

    def get(self, key: str) -> str | None:
        known = self.known.get(key)
        return known if known in ("native", "vmap", "loop", "pool") else None

    def put(self, key: str, chosen: str) -> None:
        try:
            part = self.path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({**self.known, key: chosen}))
            part.replace(self.path)
        except (AttributeError, OSError):
            log.info("which way is fastest could not be remembered")
