"""The server's entry point: a deployed run, to its end or as far as it gets."""

from __future__ import annotations

import logging
import secrets
import time
from contextlib import suppress
from typing import Any

from fedbraid.algorithms.secure import check_run
from fedbraid.core.algorithm import Algorithm
from fedbraid.deploy import Project
from fedbraid.deploy.backoff import Backoff
from fedbraid.deploy.broker import Broker
from fedbraid.deploy.credentials import operator_key
from fedbraid.deploy.fleet import Fleet
from fedbraid.deploy.project import Deployment, task_digest
from fedbraid.deploy.settings import Settings
from fedbraid.deploy.transport import OrderSigner, Transport
from fedbraid.deploy.transport_nats import NatsTransport, StreamLimits
from fedbraid.deploy.troubles import say
from fedbraid.engines.autograd import LoopGradient
from fedbraid.engines.engine import Setup
from fedbraid.errors import ConfigError, EngineError, InUseError
from fedbraid.privacy.attach import PrivacySetup, attach_privacy
from fedbraid.run.checkpoint import Folder, Record
from fedbraid.run.config import describe, same
from fedbraid.run.result import Result
from fedbraid.run.run import Options, Run, drive
from fedbraid.schedule import Buffered, Rounds, Schedule

log = logging.getLogger("fedbraid")
LOCK_TIMEOUT_S = 30.0  # for which a server waits for the one before it to release the run's folder
BROKER_TIMEOUT_S = 120.0
MiB = 1024**2


def serve(
    project: Project, settings: Settings, transport: Transport, signer: OrderSigner, callbacks: Any = ()
) -> Result:
    """Run a fleet behind this transport, from where the run's folder stands."""
    (algorithm, work), schedule, task = settings.what(), settings.when(), project.halves.served()
    algorithm.fits(work, task.full_layout.size > task.layout.size)
    algorithm.gather.traits().check_layout(task.layout)
    if (cohort := _planned(schedule, settings.nodes)) is not None:
        algorithm.gather.traits().check_cohort(cohort)
    if algorithm.rule.traits().example_privacy is not None and settings.samples == "free":
        raise ConfigError(
            "unit='example' is accounted by how many samples a node has, which samples='free' lets change; use 'fixed'"
        )
    if algorithm.gather.traits().sums_only and settings.max_norm:
        raise ConfigError(
            f"max_norm={settings.max_norm:g} is a limit of single uploads, which a secure sum hides; leave one of the two out"
        )
    if settings.edges:
        _check_edges(algorithm, schedule)
    body = {"task": task_digest(settings, task.layout), "settings": settings.to_nodes()}
    setting = PrivacySetup(schedule, settings.nodes, work)
    check_run(algorithm, schedule, settings.nodes, setting.even(), real=True)
    algorithm, accountant = attach_privacy(algorithm, setting)
    setup, folder = Setup(algorithm, task, work, settings.seed), Folder(settings.out)
    watching = [*project.callbacks, *settings.callbacks(), *callbacks, Lines()]
    options = Options(evaluate_every=settings.evaluate_every or None, callbacks=watching)
    _open(folder, describe(setup, schedule, FleetName(), options, "cpu"), settings)
    end = time.monotonic() + LOCK_TIMEOUT_S
    with Fleet(setup, schedule, settings, transport, signer, folder, body) as fleet:
        while True:
            try:
                return drive(setup, schedule, fleet, LoopGradient(task), options, folder, accountant)
            except InUseError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)


def serve_folder(deployment: Deployment, url: str) -> Result:
    """The same for a deployment's folder, whose broker runs at `url`."""
    folder, settings = deployment.folder, deployment.settings
    keys, size = folder / "keys", deployment.project.halves.layout.size
    # four bytes an entry; an algorithm may send several vectors, and the quota holds two answers
    # an edge's sums have eight bytes for each of some levels, and a line of a verdict for each upload
    answer_bytes = MiB + (100 if settings.edges else 40) * size
    limits = StreamLimits(answer_bytes=answer_bytes, model_bytes=MiB + 40 * size)
    log_file = Broker(keys, folder / "broker").log
    end, backoff = time.monotonic() + BROKER_TIMEOUT_S, Backoff(0.2, 5.0)
    while True:
        try:
            transport = NatsTransport(url, keys, limits, log_file)
            break
        except EngineError:
            if time.monotonic() > end:
                raise
            time.sleep(backoff.failed())
    try:
        return serve(deployment.project, settings, transport, OrderSigner(operator_key(keys)))
    finally:
        with suppress(Exception):
            transport.close()


def _check_edges(algorithm: Algorithm, schedule: Schedule) -> None:
    """Refuse edges where uploads are needed one by one."""
    traits = algorithm.gather.traits()
    if traits.needs_every_upload:
        raise ConfigError(
            f"{type(algorithm.gather).__name__} reads single uploads, so no edge can fold them; leave out edges, or use an algorithm"
            " that averages, such as fedavg or scaffold"
        )
    if traits.sums_only or not isinstance(schedule, Rounds):
        what = "secure sums" if traits.sums_only else "asynchronous steps"
        raise ConfigError(f"edges fold the open uploads of rounds, not {what}; leave out edges")


def _planned(schedule: Schedule, nodes: int) -> int | None:
    """The most uploads that a step may count, where that is known before nodes come; a share is of those there must be."""
    if isinstance(schedule, Buffered):
        return schedule.buffer
    if not isinstance(schedule, Rounds):
        return None
    if isinstance(schedule.clients, tuple):
        return min(len(clients) for clients in schedule.clients[: schedule.steps])
    return schedule.clients if isinstance(schedule.clients, int) else schedule.cohort(nodes)


def _open(folder: Folder, config: Record, settings: Settings) -> None:
    """The folder must hold this run or none."""
    config |= {"clients": settings.nodes, "run": secrets.token_hex(8), "real": True}
    if not folder.exists:
        folder.create(config)
    same(folder, folder.config(), config)


class FleetName:
    """What run.json calls the engine."""

    def describe(self) -> str:
        return "fleet"


class Lines:
    """A line of the log for every step."""

    def step(self, record: Record, run: Run) -> None:
        told = ", ".join(f"{k} {record[k]:.4f}" for k in ("loss", "accuracy", "train_loss") if k in record)
        say(f"step {record['step']} of {run.schedule.steps}, {len(record['clients'])} uploads, {told}")
