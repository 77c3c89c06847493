"""Clients on a Ray cluster: blocks as tasks on any node, the data placed once, only vectors on the wire.

A block is a pure function of its order, so a task whose worker or node dies is simply run again, by Ray,
elsewhere; its first life left nothing behind.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import re
import socket
import sys
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.context import Vectors
from fedbraid.core.local_training import Gradient
from fedbraid.data.task import Task
from fedbraid.engines.backends import gradient, planned
from fedbraid.engines.client_update import client_update, first_client_state
from fedbraid.engines.engine import Orders, Reply, Setup, TrainRequest, participate
from fedbraid.engines.folding import Folder, merged, should_fold
from fedbraid.engines.in_process import block_limit
from fedbraid.errors import ConfigError, EngineError, FedbraidError, MissingExtra, unknown

WAVE_BYTES = 2**30  # about how much may come back at a time
RETRIES = 20  # lives of a block before its deaths are taken for its own fault
LOOPBACK = "127.0.0.2"  # of a Ray that is started here; Ray takes 127.0.0.1 for the machine's outer address
BLOCKS = 4  # pieces per worker where a larger block is not cheaper, so that nobody waits long for the last


@dataclass
class Ray:
    """Blocks of clients as Ray tasks of one CPU each.

    `address` is a running cluster's ("auto" for the one on this machine); without it, Ray is started here.
    A process that is already connected to Ray stays so. A round is cut for `workers` at a time, by default
    the CPUs of the cluster. `data="store"` ships the data once to each node through the object store; "load"
    has each node load the task from its own disk.
    """

    address: str | None = None
    workers: int | None = None
    backend: str = "auto"
    block: int | None = None
    data: str = "store"

    def open(self, setup: Setup) -> None:
        ray = _ray()
        if setup.task.device.type != "cpu":
            raise ConfigError(f"the ray engine runs on the CPU, not on {setup.task.device}; use device='cpu'")
        parcel = _Parcel.of(setup, self.data)
        self.setup, self.ray, self.ours = setup, ray, not ray.is_initialized()
        if self.ours:
            _connect(self.address, self.workers)
        self.count = self.workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self.grad, self.plan = planned(setup, "ray", self.backend, self.count, 1)
        self.key, self.parcel = uuid.uuid4().hex, ray.put(parcel)
        self.task = ray.remote(num_cpus=1, max_retries=RETRIES)(_block)
        uploads = 4 * sum(setup.algorithm.widths(setup.task.layout).values())
        state = sum(v.nbytes for v in first_client_state(setup).values())
        self.wave, self.state_wave = (
            max(self.count, WAVE_BYTES // max(row, 1)) for row in (uploads + state, state)
        )
        self.down: tuple[Vectors, Any] = ({}, None)

    def train(self, orders: Orders) -> Iterator[Reply]:
        if self.down[0] is not orders.download:
            self.down = (orders.download, self.ray.put(_numpy(orders.download)))
        if not should_fold(len(orders.clients), self.count, len(orders.download["x"])):
            orders = dataclasses.replace(orders, folds_at=None)
        wave = self.wave if orders.folds_at is None else self.state_wave
        for lo in range(0, len(orders.clients), wave):
            some = orders.participation[lo : lo + wave]
            yield self._wave(dataclasses.replace(orders, participation=some))

    def _wave(self, orders: Orders) -> Reply:
        m, folds_at = len(orders.clients), orders.folds_at
        each = -(-m // (self.count * (1 if self.grad.vectorized else BLOCKS)))
        if folds_at is None:
            each = self.block or each
        blocks = [orders.subset(slice(lo, lo + each)) for lo in range(0, m, each)]
        call = _Call(self.key, [self.parcel], self.grad.name, self.block, orders.version, folds_at)
        futures = [self.task.remote(call, b.clients, self.down[1], _numpy(b.client_state)) for b in blocks]
        replies = self._get(futures)  # in the order of the cohort
        return _joined(self.setup, orders, replies)

    def _get(self, futures: list[Any]) -> list[dict[str, Any]]:
        try:
            replies: list[dict[str, Any]] = self.ray.get(futures)
            return replies
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, FedbraidError):
                raise error.cause from error
            raise EngineError(f"a block of clients failed on a Ray worker:\n{error}") from error
        except self.ray.exceptions.RayError as error:
            raise EngineError(
                f"the Ray cluster lost a block for good ({error}); the last committed step is intact, resume the run"
            ) from error

    def evaluate(self, x: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.grad.evaluate(x, inputs, targets)

    def describe(self) -> str:
        return (
            f"ray(address={self.address!r}, workers={self.workers!r}, backend={self.grad.name!r},"
            f" block={self.block!r}, data={self.data!r})"
        )

    def close(self) -> None:
        self.parcel, self.down = None, ({}, None)  # the object store may free them
        if self.ours:
            self.ray.shutdown()


def _ray() -> Any:
    """The ray package, which is imported only when it is used."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtra("the ray engine", "ray") from error


def _connect(address: str | None, workers: int | None) -> None:
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.WARNING}
    cluster = address or os.environ.get("RAY_ADDRESS")
    local = {"num_cpus": workers, **({"_node_ip_address": LOOPBACK} if sys.platform == "linux" else {})}
    try:
        if cluster and (host := re.fullmatch(r"([\w.-]+):(\d+)", cluster)):  # Ray retries for minutes
            socket.create_connection((host[1], int(host[2])), 10).close()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry by default
        _ray().init(cluster or "local", **quiet, **({} if cluster else local))
    except (OSError, ValueError, RuntimeError) as error:
        raise EngineError(
            f"no Ray cluster answers at {cluster!r} ({error}); start one with: ray start --head"
        ) from error


