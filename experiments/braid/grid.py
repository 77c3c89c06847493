"""The braid: memory, adaptive server, 4-bit links with a hidden state and asynchrony together, beside each alone.

Question, written down before any run: with equal devices and equal tuning, does the braid need less simulated time
and fewer uploaded bytes to the target than every strand alone, at no lower final accuracy? And does every braid
without one strand lose on at least one of the three? Paired over seeds; a verdict only where the 95 % interval of
the paired ratio excludes 1.

Scenario A: CIFAR-10 over 250 clients of one class each. Scenario B: Fashion-MNIST on 1,500 phones. Nine settings a
row (three client rates by three of the server), on a seed of their own, judged on clients that do not train; then
five other seeds. A row's seeds appear among the cells once all of its settings are done. In scenario A tuning chose
the least or the largest client rate for most rows, so the braid and all that its claims stand on have one more on
either side: fifteen settings for each of these rows, which count once all of them have theirs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fedbraid as fb
from experiments._lib.reproduce import (
    Cell,
    Claim,
    Line,
    Panel,
    markdown,
    over_seeds,
    picture,
    pictured,
    spread,
    tail,
    verdict,
)
from fedbraid.core import rng
from fedbraid.core.algorithm import Algorithm
from fedbraid.study.energy import PROFILES
from fedbraid.study.stats import interval

HERE = Path(__file__).parent
TUNING, SEEDS = 100, (101, 102, 103, 104, 105)
KEEP = (
    "accuracy", "accuracy_worst_tenth", "loss", "time", "bytes_up", "bytes_down", "bytes_broadcast", "flops",
)  # fmt: skip


# Rows -------------------------------------------------------------------------------------------------

LINKS = "hidden_state(with_codecs({}, up=qsgd(4), down=qsgd(4)))"
MEMORY = "fedadavr(optimizer='{}', lr={{}}, memory='int4', weights='uniform')"
BRAID = LINKS.format(MEMORY.format("adabelief"))
PLAIN_RATES, ADAPTIVE_RATES, FORGETTING = (0.3, 1.0, 3.0), (0.0003, 0.001, 0.003), (0.6, 0.8, 0.9)


def with_bias(mu: float) -> Callable[[float], Algorithm]:
    """The braid whose clients follow AdaBest's rule; its server's estimate is left out, a second momentum."""

    def make(rate: float) -> Algorithm:
        braid = fb.fedadavr(optimizer="adabelief", lr=rate, memory="int4", weights="uniform")
        four = fb.codecs.qsgd(4)
        made = replace(braid, rule=fb.adabest(mu=mu).rule, name="")
        return fb.hidden_state(fb.with_codecs(made, up=four, down=four))

    return make


@dataclass(frozen=True)
class Row:
    """A contestant: its algorithm with a place for the server's setting, the three it may have, and its schedule."""

    name: str
    algorithm: str | Callable[[float], Algorithm]
    rates: tuple[float, ...]
    asynchronous: bool = False
    kind: str = "single"  # or "braid", "without", "neutral"


MAIN = (
    Row("braid", BRAID, ADAPTIVE_RATES, True, "braid"),
    Row("FedAdaVR", "fedadavr(optimizer='adabelief', lr={}, weights='uniform')", ADAPTIVE_RATES),
    Row("FedAdaBelief", "fedadabelief(lr={}, weights='uniform')", ADAPTIVE_RATES),
    Row("QAFeL", "qafel(lr={}, up=qsgd(4), down=qsgd(4))", PLAIN_RATES, True),
    Row("FedVARP", "fedvarp(lr={}, weights='uniform')", PLAIN_RATES),
    Row("FedAvg", "fedavg(lr={}, weights='uniform')", PLAIN_RATES),
)
WITHOUT = (
    Row("braid without memory", LINKS.format("fedadabelief(lr={}, weights='uniform')"), ADAPTIVE_RATES, True, "without"),
    Row("braid without asynchrony", BRAID, ADAPTIVE_RATES, False, "without"),
    Row("braid without links", MEMORY.format("adabelief"), ADAPTIVE_RATES, True, "without"),
    Row("braid without adaptive step", LINKS.format(MEMORY.format("sgd")), PLAIN_RATES, True, "without"),
)  # fmt: skip
OTHERS = (
    Row("FedBuff", "fedbuff(lr={})", PLAIN_RATES, True),
    Row("CA²FL", "ca2fl(lr={})", PLAIN_RATES, True),
    Row("FedAvg, 4-bit links", LINKS.format("fedavg(lr={}, weights='uniform')"), PLAIN_RATES),
    Row("AdaBest", "adabest(mu=0.02, beta={}, weights='uniform')", FORGETTING),
)
NEUTRAL = (
    Row("braid, FedShift", f"fedshift({BRAID})", ADAPTIVE_RATES, True, "neutral"),
    Row("braid, AdaBest's clients, μ 0.02", with_bias(0.02), ADAPTIVE_RATES, True, "neutral"),
    Row("braid, AdaBest's clients, μ 0.1", with_bias(0.1), ADAPTIVE_RATES, True, "neutral"),
)
ROWS = (*MAIN, *WITHOUT, *OTHERS, *NEUTRAL)


