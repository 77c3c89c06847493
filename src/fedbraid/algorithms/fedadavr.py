"""Server memory of every client's last update: FedVARP and ClusterFedVARP (Jhunjhunwala et al. 2022), MIFA
(Gu et al. 2021), FedAdaVR and FedAdaVR-Quant (Algorithm 2 of its paper).

The memory keeps a running sum of what is stored, so a step touches the cohort's rows and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedbraid.algorithms._build import builder
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import whole
from fedbraid.core.gather import Gather, Info, Mean, Tree, Uploads, check_weights, fold, native
from fedbraid.core.layout import Layout
from fedbraid.core.optim import SERVER, Optimiser, Precondition, TrustRatio, named
from fedbraid.core.rows import Rows
from fedbraid.core.rule import Vectors
from fedbraid.core.transform import Scale, pipeline
from fedbraid.engines.native.swap import swapper
from fedbraid.errors import ConfigError, unknown
from fedbraid.links import codecs
from fedbraid.links.codec import Codec
from fedbraid.schedule import Ints


@dataclass(frozen=True)
class Memory(Gather):
    """r = Σ_S p_i (g_i − y_i) + Σ_N p_j y_j, then y_i ← g_i for i ∈ S (eq. 4 to 7).

    `normalise` is "cohort" (SAGA: the first sum over S), "population" (both over N, the literal eq. 6:
    SAG) or "seen" (MIFA: the mean of what is stored). `per_rate` stores g_i = Δ_i/η and hands on η·r.
    """

    weights: str = "samples"
    codec: Codec | None = None
    normalise: str = "cohort"
    per_rate: bool = False
    rest: Mean = field(default_factory=Mean)

    def __post_init__(self) -> None:
        check_weights(self.weights)
        if self.normalise not in ("cohort", "population", "seen"):
            raise ConfigError(f"normalise={self.normalise!r} is not known; use 'cohort' or 'population'")

    def init(self, x: Tensor, layout: Layout) -> Tree:
        rows = Rows({"weight": torch.zeros(1), "y": torch.zeros_like(x)}, self.codec, layout)
        return {"rows": rows, "sum": torch.zeros_like(x, dtype=torch.float64), "seen": 0.0}

    def zero(self, x: Tensor) -> Tree:
        return {"weight": 0.0, "seen": 0.0, "rest": self.rest.zero(x)}

    def add(self, acc: Tree, up: Uploads, s: Tree, x: Tensor) -> Tree:
        if "moved" not in acc:  # the first block; the others may still be training
            exact = torch.zeros_like(s["sum"])  # products of float32 fit, so what went in comes out
            apart = None if self.codec is None else torch.zeros_like(exact)
            acc = {**acc, "moved": exact, "apart": apart, "before": s["sum"].float()}
            s["rows"].expect()
        p = up.weights(self.weights).squeeze(1).tolist()
        w = s["rows"].peek(up.clients, "weight")
        if not self._swap_natively(acc, up, s["rows"], p, w):
            acc = self._swap(acc, up, s["rows"], x)
        rest, others = acc["rest"], {name: v for name, v in up.vectors.items() if name != "delta"}
        if others:
            rest = self.rest.add(rest, Uploads(**{**vars(up), "vectors": others}), {}, x)
        weight, seen = sum(p, acc["weight"]), sum(p, acc["seen"]) - sum(w)
        return {**acc, "weight": weight, "seen": seen, "rest": rest}

    def _swap_natively(self, acc: Tree, up: Uploads, rows: Rows, p: list[float], w: list[float]) -> bool:
        """The same as `_swap` in one pass, where it is worth it and everybody comes as stored; whether it did."""
        known = all(old in (0, new) for old, new in zip(w, p))  # 0 before the first visit
        if not known or up.staleness.any() or not native(acc["before"]) or rows.layout is None:
            return False
        swap = swapper(self.codec, rows.layout)
        rate = up.lr.squeeze(1).tolist() if self.per_rate else [1.0] * len(p)
        return swap is not None and swap(
            rows, up.clients, acc["moved"], acc["apart"], up.vectors["delta"], rate, p, w
        )

    def _swap(self, acc: Tree, up: Uploads, rows: Rows, x: Tensor) -> Tree:
        """Put g_i in the place of y_i; Σ p_i Q(g_i) − w_i y_i is by how much the sum moves."""
        p = up.weights(self.weights)
        aged = p * self.rest.staleness(up.staleness)
        g = up.vectors["delta"] / up.lr.to(x) if self.per_rate else up.vectors["delta"]
        old = {k: v.to(x.device) for k, v in rows.get(up.clients).items()}
        y, w = old["y"], old["weight"]
        rows.put(up.clients, {"weight": p, "y": g})
        stored = g if self.codec is None else rows.get(up.clients)["y"].to(x.device)
        moved = fold(acc["moved"], (p, stored), (-w, y))
        # What of Σ s(τ_i) p_i (g_i − y_i) did not move it: nothing, where weights, ages and g_i are as stored.
        apart = torch.zeros_like(moved) if acc["apart"] is None else acc["apart"]
        terms = [(aged - p, g), ((w - aged).where(w > 0, 0.0), y)]
        terms += [] if stored is g else [(p, g - stored)]
        return {**acc, "moved": moved, "apart": fold(apart, *terms)}

    def close(self, acc: Tree, s: Tree, info: Info) -> tuple[Vectors, Tree]:
        total = info.samples if self.weights == "samples" else float(info.N)
        fresh = (acc["moved"] if acc["apart"] is None else acc["apart"].add_(acc["moved"])).float()
        after, seen = acc["moved"].add_(s["sum"]), s["seen"] + acc["seen"]
        lr = info.lr if self.per_rate else 1.0
        if self.normalise == "seen":
            delta = (after * (lr / seen)).float()
        else:
            over = acc["weight"] if self.normalise == "cohort" else total
            delta = fresh.mul_(lr / over).add_(acc["before"], alpha=lr / total)  # eq. 6 to 8
        others, _ = self.rest.close(acc["rest"], {}, info)
        return {**others, "delta": delta}, {"rows": s["rows"], "sum": after, "seen": seen}

    def leave(self, s: Tree, client: int) -> Tree:
        """A client goes for good: its row and its share of the sum go with it."""
        row = s["rows"].get([client])
        w, y = float(row["weight"]), row["y"][0].to(s["sum"].device).double()
        s["rows"].drop(client)
        return {"rows": s["rows"], "sum": s["sum"] - w * y, "seen": s["seen"] - w}


@dataclass(frozen=True)
class ClusterMemory(Gather):
    """As FedVARP with one y per cluster: y_c ← mean of the cohort's Δ_i in c, kept where none took part.

    Client i belongs to cluster `i mod clusters`, or to `clusters[i]`.
    """

    clusters: int | tuple[int, ...]
    weights: str = "samples"
    rest: Mean = field(default_factory=Mean)

    def __post_init__(self) -> None:
        check_weights(self.weights)
        if isinstance(self.clusters, int):
            whole("clusters", self.clusters)
        elif min(self.clusters, default=-1) < 0:
            raise ConfigError("clusters must name a cluster number >= 0 for every client")

    def of(self, clients: Ints) -> Ints:
        if isinstance(self.clusters, int):
            return clients % np.int64(self.clusters)
        if len(clients) and clients.max() >= len(self.clusters):
            raise ConfigError(f"client {clients.max()} has no cluster; {len(self.clusters)} were given")
        return np.array(self.clusters, np.int64)[clients]

    def init(self, x: Tensor, layout: Layout) -> Tree:
        count = self.clusters if isinstance(self.clusters, int) else max(self.clusters) + 1
        return {
            "y": torch.zeros(count, len(x), device=x.device),
            "sum": torch.zeros_like(x, dtype=torch.float64),
            "shares": None,
        }

    def zero(self, x: Tensor) -> Tree:
        return {"fresh": torch.zeros_like(x), "weight": 0.0, "new": {}, "rest": self.rest.zero(x)}

    def add(self, acc: Tree, up: Uploads, s: Tree, x: Tensor) -> Tree:
        mine = self.of(up.clients)
        p, delta = up.weights(self.weights), up.vectors["delta"]
        aged = p * self.rest.staleness(up.staleness)
        new = dict(acc["new"])
        for i, c in enumerate(mine.tolist()):
            total, count = new.get(c, (0.0, 0))
            new[c] = (total + delta[i], count + 1)
        others = {name: v for name, v in up.vectors.items() if name != "delta"}
        return {
            "fresh": fold(acc["fresh"], (aged, delta - s["y"][torch.from_numpy(mine)])),
            "weight": acc["weight"] + float(p.sum()),
            "new": new,
            "rest": self.rest.add(acc["rest"], Uploads(**{**vars(up), "vectors": others}), {}, x),
        }

    def close(self, acc: Tree, s: Tree, info: Info) -> tuple[Vectors, Tree]:
        share = s["shares"]
        if share is None:
            share = self._shares(info).to(acc["fresh"].device)
        r = acc["fresh"] / acc["weight"] + s["sum"].to(acc["fresh"].dtype)
        y, total = s["y"].clone(), s["sum"].clone()
        for c, (v, count) in acc["new"].items():
            mean = v / count
            total += share[c] * (mean - y[c])
            y[c] = mean
        others, _ = self.rest.close(acc["rest"], {}, info)
        return {**others, "delta": r}, {"y": y, "sum": total, "shares": share}

    def _shares(self, info: Info) -> Tensor:
        """Each cluster's share of all clients' weight."""
        n = info.sizes if self.weights == "samples" else np.ones(info.N)
        count = self.clusters if isinstance(self.clusters, int) else max(self.clusters) + 1
        totals = np.bincount(self.of(np.arange(info.N)), weights=n, minlength=count)
        return torch.from_numpy(totals / totals.sum())


@builder
def fedvarp(lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """FedVARP: SAGA over clients, with plain averaging steps."""
    return Algorithm(gather=Memory(weights), server=pipeline(Scale(lr)))


@builder
def mifa(lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """MIFA: the mean of every client's last update, over all clients seen so far."""
    return Algorithm(gather=Memory(weights, normalise="seen"), server=pipeline(Scale(lr)))


