"""Gradients of a block by PyTorch: a loop of plain autograd, or vmap over clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedbraid.core.device import seed
from fedbraid.data import tree
from fedbraid.data.batches import Batch
from fedbraid.data.call import ForwardModule
from fedbraid.data.task import Task
from fedbraid.data.tree import Chunks, Tree
from fedbraid.engines.frozen_features import FrozenFeatureCache

CHUNK = 512  # samples of an evaluation batch


class TorchGradient:
    """The base of both backends: a module, and a batched forward pass that evaluates models."""

    def __init__(self, task: Task, precision: torch.dtype | None = None) -> None:
        self.layout, self.loss, self.run = task.full_layout, task.per_example, task.run
        self.device, self.precision = task.device, precision
        self.module = task.module().to(task.device)
        self.predict, self.task = task.predict, task
        convolves = any(isinstance(m, nn.Conv2d) and m.in_channels > 1 for m in self.module.modules())
        like = task.like[0]
        self.channels_last = convolves and isinstance(like, Tensor | Chunks) and like.ndim == 4
        self.test = None if task.test is None else task.test[0]

    @cached_property
    def tested(self) -> nn.Module:
        """The module that evaluates models, built at the first evaluation."""
        return self.task.module().to(self.device).eval()

    @cached_property
    def frozen_test(self) -> FrozenFeatureCache | None:
        """The cached frozen features of the test set."""
        return FrozenFeatureCache.of_test(self.task, self.tested, CHUNK)

    def cast(self) -> AbstractContextManager[Any]:
        """Compute products in the selected precision; weights are not cached, because a cache would outlive them."""
        if self.precision is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.precision, cache_enabled=False)

    def outputs(self, x: Tensor, inputs: Tree) -> Iterator[tuple[slice, Tree, Any]]:
        """(rows, inputs, outputs) of a table, chunk by chunk."""
        self.layout.load(self.tested, x)
        cache = self.frozen_test if inputs is self.test else None
        for lo in range(0, tree.length(inputs), CHUNK):
            at = slice(lo, lo + CHUNK)
            a = tree.numbers(tree.take(inputs, at))
            with cache.at(torch.arange(lo, lo + tree.length(a))) if cache else nullcontext():
                out = self.run(self.tested, a)
            yield at, a, out

    @torch.no_grad()
    def evaluate(self, x: Tensor, inputs: Tree, targets: Tree) -> tuple[Tensor, Tensor | None]:
        """(a loss per example, the predicted classes or None)."""
        losses, classes = [], []
        for at, a, out in self.outputs(x, inputs):
            losses.append(self.loss(out, tree.take(targets, at), a))
            if (guessed := self.predict(out)) is not None:
                classes.append(guessed)
        return torch.cat(losses), torch.cat(classes) if classes else None


class LoopGradient(TorchGradient):
    """One client after the other through plain autograd, parameters being views of flat rows."""

    name, vectorized = "loop", False

    def __init__(self, task: Task, precision: torch.dtype | None = None) -> None:
        super().__init__(task, precision)
        self.module.train()
        named = dict(self.module.named_parameters())
        buffers = dict(self.module.named_buffers())
        self.slots = [(s, named[s.name]) for s in self.layout if not s.buffer]
        self.buffers = [(s, buffers[s.name]) for s in self.layout if s.buffer]
        self.grads = [(s, None if s.buffer else named[s.name]) for s in self.layout]
        self._out = torch.empty(0, 0)
        self._at = 0
        self.frozen = FrozenFeatureCache.of(task, self.module)
        self.compares, self.make = task.compares, task.module
        self.references: dict[str, Tensor] = {}

    @cached_property
    def spare(self) -> nn.Module:
        """A second module, for reference models and custom loops."""
        return self.make().to(self.device)

    def set_references(self, x: Tensor, previous: Tensor) -> None:
        """Set the models whose outputs the loss takes besides the trained one's: the server's, and the clients' last."""
        self.references = {"reference": x, "previous": previous}

    @torch.no_grad()
    def _reference_outputs(self, inputs: Tree, y: Tensor, i: int) -> dict[str, Any]:
        """The reference models' outputs for these inputs; the server's model gets the client's personal parameters."""
        outputs = {}
        for name, rows in self.references.items():
            row = rows[min(i, len(rows) - 1)]
            module = self.layout.load(self.spare, torch.cat([row, y[len(row) :]])).eval()
            outputs[name] = self.run(module, inputs)
        return outputs

    def __call__(self, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if self._out.shape != y.shape:
            self._out = torch.zeros_like(y)
        G = self._out

        def keep(i: int) -> None:
            torch.cat([_flat(slot.size, p, G) for slot, p in self.grads], out=G[i])

        return G, self._each(y, batch, keep, lambda i: G[i].zero_())

    def descend(self, y: Tensor, batch: Batch, lr: float) -> Tensor:
        """A step of each client along its gradient: (losses)."""

        def go(i: int) -> None:
            for _, p in self.slots:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-lr)
                    p.grad = None

        return self._each(y, batch, go, lambda i: None)

    def _each(
        self, y: Tensor, batch: Batch, then: Callable[[int], object], absent: Callable[[int], object]
    ) -> Tensor:
        """Losses; `then` uses the parameters' gradients of each client with samples, `absent` handles the others."""
        losses = torch.zeros(len(y), device=y.device)
        is_single_client = len(y) == 1 and batch.weight is None
        for i in range(len(y)):
            client_batch = batch if is_single_client else batch.client(i)
            if client_batch.rows.shape[1]:
                losses[i] = self._one(y[i], client_batch, i)
                then(i)
            else:
                absent(i)
        return losses

    def _one(self, y: Tensor, batch: Batch, i: int) -> Tensor:
        """A client's loss, and its gradient at the parameters."""
        self._point(y)
        if batch.noise is not None:
            seed(int(batch.noise[0]), self.device)
        x, t = batch.first_client()
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        more = self._reference_outputs(x, y, i) if self.compares else {}
        with self.frozen.at(batch.rows[0]) if self.frozen else nullcontext(), self.cast():
            loss = self.loss(self.run(self.module, x), t, x, **more).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        for slot, buffer in self.buffers:
            y[slot.offset : slot.end] = buffer.reshape(-1)
        return loss.detach()

    def _point(self, y: Tensor) -> None:
        """Make the module's tensors views of this row."""
        for slot, buffer in self.buffers:
            buffer.copy_(y[slot.offset : slot.end].view(slot.shape))
        if y.data_ptr() == self._at:
            return
        self._at = y.data_ptr()
        for slot, p in self.slots:
            p.data = y[slot.offset : slot.end].view(slot.shape)


