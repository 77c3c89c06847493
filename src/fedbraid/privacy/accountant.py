"""What a private run spends, step by step, and whether it may go on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedbraid.core.work import Work
from fedbraid.privacy.mechanisms import (
    Mechanism,
    accounted_at,
    affordable,
    epsilon_of,
    hardest,
    local_steps,
    solved,
)
from fedbraid.privacy.parts import HiddenExamples

Unit = Literal["run", "client", "example"]


@dataclass(frozen=True)
class Account:
    """What one participation spends, and how many are allowed."""

    how: Mechanism
    z: float  # noise multiplier
    steps: int = 1  # compositions in a participation
    limit: float = math.inf


@dataclass
class PrivacyAccountant:
    """ε of a run so far: the largest of all accounts, for the records of its steps.

    With unit="run" a sum is noised, and every server step spends the same. With "client" each client noises what it
    uploads and spends by its participations. With "example" it spends by its local steps, whose batches it draws and
    noises, the more the larger a share of its samples a batch takes. `account` is that of a client by its samples,
    `planned` how often it takes part in the whole run, as far as that is known. Where ε takes an accountant long it is
    exact after numbers of participations that grow geometrically, and rounded up in between.

    >>> accountant = PrivacyAccountant("client", 1e-5, lambda n: Account(Mechanism("local"), 4.0, limit=2))
    >>> sizes = np.full(9, 10)  # samples by client
    >>> accountant.charge([3, 5], sizes), accountant.can_afford([3, 3], sizes)
    ({'epsilon': 1.993...}, False)
    """

    unit: Unit
    delta: float
    account: Callable[[int], Account]
    planned: Callable[[int], float] = lambda client: math.inf
    is_open: bool = (
        False  # nobody knows who participates next, so that the run ends where one account is spent
    )
    participations: Counter[int] = field(default_factory=Counter)
    most: dict[int, int] = field(default_factory=dict)  # participations so far, by samples
    pending: set[int] = field(default_factory=set)  # clients that are not among them yet
    is_spent: bool = False  # whether an account has reached its limit

    def recall(self, cohorts: Iterable[Sequence[int]]) -> None:
        """Count what the steps before a resume spent, by their cohorts."""
        for cohort in cohorts:
            self.participations.update(self._payers(cohort))
        self.pending.update(self.participations)

    def charge(self, cohort: Sequence[int], sizes: NDArray[np.int64]) -> dict[str, float]:
        """The record of a step of these clients, given all clients' samples; empty without noise."""
        self.participations.update(payers := self._payers(cohort))
        self.pending.update(payers)
        while self.pending:
            payer = self.pending.pop()
            n, count = self._samples(payer, sizes), self.participations[payer]
            account = self.account(n)
            at = min(count if account.how.is_cheap else accounted_at(count), self.planned(payer))
            self.most[n] = max(self.most.get(n, 0), int(at))
            self.is_spent |= count >= account.limit
        accounts = {n: self.account(n) for n in self.most}
        if not accounts or any(a.z == 0 for a in accounts.values()):
            return {}
        spent = {n: (a.how, a.steps * self.most[n]) for n, a in accounts.items()}
        if len({a.z for a in accounts.values()}) == 1:
            spent = {n: spent[n] for n in hardest(spent)}
        return {
            "epsilon": max(epsilon_of(how, accounts[n].z, self.delta, k) for n, (how, k) in spent.items())
        }

    def can_afford(self, cohort: Sequence[int], sizes: NDArray[np.int64]) -> bool:
        """Whether a step may be taken that these clients participate in."""
        after = Counter(self._payers(cohort))
        return all(
            self.participations[p] + more <= self.account(self._samples(p, sizes)).limit
            for p, more in after.items()
        )

    @property
    def is_exhausted(self) -> bool:
        """Whether the run ends here, whoever would participate in the next step."""
        return self.is_open and self.is_spent

    def _payers(self, cohort: Sequence[int]) -> Sequence[int]:
        return (0,) if self.unit == "run" else cohort

    def _samples(self, payer: int, sizes: NDArray[np.int64]) -> int:
        return int(sizes[payer]) if self.unit == "example" else 0


def example_account(
    rule: HiddenExamples, work: Work, z: float | None, longest: int
) -> Callable[[int], Account]:
    """The account of a client by its samples; without z, its noise keeps the budget over `longest` participations."""

    @cache
    def account(n: int) -> Account:
        how, steps = local_steps(n, work)
        noise = least_noise(rule, {n: longest}, work) if z is None else z
        if rule.noise is None or rule.epsilon is None:
            return Account(how, noise, steps)
        return Account(
            how, noise, steps, affordable(how, noise, rule.epsilon, rule.delta, steps * longest) // steps
        )

    return account


def least_noise(rule: HiddenExamples, participations: Mapping[int, int], work: Work) -> float:
    """The noise that keeps the budget of all clients, whose participations are given by samples."""
    assert rule.epsilon is not None
    z = 0.0
    spent = {
        n: (how, steps * participations[n]) for n in participations for how, steps in [local_steps(n, work)]
    }
    for n in hardest(spent):
        how, steps = spent[n]
        if not z or epsilon_of(how, z, rule.delta, steps) > rule.epsilon:
            z = solved(how, rule.epsilon, rule.delta, steps)
    return z
