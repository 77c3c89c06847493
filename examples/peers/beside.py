"""Peers' official tutorials and their ports to fedbraid, side by side: code lines, accuracy, time.

    python examples/peers/beside.py [flower pfl leaf]                 # the ports alone
    python examples/peers/beside.py --clones FOLDER [--python NAME=EXE …]

The originals are run as they are, from clones of the peers' repositories: FOLDER/flower, FOLDER/pfl-research and FOLDER/leaf, each by
the interpreter that `--python` names, in an environment that has the peer (LEAF, written for TensorFlow 1.13, runs on
TensorFlow 2.15 as `tensorflow.compat.v1`). Of the originals only the number of rounds is changed, and where the data lie: all read
FEDBRAID_DATA. Both sides have one thread a process; times are from start to end, imports and data included.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
import uuid
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
MARK = "FEDBRAID_BESIDE"  # inherited by every process of a command, so that their time can be added up


@dataclass(frozen=True)
class Peer:
    """A tutorial: its port, the files that its authors ask a reader to have, and how many rounds are run here."""

    port: str
    clone: str
    files: tuple[str, ...]
    rounds: int
    what: str


PEERS = {
    "flower": Peer(
        "flower_quickstart.py",
        "flower",
        tuple(
            f"examples/quickstart-pytorch/{f}"
            for f in ("pytorchexample/task.py", "pytorchexample/client_app.py", "pytorchexample/server_app.py", "pyproject.toml")
        ),
        3,
        "quickstart-pytorch: 10 clients, 3 rounds",
    ),
    "pfl": Peer(
        "pfl_cifar10.py",
        "pfl-research",
        tuple(
            f"benchmarks/{f}"
            for f in ("image_classification/pytorch/train.py", "image_classification/configs/baseline.yaml", "dataset/cifar10/numpy.py")
        ),
        30,
        "CIFAR-10 benchmark, IID: 50 of 1,000 users, 30 of 1,500 iterations",
    ),
    "leaf": Peer(
        "leaf_femnist.py",
        "leaf",
        tuple(f"models/{f}" for f in ("main.py", "client.py", "server.py", "model.py", "femnist/cnn.py")),
        60,
        "FEMNIST: 3 of 105 writers, 60 of 2,000 rounds",
    ),
}  # fmt: skip


def code_lines(text: str, name: str) -> int:
    """Lines that say something: neither blank nor comments nor docstrings."""
    if not name.endswith(".py"):
        return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in text.splitlines())
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            skipped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    none = (
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.COMMENT,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    said = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in none]
    return len({line for t in said for line in range(t.start[0], t.end[0] + 1)} - skipped)


# Running ------------------------------------------------------------------------------------------


def timed(command: list[str], folder: Path, env: dict[str, str]) -> tuple[str, float, float]:
    """(what it printed, seconds, processor seconds of it and all that it started)."""
    import psutil

    mark, spent, done = uuid.uuid4().hex, {}, threading.Event()

    def ours(process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == mark
        except psutil.Error:
            return False

    known: dict[psutil.Process, bool] = {}

    def sample() -> None:
        while not done.wait(0.25):
            for process in psutil.process_iter():
                if process not in known:
                    known[process] = ours(process)
                if known[process]:
                    try:
                        t = process.cpu_times()
                        spent[process] = t.user + t.system
                    except psutil.Error:
                        continue

    watcher = threading.Thread(target=sample, daemon=True)
    watcher.start()
    start = time.perf_counter()
    ran = subprocess.run(
        command, cwd=folder, env={**os.environ, **env, MARK: mark, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=1800,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    for process, is_ours in known.items():  # what a tutorial leaves running, such as Flower's local SuperLink
        if is_ours and process.is_running():
            process.terminate()
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{ran.stdout[-3000:]}")
    return ran.stdout, seconds, sum(spent.values())


def last(pattern: str, text: str) -> float:
    found = re.findall(pattern, text)
    if not found:
        raise SystemExit(f"no accuracy in what was printed:\n{text[-3000:]}")
    return float(found[-1])


def port(name: str, rounds: int, work: Path) -> tuple[float, float, float]:
    script = HERE / PEERS[name].port
    said, seconds, cpu = timed([sys.executable, str(script), str(rounds)], work, {})
    return last(r"accuracy +([\d.]+)", said), seconds, cpu


# The originals ------------------------------------------------------------------------------------

# A stand-in for the three transforms, for PyTorch builds that torchvision has none for, and the data set's local copy.
SHIM = """
import importlib.util, os, sys

