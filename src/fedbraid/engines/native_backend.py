"""Gradients by code made for the model: C++ with every shape constant, compiled once and kept in a cache.

Small networks on small batches spend their time in PyTorch's overhead; here a whole block of clients is one
call, samples of a batch side by side in the vector lanes, clients on threads.
"""

from __future__ import annotations

import copy
import ctypes
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, fx, nn

from fedbraid.core.traits import ExamplePrivacy
from fedbraid.data import tree
from fedbraid.data.batches import Batch
from fedbraid.data.call import Loss, by_signature, logits
from fedbraid.data.task import Task
from fedbraid.data.tree import Padded, Tree
from fedbraid.engines.accelerators import normals, robust, sums, swap
from fedbraid.engines.autograd import TorchGradient
from fedbraid.errors import DataError, EngineError, NativeUnavailable
from fedbraid_native.build import FLAGS, compiler, lanes
from fedbraid_native.emit import generate
from fedbraid_native.errors import CompileError, Unsupported
from fedbraid_native.frontend.tracer import first_line, trace
from fedbraid_native.ir import Graph
from fedbraid_native.runtime import EvaluateJob, GradientJob, Library

__all__ = ["Native"]

R = TypeVar("R")

swap.install()
normals.install()
robust.install()
sums.install()

ROOM = 64  # samples of a client that a library has room for at first, where they depend on each other


