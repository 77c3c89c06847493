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
    """What a run came to."""

    x: Tensor  # the final model, flat float32: the averaged one, which was evaluated
    history: Sequence[Record] = field(repr=False)  # one dict per server step
    task: Task = field(repr=False)
    state: State = field(repr=False)
    algorithm: Algorithm = field(repr=False)
    engine: str = ""
    plan: str | None = None  # why this engine, where fedbraid chose it
    out: Path | None = None
    work: Work | None = field(default=None, repr=False)

    def model(self, client: int | None = None) -> nn.Module:
        """The torch module with the final weights; a client's has its own parts, or is the model of its own."""
        with self._rows(client):
            return load_model_of(self.task, self.algorithm, self.state, client)

    def per_client(self) -> list[Record]:
        """A row a client that has a test share: its samples, and what the model that it uses is worth there."""
        with self._rows(0):
            own = partial(models_of, self.algorithm.rule, self.state)
            return per_client(self.task, own if self.state.clients.default else self.x)

    @contextmanager
    def _rows(self, client: int | None) -> Iterator[None]:
        """What clients remember, which the end of a run closed."""
        if client is None or not self.state.clients.stored:
            yield
            return
        if self.out is None:
            raise RunError("what clients hold went to a file that ended with the run; give out= to keep it")
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
        """How low-rank adapters were averaged, where there are some."""
        return lora(self.task.layout, self.algorithm)

    @property
    def privacy(self) -> str | None:
        """(ε, δ) that the run spent and whom it protects, where it is private."""
        return promise(self.last("epsilon"), privacy_of(self.algorithm))

    def last(self, key: str) -> float | None:
        """The latest value of a measurement, None where there was none."""
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
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in facts.items()}
        return "\n".join(f"{k:>10}  {v}" for k, v in shown.items() if v is not None)

    def _remark(self) -> str | None:
        """That nothing was learned, where the model names labels no better than a constant would."""
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
        """A matplotlib figure of a measurement over "step", "bytes", "time" or "flops" (extra `plot`)."""
        from fedbraid.report import notebook

        return notebook.plot(self, metric, axis)

    def timeline(self) -> Any:
        """A matplotlib figure of who trained when, from which version, in a run on a clock (extra `plot`)."""
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
    """The whole models `[m, D]` that clients use: the server's or their own, with their personal parts."""
    memory = {name: v.to(state.x.device) for name, v in state.clients.get(clients).items()}
    personal = rule.traits().personal
    own = None if personal is None else personal.personal_model
    shared = state.average.expand(len(clients), -1) if own is None else own(memory)
    return torch.cat([shared, memory[PERSONAL]], 1) if PERSONAL in memory else shared


def load_model_of(task: Task, algorithm: Algorithm, state: State, client: int | None) -> nn.Module:
    """A module with the averaged weights, and the personal parts that clients start with, or with a client's own."""
    if client is None:
        own = state.clients.default.get(PERSONAL)
        x = state.average if own is None else torch.cat([state.average, own.to(state.average)])
    elif not 0 <= client < task.clients:
        raise ConfigError(f"there is no client {client}; there are {task.clients} from 0 on")
    else:
        x = models_of(algorithm.rule, state, np.array([client]))[0]
    return task.full_layout.load(task.module(), x)
