"""The right algorithm for a situation: race candidates on held-out clients, confirm the best on fresh seeds.

Limits exclude candidates before anything runs. The rest race by successive halving (Jamieson and Talwalkar, AISTATS
2016) over rounds: all run a ninth of them, the best third goes on to a third, the best third of these to the end,
judged on clients that do not train. The best and FedAvg then run with fresh seeds and are judged on the test set, which
nothing has seen. Which of them are tied with the best is told by paired t-tests over seeds, of every pair, by Holm.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import number
from fedbraid.core.work import Work
from fedbraid.data.task import Task
from fedbraid.errors import ConfigError, Diverged, MissingExtra
from fedbraid.parse import quantity
from fedbraid.run.checkpoint import Folder, Record
from fedbraid.run.formatting import format_bytes, format_seconds
from fedbraid.run.simulate import unproven
from fedbraid.schedule import Schedule
from fedbraid.schedule.availability import availability
from fedbraid.schedule.clock import Durations
from fedbraid.study import recipe, stats
from fedbraid.study.campaign import Entry, OnEvent, ignore, new_folder
from fedbraid.study.candidates import BASELINE, SPENDING, Situation
from fedbraid.study.compare import FILE as COMPARE
from fedbraid.study.compare import Grid, aligned
from fedbraid.study.energy import DeviceProfile, profile_of
from fedbraid.study.race import Arm, Race, examine

RESULT = "result.json"
LEVEL = 0.05


@dataclass
class Choice:
    """What `choose` came to; `algorithm`, `work` and `schedule` are the winner's, ready for `fb.simulate`."""

    facts: Record = field(repr=False)  # as --json prints them
    algorithm: Algorithm
    work: Work
    schedule: Schedule
    out: Path

    @property
    def ranking(self) -> list[Record]:
        return list(self.facts["ranking"])

    @property
    def excluded(self) -> list[Record]:
        return list(self.facts["excluded"])

    @property
    def budget(self) -> Record:
        return dict(self.facts["budget"])

    def as_json(self) -> Record:
        return self.facts

    def to_pandas(self) -> Any:
        """The ranking as a pandas frame, a row an algorithm, with means of the measures (extra `frames`)."""
        try:
            import pandas
        except ImportError as error:
            raise MissingExtra("a frame", "frames") from error
        rows = [dict(r) for r in self.ranking]
        for row in rows:
            row |= {key: value and value["mean"] for key, value in row.pop("metrics").items()}
        return pandas.DataFrame(rows)

    def plot(self) -> Any:
        """The finalists over time and over bytes, with the front marked (extra `plot`)."""
        from fedbraid.report.figure import fronts

        place = self.out / "confirm"
        known = Folder(place).read_json(COMPARE)
        curves = {}
        for e in known["entries"]:
            histories = [list(Folder(place / e["folder"] / f"seed-{n}").records()) for n in known["seeds"]]
            runs = stats.Runs(e["name"], known["seeds"], histories, [None] * len(histories))
            if (curve := stats.curve(runs, known["metric"])) is not None:
                curves[e["name"]] = curve
        return fronts(curves, known["metric"], self.facts["accuracy"])

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows of the ranking, as text."""
        names = list(self.ranking[0]["metrics"])
        rows = [
            [r["name"], "tied" if r["tied"] else "", *(shown(name, r["metrics"][name]) for name in names)]
            for r in self.ranking
        ]
        return ["", "", *names], rows

    def __str__(self) -> str:
        lines = [*aligned(*self.cells()), *self.facts["verdict"], f"run: {self.facts['command']}"]
        for title, texts in self.sections().items():
            lines += [f"{title}:", *(f"  {text}" for text in texts)]
        return "\n".join(lines)

    def sections(self) -> dict[str, list[str]]:
        """A sentence for every loser, and for everything that was excluded."""
        found = {
            "Not among the best": [
                f"{loser['algorithm']}: {loser['reason']}" for loser in self.facts["losers"]
            ],
            "Excluded": [f"{e['algorithm']}: {e['reason']}; use {e['admits']}" for e in self.excluded],
        }
        return {title: texts for title, texts in found.items() if texts}


def shown(name: str, value: Record | None) -> str:
    """A mean with its interval, in the unit of its measure."""
    if value is None:
        return "–"
    kind = name.partition(" ")[0]
    scale, unit = (100, " %") if kind in ("accuracy", "worst") else (1, "")
    says: dict[str, Any] = {
        "time": _duration,
        "up": format_bytes,
        "down": format_bytes,
        "bytes": format_bytes,
    }
    say = says.get(kind, lambda v: f"{scale * v:.{1 if unit else 4}{'f' if unit else 'g'}}")
    half = "" if value["half"] is None else f" ± {say(value['half'])}"
    return f"{say(value['mean'])}{half}{' J' if kind == 'energy' else unit}"


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if abs(seconds) < 1 else format_seconds(seconds)


# Choosing -----------------------------------------------------------------------------------------


def choose(
    task: Task | str,
    *,
    partition: Any = None,
    clients: int | None = None,
    per_round: int | float = 10,
    rounds: int | None = None,
    uplink: str | float | None = None,
    downlink: str | float | None = None,
    server_memory: str | float | None = None,
    no_client_state: bool = False,
    online: str | os.PathLike[str] | availability | None = None,
    deadline: str | float | None = None,
    epsilon: float | None = None,
    accuracy: float | None = None,
    objective: str | None = None,
    minutes: float = 10.0,
    out: str | os.PathLike[str] | None = None,
    device: str | DeviceProfile = "phone-wifi",
    durations: Durations | None = None,
    work: Work | None = None,
    candidates: Mapping[str, Algorithm] | None = None,
    jobs: int | None = None,
    seed: int = 0,
    on_event: OnEvent = ignore,
    note: Record | None = None,
) -> Choice:
    """The algorithm, tuned, that does best on a task within these limits, found in so many `minutes`.

    `objective` is "accuracy", "worst-tenth", or the "time", "bytes" or "energy" that `accuracy` takes. Rates, sizes and
    times may have units ("200kB/s", "4GB", "2h"). `online` is "phones", a JSON file or an `availability`; `device` is a
    profile, by which computing takes time and energy, unless `durations` say the time. `candidates` are raced instead of
    all that fedbraid has; `work` is what clients do, but for the rate, which is searched. Given the same folder again, it
    goes on, or answers at once. `note` is kept in `choose.json`.

    >>> found = fb.choose("digits", clients=100, partition="label_chunks(1)", per_round=5, minutes=2)  # doctest: +SKIP
    >>> fb.simulate(task, found.algorithm, found.work, found.schedule)  # doctest: +SKIP
    """
    from fedbraid.data import tasks

    if isinstance(task, str):
        task = tasks.load(task, clients, partition)
    elif clients is not None or partition is not None:
        raise ConfigError("clients= and partition= go with the name of a task; this task has its own")
    given: dict[str, tuple[Any, str]] = {
        "uplink": (uplink, "rate"), "downlink": (downlink, "rate"), "server_memory": (server_memory, "size"),
        "deadline": (deadline, "duration"),
    }  # fmt: skip
    limits = {
        key: None if value is None else quantity(key, value, kind) for key, (value, kind) in given.items()
    }
    situation = Situation(
        per_round=per_round, rounds=rounds, no_client_state=no_client_state, epsilon=epsilon, accuracy=accuracy,
        online=availability(online) if isinstance(online, str | os.PathLike) else online,
        objective=objective or ("accuracy" if accuracy is None else "time"), device=profile_of(device), durations=durations,
        work=work or Work(lr=0.05, batch=5 if task.name == "digits" else 20), **limits,
    )  # fmt: skip
    number("minutes", minutes, "(0, inf)", "leaves no time")
    situation.check(task)
    place = new_folder(task.name, "choose") if out is None else Path(out)
    race = Race(task, situation, candidates, place, minutes, jobs, seed, on_event)
    if (place / RESULT).exists():
        race.claim(note or {})
        facts = Folder(place).read_json(RESULT)
        best = next(c for c in race.candidates if c.name == facts["ranking"][0]["name"])
        admitted, _ = examine(best, situation, task)
        assert admitted is not None
        entry = admitted.entry(facts["ranking"][0]["settings"], facts["rounds"])
        return Choice(facts, entry.algorithm, entry.work, entry.schedule, place)
    admitted_all = race.admit()
    race.claim(note or {})
    race.recall()
    arms = race.run(admitted_all)
    finalists = race.finalists(arms)
    facts, entry = _facts(race, arms, finalists, race.confirm(finalists))
    Folder(place).write_json(RESULT, facts)
    return Choice(facts, entry.algorithm, entry.work, entry.schedule, place)


# What it comes to ---------------------------------------------------------------------------------


def _facts(race: Race, arms: Sequence[Arm], finalists: Sequence[Arm], grid: Grid) -> tuple[Record, Entry]:
    """The ranking and all that is said about it, and the winner's entry."""
    found, s = grid.result(), race.situation
    rows = {
        a.name: [_measures(race, h) for h in g.histories]
        for a, g in zip(finalists, found.groups)
        if len(g.seeds) == len(grid.seeds)  # those that diverged lost
    }
    if not rows:
        raise Diverged("all finalists diverged with fresh seeds; give more clients a round, or another work=")
    key = next(iter(next(iter(rows.values()))[0]))
    values = {name: [r[key] for r in each] for name, each in rows.items()}
    if all(None in v for v in values.values()):
        raise race.unreached(
            [(sum(r["accuracy"] for r in each) / len(each), name) for name, each in rows.items()]
        )
    sign = 1.0 if s.objective in SPENDING else -race.sign

    def place(name: str) -> tuple[int, float]:
        known = [v for v in values[name] if v is not None]
        return len(values[name]) - len(known), sign * math.fsum(known) / len(known) if known else math.inf

    order = sorted(rows, key=place)
    logs = s.objective in SPENDING  # what counts is the ratio
    complete = {
        n: [math.log(max(v, 1e-12)) if logs else v for v in values[n]] for n in order if None not in values[n]
    }
    tests = stats.pair_tests(complete)
    of = {a.name: a for a in finalists}
    ranking = []
    for name in order:
        p, e = tests.get(frozenset((order[0], name))), of[name].entry
        ranking.append({
            "name": name, "algorithm": e.algorithm.name or name, "work": repr(e.work), "schedule": repr(e.schedule),
            "settings": of[name].settings, "tied": name == order[0] or (p is not None and p >= LEVEL), "p": p,
            "metrics": {k: _interval([r[k] for r in rows[name]]) for k in rows[name][0]},
        })  # fmt: skip
    best = of[order[0]]
    facts = {
        "task": recipe.task_name(race.task.spec or race.task.name), "objective": s.objective, "accuracy": s.accuracy,
        "situation": str(s), "rounds": race.rounds, "ranking": ranking,
        "verdict": _verdict(race, best.entry, ranking, complete, values, key),
        "losers": _losers(race, arms, finalists, found.failures, ranking, key),
        "excluded": [
            {"algorithm": name, "reason": o[0].reason, "admits": " and ".join(x.admits for x in o)}
            for name, o in race.excluded.items()
        ],
        "budget": {
            "minutes": race.minutes, "seconds": round(race.spent, 1), "runs": len(race.looks) + len(rows) * len(grid.seeds),
            "candidates": race.plan["tried"], "settings": race.plan["settings"], "seeds": grid.seeds,
        },
        **_written(race, best, grid),
    }  # fmt: skip
    return facts, best.entry


