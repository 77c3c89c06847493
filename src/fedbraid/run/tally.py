"""What a step's record says of its uploads and downloads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core.gather import Uploads
from fedbraid.engines.client import Reply
from fedbraid.errors import Diverged
from fedbraid.schedule import Tick


class Tally:
    """Counts of one step, and means over its senders, weighed as its gather weighs them."""

    def __init__(self, weights: str, step: int) -> None:
        self.kind, self.step = weights, step
        self.clients: list[int] = []
        self.losses: list[float] = []
        self.staleness: list[NDArray[np.int64]] = []
        self.up: dict[str, int] = {}
        self.down: dict[str, int] = {}
        self.count = self.quantised = 0
        self.weight = self.loss = self.drift = 0.0
        self.sums = {"lr": 0.0, "K": 0.0, "a": 0.0}

    def add(self, up: Uploads, reply: Reply, down: dict[str, int], quantised: int) -> None:
        self.count += len(reply.clients)
        self.quantised += quantised
        self.clients += reply.clients.tolist()
        self.losses += reply.loss.tolist()
        self.staleness.append(up.staleness[:, 0].cpu().numpy().astype(np.int64))
        p = up.p(self.kind).double()
        self.weight = _plus(self.weight, p)
        for name, v in (("lr", up.lr), ("K", up.K), ("a", up.a)):
            self.sums[name] = _plus(self.sums[name], p * v)
        self.loss = _plus(self.loss, reply.loss)
        sent = next(iter(up.vectors.values()))
        self.drift = _plus(self.drift, sent.norm(dim=1))
        if not math.isfinite(self.drift):
            bad = next(int(c) for c, v in zip(reply.clients, sent) if not torch.isfinite(v.norm()))
            raise Diverged(
                f"client {bad}'s update at step {self.step} is not finite; lower the learning rate, or clip gradients with"
                " clip=. The last committed step is intact"
            )
        for total, more in ((self.up, {n: int(s.sum()) for n, s in reply.sizes.items()}), (self.down, down)):
            for name, size in more.items():
                total[name] = total.get(name, 0) + size

    def mean(self, name: str) -> float:
        """The senders' weighted mean rate, steps or effective steps."""
        return self.sums[name] / self.weight if self.weight else 0.0

    @property
    def train_loss(self) -> float:
        return self.loss / self.count

    @property
    def stalest(self) -> int:
        return max((int(s.max()) for s in self.staleness), default=0)

    def record(self, tick: Tick, versions: int) -> dict[str, Any]:
        """For the history."""
        record: dict[str, Any] = {
            "clients": self.clients,
            "uploads": self.count,
            "bytes_up": sum(self.up.values()),
            "bytes_down": sum(self.down.values()),
            "up": self.up,
            "down": self.down,
        }
        if self.count:
            record |= {"train_loss": self.train_loss, "lr": self.mean("lr"), "drift": self.drift / self.count}
        if tick.asked is not None:  # what the next choice is made of
            record |= {"asked": tick.asked, "losses": self.losses}
        if tick.dropped:
            record["dropped"] = tick.dropped
        stale = np.concatenate(self.staleness) if self.staleness else np.zeros(0, np.int64)
        if len(stale) and (tick.live or stale.any()):
            record["staleness"] = float(stale.mean())
            record["staleness_max"] = int(stale.max())
            record["staleness_counts"] = np.bincount(stale).tolist()
            record["versions_kept"] = versions
        return record | tick.clocked()


def _plus(total: float, more: Tensor) -> float:
    """One after the other, so that no bit depends on how a cohort was cut into blocks."""
    values = more.reshape(-1).to("cpu", torch.float64, copy=True).numpy()
    values[0] += total
    return float(values.cumsum()[-1])
