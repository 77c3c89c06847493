"""`fedbraid deploy node`: a node's processes, started, watched, started again, and never left behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fedbraid.deploy import worker
from fedbraid.deploy.backoff import Backoff
from fedbraid.deploy.keys import signed
from fedbraid.deploy.notes import say
from fedbraid.deploy.roster import NAME, is_name
from fedbraid.errors import ConfigError, InUseError, MissingExtra
from fedbraid.run.atomic_files import write_whole

HEALTHY = 60.0  # seconds after which a start counts as a success
MARK = "FEDBRAID_NODE"  # in the environment of every process that belongs to a node
LOOK = 0.5  # seconds between two looks at the processes


@dataclass
class Service:
    """A node: its key beside ca.crt and trusted.yaml, where the SuperLink is, and what `load` gets."""

    key: Path
    superlink: str
    config: Mapping[str, Any]  # what `load(node_config)` gets; `name` and `state` are ours
    backoff: Backoff = field(default_factory=lambda: Backoff(most=30.0))
    stopping: bool = False

    def __post_init__(self) -> None:
        if _tool("flower-supernode") is None:
            raise MissingExtra("deployment", "flower")
        for path in (self.key, self.ca, self.trusted):
            if not path.is_file():
                raise ConfigError(
                    f"{path} is missing; a node needs its key, ca.crt and trusted.yaml in one folder"
                )
        if not is_name(str(self.config["name"])) or self.config["name"] == ".":
            raise ConfigError(f"{self.config['name']!r} is no name for a node; {NAME}")
        state = Path(str(self.config["state"])).expanduser().resolve()
        self.home = state / ("." + re.sub(r"[^A-Za-z0-9_.-]", "_", str(self.config["name"])))
        self.mark = str(self.home)

    @property
    def ca(self) -> Path:
        return self.key.parent / "ca.crt"

    @property
    def trusted(self) -> Path:
        return self.key.parent / "trusted.yaml"

    def run(self) -> None:
        """Until SIGTERM or Ctrl-C. Whatever dies is started again, after what was left of it is ended."""
        with self._alone():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._stop)
            while not self.stopping:
                since = time.monotonic()
                why = self._once()
                if self.stopping:
                    break
                if time.monotonic() - since > HEALTHY:
                    self.backoff.succeeded()
                wait = self.backoff.failed()
                say(f"{why}; starting it again in {wait:.1f} s")
                self._sleep(wait)
        say("stopped")

    def _once(self) -> str:
        """Start everything and watch it: why it has to be started again."""
        sweep(self.mark)
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (why := self._knock()) is not None:
            return why
        with contextlib.ExitStack() as stack:
            children = {name: stack.enter_context(_ended(child)) for name, child in self._start().items()}
            say(f"{self.config['name']} is at {self.superlink}, process {children['flower-supernode'].pid}")
            while not self.stopping:
                for name, child in children.items():
                    if child.poll() is not None:
                        return f"{name} ended with exit code {child.returncode}"
                time.sleep(LOOK)
            return "told to stop"

    def _start(self) -> dict[str, subprocess.Popen[bytes]]:
        from fedbraid.deploy.trial import free_port

        at = f"127.0.0.1:{free_port()}"
        secret = worker.new_secret(self.home / "secret")
        given = " ".join(f"{k}={json.dumps(v)}" for k, v in self.config.items())
        node = ["--superlink", self.superlink, "--root-certificates", str(self.ca), "--node-config", given]
        node += ["--auth-supernode-private-key", str(self.key), "--trusted-entities", str(self.trusted)]
        node += ["--isolation", "process", "--host", "127.0.0.1", "--port", at.rpartition(":")[2]]
        node += ["--superexec-auth-secret-file", str(secret)]
        return {
            "flower-supernode": self._popen([sys.executable, *worker.SUPERNODE, *node]),
            "the worker": self._popen(worker.command(at, secret)),
        }

    def _popen(self, words: list[str]) -> subprocess.Popen[bytes]:
        path = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
        env = {
            "FLWR_HOME": str(self.home / "flower"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
            **os.environ, "PATH": path, MARK: self.mark,
        }  # fmt: skip
        return subprocess.Popen(
            worker.mortal(words), env=env, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def _knock(self) -> str | None:
        """Sign the node off that may have died without a word, so that it can come back at once: what is wrong."""
        import httpx
        from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse, DeactivateNodeRequest
        from google.protobuf.message import DecodeError

        from fedbraid.deploy.check import PROTOBUF, _context

        note = self.home / "node-id"
        headers, public = signed(self.key)

        def post(what: str, message: Any) -> Any:
            url, body = f"https://{self.superlink}/v1/fleet/{what}-node", message.SerializeToString()
            return client.post(url, content=body, headers=PROTOBUF | headers)

        try:
            with httpx.Client(verify=_context(self.key.parent), timeout=10.0) as client:
                if (last := _number(note)) is not None:
                    post("deactivate", DeactivateNodeRequest(node_id=last))
                answer = post("activate", ActivateNodeRequest(public_key=public, heartbeat_interval=30))
                if answer.status_code == 401:
                    return f"the SuperLink does not know {self.key.name}; the operator lets it in with: fedbraid deploy register"
                if answer.status_code != 200:
                    return f"the SuperLink still believes this node connected ({answer.status_code})"
                node = ActivateNodeResponse.FromString(answer.content).node_id
                write_whole(note, str(node).encode())
                post("deactivate", DeactivateNodeRequest(node_id=node))
        except (httpx.HTTPError, DecodeError) as error:
            return f"no SuperLink at {self.superlink}: {error}"
        return None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One service a name; when it goes, so does all that it started."""
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock: IO[str] = open(self.home / "lock", "w")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise InUseError(
                f"another service runs {self.config['name']!r} with this state; stop it first, or choose another name"
            ) from error
        try:
            yield
        finally:
            sweep(self.mark)
            lock.close()

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.stopping:
            time.sleep(min(LOOK, max(0.0, end - time.monotonic())))


@contextlib.contextmanager
def _ended(child: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """On the way out, ask it to end, and make it."""
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _number(note: Path) -> int | None:
    """What the file says, None where there is none or it is damaged."""
    try:
        found = int(note.read_text())
    except (OSError, ValueError):
        return None
    return found if 0 <= found < 2**64 else None


def sweep(mark: str) -> list[int]:
    """Kill what an earlier life of this node has left behind: which processes."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            pid = int(place.parent.name)
            if pid != os.getpid() and wanted in place.read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
                found.append(pid)
    return found


def _tool(name: str) -> str | None:
    return shutil.which(name, path=os.path.dirname(sys.executable)) or shutil.which(name)
