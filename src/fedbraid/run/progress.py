"""A bar that shows how a run is doing: step, accuracy, bytes up and down, time left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fedbraid.algorithms.lora import how
from fedbraid.run.formatting import format_bytes, format_seconds, format_share
from fedbraid.run.noise_outlook import outlook

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from fedbraid.run.checkpoint import Record
    from fedbraid.run.simulate import Result, Run


class Bar:
    """A callback for `simulate(callbacks=[...])`; `progress=True` adds one. Silent when not a terminal.

    Several runs may share one display: give each a bar with the same `progress`.
    """

    EVERY = 0.1  # seconds between two drawings

    def __init__(
        self, title: str = "", progress: Progress | None = None, console: Console | None = None
    ) -> None:
        self.title, self.shared = title, progress is not None
        self.progress = progress if progress is not None else display(console)
        self.task: Any = None
        self.up = self.down = self.drawn = 0.0
        self.accuracy: float | None = None
        self.epsilon: float | None = None  # what a private run has spent
        self.own: dict[str, float] = {}  # the task's own metrics

    def start(self, run: Run) -> None:
        title = self.title or (run.setup.algorithm.name or "run").split("(")[0]
        self.task = self.progress.add_task(title, total=run.schedule.steps, completed=run.state.t, facts="")
        adapters = how(run.setup.task.layout, run.setup.algorithm)
        if adapters is not None and not (self.shared or self.progress.disable):
            self.progress.console.print(f"LoRA: {adapters}", highlight=False)
        foreseen = outlook(
            run.setup.algorithm, run.schedule.steps, run.setup.cohort, run.setup.task.layout.size
        )
        if foreseen is not None and not (foreseen.is_weak or self.shared or self.progress.disable):
            self.progress.console.print(str(foreseen), highlight=False)  # weak ones are warned of
        self.own = dict.fromkeys(run.setup.task.metrics, float("nan"))
        self._remember(run)
        if not self.shared:
            self.progress.start()
            self.progress.console.show_cursor(True)  # whatever ends the run, the terminal stays usable

    def _remember(self, run: Run) -> None:
        """What steps before a resume came to."""
        for record in run.folder.records() if run.folder is not None and run.state.t else ():
            self._add(record)

    def step(self, record: Record, run: Run) -> None:
        self._add(record)
        now = time.monotonic()
        if now - self.drawn < self.EVERY and record["step"] < run.schedule.steps:
            return
        self.drawn = now
        self.progress.update(self.task, completed=record["step"], facts=self._facts())
        self.progress.refresh()

    def _add(self, record: Record) -> None:
        self.up += record["bytes_up"]
        self.down += record["bytes_down"]
        self.accuracy = record.get("accuracy", self.accuracy)
        self.epsilon = record.get("epsilon", self.epsilon)
        self.own = {name: record.get(name, value) for name, value in self.own.items()}

    def _facts(self) -> str:
        own = "".join(f"  {name} {value:.3f}" for name, value in self.own.items())
        own += "" if self.epsilon is None else f"  ε {self.epsilon:.2f}"
        return f"{format_share(self.accuracy)}{own}  ↑ {format_bytes(self.up)}  ↓ {format_bytes(self.down)}"

    def end(self, result: Result) -> None:
        self.progress.update(self.task, completed=result.state.t, facts=self._facts())
        self.progress.refresh()
        if not self.shared:
            self.progress.stop()

    def close(self) -> None:
        """Stop drawing, also when a run did not come to its end."""
        self.progress.stop()


def display(console: Console | None = None) -> Progress:
    """The columns of a bar; it draws when told to and starts no thread."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = console or Console(stderr=True)
    return Progress(
        TextColumn("{task.description:<12}"), BarColumn(24), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"),
        _time_left(), console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False,
        disable=not console.is_terminal,
    )  # fmt: skip


def _time_left() -> Any:
    from rich.progress import ProgressColumn
    from rich.text import Text

    class TimeLeft(ProgressColumn):
        """Time left while it runs, time taken when it is done."""

        def render(self, task: Any) -> Text:
            if task.finished:
                return Text(f"took {format_seconds(task.finished_time or 0.0)}")
            left = task.time_remaining
            return Text("" if left is None else f"{format_seconds(left)} left")

    return TimeLeft()
