"""An interpreter of the algorithms' definitions in plain NumPy, float64, one client after the other.

It is written by part, from the equations alone: nothing of the package's mathematics is imported. Any
rule runs with any gather, optimizer, adjuster, link and schedule. What a codec makes of a vector is asked
of `Setting.codec`, so that a test can let it follow a codec that rounds or draws.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Vec = np.ndarray
Named = dict[str, Any]


# What a run is made of ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One part by its name, and its numbers."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, key: str) -> Any:
        return dict(self.options)[key]

    def get(self, key: str, default: Any = None) -> Any:
        return dict(self.options).get(key, default)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.options)})"


def part(name: str, **options: Any) -> Part:
    return Part(name, tuple(options.items()))


SGD, MEAN = part("sgd"), part("mean")


@dataclass(frozen=True)
class Spec:
    """An algorithm as a list of parts."""

    rule: Part = SGD
    prox: float = 0.0  # FedProx's μ before it
    gather: Part = MEAN
    weights: str = "samples"
    staleness: str = "constant"
    optimizer: Part = SGD
    lr: float = 1.0  # the server's
    decay: float = 0.0  # the server's weight decay
    adjust: tuple[Part, ...] = ()  # shift, and one of feddyn, adabest
    attack: Part | None = None  # its kind and number; Setting.hostile says whose
    up: Part | None = None  # (codec, of_weights, feedback, share)
    down: Part | None = None  # (codec, hidden)


@dataclass(frozen=True)
class Tick:
    """One server step: who hands in, the version each trained from, how many clients are known."""

    clients: tuple[int, ...]
    versions: tuple[int, ...]
    N: int


@dataclass
class Setting:
    """Everything about a run that is no part of the algorithm."""

    x0: Vec
    slots: list[tuple[int, int, int]]  # (start, end, dimensions) of every layer
    sizes: Vec  # n_i
    grad: Callable[[Vec, Any], Vec]  # (y, rows) -> the mean gradient over these rows
    batches: Callable[[int, int], list[Any]]  # (client, version) -> the rows of each local step
    everything: Callable[[int], Any]  # client -> all its rows
    codec: Callable[[str, str, Vec], Vec]  # (wire or store, codec, vector) -> what is decoded
    inferior: Callable[[int], bool]  # whether a mixed link quantises this client
    ticks: list[Tick]
    lr: float = 0.1
    lr_decay: float = 1.0
    momentum: float = 0.0
    decay: float = 0.0  # λ of the local objective
    hostile: Callable[[int], bool] = lambda client: False
    noise: Callable[[str, int, int, int], Vec] | None = None  # (name, version, client, width) -> N(0, 1)

    def rate(self, version: int) -> float:
        return self.lr * self.lr_decay**version


def effective(K: int, rho: float) -> float:
    """a: how many plain steps K steps with momentum ρ are worth."""
    return (K - rho * (1 - rho**K) / (1 - rho)) / (1 - rho)


# The client -----------------------------------------------------------------------------------------


@dataclass
class Visit:
    """One client's visit: what it was sent, what it remembers, and what the server received of it."""

    client: int
    version: int
    n: float
    K: int
    a: float
    lr: float
    sent: Named  # as decoded
    memory: Named
    full: Callable[[], Vec]  # the gradient of its whole objective at x
    tau: int = 0
    got: Named = field(default_factory=dict)

    @property
    def x(self) -> Vec:
        return self.sent["x"]


class Rule:
    """FedAvg: v = g."""

    sizes: Vec  # n_i of every client

    def __init__(self, options: Part) -> None:
        self.o = options

    def first(self, d: int) -> Named:
        """What a client remembers before its first visit."""
        return {}

    def begin(self, at: Visit) -> Named:
        return {}

    def direction(self, g: Vec, y: Vec, s: Named, at: Visit) -> Vec:
        return g

    def uploads(self, y: Vec, s: Named, at: Visit) -> Named:
        return {"delta": at.x - y}

    def remember(self, at: Visit) -> Named:
        """Its new memory, from what was received."""
        return {}

    # The server's half of a rule.

    def state(self, d: int) -> Named:
        return {}

    def send(self, s: Named, x: Vec, N: int) -> Named:
        """What goes down beside x."""
        return {}

    def read(self, at: Visit) -> Vec:
        """Client i's update, as the gather takes it."""
        return at.got["delta"]

    def absorb(self, s: Named, c: Cohort) -> Named:
        """The server's half of the state, after the cohort."""
        return s

    def rescale(self, G: Vec, c: Cohort) -> Vec:
        return G

    # What robust gathers ask.

    accumulates = ("dc",)  # uploads that add up, where a client comes twice

    def judged(self, at: Visit) -> dict[str, tuple[Vec, float | None]]:
        """By what a client is judged, each with its unit where that is declared."""
        return {name: (v, 1.0 if name == "delta" else None) for name, v in at.got.items()}


