"""The server half of a round: transforms turn what was gathered into a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from fedbraid.core.gather import Info, Tree
from fedbraid.core.layout import Layout
from fedbraid.core.rule import Vectors
from fedbraid.errors import ConfigError


@dataclass(frozen=True)
class Transform:
    """One link of the server's pipeline, from update to update; x ← x − update['delta'] ends it."""

    def init(self, x: Tensor, layout: Layout) -> Tree:
        return {}

    def send(self, s: Tree) -> Vectors:
        """What goes down to clients beside the model, `[d]` each."""
        return {}

    def update(self, u: Vectors, s: Tree, x: Tensor, info: Info) -> tuple[Vectors, Tree]:
        return u, s

    def judged(self, x: Tensor, s: Tree) -> Tensor:
        """The model to evaluate, where it is not the one that is sent out."""
        return x


@dataclass(frozen=True)
class Pipeline(Transform):
    """Transforms one after the other.

    The order: reduce → algorithm state (c, h, statistics) → precondition → trust ratio → scale → shift.
    """

    links: tuple[Transform, ...] = ()

    def init(self, x: Tensor, layout: Layout) -> Tree:
        return {str(i): link.init(x, layout) for i, link in enumerate(self.links)}

    def send(self, s: Tree) -> Vectors:
        down: Vectors = {}
        for i, link in enumerate(self.links):
            part = link.send(s[str(i)])
            for name in part.keys() & down.keys():
                raise ConfigError(
                    f"two server parts of one algorithm both send {name!r}; rename it in one of them"
                )
            down |= part
        return down

    def update(self, u: Vectors, s: Tree, x: Tensor, info: Info) -> tuple[Vectors, Tree]:
        new: Tree = {}
        for i, link in enumerate(self.links):
            u, new[str(i)] = link.update(u, s[str(i)], x, info)
        return u, new

    def judged(self, x: Tensor, s: Tree) -> Tensor:
        for i, link in reversed(list(enumerate(self.links))):
            x = link.judged(x, s[str(i)])
        return x


def pipeline(*transforms: Transform) -> Pipeline:
    """Transforms as one pipeline."""
    links = tuple(t for part in transforms for t in (part.links if isinstance(part, Pipeline) else (part,)))
    return Pipeline(tuple(t for t in links if type(t) is not Transform))


@dataclass(frozen=True)
class Scale(Transform):
    """delta ← lr · delta: the server's learning rate."""

    lr: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"server lr={self.lr} does not step downhill; use lr > 0")

    def update(self, u: Vectors, s: Tree, x: Tensor, info: Info) -> tuple[Vectors, Tree]:
        return (u, s) if self.lr == 1 else ({**u, "delta": self.lr * u["delta"]}, s)