def _flat(size: int, p: nn.Parameter | None, g: Tensor) -> Tensor:
    """Take a parameter's gradient, so that the next one replaces it instead of being added."""
    if p is None or p.grad is None:
        return g.new_zeros(size)
    gradient, p.grad = p.grad, None
    return (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1)


class VmapGradient(TorchGradient):
    """All clients of a block at once: fast where their weights are used in batched matrix products."""

    name, vectorized = "vmap", True

    def __init__(self, task: Task, precision: torch.dtype | None = None) -> None:
        super().__init__(task, precision)

        called = ForwardModule(self.module, self.run)

        def one(params: dict[str, Tensor], x: Tree, t: Tree, w: Tensor) -> Tensor:
            each: Tensor = self.loss(functional_call(called, params, (x,)), t, x)
            return (each * w).sum() / w.sum().clamp_min(1e-12)

        self._both = vmap(grad_and_value(one), (0, 0, None if task.targets is None else 0, 0))
        self._ones = torch.empty(0)

    def __call__(self, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        weight = batch.weight
        if weight is None:
            if self._ones.shape != batch.rows.shape:
                self._ones = torch.ones(batch.rows.shape, device=y.device)
            weight = self._ones
        params = {f"module.{name}": v for name, v in self.layout.views(y).items()}
        with self.cast():
            grads, losses = self._both(params, batch.x(), batch.y(), weight)
        return torch.cat([g.reshape(len(y), -1) for g in grads.values()], 1), losses

    @staticmethod
    def can_follow(task: Task) -> bool:
        """Whether the task allows vmap: no random model, no statistics, no ragged samples."""
        return not (task.stochastic or task.compares or task.ragged or task.full_layout.buffers is not None)


def why_not_vmap(task: Task) -> str | None:
    """Why vmap does not compute this model's gradients, or None: it is compared with the loop on two clients, twice.

    A user's forward pass or loss may do what vmap does not support, or keep Python state, which then changes once for a
    block of clients instead of once for each.
    """
    inputs, targets = task.like
    count = tree.length(inputs)
    batch = Batch(inputs, targets, torch.tensor([[0], [count - 1]], device=task.device))
    y = task.vector(0).repeat(2, 1)
    together, each = VmapGradient(task), LoopGradient(task)
    for _ in range(2):
        try:
            got, _ = together(y, batch)
        except Exception as error:
            message = next(iter(str(error).splitlines()), "")
            return f"vmap cannot follow the model or its loss ({type(error).__name__}: {message[:100]})"
        want, _ = each(y, batch)
        off = torch.linalg.vector_norm(got - want, dim=1)
        if bool((off > 0.01 * torch.linalg.vector_norm(want, dim=1) + 1e-6).any()):
            return "the model gives other gradients for a block of clients than for one after the other: it keeps state"
    return None
