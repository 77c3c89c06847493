"""QAFeL: logistic regression on mushrooms (section IV-A, Figures 2, 5, 6), and networks (IV-B, Figures 7, 9, Table IV).

Mushrooms: 100 clients, half-normal delays, buffer 10, client rate 2, server rate 0.1, l2 1/8124, all 8,124 rows.
No client quantisation, as in the paper's figures, except where a name says "both ways".
Networks: runs to a target accuracy, in a size that two cores can bear.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fedbraid as fb
from experiments._lib.page import by_test
from experiments._lib.reproduce import (
    Cell,
    Claim,
    Drawn,
    Line,
    Panel,
    markdown,
    over_seeds,
    picture,
    spread,
    verdict,
)
from fedbraid.data import mushrooms as reader
from fedbraid.data.dataset import held_out
from fedbraid.data.partition import Table, iid
from fedbraid.run.evaluate import evaluate_model
from fedbraid.run.run import Run

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
ROWS = 8124
L2 = 1 / ROWS
STEPS = 1500
TAIL = 20  # evaluations, the last 200 server steps

SERVER = "lr=0.1, staleness='constant'"
METHODS = {
    "FedBuff": f"fedbuff({SERVER})",
    "direct qsgd 3 bits": f"with_codecs(fedbuff({SERVER}), down=qsgd(3))",
    "QAFeL qsgd 3 bits": f"qafel({SERVER}, up=identity(), down=qsgd(3))",
    "direct top 50 %": f"with_codecs(fedbuff({SERVER}), down=topk(0.5))",
    "QAFeL top 1 %": f"qafel({SERVER}, up=identity(), down=topk(0.01))",
    "QAFeL qsgd 3 bits both ways": f"qafel({SERVER}, up=qsgd(3), down=qsgd(3))",
}
NORMS = {
    "l2 norm, 3 bits": f"qafel({SERVER}, up=identity(), down=qsgd(3, norm='l2'))",
    "l2 norm, 3 bits, contractive": f"qafel({SERVER}, up=identity(), down=qsgd(3, norm='l2', contractive=True))",
    "l2 norm, 4 bits": f"qafel({SERVER}, up=identity(), down=qsgd(4, norm='l2'))",
    "max norm, 3 bits": METHODS["QAFeL qsgd 3 bits"],
}
LOCAL_STEPS = (1, 2, 5, 10)


def zeros() -> nn.Module:
    model = nn.Linear(112, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def everything() -> tuple[Tensor, Tensor]:
    """All rows, the ones that the library holds out for testing too."""
    data = reader.read()
    return torch.cat([data.inputs, data.test[0]]), torch.cat([data.targets, data.test[1]])


def mushrooms() -> fb.Task:
    """One weight a feature, no bias; judged by the cost over everything."""
    x, y = everything()
    shares = iid()(Table(y.numpy()), 100, 0)
    return fb.Task.from_table(zeros(), x, y, shares, test=(x, y), loss="logistic", name="mushrooms, all rows")


# The same as its authors' code has it --------------------------------------------------------------

EIGHT = "qsgd(levels=8, norm='l2', scope='vector', biases='quantise')"  # their "3 bits": 8 levels and a sign
THEIRS = {
    "FedBuff": f"fedbuff({SERVER})",
    "direct qsgd, 8 levels, both ways": f"with_codecs(fedbuff({SERVER}), up={EIGHT}, down={EIGHT})",
    "QAFeL qsgd, 8 levels, both ways": f"qafel({SERVER}, up={EIGHT}, down={EIGHT})",
    "direct qsgd, 8 levels, server alone": f"with_codecs(fedbuff({SERVER}), down={EIGHT})",
    "QAFeL qsgd, 8 levels, server alone": f"qafel({SERVER}, up=identity(), down={EIGHT})",
    "direct top 50 %": f"with_codecs(fedbuff({SERVER}), down=topk(0.5))",
    "QAFeL top 1 %": f"qafel({SERVER}, up=identity(), down=topk(0.01))",  # rounds up: two numbers of 113
    "QAFeL top 1 %, rounded down": f"qafel({SERVER}, up=identity(), down=topk(0.01, rounding='down'))",  # one, as theirs
}


def with_intercept() -> nn.Module:
    model = nn.Linear(112, 1)
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def in_file_order() -> fb.Task:
    """An intercept, and every client a stretch of the file."""
    x, y = everything()
    order = torch.from_numpy(np.argsort(np.concatenate(held_out(ROWS, 0.2, "mushrooms"))))
    shares = np.array_split(np.arange(ROWS), 100)
    x, y = x[order], y[order]
    return fb.Task.from_table(
        with_intercept(), x, y, shares, test=(x, y), loss="logistic", name="mushrooms, in file order"
    )


def held(run: Run) -> Line:
    """The cost of the model that the clients hold, which is not the server's where it is sent in a few bits."""
    x = run.state.sent[run.state.t].vectors["x"]
    return {"held": evaluate_model(run.engine, run.setup.task, x)["loss"] + L2 / 2 * float(x.norm()) ** 2}


def their_cell(name: str, algorithm: str, seed: int) -> Cell:
    return replace(
        cell(name, algorithm, 10, seed), name=f"theirs/{name}/seed {seed}", task=in_file_order, probe=held,
        keep=("loss", "norm", "contraction", "held"),
    )  # fmt: skip


def theirs(seed: int) -> list[Cell]:
    return [their_cell(name, algorithm, seed) for name, algorithm in THEIRS.items()]


def cell(name: str, algorithm: str, steps: int, seed: int) -> Cell:
    return Cell(
        f"mushrooms/{name}/{steps} local steps/seed {seed}",
        mushrooms,
        algorithm,
        fb.Work(lr=2.0, steps=steps, batch=None, weight_decay=L2),
        fb.buffered(STEPS, buffer=10, concurrency=100, durations=fb.clock.halfnormal()),
        seed=seed,
        every=10,
        keep=("loss", "norm", "contraction", "staleness"),
    )


