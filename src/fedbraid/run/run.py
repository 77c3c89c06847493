"""The run loop: server steps from any source, each committed, evaluated and passed to callbacks."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import integer, one_of
from fedbraid.core.context import Vectors
from fedbraid.core.metric_names import PERSONAL
from fedbraid.core.rule import Rule
from fedbraid.core.traits import PersonalTraining
from fedbraid.engines.engine import Setup
from fedbraid.errors import ConfigError
from fedbraid.privacy.accountant import PrivacyAccountant
from fedbraid.run import fingerprint as bits
from fedbraid.run.checkpoint import Checkpoint, Folder, Record, row_limit, rows_of, save_model
from fedbraid.run.database import Database
from fedbraid.run.evaluate import Evaluates, Models, evaluate_model, per_client
from fedbraid.run.history import History
from fedbraid.run.result import Result, load_model_of, models_of
from fedbraid.run.source import StepSource
from fedbraid.run.state import State
from fedbraid.run.step import Population, advance
from fedbraid.schedule import Schedule
from fedbraid.schedule.selection import ClientHistory

log = logging.getLogger("fedbraid")

PAUSE = "pause"  # a callback returns it to stop the run here, unfinished

CLIENTS = "clients.json"  # final metrics of each client's model on its local test set

PERSONAL_METRIC = "{}_personal"  # the name of a metric of personalized models


@dataclass
class Options:
    """Evaluation, callbacks and storage of a run; none changes its numbers."""

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
class Run:
    """One run in progress, with steps from any source."""

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
    accountant: PrivacyAccountant | None = None  # privacy accountants
    client_history: ClientHistory | None = None  # if the schedule selects clients by it
    is_paused: bool = False  # a callback stopped the run, which the same call resumes
    _left: Record = field(default_factory=dict, repr=False)

    def leave(self, client: int, reachable: bool = True) -> None:
        """Let a client leave for good, before the next step.

        The server's data on it is removed; what mirrors the client's state is removed by the negated contribution that it
        sends. The contribution of a client that cannot be reached stays, and the next record says so.
        """
        self._check_registered(client)
        client_state = self.state.clients.get([client])
        self.dismiss(client, self.setup.algorithm.rule.withdraw(client_state) if reachable else None)

    def dismiss(self, client: int, contribution: Vectors | None) -> None:
        """The same with the negated contribution that the client sent; None if it could not be reached."""
        self._check_registered(client)
        self.state, stays = self.state.without(self.setup.algorithm, client, contribution)
        self._left.setdefault("left", []).append(client)
        if stays:
            self._left.setdefault("unreturned", []).append(client)

    def broadcast_first(self) -> None:
        """Make the first version, as far as it tells of all clients: these are known now, and none has trained yet."""
        if self.state.t == 0 and self.setup.algorithm.mean_samples:
            population = Population.of(self.source, self.state)
            self.state = self.state.broadcast_first(
                self.setup, population.N, population.samples, population.is_live
            )

    def _check_registered(self, client: int) -> None:
        if not 0 <= client < len(self.source.sizes) or client in self.state.gone:
            raise ConfigError(
                f"client {client} cannot leave, because it is not registered; clients are 0 to {len(self.source.sizes) - 1}"
            )

    def go(self) -> Result:
        """Run from the current state to the end."""
        self._call_hooks("start", self)
        pending: list[Record] = []
        self.client_history = self._client_history()
        population: Population | None = None
        for step in () if self.metadata.get("stopped") else self.source.steps(self):
            tick = step.tick
            private, sizes = self.accountant, self.source.sizes
            if private is not None and not private.can_afford(tick.clients.tolist(), sizes):
                self._stop(pending)
                break
            before = self.state.x
            population = Population.of(self.source, self.state, population)
            self.state, record = advance(
                self.setup, self.state, step, population, self.options.ignore_divergence
            )
            if self.client_history is not None:
                self.client_history.take(record)
            notes = step.on_step(record)
            record |= {**notes.record, **self._measure(before), **self._left}
            if private is not None:
                record |= private.charge(record["clients"], self.source.sizes)
            self._left = {}
            answers = [hook(record, self) for hook in self._hooks("step")]
            self.is_paused = PAUSE in answers
            stop = any(answers) or (private is not None and private.is_exhausted)
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
        """Why the engine was selected: now, or when the run in this folder began."""
        plan = getattr(self.engine, "plan", None)
        recorded = None if self.folder is None else self.folder.config().get("plan")
        return recorded if plan is None else plan.reason

    def _stop(self, pending: list[Record]) -> None:
        """End the run at this step, and commit the pending records."""
        self.metadata = {**self.metadata, "stopped": self.state.t}
        if self.checkpoint is not None:
            self.checkpoint.commit(self.state, pending, self.metadata)

    def _client_history(self) -> ClientHistory | None:
        """The history that a schedule with client selection uses, rebuilt from the records."""
        if getattr(self.schedule, "select", None) is None:
            return None
        history = ClientHistory(self.source.sizes, self.setup.seed)
        for record in self.history if self.folder is None else self.folder.records():
            if record["step"] <= self.state.t:
                history.take(record)
        return history

    def model(self, client: int | None = None) -> nn.Module:
        """The torch module with the evaluated weights of this step, or with those of a client."""
        return load_model_of(self.setup.task, self.setup.algorithm, self.state, client)

    def evaluated(self) -> Record:
        """The metrics of this step's model; those of personalized models have names that end in _personal."""
        task, on, state, rule = (
            self.setup.task,
            self.options.evaluate_on,
            self.state,
            self.setup.algorithm.rule,
        )
        initial = state.clients.default
        shared: Models = state.average
        if task.full_layout.size > task.layout.size:
            if PERSONAL not in initial:  # real clients store them
                return {}
            shared = partial(models_of, Rule(), state)
        personal = rule.traits().personal or PersonalTraining()
        if personal.has_no_global_model and initial:
            return evaluate_model(self.engine, task, partial(models_of, rule, state), on, state.t)
        record = evaluate_model(self.engine, task, shared, on, state.t)
        if initial and personal.personal_model is not None:
            personalized = evaluate_model(self.engine, task, partial(models_of, rule, state), on, state.t)
            record |= {PERSONAL_METRIC.format(name): value for name, value in personalized.items()}
        return record

    def _due(self) -> bool:
        """Whether to commit: not while a norm is over the divergence limit, so that the last good step stays."""
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
                models = partial(models_of, self.setup.algorithm.rule, self.state)
                rows = per_client(task, models if self.state.clients.default else x)
                self.folder.write_json(CLIENTS, {"clients": rows})
        self._call_hooks("end", result)
        return result

    def message_bytes(self) -> tuple[float, float]:
        """(down, up): the bytes of one participation, for schedules that charge transfer time."""
        a, newest = self.setup.algorithm, self.state.sent[max(self.state.sent)]
        return float(sum(newest.sizes.values())), float(a.up.size(a.uploads, self.setup.task.layout))

    def _hooks(self, name: str) -> list[Any]:
        return [getattr(cb, name) for cb in self.options.callbacks if hasattr(cb, name)]

    def _call_hooks(self, name: str, subject: Any) -> None:
        for hook in self._hooks(name):
            hook(subject)


