"""SIGKILL at random moments: is an acknowledged upload lost or counted twice, and are the bits those of a run left alone?

python benchmarks/kills.py --kills 100 --seconds 1500

A broker, a server, an edge and four nodes as `fedbraid deploy` runs them, over TLS on loopback, train SCAFFOLD, whose nodes have state of
their own. A victim is drawn (broker, server, edge, one of the nodes, or all of them at once), killed, and started again at once;
the next kill comes at a drawn moment within `--pause` seconds, whatever the others are doing. Every node writes down what the
broker acknowledged. In the end each node and version that was acknowledged must be in the records once, and the model must
have the bits of the simulator's with the same cohorts. An upload is lost if its round closed with too few, or if its node
was asked for the same again under another job; it is spare if its round was complete without it, because a server that was
started again drew others, of the nodes that were connected then. It ends early when the seconds are over, and says how far it got.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import fedbraid as fb
from fedbraid.deploy import credentials, status_file
from fedbraid.deploy.broker import Broker
from fedbraid.deploy.local_fleet import free_port
from fedbraid.run.checkpoint import Checkpoint, Folder
from fedbraid.run.state import State

NODES, STEPS = 4, 100_000  # far more than a run takes; it is ended when enough was killed
WORK = fb.Work(lr=0.05, steps=3, batch=4)
FLEET = """
import json
import sys

sys.path.insert(0, {here!r})
from kills import PROJECT as fleet
from fedbraid.deploy.node_nats import NatsNode

stored = NatsNode.answer


def answer(self, order, message):
    stored(self, order, message)  # returns when the broker has acknowledged all chunks
    if order.kind == "TRAIN":
        about = json.loads(order.body)
        with open({folder!r} + "/acknowledged", "a") as log:
            log.write(f"{{about['client']}} {{about['version']}} {{order.job}}\\n")


