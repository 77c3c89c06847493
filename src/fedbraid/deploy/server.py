"""The server's half of a deployment: a source of replies for the run loop, which drives Flower's grid itself.

Every step is one commit of model, optimiser, roster and record; killed at any instant, the run goes on from
its last committed step, and nodes are told which of their uploads that step holds.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError
from numpy.typing import NDArray

from fedbraid.core import rng
from fedbraid.core.context import Participation, Vectors
from fedbraid.core.link import BroadcastContext, UploadContext, add_overhead, from_message, unbundle
from fedbraid.core.work import step_counts
from fedbraid.deploy import leaving
from fedbraid.deploy.backoff import Resting
from fedbraid.deploy.bound import Bound, Norms
from fedbraid.deploy.keys import fingerprint
from fedbraid.deploy.mailbox import Mailbox
from fedbraid.deploy.notes import Troubles, Wait
from fedbraid.deploy.roster import Member, Roster
from fedbraid.deploy.settings import Settings
from fedbraid.engines.autograd import LoopGradient
from fedbraid.engines.engine import Reply, Setup
from fedbraid.errors import ConfigError, Diverged, InUseError, RunError, WireError
from fedbraid.run.budget import PrivacySetup, attach_privacy
from fedbraid.run.checkpoint import Folder, Record
from fedbraid.run.simulate import Options, Result, Run, describe, drive, same
from fedbraid.run.source import RunView, ServerStep, StepNotes
from fedbraid.run.state import State
from fedbraid.run.step import Population, advance
from fedbraid.schedule import Buffered, Rounds, Schedule, Tick

if TYPE_CHECKING:
    from fedbraid.deploy import Project

log = logging.getLogger("flwr")  # whose lines reach `flwr log` and the SuperLink

T = TypeVar("T")
HELLO, LEAVE, NUDGE = "hello", "leave", "nudge"
MOST_LOSS = 1e30  # of a mean in single precision nothing is left beyond
FORGOT = "it no longer had what it remembered and began anew; what the server has of it stays as it was"
SOON = 10.0  # seconds, before which nobody is asked again
FEW = 4  # nodes that are asked again at once
SHOWN = 1000  # nodes in the status file, and comings and goings in a step's record
Letter = tuple["Job", str, dict[str, Any]]  # what is to be answered, the message's type and content


def server_app(project: Project) -> ServerApp:
    """Flower's ServerApp around the one run loop."""

    def main(grid: Grid, context: Context) -> None:
        serve(project, project.settings(context.run_config), grid)

    app = ServerApp()
    app.main()(main)
    return app


def serve(project: Project, settings: Settings, grid: Grid, patience: float = 30.0) -> Result:
    """A deployed run, to its end or as far as it comes.

    A server outlives its SuperLink by some seconds; the next one waits for it to let go of the folder.
    """
    (algorithm, work), schedule, task = settings.what(), settings.when(), project.parts.served()
    algorithm.fits(work, task.full_layout.size > task.layout.size)
    algorithm.gather.traits().check_layout(task.layout)
    if algorithm.rule.traits().example_privacy is not None and settings.samples == "free":
        raise ConfigError(
            "unit='example' is accounted by how many samples a node has, which samples='free' lets change; use 'fixed'"
        )
    algorithm, budgets = attach_privacy(algorithm, PrivacySetup(schedule, settings.nodes, work))
    setup, folder = Setup(algorithm, task, work, settings.seed), Folder(settings.out)
    callbacks = [*project.callbacks, *settings.callbacks(), Lines()]
    options = Options(evaluate_every=settings.evaluate_every or None, callbacks=callbacks)
    fleet = Fleet(setup, schedule, settings, grid, folder)
    fleet.open(describe(setup, schedule, fleet, options, "cpu"))
    end, wait = time.monotonic() + patience, Wait()
    with fleet:
        while True:
            try:
                return drive(setup, schedule, fleet, LoopGradient(task), options, folder, budgets)
            except InUseError:
                if time.monotonic() > end:
                    raise
                wait.now(f"another server to let go of {folder.path}", end - time.monotonic())
                time.sleep(0.5)


