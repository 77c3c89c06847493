"""Edges: processes that read, check and fold the uploads of the nodes that the operator gave them, and hand over one sum.

Policy. Uploads of such nodes stay unread with the broker until their round closes. Then each edge is told which they are
(an order `FOLD`, with what was accepted so far, so that limits mean what they mean without edges), reads them from the broker,
and answers with a verdict for each and an accumulator of those that stand. What an edge that is away has not answered, the server
reads itself.

Invariants.
1. An upload is in one accumulator or is read by the server, never both: an accumulator counts only as the answer to the
   order that the server waits for, and must hold as many uploads, of as much weight, as it has verdicts that stand.
2. Sums are exact (`core/exact_sum.py`), so the model has the bits that it has without edges.
3. An edge has no state. It sees single uploads, and is trusted as the server is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedbraid.core.gather import Sums
from fedbraid.core.link import BroadcastContext, ModelVersion
from fedbraid.deploy.inbox import Arrival, Inbox, NodeFailed, Verdict, facts
from fedbraid.deploy.node import NodeRuntime
from fedbraid.deploy.norm_limit import LossLimit, NormLimit
from fedbraid.deploy.transport import NodeIdentity, ReceivedAnswer, SignedOrder, pack_answer
from fedbraid.engines.engine import Reply, Setup
from fedbraid.engines.folding import Folder
from fedbraid.errors import RunError, WireError
from fedbraid.links.accumulators import from_message, message_of
from fedbraid.run.state import State

if TYPE_CHECKING:
    from fedbraid.deploy.fleet import Fleet
    from fedbraid.deploy.node_table import Node

BATCH = 1000  # uploads that one order names


# The server's end -----------------------------------------------------------------------------------


@dataclass
class Part:
    """What one order to an edge is about, and what came of it."""

    edge: str
    arrivals: list[Arrival]
    verdicts: list[dict[str, Any]] | None = None
    sums: Sums | None = None


@dataclass
class EdgeRounds:
    """Has the uploads of a round folded where the operator wants them to be."""

    fleet: Fleet
    parts: list[Part] = field(default_factory=list)

    def takes(self, name: str) -> bool:
        """Whether this node's upload is left to an edge: one that is connected now."""
        f = self.fleet
        edge = f.table.nodes.get(f.settings.edge_of(name))
        return edge is not None and edge.is_connected

    def sum(self, arrivals: Sequence[Arrival]) -> tuple[list[Arrival], list[Arrival]]:
        """(what the step counts, what another attempt may count, where some uploads did not stand)."""
        f = self.fleet
        by_edge: dict[str, list[Arrival]] = {}
        for a in arrivals:
            if not a.is_read:
                by_edge.setdefault(f.settings.edge_of(a.name), []).append(a)
        batches = [
            (edge, some[i : i + BATCH]) for edge, some in by_edge.items() for i in range(0, len(some), BATCH)
        ]
        self.parts = [Part(edge, some) for edge, some in batches]
        self._wait([part for part in self.parts if f.table.nodes[part.edge].is_connected])
        bad = [a for part in self.parts for a in self._apply(part) if not a.is_read or part.sums is None]
        fallen = {id(a) for a in bad}
        if fallen:
            return [], [a for a in arrivals if id(a) not in fallen]
        return list(arrivals), []

    def replies(self, arrivals: Sequence[Arrival], state: State) -> Iterator[Reply]:
        """What edges folded, and then the uploads that the server reads."""
        folded = {id(a) for part in self.parts if part.sums is not None for a in part.arrivals}
        for part in self.parts:
            if part.sums is not None:
                yield self._reply(part.arrivals, part.sums, state)
        yield from self.fleet.inbox.replies([a for a in arrivals if id(a) not in folded], state)
        self.parts = []

    def receive(self, node: Node, upload: bytes) -> None:
        """An edge's answer."""
        part = next(p for p in self.parts if p.edge == node.name and p.verdicts is None)
        length = int.from_bytes(upload[:4], "big")
        setup = self.fleet.setup
        try:
            verdicts = json.loads(upload[4 : 4 + length])
            sums = from_message(upload[4 + length :], setup.algorithm.gathered, setup.task.layout)
            stand = [a for a, v in zip(part.arrivals, verdicts, strict=True) if "sizes" in v]
        except (ValueError, TypeError, KeyError) as error:
            raise WireError(f"its accumulator cannot be read: {error}") from error
        weights = setup.algorithm.gather.traits().weights
        weight = sum(a.samples for a in stand) if weights == "samples" else len(stand)
        if (sums.count, sums.weight) != (len(stand), weight):
            raise WireError(
                f"its accumulator counts {sums.count} uploads of weight {sums.weight:g}, not {len(stand)} of {weight}"
            )
        part.verdicts, part.sums = verdicts, sums

    def _wait(self, parts: list[Part]) -> None:
        """Give the orders, one at a time to each edge, and wait for what can still be answered."""
        f, waiting = self.fleet, list(parts)
        while waiting:
            asked: dict[str, Part] = {}
            for part in waiting:
                asked.setdefault(part.edge, part)
            f.orders.fold(
                [(f.table.nodes[edge], self._about(part)) for edge, part in asked.items()],
                f.state,
                time.monotonic(),
            )
            f.wait.now(f"edges' sums of round {f.state.t + 1}", f.limit)
            f.wait_for(
                [f.table.nodes[edge] for edge in asked],
                "FOLD",
                "it did not answer; the server reads its nodes' uploads",
            )
            gone = {edge for edge, part in asked.items() if part.verdicts is None}
            waiting = [p for p in waiting if p.verdicts is None and p.edge not in gone]

    def _about(self, part: Part) -> dict[str, Any]:
        f = self.fleet
        named = [
            [a.answer.job, a.name, a.client, a.samples, a.answer.size, f.transport.where(a.answer)]
            for a in part.arrivals
        ]
        limits = {
            "norms": f.inbox.norms.note(),
            "losses": f.inbox.losses.note(),
            "max_norm": f.inbox.max_norm,
        }
        limits |= {"norm_factor": f.inbox.norms.factor, "signed": f.inbox.losses.is_signed}
        return {"version": f.state.t, "uploads": named, **limits}

    def _apply(self, part: Part) -> list[Arrival]:
        """The uploads that do not stand: as an edge found, or the server itself where none answered."""
        f, bad = self.fleet, []
        for i, a in enumerate(part.arrivals):
            try:
                verdict = (
                    _read_verdict(part.verdicts[i], a)
                    if part.verdicts is not None
                    else f.inbox.judge(a, f.state)
                )
                if not f.judged(a, verdict):
                    bad.append(a)
            except WireError as error:
                f.fell(a, error)
                bad.append(a)
            a.is_read = part.verdicts is None
        if bad:
            part.sums = None
        return bad

    def _reply(self, arrivals: Sequence[Arrival], sums: Sums, state: State) -> Reply:
        who, down = facts(self.fleet.setup, arrivals, state.x)
        names = arrivals[0].sizes
        sizes = {name: np.array([a.sizes[name] for a in arrivals]) for name in names}
        first = next(iter(self.fleet.setup.algorithm.uploads))
        norms = torch.tensor([(a.norms or {})[first][0] for a in arrivals]).to(state.x)
        return Reply(who, {}, {}, sizes, torch.tensor([a.loss for a in arrivals]), down, norms, sums)


