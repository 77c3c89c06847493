"""The facts that rules, gathers and transforms are given: of one block of clients, of its uploads, of a server step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.layout import Layout
from fedbraid.core.vector_spec import Upload
from fedbraid.errors import ConfigError, unknown

Vectors = dict[str, Tensor]
Tree = Any  # state: records, dicts and tuples of tensors, numbers and ClientTables


Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Participation:
    """The facts of a block's participation in a server step, made once and carried by request, reply and upload."""

    clients: Ints  # [m]
    version: Ints  # [m], the version that each trains from
    n: Tensor  # [m, 1], samples
    K: Tensor  # [m, 1], local steps
    a: Tensor  # [m, 1], effective steps
    lr: Tensor  # [m, 1], local learning rates, float64

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, some: slice) -> Participation:
        return Participation(
            self.clients[some], self.version[some], self.n[some], self.K[some], self.a[some], self.lr[some]
        )

    def rows(self) -> list[Participation]:
        """Each client's, as blocks of one."""
        columns = (torch.split(v, 1) for v in (self.n, self.K, self.a, self.lr))
        at = (slice(i, i + 1) for i in range(len(self)))
        return [
            Participation(self.clients[i], self.version[i], *row)
            for i, *row in zip(at, *columns, strict=True)
        ]

    @staticmethod
    def join(parts: Sequence[Participation]) -> Participation:
        """Several blocks as one, in order."""
        if len(parts) == 1:
            return parts[0]
        return Participation(
            np.concatenate([p.clients for p in parts]), np.concatenate([p.version for p in parts]),
            torch.cat([p.n for p in parts]), torch.cat([p.K for p in parts]), torch.cat([p.a for p in parts]),
            torch.cat([p.lr for p in parts]),
        )  # fmt: skip


# Clients --------------------------------------------------------------------------------------------


def outside_a_step(y: Tensor) -> Tensor:
    raise ConfigError(
        "ctx.grad is asked for outside of a step, where there is no batch; ask in step, or for full_grad"
    )


@dataclass
class ClientContext:
    """What stays fixed while a block of clients trains."""

    x: Tensor  # [1, d], the model they all start from
    download: Vectors  # [1, ·] each, what else the server sent
    client_state: Vectors  # [m, ·], what each client remembers
    lr: float
    K: Tensor  # [m, 1], how many steps each will take
    a: Tensor  # [m, 1], how far they go: the effective number of plain steps
    n: Tensor  # [m, 1], how many samples each holds
    t: int  # the version they train from
    layout: Layout
    full_grad: Callable[[Tensor], Tensor]  # y[·, d] -> the gradient over each whole local set, [m, d]
    grad: Callable[[Tensor], Tensor] = field(
        default=outside_a_step
    )  # y[·, d] -> the one of the step's batch, [m, d]
    full_layout: Layout | None = (
        None  # the layout with the personal parts after the shared ones, where there are any
    )

    @property
    def memory(self) -> Vectors:
        """The former name of `client_state`."""
        return self.client_state

    @property
    def down(self) -> Vectors:
        """The former name of `download`."""
        return self.download


# The server -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Uploads(Mapping[str, Tensor]):
    """What a block of clients sent, as it was received, and what the server knows of the senders.

    It is a mapping: `up["delta"]` is `up.vectors["delta"]`.
    """

    clients: NDArray[np.int64]
    vectors: Vectors  # [m, ·]
    n: Tensor  # [m, 1] samples
    K: Tensor  # [m, 1] local steps
    a: Tensor  # [m, 1] effective steps
    staleness: Tensor  # [m, 1] server steps since the version they trained from
    lr: Tensor  # [m, 1] the rates they trained with, float64
    sent: Mapping[str, Tensor]  # [m, ·] or [1, ·]: the model each trained from and what else it was sent
    declared: dict[str, Upload]  # what each name is

    def __getitem__(self, name: str) -> Tensor:
        return self.vectors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.vectors)

    def __len__(self) -> int:
        return len(self.vectors)

    def p(self, kind: str) -> Tensor:
        """What each sender counts for, `[m, 1]`."""
        return self.n if kind == "samples" else torch.ones_like(self.n)

    def having(self, vectors: Vectors, declared: dict[str, Upload] | None = None) -> Uploads:
        """The same senders with other vectors."""
        return replace(self, vectors=vectors, declared=declared or self.declared)


class ServerData(Protocol):
    """What the server itself holds: its data, and the model to try on them."""

    @property
    def seed(self) -> int:
        """Of the run."""

    @property
    def public(self) -> Any:
        """(inputs, targets) of the task's public share."""

    @property
    def test(self) -> Any:
        """(inputs, targets) of its test set."""

    def module(self, x: Tensor) -> Any:
        """A module with these weights; the next call may give the same one."""

    def outputs(self, module: Any, rows: Any) -> Any:
        """What a module gives for these rows of the public share."""


@dataclass(frozen=True)
class ServerContext:
    """The facts of a server step."""

    t: int
    cohort: float  # |S|: how many uploads, or as many as were planned where that is what counts
    N: int  # how many clients are known
    samples: float  # Σ n_j over all of them
    lr: float  # weighted mean of the senders' rates
    K: float  # weighted mean of the senders' steps
    a: float  # weighted mean of the senders' effective steps
    quantized_fraction: float  # the share of quantised senders
    layout: Layout
    sizes: NDArray[np.int64]  # n_j by client number, 0 for numbers that nobody has
    max_staleness: int = 0  # the age of the oldest upload
    sent: Vectors = field(
        default_factory=dict
    )  # [1, ·] each: this version's model and what else is sent with it
    dropped: int = 0  # clients of a round that were asked and sent nothing in time
    seed: int = 0  # of the run
    server_data: ServerData | None = None  # where a transform's traits need it, in a run


# Staleness ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Staleness:
    """s(τ), by what an update that is τ versions late is scaled."""

    kind: str = "constant"
    a: float = 0.5
    b: float = 4.0

    def __post_init__(self) -> None:
        if self.kind not in _STALENESS:
            raise unknown("staleness", self.kind, _STALENESS)

    def __call__(self, tau: Tensor) -> Tensor:
        scale: Tensor = _STALENESS[self.kind](self, tau)
        return scale


_STALENESS: dict[str, Any] = {
    "constant": lambda s, tau: torch.ones_like(tau),
    "sqrt": lambda s, tau: (1 + tau).rsqrt(),
    # one by one: the last bit of a vectorized power depends on its place in the vector
    "polynomial": lambda s, tau: (
        torch.tensor([(1 + t) ** -s.a for t in tau.flatten().tolist()]).to(tau).view_as(tau)
    ),
    "hinge": lambda s, tau: 1 / (1 + s.a * (tau - s.b).clamp_min(0)),
}
