"""Statistics over seeds: means with 95 % intervals, costs to reach a target, ranks and verdicts.

This module does not import torch. A history is a run's list of records, a group the runs that differ only in
their seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Any

from fedbraid.core.metric_names import RESERVED, falls
from fedbraid.run.formatting import Record, best, rounds_to

AXES = ("step", "bytes", "time", "flops", "energy")
BY_CLIENT = ("accuracy_clients", "accuracy_worst_tenth", "loss_clients")
METRICS = ("accuracy", "loss", "train_loss", "update_norm", "staleness")

# fmt: off
_T975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314,
    2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)
# fmt: on


def t975(freedom: int) -> float:
    """Student's t at 97.5 %, beyond the table by its expansion around the normal."""
    if freedom <= len(_T975):
        return _T975[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def t_test(differences: Sequence[float]) -> float:
    """The two-sided p-value of Student's paired test that these differences have no mean.

    >>> round(t_test([0.2, 0.1, 0.3, 0.2, 0.2]), 4), t_test([0.0, 0.0, 0.0])
    (0.0032, 1.0)
    """
    n, mean = len(differences), math.fsum(differences) / len(differences)
    variance = math.fsum((v - mean) ** 2 for v in differences) / max(1, n - 1)
    if n < 2 or variance == 0:
        return 1.0 if n < 2 or mean == 0 else 0.0
    t, freedom = abs(mean) / math.sqrt(variance / n), n - 1
    angle = math.atan(t / math.sqrt(freedom))
    term = total = math.cos(angle) if freedom % 2 else 1.0  # a finite sum, because the degrees are an integer
    for k in range(3 if freedom % 2 else 2, freedom, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    total = math.sin(angle) * (total if freedom > 1 else 0.0)
    inside = 2 / math.pi * (angle + total) if freedom % 2 else total
    return max(0.0, 1 - inside)


def holm(p: Sequence[float]) -> list[float]:
    """P-values adjusted for their number (Holm 1979): the family errs no more often than a single test.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, most = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        most = max(most, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = most
    return adjusted


def pair_tests(values: Mapping[str, Sequence[float]]) -> dict[frozenset[str], float]:
    """P-values of every pair of these, paired over seeds and adjusted for their number."""
    pairs = list(combinations(values, 2))
    p_values = [t_test([x - y for x, y in zip(values[a], values[b])]) for a, b in pairs]
    return {frozenset(pair): p for pair, p in zip(pairs, holm(p_values))}


def resolution(differences: Sequence[float], level: float) -> float:
    """The smallest mean at which differences with this scatter would be significant."""
    mean = math.fsum(differences) / len(differences)
    low, high = 0.0, 1e3 * max((abs(d - mean) for d in differences), default=0.0)
    for _ in range(60):
        middle = (low + high) / 2
        is_significant = t_test([d - mean + middle for d in differences]) <= level
        low, high = (low, middle) if is_significant else (middle, high)
    return high


@dataclass(frozen=True)
class Interval:
    """A mean and half its 95 % interval; None for a single value."""

    mean: float
    half: float | None
    count: int

    @property
    def low(self) -> float:
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half or 0.0)

    def is_separate(self, other: Interval) -> bool:
        """Whether both have intervals, which do not overlap."""
        both = self.half is not None and other.half is not None
        return both and (self.high < other.low or other.high < self.low)


def interval(values: Sequence[float]) -> Interval:
    """
    >>> found = interval([0.90, 0.92, 0.94])
    >>> f"{found.mean:.2f} ± {found.half:.3f}"
    '0.92 ± 0.050'
    """
    n, mean = len(values), math.fsum(values) / len(values)
    if n == 1:
        return Interval(mean, None, 1)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    return Interval(mean, t975(n - 1) * spread / math.sqrt(n), n)


# One run ------------------------------------------------------------------------------------------


def final(history: Sequence[Record], key: str) -> float | None:
    """The mean of a metric's last tenth, because curves of few clients jump from round to round."""
    values = [r[key] for r in history if key in r]
    tail = values[-max(1, len(values) // 10) :]
    return math.fsum(tail) / len(tail) if tail else None


def axes(history: Sequence[Record], flops: Sequence[float] | None = None) -> dict[str, list[float]]:
    """Cumulative costs by record: steps, bytes, simulated time and, if recorded, FLOPs and joules."""
    spent: dict[str, list[float]] = {
        "step": [r["step"] for r in history],
        "bytes": list(accumulate(r["bytes_up"] + r["bytes_down"] for r in history)),
        "time": [r["time"] for r in history],
    }
    if history and "energy" in history[0]:
        spent["energy"] = list(accumulate(r["energy"] for r in history))
    return spent if flops is None else spent | {"flops": list(accumulate(flops))}


def reach(history: Sequence[Record], spent: Mapping[str, Sequence[float]], target: float) -> dict[str, float]:
    """The costs until the accuracy first reached the target; empty if it never did."""
    step = rounds_to(history, target)
    at = next((i for i, r in enumerate(history) if r["step"] == step), None)
    return {} if at is None else {axis: values[at] for axis, values in spent.items()}


# A group ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runs:
    """Runs that differ only in their seed, under one name."""

    name: str
    seeds: Sequence[int]
    histories: Sequence[Sequence[Record]]
    flops: Sequence[Sequence[float] | None]

    @property
    def spent(self) -> list[dict[str, list[float]]]:
        return [axes(h, f) for h, f in zip(self.histories, self.flops)]

    def finals(self, key: str) -> dict[int, float]:
        """The final value by seed, of the seeds that have one."""
        values = {seed: final(h, key) for seed, h in zip(self.seeds, self.histories)}
        return {seed: v for seed, v in values.items() if v is not None}


def measured(groups: Sequence[Runs]) -> list[str]:
    """All metrics that are drawn over time: those of every run, and the task's."""
    evaluated = [r for g in groups for h in g.histories for r in (*h[:1], *h[-1:]) if "loss" in r]
    custom = {
        k
        for r in evaluated
        for k, v in r.items()
        if (k not in RESERVED or k in BY_CLIENT) and isinstance(v, float)
    }
    spent = ["epsilon"] if any("epsilon" in r for g in groups for h in g.histories for r in h[-1:]) else []
    return [*METRICS, *spent, *sorted(custom - {"epsilon"})]


def compared_by(groups: Sequence[Runs], metric: str | None = None) -> str | None:
    """The metric that runs are compared by: this one, else the accuracy, else the loss; None without evaluations."""
    for key in ("accuracy", "loss") if metric is None else (metric,):
        if any(key in r for g in groups for h in g.histories for r in h):
            return key
    return None


def summary(group: Runs, key: str, target: float | None) -> Record:
    """A group in figures."""
    finals = list(group.finals(key).values())
    histories = [h for h in group.histories if h]
    row: Record = {
        "name": group.name,
        "seeds": list(group.seeds),
        "steps": max((h[-1]["step"] for h in histories), default=0),
        "metric": key,
        "final": interval(finals) if finals else None,
        "best": max((b for h in histories if (b := best(h)) is not None), default=None),
        "loss": _mean([v for h in histories if (v := final(h, "loss")) is not None]),
        "bytes_up": _mean([sum(r["bytes_up"] for r in h) for h in histories]),
        "bytes_down": _mean([sum(r["bytes_down"] for r in h) for h in histories]),
        "time": _mean([h[-1]["time"] for h in histories]),
        "flops": _mean([math.fsum(f) for f in group.flops if f]),
        "energy": _mean([math.fsum(r["energy"] for r in h) for h in histories if "energy" in h[0]]),
        "epsilon": max((h[-1]["epsilon"] for h in histories if "epsilon" in h[-1]), default=None),
    }
    if target is not None:
        spent_at = [reach(h, s, target) for h, s in zip(group.histories, group.spent)]
        reached = [f for f in spent_at if f]
        row["reached"] = len(reached)
        row["to_target"] = {a: interval([f[a] for f in reached]) for a in AXES if reached and a in reached[0]}
    return row


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


POINTS = 300  # of a curve; a screen resolves no more


def curve(group: Runs, key: str, points: int = POINTS) -> Record | None:
    """A metric at the steps that all seeds have: cumulative costs, the mean and its interval."""
    spent = group.spent
    index = [{r["step"]: i for i, r in enumerate(h) if key in r} for h in group.histories]
    index, evaluated = [i for i in index if i], [n for n, i in enumerate(index) if i]
    common = sorted(set.intersection(*(set(i) for i in index))) if index else []
    if not common:
        return None
    if len(common) > points:
        common = [common[round(j * (len(common) - 1) / (points - 1))] for j in range(points)]
    at = [(step, [(n, index[j][step]) for j, n in enumerate(evaluated)]) for step in common]
    values = [[group.histories[n][i][key] for n, i in where] for _, where in at]
    bands = [interval(each) for each in values]
    complete = [a for a in AXES if all(a in spent[n] for n in evaluated)]
    return {
        "x": {
            a: [math.fsum(spent[n][a][i] for n, i in where) / len(where) for _, where in at] for a in complete
        },
        "mean": [b.mean for b in bands],
        "half": [b.half for b in bands] if len(evaluated) > 1 else None,
        "low": [min(each) for each in values] if len(evaluated) > 1 else None,
        "high": [max(each) for each in values] if len(evaluated) > 1 else None,
        "seeds": len(evaluated),
    }


# Several groups -----------------------------------------------------------------------------------


def ranks(groups: Sequence[Runs], key: str) -> dict[str, float | None]:
    """The mean rank over the seeds that all have, 1 being best; ties get the mean of their ranks."""
    finals = {g.name: g.finals(key) for g in groups}
    scored = {name: values for name, values in finals.items() if values}
    common = set.intersection(*(set(v) for v in scored.values())) if scored else set()
    sign = 1 if falls(key) else -1
    mean_ranks: dict[str, float | None] = dict.fromkeys(finals)
    for name in scored if common else ():
        each = []
        for seed in common:
            value, others = sign * scored[name][seed], [sign * v[seed] for v in scored.values()]
            each.append(1 + sum(o < value for o in others) + (sum(o == value for o in others) - 1) / 2)
        mean_ranks[name] = math.fsum(each) / len(each)
    return mean_ranks


def verdict(rows: Sequence[Record]) -> str:
    """A sentence: which entry is best if 95 % intervals do not overlap, or that there is no verdict."""
    with_results = [r for r in rows if r["final"] is not None]
    if len(with_results) < 2:
        return "Nothing to compare: fewer than two have a result."
    falling = falls(with_results[0]["metric"])
    first, *rest = sorted(with_results, key=lambda r: r["final"].mean if falling else -r["final"].mean)
    if any(r["final"].half is None for r in with_results):
        return f"{first['name']} came first, but one seed has no interval: no verdict. Run more seeds."
    level = [r["name"] for r in rest if not r["final"].is_separate(first["final"])]
    beaten = [r["name"] for r in rest if r["name"] not in level]
    if not level:
        return f"{first['name']} is best: its 95 % interval lies apart from all others."
    ahead = f" {first['name']} lies apart from {_listed(beaten)}." if beaten else ""
    return f"No verdict between {_listed([first['name'], *level])}: their 95 % intervals overlap.{ahead}"


def best_of(rows: Sequence[Record]) -> list[str]:
    """The entries that may be called best: one whose 95 % interval overlaps no other, or several that tie with the best.

    The list is empty if an entry has no interval.
    """
    with_results = [r for r in rows if r["final"] is not None]
    if len(with_results) < 2 or any(r["final"].half is None for r in with_results):
        return []
    falling = falls(with_results[0]["metric"])
    first = min(with_results, key=lambda r: r["final"].mean if falling else -r["final"].mean)
    return [r["name"] for r in with_results if r is first or not r["final"].is_separate(first["final"])]


def _listed(names: Sequence[str]) -> str:
    if len(names) > 5:
        names = [*names[:4], f"{len(names) - 4} others"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def plain(value: Any) -> Any:
    """Intervals as JSON."""
    if isinstance(value, Interval):
        return {"mean": value.mean, "half": value.half, "count": value.count}
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value
