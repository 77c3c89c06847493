"""A node: one process that takes signed orders, trains on its own data, and keeps its state until a step counts it.

Invariants.
1. No code travels. An order names a task by its digest; the node's owner has installed the package and the task's file.
2. State after a job is on the disk before its answer leaves, and is pending until a later order names the job as the one
   to start from: an upload that was lost or refused leaves no trace.
3. A job is done once. Its answer is stored beside the state, and a repetition of the order gets the same bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from fedbraid.algorithms.secure import summing
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.link import BroadcastContext
from fedbraid.core.local_training import Gradient
from fedbraid.core.work import Work
from fedbraid.data.label_flip import flipped
from fedbraid.data.task import Task
from fedbraid.deploy import Project
from fedbraid.deploy.backoff import Backoff
from fedbraid.deploy.node_state import NodeMemory, Trained
from fedbraid.deploy.project import task_digest
from fedbraid.deploy.secure_round import SecureNode
from fedbraid.deploy.settings import Settings
from fedbraid.deploy.transport import NodeTransport, SignedOrder, pack_answer
from fedbraid.deploy.troubles import plain, say
from fedbraid.engines.backends import gradient
from fedbraid.engines.client_update import client_update, first_client_state
from fedbraid.engines.engine import Setup, TrainRequest, participate
from fedbraid.errors import EngineError, InUseError, RunError
from fedbraid.links.message import as_message, bundle
from fedbraid.privacy.attach import PrivacySetup, attach_privacy
from fedbraid.privacy.clipping import LocalNoise
from fedbraid.run.atomic_files import make_folder, write_atomic


@dataclass
class NodeRuntime:
    """Answers the orders of a transport. `config` is what `load(node_config)` gets."""

    project: Project
    transport: NodeTransport
    state: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    task: Task | None = None  # this node's data
    server: str = ""  # for which it was read
    prepared: tuple[Settings, int, Setup, Gradient] | None = None
    secure: SecureNode = field(default_factory=SecureNode)

    def run(self) -> None:
        """Until the transport is closed."""
        for order in self.transport.orders():
            self.obey(order)

    def obey(self, order: SignedOrder) -> None:
        """Answer one order; whatever goes wrong is told to the server, and the node goes on."""
        place = self.place(order.run)
        try:
            answer = self._answer(order, place)
        except EngineError as error:  # the model could not be fetched in time: the order will be given again
            say(f"{order.kind}: {error}")
            return
        except Exception as error:
            traceback.print_exc()
            why = plain(f"{type(error).__name__}: {error}")[:500]
            answer = pack_answer({"error": why, "at": time.time()})
        try:
            self.transport.answer(order, answer)
        except EngineError as error:
            say(f"{order.kind}: {error}")

    def place(self, run: str) -> Path:
        """Where this node stores what belongs to a run."""
        safe = [re.sub(r"[^A-Za-z0-9_-]", "_", part) for part in (self.transport.name, run)]
        return self.state.expanduser() / safe[0] / safe[1]

    def _answer(self, order: SignedOrder, place: Path) -> bytes:
        body = json.loads(order.body) if order.body else {}
        if order.kind == "PING":
            return pack_answer({})
        settings = self._settings(body)
        if order.kind == "HELLO":
            task = self._data(str(body["server"]))
            return pack_answer({"samples": int(task.sizes[0]), "version": NodeMemory.read(place).version})
        if order.kind == "LEAVE":
            return self._leave(str(body["committed"]), settings, place)
        if order.kind == "SUM":
            setup, _ = self._prepare(settings, int(body["client"]))
            sums = summing(setup.algorithm)
            if sums is None:
                raise RunError("the server asks for a secure sum, and the algorithm has none")
            return self.secure.answer(order.job, body, setup, sums, NodeMemory.read(place), place)
        if (done := _stored_answer(place, order.job)) is not None:
            return done
        answer = self._train(order, body, settings, place)
        make_folder(place)
        write_atomic(place / "answer", order.job.encode() + answer)
        return answer

    def _settings(self, body: Mapping[str, Any]) -> Settings:
        """The run's configuration, of a task that is ours."""
        settings = self.project.settings(body["settings"])
        if task_digest(settings, self.project.halves.layout) != body["task"]:
            raise RunError(
                "this node's task is another than the server's; compare fleet.py and fedbraid's version with the server's"
            )
        return settings

    def _data(self, server: str = "") -> Task:
        """This node's data, read anew for each start of the server."""
        if self.task is None or server not in ("", self.server):
            self.task, self.prepared, self.server = None, None, server  # whatever happens now
            self.task = self.project.halves.own({"name": self.transport.name, **self.config})
        return self.task

    def _prepare(self, settings: Settings, client: int) -> tuple[Setup, Gradient]:
        """What trains the node's data as client number `client`, the only one whose samples its task has."""
        own = self._data()
        if self.prepared is None or self.prepared[:2] != (settings, client):
            algorithm, work = settings.what()
            if _adds_noise(algorithm):  # a gradient knows its noise
                setup = PrivacySetup(settings.when(), settings.nodes, work, own.sizes)
                algorithm, _ = attach_privacy(algorithm, setup)
            offsets = np.concatenate([np.zeros(client + 1, np.int64), own.offsets[1:]])
            own = flipped(replace(own, offsets=offsets), algorithm.rule.traits().flips_labels)
            made = Setup(algorithm, own, work, settings.seed)
            self.prepared = settings, client, made, gradient(made, "auto")
        return self.prepared[2:]

    def _train(self, order: SignedOrder, body: Mapping[str, Any], settings: Settings, place: Path) -> bytes:
        client, version, start = int(body["client"]), int(body["version"]), str(body["start"])
        setup, gradients = self._prepare(settings, client)
        memory = NodeMemory.read(place)
        algorithm, task = setup.algorithm, setup.task
        algorithm = _within_budget(
            algorithm, setup.work, settings, memory.participations, int(task.sizes[client])
        )
        setup = replace(setup, algorithm=algorithm)
        memory.keep({start, str(body["committed"])})
        who = BroadcastContext(algorithm.downloads, version, setup.seed, task.layout, real=True)
        base = int(body["base"])
        if base >= 0 and memory.version != base:
            return pack_answer({"lost": True, "version": -1})
        memory.down = algorithm.down.receive(self.transport.model(order), base, memory.down, who)
        memory.version = version
        fresh = first_client_state(setup)
        rows = memory.after.get(start, {name: v.reshape(1, -1) for name, v in fresh.items()})
        forgot = bool(fresh) and start != "none" and start not in memory.after
        frames: dict[str, bytes] = {}
        down = algorithm.down.decode_held(memory.down, who)
        reply = client_update(
            setup,
            gradients,
            TrainRequest(participate(setup, np.array([client]), version), down, rows),
            frames,
        )
        is_masked = summing(algorithm) is not None
        if is_masked:
            memory.trained = {order.job: Trained(version, float(reply.loss), reply.uploads)}
            frames = {}
        memory.after[order.job] = reply.client_state
        memory.participations += 1
        memory.write(place, keep_down=algorithm.down.needs_previous)
        # where the node adds noise itself, a loss would tell of its data; a masked one is in the sum
        loss = 0.0 if _adds_noise(algorithm) or is_masked else float(reply.loss)
        held = memory.version if algorithm.down.needs_previous else -1
        head = {"lost": False, "version": held, "forgot": forgot, "loss": loss}
        return pack_answer(head, b"" if is_masked else bundle(frames))

    def _leave(self, committed: str, settings: Settings, place: Path) -> bytes:
        """What a client that leaves for good sends: the negative of what the server mirrors of its state."""
        algorithm, _ = settings.what()
        layout, memory = self.project.halves.layout, NodeMemory.read(place)
        if summing(algorithm) is not None:  # a single client's state, which nobody is to see
            return pack_answer({"lost": True})
        if committed != "none" and committed not in memory.after:
            return pack_answer({"lost": True})
        fresh = algorithm.rule.init(torch.zeros(layout.size))
        rows = memory.after.get(committed) or {name: v.reshape(1, -1) for name, v in fresh.items()}
        return pack_answer({"lost": False}, as_message(algorithm.rule.withdraw(rows), layout))


