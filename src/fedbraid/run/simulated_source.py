"""The step source of simulated clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedbraid.core.context import Vectors
from fedbraid.engines.engine import Engine, Orders, Reply, Setup, participate
from fedbraid.errors import FedbraidError
from fedbraid.run.source import RunView, ServerStep
from fedbraid.run.state import State
from fedbraid.schedule import Tick


class SimulatedSource:
    """Turns arrivals into replies. Jobs that are in flight from one version train as one block.

    Results wait here until their client arrives; they can always be computed again from the versions
    in `State.sent`, so they are not saved. A client that remembers something and returns within the
    step it started in trains by itself, because what it remembers may still change in that step.
    """

    is_live = False
    BUDGET = (
        2**30
    )  # bytes of results (uploads and client state) that may wait; above it, clients train when they arrive

    def __init__(self, setup: Setup, engine: Engine, concurrency: int = 0) -> None:
        algorithm, layout = setup.algorithm, setup.task.layout
        state = algorithm.init_client_state(
            setup.task.initial(setup.seed), layout
        ) | setup.task.initial_personal_state(setup.seed)
        width = 4 * sum(algorithm.widths(layout).values()) + sum(v.nbytes for v in state.values())
        self.setup, self.task, self.engine = setup, setup.task, engine
        self.ahead = 0 < concurrency * width <= self.BUDGET
        self.stateful = algorithm.stateful(layout) or bool(setup.task.initial_personal_state(setup.seed))
        self.folds = not algorithm.gather.traits().needs_every_upload
        self.blocks: dict[int, list[int]] = {}
        self.ready: dict[int, dict[int, Reply]] = {}
        self.after: NDArray[np.int64] | None = None  # the next step's clients, where data is read ahead

    @property
    def sizes(self) -> NDArray[np.int64]:
        return self.task.sizes

    def describe(self) -> str:
        return self.engine.describe()

    def steps(self, run: RunView) -> Iterator[ServerStep]:
        """The schedule's, from where the run stands; what is in flight then started in those before."""
        run.broadcast_first()
        history = (
            () if run.client_history is None else (run.client_history,)
        )  # for schedules that choose by it
        ticks = run.schedule.ticks(self.task.clients, run.setup.seed, run.message_bytes(), *history)
        foresees = self.task.lazy and run.client_history is None
        for tick, after in _foreseen(ticks) if foresees else ((tick, None) for tick in ticks):
            self.after = after.clients if after is not None and after.is_synchronous else None
            if tick.step >= run.state.t:
                tick = tick.without(run.state.gone)
            self._opens(tick)
            if tick.step >= run.state.t:
                yield ServerStep(tick, self.replies(run.state, tick))
            self._closes(tick)

    def _opens(self, tick: Tick) -> None:
        """Note who started, before their replies are asked for."""
        if self.ahead and not self.stateful:
            self.blocks[tick.step] = list(dict.fromkeys(tick.started.tolist()))

    def _closes(self, tick: Tick) -> None:
        """Note who is in flight from this step's version, and drop versions that nobody needs."""
        if self.ahead and self.stateful:
            done = Counter(tick.clients[tick.versions == tick.step].tolist())
            flying = Counter(tick.started.tolist()) - done
            self.blocks[tick.step] = list(flying)
        for version in self.blocks.keys() - tick.pending_versions:
            del self.blocks[version]
            self.ready.pop(version, None)

    def replies(self, state: State, tick: Tick) -> Iterator[Reply]:
        """The tick's replies in blocks, no client twice in one block."""
        if not len(tick.clients):
            return
        if not self.ahead:
            for version, clients in _runs(tick):
                orders = self._orders(state, version, clients, self.after)
                yield from self.engine.train(replace(orders, folds_at=state.t if self.folds else None))
            return
        block: list[Reply] = []
        in_block: set[int] = set()
        for client, version in zip(tick.clients.tolist(), tick.versions.tolist()):
            if client in in_block:
                yield Reply.join(block)
                block, in_block = [], set()
            block.append(self._take(state, client, version))
            in_block.add(client)
        yield Reply.join(block)

    def _take(self, state: State, client: int, version: int) -> Reply:
        if version not in self.blocks:
            return next(iter(self.engine.train(self._orders(state, version, np.array([client])))))
        if version not in self.ready:
            orders = self._orders(state, version, np.array(self.blocks[version]))
            self.ready[version] = {
                client: row
                for reply in self.engine.train(orders)
                for client, row in zip(reply.clients.tolist(), reply.rows())
            }
        return self.ready[version][client]

    def _orders(
        self, state: State, version: int, clients: NDArray[np.int64], after: NDArray[np.int64] | None = None
    ) -> Orders:
        def recall(some: NDArray[np.int64]) -> Vectors:
            return {k: v.to(state.x.device) for k, v in state.clients.get(some).items()}

        who = participate(self.setup, clients, version)
        return Orders(who, state.sent[version].vectors, recall, after=after)


def _foreseen(ticks: Iterator[Tick]) -> Iterator[tuple[Tick, Tick | None]]:
    """Each tick with the one after it; what is wrong with that one is said when its turn comes."""
    tick = next(ticks, None)
    while tick is not None:
        after, wrong = None, None
        try:
            after = next(ticks, None)
        except FedbraidError as error:
            wrong = error
        yield tick, after
        if wrong is not None:
            raise wrong
        tick = after


def _runs(tick: Tick) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Consecutive arrivals from one version, split where a client comes again."""
    if tick.is_synchronous:
        yield tick.step, tick.clients
        return
    run: list[int] = []
    for i, client in enumerate(tick.clients.tolist()):
        if run and (tick.versions[i] != tick.versions[i - 1] or client in run):
            yield int(tick.versions[i - 1]), np.array(run)
            run = []
        run.append(client)
    yield int(tick.versions[-1]), np.array(run)
