"""The round, once: what an algorithm is, what changes while it runs, and one server step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.codec import Codec
from fedbraid.codecs import identity
from fedbraid.errors import ConfigError, Diverged, WireError
from fedbraid.layout import Layout
from fedbraid.link import (
    Down,
    ErrorFeedback,
    HiddenState,
    Up,
    broadcast,
    catch_up,
    codec_of,
    message_overhead,
    open_down,
    residuals,
)
from fedbraid.rule import Local, Rule, Vectors
from fedbraid.schedule import Tick, plain_numbers, whole
from fedbraid.server import Gather, Info, Mean, Transform, Tree, Uploads
from fedbraid.store import Rows

if TYPE_CHECKING:
    from fedbraid.data.task import Task
    from fedbraid.engines.client import Engine, Reply

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """What a client does in one visit: `epochs` over its data, or a number of `steps`.

    `batch=None` is the full local set. A `last` batch that is short is kept, dropped, or filled with
    the client's own samples drawn again.
    """

    lr: float = 0.01
    epochs: int | None = None
    steps: int | None = None
    batch: int | None = 20
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None  # the largest norm of a gradient
    lr_decay: float = 1.0  # per round
    last: str = "keep"

    def __post_init__(self) -> None:
        plain_numbers(self)
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 1)
        if self.epochs is not None and self.steps is not None:
            raise ConfigError(
                f"both epochs={self.epochs} and steps={self.steps} were given; give one of them"
            )
        whole("epochs" if self.steps is None else "steps", self.epochs if self.steps is None else self.steps)
        if self.batch is not None:
            whole("batch", self.batch)
        for name in ("lr", "lr_decay", "clip", "momentum", "weight_decay"):
            value = getattr(self, name)
            if (value is None and name != "clip") or isinstance(value, str | bool):
                raise ConfigError(f"{name}={value!r} is not a number; give one")
            if name in ("lr", "lr_decay", "clip") and value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value} does not train; use {name} > 0")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum} never forgets; use 0 <= momentum < 1")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"weight_decay={self.weight_decay} makes weights grow; use weight_decay >= 0")
        if self.last not in ("keep", "drop", "fill"):
            raise ConfigError(f"last={self.last!r} is not known; use 'keep', 'drop' or 'fill'")

    def rate(self, version: int) -> float:
        """η_c of a client that trains from this version."""
        return self.lr * self.lr_decay**version


@dataclass(frozen=True)
class Algorithm:
    """Five parts with neutral defaults; all neutral is FedAvg."""

    rule: Rule = field(default_factory=Rule)
    gather: Gather = field(default_factory=Mean)
    server: Transform = field(default_factory=Transform)
    up: Up = field(default_factory=identity)
    down: Down = field(default_factory=identity)
    name: str = field(default="", compare=False)  # the call that builds it, where a builder did

    def __post_init__(self) -> None:
        for name, kind in (
            ("rule", Rule), ("gather", Gather), ("server", Transform), ("up", Codec | ErrorFeedback), ("down", Codec | HiddenState),
        ):  # fmt: skip
            part = getattr(self, name)
            if not isinstance(part, kind):
                wanted = getattr(kind, "__name__", "Codec")
                raise ConfigError(f"{name}={part!r} is a {type(part).__name__}; give a {wanted} there")
        if codec_of(self.down).weights:
            raise ConfigError(
                f"down={self.down!r} is for uploads; the model itself is sent down, so use its inner codec"
            )
        names = rehearse(self)
        object.__setattr__(self, "_uploads", names)

    def uploads(self, layout: Layout) -> dict[str, int]:
        """Names and widths of what a client uploads."""
        widths: dict[str, bool] = self.__dict__["_uploads"]
        return {name: layout.size if wide else 1 for name, wide in widths.items()}

    def remembers(self, x: Tensor, layout: Layout) -> Vectors:
        """A client's row before its first visit."""
        row = {**self.rule.init(x), **residuals(self.up, self.uploads(layout), layout)}
        return row | ({"held": torch.tensor([-1.0, 0.0])} if isinstance(self.down, HiddenState) else {})


