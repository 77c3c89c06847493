"""Gradients with example-level DP by PyTorch: each example's gradient is clipped, and the sum is noised."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from fedbraid.core import rng
from fedbraid.core.local_training import Gradient
from fedbraid.core.traits import ExamplePrivacy
from fedbraid.data import tree
from fedbraid.data.batches import Batch
from fedbraid.data.call import ForwardModule
from fedbraid.data.task import Task
from fedbraid.data.tree import Tree
from fedbraid.engines.autograd import LoopGradient, TorchGradient, VmapGradient
from fedbraid.errors import FedbraidError

MAX_NUMBERS = 2**26  # numbers of per-example gradients in memory at a time


class PerExampleGradient:
    """The base of both backends: (Σ_i min(1, C/‖g_i‖) g_i + N(0, (zC)²)) over the planned samples."""

    name, vectorized = "loop", False

    def __init__(self, privacy: ExamplePrivacy, base: TorchGradient) -> None:
        self.privacy, self.base = privacy, base

    def evaluate(self, x: Tensor, inputs: Tree, targets: Tree) -> tuple[Tensor, Tensor | None]:
        return self.base.evaluate(x, inputs, targets)

    def __call__(self, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        secret = batch.secret()
        sums, losses = self.sums(y, batch)
        return sums / secret.planned + secret.noise(self.privacy, sums), losses

    def sums(self, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(sums of clipped gradients `[m, d]`, mean losses `[m]`)."""
        raise NotImplementedError

    def clipped(self, each: Tensor) -> Tensor:
        """The sum of per-example gradients `[·, B, d]`, each clipped."""
        norm = torch.linalg.vector_norm(each, dim=-1)
        shrink = self.privacy.clip / norm.clamp_min(self.privacy.clip)
        return torch.einsum("...b,...bd->...d", shrink, each)


class LoopedPerExample(PerExampleGradient):
    """One example after the other through plain autograd: any model."""

    base: LoopGradient

    def sums(self, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        total, losses = torch.zeros_like(y), torch.zeros(len(y), device=y.device)
        for i in range(len(y)):
            client_batch = batch if len(y) == 1 and batch.weight is None else batch.client(i)
            for b in range(count := client_batch.rows.shape[1]):
                g, loss = self.base(y[i : i + 1], _single(client_batch, b))
                total[i] += self.clipped(g)
                losses[i] += loss[0] / count
        return total, losses


class VectorizedPerExample(PerExampleGradient):
    """All examples of a block's clients at once by vmap, as many clients at a time as fit in memory."""

    name, vectorized = "vmap", True

    def __init__(self, privacy: ExamplePrivacy, base: VmapGradient, task: Task) -> None:
        super().__init__(privacy, base)
        called = ForwardModule(base.module, base.run)

        def one(params: dict[str, Tensor], x: Tree, t: Tree, w: Tensor) -> Tensor:
            batched: Tensor = base.loss(
                functional_call(called, params, (_single_batch(x),)), _single_batch(t), _single_batch(x)
            )
            return batched[0] * w

        targets = None if task.targets is None else 0
        examples = vmap(grad_and_value(one), (None, 0, targets, 0))
        self._each = vmap(examples, (0, 0, targets, 0))

    def sums(self, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        m, B = batch.rows.shape
        weight = torch.ones(m, B, device=y.device) if batch.weight is None else batch.weight
        step = max(1, MAX_NUMBERS // (B * y.shape[1]))
        chunks = [
            self._some(y[lo : lo + step], _clients(batch, lo, lo + step), weight[lo : lo + step])
            for lo in range(0, m, step)
        ]
        losses = torch.cat([chunk[1] for chunk in chunks])
        return torch.cat([chunk[0] for chunk in chunks]), losses / weight.sum(1).clamp_min(1)

    def _some(self, y: Tensor, batch: Batch, weight: Tensor) -> tuple[Tensor, Tensor]:
        params = {f"module.{name}": v for name, v in self.base.layout.views(y).items()}
        with self.base.cast():
            grads, losses = self._each(params, batch.x(), batch.y(), weight)
        each = torch.cat([g.reshape(*weight.shape, -1) for g in grads.values()], 2)
        return self.clipped(each), losses.sum(1)


def per_example_gradient(
    privacy: ExamplePrivacy, task: Task, backend: str, precision: torch.dtype | None
) -> Gradient:
    """Private gradients by vmap or by a loop."""
    if backend == "loop":
        return LoopedPerExample(privacy, LoopGradient(task, precision))
    return VectorizedPerExample(privacy, VmapGradient(task, precision), task)


def vmap_follows_examples(task: Task) -> bool:
    """Whether vmap supports this model, example by example."""
    if task.stochastic or task.compares or task.full_layout.buffers is not None:
        return False
    rows, y = task.rows[[0, -1]].view(1, 2), task.full_layout.flatten(task.module()).to(task.device)
    try:  # a user's forward or loss may do what vmap does not support
        VectorizedPerExample(ExamplePrivacy(1.0, 0.0), VmapGradient(task), task).sums(
            y[None], Batch(task.inputs, task.targets, rows)
        )
    except FedbraidError:
        raise
    except Exception:
        return False
    return True


def _single(batch: Batch, b: int) -> Batch:
    """One example of a batch of one client, with separate random numbers if the model draws some."""
    noise = None if batch.noise is None else rng.bits(0, "example", batch.noise, b) >> np.uint64(1)
    draws = None if batch.draws is None else batch.draws[:, b : b + 1]
    return replace(batch, rows=batch.rows[:, b : b + 1], draws=draws, noise=noise, hidden=None)


def _clients(batch: Batch, lo: int, hi: int) -> Batch:
    draws = None if batch.draws is None else batch.draws[lo:hi]
    return replace(batch, rows=batch.rows[lo:hi], weight=None, draws=draws, noise=None, hidden=None)


def _single_batch(x: Tree) -> Tree:
    """A sample as a batch of one."""
    return tree.map(lambda leaf: leaf[None], x)
