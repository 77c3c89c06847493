"""Watch a run: stop it early, keep its best model, and log it to TensorBoard, MLflow or Weights & Biases.

A callback is any object with some of `start(run)`, `step(record, run)` and `end(result)`; a `step` that
returns True ends the run. Give them as `fb.simulate(..., callbacks=[...])`:

>>> class Print:
...     def step(self, record, run):
...         print(record["step"], record.get("accuracy"))
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from fedbraid.algorithms.registry import parts
from fedbraid.core.check import integer, number
from fedbraid.core.metric_names import falls
from fedbraid.errors import ConfigError, MissingExtra, unknown
from fedbraid.run.checkpoint import Record, save_model
from fedbraid.run.result import Result
from fedbraid.run.run import Run


def _before(run: Run) -> list[Record]:
    """The records of the steps before a resume."""
    return list(run.folder.records())[: run.state.t] if run.folder is not None and run.state.t else []


def _check(metric: str, record: Record, run: Run) -> None:
    """Refuse a metric that this record should hold and that no record will ever have."""
    is_evaluated, options = "loss" in record, run.options
    by_client = metric.removesuffix("_clients").removesuffix(
        "_worst_tenth"
    )  # left out if no local test set has a value
    if metric in record or (options.evaluate_on == "clients" and by_client in record):
        return
    if not is_evaluated and (options.evaluate_every is None or run.setup.task.test is None):
        raise ConfigError(
            f"{metric!r} is not measured, since nothing is evaluated; give test= and evaluate_every="
        )
    if is_evaluated:
        raise unknown("metric", metric, [k for k in scalars(record) if "/" not in k])


class EarlyStopping:
    """Ends a run when a measurement has not improved by more than `by` for `patience` evaluations."""

    def __init__(self, patience: int = 10, metric: str = "accuracy", by: float = 0.0) -> None:
        integer("patience", patience)
        number("by", by, "[0, inf)", "calls a loss an improvement")
        self.patience, self.metric, self.by = patience, metric, by

    def start(self, run: Run) -> None:
        self.best: float | None = None
        self.waited = 0
        for record in _before(run):
            self._see(record)

    def step(self, record: Record, run: Run) -> bool:
        _check(self.metric, record, run)
        return self._see(record)

    def _see(self, record: Record) -> bool:
        if self.metric not in record:
            return False
        value = -record[self.metric] if falls(self.metric) else record[self.metric]
        if self.best is None or value > self.best + self.by:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.waited >= self.patience


class StopAtBytes:
    """Ends a run when clients have uploaded so many bytes together."""

    def __init__(self, up: int) -> None:
        integer("up", up, why="ends a run before it begins")
        self.limit, self.spent = up, 0

    def start(self, run: Run) -> None:
        self.spent = sum(record["bytes_up"] for record in _before(run))

    def step(self, record: Record, run: Run) -> bool:
        self.spent += record["bytes_up"]
        return self.spent >= self.limit


class KeepBest:
    """Keeps the model of the best evaluation: as `x`, and in the run's folder as `best.safetensors`."""

    FILE = "best.safetensors"

    def __init__(self, metric: str = "accuracy", path: str | os.PathLike[str] | None = None) -> None:
        self.metric, self.path = metric, None if path is None else Path(path)
        self.value: float | None = None
        self.at: int | None = None
        self.x: Tensor | None = None

    def start(self, run: Run) -> None:
        self.value = self.at = self.x = None
        if self.path is None and run.folder is not None:
            self.path = run.folder.path / self.FILE
        for record in _before(run):
            self._better(record)

    def step(self, record: Record, run: Run) -> None:
        _check(self.metric, record, run)
        if self._better(record):
            self.x = run.state.average.clone()
            if self.path is not None:
                save_model(self.path, run.setup.task.layout.views(self.x))

    def _better(self, record: Record) -> bool:
        value = record.get(self.metric)
        falling = falls(self.metric)
        if value is None or (
            self.value is not None and (value >= self.value if falling else value <= self.value)
        ):
            return False
        self.value, self.at = value, record["step"]
        return True


# Trackers -----------------------------------------------------------------------------------------


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record, those by name as `up/delta`."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            found |= {f"{key}/{name}": float(v) for name, v in value.items()}
        elif isinstance(value, int | float) and not isinstance(value, bool) and key != "step":
            found[key] = float(value)
    return found


def facts(run: Run) -> dict[str, str]:
    """What a run is, for a tracker's table of settings."""
    setup = run.setup
    return {
        "task": setup.task.spec or setup.task.name,
        "algorithm": setup.algorithm.name or "made in Python",
        "work": repr(setup.work),
        "schedule": repr(run.schedule),
        "seed": str(setup.seed),
        **parts(setup.algorithm),
    }


