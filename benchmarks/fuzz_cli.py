"""Command lines and run folders that are wrong in every way: one sentence and exit code 2, never a traceback.

python benchmarks/fuzz_cli.py --cases 10000
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import sqlite3
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedbraid as fb
from fedbraid.cli import main
from fedbraid.run.checkpoint import Folder

TEXTS = [
    "", " ", "-1", "0", "1", "3", "2.5", "1e309", "nan", "-inf", "9" * 30, "x" * 300, "a\0b", "\udcff", "ü", "../..", "/",
    "/etc/passwd", "/proc/self/mem", "/dev/null/x", ".", "~", "file", "folder", "run", "cut", "grid", "missing", "(",
    "fedavg()", "fedavg(lr=", "fedavg(lr=-1)", "fedavg(lr='x')", "fedpaq(1)", "fedshift(fedshift(fedavg()))", "int8()",
    "__import__('os')", "dirichlet(0)", "dirichlet('a')", "label_chunks(10**9)", "iid", "digits", "digits(clients=2)",
    "[1, 2]", "{}", "None", "a=b", "lr=0.1", "lr=[]", "algorithm.lr=1", "cpu", "cuda:99", "full", "1,2,3", "1,,", "'",
    "bytes", "<script>", "/*script*/", "%s%n", "🦊", "x.toml", "bad.toml", "report.html", "out.onnx", "out.safetensors",
    "127.0.0.1", "999.9.9.9", "pool(workers=-1)", "in_process(backend='x')", "constant(-1)", "lognormal(0, 1)",
    "phones", "availability('phones', period=-1)", "availability('phones')", "availability(3)", "devices('x')",
]  # fmt: skip
COMMANDS: dict[str, list[str]] = {
    "run": ["--clients", "--partition", "--model", "-a", "--lr", "--epochs", "--steps", "--batch", "--momentum", "--clip",
            "--rounds", "--per-round", "--over-select", "--timeout", "--buffer", "--concurrency", "--arrivals", "--durations",
            "--bandwidth", "--availability", "--replay-timing", "--seed", "--engine", "--device", "--client-state", "--out", "--evaluate-every", "--target", "--track",
            "--patience", "--keep-best", "--allow-numeric-changes", "--json", "--quiet"],
    "resume": ["--target", "--track", "--patience", "--keep-best", "--no-keep-best", "--json", "--quiet"],
    "report": ["--out", "--target", "--axis", "--csv", "--latex", "--unfinished", "--json"],
    "export": ["--format", "--json"],
    "cost": ["--clients", "--per-round", "--rounds", "--model", "--lr", "--batch", "--json"],
    "list": ["--json"],
    "data": ["--json"],
    "compare": ["--seeds", "--target", "--out", "--lr", "--clients", "--rounds", "--json"],
    "sweep": ["--out", "--trials", "--seed", "--lr", "--clients", "--json"],
    "reproduce": ["--part", "--cells", "--out", "--json"],
    "deploy": ["--nodes", "--host", "-c", "--json"],
    "watch": ["--port", "--host", "--target"],
    "nothing": ["--help", "--version"],
}  # fmt: skip
SLOW = {"trial", "demo", "doctor"}  # which start processes or train for long
Case = tuple[list[str], Callable[[], None]]


class Stop(Exception):
    pass


class StopAt:
    def step(self, record: dict[str, Any], run: Any) -> None:
        if record["step"] == 3:
            raise Stop


def folders(home: Path) -> None:
    """Sound folders to be damaged: a run that ended, one that did not, and a comparison."""
    draw = np.random.default_rng(0)
    shares = [(draw.normal(size=(9, 4)), draw.integers(0, 3, 9)) for _ in range(3)]
    named = fb.tasks.load("digits", clients=4, partition=fb.partition.iid())
    own = fb.Task.from_arrays(nn.Linear(4, 3), shares, shares[0])
    work, plan = fb.Work(lr=0.05, steps=1, batch=5), fb.rounds(4, clients=2)
    fb.simulate(own, fb.fedavg(), work, plan, out=home / "run")
    with contextlib.suppress(Stop):
        fb.simulate(named, fb.fedadavr(memory="int8"), work, plan, out=home / "cut", callbacks=[StopAt()])
    words = ["digits", "fedavg", "fedprox", "--clients", "4", "--rounds", "2", "--steps", "1", "--seeds", "1"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(["compare", *words, "--out", str(home / "grid"), "--json"])
    (home / "folder").mkdir()
    (home / "file").write_text("mine")
    (home / "bad.toml").write_text("[task\nname=")
    (home / "x.toml").write_text('[task]\nname = "digits"\nclients = -3\n[algorithm]\nname = 5\n')


# Cases --------------------------------------------------------------------------------------------------


def line(draw: random.Random) -> Case:
    """A command line of words that mostly do not belong there."""
    command = draw.choice(list(COMMANDS))
    words = [] if command == "nothing" else [command]
    if command == "deploy":
        words.append(draw.choice(["init", "keys", "status", "check", "nothing"]))
    if command == "run":
        words += draw.choice(
            [["digits", "fedavg"], [draw.choice(TEXTS)], [draw.choice(TEXTS), draw.choice(TEXTS)]]
        )
        words += [
            "--rounds",
            "1",
            "--steps",
            "1",
            "--clients",
            "4",
            "--per-round",
            "2",
            "--out",
            "new",
            "--quiet",
        ]
    else:
        words += [draw.choice(TEXTS) for _ in range(draw.randrange(3))]
    if command in (
        "compare",
        "sweep",
        "reproduce",
    ):  # whose folders, where they are none, are refused before they train
        words[1:] = [
            draw.choice(["grid", "folder", "file", "missing", "run", "a\0b", "x" * 300, "bad.toml", "x.toml"])
        ]
    for _ in range(draw.randrange(4)):
        option = draw.choice(COMMANDS[command])
        words += [option] if draw.random() < 0.2 else [option, draw.choice(TEXTS)]
    if command == "watch":
        words[1:] = [draw.choice(["missing", "file", "folder", "a\0b", "x" * 300]), *words[2:]]
    return words, lambda: None


def damaged(draw: random.Random) -> Case:
    """A command on a folder that is not as it was left."""
    name = draw.choice(["run", "cut", "grid"])
    command = draw.choice(
        [["report", name], ["report", name, "--unfinished", "--json"], ["resume", name, "--quiet"], ["export", name, "m.safetensors"]]
    )  # fmt: skip
    seed = draw.randrange(2**32)
    return command, lambda: damage(Path(name), random.Random(seed))


def damage(folder: Path, draw: random.Random) -> None:
    for path in draw.sample(
        files := [p for p in folder.rglob("*") if p.is_file()], min(len(files), draw.choice([1, 1, 2]))
    ):
        content = path.read_bytes()
        kind = draw.choice(
            ["cut", "flip", "empty", "gone", "folder", "garbage", "nul", "json", "json", "sql", "link"]
        )
        if kind in ("gone", "folder", "link"):
            path.unlink()
            if kind == "folder":
                path.mkdir()
            elif kind == "link":
                path.symlink_to(path.name)
        elif kind == "json" and path.suffix in (".json", ".jsonl"):
            _twist(path, draw)
        elif kind == "sql" and path.suffix == ".db":
            _upset(path, draw)
        else:
            flipped = bytearray(content or b"\0")
            flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
            whole = {"cut": content[: draw.randrange(len(content) + 1)], "flip": bytes(flipped), "empty": b""}
            path.write_bytes(whole.get(kind, b"\0" * 100 if kind == "nul" else draw.randbytes(200)))


VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1e308,
    "",
    "x",
    "Work(",
    "Rounds(steps=0)",
    [],
    [[]],
    {},
    {"a": 1},
    10**30,
    "\ud800",
]


def _twist(path: Path, draw: random.Random) -> None:
    """JSON with a value of another kind somewhere, and run.json with a checksum that fits."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    if not lines:
        return
    i = draw.randrange(len(lines))
    whole = json.loads(lines[i])
    inside: Any = whole
    while isinstance(inside, dict | list) and inside:
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        key = draw.choice(keys)
        if not isinstance(inside[key], dict | list) or not inside[key] or draw.random() < 0.5:
            if isinstance(inside, dict) and draw.random() < 0.3:
                del inside[key]
            else:
                inside[key] = draw.choice(VALUES)
            break
        inside = inside[key]
    if path.name == "run.json" and isinstance(whole, dict) and draw.random() < 0.9:
        whole.pop("checksum", None)
        Folder(path.parent).write_config(whole)
        return
    lines[i] = json.dumps(whole)
    path.write_text("\n".join(lines) + "\n")


