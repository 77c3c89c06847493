"""A connection to a NATS broker: asyncio on one thread, methods for all others, a limit on every wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fedbraid.deploy import credentials
from fedbraid.deploy.backoff import Backoff
from fedbraid.deploy.transport import ModelReference, check_name, digest
from fedbraid.errors import EngineError, MissingExtra, WireError

REQUEST_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 15.0
JOB, PART, DIGEST, SIZE, ID = "Fb-Job", "Fb-Part", "Fb-Digest", "Fb-Size", "Nats-Msg-Id"
CHUNK_BYTES = 512 * 1024
WINDOW = 4  # chunks on their way at once

T = TypeVar("T")
logging.getLogger("asyncio").addFilter(
    lambda record: "eof_received" not in str(record.msg)
)  # at each TLS connection's end


@dataclass
class Connection:
    """A broker's connection and the thread that runs its loop."""

    url: str
    key: Path
    ca: Path
    on_change: Callable[[bool], Coroutine[Any, Any, None]] | None = None
    client: Any = None

    def __post_init__(self) -> None:
        try:
            import nats
        except ImportError as error:
            raise MissingExtra("a fleet", "nats") from error
        self.name, seed = credentials.read_key(self.key)
        self.client = nats.NATS()
        self.closed = False
        self.requests: set[asyncio.Future[Any]] = set()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name=f"nats-{self.name}", daemon=True)
        self.thread.start()
        try:
            self.call(self._connect(seed), CONNECT_TIMEOUT_S + 5)
        except Exception as error:
            self.close()
            raise EngineError(
                f"cannot connect to the broker at {self.url} as {self.name}: {error or type(error).__name__}; check that it"
                " runs, that ca.crt is its CA's, and that the key is registered"
            ) from error

    def call(self, work: Coroutine[Any, Any, T], limit: float) -> T:
        """Run on the loop's thread and wait for it."""
        if self.closed:
            work.close()
            raise EngineError("this connection was closed; open another")
        task = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return task.result(limit)
        except futures.TimeoutError:
            task.cancel()
            raise

    def insist(self, what: str, seconds: float, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run it, and again while the broker is away or refuses, for so long."""
        end, backoff = time.monotonic() + seconds, Backoff(0.2, 5.0)
        while True:
            left = end - time.monotonic()
            try:
                return self.call(work(), max(left, 1.0))
            except WireError:
                raise
            except Exception as error:
                if self.closed or left <= 0:
                    raise EngineError(f"cannot {what} in time: {error or type(error).__name__}") from error
            again = time.monotonic() + backoff.failed()
            while (
                not self.closed
                and time.monotonic() < end
                and not (self.connected and time.monotonic() > again)
            ):
                time.sleep(0.02)

    @property
    def connected(self) -> bool:
        return bool(self.client.is_connected)

    def close(self) -> None:
        if self.closed:
            return
        with contextlib.suppress(Exception):
            self.call(self.client.close(), 5)
        self.closed = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.close()

    async def _connect(self, seed: str) -> None:
        context = ssl.create_default_context(cafile=str(self.ca))
        context.minimum_version = ssl.TLSVersion.TLSv1_3

        hopeless: asyncio.Future[None] = self.loop.create_future()

        async def on_error(error: Exception) -> None:
            is_final = (
                isinstance(error, ssl.SSLCertVerificationError) or "authorization" in str(error).lower()
            )
            if is_final and not hopeless.done():
                hopeless.set_exception(error)

        async def changed() -> None:
            for task in self.requests if not self.connected else ():  # whose replies will never arrive
                task.cancel()
            if self.on_change is not None:
                await self.on_change(self.client.is_connected)

        connecting = self.client.connect(
            self.url, nkeys_seed_str=seed, tls=context, inbox_prefix=f"_INBOX.{self.name}", name=self.name,
            max_reconnect_attempts=-1, reconnect_time_wait=1, connect_timeout=5, ping_interval=5,
            max_outstanding_pings=2, error_cb=on_error, disconnected_cb=changed, reconnected_cb=changed,
        )  # fmt: skip
        task = asyncio.ensure_future(connecting)
        await asyncio.wait({task, hopeless}, timeout=CONNECT_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            if hopeless.done():
                hopeless.result()
            raise ConnectionError("no broker answers")
        task.result()
        hopeless.cancel()

    async def request(self, subject: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A request to JetStream's own interface."""
        found: dict[str, Any] = json.loads((await self._request(subject, json.dumps(body).encode())).data)
        return found

    async def store(self, subject: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
        """Publish to a stream: the stream's word for it, which has an `error` where it refused."""
        found = json.loads((await self._request(subject, body, headers)).data)
        if not isinstance(found, dict) or not ("error" in found or "seq" in found):
            raise EngineError("the broker's reply to a chunk cannot be read")
        return found

    async def fetch(self, subject: str, body: bytes = b"") -> bytes:
        """One stored chunk."""
        answer = await self._request(subject, body)
        if "Nats-Sequence" not in (answer.headers or {}):
            raise WireError(
                f"a chunk is not stored any more ({(answer.headers or {}).get('Status', 'no status')})"
            )
        return bytes(answer.data)

    def fetch_answer(self, hexadecimal: str, sequences: Sequence[int], seconds: float) -> bytes:
        """The answer of these chunks; WireError where they are not those that its node announced."""
        requests = [json.dumps({"seq": sequence}).encode() for sequence in sequences]
        work = [partial(self.fetch, "$JS.API.DIRECT.GET.UP", request) for request in requests]
        message = b"".join(self.insist("fetch an answer", seconds, lambda: in_window(work)))
        if digest(message) != hexadecimal:
            raise WireError("the chunks of its answer are not those that it announced")
        return message

    async def _request(self, subject: str, body: bytes, headers: dict[str, str] | None = None) -> Any:
        if not self.connected:  # what the client would send after a reconnection is too late
            raise ConnectionError("the broker is away")
        asking = self.client.request(subject, body, timeout=REQUEST_TIMEOUT_S, headers=headers)
        task = asyncio.ensure_future(asking)
        self.requests.add(task)
        try:
            await asyncio.wait({task})
            if task.cancelled():
                raise ConnectionError("the broker went away")
            return task.result()
        finally:
            self.requests.discard(task)
            task.cancel()


async def in_window(work: Sequence[Callable[[], Coroutine[Any, Any, T]]], window: int = WINDOW) -> list[T]:
    """All of them, a few at once, in order."""
    gate = asyncio.Semaphore(window)

    async def one(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with gate:
            return await start()

    return list(await asyncio.gather(*(one(w) for w in work)))


def chunks(message: bytes) -> list[bytes]:
    return [message[i : i + CHUNK_BYTES] for i in range(0, max(len(message), 1), CHUNK_BYTES)]


def model_subject(reference: ModelReference) -> str:
    return f"fb.m.{check_name(reference.name)}.{reference.digest[:16]}"
