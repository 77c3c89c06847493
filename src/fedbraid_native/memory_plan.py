"""Where buffers lie in a workspace: two whose lifetimes do not overlap may share their room."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Buffer:
    """Room in the workspace: how many vectors, and from when to when it is in use."""

    size: int
    live_from: int
    live_until: int
    offset: int = -1


def plan_memory(buffers: list[Buffer]) -> int:
    """Give each buffer the first place that nothing alive at the same time overlaps; the total."""
    placed: list[Buffer] = []
    for b in sorted(buffers, key=lambda b: -b.size):
        at = 0
        for other in sorted(placed, key=lambda o: o.offset):
            apart = (
                other.live_until < b.live_from
                or b.live_until < other.live_from
                or other.offset + other.size <= at
            )
            if not apart and at + b.size > other.offset:
                at = other.offset + other.size
        b.offset = at
        placed.append(b)
    return max((b.offset + b.size for b in buffers), default=0)
