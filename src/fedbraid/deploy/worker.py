"""A node's tasks, one after another in one process, which keeps the app, the node's data and its gradient.

Flower's executor starts a process for every task, and each imports PyTorch and reads the data. This one takes its place:
tasks come by Flower's own protocol and secret, from a SuperNode that has checked the app's signature. Another app, or an
order that failed, gets a fresh process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fedbraid.deploy.notes import say

TOKEN = "FEDBRAID_TASK"  # in the environment of a fresh process: the task that it begins with
POLL = 0.2  # seconds between two looks for a task
AS_MODULE = ("-P", "-m", "fedbraid.deploy.worker")
SUPERNODE = ("-P", "-m", "fedbraid.deploy.supernode")  # whose tasks it does
PATIENCE = 60.0  # seconds that a SuperNode may be silent
MORTAL = """\
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    os.getppid() == int(sys.argv[1]) or sys.exit("whoever started this has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


def command(address: str, secret: Path) -> list[str]:
    """How a worker for the SuperNode at this address is started."""
    return [sys.executable, *AS_MODULE, address, str(secret)]


def mortal(words: Sequence[str]) -> list[str]:
    """The same command, which is killed when the process that starts it ends, however it does."""
    return [sys.executable, "-I", "-S", "-c", MORTAL, str(os.getpid()), *words]


def new_secret(path: Path) -> Path:
    """What a SuperNode knows its worker by."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))
    return path


@dataclass
class Worker:
    """What does the tasks of the SuperNode at this address."""

    address: str
    secret: bytes
    app: Any = None  # flwr.clientapp.ClientApp
    hash: str = ""  # of the bundle that it came in

    def run(self, token: str | None) -> None:
        """Until this process is ended, or there is no SuperNode any more."""
        import httpx

        lost: float | None = None  # since when there is no answer
        with self._connected() as link:
            while True:
                try:
                    token = token or self._next(link)
                    lost = None
                    if token:
                        token = self._do(token, link)
                    else:
                        time.sleep(POLL)
                except httpx.TransportError as error:
                    if lost is None:
                        lost = time.monotonic()
                        say(f"waiting for the SuperNode at {self.address}, {PATIENCE:g} s at most")
                    elif time.monotonic() - lost > PATIENCE:
                        why = f"no SuperNode at {self.address} for {PATIENCE:g} s: {error}"
                        raise SystemExit(why) from error
                    time.sleep(POLL)
                    token = None

    def _next(self, link: Any) -> str | None:
        """Take a task, if there is one; that of another app is the first of a fresh process."""
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType

        found = link.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if not found.HasField("task") or not found.token:
            return None
        if self.hash not in ("", found.task.fab_hash):
            afresh(f"another app, {found.task.fab_hash[:16]}", found.token)
        return str(found.token)

    def _do(self, token: str, main: Any) -> str | None:
        """As `flwr-clientapp` does it, but that the app is loaded once: another task, if this one was overtaken."""
        import httpx
        from flwr.app import Message
        from flwr.app.error import Error
        from flwr.common.constant import ErrorCode, SubStatus
        from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
        from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

        failed = ""
        with self._connected(token) as link, _beating(link):
            got, newer = self._pulled(link, main)
            if got is None:
                push_task_output(
                    link, None, SubStatus.FAILED, "it could not be taken"
                )  # so that nobody waits
                return newer
            message, context, run, fab = got
            try:
                reply = self._loaded(run, fab)(message=message, context=context)
            except Exception as error:
                failed = f"{type(error)}:<'{error}'>"
                traceback.print_exception(error)
                reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, failed), reply_to=message)
            try:
                push_message(link, reply, context)
                push_task_output(link, context, SubStatus.FAILED if failed else SubStatus.COMPLETED, failed)
            except (httpx.HTTPStatusError, ObjectPushError) as error:
                say(f"an answer was not taken: {error}")
                push_task_output(link, None, SubStatus.FAILED, str(error))
        if failed:
            afresh("an order failed")
        return None

    def _pulled(self, link: Any, main: Any) -> tuple[Any, str | None]:
        """A task's input; or another task, which a SuperNode has only when it has given this one up, without a word."""
        got: list[Any] = []
        thread = threading.Thread(target=_pull, args=(link, got), daemon=True)
        thread.start()
        thread.join(POLL)
        while thread.is_alive():
            if newer := self._next(main):
                say("a task was given up, as when its run has ended; taking the next")
                return None, newer
            thread.join(POLL)
        return (got[0] if got else None), None

    def _loaded(self, run: Any, fab: Any) -> Any:
        from flwr.cli.install import install_from_fab
        from flwr.clientapp.utils import get_load_client_app_fn

        if self.hash != fab.hash_str:
            install_from_fab(fab.content, skip_prompt=True)
            load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
            self.app, self.hash = load(run.fab_id, run.fab_version, fab.hash_str), fab.hash_str
        return self.app

    def _connected(self, token: str | None = None) -> Any:
        """The SuperNode's runtime API, for a task, or to take one."""
        from flwr.supercore.interceptors import (
            RuntimeTokenHttpInterceptor,
            RuntimeVersionHttpInterceptor,
            SuperExecAuthHttpInterceptor,
        )
        from flwr.supercore.runtime import RuntimeHttpClient

        methods = {"/flwr.proto.Runtime/AcquireTask"}
        who = (
            SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods=methods)
            if token is None
            else RuntimeTokenHttpInterceptor(token)
        )
        name = RuntimeVersionHttpInterceptor(
            component_name="SuperExec" if token is None else "flwr-clientapp"
        )
        return contextlib.closing(
            RuntimeHttpClient.from_server_address(
                server_address=self.address, insecure=True, root_certificates=None, interceptors=[name, who]
            )
        )


def afresh(why: str, token: str | None = None) -> NoReturn:
    """The same process with nothing in its memory, but for the task that it begins with."""
    say(f"{why}: starting afresh")
    env = dict(os.environ) | ({TOKEN: token} if token else {})
    os.execve(sys.executable, [sys.executable, *AS_MODULE, *sys.argv[1:]], env)


def _pull(link: Any, got: list[Any]) -> None:
    from flwr.supernode.runtime.run_clientapp import pull_task_input

    try:
        got.append(pull_task_input(link))
    except Exception as error:  # it has expired, or another has overtaken it
        say(f"a task could not be taken: {error!r}")


@contextlib.contextmanager
def _beating(link: Any) -> Iterator[None]:
    """Let the SuperNode know that its task is in hand."""
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest
    from flwr.supercore.heartbeat import HeartbeatSender

    def beat() -> bool:
        with contextlib.suppress(Exception):  # of a task that is over, as will be seen when it is answered
            link.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        return True

    heart = HeartbeatSender(beat)
    heart.start()
    try:
        yield
    finally:
        heart.stop()


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("secret", type=Path)
    asked = parser.parse_args(words)
    token = os.environ.pop(TOKEN, None)
    if token is None:
        import fedbraid.deploy.node  # noqa: F401  so that the first order need not wait for it
    Worker(asked.address, asked.secret.read_bytes()).run(token)


if __name__ == "__main__":
    main(sys.argv[1:])
