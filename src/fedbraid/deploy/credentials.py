"""Who is who: a CA and the server's certificate, an NKey for each node, the operator's key that signs orders.

| file | who needs it | what it lets them do |
| --- | --- | --- |
| ca.crt | all | recognize the server |
| ca.key | the operator, to make another server certificate | be any server |
| server.crt, server.key | the broker | be the server |
| server.nk, monitor.nk | the server | read uploads, give orders; see who is connected |
| nodes.json | the broker | recognize nodes: a name and a public key each |
| node-i.nk | node i | be node i |
| edge-i.nk | edge i | read uploads, and fold those of its nodes |
| operator.key | the server | sign orders |
| operator.pub | nodes | recognize the operator's orders |

Files with secrets have mode 0600, and nothing is read from one that others can read.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedbraid.deploy.transport import EDGE, check_name
from fedbraid.errors import ConfigError, DataError, MissingExtra
from fedbraid.run.atomic_files import write_atomic

LOOPBACK = ("localhost", "127.0.0.1")  # where the server itself reaches the broker
CURVE = ec.SECP384R1()
DAYS = 825  # the longest that common clients accept of a server's certificate


class NodeKey(NamedTuple):
    """A node's name and the seed of its NKey."""

    name: str
    seed: str


def make(folder: Path, hosts: Sequence[str], nodes: int, edges: int = 0) -> list[Path]:
    """Write the missing ones of the files above, and keys for so many nodes and edges, from node-0 and edge-0 on.

    None is ever overwritten.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise DataError(f"{folder} cannot hold keys: {error.strerror}; choose another folder") from error
    made: list[Path] = []
    for name, writer in (("ca.crt", _authority), ("operator.pub", _operator)):
        if not (folder / name).exists():
            made += writer(folder)
    if not (folder / "server.crt").exists():
        made += _server(folder, hosts)
    for name in ("server", "monitor"):
        if not (folder / f"{name}.nk").exists():
            made.append(_nkey(folder, name))
    names = [f"node-{i}" for i in range(nodes)] + [f"{EDGE}{i}" for i in range(edges)]
    return made + add_nodes(folder, [name for name in names if not (folder / f"{name}.nk").exists()])


def add_nodes(folder: Path, names: Sequence[str]) -> list[Path]:
    """New keys for nodes, which a broker that runs accepts after its next reload."""
    registered = read_nodes(folder) if (folder / "nodes.json").exists() else {}
    for name in names:
        if check_name(name) in registered or name in ("server", "monitor"):
            raise ConfigError(f"{name} has a key in {folder}; use another name, or revoke it first")
    made = [_nkey(folder, name) for name in names]
    registered |= {name: public_key(folder / f"{name}.nk") for name in names}
    _write_nodes(folder, registered)
    return made


def revoke(folder: Path, name: str) -> str:
    """Take a node's public key off the list; the broker forgets it when it is reloaded."""
    registered = read_nodes(folder)
    if name not in registered:
        raise ConfigError(
            f"{name} is not a registered node; registered are {len(registered)} nodes in {folder}"
        )
    key = registered.pop(name)
    _write_nodes(folder, registered)
    with contextlib.suppress(FileNotFoundError):
        (folder / f"{name}.nk").unlink()
    return key


def read_nodes(folder: Path) -> dict[str, str]:
    """Public keys by the nodes' names."""
    path = folder / "nodes.json"
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or not all(isinstance(key, str) for key in found.values()):
            raise ValueError("it must be an object of names and public keys")
        return {check_name(name): key for name, key in found.items()}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); make it with: fedbraid deploy keys") from error


def read_key(path: Path) -> NodeKey:
    """What `node-7.nk` holds: the node's name and its seed, on one line."""
    try:
        name, seed = private_bytes(path).decode("ascii").split()
        return NodeKey(check_name(name), seed)
    except (ValueError, UnicodeError) as error:
        raise DataError(
            f"{path} is not a node's key ({error}); copy it again from where the keys were made"
        ) from error


def private_bytes(path: Path) -> bytes:
    """The content of a file that only its owner may read."""
    try:
        with path.open("rb") as file:
            if _is_loose(os.fstat(file.fileno())):
                raise ConfigError(f"{path} can be read by other users of this machine; use: chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}; make keys with: fedbraid deploy keys"
        ) from error


def loose_files(folder: Path) -> list[Path]:
    """The files with secrets that other users can read."""
    found = [*folder.glob("*.nk"), *folder.glob("*.key")]
    return sorted(path for path in found if _is_loose(path.stat()))


def _is_loose(file: os.stat_result) -> bool:
    """Whether others can read it; root may give a file to the group of a service, as Kubernetes does."""
    return bool(file.st_mode & (0o037 if file.st_uid == 0 and os.geteuid() else 0o077))


def public_key(path: Path) -> str:
    """The public half of an NKey's file."""
    pair = _nkeys().from_seed(bytearray(read_key(path).seed.encode()))
    return str(pair.public_key.decode())


def operator_key(folder: Path) -> ed25519.Ed25519PrivateKey:
    found = serialization.load_pem_private_key(private_bytes(folder / "operator.key"), None)
    if not isinstance(found, ed25519.Ed25519PrivateKey):
        raise DataError(
            f"{folder / 'operator.key'} is not an Ed25519 key; make one with: fedbraid deploy keys"
        )
    return found


def operator_public_key(path: Path) -> ed25519.Ed25519PublicKey:
    try:
        found = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); copy it from where the keys were made") from error
    if not isinstance(found, ed25519.Ed25519PublicKey):
        raise DataError(f"{path} is not an Ed25519 key; copy operator.pub from where the keys were made")
    return found


class Certificate(NamedTuple):
    """The names and addresses that a certificate is valid for, and until when."""

    hosts: list[str]
    until: datetime.datetime


def certificate(path: Path) -> Certificate:
    found = x509.load_pem_x509_certificate(path.read_bytes())
    hosts: list[str] = []
    with contextlib.suppress(x509.ExtensionNotFound):
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts += names.get_values_for_type(x509.DNSName)
        hosts += map(str, names.get_values_for_type(x509.IPAddress))
    return Certificate(hosts, found.not_valid_after_utc)


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
    key = ed25519.Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return [
        _write(folder / "operator.key", _private(key), 0o600),
        _write(folder / "operator.pub", public, 0o644),
    ]


def _nkey(folder: Path, name: str) -> Path:
    nkeys = _nkeys()
    seed = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER).decode()
    return _write(folder / f"{name}.nk", f"{name} {seed}\n".encode(), 0o600)


def _nkeys() -> Any:
    try:
        import nkeys
    except ImportError as error:
        raise MissingExtra("a fleet", "nats") from error
    return nkeys


def _write_nodes(folder: Path, registered: Mapping[str, str]) -> None:
    write_atomic(folder / "nodes.json", json.dumps(registered, indent=0).encode())


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


def _private(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
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
