"""`simulate` and `resume`: whole runs, in memory or in a folder that can be continued."""

from __future__ import annotations

import logging
import os
import platform
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fedbraid.user_files as files
from fedbraid import algorithms
from fedbraid.algorithms.lora import how as lora
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import integer, one_of
from fedbraid.core.context import Vectors
from fedbraid.core.metric_names import PERSONAL
from fedbraid.core.rule import Rule
from fedbraid.core.traits import PersonalTraining
from fedbraid.core.work import WORK, Work
from fedbraid.data.label_flip import flipped
from fedbraid.data.task import Task
from fedbraid.engines import select
from fedbraid.engines.engine import Engine, Setup
from fedbraid.errors import ConfigError, RunError
from fedbraid.links import codecs
from fedbraid.parse import evaluate
from fedbraid.run import fingerprint as bits
from fedbraid.run.budget import PrivacyAccountant, PrivacySetup, attach_privacy
from fedbraid.run.checkpoint import Checkpoint, Folder, Record, row_limit, rows_of, save_model
from fedbraid.run.database import Database
from fedbraid.run.evaluate import Evaluates, Models, evaluate_model, per_client
from fedbraid.run.history import History
from fedbraid.run.noise_outlook import naming_noise, outlook, privacy_of, promise
from fedbraid.run.progress import Bar, is_watched
from fedbraid.run.simulated_source import SimulatedSource
from fedbraid.run.source import StepSource
from fedbraid.run.state import State
from fedbraid.run.step import Population, advance
from fedbraid.run.task_summary import note as note_task
from fedbraid.schedule import Buffered, Rounds, Schedule, clock
from fedbraid.schedule.selection import SELECTIONS, ClientHistory

log = logging.getLogger("fedbraid")
PAUSE = "pause"  # a callback's answer to a step: end here, unfinished


@dataclass
class Options:
    """How a run is watched and kept, none of which changes its numbers."""

    evaluate_every: int | None = 1
    evaluate_on: str = "test"
    callbacks: Sequence[Any] = ()
    client_state_storage: str = "auto"
    checkpoint_every: int = 1
    log_layer_norms: bool = False
    ignore_divergence: bool = False
    allow_numeric_changes: bool = False

    def __post_init__(self) -> None:
        if self.evaluate_every is not None:
            integer("evaluate_every", self.evaluate_every)
        integer("checkpoint_every", self.checkpoint_every)
        one_of("evaluate_on", self.evaluate_on, ("test", "clients"))
        one_of("client_state_storage", self.client_state_storage, ("auto", "memory", "disk"))
        for i, cb in enumerate(self.callbacks):
            if isinstance(cb, type) or not any(hasattr(cb, name) for name in ("start", "step", "end")):
                raise ConfigError(
                    f"callbacks[{i}] is {cb!r}, which nothing would call; give an object with start, step or end"
                )


