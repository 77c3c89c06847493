"""A new deployment's folder: one file of the user's, and the configuration that makes it a Flower app."""

from __future__ import annotations

import json
import re
from pathlib import Path

import fedbraid.user_files as files
from fedbraid.errors import ConfigError

FLEET = '''\
"""What this fleet learns. Edit model, loss, load and test; the rest of the deployment needs no code."""

from torch import nn

import fedbraid as fb


def model():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


loss = "cross_entropy"  # or "logistic", "mse", or a function (outputs, targets) -> one loss per example


def load(node_config):
    """This node's own (inputs, targets). Here, its share of the digits that ship with fedbraid."""
    of, share = int(node_config.get("shares", 3)), int(node_config.get("share", 0))
    task = fb.tasks.load("digits", clients=of, partition="dirichlet(1.0)")
    rows = task.rows[task.offsets[share] : task.offsets[share + 1]]
    return task.inputs[rows].flatten(1), task.targets[rows]


def test():
    """What the server judges the model on; leave it out of `apps` where the server has no data."""
    inputs, targets = fb.tasks.load("digits", clients=3).test
    return inputs.flatten(1), targets


apps = fb.deploy.apps(model, loss, load, test)
server = apps.server
client = apps.client
'''

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "A fedbraid deployment"
license = "Apache-2.0"
dependencies = ["fedbraid[flower]"]

[tool.flwr.app]
publisher = "fedbraid"

[tool.flwr.app.components]
serverapp = "fleet:server"
clientapp = "fleet:client"

# Everything below can be overridden when a run is started: fedbraid deploy run . KEYS -c seed=1 -c minimum=2
[tool.flwr.app.config]
algorithm = "fedavg()"                              # any of `fedbraid list algorithms`, wrapped as you like
work = "Work(lr=0.1, epochs=1, batch=20)"           # what a client does in one visit
schedule = "rounds(10, clients=3)"                  # or "buffered(steps=50, buffer=2, concurrency=3)", "immediate(steps=50)"
seed = 0
out = "runs/{name}"                                 # the run's folder, on the server; the same one continues the run
nodes = 3                                           # how many must be there before the first step
minimum = 2                                         # uploads without which no round closes
deadline = 600.0                                    # seconds for a round, or for an asynchronous job
too-few = "wait"                                    # or "stop"
max-norm = 0.0                                      # an upload with a vector of a larger norm is refused; 0: none
norm-factor = 100.0                                 # so is one this many times the median of those taken; 0: none
identity = "key"                                    # a name belongs to the key that had it first; "name": to anybody
samples = "fixed"                                   # as many as a node said at first; "free": they may change
evaluate-every = 1
patience = 0                                        # end when so many evaluations brought nothing better; 0: never
metric = "accuracy"                                 # what patience and keep-best go by
keep-best = false                                   # keep the best model beside the last, as best.safetensors
track = ""                                          # trackers on the server: "tensorboard", "mlflow", "wandb"
poll = 0.5                                          # seconds between two looks at what has arrived
"""


SAME = '''\
"""What this fleet learns: the task of {file}, which `fedbraid run {file}:{task}` simulates."""

{imports}

import fedbraid as fb

apps = fb.deploy.from_task({what})
server = apps.server
client = apps.client
'''


def init(
    folder: Path, name: str | None = None, task: str | None = None, algorithm: str | None = None
) -> list[Path]:
    """Write fleet.py and pyproject.toml; files that are there already are not touched.

    With FILE.py:NAME of a task, and of an algorithm or its text, the fleet learns those; their files come along.
    """
    called = re.sub(r"[^a-z0-9]+", "-", (name or folder.resolve().name).lower()).strip("-") or "fleet"
    fleet, config, copied = FLEET, PYPROJECT.format(name=called), dict[Path, str]()
    if task is not None:
        fleet, config, copied = _of_files(folder, config, task, algorithm)
    written = {folder / "fleet.py": fleet, folder / "pyproject.toml": config, **copied}
    try:
        for path in written:
            if path.exists():
                raise ConfigError(f"{path} is already there; choose another folder, or remove it first")
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in written.items():
            path.write_text(text)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot hold a deployment: {error.strerror}; choose another folder"
        ) from error
    return list(written)


def _of_files(
    folder: Path, config: str, task: str, algorithm: str | None
) -> tuple[str, str, dict[Path, str]]:
    """(fleet.py, pyproject.toml, the user's files as they come along) for names in the user's files."""
    from fedbraid.data import tasks
    from fedbraid.run.simulate import algorithm_of

    if not files.names_file(task):
        raise ConfigError(f"{task!r} names no task in a file; write FILE.py:NAME, such as my.py:task")
    tasks.from_file(task)  # which says what is wrong with it, before anything is written
    named = [files.parts_of(task)]
    what = [named[0].name if named[0].call is None else f"lambda: {named[0].name}{named[0].call}"]
    if algorithm is not None:
        made = algorithm_of(algorithm)
        if files.names_file(algorithm):
            named.append(files.parts_of(algorithm))
            what.append(f"algorithm={named[1].name}{named[1].call or ''}")
            config = re.sub(r"^algorithm = .*\n", "", config, flags=re.M)
        else:
            config = re.sub(r'^algorithm = ".*?"', f"algorithm = {json.dumps(made.name)}", config, flags=re.M)
    for one in named:
        if one.path.stem in ("fleet", "fedbraid") or not one.path.stem.isidentifier():
            raise ConfigError(
                f"{one.path.name} cannot be imported beside fleet.py; give the file another name"
            )
    imports = "\n".join(sorted({f"from {n.path.stem} import {n.name}" for n in named}))
    fleet = SAME.format(file=named[0].path.name, task=named[0].name, imports=imports, what=", ".join(what))
    inside = {n.path for n in named if n.path.parent == folder.resolve()}
    return fleet, config, {folder / n.path.name: n.path.read_text() for n in named if n.path not in inside}