class FedProx(Rule):
    def direction(self, g, y, s, at):
        return g + self.o["mu"] * (y - at.x)


class Scaffold(Rule):
    def first(self, d):
        return {"c_i": np.zeros(d)}

    def direction(self, g, y, s, at):
        return g - at.memory["c_i"] + at.sent["c"]

    def uploads(self, y, s, at):
        return {"delta": at.x - y, "dc": (at.x - y) / (at.a * at.lr) - at.sent["c"]}

    def remember(self, at):
        return {"c_i": at.memory["c_i"] + at.got["dc"]}

    def state(self, d):
        return {"C": np.zeros(d)}

    def send(self, s, x, N):
        return {"c": s["C"] / N}

    def absorb(self, s, c):
        return {"C": s["C"] + c.total(lambda v: v.got["dc"])}


class ScaffoldM(Rule):
    def first(self, d):
        return {"h_i": np.zeros(d)}

    def direction(self, g, y, s, at):
        return g - at.memory["h_i"] + at.sent["h"]

    def remember(self, at):
        return {"h_i": at.memory["h_i"] - at.sent["h"] + at.got["delta"] / (at.a * at.lr)}

    def state(self, d):
        return {"H": np.zeros(d)}

    def send(self, s, x, N):
        return {"h": s["H"] / N}

    def absorb(self, s, c):
        gone = c.total(lambda v: v.sent["h"])
        moved = c.total(lambda v: v.got["delta"] / v.lr, c.p)
        return {"H": s["H"] - gone + moved / c.a}


class Scallion(Rule):
    """One vector up: δ_i = Q(α((x − y_K)/(aη) − c))."""

    accumulates = ("delta",)

    def first(self, d):
        return {"c_i": np.zeros(d)}

    def direction(self, g, y, s, at):
        return g - at.memory["c_i"] + at.sent["c"]

    def uploads(self, y, s, at):
        return {"delta": self.o["alpha"] * ((at.x - y) / (at.a * at.lr) - at.sent["c"])}

    def remember(self, at):
        return {"c_i": at.memory["c_i"] + at.got["delta"]}

    def state(self, d):
        return {"C": np.zeros(d)}

    def send(self, s, x, N):
        return {"c": s["C"] / N}

    def read(self, at):
        return at.a * at.lr * (at.sent["c"] + at.got["delta"])

    def absorb(self, s, c):
        return {"C": s["C"] + c.total(lambda v: v.got["delta"])}


class FedDyn(Rule):
    def first(self, d):
        return {"h_i": np.zeros(d)}

    def direction(self, g, y, s, at):
        if self.o.get("progressive"):  # h_i is the sum of moves, without μ
            return g - self.o["mu"] * at.sent["n_mean"] / at.n * (at.memory["h_i"] + at.x - y)
        return g - at.memory["h_i"] - self.o["mu"] * (at.x - y)

    def remember(self, at):
        mu = 1.0 if self.o.get("progressive") else self.o["mu"]
        return {"h_i": at.memory["h_i"] + mu * at.got["delta"]}

    def send(self, s, x, N):
        return {"n_mean": self.sizes[:N].sum() / N} if self.o.get("progressive") else {}


class AdaBest(Rule):
    def first(self, d):
        return {"h_i": np.zeros(d), "last": None}

    def direction(self, g, y, s, at):
        if self.o.get("progressive"):  # the stored h_i is without μ, which is scaled as it is used
            return g - self.o["mu"] * at.sent["n_mean"] / at.n * at.memory["h_i"]
        return g - at.memory["h_i"]

    def remember(self, at):
        last = at.memory["last"]
        since = 1 if last is None else max(1, at.version - last)
        mu = 1.0 if self.o.get("progressive") else self.o["mu"]
        return {"h_i": at.memory["h_i"] / since + mu * at.got["delta"], "last": at.version}

    def state(self, d):
        return {"samples": 0.0, "visits": 0}

    def send(self, s, x, N):
        if not self.o.get("progressive"):
            return {}
        return {"n_mean": s["samples"] / max(1, s["visits"])}

    def absorb(self, s, c):
        samples = s["samples"] + float(c.total(lambda v: np.array([v.n]), each=False)[0])
        return {"samples": samples, "visits": s["visits"] + c.count}


