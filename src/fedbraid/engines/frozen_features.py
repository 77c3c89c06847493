"""Cached frozen features: the outputs of frozen modules are computed once for each sample, and stored."""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedbraid.core.layout import _NORMS
from fedbraid.data import tree
from fedbraid.data.call import Forward
from fedbraid.data.task import Task
from fedbraid.data.tree import Tree

log = logging.getLogger("fedbraid")

Ends = NDArray[np.int64]
TOGETHER = (
    32  # samples of a client in one pass, always the same ones, so that bits do not depend on the order
)
IN_MEMORY = 2**30  # bytes that may be held in memory; a larger table is a file


class FrozenFeatureCache:
    """Replaces the forward passes of a model's frozen modules by a table of their outputs.

    A module qualifies if neither it nor its inputs depend on trained weights, it draws no random numbers, has no
    running statistics, and treats every sample separately.
    """

    def __init__(
        self,
        module: nn.Module,
        run: Forward,
        modules: list[_FrozenModule],
        inputs: Tree,
        rows: Tensor,
        ends: Ends,
    ) -> None:
        self.module, self.modules, self.inputs, self.order, self.ends = module, modules, inputs, rows, ends
        self.run = run
        self.group = np.zeros(
            tree.length(inputs), np.int64
        )  # the group of each row; a row of two clients is in the first's
        self.group[rows.cpu().numpy()[::-1]] = np.repeat(np.arange(len(ends) - 1), np.diff(ends))[::-1]
        self.done = np.zeros(len(ends) - 1, bool)
        self.rows: Tensor | None = None
        self.ahead = 0  # modules yet to run in a pass that fills the table
        for frozen in modules:
            frozen.table = [_allocate(tree.length(inputs), leaf) for leaf in frozen.sample]
            frozen.module.forward = self._stand_in(frozen, frozen.module.forward)

    @classmethod
    def of(cls, task: Task, module: nn.Module) -> FrozenFeatureCache | None:
        """The cache of this module's frozen features in training; None if there is nothing to cache."""
        if task.augment is not None or not len(task.rows):  # a deployment's server holds no samples
            return None
        pieces = [np.arange(lo, hi, TOGETHER) for lo, hi in zip(task.offsets[:-1], task.offsets[1:])]
        ends = np.append(np.concatenate(pieces), task.offsets[-1])
        return cls._of(task, module, task.inputs, task.rows, ends)

    @staticmethod
    def suits(task: Task) -> bool:
        """Whether the model has such modules."""
        if task.augment is not None or not task.summary.frozen:
            return False
        if not all(isinstance(leaf, Tensor) for leaf in tree.leaves(task.inputs)):
            return False
        return bool(_frozen_modules(task.module(), task.run, task.sample))

    @classmethod
    def of_test(cls, task: Task, module: nn.Module, chunk: int) -> FrozenFeatureCache | None:
        """The cache for the test set, which is evaluated chunk by chunk."""
        if task.test is None:
            return None
        inputs, count = task.test[0], tree.length(task.test[0])
        ends = np.append(np.arange(0, count, chunk), count)
        return cls._of(task, module, inputs, torch.arange(count, device=task.device), ends)

    @classmethod
    def _of(
        cls, task: Task, module: nn.Module, inputs: Tree, rows: Tensor, ends: Ends
    ) -> FrozenFeatureCache | None:
        if all(p.requires_grad for p in module.parameters()):
            return None
        if not all(isinstance(leaf, Tensor) for leaf in (*tree.leaves(inputs), *tree.leaves(task.inputs))):
            return None  # lengths differ between batches, or the table is not in memory
        two = tree.numbers(tree.take(inputs, rows[[0, -1]]))
        frozen = _frozen_modules(module, task.run, two)
        size = sum(f.bytes for f in frozen) * tree.length(inputs)
        if not frozen or (size > IN_MEMORY and size > shutil.disk_usage(tempfile.gettempdir()).free // 2):
            return None
        log.info("kept once computed: %s (%.1f MB)", ", ".join(p.name for p in frozen), size / 1e6)
        return cls(module, task.run, frozen, inputs, rows, ends)

    @contextmanager
    def at(self, rows: Tensor) -> Iterator[None]:
        """Within this context, frozen modules return the stored outputs of these rows."""
        for group in np.unique(self.group[rows.cpu().numpy()]):
            if not self.done[group]:
                self._fill(int(group))
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None

    def _fill(self, group: int) -> None:
        self.rows = self.order[self.ends[group] : self.ends[group + 1]]
        self.ahead = len(self.modules)
        x = tree.numbers(tree.take(self.inputs, self.rows))
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                self.run(self.module, x)
        except _StopForward:
            pass
        self.done[group] = True

    def _stand_in(self, frozen: _FrozenModule, forward: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if self.rows is None:
                return forward(*args, **kwargs)
            if not self.ahead:
                leaves: list[Any] = [t[self.rows] for t in frozen.table]
                return pytree.tree_unflatten(leaves, frozen.spec)
            out = forward(*args, **kwargs)
            for t, leaf in zip(frozen.table, pytree.tree_leaves(out)):
                t[self.rows] = leaf
            self.ahead -= 1
            if not self.ahead:
                raise _StopForward
            return out

        return stand_in


class _StopForward(Exception):
    """The last frozen module has run, so that the rest of the pass is not needed."""


@dataclass
class _FrozenModule:
    name: str
    module: nn.Module
    sample: list[Tensor]  # its output for two samples
    spec: pytree.TreeSpec

    def __post_init__(self) -> None:
        self.table: list[Tensor] = []

    @property
    def bytes(self) -> int:
        return sum(math.prod(leaf.shape[1:]) * leaf.element_size() for leaf in self.sample)


def _frozen_modules(module: nn.Module, run: Forward, x: Tree) -> list[_FrozenModule]:
    """The outermost modules that qualify, in the order they run, found by two passes over two samples."""
    able = {name: m for name, m in module.named_modules() if name and _still(m)}
    outer = {n: m for n, m in able.items() if not any(n.startswith(f"{o}.") for o in able)}
    with torch.random.fork_rng(devices=[]):
        first, second = _observe(module, run, x, outer), _observe(module, run, tree.take(x, [0, 0]), outer)
    names = [s.name for s in first]
    if names != [s.name for s in second]:
        return []
    return [
        _FrozenModule(a.name, outer[a.name], pytree.tree_leaves(a.out), pytree.tree_structure(a.out))
        for a, b in zip(first, second)
        if names.count(a.name) == 1 and not (a.draws or a.moves) and _sample_by_sample(a.out, b.out)
    ]


@dataclass
class _Observed:
    """One observed forward pass of a module."""

    name: str
    moves: bool  # its inputs depend on trained weights
    draws: bool  # it drew random numbers
    out: Any


def _observe(module: nn.Module, run: Forward, x: Tree, submodules: dict[str, nn.Module]) -> list[_Observed]:
    observed: list[_Observed] = []
    state: dict[str, Tensor] = {}
    hooks = []
    for name, submodule in submodules.items():

        def before(submodule: nn.Module, args: Any, name: str = name) -> None:
            state[name] = torch.get_rng_state()

        def after(submodule: nn.Module, args: Any, kwargs: Any, out: Any, name: str = name) -> None:
            draws = not torch.equal(state[name], torch.get_rng_state())
            observed.append(_Observed(name, _moves((args, kwargs)), draws, out))

        hooks += [
            submodule.register_forward_pre_hook(before),
            submodule.register_forward_hook(after, with_kwargs=True),
        ]
    try:
        run(module, x)
    finally:
        for hook in hooks:
            hook.remove()
    return observed


def _still(m: nn.Module) -> bool:
    """Whether a module has neither trained weights nor statistics, and caching saves arithmetic."""
    inner = list(m.modules())
    weighs = any(
        p.ndim > 1 for k in inner if not isinstance(k, nn.Embedding) for p in k.parameters(recurse=False)
    )
    changes = any(isinstance(k, _NORMS) for k in inner) or any(p.requires_grad for p in m.parameters())
    return weighs and not changes


def _moves(given: Any) -> bool:
    """Whether a module's inputs depend on trained weights."""
    return any(t.requires_grad for t in pytree.tree_leaves(given) if isinstance(t, Tensor))


def _sample_by_sample(two: Any, one: Any) -> bool:
    leaves, repeated = pytree.tree_leaves(two), pytree.tree_leaves(one)
    return len(leaves) == len(repeated) > 0 and all(
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.ndim > 0
        and len(a) == len(b) == 2
        and torch.allclose(a[0].float(), b[0].float(), rtol=1e-3, atol=1e-4)
        for a, b in zip(leaves, repeated)
    )


def _allocate(rows: int, like: Tensor) -> Tensor:
    """A table of so many rows: in memory, or in an unnamed file if it is large."""
    shape = (rows, *like.shape[1:])
    if math.prod(shape) * like.element_size() <= IN_MEMORY or like.device.type != "cpu":
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    with tempfile.NamedTemporaryFile(prefix="fedbraid-") as file:  # the mapping outlives the name
        return torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=like.dtype).view(shape)
