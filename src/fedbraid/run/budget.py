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
from fedbraid.algorithms.secure import SecureMean, check_run
from fedbraid.core.algorithm import Algorithm
from fedbraid.core.layout import Layout
from fedbraid.core.work import Work, batch_sizes, step_counts
from fedbraid.errors import ConfigError, MissingExtra
from fedbraid.links.private import Clipped, LocalNoise, PrivateUplink
from fedbraid.links.secure import SkellamNoise
from fedbraid.schedule import Buffered, Rounds, Schedule

log = logging.getLogger("fedbraid")

Sizes = NDArray[np.int64]  # samples by client

TAILS = 12  # deviations of noise that a secure sum has room for
APART = 2**0.25  # steps at which ε is accounted exactly grow by this


@dataclass(frozen=True)
class Mechanism:
    """What is noised how often.

    Cohorts are drawn "poisson" with a rate, or "fixed", so many of N; "all" is without amplification, and "own" the
    participations of one client that noises for itself. Noise in whole numbers is "skellam", with the clip as its
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

    def epsilon(self, z: float, delta: float, steps: int) -> float:
        """ε after so many steps with noise multiplier z."""
        dp = _library()
        if self.kind == "skellam":  # Δ₂ = grain, Δ₁ ≤ Δ₂² of whole numbers, variance (z·grain)²
            return float(
                dp.rdp.compute_epsilon(ORDERS, [steps * self.skellam(z, a) for a in ORDERS], delta)[0]
            )
        if self.kind == "all" or (self.kind, self.rate) == (
            "poisson",
            1,
        ):  # one may send nothing, in every step
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

    def skellam(self, z: float, order: int) -> float:
        """Rényi divergence of one step (Agarwal et al. 2021, corollary 3.1)."""
        coarse = (2 * order + 5) / (4 * z**4 * self.grain**2)
        return order / (2 * z**2) + min(coarse, 1.5 / z**2)


OWN = Mechanism("own")
ORDERS = [*range(2, 65), 80, 96, 128, 192, 256, 512, 1024]


@lru_cache(maxsize=4096)
def epsilon_of(how: Mechanism, z: float, delta: float, steps: int) -> float:
    """ε after so many steps, each asked for once."""
    return how.epsilon(z, delta, steps)


# Budgets --------------------------------------------------------------------------------------------


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


def accounted_at(step: int) -> int:
    """The step at which ε is accounted for this one: the next of those that grow geometrically."""
    at = 1
    while at < step:
        at = max(at + 1, math.floor(at * APART))
    return at


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


def own_steps(n: int, work: Work) -> tuple[Mechanism, int]:
    """(what each local step of a client of n samples is, how many there are in a visit)."""
    one = np.array([n], np.int64)
    return Mechanism("poisson", float(batch_sizes(one, work)[0] / n)), int(step_counts(one, work)[0])


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


# Binding --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrivacySetup:
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

    def participations(self) -> int:
        """The most times that any client comes, or may come where nobody knows."""
        if self.seed is None:
            return self.schedule.steps * (self.schedule.buffer if isinstance(self.schedule, Buffered) else 1)
        return max(self.counted().values(), default=1)

    def counted(self) -> Counter[int]:
        """How often each client comes in the whole run, which a seed tells."""
        assert self.seed is not None
        ticks = self.schedule.ticks(self.clients, self.seed)
        return Counter(c for tick in ticks for c in tick.clients.tolist())


def attach_privacy(
    algorithm: Algorithm, crowd: PrivacySetup
) -> tuple[Algorithm, tuple[PrivacyAccountant, ...]]:
    """An algorithm with what its privacy needs to know of the run, and what it may cost; others as they are."""
    gather, up = algorithm.gather, algorithm.up
    check_run(algorithm, crowd.schedule, crowd.clients, crowd.even(), crowd.seed is None)
    if crowd.schedule.asynchronous and algorithm.rule.traits().decays_client_state:
        raise ConfigError(
            "memory that fades by steps is of rounds, where all know which step it is; leave out fade= with this schedule"
        )
    if (own := hiding(algorithm.rule)) is not None:
        _library()  # a missing extra is said before anything trains
        return _bound_examples(algorithm, own, crowd)
    if not isinstance(gather, Noised) and not isinstance(up, LocalNoise):
        if isinstance(up, PrivateUplink):
            raise ConfigError("this algorithm clips but adds no noise; let private be the outermost call")
        return algorithm, ()
    _check(algorithm, crowd)
    _library()
    if isinstance(up, LocalNoise):
        return _bound_own(algorithm, up, crowd)
    assert isinstance(gather, Noised)
    how, planned = Mechanism.of(crowd.schedule, crowd.clients, crowd.seed is None)
    if isinstance(up, SkellamNoise):
        if how.kind != "fixed":
            raise ConfigError(
                "where='distributed' counts on the noise of every client that was planned; use rounds of a fixed cohort"
            )
        how = Mechanism("skellam", grain=up.grain)
    z, last = _afford(gather.noise, gather.epsilon, gather.delta, how, crowd.schedule.steps)
    if last < crowd.schedule.steps:
        log.warning(
            f"epsilon={gather.epsilon} buys {last} of {crowd.schedule.steps} steps at noise={z}; the run ends after them"
        )
    share = algorithm.up.quantized(np.arange(crowd.clients)) / max(crowd.clients, 1)
    new = replace(gather, z=z, planned=planned, share=share, seed=crowd.seed, server=algorithm.server)
    if gather.adaptive and not 2 * new.z_below > z:
        raise ConfigError(
            f"clip='adaptive' counts norms with a noise of {new.z_below:.3g} for {planned:g} clients, too little beside"
            f" noise={z:.3g}; use cohorts of at least {math.floor(10 * z) + 1} clients, less noise, or clip=a number"
        )
    if isinstance(up, SkellamNoise):
        assert isinstance(new.sums, SecureMean)
        (grid,) = up.codec.grids()
        if (reach := TAILS * z * up.grain / math.sqrt(planned) + grid.top) > 2**23:
            raise ConfigError(
                f"a client's share of the noise reaches {reach:.3g} steps of the grid, more than float32 holds; use fewer bits or a"
                " larger range under secure"
            )
        new = replace(new, sums=replace(new.sums, noise=math.ceil(TAILS * z * up.grain / grid.top)))
        up = replace(up, z=z, planned=planned)
    return replace(algorithm, gather=new, up=up), (Budget(how, z, gather.delta, last),)


def _bound_own(
    algorithm: Algorithm, up: LocalNoise, crowd: PrivacySetup
) -> tuple[Algorithm, tuple[PrivacyAccountant, ...]]:
    z, most = _afford(
        up.noise, up.epsilon, up.delta, OWN, 1 if up.epsilon is None else crowd.participations()
    )
    new = replace(algorithm, up=replace(up, z=z))
    return new, (OwnBudgets(z, up.delta, math.inf if up.epsilon is None else most, crowd.seed is None),)


def _bound_examples(
    algorithm: Algorithm, own: HiddenExamples, crowd: PrivacySetup
) -> tuple[Algorithm, tuple[PrivacyAccountant, ...]]:
    """Noise for the worst client of a simulation; real ones, unless it was given, each solve for their own."""
    work = crowd.work
    if (work.replace, work.last, work.shuffle) != (False, "keep", True):
        raise ConfigError(
            "unit='example' takes every example with probability batch/n, in no order; leave out replace=, last= and shuffle="
        )
    sizes = np.zeros(0, np.int64) if crowd.sizes is None else crowd.sizes
    totals = None if crowd.seed is None else crowd.counted()
    longest = crowd.participations() if totals is None else max(totals.values(), default=1)
    most: dict[int, int] = {}
    for c, n in enumerate(sizes.tolist()):
        most[n] = max(most.get(n, 0), longest if totals is None else totals[c])
    _check_examples(own, dict.fromkeys(most, 1), work)
    z = least(own, most, work) if own.noise is None and most else own.noise
    budget = ExampleBudgets(own, work, z, longest, totals)
    return replace(algorithm, rule=with_noise(algorithm.rule, math.nan if z is None else z)), (budget,)


def _check_examples(own: HiddenExamples, once: Mapping[int, int], work: Work) -> None:
    """Refuse a budget that a first visit would exceed; warn of a δ that one example among all exceeds."""
    if own.delta >= 1 / max(once, default=1):
        log.warning(
            f"delta={own.delta} is no less than 1/{max(once, default=1)}, one example among a client's; use a smaller one"
        )
    if own.noise is None or own.epsilon is None:
        return
    for n in worst(once, work):
        how, steps = own_steps(n, work)
        if (spends := epsilon_of(how, own.noise, own.delta, steps)) > own.epsilon:
            raise ConfigError(
                f"noise={own.noise} spends epsilon={spends:.3g} in one participation of a client with {n} samples, more than the"
                f" budget of {own.epsilon}; raise noise= or epsilon="
            )


def _check(algorithm: Algorithm, crowd: PrivacySetup) -> None:
    """Refuse what this run could not keep private."""
    gather, up = algorithm.gather, algorithm.up
    if isinstance(gather, Noised) and not (isinstance(up, Clipped) and up.clip == gather.clip):
        raise ConfigError("this algorithm adds noise but does not clip; let private be the outermost call")
    noised = gather if isinstance(gather, Noised) else up
    assert isinstance(noised, Noised | LocalNoise)
    if noised.delta >= 1 / max(crowd.clients, 1):
        log.warning(
            f"delta={noised.delta} is no less than 1/{crowd.clients}, one client among all; use a smaller one"
        )
    late = crowd.schedule.asynchronous
    if late and algorithm.stateful(Layout.from_shapes([("w", (2, 2))])):
        raise ConfigError(
            "a client may upload twice in one step here, which privacy counts once, so that what it remembers would"
            " no longer be what the server counted; use rounds(…) with an algorithm whose clients remember something"
        )
    if not isinstance(gather, Noised) or gather.later:
        return
    if late and not of_mean(algorithm.server, gather.uploads, with_sent=False):
        raise ConfigError(
            "the server accounts for uploads by what each sender was sent, and here they were sent different versions, which"
            " noise on a sum does not tell apart; use rounds(…) with this algorithm"
        )
    if algorithm.server.traits().requires_sgd and not crowd.even():
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


HOLLOW = (
    100.0  # an ε that promises nothing; accountants take minutes, and gigabytes, to tell it from larger ones
)


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


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise MissingExtra("the account of privacy", "privacy") from error
    return dp_accounting
