"""A whole deployment on this machine: a SuperLink and SuperNodes on loopback, started, watched and ended."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbraid.deploy import worker
from fedbraid.deploy.operator import Operator
from fedbraid.deploy.settings import Settings
from fedbraid.errors import ConfigError, EngineError, MissingExtra
from fedbraid.run.checkpoint import Folder, Record

PATIENCE = 120.0  # seconds that a process may take to start


@dataclass
class Flower:
    """Flower's processes on loopback. With `keys`, over TLS and with authenticated nodes.

    A context manager: whatever happens inside, SIGTERM included, every process that was started is ended.
    """

    scratch: Path
    keys: Path | None = None
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int = 0
    control: int = 0  # the operator's port, where there are keys
    _before: Any = None  # what SIGTERM did

    def __enter__(self) -> Flower:
        for tool in ("flower-superlink", "flower-supernode", "flwr"):
            if _tool(tool) is None:
                raise MissingExtra("deployment", "flower")
        self.scratch.mkdir(parents=True, exist_ok=True)
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, _stop)
        return self

    def __exit__(self, *_: object) -> None:
        for name in [n for n in reversed(self.processes) if not n.endswith(".worker")]:
            self.end(name)
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def link(self) -> None:
        """Start the SuperLink, on the same ports as before if there was one."""
        self.port, self.control = self.port or free_port(), self.control or free_port()
        database = ["--database", str(self.scratch / "superlink.db")]
        if self.keys is None:
            words = ["--host", "127.0.0.1", "--port", str(self.port), "--insecure"]
            words += ["--disable-runtime-dependency-installation", *database]
            self.start("superlink", "flower-superlink", words)
        else:
            words = ["deploy", "link", str(self.keys), "--listen", f"127.0.0.1:{self.port}"]
            words += ["--control", f"127.0.0.1:{self.control}", *database]
            self.start("superlink", "fedbraid", words)
        self.wait_for_port()
        if self.keys is None:
            self._connection()

    @property
    def operator(self) -> Operator:
        """Whoever may register nodes and start runs, where there are keys."""
        assert self.keys is not None
        return Operator(self.keys, f"127.0.0.1:{self.control}")

    def wait_for_port(self) -> None:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            self.check("superlink")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.2)
        raise EngineError(f"the SuperLink does not listen after {PATIENCE:g} s; see {self.log('superlink')}")

    def node(
        self, name: str, config: dict[str, Any], key: Path | None = None, words: Sequence[str] = ()
    ) -> None:
        """Start a SuperNode with this node configuration, and the worker that does its tasks; again, if it died."""
        for old in (name, f"{name}.worker"):
            if (process := self.processes.pop(old, None)) is not None:
                process.kill()
                process.wait()
        given = " ".join(f"{k}={json.dumps(v)}" for k, v in config.items())
        port, secret = free_port(), worker.new_secret(self.scratch / f"{name}.secret")
        arguments = [
            "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", str(port), "--node-config", given,
            "--isolation", "process", "--superexec-auth-secret-file", str(secret),
        ]  # fmt: skip
        if not words:
            words = ["--insecure"] if self.keys is None else self._trusting(self.keys)
        if key is not None:
            words = [*words, "--auth-supernode-private-key", str(key)]
        self._popen(name, [sys.executable, *worker.SUPERNODE, *arguments, *words], 0)
        self._popen(f"{name}.worker", worker.command(f"127.0.0.1:{port}", secret), self.processes[name].pid)

    @staticmethod
    def _trusting(keys: Path) -> list[str]:
        return ["--root-certificates", str(keys / "ca.crt"), "--trusted-entities", str(keys / "trusted.yaml")]

    def submit(self, app: Path, config: dict[str, Any]) -> str:
        """Hand an app to the SuperLink: the run's id."""
        if self.keys is not None:
            with self.operator as operator:
                return str(operator.start(app, config))
        given = " ".join(f"{k}={_toml(v)}" for k, v in config.items())
        answer = self.flwr(
            "run", str(app), "trial", "--format", "json", *(["--run-config", given] if given else [])
        )
        found = json.loads(answer[answer.index("{") :])
        if not found.get("success"):
            raise EngineError(f"Flower did not take the app: {answer.strip()[-2000:]}")
        return str(found["run-id"])

    def ended(self, run: str) -> str | None:
        """Why Flower says that a run is over, None while it is not."""
        answer = self.flwr("ls", "trial", "--run-id", run, "--format", "json")
        about = json.loads(answer[answer.index("{") :])["runs"][0]
        if not about["status"].startswith("finished"):
            return None
        return str(about["status-details"] or about["status"])

    def flwr(self, *words: str) -> str:
        tool = _tool("flwr")
        assert tool is not None
        try:
            done = subprocess.run(
                [tool, *words],
                env=self._environment("flwr"),
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired as error:
            raise EngineError(f"flwr {' '.join(words[:2])} took more than {PATIENCE:g} s") from error
        if done.returncode:
            raise EngineError(
                f"flwr {' '.join(words[:2])} failed:\n{(done.stdout + done.stderr).strip()[-2000:]}"
            )
        return done.stdout

    # Processes ----------------------------------------------------------------------------------------

    def start(self, name: str, tool: str, words: Sequence[str]) -> None:
        found = _tool(tool)
        assert found is not None
        self._popen(name, [found, *words], 0)

    def _popen(self, name: str, words: Sequence[str], group: int) -> None:
        with open(self.log(name), "ab") as log:
            self.processes[name] = subprocess.Popen(
                worker.mortal(words), env=self._environment(name), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=self.scratch, process_group=group,
            )  # fmt: skip

    def check(self, name: str) -> None:
        """Complain if a process has ended."""
        if self.processes[name].poll() is not None:
            tail = self.log(name).read_text(errors="replace").strip()[-1500:]
            raise EngineError(f"{name} ended with exit code {self.processes[name].returncode}:\n{tail}")

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End a process and everything that it started."""
        process, helper = self.processes.pop(name), self.processes.pop(f"{name}.worker", None)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0 if how == signal.SIGKILL else 5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if helper is not None:  # which is of the same group
            helper.wait()

    def log(self, name: str) -> Path:
        return self.scratch / f"{name}.log"

    def _environment(self, name: str) -> dict[str, str]:
        """Flower's home of this process alone, no telemetry, quick answers, and no colours (notebooks force them)."""
        bin_ = os.path.dirname(sys.executable)
        kept = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "CLICOLOR_FORCE")}
        return {
            **kept, "FLWR_HOME": str(self.scratch / "home" / name), "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            "PATH": bin_ + os.pathsep + os.environ.get("PATH", ""),
        }  # fmt: skip

    def _connection(self) -> None:
        home = self.scratch / "home" / "flwr"
        home.mkdir(parents=True, exist_ok=True)
        lines = [
            "[superlink]",
            'default = "trial"',
            "[superlink.trial]",
            f'address = "127.0.0.1:{self.port}"',
        ]
        lines += ["insecure = true"]
        (home / "config.toml").write_text("\n".join(lines) + "\n")


