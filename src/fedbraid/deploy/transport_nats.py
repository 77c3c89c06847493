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
import json
import logging
import queue
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fedbraid.deploy import credentials
from fedbraid.deploy.backoff import Backoff
from fedbraid.deploy.broker import PAYLOAD_LIMIT, BrokerLog
from fedbraid.deploy.transport import (
    ModelReference,
    NodeIdentity,
    OrderVerifier,
    ReceivedAnswer,
    Refusal,
    SignedOrder,
    check_name,
    digest,
)
from fedbraid.errors import EngineError, MissingExtra, WireError

CHUNK_BYTES = 512 * 1024
WINDOW = 4  # chunks on their way at once, to the broker
FETCH_WINDOW = 2  # and from it, which disconnects whoever does not read 10 s long
REQUEST_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 15.0
DEDUPLICATION_S = 600
BATCH = 512  # chunks' headers that one request of the consumer asks for
REMEMBERED = 32768  # chunks that were acknowledged
PARTIAL_TIMEOUT_S = 900.0  # after which an answer whose chunks stopped arriving is dropped
JOB, PART, DIGEST, SIZE, ID = "Fb-Job", "Fb-Part", "Fb-Digest", "Fb-Size", "Nats-Msg-Id"

T = TypeVar("T")
logging.getLogger("asyncio").addFilter(
    lambda record: "eof_received" not in str(record.msg)
)  # at each TLS connection's end


