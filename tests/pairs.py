"""Does every combination of parts agree with the interpreter, or say why it does not go together?

`python tests/pairs.py --count 2000 --out build/pairs.jsonl` draws combinations of rule, gather, optimizer,
adjuster, up link, down link and schedule, runs each in the package and in `interpreter.py`, and counts. A
run that is stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interpreter import Part, Setting, Spec, Tick, interpret, part
from torch import nn

import fedbraid as fb

SIZES = np.array([3, 5, 8, 4, 7, 6, 9, 2, 5])
STEPS = 6
TOL = 1e-4


# The problem, and its gradient by hand --------------------------------------------------------------

SLOTS = [(0, 12, 2), (12, 16, 1), (16, 24, 2), (24, 26, 1)]  # Linear(3, 4), tanh, Linear(4, 2)


def _problem() -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(7)
    data = []
    for i, n in enumerate(SIZES):
        a = draw.normal(size=(n, 3)) + 0.2 * i
        data.append((a.astype(np.float32), (draw.normal(size=(n, 2)) + 0.3 * i).astype(np.float32)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x0 = np.concatenate([p.detach().double().numpy().ravel() for p in model.parameters()])
    inputs, targets = (np.concatenate([pair[k] for pair in data]).astype(np.float64) for k in (0, 1))
    return lambda: fb.Task.from_arrays(model, clients=data, loss="mse"), x0, inputs, targets


MAKE, X0, INPUTS, TARGETS = _problem()
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)])


def gradient(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Of the mean over these rows of ½ Σ (output − target)², the two outputs' mean square."""
    a, t = INPUTS[rows], TARGETS[rows]
    W, b, V, c = (x[lo:hi] for lo, hi, _ in SLOTS)
    W, V = W.reshape(4, 3), V.reshape(2, 4)
    hidden = np.tanh(a @ W.T + b)
    d_out = (hidden @ V.T + c - t) / len(rows)
    d_in = (d_out @ V) * (1 - hidden**2)
    return np.concatenate([(d_in.T @ a).ravel(), d_in.sum(0), (d_out.T @ hidden).ravel(), d_out.sum(0)])


# A case ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One combination, and how it is run."""

    spec: Spec
    schedule: str  # rounds, buffered, immediate, poisson (some rounds empty); with "+" clients join
    cohort: int
    concurrency: int
    batch: int | None
    steps: int | None
    epochs: int | None
    lr: float
    lr_decay: float
    momentum: float
    decay: float
    backend: str
    seed: int

    def __str__(self) -> str:
        s = self.spec
        link = f"up={s.up} down={s.down}"
        work = f"lr={self.lr} decay={self.lr_decay} rho={self.momentum} wd={self.decay} batch={self.batch} steps={self.steps}"
        return (
            f"{s.rule}{f' + prox {s.prox}' if s.prox else ''} | {s.gather} {s.weights} {s.staleness} | {s.optimizer} lr={s.lr} wd={s.decay} |"
            f" {' '.join(map(str, s.adjust)) or '–'} | {link} | {s.attack or 'no attack'} | {self.schedule} {self.cohort}/{self.concurrency} | {work}"
            f" | {self.backend} seed={self.seed}"
        )


MOMENTS = {
    "sgdm": {"beta": 0.8},
    "rmsprop": {"beta": 0.9, "eps": 0.1},
    "adam": {"beta1": 0.8, "beta2": 0.9, "eps": 0.1},
}
ADAPTIVE = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-2}
CODECS = ["fp16()", "int8()", "int4()", "uniform(5)", "kmeans(3)", "qsgd(5)", "topk(0.5)"]


def _statistics_of(rule: str) -> list[Part]:
    return [part(rule, optimizer=kind, v0=0.5, **options) for kind, options in MOMENTS.items()]


def _adaptive(name: str) -> list[tuple[Part, float]]:
    moments = ((True, 0.0), (False, 1e-4), (False, 1.0))
    return [
        (part(name, corrected=corrected, v0=v0, **ADAPTIVE), 0.5 if v0 == 1 and name != "lamb" else 0.03)
        for corrected, v0 in moments
    ]


