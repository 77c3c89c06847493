"""From words to a run: the same keys as options, as TOML, and as calls such as `mnist(clients=500)`.

A configuration is a dict of sections; options override a file, and keys that nobody knows are refused.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedbraid.user_files as files
from fedbraid.cli.options import keys
from fedbraid.core.check import number
from fedbraid.errors import ConfigError, unknown
from fedbraid.parse import literal, with_keywords
from fedbraid.run.formatting import parse_bytes

if TYPE_CHECKING:
    from fedbraid.core.algorithm import Algorithm
    from fedbraid.core.work import Work
    from fedbraid.data.task import Task
    from fedbraid.schedule import Schedule

Section = dict[str, Any]
Config = dict[str, Section]

WORK, SCHEDULE = keys("work"), keys("schedule")
RUN = (*keys("run"), "evaluate_on", "checkpoint_every", "log_layer_norms")
SECTIONS = ("task", "algorithm", "work", "schedule", "run")
ONLY_ROUNDS = ("per_round", "over_select", "timeout", "select", "sampling")
ONLY_BUFFERED = ("buffer", "concurrency", "arrivals")

DEFAULT_WORK: Section = {"lr": 0.01, "momentum": 0.9, "batch": 20}
TASK_WORK: Config = {"digits": {"lr": 0.05, "batch": 5}}  # small clients need more and larger steps
ADAPTIVE_LR = 0.001
DEFAULT_ROUNDS, DEFAULT_PER_ROUND = 100, 10


@dataclass(frozen=True)
class Prepared:
    """What `fb.simulate` is called with."""

    task: Task
    algorithm: Algorithm
    work: Work
    schedule: Schedule
    options: Section
    target: float | None
    max_bytes_up: int | None


def read(path: str) -> Config:
    """The sections of a TOML file, every key known."""
    try:
        config = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for name, section in config.items():
        if name not in SECTIONS:
            raise unknown(f"section of {path}", name, SECTIONS)
        if not isinstance(section, dict):
            raise ConfigError(f"{path} has {name} = {section!r}; write a section [{name}] with keys below it")
    for name, valid in (("work", WORK), ("schedule", SCHEDULE), ("run", RUN)):
        check_keys(config.get(name, {}), valid, f"key of [{name}] in {path}")
    for name in ("task", "algorithm"):
        if not isinstance(config.get(name, {}).get("name"), str):
            raise ConfigError(f'{path} has no name in [{name}]; add name = "{_EXAMPLES[name]}"')
    return config


_EXAMPLES = {"task": "digits", "algorithm": "fedavg"}


def check_keys(section: Section, keys: tuple[str, ...], kind: str) -> None:
    for key in section:
        if key not in keys:
            raise unknown(kind, key, keys)


def given(**values: Any) -> Section:
    """The options that are not None."""
    return {key: value for key, value in values.items() if value is not None}


def merge(file: Config, options: Config) -> Config:
    """A file's sections overridden by options; options that exclude each other replace each other."""
    merged = {name: dict(file.get(name, {})) for name in SECTIONS}
    for name, section in options.items():
        for one, other in (("epochs", "steps"), ("steps", "epochs")):
            if name == "work" and one in section and other not in section:
                merged[name].pop(other, None)
        if name == "work" and not _plain(section) and "momentum" not in section:
            merged[name].pop("momentum", None)
        merged[name] |= section
    return merged


def prepare(config: Config) -> Prepared:
    """Build and check everything, without running it."""
    run = dict(config["run"])
    target, most = run.pop("target", None), run.pop("max_bytes_up", None)
    if target is not None:
        number("target", target, "(0, 1]", "is not a fraction such as 0.95")
    run.pop("out", None)
    algorithm = algorithm_of(config["algorithm"])
    schedule = schedule_of(config["schedule"])
    name, settings = task_call(config["task"])
    work = work_of(on_top(start_of_work(name, algorithm), config["work"]))
    task = _load(name, settings)
    if target is not None and "accuracy" not in task.measures:
        raise ConfigError(
            f"target={target} is a test accuracy, which this task lacks; stop by --patience N --metric"
            f" {task.measures[-1]} instead"
        )
    return Prepared(
        task, algorithm, work, schedule, run, target, None if most is None else parse_bytes(str(most))
    )


