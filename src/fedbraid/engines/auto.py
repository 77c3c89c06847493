"""Which way is fastest for this model on this machine: guessed for small jobs, measured once for large ones.

No job pays for what it cannot earn back: a compiler runs for those that take longer than it, and ways are timed where
that is a small share of the work. A small job takes the same way every time, so that it repeats to the bit; what was
measured for a large one is remembered for the model, the batch and the cohort, in the user's cache folder, as long as
the machine is the same. A run that turns out slower than was promised is measured again the next time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedbraid.core.device import finish
from fedbraid.core.rule import Gradient
from fedbraid.data import tree
from fedbraid.data.batches import Drawn, batch_sizes, step_counts
from fedbraid.engines.gradients import Loop, Vmap
from fedbraid.engines.native import Native
from fedbraid.engines.native.build import cache_folder, compiler, cpu_model
from fedbraid.errors import EngineError

if TYPE_CHECKING:
    from fedbraid.core.work import Work
    from fedbraid.data.task import Task
    from fedbraid.engines.client import Engine, Order, Reply, Setup

log = logging.getLogger("fedbraid")

WORTH = 0.5  # seconds of plain autograd from which looking for a faster way pays,
COMPILING = 0.5  # and from which, on all cores, a compiler does: what it makes is kept for all later runs
SHARE = 2.0  # times the work that measuring may take, whose result is kept too
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
        weights = sum(p.numel() for p in module.parameters(recurse=False))
        first = next((t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.ndim), None)
        if not weights or first is None or not first.numel():
            return
        channels = first.shape[1] if first.ndim == 4 else first.shape[-1]
        total += weights * first[0].numel() // channels

    module = task.module().to(task.device).eval()
    hooks = [m.register_forward_hook(count) for m in module.modules()]
    with torch.no_grad():
        task._forward(module, task.device)
    for hook in hooks:
        hook.remove()
    return total


def guess(task: Task) -> str:
    """The backend of a small job."""
    return "vmap" if Vmap.suits(task) else "loop"


@dataclass(frozen=True)
class Choice:
    """The way of a large job, and how many seconds a client's step should take in it."""

    way: str
    seconds: float
    key: str = ""
    measured: bool = False  # in this process, not long ago


def best(task: Task, work: Work, cohort: int, seconds: float) -> Choice:
    """How a large job runs: "native" or "vmap" in this process, "loop" in it, or "pool".

    `seconds` is about what plain autograd on one core would take for it.
    """
    memory, key = _Fastest(), _key(task, work, cohort)
    known = memory.get(key)
    if known is not None and (known.way != "native" or Native.supports(task) is None):
        return known
    wall = seconds / _hands(cohort)
    ways = _candidates(task, work, cohort)
    complete = not (ways.keys() >= {"native"} and too_short(task, wall))
    if not complete:
        del ways["native"]
    if len(ways) == 1 or _measuring(task, work, cohort, len(ways)) > SHARE * wall:
        return Choice(next(iter(ways)), math.inf, key)
    times = {name: timed() for name, timed in ways.items()}
    chosen = min(times, key=lambda name: times[name])
    log.info("measured per client step: %s", ", ".join(f"{k} {1e3 * v:.3f} ms" for k, v in times.items()))
    if complete:
        memory.put(key, chosen, times[chosen])
    return Choice(chosen, times[chosen], key, measured=True)


def too_short(task: Task, wall: float) -> bool:
    """Whether so many seconds of work do not pay for a compiler, which they would need."""
    return wall < COMPILING and not Native.ready(task)


def _hands(cohort: int) -> int:
    return min(len(os.sched_getaffinity(0)), cohort)


def _measuring(task: Task, work: Work, cohort: int, ways: int) -> float:
    """About how many seconds timing so many ways takes: two steps each, and of a block with all but the last."""
    step = expected_seconds(task, dataclasses.replace(work, steps=1, epochs=None), 1)
    return step * (2 * ways + (ways - 1) * (0 if step > LONG else min(cohort, 1024)))


SLOWER = 1.5  # times the promised seconds from which a choice is doubted