@dataclass
class Result:
    """What a run came to."""

    x: Tensor  # the final model, flat float32: the averaged one, which was evaluated
    history: Sequence[Record] = field(repr=False)  # one dict per server step
    task: Task = field(repr=False)
    state: State = field(repr=False)
    algorithm: Algorithm = field(repr=False)
    engine: str = ""
    plan: str | None = None  # why this engine, where fedbraid chose it
    out: Path | None = None
    work: Work | None = field(default=None, repr=False)

    def model(self, client: int | None = None) -> nn.Module:
        """The torch module with the final weights; a client's has its own parts, or is the model of its own."""
        with self._rows(client):
            return load_model_of(self.task, self.algorithm, self.state, client)

    def per_client(self) -> list[Record]:
        """A row a client that has a test share: its samples, and what the model that it uses is worth there."""
        with self._rows(0):
            own = partial(models_of, self.algorithm.rule, self.state)
            return per_client(self.task, own if self.state.clients.default else self.x)

    @contextmanager
    def _rows(self, client: int | None) -> Iterator[None]:
        """What clients remember, which the end of a run closed."""
        if client is None or not self.state.clients.stored:
            yield
            return
        if self.out is None:
            raise RunError("what clients hold went to a file that ended with the run; give out= to keep it")
        db = Database(self.out / "state.db")
        try:
            self.state.clients.attach(db, "clients", None)
            yield
        finally:
            db.close()

    @property
    def bytes_up(self) -> int:
        return sum(r["bytes_up"] for r in self.history)

    @property
    def bytes_down(self) -> int:
        return sum(r["bytes_down"] for r in self.history)

    @property
    def lora(self) -> str | None:
        """How low-rank adapters were averaged, where there are some."""
        return lora(self.task.layout, self.algorithm)

    @property
    def privacy(self) -> str | None:
        """(ε, δ) that the run spent and whom it protects, where it is private."""
        return promise(self.last("epsilon"), privacy_of(self.algorithm))

    def last(self, key: str) -> float | None:
        """The latest value of a measurement, None where there was none."""
        return next((r[key] for r in reversed(self.history) if key in r), None)

    def __str__(self) -> str:
        facts = {
            "algorithm": self.algorithm.label,
            "steps": self.state.t,
            "accuracy": self.last("accuracy"),
            "loss": self.last("loss"),
            **{name: self.last(name) for name in self.task.metrics},
            "bytes up": f"{self.bytes_up:,}",
            "bytes down": f"{self.bytes_down:,}",
            "privacy": self.privacy,
            "engine": self.engine,
            "LoRA": self.lora,
        }
        return "\n".join(f"{k:>10}  {v}" for k, v in facts.items() if v is not None)

    def _repr_html_(self) -> str:
        from fedbraid.report import notebook

        return notebook.as_html(self)

    def plot(self, metric: str | None = None, axis: str = "step") -> Any:
        """A matplotlib figure of a measurement over "step", "bytes", "time" or "flops" (extra `plot`)."""
        from fedbraid.report import notebook

        return notebook.plot(self, metric, axis)

    def timeline(self) -> Any:
        """A matplotlib figure of who trained when, from which version, in a run on a clock (extra `plot`)."""
        from fedbraid.report import notebook

        return notebook.timeline(self)

    def to_pandas(self) -> Any:
        """The history as a pandas frame, a row a step (extra `frames`)."""
        from fedbraid.report import notebook

        return notebook.to_pandas(self.history)

    def to_polars(self) -> Any:
        """The history as a polars frame, a row a step (extra `frames`)."""
        from fedbraid.report import notebook

        return notebook.to_polars(self.history)

    def export(self, path: str | os.PathLike[str], format: str | None = None) -> Path:
        """Write the final model as safetensors, TorchScript or ONNX, by the file's name."""
        from fedbraid.run.export import export

        return export(self, path, format)


