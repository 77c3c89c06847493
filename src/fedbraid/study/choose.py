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
from statistics import fmean
from typing import Any

from fedbraid.core.algorithm import Algorithm
from fedbraid.core.check import number
from fedbraid.core.work import Work
from fedbraid.data.task import Task
from fedbraid.errors import ConfigError, Diverged, MissingExtra
from fedbraid.run.checkpoint import Folder, Record
from fedbraid.run.formatting import format_bytes, format_seconds
from fedbraid.run.run import unproven
from fedbraid.schedule import Schedule
from fedbraid.schedule.availability import availability
from fedbraid.schedule.clock import Durations
from fedbraid.study import recipe, stats
from fedbraid.study.campaign import OnEvent, ignore, new_folder
from fedbraid.study.candidates import BASELINE, SPENDING, Situation, examine
from fedbraid.study.compare import FILE as COMPARE
from fedbraid.study.compare import Grid, aligned
from fedbraid.study.energy import DeviceProfile, profile_of
from fedbraid.study.race import Arm, Race

RESULT = "result.json"
LEVEL = 0.05


@dataclass
class Choice:
    """The result of `choose`; `algorithm`, `work` and `schedule` are the winner's, ready for `fb.simulate`."""

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

        folder = self.out / "confirm"
        recorded = Folder(folder).read_json(COMPARE)
        curves = {}
        for e in recorded["entries"]:
            histories = [
                list(Folder(folder / e["folder"] / f"seed-{n}").records()) for n in recorded["seeds"]
            ]
            runs = stats.Runs(e["name"], recorded["seeds"], histories, [None] * len(histories))
            if (curve := stats.curve(runs, recorded["metric"])) is not None:
                curves[e["name"]] = curve
        return fronts(curves, recorded["metric"], self.facts["accuracy"])

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows of the ranking, as text."""
        names = list(self.ranking[0]["metrics"])
        rows = [
            [
                r["name"],
                "tied" if r["tied"] else "",
                *(format_measure(name, r["metrics"][name]) for name in names),
            ]
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


def format_measure(name: str, value: Record | None) -> str:
    """A mean with its interval, in the unit of its measure."""
    if value is None:
        return "–"
    kind = name.partition(" ")[0]
    scale, unit = (100, " %") if kind in ("accuracy", "worst") else (1, "")
    formats: dict[str, Any] = {
        "time": _duration,
        "up": format_bytes,
        "down": format_bytes,
        "bytes": format_bytes,
    }
    say = formats.get(kind, lambda v: f"{scale * v:.{1 if unit else 4}{'f' if unit else 'g'}}")
    half = f" ± {say(value['half'])}" if value["half"] else ""
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
    goes on, or answers at once. `note` is stored in `choose.json`.

    >>> found = fb.choose("digits", clients=100, partition="label_chunks(1)", per_round=5, minutes=2)  # doctest: +SKIP
    >>> fb.simulate(task, found.algorithm, found.work, found.schedule)  # doctest: +SKIP
    """
    from fedbraid.data import tasks

    if isinstance(task, str):
        task = tasks.load(task, clients, partition)
    elif clients is not None or partition is not None:
        raise ConfigError("clients= and partition= go with the name of a task; this task has its own")
    limits: dict[str, Any] = {
        "uplink": uplink, "downlink": downlink, "server_memory": server_memory, "deadline": deadline
    }  # fmt: skip
    situation = Situation(
        per_round=per_round, rounds=rounds, no_client_state=no_client_state, epsilon=epsilon, accuracy=accuracy,
        online=availability(online) if isinstance(online, str | os.PathLike) else online,
        objective=objective or ("accuracy" if accuracy is None else "time"), device=profile_of(device), durations=durations,
        work=work or Work(lr=0.05, batch=5 if task.name == "digits" else 20), **limits,
    )  # fmt: skip
    number("minutes", minutes, "(0, inf)", "leaves no time")
    situation.check(task)
    folder = new_folder(task.name, "choose") if out is None else Path(out)
    race = Race(task, situation, candidates, folder, minutes, jobs, seed, on_event)
    if (folder / RESULT).exists():
        race.claim(note or {})
        return _stored(race, folder)
    admitted_all = race.admit()
    race.claim(note or {})
    race.recall()
    arms = race.run(admitted_all)
    finalists = race.finalists(arms)
    final = _Final(race, arms, finalists, race.confirm(finalists))
    facts, entry = final.facts(), final.best.entry
    Folder(folder).write_json(RESULT, facts)
    return Choice(facts, entry.algorithm, entry.work, entry.schedule, folder)


def _stored(race: Race, folder: Path) -> Choice:
    """The answer that the folder holds."""
    facts = Folder(folder).read_json(RESULT)
    best = next(c for c in race.candidates if c.name == facts["ranking"][0]["name"])
    admitted, _ = examine(best, race.situation, race.task)
    assert admitted is not None
    entry = admitted.entry(facts["ranking"][0]["settings"], facts["rounds"])
    return Choice(facts, entry.algorithm, entry.work, entry.schedule, folder)


