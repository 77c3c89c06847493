"""AdaBest's supplement: stability over many rounds (Figure 4), sensitivity to mu (6), to beta and participation (7).

EMNIST letters (the 20,800-image subset) over 100 clients; SGD at 0.1 decaying by 0.998 a round, batch 45 filled up by
bootstrapping, weight decay 1e-4; the fully connected network of FedDyn's EMNIST runs (two hidden layers of 100).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn

import fedbraid as fb
from experiments._lib.page import by_test
from experiments._lib.reproduce import (
    Cell,
    Claim,
    Line,
    Panel,
    markdown,
    over_seeds,
    picture,
    spread,
    tail,
    verdict,
)
from fedbraid.data.augment import CropJitter
from fedbraid.run.run import Run

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
PARTITIONS = {"IID": "iid()", "Dirichlet 0.3": "dirichlet(0.3, balanced=True)"}
METHODS = {
    "FedAvg": "fedavg()",
    "SCAFFOLD": "scaffold()",
    "FedDyn": "feddyn(mu=0.02)",
    "AdaBest": "adabest(mu=0.02, beta=0.9)",
}
LONG, SHORT = 1500, 400
MUS = (0.005, 0.02, 0.08, 0.32)
BETAS = (0.0, 0.5, 0.8, 0.9, 0.95, 1.0)
SHARES = (5, 10, 20)
CIFAR_ROUNDS = 100


def network() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 26)
    )


def _letters(partition: str, seed: int) -> fb.Task:
    return fb.tasks.load("emnist", clients=100, partition=PARTITIONS[partition], model=network, seed=seed)


def _maker(partition: str, seed: int):  # type: ignore[no-untyped-def]
    def make() -> fb.Task:
        return _letters(partition, seed)

    make.__name__ = f"letters_{partition.replace(' ', '_')}_{seed}"
    return make


LETTERS = {(p, s): _maker(p, s) for p in PARTITIONS for s in SEEDS}
WORK = fb.Work(lr=0.1, lr_decay=0.998, epochs=1, batch=45, weight_decay=1e-4, last="fill")
KEEP = ("accuracy", "loss", "norm", "offset_norm", "update_norm", "train_loss")


def cell(
    part: str, name: str, algorithm: str, rounds: int, per: int, partition: str, seed: int, epochs: int = 1
) -> Cell:
    return Cell(
        f"{part}/{partition}/{name}/seed {seed}", LETTERS[partition, seed], algorithm, replace(WORK, epochs=epochs),
        fb.rounds(rounds, clients=per),
        seed=seed, every=25 if rounds == LONG else 20, last=5, keep=KEEP,
    )  # fmt: skip


def stability(partition: str, seed: int) -> list[Cell]:
    return [cell("stability", n, a, LONG, 5, partition, seed) for n, a in METHODS.items()]


def more_work(seed: int) -> list[Cell]:
    """Stability again with five local epochs, for the two that keep an h."""
    return [cell("work", n, METHODS[n], LONG, 5, "IID", seed, epochs=5) for n in ("FedDyn", "AdaBest")]


def training(run: Run) -> Line:
    """Accuracy on what the clients train on (Figure 5)."""
    task, x = run.setup.task, run.state.average
    _, classes = run.engine.evaluate(x, task.inputs[task.rows], task.targets[task.rows])
    return {"train_accuracy": float((classes == task.targets[task.rows]).double().mean())}


def theirs(seed: int) -> list[Cell]:
    """Stability with the authors' weight decay and batches with replacement, and the training accuracy (Figure 5)."""
    return [
        replace(
            c, name=c.name.replace("stability/", "theirs/"), work=replace(WORK, weight_decay=1e-3, last="keep", replace=True), probe=training,
            keep=(*KEEP, "train_accuracy"),
        )
        for c in stability("IID", seed)
    ]  # fmt: skip


AFTER = {"GHBM": "ghbm(tau=20, beta=0.9)"}  # 100 clients, 5 a round: everybody is heard of in 20


