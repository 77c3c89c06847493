"""`simulate` and `resume`: whole runs, in memory or in a folder that can be continued."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fedbraid.algorithms.secure import check_run
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.work import WORK, Work
from fedbraid.data.label_flip import flipped
from fedbraid.data.task import Task
from fedbraid.engines import select
from fedbraid.engines.engine import Engine, Setup
from fedbraid.errors import ConfigError, RunError
from fedbraid.parse import evaluate
from fedbraid.privacy.attach import PrivacySetup, attach_privacy
from fedbraid.run import fingerprint as bits
from fedbraid.run.checkpoint import Folder, Record
from fedbraid.run.config import SCHEDULES, describe, remember_task, resumed_algorithm, same, task_of
from fedbraid.run.noise_outlook import naming_noise, outlook
from fedbraid.run.progress import Bar, is_watched
from fedbraid.run.result import Result
from fedbraid.run.run import Options, drive
from fedbraid.run.simulated_source import SimulatedSource
from fedbraid.run.task_summary import note as note_task
from fedbraid.schedule import Buffered, Rounds, Schedule

log = logging.getLogger("fedbraid")


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
    """Train a task with an algorithm and return the result.

    With `out`, every step is committed to that folder; a folder that holds the same run is continued.
    `evaluate_every=None` skips evaluation. `progress` draws a bar; by default it does in terminals and notebooks, not
    in pipes. `client_state_storage` is "memory", "disk", or "auto", by size. `log_layer_norms=True` records how far each
    layer moved. `checkpoint_every` commits less often. A run that diverges ends unless `ignore_divergence`.
    `allow_numeric_changes` continues a folder although torch, CPU or compiler changed.
    """
    _check(task, algorithm, work, schedule, evaluate_on)
    assert work is not None
    assert schedule is not None
    algorithm.fits(work, task.full_layout.size > task.layout.size)
    algorithm.gather.traits().check_layout(task.layout)
    work = work.tabled(schedule.steps)
    seed, device = _seed(seed), _device(device)
    if progress is True or (progress is None and is_watched()):
        callbacks = [*callbacks, Bar()]
    options = Options(
        evaluate_every, evaluate_on, callbacks, client_state_storage, checkpoint_every, log_layer_norms,
        ignore_divergence, allow_numeric_changes,
    )  # fmt: skip
    if (caution := schedule.caution(task.clients)) is not None:
        log.warning(caution)
    setting = PrivacySetup(schedule, task.clients, work, task.sizes, seed)
    check_run(algorithm, schedule, task.clients, setting.even(), real=False)
    algorithm, accountant = attach_privacy(algorithm, setting)
    folder = None if out is None else Folder(out)
    remember_task(task)
    recorded = folder.config() if folder is not None and folder.exists else None
    cohort = schedule.buffer if isinstance(schedule, Buffered) else _cohort(schedule, task)
    algorithm.gather.traits().check_cohort(cohort)
    task = task.to(device)
    task = flipped(task, algorithm.rule.traits().flips_labels)
    setup = Setup(algorithm, task, work, seed, cohort, cohort * schedule.steps)
    runner = select(engine, setup, None if recorded is None else recorded.get("engine"))
    with bits.as_before(recorded), _opened(runner, setup):
        if folder is not None:
            _open_folder(folder, describe(setup, schedule, runner, options, device), recorded, task)
        foreseen = outlook(algorithm, schedule.steps, cohort, task.layout.size)
        if foreseen is not None:
            log.log(logging.WARNING if foreseen.is_weak else logging.INFO, str(foreseen))
        jobs = SimulatedSource(setup, runner, schedule.concurrency if isinstance(schedule, Buffered) else 0)
        with naming_noise(foreseen):
            return drive(setup, schedule, jobs, runner, options, folder, accountant, bits.describe(runner))


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
    """Resume a run from its last committed step; the result is bit-identical to an uninterrupted one.

    A custom task or algorithm, or a schedule that selects clients by a custom function, must be passed again; others are
    rebuilt from `run.json`. `ignore_divergence` overrides the run's setting. If torch, processor or compiler have
    changed, the run is refused unless `allow_numeric_changes=True`, because results may differ in the last bits.
    """
    folder = Folder(out)
    config = folder.config()
    try:
        return simulate(
            task or task_of(folder, config),
            algorithm or resumed_algorithm(folder, config),
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


def _check(task: Any, algorithm: Any, work: Any, schedule: Any, evaluate_on: str) -> None:
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
    if evaluate_on == "clients" and task.test_offsets is None:
        raise ConfigError(
            "evaluate_on='clients' needs local test sets; give client_tests=, test_fraction=, natural ids or load(…, test_shares=True)"
        )


def _open_folder(folder: Folder, config: Record, recorded: Record | None, task: Task) -> None:
    """Create the run's folder, or check that it holds this very run."""
    if recorded is not None:
        same(folder, recorded, config)
        return
    folder.create(config)
    note_task(folder, task)


def _seed(seed: Any) -> int:
    if isinstance(seed, np.integer):
        return int(seed)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigError(f"seed must be an integer, got {seed!r}")
    return seed


def _device(device: str | torch.device) -> str:
    """The device's name, after a test that it computes."""
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
