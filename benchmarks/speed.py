"""Whole rounds through `fb.simulate` against bare hand-written PyTorch, side by side in one run.

    python benchmarks/speed.py [W1 ... W9] [--repeats 5] [--engine "in_process(backend='native')"] [--device cuda] [--json]
    python benchmarks/speed.py [W1 ... W9] --busy 1
    python benchmarks/speed.py [W1 ... W9, tiny] --rounds 1 4 16 64 256

The run is declared as a long one, of which the first rounds are timed. The yardstick is the better of two bare loops: one process, and two processes of one thread each. Contestants
take turns, so that a noisy machine is noisy for all; the smallest time of each counts. A ratio above 1 means
that fedbraid is faster. On a GPU there is one bare loop, and a round ends when the GPU has done it. With `--busy N`, N other
processes compute all the while.

`--rounds N ...` times whole runs of N rounds with engine="auto" instead, from the call to its result: in a new cache folder,
where nothing is compiled yet, and again with another seed. A bare loop's model and processes are made in its time as well. Each run
has a fresh process, which has imported everything and made the data; in brackets, the processor time of it and of its children. With
`--repeats N` the contestants take turns N times, and the least counts. Rows in which fedbraid is slower by more than 3 % end with "slower".
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import fedbraid as fb
from fedbraid.core.device import finish
from fedbraid.engines.native_backend import Native


@dataclass(frozen=True)
class Workload:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    clients: int
    samples: int
    cohort: int
    epochs: int
    batch: int
    momentum: float
    rounds: int
    tokens: int = 0
    places: tuple[int, ...] = ()  # targets of a sample, where they are not one
    loss: Callable[[Tensor, Tensor], Tensor] | None = None  # for each sample, where it is not the usual one
    buffers: str = "refuse"

    def table(self) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        total = self.clients * self.samples
        if self.tokens:
            x = torch.randint(self.tokens, (total, *self.shape), generator=draw)
        else:
            x = torch.randn(total, *self.shape, generator=draw)
        return x, torch.randint(self.classes, (total, *self.places), generator=draw)

    def task(self, x: Tensor, y: Tensor) -> fb.Task:
        offsets = torch.arange(0, len(x) + 1, self.samples).numpy()
        return fb.Task.from_table(
            self.build,
            x,
            y,
            torch.arange(len(x)),
            offsets,
            loss=self.loss or "cross_entropy",
            buffers=self.buffers,
        )


def dropout_cnn() -> nn.Module:
    """Four convolutions with GroupNorm, and dropout after each pooling and before the head."""
    layers: list[nn.Module] = []
    before = 3
    for k, after in enumerate((32, 32, 64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU()]
        before = after
        if k % 2:
            layers += [nn.MaxPool2d(2), nn.Dropout(0.25)]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(64 * 64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)
    )


class Transformer(nn.Module):
    """Words and places into encoder layers, their mean into a head."""

    def __init__(self, words, width, heads, inner, layers, length, classes, dropout=0.1) -> None:
        super().__init__()
        self.words, self.places = (
            nn.Embedding(words, width),
            nn.Parameter(0.02 * torch.randn(1, length, width)),
        )
        layer = nn.TransformerEncoderLayer(width, heads, inner, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(text) + self.places).mean(1))


class Probe(nn.Module):
    """A body of MiniLM's size (6 layers, 384 wide, 12 heads) that is not trained, and a head that is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Transformer(8000, 384, 12, 1536, 6, 32, 384, dropout=0.0).requires_grad_(False)
        self.head = nn.Linear(384, 10)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.body(text))


