"""A deployment for tests: a folder as `deploy init` makes it, a real broker and server by `deploy up`, nodes as processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from brokers import free_port
from fleets import LONG, WORK, until
from safetensors.torch import load_file

from fedbraid.deploy import credentials, status_file
from fedbraid.run.checkpoint import Folder

HERE = Path(__file__).parent
FLEET = f"""
import sys

sys.path.insert(0, {str(HERE)!r})
from fleets import PROJECT as fleet
"""


def environment():
    paths = [str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def fedbraid(*words, timeout=LONG * 3, **more):
    """A command, run to its end."""
    command = [sys.executable, "-m", "fedbraid", *map(str, words)]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=timeout, check=False, **more
    )


class Deployment:
    """One folder and the processes that belong to it; a context manager that ends them."""

    def __init__(self, folder, nodes=3, fleet=FLEET, **config):
        self.folder, self.port = folder, free_port()
        folder.mkdir()
        (folder / "fleet.py").write_text(fleet)
        config = {"work": WORK, "out": "run", "nodes": nodes, "minimum": nodes, "deadline": LONG} | config
        (folder / "fleet.toml").write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in config.items()))
        credentials.make(folder / "keys", ["127.0.0.1"], nodes)
        self.processes = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in list(self.processes):
            self.end(name)

    @property
    def url(self):
        return f"tls://127.0.0.1:{self.port}"

    @property
    def run(self):
        return Folder(self.folder / "run")

    @property
    def records(self):
        return list(self.run.records())

    @property
    def model(self):
        return load_file(self.run.path / "model.safetensors")

    @property
    def status(self):
        return status_file.read(self.run.path)

    def _start(self, name, command):
        with (self.folder.parent / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )  # fmt: skip

    def up(self, *words):
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        self._start(
            "up", [sys.executable, "-m", "fedbraid", "deploy", "up", str(self.folder), *where, *words]
        )
        return self

    def node(self, i):
        words = [
            "--key",
            self.folder / "keys" / f"node-{i}.nk",
            "--task",
            f"{self.folder / 'fleet.py'}:fleet",
        ]
        words += ["--state", self.folder / "nodes", "-c", f"share={i}", self.url]
        self._start(f"node-{i}", [sys.executable, "-m", "fedbraid", "deploy", "node", *map(str, words)])
        return self

    def edge(self, i):
        key, task = self.folder / "keys" / f"edge-{i}.nk", f"{self.folder / 'fleet.py'}:fleet"
        words = ["edge", "--key", str(key), "--task", task, self.url]
        self._start(f"edge-{i}", [sys.executable, "-m", "fedbraid", "deploy", *words])
        return self

    def log(self, name):
        return (self.folder.parent / f"{name}.log").read_text(errors="replace")

    def kill(self, name):
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def end(self, name):
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def broker_pid(self):
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / "broker" / "nats.pid").read_text())
        return None

    def until(self, happened, what="it"):
        """Wait, and complain at once when the server has ended with an error."""

        def look():
            up = self.processes.get("up")
            assert up is None or up.poll() in (None, 0), self.log("up")[-3000:]
            return happened()

        try:
            until(look, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log('up')[-3000:]}") from None

    def until_step(self, step):
        self.until(lambda: self.status.get("step", 0) >= step, f"step {step}")

    def until_done(self):
        self.until(lambda: self.status.get("state") == "done", "end of the run")
        end = time.monotonic() + LONG
        while self.processes["up"].poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        assert self.processes["up"].returncode == 0, self.log("up")[-3000:]


def alive(mark):
    """Processes with this word in their command line."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(mark).encode() in place.read_bytes() and int(place.parent.name) != os.getpid():
                found.append(int(place.parent.name))
    return found
