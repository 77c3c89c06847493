"""The broker: an installed nats-server with a configuration of ours, started, watched, reloaded and ended.

Policy. fedbraid never downloads a broker. The one on PATH is used; 2.9 (Debian 12) is the oldest. A broker that still
runs after its supervisor died is adopted, so that nodes stay connected; it ends when a supervisor is told to stop.

What the configuration enforces. Each node has one line of permissions: it publishes its answers and fetches the model,
and it subscribes to its orders and replies, nothing else. A connection proves its key within HANDSHAKE_S or is closed;
connections, payloads, subscriptions and stored bytes are bounded. There is no limit per address: that is a firewall's.

Two accounts. The broker writes its replies wherever a request says, and does not ask whether the sender may write there:
in one account, a node that fetches the model with a subject of the model as the address of the reply overwrites the
model. So streams live in an account of the server's, and of it nodes see three subjects.

Durability. An acknowledged upload survives the death of the broker's process. From 2.10 on (`sync_interval: always`) it
also survives a power cut; before, the last two minutes may be lost, and the server asks for such an upload again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedbraid.deploy import credentials
from fedbraid.deploy.backoff import Backoff
from fedbraid.deploy.transport import EDGE, ORDER_LIMIT, Refusal
from fedbraid.deploy.troubles import plain, say
from fedbraid.errors import ConfigError, EngineError
from fedbraid.run.atomic_files import make_folder, write_atomic

OLDEST = (2, 9, 0)
HANDSHAKE_S = 5
FETCH = "$JS.API.DIRECT.GET.MODEL.fb.m.>"
READ = "$JS.API.DIRECT.GET.UP"
PAYLOAD_LIMIT = ORDER_LIMIT + 8192  # a chunk or an order, with its headers
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
LOG_BYTES = 16 * 1024 * 1024
VIOLATION = re.compile(r"\[ERR\] (\S+) .*?((?:Publish|Subscription) Violation.*|authentication error.*)")
KEY = re.compile(r"\bU[A-Z2-7]{55}\b")


@dataclass(frozen=True)
class BrokerLimits:
    """What a broker grants: connections beside the nodes', and the bytes that may wait for the server's commit."""

    spare_connections: int = 64
    store_bytes: int = 64 * 1024**3
    pending_bytes: int = 16 * 1024**2  # to one connection that does not read


@dataclass
class Broker:
    """A nats-server with the keys of one folder, its state in another."""

    keys: Path
    state: Path
    host: str = "127.0.0.1"
    port: int = 4222
    limits: BrokerLimits = field(default_factory=BrokerLimits)
    backoff: Backoff = field(default_factory=lambda: Backoff(first=0.2, most=30.0))

    def __post_init__(self) -> None:
        self.program, self.version = find_program()
        self.keys, self.state = self.keys.resolve(), self.state.resolve()
        self.config, self.pid_file, self.log = (self.state / f"nats.{end}" for end in ("conf", "pid", "log"))
        self.errors = self.state / "nats.err"
        self.stopping = threading.Event()
        self.watcher: threading.Thread | None = None
        self.process: subprocess.Popen[bytes] | None = None

    # Files --------------------------------------------------------------------------------------------

    def write(self) -> None:
        """The configuration and the nodes' permissions, from the keys as they are now."""
        if loose := credentials.loose_files(self.keys):
            names = " ".join(str(path) for path in loose)
            raise ConfigError(f"secrets can be read by other users of this machine; use: chmod 600 {names}")
        for name in ("server.crt", "server.key", "server.nk", "monitor.nk", "nodes.json"):
            if not (self.keys / name).is_file():
                raise ConfigError(
                    f"{self.keys / name} is missing; make it with: fedbraid deploy keys {self.keys}"
                )
        make_folder(self.state)
        nodes = credentials.read_nodes(self.keys)
        server = credentials.public_key(self.keys / "server.nk")
        users = [_user(server, ["fb.>", "$JS.>"], ["_INBOX.server.>"])]
        write_atomic(self.state / "server.conf", _users(users))
        write_atomic(self.state / "nodes.conf", _users(_node(*node) for node in nodes.items()))
        write_atomic(self.config, self._text(len(nodes)).encode())

    def _text(self, nodes: int) -> str:
        sync = ', sync_interval: "always"' if self.syncs else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        monitor = credentials.public_key(self.keys / "monitor.nk")
        return f"""\
server_name: "fedbraid"
listen: {json.dumps(f"{host}:{self.port}")}
pid_file: {json.dumps(str(self.pid_file))}
log_file: {json.dumps(str(self.log))}
logfile_size_limit: {LOG_BYTES}
tls {{ cert_file: {json.dumps(str(self.keys / "server.crt"))}, key_file: {json.dumps(str(self.keys / "server.key"))}, timeout: {HANDSHAKE_S} }}
authorization {{ timeout: {HANDSHAKE_S} }}
max_connections: {2 * nodes + self.limits.spare_connections}
max_payload: {PAYLOAD_LIMIT}
max_pending: {self.limits.pending_bytes}
max_subscriptions: 64
max_control_line: 1024
write_deadline: "10s"
ping_interval: "2s"
ping_max: 2
jetstream {{ store_dir: {json.dumps(str(self.state))}, max_mem: 16MB, max_file: {self.limits.store_bytes}{sync} }}
system_account: SYS
accounts {{
  SYS {{ users: [{{ nkey: {monitor} }}] }}
  SERVER {{
    jetstream: enabled
    exports: [{{ service: "{FETCH}" }}, {{ service: "{READ}" }}, {{ service: "fb.r.*" }}, {{ stream: "fb.o.*" }}]
    include "server.conf"
  }}
  NODES {{
    imports: [{_imported("service", FETCH)}, {_imported("service", READ)}, {_imported("service", "fb.r.*")}, {_imported("stream", "fb.o.*")}]
    include "nodes.conf"
  }}
}}
"""

    # Durability ---------------------------------------------------------------------------------------

    @property
    def syncs(self) -> bool:
        """Whether this broker can write to the disk itself before it acknowledges."""
        return self.version >= (2, 10, 0)

    def durability(self) -> str:
        version = ".".join(map(str, self.version))
        if self.syncs:
            return f"nats-server {version}: acknowledged uploads survive a power cut (sync_interval: always)"
        return (
            f"nats-server {version}: acknowledged uploads survive a crash of the broker; after a power cut the server asks"
            " again for those of the last two minutes (2.10 and later write each to the disk first)"
        )

    # The process --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, or adopt the one that runs, and start it again whenever it dies."""
        self.write()
        if (pid := self._running()) is not None:
            os.kill(pid, signal.SIGHUP)
        else:
            self._spawn()
        self._wait_until_ready()
        self.stopping.clear()
        self.watcher = threading.Thread(target=self._watch, name="broker", daemon=True)
        self.watcher.start()

    def reload(self) -> None:
        """Apply the keys as they are now: a node that is no longer registered is disconnected at once."""
        self.write()
        pid = self._running()
        if pid is None:
            raise EngineError(f"no broker runs with {self.config}; start it with: fedbraid deploy up")
        before = self.log.stat().st_size if self.log.exists() else 0
        os.kill(pid, signal.SIGHUP)
        _until(lambda: self._reloaded(before), START_TIMEOUT_S, f"the broker did not reload; see {self.log}")

    def stop(self) -> None:
        """End it, whoever started it."""
        self.stopping.set()
        if self.watcher is not None:
            self.watcher.join(5)
        pid = self._running()
        if pid is None:
            return
        os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(EngineError):
            _until(lambda: self._running() is None, STOP_TIMEOUT_S, "")
        if (pid := self._running()) is not None:
            os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(STOP_TIMEOUT_S)

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _spawn(self) -> None:
        with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                raise EngineError(
                    f"cannot listen on {self.host}:{self.port}: {error.strerror}; use another port, or end what listens"
                    " there (Debian starts one with the package: systemctl disable --now nats-server)"
                ) from error
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):  # macOS reports no limit and refuses to set none
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            with open(self.errors, "wb") as errors:  # not a pipe: it may outlive its reader
                self.process = subprocess.Popen(
                    [self.program, "-c", str(self.config)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=errors, start_new_session=True,
                )  # fmt: skip
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def _watch(self) -> None:
        while not self.stopping.wait(0.2):
            if self._running() is not None:
                continue
            wait = self.backoff.failed()
            say(f"the broker ended; starting it again in {wait:.1f} s (its log: {self.log})")
            if self.stopping.wait(wait):
                return
            with contextlib.suppress(EngineError, OSError):
                self._spawn()
                self._wait_until_ready()
                self.backoff.succeeded()

    @property
    def is_running(self) -> bool:
        return self._running() is not None

    def _running(self) -> int | None:
        """The process id of the broker with this configuration."""
        if self.process is not None and self.process.poll() is None:
            return self.process.pid
        try:
            pid = int(self.pid_file.read_text())
        except (OSError, ValueError):
            return None
        return pid if str(self.config) in _command_of(pid) else None

    def _wait_until_ready(self) -> None:
        def ready() -> bool:
            if self.process is not None and self.process.poll() is not None:
                told = plain(self.errors.read_text(errors="replace")[:2000].strip())
                raise EngineError(f"the broker did not start: {told or self.log}")
            return answers(self.host, self.port)

        _until(
            ready, START_TIMEOUT_S, f"the broker does not answer at {self.host}:{self.port}; see {self.log}"
        )

    def _reloaded(self, before: int) -> bool:
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(before if before <= file.seek(0, os.SEEK_END) else 0)
            return b"Reloaded server configuration" in file.read()
        return False


@dataclass
class BrokerLog:
    """What a broker refused, read off its log from where the last look ended."""

    path: Path
    offset: int = 0

    def refusals(self, names: dict[str, str]) -> Iterator[Refusal]:
        """`names`: nodes' names by their public keys."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(self.offset if self.offset <= size else 0)
                lines = file.read(LOG_BYTES).splitlines(keepends=True)
                self.offset = file.tell()
        except OSError:
            return
        for line in lines:
            if found := VIOLATION.search(line.decode(errors="replace")):
                key = KEY.search(found[2])
                sender = names.get(key[0], key[0]) if key else found[1]
                yield Refusal(sender, plain(found[2].replace(key[0], sender) if key else found[2])[:300])


def find_program() -> tuple[str, tuple[int, int, int]]:
    """The installed nats-server and its version."""
    program = shutil.which("nats-server", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if program is None:
        raise EngineError(
            "a fleet needs the program nats-server, which is not installed; use: apt-get install nats-server, or the"
            " release of nats.io"
        )
    told = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=20, check=False
    ).stdout
    found = re.search(r"v?(\d+)\.(\d+)\.(\d+)", told)
    version = tuple(map(int, found.groups())) if found else (0, 0, 0)
    if version < OLDEST:
        raise EngineError(
            f"{program} must be version 2.9 or later, got {told.strip()!r}; install a newer one"
        )
    return program, (version[0], version[1], version[2])


def _command_of(pid: int, proc: Path = Path("/proc")) -> str:
    """The command line of a process, "" where it has ended; systems without /proc ask ps."""
    try:
        if proc.is_dir():
            return (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        words = ["ps", "-ww", "-o", "args=", "-p", str(pid)]
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def answers(host: str, port: int, timeout: float = 1.0) -> bool:
    """Whether a NATS broker greets there."""
    try:
        with socket.create_connection((host, port), timeout=timeout) as link:
            return link.recv(5) == b"INFO "
    except OSError:
        return False


def _users(users: Iterable[str]) -> bytes:
    return ("users: [\n" + "\n".join(users) + "\n]\n").encode()


def _node(name: str, key: str) -> str:
    reads = [READ] if name.startswith(EDGE) else []  # an edge reads uploads
    return _user(key, [f"fb.r.{name}", FETCH, *reads], [f"fb.o.{name}", f"_INBOX.{name}.>"])


def _imported(kind: str, subject: str) -> str:
    return f'{{ {kind}: {{ account: SERVER, subject: "{subject}" }} }}'


def _user(key: str, publish: Sequence[str], subscribe: Sequence[str]) -> str:
    about = f"publish: {{allow: {json.dumps(publish)}}}, subscribe: {{allow: {json.dumps(subscribe)}}}"
    return f"{{ nkey: {key}, permissions: {{ {about} }} }}"


def _until(done: Callable[[], bool], limit: float, otherwise: str) -> None:
    end = time.monotonic() + limit
    while not done():
        if time.monotonic() > end:
            raise EngineError(otherwise)
        time.sleep(0.02)
