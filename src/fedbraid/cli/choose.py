"""`fedbraid choose`: the algorithm for a situation, raced, tuned and confirmed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fedbraid.user_files as files
from fedbraid.cli import config as cfg
from fedbraid.cli import options as o
from fedbraid.cli.board import Board
from fedbraid.cli.compare import Jobs, Stoppable
from fedbraid.cli.show import Json, Quiet, entry, give, suggest, table
from fedbraid.errors import ConfigError
from fedbraid.run.formatting import format_seconds

if TYPE_CHECKING:
    from fedbraid.study.campaign import Event
    from fedbraid.study.choose import Choice

FLAGS = (
    "per_round", "rounds", "uplink", "downlink", "server_memory", "no_client_state", "online", "deadline", "epsilon",
    "accuracy", "objective", "minutes", "device", "durations", "seed",
)  # fmt: skip
PICTURE = "picture.png"


def choose(
    task: Annotated[
        str,
        typer.Argument(metavar="TASK|FOLDER", help="A task, or the folder of a choice to continue."),
    ],
    clients: o.Clients = None,
    partition: o.Partition = None,
    model: o.Model = None,
    personal: o.Personal = None,
    per_round: o.PerRound = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Limit: rounds, or as many participations [default: 100, or what the deadline has room for]"
        ),
    ] = None,
    uplink: Annotated[
        str | None,
        typer.Option(help="Limit: bytes per second from a client, e.g. 200kB/s [default: not limited]"),
    ] = None,
    downlink: Annotated[
        str | None,
        typer.Option(help="Limit: bytes per second to a client, e.g. 2MB/s [default: 10 × uplink]"),
    ] = None,
    server_memory: Annotated[
        str | None, typer.Option(help="Limit: memory for the server's state, e.g. 4GB [default: not limited]")
    ] = None,
    no_client_state: Annotated[
        bool, typer.Option("--no-client-state", help="Limit: clients store nothing between participations.")
    ] = False,
    online: Annotated[
        str | None,
        typer.Option(
            metavar="phones|FILE.json",
            help="Limit: when clients are available: 'phones' (bundled trace), or a JSON file [default: always]",
        ),
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(help="Limit: simulated time that training may take, e.g. 2h [default: none]")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Limit: ε of differential privacy for each client [default: none]")
    ] = None,
    accuracy: Annotated[
        float | None, typer.Option(help="Goal: target accuracy, e.g. 0.9 [default: none]")
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="Goal: time, bytes or energy to the target accuracy; accuracy; or worst-tenth, of the clients"
            " [default: time with a target, otherwise accuracy]"
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Search: wall-clock minutes to spend.")] = 10.0,
    device: Annotated[
        str, typer.Option(metavar="PROFILE", help="Device profile: phone-wifi, phone-lte or raspberry-pi-4.")
    ] = "phone-wifi",
    durations: o.Durations = None,
    epochs: o.Epochs = None,
    steps: o.Steps = None,
    batch: o.Batch = None,
    optimizer: o.Optimizer = None,
    momentum: o.Momentum = None,
    weight_decay: o.WeightDecay = None,
    clip: o.Clip = None,
    seed: Annotated[int, typer.Option(help="Search: random seed.")] = 0,
    jobs: Jobs = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run: folder [default: a new one, runs/TASK-choose-N]")
    ] = None,
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

    given = locals()
    begun = time.monotonic()
    if (Path(task) / FILE).exists():
        known = Folder(task).read_json(FILE)
        if "flags" not in known:
            raise ConfigError(f"{task} was made in Python; call fb.choose() again there, with out={task!r}")
        place, sections, flags = Path(task), known["sections"], known["flags"]
    else:
        sections = {
            "task": {"name": files.absolute(task)} | cfg.given(clients=clients, partition=partition, model=model, personal=personal),
            "work": cfg.given(
                epochs=epochs, steps=steps, batch=batch, optimizer=optimizer, momentum=momentum, weight_decay=weight_decay, clip=clip
            ),
        }  # fmt: skip
        flags = {name: given[name] for name in FLAGS if given[name] is not None}
        place = out or new_folder(files.word(cfg.task_call(sections["task"])[0]), "choose")
    settings = dict(flags)
    if "per_round" in settings:
        settings["per_round"] = cfg._count(settings["per_round"])
    if "durations" in settings:
        settings["durations"] = cfg._clock("durations", settings["durations"])
    start = cfg.start_of_work(cfg.task_call(sections["task"])[0]) | {"momentum": 0.0}
    board = None if json or quiet else ChoiceBoard(60 * settings["minutes"])
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