class Statistics(Rule):
    """What FedGBO, Mimelite and MFL share: an optimizer's statistics on the server, sent to clients."""

    def state(self, d):
        m, v = {"m": np.zeros(d)}, {"v": np.full(d, self.o.get("v0", 1.0))}
        return {"sgdm": m, "rmsprop": v, "adam": m | v}[self.o["optimizer"]]

    def send(self, s, x, N):
        return dict(s)

    def use(self, g, s):
        """−U(g, s)/η."""
        o, kind = self.o, self.o["optimizer"]
        if kind == "sgdm":
            return o["beta"] * s["m"] + (1 - o["beta"]) * g
        if kind == "rmsprop":
            return g / (np.sqrt(s["v"]) + o["eps"])
        return (o["beta1"] * s["m"] + (1 - o["beta1"]) * g) / (np.sqrt(s["v"]) + o["eps"])

    def track(self, g, s):
        """T(g, s)."""
        o, kind = self.o, self.o["optimizer"]
        if kind == "sgdm":
            return {"m": o["beta"] * s["m"] + (1 - o["beta"]) * g}
        if kind == "rmsprop":
            return {"v": o["beta"] * s["v"] + (1 - o["beta"]) * g**2}
        return {
            "m": o["beta1"] * s["m"] + (1 - o["beta1"]) * g,
            "v": o["beta2"] * s["v"] + (1 - o["beta2"]) * g**2,
        }

    def invert(self, move, s):
        """I, of move = (x_t − x_{t+1})/(ηa)."""
        o, kind = self.o, self.o["optimizer"]
        if kind == "sgdm":
            return (move - o["beta"] * s["m"]) / (1 - o["beta"])
        if kind == "rmsprop":
            return move * (np.sqrt(s["v"]) + o["eps"])
        return (move * (np.sqrt(s["v"]) + o["eps"]) - o["beta1"] * s["m"]) / (1 - o["beta1"])


class FedGBO(Statistics):
    def direction(self, g, y, s, at):
        return self.use(g, at.sent)

    def absorb(self, s, c):
        at_0 = c.average(lambda v: self.invert(0 * v.got["delta"], v.sent))
        moved = c.average(lambda v: self.invert(v.got["delta"] / v.lr, v.sent))
        return self.track((moved - at_0) / c.a + at_0, s)  # I is affine in the move


class Mimelite(Statistics):
    def direction(self, g, y, s, at):
        return self.use(g, at.sent)

    def uploads(self, y, s, at):
        return {"delta": at.x - y, "grad": at.full()}

    def absorb(self, s, c):
        return self.track(c.mean("grad"), s)


class MFL(Statistics):
    def begin(self, at):
        return {k: at.sent[k] for k in self.state(len(at.x))}

    def direction(self, g, y, s, at):
        s.update(self.track(g, s))
        kind, eps = self.o["optimizer"], self.o.get("eps")
        if kind == "sgdm":
            return s["m"]
        return (g if kind == "rmsprop" else s["m"]) / (np.sqrt(s["v"]) + eps)

    def uploads(self, y, s, at):
        return {"delta": at.x - y, **s}

    def absorb(self, s, c):
        return {k: c.mean(k) for k in s}


class FedNova(Rule):
    def read(self, at):
        return at.got["delta"] / (at.lr * at.a)

    def judged(self, at):
        return {"delta": (self.read(at), 1.0), "a": (np.array([at.a]), None)}

    def rescale(self, G, c):
        return c.lr * float(c.average(lambda v: np.array([v.a]))[0]) * G


class GHBM(Rule):
    """g + (β/(aη))·M, M = (x_{t−τ} − x_t)/τ and zero while t < τ."""

    def direction(self, g, y, s, at):
        return g + self.o["beta"] / (at.a * at.lr) * at.sent["M"]

    def state(self, d):
        return {"past": []}

    def send(self, s, x, N):
        s["past"].append(x)
        tau = self.o["tau"]
        return {"M": (s["past"][-1 - tau] - x) / tau if len(s["past"]) > tau else np.zeros_like(x)}


RULES: dict[str, type[Rule]] = {
    "sgd": Rule, "fedprox": FedProx, "scaffold": Scaffold, "scaffold_m": ScaffoldM, "scallion": Scallion,
    "feddyn": FedDyn, "adabest": AdaBest, "fedgbo": FedGBO, "mimelite": Mimelite, "mfl": MFL, "fednova": FedNova,
    "ghbm": GHBM,
}  # fmt: skip


# The cohort -----------------------------------------------------------------------------------------

AGE: dict[str, Callable[[float], float]] = {
    "constant": lambda tau: 1.0,
    "sqrt": lambda tau: 1 / math.sqrt(1 + tau),
    "polynomial": lambda tau: (1 + tau) ** -0.5,
    "hinge": lambda tau: 1 / (1 + 0.5 * max(0.0, tau - 4)),
}


