"""Keys and certificates of a test cluster: one certificate authority and what it signs.

A Kubernetes user is a client certificate: its common name is the user, its organizations are the
groups. All keys use elliptic curves, since a cluster makes a dozen keys at each start.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_FOR = datetime.timedelta(days=30)
ADMINS = "system:masters"


@dataclass(frozen=True)
class KeyPair:
    """Paths of a certificate and of its private key, both in PEM."""

    certificate: Path
    key: Path


def write_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Generate a P-256 key, write it as PEM with mode 0600 and return it."""
    key = ec.generate_private_key(ec.SECP256R1())
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    return key


class Authority:
    """Certificate authority of one cluster; all its files lie in one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = write_private_key(folder / "ca.key")
        self._name = _subject("paceline-test-authority", ())
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        certificate = (
            self._builder(self._name, self._key)
            .add_extension(constraints, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = folder / "ca.crt"
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def client(self, user: str, *groups: str) -> KeyPair:
        """Issue a client certificate for `user` as a member of `groups`."""
        return self._issue(_subject(user, groups), user.replace(":", "-"), ())

    def server(self, name: str, hosts: tuple[str, ...]) -> KeyPair:
        """Issue a certificate for a server reached as `hosts`; it also serves as a client's."""
        return self._issue(_subject(name, ()), name, hosts)

    def _issue(self, subject: x509.Name, file_name: str, hosts: tuple[str, ...]) -> KeyPair:
        pair = KeyPair(self._folder / f"{file_name}.crt", self._folder / f"{file_name}.key")
        key = write_private_key(pair.key)
        usage = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if hosts:
            usage.append(ExtendedKeyUsageOID.SERVER_AUTH)
        builder = self._builder(subject, key).add_extension(x509.ExtendedKeyUsage(usage), False)
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_general_name(host) for host in hosts]), False
            )
        signed = builder.sign(self._key, hashes.SHA256())
        pair.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return pair

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            # The certificate stays valid if a clock is set back a little.
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + VALID_FOR)
        )


def _subject(user: str, groups: tuple[str, ...]) -> x509.Name:
    organisations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organisations, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