@builder
def cluster_fedvarp(clusters: int | Sequence[int], lr: float = 1.0, weights: str = "samples") -> Algorithm:
    """ClusterFedVARP: one remembered update per cluster of clients."""
    which = clusters if isinstance(clusters, int) else tuple(int(c) for c in clusters)
    return Algorithm(gather=ClusterMemory(which, weights), server=pipeline(Scale(lr)))


MEMORIES = {None: None, "fp16": codecs.fp16, "int8": codecs.int8, "int4": codecs.int4}


@builder
def fedadavr(
    optimizer: str = "adam", lr: float = 0.01, memory: str | None = None, normalise: str = "cohort",
    beta1: float | None = None, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0,
    layerwise: bool = True, weights: str = "samples",
) -> Algorithm:  # fmt: skip
    """FedAdaVR: remember every client's last update, correct with it, step adaptively; memory="int4" quantises it."""
    if memory not in MEMORIES:
        raise unknown("memory", str(memory), [m for m in MEMORIES if m])
    make = MEMORIES[memory]
    gather = Memory(weights, make() if make else None, normalise, per_rate=True)
    kind = named(optimizer, SERVER)
    if kind is Optimiser:
        optimiser = Optimiser()
    else:
        first = (0.0 if optimizer == "adagrad" else 0.9) if beta1 is None else beta1
        optimiser = kind(first, beta2, eps)  # type: ignore[call-arg]
    trust = [TrustRatio(layerwise)] if optimizer == "lamb" else []
    return Algorithm(gather=gather, server=pipeline(Precondition(optimiser, weight_decay), *trust, Scale(lr)))
