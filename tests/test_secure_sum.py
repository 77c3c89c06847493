"""Secure sums: is the sum exact whoever drops out when, refused below the threshold, and is all else noise to the server?"""

from __future__ import annotations

import math
import os
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbraid.errors import ConfigError, EngineError, WireError
from fedbraid.privacy import shamir
from fedbraid.privacy.secure_sum import (
    SEALED,
    SecureClient,
    SecureServer,
    Session,
    choose_neighbours,
    traffic,
)

STAGES = ("keys", "shares", "masked", "unmask")


def session(n=6, k=5, t=3, bits=20, length=37, id=None):
    return Session(os.urandom(16) if id is None else id, n, k, t, bits, length)


def numbers_of(s: Session, party: int) -> np.ndarray:
    drawn = np.random.default_rng(party).integers(0, 1 << min(s.bits, 16), s.length)
    return drawn.astype(s.word)


def run(
    s: Session, gone: dict[int, str] | None = None, seen=None
) -> tuple[SecureServer, dict[str, list[int]]]:
    """A whole sum, in which these parties send nothing from that stage on: (the server, bytes up by stage)."""
    gone = gone or {}
    clients = {i: SecureClient(s, i) for i in range(1, s.parties + 1)}
    server, orders, sent = SecureServer(s), dict.fromkeys(clients, b""), {}
    for number, stage in enumerate(STAGES):
        for i, order in orders.items():
            if i in gone and STAGES.index(gone[i]) <= number:
                continue
            if stage == "keys":
                message = clients[i].keys()
            elif stage == "masked":
                message = clients[i].masked(order, numbers_of(s, i))
            else:
                message = getattr(clients[i], {"shares": "shares", "unmask": "unmask"}[stage])(order)
            sent.setdefault(stage, []).append(len(message))
            if seen is not None:
                seen.append((stage, i, message))
            server.receive(i, message)
        orders = server.close()
        sent.setdefault(f"{stage} down", []).extend(len(m) for m in orders.values())
    return server, sent


def summed(s: Session, gone: dict[int, str]) -> np.ndarray:
    there = [i for i in range(1, s.parties + 1) if gone.get(i) in (None, "unmask")]
    return s.modulo(sum((numbers_of(s, i) for i in there), np.zeros(s.length, s.word)))


# The sum


@pytest.mark.parametrize("bits", [1, 8, 16, 17, 20, 32, 33, 40, 52])
def test_the_sum_is_exact_at_every_width(bits):
    s = session(bits=bits)
    server, _ = run(s)
    assert np.array_equal(server.total(), summed(s, {}))
    assert server.total().dtype == (np.uint32 if bits <= 32 else np.uint64)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_every_drop_out_up_to_the_threshold_is_exact_and_one_more_is_refused(stage, lost):
    """Six clients that all know each other, a threshold of three: any two may go, in any stage, and no third."""
    for who in combinations(range(1, 7), lost):
        s = session(length=5)
        gone = dict.fromkeys(who, stage)
        if lost == 3:
            with pytest.raises(EngineError, match=f"failed in stage {stage}: 2 neighbours .* threshold=3"):
                run(s, gone)
        else:
            server, _ = run(s, gone)
            assert np.array_equal(server.total(), summed(s, gone))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_pattern_is_exact_or_refused_by_the_rule_of_neighbours(data):
    """By the rule as the paper states it: whoever's secrets are needed keeps `threshold` neighbours that answer."""
    n = data.draw(st.integers(4, 12))
    k = data.draw(st.integers(3, n - 1).filter(lambda k: k * n % 2 == 0))
    s = session(
        n, k, data.draw(st.integers(2, k)), length=4, id=data.draw(st.binary(min_size=16, max_size=16))
    )
    gone = data.draw(st.dictionaries(st.integers(1, n), st.sampled_from(STAGES), max_size=n - 1))

    def left(number):
        return {i for i in range(1, n + 1) if STAGES.index(gone.get(i, "unmask")) > number or i not in gone}

    keyed, shared, masked, answered = (left(i) for i in range(4))
    orphans = {v for v in shared - masked if s.neighbours_of(v) & masked}
    needed = [(keyed, keyed), (shared, shared), (masked, masked | orphans), (answered, masked | orphans)]
    fine = all(len(s.neighbours_of(i) & helpers) >= s.threshold for helpers, those in needed for i in those)
    if fine:
        server, _ = run(s, gone)
        assert np.array_equal(server.total(), summed(s, gone))
    else:
        with pytest.raises(EngineError, match="threshold="):
            run(s, gone)


