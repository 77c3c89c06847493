"""Everything that changes while an algorithm runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedbraid.core.algorithm import Algorithm
from fedbraid.core.client_table import ClientTable
from fedbraid.core.context import Vectors
from fedbraid.core.layout import Layout
from fedbraid.core.link import BroadcastContext, ModelVersion
from fedbraid.engines.engine import Setup
from fedbraid.errors import Diverged

GROWTH = 1e4  # times the initial norm or loss, above which a run diverges
LASTING = 3  # steps in a row


@dataclass(frozen=True)
class DivergenceGuard:
    """The initial norm and loss, and for how many steps in a row either has been over the limit."""

    norm: float
    loss: float = 0.0
    steps_over_limit: int = 0

    @staticmethod
    def first(x: Tensor, layout: Layout) -> DivergenceGuard:
        """From the initial norm or that of a fresh initialization, whichever is larger, for runs from zero weights."""
        fresh = sum(s.size / (3 * math.prod(s.shape[1:])) if len(s.shape) > 1 else s.size for s in layout)
        return DivergenceGuard(max(float(x.norm()), math.sqrt(fresh)))

    def see(self, step: int, norm: float, loss: float, ignore_divergence: bool) -> DivergenceGuard:
        """The guard after a step; growth that lasts ends the run as non-finite numbers do."""
        start = self.loss or max(loss, 1.0)
        beyond = norm > GROWTH * self.norm or loss > GROWTH * start
        steps_over_limit = self.steps_over_limit + 1 if beyond and not ignore_divergence else 0
        if steps_over_limit >= LASTING:
            raise Diverged(
                f"training diverged at step {step}: model norm {norm:.3g} (initially {self.norm:.3g}), training loss {loss:.3g}"
                f" (initially {start:.3g}); lower the client or server learning rate, or pass ignore_divergence=True."
                f" Step {step - LASTING} was the last below the limit; the last checkpoint is intact"
            )
        return replace(self, loss=start, steps_over_limit=steps_over_limit)


@dataclass
class State:
    """Everything that changes while an algorithm runs."""

    t: int
    x: Tensor  # the model that is sent out
    average: Tensor  # x̄, the one that is evaluated: x unless an offset is subtracted for the next round
    gather: Any
    server: Any
    wire: Any  # the downlink's state
    guard: DivergenceGuard
    sent: dict[int, ModelVersion]  # version -> what clients received of it, while a client needs it
    clients: ClientTable  # states of simulated clients
    gone: tuple[int, ...] = ()  # clients that have left for good

    @classmethod
    def first(
        cls,
        algorithm: Algorithm,
        layout: Layout,
        x: Tensor,
        seed: int,
        real: bool = False,
        personal: Vectors | None = None,
    ) -> State:
        """The state before the first step; `personal` holds the model parameters in clients' state."""
        gather, server = algorithm.gather.init(x, layout), algorithm.server.init(x, layout)
        who = BroadcastContext(algorithm.downloads, 0, seed, layout, real)
        cast = algorithm.down.open(algorithm.send(x, server, 1), who)
        rows = ClientTable(
            {} if real else {**algorithm.init_client_state(x, layout), **(personal or {})}
        )  # real clients store their state
        guard = DivergenceGuard.first(x, layout)
        return cls(0, x, x, gather, server, cast.state, guard, {0: cast.version}, rows)

    def broadcast_first(self, setup: Setup, N: int, samples: float, real: bool) -> State:
        """The state before the first step, with a first version for N clients with so many samples."""
        a = setup.algorithm
        who = BroadcastContext(a.downloads, 0, setup.seed, setup.task.layout, real)
        cast = a.down.open(a.send(self.x, self.server, N, samples), who)
        return replace(self, wire=cast.state, sent={0: cast.version})

    def without(self, algorithm: Algorithm, client: int, contribution: Vectors | None) -> tuple[State, bool]:
        """(the state after a client has left for good, whether its contribution stays).

        The server's data on it is removed. What mirrors the client's state is removed by the negated contribution that the
        client sends, which `rule.withdraw` computes; None if the client cannot be reached.
        """
        fresh = {name: v.reshape(1, -1) for name, v in algorithm.rule.init(self.x).items()}
        decays = algorithm.rule.traits().decays_client_state  # so that no client knows its contribution today
        mirrored = decays or bool(algorithm.rule.withdraw(fresh))
        server = self.server
        if contribution is not None:
            server = algorithm.server.absorb(
                server, {name: v.reshape(-1).to(self.x.device) for name, v in contribution.items()}
            )
        self.clients.drop(client)
        gather = algorithm.gather.remove_client(self.gather, client)
        gone = tuple(sorted({*self.gone, client}))
        return replace(self, gather=gather, server=server, gone=gone), (
            contribution is None or decays
        ) and mirrored
