"""QAFeL, section IV-A: logistic regression on mushrooms (Figures 2, 5 and 6).

100 clients, half-normal delays, buffer 10, client rate 2, server rate 0.1, l2 1/8124, all 8,124 rows.
No client quantisation, as in the paper's figures, except where a name says "both ways".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

import fedbraid as fb
from fedbraid.data import mushrooms as reader
from fedbraid.data.partition import Table, iid
from fedbraid.reproduce import Cell, Line, Panel, markdown, picture, spread

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
    return fb.Task.from_table(
        zeros(), x, y, shares, test=(x, y), loss="logistic", name="mushrooms, all rows"
    )


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


def cells() -> list[Cell]:
    found: dict[str, Cell] = {}
    for seed in SEEDS:
        wanted = [(n, a, 10) for n, a in METHODS.items() if not n.endswith("both ways")]
        wanted += [("l2 norm, 3 bits", NORMS["l2 norm, 3 bits"], 10)] + [
            (n, a, 1) for n, a in METHODS.items()
        ]
        wanted += [("FedBuff", METHODS["FedBuff"], k) for k in LOCAL_STEPS]
        wanted += [(n, a, 10) for n, a in {**METHODS, **NORMS}.items() if n != "max norm, 3 bits"]
        for name, algorithm, steps in wanted:
            made = cell(name, algorithm, steps, seed)
            found.setdefault(made.name, made)
    return list(found.values())


# Tables and pictures --------------------------------------------------------------------------------


def optimum() -> float:
    """f*, from optimum.py."""
    return float(json.loads((HERE / "optimum.json").read_text())["f"])


def excess(line: Line) -> list[float]:
    """f(x) − f* where the model was judged."""
    f = optimum()
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


def by_name(done: Mapping[str, Line], name: str, k: int) -> list[Line]:
    lines = [done.get(f"mushrooms/{name}/{k} local steps/seed {s}") for s in SEEDS]
    return [line for line in lines if line is not None]


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
    said = next((line["diverged"] for line in done.values() if line["diverged"]), None)
    return {
        "methods": markdown(["server to clients", "f − f*, 10 local steps", "f − f*, 1 local step", "bytes a broadcast", "bytes an upload"], methods),
        "local steps": markdown(["local steps", "server steps to f − f* < 0.01", "f − f* at the end"], local),
        "norms": markdown(["server codec", "mean ‖v − Q(v)‖²/‖v‖²", "largest ‖x‖", "f − f* at the end, a seed each"], norms),
        "caught": f"> {said}" if said else "(no run was stopped)",
    }  # fmt: skip


def draw(done: Mapping[str, Line]) -> None:
    def curves(chosen: dict[str, tuple[str, int]]) -> list[tuple[str, list[int], list[float]]]:
        drawn = []
        for label, (name, k) in chosen.items():
            for line in by_name(done, name, k)[:1]:
                drawn.append((label, steps(line), [max(e, 1e-6) for e in excess(line)]))
        return drawn

    def panel(title: str, chosen: dict[str, tuple[str, int]]) -> Panel:
        return Panel(title, curves(chosen), x="server step", y="f(x) − f*", log=True)

    biased = ("FedBuff", "direct top 50 %", "QAFeL top 1 %")
    unbiased = ("FedBuff", "direct qsgd 3 bits", "QAFeL qsgd 3 bits")
    panels = [
        panel("Figures 2, 5a: qsgd, 10 local steps", {n: (n, 10) for n in unbiased}),
        panel("Figures 2, 5b: top-k, 10 local steps", {n: (n, 10) for n in biased}),
        panel(
            "Figure 6: local steps, FedBuff",
            {f"FedBuff, {k} local steps": ("FedBuff", k) for k in LOCAL_STEPS},
        ),
        panel("qsgd, 1 local step", {n: (n, 1) for n in unbiased}),
        panel("top-k, 1 local step", {n: (n, 1) for n in biased}),
        panel(
            "server codecs of qsgd",
            {n: (n if not n.startswith("max") else "QAFeL qsgd 3 bits", 10) for n in NORMS},
        ),
    ]
    if any(p.curves for p in panels):
        picture(HERE / "mushrooms.png", panels)
