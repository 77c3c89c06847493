"""Mutate messages and decode them: nothing may happen but a WireError or a finite vector of the right length.

python benchmarks/fuzz_wire.py --messages 1000000
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable

import torch

from fedbraid.core.codec import Codec
from fedbraid.core.layout import Layout
from fedbraid.errors import WireError
from fedbraid.links import codecs
from fedbraid.links.wire import decode_scalars, encode_scalars, pack_message, unpack_message

LAYOUT = Layout.from_shapes([("w", (4, 9)), ("b", (4,)), ("v", (2, 3, 3))])
CODECS: list[Codec] = [
    codecs.identity(),
    codecs.fp16(),
    codecs.int8(),
    codecs.int4(biases="quantise"),
    codecs.uniform(3),
    codecs.uniform(11),
    codecs.kmeans(2),
    codecs.qsgd(4),
    codecs.qsgd(5, norm="l2", bucket=8, scope="vector", contractive=True),
    codecs.shared(6, 2.0),
    codecs.topk(0.05),
    codecs.topk(0.4, values="float16"),
    codecs.mixed(codecs.uniform(4), share=0.5),
]
SPECIAL = [struct.pack("<f", x) for x in (float("nan"), float("inf"), -1.0, 3e38, 1e-45)]
SPECIAL += [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x80", b"fB", b"fM"]


def mutate(data: bytes, r: random.Random) -> bytes:
    """One random edit: flip, set, special value, cut, insert, or move a piece."""
    at, kind = r.randrange(len(data) + 1), r.randrange(6)
    if kind == 0 and at < len(data):
        return data[:at] + bytes([data[at] ^ 1 << r.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        new = r.randbytes(r.randint(1, 8))
        return data[:at] + new + data[at + len(new) :]
    if kind == 2:
        new = r.choice(SPECIAL)
        return data[:at] + new + data[at + len(new) :]
    if kind == 3:
        return data[:at]
    if kind == 4:
        return data[:at] + r.randbytes(r.randint(1, 64)) + data[at:]
    size = r.randint(1, 16)
    return data[:at] + data[at + size :] + data[at : at + size]


def sealed(data: bytes) -> bytes:
    """The frame as a forger would send it: of the length its header says, with a checksum that holds."""
    if len(data) < 20:
        return data
    data = data[:12] + struct.pack("<I", len(data) - 20) + data[16:]
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))


def targets(r: random.Random) -> list[tuple[bytes, Callable[[bytes], list[torch.Tensor]]]]:
    """Messages, and how each is read."""
    v = torch.tensor([r.gauss(0, 1) for _ in range(LAYOUT.size)])
    reads: list[tuple[bytes, Callable[[bytes], list[torch.Tensor]]]] = [
        (c.encode(v, LAYOUT, r.getrandbits(32)), lambda data, c=c: [c.decode(data, LAYOUT)])  # type: ignore[misc]
        for c in CODECS
    ]
    reads.append((encode_scalars(v[:3]), lambda data: [decode_scalars(data, 3)]))
    both = pack_message({"delta": reads[2][0], "steps": encode_scalars(v[:1])})

    def read_both(data: bytes) -> list[torch.Tensor]:
        frames = unpack_message(data, limit=4096)
        if list(frames) != ["delta", "steps"]:
            raise WireError(f"message holds {list(frames)}")
        return [CODECS[2].decode(frames["delta"], LAYOUT), decode_scalars(frames["steps"], 1)]

    return [*reads, (both, read_both)]


def fuzz(messages: int, seed: int) -> dict[str, object]:
    r, seen = random.Random(seed), Counter[str]()
    pool = targets(r)
    slowest = 0.0
    tracemalloc.start()
    start = time.perf_counter()
    for i in range(messages):
        if i % 10_000 == 0:
            pool = targets(r)
        data, read = r.choice(pool)
        altered = data
        for _ in range(r.randint(1, 3)):
            altered = mutate(altered, r)
        forged = r.random() < 0.5
        altered = sealed(altered) if forged else altered
        before = time.perf_counter()
        seen[outcome(read, altered, altered == data, forged)] += 1
        slowest = max(slowest, time.perf_counter() - before)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "messages": messages,
        "seconds": round(time.perf_counter() - start, 1),
        "refused": seen["refused"],
        "forged checksum, finite vector": seen["forged"],
        "mutated back to the original": seen["same"],
        "altered bytes accepted": seen["accepted"],
        "not finite": seen["not finite"],
        "crashes": {kind: n for kind, n in seen.items() if kind.startswith("crash")},
        "slowest ms": round(1e3 * slowest, 2),
        "peak memory kB": peak // 1000,
    }


def outcome(read: Callable[[bytes], list[torch.Tensor]], data: bytes, same: bool, forged: bool) -> str:
    try:
        vectors = read(data)
    except WireError:
        return "refused"
    except Exception as e:
        return f"crash: {type(e).__name__}: {e}"
    if not all(torch.isfinite(v).all() for v in vectors):
        return "not finite"
    return "same" if same else "forged" if forged else "accepted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = fuzz(args.messages, args.seed)
    print(json.dumps(found, indent=2))
    if found["crashes"] or found["altered bytes accepted"] or found["not finite"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
