"""A deployment's folder: fleet.py says what is learned, fleet.toml how the run goes, keys/ who may take part."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fedbraid.user_files as files
from fedbraid.algorithms.registry import parts
from fedbraid.core.layout import Layout
from fedbraid.deploy import Project
from fedbraid.deploy.settings import Settings
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
    """The server's test set; leave it out of the project where the server has no data."""
    inputs, targets = fb.tasks.load("digits", clients=3).test
    return inputs.flatten(1), targets


fleet = fb.deploy.Project(model, loss, load, test)
'''

CONFIG = """\
# Everything below can be overridden when the server is started: fedbraid deploy up -c seed=1 -c minimum=2
algorithm = "fedavg()"                              # any of `fedbraid list algorithms`, wrapped as you like
work = "Work(lr=0.1, epochs=1, batch=20)"           # local training
schedule = "rounds(10, clients=3)"                  # or "buffered(steps=50, buffer=2, concurrency=3)", "immediate(steps=50)"
seed = 0
out = "runs/{name}"                                 # the run's folder, from here; the same one continues the run
nodes = 3                                           # how many must be connected before the first step
minimum = 2                                         # uploads without which no round closes
deadline = 600.0                                    # seconds for a round, or for an asynchronous order
too_few = "wait"                                    # or "stop"
max_norm = 0.0                                      # an upload with a vector of a larger norm is refused; 0: none
norm_factor = 100.0                                 # so is one this many times the median of those accepted; 0: none
samples = "fixed"                                   # as many as a node said at first; "free": they may change
samples_factor = 100.0                              # who claims this many times the median is not asked; 0: any
evaluate_every = 1
patience = 0                                        # end when so many evaluations brought nothing better; 0: never
metric = "accuracy"                                 # what patience and keep_best go by
keep_best = false                                   # keep the best model beside the last, as best.safetensors
track = ""                                          # trackers on the server: "tensorboard", "mlflow", "wandb"
"""

SAME = '''\
"""What this fleet learns: the task of {file}, which `fedbraid run {file}:{task}` simulates."""

{imports}

import fedbraid as fb

fleet = fb.deploy.from_task({what})
'''


@dataclass(frozen=True)
class Deployment:
    """A deployment's folder, read."""

    folder: Path
    project: Project
    settings: Settings

    @classmethod
    def read(
        cls, folder: Path, given: Mapping[str, Any] | None = None, project: Project | None = None
    ) -> Deployment:
        """fleet.py and fleet.toml, with `given` keys instead of theirs, and samples.json where there is one."""
        if project is None and not (folder / "fleet.py").is_file():
            raise ConfigError(f"{folder} holds no fleet.py; make one with: fedbraid deploy init {folder}")
        project = project or load(f"{folder / 'fleet.py'}:fleet")
        settings = project.settings({**_config(folder / "fleet.toml"), **(given or {})})
        settings.what(), settings.when()
        settings = replace(settings, out=str((folder / settings.out).resolve()))
        return cls(folder, project, replace(settings, vouched=_vouched(folder / "samples.json")))


def load(text: str) -> Project:
    """The project that `fleet.py:fleet` names."""
    made: Project = files.load(text, Project, "project")
    return made


def task_digest(settings: Settings, layout: Layout) -> str:
    """A digest of what server and nodes must agree on: the model's parameters, algorithm, local training, schedule."""
    algorithm, work = settings.what()
    about = {
        "layout": layout.fingerprint.hex(), "parts": parts(algorithm), "work": repr(work),
        "schedule": repr(settings.when()), "seed": settings.seed,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def _config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; compare it with: fedbraid deploy init") from error


def _vouched(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or not all(isinstance(n, int) and n > 0 for n in found.values()):
            raise ValueError("it must be an object of names and numbers of samples")
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; correct or remove it") from error


def init(
    folder: Path, name: str | None = None, task: str | None = None, algorithm: str | None = None
) -> list[Path]:
    """Write fleet.py and fleet.toml; existing files are not touched.

    With FILE.py:NAME of a task, and of an algorithm or its text, the fleet learns those; their files are copied.
    """
    called = re.sub(r"[^a-z0-9]+", "-", (name or folder.resolve().name).lower()).strip("-") or "fleet"
    fleet, config, copied = FLEET, CONFIG.format(name=called), dict[Path, str]()
    if task is not None:
        fleet, config, copied = _of_files(folder, config, task, algorithm)
    written = {folder / "fleet.py": fleet, folder / "fleet.toml": config, **copied}
    try:
        for path in written:
            if path.exists():
                raise ConfigError(f"{path} already exists; choose another folder, or remove it first")
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
    """(fleet.py, fleet.toml, the user's files as they are copied) for names in the user's files."""
    from fedbraid.algorithms.registry import algorithm_of
    from fedbraid.data import tasks

    if not files.names_file(task):
        raise ConfigError(f"{task!r} names no task in a file; write FILE.py:NAME, such as my.py:task")
    tasks.from_file(task)  # which says what is wrong with it, before anything is written
    named = [files.split_name(task)]
    what = [named[0].name if named[0].call is None else f"lambda: {named[0].name}{named[0].call}"]
    if algorithm is not None:
        made = algorithm_of(algorithm)
        if files.names_file(algorithm):
            named.append(files.split_name(algorithm))
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
