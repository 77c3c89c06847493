"""One machine, very many clients: start-up, time per client and memory as the population and the cohort grow.

    python benchmarks/scale.py [--clients 1000 1000000] [--cohort 100 10000] [--rounds 5]

Each row is a process of its own: FedAvg on logistic regression with two samples of 20 numbers a client. "start-up" is
from the beginning of `simulate` to the end of the first round; a client's time is that of the later rounds, wall clock
and processor.
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
    print("| clients | cohort | start-up | a client, wall | a client, processor | memory |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
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
                  f" | {r['memory']:.0f} MB |", flush=True)  # fmt: skip


def measure(clients: int, cohort: int, rounds: int) -> dict[str, float]:
    import numpy as np
    import torch

    import fedbraid as fb

    x, y = torch.randn(2 * clients, 20), torch.randint(2, (2 * clients,))
    offsets = np.arange(0, 2 * clients + 1, 2)
    task = fb.Task.from_table(lambda: torch.nn.Linear(20, 2), x, y, torch.arange(len(x)), offsets)
    at: list[tuple[float, float]] = []

    class Stamps:
        def step(self, record, run) -> None:
            at.append((time.perf_counter(), time.process_time()))

    start = time.perf_counter()
    fb.simulate(
        task, fb.fedavg(), fb.Work(lr=0.1, batch=2), fb.rounds(rounds + 1, clients=cohort),
        engine="in_process(backend='native')", evaluate_every=None, callbacks=[Stamps()],
    )  # fmt: skip
    wall, processor = (1e6 * (at[-1][k] - at[0][k]) / (rounds * cohort) for k in range(2))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"start": at[0][0] - start, "wall": wall, "processor": processor, "memory": memory}


if __name__ == "__main__":
    main()