WORKLOADS = {
    "W1": Workload(fb.models.lenet5, (1, 28, 28), 10, 500, 120, 5, 1, 20, 0.9, 12),
    "W2": Workload(fb.models.lenet5, (1, 28, 28), 10, 500, 120, 10, 3, 20, 0.9, 4),
    "W3": Workload(fb.models.w3_cnn, (3, 32, 32), 10, 100, 500, 10, 1, 50, 0.0, 3),
    "W4": Workload(lambda: nn.Linear(112, 2), (112,), 2, 10_000, 10, 1000, 1, 10, 0.0, 12),
    "W5": Workload(fb.models.gru_char, (80,), 80, 50, 128, 4, 1, 32, 0.0, 4, tokens=80),
    "W6": Workload(dropout_cnn, (3, 32, 32), 10, 50, 128, 4, 1, 32, 0.0, 4),
    "W7": Workload(
        lambda: Transformer(80, 64, 4, 128, 2, 32, 10), (32,), 10, 100, 128, 10, 1, 16, 0.0, 4, tokens=80
    ),
    "W8": Workload(fb.models.resnet18_gn, (3, 32, 32), 10, 20, 32, 2, 1, 32, 0.0, 3),
    "W9": Workload(Probe, (32,), 10, 4, 32, 2, 1, 16, 0.0, 5, tokens=8000),
}
TINY = {"tiny": Workload(lambda: nn.Linear(20, 3), (20,), 3, 20, 20, 5, 1, 10, 0.0, 12)}
LR = 0.01
LONG = (
    100_000  # rounds of the run of which the first are timed, so that `auto` plans as it does for long runs
)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


class Bare:
    """FedAvg as one would write it by hand: a model, an SGD optimiser, a loop over clients."""

    def __init__(self, work: Workload, x: Tensor, y: Tensor) -> None:
        self.work, self.x, self.y = work, x, y
        self.model = work.build().to(x.device)
        self.loss = nn.CrossEntropyLoss() if work.loss is None else lambda out, y: work.loss(out, y).mean()

    def client(self, weights: list[Tensor], i: int) -> list[Tensor]:
        work = self.work
        with torch.no_grad():
            for p, w in zip(trained(self.model), weights):
                p.copy_(w)
        optimiser = torch.optim.SGD(trained(self.model), lr=LR, momentum=work.momentum)
        x, y = (t[i * work.samples : (i + 1) * work.samples] for t in (self.x, self.y))
        for _ in range(work.epochs):
            order = torch.randperm(work.samples, device=x.device)
            for lo in range(0, work.samples, work.batch):
                picked = order[lo : lo + work.batch]
                optimiser.zero_grad()
                self.loss(self.model(x[picked]), y[picked]).backward()
                optimiser.step()
        return [p.detach().clone() for p in trained(self.model)]

    def block(self, weights: list[Tensor], clients: list[int]) -> list[Tensor]:
        """The sum of these clients' models."""
        total = [torch.zeros_like(w) for w in weights]
        for i in clients:
            for t, w in zip(total, self.client(weights, i)):
                t.add_(w)
        return total

    def cohort(self) -> list[int]:
        return torch.randperm(self.work.clients)[: self.work.cohort].tolist()

    def round(self, weights: list[Tensor]) -> list[Tensor]:
        clients = self.cohort()
        return [t / len(clients) for t in self.block(weights, clients)]


class TwoProcesses(Bare):
    """The same with the cohort split over two processes of one thread, models passed in shared memory."""

    def start(self) -> None:
        ctx = multiprocessing.get_context("fork")
        shapes = [p.shape for p in trained(self.model)]
        self.sent = [torch.zeros(s).share_memory_() for s in shapes]
        self.back = [[torch.zeros(s).share_memory_() for s in shapes] for _ in range(2)]
        self.pipes, self.processes = [], []
        for k in range(2):
            ours, theirs = ctx.Pipe()
            self.processes.append(ctx.Process(target=self.serve, args=(theirs, k), daemon=True))
            self.processes[-1].start()
            self.pipes.append(ours)

    def stop(self) -> None:
        for pipe, process in zip(self.pipes, self.processes):
            pipe.send(None)
            process.join()

    def serve(self, pipe, k: int) -> None:
        torch.set_num_threads(1)
        while clients := pipe.recv():
            for mine, total in zip(self.back[k], self.block(self.sent, clients)):
                mine.copy_(total)
            pipe.send(None)

    def round(self, weights: list[Tensor]) -> list[Tensor]:
        clients = self.cohort()
        for s, w in zip(self.sent, weights):
            s.copy_(w)
        for k, pipe in enumerate(self.pipes):
            pipe.send(clients[k::2])
        for pipe in self.pipes:
            pipe.recv()
        return [(a + b) / len(clients) for a, b in zip(*self.back)]


