"""Real clients on Flower: the same algorithm objects, one file of the user's, real messages.

`apps(model, loss, load, test)` makes the two halves of a Flower app. The client half is `engines.client.visit`,
the server half a source of replies for the loop of `simulate`: nothing of a run is written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbraid.errors import MissingExtra

if TYPE_CHECKING:
    from torch import nn

    from fedbraid.core.algorithm import Algorithm
    from fedbraid.core.work import Work
    from fedbraid.data.call import Loss
    from fedbraid.deploy.settings import Settings
    from fedbraid.schedule import Schedule

Pair = tuple[Any, Any]  # (inputs, targets)


@dataclass(frozen=True)
class Project:
    """What the user's file says: the model, the loss, a node's own data, and how the server judges."""

    model: Callable[[], nn.Module]
    loss: str | Loss
    load: Callable[[dict[str, Any]], Pair]
    test: Callable[[], Pair] | None = None
    buffers: str = "refuse"
    algorithm: Algorithm | None = None  # these three where the configuration does not say them
    work: Work | None = None
    schedule: Schedule | None = None
    callbacks: tuple[Any, ...] = ()  # who watches on the server

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
) -> Apps:
    """Server and client for Flower.

    `load(node_config)` gives a node's own (inputs, targets); `test()` the server's, where it has any.
    Algorithm, work and schedule are the simulator's objects; those that are left out come from the app's
    configuration, as text. Callbacks are the simulator's too, and run where the server does.
    """
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise MissingExtra("deployment", "flower") from error
    from fedbraid.deploy.node import client_app
    from fedbraid.deploy.server import server_app

    project = Project(model, loss, load, test, buffers, algorithm, work, schedule, tuple(callbacks))
    return Apps(server_app(project), client_app(project))
