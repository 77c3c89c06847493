"""Helpers of `compare` and `sweep`: a base of sections, and settings that override it, written as `key=value`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import fedbraid.user_files as files
from fedbraid.cli import config as cfg
from fedbraid.errors import ConfigError, unknown
from fedbraid.parse import literal

if TYPE_CHECKING:
    from fedbraid.core.algorithm import Algorithm


def base(task: str, sections: cfg.Config) -> cfg.Config:
    """The sections of a file overridden by options, or those of a named task with its defaults."""
    if task.endswith(".toml"):
        return cfg.merge(cfg.read(task), sections)
    return cfg.merge({"task": {"name": files.absolute(task)}}, sections)


def work_of(config: cfg.Config, algorithm: Algorithm, paper_settings: bool) -> cfg.Section:
    """The local training settings of one of several entries: common or its paper's, overridden by given ones."""
    name, _ = cfg.task_call(config["task"])
    return cfg.on_top(cfg.start_of_work(name, algorithm if paper_settings else None), config["work"])


def override(config: cfg.Config, key: str, value: Any) -> cfg.Config:
    """A configuration with one setting changed: `lr`, `work.lr`, `algorithm.lr`, `schedule.buffer`."""
    section, _, name = key.rpartition(".")
    sections = {"work": cfg.WORK, "schedule": cfg.SCHEDULE}
    if not section:
        section = next((s for s, keys in sections.items() if name in keys), "")
        if not section:
            raise ConfigError(
                f"{unknown('setting', key, [*cfg.WORK, *cfg.SCHEDULE, f'algorithm.{name}'])}. {cfg.RULE}"
            )
    if section != "algorithm":
        if section not in sections:
            raise unknown("section of settings", section, [*sections, "algorithm"])
        try:
            cfg.check_keys({name: value}, sections[section], f"key of {section}")
        except ConfigError as error:
            raise ConfigError(f"{error}. {cfg.RULE}") from error
    changed = cfg.merge(config, {section: {name: value}})
    for these, others in ((cfg.ONLY_BUFFERED, cfg.ONLY_ROUNDS), (cfg.ONLY_ROUNDS, cfg.ONLY_BUFFERED)):
        if section == "schedule" and name in these:  # asynchronous steps replace rounds, and vice versa
            changed["schedule"] = {k: v for k, v in changed["schedule"].items() if k not in others}
    return changed


def settings(words: list[str]) -> Iterator[tuple[str, Any]]:
    """`key=value` words, with literal values parsed."""
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key or not text:
            raise ConfigError(f"{word!r} is not of the form key=value, such as lr=0.1")
        yield key.strip(), literal(text.strip())


def words(text: str) -> list[str]:
    """A text cut at spaces outside brackets and quotes.

    >>> words("fedadavr(optimizer='adam', lr=0.01) lr=0.1")
    ["fedadavr(optimizer='adam', lr=0.01)", 'lr=0.1']
    """
    found, depth, quote = [""], 0, ""
    for sign in text.strip():
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        depth += not quote and (sign in "([") - (sign in ")]")
        if sign.isspace() and not quote and depth == 0:
            found += [""] if found[-1] else []
        else:
            found[-1] += sign
    return [w for w in found if w]
