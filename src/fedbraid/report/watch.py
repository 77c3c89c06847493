"""A live report: the page on localhost, read from the run's folder at every request."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any

from fedbraid.errors import ConfigError, FedbraidError, reading
from fedbraid.report import page
from fedbraid.report.collect import Collection, collect

MOST = 64  # connections at a time


class Watch:
    """The page's present data; the task is loaded once."""

    def __init__(self, paths: Sequence[Path], target: float | None = None) -> None:
        self.paths, self.target, self.lock = list(paths), target, Lock()
        self.found: Collection | None = None
        self.refresh()

    def refresh(self) -> dict[str, Any]:
        with self.lock, reading(", ".join(map(str, self.paths))):
            task_summary, why = (
                (None, "") if self.found is None else (self.found.task_summary, self.found.why)
            )
            self.found = collect(self.paths, self.target, unfinished=True, task_summary=task_summary)
            self.found.why = self.found.why or why
            return page.describe(self.found, live=True)


class Server(ThreadingHTTPServer):
    """Answers GET for the page and its data only. Port 0 picks any free port."""

    daemon_threads = True

    def __init__(self, watch: Watch, host: str = "127.0.0.1", port: int = 8765) -> None:
        self.watch, self.host, self.slots = watch, host, BoundedSemaphore(MOST)
        try:
            super().__init__((host, port), _Answer)
        except (OSError, OverflowError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"port {port} on {host} cannot be used ({why}); give another with --port"
            ) from error

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.slots.acquire(blocking=False):
            return super().process_request(request, client_address)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # the client has disconnected
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.server_address[1]}/"


class _Answer(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds that a connection may stay silent

    def do_GET(self) -> None:
        if not self._is_local_request():
            return self._say(403, "text/plain", "this page is for this machine only")
        path = self.path.partition("?")[0]
        if path not in ("/", "/data.json"):
            return self._say(404, "text/plain", "there is / and /data.json")
        try:
            data = self.server.watch.refresh()
        except FedbraidError as error:  # such as a folder that was removed
            return self._say(503, "text/plain", str(error))
        if path == "/":
            return self._say(200, "text/html", page.render(data))
        self._say(200, "application/json", json.dumps(page.finite(data), separators=(",", ":")))

    do_HEAD = do_GET

    def _is_local_request(self) -> bool:
        """On loopback, refuse other host names, so that no web site can point its domain at this page."""
        host = self.headers.get("Host", "")
        return not _loopback(self.server.host) or _loopback(re.sub(r":\d*$", "", host).strip("[]"))

    def _say(self, code: int, kind: str, text: str) -> None:
        body = text.encode(errors="replace")
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing: the terminal is the user's."""


def _loopback(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host.lower() == "localhost"


def serve(
    paths: Sequence[str | os.PathLike[str]],
    host: str = "127.0.0.1",
    port: int = 8765,
    target: float | None = None,
) -> Server:
    """A server for these runs; call its `serve_forever()`."""
    return Server(Watch([Path(p) for p in paths], target), host, port)
