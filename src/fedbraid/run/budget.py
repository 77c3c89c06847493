"""What a private run spends, step by step, as `dp-accounting` counts it (extra `privacy`)."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedbraid.algorithms.private import HiddenExamples, Noised, hiding, of_mean, with_noise
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.layout import Layout
from fedbraid.core.work import Work
from fedbraid.data.batches import batch_sizes, step_counts
from fedbraid.errors import ConfigError
from fedbraid.links.private import Around, Clipped, OwnNoise
from fedbraid.schedule import Buffered, Rounds, Schedule

log = logging.getLogger("fedbraid")

APART = 2**0.25  # steps at which ε is accounted exactly grow by this


@dataclass(frozen=True)
class Mechanism:
    """What is noised how often.

    Cohorts are drawn "poisson" with a rate, or "fixed", so many of N; "all" is without amplification, and "own" the
    visits of one client that noises for itself.
    """

    kind: str
    rate: float = 1.0
    N: int = 0
    cohort: int = 0

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
        if (schedule.over, schedule.timeout) != (1, None):
            raise ConfigError("private rounds count whom they draw, however slow; leave out over and timeout")
        if schedule.sampling == "poisson":
            rate = schedule.rate(N)
            return Mechanism("poisson", rate), rate * N
        if schedule.choose is not None:
            raise ConfigError(
                "choose= looks at clients' losses, which privacy would have to pay for; leave it out of private runs"
            )
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
        if self.kind == "own":  # and here any others, which are up to 2C away
            return float(dp.get_epsilon_gaussian(z / 2 / math.sqrt(steps), delta))
        if self.kind == "poisson":
            accountant = dp.pld.PLDAccountant()
            event = dp.PoissonSampledDpEvent(self.rate, dp.GaussianDpEvent(z))
        else:  # one client in another's place moves the sum by 2C
            accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
            event = dp.SampledWithoutReplacementDpEvent(self.N, self.cohort, dp.GaussianDpEvent(z / 2))
        return float(accountant.compose(dp.SelfComposedDpEvent(event, steps)).get_epsilon(delta))


OWN = Mechanism("own")


@lru_cache(maxsize=4096)
def epsilon_of(how: Mechanism, z: float, delta: float, steps: int) -> float:
    """ε after so many steps, each asked for once."""
    return how.epsilon(z, delta, steps)


# Budgets --------------------------------------------------------------------------------------------


class Spending(Protocol):
    """What a run spends, and whether it may go on."""

    def recall(self, cohorts: Iterable[Sequence[int]]) -> None:
        """Count what steps before a resume spent, by who came to each."""

    def spent(self, step: int, came: Sequence[int]) -> dict[str, float]:
        """For the record of a step; nothing where there is no noise, and so no ε."""

    def affords(self, coming: Sequence[int]) -> bool:
        """Whether a step may be taken that these clients come to."""

    def ends(self, step: int) -> bool:
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

    def spent(self, step: int, came: Sequence[int]) -> dict[str, float]:
        if self.z == 0:
            return {}
        return {"epsilon": epsilon_of(self.how, self.z, self.delta, min(accounted_at(step), self.last))}

    def affords(self, coming: Sequence[int]) -> bool:
        return True

    def ends(self, step: int) -> bool:
        return step >= self.last


def accounted_at(step: int) -> int:
    """The step at which ε is accounted for this one: the next of those that grow geometrically."""
    at = 1
    while at < step:
        at = max(at + 1, math.floor(at * APART))
    return at


@dataclass
class OwnBudgets:
    """ε of every client by its own visits, of noise that it adds itself; records carry the largest."""

    z: float
    delta: float
    most: float  # visits that a budget allows
    cautious: bool  # whether nobody knows who comes next
    visits: Counter[int] = field(default_factory=Counter)
    largest: int = 0

    def recall(self, cohorts: Iterable[Sequence[int]]) -> None:
        for came in cohorts:
            self._count(came)

    def _count(self, came: Sequence[int]) -> None:
        self.visits.update(came)
        self.largest = max([self.largest, *(self.visits[c] for c in came)])

    def spent(self, step: int, came: Sequence[int]) -> dict[str, float]:
        self._count(came)
        if self.z == 0 or not self.largest:
            return {}
        return {"epsilon": epsilon_of(OWN, self.z, self.delta, self.largest)}

    def affords(self, coming: Sequence[int]) -> bool:
        return all(self.visits[c] + more <= self.most for c, more in Counter(coming).items())

    def ends(self, step: int) -> bool:
        return self.cautious and self.largest >= self.most


@dataclass
class ExampleBudgets:
    """ε of every client by its own local steps, whose batches it draws and noises itself; records carry the largest.

    A client's steps each spend as a Poisson-sampled Gaussian, and the more the larger a share of its samples a batch takes.
    """

    z: float
    delta: float
    rates: NDArray[np.float64]  # by client: the share of its samples that a batch takes
    steps: NDArray[np.int64]  # by client, of one visit
    epsilon: float | None = None  # a budget
    totals: Counter[int] | None = None  # visits in the whole run, where they are known
    visits: Counter[int] = field(default_factory=Counter)
    most: dict[float, int] = field(default_factory=dict)  # steps so far, by rate

    def recall(self, cohorts: Iterable[Sequence[int]]) -> None:
        for came in cohorts:
            self._count(came)

    def _count(self, came: Sequence[int]) -> None:
        self.visits.update(came)
        for c in came:
            rate, taken = float(self.rates[c]), self._taken(c)
            self.most[rate] = max(self.most.get(rate, 0), taken)

    def _taken(self, c: int) -> int:
        """Steps of a client, rounded up to where ε is accounted; at the end exact."""
        taken = accounted_at(int(self.steps[c]) * self.visits[c])
        return taken if self.totals is None else min(taken, int(self.steps[c]) * self.totals[c])

    def spent(self, step: int, came: Sequence[int]) -> dict[str, float]:
        self._count(came)
        if self.z == 0 or not self.most:
            return {}
        return {"epsilon": max(epsilon_of(how, self.z, self.delta, n) for how, n in worst(self.most))}

    def affords(self, coming: Sequence[int]) -> bool:
        if self.epsilon is None or self.totals is None:
            return True
        after = self.visits + Counter(coming)
        return all(int(self.steps[c]) * after[c] <= self._allowed(c, self.epsilon) for c in {*coming})

    def _allowed(self, c: int, epsilon: float) -> int:
        assert self.totals is not None
        how, n = Mechanism("poisson", float(self.rates[c])), int(self.steps[c]) * max(1, self.totals[c])
        return affordable(how, self.z, epsilon, self.delta, n)

    def ends(self, step: int) -> bool:
        return False


def worst(most: Mapping[float, int]) -> list[tuple[Mechanism, int]]:
    """Those of (rate: steps) that no other one exceeds in both, of which one spends most."""
    found: list[tuple[Mechanism, int]] = []
    for rate in sorted(most, reverse=True):
        if not found or most[rate] > found[-1][1]:
            found.append((Mechanism("poisson", rate), most[rate]))
    return found


# Binding --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crowd:
    """What privacy asks of a run: its schedule, its clients and their work; no seed where clients are real."""

    schedule: Schedule
    clients: int
    work: Work
    sizes: NDArray[np.int64] | None = None  # samples by client, where they are known
    seed: int | None = None

    def even(self) -> bool:
        """Whether everybody is known to take the same number of steps."""
        if self.sizes is None:
            return self.work.steps is not None
        return len(np.unique(step_counts(self.sizes, self.work))) == 1

    def visits(self) -> int:
        """The most times that any client comes, or may come where nobody knows."""
        if self.seed is None:
            return self.schedule.steps * (self.schedule.buffer if isinstance(self.schedule, Buffered) else 1)
        return max(self.counted().values(), default=1)

    def counted(self) -> Counter[int]:
        """How often each client comes in the whole run, which a seed tells."""
        assert self.seed is not None
        ticks = self.schedule.ticks(self.clients, self.seed)
        return Counter(c for tick in ticks for c in tick.clients.tolist())


def bound(algorithm: Algorithm, crowd: Crowd) -> tuple[Algorithm, tuple[Spending, ...]]:
    """An algorithm with what its privacy needs to know of the run, and what it may cost; others as they are."""
    gather, up = algorithm.gather, algorithm.up
    if (own := hiding(algorithm.rule)) is not None:
        return _bound_examples(algorithm, own, crowd)
    if not isinstance(gather, Noised) and not isinstance(up, OwnNoise):
        if isinstance(up, Around):
            raise ConfigError("this algorithm clips but adds no noise; let private be the outermost call")
        return algorithm, ()
    _check(algorithm, crowd)
    if isinstance(up, OwnNoise):
        return _bound_own(algorithm, up, crowd)
    assert isinstance(gather, Noised)
    how, planned = Mechanism.of(crowd.schedule, crowd.clients, crowd.seed is None)
    z, last = _afford(gather.noise, gather.epsilon, gather.delta, how, crowd.schedule.steps)
    if last < crowd.schedule.steps:
        log.warning(
            f"epsilon={gather.epsilon} buys {last} of {crowd.schedule.steps} steps at noise={z}; the run ends after them"
        )
    new = replace(gather, z=z, planned=planned, seed=crowd.seed, server=algorithm.server)
    if gather.adaptive and not 2 * new.z_below > z:
        raise ConfigError(
            f"clip='adaptive' counts norms with a noise of {new.z_below:.3g} for {planned:g} clients, too little beside"
            f" noise={z:.3g}; use cohorts of at least {math.floor(10 * z) + 1} clients, less noise, or clip=a number"
        )
    return replace(algorithm, gather=new), (Budget(how, z, gather.delta, last),)


def _bound_own(algorithm: Algorithm, up: OwnNoise, crowd: Crowd) -> tuple[Algorithm, tuple[Spending, ...]]:
    z, most = _afford(up.noise, up.epsilon, up.delta, OWN, 1 if up.epsilon is None else crowd.visits())
    new = replace(algorithm, up=replace(up, z=z))
    return new, (OwnBudgets(z, up.delta, math.inf if up.epsilon is None else most, crowd.seed is None),)


def _bound_examples(
    algorithm: Algorithm, own: HiddenExamples, crowd: Crowd
) -> tuple[Algorithm, tuple[Spending, ...]]:
    work = crowd.work
    if (work.replace, work.last, work.shuffle) != (False, "keep", True):
        raise ConfigError(
            "unit='example' takes every example with probability batch/n, in no order; leave out replace=, last= and shuffle="
        )
    if crowd.sizes is None:
        raise ConfigError(
            "unit='example' is accounted by how many samples each client holds, which nobody knows here; use it in"
            " simulations"
        )
    if own.delta >= 1 / crowd.sizes.max(initial=1):
        log.warning(
            f"delta={own.delta} is no less than 1/{crowd.sizes.max()}, one example among a client's; use a smaller one"
        )
    rates, steps = batch_sizes(crowd.sizes, work) / crowd.sizes, step_counts(crowd.sizes, work)
    totals = crowd.counted()
    most: dict[float, int] = {}
    for c, visits in totals.items():
        most[float(rates[c])] = max(most.get(float(rates[c]), 0), int(steps[c]) * visits)
    z = own.noise if own.noise is not None else _least(own, worst(most))
    if own.noise is not None and own.epsilon is not None:
        for how, n in worst(most):
            affordable(how, z, own.epsilon, own.delta, n)  # at least one step
    budget = ExampleBudgets(z, own.delta, rates, steps, None if own.noise is None else own.epsilon, totals)
    return replace(algorithm, rule=with_noise(algorithm.rule, z)), (budget,)


def _least(own: HiddenExamples, kinds: list[tuple[Mechanism, int]]) -> float:
    """The noise that keeps everybody's budget."""
    assert own.epsilon is not None
    z = 0.0
    for how, n in kinds:
        if not z or epsilon_of(how, z, own.delta, n) > own.epsilon:
            z = solved(how, own.epsilon, own.delta, n)
    return z