RULES = {
    "sgd": [part("sgd")],
    "fedprox": [part("fedprox", mu=0.4)],
    "scaffold": [part("scaffold")],
    "scaffold_m": [part("scaffold_m")],
    "feddyn": [part("feddyn", mu=0.3), part("feddyn", mu=0.3, progressive=True)],
    "adabest": [part("adabest", mu=0.3), part("adabest", mu=0.3, progressive=True)],
    "fedgbo": _statistics_of("fedgbo"),
    "mimelite": _statistics_of("mimelite"),
    "mfl": _statistics_of("mfl"),
    "fednova": [part("fednova")],
    "ghbm": [part("ghbm", tau=1, beta=0.5), part("ghbm", tau=3, beta=0.5)],
    "scallion": [part("scallion", alpha=1.0), part("scallion", alpha=0.6)],
}
GATHERS = {
    "mean": [part("mean")],
    "fedvarp": [part("memory")],
    "mifa": [part("mifa")],
    "cluster_fedvarp": [part("clusters", clusters=3)],
    "fedadavr": [
        part("memory", per_rate=True, codec=codec, normalise=normalise)
        for codec in (None, "fp16()", "int8()", "int4()")
        for normalise in ("cohort", "population")
    ],
    "aced": [part("aced", limit=1), part("aced", limit=2)],
    "mixing": [part("mixing")],
    "secure": [part("secure", bits=bits, range=reach) for bits, reach in ((16, 8.0), (9, 4.0))],
    "robust": [
        part("robust", rule=rule, **options)
        for rule, options in (
            ("median", {}),
            ("median", {"before": "mixing", "f": 0}),
            ("trimmed_mean", {"f": 0}),
            ("krum", {"f": 0}),
            ("multi_krum", {"f": 0, "q": 2}),
            ("geometric_median", {}),
            ("centred_clip", {"tau": 0.1}),
            ("norm_bound", {"norm": 0.1}),
            ("norm_bound", {"quantile": 0.5}),
        )
    ],
    "robust with memory": [
        part("robust", rule=rule, memory=True, per_rate=per_rate, codec=codec, normalise=normalise, **options)
        for rule, options in (
            ("median", {}),
            ("multi_krum", {"f": 0, "q": 2}),
            ("centred_clip", {"tau": 0.1}),
        )
        for per_rate, codec, normalise in (
            (False, None, "cohort"),
            (True, None, "cohort"),
            (True, "int8()", "cohort"),
            (True, None, "population"),
        )
    ],
}
ATTACKS = {
    "none": None,
    "sign_flip": part("sign_flip"),
    "scale": part("scale", factor=3.0),
    "gaussian": part("gaussian", sigma=0.02),
    "alie": part("alie", z=1.2),
    "ipm": part("ipm", eps=0.63),  # which cancels no sum of honest samples
    "mimic": part("mimic"),
}
HOSTILE = (1, 4, 6)
OPTIMISERS: dict[str, list[tuple[Part, float]]] = {  # each with a rate that suits it
    "sgd": [(part("sgd"), 1.0), (part("sgd"), 0.7)],
    "momentum": [(part("momentum", beta=0.6), 0.5)],
    "adagrad": [(part("adagrad", beta1=b, beta2=0.0, eps=1e-2, v0=0.01), 0.03) for b in (0.0, 0.5)],
    "adam": _adaptive("adam"),
    "adabelief": _adaptive("adabelief"),
    "yogi": _adaptive("yogi"),
    "lamb": [*_adaptive("lamb"), (part("lamb", corrected=True, v0=0.0, layerwise=False, **ADAPTIVE), 0.03)],
    "fadas": [
        (part("fadas", limit=1, **ADAPTIVE | {"eps": 0.3}), 0.6)
    ],  # a rate above 1/τ, and no chaos by it
}
ADJUSTS = {
    "none": (),
    "shift": (part("shift"),),
    "feddyn": (part("feddyn"),),
    "adabest": (part("adabest", beta=0.7),),
    "shift, feddyn": (part("shift"), part("feddyn")),
    "shift, adabest": (part("shift"), part("adabest", beta=0.7)),
}
UPS = ["plain", "codec", "of_weights", "feedback", "mixed", "of_weights feedback mixed"]
DOWNS = ["plain", "direct", "hidden"]
SCHEDULES = ["rounds", "buffered", "immediate", "rounds+", "buffered+", "immediate+", "poisson"]
AXES: dict[str, list[str]] = {
    "rule": list(RULES), "gather": list(GATHERS), "optimizer": list(OPTIMISERS), "adjuster": list(ADJUSTS),
    "up": UPS, "down": DOWNS, "schedule": SCHEDULES, "attack": list(ATTACKS),
}  # fmt: skip
NEUTRAL = {axis: names[0] for axis, names in AXES.items()}


