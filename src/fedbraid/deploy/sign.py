"""Signed apps: the operator signs a bundle, and nodes and server run nothing else.

The signature is Flower's own (Ed25519 over a time and the bundle's SHA-256), so that plain `flower-supernode
--trusted-entities` checks it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedbraid.deploy.keys import key_id
from fedbraid.errors import DataError


def sign(fab: bytes, key: Path) -> dict[str, str]:
    """The signature of a bundle, in the form in which Flower hands it to nodes."""
    try:
        private = load_ssh_private_key(key.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise DataError(f"{key} is no signing key ({error}); make one with: fedbraid deploy keys") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise DataError(f"{key} is no Ed25519 key; make one with: fedbraid deploy keys")
    at = int(time.time())
    public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    signature = base64.urlsafe_b64encode(private.sign(_signed(fab, at))).rstrip(b"=").decode()
    about = {"signature": signature, "signed_at": at}
    return {key_id(public): json.dumps(about), "valid_license": "Valid"}  # without the last, nodes refuse


def is_signed(fab: bytes, signatures: Mapping[str, str], trusted: Mapping[str, str]) -> bool:
    """Whether one of the trusted keys signed this bundle."""
    return any(
        _verifies(fab, signatures[name], public) for name, public in trusted.items() if name in signatures
    )


def read_trusted(path: Path) -> dict[str, str]:
    """Key ids and public keys, from the file that `deploy keys` writes."""
    try:
        lines = path.read_text().splitlines()
        return {name: key.strip().strip("'") for name, key in (x.split(":", 1) for x in lines if x.strip())}
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is no list of trusted keys ({error}); compare: fedbraid deploy keys"
        ) from error


def _verifies(fab: bytes, about: str, public: str) -> bool:
    try:
        found = json.loads(about)
        signature = base64.urlsafe_b64decode(found["signature"] + "==")
        key = load_ssh_public_key(public.encode())
        if not isinstance(key, Ed25519PublicKey):
            return False
        key.verify(signature, _signed(fab, int(found["signed_at"])))
    except (InvalidSignature, ValueError, KeyError, TypeError, OverflowError):
        return False
    return True


def _signed(fab: bytes, at: int) -> bytes:
    return at.to_bytes(8, "big") + hashlib.sha256(fab).digest()