def rehearse(a: Algorithm) -> dict[str, bool]:
    """One round on four numbers: what is uploaded, or a sentence about the parts that do not fit."""
    layout = Layout.from_shapes([("w", (2, 1)), ("b", (2,))])
    x, one = torch.zeros(4), torch.ones(2, 1)
    stage = "server"
    try:
        server, gather = a.server.init(x, layout), a.gather.init(x, layout)
        down = {k: v[None] for k, v in a.server.send(server).items()}
        memory = {k: v.reshape(1, -1).repeat(2, 1) for k, v in a.rule.init(x).items()}
        loc = Local(x[None], down, memory, 0.1, one, one, 0, 0.0, lambda y: torch.ones(2, 4))
        stage = "rule"
        started = a.rule.start(loc)
        v, s = a.rule.step(torch.ones(2, 4), x.repeat(2, 1), started, loc)
        if s.keys() != started.keys():
            raise ConfigError(
                f"the rule keeps {sorted(s)} in step but starts a visit with {sorted(started)}; name the same in start and step"
            )
        y = x - 0.1 * v
        extra, remembered = a.rule.finish(y, s, loc)
        up = {"delta": x - y, **extra}
        if remembered.keys() != memory.keys():
            raise ConfigError(
                f"the rule remembers {sorted(remembered)} but starts with {sorted(memory)}; name the same in init and finish"
            )
        stage = "gather or server"
        uploads = Uploads(np.arange(2), up, one, one, torch.zeros(2, 1), 0.1 * one, x[None])
        acc = a.gather.add(a.gather.zero(x), uploads, gather, x)
        info = Info(0, 2, 2, 2.0, 0.1, 1.0, 0.0, layout, np.ones(2, np.int64))
        u, gather = a.gather.close(acc, gather, info)
        a.server.update(u, server, x, info)
    except KeyError as error:
        has = "what the server sends" if stage == "rule" else "what the clients upload"
        raise ConfigError(
            f"the {stage} part needs {error.args[0]!r}, which is not among {has}; add the part that makes it"
        ) from error
    return {name: vec.shape[1] == 4 for name, vec in up.items()}


@dataclass
class State:
    """Everything that changes while an algorithm runs."""

    t: int
    x: Tensor
    gather: Tree
    server: Tree
    wire: Tree
    sent: dict[int, Tree]  # version -> what clients hold of it, while somebody needs it
    clients: Rows  # what simulated clients remember

    @classmethod
    def first(cls, algorithm: Algorithm, layout: Layout, x: Tensor, seed: int) -> State:
        gather, server = algorithm.gather.init(x, layout), algorithm.server.init(x, layout)
        vectors = {"x": x, **algorithm.server.send(server)}
        wire = open_down(algorithm.down, vectors)
        if isinstance(algorithm.down, HiddenState):  # everybody starts from the same values
            sizes = {name: identity().size(layout) or 0 for name in vectors}
            sent = {"vectors": vectors, "sizes": sizes, "packets": 0}
        else:
            received, wire, sizes, _ = broadcast(algorithm.down, vectors, wire, seed, 0, layout)
            sent = {"vectors": received, "sizes": sizes, "packets": 0}
        return cls(0, x, gather, server, wire, {0: sent}, Rows(algorithm.remembers(x, layout)))


@dataclass
class Order:
    """What a block of clients is told: the version they train from and what they remember."""

    version: int
    clients: NDArray[np.int64]
    down: Vectors  # x and what else was sent, [d] each
    memory: Vectors  # [m, ·]


class Source(Protocol):
    """Where a step's replies come from: simulated jobs, or clients that are really apart."""

    def opens(self, tick: Tick) -> None: ...

    def replies(self, state: State, tick: Tick) -> Iterator[tuple[Reply, NDArray[np.int64]]]:
        """In blocks with the versions they trained from, no client twice in one block."""

    def closes(self, tick: Tick) -> None: ...


class Jobs:
    """Turns arrivals into replies. Jobs that are in flight from one version train as one block.

    Results wait here until their client arrives; they can always be computed again from the versions
    in `State.sent`, so they are not saved. A client that remembers something and returns within the
    step it started in trains by itself, because what it remembers may still change in that step.
    """

    BUDGET = 2**30  # bytes of results that may wait; above it, clients train when they arrive

    def __init__(self, algorithm: Algorithm, layout: Layout, engine: Engine, concurrency: int) -> None:
        width = sum(algorithm.uploads(layout).values()) * 4
        row = algorithm.remembers(torch.zeros(layout.size), layout)
        self.engine, self.ahead = engine, 0 < concurrency * width <= self.BUDGET
        self.stateful = bool(row.keys() - {"held"})
        self.blocks: dict[int, list[int]] = {}
        self.ready: dict[int, dict[int, Reply]] = {}

    def opens(self, tick: Tick) -> None:
        """Note who started, before their replies are asked for."""
        if self.ahead and not self.stateful:
            self.blocks[tick.step] = list(dict.fromkeys(tick.started.tolist()))

    def closes(self, tick: Tick) -> None:
        """Note who is in flight from this step's version, and drop versions that nobody needs."""
        if self.ahead and self.stateful:
            done = Counter(tick.clients[tick.versions == tick.step].tolist())
            flying = Counter(tick.started.tolist()) - done
            self.blocks[tick.step] = list(flying)
        for version in [v for v in self.blocks if v not in tick.live]:
            del self.blocks[version]
            self.ready.pop(version, None)

    def replies(self, state: State, tick: Tick) -> Iterator[tuple[Reply, NDArray[np.int64]]]:
        """The tick's replies in blocks with the versions they trained from, no client twice in one block."""
        if not self.ahead:
            for version, clients in _runs(tick):
                for reply in self.engine.train(order(state, version, clients)):
                    yield reply, np.full(len(reply.clients), version)
            return
        block: list[Reply] = []
        versions: list[int] = []
        seen: set[int] = set()
        for client, version in zip(tick.clients.tolist(), tick.versions.tolist()):
            if client in seen:
                yield _join(block), np.array(versions)
                block, versions, seen = [], [], set()
            block.append(self._take(state, client, version))
            versions.append(version)
            seen.add(client)
        yield _join(block), np.array(versions)

    def _take(self, state: State, client: int, version: int) -> Reply:
        if version not in self.blocks:
            return next(iter(self.engine.train(order(state, version, np.array([client])))))
        if version not in self.ready:
            whole_block = order(state, version, np.array(self.blocks[version]))
            self.ready[version] = {
                int(c): reply.row(i)
                for reply in self.engine.train(whole_block)
                for i, c in enumerate(reply.clients)
            }
        return self.ready[version][client]


