"""The certificates of a job's control channel, and the connections that they allow (C2).

All are made from the job's own keys, always with the same bytes. Whoever calls trusts exactly the
coordinator's certificate. The coordinator trusts the job's authority, whose key only the operator
has: it signs one certificate for the agents and one for the operator. The names in them are those
of roles and not of hosts, because pods are reached by address.
"""

from __future__ import annotations

import os
import ssl
from asyncio.sslproto import SSLProtocol
from dataclasses import dataclass
from datetime import UTC, datetime
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
from paceline_api.names import CALLER_AGENT, CALLER_OPERATOR

from paceline_operator.core.keys import JobKeys

FROM: Final = datetime(2020, 1, 1, tzinfo=UTC)
UNTIL: Final = datetime(2120, 1, 1, tzinfo=UTC)
NAME: Final = "paceline-coordinator"
AUTHORITY: Final = "paceline-callers"
METRICS: Final = "paceline-operator"
RECORD_BYTES: Final = 16 * 1024
"""The most that TLS brings at once."""


@dataclass(frozen=True, slots=True)
class Pair:
    certificate: str
    private_key: str


@dataclass(frozen=True, slots=True)
class Certificates:
    """The certificates of one job, as PEM. The same keys always give the same ones."""

    server: Pair
    """The coordinator's, which is its own authority."""
    callers: str
    """Certificate of the authority that signs those of the callers."""
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
    """`subject`: equal to `issuer` for one that signs itself and, where it may, others."""
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
    """Return that of /metrics: a certificate that signs itself, made for this process alone. Who
    scrapes encrypts and does not know to whom; it is its token that is checked."""
    private = Ed25519PrivateKey.generate()
    made = _certificate(
        METRICS, private.public_key(), 1, METRICS, private, ExtendedKeyUsageOID.SERVER_AUTH
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load(context, _pair(made, private))
    return context


def operator_context(keys: JobKeys) -> ssl.SSLContext:
    """Return the TLS settings with which the operator calls the coordinator of one job.

    It talks to the holder of the coordinator's key and to nobody else, and shows the certificate
    that the job's authority has given the operator.
    """
    found = certificates_of(keys)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(cadata=found.server.certificate)
    _load(context, found.operator)
    return context


def _load(context: ssl.SSLContext, pair: Pair) -> None:
    """OpenSSL reads a key from a file only, and this one must never lie on a disk."""
    number = os.memfd_create("operator-key")
    try:
        with os.fdopen(number, "w", closefd=False) as file:
            file.write(pair.certificate + pair.private_key)
        context.load_cert_chain(f"/proc/self/fd/{number}")
    finally:
        os.close(number)


def spare_buffers() -> None:
    """asyncio sets a buffer of 256 KiB aside for each TLS connection of the process, for as long as
    it is open; of a thousand jobs that would be most of the operator's memory."""
    SSLProtocol.max_size = RECORD_BYTES
