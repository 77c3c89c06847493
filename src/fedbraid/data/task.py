"""A task: a model, a loss, what every client holds, and how to judge the result."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbraid.core import rng
from fedbraid.core.layout import Layout
from fedbraid.data.augment import Augment
from fedbraid.errors import DataError, unknown

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> one loss per example
Build = Callable[[], nn.Module]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.reshape(targets.shape) - targets).square().reshape(len(targets), -1).mean(1)


def logistic(outputs: Tensor, targets: Tensor) -> Tensor:
    """log(1 + e^∓z) for one output z and class 1 or 0."""
    return nn.functional.softplus(outputs.reshape(targets.shape) * (1 - 2 * targets))


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "logistic": logistic, "mse": mse}


@dataclass(frozen=True, eq=False)
class Task:
    """What is learned, by whom, and how it is judged.

    All clients' samples are rows of one table; client i holds `rows[offsets[i]:offsets[i + 1]]` of it.
    """

    build: Build  # makes the model; its initial weights come from the run's seed
    inputs: Tensor
    targets: Tensor
    rows: Tensor  # int64, the clients' rows one after the other
    offsets: NDArray[np.int64]  # N + 1 of them
    test: tuple[Tensor, Tensor] | None = None
    test_offsets: NDArray[np.int64] | None = None  # where test rows belong to clients: N + 1 of them
    loss: str | Loss = "cross_entropy"
    buffers: str = "refuse"
    augment: Augment | None = None
    name: str = "custom"
    spec: str | None = None  # the call that loads it again, for run.json
    start: Tensor | None = field(default=None, repr=False)  # given initial weights, instead of seeded ones

    @classmethod
    def from_arrays(
        cls,
        model: nn.Module | Build,
        clients: Sequence[tuple[Any, Any]],
        test: tuple[Any, Any] | None = None,
        loss: str | Loss = "cross_entropy",
        *,
        client_tests: Sequence[tuple[Any, Any]] | None = None,
        buffers: str = "refuse",
        augment: Augment | None = None,
        name: str = "custom",
    ) -> Task:
        """A task from your own model and one (inputs, targets) pair per client.

        A module instance starts every run from the weights it has; a function that builds one starts
        from weights drawn with the run's seed. `client_tests`, instead of `test`, gives each client a
        test share (None for a client without one); together they are the test set.
        """
        if not clients:
            raise DataError("no clients were given; pass at least one (inputs, targets) pair")
        pairs = [_pair(c, f"client {i}", loss) for i, c in enumerate(clients)]
        offsets = np.cumsum([0] + [len(x) for x, _ in pairs])
        inputs, targets = _stack(pairs)
        test_offsets = None
        if client_tests is not None:
            if len(client_tests) != len(clients):
                raise DataError(f"{len(client_tests)} test shares for {len(clients)} clients; give one each")
            if test is not None:
                raise DataError("both test= and client_tests= were given; give one of them")
            shares = {
                i: _pair(c, f"client {i}'s test share", loss)
                for i, c in enumerate(client_tests)
                if c is not None and len(c[0])
            }
            test_offsets = np.cumsum(
                [0] + [len(shares[i][0]) if i in shares else 0 for i in range(len(pairs))]
            )
            test = _stack(list(shares.values())) if shares else None
        return cls.from_table(
            model, inputs, targets, torch.arange(len(inputs)), offsets, test=test, test_offsets=test_offsets,
            loss=loss, buffers=buffers, augment=augment, name=name,
        )  # fmt: skip

    @classmethod
    def from_datasets(
        cls, model: nn.Module | Build, clients: Sequence[Any], test: Any = None, **options: Any
    ) -> Task:
        """A task from one map-style torch dataset per client, each item an (input, target) pair."""
        pairs = [_read(d, f"client {i}") for i, d in enumerate(clients)]
        return cls.from_arrays(model, pairs, None if test is None else _read(test, "the test set"), **options)

    @classmethod
    def from_table(
        cls,
        model: nn.Module | Build,
        inputs: Any,
        targets: Any,
        rows: Tensor | Sequence[NDArray[np.int64]],
        offsets: NDArray[np.int64] | None = None,
        *,
        test: tuple[Any, Any] | None = None,
        **options: Any,
    ) -> Task:
        """A task over one table, with the rows that each client holds."""
        if not isinstance(rows, Tensor):
            if not len(rows):
                raise DataError("no clients were given; pass the rows of at least one")
            offsets = np.cumsum([0] + [len(r) for r in rows])
            rows = torch.from_numpy(np.concatenate([np.asarray(r, np.int64) for r in rows]))
        if offsets is None or offsets[0] != 0 or offsets[-1] != len(rows):
            raise DataError(f"offsets must run from 0 to the {len(rows)} rows, one more of them than clients")
        loss = options.get("loss", "cross_entropy")
        x, y = _pair((inputs, targets), "the training table", loss)
        tested = None if test is None else _pair(test, "the test set", loss)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(x):
            bad = int(rows.min()) if int(rows.min()) < 0 else int(rows.max())
            raise DataError(f"a client holds row {bad} of a table of {len(x)}; use rows 0 to {len(x) - 1}")
        start, given = None, _given(model)
        if given is not None:
            module = copy.deepcopy(given)
            start = Layout.of(module, options.get("buffers", "refuse")).flatten(module)
            build: Build = _Copy(module)
        else:
            build = model
        task = cls(build, x, y, rows, np.asarray(offsets, np.int64), test=tested, start=start, **options)
        task._check()
        return task

    # What the rest of the library asks ------------------------------------------------------------

    @property
    def clients(self) -> int:
        """N, the number of clients."""
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """n_i, the number of samples of each client."""
        return np.diff(self.offsets)

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.module(), self.buffers)

    @property
    def per_example(self) -> Loss:
        """The loss as a function (outputs, targets) -> one number per example."""
        return self.loss if callable(self.loss) else LOSSES[self.loss]

    @property
    def classifies(self) -> bool:
        """Whether targets are class numbers, so that there is an accuracy."""
        return not self.targets.is_floating_point()

    def guess(self, outputs: Tensor) -> Tensor | None:
        """The classes that the outputs name, where there is one for each sample."""
        if self.loss == "logistic":
            return (outputs.reshape(len(outputs)) > 0).long()
        whole = self.classifies and outputs.ndim == 2 and self.targets.ndim == 1
        return outputs.argmax(1) if whole else None

    @cached_property
    def classes(self) -> int:
        """How many classes the targets name."""
        return int(self.targets.max()) + 1 if self.classifies and self.targets.numel() else 0

    @cached_property
    def stochastic(self) -> bool:
        """Whether the model draws random numbers while it trains (dropout), by trying it."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.get_rng_state()
            self._forward(self.module().train(), "cpu")
            return not torch.equal(before, torch.get_rng_state())

    def _forward(self, module: nn.Module, device: str | torch.device) -> Any:
        """The outputs for the first and the last sample."""
        x = self.inputs[self.rows[[0, -1]]].to(device)
        try:
            return module(x if x.is_floating_point() else x.long())
        except Exception as error:
            raise DataError(
                f"the model's forward pass fails on two samples of shape {tuple(x.shape[1:])} ({x.dtype}): {error};"
                " make model and data fit each other"
            ) from error

    def module(self, seed: int = 0) -> nn.Module:
        """A new float32 model, its weights drawn with this seed (or those it was given with)."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.key(seed, "init"))
            module = self.build()
        return module.float()

    def initial(self, seed: int) -> Tensor:
        """x⁰, the model that the first round starts from."""
        x = self.layout.flatten(self.module(seed)) if self.start is None else self.start.clone()
        return x.to(self.inputs.device)

    def row_ids(self, clients: NDArray[np.int64], picked: NDArray[np.int64]) -> Tensor:
        """Rows of the table for the picked samples `[m, B]` of these clients."""
        at = torch.from_numpy(self.offsets[clients][:, None] + picked).to(self.rows.device)
        return at if self._in_order else self.rows[at]

    @cached_property
    def _in_order(self) -> bool:
        """Whether the table itself has the clients' rows one after the other."""
        return torch.equal(self.rows, torch.arange(len(self.rows), device=self.rows.device))

    def labels(self, client: int) -> Tensor:
        """The targets that a client holds."""
        return self.targets[self.rows[self.offsets[client] : self.offsets[client + 1]]]

    def to(self, device: str | torch.device) -> Task:
        """The same task with its tensors on a device."""
        if self.inputs.device == torch.device(device):
            return self
        moved = copy.copy(self)
        moved.__dict__.update(
            {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)},
            test=None if self.test is None else tuple(t.to(device) for t in self.test),
        )
        return moved

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the data, the partition, the model and the loss's name, for the run record."""
        h = hashlib.blake2b(digest_size=16)
        h.update(self.layout.fingerprint)
        loss = self.loss if isinstance(self.loss, str) else getattr(self.loss, "__qualname__", "")
        h.update(repr((loss, self.buffers, self.augment)).encode())
        tensors = [self.inputs, self.targets, self.rows, *(self.test or ())]
        tensors += [] if self.start is None else list(self.module().state_dict().values())
        for t in tensors:
            h.update(str((t.dtype, tuple(t.shape), t.stride())).encode())
            h.update(_storage(t).data)
        h.update(np.ascontiguousarray(self.offsets).data)
        return h.hexdigest()

    # Checks ---------------------------------------------------------------------------------------

    def _check(self) -> None:
        empty = np.flatnonzero(np.diff(self.offsets) == 0)
        if len(empty):
            raise DataError(f"client {empty[0]} has no samples; leave it out or give it at least one")
        if not callable(self.loss) and self.loss not in LOSSES:
            raise unknown("loss", str(self.loss), LOSSES)
        module = self.module()
        Layout.of(module, self.buffers)
        module.to(self.inputs.device).eval()
        with torch.no_grad():
            out, y = self._forward(module, self.inputs.device), self.targets[self.rows[[0, -1]]]
            if not isinstance(out, Tensor):
                raise DataError(f"the model gives a {type(out).__name__}; its forward must return one tensor")
            shapes = f"outputs {tuple(out.shape)} and targets {tuple(y.shape)}"
            try:
                each = self.per_example(out, y)
            except Exception as error:
                raise DataError(f"the loss fails on {shapes}: {error}; make them fit each other") from error
        if not isinstance(each, Tensor) or each.shape != (2,):
            gave = f"shape {tuple(each.shape)}" if isinstance(each, Tensor) else f"a {type(each).__name__}"
            raise DataError(
                f"the loss gave {gave} for two samples; it must give one number per example (reduction='none')"
            )
        if self.loss in ("cross_entropy", "logistic"):
            classes = out.shape[1] if self.loss == "cross_entropy" else 2
            for what, y in (
                ("training", self.targets),
                ("test", self.test[1] if self.test else self.targets[:0]),
            ):
                if y.numel() and (int(y.min()) < 0 or int(y.max()) >= classes):
                    bad = int(y.min()) if int(y.min()) < 0 else int(y.max())
                    outputs = f"{out.shape[1]} outputs" if out.ndim > 1 else "one output"
                    raise DataError(
                        f"{what} label {bad} is out of range for {self.loss} and a model with {outputs}; use 0 to {classes - 1}"
                    )


