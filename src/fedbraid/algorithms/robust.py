"""Robust gathers: averages that bear a number of hostile clients, over updates or over memory's differences.

With memory the rule acts on Δ_i − y_i and on nothing else: a hostile row would enter the mean of the stored rows whole, so the
server's mean follows what the rule let through (Byz-VR-MARINA, Gorbunov et al. 2023, has the theory).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbraid.algorithms._build import builder
from fedbraid.algorithms.attack import Colluding
from fedbraid.core import rng
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.context import ServerContext, Staleness, Uploads, Vectors
from fedbraid.core.gather import Gather, Metrics
from fedbraid.core.layout import Layout
from fedbraid.core.robust_rules import Decision, Judged, RobustRule, combined, products, total
from fedbraid.core.traits import GatherTraits, MemoryStep, UpdateMemory
from fedbraid.core.transform import Transform
from fedbraid.core.update_table import UpdateTable
from fedbraid.core.vector_spec import Upload
from fedbraid.errors import ConfigError, Diverged
from fedbraid.privacy.parts import uniform

FAR = 2.0  # times the median client's distance from the result, beyond which a client is suspected


@dataclass(frozen=True)
class RobustState:
    """The rule's last average of each upload, where it clips around that, and the table of last updates."""

    base: Vectors
    table: UpdateTable | None = None


@dataclass
class Cohort:
    """The uploads of one server step, and how many clients the table of last updates has seen."""

    blocks: list[Uploads]
    seen: float = 0.0


