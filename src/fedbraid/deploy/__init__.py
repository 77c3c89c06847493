"""Real clients on Flower: the same algorithm objects, one file of the user's, real messages.

`apps(model, loss, load, test)` makes the two halves of a Flower app. The client half is `engines.client.visit`,
the server half `loop.advance`: nothing of an algorithm is written twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbraid.errors import MissingExtra

if TYPE_CHECKING:
    from torch import nn

    from fedbraid.data.task import Loss

Pair = tuple[Any, Any]  # (inputs, targets)


@dataclass(frozen=True)
class Project:
    """What the user's file says: the model, the loss, a node's own data, and how the server judges."""

    model: Callable[[], nn.Module]
    loss: str | Loss
    load: Callable[[dict[str, Any]], Pair]
    test: Callable[[], Pair] | None = None
    buffers: str = "refuse"


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
    buffers: str = "refuse",
) -> Apps:
    """Server and client for Flower.

    `load(node_config)` gives a node's own (inputs, targets); `test()` the server's, where it has any.
    Algorithm, work and schedule come from the app's configuration.
    """
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise MissingExtra("deployment", "flower") from error
    from fedbraid.deploy.node import client_app
    from fedbraid.deploy.server import server_app

    project = Project(model, loss, load, test, buffers)
    return Apps(server_app(project), client_app(project))
