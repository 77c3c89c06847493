"""The table of options that name a setting of a run: each is a flag, and a key of a file's section by the same name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Option:
    """One option; its help starts with the group that `--help` shows it in."""

    section: str  # of a file; "call" where no file holds it
    name: str
    kind: Any
    help: str
    default: str = ""  # as text: unset, it is None
    flags: tuple[str, ...] = ()
    metavar: str | None = None

    @property
    def parameter(self) -> inspect.Parameter:
        """What typer reads."""
        text = f"{self.help} [default: {self.default}]" if self.default else self.help
        option = typer.Option(*self.flags, metavar=self.metavar, help=text)
        kind: Any = Annotated[self.kind | None, option]
        return inspect.Parameter(
            self.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind
        )


OPTIONS = (
    Option("task", "clients", int, "Task: number of clients", flags=("--clients", "-n")),
    Option(
        "task", "partition", str, "Task: how data is split across clients, e.g. 'iid', 'dirichlet(0.5)', 'label_chunks(1)';"
        " see `fedbraid list partitions`.",
    ),
    Option("task", "model", str, "Task: model by name; see `fedbraid list models`"),
    Option(
        "task", "personal", str, "Task: parameters that stay with each client, a glob such as 'head.*'", "none"
    ),
    Option(
        "algorithm", "set", list[str], "Algorithm: set a keyword, e.g. -a optimizer=lamb -a lr=0.01.",
        flags=("-a", "--set"), metavar="KEY=VALUE",
    ),
    Option(
        "work", "optimizer", str, "Local training: optimizer: sgd, adam, adamw, rmsprop, adagrad or lion", "sgd"
    ),
    Option(
        "work", "lr", str, "Local training: learning rate of clients, or by round e.g. 'cosine(0.1, 100, warmup=5)',"
        " 'warmup(0.1, 5)', '[0.1, 0.05, 0.01]'",
        "0.01; digits 0.05; 0.001 with an optimizer other than sgd",
    ),
    Option("work", "epochs", int, "Local training: passes over the local data", "1"),
    Option("work", "steps", int, "Local training: number of local steps, in place of epochs"),
    Option(
        "work", "batch", str, "Local training: batch size, or 'full' for the full local set", "20; digits 5"
    ),
    Option("work", "momentum", float, "Local training: momentum of sgd", "0.9, or the paper's"),
    Option("work", "weight_decay", float, "Local training: weight decay", "0"),
    Option("work", "clip", float, "Local training: clip gradients to this norm", "off"),
    Option("work", "lr_decay", float, "Local training: factor on the learning rate per round", "1"),
    Option(
        "work", "last", str, "Local training: what to do with a short last batch: keep, drop or fill", "keep"
    ),
    Option(
        "schedule", "rounds", int, "Schedule: number of rounds, or of server steps when asynchronous", "100"
    ),
    Option(
        "schedule", "per_round", float, "Schedule: clients per round, a number or a fraction such as 0.1", "10"
    ),
    Option(
        "schedule", "over_select", float, "Schedule: over-select clients by this factor; the first to finish count", "1"
    ),
    Option("schedule", "timeout", float, "Schedule: drop clients that take longer than this (simulated time)"),
    Option("schedule", "buffer", int, "Schedule: asynchronous, uploads per server step"),
    Option(
        "schedule", "concurrency", int, "Schedule: asynchronous, clients that train at the same time", "100"
    ),
    Option(
        "schedule", "arrivals", str, "Schedule: asynchronous, arrivals of clients: constant, poisson or closed",
        "constant",
    ),
    Option(
        "schedule", "durations", str,
        "Schedule: distribution of local training time, e.g. 'halfnormal(1)', 'lognormal(0, 1)'",
    ),
    Option(
        "schedule", "bandwidth", str, "Schedule: bytes per unit of time, e.g. 'bandwidth(up=1e6, down=1e7)'"
    ),
    Option(
        "schedule", "select", str,
        "Schedule: client selection by last loss: power_of_choice(20), oort() or FILE.py:NAME",
    ),
    Option(
        "schedule", "sampling", str,
        "Schedule: cohorts of a 'fixed' size, or 'poisson': each client by its own draw, which privacy favors", "fixed",
    ),
    Option(
        "schedule", "availability", str,
        "Schedule: when clients are available: 'phones' (bundled trace), or a JSON file of {client: [[start, end], ...]}",
    ),
    Option("schedule", "replay_timing", str, "Schedule: replay the timing of an earlier run (its folder)"),
    Option("run", "seed", int, "Run: random seed", "0"),
    Option(
        "run", "engine", str, "Run: engine: auto, in_process, pool or e.g. 'pool(workers=2)',"
        " \"ray(address='10.0.0.1:6379')\"", "auto",
    ),
    Option("run", "device", str, "Run: torch device", "cpu"),
    Option(
        "run", "client_state_storage", str, "Run: where to store client state: memory, disk or auto", "auto",
        flags=("--client-state",),
    ),
    Option("run", "out", str, "Run: folder", "a new runs/TASK-ALGORITHM-n", flags=("--out", "-o")),
    Option("run", "evaluate_every", int, "Run: evaluate the model every this many rounds", "1"),
    Option("run", "target", float, "Run: stop at this test accuracy, e.g. 0.95"),
    Option(
        "run", "max_bytes_up", str, "Run: stop when clients have uploaded so many bytes in all, e.g. 50MB."
    ),
    Option(
        "run", "ignore_divergence", bool, "Run: do not stop when the model diverges",
        flags=("--ignore-divergence",),
    ),
    Option("call", "track", str, "Run: also log to tensorboard, mlflow or wandb (offline), or several: a,b"),
    Option(
        "call", "patience", int, "Run: stop when --metric has not improved for this many evaluations"
    ),
    Option("call", "metric", str, "Run: metric for early stopping and the best model", "accuracy"),
    Option(
        "call", "keep_best", bool, "Run: also store the model that is best by --metric, as best.safetensors",
        flags=("--keep-best",),
    ),
    Option(
        "call", "allow_numeric_changes", bool,
        "Run: resume even if torch, CPU or compiler changed (results may differ in the last bits)",
        flags=("--allow-numeric-changes",),
    ),
    Option(
        "call", "paper_settings", bool,
        "Local training: start from each paper's settings instead of one common default", flags=("--paper-settings",),
    ),
)  # fmt: skip


def keys(section: str) -> tuple[str, ...]:
    """The names of a section's options."""
    return tuple(option.name for option in OPTIONS if option.section == section)


def some(*names: str) -> tuple[Option, ...]:
    """The options of these names, in the order of the table."""
    return tuple(option for option in OPTIONS if option.name in names)


RUN = tuple(option for option in OPTIONS if option.name != "paper_settings")
SHARED = some(  # of compare and sweep
    *keys("task"), *keys("work"), *keys("schedule"), "evaluate_every", "metric", "paper_settings"
)


def with_options(options: Sequence[Option]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose `sections` are filled from these options: those that were given, by section."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(command, eval_str=True).parameters

        @functools.wraps(command)
        def filled(**values: Any) -> None:
            sections: Sections = {option.section: {} for option in options}
            for option in options:
                if (value := values.pop(option.name)) is not None:
                    sections[option.section][option.name] = value
            command(**values, sections=sections)

        listed = [p for p in parameters.values() if p.name != "sections"]
        at = next((i for i, p in enumerate(listed) if p.name == "json"), len(listed))
        added = [option.parameter for option in options]
        signature = inspect.Signature([*listed[:at], *added, *listed[at:]])
        filled.__signature__ = signature  # type: ignore[attr-defined]
        filled.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return filled

    return decorate