# Scenarios --------------------------------------------------------------------------------------------


def strided_net() -> nn.Module:
    """The network of `experiments/fedadavr`: two strided GroupNorm convolutions, 11,082 weights."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def cifar10(seed: int) -> fb.Task:
    return fb.tasks.load(
        "cifar10", clients=250, partition="label_chunks(1)", seed=seed, model=strided_net, test_shares=True
    )


def phones(seed: int) -> fb.Task:
    return fb.tasks.load("fmnist", clients=1500, partition="label_chunks(2)", seed=seed, test_shares=True)


def held_out(task: fb.Task, each: int) -> fb.Task:
    """The task of the other clients, tested on those held out: so many by the label of their first sample."""
    labels = np.asarray(task.targets)[np.asarray(task.rows)[task.offsets[:-1]]]
    order = rng.generator(TUNING, "braid hold-out").permutation(task.clients)
    held = np.sort(np.concatenate([order[labels[order] == k][:each] for k in np.unique(labels)]))
    kept = np.setdiff1d(np.arange(task.clients), held)
    parts, judges = (
        [task.rows[task.offsets[c] : task.offsets[c + 1]] for c in some] for some in (kept, held)
    )
    rows, counts = torch.cat(judges), [len(p) for p in judges]
    left = [0] * (len(kept) - len(held))  # those held out are given to the first clients as local test sets
    return replace(
        task, rows=torch.cat(parts), offsets=np.cumsum([0, *(len(p) for p in parts)]),
        test=(task.inputs[rows], task.targets[rows]), test_offsets=np.cumsum([0, *counts, *left]), spec=None,
    )  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """A task, how clients train, and the same stretch of simulated time for every row."""

    load: Callable[[int], fb.Task]
    held: int  # clients held out for tuning, by label
    client_rates: tuple[float, ...]
    more_rates: tuple[float, ...]  # of clients, for the rows that claims are about
    work: fb.Work
    rounds: fb.schedule.Rounds
    buffered: fb.schedule.Buffered
    tests: int  # over a run
    targets: tuple[float, ...]
    unit: str  # of time
    per_unit: float = 1.0  # of the simulated clock

    def schedule(self, row: Row) -> fb.schedule.Schedule:
        return self.buffered if row.asynchronous else self.rounds


def thin() -> fb.clock.bandwidth:
    return fb.clock.bandwidth(up=2e4, down=2e5)


def minute() -> fb.clock.lognormal:
    return fb.clock.lognormal(math.log(60.0), 0.5)


SCENARIOS = {
    # The slowest of five half-normal durations takes 1.6 units in the mean, five uploads of five busy devices 0.8.
    "A": Scenario(
        cifar10, 3, (0.001, 0.00316, 0.01), (0.000316, 0.0316), fb.Work(epochs=1, batch=20, momentum=0.9),
        fb.rounds(300, clients=5, durations=fb.clock.halfnormal()), fb.buffered(600, buffer=5, concurrency=5), 30, (0.4,), "units",
    ),
    "B": Scenario(
        phones, 10, (0.01, 0.0316, 0.1), (), fb.Work(epochs=2, batch=20),
        fb.rounds(600, clients=10, durations=minute(), bandwidth=thin(), availability=fb.clock.availability("phones")),
        fb.buffered(
            1200, buffer=10, concurrency=10, arrivals="closed", durations=minute(), bandwidth=thin(),
            availability=fb.clock.availability("phones"),
        ), 50, (0.75, 0.82), "hours", 3600.0,
    ),
}  # fmt: skip


@cache
def task_of(which: str, seed: int) -> Callable[[], fb.Task]:
    scenario = SCENARIOS[which]

    def make() -> fb.Task:
        return held_out(scenario.load(seed), scenario.held) if seed == TUNING else scenario.load(seed)

    make.__name__ = f"{scenario.load.__name__}_{'held_out' if seed == TUNING else seed}"
    return make


# Cells ------------------------------------------------------------------------------------------------

Setting = tuple[float, float]  # the client's rate, the server's


def algorithm(row: Row, rate: float) -> str | Callable[[], Algorithm]:
    if isinstance(row.algorithm, str):
        return row.algorithm.format(f"{rate:g}")
    make = row.algorithm

    def made() -> Algorithm:
        return make(rate)

    made.__name__ = f"{row.name}, {rate:g}"
    return made


def cell(which: str, row: Row, setting: Setting, seed: int) -> Cell:
    scenario, (client, server) = SCENARIOS[which], setting
    schedule = scenario.schedule(row)
    name = (
        f"tune-{which}/{row.name}/client {client:g}, server {server:g}"
        if seed == TUNING
        else f"{which}/{row.name}/seed {seed}"
    )
    return Cell(
        name, task_of(which, seed), algorithm(row, server), replace(scenario.work, lr=client), schedule, seed=seed,
        every=schedule.steps // (20 if seed == TUNING else scenario.tests), keep=KEEP, by_client=True,
    )  # fmt: skip


def tuning(which: str, row: Row, rates: Sequence[float] | None = None) -> dict[Setting, Cell]:
    """The settings of a row with these client rates, the three of all rows unless others are given."""
    chosen = SCENARIOS[which].client_rates if rates is None else rates
    return {(c, s): cell(which, row, (c, s), TUNING) for c in chosen for s in row.rates}


def lines_of(part: str) -> dict[str, Line]:
    path = HERE / "results" / f"{part}.jsonl"
    lines = [json.loads(t) for t in path.read_text().splitlines()] if path.exists() else []
    return {line["cell"]: line for line in lines}


def final(line: Line) -> float:
    """Mean accuracy over the last fifth, in percent; chance for a run that diverged."""
    return 10.0 if line["diverged"] else 100 * tail(line, line["steps"] // 5)


def has_more(which: str, done: Mapping[str, Line]) -> bool:
    """Whether every row that a claim is about has been run at the further client rates, too."""
    more = SCENARIOS[which].more_rates
    wanted = [c.name for row in (*MAIN, *WITHOUT) for c in tuning(which, row, more).values()]
    return bool(wanted) and all(name in done for name in wanted)


def settings(which: str, row: Row, done: Mapping[str, Line]) -> dict[Setting, Cell]:
    """All that a row's setting is chosen from."""
    more = SCENARIOS[which].more_rates if row in (*MAIN, *WITHOUT) and has_more(which, done) else ()
    return tuning(which, row, (*SCENARIOS[which].client_rates, *more))


