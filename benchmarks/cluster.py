"""What a Ray cluster costs beside a pool, and what those costs come to on 10,000 nodes with 10 million clients.

    python benchmarks/cluster.py [--repeats 3] [--rounds 3]
    python benchmarks/cluster.py --driver 10 100 1000

W3 on two nodes of one CPU each, beside a pool of two workers. Contestants take turns, so that a noisy machine is
noisy for both; the smallest time of each counts. The first round of every run is not counted: there, workers are
started and the data is shipped. The table at the end is arithmetic on the costs above it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster
from torch import nn

import fedbraid as fb
from fedbraid.core.context import Uploads
from fedbraid.deploy.node_table import Node, NodeTable

NODES, CLIENTS = 10_000, 10_000_000
MANY, REGISTERED = 100, 100_000
W3 = "W3 s a round, {}"
POOL, RAY = "pool(workers=2)", "ray(workers=2)"


@contextmanager
def two_nodes():
    """A cluster on loopback whose two nodes have one CPU each; the driver's own node has none."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"node_ip_address": "127.0.0.2", "num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for address in ("127.0.0.3", "127.0.0.4"):
            cluster.add_node(node_ip_address=address, num_cpus=1)
        ray.init(cluster.address, log_to_driver=False, logging_level="warning")
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


class Clock:
    """When each step was done: seconds, and this process's own CPU seconds."""

    def __init__(self) -> None:
        self.at: list[np.ndarray] = []

    def step(self, record: dict[str, Any], run: Any) -> None:
        self.at.append(np.array([time.perf_counter(), time.process_time()]))


def seconds(
    task: fb.Task, work: fb.Work, engine: str, cohort: int, rounds: int, algorithm: fb.Algorithm | None = None
) -> np.ndarray:
    """(seconds, the driver's CPU seconds) of one round, the first left out."""
    clock = Clock()
    plan = (task, algorithm or fb.fedavg(), work, fb.rounds(rounds + 1, clients=cohort))
    fb.simulate(*plan, engine=engine, evaluate_every=None, progress=False, callbacks=[clock])
    return (clock.at[-1] - clock.at[0]) / rounds


def w3(clients: int = 20, samples: int = 500) -> fb.Task:
    """W3 with a smaller table; a round is the same."""
    draw = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(samples, 3, 32, 32, generator=draw), torch.randint(10, (samples,), generator=draw))
        for _ in range(clients)
    ]
    return fb.Task.from_arrays(fb.models.w3_cnn, pairs)


@dataclass(frozen=True)
class EachUpload(fb.Mean):
    """A mean that is given every upload, as medians and server-held memory are."""

    def traits(self):
        return replace(super().traits(), needs_every_upload=True)


def driver(repeats: int, cohorts: Sequence[int]) -> dict[str, float]:
    """The driver's CPU seconds for a round of W3 with one short step, folded by the workers and by the driver."""
    work, costs = fb.Work(lr=0.01, steps=1, batch=4), {}
    for cohort in cohorts:
        task = w3(cohort, 4)
        for way, gather in (("workers fold", fb.Mean()), ("the driver folds", EachUpload())):
            a = fb.Algorithm(gather=gather)
            took = [seconds(task, work, "ray(workers=2)", cohort, 1, a)[1] for _ in range(repeats)]
            costs[f"driver s a round of {cohort}, {way}"] = min(took)
    return costs


def wide(d: int) -> fb.Task:
    """Next to no work, and vectors of d numbers."""
    return fb.Task.from_arrays(
        lambda: nn.Linear(d, 1, bias=False), [(torch.ones(1, d), torch.ones(1, 1))] * 64, loss="mse"
    )


def throughput(repeats: int, rounds: int) -> dict[str, float]:
    """Rounds of W3, in turns."""
    task, work, best = w3(), fb.Work(lr=0.01, epochs=1, batch=50), {POOL: np.inf, RAY: np.inf}
    for _ in range(repeats):
        for engine in best:
            best[engine] = min(best[engine], seconds(task, work, engine, 10, rounds)[0])
    costs = {W3.format(engine): took for engine, took in best.items()}
    return costs | {"W3 ray / pool throughput": best[POOL] / best[RAY]}


def prices(repeats: int, cohort: int = 16, large: int = 1_000_000) -> dict[str, float]:
    """A block of one client that hardly trains, and a byte of what it uploads."""
    work = fb.Work(lr=1e-3, steps=1, batch=None)

    def cost(d: int) -> np.ndarray:
        runs = [seconds(wide(d), work, "ray(workers=2, block=1)", cohort, 5) for _ in range(repeats)]
        return np.min(runs, axis=0) / cohort

    small = cost(10)
    byte = (cost(large) - small) / (4 * large)
    return {
        "ms a block": 1e3 * small[0],
        "ms a block, of the driver's CPU": 1e3 * small[1],
        "ns an uploaded byte": 1e9 * byte[0],
        "ns an uploaded byte, of the driver's CPU": 1e9 * byte[1],
    }


