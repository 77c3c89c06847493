"""The server step, once: gather what came, step in two strokes, broadcast."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.algorithm import Algorithm
from fedbraid.core.context import ServerContext, Vectors
from fedbraid.core.link import BroadcastContext
from fedbraid.core.work import step_counts
from fedbraid.engines.engine import Reply, Setup
from fedbraid.engines.folding import account, as_uploads
from fedbraid.errors import Diverged, WireError
from fedbraid.run.server_data import TaskServerData
from fedbraid.run.source import ServerStep, StepSource
from fedbraid.run.state import State
from fedbraid.run.step_metrics import StepMetrics

T = TypeVar("T")


@dataclass(frozen=True)
class Population:
    """Who there is and how many samples they have, counted anew only when somebody joins or leaves."""

    given: NDArray[np.int64]  # by client number, as the source has them
    gone: tuple[int, ...]
    sizes: NDArray[np.int64]  # 0 for who has left
    N: int
    samples: float
    is_live: bool = False  # whether its clients are real, so that broadcasts are really encoded

    @classmethod
    def of(cls, source: StepSource, state: State, before: Population | None = None) -> Population:
        """Of a step; the one before it stands where its source still gives the same table."""
        given, gone = source.sizes, state.gone
        if before is not None and before.given is given and before.gone == gone:
            return before
        sizes = given
        if gone:
            sizes = given.copy()
            sizes[list(gone)] = 0
        N = int(np.count_nonzero(sizes)) if gone or source.is_live else len(sizes)
        return cls(given, gone, sizes, N, float(sizes.sum()), source.is_live)


def advance(
    setup: Setup, state: State, step: ServerStep, population: Population, ignore_divergence: bool = False
) -> tuple[State, dict[str, Any]]:
    """One server step: gather its replies, step, broadcast."""
    algorithm, tick, t = setup.algorithm, step.tick, state.t + 1
    traits = algorithm.gather.traits()
    metrics = StepMetrics(traits.weights, t, traits.drops_nonfinite, population.is_live)
    acc = gather_replies(setup, state, step, metrics)
    if metrics.count or traits.steps_when_empty:
        ctx = server_context(setup, state, step, population, metrics)
        acc = algorithm.gather.zero(state.x) if acc is None else acc
        u, gather, notes = algorithm.gather.close(acc, state.gather, ctx)
        notes = metrics.charge(notes)
        new, average, server = two_strokes(algorithm, u, state.server, state.x, ctx)
    else:  # nobody came: the version counts on, and nothing moves
        new, average, gather, notes = state.x, state.average, state.gather, {}
        server = algorithm.server.skip(state.server, state.x)
    norm, guard = _finite_norm(average, new, t), state.guard
    if metrics.count:
        guard = guard.see(t, norm, metrics.guarded_loss, ignore_divergence)
    who = BroadcastContext(algorithm.downloads, t, setup.seed, setup.task.layout, population.is_live)
    try:
        sends = algorithm.send(new, server, population.N, population.samples)
        cast = algorithm.down.send(sends, state.wire, who)
    except WireError as error:
        raise _unsendable(error, t) from error
    record = {
        "step": t,
        "time": tick.time,
        **metrics.record(tick, len(state.sent)),
        "norm": norm,
        **cast.notes,
        **notes,
    }
    if new is not average:
        record["offset_norm"] = float(torch.linalg.vector_norm(average - new))
    record["bytes_broadcast"] = sum(cast.version.sizes.values())
    sent = {v: version for v, version in state.sent.items() if v in tick.pending_versions}
    state = replace(
        state, t=t, x=new, average=average, gather=gather, server=server, wire=cast.state, guard=guard,
        sent={**sent, t: cast.version},
    )  # fmt: skip
    return state, record


def gather_replies(setup: Setup, state: State, step: ServerStep, metrics: StepMetrics) -> Any:
    """Fold the step's uploads while clients train; the accumulator, None where nobody came."""
    algorithm, x, acc = setup.algorithm, state.x, None
    state.clients.expect()
    for reply in _encoded(step.replies, state.t + 1):
        facts = reply.participation
        up = as_uploads(algorithm, facts, reply.uploads, _sent(state, facts.version), state.t, x)
        down, synced = _charge(algorithm, state, reply)
        metrics.add(up, reply, down, algorithm.up.quantized(reply.clients))
        if reply.norms is None and reply.folded is None:
            acc = algorithm.gather.zero(x) if acc is None else acc
            acc = algorithm.gather.add(acc, account(algorithm, up), state.gather, x)
        elif reply.folded is not None:  # by workers or under masks
            acc = reply.folded if acc is None else algorithm.gather.merge(acc, reply.folded)
        state.clients.put(reply.clients, {**reply.client_state, **synced})
        del reply, up  # before the next block comes
    return acc