def test_all_but_the_sum_is_uniform_to_the_server():
    """Chi-square of the bytes of every masked vector, of numbers that are all zero but one bit."""
    s = session(n=8, k=7, t=4, bits=16, length=4096)
    seen: list = []
    server, _ = run(s, {3: "unmask"}, seen)
    masked = [m[24:] for stage, _, m in seen if stage == "masked"]
    assert len(masked) == 8
    for body in masked:
        counts = np.bincount(np.frombuffer(body, np.uint8), minlength=256)
        chi = float(((counts - len(body) / 256) ** 2 / (len(body) / 256)).sum())
        assert chi < 255 + 6 * math.sqrt(2 * 255)  # six deviations
    plain = s.pack(numbers_of(s, 1))
    assert all(plain not in m for _, _, m in seen)
    assert np.array_equal(server.total(), summed(s, {}))


# Bytes


def test_traffic_is_the_length_of_the_messages():
    s = session(n=9, k=4, t=2)
    _, sent = run(s)
    counted = {f"up:{stage}": sum(sent[stage]) for stage in STAGES}
    counted |= {f"down:{stage}": sum(sent[f"{stage} down"]) for stage in STAGES[:3]}
    counted["down:keys"] += 9 * len(s.invitation(1))
    assert traffic(s, 9) == counted


# Shares


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(2, 9), st.data())
def test_any_threshold_of_shares_gives_the_secret(secret, threshold, data):
    points = np.arange(1, data.draw(st.integers(threshold, 12)) + 1)
    shares = shamir.split(secret, threshold, points)
    some = np.array(
        sorted(
            data.draw(
                st.sets(st.sampled_from(list(range(len(points)))), min_size=threshold, max_size=threshold)
            )
        )
    )
    assert shamir.combine(points[some], shares[some], 32) == secret


def test_fewer_shares_tell_nothing():
    """With one share missing every value of a piece is possible: two secrets explain the same shares."""
    points = np.array([1, 2])
    shares = shamir.split(bytes(32), 3, points)
    for value in (0, 1, 12345):  # a third share, such that the first piece is this
        full = np.array([1, 2, 3])
        w = shamir.lagrange_weights(full)
        partial = int((w[:2] * shares[:, 0] % shamir.P).sum() % shamir.P)
        third = (value - partial) * pow(int(w[2]), -1, shamir.P) % shamir.P
        assert (partial + int(w[2]) * third) % shamir.P == value


# Who is whose neighbour


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_neighbours_are_mutual_and_as_many_as_asked(data):
    n = data.draw(st.integers(3, 40))
    k = data.draw(st.integers(2, n - 1).filter(lambda k: k * n % 2 == 0))
    s = session(n, k, 2, id=data.draw(st.binary(min_size=16, max_size=16)))
    near = {i: s.neighbours_of(i) for i in range(1, n + 1)}
    assert all(len(v) == k and i not in v for i, v in near.items())
    assert all(i in near[j] for i, v in near.items() for j in v)


def test_chosen_neighbours_are_few_and_can_be_asked_for():
    assert choose_neighbours(10, None, None) == (9, 5)
    assert choose_neighbours(1000, 20, None) == (20, 11)
    assert choose_neighbours(11, 5, 3) == (4, 3)
    k, t = choose_neighbours(1000, None, None)
    assert 60 <= k <= 200
    assert 0.4 * k <= t <= 0.6 * k
    assert k <= choose_neighbours(100_000, None, None)[0] <= 2 * k


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"n": 2, "k": 1, "t": 1}, "threshold"),
        ({"t": 6}, "threshold=6"),
        ({"n": 7, "k": 3}, "even number"),
        ({"bits": 53}, "modulo"),
        ({"id": b"short"}, "16 bytes"),
    ],
)
def test_sessions_that_hide_nothing_are_refused(wrong, why):
    with pytest.raises(ConfigError, match=why):
        session(**wrong)


