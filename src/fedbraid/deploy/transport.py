"""What carries orders to nodes and answers back: two interfaces, and the records that cross them.

Policy. The server gives **orders**, signed one by one by the operator's key; a node returns **answers**. A transport
proves who sent an answer; the signature proves who gave an order. The server pulls answers, as many as it asks for,
and acknowledges them after it has committed the step that contains them: until then every restart, of the server
or of the broker, delivers them again.

Invariants.
1. A node reads nothing of an order, not even its JSON, before the signature over exactly those bytes holds.
2. An order is accepted once: for this node, before its deadline, and never with the same serial number again. A server
   that gives an order again (the node reconnected) signs it again; the job's name says that it is the same job.
3. `answer` returns when the transport has stored the answer. That is not the commit: client state stays pending until
   a later order names the job as committed.
4. Job names cannot be foretold (`new_job`, `NodeTable.job`). Message ids contain them, and a broker drops what has the id of another message:
   a name that others could guess would let them suppress an upload.

Permissions of the broker alone do not suffice for 1: a node may ask the broker for its due, with the subject of another
node as the address of the reply, and the broker writes there.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedbraid.errors import ConfigError, WireError

Kind = Literal["FOLD", "HELLO", "LEAVE", "PING", "SUM", "TRAIN"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAGIC = b"fedbraid order 1\n"
SIGNATURE_BYTES = 64
HEAD_LIMIT = 4096  # bytes of an order's head
ANSWER_HEAD_LIMIT = 65536  # bytes of an answer's head
ORDER_LIMIT = 512 * 1024  # bytes of an order; what is larger travels as a model
CLOCK_TOLERANCE_S = 30.0  # by which the clocks of server and node may differ
EDGE = "edge-"  # with which edges' names begin, and no others
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
FIELDS = ("body", "deadline", "job", "kind", "model", "node", "run", "serial")


@dataclass(frozen=True)
class NodeIdentity:
    """A connected node, as the transport has proven it; `session` is another one after every reconnection."""

    name: str
    key: str
    session: str = ""


@dataclass(frozen=True)
class ModelReference:
    """A published message that an order builds on: its name, the SHA-256 of its bytes, and how many they are."""

    name: str
    digest: str
    size: int

    @classmethod
    def of(cls, name: str, message: bytes) -> ModelReference:
        """
        >>> ModelReference.of("v7", b"abc").size
        3
        """
        return cls(name, digest(message), len(message))


@dataclass(frozen=True)
class SignedOrder:
    """What one node is to do, until when (Unix time in seconds), signed."""

    run: str
    job: str
    node: str
    kind: Kind
    body: bytes
    deadline: float
    model: ModelReference | None = None
    serial: int = 0
    head: bytes = field(default=b"", repr=False)  # the bytes that are signed, after MAGIC
    signature: bytes = field(default=b"", repr=False)

    def to_bytes(self) -> bytes:
        """The message: MAGIC, the signature, the head's length (4 bytes, big-endian), the head, the body."""
        return b"".join([MAGIC, self.signature, len(self.head).to_bytes(4, "big"), self.head, self.body])


@dataclass(frozen=True)
class ReceivedAnswer:
    """A complete answer of a node to a job. Its body is read when it is needed, so that a cohort fits in memory."""

    node: NodeIdentity
    job: str
    size: int
    read: Callable[[], bytes] = field(
        repr=False, compare=False
    )  # raises WireError where the bytes do not fit
    handle: Any = field(default=None, repr=False, compare=False)  # the transport's affair


@dataclass(frozen=True)
class Refusal:
    """What a transport refused, and of whom: a node's name, or an address where the sender proved no identity."""

    sender: str
    reason: str


class Transport(Protocol):
    """The server's end. No call waits without a limit, and none fails because the broker is away: nobody is connected
    then, nothing can be sent, and nothing arrives."""

    def connected(self) -> Mapping[str, NodeIdentity]:
        """The nodes that are connected, by name."""
        ...

    def publish_model(self, name: str, message: bytes) -> ModelReference:
        """Store a message that many orders refer to."""
        ...

    def retain_models(self, names: Collection[str]) -> None:
        """Remove all published messages but these."""
        ...

    def send(self, orders: Sequence[SignedOrder]) -> Sequence[str]:
        """Give each order to its node: the names of the nodes that could not be given theirs."""
        ...

    def receive(self, limit: int, wait: float) -> Sequence[ReceivedAnswer]:
        """Up to `limit` complete answers; waits up to `wait` seconds for the first."""
        ...

    def acknowledge(self, answers: Sequence[ReceivedAnswer]) -> None:
        """After the commit, or after a refusal: these are not delivered again."""
        ...

    def where(self, answer: ReceivedAnswer) -> Any:
        """What an edge needs to read this answer itself, as JSON."""
        ...

    def refusals(self) -> Sequence[Refusal]:
        """What the transport refused since the last call."""
        ...

    def close(self) -> None: ...


class NodeTransport(Protocol):
    """A node's end."""

    @property
    def name(self) -> str: ...

    def orders(self) -> Iterator[SignedOrder]:
        """Orders that were verified, one after another, until `close` (from any thread)."""
        ...

    def model(self, order: SignedOrder) -> bytes:
        """The message that an order refers to; its digest fits."""
        ...

    def fetch(self, where: Any, order: SignedOrder) -> bytes:
        """Another node's answer, which only an edge may read; WireError where its bytes do not fit."""
        ...

    def answer(self, order: SignedOrder, message: bytes) -> None:
        """Returns when the answer is stored; raises EngineError where that failed until the deadline."""
        ...

    def close(self) -> None: ...


