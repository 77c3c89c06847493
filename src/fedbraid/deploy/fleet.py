"""The nodes of a fleet as a run's source of steps.

Policy. `schedule/policies.py` decides when clients are selected and when a step closes, as it does for the simulator; the
node table knows who can be selected, the inbox what has arrived, and the orders what was said. This file runs their loop
by the real clock.

Invariants.
1. What was received is acknowledged after the commit of the step that counts it, or when it is refused. A server that is
   killed in between receives it again, draws the same cohort, and knows its own jobs by their names.
2. A step counts uploads of members only: who leaves while it is open is not in it.
3. Nothing that a node claims ends a run.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedbraid.algorithms.secure import summing
from fedbraid.deploy import status_file
from fedbraid.deploy.admissions import Admissions
from fedbraid.deploy.departures import Departures
from fedbraid.deploy.edge import EdgeRounds
from fedbraid.deploy.inbox import Arrival, Inbox, NodeFailed, Verdict, fields
from fedbraid.deploy.node_table import EVENTS, Node, NodeState, NodeTable
from fedbraid.deploy.norm_limit import LossLimit, NormLimit
from fedbraid.deploy.orders import Orders
from fedbraid.deploy.secure_round import SecureRounds
from fedbraid.deploy.settings import Settings
from fedbraid.deploy.transport import EDGE, Kind, OrderSigner, ReceivedAnswer, Transport
from fedbraid.deploy.troubles import Troubles, Wait
from fedbraid.engines.engine import Setup
from fedbraid.errors import RunError, WireError
from fedbraid.run.checkpoint import Folder, Record
from fedbraid.run.source import RunView, ServerStep, StepNotes
from fedbraid.run.state import State
from fedbraid.schedule import Buffered, Rounds, Schedule, Tick
from fedbraid.schedule.policies import BufferPolicy, Close, Fail, RoundPolicy, Select, View

log = logging.getLogger("fedbraid")

AWAY_S = 10.0  # after which a node that is to answer at once, and is not connected, is gone
TURN_S = 0.02  # seconds between two looks at whether such nodes have answered
POLL_S = 0.25  # seconds between two looks at who is connected
RECEIVED = 64  # answers that are pulled at once
SHOWN = 1000  # comings and goings in a step's record
FORGOT = "it no longer had its state and began anew; what the server has of it stays as it was"


class OpenStep:
    """The step that is being collected."""

    def __init__(self) -> None:
        self.since = time.monotonic()  # of the time limit
        self.asked: list[int] = []
        self.attempts = self.wanted = 0


class Fleet:
    """The nodes behind a transport as a run's source."""

    is_live = True

    def __init__(
        self, setup: Setup, schedule: Schedule, settings: Settings, transport: Transport, signer: OrderSigner,
        folder: Folder, body: Record,
    ) -> None:  # fmt: skip
        self.setup, self.schedule, self.settings = setup, schedule, settings
        self.transport, self.folder = transport, folder
        timeout = schedule.timeout if isinstance(schedule, Rounds) else None
        self.limit = timeout or settings.deadline
        run = str(folder.config()["run"])
        seed = HKDF(hashes.SHA256(), 32, None, b"fedbraid jobs").derive(signer.key.private_bytes_raw())
        self.table = NodeTable(
            seed, run, settings.samples == "free", settings.samples_factor, settings.vouched
        )
        signed = not isinstance(setup.task.loss, str)
        self.inbox = Inbox(
            setup, NormLimit(settings.norm_factor), LossLimit(settings.norm_factor, signed), settings.max_norm
        )
        common = {**body, "server": secrets.token_hex(8)}
        self.orders = Orders(setup, self.table, transport, signer, run, self.limit, common)
        self.departures, self.admissions = Departures(self), Admissions(self)
        sums = summing(setup.algorithm)
        self.secure = None if sums is None else SecureRounds(self, sums)
        self.inbox.is_masked = self.secure is not None
        self.edges = EdgeRounds(self) if settings.edges else None
        self.trouble, self.wait = Troubles(), Wait()
        self.run: RunView | None = None
        self.uploads: list[Arrival] = []  # that are here and in no step
        self.closed: list[Arrival] = []  # of the step that is being taken
        self.early: list[ReceivedAnswer] = []  # of nodes that have not introduced themselves
        self.open = OpenStep()
        self.expected: set[str] = set()  # whom a server that was started again waits for
        self.missing: list[int] | None = None
        self.late, self.looked = 0, 0.0
        self.begun = self.started = time.monotonic()
        self.here: set[int] = set()
        self.moves: list[tuple[str, int, float]] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        was_stopped = isinstance(error, SystemExit | KeyboardInterrupt)
        state = "done" if error is None else "stopped" if was_stopped else "failed"
        self.write_status(state, error if state == "failed" else None)

    # The step source ----------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        assert self.run is not None
        return self.run.state

    @property
    def sizes(self) -> NDArray[np.int64]:
        return self.table.sizes

    def describe(self) -> str:
        return "fleet"

    def steps(self, run: RunView) -> Iterator[ServerStep]:
        """A step whenever its policy closes it."""
        self.run, factor, told = run, self.settings.norm_factor, run.metadata
        self.expected = self.table.restore(told.get("nodes", []))
        self.inbox.norms = NormLimit.restore(factor, told.get("norms", {}))
        self.inbox.losses = LossLimit.restore(factor, self.inbox.losses.is_signed, told.get("losses", []))
        self.begun = time.monotonic() - told.get("time", 0.0)
        log.info("%s, step %d of %d", self.setup.algorithm.name, run.state.t, self.schedule.steps)
        while run.state.t < self.schedule.steps:
            self.closed = self._collect()
            tick = self._tick()
            replies = self.secure or self.edges or self.inbox
            yield ServerStep(tick, replies.replies(self.closed, run.state), partial(self._taken, tick))
            self._committed()

    def _taken(self, tick: Tick, record: Record) -> StepNotes:
        for a in self.closed:
            node = self.table.nodes[a.name]
            node.committed, node.committed_sequence = a.answer.job, max(node.committed_sequence, a.sequence)
        self.inbox.accepted(self.closed)
        self.late = 0
        moves, self.moves = self.moves, []
        missing, self.missing = self.missing, None
        told = {
            "nodes": len(self.table.ready),
            "node_up": [a.bytes_up for a in self.closed],
            "node_down": [a.bytes_down for a in self.closed],
            **{kind: found for kind in ("came", "went") if (found := [m[1:] for m in moves if m[0] == kind])},
            **({"missing": missing} if missing else {}),
            **self.trouble.take(),
        }
        limits = {"norms": self.inbox.norms.note(), "losses": self.inbox.losses.note()}
        return StepNotes(told, {"nodes": self.table.note(), "time": tick.time, **limits})

    def _tick(self) -> Tick:
        t, now = self.state.t, time.monotonic() - self.begun
        self._note_moves(time.monotonic())
        waiting = {r.version for _, r in self.table.pending()} | {a.version for a in self.uploads}
        intervals = np.array([(a.since, a.at) for a in self.closed]).reshape(-1, 2) - self.begun
        seen = None if self.run is None else self.run.client_history
        clients, versions = (
            np.array([getattr(a, k) for a in self.closed], np.int64) for k in ("client", "version")
        )
        selected = None if seen is None else seen.selected.get(t, [])
        return Tick(
            t, now, clients, versions, np.array([], np.int64), frozenset(waiting), self.late, intervals=intervals,
            selected=selected,
        )  # fmt: skip

    def _committed(self) -> None:
        self.transport.acknowledge([a.answer for a in self.closed])
        self.closed = []
        self.orders.forget_models()
        self.departures.forget_gone()
        self.admissions.forget_heard()
        self.write_status("running")

    # When a step closes -------------------------------------------------------------------------------

    def _collect(self) -> list[Arrival]:
        self.open, self.looked, pause = OpenStep(), 0.0, 0.0
        while True:
            self.turn(pause)
            pause = POLL_S
            if not self._is_ready():
                continue
            if self.secure is not None and self.secure.was_unmasked(self.state.t):
                return []
            decision = self._policy().next(self._view())
            over = time.monotonic() - self.open.since >= self.limit
            if isinstance(decision, Close):
                if self.departures.is_waiting():  # who was named leaves before the next step
                    continue
                if (closed := self._close()) is not None:
                    return closed
                continue
            if isinstance(decision, Fail):
                raise RunError(
                    f"step {self.state.t + 1} has {len(self._counted())} uploads after {self.limit:g} s, fewer than minimum="
                    f"{self.settings.minimum} ({len(self.table.ready)} nodes are connected); restart with the same out= to resume"
                )
            if isinstance(decision, Select):
                self._ask(decision)
                pause = 0.0
            if over or (isinstance(decision, Select) and self.open.attempts == 1):
                self.open.since = time.monotonic()
                self.open.attempts += over and not isinstance(decision, Select)
            self._say_wait()

    def turn(self, pause: float) -> None:
        """Look at the nodes, and take the answers that arrive within so many seconds."""
        self._look()
        self._take(self.transport.receive(RECEIVED, pause))

    def wait_for(self, asked: Sequence[Node], kind: Kind, otherwise: str) -> None:
        """Until each of these has answered its order of this kind, or is gone: it failed, was away for longer than AWAY_S (or a
        quarter of the time limit) while the broker was there, or time is up."""
        since, patience = time.monotonic(), min(AWAY_S, self.limit / 4)
        while waiting := [n for n in asked if n.request is not None and n.request.kind == kind]:
            self.turn(TURN_S)
            now, is_broker_away = time.monotonic(), not any(n.is_connected for n in self.table.nodes.values())
            for node in waiting:
                is_away = not (node.is_connected or is_broker_away) and now - node.last_seen > patience
                if node.request is not None and (is_away or now - since > self.limit):
                    node.request = None
                    self.trouble.add(node.name, node.client, otherwise)

    def _policy(self) -> RoundPolicy | BufferPolicy:
        s, limit, retries = self.settings, self.limit, self.settings.too_few == "wait"
        if isinstance(self.schedule, Buffered):
            return BufferPolicy(self.schedule.buffer, self.schedule.concurrency, s.seed, limit, retries)
        assert isinstance(self.schedule, Rounds)
        given = self.schedule.clients
        barred = {n.client for n in self.table.members if n.state is NodeState.BARRED}
        cohort: int | tuple[int, ...]
        if isinstance(given, tuple):
            cohort = tuple(c for c in given[self.state.t] if c not in barred.union(self.state.gone))
        else:
            cohort = self.schedule.cohort(max(len(self.table.members) - len(barred), 1))
        choose = None
        if self.run is not None and self.run.client_history is not None:
            self.run.client_history.grow(self.sizes)
            choose = partial(self.run.client_history.choose, self.schedule.select)
        minimum = s.minimum if self.secure is None else max(s.minimum, self.secure.sums.fewest())
        return RoundPolicy(cohort, s.seed, self.schedule.over_select, limit, minimum, retries, choose)

    def _view(self) -> View:
        counted = self._counted()
        here = {a.client for a in counted} if self._counts_once else set()
        available = np.array(sorted(n.client for n in self.table.idle() if n.client not in here), np.int64)
        if isinstance(self.schedule, Rounds):
            t, asked = self.state.t, set(self.open.asked)
            pending = sum(r.version == t and n.client in asked for n, r in self.table.pending())
        else:
            pending = sum(n.state is NodeState.ASKED for n, _ in self.table.pending())
        elapsed = time.monotonic() - self.open.since
        return View(
            self.state.t, available, elapsed, len(counted), pending, self.open.attempts, self.open.wanted
        )

    @property
    def _counts_once(self) -> bool:
        """Whether a node whose upload waits for its step is not asked for another one."""
        return isinstance(self.schedule, Rounds) or self.secure is not None

    def _counted(self) -> list[Arrival]:
        """The uploads that the open step would count, as they arrived."""
        members = [a for a in self.uploads if self._is_member(a)]
        if isinstance(self.schedule, Buffered):
            return members
        asked = set(self.open.asked)
        return [a for a in members if a.version == self.state.t and a.client in asked]

    def _is_member(self, arrival: Arrival) -> bool:
        out = (NodeState.BARRED, NodeState.LEAVING, NodeState.GONE)
        return self.table.nodes[arrival.name].state not in out

    def _close(self) -> list[Arrival] | None:
        """The uploads of this step: the first ones, in the order in which their clients were asked. None where they should
        have been summed, and too few nodes stayed."""
        buffered = isinstance(self.schedule, Buffered)
        if isinstance(self.schedule, Buffered):
            closed = self._counted()[: self.schedule.buffer]
        else:
            place = {client: i for i, client in enumerate(self.open.asked)}
            closed = sorted(self._counted()[: self.open.wanted], key=lambda a: place[a.client])
        elsewhere = self.secure or self.edges
        counted, again = (closed, []) if elsewhere is None else elsewhere.sum(closed)
        spare = [
            a for a in self.uploads if a in again or (buffered and a not in closed and self._is_member(a))
        ]
        for arrival in self.uploads:
            if arrival not in counted and arrival not in spare:
                self._drop(arrival)
        self.uploads = spare
        for arrival in counted:
            self.table.nodes[arrival.name].accepted = arrival.answer.job
        return counted or None

    def _drop(self, arrival: Arrival) -> None:
        self.late += 1
        self.inbox.release(arrival)
        self.transport.acknowledge([arrival.answer])

    def _ask(self, selection: Select) -> None:
        clients = selection.clients.tolist()
        self.open.asked += [c for c in clients if c not in self.open.asked]
        self.open.wanted, self.open.attempts = selection.required, self.open.attempts + 1
        has = {a.client for a in self._counted()} if self._counts_once else set()
        nodes = {n.client: n for n in self.table.members}
        self.orders.train([nodes[c] for c in clients if c not in has], self.state, time.monotonic())

    def _is_ready(self) -> bool:
        """Whether a step may be opened: the first one with all nodes; after a restart, with those there were."""
        if self.open.attempts or self.missing is not None:
            return True
        ready, now = {n.name for n in self.table.ready}, time.monotonic()
        if self.state.t == 0:
            if len(ready) < self.settings.nodes:
                self.wait.now(
                    f"{self.settings.nodes} nodes before the first step ({len(ready)} are ready)", None
                )
                return False
            assert self.run is not None
            self.run.broadcast_first()
        elif (away := self.expected - ready) and now < self.started + self.limit:
            names = ", ".join(sorted(away)[:10])
            self.wait.now(
                f"nodes that were connected before the restart: {names}", self.started + self.limit - now
            )
            return False
        self.missing = [self.table.nodes[name].client for name in sorted(self.expected - ready)]
        self.expected = set()
        self.open.since = now
        return True

    # Answers ------------------------------------------------------------------------------------------

    def _take(self, answers: Sequence[ReceivedAnswer]) -> None:
        for answer in answers:
            name, now = answer.node.name, time.monotonic()
            node = self.table.nodes.setdefault(name, Node(name))
            node.last_seen = now
            try:
                self._answer(node, answer, now)
            except WireError as error:
                self.transport.acknowledge([answer])
                self.trouble.add(name, node.client, str(error))
                is_its_answer = node.request is not None and node.request.job == answer.job
                if is_its_answer and node.state is NodeState.LEAVING:
                    node.request = None
                elif is_its_answer:
                    node.failed(now)
            self.admissions.review(node)

    def _answer(self, node: Node, answer: ReceivedAnswer, now: float) -> None:
        request = node.request
        if node.state is NodeState.GONE:
            raise WireError("it answers, but has left for good")
        if node.state is NodeState.BARRED:
            raise WireError("it answers, but is asked nothing until the operator admits it")
        if request is not None and request.job == answer.job and request.kind != "TRAIN":
            head, upload = self.inbox.parse(answer, request.kind in ("FOLD", "LEAVE", "SUM"))
            if request.kind == "HELLO":
                self._register(node, head)
            elif request.kind == "LEAVE":
                self.departures.let_go(node, head, upload)
            elif request.kind == "SUM" and self.secure is not None:
                self.secure.receive(node, upload)
                node.answered()
            elif request.kind == "FOLD" and self.edges is not None:
                self.edges.receive(node, upload)
                node.answered()
            self.transport.acknowledge([answer])
        elif node.name.startswith(EDGE):
            raise WireError("it answers an order to fold that is over")
        elif not node.is_registered and node.state is not NodeState.LEAVING:
            self.early.append(answer)
        elif answer.job in {node.committed, *(a.answer.job for a in self.uploads)}:
            self.transport.acknowledge([answer])  # the same once more
        elif node.state is NodeState.LEAVING:
            raise WireError("it answers, but is leaving")
        elif request is not None and request.job == answer.job:
            self._upload(node, answer, request.sequence, request.version, request.since, request.bytes_down)
        elif (found := self.table.adopt(node, answer.job, self.state.sent)) is not None:
            node.sequence = max(node.sequence, found[0])
            self._upload(node, answer, *found, since=now, bytes_down=0)
        else:
            raise WireError(f"it answers job {answer.job[:32]!r}, which it was not given")

    def _register(self, node: Node, head: Record) -> None:
        about = fields(head, samples=int, version=int)
        version = about["version"] if -1 <= about["version"] <= self.state.t else -1
        if version == 0 and self.setup.algorithm.mean_samples:
            version = -1  # a server that never took a step may have made it, for other nodes
        excessive = self.table.register(node, about["samples"], version)
        node.request = None
        node.on("registered")
        for other in excessive:
            why = f"it claims {other.samples} samples, more than samples_factor={self.settings.samples_factor:g} times the"
            self.trouble.add(
                other.name, other.client, f"{why} median; it is not asked unless samples.json names it"
            )
        log.info("%s is client %d, with %d samples", node.name, node.client, node.samples)
        early = [a for a in self.early if a.node.name == node.name]
        self.early = [a for a in self.early if a.node.name != node.name]
        self._take(early)

    def _upload(
        self, node: Node, answer: ReceivedAnswer, sequence: int, version: int, since: float, bytes_down: int
    ) -> None:
        """An answer to a training order of ours."""
        try:
            self._accept(node, answer, sequence, version, since, bytes_down)
        except NodeFailed:
            raise
        except WireError as error:
            node.refused(str(error))
            raise

    def _accept(
        self, node: Node, answer: ReceivedAnswer, sequence: int, version: int, since: float, bytes_down: int
    ) -> None:
        is_late = isinstance(self.schedule, Rounds) and version != self.state.t
        if is_late:  # not even read
            self.late += 1
            self.transport.acknowledge([answer])
            return node.answered()
        now = time.monotonic()
        arrival = Arrival(
            answer, node.name, node.client, node.samples, version, sequence, since, now, bytes_down
        )
        arrival.is_read = self.edges is None or not self.edges.takes(node.name)
        if arrival.is_read and not self.judged(arrival, self.inbox.judge(arrival, self.state)):
            self.transport.acknowledge([answer])
            return
        self.uploads.append(arrival)
        if isinstance(self.schedule, Buffered):
            node.accepted = answer.job
            self.open.since = time.monotonic()
        node.answered()

    def judged(self, arrival: Arrival, verdict: Verdict) -> bool:
        """Note what an upload says of its node; returned is whether it stands, and is not asked for again."""
        node = self.table.nodes[arrival.name]
        node.version = verdict.version
        if verdict.lost:
            why = "it did not hold the model that its order built on; it gets all of it"
            self.trouble.add(node.name, node.client, why)
            node.answered()
            self.orders.train([node], self.state, time.monotonic())
            return False
        if verdict.forgot:
            self.trouble.add(node.name, node.client, FORGOT)
        if verdict.doubt is not None:
            self.trouble.add(node.name, node.client, f"{verdict.doubt}; the number is left out")
            node.refused(verdict.doubt)
        else:
            node.refusals, node.refused_for = 0, ""
        return True

    def fell(self, arrival: Arrival, error: WireError) -> None:
        """An upload that had arrived was refused after all, where it was folded."""
        node = self.table.nodes[arrival.name]
        self.trouble.add(node.name, node.client, str(error))
        if not isinstance(error, NodeFailed):
            node.refused(str(error))
        if node.state in EVENTS["failed"]:
            node.failed(time.monotonic())
        self.admissions.review(node)

    # The look -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        """See who is connected, what is overdue and who is to leave; a few times a second."""
        now = time.monotonic()
        if now - self.looked < POLL_S:
            return
        self.looked = now
        self.admissions.look()
        self.table.connect(self.transport.connected(), now)
        for refusal in self.transport.refusals():
            node = self.table.nodes.get(refusal.sender)
            self.trouble.add(refusal.sender, -1 if node is None else node.client, refusal.reason)
        self.departures.look(now)
        nodes = self.table.nodes.values()
        self.orders.hello(
            [
                n
                for n in nodes
                if n.state is NodeState.NEW
                and n.is_connected
                and n.request is None
                and not n.name.startswith(EDGE)
            ],
            now,
        )
        for node, request in list(self.table.pending()):
            self._overdue(node, now - request.since, request.version)
        self.orders.repeat(now)
        self._note_moves(now)
        self.write_status("running")

    def _overdue(self, node: Node, age: float, version: int) -> None:
        request = node.request
        assert request is not None
        is_over = isinstance(self.schedule, Rounds) and version != self.state.t
        if is_over and node.is_connected and request.session != node.session:  # nobody waits for it any more
            node.answered()
        elif age > 2 * self.limit:
            self.trouble.add(
                node.name, node.client, f"no answer within {2 * self.limit:g} s; the order was given up"
            )
            node.failed(time.monotonic())
        elif age > self.limit and node.state is NodeState.ASKED:
            node.on("overdue")
            self.trouble.add(node.name, node.client, f"no answer within {self.limit:g} s")

    def _note_moves(self, now: float) -> None:
        """Who connected and who disconnected, for the next record."""
        here, at = {n.client for n in self.table.ready}, round(now - self.begun, 3)
        moves = [("came", c, at) for c in sorted(here - self.here)]
        moves += [("went", c, at) for c in sorted(self.here - here)]
        self.here, self.moves = here, [*self.moves, *moves][:SHOWN]

    def _say_wait(self) -> None:
        now = time.monotonic()
        asked = sorted(((now - r.since, n.name, r.times) for n, r in self.table.pending()), reverse=True)[:10]
        told = ", ".join(
            f"{name} was asked {age:.0f} s ago" + (f", {times} times so far" if times > 1 else "")
            for age, name, times in asked
        )
        what = "round" if isinstance(self.schedule, Rounds) else "step"
        left = self.open.since + self.limit - now
        idle = f"{len(self.table.idle())} nodes are idle, none is asked"
        if out := [n.name for n in self.table.members if n.state is NodeState.BARRED][:10]:
            idle += f"; barred: {', '.join(out)}"
        self.wait.now(f"uploads of {what} {self.state.t + 1}", left, told or idle)

    def write_status(self, state: str, error: BaseException | None = None) -> None:
        """A small file for whoever watches; the run does not depend on it."""
        step = self.run.state.t if self.run else 0
        told = status_file.describe(
            self.table, time.monotonic(), state, step, self.schedule.steps, self.trouble, self.wait, error
        )
        with suppress(OSError):
            self.folder.write_json(status_file.FILE, told)
