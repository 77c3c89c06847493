"""`fedbraid compare`: algorithms times seeds on one task, with intervals and a verdict."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fedbraid.user_files as files
from fedbraid.cli import config as cfg
from fedbraid.cli import options as o
from fedbraid.cli import shared
from fedbraid.cli.options import Metric
from fedbraid.cli.show import Json, Quiet, complain, entry, give, suggest, table
from fedbraid.errors import ConfigError
from fedbraid.run.formatting import format_seconds

if TYPE_CHECKING:
    from fedbraid.study.compare import Cell, Comparison, Contestant

Seeds = Annotated[str, typer.Option(help="Run: how many seeds, or which, such as 3,5,8.")]
Jobs = Annotated[int | None, typer.Option(help="Run: cells at a time (one for each core).")]
Folder = Annotated[
    Path | None, typer.Option("--out", "-o", help="Run: folder (runs/TASK-compare-n, a new one).")
]
Local = Annotated[
    bool,
    typer.Option("--local-only", help="Also train every client alone, and show what each gains over that."),
]
Goal = Annotated[
    float | None, typer.Option(help="Also show what it took to reach this test accuracy, e.g. 0.95.")
]


@shared.with_sections
def compare(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK|FILE.toml|FOLDER", help="A task, a file as for run, or a comparison to go on with."
        ),
    ],
    contestants: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME:]ALGORITHM [KEY=VALUE…]", help="What to compare, each in quotes if it has spaces."
        ),
    ] = None,
    seeds: Seeds = "5",
    target: Goal = None,
    metric: Metric = None,
    jobs: Jobs = None,
    out: Folder = None,
    paper_settings: o.OwnWork = False,
    local: Local = False,
    sections: cfg.Config = {},  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare algorithms on one task over several seeds, on all cores.

    Each cell, an algorithm with a seed, is a run folder. Stop it when you like: the same command with the same
    --out, or `fedbraid compare FOLDER`, skips cells that are done and goes on with the others. The table gives
    means and 95 % intervals of the last tenth of the evaluations; the verdict names a best only where
    intervals do not overlap.

    \b
    Examples:
      fedbraid compare digits fedavg scaffold "fedadavr(optimizer='adam', lr=0.01)" --partition 'label_chunks(1)'
      fedbraid compare digits 'fedavg lr=0.1' 'fedavg lr=0.01' --rounds 50 --seeds 3 --target 0.9
      fedbraid compare experiment.toml 'small steps: lr=0.01' 'large steps: lr=0.1'
      fedbraid compare digits 'sync: fedavg' 'async: fedbuff buffer=10 concurrency=50' --seeds 0,1,2
      fedbraid compare runs/digits-compare-1
    """
    from fedbraid.study import compare as comparing

    begun = time.monotonic()
    watcher = None if json or quiet else Board()
    if (Path(task) / comparing.FILE).exists():
        if contestants:
            raise ConfigError(f"{task} says itself what is compared; leave out {' '.join(contestants)}")
        place = Path(task)
        with Stoppable(place, watcher):
            result = comparing.resume(place, jobs=jobs, watcher=watcher)
    else:
        if (Path(task) / "run.json").exists():
            raise ConfigError(f"{task} is a run, not a comparison; continue it with: fedbraid resume {task}")
        config = shared.base(task, sections)
        run = config["run"]
        who = [contestant(config, text, paper_settings) for text in contestants or []]
        loaded = cfg.task_of(config["task"])
        options = {
            k: v
            for k, v in run.items()
            if k in ("evaluate_every", "evaluate_on", "client_state_storage", "log_layer_norms")
        }
        place = out or new_folder(loaded.name, "compare")
        with Stoppable(place, watcher):
            result = comparing.compare(
                loaded, who, seeds=numbers(seeds), out=place, target=target or run.get("target"), jobs=jobs,
                watcher=watcher, options=options, metric=metric, local=local,
            )  # fmt: skip
        if not json and not quiet:
            for work, names in _works(who).items():
                entry("", f"{work}: {', '.join(names)}")
    show(result, time.monotonic() - begun, json, quiet)


def _works(who: Sequence[Contestant]) -> dict[str, list[str]]:
    """Who does what work."""
    works: dict[str, list[str]] = {}
    for one in who:
        works.setdefault(repr(one.work), []).append(one.name)
    return {work: names if len(works) > 1 else ["all"] for work, names in works.items()}


def show(result: Comparison, seconds: float, json: bool, quiet: bool) -> None:
    if json:
        return give(result.as_json() | {"seconds": round(seconds, 3)})
    if quiet:
        return
    from fedbraid.study.recipe import task_name

    head, rows = result.cells()
    said = ["", result.metric, "ε", "up", "down", "rank", "seeds", "time", "FLOPs"]
    said = [h for h in said if h in head]
    goal = [h for h in head if h not in said]  # what it took to reach the target
    order = [*said[:3], *goal[:2], *said[3:6], *reversed(goal[2:]), *said[6:]]
    table(
        f"{task_name(result.task)} ({format_seconds(seconds)})",
        head,
        rows,
        order=[head.index(h) for h in order],
    )
    if result.gains:
        table("what clients gain", *result.gained())
    entry("", result.verdict)
    suggest("next", f"fedbraid report {result.out}")