def draw(seed: int) -> Case:
    """The combination with this number."""
    rng = np.random.default_rng([seed, 15])
    return make({axis: names[rng.integers(len(names))] for axis, names in AXES.items()}, seed)


def couples() -> Iterator[tuple[dict[str, str], Case]]:
    """Every two parts of different axes, the others neutral."""
    axes = list(AXES)
    for i, one in enumerate(axes):
        for other in axes[i + 1 :]:
            for a in AXES[one]:
                for b in AXES[other]:
                    chosen = {one: a, other: b}
                    yield chosen, make(NEUTRAL | chosen, zlib.crc32(repr(chosen).encode()))


def make(chosen: dict[str, str], seed: int) -> Case:
    """A case of these parts; their numbers, the work and the clients are drawn."""
    rng = np.random.default_rng([seed, 16])

    def one(values: list[Any]) -> Any:
        return values[rng.integers(len(values))]

    optimizer, lr = one(OPTIMISERS[chosen["optimizer"]])
    up, down, schedule, uneven = chosen["up"], chosen["down"], chosen["schedule"], rng.random() < 0.6
    secure = chosen["gather"] == "secure"
    if secure and schedule in ("buffered+", "immediate+"):  # of which it wants to know the buffer
        schedule = schedule[:-1]
    spec = Spec(
        rule=one(RULES[chosen["rule"]]),
        prox=one([0.0, 0.0, 0.0, 0.3]),
        gather=one(GATHERS[chosen["gather"]]),
        weights=one(["samples", "uniform"]),
        staleness=one(["constant", "sqrt", "polynomial", "hinge"]),
        optimizer=optimizer,
        lr=lr,
        decay=one([0.0, 0.0, 0.05]),
        adjust=ADJUSTS[chosen["adjuster"]],
        attack=ATTACKS[chosen["attack"]],
        up=None if up == "plain" else part("up", codec=one(CODECS), **{k: k in up for k in UPS[2:5]}),
        down=None if down == "plain" else part("down", codec=one(CODECS), hidden=down == "hidden"),
    )
    least = 3 if spec.gather.get("rule") in ("krum", "multi_krum") else 2
    return Case(
        spec,
        schedule,
        cohort=1
        if schedule.startswith("immediate")
        else int(rng.integers(max(least, 3 if secure else 2), 5)),
        concurrency=int(rng.integers(3, 7)),
        batch=one([2, 3]) if uneven else None,
        steps=None if uneven else 3,
        epochs=1 if uneven else None,
        lr=one([0.05, 0.1]),
        lr_decay=one([1.0, 0.8]),
        momentum=one([0.0, 0.5, 0.9]),
        decay=one([0.0, 0.1]),
        backend=one(["loop", "vmap"]),
        seed=seed % 1000,
    )


# The adapter: a case in the package's own parts --------------------------------------------------------


