"""The client half of a round: rules that bend the local gradient, and the loop that trains with them.

Every vector here has a leading client axis, `[m, d]` or `[m, 1]`; one phone is m = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from fedbraid.core.metric_names import PERSONAL
from fedbraid.core.vector_spec import DELTA, Upload, by_name
from fedbraid.errors import ConfigError

if TYPE_CHECKING:
    from fedbraid.core.layout import Layout
    from fedbraid.core.work import Work

Vectors = dict[str, Tensor]
LocalLoop = Callable[[Any, Any, "ClientContext"], Any]  # (module, batches, ctx) -> the visit's mean loss


def _outside_a_step(y: Tensor) -> Tensor:
    raise ConfigError(
        "ctx.grad is asked for outside of a step, where there is no batch; ask in step, or for full_grad"
    )


def _one_gradient_only(y: Tensor) -> Tensor:
    raise ConfigError(
        "the rule asks for a second gradient of a step's batch, whose noise would be the first one's, so that their"
        " difference tells of single examples; use a rule that takes one gradient a step, such as fedavg's"
    )


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


@dataclass
class ClientContext:
    """What stays fixed while a block of clients trains."""

    x: Tensor  # [1, d], the model they all start from
    download: Vectors  # [1, ·] each, what else the server sent
    client_state: Vectors  # [m, ·], what each client remembers
    lr: float
    K: Tensor  # [m, 1], how many steps each will take
    a: Tensor  # [m, 1], how far they go: the effective number of plain steps
    n: Tensor  # [m, 1], how many samples each holds
    t: int  # the version they train from
    layout: Layout
    full_grad: Callable[[Tensor], Tensor]  # y[·, d] -> the gradient over each whole local set, [m, d]
    grad: Callable[[Tensor], Tensor] = field(
        default=_outside_a_step
    )  # y[·, d] -> the one of the step's batch, [m, d]
    full_layout: Layout | None = (
        None  # the layout with the personal parts after the shared ones, where there are any
    )


@dataclass(frozen=True)
class ExamplePrivacy:
    """How gradients are taken where single examples are private: each clipped, their sum noised."""

    clip: float
    z: float

    @property
    def deviation(self) -> float:
        """Of the noise on a sum."""
        return self.z * self.clip


@dataclass(frozen=True)
class Rule:
    """One link of local training; every hook defaults to doing nothing."""

    needs_personal: ClassVar[bool] = False  # the task must have personal parameters
    apart: ClassVar[bool] = False  # clients use models of their own only: the server's is nobody's

    def uploads(self) -> tuple[Upload, ...]:
        """What it sends up. `delta`, x − y, is there unless a rule leaves it out."""
        return (DELTA,)

    def init(self, x: Tensor) -> Vectors:
        """What a client remembers before its first round: named rows of any width."""
        return {}

    def start(self, ctx: ClientContext) -> Vectors:
        """State that lives for one visit."""
        return {}

    def begin(self, ctx: ClientContext) -> Tensor:
        """Where clients start, `[1, d]` or `[m, d]`: the model that they were sent."""
        return ctx.x

    def step(self, g: Tensor, y: Tensor, s: Vectors, ctx: ClientContext) -> tuple[Tensor, Vectors]:
        """Bend the gradient taken at y; g must not be kept."""
        return g, s

    def finish(self, y: Tensor, s: Vectors, ctx: ClientContext) -> Vectors:
        """The declared uploads; `delta` is made where it is not given."""
        return {}

    def remember(self, got: Vectors, s: Vectors, ctx: ClientContext) -> Vectors:
        """The client's new memory, made of what the server received of its uploads."""
        return {}

    def plain_steps(self) -> bool:
        """Whether it takes a visit for a steps of length η along the gradient, which only optimizer="sgd" makes."""
        return False

    def loop(self) -> LocalLoop | None:
        """A function that trains one client's module in place of the steps, where there is one (`fb.custom_local_loop`)."""
        return None

    def examples(self) -> ExamplePrivacy | None:
        """How its gradients hide single examples, where they do."""
        return None

    def fades(self) -> bool:
        """Whether what clients remember changes with every step, wherever they are."""
        return False

    def alone(self, K: Tensor) -> Tensor | None:
        """How many of its K steps each client gives to its personal parts, the rest being the shared ones'; None: all to both."""
        return None

    def own(self, memory: Vectors) -> Tensor | None:
        """The models `[m, d]` that clients with this memory use themselves, where that is not the server's."""
        return None

    def leave(self, memory: Vectors) -> Vectors:
        """What a client that goes for good sends: the negative of its share, by the upload's name."""
        return {}