def trial(
    app: Path, nodes: int, settings: dict[str, Any], tell: Callable[[Record, list[Record]], None]
) -> Folder:
    """Run an app to its end with this many nodes on loopback: the folder of the run.

    `tell(status, new records)` is called whenever there is something new to show.
    """
    out = Path(settings.get("out") or app / "runs" / f"trial-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    config = {"nodes": nodes, "minimum": nodes, "poll": 0.2, "identity": "name", **settings, "out": str(out)}
    checked(app, config)
    (out / "status.json").unlink(missing_ok=True)  # that of the run which this one continues
    scratch = Path(tempfile.mkdtemp(prefix="fedbraid-trial-"))
    try:
        with Flower(scratch) as flower:
            flower.link()
            for i in range(nodes):
                about = {
                    "name": f"node-{i}",
                    "client": i,
                    "share": i,
                    "shares": nodes,
                    "state": str(out / "nodes"),
                }
                flower.node(f"node-{i}", about)
            run = flower.submit(app, config)
            folder = Folder(out)
            for status, records in watch(flower, folder, run):
                tell(status, records)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def checked(app: Path, config: dict[str, Any]) -> None:
    """What cannot be read is better said before anything is started."""
    if not (app / "pyproject.toml").exists():
        raise ConfigError(f"{app} holds no app; make one with: fedbraid deploy init {app}")
    about = _written(app)
    asked = Settings.read(about.get("config", {}) | config)
    asked.what(), asked.when()
    for part in ("serverapp", "clientapp"):
        _check_part(app, str(about.get("components", {}).get(part, "")), part)


def _check_part(app: Path, reference: str, part: str) -> None:
    """Flower finds the halves of an app by reading the file, where each must have a line of its own."""
    module, colon, name = reference.partition(":")
    path = app / f"{module.replace('.', '/')}.py"
    if not colon or not path.is_file():
        raise ConfigError(
            f"{app / 'pyproject.toml'} says {part} = {reference!r}, which names no file here; write {part} ="
            f' "fleet:{part.removesuffix("app")}"'
        )
    try:
        lines = ast.walk(ast.parse(path.read_text()))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    targets = [target for line in lines if isinstance(line, ast.Assign) for target in line.targets]
    if not any(isinstance(target, ast.Name) and target.id == name for target in targets):
        raise ConfigError(
            f"{path} has no line that gives {name} alone a value, and Flower looks for one; write"
            f" {name} = apps.{part.removesuffix('app')}"
        )


def watch(flower: Flower, folder: Folder, run: str) -> Iterator[tuple[Record, list[Record]]]:
    """What is new in a run's folder, until the run has ended."""
    seen, since = 0, time.monotonic()
    while True:
        for name in list(flower.processes):
            flower.check(name)
        status = read_status(folder)
        records = list(folder.records())
        yield status, records[seen:]
        seen = len(records)
        if status.get("state") == "failed":
            raise EngineError(f"the run failed: {status['error']}")
        if status.get("state") == "done":
            return
        why = _death(flower, run, status, since)
        if why is not None and read_status(folder).get("state") not in ("done", "failed"):
            raise EngineError(why)
        time.sleep(0.3)


def _death(flower: Flower, run: str, status: Record, since: float) -> str | None:
    """How the server ended without a word in its status file, None while it lives."""
    if status:
        alive = _alive(int(status["pid"]))
        return None if alive else f"the server died; its log ends:\n{_tail(flower.log('superlink'))}"
    if (why := flower.ended(run)) is not None:
        return f"the server did not start: {why}"
    if time.monotonic() - since > PATIENCE:
        return f"the server did not start in {PATIENCE:g} s; its log ends:\n{_tail(flower.log('superlink'))}"
    return None


def read_status(folder: Folder) -> Record:
    try:
        status: Record = json.loads((folder.path / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return status


def _written(app: Path) -> dict[str, Any]:
    """What an app's pyproject.toml says of it."""
    try:
        found = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{app / 'pyproject.toml'} is no Flower app ({error!r}); compare it with what this makes:"
            " fedbraid deploy init"
        ) from error
    return dict(found)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _tool(name: str) -> str | None:
    return shutil.which(name, path=os.path.dirname(sys.executable)) or shutil.which(name)


def _tail(path: Path) -> str:
    return path.read_text(errors="replace").strip()[-1500:]


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _toml(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, float) else repr(value)