def server_context(
    setup: Setup, state: State, step: ServerStep, population: Population, metrics: StepMetrics
) -> ServerContext:
    """The facts of the step, once its cohort is known."""
    algorithm, task, tick = setup.algorithm, setup.task, step.tick
    traits = algorithm.gather.traits()
    if metrics.count:
        lr, K, a = (metrics.mean(name) for name in ("lr", "K", "a"))
    else:
        lr, K, a = _on_average(setup, population.sizes, state.t)
    cohort = len(set(metrics.clients)) if traits.counts_clients_once else metrics.count
    traits.check_cohort(cohort)
    quantized = traits.quantized_fraction
    return ServerContext(
        t=state.t,
        cohort=cohort if traits.planned_cohort is None else traits.planned_cohort,
        N=population.N,
        samples=population.samples,
        lr=lr,
        K=K,
        a=a,
        quantized_fraction=metrics.quantized_fraction if quantized is None else quantized,
        layout=task.layout,
        sizes=population.sizes,
        max_staleness=metrics.max_staleness,
        sent={name: v[None] for name, v in state.sent[state.t].vectors.items()},
        dropped=tick.dropped if tick.is_synchronous else 0,
        seed=setup.seed,
        server_data=TaskServerData(task, setup.seed) if algorithm.server.traits().needs_server_data else None,
    )


def _on_average(setup: Setup, sizes: NDArray[np.int64], t: int) -> tuple[float, float, float]:
    """(rate, steps, effective steps) of the clients that there are, for a step that none of them came to."""
    K = torch.from_numpy(step_counts(sizes[sizes > 0], setup.work)).double()
    return setup.work.rate(t), float(K.mean()), float(setup.work.effective(K).mean())


def two_strokes(
    algorithm: Algorithm, u: Vectors, server: Any, x: Tensor, ctx: ServerContext
) -> tuple[Tensor, Tensor, Any]:
    """(what is sent out, what is evaluated, the server's new state) of a gathered update."""
    mean, buffers = u.get("delta"), ctx.layout.buffers
    u, server = algorithm.server.update(u, server, x, ctx)
    move, mean = u["delta"], u.get("gathered", mean)
    if buffers is not None and mean is not None:  # running statistics are averaged, whatever the optimizer
        move = move.clone()
        move[buffers] = mean[buffers]
    average = algorithm.server.adjust(x - move, server, ctx)
    without, server = algorithm.server.compute_offset(move, server, ctx)
    if without is None:
        return average, average, server
    new = average - without
    if buffers is not None:
        new[buffers] = average[buffers]
    return new, average, server


@dataclass(frozen=True)
class Stacked(Mapping[str, Tensor]):
    """What the clients of a block were sent, by name, `[m, ·]`: most servers never ask."""

    each: list[Vectors]

    def __getitem__(self, name: str) -> Tensor:
        return torch.stack([vectors[name] for vectors in self.each])

    def __iter__(self) -> Iterator[str]:
        return iter(self.each[0])

    def __len__(self) -> int:
        return len(self.each[0])


def _sent(state: State, versions: NDArray[np.int64]) -> Mapping[str, Tensor]:
    """What a block was sent, one row where it is the same for all."""
    if (versions == versions[0]).all():
        return {name: v[None] for name, v in state.sent[int(versions[0])].vectors.items()}
    return Stacked([state.sent[v].vectors for v in versions.tolist()])


def _charge(algorithm: Algorithm, state: State, reply: Reply) -> tuple[dict[str, int], Vectors]:
    """(bytes down by name, what the clients then remember of the link)."""
    if reply.down is not None:
        return {name: int(sizes.sum()) for name, sizes in reply.down.items()}, {}
    memory = state.clients.get(reply.clients) if algorithm.down.init_client_state() else {}
    sizes, synced = algorithm.down.message_bytes(state.sent, reply.participation.version, memory)
    return {name: int(each.sum()) for name, each in sizes.items()}, synced


def _finite_norm(average: Tensor, new: Tensor, step: int) -> float:
    norm = float(torch.linalg.vector_norm(average))
    total = norm if new is average else norm + float(torch.linalg.vector_norm(new))
    if not math.isfinite(total):
        raise Diverged(
            f"the model contains NaN or Inf after step {step} (its norm is {total}); lower the client or server"
            " learning rate. The last checkpoint is intact"
        )
    return norm


def _encoded(replies: Iterator[T], step: int) -> Iterator[T]:
    """The replies, where numbers that no codec takes end the run like any that are not finite."""
    try:
        yield from replies
    except WireError as error:
        raise _unsendable(error, step) from error


def _unsendable(error: WireError, step: int) -> Diverged:
    return Diverged(
        f"step {step} cannot be sent: {error}, or clip gradients with clip=. The last checkpoint is intact"
    )
