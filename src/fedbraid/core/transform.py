"""The server's two strokes: transforms turn what was gathered into the averaged model x̄; then x̄ is moved, and
what is subtracted for the next round comes last."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbraid.core.check import number
from fedbraid.core.gather import ServerContext, Tree, Uploads
from fedbraid.core.layout import Layout
from fedbraid.core.rule import Vectors
from fedbraid.core.vector_spec import Download, Upload


@dataclass(frozen=True)
class Transform:
    """One link of the server's pipeline; every hook defaults to doing nothing.

    First stroke: `account` reads each upload, `update` goes from update to update; x̄ = x − update['delta'].
    Second stroke: `adjust` moves x̄, which is what is evaluated; `settle` says what x̄ is sent out without.
    """

    def init(self, x: Tensor, layout: Layout) -> Tree:
        """State that lives from step to step."""
        return {}

    def sends(self) -> tuple[Download, ...]:
        """What goes down to clients beside the model."""
        return ()

    def send(self, s: Tree, x: Tensor, N: int) -> Vectors:
        """The declared downloads, `[width]` each, that go with the model x; N is how many clients are known."""
        return {}

    def accounts(self) -> tuple[Upload, ...]:
        """What it makes of each upload before it is gathered; `delta` among them takes delta's place."""
        return ()

    def account(self, up: Uploads) -> Vectors:
        """The declared accounts of a block, each upload with what its sender was sent: `[m, ·]` or `[1, ·]`."""
        return {}

    def update(self, u: Vectors, s: Tree, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Tree]:
        """From update to update."""
        return u, s

    def idle(self, s: Tree, x: Tensor) -> Tree:
        """The state after a step that nobody came to, which leaves the model where it is."""
        return s

    def adjust(self, average: Tensor, s: Tree, ctx: ServerContext) -> Tensor:
        """Move x̄; nobody's state sees this as a gradient."""
        return average

    def settle(self, move: Tensor, s: Tree, ctx: ServerContext) -> tuple[Tensor | None, Tree]:
        """(what x̄ is sent out without, the new state); `move` is x − x̄ before any adjustment."""
        return None, s

    def plain_steps(self) -> bool:
        """Whether it takes a visit for a steps of length η along the gradient, which only optimizer="sgd" makes."""
        return False

    def leave(self, s: Tree, share: Vectors) -> Tree:
        """The state after a client has gone for good, whose rule sent this share."""
        return s


@dataclass(frozen=True)
class Pipeline(Transform):
    """Transforms one after the other.

    The order: reduce → algorithm state (c, h, statistics) → precondition → trust ratio → scale → shift.
    """

    links: tuple[Transform, ...] = ()

    def init(self, x: Tensor, layout: Layout) -> Tree:
        return tuple(link.init(x, layout) for link in self.links)

    def sends(self) -> tuple[Download, ...]:
        return tuple(d for link in self.links for d in link.sends())

    def send(self, s: Tree, x: Tensor, N: int) -> Vectors:
        return {name: v for link, mine in zip(self.links, s) for name, v in link.send(mine, x, N).items()}

    def accounts(self) -> tuple[Upload, ...]:
        return tuple(d for link in self.links for d in link.accounts())

    def account(self, up: Uploads) -> Vectors:
        return {name: v for link in self.links for name, v in link.account(up).items()}

    def update(self, u: Vectors, s: Tree, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Tree]:
        new = []
        for link, mine in zip(self.links, s):
            u, state = link.update(u, mine, x, ctx)
            new.append(state)
        return u, tuple(new)

    def idle(self, s: Tree, x: Tensor) -> Tree:
        return tuple(link.idle(mine, x) for link, mine in zip(self.links, s))

    def adjust(self, average: Tensor, s: Tree, ctx: ServerContext) -> Tensor:
        for link, mine in zip(self.links, s):
            average = link.adjust(average, mine, ctx)
        return average

    def settle(self, move: Tensor, s: Tree, ctx: ServerContext) -> tuple[Tensor | None, Tree]:
        done = [link.settle(move, mine, ctx) for link, mine in zip(self.links, s)]
        without = [h for h, _ in done if h is not None]
        return (sum(without[1:], without[0]) if without else None), tuple(state for _, state in done)

    def plain_steps(self) -> bool:
        return any(link.plain_steps() for link in self.links)

    def leave(self, s: Tree, share: Vectors) -> Tree:
        return tuple(link.leave(mine, share) for link, mine in zip(self.links, s))


def pipeline(*transforms: Transform) -> Pipeline:
    """Transforms as one pipeline."""
    links = tuple(t for part in transforms for t in (part.links if isinstance(part, Pipeline) else (part,)))
    return Pipeline(tuple(t for t in links if type(t) is not Transform))


@dataclass(frozen=True)
class Scale(Transform):
    """delta ← lr · delta: the server's learning rate."""

    lr: float = 1.0

    def __post_init__(self) -> None:
        number("server lr", self.lr, "(0, inf)", "does not step downhill")

    def update(self, u: Vectors, s: Tree, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Tree]:
        return (u, s) if self.lr == 1 else ({**u, "delta": self.lr * u["delta"]}, s)
