"""The names of a run's metrics, and which of them fall as a model gets better. This module does not import torch."""

from __future__ import annotations

PREVIOUS = "previous"  # a client's model after its last participation, where the loss reads it
PERSONAL = "personal"  # the client-state key of the parameters that never travel

RESERVED = frozenset(  # keys of records other than the task's metrics
    [
        "step",
        "time",
        "clients",
        "uploads",
        "bytes_up",
        "bytes_down",
        "bytes_broadcast",
        "up",
        "down",
        "lr",
        "K",
        "cohort",
        "norm",
        "offset_norm",
        "moved",
        "selected",
        "losses",
        "versions_kept",
        "loss",
        "accuracy",
        "train_loss",
        "update_norm",
        "staleness",
        "staleness_max",
        "staleness_counts",
        "epsilon",
        "energy",
        "clip",
        "predicted",
        "loss_clients",
        "accuracy_clients",
        "accuracy_worst_tenth",
        "undefined",
    ]
)
ERRORS = frozenset(
    ["loss", "error", "mae", "mse", "rmse", "mape", "nll", "perplexity", "wer", "cer", "brier", "ece"]
)


def falls(name: str) -> bool:
    """Whether less of a measurement is better: its name says that it is a loss or an error.

    >>> falls("train_loss"), falls("mae"), falls("f1"), falls("accuracy_clients")
    (True, True, False, False)
    """
    return not ERRORS.isdisjoint(name.split("_"))