def _upset(path: Path, draw: random.Random) -> None:
    table = draw.choice(["state", "sent", "records", "clients"])
    what = draw.choice(
        ["DELETE FROM {}", "DROP TABLE {}", "UPDATE {} SET data = x'00'", "UPDATE {} SET sum = 'x'"]
    )
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(what.format(table))
        db.commit()


def campaign(cases: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """So many cases; what came of them, and the tracebacks."""
    draw, seen, bad = random.Random(seed), Counter[str](), []
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        home, place = Path(scratch, "home"), Path(scratch, "place")
        home.mkdir()
        folders(home)
        try:
            for k in range(cases):
                os.chdir(scratch)
                words, upset = line(draw) if k % 2 else damaged(draw)
                if SLOW & set(words):
                    continue
                shutil.rmtree(place, ignore_errors=True)
                shutil.copytree(home, place)
                os.chdir(place)
                upset()
                outcome, text = attempt(words)
                seen[outcome] += 1
                if outcome.startswith("bad"):
                    bad.append(f"case {k}: {words}\n{text}")
                    print(bad[-1], flush=True)
                if (k + 1) % 500 == 0:
                    print(f"{sum(seen.values())} cases so far: {dict(seen)}", flush=True)
        finally:
            os.chdir(before)
    return seen, bad


def attempt(words: list[str]) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
    except BaseException:
        return "bad: traceback", traceback.format_exc()
    said = [text for text in err.getvalue().splitlines() if text.startswith("fedbraid: ")]
    if code == 2 and len(said) != 1:
        return "bad: not one sentence", err.getvalue()
    return f"exit {code}", ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found, failures = campaign(given.cases, given.seed)
    print(f"{sum(found.values())} cases, {len(failures)} tracebacks: {dict(found)}")
