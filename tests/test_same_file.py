"""Does one file serve the simulator and a fleet alike?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fleets import driven
from safetensors.torch import load_file

import fedbraid as fb
from fedbraid.deploy import Project
from fedbraid.deploy.project import init
from fedbraid.deploy.task_halves import Same
from fedbraid.errors import ConfigError, DataError

pytestmark = pytest.mark.engines

MINE = '''
import numpy as np
import torch
from torch import nn

import fedbraid as fb


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 5), nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, left, right):
        return {"logits": self.head(torch.tanh(self.left(left) + self.right(right)))}


def some(seed, n):
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 3, n)
    left = draw.normal(size=(n, 4)).astype(np.float32) + y[:, None].astype(np.float32)
    return {"left": left, "right": draw.normal(size=(n, 3)).astype(np.float32)}, y


def recall(outputs, targets):
    return (outputs.argmax(1) == targets)[targets == 0].float().mean()


def halved(module, inputs):
    return module(inputs["left"] / 2, inputs["right"])


OPTIONS = dict(metrics={"recall": recall}, forward=halved)


def task(personal=()):
    return fb.Task.from_arrays(
        Both, [some(i + 1, 12 + 6 * i) for i in range(3)], some(99, 40), personal=personal, **OPTIONS
    )


def mine(node=None):
    """As on a real fleet: nobody but a node reads its data."""
    share = range(3) if node is None else [int(node["share"])]
    return fb.Task.from_arrays(Both, [some(i + 1, 12 + 6 * i) for i in share], some(99, 40), **OPTIONS)


class Calm(fb.Rule):
    def step(self, g, y, s, ctx):
        return 0.5 * g, s


def algorithm():
    return fb.Algorithm(rule=Calm(), name="")
'''
WORK, ROUNDS = fb.Work(lr=0.1, steps=3, batch=4), fb.rounds(2, clients=[[0, 1, 2], [2, 0]])


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "mine.py"
    path.write_text(MINE)
    made = {"__name__": "mine"}
    exec(compile(MINE, str(path), "exec"), made)
    return path, made


def deployed(task, algorithm, place):
    """A fleet in this process: (its model, its records)."""
    project = Project(algorithm=algorithm, work=WORK, schedule=ROUNDS, task=task)
    ran = driven(place, project=project, work=None, minimum=2)
    return load_file(place / "run" / "model.safetensors"), ran.history


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["a task", "a function", "told its node", "personal", "lazy"])
def test_nodes_give_the_simulators_bits(kind, mine, tmp_path):
    _, user = mine
    whole = user["task"](personal=("head.*",)) if kind == "personal" else user["task"]()
    given = {
        "a task": whole,
        "a function": user["task"],
        "told its node": user["mine"],
        "personal": whole,
    }.get(kind)
    if kind == "lazy":
        whole = given = lazy(user)
    algorithm = fb.scaffold()
    model, records = deployed(given, algorithm, tmp_path)
    result = fb.simulate(whole, algorithm, WORK, ROUNDS, engine="in_process(block=1)")
    expected = whole.layout.views(result.x)
    assert model.keys() == expected.keys()
    assert all(torch.equal(model[k], v) for k, v in expected.items())
    for key in ("clients", "bytes_up", "bytes_down"):
        assert [r[key] for r in records] == [r[key] for r in result.history]
    if kind == "personal":  # which the server cannot judge without the clients' heads
        assert not any(k.startswith("head") for k in model)
        assert "recall" not in records[-1]
    else:
        assert [r["recall"] for r in records] == [r["recall"] for r in result.history]


class Noisy:
    """Draws anew at each reading."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        left = torch.as_tensor(self.x["left"][i]) + 0.1 * torch.randn(4)
        return {"left": left, "right": self.x["right"][i], "label": self.y[i]}


def lazy(user):
    sets = [Noisy(*user["some"](i + 1, 12 + 6 * i)) for i in range(3)]
    test = [
        {**{k: v[i] for k, v in x.items()}, "label": y[i]}
        for x, y in [user["some"](99, 40)]
        for i in range(40)
    ]
    return fb.Task.from_datasets(user["Both"], sets, test, lazy=True, **user["OPTIONS"])


@pytest.mark.quick
def test_what_a_node_is_told(mine):
    _, user = mine
    with pytest.raises(
        ConfigError, match="share=7 is no client of this task; start the node with -c share=0 to 2"
    ):
        Same(user["task"]).own({"share": 7})
    with pytest.raises(ConfigError, match="share=None is no client"):
        Same(user["task"]).own({})
    with pytest.raises(DataError, match="on a node the task has 3 clients"):
        Same(lambda node=None: user["task"]()).own({"share": 0})
    with pytest.raises(ConfigError, match="gives a int"):
        Same(lambda: 3).served()
    assert Same(user["mine"]).own({"share": 2}).sizes.tolist() == [24]


@pytest.mark.quick
def test_a_deployment_of_a_file(mine, tmp_path):
    path, _ = mine
    init(tmp_path / "a", task=f"{path}:task", algorithm="scaffold()")
    said = (tmp_path / "a/fleet.py").read_text()
    assert "from mine import task" in said
    assert "fb.deploy.from_task(task)" in said
    assert 'algorithm = "scaffold()"' in (tmp_path / "a/fleet.toml").read_text()
    assert (tmp_path / "a/mine.py").read_text() == MINE
    init(tmp_path / "b", task=f"{path}:task(personal=('head.*',))", algorithm=f"{path}:algorithm")
    said = (tmp_path / "b/fleet.py").read_text()
    assert "from_task(lambda: task(personal=('head.*',)), algorithm=algorithm)" in said
    assert "\nalgorithm =" not in (tmp_path / "b/fleet.toml").read_text()
    for task, algorithm, why in (
        ("digits", None, "names no task in a file"),
        (f"{path}:nothing", None, "nothing"),
        (f"{path}:recall", None, "recall"),
        (f"{path}:task", "fedavgg()", "fedavg"),
    ):
        with pytest.raises(ConfigError, match=why):
            init(tmp_path / "c", task=task, algorithm=algorithm)
    assert not (tmp_path / "c").exists()


def test_it_runs_on_real_nodes(mine, tmp_path):
    """One file: `run` in the simulator, `deploy init` and `trial` with a broker and processes."""
    path, user = mine
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(fb.__file__).parents[1]), *sys.path]),
    }
    words = [sys.executable, "-m", "fedbraid", "deploy"]
    start = ["init", "fleet", f"{path}:task", f"{path}:algorithm"]
    subprocess.run([*words, *start], cwd=tmp_path, env=environment, check=True, timeout=120)
    settings = [
        "-c",
        "work=Work(lr=0.1, steps=3, batch=4)",
        "-c",
        "schedule=rounds(2, clients=3)",
        "-c",
        "out=run",
    ]
    done = subprocess.run(
        [*words, "trial", "fleet", "--nodes", "3", *settings],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = fb.simulate(user["task"](), user["algorithm"](), WORK, fb.rounds(2, clients=3))
    model = load_file(tmp_path / "fleet/run/model.safetensors")
    for name, v in result.task.layout.views(result.x).items():
        assert torch.allclose(model[name], v, atol=1e-5, rtol=1e-5), name
