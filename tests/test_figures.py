"""Does every printed figure follow from the results files? Read and computed here by a path of its own, with NumPy alone."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

HOME = Path(__file__).parents[1] / "experiments"


@cache
def results(paper):
    """The last line of every cell."""
    found = {}
    for file in sorted((HOME / paper / "results").glob("*.jsonl")):
        for text in file.read_text().splitlines():
            line = json.loads(text)
            found[line["cell"]] = line
    return found


def rows(paper, name):
    """(the heads, the rows by their first column) of a table of a paper's page."""
    text = (
        (HOME / paper / "README.md").read_text().split(f"<!-- table {name} -->")[1].split("<!-- end -->")[0]
    )
    lines = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    assert len(lines) > 2, f"{paper} has no table {name!r}"
    return lines[0], {line[0]: line[1:] for line in lines[2:]}


def seeds_of(paper, name):
    """The lines of all seeds of a cell that stayed finite."""
    lines = results(paper)
    return [v for k, v in sorted(lines.items()) if k.rpartition("/seed ")[0] == name and not v["diverged"]]


def late(line, last, key="accuracy"):
    """The mean of a measurement over the last so many steps."""
    step, values = np.array(line["curve"]["step"]), np.array(line["curve"][key], float)
    return values[step > step.max() - last].mean()


def said(values, digits=1):
    values = np.array(values, float)
    if not len(values):
        return "–"
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {values.std(ddof=1):.{digits}f}"


def near(cell, values, digits=1):
    """Whether a cell is the values' mean and deviation, to half a unit of the last digit: ties round either way."""
    printed = [float(v) for v in cell.split(" ± ")]
    exact = [np.mean(values), *([np.std(values, ddof=1)] if len(values) > 1 else [])]
    return len(printed) == len(exact) and np.allclose(printed, exact, rtol=0, atol=0.5 * 10**-digits + 1e-9)


@pytest.mark.parametrize("part", ["table1", "table2"])
def test_fedshifts_tables(part):
    heads, table = rows("fedshift", part)
    for label, cells in table.items():
        method, rest = label.split(", ", 1)
        shifted = rest.endswith(", shifted")
        where = rest.removesuffix(", shifted").replace(", ", "/", 1)
        for head, cell in zip(heads[1:], cells):
            bits = head.removeprefix("32+")
            mark = " shifted" if shifted and bits != "32" else ""
            lines = seeds_of("fedshift", f"{part}/{where}/{method} {head}{mark}")
            assert cell.split(" / ")[0] == said([100 * late(x, 5) for x in lines]), (label, head)


def test_fedshifts_pairs():
    lost = total = 0
    kinds = [
        "table1/parity shards/kmeans",
        *(f"table2/Dirichlet {a}/{q}" for a in (0.1, 0.5, 100) for q in ("uniform", "kmeans")),
    ]
    for kind in kinds:
        for bits in (6, 8):
            plain, shifted = (
                seeds_of("fedshift", f"{kind}/FedPAQ 32+{bits}{mark}") for mark in ("", " shifted")
            )
            for a, b in zip(plain, shifted):
                assert a["seed"] == b["seed"]
                lost, total = lost + (late(b, 5) < late(a, 5)), total + 1
    assert f"the shift loses in {lost} of {total} pairs" in (HOME / "fedshift" / "README.md").read_text()


