"""The certificates of a job's control channel, and the TLS contexts that use them (C2).

All certificates are derived from the job's own keys and always have the same bytes. Callers trust
exactly the coordinator's certificate. The coordinator trusts the job's authority, whose key only
the operator has. The authority signs one certificate for the agents and one for the operator. The
names in them are roles and not hosts, because pods are reached by address.
"""

from __future__ import annotations

import os
import ssl
from asyncio.sslproto import SSLProtocol
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from paceline_api.errors import PacelineError
from paceline_api.names import CALLER_AGENT, CALLER_OPERATOR

from paceline_operator.core.keys import JobKeys

FROM: Final = datetime(2020, 1, 1, tzinfo=UTC)
"""Start of the validity of all certificates."""
UNTIL: Final = datetime(2120, 1, 1, tzinfo=UTC)
"""End of the validity of all certificates."""
NAME: Final = "paceline-coordinator"
"""Subject of the coordinator's certificate."""
AUTHORITY: Final = "paceline-callers"
"""Subject of the certificate of the job's authority."""
METRICS: Final = "paceline-operator"
"""Subject of the certificate of /metrics."""
RECORD_BYTES: Final = 16 * 1024
"""Upper bound on the bytes that TLS delivers at once, in one record."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, as PEM."""

    certificate: str
    private_key: str


@dataclass(frozen=True, slots=True)
class Certificates:
    """The certificates of one job. The same keys always give the same ones."""

    server: Pair
    """The coordinator's certificate, which is its own authority."""
    callers: str
    """Certificate of the authority that signs those of the coordinator's callers, as PEM."""
    agent: Pair
    operator: Pair


def certificates_of(keys: JobKeys) -> Certificates:
    """Return all certificates of a job."""
    callers = Ed25519PrivateKey.from_private_bytes(keys.callers_seed)
    authority = _certificate(
        AUTHORITY, callers.public_key(), 1, AUTHORITY, callers, ExtendedKeyUsageOID.CLIENT_AUTH
    )
    signed = []
    for serial, role, seed in (
        (2, CALLER_AGENT, keys.agent_seed),
        (3, CALLER_OPERATOR, keys.operator_seed),
    ):
        own = Ed25519PrivateKey.from_private_bytes(seed)
        made = _certificate(
            role, own.public_key(), serial, AUTHORITY, callers, ExtendedKeyUsageOID.CLIENT_AUTH
        )
        signed.append(_pair(made, own))
    agent, operator = signed
    return Certificates(pair_of(keys), _pem(authority), agent, operator)


def pair_of(keys: JobKeys) -> Pair:
    """Return the coordinator's certificate and key."""
    private = Ed25519PrivateKey.from_private_bytes(keys.server_seed)
    made = _certificate(
        NAME, private.public_key(), 1, NAME, private, ExtendedKeyUsageOID.SERVER_AUTH
    )
    return _pair(made, private)


def _certificate(
    subject: str,
    public: Ed25519PublicKey,
    serial: int,
    issuer: str,
    signer: Ed25519PrivateKey,
    usage: x509.ObjectIdentifier,
) -> x509.Certificate:
    """Return a signed certificate.

    Args:
        subject: Name of the holder. If it equals `issuer`, the certificate is self-signed and may
            sign others.
        public: Public key of the holder.
        serial: Serial number.
        issuer: Name of the signer.
        signer: Private key of the signer.
        usage: Extended key usage: client or server.

    Returns:
        The certificate.
    """
    own = subject == issuer
    key_usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=own,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    constraints = x509.BasicConstraints(ca=own, path_length=0 if own else None)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(public)
        .serial_number(serial)
        .not_valid_before(FROM)
        .not_valid_after(UNTIL)
        .add_extension(constraints, critical=True)
        .add_extension(key_usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(subject)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    if not own:
        issued = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        builder = builder.add_extension(issued, critical=False)
    return builder.sign(signer, None)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def _pair(certificate: x509.Certificate, private: Ed25519PrivateKey) -> Pair:
    key = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Pair(certificate=_pem(certificate), private_key=key.decode())


def metrics_context() -> ssl.SSLContext:
    """Return the TLS context of /metrics, with a self-signed certificate of this process.

    Scrapers encrypt without knowing the server's identity; the operator checks their token.

    Returns:
        A server context for TLS 1.3.
    """
    private = Ed25519PrivateKey.generate()
    made = _certificate(
        METRICS, private.public_key(), 1, METRICS, private, ExtendedKeyUsageOID.SERVER_AUTH
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load(context, _pair(made, private))
    return context


class CertificateFiles:
    """The certificate of /metrics in a folder, as cert-manager or a Secret's volume writes it.

    The files are looked at when a connection begins. If they have changed, that connection and all
    later ones get the new certificate, so a renewal needs no restart. While the new files cannot be
    loaded, such as in the middle of a renewal, the last certificate stays.
    """

    def __init__(self, folder: Path) -> None:
        """Load the certificate.

        Args:
            folder: Folder with tls.crt, the certificate chain, and tls.key, both PEM.

        Raises:
            PacelineError: The files are missing, or are not a certificate and its key.
        """
        self._certificate, self._key = folder / "tls.crt", folder / "tls.key"
        try:
            self._last_state = self._state()
            self._newest = self._context()
        except (OSError, ssl.SSLError) as error:
            raise PacelineError(
                f"{folder} has no certificate for /metrics: {error}",
                hint="put the certificate into tls.crt and its private key into tls.key, both PEM",
            ) from None
        self.context = self._newest
        """Server context that chooses the newest certificate for each connection."""
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, *_: object) -> None:
        with suppress(OSError, ssl.SSLError):
            now = self._state()
            if now != self._last_state:
                self._newest = self._context()
                self._last_state = now
        connection.context = self._newest

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self._certificate, self._key, password="")
        return context

    def _state(self) -> tuple[tuple[int, int, int], ...]:
        stats = [path.stat() for path in (self._certificate, self._key)]
        return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in stats)


def operator_context(keys: JobKeys) -> ssl.SSLContext:
    """Return the TLS context with which the operator calls the coordinator of one job.

    It connects only to the holder of the coordinator's key, and presents the certificate that the
    job's authority has issued for the operator.

    Args:
        keys: Secrets of the job.

    Returns:
        A client context for TLS 1.3.
    """
    certificates = certificates_of(keys)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(cadata=certificates.server.certificate)
    _load(context, certificates.operator)
    return context


def _load(context: ssl.SSLContext, pair: Pair) -> None:
    """Load a certificate and its key into a context.

    OpenSSL reads a key only from a file, and this key must never be on a disk, so an anonymous file
    in memory is used.

    Args:
        context: The context to change.
        pair: The certificate and its key.
    """
    number = os.memfd_create("operator-key")
    try:
        with os.fdopen(number, "w", closefd=False) as file:
            file.write(pair.certificate + pair.private_key)
        context.load_cert_chain(f"/proc/self/fd/{number}")
    finally:
        os.close(number)


def spare_buffers() -> None:
    """Reduce the receive buffer of every TLS connection of this process.

    By default asyncio allocates 256 KiB for each connection as long as it is open. With a thousand
    jobs that would be most of the operator's memory.
    """
    SSLProtocol.max_size = RECORD_BYTES