def algorithm(spec: Spec) -> fb.Algorithm:
    """The package's algorithm of these parts."""
    rule, *state = _rule(spec.rule)
    if spec.prox:
        rule = fb.chain(_rule(part("fedprox", mu=spec.prox))[0], rule)
    server = fb.pipeline(*state, *_optimizer(spec), *(_adjuster(p) for p in spec.adjust))
    made = fb.Algorithm(rule, _gather(spec), server, _up(spec.up), _down(spec.down))
    if spec.gather.name == "robust":
        options = {k: spec.gather.get(k) for k in ("f", "q", "tau", "norm", "quantile", "before")}
        made = fb.robust(made, spec.gather["rule"], **options)
    if spec.gather.name == "secure":
        reach = {name: spec.gather["range"] for name, what in made.uploads.items() if what.width is None}
        made = fb.secure(made, bits=spec.gather["bits"], range=reach)
    if spec.attack is not None:
        made = fb.attack(made, spec.attack.name, clients=HOSTILE, **dict(spec.attack.options))
    return made


def _rule(p: Part) -> tuple[Any, ...]:
    from fedbraid.algorithms import adabest, averaging, feddyn, fedgbo, ghbm, scaffold, scallion

    match p.name:
        case "sgd":
            return (fb.Rule(),)
        case "fedprox":
            return (averaging.Proximal(p["mu"]),)
        case "fednova":
            return averaging.EffectiveSteps(), averaging.Normalised()
        case "scaffold":
            return scaffold.ControlVariates(), scaffold.ControlVariate()
        case "scaffold_m":
            return scaffold.LocalEstimate(), scaffold.GlobalEstimate()
        case "scallion":
            return scallion.ScaledVariates(p["alpha"]), scallion.AddBack(), scaffold.ControlVariate()
        case "ghbm":
            return ghbm.HeavyBall(p["beta"]), ghbm.Trail(p["tau"])
        case "feddyn":
            if p.get("progressive"):
                return feddyn.DynamicRegulariser(p["mu"], progressive=True), feddyn.MeanSamplesOfAll()
            return (feddyn.DynamicRegulariser(p["mu"]),)
        case "adabest":
            if p.get("progressive"):
                return adabest.AdaptiveBias(p["mu"], progressive=True), adabest.MeanSamples()
            return (adabest.AdaptiveBias(p["mu"]),)
        case "fedgbo" | "mimelite" | "mfl":
            client, server = {
                "fedgbo": (fedgbo.Fixed, fedgbo.Inverted),
                "mimelite": (fedgbo.FixedAndGradient, fedgbo.FromGradient),
                "mfl": (fedgbo.Tracked, fedgbo.Averaged),
            }[p.name]
            o = _statistics(p)
            return client(o), server(o)
    raise ValueError(p.name)


def _statistics(p: Part) -> Any:
    from fedbraid.core import optim

    match p["optimizer"]:
        case "sgdm":
            return optim.SGDm(p["beta"])
        case "rmsprop":
            return optim.RMSProp(p["beta"], p["eps"], p["v0"])
    return optim.Adam(p["beta1"], p["beta2"], p["eps"], p["v0"], corrected=False)


def _gather(spec: Spec) -> Any:
    from fedbraid.algorithms import asynchronous as late
    from fedbraid.algorithms import fedadavr, memory
    from fedbraid.core.context import Staleness
    from fedbraid.core.gather import Mean

    g, how = spec.gather, (spec.weights, Staleness(spec.staleness))
    kind = g.name if g.name != "robust" else "memory" if g.get("memory") else "mean"
    match kind:
        case "mean" | "secure":
            return Mean(*how)
        case "mixing":
            return late.Mixing(*how)
        case "memory" if g.get("per_rate"):
            codec = None if g.get("codec") is None else _codec(g["codec"])
            return memory.ServerMemory(*how, formula=fedadavr.VarianceReduced(g["normalise"]), codec=codec)
        case "memory":
            return memory.ServerMemory(*how)
        case "mifa":
            return memory.ServerMemory(*how, formula=memory.Mifa())
        case "aced":
            return late.RecentMifa(*how, limit=g["limit"])
    return memory.ClusterVarp(*how, clusters=g["clusters"])