def after(seed: int) -> list[Cell]:
    """What came after the paper, on its ground."""
    return [cell("after", n, a, LONG, 5, p, seed) for p in PARTITIONS for n, a in AFTER.items()]


def mus(seed: int) -> list[Cell]:
    found = []
    for mu in MUS:
        found.append(cell("mu", f"FedDyn {mu:g}", f"feddyn(mu={mu})", SHORT, 5, "IID", seed))
        found.append(cell("mu", f"AdaBest {mu:g}", f"adabest(mu={mu}, beta=0.9)", SHORT, 5, "IID", seed))
    return found


def betas(seed: int) -> list[Cell]:
    return [
        cell("beta", f"AdaBest {beta:g}, {per} a round", f"adabest(mu=0.02, beta={beta})", SHORT, per, "Dirichlet 0.3", seed)
        for per in SHARES for beta in BETAS
    ]  # fmt: skip


def cifar(seed: int) -> list[Cell]:
    """CIFAR-10 with a LeNet-5, five local epochs cut to two: a size that two cores can bear."""
    task = (
        f"load('cifar10', clients=100, partition=dirichlet(0.3, balanced=True), seed={seed}, model='lenet5')"
    )
    work = fb.Work(lr=0.1, lr_decay=0.998, epochs=2, batch=45, weight_decay=1e-3, last="fill")
    return [
        Cell(f"cifar10/Dirichlet 0.3/{n}/seed {seed}", task, a, work, fb.rounds(CIFAR_ROUNDS, clients=10), seed=seed, every=10, keep=KEEP)
        for n, a in METHODS.items()
    ]  # fmt: skip


def cells() -> list[Cell]:
    found = [c for seed in SEEDS for c in theirs(seed)]
    found += [c for seed in SEEDS for c in after(seed)]
    found += [*stability("IID", 0), *mus(0), *stability("Dirichlet 0.3", 0), *betas(0)]
    for seed in SEEDS[1:]:
        found += stability("IID", seed)
    for seed in SEEDS[1:]:
        found += stability("Dirichlet 0.3", seed) + mus(seed)
    for seed in SEEDS:
        found += cifar(seed) + more_work(seed)
    for seed in SEEDS[1:]:
        found += betas(seed)
    return found


# The paper's own size --------------------------------------------------------------------------------


class CentreCrop(nn.Module):
    """The middle of an image that is larger than 24 pixels; training images were cropped before."""

    def forward(self, x: Tensor) -> Tensor:
        at = (x.shape[-1] - 24) // 2
        return x[..., at : at + 24, at : at + 24]


def feddyn_cnn(classes: int) -> nn.Module:
    """FedDyn's network for CIFAR, on crops of 24."""
    return nn.Sequential(
        CentreCrop(), nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(576, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, classes),
    )  # fmt: skip


def _photographs(seed: int):  # type: ignore[no-untyped-def]
    def make() -> fb.Task:
        whole = fb.tasks.load(
            "cifar100", clients=1000, partition="dirichlet(0.3, balanced=True)", seed=seed, statistics="none",
            model=partial(feddyn_cnn, 100),
        )  # fmt: skip
        return replace(whole, augment=CropJitter(), spec=None)

    make.__name__ = f"cifar100_1000_clients_{seed}"
    return make


FULL_SEEDS = (0, 1, 2, 3, 4)
PHOTOGRAPHS = {s: _photographs(s) for s in FULL_SEEDS}
THEIR_WORK = fb.Work(lr=0.1, lr_decay=0.998, epochs=5, batch=45, weight_decay=1e-3, replace=True)


def full() -> list[Cell]:
    """Figures 5 and 7 on CIFAR-100: 1,000 clients, the authors' crop, jitter, decay and batches with replacement."""
    runs = [(n, a, 5) for n, a in METHODS.items()]
    runs += [
        (f"AdaBest {b:g}, {per} a round", f"adabest(mu=0.02, beta={b})", per)
        for per in (5, 10, 50)
        for b in BETAS
    ]
    return [
        Cell(f"full-cifar100/Dirichlet 0.3/{n}/seed {seed}", PHOTOGRAPHS[seed], a, THEIR_WORK, fb.rounds(1000, clients=per), seed=seed, every=10, keep=KEEP)
        for seed in FULL_SEEDS for n, a, per in runs
    ]  # fmt: skip