def logistic(seed: int) -> list[Cell]:
    """Figures 2, 5 and 6."""
    wanted = [(n, a, 10) for n, a in METHODS.items() if not n.endswith("both ways")]
    wanted += [("l2 norm, 3 bits", NORMS["l2 norm, 3 bits"], 10)] + [(n, a, 1) for n, a in METHODS.items()]
    wanted += [("FedBuff", METHODS["FedBuff"], k) for k in LOCAL_STEPS]
    wanted += [(n, a, 10) for n, a in {**METHODS, **NORMS}.items() if n != "max norm, 3 bits"]
    return list({(n, k): cell(n, a, k, seed) for n, a, k in wanted}.values())


# Networks: Figures 7 and 9, Table IV -----------------------------------------------------------------

FMNIST = "load('fmnist', clients=5000, partition=dirichlet(0.1, balanced=True), seed={seed})"


def text() -> fb.Task:
    """Shakespeare for a GRU of one layer that sees the last 20 characters; tested on 2,000 windows."""
    return fb.tasks.load(
        "shakespeare", max_samples_per_client=128, context=20, max_test_samples=2000,
        model=partial(fb.models.gru_char, layers=1),
    )  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One of the paper's comparisons, on a network."""

    title: str
    target: float
    work: fb.Work
    buffered: str  # the server of FedBuff and QAFeL
    alone: str  # the server of FedAsync
    concurrency: tuple[int, ...]
    uploads: int  # at most
    every: int  # uploads between two tests


SETTINGS = {
    "fmnist": Setting("Fashion-MNIST", 0.7, fb.Work(lr=0.1, epochs=1, batch=32), "lr=1.0", "lr=0.3", (100, 500, 1000), 30_000, 100),
    "shakespeare": Setting("Shakespeare", 0.27, fb.Work(lr=2.0, epochs=1, batch=32), "lr=1.0", "lr=0.3", (100, 500, 1000), 2_000, 50),
}  # fmt: skip
NETWORKS = {
    "FedBuff": "fedbuff({buffered})",
    "QAFeL, 4 bits": "qafel({buffered}, up=qsgd(4), down=qsgd(4))",
    "FedBuff, direct 4 bits": "with_codecs(fedbuff({buffered}), up=qsgd(4), down=qsgd(4))",
    "FedAsync": "fedasync({alone})",
    "FedAsync, direct 4 bits": "with_codecs(fedasync({alone}), up=qsgd(4), down=qsgd(4))",
}
AFFINE = {  # what the authors' code runs on CIFAR-10 and CelebA in place of QSGD, in the paper's sizes
    "QAFeL, affine 4 bits": "qafel({buffered}, up=uniform(4), down=uniform(4))",
    "FedBuff, direct affine 4 bits": "with_codecs(fedbuff({buffered}), up=uniform(4), down=uniform(4))",
}
AFTER = {  # what came after the paper, on its ground
    "CA²FL": "ca2fl(lr=1.0)",
    "ACE": "ace(lr=0.3)",
    "FADAS": "fadas(lr=0.01, limit=10, eps=1e-3)",
}


def after(seed: int) -> list[Cell]:
    """Fashion-MNIST at concurrency 100; ACE steps after every arrival, as FedAsync does."""
    found = []
    for name, text in AFTER.items():
        made = network("fmnist", "FedAsync" if name == "ACE" else name, text, 100, seed)
        found.append(replace(made, name=f"after/{name}/concurrency 100/seed {seed}"))
    return found


SERVER_CODECS = {
    8: "qsgd(8)",
    4: "qsgd(4)",
    2: "qsgd(2, bucket=32)",
}  # one norm a layer is not contractive at 2 bits
WIDTHS = [(c, s) for c in (8, 4, 2) for s in (8, 4, 2)]
DIRECT = [(4, 4), (4, 2), (2, 2)]
FLAT = "FedBuff, no staleness weights"
ARRIVALS_100 = 80  # busy clients when 100 arrive per unit of time: 100·√(2/π)


def network(part: str, name: str, algorithm: str, concurrency: int, seed: int) -> Cell:
    """A run to the target accuracy; without a buffer there are ten times as many steps."""
    s = SETTINGS[part]
    buffer = 1 if name.startswith("FedAsync") else 10
    schedule = fb.buffered(
        s.uploads // buffer,
        buffer=buffer,
        concurrency=concurrency,
        durations=fb.clock.halfnormal(),
    )
    return Cell(
        f"{part}/{name}/concurrency {concurrency}/seed {seed}",
        FMNIST.format(seed=seed) if part == "fmnist" else text,
        algorithm.format(buffered=s.buffered, alone=s.alone),
        s.work, schedule, seed=seed, every=s.every // buffer, keep=("accuracy", "staleness"), target=s.target,
    )  # fmt: skip


def compared(part: str, seed: int) -> list[Cell]:
    """Figures 7 and 9."""
    return [
        network(part, name, text, concurrency, seed)
        for concurrency in SETTINGS[part].concurrency for name, text in NETWORKS.items()
    ]  # fmt: skip


def widths(seed: int) -> list[Cell]:
    """Table IV: no staleness weights."""
    flat = "{buffered}, staleness='constant'"
    texts = {f"QAFeL {w} bits": f"qafel({flat}, up=qsgd({w[0]}), down={SERVER_CODECS[w[1]]})" for w in WIDTHS}
    texts[FLAT] = f"fedbuff({flat})"
    texts |= {
        f"direct {w} bits": f"with_codecs(fedbuff({flat}), up=qsgd({w[0]}), down=qsgd({w[1]}))"
        for w in DIRECT
    }
    for w in EQUAL:  # with the codec that the server of QAFeL has
        texts[f"direct {w} bits, QAFeL's codec"] = (
            f"with_codecs(fedbuff({flat}), up=qsgd({w[0]}), down={SERVER_CODECS[w[1]]})"
        )
    return [network("fmnist", name, text, ARRIVALS_100, seed) for name, text in texts.items()]


