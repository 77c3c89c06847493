"""A private algorithm learns of its run: its noise is solved for the budget, and what no noise would hide is refused."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbraid.core.algorithm import Algorithm
from fedbraid.core.layout import Layout
from fedbraid.core.work import Work, step_counts
from fedbraid.errors import ConfigError
from fedbraid.privacy.accountant import Account, PrivacyAccountant, example_account, least_noise
from fedbraid.privacy.clipping import Clipped, LocalNoise, PrivateUplink, SkellamNoise
from fedbraid.privacy.mechanisms import (
    LOCAL,
    Mechanism,
    affordable,
    epsilon_of,
    hardest,
    local_steps,
    require_accounting,
    solved,
)
from fedbraid.privacy.parts import HiddenExamples, Noised, hiding, of_mean, with_noise
from fedbraid.schedule import Buffered, Schedule

log = logging.getLogger("fedbraid")

TAILS = 12  # deviations of noise that a secure sum has room for


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


def attach_privacy(algorithm: Algorithm, crowd: PrivacySetup) -> tuple[Algorithm, PrivacyAccountant | None]:
    """An algorithm with what its privacy needs to know of the run, and what it may cost; others as they are."""
    gather, up = algorithm.gather, algorithm.up
    if crowd.schedule.asynchronous and algorithm.rule.traits().decays_client_state:
        raise ConfigError(
            "memory that fades by steps is of rounds, where all know which step it is; leave out fade= with this schedule"
        )
    if (own := hiding(algorithm.rule)) is not None:
        require_accounting()  # a missing extra is said before anything trains
        return _bound_examples(algorithm, own, crowd)
    if not isinstance(gather, Noised) and not isinstance(up, LocalNoise):
        if isinstance(up, PrivateUplink):
            raise ConfigError("this algorithm clips but adds no noise; let private be the outermost call")
        return algorithm, None
    _check(algorithm, crowd)
    require_accounting()
    if isinstance(up, LocalNoise):
        return _bound_local(algorithm, up, crowd)
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
        sums: Any = new.sums  # a SecureMean: noise is distributed over secure sums only
        (grid,) = up.codec.grids()
        if (reach := TAILS * z * up.grain / math.sqrt(planned) + grid.top) > 2**23:
            raise ConfigError(
                f"a client's share of the noise reaches {reach:.3g} steps of the grid, more than float32 holds; use fewer bits or a"
                " larger range under secure"
            )
        new = replace(new, sums=replace(sums, noise=math.ceil(TAILS * z * up.grain / grid.top)))
        up = replace(up, z=z, planned=planned)
    return replace(algorithm, gather=new, up=up), PrivacyAccountant(
        "run", gather.delta, lambda n: Account(how, z, limit=last), lambda payer: last, is_open=True
    )


def _bound_local(
    algorithm: Algorithm, up: LocalNoise, crowd: PrivacySetup
) -> tuple[Algorithm, PrivacyAccountant | None]:
    steps = 1 if up.epsilon is None else crowd.participations()
    z, most = _afford(up.noise, up.epsilon, up.delta, LOCAL, steps)
    account = Account(LOCAL, z, limit=math.inf if up.epsilon is None else most)
    accountant = PrivacyAccountant("client", up.delta, lambda n: account, is_open=crowd.seed is None)
    return replace(algorithm, up=replace(up, z=z)), accountant


def _bound_examples(
    algorithm: Algorithm, own: HiddenExamples, crowd: PrivacySetup
) -> tuple[Algorithm, PrivacyAccountant | None]:
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
    _check_examples(own, most, work)
    z = least_noise(own, most, work) if own.noise is None and most else own.noise
    planned = (lambda client: longest) if totals is None else totals.__getitem__
    accountant = PrivacyAccountant(
        "example", own.delta, example_account(own, work, z, longest), planned, is_open=totals is None
    )
    return replace(algorithm, rule=with_noise(algorithm.rule, math.nan if z is None else z)), accountant


def _check_examples(own: HiddenExamples, once: Collection[int], work: Work) -> None:
    """Refuse a budget that a first participation would exceed; warn of a δ that one example among all exceeds."""
    if own.delta >= 1 / max(once, default=1):
        log.warning(
            f"delta={own.delta} is no less than 1/{max(once, default=1)}, one example among a client's; use a smaller one"
        )
    if own.noise is None or own.epsilon is None:
        return
    spent = {n: local_steps(n, work) for n in once}
    for n in hardest(spent):
        how, steps = spent[n]
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
