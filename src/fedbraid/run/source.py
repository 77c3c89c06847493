"""Step sources: simulated clients, or a fleet of real nodes."""

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
    """What a source adds after its step."""

    record: Record = field(default_factory=dict)  # further fields of the step's record
    metadata: Record = field(
        default_factory=dict
    )  # committed with the state; `run.metadata` of a run that goes on


def no_notes(record: Record) -> StepNotes:
    """A source that adds nothing."""
    return StepNotes()


@dataclass(frozen=True)
class ServerStep:
    """One closed server step: its tick, its replies, and a function that is called after it.

    `replies` is read once, in blocks, no client twice in one block; simulated clients train while it is read.
    `on_step` gets the record of the step, before the callbacks and the commit.
    """

    tick: Tick
    replies: Iterator[Reply]
    on_step: Callable[[Record], StepNotes] = no_notes


class RunView(Protocol):
    """The part of a run that a source uses: its state, and the report that a client leaves."""

    setup: Setup
    schedule: Schedule
    state: State  # after the last step
    metadata: Record  # committed with it
    client_history: ClientHistory | None  # if the schedule selects clients by it

    def broadcast_first(self) -> None:
        """Make the first version, as far as it tells of all clients: these are known now, and none has trained yet."""

    def message_bytes(self) -> tuple[float, float]:
        """(down, up): the bytes of one participation, for schedules that charge transfer time."""

    def dismiss(self, client: int, contribution: Vectors | None) -> None:
        """Let a client leave for good before the next step; None if it could not be reached for its contribution."""


class StepSource(Protocol):
    """The source of a run's steps."""

    is_live: bool  # whether clients are real, so that broadcasts are encoded

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Samples by client number, 0 for numbers without a client."""

    def steps(self, run: RunView) -> Iterator[ServerStep]:
        """The steps of a run; each is requested after the previous one is committed."""

    def describe(self) -> str:
        """The source as text, for run.json."""
