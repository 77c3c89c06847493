"""Who is who: a CA and the server's certificate, a key pair a node, the operator's token, the key that signs apps.

| file | who needs it | what it lets them do |
| --- | --- | --- |
| ca.crt | everybody | know the server |
| ca.key | nobody, day to day | make another server |
| server.crt, server.key | the server | be the server |
| operator.sha256, trusted.yaml | the server | know the operator, know signed apps |
| trusted.yaml | nodes | know signed apps |
| node-i.key | node i | be node i, once node-i.pub is registered |
| operator.token | the operator | register nodes, start and stop runs of signed apps, look |
| signing.key | the operator | say which code nodes and server run |
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import ipaddress
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedbraid.errors import ConfigError, DataError

LOOPBACK = ("localhost", "127.0.0.1")  # where the operator and the server's own apps reach it
CURVE = ec.SECP384R1()
DAYS = 825  # the longest that common clients accept of a server's certificate


def make(folder: Path, hosts: Sequence[str], nodes: int) -> list[Path]:
    """Write what is missing of the files above; none is ever overwritten.

    Where a CA is already there, it signs a new server certificate only if there is none.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise DataError(f"{folder} cannot hold keys: {error.strerror}; choose another folder") from error
    made: list[Path] = []
    if not (folder / "ca.crt").exists():
        made += _authority(folder)
    if not (folder / "server.crt").exists():
        made += _server(folder, hosts)
    if not (folder / "operator.token").exists():
        made += _operator(folder)
    if not (folder / "signing.key").exists():
        made += _signing(folder)
    for i in range(nodes):
        if not (folder / f"node-{i}.key").exists():
            made += _pair(folder, f"node-{i}")
    return made


def _authority(folder: Path) -> list[Path]:
    key = ec.generate_private_key(CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedbraid CA")])
    cert = (
        _certificate(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    return [_write(folder / "ca.key", _private(key), 0o600), _write(folder / "ca.crt", _pem(cert), 0o644)]


def _server(folder: Path, hosts: Sequence[str]) -> list[Path]:
    if not hosts:
        raise ConfigError(
            "a server certificate needs a name; give --host with the address that nodes connect to"
        )
    try:
        authority = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except OSError as error:
        raise ConfigError(
            f"{folder / 'ca.key'} is needed to sign a server certificate: {error.strerror}"
        ) from error
    assert isinstance(authority, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    valid = dict.fromkeys([*hosts, *LOOPBACK])
    key = ec.generate_private_key(CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    cert = (
        _certificate(name, issuer.subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_host(h) for h in valid]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
        )
        .sign(authority, hashes.SHA384())
    )
    return [
        _write(folder / "server.key", _private(key), 0o600),
        _write(folder / "server.crt", _pem(cert), 0o644),
    ]


def _operator(folder: Path) -> list[Path]:
    """The operator's token; the server gets to know its hash alone."""
    token = secrets.token_urlsafe(32)
    hash_ = fingerprint(token.encode()).encode()
    return [
        _write(folder / "operator.token", token.encode(), 0o600),
        _write(folder / "operator.sha256", hash_, 0o644),
    ]


def _signing(folder: Path) -> list[Path]:
    """The key that signs apps, and the list of trusted keys as Flower's nodes read it."""
    key = ed25519.Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    trusted = f"{key_id(public)}: '{public.decode()}'\n"
    return [
        _write(folder / "signing.key", private, 0o600),
        _write(folder / "trusted.yaml", trusted.encode(), 0o644),
    ]


class Certificate(NamedTuple):
    """What a certificate says."""

    hosts: list[str]  # the names and addresses that it is valid for
    until: datetime.datetime


def certificate(path: Path) -> Certificate:
    found = x509.load_pem_x509_certificate(path.read_bytes())
    hosts: list[str] = []
    with contextlib.suppress(x509.ExtensionNotFound):
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts += names.get_values_for_type(x509.DNSName)
        hosts += map(str, names.get_values_for_type(x509.IPAddress))
    return Certificate(hosts, found.not_valid_after_utc)


def signed(key: Path | None) -> tuple[dict[str, str], bytes]:
    """(the headers by which a node with this key is known to a SuperLink, its public key); without one, a new key."""
    try:
        private = (
            ec.generate_private_key(CURVE)
            if key is None
            else serialization.load_ssh_private_key(key.read_bytes(), None)
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} is no node's private key: {error}") from error
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    now = datetime.datetime.now(datetime.UTC).isoformat()
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    parts = {
        "flwr-public-key": public,
        "flwr-signature": private.sign(now.encode(), ec.ECDSA(hashes.SHA256())),
    }
    return {k: base64.b64encode(v).decode() for k, v in parts.items()} | {"flwr-timestamp": now}, public


def fingerprint(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def key_id(public: bytes) -> str:
    """What Flower calls a signing key."""
    return f"fpk_{fingerprint(public)[:32]}"


def _pair(folder: Path, name: str) -> list[Path]:
    key = ec.generate_private_key(CURVE)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    return [_write(folder / f"{name}.key", private, 0o600), _write(folder / f"{name}.pub", public, 0o644)]


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _usage(sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=not sign, key_cert_sign=sign, crl_sign=sign, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem


def _pem(certificate: x509.Certificate) -> bytes:
    pem: bytes = certificate.public_bytes(serialization.Encoding.PEM)
    return pem


def _write(path: Path, data: bytes, mode: int) -> Path:
    """A new file with these rights from its first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    return path
