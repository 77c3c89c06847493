"""Real clients on Flower: the same algorithm objects, one file of the user's, real messages.

`apps(model, loss, load, test)`, or `from_task(task)`, makes the two halves of a Flower app. The client half is `engines.client.visit`,
the server half a source of replies for the loop of `simulate`: nothing of a run is written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbraid.errors import MissingExtra, unknown

if TYPE_CHECKING:
    from torch import nn

    from fedbraid.core.algorithm import Algorithm
    from fedbraid.core.work import Work
    from fedbraid.data.call import Loss
    from fedbraid.deploy.parts import Halves, Same, Whole
    from fedbraid.deploy.settings import Settings
    from fedbraid.schedule import Schedule

Pair = tuple[Any, Any]  # (inputs, targets)
OPTIONS = ("forward", "metrics", "personal", "collate")  # of a task


@dataclass(frozen=True)
class Project:
    """What the user's file says: the model, the loss, a node's own data, and how the server judges; or a whole task."""

    model: Callable[[], nn.Module] | None = None
    loss: str | Loss = "cross_entropy"
    load: Callable[[dict[str, Any]], Pair] | None = None
    test: Callable[[], Pair] | None = None
    buffers: str = "refuse"
    algorithm: Algorithm | None = None  # these three where the configuration does not say them
    work: Work | None = None
    schedule: Schedule | None = None
    callbacks: tuple[Any, ...] = ()  # who watches on the server
    options: Mapping[str, Any] = field(
        default_factory=dict
    )  # of the task: forward, metrics, personal, collate
    task: Whole | None = None  # the simulator's, in place of model, loss, load and test

    @property
    def parts(self) -> Halves | Same:
        """What a node has of the task, and what the server has."""
        from fedbraid.deploy.parts import Halves, Same

        if self.task is not None:
            return Same(self.task)
        assert self.load is not None
        return Halves(self.model, self.loss, self.load, self.test, {"buffers": self.buffers, **self.options})

    def settings(self, config: Mapping[str, Any]) -> Settings:
        """How a run with this configuration goes."""
        from fedbraid.deploy.settings import Settings

        return Settings.read(config, {k: getattr(self, k) for k in ("algorithm", "work", "schedule")})


class Apps(NamedTuple):
    """The two halves of a Flower app."""

    server: Any  # flwr.serverapp.ServerApp
    client: Any  # flwr.clientapp.ClientApp


def apps(
    model: Callable[[], nn.Module],
    loss: str | Loss,
    load: Callable[[dict[str, Any]], Pair],
    test: Callable[[], Pair] | None = None,
    *,
    algorithm: Algorithm | None = None,
    work: Work | None = None,
    schedule: Schedule | None = None,
    buffers: str = "refuse",
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> Apps:
    """Server and client for Flower.

    `load(node_config)` gives a node's own (inputs, targets); `test()` the server's, where it has any.
    Algorithm, work and schedule are the simulator's objects; those that are left out come from the app's
    configuration, as text. Callbacks are the simulator's too, and run where the server does. `options` are the task's:
    forward=, metrics=, personal=, collate= (of nodes' data).
    """
    for name in options:
        if name not in OPTIONS:
            raise unknown("option of apps", name, OPTIONS)
    return _apps(
        Project(model, loss, load, test, buffers, algorithm, work, schedule, tuple(callbacks), options)
    )


def from_task(
    task: Whole,
    *,
    algorithm: Algorithm | Callable[[], Algorithm] | None = None,
    work: Work | None = None,
    schedule: Schedule | None = None,
    callbacks: Sequence[Any] = (),
) -> Apps:
    """Server and client for Flower, of the very task that the simulator runs, or of a function that makes it.

    A function with an argument `node` is called with a node's configuration there, and makes the task of its data
    alone; the server calls it without, as the simulator does. Of any other task, a node is the client that its
    configuration names as `share`.
    """
    made = algorithm() if callable(algorithm) else algorithm
    return _apps(Project(algorithm=made, work=work, schedule=schedule, callbacks=tuple(callbacks), task=task))


def _apps(project: Project) -> Apps:
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise MissingExtra("deployment", "flower") from error
    from fedbraid.deploy.node import client_app
    from fedbraid.deploy.server import server_app

    return Apps(server_app(project), client_app(project))
