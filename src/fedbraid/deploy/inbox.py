"""The inbox: answers are read, parsed, checked and tried before a step may count them.

Policy. An upload is decoded when it arrives, to be checked, and again when its step is taken, in the order in which its
clients were asked: the step's bits do not depend on who was faster. In between the broker holds it; up to HELD_BYTES of
decoded uploads are kept so that small cohorts are read once. The server's memory does not grow with the cohort.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fedbraid.core.context import Participation
from fedbraid.core.link import Sizes, UploadContext
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
    is_read: bool = True  # False while it is left to an edge
    loss: float = math.nan  # NaN where it is not believed
    bytes_up: int = 0
    sizes: dict[str, int] = field(default_factory=dict)  # bytes by vector
    norms: Norms | None = None
    reply: Reply | None = None  # while it is held


@dataclass(frozen=True)
class Verdict:
    """What an upload that is not refused says of its node."""

    version: int  # of the model that the node holds
    lost: bool = False  # it did not hold what its order built on, and sends nothing
    forgot: bool = False  # it no longer had its state
    doubt: str | None = None  # why its loss is not believed


@dataclass
class Inbox:
    """What turns answers into replies of a step."""

    setup: Setup
    norms: NormLimit
    losses: LossLimit
    max_norm: float = 0.0
    is_masked: bool = False  # uploads stay with their nodes
    held: int = 0  # bytes

    def parse(self, answer: ReceivedAnswer, expects_upload: bool) -> tuple[dict[str, Any], bytes]:
        """(head, upload) of an answer; where no upload is expected, a large one is not even read."""
        if not expects_upload and answer.size > 2 * ANSWER_HEAD_LIMIT:
            raise WireError(f"its answer of {answer.size} bytes is far too large")
        head, upload = unpack_answer(answer.read())
        if "error" in head:
            raise NodeFailed(f"it failed: {head['error']}")
        return head, upload

    def judge(self, arrival: Arrival, state: State) -> Verdict:
        """Read an upload and check it; WireError where it is refused."""
        head, upload = self.parse(arrival.answer, True)
        about, forgot = fields(head, version=int, lost=bool), head.get("forgot") is True
        if about["lost"]:
            return Verdict(-1, lost=True, forgot=forgot)
        if self.is_masked and upload:
            raise WireError("it sends its upload, of which the server is to see a sum alone")
        doubt = None if self.is_masked else self.check(arrival, head, upload, state)
        version = about["version"] if -1 <= about["version"] <= state.t else -1
        return Verdict(version, forgot=forgot, doubt=doubt)

    def check(self, arrival: Arrival, head: dict[str, Any], upload: bytes, state: State) -> str | None:
        """Accept an upload or raise WireError; returned is why its loss is not believed, where it is not."""
        claimed = fields(head, loss=(float, int))["loss"]
        reply = self._decode(arrival, upload, state)
        arrival.sizes = {name: int(v.sum()) for name, v in reply.sizes.items()}
        arrival.bytes_up = sum(arrival.sizes.values())
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
        if block:
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
        who, down = facts(setup, [arrival], sent["x"])
        layout = setup.task.layout
        about = UploadContext(who.clients, version, setup.seed, sent["x"], a.uploads, layout, down=sent)
        frames = unbundle(upload, a.uploads, layout)
        vectors = a.up.receive(frames, about)
        sizes = {name: np.array([len(frame)]) for name, frame in frames.items()}
        add_overhead(sizes)
        return Reply(who, vectors, {}, sizes, torch.tensor([arrival.loss]), down)

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


def facts(setup: Setup, arrivals: Sequence[Arrival], like: torch.Tensor) -> tuple[Participation, Sizes]:
    """(what the server knows of these nodes' participation, the bytes that went down to them)."""
    clients, versions, samples = (
        np.array([getattr(a, key) for a in arrivals], np.int64) for key in ("client", "version", "samples")
    )
    n = torch.from_numpy(samples).to(like)[:, None]
    K = torch.from_numpy(step_counts(samples, setup.work)).to(like)[:, None]
    lr = torch.tensor([[setup.work.rate(v)] for v in versions.tolist()], dtype=torch.float64)
    down = {"x": np.array([a.bytes_down for a in arrivals])}
    return Participation(clients, versions, n, K, setup.work.effective(K), lr), down


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
