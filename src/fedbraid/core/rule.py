"""The client half of a round: rules that bend the local gradient.

Every vector here has a leading client axis, `[m, d]` or `[m, 1]`; one phone is m = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbraid.core.context import ClientContext, Vectors
from fedbraid.core.traits import RuleTraits, merge
from fedbraid.core.vector_spec import DELTA, Upload, by_name
from fedbraid.errors import ConfigError


@dataclass(frozen=True)
class Rule:
    """One element of local training; every hook defaults to doing nothing."""

    def uploads(self) -> tuple[Upload, ...]:
        """Declares what it sends up. `delta`, x − y, is there unless a rule leaves it out."""
        return (DELTA,)

    def init(self, x: Tensor) -> Vectors:
        """Client state before the first participation: named vectors of any width."""
        return {}

    def start(self, ctx: ClientContext) -> Vectors:
        """Local state of one participation."""
        return {}

    def step(self, g: Tensor, y: Tensor, s: Vectors, ctx: ClientContext) -> tuple[Tensor, Vectors]:
        """Bend the gradient taken at y; g must not be stored."""
        return g, s

    def finish(self, y: Tensor, s: Vectors, ctx: ClientContext) -> Vectors:
        """The declared uploads; `delta` is made where it is not given."""
        return {}

    def remember(self, received: Vectors, s: Vectors, ctx: ClientContext) -> Vectors:
        """New client state, from what the server received of its uploads."""
        return {}

    def withdraw(self, client_state: Vectors) -> Vectors:
        """The contribution of a client that leaves for good, negated, by the upload's name."""
        return {}

    def traits(self) -> RuleTraits:
        """What it is, as data."""
        return RuleTraits(defined_for_async=type(self) is Rule)


@dataclass(frozen=True)
class Chain(Rule):
    """Rules one after the other: each bends what the one before it made of the gradient."""

    rules: tuple[Rule, ...]

    def uploads(self) -> tuple[Upload, ...]:
        of_each = [r.uploads() for r in self.rules]
        others = by_name((d for some in of_each for d in some if d != DELTA), "upload")
        return (*([DELTA] if all(DELTA in some for some in of_each) else []), *others.values())

    def init(self, x: Tensor) -> Vectors:
        return _merge([r.init(x) for r in self.rules], "remembers")

    def start(self, ctx: ClientContext) -> Vectors:
        return _merge([r.start(ctx) for r in self.rules], "keeps for the round")

    def step(self, g: Tensor, y: Tensor, s: Vectors, ctx: ClientContext) -> tuple[Tensor, Vectors]:
        for r in self.rules:
            g, s = r.step(g, y, s, ctx)
        return g, s

    def finish(self, y: Tensor, s: Vectors, ctx: ClientContext) -> Vectors:
        return _merge([r.finish(y, s, ctx) for r in self.rules], "uploads")

    def remember(self, received: Vectors, s: Vectors, ctx: ClientContext) -> Vectors:
        return _merge([r.remember(received, s, ctx) for r in self.rules], "remembers")

    def withdraw(self, client_state: Vectors) -> Vectors:
        return _merge([r.withdraw(client_state) for r in self.rules], "uploads")

    def traits(self) -> RuleTraits:
        merged = merge(RuleTraits, [r.traits() for r in self.rules], self.rules)
        if merged.local_loop is not None and (bent := [r for r in self.rules if bends_gradient(r)]):
            loop = next(r for r in self.rules if r.traits().local_loop is not None)
            raise ConfigError(
                f"{loop!r} replaces the local steps, so that {bent[0]!r} would never bend a gradient; use one of the two"
            )
        return merged


def chain(*rules: Rule) -> Rule:
    """Rules as one rule."""
    flat = (r for rule in rules for r in (rule.rules if isinstance(rule, Chain) else (rule,)))
    active = tuple(r for r in flat if type(r) is not Rule)
    return active[0] if len(active) == 1 else Chain(active) if active else Rule()


def bends_gradient(rule: Rule) -> bool:
    """Whether its `step` is more than the gradient as it is."""
    if isinstance(rule, Chain):
        return any(bends_gradient(r) for r in rule.rules)
    return type(rule).step is not Rule.step


def finished(rule: Rule, y: Tensor, s: Vectors, ctx: ClientContext) -> Vectors:
    """All that a block uploads, by the order of its declaration; the update in y's own place, where nobody holds that."""
    made, up = rule.finish(y, s, ctx), rule.uploads()
    mine = [d.name for d in up if d.is_model_update and d.name not in made]
    held = y._is_view() or any(_same(v, y) for v in (*made.values(), *s.values()))
    place = None if held or len(mine) > 1 else y
    return {d.name: torch.sub(ctx.x, y, out=place) if d.name in mine else made[d.name] for d in up}


def _same(v: Tensor, y: Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    return v.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def _merge(parts: list[Vectors], verb: str) -> Vectors:
    merged: dict[str, Any] = {}
    for part in parts:
        for name in part.keys() & merged.keys():
            raise ConfigError(f"two rules of one algorithm: each {verb} {name!r}; rename it in one of them")
        merged |= part
    return merged
