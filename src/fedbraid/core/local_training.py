"""Local training: the K local steps of a block of clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fedbraid.core.context import ClientContext, Vectors, outside_a_step
from fedbraid.core.metric_names import PERSONAL
from fedbraid.core.optim import Optimizer
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


# A step of local training: (y, s, batch, k) -> (y, s, losses). y may be changed in place.
LocalStep = Callable[[Tensor, Vectors, Any, int], tuple[Tensor, Vectors, Tensor]]
# What becomes of a direction before it is walked: (v, y, k) -> v.
Stage = Callable[[Tensor, Tensor, int], Tensor]


def train(
    rule: Rule, grad: Gradient, ctx: ClientContext, batches: Batches, work: Work
) -> tuple[Tensor, Vectors, Tensor]:
    """K local steps of every client in the block: (y `[m, d]`, the local state, mean loss `[m]`).

    Personal parameters are columns after the d shared ones, which rules never see.
    """
    m, personal = len(batches.n), ctx.client_state.get(PERSONAL)
    start = initial_model(rule.traits(), ctx).expand(m, -1)
    y = start.clone() if personal is None else torch.cat([start, personal], 1)
    s, loss = rule.start(ctx), torch.zeros(m, device=y.device)
    step = compose(rule, grad, ctx, batches, work, y)
    for k in range(int(batches.K.max())):
        y, s, losses = step(y, s, batches.batch(k), k)
        loss += losses
    ctx.grad = outside_a_step
    return y, s, loss / ctx.K.squeeze(1)


def compose(
    rule: Rule, grad: Gradient, ctx: ClientContext, batches: Batches, work: Work, y: Tensor
) -> LocalStep:
    """The step that this algorithm, these settings and this block take, decided once; y is where they start.

    In order: the gradient at y; clipping and decay; the rule; the phase mask of personal training; the local optimizer,
    decoupled decay or momentum; the mask again; the step y ← y − lr·v, of the clients that have steps left.
    """
    has_personal, d = PERSONAL in ctx.client_state, ctx.x.shape[1]
    buffers = (ctx.full_layout or ctx.layout).buffers
    traits, is_even = rule.traits(), int(batches.K.min()) == int(batches.K.max())
    gradient = _BatchGradient(grad, work, y)
    ctx.grad = gradient.at if traits.example_privacy is None else _one_gradient_only
    is_plain = is_even and work.plain and not (has_personal or bends_gradient(rule) or traits.example_privacy)
    if is_plain and buffers is None and (descend := getattr(grad, "descend", None)) is not None:
        return lambda y, s, batch, k: (y, s, descend(y, batch, ctx.lr))
    stages = _stages(traits, ctx, work, y)
    move = _move_all(ctx) if is_even else _move_some(ctx)
    if buffers is not None:
        move = _keeping(buffers, move)

    def step(y: Tensor, s: Vectors, batch: Any, k: int) -> tuple[Tensor, Vectors, Tensor]:
        g, losses = gradient(y, batch)
        if has_personal:
            v, s_new = rule.step(g[:, :d], y[:, :d], s, ctx)
            v = torch.cat([v, g[:, d:]], 1)
        else:
            v, s_new = rule.step(g, y, s, ctx)
        for stage in stages:
            v = stage(v, y, k)
        y, s = move(y, v, s, s_new, k)
        return y, s, losses

    return step


def _stages(traits: RuleTraits, ctx: ClientContext, work: Work, y: Tensor) -> list[Stage]:
    """What becomes of a direction after the rule has bent it."""
    stages: list[Stage] = []
    if (optimizer := work.local) is not None:
        stages.append(_Following(optimizer, optimizer.init(y)))
    if decay := work.decoupled:
        stages.append(lambda v, y, k: v + decay * y)
    if momentum := work.momentum:
        b = torch.zeros_like(y)
        stages.append(lambda v, y, k: torch.add(v, b, alpha=momentum, out=b))
    if (
        PERSONAL in ctx.client_state
        and traits.personal is not None
        and traits.personal.head_steps is not None
    ):
        mask = _PhaseMask(traits.personal.head_steps(ctx.K), ctx.x.shape[1])
        return [mask, *stages, mask]
    return stages


Move = Callable[
    [Tensor, Tensor, Vectors, Vectors, int], tuple[Tensor, Vectors]
]  # (y, v, s, new s, k) -> (y, s)


def _move_all(ctx: ClientContext) -> Move:
    """A step of every client."""
    return lambda y, v, s, s_new, k: (y.add_(v, alpha=-ctx.lr), s_new)


def _move_some(ctx: ClientContext) -> Move:
    """A step of the clients that have steps left."""

    def move(y: Tensor, v: Tensor, s: Vectors, s_new: Vectors, k: int) -> tuple[Tensor, Vectors]:
        on = k < ctx.K
        y = torch.where(on, y - ctx.lr * v, y)
        return y, {
            name: value if value is s[name] else torch.where(on, value, s[name])
            for name, value in s_new.items()
        }

    return move


def _keeping(buffers: Any, move: Move) -> Move:
    """The same, but running statistics follow the data and not the gradient."""

    def kept(y: Tensor, v: Tensor, s: Vectors, s_new: Vectors, k: int) -> tuple[Tensor, Vectors]:
        statistics = y[:, buffers].clone()
        y, s = move(y, v, s, s_new, k)
        y[:, buffers] = statistics
        return y, s

    return kept


def initial_model(traits: RuleTraits, ctx: ClientContext) -> Tensor:
    """Where clients start, `[1, d]` or `[m, d]`: the model that they were sent, unless a rule says otherwise."""
    personal = traits.personal
    return ctx.x if personal is None or personal.initial_model is None else personal.initial_model(ctx)


def regularized(g: Tensor, y: Tensor, work: Work) -> Tensor:
    """A gradient clipped, decay included."""
    if work.clip is not None:
        g = g * (work.clip / g.norm(dim=1, keepdim=True).clamp_min(work.clip))
    return g + work.penalty * y if work.penalty else g


@dataclass
class _BatchGradient:
    """The gradient of a step's batch, regularized; `at` takes it at another point, personal parameters being as they are."""

    grad: Gradient
    work: Work
    y: Tensor
    batch: Any = None
    raw: Tensor = field(
        default_factory=lambda: torch.empty(0)
    )  # the step's own, which another call would overwrite

    def __call__(self, y: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        self.batch, self.y = batch, y
        self.raw, losses = self.grad(y, batch)
        return regularized(self.raw, y, self.work), losses

    def at(self, at: Tensor) -> Tensor:
        d = at.shape[1]
        at = torch.cat([at.expand(len(self.y), -1), self.y[:, d:]], 1)
        before = self.raw.clone()
        g = self.grad(at.clone(), self.batch)[0].clone()  # a pass may write running statistics
        self.raw.copy_(before)
        return regularized(g, at, self.work)[:, :d]


@dataclass
class _Following:
    """The direction of a local optimizer, with its moments."""

    optimizer: Optimizer
    moments: Vectors

    def __call__(self, v: Tensor, y: Tensor, k: int) -> Tensor:
        v, self.moments = self.optimizer.follow(v, self.moments, k + 1)
        return v


@dataclass
class _PhaseMask:
    """Directions of the columns whose phase it is: the personal ones, from d on, in the first steps, then the others."""

    head_steps: Tensor  # [m, 1]
    d: int

    def __call__(self, v: Tensor, y: Tensor, k: int) -> Tensor:
        is_personal = torch.arange(y.shape[1], device=y.device) >= self.d
        return v * (is_personal == (k < self.head_steps)).to(y)
