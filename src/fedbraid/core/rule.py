"""The client half of a round: rules that bend the local gradient, and the loop that trains with them.

Every vector here has a leading client axis, `[m, d]` or `[m, 1]`; one phone is m = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fedbraid.errors import ConfigError

if TYPE_CHECKING:
    from fedbraid.core.layout import Layout
    from fedbraid.core.work import Work
    from fedbraid.data.batches import Batch, Plan

Vectors = dict[str, Tensor]


class Gradient(Protocol):
    """`grad(Y[m, d], batch) -> (G[m, d], losses[m])`: the one place that knows how a block is computed.

    G is valid until the next call. A client whose weights are all zero gets a zero gradient.
    """

    name: str
    vectorised: bool  # whether a larger block is cheaper per client

    def __call__(self, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]: ...

    def evaluate(self, x: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]: ...


@dataclass
class Local:
    """What stays fixed while a block of clients trains."""

    x: Tensor  # [1, d], the model they all start from
    down: Vectors  # [1, d] each, what else the server sent
    memory: Vectors  # [m, ·], what each client remembers
    lr: float
    K: Tensor  # [m, 1], how many steps each will take
    n: Tensor  # [m, 1], how many samples each holds
    t: int  # the version they train from
    momentum: float
    full_grad: Callable[[Tensor], Tensor]  # y[·, d] -> the gradient over each whole local set, [m, d]


@dataclass(frozen=True)
class Rule:
    """One link of local training; every hook defaults to doing nothing."""

    def init(self, x: Tensor) -> Vectors:
        """What a client remembers before its first round: named rows of width d or 1."""
        return {}

    def start(self, loc: Local) -> Vectors:
        """State that lives for one visit."""
        return {}

    def step(self, g: Tensor, y: Tensor, s: Vectors, loc: Local) -> tuple[Tensor, Vectors]:
        """Bend the gradient taken at y. g may be overwritten and returned; it must not be kept."""
        return g, s

    def finish(self, y: Tensor, s: Vectors, loc: Local) -> tuple[Vectors, Vectors]:
        """(extra uploads, what to remember). An upload named `delta` replaces x − y."""
        return {}, {}


@dataclass(frozen=True)
class Chain(Rule):
    """Rules one after the other: each bends what the one before it made of the gradient."""

    links: tuple[Rule, ...]

    def init(self, x: Tensor) -> Vectors:
        return _merge([r.init(x) for r in self.links], "remembers")

    def start(self, loc: Local) -> Vectors:
        return _merge([r.start(loc) for r in self.links], "keeps for the round")

    def step(self, g: Tensor, y: Tensor, s: Vectors, loc: Local) -> tuple[Tensor, Vectors]:
        for r in self.links:
            g, s = r.step(g, y, s, loc)
        return g, s

    def finish(self, y: Tensor, s: Vectors, loc: Local) -> tuple[Vectors, Vectors]:
        done = [r.finish(y, s, loc) for r in self.links]
        return _merge([up for up, _ in done], "uploads"), _merge([memory for _, memory in done], "remembers")


def chain(*rules: Rule) -> Rule:
    """Rules as one rule."""
    links = tuple(r for rule in rules for r in (rule.links if isinstance(rule, Chain) else (rule,)))
    links = tuple(r for r in links if type(r) is not Rule)
    return links[0] if len(links) == 1 else Chain(links) if links else Rule()


def train(
    rule: Rule, grad: Gradient, loc: Local, plan: Plan, work: Work, layout: Layout
) -> tuple[Vectors, Vectors, Tensor]:
    """K local steps of every client in the block: (uploads, what to remember, mean loss `[m]`)."""
    m = len(plan.n)
    y = loc.x.repeat(m, 1)
    s, steps = rule.start(loc), int(plan.K.max())
    even = int(plan.K.min()) == steps
    b = torch.zeros_like(y) if work.momentum else None
    loss = torch.zeros(m, device=y.device)
    for k in range(steps):
        g, losses = grad(y, plan.batch(k))
        loss += losses
        stats = None if layout.buffers is None else y[:, layout.buffers].clone()
        if work.clip is not None:
            g = g * (work.clip / g.norm(dim=1, keepdim=True).clamp_min(work.clip))
        if work.weight_decay:
            g = g + work.weight_decay * y
        v, s_new = rule.step(g, y, s, loc)
        if b is not None:
            v = torch.add(v, b, alpha=work.momentum, out=b)
        if even:
            y.add_(v, alpha=-loc.lr)
            s = s_new
        else:
            on = k < loc.K
            y = torch.where(on, y - loc.lr * v, y)
            s = {
                name: value if value is s[name] else torch.where(on, value, s[name])
                for name, value in s_new.items()
            }
        if stats is not None:
            y[:, layout.buffers] = stats  # running statistics follow the data, not the gradient
    extra, memory = rule.finish(y, s, loc)
    return {"delta": loc.x - y, **extra}, memory, loss / loc.K.squeeze(1)


def _merge(parts: list[Vectors], verb: str) -> Vectors:
    merged: dict[str, Any] = {}
    for part in parts:
        for name in part.keys() & merged.keys():
            raise ConfigError(f"two rules of one algorithm: each {verb} {name!r}; rename it in one of them")
        merged |= part
    return merged
