"""Secure sums in a fleet: four stages, each an order `SUM` to every node that is left, and an answer from it.

Policy. Nodes train first, and say only that they did. The nodes whose uploads a step is to count then mask them for one
another. A stage closes when each of them has answered or is gone (`Fleet.wait_for`).
Up to the threshold the sum is that of the others. Beyond it the step is collected anew, with nodes asked again as for any
upload that did not arrive; but from the stage `unmask` on, where shares may be on their way, the step ends without uploads.

Invariants.
1. The server's process is given masked numbers, encrypted shares and sums, and never a node's upload or loss.
2. A node gives away shares for one sum of what it trained from a version, whatever the server says: with those of two sums
   of different cohorts, a server that keeps all it is sent could take one from the other.
3. Answers are acknowledged when they are read, for a sum lives in the server's memory. A server that is started again
   begins another one, with new keys, unless `unmask.json` says that the last one had come that far.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedbraid.algorithms.secure import CodeSums, SecureMean
from fedbraid.algorithms.secure_numbers import Row, numbers_of, sums_of
from fedbraid.core.context import Uploads
from fedbraid.deploy.inbox import Arrival, facts
from fedbraid.deploy.node_state import NodeMemory
from fedbraid.deploy.node_table import Node
from fedbraid.deploy.transport import pack_answer
from fedbraid.engines.engine import Reply, Setup, participate
from fedbraid.errors import EngineError, RunError, WireError
from fedbraid.privacy.parts import Noised
from fedbraid.privacy.secure_sum import STAGES, UNMASK, SecureClient, SecureServer, stage_of

if TYPE_CHECKING:
    from fedbraid.deploy.fleet import Fleet
    from fedbraid.run.state import State

log = logging.getLogger("fedbraid")
FILE = "unmask.json"


# The server's end -----------------------------------------------------------------------------------


@dataclass
class Group:
    """The parties of one sum: those whose codes have the same width. Party i is arrival i − 1."""

    bits: int
    arrivals: list[Arrival]
    server: SecureServer
    orders: Mapping[int, bytes] = field(default_factory=dict)


@dataclass
class SecureRounds:
    """Sums the uploads of the steps of a fleet, one after another."""

    fleet: Fleet
    sums: SecureMean
    groups: list[Group] = field(default_factory=list)
    traffic: dict[str, int] = field(default_factory=dict)  # bytes since the last sum, by direction and stage
    gone: set[str] = field(default_factory=set)  # nodes that left this sum
    reply: Reply | None = None

    def was_unmasked(self, version: int) -> bool:
        """Whether shares for a sum of this step were asked for, maybe by a server that ran before."""
        with suppress(OSError, ValueError, KeyError):
            return bool(json.loads((self.fleet.folder.path / FILE).read_text())["step"] >= version)
        return False

    def sum(self, arrivals: Sequence[Arrival]) -> tuple[list[Arrival], list[Arrival]]:
        """(whose uploads the sum has, whose can be in another one, where this one has lost too many)."""
        f, self.gone, stage = self.fleet, set(), 0
        self.groups = [self._group(bits, some) for bits, some in self._by_width(arrivals).items()]
        try:
            for stage in STAGES:
                if stage == UNMASK:
                    f.folder.write_json(FILE, {"step": f.state.t})
                self._stage(STAGES[stage])
                for group in self.groups:
                    group.orders = group.server.close()
            counted, self.reply = self._read(arrivals)
            return counted, []
        except (EngineError, WireError) as error:
            f.trouble.add("fleet", -1, str(error))
            if f.settings.too_few == "stop":
                raise RunError(
                    f"step {f.state.t + 1}: {error}; restart with the same out= to resume"
                ) from error
            return [], [a for a in arrivals if a.name not in self.gone and stage != UNMASK]
        finally:
            for node, _ in list(f.table.pending("SUM")):
                node.request = None
            self.groups = []

    def replies(self, arrivals: Sequence[Arrival], state: State) -> Iterator[Reply]:
        """The sum, where there is one."""
        if arrivals and self.reply is not None:
            yield self.reply

    def receive(self, node: Node, message: bytes) -> None:
        """A node's answer in the present stage."""
        for group in self.groups:
            for party, arrival in enumerate(group.arrivals, 1):
                if arrival.name == node.name:
                    stage = STAGES[group.server.stage]
                    try:
                        group.server.receive(party, message)
                    except WireError as error:
                        node.refused(str(error))
                        raise
                    self._count("up", stage, message)
                    arrival.bytes_up += len(message)
                    return
        raise WireError("it answers for a sum that it is not a party of")

    def _by_width(self, arrivals: Sequence[Arrival]) -> dict[int, list[Arrival]]:
        found: dict[int, list[Arrival]] = {}
        for a in arrivals:
            found.setdefault(self.sums.codec.for_client(a.client).grids()[0].bits, []).append(a)
        few = min(found.values(), key=len)
        if len(few) < (least := self.sums.fewest()):
            raise RunError(
                f"step {self.fleet.state.t + 1} would sum the uploads of {len(few)} nodes, and a secure sum needs {least} of the"
                " same bit width; use larger cohorts, or one width, and restart with the same out= to resume"
            )
        return found

    def _group(self, bits: int, arrivals: list[Arrival]) -> Group:
        f = self.fleet
        most, size = int(f.sizes.max()), f.setup.task.layout.size
        session = self.sums.planned_session(os.urandom(16), len(arrivals), bits, most, size)
        invited = {i: session.invitation(i) for i in range(1, len(arrivals) + 1)}
        return Group(bits, arrivals, SecureServer(session), invited)

    def _stage(self, name: str) -> None:
        """Give this stage's orders, and take answers until all that are left have answered."""
        f = self.fleet
        nodes = f.table.nodes
        asked: list[tuple[Node, dict[str, Any]]] = []
        before = {stage: earlier for earlier, stage in zip(["keys", *STAGES.values()], STAGES.values())}
        for group in self.groups:
            for party, message in group.orders.items():
                self._count("down", before[name], message)
                a = group.arrivals[party - 1]
                about = {"client": a.client, "trained": a.answer.job, "step": f.state.t}
                asked.append((nodes[a.name], {**about, "message": base64.b64encode(message).decode()}))
        f.orders.sum(asked, time.monotonic())
        f.wait.now(f"stage {name} of the secure sum of step {f.state.t + 1}", f.limit)
        f.wait_for([node for node, _ in asked], "SUM", "it did not answer in a stage of the secure sum")
        for group in self.groups:
            left = group.orders.keys() - group.server.arrived.keys()
            self.gone |= {group.arrivals[party - 1].name for party in left}

    def _count(self, direction: str, stage: str, message: bytes) -> None:
        key = f"{direction}:{stage}"
        self.traffic[key] = self.traffic.get(key, 0) + len(message)

    def _read(self, asked: Sequence[Arrival]) -> tuple[list[Arrival], Reply]:
        """(whose uploads are in the sums, the accumulator that the gather would have made of them)."""
        f, parts, total, there = self.fleet, list[CodeSums](), 0.0, set[str]()
        for group in self.groups:
            some = [group.arrivals[i - 1] for i in group.server.masked]
            row = group.server.session.signed(group.server.total())
            samples = sum(a.samples for a in some)
            acc, loss = sums_of(self.sums, row, group.bits, len(some), float(samples))
            weight = samples if self.sums.weights == "samples" else len(some)
            if acc.weight != weight:
                raise WireError(
                    f"the weights in the secure sum are {acc.weight:g}, and those of its nodes {weight}; one of them masks other"
                    " numbers than it should"
                )
            parts.append(acc)
            total += loss * len(some)
            there |= {a.name for a in some}
        arrivals = [a for a in asked if a.name in there]
        merged = reduce(self.sums.merge, parts)
        acc = replace(merged, protocol={**self.traffic, "secure_dropped": len(asked) - len(arrivals)})
        self.traffic = {}
        mean = total / len(arrivals)
        for a in arrivals:
            a.loss = math.nan if f.inbox.losses.doubt(mean) else mean
        return arrivals, self._reply(arrivals, acc)

    def _reply(self, arrivals: Sequence[Arrival], acc: CodeSums) -> Reply:
        f = self.fleet
        gather, x = f.setup.algorithm.gather, f.state.x
        who, down = facts(f.setup, arrivals, x)
        folded = gather.holding(acc, who.clients, x) if isinstance(gather, Noised) else acc
        return Reply(who, {}, {}, {}, torch.tensor([a.loss for a in arrivals]), down, folded=folded)


