"""When the server steps, and the clocks of its clients."""

from fedbraid.schedule.policies import Ints, Tick
from fedbraid.schedule.schedules import Buffered, Rounds, Schedule, buffered, immediate, rounds
from fedbraid.schedule.selection import oort, power_of_choice

__all__ = [
    "Buffered", "Ints", "Rounds", "Schedule", "Tick", "buffered", "immediate", "oort", "power_of_choice", "rounds",
]  # fmt: skip
