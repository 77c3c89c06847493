"""Real clients: the same algorithm objects, one file of the user's, a broker that carries signed orders and uploads.

A `Project` in fleet.py says what a fleet learns: `fb.deploy.Project(model, loss, load, test)`, or a whole task by
`fb.deploy.from_task(task)`. The node's half is `engines.client_update`, the server's half a source of steps for the loop of
`simulate`: nothing of a run is written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedbraid.errors import ConfigError, unknown

if TYPE_CHECKING:
    from torch import nn

    from fedbraid.core.algorithm import Algorithm
    from fedbraid.core.work import Work
    from fedbraid.data.call import Loss
    from fedbraid.deploy.settings import Settings
    from fedbraid.deploy.task_halves import Halves, Same, Whole
    from fedbraid.schedule import Schedule

Pair = tuple[Any, Any]  # (inputs, targets)
OPTIONS = ("forward", "metrics", "personal", "collate", "buffers")  # of a task


@dataclass(frozen=True)
class Project:
    """What a fleet learns: the model, the loss, a node's own data, and the server's test set; or a whole task.

    `load(node_config)` returns a node's (inputs, targets), which never leave it; `test()` the server's, where it has any.
    Algorithm, work and schedule are the simulator's objects; those that are left out are read from fleet.toml.
    `options` are those of `fb.Task.from_arrays`: forward, metrics, personal, collate, buffers.

    >>> import fedbraid as fb
    >>> fleet = fb.deploy.Project(lambda: None, "mse", lambda node_config: ([], []), algorithm=fb.fedavg())
    """

    model: Callable[[], nn.Module] | None = None
    loss: str | Loss = "cross_entropy"
    load: Callable[[dict[str, Any]], Pair] | None = None
    test: Callable[[], Pair] | None = None
    algorithm: Algorithm | None = None
    work: Work | None = None
    schedule: Schedule | None = None
    callbacks: Sequence[Any] = ()  # run on the server
    options: Mapping[str, Any] = field(default_factory=dict)
    task: Whole | None = None  # the simulator's, in place of model, loss, load and test

    def __post_init__(self) -> None:
        for name in self.options:
            if name not in OPTIONS:
                raise unknown("option of a project", name, OPTIONS)
        if self.task is None and (self.model is None or self.load is None):
            raise ConfigError("a project needs a model and load(node_config), or task=; give both")

    @property
    def halves(self) -> Halves | Same:
        """What a node has of the task, and what the server has."""
        from fedbraid.deploy.task_halves import Halves, Same

        if self.task is not None:
            return Same(self.task)
        assert self.load is not None
        return Halves(self.model, self.loss, self.load, self.test, dict(self.options))

    def settings(self, config: Mapping[str, Any]) -> Settings:
        """How a run with this configuration goes."""
        from fedbraid.deploy.settings import Settings

        return Settings.read(config, {k: getattr(self, k) for k in ("algorithm", "work", "schedule")})


def from_task(
    task: Whole,
    *,
    algorithm: Algorithm | Callable[[], Algorithm] | None = None,
    work: Work | None = None,
    schedule: Schedule | None = None,
    callbacks: Sequence[Any] = (),
) -> Project:
    """The project of the very task that the simulator runs, or of a function that makes it.

    A function with an argument `node` is called with a node's configuration there, and makes the task of its data
    alone; the server calls it without, as the simulator does. Of any other task, a node is the client that its
    configuration names as `share`.
    """
    made = algorithm() if callable(algorithm) else algorithm
    return Project(algorithm=made, work=work, schedule=schedule, callbacks=callbacks, task=task)
