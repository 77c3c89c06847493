"""`fedbraid choose`: the algorithm for a situation, raced, tuned and confirmed."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fedbraid.user_files as files
from fedbraid.cli import config as cfg
from fedbraid.cli import options as o
from fedbraid.cli.board import Board
from fedbraid.cli.compare import Jobs, Stoppable
from fedbraid.cli.options import Option
from fedbraid.cli.show import Json, Quiet, entry, give, suggest, table
from fedbraid.errors import ConfigError
from fedbraid.run.formatting import format_seconds

if TYPE_CHECKING:
    from fedbraid.study.campaign import Event
    from fedbraid.study.choose import Choice

PICTURE = "picture.png"
MINUTES = 10.0


OPTIONS = (
    *(x for x in o.OPTIONS if x.section == "task"),
    *(
        replace(x, default="0") if x.name == "momentum" else x
        for x in o.OPTIONS
        if x.section == "work" and x.name not in ("lr", "lr_decay", "last")
    ),
    *(replace(x, section="limits") for x in o.some("per_round")),
    Option("limits", "rounds", int, "Limit: rounds, or as many participations", "100, or what the deadline has room for"),
    Option("limits", "uplink", str, "Limit: bytes per second from a client, e.g. 200kB/s", "not limited"),
    Option("limits", "downlink", str, "Limit: bytes per second to a client, e.g. 2MB/s", "10 × uplink"),
    Option("limits", "server_memory", str, "Limit: memory for the server's state, e.g. 4GB", "not limited"),
    Option(
        "limits", "no_client_state", bool, "Limit: clients store nothing between participations.",
        flags=("--no-client-state",),
    ),
    Option(
        "limits", "online", str, "Limit: when clients are available: 'phones' (bundled trace), or a JSON file", "always",
        metavar="phones|FILE.json",
    ),
    Option("limits", "deadline", str, "Limit: simulated time that training may take, e.g. 2h", "none"),
    Option("limits", "epsilon", float, "Limit: ε of differential privacy for each client", "none"),
    Option("limits", "accuracy", float, "Goal: target accuracy, e.g. 0.9", "none"),
    Option(
        "limits", "objective", str, "Goal: time, bytes or energy to the target accuracy; accuracy; or worst-tenth, of the"
        " clients", "time with a target, otherwise accuracy",
    ),
    Option("limits", "minutes", float, "Search: wall-clock minutes to spend", f"{MINUTES:g}"),
    Option(
        "limits", "device", str, "Device profile: phone-wifi, phone-lte or raspberry-pi-4", "phone-wifi", metavar="PROFILE"
    ),
    *(replace(x, section="limits") for x in o.some("durations")),
    Option("limits", "seed", int, "Search: random seed", "0"),
)  # fmt: skip


@o.with_options(OPTIONS)
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
        recorded = Folder(task).read_json(FILE)
        if "flags" not in recorded:
            raise ConfigError(f"{task} was made in Python; call fb.choose() again there, with out={task!r}")
        folder, flags, sections = Path(task), recorded["flags"], recorded["sections"]
    else:
        flags = sections.pop("limits")
        sections["task"] = {"name": files.absolute(task)} | sections["task"]
        folder = out or new_folder(files.word(cfg.task_call(sections["task"])[0]), "choose")
    settings = dict(flags)
    if "per_round" in settings:
        settings["per_round"] = cfg._count(settings["per_round"])
    if "durations" in settings:
        settings["durations"] = cfg._clock("durations", settings["durations"])
    start = cfg.start_of_work(cfg.task_call(sections["task"])[0]) | {"momentum": 0.0}
    board = None if json or quiet else ChoiceBoard(60 * settings.get("minutes", MINUTES))
    with Stoppable(folder, board, "choose"):
        found = choosing(
            cfg.task_of(sections["task"]), work=cfg.work_of(cfg.on_top(start, sections["work"])), out=folder, jobs=jobs,
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
