"""Shakespeare as LEAF has it: each role a client, 80 characters to guess the next.

The text is kept once. Inputs are overlapping windows of it, a strided view, and rows say which
windows are samples: a window that would run from one role into the next is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedbraid.core import rng
from fedbraid.core.check import integer, number
from fedbraid.data.dataset import Bytes, DataSet, Ints
from fedbraid.data.formats import leaf, parquet
from fedbraid.data.sources import Home, Root
from fedbraid.errors import ConfigError, DataError

WINDOW = 80
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz"
LEAF_ALPHABET = "\n !\"&'(),-.0123456789:;>?" + _LETTERS[0] + "[]" + _LETTERS[1] + "}"
TINY_ALPHABET = "\n !$&',-.3:;?" + _LETTERS[0] + _LETTERS[1]

HOME = Home(
    "shakespeare",
    ("shakespeare", "shakespeare/data"),
    "LEAF's train/*.json and test/*.json (or leaf-clients.parquet)",
    "https://github.com/TalwalkarLab/leaf",
)
TINY = Home(
    "tinyshakespeare",
    ("tinyshakespeare",),
    "speakers.parquet (client_id, text)",
    "https://github.com/karpathy/char-rnn",
)


@dataclass(frozen=True, eq=False)
class Role:
    """Where a client's windows start in the text."""

    train: Ints
    test: Ints


@dataclass(frozen=True)
class Cut:
    """What of the roles and windows is kept."""

    min_samples: int
    max_samples: int | None
    test_clients: int
    context: int
    max_test: int | None

    def __post_init__(self) -> None:
        if self.max_samples is not None:
            integer("max_samples_per_client", self.max_samples, why="leaves nothing")
        if self.max_test is not None:
            integer("max_test_samples", self.max_test, why="tests nothing")
        if not 1 <= self.context <= WINDOW:
            raise ConfigError(f"context={self.context} is no part of a window; use 1 to {WINDOW}")


def shakespeare(
    root: Root = None,
    fraction: float = 0.9,
    min_samples: int = 1,
    max_samples_per_client: int | None = None,
    test_clients: int = 0,
    context: int = WINDOW,
    max_test_samples: int | None = None,
) -> DataSet:
    """The 36 plays by role; of a role's windows the first `fraction` train and the last test, as LEAF splits.

    Roles left without test windows, or with fewer than `min_samples` to train on, are dropped: 660 of
    1,129 stay by default. `max_samples_per_client` keeps the first so many of both shares.
    `test_clients=225` is FedAdaVR's split instead: so many whole roles, picked once, are the test set.
    For shorter runs, `context` shows only the last so many characters of a window, and `max_test_samples`
    tests on so many windows, evenly spread over all.
    """
    cut = Cut(min_samples, max_samples_per_client, test_clients, context, max_test_samples)
    if files := HOME.find(root, "leaf-clients.parquet"):
        text, roles = _split_roles(parquet(files, ("text",))[0], LEAF_ALPHABET, fraction, test_clients)
    else:
        splits = [HOME.find(root, f"{split}/*.json") for split in ("train", "test")]
        if not all(splits):
            raise HOME.missing(root)
        if test_clients:
            raise ConfigError(
                f"test_clients={test_clients} needs leaf-clients.parquet; LEAF's files are split already"
            )
        text, roles = _from_leaf(leaf(splits[0]), leaf(splits[1]))
    return _dataset(text, roles, LEAF_ALPHABET, cut)


def tinyshakespeare(
    root: Root = None,
    fraction: float = 0.9,
    min_samples: int = 1,
    max_samples_per_client: int | None = None,
    test_clients: int = 0,
    context: int = WINDOW,
    max_test_samples: int | None = None,
) -> DataSet:
    """Forty thousand lines of Shakespeare by speaker, in the public domain; split like `shakespeare`."""
    cut = Cut(min_samples, max_samples_per_client, test_clients, context, max_test_samples)
    files = TINY.find(root, "speakers.parquet")
    if not files:
        raise TINY.missing(root)
    text, roles = _split_roles(parquet(files, ("text",))[0], TINY_ALPHABET, fraction, test_clients)
    return _dataset(text, roles, TINY_ALPHABET, cut)