@dataclass
class Run:
    """One run while it goes on, whatever its steps come from."""

    setup: Setup
    schedule: Schedule
    source: StepSource
    engine: Evaluates
    options: Options
    state: State
    folder: Folder | None = None
    checkpoint: Checkpoint | None = None
    history: History = field(default_factory=History)
    metadata: Record = field(default_factory=dict)  # committed with the last step
    budgets: tuple[PrivacyAccountant, ...] = ()  # what privacy costs
    seen: ClientHistory | None = None  # of clients, where the schedule chooses by it
    is_paused: bool = False  # a callback asked for an end from which the same call continues
    _left: Record = field(default_factory=dict, repr=False)

    def leave(self, client: int, reachable: bool = True) -> None:
        """Let a client leave for good, before the next step.

        What the server remembers of it goes; what mirrors the client's own memory goes by the negative that it
        sends. One that cannot be reached leaves its share behind, and the next record says so.
        """
        self._check_here(client)
        own = self.state.clients.get([client])
        self.dismiss(client, self.setup.algorithm.rule.withdraw(own) if reachable else None)

    def dismiss(self, client: int, share: Vectors | None) -> None:
        """The same with the negative share that the client sent, None where it could not be asked."""
        self._check_here(client)
        self.state, stays = self.state.without(self.setup.algorithm, client, share)
        self._left.setdefault("left", []).append(client)
        if stays:
            self._left.setdefault("unreturned", []).append(client)

    def broadcast_first(self) -> None:
        """Make the first version, as far as it tells of all clients: these are known now, and none has trained yet."""
        if self.state.t == 0 and self.setup.algorithm.mean_samples:
            known = Population.of(self.source, self.state)
            self.state = self.state.broadcast_first(self.setup, known.N, known.samples, known.is_live)

    def _check_here(self, client: int) -> None:
        if not 0 <= client < len(self.source.sizes) or client in self.state.gone:
            raise ConfigError(
                f"client {client} is not there to leave; there are {len(self.source.sizes)} from 0 on"
            )

    def go(self) -> Result:
        """Run to the end, or from where the state stands."""
        self._tell("start", self)
        pending: list[Record] = []
        self.seen = self._seen()
        population: Population | None = None
        for step in () if self.metadata.get("stopped") else self.source.steps(self):
            tick = step.tick
            if not all(
                budget.can_afford(tick.clients.tolist(), self.source.sizes) for budget in self.budgets
            ):
                self._stop(pending)
                break
            before = self.state.x
            population = Population.of(self.source, self.state, population)
            self.state, record = advance(
                self.setup, self.state, step, population, self.options.ignore_divergence
            )
            if self.seen is not None:
                self.seen.take(record)
            notes = step.on_taken(record)
            record |= {**notes.record, **self._measure(before), **self._left}
            for budget in self.budgets:
                record |= budget.charge(self.state.t, record["clients"], self.source.sizes)
            self._left = {}
            answers = [hook(record, self) for hook in self._hooks("step")]
            self.is_paused = PAUSE in answers
            stop = any(answers) or any(budget.is_exhausted(self.state.t) for budget in self.budgets)
            is_stopped = stop and not self.is_paused
            self.metadata = {**notes.metadata, **({"stopped": self.state.t} if is_stopped else {})}
            pending.append(record)
            if self.checkpoint is None:
                self.history.extend(pending)
                pending = []
            elif stop or self._due():
                self.checkpoint.commit(self.state, pending, self.metadata)
                pending = []
            if stop:
                break
        return self._result()

    def _plan(self) -> str | None:
        """Why the engine was chosen: now, or when the run in this folder began."""
        plan = getattr(self.engine, "plan", None)
        recorded = None if self.folder is None else self.folder.config().get("plan")
        return recorded if plan is None else plan.reason

    def _stop(self, pending: list[Record]) -> None:
        """End the run where it stands, with what is not yet committed."""
        self.metadata = {**self.metadata, "stopped": self.state.t}
        if self.checkpoint is not None:
            self.checkpoint.commit(self.state, pending, self.metadata)

    def _seen(self) -> ClientHistory | None:
        """What a schedule that chooses has seen so far, read from the records."""
        if getattr(self.schedule, "select", None) is None:
            return None
        seen = ClientHistory(self.source.sizes, self.setup.seed)
        for record in self.history if self.folder is None else self.folder.records():
            if record["step"] <= self.state.t:
                seen.take(record)
        return seen

    def model(self, client: int | None = None) -> nn.Module:
        """The torch module with the weights of this step, as they are evaluated, or as a client uses them."""
        return load_model_of(self.setup.task, self.setup.algorithm, self.state, client)

    def evaluated(self) -> Record:
        """What this step's model is worth; where clients have models of their own, theirs under names that end in _own."""
        task, on, state, rule = (
            self.setup.task,
            self.options.evaluate_on,
            self.state,
            self.setup.algorithm.rule,
        )
        kept = state.clients.default
        shared: Models = state.average
        if task.full_layout.size > task.layout.size:
            if PERSONAL not in kept:  # real clients keep them for themselves
                return {}
            shared = partial(models_of, Rule(), state)
        personal = rule.traits().personal or PersonalTraining()
        if personal.has_no_global_model and kept:
            return evaluate_model(self.engine, task, partial(models_of, rule, state), on, state.t)
        record = evaluate_model(self.engine, task, shared, on, state.t)
        if kept and personal.personal_model is not None:
            own = evaluate_model(self.engine, task, partial(models_of, rule, state), on, state.t)
            record |= {OWN.format(name): value for name, value in own.items()}
        return record

    def _due(self) -> bool:
        """Whether to commit: not while the model grows beyond reason, so that the last good step is kept."""
        t, last = self.state.t, self.state.t == self.schedule.steps
        return (
            last
            or self.source.is_live
            or (t % self.options.checkpoint_every == 0 and not self.state.guard.steps_over_limit)
        )

    def _measure(self, before: Tensor) -> Record:
        t, every, task = self.state.t, self.options.evaluate_every, self.setup.task
        record: Record = {}
        if self.options.log_layer_norms:
            moved = self.state.x - before
            record["moved"] = {s.name: float(moved[s.offset : s.end].norm()) for s in task.layout}
        if every is not None and task.test is not None and (t % every == 0 or t == self.schedule.steps):
            record |= self.evaluated()
        return record

    def _result(self) -> Result:
        history = self.history if self.folder is None else History(self.folder.records())
        x, task = self.state.average, self.setup.task
        result = Result(
            x,
            history,
            task,
            self.state,
            self.setup.algorithm,
            self.source.describe(),
            self._plan(),
            self.folder.path if self.folder else None,
            self.setup.work,
        )
        if self.folder is not None and not self.is_paused:
            save_model(self.folder.path / "model.safetensors", task.layout.views(x))
            if self.options.evaluate_on == "clients" and history and not self.source.is_live:
                own = partial(models_of, self.setup.algorithm.rule, self.state)
                rows = per_client(task, own if self.state.clients.default else x)
                self.folder.write_json(CLIENTS, {"clients": rows})
        self._tell("end", result)
        return result

    def message_bytes(self) -> tuple[float, float]:
        """(down, up): the bytes of one participation, for schedules that charge transfer time."""
        a, newest = self.setup.algorithm, self.state.sent[max(self.state.sent)]
        return float(sum(newest.sizes.values())), float(a.up.size(a.uploads, self.setup.task.layout))

    def _hooks(self, name: str) -> list[Any]:
        return [getattr(cb, name) for cb in self.options.callbacks if hasattr(cb, name)]

    def _tell(self, name: str, subject: Any) -> None:
        for hook in self._hooks(name):
            hook(subject)