@pytest.mark.parametrize("dataset", ["mnist", "fmnist"])
def test_fedadavrs_ablation_and_what_the_memory_is_worth(dataset):
    window = {"mnist": dict.fromkeys(("IID", "IID-mix", "Dirichlet", "LQ-1", "LQ-2", "LQ-3"), 10)} | {
        "fmnist": dict(zip(("IID", "IID-mix", "Dirichlet", "LQ-1", "LQ-2", "LQ-3"), (10, 10, 15, 35, 25, 15)))
    }
    gains = []
    for label, cells in rows("fedadavr", f"{dataset} ablation")[1].items():
        partition, same = re.fullmatch(r"(\S+) \((.+)\)", label).groups()
        rate = same.split()[1]
        names = [
            f"FedAdaVR {same}",
            f"NoVR {same}",
            f"NoOPT {rate}",
            "NoOPT 1",
            *(f"FedAdaVR-{m} {same}" for m in ("fp16", "int8", "int4")),
        ]
        found = {}
        for name, cell in zip(names, cells):
            lines = seeds_of("fedadavr", f"{dataset}/{partition}/{name}/client 0.01")
            found[name] = [100 * late(x, window[dataset][partition]) for x in lines]
            assert cell.split(" (")[0] == said(found[name]), (label, name)
        gains += [a - b for a, b in zip(found[names[0]], found[names[1]])]
    error = np.std(gains, ddof=1) / np.sqrt(len(gains))
    page = (HOME / "README.md").read_text()
    assert f"{np.mean(gains):+.2f} ± {error:.2f} points (standard error, {len(gains)} pairs)" in page


def test_fedadavr_on_cifar10():
    heads, table = rows("fedadavr", "cifar10")
    for label, cells in table.items():
        method, rate = label.split(", η_c ")
        lines = seeds_of("fedadavr", f"cifar10/LQ-1/{method}/client {rate}")
        assert cells[0].split(" (")[0] == (
            said([100 * late(x, 60) for x in lines]) if lines else "diverges"
        ), label
        for head, cell in zip(heads[3:], cells[2:]):
            target = int(re.search(r"(\d+) %", head)[1]) / 100
            when = []
            for x in lines:
                there = np.flatnonzero(np.array(x["curve"]["accuracy"], float) >= target)
                when += [x["curve"]["step"][there[0]]] if len(there) else []
            assert cell.split(" (")[0] == (f"{np.mean(when):.0f}" if when else "x"), (label, head)
    for label, cells in rows("fedadavr", "worth")[1].items():
        method, rate = label.split(", η_c ")
        values = [100 * late(x, 60) for x in seeds_of("fedadavr", f"cifar10/LQ-1/{method}/client {rate}")]
        assert cells == [said(values), " / ".join(f"{v:.1f}" for v in values)], label


