"""`fedbraid run`: one run, from words or from a file."""

from __future__ import annotations

import json as jsonlib
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fedbraid.user_files as files
from fedbraid.cli import config as cfg
from fedbraid.cli import options as o
from fedbraid.cli.show import Json, Quiet, complain, facts, give, quoted, waiting
from fedbraid.errors import ConfigError, RunError, unknown
from fedbraid.run.formatting import (
    best,
    bits_up,
    format_bytes,
    format_percent,
    format_seconds,
    hint,
    rounds_to,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fedbraid.data.task import Task
    from fedbraid.run.checkpoint import Record
    from fedbraid.run.result import Result
    from fedbraid.run.run import Run


@o.with_options(o.RUN)
def run(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK|FILE.toml", help="A task such as mnist or 'mnist(clients=500)', or a file."
        ),
    ],
    algorithm: Annotated[
        str | None,
        typer.Argument(
            metavar="ALGORITHM", help="Such as fedavg or \"fedadavr(optimizer='lamb', lr=0.01)\"."
        ),
    ] = None,
    sections: cfg.Config = {},  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a task with an algorithm. Every server step is checkpointed, so an interrupted run can be resumed.

    \b
    Examples:
      fedbraid run digits fedavg --rounds 50 --per-round 5
      fedbraid run mnist fedadavr --clients 500 --partition 'label_chunks(1)' -a optimizer=lamb -a memory=int4
      fedbraid run 'mnist(clients=500)' "fedshift(fedpaq(mixed(kmeans(4), share=0.5)))" --epochs 3
      fedbraid run digits fedbuff --rounds 200 --buffer 10 --concurrency 50 --durations 'lognormal(0, 1)'
      fedbraid run experiment.toml --seed 7
      fedbraid run my.py:task my.py:algorithm

    \b
    A file has the same keys, with _ for -, in sections:
      [task]
      name = "mnist"
      clients = 500
      partition = "dirichlet(0.5)"
      [algorithm]
      name = "fedadavr"
      optimizer = "lamb"
      lr = 0.01
      [work]
      lr = 0.01
      epochs = 1
      batch = 20
      [schedule]
      rounds = 100
      per_round = 5
      [run]
      seed = 42
      target = 0.95

    my.py:task loads a task, or calls a function that returns one, from your own file. All commands accept this form.

    Options override the file. The run is stored in a new folder: run.json, metrics.jsonl, state.db and
    model.safetensors. The same command with the same --out resumes it, as `fedbraid resume` does.
    """
    call = sections.pop("call")
    sections["algorithm"] = cfg.keywords(sections["algorithm"].get("set", []))
    config = _config(task, algorithm, sections)
    with waiting(f"loading {config['task']['name']}", json or quiet):
        prepared = cfg.prepare(config)
    if (
        not json
        and not quiet
        and (note := cfg.paper_settings(prepared.algorithm, config["work"])) is not None
    ):
        print(note)
    watch = WatchSettings(
        call.get("track"), call.get("patience"), call.get("keep_best", False), prepared.target,
        _metric(prepared.task, call.get("metric")), prepared.max_bytes_up,
    )  # fmt: skip
    watching = watch.callbacks()
    with _folder(config) as folder:
        prepared.options["allow_numeric_changes"] = call.get("allow_numeric_changes", False)
        keep(
            folder, json, quiet, watch, lambda callbacks: _simulate(prepared, folder, [*callbacks, *watching])
        )


def _metric(task: Task, name: str | None) -> str:
    """The metric for early stopping and the best model: the accuracy, the loss, or one of the task, also by client."""
    metrics = [*task.measures, "train_loss"]
    name = name or metrics[0]
    if name.removesuffix("_clients").removesuffix("_worst_tenth").removesuffix("_personal") not in metrics:
        raise unknown("metric", name, metrics)
    return name


def _config(task: str, algorithm: str | None, sections: cfg.Config) -> cfg.Config:
    """The file's sections with the options on top, or the options alone."""
    if task.endswith(".toml"):
        if algorithm is not None:
            sections["algorithm"] = {"name": algorithm} | sections["algorithm"]
        return cfg.merge(cfg.read(task), sections)
    if algorithm is None:
        raise ConfigError(
            f"run {task!r} with what? Name an algorithm too, such as: fedbraid run {task} fedavg"
        )
    sections["task"] = {"name": task} | sections["task"]
    sections["algorithm"] = {"name": algorithm} | sections["algorithm"]
    return cfg.merge({}, sections)


