"""What a step's record says of its uploads and downloads."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedbraid.core.context import Uploads
from fedbraid.engines.engine import Reply
from fedbraid.engines.folding import upload_norms
from fedbraid.errors import Diverged
from fedbraid.schedule import Tick


class StepMetrics:
    """Counts of one step, and means over its senders, weighed as its gather weighs them."""

    def __init__(self, weights: str, step: int, drops_nonfinite: bool = False, is_live: bool = False) -> None:
        self.kind, self.step, self.drops_nonfinite, self.is_live = weights, step, drops_nonfinite, is_live
        self.clients: list[int] = []
        self.losses: list[float | None] = []  # None where a real client's claim is not believed
        self.staleness: list[NDArray[np.int64]] = []
        self.up: dict[str, int] = {}
        self.down: dict[str, int] = {}
        self.count = self.quantized = self.doubted = 0
        self.is_masked = False  # no norm of any upload is seen
        self.sums = dict.fromkeys(("weight", "lr", "K", "a", "loss", "update_norm"), 0.0)

    def add(self, up: Uploads, reply: Reply, down: dict[str, int], quantized: int) -> None:
        self.count += len(reply.clients)
        self.quantized += quantized
        self.clients += reply.clients.tolist()
        loss = reply.loss
        if self.is_live:
            is_finite = torch.isfinite(loss)
            self.losses += [
                value if finite else None for value, finite in zip(loss.tolist(), is_finite.tolist())
            ]
            self.doubted += int((~is_finite).sum())
            loss = torch.where(is_finite, loss, 0.0)
        else:
            self.losses += loss.tolist()
        self.staleness.append(up.staleness[:, 0].cpu().numpy().astype(np.int64))
        norms = upload_norms(up.vectors) if up.vectors else reply.norms
        self.is_masked = norms is None
        norms = torch.zeros_like(loss) if norms is None else norms
        moved = norms[:, None]
        if self.drops_nonfinite:  # what does not reach the model does not end the run
            moved = moved.nan_to_num(0.0, 0.0)
        # in float64, which lr has
        columns = torch.cat([up.p(self.kind), up.lr, up.K, up.a, loss[:, None], moved], 1)
        self.sums = dict(zip(self.sums, _plus([*self.sums.values()], columns.cpu().numpy()), strict=True))
        if not math.isfinite(self.sums["update_norm"]):
            bad = next(int(c) for c, norm in zip(reply.clients, norms.tolist()) if not math.isfinite(norm))
            raise Diverged(
                f"client {bad}'s update at step {self.step} is not finite; lower the learning rate, or clip gradients with"
                " clip=. The last checkpoint is intact"
            )
        for total, more in ((self.up, {n: int(s.sum()) for n, s in reply.sizes.items()}), (self.down, down)):
            for name, size in more.items():
                total[name] = total.get(name, 0) + size

    def charge(self, numbers: dict[str, float]) -> dict[str, float]:
        """Count the bytes among a gather's numbers for the record; the others."""
        rest = {}
        for name, value in numbers.items():
            direction, _, what = name.partition(":")
            if what and (total := {"up": self.up, "down": self.down}.get(direction)) is not None:
                total[what] = total.get(what, 0) + int(value)
            else:
                rest[name] = value
        return rest

    def mean(self, name: str) -> float:
        """The senders' weighted mean rate, steps or effective steps."""
        return self.sums[name] / self.sums["weight"] if self.sums["weight"] else 0.0

    @property
    def quantized_fraction(self) -> float:
        """Of the cohort: how many quantized their uploads."""
        return self.quantized / max(self.count, 1)

    @property
    def train_loss(self) -> float:
        return self.sums["loss"] / (self.count - self.doubted)

    @property
    def guarded_loss(self) -> float:
        """By which training is seen to diverge; where clients may be hostile, none can end a run by what it reports."""
        if self.is_live:
            return 0.0
        finite = [loss for loss in self.losses if loss is not None]
        return statistics.median(finite) if self.drops_nonfinite else self.train_loss

    @property
    def max_staleness(self) -> int:
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
            record |= {
                **({"train_loss": self.train_loss} if self.count > self.doubted else {}),
                "lr": self.mean("lr"),
                **({} if self.is_masked else {"update_norm": self.sums["update_norm"] / self.count}),
            }
        if tick.selected is not None:  # what the next choice is made of
            record |= {"selected": tick.selected, "losses": self.losses}
        if tick.dropped:
            record["dropped"] = tick.dropped
        stale = np.concatenate(self.staleness) if self.staleness else np.zeros(0, np.int64)
        if len(stale) and (tick.pending_versions or stale.any()):
            record["staleness"] = float(stale.mean())
            record["staleness_max"] = int(stale.max())
            record["staleness_counts"] = np.bincount(stale).tolist()
            record["versions_kept"] = versions
        return record | tick.clocked()


def _plus(totals: list[float], columns: NDArray[np.float64]) -> list[float]:
    """Each total and its column's numbers, one after the other: no bit depends on how a cohort was cut into blocks."""
    columns[:, 1:4] *= columns[:, :1]  # by weight
    columns[0] += totals
    sums: list[float] = columns.cumsum(0)[-1].tolist()
    return sums