class Local:
    def find_spec(self, name, path=None, target=None):
        if name != "datasets":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            load, home = module.load_dataset, os.path.join(os.environ["FEDBRAID_DATA"], "cifar10")
            files = {k: os.path.join(home, k + "-*.parquet") for k in ("train", "test")}
            module.load_dataset = lambda path, name=None, split=None, **_: load(
                "parquet", data_files=files, split=split).cast_column("img", module.Image())

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Local())
"""
TRANSFORMS = """
import numpy, torch

def Compose(parts):
    def run(x):
        for part in parts:
            x = part(x)
        return x
    return run

def ToTensor():
    return lambda image: torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float() / 255

def Normalize(mean, std):
    m, s = (torch.tensor(v)[:, None, None] for v in (mean, std))
    return lambda x: (x - m) / s
"""


def flower(python: str, clone: Path, rounds: int, work: Path) -> tuple[float, float, float]:
    app = work / "quickstart-pytorch"
    shutil.copytree(clone / "examples/quickstart-pytorch", app)
    # without what it would install: PyTorch for CUDA, into an environment of each run
    config = app / "pyproject.toml"
    config.write_text(
        re.sub(r"^dependencies = \[.*?^\]", "dependencies = []", config.read_text(), flags=re.M | re.S)
    )
    (work / "shim").mkdir()
    (work / "shim/sitecustomize.py").write_text(SHIM)
    if subprocess.run([python, "-c", "import torchvision"], capture_output=True).returncode:
        (work / "shim/torchvision").mkdir()
        (work / "shim/torchvision/__init__.py").touch()
        (work / "shim/torchvision/transforms.py").write_text(TRANSFORMS)
    (work / "home").mkdir()
    (work / "home/config.toml").write_text(
        '[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = ":local:"\noptions.num-supernodes = 10\n'
    )
    env = {
        "FLWR_HOME": str(work / "home"), "HF_HOME": str(work / "hf"), "PYTHONPATH": str(work / "shim"),
        "UV_CACHE_DIR": str(work / "uv"), "UV_OFFLINE": "1", "FLWR_TELEMETRY_ENABLED": "0", "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    command = [
        python,
        "-c",
        "from flwr.cli.app import app; app()",
        "run",
        ".",
        "--stream",
        "--run-config",
        f"num-server-rounds={rounds}",
    ]
    said, seconds, cpu = timed(command, app, env)
    return last(r"'eval_acc': ([\d.]+)", said), seconds, cpu


def images(kind: str):
    import numpy as np
    import pyarrow.parquet as pq
    from PIL import Image

    files = sorted((Path(os.environ["FEDBRAID_DATA"]) / "cifar10").glob(f"{kind}-*.parquet"))
    tables = [pq.read_table(f, columns=["img", "label"]) for f in files]
    pixels = [np.array(Image.open(io.BytesIO(v))) for t in tables for v in t["img"].to_pylist()]
    return np.stack(pixels), np.concatenate([t["label"].to_numpy() for t in tables])[:, None]


def pfl(python: str, clone: Path, rounds: int, work: Path) -> tuple[float, float, float]:
    for kind in ("train", "test"):
        (work / f"cifar10_{kind}.p").write_bytes(pickle.dumps(images(kind)))
    home = clone / "benchmarks"
    command = [
        python, str(home / "image_classification/pytorch/train.py"), "--args_config", str(home / "image_classification/configs/baseline.yaml"),
        "--data_path", str(work), "--central_num_iterations", str(rounds),
    ]  # fmt: skip
    _, seconds, cpu = timed(command, work, {"PYTHONPATH": str(home)})
    (found,) = work.glob("metrics.csv")
    head, *rows = [line.split(",") for line in found.read_text().splitlines()]
    accuracy = [row[head.index("Central val | accuracy")] for row in rows]
    return float([a for a in accuracy if a][-1]), seconds, cpu


AS_V1 = (
    "import runpy, sys, tensorflow.compat.v1 as v1; v1.disable_v2_behavior(); sys.modules['tensorflow'] = v1; sys.path.insert(0, '.');"
    " runpy.run_path('main.py', run_name='__main__')"
)


def leaf(python: str, clone: Path, rounds: int, work: Path) -> tuple[float, float, float]:
    import json

    import numpy as np
    import pyarrow.parquet as pq

    shutil.copytree(clone / "models", work / "models")
    for kind in ("train", "test"):
        found = pq.read_table(
            Path(os.environ["FEDBRAID_DATA"]) / f"femnist-leaf-subset/{kind}.parquet"
        ).to_pydict()
        held: dict[str, dict[str, list]] = {}
        for who, label, pixels in zip(found["client_id"], found["label"], found["pixels"]):
            data = held.setdefault(who, {"x": [], "y": []})
            data["x"].append((np.frombuffer(pixels, np.uint8) / 255).round(4).tolist())
            data["y"].append(label)
        folder = work / "data/femnist/data" / kind
        folder.mkdir(parents=True)
        made = {"users": list(held), "num_samples": [len(d["y"]) for d in held.values()], "user_data": held}
        (folder / "all.json").write_text(json.dumps(made))
    command = [
        python, "-c", AS_V1, "-dataset", "femnist", "-model", "cnn", "--num-rounds", str(rounds), "--eval-every", "20",
        "--clients-per-round", "3", "--num-epochs", "1", "-lr", "0.004",
    ]  # fmt: skip
    said, seconds, cpu = timed(command, work / "models", {"PYTHONPATH": "", "TF_CPP_MIN_LOG_LEVEL": "3"})
    return last(r"test_accuracy: ([\d.]+)", said), seconds, cpu


ORIGINALS = {"flower": flower, "pfl": pfl, "leaf": leaf}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(PEERS), choices=[*PEERS, []])
    parser.add_argument("--clones", type=Path, help="folder with clones named flower, pfl-research and leaf")
    parser.add_argument(
        "--python", action="append", default=[], help="NAME=EXE: the interpreter that has a peer"
    )
    parser.add_argument("--rounds", type=int, help="instead of those of the table")
    given = parser.parse_args()
    if not os.environ.get("FEDBRAID_DATA"):
        print("FEDBRAID_DATA names no folder with CIFAR-10 and FEMNIST: nothing was run")
        return
    pythons = dict(text.split("=", 1) for text in given.python)
    print("| tutorial | | code lines | accuracy | seconds | processor seconds |")
    print("| :-- | :-- | --: | --: | --: | --: |")
    for name in given.names:
        peer, rounds = PEERS[name], given.rounds or PEERS[name].rounds
        rows = [("fedbraid", code_lines((HERE / peer.port).read_text(), peer.port), port, (name, rounds))]
        clone = given.clones and given.clones / peer.clone
        if clone and clone.exists():
            lines = sum(code_lines((clone / f).read_text(), f) for f in peer.files)
            python = pythons.get(name, sys.executable)
            rows.append((name, lines, ORIGINALS[name], (python, clone, rounds)))
        for title, lines, run, words in rows:
            with tempfile.TemporaryDirectory() as folder:
                accuracy, seconds, cpu = run(*words, Path(folder))
            print(
                f"| {peer.what} | {title} | {lines} | {accuracy:.1%} | {seconds:.0f} | {cpu:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