# Tables and pictures --------------------------------------------------------------------------------

Done = Mapping[str, Line]


def of(done: Done, part: str, partition: str, name: str) -> list[Line]:
    lines = [done.get(f"{part}/{partition}/{name}/seed {s}") for s in SEEDS]
    return [line for line in lines if line is not None]


def at(line: Line, key: str, share: float = 1.0) -> float:
    """A measurement at this share of the run."""
    values = line["curve"][key]
    value = values[min(len(values) - 1, int(share * len(values)))]
    return float("nan") if value is None else float(value)


EARLY = 0.1  # of a run: where the first norm is read


def early_round(done: Done, part: str) -> int:
    """The round whose norm is the early one, the same for all lines of a part."""
    steps = [x["curve"]["step"] for n, x in done.items() if n.startswith(f"{part}/") and not x["diverged"]]
    return int(steps[0][int(EARLY * len(steps[0]))]) if steps else 0


def final(line: Line) -> float:
    return 100 * tail(line, 5)


def peak(line: Line) -> float:
    return 100 * max(a for a in line["curve"]["accuracy"] if a is not None)


def stability_table(done: Done) -> str:
    rows = []
    kinds = [("stability", p, n, "") for p in PARTITIONS for n in METHODS]
    kinds += [("work", "IID", n, ", 5 epochs") for n in ("FedDyn", "AdaBest")]
    kinds += [("after", p, n, " (2025)") for p in PARTITIONS for n in AFTER]
    kinds += [("theirs", "IID", n, ", weight decay 1e-3, with replacement") for n in METHODS]
    for part, partition, name, note in kinds:
        lines = of(done, part, partition, name)
        if lines:
            rows.append([
                    f"{partition}, {name}{note}", spread([peak(x) for x in lines]), spread([final(x) for x in lines]),
                    spread([at(x, "norm", EARLY) for x in lines]), spread([at(x, "norm") for x in lines]),
                    spread([at(x, "offset_norm") for x in lines], 2) if lines[0]["curve"]["offset_norm"][-1] is not None else "–",
                    spread([100 * at(x, "train_accuracy") for x in lines]) if part == "theirs" else "–", str(len(lines)),
                ])  # fmt: skip
    head = [
        "",
        "best accuracy",
        "last 5 rounds",
        f"‖θ‖, round {early_round(done, 'stability')}",
        f"‖θ‖, round {LONG}",
        "‖h‖ at the end",
        "training accuracy at the end",
        "seeds",
    ]
    return markdown(head, rows)


def mu_table(done: Done) -> str:
    rows = []
    for mu in MUS:
        row = [f"{mu:g}"]
        for name in ("FedDyn", "AdaBest"):
            lines = of(done, "mu", "IID", f"{name} {mu:g}")
            row += [spread([final(x) for x in lines]), spread([at(x, "norm") for x in lines])]
        rows.append(row)
    return markdown(["μ", "FedDyn, accuracy", "FedDyn, ‖θ‖", "AdaBest, accuracy", "AdaBest, ‖θ‖"], rows)


def beta_table(done: Done) -> str:
    rows = []
    for beta in BETAS:
        lines = [of(done, "beta", "Dirichlet 0.3", f"AdaBest {beta:g}, {per} a round") for per in SHARES]
        rows.append([f"{beta:g}", *(spread([final(x) for x in some]) for some in lines)])
    return markdown(["β", *(f"{per} of 100 a round" for per in SHARES)], rows)


def cifar_table(done: Done) -> str:
    rows = []
    for name in METHODS:
        lines = of(done, "cifar10", "Dirichlet 0.3", name)
        ended = [100 * at(x, "accuracy") for x in lines if not x["diverged"]]
        failed = [f"{x['curve']['step'][-1] + 1}" for x in lines if x["diverged"]]
        rows.append([
            name, spread(ended), spread([peak(x) for x in lines]), spread([at(x, "norm") for x in lines]),
            f"{len(failed)} of {len(lines)}" + (f" (rounds {', '.join(failed)})" if failed else ""),
        ])  # fmt: skip
    head = [
        "CIFAR-10, Dirichlet 0.3",
        f"round {CIFAR_ROUNDS}",
        "best",
        "‖θ‖ at the end",
        "seeds that diverge",
    ]
    return markdown(head, rows)


