"""A coordinator's certificate, and the connection that accepts only this one (C2).

There is no authority: the certificate is made from the job's own key, always with the same bytes,
and both ends of the control channel trust exactly it. Its name is that of no host, because pods
are reached by address.
"""

from __future__ import annotations

import ssl
from asyncio.sslproto import SSLProtocol
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline_operator.core.keys import JobKeys

FROM: Final = datetime(2020, 1, 1, tzinfo=UTC)
UNTIL: Final = datetime(2120, 1, 1, tzinfo=UTC)
NAME: Final = "paceline-coordinator"
RECORD_BYTES: Final = 16 * 1024
"""The most that TLS brings at once."""


@dataclass(frozen=True, slots=True)
class Pair:
    certificate: str
    private_key: str


def pair_of(keys: JobKeys) -> Pair:
    """As PEM. The same keys always give the same pair."""
    private = Ed25519PrivateKey.from_private_bytes(keys.server_seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    public = private.public_key()
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(1)
        .not_valid_before(FROM)
        .not_valid_after(UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(private, None)
    )
    return Pair(
        certificate=certificate.public_bytes(Encoding.PEM).decode(),
        private_key=private.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        ).decode(),
    )


def pinned(certificate: str) -> ssl.SSLContext:
    """A client that talks to the holder of this certificate's key and to nobody else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(cadata=certificate)
    return context


def spare_buffers() -> None:
    """asyncio sets a buffer of 256 KiB aside for each TLS connection of the process, for as long as
    it is open; of a thousand jobs that would be most of the operator's memory."""
    SSLProtocol.max_size = RECORD_BYTES