CLIENTS = "clients.json"  # what each client's model is worth to it in the end
OWN = "{}_personal"  # what is said of clients' own models, by the name of what is said of the server's


def models_of(rule: Rule, state: State, clients: NDArray[np.int64]) -> Tensor:
    """The whole models `[m, D]` that clients use: the server's or their own, with their personal parts."""
    memory = {name: v.to(state.x.device) for name, v in state.clients.get(clients).items()}
    personal = rule.traits().personal
    own = None if personal is None else personal.personal_model
    shared = state.average.expand(len(clients), -1) if own is None else own(memory)
    return torch.cat([shared, memory[PERSONAL]], 1) if PERSONAL in memory else shared


def load_model_of(task: Task, algorithm: Algorithm, state: State, client: int | None) -> nn.Module:
    """A module with the averaged weights, and the personal parts that clients start with, or with a client's own."""
    if client is None:
        own = state.clients.default.get(PERSONAL)
        x = state.average if own is None else torch.cat([state.average, own.to(state.average)])
    elif not 0 <= client < task.clients:
        raise ConfigError(f"there is no client {client}; there are {task.clients} from 0 on")
    else:
        x = models_of(algorithm.rule, state, np.array([client]))[0]
    return task.full_layout.load(task.module(), x)


def simulate(
    task: Task,
    algorithm: Algorithm,
    work: Work | None = None,
    schedule: Schedule | None = None,
    *,
    seed: int = 0,
    engine: str | Engine = "auto",
    out: str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    progress: bool | None = None,
    evaluate_every: int | None = 1,
    evaluate_on: str = "test",
    callbacks: Sequence[Any] = (),
    client_state_storage: str = "auto",
    checkpoint_every: int = 1,
    log_layer_norms: bool = False,
    ignore_divergence: bool = False,
    allow_numeric_changes: bool = False,
) -> Result:
    """Train a task with an algorithm and return what came of it.

    With `out`, every step is committed to that folder; a folder that holds the same run is continued.
    `evaluate_every=None` skips evaluation. `progress` draws a bar; by default it does in terminals and notebooks, not
    in pipes. `client_state_storage` is "memory", "disk", or "auto", by size. `log_layer_norms=True` records how far each
    layer moved. `checkpoint_every` commits less often. A run that diverges ends unless `ignore_divergence`.
    `allow_numeric_changes` continues a folder although torch, CPU or compiler changed.
    """
    _check(task, algorithm, work, schedule)
    assert work is not None
    assert schedule is not None
    algorithm.fits(work, task.full_layout.size > task.layout.size)
    algorithm.gather.traits().check_layout(task.layout)
    work = work.tabled(schedule.steps)
    seed, device = _seed(seed), _device(device)
    if evaluate_on == "clients" and task.test_offsets is None:
        raise ConfigError(
            "evaluate_on='clients' needs local test sets; give client_tests=, test_fraction=, natural ids or load(…, test_shares=True)"
        )
    if progress is True or (progress is None and is_watched()):
        callbacks = [*callbacks, Bar()]
    options = Options(
        evaluate_every,
        evaluate_on,
        callbacks,
        client_state_storage,
        checkpoint_every,
        log_layer_norms,
        ignore_divergence,
        allow_numeric_changes,
    )
    if (caution := schedule.caution(task.clients)) is not None:
        log.warning(caution)
    algorithm, budgets = attach_privacy(
        algorithm, PrivacySetup(schedule, task.clients, work, task.sizes, seed)
    )
    folder = None if out is None else Folder(out)
    _TASKS[id(task)] = task
    known = folder.config() if folder is not None and folder.exists else None
    cohort = schedule.buffer if isinstance(schedule, Buffered) else _cohort(schedule, task)
    algorithm.gather.traits().check_cohort(cohort)
    task = task.to(device)
    task = flipped(task, algorithm.rule.traits().flips_labels)
    setup = Setup(algorithm, task, work, seed, cohort, cohort * schedule.steps)
    runner = select(engine, setup, None if known is None else known.get("engine"))
    with bits.as_before(known), _opened(runner, setup):
        if folder is not None:
            config = describe(setup, schedule, runner, options, device)
            if known is None:
                folder.create(config)
                note_task(folder, task)
            else:
                same(folder, known, config)
        foreseen = outlook(algorithm, schedule.steps, cohort, task.layout.size)
        if foreseen is not None:
            log.log(logging.WARNING if foreseen.is_weak else logging.INFO, str(foreseen))
        jobs = SimulatedSource(setup, runner, schedule.concurrency if isinstance(schedule, Buffered) else 0)
        with naming_noise(foreseen):
            return drive(setup, schedule, jobs, runner, options, folder, budgets, bits.describe(runner))


