"""Robust averages of a cohort's vectors, some of which are hostile: what each rule decides, and how that is applied.

Median and trimmed mean (Yin et al. 2018), Krum (Blanchard et al. 2017), geometric median (Pillutla et al. 2022), centred
clip (Karimireddy et al. 2021), norm bound (Sun et al. 2019); before them nearest-neighbor mixing (Allouah et al. 2023) or
bucketing (Karimireddy et al. 2022).

A decision is made once for all vectors of the cohort's clients, from inner products in float64; then each named vector is
averaged by it. Sums have an order that no thread or block changes, so a compiled pass gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from fedbraid.core import accelerators as passes
from fedbraid.core.check import integer, number
from fedbraid.errors import ConfigError, unknown

NU, ITERATIONS = 1e-6, 8  # of Weiszfeld's method
CHUNK, LANES = 1024, 8  # columns that are added up on their own, and how many sums they are added to


# Passes over the cohort's vectors -------------------------------------------------------------------


def products(a: Tensor, b: Tensor | None = None) -> Tensor:
    """⟨a_i, b_k⟩ `[m, k]` of float32 rows in float64, or ⟨a_i, a_i⟩ `[m]`: products are exact, sums go by lanes and chunks."""
    made = passes.products(a, b)
    if made is not None:
        return made
    total = torch.zeros(len(a), 1 if b is None else len(b), dtype=torch.float64, device=a.device)
    for lo in range(0, a.shape[1], 64 * CHUNK):
        left = _chunked(a[:, lo : lo + 64 * CHUNK])
        right = left[:, None] if b is None else _chunked(b[:, lo : lo + 64 * CHUNK]).expand(len(a), *[-1] * 4)
        for i in range(len(a)):
            lanes = left[i, :, 0] * right[i, :, :, 0]
            for k in range(1, CHUNK // LANES):
                lanes += left[i, :, k] * right[i, :, :, k]
            while lanes.shape[2] > 1:
                half = lanes.shape[2] // 2
                lanes = lanes[:, :, :half] + lanes[:, :, half:]
            for chunk in lanes.squeeze(2).unbind(1):
                total[i] += chunk
    return total.squeeze(1) if b is None else total


def _chunked(v: Tensor) -> Tensor:
    """Columns by chunk, turn and lane, with zeros at the end."""
    chunks = -(-v.shape[1] // CHUNK)
    padded = torch.nn.functional.pad(v.double(), (0, chunks * CHUNK - v.shape[1]))
    return padded.view(len(v), chunks, CHUNK // LANES, LANES)


def combined(weights: Tensor, v: Tensor) -> Tensor:
    """Σ_i w_ki v_i `[k, d]`, added client by client in float64; a client of weight 0 has no part in it."""
    made = passes.combined(weights, v)
    if made is not None:
        return made
    out = torch.empty(len(weights), v.shape[1], device=v.device)
    for k, row in enumerate(weights.tolist()):
        total = torch.zeros(v.shape[1], dtype=torch.float64, device=v.device)
        for w, one in zip(row, v):
            if w:
                total += w * one.double()
        out[k] = total
    return out


def trimmed(v: Tensor, f: int) -> Tensor:
    """The mean `[d]` of every column without its f smallest and f largest values, added in float64 from the smallest on."""
    made = passes.trimmed(v, f)
    if made is not None:
        return made
    out, width = torch.empty(v.shape[1], device=v.device), max(1, 2**22 // len(v))
    for lo in range(0, v.shape[1], width):
        ordered = v[:, lo : lo + width].sort(0).values[f : len(v) - f].double()
        total = torch.zeros_like(ordered[0])
        for row in ordered:
            total += row
        out[lo : lo + width] = total / len(ordered)
    return out


# What a rule decides --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """How a cohort's vectors are averaged: Σ w_i v_i + Σ r_i b, b being the base of a rule that cuts; or trimmed by columns.

    `groups` are the averages that a trimmed mean is taken of, where they are not the clients themselves.
    """

    weights: Tensor | None = None  # float64 [m]
    rest: Tensor | None = None  # float64 [m], of the base; with the weights it sums to 1
    trim: int = 0
    groups: Tensor | None = None  # float64 [m', m]

    def apply(self, v: Tensor) -> Tensor:
        """The average `[d]` of vectors `[m, d]`, without the base's part."""
        if self.weights is not None:
            return combined(self.weights[None], v)[0]
        return trimmed(v if self.groups is None else combined(self.groups, v), self.trim)


