"""Linear models and the multilayer perceptron; each flattens what it is given."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def softmax_regression(features: int, classes: int = 10) -> nn.Module:
    """One linear layer, a score per class."""
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes))


def logistic(features: int, classes: int = 2) -> nn.Module:
    """Logistic regression: softmax regression, of two classes unless told otherwise."""
    return softmax_regression(features, classes)


def mlp(features: int, hidden: int = 64, classes: int = 10) -> nn.Module:
    """One hidden layer of ReLU units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


class BagOfWords(nn.Module):
    """Softmax regression on the mean of one-hot words, given as word ids padded with 0.

    The same numbers as `nn.Linear(vocab, classes)` on a normalised bag of words, without its zeros.
    """

    def __init__(self, vocab: int, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab + 1, classes, padding_idx=0)
        self.bias = nn.Parameter(torch.zeros(classes))
        with torch.no_grad():
            self.words.weight[1:].uniform_(-(vocab**-0.5), vocab**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        used = (ids > 0).sum(1, keepdim=True).clamp(min=1)
        scores: Tensor = self.words(ids).sum(1) / used + self.bias
        return scores


def bag_of_words(vocab: int, classes: int = 2) -> nn.Module:
    """FedGBO's linear model for Sent140: softmax regression on a normalised bag of words."""
    return BagOfWords(vocab, classes)
