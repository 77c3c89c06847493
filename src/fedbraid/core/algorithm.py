"""What an algorithm is: five parts, and the rehearsal that shows that they fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedbraid.core.gather import Gather, Info, Mean, Uploads
from fedbraid.core.layout import Layout
from fedbraid.core.rule import Local, Rule, Vectors
from fedbraid.core.transform import Transform
from fedbraid.errors import ConfigError
from fedbraid.links.codec import Codec
from fedbraid.links.codecs import identity
from fedbraid.links.link import (
    Down,
    ErrorFeedback,
    HiddenState,
    Up,
    codec_of,
    residuals,
)

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Algorithm:
    """Five parts with neutral defaults; all neutral is FedAvg."""

    rule: Rule = field(default_factory=Rule)
    gather: Gather = field(default_factory=Mean)
    server: Transform = field(default_factory=Transform)
    up: Up = field(default_factory=identity)
    down: Down = field(default_factory=identity)
    name: str = field(default="", compare=False)  # the call that builds it, where a builder did

    def __post_init__(self) -> None:
        for name, kind in (
            ("rule", Rule), ("gather", Gather), ("server", Transform), ("up", Codec | ErrorFeedback), ("down", Codec | HiddenState),
        ):  # fmt: skip
            part = getattr(self, name)
            if not isinstance(part, kind):
                wanted = getattr(kind, "__name__", "Codec")
                raise ConfigError(f"{name}={part!r} is a {type(part).__name__}; give a {wanted} there")
        if codec_of(self.down).weights:
            raise ConfigError(
                f"down={self.down!r} is for uploads; the model itself is sent down, so use its inner codec"
            )
        names = rehearse(self)
        object.__setattr__(self, "_uploads", names)

    def uploads(self, layout: Layout) -> dict[str, int]:
        """Names and widths of what a client uploads."""
        widths: dict[str, bool] = self.__dict__["_uploads"]
        return {name: layout.size if wide else 1 for name, wide in widths.items()}

    def remembers(self, x: Tensor, layout: Layout) -> Vectors:
        """A client's row before its first visit."""
        row = {**self.rule.init(x), **residuals(self.up, self.uploads(layout), layout)}
        return row | ({"held": torch.tensor([-1.0, 0.0])} if isinstance(self.down, HiddenState) else {})


def rehearse(a: Algorithm) -> dict[str, bool]:
    """One round on four numbers: what is uploaded, or a sentence about the parts that do not fit."""
    layout = Layout.from_shapes([("w", (2, 1)), ("b", (2,))])
    x, one = torch.zeros(4), torch.ones(2, 1)
    stage = "server"
    try:
        server, gather = a.server.init(x, layout), a.gather.init(x, layout)
        down = {k: v[None] for k, v in a.server.send(server).items()}
        memory = {k: v.reshape(1, -1).repeat(2, 1) for k, v in a.rule.init(x).items()}
        loc = Local(x[None], down, memory, 0.1, one, one, 0, 0.0, lambda y: torch.ones(2, 4))
        stage = "rule"
        started = a.rule.start(loc)
        v, s = a.rule.step(torch.ones(2, 4), x.repeat(2, 1), started, loc)
        if s.keys() != started.keys():
            raise ConfigError(
                f"the rule keeps {sorted(s)} in step but starts a visit with {sorted(started)}; name the same in start and step"
            )
        y = x - 0.1 * v
        extra, remembered = a.rule.finish(y, s, loc)
        up = {"delta": x - y, **extra}
        if remembered.keys() != memory.keys():
            raise ConfigError(
                f"the rule remembers {sorted(remembered)} but starts with {sorted(memory)}; name the same in init and finish"
            )
        stage = "gather or server"
        uploads = Uploads(np.arange(2), up, one, one, torch.zeros(2, 1), 0.1 * one, x[None])
        acc = a.gather.add(a.gather.zero(x), uploads, gather, x)
        info = Info(0, 2, 2, 2.0, 0.1, 1.0, 0.0, layout, np.ones(2, np.int64))
        u, gather = a.gather.close(acc, gather, info)
        a.server.update(u, server, x, info)
    except KeyError as error:
        has = "what the server sends" if stage == "rule" else "what the clients upload"
        raise ConfigError(
            f"the {stage} part needs {error.args[0]!r}, which is not among {has}; add the part that makes it"
        ) from error
    return {name: vec.shape[1] == 4 for name, vec in up.items()}