def draw(done: Done) -> None:
    """Mean and range over seeds."""
    panels = []
    for part, partition, title in (
        ("stability", "IID", "IID"), ("stability", "Dirichlet 0.3", "Dirichlet 0.3"), ("work", "IID", "IID, 5 local epochs"),
    ):  # fmt: skip
        for key, label in (("accuracy", "test accuracy"), ("norm", "‖θ‖")):
            curves = [over_seeds(n, x, key) for n in METHODS if (x := of(done, part, partition, n))]
            limits = (0.75, 0.9) if key == "accuracy" else None
            panels.append(
                Panel(f"EMNIST letters, {title}", curves, y=label, limits=limits, log=key == "norm")
            )
    picture(HERE / "stability.png", panels, columns=2)
    panels = []
    for name in ("AdaBest", "FedDyn"):
        for key, label in (("accuracy", "test accuracy"), ("norm", "‖θ‖")):
            curves = [
                over_seeds(f"μ {mu:g}", x, key)
                for mu in MUS
                if (x := of(done, "mu", "IID", f"{name} {mu:g}"))
            ]
            panels.append(Panel(f"EMNIST letters, IID, {name}", curves, y=label))
    picture(HERE / "mu.png", panels, columns=2)


def report(done: Done) -> dict[str, str]:
    draw(done)
    every = cells()
    parts = dict.fromkeys(c.part for c in every)
    state = [
        [p, f"{sum(c.name in done for c in every if c.part == p)} of {sum(c.part == p for c in every)}"]
        for p in parts
    ]
    return {
        "state": markdown(["part", "cells done"], state),
        "stability": stability_table(done),
        "mu": mu_table(done),
        "beta": beta_table(done),
        "cifar10": cifar_table(done),
    }


# The paper's claims -----------------------------------------------------------------------------------


def norms(done: Done, part: str, name: str) -> str:
    lines = of(done, part, "IID", name)
    return (
        f"{spread([at(x, 'norm', 0.1) for x in lines])} to {spread([at(x, 'norm') for x in lines])}"
        if lines
        else "not run"
    )


def trained(done: Done, name: str) -> str:
    lines = [x for x in of(done, "theirs", "IID", name) if not x["diverged"]]
    return spread([100 * at(x, "train_accuracy") for x in lines]) if lines else "not run"


def best_beta(done: Done, per: int) -> str:
    scored = [
        (sum(map(final, lines)) / len(lines), b)
        for b in BETAS
        if (lines := of(done, "beta", "Dirichlet 0.3", f"AdaBest {b:g}, {per} a round"))
    ]
    return f"{max(scored)[1]:g}" if scored else "–"


def growth(done: Done, part: str, name: str) -> float | None:
    """How many times as long θ is at the end as at a tenth of the run, in the mean; None before all seeds are there."""
    lines = of(done, part, "IID", name)
    return mean([at(x, "norm") / at(x, "norm", EARLY) for x in lines]) if len(lines) == len(SEEDS) else None


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def norm_claim(done: Done, item: str, part: str, says: str) -> Claim:
    grown = {n: growth(done, part, n) for n in ("FedDyn", "AdaBest")}
    parts = [
        None if grown["FedDyn"] is None else grown["FedDyn"] > 1.5,
        None if grown["AdaBest"] is None else grown["AdaBest"] < 1.25,
    ]
    return Claim(
        item, says, verdict(parts), f"20,800 of 124,800 images; ‖θ‖ at rounds {early_round(done, part)} and {LONG}: FedDyn {norms(done, part, 'FedDyn')}, AdaBest {norms(done, part, 'AdaBest')}",
        f"fedbraid reproduce adabest --part {part}",
    )  # fmt: skip