NatsNode.answer = answer
"""


def some(share: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(share + 1)
    y = draw.integers(0, 3, 12 + 5 * share)
    x = np.random.default_rng(0).normal(size=(3, 5))[y] + draw.normal(size=(len(y), 5))
    return x.astype(np.float32), y


def model() -> torch.nn.Module:
    return torch.nn.Linear(5, 3)


PROJECT = fb.deploy.Project(model, "cross_entropy", lambda config: some(int(config["share"])))


class Site:
    """One fleet as processes, each of which can be killed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, dict[str, subprocess.Popen[bytes]]()
        folder.mkdir()
        (folder / "fleet.py").write_text(FLEET.format(here=str(Path(__file__).parent), folder=str(folder)))
        settings = {
            "algorithm": "scaffold()", "work": repr(WORK), "schedule": f"rounds({STEPS}, clients={NODES - 1})",
            "nodes": NODES, "minimum": NODES - 1, "deadline": 120, "evaluate_every": 0, "out": "run",
            "edges": "edge-0: node-0 node-1",
        }  # fmt: skip
        (folder / "fleet.toml").write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in settings.items()))
        credentials.make(folder / "keys", ["127.0.0.1"], NODES, edges=1)
        self.broker = Broker(folder / "keys", folder / "broker", port=free_port())
        self.url = f"tls://127.0.0.1:{self.broker.port}"

    def start(self, name: str) -> None:
        words = ["serve", str(self.folder), self.url]
        task = ["--task", f"{self.folder}/fleet.py:fleet"]
        if name.startswith("edge"):
            words = ["edge", "--key", f"{self.folder}/keys/{name}.nk", *task, self.url]
        elif name != "server":
            i = name.rpartition("-")[2]
            words = [
                "node",
                "--key",
                f"{self.folder}/keys/{name}.nk",
                "--task",
                f"{self.folder}/fleet.py:fleet",
            ]
            words += ["--state", f"{self.folder}/nodes", "-c", f"share={i}", self.url]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "fedbraid", "deploy", *words], stdout=log, stderr=log
            )

    def kill(self, name: str) -> None:
        if name == "broker":
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(self.broker.pid_file.read_text()), signal.SIGKILL)
        else:
            self.processes[name].kill()
            self.processes[name].wait()
            self.start(name)

    @property
    def run(self) -> Folder:
        return Folder(self.folder / "run")

    def step(self) -> int:
        return int(status_file.read(self.run.path).get("step", 0))

    def end(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


def kill(kills: int, seconds: float, pause: float, seed: int) -> int:
    """Kill, count, compare: how much was found wrong."""
    draw, end, done = random.Random(seed), time.monotonic() + seconds, Counter[str]()
    nodes = [f"node-{i}" for i in range(NODES)]
    names = ["server", "edge-0", *nodes]
    with tempfile.TemporaryDirectory() as scratch:
        site = Site(Path(scratch) / "fleet")
        with site.broker:
            try:
                for name in names:
                    site.start(name)
                while not site.step():  # the first step waits for all nodes
                    time.sleep(0.1)
                while sum(done.values()) < kills and time.monotonic() < end:
                    victim = draw.choice(["broker", "server", "edge-0", "node", "all"])
                    some = names if victim == "all" else [draw.choice(nodes) if victim == "node" else victim]
                    for name in [*some, *(["broker"] if victim == "all" else [])]:
                        site.kill(name)
                    done[victim] += 1
                    if draw.random() < 0.3:  # now and then before the others are back
                        time.sleep(draw.uniform(0, pause))
                        continue
                    reached = site.step()
                    while site.step() <= reached and time.monotonic() < end + 60:
                        time.sleep(0.05)
                    time.sleep(draw.uniform(0, pause))
                last = site.step() + 2
                while site.step() < last and time.monotonic() < end + 120:
                    time.sleep(0.1)
            finally:
                site.end()
        return judged(site, done)


def judged(site: Site, done: Counter[str]) -> int:
    """Print what was found: lost, counted twice, other bits."""
    records = list(site.run.records())
    counted = Counter((c, v) for r in records for c, v in zip(r["clients"], r["versions"]))
    jobs: dict[tuple[int, int], set[str]] = {}
    for line in (site.folder / "acknowledged").open():
        client, version, job = line.split()
        if int(version) < len(records):
            jobs.setdefault((int(client), int(version)), set()).add(job)
    missing = jobs.keys() - counted.keys()
    short = {pair for pair in missing if len(records[pair[1]]["clients"]) < NODES - 1}
    lost = short | {pair for pair, some in jobs.items() if len(some) > 1}
    twice = sum(n - 1 for n in counted.values())
    schedule = fb.rounds(len(records), clients=[tuple(r["clients"]) for r in records])
    task = fb.Task.from_arrays(model, [some(i) for i in range(NODES)])
    engine = {"seed": 0, "engine": "in_process", "evaluate_every": None, "progress": False}
    alone = fb.simulate(task, fb.scaffold(), WORK, schedule, **engine)
    first = State.first(fb.scaffold(), task.layout, task.initial(0), 0, real=True)
    checkpoint = Checkpoint(site.run, first)
    same = torch.equal(checkpoint.restore(first)[0].average, alone.x)
    checkpoint.close()
    print(
        f"{sum(done.values())} kills ({', '.join(f'{k} {n}' for k, n in sorted(done.items()))}), {len(records)} steps"
    )
    told = f"{len(jobs)} uploads acknowledged, {len(lost)} lost, {twice} counted twice, {len(missing - lost)} spare"
    print(told)
    print(
        f"bits of an undisturbed run with the same cohorts: {'the same' if same else 'DIFFERENT'}", flush=True
    )
    return len(lost) + twice + (not same)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1500.0)
    parser.add_argument("--pause", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    sys.exit(kill(asked.kills, asked.seconds, asked.pause, asked.seed) > 0)


if __name__ == "__main__":
    main()
