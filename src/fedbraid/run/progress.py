"""A progress bar of a run: step, accuracy, bytes up and down, time left."""

from __future__ import annotations

import html
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

from fedbraid.algorithms.lora import how
from fedbraid.run.formatting import format_bytes, format_percent, format_seconds
from fedbraid.run.noise_outlook import outlook

if TYPE_CHECKING:
    from rich.console import Console

    from fedbraid.run.checkpoint import Record
    from fedbraid.run.result import Result
    from fedbraid.run.run import Run

_PROCESS = os.getpid()  # forked workers have another and draw nothing


class Screen(Protocol):
    """Where bars are drawn: a terminal or a notebook's cell."""

    every: float  # seconds between two drawings
    disabled: bool

    def add(self, title: str, total: int, done: int) -> int: ...

    def show(self, bar: int, done: int, facts: list[str], finished: bool = False) -> None:
        """Draw; `facts` are ordered from the most to the least important."""

    def say(self, text: str) -> None: ...

    def stop(self) -> None: ...


class Bar:
    """A callback for `simulate(callbacks=[...])`, which `progress=True` adds. Silent in pipes.

    Several runs may share one screen: give each a bar with the same one.
    """

    def __init__(self, title: str = "", screen: Screen | None = None, console: Console | None = None) -> None:
        self.title, self.shared = title, screen is not None
        self.screen = screen or display(console)
        self.bar = 0
        self.up = self.down = self.drawn = 0.0
        self.accuracy: float | None = None
        self.epsilon: float | None = None  # what a private run has spent
        self.custom: dict[str, float] = {}  # the task's custom metrics

    def start(self, run: Run) -> None:
        title = self.title or run.setup.algorithm.label.split("(")[0]
        if not (self.shared or self.screen.disabled):
            self._forecast(run)
        self.bar = self.screen.add(title, run.schedule.steps, run.state.t)
        self.custom = dict.fromkeys(run.setup.task.metrics, float("nan"))
        for record in run.folder.records() if run.folder is not None and run.state.t else ():
            self._add(record)  # steps before a resume

    def _forecast(self, run: Run) -> None:
        """Print how adapters are averaged, and how private noise compares with updates."""
        layout, algorithm = run.setup.task.layout, run.setup.algorithm
        if (adapters := how(layout, algorithm)) is not None:
            self.screen.say(f"LoRA: {adapters}")
        foreseen = outlook(algorithm, run.schedule.steps, run.setup.cohort, layout.size)
        if foreseen is not None and not foreseen.is_weak:  # weak ones are logged as warnings
            self.screen.say(str(foreseen))

    def step(self, record: Record, run: Run) -> None:
        self._add(record)
        now = time.monotonic()
        if now - self.drawn < self.screen.every and record["step"] < run.schedule.steps:
            return
        self.drawn = now
        self.screen.show(self.bar, record["step"], self._facts())

    def _add(self, record: Record) -> None:
        self.up += record["bytes_up"]
        self.down += record["bytes_down"]
        self.accuracy = record.get("accuracy", self.accuracy)
        self.epsilon = record.get("epsilon", self.epsilon)
        self.custom = {name: record.get(name, value) for name, value in self.custom.items()}

    def _facts(self) -> list[str]:
        facts = [format_percent(self.accuracy)]
        facts += [f"{name} {value:.3f}" for name, value in self.custom.items()]
        facts += [] if self.epsilon is None else [f"ε {self.epsilon:.2f}"]
        return [*facts, f"↑ {format_bytes(self.up)}", f"↓ {format_bytes(self.down)}"]

    def end(self, result: Result) -> None:
        self.screen.show(self.bar, result.state.t, self._facts(), finished=True)
        if not self.shared:
            self.screen.stop()

    def close(self) -> None:
        """Stop drawing, also after an error."""
        self.screen.stop()


class CellsBar:
    """One bar for all cells of a comparison: receives its events and counts server steps."""

    def __init__(self) -> None:
        self.screen = display()
        self.bar, self.drawn = 0, 0.0
        self.total = self.ended = 0
        self.steps: dict[str, int] = {}

    def __call__(self, event: Any) -> None:
        if event.kind == "begin":
            self.total = len(event.cells)
            for cell in event.cells:
                over = cell.is_done or cell.failure is not None
                self.ended += over
                self.steps[str(cell)] = cell.entry.schedule.steps * over
            steps = sum(cell.entry.schedule.steps for cell in event.cells)
            self.bar = self.screen.add("compare", steps, sum(self.steps.values()))
        elif event.cell is not None:
            over = event.kind == "done"
            self.ended += over
            self.steps[str(event.cell)] = event.cell.entry.schedule.steps if over else event.step
        elif time.monotonic() - self.drawn >= self.screen.every:
            self.drawn = time.monotonic()
            done = sum(self.steps.values())
            self.screen.show(self.bar, done, [f"{self.ended} of {self.total} runs"])

    def close(self) -> None:
        self.screen.stop()


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return getattr(shell, "kernel", None) is not None