@dataclass(frozen=True)
class RobustRule:
    """A robust average by its name, with its options; `before` averages neighbours or random groups first."""

    name: str
    f: int | None = None
    q: int | None = None
    tau: float | None = None
    norm: float | None = None
    quantile: float | None = None
    before: str | None = None
    s: int | None = None

    def __post_init__(self) -> None:
        if self.name not in _RULES:
            raise unknown("robust rule", self.name, _RULES)
        if self.before not in _BEFORE:
            raise unknown("before", self.before, [name for name in _BEFORE if name])
        allowed, needed = (set(a) | set(b) for a, b in zip(_RULES[self.name][:2], _BEFORE[self.before]))
        where = self.name + (f" after {self.before!r}" if self.before else "")
        for option, check in _CHECKS.items():
            if (value := getattr(self, option)) is None:
                if option in needed:
                    raise ConfigError(f"{where} needs {option}=, {_MEANING[option]}; give it")
            elif option not in allowed:
                raise ConfigError(f"{where} takes no {option}={value!r}; leave it out")
            else:
                check(option, value)
        if self.name == "norm_bound" and (self.norm is None) == (self.quantile is None):
            raise ConfigError("norm_bound needs norm= or quantile=, one of the two; give one")

    def __repr__(self) -> str:
        given = {f.name: value for f in fields(self)[1:] if (value := getattr(self, f.name)) is not None}
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in given.items())})"

    @property
    def selects(self) -> bool:
        """Whether it leaves clients out as a whole."""
        return self.name in ("krum", "multi_krum")

    @property
    def has_base(self) -> bool:
        """Whether what it cuts off is replaced by its last average."""
        return self.name == "centred_clip"

    def groups_of(self, m: int) -> int:
        """How many averages there are of m clients' vectors, before the rule."""
        return -(-m // (self.s or 2)) if self.before == "bucketing" else m

    def check(self, m: int) -> None:
        """Refuse a cohort of m clients of which f may be more hostile ones than the rule bears."""
        f, groups = self.f or 0, self.groups_of(m)
        of = f"{m} clients" if groups == m else f"{groups} groups of {m} clients"
        for bad, why in (
            (self.selects and groups <= 2 * f + 2, f"more than 2f + 2 = {2 * f + 2}"),
            (self.name == "trimmed_mean" and groups <= 2 * f, f"more than 2f = {2 * f}"),
            (self.before == "mixing" and m <= 2 * f, f"more than 2f = {2 * f}"),
            (self.q is not None and groups < self.q, f"at least q = {self.q}"),
        ):
            if bad:
                raise ConfigError(
                    f"{self!r} must have {why} vectors, got {of} in a server step; use a smaller f= or larger cohorts"
                )

    def decide(self, judged: Sequence[Judged], order: Tensor, lost: int = 0) -> Decision:
        """What to make of a cohort of whose vectors these are judged together.

        `order` `[m]` puts clients into random groups; `lost` hostile ones have been left out already.

        >>> v = torch.tensor([[1.0], [2.0], [3.0], [90.0]])
        >>> RobustRule("median").decide([Judged(v)], torch.arange(4)).apply(v)
        tensor([2.5000])
        """
        m, f, weigh = len(order), max(0, (self.f or 0) - lost), _RULES[self.name][2]
        if self.before == "mixing" or weigh in (_krum, _geometric_median) or (self.before and weigh):
            gram = total([products(j.v, j.v) / j.scale**2 for j in judged])
        else:
            gram = total([j.own() / j.scale**2 for j in judged]).diag_embed()
        groups = self._groups(gram, order, f)
        k = m if groups is None else len(groups)
        if weigh is None:
            most = (k - 1) // 2
            return Decision(trim=most if self.name == "median" else min(f, most), groups=groups)
        base = total([j.to_base() / j.scale**2 for j in judged])
        if groups is not None:
            gram, base = groups @ gram @ groups.T, torch.cat([groups @ base[:-1], base[-1:]])
        weights, mean = weigh(self, gram, base, f), torch.full_like(gram[0], 1 / k)
        if groups is not None:
            weights, mean = weights @ groups, mean @ groups
        return Decision(weights, mean - weights if weigh in (_centred_clip, _norm_bound) else None)

    def _groups(self, gram: Tensor, order: Tensor, f: int) -> Tensor | None:
        """The averages of clients that the rule is given, `[m', m]`, where it is not given the clients."""
        m = len(order)
        if self.before == "mixing":
            near = _distances(gram).argsort(dim=1, stable=True)[:, : max(1, m - f)]
            return torch.zeros_like(gram).scatter_(1, near, 1 / near.shape[1])
        if self.before == "bucketing":
            groups = torch.zeros_like(gram)[: self.groups_of(m)]
            groups[torch.arange(m, device=order.device) // (self.s or 2), order] = 1.0
            return groups / groups.sum(1, keepdim=True)
        return None


@dataclass(frozen=True)
class Judged:
    """One of the vectors by which clients are judged: `[m, d]`, its unit, and the rule's base."""

    v: Tensor
    squares: Tensor | None = None  # ⟨v_i, v_i⟩ `[m]`, where they are known
    scale: float = 1.0
    base: Tensor | None = None  # [d], zero where there is none

    def own(self) -> Tensor:
        """⟨v_i, v_i⟩ of every client."""
        return products(self.v) if self.squares is None else self.squares

    def to_base(self) -> Tensor:
        """⟨v_i, b⟩ of every client, then ⟨b, b⟩."""
        if self.base is None:
            return torch.zeros(len(self.v) + 1, dtype=torch.float64, device=self.v.device)
        b = self.base[None]
        return torch.cat([products(self.v, b)[:, 0], products(b)])


def total(parts: list[Tensor]) -> Tensor:
    """Their sum."""
    return sum(parts[1:], parts[0])


def _distances(gram: Tensor) -> Tensor:
    """‖v_i − v_j‖² of vectors with these inner products."""
    norms = gram.diagonal()
    return (norms[:, None] + norms - 2 * gram).clamp_min(0).fill_diagonal_(0)


def _krum(rule: RobustRule, gram: Tensor, base: Tensor, f: int) -> Tensor:
    """The mean of the q vectors with the least sum of squared distances to their m − f − 2 nearest."""
    m = len(gram)
    near = _distances(gram).fill_diagonal_(torch.inf).sort(1).values[:, : max(1, min(m - f - 2, m - 1))]
    q = 1 if rule.name == "krum" else min(m, rule.q or max(1, m - f))
    best = near.sum(1).argsort(stable=True)[:q]
    return torch.zeros_like(gram[0]).index_fill_(0, best, 1 / q)


def _geometric_median(rule: RobustRule, gram: Tensor, base: Tensor, f: int) -> Tensor:
    """Weiszfeld's iterations from the mean: weights 1/max(ν, ‖v_i − z‖)."""
    w = torch.full_like(gram[0], 1 / len(gram))
    for _ in range(ITERATIONS):
        toward = gram @ w
        away = (gram.diagonal() - 2 * toward + w @ toward).clamp_min(0).sqrt()
        w = 1 / away.clamp_min(NU)
        w = w / w.sum()
    return w


def _centred_clip(rule: RobustRule, gram: Tensor, base: Tensor, f: int) -> Tensor:
    """z + mean (v_i − z)·min(1, τ/‖v_i − z‖)."""
    assert rule.tau is not None
    away = (gram.diagonal() - 2 * base[:-1] + base[-1]).clamp_min(0).sqrt()
    return rule.tau / away.clamp_min(rule.tau) / len(away)


def _norm_bound(rule: RobustRule, gram: Tensor, base: Tensor, f: int) -> Tensor:
    """Each v_i scaled to at most C, or to a quantile of the norms."""
    norms = gram.diagonal().clamp_min(0).sqrt()
    most = float(norms.quantile(rule.quantile or 0.0)) if rule.norm is None else rule.norm
    shorter = most / norms.clamp_min(torch.finfo(norms.dtype).tiny)
    return torch.where(norms > most, shorter, 1.0) / len(norms)


_Weigh = Callable[[RobustRule, Tensor, Tensor, int], Tensor]

# By name: the options that it takes, those that it needs, how it weighs clients (None: column by column).
_RULES: dict[str, tuple[tuple[str, ...], tuple[str, ...], _Weigh | None]] = {
    "median": ((), (), None),
    "trimmed_mean": (("f",), ("f",), None),
    "krum": (("f",), ("f",), _krum),
    "multi_krum": (("f", "q"), ("f",), _krum),
    "geometric_median": ((), (), _geometric_median),
    "centred_clip": (("tau",), ("tau",), _centred_clip),
    "norm_bound": (("norm", "quantile"), (), _norm_bound),
}
_BEFORE: dict[str | None, tuple[tuple[str, ...], tuple[str, ...]]] = {
    None: ((), ()),
    "mixing": (("f",), ("f",)),
    "bucketing": (("s",), ()),
}
_CHECKS: dict[str, Callable[[str, object], None]] = {
    "f": partial(integer, least=0), "q": integer, "tau": partial(number, interval="(0, inf)", why="lets nothing through"),
    "norm": partial(number, interval="(0, inf)", why="lets nothing through"), "quantile": partial(number, interval="[0, 1]"),
    "s": integer,
}  # fmt: skip
_MEANING = {"f": "how many clients of a cohort may be hostile", "tau": "the radius of the clip"}
