"""The server's two strokes: transforms turn what was gathered into the averaged model x̄; then x̄ is moved, and
what is subtracted for the next round comes last."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbraid.core.check import number
from fedbraid.core.context import ServerContext, Tree, Uploads, Vectors
from fedbraid.core.layout import Layout
from fedbraid.core.traits import TransformTraits, merge
from fedbraid.core.vector_spec import Download, Upload


@dataclass(frozen=True)
class Transform:
    """One element of the server's pipeline; every hook defaults to doing nothing.

    First stroke: `account` reads each upload, `update` goes from update to update; x̄ = x − update['delta'].
    Second stroke: `adjust` moves x̄, which is evaluated; `compute_offset` makes h: x̄ − h is sent out.
    """

    def init(self, x: Tensor, layout: Layout) -> Tree:
        """State that lives from step to step."""
        return {}

    def sends(self) -> tuple[Download, ...]:
        """Declares what goes down to clients beside the model."""
        return ()

    def send(self, s: Tree, x: Tensor, N: int) -> Vectors:
        """The declared downloads, `[width]` each, that go with the model x; N is how many clients are known."""
        return {}

    def accounts(self) -> tuple[Upload, ...]:
        """Declares what it makes of each upload before it is gathered; `delta` among them replaces delta."""
        return ()

    def account(self, up: Uploads) -> Vectors:
        """The declared accounts of a block, each upload with what its sender was sent: `[m, ·]` or `[1, ·]`."""
        return {}

    def update(self, u: Vectors, s: Tree, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Tree]:
        """From update to update."""
        return u, s

    def skip(self, s: Tree, x: Tensor) -> Tree:
        """The state after a step with an empty cohort, which does not move the model."""
        return s

    def adjust(self, average: Tensor, s: Tree, ctx: ServerContext) -> Tensor:
        """Move x̄; no state sees this as a gradient."""
        return average

    def compute_offset(self, move: Tensor, s: Tree, ctx: ServerContext) -> tuple[Tensor | None, Tree]:
        """(h, which is subtracted from x̄ for the next round, the new state); `move` is x − x̄ before any adjustment."""
        return None, s

    def absorb(self, s: Tree, contribution: Vectors) -> Tree:
        """The state after a client has left for good, whose rule withdrew this contribution."""
        return s

    def traits(self) -> TransformTraits:
        """What it is, as data."""
        return TransformTraits(defined_for_async=type(self) is Transform)


@dataclass(frozen=True)
class Pipeline(Transform):
    """Transforms one after the other.

    The order: reduce → algorithm state (c, h, statistics) → precondition → trust ratio → scale → shift.
    """

    transforms: tuple[Transform, ...] = ()

    def init(self, x: Tensor, layout: Layout) -> Tree:
        return tuple(t.init(x, layout) for t in self.transforms)

    def sends(self) -> tuple[Download, ...]:
        return tuple(d for t in self.transforms for d in t.sends())

    def send(self, s: Tree, x: Tensor, N: int) -> Vectors:
        return {name: v for t, mine in zip(self.transforms, s) for name, v in t.send(mine, x, N).items()}

    def accounts(self) -> tuple[Upload, ...]:
        return tuple(d for t in self.transforms for d in t.accounts())

    def account(self, up: Uploads) -> Vectors:
        return {name: v for t in self.transforms for name, v in t.account(up).items()}

    def update(self, u: Vectors, s: Tree, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Tree]:
        new = []
        for t, mine in zip(self.transforms, s):
            u, state = t.update(u, mine, x, ctx)
            new.append(state)
        return u, tuple(new)

    def skip(self, s: Tree, x: Tensor) -> Tree:
        return tuple(t.skip(mine, x) for t, mine in zip(self.transforms, s))

    def adjust(self, average: Tensor, s: Tree, ctx: ServerContext) -> Tensor:
        for t, mine in zip(self.transforms, s):
            average = t.adjust(average, mine, ctx)
        return average

    def compute_offset(self, move: Tensor, s: Tree, ctx: ServerContext) -> tuple[Tensor | None, Tree]:
        done = [t.compute_offset(move, mine, ctx) for t, mine in zip(self.transforms, s)]
        offsets = [h for h, _ in done if h is not None]
        return (sum(offsets[1:], offsets[0]) if offsets else None), tuple(state for _, state in done)

    def absorb(self, s: Tree, contribution: Vectors) -> Tree:
        return tuple(t.absorb(mine, contribution) for t, mine in zip(self.transforms, s))

    def traits(self) -> TransformTraits:
        return merge(TransformTraits, [t.traits() for t in self.transforms], self.transforms)


def pipeline(*transforms: Transform) -> Pipeline:
    """Transforms as one pipeline."""
    flat = (t for part in transforms for t in (part.transforms if isinstance(part, Pipeline) else (part,)))
    return Pipeline(tuple(t for t in flat if type(t) is not Transform))


@dataclass(frozen=True)
class Scale(Transform):
    """delta ← lr · delta: the server's learning rate."""

    lr: float = 1.0

    def __post_init__(self) -> None:
        number("server lr", self.lr, "(0, inf)", "does not step downhill")

    def traits(self) -> TransformTraits:
        return TransformTraits(defined_for_async=True)

    def update(self, u: Vectors, s: Tree, x: Tensor, ctx: ServerContext) -> tuple[Vectors, Tree]:
        return (u, s) if self.lr == 1 else ({**u, "delta": self.lr * u["delta"]}, s)
