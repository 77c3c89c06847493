"""What a step's record says of its uploads and downloads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.algorithm import Algorithm
from fedbraid.core.gather import Uploads
from fedbraid.core.layout import Layout
from fedbraid.errors import Diverged
from fedbraid.links.codec import Codec
from fedbraid.links.codecs import identity
from fedbraid.links.link import (
    HiddenState,
    catch_up,
    codec_of,
    message_overhead,
)
from fedbraid.run.state import State
from fedbraid.schedule import Tick

if TYPE_CHECKING:
    from fedbraid.engines.client import Reply


def _plus(total: float, more: Tensor) -> float:
    """One after the other, so that no bit depends on how a cohort was cut into blocks."""
    values = more.reshape(-1).to("cpu", torch.float64, copy=True).numpy()
    values[0] += total
    return float(values.cumsum()[-1])


class Tally:
    """What a step's record says of its uploads and downloads."""

    def __init__(self, algorithm: Algorithm, state: State, layout: Layout) -> None:
        self.codec: Codec = codec_of(algorithm.up)
        self.hidden = isinstance(algorithm.down, HiddenState)
        self.state, self.layout = state, layout
        self.clients: list[int] = []
        self.staleness: list[NDArray[np.int64]] = []
        self.up: dict[str, int] = {}
        self.down: dict[str, int] = {}
        self.count = self.quantised = 0
        self.kind = getattr(algorithm.gather, "weights", "uniform")
        self.weight = self.steps = self.rates = self.loss = self.drift = 0.0

    def add(self, up: Uploads, reply: Reply, versions: NDArray[np.int64]) -> None:
        m = len(reply.clients)
        self.count += m
        self.clients += reply.clients.tolist()
        self.staleness.append(self.state.t - versions)
        p = up.weights(self.kind).double()
        self.weight = _plus(self.weight, p)
        self.steps = _plus(self.steps, p * reply.K)
        self.rates = _plus(self.rates, p * reply.lr)
        self.loss = _plus(self.loss, reply.loss)
        self.drift = _plus(self.drift, up.vectors["delta"].norm(dim=1))
        if not math.isfinite(self.drift):
            bad = next(
                int(c) for c, v in zip(reply.clients, up.vectors["delta"]) if not torch.isfinite(v.norm())
            )
            raise Diverged(
                f"client {bad}'s update at step {self.state.t + 1} is not finite; lower the learning rate, or clip"
                " gradients with clip=. The last committed step is intact"
            )
        if not self.codec.lossless:
            self.quantised += sum(self.codec.quantises(int(c)) for c in reply.clients)
        for name, lengths in reply.sizes.items():
            self.up[name] = self.up.get(name, 0) + int(lengths.sum())
        self._downloads(reply, versions)

    def _downloads(self, reply: Reply, versions: NDArray[np.int64]) -> None:
        if not self.hidden:
            alike = bool((versions == versions[0]).all())
            for version, times in (
                ((versions[0], len(versions)),) if alike else zip(*np.unique(versions, return_counts=True))
            ):
                for name, size in self.state.sent[int(version)]["sizes"].items():
                    self.down[name] = self.down.get(name, 0) + size * int(times)
            return
        packets = np.array([self.state.sent[int(v)]["packets"] for v in versions], np.int64)
        held = self.state.clients.get(reply.clients.tolist())["held"].numpy().astype(np.int64)
        had = held[:, 0] * 2**20 + held[:, 1]
        names = tuple(self.state.wire["hidden"])
        whole_state = len(names) * (identity().size(self.layout) or 0) + message_overhead(names)
        cost = catch_up(np.where(held[:, 0] < 0, -1, packets - had), whole_state)
        self.down["x"] = self.down.get("x", 0) + int(cost.sum())
        now = np.stack([packets // 2**20, packets % 2**20], 1).astype(np.float32)
        reply.memory["held"] = torch.from_numpy(now)

    def record(self, tick: Tick) -> dict[str, Any]:
        record: dict[str, Any] = {
            "clients": self.clients,
            "uploads": self.count,
            "bytes_up": sum(self.up.values()),
            "bytes_down": sum(self.down.values()),
            "up": self.up,
            "down": self.down,
            "train_loss": self.loss / self.count,
            "lr": self.rates / self.weight,
            "drift": self.drift / self.count,
        }
        if tick.dropped:
            record["dropped"] = tick.dropped
        stale = np.concatenate(self.staleness)
        if tick.live or stale.any():
            record["staleness"] = float(stale.mean())
            record["staleness_max"] = int(stale.max())
            record["staleness_counts"] = np.bincount(stale).tolist()
            record["versions_kept"] = len(self.state.sent)
        return record | tick.clocked()