def server(repeats: int) -> dict[str, float]:
    """The server's own work on LeNet-5, on one core."""
    torch.set_num_threads(1)
    layout = fb.Layout.of(fb.models.lenet5())
    x = torch.randn(MANY, layout.size)
    costs = {"parameters of LeNet-5": layout.size}
    for codec in (fb.codecs.identity(), fb.codecs.int8()):
        message = codec.encode(x[0], layout, 0)
        costs[f"ms to decode an upload, {codec!r}"] = fastest(
            repeats, lambda c=codec, m=message: [c.decode(m, layout) for _ in range(MANY)], MANY
        )
    ones, algorithm = torch.ones(MANY, 1), fb.fedavg()
    gather = algorithm.gather
    uploads = Uploads(
        np.arange(MANY), {"delta": x}, ones, ones, ones, 0 * ones, ones.double(), {"x": x[:1]}, algorithm.gathered
    )  # fmt: skip
    costs["ms to fold an upload"] = fastest(
        repeats, lambda: gather.add(gather.zero(x[0]), uploads, {}, x[0]), MANY
    )
    costs[f"ms to draw {NODES:,} of {CLIENTS:,} clients"] = fastest(
        repeats, lambda: next(iter(fb.rounds(1, clients=NODES).ticks(CLIENTS, 0)))
    )
    nodes = {f"client-{i}": Node(f"client-{i}", i, 100) for i in range(REGISTERED)}
    table = NodeTable(bytes(32), "run", nodes=nodes)
    costs["ms to write down a deployed client"] = fastest(
        repeats, lambda: json.dumps(table.note()), REGISTERED
    )
    return costs


def fastest(repeats: int, act: Callable[[], Any], times: int = 1) -> float:
    """Milliseconds of one of `times` things that an act does."""
    took = []
    for _ in range(repeats + 1):
        since = time.perf_counter()
        act()
        took.append(time.perf_counter() - since)
    return 1e3 * min(took) / times


def projection(costs: dict[str, float]) -> list[str]:
    """A round of 10,000 of 10 million clients with LeNet-5, one client a node, as lines of a table."""
    block, byte = (costs[f"{what}, of the driver's CPU"] for what in ("ms a block", "ns an uploaded byte"))
    fold = costs["ms to fold an upload"]
    draw = costs[f"ms to draw {NODES:,} of {CLIENTS:,} clients"]
    size = 4 * costs["parameters of LeNet-5"]
    train = costs[W3.format(POOL)] * 2 / 10
    rows = [
        ("training a client of W3, all nodes at once", f"{costs[W3.format(POOL)]:.2f} s × 2 / 10", train),
        ("handing out blocks", f"{NODES:,} × {block:.2f} ms", NODES * block / 1e3),
        (
            "taking in uploads",
            f"{NODES:,} × {size:,.0f} bytes × {byte:.2f} ns",
            NODES * size * byte / 1e9,
        ),
        ("folding", f"{NODES:,} × {fold:.3f} ms", NODES * fold / 1e3),
        ("drawing the cohort", f"{draw:.1f} ms", draw / 1e3),
    ]
    busy = sum(took for *_, took in rows[1:])
    share = NODES * train / busy
    return [
        "| a round | arithmetic | seconds |",
        "| --- | --- | --- |",
        *(f"| {what} | {how} | {took:.2f} |" for what, how, took in rows),
        f"| the driver in all | | {busy:.2f} |",
        "",
        f"nodes that the driver keeps busy: {NODES:,} × {train:.2f} s / {busy:.2f} s = {share:.0f}",
        f"rows of {CLIENTS:,} clients: {CLIENTS * size / 1e12:.2f} TB, int4: {CLIENTS * size / 8e12:.2f} TB",
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument(
        "--driver", type=int, nargs="+", metavar="CLIENTS", help="only the driver's CPU, by cohort"
    )
    given = options.parse_args()
    with two_nodes():
        if given.driver:
            print(
                json.dumps({k: round(v, 3) for k, v in driver(given.repeats, given.driver).items()}, indent=2)
            )
            return
        costs = throughput(given.repeats, given.rounds) | prices(given.repeats)
    costs |= server(given.repeats)
    rounded = {k: v if isinstance(v, int) else float(f"{v:.4g}") for k, v in costs.items()}
    print(json.dumps(rounded, indent=2))
    print("\n".join(projection(costs)))


if __name__ == "__main__":
    main()