class _Copy:
    """Builds a model by copying a given one (a closure that prints and pickles)."""

    def __init__(self, module: nn.Module) -> None:
        self.given = module

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self.given)


def _given(model: Any) -> nn.Module | None:
    """The module whose weights every run starts from: the one given, or that a function gives again and again."""
    if isinstance(model, nn.Module):
        return model
    with torch.random.fork_rng(devices=[]):
        first, second = (model(), model()) if callable(model) else (model, model)
    if not isinstance(first, nn.Module):
        raise DataError(
            f"the model is a {type(first).__name__}; pass a torch.nn.Module or a function that returns one"
        )
    return first if first is second else None


def _storage(t: Tensor) -> NDArray[np.uint8]:
    """The bytes behind a tensor, read once even where its rows overlap (text windows)."""
    t = t.detach().cpu()
    storage = t.untyped_storage()
    if t.is_contiguous() or storage.nbytes() >= t.nbytes:
        return t.contiguous().view(-1).view(torch.uint8).numpy() if t.nbytes else np.empty(0, np.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def _pair(pair: Any, what: str, loss: str | Loss) -> tuple[Tensor, Tensor]:
    """(inputs, targets) as tensors of the right kind, or a sentence about what is wrong with them."""
    try:
        x, y = pair
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} must be an (inputs, targets) pair, not {type(pair).__name__}") from error
    try:
        x, y = torch.as_tensor(x), torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} does not turn into tensors: {error}; give arrays of numbers") from error
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise DataError(
            f"{what} has inputs of shape {tuple(x.shape)} but targets of shape {tuple(y.shape)}; give one target per input"
        )
    if len(x) == 0:
        raise DataError(f"{what} has no samples; leave it out or give it at least one")
    if x.is_floating_point():
        x = x.to(torch.float32)
        if not _finite(x):
            raise DataError(f"{what} has NaN or infinity in its inputs; clean or fill those values first")
    if loss in ("cross_entropy", "logistic"):
        if y.is_floating_point():
            raise DataError(
                f"{what} has {y.dtype} targets; {loss} needs whole class numbers (or use loss='mse')"
            )
        y = y.long()
    elif y.is_floating_point() or loss == "mse":
        y = y.to(torch.float32)
        if not torch.isfinite(y).all():
            raise DataError(f"{what} has NaN or infinity in its targets; clean or fill those values first")
    return x, y


def _finite(x: Tensor) -> bool:
    """Whether every number is finite, looked at piece by piece so that large tables need no copy."""
    return all(bool(torch.isfinite(x[lo : lo + 4096]).all()) for lo in range(0, len(x), 4096))


def _stack(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    for i, (x, y) in enumerate(pairs):
        for part, first in ((x, pairs[0][0]), (y, pairs[0][1])):
            if part.shape[1:] != first.shape[1:] or part.dtype != first.dtype:
                raise DataError(
                    f"client {i} holds samples of shape {tuple(part.shape[1:])} ({part.dtype}), client 0 of shape "
                    f"{tuple(first.shape[1:])} ({first.dtype}); all clients need the same"
                )
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def _read(dataset: Any, what: str) -> tuple[Tensor, Tensor]:
    items = [dataset[i] for i in range(len(dataset))]
    if not items:
        raise DataError(f"{what} has no samples; leave it out or give it at least one")
    try:
        return torch.stack([torch.as_tensor(x) for x, _ in items]), torch.stack(
            [torch.as_tensor(y) for _, y in items]
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} does not turn into tensors: {error}; give items (input, target)") from error