def _measures(race: Race, history: Sequence[Record]) -> Record:
    """One run's figures, the objective first."""
    s, history = race.situation, race.in_time(history)
    row = {f"{s.objective} to {s.accuracy:.0%}": race.took(history)} if s.objective in SPENDING else {}
    name = "worst tenth" if s.objective == "worst-tenth" else race.metric
    row |= {name: stats.final(history, race.metric)}
    row |= {"accuracy": stats.final(history, "accuracy")} if "accuracy" in race.task.measures else {}
    row |= {"time": history[-1]["time"], "up": sum(r["bytes_up"] for r in history)}
    return row | {"down": sum(r["bytes_down"] for r in history), "energy": sum(r["energy"] for r in history)}


def _interval(values: Sequence[float | None]) -> Record | None:
    """A mean with its interval, where every seed has a value."""
    known = [v for v in values if v is not None]
    return stats.plain(stats.interval(known)) if known and len(known) == len(values) else None


def _verdict(
    race: Race, winner: Entry, ranking: Sequence[Record], complete: Mapping[str, Sequence[float]], values: Mapping[str, Sequence[Any]], key: str
) -> list[str]:  # fmt: skip
    """Who is best, whether it beats FedAvg, and how sure that is."""
    best, count = ranking[0]["name"], len(values[ranking[0]["name"]])
    tied = [r["name"] for r in ranking[1:] if r["tied"]]
    pairs = len(complete) * (len(complete) - 1) // 2
    said = [
        f"{best} is best by {key}" + (f", tied with {', '.join(tied)}" if tied else "")
        + f" ({count} fresh seeds; paired t-tests at {LEVEL:.0%}, Holm over {pairs} pairs)."
    ]  # fmt: skip
    base = next((r for r in ranking[1:] if r["name"] == BASELINE), None)
    if base is not None and (
        gain := _interval([None if None in (a, b) else a - b for a, b in zip(values[best], values[BASELINE])])
    ):
        verb = "is ahead of" if base["tied"] else "beats"
        much = shown(key, gain | {"mean": abs(gain["mean"])}).replace(" %", " points")
        said.append(f"{best} {verb} FedAvg, tuned alike, by {much} (p = {base['p']:.2g}).")
    elif base is not None:
        reached = sum(v is not None for v in values[BASELINE])
        said.append(f"FedAvg, tuned alike, reached the target with {reached} of {count} seeds.")
    if pairs and count > 1:
        near = tied or [name for name in complete if name != best]
        others = [[x - y for x, y in zip(complete[best], complete[name])] for name in near]
        least = max(stats.resolution(d, LEVEL / pairs) for d in others)
        unit = (
            f"{math.expm1(least):.0%}"
            if race.situation.objective in SPENDING
            else shown(key, {"mean": least, "half": None})
        )
        said.append(f"Differences below {unit} would not have been found with these seeds.")
    if (doubt := unproven(winner.algorithm, winner.schedule)) is not None:
        said.append(f"{doubt[0].upper()}{doubt[1:]}.")
    held, judges = race.tuning.test, race.task.clients - race.tuning.clients
    samples = len(held[1]) if held is not None else 0
    error = 100 * math.sqrt(0.25 / max(1, samples))
    points = f" (a standard error of up to {error:.1f} points)" if race.sign > 0 else ""
    said.append(
        f"The race was judged on {judges} held-out clients with {samples:,} samples{points}, the final on the test set."
    )
    return said