# The run on the wire -----------------------------------------------------------------------------------


@dataclass
class _Parcel:
    """A run for workers: tensors as NumPy arrays, which all workers of a node read from shared memory."""

    setup: Setup | None
    arrays: dict[str, Any]
    spec: str | None = None
    fingerprint: str = ""

    @classmethod
    def of(cls, setup: Setup, data: str) -> _Parcel:
        task = setup.task
        if data not in ("store", "load"):
            raise unknown("data", data, ["store", "load"])
        if data == "load" and task.spec is None:
            raise ConfigError(
                "data='load' needs a task that was loaded by name; use data='store' for other tasks"
            )
        names = ("inputs", "targets", "rows", "start")
        tensors = {n: v for n in names if isinstance(v := getattr(task, n), Tensor)}
        bare = _with(task, dict.fromkeys(tensors), test=None, public=None)
        shipped = tensors if data == "store" else {}
        return cls(
            dataclasses.replace(setup, task=bare),
            {name: _Strided.of(v) for name, v in shipped.items()},
            task.spec if data == "load" else None,
            task.fingerprint if data == "load" else "",
        )

    def unpack(self) -> Setup:
        assert self.setup is not None
        if self.spec is not None:
            from fedbraid.data import tasks

            task = tasks.reload(self.spec)
            if task.fingerprint != self.fingerprint:
                raise ConfigError(
                    f"this node loads other data for {self.spec}; give all nodes the same files"
                )
        else:
            task = _with(self.setup.task, {name: a.tensor() for name, a in self.arrays.items()})
        return dataclasses.replace(self.setup, task=task)


def _with(task: Task, tensors: dict[str, Any], **others: Any) -> Task:
    """The same task over other tensors, without what was computed from the old ones."""
    fields = {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}
    return type(task)(**{**fields, **tensors, **others})


@dataclass
class _Strided:
    """A tensor as one flat array with its strides, so that overlapping rows travel once."""

    flat: NDArray[Any]
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, t: Tensor) -> _Strided:
        if not t.is_contiguous() and t.untyped_storage().nbytes() < t.nbytes:
            flat = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())[t.storage_offset() :]
            return cls(flat.numpy(), tuple(t.shape), t.stride())
        t = t.contiguous()
        return cls(t.reshape(-1).numpy(), tuple(t.shape), t.stride())

    def tensor(self) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the array is read-only, and is not written
            return torch.from_numpy(self.flat).as_strided(self.size, self.stride)


# On a worker ------------------------------------------------------------------------------------------

_OPEN: dict[str, tuple[Setup, Gradient]] = {}  # the run that this worker process has open


@dataclass(frozen=True)
class _Call:
    """What a task is told besides vectors: the run that it belongs to, and how its clients train."""

    key: str
    parcel: list[Any]  # a reference, which Ray would resolve outside a list
    backend: str
    block: int | None
    version: int
    folds_at: int | None


def _block(
    call: _Call,
    clients: NDArray[np.int64],
    down: dict[str, NDArray[np.float32]],
    memory: dict[str, NDArray[np.float32]],
) -> dict[str, Any]:
    """Some clients, on whichever worker Ray chose: what they sent, or one accumulator of it."""
    setup, grad = _opened(call.key, call.parcel, call.backend)
    facts = participate(setup, np.array(clients), call.version)
    request = TrainRequest(facts, _tensors(down), _tensors(memory))
    if call.folds_at is None:
        return _as_arrays(client_update(setup, grad, request))
    folder = Folder(setup.algorithm, request.download, call.folds_at)
    each = call.block or block_limit(setup, grad)
    replies = [
        folder.add(client_update(setup, grad, request.subset(slice(lo, lo + each))))
        for lo in range(0, len(clients), each)
    ]
    return _as_arrays(Reply.join(replies)) | {"folded": folder.acc}


def _as_arrays(reply: Reply) -> dict[str, Any]:
    return {
        "uploads": _numpy(reply.uploads), "memory": _numpy(reply.client_state), "sizes": reply.sizes,
        "loss": reply.loss.numpy(), **({} if reply.norms is None else {"norms": reply.norms.numpy()}),
    }  # fmt: skip


def _opened(key: str, parcel: list[Any], backend: str) -> tuple[Setup, Gradient]:
    if key not in _OPEN:
        torch.set_num_threads(1)
        _OPEN.clear()
        setup = _ray().get(parcel[0]).unpack()
        _OPEN[key] = (setup, gradient(setup, backend, 1))
    return _OPEN[key]


def _numpy(vectors: Vectors) -> dict[str, NDArray[np.float32]]:
    return {name: v.detach().contiguous().numpy() for name, v in vectors.items()}


def _tensors(arrays: dict[str, NDArray[np.float32]]) -> Vectors:
    """Writable copies, because Ray's arrays are shared."""
    return {name: torch.tensor(a) for name, a in arrays.items()}


def _joined(setup: Setup, orders: Orders, replies: list[dict[str, Any]]) -> Reply:
    def all_of(kind: str) -> dict[str, Any]:
        return {name: np.concatenate([p[kind][name] for p in replies]) for name in replies[0][kind]}

    uploads, memory = (
        {k: torch.from_numpy(v) for k, v in all_of(kind).items()} for kind in ("uploads", "memory")
    )
    loss = torch.from_numpy(np.concatenate([p["loss"] for p in replies]))
    reply = Reply(orders.participation, uploads, memory, all_of("sizes"), loss)
    if orders.folds_at is not None:
        reply.norms = torch.from_numpy(np.concatenate([p["norms"] for p in replies]))
        reply.folded = merged(setup.algorithm, [p["folded"] for p in replies], orders.download["x"])
    return reply
