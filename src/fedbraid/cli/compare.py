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
from fedbraid.cli.board import Board, CellBoard
from fedbraid.cli.show import Json, Quiet, complain, entry, give, quoted, suggest, table
from fedbraid.errors import ConfigError
from fedbraid.run.formatting import format_seconds

if TYPE_CHECKING:
    from fedbraid.study.campaign import Entry
    from fedbraid.study.compare import Comparison

Seeds = Annotated[str, typer.Option(help="Run: number of seeds, or a list such as 3,5,8")]
Jobs = Annotated[int | None, typer.Option(help="Run: number of parallel runs [default: one per core]")]
Folder = Annotated[
    Path | None, typer.Option("--out", "-o", help="Run: folder [default: a new runs/TASK-compare-n]")
]
Local = Annotated[
    bool,
    typer.Option("--local-only", help="Also run local-only training and report each client's gain over it"),
]
Energy = Annotated[
    str | None,
    typer.Option(
        metavar="PROFILE",
        help="Also show the energy that clients spend, by a device profile: phone-wifi, phone-lte or raspberry-pi-4.",
    ),
]
Goal = Annotated[
    float | None, typer.Option(help="Also report steps, bytes and time to this test accuracy, e.g. 0.95")
]


@o.with_options(o.SHARED)
def compare(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK|FILE.toml|FOLDER", help="A task, a file as for run, or a comparison to resume."
        ),
    ],
    entries: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME:]ALGORITHM [KEY=VALUE…]", help="What to compare; quote any that contain spaces."
        ),
    ] = None,
    seeds: Seeds = "5",
    target: Goal = None,
    jobs: Jobs = None,
    out: Folder = None,
    local: Local = False,
    energy: Energy = None,
    sections: cfg.Config = {},  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare algorithms on one task over several seeds, on all cores.

    Each algorithm × seed is one run folder. Rerun the same command with the same --out, or `fedbraid compare FOLDER`,
    to resume; finished runs are skipped. The table gives means and 95 % intervals of the last tenth of the
    evaluations; a winner is named only if the 95 % intervals do not overlap.

    \b
    Examples:
      fedbraid compare digits fedavg scaffold "fedadavr(optimizer='adam', lr=0.01)" --partition 'label_chunks(1)'
      fedbraid compare digits 'fedavg lr=0.1' 'fedavg lr=0.01' --rounds 50 --seeds 3 --target 0.9
      fedbraid compare experiment.toml 'small steps: lr=0.01' 'large steps: lr=0.1'
      fedbraid compare digits 'sync: fedavg' 'async: fedbuff buffer=10 concurrency=50' --seeds 0,1,2
      fedbraid compare runs/digits-compare-1
    """
    from fedbraid.study import compare as comparing
    from fedbraid.study.campaign import ignore, new_folder

    begun = time.monotonic()
    call = sections.pop("call")
    metric = call.get("metric")
    board = None if json or quiet else CellBoard(metric or "accuracy")
    on_event = board or ignore
    if (Path(task) / comparing.FILE).exists():
        if entries:
            raise ConfigError(f"{task} says itself what is compared; leave out {' '.join(entries)}")
        folder = Path(task)
        with Stoppable(folder, board):
            result = comparing.resume(folder, jobs=jobs, on_event=on_event)
    else:
        if (Path(task) / "run.json").exists():
            raise ConfigError(
                f"{task} is a run, not a comparison; resume it with: fedbraid resume {quoted(task)}"
            )
        config = shared.base(task, sections)
        run = config["run"]
        who = [entry_of(config, text, "paper_settings" in call) for text in entries or []]
        loaded = cfg.task_of(config["task"])
        options = {
            k: v
            for k, v in run.items()
            if k in ("evaluate_every", "evaluate_on", "client_state_storage", "log_layer_norms")
        }
        folder = out or new_folder(loaded.name, "compare")
        with Stoppable(folder, board):
            result = comparing.compare(
                loaded, who, seeds=numbers(seeds), out=folder, target=target or run.get("target"), jobs=jobs,
                on_event=on_event, options=options, metric=metric, local=local, energy=energy,
            )  # fmt: skip
        if not json and not quiet:
            for work, names in _works(who).items():
                entry("", f"{work}: {', '.join(names)}")
    show(result, time.monotonic() - begun, json, quiet)


def _works(who: Sequence[Entry]) -> dict[str, list[str]]:
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
    columns = ["", result.metric, "ε", "up", "down", "energy", "rank", "seeds", "time", "FLOPs"]
    columns = [h for h in columns if h in head]
    goal = [h for h in head if h not in columns]  # what it took to reach the target
    order = [*columns[:3], *goal[:2], *columns[3:6], *reversed(goal[2:]), *columns[6:]]
    table(
        f"{task_name(result.task)} ({format_seconds(seconds)})",
        head,
        rows,
        order=[head.index(h) for h in order],
    )
    if result.gains:
        table("what clients gain", *result.gained())
    entry("", result.verdict)
    suggest("next", f"fedbraid report {quoted(result.out)}")


def entry_of(config: cfg.Config, text: str, paper_settings: bool = False) -> Entry:
    """`[name:] [algorithm] key=value …` on top of what all share."""
    from fedbraid.study.campaign import Entry

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
    return Entry(
        name.strip() or " ".join(rest.split()),
        algorithm,
        cfg.work_of(shared.work_of(config, algorithm, paper_settings)),
        cfg.schedule_of(config["schedule"]),
    )


def numbers(text: str) -> int | list[int]:
    """`5` is how many, `3,5,8` or `7,` which."""
    try:
        return (
            [int(number_text) for number_text in text.split(",") if number_text.strip()]
            if "," in text
            else int(text)
        )
    except ValueError as error:
        raise ConfigError(
            f"seeds={text!r} must be a number of seeds such as 5, or a list such as 3,5,8"
        ) from error


class Stoppable:
    """Ends the display, and after Ctrl-C says how to go on."""

    def __init__(self, folder: Path, board: Board | None, command: str = "compare") -> None:
        self.folder, self.board, self.command = folder, board, command

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self.board is not None:
            self.board.close()
        if kind is KeyboardInterrupt:
            complain(
                f"interrupted; finished runs are stored. Resume with: fedbraid {self.command} {quoted(self.folder)}"
            )
            raise typer.Exit(130) from None
