"""Keys and certificates of a federation: a CA of its own, a server certificate, and a key pair for each node.

DIR/ca.crt, ca.key                    the CA; keep ca.key away from everything else
DIR/server.crt, server.key            for `fcil serve --tls DIR`
DIR/nodes/NAME/NAME.key, NAME.pub, ca.crt    for `fcil join --key`: this folder goes to the node
"""

import ipaddress
import os
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcil.errors import UserError, lacking
from fcil.files import whole

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate

LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
HOST = re.compile(rf"({LABEL}\.)*(?![0-9]+$){LABEL}")  # what ends in a number would be an address
CA_DAYS = 3650  # that the CA lives, and the most that a server certificate may


def make(
    folder: Path, hosts: Sequence[str], nodes: Sequence[str], days: int, say: Callable[[str], None] = lambda _: None
) -> list[Path]:
    """Make what is missing or, of the CA, expired; a server certificate is made anew where hosts are named.

    Return what was written.
    """
    for name in nodes:
        if not name or not all(c.isalnum() or c in "-_" for c in name):
            raise UserError(f"{name!r} is no name for a node; it takes letters, digits, - and _")
    names = [_san(host) for host in hosts or ("localhost", "127.0.0.1")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written, new = [], not (folder / "ca.crt").exists()
        if old := not new and _expired(folder / "ca.crt"):
            if not hosts:
                raise UserError(
                    f"{folder / 'ca.crt'} has expired; name the server's hosts too, with --host, to make it anew"
                )
            say("the CA had expired and is made anew: copy ca.crt to every node again")
        if new or old:
            written += _make_ca(folder)
            for copy in sorted(folder.glob("nodes/*/ca.crt")):
                copy.write_bytes((folder / "ca.crt").read_bytes())
                written.append(copy)
        if new or hosts or not (folder / "server.crt").exists():
            written += _make_server(folder, names, days)
        for name in nodes:
            written += _make_node(folder, name)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from None
    return written


def check(certificate: Path) -> None:
    """Say what is wrong with a certificate file."""
    try:
        found = _read_certificate(certificate)
    except FileNotFoundError:
        raise UserError(f"there is no certificate {certificate}; make one with: fcil certs DIR") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{certificate} is not a readable certificate ({error})") from None
    now = datetime.now(UTC)
    if found.not_valid_after_utc < now:
        raise UserError(
            f"{certificate} expired on {found.not_valid_after_utc:%Y-%m-%d}; make a new one on the server's machine "
            "with: fcil certs DIR --host HOST, and copy ca.crt to the nodes if that is new"
        )
    if found.not_valid_before_utc > now:
        raise UserError(
            f"{certificate} is not valid before {found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; is this clock right?"
        )


def check_key(key: Path) -> None:
    """Say what is wrong with a node's private key."""
    serialization, _, ec = _library()
    if not key.is_file():
        raise UserError(f"there is no key {key}; `fcil certs` makes one for each node")
    try:
        found = serialization.load_ssh_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{key} is not a private key of `fcil certs` ({error})") from None
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise UserError(f"{key} is not an elliptic-curve key; `fcil certs` makes one")


def check_public_key(key: Path) -> None:
    """Say what is wrong with a node's public key."""
    serialization, _, ec = _library()
    try:
        found = serialization.load_ssh_public_key(key.read_bytes())
    except Exception as error:
        raise UserError(f"{key} is not a public key of `fcil certs` ({error})") from None
    if not isinstance(found, ec.EllipticCurvePublicKey):
        raise UserError(f"{key} is not an elliptic-curve key; `fcil certs` makes one")


def _expired(certificate: Path) -> bool:
    try:
        return _read_certificate(certificate).not_valid_after_utc < datetime.now(UTC)
    except ValueError:
        return False  # it is said what is wrong with it when it is used


def _make_ca(folder: Path) -> list[Path]:
    _, x509, _ = _library()
    key, name = _key(), _name("fcil CA")
    builder = _certificate(name, name, key.public_key(), CA_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    usage = {"digital_signature", "key_cert_sign", "crl_sign"}
    builder = builder.add_extension(_usage(usage), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return [_write_key(folder / "ca.key", key), _write_certificate(folder / "ca.crt", _signed(builder, key))]


def _make_server(folder: Path, names: Sequence[Any], days: int) -> list[Path]:
    serialization, x509, _ = _library()
    from cryptography.x509.oid import ExtendedKeyUsageOID

    check(folder / "ca.crt")
    ca = _read_certificate(folder / "ca.crt")
    try:
        ca_key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except FileNotFoundError:
        raise UserError(f"{folder} has ca.crt but not ca.key, without which nothing can be signed") from None
    except (ValueError, TypeError):
        raise UserError(f"{folder / 'ca.key'} is not a readable key, and without it nothing can be signed") from None
    key = _key()
    builder = _certificate(_name("fcil server"), ca.subject, key.public_key(), days)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage({"digital_signature"}), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.public_key())
    builder = builder.add_extension(issuer, critical=False)
    signed = _signed(builder, ca_key)
    return [_write_key(folder / "server.key", key), _write_certificate(folder / "server.crt", signed)]


def _make_node(folder: Path, name: str) -> list[Path]:
    serialization, _, _ = _library()
    place = folder / "nodes" / name
    if (place / f"{name}.pub").exists():
        return []
    place.mkdir(parents=True, exist_ok=True)
    key = _key()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write_private(place / f"{name}.key", private)
    (place / "ca.crt").write_bytes((folder / "ca.crt").read_bytes())
    with whole(place / f"{name}.pub") as partial:  # a server that is running may look at any moment
        partial.write_bytes(public + b"\n")
    return [place / f"{name}.key", place / f"{name}.pub", place / "ca.crt"]


def _library() -> tuple[Any, Any, Any]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise lacking("this needs Flower and what comes with it", "flower") from None
    return serialization, x509, ec


def _key() -> "EllipticCurvePrivateKey":
    _, _, ec = _library()
    key: EllipticCurvePrivateKey = ec.generate_private_key(ec.SECP384R1())
    return key


def _name(text: str) -> Any:
    _, x509, _ = _library()
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _san(host: str) -> Any:
    _, x509, _ = _library()
    if not host.strip():
        raise UserError("--host is empty; it takes a host name or an IP address")
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if len(host) > 253 or not HOST.fullmatch(host):
        raise UserError(f"--host {host} is not allowed; it takes a host name or an IP address, without a port")
    return x509.DNSName(host)


def _usage(wanted: set[str]) -> Any:
    _, x509, _ = _library()
    every = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{use: use in wanted for use in every})


def _certificate(subject: Any, issuer: Any, key: Any, days: int) -> Any:
    _, x509, _ = _library()
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - timedelta(minutes=5)).not_valid_after(now + timedelta(days=days))


def _signed(builder: Any, key: Any) -> "Certificate":
    from cryptography.hazmat.primitives import hashes

    made: Certificate = builder.sign(key, hashes.SHA384())
    return made


def _read_certificate(path: Path) -> "Certificate":
    _, x509, _ = _library()
    found: Certificate = x509.load_pem_x509_certificate(path.read_bytes())
    return found


def _write_certificate(path: Path, certificate: "Certificate") -> Path:
    serialization, _, _ = _library()
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path


def _write_key(path: Path, key: "EllipticCurvePrivateKey") -> Path:
    serialization, _, _ = _library()
    form = serialization.PrivateFormat.PKCS8
    return _write_private(path, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def _write_private(path: Path, content: bytes) -> Path:
    """Write what only its owner may read."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    return path
