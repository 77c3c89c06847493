"""What a private run spends, step by step, as `dp-accounting` counts it (extra `privacy`)."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fedbraid.algorithms.private import Clipped, Noised
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.layout import Layout
from fedbraid.errors import ConfigError
from fedbraid.schedule import Buffered, Rounds, Schedule

log = logging.getLogger("fedbraid")

APART = 2**0.25  # steps at which ε is accounted exactly grow by this


@dataclass(frozen=True)
class Mechanism:
    """How a schedule draws clients: "poisson" with a rate, "fixed" so many of N, or "all", without amplification."""

    kind: str
    rate: float = 1.0
    N: int = 0
    cohort: int = 0

    @staticmethod
    def of(schedule: Schedule, N: int) -> tuple[Mechanism, float]:
        """(the mechanism, how many clients a step plans with)."""
        if isinstance(schedule, Buffered):
            return Mechanism("all"), float(schedule.buffer)
        if not isinstance(schedule, Rounds) or isinstance(schedule.clients, tuple):
            raise ConfigError("private accounts for cohorts that are drawn; use rounds(…, clients=a number)")
        if (schedule.over, schedule.timeout) != (1, None):
            raise ConfigError("private rounds count whom they draw, however slow; leave out over and timeout")
        if schedule.sampling == "poisson":
            rate = schedule.rate(N)
            return Mechanism("poisson", rate), rate * N
        if schedule.availability is not None:
            raise ConfigError(
                "an availability leaves some clients undrawn, which a fixed cohort's privacy does not count; use"
                " sampling='poisson'"
            )
        cohort = schedule.cohort(N)
        return Mechanism("fixed", N=N, cohort=cohort), float(cohort)

    def epsilon(self, z: float, delta: float, steps: int) -> float:
        """ε after so many steps with noise multiplier z."""
        dp = _library()
        if self.kind == "all":  # a client's uploads may be empty ones instead, in every step
            return float(dp.get_epsilon_gaussian(z / math.sqrt(steps), delta))
        if self.kind == "poisson":
            accountant = dp.pld.PLDAccountant()
            event = dp.PoissonSampledDpEvent(self.rate, dp.GaussianDpEvent(z))
        else:  # one client in another's place moves the sum by 2C
            accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
            event = dp.SampledWithoutReplacementDpEvent(self.N, self.cohort, dp.GaussianDpEvent(z / 2))
        return float(accountant.compose(dp.SelfComposedDpEvent(event, steps)).get_epsilon(delta))


@lru_cache(maxsize=4096)
def epsilon_of(how: Mechanism, z: float, delta: float, steps: int) -> float:
    """ε after so many steps, each asked for once."""
    return how.epsilon(z, delta, steps)


@dataclass(frozen=True)
class Budget:
    """ε by step: exact at steps that grow geometrically and at the last, rounded up in between."""

    how: Mechanism
    z: float
    delta: float
    last: int  # the step after which the run ends

    def ends(self, step: int) -> bool:
        return step >= self.last

    def spent(self, step: int) -> dict[str, float]:
        """For the record; nothing where there is no noise, and so no ε."""
        if self.z == 0:
            return {}
        at = 1
        while at < step:
            at = max(at + 1, math.floor(at * APART))
        return {"epsilon": epsilon_of(self.how, self.z, self.delta, min(at, self.last))}


def bound(algorithm: Algorithm, schedule: Schedule, N: int, seed: int) -> tuple[Algorithm, Budget | None]:
    """An algorithm with what its privacy needs to know of the run, and what it may cost; others as they are."""
    gather, up = algorithm.gather, algorithm.up
    if not isinstance(gather, Noised):
        if isinstance(up, Clipped):
            raise ConfigError("this algorithm clips but adds no noise; let private be the outermost call")
        return algorithm, None
    if not (isinstance(up, Clipped) and up.clip == gather.clip):
        raise ConfigError("this algorithm adds noise but does not clip; let private be the outermost call")
    if schedule.asynchronous and algorithm.stateful(Layout.from_shapes([("w", (2, 2))])):
        raise ConfigError(
            "a client may hand in twice within one step here, which privacy counts once, so that what it remembers would"
            " no longer be what the server counted; use rounds(…) with an algorithm whose clients remember something"
        )
    how, planned = Mechanism.of(schedule, N)
    if gather.delta >= 1 / N:
        log.warning(f"delta={gather.delta} is no less than 1/{N}, one client among all; use a smaller one")
    z, last = _afford(gather, how, schedule.steps)
    new = replace(gather, z=z, planned=planned, seed=seed, server=algorithm.server)
    return replace(algorithm, gather=new), Budget(how, z, gather.delta, last)


def _afford(gather: Noised, how: Mechanism, steps: int) -> tuple[float, int]:
    """(noise multiplier, how many steps it may be used for)."""
    z, epsilon, delta = gather.noise, gather.epsilon, gather.delta
    if z is None:
        assert epsilon is not None
        return solved(how, epsilon, delta, steps), steps
    if epsilon is None or epsilon_of(how, z, delta, steps) <= epsilon:
        return z, steps
    good, bad = 0, steps
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if epsilon_of(how, z, delta, middle) <= epsilon else (good, middle)
    if not good:
        raise ConfigError(
            f"noise={z} spends epsilon={epsilon_of(how, z, delta, 1):.3g} in one step, more than the budget of {epsilon};"
            " raise noise= or epsilon="
        )
    log.warning(f"epsilon={epsilon} buys {good} of {steps} steps at noise={z}; the run ends after them")
    return z, good


@lru_cache
def solved(how: Mechanism, epsilon: float, delta: float, steps: int) -> float:
    """The least noise multiplier, to a thousandth, that keeps the budget for so many steps."""
    low, high = 0.0, 1.0
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


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise ConfigError(
            f"privacy is accounted by dp-accounting, which is not there ({error}); pip install 'fedbraid[privacy]'"
        ) from error
    return dp_accounting
