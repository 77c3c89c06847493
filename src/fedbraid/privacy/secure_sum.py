"""Sums of vectors of which the server sees nothing but the sum: SecAgg+ (Bell et al. 2020), as two state machines.

Policy. Every client has `neighbours` others in a random ring; each pair of neighbours agrees on a mask that one adds
and the other subtracts, and every client adds a mask of its own. Four stages, a message each way:

    KEYS    a client sends two public keys; it is sent those of its neighbours
    SHARES  it cuts the seed of its own mask and its secret key into shares, one of each for every neighbour, encrypted;
            it is sent those that were meant for it
    MASKED  it sends Σ of its numbers and masks, modulo 2^bits; it is asked about its neighbours
    UNMASK  it sends of each neighbour one share: of the seed of those whose numbers arrived, of the key of the others

The server takes away the masks that seeds tell of, and the halves of pairs whose other half did not arrive.

Invariants.
1. A client gives away one share of each neighbour, never both: seed and key together would unmask it.
2. A client that is gone in one stage is gone in all later ones; what arrives from it is refused.
3. Every client keeps at least `threshold` neighbours in every stage, or the sum fails and tells nothing.
4. Nothing of a message is believed before its length, header, stage and sender fit.

Against: a server that follows the protocol and looks at all that it receives, with up to threshold − 1 neighbours of
any client on its side. A server that hands out keys of its own in place of clients' keys is beyond it, as in the paper's
semi-honest setting.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbraid.errors import ConfigError, EngineError, MissingExtra, WireError
from fedbraid.links._bitpacking import code_type, pack, packed_size, spare_bits, unpack
from fedbraid.privacy import shamir

Words = NDArray[Any]  # uint32 up to 32 bits, uint64 beyond

KEYS, SHARES, MASKED, UNMASK, DONE = range(1, 6)
STAGES = {KEYS: "keys", SHARES: "shares", MASKED: "masked", UNMASK: "unmask"}
MAGIC, VERSION = b"fS", 1
MOST_BITS = 52  # whole numbers that float64 holds

SEED, KEY = 32, 32  # bytes of a seed or secret key, and of a public key
SHARE = 4 * shamir.pieces(SEED)  # bytes of one share
SEALED = 2 * SHARE + 16  # of two shares, encrypted
_HEADER = struct.Struct("<2sBB16sI")  # magic, version, stage, session, party
_SESSION = struct.Struct("<2sBB16sIIIIQ")
_PARTY = struct.Struct("<I")
_ASKED = struct.Struct("<IB")  # a neighbour, and whether its numbers arrived


@dataclass(frozen=True)
class Session:
    """The public facts of one sum: parties are numbered from 1, vectors have `length` numbers below 2^bits."""

    id: bytes
    parties: int
    neighbours: int
    threshold: int
    bits: int
    length: int

    def __post_init__(self) -> None:
        if len(self.id) != 16:
            raise ConfigError(f"a session's id must be 16 bytes, got {len(self.id)}")
        if not 2 <= self.threshold <= self.neighbours < self.parties:
            raise ConfigError(
                f"a secure sum needs 2 <= threshold <= neighbours < clients, got threshold={self.threshold},"
                f" neighbours={self.neighbours} and {self.parties} clients; use more clients in a step or a smaller threshold"
            )
        if self.parties * self.neighbours % 2:
            raise ConfigError(
                f"{self.parties} clients cannot have {self.neighbours} neighbours each; use an even number"
            )
        if not 1 <= self.bits <= MOST_BITS:
            raise ConfigError(
                f"a secure sum counts modulo 2^1 to 2^{MOST_BITS}, got 2^{self.bits}; use fewer bits or lighter weights"
            )

    def to_bytes(self) -> bytes:
        return _SESSION.pack(
            MAGIC, VERSION, 0, self.id, self.parties, self.neighbours, self.threshold, self.bits, self.length
        )

    @classmethod
    def from_bytes(cls, message: bytes) -> Session:
        """
        >>> session = Session(bytes(16), 10, 4, 3, 20, 1000)
        >>> Session.from_bytes(session.to_bytes()) == session
        True
        """
        if len(message) != _SESSION.size:
            raise WireError(f"a session is {_SESSION.size} bytes, got {len(message)}")
        magic, version, stage, *rest = _SESSION.unpack(message)
        if (magic, version, stage) != (MAGIC, VERSION, 0):
            raise WireError("message is no session of a secure sum of this version; run the same fedbraid")
        return cls(*rest)

    def invitation(self, party: int) -> bytes:
        """What opens the sum for one party."""
        return self.to_bytes() + _PARTY.pack(party)

    @cached_property
    def ring(self) -> tuple[int, ...]:
        """The parties in an order that the id alone determines."""
        drawn = np.frombuffer(hashlib.shake_256(b"fedbraid ring" + self.id).digest(8 * self.parties), "<u8")
        return tuple((np.argsort(drawn, kind="stable") + 1).tolist())

    def neighbours_of(self, party: int) -> frozenset[int]:
        """Those up to neighbours/2 places before and after it in the ring, and where that is half, the one opposite."""
        at, n, ring = self._places[party], self.parties, self.ring
        near = {ring[(at + sign * i) % n] for i in range(1, self.neighbours // 2 + 1) for sign in (1, -1)}
        return frozenset(near | ({ring[(at + n // 2) % n]} if self.neighbours % 2 else set()))

    @cached_property
    def _places(self) -> dict[int, int]:
        return {party: at for at, party in enumerate(self.ring)}

    @property
    def word(self) -> np.dtype[Any]:
        return np.dtype("<u4" if self.bits <= 32 else "<u8")

    def modulo(self, numbers: Words) -> Words:
        """The numbers modulo 2^bits."""
        reduced: Words = numbers & self.word.type((1 << self.bits) - 1)
        return reduced

    def signed(self, numbers: Words) -> NDArray[np.int64]:
        """Sums as they were before they were counted modulo 2^bits, of whatever fits within ±2^(bits−1)."""
        wide = numbers.astype(np.int64)
        return wide - ((wide >> self.bits - 1) << self.bits)

    @property
    def masked_size(self) -> int:
        """The bytes of one client's masked numbers."""
        return sum(packed_size(self.length, width) for _, width in self._planes)

    @property
    def _planes(self) -> list[tuple[int, int]]:
        """(shift, width): numbers travel as their lowest 16 bits, then the next 16, then the rest."""
        return [(at, min(16, self.bits - at)) for at in range(0, self.bits, 16)]

    def pack(self, numbers: Words) -> bytes:
        """Numbers below 2^bits, without a bit to spare."""
        planes = [
            (numbers >> self.word.type(at) & self.word.type((1 << width) - 1), width)
            for at, width in self._planes
        ]
        return b"".join(pack(plane.astype(code_type(w))[None], w).tobytes() for plane, w in planes)

    def unpack(self, data: bytes) -> Words:
        """The inverse; WireError where bytes do not fit."""
        if len(data) != self.masked_size:
            raise WireError(
                f"{self.length} masked numbers of {self.bits} bits are {self.masked_size} bytes, got {len(data)}"
            )
        out, start = np.zeros(self.length, self.word), 0
        for at, width in self._planes:
            size = packed_size(self.length, width)
            plane = np.frombuffer(data, np.uint8, size, start)[None]
            if spare_bits(plane, width, self.length):
                raise WireError("masked numbers set bits after the last one; the sender is faulty or hostile")
            out |= unpack(plane, width, self.length)[0].astype(self.word) << self.word.type(at)
            start += size
        return out