# Hostile messages


def stages_of(s: Session):
    """Clients and a server after each stage, everybody there."""
    clients = {i: SecureClient(s, i) for i in range(1, s.parties + 1)}
    server = SecureServer(s)
    for i, c in clients.items():
        server.receive(i, c.keys())
    roster = server.close()
    shares = {i: c.shares(roster[i]) for i, c in clients.items()}
    return clients, server, roster, shares


def test_a_client_refuses_what_would_unmask_another():
    s = session()
    clients, server, _roster, shares = stages_of(s)
    for i, m in shares.items():
        server.receive(i, m)
    routed = server.close()
    for i, c in clients.items():
        server.receive(i, c.masked(routed[i], numbers_of(s, i)))
    asked = server.close()
    head, rows = asked[1][:24], [asked[1][24 + 5 * j : 29 + 5 * j] for j in range(5)]
    for forged in (
        head + b"".join(rows[:4]),  # one neighbour left out
        head + b"".join([*rows, rows[0][:4] + b"\0"]),  # seed and key of one
        head + b"".join([r[:4] + b"\0" for r in rows]),  # all of them gone
        head + b"".join([*rows[:4], rows[4][:4] + b"\2"]),
        asked[2],
    ):
        victim = SecureClient(s, 1)
        victim.__dict__.update(clients[1].__dict__)
        with pytest.raises(WireError):
            victim.unmask(forged)
    clients[1].unmask(asked[1])
    with pytest.raises(WireError, match="once"):
        clients[1].unmask(asked[1])


def test_a_server_refuses_malformed_messages_and_strangers():
    s = session()
    clients, server, _, shares = stages_of(s)
    server.receive(1, shares[1])
    for party, message, why in (
        (1, shares[1], "did already"),
        (7, shares[2], "not expected"),
        (2, shares[3], "party 3"),
        (2, shares[2][:-1], "cut short"),
        (2, shares[2][:24], "0 of its 5"),
        (2, b"", "cut short"),
        (2, b"xx" + shares[2][2:], "version"),
        (2, clients[2]._message(1, bytes(64)), "stage"),
        (2, shares[2][:24] + shares[2][24:] * 2, "twice"),
    ):
        with pytest.raises(WireError, match=why):
            server.receive(party, message)
    assert list(server.arrived) == [1]


def test_shares_that_were_changed_on_the_way_are_refused():
    s = session()
    clients, server, _, shares = stages_of(s)
    bad = bytearray(shares[2])
    bad[-1] ^= 1
    for i in clients:
        server.receive(i, bytes(bad) if i == 2 else shares[i])
    routed = server.close()
    touched = int.from_bytes(bad[-SEALED - 4 : -SEALED], "little")  # whose row was changed
    with pytest.raises(WireError, match="do not open"):
        clients[touched].masked(routed[touched], numbers_of(s, touched))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_crash_a_reader(data):
    s = session(id=bytes(16))
    with pytest.raises(WireError):
        SecureServer(s).receive(1, data)
    client = SecureClient(s, 1)
    client.keys()
    with pytest.raises(WireError):
        client.shares(data)
    with pytest.raises((WireError, ConfigError)):
        Session.from_bytes(data)


def test_masked_numbers_beyond_the_modulus_are_refused():
    s = session(bits=20, length=3)
    data = bytearray(s.pack(np.array([1, 2, 3], np.uint32)))
    assert np.array_equal(s.unpack(bytes(data)), [1, 2, 3])
    data[-1] |= 1
    with pytest.raises(WireError, match="after the last"):
        s.unpack(bytes(data))
    with pytest.raises(WireError, match="got 1"):
        s.unpack(b"x")
