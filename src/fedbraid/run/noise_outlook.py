"""A comparison of private noise with clients' updates, in one sentence before a run begins.

A clipped update has at most the norm C; over d weights, noise N(0, (zC)²) on the sum of n updates has the norm zC√d on
average, so that the mean of n has zC√d/n (clients that add it themselves: zC√(d/n)). Updates of several steps point
the same direction and noise does not: over T steps their ratio is √T times better. This is a rule of thumb: clipped
updates of different clients differ, and some tasks need less than others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fedbraid.core.algorithm import Algorithm
from fedbraid.errors import Diverged
from fedbraid.privacy.clipping import LocalNoise
from fedbraid.privacy.parts import Noised, hiding
from fedbraid.run.checkpoint import Record
from fedbraid.run.formatting import format_count

WEAK = 2.0  # times the updates over the whole run: digits learn half from here on (benchmarks/noise.py)
HOPELESS = 10.0  # and next to nothing from here on


@dataclass(frozen=True)
class Outlook:
    """Noise relative to updates, over a step and over a run."""

    noise: float  # standard deviation of a coordinate of the average
    update: float  # a coordinate of an update with the norm of the clip, root mean square
    steps: int
    cohort: float
    weights: int
    client_side: bool

    @property
    def of_run(self) -> float:
        """Noise in multiples of the updates, over all steps."""
        return self.noise / self.update / math.sqrt(self.steps)

    @property
    def is_weak(self) -> bool:
        return self.of_run > WEAK

    @property
    def enough(self) -> int:
        """The cohort at which this noise multiplier is no longer weak."""
        more = self.of_run / WEAK
        return math.ceil(self.cohort * (more**2 if self.client_side else more))

    def __str__(self) -> str:
        text = (
            f"privacy: noise of {self.noise:.2g} on each of {format_count(self.weights)} weights of the average, beside"
            f" {self.update:.2g} of a clipped update: {self.noise / self.update:.3g} × in a step, {self.of_run:.2g} × over"
            f" {self.steps:,} steps"
        )
        if not self.is_weak:
            return text
        hope = "which is hopeless" if self.of_run > HOPELESS else "which leaves little to learn from"
        return (
            f"{text}, {hope}; use cohorts of {self.enough:,} clients at this noise, a larger epsilon=, sampling='poisson',"
            " or fewer weights (LoRA, personal=)"
        )


def outlook(algorithm: Algorithm, steps: int, cohort: float, weights: int) -> Outlook | None:
    """The outlook of an algorithm that is attached to its run; None if it adds no noise to uploads."""
    gather, up = algorithm.gather, algorithm.up
    if isinstance(gather, Noised) and gather.z > 0:
        planned = gather.planned
        return Outlook(
            gather.z * gather.clip / planned, gather.clip / math.sqrt(weights), steps, planned, weights, False
        )
    if isinstance(up, LocalNoise) and up.z > 0:
        each = up.z * up.clip / math.sqrt(cohort)
        return Outlook(each, up.clip / math.sqrt(weights), steps, cohort, weights, True)
    return None


@contextmanager
def naming_noise(forecast: Outlook | None) -> Iterator[None]:
    """If a run diverges whose noise exceeds its updates, begin the error with that."""
    try:
        yield
    except Diverged as error:
        if forecast is None or forecast.of_run <= 1:
            raise
        raise Diverged(
            f"the noise that keeps this run private exceeds its updates ({forecast}), and then {error}"
        ) from error


def privacy_of(algorithm: Algorithm) -> Record | None:
    """δ, the unit and the place of the noise that ε is stated for; None unless the algorithm is private."""
    if (example_noise := hiding(algorithm.rule)) is not None:
        return {"delta": example_noise.delta, "unit": "example", "where": "client"}
    for source, where in ((algorithm.gather, "server"), (algorithm.up, "client")):
        if isinstance(source, Noised | LocalNoise):
            where = "distributed" if isinstance(source, Noised) and source.by_clients else where
            return {"delta": source.delta, "unit": "client", "where": where}
    return None


UNITS = {"client": "all data of a client", "example": "one example of a client"}


def promise(epsilon: float | None, privacy: Record | None) -> str | None:
    """(ε, δ) and the protected unit, for tables.

    >>> promise(7.9951, {"delta": 1e-5, "unit": "client", "where": "server"})
    'ε = 7.995, δ = 1e-05, for all data of a client'
    """
    if epsilon is None or privacy is None:
        return None
    return f"ε = {epsilon:.4g}, δ = {privacy['delta']:g}, for {UNITS[privacy['unit']]}"