def _optimizer(spec: Spec) -> list[Any]:
    from fedbraid.algorithms import asynchronous as late
    from fedbraid.core import optim
    from fedbraid.core.transform import Scale

    o = spec.optimizer
    match o.name:
        case "sgd":
            made = optim.Optimizer()
        case "momentum":
            made = optim.Momentum(o["beta"])
        case "fadas":
            step = late.CautiousScale(spec.lr, o["limit"])
            return [optim.Optimize(late.AMSGrad(o["beta1"], o["beta2"], o["eps"]), spec.decay), step]
        case name:
            kind = {"adagrad": optim.Adagrad, "adabelief": optim.AdaBelief, "yogi": optim.Yogi}.get(
                name, optim.Adam
            )
            more = {} if name == "adagrad" else {"corrected": o["corrected"]}
            made = kind(o["beta1"], o["beta2"], o["eps"], o["v0"], **more)
    trust = [optim.TrustRatio(o.get("layerwise", True))] if o.name == "lamb" else []
    return [optim.Optimize(made, spec.decay), *trust, Scale(spec.lr)]


def _adjuster(p: Part) -> Any:
    from fedbraid.algorithms import adabest, feddyn, fedshift

    match p.name:
        case "shift":
            return fedshift.Shift()
        case "feddyn":
            return feddyn.DynamicServer()
    return adabest.AdaptiveServer(p["beta"])


def _codec(text: str) -> Any:
    return eval(text, dict(vars(fb.codecs)))


def _up(link: Part | None) -> Any:
    from fedbraid.links.error_feedback import ErrorFeedback

    if link is None:
        return fb.codecs.identity()
    codec = _codec(link["codec"])
    codec = fb.codecs.of_weights(codec) if link["of_weights"] else codec
    codec = fb.codecs.mixed(codec, share=0.5) if link["mixed"] else codec
    return ErrorFeedback(codec) if link["feedback"] else codec


def _down(link: Part | None) -> Any:
    from fedbraid.links.hidden_state import HiddenState

    if link is None:
        return fb.codecs.identity()
    return HiddenState(_codec(link["codec"])) if link["hidden"] else _codec(link["codec"])


def averaged(run: Any) -> np.ndarray:
    """x̄ of a run that goes on: the model that is evaluated."""
    return run.state.average.double().numpy().copy()


# Schedules: the package's own, or a script in which clients join -----------------------------------------


@dataclass(frozen=True)
class Script(fb.Schedule):
    """Given ticks; clients join between steps."""

    given: tuple[Any, ...] = ()

    def ticks(self, N: int, seed: int, message: tuple[float, float] = (0.0, 0.0)) -> Iterator[Any]:
        yield from self.given


def schedule(case: Case) -> tuple[Any, list[Tick]]:
    """(the package's schedule, its ticks as the interpreter reads them)."""
    N, kind = len(SIZES), case.schedule
    if kind == "rounds":
        plan: Any = fb.rounds(STEPS, clients=case.cohort)
    elif kind == "poisson":
        plan = fb.rounds(STEPS, clients=1, sampling="poisson")
    elif kind in ("buffered", "immediate"):
        plan = fb.buffered(STEPS, buffer=case.cohort, concurrency=case.concurrency)
    else:
        known = [5, 5, 7, 7, 8, 9][:STEPS]
        plan = Script(STEPS, tuple(_script(case, known)))
        return plan, [_tick(t, n) for t, n in zip(plan.given, known)]
    return plan, [_tick(t, N) for t in plan.ticks(N, case.seed)]


def _tick(t: Any, N: int) -> Tick:
    return Tick(tuple(t.clients.tolist()), tuple(t.versions.tolist()), N)


def _script(case: Case, known: list[int]) -> Iterator[Any]:
    """Random arrivals among the clients that are known, nobody with two jobs at a time."""
    from fedbraid.schedule import Tick as Real

    rng = np.random.default_rng(case.seed)
    flying: dict[int, int] = {}
    for step, N in enumerate(known):
        if case.schedule == "rounds+":
            clients = rng.choice(N, case.cohort, replace=False)
            yield Real(step, float(step), clients, np.full(len(clients), step), clients, frozenset())
            continue
        arrived: list[tuple[int, int]] = []
        started: list[int] = []
        while len(arrived) < case.cohort:
            while len(flying) < min(case.concurrency, N):
                new = int(rng.choice([i for i in range(N) if i not in flying]))
                flying[new] = step
                started.append(new)
            done = int(rng.choice(list(flying)))
            arrived.append((done, flying.pop(done)))
        clients, versions = (np.array(column, np.int64) for column in zip(*arrived))
        yield Real(
            step, float(step), clients, versions, np.array(started, np.int64), frozenset(flying.values())
        )