def run_node(
    project: Project, url: str, key: Path, state: Path, config: Mapping[str, Any], runtime: type[NodeRuntime] = NodeRuntime
) -> None:  # fmt: skip
    """A node, or an edge, on a NATS broker, until the process is told to stop; it waits for a broker that is not there yet."""
    from fedbraid.deploy import credentials
    from fedbraid.deploy.node_nats import NatsNode

    name, _ = credentials.read_key(key)  # what is wrong with the key is said before anything is tried
    credentials.operator_public_key(key.parent / "operator.pub")
    backoff = Backoff(0.5, 30.0)
    with _single(state.expanduser() / f".{name}.lock"):
        while True:
            try:
                transport = NatsNode(url, key)
                break
            except EngineError as error:
                wait = backoff.failed()
                say(f"{error}; trying again in {wait:.1f} s")
                time.sleep(wait)
        say(f"{name} is connected to {url}")
        try:
            runtime(project, transport, state, config).run()
        finally:
            transport.close()


@contextlib.contextmanager
def _single(path: Path) -> Iterator[None]:
    """One process a node."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock: IO[str] = open(path, "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise InUseError(
            f"another process runs this node with the state in {path.parent}; stop it first, or give another --state"
        ) from error
    with lock:
        yield


def _stored_answer(place: Path, job: str) -> bytes | None:
    """The answer to this job, if it was the last one."""
    with contextlib.suppress(OSError):
        stored = (place / "answer").read_bytes()
        if stored.startswith(job.encode()):
            return stored[len(job) :]
    return None


def _adds_noise(algorithm: Algorithm) -> bool:
    """Whether nodes add noise themselves."""
    return isinstance(algorithm.up, LocalNoise) or algorithm.rule.traits().example_privacy is not None


def _within_budget(
    algorithm: Algorithm, work: Work, settings: Settings, participations: int, samples: int
) -> Algorithm:
    """The algorithm with the noise that this node adds itself, unless its own budget is spent."""
    if not _adds_noise(algorithm):
        return algorithm
    sizes = np.array([samples], np.int64)
    setup = PrivacySetup(settings.when(), settings.nodes, work, sizes)
    algorithm, accountant = attach_privacy(algorithm, setup)
    if accountant is not None:
        accountant.recall([[0]] * participations)
        if not accountant.can_afford([0], sizes):
            raise RunError(
                f"this node has uploaded {participations} times, which is all that its privacy budget allows; it takes no"
                " part in this run any more"
            )
    return algorithm
