"""Sentiment140 of LEAF: is this tweet happy? Each person who tweets is a client."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from fedbraid.core.check import integer
from fedbraid.data.dataset import DataSet, class_numbers, group_numbers
from fedbraid.data.formats import broken, leaf
from fedbraid.data.sources import Home, Root

HOME = Home(
    "sent140",
    ("sent140", "sent140/data"),
    "LEAF's train/*.json and test/*.json",
    "https://github.com/TalwalkarLab/leaf",
)
_TEXT = 4  # where in LEAF's rows (id, date, query, user, text, …) the tweet is
_LONGEST = 64  # words; a tweet has at most 140 characters

Words = list[list[str]]


def read(root: Root = None, vocab: int = 5000) -> DataSet:
    """Tweets as numbers of the `vocab` most frequent words, padded with 0; tweets without any are left out.

    FedGBO's normalised bag of words is what `models.bag_of_words` makes of them.
    """
    integer("vocab", vocab, why="leaves no words")
    (tweets, y, who), (tweets_test, yt, who_test) = (_split(root, split) for split in ("train", "test"))
    counts = Counter(word for words in tweets for word in words)
    common = sorted(counts, key=lambda word: (-counts[word], word))[:vocab]
    number = {word: i + 1 for i, word in enumerate(common)}
    x, xt = _numbers(tweets, number), _numbers(tweets_test, number)
    keep, keep_test = x[:, 0] > 0, xt[:, 0] > 0
    groups, test_groups = group_numbers(who[keep], who_test[keep_test])
    return DataSet(
        torch.from_numpy(x[keep]),
        class_numbers(y[keep]),
        (torch.from_numpy(xt[keep_test]), class_numbers(yt[keep_test])),
        classes=2,
        groups=groups,
        test_groups=test_groups,
        vocab=vocab,
    )


def _split(root: Root, split: str) -> tuple[Words, np.ndarray, np.ndarray]:
    files = HOME.find(root, f"{split}/*.json")
    if not files:
        raise HOME.missing(root)
    users = leaf(files)
    try:
        tweets = [re.findall(r"[\w'@#]+", row[_TEXT].lower()) for x, _ in users.values() for row in x]
        labels = np.asarray(
            [int(label) > 0 for _, y in users.values() for label in y]
        )  # 0, or 1 (4 in the raw set)
    except (IndexError, TypeError, ValueError, AttributeError) as error:
        raise broken(files[0], f"its samples are not LEAF's rows of a tweet ({error})") from error
    return tweets, labels, np.asarray([user for user, (_, y) in users.items() for _ in y])


def _numbers(tweets: Sequence[list[str]], number: dict[str, int]) -> np.ndarray:
    """Words of the vocabulary as numbers `[n, _LONGEST]`, from the left."""
    out = np.zeros((len(tweets), _LONGEST), np.int32)
    for row, words in zip(out, tweets):
        in_vocabulary = [number[w] for w in words if w in number][:_LONGEST]
        row[: len(in_vocabulary)] = in_vocabulary
    return out
