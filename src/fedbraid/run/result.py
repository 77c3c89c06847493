"""What a run returns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbraid.algorithms.lora import how as lora
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.metric_names import PERSONAL
from fedbraid.core.rule import Rule
from fedbraid.core.work import Work
from fedbraid.data.task import Task
from fedbraid.errors import ConfigError, RunError
from fedbraid.run.checkpoint import Record
from fedbraid.run.database import Database
from fedbraid.run.evaluate import per_client
from fedbraid.run.noise_outlook import privacy_of, promise
from fedbraid.run.state import State


@dataclass
class Result:
    """The result of a run."""

    x: Tensor  # the final model, flat float32: the averaged one, which was evaluated
    history: Sequence[Record] = field(repr=False)  # one dict per server step
    task: Task = field(repr=False)
    state: State = field(repr=False)
    algorithm: Algorithm = field(repr=False)
    engine: str = ""
    plan: str | None = None  # why this engine, if fedbraid selected it
    out: Path | None = None
    work: Work | None = field(default=None, repr=False)

    def model(self, client: int | None = None) -> nn.Module:
        """The torch module with the final weights; with `client`, that client's personalized model."""
        with self._rows(client):
            return load_model_of(self.task, self.algorithm, self.state, client)

    def per_client(self) -> list[Record]:
        """A row for each client with a local test set: its number of samples, and its model's metrics there."""
        with self._rows(0):
            models = partial(models_of, self.algorithm.rule, self.state)
            return per_client(self.task, models if self.state.clients.default else self.x)

    @contextmanager
    def _rows(self, client: int | None) -> Iterator[None]:
        """Open the clients' state, which the end of the run closed."""
        if client is None or not self.state.clients.stored:
            yield
            return
        if self.out is None:
            raise RunError(
                "the clients' state was spilled to a temporary file, which ended with the run; give out= to store it"
            )
        db = Database(self.out / "state.db")
        try:
            self.state.clients.attach(db, "clients", None)
            yield
        finally:
            db.close()

    @property
    def bytes_up(self) -> int:
        return sum(r["bytes_up"] for r in self.history)

    @property
    def bytes_down(self) -> int:
        return sum(r["bytes_down"] for r in self.history)

    @property
    def lora(self) -> str | None:
        """How low-rank adapters were averaged; None without adapters."""
        return lora(self.task.layout, self.algorithm)

    @property
    def privacy(self) -> str | None:
        """(ε, δ) that the run spent and the protected unit; None unless it is private."""
        return promise(self.last("epsilon"), privacy_of(self.algorithm))

    def last(self, key: str) -> float | None:
        """The latest value of a metric; None if there is none."""
        return next((r[key] for r in reversed(self.history) if key in r), None)

    def __str__(self) -> str:
        facts = {
            "algorithm": self.algorithm.label,
            "steps": self.state.t,
            "accuracy": self.last("accuracy"),
            "loss": self.last("loss"),
            **{name: self.last(name) for name in self.task.metrics},
            "bytes up": f"{self.bytes_up:,}",
            "bytes down": f"{self.bytes_down:,}",
            "privacy": self.privacy,
            "engine": self.engine,
            "LoRA": self.lora,
            "note": self._remark(),
        }
        rounded = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in facts.items()}
        return "\n".join(f"{k:>10}  {v}" for k, v in rounded.items() if v is not None)

    def _remark(self) -> str | None:
        """A note that nothing was learned, if the accuracy is at most that of the most frequent label."""
        accuracy, test = self.last("accuracy"), self.task.test
        labels = None if test is None else test[1]
        if (
            accuracy is None
            or not isinstance(labels, Tensor)
            or labels.is_floating_point()
            or labels.ndim != 1
        ):
            return None
        most = float(np.unique(labels.numpy(), return_counts=True)[1].max()) / len(labels)
        if accuracy > most:
            return None
        return f"no better than naming the most frequent label ({most:.1%} of the test set); try a smaller learning rate"

    def _repr_html_(self) -> str:
        from fedbraid.report import notebook

        return notebook.as_html(self)

    def plot(self, metric: str | None = None, axis: str = "step") -> Any:
        """A matplotlib figure of a metric over "step", "bytes", "time" or "flops" (extra `plot`)."""
        from fedbraid.report import notebook

        return notebook.plot(self, metric, axis)

    def timeline(self) -> Any:
        """A matplotlib figure of each job's client, version and interval, in a run with a clock (extra `plot`)."""
        from fedbraid.report import notebook

        return notebook.timeline(self)

    def to_pandas(self) -> Any:
        """The history as a pandas frame, a row a step (extra `frames`)."""
        from fedbraid.report import notebook

        return notebook.to_pandas(self.history)

    def to_polars(self) -> Any:
        """The history as a polars frame, a row a step (extra `frames`)."""
        from fedbraid.report import notebook

        return notebook.to_polars(self.history)

    def export(self, path: str | os.PathLike[str], format: str | None = None) -> Path:
        """Write the final model as safetensors, TorchScript or ONNX, by the file's name."""
        from fedbraid.run.export import export

        return export(self, path, format)


def models_of(rule: Rule, state: State, clients: NDArray[np.int64]) -> Tensor:
    """The full models `[m, D]` that clients use: the global or personalized ones, with personal parameters."""
    memory = {name: v.to(state.x.device) for name, v in state.clients.get(clients).items()}
    personal = rule.traits().personal
    personal_model = None if personal is None else personal.personal_model
    shared = state.average.expand(len(clients), -1) if personal_model is None else personal_model(memory)
    return torch.cat([shared, memory[PERSONAL]], 1) if PERSONAL in memory else shared


def load_model_of(task: Task, algorithm: Algorithm, state: State, client: int | None) -> nn.Module:
    """A module with the averaged weights and the initial personal parameters, or with a client's model."""
    if client is None:
        personal = state.clients.default.get(PERSONAL)
        x = state.average if personal is None else torch.cat([state.average, personal.to(state.average)])
    elif not 0 <= client < task.clients:
        raise ConfigError(f"there is no client {client}; there are {task.clients} from 0 on")
    else:
        x = models_of(algorithm.rule, state, np.array([client]))[0]
    return task.full_layout.load(task.module(), x)