class DivergenceGuard:
    """Keeps x̄ of every step, and lets clients join."""

    def __init__(self, ticks: list[Tick]) -> None:
        self.ticks, self.models, self.clients = ticks, [], []

    def start(self, run: Any) -> None:
        _know(run.setup.task, self.ticks[0].N)

    def step(self, record: Any, run: Any) -> None:
        self.models.append(averaged(run))
        self.clients.append(tuple(record["clients"]))
        if len(self.models) < len(self.ticks):
            _know(run.setup.task, self.ticks[len(self.models)].N)


def _know(task: Any, N: int) -> None:
    object.__setattr__(task, "offsets", OFFSETS[: N + 1])
    task.__dict__.pop("sizes", None)


# What codecs made of what they were given ------------------------------------------------------------------


class Log:
    """Every vector that a codec of the package was given, with what came out."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], list[list[Any]]] = {}
        self.turns: Counter[tuple[str, str, int]] = Counter()

    def add(self, use: str, codec: Any, given: torch.Tensor, out: torch.Tensor) -> None:
        rows = self.seen.setdefault((use, type(codec).__name__.lower()), [])
        for v, w in zip(given.reshape(-1, given.shape[-1]), out.reshape(-1, out.shape[-1])):
            rows.append([v.detach().double().numpy().copy(), w.detach().double().numpy().copy()])

    def of(self, use: str, codec: str, v: np.ndarray) -> np.ndarray:
        """What came out for v, which the package must have encoded as well."""
        rows = self.seen.get((use, codec.partition("(")[0]), [])
        if not rows:
            raise Miss(f"the package sent nothing through {codec}")
        away = [float(np.abs(v - given).max()) for given, _ in rows]
        nearest = int(np.argmin(away))
        if not away[nearest] <= TOL * max(float(np.abs(v).max()), 0.1):
            raise Miss(
                f"{use} {codec}: nothing like {v[:3].round(5)}… was encoded; the nearest is {away[nearest]:.2g} away"
            )
        alike = [i for i, (given, _) in enumerate(rows) if np.array_equal(given, rows[nearest][0])]
        turn = self.turns[use, codec, alike[0]]  # a model that stands still is drawn for anew every time
        self.turns[use, codec, alike[0]] += 1
        return rows[alike[min(turn, len(alike) - 1)]][1]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While this lasts, the package's codecs report here."""
        undo = []
        for kind in _codecs():
            for name in ("encode", "roundtrip", "to_rows"):
                if name in kind.__dict__:
                    undo.append((kind, name, kind.__dict__[name]))
                    setattr(kind, name, self._wrapped(name, kind.__dict__[name]))
        try:
            yield
        finally:
            for kind, name, method in undo:
                setattr(kind, name, method)

    def _wrapped(self, name: str, method: Any) -> Any:
        log = self

        def encode(codec: Any, v: Any, layout: Any, *rest: Any) -> Any:
            data = method(codec, v, layout, *rest)
            log.add("wire", codec, v, codec.decode(data, layout))
            return data

        def roundtrip(codec: Any, v: Any, layout: Any, *rest: Any) -> Any:
            out, lengths = method(codec, v, layout, *rest)
            log.add("wire", codec, v, out)
            return out, lengths

        def to_rows(codec: Any, v: Any, layout: Any) -> Any:
            rows = method(codec, v, layout)
            log.add("store", codec, v, codec.from_rows(rows, layout))
            return rows

        return {"encode": encode, "roundtrip": roundtrip, "to_rows": to_rows}[name]


def _codecs(kind: Any = None) -> Iterator[Any]:
    kind = kind or fb.Codec
    for sub in kind.__subclasses__():
        yield sub
        yield from _codecs(sub)


# Run and compare ----------------------------------------------------------------------------------------------