def fall_claim(done: Done) -> Claim:
    """What is lost from the best test to the last five rounds, with five local epochs and with one."""
    told, parts = [], []
    for part, epochs in (("work", "five local epochs"), ("stability", "one")):
        drops = {n: [(peak(x), final(x)) for x in of(done, part, "IID", n)] for n in ("FedDyn", "AdaBest")}
        if all(drops.values()):
            told.append(
                f"with {epochs} "
                + ", ".join(
                    f"{n} goes from {mean([p for p, _ in d]):.1f} to {mean([f for _, f in d]):.1f} %"
                    for n, d in drops.items()
                )
            )
            lost = {n: mean([p - f for p, f in d]) for n, d in drops.items()}
            parts.append(lost["FedDyn"] > 2 > lost["AdaBest"])
    return Claim("Figure 4, accuracy", "FedDyn fails to converge over many rounds, AdaBest does not", verdict(parts), "; ".join(told) or "not run", "fedbraid reproduce adabest --part work")  # fmt: skip


SETTINGS = {
    "stability": "one local epoch",
    "work": "five local epochs",
    "theirs": "weight decay 1e-3, with replacement",
}


def cause_claim(done: Done) -> Claim:
    """Whether FedDyn loses accuracy where its model grows, and only there."""
    told, parts = [], []
    for part, setting in SETTINGS.items():
        lines = of(done, part, "IID", "FedDyn")
        grown = growth(done, part, "FedDyn")
        if grown is None:
            parts.append(None)
            continue
        lost = mean([peak(x) - final(x) for x in lines])
        since = mean([at(x, "norm") / max(v for v in x["curve"]["norm"] if v is not None) for x in lines])
        parts.append((lost > 2) == (grown > 2))
        told.append(
            f"{setting}: ‖θ‖ ends at {grown:.1f} times its early length and {since:.2f} of its longest, accuracy {-lost:+.1f} points"
        )
    return Claim(
        "Figure 4, the reason", "accuracy falls because ‖θ‖ grows", verdict(parts), f"FedDyn; {'; '.join(told) or 'not run'}",
        "fedbraid reproduce adabest",
    )  # fmt: skip


def scaffold_claim(done: Done) -> Claim:
    """AdaBest less SCAFFOLD at the end, paired by seed, where SCAFFOLD trains."""
    told, parts = [], []
    for part, partition in (("stability", "IID"), ("stability", "Dirichlet 0.3"), ("theirs", "IID")):
        pair = [of(done, part, partition, n) for n in ("AdaBest", "SCAFFOLD")]
        if all(len(v) == len(SEEDS) for v in pair):
            gains = [final(a) - final(b) for a, b in zip(*pair)]
            told.append(f"{partition}, {SETTINGS[part]} {' / '.join(f'{g:+.1f}' for g in gains)}")
            parts.append(min(gains) > 0)
    return Claim(
        "AdaBest beside SCAFFOLD", "AdaBest above SCAFFOLD", verdict(parts if len(parts) == 3 else [None]),
        f"points by seed, on letters: {'; '.join(told) or 'not run'}; on CIFAR-10 SCAFFOLD diverges at the rate that the others share, and no other was run",
        "fedbraid reproduce adabest --part stability",
    )  # fmt: skip


def train_claim(done: Done) -> Claim:
    """Training accuracy, at its best and at the end."""
    told, falls = [], []
    for name in METHODS:
        lines = [x for x in of(done, "theirs", "IID", name) if not x["diverged"]]
        best = [100 * max(v for v in x["curve"]["train_accuracy"] if v is not None) for x in lines]
        told.append(f"{name} {mean(best):.1f} to {trained(done, name)}" if lines else f"{name} not run")
        if name in ("FedDyn", "SCAFFOLD"):
            falls += [b - 100 * at(x, "train_accuracy") > 2 for b, x in zip(best, lines)]
    known = len(falls) == 2 * len(SEEDS)
    return Claim(
        "Figure 5", "the baselines' training accuracy falls as well, so it is not overfitting", verdict(falls if known else [None]),
        f"on letters, at its best and at the end: {', '.join(told)} %; the paper's CIFAR-100 in full size", "fedbraid reproduce adabest --part theirs",
    )  # fmt: skip


