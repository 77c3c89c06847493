"""Does memory make robust rules better? Attack × rule × algorithm on Fashion-MNIST and FEMNIST, 10 and 20 % hostile clients.

50 clients, 25 a round, softmax regression, 60 rounds of 5 local steps; IID and Dirichlet 0.3. f is what a round of 25 brings at
most (10 %) or in 997 rounds of 1,000 (20 %).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

import fedbraid as fb
from experiments._lib.reproduce import Cell, Claim, Line, markdown, spread, tail
from experiments._lib.reproduce import verdict as judge

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
DATA = {"fmnist": "Fashion-MNIST", "femnist": "FEMNIST"}
SPLITS = {"Dirichlet 0.3": "dirichlet(0.3, balanced=True)", "IID": "iid()"}
SHARES = {0.2: 8, 0.1: 5}  # hostile clients of all, and f
ATTACKS = {
    "none": "",
    "alie": ", z=1.5",
    "ipm": ", eps=0.5",
    "sign_flip": "",
    "label_flip": "",
}
RULES = {
    "mean": None,
    "median": "'median'",
    "trimmed mean": "'trimmed_mean', f={f}",
    "multi-Krum": "'multi_krum', f={f}",
    "geometric median": "'geometric_median'",
    "norm bound": "'norm_bound', quantile=0.5",
    "mixing, trimmed mean": "'trimmed_mean', before='mixing', f={f}",
}
ALGORITHMS = {
    "FedAvg": "fedavg(weights='uniform')",
    "FedAdaVR": "fedadavr(optimizer='sgd', lr=1.0, weights='uniform')",
    "SCAFFOLD": "scaffold(weights='uniform')",
    "AdaBest": "adabest(mu=0.02, beta=0.8, weights='uniform')",
}
PAIR = ("FedAdaVR", "FedAvg")  # the memory, and the same without
WORK, SCHEDULE = fb.Work(lr=0.05, steps=5, batch=32), fb.rounds(60, clients=25)

Done = Mapping[str, Line]


def name(data: str, split: str, share: float, attack: str, rule: str, algorithm: str, seed: int) -> str:
    return f"{data}/{split}/{share:.0%} {attack}/{rule}/{algorithm}/seed {seed}"


def cell(data: str, split: str, share: float, attack: str, rule: str, algorithm: str, seed: int) -> Cell:
    text = ALGORITHMS[algorithm]
    if attack != "none":
        text = f"attack({text}, '{attack}', share={share}{ATTACKS[attack]})"
    if RULES[rule] is not None:
        text = f"robust({text}, {RULES[rule].format(f=SHARES[share])})"
    return Cell(
        name(data, split, share, attack, rule, algorithm, seed),
        f"load('{data}', clients=50, partition={SPLITS[split]}, model='softmax_regression', seed={seed})",
        text, WORK, SCHEDULE, seed=seed, every=10, last=5,
    )  # fmt: skip


def cells() -> list[Cell]:
    """What the question needs first: FedAvg and FedAdaVR with a fifth of clients hostile, a seed after the other."""
    found = [
        cell(data, split, share, attack, rule, algorithm, seed)
        for algorithms in (PAIR, tuple(a for a in ALGORITHMS if a not in PAIR))
        for share in SHARES
        for seed in SEEDS
        for data in DATA
        for split in SPLITS
        for attack in ATTACKS
        for rule in RULES
        for algorithm in algorithms
        if attack != "none" or share == 0.2  # without an attack the share is f alone
    ]
    return sorted(found, key=lambda c: "/10% " in c.name)


def full() -> list[Cell]:
    return []


def final(line: Line) -> float:
    return 100 * tail(line, 5)


def found(
    done: Done, data: str, split: str, share: float, attack: str, rule: str, algorithm: str
) -> list[float]:
    """The final accuracies of the seeds that are done; one that diverged counts as it ended."""
    lines = [done.get(name(data, split, share, attack, rule, algorithm, seed)) for seed in SEEDS]
    return [0.0 if line["diverged"] else final(line) for line in lines if line is not None]


def table(done: Done, data: str, split: str, share: float) -> str:
    """A row a rule and attack, a column an algorithm."""
    rows = []
    for attack in ATTACKS:
        for rule in RULES:
            each = [found(done, data, split, share, attack, rule, a) for a in ALGORITHMS]
            if any(each):
                rows.append([attack, rule, *(spread(values) for values in each)])
    return markdown(["attack", "rule", *ALGORITHMS], rows, text=(0, 1))


def verdict(done: Done) -> str:
    """For each algorithm the best rule's accuracy under the attack that is worst for that rule, beside FedAvg's."""
    rows = []
    for share in SHARES:
        for data in DATA:
            for split in SPLITS:
                row = [f"{DATA[data]}, {split}, {share:.0%}"]
                for a in ALGORITHMS:
                    worst = {}
                    for rule in RULES:
                        means = [
                            statistics.mean(values)
                            for attack in ATTACKS
                            if attack != "none"
                            and (values := found(done, data, split, share, attack, rule, a))
                        ]
                        if len(means) == len(ATTACKS) - 1:
                            worst[rule] = min(means)
                    best = max(worst, key=lambda rule: worst[rule], default=None)
                    row.append("–" if best is None else f"{worst[best]:.1f} ({best})")
                rows.append(row)
    return markdown(["", *ALGORITHMS], rows)


def gains(
    done: Done, data: str, split: str, rule: str, attacked: bool = True, share: float = 0.2
) -> list[float]:
    """By attack and seed, the accuracy of FedAdaVR less that of FedAvg under the same rule, in points."""
    found = []
    for attack in (a for a in ATTACKS if (a != "none") == attacked):
        for seed in SEEDS:
            pair = [done.get(name(data, split, share, attack, rule, a, seed)) for a in PAIR]
            if all(pair):
                one, other = (0.0 if line["diverged"] else final(line) for line in pair if line)
                found.append(one - other)
    return found


def worth(done: Done) -> str:
    """What the memory changes under each rule: the mean over attacks and seeds, and in how many pairs it gains."""
    rows = []
    for rule in RULES:
        row = [rule]
        for data in DATA:
            for split in SPLITS:
                values = gains(done, data, split, rule)
                above = sum(v > 0 for v in values)
                row.append(f"{statistics.fmean(values):+.1f} ({above} of {len(values)})" if values else "–")
        rows.append(row)
    return markdown(["rule", *(f"{title}, {split}" for title in DATA.values() for split in SPLITS)], rows)


def state(done: Done) -> str:
    parts: dict[str, list[str]] = {}
    for c in cells():
        data, split, attacked, _, algorithm, _ = c.name.split("/")
        which = " and ".join(PAIR) if algorithm in PAIR else "SCAFFOLD and AdaBest"
        parts.setdefault(f"{DATA[data]}, {split}, {attacked.split()[0]}: {which}", []).append(c.name)
    rows = [[part, f"{sum(n in done for n in names)} of {len(names)}"] for part, names in parts.items()]
    return markdown(["part", "cells done"], rows)


def report(done: Done) -> dict[str, str]:
    tables = {"state": state(done), "worth": worth(done), "verdict": verdict(done)}
    for share in SHARES:
        for data in DATA:
            for split in SPLITS:
                tables[f"{data} {split} {share:.0%}"] = table(done, data, split, share)
    return tables


ROBUST = tuple(rule for rule in RULES if rule != "mean")


def answered(done: Done) -> dict[tuple[str, str], list[float]]:
    """Gains under all robust rules and attacks, of those data and partitions that have at least one whole seed."""
    whole = len(ROBUST) * (len(ATTACKS) - 1)
    found = {(d, s): [g for rule in ROBUST for g in gains(done, d, s, rule)] for d in DATA for s in SPLITS}
    return {key: values for key, values in found.items() if len(values) >= whole}


def sentences(done: Done) -> list[str]:
    """What the cells that are done say, and how many they are."""
    said = []
    for (data, split), values in answered(done).items():
        plain = gains(done, data, split, "mean")
        said.append(
            f"{DATA[data]}, {split}, 20 % hostile: under a robust rule the memory changes accuracy by {statistics.fmean(values):+.1f} points"
            f" on average ({sum(v > 0 for v in values)} of {len(values)} pairs of equal rule, attack and seed gain),"
            f" under the plain mean by {statistics.fmean(plain):+.1f}."
        )
    every = cells()
    said.append(
        f"{sum(c.name in done for c in every)} of {len(every)} cells are done; the table of what is done says which."
    )
    return said


def claims(done: Done) -> list[Claim]:
    found = answered(done)
    told = [
        f"{DATA[data]}, {split} {statistics.fmean(v):+.1f} points, {sum(g > 0 for g in v)} of {len(v)} pairs"
        for (data, split), v in found.items()
    ]
    return [
        Claim(
            "memory under robust rules", "variance reduction makes robust rules better (theory of Byz-VR-MARINA)",
            judge([statistics.fmean(v) > 0 for v in found.values()]),
            f"20 % hostile, four attacks, six rules, FedAdaVR less FedAvg: {'; '.join(told) or 'not run'}",
            "fedbraid reproduce hostile --cells '*/20% */*/Fed*/seed *'",
        )
    ]  # fmt: skip