def best(which: str, row: Row, done: Mapping[str, Line]) -> Setting | None:
    """The setting that is best on the held-out clients, once all are there."""
    tried = {setting: done.get(c.name) for setting, c in settings(which, row, done).items()}
    found = {setting: final(line) for setting, line in tried.items() if line is not None}
    return max(found, key=lambda setting: found[setting]) if len(found) == len(tried) else None


def seeds(which: str, row: Row, done: Mapping[str, Line]) -> list[Cell]:
    chosen = best(which, row, done)
    return [] if chosen is None else [cell(which, row, chosen, seed) for seed in SEEDS]


def cells() -> list[Cell]:
    found: list[Cell] = []
    for which in SCENARIOS:
        done = lines_of(f"tune-{which}")
        for rows in (MAIN, WITHOUT, OTHERS, NEUTRAL):
            found += [c for row in rows for c in tuning(which, row).values()]
            of_row = [seeds(which, row, done) for row in rows]
            found += [c for same_seed in zip(*[some for some in of_row if some]) for c in same_seed]
        more = SCENARIOS[which].more_rates
        found += [c for row in (*MAIN, *WITHOUT) for c in tuning(which, row, more).values()]
    return found


def full() -> list[Cell]:
    return []


# Measures ---------------------------------------------------------------------------------------------

