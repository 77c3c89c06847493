"""Nodes whose uploads were refused again and again: barred, and asked again by the operator's word alone."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedbraid.deploy.node_table import EVENTS, Node, NodeState
from fedbraid.deploy.words import OperatorWord

if TYPE_CHECKING:
    from fedbraid.deploy.fleet import Fleet

log = logging.getLogger("fedbraid")
WORD = OperatorWord("admitted.json", "admit")
named, name = WORD.named, WORD.name


@dataclass
class Admissions:
    """Bars whose uploads were refused `max_refusals` times in a row, and admits whom the operator named.

    A barred node is a member still: what the server holds of it stays. What it uploaded is in no step that is open.
    """

    fleet: Fleet
    heard: set[str] = field(default_factory=set)  # words that the next committed step holds

    def review(self, node: Node) -> None:
        """Bar this node if it is time."""
        most = self.fleet.settings.max_refusals
        if not 0 < most <= node.refusals or node.state not in EVENTS["barred"]:
            return
        node.on("barred")
        node.request = None
        node.barred = (
            f"{node.refusals} uploads in a row were refused, the last because {node.refused_for}; it is not asked until"
            f" `fedbraid deploy admit {node.name}`"
        )
        self.fleet.trouble.add(node.name, node.client, node.barred)

    def look(self) -> None:
        """Hear the operator's words; each counts once."""
        for who in named(self.fleet.folder):
            node = self.fleet.table.nodes.get(who)
            if who not in self.heard and node is not None and node.state is NodeState.BARRED:
                node.admitted()
                log.info("%s (client %d) is asked again, by the operator's word", who, node.client)
            self.heard.add(who)

    def forget_heard(self) -> None:
        WORD.forget(self.fleet.folder, self.heard)
        self.heard.clear()