class Lines:
    """A line of the log for every step."""

    def step(self, record: Record, run: Run) -> None:
        said = ", ".join(f"{k} {record[k]:.4f}" for k in ("loss", "accuracy", "train_loss") if k in record)
        log.info(
            "fedbraid: step %d of %d, %d uploads, %s",
            record["step"],
            run.schedule.steps,
            len(record["clients"]),
            said,
        )


@dataclass
class Job:
    """A message that somebody is to answer."""

    id: str
    node: int
    client: int
    version: int
    down: int = 0  # bytes of the order
    since: float = field(default_factory=time.monotonic)
    slow: bool = False  # past its deadline

    @property
    def trains(self) -> bool:
        return self.id not in (HELLO, LEAVE, NUDGE)

    @property
    def errand(self) -> Any:
        """What fails or succeeds with it."""
        return self.client if self.trains else (self.id, self.node)


@dataclass
class Arrival:
    """An upload that was read and found sound."""

    job: Job
    reply: Reply
    norms: Norms
    at: float = field(default_factory=time.monotonic)


def _blocks(got: Sequence[Arrival]) -> Iterator[Reply]:
    """Replies in order, in blocks that have no client twice."""
    block: list[Arrival] = []
    for arrival in got:
        if any(arrival.job.client == a.job.client for a in block):
            yield Reply.join([a.reply for a in block])
            block = []
        block.append(arrival)
    yield Reply.join([a.reply for a in block])