def drive(
    setup: Setup,
    schedule: Schedule,
    source: StepSource,
    engine: Evaluates,
    options: Options,
    folder: Folder | None,
    budgets: tuple[PrivacyAccountant, ...] = (),
    here: Record | None = None,
) -> Result:
    """Steps from any source to the end of the schedule, from where the folder stands if it holds some.

    `here` is what the bits depend on, where they are promised to be the same.
    """
    task, seed = setup.task, setup.seed
    if (doubt := unproven(setup.algorithm, schedule)) is not None:
        log.warning(doubt)
    state = State.first(
        setup.algorithm, task.layout, task.initial(seed), seed, source.is_live, task.own(seed)
    )
    run = Run(setup, schedule, source, engine, options, state, folder, budgets=budgets)
    if folder is None:
        with _spilled(state, options.client_state_storage, setup.task.clients):
            return run.go()
    run.checkpoint = Checkpoint(folder, state, options.client_state_storage, setup.task.clients)
    try:
        run.state, run.metadata = run.checkpoint.restore(state)
        if run.state.t < schedule.steps and here is not None:
            bits.agree(folder, here, run.state.t, options.allow_numeric_changes)
        for budget in budgets:
            budget.recall(record["clients"] for record in folder.records())
        return run.go()
    finally:
        run.checkpoint.close()


