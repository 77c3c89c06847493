"""What is noised how often, and what that spends: ε, δ and noise, by `dp-accounting` (extra `privacy`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from fedbraid.core.work import Work, batch_sizes, step_counts
from fedbraid.errors import ConfigError, MissingExtra
from fedbraid.schedule import Buffered, Rounds, Schedule

K = TypeVar("K")

SPACING = 2**0.25  # steps at which ε is accounted exactly grow by this

HOLLOW = (
    100.0  # an ε that promises nothing; accountants take minutes, and gigabytes, to tell it from larger ones
)


@dataclass(frozen=True)
class Mechanism:
    """What is noised how often.

    Cohorts are drawn "poisson" with a rate, or "fixed", so many of N; "all" is without amplification, and "local" the
    participations of one client that noises its uploads. Noise in whole numbers is "skellam", with the clip as its
    `grain`, and without amplification.
    """

    kind: str
    rate: float = 1.0
    N: int = 0
    cohort: int = 0
    grain: float = 1.0

    @staticmethod
    def of(schedule: Schedule, N: int, real: bool = False) -> tuple[Mechanism, float]:
        """(the mechanism, how many clients a step plans with).

        Of `real` clients those take part that happen to be there, which is no draw that would amplify anything.
        """
        if isinstance(schedule, Buffered):
            return Mechanism("all"), float(schedule.buffer)
        if real and isinstance(schedule, Rounds) and not isinstance(schedule.clients, tuple):
            return Mechanism("all"), float(schedule.cohort(N))
        if not isinstance(schedule, Rounds) or isinstance(schedule.clients, tuple):
            raise ConfigError("private accounts for cohorts that are drawn; use rounds(…, clients=a number)")
        if (schedule.over_select, schedule.timeout) != (1, None):
            raise ConfigError("private rounds count whom they draw, however slow; leave out over and timeout")
        if schedule.sampling == "poisson":
            rate = schedule.rate(N)
            return Mechanism("poisson", rate), rate * N
        if schedule.select is not None:
            raise ConfigError(
                "select= looks at clients' losses, which privacy would have to pay for; leave it out of private runs"
            )
        if schedule.availability is not None:
            raise ConfigError(
                "an availability leaves some clients undrawn, which a fixed cohort's privacy does not count; use"
                " sampling='poisson'"
            )
        cohort = schedule.cohort(N)
        return Mechanism("fixed", N=N, cohort=cohort), float(cohort)

    @property
    def is_cheap(self) -> bool:
        """Whether ε is a formula of the participations of one client."""
        return self.kind == "local"

    def epsilon(self, z: float, delta: float, steps: int) -> float:
        """ε after so many steps with noise multiplier z."""
        dp = require_accounting()
        if self.kind == "skellam":  # Δ₂ = grain, Δ₁ ≤ Δ₂² of whole numbers, variance (z·grain)²
            return float(
                dp.rdp.compute_epsilon(ORDERS, [steps * self.skellam(z, a) for a in ORDERS], delta)[0]
            )
        if self.kind == "all" or (self.kind, self.rate) == (
            "poisson",
            1,
        ):  # one may send nothing, in every step
            return float(dp.get_epsilon_gaussian(z / math.sqrt(steps), delta))
        if self.kind == "local":  # and here any others, which are up to 2C away
            return float(dp.get_epsilon_gaussian(z / 2 / math.sqrt(steps), delta))
        if self.kind == "poisson":
            accountant = dp.pld.PLDAccountant()
            event = dp.PoissonSampledDpEvent(self.rate, dp.GaussianDpEvent(z))
        else:  # one client in another's place moves the sum by 2C
            accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
            event = dp.SampledWithoutReplacementDpEvent(self.N, self.cohort, dp.GaussianDpEvent(z / 2))
        return float(accountant.compose(dp.SelfComposedDpEvent(event, steps)).get_epsilon(delta))

    def skellam(self, z: float, order: int) -> float:
        """Rényi divergence of one step (Agarwal et al. 2021, corollary 3.1)."""
        coarse = (2 * order + 5) / (4 * z**4 * self.grain**2)
        return order / (2 * z**2) + min(coarse, 1.5 / z**2)


LOCAL = Mechanism("local")

ORDERS = [*range(2, 65), 80, 96, 128, 192, 256, 512, 1024]


@lru_cache(maxsize=4096)
def epsilon_of(how: Mechanism, z: float, delta: float, steps: int) -> float:
    """ε after so many steps, each asked for once."""
    return how.epsilon(z, delta, steps)


def accounted_at(step: int) -> int:
    """The step at which ε is accounted for this one: the next of those that grow geometrically."""
    at = 1
    while at < step:
        at = max(at + 1, math.floor(at * SPACING))
    return at


def affordable(how: Mechanism, z: float, epsilon: float, delta: float, steps: int) -> int:
    """How many steps, of so many, a budget buys at this noise."""
    if epsilon_of(how, z, delta, steps) <= epsilon:
        return steps
    good, bad = 0, steps
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if epsilon_of(how, z, delta, middle) <= epsilon else (good, middle)
    if not good:
        raise ConfigError(
            f"noise={z} spends epsilon={epsilon_of(how, z, delta, 1):.3g} in one step, more than the budget of {epsilon};"
            " raise noise= or epsilon="
        )
    return good


@lru_cache
def solved(how: Mechanism, epsilon: float, delta: float, steps: int) -> float:
    """The least noise multiplier, to a thousandth, that keeps the budget, or HOLLOW, for so many steps."""
    low, high, epsilon = 0.0, 1.0, min(epsilon, HOLLOW)
    while epsilon_of(how, high, delta, steps) > epsilon:
        low, high = high, 2 * high
        if high > 2**20:
            raise ConfigError(
                f"no noise keeps epsilon={epsilon} at delta={delta} for {steps} steps; raise one of them"
            )
    while high - low > 1e-3 * high:
        z = (low + high) / 2
        low, high = (z, high) if epsilon_of(how, z, delta, steps) > epsilon else (low, z)
    return high


def local_steps(n: int, work: Work) -> tuple[Mechanism, int]:
    """(what each local step of a client of n samples is, how many there are in a participation)."""
    one = np.array([n], np.int64)
    return Mechanism("poisson", float(batch_sizes(one, work)[0] / n)), int(step_counts(one, work)[0])


def hardest(spent: Mapping[K, tuple[Mechanism, int]]) -> list[K]:
    """The keys of (mechanism, steps) that no other exceeds in both rate and steps."""
    found, top = [], 0
    for key, (_, steps) in sorted(spent.items(), key=lambda item: -item[1][0].rate):
        if steps > top:
            found.append(key)
            top = steps
    return found


def require_accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise MissingExtra("the account of privacy", "privacy") from error
    return dp_accounting