# Sections -----------------------------------------------------------------------------------------


def task_of(section: Section) -> Task:
    """The task of `name = "mnist(clients=500)"` and other keywords of `fb.tasks.load`, which come on top."""
    return _load(*task_call(section))


def _load(name: str, settings: Section) -> Task:
    from fedbraid.data import tasks

    if files.names_file(name):
        return tasks.from_file(_with_arguments(name, settings))
    return tasks.load(name, **settings)


def task_call(section: Section) -> tuple[str, Section]:
    """The task's name, and the keywords for `fb.tasks.load`."""
    from fedbraid import models
    from fedbraid.data import partition, tasks
    from fedbraid.parse import evaluate

    names: dict[str, Callable[..., Any]] = {**partition.KINDS}
    names |= {model: _saying(model) for model in models.names()}
    names |= {task: _named(task) for task in tasks.names()}
    rest = dict(section)
    text = str(rest.pop("name"))
    if files.names_file(text):
        return files.absolute(text), rest
    call = evaluate(text, names, "task")
    if not isinstance(call, _Call):
        raise ConfigError(f"{text!r} is not a task; `fedbraid list tasks` shows them")
    return call.name, {**call.keywords, **rest}


@dataclass(frozen=True)
class _Call:
    name: str
    keywords: Section


def _named(task: str) -> Callable[..., _Call]:
    def call(clients: Any = None, partition: Any = None, **rest: Any) -> _Call:
        return _Call(task, given(clients=clients, partition=partition, **rest))

    return call


def _saying(word: str) -> Callable[[], str]:
    return lambda: word


def algorithm_of(section: Section) -> Algorithm:
    """The algorithm of `name = "fedadavr(lr=0.01)"` with further keywords on the outermost call."""
    from fedbraid import algorithms
    from fedbraid.algorithms.registry import algorithm_of

    rest = dict(section)
    text = str(rest.pop("name"))
    if files.names_file(text):
        return algorithm_of(
            _with_arguments(text, {k: literal(v) if isinstance(v, str) else v for k, v in rest.items()})
        )
    makers = {**algorithms.BUILDERS, **algorithms.WRAPPERS}
    name = text.partition("(")[0].strip()
    other = [k for k in rest if name in makers and k not in signature(makers[name]).parameters]
    if {*other} & {*WORK, *SCHEDULE}:
        raise ConfigError(f"{name} has no keyword {other[0]!r}; use --{other[0].replace('_', '-')}. {RULE}")
    return algorithm_of(with_keywords(text, rest, makers, "algorithm") if rest else text)


def _with_arguments(text: str, settings: Section) -> str:
    """`my.py:task` with keywords for the function that it names."""
    if not settings:
        return text
    if text.rstrip().endswith(")"):
        raise ConfigError(f"{text} has its arguments already; write {', '.join(settings)} in its brackets")
    return f"{text}({', '.join(f'{k}={v!r}' for k, v in settings.items())})"


# tells settings of the same name apart, in every command
RULE = "lr= and --lr are the clients' rate; algorithm.lr= and -a lr= are the algorithm's, and so for every keyword"


def keywords(pairs: list[str]) -> Section:
    """`-a key=value` pairs as a section."""
    section: Section = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip().removeprefix("algorithm.")
        if key.partition(".")[0] in ("work", "schedule"):
            raise ConfigError(
                f"-a {pair!r} is not a keyword of the algorithm; use --{key.partition('.')[2]}. {RULE}"
            )
        if not equals or not key.isidentifier():
            raise ConfigError(f"-a {pair!r} is not of the form key=value, such as -a lr=0.01. {RULE}")
        section[key] = value.strip()
    return section


def work_of(section: Section) -> Work:
    from fedbraid.core.work import RATES, Work
    from fedbraid.parse import evaluate

    settings = on_top(DEFAULT_WORK, section)
    if isinstance(settings["batch"], str):
        settings["batch"] = _batch(settings["batch"])
    if isinstance(settings["lr"], str):
        settings["lr"] = evaluate(settings["lr"], RATES, "lr")
    _numbers(settings, [key for key in WORK if key not in ("lr", "last", "optimizer")], "work")
    return Work(**settings)