def _simulate(prepared: cfg.Prepared, folder: Path, callbacks: list[Any]) -> Result:
    from fedbraid.run.simulate import simulate

    return simulate(
        prepared.task,
        prepared.algorithm,
        prepared.work,
        prepared.schedule,
        out=folder,
        callbacks=callbacks,
        progress=False,
        **prepared.options,
    )


@contextmanager
def _folder(config: cfg.Config) -> Iterator[Path]:
    """The folder of --out, or a new one, which is removed if the run cannot start."""
    if "out" in config["run"]:
        yield Path(config["run"]["out"])
        return
    folder = _new(*(files.word(config[s]["name"]) for s in ("task", "algorithm")))
    try:
        yield folder
    finally:
        with suppress(OSError):  # not empty: the run has started
            folder.rmdir()


def _new(task: str, algorithm: str) -> Path:
    number = 1
    while True:
        folder = Path("runs") / f"{task}-{algorithm}-{number}"
        try:
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir()
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be made: {error.strerror}; give another folder with --out"
            ) from error
        else:
            return folder


# What `run` and `resume` share -----------------------------------------------------------------------


class Target:
    """Ends a run at an accuracy."""

    def __init__(self, accuracy: float) -> None:
        self.accuracy = accuracy

    def step(self, record: Record, run: Run) -> bool:
        return bool(record.get("accuracy", 0.0) >= self.accuracy)


@dataclass(frozen=True)
class WatchSettings:
    """Trackers and stopping rules of a run, stored in its folder for a resumed run."""

    WATCHING = "watching.json"
    TARGET = "target.json"

    track: str | None = None
    patience: int | None = None
    keep_best: bool = False
    target: float | None = None
    metric: str = "accuracy"  # for patience and the best model
    max_bytes_up: int | None = None  # of all clients together

    @classmethod
    def of(cls, folder: Path) -> WatchSettings:
        """The settings in a run's folder."""
        settings = _noted(
            folder / cls.WATCHING,
            "remove it to resume unwatched",
            ("track", "patience", "keep_best", "metric"),
        )
        goal = _noted(folder / cls.TARGET, "remove it to run to the last step", ("accuracy", "max_bytes_up"))
        return cls(**settings, target=goal.get("accuracy"), max_bytes_up=goal.get("max_bytes_up"))

    @property
    def ends(self) -> tuple[Any, ...]:
        """The settings that end a run early."""
        return self.patience, self.metric, self.target, self.max_bytes_up

    def callbacks(self) -> list[Any]:
        from fedbraid.run.callbacks import StopAtBytes

        found: list[Any] = [self] if self.target is None else [self, Target(self.target)]
        found += [] if self.max_bytes_up is None else [StopAtBytes(self.max_bytes_up)]
        if self.track is None and self.patience is None and not self.keep_best:
            return found
        from fedbraid.run.callbacks import watching

        return found + watching(self.track, self.patience, self.keep_best, self.metric)

    def start(self, run: Run) -> None:
        assert run.folder is not None
        before = WatchSettings.of(run.folder.path)
        if before.ends != self.ends:
            run.metadata.pop("stopped", None)  # it had ended early, by a rule that has changed
        settings = {"track": self.track, "patience": self.patience, "keep_best": self.keep_best}
        goal = {"accuracy": self.target, "max_bytes_up": self.max_bytes_up}
        for name, facts_, more in (
            (self.WATCHING, settings, {"metric": self.metric}),
            (self.TARGET, goal, {}),
        ):
            if any(facts_.values()):
                run.folder.write_json(name, facts_ | more)
            else:
                (run.folder.path / name).unlink(missing_ok=True)


LATER = ("max_bytes_up",)  # keys that folders of earlier versions lack


def _noted(path: Path, remedy: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """The entries of a JSON file; none if it is missing."""
    try:
        content = jsonlib.loads(path.read_text())
        return {key: content[key] for key in keys if key in content or key not in LATER}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} cannot be read ({error}); {remedy}") from error


class Steps:
    """A callback that reports that a run has begun, and counts its steps."""

    def __init__(self, begun: Callable[[], None]) -> None:
        self.begun = begun
        self.done: int | None = None

    def start(self, run: Run) -> None:
        self.begun()
        self.done = run.state.t

    def step(self, record: Record, run: Run) -> None:
        self.done = record["step"]


