"""`fedbraid choose`: the algorithm for a situation, raced, tuned and confirmed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fedbraid.user_files as files
from fedbraid.cli import config as cfg
from fedbraid.cli import options as o
from fedbraid.cli import shared
from fedbraid.cli.board import Board
from fedbraid.cli.compare import Jobs, Stoppable
from fedbraid.cli.show import Json, Quiet, entry, give, suggest, table
from fedbraid.errors import ConfigError
from fedbraid.run.formatting import format_seconds

if TYPE_CHECKING:
    from fedbraid.study.campaign import Event
    from fedbraid.study.choose import Choice

PICTURE = "picture.png"
MINUTES = 10.0


def _limit(kind: Any, said: str, flag: str | None = None, metavar: str | None = None) -> Any:
    return Annotated[kind | None, typer.Option(*([flag] if flag else []), metavar=metavar, help=said)]


LIMITS = {
    "per_round": o.PerRound,
    "rounds": _limit(int, "Limit: rounds, or as many participations [default: 100, or what the deadline has room for]"),
    "uplink": _limit(str, "Limit: bytes per second from a client, e.g. 200kB/s [default: not limited]"),
    "downlink": _limit(str, "Limit: bytes per second to a client, e.g. 2MB/s [default: 10 × uplink]"),
    "server_memory": _limit(str, "Limit: memory for the server's state, e.g. 4GB [default: not limited]"),
    "no_client_state": _limit(bool, "Limit: clients store nothing between participations.", "--no-client-state"),
    "online": _limit(
        str, "Limit: when clients are available: 'phones' (bundled trace), or a JSON file [default: always]",
        metavar="phones|FILE.json",
    ),
    "deadline": _limit(str, "Limit: simulated time that training may take, e.g. 2h [default: none]"),
    "epsilon": _limit(float, "Limit: ε of differential privacy for each client [default: none]"),
    "accuracy": _limit(float, "Goal: target accuracy, e.g. 0.9 [default: none]"),
    "objective": _limit(
        str, "Goal: time, bytes or energy to the target accuracy; accuracy; or worst-tenth, of the clients [default: time"
        " with a target, otherwise accuracy]",
    ),
    "minutes": _limit(float, f"Search: wall-clock minutes to spend [default: {MINUTES:g}]"),
    "device": _limit(
        str, "Device profile: phone-wifi, phone-lte or raspberry-pi-4 [default: phone-wifi]", metavar="PROFILE"
    ),
    "durations": o.Durations,
    "seed": _limit(int, "Search: random seed [default: 0]"),
}  # fmt: skip
OPTIONS = {
    "task": shared.OPTIONS["task"],
    "work": {k: v for k, v in shared.OPTIONS["work"].items() if k not in ("lr", "lr_decay", "last")}
    | {"momentum": _limit(float, "Local training: momentum of sgd [default: 0]")},
    "limits": LIMITS,
}


@shared.with_options(OPTIONS)
def choose(
    task: Annotated[
        str,
        typer.Argument(metavar="TASK|FOLDER", help="A task, or the folder of a choice to continue."),
    ],
    jobs: Jobs = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run: folder [default: a new one, runs/TASK-choose-N]")
    ] = None,
    sections: cfg.Config = {},  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find the algorithm, tuned, that does best within your limits.

    Candidates that break a limit are excluded before anything runs. The others race on held-out clients; the best and
    FedAvg are confirmed with fresh seeds on the test set. The ranking marks what is statistically tied with the best.
    Rerun the same command with the same --out, or `fedbraid choose FOLDER`, to continue; `fedbraid watch FOLDER` shows
    a live page.

    \b
    Examples:
      fedbraid choose digits --partition 'label_chunks(1)' --clients 100 --per-round 5 --minutes 2
      fedbraid choose digits --accuracy 0.9 --objective bytes --uplink 200kB/s --minutes 5
      fedbraid choose mnist --clients 2000 --per-round 20 --online phones --deadline 2h --server-memory 100MB
      fedbraid choose my.py:task --no-client-state --accuracy 0.8 --objective energy --device phone-lte
      fedbraid choose runs/digits-choose-1
    """
    from fedbraid.run.checkpoint import Folder
    from fedbraid.study.campaign import ignore, new_folder
    from fedbraid.study.choose import choose as choosing
    from fedbraid.study.race import FILE

    begun = time.monotonic()
    if (Path(task) / FILE).exists():
        known = Folder(task).read_json(FILE)
        if "flags" not in known:
            raise ConfigError(f"{task} was made in Python; call fb.choose() again there, with out={task!r}")
        place, flags, sections = Path(task), known["flags"], known["sections"]
    else:
        flags = sections.pop("limits")
        sections["task"] = {"name": files.absolute(task)} | sections["task"]
        place = out or new_folder(files.word(cfg.task_call(sections["task"])[0]), "choose")
    settings = dict(flags)
    if "per_round" in settings:
        settings["per_round"] = cfg._count(settings["per_round"])
    if "durations" in settings:
        settings["durations"] = cfg._clock("durations", settings["durations"])
    start = cfg.start_of_work(cfg.task_call(sections["task"])[0]) | {"momentum": 0.0}
    board = None if json or quiet else ChoiceBoard(60 * settings.get("minutes", MINUTES))
    with Stoppable(place, board, "choose"):
        found = choosing(
            cfg.task_of(sections["task"]), work=cfg.work_of(cfg.on_top(start, sections["work"])), out=place, jobs=jobs,
            on_event=board or ignore, note={"sections": sections, "flags": flags}, **settings,
        )  # fmt: skip
    picture = draw(found)
    if json:
        return give(
            found.as_json()
            | {"picture": picture, "out": str(found.out), "seconds": round(time.monotonic() - begun, 3)}
        )
    if not quiet:
        show(found, picture, time.monotonic() - begun)


def draw(found: Choice) -> str | None:
    """A picture of the finalists, where matplotlib is installed and the task can be built again."""
    from fedbraid.errors import FedbraidError
    from fedbraid.report.figure import png

    path = found.out / PICTURE
    if not path.exists():
        try:
            path.write_bytes(png(found.plot()))
        except FedbraidError:
            return None
    return str(path)


def show(found: Choice, picture: str | None, seconds: float) -> None:
    head, rows = found.cells()
    table(
        f"{found.facts['task']} ({format_seconds(seconds)})",
        head,
        rows,
        order=[0, 2, 1, *range(3, len(head))],
    )
    for sentence in found.facts["verdict"]:
        entry("", sentence)
    for title, texts in found.sections().items():
        entry("", f"{title}:")
        for text in texts:
            entry("  ", text)
    if picture is not None:
        entry("picture: ", picture)
    suggest("report", f"fedbraid report {found.out}")
    suggest("winner", found.facts["command"])


class ChoiceBoard(Board):
    """The phase, how much of it is done, and how much of the time is left."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.phase = seconds, "preparing"
        super().__init__("runs")

    def see(self, event: Event[Any]) -> None:
        if event.kind == "begin":
            self.phase, self.total = event.result or "final, on fresh seeds", len(event.cells)
            self.ended = sum(getattr(c, "is_done", False) for c in event.cells)

    def title(self) -> str:
        left = self.seconds - (time.monotonic() - self.begun)
        return f"{self.phase}: {self.ended:g} of {self.total:g} runs done, at most {format_seconds(max(0.0, left))} left"
