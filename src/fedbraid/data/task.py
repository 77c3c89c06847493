"""A task: a model, a loss, the clients' data, and how to evaluate the result."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from fedbraid.core import rng
from fedbraid.core.device import placed
from fedbraid.core.layout import Layout
from fedbraid.core.metric_names import PERSONAL, PREVIOUS, RESERVED
from fedbraid.data import arrays, columns, holdout, summary, tree
from fedbraid.data.arrays import Collate
from fedbraid.data.augment import Augment
from fedbraid.data.call import Forward, Loss, by_signature, call, logits
from fedbraid.data.lazy import BlockView, LazyColumn, LazyDataset, folders
from fedbraid.data.partition import Partition
from fedbraid.data.tree import Chunks, Padded, Tree
from fedbraid.errors import DataError, unknown

Build = Callable[[], nn.Module]
Clients = Sequence[Any] | Mapping[Any, Any]  # one (inputs, targets) pair per client, or those by name


def cross_entropy(outputs: Tensor, targets: Tensor, inputs: Tree = None) -> Tensor:
    """For classes, one a sample or one a pixel: `[B, C, ...]` and `[B, ...]`."""
    return _mean(nn.functional.cross_entropy(outputs, targets, reduction="none"))


def mse(outputs: Tensor, targets: Tensor, inputs: Tree = None) -> Tensor:
    return (outputs.reshape(targets.shape) - targets).square().reshape(len(targets), -1).mean(1)


def logistic(outputs: Tensor, targets: Tensor, inputs: Tree = None) -> Tensor:
    """log(1 + e^∓z) for outputs z and classes 1 or 0, one a sample or several (multi-label)."""
    return _mean(nn.functional.softplus(outputs.reshape(targets.shape) * (1 - 2 * targets)))


def _mean(each: Tensor) -> Tensor:
    """One number per example."""
    return each if each.ndim == 1 else each.flatten(1).mean(1)


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "logistic": logistic, "mse": mse}


_MAPS = (nn.Linear, nn.Flatten, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Softmax, nn.LogSoftmax)


class ModelSummary(NamedTuple):
    """Facts about a model from one forward pass."""

    text: str  # its layers, as it prints
    stochastic: bool  # whether it draws random numbers while it trains
    frozen: bool  # whether some of its weights are not trained
    layers: int  # layers in a forward pass
    multiply_adds: int  # of one sample, approximately
    activations: int  # numbers that the layers output for one sample
    cells: int  # time steps that PyTorch computes one by one, of GRUs and plain RNNs
    recurrent_weights: int  # of the largest matrix of a recurrent layer
    is_linear_chain: (
        bool  # linear maps and elementwise functions only, whose weights meet in batched matrix products
    )


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """A model, a loss, the clients' data, and the test sets and metrics that evaluate the result.

    All clients' samples are rows of one table; client i holds `rows[offsets[i]:offsets[i + 1]]` of it.
    """

    build: Build  # makes the model; its initial weights come from the run's seed
    inputs: Tree
    targets: Tree
    rows: Tensor  # int64, the clients' rows one after the other
    offsets: NDArray[np.int64]  # N + 1 of them
    test: tuple[Tree, Tree] | None = None
    test_offsets: NDArray[np.int64] | None = None  # where each client's local test set begins: N + 1 of them
    loss: str | Loss = "cross_entropy"
    buffers: str = "refuse"
    personal: tuple[str, ...] = ()  # globs on the names of parameters that stay with each client
    augment: Augment | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)  # by name, (outputs, targets) -> number
    public: tuple[Tree, Tree] | None = None  # the server's data, to train or distil on
    forward: Forward | None = None  # (module, inputs) -> outputs, where calling the model is not enough
    name: str = "custom"
    spec: str | None = None  # the call that loads it again, for run.json
    start: Tensor | None = field(
        default=None, repr=False
    )  # initial weights of an instance, instead of seeded ones
    client_names: tuple[str, ...] | None = None  # the clients' names in the data, if it has any

    @classmethod
    def from_arrays(
        cls,
        model: nn.Module | Build,
        clients: Clients,
        test: tuple[Any, Any] | None = None,
        loss: str | Loss = "cross_entropy",
        *,
        client_tests: Clients | None = None,
        test_fraction: float | None = None,
        seed: int = 0,
        collate: Collate | None = None,
        metrics: Mapping[str, Any] | None = None,
        personal: str | Sequence[str] = (),
        forward: Forward | None = None,
        buffers: str = "refuse",
        augment: Augment | None = None,
        public: tuple[Any, Any] | None = None,
        name: str = "custom",
    ) -> Task:
        """A task from your own model and one (inputs, targets) pair per client.

        Inputs and targets are arrays, or tuples or dicts of them; targets may be None. A module instance
        starts every run from the weights it has; a function that builds one starts from weights drawn with
        the run's seed. `clients` may be a dict, whose keys then name the clients in tables and reports.
        `client_tests`, instead of `test`, gives each client a local test set (None for a client without one);
        `test_fraction` holds one out of its samples, stratified by label and drawn with `seed`. Together the
        local test sets are the test set. `collate` makes one table of samples of different lengths, such as
        `fb.pad()`.

        `metrics` are functions `(outputs, targets) -> number` by name; `personal` are globs on the names of
        parameters that stay with each client; `forward` is `(module, inputs) -> outputs` where calling the
        module is not enough; `buffers` is "refuse", "average" or "personal" (BatchNorm's statistics);
        `augment` changes images as they are drawn; `public` is an (inputs, targets) pair that the server holds.
        """
        pairs, tests, client_names = _named(clients, client_tests)
        if not len(pairs):
            raise DataError("no clients were given; pass at least one (inputs, targets) pair")
        if tests is not None:
            _check_local_tests(pairs, test, tests)
        read = partial(arrays.table, loss=loss, collate=collate)
        names = [f"client {i}" for i in range(len(pairs))]
        (inputs, targets), offsets = read(pairs, names)
        test_offsets = None
        if tests is not None:
            with_tests = [i for i, c in enumerate(tests) if c is not None and arrays.count(c[0])]
            sizes = np.zeros(len(pairs), np.int64)
            if with_tests:
                test, cuts = read(
                    [tests[i] for i in with_tests], [f"client {i}'s local test set" for i in with_tests]
                )
                sizes[with_tests] = np.diff(cuts)
            test_offsets = np.concatenate([[0], np.cumsum(sizes)])
        elif test is not None:
            test, _ = read([test], ["the test set"])
        return cls.from_table(
            model, inputs, targets, torch.arange(int(offsets[-1])), offsets, test=test, test_offsets=test_offsets,
            loss=loss, test_fraction=test_fraction, seed=seed, metrics=metrics, personal=personal, forward=forward,
            buffers=buffers, augment=augment, public=public, name=name, client_names=client_names,
        )  # fmt: skip

    @classmethod
    def from_datasets(
        cls,
        model: nn.Module | Build,
        clients: Any,
        test: Any = None,
        loss: str | Loss = "cross_entropy",
        *,
        client_tests: Any = None,
        test_fraction: float | None = None,
        seed: int = 0,
        by: str | None = None,
        inputs: Sequence[str] | None = None,
        targets: str | None = None,
        collate: Collate | None = None,
        lazy: bool = False,
        metrics: Mapping[str, Any] | None = None,
        personal: str | Sequence[str] = (),
        forward: Forward | None = None,
        buffers: str = "refuse",
        augment: Augment | None = None,
        public: tuple[Any, Any] | None = None,
        name: str = "custom",
    ) -> Task:
        """A task from one map-style dataset per client, each item an (input, target) pair or a dict.

        `client_tests`, instead of `test`, is a dataset per client too, None for one without. With `by`, `clients`
        is one dataset, and that column holds the client of each row. A dict's targets are those named
        `targets`, by default "labels" or "label"; `inputs` names the model's inputs, by default all
        other keys. `lazy=True` leaves the data on disk: a client's items are read whenever it trains, by processes
        that prefetch them, and their transforms draw anew; a test set is read chunk by chunk whenever a model
        is evaluated. The other settings are those of `from_arrays`.
        """
        client_names = None
        if by is None:  # otherwise it is one dataset for all, whose columns are not clients
            clients, client_tests, client_names = _named(clients, client_tests)
        options: dict[str, Any] = {
            "metrics": metrics, "personal": personal, "forward": forward, "buffers": buffers, "augment": augment,
            "public": public, "name": name,
        }  # fmt: skip
        if client_tests is not None:
            if by is not None:
                raise DataError(
                    "client_tests= is one dataset per client, and by= one for all; give test_fraction= or test= with by="
                )
            _check_local_tests(clients, test, client_tests)
        if by is not None and lazy:
            clients, test = columns.by_client(clients, by), columns.without(test, by)
            client_names = tuple(subset.name for subset in clients)
        elif by is not None:
            return cls.from_table(
                model, clients, columns.named_targets(clients, targets), by=by, test=test, inputs_from=inputs,
                loss=loss, collate=collate, test_fraction=test_fraction, seed=seed, **options,
            )  # fmt: skip

        def read(dataset: Any, what: str) -> Any:
            return arrays.read(columns.by_item(dataset), what, inputs, targets, collate)

        if lazy:
            if test_fraction is not None:
                raise DataError(
                    "test_fraction= reads labels, which lazy=True leaves on disk; give client_tests=, such as the folders"
                    " of each client's test samples"
                )
            store, tested, test_offsets = LazyDataset(clients, loss, inputs, targets, collate), None, None
            store.like  # noqa: B018 (read once here, for all processes)
            if client_tests is not None:
                test, test_offsets = arrays.joined(client_tests)
            if test is not None:
                test_store = LazyDataset([test], loss, inputs, targets, collate, "the test set")
                tested = LazyColumn.both(test_store)
            x, y = LazyColumn.both(store)
            return cls._make(
                model, x, y, torch.arange(len(store)), store.offsets, test=tested, loss=loss,
                test_offsets=test_offsets, client_names=client_names, **options,
            )  # fmt: skip
        clients_data = [read(d, f"client {i}") for i, d in enumerate(clients)]
        tested = None if test is None else read(test, "the test set")
        if client_tests is not None:
            client_tests = [
                read(d, f"client {i}'s local test set") if d is not None and len(d) else None
                for i, d in enumerate(client_tests)
            ]
        named_clients = clients_data if client_names is None else dict(zip(client_names, clients_data))
        return cls.from_arrays(
            model, named_clients, tested, loss, client_tests=client_tests, collate=collate, test_fraction=test_fraction, seed=seed,
            **options,
        )  # fmt: skip

    @classmethod
    def from_table(
        cls,
        model: nn.Module | Build,
        inputs: Any,
        targets: Any = None,
        rows: Tensor | Sequence[NDArray[np.int64]] | None = None,
        offsets: NDArray[np.int64] | None = None,
        *,
        by: Any = None,
        partition: Partition | str | None = None,
        clients: int | None = None,
        seed: int = 0,
        test: Any = None,
        test_offsets: NDArray[np.int64] | None = None,
        test_fraction: float | None = None,
        collate: Collate | None = None,
        inputs_from: Sequence[str] | None = None,
        loss: str | Loss = "cross_entropy",
        metrics: Mapping[str, Any] | None = None,
        personal: str | Sequence[str] = (),
        forward: Forward | None = None,
        buffers: str = "refuse",
        augment: Augment | None = None,
        public: tuple[Any, Any] | None = None,
        name: str = "custom",
        spec: str | None = None,
        client_names: Sequence[str] | None = None,
    ) -> Task:
        """A task over one table, with the rows that each client holds.

        Those are given as `rows`, or follow from `by`, a client id for each row, or are drawn by a `partition`
        among so many `clients` with this `seed`. In a frame, a Hugging Face dataset or a dict of arrays, targets
        and ids may be columns by name; then the inputs are the other columns, or those in `inputs_from`.

        The clients' ids are their names in tables and reports. `test_fraction` holds a local test set out of each
        client's rows, stratified by label and drawn with `seed`; together they are the test set. `test_offsets`
        says instead where each client's rows of `test` begin. The other settings are those of `from_arrays`.

        >>> x, y, wards = np.ones((20, 4), np.float32), np.arange(20) % 2, ["a", "b"] * 10
        >>> task = Task.from_table(nn.Linear(4, 2), x, y, by=wards, test_fraction=0.2)
        >>> task.client_names, task.sizes.tolist(), task.test_offsets.tolist()
        (('a', 'b'), [8, 8], [0, 2, 4])
        """
        if isinstance(targets, str) and columns.names(test) is not None:
            not_inputs = {targets, by} if isinstance(by, str) else {targets}
            input_names = inputs_from or [n for n in columns.names(inputs) or () if n not in not_inputs]
            test = columns.split(test, targets, None, "the test set", input_names)[:2]
        inputs, targets, by = columns.split(inputs, targets, by, "the training table", inputs_from)
        if collate is not None:
            inputs, targets = arrays.collated(
                arrays.items(inputs, targets, "the training table"), collate, "it"
            )
            if test is not None:
                test = arrays.collated(arrays.items(test[0], test[1], "the test set"), collate, "it")
        if rows is None:
            rows, names = columns.deal(targets, by, arrays.count(inputs), partition, clients, seed)
            client_names = names if client_names is None else client_names
        if not isinstance(rows, Tensor):
            if not len(rows):
                raise DataError("no clients were given; pass the rows of at least one")
            offsets = np.cumsum([0] + [len(r) for r in rows])
            rows = torch.from_numpy(np.concatenate([np.asarray(r, np.int64) for r in rows]))
        if offsets is None or offsets[0] != 0 or offsets[-1] != len(rows):
            raise DataError(f"offsets must run from 0 to the {len(rows)} rows, one more of them than clients")
        x, y = arrays.pair((inputs, targets), "the training table", loss)
        tested = None if test is None else arrays.pair(test, "the test set", loss)
        count = tree.length(x)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < count:
            bad = int(rows.min()) if int(rows.min()) < 0 else int(rows.max())
            raise DataError(f"a client holds row {bad} of a table of {count}; use rows 0 to {count - 1}")
        offsets = np.asarray(offsets, np.int64)
        if test_fraction is not None:
            if test is not None:
                raise DataError("both test= and test_fraction= were given; give one of them")
            rows, offsets, test_rows, test_offsets = holdout.hold_out(rows, offsets, y, test_fraction, seed)
            tested = (holdout.take_rows(x, test_rows), holdout.take_rows(y, test_rows))
        return cls._make(
            model, x, y, rows, offsets, test=tested, test_offsets=test_offsets, loss=loss, metrics=metrics,
            personal=personal, forward=forward, buffers=buffers, augment=augment, public=public, name=name, spec=spec,
            client_names=client_names,
        )  # fmt: skip

    @classmethod
    def _make(
        cls, model: nn.Module | Build, inputs: Tree, targets: Tree, rows: Tensor, offsets: Any, **options: Any
    ) -> Task:
        """The task of a model and checked data, once one forward pass has succeeded."""
        start, instance = None, _instance(model)
        options["personal"] = _globs(options.get("personal", ()))
        options["metrics"] = {} if options.get("metrics") is None else options["metrics"]
        names = options.get("client_names")
        options["client_names"] = None if names is None else tuple(map(str, names))
        if options.get("public") is not None:
            public_inputs, labels = options["public"]
            loss = None if labels is None else options.get("loss", "cross_entropy")
            options["public"] = arrays.pair((public_inputs, labels), "the public set", loss)
        if instance is not None:
            module = copy.deepcopy(instance)
            start = Layout.of(module, options.get("buffers", "refuse"), options["personal"]).flatten(module)
            build: Build = _Copy(module)
        else:
            build = model
        task = cls(build, inputs, targets, rows, offsets, start=start, **options)
        task._check()
        return task

    def __post_init__(self) -> None:
        if self.client_names is not None and len(self.client_names) != self.clients:
            object.__setattr__(self, "client_names", None)  # a task of some of the clients, renumbered from 0

    def __repr__(self) -> str:
        return f"<Task {self.spec or self.name}: {self.clients} clients, {int(self.sizes.sum()):,} samples>"

    def __str__(self) -> str:
        """Five lines of sizes and shapes, without the data.

        >>> print(Task.from_arrays(nn.Linear(4, 2), [(torch.zeros(9, 4), torch.arange(9) % 2)] * 3))
           task  custom, loss cross_entropy
        clients  3 with 9 samples each, 27 in all
         inputs  (4,) (torch.float32), 2 classes
           test  none
          model  Linear, 10 parameters
        """
        return "\n".join(f"{k:>7}  {v}" for k, v in summary.facts(self).items())

    def _repr_html_(self) -> str:
        from fedbraid.report import notebook

        return notebook.task_as_html(self)

    # Facts for the rest of the library ------------------------------------------------------------

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
        """The layout of x: the parameters that travel."""
        return self.full_layout.shared

    @cached_property
    def full_layout(self) -> Layout:
        """The layout of all trained parameters: those that travel, then the personal ones."""
        return Layout.of(self.module(), self.buffers, self.personal)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.rows.device
        return device

    @property
    def per_example(self) -> Loss:
        """The loss as a function (outputs, targets, inputs) -> one number per example."""
        return by_signature(self.loss) if callable(self.loss) else LOSSES[self.loss]

    @cached_property
    def compares(self) -> bool:
        """Whether the loss takes the outputs of the server's model, or of a client's last one, for the same inputs."""
        return callable(self.loss) and by_signature(self.loss).compares

    def run(self, module: nn.Module, inputs: Tree) -> Any:
        """The outputs that losses and metrics get."""
        return logits(call(module, inputs) if self.forward is None else self.forward(module, inputs))

    def block_view(self, clients: NDArray[np.int64], version: int, seed: int) -> Task:
        """The task for these clients, which train from this version: lazy data is read now."""
        if not isinstance(self.inputs, LazyColumn):
            return self
        return cast("Task", BlockView(self, clients, self.inputs.store.table(clients, version, seed)))

    def prefetch(
        self, clients: NDArray[np.int64], version: int, seed: int, after: NDArray[np.int64] | None = None
    ) -> None:
        """Read lazy data ahead of its use: of the clients that train next, and of those at the next version."""
        if isinstance(self.inputs, LazyColumn):
            self.inputs.store.prefetch(clients, version, seed, after)

    @property
    def lazy(self) -> bool:
        """Whether samples are read when their client trains."""
        return isinstance(self.inputs, LazyColumn)

    def close(self) -> None:
        """Stop the processes that prefetch."""
        for some in (self.inputs, self.test and self.test[0]):
            if isinstance(some, LazyColumn):
                some.store.stop()

    @property
    def ragged(self) -> bool:
        """Whether samples differ in length, by amounts that are unknown until they are read."""
        return isinstance(self.inputs, LazyColumn) and self.inputs.store.collate is not None

    @property
    def like(self) -> tuple[Tree, Tree]:
        """Inputs and targets that show their shapes and types: all of them, or two samples if they are on disk."""
        return _like(self.inputs), _like(self.targets)

    @property
    def _like(self) -> Tree:
        """Targets that show their shapes and types: all of them, or two samples if they are on disk."""
        return _like(self.targets)

    @property
    def classifies(self) -> bool:
        """Whether targets are class numbers, so that there is an accuracy."""
        return isinstance(self._like, Tensor | Chunks) and not self._like.is_floating_point()

    def predict(self, outputs: Any) -> Tensor | None:
        """The classes that the outputs predict; None unless there is one per sample."""
        if not (self.classifies and self._like.ndim == 1 and isinstance(outputs, Tensor)):
            return None
        if self.loss == "logistic":
            return (outputs.reshape(len(outputs)) > 0).long()
        return outputs.argmax(1) if outputs.ndim == 2 else None

    @cached_property
    def measures(self) -> tuple[str, ...]:
        """The metrics of an evaluation; the first is the default for early stopping and the best model."""
        with torch.no_grad():
            named = self.predict(self._forward(self.module().to(self.device).eval(), self.device)) is not None
        return (*(("accuracy",) if named else ()), "loss", *self.metrics)

    @cached_property
    def classes(self) -> int:
        """The number of classes in the targets."""
        targets = self._like
        return int(targets.max()) + 1 if self.classifies and targets.numel() else 0

    @property
    def stochastic(self) -> bool:
        """Whether the model draws random numbers while it trains (dropout), by trying it."""
        return self.summary.stochastic

    @cached_property
    def summary(self) -> ModelSummary:
        """Facts about the model from one forward pass of two samples."""
        leaves = products = numbers = cells = 0

        def count(module: nn.Module, _: Any, out: Any) -> None:
            nonlocal leaves, products, numbers, cells
            products += _multiply_adds(module, out)
            if any(True for _ in module.children()):
                return
            leaves += 1
            numbers += sum(t.numel() for t in pytree.tree_leaves(out) if isinstance(t, Tensor)) // 2
            if isinstance(module, nn.RNNBase) and not isinstance(module, nn.LSTM) and out[0].ndim == 3:
                cells += module.num_layers * out[0].shape[1 if module.batch_first else 0]

        module = self.module().train()
        hooks = [m.register_forward_hook(count) for m in module.modules()]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.get_rng_state()
            self._forward(module, "cpu")
            stochastic = not torch.equal(before, torch.get_rng_state())
        for hook in hooks:
            hook.remove()
        frozen = not all(p.requires_grad for p in module.parameters())
        recurrent = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
        widest = max(
            (w.numel() for net in recurrent for n, w in net.named_parameters() if "weight" in n), default=0
        )
        chain = all(isinstance(m, _MAPS) for m in module.modules() if not any(True for _ in m.children()))
        return ModelSummary(repr(module), stochastic, frozen, leaves, products, numbers, cells, widest, chain)

    def _forward(self, module: nn.Module, device: str | torch.device) -> Any:
        """The outputs for the first and the last sample."""
        x = tree.to(self.sample, device)
        try:
            return self.run(module, x)
        except Exception as error:
            remedy = "make model and data fit each other"
            if "dtype" in str(error) and not all(t.is_floating_point() for t in tree.leaves(x)):
                remedy = "give images as float32, since integers are passed as int64 (tokens)"
            elif isinstance(x, dict) and "keyword argument" in str(error):
                remedy = (
                    "a model of named inputs is called by keywords: name them as it does, choose them with inputs=, or give"
                    " forward="
                )
            raise DataError(
                f"the model's forward pass fails on two samples of shape {tree.shapes(self.like[0])}: {error}; {remedy}"
            ) from error

    @property
    def sample(self) -> Tree:
        """The first and the last client's inputs, in the types that the model gets."""
        return tree.numbers(tree.take(self.inputs, self.rows[[0, -1]]))

    def module(self, seed: int = 0) -> nn.Module:
        """A new float32 model, with weights drawn by this seed (or those of the instance it copies)."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.key(seed, "init"))
            module = self.build()
        return module.float()

    def initial(self, seed: int) -> Tensor:
        """x⁰, the model that the first round starts from."""
        return self.vector(seed)[: self.layout.size]

    def vector(self, seed: int) -> Tensor:
        """x⁰ and, after it, the personal parameters that every client starts from."""
        x = self.full_layout.flatten(self.module(seed)) if self.start is None else self.start.clone()
        return x.to(self.device)

    def initial_personal_state(self, seed: int) -> dict[str, Tensor]:
        """The model parameters in a client's state before its first participation, by their key in it."""
        state = {}
        if self.full_layout.size > self.layout.size:
            state[PERSONAL] = self.vector(seed)[self.layout.size :]
        if self.compares:
            state[PREVIOUS] = self.vector(seed)
        return state

    def row_ids(self, clients: NDArray[np.int64], picked: NDArray[np.int64]) -> Tensor:
        """Rows of the table for the picked samples `[m, B]` of these clients."""
        at = placed(self.offsets[clients][:, None] + picked, self.device)
        return at if self._in_order else self.rows[at]

    @cached_property
    def _in_order(self) -> bool:
        """Whether the table itself has the clients' rows one after the other."""
        return torch.equal(self.rows, torch.arange(len(self.rows), device=self.rows.device))

    def labels(self, client: int) -> Tree:
        """The targets that a client holds."""
        return tree.take(self.targets, self.rows[self.offsets[client] : self.offsets[client + 1]])

    def to(self, device: str | torch.device) -> Task:
        """The same task with its tensors on a device."""
        if self.device == torch.device(device):
            return self
        moved = copy.copy(self)
        moved.__dict__.update(
            {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)},
            inputs=tree.to(self.inputs, device),
            targets=tree.to(self.targets, device),
            test=None if self.test is None else tuple(tree.to(t, device) for t in self.test),
            public=None if self.public is None else tuple(tree.to(t, device) for t in self.public),
        )
        return moved

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the data, the partition, the model and the loss's name, for the run record."""
        h = hashlib.blake2b(digest_size=16)
        h.update(self.full_layout.fingerprint)
        loss = self.loss if isinstance(self.loss, str) else getattr(self.loss, "__qualname__", "")
        h.update(repr((loss, self.buffers, self.augment)).encode())
        if personal_names := [s.name for s in self.full_layout if s.personal]:
            h.update(repr(personal_names).encode())
        if not isinstance(self.inputs, Tensor):
            h.update(
                repr([key for some in (self.inputs, self.targets) for key, _ in tree.named(some)]).encode()
            )
        for t in self._tensors():
            h.update(str((t.dtype, tuple(t.shape), t.stride())).encode())
            h.update(_storage(t).data)
        for column in (self.inputs, *(self.test or ())[:1]):
            if isinstance(column, LazyColumn):
                h.update(column.store.content_stamp())
        h.update(np.ascontiguousarray(self.offsets).data)
        return h.hexdigest()

    def _tensors(self) -> Iterator[Tensor]:
        """All tensors that the run's numbers depend on."""
        for some in (self.inputs, self.targets, self.rows, *(self.test or ()), *(self.public or ())):
            for each in some.probes() if isinstance(some, LazyColumn) else (some,):
                for leaf in tree.leaves(each):
                    yield from _pieces(leaf)
        if self.start is not None:
            yield from self.module().state_dict().values()

    # Checks ---------------------------------------------------------------------------------------

    def _check(self) -> None:
        empty = np.flatnonzero(np.diff(self.offsets) == 0)
        if len(empty):
            raise DataError(f"client {empty[0]} has no samples; leave it out or give it at least one")
        if not callable(self.loss) and self.loss not in LOSSES:
            raise unknown("loss", str(self.loss), LOSSES)
        _check_metrics(self.metrics)
        self._check_test()
        module = self.module()
        self.__dict__["full_layout"] = Layout.of(module, self.buffers, self.personal)
        module.to(self.device).eval()
        with torch.no_grad():
            out = self._forward(module, self.device)
        self._check_loss(out)
        if isinstance(self.loss, str) and self.loss != "mse":
            self._check_labels(out)

    def _check_test(self) -> None:
        """Refuse a test set whose inputs differ from the clients'."""
        if self.test is None:
            return
        in_test, in_training = (dict(tree.named(_like(t))) for t in (self.test[0], self.inputs))
        if odd := in_test.keys() ^ in_training.keys():
            key = min(odd, key=str)
            has = "has" if key in in_test else "lacks"
            what = f"the input {key!r}" if key is not None else "inputs of another kind"
            raise DataError(f"the test set {has} {what}, unlike the clients; give both the same inputs")

    def _check_loss(self, out: Any) -> None:
        y = tree.take(self.targets, self.rows[[0, -1]])
        if isinstance(self.loss, str) and not isinstance(out, Tensor):
            raise DataError(
                f"the model gives a {type(out).__name__}; its forward must return one tensor or have .logits for"
                f" {self.loss!r}; give forward= or a custom loss"
            )
        got = f"outputs {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        expected = f"targets {tuple(y.shape)}" if isinstance(y, Tensor) else f"targets {tree.shapes(y)}"
        try:
            with torch.no_grad():
                each = self.per_example(out, y, tree.to(self.sample, self.device))
        except Exception as error:
            advice = shape_advice(self.loss, out, y)
            if advice is None and isinstance(self.loss, str) and isinstance(out, Tensor):
                self._check_labels(out)  # a label out of range fails in the loss
            raise DataError(
                f"the loss fails on {got} and {expected}: {error}; {advice or 'give a loss= that takes these shapes'}"
            ) from error
        if not isinstance(each, Tensor) or each.shape != (2,):
            gave = f"shape {tuple(each.shape)}" if isinstance(each, Tensor) else f"a {type(each).__name__}"
            raise DataError(
                f"the loss gave {gave} for two samples; it must give one number per example (reduction='none')"
            )

    def _holder(self, label: int) -> str:
        """The client that holds a label, for sentences."""
        for client in range(self.clients):
            if bool((self.labels(client) == label).any()):
                return self.name_of(client)
        return "the table"

    def name_of(self, client: int) -> str:
        """A client's name in tables and sentences: its number, and its name in the data if there is one."""
        return f"client {client}" + ("" if self.client_names is None else f" ({self.client_names[client]})")

    def _check_labels(self, out: Tensor) -> None:
        classes = out.shape[1] if self.loss == "cross_entropy" else 2
        training = self._like
        tested = self.test[1] if self.test else training[:0]
        for column in (self.targets, tested):
            if isinstance(column, LazyColumn):  # its labels are checked when they are read
                column.store.classes = classes
        for y in (training, _like(tested)):
            if y.numel() and (int(y.min()) < 0 or int(y.max()) >= classes):
                bad = int(y.min()) if int(y.min()) < 0 else int(y.max())
                outputs = f"{out.shape[1]} outputs" if out.ndim > 1 else "one output"
                who = self._holder(bad) if y is training else "the test set"
                raise DataError(
                    f"{who} has the label {bad}, but the labels of a model with {outputs} run from 0 to {classes - 1};"
                    " renumber the labels, or give the model an output for each"
                )