EQUAL, LATE = [(4, 2), (2, 2)], 0.8


def late(seed: int) -> list[Cell]:
    """Direct quantisation and a hidden state with the same codec, to a late target."""
    wanted = [
        FLAT,
        *(
            f"{kind} {w} bits{note}"
            for w in EQUAL
            for kind, note in (("QAFeL", ""), ("direct", ", QAFeL's codec"))
        ),
    ]
    found = {c.name.split("/")[1]: c for c in widths(seed)}
    return [replace(found[n], name=found[n].name.replace("fmnist/", "late/"), target=LATE) for n in wanted]


def cells() -> list[Cell]:
    found: dict[str, Cell] = {}
    for seed in SEEDS:
        found |= {c.name: c for c in theirs(seed) + logistic(seed)}
    for seed in SEEDS:
        found |= {c.name: c for c in compared("fmnist", seed)}
    for seed in SEEDS:
        found |= {c.name: c for c in skewed(seed) + after(seed)}
    for seed in SEEDS:
        found |= {c.name: c for c in widths(seed) + late(seed) + compared("shakespeare", seed)}
    return list(found.values())


# Size skew, and the paper's own size -------------------------------------------------------------------

SKEWED = "load('fmnist', clients=5000, partition=power_law(0.1), seed={seed})"  # as the authors' CIFAR-10 is shared out


def skewed(seed: int) -> list[Cell]:
    """Fashion-MNIST again, with sizes by a power law, labels independent of clients and batches of 10."""
    found = []
    for name in list(NETWORKS)[:3]:
        made = network("fmnist", name, NETWORKS[name], 100, seed)
        found.append(replace(
            made, name=made.name.replace("fmnist/", "sizes/"), task=SKEWED.format(seed=seed), work=fb.Work(lr=0.1, epochs=1, batch=10),
        ))  # fmt: skip
    return found


@dataclass(frozen=True)
class Full:
    """A row of Table III, and its task."""

    task: str
    target: float
    buffered: tuple[float, str]  # client rate, server
    alone: tuple[float, str]
    batch: int
    concurrency: tuple[int, ...]


# Table III's server rates belong to a sum over the buffer of ten and to staleness weights √2/√(1 + τ): in the mean and the
# weights of eq. 3 they are 10√2 times as large, and √2 times without a buffer.
FULL = {
    "CIFAR-10": Full(
        "load('cifar10', clients=5000, partition=power_law(0.1), seed={seed}, model='qafel_cnn')", 0.6, (1.95e-4, "lr=578.0"),
        (100.0, "lr=9.05e-5"), 10, (100, 500, 1000),
    ),
    "CelebA": Full(
        "load('celeba', partition=natural(), seed={seed})", 0.9, (4.7e-6, "lr=14142.0, momentum=0.3"), (5.7, "lr=3.96e-3"), 32, (100, 500, 1000),
    ),
    "Shakespeare": Full(
        "load('shakespeare', partition=natural(), seed={seed}, model='lstm_char')", 0.54, (1.17, "lr=3.73"),
        (17.0, "lr=0.287, momentum=0.5"), 32, (100, 500, 1000),
    ),
}  # fmt: skip


