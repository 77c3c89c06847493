"""Who takes part: nodes come and go under Flower's ids, clients keep their number and what they have uploaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbraid.errors import WireError

MOST_SAMPLES = 10**9  # a node that claims more is not believed
NAME = "a name has 1 to 200 characters that can be printed"  # it goes to the operator's terminal, and into lines of logs


def is_name(text: str) -> bool:
    """Whether a node may be called this."""
    return 0 < len(text) <= 200 and text.isprintable()


@dataclass
class Member:
    """One client."""

    name: str
    client: int
    samples: int
    taken: str = "none"  # the last job whose upload was committed
    accepted: str = "none"  # the last job whose upload is in a step that may not be committed yet
    held: int = -1  # the version of the hidden state that it holds
    key: str = ""  # the fingerprint of the key that first had the name
    gone: bool = False  # for good
    node: int | None = None  # where it is now


@dataclass
class Roster:
    """All clients that were ever met, by number."""

    members: dict[int, Member] = field(default_factory=dict)
    by_key: bool = True  # a name belongs to the key that had it first
    any_samples: bool = False  # clients may come back with other data

    def welcome(self, node: int, about: dict[str, Any], online: Mapping[int, str]) -> Member:
        """Enter a node that introduced itself; it may be an old acquaintance under a new id."""
        name, samples, claim = about["name"], about["samples"], about["client"]
        if not 0 < samples <= MOST_SAMPLES or not is_name(name):
            raise WireError(f"it claims {samples} samples under the name {name[:200]!r}; {NAME}")
        known = self.named(name)
        if known is not None and known.gone:
            raise WireError(f"it calls itself {name!r}, which has left for good; join under another name")
        if known is None:
            client = claim if claim >= 0 else self._free()
            if client in self.members or client > len(self.members) + 10**6:
                raise WireError(f"it claims to be client {client}, which {self._whose(client)}")
            known = self.members[client] = Member(name, client, samples)
        self._recognise(known, node, samples, online)
        known.node, known.samples, known.held = node, samples, about["held"]
        known.key = known.key or online[node]
        return known

    def _recognise(self, known: Member, node: int, samples: int, online: Mapping[int, str]) -> None:
        """Refuse whoever has another's name, or other data than it said at first."""
        if known.node is not None and known.node != node and known.node in online:
            raise WireError(
                f"it calls itself {known.name!r}, but node {known.node} does so too and is connected"
            )
        if self.by_key and known.key and known.key != online[node]:
            raise WireError(
                f"it calls itself {known.name!r}, which belongs to the key {known.key[:16]}, not to its own,"
                f" {online[node][:16]}; where nodes have no keys of their own, set identity='name'"
            )
        if samples != known.samples and not self.any_samples:
            raise WireError(
                f"it claims {samples} samples, {known.samples} at first; where data may change, set samples='free'"
            )

    def named(self, name: str) -> Member | None:
        return next((m for m in self.members.values() if m.name == name), None)

    @property
    def count(self) -> int:
        """How many clients are known and have not left."""
        return sum(not m.gone for m in self.members.values())

    def _free(self) -> int:
        return next(i for i in range(len(self.members) + 1) if i not in self.members)

    def _whose(self, client: int) -> str:
        return f"is {self.members[client].name!r}" if client in self.members else "is far beyond all others"

    @property
    def nodes(self) -> set[int]:
        """Where they are, or were last."""
        return {m.node for m in self.members.values() if m.node is not None}

    def at(self, online: Iterable[int]) -> dict[int, Member]:
        """Members by the node they are at, for the nodes that are connected."""
        here = set(online)
        return {
            m.node: m for m in self.members.values() if m.node in here and m.node is not None and not m.gone
        }

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Samples by client number, 0 for numbers that nobody has."""
        sizes = np.zeros(max(self.members, default=-1) + 1, np.int64)
        for m in self.members.values():
            sizes[m.client] = m.samples
        return sizes

    def note(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps."""
        keep = ("name", "client", "samples", "taken", "key", "gone")
        return [{k: v for k, v in asdict(m).items() if k in keep} for m in self.members.values()]

    @classmethod
    def restore(cls, note: list[dict[str, Any]], by_key: bool = True, any_samples: bool = False) -> Roster:
        members = {m["client"]: Member(**m, accepted=m["taken"]) for m in note}
        return cls(members, by_key, any_samples)