class Miss(AssertionError):
    """Package and interpreter differ."""


@dataclass
class Outcome:
    """What came of a case: agrees, refused, misses."""

    kind: str
    text: str = ""
    moved: float = 0.0  # how far the model went, in parts of what it was


def check(case: Case) -> Outcome:
    """Run the package and the interpreter, and compare x̄ after every step."""
    try:
        made = algorithm(case.spec)
    except fb.FedbraidError as error:
        return Outcome("refused", str(error))
    work = fb.Work(
        lr=case.lr, epochs=case.epochs, steps=case.steps, batch=case.batch, momentum=case.momentum,
        weight_decay=case.decay, lr_decay=case.lr_decay,
    )  # fmt: skip
    plan, ticks = schedule(case)
    task, log, watch = MAKE(), Log(), DivergenceGuard(ticks)
    engine = f"in_process(backend={case.backend!r})"
    with log.listening():
        try:
            fb.simulate(
                task, made, work, plan, seed=case.seed, engine=engine, evaluate_every=None, callbacks=[watch]
            )
        except fb.FedbraidError as error:
            small = "in a server step" in str(error)  # where a client came twice
            kind = "misses" if watch.models and not small else "refused"
            return Outcome(kind, f"{type(error).__name__} after {len(watch.models)} steps: {error}")
    if watch.clients != [t.clients for t in ticks]:
        return Outcome("misses", "the package's cohorts are not its schedule's")
    try:
        return Outcome("agrees", moved=_compare(case, setting(case, task, work, ticks, log), watch.models))
    except Miss as error:
        return Outcome("misses", str(error))


def setting(case: Case, task: Any, work: Any, ticks: list[Tick], log: Log) -> Setting:
    from fedbraid.data.batches import DrawnBatches

    def batches(client: int, version: int) -> list[np.ndarray]:
        plan = DrawnBatches(task, work, np.array([client]), version, case.seed)
        return [plan.batch(k).client(0).rows[0].numpy() for k in range(int(plan.K[0]))]

    def noise(name: str, version: int, client: int, width: int) -> np.ndarray:
        from fedbraid.core import rng

        named = "dc" if case.spec.rule.name == "scallion" else name
        return rng.normal(case.seed, f"attack:{named}", width, version, np.array([client]))[0].astype(
            np.float64
        )

    share = 0.5
    return Setting(
        X0, SLOTS, SIZES, gradient, batches, lambda i: np.arange(OFFSETS[i], OFFSETS[i + 1]), log.of,
        lambda i: int((i + 1) * share) > int(i * share), ticks, case.lr, case.lr_decay, case.momentum, case.decay,
        lambda i: i in HOSTILE, noise,
    )  # fmt: skip


def _compare(case: Case, given: Setting, models: list[np.ndarray]) -> float:
    furthest = 0.0
    for t, (mine, _) in enumerate(interpret(case.spec, given)):
        away, size = np.abs(mine - models[t]).max(), np.abs(mine).max()
        if not away <= TOL * max(size, 1.0):
            raise Miss(f"step {t + 1}: x̄ is {away:.2g} apart, of {size:.2g}")
        furthest = max(furthest, float(np.abs(mine - X0).max()))
    return furthest


# The long run, and the page that it makes ------------------------------------------------------------------------


def name(chosen: dict[str, str]) -> str:
    return " with ".join(f"{axis} {part}" for axis, part in chosen.items())


def cases(count: int) -> Iterator[tuple[str, Case]]:
    """Every two parts, then `count` draws of all eight."""
    yield from ((name(chosen), case) for chosen, case in couples())
    yield from ((f"draw {seed}", draw(seed)) for seed in range(count))


def long_run(count: int, out: Path) -> list[dict[str, Any]]:
    """Check the cases that `out` does not hold yet; what it then holds."""
    out.parent.mkdir(parents=True, exist_ok=True)
    done = {json.loads(line)["id"] for line in out.open()} if out.exists() else set()
    with out.open("a") as file:
        for key, case in cases(count):
            if key in done:
                continue
            came = check(case)
            print(json.dumps({"id": key, "case": str(case), **asdict(came)}), file=file, flush=True)
            if came.kind == "misses":
                print(f"{key}: {case}\n    {came.text}", file=sys.stderr)
    return [json.loads(line) for line in out.open()]