class Stamps:
    """A callback that notes when each round ended, and ends the run after so many."""

    def __init__(self, device: str = "cpu", rounds: int | None = None) -> None:
        self.at: list[float] = []
        self.device, self.rounds = torch.device(device), rounds

    def step(self, record, run) -> bool:
        finish(self.device)
        self.at.append(time.perf_counter())
        return len(self.at) == self.rounds

    def per_round(self) -> float:
        gaps = [b - a for a, b in zip(self.at, self.at[1:])]
        return statistics.median(gaps)


def bare(contestant: Bare, rounds: int) -> float:
    weights = [p.detach().clone() for p in trained(contestant.model)]
    gaps = []
    for _ in range(rounds):
        start = time.perf_counter()
        weights = contestant.round(weights)
        finish(contestant.x.device)
        gaps.append(time.perf_counter() - start)
    return statistics.median(gaps[1:])


def ours(task: fb.Task, work: Workload, engine: str, device: str) -> tuple[float, str]:
    stamps = Stamps(device, 3 * work.rounds)
    local = fb.Work(lr=LR, epochs=work.epochs, batch=work.batch, momentum=work.momentum)
    result = fb.simulate(
        task, fb.fedavg(), local, fb.rounds(LONG, clients=work.cohort),
        engine=engine, device=device, evaluate_every=None, callbacks=[stamps],
    )  # fmt: skip
    return stamps.per_round(), result.engine


def prepare(task: fb.Task, work: Workload, device: str = "cpu") -> None:
    """Compile what can be, once for all runs: rounds are timed here, not the first start (which `--rounds` times)."""
    whole = len(trained(model := work.build())) == len(list(model.parameters()))
    if device == "cpu" and whole and Native.supports(task) is None:
        ours(task, replace(work, rounds=1), "in_process(backend='native')", device)


def measure(name: str, work: Workload, repeats: int, engine: str, device: str) -> dict[str, object]:
    x, y = work.table()
    loops: dict[str, Bare] = {"one process": Bare(work, x.to(device), y.to(device))}
    if device == "cpu":
        loops["two processes"] = split = TwoProcesses(work, x, y)
        split.start()
    task = work.task(x, y)
    prepare(task, work, device)
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        for kind, loop in loops.items():
            times.setdefault(kind, []).append(bare(loop, work.rounds))
        took, used = ours(task, work, engine, device)
        times.setdefault("fedbraid", []).append(took)
    if device == "cpu":
        split.stop()
    best = {k: min(v) for k, v in times.items()}
    yardstick = min(best[kind] for kind in loops)
    return {
        "workload": name,
        **{k: round(1000 * v, 3) for k, v in best.items()},
        "ratio": round(yardstick / best["fedbraid"], 2),
        "engine": used,
    }


HEAD = """| workload | bare, one process | bare, two processes | fedbraid | ratio | engine |
| --- | ---: | ---: | ---: | ---: | --- |"""


def line(r: dict[str, object]) -> str:
    two = r.get("two processes", "-")
    return (
        f"| {r['workload']} | {r['one process']} | {two} | {r['fedbraid']} | {r['ratio']} | `{r['engine']}` |"
    )


SHORT_HEAD = """whole runs; ratios: better bare loop / fedbraid, the first time and again

| workload | rounds | bare | auto, first time | auto, again | ratio, first | ratio, again | engine |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"""
SLOWER = 1 / 1.03


