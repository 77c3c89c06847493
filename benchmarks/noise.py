"""How much noise a private run stands: digits under noise on the sum, by the noise's size beside the updates'.

    python benchmarks/noise.py [--rounds 25 100] [--cohorts 10 50] [--clips 0.3 1.0]

Each line is one run: noise in multiples of the clipped updates over the whole run, as `fedbraid run` says it before
training, and the accuracy in the end. ε is not computed.
"""

from __future__ import annotations

import argparse
import logging
import math

import fedbraid as fb
from fedbraid.errors import Diverged
from fedbraid.privacy import accountant

MULTIPLES = (0.25, 1.0, 2.0, 3.0, 10.0, 30.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, nargs="+", default=[25, 100])
    parser.add_argument("--cohorts", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--clips", type=float, nargs="+", default=[0.3, 1.0])
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    accountant.epsilon_of = lambda *_: math.nan  # the accountants would take most of the time
    task = fb.tasks.load("digits", clients=100)
    print("clip  cohort  rounds  noise  multiple  accuracy")
    for clip in asked.clips:
        for cohort in asked.cohorts:
            for rounds in asked.rounds:
                for multiple in MULTIPLES:
                    z = multiple * cohort * math.sqrt(rounds / task.layout.size)
                    print(
                        f"{clip:4}  {cohort:6}  {rounds:6}  {z:5.3g}  {multiple:8}  {_accuracy(task, clip, cohort, rounds, z)}",
                        flush=True,
                    )


def _accuracy(task: fb.Task, clip: float, cohort: int, rounds: int, z: float) -> str:
    schedule = fb.rounds(rounds, clients=cohort, sampling="poisson")
    private = fb.private(fb.fedavg(), clip=clip, noise=z)
    try:
        result = fb.simulate(
            task, private, fb.Work(lr=0.05, batch=5, momentum=0.9), schedule, evaluate_every=rounds
        )
    except Diverged:
        return "diverged"
    return f"{result.last('accuracy'):.1%}"


if __name__ == "__main__":
    main()
