"""A node's end of a fleet on NATS. What it listens to, others can make the broker write to: it reads signed orders only."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fedbraid.deploy import credentials
from fedbraid.deploy.nats_connection import (
    CHUNK_BYTES,
    DIGEST,
    ID,
    JOB,
    PART,
    REQUEST_TIMEOUT_S,
    SIZE,
    Connection,
    chunks,
    in_window,
    model_subject,
)
from fedbraid.deploy.transport import OrderVerifier, SignedOrder, digest
from fedbraid.errors import WireError

FETCH_WINDOW = 2  # chunks at once; the broker disconnects whoever does not read for 10 s

WAITING = 64  # orders that were not begun


class NatsNode:
    """A node's end of a fleet on NATS: its key, with ca.crt and operator.pub in the same folder."""

    def __init__(self, url: str, key: Path) -> None:
        self.inbox: queue.Queue[SignedOrder | None] = queue.Queue()
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
        subject = f"$JS.API.DIRECT.GET.MODEL.{model_subject(reference)}"
        parts = max(1, -(-reference.size // CHUNK_BYTES))
        work = [partial(self.link.fetch, f"{subject}.{k}") for k in range(parts)]

        async def fetch() -> bytes:
            return b"".join(await in_window(work, FETCH_WINDOW))

        message = self.link.insist("fetch the model", _left(order), fetch)
        if digest(message) != reference.digest:
            raise WireError(f"the model {reference.name} is not the one that the operator signed")
        return message

    def fetch(self, where: Any, order: SignedOrder) -> bytes:
        found, sequences = where
        return self.link.fetch_answer(found, sequences, _left(order))

    def answer(self, order: SignedOrder, message: bytes) -> None:
        parts = answer_chunks(order.job, message)
        missing = set(range(len(parts)))

        async def store(k: int) -> None:
            headers, body = parts[k]
            said = await self.link.store(f"fb.r.{self.name}", body, headers)
            if "error" in said:
                raise ConnectionError(said["error"].get("description"))
            missing.discard(k)

        def store_missing() -> Coroutine[Any, Any, list[None]]:
            return in_window([partial(store, k) for k in sorted(missing)])

        self.link.insist("store the answer", _left(order), store_missing)

    def close(self) -> None:
        self.link.close()
        self.inbox.put(None)

    async def _subscribe(self) -> None:
        await self.link.client.subscribe(f"fb.o.{self.name}", cb=self._on_order)
        await self.link.client.flush(int(REQUEST_TIMEOUT_S))

    async def _on_order(self, message: Any) -> None:
        try:
            order = self.verifier.read(message.data)
        except WireError as error:
            self.dropped.append(str(error))
            return
        if self.inbox.qsize() < WAITING:
            self.inbox.put(order)
        else:
            self.dropped.append("dropped an order: too many wait")


def answer_chunks(job: str, message: bytes) -> list[tuple[dict[str, str], bytes]]:
    """The headers and the body of each chunk of an answer."""
    parts, found = chunks(message), digest(message)
    about = {JOB: job, DIGEST: found, SIZE: str(len(message))}
    ids = [{PART: f"{k}/{len(parts)}", ID: f"{job}.{found[:16]}.{k}"} for k in range(len(parts))]
    return [(about | one, part) for one, part in zip(ids, parts)]


def _left(order: SignedOrder) -> float:
    return order.deadline - time.time()
