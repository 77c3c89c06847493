"""One machine, very many clients: start-up, time per client and memory as the population and the cohort grow.

    python benchmarks/scale.py [--clients 1000 1000000] [--cohort 100 10000] [--rounds 5]
    python benchmarks/scale.py --clients 1000000 --cohort 10 --rounds 100000

Each row is a process of its own: FedAvg on logistic regression with two samples of 20 numbers a client. "start-up" is
from the beginning of `simulate` to the end of the first round, with the library already compiled; a client's time is that
of the later rounds, wall clock and processor, and "later half" is what it takes in the later half of the rounds over what
it takes in the earlier one. What a round adds to memory is its record in `result.history`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1_000, 1_000_000])
    parser.add_argument("--cohort", type=int, nargs="+", default=[100, 10_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", action="store_true", help="measure in this process and print JSON")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.clients[0], asked.cohort[0], asked.rounds)))
        return
    measure(1000, 1, 2)  # compiles
    print(
        "| clients | cohort | start-up | a client, wall | a client, processor | later half | memory | a round adds |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for clients in asked.clients:
        for cohort in asked.cohort:
            if cohort > clients:
                continue
            command = [sys.executable, __file__, "--one", "--clients", str(clients), "--cohort", str(cohort)]
            done = subprocess.run(
                [*command, "--rounds", str(asked.rounds)], capture_output=True, text=True, check=True
            )
            r = json.loads(done.stdout)
            print(f"| {clients:,} | {cohort:,} | {r['start']:.2f} s | {r['wall']:.2f} µs | {r['processor']:.2f} µs"
                  f" | {r['later']:.2f} | {r['memory']:.0f} MB | {r['grows']:.2f} kB |", flush=True)  # fmt: skip


def measure(clients: int, cohort: int, rounds: int) -> dict[str, float]:
    import numpy as np
    import torch

    import fedbraid as fb

    x, y = torch.randn(2 * clients, 20), torch.randint(2, (2 * clients,))
    offsets = np.arange(0, 2 * clients + 1, 2)
    task = fb.Task.from_table(lambda: torch.nn.Linear(20, 2), x, y, torch.arange(len(x)), offsets)
    at: list[tuple[float, float, float]] = []
    marks = {1, rounds // 2 + 1, rounds + 1}

    class Stamps:
        done = 0

        def step(self, record, run) -> None:
            self.done += 1
            if self.done in marks:
                at.append((time.perf_counter(), time.process_time(), resident()))

    start = time.perf_counter()
    fb.simulate(
        task, fb.fedavg(), fb.Work(lr=0.1, batch=2), fb.rounds(rounds + 1, clients=cohort),
        engine="in_process(backend='native')", evaluate_every=None, callbacks=[Stamps()],
    )  # fmt: skip
    wall, processor = (1e6 * (at[-1][k] - at[0][k]) / (rounds * cohort) for k in range(2))
    halves = [(b[1] - a[1]) / n for a, b, n in zip(at, at[1:], (rounds // 2, rounds - rounds // 2))]
    return {
        "start": at[0][0] - start, "wall": wall, "processor": processor, "later": halves[1] / halves[0],
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "grows": (at[2][2] - at[1][2]) / (rounds - rounds // 2) / 1000,
    }  # fmt: skip


def resident() -> int:
    """Bytes of memory in use by this process."""
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
