"""Successive halving over rounds on held-out clients, and a final on fresh seeds, within a time (see `choose`)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedbraid.core.algorithm import Algorithm
from fedbraid.core.metric_names import falls
from fedbraid.data.task import Task
from fedbraid.errors import ConfigError, Diverged, RunError
from fedbraid.privacy.attach import PrivacySetup, attach_privacy
from fedbraid.run.checkpoint import Folder, Record
from fedbraid.run.formatting import format_percent, format_seconds
from fedbraid.run.run import PAUSE, Run
from fedbraid.study import stats
from fedbraid.study.campaign import Campaign, Entry, Event, Journal, OnEvent, Progress, claim, train
from fedbraid.study.candidates import (
    BASELINE,
    SPENDING,
    Admitted,
    Obstacle,
    Settings,
    Situation,
    candidates,
    examine,
    nothing_left,
)
from fedbraid.study.compare import Grid
from fedbraid.study.sweep import hold_out
from fedbraid.workers import Ask, Failure, WorkerPool

FILE, JOURNAL = "choose.json", "choose.jsonl"
RUNGS = (1 / 9, 1 / 3, 1.0)  # of the rounds; a third goes on from each
WORK = 2.4  # first rungs that the whole race takes for each arm
LOOKS, FINE_LOOKS = 27, 100  # evaluations of a run, and where a target must be found
ROUNDS, MOST_ROUNDS = 100, 300
# Of the time: the race, what still runs then, the last seed of the final begins, all ends.
RACE, GRACE, END, LAST = 0.55, 0.05, 0.9, 1.1
PILOT_S = 20.0  # seconds that the first heat may take, to tell how much time would be enough
FINALISTS, SEEDS = 5, (3, 4, 5, 6, 8, 10, 12, 16, 20)
ENOUGH_SEEDS = 8  # before more than one goes to the final beside FedAvg
TRIES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # settings of a candidate
HELD_OUT, ENOUGH_SAMPLES = (0.2, 0.25, 0.3, 1 / 3), 2500  # for a standard error of at most 1 point
NO_RESULT = {"score": -1e300, "value": None, "reached": False, "step": 0, "seconds": 0.0, "run": 0.0}


@dataclass(frozen=True)
class Arm:
    """A candidate with one setting."""

    admitted: Admitted
    settings: Settings
    entry: Entry

    @property
    def name(self) -> str:
        return self.admitted.candidate.name

    @property
    def key(self) -> str:
        return self.entry.folder


@dataclass(frozen=True)
class Heat:
    """One arm's run up to a rung."""

    arm: Arm
    rung: int
    folder: Path

    @property
    def step(self) -> int:
        return max(1, math.ceil(RUNGS[self.rung] * self.arm.entry.schedule.steps))

    def __str__(self) -> str:
        settings = ", ".join(f"{k.rpartition('.')[2]}={v}" for k, v in self.arm.settings.items())
        return f"{self.arm.name} ({settings})"


class OutOfTime(Exception):
    """The time is up; what runs is abandoned."""


class _Until:
    """A callback that pauses a run at a step or when the deadline has passed, and times the steps."""

    def __init__(self, step: int, deadline: float | None) -> None:
        self.last, self.deadline = step, deadline if deadline is not None else math.inf
        self.times: list[float] = []

    def step(self, record: Record, run: Run) -> Any:
        self.times.append(time.monotonic())
        return PAUSE if record["step"] >= self.last or record["time"] > self.deadline else False

    @property
    def per_step(self) -> float:
        """Seconds, without the slowest one, in which the machine may have done something else."""
        durations = sorted(b - a for a, b in pairwise(self.times))
        return sum(durations[:-1]) / (len(durations) - 1) if len(durations) > 1 else sum(durations)