@dataclass
class Cohort:
    """The visits of one server step, in order of arrival."""

    visits: list[Visit]
    t: int  # the version that the step starts from
    N: int
    x: Vec  # the server's model, today
    all_sizes: Vec  # n_j of every known client
    kind: str
    staleness: str
    rule: Rule | None = None

    def weight(self, n: float) -> float:
        return n if self.kind == "samples" else 1.0

    @property
    def raw(self) -> Vec:
        return np.array([self.weight(v.n) for v in self.visits])

    @property
    def p(self) -> Vec:
        return self.raw / self.raw.sum()

    @property
    def population_weight(self) -> float:
        """Σ_N of the weights."""
        return float(sum(self.weight(n) for n in self.all_sizes))

    @property
    def age(self) -> Vec:
        return np.array([AGE[self.staleness](v.tau) for v in self.visits])

    @property
    def a(self) -> float:
        return float(self.p @ [v.a for v in self.visits])

    @property
    def lr(self) -> float:
        return float(self.p @ [v.lr for v in self.visits])

    robust: Callable[[Callable[[Visit], Vec], bool], Vec] | None = None  # what stands for a mean

    @property
    def count(self) -> int:
        """|S|: a robust gather counts a client once."""
        return len(self.visits) if self.robust is None else len({v.client for v in self.visits})

    def average(self, of: Callable[[Visit], Vec]) -> Vec:
        """Σ_S p_i f(i), whatever their age, or what a robust rule makes of them."""
        if self.robust is not None:
            return self.robust(of, False)
        return sum(p * of(v) for p, v in zip(self.p, self.visits))

    def total(self, of: Callable[[Visit], Vec], p: Vec | None = None, each: bool = True) -> Vec:
        """Σ_S f(i), or |S| Σ_S p_i f(i); of a client that comes twice, both with `each`."""
        if self.robust is not None:
            return self.count * self.robust(of, each)
        return len(self.visits) * self.average(of) if p is not None else sum(of(v) for v in self.visits)

    def mean(self, name: str) -> Vec:
        """The average upload of this name."""
        return self.average(lambda v: v.got[name])


# Gathers: from updates to G ---------------------------------------------------------------------------


class Mean:
    def __init__(self, options: Part, setting: Setting) -> None:
        self.o, self.setting = options, setting
        self.state: Named = {}

    def __call__(self, updates: list[Vec], c: Cohort) -> Vec:
        return sum(p * s * u for p, s, u in zip(c.p, c.age, updates))

    def cross(self, up: Uplink, at: Visit) -> Named:
        """What is received of a visit's uploads."""
        return up(at.got, at)


class SecureSum(Mean):
    """The mean from sums of whole numbers modulo 2^b: Σ n_i s_i q_i, n_i samples and s_i the age in steps of 1/256."""

    def __call__(self, updates, c):
        top = 2 ** (self.o["bits"] - 1) - 1
        step = self.o["range"] / top
        weights = [int(w) * round(256 * s) for w, s in zip(c.raw, c.age)]
        codes = [u / step for u in updates]
        if any(np.abs(q - np.round(q)).max() > 1e-3 for q in codes):  # what the server made of what was sent
            return sum(w * u for w, u in zip(weights, updates)) / (256 * c.raw.sum())
        b = self.o["bits"] + int(256 * sum(c.raw)).bit_length()
        total = sum(w * np.round(q).astype(int).astype(object) for w, q in zip(weights, codes)) % 2**b
        total = np.array([int(v) - 2**b if v >= 2 ** (b - 1) else int(v) for v in total], float)
        return step * total / (256 * c.raw.sum())


class Mixing(Mean):
    """FedAsync's own form: x ← (1 − s(τ)) x + s(τ) y_i, the mean of it over a buffer."""

    def __call__(self, updates, c):
        apart = [c.x - (v.x - u) for v, u in zip(c.visits, updates)]
        return super().__call__(apart, c)


class Memory(Mean):
    """FedVARP, FedAdaVR's memory and CA²FL: Σ_S p_i (Δ_i − y_i) + Σ_N p_j y_j, then y_i ← Δ_i."""

    def __call__(self, updates, c):
        y: dict[int, Vec] = self.state
        per_rate = self.o.get("per_rate", False)
        zero = np.zeros_like(updates[0])
        before = sum((c.weight(self.setting.sizes[j]) * v for j, v in y.items()), zero) / c.population_weight
        over = c.raw.sum() if self.o.get("normalise", "cohort") == "cohort" else c.population_weight
        fresh = zero
        for v, u, w, age in zip(c.visits, updates, c.raw, c.age):
            g = u / v.lr if per_rate else u
            fresh = fresh + age * w * (g - y.get(v.client, zero))
            y[v.client] = self.stored(g)
        return (c.lr if per_rate else 1.0) * (fresh / over + before)

    def cross(self, up, at):
        if self.o.get("held") != "client":
            return up(at.got, at)
        rate = at.lr if self.o.get("per_rate") else 1.0
        base = self.state.get(at.client, np.zeros_like(at.x))  # which client and server both know
        got = up({**at.got, "delta": at.got["delta"] / rate - base}, at)
        return {**got, "delta": rate * (base + got["delta"])}

    def stored(self, g: Vec) -> Vec:
        codec = self.o.get("codec")
        return g if codec is None else self.setting.codec("store", codec, g)


