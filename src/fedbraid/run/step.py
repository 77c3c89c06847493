"""The round, once: what an algorithm is, what changes while it runs, and one server step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.algorithm import Algorithm
from fedbraid.core.gather import Info, Uploads
from fedbraid.errors import Diverged, WireError
from fedbraid.links.link import (
    broadcast,
)
from fedbraid.run.jobs import Source
from fedbraid.run.state import State
from fedbraid.run.tally import Tally
from fedbraid.schedule import Tick

if TYPE_CHECKING:
    from fedbraid.data.task import Task

T = TypeVar("T")


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