@dataclass(frozen=True)
class StreamLimits:
    """The largest answer and model, in bytes, and how much may wait in all."""

    answer_bytes: int = 256 * 1024**2
    model_bytes: int = 1024**3
    stored_bytes: int = 32 * 1024**3

    @property
    def answer_parts(self) -> int:
        return max(1, -(-self.answer_bytes // CHUNK_BYTES))


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


async def _in_window(work: Sequence[Callable[[], Coroutine[Any, Any, T]]], window: int = WINDOW) -> list[T]:
    """All of them, a few at once, in order."""
    gate = asyncio.Semaphore(window)

    async def one(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with gate:
            return await start()

    return list(await asyncio.gather(*(one(w) for w in work)))


def _chunks(message: bytes) -> list[bytes]:
    return [message[i : i + CHUNK_BYTES] for i in range(0, max(len(message), 1), CHUNK_BYTES)]


# The server's end -----------------------------------------------------------------------------------------


@dataclass
class Upload:
    """The chunks of one answer that the stream holds."""

    node: str
    job: str
    digest: str
    size: int
    parts: int
    chunks: dict[int, tuple[int, str]] = field(
        default_factory=dict
    )  # part -> (sequence number, where to acknowledge)
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
        found = {}
        for name, key in self._registry().items():
            if sessions := self.sessions.get(key):
                found[name] = NodeIdentity(name, key, max(sessions, key=sessions.__getitem__))
        return found

    def publish_model(self, name: str, message: bytes) -> ModelReference:
        if len(message) > self.limits.model_bytes:
            raise EngineError(f"a model must be at most {self.limits.model_bytes} bytes, got {len(message)}")
        reference, parts = ModelReference.of(check_name(name), message), _chunks(message)

        async def store(k: int) -> None:
            headers = {DIGEST: reference.digest, PART: f"{k}/{len(parts)}"}
            found = await self.link.store(f"fb.m.{name}.{reference.digest[:16]}.{k}", parts[k], headers)
            if "error" in found and found["error"].get("err_code") != 10077:  # it is there already
                raise EngineError(f"the broker cannot store the model: {found['error'].get('description')}")

        self._patiently(lambda: _in_window([lambda k=k: store(k) for k in range(len(parts))]), len(parts))  # type: ignore[misc]
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
            await self.link.client.flush(
                int(REQUEST_TIMEOUT_S)
            )  # the broker's complaints come before its PONG
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
        sessions = self.sessions.get(key) or {"": 0.0}
        identity = NodeIdentity(upload.node, key, max(sessions, key=sessions.__getitem__))
        return ReceivedAnswer(identity, upload.job, upload.size, lambda: self._read(upload), upload)

    def _read(self, upload: Upload) -> bytes:
        def fetch(part: int) -> Coroutine[Any, Any, bytes]:
            request = json.dumps({"seq": upload.chunks[part][0]}).encode()
            return self.link.fetch("$JS.API.DIRECT.GET.UP", request)

        work = [lambda k=k: fetch(k) for k in range(upload.parts)]
        message = b"".join(self._patiently(lambda: _in_window(work), upload.parts))
        if len(message) != upload.size or digest(message) != upload.digest:
            raise WireError("the chunks of its answer are not those that it announced")
        return message

    def _patiently(self, work: Callable[[], Coroutine[Any, Any, T]], parts: int) -> T:
        """Run it again while the broker is away, for a while."""
        end, backoff = time.monotonic() + 60 + parts, Backoff(0.2, 5.0)
        while True:
            try:
                return self.link.call(work(), REQUEST_TIMEOUT_S * (2 + parts / WINDOW))
            except (WireError, EngineError):
                raise
            except Exception as error:
                if time.monotonic() > end:
                    raise EngineError(
                        f"the broker does not answer: {error or type(error).__name__}"
                    ) from error
            time.sleep(backoff.failed())

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
            for other in [u for u in self.uploads.values() if u.node == found.node and not u.announced]:
                await self._drop(other)  # given up by its node
            upload = self.uploads[identity] = found
        part = next(iter(found.chunks))
        if (held := upload.chunks.get(part)) is not None and held[0] != sequence and upload is not found:
            await self.link.client.publish(reply, b"+TERM")  # the same chunk once more
            return
        upload.chunks[part], upload.since = (sequence, reply), time.monotonic()
        if len(upload.chunks) == upload.parts and not upload.announced:
            upload.announced = True
            with self.news:
                self.ready.append(upload)
                self.news.notify()

    async def _drop(self, upload: Upload) -> None:
        self.uploads.pop((upload.node, upload.job, upload.digest), None)
        self.acknowledged |= {sequence: upload.digest for sequence, _ in upload.chunks.values()}
        for sequence in (
            list(self.acknowledged)[:-REMEMBERED] if len(self.acknowledged) > 2 * REMEMBERED else ()
        ):
            del self.acknowledged[sequence]
        with contextlib.suppress(Exception):  # not acknowledged: delivered again, and then known
            for _, reply in upload.chunks.values():
                await self.link.client.publish(reply, b"+ACK")

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
            "storage": "file",
            "num_replicas": 1,
            "allow_direct": True,
            "discard": "new",
            "discard_new_per_subject": True,
        }
        common |= {"max_msg_size": PAYLOAD_LIMIT, "duplicate_window": int(DEDUPLICATION_S * 1e9)}
        up: dict[str, Any] = {
            "name": "UP",
            "subjects": ["fb.r.*"],
            "retention": "workqueue",
            "max_bytes": self.limits.stored_bytes,
        }
        up |= {"max_msgs_per_subject": 2 * self.limits.answer_parts}
        model: dict[str, Any] = {
            "name": "MODEL",
            "subjects": ["fb.m.>"],
            "retention": "limits",
            "max_msgs_per_subject": 1,
        }
        model |= {"max_bytes": 16 * self.limits.model_bytes}
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
        config: dict[str, Any] = {
            "durable_name": "server",
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "replay_policy": "instant",
        }
        config |= {
            "ack_wait": int(24 * 3600e9),
            "max_ack_pending": -1,
            "max_deliver": -1,
            "headers_only": True,
        }
        found = await self.link.request(
            "$JS.API.CONSUMER.DURABLE.CREATE.UP.server", {"stream_name": "UP", "config": config}
        )
        if "error" in found:
            raise EngineError(f"the broker refuses the consumer: {found['error'].get('description')}")
        self.wanted = 0
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
        for event, act in (
            ("ACCOUNT.NODES.CONNECT", self._on_connect),
            ("ACCOUNT.NODES.DISCONNECT", self._on_disconnect),
        ):
            await self.monitor.client.subscribe(f"$SYS.{event}", cb=act)
        await self.monitor.client.subscribe("$SYS.SERVER.*.CLIENT.AUTH.ERR", cb=self._on_refused_login)
        await self._look()

    async def _look(self) -> None:
        """The broker's list of connections, page by page."""
        found: dict[str, dict[str, float]] = {}
        offset = 0
        while True:
            request = {"acc": "NODES", "auth": True, "limit": 512, "offset": offset}
            page = (await self.monitor.request("$SYS.REQ.SERVER.PING.CONNZ", request)).get("data") or {}
            for about in page.get("connections") or []:
                found.setdefault(about.get("authorized_user", ""), {})[
                    f"{page['server_id']}:{about['cid']}"
                ] = about["cid"]
            offset += 512
            if offset >= page.get("total", 0):
                break
        self.sessions = found

    async def _on_connect(self, message: Any) -> None:
        key, session, number, _ = _event(message)
        self.sessions.setdefault(key, {})[session] = number

    async def _on_disconnect(self, message: Any) -> None:
        key, session, _, reason = _event(message)
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
    return Upload(node, job, hexadecimal, size, parts, {part: (0, "")})


# A node's end ---------------------------------------------------------------------------------------------


class NatsNode:
    """A node's end of a fleet on NATS: its key, with ca.crt and operator.pub in the same folder."""

    def __init__(self, url: str, key: Path) -> None:
        self.inbox: queue.Queue[SignedOrder | None] = queue.Queue(64)
        self.dropped: deque[str] = deque(maxlen=100)  # why messages were dropped
        public = credentials.operator_public_key(key.parent / "operator.pub")
        self.link = Connection(url, key, key.parent / "ca.crt")
        self.verifier = OrderVerifier(public, self.link.name)
        self.link.call(self._subscribe(), REQUEST_TIMEOUT_S)

    @property
    def name(self) -> str:
        return self.link.name

    def orders(self) -> Iterator[SignedOrder]:
        while (order := self.inbox.get()) is not None:
            yield order

    def model(self, order: SignedOrder) -> bytes:
        reference = order.model
        if reference is None:
            return b""
        subject = f"$JS.API.DIRECT.GET.MODEL.fb.m.{check_name(reference.name)}.{reference.digest[:16]}"
        parts = max(1, -(-reference.size // CHUNK_BYTES))
        work = [lambda k=k: self.link.fetch(f"{subject}.{k}") for k in range(parts)]

        async def fetch() -> bytes:
            return b"".join(await _in_window(work, FETCH_WINDOW))

        message = self._until(order, "fetch the model", fetch)
        if digest(message) != reference.digest:
            raise WireError(f"the model {reference.name} is not the one that the operator signed")
        return message

    def answer(self, order: SignedOrder, message: bytes) -> None:
        parts, found = _chunks(message), digest(message)
        headers = {JOB: order.job, DIGEST: found, SIZE: str(len(message))}

        async def store(k: int) -> None:
            about = headers | {PART: f"{k}/{len(parts)}", ID: f"{order.job}.{found[:16]}.{k}"}
            said = await self.link.store(f"fb.r.{self.name}", parts[k], about)
            if "error" in said:
                raise ConnectionError(said["error"].get("description"))

        stored: set[int] = set()

        async def missing() -> None:
            async def one(k: int) -> None:
                await store(k)
                stored.add(k)

            await _in_window([lambda k=k: one(k) for k in range(len(parts)) if k not in stored])  # type: ignore[misc]

        self._until(order, "store the answer", missing)

    def close(self) -> None:
        self.link.close()
        with contextlib.suppress(queue.Full):
            self.inbox.put_nowait(None)

    def _until(self, order: SignedOrder, what: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run it, and again after failures, until the order's deadline."""
        backoff = Backoff(0.2, 10.0)
        while True:
            left = order.deadline - time.time()
            try:
                return self.link.call(work(), max(left, 1.0))
            except WireError:
                raise
            except Exception as error:
                if self.link.closed or left <= 0:
                    reason = str(error) or type(error).__name__
                    raise EngineError(f"cannot {what} until the order's deadline: {reason}") from error
            time.sleep(min(backoff.failed(), max(left, 0.0)))

    async def _subscribe(self) -> None:
        await self.link.client.subscribe(f"fb.o.{self.name}", cb=self._on_order)
        await self.link.client.flush(int(REQUEST_TIMEOUT_S))

    async def _on_order(self, message: Any) -> None:
        try:
            self.inbox.put_nowait(self.verifier.read(message.data))
        except (WireError, queue.Full) as error:
            self.dropped.append(str(error) or "dropped an order: too many wait")
