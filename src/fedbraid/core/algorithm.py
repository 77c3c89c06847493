"""What an algorithm is: five parts, what they declare, and the rehearsal that shows that they fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbraid.core.codec import Codec
from fedbraid.core.context import ClientContext, ServerContext, Uploads, Vectors
from fedbraid.core.gather import Gather, Mean
from fedbraid.core.layout import Layout
from fedbraid.core.link import Downlink, Uplink
from fedbraid.core.rule import Rule, finished
from fedbraid.core.traits import PersonalTraining
from fedbraid.core.transform import Transform
from fedbraid.core.vector_spec import MODEL, Download, Upload, VectorSpec, by_name
from fedbraid.core.work import Work
from fedbraid.errors import ConfigError, FedbraidError


@dataclass(frozen=True)
class Algorithm:
    """Five parts with neutral defaults; all neutral is FedAvg. A codec as `up` or `down` is a plain link over it."""

    rule: Rule = field(default_factory=Rule)
    gather: Gather = field(default_factory=Mean)
    server: Transform = field(default_factory=Transform)
    up: Uplink = field(default_factory=lambda: plain_links().PlainUplink())
    down: Downlink = field(default_factory=lambda: plain_links().PlainDownlink())
    name: str = field(default="", compare=False)  # the call that builds it, where a builder did
    work: Mapping[str, float] = field(
        default_factory=dict, compare=False, repr=False
    )  # settings of its paper's clients

    def __post_init__(self) -> None:
        plain = plain_links()
        for link, over in (("up", plain.PlainUplink), ("down", plain.PlainDownlink)):
            if isinstance(getattr(self, link), Codec):
                object.__setattr__(self, link, over(getattr(self, link)))
        kinds = {"rule": Rule, "gather": Gather, "server": Transform, "up": Uplink, "down": Downlink}
        for name, kind in kinds.items():
            part = getattr(self, name)
            if not isinstance(part, kind):
                wanted = "Codec" if name in ("up", "down") else kind.__name__
                raise ConfigError(f"{name}={part!r} is a {type(part).__name__}; give a {wanted} there")
        self.up.fits(self.uploads)
        self.rule.traits()  # refuses rules that contradict each other
        self.server.traits()
        self._check_updates()
        rehearse(self)

    def _check_updates(self) -> None:
        """Refuse a gather of updates x − y where something else is gathered in their place."""
        delta = self.gathered.get("delta")
        if self.gather.traits().requires_updates and delta is not None and not delta.is_model_update:
            raise ConfigError(
                f"{type(self.gather).__name__} reads each client's update x − y, and 'delta' is something else here; use a"
                " rule and server parts that keep delta = x − y"
            )

    @property
    def defined_for_async(self) -> bool:
        """Whether papers define its rule, gather and server parts for stale updates."""
        return all(part.traits().defined_for_async for part in (self.rule, self.gather, self.server))

    def fits(self, work: Work, personal: bool = True) -> None:
        """Refuse settings that its parts would misread, and a task without the personal parameters that it trains."""
        traits = self.rule.traits()
        own = traits.personal or PersonalTraining()
        if own.requires_personal_parameters and not personal:
            raise ConfigError(
                f"{self.name or 'this algorithm'} trains personal parameters, and the task has none; name them when the task"
                " is made, such as personal=('head.*',), or with --personal 'head.*'"
            )
        if own.head_steps is not None and work.optimizer != "sgd":
            raise ConfigError(
                f"{self.name or 'this algorithm'} resets between two training phases, which optimizer={work.optimizer!r} does"
                " not support; use optimizer='sgd'"
            )
        if work.optimizer != "sgd" and (traits.requires_sgd or self.server.traits().requires_sgd):
            raise ConfigError(
                f"{self.name or 'this algorithm'} estimates gradients from x − y, which requires local SGD, and"
                f" optimizer={work.optimizer!r} was given; use optimizer='sgd' or another algorithm"
            )

    @property
    def label(self) -> str:
        """What tables call it: its name, or the classes of the parts that are not neutral, such as `FadingPull`."""
        if self.name:
            return self.name
        names = ("rule", "gather", "server", "up", "down")
        given, neutral = ([getattr(a, name) for name in names] for a in (self, Algorithm()))
        custom = [type(part).__name__ for part, other in zip(given, neutral) if part != other]
        simple = [name for name in custom if name not in ("Chain", "Pipeline")]
        return ", ".join(simple or custom) or "fedavg()"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """In notebooks the name; `repr` has every part."""
        printer.text(self.label)

    @cached_property
    def uploads(self) -> dict[str, Upload]:
        """What clients send up, by name."""
        return by_name(self.rule.uploads(), "upload")

    @cached_property
    def gathered(self) -> dict[str, Upload]:
        """What is gathered: the uploads, and what server parts make of them."""
        made = by_name(self.server.accounts(), "account for")
        return {**self.uploads, **made}

    @cached_property
    def downloads(self) -> dict[str, Download]:
        """What the server sends down, by name: the model first."""
        return by_name((MODEL, *self.server.sends()), "send")

    def send(self, x: Tensor, server: Any, N: int, samples: float = 0.0) -> Vectors:
        """What is broadcast when the server's model and state are these; N clients are known, with so many samples."""
        sent = {name: v.to(x.device) for name, v in self.server.send(server, x, N).items()}
        return {"x": x, **sent, **{name: x.new_full((1,), samples / N) for name in self.mean_samples}}

    @cached_property
    def mean_samples(self) -> tuple[str, ...]:
        """The downloads that say how many samples clients have on average."""
        return tuple(name for name, d in self.downloads.items() if d.is_mean_samples)

    def widths(self, layout: Layout) -> dict[str, int]:
        """How many numbers a client uploads, by name."""
        return {name: d.size(layout) for name, d in self.uploads.items()}

    def init_client_state(self, x: Tensor, layout: Layout) -> Vectors:
        """A client's row before its first visit."""
        return {
            **self.rule.init(x),
            **self.up.init_client_state(self.uploads, layout),
            **self.down.init_client_state(),
        }

    def stateful(self, layout: Layout) -> bool:
        """Whether what a client does depends on what it remembers."""
        return bool(
            self.rule.init(torch.zeros(layout.size)) or self.up.init_client_state(self.uploads, layout)
        )


