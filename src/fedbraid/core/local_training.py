"""Local training: the K local steps of a block of clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fedbraid.core.context import ClientContext, Vectors, outside_a_step
from fedbraid.core.metric_names import PERSONAL
from fedbraid.core.rule import Rule, bends_gradient
from fedbraid.core.traits import RuleTraits
from fedbraid.core.work import Work
from fedbraid.errors import ConfigError


class Gradient(Protocol):
    """`grad(Y[m, d], batch) -> (G[m, d], losses[m])`: the one place that knows how a block is computed.

    G is valid until the next call. A client whose weights are all zero gets a zero gradient. One that can take whole steps
    has `descend(Y, batch, lr) -> losses[m]` too, which does `Y -= lr G` without making G.
    """

    name: str
    vectorized: bool  # whether a larger block is cheaper per client

    def __call__(self, y: Tensor, batch: Any) -> tuple[Tensor, Tensor]: ...

    def evaluate(self, x: Tensor, inputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]: ...


class Batches(Protocol):
    """What a block of clients will see in one visit."""

    n: Any  # [m], samples
    K: Any  # [m], steps

    def batch(self, k: int) -> Any: ...


def _one_gradient_only(y: Tensor) -> Tensor:
    raise ConfigError(
        "the rule asks for a second gradient of a step's batch, whose noise would be the first one's, so that their"
        " difference tells of single examples; use a rule that takes one gradient a step, such as fedavg's"
    )


def train(
    rule: Rule, grad: Gradient, ctx: ClientContext, batches: Batches, work: Work
) -> tuple[Tensor, Vectors, Tensor]:
    """K local steps of every client in the block: (y `[m, d]`, the visit's state, mean loss `[m]`).

    Personal parts are columns after the d shared ones, which rules never see.
    """
    m, own = len(batches.n), ctx.client_state.get(PERSONAL)
    buffers = (ctx.full_layout or ctx.layout).buffers
    traits = rule.traits()
    start = initial_model(traits, ctx).expand(m, -1)
    y = start.clone() if own is None else torch.cat([start, own], 1)
    d = ctx.x.shape[1]
    s, steps = rule.start(ctx), int(batches.K.max())
    head_steps = None if own is None or traits.personal is None else traits.personal.head_steps
    alone = None if head_steps is None else head_steps(ctx.K)
    even = int(batches.K.min()) == steps
    b = torch.zeros_like(y) if work.momentum else None
    optimizer = work.local
    moments: Vectors = {} if optimizer is None else optimizer.init(y)
    loss = torch.zeros(m, device=y.device)
    again = _Again(grad, work, y)
    ctx.grad = again if traits.example_privacy is None else _one_gradient_only
    plain = (
        even
        and own is None
        and buffers is None
        and work.plain
        and not bends_gradient(rule)
        and traits.example_privacy is None
    )
    descend = getattr(grad, "descend", None) if plain else None
    for k in range(steps):
        if descend is not None:
            loss += descend(y, batches.batch(k), ctx.lr)
            continue
        again.batch, again.y = batches.batch(k), y
        again.raw, losses = grad(y, again.batch)
        loss += losses
        stats = None if buffers is None else y[:, buffers].clone()
        g = taken(again.raw, y, work)
        if own is None:
            v, s_new = rule.step(g, y, s, ctx)
        else:
            v, s_new = rule.step(g[:, :d], y[:, :d], s, ctx)
            v = torch.cat([v, g[:, d:]], 1)
        turn = None if alone is None else _turn(k < alone, d, y)
        if turn is not None:
            v = v * turn
        if optimizer is not None:
            v, moments = optimizer.follow(v, moments, k + 1)
        if work.decoupled:
            v = v + work.decoupled * y
        if b is not None:
            v = torch.add(v, b, alpha=work.momentum, out=b)
        if turn is not None:
            v = v * turn
        if even:
            y.add_(v, alpha=-ctx.lr)
            s = s_new
        else:
            on = k < ctx.K
            y = torch.where(on, y - ctx.lr * v, y)
            s = {
                name: value if value is s[name] else torch.where(on, value, s[name])
                for name, value in s_new.items()
            }
        if stats is not None:
            y[:, buffers] = stats  # running statistics follow the data, not the gradient
    ctx.grad = outside_a_step
    return y, s, loss / ctx.K.squeeze(1)


def initial_model(traits: RuleTraits, ctx: ClientContext) -> Tensor:
    """Where clients start, `[1, d]` or `[m, d]`: the model that they were sent, unless a rule says otherwise."""
    personal = traits.personal
    return ctx.x if personal is None or personal.initial_model is None else personal.initial_model(ctx)


def taken(g: Tensor, y: Tensor, work: Work) -> Tensor:
    """A gradient as the work takes it: clipped, decay included."""
    if work.clip is not None:
        g = g * (work.clip / g.norm(dim=1, keepdim=True).clamp_min(work.clip))
    return g + work.penalty * y if work.penalty else g


@dataclass
class _Again:
    """The gradient of a step's batch at another point, the personal parts being where they are."""

    grad: Gradient
    work: Work
    y: Tensor
    batch: Any = None
    raw: Tensor = field(
        default_factory=lambda: torch.empty(0)
    )  # the step's own, which another call would overwrite

    def __call__(self, at: Tensor) -> Tensor:
        d = at.shape[1]
        at = torch.cat([at.expand(len(self.y), -1), self.y[:, d:]], 1)
        before = self.raw.clone()
        g = self.grad(at.clone(), self.batch)[0].clone()  # a pass may write running statistics
        self.raw.copy_(before)
        return taken(g, at, self.work)[:, :d]


def _turn(first: Tensor, d: int, y: Tensor) -> Tensor:
    """Whose turn it is, `[m, D]`: that of the personal columns, from d on, where `first`, else that of the others."""
    personal = torch.arange(y.shape[1], device=y.device) >= d
    return (personal == first).to(y)