def drive(
    setup: Setup,
    schedule: Schedule,
    source: StepSource,
    engine: Evaluates,
    options: Options,
    folder: Folder | None,
    accountant: PrivacyAccountant | None = None,
    numerics: Record | None = None,
) -> Result:
    """Run steps from any source to the end of the schedule, after those committed in the folder.

    `numerics` is the numerics fingerprint, for engines whose bits are reproducible.
    """
    task, seed = setup.task, setup.seed
    if (doubt := unproven(setup.algorithm, schedule)) is not None:
        log.warning(doubt)
    state = State.first(
        setup.algorithm,
        task.layout,
        task.initial(seed),
        seed,
        source.is_live,
        task.initial_personal_state(seed),
    )
    run = Run(setup, schedule, source, engine, options, state, folder, accountant=accountant)
    if folder is None:
        with _spilled(state, options.client_state_storage, setup.task.clients):
            return run.go()
    run.checkpoint = Checkpoint(folder, state, options.client_state_storage, setup.task.clients)
    try:
        run.state, run.metadata = run.checkpoint.restore(state)
        if run.state.t < schedule.steps and numerics is not None:
            bits.agree(folder, numerics, run.state.t, options.allow_numeric_changes)
        if accountant is not None:
            done = (record for record in folder.records() if record["step"] <= run.state.t)
            accountant.recall(record["clients"] for record in done)
        return run.go()
    finally:
        run.checkpoint.close()


def unproven(algorithm: Algorithm, schedule: Schedule) -> str | None:
    """A caution where no paper defines an algorithm under asynchrony, else None."""
    if not schedule.asynchronous or algorithm.defined_for_async:
        return None
    return (
        f"no paper defines {algorithm.name or 'this algorithm'} for stale updates; read its results with care"
    )


@contextmanager
def _spilled(state: State, store: str, clients: int) -> Iterator[None]:
    """Spill client tables that exceed memory to a temporary file, if the run has no folder."""
    limits = {name: row_limit(rows, store, clients) for name, rows in rows_of(state) if rows.row_bytes}
    if all(limit is None for limit in limits.values()):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="fedbraid-") as scratch:
        widest = max(rows.row_bytes for _, rows in rows_of(state))
        db = Database(Path(scratch) / "rows.db", widest, scratch=True)
        for name, rows in rows_of(state):
            rows.attach(db, name, limits.get(name), autocommit=True)
        try:
            yield
        finally:
            db.close()
