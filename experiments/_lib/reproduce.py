"""A paper's experiments: grids of named cells, run once each, resumable, and tables made from what came out.

`experiments/PAPER/grid.py` defines `cells()`, a list of `Cell`, the most telling first, and `report(done)`,
which gives tables by name and draws pictures. Each finished cell is one line in `results/PART.jsonl`; a cell
in progress lives in its run folder and resumes from there. Workers claim cells by a file lock, so several
commands may share a grid, and a killed one leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from fedbraid.core.work import Work
from fedbraid.errors import ConfigError, Diverged, EngineError, FedbraidError, MissingExtra, RunError, unknown
from fedbraid.parse import written
from fedbraid.schedule import Buffered, Rounds, Schedule
from fedbraid.workers import Failure, WorkerPool

if TYPE_CHECKING:
    from fedbraid.core.algorithm import Algorithm
    from fedbraid.data.task import Task
    from fedbraid.run.run import Run

Line = dict[str, Any]  # what came of a cell
ENGINE = "in_process(threads=1)"
DIGITS = 6  # significant digits of what is kept
TOTALS = ("bytes_up", "bytes_down", "bytes_broadcast", "flops")  # kept as sums since the start


@dataclass(frozen=True)
class Cell:
    """One run of a grid. The first word of its name is its part: `mnist/LQ-1/fedavg/seed 42`."""

    name: str
    task: str | Callable[[], Task]  # a `Task.spec`, or a function of the grid that makes one
    algorithm: str | Callable[[], Algorithm]  # text, or a function of the grid that makes one
    work: Work
    schedule: Schedule
    seed: int = 42
    every: int = 1  # test the model every so many steps ...
    last: int = 0  # ... and at each of the last ones
    keep: tuple[str, ...] = (
        "accuracy",
        "loss",
    )  # measurements to keep, at the steps where the model was tested
    target: float | None = None  # stop at the first test of at least this accuracy
    probe: Callable[[Run], Line] | None = None  # more measurements, wherever the model is tested
    by_client: bool = False  # test on local test sets, too

    @property
    def part(self) -> str:
        return self.name.partition("/")[0]

    @property
    def effort(self) -> float:
        """Local steps or epochs of all participations, for the time left."""
        return float(self.schedule.steps * self.participations * (self.work.steps or self.work.epochs or 1))

    @property
    def participations(self) -> float:
        """Clients that train for one server step."""
        if isinstance(self.schedule, Buffered):
            return float(self.schedule.buffer)
        asked = self.schedule.clients if isinstance(self.schedule, Rounds) else 1
        return float(len(asked[0]) if isinstance(asked, tuple) else asked)

    @property
    def key(self) -> str:
        """A short hash of the settings, so that a changed cell does not continue an old run."""
        text = json.dumps([self.settings(), self.every, self.last])
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def settings(self) -> Line:
        """Everything that decides what comes out."""
        return {
            "task": _named(self.task), "algorithm": _named(self.algorithm), "work": terse(repr(self.work)), "schedule": terse(repr(self.schedule)),
            "seed": self.seed,
        } | ({} if self.target is None else {"target": self.target})  # fmt: skip


def _named(made: str | Callable[[], Any]) -> str:
    return made if isinstance(made, str) else f"{made.__name__}()"


@dataclass(frozen=True)
class Claim:
    """One table, figure, theorem or sentence of a paper, and what came of it here."""

    item: str
    says: str
    status: str  # one of STATUS
    close: str  # how close, in numbers where there are any
    command: str  # what shows it


STATUS = {
    "agrees": "what the paper says, in the paper's own size",
    "in small": "what the paper says, in a smaller size",
    "partly": "part of what it says",
    "differs": "not what the paper says",
    "tested": "a property that a test holds",
    "open": "not run, or not enough of it",
    "also here": "nothing to measure, or nothing that the paper claims: settings, and methods that came later",
}
COUNTED = tuple(status for status in STATUS if status != "also here")


class Grid(Protocol):
    """What a grid.py defines."""

    def cells(self) -> list[Cell]: ...

    def full(self) -> list[Cell]:
        """The same in the paper's own size, for machines that can bear it."""

    def report(self, done: Mapping[str, Line]) -> dict[str, str]: ...

    def sentences(self, done: Mapping[str, Line]) -> list[str]:
        """What came of it, in a few plain sentences."""

    def claims(self, done: Mapping[str, Line]) -> list[Claim]: ...


