"""The client's half of a deployment: one order in, one upload out, and what the node remembers on its own disk.

A node keeps what it remembered after each upload until the server says which one was taken; an upload that
was lost or refused leaves no trace.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedbraid.core.algorithm import Algorithm
from fedbraid.core.context import Vectors
from fedbraid.core.link import BroadcastContext, as_message, bundle
from fedbraid.core.local_training import Gradient
from fedbraid.core.work import Work
from fedbraid.data.label_flip import flipped
from fedbraid.data.task import Task
from fedbraid.deploy.settings import Settings
from fedbraid.engines.backends import gradient
from fedbraid.engines.client_update import client_update, first_client_state
from fedbraid.engines.engine import Setup, TrainRequest, participate
from fedbraid.errors import RunError
from fedbraid.links.private import LocalNoise
from fedbraid.run.atomic_files import checksum, make_folder, write_whole
from fedbraid.run.budget import PrivacySetup, attach_privacy
from fedbraid.run.checkpoint import model_checksum

if TYPE_CHECKING:
    from fedbraid.deploy import Project


def client_app(project: Project) -> ClientApp:
    """Flower's ClientApp around the one client function."""
    seat = Seat(project)

    def hello(message: Message, context: Context) -> Message:
        if "leave" in (order := _config(message)):
            place = _place(context, order["run"])
            return _answer(part(project, order, project.settings(context.run_config), place), message)
        if order.get("ask") == "nudge":
            return _answer({}, message)
        samples = seat.meet(order.get("server"), context.node_config)
        memory = Memory.read(_place(context, _config(message)["run"]))
        about = {"name": _name(context), "samples": samples, "held": memory.held, "client": _claim(context)}
        return _answer(about, message)

    def train(message: Message, context: Context) -> Message:
        order = {**_config(message), **message.content["model"]}
        place = _place(context, order["run"])
        return _answer(
            obey(seat, order, project.settings(context.run_config), context.node_config, place), message
        )

    app = ClientApp()
    app.query()(hello)
    app.train()(train)
    return app


@dataclass
class Seat:
    """A node's data, model and gradient: made once by a worker, for every order where Flower starts a process for each."""

    project: Project
    place: dict[str, Any] = field(default_factory=dict)  # the configuration of the node whose data this is
    server: str | None = None  # that it was read for
    own: Task | None = None
    known: tuple[Settings, int] | None = None  # what the gradient was made for
    made: tuple[Setup, Gradient] | None = None

    def meet(self, server: str | None, node_config: Mapping[str, Any]) -> int:
        """Read the data for a server that is not known yet; one that asks twice gets the same answer."""
        if self.own is None or server is None or (server, dict(node_config)) != (self.server, self.place):
            self.sit(node_config)
            self.server = server
        assert self.own is not None
        return int(self.own.sizes[0])

    def sit(self, node_config: Mapping[str, Any]) -> None:
        """Read the data."""
        self.own, self.known = None, None  # whatever happens now
        self.own = self.project.parts.own(node_config)
        self.place = dict(node_config)

    def ready(
        self, settings: Settings, node_config: Mapping[str, Any], client: int
    ) -> tuple[Setup, Gradient]:
        """What trains the node's data as client number `client`, the only one that its task knows the samples of."""
        if self.own is None or self.place != dict(node_config):
            self.sit(node_config)
        if self.made is None or self.known != (settings, client):
            own, (algorithm, work) = self.own, settings.what()
            assert own is not None
            if _of_its_own(algorithm):  # a gradient knows its noise
                crowd = PrivacySetup(settings.when(), settings.nodes, work, own.sizes)
                algorithm, _ = attach_privacy(algorithm, crowd)
            offsets = np.concatenate([np.zeros(client + 1, np.int64), own.offsets[1:]])
            own = flipped(replace(own, offsets=offsets), algorithm.rule.traits().flips_labels)
            setup = Setup(algorithm, own, work, settings.seed)
            self.known, self.made = (settings, client), (setup, gradient(setup, "auto"))
        return self.made


def obey(
    seat: Seat,
    order: Mapping[str, Any],
    settings: Settings,
    node_config: Mapping[str, Any],
    place: Path,
) -> dict[str, Any]:
    """Train as ordered: what to send back. What is to be remembered is on disk before this returns."""
    client, version = int(order["client"]), int(order["version"])
    setup, gradients = seat.ready(settings, node_config, client)
    memory = Memory.read(place)
    n = int(setup.task.sizes[client])
    setup = replace(setup, algorithm=_within_budget(setup.algorithm, setup.work, settings, memory.visits, n))
    algorithm, task = setup.algorithm, setup.task
    memory.forget_all_but({str(order["start"]), str(order["taken"])})
    if not memory.receive(order, setup):
        return {"job": str(order["job"]), "lost": True, "held": memory.held}
    who = BroadcastContext(algorithm.downloads, version, settings.seed, task.layout, real=True)
    down = algorithm.down.decode_held(memory.down, who)
    start, fresh = str(order["start"]), first_client_state(setup)
    rows = memory.after.get(start, {name: v.reshape(1, -1) for name, v in fresh.items()})
    forgot = bool(fresh) and start != "none" and start not in memory.after
    frames: dict[str, bytes] = {}
    reply = client_update(
        setup, gradients, TrainRequest(participate(setup, np.array([client]), version), down, rows), frames
    )
    memory.after[str(order["job"])] = reply.client_state
    memory.visits += 1
    memory.write(place, keep_down=algorithm.down.needs_previous)
    return {
        "job": str(order["job"]),
        "lost": False,
        "held": memory.held,
        "forgot": forgot,
        "loss": 0.0 if _of_its_own(algorithm) else float(reply.loss),  # which would tell of its data
        "blob": bundle(frames),
    }


