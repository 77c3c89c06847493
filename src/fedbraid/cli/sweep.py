"""`fedbraid sweep`: search for good settings, judged on held-out clients."""

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
from fedbraid.cli.options import Option
from fedbraid.cli.show import Json, Quiet, entry, give, quoted, suggest, table
from fedbraid.core.metric_names import falls
from fedbraid.errors import ConfigError
from fedbraid.run.formatting import format_percent, format_seconds

if TYPE_CHECKING:
    from fedbraid.core.search_space import Range
    from fedbraid.study.campaign import Entry
    from fedbraid.study.sweep import Sweep, SweepConfig, Trial

MAX_ROWS = 10  # trials in the table


SEARCH = (
    Option("search", "method", str, "Search: method: bayes, random or grid", "bayes"),
    Option("search", "trials", int, "Search: number of settings to try; a grid tries all", "20"),
    Option("search", "seeds", int, "Search: seeds per setting", "1"),
    Option("search", "hold_out", float, "Search: fraction of clients held out for evaluation", "0.2"),
    Option("search", "prune", str, "Search: prune unpromising trials: median, asha or none", "median"),
    Option("search", "seed", int, "Search: random seed", "0"),
)


@o.with_options((*SEARCH, *o.SHARED))
def sweep(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK|FILE.toml|FOLDER", help="A task, a file as for run, or a sweep to resume."
        ),
    ],
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ALGORITHM] [KEY=SPACE…]", help="The algorithm, and the hyperparameters to tune."
        ),
    ] = None,
    jobs: Jobs = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run: folder [default: a new runs/TASK-sweep-n]")
    ] = None,
    sections: cfg.Config = {},  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tune hyperparameters on held-out clients; the test set is not used.

    A space is a list, or uniform(low, high), log(low, high) or integer(low, high), with a third number for how
    many points a grid takes. Keys are those of a file: lr, batch, algorithm.mu, schedule.buffer. The best
    settings are printed as a command and saved as best.toml. Without any, the algorithm's own few are searched. Killed or stopped, the same command with the same
    --out, or `fedbraid sweep FOLDER`, goes on. Searching with "bayes" needs the extra sweep.

    \b
    Examples:
      fedbraid sweep digits fedprox --trials 20
      fedbraid sweep digits fedavg 'lr=log(0.001, 1)' --trials 20
      fedbraid sweep digits fedprox 'lr=[0.01, 0.1]' 'algorithm.mu=log(0.001, 1, 4)' --method grid
      fedbraid sweep digits fedadavr 'algorithm.optimizer=[adam, lamb]' 'algorithm.lr=log(0.001, 0.1)' --seeds 3
      fedbraid sweep experiment.toml 'lr=log(0.001, 1)' 'epochs=integer(1, 5)' --prune asha
      fedbraid sweep runs/digits-sweep-1
    """
    from fedbraid.study import sweep as searching
    from fedbraid.study.campaign import ignore, new_folder

    begun = time.monotonic()
    call, search = sections.pop("call"), sections.pop("search")
    metric = call.get("metric")
    if (Path(task) / searching.FILE).exists():
        if what:
            raise ConfigError(f"{task} says itself what is searched; leave out {' '.join(what)}")
        folder = Path(task)
        config, words, given, plan = _stored(folder)
    else:
        config, words = shared.base(task, sections), list(what or [])
        given = [*config["work"], *(f"schedule.{key}" for key in config["schedule"])]
        if words and "=" not in words[0].partition("(")[0]:
            config["algorithm"] = {"name": files.absolute(words.pop(0))}
        search["fraction"] = search.pop("hold_out", searching.SweepConfig.fraction)
        plan = searching.SweepConfig(**search, metric=metric)
        folder = out or new_folder(files.word(cfg.task_call(config["task"])[0]), "sweep")
        if "name" in config["algorithm"]:
            config["work"] = shared.work_of(
                config, cfg.algorithm_of(config["algorithm"]), "paper_settings" in call
            )
    if "name" not in config["algorithm"]:
        raise ConfigError(
            "sweep what? Name an algorithm, such as: fedbraid sweep digits fedavg 'lr=log(0.001, 1)'"
        )
    space = {key: parse_space(key, text) for key, text in map(_pair, words)} or declared(config, given)
    board = (
        None if json or quiet else Board("trials", searching.trial_count(plan, space), metric or "accuracy")
    )
    options = {k: v for k, v in config["run"].items() if k in ("evaluate_every", "client_state_storage")}
    with Stoppable(folder, board, "sweep"):
        result = searching.sweep(
            cfg.task_of(config["task"]), lambda s: build(config, s), space, out=folder, plan=plan, jobs=jobs,
            on_event=board or ignore, options=options, note={"config": config, "words": words, "given": given},
        )  # fmt: skip
    show(result, config, time.monotonic() - begun, json, quiet)


def _stored(folder: Path) -> tuple[cfg.Config, list[str], list[str], SweepConfig]:
    """(configuration, words, settings that were given, search settings) of a sweep's folder."""
    from fedbraid.run.checkpoint import Folder
    from fedbraid.study import sweep as searching

    stored = Folder(folder).read_json(searching.FILE)
    try:
        plan = searching.SweepConfig(**stored["plan"])
        return stored["config"], stored["words"], stored["given"], plan
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / searching.FILE} was not made by this command; it lacks {error}"
        ) from error


