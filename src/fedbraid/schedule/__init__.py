"""Who comes when: ticks of the server, and clocks of the clients."""

from fedbraid.schedule.selection import oort, power_of_choice
from fedbraid.schedule.ticks import Buffered, Ints, Rounds, Schedule, Tick, buffered, immediate, rounds

__all__ = [
    "Buffered", "Ints", "Rounds", "Schedule", "Tick", "buffered", "immediate", "oort", "power_of_choice", "rounds",
]  # fmt: skip