def mu_claim(done: Done) -> Claim:
    found = {
        n: [(mean([final(x) for x in lines]), mean([at(x, "norm") for x in lines])) for mu in MUS if (lines := of(done, "mu", "IID", f"{n} {mu:g}"))]
        for n in ("FedDyn", "AdaBest")
    }  # fmt: skip
    told, spans = [], {}
    for name, pairs in found.items():
        if len(pairs) == len(MUS):
            accuracy, norm = zip(*pairs)
            spans[name] = (max(accuracy) - min(accuracy), max(norm) / min(norm))
            told.append(
                f"{name} moves by {spans[name][0]:.1f} points and a factor of {spans[name][1]:.2f} in ‖θ‖"
            )
    whole = len(spans) == 2
    parts = (
        [spans["AdaBest"][0] < 1 and spans["AdaBest"][1] < 1.1, spans["FedDyn"][1] > 1.5] if whole else [None]
    )
    return Claim("Figure 6", "AdaBest hardly depends on μ, FedDyn heavily", verdict(parts), f"400 rounds; over a factor of {MUS[-1] / MUS[0]:.0f} in μ, " + ("; ".join(told) or "not run"), "fedbraid reproduce adabest --part mu")  # fmt: skip


def beta_claim(done: Done) -> Claim:
    best = [best_beta(done, per) for per in SHARES]
    known = [float(b) for b in best if b != "–"]
    parts = [0.8 <= known[0] <= 0.95, known[-1] > known[0]] if len(known) == len(SHARES) else [None]
    return Claim(
        "Figure 7", "the best β is 0.8 to 0.95 with few clients a round and moves to 1 with more", verdict(parts),
        f"best β {' / '.join(best)} at {' / '.join(map(str, SHARES))} of 100 clients a round (the paper has 1,000)", "fedbraid reproduce adabest --part beta",
    )  # fmt: skip


def cifar_claim(done: Done) -> Claim:
    ended = {
        n: [100 * at(x, "accuracy") for x in of(done, "cifar10", "Dirichlet 0.3", n) if not x["diverged"]]
        for n in METHODS
    }
    whole = all(len(ended[n]) == len(SEEDS) for n in ("FedAvg", "FedDyn", "AdaBest"))
    pairs = (("AdaBest", "FedDyn"), ("FedDyn", "FedAvg"))
    gains = {f"{a} less {b}": [x - y for x, y in zip(ended[a], ended[b])] for a, b in pairs}
    parts: list[bool | None] = [min(v) > 0 for v in gains.values()] if whole else [None]
    told = ", ".join(f"{n} {spread(v)}" if v else f"{n} diverges" for n, v in ended.items())
    by_seed = "; ".join(f"{n} {' / '.join(f'{g:+.2f}' for g in v)}" for n, v in gains.items())
    return Claim("CIFAR-10 (main paper)", "AdaBest above FedDyn above FedAvg", verdict(parts), f"{told} % after {CIFAR_ROUNDS} rounds of LeNet-5; by seed {by_seed}", "fedbraid reproduce adabest --part cifar10")  # fmt: skip


def after_claim(done: Done) -> Claim:
    told = []
    for partition in PARTITIONS:
        pair = [
            [final(x) for x in of(done, part, partition, n) if not x["diverged"]]
            for part, n in (("stability", "AdaBest"), ("after", "GHBM"))
        ]
        if all(len(v) == len(SEEDS) for v in pair):
            told.append(f"{partition} {spread(pair[0])} for {spread(pair[1])}")
    return Claim("beside GHBM (2025)", "(not in the paper) GHBM, untuned", "also here", "AdaBest's accuracy at the end for GHBM's: " + ("; ".join(told) or "not run"), "fedbraid reproduce adabest --part after")  # fmt: skip


