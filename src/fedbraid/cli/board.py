"""The progress of a campaign, drawn on stderr while it runs; silent unless that is a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedbraid.run.formatting import format_percent, format_seconds

if TYPE_CHECKING:
    from fedbraid.study.campaign import Event

DRAW_EVERY_S = 0.2


class Board:
    """A line with the progress and the time left, and a line for each running cell."""

    def __init__(self, what: str, total: float = 0, metric: str = "accuracy") -> None:
        from rich.console import Console
        from rich.live import Live

        screen = Console(stderr=True)
        self.live = Live(console=screen, auto_refresh=False, transient=True) if screen.is_terminal else None
        self.what, self.total, self.metric = what, total, metric
        self.ended, self.begun, self.drawn = 0.0, time.monotonic(), 0.0
        self.running: dict[str, tuple[int, float | None]] = {}
        if self.live is not None:
            self.live.start()

    def __call__(self, event: Event[Any]) -> None:
        if event.kind == "tick":
            return self.draw()
        if event.kind == "step":
            self.running[str(event.cell)] = (event.step, event.value)
        if event.kind == "done":
            self.running.pop(str(event.cell), None)
            self.ended += 1
        self.see(event)

    def see(self, event: Event[Any]) -> None:
        """Update what a subclass displays."""

    def draw(self) -> None:
        if self.live is not None and time.monotonic() - self.drawn >= DRAW_EVERY_S:
            self.drawn = time.monotonic()
            self.live.update(self.picture(), refresh=True)

    def picture(self) -> Any:
        lines = [
            f"{cell}, step {step}{self.value_text(value, ', ')}"
            for cell, (step, value) in self.running.items()
        ]
        return "\n".join([self.title(), *lines])

    def title(self) -> str:
        return (
            f"{self.ended:g} of {self.total:g} {self.what} done{self.left(self.ended / max(1, self.total))}"
        )

    def left(self, fraction: float) -> str:
        """The time left when this fraction is done."""
        if not fraction:
            return ""
        elapsed = time.monotonic() - self.begun
        return f", about {format_seconds(elapsed * max(0.0, 1 - fraction) / fraction)} left"

    def value_text(self, value: float | None, before: str = "") -> str:
        if value is None:
            return ""
        return before + (format_percent(value) if self.metric.startswith("accuracy") else f"{value:.3f}")

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()


class CellBoard(Board):
    """A table of a comparison: a line an entry."""

    def __init__(self, metric: str = "accuracy") -> None:
        super().__init__("cells", metric=metric)
        self.cells: Sequence[Any] = ()
        self.ready: set[str] = set()
        self.steps: dict[str, int] = {}

    def see(self, event: Event[Any]) -> None:
        if event.kind == "begin":
            self.cells = event.cells
            self.ready = {str(c) for c in self.cells if c.is_done or c.failure is not None}
            self.already, self.total = self.ready.copy(), len(self.cells)
            self.ended = len(self.ready)
        elif event.cell is not None:
            key = str(event.cell)
            self.steps[key] = event.cell.entry.schedule.steps if event.kind == "done" else event.step
            self.ready |= {key} if event.kind == "done" else set()

    def picture(self) -> Any:
        from rich import box
        from rich.table import Table

        todo = sum(c.entry.schedule.steps for c in self.cells if str(c) not in self.already)
        fraction = sum(self.steps.values()) / todo if todo else 0.0
        title = f"{self.ended:g} of {self.total:g} cells done{self.left(fraction)}"
        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
        grid.add_column("", no_wrap=True, overflow="ellipsis", min_width=8)
        for name in ("seeds", "step", "now"):
            grid.add_column(name, justify="right", no_wrap=True)
        for name in dict.fromkeys(c.entry.name for c in self.cells):
            keys = [str(c) for c in self.cells if c.entry.name == name]
            going = [self.running[k] for k in keys if k in self.running]
            grid.add_row(
                name,
                f"{sum(k in self.ready for k in keys)}/{len(keys)}",
                ", ".join(str(step) for step, _ in going),
                ", ".join(self.value_text(value) for _, value in going),
            )
        return grid
