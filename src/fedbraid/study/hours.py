"""How long the cells of a grid take: from those that are done, or from one that was tried."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedbraid.schedule import Buffered, Rounds
from fedbraid.study.reproduce import ENGINE, Cell, Line, make_task, version

STEPS, JUDGED = 4, 200  # local steps and test samples of a trial


def paces(cells: Iterable[Cell], done: Mapping[str, Line], tried: Mapping[str, Any]) -> dict[str, float]:
    """By part, the seconds of one core that a unit of effort takes, where anything is known."""
    spent: dict[str, list[float]] = {}
    for cell in cells:
        if cell.name in done:
            mine = spent.setdefault(cell.part, [0.0, 0.0])
            mine[0] += done[cell.name]["seconds"]
            mine[1] += cell.effort * done[cell.name]["steps"] / cell.schedule.steps
    known = {part: facts["seconds"] / facts["effort"] for part, facts in tried.items()}
    return known | {part: seconds / effort for part, (seconds, effort) in spent.items() if effort}


def hours(
    cells: Iterable[Cell], done: Mapping[str, Line], tried: Mapping[str, Any]
) -> dict[str, float | None]:
    """The hours of one core that each cell not yet done would take, None where nobody knows."""
    cells = list(cells)
    pace = paces(cells, done, tried)
    return {
        c.name: c.effort * pace[c.part] / 3600 if c.part in pace else None
        for c in cells
        if c.name not in done
    }


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
    """Train a few steps of one client and judge a few samples, each timed the second time; what a round comes to by that."""
    from fedbraid.engines import choose
    from fedbraid.engines.client import Setup
    from fedbraid.run.judge import judge
    from fedbraid.run.simulate import algorithm_from, simulate

    task, algorithm = make_task(cell.task), algorithm_from(cell.algorithm)
    work = replace(cell.work, epochs=None, steps=STEPS)
    trained = _second(
        lambda: simulate(
            task, algorithm, work, Rounds(1, clients=1), seed=cell.seed, engine=ENGINE, evaluate_every=None
        )
    )
    seconds = trained * visits(cell) * local_steps(cell, task) / STEPS
    if task.test is not None:
        test = task.test[0][:JUDGED], task.test[1][:JUDGED]
        few = replace(task, test=test)
        engine = choose(ENGINE, few, work, 1, 1)
        engine.open(Setup(algorithm, few, work, cell.seed))
        x = few.initial(cell.seed)
        judged = _second(lambda: judge(engine, few, x)) * len(task.test[1]) / len(test[1])
        engine.close()
        seconds += judged * (1 / cell.every + cell.last / cell.schedule.steps)
    return {
        "cell": cell.name, "code": version(), "seconds": round(seconds, 3), "effort": cell.effort / cell.schedule.steps,
    }  # fmt: skip


def _second(do: Callable[[], Any]) -> float:
    """The seconds of this processor that something takes when it is done again."""
    do()
    begun = time.process_time()
    do()
    return time.process_time() - begun


def visits(cell: Cell) -> float:
    """Clients that train for one server step."""
    if isinstance(cell.schedule, Buffered):
        return cell.schedule.buffer
    asked = cell.schedule.clients if isinstance(cell.schedule, Rounds) else 1
    return len(asked[0]) if isinstance(asked, tuple) else float(asked)


def local_steps(cell: Cell, task: Any) -> float:
    """Local steps of a client, in the mean."""
    from fedbraid.data.batches import step_counts

    return float(step_counts(task.sizes, cell.work).mean())
