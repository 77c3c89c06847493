"""The only client code: one visit of a block of clients, in whatever process or machine it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedbraid.core import rng
from fedbraid.core.context import ClientContext, Vectors
from fedbraid.core.device import placed
from fedbraid.core.link import UploadContext
from fedbraid.core.local_training import Gradient, initial_model, train
from fedbraid.core.metric_names import PERSONAL, PREVIOUS
from fedbraid.core.rule import finished
from fedbraid.core.traits import LocalLoop
from fedbraid.core.work import batch_sizes
from fedbraid.data.batches import Batch, DrawnBatches, augmenting
from fedbraid.data.tree import Tree
from fedbraid.engines.autograd import LoopGradient
from fedbraid.engines.engine import Reply, Setup, TrainRequest
from fedbraid.errors import FedbraidError, RunError

pass


def client_update(
    setup: Setup, grad: Gradient, request: TrainRequest, frames: dict[str, bytes] | None = None
) -> Reply:
    """Train a block of clients from one version: finish, cross, remember.

    A real client, alone in its block, gives `frames` and gets there what it is to send.
    """
    task = setup.task.block_view(request.clients, request.version, setup.seed)
    if task is not setup.task:
        setup = replace(setup, task=task)
    a, work = setup.algorithm, setup.work
    traits = a.rule.traits()
    hide = None if traits.example_privacy is None else "simulated" if frames is None else "real"
    batches = DrawnBatches(task, work, request.clients, request.version, setup.seed, hide)
    x, who = request.download["x"][None], request.participation
    ctx = ClientContext(
        x=x,
        download={name: v[None] for name, v in request.download.items() if name != "x"},
        client_state=request.client_state,
        lr=float(who.lr[0]),
        K=who.K.to(x),
        a=who.a.to(x),
        n=who.n.to(x),
        t=request.version,
        layout=task.layout,
        full_grad=full_gradient(setup, grad, request),
        full_layout=task.full_layout,
    )
    loop, personal = traits.local_loop, dict[str, Tensor]()
    if task.compares:
        assert isinstance(grad, LoopGradient)
        grad.set_references(x, request.client_state[PREVIOUS])
    with torch.random.fork_rng(devices=[]) if task.stochastic or loop is not None else nullcontext():
        if loop is None:
            try:
                y, s, loss = train(a.rule, grad, ctx, batches, work)
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                raise _lone_sample(batches) from error
        else:
            y, s, loss = run_custom_loop(loop, setup, grad, ctx, batches)
        if task.compares:
            personal[PREVIOUS] = y.clone()
        if PERSONAL in request.client_state:
            personal[PERSONAL], y = y[:, task.layout.size :], y[:, : task.layout.size]
        vectors = finished(a.rule, y, s, ctx)
    upload = UploadContext(
        request.clients, request.version, setup.seed, x, a.uploads, task.layout, frames, ctx.download
    )
    sent = a.up.send(vectors, request.client_state, upload)
    memory = {**request.client_state, **a.rule.remember(sent.received, s, ctx), **sent.memory, **personal}
    return Reply(who, sent.received, memory, sent.sizes, loss)


def _lone_sample(batches: DrawnBatches) -> RunError:
    """The error for a layer that has no statistics of a batch of one sample."""
    rest = batches.n % batch_sizes(batches.n, batches.work)
    single = batches.clients[(rest == 1) | (batches.n == 1) | (batches.work.batch == 1)]
    who = f"client {single[0]}" if len(single) else "a client"
    return RunError(
        f"{who} trains on a batch of one sample, of which BatchNorm has no statistics; use Work(last='fill') or"
        " last='drop', another batch size, or GroupNorm"
    )


@dataclass(frozen=True)
class ClientBatches:
    """A client's batches of one participation, which may be iterated several times."""

    batches: DrawnBatches
    i: int

    def __len__(self) -> int:
        return int(self.batches.K[self.i])

    def __iter__(self) -> Iterator[tuple[Tree, Tree]]:
        for k in range(len(self)):
            yield self.batches.batch(k).client(self.i).first_client()


def run_custom_loop(
    loop: LocalLoop, setup: Setup, grad: Gradient, ctx: ClientContext, batches: DrawnBatches
) -> tuple[Tensor, Vectors, Tensor]:
    """Local training by a user's loop, client after client: (y, the rule's state, mean loss)."""
    assert isinstance(grad, LoopGradient)
    task, rows, losses = setup.task, [], []
    rule, personal = setup.algorithm.rule, ctx.client_state.get(PERSONAL)
    start = initial_model(rule.traits(), ctx).expand(len(batches.clients), -1)
    for i, client in enumerate(batches.clients):
        begin = start[i]
        y = begin if personal is None else torch.cat([begin, personal[i]])
        module = task.full_layout.load(grad.spare, y).train()
        module.zero_grad(set_to_none=True)
        one = replace(
            ctx, client_state={k: v[i : i + 1] for k, v in ctx.client_state.items()}, K=ctx.K[i : i + 1], a=ctx.a[i : i + 1],
            n=ctx.n[i : i + 1],
        )  # fmt: skip
        torch.manual_seed(rng.key(setup.seed, "local", ctx.t, int(client)))
        try:
            losses.append(float(loop(module, ClientBatches(batches, i), one)))
        except FedbraidError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise RunError(
                f"the local loop fails for client {client} ({why}); it must train the module and return its mean loss;"
                " fix it and resume (finished steps are stored)"
            ) from error
        rows.append(task.full_layout.flatten(module))
    return torch.stack(rows), rule.start(ctx), torch.tensor(losses, device=ctx.x.device)


def first_client_state(setup: Setup) -> Vectors:
    """A client's state before its first participation."""
    task, seed = setup.task, setup.seed
    return {
        **setup.algorithm.init_client_state(task.initial(seed), task.layout),
        **task.initial_personal_state(seed),
    }


def full_gradient(setup: Setup, grad: Gradient, request: TrainRequest) -> Callable[[Tensor], Tensor]:
    """y -> the gradient of each client's full local objective, decay included, in chunks that fit in memory.

    Samples are augmented as they are in training, in batches of 128 as FedGBO's authors do. Personal parameters are
    those at the start of the participation.
    """
    task, seed, decay = setup.task, setup.seed, setup.work.penalty
    clients, version, personal = request.clients, request.version, request.client_state.get(PERSONAL)
    n, chunk = task.sizes[clients], 256 if task.augment is None else 128

    def at(y: Tensor) -> Tensor:
        y, d = y.expand(len(clients), -1).contiguous(), y.shape[1]
        if personal is not None:
            y = torch.cat([y, personal], 1)
        total = torch.zeros_like(y)
        for lo in range(0, int(n.max()), chunk):
            column = np.arange(lo, min(lo + chunk, int(n.max())))
            inside = column < n[:, None]
            rows = task.row_ids(clients, np.minimum(column, n[:, None] - 1))
            weight = placed(inside.astype(np.float32), y.device)
            noise = rng.bits(seed, "full", version, clients, lo) >> np.uint64(1) if task.stochastic else None
            draws = augmenting(task, seed, "augment the whole", version, clients, lo, len(column))
            some = Batch(
                task.inputs, task.targets, rows, None if inside.all() else weight, task.augment, draws, noise
            )
            g, _ = grad(y, some)
            total += g * placed(inside.sum(1) / n, y.device).to(y.dtype)[:, None]
        return (total + decay * y if decay else total)[:, :d]

    return at
