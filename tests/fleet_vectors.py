"""Messages of a fleet byte for byte, for clients in other languages: `python tests/fleet_vectors.py` writes them anew.

Every number, key and body is fixed. docs/fleet-wire.md says what they mean.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import nkeys
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedbraid.core.layout import Layout
from fedbraid.deploy.nats_connection import CHUNK_BYTES, model_subject
from fedbraid.deploy.node_nats import answer_chunks
from fedbraid.deploy.transport import KINDS, MAGIC, ModelReference, OrderSigner, SignedOrder
from fedbraid.links.identity import Identity

FILE = Path(__file__).with_name("fleet_vectors.json")
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
NOW = 1_800_000_000.0
SERIAL = 4_102_444_800_000_000  # beyond today's, which a signer never falls below
JOB = "00112233445566778899aabbccddeeff"


def pattern(size: int) -> bytes:
    """Byte i is i mod 251."""
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def make() -> dict[str, Any]:
    signer = OrderSigner(KEY, SERIAL - 1)
    model = ModelReference.of("v12", pattern(CHUNK_BYTES + 3))
    orders = [
        signer.sign("node-7", kind, run="run-1", job=JOB, deadline=NOW + 60.5, body=b'{"n":%d}' % i, model=m)
        for i, (kind, m) in enumerate(zip(KINDS, (None, None, None, None, None, model), strict=True))
    ]
    public = KEY.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    seed = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER).decode()
    pair = nkeys.from_seed(bytearray(seed.encode()))
    signature = base64.b64encode(pair.sign(b"a nonce of the broker")).decode()
    return {
        "now": NOW,
        "operator_public": public.decode(),
        "login": {"seed": seed, "nkey": pair.public_key.decode(), "nonce": "a nonce of the broker", "sig": signature},
        "orders": [_order(order) for order in orders],
        "refused": [{"reason": reason, "message": message.hex()} for reason, message in _refused(orders[-1])],
        "models": [_model(ModelReference.of("v12", pattern(n)), n) for n in (0, CHUNK_BYTES, CHUNK_BYTES + 3)],
        "answers": [_answer(n) for n in (0, 5, CHUNK_BYTES, 2 * CHUNK_BYTES + 1)],
        "frames": [_frame([0.5, -1.25, 3.0, 0.1])],
        "answer_bodies": [_body({"samples": 5, "version": -1}, b""), _body({"loss": 0.5, "version": 3}, b"\x00\xff")],
        "replies": {
            "stored": '{"stream":"UP", "seq":7}',
            "duplicate": '{"stream":"UP", "seq":7,"duplicate": true}',
            "quota": '{"error":{"code":503,"err_code":10077,"description":"maximum messages per subject exceeded"},"stream":"UP","seq":0}',
        },
    }  # fmt: skip


def _order(order: SignedOrder) -> dict[str, Any]:
    model = order.model
    return {
        "run": order.run, "job": order.job, "node": order.node, "kind": order.kind, "deadline": order.deadline,
        "serial": order.serial, "body": order.body.hex(), "model": None if model is None else [model.name, model.digest, model.size],
        "signed": (MAGIC + order.head).hex(), "message": order.to_bytes().hex(),
    }  # fmt: skip


def _refused(order: SignedOrder) -> list[tuple[str, bytes]]:
    message, start = order.to_bytes(), len(MAGIC)
    sign = OrderSigner(KEY, SERIAL + 100).sign
    return [
        ("not an order", b""),
        ("not an order", b'{"stream":"UP", "seq":7}'),
        ("not an order", message[: start + 70]),
        ("did not sign", message[:start] + bytes(64) + message[start + 64 :]),
        ("did not sign", message.replace(b"TRAIN", b"LEAVE")),
        ("not the one that was signed", message + b" "),
        ("for node-8", sign("node-8", "PING", run="run-1", job=JOB, deadline=NOW + 60).to_bytes()),
        ("deadline passed", sign("node-7", "PING", run="run-1", job=JOB, deadline=NOW - 60).to_bytes()),
    ]


def _model(reference: ModelReference, size: int) -> dict[str, Any]:
    parts = max(1, -(-size // CHUNK_BYTES))
    return {
        "name": reference.name, "size": size, "digest": reference.digest,
        "requests": [f"$JS.API.DIRECT.GET.MODEL.{model_subject(reference)}.{k}" for k in range(parts)],
    }  # fmt: skip


def _answer(size: int) -> dict[str, Any]:
    found = answer_chunks(JOB, pattern(size))
    return {"size": size, "job": JOB, "subject": "fb.r.node-7", "chunks": [[headers, len(part)] for headers, part in found]}  # fmt: skip


def _frame(values: list[float]) -> dict[str, Any]:
    vector = torch.tensor(values)
    layout = Layout.of(torch.nn.Linear(3, 1))
    frame = Identity().encode(vector, layout, 0)
    return {"layout": layout.fingerprint[:6].hex(), "vector": vector.tolist(), "frame": frame.hex()}


def _body(head: dict[str, Any], upload: bytes) -> dict[str, Any]:
    text = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
    message = len(text).to_bytes(4, "big") + text + upload
    return {"head": head, "upload": upload.hex(), "message": message.hex()}


if __name__ == "__main__":
    FILE.write_text(json.dumps(make(), indent=1) + "\n")