class Native:
    """The gradient of every client's batch, `native(y[m, d], batch) -> (G[m, d], losses[m])`.

    G is a buffer that the next call of the same block size uses again. Results do not depend on the
    number of threads, nor on which clients share a block.
    """

    name = "native"
    vectorized = True

    @classmethod
    def supports(cls, task: Task, examples: bool = False) -> str | None:
        """None if this task can run natively here, else one sentence that says why not."""
        try:
            graph = _graph(task)
            if examples:
                generate(graph, _kind(task), lanes(), ROOM, examples)
        except Unsupported as why:
            return str(why)
        if compiler() is None:
            return "no C++ compiler was found; install g++ or set CXX"
        return None

    def __init__(
        self,
        task: Task,
        threads: int = 0,
        flags: tuple[str, ...] = FLAGS,
        examples: ExamplePrivacy | None = None,
    ) -> None:
        try:
            graph = _graph(task)
        except Unsupported as why:
            raise NativeUnavailable(f"this model cannot run natively: {why}") from why
        self.examples = examples
        self.threads = threads or torch.get_num_threads() or os.cpu_count() or 1
        self.size, self.classifies = task.full_layout.size, task.loss in ("cross_entropy", "logistic")
        self.predicts_classes = self.classifies and task.like[1].ndim == 1
        self.graph, self.loss, self.flags, self.statistics = (
            graph,
            _kind(task),
            flags,
            task.full_layout.buffers,
        )
        self.task, self.padding_rows = task, [_filler(leaf) for leaf in tree.leaves(task.like[0])]
        self._compile(ROOM)
        self._plain: TorchGradient | None = None  # for inputs longer than any that train
        self._looked_at: Tree = None  # a table whose numbers are known to be in range
        self._labels: Tensor | None = None  # and one of targets
        self._buffer = torch.empty(0, self.size)
        if isinstance(table := _lone(task.inputs), Tensor):
            use_large_pages(table)
        self._check(task)

    def _compile(self, batch: int) -> None:
        """Load the library, with room for so many samples of a client where they depend on each other."""
        private = self.examples is not None
        try:
            self.source, self.batch_capacity = generate(self.graph, self.loss, lanes(), batch, private), batch
        except Unsupported as why:
            raise NativeUnavailable(f"this model cannot run natively: {why}") from why
        try:
            self.library = Library(self.source, self.flags)
        except CompileError as why:
            raise NativeUnavailable(str(why)) from why

    def alone(self) -> Native:
        """The same code on one thread, for a thread of the caller's."""
        other = copy.copy(self)
        other.threads, other._buffer, other._plain = 1, torch.empty(0, self.size), None
        return other

    def __call__(self, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        m, size = batch.rows.shape
        if y.shape != (m, self.size):
            raise EngineError(f"parameters of shape {tuple(y.shape)} for {m} clients of {self.size}")
        if self.graph.is_batch_dependent and size > self.batch_capacity:
            self._compile(-(-size // ROOM) * ROOM)
        at, rows = y.to(torch.float32).contiguous(), batch.rows.to(torch.int64).contiguous()
        targets, wanted = batch.targets, rows
        if self.graph.targets:
            self._check_label_bounds(targets)
            if (
                targets.dtype != torch.float32 or not targets.is_contiguous()
            ):  # of those alone that are asked for
                targets, wanted = batch.y().flatten(0, 1), torch.arange(m * size)
        targets = self._targets(targets)
        weight = None if batch.weight is None else batch.weight.to(torch.float32).contiguous()
        noise = None if batch.noise is None else torch.from_numpy(batch.noise.view(np.int64))
        self._check_index_bounds(batch.inputs)
        inputs = _lone(batch.inputs)
        plain = batch.augment is None and isinstance(inputs, Tensor)
        if not (plain and inputs.is_contiguous() and inputs.dtype == torch.float32):
            plain = False
            inputs = _rows(tree.map(lambda leaf: leaf.flatten(0, 1), batch.x()))
        count = len(inputs) if plain else m * size
        if len(self._buffer) != m:
            self._buffer = torch.empty(m, self.size)
        losses = torch.empty(m)
        job = GradientJob(
            params=at.data_ptr(), constants=self.graph.constants.data_ptr(), dropout_keys=_address(noise),
            grads=self._buffer.data_ptr(), losses=losses.data_ptr(), clients=m, batch=size,
            input_rows=rows.data_ptr() if plain else None, target_rows=wanted.data_ptr(), weight=_address(weight),
            inputs=inputs.data_ptr(), input_count=count, targets=targets.data_ptr(), target_count=len(targets),
            threads=self.threads,
        )  # fmt: skip
        if self.examples is None:
            _raise(self.library.gradient(job))
        else:
            secret = batch.secret()
            job.clip, job.deviation = self.examples.clip, self.examples.deviation
            job.planned = secret.planned.data_ptr()
            job.noise_keys = None if secret.keys is None else secret.keys.ctypes.data
            _raise(self.library.clipped_gradient(job))
        if self.examples is not None and batch.secret().keys is None:
            self._buffer += batch.secret().noise(self.examples, self._buffer)
        if self.statistics is not None:  # what the running ones have become comes in their gradient's place
            y[:, self.statistics] = self._buffer[:, self.statistics]
            self._buffer[:, self.statistics] = 0
        return self._buffer, losses

    def evaluate(self, x: Tensor, inputs: Tree, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Each example's loss, and the class that it is taken for (None where there are no classes)."""
        x = x.to(torch.float32).contiguous()
        self._check_index_bounds(inputs)
        if self.graph.targets:
            self._check_label_bounds(targets)
        whole = self._whole(inputs)
        if whole is None or self.graph.targets:  # which knows no outputs, and so no classes
            self._plain = self._plain or TorchGradient(self.task)
            return self._plain.evaluate(x, inputs, targets)
        return self._judged(x, whole, targets)

    def _judged(self, x: Tensor, whole: Tree, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        inputs, targets = _rows(whole), self._targets(targets)
        losses = torch.empty(len(inputs))
        best = torch.empty(len(inputs), dtype=torch.int64) if self.predicts_classes else None
        job = EvaluateJob(
            params=x.data_ptr(), constants=self.graph.constants.data_ptr(), inputs=inputs.data_ptr(), count=len(inputs),
            targets=targets.data_ptr(), losses=losses.data_ptr(), classes=_address(best), threads=self.threads,
        )  # fmt: skip
        _raise(self.library.evaluate(job))
        return losses, best

    def _whole(self, inputs: Tree) -> Tree | None:
        """Inputs of other lengths padded to the one that the code is made for; None where they are longer."""
        found = []
        for leaf, shape, filler in zip(tree.leaves(inputs), self.graph.shapes, self.padding_rows):
            leaf = leaf.values if isinstance(leaf, Padded) else leaf
            if leaf.shape[1:] != shape:
                more = shape[0] - leaf.shape[1] if shape else 0
                if filler is None or more < 0 or leaf.shape[2:] != shape[1:]:
                    return None
                leaf = torch.cat([leaf, filler.to(leaf).expand(len(leaf), more, *shape[1:])], 1)
            found.append(leaf)
        return found[0] if len(found) == 1 else tuple(found)

    def _targets(self, targets: Tensor) -> Tensor:
        return targets.to(torch.int64 if self.classifies else torch.float32).contiguous()

    def _check_index_bounds(self, inputs: Tree) -> None:
        """Refuse numbers that name no row of the model's table."""
        if inputs is self._looked_at:
            return
        for leaf, limit in zip(tree.leaves(inputs), self.graph.index_bounds):
            leaf = leaf.values if isinstance(leaf, Padded) else leaf
            if limit is not None and leaf.numel():
                _refuse_beyond(leaf, limit)
        self._looked_at = inputs

    def _check_label_bounds(self, targets: Tensor) -> None:
        """Refuse numbers of classes that the loss does not know."""
        if targets is self._labels:
            return
        limit, skip = self.graph.index_bounds[self.graph.num_inputs], self.graph.ignore_index
        if limit is not None and targets.numel():
            some = targets if skip is None else targets.masked_fill(targets == skip, 0)
            _refuse_beyond(some, limit, "a label is {}, but the loss knows 0 to {} only")
        self._labels = targets

    def _check(self, task: Task) -> None:
        """Refuse to run if the model itself gives other losses: it has a hook that tracing did not see."""
        x, y = _first(task, 2)
        at = task.vector(0)
        module = task.full_layout.load(task.module(), at).eval()
        with torch.no_grad():
            want = task.per_example(task.run(module, tree.numbers(x)), y)
        self._check_index_bounds(x)
        got, _ = _aside(self._judged, at, self._whole(x), y)
        if not torch.allclose(got, want, rtol=1e-3, atol=1e-4):
            raise NativeUnavailable(
                f"the compiled model gives losses {got.tolist()} where the model gives {want.tolist()}"
            )
        self._prove(task, module, at)

    def _prove(self, task: Task, module: torch.nn.Module, y: Tensor) -> None:
        """Refuse to train by a gradient that is not autograd's: two models whose code is the same may differ in a hook."""
        count = TRIED if self.graph.is_batch_dependent else 4
        if self.graph.is_batch_dependent and len(task.rows) < count:
            return  # statistics of a few samples say nothing
        inputs, targets = _first(task, count)
        batch = Batch(inputs, targets, torch.arange(len(targets))[None])
        module, (x, t) = module.train(), batch.first_client()
        if task.stochastic:  # without seeds nothing is dropped
            for each in module.modules():
                each.training = each.training and bool(getattr(each, "track_running_stats", False))
        with torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            task.per_example(task.run(module, x), t, x).mean().backward()  # type: ignore[no-untyped-call]
            if not torch.equal(before, torch.get_rng_state()):
                return  # something is drawn all the same
        named = dict(module.named_parameters())
        slots = [named[slot.name] for slot in task.full_layout if not slot.buffer]
        want = torch.cat(
            [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in slots]
        )
        plain = self.alone()
        plain.examples = None
        got, _ = _aside(plain, y[None].clone(), batch)
        off = float(torch.linalg.vector_norm(got[0, : len(want)] - want))
        if off > 0.01 * float(torch.linalg.vector_norm(want)) + 1e-6:
            raise NativeUnavailable(
                f"the compiled model's gradient is not autograd's: it is {off:.2g} away from it"
            )


def _first(task: Task, count: int) -> tuple[Tree, Tensor]:
    """So many samples, as they are in memory: a block of padded ones is not cut."""
    rows = task.rows[:count]
    return tree.map(lambda leaf: leaf[rows[None]][0], task.inputs), tree.take(task.targets, rows)


def _aside(work: Callable[..., R], *args: Any) -> R:
    """What a function gives on a thread whose workspace goes with it: others may do the work later."""
    with ThreadPoolExecutor(1) as once:
        return once.submit(work, *args).result()


_FAULTS: dict[int, EngineError | DataError] = {
    1: EngineError("a batch names a row outside the table"),
    2: DataError("a label is out of range for the model's outputs"),
    3: EngineError("out of memory for the native workspace; use a smaller model or another backend"),
}


def use_large_pages(table: Tensor, page: int = 2**21, collapse: int = 25) -> None:
    """Ask Linux to keep a table of small rows in large pages: clients' rows lie anywhere, and each costs a look-up.

    It copies the table for that, on a thread, so that nobody waits.
    """
    if not sys.platform.startswith("linux") or table.nbytes < 2 * page or table[0].nbytes > 1024:
        return
    start = -(-table.data_ptr() // page) * page
    pages = (table.data_ptr() + table.nbytes - start) // page
    madvise = ctypes.CDLL(None).madvise

    def ask(alive: Tensor) -> None:
        for k in range(pages):  # a no is no harm
            madvise(ctypes.c_void_p(start + k * page), ctypes.c_size_t(page), collapse)

    threading.Thread(target=ask, args=(table,), daemon=True).start()


def _refuse_beyond(
    leaf: Tensor, limit: Tensor, why: str = "an input is {}, but the model looks up 0 to {} only"
) -> None:
    count = int(limit.min())
    if (
        leaf.shape[1:] == limit.shape and limit.numel() > 1 and int(limit.max()) > count
    ):  # tables of its columns
        beyond = (((leaf < 0) | (leaf >= limit)) & (limit < 2**24)).nonzero()
        bad = None if not len(beyond) else int(leaf[tuple(beyond[0])])
        count = count if bad is None else int(limit[tuple(beyond[0][1:])])
    else:
        low, high = (int(n) for n in leaf.aminmax())
        bad = low if low < 0 else high if high >= count else None
    if bad is not None:
        raise DataError(why.format(bad, count - 1))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _raise(status: int) -> None:
    if status:
        raise _FAULTS[status]


def _lone(inputs: Tree) -> Tree:
    """The leaf of a tree of one, which is read where it lies."""
    leaves = tree.leaves(inputs)
    return leaves[0] if len(leaves) == 1 else inputs


def _rows(inputs: Tree) -> Tensor:
    """A table as the library reads it: a sample is one row of float32, its parts behind each other."""
    if isinstance(table := _lone(inputs), Tensor):
        return table.to(torch.float32).contiguous()
    return torch.cat([leaf.reshape(len(leaf), -1).to(torch.float32) for leaf in tree.leaves(inputs)], 1)


class _ModelWrapper(nn.Sequential):
    """A model as a module of one argument, the inputs, so that a lone layer is a layer too."""

    def __init__(self, module: nn.Module, sample: Tree) -> None:
        super().__init__(module)
        self.keys = [key for key, _ in tree.named(sample)]
        self.by_name = isinstance(sample, dict)

    def forward(self, inputs: Any) -> Any:
        if self.keys == [None]:
            out = self[0](inputs)
        else:
            given = {key: inputs[key] for key in self.keys}
            out = self[0](**given) if self.by_name else self[0](*given.values())
        return out if isinstance(out, fx.Proxy) else logits(out)


class _LossWrapper(_ModelWrapper):
    """A model and a loss of its outputs."""

    def __init__(self, module: nn.Module, sample: Tree, loss: Loss) -> None:
        super().__init__(module, sample)
        self.loss = loss

    def forward(self, inputs: Any, targets: Any) -> Any:  # type: ignore[override]
        out = super().forward(inputs)
        try:
            return self.loss(out, targets)
        except Exception as error:
            raise Unsupported(f"the loss cannot be traced ({first_line(error)})") from error


_GRAPHS: weakref.WeakKeyDictionary[Task, Graph | str] = weakref.WeakKeyDictionary()


def _graph(task: Task) -> Graph:
    """The task's model, followed once, or why it cannot be."""
    if task not in _GRAPHS:
        try:
            _GRAPHS[task] = _followed(task)
        except Unsupported as why:
            _GRAPHS[task] = str(why)
    found = _GRAPHS[task]
    if isinstance(found, str):
        raise Unsupported(found)
    return found


def _kind(task: Task) -> str:
    """The loss's name, one for all of the user's."""
    return task.loss if isinstance(task.loss, str) else "own"


def _followed(task: Task) -> Graph:
    asked = by_signature(task.loss).order if callable(task.loss) else ()
    if more := [name for name in asked if name not in ("outputs", "targets")]:
        raise Unsupported(f"the loss looks at {' and '.join(more)} besides outputs and targets")
    given, targets = task.like
    inputs = tree.map(lambda leaf: leaf.values if isinstance(leaf, Padded) else leaf, given)
    leaves = tree.leaves(inputs)
    if task.forward is not None:
        raise Unsupported("the model is called by a function of the user's")
    if task.ragged:
        raise Unsupported("samples have lengths of their own, unknown before they are read")
    if isinstance(targets, Padded):
        raise Unsupported("targets have lengths of their own")
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in (*leaves, targets)):
        raise Unsupported("the data are maps of files, or there are no targets")
    if task.device.type != "cpu":
        raise Unsupported(f"the data are on {task.device}, not on the CPU")
    for leaf in leaves:
        if not leaf.is_floating_point() and leaf.numel() and int(leaf.max()) >= 2**24:
            raise Unsupported("the inputs are numbers beyond 2^24, which float32 does not tell apart")
    if task.augment is not None:
        one = tree.take(inputs, slice(1))
        made = task.augment(one, torch.zeros(1, task.augment.draws)).shape
        if made != one.shape:
            raise Unsupported(
                f"augmentation turns inputs of shape {tuple(one.shape)[1:]} into {tuple(made)[1:]}"
            )
    if (tail := task.full_layout.buffers) is not None and tail.stop < task.full_layout.size:
        raise Unsupported("personal parts stand behind the running statistics")
    sample, padded = (
        tree.numbers(tree.take(inputs, slice(1))),
        any(isinstance(leaf, Padded) for leaf in tree.leaves(given)),
    )
    if callable(task.loss):
        graph = _judged(task, sample, targets)
    else:
        graph = _plain(task, sample, targets)
    if padded and (graph.is_batch_dependent or not _blind_to_padding(task, given, inputs)):
        raise Unsupported("outputs depend on padding, so that batches are cut to their longest")
    return graph


def _judged(task: Task, sample: Tree, targets: Tensor) -> Graph:
    """The model and the user's loss of it, as one."""
    whole = not targets.is_floating_point()
    if targets.dtype not in (torch.float32, torch.int64, torch.int32, torch.bool):
        raise Unsupported(f"the targets are {targets.dtype}, which the loss may compute with otherwise")
    if whole and targets.numel() and int(targets.max()) >= 2**24:
        raise Unsupported("the targets are numbers beyond 2^24, which float32 does not tell apart")
    module = task.module()
    graph = trace(
        lambda: _LossWrapper(module, sample, task.per_example), task.full_layout, (sample, targets[:1])
    )
    if graph.output_shape:
        raise Unsupported(f"the loss gives {graph.output_shape} for each sample, not one number")
    return graph


def _plain(task: Task, sample: Tree, targets: Tensor) -> Graph:
    """The model, whose outputs a loss of the library's is of."""
    module = task.module()
    graph = trace(lambda: _ModelWrapper(module, sample), task.full_layout, (sample,))
    wanted = tuple(targets.shape[1:])
    fits = len(graph.output_shape) > 0 and graph.output_shape[1:] == wanted
    if task.loss != "cross_entropy":
        fits = math.prod(graph.output_shape) == math.prod(wanted)
    if not fits:
        raise Unsupported(f"the model's outputs have shape {graph.output_shape} for targets of {wanted}")
    if task.loss != "mse" and targets.is_floating_point() and not bool((targets == targets.long()).all()):
        raise Unsupported("the targets are not numbers of classes")
    return graph


TRIED = 16  # samples, of as many lengths as there are,
MODELS = 2  # by so many models of random weights


@torch.no_grad()
def _blind_to_padding(task: Task, inputs: Tree, whole: Tree) -> bool:
    """Whether samples at their own length and at the longest give the same outputs, but for rounding."""
    lengths = torch.stack([leaf.lengths for leaf in tree.leaves(inputs) if isinstance(leaf, Padded)]).amax(0)
    order = lengths.argsort()
    rows = order[torch.linspace(0, len(order) - 1, min(TRIED, len(order))).long()]
    module, draw = task.module().eval(), torch.Generator().manual_seed(0)
    start = task.full_layout.flatten(module)

    def given(some: Tree, at: Tensor) -> Tensor:
        out = task.run(module, tree.numbers(tree.take(some, at)))
        return task.per_example(out, tree.take(task.like[1], at)) if callable(task.loss) else out

    for _ in range(MODELS):
        x = start + 0.1 * torch.randn(start.shape, generator=draw)
        task.full_layout.load(module, x)
        padded = given(whole, rows)
        cut = torch.cat([given(inputs, row[None]) for row in rows])
        if not torch.allclose(padded, cut, rtol=1e-4, atol=1e-5 * max(1.0, float(cut.abs().max()))):
            return False
    return True


def _filler(leaf: Any) -> Tensor | None:
    """What a leaf is padded with, None where nothing or not one thing is."""
    if not isinstance(leaf, Padded):
        return None
    outside = torch.arange(leaf.shape[1]) >= leaf.lengths[:, None]
    padding = leaf.values[outside]
    return padding[:1] if len(padding) and bool((padding == padding[:1]).all()) else None