def contestant(config: cfg.Config, text: str, paper_settings: bool = False) -> Contestant:
    """`[name:] [algorithm] key=value …` on top of what all share."""
    from fedbraid.study.compare import Contestant

    name, colon, rest = text.partition(":")
    if not colon or files.names_file(text.split()[0]) or not re.fullmatch(r"[\w .+-]+", name.strip()):
        name, rest = "", text
    words = shared.words(rest)
    config = cfg.merge(config, {})
    if words and not re.match(r"[\w.]+=", words[0]):
        config["algorithm"] = {"name": files.absolute(words.pop(0))}
    for key, value in shared.settings(words):
        config = shared.override(config, key, value)
    if "name" not in config["algorithm"]:
        raise ConfigError(f"{text!r} names no algorithm, and no file does; write it as 'fedavg lr=0.1'")
    algorithm = cfg.algorithm_of(config["algorithm"])
    return Contestant(
        name.strip() or " ".join(rest.split()),
        algorithm,
        cfg.work_of(shared.work_of(config, algorithm, paper_settings)),
        cfg.schedule_of(config["schedule"]),
    )


def numbers(text: str) -> int | list[int]:
    """`5` is how many, `3,5,8` or `7,` which."""
    try:
        return [int(part) for part in text.split(",") if part.strip()] if "," in text else int(text)
    except ValueError as error:
        raise ConfigError(f"seeds={text!r} is no number of seeds; use 5, or a list such as 3,5,8") from error


def new_folder(task: str, what: str) -> Path:
    """A folder of our own that is not there yet."""
    number = 1
    while (place := Path("runs") / f"{task}-{what}-{number}").exists():
        number += 1
    return place


class Stoppable:
    """Ends the display, and after Ctrl-C says how to go on."""

    def __init__(self, place: Path, watcher: Any, command: str = "compare") -> None:
        self.place, self.watcher, self.command = place, watcher, command

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self.watcher is not None:
            self.watcher.close()
        if kind is KeyboardInterrupt:
            complain(f"stopped; what is done is kept. Continue with: fedbraid {self.command} {self.place}")
            raise typer.Exit(130) from None


class Board:
    """A live table: a line a contestant, with time left; silent when not a terminal."""

    EVERY = 0.2  # seconds between two drawings

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        screen = Console(stderr=True)
        self.live = Live(console=screen, auto_refresh=False, transient=True) if screen.is_terminal else None
        self.begun, self.drawn = time.monotonic(), 0.0
        self.steps: dict[tuple[str, int], int] = {}
        self.values: dict[tuple[str, int], float | None] = {}

    def begin(self, cells: Sequence[Cell]) -> None:
        self.cells = list(cells)
        self.ready = {self._key(c) for c in cells if c.done or c.failure is not None}
        self.already = sum(c.contestant.schedule.steps for c in cells if self._key(c) in self.ready)
        if self.live is not None:
            self.live.start()

    def step(self, cell: Cell, step: int, value: float | None) -> None:
        self.steps[self._key(cell)], self.values[self._key(cell)] = step, value

    def done(self, cell: Cell) -> None:
        self.ready.add(self._key(cell))
        self.steps[self._key(cell)] = cell.contestant.schedule.steps

    def tick(self) -> None:
        if self.live is not None and time.monotonic() - self.drawn >= self.EVERY:
            self.drawn = time.monotonic()
            self.live.update(self.table(), refresh=True)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()

    def table(self) -> Any:
        from rich import box
        from rich.table import Table

        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=self._left(), title_justify="left")
        grid.add_column("", no_wrap=True, overflow="ellipsis", min_width=8)
        for name in ("seeds done", "running at", "now"):
            grid.add_column(name, justify="right", no_wrap=True, overflow="ellipsis")
        for name in dict.fromkeys(c.contestant.name for c in self.cells):
            mine = [self._key(c) for c in self.cells if c.contestant.name == name]
            going = [k for k in mine if k in self.steps and k not in self.ready]
            seen = [f"{v:.3f}" for k in going if (v := self.values.get(k)) is not None]
            grid.add_row(
                name,
                f"{sum(k in self.ready for k in mine)}/{len(mine)}",
                ", ".join(f"step {self.steps[k]}" for k in going),
                ", ".join(seen),
            )
        return grid

    def _left(self) -> str:
        total = sum(c.contestant.schedule.steps for c in self.cells) - self.already
        done, took = sum(self.steps.values()), time.monotonic() - self.begun
        if not done:
            return f"{len(self.ready)} of {len(self.cells)} cells"
        left = format_seconds(took * max(0, total - done) / done)
        return f"{len(self.ready)} of {len(self.cells)} cells, {left} left"

    @staticmethod
    def _key(cell: Cell) -> tuple[str, int]:
        return cell.contestant.name, cell.seed
