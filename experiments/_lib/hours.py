"""How long the cells of a grid take: from those that are done, or from one that was tried."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments._lib.reproduce import ENGINE, Cell, Line, make_algorithm, make_task, version
from fedbraid.core.work import Work
from fedbraid.schedule import Rounds, Schedule

if TYPE_CHECKING:
    from fedbraid.data.task import Task

STEPS, JUDGED = 2, 200  # local steps to begin with, and test samples, of a trial
SHORT, ENOUGH, MOST = (
    5.0,
    0.2,
    64,
)  # seconds of a server step that is tried whole, of a trial; what it goes up to


Kind = tuple[str, str]  # a part and a task: cells of one part may be of unlike size


def kind_of(cell: Cell) -> Kind:
    """Cells of one kind take as long for a unit of effort; seeds are no kind of their own."""
    words = str(cell.settings()["task"]).replace(f"seed={cell.seed}", "").replace(f"seed_{cell.seed}", "")
    return cell.part, words


def paces(
    cells: Iterable[Cell], done: Mapping[str, Line], tried: Mapping[str, Any]
) -> dict[Kind | str, float]:
    """By kind, and by part, the seconds of one core that a unit of effort takes, where anything is known."""
    spent: dict[Kind | str, list[float]] = {}
    known: dict[Kind | str, float] = {}
    for cell in cells:
        if (facts := tried.get(cell.part)) and facts.get("cell", cell.name) == cell.name:
            effort = cell.effort / cell.schedule.steps if "cell" in facts else facts["effort"]
            known |= dict.fromkeys((cell.part, kind_of(cell)), facts["seconds"] / effort)
        if cell.name in done:
            for key in (cell.part, kind_of(cell)):
                mine = spent.setdefault(key, [0.0, 0.0])
                mine[0] += done[cell.name]["seconds"]
                mine[1] += cell.effort * done[cell.name]["steps"] / cell.schedule.steps
    return known | {key: seconds / effort for key, (seconds, effort) in spent.items() if effort}


def hours(
    cells: Iterable[Cell], done: Mapping[str, Line], tried: Mapping[str, Any]
) -> dict[str, float | None]:
    """The hours of one core that each cell not yet done would take, None where nobody knows."""
    cells = list(cells)
    pace = paces(cells, done, tried)
    found: dict[str, float | None] = {}
    for c in cells:
        if c.name not in done:
            each = pace.get(kind_of(c), pace.get(c.part))
            found[c.name] = None if each is None else c.effort * each / 3600
    return found


def total(left: Iterable[float | None]) -> str:
    """
    >>> total([1.0, 0.25]), total([]), total([None, 2.0]), total([2000.0])
    ('1.2', '0', '?', '2,000')
    """
    left = list(left)
    if any(h is None for h in left):
        return "?"
    hours = sum(h for h in left if h is not None)
    return (
        "0" if not left else f"{hours:,.0f}" if hours >= 10 else f"{hours:.1f}" if hours >= 0.05 else "< 0.1"
    )


def read(folder: Path) -> dict[str, Any]:
    """What was tried before."""
    path = folder / "tried.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(folder: Path, part: str, facts: Line) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    known = read(folder) | {part: facts}
    (folder / "tried.json").write_text(
        json.dumps(dict(sorted(known.items())), indent=1, ensure_ascii=False) + "\n"
    )


def attempt(cell: Cell) -> Line:
    """What a server step of a cell takes: of a few of its own, or of a few local steps where those are many."""
    task = make_task(cell.task)
    seconds = local = _local_step(cell, task) * cell.participations * local_steps(cell, task)
    if local < SHORT:
        seconds = _slope(
            lambda n: _train(cell, task, cell.work, shortened(cell.schedule, n)),
            1,
            min(MOST, cell.schedule.steps),
        )
    seconds += _judged(cell, task) * (1 / cell.every + cell.last / cell.schedule.steps)
    return {
        "cell": cell.name, "code": version(), "seconds": round(seconds, 4), "effort": cell.effort / cell.schedule.steps,
    }  # fmt: skip


def _train(cell: Cell, task: Task, work: Work, schedule: Schedule) -> None:
    """Train, at a rate at which nothing diverges."""
    from fedbraid.run.simulate import simulate

    algorithm, work = make_algorithm(cell.algorithm), replace(work, lr=1e-6)
    simulate(task, algorithm, work, schedule, seed=cell.seed, engine=ENGINE, evaluate_every=None)


def _local_step(cell: Cell, task: Task) -> float:
    one = Rounds(1, clients=1)
    return _slope(lambda n: _train(cell, task, replace(cell.work, epochs=None, steps=n), one), STEPS)


def _slope(do: Callable[[int], None], n: int, most: int = MOST) -> float:
    """The seconds of this processor that one more takes, going up to `most`; what is done once is left out."""
    do(1)
    before = _timed(partial(do, n))
    while True:
        after = _timed(partial(do, 2 * n))
        if after - before > ENOUGH or 4 * n > most:
            return max(after - before, 0.0) / n
        before, n = after, 2 * n


def _timed(do: Callable[[], Any]) -> float:
    begun = time.process_time()
    do()
    return time.process_time() - begun


def _judged(cell: Cell, task: Task) -> float:
    """The seconds that the whole test set takes, by a few of its samples."""
    from fedbraid.engines import from_text
    from fedbraid.engines.engine import Setup
    from fedbraid.run.evaluate import evaluate_model

    if task.test is None:
        return 0.0
    few = replace(task, test=(task.test[0][:JUDGED], task.test[1][:JUDGED]), test_offsets=None)
    engine = from_text(ENGINE)
    engine.open(Setup(make_algorithm(cell.algorithm), few, cell.work, cell.seed))
    x = few.initial(cell.seed)
    evaluate_model(engine, few, x)
    seconds = _timed(lambda: evaluate_model(engine, few, x))
    engine.close()
    return seconds * len(task.test[1]) / min(JUDGED, len(task.test[1]))


def shortened(schedule: Schedule, steps: int) -> Schedule:
    """The first steps of a schedule."""
    if isinstance(schedule, Rounds) and isinstance(schedule.clients, tuple):
        return replace(schedule, steps=steps, clients=schedule.clients[:steps])
    return replace(schedule, steps=steps)


def local_steps(cell: Cell, task: Task) -> float:
    """Local steps of a client, in the mean."""
    from fedbraid.core.work import step_counts

    return float(step_counts(task.sizes, cell.work).mean())