def test_fedadavrs_convex_table():
    for label, cells in rows("fedadavr", "convex")[1].items():
        for K, cell in zip((1, 5), cells):
            ends = [
                np.mean(x["curve"]["above"][-(len(x["curve"]["above"]) // 5) :])
                for x in seeds_of("fedadavr", f"convex/mushrooms/{label}, K = {K}/client 0.2")
            ]
            assert cell == (" / ".join(f"{v:.1e}" for v in ends) or "–"), (label, K)


def test_how_many_of_fedadavrs_printed_cells_are_near():
    window = dict(zip(("IID", "IID-mix", "Dirichlet", "LQ-1", "LQ-2", "LQ-3"), (10, 10, 15, 35, 25, 15)))
    names = {"fedadavr": "FedAdaVR", "fedadavr-quant": "FedAdaVR-fp16", "fedvarp": "FedVARP"}
    lines = (HOME / "fedadavr" / "paper.csv").read_text().splitlines()
    keys = lines[0].split(",")
    for dataset in ("mnist", "fmnist"):
        near = total = 0
        for line in lines[1:]:
            r = dict(zip(keys, line.split(",")))
            if r["dataset"] == dataset:
                method = " ".join(
                    filter(None, (names[r["method"]], r["optimizer"], f"{float(r['server_lr']):g}"))
                )
                mine = seeds_of("fedadavr", f"{dataset}/{r['partition']}/{method}/client 0.01")
                w = 10 if dataset == "mnist" else window[r["partition"]]
                total += 1
                near += abs(np.mean([100 * late(x, w) for x in mine]) - float(r["accuracy"])) <= 2.5
        assert f"{near} of {total} cells within 2.5 points" in (HOME / "README.md").read_text()


@pytest.mark.parametrize(
    ("task", "K"), [(t, k) for t in ("FEMNIST", "CIFAR100", "Shakespeare") for k in (10, 50)]
)
def test_fedgbos_tables(task, K):
    heads, table = rows("fedgbo", f"{task} {K}")
    target = int(re.search(r"(\d+) %", heads[2])[1]) / 100
    for label, cells in table.items():
        lines = seeds_of("fedgbo", f"{task}/K {K}/{label}")
        assert (
            near(cells[0], [100 * x["curve"]["accuracy"][-1] for x in lines])
            if lines
            else cells[0] == "diverged"
        ), label
        there = [
            (x["curve"], at[0])
            for x in lines
            if len(at := np.flatnonzero(np.array(x["curve"]["accuracy"], float) >= target))
        ]
        assert cells[1].startswith(f"{len(there)} of "), label
        whole = cells[1] == f"{len(there)} of {len(there)}"
        for cell, (key, unit) in zip(
            cells[2:], (("step", 1), ("bytes_up", 1e6), ("bytes_down", 1e6), ("flops", 1e9))
        ):
            assert cell == (
                f"{np.mean([c[key][i] for c, i in there]) / unit:.0f}" if there and whole else "x"
            ), (label, key)


def test_qafels_networks():
    for label, cells in rows("qafel", "fmnist")[1].items():
        concurrency, name = label.split(", ", 1)
        lines = [
            x
            for x in seeds_of("qafel", f"fmnist/{name}/concurrency {concurrency}")
            if x["curve"]["accuracy"][-1] >= 0.7
        ]
        each = 1 if "fedasync" in lines[0]["algorithm"] else 10
        wanted = [said([x["steps"] * each / 1e3 for x in lines], 2)]
        wanted += [
            said([x[key] / 1e9 for x in lines], 4) for key in ("bytes_up", "bytes_broadcast", "bytes_down")
        ]
        assert cells[1:5] == wanted, label


@pytest.mark.parametrize("which", ["fmnist", "femnist", "shakespeare"])
def test_accuracy_over_epsilon(which):
    heads, table = rows("privacy", which)
    for label, cells in table.items():
        for head, cell in zip(heads[1:-1], cells):
            assert cell == said([100 * late(x, 5) for x in seeds_of("privacy", f"{which}/{label}/{head}")]), (
                label,
                head,
            )


def test_adabests_tables():
    table = rows("adabest", "stability")[1]
    assert "‖θ‖, round 175" in rows("adabest", "stability")[0]
    for label, cells in table.items():
        partition, name, *note = label.split(", ")
        name, part = name.removesuffix(" (2025)"), "after" if label.endswith("(2025)") else "stability"
        part = "theirs" if "weight decay 1e-3" in label else "work" if "5 epochs" in label else part
        lines = seeds_of("adabest", f"{part}/{partition}/{name}")
        wanted = [
            said([100 * np.max(x["curve"]["accuracy"]) for x in lines]),
            said([100 * late(x, 5) for x in lines]),
        ]
        wanted += [
            said([x["curve"]["norm"][x["curve"]["step"].index(175)] for x in lines]),
            said([x["curve"]["norm"][-1] for x in lines]),
        ]
        assert cells[:4] == wanted, (label, note)
    for label, cells in rows("adabest", "beta")[1].items():
        wanted = [
            said(
                [
                    100 * late(x, 5)
                    for x in seeds_of("adabest", f"beta/Dirichlet 0.3/AdaBest {label}, {n} a round")
                ]
            )
            for n in (5, 10, 20)
        ]
        assert cells == wanted, label
    for label, cells in rows("adabest", "mu")[1].items():
        for name, two in (("FedDyn", cells[:2]), ("AdaBest", cells[2:])):
            lines = seeds_of("adabest", f"mu/IID/{name} {label}")
            assert two == [
                said([100 * late(x, 5) for x in lines]),
                said([x["curve"]["norm"][-1] for x in lines]),
            ], (label, name)


TEN = (
    "braid", "FedAdaVR", "FedAdaBelief", "QAFeL", "FedVARP", "FedAvg", "braid without memory", "braid without asynchrony",
    "braid without links", "braid without adaptive step",
)  # fmt: skip


def chosen(which, row):
    """The line of the setting that is best on the held-out clients: of fifteen where all ten rows have them, else of nine."""
    tried = {
        name: [v for k, v in results("braid").items() if k.startswith(f"tune-{which}/{name}/")]
        for name in {row, *TEN}
    }
    further = all(len(tried[name]) == 15 for name in TEN)
    outer = ("lr=0.000316,", "lr=0.0316,") if which == "A" and not (further and row in TEN) else ()
    mine = [v for v in tried[row] if not any(rate in v["work"] for rate in outer)]
    assert len(mine) == (15 if further and row in TEN else 9)
    return max(mine, key=lambda v: 10.0 if v["diverged"] else 100 * late(v, v["steps"] // 5))


def runs(which, row):
    """The lines with the chosen setting, by seed."""
    best = chosen(which, row)
    return {
        v["seed"]: v
        for k, v in sorted(results("braid").items())
        if k.startswith(f"{which}/{row}/seed ") and all(v[key] == best[key] for key in ("algorithm", "work"))
    }


def joules(curve, at):
    """Computing at 0.4 nJ and 2 GFLOP/s with 0.13286 W idle; 283.17 mW per Mbit/s up and 137.01 down."""
    flops, up, down = (curve[key][at] for key in ("flops", "bytes_up", "bytes_down"))
    return flops * (4e-10 + 0.13286 / 2e9) + 8e-9 * (283.17 * up + 137.01 * down)


@pytest.mark.parametrize(("which", "target"), [("A", 40), ("B", 75), ("B", 82)])
def test_the_braids_tables(which, target):
    text = (
        (HOME / "braid" / "README.md")
        .read_text()
        .split(f"<!-- table {which} {target} -->")[1]
        .split("<!-- end -->")[0]
    )
    if text.count("\n| ") < 3:
        assert not [k for k in results("braid") if k.startswith(f"{which}/")]
        return
    for label, cells in rows("braid", f"{which} {target}")[1].items():
        best, lines = chosen(which, label), list(runs(which, label).values())
        settings = re.findall(r"\d[\d.]*(?:e-\d+)?", best["cell"].rpartition("/")[2])
        assert settings == cells[0].split(", "), label
        assert cells[1] == str(len(lines))
        there = [
            (x["curve"], at[0])
            for x in lines
            if len(at := np.flatnonzero(np.array(x["curve"]["accuracy"], float) >= target / 100))
        ]
        for cell, (key, unit, digits) in zip(
            cells[2:6],
            (
                ("time", 1 if which == "A" else 3600, 0),
                ("bytes_up", 1e6, 1),
                ("bytes_down", 1e6, 1),
                ("bytes_broadcast", 1e6, 1),
            ),
        ):
            spent = [curve[key][at] / unit for curve, at in there]
            assert cell.split(" (")[0] == (
                said(spent, digits) if spent else "not reached" if lines else "–"
            ), (label, key)
        if there:
            assert near(cells[6].split(" (")[0], [joules(*found) for found in there], 0), label
        for cell, key in zip(cells[7:], ("accuracy", "accuracy_worst_tenth")):
            assert cell == said(
                [0.0 if x["diverged"] else 100 * late(x, x["steps"] // 5, key) for x in lines]
            ), (label, key)


def test_the_braids_pairs():
    """Ratios by seed with the interval of Student's t; who does not get there enters with the whole run."""
    student = {2: 12.7062, 3: 4.3027, 4: 3.1824, 5: 2.7764}  # 97.5 %, by number of pairs
    mine = runs("A", "braid")
    for label, cells in rows("braid", "A 40 paired")[1].items():
        theirs = runs("A", label)
        assert cells[0] == str(len(mine.keys() & theirs.keys()))
        for cell, key in zip(cells[2:5], ("time", "bytes_up", "bytes_down")):
            logs, missed = [], 0
            for seed in sorted(mine.keys() & theirs.keys()):
                at = [
                    np.flatnonzero(np.array(x["curve"]["accuracy"], float) >= 0.4)
                    for x in (mine[seed], theirs[seed])
                ]
                if not len(at[0]) and not len(at[1]):
                    continue
                ends = [
                    x["curve"][key][i[0] if len(i) else -1] for x, i in zip((mine[seed], theirs[seed]), at)
                ]
                logs.append(np.log(ends[1] / ends[0]))
                missed += not len(at[1])
            if len(logs) > 1:
                half = student[len(logs)] * np.std(logs, ddof=1) / np.sqrt(len(logs))
                printed = [float(v) for v in re.findall(r"\d+\.\d+", cell)[:3]]
                exact = np.exp([np.mean(logs), np.mean(logs) - half, np.mean(logs) + half])
                assert np.allclose(printed, exact, rtol=2e-4, atol=0.0051), (label, key)
                assert ("≥" in cell) == (missed > 0), (label, key)
                assert cells[1] == f"{len(theirs) - missed} of {len(theirs)}", label


def test_the_braids_strands_are_its_paired_rows():
    """The same ratios as in the paired table, and what the braid loses with its sign turned."""
    paired = rows("braid", "A 40 paired")[1]
    for label, cells in rows("braid", "strands")[1].items():
        whole = paired[f"braid {label}"]
        assert cells[:4] == [whole[0], *whole[2:5]], label
        assert float(cells[4].split(" ± ")[0]) == -float(whole[6].split(" ± ")[0]), label


def test_what_memory_is_worth_under_robust_rules():
    """By attack and seed, FedAdaVR less FedAvg under the same rule, 20 % hostile; a run that diverged has 0."""
    names = {"Fashion-MNIST": "fmnist", "FEMNIST": "femnist"}
    lines = results("hostile")
    heads, table = rows("hostile", "worth")
    for rule, cells in table.items():
        for head, cell in zip(heads[1:], cells):
            data, split = head.split(", ")
            there = re.compile(rf"{names[data]}/{split}/20% (?!none)\S+/{re.escape(rule)}/FedAdaVR/seed ")
            gains = []
            for key, one in lines.items():
                other = lines.get(key.replace("/FedAdaVR/", "/FedAvg/"))
                if there.match(key) and other:
                    ends = [0.0 if x["diverged"] else 100 * late(x, 5) for x in (one, other)]
                    gains.append(ends[0] - ends[1])
            wanted = (
                f"{np.mean(gains):+.1f} ({np.sum(np.array(gains) > 0)} of {len(gains)})" if gains else "–"
            )
            assert cell == wanted, (rule, head)


def test_the_guides_first_table_stands_in_the_experiments():
    """Every mean and deviation that docs/choose.md gives as evidence is in a table of an experiment's page."""
    table = (HOME.parent / "docs" / "choose.md").read_text().split("| your case |")[1].split("\n\n")[0]
    figures = re.findall(r"\d+\.\d ± \d+\.\d", table)
    pages = "".join(page.read_text() for page in HOME.glob("*/README.md"))
    assert len(figures) > 15
    assert [figure for figure in figures if not re.search(rf"\| {figure}[ |]", pages)] == []


def test_seeds_are_compared_with_the_same_seeds():
    """No cell is there twice under two names with one setting, which would count a run as two."""
    for paper in ("braid", "fedadavr", "fedshift"):
        parts = {}
        for line in results(paper).values():
            key = tuple(str(line[k]) for k in ("task", "algorithm", "work", "schedule", "seed"))
            parts.setdefault((line["cell"].partition("/")[0], key), []).append(line["cell"])
        for same in parts.values():
            assert len(same) == 1 or all(
                a.split("/")[1] != b.split("/")[1] for a, b in combinations(same, 2)
            ), same