def short(work: Workload, rounds: int, repeats: int) -> str:
    """Seconds of a whole run of so many rounds by the better bare loop, by "auto" for the first time, and again."""
    loops, firsts, agains = [], [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            loops += [alone(bare_run, work, rounds, kind) for kind in (Bare, TwoProcesses)]
            firsts.append(alone(auto_run, work, rounds, cache, 0))
            agains.append(alone(auto_run, work, rounds, cache, 1))
    best, first, again = min(loops), min(firsts), min(agains)
    ratios = best[0] / first[0], best[0] / again[0]
    seen = " | ".join(f"{run[0]:.3f} ({run[1]:.2f}) s" for run in (best, first, again))
    slower = " slower" if min(ratios) < SLOWER else ""
    return f"{seen} | {ratios[0]:.2f} | {ratios[1]:.2f} | `{first[2]}`{slower}"


def print_short_runs(works: dict[str, Workload], lengths: list[int], repeats: int) -> None:
    print(SHORT_HEAD)
    for name, work in works.items():
        for rounds in lengths:
            print(f"| {name} | {rounds} | {short(work, rounds, repeats)} |", flush=True)


def alone(run: Callable[..., tuple[float, float, str]], *args: object) -> tuple[float, float, str]:
    """What a function gives in a process of its own, forked from this one, which has imported everything and run nothing."""
    ours, theirs = (context := multiprocessing.get_context("fork")).Pipe(False)
    process = context.Process(target=lambda: theirs.send(run(*args)))
    process.start()
    try:
        found: tuple[float, float, str] = ours.recv()
        return found
    finally:
        process.join()


def bare_run(work: Workload, rounds: int, kind: type[Bare]) -> tuple[float, float, str]:
    x, y = work.table()
    return *clocked(lambda: bare_rounds(kind(work, x, y), rounds)), ""


def auto_run(work: Workload, rounds: int, cache: str, seed: int) -> tuple[float, float, str]:
    """Wall and processor seconds of a run, and the engine that it took."""
    os.environ["XDG_CACHE_HOME"] = cache
    task = work.task(*work.table())
    local = fb.Work(lr=LR, epochs=work.epochs, batch=work.batch, momentum=work.momentum)
    used: list[str] = []

    def run() -> None:
        schedule = fb.rounds(rounds, clients=work.cohort)
        used.append(
            fb.simulate(
                task, fb.fedavg(), local, schedule, evaluate_every=None, progress=False, seed=seed
            ).engine
        )

    return *clocked(run), used[0]


def bare_rounds(loop: Bare, rounds: int) -> None:
    if isinstance(loop, TwoProcesses):
        loop.start()
    weights = [p.detach().clone() for p in trained(loop.model)]
    for _ in range(rounds):
        weights = loop.round(weights)
    if isinstance(loop, TwoProcesses):
        loop.stop()


def clocked(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the clock, and of processors, ended children included."""
    start, before = time.perf_counter(), sum(os.times()[:4])
    work()
    return time.perf_counter() - start, sum(os.times()[:4]) - before


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that compute as long as this lasts."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def start_up() -> float:
    """Seconds from starting Python to the end of the first step, on W1."""
    script = (
        "import torch, fedbraid as fb\n"
        "x, y = torch.randn(1200, 1, 28, 28), torch.randint(10, (1200,))\n"
        "import numpy as np\n"
        "task = fb.Task.from_table(fb.models.lenet5, x, y, torch.arange(1200), np.arange(0, 1201, 120))\n"
        "fb.simulate(task, fb.fedavg(), fb.Work(momentum=0.9), fb.rounds(1, clients=5), evaluate_every=None, progress=False)\n"
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", script], check=True, env=dict(os.environ))
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), metavar="W")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--busy", type=int, default=0, metavar="N")
    parser.add_argument("--rounds", type=int, nargs="+", metavar="N")
    args = parser.parse_args()
    if args.rounds:
        print_short_runs(
            {name: (WORKLOADS | TINY)[name] for name in args.workloads}, args.rounds, args.repeats
        )
        return
    with neighbours(args.busy):
        known = WORKLOADS | TINY
        rows = [measure(w, known[w], args.repeats, args.engine, args.device) for w in args.workloads]
    startup = round(start_up(), 2)
    if args.json:
        print(json.dumps({"rows": rows, "start_up_seconds": startup}))
        return
    print("milliseconds per round, smallest of the medians; ratio = better bare loop / fedbraid\n")
    print(HEAD)
    for r in rows:
        print(line(r))
    print(f"\nstart-up, import to the end of the first step: {startup} s")


if __name__ == "__main__":
    main()