def shape_advice(loss: str | Loss, out: Any, y: Tree) -> str | None:
    """Which of outputs and targets to change and how, for a loss by name; None where their shapes fit.

    >>> shape_advice("cross_entropy", torch.zeros(2, 7, 30), torch.zeros(2, 7))
    'it needs the classes second; use forward=lambda model, x: model(x).transpose(1, 2)'
    """
    if not isinstance(loss, str) or not isinstance(out, Tensor) or not isinstance(y, Tensor):
        return None
    if loss != "cross_entropy":
        if out[0].numel() == y[0].numel():
            return None
        return (
            f"{loss} compares number by number; change the model's last layer to give {y[0].numel()} a sample, or give"
            f" targets of shape {tuple(out.shape[1:])} a sample"
        )
    if out.ndim == y.ndim + 1:
        if out.shape[2:] == y.shape[1:]:
            return None
        if out.shape[:-1] == y.shape:
            last = "transpose(1, 2)" if out.ndim == 3 else "movedim(-1, 1)"
            return f"it needs the classes second; use forward=lambda model, x: model(x).{last}"
    elif out.shape == y.shape:
        return "it needs class numbers, not a number for each class; change the targets to targets.argmax(1)"
    elif y.ndim == out.ndim and y.shape[-1] == 1:
        return "it needs one class number a sample; change the targets to targets[..., 0]"
    elif out.ndim == y.ndim == 3 or (out.ndim == 3 and y.ndim == 1):
        return (
            "the model gives outputs for each position, and the targets are one a sample; use forward=lambda model, x:"
            " model(x)[:, -1], or give targets for each position"
        )
    return (
        "it needs outputs (batch, classes, ...) for targets (batch, ...); change the targets, or the outputs with"
        " forward=lambda model, x: ..."
    )


