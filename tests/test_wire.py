"""The wire format: byte-exact messages, and hostile ones refused with a reason."""

from __future__ import annotations

import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbraid.core.layout import Layout
from fedbraid.errors import ConfigError, WireError
from fedbraid.links import codecs
from fedbraid.links.wire import decode_scalars, encode_scalars, pack_message, unpack_message

LAYOUT = Layout.from_shapes([("w", (2, 5)), ("b", (2,))])
V = torch.tensor([-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0, -0.25, 0.125, 0.0, 3.0, -4.0])

# header (magic, version, kind, parameters, layout, length), body, checksum: docs/wire-format.md
GOLDEN = [
    (
        codecs.identity(),
        "664201000000794d6ef8c5e330000000000080bf000000bf000000000000803e0000003f0000403f0000803f000080be0000003e0000000000004040000080c0f1ce6432",
    ),
    (
        codecs.fp16(),
        "664201011000794d6ef8c5e31c00000000004040000080c0bc00b8000000340038003a003c00b40030000000b0ae381d",
    ),
    (codecs.int8(), "664201020800794d6ef8c5e31600000000004040000080c00402013c014080a0c0dfff6090807c1c4acc"),
    (codecs.int4(), "664201030400794d6ef8c5e31100000000004040000080c02549123e158abdf6986bab7c7b"),
    (
        codecs.uniform(5),
        "664201040500794d6ef8c5e31700000000004040000080c0000080bf0000803f02213befec8c00a0cfb825",
    ),
    (
        codecs.uniform(12),
        "664201040c00794d6ef8c5e31f00000000004040000080c0000080bf0000803f0004008009ffbffdfffff6008ff8007f46cab6",
    ),
    (
        codecs.kmeans(2),
        "664201050200794d6ef8c5e31b00000000004040000080c0000080bf0000c0be0000c03d0000403f1afda0eb59d595",
    ),
    (codecs.qsgd(4), "664201060400794d6ef8c5e31100000000004040000080c00000803f158abdf688bd7e97e6"),
    (
        codecs.qsgd(3, norm="l2", scope="vector", bucket=4, contractive=True, biases="quantise"),
        "66420106e381794d6ef8c5e3150000000400000076a4923f6f45af3fcc0ca0402e5b739310005ec6ad",
    ),
    (codecs.shared(5, 2.0), "664201080500794d6ef8c5e30c000000000000403adf1952ed83fc00f1eac105"),
    (
        codecs.shared(8, 2.0, rotate=True),
        "664201080801794d6ef8c5e31000000000000040d39ba76e796e90b2fe5b009bfe5d4718",
    ),
    (codecs.topk(0.25), "664201072000794d6ef8c5e31200000003000000000080bf00004040000080c08030b32f4527"),
    (codecs.topk(0.1, values="float16"), "664201071000794d6ef8c5e30a00000002000000004200c4b030445cdb90"),
]
CODECS = [codec for codec, _ in GOLDEN]
HEADER, CRC = 16, 4


def sealed(data: bytes) -> bytes:
    """The message with a checksum that holds."""
    return data[:-CRC] + struct.pack("<I", zlib.crc32(data[:-CRC]))


def with_bytes(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


# what a message is


@pytest.mark.parametrize(("codec", "message"), GOLDEN, ids=lambda p: repr(p)[:40])
def test_messages_are_these_very_bytes(codec, message):
    assert codec.encode(V, LAYOUT, seed=7).hex() == message
    assert torch.equal(
        codec.roundtrip(V[None], LAYOUT, [7])[0][0], codec.decode(bytes.fromhex(message), LAYOUT)
    )


def test_scalars_are_these_very_bytes():
    data = encode_scalars(torch.tensor([5.0]))
    assert data.hex() == "664201200100000000000000040000000000a04095fa46ae"
    assert decode_scalars(data, 1).tolist() == [5.0]


def test_a_message_of_several_vectors_is_these_very_bytes():
    data = pack_message({"delta": b"ab", "steps": b"c"})
    assert data.hex() == "664d0102050200000064656c746105010000007374657073c74d4918616263"
    assert unpack_message(data, limit=100) == {"delta": b"ab", "steps": b"c"}


def test_a_lone_delta_is_its_frame():
    data = codecs.int8().encode(V, LAYOUT)
    assert pack_message({"delta": data}) == data
    assert unpack_message(data, limit=1000) == {"delta": data}


def test_a_bytearray_or_a_view_will_do():
    data = codecs.int8().encode(V, LAYOUT)
    for same in (bytearray(data), memoryview(data)):
        assert torch.equal(codecs.int8().decode(same, LAYOUT), codecs.int8().decode(data, LAYOUT))


# what is refused, and why


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda m: b"", "cut short"),
        (lambda m: m[:19], "cut short"),
        (lambda m: m[:-1], "its header says"),
        (lambda m: m + b"\0", "its header says"),
        (lambda m: sealed(b"PK" + m[2:]), "not a fedbraid frame"),
        (lambda m: sealed(with_bytes(m, 2, b"\x02")), "format version 2"),
        (lambda m: sealed(with_bytes(m, 3, b"\x63")), "codec kind 99"),
        (lambda m: sealed(with_bytes(m, 4, b"\xff\x7f")), "codec parameters 0x7fff"),
        (lambda m: sealed(with_bytes(m, 6, b"another")), "another model"),
        (lambda m: sealed(with_bytes(m, 12, b"\xff\xff\xff\xff")), "body of 4294967295 bytes"),
        (lambda m: sealed(with_bytes(m, 12, b"\0\0\0\0")), "body of 0 bytes"),
        (lambda m: m[:-1] + bytes([m[-1] ^ 1]), "checksum"),
        (lambda m: with_bytes(m, HEADER, bytes([m[HEADER] ^ 1])), "checksum"),
    ],
)
def test_a_spoilt_message_is_refused_with_its_reason(codec, spoil, reason):
    with pytest.raises(WireError, match=reason):
        codec.decode(spoil(codec.encode(V, LAYOUT)), LAYOUT)


