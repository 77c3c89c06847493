"""How fast a fleet goes, how much memory it takes, and how well the simulator foretells its time.

python benchmarks/fleet.py steps --nodes 1000 --rounds 3     complete server steps with light nodes: uploads a second, CPU
python benchmarks/fleet.py connect --nodes 5000              how long 5,000 nodes take to connect, and one step of them
python benchmarks/fleet.py large --nodes 200                 8.6 MB from each of 200 nodes at once: do all arrive, in what memory
python benchmarks/fleet.py latency --orders 400              from the server's call to the node's hands, one after another
python benchmarks/fleet.py predict --rounds 12               run A's clock in the simulator, beside the time that run B takes

Broker, server and nodes are those of `fedbraid deploy`, over TLS on loopback. Light nodes have no torch: processes of many
asyncio connections that answer every order with a ready upload. CPU an upload is what to compare on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LENET = """
import fedbraid as fb
from fedbraid.models import lenet5

fleet = fb.deploy.Project(lenet5, "cross_entropy", lambda config: None)
"""
LARGE = """
from torch import nn

import fedbraid as fb

fleet = fb.deploy.Project(lambda: nn.Linear(1466, 1466), "mse", lambda config: None)
"""
PROCESSES = 4  # of light nodes
AT_ONCE = 64  # connections that a process makes at a time
SECONDS = (3.0, 6.0, 9.0, 15.0)  # that nodes take for an order, each 20 % more or less
SLOW = """
import random
import time

import torch
from torch import nn

import fedbraid as fb

SECONDS = (3.0, 6.0, 9.0, 15.0)
NODE = {}


def model():
    return nn.Linear(4, 2)


def load(config):
    NODE["slow"] = SECONDS[int(config["share"])]
    draw = torch.Generator().manual_seed(int(config["share"]))
    return torch.randn(8, 4, generator=draw), torch.randint(0, 2, (8,), generator=draw)


def sleepy(outputs, targets):
    if NODE:  # on a node; one step is one call
        time.sleep(NODE["slow"] * random.uniform(0.8, 1.2))
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