class TensorBoard:
    """Logs every number of every step for TensorBoard, by default into the run's folder."""

    EVERY = 1.0  # seconds between two flushes

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("logging to TensorBoard", "tensorboard") from error
        self.writer_of: Callable[..., Any] = SummaryWriter
        self.folder = None if folder is None else Path(folder)

    def start(self, run: Run) -> None:
        folder = self.folder or (run.folder.path if run.folder else Path("runs")) / "tensorboard"
        again = (
            run.state.t + 1 if run.state.t else None
        )  # drops what a killed run logged after its last commit
        self.writer, self.flushed = self.writer_of(str(folder), purge_step=again), time.monotonic()
        for name, text in facts(run).items():
            self.writer.add_text(name, text, run.state.t)

    def step(self, record: Record, run: Run) -> None:
        for name, value in scalars(record).items():
            self.writer.add_scalar(name, value, record["step"])
        if time.monotonic() - self.flushed > self.EVERY:
            self.flushed = time.monotonic()
            self.writer.flush()

    def end(self, result: Result) -> None:
        self.writer.close()


class MLflow:
    """Logs a run to MLflow; `uri` is that of `mlflow.set_tracking_uri`, such as "sqlite:///mlflow.db"."""

    FILE = "mlflow.json"

    def __init__(self, experiment: str = "fedbraid", uri: str | None = None, name: str | None = None) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise MissingExtra("logging to MLflow", "mlflow") from error
        self.client, self.experiment, self.name = MlflowClient(uri), experiment, name
        self.id = ""

    def start(self, run: Run) -> None:
        path = None if run.folder is None else run.folder.path / self.FILE
        if path is not None and run.state.t and path.exists():
            self.id = json.loads(path.read_text())["run_id"]
            return
        experiment = self.client.get_experiment_by_name(self.experiment)
        experiment_id = (
            experiment.experiment_id if experiment else self.client.create_experiment(self.experiment)
        )
        name = self.name or (run.folder.path.name if run.folder else None)
        self.id = self.client.create_run(experiment_id, run_name=name).info.run_id
        for key, text in facts(run).items():
            self.client.log_param(self.id, key, text[:500])
        if run.folder is not None:
            run.folder.write_json(self.FILE, {"run_id": self.id})

    def step(self, record: Record, run: Run) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(key, value, now, record["step"]) for key, value in scalars(record).items()]
        self.client.log_batch(self.id, metrics=metrics)

    def end(self, result: Result) -> None:
        self.client.set_terminated(self.id)


class WandB:
    """Logs a run for Weights & Biases: offline unless `mode` says else, by default into the run's folder.

    `wandb sync` sends an offline run up later. Other options go to `wandb.init`.
    """

    def __init__(
        self,
        project: str = "fedbraid",
        mode: str = "offline",
        folder: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtra("logging to Weights & Biases", "wandb") from error
        self.wandb, self.folder = wandb, folder
        self.options = {"project": project, "mode": mode, **options}

    def start(self, run: Run) -> None:
        folder = self.folder or (run.folder.path if run.folder else ".")
        name = {} if run.folder is None else {"name": run.folder.path.name}
        quiet = self.wandb.Settings(silent=True, console="off")
        self.run = self.wandb.init(
            **{**name, "dir": str(folder), "config": facts(run), "settings": quiet, **self.options}
        )

    def step(self, record: Record, run: Run) -> None:
        self.run.log(scalars(record), step=record["step"])

    def end(self, result: Result) -> None:
        self.run.finish()


TRACKERS: dict[str, Callable[[], Any]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def trackers(names: str) -> list[Any]:
    """Trackers by name, such as "tensorboard,wandb"."""
    requested = [n.strip() for n in names.split(",") if n.strip()]
    for name in requested:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
    return [TRACKERS[name]() for name in requested]


def watching(
    track: str | None = None, patience: int | None = None, keep_best: bool = False, metric: str = "accuracy"
) -> list[Any]:
    """The callbacks that settings name: trackers, when to stop early, whether to keep the best model."""
    found = [] if track is None else trackers(track)
    found += [] if patience is None else [EarlyStopping(patience, metric)]
    return [*found, KeepBest(metric)] if keep_best else found


__all__ = [
    "EarlyStopping",
    "KeepBest",
    "MLflow",
    "StopAtBytes",
    "TensorBoard",
    "WandB",
    "trackers",
    "watching",
]