class Race:
    """The folder of a choice: `choose.json` says what is chosen, `choose.jsonl` the results of heats and the decisions."""

    def __init__(
        self, task: Task, situation: Situation, given: Mapping[str, Algorithm] | None, out: Path, minutes: float,
        jobs: int | None, seed: int, on_event: OnEvent,
    ) -> None:  # fmt: skip
        self.task, self.situation, self.out, self.seed, self.on_event = task, situation, out, seed, on_event
        self.minutes, self.total, self.jobs = minutes, 60 * minutes, WorkerPool(len, jobs).count or 1  # type: ignore[arg-type]
        self.candidates = candidates(situation, given)
        self.metric = situation.metric(task)
        self.sign = -1.0 if falls(self.metric) else 1.0
        self.journal = Journal(out / JOURNAL)
        self.looks: dict[tuple[str, int], Record] = {}  # by arm and rung
        self.plan: Record = {}  # decisions that hung on the clock
        self.excluded: dict[str, list[Obstacle]] = {}
        self.begun, self.earlier = time.monotonic(), 0.0

    @property
    def spent(self) -> float:
        """Seconds, those before interruptions included."""
        return self.earlier + time.monotonic() - self.begun

    def claim(self, note: Record) -> None:
        facts = {
            "data": self.task.fingerprint, "situation": str(self.situation), "minutes": self.minutes, "seed": self.seed,
            "candidates": [c.name for c in self.candidates],
        }  # fmt: skip
        claim(self.out, FILE, facts | note, {key: key for key in facts})

    def admit(self) -> list[Admitted]:
        """The candidates that no limit excludes."""
        found = []
        for candidate in self.candidates:
            admitted, obstacles = examine(candidate, self.situation, self.task)
            if admitted is None or obstacles:
                self.excluded[candidate.name] = obstacles
            else:
                found.append(admitted)
        if not found:
            raise nothing_left(self.excluded)
        s = self.situation
        self.rounds = s.rounds or ROUNDS
        if s.rounds is None and s.deadline is not None:
            fit = math.ceil(s.deadline / min(a.participation for a in found))
            self.rounds = min(MOST_ROUNDS, max(ROUNDS // 10, fit))
        return found

    @cached_property
    def tuning(self) -> Task:
        """The task of the race: some clients judge and do not train."""
        few = (fraction for fraction in HELD_OUT if fraction * self.task.sizes.sum() >= ENOUGH_SAMPLES)
        fraction = next(few, HELD_OUT[-1])
        return hold_out(self.task, fraction, self.seed, self.situation.objective == "worst-tenth")

    @property
    def held_out(self) -> tuple[int, int]:
        """(samples, clients) that judge."""
        clients = self.task.clients - self.tuning.clients
        return int(self.task.sizes.sum() - self.tuning.sizes.sum()), clients

    def recall(self) -> None:
        """What was done before an interruption."""
        for line in self.journal.lines():
            self.earlier = line.pop("spent")
            if "arm" in line:
                self.looks[line["arm"], line["rung"]] = line
            else:
                self.plan |= line

    def decide(self, **decisions: Any) -> None:
        """Keep a decision that hangs on the clock, so that an interruption changes nothing."""
        self.plan |= decisions
        self.journal.add(decisions | {"spent": self.spent})

    # On held-out clients ----------------------------------------------------------------------------

    def run(self, admitted: Sequence[Admitted]) -> list[Arm]:
        """All arms, of which the best reached the last rung."""
        first = [arm for a in admitted if self._account(arm := self.arm(a, 0), self.tuning)]
        if not first:
            raise nothing_left(self.excluded)
        self._heat(first[:1], 0)  # a pilot tells what the time is enough for
        if "tried" not in self.plan:
            rung, run = self._seconds(first[:1])
            if (need := 2 * WORK * rung + 2 * SEEDS[0] * run) > self.total * self.jobs * END:
                raise self._too_little(need, run)
            self.decide(tried=int(max(2, min(len(first), RACE * self.total * self.jobs / WORK / rung))))
        tried = self.plan["tried"]
        for arm in first[tried:]:
            why = f"not tried, because {self.minutes:g} minutes are enough for {tried} candidates"
            enough = f"--minutes {math.ceil(self.minutes * len(first) / tried)}"
            self.excluded[arm.name] = [Obstacle("minutes", why, enough)]
        self._heat(first := first[:tried], 0)
        if "settings" not in self.plan:
            affordable = (
                (RACE * self.total - self.spent) * self.jobs / self._seconds(first)[0] + len(first)
            ) / WORK
            self.decide(settings=max(t for t in TRIES if t == 1 or t * len(first) <= affordable))
        drawn = [self.arm(a.admitted, n) for n in range(self.plan["settings"]) for a in first]
        arms = going = list({arm.key: arm for arm in drawn}.values())
        for rung in range(len(RUNGS)):
            self._heat(going, rung)
            ranked = self.ranked([a for a in going if (a.key, rung) in self.looks])
            base = [a for a in ranked if a.name == BASELINE][:1]
            going = ranked[: max(FINALISTS, math.ceil(len(going) / 3))]
            going += [a for a in base if a not in going]
        return arms

    def _account(self, arm: Arm, task: Task) -> bool:
        """Whether ε of an arm can be accounted for; each is asked for before workers are forked, which then share it."""
        e = arm.entry
        if self.situation.epsilon is None:
            return True
        try:
            setup = PrivacySetup(e.schedule, task.clients, e.work, task.sizes, self.seed)
            _, accountant = attach_privacy(e.algorithm, setup)
            if accountant is not None:
                for _ in range(e.schedule.steps):
                    accountant.charge([], task.sizes)
        except ConfigError as error:
            self.excluded[arm.name] = [Obstacle.of(error, "epsilon", "no --epsilon")]
            return False
        return True

    def arm(self, admitted: Admitted, number: int) -> Arm:
        settings = admitted.candidate.draw(number)
        return Arm(admitted, settings, admitted.entry(settings, self.rounds))

    def _too_little(self, need: float, run: float) -> ConfigError:
        return ConfigError(
            f"minutes={self.minutes:g} is too little to tell anything: a run takes about {format_seconds(run)} here; use"
            f" minutes={math.ceil(need / self.jobs / END / 6) / 10:g} or more"
        )

    def _seconds(self, arms: Sequence[Arm]) -> tuple[float, float]:
        """What a first rung and a whole run take in a worker, on average."""
        looks = [
            result for a in arms if (result := self.looks.get((a.key, 0))) is not None and result["step"]
        ]
        return tuple(max(1e-3, sum(k[of] for k in looks) / max(1, len(looks))) for of in ("seconds", "run"))

    def _heat(self, arms: Sequence[Arm], rung: int) -> None:
        """Run these up to a rung, while the time of the race lasts."""
        heats = [Heat(a, rung, self.out / "race" / a.key / f"seed-{self.seed}") for a in arms]
        todo = [h for h in heats if (h.arm.key, rung) not in self.looks]
        if not todo or f"rung {rung}" in self.plan:
            return
        begun, last = self.spent, 0
        is_pilot = not self.looks
        end = max(RACE * self.total, PILOT_S) if is_pilot else RACE * self.total

        def noting(event: Event[Heat]) -> None:
            nonlocal last
            self.on_event(event)
            last = max(last, event.step)
            if event.cell is not None and event.kind == "done":
                result = event.result
                if isinstance(result, Failure):
                    if is_pilot and result.kind != "Diverged":
                        raise result.error()
                    why = "diverged" if result.kind == "Diverged" else result.message
                    result = NO_RESULT | {"why": why}
                self.looks[event.cell.arm.key, rung] = result
                self.journal.add({"arm": event.cell.arm.key, "rung": rung, "spent": self.spent, **result})
            if self.spent > end + GRACE * self.total:
                raise OutOfTime

        self.on_event(Event("begin", cells=todo, result=f"race, rung {rung + 1} of {len(RUNGS)}"))
        try:
            Campaign(todo, self._run_heat, self.out, lambda heat: self.spent < end, goes_on=True).run(
                self.jobs, noting
            )
        except OutOfTime:
            if is_pilot and not self.looks:
                rung_s = (self.spent - begun) * todo[0].step / max(1, last)
                raise self._too_little(
                    (2 * WORK + 2 * SEEDS[0] / RUNGS[0]) * rung_s, rung_s / RUNGS[0]
                ) from None
        if any((h.arm.key, rung) not in self.looks for h in heats):
            self.decide(**{f"rung {rung}": "out of time"})

    def _run_heat(self, heat: Heat, ask: Ask) -> Record:
        """In a worker."""
        logging.disable(logging.WARNING)
        e, begun = heat.arm.entry, time.monotonic()
        until, steps = _Until(heat.step, self.situation.deadline), e.schedule.steps
        train(
            self.tuning, e, self.seed, heat.folder, len(self.candidates), [until, Progress(ask, self.metric)],
            self.situation.device, checkpoint_every=steps, **self.options(steps),
        )  # fmt: skip
        spent, history = time.monotonic() - begun, self.in_time(list(Folder(heat.folder).records()))
        rest = (steps - len(until.times)) * until.per_step
        result = self._score(history, heat.rung == len(RUNGS) - 1)
        return result | {"step": history[-1]["step"], "seconds": spent, "run": spent + rest}

    def options(self, steps: int) -> dict[str, Any]:
        on = "clients" if self.situation.objective == "worst-tenth" else "test"
        looks = FINE_LOOKS if self.situation.objective in SPENDING else LOOKS
        return {"evaluate_every": max(1, steps // looks), "evaluate_on": on}

    def in_time(self, history: Sequence[Record]) -> list[Record]:
        deadline = self.situation.deadline
        return [r for r in history if deadline is None or r["time"] <= deadline] or list(history[:1])

    def cost_to_target(self, history: Sequence[Record]) -> float | None:
        """What reaching the target took by the objective, None where it was not reached."""
        found = stats.reach(history, stats.axes(history), self.situation.accuracy or 1.0)
        return found.get(self.situation.objective)

    def _score(self, history: Sequence[Record], is_last: bool) -> Record:
        """What a run is worth by now, more is better: its metric, or minus what the target took or would take."""
        last_values = [r[self.metric] for r in history if self.metric in r][-2:] or [0.0]
        value = math.fsum(last_values) / len(last_values)
        if self.situation.objective not in SPENDING:
            return {"score": self.sign * value, "value": value, "reached": True}
        cost = self.cost_to_target(history)
        reached, so_far = cost is not None, stats.axes(history)[self.situation.objective][-1]
        takes = so_far * (self.situation.accuracy or 1.0) / max(value, 1e-3) if cost is None else cost
        late = 1e6 if is_last and not reached else 1.0  # in the end, those that did not reach it come last
        return {"score": -takes * late, "value": value, "reached": reached, "takes": takes}

    def rung_of(self, arm: Arm) -> int:
        return max((r for r in range(len(RUNGS)) if (arm.key, r) in self.looks), default=-1)

    def ranked(self, arms: Sequence[Arm]) -> list[Arm]:
        """By the rung that they reached and their score there; the first of equals first."""
        rungs = [(arm, self.rung_of(arm)) for arm in arms]
        with_results = [(arm, rung) for arm, rung in rungs if rung >= 0]
        return [
            a for a, _ in sorted(with_results, key=lambda p: (-p[1], -self.looks[p[0].key, p[1]]["score"]))
        ]

    # On fresh seeds -----------------------------------------------------------------------------------

    def finalists(self, arms: Sequence[Arm]) -> list[Arm]:
        """The best arm of the best candidates, one of a family, and FedAvg's."""
        last = [
            (result, a.name) for a in arms if (result := self.looks.get((a.key, len(RUNGS) - 1))) is not None
        ]
        if last and not any(result["reached"] for result, _ in last):
            raise self.unreached([(result["value"] or 0.0, name) for result, name in last])
        families: dict[Any, Arm] = {}
        able = [a for a in self.ranked(arms) if self.looks[a.key, self.rung_of(a)]["value"] is not None]
        if not able:
            raise Diverged(
                "every candidate diverged on the clients that train; give another work=, such as clip=1.0"
            )
        for arm in able:
            families.setdefault(arm.admitted.candidate.family, arm)
        chosen = list(families.values())
        base = [a for a in able if a.name == BASELINE][:1]
        if "finalists" not in self.plan:
            run = self._seconds(chosen[:FINALISTS])[1]
            rows = max(
                2.0, (END * self.total - self.spent) / run * self.jobs
            )  # runs that the time is enough for
            count = max(1, min(FINALISTS, int(rows / ENOUGH_SEEDS) - 1))
            seeds = max(s for s in SEEDS if s == SEEDS[0] or s * (count + 1) <= rows)
            self.decide(finalists=count, seeds=seeds)
        chosen = chosen[: self.plan["finalists"]]
        return chosen + [a for a in base if a not in chosen]

    def unreached(self, values: Sequence[tuple[float, str]]) -> ConfigError:
        value, name = max(values)
        return ConfigError(
            f"no candidate reached an accuracy of {format_percent(self.situation.accuracy)} in {self.rounds} rounds; the"
            f" best, {name}, reached {format_percent(value)}; use accuracy={math.floor(100 * value) / 100:g} or more rounds"
        )

    def confirm(self, finalists: Sequence[Arm]) -> Grid:
        """Run the finalists on the test set with seeds that nothing has seen, as many as the time is enough for."""
        seeds = [self.seed + 1 + i for i in range(self.plan["seeds"])]
        grid = Grid(
            self.out / "confirm", self.task, [a.entry for a in finalists], seeds, self.situation.accuracy,
            self.options(self.rounds) | {"checkpoint_every": max(1, self.rounds // 4)}, self.metric, self.situation.device,
        )  # fmt: skip
        grid.save()
        for arm in finalists:
            self._account(arm, self.task)
        begun, done = self.spent, 0

        def complete() -> list[int]:
            return [s for s in seeds if all(grid.is_over(c) for c in grid.cells if c.seed == s)]

        def may_start(cell: Any) -> bool:
            each = (self.spent - begun) * len(finalists) / max(1, done)
            is_first = cell.entry is grid.entries[0] and cell.seed not in seeds[:2]
            return not is_first or self.spent + each < END * self.total

        def noting(event: Event[Any]) -> None:
            nonlocal done
            self.on_event(event)
            done += event.kind == "done"
            if self.spent > LAST * self.total:
                raise OutOfTime

        try:
            grid.run(self.jobs, noting, may_start)
        except OutOfTime:
            if not complete():
                raise RunError(
                    f"{self.minutes:g} minutes were too few to confirm anything on a machine as busy as this one; use more"
                ) from None
        grid.seeds = complete()
        grid.save()
        return grid