def _multiply_adds(module: nn.Module, out: Any) -> int:
    """The approximate multiply-adds of a module's direct weights for a sample: one per use of each weight."""
    weights = sum(p.numel() for p in module.parameters(recurse=False))
    first = next((t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.ndim), None)
    if (
        not weights
        or first is None
        or not first.numel()
        or isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ):
        return 0
    channels = first.shape[1] if first.ndim == 4 or isinstance(module, _ConvNd) else first.shape[-1]
    return weights * first[0].numel() // channels


def _named(clients: Any, tests: Any) -> tuple[Any, Any, tuple[str, ...] | None]:
    """Clients, their local test sets in the same order, and the names of both where they are dicts by name."""
    if not isinstance(clients, Mapping):
        if isinstance(tests, Mapping):
            raise DataError("client_tests= is a dict by name, and the clients are not; give both as dicts")
        return clients, tests, tuple(clients.names) if isinstance(clients, folders) else None
    if isinstance(tests, Mapping):
        if odd := [name for name in tests if name not in clients]:
            raise DataError(f"client_tests= names {odd[0]!r}, which is not a client; use the clients' names")
        tests = [tests.get(name) for name in clients]
    return list(clients.values()), tests, tuple(map(str, clients))


def _check_local_tests(clients: Any, test: Any, client_tests: Sequence[Any]) -> None:
    if len(client_tests) != len(clients):
        raise DataError(f"{len(client_tests)} local test sets for {len(clients)} clients; give one each")
    if test is not None:
        raise DataError("both test= and client_tests= were given; give one of them")


