"""The certificate of /metrics from files: scrapers can check it, a renewal needs no restart."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID
from paceline_api.errors import PacelineError
from paceline_operator.cluster.tls import CertificateFiles

NAME = "paceline-operator.sys.svc"


def issue(folder: Path, serial: int, *, password: bytes = b"") -> None:
    """Write a new certificate and its key, each at once, as a Secret's volume does."""
    key = Ed25519PrivateKey.generate()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, None)
    )
    hidden = BestAvailableEncryption(password) if password else NoEncryption()
    for name, content in (
        ("tls.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, hidden)),
        ("tls.crt", certificate.public_bytes(Encoding.PEM)),
    ):
        draft = folder / f"{name}.draft"
        draft.write_bytes(content)
        draft.replace(folder / name)


@asynccontextmanager
async def served(files: CertificateFiles) -> AsyncIterator[int]:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0, ssl=files.context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def serial_seen(port: int, authority: Path | None = None) -> int:
    """Connect and return the serial number; an authority checks the certificate as scrapers do."""
    context = ssl.create_default_context(cafile=authority)
    if authority is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=NAME)
    raw = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return x509.load_der_x509_certificate(raw).serial_number


def test_a_scraper_that_knows_the_authority_can_check_the_operator(tmp_path: Path) -> None:
    issue(tmp_path, 1)

    async def scenario() -> None:
        async with served(CertificateFiles(tmp_path)) as port:
            assert await serial_seen(port, tmp_path / "tls.crt") == 1

    asyncio.run(scenario())


def test_a_renewed_certificate_is_served_without_a_restart(tmp_path: Path) -> None:
    issue(tmp_path, 1)

    async def scenario() -> None:
        async with served(CertificateFiles(tmp_path)) as port:
            assert await serial_seen(port) == 1
            for serial in (2, 3):
                issue(tmp_path, serial)
                assert await serial_seen(port, tmp_path / "tls.crt") == serial

    asyncio.run(scenario())


def test_half_a_renewal_keeps_the_last_certificate(tmp_path: Path) -> None:
    issue(tmp_path, 1)

    async def scenario() -> None:
        async with served(CertificateFiles(tmp_path)) as port:
            good = (tmp_path / "tls.key").read_bytes()
            (tmp_path / "tls.key").write_bytes(b"half of a k")
            assert await serial_seen(port) == 1
            (tmp_path / "tls.key").unlink()
            assert await serial_seen(port) == 1
            (tmp_path / "tls.key").write_bytes(good)
            assert await serial_seen(port) == 1
            issue(tmp_path, 2)
            assert await serial_seen(port) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("wrong", ["missing", "not a certificate", "another key", "password"])
def test_files_that_are_no_certificate_end_the_operator_by_name(tmp_path: Path, wrong: str) -> None:
    if wrong == "not a certificate":
        (tmp_path / "tls.crt").write_text("x")
        (tmp_path / "tls.key").write_text("x")
    elif wrong == "another key":
        issue(tmp_path, 1)
        key = (tmp_path / "tls.key").read_bytes()
        issue(tmp_path, 2)
        (tmp_path / "tls.key").write_bytes(key)
    elif wrong == "password":
        issue(tmp_path, 1, password=b"secret")
    with pytest.raises(PacelineError, match="has no certificate for /metrics") as raised:
        CertificateFiles(tmp_path)
    assert "tls.crt" in raised.value.hint