def traffic(session: Session, masked: int) -> dict[str, int]:
    """Bytes of all stages, by `up:` or `down:` and stage, where so many of the clients stayed from `masked` on."""
    n, k, head = session.parties, session.neighbours, _HEADER.size
    shares = n * (head + k * (_PARTY.size + SEALED))
    return {
        "up:keys": n * (head + 2 * KEY),
        "down:keys": n * (_SESSION.size + _PARTY.size + head + k * (_PARTY.size + 2 * KEY)),
        "up:shares": shares,
        "down:shares": shares,
        "up:masked": masked * (head + session.masked_size),
        "down:masked": masked * (head + k * _ASKED.size),
        "up:unmask": masked * (head + k * SHARE),
    }


def check_neighbours(session: Session, masked: int) -> None:
    """Refuse a sum, as its server would, of which all parties shared and only the first so many sent their numbers."""
    there = set(range(1, masked + 1))
    for party in range(1, session.parties + 1 if masked < session.parties else 1):
        near = session.neighbours_of(party) & there
        if len(near) < session.threshold and (party in there or near):
            raise too_few(session, "masked", party, len(near))


def too_few(session: Session, stage: str, party: int, left: int) -> EngineError:
    return EngineError(
        f"the secure sum failed in stage {stage}: {left} neighbours of party {party} are left of {session.neighbours}, fewer"
        f" than threshold={session.threshold}; wait longer, or use more neighbours= or a smaller threshold="
    )


