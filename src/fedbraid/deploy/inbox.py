"""The inbox: answers are read, parsed, checked and tried before a step may count them.

Policy. An upload is decoded when it arrives, to be checked, and again when its step is taken, in the order in which its
clients were asked: the step's bits do not depend on who was faster. In between the broker holds it; up to HELD_BYTES of
decoded uploads are kept so that small cohorts are read once. The server's memory does not grow with the cohort.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedbraid.core.context import Participation
from fedbraid.core.link import UploadContext
from fedbraid.core.work import step_counts
from fedbraid.deploy.norm_limit import LossLimit, NormLimit, Norms
from fedbraid.deploy.transport import ANSWER_HEAD_LIMIT, ReceivedAnswer, unpack_answer
from fedbraid.engines.engine import Reply, Setup
from fedbraid.errors import Diverged, WireError
from fedbraid.links.message import add_overhead, unbundle
from fedbraid.run.source import ServerStep
from fedbraid.run.state import State
from fedbraid.run.step import Population, advance
from fedbraid.schedule import Tick

HELD_BYTES = 64 * 1024**2  # of decoded uploads that wait for their step
BLOCK_BYTES = 16 * 1024**2  # of decoded uploads that are folded in one call
NOBODY = np.array([], np.int64)


class NodeFailed(WireError):
    """A node's own word that it could not do what it was asked: no upload was refused."""


@dataclass
class Arrival:
    """An upload that was checked, and where its bytes are."""

    answer: ReceivedAnswer
    name: str
    client: int
    samples: int
    version: int
    sequence: int
    since: float
    at: float
    bytes_down: int
    loss: float = math.nan  # NaN where it is not believed
    bytes_up: int = 0
    norms: Norms | None = None
    reply: Reply | None = None  # while it is held


@dataclass
class Inbox:
    """What turns answers into replies of a step."""

    setup: Setup
    norms: NormLimit
    losses: LossLimit
    max_norm: float = 0.0
    held: int = 0  # bytes

    def parse(self, answer: ReceivedAnswer, expects_upload: bool) -> tuple[dict[str, Any], bytes]:
        """(head, upload) of an answer; where no upload is expected, a large one is not even read."""
        if not expects_upload and answer.size > 2 * ANSWER_HEAD_LIMIT:
            raise WireError(f"its answer of {answer.size} bytes is far too large")
        head, upload = unpack_answer(answer.read())
        if "error" in head:
            raise NodeFailed(f"it failed: {head['error']}")
        return head, upload

    def check(self, arrival: Arrival, head: dict[str, Any], upload: bytes, state: State) -> str | None:
        """Accept an upload or raise WireError; returned is why its loss is not believed, where it is not."""
        claimed = fields(head, loss=(float, int))["loss"]
        reply = self._decode(arrival, upload, state)
        arrival.bytes_up = int(sum(v.sum() for v in reply.sizes.values()))
        arrival.norms = self.norms.check(reply.uploads, float(reply.participation.K), state.x)
        for name, (norm, _) in arrival.norms.items():
            if 0 < self.max_norm < norm:
                raise WireError(f"its {name} has norm {norm:.6g}, beyond max_norm={self.max_norm:g}")
        doubt = self.losses.doubt(float(claimed)) if abs(claimed) < 1e300 else "its training loss is absurd"
        arrival.loss = math.nan if doubt else float(claimed)
        if self.norms.looks_abnormal(reply.uploads):
            self._dry_run(arrival, reply, state)
        size = _bytes(reply)
        if self.held + size <= HELD_BYTES:
            arrival.reply, self.held = reply, self.held + size
        return doubt

    def replies(self, arrivals: Sequence[Arrival], state: State) -> Iterator[Reply]:
        """In order, in blocks of bounded size that have no client twice."""
        block: list[tuple[Arrival, Reply]] = []
        size = 0
        for arrival in arrivals:
            reply = arrival.reply or self._decode(arrival, unpack_answer(arrival.answer.read())[1], state)
            self.release(arrival)
            if size > BLOCK_BYTES or any(arrival.client == a.client for a, _ in block):
                yield _joined(block)
                block, size = [], 0
            block.append((arrival, replace(reply, loss=torch.tensor([arrival.loss]))))
            size += _bytes(reply)
        yield _joined(block)

    def release(self, arrival: Arrival) -> None:
        """Hold its decoded upload no longer."""
        if arrival.reply is not None:
            self.held -= _bytes(arrival.reply)
            arrival.reply = None

    def accepted(self, arrivals: Sequence[Arrival]) -> None:
        """These are in a step: what is plausible is learned from them."""
        for arrival in arrivals:
            self.norms.accepted(arrival.norms or {})
        self.losses.believed(a.loss for a in arrivals if math.isfinite(a.loss))

    def _decode(self, arrival: Arrival, upload: bytes, state: State) -> Reply:
        version, a, setup = arrival.version, self.setup.algorithm, self.setup
        if version not in state.sent:
            raise WireError(f"it trained from version {version}, which is no longer stored")
        sent = {name: v[None] for name, v in state.sent[version].vectors.items()}
        layout, clients, samples = setup.task.layout, np.array([arrival.client]), np.array([arrival.samples])
        who = UploadContext(clients, version, setup.seed, sent["x"], a.uploads, layout, down=sent)
        frames = unbundle(upload, a.uploads, layout)
        vectors = a.up.receive(frames, who)
        n = torch.from_numpy(samples).to(sent["x"])[:, None]
        K = torch.from_numpy(step_counts(samples, setup.work)).to(sent["x"])[:, None]
        lr = torch.full_like(K, setup.work.rate(version), dtype=torch.float64)
        sizes = {name: np.array([len(frame)]) for name, frame in frames.items()}
        add_overhead(sizes)
        down = {"x": np.array([arrival.bytes_down])}
        who_trained = Participation(clients, np.array([version]), n, K, setup.work.effective(K), lr)
        return Reply(who_trained, vectors, {}, sizes, torch.tensor([arrival.loss]), down)

    def _dry_run(self, arrival: Arrival, reply: Reply, state: State) -> None:
        """Refuse an upload with which no step can be taken, even alone: the next step goes on without it."""
        setup, none = self.setup, np.zeros(1, np.int64)
        sizes = np.zeros(arrival.client + 1, np.int64)
        sizes[arrival.client] = arrival.samples
        first = State.first(setup.algorithm, setup.task.layout, state.x, setup.seed, real=True)
        tick = Tick(0, 0.0, np.array([arrival.client]), none, NOBODY, frozenset())
        try:
            now = replace(reply, participation=replace(reply.participation, version=none))
            population = Population(sizes, (), sizes, 1, float(arrival.samples), is_live=True)
            then, record = advance(setup, first, ServerStep(tick, iter([now])), population)
        except (Diverged, WireError) as error:
            raise WireError(f"no step can be taken with it: {str(error).split(';')[0]}") from error
        if then.guard.steps_over_limit:
            raise WireError(
                f"no step can be taken with it: the model's norm would go from {first.guard.norm:.3g} to {record['norm']:.3g}"
            )


def fields(head: dict[str, Any], **kinds: type | tuple[type, ...]) -> dict[str, Any]:
    """These fields of an answer's head, each of its kind."""
    for name, kind in kinds.items():
        value = head.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise WireError(f"its answer has no {name} of the right type")
    return {name: head[name] for name in kinds}


def _joined(block: list[tuple[Arrival, Reply]]) -> Reply:
    return Reply.join([reply for _, reply in block])


def _bytes(reply: Reply) -> int:
    return sum(v.numel() * v.element_size() for v in reply.uploads.values())