fleet = fb.deploy.Project(model, sleepy, load, work=fb.Work(lr=0.1, steps=1, batch=None))
"""


# Light nodes ------------------------------------------------------------------------------------------


def nodes(folder: Path, url: str, first: int, count: int, upload: Path) -> None:
    """This many nodes in this process, until it is ended."""
    import nats

    from fedbraid.deploy import credentials
    from fedbraid.deploy.node_nats import answer_chunks
    from fedbraid.deploy.transport import MAGIC, SIGNATURE_BYTES, ModelReference, pack_answer

    keys, ready = folder / "keys", upload.read_bytes()
    hello = pack_answer({"samples": 600, "version": -1})
    trained = pack_answer({"lost": False, "version": -1, "forgot": False, "loss": 1.0}, ready)
    context = ssl.create_default_context(cafile=str(keys / "ca.crt"))
    gate = asyncio.Semaphore(AT_ONCE)

    async def insist(make: Any) -> Any:
        pause = 0.2
        while True:
            try:
                return await make()
            except Exception:
                await asyncio.sleep(pause)
                pause = min(2 * pause, 5.0)

    async def one(i: int) -> None:
        name, seed = credentials.read_key(keys / f"node-{i}.nk")
        client = nats.NATS()

        async def obey(message: Any) -> None:
            start = len(MAGIC) + SIGNATURE_BYTES + 4
            length = int.from_bytes(message.data[start - 4 : start], "big")
            head = json.loads(message.data[start : start + length])
            if head["model"] is not None:
                model = ModelReference(*head["model"])
                for k in range(max(1, -(-model.size // (512 * 1024)))):
                    subject = f"$JS.API.DIRECT.GET.MODEL.fb.m.{model.name}.{model.digest[:16]}.{k}"
                    await insist(lambda s=subject: client.request(s, b"", timeout=30))
            answer = hello if head["kind"] == "HELLO" else trained
            for about, part in answer_chunks(head["job"], answer):
                store = lambda a=about, p=part: client.request(f"fb.r.{name}", p, headers=a, timeout=30)  # noqa: E731
                while "error" in json.loads((await insist(store)).data):
                    await asyncio.sleep(0.5)

        async with gate:
            connecting = client.connect(
                url, nkeys_seed_str=seed, tls=context, inbox_prefix=f"_INBOX.{name}", name=name,
                max_reconnect_attempts=-1, connect_timeout=60, error_cb=_quiet,
            )  # fmt: skip
            await asyncio.wait_for(connecting, 60)  # a handshake that the broker gave up would wait for ever
            await client.subscribe(f"fb.o.{name}", cb=obey)

    async def all_of_them() -> None:
        await asyncio.gather(*(insist(lambda i=i: one(i)) for i in range(first, first + count)))
        await asyncio.Event().wait()

    asyncio.run(all_of_them())


async def _quiet(error: Exception) -> None:
    """Light nodes try again."""


# A fleet of them --------------------------------------------------------------------------------------


class Fleet:
    """A broker, a server and light nodes as processes, whose CPU time and memory are read off /proc."""

    def __init__(self, scratch: Path, count: int, project: str, rounds: int) -> None:
        import torch

        from fedbraid.core.layout import Layout
        from fedbraid.deploy import credentials
        from fedbraid.deploy.broker import Broker
        from fedbraid.deploy.local_fleet import free_port
        from fedbraid.links.wire import frame

        self.folder, self.count, self.rounds = scratch / "fleet", count, rounds
        self.folder.mkdir()
        (self.folder / "fleet.py").write_text(project)
        schedule = f"rounds({rounds}, clients={count})"
        (self.folder / "fleet.toml").write_text(
            f'schedule = "{schedule}"\nnodes = {count}\nminimum = {count}\nout = "run"\ndeadline = 3600\nevaluate_every = 0\n'
        )
        credentials.make(self.folder / "keys", ["127.0.0.1"], count)
        made: dict[str, Any] = {}
        exec(project, made)
        layout = Layout.of(made["fleet"].model())
        self.upload = scratch / "upload"
        update = 1e-6 * torch.randn(layout.size)
        self.upload.write_bytes(frame(0, 0, layout.fingerprint, update.numpy().astype("<f4").tobytes()))
        self.size = layout.size
        self.broker = Broker(self.folder / "keys", self.folder / "broker", port=free_port())
        self.url = f"tls://127.0.0.1:{self.broker.port}"
        self.processes: dict[str, list[int]] = {}
        self.children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Fleet:
        self.broker.start()
        self.processes["broker"] = [int(self.broker.pid_file.read_text())]
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            child.kill()
            child.wait()
        self.broker.stop()

    def start_nodes(self) -> None:
        each = -(-self.count // PROCESSES)
        for first in range(0, self.count, each):
            words = ["nodes", "--folder", self.folder, "--url", self.url, "--first", first]
            words += ["--nodes", min(each, self.count - first), "--upload", self.upload]
            self._start("nodes", [sys.executable, __file__, *map(str, words)])

    def start_server(self) -> None:
        words = ["-m", "fedbraid", "deploy", "serve", str(self.folder), self.url]
        self._start("server", [sys.executable, *words])

    def _start(self, kind: str, command: list[str]) -> None:
        with (self.folder / f"{kind}.log").open("ab") as log:
            child = subprocess.Popen(command, stdout=log, stderr=log)
        self.children.append(child)
        self.processes.setdefault(kind, []).append(child.pid)

    def records(self) -> list[dict[str, Any]]:
        from fedbraid.run.checkpoint import Folder

        return list(Folder(self.folder / "run").records())

    def wait_for_step(self, step: int) -> None:
        while len(self.records()) < step:
            if any(child.poll() is not None for child in self.children):
                sys.exit((self.folder / "server.log").read_text()[-3000:])
            time.sleep(0.1)

    def connected(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int(json.loads((self.folder / "run" / "status.json").read_text())["nodes"])
        return 0

    def cpu(self) -> dict[str, float]:
        """Seconds of CPU by kind of process."""
        tick = os.sysconf("SC_CLK_TCK")
        found = {}
        for kind, pids in self.processes.items():
            stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
            found[kind] = sum(int(s[11]) + int(s[12]) for s in stats) / tick
        return found

    def memory(self) -> dict[str, float]:
        """MB at the peak by kind of process."""
        found = {}
        for kind, pids in self.processes.items():
            lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
            found[kind] = sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
        return found


@contextlib.contextmanager
def fleet(count: int, project: str, rounds: int) -> Iterator[Fleet]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as scratch, Fleet(Path(scratch), count, project, rounds) as made:
        yield made


def steps(count: int, rounds: int, project: str = LENET) -> None:
    """Complete server steps: ordered, received, checked, folded, committed."""
    with fleet(count, project, rounds + 1) as made:
        begun = time.monotonic()
        made.start_server()
        made.start_nodes()
        while made.connected() < count:
            time.sleep(0.2)
        print(
            f"{count} nodes are connected and have said hello after {time.monotonic() - begun:.1f} s",
            flush=True,
        )
        made.wait_for_step(1)  # which warms up
        before, begun = made.cpu(), time.monotonic()
        made.wait_for_step(rounds + 1)
        took, cpu = time.monotonic() - begun, made.cpu()
        uploads = sum(r["uploads"] for r in made.records()[1:])
        assert uploads == rounds * count, uploads
        print(
            f"{uploads} uploads of {4 * made.size / 1e6:.3g} MB in {took:.1f} s: {uploads / took:.1f} a second"
        )
        print("| | CPU ms an upload | peak MB |\n| --- | --: | --: |")
        peak = made.memory()
        for kind in cpu:
            print(f"| {kind} | {1000 * (cpu[kind] - before[kind]) / uploads:.2f} | {peak[kind]:.0f} |")


def latency(orders: int) -> None:
    """Small orders to one idle node, one after another, from the call to the node's hands, its signature checked."""
    from fedbraid.deploy.credentials import operator_key
    from fedbraid.deploy.node_nats import NatsNode
    from fedbraid.deploy.transport import OrderSigner, new_job
    from fedbraid.deploy.transport_nats import NatsTransport

    with fleet(1, LENET, 1) as made:
        keys = made.folder / "keys"
        server, node = NatsTransport(made.url, keys), NatsNode(made.url, keys / "node-0.nk")
        signer, arrived, took = OrderSigner(operator_key(keys)), threading.Event(), []

        def listen() -> None:
            for _ in node.orders():
                arrived.set()

        threading.Thread(target=listen, daemon=True).start()
        for _ in range(orders):
            arrived.clear()
            begun = time.perf_counter()
            server.send([signer.sign("node-0", "PING", run="r", job=new_job(), deadline=time.time() + 60)])
            assert arrived.wait(60)
            took.append(1000 * (time.perf_counter() - begun))
        cuts = statistics.quantiles(took, n=100)
        print(f"{orders} orders: median {cuts[49]:.2f} ms, 99th percentile {cuts[98]:.2f} ms")
        node.close()
        server.close()