def _runs(tick: Tick) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Consecutive arrivals from one version, split where a client comes again."""
    if tick.started is tick.clients:  # a round: all started from this version, and nobody twice
        yield tick.step, tick.clients
        return
    run: list[int] = []
    for i, client in enumerate(tick.clients.tolist()):
        if run and (tick.versions[i] != tick.versions[i - 1] or client in run):
            yield int(tick.versions[i - 1]), np.array(run)
            run = []
        run.append(client)
    yield int(tick.versions[-1]), np.array(run)


def _join(parts: list[Reply]) -> Reply:
    return parts[0] if len(parts) == 1 else type(parts[0]).join(parts)


def order(state: State, version: int, clients: NDArray[np.int64]) -> Order:
    memory = {k: v.to(state.x.device) for k, v in state.clients.get(clients).items()}
    return Order(version, clients, state.sent[version]["vectors"], memory)


def _starts(state: State, versions: NDArray[np.int64]) -> Tensor:
    """The models that a block trained from, one row where it is the same for all."""
    if (versions == versions[0]).all():
        return state.sent[int(versions[0])]["vectors"]["x"][None]  # type: ignore[no-any-return]
    return torch.stack([state.sent[int(v)]["vectors"]["x"] for v in versions])


def advance(
    algorithm: Algorithm, task: Task, jobs: Source, state: State, tick: Tick, seed: int
) -> tuple[State, dict[str, Any]]:
    """One server step: gather what the tick's clients upload, step, broadcast."""
    layout, x = task.layout, state.x
    tally = Tally(algorithm, state, layout)
    acc = algorithm.gather.zero(x)
    state.clients.expect()
    jobs.opens(tick)
    for reply, versions in _encoded(jobs.replies(state, tick), state.t + 1):
        n = torch.from_numpy(task.sizes[reply.clients]).to(x)[:, None]
        staleness = torch.from_numpy(state.t - versions).to(x)[:, None]
        up = Uploads(reply.clients, reply.uploads, n, reply.K, staleness, reply.lr, _starts(state, versions))
        tally.add(up, reply, versions)
        acc = algorithm.gather.add(acc, up, state.gather, x)
        state.clients.put(reply.clients, reply.memory)
        del reply, up  # before the next block comes
    jobs.closes(tick)
    info = Info(
        state.t, tally.count, task.clients, float(task.offsets[-1]), tally.rates / tally.weight, tally.steps / tally.weight,
        tally.quantised / tally.count, layout, task.sizes,
    )  # fmt: skip
    u, gather = algorithm.gather.close(acc, state.gather, info)
    mean = u["delta"]
    u, server = algorithm.server.update(u, state.server, x, info)
    delta = u["delta"]
    if layout.buffers is not None:  # running statistics are averaged, whatever the optimiser
        delta = delta.clone()
        delta[layout.buffers] = mean[layout.buffers]
    new = x - delta
    norm = float(torch.linalg.vector_norm(new))
    if not math.isfinite(norm):
        raise Diverged(
            f"the model is no longer finite after step {state.t + 1} (its norm is {norm}); lower the client or server"
            " learning rate. The last committed step is intact"
        )
    vectors = {"x": new, **algorithm.server.send(server)}
    try:
        received, wire, sizes, notes = broadcast(
            algorithm.down, vectors, state.wire, seed, state.t + 1, layout
        )
    except WireError as error:
        raise _unsendable(error, state.t + 1) from error
    sent = {v: s for v, s in state.sent.items() if v in tick.live}
    sent[state.t + 1] = {"vectors": received, "sizes": sizes, "packets": wire.get("packets", 0)}
    record = {"step": state.t + 1, "time": tick.time, **tally.record(tick), "norm": norm, **notes}
    record["bytes_broadcast"] = sum(sizes.values())
    return replace(state, t=state.t + 1, x=new, gather=gather, server=server, wire=wire, sent=sent), record