def is_watched() -> bool:
    """Whether to draw a bar by default: in a terminal or a notebook, but not in pipes or worker processes."""
    return os.getpid() == _PROCESS and (in_notebook() or sys.stderr.isatty())


def display(console: Console | None = None) -> Screen:
    """A screen for bars, which draws when called and starts no thread."""
    return Cell() if console is None and in_notebook() else Terminal(console)


# Notebooks ------------------------------------------------------------------------------------------


class Cell:
    """Bars under a notebook's cell, one line each, removed when the run has ended."""

    every = 0.25
    disabled = False

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.bars: list[tuple[str, int, int, float]] = []  # title, total, done at the start, begun
        self.handle: Any = None

    def add(self, title: str, total: int, done: int) -> int:
        self.bars.append((title, total, done, time.monotonic()))
        self.lines.append("")
        self.show(len(self.bars) - 1, done, [])
        return len(self.bars) - 1

    def show(self, bar: int, done: int, facts: list[str], finished: bool = False) -> None:
        title, total, first, begun = self.bars[bar]
        elapsed = time.monotonic() - begun
        left = elapsed * (total - done) / (done - first) if done > first else None
        clock = (
            f"took {format_seconds(elapsed)}"
            if finished
            else ""
            if left is None
            else f"{format_seconds(left)} left"
        )
        text = html.escape("  ".join([title, f"{done}/{total}", *facts, clock]))
        self.lines[bar] = f"<div><progress value='{done}' max='{total}'></progress> <code>{text}</code></div>"
        self._draw("".join(self.lines))

    def say(self, text: str) -> None:
        self.lines.append(f"<div>{html.escape(text)}</div>")
        self.bars.append(("", 0, 0, 0.0))

    def stop(self) -> None:
        if self.handle is not None:
            self._draw("")

    def _draw(self, text: str) -> None:
        from IPython import display as ipython

        page: Any = ipython

        if self.handle is None:
            self.handle = page.display(page.HTML(text), display_id=True)
        else:
            self.handle.update(page.HTML(text))


# Terminals ------------------------------------------------------------------------------------------

BARS = (24, 10)  # widths of the bar; the widest that fits is used
TITLE = 8  # to which a long title may be cut


class Terminal:
    """Bars on stderr, one line each however narrow the terminal; none if stderr is not a terminal."""

    every = 0.1

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self.console = console or Console(stderr=True)
        self.disabled = not self.console.is_terminal
        self.progress = Progress(
            _line(self), console=self.console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False,
            disable=self.disabled,
        )  # fmt: skip

    def add(self, title: str, total: int, done: int) -> int:
        bar = self.progress.add_task(title, total=total, completed=done, facts=[])
        self.progress.start()
        self.console.show_cursor(True)  # the terminal stays usable however the run ends
        return bar

    def show(self, bar: int, done: int, facts: list[str], finished: bool = False) -> None:
        from rich.progress import TaskID

        self.progress.update(TaskID(bar), completed=done, facts=facts)
        self.progress.refresh()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def stop(self) -> None:
        for task in self.progress.tasks:
            if not task.finished:
                self.progress.stop_task(task.id)  # an interrupted run has no time left
        self.progress.stop()


def _line(screen: Terminal) -> Any:
    """A column of complete lines, which drops facts that do not fit: bytes first, never the count or the time."""
    from rich.progress import ProgressColumn
    from rich.text import Text

    class Line(ProgressColumn):
        def render(self, task: Any) -> Text:
            titles = max(12, *(len(t.description) for t in screen.progress.tasks))
            title = f"{task.description:<{titles}}"
            count = f"{task.completed}/{task.total}".rjust(2 * len(str(task.total)) + 1)
            clock = _clock(task)
            task_facts = task.fields["facts"]
            for facts in (task_facts[:n] for n in range(len(task_facts), min(1, len(task_facts)) - 1, -1)):
                for wide in BARS:
                    line = _assembled(title, wide, task, [count, *facts, clock])
                    if line.cell_len <= screen.console.width:
                        return line
            rest = [count, *task_facts[:1], clock]
            width = screen.console.width - len("  ".join(filter(None, rest))) - 1
            return _assembled(_cut(title.strip(), max(TITLE, width)), 0, task, rest)

    def _assembled(title: str, wide: int, task: Any, rest: list[str]) -> Text:
        done = round(wide * task.completed / task.total) if task.total else wide
        style = "bar.finished" if task.finished else "bar.complete"
        bar: list[Any] = [("━" * done, style), ("━" * (wide - done), "bar.back"), " "] if wide else []
        return Text.assemble(title, " ", *bar, "  ".join(filter(None, rest)), no_wrap=True)

    return Line()


def _clock(task: Any) -> str:
    """Time left while it runs, elapsed time when it has finished, nothing if it was stopped."""
    if task.finished:
        return f"took {format_seconds(task.finished_time or 0.0)}"
    left = None if task.stop_time is not None else task.time_remaining
    return "" if left is None else f"{format_seconds(left)} left"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
