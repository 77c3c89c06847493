"""Algorithms as text: `fedshift(fedpaq(uniform(4)))`, or one of a user's file by `FILE.py:NAME`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import fedbraid.user_files as files
from fedbraid.algorithms._build import BUILDERS, WRAPPERS
from fedbraid.core.algorithm import Algorithm
from fedbraid.errors import ConfigError
from fedbraid.links import codecs
from fedbraid.parse import evaluate


def parts(algorithm: Algorithm) -> dict[str, str]:
    """The five parts as text."""
    return {name: repr(getattr(algorithm, name)) for name in ("rule", "gather", "server", "up", "down")}


def algorithm_from(text: str) -> Algorithm:
    """The algorithm that a text such as `fedshift(fedpaq(uniform(4)))` names."""
    makers = {name: getattr(codecs, name) for name in codecs.__all__}
    made = evaluate(text, {**BUILDERS, **WRAPPERS, **makers}, "algorithm")
    if not isinstance(made, Algorithm):
        raise ConfigError(f"{text!r} is not an algorithm; `fedbraid list` shows them")
    return made


def algorithm_of(text: str) -> Algorithm:
    """The same, or one of the user's own by the name `FILE.py:NAME`, whose file is imported."""
    if not files.names_file(text):
        return algorithm_from(text)
    made: Algorithm = files.load(text, Algorithm, "algorithm", BUILDERS)
    with suppress(ConfigError):
        if made.name and parts(algorithm_from(made.name)) == parts(made):
            return made
    return replace(made, name=files.absolute(text))