@dataclass(frozen=True)
class Robust(Gather):
    """A robust rule in the place of the mean; what clients upload is judged together, and every client counts alike.

    With `memory`: s̃ = rule over S of (Δ_i − y_i); G = s̃ + ȳ; ȳ ← ȳ + (|S|/N)·s̃; y_i ← Δ_i as it was received. A client
    that uploads twice in a buffer counts once, with its last upload; what accumulates is added up. What server parts make of
    an upload is made of what the rule makes of it.
    """

    rule: RobustRule
    staleness: Staleness = field(default_factory=Staleness)
    memory: UpdateMemory | None = None
    uploads: tuple[str, ...] = field(default=("delta",), repr=False, compare=False)
    server: Transform = field(default_factory=Transform, repr=False, compare=False)

    def traits(self) -> GatherTraits:
        return GatherTraits(counts_clients_once=True, drops_nonfinite=True, check_cohort=self.rule.check)

    def init(self, x: Tensor, layout: Layout) -> RobustState:
        table = None if self.memory is None else UpdateTable.open(x, self.memory.codec, layout)
        return RobustState({}, table)

    def zero(self, x: Tensor) -> Cohort:
        return Cohort([])

    def add(self, acc: Cohort, up: Uploads, s: RobustState, x: Tensor) -> Cohort:
        if s.table is not None:
            up, new = self._differences(up, s.table)
            acc.seen += new
        acc.blocks.append(self._discounted(up))
        return acc

    def _discounted(self, up: Uploads) -> Uploads:
        """What a mean would sum."""
        age = self.staleness(up.staleness)
        vectors = {n: v * age if up.declared[n].discounts_staleness else v for n, v in up.vectors.items()}
        return up.having(vectors)

    def _differences(self, up: Uploads, table: UpdateTable) -> tuple[Uploads, int]:
        """(Δ_i − y_i in the place of Δ_i, how many clients are new), y_i ← Δ_i; `stored` is what that changed in the table."""
        assert self.memory is not None
        g, rows = up.vectors["delta"], table.rows
        g = g / up.lr.to(g) if self.memory.formula.per_rate else g
        old = {name: v.to(g.device) for name, v in rows.get(up.clients).items()}
        stored = torch.where(g.isfinite().all(1, keepdim=True), g, old["y"])
        rows.put(up.clients, {"weight": torch.ones_like(old["weight"]), "y": stored})
        vectors = {**up.vectors, "delta": g - old["y"]}
        if self._stores_otherwise:
            vectors["stored"] = (stored if rows.codec is None else rows.get(up.clients)["y"].to(g)) - old["y"]
        declared = {
            **up.declared, "delta": replace(up.declared["delta"], accumulates=True), "stored": Upload("stored", accumulates=True)
        }  # fmt: skip
        return up.having(vectors, declared), int((old["weight"] == 0).sum())

    @property
    def _stores_otherwise(self) -> bool:
        """Whether the table changes by other vectors than those that the rule judges."""
        return self.memory is not None and (self.memory.codec is not None or self.staleness != Staleness())

    def close(self, acc: Cohort, s: RobustState, ctx: ServerContext) -> tuple[Vectors, RobustState, Metrics]:
        ids = np.concatenate([block.clients for block in acc.blocks])
        clients = np.unique(ids)
        vectors = _by_client(acc.blocks, ids, clients)
        squares = {name: products(vectors[name]) for name in self.uploads}
        finite = torch.stack([v.isfinite() for v in squares.values()]).all(0)
        lost = clients[~finite.numpy(force=True)].tolist()
        if len(lost) == len(clients):
            raise Diverged(
                f"no upload of step {ctx.t + 1} is finite; lower the learning rate, or clip gradients with clip=. The last"
                " committed step is intact"
            )
        if lost:
            vectors = {name: v[finite] for name, v in vectors.items()}
            squares = {name: v[finite] for name, v in squares.items()}
        judged_clients = clients[finite.numpy(force=True)]
        declared = acc.blocks[0].declared
        units = _units({name: squares[name].sqrt() for name in self.uploads}, declared)
        judged = [Judged(vectors[n], squares[n], units[n], s.base.get(n)) for n in self.uploads]
        order = torch.from_numpy(np.argsort(rng.bits(ctx.seed, "bucketing", ctx.t, judged_clients))).to(
            finite.device
        )
        decision = self.rule.decide(judged, order, len(lost))
        u = {name: decision.apply(v) for name, v in vectors.items()}
        if decision.rest is not None and bool(decision.rest.any()):
            u = self._with_rest(u, decision.rest, acc.blocks, ids, clients, finite, s.base)
        metrics = self._metrics(decision, judged, u, judged_clients, lost)
        base = {name: u[name] for name in self.uploads} if self.rule.has_base else {}
        if s.table is None:
            return u, RobustState(base), metrics
        delta, table = self._remembered(u, s.table, acc.seen, ctx)
        return {**u, "delta": delta}, RobustState(base, table), metrics

    def _remembered(
        self, u: Vectors, table: UpdateTable, new: float, ctx: ServerContext
    ) -> tuple[Tensor, UpdateTable]:
        """(G, the table whose sum has followed what the rule let through)."""
        assert self.memory is not None
        before, seen = table.total.float(), table.seen + new
        total = torch.add(
            table.total, u.pop("stored", u["delta"]).double(), alpha=ctx.cohort
        )  # ȳ ← ȳ + (|S|/N)·s̃
        step = MemoryStep(u["delta"], ctx.cohort, before, total, seen, ctx.N)
        return self.memory.formula.update(step, ctx.lr), UpdateTable(table.rows, total, seen)

    def _with_rest(
        self, u: Vectors, rest: Tensor, blocks: list[Uploads], ids: Any, clients: Any, finite: Tensor, base: Vectors
    ) -> Vectors:  # fmt: skip
        """With what was cut off replaced by the base, and what server parts make of uploads by what they make of the base."""
        zero = {name: base.get(name, torch.zeros_like(u[name])) for name in self.uploads}
        bases = {**zero, "stored": zero["delta"]} if "stored" in u else zero
        out = {**u, **{name: u[name] + float(rest.sum()) * b for name, b in bases.items()}}
        if derived := u.keys() - bases.keys():
            made = [
                b.having({**b.vectors, **{n: z.expand(len(b.clients), -1) for n, z in zero.items()}})
                for b in blocks
            ]
            accounts = [{n: v for n, v in self.server.account(b).items() if n in derived} for b in made]
            made = [self._discounted(b.having(account)) for b, account in zip(made, accounts)]
            for name, v in _by_client(made, ids, clients).items():
                out[name] = u[name] + combined(rest[None], v[finite])[0]
        return out

    def _metrics(
        self, decision: Decision, judged: Sequence[Judged], u: Vectors, clients: Any, lost: list[int]
    ) -> Metrics:
        """Whom the rule left out, who was far from its result, and each client's norm and cosine with that."""
        norm = total([j.own() / j.scale**2 for j in judged]).sqrt()
        own = [(u[name][None], j) for name, j in zip(self.uploads, judged)]
        dot = total([products(j.v, mean)[:, 0] / j.scale**2 for mean, j in own])
        size = total([products(mean) / j.scale**2 for mean, j in own])
        away = (norm**2 - 2 * dot + size).clamp_min(0).sqrt()
        cosine = dot / (norm * size.sqrt()).clamp_min(1e-30)
        far = clients[(away > FAR * away.median()).numpy(force=True)].tolist()
        metrics: Metrics = {
            "suspected": sorted(far + lost),
            "judged": {"clients": clients.tolist(), "norm": _short(norm), "cosine": _short(cosine)},
        }
        if self.rule.selects and decision.weights is not None:
            metrics["rejected"] = sorted(clients[(decision.weights == 0).numpy(force=True)].tolist() + lost)
        elif lost:
            metrics["rejected"] = lost
        return metrics

    def remove_client(self, s: RobustState, client: int) -> RobustState:
        """Its row goes, and of the sum an average share: what the rule let through of it is in no row."""
        if s.table is None or not s.table.rows.peek([client], "weight")[0]:
            return s
        s.table.rows.drop(client)
        seen = s.table.seen - 1
        return replace(s, table=UpdateTable(s.table.rows, s.table.total * (seen / (seen + 1)), seen))