def _of_its_own(algorithm: Algorithm) -> bool:
    """Whether clients add noise themselves."""
    return isinstance(algorithm.up, LocalNoise) or algorithm.rule.traits().example_privacy is not None


def _within_budget(
    algorithm: Algorithm, work: Work, settings: Settings, visits: int, samples: int
) -> Algorithm:
    """The algorithm with the noise that this node adds itself, unless its own budget is spent."""
    if not _of_its_own(algorithm):
        return algorithm
    sizes = np.array([samples], np.int64)
    algorithm, budgets = attach_privacy(algorithm, PrivacySetup(settings.when(), settings.nodes, work, sizes))
    for budget in budgets:
        budget.recall([[0]] * visits)
        if not budget.can_afford([0], sizes):
            raise RunError(
                f"this node has uploaded {visits} times, which is all that its privacy budget allows; it takes no part in"
                " this run any more"
            )
    return algorithm


def part(project: Project, order: Mapping[str, Any], settings: Settings, place: Path) -> dict[str, Any]:
    """What a client that goes for good sends: the negative of what the server mirrors of its memory."""
    algorithm, _ = settings.what()
    layout = project.parts.layout
    taken, memory = str(order["leave"]), Memory.read(place)
    if taken != "none" and taken not in memory.after:
        return {"lost": True, "blob": b""}
    fresh = algorithm.rule.init(torch.zeros(layout.size))
    rows = memory.after.get(taken) or {name: v.reshape(1, -1) for name, v in fresh.items()}
    return {"lost": False, "blob": as_message(algorithm.rule.withdraw(rows), layout)}


@dataclass
class Memory:
    """What a node remembers between orders: the server's hidden state, and itself after each upload."""

    held: int = -1  # the version of `down`, where the server counts on it
    down: Vectors = field(default_factory=dict)
    after: dict[str, Vectors] = field(default_factory=dict)  # job -> rows [1, ·]
    visits: int = 0  # how often it has uploaded, taken or not

    def forget_all_but(self, jobs: set[str]) -> None:
        self.after = {job: rows for job, rows in self.after.items() if job in jobs}

    def receive(self, order: Mapping[str, Any], setup: Setup) -> bool:
        """Take in what the server sent; False where it builds on something that this node does not hold."""
        base, version = int(order["base"]), int(order["version"])
        if base >= 0 and self.held != base:
            self.held, self.down = -1, {}
            return False
        who = BroadcastContext(setup.algorithm.downloads, version, setup.seed, setup.task.layout, real=True)
        self.down = setup.algorithm.down.receive(order["blob"], base, self.down, who)
        self.held = version
        return True

    @classmethod
    def read(cls, place: Path) -> Memory:
        try:
            with safe_open(place / "memory.safetensors", "pt") as file:
                said = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if said["checksum"] != _checksum(said["fedbraid"], tensors):
                raise ValueError("its checksum does not fit")
            about = json.loads(said["fedbraid"])
        except FileNotFoundError:
            return cls()
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{place / 'memory.safetensors'} is damaged ({error}); remove it, and this node starts without a memory"
            ) from error
        jobs: dict[str, Vectors] = {job: {} for job in about["jobs"]}
        down: Vectors = {}
        for key, value in tensors.items():
            kind, job, name = key.split("/", 2)
            (down if kind == "down" else jobs[job])[name] = value
        return cls(about["held"], down, jobs, about["visits"])

    def write(self, place: Path, keep_down: bool) -> None:
        """To the disk itself, whole or not at all: what is uploaded next will be counted on."""
        make_folder(place)
        tensors: dict[str, Tensor] = {}
        if keep_down:
            tensors |= {f"down//{name}": v.contiguous().clone() for name, v in self.down.items()}
        for job, rows in self.after.items():
            tensors |= {f"after/{job}/{name}": v.contiguous().clone() for name, v in rows.items()}
        about = json.dumps(
            {"held": self.held if keep_down else -1, "jobs": list(self.after), "visits": self.visits}
        )
        said = {"fedbraid": about, "checksum": _checksum(about, tensors)}
        write_whole(place / "memory.safetensors", save_tensors(tensors, said))


def _checksum(about: str, tensors: Vectors) -> str:
    return f"{checksum(about.encode(), int(model_checksum(tensors), 16)):08x}"


# Flower -----------------------------------------------------------------------------------------------


def _config(message: Message) -> Mapping[str, Any]:
    found: Mapping[str, Any] = message.content["fedbraid"]
    return found


def _answer(content: dict[str, Any], message: Message) -> Message:
    return Message(RecordDict({"fedbraid": ConfigRecord(content)}), reply_to=message)


def _name(context: Context) -> str:
    """Who this node is, whatever id Flower gives it today."""
    return str(context.node_config.get("name", f"node-{context.node_id}"))


def _claim(context: Context) -> int:
    """The client number that this node is to have, -1 where the server may choose."""
    return int(context.node_config.get("client", -1))


def _place(context: Context, run: str) -> Path:
    """Where this node remembers what belongs to a run."""
    root = context.node_config.get("state") or os.path.join("~", ".fedbraid", "nodes")
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", _name(context))
    return Path(str(root)).expanduser() / safe / re.sub(r"[^a-z0-9]", "_", run)