# Grids ----------------------------------------------------------------------------------------------


def papers(home: Path) -> list[str]:
    """The papers that have a grid."""
    return sorted(path.parent.name for path in home.glob("*/grid.py"))


def find_home(given: Path | None) -> Path:
    """The folder of experiments: the one given, the working directory's, or the one around this file."""
    places = [given] if given else [Path("experiments"), Path(__file__).parents[1]]
    for place in places:
        if papers(place):
            return place
    raise ConfigError(
        f"no experiments in {places[0]}; run this in a clone of the repository or give --experiments DIR"
    )


def load(home: Path, paper: str) -> Grid:
    """A paper's grid, its cells named apart."""
    if paper not in papers(home):
        raise unknown("paper", paper, papers(home))
    path = home / paper / "grid.py"
    spec = importlib.util.spec_from_file_location(f"fedbraid_grid_{paper}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    names = [cell.name for cell in every(cast(Grid, module))]
    if twice := {n for n in names if names.count(n) > 1}:
        raise ConfigError(f"{path} has two cells named {min(twice)!r}; name them apart")
    return cast(Grid, module)


def every(grid: Grid) -> list[Cell]:
    """The cells of both sizes."""
    return [*grid.cells(), *grid.full()]


def choose(cells: list[Cell], part: str | None = None, pattern: str | None = None) -> list[Cell]:
    """The cells of a part, or whose names match a glob."""
    if part is not None and part not in {c.part for c in cells}:
        raise unknown("part", part, {c.part for c in cells})
    chosen = [c for c in cells if part in (None, c.part) and fnmatchcase(c.name, pattern or "*")]
    if not chosen:
        raise ConfigError(f"no cell matches {pattern!r}; --list shows them all")
    return chosen


# Results --------------------------------------------------------------------------------------------


class Book:
    """The lines of finished cells, a file a part."""

    def __init__(self, folder: Path, again: bool = False) -> None:
        self.folder, self.again = folder, again  # whether what is outdated is to be run again
        self._read: tuple[list[tuple[Path, int]], dict[str, Line]] = ([], {})

    def lines(self) -> dict[str, Line]:
        """The latest line of every cell; one still being written is left out."""
        files = [(path, path.stat().st_size) for path in sorted(self.folder.glob("*.jsonl"))]
        if files != self._read[0]:  # lines are only ever added
            self._read = (files, self._parse([path for path, _ in files]))
        return self._read[1]

    def _parse(self, files: list[Path]) -> dict[str, Line]:
        found: dict[str, Line] = {}
        for path in files:
            for number, text in enumerate(path.read_bytes().splitlines(keepends=True), 1):
                if not text.endswith(b"\n"):
                    continue
                try:
                    line = json.loads(text)
                    line["curve"] = {MEASURED.get(key, key): v for key, v in line["curve"].items()}
                    found[line["cell"]] = line
                except (ValueError, KeyError, TypeError) as error:
                    raise RunError(f"{path} line {number} is corrupt ({error}); remove that line") from error
        return found

    def done(self, cells: Iterable[Cell]) -> dict[str, Line]:
        """The lines of these cells, left out where the grid has changed since."""
        lines = self.lines()
        found = {c.name: lines[c.name] for c in cells if c.name in lines and same(lines[c.name], c)}
        return {name: line for name, line in found.items() if not (self.again and outdated(line))}

    def append(self, part: str, line: Line) -> None:
        """Add a line whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"{part}.jsonl", "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            whole = file.read().rfind(b"\n") + 1
            file.truncate(whole)  # the tail of a writer that was killed
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def same(line: Line, cell: Cell) -> bool:
    """Whether a line came from this very cell."""
    had = line | {key: terse(line[key]) for key in ("work", "schedule")}
    return all(had.get(key) == value for key, value in cell.settings().items())


@lru_cache(maxsize=1)
def changed() -> list[dict[str, str]]:
    """Definitions that changed, by the lines that they make outdated: `experiments/outdated.json`."""
    found: list[dict[str, str]] = json.loads((Path(__file__).parents[1] / "outdated.json").read_text())
    return found


def outdated(line: Line) -> str | None:
    """Why a line is of a definition that has changed since; None where it is of today's."""
    had = line | {key: terse(line[key]) for key in ("work", "schedule")}
    for change in changed():
        if all(fnmatchcase(had[key], pattern) for key, pattern in change.items() if key != "why"):
            return change["why"]
    return None


MEASURED = {"norm_h": "offset_norm", "drift": "update_norm"}  # measurements that have another name since
FORMER = {"over": "over_select", "choose": "select"}  # keywords of schedules that have another name since


@lru_cache(maxsize=4096)
def terse(text: str) -> str:
    """A work's or schedule's text without what is at its default, so that results outlive new keywords.

    >>> terse("Work(lr=0.1, epochs=2, batch=20, last='keep')")
    'Work(lr=0.1, epochs=2)'
    >>> terse("Rounds(steps=9, clients=5, over=1.0, timeout=None)")
    'Rounds(steps=9, clients=5)'
    """
    name, _, given = written(text)
    kind = {k.__name__: k for k in (Work, Rounds, Buffered)}[name]
    plain = {
        f.name: repr(f.default if f.default_factory is MISSING else f.default_factory()) for f in fields(kind)
    }
    given = {FORMER.get(key, key): v for key, v in given.items()}
    told = [f"{key}={v}" for key, v in given.items() if v != plain.get(key)]
    return f"{kind.__name__}({', '.join(told)})"


# Running --------------------------------------------------------------------------------------------


class Curve:
    """Tests the model where a cell wants it, and stops when whoever started the worker has gone."""

    def __init__(self, cell: Cell, parent: int | None) -> None:
        self.cell, self.parent = cell, parent
        self.seen: list[Line] = []

    def step(self, record: Line, run: Run) -> bool:
        from fedbraid.run.evaluate import evaluate_model

        if self.parent is not None and os.getppid() != self.parent:
            raise KeyboardInterrupt
        t, end = record["step"], run.schedule.steps
        if t % self.cell.every == 0 or t > end - self.cell.last or t == end:
            on = "clients" if self.cell.by_client else "test"
            record.update(evaluate_model(run.engine, run.setup.task, run.state.average, on))
            record.update(self.cell.probe(run) if self.cell.probe else {})
            if t > end - max(self.cell.last, 1) and "predicted" in self.cell.keep:
                task = run.setup.task
                _, classes = run.engine.evaluate(run.state.average, *task.test)  # type: ignore[misc]
                record["predicted"] = (
                    None if classes is None else classes.bincount(minlength=task.classes).tolist()
                )
        self.seen.append(record)
        return self.cell.target is not None and record.get("accuracy", 0.0) >= self.cell.target


@lru_cache(maxsize=1)
def version() -> str:
    """The version of the code: the package's, and a short hash of its source as it was when first asked."""
    import fedbraid

    home = Path(fedbraid.__file__).parent
    h = hashlib.blake2b(digest_size=4)
    for path in sorted(p for p in home.rglob("*") if p.suffix in (".py", ".hpp")):
        h.update(str(path.relative_to(home)).encode() + b"\0" + path.read_bytes())
    return f"{fedbraid.__version__}+{h.hexdigest()}"


@lru_cache(maxsize=1)
def make_task(make: str | Callable[[], Task]) -> Task:
    """A cell's task; the last one is kept, for cells come in order."""
    from fedbraid.data import tasks

    return tasks.reload(make) if isinstance(make, str) else make()


def make_algorithm(make: str | Callable[[], Algorithm]) -> Algorithm:
    from fedbraid.algorithms.registry import algorithm_from

    return algorithm_from(make) if isinstance(make, str) else make()


def run(cell: Cell, out: Path, parent: int | None = None) -> Line:
    """Run a cell in its folder, or continue it, and give its line."""
    from fedbraid.run.checkpoint import Folder
    from fedbraid.run.simulate import simulate
    from fedbraid.study.flops import by_step, of_clients

    begun, stopped, curve = time.process_time(), None, Curve(cell, parent)
    task, algorithm = make_task(cell.task), make_algorithm(cell.algorithm)
    try:
        simulate(
            task, algorithm, cell.work, cell.schedule, seed=cell.seed, engine=ENGINE, out=out,
            evaluate_every=None, callbacks=[curve], checkpoint_every=max(1, min(50, cell.schedule.steps // 4)),
            log_layer_norms="moved" in cell.keep,
        )  # fmt: skip
    except Diverged as error:
        stopped = str(error)
    kept = list(Folder(out).records())
    history = kept + [
        r for r in curve.seen if r["step"] > len(kept)
    ]  # a run that diverged did not commit all
    if "flops" in cell.keep:
        for record, flops in zip(history, by_step(of_clients(task, algorithm, cell.work), history)):
            record["flops"] = flops
    line: Line = {"cell": cell.name, **cell.settings(), "code": version(), "steps": len(history)}
    line |= {key: sum(r[key] for r in history) for key in ("bytes_up", "bytes_down", "bytes_broadcast")}
    line |= {"seconds": round(time.process_time() - begun, 1), "diverged": stopped}
    for key in set(TOTALS) & set(cell.keep):
        for record, total in zip(history, accumulate(r[key] for r in history)):
            record[key] = total
    tested = [r for r in history if "loss" in r] if stopped is None else history
    line["curve"] = {key: [_short(r.get(key)) for r in tested] for key in ("step", *cell.keep)}
    return line


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return {k: _short(v) for k, v in value.items()} if isinstance(value, dict) else value


@contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Whether this process is the one that runs a cell; the lock goes with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def work(
    home: Path, paper: str, names: Sequence[str], runs: Path, parent: int | None = None,
    after: Callable[[], None] = lambda: None, again: bool = False,
) -> None:  # fmt: skip
    """Run those of the named cells that nobody has run or is running."""
    import torch

    torch.set_num_threads(1)
    version()  # of the code that was imported, whatever is edited while it runs
    by_name = {cell.name: cell for cell in every(load(home, paper))}
    book = Book(home / paper / "results", again)
    waiting = list(names)
    while waiting:  # what another process holds is looked at again: it may be killed
        taken = []
        for name in waiting:
            cell = by_name[name]
            out = runs / paper / f"{slug(name)}-{cell.key}"
            with _claimed(runs / paper / f"{out.name}.lock") as mine:
                if not mine:
                    taken.append(name)
                elif not book.done([cell]):
                    book.append(cell.part, _ran(cell, out, parent))
                    shutil.rmtree(out)
                    after()
        if waiting := taken:
            time.sleep(0.5)


def _ran(cell: Cell, out: Path, parent: int | None) -> Line:
    try:
        return run(cell, out, parent)
    except FedbraidError as error:
        raise EngineError(f"cell {cell.name!r} could not be run: {error}") from error


def slug(name: str) -> str:
    """A cell's name as the name of a folder.

    >>> slug("mnist/LQ-1/fedavg/seed 42")
    'mnist--LQ-1--fedavg--seed_42'
    """
    return "".join(c if c.isalnum() or c in "-_.=" else "_" for c in name.replace("/", "--"))


Tell = Callable[[int, int, float | None], None]  # cells done, cells in all, seconds left


class Pace:
    """Tells how many cells are done, and by the effort of those done since the start how long the rest takes."""

    def __init__(self, book: Book, cells: list[Cell], tell: Tell) -> None:
        self.book, self.cells, self.tell = book, cells, tell
        self.done, self.begun = book.done(cells), time.monotonic()
        self.first = self._effort()
        tell(len(self.done), len(cells), None)

    def _effort(self) -> float:
        return sum(c.effort for c in self.cells if c.name in self.done)

    def look(self) -> None:
        before, self.done = len(self.done), self.book.done(self.cells)
        if len(self.done) > before:
            effort = self._effort()
            pace = (time.monotonic() - self.begun) / max(effort - self.first, 1.0)
            left = pace * (sum(c.effort for c in self.cells) - effort)
            self.tell(len(self.done), len(self.cells), left)


def go(
    home: Path, paper: str, cells: list[Cell], runs: Path, workers: int, tell: Tell, again: bool = False
) -> None:
    """Run what is missing of these cells, in this process or in several of one thread each."""
    pace = Pace(Book(home / paper / "results", again), cells, tell)
    left = [c.name for c in cells if c.name not in pace.done]
    if not left:
        return
    if workers == 1:
        work(home, paper, left, runs, after=pace.look, again=again)
        return
    share, parent = iter([left] * min(workers, len(left))), os.getpid()

    def done(names: list[str], said: Failure | None) -> None:
        if said is not None:
            raise said.error()

    with WorkerPool(lambda names, ask: work(home, paper, names, runs, parent, again=again), workers) as pool:
        pool.run(lambda: next(share, None), done, idle=pace.look)


# Tables and pictures --------------------------------------------------------------------------------


def report(home: Path, paper: str) -> list[str]:
    """Make tables and pictures anew from the results alone; gives the names of the tables."""
    grid = load(home, paper)
    done = Book(home / paper / "results").done(every(grid))
    said = "\n".join(f"- {sentence}" for sentence in sentences(grid, done))
    tables = {
        **({"sentences": said} if said else {}),
        "claims": in_words(grid.claims(done)),
        **grid.report(done),
    }
    fill(home / paper / "README.md", tables)
    return list(tables)


def sentences(grid: Grid, done: Mapping[str, Line]) -> list[str]:
    """What a grid says of its results, if it says anything."""
    say = getattr(grid, "sentences", None)
    return [] if say is None else say(done)


HEADS = {
    "agrees": "What agrees", "in small": "What agrees, in a smaller size", "partly": "What agrees in part",
    "differs": "What does not agree", "open": "What is open", "also here": "Also here",
}  # fmt: skip


def in_words(claims: Sequence[Claim]) -> str:
    """What agrees and what does not, claim by claim.

    >>> print(in_words([Claim("Table 1", "it wins", "differs", "it loses", "–"), Claim("Theorem 1", "", "tested", "", "–")]))
    **What does not agree**
    <BLANKLINE>
    - Table 1: it wins. *Here:* it loses.
    <BLANKLINE>
    **Held by tests:** Theorem 1.
    """
    blocks = []
    for status, head in HEADS.items():
        mine = [f"- {c.item}: {c.says}. *Here:* {c.close}." for c in claims if c.status == status]
        if mine:
            blocks.append("\n".join([f"**{head}**", "", *mine]))
    if tested := list(dict.fromkeys(c.item for c in claims if c.status == "tested")):
        blocks.append(f"**Held by tests:** {', '.join(tested)}.")
    return "\n\n".join(blocks)


def verdict(parts: Sequence[bool | None], small: bool = True) -> str:
    """A status from the parts of what a paper says: all, some or none of them hold; None is not known yet.

    >>> verdict([True, True]), verdict([True, False]), verdict([False]), verdict([True, None]), verdict([True], small=False)
    ('in small', 'partly', 'differs', 'open', 'agrees')
    """
    if not parts or None in parts:
        return "open"
    return ("in small" if small else "agrees") if all(parts) else "partly" if any(parts) else "differs"


def fill(page: Path, tables: Mapping[str, str]) -> None:
    """Put tables between their marks, `<!-- table NAME -->` and `<!-- end -->`."""
    text = page.read_text()
    for name, table in tables.items():
        mark = f"<!-- table {name} -->\n"
        head, found, rest = text.partition(mark)
        _, end, tail = rest.partition("<!-- end -->")
        if not (found and end):
            raise ConfigError(f"{page} has no place for table {name!r}; add {mark.strip()} and <!-- end -->")
        text = f"{head}{mark}\n{table.strip()}\n\n{end}{tail}"
    page.write_text(text)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[int] = (0,)) -> str:
    """A table; columns of text, the first unless others are named, begin at the left.

    >>> print(markdown(["method", "ours"], [["fedavg", "1.0"]]))
    | method | ours |
    | :-- | --: |
    | fedavg | 1.0 |
    """
    lines = [list(head), [":--" if i in text else "--:" for i in range(len(head))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float], digits: int = 1, scale: float = 1.0) -> str:
    """Mean and standard deviation; one value alone, and a dash for none.

    >>> spread([1.0, 2.0, 3.0]), spread([0.5], 1, 100), spread([])
    ('2.0 ± 1.0', '50.0', '–')
    """
    if not values:
        return "–"
    mean = f"{scale * statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {scale * statistics.stdev(values):.{digits}f}"


def tail(line: Line, count: int, key: str = "accuracy") -> float:
    """The mean of a measurement over the last so many steps."""
    end = max(line["curve"]["step"], default=0)
    values = [
        v
        for s, v in zip(line["curve"]["step"], line["curve"][key])
        if s > end - count and isinstance(v, float)
    ]
    return statistics.fmean(values) if values else math.nan


@dataclass(frozen=True)
class Drawn:
    """A curve, or bars, of a picture: where there are several seeds their mean, and their range as a band."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    grey: bool = False  # one that is not discussed


def over_seeds(
    label: str,
    lines: Sequence[Line],
    key: str = "accuracy",
    x: str = "step",
    scale: float = 1.0,
    grey: bool = False,
) -> Drawn:
    """A measurement's mean and range over the lines of several seeds, at the tests that all of them have.

    >>> line = {"curve": {"step": [1, 2], "loss": [2.0, 1.0]}}
    >>> over_seeds("a", [line, {"curve": {"step": [1, 2], "loss": [4.0, None]}}], "loss")
    Drawn(label='a', x=[1.0], y=[3.0], low=[2.0], high=[4.0], grey=False)
    """
    found: list[tuple[float, ...]] = []
    for at in range(min((len(line["curve"]["step"]) for line in lines), default=0)):
        values = [line["curve"][key][at] for line in lines]
        if all(isinstance(v, int | float) and math.isfinite(v) for v in values):
            where = statistics.fmean(line["curve"][x][at] for line in lines)
            found.append((where, *(scale * f(values) for f in (statistics.fmean, min, max))))
    places, mean, low, high = ([row[i] for row in found] for i in range(4))
    return Drawn(label, places, mean, low, high, grey)


@dataclass(frozen=True)
class Panel:
    """One plot of a picture: the same label keeps its colour over panels; `level` draws lines across, by name."""

    title: str
    curves: Sequence[Drawn]
    x: str = "round"
    y: str = "test accuracy"
    log: bool = False
    log_x: bool = False
    limits: tuple[float, float] | None = None
    level: Mapping[str, float] = field(default_factory=dict)
    bars: bool = False


def pictured(path: Path, text: str) -> str:
    """A picture below its table, once there is one."""
    return f"\n\n![{text}]({path.name})" if path.exists() else ""


COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
    "#a0522d",
    "#882255",
    "#999933",
)
GREY = "#b0b0b0"


def picture(path: Path, panels: Sequence[Panel], columns: int = 3) -> None:
    """Panels side by side as a PNG, each with its curves' names at their ends; those without a curve are left out."""
    panels = [panel for panel in panels if any(c.x for c in panel.curves)]
    if not panels:
        return
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtra("drawing pictures", "plot") from error
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    height = -(-len(panels) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.1 * height), layout="constrained")
    axes = list(figure.subplots(height, columns, squeeze=False).flat)
    names = list(dict.fromkeys(c.label for panel in panels for c in panel.curves if not c.grey))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    for axis, panel in zip(axes, panels):
        _draw(axis, panel, colours)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.savefig(path, format="png", dpi=90)


def _draw(axis: Any, panel: Panel, colours: Mapping[str, str]) -> None:
    axis.set_title(panel.title, fontsize=10, wrap=True)
    axis.set(xlabel=panel.x, ylabel=panel.y)
    if panel.limits is not None:
        axis.set_ylim(*panel.limits)
    axis.grid(alpha=0.25, axis="y" if panel.bars else "both")
    curves = [c for c in panel.curves if c.x]
    if panel.bars:
        _draw_bars(axis, curves, colours)
    for c in sorted(curves, key=lambda c: not c.grey) if not panel.bars else ():
        colour, style = (GREY, "--") if c.grey else (colours[c.label], "-")
        axis.plot(c.x, c.y, style, color=colour, linewidth=1.0 if c.grey else 1.5)
        if c.low and not c.grey:
            axis.fill_between(c.x, c.low, c.high, color=colour, alpha=0.18, linewidth=0)
    if panel.log:
        _logarithmic(axis, "y", [v for c in curves for v in (*c.y, *c.low, *c.high)])
    if panel.log_x:
        _logarithmic(axis, "x", [v for c in curves for v in c.x])
    for name, value in panel.level.items():
        axis.axhline(value, color="#555555", linewidth=0.8, linestyle=":")
        axis.annotate(
            name, (0.99, value), xycoords=("axes fraction", "data"), fontsize=7, color="#555555", va="bottom", ha="right"
        )  # fmt: skip
    axis.margins(y=0.08)
    if not panel.bars:
        _name_ends(axis, curves, colours)


def _logarithmic(axes: Any, which: str, values: Sequence[float]) -> None:
    """A logarithmic axis, in plain numbers where it spans less than two decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    positive = [v for v in values if v > 0]
    if positive and max(positive) < 100 * min(positive):
        steps: tuple[int, ...] = (1, 2, 3, 5) if max(positive) < 10 * min(positive) else (1, 3)
        if max(positive) < 2 * min(positive):
            steps = tuple(range(1, 10))
        axis.set_major_locator(LogLocator(subs=steps))
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axis.set_minor_formatter(NullFormatter())


def _draw_bars(axis: Any, curves: Sequence[Drawn], colours: Mapping[str, str]) -> None:
    width = 0.8 / len(curves)
    for i, c in enumerate(curves):
        together = len({tuple(other.x) for other in curves}) == 1
        at = [x + width * (i - (len(curves) - 1) / 2) if together else x for x in c.x]
        axis.bar(
            at, c.y, width if together else 0.8, color=GREY if c.grey else colours[c.label], label=c.label
        )
        if c.low:
            axis.vlines(at, c.low, c.high, color="#333333", linewidth=0.8)
    axis.set_xticks(sorted({x for c in curves for x in c.x}))
    axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False)


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """The heights in the same order, moved until neighbours are a gap apart, up to 1 and down from there.

    >>> [round(y, 2) for y in apart([0.5, 0.5, 0.0], 0.1)], [round(y, 2) for y in apart([1.0, 1.0, 0.2], 0.1)]
    ([0.5, 0.6, 0.0], [0.9, 1.0, 0.2])
    """
    order = sorted(range(len(heights)), key=lambda i: (heights[i], i))
    found, at = [0.0] * len(heights), -math.inf
    for i in order:
        at = found[i] = max(heights[i], at + gap)
    limit = 1.0
    for i in reversed(order):
        found[i] = min(found[i], limit)
        limit = found[i] - gap
    return found


def _name_ends(axis: Any, curves: Sequence[Drawn], colours: Mapping[str, str]) -> None:
    """Each curve's name beside its last point, moved apart where two would overlap."""
    axis.figure.canvas.draw()
    to_axes = axis.transData + axis.transAxes.inverted()
    named = [(c, float(to_axes.transform((c.x[-1], c.y[-1]))[1])) for c in curves if c.label]
    places = apart([min(max(y, 0.0), 1.0) for _, y in named], 0.052)
    for y, (c, _) in zip(places, named):
        axis.annotate(
            c.label, (1.01, y), xycoords="axes fraction", fontsize=7, va="center", color=GREY if c.grey else colours[c.label]
        )  # fmt: skip