def resume(
    out: str | os.PathLike[str],
    *,
    task: Task | None = None,
    algorithm: Algorithm | None = None,
    schedule: Schedule | None = None,
    progress: bool | None = None,
    callbacks: Sequence[Any] = (),
    ignore_divergence: bool | None = None,
    allow_numeric_changes: bool = False,
) -> Result:
    """Continue a run from its last committed step, to the very bits of one that was never stopped.

    A task or algorithm of your own making, or a schedule that chooses by one, must be given again; those that fedbraid can build from
    `run.json` need not be. `keep_going` overrides what the run began with. Where torch, processor or compiler are others than before, the bits would be too: it
    says which, and goes on with `allow_numeric_changes=True`.
    """
    folder = Folder(out)
    config = folder.config()
    try:
        return simulate(
            task or task_of(folder, config),
            algorithm or _algorithm_of(folder, config),
            evaluate(config["work"], WORK, "work"),
            schedule or evaluate(config["schedule"], SCHEDULES, "schedule"),
            seed=config["seed"],
            engine=config["engine"],
            out=out,
            device=config["device"],
            progress=progress,
            callbacks=callbacks,
            allow_numeric_changes=allow_numeric_changes,
            **config["options"]
            | ({} if ignore_divergence is None else {"ignore_divergence": ignore_divergence}),
        )
    except (KeyError, TypeError) as error:
        raise RunError(
            f"{folder.path / 'run.json'} is corrupt ({error}); restore a backup or start a new run"
        ) from error


# What run.json holds -------------------------------------------------------------------------------

_TASKS: weakref.WeakValueDictionary[int, Task] = weakref.WeakValueDictionary()

_DURATIONS = {
    f.__name__: f
    for f in (
        clock.constant,
        clock.halfnormal,
        clock.lognormal,
        clock.exponential,
        clock.trace,
        clock.classes,
        clock.measured,
    )
}
SCHEDULES: dict[str, Any] = {
    "Rounds": Rounds,
    "Buffered": Buffered,
    "bandwidth": clock.bandwidth,
    "devices": clock.devices,
    "availability": clock.availability,
    **SELECTIONS,
    **_DURATIONS,
}


def describe(
    setup: Setup, schedule: Schedule, engine: bits.Described, options: Options, device: str
) -> Record:
    """Everything that a run needs to be run again."""
    from fedbraid import __version__

    algorithm, task = setup.algorithm, setup.task
    return {
        "task": task.spec,
        "task_name": task.name,
        "data": task.fingerprint,
        "clients": task.clients,
        "parameters": task.layout.size,
        "algorithm": algorithm.name or None,
        "parts": parts(algorithm),
        **({} if (adapters := lora(task.layout, algorithm)) is None else {"lora": adapters}),
        **({} if (private := privacy_of(algorithm)) is None else {"privacy": private}),
        **({"personal": list(task.personal)} if task.personal else {}),
        "work": repr(setup.work),
        "schedule": repr(schedule),
        "seed": setup.seed,
        "engine": engine.describe(),
        **({} if (plan := getattr(engine, "plan", None)) is None else {"plan": plan.reason}),
        "device": device,
        "options": {
            "evaluate_every": options.evaluate_every, "evaluate_on": options.evaluate_on, "client_state_storage": options.client_state_storage,
            "checkpoint_every": options.checkpoint_every, "log_layer_norms": options.log_layer_norms, "ignore_divergence": options.ignore_divergence,
        },
        "bits": bits.describe(engine),
        "versions": {
            "fedbraid": __version__, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version(),
        },
    }  # fmt: skip


def parts(algorithm: Algorithm) -> Record:
    """The five parts as text."""
    return {name: repr(getattr(algorithm, name)) for name in ("rule", "gather", "server", "up", "down")}


def same(folder: Folder, known: Record, config: Record) -> None:
    """Refuse to mix two runs in one folder."""
    for key in ("data", "parts", "work", "schedule", "seed", "engine", "device"):
        if known.get(key) != config[key]:
            raise RunError(
                f"{folder.path} already contains a run with {key}={known.get(key)!r} (now: {config[key]!r});"
                " choose another out= or delete the folder"
            )


def task_of(folder: Folder, config: Record) -> Task:
    if config["task"] is not None:
        from fedbraid.data import tasks

        made: Task = tasks.reload(config["task"])
        return made
    for task in list(_TASKS.values()):
        if task.fingerprint == config["data"]:
            return task
    raise RunError(
        f"the task of {folder.path} was made in Python; pass it again: fb.resume({str(folder.path)!r}, task=task)"
    )