def _encoded(replies: Iterator[T], step: int) -> Iterator[T]:
    """The replies, where numbers that no codec takes end the run like any that are not finite."""
    try:
        yield from replies
    except WireError as error:
        raise _unsendable(error, step) from error


def _unsendable(error: WireError, step: int) -> Diverged:
    return Diverged(
        f"step {step} cannot be sent: {error}, or clip gradients with clip=. The last committed step is intact"
    )


def _plus(total: float, more: Tensor) -> float:
    """One after the other, so that no bit depends on how a cohort was cut into blocks."""
    values = more.reshape(-1).to("cpu", torch.float64, copy=True).numpy()
    values[0] += total
    return float(values.cumsum()[-1])


class Tally:
    """What a step's record says of its uploads and downloads."""

    def __init__(self, algorithm: Algorithm, state: State, layout: Layout) -> None:
        self.codec: Codec = codec_of(algorithm.up)
        self.hidden = isinstance(algorithm.down, HiddenState)
        self.state, self.layout = state, layout
        self.clients: list[int] = []
        self.staleness: list[NDArray[np.int64]] = []
        self.up: dict[str, int] = {}
        self.down: dict[str, int] = {}
        self.count = self.quantised = 0
        self.kind = getattr(algorithm.gather, "weights", "uniform")
        self.weight = self.steps = self.rates = self.loss = self.drift = 0.0

    def add(self, up: Uploads, reply: Reply, versions: NDArray[np.int64]) -> None:
        m = len(reply.clients)
        self.count += m
        self.clients += reply.clients.tolist()
        self.staleness.append(self.state.t - versions)
        p = up.weights(self.kind).double()
        self.weight = _plus(self.weight, p)
        self.steps = _plus(self.steps, p * reply.K)
        self.rates = _plus(self.rates, p * reply.lr)
        self.loss = _plus(self.loss, reply.loss)
        self.drift = _plus(self.drift, up.vectors["delta"].norm(dim=1))
        if not math.isfinite(self.drift):
            bad = next(
                int(c) for c, v in zip(reply.clients, up.vectors["delta"]) if not torch.isfinite(v.norm())
            )
            raise Diverged(
                f"client {bad}'s update at step {self.state.t + 1} is not finite; lower the learning rate, or clip"
                " gradients with clip=. The last committed step is intact"
            )
        if not self.codec.lossless:
            self.quantised += sum(self.codec.quantises(int(c)) for c in reply.clients)
        for name, lengths in reply.sizes.items():
            self.up[name] = self.up.get(name, 0) + int(lengths.sum())
        self._downloads(reply, versions)

    def _downloads(self, reply: Reply, versions: NDArray[np.int64]) -> None:
        if not self.hidden:
            alike = bool((versions == versions[0]).all())
            for version, times in (
                ((versions[0], len(versions)),) if alike else zip(*np.unique(versions, return_counts=True))
            ):
                for name, size in self.state.sent[int(version)]["sizes"].items():
                    self.down[name] = self.down.get(name, 0) + size * int(times)
            return
        packets = np.array([self.state.sent[int(v)]["packets"] for v in versions], np.int64)
        held = self.state.clients.get(reply.clients.tolist())["held"].numpy().astype(np.int64)
        had = held[:, 0] * 2**20 + held[:, 1]
        names = tuple(self.state.wire["hidden"])
        whole_state = len(names) * (identity().size(self.layout) or 0) + message_overhead(names)
        cost = catch_up(np.where(held[:, 0] < 0, -1, packets - had), whole_state)
        self.down["x"] = self.down.get("x", 0) + int(cost.sum())
        now = np.stack([packets // 2**20, packets % 2**20], 1).astype(np.float32)
        reply.memory["held"] = torch.from_numpy(now)

    def record(self, tick: Tick) -> dict[str, Any]:
        record: dict[str, Any] = {
            "clients": self.clients,
            "uploads": self.count,
            "bytes_up": sum(self.up.values()),
            "bytes_down": sum(self.down.values()),
            "up": self.up,
            "down": self.down,
            "train_loss": self.loss / self.count,
            "lr": self.rates / self.weight,
            "drift": self.drift / self.count,
        }
        if tick.dropped:
            record["dropped"] = tick.dropped
        stale = np.concatenate(self.staleness)
        if tick.live or stale.any():
            record["staleness"] = float(stale.mean())
            record["staleness_max"] = int(stale.max())
            record["staleness_counts"] = np.bincount(stale).tolist()
            record["versions_kept"] = len(self.state.sent)
        return record