@dataclass(frozen=True)
class Chain(Rule):
    """Rules one after the other: each bends what the one before it made of the gradient."""

    links: tuple[Rule, ...]

    def uploads(self) -> tuple[Upload, ...]:
        of_each = [r.uploads() for r in self.links]
        own = by_name((d for some in of_each for d in some if d != DELTA), "upload")
        return (*([DELTA] if all(DELTA in some for some in of_each) else []), *own.values())

    def init(self, x: Tensor) -> Vectors:
        return _merge([r.init(x) for r in self.links], "remembers")

    def start(self, ctx: ClientContext) -> Vectors:
        return _merge([r.start(ctx) for r in self.links], "keeps for the round")

    def begin(self, ctx: ClientContext) -> Tensor:
        return next((r.begin(ctx) for r in self.links if type(r).begin is not Rule.begin), ctx.x)

    def step(self, g: Tensor, y: Tensor, s: Vectors, ctx: ClientContext) -> tuple[Tensor, Vectors]:
        for r in self.links:
            g, s = r.step(g, y, s, ctx)
        return g, s

    def finish(self, y: Tensor, s: Vectors, ctx: ClientContext) -> Vectors:
        return _merge([r.finish(y, s, ctx) for r in self.links], "uploads")

    def remember(self, got: Vectors, s: Vectors, ctx: ClientContext) -> Vectors:
        return _merge([r.remember(got, s, ctx) for r in self.links], "remembers")

    def plain_steps(self) -> bool:
        return any(r.plain_steps() for r in self.links)

    def loop(self) -> LocalLoop | None:
        found = [r for r in self.links if r.loop() is not None]
        if found and (others := [r for r in self.links if type(r).step is not Rule.step]):
            raise ConfigError(
                f"{found[0]!r} takes the whole visit, so that {others[0]!r} would never bend a gradient; use one of the two"
            )
        return found[0].loop() if found else None

    def examples(self) -> ExamplePrivacy | None:
        return next((e for r in self.links if (e := r.examples()) is not None), None)

    def fades(self) -> bool:
        return any(r.fades() for r in self.links)

    def alone(self, K: Tensor) -> Tensor | None:
        return next((n for r in self.links if (n := r.alone(K)) is not None), None)

    def own(self, memory: Vectors) -> Tensor | None:
        return next((x for r in self.links if (x := r.own(memory)) is not None), None)

    def leave(self, memory: Vectors) -> Vectors:
        return _merge([r.leave(memory) for r in self.links], "uploads")


def chain(*rules: Rule) -> Rule:
    """Rules as one rule."""
    links = tuple(r for rule in rules for r in (rule.links if isinstance(rule, Chain) else (rule,)))
    links = tuple(r for r in links if type(r) is not Rule)
    return links[0] if len(links) == 1 else Chain(links) if links else Rule()


def train(
    rule: Rule, grad: Gradient, ctx: ClientContext, batches: Batches, work: Work
) -> tuple[Tensor, Vectors, Tensor]:
    """K local steps of every client in the block: (y `[m, d]`, the visit's state, mean loss `[m]`).

    Personal parts are columns after the d shared ones, which rules never see.
    """
    m, own = len(batches.n), ctx.client_state.get(PERSONAL)
    buffers = (ctx.full_layout or ctx.layout).buffers
    start = rule.begin(ctx).expand(m, -1)
    y = start.clone() if own is None else torch.cat([start, own], 1)
    d = ctx.x.shape[1]
    s, steps = rule.start(ctx), int(batches.K.max())
    alone = None if own is None else rule.alone(ctx.K)
    even = int(batches.K.min()) == steps
    b = torch.zeros_like(y) if work.momentum else None
    optimizer = work.local
    moments: Vectors = {} if optimizer is None else optimizer.init(y)
    loss = torch.zeros(m, device=y.device)
    again = _Again(grad, work, y)
    ctx.grad = again if rule.examples() is None else _one_gradient_only
    plain = even and own is None and buffers is None and work.plain and _straight(rule)
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
    ctx.grad = _outside_a_step
    return y, s, loss / ctx.K.squeeze(1)


def _straight(rule: Rule) -> bool:
    """Whether steps follow the gradient as it is."""
    links = rule.links if isinstance(rule, Chain) else (rule,)
    return all(type(r).step is Rule.step and r.examples() is None for r in links)


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


@dataclass(frozen=True)
class CustomLoop(Rule):
    """A local loop of the user's own; it prints by its name."""

    name: str
    fn: LocalLoop = field(compare=False)

    def __repr__(self) -> str:
        return f"local({self.name!r})"

    def loop(self) -> LocalLoop:
        return self.fn


def custom_local_loop(fn: LocalLoop) -> Rule:
    """A rule from a function (module, batches, ctx) that trains a client's module in place and returns its mean loss.

    `batches` gives the visit's (inputs, targets), as often as it is asked; `ctx` is what any rule sees, with one client.
    It runs on the loop backend, in every engine and schedule. What it draws from torch is counted.

    >>> def mine(module, batches, ctx):  # doctest: +SKIP
    ...     optimizer = torch.optim.Adam(module.parameters(), ctx.lr)
    ...     ...
    >>> fb.Algorithm(rule=fb.custom_local_loop(mine))  # doctest: +SKIP
    """
    if not callable(fn):
        raise ConfigError(
            f"fb.custom_local_loop got {fn!r}; give it a function (module, batches, ctx) -> mean loss"
        )
    return CustomLoop(getattr(fn, "__qualname__", type(fn).__name__), fn)


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
