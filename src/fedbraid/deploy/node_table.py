"""The fleet's nodes: one state machine each, and the client number and facts that outlive the server's process.

| state | the node | leaves it when |
| --- | --- | --- |
| new | has not introduced itself to this server | it says how many samples it has |
| idle | can be selected | it is asked to train |
| asked | was given an order | its answer is here, it fails, or the order is overdue |
| slow | has an order past its deadline; gets no other one | its answer is here, it fails, or the order expires |
| backing off | failed, and is left alone for a while | the pause is over |
| barred | had its uploads refused several times in a row; is asked nothing | the operator admits it |
| leaving | was named by the operator; is asked for its contribution | it was dismissed |
| gone | left for good | never |

A connection is no state: a node may be lost and found in each of them. What it was asked is given again, under the same
job, when it has another session; a node that is at work on the job ignores the repetition.

A node's name is proven by the transport. Its client number is the number at the name's end where that is free (node-7 is
client 7), else the smallest free one; it never changes during a run.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbraid.deploy.backoff import Backoff
from fedbraid.deploy.transport import Kind, ModelReference, NodeIdentity
from fedbraid.deploy.troubles import plain
from fedbraid.errors import WireError

SAMPLES_LIMIT = 10**9  # no node is believed to have more
NUMBER_LIMIT = 10**6  # the largest client number that a name gives
ADOPTED_ORDERS = 4  # an answer to one of the next orders is known to a server that has just started


class NodeState(enum.Enum):
    NEW, IDLE, ASKED, SLOW = "new", "idle", "asked", "slow"
    BACKING_OFF, BARRED, LEAVING, GONE = "backing off", "barred", "leaving", "gone"


N = NodeState
EVENTS: dict[str, dict[NodeState, NodeState]] = {
    "registered": {N.NEW: N.IDLE},
    "asked": {N.IDLE: N.ASKED},
    "overdue": {N.ASKED: N.SLOW},
    "answered": {N.ASKED: N.IDLE, N.SLOW: N.IDLE},
    "failed": dict.fromkeys((N.NEW, N.IDLE, N.ASKED, N.SLOW, N.BACKING_OFF), N.BACKING_OFF),
    "rested": {N.BACKING_OFF: N.IDLE},
    "forgotten": {N.BACKING_OFF: N.NEW},
    "barred": dict.fromkeys((N.NEW, N.IDLE, N.ASKED, N.SLOW, N.BACKING_OFF), N.BARRED),
    "admitted": {N.BARRED: N.BACKING_OFF},
    "departs": dict.fromkeys((N.NEW, N.IDLE, N.ASKED, N.SLOW, N.BACKING_OFF, N.BARRED, N.LEAVING), N.LEAVING),
    "dismissed": {N.LEAVING: N.GONE},
}  # fmt: skip


@dataclass
class PendingRequest:
    """What a node was asked and has not answered."""

    job: str
    kind: Kind
    body: bytes
    deadline: float  # Unix time, which is signed
    since: float
    version: int = -1
    sequence: int = 0
    model: ModelReference | None = None
    bytes_down: int = 0
    session: str = ""  # to which it was given
    times: int = 0
    again: float = 0.0  # when it is given again, whatever the session
    backoff: Backoff = field(default_factory=Backoff)


@dataclass
class Node:
    """One node, and the client that it is."""

    name: str
    client: int = -1
    samples: int = 0
    committed: str = "none"  # the last job whose upload is in a committed step
    accepted: str = "none"  # the last job whose upload is in a step that may not be committed yet
    sequence: int = 0  # of the last training order
    committed_sequence: int = 0
    version: int = -1  # of the model that it holds
    state: NodeState = N.NEW
    is_registered: bool = False  # with this server
    is_excessive: bool = False  # claims far more samples than others do
    session: str = ""  # "" while it is not connected
    last_seen: float = 0.0
    request: PendingRequest | None = None
    backoff: Backoff = field(default_factory=Backoff)
    rests_until: float = 0.0
    refusals: int = 0  # uploads in a row that were refused
    refused_for: str = ""  # the reason of the last one
    barred: str = ""  # why it is

    @property
    def is_connected(self) -> bool:
        return bool(self.session)

    def on(self, event: str) -> None:
        """Move to the next state; an event that the state does not have is a mistake of ours."""
        self.state = EVENTS[event][self.state]

    def failed(self, now: float) -> None:
        self.on("failed")
        self.request, self.rests_until = None, now + self.backoff.failed()

    def refused(self, why: str) -> None:
        """Count an upload that was refused."""
        self.refusals, self.refused_for = self.refusals + 1, plain(why[:300])

    def admitted(self) -> None:
        """Begin anew, without a pause."""
        self.on("admitted")
        self.refusals, self.refused_for, self.barred, self.rests_until = 0, "", "", 0.0
        self.backoff.succeeded()

    def answered(self) -> None:
        if self.state in EVENTS["answered"]:
            self.on("answered")
        self.request = None
        self.backoff.succeeded()


@dataclass
class NodeTable:
    """All nodes that were ever seen in a run."""

    secret: bytes  # which makes jobs' names, so that nobody else can
    run: str
    may_change_samples: bool = False
    samples_factor: float = 0.0  # a claim beyond so many times the median of all is excessive; 0: none
    vouched: Mapping[str, int] = field(default_factory=dict)  # samples by name, as the operator knows them
    nodes: dict[str, Node] = field(default_factory=dict)
    _sizes: NDArray[np.int64] | None = None

    def connect(self, connected: Mapping[str, NodeIdentity], now: float) -> None:
        """Note who is connected."""
        for name in connected:
            self.nodes.setdefault(name, Node(name))
        for node in self.nodes.values():
            about = connected.get(node.name)
            node.session = "" if about is None else about.session or about.key or "connected"
            node.last_seen = now if node.session else node.last_seen
            if node.state is N.BACKING_OFF and now >= node.rests_until:
                node.on("rested" if node.is_registered else "forgotten")

    def register(self, node: Node, samples: int, version: int) -> list[Node]:
        """A node introduced itself; returned are the nodes whose claims now look excessive and did not before."""
        expected = self.vouched.get(node.name, samples)
        if not 0 < samples <= SAMPLES_LIMIT or samples != expected:
            raise WireError(
                f"it claims {samples} samples" + (f", not {expected}" if samples != expected else "")
            )
        if node.samples and samples != node.samples and not self.may_change_samples:
            raise WireError(
                f"it claims {samples} samples, {node.samples} at first; where data may change, set samples='free'"
            )
        node.client = node.client if node.client >= 0 else self._number(node.name)
        node.samples, node.version, node.is_registered, self._sizes = samples, version, True, None
        return self._review()

    def _review(self) -> list[Node]:
        """Whose claims are out of all proportion; once an upload was counted, its client is not asked again."""
        claims = [n.samples for n in self.members]
        bound = self.samples_factor * statistics.median(claims) if len(claims) > 2 else 0.0
        found = []
        for node in self.members:
            known = node.name in self.vouched or node.committed != "none"
            before, node.is_excessive = node.is_excessive, 0 < bound < node.samples and not known
            found += [node] if node.is_excessive and not before else []
        return found

    def _number(self, name: str) -> int:
        taken = {n.client for n in self.nodes.values()}
        found = re.search(r"(?:^|[-_])(\d{1,7})$", name)
        wanted = int(found[1]) if found else -1
        if 0 <= wanted <= NUMBER_LIMIT and wanted not in taken:
            return wanted
        return next(i for i in range(len(taken) + 1) if i not in taken)

    # Who ----------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[Node]:
        """Those with a client number that have not left."""
        return [n for n in self.nodes.values() if n.client >= 0 and n.state is not N.GONE]

    @property
    def ready(self) -> list[Node]:
        """Members that are connected, have introduced themselves to this server, and take part."""
        out = (N.LEAVING, N.BARRED)
        return [n for n in self.members if n.is_connected and n.is_registered and n.state not in out]

    def idle(self) -> list[Node]:
        return [n for n in self.ready if n.state is N.IDLE and not n.is_excessive]

    def pending(self, kind: Kind = "TRAIN") -> Iterator[tuple[Node, PendingRequest]]:
        """Nodes with a request of this kind that is not answered."""
        for node in self.nodes.values():
            if node.request is not None and node.request.kind == kind:
                yield node, node.request

    def client(self, number: int) -> Node:
        return next(n for n in self.nodes.values() if n.client == number)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Samples by client number, 0 for numbers that nobody has; the same table until somebody joins."""
        if self._sizes is None:
            known = [n for n in self.nodes.values() if n.client >= 0]
            self._sizes = np.zeros(max((n.client for n in known), default=-1) + 1, np.int64)
            for node in known:
                self._sizes[node.client] = 0 if node.is_excessive else node.samples
        return self._sizes

    # Jobs ---------------------------------------------------------------------------------------------

    def job(self, node: Node, sequence: int, version: int) -> str:
        """A training job's name: 128 bits that nobody without the secret can foretell, the same after every restart."""
        about = f"{self.run}/{node.name}/{sequence}/{version}".encode()
        return hmac.new(self.secret, about, hashlib.sha256).hexdigest()[:32]

    def adopt(self, node: Node, job: str, versions: Mapping[int, Any]) -> tuple[int, int] | None:
        """(sequence, version) of an order that an earlier process of this server gave."""
        first = node.committed_sequence + 1
        for sequence in range(first, max(node.sequence, first) + ADOPTED_ORDERS):
            for version in versions:
                if hmac.compare_digest(self.job(node, sequence, version), job):
                    return sequence, version
        return None

    # What a checkpoint keeps --------------------------------------------------------------------------

    def note(self) -> list[dict[str, Any]]:
        return [
            {
                "name": n.name, "client": n.client, "samples": n.samples, "committed": n.committed,
                "sequence": n.committed_sequence, "gone": n.state is N.GONE, "connected": n.is_connected,
                "refusals": n.refusals, "refused_for": n.refused_for, "barred": n.barred,
            }
            for n in self.nodes.values() if n.client >= 0
        ]  # fmt: skip

    def restore(self, note: list[dict[str, Any]]) -> set[str]:
        """Names of the members that took part and were connected when the last step was committed."""
        for about in note:
            sequence, done = about["sequence"], about["committed"]
            refused = {key: about[key] for key in ("refusals", "refused_for", "barred") if key in about}
            state = N.GONE if about["gone"] else N.BARRED if refused.get("barred") else N.NEW
            self.nodes[about["name"]] = Node(
                about["name"],
                about["client"],
                about["samples"],
                done,
                done,
                sequence,
                sequence,
                state=state,
                **refused,
            )
        return {a["name"] for a in note if a["connected"] and self.nodes[a["name"]].state is N.NEW}