# The result ---------------------------------------------------------------------------------------


class _Final:
    """What the race and its final say: the ranking, a sentence for every loser, the winner as a command."""

    def __init__(self, race: Race, arms: Sequence[Arm], finalists: Sequence[Arm], grid: Grid) -> None:
        self.race, self.arms, self.finalists, self.grid, s = race, arms, finalists, grid, race.situation
        found, self.spends = grid.result(), s.objective in SPENDING
        self.failures, count = found.failures, len(grid.seeds)
        groups = {
            a.name: g for a, g in zip(finalists, found.groups) if len(g.seeds) == count
        }  # others diverged
        if not groups:
            raise Diverged(
                "all finalists diverged with fresh seeds; give more clients a round, or another work="
            )
        metric = "worst tenth" if s.objective == "worst-tenth" else race.metric
        self.key = f"{s.objective} to {s.accuracy:.0%}" if self.spends else metric
        self.rows = {name: [self._measures(h, metric) for h in g.histories] for name, g in groups.items()}
        self.values = {name: [r[self.key] for r in rows] for name, rows in self.rows.items()}
        if not any(v is not None for values in self.values.values() for v in values):
            raise race.unreached(
                [(fmean(r["accuracy"] for r in rows), name) for name, rows in self.rows.items()]
            )
        self.order = sorted(self.rows, key=self._order_key)
        self.complete = {n: self.values[n] for n in self.order if None not in self.values[n]}
        if self.spends:  # what counts is the ratio
            self.complete = {
                n: [math.log(max(v, 1e-12)) for v in values] for n, values in self.complete.items()
            }
        self.tests = stats.pair_tests(self.complete)
        self.best = next(a for a in finalists if a.name == self.order[0])
        self.ranking = [self._ranked(next(a for a in finalists if a.name == name)) for name in self.order]

    def _measures(self, history: Sequence[Record], metric: str) -> Record:
        """One run's figures, the objective first."""
        race, history = self.race, self.race.in_time(history)
        row = {self.key: race.cost_to_target(history)} if self.spends else {}
        row |= {metric: stats.final(history, race.metric)}
        row |= {"accuracy": stats.final(history, "accuracy")} if "accuracy" in race.task.measures else {}
        sums = {"up": "bytes_up", "down": "bytes_down", "energy": "energy"}
        return row | {"time": history[-1]["time"]} | {k: sum(r[v] for r in history) for k, v in sums.items()}

    def _order_key(self, name: str) -> tuple[int, float]:
        """Candidates that have a value with every seed first, by its mean."""
        reached = [v for v in self.values[name] if v is not None]
        sign = 1.0 if self.spends else -self.race.sign
        return len(self.values[name]) - len(reached), sign * fmean(reached) if reached else math.inf

    def _ranked(self, arm: Arm) -> Record:
        e, p = arm.entry, self.tests.get(frozenset((self.best.name, arm.name)))
        return {
            "name": arm.name, "algorithm": e.algorithm.name or arm.name, "work": repr(e.work), "schedule": repr(e.schedule),
            "settings": arm.settings, "tied": arm is self.best or (p is not None and p >= LEVEL), "p": p,
            "metrics": {k: _interval([r[k] for r in self.rows[arm.name]]) for k in self.rows[arm.name][0]},
        }  # fmt: skip

    def facts(self) -> Record:
        race, s = self.race, self.race.situation
        return {
            "task": recipe.task_name(race.task.spec or race.task.name), "objective": s.objective, "accuracy": s.accuracy,
            "situation": str(s), "rounds": race.rounds, "ranking": self.ranking, "verdict": self._verdict(),
            "losers": [{"algorithm": name, "reason": why} for name, why in self._losers().items()],
            "excluded": [
                {"algorithm": name, "reason": o[0].reason, "admits": " and ".join(x.admits for x in o)}
                for name, o in race.excluded.items()
            ],
            "budget": {
                "minutes": race.minutes, "seconds": round(race.spent, 1), "candidates": race.plan["tried"],
                "runs": len(race.looks) + len(self.finalists) * len(self.grid.seeds),
                "settings": race.plan["settings"], "seeds": self.grid.seeds,
            },
            **self._written(),
        }  # fmt: skip

    def _verdict(self) -> list[str]:
        """Which is best, whether it beats FedAvg, and how sure that is."""
        best, race, count = self.best.name, self.race, len(self.grid.seeds)
        tied, pairs = [r["name"] for r in self.ranking[1:] if r["tied"]], len(self.tests)
        sure = f"{count} fresh seeds"
        if pairs:
            sure += f"; paired t-tests at {LEVEL:.0%}, Holm over {pairs} pair{'s'[: pairs != 1]}"
        sentences = [
            f"{best} is best by {self.key}{', tied with ' if tied else ''}{', '.join(tied)} ({sure})."
        ]
        base = next((r for r in self.ranking[1:] if r["name"] == BASELINE), None)
        if base is not None and base["p"] is None:
            reached = sum(v is not None for v in self.values[BASELINE])
            sentences.append(f"FedAvg, tuned alike, reached the target with {reached} of {count} seeds.")
        elif base is not None:
            gain = stats.interval([a - b for a, b in zip(self.values[best], self.values[BASELINE])])
            much = format_measure(self.key, {"mean": abs(gain.mean), "half": gain.half}).replace(
                " %", " points"
            )
            verb = "is ahead of" if base["tied"] else "beats"
            sentences.append(f"{best} {verb} FedAvg, tuned alike, by {much} (p = {base['p']:.2g}).")
        near = [n for n in (tied or self.complete) if n != best and best in self.complete]
        if near and count < 3:
            sentences.append("So few seeds tell no difference; give more minutes.")
        elif near:
            gaps = [[x - y for x, y in zip(self.complete[best], self.complete[name])] for name in near]
            least = max(stats.resolution(d, LEVEL / pairs) for d in gaps)
            much = f"{math.expm1(least):.0%}" if self.spends else self._format(least).replace(" %", " points")
            sentences.append(f"Differences below {much} would not have been found with these seeds.")
        if (doubt := unproven(self.best.entry.algorithm, self.best.entry.schedule)) is not None:
            sentences.append(f"{doubt[0].upper()}{doubt[1:]}.")
        samples, judges = race.held_out
        points = f" (a standard error of up to {50 / math.sqrt(samples):.1f} points)" if race.sign > 0 else ""
        tested = f"{judges} held-out clients with {samples:,} samples{points}"
        return [*sentences, f"The race was judged on {tested}, the final on the test set."]

    def _losers(self) -> dict[str, str]:
        """A sentence for each that is neither the best nor tied with it."""
        race, last = self.race, self.ranking[0]["metrics"][self.key]
        reasons = {
            name: f"diverged with {len(errors)} of the fresh seeds" for name, errors in self.failures.items()
        }
        for r in self.ranking:
            if not r["tied"]:
                sure = "" if r["p"] is None else f" (p = {r['p']:.2g})"
                reasons[r["name"]] = (
                    f"{format_measure(self.key, r['metrics'][self.key])} against {format_measure(self.key, last)}{sure}"
                )
        chosen = self.finalists[: race.plan["finalists"]]
        twins = {a.admitted.candidate.family: f", a twin of {a.name}" for a in chosen}
        for arm in race.ranked(self.arms):
            if arm.name in reasons or any(a.name == arm.name for a in self.finalists):
                continue
            rung = race.rung_of(arm)
            result, of = race.looks[arm.key, rung], [race.looks.get((a.key, rung), {}) for a in chosen]
            bar = min((k for k in of if k.get("value") is not None), key=lambda k: k["score"], default=None)
            why = "" if bar is None else f", where finalists had {self._format_value(bar)} or better"
            if result["value"] is None:
                reasons[arm.name] = f"{result['why']} with every setting"
            else:
                why = twins.get(arm.admitted.candidate.family, why)
                reasons[arm.name] = (
                    f"{self._format_value(result)} on held-out clients at step {result['step']}{why}"
                )
        return reasons

    def _format(self, value: float) -> str:
        name = "accuracy" if self.race.metric.startswith("accuracy") else self.race.metric
        return format_measure(name, {"mean": value, "half": None})

    def _format_value(self, result: Record) -> str:
        """What a run was worth at a rung: its metric, and what the target takes as far as can be told."""
        if "takes" not in result:
            return self._format(result["value"])
        takes = format_measure(self.race.situation.objective, {"mean": result["takes"], "half": None})
        return f"{self._format(result['value'])} and {takes} to the target"

    def _written(self) -> Record:
        """The winner as a command, as a file for `run`, and as the keys of a deployment."""
        e, path = self.best.entry, self.race.out / "winner.toml"
        sections = recipe.sections(Folder(next(c for c in self.grid.cells if c.entry is e).folder).config())
        timeless = dataclasses.replace(e.schedule, bandwidth=None, availability=None)  # type: ignore[call-arg]
        command, file = "fb.simulate(task, found.algorithm, found.work, found.schedule)", None
        if sections is not None:
            path.write_text(recipe.toml(sections))
            command, file = recipe.command(sections), str(path)
        deploy = {"algorithm": e.algorithm.name, "work": repr(e.work), "schedule": repr(timeless)}
        return {"command": command, "file": file, "deploy": deploy}


def _interval(values: Sequence[float | None]) -> Record | None:
    """A mean with its interval, where every seed has a value."""
    defined = [v for v in values if v is not None]
    return stats.plain(stats.interval(defined)) if defined and len(defined) == len(values) else None