class Watched:
    """An engine whose training is timed, so that a choice that does not hold is not made again."""

    def __init__(self, engine: Engine, choice: Choice) -> None:
        self.engine, self.choice = engine, choice
        self.seconds, self.steps = 0.0, 0.0

    @property
    def grad(self) -> Gradient | None:
        """The gradient of an engine in this process, once open."""
        return getattr(self.engine, "grad", None)

    def open(self, setup: Setup) -> None:
        self.engine.open(setup)

    def train(self, order: Order) -> Iterator[Reply]:
        replies = iter(self.engine.train(order))
        while True:
            start = time.perf_counter()
            reply = next(replies, None)
            self.seconds += time.perf_counter() - start
            if reply is None:
                return
            self.steps += float(reply.K.sum())
            yield reply

    def evaluate(self, x: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.engine.evaluate(x, inputs, targets)

    def describe(self) -> str:
        return self.engine.describe()

    def close(self) -> None:
        self.engine.close()
        taken = self.seconds / max(self.steps, 1)
        if self.seconds < WORTH or taken <= SLOWER * self.choice.seconds:
            return
        if self.choice.measured:  # what surrounds the gradient took the rest: promise what was seen
            _Fastest().put(self.choice.key, self.choice.way, taken)
        else:
            log.info("a client step took %.3f ms, not %.3f: measuring anew next time",
                     1e3 * taken, 1e3 * self.choice.seconds)  # fmt: skip
            _Fastest().forget(self.choice.key)


def _candidates(task: Task, work: Work, cohort: int) -> dict[str, Callable[[], float]]:
    forks = _hands(cohort) if "fork" in multiprocessing.get_all_start_methods() else 1
    on_cpu = task.device.type == "cpu"
    ways: dict[str, Callable[[], float]] = {}
    if on_cpu and Native.supports(task) is None:
        ways["native"] = lambda: _native_time(task, work, cohort) / _hands(cohort)
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
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            one = _steps(grad, task, work, 1, 2)
            m = min(m, task.clients, 1024)
            return min(one, _steps(grad, task, work, m, 4)) if m > 1 and one < LONG else one
    finally:
        torch.set_num_threads(before)


LONG = 0.02  # seconds of one client's step from which a block of them says no more


def _steps(grad: Gradient, task: Task, work: Work, m: int, times: int) -> float:
    who = np.arange(m)
    y, batch = task.vector(0).repeat(m, 1), Drawn(task.visited(who, 0, 0), work, who, 0, 0).batch(0)
    taken = []
    clock = time.process_time if task.device.type == "cpu" else time.perf_counter
    for _ in range(times):
        start = clock()
        grad(y, batch)
        finish(task.device)
        taken.append(clock() - start)
    return min(taken[1:]) / m


def _key(task: Task, work: Work, cohort: int) -> str:
    facts = (
        task.whole.fingerprint.hex(), repr(task.module()), str(task.loss), tree.shapes(task.inputs),
        str(task.augment), work.batch, cohort,
    )  # fmt: skip
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _machine() -> str:
    """What the measurements depend on besides the job."""
    cores = len(os.sched_getaffinity(0))
    facts = (*cpu_model(), cores, torch.__version__, torch.get_num_threads(), *(compiler() or ()))
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


class _Fastest:
    """What was measured before, as a small JSON file; whatever is wrong with it, it is only forgotten."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.path: Path | None = None
        try:
            self.path = cache_folder() / "fastest.json"
            found = json.loads(self.path.read_text())
            if found["machine"] == _machine():
                self.known = dict(found["fastest"])
        except (EngineError, OSError, ValueError, KeyError, TypeError):
            pass

    def get(self, key: str) -> Choice | None:
        match self.known.get(key):
            case [("native" | "vmap" | "loop" | "pool") as way, float(seconds)]:
                return Choice(way, seconds, key)
        return None

    def put(self, key: str, way: str, seconds: float) -> None:
        self._write({**self.known, key: [way, seconds]})

    def forget(self, key: str) -> None:
        self._write({k: v for k, v in self.known.items() if k != key})

    def _write(self, fastest: dict[str, Any]) -> None:
        try:
            if self.path is not None:
                part = self.path.with_suffix(f".{os.getpid()}")
                part.write_text(json.dumps({"machine": _machine(), "fastest": fastest}))
                part.replace(self.path)
        except OSError:
            log.info("which way is fastest could not be remembered")