def _by_client(blocks: list[Uploads], ids: Any, clients: Any) -> Vectors:
    """Each named vector of the cohort's clients in the order of their numbers, `[m, ·]`."""
    places = [np.flatnonzero(ids == client).tolist() for client in clients] if len(ids) > len(clients) else [
        [int(at)] for at in np.argsort(ids)
    ]  # fmt: skip
    out = {}
    for name in blocks[0].vectors:
        rows = [row for b in blocks for row in b.vectors[name].expand(len(b.clients), -1)]
        add = blocks[0].declared[name].accumulates
        out[name] = torch.stack(
            [sum((rows[k] for k in at[1:]), rows[at[0]]) if add else rows[at[-1]] for at in places]
        )
    return out


def _units(norms: Vectors, declared: dict[str, Upload]) -> dict[str, float]:
    """By what each upload is divided to be judged: its declared scale, or its median norm beside that of the first declared.

    Where SCAFFOLD's estimates are a hundred times longer than its updates, both count alike.
    """
    medians = {name: float(v.median()) for name, v in norms.items()}
    first = next((n for n in norms if declared[n].clip_scale is not None), next(iter(norms)))
    known = {n: declared[n].clip_scale if n != first else declared[n].clip_scale or 1.0 for n in norms}
    unit = medians[first] / (known[first] or 1.0)
    return {n: known[n] or (medians[n] / unit if unit and medians[n] else 1.0) for n in norms}


def _short(values: Tensor) -> list[float]:
    return [float(f"{v:.4g}") for v in values.tolist()]


@builder
def robust(
    a: Algorithm, rule: str, before: str | None = None, f: int | None = None, q: int | None = None, tau: float | None = None,
    norm: float | None = None, quantile: float | None = None, s: int | None = None,
) -> Algorithm:  # fmt: skip
    """Any algorithm that averages, with a rule that bears hostile clients in the place of the mean.

    x ← x − rule(Δ_1, …, Δ_m);  with memory  s̃ = rule(Δ_i − y_i), G = s̃ + ȳ, ȳ ← ȳ + (|S|/N) s̃

    `rule` is "median", "trimmed_mean" (f), "krum" (f), "multi_krum" (f, q), "geometric_median", "centred_clip" (tau) or
    "norm_bound" (norm or quantile); `before` is "mixing" (f) or "bucketing" (s), which average neighbors or random groups
    first. f is how many clients of a cohort may be hostile. All clients count alike.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20)
    >>> hostile = fb.attack(fb.fedavg(), "scale", clients=[3, 4], factor=-10.0)
    >>> robust = fb.robust(hostile, "multi_krum", f=2)
    >>> result = fb.simulate(task, robust, fb.Work(lr=0.1, batch=10), fb.rounds(3, clients=20))
    >>> result.history[0]["rejected"]
    [3, 4]
    """
    who = a.name.split("(")[0] or "this algorithm"
    how = RobustRule(rule, f, q, tau, norm, quantile, before, s)
    if isinstance(a.gather, Colluding):
        inner = robust_gather(who, replace(a, gather=a.gather.inner), how)
        return replace(
            a, gather=replace(a.gather, inner=inner), rule=uniform(a.rule), server=uniform(a.server), name=""
        )
    server = uniform(a.server)
    return replace(a, rule=uniform(a.rule), gather=robust_gather(who, a, how), server=server, name="")


def robust_gather(who: str, a: Algorithm, how: RobustRule) -> Robust:
    """The gather of an algorithm with this rule in it."""
    traits, staleness = a.gather.traits(), getattr(a.gather, "staleness", Staleness())
    if not traits.is_weighted_mean and traits.memory is None:
        raise ConfigError(
            f"{who} gathers by {type(a.gather).__name__}, which is no mean of what the cohort sent, so that no robust rule can"
            " take its place; use an algorithm that averages, such as fedavg, or fedvarp or fedadavr"
        )
    if a.server.traits().averages_client_memory:
        raise ConfigError(
            f"{who} averages what all clients remember, which a hostile one enters whole; use fedvarp or fedadavr, whose rule"
            " acts on differences"
        )
    server = uniform(a.server)
    if traits.memory is not None and how.name in ("centred_clip", "norm_bound") and server.accounts():
        raise ConfigError(
            f"{how.name} cuts differences from memory, of which {who}'s server parts cannot account; use another rule, such as"
            " 'median'"
        )
    memory = () if traits.memory is None else ("delta",)
    return Robust(how, staleness, traits.memory, tuple(dict.fromkeys((*memory, *a.uploads))), server)
