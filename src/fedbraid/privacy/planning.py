"""What privacy will cost before anything runs: the noise that keeps a budget, ε by round, the rounds a budget buys."""

from __future__ import annotations

from dataclasses import dataclass

from fedbraid.core.check import integer, number
from fedbraid.errors import ConfigError, unknown
from fedbraid.privacy.mechanisms import Mechanism, accounted_at, affordable, epsilon_of, solved
from fedbraid.schedule import Schedule, buffered
from fedbraid.schedule import rounds as rounds_of

# How clients come to a step, by name: drawn one by one, so many of all, or as they are ready.
DRAWN = ("poisson", "fixed", "arrivals")
SHOWN = (1, 3, 10, 32, 100, 316, 1000, 3162, 10_000)


@dataclass(frozen=True)
class Privacy:
    """Steps with noise on the sum: its multiplier, the steps it is kept for, and ε after some of them."""

    noise: float
    delta: float
    rounds: int
    sampling: str
    epsilons: dict[int, float]

    @property
    def epsilon(self) -> float:
        return self.epsilons[self.rounds]


def foresee(
    clients: int, per_round: int, rounds: int, epsilon: float | None, noise: float | None, delta: float,
    sampling: str = "poisson",
) -> Privacy:  # fmt: skip
    """The noise for a budget, ε for a noise, or for both how many of the rounds the budget buys."""
    integer("rounds", rounds)
    number("delta", delta, "(0, 1)")
    for name, value in (("epsilon", epsilon), ("noise", noise)):
        if value is not None:
            number(name, value, "(0, inf)", "keeps no privacy")
    if sampling not in DRAWN:
        raise unknown("sampling", sampling, DRAWN)
    schedule: Schedule = (
        buffered(rounds, buffer=per_round) if sampling == "arrivals"
        else rounds_of(rounds, clients=per_round, sampling=sampling)
    )  # fmt: skip
    how, _ = Mechanism.of(schedule, clients)
    if noise is None:
        if epsilon is None:
            raise ConfigError("privacy needs --epsilon (a budget) or --noise (in clips); give one")
        noise, last = solved(how, epsilon, delta, rounds), rounds
    else:
        last = rounds if epsilon is None else affordable(how, noise, epsilon, delta, rounds)
    at = sorted({*(accounted_at(n) for n in SHOWN if accounted_at(n) < last), last})
    return Privacy(noise, delta, last, sampling, {n: epsilon_of(how, noise, delta, n) for n in at})
