"""fedbraid: federated learning with parts that compose.

import fedbraid as fb

task = fb.tasks.load("digits", clients=100, partition=fb.partition.label_chunks(1))
result = fb.simulate(task, fb.fedadavr("lamb"), fb.Work(lr=0.05, batch=10), fb.rounds(100, clients=5), seed=42)
print(result)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedbraid import callbacks, clock, codecs, compare, deploy, engines, errors, export, models, sweep
    from fedbraid.algorithms.adabest import adabest
    from fedbraid.algorithms.adaptive import fedadabelief, fedadagrad, fedadam, fedlamb, fedyogi
    from fedbraid.algorithms.averaging import fedavg, fedavgm, fednova, fedprox
    from fedbraid.algorithms.fedadavr import cluster_fedvarp, fedadavr, fedvarp, mifa
    from fedbraid.algorithms.feddyn import feddyn
    from fedbraid.algorithms.fedgbo import fedgbo, mfl, mimelite
    from fedbraid.algorithms.fedshift import fedshift
    from fedbraid.algorithms.links import error_feedback, fedef, fedpaq, hidden_state, with_codecs
    from fedbraid.algorithms.qafel import fedasync, fedbuff, qafel
    from fedbraid.algorithms.scaffold import scaffold, scaffold_m
    from fedbraid.codec import Codec
    from fedbraid.data import partition, tasks
    from fedbraid.data.task import Task
    from fedbraid.errors import FedbraidError
    from fedbraid.layout import Layout
    from fedbraid.loop import Algorithm, State, Work
    from fedbraid.rule import Chain, Local, Rule, chain
    from fedbraid.runs import Result, resume, simulate
    from fedbraid.schedule import Schedule, Tick, buffered, immediate, rounds
    from fedbraid.server import Gather, Info, Mean, Pipeline, Scale, Staleness, Transform, Uploads, pipeline

_HOMES = {
    "": "callbacks clock codecs compare deploy engines errors export models sweep",
    "data": "partition tasks",
    "data.task": "Task",
    "algorithms": (
        "adabest cluster_fedvarp error_feedback fedadabelief fedadagrad fedadam fedadavr fedasync fedavg fedavgm"
        " fedbuff feddyn fedef fedgbo fedlamb fednova fedpaq fedprox fedshift fedvarp fedyogi hidden_state mfl mifa"
        " mimelite qafel scaffold scaffold_m with_codecs"
    ),
    "codec": "Codec",
    "errors": "FedbraidError",
    "layout": "Layout",
    "loop": "Algorithm State Work",
    "rule": "Chain Local Rule chain",
    "schedule": "Schedule Tick buffered immediate rounds",
    "server": "Gather Info Mean Pipeline Scale Staleness Transform Uploads pipeline",
    "runs": "Result resume simulate",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that `fedbraid --help` never waits for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'fedbraid' has no attribute {name!r}")
    home = f"fedbraid.{_HOME[name]}".rstrip(".")
    if _HOME[name] in ("", "data"):
        value: Any = importlib.import_module(f"{home}.{name}")
    else:
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
