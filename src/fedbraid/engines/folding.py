"""Uploads as the server sees them, and their folding, which a worker does for its own clients where the gather is a sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from fedbraid.core.algorithm import Algorithm
from fedbraid.core.context import Participation, Tree, Uploads, Vectors
from fedbraid.engines.engine import Reply

UPLOADS = 4  # of float32 are as long as an accumulator, two levels of float64
LEAST = 2**14  # numbers that folding must save: fewer cross faster than accumulators are made and merged


def as_uploads(
    algorithm: Algorithm, who: Participation, vectors: Vectors, sent: Mapping[str, Tensor], t: int, x: Tensor
) -> Uploads:
    """A block's vectors at server step t, each with what its sender was sent, `[m, ·]` or `[1, ·]`."""
    staleness = torch.from_numpy(t - who.version).to(x)[:, None]
    return Uploads(
        who.clients, vectors, who.n.to(x), who.K.to(x), who.a.to(x), staleness, who.lr.to(x.device), sent,
        algorithm.gathered,
    )  # fmt: skip


def account(algorithm: Algorithm, up: Uploads) -> Uploads:
    """The uploads, and what server parts make of each."""
    made = algorithm.server.account(up)
    return up.having({**up.vectors, **made}) if made else up


def upload_norms(vectors: Vectors) -> Tensor:
    """The norm of each client's first vector, `[m]`."""
    norms: Tensor = torch.linalg.vector_norm(next(iter(vectors.values())), dim=1)
    return norms


def merged(algorithm: Algorithm, accumulators: Iterable[Tree], x: Tensor) -> Tree:
    """One accumulator of several, whose own storage is not used where it is borrowed."""
    return reduce(algorithm.gather.merge, accumulators, algorithm.gather.zero(x))


def should_fold(clients: int, workers: int, width: int) -> bool:
    """Whether workers' accumulators are so much shorter than uploads `[width]`; the bits are the same either way."""
    return (clients - UPLOADS * workers) * width > LEAST


class Folder:
    """One worker's accumulator of the clients that it trained for a server step.

    For gathers that need no upload by itself; see `core/gather.py`. What is left of a reply are the numbers that a record
    is made of, and the client's new state.
    """

    def __init__(self, algorithm: Algorithm, download: Vectors, step: int) -> None:
        self.algorithm, self.step = algorithm, step
        self.x, self.sent = download["x"], {name: v[None] for name, v in download.items()}
        self.acc: Tree = algorithm.gather.zero(self.x)

    def add(self, reply: Reply) -> Reply:
        """Fold a block's uploads; its reply without them."""
        up = as_uploads(self.algorithm, reply.participation, reply.uploads, self.sent, self.step, self.x)
        self.acc = self.algorithm.gather.add(self.acc, account(self.algorithm, up), {}, self.x)
        return replace(reply, uploads={}, norms=upload_norms(reply.uploads))