def _algorithm_of(folder: Folder, config: Record) -> Algorithm:
    with suppress(ConfigError):  # a part in it may be the user's own
        if config["algorithm"] is not None:
            made = algorithm_of(config["algorithm"])
            if parts(made) == config["parts"]:
                return made
    raise RunError(
        f"the algorithm of {folder.path} was made in Python; pass it again: fb.resume({str(folder.path)!r}, algorithm=algorithm)"
    )


def algorithm_from(text: str) -> Algorithm:
    """The algorithm that a text such as `fedshift(fedpaq(uniform(4)))` names."""
    makers = {name: getattr(codecs, name) for name in codecs.__all__}
    made = evaluate(text, {**algorithms.BUILDERS, **algorithms.WRAPPERS, **makers}, "algorithm")
    if not isinstance(made, Algorithm):
        raise ConfigError(f"{text!r} is not an algorithm; `fedbraid list` shows them")
    return made


def algorithm_of(text: str) -> Algorithm:
    """The same, or one of the user's own by the name `FILE.py:NAME`, whose file is imported."""
    if not files.names_file(text):
        return algorithm_from(text)
    made: Algorithm = files.load(text, Algorithm, "algorithm", algorithms.BUILDERS)
    with suppress(ConfigError):
        if made.name and parts(algorithm_from(made.name)) == parts(made):
            return made
    return replace(made, name=files.absolute(text))


def unproven(algorithm: Algorithm, schedule: Schedule) -> str | None:
    """A caution where no paper defines an algorithm under asynchrony, else None."""
    if not schedule.asynchronous or algorithm.defined_for_async:
        return None
    return (
        f"no paper defines {algorithm.name or 'this algorithm'} for stale updates; read its results with care"
    )


# Small things --------------------------------------------------------------------------------------


def _check(task: Any, algorithm: Any, work: Any, schedule: Any) -> None:
    for value, what, such in (
        (work, "work", "fb.Work(lr=0.1)"),
        (schedule, "schedule", "fb.rounds(100, clients=5)"),
    ):
        if value is None:
            raise ConfigError(
                f"simulate() needs a {what} as well, after the task and the algorithm; give {such}"
            )
    for value, kind in ((task, Task), (algorithm, Algorithm), (work, Work), (schedule, Schedule)):
        if not isinstance(value, kind):
            raise ConfigError(
                f"simulate takes (task, algorithm, work, schedule); got a {type(value).__name__} as {kind.__name__}."
                " Give them in this order, builders called: fb.fedavg()"
            )


def _seed(seed: Any) -> int:
    if isinstance(seed, np.integer):
        return int(seed)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigError(f"seed must be an integer, got {seed!r}")
    return seed


def _device(device: str | torch.device) -> str:
    """The device's name, once a number came back from it."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"device={str(device)!r} cannot compute here ({why}); use device='cpu'") from error
    return str(device)


def _cohort(schedule: Schedule, task: Task) -> int:
    if isinstance(schedule, Rounds):
        return (
            len(schedule.clients[0]) if isinstance(schedule.clients, tuple) else schedule.cohort(task.clients)
        )
    return task.clients


@contextmanager
def _opened(engine: Engine, setup: Setup) -> Iterator[None]:
    engine.open(setup)
    try:
        yield
    finally:
        setup.task.close()
        engine.close()


@contextmanager
def _spilled(state: State, store: str, clients: int) -> Iterator[None]:
    """Rows too many for memory go to a temporary file, where the run has no folder."""
    limits = {name: row_limit(rows, store, clients) for name, rows in rows_of(state) if rows.row_bytes}
    if all(limit is None for limit in limits.values()):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="fedbraid-") as scratch:
        widest = max(rows.row_bytes for _, rows in rows_of(state))
        db = Database(Path(scratch) / "rows.db", widest, scratch=True)
        for name, rows in rows_of(state):
            rows.attach(db, name, limits.get(name), alone=True)
        try:
            yield
        finally:
            db.close()