NAN, INF, BIG = struct.pack("<f", float("nan")), struct.pack("<f", float("inf")), struct.pack("<f", 3e38)
BIASES = HEADER + 8  # where side numbers start, after two biases


@pytest.mark.parametrize(
    ("codec", "at", "new", "reason"),
    [
        (codecs.identity(), HEADER, NAN, "not finite"),
        (codecs.int8(), HEADER, INF, "not finite"),
        (codecs.int8(), BIASES, NAN, "not finite"),
        (codecs.int8(), BIASES, BIG, "within float32"),
        (codecs.int8(), BIASES, bytes(4), "positive"),
        (codecs.int8(), BIASES, struct.pack("<f", -1), "positive"),
        (codecs.int8(), BIASES + 4, b"\0", "code 0"),
        (codecs.int4(), BIASES + 4, b"\x0f", "code 0"),
        (codecs.fp16(), BIASES, b"\x7c\0", "not finite"),
        (codecs.fp16(), BIASES, b"\xfe\0", "not finite"),
        (codecs.uniform(5), BIASES, INF, "not finite"),
        (codecs.uniform(5), BIASES, struct.pack("<ff", 1, 0), "no range"),
        (codecs.uniform(5), BIASES, struct.pack("<ff", -3e38, 3e38), "no range"),
        (codecs.uniform(5), BIASES + 8 + 6, b"\x01", "after its last code"),
        (codecs.kmeans(2), BIASES, NAN, "not finite"),
        (codecs.kmeans(2), BIASES, BIG, "not in order"),
        (codecs.qsgd(4), BIASES, struct.pack("<f", -1), "norm of -1"),
        (codecs.qsgd(4), BIASES, NAN, "not finite"),
        (codecs.qsgd(4), BIASES + 4, b"\0", "code 0"),
        (codecs.qsgd(4, bucket=3), HEADER, struct.pack("<I", 4), "other parameters"),
        (codecs.shared(5, 2.0), HEADER, struct.pack("<f", 1.0), "other parameters"),
        (codecs.shared(5, 2.0), HEADER + 4, b"\xff", "code 31"),
        (codecs.shared(5, 2.0), HEADER + 4 + 7, b"\x01", "after its last code"),
        (codecs.topk(0.25), HEADER, struct.pack("<I", 4), "other parameters"),
        (codecs.topk(0.25), HEADER + 4, NAN, "not finite"),
        (codecs.topk(0.25), HEADER + 16, b"\xff", "marks"),
        (codecs.topk(0.1), HEADER + 12, b"\xa0\x30", "out of order"),  # the same position twice
        (codecs.topk(0.1), HEADER + 12, b"\xb0\x0c", "out of order"),  # beyond the last
        (codecs.topk(0.1), HEADER + 12, b"\xb1\x30", "after its last position"),
    ],
)
def test_a_hostile_body_is_refused_with_its_reason(codec, at, new, reason):
    with pytest.raises(WireError, match=reason):
        codec.decode(sealed(with_bytes(codec.encode(V, LAYOUT), at, new)), LAYOUT)


def test_another_codec_or_layout_is_refused():
    other = Layout.from_shapes([("w", (5, 2)), ("b", (2,))])
    for codec in CODECS:
        with pytest.raises(WireError, match="another model"):
            codec.decode(codec.encode(V, LAYOUT), other)
        for stranger in CODECS:
            if stranger != codec:
                with pytest.raises(WireError):
                    stranger.decode(codec.encode(V, LAYOUT), LAYOUT)