def full_cell(part: str, name: str, algorithm: str, concurrency: int, seed: int) -> Cell:
    f, alone = FULL[part], name.startswith("FedAsync")
    (lr, server), buffer = (f.alone, 1) if alone else (f.buffered, 10)
    return Cell(
        f"full-{part}/{name}/concurrency {concurrency}/seed {seed}", f.task.format(seed=seed), algorithm.format(buffered=server, alone=server),
        fb.Work(lr=lr, epochs=1, batch=f.batch),
        fb.buffered(200_000 // buffer, buffer=buffer, concurrency=concurrency, durations=fb.clock.halfnormal()),
        seed=seed, every=1000 // buffer, keep=("accuracy", "staleness"), target=f.target,
    )  # fmt: skip


def full() -> list[Cell]:
    """Figures 7 to 10 and Table IV with the paper's networks, rates and concurrencies."""
    found = [
        full_cell(part, name, text, concurrency, seed)
        for seed in SEEDS for part, f in FULL.items() for concurrency in f.concurrency for name, text in (NETWORKS | AFFINE).items()
    ]  # fmt: skip
    flat = "{buffered}, staleness='constant'"
    for seed in SEEDS:
        for client, server in WIDTHS:
            text = f"qafel({flat}, up=qsgd({client}), down={SERVER_CODECS[server]})"
            made = full_cell("CelebA", f"QAFeL {client, server} bits", text, ARRIVALS_100, seed)
            found.append(
                replace(made, algorithm=made.algorithm.replace("14142.0", "10000.0"))
            )  # no staleness weights, no √2
    return found


# Tables and pictures --------------------------------------------------------------------------------


def optimum(intercept: bool) -> float:
    """f*, from optimum.py."""
    return float(json.loads((HERE / "optimum.json").read_text())["intercept" if intercept else "plain"]["f"])


def excess(line: Line) -> list[float]:
    """f(x) − f* where the model was judged."""
    f = optimum(line["cell"].startswith("theirs/"))
    curve = line["curve"]
    return [
        loss + L2 / 2 * norm**2 - f for loss, norm in zip(curve["loss"], curve["norm"]) if loss is not None
    ]


def steps(line: Line) -> list[int]:
    return [s for s, loss in zip(line["curve"]["step"], line["curve"]["loss"]) if loss is not None]


def level(line: Line) -> float:
    """The mean excess over the last evaluations."""
    last = excess(line)[-TAIL:]
    return sum(last) / len(last)


def numbers(values: list[float]) -> str:
    if not values:
        return "–"
    return f"{min(values):.1e} to {max(values):.1e}" if len(values) > 1 else f"{values[0]:.1e}"


def size_table(done: Mapping[str, Line]) -> str:
    rows, base = [], [done[n] for s in SEEDS if (n := f"sizes/FedBuff/concurrency 100/seed {s}") in done]
    for name in list(NETWORKS)[:3]:
        lines = [done[n] for s in SEEDS if (n := f"sizes/{name}/concurrency 100/seed {s}") in done]
        rows.append([name, *facts("fmnist", lines, base)])
    return markdown(["Fashion-MNIST to 70 %, sizes by a power law, concurrency 100", *HEAD], rows)


def their_table(done: Mapping[str, Line]) -> str:
    rows = []
    for name in THEIRS:
        lines = [line for s in SEEDS if (line := done.get(f"theirs/{name}/seed {s}")) is not None]
        fine = [line for line in lines if not line["diverged"]]
        by_clients = [[v - optimum(True) for v in line["curve"]["held"][-TAIL:]] for line in fine]
        rows.append([
            name, numbers([level(line) for line in fine]), numbers([sum(v) / len(v) for v in by_clients]),
            numbers([v for line in by_clients for v in line]),
            ", ".join(str(line["steps"] + 1) for line in lines if line["diverged"]) or "–",
            spread([line["bytes_broadcast"] / line["steps"] for line in lines if line["steps"]], 0), str(len(lines)),
        ])  # fmt: skip
    head = [
        "as the authors have it", "f − f* of the server's x", "of what clients hold, mean", "least to most", "stopped at step",
        "bytes a broadcast", "seeds",
    ]  # fmt: skip
    return markdown(head, rows)


def by_name(done: Mapping[str, Line], name: str, k: int) -> list[Line]:
    lines = [done.get(f"mushrooms/{name}/{k} local steps/seed {s}") for s in SEEDS]
    return [line for line in lines if line is not None]


def of(done: Mapping[str, Line], part: str, name: str, concurrency: int) -> list[Line]:
    names = [network(part, name, "", concurrency, seed).name for seed in SEEDS]
    return [done[n] for n in names if n in done]


def reached(part: str, lines: list[Line]) -> list[Line]:
    return [
        x for x in lines if not x["diverged"] and (x["curve"]["accuracy"] or [0])[-1] >= SETTINGS[part].target
    ]


def uploads(line: Line) -> float:
    """In thousands."""
    alone = any(name in line["algorithm"] for name in ("fedasync(", "ace("))
    return line["steps"] * (1 if alone else 10) / 1e3


def after_table(done: Mapping[str, Line]) -> str:
    base = of(done, "fmnist", "FedBuff", 100)
    rows = [
        [name, *facts("fmnist", of(done, "fmnist", name, 100), base)]
        for name in ("FedBuff", "QAFeL, 4 bits", "FedAsync")
    ]
    for name in AFTER:
        lines = [done[n] for s in SEEDS if (n := f"after/{name}/concurrency 100/seed {s}") in done]
        rows.append([name, *facts("fmnist", lines, base)])
    return markdown(["Fashion-MNIST to 70 %, concurrency 100", *HEAD], rows)


def mean(lines: list[Line], key: str) -> float:
    return sum(line[key] for line in lines) / len(lines)


def facts(part: str, lines: list[Line], base: list[Line]) -> list[str]:
    """Uploads, gigabytes up and broadcast to the target, and how many times fewer than the base has."""
    there, base = reached(part, lines), reached(part, base)
    row = [f"{len(there)} of {len(lines)}", spread([uploads(x) for x in there], 2)]
    for key in ("bytes_up", "bytes_broadcast", "bytes_down"):
        row.append(spread([x[key] / 1e9 for x in there], 4))
    for key in ("bytes_up", "bytes_broadcast"):
        row.append(f"{mean(base, key) / mean(there, key):.1f}" if there and base else "–")
    return row


HEAD = [
    "seeds that reach it", "uploads, thousands", "GB up", "GB broadcast once", "GB down, to each client by itself", "times fewer GB up than FedBuff", "times fewer GB broadcast",
]  # fmt: skip


def concurrency_table(done: Mapping[str, Line], part: str) -> str:
    rows = []
    for concurrency in SETTINGS[part].concurrency:
        base = of(done, part, "FedBuff", concurrency)
        for name in NETWORKS:
            if lines := of(done, part, name, concurrency):
                rows.append([f"{concurrency}, {name}", *facts(part, lines, base)])
    return markdown(
        [
            f"{SETTINGS[part].title} to {100 * SETTINGS[part].target:.0f} %: concurrency, method",
            *HEAD,
        ],
        rows,
    )


PRINTED = {  # Table IV: uploads in thousands, on CelebA
    (8, 8): "27.6 ± 4.8", (8, 4): "29.8 ± 2.8", (8, 2): "35.7 ± 14.5", (4, 8): "39.7 ± 3.3", (4, 4): "27.8 ± 10.4", (4, 2): "37.7 ± 9.1",
    (2, 8): "58.6 ± 7.2", (2, 4): "74.6 ± 35.7", (2, 2): "91.9 ± 34.4",
}  # fmt: skip


def width_table(done: Mapping[str, Line]) -> str:
    base = of(done, "fmnist", FLAT, ARRIVALS_100)
    kinds = [("FedBuff", base, "26.1 ± 6.7")]
    kinds += [(f"QAFeL {w}", of(done, "fmnist", f"QAFeL {w} bits", ARRIVALS_100), PRINTED[w]) for w in WIDTHS]
    kinds += [(f"direct {w}", of(done, "fmnist", f"direct {w} bits", ARRIVALS_100), "–") for w in DIRECT]
    rows = []
    for name, lines, paper in kinds:
        if lines:
            steps = sum(line["steps"] for line in lines)
            up, down = (
                sum(line[key] for line in lines) / steps / 1e3 for key in ("bytes_up", "bytes_broadcast")
            )
            rows.append([name, *facts("fmnist", lines, base), f"{up / 10:.1f}", f"{down:.1f}", paper])
    return markdown(
        [
            "(client, server) bits",
            *HEAD,
            "kB an upload",
            "kB a broadcast",
            "paper's uploads, thousands (CelebA)",
        ],
        rows,
    )


def report(done: Mapping[str, Line]) -> dict[str, str]:
    methods, local, norms = [], [], []
    for name in METHODS:
        row = [name]
        for k in (10, 1):
            row.append(numbers([level(line) for line in by_name(done, name, k) if not line["diverged"]]))
        lines = by_name(done, name, 10)
        row += [spread([line["bytes_broadcast"] / line["steps"] for line in lines], 0)]
        row += [spread([line["bytes_up"] / line["steps"] / 10 for line in lines], 0)]
        methods.append(row)
    for k in LOCAL_STEPS:
        lines = by_name(done, "FedBuff", k)
        reached = [next((s for s, e in zip(steps(line), excess(line)) if e < 1e-2), None) for line in lines]
        known = [r for r in reached if r is not None]
        when = "not reached" if lines and not known else spread(known, 0)
        local.append([str(k), when, numbers([level(line) for line in lines])])
    for name in NORMS:
        lines = by_name(done, name, 10) or (
            by_name(done, "QAFeL qsgd 3 bits", 10) if name.startswith("max") else []
        )
        ratio = [
            sum(c) / len(c)
            for line in lines
            if (c := [v for v in line["curve"]["contraction"] if v is not None])
        ]
        came = [
            f"stopped at step {line['steps'] + 1}" if line["diverged"] else numbers([level(line)])
            for line in lines
        ]
        peak = [max(v for v in line["curve"]["norm"] if v is not None) for line in lines]
        norms.append([name, spread(ratio, 2), spread(peak, 1), ", ".join(came) or "–"])
    draw(done)
    bars(done)
    said = next(
        (line["diverged"] for n, line in done.items() if n.startswith("mushrooms") and line["diverged"]),
        None,
    )
    return {
        **{part: concurrency_table(done, part) for part in SETTINGS},
        "widths": width_table(done),
        "theirs": their_table(done),
        "sizes": size_table(done),
        "after": after_table(done),
        "methods": markdown(["server to clients", "f − f*, 10 local steps", "f − f*, 1 local step", "bytes a broadcast", "bytes an upload"], methods),
        "local steps": markdown(["local steps", "server steps to f − f* < 0.01", "f − f* at the end"], local),
        "norms": markdown(["server codec", "mean ‖v − Q(v)‖²/‖v‖²", "largest ‖x‖", "f − f* at the end, a seed each"], norms),
        "caught": f"> {said}" if said else "(no run was stopped)",
    }  # fmt: skip


def held_lines(done: Mapping[str, Line], name: str) -> list[Line]:
    """What clients hold above f*, of every seed that stayed finite, in the form of a curve."""
    lines = [done[n] for s in SEEDS if (n := f"theirs/{name}/seed {s}") in done and not done[n]["diverged"]]
    return [
        {"curve": {"step": x["curve"]["step"], "held": [v - optimum(True) for v in x["curve"]["held"]]}}
        for x in lines
    ]


def draw(done: Mapping[str, Line]) -> None:
    """Mean and range over seeds: what clients hold in the runs that the verdicts are from, and Figure 6."""
    panels = []
    for title, names in (
        (
            "what clients hold, 3-bit QSGD",
            ("FedBuff", "direct qsgd, 8 levels, server alone", "QAFeL qsgd, 8 levels, server alone"),
        ),
        ("what clients hold, top-k", ("FedBuff", "direct top 50 %", "QAFeL top 1 %")),
    ):
        curves = [over_seeds(n, lines, "held") for n in names if (lines := held_lines(done, n))]
        panels.append(
            Panel(f"Figure 5, mushrooms: {title}", curves, x="server step", y="f(x̂) − f*", log=True)
        )
    curves = []
    for k in LOCAL_STEPS:
        lines = [{"curve": {"step": steps(x), "above": excess(x)}} for x in by_name(done, "FedBuff", k)]
        if lines:
            curves.append(over_seeds(f"{k} local step{'s' if k > 1 else ''}", lines, "above"))
    panels.append(Panel("Figure 6, mushrooms: FedBuff", curves, x="server step", y="f(x) − f*", log=True))
    picture(HERE / "mushrooms.png", panels)


def bars(done: Mapping[str, Line]) -> None:
    """Uploads and bytes to the target over concurrency, mean and range over seeds that reach it."""
    panels = []
    for key, label in (
        ("uploads", "uploads to 70 %, thousands"), ("bytes_up", "GB up"), ("bytes_broadcast", "GB broadcast once"),
        ("bytes_down", "GB down, to each client by itself"),
    ):  # fmt: skip
        curves = []
        for name in NETWORKS:
            points = []
            for c in SETTINGS["fmnist"].concurrency:
                values = [
                    uploads(x) if key == "uploads" else x[key] / 1e9
                    for x in reached("fmnist", of(done, "fmnist", name, c))
                ]
                if values:
                    points.append((c, sum(values) / len(values), min(values), max(values)))
            if points:
                curves.append(
                    Drawn(name, *([*column] for column in zip(*points)), grey=name.startswith("FedAsync"))
                )
        panels.append(Panel("Fashion-MNIST", curves, x="concurrency", y=label, log=key != "uploads"))
    picture(HERE / "networks.png", panels, columns=2)


# The paper's claims -----------------------------------------------------------------------------------


def their_levels(done: Mapping[str, Line], name: str) -> tuple[float, float] | None:
    """(f − f* of the server's model, of what clients hold), means over seeds and the last evaluations."""
    lines = [
        line
        for s in SEEDS
        if (line := done.get(f"theirs/{name}/seed {s}")) is not None and not line["diverged"]
    ]
    if not lines:
        return None
    held_ = [v - optimum(True) for line in lines for v in line["curve"]["held"][-TAIL:]]
    return sum(level(line) for line in lines) / len(lines), sum(held_) / len(held_)


def against(done: Mapping[str, Line], quantised: str, plain: str) -> tuple[str, float | None]:
    """What clients hold beside FedBuff's; no ratio before all seeds are there."""
    a, b = their_levels(done, quantised), their_levels(done, plain)
    if a is None or b is None:
        return "not run", None
    seeds = min(sum(f"theirs/{name}/seed {s}" in done for s in SEEDS) for name in (quantised, plain))
    told = f"what clients hold is {a[1]:.1e} above f*, FedBuff's {b[1]:.1e} ({seeds} of {len(SEEDS)} seeds)"
    return told, a[1] / b[1] if seeds == len(SEEDS) else None


def times_fewer(done: Mapping[str, Line], part: str) -> str:
    found = []
    for concurrency in SETTINGS[part].concurrency:
        mine, base = (reached(part, of(done, part, n, concurrency)) for n in ("QAFeL, 4 bits", "FedBuff"))
        if mine and base:
            found.append(f"{mean(base, 'bytes_up') / mean(mine, 'bytes_up'):.1f}")
    return " / ".join(found) or "not run"


def size_claim(done: Mapping[str, Line]) -> Claim:
    mine, base = (
        reached("fmnist", [done[n] for s in SEEDS if (n := f"sizes/{name}/concurrency 100/seed {s}") in done]) for name in ("QAFeL, 4 bits", "FedBuff")
    )  # fmt: skip
    close = "not run"
    if mine and base:
        close = f"{mean(base, 'bytes_up') / mean(mine, 'bytes_up'):.1f} times fewer bytes up, {mean(mine, 'steps') / mean(base, 'steps'):.2f} times the uploads"
    return Claim(
        "Figure 7, by sizes", "the same where sizes follow a power law, as in the authors' code", "in small" if mine and base else "open",
        f"Fashion-MNIST, concurrency 100: {close}", "fedbraid reproduce qafel --part sizes",
    )  # fmt: skip


def local_claim(done: Mapping[str, Line]) -> Claim:
    """Figure 6: when f − f* < 0.01 is reached, and where it ends."""
    found = {k: by_name(done, "FedBuff", k) for k in LOCAL_STEPS}
    when = {
        k: [next((s for s, e in zip(steps(x), excess(x)) if e < 1e-2), None) for x in lines]
        for k, lines in found.items()
    }
    ends = {k: [level(x) for x in lines] for k, lines in found.items()}
    known = all(len(lines) == len(SEEDS) for lines in found.values())
    told = ", ".join(
        f"{k} local step{'s' if k > 1 else ''}: {spread(reached, 0) if (reached := [w for w in when[k] if w is not None]) else 'never'}, {numbers(ends[k])}"
        for k in LOCAL_STEPS if found[k]
    )  # fmt: skip
    parts: list[bool | None] = [None]
    if known:
        first = [min((w for w in when[k] if w is not None), default=STEPS) for k in LOCAL_STEPS]
        parts = [first == sorted(first, reverse=True), max(ends[LOCAL_STEPS[0]]) < min(ends[LOCAL_STEPS[-1]])]
    return Claim(
        "Figure 6", "more local steps: faster, to a worse end", verdict(parts), f"server steps to f − f* < 0.01, and f − f* after {STEPS:,}: {told}",
        "fedbraid reproduce qafel --cells 'mushrooms/FedBuff/*'",
    )  # fmt: skip


def factors(done: Mapping[str, Line], part: str) -> list[float]:
    """How many times fewer bytes up QAFeL takes than FedBuff, by concurrency."""
    found = []
    for concurrency in SETTINGS[part].concurrency:
        mine, base = (reached(part, of(done, part, n, concurrency)) for n in ("QAFeL, 4 bits", "FedBuff"))
        if len(mine) == len(base) == len(SEEDS):
            found.append(mean(base, "bytes_up") / mean(mine, "bytes_up"))
    return found


def bytes_claim(done: Mapping[str, Line], item: str, part: str, says: str, note: str) -> Claim:
    """Six times fewer bytes and more, at every concurrency."""
    found, levels = factors(done, part), SETTINGS[part].concurrency
    whole = len(found) == len(levels)
    return Claim(
        item, says, verdict([f > 5 for f in found] if whole else [None]),
        f"{times_fewer(done, part)} times fewer bytes up at concurrency {' / '.join(map(str, levels))} ({note})", f"fedbraid reproduce qafel --part {part}",
    )  # fmt: skip


def direct_claim(done: Mapping[str, Line]) -> Claim:
    """Figures 9 and 10: how many runs with direct quantisation reach the target."""
    told, parts = [], []
    for concurrency in SETTINGS["shakespeare"].concurrency:
        lines = of(done, "shakespeare", "FedBuff, direct 4 bits", concurrency)
        there = reached("shakespeare", lines)
        if lines:
            told.append(f"{len(there)} of {len(lines)} at {concurrency}")
        known = len(lines) == len(SEEDS)
        parts.append(((len(there) == len(SEEDS)) == (concurrency == 100)) if known else None)
    return Claim(
        "Figures 9 and 10, direct", "direct quantisation gets there at concurrency 100, and fails in some run at 500 and 1,000", verdict(parts),
        f"runs that reach {100 * SETTINGS['shakespeare'].target:.0f} %: {', '.join(told) or 'none run'}; the paper's LSTM in full size", "fedbraid reproduce qafel --part shakespeare",
    )  # fmt: skip


def width_claim(done: Mapping[str, Line]) -> Claim:
    base = [uploads(x) for x in reached("fmnist", of(done, "fmnist", FLAT, ARRIVALS_100))]
    found = {
        w: [uploads(x) for x in reached("fmnist", of(done, "fmnist", f"QAFeL {w} bits", ARRIVALS_100))]
        for w in WIDTHS
    }
    ratio = {
        w: sum(v) / len(v) / (sum(base) / len(base))
        for w, v in found.items()
        if len(v) == len(SEEDS) and base
    }
    whole = len(ratio) == len(WIDTHS)
    parts = [ratio[4, 4] < 1.1, max(ratio[2, s] for s in (8, 4, 2)) > 1.5] if whole else [None]
    told = (
        f"{len(ratio)} of {len(WIDTHS)} pairs reach the target in all seeds, with {min(ratio.values()):.2f} to {max(ratio.values()):.2f} times FedBuff's uploads"
        if ratio
        else "not run"
    )
    return Claim("Table IV", "4 bits both ways cost no more uploads; 2-bit clients up to 3.5 times", verdict(parts), f"{told} (Fashion-MNIST to 70 % in place of CelebA)", "fedbraid reproduce qafel --part fmnist")  # fmt: skip


def after_claim(done: Mapping[str, Line]) -> Claim:
    """Bytes up to the target, beside what came after."""
    mine = reached("fmnist", of(done, "fmnist", "QAFeL, 4 bits", 100))
    base = reached("fmnist", of(done, "fmnist", "FedBuff", 100))
    told, parts = [], []
    for name in AFTER:
        lines = [done[n] for s in SEEDS if (n := f"after/{name}/concurrency 100/seed {s}") in done]
        there = reached("fmnist", lines)
        if lines:
            need = f"{sum(map(uploads, there)) / len(there):.1f} thousand uploads" if there else "not reached"
            told.append(f"{name} {need} ({len(there)} of {len(lines)} seeds)")
        known = len(lines) == len(SEEDS) and mine
        parts.append(
            (len(there) < len(SEEDS) or mean(there, "bytes_up") > mean(mine, "bytes_up")) if known else None
        )
    both = ", ".join(
        f"{n} {sum(map(uploads, x)) / len(x):.1f}" for n, x in (("QAFeL", mine), ("FedBuff", base)) if x
    )
    return Claim(
        "beside CA²FL (2024), ACE (2025), FADAS (2024)", "(not in the paper) none of them tuned", "also here",
        f"to 70 % on Fashion-MNIST, concurrency 100: {', '.join(told) or 'not run'}; {both}", "fedbraid reproduce qafel --part after",
    )  # fmt: skip


def direct_small_claim(done: Mapping[str, Line]) -> Claim:
    """Direct quantisation on Fashion-MNIST at every concurrency."""
    told, parts = [], []
    for concurrency in SETTINGS["fmnist"].concurrency:
        lines = of(done, "fmnist", "FedBuff, direct 4 bits", concurrency)
        there = reached("fmnist", lines)
        told.append(f"{len(there)} of {len(lines)} at {concurrency}")
        if concurrency > 100:
            parts.append(len(there) < len(SEEDS) if len(lines) == len(SEEDS) else None)
    return Claim(
        "Figure 10, direct, on Fashion-MNIST", "direct quantisation at 4 bits fails in some run at 500 and 1,000", verdict(parts),
        f"runs that reach 70 %: {', '.join(told)}, in as many uploads as QAFeL within the seeds' spread; an early target", "fedbraid reproduce qafel --part fmnist",
    )  # fmt: skip


def equal_claim(done: Mapping[str, Line]) -> Claim:
    """Direct and hidden state with the same codec, to a late target."""
    told, parts = [], []
    for w in EQUAL:
        pair = [
            [done[n] for s in SEEDS if (n := f"late/{k}/concurrency {ARRIVALS_100}/seed {s}") in done]
            for k in (f"QAFeL {w} bits", f"direct {w} bits, QAFeL's codec")
        ]
        there = [[x for x in some if (x["curve"]["accuracy"] or [0])[-1] >= LATE] for some in pair]
        if all(pair):
            told.append(
                f"{w} bits: QAFeL {spread([uploads(x) for x in there[0]])} ({len(there[0])} of {len(pair[0])}), direct {spread([uploads(x) for x in there[1]])} ({len(there[1])} of {len(pair[1])})"
            )
        whole = all(len(some) == len(SEEDS) for some in pair) and bool(there[0])
        fewer = len(there[1]) < len(there[0])  # direct misses it in some run
        parts.append((fewer or mean(there[1], "steps") > 1.2 * mean(there[0], "steps")) if whole else None)
    return Claim(
        "hidden state at equal codec", "direct quantisation needs more uploads", verdict(parts),
        f"thousand uploads to {100 * LATE:.0f} % on Fashion-MNIST, the same codec both ways: {'; '.join(told) or 'not run'}", "fedbraid reproduce qafel --part late",
    )  # fmt: skip


DATA = "Fashion-MNIST to 70 % in place of CIFAR-10 to 60 %"


def claims(done: Mapping[str, Line]) -> list[Claim]:
    run = "fedbraid reproduce qafel"
    direct, factor = against(done, "direct qsgd, 8 levels, server alone", "FedBuff")
    exact = [their_levels(done, n) for n in ("direct qsgd, 8 levels, server alone", "FedBuff")]
    same = None if None in exact else exact[0][0] / exact[1][0]  # type: ignore[index]
    hidden, near = against(done, "QAFeL qsgd, 8 levels, both ways", "FedBuff")
    top, worse = against(done, "direct top 50 %", "FedBuff")
    few, close = against(done, "QAFeL top 1 %", "FedBuff")

    def status(ratio: float | None, fails: bool) -> str:
        return "open" if ratio is None else "agrees" if (ratio > 2 if fails else ratio < 1.1) else "differs"

    return [
        Claim("Figures 2, 5a, direct", "3-bit QSGD sent directly does not converge", verdict([factor > 2, same > 2] if factor and same else [None]), f"{direct}; the server's own exact model, which the paper draws, ends at {same or 0:.2f} times FedBuff's", f"{run} --part theirs"),
        Claim("Figure 5a, QAFeL", "3-bit QSGD over a hidden state is very close to the unquantised run", status(near, False), hidden, f"{run} --part theirs"),
        Claim("Figures 2, 5b, direct", "the top 50 % sent directly diverges", verdict([worse > 2, worse > 1e3] if worse else [None]), f"{top}, after {STEPS:,} steps", f"{run} --part theirs"),
        Claim("Figure 5b, QAFeL", "the top 1 % over a hidden state converges", status(close, False), few, f"{run} --part theirs"),
        local_claim(done),
        bytes_claim(done, "Figure 7", "fmnist", "6 to 7.7 times fewer bytes up than FedBuff", DATA),
        size_claim(done),
        Claim("Figure 8", "CelebA: 5.2 to 8 times fewer bytes up", "open", "the data is not here; `load('celeba')` reads it", f"{run} --full --part full-CelebA"),
        bytes_claim(done, "Figure 9", "shakespeare", "Shakespeare: fewer bytes in the same way", "shortened; 660 roles, so 660 busy at 1,000"),
        direct_claim(done),
        direct_small_claim(done),
        equal_claim(done),
        width_claim(done),
        after_claim(done),
        by_test("tests/test_codecs.py", "message sizes below the paper's 29.924, 15.380, 8.108 kB", "Table IV, kB", "bytes a message"),
        Claim("Table III", "tuned rates", "also here", "those of the authors' code, as the mean of eq. 3 has them, in the full-size cells", f"{run} --full --list"),
        by_test("tests/test_pseudocode_async.py::test_qafel", "equal to a transcription (equation 15 has a slip)", "Algorithms 1 to 3", "server, client and hidden state"),
        by_test("tests/test_properties.py::test_server_and_clients_hold_the_same_hidden_state_to_the_bit", "bit for bit", "section II", "server and clients hold the same hidden state"),
        by_test("tests/test_reductions.py::test_qafel_identity_with_a_buffer_of_all_in_flight_is_fedavg", "exact", "section II", "without quantisation it is FedBuff, without delay FedAvg"),
        by_test("tests/test_properties.py::test_qsgd_is_unbiased_and_contracts_when_divided", "measured over many draws", "Assumption, eq. 1", "what the codecs must satisfy"),
        Claim("Theorem III.7, Corollary III.8", "O(1/√T), the error of quantising and staleness of higher order", "open", "not tried", "–"),
        Claim("Tables I and II, Figures 1, 3, 4", "related work, notation, drawings", "also here", "nothing to measure", "–"),
    ]  # fmt: skip


def sentences(done: Mapping[str, Line]) -> list[str]:
    """What came of QAFeL."""
    said = []
    found = factors(done, "fmnist")
    if found:
        said.append(f"On Fashion-MNIST to 70 % QAFeL at 4 bits sends {min(found):.1f} to {max(found):.1f} times fewer bytes up than FedBuff, as the paper has it: a message is 7.8 times smaller, and it takes as many uploads.")  # fmt: skip
    lines = {
        n: reached("fmnist", of(done, "fmnist", n, 100))
        for n in ("QAFeL, 4 bits", "FedBuff", "FedBuff, direct 4 bits")
    }
    if all(len(v) == len(SEEDS) for v in lines.values()):
        down = {n: mean(v, "bytes_down") / 1e6 for n, v in lines.items()}
        said.append(
            f"Downwards it saves only where there is a broadcast: sent to each client by itself, QAFeL takes {down['QAFeL, 4 bits']:,.0f} MB, FedBuff {down['FedBuff']:,.0f} and direct"
            f" quantisation {down['FedBuff, direct 4 bits']:,.0f} (concurrency 100), because a client that comes rarely fetches the whole state."
        )
    direct = [
        len(reached("fmnist", of(done, "fmnist", "FedBuff, direct 4 bits", c)))
        for c in SETTINGS["fmnist"].concurrency
    ]
    if sum(direct):
        said.append(
            f"Direct quantisation at 4 bits does not fail here: it reaches 70 % in {sum(direct)} of {len(SEEDS) * len(direct)} runs, up to concurrency 1,000."
        )
    held_by = [
        their_levels(done, n)
        for n in ("direct qsgd, 8 levels, server alone", "QAFeL qsgd, 8 levels, server alone", "FedBuff")
    ]
    if None not in held_by:
        said.append(
            f"On mushrooms what clients hold ends at {held_by[0][1]:.1e} above the optimum with direct quantisation and at {held_by[1][1]:.1e} with the hidden state (FedBuff {held_by[2][1]:.1e});"  # type: ignore[index]
            f" the server's own model converges either way ({held_by[0][0]:.1e})."  # type: ignore[index]
        )
    equal = equal_claim(done)
    if equal.status == "open":
        said.append(
            "The rows of 2 bits without hidden state in the table of widths have another codec than QAFeL's; with the same one they are a part of their own (`late`), not run."
        )
    else:
        said.append(
            f"With the same codec both ways direct quantisation is compared at a late target ({equal.status}): {equal.close}."
        )
    return said