def _verdict(inbox: Inbox, a: Arrival, state: State) -> tuple[dict[str, Any], Reply | None]:
    """(what an edge says of an upload, the upload where it stands)."""
    try:
        verdict = inbox.judge(a, state)
    except WireError as error:
        return {"error" if isinstance(error, NodeFailed) else "refused": str(error)}, None
    told = asdict(verdict)
    if verdict.lost:
        return told, None
    loss = None if a.loss != a.loss else a.loss
    (reply,) = inbox.replies([a], state)
    return {**told, "loss": loss, "norms": a.norms, "sizes": a.sizes}, reply


def _read_verdict(told: dict[str, Any], a: Arrival) -> Verdict:
    """The server's record of what an edge said."""
    if "error" in told:
        raise NodeFailed(told["error"])
    if "refused" in told:
        raise WireError(told["refused"])
    if not told["lost"]:
        a.loss = float("nan") if told["loss"] is None else float(told["loss"])
        a.norms = {name: (float(norm), float(each)) for name, (norm, each) in told["norms"].items()}
        a.sizes = {name: int(size) for name, size in told["sizes"].items()}
        a.bytes_up = sum(a.sizes.values())
    return Verdict(told["version"], told["lost"], told["forgot"], told["doubt"])


# The edge's end -------------------------------------------------------------------------------------


@dataclass
class EdgeRuntime(NodeRuntime):
    """Answers the orders of a transport that may read uploads."""

    answered: tuple[str, bytes] = ("", b"")  # the last job, and what was said

    def _answer(self, order: SignedOrder, place: Path) -> bytes:
        body = json.loads(order.body) if order.body else {}
        if order.kind == "PING":
            return pack_answer({})
        if order.kind != "FOLD":
            raise RunError(f"this is an edge, which folds uploads; the order {order.kind} is for nodes")
        if self.answered[0] != order.job:
            self.answered = order.job, self._fold(order, body)
        return self.answered[1]

    def _fold(self, order: SignedOrder, body: dict[str, Any]) -> bytes:
        settings = self._settings(body)
        (algorithm, work), task = settings.what(), self.project.halves.served()
        setup, version = Setup(algorithm, task, work, settings.seed), int(body["version"])
        who = BroadcastContext(algorithm.downloads, version, setup.seed, task.layout, real=True)
        held = algorithm.down.receive(self.transport.model(order), -1, {}, who)
        vectors = algorithm.down.decode_held(held, who)
        state = State.first(algorithm, task.layout, vectors["x"], setup.seed, real=True)
        state = replace(state, t=version, sent={version: ModelVersion(vectors, {})})
        norms = NormLimit.restore(float(body["norm_factor"]), body["norms"])
        losses = LossLimit.restore(norms.factor, bool(body["signed"]), body["losses"])
        inbox = Inbox(setup, norms, losses, float(body["max_norm"]))
        sums, verdicts = Folder(algorithm, vectors, version), []
        for job, name, client, samples, size, where in body["uploads"]:
            answer = ReceivedAnswer(
                NodeIdentity(name, ""), job, size, partial(self.transport.fetch, where, order)
            )
            arrival = Arrival(answer, name, client, samples, version, 0, 0.0, 0.0, 0)
            told, reply = _verdict(inbox, arrival, state)
            verdicts.append(told)
            if reply is not None:
                sums.add(reply)
        text = json.dumps(verdicts).encode()
        return pack_answer({}, len(text).to_bytes(4, "big") + text + message_of(sums.acc, task.layout))
