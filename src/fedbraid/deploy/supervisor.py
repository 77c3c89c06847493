"""Processes of ours: started, watched, started again, and never left behind.

Every process runs this interpreter (`python -m fedbraid …`), whatever PATH says, and dies with its supervisor (on Linux, by
PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from fedbraid.deploy.backoff import Backoff
from fedbraid.deploy.troubles import say

STOP_TIMEOUT_S = 10.0
HEALTHY_S = 60.0  # a process that lived for so long starts again at once
EXIT_DONE, EXIT_USER_ERROR = 0, 2
MORTAL = """\
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    os.getppid() == int(sys.argv[1]) or sys.exit("the supervisor has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass
class Child:
    """A process, and how it is started."""

    name: str
    words: list[str]
    log: Path | None  # None: it writes where its supervisor does
    process: subprocess.Popen[bytes]
    since: float
    backoff: Backoff = field(default_factory=lambda: Backoff(0.5, 30.0))
    again: float = 0.0  # when it is started again

    def tail(self) -> str:
        """The end of its log."""
        if self.log is None:
            return ""
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace").strip()[-1500:]
        return ""


@dataclass
class Supervisor:
    """A context manager: whatever happens inside, SIGTERM included, every process that it started is ended."""

    logs: Path | None = None
    children: dict[str, Child] = field(default_factory=dict)
    _before: Callable[[int, FrameType | None], object] | int | None = None

    def __enter__(self) -> Supervisor:
        with contextlib.suppress(ValueError):  # not in the main thread
            self._before = signal.signal(signal.SIGTERM, _interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGTERM)
        for child in self.children.values():
            self._end(child)
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def start(self, name: str, *words: str) -> Child:
        """Run `fedbraid WORDS`."""
        command = [sys.executable, "-m", "fedbraid", *words]
        log = None if self.logs is None else self.logs / f"{name}.log"
        self.children[name] = Child(name, command, log, _spawn(command, log), time.monotonic())
        return self.children[name]

    def look(self) -> Child | None:
        """Start again what died; a process that has ended for good is returned: done, or with an error of its user's."""
        for child in self.children.values():
            code, now = child.process.poll(), time.monotonic()
            if code is None:
                continue
            if code in (EXIT_DONE, EXIT_USER_ERROR):
                return child
            if not child.again:
                if now - child.since > HEALTHY_S:
                    child.backoff.succeeded()
                wait = child.backoff.failed()
                child.again = now + wait
                say(f"{child.name} ended with exit code {code}; starting it again in {wait:.1f} s")
            elif now >= child.again:
                self._end(child)
                child.process, child.since, child.again = _spawn(child.words, child.log), now, 0.0
        return None

    def _end(self, child: Child) -> None:
        """End a process and everything that it started."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(STOP_TIMEOUT_S if child.process.poll() is None else 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()


def _spawn(words: Sequence[str], log: Path | None) -> subprocess.Popen[bytes]:
    mortal = [sys.executable, "-I", "-S", "-c", MORTAL, str(os.getpid()), *words]
    with contextlib.ExitStack() as stack:
        out = None if log is None else stack.enter_context(open(log, "ab"))
        return subprocess.Popen(
            mortal, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