class Fleet:
    """The nodes of a deployment as a run's source."""

    is_live = True

    def __init__(
        self, setup: Setup, schedule: Schedule, settings: Settings, grid: Grid, folder: Folder
    ) -> None:
        self.setup, self.schedule, self.settings, self.grid, self.folder = (
            setup,
            schedule,
            settings,
            grid,
            folder,
        )
        self.algorithm, self.work, self.layout = setup.algorithm, setup.work, setup.task.layout
        self.names = list(self.algorithm.downloads)
        self.life = secrets.token_hex(8)  # of this server
        self.id = ""  # the run's own name, which nodes file their memory under
        self.run: RunView | None = None
        self.roster, self.bound = Roster(), Bound(settings.norm_factor)
        self.got: list[Arrival] = []  # what makes the step that is being taken
        self.flying: dict[str, Job] = {}  # message id -> job
        self.mailbox = Mailbox(grid)
        self.online: dict[int, str] = {}  # node -> the fingerprint of its key
        self.woke: dict[int, str] = {}  # node -> when it last connected
        self.resting = Resting()  # clients whose orders, and nodes whose introductions failed
        first = min(max(settings.deadline / 10, SOON), 6 * SOON)
        self.patience = Resting(first, max(settings.deadline, first))  # with nodes that were asked something
        self.spare: list[Arrival] = []  # uploads that came while a step was closing, for the next
        self.orders: dict[int, tuple[int, bytes]] = {}  # the newest version by what its reader holds
        self.parting: dict[str, float] = {}  # who is to leave, since when
        self.asked = 0
        self.trouble, self.wait = Troubles(), Wait()
        self.late = 0
        self.lost = 0.0  # since when the SuperLink has not answered
        self.begun = time.monotonic()
        self.met = self.repeated = 0.0  # when nodes were looked for, and when some were asked again
        self.here: set[int] = set()  # clients whose nodes are connected
        self.moves: list[tuple[str, int, float]] = []  # ("came" or "went", client, when) since the last step

    def open(self, config: Record) -> None:
        """The folder must hold this run or none."""
        config |= {"clients": self.settings.nodes, "run": secrets.token_hex(8)}
        if not self.folder.exists:
            self.folder.create(config)
        known = self.folder.config()
        same(self.folder, known, config)
        self.id = str(known["run"])

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        told_to_stop = isinstance(error, SystemExit | KeyboardInterrupt)  # as when its SuperLink goes away
        ended = "done" if error is None else "stopped" if told_to_stop else "failed"
        self._status(ended, error if ended == "failed" else None)

    # A source -----------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        assert self.run is not None
        return self.run.state

    @property
    def sizes(self) -> NDArray[np.int64]:
        return self.roster.sizes

    def describe(self) -> str:
        return "flower"

    def steps(self, run: RunView) -> Iterator[ServerStep]:
        """A step whenever enough uploads are here."""
        self.run = run
        s, note = self.settings, run.metadata
        self.roster = Roster.restore(note.get("roster", []), s.identity == "key", s.samples == "free")
        self.bound = Bound.restore(s.norm_factor, note.get("norms", {}))
        self.begun = time.monotonic() - note.get("time", 0.0)
        log.info("fedbraid: %s, step %d of %d", self.algorithm.name, run.state.t, self.schedule.steps)
        while run.state.t < self.schedule.steps:
            self.got = self._round() if isinstance(self.schedule, Rounds) else self._buffer()
            waiting = [*self.flying.values(), *(a.job for a in self.spare)]
            pending_versions = frozenset(j.version for j in waiting if j.trains)
            tick = self._tick(self.got, [a.job.version for a in self.got], pending_versions)
            yield ServerStep(tick, _blocks(self.got), partial(self._taken, tick))
            self.orders = {}
            leaving.forget(self.folder, (m.name for m in self.roster.members.values() if m.gone))
            self._status("running")

    def _taken(self, tick: Tick, record: Record) -> StepNotes:
        for a in self.got:
            self.roster.members[a.job.client].taken = a.job.id
            self.bound.took(a.norms)
        self.late = 0
        moves, self.moves = self.moves, []
        said = {
            "nodes": len(self.roster.at(self.online)),
            "node_up": [int(sum(v.sum() for v in a.reply.sizes.values())) for a in self.got],
            "node_down": [a.job.down for a in self.got],
            **{kind: found for kind in ("came", "went") if (found := [m[1:] for m in moves if m[0] == kind])},
            **self.trouble.take(),
        }
        metadata = {"roster": self.roster.note(), "time": tick.time, "norms": self.bound.note()}
        return StepNotes(said, metadata)

    def _tick(self, got: list[Arrival], versions: list[int], pending_versions: frozenset[int]) -> Tick:
        clients, now = np.array([a.job.client for a in got]), time.monotonic() - self.begun
        spans = np.array([(a.job.since, a.at) for a in got]) - self.begun
        seen = None if self.run is None else self.run.seen
        asked = None if seen is None else seen.asked.get(self.state.t, [])
        nobody = np.array([], np.int64)
        return Tick(
            self.state.t, now, clients, np.array(versions), nobody, pending_versions, self.late, intervals=spans, selected=asked
        )  # fmt: skip

    def _rehearse(self, arrival: Arrival) -> None:
        """Refuse an upload that no step could be taken with, even alone: the next step goes on without it."""
        who = replace(arrival.reply.participation, version=np.zeros(1, np.int64))
        reply = replace(arrival.reply, participation=who)
        first = State.first(self.algorithm, self.layout, self.state.x, self.settings.seed, real=True)
        tick = replace(self._tick([arrival], [0], frozenset()), step=0)
        try:
            population = Population.of(self, first)
            then, record = advance(self.setup, first, ServerStep(tick, iter([reply])), population)
        except (Diverged, WireError) as error:
            raise WireError(f"no step can be taken with it: {str(error).split(';')[0]}") from error
        if then.guard.steps_over_limit:
            raise WireError(
                f"no step can be taken with it: the model's norm would go from {first.guard.norm:.3g} to {record['norm']:.3g}"
            )

    # When a step closes -------------------------------------------------------------------------------

    def _round(self) -> list[Arrival]:
        """Ask a cohort and wait for it; what comes in time and is sound makes the step."""
        t, s = self.state.t, self.settings
        assert isinstance(self.schedule, Rounds)
        got: dict[int, Arrival] = {}
        asked: list[int] = []
        wanted, attempt, until = 0, 0, time.monotonic() + s.deadline
        while True:
            self._meet()
            for arrival in self._pull():
                if arrival.job.version == t and arrival.job.client in asked:
                    got[arrival.job.client] = arrival
                else:
                    self.late += 1
            waiting = any(j.version == t for j in self.flying.values() if j.trains)
            over = time.monotonic() > until
            if asked and len(got) >= wanted:
                break
            if asked and len(got) >= s.minimum and (over or not waiting):
                break
            if over and s.too_few == "stop":
                raise RunError(
                    f"round {t + 1} has {len(got)} uploads after {s.deadline:g} s, fewer than minimum={s.minimum}"
                    f" ({len(self.roster.at(self.online))} nodes are here); the run can be continued: start it again with"
                    " the same out"
                )
            if not asked or over or not waiting:
                cohort, wanted = (
                    self._cohort(t, attempt, got, patient=not over) if asked or self._all_here() else ([], 0)
                )
                self._ask([self.roster.members[client] for client in cohort])
                if over or (cohort and not asked):  # the deadline counts from the first order
                    until = time.monotonic() + s.deadline
                asked += [c for c in cohort if c not in asked]
                attempt += bool(cohort or over)
            self._wait(f"uploads of round {t + 1}", until - time.monotonic())
            time.sleep(s.poll)
        counted = [got[c] for c in asked if c in got and not self.roster.members[c].gone][:wanted]
        self.late += len(got) - len(counted)
        for arrival in counted:
            self._accept(arrival)
        return counted

    def _cohort(self, t: int, attempt: int, got: dict[int, Arrival], patient: bool) -> tuple[list[int], int]:
        """(whom to ask now, how many uploads the round wants)."""
        assert isinstance(self.schedule, Rounds)
        idle = [c for c in self._idle() if c not in got]
        if isinstance(self.schedule.clients, tuple):
            fixed = [c for c in self.schedule.clients[t] if c not in self.state.gone]
            here = [c for c in fixed if c in idle]
            complete = len(here) + len(got) == len(fixed)
            return (here if complete or not patient else []), len(fixed)
        wanted = self.schedule.cohort(max(self.roster.count, 1))
        enough = min(wanted, self.settings.minimum)
        if len(idle) + len(got) < enough or not idle:
            return [], wanted
        count = min(len(idle), math.ceil((wanted - len(got)) * self.schedule.over_select))
        if self.run is not None and (seen := self.run.seen) is not None:
            seen.grow(self.sizes)
            tries = len(seen.asked.get(t, []))
            chosen = seen.choose(self.schedule.select, t, tries, np.array(sorted(idle)), count).tolist()
            return chosen, min(wanted, len(got) + len(chosen))
        picks = rng.generator(self.settings.seed, "cohort", t, attempt).choice(
            len(idle), count, replace=False
        )
        return [idle[i] for i in picks], min(wanted, len(got) + count)

    def _buffer(self) -> list[Arrival]:
        """Keep `concurrency` nodes busy until `buffer` uploads are there."""
        assert isinstance(self.schedule, Buffered)
        got, self.spare = self.spare, []
        s, last = self.settings, time.monotonic()
        while len(got) < self.schedule.buffer:
            self._meet()
            for arrival in self._pull():
                self._accept(arrival)
                got.append(arrival)
                last = time.monotonic()
            if time.monotonic() - last > s.deadline:
                if s.too_few == "stop":
                    raise RunError(
                        f"step {self.state.t + 1} got no upload for {s.deadline:g} s; the run can be continued: start it"
                        " again with the same out"
                    )
                last = time.monotonic()
            self._expire()
            if len(got) < self.schedule.buffer:
                self._start_some()
                self._wait(f"uploads for step {self.state.t + 1}", s.deadline - (time.monotonic() - last))
                time.sleep(s.poll)
        self.spare = got[self.schedule.buffer :]
        return got[: self.schedule.buffer]

    def _start_some(self) -> None:
        assert isinstance(self.schedule, Buffered)
        idle = self._idle()
        if not self.asked and not self._all_here():
            return
        busy = sum(j.trains and not j.slow for j in self.flying.values())
        count = min(len(idle), self.schedule.concurrency - busy)
        if count > 0:
            draw = rng.generator(self.settings.seed, "arrival", self.state.t, self.asked)
            chosen = draw.choice(len(idle), count, replace=False)
            self._ask([self.roster.members[idle[i]] for i in chosen])

    def _expire(self) -> None:
        """Give the places of asynchronous jobs past their deadline to others; a late answer counts all the same.

        Who is slow gets no second order on top of the first, or it would never catch up.
        """
        for job in self.flying.values():
            if job.trains and not job.slow and time.monotonic() - job.since > self.settings.deadline:
                job.slow = True
                self._note(job.node, job.client, f"no answer within {self.settings.deadline:g} s")

    def _idle(self) -> list[int]:
        busy = {j.client for j in self.flying.values() if j.trains}
        here = (m.client for m in self.roster.at(self.online).values())
        return sorted(c for c in here if c not in busy and c not in self.resting)

    def _all_here(self) -> bool:
        """Whether the run may take its first step; later ones need only `minimum` uploads."""
        here = len(self.roster.at(self.online))
        if self.state.t > 0 or here >= self.settings.nodes:
            return True
        self._wait(f"{self.settings.nodes} nodes before the first step ({here} are here)", None)
        return False

    def _wait(self, name: str, seconds: float | None) -> None:
        if self.lost:
            left = self.lost + self.settings.deadline - time.monotonic()
            self.wait.now("the SuperLink, which does not answer", left)
            return
        if seconds is not None and not self.state.t and not self.asked:
            return  # the nodes are waited for, which has no end
        now = time.monotonic()
        silent = [(now - j.since, self._who(j), times) for j, times in self._open()]
        told = ", ".join(
            f"{who} was asked {age:.0f} s ago" + (f", {times} times so far" if times > 1 else "")
            for age, who, times in sorted(silent, reverse=True)[:10]
        )
        self.wait.now(name, seconds, told or f"{len(self._idle())} clients are idle, none is asked")

    def _open(self) -> list[tuple[Job, int]]:
        """What is to be answered, by the first time that it was asked, and how often it was."""
        found: dict[Any, list[Job]] = {}
        for job in self._mattering(self.flying.values()):
            found.setdefault((job.trains, job.errand), []).append(job)
        return [(jobs[0], len(jobs)) for jobs in found.values()]

    def _mattering(self, jobs: Iterable[Job]) -> list[Job]:
        """Without those whose answer changes nothing: nudges, and questions to nodes that have said their name since."""
        known = self.roster.nodes
        return [j for j in jobs if j.id != NUDGE and not (j.id == HELLO and j.node in known)]

    def _who(self, job: Job) -> str:
        return (
            f"node {job.node}, of which no name is known,"
            if job.id == HELLO
            else self.roster.members[job.client].name
        )

    # Messages -----------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """See who is connected, and ask newcomers who they are."""
        if time.monotonic() - self.met < self.settings.poll:
            return
        self.met = time.monotonic()
        found = self._tried("say who is there", lambda: [*self.grid.get_nodes()], None)
        if found is None:
            self._status("running")
            return
        nodes = {n.node_id: n for n in found}
        self.online = {i: fingerprint(n.public_key) for i, n in nodes.items()}
        self._forget_restarted({i: n.last_activated_at for i, n in nodes.items()})
        self._part()
        strangers = self.online.keys() - self.roster.nodes
        new = {n for n in strangers if n not in self.patience.of and (HELLO, n) not in self.resting}
        late = self._overdue(strangers)
        self._query(HELLO, new | (late & strangers), server=self.life)
        self._query(NUDGE, late - strangers)
        self._watch()
        self._status("running")

    def _query(self, what: str, nodes: Iterable[int], **content: Any) -> None:
        letters = [
            (Job(what, node, -1, -1), MessageType.QUERY, {"run": self.id, "ask": what, **content})
            for node in sorted(nodes)
        ]
        self._send(letters)

    def _overdue(self, strangers: set[int]) -> set[int]:
        """Nodes that have had a question for longer than is our patience, which grows each time.

        A few at once: where many are late, their SuperLink is busy. Whatever the next question is, it brings forth an
        answer that lies on its node, as it may on one of Flower's own.
        """
        if self.met - self.repeated < SOON:
            return set()
        asked = {j.node for j in self._mattering(self.flying.values())} | (
            strangers & self.patience.of.keys()
        )
        late = sorted(n for n in asked & self.online.keys() if n not in self.patience)
        if late:
            self.repeated = self.met
        return set(late[:FEW])

    def _watch(self) -> None:
        """Note who came and who went, for the next record."""
        here, at = {m.client for m in self.roster.at(self.online).values()}, round(self.met - self.begun, 3)
        moves = [("came", c, at) for c in sorted(here - self.here)]
        moves += [("went", c, at) for c in sorted(self.here - here)]
        self.here, self.moves = here, [*self.moves, *moves][:SHOWN]

    def _forget_restarted(self, woke: dict[int, str]) -> None:
        """A node that was started again knows nothing of the orders that it had; they will be given anew."""
        again = {i for i, at in woke.items() if self.woke.get(i, at) != at}
        self.woke |= woke
        for node in again:
            self.patience.succeeded(node)
        for message, job in list(self.flying.items()):
            if job.node in again:
                del self.flying[message]
                self._note(job.node, job.client, "it was started again, and its order with it")

    # Who leaves ---------------------------------------------------------------------------------------

    def _part(self) -> None:
        """Let go of whom the operator named: with the share that they send back, or without when they cannot."""
        for name in leaving.named(self.folder):
            member = self.roster.named(name)
            if member is None or member.gone:
                continue
            if name not in self.parting:
                log.info(
                    "fedbraid: %s is to leave; its share is waited for, up to %g s",
                    name,
                    self.settings.deadline,
                )
            since = self.parting.setdefault(name, time.monotonic())
            if not self._shares():
                self._dismiss(member, {})
            elif time.monotonic() - since > self.settings.deadline:
                self._dismiss(member, None)
            elif member.node in self.online and self._may_ask(member):
                job = Job(LEAVE, member.node, member.client, self.state.t)
                self._send([(job, MessageType.QUERY, {"run": self.id, "leave": member.taken})])

    def _may_ask(self, member: Member) -> bool:
        asked = any(j.id == LEAVE and j.client == member.client for j in self.flying.values())
        return not (asked and member.node in self.patience) and (LEAVE, member.node) not in self.resting

    def _shares(self) -> dict[str, int]:
        """What a client that goes for good sends back, by name and width: nothing where the server holds it all."""
        fresh = {name: v.reshape(1, -1) for name, v in self.algorithm.rule.init(self.state.x).items()}
        return {name: v.numel() for name, v in self.algorithm.rule.withdraw(fresh).items()}

    def _let_go(self, member: Member, content: ConfigRecord) -> None:
        answer = _fields(content, lost=bool, blob=bytes)
        if answer["lost"]:
            raise WireError("it no longer has what it remembered, so its share cannot be taken back")
        share = from_message(answer["blob"], self._shares(), self.layout)
        seen = [norm for taken in self.bound.taken.values() for norm, _ in taken]
        rate = min(
            self.work.rate(self.state.t), 1.0
        )  # shares may be of gradients where uploads are of updates
        most = self.settings.norm_factor * max([*seen, 1.0]) * max(self.state.t, 1) / rate
        for name, v in share.items():
            if 0 < most < float(v.norm()):
                raise WireError(f"its share of {name} has norm {float(v.norm()):.6g}, beyond {most:.6g}")
        self._dismiss(member, share)

    def _dismiss(self, member: Member, share: Vectors | None) -> None:
        assert self.run is not None
        self.run.dismiss(member.client, share)
        member.gone = True
        self.spare = [a for a in self.spare if a.job.client != member.client]
        stays = "" if share is not None else "; its share stays, because it could not be asked for it"
        log.info("fedbraid: client %d (%s) has left for good%s", member.client, member.name, stays)

    def _ask(self, members: Sequence[Member]) -> None:
        """Order members to train from the newest version, all with one push."""
        self.asked += len(members)
        self._send([self._order(member) for member in members])

    def _order(self, member: Member) -> Letter:
        assert member.node is not None
        if member.held not in self.orders:
            self.orders[member.held] = self._download(member)
        base, blob = self.orders[member.held]
        job = Job(secrets.token_hex(8), member.node, member.client, self.state.t, len(blob))
        order = {
            "run": self.id, "job": job.id, "client": member.client, "version": self.state.t, "names": self.names,
            "start": member.accepted, "taken": member.taken, "base": base, "blob": blob,
        }  # fmt: skip
        return job, MessageType.TRAIN, order

    def _download(self, member: Member) -> tuple[int, bytes]:
        """(the version that the message builds on, the message)."""
        t = self.state.t
        who = BroadcastContext(self.algorithm.downloads, t, self.settings.seed, self.layout, real=True)
        return self.algorithm.down.build_message(self.state.sent[t], self.state.wire, member.held, who)

    def _send(self, letters: Sequence[Letter]) -> None:
        """Push messages; the model has a record of its own, which Flower keeps once however many get it."""
        messages = []
        for job, kind, content in letters:
            records = {"fedbraid": ConfigRecord({k: v for k, v in content.items() if k != "blob"})}
            if "blob" in content:
                records["model"] = ConfigRecord({"blob": content["blob"]})
            messages.append(
                Message(
                    RecordDict(dict(records)), dst_node_id=job.node, message_type=kind, group_id=str(self.state.t),
                    ttl=max(60.0, 2 * self.settings.deadline),
                )
            )  # fmt: skip
        if not messages:
            return
        taken: list[str | None] = self._tried("take orders", lambda: [*self.grid.push_messages(messages)], [])
        for (job, _, _), sent in zip_longest(letters, taken):
            if sent:
                self.flying[sent] = job
                self.patience.failed(job.node)
            else:
                self._note(job.node, job.client, "the SuperLink did not take its order")
                self.resting.failed(job.errand)

    def _tried(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        """What Flower answers; where its SuperLink is overwhelmed, which is noted, something else until the deadline."""
        try:
            found = call()
        except (ObjectPushError, ObjectPullError, httpx.HTTPError) as error:
            self.lost = self.lost or time.monotonic()
            if time.monotonic() - self.lost > self.settings.deadline:
                raise
            self._note(0, -1, f"the SuperLink did not {what}: {type(error).__name__}: {error}")
            return otherwise
        self.lost = 0.0
        return found

    def _pull(self) -> list[Arrival]:
        """What has come in since the last look, broken answers sorted out."""
        arrivals = []
        came: list[tuple[str, Message | WireError]] = []
        if self.flying:
            came = self._tried("give answers", lambda: self.mailbox.pull([*self.flying]), [])
        for asked, message in came:
            job = self.flying.pop(asked, None)
            if job is None:
                self.late += 1
                continue
            self.patience.succeeded(job.node)
            if not self._mattering([job]):
                continue
            try:
                if isinstance(message, WireError):
                    raise message
                if message.has_error():
                    raise WireError(f"it failed: {message.error.reason}")
                arrival = self._read(job, message)
            except WireError as error:
                self._note(job.node, job.client, str(error))
                self.resting.failed(job.errand)
                continue
            self.resting.succeeded(job.errand)
            if arrival is not None:
                arrivals.append(arrival)
        return arrivals

    def _read(self, job: Job, message: Message) -> Arrival | None:
        content = message.content.get("fedbraid")
        if not isinstance(content, ConfigRecord):
            raise WireError("its answer has no fedbraid record")
        if job.id == HELLO:
            about = _fields(content, name=str, samples=int, held=int, client=int)
            member = self.roster.welcome(job.node, about, self.online)  # whose keys the SuperLink has checked
            log.info("fedbraid: node %d is client %d (%s)", job.node, member.client, member.name)
            return None
        member = self.roster.members[job.client]
        if member.gone:
            raise WireError("it has left for good")
        if job.id == LEAVE:
            self._let_go(member, content)
            return None
        answer = _fields(content, job=str, held=int, lost=bool)
        if answer["job"] != job.id:
            raise WireError(f"it answers job {answer['job'][:32]!r}, not {job.id!r}")
        member.held = answer["held"] if -1 <= answer["held"] <= self.state.t else -1
        if answer["lost"]:
            raise WireError("it does not hold the state that the server counted on; it will get all of it")
        answer = _fields(content, loss=float, blob=bytes)
        if not abs(answer["loss"]) <= MOST_LOSS:
            raise WireError(f"its training loss is {answer['loss']}")
        if content.get("forgot") is True:
            self._note(job.node, job.client, FORGOT)
        return self._open_upload(job, member, answer)

    def _open_upload(self, job: Job, member: Member, answer: dict[str, Any]) -> Arrival:
        if job.version not in self.state.sent:
            raise WireError(f"it trained from version {job.version}, which is no longer kept")
        sent = {name: v[None] for name, v in self.state.sent[job.version].vectors.items()}
        x, a, blob = sent["x"], self.algorithm, answer["blob"]
        who = UploadContext(
            np.array([job.client]), job.version, self.settings.seed, x, a.uploads, self.layout, down=sent
        )
        frames = unbundle(blob, a.uploads, self.layout)
        vectors = a.up.receive(frames, who)
        samples = np.array([member.samples])
        n = torch.from_numpy(samples).to(x)[:, None]
        K = torch.from_numpy(step_counts(samples, self.work)).to(x)[:, None]
        norms = self.bound.check(vectors, float(K), x)
        for name, (norm, _) in norms.items():
            if 0 < self.settings.max_norm < norm:
                raise WireError(f"its {name} has norm {norm:.6g}, beyond max-norm={self.settings.max_norm:g}")
        lr = torch.full_like(K, self.work.rate(job.version), dtype=torch.float64)
        version = np.array([job.version])
        participation = Participation(who.clients, version, n, K, self.work.effective(K), lr)
        sizes = {name: np.array([len(frame)]) for name, frame in frames.items()}
        add_overhead(sizes)
        down = {"x": np.array([job.down])}
        reply = Reply(participation, vectors, {}, sizes, torch.tensor([answer["loss"]]), down)
        arrival = Arrival(job, reply, norms)
        if self.bound.is_odd(vectors):
            self._rehearse(arrival)
        return arrival

    def _accept(self, arrival: Arrival) -> None:
        self.roster.members[arrival.job.client].accepted = arrival.job.id

    def _note(self, node: int, client: int, why: str) -> None:
        """Refused, failed or silent: counted, reported with the node's id, and the run goes on."""
        self.trouble.add(node, client, why)

    def _status(self, what: str, error: BaseException | None = None) -> None:
        """A small file for whoever watches."""
        asked = {j.client: j for j in self.flying.values() if j.trains}
        here, now, step = self.roster.at(self.online), time.monotonic(), self.run.state.t if self.run else 0
        nameless = [
            {
                "client": -1, "name": f"node {j.node}, of which no name is known", "node": str(j.node), "here": True,
                "asked": round(now - j.since, 1),
            }
            for j, _ in self._open() if j.id == HELLO and j.node in self.online
        ]  # fmt: skip
        nodes = [
            {
                "client": m.client, "name": m.name, "node": str(m.node), "here": m.node in here,
                "asked": round(now - asked[m.client].since, 1) if m.client in asked else None,
            }
            for m in list(self.roster.members.values())[:SHOWN]
        ]  # fmt: skip
        self.folder.write_json(
            "status.json",
            {
                "state": what, "error": "" if error is None else str(error),
                "traceback": "" if error is None else "".join(traceback.format_exception(error))[-10_000:], "step": step, "steps": self.schedule.steps, "busy": len(asked),
                "nodes": len(here), "trouble": self.trouble.shown(), "pid": os.getpid(), "at": time.time(),
                "wait": self.wait.note(), "fleet": [*nodes, *nameless[:SHOWN]],
            },
        )  # fmt: skip


def _fields(content: ConfigRecord, **kinds: type) -> dict[str, Any]:
    """These fields of an answer, each of its kind."""
    for name, kind in kinds.items():
        if not isinstance(content.get(name), kind):
            raise WireError(f"its answer has no {name} of type {kind.__name__}")
    return {name: content[name] for name in kinds}
