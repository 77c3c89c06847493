"""Clients that leave a run for good, by the operator's word, which waits in the run's folder until a step holds it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedbraid.core.context import Vectors
from fedbraid.deploy.node_table import Node, NodeState
from fedbraid.deploy.words import OperatorWord
from fedbraid.errors import WireError
from fedbraid.links.message import from_message

if TYPE_CHECKING:
    from fedbraid.deploy.fleet import Fleet

log = logging.getLogger("fedbraid")
WORD = OperatorWord("leaving.json", "leave")
named, name, forget = WORD.named, WORD.name, WORD.forget


@dataclass
class Departures:
    """Lets go of whom the operator named: with the contribution that they send back, or without when they cannot.

    Who is leaving is not selected, and what it uploaded is in no step that is still open: its contribution is what the
    server's last committed step holds of it.
    """

    fleet: Fleet
    since: dict[str, float] = field(default_factory=dict)

    def look(self, now: float) -> None:
        f = self.fleet
        for who in named(f.folder):
            node = f.table.nodes.get(who)
            if node is None or node.client < 0 or node.state is NodeState.GONE:
                continue
            if node.state is not NodeState.LEAVING:
                log.info("%s is to leave; its contribution is waited for, up to %g s", who, f.limit)
                node.on("departs")
                node.request = None
            since = self.since.setdefault(who, now)
            if not self._mirrored():
                self._dismiss(node, {})
            elif f.secure is not None or now - since > f.limit:  # a contribution is a single client's
                self._dismiss(node, None)
            elif node.is_connected and node.request is None:
                f.orders.leave(node, now)

    def is_waiting(self) -> bool:
        """Whether a contribution may still arrive from a node that is connected."""
        return any(n.state is NodeState.LEAVING and n.is_connected for n in self.fleet.table.nodes.values())

    def let_go(self, node: Node, head: dict[str, Any], upload: bytes) -> None:
        """Take back what a leaver contributed."""
        f = self.fleet
        if head.get("lost") is not False:
            raise WireError("it no longer has its state, so its contribution cannot be taken back")
        contribution = from_message(upload, self._mirrored(), f.setup.task.layout)
        seen = [norm for accepted in f.inbox.norms.seen.values() for norm, _ in accepted]
        # contributions may be of gradients where uploads are of updates
        rate = min(f.setup.work.rate(f.state.t), 1.0)
        most = f.settings.norm_factor * max([*seen, 1.0]) * max(f.state.t, 1) / rate
        for what, v in contribution.items():
            if 0 < most < float(v.norm()):
                raise WireError(
                    f"its contribution to {what} has norm {float(v.norm()):.6g}, beyond {most:.6g}"
                )
        self._dismiss(node, contribution)

    def forget_gone(self) -> None:
        forget(
            self.fleet.folder, (n.name for n in self.fleet.table.nodes.values() if n.state is NodeState.GONE)
        )

    def _mirrored(self) -> dict[str, int]:
        """What a leaver sends back, by name and width: nothing where the server holds it all."""
        rule, x = self.fleet.setup.algorithm.rule, self.fleet.state.x
        fresh = {key: v.reshape(1, -1) for key, v in rule.init(x).items()}
        return {key: v.numel() for key, v in rule.withdraw(fresh).items()}

    def _dismiss(self, node: Node, contribution: Vectors | None) -> None:
        f = self.fleet
        assert f.run is not None
        f.run.dismiss(node.client, contribution)
        node.on("dismissed")
        node.request = None
        stays = "" if contribution is not None else "; its contribution stays, because it did not send it"
        log.info("%s (client %d) has left for good%s", node.name, node.client, stays)
