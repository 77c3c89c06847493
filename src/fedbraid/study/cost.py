"""Estimates of an algorithm's costs before it runs: server memory, bytes per round, client arithmetic.

FLOPs follow FedGBO's eq. 22, N = K(B(fwd + bwd) + C|x|) + full gradients · n(fwd + bwd), with bwd = 2 fwd and
a multiply-add as one operation, as its Tables 4 and 10 were counted. Bytes are those of
encoded messages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedbraid.algorithms.fedgbo import Fixed, Tracked
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.context import ClientContext, ServerContext, Uploads
from fedbraid.core.layout import Layout
from fedbraid.core.link import BroadcastContext, UploadContext
from fedbraid.core.metric_names import PERSONAL
from fedbraid.core.optim import Adam, RMSProp, SGDm
from fedbraid.core.rule import Chain, Rule, finished
from fedbraid.core.work import Work
from fedbraid.data.call import Forward, call
from fedbraid.data.tree import Tree
from fedbraid.engines.flops import forward_flops
from fedbraid.links import codecs
from fedbraid.run.checkpoint import rows_of
from fedbraid.run.state import State
from fedbraid.study.energy import DeviceProfile

PRECISIONS = {"fp32": codecs.identity(), "fp16": codecs.fp16(), "int8": codecs.int8(), "int4": codecs.int4()}

FIXED = {RMSProp: 5, SGDm: 5, Adam: 8}  # Table 9 of FedGBO, with the step itself (2) included
MOVING = {RMSProp: 5, SGDm: 8, Adam: 11}


@dataclass(frozen=True)
class Federation:
    """The number of clients, of those in a round, and of samples that each holds on average."""

    clients: int
    per_round: int
    samples: float


@dataclass(frozen=True)
class Cost:
    """The costs of one algorithm on one model."""

    parameters: int
    server_memory: dict[str, int]  # every client's last update, by precision
    server_state: int  # of this algorithm
    client_state: int  # of one client, between its participations
    up: dict[str, int]  # bytes per round, by name
    down: dict[str, int]
    flops: float  # per client and round
    steps: float

    @property
    def bytes_up(self) -> int:
        return sum(self.up.values())

    @property
    def bytes_down(self) -> int:
        return sum(self.down.values())

    def energy(self, profile: DeviceProfile, crowd: Federation) -> dict[str, float]:
        """Joules of a client's round: in all, and of computing, upload, download and waiting while it computes."""
        up, down = self.bytes_up / crowd.per_round, self.bytes_down / crowd.per_round
        return {
            "total": profile.joules(self.flops, up, down),
            "compute": self.flops * profile.joules_per_flop,
            "up": up * profile.joules_per_byte_up,
            "down": down * profile.joules_per_byte_down,
            "idle": profile.seconds(self.flops) * profile.idle_watts,
        }


def estimate(
    module: nn.Module,
    sample: Tree,
    algorithm: Algorithm,
    work: Work,
    crowd: Federation,
    run: Forward = call,
    full_layout: Layout | None = None,
) -> Cost:
    """The cost of a round of this algorithm on this model (with this layout, if given) and a sample of this shape."""
    full_layout = Layout.of(module) if full_layout is None else full_layout
    layout, everything = full_layout.shared, full_layout.flatten(module)
    x, personal = everything[: layout.size], everything[layout.size :]
    state = State.first(algorithm, layout, x, 0, personal={PERSONAL: personal} if len(personal) else None)
    server = sum(_bytes(tree) for tree in (state.x, state.gather, state.server, state.wire))
    rows = {name: r.row_bytes for name, r in rows_of(state)}
    server += sum(size * crowd.clients for name, size in rows.items() if name != "clients")
    steps = local_steps(work, crowd.samples)
    return Cost(
        layout.size,
        {name: codec.row_size(layout) * crowd.clients for name, codec in PRECISIONS.items()},
        server,
        rows["clients"],
        uploads(algorithm, layout, x, state, crowd) | protocol(algorithm, layout, x, state, crowd, "up"),
        downloads(algorithm, layout, x, state, crowd) | protocol(algorithm, layout, x, state, crowd, "down"),
        client_flops(algorithm, work, forward_flops(module, sample, run), full_layout.size, crowd.samples),
        steps,
    )


def _bytes(tree: Any) -> int:
    """The bytes of the tensors in a tree of state; client tables are counted separately."""
    if isinstance(tree, Tensor):
        return tree.nbytes
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    if is_dataclass(tree) and not isinstance(tree, type):
        inner = [getattr(tree, f.name) for f in fields(tree)]
    return sum(_bytes(v) for v in inner)


# Bytes --------------------------------------------------------------------------------------------

_ENCODED = 32  # clients whose messages are encoded; the others are counted at their mean


def uploads(a: Algorithm, layout: Layout, x: Tensor, state: State, crowd: Federation) -> dict[str, int]:
    """Bytes that a round's cohort sends, by name."""
    some = max(1, min(crowd.per_round, _ENCODED))
    which = np.linspace(0, crowd.clients - 1, some).astype(np.int64)
    who = UploadContext(which, 0, 0, x[None], a.uploads, layout)
    noise = torch.Generator().manual_seed(0)
    vectors = {
        name: torch.randn(some, width, generator=noise) * 0.01 for name, width in a.widths(layout).items()
    }
    sizes = a.up.send(vectors, state.clients.get(which), who).sizes
    return {name: round(float(lengths.mean()) * crowd.per_round) for name, lengths in sizes.items()}