def plain_links() -> ModuleType:
    """The module of the neutral links, imported when an algorithm is built: wire and codecs stand above core."""
    from fedbraid.links import plain

    return plain


def rehearse(a: Algorithm) -> None:
    """One round on four numbers: a sentence about the parts that do not fit, before anything runs."""
    layout = Layout.from_shapes([("w", (2, 1)), ("b", (2,))])
    x, one = torch.zeros(4), torch.ones(2, 1)
    stage = "server"
    try:
        server, gather = a.server.init(x, layout), a.gather.init(x, layout)
        sent = {k: v.reshape(1, -1) for k, v in a.send(x, server, 2, 2.0).items()}
        _as_declared("the server sends", "sends()", "send", sent, a.downloads, layout)
        memory = {k: v.reshape(1, -1).repeat(2, 1) for k, v in _named("init", a.rule.init(x)).items()}
        down = {k: v for k, v in sent.items() if k != "x"}
        ones = lambda y: torch.ones(2, 4)  # noqa: E731
        ctx = ClientContext(x[None], down, memory, 0.1, one, one, one, 0, layout, ones, ones)
        stage = "rule"
        up, new = _rehearse_visit(a.rule, ctx, layout)
        _as_declared("the rule uploads", "uploads()", "finish", up, a.uploads, layout)
        if new.keys() != memory.keys():
            raise ConfigError(
                f"the rule remembers {sorted(new)} but starts with {sorted(memory)}; name the same in init and remember"
            )
        stage = "gather or server"
        uploads = Uploads(
            np.arange(2), up, one, one, one, torch.zeros(2, 1), 0.1 * one.double(), sent, a.gathered
        )
        made = a.server.account(uploads)
        accounts = by_name(a.server.accounts(), "account for")
        _as_declared("the server accounts for", "accounts()", "account", made, accounts, layout)
        uploads = uploads.having({**up, **made})
        acc = a.gather.add(a.gather.zero(x), uploads, gather, x)
        server_ctx = ServerContext(0, 2, 2, 2.0, 0.1, 1.0, 1.0, 0.0, layout, np.ones(2, np.int64), sent=sent)
        closed = a.gather.close(acc, gather, server_ctx)
        if not isinstance(closed, tuple) or len(closed) != 3:
            raise ConfigError(
                f"{type(a.gather).__name__}.close returns {_kind(closed)}; return (update, state, metrics), metrics being a"
                " dict of numbers for the record of the step"
            )
        u, gather, _ = closed
        u, server = a.server.update(u, server, x, server_ctx)
        if not isinstance(u.get("delta"), Tensor) or u["delta"].shape != x.shape:
            raise ConfigError("the server's parts end without a delta as wide as the model; let one make it")
        a.server.compute_offset(u["delta"], server, server_ctx)
        a.server.adjust(x - u["delta"], server, server_ctx)
    except FedbraidError:
        raise
    except KeyError as error:
        has = "what the server sends" if stage == "rule" else "what the clients upload"
        raise ConfigError(
            f"the {stage} part needs {error.args[0]!r}, which is not among {has}; add the part that makes it"
        ) from error
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise ConfigError(
            f"the {stage} part fails in a rehearsal of one round on four numbers: {type(error).__name__}: {error}"
        ) from error


