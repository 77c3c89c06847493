"""Secure aggregation (SecAgg+, Bell et al. 2020) of any algorithm whose server needs nothing but sums of uploads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.algorithms._build import builder
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import integer, number
from fedbraid.core.codec import Codec
from fedbraid.core.context import ServerContext, Tree, Uploads, Vectors
from fedbraid.core.gather import Mean, Metrics, Sums
from fedbraid.core.layout import Layout
from fedbraid.core.traits import GatherTraits
from fedbraid.core.transform import Transform
from fedbraid.core.vector_spec import Upload
from fedbraid.errors import ConfigError, EngineError, unknown
from fedbraid.links.secure import FRACTION, NUMBER_BITS, Scales, SecureUplink, fixed
from fedbraid.links.shared import Shared
from fedbraid.links.wrapped import WrappedUplink
from fedbraid.privacy.clipping import SkellamNoise
from fedbraid.privacy.parts import Noised, accounted, of_mean
from fedbraid.privacy.secure_sum import (
    Session,
    check_neighbours,
    choose_neighbours,
    require_cryptography,
    traffic,
)
from fedbraid.schedule import Buffered, Rounds, Schedule

Range = float | Mapping[str, float]

RARE = 1e-3  # the chance of an error in the middle of a run that is taken
LEAST = 3  # clients in a sum that hides any of them
STALENESS_BITS = 8  # s(τ) is a multiple of 2⁻⁸, so that clients can multiply their codes by it
NUMBERS = 3  # that are summed beside the uploads: weights, saturated codes, losses


@dataclass(frozen=True)
class CodeSums(Sums):
    """Σ w q, whole numbers by name, weighing and bit width, and how many of the codes lie at an end of the range."""

    samples: float = 0.0
    saturated: int = 0
    codes: int = 0
    clients: tuple[tuple[int, int], ...] = ()  # (bit width, how many clients have it)
    protocol: Mapping[str, int] | None = (
        None  # its bytes and drop-outs, where real clients masked their codes
    )


@dataclass(frozen=True)
class SecureMean(Mean):
    """Σ_S w_i q_i modulo 2^b, decoded, over Σ_S w_i: the mean of what clients sent, from sums alone.

    Weights are whole numbers by which each client multiplies its codes before it masks them: its samples, which are
    summed beside the codes, and s(τ) in steps of 1/256, which the server tells the clients of a full buffer. A simulation
    sums without masks, which cancel; clients of another bit width have a sum of their own.
    """

    codec: Codec = field(default_factory=Shared)
    scales: Scales = ()
    neighbours: int | None = None
    threshold: int | None = None
    uploads: Mapping[str, Upload] = field(default_factory=dict, repr=False, compare=False)
    server: Transform = field(default_factory=Transform, repr=False, compare=False)
    noise: int = field(default=0, repr=False, compare=False)  # what noise adds to sums, in largest codes
    both: bool = field(default=False, repr=False)  # every vector is summed by samples and uniformly

    def traits(self) -> GatherTraits:
        return replace(super().traits(), is_weighted_mean=False, sums_only=True, needs_every_upload=False)

    @property
    def age_bits(self) -> int:
        return 0 if self.staleness.kind == "constant" else STALENESS_BITS

    def weighings(self, what: Upload) -> tuple[bool, ...]:
        """Whether it is summed uniformly, by samples, or once each."""
        return (
            (True, False)
            if self.both and self.weights == "samples" and what.width is None
            else (what.uniform,)
        )

    def zero(self, x: Tensor) -> CodeSums:
        return CodeSums({}, 0.0, 0)

    def add(self, acc: Sums, up: Uploads, s: Tree, x: Tensor) -> CodeSums:
        weights = {True: torch.ones_like(up.n).double(), False: up.p(self.weights).double()}
        age = torch.round(self.staleness(up.staleness.double()) * 2**self.age_bits)
        one = torch.full_like(age, 2**self.age_bits)
        samples = float(up.n.double().sum())
        made = CodeSums({}, float(weights[False].sum()), len(up.n), samples=samples)
        for grid, rows in self._groups(up.clients):
            sums, saturated, codes = dict[str, Tensor](), 0, 0
            for name, what in self.uploads.items():
                v = up.vectors[name][rows]
                if what.width is not None:
                    sums[code_key(name, what.uniform, grid.bits)] = fixed(v).long().sum(0)
                    continue
                q, factor = grid.recover((v / dict(self.scales)[name]).cpu().numpy()), one
                saturated, codes = saturated + grid.saturated(q), codes + q.size
                if what.discounts_staleness:
                    factor = age
                for uniform in self.weighings(what):  # below 2⁵², so exact in any order
                    total = (weights[uniform] * factor)[rows].T @ torch.from_numpy(q).to(age)
                    sums[code_key(name, uniform, grid.bits)] = total.long()[0]
            group = ((grid.bits, len(rows)),)
            made = self.merge(made, CodeSums(sums, 0.0, 0, frozenset(), 0.0, saturated, codes, group))
        return self.merge(acc, made)

    def merge(self, a: Sums, b: Sums) -> CodeSums:
        assert isinstance(a, CodeSums)
        assert isinstance(b, CodeSums)
        sums, groups = dict(a.vectors), Counter(dict(a.clients))
        for key, total in b.vectors.items():
            sums[key] = sums[key] + total if key in sums else total
        groups.update(dict(b.clients))
        return CodeSums(
            sums, a.weight + b.weight, a.count + b.count, frozenset(), a.samples + b.samples,
            a.saturated + b.saturated, a.codes + b.codes, tuple(sorted(groups.items())),
        )  # fmt: skip

    def _groups(self, clients: NDArray[np.int64]) -> list[tuple[Any, list[int]]]:
        """The grids that these clients use, and the rows of each."""
        own = [self.codec.for_client(int(c)) for c in clients]
        return [(grid, [i for i, g in enumerate(own) if g == grid]) for grid in dict.fromkeys(own)]

    def decoded(self, acc: Sums, ctx: ServerContext) -> tuple[dict[tuple[str, bool], Tensor], Metrics]:
        """(the sums by name and weighing, numbers for the record)."""
        assert isinstance(acc, CodeSums)
        x, out = ctx.sent["x"], dict[tuple[str, bool], Tensor]()
        metrics: Metrics = {"secure_dropped": ctx.dropped, "saturated": acc.saturated / max(acc.codes, 1)}
        metrics |= acc.protocol or {}
        grids = {grid.bits: grid for grid in self.codec.grids()}
        largest = max((count for _, count in acc.clients), default=0)
        for bits, count in acc.clients:
            gone = ctx.dropped if count == largest and acc.protocol is None else 0
            session = self.session(count + gone, bits, ctx)
            if acc.protocol is None:
                check_neighbours(session, session.parties - gone)
            for name, what in self.uploads.items():
                for uniform in self.weighings(what):
                    total = acc.vectors[code_key(name, uniform, bits)].cpu().numpy()
                    if what.width is None:
                        total = session.signed(session.modulo(total.astype(session.word)))
                        v = grids[bits].from_grid(total[None] / 2**self.age_bits)[0] * dict(self.scales)[name]
                    else:
                        v = (total / FRACTION).astype(np.float32)
                    there = torch.from_numpy(v).to(x.device)
                    out[name, uniform] = out[name, uniform] + there if (name, uniform) in out else there
            for key, size in traffic(session, count).items() if acc.protocol is None else ():
                metrics[key] = metrics.get(key, 0) + size
        return out, metrics

    def session(self, clients: int, bits: int, ctx: ServerContext) -> Session:
        """The sum of so many clients that were asked."""
        if ctx.N < LEAST:  # a rehearsal of two clients: `check_run` refuses to begin with so few
            clients = LEAST + max(self.neighbours or 0, self.threshold or 0)
        if clients < LEAST:
            raise EngineError(
                f"{clients} clients of {bits} bits are in step {ctx.t + 1}, and a sum of fewer than {LEAST} hides none of them;"
                " use larger cohorts"
            )
        return self.planned_session(
            ctx.t.to_bytes(16, "little"), clients, bits, int(ctx.sizes.max()), ctx.layout.size
        )

    def planned_session(self, name: bytes, clients: int, bits: int, most: int, size: int) -> Session:
        """The sum of so many clients, of `most` samples at most, over a model of this size."""
        heaviest = (most if self.weights == "samples" else 1) << self.age_bits
        numbers = NUMBERS + sum(what.width or 0 for what in self.uploads.values())
        vectors = sum(len(self.weighings(what)) for what in self.uploads.values() if what.width is None)
        k, threshold = choose_neighbours(clients, self.neighbours, self.threshold)
        growth = (clients * heaviest + self.noise - 1).bit_length()
        length = vectors * size + numbers * pieces(bits)
        return Session(name, clients, k, threshold, bits + growth, length)

    def fewest(self) -> int:
        """The smallest cohort that has a sum."""
        for clients in range(LEAST, 2 * LEAST + (self.threshold or 0)):
            k, threshold = choose_neighbours(clients, self.neighbours, self.threshold)
            if threshold <= k < clients:
                return clients
        raise ConfigError(
            f"threshold={self.threshold} is more than neighbours={self.neighbours}; use fewer, or more neighbours"
        )

    def totals(self, acc: Sums, ctx: ServerContext) -> tuple[Vectors, Metrics]:
        sums, metrics = self.decoded(acc, ctx)
        declared = {(name, what.uniform) for name, what in self.uploads.items()}
        return {name: v for (name, uniform), v in sums.items() if (name, uniform) in declared}, metrics

    def close(self, acc: Sums, s: Tree, ctx: ServerContext) -> tuple[Vectors, Tree, Metrics]:
        assert isinstance(acc, CodeSums)
        sums, metrics = self.decoded(acc, ctx)
        means = {
            (name, uniform): v / (acc.count if uniform else acc.weight) for (name, uniform), v in sums.items()
        }
        return of_means(self.server, means, self.uploads, ctx, acc.samples / acc.count), s, metrics


def pieces(bits: int) -> int:
    """In how many a number is summed, each as small as a code."""
    return -(-NUMBER_BITS // (bits - 1))


def summing(algorithm: Algorithm) -> SecureMean | None:
    """The gather of an algorithm that gathers secure sums."""
    gather = algorithm.gather
    sums = gather.sums if isinstance(gather, Noised) else gather
    return sums if isinstance(sums, SecureMean) else None


def code_key(name: str, uniform: bool, bits: int) -> str:
    return f"{name}/{'uniform' if uniform else 'weighted'}/{bits}"


def of_means(
    server: Transform, means: Mapping[tuple[str, bool], Tensor], uploads: Mapping[str, Upload], ctx: ServerContext, n: float
) -> Vectors:  # fmt: skip
    """The means by name, and what server parts make of them: each account of the means that are weighed as it is."""
    out = {name: means[name, what.uniform] for name, what in uploads.items()}
    for uniform in (True, False):
        vectors = {name: means.get((name, uniform), v) for name, v in list(out.items()) if name in uploads}
        made = accounted(server, vectors, uploads, ctx, n)
        out |= {d.name: made[d.name] for d in server.accounts() if d.uniform == uniform}
    return out


def needs_both(
    server: Transform, uploads: Mapping[str, Upload], weights: str, even: bool = True
) -> bool | None:
    """Whether vectors are to be summed uniformly and by samples; None where no sums will do, tried on three clients.

    Unless they are `even`, they take different numbers of steps.
    """
    if not server.accounts():
        return False
    layout = Layout.from_shapes([("w", (2, 1)), ("b", (2,))])
    x, n, one = torch.zeros(4), torch.tensor([[1.0], [2.0], [5.0]]), torch.ones(3, 1)
    K = 2 * one if even else torch.tensor([[1.0], [4.0], [2.0]])
    sent = {"x": x[None], **{k: v[None] for k, v in server.send(server.init(x, layout), x, 3).items()}}
    drawn = torch.Generator().manual_seed(0)
    vectors = {name: torch.rand(3, what.size(layout), generator=drawn) for name, what in uploads.items()}
    declared = {**uploads, **{d.name: d for d in server.accounts()}}
    up = Uploads(np.arange(3), vectors, n, K, K, 0 * one, 0.1 * one.double(), sent, declared)
    single, p = server.account(up), up.p(weights)
    k = float((p * K).sum() / p.sum())
    ctx = ServerContext(0, 3, 3, 8.0, 0.1, k, k, 0.0, layout, np.array([1, 2, 5]), sent=sent)
    means = {
        (name, u): ((one if u else p) * v).sum(0) / (one if u else p).sum()
        for name, v in vectors.items()
        for u in (True, False)
    }
    for both in (False, True):
        some = (
            means
            if both
            else {(name, what.uniform): means[name, what.uniform] for name, what in uploads.items()}
        )
        made = of_means(server, some, uploads, ctx, float(n.mean()))
        right = {d.name: (one if d.uniform else p) for d in server.accounts()}
        if all(
            torch.allclose(made[k], (w * single[k]).sum(0) / w.sum(), rtol=1e-4, atol=1e-5)
            for k, w in right.items()
        ):
            return both
    return None


@builder
def secure(
    a: Algorithm,
    bits: int = 16,
    range: Range = 1.0,
    neighbours: int | None = None,
    threshold: int | None = None,
    rotate: bool = False,
) -> Algorithm:
    """Any algorithm whose server needs sums alone, with uploads that only clients can read (SecAgg+, Bell et al. 2020).

    Uploads are rounded to `bits` bits within ±`range`, one number or one for each name, and added modulo 2^b:
    x ← x − Σ_S w_i q_i s/Σ_S w_i. Every client shares masks with `neighbours` others, of whom `threshold` must stay; left
    out, both are chosen by the cohort's size.

    >>> import fedbraid as fb
    >>> task = fb.tasks.load("digits", clients=20, partition="label_chunks(2)")
    >>> algorithm = fb.secure(fb.fedavg(), bits=12)
    >>> result = fb.simulate(task, algorithm, fb.Work(lr=0.1, batch=10), fb.rounds(10, clients=5))
    >>> result.last("accuracy") > 0.45
    True
    """
    who = a.name.split("(")[0] or "this algorithm"
    for name, value, least in (("neighbours", neighbours, 2), ("threshold", threshold, 2)):
        if value is not None:
            integer(name, value, least)
    if (personal := a.rule.traits().personal) is not None and personal.has_no_global_model:
        raise ConfigError(f"{who} has no global model, so clients upload nothing to sum; leave out secure")
    if not a.gather.traits().is_weighted_mean:
        raise ConfigError(
            f"{who} gathers by {type(a.gather).__name__}, which is not the mean of single clients' uploads that a secure sum"
            " gives; use an algorithm that averages, or one whose clients remember, such as fedadavr(held='client'); call"
            " secure before private"
        )
    assert isinstance(a.gather, Mean)
    reach, scales = _ranges(who, a.uploads, range)
    codec = a.up.codec.instead_of_float32(Shared(bits, reach, rotate))
    if not codec.grids():
        raise ConfigError(
            f"{codec!r} gives every client a scale or positions of its own, so that codes do not add up; use"
            " codecs.shared(bits, range) under secure"
        )
    both = needs_both(a.server, a.uploads, a.gather.weights)
    if both is None:
        raise ConfigError(
            f"{who}'s server computes with every single client's numbers before it averages, and a secure sum shows it"
            " none; use an algorithm whose server needs means alone, such as fedavg, feddyn or scallion"
        )
    gather = SecureMean(
        a.gather.weights,
        a.gather.staleness,
        codec,
        scales,
        neighbours,
        threshold,
        a.uploads,
        a.server,
        both=both,
    )
    return replace(a, gather=gather, up=SecureUplink(codec, link=a.up.over(codec), scales=scales), name="")


def _ranges(who: str, uploads: Mapping[str, Upload], given: Range) -> tuple[float, Scales]:
    """(the grid's range, by what each vector is divided before it is put on the grid)."""
    vectors = {name: what for name, what in uploads.items() if what.width is None}
    for name, what in uploads.items():
        if what.width is None and not what.signed:
            raise ConfigError(
                f"{who} uploads {name!r}, which is never negative and crosses links as its root, and roots do not add up; use"
                " an algorithm that uploads updates alone, such as fedavg or fedadam"
            )
        if what.width is not None and (not what.uniform or what.discounts_staleness):
            raise ConfigError(
                f"{who} uploads the number {name!r}, which its server weighs client by client; use an algorithm that uploads"
                " updates alone, such as fedavg or fedadam"
            )
    by_name = dict(given) if isinstance(given, Mapping) else {}
    for name in by_name:
        if name not in vectors:
            raise unknown("upload", str(name), vectors)
    if not isinstance(given, Mapping):
        by_name = {name: given * what.clip_scale for name, what in vectors.items() if what.clip_scale}
    if missing := sorted(vectors.keys() - by_name.keys()):
        wanted = ", ".join(f"{name!r}: {by_name.get(name, 1.0)}" for name in vectors)
        raise ConfigError(
            f"{who} uploads {missing[0]!r}, whose range is not declared; give one for each name, such as range={{{wanted}}}"
        )
    for name, value in by_name.items():
        number(f"range of {name!r}", value, "(0, inf)", "spans no grid")
    reach = max(by_name.values(), default=1.0)
    return reach, tuple((name, value / reach) for name, value in by_name.items())


def check_run(algorithm: Algorithm, schedule: Schedule, clients: int, even: bool, real: bool) -> None:
    """Refuse, before anything runs, a schedule whose steps have no sum that hides anybody."""
    if not algorithm.gather.traits().sums_only:
        return
    gather, up, sums = algorithm.gather, algorithm.up, summing(algorithm)
    assert sums is not None
    if real:
        require_cryptography()
        if isinstance(up, SkellamNoise):
            raise ConfigError(
                "where='distributed' counts on the noise of every client that was planned, and real nodes drop out of sums; use"
                " where='server'"
            )
        if isinstance(schedule, Buffered) and schedule.buffer > clients:
            raise ConfigError(
                f"buffer={schedule.buffer} is more than the {clients} nodes, each of which keeps its upload until the buffer is"
                " summed; use a smaller buffer"
            )
    served = gather.server if isinstance(gather, Noised) else sums.server
    while isinstance(up, WrappedUplink) and not isinstance(up, SecureUplink):
        up = up.link
    if not isinstance(up, SecureUplink) or algorithm.server.accounts() != served.accounts():
        raise ConfigError(
            "a wrapper changed what secure sums; let secure, or private around it, be the outermost call"
        )
    cohort = clients
    if isinstance(schedule, Buffered):
        cohort = schedule.buffer
    elif isinstance(schedule, Rounds):
        given = schedule.clients
        cohort = min(map(len, given)) if isinstance(given, tuple) else schedule.cohort(clients)
        if schedule.select is not None:
            raise ConfigError(
                "select= reads single clients' losses, which a secure sum hides; leave one of the two out"
            )
        if schedule.sampling == "poisson" and cohort >= LEAST:
            q = schedule.rate(clients)
            few = sum(math.comb(clients, i) * q**i * (1 - q) ** (clients - i) for i in range(1, LEAST))
            if (chance := 1 - (1 - few) ** schedule.steps) > RARE:
                raise ConfigError(
                    f"one of {schedule.steps} Poisson rounds has one or two clients with a chance of {chance:.2g}, whose sum hides"
                    " neither; use larger cohorts, or sampling='fixed'"
                )
    if min(cohort, clients) < LEAST:
        raise ConfigError(
            f"steps of {cohort} of {clients} clients have no sum that hides any of them; use at least {LEAST}, with a buffer"
            " where clients are asynchronous"
        )
    ages = bool(algorithm.server.accounts()) and sums.staleness.kind != "constant"
    if schedule.asynchronous and (ages or not of_mean(algorithm.server, sums.uploads, with_sent=False)):
        raise ConfigError(
            "the server accounts for each upload by its version or age, and here they differ, which a sum does not tell apart;"
            " use rounds(…) with this algorithm"
        )
    if not even and needs_both(algorithm.server, sums.uploads, sums.weights, even) is None:
        raise ConfigError(
            "the server divides by the steps that each client takes, which differ here, and a sum does not tell them apart;"
            " use Work(steps=…)"
        )
