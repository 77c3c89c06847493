"""A downlink whose server and clients share a hidden state x̂, so that only its change is broadcast (QAFeL, eq. 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.context import Vectors
from fedbraid.core.link import Broadcast, BroadcastContext, Downlink, ModelVersion, Sizes, to_wire
from fedbraid.errors import Diverged, WireError
from fedbraid.links.identity import Identity
from fedbraid.links.message import add_overhead, as_tensor, bundle, message_overhead
from fedbraid.links.plain import encode_down, open_frames
from fedbraid.links.wire import FRAME_BYTES, pack_message, unpack_message

STRETCHED_LIMIT = 10  # steps in a row that a hidden state may stretch its error before the run is stopped


@dataclass(frozen=True)
class SharedState:
    """x̂ as the codec left it, bytes broadcast so far, for how long its error has grown, messages still of use."""

    vectors: Vectors
    upto: int = 0
    stretched: int = 0
    log: dict[int, Tensor] = field(default_factory=dict)  # by version, where clients are real


@dataclass(frozen=True)
class HiddenState(Downlink):
    """Server and clients share x̂; q = Q_s(x − x̂) is broadcast, and both sides do x̂ ← x̂ + q."""

    def init_client_state(self) -> Vectors:
        return {"synced": torch.full((1,), -1)}  # bytes broadcast up to what it holds

    def open(self, vectors: Vectors, who: BroadcastContext) -> Broadcast:
        """All clients start from the same values."""
        held = {name: to_wire(v, who.declared[name], self.codec) for name, v in vectors.items()}
        sizes = {name: encode_down(Identity(), v, name, who).size for name, v in held.items()}
        add_overhead(sizes)
        return Broadcast(
            ModelVersion(self.decode_held(held, who), sizes, whole=sum(sizes.values())), SharedState(held)
        )

    def send(self, vectors: Vectors, s: SharedState, who: BroadcastContext) -> Broadcast:
        cast = {
            name: encode_down(self.codec, v, name, who, base=s.vectors[name])  # q = Q_s(x − x̂), eq. 4
            for name, v in vectors.items()
        }
        sizes = {name: c.size for name, c in cast.items()}
        add_overhead(sizes)
        held = {name: c.held for name, c in cast.items()}  # x̂ ← x̂ + q
        error = sum(float((c.given - c.decoded).square().sum()) for c in cast.values())
        total = 0.0 if self.codec.lossless else sum(float(c.given.square().sum()) for c in cast.values())
        ratio = error / total if total else 0.0
        stretched = s.stretched + 1 if ratio > 1 else 0
        if stretched >= STRETCHED_LIMIT:
            raise Diverged(
                f"the hidden state runs away: {self.codec!r} left {ratio:.3g} times the squared norm as error for"
                f" {stretched} steps in a row; use a contractive down codec, such as qsgd(bits, contractive=True),"
                " norm='max' or more bits"
            )
        upto = s.upto + sum(sizes.values())
        frames = {name: c.frame for name, c in cast.items() if c.frame is not None}
        log = self._log(s, bundle(frames), who) if who.real else {}
        version = ModelVersion({name: c.means for name, c in cast.items()}, sizes, upto, self._size(who))
        return Broadcast(version, SharedState(held, upto, stretched, log), {"contraction": ratio})

    def _size(self, who: BroadcastContext) -> int:
        """The length of the whole state's message."""
        plain = [FRAME_BYTES + 4 * d.size(who.layout) for d in who.declared.values()]
        return sum(plain) + message_overhead(tuple(who.declared))

    def _log(self, s: SharedState, message: bytes, who: BroadcastContext) -> dict[int, Tensor]:
        """The messages that a client may still need: only for as long as they are less than the whole state."""
        log = {**s.log, who.version: as_tensor(message)}
        whole = self._size(who)
        while log and sum(len(m) for m in log.values()) > whole:
            del log[min(log)]
        return log

    def message_bytes(
        self, versions: Mapping[int, ModelVersion], fetched: NDArray[np.int64], memory: Vectors
    ) -> tuple[Sizes, Vectors]:
        """The packets that clients missed, or the whole state where that is less."""
        which, at = np.unique(fetched, return_inverse=True)
        upto = np.array([versions[int(v)].upto for v in which], np.int64)[at]
        whole = np.array([versions[int(v)].whole for v in which], np.int64)[at]
        had = memory["synced"][:, 0].cpu().numpy()
        cost = np.where(had < 0, whole, np.minimum(upto - had, whole))
        return {"x": cost}, {"synced": torch.from_numpy(upto)[:, None]}

    def build_message(
        self, newest: ModelVersion, s: SharedState, held: int, who: BroadcastContext
    ) -> tuple[int, bytes]:
        missed = range(held + 1, who.version + 1)
        if held < 0 or not all(v in s.log for v in missed):
            cast = {k: encode_down(Identity(), v, k, replace(who, real=True)) for k, v in s.vectors.items()}
            return -1, bundle({name: c.frame for name, c in cast.items() if c.frame is not None})
        messages = {str(v): s.log[v].numpy().tobytes() for v in missed}
        if not messages:
            return held, b""
        return held, next(iter(messages.values())) if len(messages) == 1 else pack_message(messages)

    def receive(self, message: bytes, base: int, held: Vectors, who: BroadcastContext) -> Vectors:
        if base < 0:
            return open_frames(message, Identity(), who)
        for missed_message in _missed_messages(message, [str(v) for v in range(base + 1, who.version + 1)]):
            got = open_frames(missed_message, self.codec, who)
            change = not self.codec.lossless
            held = {
                name: held[name] + v if change and who.declared[name].width is None else v
                for name, v in got.items()
            }
        return held

    @property
    def needs_previous(self) -> bool:
        return True


def _missed_messages(message: bytes, missed: list[str]) -> list[bytes]:
    """The broadcasts that a client missed, one after the other."""
    if len(missed) < 2:
        return [message] if missed else []
    messages = unpack_message(message, len(message))
    if list(messages) != missed:
        raise WireError(
            f"the server sent the broadcasts {list(messages)}, not {missed}; run the same fedbraid"
        )
    return list(messages.values())
