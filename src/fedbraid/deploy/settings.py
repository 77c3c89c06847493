"""`fleet.toml`: what runs, and what to do when nodes do not answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import integer, number
from fedbraid.core.work import Work
from fedbraid.deploy.transport import EDGE, NAME
from fedbraid.errors import ConfigError, unknown
from fedbraid.parse import Names
from fedbraid.schedule import Schedule

SELECTIONS = {"too_few": ("wait", "stop"), "samples": ("fixed", "free")}
ON_SERVER = (
    "out",
    "max_refusals",
    "track",
    "keep_best",
    "patience",
    "metric",
    "evaluate_every",
    "edges",
)  # which nodes are not told


@dataclass(frozen=True)
class Settings:
    """Keys of fleet.toml; `-` is read as `_`."""

    algorithm: str | Algorithm = "fedavg()"
    work: str | Work = "Work(lr=0.01, epochs=1, batch=20)"
    schedule: str | Schedule = "rounds(10, clients=3)"
    seed: int = 0
    out: str = "runs/deployed"  # the run's folder, where the server runs
    nodes: int = 1  # how many must be there before the first step
    minimum: int = 1  # uploads without which no round closes
    deadline: float = 600.0  # seconds that a round, or an asynchronous job, may take
    too_few: str = "wait"  # when fewer answer: "wait" asks again, "stop" ends the run (it can be continued)
    max_norm: float = 0.0  # an upload with a vector of a larger norm is refused; 0 refuses none
    norm_factor: float = (
        100.0  # so is one this many times larger than the median of those taken; 0 refuses none
    )
    max_refusals: int = 3  # a node whose uploads were refused so many times in a row is not asked until it is admitted; 0: never so
    samples: str = "fixed"  # a client has as many as it said at first; "free": it may come back with others
    evaluate_every: int = 1
    patience: int = (
        0  # the run ends when so many evaluations brought nothing better; 0: it runs to its last step
    )
    metric: str = "accuracy"  # what patience and keep-best go by
    keep_best: bool = False  # keep the best model beside the last, as best.safetensors
    edges: str = (
        ""  # who folds whose uploads, such as "edge-0: node-1? node-2?; edge-1: *"; "": the server folds all
    )
    track: str = ""  # trackers on the server, such as "tensorboard,mlflow"
    samples_factor: float = 100.0  # a node that claims this many times the median of all is not asked; 0: any
    vouched: Mapping[str, int] = field(
        default_factory=dict
    )  # samples.json: samples by name, as the operator knows them

    @classmethod
    def read(cls, config: Mapping[str, Any], made: Mapping[str, Any] | None = None) -> Settings:
        """From the configuration and what the user's file made; unknown keys are refused."""
        known = {f.name: str(f.type).split(" ")[0] for f in fields(cls) if f.name != "vouched"}
        given = {key.replace("-", "_"): value for key, value in config.items()}
        kinds: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "bool": bool}
        for key, value in given.items():
            if key not in known:
                raise unknown("key of fleet.toml", key, known)
            if not isinstance(value, kinds[known[key]]) or isinstance(value, bool) != (known[key] == "bool"):
                raise ConfigError(f"{key} must be of type {known[key]}, got {value!r}")
        made = {key: value for key, value in (made or {}).items() if value is not None}
        if twice := made.keys() & given.keys():
            raise ConfigError(
                f"{min(twice)} is given in Python and in the configuration; remove one of the two"
            )
        return cls(**given, **made)

    def __post_init__(self) -> None:
        for name, least in (
            ("nodes", 1),
            ("minimum", 1),
            ("max_refusals", 0),
            ("evaluate_every", 0),
            ("patience", 0),
        ):
            integer(name, getattr(self, name), least, "is too small")
        number("deadline", self.deadline, "(0, inf)", "leaves no time")
        for name in ("max_norm", "norm_factor", "samples_factor"):
            number(name, getattr(self, name), "[0, inf)", "refuses everything, and 0 nothing")
        for name in self.edge_names:
            if not name.startswith(EDGE) or not NAME.fullmatch(name):
                raise ConfigError(
                    f"an edge's name must begin with {EDGE!r}, got {name!r}; write edges = 'edge-0: node-1 node-2; edge-1: *'"
                )
        for name, words in SELECTIONS.items():
            if getattr(self, name) not in words:
                raise ConfigError(f"{name} must be {words[0]!r} or {words[1]!r}, got {getattr(self, name)!r}")

    @property
    def edge_names(self) -> list[str]:
        return [part.partition(":")[0].strip() for part in self.edges.split(";") if part.strip()]

    def edge_of(self, node: str) -> str:
        """The first edge with a pattern that this node's name fits, "" for the server itself."""
        for part in self.edges.split(";"):
            edge, _, patterns = part.partition(":")
            if any(fnmatchcase(node, pattern) for pattern in patterns.split()):
                return edge.strip()
        return ""

    def to_nodes(self) -> dict[str, str | int | float | bool]:
        """What an order says of the run: declarative, and `read` on the node."""
        told = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ON_SERVER}
        return {name: value for name, value in told.items() if isinstance(value, str | int | float)}

    def what(self) -> tuple[Algorithm, Work]:
        """What nodes and server must agree on."""
        from fedbraid.algorithms.registry import algorithm_from
        from fedbraid.core.algorithm import Algorithm
        from fedbraid.core.work import WORK, Work
        from fedbraid.parse import evaluate

        algorithm = algorithm_from(self.algorithm) if isinstance(self.algorithm, str) else self.algorithm
        work = evaluate(self.work, WORK, "work") if isinstance(self.work, str) else self.work
        if not isinstance(algorithm, Algorithm):
            raise ConfigError(f"algorithm={algorithm!r} must be an algorithm, such as fb.fedavg()")
        if not isinstance(work, Work):
            raise ConfigError(f"work={self.work!r} is no work; use Work(...)")
        algorithm.fits(work)
        return algorithm, work.tabled(self.when().steps)

    def callbacks(self) -> list[Any]:
        """Who watches on the server."""
        from fedbraid.run.callbacks import watching

        return watching(self.track or None, self.patience or None, self.keep_best, self.metric)

    def when(self) -> Schedule:
        """Rounds, or steps whenever enough uploads are there."""
        from fedbraid.parse import evaluate
        from fedbraid.schedule import Rounds, Schedule, buffered, immediate, rounds
        from fedbraid.schedule.selection import CHOOSERS

        names: Names = {"rounds": rounds, "buffered": buffered, "immediate": immediate, **CHOOSERS}
        made = evaluate(self.schedule, names, "schedule") if isinstance(self.schedule, str) else self.schedule
        if not isinstance(made, Schedule):
            raise ConfigError(
                f"{self.schedule!r} is no schedule; use rounds(...), buffered(...) or immediate(...)"
            )
        if isinstance(made, Rounds) and made.sampling == "poisson":
            raise ConfigError("Poisson rounds are drawn in simulation only; deploy with sampling='fixed'")
        if getattr(made, "availability", None) is not None:
            raise ConfigError("real nodes come and go by themselves; leave availability to the simulator")
        return made