def downloads(a: Algorithm, layout: Layout, x: Tensor, state: State, crowd: Federation) -> dict[str, int]:
    """Bytes that a round's cohort receives, by name; with a hidden state, all messages since the last participation."""
    noise = torch.randn(len(x), generator=torch.Generator().manual_seed(1)) * 0.01
    vectors = a.send(x + noise, state.server, crowd.clients)
    version = a.down.send(vectors, state.wire, BroadcastContext(a.downloads, 1, 0, layout)).version
    missed = math.ceil(crowd.clients / crowd.per_round) * sum(version.sizes.values())
    since = replace(version, upto=missed)
    new = {name: torch.zeros_like(v)[None] for name, v in a.down.init_client_state().items()}
    sizes, _ = a.down.message_bytes({1: since}, np.ones(1, np.int64), new)
    return {name: int(size[0]) * crowd.per_round for name, size in sizes.items()}


def protocol(
    a: Algorithm, layout: Layout, x: Tensor, state: State, crowd: Federation, direction: str
) -> dict[str, int]:
    """Bytes that a gather counts itself, as secure sums do, whose messages grow with the cohort."""
    if not a.gather.traits().sums_only:
        return {}
    acc, one, n = a.gather.zero(x), torch.ones(1, 1), math.ceil(crowd.samples)
    sent = {name: v[None] for name, v in a.send(x, state.server, crowd.clients).items()}
    vectors = {name: torch.zeros(1, width) for name, width in a.widths(layout).items()}
    for client in range(crowd.per_round):
        up = Uploads(np.array([client]), vectors, n * one, one, one, 0 * one, one.double(), sent, a.gathered)
        acc = a.gather.add(acc, up, state.gather, x)
    ctx = ServerContext(
        0, crowd.per_round, crowd.clients, crowd.clients * crowd.samples, 1.0, 1.0, 1.0, 0.0, layout,
        np.full(crowd.clients, n, np.int64), sent=sent,
    )  # fmt: skip
    named = a.gather.close(acc, state.gather, ctx)[2]
    return {
        key.partition(":")[2]: int(size) for key, size in named.items() if key.startswith(f"{direction}:")
    }


# Arithmetic ---------------------------------------------------------------------------------------


def local_steps(work: Work, samples: float) -> float:
    """K of a client with this many samples."""
    if work.steps is not None:
        return work.steps
    return (work.epochs or 1) * (1 if work.batch is None else max(1, math.ceil(samples / work.batch)))


def client_flops(a: Algorithm, work: Work, forward: float, parameters: int, samples: float) -> float:
    """Eq. 22 for one client and round."""
    both, ops = 3 * forward, operations(a, work)
    processed = (
        work.epochs * samples
        if work.epochs is not None and work.steps is None
        else (work.steps or 1) * (work.batch or samples)
    )
    steps = local_steps(work, samples)
    return (
        processed * both * (1 + ops.more_gradients)
        + (steps * ops.per_step + ops.per_participation) * parameters
        + ops.full_gradients * samples * both
    )


@dataclass(frozen=True)
class Operations:
    """A rule's arithmetic per parameter, and the number of gradients over the full local set."""

    per_step: float
    per_participation: float
    full_gradients: int
    more_gradients: int = 0  # of a step's batch, besides the first


class Elements(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers that elementwise operations write, and counts twice those that scale an addend."""

    FREE = re.compile(
        r"aten\.(_?to_copy|_unsafe_view|view|expand|clone|detach|repeat|zeros|ones|full|empty|alias|slice|select)"
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and not self.FREE.match(str(func)):
            self.count += out.numel() * (1 if (kwargs or {}).get("alpha", 1) == 1 else 2)
        return out


def operations(a: Algorithm, work: Work) -> Operations:
    """A rule's arithmetic besides gradients: Table 9 for FedGBO's family, for others counted on 1,000 numbers."""
    d, full, more = 1000, [], []
    x, one = torch.zeros(d), torch.ones(1, 1)

    def full_grad(y: Tensor) -> Tensor:
        full.append(1)
        return torch.ones(1, d)

    def again(y: Tensor) -> Tensor:
        more.append(1)
        return torch.ones(1, d)

    layout = Layout.from_shapes([("w", (d,))])
    down = {k: v[None] for k, v in a.send(x, a.server.init(x, layout), 1, 1.0).items() if k != "x"}
    memory = {k: v.reshape(1, -1) for k, v in a.rule.init(x).items()}
    ctx = ClientContext(x[None], down, memory, 0.1, one, one, one, 0, layout, full_grad, again)
    g, y = torch.ones(1, d), x[None].clone()
    step, participation = Elements(), Elements()
    with participation:
        s = a.rule.start(ctx)
    with step:
        _, s = a.rule.step(g, y, s, ctx)
    with participation:
        a.rule.finish(y, s, ctx)
    got = finished(a.rule, y, s, ctx)
    full = full[: len(full) // 2]  # it was finished twice
    with participation:
        a.rule.remember(got, s, ctx)
    local = Elements()
    if (optimizer := work.local) is not None:
        with local:
            optimizer.follow(g, optimizer.init(y), 1)
    extra = (
        round(local.count / d)
        + 2 * bool(work.momentum)
        + 2 * bool(work.weight_decay)
        + 3 * (work.clip is not None)
    )
    published = next((c for link in _links(a.rule) if (c := _table9(link)) is not None), None)
    per_step = round(step.count / d) + 2 if published is None else published
    return Operations(per_step + extra, round(participation.count / d), len(full), len(more))


def _links(rule: Rule) -> Iterator[Rule]:
    yield from rule.rules if isinstance(rule, Chain) else (rule,)


def _table9(rule: Rule) -> int | None:
    table = FIXED if isinstance(rule, Fixed) else MOVING if isinstance(rule, Tracked) else {}
    return table.get(type(rule.optimizer)) if isinstance(rule, Fixed | Tracked) else None