@dataclass
class OrderSigner:
    """The operator's hand: makes orders that `OrderVerifier` accepts."""

    key: Ed25519PrivateKey
    last: int = 0

    def sign(
        self, node: str, kind: Kind, *, run: str, job: str, deadline: float, body: bytes = b"",
        model: ModelReference | None = None,
    ) -> SignedOrder:  # fmt: skip
        """An order with a new serial number."""
        self.last = max(self.last + 1, time.time_ns() // 1000)
        about = {
            "body": digest(body), "deadline": round(deadline * 1000), "job": job, "kind": kind,
            "model": None if model is None else [model.name, model.digest, model.size],
            "node": node, "run": run, "serial": self.last,
        }  # fmt: skip
        head = json.dumps(about, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
        order = SignedOrder(run, job, node, kind, body, about["deadline"] / 1000, model, self.last, head)  # type: ignore[operator]
        if len(head) > HEAD_LIMIT or len(order.to_bytes()) + SIGNATURE_BYTES > ORDER_LIMIT:
            raise ConfigError(
                f"an order must be at most {ORDER_LIMIT} bytes, got {len(body)}; publish what is larger as a model"
            )
        return _signed(order, self.key.sign(MAGIC + head))


@dataclass
class OrderVerifier:
    """A node's check of all that arrives: `read` returns an order, or raises WireError with the reason."""

    key: Ed25519PublicKey
    node: str
    now: Callable[[], float] = time.time
    accepted: dict[int, float] = field(default_factory=dict)  # serial number -> deadline

    def read(self, message: bytes) -> SignedOrder:
        start = len(MAGIC) + SIGNATURE_BYTES + 4
        if len(message) < start or len(message) > ORDER_LIMIT or not message.startswith(MAGIC):
            raise WireError("dropped a message that is not an order")
        signature = message[len(MAGIC) : start - 4]
        length = int.from_bytes(message[start - 4 : start], "big")
        head, body = message[start : start + length], message[start + length :]
        if length > HEAD_LIMIT or len(head) != length:
            raise WireError("dropped a message that is not an order")
        try:
            self.key.verify(signature, MAGIC + head)
        except InvalidSignature:
            raise WireError("dropped an order that the operator did not sign") from None
        order = _signed(_parse(head, body), signature)
        self._check(order)
        return order

    def _check(self, order: SignedOrder) -> None:
        now = self.now()
        if order.node != self.node:
            raise WireError(f"dropped an order for {order.node}")
        if now > order.deadline + CLOCK_TOLERANCE_S:
            raise WireError(
                f"dropped an order whose deadline passed {now - order.deadline:.0f} s ago; if that is wrong, synchronize the clocks"
            )
        if order.serial in self.accepted:
            raise WireError("dropped an order that was delivered before")
        horizon = now - CLOCK_TOLERANCE_S
        self.accepted = {s: until for s, until in self.accepted.items() if until >= horizon}
        self.accepted[order.serial] = order.deadline


def _parse(head: bytes, body: bytes) -> SignedOrder:
    """The order of a head whose signature holds; the operator's software may still be of another version."""
    try:
        about = json.loads(head)
        if sorted(about) != list(FIELDS) or about["kind"] not in KINDS:
            raise ValueError(
                f"its fields or kind {about.get('kind')!r} belong to another version of fedbraid"
            )
        model = None if about["model"] is None else ModelReference(*about["model"])
        deadline = about["deadline"] / 1000
        if not math.isfinite(deadline) or type(about["serial"]) is not int:
            raise ValueError("its deadline or serial number is not a number")
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        raise WireError(f"dropped a signed order that cannot be read: {error}") from error
    if about["body"] != digest(body):
        raise WireError("dropped an order whose body is not the one that was signed")
    return SignedOrder(
        str(about["run"]), str(about["job"]), str(about["node"]), about["kind"], body, deadline, model, about["serial"], head
    )  # fmt: skip


def _signed(order: SignedOrder, signature: bytes) -> SignedOrder:
    return SignedOrder(**{**order.__dict__, "signature": signature})


def new_job() -> str:
    """A job's name: 128 random bits."""
    return secrets.token_hex(16)


def pack_answer(head: Mapping[str, Any], upload: bytes = b"") -> bytes:
    """An answer's bytes: the head's length (4 bytes, big-endian), the head as JSON, the upload.

    >>> pack_answer({"n": 1}, b"up")
    b'\\x00\\x00\\x00\\x07{"n":1}up'
    """
    about = json.dumps(head, separators=(",", ":")).encode()
    return len(about).to_bytes(4, "big") + about + upload


def unpack_answer(message: bytes) -> tuple[dict[str, Any], bytes]:
    """(head, upload) of an answer; whoever wrote it, this returns them or raises WireError."""
    length = int.from_bytes(message[:4], "big")
    about = message[4 : 4 + length]
    if len(message) < 4 or length > ANSWER_HEAD_LIMIT or len(about) != length:
        raise WireError("its answer is cut off, or none")
    try:
        head = json.loads(about)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the head of its answer cannot be read: {str(error)[:200]}") from error
    if not isinstance(head, dict):
        raise WireError("the head of its answer is not an object")
    return head, message[4 + length :]


def digest(message: bytes) -> str:
    return hashlib.sha256(message).hexdigest()


def check_name(name: str) -> str:
    """A node's name, or a model's, which is a part of a subject."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"a node's name must be 1 to 64 of A-Z, a-z, 0-9, _ and -, got {name!r}; use another name"
        )
    return name