class Mifa(Memory):
    """MIFA and ACE: the mean of what is remembered of every client seen so far; ACED forgets what is of old versions."""

    def __call__(self, updates, c):
        for v, u in zip(c.visits, updates):
            self.state[v.client] = (u, c.t - v.tau)
        limit = self.o.get("limit")
        kept = {j: u for j, (u, t) in self.state.items() if limit is None or c.t - t <= limit}
        if not kept:
            return np.zeros_like(updates[0])
        weights = {j: c.weight(self.setting.sizes[j]) for j in kept}
        return sum(weights[j] * u for j, u in kept.items()) / sum(weights.values())


class Clusters(Mean):
    """As FedVARP with one y for a cluster, that of client i being i mod C."""

    def __call__(self, updates, c):
        C, zero = self.o["clusters"], np.zeros_like(updates[0])
        y = {k: self.state.get(k, zero) for k in range(C)}
        shares = np.array([c.weight(n) for n in c.all_sizes]) / c.population_weight
        G = sum((share * y[j % C] for j, share in enumerate(shares)), zero)
        for v, u, p, age in zip(c.visits, updates, c.p, c.age):
            G = G + age * p * (u - y[v.client % C])
        for k in range(C):
            mine = [u for v, u in zip(c.visits, updates) if v.client % C == k]
            if mine:
                self.state[k] = sum(mine) / len(mine)
        return G