Done = Mapping[str, Line]
README_ROWS = ("FedAvg", "FedAdaBelief", "FedVARP", "FedAdaVR", "QAFeL", "braid")  # on the first screen


def of_row(done: Done, which: str, row: Row) -> dict[int, Line]:
    """The line of every seed that has been run."""
    return {s: line for s in SEEDS if (line := done.get(f"{which}/{row.name}/seed {s}")) is not None}


def reached(line: Line, target: float) -> int | None:
    """Where in the curve the target is first seen to be reached."""
    return next((i for i, a in enumerate(line["curve"]["accuracy"]) if a is not None and a >= target), None)


def spent(line: Line, key: str, target: float) -> float | None:
    """What was spent by the first test that reached the target, None where none did."""
    at = reached(line, target)
    return None if at is None else spent_by(line, key, at)


def spent_by(line: Line, key: str, at: int) -> float:
    """What was spent by a test; joules of computing and of messages, without those of waiting for a network."""
    if key == "joules":
        return PHONE.joules(*(line["curve"][k][at] for k in ("flops", "bytes_up", "bytes_down")))
    return float(line["curve"][key][at])


def ended(line: Line, key: str = "accuracy") -> float:
    """A measurement over the last fifth, in percent; 0 where the run diverged."""
    return 0.0 if line["diverged"] else 100 * tail(line, line["steps"] // 5, key)


PHONE = PROFILES["phone-wifi"]
COSTS = (
    ("time", 1.0, 0), ("bytes_up", 1e6, 1), ("bytes_down", 1e6, 1), ("bytes_broadcast", 1e6, 1), ("joules", 1.0, 0),
)  # fmt: skip
PAIRED = ("time", "bytes_up", "bytes_down", "joules")


def to_target(lines: Mapping[int, Line], key: str, target: float, scale: float, digits: int) -> str:
    """What reaching the target took, mean and deviation over the seeds that do, and how many those are."""
    found = [v / scale for x in lines.values() if (v := spent(x, key, target)) is not None]
    missed = "" if len(found) == len(lines) else f" ({len(found)} of {len(lines)})"
    return (spread(found, digits) if found else "not reached") + (missed if found else "")


def table(done: Done, which: str, rows: Sequence[Row], target: float) -> str:
    head = [
        f"scenario {which}", "settings chosen (client, server)", "seeds", f"{SCENARIOS[which].unit} to {100 * target:.0f} %", "MB up to it",
        "MB down to it, to each client by itself", "MB broadcast once", "joules of all clients", "accuracy, last fifth",
        "worst tenth of clients",
    ]  # fmt: skip
    made = []
    for row in rows:
        lines, chosen = of_row(done, which, row), best(which, row, done)
        if chosen is None:
            continue
        costs = [
            to_target(lines, k, target, SCENARIOS[which].per_unit if k == "time" else scale, digits)
            if lines
            else "–"
            for k, scale, digits in COSTS
        ]
        ends = [spread([ended(x, k) for x in lines.values()]) for k in ("accuracy", "accuracy_worst_tenth")]
        made.append([row.name, f"{chosen[0]:g}, {chosen[1]:g}", str(len(lines)), *costs, *ends])
    return markdown(head, made, text=(0, 1))


@dataclass(frozen=True)
class Ratio:
    """What another row spends to the target for what the braid spends, of one seed.

    Where only one of the two gets there, the other enters with all that its run spent: the ratio is at least that
    much where the row does not, and at most where the braid does not. Where neither does there is no ratio.
    """

    value: float
    bound: int = 0  # 1: at least the value; -1: at most


def ratios(done: Done, which: str, other: Row, key: str, target: float) -> list[Ratio]:
    """By seed, what the other spends for what the braid spends."""
    mine, theirs = of_row(done, which, BRAIDED), of_row(done, which, other)
    found = []
    for seed in sorted(mine.keys() & theirs.keys()):
        one, two = mine[seed], theirs[seed]
        a, b = spent(one, key, target), spent(two, key, target)
        if a is not None and b is not None:
            found.append(Ratio(b / a))
        elif a is not None:
            found.append(Ratio(spent_by(two, key, -1) / a, 1))
        elif b is not None:
            found.append(Ratio(b / spent_by(one, key, -1), -1))
    return found


def judged(found: Sequence[Ratio]) -> tuple[str, int]:
    """(the paired ratio with its 95 % interval, by logarithms; 1 if that is above 1, -1 if below, 0 if it holds 1).

    A ratio that is only known to be at least so much cannot show that the braid spends more, and the other way round.

    >>> judged([Ratio(2.0), Ratio(2.2), Ratio(1.9)]), judged([Ratio(1.5)])
    (('2.03 (1.69 to 2.44)', 1), ('1.50 (1 seed)', 0))
    >>> judged([Ratio(2.0), Ratio(2.2, 1), Ratio(1.9)]), judged([Ratio(0.5, 1), Ratio(0.52)])
    (('≥ 2.03 (1.69 to 2.44), not reached in 1 of 3', 1), ('≥ 0.51 (0.40 to 0.65), not reached in 1 of 2', 0))
    """
    if len(found) < 2:
        return (f"{found[0].value:.2f} (1 seed)" if found else "–"), 0
    over = interval([math.log(ratio.value) for ratio in found])
    low, middle, high = (math.exp(v) for v in (over.low, over.mean, over.high))
    more, less = (sum(ratio.bound == sign for ratio in found) for sign in (1, -1))
    mark = "≥ " if more and not less else "≤ " if less and not more else "≈ " if less else ""
    said = f"{mark}{middle:.2f} ({low:.2f} to {high:.2f})"
    said += f", not reached in {more} of {len(found)}" if more else ""
    said += f", by the braid not in {less} of {len(found)}" if less else ""
    return said, 1 if low > 1 and not less else -1 if high < 1 and not more else 0


def gains(done: Done, which: str, other: Row) -> list[float]:
    """By seed, the braid's accuracy over the last fifth less the other's, in points."""
    mine, theirs = of_row(done, which, BRAIDED), of_row(done, which, other)
    return [ended(mine[s]) - ended(theirs[s]) for s in sorted(mine.keys() & theirs.keys())]


def in_points(values: Sequence[float]) -> tuple[str, int]:
    """(the paired difference with its 95 % interval, whether it is above 0, below it or neither)."""
    if len(values) < 2:
        return (f"{values[0]:+.1f} (1 seed)" if values else "–"), 0
    found = interval(list(values))
    half = found.half or 0.0
    return f"{found.mean:+.1f} ± {half:.1f}", 1 if found.mean > half else -1 if found.mean < -half else 0


BRAIDED = MAIN[0]


def versus(done: Done, which: str, target: float) -> str:
    """Every row for the braid's, paired by seed: above 1 the braid spends less."""
    rows = []
    for row in ROWS:
        if row is not BRAIDED and (common := gains(done, which, row)):
            costs = [judged(ratios(done, which, row, key, target))[0].partition(",")[0] for key in PAIRED]
            lines = of_row(done, which, row).values()
            there = sum(reached(line, target) is not None for line in lines)
            rows.append(
                [row.name, str(len(common)), f"{there} of {len(lines)}", *costs, in_points(common)[0]]
            )
    head = [
        f"scenario {which}: the row's for the braid's", "seeds", f"that reach {100 * target:.0f} %", SCENARIOS[which].unit, "MB up", "MB down",
        "joules", "the braid's accuracy less the row's, points",
    ]  # fmt: skip
    return markdown(head, rows)


def status_table(done: Done) -> str:
    rows = []
    for which in SCENARIOS:
        for row in ROWS:
            wanted = settings(which, row, done)
            tried = sum(c.name in done for c in wanted.values())
            if tried or which == "A":
                runs = f"{len(of_row(done, which, row))} of {len(SEEDS)}"
                rows.append([which, row.name, f"{tried} of {len(wanted)}", runs])
    rows += [
        [which, "all", "0 of 9", "0 of 5"] for which in SCENARIOS if not any(r[0] == which for r in rows)
    ]
    return markdown(["scenario", "row", "settings tried", "seeds run"], rows, text=(0, 1))


def draw(done: Done, which: str) -> None:
    """Accuracy over bytes up and over time, mean and range over seeds: beside the strands, and without one of them."""
    panels = []
    for rows, title in ((MAIN, "beside its strands"), ((BRAIDED, *WITHOUT), "without one strand")):
        for key, label, scale in (
            ("bytes_up", "MB up", 1e6),
            ("time", f"{SCENARIOS[which].unit} of simulated time", SCENARIOS[which].per_unit),
        ):
            curves = []
            for row in rows:
                lines = [x for x in of_row(done, which, row).values() if not x["diverged"]]
                if lines:
                    scaled = [
                        {"curve": {**x["curve"], key: [v / scale for v in x["curve"][key]]}} for x in lines
                    ]
                    name = row.name.removeprefix("braid ")
                    curves.append(over_seeds(name, scaled, x=key, grey=row.name == "FedAvg"))
            if len(curves) > 1:
                about = f"the braid {title}, scenario {which}"
                level = {f"{100 * target:.0f} %": target for target in SCENARIOS[which].targets}
                panels.append(Panel(about, curves, x=label, log_x=key == "bytes_up", level=level))
    picture(HERE / f"scenario_{which}.png", panels, columns=2)


def report(done: Done) -> dict[str, str]:
    tables = {"state": status_table(done)}
    for which, scenario in SCENARIOS.items():
        for row in scenario.targets:
            name = f"{which} {100 * row:.0f}"
            tables[name] = table(done, which, ROWS, row)
            tables[f"{name} paired"] = versus(done, which, row)
        draw(done, which)
        tables[f"picture {which}"] = (
            pictured(HERE / f"scenario_{which}.png", f"accuracy over MB up and over {scenario.unit}")
            or "Not run yet."
        )
    shown = [row for row in ROWS if row.name in README_ROWS]
    order = sorted(shown, key=lambda row: README_ROWS.index(row.name))
    return tables | {"first screen": first_screen(done, order), "strands": strands(done)}


def first_screen(done: Done, rows: Sequence[Row]) -> str:
    """Scenario A in five numbers a row."""
    target, made = SCENARIOS["A"].targets[0], []
    for row in rows:
        if lines := of_row(done, "A", row):
            costs = [to_target(lines, k, target, scale, digits) for k, scale, digits in COSTS[:3]]
            ends = [spread([ended(x, k) for x in lines.values()]) for k in KEEP[:2]]
            made.append([row.name, *costs, *ends])
    head = [
        "CIFAR-10, one class a client", f"simulated time to {100 * target:.0f} %", "MB up to it", "MB down to it", "accuracy at the end",
        "worst tenth of clients",
    ]  # fmt: skip
    return markdown(head, made)


def strands(done: Done) -> str:
    """What the braid loses without each of its strands, in four numbers a row."""
    target, made = SCENARIOS["A"].targets[0], []
    for row in WITHOUT:
        if common := gains(done, "A", row):
            costs = [judged(ratios(done, "A", row, key, target))[0].partition(",")[0] for key in PAIRED[:3]]
            name = row.name.removeprefix("braid ")
            made.append([name, str(len(common)), *costs, f"{in_points([-g for g in common])[0]}"])
    head = [
        "the braid",
        "seeds",
        f"times the time to {100 * target:.0f} %",
        "times the MB up",
        "times the MB down",
        "points of accuracy",
    ]
    return markdown(head, made)


def better(done: Done, row: Row) -> list[bool | None]:
    """Whether the braid needs less time and fewer bytes than a row, at no lower accuracy; None where that is not known."""
    target, few = SCENARIOS["A"].targets[0], len(gains(done, "A", row)) < len(SEEDS)
    verdicts = [judged(ratios(done, "A", row, key, target))[1] for key in ("time", "bytes_up")]
    return [None if few else v > 0 for v in verdicts] + [
        None if few else in_points(gains(done, "A", row))[1] >= 0
    ]


def beside(done: Done, row: Row) -> str:
    """A row's time, bytes and accuracy beside the braid's."""
    target = SCENARIOS["A"].targets[0]
    time, up = (judged(ratios(done, "A", row, key, target))[0] for key in ("time", "bytes_up"))
    common = gains(done, "A", row)
    return f"{row.name} ({len(common)} seeds) time {time}, MB up {up}, the braid's accuracy {in_points(common)[0]}"


def question(done: Done, kind: str, item: str, says: str, all_three: bool) -> Claim:
    told, parts = [], []
    for row in (r for r in ROWS if r.kind == kind):
        common, found = gains(done, "A", row), better(done, row)
        if common:
            told.append(beside(done, row))
        if all_three:
            parts.append(None if None in found else all(found))
        else:
            lower = in_points(common)[1] > 0
            parts.append(None if None in found else found[0] or found[1] or lower)
    known = [part for part in parts if part is not None]
    so_far = f"holds for {sum(known)} of {len(known)} rows that are run, of {len(parts)}; " if known else ""
    return Claim(
        item, says, verdict(parts), f"scenario A, {so_far}the row's for the braid's: {'; '.join(told) or 'not run'}",
        "fedbraid reproduce braid",
    )  # fmt: skip


def claims(done: Done) -> list[Claim]:
    phones = lines_of("B")
    return [
        question(done, "single", "beside every strand alone", "less simulated time and fewer bytes to the target, at no lower accuracy", True),
        question(done, "without", "without one strand", "every braid without one strand loses on time, bytes or accuracy", False),
        Claim("scenario B", "the same on phones", "open", f"{len(phones)} runs so far" if phones else "not run", "fedbraid reproduce braid --part tune-B"),
    ]  # fmt: skip


def at_an_edge(done: Done, rows: Sequence[Row]) -> list[str]:
    """Rows whose chosen setting is the least or the largest that was tried, with what is."""
    found = []
    for row in rows:
        chosen = best("A", row, done)
        tried = settings("A", row, done)
        if chosen is None:
            continue
        ends = [
            f"{name} {chosen[i]:g}"
            for i, name in enumerate(("client", "server"))
            if chosen[i] in (min(s[i] for s in tried), max(s[i] for s in tried))
        ]
        found += [f"{row.name} ({', '.join(ends)})"] if ends else []
    return found


def without(done: Done) -> str:
    """What each strand is worth: a sentence on the braids without one."""
    told = []
    for row in WITHOUT:
        common, found = gains(done, "A", row), better(done, row)
        if len(common) == len(SEEDS):
            lower = in_points(common)[1] > 0
            lost = [n for n, f in zip(("time", "bytes", "accuracy"), (found[0], found[1], lower)) if f]
            told.append(f"{row.name.removeprefix('braid ')} on {' and '.join(lost) or 'nothing'}")
    return (
        f"The braid without one strand loses: {'; '.join(told)} (95 % intervals over 5 paired seeds)."
        if told
        else ""
    )


def sentences(done: Done) -> list[str]:
    """What came of it."""
    target, said = SCENARIOS["A"].targets[0], []
    mine = of_row(done, "A", BRAIDED)
    if mine:
        said.append(
            f"The braid reaches {100 * target:.0f} % on CIFAR-10 with one class a client after {to_target(mine, 'time', target, 1.0, 0)} units of time and"
            f" {to_target(mine, 'bytes_up', target, 1e6, 1)} MB up, and ends at {spread([ended(x) for x in mine.values()])} % ({len(mine)} of {len(SEEDS)} seeds)."
        )
    for row in (r for r in MAIN if r is not BRAIDED):
        lines = of_row(done, "A", row)
        if lines and mine:
            time, up = (judged(ratios(done, "A", row, key, target)) for key in ("time", "bytes_up"))
            common, there = gains(done, "A", row), sum(reached(x, target) is not None for x in lines.values())
            missed = "" if there == len(lines) else f" reaches it in {there} of {len(lines)} seeds;"
            factor = [v[0].partition(",")[0] for v in (time, up)]
            said.append(
                f"{row.name}{missed} takes {factor[0]} times the time and {factor[1]} times the MB up; the braid ends"
                f" {in_points(common)[0]} points above it ({len(common)} paired seeds, 95 % intervals)."
            )
    if worth := without(done):
        said.append(worth)
    if edge := at_an_edge(done, (*MAIN, *WITHOUT)):
        said.append(
            f"Tuning chose the least or the largest that it was given for {', '.join(edge)}: a wider range may serve them better."
        )
    runs = {which: sum(len(of_row(done, which, row)) for row in ROWS) for which in SCENARIOS}
    total = len(ROWS) * len(SEEDS)
    said.append(
        f"Run so far: {runs['A']} of {total} seeds of scenario A and {runs['B']} of {total} of scenario B; the table of what is done says which."
    )
    return said