def keep(
    folder: Path, json: bool, quiet: bool, watch: WatchSettings, go: Callable[[list[Any]], Result]
) -> None:
    """Run with a progress bar and print the result, or after Ctrl-C the command that resumes."""
    begun = time.monotonic()
    with ExitStack() as stack, ExitStack() as before:
        before.enter_context(waiting("preparing the run", json or quiet))
        steps = Steps(before.close)
        callbacks: list[Any] = [steps]
        if not (json or quiet):
            from fedbraid.run.progress import Bar

            bar = Bar()
            stack.callback(bar.close)
            callbacks.append(bar)
        try:
            result = go(callbacks)
        except KeyboardInterrupt:
            before.close()
            stack.close()
            complain(_stopped(folder, steps.done))
            raise typer.Exit(130) from None
    _show(result, watch.target, time.monotonic() - begun, json, quiet)


def _stopped(folder: Path, done: int | None) -> str:
    if not (folder / "run.json").exists():
        return "interrupted before the run began; nothing was written"
    if done is None:  # while it loaded
        from fedbraid.run.checkpoint import Folder

        done = max((record["step"] for record in Folder(folder).records()), default=0)
    at = f"at step {done}" if done else "before the first step"
    return f"interrupted {at}. Resume with: fedbraid resume {quoted(folder)}"


def _show(result: Result, target: float | None, seconds: float, json: bool, quiet: bool) -> None:
    facts_ = summary(result, target) | {"seconds": round(seconds, 3)}
    if json:
        give(facts_)
    elif not quiet:
        facts(
            {
                "algorithm": facts_["algorithm"],
                "steps": facts_["steps"],
                "accuracy": None if facts_["accuracy"] is None else format_percent(facts_["accuracy"]),
                "best": None if facts_["best_accuracy"] is None else format_percent(facts_["best_accuracy"]),
                "loss": None if facts_["loss"] is None else f"{facts_['loss']:.4f}",
                "to target": _reached(target, facts_["rounds_to_target"]),
                "bytes up": _sent(result),
                "bytes down": format_bytes(result.bytes_down),
                "server keeps": _client_data(result),
                "privacy": result.privacy,
                **{name: facts_[name] for name in result.task.metrics},
                "LoRA": result.lora,
                "took": format_seconds(seconds),
                "engine": _engine(result),
                "run": facts_["run"],
            }
        )
        if facts_["hint"] is not None:
            complain(facts_["hint"])


def _sent(result: Result) -> str:
    """The bytes uploaded, and the bits per number."""
    bits = bits_up(result.history, result.task.layout.size)
    return format_bytes(result.bytes_up) + ("" if bits is None else f", sent in {bits:.3g} bits a number")


def _client_data(result: Result) -> str | None:
    """The server's data on clients, which may have other bits per number than uploads."""
    size, numbers = remembered(result)
    if not size:
        return None
    return f"{format_bytes(size)} of clients' updates, stored in {8 * size / numbers:.3g} bits a number"


def remembered(result: Result) -> tuple[int, int]:
    """The bytes of the server's data on clients, and how many numbers they hold."""
    from fedbraid.run.checkpoint import rows_of

    participants = len({c for r in result.history for c in r["clients"]})
    sizes = [rows.row_bytes for name, rows in rows_of(result.state) if name != "clients"]
    return participants * sum(sizes), participants * len(sizes) * result.task.layout.size


def _engine(result: Result) -> str:
    """The engine, and why it was selected."""
    return result.engine if result.plan is None else f"{result.engine}: {result.plan}"


def _hint(result: Result) -> str | None:
    """A hint on a result that looks wrong, or None."""
    if result.state.t and not (result.bytes_up or result.bytes_down):
        return "nothing travelled: the figures are the mean of models that each client trained by itself, and gained nothing from others"
    return hint(result.history, result.task.classes if result.task.classifies else None)


def _reached(target: float | None, step: int | None) -> str | None:
    if target is None:
        return None
    return f"{format_percent(target)} {'not reached' if step is None else f'at step {step}'}"


def summary(result: Result, target: float | None = None) -> dict[str, Any]:
    """The result of a run, for JSON."""
    from fedbraid.run.noise_outlook import privacy_of

    return {
        "run": None if result.out is None else str(result.out),
        "task": result.task.spec or result.task.name,
        "algorithm": result.algorithm.name,
        "engine": result.engine,
        "plan": result.plan,
        **({} if result.lora is None else {"lora": result.lora}),
        "steps": result.state.t,
        "accuracy": result.last("accuracy"),
        "best_accuracy": best(result.history),
        "loss": result.last("loss"),
        **(
            {}
            if (privacy := privacy_of(result.algorithm)) is None
            else {"epsilon": result.last("epsilon"), **privacy}
        ),
        **{name: result.last(name) for name in result.task.metrics},
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "bytes_kept": remembered(result)[0],
        "hint": _hint(result),
        "target": target,
        "rounds_to_target": None if target is None else rounds_to(result.history, target),
    }