def encode(text: str, alphabet: str) -> Bytes:
    """A text as positions in the alphabet."""
    codes = np.full(256, 255, np.uint8)
    codes[np.frombuffer(alphabet.encode("latin-1"), np.uint8)] = np.arange(len(alphabet))
    out = codes[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)]
    if (out == 255).any():
        strange = text[int(np.argmax(out == 255))]
        raise DataError(
            f"character {strange!r} is not one of the {len(alphabet)} of this data set; get its file again"
        )
    return out


def _split_roles(
    texts: Sequence[str], alphabet: str, fraction: float, test_clients: int
) -> tuple[Bytes, list[Role]]:
    """One text of all roles, each split in time, or, for test clients, with complete roles held out."""
    number("fraction", fraction, "(0, 1)")
    ends = np.cumsum([len(t) for t in texts])
    roles = []
    for text, end in zip(texts, ends):
        windows = np.arange(end - len(text), end - WINDOW)
        train = int(fraction * len(windows))
        cuts = (
            [len(windows)] * 2 if test_clients else [train, train + WINDOW - 1]
        )  # no training window has a test letter
        roles.append(Role(windows[: cuts[0]], windows[cuts[1] :]))
    if test_clients:
        roles = _held_out(roles, test_clients)
    return encode("".join(texts), alphabet), roles


def _held_out(roles: list[Role], some: int) -> list[Role]:
    """Complete roles, drawn at random, that only test."""
    if not 0 < some < len(roles):
        raise ConfigError(f"test_clients={some} must leave roles to train on; use 1 to {len(roles) - 1}")
    for i in rng.generator(0, "held out of shakespeare").choice(len(roles), some, replace=False):
        roles[i] = Role(roles[i].test, roles[i].train)
    return roles


def _from_leaf(
    train: dict[str, tuple[list[str], list[str]]], test: dict[str, tuple[list[str], list[str]]]
) -> tuple[Bytes, list[Role]]:
    """LEAF's windows, of which each repeats all but one character of the last, put back into a text."""
    pieces: list[str] = []
    length = 0
    roles = []
    for user, samples in train.items():
        starts: list[list[int]] = []
        for windows, nexts in (samples, test.get(user, ([], []))):
            starts.append([])
            for i, (window, letter) in enumerate(zip(windows, nexts)):
                if len(window) != WINDOW or len(letter) != 1:
                    raise DataError(
                        f"user {user!r} has a sample of {len(window)} characters; LEAF's have {WINDOW}"
                    )
                follows = i > 0 and windows[i - 1][1:] + nexts[i - 1] == window
                pieces.append(letter if follows else window + letter)
                length += len(pieces[-1])
                starts[-1].append(length - WINDOW - 1)
        roles.append(Role(np.asarray(starts[0], np.int64), np.asarray(starts[1], np.int64)))
    return encode("".join(pieces), LEAF_ALPHABET), roles


def _dataset(text: Bytes, roles: list[Role], alphabet: str, cut: Cut) -> DataSet:
    by_role = cut.test_clients
    trains = [len(r.train) >= max(1, cut.min_samples) and (by_role or len(r.test)) for r in roles]
    training = [r for r, stays in zip(roles, trains) if stays or (by_role and not len(r.train))]
    training = [
        replace(r, train=r.train[: cut.max_samples], test=r.test[: cut.max_samples]) for r in training
    ]
    if not any(len(r.train) for r in training) or not any(len(r.test) for r in training):
        raise ConfigError(f"min_samples={cut.min_samples} leaves no client; use a smaller one")
    letters = torch.from_numpy(text)
    inputs, targets = letters[:-1].unfold(0, WINDOW, 1)[:, WINDOW - cut.context :], letters[WINDOW:].long()
    rows, test = (
        np.concatenate(starts) for starts in ([r.train for r in training], [r.test for r in training])
    )
    groups, test_groups = (
        np.repeat(np.arange(len(training)), [len(s) for s in starts])
        for starts in ([r.train for r in training], [r.test for r in training])
    )
    if cut.max_test is not None and cut.max_test < len(test):
        some = np.linspace(0, len(test) - 1, cut.max_test).astype(np.int64)
        test, test_groups = test[some], test_groups[some]
    picked = torch.from_numpy(test)
    return DataSet(
        inputs,
        targets,
        (inputs[picked], targets[picked]),
        classes=len(alphabet),
        rows=rows,
        groups=groups,
        test_groups=None if by_role else test_groups,
        vocab=len(alphabet),
    )
