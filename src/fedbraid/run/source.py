"""Where a run's server steps come from: simulated clients, or a fleet of real nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedbraid.core.context import Vectors
from fedbraid.engines.engine import Reply, Setup
from fedbraid.run.state import State
from fedbraid.schedule import Schedule, Tick
from fedbraid.schedule.selection import ClientHistory

Record = dict[str, Any]


@dataclass(frozen=True)
class StepNotes:
    """What a source adds once its step is taken."""

    record: Record = field(default_factory=dict)  # more fields of the step's record
    metadata: Record = field(
        default_factory=dict
    )  # committed with the state; `run.metadata` of a run that goes on


def no_notes(record: Record) -> StepNotes:
    """A source that adds nothing."""
    return StepNotes()


@dataclass(frozen=True)
class ServerStep:
    """One server step to be taken: when it closed, its replies, and who is told that it was taken.

    `replies` is read once, in blocks, no client twice in one block; simulated clients train while it is read.
    `on_taken` gets the record of the step, before the callbacks and the commit.
    """

    tick: Tick
    replies: Iterator[Reply]
    on_taken: Callable[[Record], StepNotes] = no_notes


class RunView(Protocol):
    """What a source may ask of its run, and how it reports that a client leaves."""

    setup: Setup
    schedule: Schedule
    state: State  # after the last step that was taken
    metadata: Record  # committed with it
    seen: ClientHistory | None  # of clients, where the schedule selects by it

    def broadcast_first(self) -> None:
        """Make the first version, as far as it tells of all clients: these are known now, and none has trained yet."""

    def message_bytes(self) -> tuple[float, float]:
        """(down, up): the bytes of one participation, for schedules that charge transfer time."""

    def dismiss(self, client: int, contribution: Vectors | None) -> None:
        """Let a client leave for good before the next step; None where it could not be asked for its contribution."""


class StepSource(Protocol):
    """Where a run's steps come from."""

    is_live: bool  # whether clients are real, so that broadcasts are really encoded

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Samples by client number, 0 for numbers without a client."""

    def steps(self, run: RunView) -> Iterator[ServerStep]:
        """Each next step of a run, asked for when the one before it is committed."""

    def describe(self) -> str:
        """The source as text, for run.json."""
