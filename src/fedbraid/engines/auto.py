"""Which way is fastest for this model on this machine: guessed for small jobs, measured once for large ones.

A run waits for a compiler, once for a model, where plain autograd would take two thirds as long as it. Where runs of a model
together have taken that long, the compiler works when the last of them is over, for the next ones. Ways are timed where that
is a small share of the work. The same run takes the same way every time, so that it repeats to the bit; what was measured for
a large one is remembered for the model, the batch and the cohort, in the user's cache folder, as long as the machine is the
same. A run that turns out slower than was promised is measured again the next time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbraid.core.device import finish
from fedbraid.core.local_training import Gradient
from fedbraid.core.work import batch_sizes, step_counts
from fedbraid.data import tree
from fedbraid.data.batches import DrawnBatches
from fedbraid.data.tree import Padded
from fedbraid.engines.autograd import LoopGradient, VmapGradient
from fedbraid.engines.frozen_features import FrozenFeatureCache
from fedbraid.engines.native_backend import Native
from fedbraid.errors import EngineError
from fedbraid_native.build import cache_folder, compiler, cpu_model, lanes

if TYPE_CHECKING:
    from fedbraid.core.work import Work
    from fedbraid.data.task import Task
    from fedbraid.engines.engine import Engine, Orders, Reply, Setup

log = logging.getLogger("fedbraid")

WORTH = 0.2  # seconds of plain autograd on one core from which more than one process pays
SHARE = 0.02  # of the work that measuring may take
SAVED = 0.3  # of the time of plain autograd on all cores that compiled code surely saves
CUT = 0.4  # of the longest sample that a batch must keep for code of one length to be worth trying
FILLED, HEAVY = 0.3, 5e8  # of a vector's places, below which compiled steps of so many operations may lose
CACHE = 2**20  # bytes of a core's own
SERVES = 1.5  # times the work at hand: what is compiled is kept, and a model is seldom trained only once
BATCHING = 4.0  # seconds on all cores from which vmap pays, whose first call loads half of PyTorch's compiler
LAYER, RATE = (
    2e-4,
    6e10,
)  # seconds of any layer's autograd, and operations a second beyond it: rough on purpose


def expected_seconds(task: Task, work: Work, participations: int) -> float:
    """About how long plain autograd on one core would take for so many participations of clients."""
    n = np.array([task.sizes.mean().round()], np.int64)
    return float(participations * int(step_counts(n, work)[0]) * sum(_called_and_computed(task, work)))


def _called_and_computed(task: Task, work: Work) -> tuple[float, float]:
    """About how many seconds of a client's step PyTorch is busy with itself, and with arithmetic."""
    n, look = np.array([task.sizes.mean().round()], np.int64), task.summary
    return LAYER * (1 + look.layers), 6 * look.multiply_adds * int(batch_sizes(n, work)[0]) / RATE


def guess(task: Task, seconds: float) -> str:
    """The backend that is not measured: for so few seconds on a CPU, what vmap must import first takes longer."""
    small = seconds < WORTH and task.device.type == "cpu"
    return "vmap" if not small and VmapGradient.suits(task) else "loop"


def compiling(task: Task) -> float:
    """About how many seconds compilers take, that work side by side where there are cores."""
    alone = 0.8 + 0.6 * min(task.summary.layers, 2) + 0.08 * task.summary.layers
    return alone * (0.6 if len(os.sched_getaffinity(0)) > 1 else 1.0)


def loading(task: Task) -> float:
    """About how many seconds it takes to follow a model and load what was compiled for it."""
    return 0.05 + 0.008 * task.summary.layers


def native_pays(task: Task, work: Work, wall: float) -> bool:
    """Whether so many seconds of plain autograd on all cores are worth compiled code, if the model can have it."""
    if task.device.type != "cpu":
        return False
    if (kept := share_kept(task, work)) < CUT:
        log.info("native gradients are off: cutting batches leaves %.0f %% of the longest sample", 100 * kept)
        return False
    memory, model = _Fastest(), _model(task)
    if SERVES * wall > compiling(task):
        able = Native.supports(task) is None
        memory.note(model, able)
        return able
    if not (SHARE * wall > loading(task) or (model in memory.compiled and SAVED * wall > loading(task))):
        return False
    if (ready := Native.ready(task)) != (model in memory.compiled):
        memory.note(model, True if ready else None)
    return ready


def serve_later_runs(task: Task, memory: _Fastest) -> None:
    """Have a model compiled when a run is over, if it has trained for so long that this will pay in later ones."""
    model = _model(task)
    if task.device.type != "cpu" or model in memory.compiled or model in memory.refused:
        return
    if SERVES * memory.spent.get(model, 0.0) > compiling(task):
        try:
            able = not FrozenFeatureCache.suits(task) and Native.prepare(task)
        except Exception as error:  # the run is over and well: nothing here may take that back
            log.info("native gradients are off: %s", error)
            able = False
        memory.note(model, able)