def _rehearse_visit(rule: Rule, ctx: ClientContext, layout: Layout) -> tuple[Vectors, Vectors]:
    """(uploads, new memory) of two clients."""
    started = _named("start", rule.start(ctx))
    bent = rule.step(torch.ones(2, 4), ctx.x.repeat(2, 1), started, ctx)
    if not isinstance(bent, tuple) or len(bent) != 2 or not isinstance(bent[1], dict):
        raise ConfigError(
            f"the rule's step returns {_kind(bent)}; return (direction, state), a tensor and a dict"
        )
    v, s = bent
    if not isinstance(v, Tensor) or v.shape != (2, 4):
        raise ConfigError(
            f"the rule's step makes of a gradient [m, d] = [2, 4] {_kind(v)}; return one of the same shape"
        )
    if s.keys() != started.keys():
        raise ConfigError(
            f"the rule keeps {sorted(s)} in step but starts with {sorted(started)}; name the same in start and step"
        )
    y = ctx.x - 0.1 * v
    made, declared = _named("finish", rule.finish(y, s, ctx)), by_name(rule.uploads(), "upload")
    made_for_it = {name for name, d in declared.items() if d.is_model_update}
    _same_names("the rule uploads", "uploads()", "finish", {*made} | made_for_it, declared)
    up = finished(rule, y, s, ctx)
    return up, _named("remember", rule.remember(up, s, ctx))


def _named(hook: str, value: Any) -> Vectors:
    if not isinstance(value, dict):
        raise ConfigError(f"the rule's {hook} returns {_kind(value)}; return a dict of named tensors")
    return value


def _as_declared(
    who: str, where: str, hook: str, made: Vectors, declared: Mapping[str, VectorSpec], layout: Layout
) -> None:
    """Refuse vectors that are not those which were declared."""
    _same_names(who, where, hook, made.keys(), declared)
    for name, v in made.items():
        what = declared[name]
        if not isinstance(v, Tensor) or v.ndim != 2 or v.shape[1] != what.size(layout):
            raise ConfigError(
                f"{who} {name!r} as {_kind(v)}; declared are {'d' if what.width is None else what.width} numbers a client"
            )


def _same_names(
    who: str, where: str, hook: str, made: Collection[str], declared: Mapping[str, VectorSpec]
) -> None:
    kind = {"uploads()": "Upload", "accounts()": "Upload", "sends()": "Download"}[where]
    for name in sorted({*made} - declared.keys()):
        raise ConfigError(f"{who} {name!r} but {where} does not declare it; add fb.{kind}({name!r}, …) there")
    for name in sorted(declared.keys() - {*made}):
        raise ConfigError(
            f"{where} declares {name!r} but {hook}() does not return it; return it or leave it out of {where}"
        )


def _kind(value: Any) -> str:
    return (
        f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    )