def build(config: cfg.Config, settings: dict[str, Any]) -> Entry:
    """The configuration with these settings, built."""
    from fedbraid.study.campaign import Entry

    changed = changed_by(config, settings)
    return Entry(
        "trial",
        cfg.algorithm_of(changed["algorithm"]),
        cfg.work_of(changed["work"]),
        cfg.schedule_of(changed["schedule"]),
    )


def changed_by(config: cfg.Config, settings: dict[str, Any]) -> cfg.Config:
    for key, value in settings.items():
        config = shared.override(config, key, value)
    return config


def declared(config: cfg.Config, given: list[str]) -> dict[str, Range]:
    """What the builder declares as worth a search, besides the settings that were given."""
    from fedbraid.algorithms import SPACES

    given = [*given, *(f"algorithm.{key}" for key in config["algorithm"])]
    space = SPACES.get(str(config["algorithm"]["name"]).partition("(")[0], {})
    return {key: what for key, what in space.items() if key not in given}


def _pair(word: str) -> tuple[str, str]:
    key, equals, text = word.partition("=")
    if not equals or not text.strip():
        raise ConfigError(f"{word!r} is not of the form key=space, such as 'lr=log(0.001, 1)'")
    return key.strip(), text.strip()


def parse_space(key: str, text: str) -> Range:
    """`[0.01, 0.1]`, `[adam, lamb]`, `log(0.001, 1)`, `uniform(0, 0.9)`, `integer(1, 5)`."""
    from fedbraid.core.search_space import Categorical, integer, log, uniform
    from fedbraid.parse import evaluate, listed

    if text.startswith("["):
        return Categorical(tuple(listed(text)))
    made = evaluate(text, {"log": log, "uniform": uniform, "integer": integer}, "space")
    if isinstance(made, int | float | str):
        raise ConfigError(f"{key}={text} is one value, not a space; write [{text}] or log(low, high)")
    return made  # type: ignore[no-any-return]


def show(result: Sweep, config: cfg.Config, seconds: float, json: bool, quiet: bool) -> None:
    """The best settings as a command and a file, and the trials that led there."""
    from fedbraid.study import recipe

    best = result.best
    settings = {k: v for k, v in changed_by(config, best.settings).items() if v}
    command, file = recipe.command(settings), result.out / "best.toml"
    file.write_text(recipe.toml(settings))
    if json:
        return give(
            {
                "best": best.settings, result.metric: best.value, "tied": [t.number for t in result.tied], "command": command, "file": str(file),
                "trials": [{k: v for k, v in vars(t).items() if k != "looks"} for t in result.trials], "seconds": round(seconds, 3), "out": str(result.out),
            }
        )  # fmt: skip
    if quiet:
        return
    sign = 1 if falls(result.metric) else -1
    ranked = sorted(
        result.trials, key=lambda t: (t.state != "done", t.value is None, sign * (t.value or 0.0))
    )
    stopped = sum(t.state != "done" for t in result.trials)
    table(
        f"{len(result.trials)} trials, {stopped} of them stopped early ({format_seconds(seconds)}); {result.metric} on held-out clients",
        [*best.settings, "", result.metric, "steps"],
        [[*(_short(v) for v in t.settings.values()), t.state, _value(t, result.metric), str(t.steps)] for t in ranked[:MAX_ROWS]],
        left=len(best.settings) + 1,
        order=[len(best.settings) + 1, *range(len(best.settings) + 1), len(best.settings) + 2],
    )  # fmt: skip
    if tied := result.tied:
        entry("", _tie(result, len(tied)))
    suggest("best", command)
    suggest("saved", f"fedbraid run {quoted(file)}")


def _tie(result: Sweep, count: int) -> str:
    others = "1 other trial is" if count == 1 else f"{count} other trials are"
    return (
        f"{others} within {format_percent(result.noise)} of the best, as far as {result.samples:,} held-out samples can tell"
        f" accuracies apart with {result.seeds} seed{'s' * (result.seeds > 1)}; --seeds {result.seeds + 2} tells more apart"
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _value(trial: Trial, metric: str) -> str:
    if trial.value is None:
        return "–"
    return format_percent(trial.value) if metric == "accuracy" else f"{trial.value:.4f}"
