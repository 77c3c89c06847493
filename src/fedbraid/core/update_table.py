"""The server's memory of every client's last vector, and their sum, which follows what is stored.

A step touches the cohort's rows and nothing else: new rows go in, old ones come out, and the sum moves by the
difference, so that no step costs O(N·d).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbraid.core import accelerators as passes
from fedbraid.core.client_table import ClientTable
from fedbraid.core.codec import Codec
from fedbraid.core.gather import WIDE_ROW, add_weighted_
from fedbraid.core.layout import Layout


@dataclass(frozen=True)
class UpdateTable:
    """Rows of (w_i, y_i), 0 before a client's first participation, Σ w_j y_j in float64, and Σ w_j."""

    rows: ClientTable
    total: Tensor
    seen: float

    @staticmethod
    def open(x: Tensor, codec: Codec | None, layout: Layout) -> UpdateTable:
        """An empty one, whose vectors are kept through the codec."""
        rows = ClientTable({"weight": torch.zeros(1), "y": torch.zeros_like(x)}, codec, layout)
        return UpdateTable(rows, torch.zeros_like(x, dtype=torch.float64), 0.0)

    def begin_step(self) -> UpdateTableStep:
        """Begin a step."""
        return UpdateTableStep(self)

    def without(self, client: int) -> UpdateTable:
        """After a client has gone for good: its row and its share of the sum go with it."""
        row = self.rows.get([client])
        w, y = float(row["weight"]), row["y"][0].to(self.total.device).double()
        self.rows.drop(client)
        return UpdateTable(self.rows, self.total - w * y, self.seen - w)


class UpdateTableStep:
    """One step's swaps: y_i ← Q(v_i / rate_i) for the cohort's clients, and what that changes."""

    def __init__(self, table: UpdateTable) -> None:
        self.table = table
        self.sum_before = table.total.float()  # Σ w_j y_j as the step began
        self.weight = 0.0  # Σ p_i
        self._seen = table.seen
        self._stored_change = torch.zeros_like(
            table.total
        )  # Σ p_i y_i⁺ − w_i y_i; products of float32 fit exactly
        self._unstored = None if table.rows.codec is None else torch.zeros_like(table.total)
        table.rows.expect()

    def put(
        self, clients: NDArray[np.int64], v: Tensor, p: Tensor, age: Tensor, rate: Tensor | None = None
    ) -> None:
        """Put v_i / rate_i in the place of y_i, with weight p_i; `age` scales its part in `received_change`."""
        weights, w = p.squeeze(1).tolist(), self.table.rows.peek(clients, "weight")
        rates = [1.0] * len(weights) if rate is None else rate.squeeze(1).tolist()
        if not self._put_compiled(clients, v, weights, w, rates, current=bool((age == 1).all())):
            self._put_torch(clients, v if rate is None else v / rate.to(v), p, p * age)
        self.weight, self._seen = sum(weights, self.weight), sum(weights, self._seen) - sum(w)

    def _put_compiled(
        self, clients: NDArray[np.int64], v: Tensor, p: list[float], w: list[float], rate: list[float], current: bool
    ) -> bool:  # fmt: skip
        """The same as `_put_torch` in one pass, where rows are wide and weights and ages are as stored; whether it did."""
        rows = self.table.rows
        known = all(old in (0, new) for old, new in zip(w, p))  # 0 before the first participation
        wide = v.device.type == "cpu" and v.dtype == torch.float32 and v.shape[1] >= WIDE_ROW
        if not (known and current and wide) or rows.layout is None:
            return False
        swap = passes.table_swapper(rows.codec, rows.layout)
        return swap is not None and swap(rows, clients, self._stored_change, self._unstored, v, rate, p, w)

    def _put_torch(self, clients: NDArray[np.int64], g: Tensor, p: Tensor, aged: Tensor) -> None:
        rows = self.table.rows
        old = {k: v.to(g.device) for k, v in rows.get(clients).items()}
        y, w = old["y"], old["weight"]
        rows.put(clients, {"weight": p, "y": g})
        stored = g if rows.codec is None else rows.get(clients)["y"].to(g.device)
        add_weighted_(self._stored_change, (p, stored), (-w, y))
        # What of Σ s(τ_i) p_i (g_i − y_i) did not move it: nothing, where weights, ages and g_i are as stored.
        if self._unstored is None:
            self._unstored = torch.zeros_like(self._stored_change)
        terms = [(aged - p, g), ((w - aged).where(w > 0, 0.0), y)]
        add_weighted_(self._unstored, *terms, *([] if stored is g else [(p, g - stored)]))

    @property
    def received_change(self) -> Tensor:
        """Σ_S s(τ_i) p_i (v_i/rate_i − y_i), of what was received, not of what is stored of it."""
        return (
            self._stored_change if self._unstored is None else self._unstored + self._stored_change
        ).float()

    def close(self) -> UpdateTable:
        """The table after the step."""
        return UpdateTable(self.table.rows, self.table.total + self._stored_change, self._seen)
