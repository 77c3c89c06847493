"""Everything that changes while an algorithm runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fedbraid.core.algorithm import Algorithm
from fedbraid.core.gather import Tree
from fedbraid.core.layout import Layout
from fedbraid.core.rows import Rows
from fedbraid.links.codecs import identity
from fedbraid.links.link import (
    HiddenState,
    broadcast,
    open_down,
)

if TYPE_CHECKING:
    pass


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
