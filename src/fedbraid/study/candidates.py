"""Which algorithms `choose` races, and which of them a situation admits: their search spaces, costs and obstacles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedbraid.algorithms import BUILDERS, SPACES, WRAPPERS
from fedbraid.algorithms.averaging import fedavg
from fedbraid.algorithms.registry import algorithm_of
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import integer, number
from fedbraid.core.search_space import CLIENT_RATE, FloatRange, Space, log
from fedbraid.core.work import Work
from fedbraid.data import tree
from fedbraid.data.task import Task
from fedbraid.errors import ConfigError, MissingExtra, unknown
from fedbraid.parse import quantity, with_keywords
from fedbraid.run.formatting import format_bytes, format_seconds
from fedbraid.schedule import Schedule, buffered, rounds
from fedbraid.schedule.availability import availability
from fedbraid.schedule.clock import Durations, Network, bandwidth, lognormal
from fedbraid.study.campaign import Entry
from fedbraid.study.cost import Cost, Federation, estimate
from fedbraid.study.energy import DeviceProfile

Settings = dict[str, Any]

OBJECTIVES = ("time", "bytes", "energy", "accuracy", "worst-tenth")
SPENDING = OBJECTIVES[:3]  # what it takes to reach the target accuracy
BASELINE = "fedavg"
MIN_STEPS = 10  # server steps that a deadline must have room for
SPREAD = 0.5  # sigma of the log-normal time of computing
LINKS = 10.0  # downlink over uplink, where only one is given
THIN = "hidden_state(with_codecs({}, up=qsgd(4), down=qsgd(4)))"
COMPOSED = (  # (call, links, buffered): what no builder is by itself
    ("fedavg", THIN, False),
    ("fedadavr(memory='int4', weights='uniform')", THIN, True),
    ("fedadavr(memory='int4')", "{}", False),
    ("fedadavr(memory='int4')", THIN, False),
    ("fedadabelief", THIN, False),
    ("adabest", THIN, False),
    ("fedadavr(weights='uniform')", "{}", True),
    ("fedadabelief(weights='uniform')", "{}", True),
    ("adabest(weights='uniform')", "{}", True),
    ("fedadavr(held='client')", "{}", False),
    ("fedvarp(held='client')", "{}", False),
)
FIRST = (
    "fedavg",
    "fedadavr",
    "fedbuff",
    "adabest",
    "scaffold",
    "fedadabelief",
    "fedvarp",
    "qafel",
    "fedprox",
)


UNITS = {"uplink": "rate", "downlink": "rate", "server_memory": "size", "deadline": "duration", "epsilon": ""}


@dataclass(frozen=True)
class Situation:
    """What there is and what counts: clients, links in bytes a second, memory in bytes, times in seconds.

    Numbers may come with other units, such as "200kB/s".
    """

    per_round: int | float = 10
    rounds: int | None = None
    uplink: float | None = None
    downlink: float | None = None
    server_memory: float | None = None
    no_client_state: bool = False
    online: availability | None = None
    deadline: float | None = None
    epsilon: float | None = None
    accuracy: float | None = None
    objective: str = "accuracy"
    device: DeviceProfile = dataclasses.field(kw_only=True)
    durations: Durations | None = None
    work: Work = dataclasses.field(default_factory=Work)

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise unknown("objective", self.objective, OBJECTIVES)
        for name, unit in UNITS.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, value := quantity(name, value, unit) if unit else value)
                number(name, value, "(0, inf)", "admits nothing")
        if self.rounds is not None:
            integer("rounds", self.rounds)
        if self.accuracy is not None:
            if not 0 < self.accuracy <= 1:
                raise ConfigError(
                    f"accuracy must be in (0, 1], got {self.accuracy}; use a fraction such as 0.9"
                )
        elif self.objective in SPENDING:
            raise ConfigError(
                f"objective={self.objective!r} needs a target accuracy; give one, such as accuracy=0.9"
            )

    def check(self, task: Task) -> None:
        """Refuse what this task cannot show."""
        if self.accuracy is not None and "accuracy" not in task.measures:
            raise ConfigError(
                f"accuracy={self.accuracy} is a target for classifiers; this task has {task.measures[0]}"
            )
        if task.test is None:
            raise ConfigError("choose confirms its winners on a test set, and this task has none; give test=")
        if self.objective == "worst-tenth" and (task.test_offsets is None or "accuracy" not in task.measures):
            raise ConfigError(
                "objective='worst-tenth' is seen on local test sets; give client_tests=, natural ids or"
                " load(…, test_shares=True)"
            )
        if self.online is not None and not math.isfinite(self.online.next_start(task.clients, -1.0)):
            raise ConfigError(
                f"online= has none of the {task.clients} clients reachable at any time; name clients from 0 on, or use"
                " availability(…, deal=True)"
            )

    def metric(self, task: Task) -> str:
        return "accuracy_worst_tenth" if self.objective == "worst-tenth" else task.measures[0]

    @property
    def network(self) -> Network | None:
        if self.uplink is None and self.downlink is None:
            return None
        up = self.uplink if self.uplink is not None else (self.downlink or 0.0) / LINKS
        return bandwidth(up=up, down=self.downlink if self.downlink is not None else up * LINKS)

    def cohort(self, clients: int) -> int:
        return rounds(1, self.per_round).cohort(clients)

    def __str__(self) -> str:
        settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return ", ".join(f"{k}={v!r}" for k, v in settings.items() if v is not None)


@dataclass(frozen=True)
class Candidate:
    """A composition with the settings that are searched for it; `algorithm` is given, or built from `call`."""

    name: str
    space: Space
    call: str = ""
    links: str = "{}"
    is_buffered: bool = False
    algorithm: Algorithm | None = None

    @property
    def family(self) -> tuple[str, str, bool]:
        """What near twins have in common: of one family, one goes to the final."""
        return self.call.partition("(")[0] or self.name, self.links, self.is_buffered

    def draw(self, number: int) -> Settings:
        """The number-th of a sequence that fills the space evenly; the first is its middle."""
        root = 1.0
        for _ in range(30):  # of g^(d+1) = g + 1, whose powers fill d dimensions
            root = (1 + root) ** (1 / (len(self.space) + 1))
        return {
            key: what.draw((0.5 + number * root ** -(k + 1)) % 1.0)
            for k, (key, what) in enumerate(self.space.items())
        }

    def build(self, settings: Settings, situation: Situation) -> Algorithm:
        if self.algorithm is not None:
            return self.algorithm
        keywords = {k.partition(".")[2]: v for k, v in settings.items() if k.startswith("algorithm.")}
        text = self.links.format(with_keywords(self.call, keywords, {**BUILDERS, **WRAPPERS}, "algorithm"))
        if situation.epsilon is not None:
            text = f"private({text}, clip={settings['private.clip']}, epsilon={situation.epsilon})"
        return algorithm_of(text)


def candidates(situation: Situation, given: Mapping[str, Algorithm] | None = None) -> list[Candidate]:
    """All that are tried, the most telling first; or those given, each with the rate of its clients to search."""
    rate: FloatRange = CLIENT_RATE if situation.work.optimizer == "sgd" else log(0.0003, 0.03)
    more: Space = {"lr": rate} | ({} if situation.epsilon is None else {"private.clip": log(0.1, 3.0)})
    if given is not None:
        if not given:
            raise ConfigError("no candidates to choose from; name at least one algorithm")
        given = {BASELINE: fedavg(), **given}
        return [Candidate(name, {"lr": rate}, algorithm=algorithm) for name, algorithm in given.items()]
    single = [
        Candidate(name, {**space, **more}, name, is_buffered=any(k.startswith("schedule.") for k in space))
        for name, space in SPACES.items()
        if name in BUILDERS
    ]
    order = {name: rank for rank, name in enumerate(FIRST)}
    single.sort(key=lambda c: order.get(c.name, len(order)))
    composed = [_composed(call, links, is_buffered, more) for call, links, is_buffered in COMPOSED]
    return [*single[:4], *composed[:3], *single[4 : len(FIRST)], *composed[3:], *single[len(FIRST) :]]


def _composed(call: str, links: str, is_buffered: bool, more: Space) -> Candidate:
    space = SPACES[call.partition("(")[0]]
    if is_buffered:
        space = {**space, "schedule.buffer": SPACES["fedbuff"]["schedule.buffer"]}
    labels = [call, *(["4-bit links"] if links == THIN else []), *(["buffered"] if is_buffered else [])]
    return Candidate(", ".join(labels), {**space, **more}, call, links, is_buffered)


# Before anything runs -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Obstacle:
    """Why a situation excludes a candidate, and what would admit it."""

    limit: str
    reason: str
    admits: str
    need: float = math.inf  # how many times the limit

    @staticmethod
    def of(error: ConfigError, limit: str, admits: str) -> Obstacle:
        """Of a refusal, without its own advice."""
        return Obstacle(limit, str(error).partition("; ")[0], admits)


@dataclass(frozen=True)
class Admitted:
    """A candidate with its cost here."""

    candidate: Candidate
    situation: Situation
    clients: int
    cost: Cost

    @cached_property
    def seconds(self) -> float:
        """Of computing, in one participation."""
        return self.situation.device.seconds(self.cost.flops)

    @cached_property
    def participation(self) -> float:
        """Seconds of one participation, transfer and all."""
        s, cohort = self.situation, self.situation.cohort(self.clients)
        network, computing = s.network, self.seconds if s.durations is None else s.durations.mean
        return computing + (
            0.0
            if network is None
            else network.mean(self.cost.bytes_down / cohort, self.cost.bytes_up / cohort)
        )

    def schedule(self, settings: Settings, steps: int) -> Schedule:
        """So many rounds, or asynchronous steps with as many participations."""
        s, cohort = self.situation, self.situation.cohort(self.clients)
        durations = s.durations or lognormal(float(f"{math.log(max(self.seconds, 1e-9)):.4g}"), SPREAD)
        times = {"durations": durations, "bandwidth": s.network, "availability": s.online}
        if not self.candidate.is_buffered:
            poisson = s.epsilon is not None and s.online is None
            return rounds(steps, cohort, sampling="poisson" if poisson else "fixed", **times)  # type: ignore[arg-type]
        buffer = min(settings.get("schedule.buffer", cohort), 2 * cohort)
        total = max(1, round(steps * cohort / buffer))
        return buffered(total, buffer, cohort, arrivals="closed", **times)  # type: ignore[arg-type]

    def entry(self, settings: Settings, steps: int) -> Entry:
        work = dataclasses.replace(self.situation.work, lr=settings["lr"])
        algorithm = self.candidate.build(settings, self.situation)
        return Entry(self.candidate.name, algorithm, work, self.schedule(settings, steps))


def examine(candidate: Candidate, situation: Situation, task: Task) -> tuple[Admitted | None, list[Obstacle]]:
    """A candidate with its cost, and every limit that excludes it; one that cannot be built has no cost."""
    settings = candidate.draw(0)
    work = dataclasses.replace(situation.work, lr=settings["lr"])
    try:
        algorithm = candidate.build(settings, situation)
        algorithm.fits(work, task.full_layout.size > task.layout.size)
        algorithm.gather.traits().check_layout(task.layout)
    except MissingExtra:
        raise
    except ConfigError as error:
        limit = ("work", "other local training") if situation.epsilon is None else ("epsilon", "no --epsilon")
        return None, [Obstacle.of(error, *limit)]
    crowd = Federation(task.clients, situation.cohort(task.clients), float(np.mean(task.sizes)))
    sample = tree.take(task.sample, slice(1))
    cost = estimate(task.module(), sample, algorithm, work, crowd, task.run, task.full_layout)
    found = Admitted(candidate, situation, task.clients, cost)
    return found, list(_obstacles(found))


def _obstacles(found: Admitted) -> Iterator[Obstacle]:
    s, cost, need = found.situation, found.cost, MIN_STEPS * found.participation
    if s.server_memory is not None and cost.server_state > s.server_memory:
        size, limit = format_bytes(cost.server_state), format_bytes(s.server_memory)
        why, admits = f"the server would keep {size}, more than {limit}", _rounded_up(cost.server_state)
        yield Obstacle("server_memory", why, f"--server-memory {admits}", cost.server_state / s.server_memory)
    if s.no_client_state and cost.client_state:
        why = f"each client would keep {format_bytes(cost.client_state)} between participations"
        yield Obstacle("no_client_state", why, "client state (leave out --no-client-state)", 2.0)
    if s.deadline is not None and need > s.deadline:
        takes, limit = format_seconds(found.participation), format_seconds(s.deadline)
        why = f"a participation takes {takes}, so {MIN_STEPS} server steps do not fit into {limit}"
        yield Obstacle("deadline", why, f"--deadline {math.ceil(need)}s", need / s.deadline)


def _rounded_up(count: float) -> str:
    """A size that can be typed and is no smaller."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{math.ceil(count / size * 100) / 100:g}{unit}"
    return f"{math.ceil(count)}B"


def nothing_left(excluded: Mapping[str, Sequence[Obstacle]]) -> ConfigError:
    """The error where no candidate is admitted: which limit to relax by the least, and what that would admit."""
    name, found = min(excluded.items(), key=lambda item: (len(item[1]), max(o.need for o in item[1])))
    relaxed = {o.limit: o.need for o in found}
    admitted = [
        other
        for other, obstacles in excluded.items()
        if all(o.need <= relaxed.get(o.limit, 0.0) for o in obstacles)
    ]
    return ConfigError(
        f"the limits exclude all {len(excluded)} candidates ({name}: {found[0].reason}); use"
        f" {' and '.join(o.admits for o in found)}, which would admit {', '.join(admitted[:5])}"
    )