def _like(targets: Tree) -> Tree:
    return targets.example if isinstance(targets, LazyColumn) else targets


def _pieces(leaf: Any) -> Iterator[Tensor]:
    """The tensors of a leaf."""
    if isinstance(leaf, Chunks):
        for piece in leaf.pieces:
            yield from _pieces(piece)
    else:
        yield from (leaf.values, leaf.lengths) if isinstance(leaf, Padded) else (leaf,)


def _check_metrics(metrics: Any) -> None:
    if not isinstance(metrics, Mapping):
        raise DataError(f"metrics is a {type(metrics).__name__}; give a dict of functions by name")
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
            raise DataError(
                f"{name!r} is not a valid name for a metric; use another identifier, such as 'f1'"
            )
        if not callable(metric) and not hasattr(metric, "compute"):
            raise DataError(
                f"metric {name!r} is a {type(metric).__name__}; give a function (outputs, targets) -> number"
            )


def _globs(personal: Any) -> tuple[str, ...]:
    globs = (personal,) if isinstance(personal, str) else tuple(personal)
    if not all(isinstance(g, str) for g in globs):
        raise DataError(f"personal={personal!r} names no parameters; give globs such as ('head.*',)")
    return globs


class _Copy:
    """Builds a model by copying a given one (a closure that prints and pickles)."""

    def __init__(self, module: nn.Module) -> None:
        self.given = module

    def __call__(self) -> nn.Module:
        """A copy; weights that are never trained are shared by all of them."""
        frozen = {id(p): p for p in self.given.parameters() if not p.requires_grad}
        return copy.deepcopy(self.given, frozen)


def _instance(model: Any) -> nn.Module | None:
    """The module whose weights every run starts from: an instance, or what a function returns every time."""
    with torch.random.fork_rng(devices=[]):
        built = callable(model) and not isinstance(model, nn.Module)
        first, second = (model(), model()) if built else (model, model)
    if not isinstance(first, nn.Module):
        raise DataError(
            f"the model is a {type(first).__name__}; pass a torch.nn.Module or a function that returns one"
        )
    if any(t.is_meta for t in first.state_dict().values()):
        raise DataError(
            "the model is on the meta device, which holds no weights; build it on the CPU, such as by"
            " model.to_empty(device='cpu') and its layers' reset_parameters()"
        )
    return first if first is second else None


def _storage(t: Tensor) -> NDArray[np.uint8]:
    """The bytes behind a tensor, read once even where its rows overlap (text windows)."""
    t = t.detach().cpu()
    storage = t.untyped_storage()
    if t.is_contiguous() or storage.nbytes() >= t.nbytes:
        return t.contiguous().view(-1).view(torch.uint8).numpy() if t.nbytes else np.empty(0, np.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