# Parameters -----------------------------------------------------------------------------------------


def choose_neighbours(
    parties: int, neighbours: int | None, threshold: int | None, corrupt: float = 0.2, gone: float = 0.2
) -> tuple[int, int]:
    """(neighbours, threshold) of a cohort: what was asked for, or the fewest that are safe.

    Safe is: with a share `corrupt` of clients on the server's side, that any honest one has `threshold` neighbours
    among them has a chance below 2⁻⁴⁰; with a share `gone` of clients dropping out, that any keeps fewer than
    `threshold` has one below 2⁻³⁰ (Bell et al. 2020, by hypergeometric tails). Where no ring is, every client is every other's
    neighbour, and the threshold is more than half of them.

    >>> choose_neighbours(20, None, None)
    (19, 10)
    >>> choose_neighbours(10_000, None, None)
    (136, 71)
    """
    if neighbours is None and threshold is None:
        for k in range(40, parties - 1, 4):
            for t in range(k * 2 // 5, k * 3 // 5):
                bad = math.log2(parties) + _tail(parties - 1, round(corrupt * parties), k, t)
                lost = math.log2(parties) + _tail(parties - 1, round(gone * parties), k, k - t + 1)
                if bad < -40 and lost < -30:
                    return k, t
    k = parties - 1 if neighbours is None else min(neighbours, parties - 1)
    k -= k % 2 and parties % 2
    return k, max(2, k // 2 + 1) if threshold is None else threshold


def _tail(population: int, marked: int, drawn: int, least: int) -> float:
    """log₂ P[at least so many of the drawn are marked], without replacement; its first term bounds the rest."""
    if least > min(marked, drawn):
        return -math.inf

    def log_choose(n: int, r: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(r + 1) - math.lgamma(n - r + 1)

    terms = [
        log_choose(marked, i) + log_choose(population - marked, drawn - i) - log_choose(population, drawn)
        for i in range(max(least, drawn - population + marked), min(marked, drawn) + 1)
    ]
    top = max(terms)
    return (top + math.log(sum(math.exp(t - top) for t in terms))) / math.log(2)


# Cryptography ---------------------------------------------------------------------------------------


def require_cryptography() -> None:
    """Refuse to begin without the package that encrypts."""
    try:
        import cryptography.hazmat.primitives.ciphers  # noqa: F401
    except ImportError:
        raise MissingExtra("secure aggregation between real nodes", "secure") from None


@dataclass
class KeyPair:
    """An X25519 key pair, made anew for every sum."""

    secret: bytes = field(default_factory=lambda: os.urandom(SEED), repr=False)

    @cached_property
    def _private(self) -> Any:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        return X25519PrivateKey.from_private_bytes(self.secret)

    @cached_property
    def public(self) -> bytes:
        public: bytes = self._private.public_key().public_bytes_raw()
        return public

    def agree(self, other: bytes, context: bytes) -> bytes:
        """32 bytes that only the two owners know, of X25519 and HKDF-SHA256, for this context alone."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError:
            raise WireError("a neighbour's public key is not a valid point") from None
        derived: bytes = HKDF(SHA256(), SEED, None, context).derive(shared)
        return derived


class MaskStream:
    """Masks of a session: the keystream of AES-256 in counter mode, key by key, written over one buffer."""

    def __init__(self, session: Session) -> None:
        self.session = session
        size = session.length * session.word.itemsize
        self._zeros, self._buffer = bytes(size), bytearray(size + 16)
        self._words = np.frombuffer(self._buffer, session.word, session.length)

    def __call__(self, key: bytes) -> Words:
        """As many numbers as the session's vectors have; valid until the next call."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update_into(self._zeros, self._buffer)
        return self._words


def _seal(key: bytes, sender: int, message: bytes, opens: bool = False) -> bytes:
    """Encrypt, or open, with a key that one pair of parties uses once in each direction."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    cipher, nonce = ChaCha20Poly1305(key), sender.to_bytes(12, "little")
    try:
        done: bytes = cipher.decrypt(nonce, message, None) if opens else cipher.encrypt(nonce, message, None)
    except InvalidTag:
        raise WireError(f"the shares from party {sender} do not open; they were changed in transit") from None
    return done


def _context(session: Session, purpose: bytes, a: int, b: int) -> bytes:
    return b"fedbraid secure sum 1 " + purpose + session.id + _PARTY.pack(min(a, b)) + _PARTY.pack(max(a, b))


# Messages -------------------------------------------------------------------------------------------


def _message(session: Session, stage: int, party: int, *parts: bytes) -> bytes:
    return b"".join([_HEADER.pack(MAGIC, VERSION, stage, session.id, party), *parts])


def _open(session: Session, stage: int, party: int, message: bytes) -> bytes:
    """The body of a message that must be of this stage, from or for this party."""
    if len(message) < _HEADER.size:
        raise WireError(f"a message of {len(message)} bytes is no message of a secure sum; it was cut short")
    its = _HEADER.unpack_from(message)
    if its[:2] != (MAGIC, VERSION):
        raise WireError("message is no message of a secure sum of this version; run the same fedbraid")
    if its[2:] != (stage, session.id, party):
        raise WireError(
            f"message is of stage {STAGES.get(its[2], its[2])} and party {its[4]}; party {party}'s of stage"
            f" {STAGES[stage]} of this session is expected"
        )
    return message[_HEADER.size :]


def _entries(body: bytes, size: int, allowed: Iterable[int]) -> dict[int, bytes]:
    """Rows of a party and so many bytes, each allowed party at most once."""
    row, known = _PARTY.size + size, set(allowed)
    if len(body) % row:
        raise WireError(f"a list of {len(body)} bytes is not made of rows of {row}; it was cut short")
    rows = [body[at : at + row] for at in range(0, len(body), row)]
    found = {_PARTY.unpack_from(r)[0]: r[_PARTY.size :] for r in rows}
    if len(found) != len(rows) or not found.keys() <= known:
        raise WireError(
            "a list names a party twice, or one that does not belong there; the sender is hostile"
        )
    return found


def _rows(entries: Mapping[int, bytes]) -> bytes:
    return b"".join(_PARTY.pack(party) + data for party, data in entries.items())


def stage_of(message: bytes) -> str:
    """Which stage a message from the server opens, to choose its reader by; nothing else of it is checked."""
    if len(message) < 4 or message[:3] != MAGIC + bytes([VERSION]) or message[3] > UNMASK:
        raise WireError("message is no message of a secure sum of this version; run the same fedbraid")
    return STAGES.get(message[3], "invitation")


# The client -----------------------------------------------------------------------------------------


@dataclass
class SecureClient:
    """One party of a sum; each method is one stage, and none is called twice."""

    session: Session
    party: int
    stage: int = KEYS
    cipher_key: KeyPair = field(default_factory=KeyPair, repr=False)
    mask_key: KeyPair = field(default_factory=KeyPair, repr=False)
    seed: bytes = field(default_factory=lambda: os.urandom(SEED), repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.party <= self.session.parties:
            raise WireError(f"party {self.party} does not belong to the session {self.session.parties}")

    @classmethod
    def invited(cls, invitation: bytes) -> SecureClient:
        """The party that a server's first message invites; WireError where no sum can be what it says."""
        try:
            session = Session.from_bytes(invitation[: -_PARTY.size])
        except ConfigError as error:
            raise WireError(f"the server invites to a sum that hides nothing: {error}") from error
        return cls(session, *_PARTY.unpack(invitation[-_PARTY.size :]))

    def keys(self) -> bytes:
        """Its public keys."""
        self._next(KEYS)
        return self._message(KEYS, self.cipher_key.public, self.mask_key.public)

    def shares(self, roster: bytes) -> bytes:
        """Encrypted shares for every neighbour whose keys these are."""
        self._next(SHARES)
        keys = self._read(SHARES, roster, 2 * KEY)
        self._public = {v: (both[:KEY], both[KEY:]) for v, both in keys.items()}
        points = np.array(list(keys), np.int64)
        t = self.session.threshold
        of_seed, of_key = (
            shamir.split(secret, t, points).astype("<u4") for secret in (self.seed, self.mask_key.secret)
        )
        self._pair = {
            v: self.cipher_key.agree(public, _context(self.session, b"cipher", self.party, v))
            for v, (public, _) in self._public.items()
        }
        sealed = {
            v: _seal(self._pair[v], self.party, of_seed[i].tobytes() + of_key[i].tobytes())
            for i, v in enumerate(self._pair)
        }
        return self._message(SHARES, _rows(sealed))

    def masked(self, shares: bytes, numbers: Words) -> bytes:
        """Its numbers, masked; the pairs are those from whom shares arrived."""
        self._next(MASKED)
        session = self.session
        sealed = self._read(MASKED, shares, SEALED, self._public)
        self._held = {v: _seal(self._pair[v], v, message, opens=True) for v, message in sealed.items()}
        if numbers.shape != (session.length,):
            raise ConfigError(f"{session.length} numbers are summed, got an array of shape {numbers.shape}")
        total, stream = numbers.astype(session.word), MaskStream(session)
        total += stream(self.seed)
        for v in self._held:
            key = self.mask_key.agree(self._public[v][1], _context(session, b"mask", self.party, v))
            add_pair(total, stream(key), self.party, v)
        return self._message(MASKED, session.pack(session.modulo(total)))

    def unmask(self, request: bytes) -> bytes:
        """One share of each neighbour: of its seed where its numbers arrived, else of its key."""
        self._next(UNMASK)
        asked = self._read(UNMASK, request, 1, self._held)
        if asked.keys() != self._held.keys() or any(flag not in (b"\0", b"\1") for flag in asked.values()):
            raise WireError("the server asks for shares of other clients than those that sent them")
        if sum(flag == b"\1" for flag in asked.values()) < self.session.threshold:
            raise WireError("the server asks to unmask a sum of fewer clients than the threshold")
        parts = [
            self._held[v][:SHARE] if flag == b"\1" else self._held[v][SHARE:] for v, flag in asked.items()
        ]
        return self._message(UNMASK, *parts)

    def _next(self, stage: int) -> None:
        if self.stage != stage:
            raise WireError(f"stage {STAGES[stage]} is not the next one; a client goes through each once")
        self.stage = stage + 1

    def _message(self, stage: int, *parts: bytes) -> bytes:
        return _message(self.session, stage, self.party, *parts)

    def _read(
        self, stage: int, message: bytes, size: int, allowed: Iterable[int] | None = None
    ) -> dict[int, bytes]:
        body = _open(self.session, stage, self.party, message)
        known = self.session.neighbours_of(self.party) if allowed is None else allowed
        found = _entries(body, size, known)
        if len(found) < self.session.threshold:
            raise WireError(
                f"{len(found)} neighbours are left, fewer than threshold={self.session.threshold}; this client stays silent"
            )
        return found


def add_pair(total: Words, mask: Words, party: int, other: int) -> None:
    """Add the mask of a pair as `party` does: the smaller adds, the larger subtracts."""
    if party < other:
        total += mask
    else:
        total -= mask


# The server -----------------------------------------------------------------------------------------


@dataclass
class SecureServer:
    """The server's side: `receive` what parties send in a stage, then `close` it for the messages that open the next."""

    session: Session
    stage: int = KEYS
    alive: set[int] = field(default_factory=set)  # who finished the stage before
    arrived: dict[int, Any] = field(default_factory=dict)  # of this stage
    finished: list[int] = field(default_factory=list)  # how many clients finished each stage

    def __post_init__(self) -> None:
        self.alive = set(range(1, self.session.parties + 1))
        self._neighbours: Callable[[int], frozenset[int]] = self.session.neighbours_of
        self._total = np.zeros(self.session.length, self.session.word)

    def receive(self, party: int, message: bytes) -> None:
        """A message of the present stage, from a party that the transport has identified."""
        if self.stage == DONE or party not in self.alive or party in self.arrived:
            raise WireError(f"party {party} is not expected to send anything in this stage, or did already")
        body = _open(self.session, self.stage, party, message)
        self.arrived[party] = getattr(self, f"_read_{STAGES[self.stage]}")(party, body)

    def _read_keys(self, party: int, body: bytes) -> bytes:
        if len(body) != 2 * KEY:
            raise WireError(f"two public keys are {2 * KEY} bytes, got {len(body)}")
        return body

    def _read_shares(self, party: int, body: bytes) -> dict[int, bytes]:
        mine = self._near(party, self.keys)
        found = _entries(body, SEALED, mine)
        if found.keys() != mine:
            raise WireError(f"party {party} sends shares for {len(found)} of its {len(mine)} neighbours")
        return found

    def _read_masked(self, party: int, body: bytes) -> bool:
        self._total += self.session.unpack(body)  # nothing else is stored of it
        return True

    def _read_unmask(self, party: int, body: bytes) -> dict[int, NDArray[np.int64]]:
        asked = self._asked(party)
        if len(body) != SHARE * len(asked):
            raise WireError(f"{len(asked)} shares are {SHARE * len(asked)} bytes, got {len(body)}")
        rows = np.frombuffer(body, "<u4").astype(np.int64).reshape(len(asked), -1)
        if len(rows) and rows.max() >= shamir.P:
            raise WireError("a share is not an element of the field; the sender is faulty or hostile")
        return dict(zip(asked, rows))

    def close(self) -> dict[int, bytes]:
        """End the stage with those that sent something: what each of them is sent, empty at the end."""
        self.alive, arrived, stage = set(self.arrived), self.arrived, self.stage
        self.finished.append(len(arrived))
        self.arrived = {}
        if stage == KEYS:
            self.keys = dict(sorted(arrived.items()))
            self._enough(self.alive, self.alive)
            out = {u: _rows({v: self.keys[v] for v in sorted(self._near(u, self.keys))}) for u in self.alive}
        elif stage == SHARES:
            self.shared = set(arrived)
            self._enough(self.alive, self.alive)
            out = {
                u: _rows({v: arrived[v][u] for v in sorted(self._near(u, self.shared))}) for u in self.alive
            }
        elif stage == MASKED:
            self.masked = set(arrived)
            self._enough(self.alive, self.masked | self._pairs_of_gone())
            out = {u: b"".join(_ASKED.pack(v, v in self.masked) for v in self._asked(u)) for u in self.alive}
        else:
            self._enough(self.alive, self.masked | self._pairs_of_gone())
            self._unmask(arrived)
            self.stage = DONE
            return {}
        self.stage = stage + 1
        return {u: _message(self.session, stage + 1, u, body) for u, body in out.items()}

    def total(self) -> Words:
        """The sum modulo 2^bits of the numbers of `masked`'s parties."""
        assert self.stage == DONE
        return self.session.modulo(self._total)

    def _near(self, party: int, among: Iterable[int]) -> set[int]:
        return set(self._neighbours(party)) & set(among)

    def _asked(self, party: int) -> list[int]:
        return sorted(self._near(party, self.shared))

    def _pairs_of_gone(self) -> set[int]:
        """Clients whose keys are needed: they shared, their numbers did not arrive, and a neighbour's did."""
        return {v for v in self.shared - self.masked if self._near(v, self.masked)}

    def _enough(self, helpers: set[int], needed: Iterable[int]) -> None:
        """Refuse to go on where one of those needed has too few neighbours left to help."""
        for party in sorted(needed):
            left = len(self._near(party, helpers))
            if left < self.session.threshold:
                raise too_few(self.session, STAGES[self.stage], party, left)

    def _unmask(self, arrived: dict[int, dict[int, NDArray[np.int64]]]) -> None:
        """Take every mask away that the numbers' own senders did not cancel."""
        session, stream = self.session, MaskStream(self.session)
        for u in self.masked:
            self._total -= stream(self._secret(u, arrived))
        for v in self._pairs_of_gone():
            pair = KeyPair(self._secret(v, arrived))
            if pair.public != self.keys[v][KEY:]:
                raise EngineError(
                    f"the shares of party {v}'s key give another key; a client sent false shares"
                )
            for u in self._near(v, self.masked):
                key = pair.agree(self.keys[u][KEY:], _context(session, b"mask", u, v))
                add_pair(self._total, stream(key), v, u)  # the half that did not arrive

    def _secret(self, party: int, arrived: dict[int, dict[int, NDArray[np.int64]]]) -> bytes:
        helpers = sorted(self._near(party, arrived))[: self.session.threshold]
        shares = np.stack([arrived[h][party] for h in helpers])
        return shamir.combine(np.array(helpers, np.int64), shares, SEED)
