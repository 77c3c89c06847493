"""What a private run spends, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedbraid.core.work import Work
from fedbraid.privacy.mechanisms import (
    OWN,
    Mechanism,
    accounted_at,
    affordable,
    epsilon_of,
    own_steps,
    solved,
)
from fedbraid.privacy.parts import HiddenExamples

Sizes = NDArray[np.int64]  # samples by client


class PrivacyAccountant(Protocol):
    """What a run spends, and whether it may go on."""

    def recall(self, cohorts: Iterable[Sequence[int]]) -> None:
        """Count what steps before a resume spent, by who came to each."""

    def charge(self, step: int, came: Sequence[int], sizes: Sizes) -> dict[str, float]:
        """For the record of a step, by samples of each client; nothing where there is no noise, and so no ε."""

    def can_afford(self, coming: Sequence[int], sizes: Sizes) -> bool:
        """Whether a step may be taken that these clients come to."""

    def is_exhausted(self, step: int) -> bool:
        """Whether the run ends after this step, whoever would come to the next."""


@dataclass(frozen=True)
class Budget:
    """ε by step, of noise on sums: exact at steps that grow geometrically and at the last, rounded up in between."""

    how: Mechanism
    z: float
    delta: float
    last: int  # the step after which the run ends

    def recall(self, cohorts: Iterable[Sequence[int]]) -> None:
        """Nothing to count: a step spends the same whoever comes."""

    def charge(self, step: int, came: Sequence[int], sizes: Sizes) -> dict[str, float]:
        if self.z == 0:
            return {}
        return {"epsilon": epsilon_of(self.how, self.z, self.delta, min(accounted_at(step), self.last))}

    def can_afford(self, coming: Sequence[int], sizes: Sizes) -> bool:
        return True

    def is_exhausted(self, step: int) -> bool:
        return step >= self.last


@dataclass
class OwnBudgets:
    """ε of every client by its own participations, of noise that it adds itself; records carry the largest."""

    z: float
    delta: float
    most: float  # participations that a budget allows
    cautious: bool  # whether nobody knows who comes next
    participations: Counter[int] = field(default_factory=Counter)
    largest: int = 0

    def recall(self, cohorts: Iterable[Sequence[int]]) -> None:
        for came in cohorts:
            self._count(came)

    def _count(self, came: Sequence[int]) -> None:
        self.participations.update(came)
        self.largest = max([self.largest, *(self.participations[c] for c in came)])

    def charge(self, step: int, came: Sequence[int], sizes: Sizes) -> dict[str, float]:
        self._count(came)
        if self.z == 0 or not self.largest:
            return {}
        return {"epsilon": epsilon_of(OWN, self.z, self.delta, self.largest)}

    def can_afford(self, coming: Sequence[int], sizes: Sizes) -> bool:
        return all(self.participations[c] + more <= self.most for c, more in Counter(coming).items())

    def is_exhausted(self, step: int) -> bool:
        return self.cautious and self.largest >= self.most


@dataclass
class ExampleBudgets:
    """ε of every client by its own local steps, whose batches it draws and noises itself; records carry the largest.

    A step spends as a Poisson-sampled Gaussian does, the more the larger a share of its samples a batch takes.
    """

    own: HiddenExamples
    work: Work
    z: float | None  # None: what keeps the budget of each client if it comes every time
    longest: int  # the most participations that anybody makes, or may make
    totals: Counter[int] | None = None  # participations in the whole run, where they are known
    participations: Counter[int] = field(default_factory=Counter)
    most: dict[int, int] = field(default_factory=dict)  # participations so far, by samples
    late: set[int] = field(default_factory=set)  # who came and is not among them yet
    out: bool = False  # whether somebody may not come again

    def recall(self, cohorts: Iterable[Sequence[int]]) -> None:
        for came in cohorts:
            self.participations.update(came)
        self.late.update(self.participations)

    def _count(self, came: Sequence[int], sizes: Sizes) -> None:
        self.participations.update(came)
        self.late.update(came)
        while self.late:
            c = self.late.pop()
            n, all_of_it = int(sizes[c]), self.longest if self.totals is None else self.totals[c]
            self.most[n] = max(self.most.get(n, 0), min(accounted_at(self.participations[c]), all_of_it))
            self.out |= self._limited and self.participations[c] >= self._allowed(n)

    def charge(self, step: int, came: Sequence[int], sizes: Sizes) -> dict[str, float]:
        self._count(came, sizes)
        if self.z == 0 or not self.most:
            return {}
        who = self.most if self.z is None else worst(self.most, self.work)
        return {"epsilon": max(self._epsilon(n, participations) for n, participations in who.items())}

    def _epsilon(self, n: int, participations: int) -> float:
        how, steps = own_steps(n, self.work)
        return epsilon_of(how, self._noise(n), self.own.delta, steps * participations)

    def _noise(self, n: int) -> float:
        return least(self.own, {n: self.longest}, self.work) if self.z is None else self.z

    @property
    def _limited(self) -> bool:
        return self.own.noise is not None and self.own.epsilon is not None

    def _allowed(self, n: int) -> int:
        """How often a client of so many samples may come."""
        how, steps = own_steps(n, self.work)
        assert self.own.epsilon is not None
        return (
            affordable(how, self._noise(n), self.own.epsilon, self.own.delta, steps * self.longest) // steps
        )

    def can_afford(self, coming: Sequence[int], sizes: Sizes) -> bool:
        after = self.participations + Counter(coming)
        return not self._limited or all(after[c] <= self._allowed(int(sizes[c])) for c in {*coming})

    def is_exhausted(self, step: int) -> bool:
        return self.totals is None and self.out  # nobody knows who comes next


def worst(most: Mapping[int, int], work: Work) -> dict[int, int]:
    """Those of (samples: participations) that no other exceeds both in how large a share a batch takes and in steps."""
    found: dict[int, int] = {}
    top = 0
    for n in sorted(most, key=lambda n: -own_steps(n, work)[0].rate):
        if (steps := own_steps(n, work)[1] * most[n]) > top:
            found[n], top = most[n], steps
    return found


def least(own: HiddenExamples, most: Mapping[int, int], work: Work) -> float:
    """The noise that keeps the budget of all clients, by samples and participations."""
    assert own.epsilon is not None
    z = 0.0
    for n, participations in worst(most, work).items():
        how, steps = own_steps(n, work)
        if not z or epsilon_of(how, z, own.delta, steps * participations) > own.epsilon:
            z = solved(how, own.epsilon, own.delta, steps * participations)
    return z