def on_top(start: Section, given: Section) -> Section:
    """Default local training settings overridden by given ones; optimizers other than sgd have no momentum and another rate."""
    if not _plain(given):
        start = {key: value for key, value in start.items() if key != "momentum"} | {"lr": ADAPTIVE_LR}
    return start | given


def _plain(work: Section) -> bool:
    return bool(work.get("optimizer", "sgd") == "sgd")


def start_of_work(task: str, algorithm: Algorithm | None = None) -> Section:
    """A task's default local training settings; with an algorithm, those of its paper."""
    return DEFAULT_WORK | TASK_WORK.get(task, {}) | dict(algorithm.work if algorithm else {})


def paper_settings(algorithm: Algorithm, given: Section) -> str | None:
    """A sentence on the local training settings that come from the algorithm's paper, or None."""
    from_paper = {key: value for key, value in algorithm.work.items() if key not in given and _plain(given)}
    if not from_paper:
        return None
    listed = ", ".join(f"{key} {value:g}" for key, value in from_paper.items())
    options = " and ".join(f"--{key.replace('_', '-')}" for key in from_paper)
    return f"clients work as in {algorithm.name.partition('(')[0]}'s paper: {listed} ({options} changes it)"


def _batch(text: str) -> int | None:
    if text == "full":
        return None
    if not text.lstrip("+-").isdigit():
        raise ConfigError(f"batch={text!r} is not a batch size; use an integer or 'full'")
    return int(text)


def _numbers(section: Section, keys: list[str], where: str) -> None:
    for key in keys:
        value = section.get(key)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise ConfigError(
                f"{key}={value!r} in [{where}] is not a number; write {key} = 1, without quotes"
            )


def schedule_of(section: Section) -> Schedule:
    """Rounds, or with a buffer or a concurrency, asynchronous steps."""
    from fedbraid.schedule import buffered, rounds
    from fedbraid.schedule.selection import named

    settings = dict(section)
    steps = settings.pop("rounds", DEFAULT_ROUNDS)
    asynchronous = any(key in settings for key in ("buffer", "concurrency"))
    for key in ONLY_ROUNDS if asynchronous else ONLY_BUFFERED:
        if key in settings:
            use = "leave out buffer and concurrency" if asynchronous else "give a buffer, such as --buffer 10"
            kind = "synchronous rounds" if asynchronous else "asynchronous steps"
            raise ConfigError(f"{key}={settings[key]!r} belongs to {kind}; {use}")
    _numbers(settings, ["per_round", "over_select", "timeout", "buffer", "concurrency"], "schedule")
    for key in ("durations", "bandwidth", "availability"):
        if key in settings:
            settings[key] = _clock(key, settings[key])
    if "select" in settings:
        settings["select"] = named(str(settings["select"]))
    if "replay_timing" in settings:
        settings = _of_run(settings)
    if asynchronous:
        return buffered(steps, **settings)
    return rounds(steps, _count(settings.pop("per_round", DEFAULT_PER_ROUND)), **settings)


def _count(value: float) -> int | float:
    """Numbers of at least one are counts, below one fractions."""
    return int(value) if value >= 1 and float(value).is_integer() else value


def _clock(key: str, text: Any) -> Any:
    from fedbraid.parse import evaluate
    from fedbraid.run.config import SCHEDULES
    from fedbraid.schedule.clock import Durations, Network, availability

    if not isinstance(text, str):
        raise ConfigError(f"{key}={text!r} does not describe durations; write a call such as 'halfnormal(1)'")
    if key == "availability" and not text.startswith("availability("):
        return availability(text)
    kind = {"bandwidth": Network, "availability": availability}.get(key, Durations)
    return evaluate(text, {k: v for k, v in SCHEDULES.items() if issubclass(v, kind)}, key)


def _of_run(settings: Section) -> Section:
    """The settings with the timing of an earlier run."""
    from fedbraid.schedule.clock import from_run

    folder = settings.pop("replay_timing")
    if not isinstance(folder, str):
        raise ConfigError(
            f"replay_timing={folder!r} is not a folder; give that of a run, such as a deployment's"
        )
    timing = from_run(folder)
    if twice := sorted(timing.keys() & settings.keys()):
        raise ConfigError(f"{twice[0]} was given, and {folder} has it too; leave out one of the two")
    return settings | timing
