"""A user's local training loop as a rule."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedbraid.core.rule import Rule
from fedbraid.core.traits import LocalLoop, RuleTraits
from fedbraid.errors import ConfigError


@dataclass(frozen=True)
class CustomLoop(Rule):
    """A user's local loop; it prints by its name."""

    name: str
    fn: LocalLoop = field(compare=False)

    def __repr__(self) -> str:
        return f"local({self.name!r})"

    def traits(self) -> RuleTraits:
        return RuleTraits(local_loop=self.fn)


def custom_local_loop(fn: LocalLoop) -> Rule:
    """A rule from a function (module, batches, ctx) that trains a client's module in place and returns its mean loss.

    `batches` yields the (inputs, targets) of this local training each time it is iterated; `ctx` is the context that every
    rule gets, with one client.
    It runs on the loop backend, in every engine and schedule. What it draws from torch is
    seeded by (seed, version, client).

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