def claims(done: Done) -> list[Claim]:
    return [
        norm_claim(done, "Figure 4, norms", "stability", "FedDyn's ‖θ‖ grows without end, AdaBest's settles"),
        fall_claim(done),
        cause_claim(done),
        scaffold_claim(done),
        norm_claim(done, "Figure 4, weight decay 1e-3, with replacement", "theirs", "the same as its authors have it"),
        train_claim(done),
        mu_claim(done),
        beta_claim(done),
        cifar_claim(done),
        after_claim(done),
        by_test("tests/test_papers.py::test_feddyns_h_can_only_shrink_against_the_update", "for random h and updates", "Theorem 1", "when FedDyn's ‖h‖ can shrink"),
        by_test("tests/test_papers.py::test_the_averaged_model_rests_only_where_h_is_zero", "SCAFFOLD/m, FedDyn, AdaBest on a quadratic with everybody taking part", "Theorem 2", "x̄ converges only if h → 0"),
        by_test("tests/test_pseudocode.py::test_fedavg", "exact", "Remark 1", "averaging is a step along the mean pseudo-gradient"),
        by_test("tests/test_properties.py::test_adabests_h_is_a_power_series_of_the_averaged_updates", "to rounding", "Remarks 2 and 3", "h is a power series of the updates"),
        by_test("tests/test_reductions.py::test_at_its_neutral_setting_it_is_its_base", "exact", "Remark 4", "β = μ = 0 is FedAvg"),
        by_test("tests/test_properties.py::test_feddyns_server_is_adabests_at_beta_one_with_everybody", "exact", "Remark 5", "FedDyn's server is AdaBest's at β = 1, up to |P|/|S|"),
        by_test("tests/test_pseudocode.py::test_adabest", "equal to a transcription", "Algorithms 1 and 2", "client and server"),
        by_test("tests/test_papers.py::test_what_adabests_rules_add_to_fedavgs_arithmetic", "a local step writes no more numbers than it says; AdaBest's adds one", "Tables 3 and 4", "arithmetic of clients"),
        by_test("tests/test_papers.py::test_what_adabests_server_adds_to_fedavgs_arithmetic", "the server's step writes no more numbers than it says", "Table 5", "arithmetic of the server"),
    ]  # fmt: skip


def sentences(done: Done) -> list[str]:
    """What came of AdaBest."""
    said = []
    grown = {n: growth(done, "stability", n) for n in ("FedDyn", "AdaBest")}
    lines = {n: of(done, "stability", "IID", n) for n in METHODS}
    if grown["FedDyn"] and grown["AdaBest"]:
        said.append(
            f"FedDyn's model grows {grown['FedDyn']:.1f} times as long over {LONG:,} rounds of EMNIST letters with 5 of 100 clients a round, AdaBest's"
            f" {grown['AdaBest']:.1f} times: that part of the paper holds, in small."
        )
        lost = mean([peak(x) - final(x) for x in lines["FedDyn"]])
        said.append(
            f"Its accuracy does not fall there (by {lost:.1f} points); it falls with five local epochs and with the authors' weight decay, where the model"
            " shrinks again from its longest: growth is not the reason."
        )
    if all(lines.values()):
        gains = [final(a) - final(b) for a, b in zip(lines["AdaBest"], lines["SCAFFOLD"])]
        said.append(f"SCAFFOLD, which is stable here, is level with AdaBest on letters or ahead of it (AdaBest less SCAFFOLD {' / '.join(f'{g:+.1f}' for g in gains)} points by seed).")  # fmt: skip
    ended = {
        n: [100 * at(x, "accuracy") for x in of(done, "cifar10", "Dirichlet 0.3", n) if not x["diverged"]]
        for n in METHODS
    }
    if ended["AdaBest"] and ended["FedAvg"]:
        said.append(
            f"On CIFAR-10 with Dirichlet 0.3 AdaBest ends at {spread(ended['AdaBest'])} %, FedDyn at {spread(ended['FedDyn'])} %, FedAvg at"
            f" {spread(ended['FedAvg'])} %; SCAFFOLD diverges at the rate that the others share."
        )
    said.append(
        "The paper's main regime, 5 of 1,000 clients, was not run: so small a share is what its claim is about."
    )
    return said
