"""A NATS client that an attacker would write: it says what it is told to, whatever the broker permits."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import time
from pathlib import Path
from typing import Any, NamedTuple

import nkeys


class Raw(NamedTuple):
    """A message as the broker wrote it."""

    subject: str
    reply: str
    headers: str
    body: bytes


class RawClient:
    """One connection: `errors` has the broker's -ERR lines, `messages` what it delivered."""

    def __init__(self, port: int, ca: Path, seed: str | None = None, **login: Any) -> None:
        self.errors: list[str] = []
        self.messages: list[Raw] = []
        self.closed = False
        self.buffer = b""
        plain = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.socket: socket.socket = plain
        self.info = json.loads(self._line().removeprefix(b"INFO "))
        self.socket = ssl.create_default_context(cafile=str(ca)).wrap_socket(
            plain, server_hostname="127.0.0.1"
        )
        about = {
            "verbose": False,
            "pedantic": False,
            "headers": True,
            "no_responders": True,
            "tls_required": True,
        }
        self.login: dict[str, Any] = {}
        if seed is not None:
            pair = nkeys.from_seed(bytearray(seed.encode()))
            nonce = self.info["nonce"].encode()
            self.login = {
                "nkey": pair.public_key.decode(),
                "sig": base64.b64encode(pair.sign(nonce)).decode(),
            }
        self.send(b"CONNECT " + json.dumps(about | self.login | login).encode() + b"\r\n")
        self.flush()
        if self.closed:
            self.socket.close()

    def send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except OSError:
            self.closed = True

    def publish(
        self, subject: str, body: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        words = [subject, reply] if reply else [subject]
        if headers is None:
            self.send(f"PUB {' '.join(words)} {len(body)}\r\n".encode() + body + b"\r\n")
            return
        head = "NATS/1.0\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n"
        sizes = f"{len(head)} {len(head) + len(body)}"
        self.send(f"HPUB {' '.join(words)} {sizes}\r\n{head}".encode() + body + b"\r\n")

    def subscribe(self, subject: str, sid: int = 1) -> None:
        self.send(f"SUB {subject} {sid}\r\n".encode())

    def flush(self, limit: float = 20.0) -> RawClient:
        """Read until the broker has answered a PING, or has closed the connection."""
        self.send(b"PING\r\n")
        self.read(limit, until=b"PONG")
        return self

    def read(self, limit: float, until: bytes | None = None) -> None:
        end = time.monotonic() + limit
        while not self.closed:
            self.socket.settimeout(max(0.01, end - time.monotonic()))
            try:
                line = self._line()
            except OSError as error:
                self.closed = self.closed or not isinstance(error, TimeoutError)
                return
            if line.startswith(b"-ERR"):
                self.errors.append(line.decode())
            elif line == b"PING":
                self.send(b"PONG\r\n")
            elif line.startswith((b"MSG ", b"HMSG ")):
                self._message(line)
            if until is not None and line == until:
                return

    def close(self) -> None:
        self.socket.close()

    def _message(self, line: bytes) -> None:
        kind, subject, _, *rest = line.decode().split()
        total = int(rest[-1])
        head = int(rest[-2]) if kind == "HMSG" else 0
        reply = rest[0] if len(rest) > (2 if kind == "HMSG" else 1) else ""
        data = self._exactly(total + 2)[:total]
        self.messages.append(Raw(subject, reply, data[:head].decode(), data[head:]))

    def _line(self) -> bytes:
        while b"\r\n" not in self.buffer:
            self._more()
        line, _, self.buffer = self.buffer.partition(b"\r\n")
        return line

    def _exactly(self, n: int) -> bytes:
        while len(self.buffer) < n:
            self._more()
        data, self.buffer = self.buffer[:n], self.buffer[n:]
        return data

    def _more(self) -> None:
        found = self.socket.recv(65536)
        if not found:
            self.closed = True
            raise ConnectionError("the broker closed the connection")
        self.buffer += found
