"""Orders, answers and models through a NATS broker (docs/fleet-wire.md has every subject, header and id).

Policy. Orders go by core NATS: an order that does not arrive is given again. Answers and models are stored by JetStream
in chunks. The server's consumer delivers **headers only**: the server knows every chunk that waits and holds none of
them; `ReceivedAnswer.read` fetches the bodies of one answer. So its memory does not grow with the cohort, and the broker
is the journal: what is not acknowledged is delivered again to the next consumer.

Invariants.
1. A chunk is identified by its sequence number in the stream; one that is delivered twice is one chunk.
2. After a reconnection the consumer is made anew, so that nothing waits for a time limit to be delivered again.
3. Every wait has a limit. One thread runs the loop of each connection; all methods may be called from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fedbraid.deploy import credentials
from fedbraid.deploy.broker import PAYLOAD_LIMIT, BrokerLog
from fedbraid.deploy.nats_connection import (
    CHUNK_BYTES,
    DIGEST,
    JOB,
    PART,
    REQUEST_TIMEOUT_S,
    SIZE,
    Connection,
    chunks,
    in_window,
    model_subject,
)
from fedbraid.deploy.transport import (
    ModelReference,
    NodeIdentity,
    ReceivedAnswer,
    Refusal,
    SignedOrder,
    check_name,
)
from fedbraid.errors import EngineError

DEDUPLICATION_S = 600
BATCH = 512  # chunks' headers that one request of the consumer asks for
REMEMBERED = 65536  # chunks that were acknowledged
ACKNOWLEDGED_PER_S = 64.0  # chunks of one node, when it goes on for long
PARTIAL_TIMEOUT_S = 900.0  # after which an answer whose chunks stopped arriving is dropped

T = TypeVar("T")


@dataclass(frozen=True)
class StreamLimits:
    """The largest answer and model, in bytes, and how much may wait in all."""

    answer_bytes: int = 256 * 1024**2
    model_bytes: int = 1024**3
    stored_bytes: int = 32 * 1024**3

    @property
    def answer_parts(self) -> int:
        return max(1, -(-self.answer_bytes // CHUNK_BYTES))


class Chunk(NamedTuple):
    """A stored message: its sequence number, where to acknowledge it, and which consumer delivered it."""

    sequence: int
    reply: str
    consumer: int


@dataclass
class Upload:
    """The chunks of one answer that the stream holds."""

    node: str
    job: str
    digest: str
    size: int
    parts: int
    chunks: dict[int, Chunk] = field(default_factory=dict)  # by part
    since: float = field(default_factory=time.monotonic)
    announced: bool = False


class NatsTransport:
    """The server's end of a fleet on NATS."""

    def __init__(
        self, url: str, keys: Path, limits: StreamLimits | None = None, broker_log: Path | None = None
    ) -> None:
        self.keys, self.limits = keys, limits or StreamLimits()
        self.nodes: dict[str, str] = {}
        self.registry_time = 0.0
        self.sessions: dict[str, dict[str, float]] = {}  # public key -> its connections
        self.uploads: dict[tuple[str, str, str], Upload] = {}
        self.ready: deque[Upload] = deque()
        self.news = threading.Condition()
        self.acknowledged: dict[int, str] = {}  # the newest: sequence number -> digest
        self.told: deque[Refusal] = deque(maxlen=1000)
        self.log = BrokerLog(broker_log) if broker_log is not None else None
        self.booked: dict[str, float] = {}  # until when a node has used up what it may have acknowledged
        self.consumer = 0  # how often it was made
        self.gone: set[str] = set()  # sessions that ended during a look
        self.wanted = 0  # chunks that the consumer was asked for and has not delivered
        self.undeliverable: set[str] = set()
        ca = keys / "ca.crt"
        self.link = Connection(url, keys / "server.nk", ca, self._server_changed)
        try:
            self.monitor = Connection(url, keys / "monitor.nk", ca, self._monitor_changed)
        except BaseException:
            self.link.close()
            raise
        try:
            self.monitor.call(self._watch(), 4 * REQUEST_TIMEOUT_S)
            self.link.call(self._open(), 8 * REQUEST_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    # Transport ----------------------------------------------------------------------------------------

    def connected(self) -> Mapping[str, NodeIdentity]:
        if not self.link.connected:
            return {}
        nodes = self._registry().items()
        return {name: self._identity(name, key) for name, key in nodes if self.sessions.get(key)}

    def publish_model(self, name: str, message: bytes) -> ModelReference:
        if len(message) > self.limits.model_bytes:
            raise EngineError(f"a model must be at most {self.limits.model_bytes} bytes, got {len(message)}")
        reference, parts = ModelReference.of(check_name(name), message), chunks(message)

        async def store(k: int) -> None:
            found = await self.link.store(f"{model_subject(reference)}.{k}", parts[k], {})
            if "error" in found and found["error"].get("err_code") != 10077:  # it is there already
                raise EngineError(f"the broker cannot store the model: {found['error'].get('description')}")

        work = [partial(store, k) for k in range(len(parts))]
        self.link.insist("store the model", _patience(len(parts)), lambda: in_window(work))
        return reference

    def retain_models(self, names: Collection[str]) -> None:
        async def purge() -> None:
            about = await self.link.request("$JS.API.STREAM.INFO.MODEL", {"subjects_filter": "fb.m.>"})
            stored = {s.split(".")[2] for s in (about.get("state", {}).get("subjects") or {})}
            for name in stored - set(names):
                await self.link.request("$JS.API.STREAM.PURGE.MODEL", {"filter": f"fb.m.{name}.>"})

        with contextlib.suppress(Exception):  # what remains is removed the next time
            self.link.call(purge(), 2 * REQUEST_TIMEOUT_S)

    def send(self, orders: Sequence[SignedOrder]) -> Sequence[str]:
        async def publish() -> set[str]:
            self.undeliverable = set()
            for order in orders:
                reply = f"_INBOX.server.order.{check_name(order.node)}"
                await self.link.client.publish(f"fb.o.{order.node}", order.to_bytes(), reply=reply)
            await self.link.client.flush(int(REQUEST_TIMEOUT_S))  # complaints are written before the PONG
            return self.undeliverable

        try:
            if not self.link.connected:
                raise ConnectionError
            lost = self.link.call(publish(), 2 * REQUEST_TIMEOUT_S)
        except Exception:
            return [order.node for order in orders]
        return [order.node for order in orders if order.node in lost]

    def receive(self, limit: int, wait: float) -> Sequence[ReceivedAnswer]:
        with self.news:
            self.news.wait_for(lambda: self.ready, wait)
            uploads = [self.ready.popleft() for _ in range(min(limit, len(self.ready)))]
        return [a for u in uploads if (a := self._received(u)) is not None]

    def acknowledge(self, answers: Sequence[ReceivedAnswer]) -> None:
        async def acknowledge() -> None:
            for answer in answers:
                await self._drop(answer.handle)

        with contextlib.suppress(futures.TimeoutError):
            self.link.call(acknowledge(), 2 * REQUEST_TIMEOUT_S)

    def where(self, answer: ReceivedAnswer) -> Any:
        upload: Upload = answer.handle
        return [upload.digest, [upload.chunks[part].sequence for part in range(upload.parts)]]

    def refusals(self) -> Sequence[Refusal]:
        found = [self.told.popleft() for _ in range(len(self.told))]
        if self.log is not None:
            found += self.log.refusals({key: name for name, key in self._registry().items()})
        return found

    def close(self) -> None:
        self.link.close()
        if hasattr(self, "monitor"):
            self.monitor.close()

    # Answers ------------------------------------------------------------------------------------------

    def _received(self, upload: Upload) -> ReceivedAnswer | None:
        key = self._registry().get(upload.node)
        if key is None:  # revoked since
            self._drop_soon(upload)
            return None
        return ReceivedAnswer(
            self._identity(upload.node, key), upload.job, upload.size, partial(self._read, upload), upload
        )

    def _identity(self, name: str, key: str) -> NodeIdentity:
        sessions = self.sessions.get(key) or {"": 0.0}
        return NodeIdentity(name, key, max(sessions, key=sessions.__getitem__))

    def _read(self, upload: Upload) -> bytes:
        sequences = [upload.chunks[part].sequence for part in range(upload.parts)]
        return self.link.fetch_answer(upload.digest, sequences, _patience(upload.parts))

    async def _on_chunk(self, message: Any) -> None:
        """The headers of one chunk, or the consumer's word that it has no more for this request."""
        if not message.reply.startswith("$JS.ACK.UP.server."):
            self.wanted = 0
            await self._ask()
            return
        self.wanted -= 1
        sequence = int(message.reply.split(".")[5])
        upload = _parse_chunk(message.subject.rpartition(".")[2], message.headers or {}, self.limits)
        if isinstance(upload, Refusal) or upload.node not in self._registry():
            if isinstance(upload, Refusal):
                self.told.append(upload)
            await self.link.client.publish(message.reply, b"+TERM")
        else:
            await self._add(upload, sequence, message.reply)
        await self._ask()

    async def _add(self, found: Upload, sequence: int, reply: str) -> None:
        identity = found.node, found.job, found.digest
        if self.acknowledged.get(sequence) == found.digest:  # the broker was killed before it had read that
            await self.link.client.publish(reply, b"+ACK")
            return
        upload = self.uploads.get(identity)
        if upload is None:
            others = [u for u in self.uploads.values() if u.node == found.node and not u.announced]
            for other in others[:-1] if found.parts > 1 else ():  # given up by its node, and in its quota
                await self._drop(other)
            upload = self.uploads[identity] = found
        (part,) = found.chunks
        before = upload.chunks.get(part) if upload is not found else None
        if before is not None and before.consumer == self.consumer and before.sequence != sequence:
            await self.link.client.publish(reply, b"+TERM")  # the same chunk, stored twice
            return
        upload.chunks[part], upload.since = Chunk(sequence, reply, self.consumer), time.monotonic()
        if len(upload.chunks) == upload.parts and not upload.announced:
            upload.announced = True
            with self.news:
                self.ready.append(upload)
                self.news.notify()

    async def _drop(self, upload: Upload) -> None:
        self.uploads.pop((upload.node, upload.job, upload.digest), None)
        self.acknowledged |= {chunk.sequence: upload.digest for chunk in upload.chunks.values()}
        while len(self.acknowledged) > REMEMBERED:
            del self.acknowledged[next(iter(self.acknowledged))]
        now = time.monotonic()
        burst = 10 + 2 * self.limits.answer_parts / ACKNOWLEDGED_PER_S
        booked = max(self.booked.get(upload.node, 0.0), now - burst) + len(upload.chunks) / ACKNOWLEDGED_PER_S
        self.booked[upload.node] = booked
        if booked <= now:
            await self._say(upload)
        else:  # a flood: meanwhile its quota is full
            self.link.loop.call_later(booked - now, lambda: self.link.loop.create_task(self._say(upload)))

    async def _say(self, upload: Upload) -> None:
        with contextlib.suppress(Exception):  # not acknowledged: delivered again, and then known
            for chunk in upload.chunks.values():
                await self.link.client.publish(chunk.reply, b"+ACK")

    def _drop_soon(self, upload: Upload) -> None:
        asyncio.run_coroutine_threadsafe(self._drop(upload), self.link.loop)

    async def _ask(self) -> None:
        if self.wanted >= BATCH // 2:
            return
        for upload in [u for u in self.uploads.values() if not u.announced]:
            if time.monotonic() - upload.since > PARTIAL_TIMEOUT_S:
                await self._drop(upload)
        request = {"batch": BATCH, "expires": int(30e9)}
        self.wanted += BATCH
        await self.link.client.publish(
            "$JS.API.CONSUMER.MSG.NEXT.UP.server", json.dumps(request).encode(), reply="_INBOX.server.chunks"
        )

    # Streams, connections -----------------------------------------------------------------------------

    async def _open(self) -> None:
        await self.link.client.subscribe("_INBOX.server.chunks", cb=self._on_chunk)
        await self.link.client.subscribe("_INBOX.server.order.*", cb=self._on_complaint)
        common: dict[str, Any] = {
            "storage": "file", "num_replicas": 1, "allow_direct": True, "discard": "new", "discard_new_per_subject": True,
            "max_msg_size": PAYLOAD_LIMIT, "duplicate_window": int(DEDUPLICATION_S * 1e9),
        }  # fmt: skip
        up: dict[str, Any] = {
            "name": "UP", "subjects": ["fb.r.*"], "retention": "workqueue", "max_bytes": self.limits.stored_bytes,
            "max_msgs_per_subject": 2 * self.limits.answer_parts,
        }  # fmt: skip
        model: dict[str, Any] = {
            "name": "MODEL", "subjects": ["fb.m.>"], "retention": "limits", "max_bytes": 16 * self.limits.model_bytes,
            "max_msgs_per_subject": 1,
        }  # fmt: skip
        for stream in (up, model):
            for verb in ("CREATE", "UPDATE"):
                found = await self.link.request(f"$JS.API.STREAM.{verb}.{stream['name']}", common | stream)
                if "error" not in found:
                    break
            else:
                raise EngineError(
                    f"the broker refuses the stream {stream['name']}: {found['error'].get('description')}"
                )
        await self._consume()

    async def _consume(self) -> None:
        """A new consumer: all that is not acknowledged is delivered, from the oldest."""
        await self.link.request("$JS.API.CONSUMER.DELETE.UP.server", {})
        config = {
            "durable_name": "server", "deliver_policy": "all", "ack_policy": "explicit", "replay_policy": "instant",
            "ack_wait": int(24 * 3600e9), "max_ack_pending": -1, "max_deliver": -1, "headers_only": True,
        }  # fmt: skip
        found = await self.link.request(
            "$JS.API.CONSUMER.DURABLE.CREATE.UP.server", {"stream_name": "UP", "config": config}
        )
        if "error" in found:
            raise EngineError(f"the broker refuses the consumer: {found['error'].get('description')}")
        self.wanted = 0
        self.consumer += 1
        await self._ask()

    async def _server_changed(self, connected: bool) -> None:
        while connected and self.link.connected:
            try:
                await self._consume()
                return
            except Exception:  # JetStream is still recovering
                await asyncio.sleep(0.5)

    async def _on_complaint(self, message: Any) -> None:
        if (message.headers or {}).get("Status") == "503":
            self.undeliverable.add(message.subject.rpartition(".")[2])

    # Who is connected ---------------------------------------------------------------------------------

    async def _watch(self) -> None:
        await self.monitor.client.subscribe("$SYS.ACCOUNT.NODES.CONNECT", cb=self._on_connect)
        await self.monitor.client.subscribe("$SYS.ACCOUNT.NODES.DISCONNECT", cb=self._on_disconnect)
        await self.monitor.client.subscribe("$SYS.SERVER.*.CLIENT.AUTH.ERR", cb=self._on_refused_login)
        await self._look()

    async def _look(self) -> None:
        """The broker's list of connections, page by page."""
        self.sessions, self.gone = {}, set()  # which events change meanwhile
        for offset in itertools.count(0, 512):
            request = {"acc": "NODES", "auth": True, "limit": 512, "offset": offset}
            page = (await self.monitor.request("$SYS.REQ.SERVER.PING.CONNZ", request)).get("data") or {}
            for about in page.get("connections") or []:
                session, key = f"{page['server_id']}:{about['cid']}", about.get("authorized_user", "")
                if session not in self.gone:
                    self.sessions.setdefault(key, {})[session] = about["cid"]
            if offset + 512 >= page.get("total", 0):
                return

    async def _on_connect(self, message: Any) -> None:
        key, session, number, _ = _event(message)
        self.sessions.setdefault(key, {})[session] = number

    async def _on_disconnect(self, message: Any) -> None:
        key, session, _, reason = _event(message)
        self.gone.add(session)
        sessions = self.sessions.get(key, {})
        sessions.pop(session, None)
        if not sessions:
            self.sessions.pop(key, None)
        if "Violation" in reason or "Exceeded" in reason or "Slow" in reason:
            name = next((n for n, k in self._registry().items() if k == key), key)
            self.told.append(Refusal(name, f"disconnected: {reason}"))

    async def _on_refused_login(self, message: Any) -> None:
        about = json.loads(message.data)
        host = about.get("client", {}).get("host", "an unknown address")
        self.told.append(Refusal(host, f"no login: {about.get('reason', 'unknown key')}"))

    async def _monitor_changed(self, connected: bool) -> None:
        self.sessions = {}
        while connected and self.monitor.connected:
            try:
                await self._look()
                return
            except Exception:  # the broker is still starting
                await asyncio.sleep(0.5)

    def _registry(self) -> dict[str, str]:
        """Public keys by the registered nodes' names, as the file is now."""
        with contextlib.suppress(OSError):
            changed = (self.keys / "nodes.json").stat().st_mtime_ns
            if changed != self.registry_time:
                self.nodes, self.registry_time = credentials.read_nodes(self.keys), changed
        return self.nodes


def _patience(parts: int) -> float:
    """Seconds for which it is tried to move so many chunks."""
    return 60.0 + parts


def _event(message: Any) -> tuple[str, str, float, str]:
    about = json.loads(message.data)
    client = about["client"]
    session = f"{about['server']['id']}:{client['id']}"
    return client.get("user", ""), session, float(client["id"]), about.get("reason", "")


def _parse_chunk(node: str, headers: Mapping[str, str], limits: StreamLimits) -> Upload | Refusal:
    """A chunk's announcement, written by its node, whose name the broker has proven."""
    try:
        job, hexadecimal = headers[JOB], headers[DIGEST]
        part, parts = map(int, headers[PART].split("/"))
        size, length = int(headers[SIZE]), int(headers["Nats-Msg-Size"])
    except (KeyError, ValueError):
        return Refusal(node, "a chunk without job, part, digest and size")
    last = size - (parts - 1) * CHUNK_BYTES
    is_plausible = (
        0 <= part < parts <= limits.answer_parts and 0 <= last <= CHUNK_BYTES and size <= limits.answer_bytes
    )
    if not is_plausible or length != (last if part == parts - 1 else CHUNK_BYTES):
        return Refusal(node, f"a chunk {part}/{parts} of {length} bytes for an answer of {size} bytes")
    if len(job) > 64 or len(hexadecimal) != 64 or not job.isalnum():
        return Refusal(node, "a chunk whose job or digest cannot be one")
    return Upload(node, job, hexadecimal, size, parts, {part: Chunk(0, "", 0)})