def tables(rows: list[dict[str, Any]]) -> str:
    """What came of a long run, as the page shows it; axis by axis once every two parts were checked."""
    came = {row["id"]: row for row in rows}
    two = [name(chosen) for chosen, _ in couples()]
    pairs = [came[key] for key in two if key in came]
    draws = [row for key, row in came.items() if key.startswith("draw ")]
    lines = ["| | checked | agree | refused | differ |", "| --- | --- | --- | --- | --- |"]
    for what, some in ((f"two parts, of {len(two)} pairs", pairs), ("draws of all eight", draws)):
        kinds = Counter(row["kind"] for row in some)
        lines.append(f"| {what} | {len(some)} | {kinds['agrees']} | {kinds['refused']} | {kinds['misses']} |")
    if len(pairs) == len(two):
        lines += ["", f"| | {' | '.join(list(AXES)[1:])} |", "| --- |" + " --- |" * (len(AXES) - 1)]
        for i, one in enumerate(list(AXES)[:-1]):
            cells = [""] * i + [_cell(came, one, other) for other in list(AXES)[i + 1 :]]
            lines.append(f"| {one} | {' | '.join(cells)} |")
    refused = [f"| {row['id']} | {row['text']} |" for row in pairs if row["kind"] == "refused"]
    lines += ["", "| refused | because |", "| --- | --- |", *refused] if refused else []
    return "\n".join(lines)


def declarations() -> str:
    """What each rule and its server say that they send, as the page shows it."""
    lines = ["| rule | up | down | the server's own account of an upload |", "| --- | --- | --- | --- |"]
    for rule in (one for name in AXES["rule"] for one in RULES[name]):
        a = algorithm(Spec(rule=rule))
        own = {k: d for k, d in a.gathered.items() if a.uploads.get(k) != d}
        cells = [", ".join(map(_said, some.values())) or "–" for some in (a.uploads, a.downloads, own)]
        which = rule.get("optimizer") or ("progressive" if rule.get("progressive") else "")
        lines.append(f"| {rule.name}{which and ', ' + which} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _said(what: Any) -> str:
    """A declaration in words: what is not usual of it."""
    notes = ["one number"] if what.width == 1 else [] if what.signed else ["as its root"]
    notes += [
        said
        for word, said in (("uniform", "uniform"), ("discounts_staleness", "discounts staleness"))
        if getattr(what, word, False)
    ]
    return f"`{what.name}`" + (f" ({', '.join(notes)})" if notes else "")


def _cell(came: dict[str, dict[str, Any]], one: str, other: str) -> str:
    kinds = Counter(came[name({one: a, other: b})]["kind"] for a in AXES[one] for b in AXES[other])
    total = sum(kinds.values())
    return f"all {total}" if kinds["agrees"] == total else f"{kinds['agrees']} of {total}"


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cli.add_argument("--count", type=int, default=2000, help="draws of all eight parts")
    cli.add_argument("--out", type=Path, default=Path("build/pairs.jsonl"), help="what is known so far")
    cli.add_argument("--page", type=Path, help="a page whose tables to renew")
    asked = cli.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # no paper defines most of these
    rows = long_run(asked.count, asked.out)
    print(json.dumps({"combinations": len(rows), **Counter(row["kind"] for row in rows)}))
    if asked.page is not None:
        text = asked.page.read_text()
        for what, table in (("declared", declarations()), ("checked", tables(rows))):
            text = between(text, what, table)
        asked.page.write_text(text)


def between(page: str, what: str, table: str | None = None) -> str:
    """The page with another table between these marks, or the one that is there."""
    start, end = f"<!-- {what} -->\n\n", f"\n\n<!-- end of {what} -->"
    head, rest = page.split(start)
    old, tail = rest.split(end)
    return old if table is None else head + start + table + end + tail


if __name__ == "__main__":
    main()