# A node's end ---------------------------------------------------------------------------------------


@dataclass
class SecureNode:
    """Masks what a node has trained: one sum at a time, and each stage once."""

    client: SecureClient | None = None
    trained: str = ""  # the job whose upload this sum has
    answered: tuple[str, bytes] = ("", b"")  # the last job, and what was said

    def answer(
        self, job: str, body: Mapping[str, Any], setup: Setup, sums: SecureMean, memory: NodeMemory, place: Path
    ) -> bytes:  # fmt: skip
        """What is sent back to an order of a stage; WireError where it is not the next one of its sum."""
        if self.answered[0] != job:
            message = base64.b64decode(body["message"], validate=True)
            self.answered = job, pack_answer({}, self._next(message, body, setup, sums, memory, place))
        return self.answered[1]

    def _next(
        self, message: bytes, body: Mapping[str, Any], setup: Setup, sums: SecureMean, memory: NodeMemory, place: Path
    ) -> bytes:  # fmt: skip
        stage, trained, client = stage_of(message), str(body["trained"]), int(body["client"])
        if trained not in memory.trained:
            raise WireError("the server sums what this node has not trained, or no longer has")
        about = memory.trained[trained]
        if stage == "invitation":
            if about.version <= memory.unmasked:
                raise WireError(f"its upload of version {about.version} was summed before, and is not again")
            self.client, self.trained = _invited(message, setup, sums, client), trained
            return self.client.keys()
        if self.client is None or self.trained != trained:
            raise WireError("the server goes on with a sum that this node was not invited to")
        if stage == "shares":
            return self.client.shares(message)
        if stage == "masked":
            row = self._row(setup, sums, client, int(body["step"]) - about.version, about.vectors, about.loss)
            return self.client.masked(message, row.astype(self.client.session.word))
        memory.unmasked = about.version
        memory.write(place, setup.algorithm.down.needs_previous)
        return self.client.unmask(message)

    def _row(
        self, setup: Setup, sums: SecureMean, client: int, age: int, vectors: dict[str, torch.Tensor], loss: float
    ) -> Row:  # fmt: skip
        if age < 0:
            raise WireError("the server sums an upload before the step that it was trained for")
        who = participate(setup, np.array([client]), 0)
        x = torch.zeros(1, 1)
        tau = torch.full((1, 1), float(age))
        up = Uploads(
            who.clients, vectors, who.n, who.K, who.a, tau, who.lr, {"x": x}, setup.algorithm.gathered
        )
        return numbers_of(sums, up, loss)


def _invited(message: bytes, setup: Setup, sums: SecureMean, client: int) -> SecureClient:
    """The party that a message invites, where the sum hides as much as the algorithm says."""
    party = SecureClient.invited(message)
    session, layout = party.session, setup.task.layout
    own, bits = int(setup.task.sizes[client]), sums.codec.for_client(client).grids()[0].bits
    least = sums.planned_session(session.id, session.parties, bits, own, layout.size)
    promised = (least.neighbours, least.threshold, least.length)
    if (
        session.parties < sums.fewest()
        or session.bits < least.bits
        or (session.neighbours, session.threshold, session.length) != promised
    ):
        raise WireError(
            "the server invites to another sum than the algorithm's, of other neighbours, threshold or length"
        )
    return party