def note_compiled(task: Task) -> None:
    """Remember that this model's code is there, for short runs to take."""
    _Fastest().note(_model(task), True)


def share_kept(task: Task, work: Work) -> float:
    """How long a batch that is cut to its longest sample is, beside the longest of all, on average."""
    leaf = next((leaf for leaf in tree.leaves(task.inputs) if isinstance(leaf, Padded)), None)
    if leaf is None:
        return 1.0
    lengths = leaf.lengths.sort().values.double()
    size = float(batch_sizes(np.array([task.sizes.mean().round()], np.int64), work)[0])
    below = torch.linspace(0, 1, len(lengths) + 1, dtype=torch.float64) ** size  # that all of a batch are
    return float((lengths * below.diff()).sum() / leaf.shape[1])


def mostly_empty(task: Task, work: Work) -> bool:
    """Whether a batch leaves most places of compiled code's vectors empty, and PyTorch is not busy with itself."""
    size = int(batch_sizes(np.array([task.sizes.mean().round()], np.int64), work)[0])
    share, operations = size / (-(-size // lanes()) * lanes()), 6 * task.summary.multiply_adds * size
    return share < FILLED and operations > HEAVY


def reads_weights_anew(task: Task) -> bool:
    """Whether a recurrent net's weights leave the cache between steps: both ways then wait for them."""
    nets = [m for m in task.module().modules() if isinstance(m, nn.RNNBase)]
    return any(
        4 * w.numel() >= CACHE for net in nets for name, w in net.named_parameters() if "weight" in name
    )


def faster(task: Task, work: Work, wall: float) -> str | None:
    """What is surely faster than so many seconds of plain autograd on all cores, without measuring."""
    unsure = FrozenFeatureCache.suits(task) or mostly_empty(task, work) or reads_weights_anew(task)
    if native_pays(task, work, wall) and not unsure:
        return "native"
    return "vmap" if wall > BATCHING and VmapGradient.suits(task) else None


@dataclass(frozen=True)
class Choice:
    """The way of a large job, and how many seconds a client's step should take in it."""

    way: str
    seconds: float
    key: str = ""
    measured: bool = False  # in this process, not long ago
    run: str = ""  # which one it is, where the next one like it must go the same way


def best(task: Task, work: Work, cohort: int, seconds: float, run: str = "") -> Choice:
    """How a large job runs: "native" or "vmap" in this process, "loop" in it, or "pool".

    `seconds` is about what plain autograd on one core would take for it, `run` says which run it is.
    """
    memory, key = _Fastest(), _key(task, work, cohort)
    run = _hash((key, run))
    if (before := memory.runs.get(run)) in ("vmap", "loop", "pool"):
        return Choice(before, math.inf, run=run)
    known = memory.get(key)
    if known is not None and (known.way != "native" or Native.supports(task) is None):
        return known
    wall = seconds / hands(cohort)
    ways = _plain(task, work, cohort)
    measures = _measuring(task, work, cohort) <= SHARE * wall
    others = _Others()
    times = {name: timed() for name, timed in ways.items()} if measures else {}
    if times:  # a gradient alone, measured; what surrounds it is in the estimate
        wall = max(wall, min(times.values()) * seconds / _step(task, work))
    if not measures:
        way = faster(task, work, wall) or next(iter(ways))
        return Choice(way if way != "native" or _loads(task) else next(iter(ways)), math.inf, key, run=run)
    if native_pays(task, work, wall):
        times["native"] = _native_time(task, work, cohort) / hands(cohort)
    if wall > BATCHING and VmapGradient.suits(task):
        times["vmap"] = _time(VmapGradient(task), task, work, cohort)
    chosen = min(times, key=lambda name: times[name])
    log.info("measured per client step: %s", ", ".join(f"{k} {1e3 * v:.3f} ms" for k, v in times.items()))
    memory = _Fastest()
    if others.share() < BESIDE and ("native" in times or _model(task) in memory.refused):
        memory.put(key, chosen, times[chosen])
    return Choice(chosen, times[chosen], key, measured=True, run=run)


def hands(cohort: int) -> int:
    return min(len(os.sched_getaffinity(0)), cohort)


def _step(task: Task, work: Work) -> float:
    """About how long one step of a client takes by plain autograd on one core."""
    return expected_seconds(task, dataclasses.replace(work, steps=1, epochs=None), 1)


def _measuring(task: Task, work: Work, cohort: int) -> float:
    """About how many seconds timing takes: two steps for every way, and of a block with those that take blocks."""
    step = _step(task, work)
    return step * (8 + (0 if step > LONG else min(cohort, 1024)))


SLOWER = 1.5  # times the promised seconds from which a choice is doubted,
DOUBTED = 0.5  # in runs of at least so many


class Watched:
    """An engine whose training is timed, so that a choice that does not hold is not made again."""

    def __init__(self, engine: Engine, choice: Choice, task: Task) -> None:
        self.engine, self.choice, self.task = engine, choice, task
        self.seconds, self.steps = 0.0, 0.0

    @property
    def grad(self) -> Gradient | None:
        """The gradient of an engine in this process, once open."""
        return getattr(self.engine, "grad", None)

    def open(self, setup: Setup) -> None:
        self.engine.open(setup)

    def train(self, orders: Orders) -> Iterator[Reply]:
        replies = iter(self.engine.train(orders))
        while True:
            start = time.perf_counter()
            reply = next(replies, None)
            self.seconds += time.perf_counter() - start
            if reply is None:
                return
            self.steps += float(reply.participation.K.sum())
            yield reply

    def evaluate(self, x: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.engine.evaluate(x, inputs, targets)

    def describe(self) -> str:
        return self.engine.describe()

    def close(self) -> None:
        self.engine.close()
        taken = self.seconds / max(self.steps, 1)
        if self.steps and self.choice.way != "native":
            memory = _Fastest()
            memory.ran(_model(self.task), self.choice, self.seconds)
            serve_later_runs(self.task, memory)
        if self.seconds < DOUBTED or taken <= SLOWER * self.choice.seconds:
            return
        if self.choice.measured:  # what surrounds the gradient took the rest: promise what was seen
            _Fastest().put(self.choice.key, self.choice.way, taken)
        else:
            log.info("a client step took %.3f ms, not %.3f: measuring anew next time",
                     1e3 * taken, 1e3 * self.choice.seconds)  # fmt: skip
            _Fastest().forget(self.choice.key)


def _plain(task: Task, work: Work, cohort: int) -> dict[str, Callable[[], float]]:
    """The ways of plain autograd, the likely one first: each process a core, or one process with all of them."""
    forks = hands(cohort) if "fork" in multiprocessing.get_all_start_methods() else 1
    if task.device.type != "cpu" or forks == 1:
        return {"loop": lambda: _time(LoopGradient(task), task, work, 1)}
    share = -(-cohort // forks) / cohort  # of the clients, that one process has
    called, computed = _called_and_computed(task, work)
    step, gain = called + computed, (called + computed) / (called + computed / SPED)
    hauled = (MESSAGE + HAUL * task.full_layout.size) * step / expected_seconds(task, work, 1)
    ways = {"pool": lambda: _time(LoopGradient(task), task, work, 1) * share + hauled}
    if gain < THREADS:
        return ways
    together = {"loop": lambda: _together(task, work, forks)}
    first = step / gain < share * step + hauled or step > HUGE
    return {**together, **ways} if first else {**ways, **together}


HUGE = 0.3  # seconds of a step from which processes only take each other's caches
SPED = 1.8  # times as fast all cores do a step's arithmetic as one,
THREADS = 1.25  # and the whole step must be to be worth a look
MESSAGE, HAUL = 1e-3, 2e-9  # seconds that a client's visit in another process costs, and each of its numbers


def _together(task: Task, work: Work, threads: int) -> float:
    """Processor seconds of a client's step on one thread, divided by how much faster the clock runs with all."""
    grad, taken = LoopGradient(task), dict[int, list[float]]()
    alone = _time(grad, task, work, 1)
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        for count in (1, threads, 1, threads):
            torch.set_num_threads(count)
            taken.setdefault(count, []).append(_steps(grad, task, work, 1, 2, time.perf_counter))
    torch.set_num_threads(before)
    return alone * min(taken[threads]) / min(taken[1])


BESIDE = 0.1  # of the cores in others' use, from which what was measured is not worth remembering


class _Others:
    """How much other processes have worked on our cores since this was made, as far as the system tells."""

    def __init__(self) -> None:
        self.start = self._now()

    def share(self) -> float:
        wall, ours, everybodys = (after - before for before, after in zip(self.start, self._now()))
        beside = (
            everybodys - ours - 3 / os.sysconf("SC_CLK_TCK")
        )  # which is all that the system's ticks may be off
        return max(0.0, beside) / max(wall * len(os.sched_getaffinity(0)), 1e-9)

    def _now(self) -> tuple[float, float, float]:
        """Seconds by the clock, of this process and its children that have ended, and of all."""
        mine = {f"cpu{k}" for k in os.sched_getaffinity(0)}
        try:
            lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
            ticks = sum(int(n) for name, *row in lines if name in mine for n in (*row[:3], *row[5:8]))
        except (OSError, ValueError):
            return 0.0, 0.0, 0.0
        return time.perf_counter(), sum(os.times()[:4]), ticks / os.sysconf("SC_CLK_TCK")


def _loads(task: Task) -> Native | None:
    """Native gradients on one thread, None where they are no good after all."""
    try:
        return Native(task, threads=1)
    except EngineError as error:
        log.info("native gradients are off: %s", error)
        return None


def _native_time(task: Task, work: Work, cohort: int) -> float:
    grad = _loads(task)
    return math.inf if grad is None else _time(grad, task, work, cohort)


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


def _steps(
    grad: Gradient,
    task: Task,
    work: Work,
    m: int,
    times: int,
    processor: Callable[[], float] = time.process_time,
) -> float:
    who = np.arange(m)
    y, batch = task.vector(0).repeat(m, 1), DrawnBatches(task.block_view(who, 0, 0), work, who, 0, 0).batch(0)
    taken = []
    clock = processor if task.device.type == "cpu" else time.perf_counter
    for _ in range(times):
        start = clock()
        grad(y, batch)
        finish(task.device)
        taken.append(clock() - start)
    return min(taken[1:]) / m


def _key(task: Task, work: Work, cohort: int) -> str:
    return _hash((_model(task), str(task.augment), work.batch, cohort))


def _model(task: Task) -> str:
    return _hash(
        (task.full_layout.fingerprint.hex(), task.summary.text, _loss(task), tree.shapes(task.inputs))
    )


def _loss(task: Task) -> str:
    """What a loss is called in any process: a function of the user's by its code, not by where it lies."""
    code = getattr(getattr(task.loss, "func", task.loss), "__code__", None)
    does = "" if code is None else f" {code.co_names} {code.co_code.hex()}"
    return re.sub(r" at 0x[0-9a-f]+", "", str(task.loss)) + does


def _hash(facts: tuple[Any, ...]) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _machine() -> str:
    """What the measurements depend on besides the job."""
    from fedbraid import __version__

    cores = len(os.sched_getaffinity(0))
    versions = (__version__, torch.__version__)
    return _hash((*cpu_model(), cores, *versions, torch.get_num_threads(), *(compiler() or ())))


RUNS = 256  # that are remembered


class _Fastest:
    """What was measured before, as a small JSON file; whatever is wrong with it, it is only forgotten."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.spent: dict[str, float] = {}  # seconds of plain autograd, by model
        self.compiled: set[str] = set()  # models whose code was asked for,
        self.refused: set[str] = set()  # and those that have none
        self.runs: dict[str, str] = {}  # the last ones that went without compiled code, and how
        self.path: Path | None = None
        try:
            self.path = cache_folder() / "fastest.json"
            found = json.loads(self.path.read_text())
            if found["machine"] == _machine():
                self.known = dict(found["fastest"])
                self.spent = {str(k): float(v) for k, v in found.get("spent", {}).items()}
                self.compiled = {str(k) for k in found.get("compiled", ())}
                self.refused = {str(k) for k in found.get("refused", ())}
                self.runs = {str(k): str(v) for k, v in found.get("runs", {}).items()}
        except (EngineError, OSError, ValueError, KeyError, TypeError, AttributeError):
            pass

    def get(self, key: str) -> Choice | None:
        match self.known.get(key):
            case [("native" | "vmap" | "loop" | "pool") as way, float(seconds)]:
                return Choice(way, seconds, key)
        return None

    def put(self, key: str, way: str, seconds: float) -> None:
        self.known[key] = [way, seconds]
        self._write()

    def forget(self, key: str) -> None:
        self.known.pop(key, None)
        self._write()

    def ran(self, model: str, choice: Choice, seconds: float) -> None:
        """Note that a model trained for so long without compiled code."""
        self.spent[model] = self.spent.get(model, 0.0) + seconds
        if choice.run and choice.key not in self.known:  # what is known decides the next time too
            self.runs.pop(choice.run, None)
            self.runs[choice.run] = choice.way
            self.runs = dict(list(self.runs.items())[-RUNS:])
        self._write()

    def note(self, model: str, able: bool | None) -> None:
        """Note whether a model has compiled code, or that nobody knows."""
        before = (model in self.compiled, model in self.refused)
        for models, here in ((self.compiled, able is True), (self.refused, able is False)):
            (models.add if here else models.discard)(model)
        if before != (model in self.compiled, model in self.refused):
            self._write()

    def _write(self) -> None:
        kept = {
            "fastest": self.known, "spent": self.spent, "compiled": sorted(self.compiled), "refused": sorted(self.refused),
            "runs": self.runs,
        }  # fmt: skip
        try:
            if self.path is not None:
                part = self.path.with_suffix(f".{os.getpid()}")
                part.write_text(json.dumps({"machine": _machine(), **kept}))
                part.replace(self.path)
        except OSError:
            log.info("which way is fastest could not be remembered")
