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
    from fedbraid import (
        callbacks,
        clock,
        codecs,
        cost,
        deploy,
        engines,
        errors,
        export,
        lora,
        metrics,
        models,
        partition,
        rates,
        sweep,
        tasks,
    )  # fmt: skip
    from fedbraid.algorithms.adabest import adabest
    from fedbraid.algorithms.adaptive import fedadabelief, fedadagrad, fedadam, fedlamb, fedyogi
    from fedbraid.algorithms.asynchronous import ace, ca2fl, fadas, fedasync, fedbuff
    from fedbraid.algorithms.attack import attack
    from fedbraid.algorithms.averaging import fedavg, fedavgm, fednova, fedprox
    from fedbraid.algorithms.fedadavr import fedadavr
    from fedbraid.algorithms.feddf import feddf
    from fedbraid.algorithms.feddyn import feddyn
    from fedbraid.algorithms.fedgbo import fedgbo, mfl, mimelite
    from fedbraid.algorithms.fedshift import fedshift
    from fedbraid.algorithms.ghbm import ghbm
    from fedbraid.algorithms.links import error_feedback, fedef, fedpaq, hidden_state, with_codecs
    from fedbraid.algorithms.lora import exact_lora
    from fedbraid.algorithms.memory import cluster_fedvarp, fedvarp, mifa
    from fedbraid.algorithms.personal import ditto, fedper, fedrep, local_only, pfedme
    from fedbraid.algorithms.private import private
    from fedbraid.algorithms.qafel import qafel
    from fedbraid.algorithms.robust import robust
    from fedbraid.algorithms.scaffold import scaffold, scaffold_m
    from fedbraid.algorithms.scallion import scallion
    from fedbraid.algorithms.secure import secure
    from fedbraid.core.algorithm import Algorithm
    from fedbraid.core.codec import Codec
    from fedbraid.core.context import ClientContext, ServerContext, Staleness, Uploads
    from fedbraid.core.custom_loop import custom_local_loop
    from fedbraid.core.gather import Gather, Mean
    from fedbraid.core.layout import Layout
    from fedbraid.core.rule import Chain, Rule, chain
    from fedbraid.core.traits import GatherTraits, PersonalTraining, RuleTraits, TransformTraits
    from fedbraid.core.transform import Pipeline, Scale, Transform, pipeline
    from fedbraid.core.vector_spec import Download, Upload
    from fedbraid.core.work import Work
    from fedbraid.data.arrays import pad
    from fedbraid.data.lazy import folders
    from fedbraid.data.task import Task
    from fedbraid.errors import FedbraidError
    from fedbraid.run.result import Result
    from fedbraid.run.simulate import resume, simulate
    from fedbraid.run.state import State
    from fedbraid.schedule import Schedule, Tick, buffered, immediate, oort, power_of_choice, rounds
    from fedbraid.study.campaign import Entry
    from fedbraid.study.choose import choose
    from fedbraid.study.compare import compare

_MODULES = (  # and `fb.NAME` is `fedbraid.NAME`
    "callbacks", "clock", "codecs", "cost", "deploy", "engines", "errors", "export", "lora", "metrics", "models",
    "partition", "rates", "sweep", "tasks",
)  # fmt: skip
_HOMES = {
    "core.algorithm": "Algorithm",
    "core.vector_spec": "Download Upload",
    "core.context": "ClientContext ServerContext Staleness Uploads",
    "core.custom_loop": "custom_local_loop",
    "core.gather": "Gather Mean",
    "core.layout": "Layout",
    "core.rule": "Chain Rule chain",
    "core.traits": "GatherTraits PersonalTraining RuleTraits TransformTraits",
    "core.transform": "Pipeline Scale Transform pipeline",
    "core.work": "Work",
    "data.arrays": "pad",
    "data.lazy": "folders",
    "data.task": "Task",
    "errors": "FedbraidError",
    "core.codec": "Codec",
    "run.result": "Result",
    "run.simulate": "resume simulate",
    "run.state": "State",
    "study.campaign": "Entry",
    "study.choose": "choose",
    "study.compare": "compare",
    "schedule": "Schedule Tick buffered immediate oort power_of_choice rounds",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that `fedbraid --help` never waits for torch."""
    if name == "__all__":
        return __dir__()
    if name in _MODULES:
        value: Any = importlib.import_module(f"fedbraid.{name}")
    elif name in _HOME:
        value = getattr(importlib.import_module(f"fedbraid.{_HOME[name]}"), name)
    elif name.startswith("_") or name not in (made := importlib.import_module("fedbraid.algorithms")).ALL:
        raise AttributeError(f"module 'fedbraid' has no attribute {name!r}")
    else:
        value = made.ALL[name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    from fedbraid.algorithms import ALL

    return sorted([*_HOME, *_MODULES, *ALL, "__version__"])
