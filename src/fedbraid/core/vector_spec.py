"""Declarations of the vectors that clients and server exchange: codecs, gathers and privacy read them, never the name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from fedbraid.errors import ConfigError

if TYPE_CHECKING:
    from fedbraid.core.layout import Layout


@dataclass(frozen=True)
class VectorSpec:
    """A named vector that crosses a link.

    `width` is None for one as wide as the model, else how many numbers it has. What is not `signed` is never
    negative, and crosses a lossy link as its root.
    """

    name: str
    width: int | None = None
    signed: bool = True

    def size(self, layout: Layout) -> int:
        """How many numbers it has in this model."""
        return layout.size if self.width is None else self.width


@dataclass(frozen=True)
class Download(VectorSpec):
    """A vector that a transform sends down in addition to the model."""

    is_mean_samples: bool = (
        False  # n̄ = all registered clients' samples / N, which the run sends and `send` leaves out
    )


@dataclass(frozen=True)
class Upload(VectorSpec):
    """A vector that a rule uploads, or that a transform makes of each upload before it is gathered."""

    uniform: bool = False  # averaged uniformly, however the gather weighs clients
    discounts_staleness: bool = False  # whether staleness scales it
    is_model_update: bool = False  # it is x − y, in whose place the weights y may travel
    accumulates: bool = False  # what one client sends in two participations adds up
    clip_scale: float | None = None  # by which it is divided before privacy clips it; None: not declared


DELTA = Upload("delta", discounts_staleness=True, is_model_update=True, clip_scale=1.0)
MODEL = Download("x")

C = TypeVar("C", bound=VectorSpec)


def by_name(declared: Iterable[C], verb: str) -> dict[str, C]:
    """Declarations by name, each once."""
    named: dict[str, C] = {}
    for d in declared:
        if d.name in named:
            raise ConfigError(f"two parts of one algorithm both {verb} {d.name!r}; rename it in one of them")
        named[d.name] = d
    return named