class Robust(Mean):
    """A robust rule over the cohort's single vectors, those of a client judged together; with memory over Δ_i − y_i."""

    def __call__(self, updates, c):
        o, memory = self.o, self.o.get("memory", False)
        d, y = len(updates[0]), self.state.setdefault("y", {})
        ids = sorted({v.client for v in c.visits})
        changes: dict[int, Vec] = {}  # by visit
        stored: dict[int, Vec] = {}
        if memory:
            for k, (v, u) in enumerate(zip(c.visits, updates)):
                g = u / v.lr if o.get("per_rate") else u
                before = y.get(v.client, np.zeros(d))
                y[v.client] = g if o.get("codec") is None else self.setting.codec("store", o["codec"], g)
                changes[k], stored[k] = g - before, y[v.client] - before
        at = {id(v): k for k, v in enumerate(c.visits)}
        age = dict(zip(at, c.age))

        def judged(v):
            rule, own = c.rule, {}
            for name, (vec, unit) in rule.judged(v).items():
                discount = age[id(v)] if name == "delta" and not isinstance(rule, Scallion) else 1.0
                own[name] = (discount * vec, unit)
            if memory:
                own = {"change": (age[id(v)] * changes[at[id(v)]], 1.0)} | (own if isinstance(rule, Scallion) else {
                    k: w for k, w in own.items() if k != "delta"})  # fmt: skip
            return own

        def by_client(of, each):
            of_each = [[of(v) for v in c.visits if v.client == i] for i in ids]
            return np.stack([sum(some) if each else some[-1] for some in of_each])

        names = list(judged(c.visits[0]))
        adds = {n: n in ("change", *c.rule.accumulates) for n in names}
        columns = {n: by_client(lambda v, n=n: judged(v)[n][0], adds[n]) for n in names}
        known = {n: judged(c.visits[0])[n][1] for n in names}
        first = next(n for n in names if known[n] is not None)
        units = {}
        for n in names:
            medians = [np.sort(np.linalg.norm(columns[k], axis=1))[(len(ids) - 1) // 2] for k in (n, first)]
            units[n] = known[n] or (medians[0] / medians[1] if all(medians) else 1.0)
        V = np.concatenate([columns[n] / units[n] for n in names], 1)
        base = self.state.setdefault("base", {})
        z = np.concatenate([base.get(n, np.zeros(columns[n].shape[1])) / units[n] for n in names])
        how = self.decision(V, z)

        def averaged(of, each):
            """What the rule makes of a number of vectors, each a function of a visit."""
            mine = by_client(of, each)
            if how["columns"]:
                return self.column(how["M"] @ mine)
            out = how["w"] @ mine
            if how["r"].any():
                replaced = [self.at_base(v, base, names) for v in c.visits]
                age.update({id(new): age[id(v)] for new, v in zip(replaced, c.visits)})
                of_base = [[of(v) for v in replaced if v.client == i][-1] for i in ids]
                out = out + how["r"] @ np.stack(of_base)
            return out

        def upload(n):
            return (
                self.column(how["M"] @ columns[n]) if how["columns"]
                else how["w"] @ columns[n] + how["r"].sum() * base.get(n, np.zeros(columns[n].shape[1]))
            )  # fmt: skip

        c.robust = averaged
        own = {n: upload(n) for n in names}
        if o["rule"] == "centred_clip":
            self.state["base"] = own
        if memory:
            mean = self.state.get("total", np.zeros(d)) / c.N
            s = own["change"]
            kept = by_client(lambda v: stored[at[id(v)]], True)
            follows = (
                self.column(how["M"] @ kept) if how["columns"]
                else how["w"] @ kept + how["r"].sum() * base.get("change", np.zeros(d))
            )  # fmt: skip
            self.state["total"] = self.state.get("total", np.zeros(d)) + len(ids) * follows
            share = 1.0 if o.get("normalise", "cohort") == "cohort" else len(ids) / c.N
            return (c.lr if o.get("per_rate") else 1.0) * (share * s + mean)
        if "delta" in own and not isinstance(c.rule, Scallion):
            return own["delta"]
        return averaged(lambda v: age[id(v)] * c.rule.read(v), False)

    def at_base(self, v, base, names):
        """A visit that uploaded the rule's base."""
        got = {n: base.get(n, np.zeros_like(u)) for n, u in v.got.items()}
        a = base.get("a", np.zeros(1))[0] if "a" in names else v.a
        return dataclasses.replace(v, got=got, a=a)

    def column(self, rows):
        if self.o["rule"] == "median":
            return np.median(rows, 0)
        f = self.o["f"]
        return np.sort(rows, 0)[f : len(rows) - f].mean(0)

    def decision(self, V, z):
        o, m = self.o, len(V)
        M = np.eye(m)
        if o.get("before") == "mixing":
            near = np.square(V[:, None] - V[None]).sum(2).argsort(1, kind="stable")[:, : m - o["f"]]
            M = np.stack([np.isin(np.arange(m), row) / len(row) for row in near])
        if o["rule"] in ("median", "trimmed_mean"):
            return {"columns": True, "M": M}
        W, zero = M @ V, np.zeros(m)
        if o["rule"] in ("krum", "multi_krum"):
            score = np.sort(np.square(W[:, None] - W[None]).sum(2), 1)[:, 1 : m - o["f"] - 1].sum(1)
            best = score.argsort(kind="stable")[: 1 if o["rule"] == "krum" else o.get("q") or m - o["f"]]
            return {"columns": False, "w": np.isin(np.arange(m), best) / len(best) @ M, "r": zero}
        if o["rule"] == "geometric_median":
            w = np.full(m, 1 / m)
            for _ in range(8):
                w = 1 / np.maximum(1e-6, np.linalg.norm(W - w @ W, axis=1))
                w = w / w.sum()
            return {"columns": False, "w": w @ M, "r": zero}
        if o["rule"] == "centred_clip":
            factor = np.minimum(1, o["tau"] / np.maximum(np.linalg.norm(W - z, axis=1), 1e-30))
        else:
            norms = np.linalg.norm(W, axis=1)
            most = o["norm"] if o.get("quantile") is None else np.quantile(norms, o["quantile"])
            factor = np.where(norms > most, most / np.maximum(norms, 1e-30), 1.0)
        return {"columns": False, "w": factor / m @ M, "r": (1 - factor) / m @ M}


GATHERS: dict[str, type[Mean]] = {
    "mean": Mean,
    "robust": Robust,
    "mixing": Mixing,
    "secure": SecureSum,
    "memory": Memory,
    "mifa": Mifa,
    "aced": Mifa,
    "clusters": Clusters,
}


# Optimisers: from G to a move --------------------------------------------------------------------------


class Optimizer:
    """x ← x − η_s·direction."""

    def __init__(self, spec: Spec, setting: Setting) -> None:
        self.o, self.lr, self.decay, self.slots = spec.optimizer, spec.lr, spec.decay, setting.slots
        d = len(setting.x0)
        self.b, self.m, self.v = np.zeros(d), np.zeros(d), np.full(d, float(self.o.get("v0", 0.0)))
        self.top = np.zeros(d)
        self.T = 0

    def __call__(self, x: Vec, G: Vec, c: Cohort) -> Vec:
        """The whole move x − x̄."""
        G = G + self.decay * x
        self.T += 1
        o, name = self.o, self.o.name
        if name == "sgd":
            return self.lr * G
        if name == "momentum":
            self.b = o["beta"] * self.b + G
            return self.lr * self.b
        b1, b2, eps = o["beta1"], o["beta2"], o["eps"]
        self.m = b1 * self.m + (1 - b1) * G
        self.v = self.second(name, G, b2)
        if name == "fadas":
            self.top = np.maximum(self.top, self.v)
            oldest = max(v.tau for v in c.visits)
            lr = min(self.lr, 1 / oldest) if oldest > o["limit"] else self.lr
            return lr * self.m / (np.sqrt(self.top) + eps)
        m, v = self.m, self.v
        if o.get("corrected", True) and name != "adagrad":
            m, v = m / (1 - b1**self.T), v / (1 - b2**self.T)
        r = m / (np.sqrt(v) + eps)
        return self.lr * (self.trusted(x, r) if name == "lamb" else r)

    def second(self, name: str, G: Vec, b2: float) -> Vec:
        match name:
            case "adagrad":
                return self.v + G**2
            case "adabelief":
                return b2 * self.v + (1 - b2) * (G - self.m) ** 2
            case "yogi":
                return self.v - (1 - b2) * G**2 * np.sign(self.v - G**2)
        return b2 * self.v + (1 - b2) * G**2

    def trusted(self, x: Vec, r: Vec) -> Vec:
        """Lamb's φ = ‖x‖/‖r‖, per layer or over all."""
        cuts = [(lo, hi) for lo, hi, _ in self.slots] if self.o.get("layerwise", True) else [(0, len(x))]
        out = r.copy()
        for lo, hi in cuts:
            a, b = np.linalg.norm(x[lo:hi]), np.linalg.norm(r[lo:hi])
            out[lo:hi] *= a / b if a > 0 and b > 0 else 1.0
        return out


# Links --------------------------------------------------------------------------------------------------


class Uplink:
    """What the server receives of an upload; a residual for each name under error feedback."""

    def __init__(self, link: Part | None, setting: Setting) -> None:
        self.o, self.setting = link, setting
        self.residual: dict[tuple[int, str], Vec] = {}

    def quantises(self, client: int) -> bool:
        return self.o is not None and (not self.o.get("mixed") or self.setting.inferior(client))

    def __call__(self, uploads: Named, at: Visit) -> Named:
        if not self.quantises(at.client):
            return dict(uploads)
        return {name: self._one(name, u, at) for name, u in uploads.items()}

    def _one(self, name: str, u: Vec, at: Visit) -> Vec:
        assert self.o is not None
        shifted = self.o.get("of_weights") and name == "delta"
        sent = at.x - u if shifted else np.sqrt(u) if name == "v" else u
        if self.o.get("feedback"):
            sent = sent + self.residual.get((at.client, name), 0.0)
        got = self.setting.codec("wire", self.o["codec"], sent)
        if self.o.get("feedback"):
            self.residual[at.client, name] = sent - got
        return at.x - got if shifted else got**2 if name == "v" else got


class Downlink:
    """What clients hold after a broadcast: the decoded values, or the hidden state."""

    def __init__(self, link: Part | None, setting: Setting) -> None:
        self.o, self.setting = link, setting
        self.held: Named | None = None

    def __call__(self, vectors: Named) -> Named:
        if self.o is None:
            return vectors
        numbers = {k: v for k, v in vectors.items() if np.ndim(v) == 0}  # which no codec touches
        crossing = {k: np.sqrt(v) if k == "v" else v for k, v in vectors.items() if k not in numbers}
        if not self.o.get("hidden"):
            got = {k: self.setting.codec("wire", self.o["codec"], v) for k, v in crossing.items()}
        elif self.held is None:  # everybody starts from the same values
            self.held = got = crossing
        else:
            self.held = got = {
                k: self.held[k] + self.setting.codec("wire", self.o["codec"], v - self.held[k])
                for k, v in crossing.items()
            }
        return numbers | {k: v**2 if k == "v" else v for k, v in got.items()}


# The run ------------------------------------------------------------------------------------------------


class Adjust:
    """x̄ → (x̄ as it is evaluated, the x that is sent out)."""

    def __init__(self, parts: tuple[Part, ...], setting: Setting) -> None:
        self.parts, self.slots = {p.name: p for p in parts}, setting.slots
        self.D = np.zeros_like(setting.x0)
        self.h = np.zeros_like(setting.x0)

    def __call__(self, x: Vec, average: Vec, inferior: float, c: Cohort) -> tuple[Vec, Vec]:
        move = x - average
        if "shift" in self.parts:
            average = average.copy()
            for lo, hi, dims in self.slots:
                if dims >= 2:
                    average[lo:hi] -= inferior * average[lo:hi].mean()
        if "feddyn" in self.parts:
            self.D = self.D + c.total(lambda v: v.got["delta"], c.p)
            return average, average - self.D / c.N
        if "adabest" in self.parts:
            self.h = self.parts["adabest"]["beta"] * (self.h + move)
            return average, average - self.h
        return average, average


def interpret(spec: Spec, setting: Setting) -> Iterator[tuple[Vec, Vec]]:
    """(x̄, x) after every server step."""
    d = len(setting.x0)
    rule = RULES[spec.rule.name](spec.rule)
    rule.sizes = setting.sizes
    gather = GATHERS[spec.gather.name](spec.gather, setting)
    optimise, adjust = Optimizer(spec, setting), Adjust(spec.adjust, setting)
    grid = spec.gather.name == "secure" and f"shared({spec.gather['bits']}, {spec.gather['range']})"
    up = Uplink(part("up", codec=grid) if grid else spec.up, setting)
    down = Downlink(spec.down, setting)
    average = x = setting.x0
    server = rule.state(d)
    memories: dict[int, Named] = {}
    sent = [down({"x": x, **rule.send(server, x, setting.ticks[0].N)})]
    for t, tick in enumerate(setting.ticks):
        visits = []
        for client, version in zip(tick.clients, tick.versions):
            at = train(
                rule,
                spec.prox,
                setting,
                client,
                version,
                sent[version],
                memories.setdefault(client, rule.first(d)),
            )
            at.tau = t - version
            if spec.attack is not None and setting.hostile(client):
                at.got = alone(spec.attack, setting, at)
            at.got = gather.cross(up, at)
            memories[client] = rule.remember(at)
            visits.append(at)
        if not visits:  # nobody came: the version counts on, and nothing moves
            sent.append(down({"x": x, **rule.send(server, x, tick.N)}))
            yield average, x
            continue
        if spec.attack is not None:
            together(spec.attack, setting, visits, Uplink(_without_feedback(spec.up), setting))
        kind = "uniform" if spec.gather.name == "robust" else spec.weights
        c = Cohort(visits, t, tick.N, x, setting.sizes[: tick.N], kind, spec.staleness)
        c.rule = rule
        G = rule.rescale(gather([rule.read(v) for v in visits], c), c)
        server = rule.absorb(server, c)
        inferior = sum(up.quantises(v.client) for v in visits) / len(visits)
        average, x = adjust(x, x - optimise(x, G, c), inferior, c)
        sent.append(down({"x": x, **rule.send(server, x, tick.N)}))
        yield average, x


# Hostile clients ----------------------------------------------------------------------------------------


def aimed(at: Visit) -> list[str]:
    """What hostile clients change: vectors that may be negative."""
    return [name for name in at.got if name != "v"]


def alone(o: Part, setting: Setting, at: Visit) -> Named:
    """What a hostile client makes of its own uploads."""
    made = {
        "sign_flip": lambda name, u: -u,
        "scale": lambda name, u: o["factor"] * u,
        "gaussian": lambda name, u: o["sigma"] * setting.noise(name, at.version, at.client, len(u)),
    }.get(o.name)
    return at.got if made is None else at.got | {name: made(name, at.got[name]) for name in aimed(at)}


def together(o: Part, setting: Setting, visits: list[Visit], up: Uplink) -> None:
    """Hostile clients' uploads made of the honest ones, as those were received."""
    honest = sorted((v for v in visits if not setting.hostile(v.client)), key=lambda v: v.client)
    if not honest or o.name not in ("alie", "ipm", "mimic"):
        return
    made = {}
    for name in aimed(visits[0]):
        u = np.stack([v.got[name] for v in honest])
        made[name] = {
            "alie": lambda u=u: u.mean(0) - o["z"] * u.std(0),
            "ipm": lambda u=u: -o["eps"] * u.mean(0),
            "mimic": lambda u=u: u[0],
        }[o.name]()
    for v in visits:
        if setting.hostile(v.client):
            v.got = v.got | up(made, v)


def _without_feedback(up: Part | None) -> Part | None:
    return None if up is None else Part(up.name, tuple((k, v) for k, v in up.options if k != "feedback"))


def train(
    rule: Rule, prox: float, setting: Setting, client: int, version: int, sent: Named, memory: Named
) -> Visit:
    """K local steps; the visit holds the uploads before they cross."""
    batches, rho = setting.batches(client, version), setting.momentum

    def full() -> Vec:
        return setting.grad(sent["x"], setting.everything(client)) + setting.decay * sent["x"]

    at = Visit(
        client, version, float(setting.sizes[client]), len(batches), effective(len(batches), rho),
        setting.rate(version), sent, memory, full,
    )  # fmt: skip
    y, s = at.x, rule.begin(at)
    b = np.zeros_like(y)
    for rows in batches:
        g = setting.grad(y, rows) + setting.decay * y + prox * (y - at.x)
        b = rho * b + rule.direction(g, y, s, at)
        y = y - at.lr * b
    at.got = rule.uploads(y, s, at)
    return at