def test_what_is_not_bytes_is_refused():
    with pytest.raises(WireError, match="not str"):
        codecs.int8().decode("text", LAYOUT)


positions = st.integers(0, 10**6)
edits = st.one_of(
    st.tuples(st.just("flip"), positions, st.integers(0, 7)),
    st.tuples(st.just("set"), positions, st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("cut"), positions, st.none()),
    st.tuples(st.just("add"), positions, st.binary(min_size=1, max_size=40)),
)


def edited(data: bytes, edit) -> bytes:
    kind, at, what = edit
    at %= max(len(data), 1)
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 1 << what]) + data[at + 1 :] if data else data
    if kind == "set":
        return data[:at] + what + data[at + len(what) :]
    return data[:at] if kind == "cut" else data[:at] + what + data[at:]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(CODECS), st.lists(edits, min_size=1, max_size=4))
def test_altered_bytes_are_never_accepted(codec, changes):
    data = altered = codec.encode(V, LAYOUT)
    for change in changes:
        altered = edited(altered, change)
    if altered != data:
        with pytest.raises(WireError):
            codec.decode(altered, LAYOUT)


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(CODECS), st.lists(edits, min_size=1, max_size=4))
def test_a_forged_checksum_gets_a_finite_vector_or_a_refusal(codec, changes):
    altered = codec.encode(V, LAYOUT)
    for change in changes:
        altered = edited(altered, change)
    try:
        out = codec.decode(sealed(altered), LAYOUT)
    except WireError:
        return
    assert out.shape == V.shape
    assert torch.isfinite(out).all()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80))
def test_noise_is_refused(data):
    for codec in CODECS:
        with pytest.raises(WireError):
            codec.decode(data, LAYOUT)
    with pytest.raises(WireError):
        decode_scalars(data, 1)


# several vectors


@settings(max_examples=300, deadline=None)
@given(st.lists(edits, min_size=1, max_size=3))
def test_an_altered_container_is_refused_or_hands_on_altered_frames(changes):
    frames = {"delta": codecs.int4().encode(V, LAYOUT), "dc": codecs.fp16().encode(V, LAYOUT)}
    data = altered = pack_message(frames)
    for change in changes:
        altered = edited(altered, change)
    try:
        found = unpack_message(altered, limit=10_000)
    except WireError:
        return
    assert altered == data or found != frames


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no fedbraid message"),
        (b"fM\x01\x00", "no fedbraid message"),
        (b"fM\x02\x01", "no fedbraid message"),
        (b"fM\x01\xff\x01", "cut short"),
        (b"fM\x01\x01\x05\xff\xff\xff\xffdelta", "checksum"),
        (b"fM\x01\x01\x01\x00\x00\x00\x00/", "names a vector"),
        (bytes(101), "longer than the 100"),
    ],
)
def test_a_hostile_container_is_refused_with_its_reason(data, reason):
    with pytest.raises(WireError, match=reason):
        unpack_message(data, limit=100)


def container(*entries: tuple[bytes, bytes]) -> bytes:
    index = b"fM\x01" + bytes([len(entries)])
    index += b"".join(struct.pack("<BI", len(name), len(body)) + name for name, body in entries)
    return index + struct.pack("<I", zlib.crc32(index)) + b"".join(body for _, body in entries)


def test_containers_no_sender_makes_are_refused():
    with pytest.raises(WireError, match="twice"):
        unpack_message(container((b"a", b"x"), (b"a", b"y")), limit=100)
    with pytest.raises(WireError, match="lone delta"):
        unpack_message(container((b"delta", b"x")), limit=100)
    with pytest.raises(WireError, match="over-long"):
        unpack_message(container((b"a", b"x")) + b"y", limit=100)


def test_messages_that_cannot_be_made_say_so():
    for frames, reason in (({}, "1 to 255"), ({"a b": b""}, "cannot name"), ({"": b""}, "cannot name")):
        with pytest.raises(ConfigError, match=reason):
            pack_message(frames)
    with pytest.raises(WireError, match="not all finite"):
        encode_scalars(torch.tensor([float("nan")]))
    with pytest.raises(ConfigError, match="65535"):
        encode_scalars(torch.zeros(70_000))
    with pytest.raises(WireError, match="not finite"):
        decode_scalars(sealed(with_bytes(encode_scalars(torch.ones(1)), HEADER, NAN)), 1)
    with pytest.raises(WireError, match="parameters"):
        decode_scalars(encode_scalars(torch.ones(2)), 1)