def _check(algorithm: Algorithm, crowd: Crowd) -> None:
    """Refuse what this run could not keep private."""
    gather, up = algorithm.gather, algorithm.up
    if isinstance(gather, Noised) and not (isinstance(up, Clipped) and up.clip == gather.clip):
        raise ConfigError("this algorithm adds noise but does not clip; let private be the outermost call")
    noised = gather if isinstance(gather, Noised) else up
    assert isinstance(noised, Noised | OwnNoise)
    if noised.delta >= 1 / max(crowd.clients, 1):
        log.warning(
            f"delta={noised.delta} is no less than 1/{crowd.clients}, one client among all; use a smaller one"
        )
    late = crowd.schedule.asynchronous
    if late and algorithm.stateful(Layout.from_shapes([("w", (2, 2))])):
        raise ConfigError(
            "a client may hand in twice within one step here, which privacy counts once, so that what it remembers would"
            " no longer be what the server counted; use rounds(…) with an algorithm whose clients remember something"
        )
    if not isinstance(gather, Noised) or gather.later:
        return
    if late and not of_mean(algorithm.server, gather.uploads, with_sent=False):
        raise ConfigError(
            "the server accounts for uploads by what each sender was sent, and here they were sent different versions, which"
            " noise on a sum does not tell apart; use rounds(…) with this algorithm"
        )
    if algorithm.server.plain_steps() and not crowd.even():
        raise ConfigError(
            "the server reads how many steps its clients take, which differ here with their samples and would tell of them;"
            " use Work(steps=…)"
        )


def _afford(
    z: float | None, epsilon: float | None, delta: float, how: Mechanism, steps: int
) -> tuple[float, int]:
    """(noise multiplier, how many steps it may be used for)."""
    if z is None:
        assert epsilon is not None
        return solved(how, epsilon, delta, steps), steps
    return z, steps if epsilon is None else affordable(how, z, epsilon, delta, steps)


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