def predict(rounds: int) -> None:
    """A recorded run's clock, and what it says of other runs on the same nodes, which sleep for their slowness."""
    import fedbraid as fb
    from fedbraid.deploy.local_fleet import trial

    known = f"rounds({rounds}, clients=2)"
    others = [
        f"rounds({rounds}, clients=3)",
        f"buffered(steps={rounds}, buffer=2, concurrency=3, arrivals='closed')",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "fleet"
        folder.mkdir()
        (folder / "fleet.py").write_text(SLOW)

        def took(schedule: str) -> tuple[Path, float]:
            """A run's folder, and its seconds from the first order to the last step."""
            out = folder / f"run-{len(list(folder.glob('run-*')))}"
            config = {"schedule": schedule, "minimum": 1, "out": str(out), "seed": 1, "evaluate_every": 0}
            run = trial(folder, len(SECONDS), config, lambda status, records: None)
            records = list(run.records())
            return out, records[-1]["time"] - min(b for r in records for b in r["start_times"])

        recorded, _ = took(known)
        clock = fb.clock.from_run(recorded)
        print(f"nodes that take {SECONDS} s, recorded: {known}", flush=True)
        print("| run | took s | the simulator says s | off by |", flush=True)
        for schedule in others:
            _, real = took(schedule)
            head, tail = schedule[:-1].split("(")
            made = eval(f"fb.{head}({tail}, **clock)", {"fb": fb, "clock": clock})
            said = statistics.mean(
                [tick.time for tick in made.ticks(len(SECONDS), seed)][-1] for seed in range(50)
            )
            print(f"| {schedule} | {real:.1f} | {said:.1f} | {said / real - 1:+.0%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["steps", "connect", "large", "latency", "predict", "nodes"])
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--orders", type=int, default=400)
    for hidden in ("--folder", "--upload"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.what == "nodes":
        nodes(asked.folder, asked.url, asked.first, asked.nodes, asked.upload)
    elif asked.what == "latency":
        latency(asked.orders)
    elif asked.what == "predict":
        predict(asked.rounds or 12)
    elif asked.what == "large":
        steps(asked.nodes or 200, asked.rounds or 1, LARGE)
    else:
        steps(asked.nodes or (5000 if asked.what == "connect" else 1000), asked.rounds or 1)


if __name__ == "__main__":
    main()