def _losers(
    race: Race, arms: Sequence[Arm], finalists: Sequence[Arm], failures: Mapping[str, Any], ranking: Sequence[Record], key: str
) -> list[Record]:  # fmt: skip
    """A sentence for each that is not the best or tied with it."""
    said = {name: f"diverged with {len(errors)} of the fresh seeds" for name, errors in failures.items()}
    for r in ranking:
        if not r["tied"]:
            sure = "" if r["p"] is None else f" (p = {r['p']:.2g})"
            said[r["name"]] = (
                f"{shown(key, r['metrics'][key])} against {shown(key, ranking[0]['metrics'][key])}{sure}"
            )
    names, families = {a.name for a in finalists}, {a.admitted.candidate.family: a.name for a in finalists}
    for arm in race.ranked(arms):
        if arm.name in names or arm.name in said:
            continue
        rung = race.rung_of(arm)
        look, twin = race.looks[arm.key, rung], families.get(arm.admitted.candidate.family)
        of = [
            race.looks[a.key, rung]
            for a in finalists[: race.plan["finalists"]]
            if (a.key, rung) in race.looks
        ]
        last = min((k for k in of if k["value"] is not None), key=lambda k: k["score"], default=None)
        why = (
            f", a twin of {twin}"
            if twin
            else f", where finalists had {_worth(race, last)} or better"
            if last
            else ""
        )
        said[arm.name] = (
            "diverged with every setting" if look["value"] is None
            else f"{_worth(race, look)} on held-out clients at step {look['step']}{why}"
        )  # fmt: skip
    return [{"algorithm": name, "reason": reason} for name, reason in said.items()]


def _worth(race: Race, look: Record) -> str:
    """What a run was worth at a rung: its metric, and what the target takes as far as can be told."""
    name = "accuracy" if race.metric.startswith("accuracy") else race.metric
    value = shown(name, {"mean": look["value"], "half": None})
    takes = look.get("takes")
    return (
        value
        if takes is None
        else f"{value} and {shown(race.situation.objective, {'mean': takes, 'half': None})} to the target"
    )


def _written(race: Race, best: Arm, grid: Grid) -> Record:
    """The winner as a command, as a file for `run`, and as the keys of a deployment."""
    e = best.entry
    config = Folder(next(c for c in grid.cells if c.entry is e).folder).config()
    timeless = dataclasses.replace(e.schedule, bandwidth=None, availability=None)  # type: ignore[call-arg]
    deploy = {"algorithm": e.algorithm.name, "work": repr(e.work), "schedule": repr(timeless)}
    sections = recipe.sections(config)
    if sections is None:
        return {
            "command": "fb.simulate(task, found.algorithm, found.work, found.schedule)",
            "file": None,
            "deploy": deploy,
        }
    path = race.out / "winner.toml"
    path.write_text(recipe.toml(sections))
    return {"command": recipe.command(sections), "file": str(path), "deploy": deploy}
